//! librdmacm.

use super::*;

pub(crate) type rdma_cm_event_type = c_uint;
pub(crate) const RDMA_CM_EVENT_ADDR_RESOLVED: rdma_cm_event_type = 0;
pub(crate) const RDMA_CM_EVENT_ADDR_ERROR: rdma_cm_event_type = 1;
pub(crate) const RDMA_CM_EVENT_ROUTE_RESOLVED: rdma_cm_event_type = 2;
pub(crate) const RDMA_CM_EVENT_ROUTE_ERROR: rdma_cm_event_type = 3;
pub(crate) const RDMA_CM_EVENT_CONNECT_REQUEST: rdma_cm_event_type = 4;
pub(crate) const RDMA_CM_EVENT_CONNECT_RESPONSE: rdma_cm_event_type = 5;
pub(crate) const RDMA_CM_EVENT_CONNECT_ERROR: rdma_cm_event_type = 6;
pub(crate) const RDMA_CM_EVENT_UNREACHABLE: rdma_cm_event_type = 7;
pub(crate) const RDMA_CM_EVENT_REJECTED: rdma_cm_event_type = 8;
pub(crate) const RDMA_CM_EVENT_ESTABLISHED: rdma_cm_event_type = 9;
pub(crate) const RDMA_CM_EVENT_DISCONNECTED: rdma_cm_event_type = 10;
pub(crate) const RDMA_CM_EVENT_DEVICE_REMOVAL: rdma_cm_event_type = 11;
pub(crate) const RDMA_CM_EVENT_MULTICAST_JOIN: rdma_cm_event_type = 12;
pub(crate) const RDMA_CM_EVENT_MULTICAST_ERROR: rdma_cm_event_type = 13;
pub(crate) const RDMA_CM_EVENT_ADDR_CHANGE: rdma_cm_event_type = 14;
pub(crate) const RDMA_CM_EVENT_TIMEWAIT_EXIT: rdma_cm_event_type = 15;
pub(crate) const RDMA_CM_EVENT_ADDRINFO_RESOLVED: rdma_cm_event_type = 16;
pub(crate) const RDMA_CM_EVENT_ADDRINFO_ERROR: rdma_cm_event_type = 17;
pub(crate) const RDMA_CM_EVENT_USER: rdma_cm_event_type = 18;
pub(crate) const RDMA_CM_EVENT_INTERNAL: rdma_cm_event_type = 19;

pub(crate) type rdma_port_space = c_uint;
pub(crate) const RDMA_PS_IPOIB: rdma_port_space = 2;
pub(crate) const RDMA_PS_TCP: rdma_port_space = 262;
pub(crate) const RDMA_PS_UDP: rdma_port_space = 273;
pub(crate) const RDMA_PS_IB: rdma_port_space = 319;

pub(crate) const RDMA_MAX_RESP_RES: c_uint = 255;
pub(crate) const RDMA_MAX_INIT_DEPTH: c_uint = 255;
pub(crate) const RDMA_OPTION_ID: c_uint = 0;
pub(crate) const RDMA_OPTION_IB: c_uint = 1;
pub(crate) const RDMA_OPTION_ID_TOS: c_uint = 0;
pub(crate) const RDMA_OPTION_ID_REUSEADDR: c_uint = 1;
pub(crate) const RDMA_OPTION_ID_AFONLY: c_uint = 2;
pub(crate) const RDMA_OPTION_ID_ACK_TIMEOUT: c_uint = 3;
pub(crate) const RDMA_OPTION_IB_PATH: c_uint = 1;
pub(crate) const RDMA_SQSIZE: c_uint = 0;
pub(crate) const RDMA_RQSIZE: c_uint = 1;
pub(crate) const RDMA_INLINE: c_uint = 2;
pub(crate) const RDMA_ROUTE: c_uint = 4;

pub(crate) type rdma_cm_join_mc_attr_mask = c_uint;
pub(crate) const RDMA_CM_JOIN_MC_ATTR_ADDRESS: rdma_cm_join_mc_attr_mask = 1;
pub(crate) const RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS: rdma_cm_join_mc_attr_mask = 2;
pub(crate) const RDMA_CM_JOIN_MC_ATTR_RESERVED: rdma_cm_join_mc_attr_mask = 4;

pub(crate) type rdma_cm_mc_join_flags = c_uint;
pub(crate) const RDMA_MC_JOIN_FLAG_FULLMEMBER: rdma_cm_mc_join_flags = 0;
pub(crate) const RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER: rdma_cm_mc_join_flags = 1;
pub(crate) const RDMA_MC_JOIN_FLAG_RESERVED: rdma_cm_mc_join_flags = 2;

/// `AF_IB`.
pub(crate) const AF_IB: c_int = 27;

pub(crate) const RAI_PASSIVE: c_int = 1;
pub(crate) const RAI_NUMERICHOST: c_int = 2;
pub(crate) const RAI_NOROUTE: c_int = 4;
pub(crate) const RAI_FAMILY: c_int = 8;
pub(crate) const RAI_SA: c_int = 16;
pub(crate) const RAI_DNS: c_int = 32;

//! Device and port.

use super::*;

pub(crate) type ibv_gid_type = c_uint;
pub(crate) const IBV_GID_TYPE_IB: ibv_gid_type = 0;
pub(crate) const IBV_GID_TYPE_ROCE_V1: ibv_gid_type = 1;
pub(crate) const IBV_GID_TYPE_ROCE_V2: ibv_gid_type = 2;

pub(crate) type ibv_node_type = c_int;
pub(crate) const IBV_NODE_UNKNOWN: ibv_node_type = -1;
pub(crate) const IBV_NODE_CA: ibv_node_type = 1;
pub(crate) const IBV_NODE_SWITCH: ibv_node_type = 2;
pub(crate) const IBV_NODE_ROUTER: ibv_node_type = 3;
pub(crate) const IBV_NODE_RNIC: ibv_node_type = 4;
pub(crate) const IBV_NODE_USNIC: ibv_node_type = 5;
pub(crate) const IBV_NODE_USNIC_UDP: ibv_node_type = 6;
pub(crate) const IBV_NODE_UNSPECIFIED: ibv_node_type = 7;

pub(crate) type ibv_transport_type = c_int;
pub(crate) const IBV_TRANSPORT_UNKNOWN: ibv_transport_type = -1;
pub(crate) const IBV_TRANSPORT_IB: ibv_transport_type = 0;
pub(crate) const IBV_TRANSPORT_IWARP: ibv_transport_type = 1;
pub(crate) const IBV_TRANSPORT_USNIC: ibv_transport_type = 2;
pub(crate) const IBV_TRANSPORT_USNIC_UDP: ibv_transport_type = 3;
pub(crate) const IBV_TRANSPORT_UNSPECIFIED: ibv_transport_type = 4;

pub(crate) type ibv_device_cap_flags = c_uint;
pub(crate) const IBV_DEVICE_RESIZE_MAX_WR: ibv_device_cap_flags = 1;
pub(crate) const IBV_DEVICE_BAD_PKEY_CNTR: ibv_device_cap_flags = 2;
pub(crate) const IBV_DEVICE_BAD_QKEY_CNTR: ibv_device_cap_flags = 4;
pub(crate) const IBV_DEVICE_RAW_MULTI: ibv_device_cap_flags = 8;
pub(crate) const IBV_DEVICE_AUTO_PATH_MIG: ibv_device_cap_flags = 16;
pub(crate) const IBV_DEVICE_CHANGE_PHY_PORT: ibv_device_cap_flags = 32;
pub(crate) const IBV_DEVICE_UD_AV_PORT_ENFORCE: ibv_device_cap_flags = 64;
pub(crate) const IBV_DEVICE_CURR_QP_STATE_MOD: ibv_device_cap_flags = 128;
pub(crate) const IBV_DEVICE_SHUTDOWN_PORT: ibv_device_cap_flags = 256;
pub(crate) const IBV_DEVICE_INIT_TYPE: ibv_device_cap_flags = 512;
pub(crate) const IBV_DEVICE_PORT_ACTIVE_EVENT: ibv_device_cap_flags = 1024;
pub(crate) const IBV_DEVICE_SYS_IMAGE_GUID: ibv_device_cap_flags = 2048;
pub(crate) const IBV_DEVICE_RC_RNR_NAK_GEN: ibv_device_cap_flags = 4096;
pub(crate) const IBV_DEVICE_SRQ_RESIZE: ibv_device_cap_flags = 8192;
pub(crate) const IBV_DEVICE_N_NOTIFY_CQ: ibv_device_cap_flags = 16384;
pub(crate) const IBV_DEVICE_MEM_WINDOW: ibv_device_cap_flags = 131072;
pub(crate) const IBV_DEVICE_UD_IP_CSUM: ibv_device_cap_flags = 262144;
pub(crate) const IBV_DEVICE_XRC: ibv_device_cap_flags = 1048576;
pub(crate) const IBV_DEVICE_MEM_MGT_EXTENSIONS: ibv_device_cap_flags = 2097152;
pub(crate) const IBV_DEVICE_MEM_WINDOW_TYPE_2A: ibv_device_cap_flags = 8388608;
pub(crate) const IBV_DEVICE_MEM_WINDOW_TYPE_2B: ibv_device_cap_flags = 16777216;
pub(crate) const IBV_DEVICE_RC_IP_CSUM: ibv_device_cap_flags = 33554432;
pub(crate) const IBV_DEVICE_RAW_IP_CSUM: ibv_device_cap_flags = 67108864;
pub(crate) const IBV_DEVICE_MANAGED_FLOW_STEERING: ibv_device_cap_flags = 536870912;

pub(crate) type ibv_fork_status = c_uint;
pub(crate) const IBV_FORK_DISABLED: ibv_fork_status = 0;
pub(crate) const IBV_FORK_ENABLED: ibv_fork_status = 1;
pub(crate) const IBV_FORK_UNNEEDED: ibv_fork_status = 2;

pub(crate) type ibv_atomic_cap = c_uint;
pub(crate) const IBV_ATOMIC_NONE: ibv_atomic_cap = 0;
pub(crate) const IBV_ATOMIC_HCA: ibv_atomic_cap = 1;
pub(crate) const IBV_ATOMIC_GLOB: ibv_atomic_cap = 2;

pub(crate) type ibv_odp_general_caps = c_uint;
pub(crate) const IBV_ODP_SUPPORT: ibv_odp_general_caps = 1;
pub(crate) const IBV_ODP_SUPPORT_IMPLICIT: ibv_odp_general_caps = 2;

pub(crate) type ibv_odp_transport_cap_bits = c_uint;
pub(crate) const IBV_ODP_SUPPORT_SEND: ibv_odp_transport_cap_bits = 1;
pub(crate) const IBV_ODP_SUPPORT_RECV: ibv_odp_transport_cap_bits = 2;
pub(crate) const IBV_ODP_SUPPORT_WRITE: ibv_odp_transport_cap_bits = 4;
pub(crate) const IBV_ODP_SUPPORT_READ: ibv_odp_transport_cap_bits = 8;
pub(crate) const IBV_ODP_SUPPORT_ATOMIC: ibv_odp_transport_cap_bits = 16;
pub(crate) const IBV_ODP_SUPPORT_SRQ_RECV: ibv_odp_transport_cap_bits = 32;
pub(crate) const IBV_ODP_SUPPORT_FLUSH: ibv_odp_transport_cap_bits = 64;
pub(crate) const IBV_ODP_SUPPORT_ATOMIC_WRITE: ibv_odp_transport_cap_bits = 128;

pub(crate) type ibv_raw_packet_caps = c_uint;
pub(crate) const IBV_RAW_PACKET_CAP_CVLAN_STRIPPING: ibv_raw_packet_caps = 1;
pub(crate) const IBV_RAW_PACKET_CAP_SCATTER_FCS: ibv_raw_packet_caps = 2;
pub(crate) const IBV_RAW_PACKET_CAP_IP_CSUM: ibv_raw_packet_caps = 4;
pub(crate) const IBV_RAW_PACKET_CAP_DELAY_DROP: ibv_raw_packet_caps = 8;

pub(crate) type ibv_tm_cap_flags = c_uint;
pub(crate) const IBV_TM_CAP_RC: ibv_tm_cap_flags = 1;

pub(crate) type ibv_pci_atomic_op_size = c_uint;
pub(crate) const IBV_PCI_ATOMIC_OPERATION_4_BYTE_SIZE_SUP: ibv_pci_atomic_op_size = 1;
pub(crate) const IBV_PCI_ATOMIC_OPERATION_8_BYTE_SIZE_SUP: ibv_pci_atomic_op_size = 2;
pub(crate) const IBV_PCI_ATOMIC_OPERATION_16_BYTE_SIZE_SUP: ibv_pci_atomic_op_size = 4;

pub(crate) type ibv_mtu = c_uint;
pub(crate) const IBV_MTU_256: ibv_mtu = 1;
pub(crate) const IBV_MTU_512: ibv_mtu = 2;
pub(crate) const IBV_MTU_1024: ibv_mtu = 3;
pub(crate) const IBV_MTU_2048: ibv_mtu = 4;
pub(crate) const IBV_MTU_4096: ibv_mtu = 5;

pub(crate) type ibv_port_state = c_uint;
pub(crate) const IBV_PORT_NOP: ibv_port_state = 0;
pub(crate) const IBV_PORT_DOWN: ibv_port_state = 1;
pub(crate) const IBV_PORT_INIT: ibv_port_state = 2;
pub(crate) const IBV_PORT_ARMED: ibv_port_state = 3;
pub(crate) const IBV_PORT_ACTIVE: ibv_port_state = 4;
pub(crate) const IBV_PORT_ACTIVE_DEFER: ibv_port_state = 5;

pub(crate) const IBV_LINK_LAYER_UNSPECIFIED: c_uint = 0;
pub(crate) const IBV_LINK_LAYER_INFINIBAND: c_uint = 1;
pub(crate) const IBV_LINK_LAYER_ETHERNET: c_uint = 2;
pub(crate) const IBV_SYSFS_NAME_MAX: c_uint = 64;
pub(crate) const IBV_SYSFS_PATH_MAX: c_uint = 256;

pub(crate) type ibv_port_cap_flags = c_uint;
pub(crate) const IBV_PORT_SM: ibv_port_cap_flags = 2;
pub(crate) const IBV_PORT_NOTICE_SUP: ibv_port_cap_flags = 4;
pub(crate) const IBV_PORT_TRAP_SUP: ibv_port_cap_flags = 8;
pub(crate) const IBV_PORT_OPT_IPD_SUP: ibv_port_cap_flags = 16;
pub(crate) const IBV_PORT_AUTO_MIGR_SUP: ibv_port_cap_flags = 32;
pub(crate) const IBV_PORT_SL_MAP_SUP: ibv_port_cap_flags = 64;
pub(crate) const IBV_PORT_MKEY_NVRAM: ibv_port_cap_flags = 128;
pub(crate) const IBV_PORT_PKEY_NVRAM: ibv_port_cap_flags = 256;
pub(crate) const IBV_PORT_LED_INFO_SUP: ibv_port_cap_flags = 512;
pub(crate) const IBV_PORT_SYS_IMAGE_GUID_SUP: ibv_port_cap_flags = 2048;
pub(crate) const IBV_PORT_PKEY_SW_EXT_PORT_TRAP_SUP: ibv_port_cap_flags = 4096;
pub(crate) const IBV_PORT_EXTENDED_SPEEDS_SUP: ibv_port_cap_flags = 16384;
pub(crate) const IBV_PORT_CAP_MASK2_SUP: ibv_port_cap_flags = 32768;
pub(crate) const IBV_PORT_CM_SUP: ibv_port_cap_flags = 65536;
pub(crate) const IBV_PORT_SNMP_TUNNEL_SUP: ibv_port_cap_flags = 131072;
pub(crate) const IBV_PORT_REINIT_SUP: ibv_port_cap_flags = 262144;
pub(crate) const IBV_PORT_DEVICE_MGMT_SUP: ibv_port_cap_flags = 524288;
pub(crate) const IBV_PORT_VENDOR_CLASS_SUP: ibv_port_cap_flags = 1048576;
pub(crate) const IBV_PORT_DR_NOTICE_SUP: ibv_port_cap_flags = 2097152;
pub(crate) const IBV_PORT_CAP_MASK_NOTICE_SUP: ibv_port_cap_flags = 4194304;
pub(crate) const IBV_PORT_BOOT_MGMT_SUP: ibv_port_cap_flags = 8388608;
pub(crate) const IBV_PORT_LINK_LATENCY_SUP: ibv_port_cap_flags = 16777216;
pub(crate) const IBV_PORT_CLIENT_REG_SUP: ibv_port_cap_flags = 33554432;
pub(crate) const IBV_PORT_IP_BASED_GIDS: ibv_port_cap_flags = 67108864;

pub(crate) type ibv_port_cap_flags2 = c_uint;
pub(crate) const IBV_PORT_SET_NODE_DESC_SUP: ibv_port_cap_flags2 = 1;
pub(crate) const IBV_PORT_INFO_EXT_SUP: ibv_port_cap_flags2 = 2;
pub(crate) const IBV_PORT_VIRT_SUP: ibv_port_cap_flags2 = 4;
pub(crate) const IBV_PORT_SWITCH_PORT_STATE_TABLE_SUP: ibv_port_cap_flags2 = 8;
pub(crate) const IBV_PORT_LINK_WIDTH_2X_SUP: ibv_port_cap_flags2 = 16;
pub(crate) const IBV_PORT_LINK_SPEED_HDR_SUP: ibv_port_cap_flags2 = 32;
pub(crate) const IBV_PORT_LINK_SPEED_NDR_SUP: ibv_port_cap_flags2 = 1024;
pub(crate) const IBV_PORT_LINK_SPEED_XDR_SUP: ibv_port_cap_flags2 = 4096;

pub(crate) type ibv_values_mask = c_uint;
pub(crate) const IBV_VALUES_MASK_RAW_CLOCK: ibv_values_mask = 1;
pub(crate) const IBV_VALUES_MASK_RESERVED: ibv_values_mask = 2;

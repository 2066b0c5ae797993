//! Completion queues, completions and asynchronous events.

use super::*;

pub(crate) type ibv_event_type = c_uint;
pub(crate) const IBV_EVENT_CQ_ERR: ibv_event_type = 0;
pub(crate) const IBV_EVENT_QP_FATAL: ibv_event_type = 1;
pub(crate) const IBV_EVENT_QP_REQ_ERR: ibv_event_type = 2;
pub(crate) const IBV_EVENT_QP_ACCESS_ERR: ibv_event_type = 3;
pub(crate) const IBV_EVENT_COMM_EST: ibv_event_type = 4;
pub(crate) const IBV_EVENT_SQ_DRAINED: ibv_event_type = 5;
pub(crate) const IBV_EVENT_PATH_MIG: ibv_event_type = 6;
pub(crate) const IBV_EVENT_PATH_MIG_ERR: ibv_event_type = 7;
pub(crate) const IBV_EVENT_DEVICE_FATAL: ibv_event_type = 8;
pub(crate) const IBV_EVENT_PORT_ACTIVE: ibv_event_type = 9;
pub(crate) const IBV_EVENT_PORT_ERR: ibv_event_type = 10;
pub(crate) const IBV_EVENT_LID_CHANGE: ibv_event_type = 11;
pub(crate) const IBV_EVENT_PKEY_CHANGE: ibv_event_type = 12;
pub(crate) const IBV_EVENT_SM_CHANGE: ibv_event_type = 13;
pub(crate) const IBV_EVENT_SRQ_ERR: ibv_event_type = 14;
pub(crate) const IBV_EVENT_SRQ_LIMIT_REACHED: ibv_event_type = 15;
pub(crate) const IBV_EVENT_QP_LAST_WQE_REACHED: ibv_event_type = 16;
pub(crate) const IBV_EVENT_CLIENT_REREGISTER: ibv_event_type = 17;
pub(crate) const IBV_EVENT_GID_CHANGE: ibv_event_type = 18;
pub(crate) const IBV_EVENT_WQ_FATAL: ibv_event_type = 19;
pub(crate) const IBV_EVENT_DEVICE_SPEED_CHANGE: ibv_event_type = 20;

pub(crate) type ibv_wc_status = c_uint;
pub(crate) const IBV_WC_SUCCESS: ibv_wc_status = 0;
pub(crate) const IBV_WC_LOC_LEN_ERR: ibv_wc_status = 1;
pub(crate) const IBV_WC_LOC_QP_OP_ERR: ibv_wc_status = 2;
pub(crate) const IBV_WC_LOC_EEC_OP_ERR: ibv_wc_status = 3;
pub(crate) const IBV_WC_LOC_PROT_ERR: ibv_wc_status = 4;
pub(crate) const IBV_WC_WR_FLUSH_ERR: ibv_wc_status = 5;
pub(crate) const IBV_WC_MW_BIND_ERR: ibv_wc_status = 6;
pub(crate) const IBV_WC_BAD_RESP_ERR: ibv_wc_status = 7;
pub(crate) const IBV_WC_LOC_ACCESS_ERR: ibv_wc_status = 8;
pub(crate) const IBV_WC_REM_INV_REQ_ERR: ibv_wc_status = 9;
pub(crate) const IBV_WC_REM_ACCESS_ERR: ibv_wc_status = 10;
pub(crate) const IBV_WC_REM_OP_ERR: ibv_wc_status = 11;
pub(crate) const IBV_WC_RETRY_EXC_ERR: ibv_wc_status = 12;
pub(crate) const IBV_WC_RNR_RETRY_EXC_ERR: ibv_wc_status = 13;
pub(crate) const IBV_WC_LOC_RDD_VIOL_ERR: ibv_wc_status = 14;
pub(crate) const IBV_WC_REM_INV_RD_REQ_ERR: ibv_wc_status = 15;
pub(crate) const IBV_WC_REM_ABORT_ERR: ibv_wc_status = 16;
pub(crate) const IBV_WC_INV_EECN_ERR: ibv_wc_status = 17;
pub(crate) const IBV_WC_INV_EEC_STATE_ERR: ibv_wc_status = 18;
pub(crate) const IBV_WC_FATAL_ERR: ibv_wc_status = 19;
pub(crate) const IBV_WC_RESP_TIMEOUT_ERR: ibv_wc_status = 20;
pub(crate) const IBV_WC_GENERAL_ERR: ibv_wc_status = 21;
pub(crate) const IBV_WC_TM_ERR: ibv_wc_status = 22;
pub(crate) const IBV_WC_TM_RNDV_INCOMPLETE: ibv_wc_status = 23;

pub(crate) type ibv_wc_opcode = c_uint;
pub(crate) const IBV_WC_SEND: ibv_wc_opcode = 0;
pub(crate) const IBV_WC_RDMA_WRITE: ibv_wc_opcode = 1;
pub(crate) const IBV_WC_RDMA_READ: ibv_wc_opcode = 2;
pub(crate) const IBV_WC_COMP_SWAP: ibv_wc_opcode = 3;
pub(crate) const IBV_WC_FETCH_ADD: ibv_wc_opcode = 4;
pub(crate) const IBV_WC_BIND_MW: ibv_wc_opcode = 5;
pub(crate) const IBV_WC_LOCAL_INV: ibv_wc_opcode = 6;
pub(crate) const IBV_WC_TSO: ibv_wc_opcode = 7;
pub(crate) const IBV_WC_FLUSH: ibv_wc_opcode = 8;
pub(crate) const IBV_WC_ATOMIC_WRITE: ibv_wc_opcode = 9;
pub(crate) const IBV_WC_RECV: ibv_wc_opcode = 128;
pub(crate) const IBV_WC_RECV_RDMA_WITH_IMM: ibv_wc_opcode = 129;
pub(crate) const IBV_WC_TM_ADD: ibv_wc_opcode = 130;
pub(crate) const IBV_WC_TM_DEL: ibv_wc_opcode = 131;
pub(crate) const IBV_WC_TM_SYNC: ibv_wc_opcode = 132;
pub(crate) const IBV_WC_TM_RECV: ibv_wc_opcode = 133;
pub(crate) const IBV_WC_TM_NO_TAG: ibv_wc_opcode = 134;
pub(crate) const IBV_WC_DRIVER1: ibv_wc_opcode = 135;
pub(crate) const IBV_WC_DRIVER2: ibv_wc_opcode = 136;
pub(crate) const IBV_WC_DRIVER3: ibv_wc_opcode = 137;

pub(crate) const IBV_WC_IP_CSUM_OK_SHIFT: c_uint = 2;
pub(crate) const IBV_WC_STANDARD_FLAGS: c_uint = 127;
pub(crate) const IBV_CREATE_CQ_SUP_WC_FLAGS: c_uint = 4095;

pub(crate) type ibv_create_cq_wc_flags = c_uint;
pub(crate) const IBV_WC_EX_WITH_BYTE_LEN: ibv_create_cq_wc_flags = 1;
pub(crate) const IBV_WC_EX_WITH_IMM: ibv_create_cq_wc_flags = 2;
pub(crate) const IBV_WC_EX_WITH_QP_NUM: ibv_create_cq_wc_flags = 4;
pub(crate) const IBV_WC_EX_WITH_SRC_QP: ibv_create_cq_wc_flags = 8;
pub(crate) const IBV_WC_EX_WITH_SLID: ibv_create_cq_wc_flags = 16;
pub(crate) const IBV_WC_EX_WITH_SL: ibv_create_cq_wc_flags = 32;
pub(crate) const IBV_WC_EX_WITH_DLID_PATH_BITS: ibv_create_cq_wc_flags = 64;
pub(crate) const IBV_WC_EX_WITH_COMPLETION_TIMESTAMP: ibv_create_cq_wc_flags = 128;
pub(crate) const IBV_WC_EX_WITH_CVLAN: ibv_create_cq_wc_flags = 256;
pub(crate) const IBV_WC_EX_WITH_FLOW_TAG: ibv_create_cq_wc_flags = 512;
pub(crate) const IBV_WC_EX_WITH_TM_INFO: ibv_create_cq_wc_flags = 1024;
pub(crate) const IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK: ibv_create_cq_wc_flags = 2048;

pub(crate) type ibv_wc_flags = c_uint;
pub(crate) const IBV_WC_GRH: ibv_wc_flags = 1;
pub(crate) const IBV_WC_WITH_IMM: ibv_wc_flags = 2;
pub(crate) const IBV_WC_IP_CSUM_OK: ibv_wc_flags = 4;
pub(crate) const IBV_WC_WITH_INV: ibv_wc_flags = 8;
pub(crate) const IBV_WC_TM_SYNC_REQ: ibv_wc_flags = 16;
pub(crate) const IBV_WC_TM_MATCH: ibv_wc_flags = 32;
pub(crate) const IBV_WC_TM_DATA_VALID: ibv_wc_flags = 64;

pub(crate) type ibv_cq_attr_mask = c_uint;
pub(crate) const IBV_CQ_ATTR_MODERATE: ibv_cq_attr_mask = 1;
pub(crate) const IBV_CQ_ATTR_RESERVED: ibv_cq_attr_mask = 2;

pub(crate) type ibv_cq_init_attr_mask = c_uint;
pub(crate) const IBV_CQ_INIT_ATTR_MASK_FLAGS: ibv_cq_init_attr_mask = 1;
pub(crate) const IBV_CQ_INIT_ATTR_MASK_PD: ibv_cq_init_attr_mask = 2;

pub(crate) type ibv_create_cq_attr_flags = c_uint;
pub(crate) const IBV_CREATE_CQ_ATTR_SINGLE_THREADED: ibv_create_cq_attr_flags = 1;
pub(crate) const IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN: ibv_create_cq_attr_flags = 2;

//! Shared receive queues and work queues.

use super::*;

pub(crate) type ibv_srq_attr_mask = c_uint;
pub(crate) const IBV_SRQ_MAX_WR: ibv_srq_attr_mask = 1;
pub(crate) const IBV_SRQ_LIMIT: ibv_srq_attr_mask = 2;

pub(crate) type ibv_srq_type = c_uint;
pub(crate) const IBV_SRQT_BASIC: ibv_srq_type = 0;
pub(crate) const IBV_SRQT_XRC: ibv_srq_type = 1;
pub(crate) const IBV_SRQT_TM: ibv_srq_type = 2;

pub(crate) type ibv_srq_init_attr_mask = c_uint;
pub(crate) const IBV_SRQ_INIT_ATTR_TYPE: ibv_srq_init_attr_mask = 1;
pub(crate) const IBV_SRQ_INIT_ATTR_PD: ibv_srq_init_attr_mask = 2;
pub(crate) const IBV_SRQ_INIT_ATTR_XRCD: ibv_srq_init_attr_mask = 4;
pub(crate) const IBV_SRQ_INIT_ATTR_CQ: ibv_srq_init_attr_mask = 8;
pub(crate) const IBV_SRQ_INIT_ATTR_TM: ibv_srq_init_attr_mask = 16;
pub(crate) const IBV_SRQ_INIT_ATTR_RESERVED: ibv_srq_init_attr_mask = 32;

pub(crate) type ibv_wq_type = c_uint;
pub(crate) const IBV_WQT_RQ: ibv_wq_type = 0;

pub(crate) type ibv_wq_init_attr_mask = c_uint;
pub(crate) const IBV_WQ_INIT_ATTR_FLAGS: ibv_wq_init_attr_mask = 1;
pub(crate) const IBV_WQ_INIT_ATTR_RESERVED: ibv_wq_init_attr_mask = 2;

pub(crate) type ibv_wq_flags = c_uint;
pub(crate) const IBV_WQ_FLAGS_CVLAN_STRIPPING: ibv_wq_flags = 1;
pub(crate) const IBV_WQ_FLAGS_SCATTER_FCS: ibv_wq_flags = 2;
pub(crate) const IBV_WQ_FLAGS_DELAY_DROP: ibv_wq_flags = 4;
pub(crate) const IBV_WQ_FLAGS_PCI_WRITE_END_PADDING: ibv_wq_flags = 8;
pub(crate) const IBV_WQ_FLAGS_RESERVED: ibv_wq_flags = 16;

pub(crate) type ibv_wq_state = c_uint;
pub(crate) const IBV_WQS_RESET: ibv_wq_state = 0;
pub(crate) const IBV_WQS_RDY: ibv_wq_state = 1;
pub(crate) const IBV_WQS_ERR: ibv_wq_state = 2;
pub(crate) const IBV_WQS_UNKNOWN: ibv_wq_state = 3;

pub(crate) type ibv_wq_attr_mask = c_uint;
pub(crate) const IBV_WQ_ATTR_STATE: ibv_wq_attr_mask = 1;
pub(crate) const IBV_WQ_ATTR_CURR_STATE: ibv_wq_attr_mask = 2;
pub(crate) const IBV_WQ_ATTR_FLAGS: ibv_wq_attr_mask = 4;
pub(crate) const IBV_WQ_ATTR_RESERVED: ibv_wq_attr_mask = 8;

pub(crate) type ibv_ind_table_init_attr_mask = c_uint;
pub(crate) const IBV_CREATE_IND_TABLE_RESERVED: ibv_ind_table_init_attr_mask = 1;

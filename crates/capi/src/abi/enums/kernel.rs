//! Numbers of the kernel's interface that public headers carry.

use super::*;

pub(crate) const IB_USER_VERBS_EX_CMD_QUERY_DEVICE: c_uint = 1;
pub(crate) const IB_USER_VERBS_EX_CMD_CREATE_CQ: c_uint = 18;
pub(crate) const IB_USER_VERBS_EX_CMD_CREATE_QP: c_uint = 24;
pub(crate) const IB_USER_VERBS_EX_CMD_MODIFY_QP: c_uint = 26;
pub(crate) const IB_USER_VERBS_EX_CMD_CREATE_FLOW: c_uint = 50;
pub(crate) const IB_USER_VERBS_EX_CMD_DESTROY_FLOW: c_uint = 51;
pub(crate) const IB_USER_VERBS_EX_CMD_CREATE_WQ: c_uint = 52;
pub(crate) const IB_USER_VERBS_EX_CMD_MODIFY_WQ: c_uint = 53;
pub(crate) const IB_USER_VERBS_EX_CMD_DESTROY_WQ: c_uint = 54;
pub(crate) const IB_USER_VERBS_EX_CMD_CREATE_RWQ_IND_TBL: c_uint = 55;
pub(crate) const IB_USER_VERBS_EX_CMD_DESTROY_RWQ_IND_TBL: c_uint = 56;
pub(crate) const IB_USER_VERBS_EX_CMD_MODIFY_CQ: c_uint = 57;
pub(crate) const IB_UVERBS_CREATE_QP_SUP_COMP_MASK: c_uint = 1;

pub(crate) type ib_placement_type = c_uint;
pub(crate) const IB_FLUSH_GLOBAL: ib_placement_type = 1;
pub(crate) const IB_FLUSH_PERSISTENT: ib_placement_type = 2;

pub(crate) type ib_selectivity_level = c_uint;
pub(crate) const IB_FLUSH_RANGE: ib_selectivity_level = 0;
pub(crate) const IB_FLUSH_MR: ib_selectivity_level = 1;

pub(crate) type rdma_driver_id = c_uint;
pub(crate) const RDMA_DRIVER_UNKNOWN: rdma_driver_id = 0;
pub(crate) const RDMA_DRIVER_MLX5: rdma_driver_id = 1;
pub(crate) const RDMA_DRIVER_MLX4: rdma_driver_id = 2;
pub(crate) const RDMA_DRIVER_CXGB3: rdma_driver_id = 3;
pub(crate) const RDMA_DRIVER_CXGB4: rdma_driver_id = 4;
pub(crate) const RDMA_DRIVER_MTHCA: rdma_driver_id = 5;
pub(crate) const RDMA_DRIVER_BNXT_RE: rdma_driver_id = 6;
pub(crate) const RDMA_DRIVER_OCRDMA: rdma_driver_id = 7;
pub(crate) const RDMA_DRIVER_NES: rdma_driver_id = 8;
pub(crate) const RDMA_DRIVER_I40IW: rdma_driver_id = 9;
pub(crate) const RDMA_DRIVER_IRDMA: rdma_driver_id = 9;
pub(crate) const RDMA_DRIVER_VMW_PVRDMA: rdma_driver_id = 10;
pub(crate) const RDMA_DRIVER_QEDR: rdma_driver_id = 11;
pub(crate) const RDMA_DRIVER_HNS: rdma_driver_id = 12;
pub(crate) const RDMA_DRIVER_USNIC: rdma_driver_id = 13;
pub(crate) const RDMA_DRIVER_RXE: rdma_driver_id = 14;
pub(crate) const RDMA_DRIVER_HFI1: rdma_driver_id = 15;
pub(crate) const RDMA_DRIVER_QIB: rdma_driver_id = 16;
pub(crate) const RDMA_DRIVER_EFA: rdma_driver_id = 17;
pub(crate) const RDMA_DRIVER_SIW: rdma_driver_id = 18;
pub(crate) const RDMA_DRIVER_ERDMA: rdma_driver_id = 19;
pub(crate) const RDMA_DRIVER_MANA: rdma_driver_id = 20;

//! Queue pairs and work requests.

use super::*;

pub(crate) type ibv_rx_hash_function_flags = c_uint;
pub(crate) const IBV_RX_HASH_FUNC_TOEPLITZ: ibv_rx_hash_function_flags = 1;

pub(crate) type ibv_rx_hash_fields = c_uint;
pub(crate) const IBV_RX_HASH_SRC_IPV4: ibv_rx_hash_fields = 1;
pub(crate) const IBV_RX_HASH_DST_IPV4: ibv_rx_hash_fields = 2;
pub(crate) const IBV_RX_HASH_SRC_IPV6: ibv_rx_hash_fields = 4;
pub(crate) const IBV_RX_HASH_DST_IPV6: ibv_rx_hash_fields = 8;
pub(crate) const IBV_RX_HASH_SRC_PORT_TCP: ibv_rx_hash_fields = 16;
pub(crate) const IBV_RX_HASH_DST_PORT_TCP: ibv_rx_hash_fields = 32;
pub(crate) const IBV_RX_HASH_SRC_PORT_UDP: ibv_rx_hash_fields = 64;
pub(crate) const IBV_RX_HASH_DST_PORT_UDP: ibv_rx_hash_fields = 128;
pub(crate) const IBV_RX_HASH_IPSEC_SPI: ibv_rx_hash_fields = 256;
pub(crate) const IBV_RX_HASH_INNER: ibv_rx_hash_fields = 2147483648;

pub(crate) type ibv_rate = c_uint;
pub(crate) const IBV_RATE_MAX: ibv_rate = 0;
pub(crate) const IBV_RATE_2_5_GBPS: ibv_rate = 2;
pub(crate) const IBV_RATE_5_GBPS: ibv_rate = 5;
pub(crate) const IBV_RATE_10_GBPS: ibv_rate = 3;
pub(crate) const IBV_RATE_20_GBPS: ibv_rate = 6;
pub(crate) const IBV_RATE_30_GBPS: ibv_rate = 4;
pub(crate) const IBV_RATE_40_GBPS: ibv_rate = 7;
pub(crate) const IBV_RATE_60_GBPS: ibv_rate = 8;
pub(crate) const IBV_RATE_80_GBPS: ibv_rate = 9;
pub(crate) const IBV_RATE_120_GBPS: ibv_rate = 10;
pub(crate) const IBV_RATE_14_GBPS: ibv_rate = 11;
pub(crate) const IBV_RATE_56_GBPS: ibv_rate = 12;
pub(crate) const IBV_RATE_112_GBPS: ibv_rate = 13;
pub(crate) const IBV_RATE_168_GBPS: ibv_rate = 14;
pub(crate) const IBV_RATE_25_GBPS: ibv_rate = 15;
pub(crate) const IBV_RATE_100_GBPS: ibv_rate = 16;
pub(crate) const IBV_RATE_200_GBPS: ibv_rate = 17;
pub(crate) const IBV_RATE_300_GBPS: ibv_rate = 18;
pub(crate) const IBV_RATE_28_GBPS: ibv_rate = 19;
pub(crate) const IBV_RATE_50_GBPS: ibv_rate = 20;
pub(crate) const IBV_RATE_400_GBPS: ibv_rate = 21;
pub(crate) const IBV_RATE_600_GBPS: ibv_rate = 22;
pub(crate) const IBV_RATE_800_GBPS: ibv_rate = 23;
pub(crate) const IBV_RATE_1200_GBPS: ibv_rate = 24;

pub(crate) type ibv_qp_type = c_uint;
pub(crate) const IBV_QPT_RC: ibv_qp_type = 2;
pub(crate) const IBV_QPT_UC: ibv_qp_type = 3;
pub(crate) const IBV_QPT_UD: ibv_qp_type = 4;
pub(crate) const IBV_QPT_RAW_PACKET: ibv_qp_type = 8;
pub(crate) const IBV_QPT_XRC_SEND: ibv_qp_type = 9;
pub(crate) const IBV_QPT_XRC_RECV: ibv_qp_type = 10;
pub(crate) const IBV_QPT_DRIVER: ibv_qp_type = 255;

pub(crate) type ibv_qp_init_attr_mask = c_uint;
pub(crate) const IBV_QP_INIT_ATTR_PD: ibv_qp_init_attr_mask = 1;
pub(crate) const IBV_QP_INIT_ATTR_XRCD: ibv_qp_init_attr_mask = 2;
pub(crate) const IBV_QP_INIT_ATTR_CREATE_FLAGS: ibv_qp_init_attr_mask = 4;
pub(crate) const IBV_QP_INIT_ATTR_MAX_TSO_HEADER: ibv_qp_init_attr_mask = 8;
pub(crate) const IBV_QP_INIT_ATTR_IND_TABLE: ibv_qp_init_attr_mask = 16;
pub(crate) const IBV_QP_INIT_ATTR_RX_HASH: ibv_qp_init_attr_mask = 32;
pub(crate) const IBV_QP_INIT_ATTR_SEND_OPS_FLAGS: ibv_qp_init_attr_mask = 64;

pub(crate) type ibv_qp_create_flags = c_uint;
pub(crate) const IBV_QP_CREATE_BLOCK_SELF_MCAST_LB: ibv_qp_create_flags = 2;
pub(crate) const IBV_QP_CREATE_SCATTER_FCS: ibv_qp_create_flags = 256;
pub(crate) const IBV_QP_CREATE_CVLAN_STRIPPING: ibv_qp_create_flags = 512;
pub(crate) const IBV_QP_CREATE_SOURCE_QPN: ibv_qp_create_flags = 1024;
pub(crate) const IBV_QP_CREATE_PCI_WRITE_END_PADDING: ibv_qp_create_flags = 2048;

pub(crate) type ibv_qp_create_send_ops_flags = c_uint;
pub(crate) const IBV_QP_EX_WITH_RDMA_WRITE: ibv_qp_create_send_ops_flags = 1;
pub(crate) const IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM: ibv_qp_create_send_ops_flags = 2;
pub(crate) const IBV_QP_EX_WITH_SEND: ibv_qp_create_send_ops_flags = 4;
pub(crate) const IBV_QP_EX_WITH_SEND_WITH_IMM: ibv_qp_create_send_ops_flags = 8;
pub(crate) const IBV_QP_EX_WITH_RDMA_READ: ibv_qp_create_send_ops_flags = 16;
pub(crate) const IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP: ibv_qp_create_send_ops_flags = 32;
pub(crate) const IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD: ibv_qp_create_send_ops_flags = 64;
pub(crate) const IBV_QP_EX_WITH_LOCAL_INV: ibv_qp_create_send_ops_flags = 128;
pub(crate) const IBV_QP_EX_WITH_BIND_MW: ibv_qp_create_send_ops_flags = 256;
pub(crate) const IBV_QP_EX_WITH_SEND_WITH_INV: ibv_qp_create_send_ops_flags = 512;
pub(crate) const IBV_QP_EX_WITH_TSO: ibv_qp_create_send_ops_flags = 1024;
pub(crate) const IBV_QP_EX_WITH_FLUSH: ibv_qp_create_send_ops_flags = 2048;
pub(crate) const IBV_QP_EX_WITH_ATOMIC_WRITE: ibv_qp_create_send_ops_flags = 4096;

pub(crate) type ibv_qp_open_attr_mask = c_uint;
pub(crate) const IBV_QP_OPEN_ATTR_NUM: ibv_qp_open_attr_mask = 1;
pub(crate) const IBV_QP_OPEN_ATTR_XRCD: ibv_qp_open_attr_mask = 2;
pub(crate) const IBV_QP_OPEN_ATTR_CONTEXT: ibv_qp_open_attr_mask = 4;
pub(crate) const IBV_QP_OPEN_ATTR_TYPE: ibv_qp_open_attr_mask = 8;
pub(crate) const IBV_QP_OPEN_ATTR_RESERVED: ibv_qp_open_attr_mask = 16;

pub(crate) type ibv_qp_attr_mask = c_uint;
pub(crate) const IBV_QP_STATE: ibv_qp_attr_mask = 1;
pub(crate) const IBV_QP_CUR_STATE: ibv_qp_attr_mask = 2;
pub(crate) const IBV_QP_EN_SQD_ASYNC_NOTIFY: ibv_qp_attr_mask = 4;
pub(crate) const IBV_QP_ACCESS_FLAGS: ibv_qp_attr_mask = 8;
pub(crate) const IBV_QP_PKEY_INDEX: ibv_qp_attr_mask = 16;
pub(crate) const IBV_QP_PORT: ibv_qp_attr_mask = 32;
pub(crate) const IBV_QP_QKEY: ibv_qp_attr_mask = 64;
pub(crate) const IBV_QP_AV: ibv_qp_attr_mask = 128;
pub(crate) const IBV_QP_PATH_MTU: ibv_qp_attr_mask = 256;
pub(crate) const IBV_QP_TIMEOUT: ibv_qp_attr_mask = 512;
pub(crate) const IBV_QP_RETRY_CNT: ibv_qp_attr_mask = 1024;
pub(crate) const IBV_QP_RNR_RETRY: ibv_qp_attr_mask = 2048;
pub(crate) const IBV_QP_RQ_PSN: ibv_qp_attr_mask = 4096;
pub(crate) const IBV_QP_MAX_QP_RD_ATOMIC: ibv_qp_attr_mask = 8192;
pub(crate) const IBV_QP_ALT_PATH: ibv_qp_attr_mask = 16384;
pub(crate) const IBV_QP_MIN_RNR_TIMER: ibv_qp_attr_mask = 32768;
pub(crate) const IBV_QP_SQ_PSN: ibv_qp_attr_mask = 65536;
pub(crate) const IBV_QP_MAX_DEST_RD_ATOMIC: ibv_qp_attr_mask = 131072;
pub(crate) const IBV_QP_PATH_MIG_STATE: ibv_qp_attr_mask = 262144;
pub(crate) const IBV_QP_CAP: ibv_qp_attr_mask = 524288;
pub(crate) const IBV_QP_DEST_QPN: ibv_qp_attr_mask = 1048576;
pub(crate) const IBV_QP_RATE_LIMIT: ibv_qp_attr_mask = 33554432;

pub(crate) type ibv_query_qp_data_in_order_flags = c_uint;
pub(crate) const IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS: ibv_query_qp_data_in_order_flags = 1;
pub(crate) const IBV_QUERY_QP_DATA_IN_ORDER_DEVICE_ONLY: ibv_query_qp_data_in_order_flags = 2;

pub(crate) type ibv_query_qp_data_in_order_caps = c_uint;
pub(crate) const IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG: ibv_query_qp_data_in_order_caps = 1;
pub(crate) const IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES: ibv_query_qp_data_in_order_caps = 2;

pub(crate) type ibv_qp_state = c_uint;
pub(crate) const IBV_QPS_RESET: ibv_qp_state = 0;
pub(crate) const IBV_QPS_INIT: ibv_qp_state = 1;
pub(crate) const IBV_QPS_RTR: ibv_qp_state = 2;
pub(crate) const IBV_QPS_RTS: ibv_qp_state = 3;
pub(crate) const IBV_QPS_SQD: ibv_qp_state = 4;
pub(crate) const IBV_QPS_SQE: ibv_qp_state = 5;
pub(crate) const IBV_QPS_ERR: ibv_qp_state = 6;
pub(crate) const IBV_QPS_UNKNOWN: ibv_qp_state = 7;

pub(crate) type ibv_mig_state = c_uint;
pub(crate) const IBV_MIG_MIGRATED: ibv_mig_state = 0;
pub(crate) const IBV_MIG_REARM: ibv_mig_state = 1;
pub(crate) const IBV_MIG_ARMED: ibv_mig_state = 2;

pub(crate) type ibv_wr_opcode = c_uint;
pub(crate) const IBV_WR_RDMA_WRITE: ibv_wr_opcode = 0;
pub(crate) const IBV_WR_RDMA_WRITE_WITH_IMM: ibv_wr_opcode = 1;
pub(crate) const IBV_WR_SEND: ibv_wr_opcode = 2;
pub(crate) const IBV_WR_SEND_WITH_IMM: ibv_wr_opcode = 3;
pub(crate) const IBV_WR_RDMA_READ: ibv_wr_opcode = 4;
pub(crate) const IBV_WR_ATOMIC_CMP_AND_SWP: ibv_wr_opcode = 5;
pub(crate) const IBV_WR_ATOMIC_FETCH_AND_ADD: ibv_wr_opcode = 6;
pub(crate) const IBV_WR_LOCAL_INV: ibv_wr_opcode = 7;
pub(crate) const IBV_WR_BIND_MW: ibv_wr_opcode = 8;
pub(crate) const IBV_WR_SEND_WITH_INV: ibv_wr_opcode = 9;
pub(crate) const IBV_WR_TSO: ibv_wr_opcode = 10;
pub(crate) const IBV_WR_DRIVER1: ibv_wr_opcode = 11;
pub(crate) const IBV_WR_FLUSH: ibv_wr_opcode = 14;
pub(crate) const IBV_WR_ATOMIC_WRITE: ibv_wr_opcode = 15;

pub(crate) type ibv_send_flags = c_uint;
pub(crate) const IBV_SEND_FENCE: ibv_send_flags = 1;
pub(crate) const IBV_SEND_SIGNALED: ibv_send_flags = 2;
pub(crate) const IBV_SEND_SOLICITED: ibv_send_flags = 4;
pub(crate) const IBV_SEND_INLINE: ibv_send_flags = 8;
pub(crate) const IBV_SEND_IP_CSUM: ibv_send_flags = 16;

pub(crate) type ibv_placement_type = c_uint;
pub(crate) const IBV_FLUSH_GLOBAL: ibv_placement_type = 1;
pub(crate) const IBV_FLUSH_PERSISTENT: ibv_placement_type = 2;

pub(crate) type ibv_selectivity_level = c_uint;
pub(crate) const IBV_FLUSH_RANGE: ibv_selectivity_level = 0;
pub(crate) const IBV_FLUSH_MR: ibv_selectivity_level = 1;

pub(crate) type ibv_ops_wr_opcode = c_uint;
pub(crate) const IBV_WR_TAG_ADD: ibv_ops_wr_opcode = 0;
pub(crate) const IBV_WR_TAG_DEL: ibv_ops_wr_opcode = 1;
pub(crate) const IBV_WR_TAG_SYNC: ibv_ops_wr_opcode = 2;

pub(crate) type ibv_ops_flags = c_uint;
pub(crate) const IBV_OPS_SIGNALED: ibv_ops_flags = 1;
pub(crate) const IBV_OPS_TM_SYNC: ibv_ops_flags = 2;

pub(crate) type ibv_qp_attach_comp_cntr_op = c_uint;
pub(crate) const IBV_QP_ATTACH_COMP_CNTR_OP_SEND: ibv_qp_attach_comp_cntr_op = 1;
pub(crate) const IBV_QP_ATTACH_COMP_CNTR_OP_RECV: ibv_qp_attach_comp_cntr_op = 2;
pub(crate) const IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_READ: ibv_qp_attach_comp_cntr_op = 4;
pub(crate) const IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_READ: ibv_qp_attach_comp_cntr_op = 8;
pub(crate) const IBV_QP_ATTACH_COMP_CNTR_OP_RDMA_WRITE: ibv_qp_attach_comp_cntr_op = 16;
pub(crate) const IBV_QP_ATTACH_COMP_CNTR_OP_REMOTE_RDMA_WRITE: ibv_qp_attach_comp_cntr_op = 32;

//! The calls of libibverbs that are not built.

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

refuse! {
    // Device, port, context.
    Null(EOPNOTSUPP): ibv_open_device ibv_import_device;
    Errno(EOPNOTSUPP): ibv_close_device ibv_query_device ibv_query_port _ibv_query_gid_ex ibv_query_port_speed
        ibv_register_driver;
    MinusOne(EOPNOTSUPP): ibv_query_gid ibv_query_pkey ibv_get_pkey_index ibv_get_async_event;
    NegativeErrno(EOPNOTSUPP): _ibv_query_gid_table;
    Void(0): ibv_ack_async_event;
    // Protection domains and memory.
    Null(EOPNOTSUPP): ibv_alloc_pd ibv_import_pd ibv_reg_mr ibv_reg_mr_iova ibv_reg_mr_iova2 ibv_reg_dmabuf_mr
        ibv_reg_mr_ex ibv_import_mr ibv_import_dm ibv_alloc_dmah ibv_alloc_buf ibv_reg_buf_mr;
    Errno(EOPNOTSUPP): ibv_dealloc_pd ibv_dereg_mr ibv_dealloc_dmah;
    // -1 is also `IBV_REREG_MR_ERR_INPUT`: the old MR is still valid.
    MinusOne(EOPNOTSUPP): ibv_rereg_mr ibv_dm_export_dmabuf_fd ibv_export_buf_dmabuf_fd;
    Void(0): ibv_unimport_pd ibv_unimport_mr ibv_unimport_dm ibv_free_buf;
    // Address handles and multicast.
    Null(EOPNOTSUPP): ibv_create_ah ibv_create_ah_from_wc;
    Errno(EOPNOTSUPP): ibv_destroy_ah ibv_attach_mcast ibv_detach_mcast ibv_resolve_eth_l2_from_gid;
    MinusOne(EOPNOTSUPP): ibv_init_ah_from_wc;
    // Completion queues and channels.
    Null(EOPNOTSUPP): ibv_create_comp_channel ibv_create_cq;
    Errno(EOPNOTSUPP): ibv_destroy_comp_channel ibv_resize_cq ibv_destroy_cq;
    MinusOne(EOPNOTSUPP): ibv_get_cq_event;
    Void(0): ibv_ack_cq_events;
    // Queue pairs and shared receive queues.
    Null(EOPNOTSUPP): ibv_create_qp ibv_create_srq ibv_qp_to_qp_ex;
    Errno(EOPNOTSUPP): ibv_modify_qp ibv_query_qp ibv_destroy_qp ibv_modify_srq ibv_query_srq ibv_destroy_srq
        ibv_query_ece ibv_set_ece;
    No(0): ibv_query_qp_data_in_order;
    // Completion counters.
    Null(EOPNOTSUPP): ibv_create_comp_cntr;
    Errno(EOPNOTSUPP): _ibv_query_comp_cntr_caps ibv_destroy_comp_cntr ibv_qp_attach_comp_cntr ibv_inc_comp_cntr
        ibv_inc_err_comp_cntr ibv_read_comp_cntr ibv_read_err_comp_cntr ibv_set_comp_cntr ibv_set_err_comp_cntr;
}

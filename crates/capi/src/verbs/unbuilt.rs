//! The calls of libibverbs that are not built.

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

refuse! {
    // Device, port, context.
    Null(EOPNOTSUPP): ibv_import_device;
    Errno(EOPNOTSUPP): ibv_query_port_speed
        ibv_register_driver;
    // Protection domains and memory.
    Null(EOPNOTSUPP): ibv_import_pd ibv_reg_dmabuf_mr
        ibv_reg_mr_ex ibv_import_mr ibv_import_dm ibv_alloc_dmah ibv_alloc_buf ibv_reg_buf_mr;
    Errno(EOPNOTSUPP): ibv_dealloc_dmah;
    // -1 is also `IBV_REREG_MR_ERR_INPUT`: the old MR is still valid.
    MinusOne(EOPNOTSUPP): ibv_dm_export_dmabuf_fd ibv_export_buf_dmabuf_fd;
    Void(0): ibv_unimport_pd ibv_unimport_mr ibv_unimport_dm ibv_free_buf;
    // Address handles.
    Errno(EOPNOTSUPP): ibv_resolve_eth_l2_from_gid;
    // Completion queues and channels.
    // Queue pairs and shared receive queues.
    // Completion counters.
    Null(EOPNOTSUPP): ibv_create_comp_cntr;
    Errno(EOPNOTSUPP): _ibv_query_comp_cntr_caps ibv_destroy_comp_cntr ibv_qp_attach_comp_cntr ibv_inc_comp_cntr
        ibv_inc_err_comp_cntr ibv_read_comp_cntr ibv_read_err_comp_cntr ibv_set_comp_cntr ibv_set_err_comp_cntr;
}

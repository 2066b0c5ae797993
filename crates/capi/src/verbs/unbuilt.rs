//! The calls of libibverbs that are not built.

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

refuse! {
    // Device, port, context.
    Errno(EOPNOTSUPP): ibv_query_port_speed
        ibv_register_driver;
    // Protection domains and memory.
    // Buffers are ordinary memory: no dma-buf is behind them.
    MinusOne(EOPNOTSUPP): ibv_export_buf_dmabuf_fd;
    // Address handles.
    Errno(EOPNOTSUPP): ibv_resolve_eth_l2_from_gid;
    // Completion queues and channels.
    // Queue pairs and shared receive queues.
    // Completion counters.
    Null(EOPNOTSUPP): ibv_create_comp_cntr;
    Errno(EOPNOTSUPP): _ibv_query_comp_cntr_caps ibv_destroy_comp_cntr ibv_qp_attach_comp_cntr ibv_inc_comp_cntr
        ibv_inc_err_comp_cntr ibv_read_comp_cntr ibv_read_err_comp_cntr ibv_set_comp_cntr ibv_set_err_comp_cntr;
}

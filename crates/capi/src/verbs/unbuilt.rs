//! The calls of libibverbs that are not built.

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

refuse! {
    // Device, port, context.
    Null(EOPNOTSUPP): ibv_import_device;
    Errno(EOPNOTSUPP): ibv_register_driver;
    // Protection domains and memory.
    Null(EOPNOTSUPP): ibv_import_pd ibv_reg_dmabuf_mr
        ibv_reg_mr_ex ibv_import_mr ibv_import_dm ibv_alloc_dmah ibv_alloc_buf ibv_reg_buf_mr;
    Errno(EOPNOTSUPP): ibv_dealloc_dmah;
    // -1 is also `IBV_REREG_MR_ERR_INPUT`: the old MR is still valid.
    MinusOne(EOPNOTSUPP): ibv_dm_export_dmabuf_fd ibv_export_buf_dmabuf_fd;
    Void(0): ibv_unimport_pd ibv_unimport_mr ibv_unimport_dm ibv_free_buf;
}

//! The IBVERBS_1.0 interface of 2005 (and `mlx5dv_init_obj` of MLX5_1.0), whose objects were laid out differently. The
//! version nodes must exist for today's programs to load. Programs of that age get no device.

use crate::refuse::refuse;
use libc::ENOSYS;

refuse! {
    Null(ENOSYS): ibv_alloc_pd ibv_create_ah ibv_create_cq ibv_create_qp ibv_create_srq ibv_get_device_list
        ibv_get_device_name ibv_open_device ibv_reg_mr;
    Errno(ENOSYS): ibv_attach_mcast ibv_close_device ibv_dealloc_pd ibv_dereg_mr ibv_destroy_ah ibv_destroy_cq
        ibv_destroy_qp ibv_destroy_srq ibv_detach_mcast ibv_modify_qp ibv_modify_srq ibv_query_device ibv_query_port
        ibv_query_qp ibv_query_srq ibv_resize_cq mlx5dv_init_obj;
    MinusOne(ENOSYS): ibv_get_async_event ibv_get_cq_event ibv_query_gid ibv_query_pkey;
    Void(0): ibv_ack_async_event ibv_ack_cq_events ibv_free_device_list;
    No(0): ibv_get_device_guid;
}

//! The IBVERBS_PRIVATE nodes: calls that libibverbs offers to its own provider libraries. There are no providers here.
//! A real one that gets into the process must load, register to no effect, and never get a kernel command.
//! (`verbs_allow_disassociate_destroy`, the one exported variable, lies with the trampolines.)

use crate::refuse::refuse;
use libc::EOPNOTSUPP;

refuse! {
    Null(EOPNOTSUPP): _verbs_init_and_alloc_context verbs_open_device ibv_dmabuf_heap_alloc
        ibv_dmabuf_heap_cc_shared_init;
    Errno(EOPNOTSUPP): ibv_cmd_advise_mr ibv_cmd_alloc_dm ibv_cmd_alloc_mw ibv_cmd_alloc_pd ibv_cmd_attach_mcast
        ibv_cmd_close_xrcd ibv_cmd_create_ah ibv_cmd_create_counters ibv_cmd_create_cq ibv_cmd_create_cq_ex
        ibv_cmd_create_flow ibv_cmd_create_flow_action_esp ibv_cmd_create_qp ibv_cmd_create_qp_ex
        ibv_cmd_create_qp_ex2 ibv_cmd_create_rwq_ind_table ibv_cmd_create_srq ibv_cmd_create_srq_ex
        ibv_cmd_create_wq ibv_cmd_dealloc_mw ibv_cmd_dealloc_pd ibv_cmd_dereg_mr ibv_cmd_destroy_ah
        ibv_cmd_destroy_counters ibv_cmd_destroy_cq ibv_cmd_destroy_flow ibv_cmd_destroy_flow_action
        ibv_cmd_destroy_qp ibv_cmd_destroy_rwq_ind_table ibv_cmd_destroy_srq ibv_cmd_destroy_wq
        ibv_cmd_detach_mcast ibv_cmd_free_dm ibv_cmd_get_context ibv_cmd_modify_cq
        ibv_cmd_modify_flow_action_esp ibv_cmd_modify_qp ibv_cmd_modify_qp_ex ibv_cmd_modify_srq
        ibv_cmd_modify_wq ibv_cmd_open_qp ibv_cmd_open_xrcd ibv_cmd_post_recv ibv_cmd_post_send
        ibv_cmd_post_srq_recv ibv_cmd_query_context ibv_cmd_query_device_any ibv_cmd_query_mr ibv_cmd_query_port
        ibv_cmd_query_qp ibv_cmd_query_srq ibv_cmd_read_counters ibv_cmd_reg_dm_mr ibv_cmd_reg_dmabuf_mr
        ibv_cmd_reg_mr ibv_cmd_req_notify_cq ibv_cmd_rereg_mr ibv_cmd_resize_cq ibv_cmd_alloc_dmah
        ibv_cmd_create_comp_cntr ibv_cmd_create_cq_ex2 ibv_cmd_destroy_comp_cntr ibv_cmd_free_dmah
        ibv_cmd_inc_comp_cntr ibv_cmd_inc_err_comp_cntr ibv_cmd_qp_attach_comp_cntr ibv_cmd_query_comp_cntr_caps
        ibv_cmd_query_port_speed ibv_cmd_read_comp_cntr ibv_cmd_read_err_comp_cntr ibv_cmd_reg_mr_ex
        ibv_cmd_set_comp_cntr ibv_cmd_set_err_comp_cntr execute_ioctl;
    MinusOne(EOPNOTSUPP): ibv_cmd_poll_cq ibv_cmd_export_dmabuf_fd ibv_read_ibdev_sysfs_file;
    Void(0): __verbs_log verbs_init_cq verbs_register_driver verbs_set_ops verbs_uninit_context
        ibv_dmabuf_heap_destroy ibv_dmabuf_heap_free;
    No(0): __ioctl_final_num_attrs;
}

//! Shared receive queues, work queues and indirection tables.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_srq_attr {
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) srq_limit: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_srq_init_attr {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: ibv_srq_attr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_tm_cap {
    pub(crate) max_num_tags: u32,
    pub(crate) max_ops: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_srq_init_attr_ex {
    pub(crate) srq_context: *mut c_void,
    pub(crate) attr: ibv_srq_attr,
    pub(crate) comp_mask: u32,
    pub(crate) srq_type: ibv_srq_type,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) xrcd: *mut ibv_xrcd,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) tm_cap: ibv_tm_cap,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_srq {
    pub(crate) context: *mut ibv_context,
    pub(crate) srq_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) handle: u32,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) events_completed: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_wq_init_attr {
    pub(crate) wq_context: *mut c_void,
    pub(crate) wq_type: ibv_wq_type,
    pub(crate) max_wr: u32,
    pub(crate) max_sge: u32,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) comp_mask: u32,
    pub(crate) create_flags: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_wq_attr {
    pub(crate) attr_mask: u32,
    pub(crate) wq_state: ibv_wq_state,
    pub(crate) curr_wq_state: ibv_wq_state,
    pub(crate) flags: u32,
    pub(crate) flags_mask: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_wq {
    pub(crate) context: *mut ibv_context,
    pub(crate) wq_context: *mut c_void,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) cq: *mut ibv_cq,
    pub(crate) wq_num: u32,
    pub(crate) handle: u32,
    pub(crate) state: ibv_wq_state,
    pub(crate) wq_type: ibv_wq_type,
    pub(crate) post_recv:
        Option<unsafe extern "C" fn(*mut ibv_wq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    pub(crate) mutex: libc::pthread_mutex_t,
    pub(crate) cond: libc::pthread_cond_t,
    pub(crate) events_completed: u32,
    pub(crate) comp_mask: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_rwq_ind_table {
    pub(crate) context: *mut ibv_context,
    pub(crate) ind_tbl_handle: c_int,
    pub(crate) ind_tbl_num: c_int,
    pub(crate) comp_mask: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_rwq_ind_table_init_attr {
    pub(crate) log_ind_tbl_size: u32,
    pub(crate) ind_tbl: *mut *mut ibv_wq,
    pub(crate) comp_mask: u32,
}

//! Flow counters and completion counters.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_comp_cntr_caps {
    pub(crate) max_value: u64,
    pub(crate) max_counters: u32,
    pub(crate) supported_qp_attach_ops: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_comp_cntr {
    pub(crate) context: *mut ibv_context,
    pub(crate) handle: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_comp_cntr_init_attr {
    pub(crate) comp_mask: u32,
    pub(crate) r#type: ibv_comp_cntr_type,
    pub(crate) flags: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_qp_attach_comp_cntr_attr {
    pub(crate) comp_mask: u32,
    pub(crate) op_mask: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_counters_init_attr {
    pub(crate) comp_mask: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_counters {
    pub(crate) context: *mut ibv_context,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_counter_attach_attr {
    pub(crate) counter_desc: ibv_counter_description,
    pub(crate) index: u32,
    pub(crate) comp_mask: u32,
}

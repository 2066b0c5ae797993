//! Work requests.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_send_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
    pub(crate) opcode: ibv_wr_opcode,
    pub(crate) send_flags: c_uint,
    pub(crate) data: ibv_send_wr_data,
    pub(crate) wr: ibv_send_wr_wr,
    pub(crate) qp_type: ibv_send_wr_qp_type,
    pub(crate) ext: ibv_send_wr_ext,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_send_wr_ext {
    pub(crate) bind_mw: ibv_send_wr_ext_bind_mw,
    pub(crate) tso: ibv_send_wr_ext_tso,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr_ext_tso {
    pub(crate) hdr: *mut c_void,
    pub(crate) hdr_sz: u16,
    pub(crate) mss: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr_ext_bind_mw {
    pub(crate) mw: *mut ibv_mw,
    pub(crate) rkey: u32,
    pub(crate) bind_info: ibv_mw_bind_info,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_send_wr_qp_type {
    pub(crate) xrc: ibv_send_wr_qp_type_xrc,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr_qp_type_xrc {
    pub(crate) remote_srqn: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_send_wr_wr {
    pub(crate) rdma: ibv_send_wr_wr_rdma,
    pub(crate) atomic: ibv_send_wr_wr_atomic,
    pub(crate) ud: ibv_send_wr_wr_ud,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr_wr_ud {
    pub(crate) ah: *mut ibv_ah,
    pub(crate) remote_qpn: u32,
    pub(crate) remote_qkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr_wr_atomic {
    pub(crate) remote_addr: u64,
    pub(crate) compare_add: u64,
    pub(crate) swap: u64,
    pub(crate) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_send_wr_wr_rdma {
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_send_wr_data {
    pub(crate) imm_data: u32,
    pub(crate) invalidate_rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_recv_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_recv_wr,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_ops_wr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut ibv_ops_wr,
    pub(crate) opcode: ibv_ops_wr_opcode,
    pub(crate) flags: c_int,
    pub(crate) tm: ibv_ops_wr_tm,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_ops_wr_tm {
    pub(crate) unexpected_cnt: u32,
    pub(crate) handle: u32,
    pub(crate) add: ibv_ops_wr_tm_add,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_ops_wr_tm_add {
    pub(crate) recv_wr_id: u64,
    pub(crate) sg_list: *mut ibv_sge,
    pub(crate) num_sge: c_int,
    pub(crate) tag: u64,
    pub(crate) mask: u64,
}

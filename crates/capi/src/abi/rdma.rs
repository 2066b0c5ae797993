//! librdmacm.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_ib_addr {
    pub(crate) sgid: ibv_gid,
    pub(crate) dgid: ibv_gid,
    pub(crate) pkey: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_addr {
    pub(crate) src: rdma_addr_src,
    pub(crate) dst: rdma_addr_dst,
    pub(crate) addr: rdma_addr_addr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union rdma_addr_addr {
    pub(crate) ibaddr: rdma_ib_addr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union rdma_addr_dst {
    pub(crate) dst_addr: libc::sockaddr,
    pub(crate) dst_sin: libc::sockaddr_in,
    pub(crate) dst_sin6: libc::sockaddr_in6,
    pub(crate) dst_storage: libc::sockaddr_storage,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union rdma_addr_src {
    pub(crate) src_addr: libc::sockaddr,
    pub(crate) src_sin: libc::sockaddr_in,
    pub(crate) src_sin6: libc::sockaddr_in6,
    pub(crate) src_storage: libc::sockaddr_storage,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_route {
    pub(crate) addr: rdma_addr,
    pub(crate) path_rec: *mut ibv_sa_path_rec,
    pub(crate) num_paths: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_event_channel {
    pub(crate) fd: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_cm_id {
    pub(crate) verbs: *mut ibv_context,
    pub(crate) channel: *mut rdma_event_channel,
    pub(crate) context: *mut c_void,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) route: rdma_route,
    pub(crate) ps: rdma_port_space,
    pub(crate) port_num: u8,
    pub(crate) event: *mut rdma_cm_event,
    pub(crate) send_cq_channel: *mut ibv_comp_channel,
    pub(crate) send_cq: *mut ibv_cq,
    pub(crate) recv_cq_channel: *mut ibv_comp_channel,
    pub(crate) recv_cq: *mut ibv_cq,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) pd: *mut ibv_pd,
    pub(crate) qp_type: ibv_qp_type,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_conn_param {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) responder_resources: u8,
    pub(crate) initiator_depth: u8,
    pub(crate) flow_control: u8,
    pub(crate) retry_count: u8,
    pub(crate) rnr_retry_count: u8,
    pub(crate) srq: u8,
    pub(crate) qp_num: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_ud_param {
    pub(crate) private_data: *const c_void,
    pub(crate) private_data_len: u8,
    pub(crate) ah_attr: ibv_ah_attr,
    pub(crate) qp_num: u32,
    pub(crate) qkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_cm_event {
    pub(crate) id: *mut rdma_cm_id,
    pub(crate) listen_id: *mut rdma_cm_id,
    pub(crate) event: rdma_cm_event_type,
    pub(crate) status: c_int,
    pub(crate) param: rdma_cm_event_param,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union rdma_cm_event_param {
    pub(crate) conn: rdma_conn_param,
    pub(crate) ud: rdma_ud_param,
    pub(crate) arg: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_addrinfo {
    pub(crate) ai_flags: c_int,
    pub(crate) ai_family: c_int,
    pub(crate) ai_qp_type: c_int,
    pub(crate) ai_port_space: c_int,
    pub(crate) ai_src_len: libc::socklen_t,
    pub(crate) ai_dst_len: libc::socklen_t,
    pub(crate) ai_src_addr: *mut libc::sockaddr,
    pub(crate) ai_dst_addr: *mut libc::sockaddr,
    pub(crate) ai_src_canonname: *mut c_char,
    pub(crate) ai_dst_canonname: *mut c_char,
    pub(crate) ai_route_len: usize,
    pub(crate) ai_route: *mut c_void,
    pub(crate) ai_connect_len: usize,
    pub(crate) ai_connect: *mut c_void,
    pub(crate) ai_next: *mut rdma_addrinfo,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct rdma_cm_join_mc_attr_ex {
    pub(crate) comp_mask: u32,
    pub(crate) join_flags: u32,
    pub(crate) addr: *mut libc::sockaddr,
}

/// `struct sockaddr_ib` (`infiniband/ib.h`); all but the family and the scope in network byte order.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct sockaddr_ib {
    pub(crate) sib_family: libc::sa_family_t,
    pub(crate) sib_pkey: u16,
    pub(crate) sib_flowinfo: u32,
    pub(crate) sib_addr: [u8; 16],
    pub(crate) sib_sid: u64,
    pub(crate) sib_sid_mask: u64,
    pub(crate) sib_scope_id: u64,
}

const _: () = assert!(size_of::<sockaddr_ib>() == 48);

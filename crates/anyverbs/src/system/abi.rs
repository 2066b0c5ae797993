//! The part of `infiniband/verbs.h` that the system's devices are reached by. The layouts are those of every rdma-core since 2017.

use std::ffi::{c_char, c_int, c_uint, c_void};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("the feature `system` has the layouts of 64-bit targets alone");

/// Objects of the library. Programs see them by pointer.
macro_rules! opaque {
    ($($name:ident)*) => { $(
        #[repr(C)]
        pub(super) struct $name {
            _private: [u8; 0],
        }
    )* };
}

opaque!(ibv_device ibv_pd ibv_cq ibv_ah);

pub(super) type Poll = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
pub(super) type PostSend =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
pub(super) type PostRecv =
    unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// The beginning of a context: what inline functions of the header call stands in a table there.
#[repr(C)]
pub(super) struct ibv_context {
    pub(super) device: *mut ibv_device,
    ops_before_poll: [*mut c_void; 11],
    pub(super) poll_cq: Option<Poll>,
    ops_before_post: [*mut c_void; 13],
    pub(super) post_send: Option<PostSend>,
    pub(super) post_recv: Option<PostRecv>,
}

/// The beginning of a queue pair.
#[repr(C)]
pub(super) struct ibv_qp {
    pub(super) context: *mut ibv_context,
    _pointers: [*mut c_void; 5],
    _handle: u32,
    pub(super) qp_num: u32,
}

/// The beginning of a memory region.
#[repr(C)]
pub(super) struct ibv_mr {
    _pointers: [*mut c_void; 3],
    _length: usize,
    _handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ibv_sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

#[repr(C)]
pub(super) struct ibv_send_wr {
    pub(super) wr_id: u64,
    pub(super) next: *mut ibv_send_wr,
    pub(super) sg_list: *mut ibv_sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    pub(super) imm_data: u32,
    pub(super) wr: Operand,
    pub(super) remote_srqn: u32,
    pub(super) ext: [u64; 6],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union Operand {
    pub(super) rdma: Rdma,
    pub(super) atomic: Atomic,
    pub(super) ud: Ud,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Rdma {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct Atomic {
    pub(super) remote_addr: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Ud {
    pub(super) ah: *mut ibv_ah,
    pub(super) remote_qpn: u32,
    pub(super) remote_qkey: u32,
}

#[repr(C)]
pub(super) struct ibv_recv_wr {
    pub(super) wr_id: u64,
    pub(super) next: *mut ibv_recv_wr,
    pub(super) sg_list: *mut ibv_sge,
    pub(super) num_sge: c_int,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ibv_wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(8))]
pub(super) struct ibv_global_route {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ibv_ah_attr {
    pub(super) grh: ibv_global_route,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct ibv_qp_cap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct ibv_qp_init_attr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut ibv_cq,
    pub(super) recv_cq: *mut ibv_cq,
    pub(super) srq: *mut c_void,
    pub(super) cap: ibv_qp_cap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ibv_qp_attr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    pub(super) cap: ibv_qp_cap,
    pub(super) ah_attr: ibv_ah_attr,
    pub(super) alt_ah_attr: ibv_ah_attr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// The beginning of `struct ibv_device_attr`, and room for the rest.
#[repr(C)]
pub(super) struct ibv_device_attr {
    _before: [u64; 12],
    _vendor: [u32; 3],
    _max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    _flags: c_uint,
    pub(super) max_sge: c_int,
    _numbers: [c_int; 5],
    pub(super) max_qp_rd_atom: c_int,
    _more: [c_int; 2],
    pub(super) max_qp_init_rd_atom: c_int,
    _counts: [c_int; 16],
    _max_pkeys: u16,
    _ack_delay: u8,
    pub(super) phys_port_cnt: u8,
    _rest: [u64; 15],
}

/// `struct ibv_port_attr` as `ibv_query_port` fills it, and room for the rest.
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct ibv_port_attr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    _rest: [u32; 16],
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(8))]
pub(super) struct ibv_gid_entry {
    pub(super) gid: [u8; 16],
    pub(super) gid_index: u32,
    pub(super) port_num: u32,
    pub(super) gid_type: u32,
    pub(super) ndev_ifindex: u32,
}

/// The functions of `libibverbs.so.1`, each by its name there.
macro_rules! functions {
    ($($name:ident ( $($argument:ty),* ) -> $result:ty;)*) => {
        pub(super) struct Functions {
            $( pub(super) $name: unsafe extern "C" fn($($argument),*) -> $result, )*
            /// The library is that of this device: it alone has the calls of librdmacm, too.
            pub(super) is_ours: bool,
        }

        impl Functions {
            /// From what finds a symbol. An error is the name of the one that is missing.
            ///
            /// # Safety
            /// `find` returns the addresses of the library's functions of these names, or NULL.
            pub(super) unsafe fn load(find: impl Fn(&str) -> *mut c_void) -> Result<Self, &'static str> {
                let is_ours = !find("rdma_create_event_channel\0").is_null();
                Ok(Self { is_ours, $( $name: {
                    let address = find(concat!(stringify!($name), "\0"));
                    if address.is_null() {
                        return Err(stringify!($name));
                    }
                    // SAFETY: the caller's promise; the type is that of the header.
                    unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(address) }
                }, )* })
            }
        }
    };
}

functions! {
    ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
    ibv_free_device_list(*mut *mut ibv_device) -> ();
    ibv_get_device_name(*mut ibv_device) -> *const c_char;
    ibv_open_device(*mut ibv_device) -> *mut ibv_context;
    ibv_close_device(*mut ibv_context) -> c_int;
    ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
    ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
    _ibv_query_gid_ex(*mut ibv_context, u32, u32, *mut ibv_gid_entry, u32, usize) -> c_int;
    ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd(*mut ibv_pd) -> c_int;
    ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
    ibv_dereg_mr(*mut ibv_mr) -> c_int;
    ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut c_void, c_int) -> *mut ibv_cq;
    ibv_destroy_cq(*mut ibv_cq) -> c_int;
    ibv_create_qp(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
    ibv_destroy_qp(*mut ibv_qp) -> c_int;
    ibv_create_ah(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah;
    ibv_destroy_ah(*mut ibv_ah) -> c_int;
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use super::*;

    /// The numbers are those of `crates/capi/abi/layouts.65.txt`.
    #[test]
    fn layouts_are_those_of_the_header() {
        assert_eq!(offset_of!(ibv_context, poll_cq), 8 + 11 * 8);
        assert_eq!(offset_of!(ibv_context, post_send), 8 + 25 * 8);
        assert_eq!(offset_of!(ibv_qp, qp_num), 52);
        assert_eq!(offset_of!(ibv_mr, lkey), 36);
        assert_eq!(offset_of!(ibv_send_wr, wr), 40);
        assert_eq!(offset_of!(ibv_send_wr, ext), 80);
        assert_eq!(size_of::<ibv_send_wr>(), 128);
        assert_eq!(size_of::<ibv_recv_wr>(), 32);
        assert_eq!(size_of::<ibv_wc>(), 48);
        assert_eq!(size_of::<ibv_ah_attr>(), 32);
        assert_eq!(size_of::<ibv_qp_init_attr>(), 64);
        assert_eq!(offset_of!(ibv_qp_attr, ah_attr), 56);
        assert_eq!(offset_of!(ibv_qp_attr, max_rd_atomic), 126);
        assert_eq!(size_of::<ibv_qp_attr>(), 144);
        assert_eq!(size_of::<ibv_gid_entry>(), 32);
        assert_eq!(offset_of!(ibv_device_attr, max_qp_wr), 112);
        assert_eq!(offset_of!(ibv_device_attr, max_sge), 120);
        assert_eq!(offset_of!(ibv_device_attr, max_qp_rd_atom), 144);
        assert_eq!(offset_of!(ibv_device_attr, phys_port_cnt), 227);
        assert_eq!(offset_of!(ibv_device_attr, max_qp_init_rd_atom), 156);
        assert!(size_of::<ibv_port_attr>() >= 56 && size_of::<ibv_device_attr>() >= 232);
    }
}

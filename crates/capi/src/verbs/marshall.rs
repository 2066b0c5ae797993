//! `ibv_copy_*`: between the library's and the kernel's forms of addresses, QP attributes and path records.

use crate::abi::{kern::*, *};

/// `ibv_copy_ah_attr_from_kern`.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
pub(crate) unsafe extern "C" fn ibv_copy_ah_attr_from_kern(
    dst: *mut ibv_ah_attr,
    src: *const ib_uverbs_ah_attr,
) {
    // SAFETY: the caller's promise.
    let (Some(dst), Some(src)) = (unsafe { (dst.as_mut(), src.as_ref()) }) else {
        return;
    };
    copy_ah_attr(dst, src);
}

fn copy_ah_attr(dst: &mut ibv_ah_attr, src: &ib_uverbs_ah_attr) {
    dst.grh.dgid.raw = src.grh.dgid;
    dst.grh.flow_label = src.grh.flow_label;
    dst.grh.sgid_index = src.grh.sgid_index;
    dst.grh.hop_limit = src.grh.hop_limit;
    dst.grh.traffic_class = src.grh.traffic_class;
    dst.dlid = src.dlid;
    dst.sl = src.sl;
    dst.src_path_bits = src.src_path_bits;
    dst.static_rate = src.static_rate;
    dst.is_global = src.is_global;
    dst.port_num = src.port_num;
}

/// `ibv_copy_qp_attr_from_kern`. `rate_limit` has no kernel form and is left alone.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
pub(crate) unsafe extern "C" fn ibv_copy_qp_attr_from_kern(
    dst: *mut ibv_qp_attr,
    src: *const ib_uverbs_qp_attr,
) {
    // SAFETY: the caller's promise.
    let (Some(dst), Some(src)) = (unsafe { (dst.as_mut(), src.as_ref()) }) else {
        return;
    };
    dst.cur_qp_state = src.cur_qp_state;
    dst.path_mtu = src.path_mtu;
    dst.path_mig_state = src.path_mig_state;
    dst.qkey = src.qkey;
    dst.rq_psn = src.rq_psn;
    dst.sq_psn = src.sq_psn;
    dst.dest_qp_num = src.dest_qp_num;
    dst.qp_access_flags = src.qp_access_flags;
    dst.cap = ibv_qp_cap {
        max_send_wr: src.max_send_wr,
        max_recv_wr: src.max_recv_wr,
        max_send_sge: src.max_send_sge,
        max_recv_sge: src.max_recv_sge,
        max_inline_data: src.max_inline_data,
    };
    copy_ah_attr(&mut dst.ah_attr, &src.ah_attr);
    copy_ah_attr(&mut dst.alt_ah_attr, &src.alt_ah_attr);
    dst.pkey_index = src.pkey_index;
    dst.alt_pkey_index = src.alt_pkey_index;
    dst.en_sqd_async_notify = src.en_sqd_async_notify;
    dst.sq_draining = src.sq_draining;
    dst.max_rd_atomic = src.max_rd_atomic;
    dst.max_dest_rd_atomic = src.max_dest_rd_atomic;
    dst.min_rnr_timer = src.min_rnr_timer;
    dst.port_num = src.port_num;
    dst.timeout = src.timeout;
    dst.retry_cnt = src.retry_cnt;
    dst.rnr_retry = src.rnr_retry;
    dst.alt_port_num = src.alt_port_num;
    dst.alt_timeout = src.alt_timeout;
}

/// `ibv_copy_path_rec_from_kern`.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
pub(crate) unsafe extern "C" fn ibv_copy_path_rec_from_kern(
    dst: *mut ibv_sa_path_rec,
    src: *const ib_user_path_rec,
) {
    // SAFETY: the caller's promise.
    let (Some(dst), Some(src)) = (unsafe { (dst.as_mut(), src.as_ref()) }) else {
        return;
    };
    dst.dgid.raw = src.dgid;
    dst.sgid.raw = src.sgid;
    dst.dlid = src.dlid;
    dst.slid = src.slid;
    dst.raw_traffic = src.raw_traffic as i32;
    dst.flow_label = src.flow_label;
    dst.hop_limit = src.hop_limit;
    dst.traffic_class = src.traffic_class;
    dst.reversible = src.reversible as i32;
    dst.numb_path = src.numb_path;
    dst.pkey = src.pkey;
    dst.sl = src.sl;
    dst.mtu_selector = src.mtu_selector;
    dst.mtu = src.mtu as u8;
    dst.rate_selector = src.rate_selector;
    dst.rate = src.rate;
    dst.packet_life_time_selector = src.packet_life_time_selector;
    dst.packet_life_time = src.packet_life_time;
    dst.preference = src.preference;
}

/// `ibv_copy_path_rec_to_kern`.
///
/// # Safety
/// Each pointer is NULL or valid for its type.
pub(crate) unsafe extern "C" fn ibv_copy_path_rec_to_kern(
    dst: *mut ib_user_path_rec,
    src: *const ibv_sa_path_rec,
) {
    // SAFETY: the caller's promise.
    let (Some(dst), Some(src)) = (unsafe { (dst.as_mut(), src.as_ref()) }) else {
        return;
    };
    // SAFETY: every bit pattern is a GID.
    (dst.dgid, dst.sgid) = unsafe { (src.dgid.raw, src.sgid.raw) };
    dst.dlid = src.dlid;
    dst.slid = src.slid;
    dst.raw_traffic = src.raw_traffic as u32;
    dst.flow_label = src.flow_label;
    dst.hop_limit = src.hop_limit;
    dst.traffic_class = src.traffic_class;
    dst.reversible = src.reversible as u32;
    dst.numb_path = src.numb_path;
    dst.pkey = src.pkey;
    dst.sl = src.sl;
    dst.mtu_selector = src.mtu_selector;
    dst.mtu = src.mtu.into();
    dst.rate_selector = src.rate_selector;
    dst.rate = src.rate;
    dst.packet_life_time_selector = src.packet_life_time_selector;
    dst.packet_life_time = src.packet_life_time;
    dst.preference = src.preference;
}

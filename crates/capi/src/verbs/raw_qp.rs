//! Queue pairs of type RAW_PACKET: create, modify, post. `qp.rs` has the parts that they share with others.

use std::{ffi::c_int, mem::MaybeUninit, slice, sync::Arc};

use anyverbs::{
    MAX_SGE, QpAttr, QpAttrMask, QpState, SendFlags,
    raw::{HashQpInit, RawQp, RawQpInit, RawSendWr, ReceiveFlags, RxHash, Segmentation},
};

use crate::{
    abi::*,
    errno::Errno,
    object,
    verbs::{Batch, Context, Device, Pd, RwqIndTable, c_cap, cap, cq, publish_qp, refuse_wr, sges},
};

/// The further attributes of `ibv_create_qp_ex`.
#[derive(Clone, Copy, Default)]
pub(crate) struct RawExtras {
    pub(crate) create_flags: u32,
    pub(crate) max_tso_header: u16,
    pub(crate) send_ops: Option<u64>,
}

/// The operations that `ibv_wr_*` offer.
const OFFERED: u64 = (IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_TSO) as u64;

/// `EOPNOTSUPP` for a flag that this device does not have. It never gives a queue pair its own frames back, so that need not be
/// asked for.
fn receive_flags(create_flags: u32) -> Result<ReceiveFlags, Errno> {
    let mut flags = ReceiveFlags::empty();
    flags.set(ReceiveFlags::SCATTER_FCS, create_flags & IBV_QP_CREATE_SCATTER_FCS != 0);
    flags.set(ReceiveFlags::CVLAN_STRIPPING, create_flags & IBV_QP_CREATE_CVLAN_STRIPPING != 0);
    let known = IBV_QP_CREATE_SCATTER_FCS
        | IBV_QP_CREATE_CVLAN_STRIPPING
        | IBV_QP_CREATE_BLOCK_SELF_MCAST_LB;
    if create_flags & !known == 0 {
        Ok(flags)
    } else {
        Err(Errno::lacks("create_flags has a flag that a raw packet queue pair does not have"))
    }
}

/// Makes a queue pair for raw packets. The actual sizes go to `init.cap`.
pub(crate) fn create_raw(
    pd: *mut ibv_pd,
    init: &mut ibv_qp_init_attr,
    extras: RawExtras,
) -> Result<*mut ibv_qp, Errno> {
    let pd: Arc<Pd> = object::find(pd)?;
    let (send_cq, recv_cq) = (cq(init.send_cq)?, cq(init.recv_cq)?);
    // ibv_create_qp(3): an SRQ goes with RC and UD alone.
    if !init.srq.is_null() {
        return Err(Errno::invalid("an SRQ goes with queue pairs of type RC and UD alone"));
    }
    let context = Arc::clone(&pd.inner.context);
    let others = [&send_cq.inner.context, &recv_cq.inner.context];
    if others.into_iter().any(|c| !Arc::ptr_eq(c, &context)) {
        return Err(Errno::OTHER_CONTEXT);
    }
    if extras.send_ops.is_some_and(|ops| ops & !OFFERED != 0) {
        return Err(Errno::lacks(
            "send_ops_flags has an operation that a raw packet queue pair does not have",
        ));
    }
    let device = context.inner.device.create_raw_qp(
        &pd.inner.device,
        &RawQpInit {
            send_cq: &send_cq.inner.device,
            recv_cq: &recv_cq.inner.device,
            srq: None,
            cap: cap(&init.cap),
            sq_sig_all: init.sq_sig_all != 0,
            max_tso_header: extras.max_tso_header.into(),
            flags: receive_flags(extras.create_flags)?,
            cookie: 0,
        },
    )?;
    let actual = device.cap();
    let batch = extras.send_ops.map(|ops| Batch::raw(ops, &actual, extras.max_tso_header));
    init.cap = c_cap(&actual);
    publish_qp(Device::Raw(device), None, batch, Some(&pd), init, context)
}

/// Makes a queue pair that spreads frames over the work queues of a table. It has no queues of its own: sizes do not count.
///
/// # Safety
/// The key of `attr` is as long as it says.
pub(crate) unsafe fn create_hash(
    context: &Arc<Context>,
    attr: &mut ibv_qp_init_attr_ex,
    create_flags: u32,
) -> Result<*mut ibv_qp, Errno> {
    let pd: Arc<Pd> = object::find(attr.pd)?;
    let table: Arc<RwqIndTable> = object::find(attr.rwq_ind_tbl)?;
    if [&pd.inner.context, &table.inner.context].iter().any(|c| !Arc::ptr_eq(c, context)) {
        return Err(Errno::OTHER_CONTEXT);
    }
    let flags = receive_flags(create_flags)?;
    let conf = &attr.rx_hash_conf;
    if u32::from(conf.rx_hash_function) != IBV_RX_HASH_FUNC_TOEPLITZ {
        return Err(Errno::lacks("rx_hash_function is not IBV_RX_HASH_FUNC_TOEPLITZ"));
    }
    // Receives are those of the work queues, and so are their flags.
    let queues = !attr.send_cq.is_null() || !attr.srq.is_null();
    if queues || !flags.is_empty() || conf.rx_hash_key.is_null() {
        return Err(Errno::invalid(
            "a queue pair that spreads frames has no send_cq, no srq and no flags of its own, and needs rx_hash_key",
        ));
    }
    // SAFETY: the caller's promise.
    let key = unsafe { slice::from_raw_parts(conf.rx_hash_key, conf.rx_hash_key_len.into()) };
    let hash =
        RxHash::new(key, conf.rx_hash_fields_mask).map_err(anyverbs::error::CreateError::from)?;
    let init = HashQpInit { table: &table.inner.device, hash, cookie: 0 };
    let device = context.inner.device.create_hash_qp(&pd.inner.device, &init)?;
    attr.cap = c_cap(&device.cap());
    let init = ibv_qp_init_attr {
        qp_context: attr.qp_context,
        send_cq: attr.send_cq,
        recv_cq: attr.recv_cq,
        srq: attr.srq,
        cap: attr.cap,
        qp_type: attr.qp_type,
        sq_sig_all: attr.sq_sig_all,
    };
    publish_qp(Device::Raw(device), None, None, Some(&pd), &init, Arc::clone(context))
}

/// `ibv_modify_qp`. Attributes that a raw queue pair does not have are refused by the mask.
pub(crate) fn modify_raw(qp: &RawQp, attr: &ibv_qp_attr, mask: QpAttrMask) -> Result<(), Errno> {
    let state = |bit, code| {
        let wanted = mask.contains(bit);
        if wanted {
            QpState::from_code(code).ok_or(Errno::invalid("a state is no state of a queue pair"))
        } else {
            Ok(QpState::Reset)
        }
    };
    let to = QpAttr {
        state: state(QpAttrMask::STATE, attr.qp_state)?,
        cur_state: state(QpAttrMask::CUR_STATE, attr.cur_qp_state)?,
        port: attr.port_num,
        rate_limit: attr.rate_limit,
        ..QpAttr::default()
    };
    Ok(qp.modify(&to, mask)?)
}

/// A request's flags, and whether checksums are to be filled in.
pub(crate) fn raw_flags(flags: u32) -> Result<(SendFlags, bool), Errno> {
    let rest = SendFlags::from_bits(flags & !IBV_SEND_IP_CSUM)
        .ok_or(Errno::invalid("send_flags has a bit that is no flag"))?;
    Ok((rest, flags & IBV_SEND_IP_CSUM != 0))
}

/// `ibv_post_send` on a raw queue pair.
///
/// # Safety
/// The list is as its manual page says; `bad_wr` is NULL or writable.
pub(crate) unsafe fn post_send_raw(
    qp: &RawQp,
    mut wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    let mut post = || {
        let mut poster = qp.post()?;
        let mut room = [const { MaybeUninit::uninit() }; MAX_SGE];
        // SAFETY: the caller's promise.
        while let Some(next) = unsafe { wr.as_ref() } {
            let (flags, fill_in_checksums) = raw_flags(next.send_flags)?;
            let segmentation = match next.opcode {
                IBV_WR_SEND => None,
                IBV_WR_TSO => {
                    // SAFETY: integers, which are initialised as the opcode says: the caller's promise.
                    let tso = unsafe { next.ext.tso };
                    Some(Segmentation {
                        header_addr: tso.hdr as u64,
                        header_len: tso.hdr_sz,
                        mss: tso.mss,
                    })
                }
                _ => return Err(Errno::invalid("opcode is neither IBV_WR_SEND nor IBV_WR_TSO")),
            };
            poster.send(&RawSendWr {
                wr_id: next.wr_id,
                flags,
                fill_in_checksums,
                segmentation,
                // SAFETY: the caller's promise.
                sges: unsafe { sges(&mut room, next.sg_list, next.num_sge) }?,
            })?;
            wr = next.next;
        }
        Ok(())
    };
    let posted = post();
    let to = format_args!("ibv_post_send to queue pair {:#08x}", qp.qpn().get());
    let posted = posted.map_err(|e| e.explained(&to));
    // SAFETY: the caller's promise.
    posted.map_or_else(|e| unsafe { refuse_wr(bad_wr, wr, e) }, |()| 0)
}

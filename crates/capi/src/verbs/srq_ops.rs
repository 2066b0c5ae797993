//! Tag matching: `ibv_post_srq_ops`.

use std::{ffi::c_int, mem::MaybeUninit};

use anyverbs::{MAX_SGE, TagAdd, TagHandle, TagOp, TagOpKind};

use crate::{
    abi::*,
    errno::Errno,
    object::deref,
    verbs::{Srq, refuse_wr, sges},
};

/// Slot of `ibv_post_srq_ops`: 0, or the errno value with `*bad_wr` the first operation that was not done. `EINVAL` unless the
/// SRQ matches tags, `ENOMEM` when its list is full. The handle of a tag that is added goes to its `tm.handle`.
///
/// # Safety
/// `srq` is NULL or live; the list is as its manual page says; `bad_wr` is NULL or writable.
pub(crate) unsafe extern "C" fn post_srq_ops(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_ops_wr,
    bad_wr: *mut *mut ibv_ops_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let srq = unsafe { deref(srq) };
    let posted = srq.ok_or(Errno::NULL).and_then(|srq| {
        // SAFETY: the caller's promise.
        while let Some(op) = unsafe { wr.as_mut() } {
            // SAFETY: as above.
            unsafe { post(srq, op) }?;
            wr = op.next;
        }
        Ok(())
    });
    let posted = posted.map_err(|e| e.explained(&"ibv_post_srq_ops"));
    // SAFETY: the caller's promise.
    posted.map_or_else(|e| unsafe { refuse_wr(bad_wr, wr, e) }, |()| 0)
}

/// # Safety
/// `wr` is as its manual page says.
unsafe fn post(srq: &Srq, wr: &mut ibv_ops_wr) -> Result<(), Errno> {
    let flags = wr.flags as ibv_ops_flags;
    if flags & !(IBV_OPS_SIGNALED | IBV_OPS_TM_SYNC) != 0 {
        return Err(Errno::invalid("flags has a bit that is no flag"));
    }
    let mut room = [const { MaybeUninit::uninit() }; MAX_SGE];
    let kind = match wr.opcode {
        IBV_WR_TAG_ADD => {
            let add = &wr.tm.add;
            TagOpKind::Add(TagAdd {
                wr_id: add.recv_wr_id,
                // SAFETY: the caller's promise.
                sges: unsafe { sges(&mut room, add.sg_list, add.num_sge) }?,
                tag: add.tag,
                mask: add.mask,
            })
        }
        IBV_WR_TAG_DEL => TagOpKind::Del(TagHandle(wr.tm.handle)),
        IBV_WR_TAG_SYNC => TagOpKind::Sync,
        _ => {
            return Err(Errno::invalid(
                "opcode is none of IBV_WR_TAG_ADD, IBV_WR_TAG_DEL and IBV_WR_TAG_SYNC",
            ));
        }
    };
    let says = flags & IBV_OPS_TM_SYNC != 0 || wr.opcode == IBV_WR_TAG_SYNC;
    let handle = srq.inner.device.post_tag_op(&TagOp {
        wr_id: wr.wr_id,
        signaled: flags & IBV_OPS_SIGNALED != 0,
        handled: says.then_some(wr.tm.unexpected_cnt),
        kind,
    })?;
    if let Some(handle) = handle {
        wr.tm.handle = handle.0;
    }
    Ok(())
}

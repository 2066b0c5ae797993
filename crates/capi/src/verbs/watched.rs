//! The data path of a program that is checked (`anyverbs run --check`): it tells the checker what is posted and polled. Without
//! it no call comes here: a context gets these functions in place of its own.

use std::ffi::c_int;

use anyverbs::QpState;
use anyverbs_check::{Checker, Piece, Work, checker};

use crate::{abi::*, object, verbs};

/// Lets the checker see what is posted and polled by this table.
pub(super) fn watch(ops: &mut ibv_context_ops) {
    if checker().is_some() {
        ops.post_send = Some(post_send);
        ops.post_recv = Some(post_recv);
        ops.post_srq_recv = Some(post_srq_recv);
        ops.poll_cq = Some(poll_cq);
    }
}

/// Completions of this queue are polled one by one, which is not watched.
pub(super) fn polls_alone(cq: *const ibv_cq_ex) {
    let Some(checker) = checker() else { return };
    checker.ledger().unwatch(|address| {
        let qp = object::lookup(address as *const ibv_qp_ex);
        // SAFETY: the object is live.
        qp.is_ok_and(|qp| unsafe { (*qp.public()).qp_base.send_cq }.cast_const().cast() == cq)
    });
}

/// Whether the queue pair at this address works on what was posted.
pub(super) fn works(address: usize) -> bool {
    let state = object::lookup(address as *const ibv_qp_ex).and_then(|qp| qp.inner.device.state());
    let idle = [QpState::Reset, QpState::Err];
    state.is_ok_and(|state| !idle.contains(&state))
}

/// The elements of a request, as far as they can be read.
///
/// # Safety
/// `list` is NULL or has `count` readable elements.
unsafe fn pieces(list: *const ibv_sge, count: c_int) -> Vec<Piece> {
    let count = usize::try_from(count).ok().filter(|n| !list.is_null() && *n <= anyverbs::MAX_SGE);
    (0..count.unwrap_or(0))
        .map(|n| {
            // SAFETY: the caller's promise.
            let sge = unsafe { list.add(n).read() };
            Piece { addr: sge.addr, len: sge.length, lkey: sge.lkey }
        })
        .collect()
}

/// # Safety
/// `wr` is as its manual page says.
unsafe fn send(wr: &ibv_send_wr, is_datagram: bool) -> Work {
    let (name, is_source) = match wr.opcode {
        IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV => ("SEND", true),
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => ("WRITE", true),
        IBV_WR_RDMA_READ => ("READ", false),
        IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => ("atomic", false),
        _ => ("request", false),
    };
    let has = |flag| wr.send_flags & flag != 0;
    Work {
        name,
        wr_id: wr.wr_id,
        is_signaled: has(IBV_SEND_SIGNALED),
        is_inline: has(IBV_SEND_INLINE),
        is_source,
        // SAFETY: a request of a UD queue pair has this member.
        ah: if is_datagram { unsafe { wr.wr.ud.ah as usize } } else { 0 },
        // SAFETY: the caller's promise.
        pieces: unsafe { pieces(wr.sg_list, wr.num_sge) },
    }
}

/// Posts a list, and counts what was taken.
///
/// # Safety
/// The list from `first` on is linked by `next`; `bad` is NULL or writable.
unsafe fn count<T>(
    first: *mut T,
    next: impl Fn(&T) -> *mut T,
    bad: *mut *mut T,
    post: impl FnOnce(*mut *mut T) -> c_int,
) -> (c_int, usize) {
    let mut refused = std::ptr::null_mut();
    let errno = post(&raw mut refused);
    let (mut n, mut at) = (0, first);
    // SAFETY: the caller's promise.
    while let Some(wr) = unsafe { at.as_ref() } {
        if errno != 0 && at == refused {
            break;
        }
        (n, at) = (n + 1, next(wr));
    }
    if errno != 0 && !bad.is_null() {
        // SAFETY: the caller's promise.
        unsafe { bad.write(refused) };
    }
    (errno, n)
}

/// As [`verbs::post_send`].
///
/// # Safety
/// As there.
unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let post = |bad| unsafe { verbs::post_send(qp, wr, bad) };
    let Some(checker) = checker().filter(|_| !qp.is_null()) else { return post(bad) };
    // SAFETY: not NULL, hence live: the caller's promise.
    let is_datagram = unsafe { (*qp).qp_type } == IBV_QPT_UD;
    let (mut works, mut at) = (Vec::new(), wr);
    // SAFETY: the caller's promise.
    while let Some(next) = unsafe { at.as_ref() } {
        // SAFETY: as above.
        works.push(unsafe { send(next, is_datagram) });
        at = next.next;
    }
    let mut errno = 0;
    checker.ledger().post_sends(qp as usize, works, || {
        // SAFETY: as above.
        let (result, taken) = unsafe { count(wr, |wr| wr.next, bad, post) };
        errno = result;
        (taken, result == libc::ENOMEM)
    });
    errno
}

/// # Safety
/// As for [`verbs::post_recv`].
unsafe fn post_receives(
    checker: &Checker,
    queue: usize,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
    post: impl FnOnce(*mut *mut ibv_recv_wr) -> c_int,
) -> c_int {
    let (mut works, mut at) = (Vec::new(), wr);
    // SAFETY: the caller's promise.
    while let Some(next) = unsafe { at.as_ref() } {
        works.push(Work {
            name: "receive",
            wr_id: next.wr_id,
            is_signaled: true,
            is_inline: false,
            is_source: false,
            ah: 0,
            // SAFETY: as above.
            pieces: unsafe { pieces(next.sg_list, next.num_sge) },
        });
        at = next.next;
    }
    let mut errno = 0;
    checker.ledger().post_receives(queue, works, || {
        // SAFETY: as above.
        let (result, taken) = unsafe { count(wr, |wr| wr.next, bad, post) };
        errno = result;
        taken
    });
    errno
}

/// As [`verbs::post_recv`].
///
/// # Safety
/// As there.
unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let post = |bad| unsafe { verbs::post_recv(qp, wr, bad) };
    match checker() {
        // SAFETY: the caller's promise.
        Some(checker) => unsafe { post_receives(checker, qp as usize, wr, bad, post) },
        None => post(bad),
    }
}

/// As [`verbs::post_srq_recv`].
///
/// # Safety
/// As there.
unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let post = |bad| unsafe { verbs::post_srq_recv(srq, wr, bad) };
    match checker() {
        // SAFETY: the caller's promise.
        Some(checker) => unsafe { post_receives(checker, srq as usize, wr, bad, post) },
        None => post(bad),
    }
}

/// As [`verbs::poll_cq`].
///
/// # Safety
/// As there.
unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller's promise.
    let polled = unsafe { verbs::poll_cq(cq, entries, wc) };
    if polled > 0
        && let Some(checker) = checker()
    {
        let mut ledger = checker.ledger();
        for n in 0..polled as usize {
            // SAFETY: the completions that were just written.
            let wc = unsafe { wc.add(n).read() };
            let is_receive = wc.opcode & IBV_WC_RECV != 0;
            ledger.polled(wc.qp_num, wc.wr_id, is_receive, wc.status != IBV_WC_SUCCESS);
        }
    }
    polled
}

//! The data path of a program that was built with MemorySanitizer or ThreadSanitizer: they are told what the device does. Without
//! them no call comes here: a context gets these functions in place of its own.

use std::ffi::c_int;

use anyverbs_sanitizers::{self as sanitizers, Quiet};

use crate::{
    abi::*,
    check,
    verbs::{self, cq_ex, watched, wr},
};

/// Tells the sanitizers what is posted and polled by this table.
pub(super) fn sanitize(ops: &mut ibv_context_ops) {
    if sanitizers::are_there() {
        ops.post_send = Some(post_send);
        ops.post_recv = Some(post_recv);
        ops.post_srq_recv = Some(post_srq_recv);
        ops.poll_cq = Some(poll_cq);
        ops.req_notify_cq = Some(req_notify_cq);
    }
}

/// Tells them what is posted by `ibv_wr_complete`.
pub(super) fn sanitize_sends(qp: &mut ibv_qp_ex) {
    if sanitizers::are_there() {
        qp.wr_complete = Some(wr_complete);
    }
}

/// Tells them what is polled by `ibv_start_poll`.
pub(super) fn sanitize_iterator(cq: &mut ibv_cq_ex) {
    if sanitizers::are_there() {
        cq.start_poll = Some(start_poll);
        cq.next_poll = Some(next_poll);
    }
}

/// The program gives work to the device.
fn posting<R>(post: impl FnOnce() -> R) -> R {
    sanitizers::release();
    let _quiet = Quiet::new();
    post()
}

/// The device tells the program of work that has ended, if it tells of any.
fn polling<R>(poll: impl FnOnce() -> R, tells: impl FnOnce(&R) -> bool) -> R {
    let quiet = Quiet::new();
    let result = poll();
    drop(quiet);
    if tells(&result) {
        sanitizers::acquire();
    }
    result
}

/// One of two functions: the other one tells the checker as well.
fn choose<F>(checked: F, plain: F) -> F {
    if check::is_on() { checked } else { plain }
}

type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
type PostSrqRecv =
    unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;
type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
type ReqNotify = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
type OnCq = unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int;
type OnQp = unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int;
type StartPoll = unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int;

unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    let post = choose::<PostSend>(watched::post_send, verbs::post_send);
    sanitizers::initialised(bad_wr);
    // SAFETY: the caller's promise, here and below.
    posting(|| unsafe { post(qp, wr, bad_wr) })
}

unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = choose::<PostRecv>(watched::post_recv, verbs::post_recv);
    sanitizers::initialised(bad_wr);
    // SAFETY: as above.
    posting(|| unsafe { post(qp, wr, bad_wr) })
}

unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    let post = choose::<PostSrqRecv>(watched::post_srq_recv, verbs::post_srq_recv);
    sanitizers::initialised(bad_wr);
    // SAFETY: as above.
    posting(|| unsafe { post(srq, wr, bad_wr) })
}

unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    let complete = choose::<OnQp>(watched::wr_complete, wr::wr_complete);
    // SAFETY: as above.
    posting(|| unsafe { complete(qp) })
}

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    let poll = choose::<PollCq>(watched::poll_cq, verbs::poll_cq);
    // SAFETY: as above.
    let count = polling(|| unsafe { poll(cq, entries, wc) }, |count| *count > 0);
    let len = usize::try_from(count).unwrap_or(0) * size_of::<ibv_wc>();
    sanitizers::initialised_bytes(wc.cast(), len);
    count
}

unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    let notify = choose::<ReqNotify>(watched::req_notify_cq, verbs::req_notify_cq);
    // SAFETY: as above.
    posting(|| unsafe { notify(cq, solicited_only) })
}

unsafe extern "C" fn start_poll(cq: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    let start = choose::<StartPoll>(watched::start_poll, cq_ex::start_poll);
    // SAFETY: as above.
    polling(|| unsafe { start(cq, attr) }, |errno| *errno == 0)
}

unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    let next = choose::<OnCq>(watched::next_poll, cq_ex::next_poll);
    // SAFETY: as above.
    polling(|| unsafe { next(cq) }, |errno| *errno == 0)
}

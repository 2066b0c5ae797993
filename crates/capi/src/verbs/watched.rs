//! The data path of a program that is checked (`anyverbs run --check`): it tells the checker what is posted and polled. Without
//! it no call comes here: a context gets these functions in place of its own.

use std::{
    ffi::{c_int, c_uint, c_void},
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

use anyverbs::{Counter, Counters, DropReason, QpState, Wc};
use anyverbs_check::{
    Activity, Checker, Completion, DroppedDatagrams, Elements, LONGEST_WAIT, Piece, Pieces, Work,
    checker,
};

use smallvec::SmallVec;

use crate::{
    abi::*,
    check,
    errno::Errno,
    object,
    verbs::{self, Batch, Qp, cq_ex, wr},
};

/// Lets the checker see what is posted and polled by this table.
pub(super) fn watch(ops: &mut ibv_context_ops) {
    if checker().is_some() {
        ops.post_send = Some(post_send);
        ops.bind_mw = Some(bind_mw);
        ops.post_recv = Some(post_recv);
        ops.post_srq_recv = Some(post_srq_recv);
        ops.poll_cq = Some(poll_cq);
        ops.req_notify_cq = Some(req_notify_cq);
    }
}

/// Lets the checker see what is posted by `ibv_wr_complete`.
pub(super) fn watch_sends(qp: &mut ibv_qp_ex) {
    if checker().is_some() {
        qp.wr_start = Some(wr_start);
        qp.wr_complete = Some(wr_complete);
        qp.wr_abort = Some(wr_abort);
        qp.wr_set_inline_data = Some(wr_set_inline_data);
        qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    }
}

/// Lets the checker see what is polled by `ibv_start_poll`.
pub(super) fn watch_iterator(cq: &mut ibv_cq_ex) {
    if checker().is_some() {
        cq.start_poll = Some(start_poll);
        cq.next_poll = Some(next_poll);
        cq.end_poll = Some(end_poll);
        cq.read_opcode = Some(read_opcode);
        cq.read_byte_len = Some(read_byte_len);
        cq.read_imm_data = Some(read_imm_data);
        cq.read_src_qp = Some(read_src_qp);
        cq.read_wc_flags = Some(read_wc_flags);
        cq.read_slid = Some(read_slid);
        cq.read_sl = Some(read_sl);
        cq.read_dlid_path_bits = Some(read_dlid_path_bits);
        cq.read_vendor_err = Some(read_vendor_err);
        cq.read_qp_num = Some(read_qp_num);
        cq.read_completion_ts = Some(read_completion_ts);
        cq.read_completion_wallclock_ns = Some(read_completion_wallclock_ns);
        cq.read_cvlan = Some(read_cvlan);
        cq.read_flow_tag = Some(read_flow_tag);
    }
}

/// The way in which the queue pair at this address treats what was posted.
pub(crate) fn activity(address: usize) -> Activity {
    let state = object::lookup(address as *const ibv_qp_ex).and_then(|qp| qp.inner.device.state());
    match state {
        Err(_) | Ok(QpState::Reset | QpState::Init) => Activity::Idle,
        Ok(QpState::Err) => Activity::Failed,
        Ok(_) => Activity::Works,
    }
}

/// The completions that lie in the completion queue of this address.
pub(crate) fn waiting(address: usize) -> Vec<Completion> {
    let Ok(cq) = object::lookup(address as *const ibv_cq_ex) else { return Vec::new() };
    cq.inner.device.waiting().iter().map(completion).collect()
}

/// A queue pair is about to end or to be reset. It forgets the datagrams and messages that it has dropped, how it differs from the
/// other end, and its completions.
pub(super) fn look_at_drops(qp: &Qp) {
    if check::is_on() {
        look_for_drops(qp);
        check::takes_along(qp.public());
    }
}

/// Tells the checker of what nobody else reports.
fn look_for_drops(qp: &Qp) {
    if let Ok(device) = qp.inner.device.transport() {
        check::dropped(qp.public().cast(), &check::drops_of(device, Instant::now() + LONGEST_WAIT));
    }
}

/// The same of the queue pair at this address, for the checker when the process ends.
pub(crate) fn drops_at_exit(qp: usize, deadline: Instant) -> Vec<DroppedDatagrams> {
    let wait = deadline.saturating_duration_since(Instant::now());
    let qp = object::lookup_within(qp as *const ibv_qp_ex, wait);
    let drops = |qp: Arc<Qp>| Some(check::drops_of(qp.inner.device.transport().ok()?, deadline));
    qp.and_then(drops).unwrap_or_default()
}

/// More requests than a queue takes. A list that has no end is read up to here.
const LONGEST_LIST: usize = 1 << 16;

/// The elements of a request, as far as they can be read.
///
/// # Safety
/// `list` is NULL or has `count` readable elements.
#[inline]
unsafe fn pieces(list: *const ibv_sge, count: c_int) -> Pieces {
    let count = usize::try_from(count).ok().filter(|n| !list.is_null() && *n <= anyverbs::MAX_SGE);
    let mut pieces = Pieces::new();
    for n in 0..count.unwrap_or(0) {
        // SAFETY: the caller's promise.
        let sge = unsafe { list.add(n).read() };
        pieces.push(Piece { addr: sge.addr, len: sge.length, lkey: sge.lkey });
    }
    pieces
}

/// The requests of a list.
///
/// # Safety
/// The list from `first` on is linked by `next`.
unsafe fn requests<'a, T>(
    first: *const T,
    next: impl Fn(&T) -> *mut T,
) -> impl Iterator<Item = &'a T>
where
    T: 'a,
{
    // SAFETY: the caller's promise.
    let at = |at: *const T| unsafe { at.as_ref() };
    std::iter::successors(at(first), move |wr| at(next(wr))).take(LONGEST_LIST)
}

/// # Safety
/// `wr` is as its manual page says.
unsafe fn send(wr: &ibv_send_wr, is_datagram: bool) -> Work {
    let (name, elements) = match wr.opcode {
        IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV => ("SEND", Elements::Read),
        IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => ("WRITE", Elements::Read),
        IBV_WR_RDMA_READ => ("READ", Elements::Written),
        IBV_WR_ATOMIC_CMP_AND_SWP => ("COMPARE AND SWAP", Elements::Written),
        IBV_WR_ATOMIC_FETCH_AND_ADD => ("FETCH AND ADD", Elements::Written),
        _ => ("request", Elements::Unused),
    };
    let has = |flag| wr.send_flags & flag != 0;
    Work {
        name,
        wr_id: wr.wr_id,
        is_signaled: has(IBV_SEND_SIGNALED),
        is_inline: has(IBV_SEND_INLINE),
        elements,
        is_fenced: has(IBV_SEND_FENCE),
        // SAFETY: a request of a UD queue pair has this member.
        ah: if is_datagram { unsafe { wr.wr.ud.ah as usize } } else { 0 },
        pieces: match elements {
            Elements::Unused => Pieces::new(),
            // SAFETY: the caller's promise.
            _ => unsafe { pieces(wr.sg_list, wr.num_sge) },
        },
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
pub(super) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let post = |bad| unsafe { verbs::post_send(qp, wr, bad) };
    let Some(checker) = checker().filter(|_| !qp.is_null()) else {
        anyverbs_check::posts(qp as usize);
        return post(bad);
    };
    let mut ledger = checker.ledger();
    if ledger.uses_dead(qp as usize) {
        // SAFETY: the caller's promise.
        return unsafe { verbs::refuse_wr(bad, wr, Errno::said(libc::EINVAL)) };
    }
    // SAFETY: live, by the caller's promise.
    if unsafe { in_row(qp.cast()) } {
        let wrong = "ibv_post_send is called between ibv_wr_start and the end of that row";
        ledger.is_out_of_order(qp as usize, wrong);
    }
    // SAFETY: not NULL, hence live: the caller's promise.
    let is_datagram = unsafe { (*qp).qp_type } == IBV_QPT_UD;
    // SAFETY: the caller's promise.
    let works = unsafe { requests(wr, |wr| wr.next).map(|wr| send(wr, is_datagram)) };
    let mut errno = 0;
    check::posts(&mut ledger, "ibv_post_send", |ledger| {
        ledger.post_sends(qp as usize, works, || {
            // SAFETY: as above.
            let (result, taken) = unsafe { count(wr, |wr| wr.next, bad, post) };
            errno = result;
            (taken, result == libc::ENOMEM)
        });
    });
    errno
}

/// As [`verbs::bind_mw`].
///
/// # Safety
/// As there.
unsafe extern "C" fn bind_mw(qp: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller's promise.
    let post = || unsafe { verbs::bind_mw(qp, mw, bind) };
    // SAFETY: NULL or readable, by the caller's promise.
    let Some((checker, info)) = checker().zip(unsafe { bind.as_ref() }) else {
        anyverbs_check::posts(qp as usize);
        return post();
    };
    let mut ledger = checker.ledger();
    if ledger.uses_dead(qp as usize) {
        return libc::EINVAL;
    }
    let work = Work {
        name: "bind of a memory window",
        wr_id: info.wr_id,
        is_signaled: info.send_flags & IBV_SEND_SIGNALED != 0,
        is_inline: false,
        elements: Elements::Unused,
        is_fenced: info.send_flags & IBV_SEND_FENCE != 0,
        ah: 0,
        pieces: Pieces::new(),
    };
    let mut errno = 0;
    check::posts(&mut ledger, "ibv_bind_mw", |ledger| {
        ledger.post_sends(qp as usize, std::iter::once(work), || {
            errno = post();
            (usize::from(errno == 0), errno == libc::ENOMEM)
        });
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
    // The device refuses it. In the ledger the address 0 stands for no queue.
    if queue == 0 {
        return post(bad);
    }
    let mut ledger = checker.ledger();
    if ledger.uses_dead(queue) {
        // SAFETY: the caller's promise.
        return unsafe { verbs::refuse_wr(bad, wr, Errno::said(libc::EINVAL)) };
    }
    let work = |wr: &ibv_recv_wr| Work {
        name: "receive",
        wr_id: wr.wr_id,
        is_signaled: true,
        is_inline: false,
        elements: Elements::Written,
        is_fenced: false,
        ah: 0,
        // SAFETY: the caller's promise.
        pieces: unsafe { pieces(wr.sg_list, wr.num_sge) },
    };
    // SAFETY: as above.
    let works = unsafe { requests(wr, |wr| wr.next) }.map(work);
    let mut errno = 0;
    ledger.post_receives(queue, works, || {
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
pub(super) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let post = |bad| unsafe { verbs::post_recv(qp, wr, bad) };
    match checker() {
        // SAFETY: the caller's promise.
        Some(checker) => unsafe { post_receives(checker, qp as usize, wr, bad, post) },
        None => {
            anyverbs_check::posts(qp as usize);
            post(bad)
        }
    }
}

/// As [`verbs::post_srq_recv`].
///
/// # Safety
/// As there.
pub(super) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let post = |bad| unsafe { verbs::post_srq_recv(srq, wr, bad) };
    match checker() {
        // SAFETY: the caller's promise.
        Some(checker) => unsafe { post_receives(checker, srq as usize, wr, bad, post) },
        None => {
            anyverbs_check::posts(srq as usize);
            post(bad)
        }
    }
}

/// As [`verbs::poll_cq`].
///
/// # Safety
/// As there.
pub(super) unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: NULL or live, by the caller's promise.
    if unsafe { object::deref::<ibv_cq_ex>(cq.cast()) }
        .is_some_and(|cq| cq.inner.iterator.is_mine())
    {
        let wrong = "ibv_poll_cq is called between ibv_start_poll and ibv_end_poll";
        check::is_out_of_order(cq, wrong);
    }
    let mut seen = SmallVec::<[Completion; 16]>::new();
    // SAFETY: the caller's promise.
    let poll = || unsafe { verbs::poll_each(cq, entries, wc, |wc| seen.push(completion(wc))) };
    // SAFETY: the caller's promise.
    let polled = unsafe { in_turn(cq.cast(), "ibv_poll_cq", poll) };
    if polled == 0 {
        // SAFETY: as above.
        unsafe { tell_of_empty(cq.cast()) };
    } else if polled < 0 {
        check::uses_dead(cq);
    }
    if polled > 0
        && let Some(checker) = checker()
    {
        let mut ledger = checker.ledger();
        for (n, completion) in seen.iter().enumerate() {
            ledger.polled(completion);
            // SAFETY: the completions that were just written.
            let wc = unsafe { &mut *wc.add(n) };
            if wc.status != IBV_WC_SUCCESS {
                ledger.poisons();
                poison(wc);
            }
        }
    }
    polled
}

/// As [`wr::wr_start`].
///
/// # Safety
/// `qp` is NULL or live.
unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's promise.
    if unsafe { in_row(qp) } {
        check::is_out_of_order(
            qp,
            "ibv_wr_start is called again, and neither ibv_wr_complete nor ibv_wr_abort before",
        );
    }
    // SAFETY: the caller's promise.
    unsafe { wr::wr_start(qp) };
}

/// Whether this thread has begun to build requests for a queue pair, and has not ended.
///
/// # Safety
/// `qp` is NULL or live.
unsafe fn in_row(qp: *mut ibv_qp_ex) -> bool {
    // SAFETY: the caller's promise.
    let batch = unsafe { object::deref(qp) }.and_then(|qp| qp.inner.batch.as_ref());
    batch.is_some_and(Batch::is_mine)
}

/// As [`wr::wr_abort`].
///
/// # Safety
/// As there.
unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's promise.
    unsafe {
        if !in_row(qp) {
            let wrong = "ibv_wr_abort is called, and no ibv_wr_start of this thread before it";
            check::is_out_of_order(qp, wrong);
        }
        wr::wr_abort(qp);
    }
}

/// A queue pair has ended. That is wrong between `ibv_wr_start` and the end of that row.
pub(super) fn ends_in_row(qp: &Qp) {
    if qp.inner.batch.as_ref().is_some_and(Batch::is_begun) {
        check::is_out_of_order(
            qp.public(),
            "ibv_destroy_qp is called, and neither ibv_wr_complete nor ibv_wr_abort after ibv_wr_start",
        );
    }
}

/// As [`verbs::wr_complete`].
///
/// # Safety
/// `qp` is NULL or live.
pub(super) unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    if check::uses_dead(qp) {
        return Errno::said(libc::EINVAL).set();
    }
    // SAFETY: the caller's promise.
    if !unsafe { in_row(qp) } {
        let wrong = "ibv_wr_complete is called, and no ibv_wr_start of this thread before it";
        check::is_out_of_order(qp, wrong);
    }
    // SAFETY: the caller's promise.
    let (batch, complete) = unsafe {
        (object::deref(qp).and_then(|qp| qp.inner.batch.as_ref()), || wr::wr_complete(qp))
    };
    let Some((checker, batch)) = checker().zip(batch) else {
        anyverbs_check::posts(qp as usize);
        return complete();
    };
    let works = batch.works();
    let (offered, mut errno) = (works.len(), 0);
    check::posts(&mut checker.ledger(), "ibv_wr_complete", |ledger| {
        ledger.post_sends(qp as usize, works.into_iter(), || {
            errno = complete();
            (if errno == 0 { offered } else { 0 }, errno == libc::ENOMEM)
        });
    });
    errno
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buf = ibv_data_buf { addr, length };
    // SAFETY: the caller's promise.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const buf) };
}

/// As [`wr::wr_set_inline_data_list`].
///
/// # Safety
/// As there.
unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    // The device refuses longer lists, and does not read them.
    let is_read = !qp.is_null() && !list.is_null() && count <= anyverbs::MAX_SGE;
    if let Some(checker) = checker().filter(|_| is_read) {
        // SAFETY: the caller's promise.
        let batch = unsafe { object::deref(qp) }.and_then(|qp| qp.inner.batch.as_ref());
        let built = batch.map(Batch::works_to_fill).unwrap_or_default();
        if !built.is_empty() {
            // SAFETY: as above.
            let list = (0..count).map(|n| unsafe { list.add(n).read() });
            let pieces = list.map(|buf| Piece {
                addr: buf.addr as u64,
                len: u32::try_from(buf.length).unwrap_or(u32::MAX),
                lkey: 0,
            });
            checker.ledger().sets_inline(qp as usize, pieces.collect(), built);
        }
    }
    // SAFETY: the caller's promise.
    unsafe { wr::wr_set_inline_data_list(qp, count, list) };
}

/// As [`cq_ex::start_poll`].
///
/// # Safety
/// As there.
pub(super) unsafe extern "C" fn start_poll(
    cq: *mut ibv_cq_ex,
    attr: *mut ibv_poll_cq_attr,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let inner = object::deref(cq).map(|cq| &cq.inner);
        if inner.is_some_and(|inner| inner.iterator.is_mine()) {
            let wrong = "ibv_start_poll is called again, and ibv_end_poll was not called before";
            check::is_out_of_order(cq, wrong);
        }
        let turn = turn(cq, "ibv_start_poll");
        let errno = cq_ex::start_poll(cq, attr);
        set_at_end(cq, errno);
        if let Some(checker) = turn.filter(|_| errno != 0) {
            checker.ledger().ends_turn(cq as usize);
        }
        tell_present(cq, errno);
        errno
    }
}

/// As [`cq_ex::end_poll`].
///
/// # Safety
/// As there.
unsafe extern "C" fn end_poll(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller's promise.
    unsafe {
        turn(cq, "ibv_end_poll");
        if object::deref(cq).is_some_and(|cq| !cq.inner.iterator.is_mine()) {
            let wrong = "ibv_end_poll is called, and no ibv_start_poll of this thread that has returned 0 is before it";
            check::is_out_of_order(cq, wrong);
        }
        cq_ex::end_poll(cq);
        if let Some(checker) = checker() {
            checker.ledger().ends_turn(cq as usize);
        }
    }
}

/// As [`verbs::req_notify_cq`].
///
/// # Safety
/// As there.
pub(super) unsafe extern "C" fn req_notify_cq(cq: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { in_turn(cq.cast(), "ibv_req_notify_cq", || verbs::req_notify_cq(cq, solicited_only)) }
}

/// A thread's turn begins at a queue of which the program promised that one thread at a time uses it. `None` if it does not begin now.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn turn(cq: *mut ibv_cq_ex, call: &'static str) -> Option<&'static Checker> {
    let checker = checker()?;
    // SAFETY: the caller's promise.
    let is_single = unsafe { object::deref(cq) }.is_some_and(|cq| cq.inner.is_single_threaded);
    (is_single && checker.ledger().begins_turn(cq as usize, call)).then_some(checker)
}

/// Makes a call in the thread's turn.
///
/// # Safety
/// As for [`turn`].
pub(super) unsafe fn in_turn<T>(
    cq: *mut ibv_cq_ex,
    name: &'static str,
    call: impl FnOnce() -> T,
) -> T {
    // SAFETY: the caller's promise.
    let turn = unsafe { turn(cq, name) };
    let result = call();
    if let Some(checker) = turn {
        checker.ledger().ends_turn(cq as usize);
    }
    result
}

/// As [`cq_ex::next_poll`].
///
/// # Safety
/// As there.
pub(super) unsafe extern "C" fn next_poll(cq: *mut ibv_cq_ex) -> c_int {
    // SAFETY: the caller's promise.
    unsafe {
        let errno = in_turn(cq, "ibv_next_poll", || cq_ex::next_poll(cq));
        set_at_end(cq, errno);
        tell_present(cq, errno);
        errno
    }
}

/// Notes whether a call of this result has left a completion to look at.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn set_at_end(cq: *mut ibv_cq_ex, errno: c_int) {
    // SAFETY: the caller's promise.
    if let Some(cq) = unsafe { object::deref(cq) } {
        cq.inner.is_at_end.store(errno != 0, Ordering::Relaxed);
    }
}

/// The program reads a field, for which it needs a completion, and this flag of `ibv_create_cq_ex`; 0 is none.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn reads(cq: *mut ibv_cq_ex, call: &str, flag: ibv_create_cq_wc_flags) {
    // SAFETY: the caller's promise.
    let Some(inner) = (unsafe { object::deref(cq) }).map(|cq| &cq.inner) else { return };
    if !inner.iterator.is_mine() || inner.is_at_end.load(Ordering::Relaxed) {
        check::is_out_of_order(cq, &format!("ibv_wc_{call} is called, and there is no completion"));
    } else if inner.asked & u64::from(flag) != u64::from(flag) {
        let why = "wc_flags of ibv_create_cq_ex did not ask for the field";
        check::is_out_of_order(cq, &format!("ibv_wc_{call} is called, and {why}"));
    }
}

/// Functions that read a field which holds in a failed completion, too.
macro_rules! plain_readers {
    ($($name:ident: $type:ty, $flag:expr;)*) => { $(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: NULL or live, by the caller's promise.
            unsafe {
                reads(cq, stringify!($name), $flag);
                cq_ex::$name(cq)
            }
        }
    )* };
}

plain_readers! {
    read_vendor_err: u32, 0;
    read_qp_num: u32, IBV_WC_EX_WITH_QP_NUM;
    read_completion_ts: u64, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
    read_completion_wallclock_ns: u64, IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
    read_cvlan: u16, IBV_WC_EX_WITH_CVLAN;
    read_flow_tag: u32, IBV_WC_EX_WITH_FLOW_TAG;
}

/// Stands in undefined fields.
const POISON: u32 = 0x5a5a_5a5a;

/// The undefined opcode of a failed completion: of no operation, and with the bit of receives where it does not belong.
fn poisoned_opcode(opcode: ibv_wc_opcode) -> ibv_wc_opcode {
    if opcode & IBV_WC_RECV != 0 { POISON & !IBV_WC_RECV } else { POISON | IBV_WC_RECV }
}

/// Fills the fields of a failed completion that are undefined. `wr_id`, `status`, `qp_num` and `vendor_err` hold.
fn poison(wc: &mut ibv_wc) {
    wc.opcode = poisoned_opcode(wc.opcode);
    wc.byte_len = POISON;
    wc.data = ibv_wc_data { imm_data: POISON };
    wc.src_qp = POISON;
    wc.wc_flags = POISON;
    wc.pkey_index = POISON as u16;
    wc.slid = POISON as u16;
    wc.sl = POISON as u8;
    wc.dlid_path_bits = POISON as u8;
}

/// Functions that read a field which is undefined in a failed completion, and what they return then.
macro_rules! readers {
    ($($name:ident: $type:ty, $flag:expr => $poison:expr;)*) => { $(
        unsafe extern "C" fn $name(cq: *mut ibv_cq_ex) -> $type {
            // SAFETY: NULL or live, by the caller's promise.
            unsafe {
                reads(cq, stringify!($name), $flag);
                let value = cq_ex::$name(cq);
                let poison: fn($type) -> $type = $poison;
                match failed(cq).zip(checker()) {
                    Some((completion, checker)) => {
                        checker.ledger().reads_undefined(&completion, stringify!($name));
                        poison(value)
                    }
                    None => value,
                }
            }
        }
    )* };
}

readers! {
    read_opcode: ibv_wc_opcode, 0 => poisoned_opcode;
    read_byte_len: u32, IBV_WC_EX_WITH_BYTE_LEN => |_| POISON;
    read_imm_data: u32, IBV_WC_EX_WITH_IMM => |_| POISON;
    read_src_qp: u32, IBV_WC_EX_WITH_SRC_QP => |_| POISON;
    read_wc_flags: c_uint, 0 => |_| POISON;
    read_slid: u32, IBV_WC_EX_WITH_SLID => |_| POISON;
    read_sl: u8, IBV_WC_EX_WITH_SL => |_| POISON as u8;
    read_dlid_path_bits: u8, IBV_WC_EX_WITH_DLID_PATH_BITS => |_| POISON as u8;
}

/// The completion that the program looks at, if it failed.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn failed(cq: *mut ibv_cq_ex) -> Option<Completion> {
    // SAFETY: the caller's promise.
    let cq = unsafe { object::deref(cq) }?;
    let present = cq.inner.iterator.with(|ex| completion(&ex.wc))?;
    Some(present).filter(|completion| completion.status != IBV_WC_SUCCESS)
}

fn completion(wc: &Wc) -> Completion {
    Completion {
        number: wc.qpn.get(),
        wr_id: wc.wr_id,
        is_receive: wc.opcode.is_recv(),
        status: wc.status as u32,
        cause: wc.vendor_err,
        // A device of the kernel does not count them.
        send: Some(wc.sq_count).filter(|count| !wc.opcode.is_recv() && *count != 0),
    }
}

/// A queue was found empty. It may have lost completions, or the datagrams were dropped for which the program waits.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn tell_of_empty(cq: *mut ibv_cq_ex) {
    // SAFETY: the caller's promise.
    let Some(inner) = (unsafe { object::deref(cq) }).map(|cq| &cq.inner) else { return };
    if inner.device.is_overrun() {
        check::overrun(cq);
    }
    if !check::has_silent_qps() {
        return;
    }
    // The queue pairs of a completion queue may be on both ports.
    let counters = [1, 2].map(|port| inner.context.inner.device.counters_of_port(port).ok());
    let dropped_on = |of: &Counters| -> u64 {
        let of_datagrams = DropReason::ALL.into_iter().map(DropReason::counter);
        of_datagrams.chain([Counter::DropUcAccess]).map(|counter| of.read(counter)).sum()
    };
    let dropped = counters.into_iter().flatten().map(dropped_on).sum();
    if inner.dropped.swap(dropped, Ordering::Relaxed) == dropped {
        return;
    }
    for qp in check::silent_qps(cq) {
        if let Ok(qp) = object::lookup(qp as *const ibv_qp_ex) {
            look_for_drops(&qp);
        }
    }
}

/// Tells of the completion that the program looks at, if there is one.
///
/// # Safety
/// `cq` is NULL or live.
unsafe fn tell_present(cq: *mut ibv_cq_ex, errno: c_int) {
    if errno == libc::ENOENT {
        // SAFETY: the caller's promise.
        unsafe { tell_of_empty(cq) };
    }
    let Some(checker) = checker() else { return };
    if errno != 0 {
        checker.ledger().uses_dead(cq as usize);
        return;
    }
    // SAFETY: the caller's promise.
    let Some(cq) = (unsafe { object::deref(cq) }) else { return };
    if let Some(completion) = cq.inner.iterator.with(|ex| completion(&ex.wc)) {
        checker.ledger().polled(&completion);
    }
}

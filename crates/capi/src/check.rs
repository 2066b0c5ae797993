//! Tells the checker (`anyverbs run --check`) what a program makes and ends. What it posts and polls, `verbs::watched` tells.

use std::{
    any::{Any, type_name},
    cell::Cell,
    collections::VecDeque,
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use anyverbs::{DropReason, Failed, Gid, Lost};
use anyverbs_check::{
    Activity, Dropped, DroppedDatagrams, Kind, Ledger, QueuePair, Refusal, Region, checker,
};

use parking_lot::Mutex;

use crate::{abi::*, errno::Errno};

// A test binary has no program that is checked.
#[cfg(not(test))]
#[used]
#[unsafe(link_section = ".init_array")]
static AT_LOAD: extern "C" fn() = at_load;

/// Before the program, unless that loads the library by dlopen(3). What is told first to the C library runs last at exit. So destructors of
/// the program run before the search for objects that are left. With dlopen(3) the program's destructors, and the handlers that it has
/// registered before, run behind the search.
#[cfg(not(test))]
extern "C" fn at_load() {
    let read: anyverbs_check::Read = |from, to| {
        let from = std::ptr::with_exposed_provenance(from as usize);
        // SAFETY: the destination is writable; the copy survives a source that is not mapped.
        unsafe { anyverbs::copy_guarded(to.as_mut_ptr(), from, to.len()) }.is_ok()
    };
    anyverbs_check::init(read, crate::verbs::drops_at_exit, crate::log::prepare);
}

/// An object was given to the program.
pub(crate) fn made<P>(pointer: *const P) {
    if let Some(checker) = checker() {
        let kind = Kind::of_struct(type_name::<P>());
        let context = if kind.begins_with_context() {
            // SAFETY: the object was just made, and its public struct begins with this pointer.
            unsafe { pointer.cast::<*mut ibv_context>().read() }
        } else {
            std::ptr::null_mut()
        };
        let context = if context.is_null() { 0 } else { crate::verbs::extended(context) as usize };
        checker.ledger().made(pointer as usize, kind, context);
    }
}

/// A call for this object has no place where it stands: this is wrong.
#[cold]
pub(crate) fn is_out_of_order<P>(pointer: *const P, wrong: &str) {
    if let Some(checker) = checker() {
        checker.ledger().is_out_of_order(pointer as usize, wrong);
    }
}

/// The program closes a context.
pub(crate) fn closes(pointer: *const verbs_context) {
    if let Some(checker) = checker() {
        checker.ledger().closes(pointer as usize);
    }
}

/// The program destroys an event channel.
pub(crate) fn destroys_channel(pointer: *const rdma_event_channel) {
    if let Some(checker) = checker() {
        checker.ledger().destroys_channel(pointer as usize);
    }
}

/// The program has made a queue pair of type UD or UC.
static HAS_SILENT_QPS: AtomicBool = AtomicBool::new(false);

/// Whether the program has made a queue pair of type UD or UC. One that waits polls often, and asks for what was dropped each time.
pub(crate) fn has_silent_qps() -> bool {
    HAS_SILENT_QPS.load(Ordering::Relaxed)
}

/// Facts about a queue pair that was given to the program.
pub(crate) fn made_qp(
    pointer: *const ibv_qp,
    pd: *const ibv_pd,
    init: &ibv_qp_init_attr,
    number: u32,
) {
    if let Some(checker) = checker() {
        let facts = QueuePair {
            number,
            is_datagram: init.qp_type == IBV_QPT_UD,
            is_uc: init.qp_type == IBV_QPT_UC,
            is_reliable: init.qp_type == IBV_QPT_RC,
            signals_all: init.sq_sig_all != 0,
            max_inline: init.cap.max_inline_data,
            max_sends: init.cap.max_send_wr,
            srq: init.srq as usize,
            pd: pd as usize,
            send_cq: init.send_cq as usize,
            recv_cq: init.recv_cq as usize,
        };
        if facts.is_datagram || facts.is_uc {
            HAS_SILENT_QPS.store(true, Ordering::Relaxed);
        }
        checker.ledger().made_qp(pointer as usize, facts);
        let queues = [init.send_cq as usize, init.recv_cq as usize, init.srq as usize];
        made_of(pointer, &[&queues[..], &[pd as usize]].concat());
    }
}

/// The datagrams, or the messages of UC, that a queue pair has dropped, how it differs from the other end, and why its last work failed. Its
/// lock is waited for until then.
pub(crate) fn drops_of(device: &anyverbs::Qp, deadline: Instant) -> Vec<DroppedDatagrams> {
    let of = |reason| {
        let drops = device.drops(reason, deadline.saturating_duration_since(Instant::now()))?;
        let ([own_qkey, qkey], [own_pkey, pkey]) = (drops.qkeys, drops.pkeys);
        let from = format!("queue pair {:#08x} at {}", drops.src_qpn.get(), drops.source.to_ip());
        let reason = match reason {
            DropReason::QKey => Dropped::QKey { own: own_qkey.0, other: qkey.0 },
            DropReason::PKey => Dropped::PKey { own: own_pkey.0, other: pkey.0 },
            DropReason::NoReceive => Dropped::NoReceive,
            DropReason::TooLong => Dropped::TooLong { len: drops.len, room: drops.room },
        };
        Some(DroppedDatagrams { reason, count: drops.count, from })
    };
    let lost = device.lost(deadline.saturating_duration_since(Instant::now()));
    let lost = lost.into_iter().map(|Lost { cause, count, key, first }| {
        let reason = Dropped::Message { cause: cause.number(), key, first };
        DroppedDatagrams { reason, count, from: String::new() }
    });
    let failed = device.failed(deadline.saturating_duration_since(Instant::now()));
    let failed = failed.map(|Failed { cause, wr_id, why }| {
        let reason = Dropped::Work { cause: cause.number(), wr_id, why };
        DroppedDatagrams { reason, count: 1, from: String::new() }
    });
    DropReason::ALL.into_iter().filter_map(of).chain(lost).chain(failed).collect()
}

/// Tells of datagrams that a queue pair has dropped.
pub(crate) fn dropped(pointer: *const ibv_qp, all: &[DroppedDatagrams]) {
    if let Some(checker) = checker().filter(|_| !all.is_empty()) {
        let mut ledger = checker.ledger();
        all.iter().for_each(|drops| ledger.dropped(pointer as usize, drops));
    }
}

/// The addresses of the queue pairs of types UD and UC whose receives complete in this queue.
pub(crate) fn silent_qps(cq: *const ibv_cq_ex) -> Vec<usize> {
    checker().map(|checker| checker.ledger().silent_qps(cq as usize)).unwrap_or_default()
}

/// Nothing is known of what is outstanding in this SRQ or queue pair.
pub(crate) fn unwatch<P>(pointer: *const P) {
    if let Some(checker) = checker() {
        checker.ledger().unwatch(pointer as usize);
    }
}

/// The device gave the object this number, which the log prints.
pub(crate) fn numbered<P>(pointer: *const P, number: u32) {
    if let Some(checker) = checker() {
        checker.ledger().numbered(pointer as usize, number);
    }
}

/// A completion queue holds this many completions from now on; `None` if it may lose the oldest.
pub(crate) fn sized_cq(pointer: *const ibv_cq_ex, capacity: Option<u32>) {
    if let Some(checker) = checker() {
        checker.ledger().sized_cq(pointer as usize, capacity);
    }
}

/// A completion queue has lost completions.
pub(crate) fn overrun(pointer: *const ibv_cq_ex) {
    if let Some(checker) = checker() {
        checker.ledger().overrun(pointer as usize);
    }
}

/// The work of a thread that reports may name.
struct Doing {
    /// The call that the program makes, if a persona may refuse it.
    call: Cell<Option<&'static str>>,
    /// It posts work with the ledger locked.
    is_posting: Cell<bool>,
    /// There is a [`REFUSAL`].
    is_refused: Cell<bool>,
}

thread_local! {
    static DOING: Doing = const {
        Doing {
            call: Cell::new(None),
            is_posting: Cell::new(false),
            is_refused: Cell::new(false),
        }
    };
    /// The refusal by a persona of what the thread posted. It needs no destructor, since the post takes it. One would be noted with the
    /// ledger locked ([`anyverbs_check::init`]).
    static REFUSAL: Cell<Option<ManuallyDrop<Refusal>>> = const { Cell::new(None) };
}

/// A call that a persona may refuse, while it lives. A report names it.
pub(crate) struct Call(bool);

impl Call {
    /// The call begins. If another call makes it, the program made that one.
    pub(crate) fn new(name: &'static str) -> Self {
        Self(checker().is_some() && DOING.with(|doing| doing.begin(name)))
    }
}

impl Doing {
    /// A call begins. False if another call makes it.
    fn begin(&self, name: &'static str) -> bool {
        let is_first = self.call.get().is_none();
        if is_first {
            self.call.set(Some(name));
        }
        is_first
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if self.0 {
            DOING.with(|doing| doing.call.set(None));
        }
    }
}

/// The library made an object for itself.
pub(crate) fn is_own<P>(pointer: *const P) {
    if let Some(checker) = checker() {
        checker.ledger().is_own(pointer as usize);
    }
}

/// The device refuses a call for what its persona lacks: a feature or a field.
#[cold]
pub(crate) fn refused_by_persona(lacks: &'static str, why: &dyn fmt::Display) {
    let Some(checker) = checker() else { return };
    DOING.with(|doing| {
        let call = doing.call.get().unwrap_or("the call");
        let refusal = Refusal { call, lacks, why: why.to_string() };
        if doing.is_posting.get() {
            REFUSAL.set(Some(ManuallyDrop::new(refusal)));
            doing.is_refused.set(true);
        } else {
            checker.ledger().refused_by_persona(&refusal);
        }
    });
}

/// Tells the ledger what the program posts by a call. `tell` calls the device with the ledger locked, so a refusal is reported after
/// it.
pub(crate) fn posts(ledger: &mut Ledger, name: &'static str, tell: impl FnOnce(&mut Ledger)) {
    let is_refused = DOING.with(|doing| {
        let is_first = doing.begin(name);
        doing.is_posting.set(true);
        tell(ledger);
        doing.is_posting.set(false);
        if is_first {
            doing.call.set(None);
        }
        doing.is_refused.take()
    });
    if is_refused && let Some(refusal) = REFUSAL.take() {
        ledger.refused_by_persona(&ManuallyDrop::into_inner(refusal));
    }
}

/// The queue pair is attached to a multicast group.
pub(crate) fn attached(pointer: *const ibv_qp, group: Gid) {
    if let Some(checker) = checker() {
        checker.ledger().attached(pointer as usize, group.to_string());
    }
}

/// The queue pair is detached from it.
pub(crate) fn detached(pointer: *const ibv_qp, group: Gid) {
    if let Some(checker) = checker() {
        checker.ledger().detached(pointer as usize, &group.to_string());
    }
}

/// An identifier has joined a group for its queue pair.
pub(crate) fn joined(pointer: *const ibv_qp, id: *const rdma_cm_id, group: Gid) {
    if let Some(checker) = checker().filter(|_| !pointer.is_null()) {
        checker.ledger().joined(pointer as usize, id as usize, group.to_string());
    }
}

/// The identifier has left it.
pub(crate) fn left(pointer: *const ibv_qp, id: *const rdma_cm_id, group: Gid) {
    if let Some(checker) = checker().filter(|_| !pointer.is_null()) {
        checker.ledger().left(pointer as usize, id as usize, &group.to_string());
    }
}

/// The queue pair is connected to another one.
pub(crate) fn connected(pointer: *const ibv_qp, to: u32) {
    if let Some(checker) = checker() {
        checker.ledger().connected(pointer as usize, to);
    }
}

/// Facts about a memory region that was given to the program.
pub(crate) fn made_region(pointer: *const ibv_mr, region: Region) {
    if let Some(checker) = checker() {
        checker.ledger().made_region(pointer as usize, region);
    }
}

/// The objects that an object uses, which cannot end before it. NULL is none.
pub(crate) fn made_of<P>(pointer: *const P, uses: &[usize]) {
    if let Some(checker) = checker() {
        let uses: Vec<_> = uses.iter().copied().filter(|address| *address != 0).collect();
        checker.ledger().made_of(pointer as usize, &uses);
    }
}

/// The program changed a memory region: its place and length, its protection domain, its access flags.
pub(crate) fn changed_region(
    pointer: *const ibv_mr,
    place: Option<(u64, u64)>,
    pd: Option<usize>,
    access: Option<u32>,
) {
    if let Some(checker) = checker() {
        let change = |region: &mut Region| {
            if let Some((addr, len)) = place {
                (region.addr, region.iova, region.len) = (addr, addr, len);
            }
            region.pd = pd.unwrap_or(region.pd);
            region.access = access.unwrap_or(region.access);
        };
        let address = pointer as usize;
        let (activity, waiting) = (crate::verbs::activity, crate::verbs::waiting);
        checker.ledger().changed_region(address, change, activity, waiting);
    }
}

/// The program uses an address where there is no live object. True if one has ended there.
pub(crate) fn uses_dead<P>(pointer: *const P) -> bool {
    checker().is_some_and(|checker| checker.ledger().uses_dead(pointer as usize))
}

/// Whether this program is checked.
pub(crate) fn is_on() -> bool {
    checker().is_some()
}

/// Objects that have ended, and whose memory stays a while.
static KEPT: Mutex<VecDeque<Arc<dyn Any + Send + Sync>>> = Mutex::new(VecDeque::new());
const MOST_KEPT: usize = 256;

/// The object has ended. Its memory stays a while, so that a program that uses it reads no other object's. What objects hold is
/// given back when a context or a channel ends.
pub(crate) fn keep<P>(object: Arc<dyn Any + Send + Sync>) {
    if checker().is_none() {
        return;
    }
    let kind = Kind::of_struct(type_name::<P>());
    let mut kept = KEPT.lock();
    let mut gone = VecDeque::new();
    // A completion queue keeps its channel.
    if matches!(kind, Kind::Context | Kind::Channel) {
        std::mem::swap(&mut *kept, &mut gone);
    } else if kind.is_kept() {
        kept.push_back(object);
        if kept.len() > MOST_KEPT {
            gone.extend(kept.pop_front());
        }
    }
    // Not under the lock: the end of one may end others.
    drop(kept);
    drop(gone);
}

/// The program ends an object by this call. `activity` tells of a queue pair's address what it does.
pub(crate) fn ending<P>(
    pointer: *const P,
    activity: impl Fn(usize) -> Activity,
    end: impl FnOnce() -> Result<(), Errno>,
) -> Result<(), Errno> {
    let Some(checker) = checker() else {
        anyverbs_check::ends_in_child(pointer as usize);
        return end();
    };
    checker.ends(pointer as usize, activity, crate::verbs::waiting);
    end().inspect_err(|e| {
        checker.ledger().not_ended(pointer as usize, *e == Errno::said(libc::EBUSY))
    })
}

/// The program read an event about an object. Each type of event has a code.
pub(crate) fn read_event(address: usize, code: u32, name: &'static str) {
    if let Some(checker) = checker() {
        checker.ledger().read_event(address, code, name);
    }
}

/// The program acknowledged events about an object.
pub(crate) fn acknowledged(address: usize, code: u32, count: u32) {
    if let Some(checker) = checker() {
        checker.ledger().acknowledged(address, code, count);
    }
}

/// It has ended.
pub(crate) fn ended(address: usize) {
    if let Some(checker) = checker() {
        checker.ledger().ended(address);
    }
}

/// A queue pair is about to forget what was posted, and its completions.
pub(crate) fn takes_along<P>(pointer: *const P) {
    if let Some(checker) = checker() {
        checker.ledger().takes_along(pointer as usize, crate::verbs::waiting);
    }
}

/// It has forgotten them.
pub(crate) fn reset(pointer: *const ibv_qp) {
    if let Some(checker) = checker() {
        checker.ledger().reset(pointer as usize);
    }
}

//! The base of the queue pairs: their table, links, timers and lists of work.

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use anyverbs_causes::Cause;
use anyverbs_links::Links;
use anyverbs_links::shm::Digest;
use anyverbs_links::udp::address;
use anyverbs_links::why::tell_why;
use anyverbs_locks::{Monitor, Mutex, rank};
use anyverbs_net::Destination;
use anyverbs_objects::base::Core;
use anyverbs_objects::cq::CqCell;
use anyverbs_objects::srq::table::SrqTable;
use anyverbs_proto::mr::Keepers;
use anyverbs_proto::qp::attr::ModifyLimits;
use anyverbs_proto::qp::{Arrival, OutOfOrderBytes};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Mtu, Psn, Qpn};
use tracing::Level;

use super::QpCell;
use super::owed::{ACK_DELAY, OwedList};
use super::sharing::Sharing;
use super::table::QpTable;
use super::timers::Timers;
use crate::multicast::Groups;

/// The queue pairs of a device, and what they leave to others.
pub struct Transport {
    /// The part of the device that objects hold.
    pub core: &'static Core,
    /// Links.
    pub links: &'static Links,
    /// Queue pairs by number.
    pub qps: QpTable,
    /// SRQs of type XRC by number.
    pub xrc_srqs: SrqTable,
    /// Multicast groups and their members.
    pub groups: Groups<QpCell>,
    /// Deadlines of queue pairs.
    pub timers: Timers,
    /// Queue pairs that owe an ACK or hold small sends back.
    pub owed: OwedList,
    /// What waits until no queue pair is locked.
    pub aftermath: Aftermath,
    /// Bytes that the out-of-order buffers of all queue pairs hold.
    pub(crate) out_of_order_bytes: Arc<OutOfOrderBytes>,
    /// With processes that have the same XRC domains; set before the first queue pair is made.
    pub sharing: OnceLock<&'static dyn Sharing>,
}

impl std::fmt::Debug for Transport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Transport").finish_non_exhaustive()
    }
}

impl Transport {
    pub(crate) fn add_timer(&self, at: Time, qpn: Qpn) {
        self.timers.push(at, qpn);
        self.links.wake_before(at);
    }

    /// The worker is to look soon whether debts remain, if no thread polls.
    pub(super) fn look_after_owed(&self) {
        self.links.waker.look_before((self.core.now() + ACK_DELAY).as_nanos());
    }

    /// The work that had to wait until no queue pair is locked.
    #[inline]
    pub fn after_unlock(&self) {
        if self.aftermath.is_any()
            || self.links.inproc.is_pending()
            || self.links.paths.any_admitted()
        {
            self.core.progress().after_unlock();
        }
    }

    /// Tells the sender of a packet that was dropped why.
    #[cold]
    pub(crate) fn tell_why(&self, now: Time, arrival: &Arrival, psn: Psn, cause: Cause) {
        let Arrival { source, destination, interface, port, .. } = *arrival;
        if port != 0 && self.aftermath.may_tell(now) {
            let to = Destination {
                source: Some(destination.to_ip()),
                interface,
                ..Destination::new(address(source.to_ip(), port, interface))
            };
            tell_why(self.links, &to, psn, cause);
        }
    }

    /// The limits of a queue pair on a port.
    pub(super) fn modify_limits(&'static self, port: usize, max_mtu: Mtu) -> ModifyLimits {
        let attr = self.core.attr_of(port);
        ModifyLimits {
            ports: attr.phys_port_cnt,
            pkeys: self.core.pkeys_of(port),
            max_mtu,
            max_rd_atomic: attr.max_qp_rd_atom.try_into().unwrap_or(u8::MAX),
            max_rate_limit: attr.max_rate_limit,
        }
    }

    /// The room that shares XRC domains between processes.
    pub(crate) fn sharing(&self) -> &'static dyn Sharing {
        *self.sharing.get().expect("set before the first queue pair is made")
    }
}

/// What waits until no queue pair is locked: completion queues that have overrun, whose queue pairs must fail, and lines for the log
/// of the whole device.
#[derive(Debug, Default)]
pub struct Aftermath {
    list: Mutex<rank::Aftermath, Noted>,
    any: AtomicBool,
    /// The thread that writes lines. The log may be a program's, which is called without a lock.
    writer: Monitor<rank::FailureLines, Option<libc::pthread_t>>,
}

#[derive(Debug, Default)]
struct Noted {
    overruns: Vec<Overrun>,
    lines: Vec<(Level, String)>,
    said: Second,
    told: Second,
    /// The last answer that came for a queue pair that is not here, or that has not asked.
    stray: Option<(Digest, Psn, Qpn)>,
    /// Lines that were left out since the last one.
    unsaid: u64,
}

/// Lines in the log in one second.
const LINES_A_SECOND: u32 = 20;

/// The longest wait for lines that another thread writes. A program that ends upon a failed completion has the line in its log
/// by then. A log that waits for this very thread would wait for ever without it
/// (`a_thread_waits_for_the_lines_of_another_for_a_bounded_time`).
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Reasons in one second that peers are told whose packets were dropped.
const REASONS_A_SECOND: u32 = 1000;

/// Packets that may wait for an answer.
const MOST_UNANSWERED: i32 = 1 << 16;

/// The length of a second: bounds are numbers a second.
const SECOND: Duration = Duration::from_secs(1);

/// Counts what happens in a second (`lines_beyond_a_bound_in_a_second_are_counted`).
#[derive(Debug, Default)]
struct Second {
    begin: Time,
    n: u32,
}

impl Second {
    /// How often it has happened, with this time.
    fn count(&mut self, now: Time) -> u32 {
        if now.since(self.begin) >= SECOND || self.n == 0 {
            (self.begin, self.n) = (now, 0);
        }
        self.n = self.n.saturating_add(1);
        self.n
    }
}

/// A completion queue that has overrun, and the queue pair whose completion was lost.
#[derive(Debug)]
pub(crate) struct Overrun {
    cq: Arc<dyn Any + Send + Sync>,
    pub(crate) qpn: Qpn,
}

impl Overrun {
    pub(crate) fn is_of<T>(&self, cq: &Arc<T>) -> bool {
        std::ptr::addr_eq(Arc::as_ptr(cq), Arc::as_ptr(&self.cq))
    }

    pub(crate) fn queue(&self) -> Option<Arc<CqCell>> {
        Arc::clone(&self.cq).downcast().ok()
    }
}

impl Aftermath {
    pub(crate) fn note(&self, cq: Arc<dyn Any + Send + Sync>, qpn: Qpn) {
        self.list.lock().overruns.push(Overrun { cq, qpn });
        self.any.store(true, Ordering::Release);
    }

    /// A line for the log of errors. A stranger can cause some, so that more than a few in a second are counted instead.
    #[cold]
    pub(crate) fn log(&self, now: Time, line: String) {
        self.log_at(Level::ERROR, now, line);
    }

    /// As [`log`](Self::log), at a level.
    #[cold]
    pub(crate) fn log_at(&self, level: Level, now: Time, line: String) {
        let mut list = self.list.lock();
        match list.said.count(now) {
            ..=LINES_A_SECOND => {
                let unsaid = std::mem::take(&mut list.unsaid);
                if unsaid > 0 {
                    let left_out = format!("{unsaid} more lines were not logged");
                    list.lines.push((Level::ERROR, left_out));
                }
                list.lines.push((level, line));
            }
            _ => list.unsaid += 1,
        }
        drop(list);
        self.any.store(true, Ordering::Release);
    }

    /// As [`log`](Self::log), of lines that have a bound of their own.
    #[cold]
    pub(crate) fn log_each(&self, level: Level, line: String) {
        self.list.lock().lines.push((level, line));
        self.any.store(true, Ordering::Release);
    }

    /// Whether a peer may be told a reason now. Strangers can ask for some, so that there is a bound.
    pub(crate) fn may_tell(&self, now: Time) -> bool {
        self.list.lock().told.count(now) <= REASONS_A_SECOND
    }

    /// An answer came for a queue pair that is not here, or that has not asked.
    pub(crate) fn note_stray(&self, from: Digest, psn: Psn, to: Qpn) {
        self.list.lock().stray = Some((from, psn, to));
    }

    /// The queue pair that the last of them was for, if it may have been the answer of this peer to the packet `una`, or to one behind
    /// it. Then the peer is connected to that queue pair, and not to the one that sends to it.
    pub(crate) fn stray(&self, peer: Digest, una: Psn) -> Option<Qpn> {
        let is_answer = |psn: Psn| (0..MOST_UNANSWERED).contains(&psn.since(una));
        let (from, psn, to) = self.list.lock().stray?;
        (from == peer && is_answer(psn)).then_some(to)
    }

    #[inline]
    pub(crate) fn is_any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Writes the lines to the log, and takes the overruns; `None` if there was nothing of either.
    pub(crate) fn take(&self) -> Option<Vec<Overrun>> {
        if !self.any.swap(false, Ordering::AcqRel) {
            return None;
        }
        self.write_lines();
        Some(std::mem::take(&mut self.list.lock().overruns))
    }

    /// Writes the lines to the log. Those that another thread has taken are written as well when this returns, unless that takes long:
    /// the log may be a program's, which waits for this thread. A log that calls this, since it polls, is left at once: its thread
    /// writes on when it comes back.
    #[cold]
    pub(crate) fn write_lines(&self) {
        // SAFETY: takes no pointers, and does not fail.
        let own = unsafe { libc::pthread_self() };
        let deadline = Instant::now() + LONGEST_WAIT;
        let mut writer = self.writer.lock();
        while let Some(other) = *writer {
            if other == own || writer.wait_until(deadline) {
                return;
            }
        }
        *writer = Some(own);
        drop(writer);
        let _writing = Writing(self);
        loop {
            let lines = self.take_lines();
            if lines.is_empty() {
                break;
            }
            for (level, line) in lines {
                match level {
                    Level::WARN => tracing::warn!(target: "anyverbs", "{line}"),
                    _ => tracing::error!(target: "anyverbs", "{line}"),
                }
            }
        }
    }

    fn take_lines(&self) -> Vec<(Level, String)> {
        std::mem::take(&mut self.list.lock().lines)
    }
}

/// A thread writes lines, while this lives.
struct Writing<'a>(&'a Aftermath);

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        *self.0.writer.lock() = None;
        self.0.writer.notify_all();
    }
}

impl Transport {
    /// Queue pairs let go of the regions that they keep in use.
    pub(crate) fn release_regions(&self, of: Keepers) {
        let release = |cell: &Arc<QpCell>| {
            let mut state = cell.state.lock();
            state.link.same_host.lanes.release_regions();
            state.link.same_host.last_copy.release_region();
        };
        match of {
            Keepers::One(qpn) => self.qps.find(Qpn::new(qpn)).iter().for_each(release),
            Keepers::All => self.qps.filter(|_| true).iter().for_each(release),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc;
    use std::thread;

    use anyverbs_proto::types::Gid;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// A program's log that calls a function for each line of warnings and errors.
    pub(crate) struct Log<F>(pub(crate) F);

    impl<F: Fn() + Send + Sync + 'static> Subscriber for Log<F> {
        fn enabled(&self, metadata: &Metadata<'_>) -> bool {
            *metadata.level() <= Level::WARN
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            (self.0)();
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    /// Some lines, and none that is left out.
    fn of_lines(n: u64) -> &'static Aftermath {
        let aftermath: &'static Aftermath = Box::leak(Box::default());
        (0..n).for_each(|n| aftermath.log(Time::from_nanos(1), n.to_string()));
        aftermath
    }

    #[test]
    fn a_log_that_polls_gets_all_lines_one_by_one() {
        let aftermath = of_lines(3);
        let (line, lines) = mpsc::channel();
        let log = Log(move || {
            // As a poll does. A device is locked on the way, which the order of locks allows.
            let _state: Mutex<rank::CompletionQueue, ()> = Mutex::default();
            drop(_state.lock());
            aftermath.write_lines();
            line.send(()).unwrap();
        });
        tracing::subscriber::with_default(log, || aftermath.write_lines());
        assert_eq!(lines.iter().count(), 3);
    }

    /// The log of one thread waits for another thread, which polls.
    #[test]
    fn a_thread_waits_for_the_lines_of_another_for_a_bounded_time() {
        let aftermath = of_lines(1);
        let log = Log(move || {
            thread::spawn(|| aftermath.write_lines()).join().unwrap();
        });
        let begin = Instant::now();
        tracing::subscriber::with_default(log, || aftermath.write_lines());
        assert!(begin.elapsed() >= LONGEST_WAIT, "the other thread has not waited");
        assert!(begin.elapsed() < 10 * LONGEST_WAIT);
    }

    #[test]
    fn a_log_that_panics_does_not_stop_the_next_line() {
        let aftermath = of_lines(1);
        let panics = Log(|| panic!("a log fails"));
        let panicked = thread::spawn(move || {
            tracing::subscriber::with_default(panics, || aftermath.write_lines());
        });
        assert!(panicked.join().is_err());
        aftermath.log(Time::from_nanos(2), "next".into());
        let (line, lines) = mpsc::channel();
        let log = Log(move || line.send(()).unwrap());
        tracing::subscriber::with_default(log, || aftermath.write_lines());
        assert_eq!(lines.iter().count(), 1);
    }

    #[test]
    fn a_stray_answer_belongs_to_its_sender_and_packet() {
        let [peer, other] = [1, 2].map(|n| Digest::new(Gid([n; 16]), Gid([9; 16])));
        let (aftermath, psn) = (Aftermath::default(), Psn::new(5));
        let to = Some(Qpn::new(0x03_0011));
        assert_eq!(aftermath.stray(peer, psn), None);
        aftermath.note_stray(peer, psn, Qpn::new(0x03_0011));
        assert_eq!(aftermath.stray(peer, psn), to);
        assert_eq!(aftermath.stray(peer, Psn::new(0xff_ffff)), to);
        assert_eq!((aftermath.stray(other, psn), aftermath.stray(peer, psn.plus(1))), (None, None));
    }

    #[test]
    fn lines_beyond_a_bound_in_a_second_are_counted() {
        let aftermath = Aftermath::default();
        let begin = Time::from_nanos(5_000_000_000);
        let lines = || aftermath.take_lines().into_iter().map(|(_, line)| line).collect::<Vec<_>>();
        (0..LINES_A_SECOND + 3).for_each(|n| aftermath.log(begin, n.to_string()));
        assert_eq!(lines().len(), LINES_A_SECOND as usize);
        aftermath.log(begin + Duration::from_millis(999), "left out".into());
        assert!(lines().is_empty());
        aftermath.log(begin + Duration::from_secs(1), "next".into());
        assert_eq!(lines(), ["4 more lines were not logged", "next"]);
    }
}

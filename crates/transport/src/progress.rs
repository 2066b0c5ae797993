//! Progress: receiving, timers, the worker, and what waiting threads do.
//!
//! A [`Driver`] knows links and queue pairs. What belongs to the rooms above it, QP1 and raw packets, it gives to them by
//! [`Management`] and [`Frames`].

mod datagrams;
mod deliver;
mod faults;
mod handing;
mod ip_ids;
mod lanes;
mod moderation;
mod observer;
mod owed;
mod own;
mod receive;
mod ring;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod timers;
mod waiter;
mod why;
pub mod worker;

use std::any::Any;
use std::collections::BTreeSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use anyverbs_links::Links;
use anyverbs_links::inproc::Inbound;
use anyverbs_locks::{FastMutex, Mutex, rank};
use anyverbs_net::Datagram;
use anyverbs_objects::base::{AdaptiveSpin, Caller, Core, Progress, Timed};
use anyverbs_objects::context_cell::PortListeners;
use anyverbs_objects::cq::CqCell;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::mr::Keepers;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::packet::Packet;
use tracing::Level;

use crate::qp::transport::Transport;
use handing::Handing;
use moderation::Moderated;
pub use owed::Debts;
pub use receive::RxState;
use worker::Shared;

/// A packet to QP1.
pub struct Mad<'d> {
    /// As it came.
    pub datagram: Datagram<'d>,
    /// Where it came from.
    pub arrival: Arrival,
    /// Its headers and payload.
    pub packet: Packet<'d>,
    /// Another process received it and says that it is for this one.
    pub was_forwarded: bool,
}

/// QP1, as progress needs it.
pub trait Management: Sync {
    /// When [`run`](Self::run) has something to do, in nanoseconds.
    fn next(&self) -> u64;

    /// Runs the timers that are due.
    fn run(&'static self, now: Time);

    /// Takes packets to QP1 whose ICRC is right. The receive path is locked, and no queue pair.
    fn receive(&'static self, now: Time, mads: &[Mad<'_>]);

    /// Whether a DREQ waits for what came before it, and whoever receives should look at everything.
    fn keeps_disconnects(&self) -> bool;

    /// From `empty` on nothing was left to be read: DREQs that came before need not wait any longer.
    fn look_at_disconnects(&'static self, now: Time, empty: Time);

    /// A datagram was handed on to another process.
    fn forwarded(&self, now: Time);

    /// The host's addresses have changed.
    fn addresses_changed(&'static self);

    /// A device, by the place of its first port, has failed for good.
    fn device_failed(&'static self, device: usize);
}

/// Raw packets, as progress needs them.
pub trait Frames: Sync {
    /// Receives frames; how many. 0 also while another thread is at it.
    fn receive(&self) -> usize;

    /// The descriptors on which frames arrive, two at most; none before there is a rule.
    fn fds(&self) -> Vec<BorrowedFd<'_>>;

    /// Frames that the kernel dropped, since the sockets were full.
    fn dropped(&self) -> u64;

    /// Fails all that use a completion queue for which `overrun` holds.
    fn fail_users(&self, overrun: &dyn Fn(&Arc<CqCell>) -> bool);

    /// A device has failed for good: fails all that belong to it.
    fn fail_device(&self, device: usize);
}

/// The rooms above.
pub struct Above {
    /// QP1.
    pub management: &'static dyn Management,
    /// Raw packets.
    pub frames: &'static dyn Frames,
}

/// Receives, and does what has to be done at some time by somebody.
pub struct Driver {
    core: &'static Core,
    links: &'static Links,
    pub(crate) transport: &'static Transport,
    /// Set before the first object is made.
    pub above: OnceLock<Above>,
    /// The contexts that hear of events of the port.
    pub listeners: PortListeners,
    /// The ports that are down by the last event of them.
    told_down: Mutex<rank::PortsTold, BTreeSet<usize>>,
    rx: FastMutex<rank::Receive, RxState>,
    /// Has the thread that does what a script of faults lets happen at a time.
    script: Mutex<rank::FaultScript, ()>,
    /// Hands packets of groups on to other processes.
    handing: Mutex<rank::HandingOn, Handing>,
    /// CQs with a delayed notification.
    moderated: Moderated,
    worker: Shared,
    /// When the socket was last found empty with no ACK owed, in nanoseconds.
    rx_empty_at: AtomicU64,
    /// Looks of polls at everything: a program that polls does the worker's work.
    poll_looks: own::PollLooks,
    /// Threads that wait for a completion event.
    waiters: AtomicU32,
    /// Datagrams that the kernel dropped, as last read.
    kernel_drops: AtomicU64,
    /// Packets that the kernel would not send, as last read.
    unsent: AtomicU64,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").finish_non_exhaustive()
    }
}

impl Driver {
    /// A driver that receives by `rx`.
    pub fn new(transport: &'static Transport, rx: RxState, worker: Shared) -> Self {
        let gids = &transport.core.gids;
        let ports = 0..transport.core.config.ports.len();
        let told_down = ports.filter(|port| gids.is_empty(*port)).collect();
        Self {
            core: transport.core,
            links: transport.links,
            transport,
            above: OnceLock::new(),
            listeners: PortListeners::default(),
            told_down: Mutex::new(told_down),
            rx: FastMutex::new(rx),
            script: Mutex::default(),
            handing: Mutex::default(),
            moderated: Moderated::new(),
            worker,
            rx_empty_at: AtomicU64::new(0),
            poll_looks: own::PollLooks::default(),
            waiters: AtomicU32::new(0),
            kernel_drops: AtomicU64::new(0),
            unsent: AtomicU64::new(0),
        }
    }

    #[inline]
    fn above(&self) -> &Above {
        self.above.get().expect("set before the first object is made")
    }

    /// The counters of each device's port, up to date.
    pub fn counters(&self) -> &[Counters] {
        if let Some(shm) = &self.links.shm {
            shm.traffic().count(&self.core.counters);
        }
        if let Some(directory) = &self.core.directory {
            directory.count(&self.core.counters);
        }
        // The kernel's own count of datagrams that found the socket full.
        let dropped = self.links.port.dropped() + self.above().frames.dropped();
        let known = self.kernel_drops.fetch_max(dropped, Ordering::Relaxed);
        self.core.count_for_none(Counter::DropSocketFull, dropped.saturating_sub(known));
        let unsent = self.links.send_drops.load(Ordering::Relaxed);
        let known = self.unsent.fetch_max(unsent, Ordering::Relaxed);
        self.core.count_for_none(Counter::SendFailed, unsent.saturating_sub(known));
        &self.core.counters
    }

    /// Bytes of packets in and out, since the start.
    fn bytes_moved(&self) -> u64 {
        let by_ring = self.links.shm.as_ref().map_or(0, |shm| shm.traffic().uncounted());
        let counted = [Counter::SentBytes, Counter::RcvdBytes].map(|c| self.core.total(c));
        by_ring.wrapping_add(counted[0]).wrapping_add(counted[1])
    }
}

impl Progress for Driver {
    fn poll(&'static self, into: Option<&mut dyn Caller>) -> bool {
        self.poll_progress(into)
    }

    fn end_polling(&'static self) {
        self.end_polling();
    }

    fn wait_for_event(
        &'static self,
        spin: &AdaptiveSpin,
        channel: BorrowedFd<'_>,
        found: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool> {
        self.wait_for_event(spin, channel, found)
    }

    fn end_wait(&'static self) {
        self.end_wait();
    }

    fn after_unlock(&'static self) {
        self.after_unlock();
    }

    fn release_regions(&'static self, of: Keepers) {
        self.transport.release_regions(of);
    }

    fn call_at(&'static self, at: Time, what: Weak<dyn Timed>) {
        self.moderated.add(at, what);
        self.links.waker.look_before(at.as_nanos());
    }

    fn watch(&'static self, fds: Vec<BorrowedFd<'static>>) -> io::Result<()> {
        self.worker.watch(fds)
    }

    fn say(&'static self, level: Level, line: String) {
        self.transport.aftermath.log_at(level, self.core.now(), line);
    }

    fn say_each(&'static self, level: Level, line: String) {
        self.transport.aftermath.log_each(level, line);
    }

    fn note_overrun(&'static self, cq: Arc<dyn Any + Send + Sync>, qpn: Qpn) {
        self.transport.aftermath.note(cq, qpn);
    }

    fn explain_failures(&'static self) {
        self.transport.aftermath.write_lines();
    }
}

impl Inbound for &'static Driver {
    fn deliver<'p>(&self, packets: impl Iterator<Item = (Arrival, Packet<'p>)>) {
        let packets = packets.map(|(arrival, packet)| (arrival, packet.into()));
        self.deliver_all(self.core.now(), packets);
    }

    fn hand_on<'p>(&self, packets: impl Iterator<Item = (Arrival, Packet<'p>)>) {
        self.handing.lock().hand_on(self, packets);
    }

    fn acknowledge(&self, qpn: Qpn) {
        self.pay(qpn, Debts::All);
    }

    fn resume(&self, qpn: Qpn) {
        Driver::resume(self, qpn);
    }
}

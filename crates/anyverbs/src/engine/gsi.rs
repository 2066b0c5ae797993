//! QP1, the general services interface: the connection manager's machine in the device.
//!
//! One lock guards the machine and the table of ids. It is taken after the receive path's lock and before the queues of event
//! channels; no queue pair is locked under it. What the machine has to send waits in it, is taken out under its lock, and
//! leaves when that is released ([`send`]): a system call under it would hold up the receiving thread. Some are made all the
//! same: seldom bind(2), where a listener ends that has accepted what may be asked again ([`lingering`]), and pwrite(2) to
//! memory, at most four times for each connection to another host ([`records`]), and once for all that another process left
//! what gives its section back (pread(2), fcntl(2)).
//!
//! In the order in which they may be taken: the receive path's lock; the sender's line, or the neighbours; the machine's;
//! what lingers. Requests that wait for a listener, and DREQs that wait, have a leaf. Who asks for services may hold the line, not the machine's.
//!
//! A MAD may reach any process of the host ([`receive`]): those that name a communication ID are steered like data, by
//! the slot in it; a request goes to the process that listens, which who receives it finds in the store of the host.

mod disconnects;
mod lingering;
mod neighbours;
mod receive;
mod records;
mod requests;
mod send;
#[cfg(test)]
pub(crate) mod tests;
mod unserved;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyverbs_net::{Lingering, SteerByKind};
use anyverbs_proto::cm::counters::DropReason;
use anyverbs_proto::cm::message::Attribute;
use anyverbs_proto::cm::{Cm, CmConfig, Transmit};
use anyverbs_proto::time::Time;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use parking_lot::Mutex;

use super::Engine;
use crate::base::NEVER;
use crate::cm::Ids;
use disconnects::Disconnects;
use neighbours::Neighbours;
pub(super) use receive::Incoming;
use records::{Joined, Records};
use send::Sender;
use unserved::Unserved;

/// Where the MAD lies in the packet, and its body in the MAD.
const MAD_AT: usize = Bth::LEN + Deth::LEN;
const BODY_AT: usize = MAD_AT + 24;
/// Where a message holds the receiver's communication ID, and a SIDR_REP the request's. Its top byte is a slot.
const REMOTE_ID_AT: usize = BODY_AT + 4;
const REQUEST_ID_AT: usize = BODY_AT;
/// The top byte of the PSN. Nobody else looks at that of a datagram: we write into a request's which process listens, if
/// we know. Others' are as good as the kernel's choice.
const HINT_AT: usize = 9;

/// By what the packets to QP1 are steered.
pub(super) const STEERING: SteerByKind = SteerByKind {
    offset: 4,
    mask: 0xff_ffff, // the BTH's destination QPN
    value: 1,
    kind_offset: MAD_AT + 16, // the MAD's attribute
    slot_offsets: &[
        (Attribute::Req as u16, HINT_AT),
        (Attribute::SidrReq as u16, HINT_AT),
        (Attribute::SidrRep as u16, REQUEST_ID_AT),
        (Attribute::Mra as u16, REMOTE_ID_AT),
        (Attribute::Rej as u16, REMOTE_ID_AT),
        (Attribute::Rep as u16, REMOTE_ID_AT),
        (Attribute::Rtu as u16, REMOTE_ID_AT),
        (Attribute::Dreq as u16, REMOTE_ID_AT),
        (Attribute::Drep as u16, REMOTE_ID_AT),
        (Attribute::Lap as u16, REMOTE_ID_AT),
        (Attribute::Apr as u16, REMOTE_ID_AT),
    ],
};

/// When a process whose queue is full is tried again first.
const FORWARD_RETRY: Duration = Duration::from_micros(200);
/// Connections to other processes are closed within this time, in which more datagrams for them may come.
const FORWARD_IDLE: Duration = Duration::from_secs(1);
/// How long the counters wait for the lock at the end of the process.
const EXIT_PATIENCE: Duration = Duration::from_millis(2);
/// How long it sends what its peers should hear, at most. Of whom it has not told by then, its records tell others.
const FAREWELL: Duration = Duration::from_millis(400);

/// What the lock guards.
#[derive(Debug)]
struct State {
    machine: Cm,
    ids: Ids,
    records: Records,
    #[cfg(test)]
    tap: tests::Tap,
}

/// QP1.
#[derive(Debug)]
pub(crate) struct Gsi {
    state: Mutex<State>,
    sender: Sender,
    /// When the machine has something to do, in nanoseconds.
    deadline: AtomicU64,
    /// When there may be room again for what is to be handed on.
    forward_at: AtomicU64,
    neighbours: Mutex<Neighbours>,
    /// When they are looked after, in nanoseconds.
    watch_at: AtomicU64,
    lingering: Mutex<Option<Lingering>>,
    /// When it is seen whether it may end, in nanoseconds.
    linger_until: AtomicU64,
    unserved: Mutex<Vec<Unserved>>,
    /// When listeners are looked for, in nanoseconds.
    unserved_at: AtomicU64,
    /// When a listener that ended is no longer expected back, in nanoseconds.
    left_until: AtomicU64,
    disconnects: Disconnects,
    journal: Joined,
    /// Who had taken something over when it was last looked at, where this process has not joined the journal.
    /// When it is looked for what others left there, in nanoseconds.
    abandoned_at: AtomicU64,
}

impl Gsi {
    /// `kept`: datagrams wait already that are to be handed on.
    pub(crate) fn new(config: CmConfig, psn: u32, kept: bool) -> Self {
        Self {
            state: Mutex::new(State {
                machine: Cm::new(config),
                ids: Ids::default(),
                records: Records::default(),
                #[cfg(test)]
                tap: tests::Tap::default(),
            }),
            sender: Sender::new(psn),
            deadline: AtomicU64::new(NEVER),
            forward_at: AtomicU64::new(if kept { 0 } else { NEVER }),
            neighbours: Mutex::default(),
            watch_at: AtomicU64::new(NEVER),
            lingering: Mutex::default(),
            linger_until: AtomicU64::new(NEVER),
            unserved: Mutex::default(),
            unserved_at: AtomicU64::new(NEVER),
            left_until: AtomicU64::new(NEVER),
            disconnects: Disconnects::default(),
            journal: Joined::default(),
            abandoned_at: AtomicU64::new(NEVER),
        }
    }

    /// When [`Engine::run_gsi`] has something to do, in nanoseconds.
    pub(super) fn next(&self) -> u64 {
        let times = [
            &self.deadline,
            &self.forward_at,
            &self.watch_at,
            &self.linger_until,
            &self.unserved_at,
            &self.left_until,
            &self.abandoned_at,
        ];
        let next = times.into_iter().map(|at| at.load(Ordering::SeqCst)).min();
        next.unwrap_or(NEVER).min(self.sender.next()).min(self.disconnects.until())
    }
}

impl Engine {
    /// Calls the machine. Then, still under the lock, its events go to the ids, in their order; what it has to send leaves
    /// after that. Neither `f` nor who takes the events may lock a queue pair or call this.
    ///
    /// For the program's calls, of which connections come: joins the journal first, not under the lock.
    pub(crate) fn with_cm<R>(&'static self, f: impl FnOnce(&mut Cm, &mut Ids, Time) -> R) -> R {
        self.journal();
        self.drive_cm(f)
    }

    /// The same for messages and timers, which processes without connections have, too: any process answers for those that
    /// have ended.
    pub(crate) fn drive_cm<R>(&'static self, f: impl FnOnce(&mut Cm, &mut Ids, Time) -> R) -> R {
        let now = self.core.now();
        let mut state = self.gsi.state.lock();
        let result = self.call_cm(&mut state, now, f);
        drop(state);
        // What acknowledges earlier messages arrives before a MAD that may be the program's answer to them.
        self.flush_owed_at_once();
        self.send_mads(now);
        self.links.waker.wake_before(self.gsi.next());
        result
    }

    fn call_cm<R>(
        &self,
        state: &mut State,
        now: Time,
        f: impl FnOnce(&mut Cm, &mut Ids, Time) -> R,
    ) -> R {
        let State { machine, ids, records, .. } = state;
        let listeners = machine.usage().listeners;
        let result = f(machine, ids, now);
        if machine.usage().listeners < listeners {
            self.linger(machine, now);
        }
        while let Some(event) = machine.poll_event() {
            #[cfg(test)]
            let Some(event) = state.tap.take(event) else { continue };
            ids.deliver(event);
        }
        self.write_records(machine, records, now);
        self.publish(machine);
        self.watch_neighbours(machine, now);
        result
    }

    /// Takes up to `most` datagrams that wait in the machine.
    fn poll_cm(&self, now: Time, most: usize, into: &mut Vec<Transmit>) {
        let mut state = self.gsi.state.lock();
        let machine = &mut state.machine;
        into.extend(std::iter::from_fn(|| machine.poll_transmit(now)).take(most));
        self.publish(machine);
    }

    /// What others want to know of the machine without its lock.
    fn publish(&self, machine: &Cm) {
        let deadline = machine.deadline().map_or(NEVER, Time::as_nanos);
        self.gsi.deadline.store(deadline, Ordering::SeqCst);
        self.gsi.sender.waits(machine.usage().outbox);
    }

    /// Does what is due.
    pub(super) fn run_gsi(&'static self, now: Time) {
        let is_due = |at: &AtomicU64| at.load(Ordering::SeqCst) <= now.as_nanos();
        if is_due(&self.gsi.forward_at) {
            self.gsi.forward_at.store(NEVER, Ordering::SeqCst);
            if let Some(pause) = self.links.port.forward_kept() {
                self.forward_later(now + pause);
            }
        }
        if is_due(&self.gsi.watch_at) {
            self.look_after_neighbours();
        }
        if is_due(&self.gsi.abandoned_at) {
            self.look_for_abandoned();
        }
        if self.gsi.disconnects.until() <= now.as_nanos() {
            self.look_at_disconnects(now, None);
        }
        if is_due(&self.gsi.unserved_at) {
            self.look_for_listeners(now);
        }
        if is_due(&self.gsi.left_until) {
            self.forget_left(now);
        }
        if is_due(&self.gsi.linger_until) {
            self.linger_no_longer();
        }
        if is_due(&self.gsi.deadline) {
            self.drive_cm(|machine, _, now| machine.on_timer(now));
        } else if self.gsi.sender.next() <= now.as_nanos() {
            self.send_mads(now);
        }
    }

    /// A process has no room for what is to be handed on to it; it may have then.
    /// A datagram was handed on: the connection for it is closed after a while.
    pub(crate) fn forwarded(&self, now: Time) {
        self.forward_later(now + FORWARD_IDLE);
    }

    fn forward_later(&self, at: Time) {
        let at = at.as_nanos();
        self.gsi.forward_at.fetch_min(at, Ordering::SeqCst);
        self.links.waker.wake_before(at);
    }

    /// Tells the peers of all connections that they end. Waits for each lock for `patience` only, since whoever called exit(3)
    /// may hold it, and not for answers.
    pub(super) fn shut_gsi_down(&'static self, patience: Duration) {
        let Some(mut line) = self.gsi.sender.try_line(patience) else { return };
        let Some(mut state) = self.gsi.state.try_lock_for(patience) else { return };
        let now = self.core.now();
        self.call_cm(&mut state, now, |machine, _, now| machine.shutdown(now));
        drop(state);
        let end = Instant::now() + FAREWELL;
        let dropped = self.links.send_drops.load(Ordering::Relaxed);
        self.send_in(&mut line, now);
        while self.gsi.sender.next() != NEVER && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(500));
            self.send_in(&mut line, self.core.now());
        }
        // What did not leave may have been for anyone.
        let all_left = self.links.send_drops.load(Ordering::Relaxed) == dropped;
        if all_left && let Some(mut state) = self.gsi.state.try_lock_for(patience) {
            let State { machine, records, .. } = &mut *state;
            records.forget(|id| machine.has_told(id));
        }
    }

    /// What the machine counted: the kernel's names, where it has one.
    pub(super) fn cm_counters(&self) -> Vec<(String, u64)> {
        let Some(state) = self.gsi.state.try_lock_for(EXIT_PATIENCE) else { return Vec::new() };
        let counters = *state.machine.counters();
        drop(state);
        let groups = [
            ("cm_tx_msgs", &counters.tx_msgs),
            ("cm_tx_retries", &counters.tx_retries),
            ("cm_rx_msgs", &counters.rx_msgs),
            ("cm_rx_duplicates", &counters.rx_duplicates),
        ];
        let messages = groups.into_iter().flat_map(|(group, numbers)| {
            Attribute::ALL.iter().map(move |a| (format!("{group}/{}", a.name()), numbers.of(*a)))
        });
        let drops = DropReason::ALL.iter().map(|r| (r.name().to_owned(), counters.dropped(*r)));
        messages.chain(drops).collect()
    }
}

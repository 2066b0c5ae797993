//! QP1, the general services interface: the connection manager's machine in the device.
//!
//! One lock guards the machine and the table of ids; no queue pair is locked under it. Messages of the machine wait in
//! it, are taken out under its lock, and leave when that is released ([`send`]). A system call under it would hold up the receiving thread. Some are made
//! all the same. One is bind(2), seldom, where a listener ends that has accepted requests which may be repeated
//! ([`lingering`]). Another is pwrite(2) to memory, at most four times for each connection to another host
//! ([`records`]). The last ones give back a section of another process, once for each (pread(2), fcntl(2)).
//!
//! A thread that asks for services may hold the lock of the sender, not the machine's.
//!
//! A MAD may reach any process of the host ([`receive`]). MADs that name a communication ID are steered like data, by
//! the slot in it. A request goes to the process that listens, which the receiving process finds in the store of the
//! host.

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

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::{Lingering, Services, SteerByKind};
use anyverbs_objects::base::{Core, HOUSEKEEPING, NEVER};
use anyverbs_objects::gid::GidEntry;
use anyverbs_proto::cm::counters::DropReason;
use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::message::Attribute;
use anyverbs_proto::cm::{Cm, CmConfig, Transmit};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Gid;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_transport::progress::{Debts, Driver, Management};
use anyverbs_transport::qp::transport::Transport;

pub(crate) use anyverbs_transport::progress::Mad as Incoming;
use disconnects::Disconnects;
use neighbours::Neighbours;
use records::{Joined, Records};
use send::Sender;
use unserved::Unserved;

/// Where the MAD lies in the packet, and its body in the MAD.
const MAD_AT: usize = Bth::LEN + Deth::LEN;
const BODY_AT: usize = MAD_AT + 24;
/// Where a message holds the receiver's communication ID, and a SIDR_REP the request's. Its top byte is a slot.
const REMOTE_ID_AT: usize = BODY_AT + 4;
const REQUEST_ID_AT: usize = BODY_AT;
/// The top byte of the PSN, which means nothing in a datagram. In requests we write the slot of the listening process
/// there, if we know it. Values of other devices are as good as the kernel's choice.
const HINT_AT: usize = 9;

/// The steering of packets to QP1.
pub const STEERING: SteerByKind = SteerByKind {
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

/// The receiver of the machine's events.
pub trait Events: Default + Send + Sync + 'static {
    /// Takes an event. Called under the machine's lock.
    fn deliver(&mut self, event: CmEvent);

    /// The host's addresses have changed; `find` looks one up, on an interface or on any.
    fn addresses_changed(&self, find: &dyn Fn(Gid, u32) -> Option<GidEntry>);

    /// A device, by the place of its first port, has failed for good.
    fn device_failed(&self, device: usize);
}

/// The state under the lock.
#[derive(Debug)]
struct State<I> {
    machine: Cm,
    ids: I,
    records: Records,
    #[cfg(test)]
    tap: tests::Tap,
}

/// When there is something to do, in nanoseconds, or [`NEVER`].
#[derive(Debug)]
struct Times {
    /// The machine's timers.
    deadline: AtomicU64,
    /// There may be room again for what is to be handed on.
    forward_at: AtomicU64,
    /// The neighbours are looked after.
    watch_at: AtomicU64,
    /// Lingering ports may be closed.
    linger_until: AtomicU64,
    /// Listeners are looked for.
    unserved_at: AtomicU64,
    /// A listener that ended is no longer expected back.
    left_until: AtomicU64,
    /// The journal is searched for connections that ended processes left.
    abandoned_at: AtomicU64,
}

impl Times {
    /// The earliest.
    fn next(&self) -> u64 {
        let times = [
            &self.deadline,
            &self.forward_at,
            &self.watch_at,
            &self.linger_until,
            &self.unserved_at,
            &self.left_until,
            &self.abandoned_at,
        ];
        times.into_iter().map(|at| at.load(Ordering::SeqCst)).min().unwrap_or(NEVER)
    }
}

/// QP1. `I` takes the machine's events.
pub struct Gsi<I> {
    pub(crate) transport: &'static Transport,
    driver: &'static Driver,
    /// The listeners on this host.
    pub(crate) services: Arc<Services>,
    state: Mutex<rank::CmMachine, State<I>>,
    sender: Sender,
    times: Times,
    neighbours: Mutex<rank::Neighbours, Neighbours>,
    lingering: Mutex<rank::Lingering, Option<Lingering>>,
    unserved: Mutex<rank::UnservedRequests, Vec<Unserved>>,
    disconnects: Disconnects,
    journal: Joined,
}

impl<I> std::fmt::Debug for Gsi<I> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gsi").finish_non_exhaustive()
    }
}

impl<I: Events> Gsi<I> {
    /// `kept`: datagrams wait already that are to be handed on.
    pub fn new(
        transport: &'static Transport,
        driver: &'static Driver,
        services: Arc<Services>,
        config: CmConfig,
        psn: u32,
        kept: bool,
    ) -> Self {
        let never = || AtomicU64::new(NEVER);
        Self {
            transport,
            driver,
            services,
            state: Mutex::new(State {
                machine: Cm::new(config),
                ids: I::default(),
                records: Records::default(),
                #[cfg(test)]
                tap: tests::Tap::default(),
            }),
            sender: Sender::new(psn),
            times: Times {
                deadline: never(),
                forward_at: AtomicU64::new(if kept { 0 } else { NEVER }),
                watch_at: never(),
                linger_until: never(),
                unserved_at: never(),
                left_until: never(),
                abandoned_at: never(),
            },
            neighbours: Mutex::default(),
            lingering: Mutex::default(),
            unserved: Mutex::default(),
            disconnects: Disconnects::default(),
            journal: Joined::default(),
        }
    }

    pub(crate) fn core(&self) -> &'static Core {
        self.transport.core
    }

    /// When [`run`](Management::run) has something to do, in nanoseconds.
    fn next_time(&self) -> u64 {
        self.times.next().min(self.sender.next()).min(self.disconnects.until())
    }

    /// Calls the machine. Then, still under the lock, its events go to the ids, in their order. Its messages leave
    /// after that. Neither `f` nor the receiver of the events may lock a queue pair or call this.
    ///
    /// For the program's calls that may make connections: joins the journal first, not under the lock.
    pub(crate) fn with_cm<R>(&'static self, f: impl FnOnce(&mut Cm, &mut I, Time) -> R) -> R {
        self.journal();
        self.drive_cm(f)
    }

    /// The same for messages and timers, which processes without connections have, too: any process answers for those that
    /// have ended.
    pub(crate) fn drive_cm<R>(&'static self, f: impl FnOnce(&mut Cm, &mut I, Time) -> R) -> R {
        self.drive(f, || self.driver.flush(Debts::AtOnce))
    }

    /// The same for a thread that has locked the receive path.
    fn drive_receiving<R>(&'static self, f: impl FnOnce(&mut Cm, &mut I, Time) -> R) -> R {
        self.drive(f, || {
            self.driver.pay_all(Debts::AtOnce);
        })
    }

    fn drive<R>(
        &'static self,
        f: impl FnOnce(&mut Cm, &mut I, Time) -> R,
        pay: impl FnOnce(),
    ) -> R {
        let now = self.transport.core.now();
        let mut state = self.state.lock();
        let result = self.call_cm(&mut state, now, f);
        drop(state);
        // ACKs of earlier messages arrive before a MAD that may be the program's answer to them.
        pay();
        self.send_mads(now);
        self.transport.links.waker.wake_before(self.next_time());
        result
    }

    fn call_cm<R>(
        &self,
        state: &mut State<I>,
        now: Time,
        f: impl FnOnce(&mut Cm, &mut I, Time) -> R,
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
        let mut state = self.state.lock();
        let machine = &mut state.machine;
        into.extend(std::iter::from_fn(|| machine.poll_transmit(now)).take(most));
        self.publish(machine);
    }

    /// Publishes the state of the machine that others read without its lock.
    fn publish(&self, machine: &Cm) {
        let deadline = machine.deadline().map_or(NEVER, Time::as_nanos);
        self.times.deadline.store(deadline, Ordering::SeqCst);
        self.sender.waits(machine.usage().outbox);
    }

    /// Runs the timers that are due.
    fn run_timers(&'static self, now: Time) {
        let is_due = |at: &AtomicU64| at.load(Ordering::SeqCst) <= now.as_nanos();
        if is_due(&self.times.forward_at) {
            self.times.forward_at.store(NEVER, Ordering::SeqCst);
            if let Some(pause) = self.transport.links.port.forward_kept() {
                self.forward_later(now + pause);
            }
        }
        if is_due(&self.times.watch_at) {
            self.look_after_neighbours();
        }
        if is_due(&self.times.abandoned_at) {
            self.look_for_abandoned();
        }
        if self.disconnects.until() <= now.as_nanos() {
            self.hand_on_disconnects(now, None);
        }
        if is_due(&self.times.unserved_at) {
            self.look_for_listeners(now);
        }
        if is_due(&self.times.left_until) {
            self.forget_left(now);
        }
        if is_due(&self.times.linger_until) {
            self.linger_no_longer();
        }
        if is_due(&self.times.deadline) {
            self.drive_cm(|machine, _, now| machine.on_timer(now));
        } else if self.sender.next() <= now.as_nanos() {
            self.send_mads(now);
        }
    }

    /// A datagram was handed on: the connection for it is closed after a while.
    fn note_forwarded(&self, now: Time) {
        self.forward_later(now + HOUSEKEEPING);
    }

    /// A process has no room for what is to be handed on to it; it may have then.
    fn forward_later(&self, at: Time) {
        let at = at.as_nanos();
        self.times.forward_at.fetch_min(at, Ordering::SeqCst);
        self.transport.links.waker.wake_before(at);
    }

    /// Tells the peers of all connections that they end, until `end` at most: the caller of exit(3) may hold the locks, and
    /// not all messages may leave at once. Peers not told by then are left to the records, by which other processes tell
    /// them. Does not wait for answers.
    pub fn shut_down(&'static self, end: Instant) {
        let left = || end.saturating_duration_since(Instant::now());
        let Some(mut line) = self.sender.try_line(left()) else { return };
        let Some(mut state) = self.state.try_lock_for(left()) else { return };
        let now = self.transport.core.now();
        self.call_cm(&mut state, now, |machine, _, now| machine.shutdown(now));
        drop(state);
        let dropped = self.transport.links.send_drops.load(Ordering::Relaxed);
        self.send_in(&mut line, now);
        while self.sender.next() != NEVER && !left().is_zero() {
            let pause = Time::from_nanos(self.sender.next()).since(self.transport.core.now());
            std::thread::sleep(pause.min(left()));
            self.send_in(&mut line, self.transport.core.now());
        }
        // A datagram that did not leave may have been for any peer.
        let all_left = self.transport.links.send_drops.load(Ordering::Relaxed) == dropped;
        if all_left && let Some(mut state) = self.state.try_lock_for(left()) {
            let State { machine, records, .. } = &mut *state;
            records.forget(|id| machine.has_told(id));
        }
    }

    /// The machine's counters, under the kernel's names where it has one. None if the machine is in use until `end`.
    pub fn cm_counters(&self, end: Instant) -> Vec<(String, u64)> {
        let left = end.saturating_duration_since(Instant::now());
        let Some(state) = self.state.try_lock_for(left) else { return Vec::new() };
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

impl<I: Events> Management for Gsi<I> {
    fn next(&self) -> u64 {
        self.next_time()
    }

    fn run(&'static self, now: Time) {
        self.run_timers(now);
    }

    fn receive(&'static self, now: Time, mads: &[Incoming<'_>]) {
        self.receive_mads(now, mads);
    }

    fn keeps_disconnects(&self) -> bool {
        self.disconnects.any()
    }

    fn look_at_disconnects(&'static self, now: Time, empty: Time) {
        self.hand_on_disconnects(now, Some(empty));
    }

    fn forwarded(&self, now: Time) {
        self.note_forwarded(now);
    }

    fn addresses_changed(&'static self) {
        let gids = &self.transport.core.gids;
        self.drive_cm(|_, ids, _| {
            ids.addresses_changed(&|gid, on| gids.find(gid, on).or_else(|| gids.find(gid, 0)));
        });
    }

    fn device_failed(&'static self, device: usize) {
        self.drive_cm(|_, ids, _| ids.device_failed(device));
    }
}

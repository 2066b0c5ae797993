//! Records of connections to other hosts. By them another process of the host, or the launcher, ends the connections of
//! a process that cannot. That may be because of SIGKILL, a crash, exec, or because there are too many peers to tell
//! while exit(3) waits.
//!
//! Each connection that its peer may believe in has one in the host's journal ([`anyverbs_net::journal`]), until it has
//! ended on both sides. While a process has connections, it looks once a second for records of ended processes, and
//! sends DREQs in their place, from the same address and with their IDs. The answer is steered by the slot of the dead
//! process. The process that gets it forwards it to the one that asks. (Connections on one host need none of this: see
//! [`super::neighbours`].)
//!
//! Records are written below the machine's lock, by a pwrite(2) into memory. Work that takes more system calls, joining
//! the journal and getting a section of it, is done before.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::host::{Abandoned, Section};
use anyverbs_net::{Journal, Uncancelled};
use anyverbs_objects::base::{HOUSEKEEPING, NEVER};
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::cm::{Cm, Record};
use anyverbs_proto::time::Time;

use super::Incoming;
use super::State;
use super::{Events, Gsi};

/// The host's journal, once this process has joined it.
#[derive(Debug, Default)]
pub(super) struct Joined {
    journal: OnceLock<Arc<Journal>>,
    /// When it is tried again, if that failed. Locked while it is tried.
    again_at: Mutex<rank::RecordsDue, Option<Time>>,
}

impl Joined {
    pub(super) fn get(&self) -> Option<&Arc<Journal>> {
        self.journal.get()
    }

    /// Later callers wait while one tries. After an error there is no further try for a while.
    fn get_or_join(
        &self,
        now: impl Fn() -> Time,
        join: impl FnOnce() -> io::Result<Arc<Journal>>,
    ) -> Option<&Arc<Journal>> {
        if let Some(journal) = self.get() {
            return Some(journal);
        }
        let _uncancelled = Uncancelled::new();
        let mut again_at = self.again_at.lock();
        if self.get().is_none() && again_at.is_none_or(|at| now() >= at) {
            match join() {
                Ok(journal) => drop(self.journal.set(journal)),
                Err(error) => {
                    if again_at.replace(now() + HOUSEKEEPING).is_none() {
                        tracing::warn!(%error, "no journal at present: if this process is killed, its connections end unseen");
                    }
                }
            }
        }
        self.get()
    }
}

/// The records that this process has written, and those that it has taken over.
#[derive(Debug, Default)]
pub(super) struct Records {
    section: Option<Section>,
    places: HashMap<CommId, u32>,
    inherited: Vec<Inherited>,
    /// In which section, and where there, the record of a connection is that this process ends.
    taken: HashMap<CommId, (u8, u32)>,
    /// The number that could not be ended at the last look.
    waiting: usize,
    /// The thread that waits until none is taken any more.
    waiter: Option<Thread>,
}

/// A section that this process has taken over, while it ends connections of it.
#[derive(Debug)]
struct Inherited {
    left: Abandoned,
    /// The number of connections that this process is ending, and when it began the last.
    open: usize,
    since: Time,
    /// Those which it could not begin to end, and where their records are.
    waiting: Vec<(Record, u32)>,
}

impl Inherited {
    /// Begins with all valid records waiting; others end here.
    fn new(mut left: Abandoned) -> Self {
        let (mut waiting, mut nonsense) = (Vec::new(), Vec::new());
        for (at, bytes) in left.records() {
            match Record::parse(bytes) {
                Some(record) => waiting.push((record, *at)),
                None => nonsense.push(*at),
            }
        }
        for at in nonsense {
            left.done(at);
        }
        Self { left, open: 0, since: Time::default(), waiting }
    }
}

impl Records {
    fn add(&mut self, id: CommId, record: &Record) {
        if let Some(at) = self.section.as_mut().and_then(|section| section.add(&record.emit())) {
            self.places.insert(id, at);
        }
    }

    fn remove(&mut self, id: CommId) {
        if let Some(at) = self.places.remove(&id) {
            self.section.as_mut().expect("it has places").remove(at);
        } else if let Some((number, at)) = self.taken.remove(&id) {
            self.inherited.retain_mut(|inherited| {
                if inherited.left.number() == number {
                    inherited.left.done(at);
                    inherited.open -= 1;
                }
                // Other processes may be able to end the waiting ones.
                inherited.open > 0
            });
            if self.taken.is_empty()
                && let Some(waiter) = self.waiter.take()
            {
                waiter.unpark();
            }
        }
    }

    /// Removes the connections of which this process has told the peer itself.
    pub(super) fn forget(&mut self, has_told: impl Fn(CommId) -> bool) {
        let Some(section) = &mut self.section else { return };
        if self.places.keys().all(|id| has_told(*id)) {
            self.places.clear();
            return section.clear();
        }
        for (_, at) in self.places.extract_if(|id, _| has_told(*id)) {
            section.remove(at);
        }
    }
}

impl<I: Events> Gsi<I> {
    /// The host's journal, joined with the program's first call of the connection manager. Not called under the
    /// machine's lock.
    pub(super) fn journal(&self) -> Option<&Arc<Journal>> {
        self.journal.get_or_join(
            || self.transport.core.now(),
            || {
                let journal = Journal::join(self.services.store())?;
                self.take_section(&journal);
                Ok(journal)
            },
        )
    }

    /// The slots of processes that have taken records over. Reads memory only.
    pub(super) fn successors(&self) -> BTreeSet<u8> {
        Journal::successors(self.services.store())
    }

    /// Gets a section for this process's records, if it has none. That may take many system calls: not under the
    /// machine's lock.
    fn take_section(&self, journal: &Arc<Journal>) {
        if self.state.lock().records.section.is_some() {
            return;
        }
        match journal.section() {
            Ok(section) => {
                self.state.lock().records.section.get_or_insert(section);
            }
            Err(error) => tracing::debug!(%error, "connections end unseen at present"),
        }
    }

    /// Writes down changes of connections. Called under the machine's lock.
    pub(super) fn write_records(&self, machine: &mut Cm, records: &mut Records, now: Time) {
        while let Some((id, record)) = machine.poll_record() {
            match (record, self.journal.get()) {
                (Some(record), Some(_)) if !self.transport.core.gids.contains(record.dgid) => {
                    records.add(id, &record);
                    let watch_at = &self.times.abandoned_at;
                    if watch_at.load(Ordering::SeqCst) == NEVER {
                        watch_at.store((now + HOUSEKEEPING).as_nanos(), Ordering::SeqCst);
                    }
                }
                (Some(_), _) => {}
                (None, _) => records.remove(id),
            }
        }
    }

    /// Connections of others that this process is ending.
    pub fn abandoned(&self) -> usize {
        self.state.lock().records.taken.len()
    }

    /// Waits until all connections of others that this process is ending have ended, or until `end`. For one thread at a
    /// time.
    pub fn await_abandoned(&self, end: Instant) {
        loop {
            let mut state = self.state.lock();
            if state.records.taken.is_empty() {
                return;
            }
            state.records.waiter = Some(thread::current());
            drop(state);
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            thread::park_timeout(left);
        }
    }

    /// Gives up the connections that it has not ended yet. Peers that were asked for as long as `asked` are not asked
    /// again. Others may end the rest, also those that it could not begin to end. Returns the number of all these.
    pub fn leave_abandoned(&self, asked: Duration) -> usize {
        let mut state = self.state.lock();
        let now = self.transport.core.now();
        let records = &mut state.records;
        let mut inherited = std::mem::take(&mut records.inherited);
        let taken = std::mem::take(&mut records.taken);
        let waiting = std::mem::take(&mut records.waiting);
        drop(state);
        for (number, at) in taken.values() {
            let of = inherited.iter_mut().find(|i| i.left.number() == *number);
            if let Some(of) = of.filter(|of| of.since + asked <= now) {
                of.left.done(*at);
            }
        }
        taken.len() + waiting
    }

    /// Ends the connections of processes that have ended without a word.
    pub fn look_for_abandoned(&'static self) {
        let journal = self.journal();
        if let Some(journal) = journal {
            self.take_section(journal);
        }
        let taken = journal.map_or(Ok(Vec::new()), |j| j.take_abandoned(self.transport.core.slot));
        let taken = taken
            .inspect_err(
                |error| tracing::debug!(%error, "what others left is not known at present"),
            )
            .unwrap_or_default();
        let taken: Vec<_> = taken.into_iter().map(Inherited::new).collect();
        let mut state = self.state.lock();
        let now = self.transport.core.now();
        let State { machine, records, .. } = &mut *state;
        let before = std::mem::take(&mut records.inherited);
        let mut for_others = Vec::new();
        records.waiting = 0;
        for mut inherited in before.into_iter().chain(taken) {
            let number = inherited.left.number();
            inherited.waiting.retain(|(record, at)| {
                let begun =
                    self.is_of_this_host(record).then(|| machine.disconnect_for(now, record));
                match &begun {
                    Some(Ok(())) => {
                        records.taken.insert(record.id, (number, *at));
                        inherited.open += 1;
                        inherited.since = now;
                    }
                    Some(Err(error)) => {
                        tracing::debug!(%error, "a connection of another process is not ended");
                    }
                    None => {}
                }
                begun != Some(Ok(()))
            });
            records.waiting += inherited.waiting.len();
            let to = if inherited.open > 0 { &mut records.inherited } else { &mut for_others };
            to.push(inherited);
        }
        self.call_cm(&mut state, now, |_, _, _| ());
        let records = &state.records;
        let (yet, mine) = (records.taken.len() + records.waiting, records.places.len());
        // Under the lock, so that the next caller with a connection sees it.
        let next = if yet + mine > 0 { (now + HOUSEKEEPING).as_nanos() } else { NEVER };
        self.times.abandoned_at.store(next, Ordering::SeqCst);
        drop(state);
        drop(for_others);
        self.send_mads(now);
        self.transport.links.waker.wake_before(self.next_time());
    }

    /// Whether a connection may be one of this host: of our addresses, to another's. Addresses come and go, and not all processes
    /// need have the same.
    fn is_of_this_host(&self, record: &Record) -> bool {
        self.transport.core.gids.contains(record.sgid)
            && !self.transport.core.gids.contains(record.dgid)
    }

    /// Hands the answer to a DREQ on that another process sent for one that is dead.
    pub(super) fn is_for_successor(&self, now: Time, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        let Message::Drep(drep) = &mad.message else { return false };
        if incoming.was_forwarded || self.state.lock().machine.has(drep.remote_comm_id) {
            return false;
        }
        let others = self.successors().into_iter().filter(|s| *s != self.transport.core.slot);
        // Only they know which of them it is for.
        others.fold(false, |any, slot| self.hand_on(now, slot, &incoming.datagram) | any)
    }
}

#[cfg(test)]
mod tests {
    use anyverbs_net::{Registry, Store};
    use anyverbs_proto::types::{Gid, Qpn};
    use anyverbs_testing::in_own_process;

    use super::super::tests::{gsi, ip};
    use super::*;

    #[test]
    fn peers_not_told_in_time_are_left_to_others() {
        let name = "gsi::records::tests::peers_not_told_in_time_are_left_to_others";
        in_own_process(name, || {
            let gsi = gsi();
            let own = gsi.core().gids.entries()[0].gid;
            let record = |id| Record {
                id: CommId(id),
                remote_id: CommId(8),
                remote_qpn: Qpn::new(9),
                sgid: own,
                dgid: Gid::from(ip("127.0.0.9")),
                interface: 0,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                timeout: Duration::from_secs(1),
                max_retries: 15,
            };
            let (told, untold) = (record(7), record(8));
            let end = || {
                gsi.shut_down(Instant::now() + Duration::from_millis(400));
                let state = gsi.state.lock();
                state.records.places.keys().copied().collect::<Vec<_>>()
            };
            let disconnect = |record: &Record| {
                gsi.with_cm(|machine, _, now| machine.disconnect_for(now, record).unwrap());
                gsi.state.lock().records.add(record.id, record);
            };
            disconnect(&told);
            gsi.sender.pause_until(gsi.core().now() + Duration::from_secs(3600));
            disconnect(&untold);
            assert_eq!(end(), [untold.id]);
            gsi.sender.pause_until(Time::default());
            assert_eq!(end(), []);
        });
    }

    #[test]
    fn it_is_tried_again_to_join() {
        let joined = Joined::default();
        let registry = Registry::new(&format!("rejoin-{}", std::process::id())).unwrap();
        let store = Store::join(&registry).unwrap();
        let at = |ms| move || Time::default() + Duration::from_millis(ms);
        assert!(joined.get_or_join(at(0), || Err(io::ErrorKind::TimedOut.into())).is_none());
        assert!(joined.get_or_join(at(999), || unreachable!()).is_none());
        assert!(joined.get_or_join(at(1000), || Err(io::ErrorKind::TimedOut.into())).is_none());
        assert!(joined.get_or_join(at(1999), || unreachable!()).is_none());
        assert!(joined.get_or_join(at(2000), || Journal::join(&store)).is_some());
        assert!(joined.get_or_join(at(2000), || unreachable!()).is_some());
    }
}

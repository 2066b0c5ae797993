//! Records of connections to other hosts, for whoever ends the connections of a process that cannot (SIGKILL, a crash,
//! exec): another process of the host, or its launcher.
//!
//! Each connection that its peer may believe in has one in the host's journal ([`anyverbs_net::journal`]), until it has ended
//! on both sides. While a process has connections, it looks once a second for what others left, and sends
//! DREQs in their place, from the same address and with their IDs. The answer is steered by the slot of the dead: whoever gets it hands
//! it on to the one that asks. (Connections on one host need none of this: see [`super::neighbours`].)
//!
//! Records are written below the machine's lock, by a pwrite(2) into memory.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_net::Journal;
use anyverbs_net::journal::{Abandoned, Section};
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::cm::{Cm, Record};
use anyverbs_proto::time::Time;

use super::receive::Incoming;
use crate::engine::Engine;
use crate::engine::timers::NEVER;

const PERIOD: Duration = Duration::from_secs(1);

/// What this process has written, and what it has taken over.
#[derive(Debug, Default)]
pub(super) struct Records {
    section: Option<Section>,
    places: HashMap<CommId, u32>,
    abandoned: Vec<Abandoned>,
    /// In which of these, and where there, the record of a connection is that this process ends.
    taken: HashMap<CommId, (u32, u32)>,
}

impl Records {
    fn add(&mut self, journal: &Arc<Journal>, id: CommId, record: &Record) {
        if self.section.is_none() {
            let section = journal.section();
            self.section =
                section.inspect_err(|error| tracing::debug!(%error, "connections end unseen")).ok();
        }
        if let Some(at) = self.section.as_mut().and_then(|section| section.add(&record.emit())) {
            self.places.insert(id, at);
        }
    }

    fn remove(&mut self, id: CommId) {
        if let Some(at) = self.places.remove(&id) {
            self.section.as_mut().expect("it has places").remove(at);
        } else if let Some((number, at)) = self.taken.remove(&id) {
            self.abandoned.retain_mut(|left| left.number() != number || !left.done(at));
        }
    }

    /// This process has told all its peers itself.
    pub(super) fn clear(&mut self) {
        self.places.clear();
        if let Some(section) = &mut self.section {
            section.clear();
        }
    }
}

impl Engine {
    /// The host's journal, joined with the first use of the connection manager.
    pub(super) fn journal(&self) -> Option<&Arc<Journal>> {
        let journal = self.gsi.journal.get_or_init(|| {
            let journal = Journal::join(self.services.registry());
            journal
                .inspect_err(|error| tracing::debug!(%error, "no journal: connections end unseen"))
                .ok()
        });
        journal.as_ref()
    }

    /// Writes down what has become of connections. Called under the machine's lock.
    pub(super) fn write_records(&self, machine: &mut Cm, records: &mut Records, now: Time) {
        while let Some((id, record)) = machine.poll_record() {
            match (record, self.gsi.journal.get()) {
                (Some(record), Some(Some(journal))) if !self.gids.contains(record.dgid) => {
                    records.add(journal, id, &record);
                    let watch_at = &self.gsi.abandoned_at;
                    if watch_at.load(Ordering::SeqCst) == NEVER {
                        watch_at.store((now + PERIOD).as_nanos(), Ordering::SeqCst);
                    }
                }
                (Some(_), _) => {}
                (None, _) => records.remove(id),
            }
        }
    }

    /// Connections of others that this process is ending.
    pub(crate) fn abandoned(&self) -> usize {
        self.gsi.state.lock().records.taken.len()
    }

    /// Ends the connections of processes that have ended without a word.
    pub(crate) fn look_for_abandoned(&'static self) {
        let taken = self.journal().map_or(Ok(Vec::new()), |j| j.take_abandoned(self.slot));
        let taken = taken
            .inspect_err(
                |error| tracing::debug!(%error, "what others left is not known at present"),
            )
            .unwrap_or_default();
        let mut state = self.gsi.state.lock();
        let now = self.now();
        for mut left in taken {
            let number = left.number();
            let (mut ours, mut nonsense) = (Vec::new(), Vec::new());
            for (at, bytes) in left.records() {
                match Record::parse(bytes) {
                    Some(record) if self.is_abandoned(&record) => ours.push((record, *at)),
                    _ => nonsense.push(*at),
                }
            }
            for (record, at) in ours {
                match state.machine.disconnect_for(now, &record) {
                    Ok(()) => drop(state.records.taken.insert(record.id, (number, at))),
                    Err(error) => {
                        tracing::debug!(%error, "a connection of another process is not ended");
                        nonsense.push(at);
                    }
                }
            }
            let is_done = nonsense.into_iter().fold(false, |_, at| left.done(at));
            if !is_done {
                state.records.abandoned.push(left);
            }
        }
        self.call_cm(&mut state, now, |_, _, _| ());
        let (yet, mine) = (state.records.taken.len(), state.records.places.len());
        // Under the lock, so that who has a connection next sees it.
        let next = if yet + mine > 0 { (now + PERIOD).as_nanos() } else { NEVER };
        self.gsi.abandoned_at.store(next, Ordering::SeqCst);
        drop(state);
        self.send_mads(now);
        self.worker.wake_before(self.gsi.next());
    }

    /// Whether a record may be one of this host: of our addresses, to another's.
    fn is_abandoned(&self, record: &Record) -> bool {
        self.gids.contains(record.sgid) && !self.gids.contains(record.dgid)
    }

    /// Hands the answer to a DREQ on that another process sent for one that is dead.
    pub(super) fn is_for_successor(&self, now: Time, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        let Message::Drep(drep) = &mad.message else { return false };
        if incoming.was_forwarded || self.gsi.state.lock().machine.has(drep.remote_comm_id) {
            return false;
        }
        let Some(Some(journal)) = self.gsi.journal.get() else { return false };
        let successors: io::Result<_> = journal.successors();
        let mut others = successors.unwrap_or_default().into_iter().filter(|s| *s != self.slot);
        // More than one at a time is seldom; the others are asked again, and answered by chance.
        others.any(|slot| self.hand_on(now, slot, &incoming.datagram))
    }
}

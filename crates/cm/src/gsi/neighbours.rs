//! Processes of this host that are killed (SIGKILL). No one else tells the processes that are connected to them.
//!
//! While there are connections to processes of this host, the host's store is asked once a second which processes live.
//! A slot may have been taken again meanwhile, so a process is known by its slot and the slot's incarnation.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;

use anyverbs_objects::base::{HOUSEKEEPING, NEVER};
use anyverbs_proto::cm::Cm;
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Gid;

use super::{Events, Gsi};

/// The processes of this host that connections lead to, as they were last: by slot the incarnation, and the IDs that
/// connections have there.
pub(super) type Neighbours = HashMap<u8, (u32, HashSet<CommId>)>;

impl<I: Events> Gsi<I> {
    /// Sees to it that neighbours are watched while there are any.
    pub(super) fn watch_neighbours(&self, machine: &Cm, now: Time) {
        let watch_at = &self.times.watch_at;
        if watch_at.load(Ordering::SeqCst) == NEVER && machine.usage().connections > 0 {
            watch_at.store((now + HOUSEKEEPING).as_nanos(), Ordering::SeqCst);
        }
    }

    /// Ends the connections to those that are gone.
    pub(super) fn look_after_neighbours(&'static self) {
        self.end_those_gone();
        self.transport.links.waker.wake_before(self.next_time());
        self.send_mads(self.transport.core.now());
    }

    fn end_those_gone(&'static self) {
        let hosts: HashSet<Gid> =
            self.transport.core.gids.entries().into_iter().map(|e| e.gid).collect();
        let mut known = self.neighbours.lock();
        // The machine's lock is not held while the kernel is asked which processes live.
        let alive = self.services.store().incarnations();
        let mut peers: HashSet<CommId> = known.values().flat_map(|(_, ids)| ids).copied().collect();
        let state = self.state.lock();
        peers.extend(state.machine.peers().filter(|(gid, _)| hosts.contains(gid)).map(|p| p.1));
        drop(state);
        let slots = peers.iter().map(|id| id.slot());
        let dead: HashSet<u8> = slots.filter(|slot| !alive.contains_key(slot)).collect();
        let mut gone: HashSet<CommId> =
            peers.into_iter().filter(|id| dead.contains(&id.slot())).collect();
        known.retain(|slot, (incarnation, ids)| {
            let is_another = |now: &u32| *now != *incarnation;
            let ended = dead.contains(slot) || alive.get(slot).is_some_and(is_another);
            if ended {
                gone.extend(ids.iter());
            }
            // Only the present connections of live processes are remembered.
            ids.clear();
            !ended
        });
        let mut state = self.state.lock();
        let now = self.transport.core.now();
        let next = self.call_cm(&mut state, now, |machine, _, now| {
            if !gone.is_empty() {
                machine.peers_gone(now, |gid, id| hosts.contains(&gid) && gone.contains(&id));
            }
            let mut next = NEVER;
            for (gid, id) in machine.peers() {
                let slot = id.slot();
                if slot == self.transport.core.slot || !hosts.contains(&gid) || gone.contains(&id) {
                    continue;
                }
                next = (now + HOUSEKEEPING).as_nanos();
                if let Some(&incarnation) = alive.get(&slot) {
                    known.entry(slot).or_insert_with(|| (incarnation, HashSet::new())).1.insert(id);
                } else if let Some((_, ids)) = known.get_mut(&slot) {
                    ids.insert(id);
                }
            }
            known.retain(|_, (_, ids)| !ids.is_empty());
            next
        });
        // Under the lock, so that the next caller with a neighbour sees it.
        self.times.watch_at.store(next, Ordering::SeqCst);
    }
}

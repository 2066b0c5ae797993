//! Processes of this host that end without a word (SIGKILL): nobody else tells those who are connected to them.
//!
//! While there are connections to processes of this host, the registry is asked once a second who still lives. A slot may
//! have been taken again meanwhile, so a process is known by its slot and the incarnation of that.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_proto::cm::Cm;
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Gid;

use crate::engine::Engine;
use crate::engine::timers::NEVER;

const PERIOD: Duration = Duration::from_secs(1);

/// The processes of this host that connections lead to, as they were last: by slot the incarnation, and the IDs that
/// connections have there.
pub(super) type Neighbours = HashMap<u8, (u64, HashSet<CommId>)>;

impl Engine {
    /// Sees to it that neighbours are watched while there are any.
    pub(super) fn watch_neighbours(&self, machine: &Cm, now: Time) {
        let watch_at = &self.gsi.watch_at;
        if watch_at.load(Ordering::SeqCst) == NEVER && machine.usage().connections > 0 {
            watch_at.store((now + PERIOD).as_nanos(), Ordering::SeqCst);
        }
    }

    /// Ends the connections to those that are gone.
    pub(super) fn look_after_neighbours(&'static self) {
        let hosts: HashSet<Gid> = self.gids.entries().into_iter().map(|e| e.gid).collect();
        let alive = self.services.incarnations();
        let mut known = self.gsi.neighbours.lock();
        let mut state = self.gsi.state.lock();
        let now = self.now();
        let next = self.call_cm(&mut state, now, |machine, _, now| {
            let is_gone = |slot, incarnation| alive.get(&slot) != Some(&incarnation);
            let ended =
                known.drain().filter(|&(slot, (incarnation, _))| is_gone(slot, incarnation));
            let gone: HashSet<CommId> = ended.flat_map(|(_, (_, ids))| ids).collect();
            // One that is not in the list ended, or has begun since.
            let here = machine.peers().filter(|(gid, _)| hosts.contains(gid));
            let slots: HashSet<u8> = here.map(|(_, id)| id.slot()).collect();
            let is_dead = |slot: &u8| !alive.contains_key(slot) && !self.services.is_alive(*slot);
            let dead: HashSet<u8> = slots.into_iter().filter(is_dead).collect();
            if !(gone.is_empty() && dead.is_empty()) {
                machine.peers_gone(now, |gid, id| {
                    hosts.contains(&gid) && (gone.contains(&id) || dead.contains(&id.slot()))
                });
            }
            for (gid, id) in machine.peers() {
                let slot = id.slot();
                if let Some(&incarnation) = alive.get(&slot)
                    && slot != self.slot
                    && hosts.contains(&gid)
                {
                    known.entry(slot).or_insert_with(|| (incarnation, HashSet::new())).1.insert(id);
                }
            }
            if known.is_empty() { NEVER } else { (now + PERIOD).as_nanos() }
        });
        // Under the lock, so that who has a neighbour next sees it.
        self.gsi.watch_at.store(next, Ordering::SeqCst);
        drop(state);
        drop(known);
        self.worker.wake_before(self.gsi.next());
        self.send_mads(now);
    }
}

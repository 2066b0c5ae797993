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
        let goes_on = self.with_cm(|machine, _, now| {
            let mut gone = HashSet::new();
            for (slot, (incarnation, ids)) in known.drain() {
                if alive.get(&slot) != Some(&incarnation) {
                    gone.extend(ids);
                }
            }
            if !gone.is_empty() {
                machine.peers_gone(now, |gid, id| hosts.contains(&gid) && gone.contains(&id));
            }
            for (gid, id) in machine.peers() {
                if hosts.contains(&gid) && id.slot() != self.slot {
                    // One that has ended already has none, and is gone the next time.
                    let incarnation = alive.get(&id.slot()).copied().unwrap_or_default();
                    let entry = known.entry(id.slot());
                    entry.or_insert_with(|| (incarnation, HashSet::new())).1.insert(id);
                }
            }
            let next = if known.is_empty() { NEVER } else { (now + PERIOD).as_nanos() };
            self.gsi.watch_at.store(next, Ordering::SeqCst);
            next
        });
        self.worker.wake_before(goes_on);
    }
}

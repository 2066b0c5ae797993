//! A target whose process has ended goes on in another one that has it open.
//!
//! Who opens a target of another process holds a name, while which the slot of that process is not given out again, and is told
//! after each change how far the responder has come. Of those who find that its process has ended the first to say so goes on
//! with it; the others have it open there. Packets for the target still bear the slot of the process that has ended:
//! whoever gets one looks for who goes on.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyverbs_net::registry::{Lock, standbys};
use anyverbs_net::{Datagram, NameGuard, forward::Forwarded};
use anyverbs_proto::qp::Qp;
use anyverbs_proto::qp::attr::{QpAttr, QpState};
use anyverbs_proto::qp::lending::Lease;
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::xrc_message::Message;

use super::super::Engine;
use crate::qp::{QpCell, State};
use crate::xrcd;

/// How long it is remembered who goes on with targets, and that nobody goes on with others.
const REMEMBER: Duration = Duration::from_millis(100);
/// Under this and its number, who goes on with a target.
const SUCCESSOR: &str = "successor";

/// XRC, in the upper bits of an opcode.
const XRC: u8 = 0b101;

fn name(target: Qpn) -> String {
    format!("{SUCCESSOR}/{}", target.get())
}

/// Who goes on with a target.
enum Successor {
    Here(NameGuard),
    Other(u8),
}

impl Engine {
    /// Keeps the slot of a process whose targets are open here.
    pub(super) fn hold_slot_of(&self, home: u8) -> std::io::Result<()> {
        let mut held = self.sharing.held_slots.lock();
        if let (false, Some(slot)) = (held.contains_key(&home), self.port.slot()) {
            held.insert(home, slot.registry().share(&standbys(home), slot.number())?);
        }
        Ok(())
    }

    /// Gives it back, if no target of it is open here any more.
    pub(crate) fn release_slot_of(&self, target: Qpn) {
        let slot = target.slot();
        let mut held = self.sharing.held_slots.lock();
        if held.contains_key(&slot)
            && self.qps.filter(|cell| cell.qpn.slot() == slot && cell.is_open()).is_empty()
        {
            held.remove(&slot);
        }
    }

    /// Whether targets of the process with this slot go on, or may, when it has ended.
    pub(in crate::engine) fn has_standbys(&self, slot: u8) -> bool {
        let registry = self.port.slot().map(|own| own.registry());
        registry.is_some_and(|r| r.sharers(&standbys(slot)).is_ok_and(|found| !found.is_empty()))
    }

    /// Tells other processes that have a target open how far it has come.
    #[inline]
    pub(in crate::engine) fn replicate(&self, cell: &QpCell, machine: &Qp) {
        if cell.has_others.load(Ordering::Relaxed) {
            self.replicate_of(cell, machine, machine.progress());
        }
    }

    /// As [`replicate`](Self::replicate), wherever the responder is.
    pub(super) fn replicate_state(&self, cell: &QpCell, state: &State) {
        if cell.has_others.load(Ordering::Relaxed) {
            let elsewhere = state.link.share.as_ref().and_then(|share| share.progress_elsewhere());
            self.replicate_of(cell, &state.machine, elsewhere.unwrap_or(state.machine.progress()));
        }
    }

    #[cold]
    pub(super) fn replicate_of(&self, cell: &QpCell, machine: &Qp, come: (Psn, u32)) {
        // In the midst of a message there is nothing to go on with.
        let Some(lease) = machine.lease() else { return };
        let state = Lease { expected: come.0, msn: come.1, ..lease };
        let message = Message::State { target: cell.qpn, attr: machine.attr(), state };
        for slot in cell.others() {
            self.sharing.tell(slot, &message);
        }
    }

    pub(super) fn note_state(&'static self, from: u8, target: Qpn, attr: QpAttr, state: Lease) {
        let Some(cell) = self.qps.find(target) else { return };
        match cell.home() {
            Some(home) if home == from => *cell.replica.lock() = Some((attr, state)),
            Some(_) => {}
            None => {
                // A borrower's, which may have come further than was told.
                let mut of = cell.state.lock();
                if state.expected.since(of.machine.progress().0) > 0 {
                    of.machine.resume(&state, |srqn| self.pd_of_srq(&cell, srqn));
                }
            }
        }
    }

    /// The process of a target has ended.
    pub(super) fn lose_home(&'static self, ended: u8, cell: &Arc<QpCell>) {
        let is_open = cell.is_open();
        if !is_open && cell.borrowed.load(Ordering::Relaxed) != 0 && self.has_standbys(ended) {
            // Who goes on with it asks for what was lent.
            return;
        }
        let goes_on = match is_open.then(|| self.elect_successor(cell.qpn)).flatten() {
            Some(Successor::Here(guard)) => self.go_on_with(cell, guard),
            Some(Successor::Other(successor)) => {
                self.follow(successor, cell);
                true
            }
            None => false,
        };
        if !goes_on {
            self.end_borrowing(cell, &mut cell.state.lock());
            cell.lose_home();
            self.forget_foreign(cell);
        }
    }

    /// Who goes on with a target whose process has ended.
    pub(super) fn successor_of(&self, target: Qpn) -> Option<u8> {
        let registry = self.port.slot()?.registry();
        if registry.is_alive(target.slot()).unwrap_or(true) {
            return None;
        }
        registry.sharers(&name(target)).ok()?.first().copied()
    }

    fn elect_successor(&self, target: Qpn) -> Option<Successor> {
        let slot = self.port.slot()?;
        let registry = slot.registry();
        let locked = registry.lock(Lock::Xrc, xrcd::LOCK_PATIENCE);
        let _locked =
            locked.inspect_err(|error| tracing::warn!(%target, %error, "is lost")).ok()?;
        match registry.sharers(&name(target)).ok()?.first() {
            Some(other) => Some(Successor::Other(*other)),
            None => registry.share(&name(target), slot.number()).ok().map(Successor::Here),
        }
    }

    /// False if nothing is known to go on with.
    fn go_on_with(&'static self, cell: &Arc<QpCell>, guard: NameGuard) -> bool {
        let (Some(slot), Some(file)) = (self.port.slot(), cell.xrc_file) else { return false };
        let sharers = slot.registry().sharers(&xrcd::name(file)).unwrap_or_default();
        // Whose table is locked while one is opened: not below a queue pair's lock.
        let domain = self.xrc_domains.number(file);
        let mut state = cell.state.lock();
        if cell.borrowed.swap(0, Ordering::Relaxed) == 0 {
            let Some((attr, lease)) = cell.replica.lock().take() else { return false };
            cell.set_xrc_domain(domain);
            let pd_of = |srqn| self.pd_of_srq(cell, srqn);
            state.machine = Qp::borrowed(cell.qpn, &attr, &lease, pd_of);
            if matches!(attr.state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
                let State { machine, link, .. } = &mut *state;
                link.pin(self, machine);
            }
        }
        // Before anything is lent to them, which takes a request and this lock: they would not know who lends it.
        for other in sharers.into_iter().filter(|other| *other != self.slot) {
            self.sharing.tell(other, &Message::TakeOver { target: cell.qpn });
        }
        cell.take_over(guard);
        drop(state);
        self.sharing.has_taken_over.store(true, Ordering::Release);
        tracing::debug!(target = %cell.qpn, "goes on with the target of a process that has ended");
        true
    }

    /// Another process goes on with a target.
    pub(super) fn follow(&'static self, successor: u8, cell: &Arc<QpCell>) {
        if cell.home().is_none() || cell.home() == Some(successor) {
            return;
        }
        cell.set_home(successor);
        if cell.is_open() {
            self.sharing.tell(successor, &Message::Opened { target: cell.qpn });
        }
        let mut state = cell.state.lock();
        if cell.borrowed.load(Ordering::Relaxed) != 0 {
            if let Some(lease) = state.machine.lease() {
                let (target, attr) = (cell.qpn, state.machine.attr());
                self.sharing.tell(successor, &Message::State { target, attr, state: lease });
            }
            self.end_borrowing(cell, &mut state);
        }
        drop(state);
        self.forget_foreign(cell);
    }

    /// Whether a packet for the slot of another process is for a target that goes on here.
    #[inline]
    pub(in crate::engine) fn has_taken_over(&self, target: [u8; 3]) -> bool {
        self.sharing.has_taken_over.load(Ordering::Relaxed)
            && self
                .qps
                .find(Qpn::new(u32::from_be_bytes([0, target[0], target[1], target[2]])))
                .is_some_and(|cell| cell.home().is_none())
    }

    /// Hands a packet for a process that has ended to who goes on with its target.
    #[cold]
    pub(in crate::engine) fn forward_to_successor(&self, datagram: &Datagram<'_>) -> bool {
        let &[opcode, _, _, _, _, a, b, c, ..] = datagram.bytes else { return false };
        let Some(slot) = self.port.slot().filter(|_| opcode >> 5 == XRC) else { return false };
        let target = Qpn::new(u32::from_be_bytes([0, a, b, c]));
        let known = self.sharing.successors.lock().find(target, Instant::now(), |wanted| {
            let names = slot.registry().shared_names(SUCCESSOR, wanted)?;
            Ok(names
                .into_iter()
                .filter_map(|(target, by)| Some((target.parse().ok()?, by)))
                .collect())
        });
        let Some(successor) = known else { return false };
        matches!(self.port.forward(successor, datagram), Forwarded::Sent | Forwarded::Kept)
    }
}

/// Who goes on with targets of processes that have ended. Packets may name any number, and a look into the registry takes the
/// longer the more sockets there are: one look finds all.
#[derive(Debug, Default)]
pub(super) struct Successors {
    by_target: HashMap<u32, u8>,
    until: Option<Instant>,
}

impl Successors {
    /// `look` finds all; if it can look up only one, that which is wanted.
    fn find(
        &mut self,
        target: Qpn,
        now: Instant,
        look: impl FnOnce(&str) -> std::io::Result<HashMap<u32, u8>>,
    ) -> Option<u8> {
        if self.until.is_none_or(|until| now >= until) {
            self.until = Some(now + REMEMBER);
            self.by_target = look(&target.get().to_string()).unwrap_or_default();
        }
        self.by_target.get(&target.get()).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forged_numbers_are_not_looked_up_one_by_one() {
        let (mut successors, mut looks, start) = (Successors::default(), 0, Instant::now());
        let mut find = |target, now| {
            successors.find(Qpn::new(target), now, |_| {
                looks += 1;
                Ok(HashMap::from([(7, 3)]))
            })
        };
        for forged in 100..10_000 {
            assert_eq!(find(forged, start), None);
            assert_eq!(find(7, start), Some(3));
        }
        assert_eq!(find(8, start + REMEMBER), None);
        assert_eq!(looks, 2);
    }
}

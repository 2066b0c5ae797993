//! In the process of an SRQ: a target of another process at work for it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyverbs_proto::qp::attr::{QpAttr, QpState};
use anyverbs_proto::qp::lending::Lease;
use anyverbs_proto::qp::{Arrival, Incoming, Qp};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::xrc_message::Message;
use anyverbs_transport::qp::env::Call;
use anyverbs_transport::qp::{QpCell, State};

use super::SharedDomains;
use super::domain::FileId;

impl SharedDomains {
    pub(super) fn borrow(
        &'static self,
        from: u8,
        target: Qpn,
        lease: u64,
        domain: FileId,
        attr: &QpAttr,
        responder: &Lease,
    ) {
        if target.slot() == self.transport.core.slot {
            return;
        }
        let number = self.domains.number(domain);
        let make = |qpn| QpCell::foreign(self.transport, qpn, from, domain);
        let cell = self.transport.qps.enter_foreign(target, make, |cell| {
            if cell.home() == Some(from) {
                cell.xrc.borrowed.store(lease, Ordering::Relaxed);
            }
        });
        if cell.home() != Some(from) {
            return;
        }
        cell.set_xrc_domain(number);
        let mut state = cell.state.lock();
        let pd_of = |srqn| self.pd_of_srq(&cell, srqn);
        state.machine = Qp::borrowed(target, attr, responder, pd_of);
        let State { machine, link, .. } = &mut *state;
        link.pin(self.transport.links, machine);
        link.xrc.srq = None;
    }

    /// Calls into a target that is borrowed from `from`, under this lease or any.
    fn with_borrowed(
        &'static self,
        from: u8,
        target: Qpn,
        lease: Option<u64>,
        f: impl FnOnce(&mut State, &mut Call<'_>, u64) -> bool,
    ) {
        let Some(cell) = self.transport.qps.find(target).filter(|cell| cell.home() == Some(from))
        else {
            return;
        };
        let mut state = cell.state.lock();
        let under = cell.xrc.borrowed.load(Ordering::Relaxed);
        if under == 0 || lease.is_some_and(|lease| lease != under) || state.is_dead() {
            return;
        }
        let mut call = Call::new(&cell);
        let stays = f(&mut state, &mut call, under);
        call.settle(&mut state);
        if !stays {
            self.end_borrowing(&cell, &mut state);
        }
        drop(state);
        self.forget_foreign(&cell);
        self.transport.after_unlock();
    }

    pub(super) fn receive_borrowed(
        &'static self,
        from: u8,
        target: Qpn,
        arrival: &Arrival,
        packet: &Incoming<'_>,
    ) {
        self.with_borrowed(from, target, None, |State { machine, link, .. }, call, lease| {
            let before = machine.progress();
            machine.receive(arrival, packet, &mut call.env(link));
            let (expected, msn) = machine.progress();
            if machine.state() == QpState::Err {
                return !self.send_back(from, target, lease, machine);
            }
            if (expected, msn) != before {
                // Before any ACK: should this process end, its home knows as much as the peer.
                self.tell(from, &Message::Progress { target, lease, expected, msn });
            }
            machine.acknowledge(&mut call.env(link));
            true
        });
    }

    /// False if it has to stay: a message is half received, or the system has nothing to send it by, and it is asked for again.
    fn send_back(&self, to: u8, target: Qpn, lease: u64, machine: &Qp) -> bool {
        let Some(state) = machine.lease() else { return false };
        match self.send(to, &Message::Return { target, lease, state }) {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(%target, %error, "a responder is not given back");
                // No process is left to have it.
                error.kind() == std::io::ErrorKind::ConnectionRefused
            }
        }
    }

    /// Its home wants it back.
    pub(super) fn give_back(&'static self, from: u8, target: Qpn, lease: u64) {
        self.with_borrowed(from, target, Some(lease), |State { machine, link, .. }, call, _| {
            machine.transmit(&mut call.env(link));
            machine.acknowledge(&mut call.env(link));
            if self.send_back(from, target, lease, machine) {
                return false;
            }
            let later = !machine.is_within_message();
            self.tell(from, &Message::Busy { target, lease, later });
            true
        });
    }

    /// Its attributes have changed.
    pub(super) fn follow_attr(&'static self, from: u8, target: Qpn, lease: u64, attr: &QpAttr) {
        self.with_borrowed(from, target, Some(lease), |State { machine, .. }, _, _| {
            machine.follow_attr(attr);
            true
        });
    }

    /// It was reset or destroyed.
    pub(super) fn forget_borrowed(&'static self, from: u8, target: Qpn, lease: u64) {
        self.with_borrowed(from, target, Some(lease), |_, _, _| false);
    }

    /// The responder is here no more.
    pub(super) fn end_borrowing(&self, cell: &QpCell, state: &mut State) {
        cell.xrc.borrowed.store(0, Ordering::Relaxed);
        state.link.leave_path(cell.qpn);
        state.link.xrc.srq = None;
        state.machine = QpCell::foreign_machine(cell.qpn);
        self.transport.core.mrs.forget_qp(cell.qpn.get());
    }

    /// A target of another process that is neither borrowed nor open here is forgotten.
    pub(super) fn forget_foreign(&self, cell: &Arc<QpCell>) {
        self.transport.qps.remove_foreign(cell.qpn, |cell| !cell.is_claimed());
    }
}

//! In the process of a target: its responder goes to the process that has the SRQ of a request, and comes back.

use anyverbs_net::Delivery;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::qp::lending::{Lease, Lending};
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::{PKey, Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::xrc_message::{self, Message};
use anyverbs_transport::qp::env::Call;
use anyverbs_transport::qp::qp_context::QpContext;
use anyverbs_transport::qp::{QpCell, State};

use super::SharedDomains;
use super::waiting::{Added, HeldRequests};

/// Where a target's responder is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Location {
    #[default]
    Here,
    /// Lent to this slot's process.
    With(u8),
    /// As well, and wanted back.
    Recalled(u8),
}

/// The sharing of a target whose responder has been elsewhere.
#[derive(Debug, Default)]
struct Share {
    place: Location,
    /// Counts the leases: messages about an earlier one are old.
    lease: u64,
    /// The borrower's position when it last reported it.
    expected: Psn,
    msn: u32,
    /// Requests that wait until it is back.
    waiting: HeldRequests,
}

impl Share {
    /// The responder is back. Returns the waiting requests.
    fn arrive(&mut self) -> HeldRequests {
        self.place = Location::Here;
        std::mem::take(&mut self.waiting)
    }

    /// Whether the borrower has executed it, and needs nothing of the SRQ that it names to acknowledge it once more.
    fn is_done(&self, bth: &Bth) -> bool {
        bth.psn.since(self.expected) < 0 && bth.opcode.operation != Operation::ReadRequest
    }

    fn is_lent(&self, to: u8, lease: u64) -> bool {
        self.lease == lease
            && matches!(self.place, Location::With(by) | Location::Recalled(by) if by == to)
    }
}

/// The state of a target whose responder has been elsewhere.
fn share(link: &QpContext) -> Option<&Share> {
    link.xrc.share.as_deref()?.downcast_ref()
}

fn share_mut(link: &mut QpContext) -> Option<&mut Share> {
    link.xrc.share.as_deref_mut()?.downcast_mut()
}

impl SharedDomains {
    /// Hands a request for a target to where it belongs, if that is not here, or if the responder is not.
    #[inline]
    pub(super) fn hand_over_elsewhere(
        &'static self,
        cell: &QpCell,
        state: &mut State,
        call: &mut Call<'_>,
        arrival: &Arrival,
        packet: &Incoming<'_>,
    ) -> bool {
        let Some(xrceth) = packet.headers.xrceth else { return false };
        let to = Qpn::new(xrceth.srqn).slot();
        if to == self.transport.core.slot && state.link.xrc.share.is_none() {
            return false;
        }
        self.hand_over(cell, state, call, arrival, packet, to)
    }

    #[cold]
    fn hand_over(
        &'static self,
        cell: &QpCell,
        state: &mut State,
        call: &mut Call<'_>,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        to: u8,
    ) -> bool {
        let Some(domain) = cell.xrc.file else { return false };
        let attr = state.machine.attr();
        let bth = &packet.headers.bth;
        // Only the peer's requests move anything.
        if !arrival.is_from(&attr.av) || !bth.pkey.matches(PKey::DEFAULT) {
            return false;
        }
        let place = share(&state.link).map_or(Location::Here, |share| share.place);
        if place == Location::Here {
            if to == self.transport.core.slot {
                return false;
            }
            let State { machine, link, .. } = &mut *state;
            match machine.lending(packet, &mut call.env(link)) {
                Lending::Stays => return false,
                Lending::Later => return true,
                Lending::Goes => {}
            }
            // Its own ACKs first: the borrower's are about more.
            call.settle(state);
            let Some(responder) = state.machine.lease() else { return true };
            let share = state.link.xrc.share.get_or_insert_with(|| Box::<Share>::default());
            let Some(share) = share.downcast_mut::<Share>() else { return false };
            share.lease += 1;
            (share.expected, share.msn) = (responder.expected, responder.msn);
            let lend = Message::Lend {
                target: cell.qpn,
                lease: share.lease,
                domain,
                attr,
                state: responder,
            };
            match self.send(to, &lend) {
                Ok(()) => share.place = Location::With(to),
                // It will come again.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return true,
                // There is no such process: the SRQ is not found here either.
                Err(_) => return false,
            }
        }
        let Some(bytes) =
            xrc_message::packet(cell.qpn, arrival, packet, &self.transport.core.memory)
        else {
            return true;
        };
        let Some(share) = share_mut(&mut state.link) else { return false };
        if let Location::With(by) = share.place {
            if by == to || share.is_done(bth) {
                self.pass_on(by, &bytes);
                return true;
            }
            self.tell(by, &Message::Recall { target: cell.qpn, lease: share.lease });
            share.place = Location::Recalled(by);
        }
        match (share.waiting.add(packet, bytes, &self.waiting), share.place) {
            (Added::NoRoom, _) => self.transport.core.count_for_none(Counter::DropSocketFull, 1),
            // The peer has heard nothing. It may be that the borrower had nothing to answer by, so it is asked again.
            (Added::Again, Location::Recalled(by)) => {
                let recall = Message::Recall { target: cell.qpn, lease: share.lease };
                let _ = self.send_bytes(by, &recall.emit(), Delivery::Refusable);
            }
            (Added::Again | Added::New, _) => {}
        }
        true
    }

    fn pass_on(&self, to: u8, bytes: &[u8]) {
        let counter = match self.send_bytes(to, bytes, Delivery::Refusable) {
            Ok(()) => Counter::Forwarded,
            Err(_) => Counter::DropSocketFull,
        };
        self.transport.core.count_for_none(counter, 1);
    }

    /// The protection domain of an SRQ that a target's peer may name.
    pub(super) fn pd_of_srq(&self, cell: &QpCell, srqn: u32) -> Option<u32> {
        let srq = self.transport.xrc_srqs.find(srqn)?;
        if srq.xrc_domain() == cell.xrc_domain() { srq.pd_of_requests() } else { None }
    }

    /// Calls into a target that is lent to `to`.
    fn with_lent(
        &'static self,
        to: u8,
        target: Qpn,
        lease: u64,
        f: impl FnOnce(&QpCell, &mut State, &mut Call<'_>),
    ) {
        let Some(cell) = self.transport.qps.find(target).filter(|cell| cell.home().is_none())
        else {
            return;
        };
        let mut state = cell.state.lock();
        let lent = share(&state.link).is_some_and(|share| share.is_lent(to, lease));
        if state.is_dead() || !lent {
            return;
        }
        let mut call = Call::new(&cell);
        f(&cell, &mut state, &mut call);
        call.settle(&mut state);
    }

    pub(super) fn take_back(&'static self, from: u8, target: Qpn, lease: u64, responder: &Lease) {
        self.with_lent(from, target, lease, |cell, state, call| {
            state.machine.resume(responder, |srqn| self.pd_of_srq(cell, srqn));
            self.go_on(cell, state, call);
        });
    }

    /// It is not to be had back yet.
    pub(super) fn let_go_on(&'static self, from: u8, target: Qpn, lease: u64, later: bool) {
        self.with_lent(from, target, lease, |cell, state, call| {
            let Some(share) = share_mut(&mut state.link) else { return };
            let mut waiting = share.arrive();
            share.place = Location::With(from);
            if later {
                // They come again.
                return;
            }
            // The borrower refuses a packet that interrupts the message, or that is not the next one.
            for bytes in waiting.take_message(share.expected) {
                self.pass_on(from, &bytes);
            }
            self.receive_again(cell, state, call, waiting);
        });
    }

    pub(super) fn note_progress(
        &'static self,
        from: u8,
        target: Qpn,
        lease: u64,
        expected: Psn,
        msn: u32,
    ) {
        self.with_lent(from, target, lease, |_, state, _| {
            if let Some(share) = share_mut(&mut state.link) {
                (share.expected, share.msn) = (expected, msn);
            }
        });
    }

    /// A borrower tells of an event: of one that ends the target, its state tells before the program can ask.
    pub(super) fn note_failure(&'static self, from: u8, cell: &QpCell, event: QpEvent) {
        if !matches!(event, QpEvent::Fatal | QpEvent::ReqErr | QpEvent::AccessErr) {
            return;
        }
        let lease = share(&cell.state.lock().link).map_or(0, |share| share.lease);
        self.with_lent(from, cell.qpn, lease, |cell, state, call| {
            if let Some(here) = state.machine.lease() {
                let failed = Lease { state: QpState::Err, ..here };
                state.machine.resume(&failed, |_| None);
            }
            self.go_on(cell, state, call);
        });
    }

    /// An ended process may have had the responder. It goes on from the process's last report.
    pub(super) fn take_back_from_dead(&'static self, slot: u8, cell: &QpCell) {
        let lease = share(&cell.state.lock().link).map_or(0, |share| share.lease);
        self.with_lent(slot, cell.qpn, lease, |cell, state, call| {
            if let Some(share) = share(&state.link) {
                state.machine.advance(share.expected, share.msn);
            }
            self.go_on(cell, state, call);
        });
    }

    fn go_on(&'static self, cell: &QpCell, state: &mut State, call: &mut Call<'_>) {
        let Some(share) = share_mut(&mut state.link) else { return };
        let waiting = share.arrive();
        self.receive_again(cell, state, call, waiting);
    }

    /// Takes requests that waited.
    fn receive_again(
        &'static self,
        cell: &QpCell,
        state: &mut State,
        call: &mut Call<'_>,
        waiting: HeldRequests,
    ) {
        for bytes in waiting.into_requests() {
            let Some((_, arrival, packet)) = xrc_message::parse_packet(&bytes) else { continue };
            if !self.hand_over_elsewhere(cell, state, call, &arrival, &packet) {
                let State { machine, link, .. } = &mut *state;
                machine.receive(&arrival, &packet, &mut call.env(link));
            }
        }
        let State { machine, link, .. } = &mut *state;
        machine.acknowledge(&mut call.env(link));
    }

    /// The target was modified or destroyed: a loan is void, or gets its new attributes.
    pub(super) fn note_modified(&self, cell: &QpCell, state: &mut State) {
        let over = state.is_dead()
            || matches!(state.machine.state(), QpState::Reset | QpState::Init | QpState::Err);
        let Some(share) = share_mut(&mut state.link) else { return };
        let (Location::With(by) | Location::Recalled(by)) = share.place else { return };
        let (target, lease) = (cell.qpn, share.lease);
        if over {
            self.tell(by, &Message::Revoke { target, lease });
            share.arrive();
        } else {
            // At once: it may be in the midst of a message, and come back after many.
            let attr = state.machine.attr();
            self.tell(by, &Message::Attributes { target, lease, attr });
        }
    }
}

//! Failures that a script of faults asks for.

use super::trouble::cause;
use super::*;
use crate::types::QKey;
use crate::wire::deth::Deth;

const QKEY: QKey = QKey(7);

impl World {
    /// A packet of the peer comes while a rule lets a receive fail. Whether it was taken by that.
    fn fail_by(&mut self, status: WcStatus, arrival: &Arrival, headers: Headers) -> bool {
        let incoming = Incoming::from(Packet { headers, payload: &[3; 8] });
        self.qp.fail_receive(status, (arrival, &incoming), &mut self.device)
    }

    /// The NAK that was sent last.
    fn nak(&mut self) -> Option<NakCode> {
        let sent = std::mem::take(&mut self.device.sent);
        match sent.last()?.headers.aeth?.syndrome {
            Syndrome::Nak(code) => Some(code),
            _ => None,
        }
    }
}

#[test]
fn each_status_of_a_receive_has_its_nak() {
    use NakCode::{InvalidRequest, RemoteAccess, RemoteOperational};
    use WcStatus as S;
    for (status, nak, event) in [
        (S::LocLenErr, InvalidRequest, QpEvent::ReqErr),
        (S::RemInvReqErr, InvalidRequest, QpEvent::ReqErr),
        (S::LocAccessErr, RemoteAccess, QpEvent::AccessErr),
        (S::LocProtErr, RemoteOperational, QpEvent::ReqErr),
        (S::LocQpOpErr, RemoteOperational, QpEvent::ReqErr),
        (S::FatalErr, RemoteOperational, QpEvent::ReqErr),
    ] {
        let mut world = World::new(QpType::Rc);
        (0..2).for_each(|_| world.recv(64));
        let only = world.headers(Operation::SendOnly, 0);
        assert!(world.fail_by(status, &from_peer(), only), "{status:?}");
        assert_eq!(world.nak(), Some(nak), "{status:?}");
        assert_eq!(world.device.told[0].0.cause, Cause::Injected);
        let found: Vec<_> =
            world.device.completions.iter().map(|(_, wc, _)| (wc.status, wc.vendor_err)).collect();
        let injected = cause(Cause::Injected);
        assert_eq!(found, [(status, injected), (S::WrFlushErr, injected)]);
        assert_eq!(world.qp.state(), QpState::Err);
        assert!(world.device.events.contains(&event), "{status:?}");
    }
}

#[test]
fn a_flush_of_a_receive_has_no_nak() {
    let mut world = World::new(QpType::Rc);
    world.recv(64);
    let only = world.headers(Operation::SendOnly, 0);
    assert!(world.fail_by(WcStatus::WrFlushErr, &from_peer(), only));
    assert_eq!((world.nak(), world.statuses()), (None, vec![WcStatus::WrFlushErr]));
    assert!(world.device.events.contains(&QpEvent::Fatal));
}

#[test]
fn an_unreliable_peer_hears_nothing_of_a_receive_that_fails() {
    for qp_type in [QpType::Uc, QpType::Ud] {
        let mut world = World::with(qp_type, LinkProps::new(1 << 20), |attr| attr.qkey = QKEY);
        world.recv(64);
        // It may be any number: nobody sends the one before it again.
        let mut only = world.headers(Operation::SendOnly, 9);
        let deth = |qkey| Some(Deth { qkey, src_qpn: Qpn::new(PEER) });
        if qp_type == QpType::Ud {
            only.deth = deth(QKey(8));
            assert!(!world.fail_by(WcStatus::LocProtErr, &from_peer(), only), "a foreign Q_Key");
            only.deth = deth(QKEY);
        }
        assert!(world.fail_by(WcStatus::LocProtErr, &from_peer(), only), "{qp_type:?}");
        assert_eq!(world.statuses(), [WcStatus::LocProtErr]);
        assert_eq!((world.qp.state(), world.sent()), (QpState::Err, vec![]));
        let what = if qp_type == QpType::Ud { "a datagram" } else { "a SEND" };
        let ip = from_peer().source.to_ip();
        let peer = format!("{what} of queue pair {PEER:#08x} at {ip} was refused");
        assert!(world.device.lines[0].contains(&peer), "{:?}", world.device.lines);
    }
}

#[test]
fn a_packet_that_completes_no_receive_is_left_to_the_machine() {
    let mut world = World::new(QpType::Rc);
    world.recv(64);
    let of = |world: &World, operation, psn| world.headers(operation, psn);
    for (operation, psn) in [
        (Operation::SendOnly, 1),
        (Operation::SendFirst, 0),
        (Operation::SendLast, 0),
        (Operation::WriteOnly, 0),
        (Operation::ReadRequest, 0),
    ] {
        let headers = of(&world, operation, psn);
        assert!(!world.fail_by(WcStatus::LocProtErr, &from_peer(), headers), "{operation} {psn}");
    }
    let mut other = of(&world, Operation::SendOnly, 0);
    other.bth.pkey = PKey(0x8001);
    assert!(!world.fail_by(WcStatus::LocProtErr, &from_peer(), other), "another partition");
    let stranger = Arrival { source: gid(9), ..from_peer() };
    let only = of(&world, Operation::SendOnly, 0);
    assert!(!world.fail_by(WcStatus::LocProtErr, &stranger, only));
    assert_eq!((world.statuses(), world.qp.state()), (vec![], QpState::Rts));
    let mut none = World::new(QpType::Rc);
    assert!(!none.fail_by(WcStatus::LocProtErr, &from_peer(), only), "no receive is posted");
    // The end of a message, and immediate data.
    let first = of(&world, Operation::SendFirst, 0);
    world.receive(first, &[3; 1024]);
    let last = of(&world, Operation::SendLast, 1);
    assert!(!world.fail_by(WcStatus::LocProtErr, &from_peer(), last), "it did not fit");
    let mut world = World::new(QpType::Rc);
    world.recv(2048);
    world.receive(first, &[3; 1024]);
    assert!(world.fail_by(WcStatus::LocProtErr, &from_peer(), last));
    assert_eq!(world.statuses(), [WcStatus::LocProtErr]);
    let mut world = World::new(QpType::Rc);
    world.recv(64);
    let imm = of(&world, Operation::WriteOnlyImm, 0);
    assert!(world.fail_by(WcStatus::LocProtErr, &from_peer(), imm));
}

#[test]
fn unreliable_sends_fail_by_a_rule_and_receives_go_on() {
    for qp_type in [QpType::Uc, QpType::Ud, QpType::Rc] {
        let mut world = World::new(qp_type);
        world.recv(64);
        world.qp.fail_sends(Cause::Injected, &mut world.device);
        let is_reliable = qp_type == QpType::Rc;
        let state = if is_reliable { QpState::Rts } else { QpState::Sqe };
        assert_eq!((world.qp.state(), world.statuses()), (state, vec![]), "{qp_type:?}");
        assert!(world.device.events.is_empty());
    }
    let mut world = World::new(QpType::Uc);
    world.recv(64);
    world.qp.fail_sends(Cause::Injected, &mut world.device);
    world.post(SendOp::Write(world.remote()), 8);
    world.receive_message(Operation::SendOnly, 0, 8);
    assert_eq!(world.statuses(), [WcStatus::WrFlushErr, WcStatus::Success]);
}

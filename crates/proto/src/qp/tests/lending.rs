//! When a responder moves to another process, and what it follows there.

use super::*;
use crate::qp::lending::Lending;

/// In RTR.
fn target() -> World {
    let mut world = World::in_reset(QpType::XrcRecv, LinkProps::new(1 << 20));
    let attr = World::new(QpType::Rc).qp.attr();
    world.go(QpState::Init, &attr);
    world.go(QpState::Rtr, &attr);
    world
}

fn asked(world: &mut World, operation: Operation, psn: u32) -> Lending {
    let headers = world.headers(operation, psn);
    let incoming = Incoming::from(Packet { headers, payload: &[] });
    world.qp.lending(&incoming, &mut world.device)
}

#[test]
fn a_responder_goes_between_messages_for_the_next_request() {
    use Operation::{ReadRequest, SendOnly, WriteFirst};
    let first = |world: &mut World| {
        let mut headers = world.headers(WriteFirst, 0);
        headers.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len: 2 * MTU });
        headers.xrceth = Some(crate::wire::xrceth::XrcEth { srqn: 1 });
        world.receive(headers, &[3; MTU as usize]);
    };
    assert_eq!(asked(&mut target(), SendOnly, 0), Lending::Goes);
    assert_eq!(asked(&mut target(), SendOnly, 1), Lending::Stays, "a packet is missing");
    assert_eq!(asked(&mut target(), SendOnly, 0xff_ffff), Lending::Stays, "it came before");
    assert_eq!(asked(&mut target(), ReadRequest, 0xff_ffff), Lending::Goes, "it is answered there");
    let mut world = target();
    first(&mut world);
    assert!(world.qp.is_within_message());
    assert_eq!(asked(&mut world, SendOnly, 1), Lending::Stays, "a message has begun");
    let mut world = target();
    world.go(QpState::Err, &QpAttr::default());
    assert_eq!(asked(&mut world, SendOnly, 0), Lending::Stays);
    assert_eq!(asked(&mut World::new(QpType::Rc), SendOnly, 0), Lending::Stays);
}

#[test]
fn a_borrowed_target_follows_but_for_its_mtu_and_its_failure() {
    let home = target();
    let lease = home.qp.lease().unwrap();
    let small = QpAttr { path_mtu: Mtu::Mtu256, ..home.qp.attr() };
    let mut borrowed = Qp::borrowed(Qpn::new(OURS), &small, &lease, |_| None);
    let closed = QpAttr { access: Access::empty(), path_mtu: Mtu::Mtu1024, ..small };
    borrowed.follow_attr(&closed);
    let now = borrowed.attr();
    assert_eq!((now.path_mtu, now.access), (Mtu::Mtu256, Access::empty()));
    borrowed.follow_attr(&QpAttr { state: QpState::Err, ..closed });
    borrowed.follow_attr(&closed);
    assert_eq!(borrowed.state(), QpState::Err);
}

#[test]
fn a_responder_says_how_far_it_has_come() {
    let mut world = target();
    let start = world.qp.progress();
    let mut headers = world.headers(Operation::WriteOnly, 0);
    headers.reth = Some(Reth { va: IOVA, rkey: world.device.keys.rkey, len: 8 });
    headers.xrceth = Some(crate::wire::xrceth::XrcEth { srqn: 1 });
    world.receive(headers, &[3; 8]);
    assert_eq!((start, world.qp.progress()), ((Psn::new(0), 0), (Psn::new(1), 1)));
}

//! Datagram ids: finding the peer to send to.

use anyverbs::cm::*;
use anyverbs::*;

use super::*;
use crate::endpoint::Buffer;

fn udp() -> Node {
    Node::new(PortSpace::Udp, QpType::Ud)
}

fn ud(event: &Event) -> &UdEvent {
    match &event.param {
        EventParam::Ud(ud) => ud,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_queue_pair_is_asked_for_and_sent_to() {
    for ip in ["127.0.0.1", "::1"] {
        ask_and_send(ip);
    }
}

/// Runs the exchange with an address of this host.
pub(super) fn ask_and_send(ip: &str) {
    let listener = udp().listening(&at(ip, 0));
    let mut active = udp();
    active.resolve(&listener.on(ip));
    active.attach(QpType::Ud);
    assert_eq!(active.e().qp.state().unwrap(), QpState::Rts);
    let too_long = ConnParam { private_data: &[1; 181], ..PARAM };
    assert_eq!(active.id.connect(&too_long).unwrap_err().errno(), libc::EINVAL);
    active.id.connect(&ConnParam { private_data: &[1; 180], ..PARAM }).unwrap();
    let (mut passive, request) = listener.request();
    assert_eq!(&*ud(&request).private_data, &[1; 180]);
    let (ours, theirs) = (active.id.info(), passive.id.info());
    assert_eq!((ours.local, ours.peer), (theirs.peer, theirs.local));
    passive.attach(QpType::Ud);
    assert_eq!(passive.e().qp.state().unwrap(), QpState::Rts);
    let welcome = ConnParam { private_data: b"welcome", ..PARAM };
    passive.id.accept(Some(&welcome)).unwrap();
    assert_eq!(passive.id.accept(Some(&welcome)).unwrap_err().errno(), libc::EINVAL);
    let event = active.expect(EventKind::Established);
    let told = ud(&event);
    assert_eq!(told.private_data.len(), 136);
    assert!(told.private_data.starts_with(b"welcome\0"));
    assert_eq!((told.qpn, told.qkey), (passive.e().qp.qpn(), QKey(0x0123_4567)));
    assert_eq!((told.ah.dgid, told.ah.port), (ours.dgid, 1));
    let ah = active.e().pd.create_ah(&told.ah).unwrap();
    let (src, dst) = (Buffer::new(&active.e().pd, 64), Buffer::new(&passive.e().pd, 128));
    src.write(0, &[6; 64]);
    passive.e().recv(1, &[dst.sge(0, 128)]);
    let to = Some(ah.dest(told.qpn, told.qkey));
    active.e().send_to(2, SendOp::Send, &[src.sge(0, 64)], to);
    active.e().poll(1);
    assert_eq!(passive.e().poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(40, 64), [6; 64]);
    // There is nothing to disconnect.
    active.id.disconnect().unwrap();
    stays_quiet(&passive.channel);
}

#[test]
fn a_request_for_a_queue_pair_is_refused() {
    let listener = udp().listening(&at("127.0.0.1", 0));
    let to = listener.on("127.0.0.1");
    let asks = || {
        let active = udp();
        active.resolve(&to);
        active.id.connect(&PARAM).unwrap();
        active
    };
    let active = asks();
    listener.request().0.id.reject(b"no", false).unwrap();
    let event = expect(&active.channel, EventKind::Unreachable);
    assert_eq!(event.status, 2);
    assert!(ud(&event).private_data.starts_with(b"no\0"));
    // Because there is no listener, and because the request is destroyed.
    let active = asks();
    drop(listener.request());
    assert_eq!(expect(&active.channel, EventKind::Unreachable).status, 2);
    listener.id.destroy().unwrap();
    assert_eq!(expect(&asks().channel, EventKind::Unreachable).status, 1);
}

#[test]
fn a_queue_pair_has_one_key() {
    let listener = udp().listening(&at("127.0.0.1", 0));
    let active = udp();
    active.resolve(&listener.on("127.0.0.1"));
    let (attr, _) = active.id.init_qp_attr(QpState::Init).unwrap();
    assert_eq!(attr.qkey, QKey(0x0123_4567));
    for to in [QpState::Rtr, QpState::Rts] {
        active.id.init_qp_attr(to).unwrap();
    }
    let to = active.id.init_qp_attr(QpState::Err);
    assert_eq!(to.unwrap_err().errno(), libc::EINVAL);
}

//! Connecting, refusing, parting.

use anyverbs::cm::*;
use anyverbs::*;

use super::*;
use crate::endpoint::{Buffer, pattern};

fn exchange(from: &Node, to: &Node) {
    let (from, to) = (from.e(), to.e());
    let (src, dst) = (Buffer::new(&from.pd, 8192), Buffer::new(&to.pd, 8192));
    let data = pattern(8192, 3);
    src.write(0, &data);
    to.recv(1, &[dst.sge(0, 8192)]);
    from.send(2, SendOp::Send, &[src.sge(0, 8192)]);
    assert_eq!(from.poll(1)[0].status, WcStatus::Success);
    assert_eq!(to.poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(0, 8192), data);
}

fn write_and_read(from: &Node, to: &Node) {
    let (from, to) = (from.e(), to.e());
    let (src, dst) = (Buffer::new(&from.pd, 64), Buffer::new(&to.pd, 64));
    src.write(0, &[7; 64]);
    from.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
    assert_eq!(from.poll(1)[0].status, WcStatus::Success);
    src.write(0, &[0; 64]);
    from.send(1, SendOp::Read(dst.remote(0)), &[src.sge(0, 64)]);
    assert_eq!(from.poll(1)[0].status, WcStatus::Success);
    assert_eq!(src.read(0, 64), [7; 64]);
}

fn parts(active: &Node, passive: &Node) {
    active.id.disconnect().unwrap();
    assert_eq!(active.e().qp.state().unwrap(), QpState::Err);
    let disconnected = passive.expect(EventKind::Disconnected);
    assert!(conn(&disconnected).private_data.is_empty());
    assert_eq!(passive.e().qp.state().unwrap(), QpState::Rts);
    passive.id.disconnect().unwrap();
    active.expect(EventKind::Disconnected);
    // Once more changes nothing.
    active.id.disconnect().unwrap();
    passive.id.disconnect().unwrap();
}

#[test]
fn connects_sends_and_parts() {
    for ip in ["127.0.0.1", "::1"] {
        connect_send_and_part(ip);
    }
}

/// Runs the exchange with an address of this host.
pub(super) fn connect_send_and_part(ip: &str) {
    let listener = Node::listener(&at(ip, 0));
    let active = Node::towards(&listener.on(ip));
    active.id.connect(&ConnParam { private_data: b"hello", ..PARAM }).unwrap();
    let (mut passive, request) = listener.request();
    let told = conn(&request);
    assert_eq!(told.private_data.len(), 56);
    assert!(told.private_data.starts_with(b"hello\0"));
    assert_eq!((told.responder_resources, told.initiator_depth), (3, 4));
    assert_eq!((told.retry_count, told.rnr_retry_count, told.flow_control), (7, 6, true));
    assert_eq!((told.qpn, told.srq), (active.e().qp.qpn(), false));
    let (ours, theirs) = (active.id.info(), passive.id.info());
    assert_eq!((ours.local, ours.peer), (theirs.peer, theirs.local));
    assert_eq!((ours.sgid, ours.dgid), (theirs.dgid, theirs.sgid));
    assert_eq!((ours.device, theirs.device), (Some(0), Some(0)));
    assert_eq!(theirs.path.map(|p| p.mtu), ours.path.map(|p| p.mtu));
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&ConnParam { private_data: b"welcome", ..PARAM })).unwrap();
    let established = active.expect(EventKind::Established);
    let told = conn(&established);
    assert_eq!(told.private_data.len(), 196);
    assert!(told.private_data.starts_with(b"welcome\0"));
    assert_eq!((told.responder_resources, told.initiator_depth), (3, 4));
    assert_eq!(told.qpn, passive.e().qp.qpn());
    let established = passive.expect(EventKind::Established);
    assert!(conn(&established).private_data.is_empty());
    let attr = active.e().qp.query().unwrap().0;
    assert_eq!((attr.max_rd_atomic, attr.max_dest_rd_atomic), (4, 3));
    assert_eq!((attr.retry_cnt, attr.rnr_retry), (7, 6));
    exchange(&active, &passive);
    exchange(&passive, &active);
    write_and_read(&active, &passive);
    write_and_read(&passive, &active);
    parts(&active, &passive);
    for id in [&listener.id, &active.id, &passive.id] {
        id.destroy().unwrap();
        assert_eq!(id.destroy(), Err(error::DestroyError::Gone));
    }
    assert!(is_quiet(&listener.channel));
}

#[test]
fn unreliable_connections_connect_too() {
    let uc = || Node::new(PortSpace::Ib, QpType::Uc);
    let listener = uc().listening(&at("127.0.0.1", 0));
    let mut active = uc();
    active.resolve(&listener.on("127.0.0.1"));
    active.attach(QpType::Uc);
    active.id.connect(&PARAM).unwrap();
    let (mut passive, _) = listener.request();
    passive.attach(QpType::Uc);
    passive.id.accept(None).unwrap();
    active.expect(EventKind::Established);
    passive.expect(EventKind::Established);
    exchange(&active, &passive);
    parts(&active, &passive);
    // A listener for the one does not serve the other.
    let mut rc = Node::new(PortSpace::Ib, QpType::Rc);
    rc.resolve(&listener.on("127.0.0.1"));
    rc.attach(QpType::Rc);
    rc.id.connect(&PARAM).unwrap();
    assert_eq!(expect(&rc.channel, EventKind::Rejected).status, 9, "invalid transport");
}

#[test]
fn as_much_is_granted_as_can_be() {
    let most = Endpoint::new(QpType::Rc).context.device_attr().unwrap().max_qp_rd_atom as u8;
    let listener = Node::listener(&at("127.0.0.1", 0));
    let active = Node::towards(&listener.on("127.0.0.1"));
    let greedy = ConnParam { responder_resources: 255, initiator_depth: 255, ..PARAM };
    for beyond in [
        ConnParam { responder_resources: most + 1, ..PARAM },
        ConnParam { initiator_depth: most + 1, ..PARAM },
        ConnParam { private_data: &[1; 57], ..PARAM },
    ] {
        assert_eq!(active.id.connect(&beyond).unwrap_err().errno(), libc::EINVAL);
    }
    active.id.connect(&ConnParam { initiator_depth: 5, private_data: &[1; 56], ..greedy }).unwrap();
    let (mut passive, request) = listener.request();
    assert_eq!(&*conn(&request).private_data, &[1; 56]);
    assert_eq!((conn(&request).responder_resources, conn(&request).initiator_depth), (5, most));
    passive.attach(QpType::Rc);
    let too_long = ConnParam { private_data: &[1; 197], ..greedy };
    assert_eq!(passive.id.accept(Some(&too_long)).unwrap_err().errno(), libc::EINVAL);
    // As soon as it fails, not when the id goes.
    assert_eq!(expect(&active.channel, EventKind::Rejected).status, 28);
    drop(passive);

    let active = Node::towards(&listener.on("127.0.0.1"));
    active.id.connect(&ConnParam { initiator_depth: 5, ..greedy }).unwrap();
    let (mut passive, _) = listener.request();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&greedy)).unwrap();
    active.expect(EventKind::Established);
    let depths = |node: &Node| {
        let attr = node.e().qp.query().unwrap().0;
        (attr.max_dest_rd_atomic, attr.max_rd_atomic)
    };
    assert_eq!((depths(&passive), depths(&active)), ((5, most), (most, 5)));
}

#[test]
fn a_rejection_carries_private_data() {
    let (_listener, active, passive) = asked();
    assert_eq!(passive.id.reject(&[1; 149], false).unwrap_err().errno(), libc::EINVAL);
    passive.id.reject(b"no", false).unwrap();
    assert_eq!(passive.id.reject(b"no", false).unwrap_err().errno(), libc::EINVAL);
    let event = expect(&active.channel, EventKind::Rejected);
    assert_eq!((event.status, event.cookie), (28, 5));
    assert_eq!(conn(&event).private_data.len(), 148);
    assert!(conn(&event).private_data.starts_with(b"no\0"));
    assert_eq!(active.e().qp.state().unwrap(), QpState::Err);
    assert_eq!(passive.id.accept(Some(&PARAM)).unwrap_err().errno(), libc::EINVAL);
    active.id.ack_events(1);
    active.id.disconnect().unwrap();

    let (_listener, active, passive) = asked();
    passive.id.reject(&[], true).unwrap();
    assert_eq!(expect(&active.channel, EventKind::Rejected).status, 35, "vendor option");
}

#[test]
fn nobody_listens() {
    let listener = Node::listener(&at("127.0.0.1", 0));
    let to = listener.on("127.0.0.1");
    listener.id.destroy().unwrap();
    let active = Node::towards(&to);
    active.id.connect(&PARAM).unwrap();
    let event = expect(&active.channel, EventKind::Rejected);
    assert_eq!(event.status, 8, "invalid service ID");
    assert_eq!(active.e().qp.state().unwrap(), QpState::Err);
}

#[test]
fn calls_in_the_wrong_state_are_refused() {
    let einval =
        |result: Result<(), CmError>| assert_eq!(result.unwrap_err().errno(), libc::EINVAL);
    let idle = Node::tcp();
    let qp = Endpoint::new(QpType::Rc);
    einval(idle.id.connect(&PARAM));
    einval(idle.id.accept(Some(&PARAM)));
    einval(idle.id.reject(&[], false));
    einval(idle.id.disconnect());
    einval(idle.id.establish());
    einval(idle.id.notify(AsyncEventKind::CommEst));
    einval(idle.id.resolve_route());
    einval(idle.id.attach_qp(&qp.qp));
    einval(idle.id.init_qp_attr(QpState::Init).map(drop));
    let (listener, active, mut passive) = asked();
    let to = listener.on("127.0.0.1");
    einval(listener.id.listen(0));
    einval(listener.id.bind_addr(&to));
    einval(listener.id.connect(&PARAM));
    einval(active.id.connect(&PARAM));
    einval(active.id.resolve_addr(None, &to));
    einval(active.id.resolve_route());
    einval(active.id.listen(0));
    einval(active.id.accept(Some(&PARAM)));
    einval(active.id.attach_qp(&qp.qp));
    einval(active.id.init_qp_attr(QpState::Sqd).map(drop));
    einval(passive.id.connect(&PARAM));
    einval(passive.id.accept(None));
    einval(passive.id.establish());
    einval(passive.id.notify(AsyncEventKind::CommEst));
    passive.attach(QpType::Rc);
    passive.id.accept(None).unwrap();
    einval(passive.id.accept(None));
    active.expect(EventKind::Established);
    passive.expect(EventKind::Established);
    einval(active.id.establish());
    einval(active.id.notify(AsyncEventKind::QpFatal));
    assert_eq!(passive.id.notify(AsyncEventKind::CommEst).unwrap_err().errno(), libc::EISCONN);
    active.id.destroy().unwrap();
    einval(active.id.resolve_addr(None, &to));
    einval(active.id.connect(&PARAM));
    einval(active.id.disconnect());
    einval(active.id.migrate(&listener.channel));
    for wrong in [(PortSpace::Tcp, QpType::Ud), (PortSpace::Udp, QpType::Rc)] {
        let made = Id::create(&idle.channel, wrong.0, wrong.1, 0);
        assert_eq!(made.unwrap_err().errno(), libc::EINVAL);
    }
}

/// Moves a queue pair that is the program's own as `rdma_init_qp_attr(3)` says.
fn moves(node: &Node, states: &[QpState]) {
    for to in states {
        let (attr, mask) = node.id.init_qp_attr(*to).unwrap();
        node.e().qp.modify(&attr, mask).unwrap();
    }
}

#[test]
fn a_program_may_move_its_queue_pair_itself() {
    let listener = Node::listener(&at("127.0.0.1", 0));
    let mut active = Node::tcp();
    active.id.set_option(IdOption::Tos(32)).unwrap();
    active.id.set_option(IdOption::AckTimeout(19)).unwrap();
    active.resolve(&listener.on("127.0.0.1"));
    active.endpoint = Some(Endpoint::new(QpType::Rc));
    moves(&active, &[QpState::Init]);
    let too_early = active.id.init_qp_attr(QpState::Rtr);
    assert_eq!(too_early.unwrap_err().errno(), libc::EINVAL);
    let qpn = active.e().qp.qpn();
    active.id.connect(&ConnParam { qpn, srq: true, ..PARAM }).unwrap();
    let (mut passive, request) = listener.request();
    assert_eq!((conn(&request).qpn, conn(&request).srq), (qpn, true));
    let (ours, theirs) = (active.id.info().path.unwrap(), passive.id.info().path.unwrap());
    assert_eq!((theirs.traffic_class, theirs.flow_label), (32, ours.flow_label));
    passive.endpoint = Some(Endpoint::new(QpType::Rc));
    moves(&passive, &[QpState::Init, QpState::Rtr, QpState::Rts]);
    let qpn = passive.e().qp.qpn();
    passive.id.accept(Some(&ConnParam { qpn, ..PARAM })).unwrap();
    let response = active.expect(EventKind::ConnectResponse);
    assert_eq!((conn(&response).qpn, conn(&response).private_data.len()), (qpn, 196));
    assert_eq!(active.e().qp.state().unwrap(), QpState::Init);
    moves(&active, &[QpState::Init, QpState::Rtr, QpState::Rts]);
    let attr = active.e().qp.query().unwrap().0;
    assert_eq!((attr.timeout, attr.av.traffic_class), (19, 32));
    assert!(is_quiet(&passive.channel));
    active.id.establish().unwrap();
    passive.expect(EventKind::Established);
    assert!(is_quiet(&active.channel), "whoever confirms knows");
    exchange(&active, &passive);
    exchange(&passive, &active);
    // The ids move neither side's queue pair.
    active.id.disconnect().unwrap();
    passive.expect(EventKind::Disconnected);
    assert_eq!(active.e().qp.state().unwrap(), QpState::Rts);
}

#[test]
fn data_before_the_confirmation_is_as_good() {
    let listener = Node::listener(&at("127.0.0.1", 0));
    let mut active = Node::tcp();
    active.resolve(&listener.on("127.0.0.1"));
    active.endpoint = Some(Endpoint::new(QpType::Rc));
    let qpn = active.e().qp.qpn();
    active.id.connect(&ConnParam { qpn, ..PARAM }).unwrap();
    let (mut passive, _) = listener.request();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    active.expect(EventKind::ConnectResponse);
    moves(&active, &[QpState::Init, QpState::Rtr, QpState::Rts]);
    exchange(&active, &passive);
    assert!(is_quiet(&passive.channel));
    passive.id.notify(AsyncEventKind::CommEst).unwrap();
    passive.expect(EventKind::Established);
    active.id.establish().unwrap();
    stays_quiet(&passive.channel);
}

#[test]
fn a_queue_pair_that_cannot_be_moved_fails_the_connection() {
    let (listener, active, mut passive) = asked();
    active.e().qp.destroy().unwrap();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    let event = expect(&active.channel, EventKind::ConnectError);
    assert_eq!(event.status, -libc::EINVAL);
    // The peer's answer to that is not reported.
    passive.id.destroy().unwrap();
    assert_eq!(active.channel.get_event().unwrap().kind, EventKind::TimewaitExit);

    // On the passive side the call fails, and the peer can still be refused.
    let active = Node::towards(&listener.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    let (mut passive, _) = listener.request();
    passive.attach(QpType::Rc);
    passive.e().qp.destroy().unwrap();
    assert_eq!(passive.id.accept(Some(&PARAM)).unwrap_err().errno(), libc::EINVAL);
    passive.id.reject(b"sorry", false).unwrap();
    assert_eq!(expect(&active.channel, EventKind::Rejected).status, 28);
}

#[test]
fn a_detached_queue_pair_stays_as_it_is() {
    let (_listener, active, passive) = connected();
    active.id.detach_qp();
    active.id.disconnect().unwrap();
    passive.expect(EventKind::Disconnected);
    assert_eq!(active.e().qp.state().unwrap(), QpState::Rts);
    // And an attached one survives its id.
    passive.id.destroy().unwrap();
    active.expect(EventKind::Disconnected);
    assert_eq!(passive.e().qp.state().unwrap(), QpState::Rts);
}

#[test]
fn options_of_the_vendors_are_exchanged() {
    let ece = |vendor_id, options| Ece { vendor_id, options };
    let listener = Node::listener(&at("127.0.0.1", 0));
    let mut active = Node::tcp();
    active.resolve(&listener.on("127.0.0.1"));
    assert_eq!(active.id.set_local_ece(ece(0, 1)).unwrap_err().errno(), libc::EINVAL);
    active.id.set_local_ece(ece(0x12_3456, 0x789a_bcde)).unwrap();
    active.endpoint = Some(Endpoint::new(QpType::Rc));
    active.id.connect(&ConnParam { qpn: active.e().qp.qpn(), ..PARAM }).unwrap();
    let (mut passive, request) = listener.request();
    assert_eq!(request.ece, ece(0x12_3456, 0x789a_bcde));
    assert_eq!(passive.id.remote_ece().unwrap(), request.ece);
    passive.id.set_local_ece(ece(0xff_ffff, 3)).unwrap();
    passive.endpoint = Some(Endpoint::new(QpType::Rc));
    passive.id.accept(Some(&ConnParam { qpn: passive.e().qp.qpn(), ..PARAM })).unwrap();
    let response = active.expect(EventKind::ConnectResponse);
    assert_eq!(response.ece, ece(0xff_ffff, 3));
    assert_eq!(active.id.remote_ece().unwrap(), response.ece);
    active.id.attach_qp(&Endpoint::new(QpType::Rc).qp).unwrap();
    assert_eq!(active.id.remote_ece().unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn timewait_ends() {
    let (_listener, active, passive) = connected();
    active.id.disconnect().unwrap();
    passive.expect(EventKind::Disconnected);
    passive.id.disconnect().unwrap();
    active.expect(EventKind::Disconnected);
    active.expect(EventKind::TimewaitExit);
    passive.expect(EventKind::TimewaitExit);
}

#[test]
fn a_destroyed_id_tells_its_peer() {
    // A request that the program did not take.
    let listener = Node::listener(&at("127.0.0.1", 0));
    let active = Node::towards(&listener.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    drop(expect(&listener.channel, EventKind::ConnectRequest));
    assert_eq!(expect(&active.channel, EventKind::Rejected).status, 28);
    // A request that waits while its listener goes.
    let active = Node::towards(&listener.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    poll_until_readable(&listener.channel);
    listener.id.ack_events(2);
    listener.id.destroy().unwrap();
    assert!(is_quiet(&listener.channel));
    assert_eq!(expect(&active.channel, EventKind::Rejected).status, 28);
    // The active side before its answer: the passive side's accept comes too late.
    let (_listener, active, mut passive) = asked();
    active.id.destroy().unwrap();
    passive.attach(QpType::Rc);
    stays_quiet(&passive.channel);
    assert_eq!(passive.id.accept(Some(&PARAM)).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(passive.e().qp.state().unwrap(), QpState::Err);
    // The active side before it took the answer.
    let (_listener, active, mut passive) = asked();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    poll_until_readable(&active.channel);
    active.id.destroy().unwrap();
    assert!(is_quiet(&active.channel));
    assert_eq!(expect(&passive.channel, EventKind::Rejected).status, 28);
    // The passive side before it heard the confirmation.
    let (_listener, active, mut passive) = asked();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    drop(passive.id);
    // Its answer was on the way and cannot be confirmed any more; or this thread was held up, and it was confirmed before.
    poll_until_readable(&active.channel);
    let event = active.channel.get_event().unwrap();
    if event.kind == EventKind::Established {
        expect(&active.channel, EventKind::Disconnected);
    } else {
        assert_eq!(event.kind, EventKind::ConnectError, "{event:?}");
    }
    // Either side of a connection.
    let (_listener, active, passive) = connected();
    drop(active.id);
    passive.expect(EventKind::Disconnected);
    let (_listener, active, passive) = connected();
    passive.id.destroy().unwrap();
    active.expect(EventKind::Disconnected);
}

/// An initiator connects to a target, and names the SRQ that it sends to.
#[test]
fn extended_reliable_connections_connect_too() {
    let context = crate::endpoint::context();
    let (pd, xrcd) =
        (context.alloc_pd().unwrap(), context.open_xrcd(XrcdInitAttr::default()).unwrap());
    let cq = context.create_cq(16, None, 0, 0).unwrap();
    let srq = xrcd.create_srq(&pd, &cq, &SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 }).unwrap();
    let buffer = Buffer::new(&pd, 128);
    srq.post_recv(&[RecvWr { wr_id: 1, sges: &[buffer.sge(0, 64)] }]).unwrap();
    let listener = Node::new(PortSpace::Ib, QpType::XrcRecv).listening(&at("127.0.0.1", 0));
    let active = Node::new(PortSpace::Ib, QpType::XrcSend);
    active.id.set_option(IdOption::AckTimeout(19)).unwrap();
    active.resolve(&listener.on("127.0.0.1"));
    let init = XrcSendInitAttr { send_cq: &cq, cap: CAP, sq_sig_all: true, cookie: 0 };
    let initiator = context.create_xrc_send_qp(&pd, &init).unwrap();
    let target = xrcd.create_qp(0).unwrap();
    assert_eq!(active.id.attach_qp(&target).unwrap_err().errno(), libc::EINVAL);
    active.id.attach_qp(&initiator).unwrap();
    active.id.connect(&PARAM).unwrap();
    let (passive, request) = listener.request();
    assert_eq!(conn(&request).qpn, initiator.qpn());
    passive.id.attach_qp(&target).unwrap();
    passive.id.accept(None).unwrap();
    let event = active.expect(EventKind::Established);
    assert_eq!((conn(&event).qpn, conn(&event).srq), (target.qpn(), true));
    passive.expect(EventKind::Established);
    buffer.write(64, &[5; 64]);
    let wr = SendWr {
        wr_id: 2,
        op: SendOp::Send,
        flags: SendFlags::SIGNALED,
        sges: &[buffer.sge(64, 64)],
        ud: None,
        xrc_srqn: srq.number().unwrap(),
    };
    initiator.post_send(&[wr]).unwrap();
    let (begin, mut done) = (std::time::Instant::now(), 0);
    while done < 2 {
        let mut wcs = [Wc::default(); 2];
        let n = cq.poll(&mut wcs).unwrap();
        assert!(wcs[..n].iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        done += n;
        assert!(begin.elapsed() < 60 * SECOND);
    }
    assert_eq!(buffer.read(0, 64), [5; 64]);
    active.id.disconnect().unwrap();
    passive.expect(EventKind::Disconnected);
    // A listener for reliable connections does not serve these, nor the other way round.
    let mut rc = Node::new(PortSpace::Ib, QpType::Rc);
    rc.resolve(&listener.on("127.0.0.1"));
    rc.attach(QpType::Rc);
    rc.id.connect(&PARAM).unwrap();
    assert_eq!(expect(&rc.channel, EventKind::Rejected).status, 9, "invalid transport");
}

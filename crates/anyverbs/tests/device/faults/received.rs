//! Receives that complete with the status of a script.

use super::*;

/// The status of a receive, and that of the reliable peer's send.
const STATUSES: [(&str, WcStatus, WcStatus); 6] = [
    ("LOC_LEN_ERR", WcStatus::LocLenErr, WcStatus::RemInvReqErr),
    ("LOC_QP_OP_ERR", WcStatus::LocQpOpErr, WcStatus::RemOpErr),
    ("LOC_PROT_ERR", WcStatus::LocProtErr, WcStatus::RemOpErr),
    ("LOC_ACCESS_ERR", WcStatus::LocAccessErr, WcStatus::RemAccessErr),
    ("REM_INV_REQ_ERR", WcStatus::RemInvReqErr, WcStatus::RemInvReqErr),
    ("FATAL_ERR", WcStatus::FatalErr, WcStatus::RemOpErr),
];

/// A rule for the second queue pair of each pair.
fn script(rest: &str) -> String {
    let rule = |(n, (status, ..)): (usize, &(&str, WcStatus, WcStatus))| {
        format!("on qp {}: receive 2 completes with {status}{rest}\n", 2 * n + 2)
    };
    STATUSES.iter().enumerate().map(rule).collect()
}

/// Status and cause of so many completions.
fn ends(e: &Endpoint, count: usize) -> Vec<(u64, WcStatus, u32)> {
    e.poll(count).iter().map(|wc| (wc.wr_id, wc.status, wc.vendor_err)).collect()
}

/// Three messages, of which the second one finds a receive that fails.
fn fail_the_second(op: fn(RemoteAddr) -> SendOp, bytes: usize) {
    use WcStatus::{Success, WrFlushErr};
    for (n, (_, own, peers)) in STATUSES.into_iter().enumerate() {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 10_000));
        (1..=3).for_each(|id| b.recv(id, &[dst.sge(0, bytes)]));
        a.send(1, op(dst.remote(0)), &[src.sge(0, bytes)]);
        assert_eq!(ends(&a, 1), [(1, Success, 0)]);
        (2..=3).for_each(|id| a.send(id, op(dst.remote(0)), &[src.sge(0, bytes)]));
        let wanted = [(1, Success, 0), (2, own, 9901), (3, WrFlushErr, 9901)];
        assert_eq!(ends(&b, 3), wanted);
        assert_eq!(ends(&a, 2), [(2, peers, 9901), (3, WrFlushErr, 9901)], "the peer tells why");
        assert_eq!([&a, &b].map(|e| e.qp.state().unwrap()), [QpState::Err; 2]);
        assert_eq!(injected(&a.context), n as u64 + 1);
    }
}

#[test]
fn a_receive_fails_with_the_status_of_the_script_and_the_peer_gets_a_nak() {
    let name = "received::a_receive_fails_with_the_status_of_the_script_and_the_peer_gets_a_nak";
    with(name, &script(""), &[], || fail_the_second(|_| SendOp::Send, 64));
}

#[test]
fn a_receive_of_several_packets_fails_by_udp() {
    let name = "received::a_receive_of_several_packets_fails_by_udp";
    with(name, &script(""), &BY_UDP, || fail_the_second(|_| SendOp::SendImm(5), 10_000));
}

#[test]
fn a_receive_of_a_write_with_immediate_data_fails() {
    let name = "received::a_receive_of_a_write_with_immediate_data_fails";
    with(name, &script(""), &BY_UDP, || fail_the_second(|at| SendOp::WriteImm(at, 5), 10_000));
}

#[test]
fn a_receive_fails_through_shared_memory() {
    let name = "received::a_receive_fails_through_shared_memory";
    with(name, "seed 1", &[], || {
        let rule = "receive 1 completes with LOC_PROT_ERR";
        let mut peer = Peer::spawn("rc fetched", &[("ANYVERBS_FAULTS", rule)]);
        let e = Endpoint::new(QpType::Rc);
        let src = Buffer::new(&e.pd, OFFERED);
        peer.connect(&e, &src);
        let mut ask = |line| {
            peer.say(line);
            peer.hear()
        };
        assert_eq!(ask("receive"), "@ posted");
        e.send(1, SendOp::Send, &[src.sge(0, 64)]);
        assert_eq!(ends(&e, 1), [(1, WcStatus::RemOpErr, 9901)]);
        assert!(ask("wait").starts_with("@ LocProtErr "));
        assert!(e.context.counters().unwrap().read(Counter::ShmSentPkts) > 0);
    });
}

/// The peer's message brings the ACK of the one that it answers, which completes a send before the receive.
#[test]
fn a_receive_fails_whose_message_brings_an_ack() {
    let name = "received::a_receive_fails_whose_message_brings_an_ack";
    with(name, "receive 3 completes with LOC_PROT_ERR", &[], || {
        let mut peer = Peer::spawn("rc lanes", &[("ANYVERBS_FAULTS", "")]);
        let e = Endpoint::new(QpType::Rc);
        let buffer = Buffer::new(&e.pd, OFFERED);
        peer.connect(&e, &buffer);
        assert_eq!(peer.hear(), "@ posted");
        (1..=3).for_each(|id| e.recv(id, &[buffer.sge(0, 64)]));
        for id in 1..=3 {
            e.send(10 + id, SendOp::Send, &[buffer.sge(64, 32)]);
            let mut found = ends(&e, 2);
            found.sort_unstable_by_key(|(wr_id, ..)| *wr_id);
            let own = match id {
                3 => (3, WcStatus::LocProtErr, 9901),
                _ => (id, WcStatus::Success, 0),
            };
            assert_eq!(found[0], own);
        }
        assert_eq!(injected(&e.context), 1);
    });
}

#[test]
fn a_receive_that_fails_late_keeps_the_peer_from_nothing() {
    let name = "received::a_receive_that_fails_late_keeps_the_peer_from_nothing";
    let script = "on qp 2: receive 1 completes with GENERAL_ERR after 200ms";
    with(name, script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        (1..=2).for_each(|id| b.recv(id, &[dst.sge(0, 64)]));
        let begin = Instant::now();
        a.send(1, SendOp::Send, &[src.sge(0, 64)]);
        assert_eq!(ends(&a, 1)[0].1, WcStatus::RemOpErr);
        let wanted = [(1, WcStatus::GeneralErr, 9901), (2, WcStatus::WrFlushErr, 9901)];
        assert_eq!(ends(&b, 2), wanted);
        assert!(begin.elapsed() >= Duration::from_millis(200));
    });
}

#[test]
fn a_receive_that_is_flushed_by_a_rule_ends_its_queue_pair_without_a_nak() {
    let name = "received::a_receive_that_is_flushed_by_a_rule_ends_its_queue_pair_without_a_nak";
    with(name, "on qp 2: receives complete with WR_FLUSH_ERR", &[], || {
        let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
        a.connect_with(b.address(), 8, 1);
        b.connect(a.address());
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        (1..=2).for_each(|id| b.recv(id, &[dst.sge(0, 64)]));
        a.send(1, SendOp::Send, &[src.sge(0, 64)]);
        let flushed = WcStatus::WrFlushErr;
        assert_eq!(ends(&b, 2), [(1, flushed, 9901), (2, flushed, 9901)]);
        assert_eq!(event(&b.context), AsyncEventKind::QpFatal);
        assert_eq!(ends(&a, 1), [(1, WcStatus::RetryExcErr, 9901)], "the script is the reason");
        assert_eq!(injected(&a.context), 1, "the other one was flushed behind it");
    });
}

#[test]
fn a_receive_of_an_srq_fails_and_the_others_stay_there() {
    let name = "received::a_receive_of_an_srq_fails_and_the_others_stay_there";
    with(name, "on qp 3: receive 1 completes with LOC_PROT_ERR", &[], || {
        let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let srq = b.pd.create_srq(&SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 }).unwrap();
        for wr_id in 1..=2 {
            srq.post().unwrap().recv(&RecvWr { wr_id, sges: &[dst.sge(0, 64)] }).unwrap();
        }
        let create =
            || b.context.create_qp(&b.pd, &QpInitAttr { srq: Some(&srq), ..init(&b) }).unwrap();
        let [third, fourth] = [create(), create()];
        let at = |qp: &Qp| Address { gid: b.address().gid, qpn: qp.qpn() };
        a.connect(at(&third));
        b.connect_qp(&third, a.address(), 17, 7);
        a.send(1, SendOp::Send, &[src.sge(0, 64)]);
        assert_eq!(ends(&b, 1), [(1, WcStatus::LocProtErr, 9901)]);
        assert_eq!(ends(&a, 1), [(1, WcStatus::RemOpErr, 9901)]);
        let events = [event(&b.context), event(&b.context)];
        assert_eq!(events, [AsyncEventKind::QpReqErr, AsyncEventKind::QpLastWqeReached]);
        let other = Endpoint::new(QpType::Rc);
        other.connect(at(&fourth));
        b.connect_qp(&fourth, other.address(), 17, 7);
        let src = Buffer::new(&other.pd, 64);
        other.send(1, SendOp::Send, &[src.sge(0, 64)]);
        assert_eq!(ends(&b, 1), [(2, WcStatus::Success, 0)]);
    });
}

#[test]
fn a_receive_of_an_xrc_target_fails() {
    let name = "received::a_receive_of_an_xrc_target_fails";
    with(name, "on qp 2: receive 2 completes with LOC_PROT_ERR", &[], || {
        use crate::xrc::set_up;
        let context = context();
        let pd = context.alloc_pd().unwrap();
        let [send_cq, recv_cq] = [(); 2].map(|()| context.create_cq(16, None, 0, 0).unwrap());
        let xrcd = context.open_xrcd(XrcdInitAttr::default()).unwrap();
        let init = XrcSendInitAttr { send_cq: &send_cq, cap: CAP, sq_sig_all: true, cookie: 0 };
        let initiator = context.create_xrc_send_qp(&pd, &init).unwrap();
        let target = xrcd.create_qp(0).unwrap();
        set_up(&target, &context, initiator.qpn());
        set_up(&initiator, &context, target.qpn());
        let init = SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 };
        let srq = xrcd.create_srq(&pd, &recv_cq, &init).unwrap();
        let buffer = Buffer::new(&pd, 8192);
        for wr_id in 1..=3 {
            srq.post_recv(&[RecvWr { wr_id, sges: &[buffer.sge(0, 4096)] }]).unwrap();
        }
        for wr_id in 1..=2 {
            let sges = [buffer.sge(4096, 4096)];
            let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
            let xrc_srqn = srq.number().unwrap();
            initiator
                .post_send(&[SendWr { wr_id, op, flags, sges: &sges, ud: None, xrc_srqn }])
                .unwrap();
        }
        let ends = |cq: &Cq| {
            let (mut found, mut wcs) = (Vec::new(), [Wc::default(); 4]);
            let begin = Instant::now();
            while found.len() < 2 {
                assert!(begin.elapsed() < Duration::from_secs(30), "{found:?}");
                let count = cq.poll(&mut wcs).unwrap();
                found.extend(wcs[..count].iter().map(|wc| (wc.wr_id, wc.status)));
            }
            found
        };
        use WcStatus::{LocProtErr, RemOpErr, Success};
        assert_eq!(ends(&recv_cq), [(1, Success), (2, LocProtErr)]);
        assert_eq!(ends(&send_cq), [(1, Success), (2, RemOpErr)]);
        assert_eq!(injected(&context), 1);
    });
}

/// The target is in another process. Its refusal comes by a ring, and says that its script is the cause.
#[test]
fn a_refusal_of_an_xrc_target_names_its_script() {
    let name = "received::a_refusal_of_an_xrc_target_names_its_script";
    with(name, "", &[], || {
        for (rule, rnr_retry, status) in [
            ("receive 1 completes with LOC_PROT_ERR", 7, WcStatus::RemOpErr),
            ("rnr received packets", 1, WcStatus::RnrRetryExcErr),
        ] {
            let mut peer = Peer::spawn("xrc", &[("ANYVERBS_FAULTS", rule)]);
            let (context, line) = (context(), peer.hear());
            let theirs: Vec<u32> =
                line.split(' ').skip(1).take(3).map(|n| n.parse().unwrap()).collect();
            let pd = context.alloc_pd().unwrap();
            let cq = context.create_cq(16, None, 0, 0).unwrap();
            let init = XrcSendInitAttr { send_cq: &cq, cap: CAP, sq_sig_all: true, cookie: 0 };
            let initiator = context.create_xrc_send_qp(&pd, &init).unwrap();
            peer.say(&format!("@ {} {} {} 0 0", initiator.qpn().get(), theirs[0], theirs[2]));
            crate::xrc::set_up_with(&initiator, &context, Qpn::new(theirs[1]), rnr_retry);
            assert_eq!(peer.hear(), "@ connected");
            peer.say("go");
            let buffer = Buffer::new(&pd, 64);
            let (op, flags, sges) = (SendOp::Send, SendFlags::SIGNALED, [buffer.sge(0, 64)]);
            let wr = SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn: theirs[2] };
            initiator.post_send(&[wr]).unwrap();
            let (begin, mut wcs) = (Instant::now(), [Wc::default()]);
            while cq.poll(&mut wcs).unwrap() == 0 {
                assert!(begin.elapsed() < Duration::from_secs(30));
            }
            assert_eq!((wcs[0].status, wcs[0].vendor_err), (status, 9901), "{rule}");
            assert!(context.counters().unwrap().read(Counter::ShmSentPkts) > 0);
        }
    });
}

#[test]
fn a_receive_of_a_datagram_fails_and_the_sender_hears_nothing() {
    let name = "received::a_receive_of_a_datagram_fails_and_the_sender_hears_nothing";
    with(name, "on qp 2: receive 1 completes with LOC_PROT_ERR", &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 128));
        let to = a.dest(b.address());
        (1..=2).for_each(|id| b.recv(id, &[dst.sge(0, 128)]));
        a.send_to(1, SendOp::Send, &[src.sge(0, 8)], Some(to));
        assert_eq!(ends(&a, 1), [(1, WcStatus::Success, 0)]);
        let wanted = [(1, WcStatus::LocProtErr, 9901), (2, WcStatus::WrFlushErr, 9901)];
        assert_eq!(ends(&b, 2), wanted);
        assert_eq!([&a, &b].map(|e| e.qp.state().unwrap()), [QpState::Rts, QpState::Err]);
    });
}

#[test]
fn a_receive_of_an_unreliable_connection_fails() {
    let name = "received::a_receive_of_an_unreliable_connection_fails";
    with(name, "on qp 2: receive 2 completes with LOC_LEN_ERR", &BY_UDP, || {
        let (a, b) = pair(QpType::Uc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 10_000));
        (1..=3).for_each(|id| b.recv(id, &[dst.sge(0, 10_000)]));
        (1..=2).for_each(|id| a.send(id, SendOp::Send, &[src.sge(0, 10_000)]));
        let success = WcStatus::Success;
        assert_eq!(ends(&a, 2), [(1, success, 0), (2, success, 0)]);
        let wanted =
            [(1, success, 0), (2, WcStatus::LocLenErr, 9901), (3, WcStatus::WrFlushErr, 9901)];
        assert_eq!(ends(&b, 3), wanted);
    });
}

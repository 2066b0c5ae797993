//! Queue pairs that fail at a time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

use super::*;

#[test]
fn a_queue_pair_fails_at_a_time() {
    // They are connected by then, on a busy machine too.
    with("at_a_time::a_queue_pair_fails_at_a_time", "on qp 2: fails after 1s", &[], || {
        let (a, b) = pair(QpType::Rc);
        assert_eq!(event(&b.context), AsyncEventKind::QpFatal);
        assert_eq!(a.qp.state().unwrap(), QpState::Rts);
    });
}

#[test]
fn a_queue_pair_that_is_made_after_its_time_fails_once_when_it_is_ready() {
    let name = "at_a_time::a_queue_pair_that_is_made_after_its_time_fails_once_when_it_is_ready";
    with(name, "on qp 2: fails after 1s; fails after 1s", &[], || {
        // It is made before that, on a busy machine too. When it has failed, the time has passed.
        let first = Endpoint::new(QpType::Rc);
        first.to_init();
        assert_eq!(event(&first.context), AsyncEventKind::QpFatal);
        let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
        let before = injected(&a.context);
        a.connect(b.address());
        b.connect(a.address());
        assert_eq!(event(&a.context), AsyncEventKind::QpFatal);
        // The rule without a number leaves it as it is.
        assert_eq!([a.qp.state(), b.qp.state()].map(Result::unwrap), [QpState::Err, QpState::Rts]);
        assert_eq!(injected(&a.context), before + 1);
        for e in [&a, &b] {
            let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
            e.qp.modify(&reset, QpAttrMask::STATE).unwrap();
        }
        a.connect(b.address());
        b.connect(a.address());
        assert_eq!([a.qp.state(), b.qp.state()].map(Result::unwrap), [QpState::Rts; 2]);
        assert_eq!(injected(&a.context), before + 1);
    });
}

/// A log that takes its time, and tells when it has a line.
struct SlowLog(Arc<AtomicBool>);

impl Subscriber for SlowLog {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::WARN
    }
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {
        std::thread::sleep(Duration::from_millis(100));
        self.0.store(true, Ordering::SeqCst);
    }
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

#[test]
fn the_log_has_a_late_failure_before_the_program_has_its_event() {
    let name = "at_a_time::the_log_has_a_late_failure_before_the_program_has_its_event";
    with(name, "on qp 2: fails after 1s; fails after 1s", &[], || {
        // When the first one has failed, the time has passed.
        let first = Endpoint::new(QpType::Rc);
        first.to_init();
        assert_eq!(event(&first.context), AsyncEventKind::QpFatal);
        let e = Endpoint::new(QpType::Rc);
        let said = Arc::new(AtomicBool::new(false));
        tracing::subscriber::set_global_default(SlowLog(Arc::clone(&said))).unwrap();
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| (event(&e.context), said.load(Ordering::SeqCst)));
            e.connect(e.address());
            assert_eq!(reader.join().unwrap(), (AsyncEventKind::QpFatal, true));
        });
    });
}

#[test]
fn requests_fail_from_a_time_on() {
    let name = "at_a_time::requests_fail_from_a_time_on";
    let script = "on qp 1: sends after 500ms complete with GENERAL_ERR\n\
                  on qp 4: receives after 700ms complete with LOC_PROT_ERR";
    with(name, script, &[], || {
        let begin = Instant::now();
        let status_of = |e: &Endpoint| e.poll(1)[0].status;
        for (failing, status, after) in
            [(0, WcStatus::GeneralErr, 500), (1, WcStatus::LocProtErr, 700)]
        {
            let (a, b) = pair(QpType::Rc);
            let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
            let failed = loop {
                b.recv(1, &[dst.sge(0, 64)]);
                a.send(1, SendOp::Send, &[src.sge(0, 64)]);
                let own = status_of(&a);
                if own != WcStatus::Success {
                    // Where the send fails by a rule, nobody has taken the receive.
                    break if failing == 0 { own } else { status_of(&b) };
                }
                assert_eq!(status_of(&b), WcStatus::Success);
            };
            assert_eq!(failed, status);
            assert!(begin.elapsed() >= Duration::from_millis(after));
        }
    });
}

/// Waits until a queue pair has this state.
fn reaches(e: &Endpoint, state: QpState) {
    let begin = Instant::now();
    while e.qp.state().unwrap() != state {
        assert!(begin.elapsed() < Duration::from_secs(30), "{:?}", e.qp.state());
        std::thread::yield_now();
    }
}

#[test]
fn a_send_queue_fails_at_a_time_and_works_again() {
    let name = "at_a_time::a_send_queue_fails_at_a_time_and_works_again";
    with(name, "goes to SQE after 1s; on qp 1: send 1 never completes", &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 128));
        let to = a.dest(b.address());
        let send = |id| a.send_to(id, SendOp::Send, &[src.sge(0, 8)], Some(to));
        b.recv(7, &[dst.sge(0, 128)]);
        send(1);
        assert_eq!(b.poll(1)[0].wr_id, 7);
        reaches(&a, QpState::Sqe);
        send(2);
        let flushed: Vec<_> =
            a.poll(2).iter().map(|wc| (wc.wr_id, wc.status, wc.vendor_err)).collect();
        assert_eq!(flushed, [1, 2].map(|id| (id, WcStatus::WrFlushErr, 9901)));
        let rts = QpAttr { state: QpState::Rts, cur_state: QpState::Sqe, ..QpAttr::default() };
        a.qp.modify(&rts, QpAttrMask::STATE | QpAttrMask::CUR_STATE).unwrap();
        b.recv(8, &[dst.sge(0, 128)]);
        send(3);
        assert_eq!((a.poll(1)[0].status, b.poll(1)[0].wr_id), (WcStatus::Success, 8));
        // The time of the rule has passed, which names none.
        assert_eq!(pair(QpType::Uc).0.qp.state().unwrap(), QpState::Rts);
    });
}

#[test]
fn a_reliable_queue_pair_has_no_sqe() {
    let name = "at_a_time::a_reliable_queue_pair_has_no_sqe";
    let script = "on qp 1: goes to SQE after 1ms; on qp 3: goes to SQE after 1ms
        on qp 5: goes to SQE after 1ms; on qp 5: fails after 1ms";
    with(name, script, &[], || {
        let (a, b) = pair(QpType::Rc);
        send_through(&a, &b);
        let (uc, _peer) = pair(QpType::Uc);
        reaches(&uc, QpState::Sqe);
        assert_eq!(a.qp.state().unwrap(), QpState::Rts);
        assert_eq!(injected(&a.context), 1);
        // The rule behind one that does nothing holds.
        let (c, _peer) = pair(QpType::Rc);
        reaches(&c, QpState::Err);
        assert_eq!(injected(&a.context), 2);
    });
}

/// Some of the packets wait for their time when the port goes down, and so do some of the answers.
#[test]
fn a_port_that_goes_down_is_the_cause_for_packets_that_were_late() {
    let name = "at_a_time::a_port_that_goes_down_is_the_cause_for_packets_that_were_late";
    with(name, "delay packets by 5ms; down after 500ms", &[], || {
        let pairs: Vec<_> = (0..8)
            .map(|_| {
                let [a, b] = [(); 2].map(|()| Endpoint::new(QpType::Rc));
                a.connect_with(b.address(), 12, 2);
                b.connect(a.address());
                let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
                (a, b, src, dst)
            })
            .collect();
        let mut ends = vec![None; pairs.len()];
        while ends.contains(&None) {
            let works = || pairs.iter().zip(&ends).filter(|(_, end)| end.is_none());
            for (n, ((a, _, src, dst), _)) in works().enumerate() {
                a.send(n as u64, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
                // They are at different places of their ways when the port goes down.
                std::thread::sleep(Duration::from_micros(700));
            }
            let found: Vec<_> = pairs
                .iter()
                .zip(&ends)
                .map(|((a, ..), end)| {
                    end.or_else(|| {
                        let wc = a.poll(1)[0];
                        (wc.status != WcStatus::Success).then_some((wc.status, wc.vendor_err))
                    })
                })
                .collect();
            ends = found;
        }
        assert_eq!(ends, vec![Some((WcStatus::RetryExcErr, 9901)); pairs.len()]);
    });
}

/// The status and the vendor error of the first WRITE that fails.
fn write_until_it_fails(a: &Endpoint, b: &Endpoint) -> (WcStatus, u32) {
    let [src, dst] = [a, b].map(|e| Buffer::new(&e.pd, 64));
    let mut ends = std::iter::repeat_with(|| {
        a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
        a.poll(1)[0]
    });
    let end = ends.find(|wc| wc.status != WcStatus::Success).unwrap();
    (end.status, end.vendor_err)
}

fn lose_the_peer() {
    let [a, b] = [(); 2].map(|()| Endpoint::new(QpType::Rc));
    a.connect_with(b.address(), 12, 2);
    b.connect(a.address());
    assert_eq!(write_until_it_fails(&a, &b), (WcStatus::RetryExcErr, 9901));
    assert_eq!(b.qp.state().unwrap(), QpState::Err);
}

/// The peer of a queue pair that a rule moved to the error state.
#[test]
fn a_queue_pair_that_fails_by_a_rule_says_so_to_its_peer() {
    let name = "at_a_time::a_queue_pair_that_fails_by_a_rule_says_so_to_its_peer";
    with(name, "on qp 2: fails after 300ms", &[], lose_the_peer);
}

/// The peer's rule is told beside rules of this end that let packets pass.
#[test]
fn a_queue_pair_that_fails_by_a_rule_says_so_to_a_peer_with_rules_of_its_own() {
    let name =
        "at_a_time::a_queue_pair_that_fails_by_a_rule_says_so_to_a_peer_with_rules_of_its_own";
    let script =
        "on qp 2: fails after 300ms; on qp 1: delay packets by 1ms; on qp 1: drop 0.1% of packets";
    with(name, script, &[], lose_the_peer);
}

#[test]
fn a_port_that_is_down_by_a_rule_says_so_to_a_peer_with_rules_of_its_own() {
    let name = "at_a_time::a_port_that_is_down_by_a_rule_says_so_to_a_peer_with_rules_of_its_own";
    let script = "on device anyverbs1: down after 1s; on qp 1: delay packets by 1ms";
    let devices = [&BY_UDP[..], &[("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")]].concat();
    with(name, script, &devices, || {
        let open = |n: usize| Context::open(&devices_of()[n]).unwrap();
        let [a, b] = [0, 1].map(|n| Endpoint::on(open(n), QpType::Rc));
        a.connect_with(b.address(), 12, 2);
        b.connect(a.address());
        assert_eq!(write_until_it_fails(&a, &b), (WcStatus::RetryExcErr, 9901));
    });
}

fn devices_of() -> Vec<String> {
    devices().unwrap().into_iter().map(|device| device.name).collect()
}

#[test]
fn a_queue_pair_that_fails_by_a_rule_says_so_by_udp() {
    let name = "at_a_time::a_queue_pair_that_fails_by_a_rule_says_so_by_udp";
    with(name, "on qp 2: goes to ERR after 300ms", &BY_UDP, lose_the_peer);
}

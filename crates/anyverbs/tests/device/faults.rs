//! Faults by script, on each way of packets.

use std::time::{Duration, Instant};

use anyverbs::cm::EventKind;
use anyverbs::error::{CreateError, ModifyObjectError, OpenError, RegisterError};
use anyverbs::*;
use anyverbs_proto::counters::Counter;
use anyverbs_testing::{Stopwatch, in_own_process};

use crate::capture::BY_UDP;
use crate::cm::{Node, at, connected, expect, stays_quiet};
use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, exercise};

mod addresses;
mod at_a_time;
mod beside;
mod dead;
mod flushed;
mod lossless;
mod memory;
mod one_end;
mod port_events;
mod queues;
mod received;
mod stopped;
mod together;

/// Runs a test of this module in a process of its own, with a script and variables.
fn with(name: &str, script: &str, variables: &[(&str, &str)], test: impl FnOnce()) {
    in_own_process(&format!("faults::{name}"), || {
        for (variable, value) in [&[("ANYVERBS_FAULTS", script)], variables].concat() {
            // SAFETY: before the device is opened, and by the only thread that runs a test.
            unsafe { std::env::set_var(variable, value) };
        }
        isolate();
        test();
    });
}

fn injected(context: &Context) -> u64 {
    context.counters().unwrap().read(Counter::InjectedFaults)
}

/// Packets of each queue pair, and how they fare.
const PACKETS: &str = "
    drop packets 3 to 4
    duplicate packet 6
    reorder packet 8
    delay packet 10 by 5ms to 20ms
    drop received packet 5
    corrupt received packet 7
    duplicate received packet 9
";

/// Messages arrive once and in their order, whatever the script does to packets.
fn send_through(a: &Endpoint, b: &Endpoint) {
    let [src, dst] = [a, b].map(|e| Buffer::new(&e.pd, 4096));
    for i in 0..30 {
        b.recv(i, &[dst.sge(0, 64)]);
        src.write(0, &pattern(64, i as u8));
        a.send(100 + i, SendOp::Send, &[src.sge(0, 64)]);
        let sent = a.poll(1)[0];
        assert_eq!((sent.wr_id, sent.status), (100 + i, WcStatus::Success));
        let received = b.poll(1)[0];
        assert_eq!((received.wr_id, received.status), (i, WcStatus::Success));
        assert_eq!(dst.read(0, 64), pattern(64, i as u8));
    }
    b.cq.poll(&mut [Wc::default()]).unwrap();
}

#[test]
fn a_connection_within_a_process_survives_each_fault_of_packets() {
    with("a_connection_within_a_process_survives_each_fault_of_packets", PACKETS, &[], || {
        let (a, b) = pair(QpType::Rc);
        send_through(&a, &b);
        let counters = a.context.counters().unwrap();
        // Eight packets of each of two queue pairs.
        assert_eq!(injected(&a.context), 16);
        assert_eq!(counters.read(Counter::DropIcrc), 2);
        assert!(counters.read(Counter::DuplicateRequest) > 0);
        assert!(counters.read(Counter::Retransmitted) > 0);
    });
}

#[test]
fn a_connection_by_udp_survives_each_fault_of_packets() {
    with("a_connection_by_udp_survives_each_fault_of_packets", PACKETS, &BY_UDP, || {
        let (a, b) = pair(QpType::Rc);
        send_through(&a, &b);
        assert_eq!(injected(&a.context), 16);
        assert_eq!(a.context.counters().unwrap().read(Counter::DropIcrc), 2);
    });
}

#[test]
fn a_connection_through_shared_memory_survives_lost_packets() {
    let script = "drop 5% of packets; duplicate 5% of packets; reorder 5% of packets; drop 5% of received packets";
    with("a_connection_through_shared_memory_survives_lost_packets", script, &[], || {
        for peers_script in ["", "drop 5% of packets; seed 9"] {
            let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", peers_script)]);
            let e = Endpoint::new(QpType::Rc);
            let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
            let (_, remote) = peer.connect(&e, &dst);
            let counters = e.context.counters().unwrap();
            let counts = || [injected(&e.context), counters.read(Counter::ShmSentPkts)];
            let before = counts();
            exercise(&e, &src, &dst, remote);
            let [faults, packets] = [0, 1].map(|n| counts()[n] - before[n]);
            assert!(faults > 5 && packets > 100, "{faults} {packets}");
            assert_eq!(counters.read(Counter::ShmDirectWrites), 0);
        }
    });
}

#[test]
fn packets_that_wait_leave_when_their_queue_pair_is_destroyed() {
    let script = "delay packets by 30s";
    let name = "packets_that_wait_leave_when_their_queue_pair_is_destroyed";
    with(name, script, &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        let to = a.dest(b.address());
        b.recv(7, &[dst.sge(0, 64)]);
        a.send_to(1, SendOp::Send, &[src.sge(0, 1)], Some(to));
        a.poll(1);
        assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        drop(a);
        assert_eq!(b.poll(1)[0].wr_id, 7);
    });
}

#[test]
fn a_reordered_packet_leaves_behind_the_next_or_soon() {
    let script = "reorder sent send packets 1 to 2; reorder packet 4";
    with("a_reordered_packet_leaves_behind_the_next_or_soon", script, &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        let to = a.dest(b.address());
        let send = |n: u8| {
            src.write(0, &[n]);
            a.send_to(n.into(), SendOp::Send, &[src.sge(0, 1)], Some(to));
            a.poll(1);
        };
        let receive = |n: usize| (0..n).for_each(|i| b.recv(0, &[dst.sge(i * 64, 64)]));
        let received = |n: usize| {
            b.poll(n);
            (0..n).map(|i| dst.read(i * 64 + 40, 1)[0]).collect::<Vec<_>>()
        };
        receive(2);
        // Both wait for one that overtakes them, and leave when none comes.
        send(1);
        send(2);
        assert_eq!(received(2), [1, 2]);
        receive(3);
        send(3);
        send(4);
        send(5);
        assert_eq!(received(3), [3, 5, 4]);
    });
}

#[test]
fn packets_that_wait_are_bounded_and_the_last_ones_are_lost() {
    let name = "packets_that_wait_are_bounded_and_the_last_ones_are_lost";
    with(name, "delay packets by 30s", &[], || {
        let cap = QpCap { max_recv_wr: 1100, ..CAP };
        let [a, b] = [(); 2].map(|()| Endpoint::with(QpType::Ud, cap, 2048));
        a.connect(b.address());
        b.connect(a.address());
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let to = a.dest(b.address());
        for n in 0..1100 {
            b.recv(0, &[dst.sge(0, 64)]);
            a.send_to(0, SendOp::SendImm(n), &[src.sge(0, 8)], Some(to));
            a.poll(1);
        }
        assert_eq!(injected(&a.context), 1100);
        drop(a);
        let found: Vec<_> = b.poll(1000).iter().map(|wc| wc.imm).collect();
        assert_eq!(found, (0..1000).collect::<Vec<_>>());
        assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    });
}

#[test]
fn a_marked_packet_notifies_the_sender() {
    let name = "a_marked_packet_notifies_the_sender";
    with(name, "on qp 2: mark received packets 2 to 3", &[], || {
        let (a, b) = pair(QpType::Rc);
        send_through(&a, &b);
        let counters = a.context.counters().unwrap();
        assert_eq!(counters.read(Counter::EcnMarked), 2);
        assert!(counters.read(Counter::CnpSent) > 0 && counters.read(Counter::CnpHandled) > 0);
        assert_eq!(injected(&a.context), 2);
    });
}

/// Receives that are not ready, four times.
const STORM: &str = "on qp 2: rnr received send packets 2 to 5";

/// Sends through it; how many NAKs there were.
fn naks_of_a_storm() -> u64 {
    let (a, b) = pair(QpType::Rc);
    send_through(&a, &b);
    let naks = a.context.counters().unwrap().read(Counter::RnrNakSent);
    assert_eq!(injected(&a.context), naks);
    naks
}

#[test]
fn a_storm_of_rnr_naks_delays_messages_and_loses_none() {
    let name = "a_storm_of_rnr_naks_delays_messages_and_loses_none";
    with(name, STORM, &[], || assert_eq!(naks_of_a_storm(), 4));
}

#[test]
fn a_storm_of_rnr_naks_by_udp_delays_messages_and_loses_none() {
    let name = "a_storm_of_rnr_naks_by_udp_delays_messages_and_loses_none";
    // A packet that is repeated before its NAK has come counts as received, and gets no second NAK.
    with(name, STORM, &BY_UDP, || assert!((1..=4).contains(&naks_of_a_storm())));
}

#[test]
fn requests_without_a_receive_get_no_rnr_nak() {
    let name = "requests_without_a_receive_get_no_rnr_nak";
    with(name, "on qp 2: rnr received packets; rnr received packets", &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        a.send(2, SendOp::Read(dst.remote(0)), &[src.sge(0, 8)]);
        assert!(a.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
        assert_eq!(injected(&a.context), 0);
    });
}

#[test]
fn the_rest_of_a_message_gets_no_rnr_nak() {
    let name = "the_rest_of_a_message_gets_no_rnr_nak";
    with(name, "on qp 2: rnr received packets 2 to 5", &BY_UDP, || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 10_000));
        b.recv(7, &[dst.sge(0, 10_000)]);
        a.send(1, SendOp::SendImm(5), &[src.sge(0, 10_000)]);
        let done = [a.poll(1)[0].status, b.poll(1)[0].status];
        assert_eq!(done, [WcStatus::Success; 2]);
        let counters = a.context.counters().unwrap();
        assert_eq!((injected(&a.context), counters.read(Counter::RnrNakSent)), (0, 0));
    });
}

#[test]
fn packets_leave_at_a_limited_rate_that_queue_pairs_share() {
    let name = "packets_leave_at_a_limited_rate_that_queue_pairs_share";
    with(name, "limit packets to 800kb/s", &[], || {
        let (a, b) = pair(QpType::Ud);
        let other = Endpoint::new(QpType::Ud);
        other.connect(b.address());
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        let from_other = Buffer::new(&other.pd, 4096);
        (0..20).for_each(|_| b.recv(0, &[dst.sge(0, 2048)]));
        let begin = Instant::now();
        for _ in 0..10 {
            for (e, src) in [(&a, &src), (&other, &from_other)] {
                let to = e.dest(b.address());
                e.send_to(0, SendOp::Send, &[src.sge(0, 1000)], Some(to));
                e.poll(1);
            }
        }
        b.poll(20);
        // 1000 bytes and their headers take 10 ms each. If the queue pairs had a rate each, all would take half as long.
        assert!(begin.elapsed() >= Duration::from_millis(200), "{:?}", begin.elapsed());
    });
}

#[test]
fn packets_behind_a_full_queue_are_lost() {
    let name = "packets_behind_a_full_queue_are_lost";
    with(name, "limit packets to 1kb/s queue 3", &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let to = a.dest(b.address());
        for n in 0..10 {
            b.recv(0, &[dst.sge(0, 64)]);
            a.send_to(0, SendOp::SendImm(n), &[src.sge(0, 8)], Some(to));
            a.poll(1);
        }
        // Seven are lost, and three wait.
        assert_eq!(injected(&a.context), 10);
        // At this rate the first one takes half a second, and the others wait for it.
        drop(a);
        assert_eq!(b.poll(3).iter().map(|wc| wc.imm).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    });
}

/// The datagrams of 200 that arrive.
fn arrived() -> Vec<u32> {
    let (a, b) = pair(QpType::Ud);
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
    let to = a.dest(b.address());
    (0..32).for_each(|_| b.recv(0, &[dst.sge(0, 64)]));
    let (mut all, mut wcs) = (Vec::new(), [Wc::default(); 8]);
    // Until one arrives that is behind them all.
    for n in 0.. {
        a.send_to(0, SendOp::SendImm(n), &[src.sge(0, 8)], Some(to));
        a.poll(1);
        let got = b.cq.poll(&mut wcs).unwrap();
        (0..got).for_each(|_| b.recv(0, &[dst.sge(0, 64)]));
        all.extend(wcs[..got].iter().map(|wc| wc.imm));
        if all.last().is_some_and(|last| *last >= 200) {
            break;
        }
    }
    all.retain(|n| *n < 200);
    all
}

#[test]
fn one_seed_makes_the_same_choice_and_another_one_another() {
    let name = "one_seed_makes_the_same_choice_and_another_one_another";
    // The process prints what arrived, and this one compares.
    in_own_process(&format!("faults::{name}"), || {
        let mut found = Vec::new();
        for seed in ["5", "5", "6"] {
            let output = std::process::Command::new(std::env::current_exe().unwrap())
                .args(["--exact", "faults::print_arrived", "--nocapture", "--test-threads=1"])
                .env("ANYVERBS_TEST_FAULTS", "1")
                .env("ANYVERBS_FAULT_SEED", seed)
                .env("ANYVERBS_FAULTS", "drop 20% of packets")
                .output()
                .unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            let line = text.lines().find_map(|line| line.split_once('@')).unwrap().1.to_owned();
            found.push(line);
        }
        assert_eq!(found[0], found[1]);
        assert_ne!(found[0], found[2]);
        let n = found[0].split(',').count();
        assert!((130..190).contains(&n), "{n} of 200 arrived");
    });
}

/// Not a test by itself: the program of the one above.
#[test]
fn print_arrived() {
    if std::env::var_os("ANYVERBS_TEST_FAULTS").is_some() {
        isolate();
        println!("@{:?}", arrived());
    }
}

#[test]
fn a_send_fails_with_the_status_of_the_script() {
    let script = "on qp 1: send 3 completes with REM_ACCESS_ERR after 50ms";
    with("a_send_fails_with_the_status_of_the_script", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        dst.write(0, &[0; 40]);
        src.write(0, &[7; 40]);
        let begin = Instant::now();
        for i in 0..5 {
            a.send(i, SendOp::Write(dst.remote(i as usize * 8)), &[src.sge(0, 8)]);
        }
        let wcs = a.poll(5);
        assert!(begin.elapsed() >= Duration::from_millis(50));
        let found: Vec<_> = wcs.iter().map(|wc| (wc.wr_id, wc.status)).collect();
        use WcStatus::{RemAccessErr, Success, WrFlushErr};
        let wanted = [Success, Success, RemAccessErr, WrFlushErr, WrFlushErr];
        assert_eq!(found, (0..5).zip(wanted).collect::<Vec<_>>());
        assert_eq!(wcs[2].vendor_err, 9901, "nobody takes it for a real one");
        assert_eq!(dst.read(0, 24), [[7; 8], [7; 8], [0; 8]].concat(), "it was not executed");
        assert_eq!(a.qp.state().unwrap(), QpState::Err);
        assert_eq!(b.qp.state().unwrap(), QpState::Rts);
    });
}

#[test]
fn a_send_fails_with_a_status_that_no_device_of_ours_has() {
    let script = "on qp 1: send 1 completes with FATAL_ERR; on qp 3: send 1 completes with RESP_TIMEOUT_ERR\n\
        on qp 5: send 1 completes with REM_ABORT_ERR";
    with("a_send_fails_with_a_status_that_no_device_of_ours_has", script, &[], || {
        use WcStatus::{FatalErr, RemAbortErr, RespTimeoutErr};
        for (status, number) in [(FatalErr, 19), (RespTimeoutErr, 20), (RemAbortErr, 16)] {
            let (a, b) = pair(QpType::Rc);
            let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
            a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
            let wc = a.poll(1)[0];
            assert_eq!((wc.status, wc.status as u8, wc.vendor_err), (status, number, 9901));
        }
    });
}

#[test]
fn a_datagram_fails_and_the_queue_goes_on() {
    let script = "on qp 1: send 2 completes with LOC_QP_OP_ERR";
    with("a_datagram_fails_and_the_queue_goes_on", script, &[], || {
        let (a, b) = pair(QpType::Ud);
        let src = Buffer::new(&a.pd, 64);
        let to = a.dest(b.address());
        let send = |n: u64| {
            a.send_to(n, SendOp::Send, &[src.sge(0, 8)], Some(to));
            a.poll(1)[0].status
        };
        assert_eq!([send(1), send(2)], [WcStatus::Success, WcStatus::LocQpOpErr]);
        assert_eq!(a.qp.state().unwrap(), QpState::Sqe);
        let attr = QpAttr { state: QpState::Rts, ..QpAttr::default() };
        a.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        assert_eq!(send(3), WcStatus::Success);
    });
}

#[test]
fn a_request_that_hangs_is_flushed_in_the_error_state() {
    let script = "on qp 1: send 3 never completes";
    with("a_request_that_hangs_is_flushed_in_the_error_state", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        for i in 1..=5 {
            a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        }
        assert_eq!(a.poll(2).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 2]);
        let until = Instant::now() + Duration::from_millis(200);
        while Instant::now() < until {
            assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0, "it hangs");
        }
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        a.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        let flushed: Vec<_> = a.poll(3).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(flushed, [3, 4, 5].map(|id| (id, WcStatus::WrFlushErr)));
        assert_eq!(injected(&a.context), 1);
    });
}

#[test]
fn one_completion_obeys_all_rules_for_the_sends_that_it_stands_for() {
    let script = "send 2 completes after 10ms; send 3 completes after 100ms; send 5 completes after 10ms; send 6 never completes";
    with("one_completion_obeys_all_rules_for_the_sends_that_it_stands_for", script, &[], || {
        let [mut a, b] = [(); 2].map(|()| Endpoint::new(QpType::Rc));
        let init = QpInitAttr {
            send_cq: &a.cq,
            recv_cq: &a.cq,
            srq: None,
            cap: CAP,
            qp_type: QpType::Rc,
            sq_sig_all: false,
            cookie: 0,
        };
        a.qp = a.context.create_qp(&a.pd, &init).unwrap();
        a.connect(b.address());
        b.connect(a.address());
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let write = |wr_id, flags| {
            let (op, sges) = (SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
            let wr = SendWr { wr_id, op, flags, sges, ud: None, xrc_srqn: 0 };
            a.qp.post_send(&[wr]).unwrap();
        };
        let none = SendFlags::empty();
        let begin = Instant::now();
        [1, 2, 3].into_iter().for_each(|wr_id| write(wr_id, none));
        write(4, SendFlags::SIGNALED);
        assert_eq!(a.poll(1)[0].wr_id, 4);
        assert!(begin.elapsed() >= Duration::from_millis(100));
        assert_eq!(injected(&a.context), 2, "both rules are told");
        [5, 6].into_iter().for_each(|wr_id| write(wr_id, none));
        write(7, SendFlags::SIGNALED);
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0, "it hangs");
        }
        assert_eq!(injected(&a.context), 4);
    });
}

#[test]
fn a_fault_that_a_flush_overtakes_is_not_told() {
    let script = "on qp 1: send 1 completes with RETRY_EXC_ERR after 30s; on qp 1: send 2 completes after 1s";
    with("a_fault_that_a_flush_overtakes_is_not_told", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        for i in 1..=2 {
            a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        }
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        a.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        let flushed: Vec<_> = a.poll(2).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(flushed, [1, 2].map(|id| (id, WcStatus::WrFlushErr)));
        assert_eq!(injected(&a.context), 0);
    });
}

#[test]
fn completions_come_late() {
    let script = "on qp 1: send 2 completes after 100ms; on qp 2: receive 1 completes after 1s";
    with("completions_come_late", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
        b.recv(9, &[dst.sge(0, 8)]);
        let (begin, watch) = (Instant::now(), Stopwatch::start());
        a.send(1, SendOp::Send, &[src.sge(0, 8)]);
        a.poll(1);
        assert!(watch.elapsed() < Duration::from_secs(1));
        // Nobody polls a queue that is waited for.
        assert_eq!(b.wait(1)[0].wr_id, 9);
        assert!(begin.elapsed() >= Duration::from_secs(1));
        let begin = Instant::now();
        a.send(2, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        a.send(3, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        assert_eq!(a.poll(2).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [2, 3]);
        assert!(begin.elapsed() >= Duration::from_millis(100));
    });
}

#[test]
fn completions_that_wait_do_not_overrun_their_queue_together() {
    let script = "on qp 1: send 1 completes after 200ms";
    with("completions_that_wait_do_not_overrun_their_queue_together", script, &[], || {
        let [a, b] = [(); 2].map(|()| Endpoint::with(QpType::Rc, CAP, 8));
        let [more, peer] = [&a, &b].map(Endpoint::another);
        let address = |qp: &Qp, e: &Endpoint| Address { qpn: qp.qpn(), ..e.address() };
        a.connect(b.address());
        b.connect(a.address());
        a.connect_qp(&more, address(&peer, &b), 14, 7);
        b.connect_qp(&peer, address(&more, &a), 14, 7);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let write = |qp: &Qp, wr_id| {
            let (op, flags) = (SendOp::Write(dst.remote(0)), SendFlags::SIGNALED);
            let sges = &[src.sge(0, 8)];
            qp.post_send(&[SendWr { wr_id, op, flags, sges, ud: None, xrc_srqn: 0 }]).unwrap();
        };
        // A program that polls has room for them all: eight at most are not complete at a time.
        (0..8).for_each(|wr_id| write(&a.qp, wr_id));
        (8..12).for_each(|wr_id| write(&more, wr_id));
        let until = Instant::now() + Duration::from_millis(400);
        while Instant::now() < until {
            // It drives the device, but takes no completion of the other queue.
            assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        }
        let mut found: Vec<_> = a.poll(12).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        found.sort_unstable_by_key(|(wr_id, _)| *wr_id);
        assert_eq!(found, (0..12).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
    });
}

#[test]
fn no_more_completions_are_held_back_than_fit_into_their_queue() {
    let script = "on qp 1: send 1 never completes; on qp 2: receive 1 never completes";
    with("no_more_completions_are_held_back_than_fit_into_their_queue", script, &[], || {
        let [a, b] = [(); 2].map(|()| Endpoint::with(QpType::Rc, CAP, 8));
        a.connect(b.address());
        b.connect(a.address());
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let send = |n: u64| {
            b.recv(n, &[dst.sge(0, 8)]);
            a.send(n, SendOp::Send, &[src.sge(0, 8)]);
        };
        (0..8).for_each(send);
        let until = Instant::now() + Duration::from_millis(100);
        while Instant::now() < until {
            let waiting = [&a, &b].map(|e| e.cq.poll(&mut [Wc::default()]).unwrap());
            assert_eq!(waiting, [0, 0], "they hang");
        }
        send(8);
        for e in [&a, &b] {
            let found: Vec<_> = e.poll(9).iter().map(|wc| (wc.wr_id, wc.status)).collect();
            assert_eq!(found, (0..9).map(|id| (id, WcStatus::Success)).collect::<Vec<_>>());
        }
    });
}

#[test]
fn a_request_that_hung_is_flushed_when_its_queue_has_room_again() {
    let script = "on qp 1: send 1 never completes";
    with("a_request_that_hung_is_flushed_when_its_queue_has_room_again", script, &[], || {
        let [a, b] = [(); 2].map(|()| Endpoint::with(QpType::Rc, CAP, 8));
        a.connect(b.address());
        b.connect(a.address());
        let dst = Buffer::new(&b.pd, 64);
        a.send(1, SendOp::Write(dst.remote(0)), &[]);
        // Before its answer has come it does not hang yet.
        let begin = Instant::now();
        while injected(&a.context) == 0 {
            assert!(begin.elapsed() < Duration::from_secs(10), "the request has no answer");
            std::thread::yield_now();
        }
        // Flushed requests of another queue pair fill the queue.
        let other = a.another();
        let to_err = QpAttr { state: QpState::Err, ..QpAttr::default() };
        other.modify(&to_err, QpAttrMask::STATE).unwrap();
        for wr_id in 2..2 + u64::from(a.cq.capacity()) {
            let op = SendOp::Write(dst.remote(0));
            let flags = SendFlags::SIGNALED;
            let wr = SendWr { wr_id, op, flags, sges: &[], ud: None, xrc_srqn: 0 };
            other.post_send(&[wr]).unwrap();
        }
        a.qp.modify(&to_err, QpAttrMask::STATE).unwrap();
        let found = a.poll(a.cq.capacity() as usize + 1);
        assert_eq!(found.last().map(|wc| wc.wr_id), Some(1));
        assert!(found.iter().all(|wc| wc.status == WcStatus::WrFlushErr), "{found:?}");
    });
}

#[test]
fn a_failure_behind_a_request_that_hangs_is_flushed_with_it() {
    let script =
        "on qp 1: send 2 never completes; on qp 1: send 4 completes with RETRY_EXC_ERR after 50ms";
    with("a_failure_behind_a_request_that_hangs_is_flushed_with_it", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        for i in 1..=5 {
            a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        }
        let found: Vec<_> = a.poll(5).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        use WcStatus::{Success, WrFlushErr};
        let wanted = [Success, WrFlushErr, WrFlushErr, WrFlushErr, WrFlushErr];
        assert_eq!(found, (1..=5).zip(wanted).collect::<Vec<_>>());
    });
}

/// The events of a device, one after the other.
fn event(context: &Context) -> AsyncEventKind {
    context.get_async_event().unwrap().kind()
}

/// A queue pair whose sends complete if they ask for it.
fn init(e: &Endpoint) -> QpInitAttr<'_> {
    QpInitAttr {
        send_cq: &e.cq,
        recv_cq: &e.cq,
        srq: None,
        cap: CAP,
        qp_type: QpType::Rc,
        sq_sig_all: false,
        cookie: 0,
    }
}

/// Two endpoints on one device of several.
fn pair_on(number: usize) -> (Endpoint, Endpoint) {
    let open = || Context::open(&devices().unwrap()[number].name).unwrap();
    let [a, b] = [(); 2].map(|()| Endpoint::on(open(), QpType::Rc));
    a.connect_with(b.address(), 17, 7);
    b.connect_with(a.address(), 17, 7);
    (a, b)
}

#[test]
fn a_port_goes_down_and_comes_up_and_the_others_stay() {
    // The test connects before the port goes down, and sees the state before it comes up, on a busy machine too.
    let script = "on device anyverbs1 port 1: down for 3s after 1s";
    let devices = [("ANYVERBS_DEVICES", "3"), ("ANYVERBS_INTERFACES", "")];
    with("a_port_goes_down_and_comes_up_and_the_others_stay", script, &devices, || {
        let rails = [0, 1].map(pair_on);
        let buffers = rails.each_ref().map(|(a, b)| [a, b].map(|e| Buffer::new(&e.pd, 64)));
        let write = |rail: usize| {
            let [src, dst] = &buffers[rail];
            rails[rail].0.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        };
        let state = |rail: usize| rails[rail].0.context.port_attr(1).unwrap().state;
        assert_eq!(event(&rails[1].0.context), AsyncEventKind::PortErr);
        assert_eq!([state(0), state(1)], [PortState::Active, PortState::Down]);
        write(1);
        for _ in 0..10 {
            write(0);
            assert_eq!(rails[0].0.poll(1)[0].status, WcStatus::Success);
        }
        assert_eq!(rails[1].0.cq.poll(&mut [Wc::default()]).unwrap(), 0);
        assert_eq!(event(&rails[1].0.context), AsyncEventKind::PortActive);
        assert_eq!([state(0), state(1)], [PortState::Active; 2]);
        assert_eq!(rails[1].0.poll(1)[0].status, WcStatus::Success, "the retries outlast it");
    });
}

#[test]
fn a_device_fails_for_good() {
    // The test has made its objects by then, on a busy machine too.
    let script = "on device anyverbs1: fatal after 1s";
    let devices = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];
    with("a_device_fails_for_good", script, &devices, || {
        let [(whole, _whole_peer), (a, b)] = [0, 1].map(pair_on);
        let dst = Buffer::new(&b.pd, 64);
        assert_eq!(event(&a.context), AsyncEventKind::DeviceFatal);
        let begin = Instant::now();
        while a.qp.state().unwrap() != QpState::Err {
            assert!(begin.elapsed() < Duration::from_secs(10));
            std::thread::yield_now();
        }
        a.send(1, SendOp::Write(dst.remote(0)), &[]);
        let wc = a.poll(1)[0];
        assert_eq!((wc.status, wc.vendor_err), (WcStatus::WrFlushErr, 9901));
        assert_eq!(a.context.port_attr(1).unwrap().state, PortState::Down);
        assert_eq!(whole.qp.state().unwrap(), QpState::Rts);
        // It takes no new objects, and its queue pairs do not work again.
        let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
        a.qp.modify(&reset, QpAttrMask::STATE).unwrap();
        let attr = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
        use QpAttrMask as M;
        let mask = M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS;
        assert_eq!(a.qp.modify(&attr, mask).unwrap_err(), ModifyObjectError::Failed);
        let refused = [
            a.context.alloc_pd().unwrap_err(),
            a.context.create_cq(16, None, 0, 0).unwrap_err(),
            a.context.create_qp(&a.pd, &init(&a)).unwrap_err(),
            a.pd.create_srq(&SrqInitAttr { max_wr: 1, max_sge: 1, cookie: 0 }).unwrap_err(),
            a.pd.create_ah(&AhAttr::default()).unwrap_err(),
            a.pd.alloc_mw(WindowType::Type1).unwrap_err(),
            a.pd.alloc_buf(64).unwrap_err(),
            a.context.create_comp_channel().unwrap_err(),
            a.context.answers().unwrap_err(),
        ];
        assert_eq!(whole.context.answers(), Ok(()));
        assert!(refused.iter().all(|error| *error == CreateError::Failed), "{refused:?}");
        assert_eq!(refused[0].errno(), libc::EIO);
        // SAFETY: registering changes nothing.
        let error = unsafe { a.pd.reg_mr(dst.addr(), 64, 0, Access::LOCAL_WRITE) }.unwrap_err();
        assert_eq!(error, RegisterError::Failed);
        // It cannot be opened again, by its name or by a descriptor. It stays in the list.
        let name = &anyverbs::devices().unwrap()[1].name;
        let descriptor = a.context.command_fd().try_clone_to_owned().unwrap();
        let refused = [Context::open(name), Context::import(descriptor)];
        assert!(refused.iter().all(|opened| matches!(opened, Err(OpenError::Failed))));
        drop(whole.another());
        // Objects from before can be destroyed.
        a.qp.destroy().unwrap();
        a.cq.destroy().unwrap();
        a.pd.destroy().unwrap();
    });
}

#[test]
fn ids_at_the_addresses_of_a_failed_device_hear_of_it() {
    let script = "fatal after 1s";
    with("ids_at_the_addresses_of_a_failed_device_hear_of_it", script, &[], || {
        let everywhere = Node::listener(&at("0.0.0.0", 0));
        let (listener, active, passive) = connected();
        for node in [&listener, &active, &passive] {
            let event = expect(&node.channel, EventKind::DeviceRemoval);
            assert_eq!(event.status, 0);
            node.id.ack_events(1);
        }
        stays_quiet(&everywhere.channel);
        active.e().qp.destroy().unwrap();
        active.id.destroy().unwrap();
        listener.id.destroy().unwrap();
    });
}

#[test]
fn a_device_may_have_failed_from_the_start() {
    with("a_device_may_have_failed_from_the_start", "fatal after 0s", &[], || {
        let error = Context::open(&devices().unwrap()[0].name).unwrap_err();
        assert!(matches!(error, OpenError::Failed), "{error}");
        assert_eq!(error.errno(), libc::EIO);
    });
}

#[test]
fn a_connection_begins_when_its_port_comes_up() {
    use crate::cm::{Node, PARAM, at, expect};
    use anyverbs::cm::EventKind;
    with("a_connection_begins_when_its_port_comes_up", "down for 600ms after 0s", &[], || {
        let begin = Instant::now();
        let listener = Node::listener(&at("127.0.0.1", 0));
        let active = Node::towards(&listener.on("127.0.0.1"));
        active.id.connect(&PARAM).unwrap();
        let (mut passive, _) = listener.request();
        assert!(begin.elapsed() >= Duration::from_millis(600));
        passive.attach(QpType::Rc);
        passive.id.accept(Some(&PARAM)).unwrap();
        expect(&active.channel, EventKind::Established);
        passive.expect(EventKind::Established);
    });
}

#[test]
fn a_connection_ends_when_its_port_comes_up() {
    use crate::cm::{Node, PARAM, at, expect};
    use anyverbs::cm::EventKind;
    // Connecting takes milliseconds, and much less than this on a busy machine too.
    with("a_connection_ends_when_its_port_comes_up", "down for 3s after 3s", &[], || {
        let begin = Instant::now();
        let listener = Node::listener(&at("127.0.0.1", 0));
        let active = Node::towards(&listener.on("127.0.0.1"));
        active.id.connect(&PARAM).unwrap();
        let (mut passive, _) = listener.request();
        passive.attach(QpType::Rc);
        passive.id.accept(Some(&PARAM)).unwrap();
        expect(&active.channel, EventKind::Established);
        passive.expect(EventKind::Established);
        assert_eq!(event(&active.endpoint.as_ref().unwrap().context), AsyncEventKind::PortErr);
        active.id.disconnect().unwrap();
        passive.expect(EventKind::Disconnected);
        assert!(begin.elapsed() >= Duration::from_secs(6));
    });
}

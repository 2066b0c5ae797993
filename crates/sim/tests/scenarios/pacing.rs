//! A limited rate (`ibv_modify_qp_rate_limit(3)`, and a path's static rate) beside everything else that holds sends back. Each scenario must come to rest:
//! a deadline that stays in the past would never let [`Pair::run`] end.

use super::prelude::*;

/// 1000 bytes a millisecond.
const KBPS: u32 = 8000;

fn pace(t: &mut Pair, end: End) {
    let attr = QpAttr { rate_limit: KBPS, ..QpAttr::default() };
    t.modify(end.qp, &attr, QpAttrMask::RATE_LIMIT).unwrap();
}

#[test]
fn a_receiver_that_is_not_ready() {
    let (mut t, a, b) = rc(QpOptions { min_rnr_timer: 20, ..QpOptions::rc() });
    pace(&mut t, a);
    for i in 0..5 {
        t.post(a, i, SendOp::Send, &[a.mr.sge(0, 1000)]);
    }
    t.run_for(Duration::from_millis(9));
    for i in 0..5 {
        t.recv(b, i, &[b.mr.sge(0, 1000)]);
    }
    t.run();
    assert_eq!(t.sent(a), (0..5).map(|i| (i, Success)).collect::<Vec<_>>());
}

#[test]
fn an_ack_that_comes_after_the_cursor_went_back() {
    for len in [3000, 4000, 5000, 6000] {
        for probe in [1, 2, 3] {
            for delay in [2, 3, 4, 5, 6, 8] {
                let probe_after = Some(Duration::from_millis(probe));
                let (mut t, a, b) = rc(QpOptions { probe_after, ..QpOptions::rc() });
                pace(&mut t, a);
                t.net.rule(move |p| {
                    let late = p.from == b.device;
                    if late { Fate::Delay(Duration::from_millis(delay)) } else { Fate::Pass }
                });
                t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, len)]);
                t.run();
                assert_eq!(t.sent(a), [(1, Success)], "{len} bytes, {probe} ms, {delay} ms");
            }
        }
    }
}

#[test]
fn datagrams_that_wait_in_sqd() {
    let mut t = Pair::new(1, QpOptions::ud());
    let (a, b) = t.ends();
    pace(&mut t, a);
    for i in 0..5 {
        t.recv(b, i, &[b.mr.sge(0, 2000)]);
        t.post(a, i, SendOp::Send, &[a.mr.sge(0, 1000)]);
    }
    t.to_state(a.qp, QpState::Sqd);
    t.run();
    assert!(t.sent(a).len() < 5);
    t.to_state(a.qp, QpState::Rts);
    t.run();
    assert_eq!(t.recvs(b).len(), 5);
}

/// `IBV_RATE_MAX`, then 2.5, 10, 100 and 200 Gb/s, and the time of the bits where they are paced.
const STATIC_RATES: [(u8, Option<f64>); 5] =
    [(0, None), (2, Some(2.5e9)), (3, Some(10e9)), (16, None), (17, None)];

/// The time that `rounds` of 8 messages take over a path of this static rate.
fn took(
    qp_type: QpType,
    static_rate: u8,
    op: fn(End) -> SendOp,
    len: usize,
    rounds: u64,
) -> Duration {
    let datagrams = qp_type == QpType::Ud;
    let mut t = Pair::new(1, if datagrams { QpOptions::ud() } else { QpOptions::rc() });
    let (a, b) = t.ends();
    if !datagrams {
        let mut attr = QpAttr { state: QpState::Sqd, ..QpAttr::default() };
        t.modify(a.qp, &attr, QpAttrMask::STATE).unwrap();
        attr.av = t.av(a.device, b.device);
        attr.av.static_rate = static_rate;
        t.modify(a.qp, &attr, QpAttrMask::STATE | QpAttrMask::AV).unwrap();
        t.to_state(a.qp, QpState::Rts);
    }
    let begin = t.now();
    for _ in 0..rounds {
        for wr_id in 0..8 {
            let op = op(b);
            if matches!(op, SendOp::Send) {
                t.recv(b, wr_id, &[b.mr.sge(0, len + 40)]);
            }
            let ud = datagrams.then(|| {
                let mut dest = t.dest(a.qp, b.qp);
                dest.av.static_rate = static_rate;
                dest
            });
            let (flags, sges) = (SendFlags::SIGNALED, &[a.mr.sge(0, len)]);
            t.post_send(a.qp, &SendWr { wr_id, op, flags, sges, ud, xrc_srqn: 0 }).unwrap();
        }
        t.run();
        assert!(t.sends(a).iter().all(|wc| wc.status == Success));
        t.recvs(b);
    }
    Duration::from_nanos(t.now().as_nanos() - begin.as_nanos())
}

/// Never faster than the rate but for one burst of 2 ms, and not much slower; a rate that the port does not reach costs nothing.
#[test]
fn the_static_rate_of_a_path() {
    let write: fn(End) -> SendOp = |b| SendOp::Write(b.mr.remote(0));
    let send: fn(End) -> SendOp = |_| SendOp::Send;
    let cases = [
        (QpType::Rc, write, 128 << 10, 8),
        (QpType::Rc, send, 100_000, 10),
        (QpType::Ud, send, 4096, 256),
    ];
    for (qp_type, op, len, rounds) in cases {
        let unpaced = took(qp_type, 0, op, len, rounds);
        for (static_rate, rate) in STATIC_RATES {
            let took = took(qp_type, static_rate, op, len, rounds);
            let Some(rate) = rate else {
                assert_eq!(took, unpaced, "{qp_type:?}, rate {static_rate}");
                continue;
            };
            let bits = len as f64 * 8.0 * 8.0 * rounds as f64;
            let (least, took) = (bits / rate - 0.002, took.as_secs_f64());
            assert!(took >= least, "{qp_type:?}, rate {static_rate}: {took} < {least} s");
            let most = 1.1 * bits / rate + unpaced.as_secs_f64();
            assert!(took <= most, "{qp_type:?}, rate {static_rate}: {took} > {most} s");
        }
    }
}

#[test]
fn a_datagram_to_another_takes_nothing_of_a_paths_rate() {
    let mut t = Pair::new(1, QpOptions::ud());
    let (a, b) = t.ends();
    let mut sent = |static_rate: u8, n: u64| {
        let begin = t.now();
        for wr_id in 0..n {
            t.recv(b, wr_id, &[b.mr.sge(0, 4096 + 40)]);
            let mut dest = t.dest(a.qp, b.qp);
            dest.av.static_rate = static_rate;
            let (flags, sges) = (SendFlags::SIGNALED, &[a.mr.sge(0, 4096)]);
            let (op, ud) = (SendOp::Send, Some(dest));
            t.post_send(a.qp, &SendWr { wr_id, op, flags, sges, ud, xrc_srqn: 0 }).unwrap();
            t.run();
            t.sends(a);
            t.recvs(b);
        }
        t.now().as_nanos() - begin.as_nanos()
    };
    let free = sent(0, 1000);
    // 2 ms are spent at once; then it waits.
    assert!(sent(2, 1000) > 11_000_000);
    assert_eq!(sent(0, 1000), free);
    // Unused rate is not saved up.
    assert!(sent(2, 1000) > 9_000_000);
}

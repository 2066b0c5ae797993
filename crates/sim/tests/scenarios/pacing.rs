//! A limited rate (`ibv_modify_qp_rate_limit(3)`) beside everything else that holds sends back. Each scenario must come to rest:
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

//! A send slot is free when the completion that covers it was *polled* (S5.1).

use super::prelude::*;

/// Posts unsignaled WRITEs until one is refused; returns how many were not.
fn fill(t: &mut Pair) -> u64 {
    let (a, b) = t.ends();
    for i in 0.. {
        let op = SendOp::Write(b.mr.remote(0));
        match t.try_post(a, i, op, SendFlags::empty(), &[a.mr.sge(0, 10)]) {
            Ok(()) => assert!(i < 1000),
            Err(refused) => {
                assert_eq!(refused, PostSendError::Full);
                return i;
            }
        }
    }
    unreachable!()
}

#[test]
fn unsignaled_requests_alone_never_make_room() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let count = fill(&mut t);
    assert_eq!(count, u64::from(t.get(a.qp).init().cap.max_send_wr));
    t.run();
    assert_eq!(t.bytes(b.mr, 0, 10), t.bytes(a.mr, 0, 10), "all was done");
    assert_eq!(t.sent(a), []);
    assert_eq!(fill(&mut t), 0);
}

#[test]
fn a_polled_completion_covers_all_sends_before_it() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let op = SendOp::Write(b.mr.remote(0));
    for i in 0..9 {
        t.try_post(a, i, op, SendFlags::empty(), &[a.mr.sge(0, 10)]).unwrap();
    }
    t.post(a, 9, op, &[a.mr.sge(0, 10)]);
    let rest = fill(&mut t);
    t.run();
    assert_eq!(fill(&mut t), 0, "acknowledged is not polled");
    assert_eq!(t.sent(a), [(9, Success)]);
    assert_eq!(fill(&mut t), 10);
    assert_eq!(rest + 10, u64::from(t.get(a.qp).init().cap.max_send_wr));
}

#[test]
fn polling_one_of_several_frees_what_it_covers() {
    let (mut t, a, b) = rc(QpOptions::rc());
    for i in 0..u64::from(t.get(a.qp).init().cap.max_send_wr) {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 10)]);
    }
    t.run();
    assert_eq!(fill(&mut t), 0);
    assert_eq!(t.poll_some(a.send_cq, 3).len(), 3);
    assert_eq!(fill(&mut t), 3);
}

#[test]
fn an_error_makes_completions_of_all() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.kill(b.device);
    let count = fill(&mut t);
    t.to_state(a.qp, QpState::Err);
    assert_eq!(t.sent(a), (0..count).map(|i| (i, WrFlushErr)).collect::<Vec<_>>());
}

#[test]
fn reset_gives_all_slots_back() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let count = fill(&mut t);
    t.run();
    for end in [a, b] {
        t.to_state(end.qp, QpState::Reset);
    }
    let options = QpOptions::rc();
    t.connect((a.qp, &options), (b.qp, &options));
    assert_eq!(fill(&mut t), count);
}

#[test]
fn signal_all() {
    let (mut t, a, b) = rc(QpOptions { sq_sig_all: true, ..QpOptions::rc() });
    for i in 0..3 {
        let op = SendOp::Write(b.mr.remote(0));
        t.try_post(a, i, op, SendFlags::empty(), &[a.mr.sge(0, 10)]).unwrap();
    }
    t.run();
    assert_eq!(t.sent(a), [(0, Success), (1, Success), (2, Success)]);
}

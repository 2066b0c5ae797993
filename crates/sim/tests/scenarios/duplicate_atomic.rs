//! Atomics are executed once; a duplicate gets the answer of then (IBA 9.7.5.1.3).

use super::prelude::*;

#[test]
fn a_duplicate_request_adds_once() {
    for later in [0, 1, 8, 100] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.write(b.mr, 0, &5u64.to_ne_bytes());
        t.net.rule(move |p| match p.operation() {
            O::FetchAdd => Fate::Again(Duration::from_micros(later)),
            _ => Fate::Pass,
        });
        let at = b.mr.remote(0);
        for i in 0..4 {
            let add = SendOp::FetchAdd { at, add: 10 };
            t.post(a, i, add, &[a.mr.sge(i as usize * 8, 8)]);
        }
        t.run();
        assert_eq!(t.sent(a), [(0, Success), (1, Success), (2, Success), (3, Success)]);
        assert_eq!(t.word(b.mr, 0), 45);
        assert_eq!([0, 8, 16, 24].map(|o| t.word(a.mr, o)), [5, 15, 25, 35]);
    }
}

#[test]
fn a_lost_answer_is_given_again() {
    for lost in 0..4 {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.write(b.mr, 0, &5u64.to_ne_bytes());
        t.net.once(nth(lost, is(O::AtomicAck)), Fate::Drop);
        let at = b.mr.remote(0);
        for i in 0..4 {
            let op = match i % 2 {
                0 => SendOp::FetchAdd { at, add: 10 },
                // It succeeds once: a second execution would fail and return something else.
                _ => SendOp::CompareSwap { at, compare: if i == 1 { 15 } else { 110 }, swap: 100 },
            };
            t.post(a, i, op, &[a.mr.sge(i as usize * 8, 8)]);
        }
        t.run();
        assert_eq!(t.sent(a), [(0, Success), (1, Success), (2, Success), (3, Success)]);
        assert_eq!([0, 8, 16, 24].map(|o| t.word(a.mr, o)), [5, 15, 100, 110], "lost {lost}");
        assert_eq!(t.word(b.mr, 0), 100);
    }
}

#[test]
fn the_answer_is_remembered_while_others_change_the_word() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.write(b.mr, 0, &5u64.to_ne_bytes());
    t.net.once(is(O::AtomicAck), Fate::Drop);
    t.post(a, 1, SendOp::FetchAdd { at: b.mr.remote(0), add: 10 }, &[a.mr.sge(0, 8)]);
    t.run_for(Duration::from_millis(1));
    assert_eq!(t.word(b.mr, 0), 15);
    t.write(b.mr, 0, &77u64.to_ne_bytes());
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.word(a.mr, 0), 5);
    assert_eq!(t.word(b.mr, 0), 77);
}

//! ATOMIC WRITE: 8 bytes as a whole, answered by a READ response without data (IBA A19.3).

use super::prelude::*;

fn write(at: RemoteAddr, value: u64) -> SendOp {
    SendOp::AtomicWrite { at, data: Some(value.to_ne_bytes()) }
}

#[test]
fn the_word_is_written() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, write(b.mr.remote(8), 77), &[]);
    // The same from memory, in two pieces, and inline.
    let op = SendOp::AtomicWrite { at: b.mr.remote(16), data: None };
    t.post(a, 2, op, &[a.mr.sge(100, 3), a.mr.sge(200, 5)]);
    let inline = SendFlags::INLINE | SendFlags::SIGNALED;
    let op = SendOp::AtomicWrite { at: b.mr.remote(24), data: None };
    t.try_post(a, 3, op, inline, &[a.mr.sge(0, 8)]).unwrap();
    t.run();
    let done = t.sends(a);
    assert_eq!(done.iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(done.iter().all(|wc| (wc.status, wc.opcode) == (Success, WcOpcode::AtomicWrite)));
    assert_eq!(t.word(b.mr, 8), 77);
    let gathered = [t.bytes(a.mr, 100, 3), t.bytes(a.mr, 200, 5)].concat();
    assert_eq!(t.bytes(b.mr, 16, 8), gathered);
    assert_eq!(t.bytes(b.mr, 24, 8), t.bytes(a.mr, 0, 8));
    let answers = t.net.trace.count(b.device, O::ReadResponseOnly);
    assert_eq!((answers, t.net.trace.count(b.device, O::Ack)), (3, 0));
}

#[test]
fn it_is_executed_once_whatever_is_lost() {
    for lost in [O::AtomicWrite, O::ReadResponseOnly] {
        for n in 0..3 {
            let (mut t, a, b) = rc(QpOptions::rc());
            t.net.once(nth(n, is(lost)), Fate::Drop);
            for i in 0..3 {
                t.post(a, i, write(b.mr.remote(0), i), &[]);
            }
            t.run_for(Duration::from_millis(1));
            if lost == O::ReadResponseOnly {
                // The last one is executed by now: its repeat must not be.
                t.write(b.mr, 0, &99u64.to_ne_bytes());
            }
            t.run();
            assert_eq!(t.sent(a), [(0, Success), (1, Success), (2, Success)]);
            let expected = if lost == O::AtomicWrite { 2 } else { 99 };
            assert_eq!(t.word(b.mr, 0), expected, "lost {lost:?} {n}");
        }
    }
}

#[test]
fn an_ack_of_what_comes_later_does_not_answer_it() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::ReadResponseOnly), Fate::Drop);
    t.post(a, 1, write(b.mr.remote(0), 5), &[]);
    t.post(a, 2, SendOp::Write(b.mr.remote(100)), &[a.mr.sge(0, 10)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
    assert_eq!(t.counter(a.device, Counter::ImpliedNakSeqErr), 1);
}

#[test]
fn it_is_ordered_between_a_write_and_a_read() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    t.post(a, 2, write(b.mr.remote(0), 5), &[]);
    t.post(a, 3, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(50_000, 8)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success), (3, Success)]);
    assert_eq!(t.word(a.mr, 50_000), 5);
}

#[test]
fn no_more_are_outstanding_than_agreed() {
    let (mut t, a, b) =
        rc(QpOptions { max_rd_atomic: 2, max_dest_rd_atomic: 2, ..QpOptions::rc() });
    for i in 0..8 {
        t.post(a, i, write(b.mr.remote(8 * i as usize), i), &[]);
    }
    t.run();
    assert_eq!(t.sent(a).len(), 8);
    assert_eq!(t.state(b), QpState::Rts);
    let (mut t, a, b) = rc(QpOptions { max_rd_atomic: 0, ..QpOptions::rc() });
    t.post(a, 1, write(b.mr.remote(0), 1), &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, LocQpOpErr)]);
}

#[test]
fn what_is_refused() {
    let wrong_key = |b: End| RemoteAddr { rkey: b.mr.lkey, ..b.mr.remote(0) };
    for (at, status) in [
        (wrong_key as fn(End) -> RemoteAddr, RemAccessErr),
        (|b| b.mr.remote(b.mr.len), RemAccessErr),
        (|b| b.mr.remote(4), RemInvReqErr),
    ] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.post(a, 1, write(at(b), 1), &[]);
        t.run();
        assert_eq!(t.sent(a), [(1, status)]);
    }
    let (mut t, a, b) = rc(QpOptions { access: Access::REMOTE_READ, ..QpOptions::rc() });
    t.post(a, 1, write(b.mr.remote(0), 1), &[]);
    t.run();
    assert_eq!(t.sent(a), [(1, RemInvReqErr)]);
    for len in [0, 7, 9] {
        let (mut t, a, b) = rc(QpOptions::rc());
        let op = SendOp::AtomicWrite { at: b.mr.remote(0), data: None };
        t.post(a, 1, op, &[a.mr.sge(0, len)]);
        t.run();
        assert_eq!(t.sent(a), [(1, LocLenErr)]);
    }
}

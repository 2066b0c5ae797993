//! A fenced request starts after all earlier READs and atomics (S5.3; IBA 10.8.3.3).

use super::prelude::*;

const FENCED: SendFlags = SendFlags::FENCE.union(SendFlags::SIGNALED);

#[test]
fn it_sends_what_the_read_brought() {
    for lost in [None, Some(O::ReadRequest), Some(O::ReadResponseLast)] {
        let (mut t, a, b) = rc(QpOptions::rc());
        if let Some(lost) = lost {
            t.net.once(is(lost), Fate::Drop);
        }
        let there = t.bytes(b.mr, 0, 3000);
        t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
        t.try_post(a, 2, SendOp::Write(b.mr.remote(50_000)), FENCED, &[a.mr.sge(0, 3000)]).unwrap();
        t.run();
        assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
        assert_eq!(t.bytes(b.mr, 50_000, 3000), there, "lost {lost:?}");
    }
}

#[test]
fn it_sends_what_the_atomic_brought() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::FetchAdd { at: b.mr.remote(0), add: 1 }, &[a.mr.sge(0, 8)]);
    let was = t.word(b.mr, 0);
    t.try_post(a, 2, SendOp::Write(b.mr.remote(8)), FENCED, &[a.mr.sge(0, 8)]).unwrap();
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
    assert_eq!(t.word(b.mr, 8), was);
}

#[test]
fn without_a_fence_nothing_waits() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    t.post(a, 2, SendOp::Write(b.mr.remote(50_000)), &[a.mr.sge(3000, 100)]);
    assert_eq!(t.net.trace.count(a.device, O::WriteOnly), 1, "it left with the READ");
}

#[test]
fn it_does_not_wait_for_sends_and_writes() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
    t.try_post(a, 2, SendOp::Write(b.mr.remote(0)), FENCED, &[a.mr.sge(0, 100)]).unwrap();
    assert_eq!(t.net.trace.count(a.device, O::WriteOnly), 2);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
}

#[test]
fn requests_behind_a_fenced_one_wait_too() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
    t.try_post(a, 2, SendOp::Write(b.mr.remote(50_000)), FENCED, &[a.mr.sge(0, 100)]).unwrap();
    t.post(a, 3, SendOp::Write(b.mr.remote(60_000)), &[a.mr.sge(0, 100)]);
    assert_eq!(t.net.trace.count(a.device, O::WriteOnly), 0);
    t.run();
    assert_eq!(t.sent(a), [(1, Success), (2, Success), (3, Success)]);
}

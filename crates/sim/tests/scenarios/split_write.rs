//! Links that want packets of one length get a WRITE as a message for each packet, where the peer has taken one before.

use super::prelude::*;

const LEN: usize = 10_000;

fn options() -> QpOptions {
    QpOptions { batch: 65_000, ..QpOptions::rc() }
}

/// WRITEs `len` bytes to `at`; which packets went out, without repetitions of one kind.
fn write(t: &mut Pair, at: RemoteAddr, len: usize) -> Vec<O> {
    let a = t.a;
    t.net.trace.clear();
    t.post(a, 1, SendOp::Write(at), &[a.mr.sge(0, len)]);
    t.run();
    let sent = t.net.trace.iter().filter(|r| r.from == a.device);
    let mut kinds: Vec<_> = sent.map(|r| r.operation()).collect();
    kinds.dedup();
    kinds
}

const WHOLE: [O; 3] = [O::WriteFirst, O::WriteMiddle, O::WriteLast];

#[test]
fn after_one_that_the_peer_took_whole() {
    let (mut t, a, b) = rc(options());
    assert_eq!(write(&mut t, b.mr.remote(0), LEN), WHOLE);
    t.fill(a.mr, 7);
    assert_eq!(write(&mut t, b.mr.remote(0), LEN), [O::WriteOnly]);
    assert_eq!(t.bytes(b.mr, 0, LEN), t.bytes(a.mr, 0, LEN));
    // Beyond the covered range, then within the range that both have covered.
    assert_eq!(write(&mut t, b.mr.remote(LEN - 1000), LEN), WHOLE);
    assert_eq!(write(&mut t, b.mr.remote(LEN / 2), LEN), [O::WriteOnly]);
    assert_eq!(t.sent(a), [(1, Success); 4]);
    assert_eq!(t.bytes(b.mr, LEN / 2, LEN), t.bytes(a.mr, 0, LEN));
}

#[test]
fn not_on_links_to_which_it_makes_no_difference() {
    let (mut t, _, b) = rc(QpOptions::rc());
    for _ in 0..2 {
        assert_eq!(write(&mut t, b.mr.remote(0), LEN), WHOLE);
    }
}

#[test]
fn with_losses_like_any_other() {
    for lost in 0..10 {
        let (mut t, a, b) = rc(options());
        write(&mut t, b.mr.remote(0), LEN);
        t.fill(a.mr, 7);
        t.net.once(nth(lost, is(O::WriteOnly)), Fate::Drop);
        assert_eq!(write(&mut t, b.mr.remote(0), LEN), [O::WriteOnly]);
        assert_eq!(t.sent(a), [(1, Success); 2]);
        assert_eq!(t.bytes(b.mr, 0, LEN), t.bytes(a.mr, 0, LEN));
    }
}

#[test]
fn one_that_is_refused_writes_nothing() {
    let (mut t, a, b) = rc(options());
    write(&mut t, b.mr.remote(0), LEN);
    let end = b.mr.len - LEN;
    write(&mut t, b.mr.remote(end), LEN);
    let before = t.bytes(b.mr, 0, b.mr.len);
    t.fill(a.mr, 7);
    // It begins where one was taken, and ends outside.
    assert_eq!(write(&mut t, b.mr.remote(end + 5000), LEN), WHOLE);
    assert_eq!(t.sent(a), [(1, Success), (1, Success), (1, RemAccessErr)]);
    assert_eq!(t.bytes(b.mr, 0, b.mr.len), before);
}

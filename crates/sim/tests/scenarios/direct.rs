//! WRITEs and READs without a message come after earlier messages.

use super::prelude::*;

/// The number of messages with this operation that `a` has sent.
fn messages(t: &Pair, a: End, operation: O) -> usize {
    t.net.trace.count(a.device, operation)
}

/// 400 WRITEs of a program that keeps the queue full, behind an atomic that is in flight. Returns the number of them
/// that were messages.
fn stream(t: &mut Pair, a: End, b: End) -> usize {
    let at = b.mr.remote(8);
    t.post(a, 0, SendOp::FetchAdd { at: b.mr.remote(0), add: 1 }, &[a.mr.sge(0, 8)]);
    let (mut posted, mut done) = (0, 0);
    while done <= 400 {
        while posted < 400 && posted + 1 < done + 20 {
            posted += 1;
            t.post(a, posted, SendOp::Write(at), &[a.mr.sge(64, 1000)]);
        }
        t.run_for(Duration::from_nanos(500));
        for (wr_id, status) in t.sent(a) {
            assert_eq!((wr_id, status), (done, Success), "in order");
            done += 1;
        }
    }
    assert_eq!(t.bytes(a.mr, 64, 1000), t.bytes(b.mr, 8, 1000));
    messages(t, a, O::WriteOnly)
}

#[test]
fn a_stream_that_begins_with_messages_goes_on_without() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(1.0);
    let messages = stream(&mut t, a, b);
    assert!((1..=32).contains(&messages), "{messages}");
}

#[test]
fn a_stream_that_needs_messages_goes_on_with_them() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.do_directly(f64::MIN_POSITIVE);
    assert_eq!(stream(&mut t, a, b), 400);
}

//! Links that want packets of one length get a READ as a request for each packet, where the peer lets enough be outstanding.

use super::prelude::*;

const LEN: usize = 10_000;

fn options(depth: u8) -> QpOptions {
    QpOptions { batch: 65_000, max_rd_atomic: depth, max_dest_rd_atomic: depth, ..QpOptions::rc() }
}

/// READs `len` bytes; which kinds of responses came, without repetitions of one kind.
fn read(t: &mut Pair, len: usize) -> Vec<O> {
    let (a, b) = (t.a, t.b);
    t.net.trace.clear();
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, len)]);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!(t.bytes(a.mr, 0, len), t.bytes(b.mr, 0, len));
    let sent = t.net.trace.iter().filter(|r| r.from == b.device);
    let mut kinds: Vec<_> = sent.map(|r| r.operation()).collect();
    kinds.dedup();
    kinds
}

const WHOLE: [O; 3] = [O::ReadResponseFirst, O::ReadResponseMiddle, O::ReadResponseLast];

#[test]
fn responses_of_one_length() {
    let (mut t, ..) = rc(options(128));
    assert_eq!(read(&mut t, LEN), [O::ReadResponseOnly]);
    // Two are of one length in any case.
    assert_eq!(read(&mut t, 2000), [O::ReadResponseFirst, O::ReadResponseLast]);
}

#[test]
fn reads_are_not_split_where_the_peer_would_idle() {
    let (mut t, ..) = rc(options(16));
    assert_eq!(read(&mut t, LEN), WHOLE);
}

#[test]
fn not_on_links_to_which_it_makes_no_difference() {
    let (mut t, ..) = rc(QpOptions { batch: 0, ..options(128) });
    assert_eq!(read(&mut t, LEN), WHOLE);
}

#[test]
fn never_more_at_a_time_than_the_peer_agreed_to() {
    let (mut t, a, b) = rc(QpOptions { window: 1 << 20, mtu: Mtu::Mtu256, ..options(128) });
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 50_000)]);
    t.run_for(Duration::from_micros(100));
    let asked = t.net.trace.iter().filter(|r| r.operation() == O::ReadRequest).count();
    assert_eq!(asked, 128);
}

#[test]
fn with_losses_like_any_other() {
    for lost in 0..10 {
        for kind in [O::ReadRequest, O::ReadResponseOnly] {
            let (mut t, a, b) = rc(options(128));
            t.fill(b.mr, 7);
            t.net.once(nth(lost, is(kind)), Fate::Drop);
            read(&mut t, LEN);
            assert_eq!(t.counter(a.device, Counter::ReqCqeError), 0);
        }
    }
}

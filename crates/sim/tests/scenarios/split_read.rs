//! Links that want packets of one length, a few at a time, get a READ as a request for each two packets, where the peer lets enough
//! be outstanding.

use super::prelude::*;

const LEN: usize = 10_000;

/// A batch has 15 packets.
fn options(depth: u8) -> QpOptions {
    QpOptions { batch: 16_000, max_rd_atomic: depth, max_dest_rd_atomic: depth, ..QpOptions::rc() }
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
    const TWO: [O; 2] = [O::ReadResponseFirst, O::ReadResponseLast];
    assert_eq!(read(&mut t, LEN), [TWO; 5].concat());
    assert_eq!(read(&mut t, 3000), [&TWO[..], &[O::ReadResponseOnly]].concat());
    // Two are of one length in any case.
    assert_eq!(read(&mut t, 2000), TWO);
}

#[test]
fn reads_are_not_split_where_a_batch_has_many_packets() {
    let (mut t, ..) = rc(QpOptions { batch: 65_000, ..options(128) });
    assert_eq!(read(&mut t, LEN), WHOLE);
}

#[test]
fn reads_are_not_split_where_the_peer_would_idle() {
    let (mut t, ..) = rc(options(14));
    assert_eq!(read(&mut t, LEN), WHOLE);
}

#[test]
fn not_on_links_to_which_it_makes_no_difference() {
    let (mut t, ..) = rc(QpOptions { batch: 0, ..options(128) });
    assert_eq!(read(&mut t, LEN), WHOLE);
}

#[test]
fn never_more_at_a_time_than_the_peer_agreed_to() {
    let options = options(64);
    let (mut t, a, b) =
        rc(QpOptions { window: 1 << 20, mtu: Mtu::Mtu256, batch: 4_000, ..options });
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 50_000)]);
    t.run_for(Duration::from_micros(100));
    let asked = t.net.trace.iter().filter(|r| r.operation() == O::ReadRequest).count();
    assert_eq!(asked, 64);
}

#[test]
fn with_losses_like_any_other() {
    for lost in 0..5 {
        for kind in [O::ReadRequest, O::ReadResponseFirst, O::ReadResponseLast] {
            let (mut t, a, b) = rc(options(128));
            t.fill(b.mr, 7);
            t.net.once(nth(lost, is(kind)), Fate::Drop);
            read(&mut t, LEN);
            assert_eq!(t.counter(a.device, Counter::ReqCqeError), 0);
        }
    }
}

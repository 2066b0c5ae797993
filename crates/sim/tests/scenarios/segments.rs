//! Packets that stand for several of the path MTU, as the same-host link sends them; the other end may split at the MTU.

use super::prelude::*;

const MTU: usize = 1024;
const SIZES: [usize; 7] = [0, 1, 1024, 1025, 8192, 8193, 30_000];

/// Both ends, each with its own longest packet.
fn pair(segment: [u32; 2], options: QpOptions) -> (Pair, End, End) {
    let mut t = Pair::new(1, options);
    let (a, b) = t.ends();
    for (end, segment) in [a, b].into_iter().zip(segment) {
        t.set_segment(end.qp, segment);
    }
    (t, a, b)
}

/// A SEND, a WRITE and a READ of each size, whole.
fn exercise(t: &mut Pair, a: End, b: End) {
    for len in SIZES {
        for op in [SendOp::Send, SendOp::Write(b.mr.remote(0)), SendOp::Read(b.mr.remote(0))] {
            t.fill(a.mr, len as u64);
            t.fill(b.mr, 1 + len as u64);
            if takes_recv(&op) {
                t.recv(b, 1, &[b.mr.sge(0, 32 << 10)]);
            }
            t.post(a, 2, op, &[a.mr.sge(0, len)]);
            t.run();
            assert_eq!(t.sent(a), [(2, Success)], "{op:?} of {len} bytes");
            let recvs = t.recvs(b);
            assert!(recvs.iter().all(|wc| wc.byte_len == len as u32), "{recvs:?}");
            assert_eq!(recvs.len(), usize::from(takes_recv(&op)));
            assert!(t.bytes(a.mr, 0, len) == t.bytes(b.mr, 0, len), "{op:?} of {len} bytes");
        }
    }
}

#[test]
fn ends_may_use_different_links() {
    for segment in [[8192, 8192], [8192, 0], [0, 8192], [5000, 30_000], [100, 2048]] {
        let (mut t, a, b) = pair(segment, QpOptions::rc());
        exercise(&mut t, a, b);
        exercise(&mut t, b, a);
    }
}

#[test]
fn a_packet_takes_the_psns_that_it_stands_for() {
    let (mut t, a, b) = pair([8192, 8192], QpOptions::rc());
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 20_000)]);
    t.run();
    let first = QpOptions::rc().sq_psn;
    for (operation, at) in [(O::WriteFirst, 0), (O::WriteMiddle, 8), (O::WriteLast, 16)] {
        let sent = t.net.trace.iter().find(|r| r.headers.bth.opcode.operation == operation);
        assert_eq!(sent.map(|r| r.headers.bth.psn), Some(first.plus(at)), "{operation:?}");
    }
    // The next packet begins behind all of them.
    t.post(a, 2, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 1)]);
    t.run();
    let next = t.net.trace.iter().find(|r| r.headers.bth.opcode.operation == O::WriteOnly);
    assert_eq!(
        next.map(|r| r.headers.bth.psn),
        Some(first.plus(20_000_usize.div_ceil(MTU) as u32))
    );
}

#[test]
fn lost_late_and_twice() {
    for fate in
        [Fate::Drop, Fate::Delay(Duration::from_millis(1)), Fate::Again(Duration::from_millis(1))]
    {
        for n in 0..8 {
            for segment in [[8192, 8192], [8192, 0], [0, 8192]] {
                let (mut t, a, b) = pair(segment, QpOptions::rc());
                t.net.once(nth(n, |_| true), fate.clone());
                exercise(&mut t, a, b);
            }
        }
    }
}

#[test]
fn a_retry_may_begin_in_the_middle_of_a_segment() {
    for lost in 1..20 {
        // Sent packet by packet, and again by a link that takes more at once; and the other way.
        for (before, after) in [(0, 8192), (8192, 0), (8192, 3000)] {
            let (mut t, a, b) = pair([before, 0], QpOptions::rc());
            let psn = QpOptions::rc().sq_psn.plus(lost);
            t.net.rule(move |p| {
                // Everything from there on, once.
                let behind = p.headers.bth.psn.since(psn) >= 0 && p.operation() != O::Ack;
                if behind && p.headers.reth.is_none() { Fate::Drop } else { Fate::Pass }
            });
            t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 20_000)]);
            t.run_for(Duration::from_millis(1));
            t.net.clear_rules();
            t.set_segment(a.qp, after);
            t.run();
            assert_eq!(t.sent(a), [(1, Success)], "{lost}: {before}, then {after}");
            assert!(t.bytes(b.mr, 0, 20_000) == t.bytes(a.mr, 0, 20_000));
        }
    }
}

#[test]
fn unreliable_messages_are_whole_or_nothing() {
    for n in 0..3 {
        let (mut t, a, b) = pair([8192, 8192], QpOptions::uc());
        t.net.once(nth(n, |_| true), Fate::Drop);
        for message in 0..2 {
            t.recv(b, message, &[b.mr.sge(0, 32 << 10)]);
            t.post(a, message, SendOp::Send, &[a.mr.sge(0, 20_000)]);
        }
        t.run();
        assert_eq!(t.sent(a), [(0, Success), (1, Success)]);
        let recvs = t.recvs(b);
        assert_eq!(recvs.len(), 1, "message 0 lost its packet {n}");
        assert_eq!(recvs[0].byte_len, 20_000);
        assert!(t.bytes(b.mr, 0, 20_000) == t.bytes(a.mr, 0, 20_000));
    }
}

//! Scatter and gather: pieces of any size on both sides.

use super::prelude::*;

/// Splits of 3000 bytes, placed with gaps.
const SPLITS: [&[usize]; 6] = [
    &[3000],
    &[1, 2999],
    &[1023, 1, 1976],
    &[1024, 1024, 952],
    &[0, 1500, 0, 1500],
    &[2998, 1, 0, 1],
];

/// Elements with these lengths from `base` on, 5 bytes apart; and the bytes that lie there.
fn split(t: &Pair, end: End, base: usize, lens: &[usize]) -> (Vec<Sge>, Vec<u8>) {
    let mut at = base;
    let mut sges = Vec::new();
    let mut bytes = Vec::new();
    for &len in lens {
        sges.push(end.mr.sge(at, len));
        bytes.extend(t.bytes(end.mr, at, len));
        at += len + 5;
    }
    (sges, bytes)
}

#[test]
fn sends() {
    for from in SPLITS {
        for to in SPLITS {
            let (mut t, a, b) = rc(QpOptions::rc());
            let (sges, sent) = split(&t, a, 100, from);
            let (recv, _) = split(&t, b, 200, to);
            t.recv(b, 1, &recv);
            t.post(a, 2, SendOp::Send, &sges);
            t.run();
            assert_eq!(t.sent(a), [(2, Success)]);
            assert_eq!(t.received(b), [(1, Success)]);
            assert_eq!(split(&t, b, 200, to).1, sent, "{from:?} to {to:?}");
        }
    }
}

#[test]
fn writes_and_reads() {
    for lens in SPLITS {
        let (mut t, a, b) = rc(QpOptions::rc());
        let (sges, bytes) = split(&t, a, 100, lens);
        t.post(a, 1, SendOp::Write(b.mr.remote(77)), &sges);
        t.run();
        assert_eq!(t.bytes(b.mr, 77, 3000), bytes);
        let there = t.bytes(b.mr, 50_000, 3000);
        t.post(a, 2, SendOp::Read(b.mr.remote(50_000)), &sges);
        t.run();
        assert_eq!(split(&t, a, 100, lens).1, there);
        assert_eq!(t.sent(a), [(1, Success), (2, Success)]);
    }
}

#[test]
fn nothing_is_written_between_and_behind_the_pieces() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let mut expected = t.bytes(b.mr, 0, 4000);
    let sent = t.bytes(a.mr, 0, 2100);
    expected[10..1010].copy_from_slice(&sent[..1000]);
    expected[1020..2020].copy_from_slice(&sent[1000..2000]);
    expected[2030..2130].copy_from_slice(&sent[2000..]);
    t.recv(b, 1, &[b.mr.sge(10, 1000), b.mr.sge(1020, 1000), b.mr.sge(2030, 1000)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 2100)]);
    t.run();
    assert_eq!(t.recvs(b)[0].byte_len, 2100);
    assert_eq!(t.bytes(b.mr, 0, 4000), expected);
}

#[test]
fn an_atomic_may_be_scattered() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.write(b.mr, 0, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let sges = [a.mr.sge(0, 3), a.mr.sge(10, 5)];
    t.post(a, 1, SendOp::FetchAdd { at: b.mr.remote(0), add: 1 }, &sges);
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    assert_eq!((t.bytes(a.mr, 0, 3), t.bytes(a.mr, 10, 5)), (vec![1, 2, 3], vec![4, 5, 6, 7, 8]));
}

//! A SEND that arrives twice is received once (IBA 9.7.5.1.3), and is acknowledged again.

use super::prelude::*;

#[test]
fn every_packet_twice() {
    for later in [0, 1, 6, 50, 1000] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.net.rule(move |p| match p.operation() {
            O::Ack => Fate::Pass,
            _ => Fate::Again(Duration::from_micros(later)),
        });
        for i in 0..3 {
            t.recv(b, i, &[b.mr.sge(i as usize * 4096, 3000)]);
            t.post(a, 10 + i, SendOp::SendImm(i as u32), &[a.mr.sge(i as usize * 3000, 3000)]);
        }
        t.recv(b, 3, &[b.mr.sge(50_000, 3000)]);
        let untouched = t.bytes(b.mr, 50_000, 3000);
        t.run();
        assert_eq!(t.sent(a), [(10, Success), (11, Success), (12, Success)]);
        let recvs = t.recvs(b);
        assert_eq!(
            recvs.iter().map(|wc| (wc.wr_id, wc.imm)).collect::<Vec<_>>(),
            [(0, 0), (1, 1), (2, 2)]
        );
        for i in 0..3 {
            assert_eq!(t.bytes(b.mr, i * 4096, 3000), t.bytes(a.mr, i * 3000, 3000));
        }
        assert_eq!(t.bytes(b.mr, 50_000, 3000), untouched);
    }
}

#[test]
fn a_duplicate_ack_means_nothing() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.rule(|p| match p.operation() {
        O::Ack => Fate::Again(Duration::from_micros(2)),
        _ => Fate::Pass,
    });
    for i in 0..4 {
        t.post(a, i, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 3000)]);
        t.run_for(Duration::from_micros(11));
    }
    t.run();
    assert_eq!(t.sent(a), (0..4).map(|i| (i, Success)).collect::<Vec<_>>());
    assert_eq!(t.counter(a.device, Counter::Retransmitted), 0);
}

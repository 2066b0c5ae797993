//! A peer sends anything, with a right ICRC: connections may fail, nothing else may.

use super::prelude::*;
use anyverbs_sim::link::Corruption;

/// Traffic over a link that mutates packets; returns how many were delivered damaged.
fn storm(seed: u64, options: QpOptions) {
    let mut t = Pair::new(seed, QpOptions { retry_cnt: 2, timeout: 8, ..options });
    let (a, b) = t.ends();
    t.net.default_link = Link {
        corrupt: 0.1,
        corruption: Corruption::Mutated,
        duplicate: 0.05,
        reorder: 0.05,
        ..Link::default()
    };
    // Regions that no key names lie around the one that the peers use.
    let guards = [a, b].map(|end| {
        let pd = t.pd(end.device);
        let guard = t.mr(end.device, pd, 8192, Access::empty());
        t.fill(guard, 9);
        (guard, t.bytes(guard, 0, 8192))
    });
    let reliable = options.qp_type == QpType::Rc;
    let mut posted = [0u64; 2];
    for round in 0..20u64 {
        for (i, (end, peer)) in [(a, b), (b, a)].into_iter().enumerate() {
            let at = peer.mr.remote(round as usize * 8);
            let op = match (round % 8, options.qp_type) {
                (0..3, _) | (_, QpType::Ud) => SendOp::SendImm(round as u32),
                (3 | 4, _) => SendOp::Write(at),
                (5, _) if reliable => SendOp::Read(at),
                (6, _) if reliable => SendOp::FetchAdd { at, add: 1 },
                _ => SendOp::WriteImm(at, round as u32),
            };
            let len = if op.is_atomic() { 8 } else { (round as usize * 331) % 4000 };
            t.recv(end, round, &[end.mr.sge(64 << 10, 8192)]);
            t.post(end, round, op, &[end.mr.sge(32 << 10, len)]);
            posted[i] += 1;
        }
        t.run_for(Duration::from_micros(30));
    }
    t.run_for(Duration::from_secs(20));
    for (end, posted) in [(a, posted[0]), (b, posted[1])] {
        // Exactly once, in order, and after the first error only flushes.
        let sent = t.sent(end);
        assert_eq!(sent.iter().map(|s| s.0).collect::<Vec<_>>(), (0..posted).collect::<Vec<_>>());
        let first_error = sent.iter().position(|s| s.1 != Success).unwrap_or(sent.len());
        assert!(sent.iter().skip(first_error + 1).all(|s| s.1 == WrFlushErr), "{sent:?}");
        t.to_state(end.qp, QpState::Err);
        let ids: Vec<_> = t.received(end).iter().map(|r| r.0).collect();
        assert_eq!(ids, (0..posted).collect::<Vec<_>>());
    }
    for (guard, bytes) in guards {
        assert_eq!(t.bytes(guard, 0, 8192), bytes);
    }
}

#[test]
fn mutated_packets_on_rc() {
    for seed in 0..150 {
        storm(seed, QpOptions::rc());
    }
}

#[test]
fn mutated_packets_on_uc() {
    for seed in 0..100 {
        storm(seed, QpOptions::uc());
    }
}

#[test]
fn mutated_packets_on_ud() {
    for seed in 0..100 {
        storm(seed, QpOptions::ud());
    }
}

//! Short queues in front of a slow network.

use super::*;

/// Datagrams of so many queue pairs, each of which sends some: `wanted` of them are lost.
fn lost(name: &str, script: &str, (queue_pairs, each): (usize, u32), wanted: u64) {
    with(&format!("queues::{name}"), script, &[], || {
        let b = Endpoint::new(QpType::Ud);
        b.connect(b.address());
        let dst = Buffer::new(&b.pd, 64);
        let all = queue_pairs as u64 * u64::from(each);
        (0..all).for_each(|_| b.recv(0, &[dst.sge(0, 64)]));
        let senders: Vec<_> = (0..queue_pairs)
            .map(|_| {
                let a = Endpoint::new(QpType::Ud);
                a.connect(b.address());
                let src = Buffer::new(&a.pd, 64);
                (a, src)
            })
            .collect();
        for n in 0..each {
            for (a, src) in &senders {
                let to = a.dest(b.address());
                a.send_to(0, SendOp::SendImm(n), &[src.sge(0, 8)], Some(to));
                a.poll(1);
            }
        }
        // Packets that wait count as well.
        assert_eq!(injected(&b.context), all);
        // Packets that wait leave when their queue pair ends.
        drop(senders);
        b.poll((all - wanted) as usize);
        assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    });
}

// At 1 kb/s each packet takes half a second, so none leaves meanwhile.

#[test]
fn a_burst_of_one_queue_pair_finds_a_queue_of_one_full() {
    let name = "a_burst_of_one_queue_pair_finds_a_queue_of_one_full";
    lost(name, "limit packets to 1kb/s queue 1", (1, 16), 15);
}

#[test]
fn a_burst_of_many_queue_pairs_finds_a_queue_of_one_full() {
    let name = "a_burst_of_many_queue_pairs_finds_a_queue_of_one_full";
    lost(name, "limit packets to 1kb/s queue 1", (16, 1), 15);
}

#[test]
fn queue_pairs_that_share_a_rate_share_its_queue() {
    let name = "queue_pairs_that_share_a_rate_share_its_queue";
    lost(name, "limit packets to 1kb/s queue 5", (4, 4), 11);
}

#[test]
fn a_queue_pair_that_a_rule_names_has_a_queue_of_its_own() {
    // The first queue pair is the receiver. Each of the others but one has one packet.
    let name = "a_queue_pair_that_a_rule_names_has_a_queue_of_its_own";
    let script = "on qp 2: limit packets to 1kb/s queue 1; limit packets to 1kb/s queue 2";
    lost(name, script, (3, 2), 1 + 2);
}

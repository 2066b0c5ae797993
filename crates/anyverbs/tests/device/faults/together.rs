//! Several rules about one packet.

use super::*;

/// Sends datagrams of eight bytes, each with its number, and gives those that come.
fn numbers(a: &Endpoint, b: &Endpoint, sent: std::ops::Range<u32>, come: usize) -> Vec<u32> {
    let [src, dst] = [a, b].map(|e| Buffer::new(&e.pd, 64));
    let to = a.dest(b.address());
    (0..come).for_each(|_| b.recv(0, &[dst.sge(0, 64)]));
    for n in sent {
        a.send_to(0, SendOp::SendImm(n), &[src.sge(0, 8)], Some(to));
        a.poll(1);
    }
    b.poll(come).iter().map(|wc| wc.imm).collect()
}

#[test]
fn packets_are_late_and_lost_and_there_twice() {
    let script = "delay packets by 50ms\ndrop packets 2 to 3\nduplicate packet 5\ndrop packet 5";
    with("together::packets_are_late_and_lost_and_there_twice", script, &[], || {
        let (a, b) = pair(QpType::Ud);
        let begin = Instant::now();
        assert_eq!(numbers(&a, &b, 1..8, 4), [1, 4, 6, 7]);
        assert!(begin.elapsed() >= Duration::from_millis(50));
        // Each that comes is late, and the others are lost, and no more.
        assert_eq!(injected(&a.context), 7);
    });
}

#[test]
fn a_packet_that_is_late_may_be_there_twice() {
    let script = "duplicate packet 2; delay packets by 20ms to 30ms; limit packets to 1Gb/s";
    with("together::a_packet_that_is_late_may_be_there_twice", script, &[], || {
        let (a, b) = pair(QpType::Ud);
        assert_eq!(numbers(&a, &b, 1..4, 4), [1, 2, 2, 3]);
        assert_eq!(injected(&a.context), 7);
    });
}

/// A line of 100 kb/s with 100 ms to the other end.
fn send_by_a_slow_line(name: &str, script: &str) {
    with(&format!("together::{name}"), script, &[], || {
        let (a, b) = pair(QpType::Ud);
        let begin = Instant::now();
        assert_eq!(numbers(&a, &b, 0..16, 16), (0..16).collect::<Vec<_>>());
        // 66 bytes make 5280 us each.
        let took = begin.elapsed();
        assert!(took >= Duration::from_micros(100_000 + 16 * 5280), "{took:?}");
    });
}

#[test]
fn a_line_has_a_rate_and_a_latency() {
    let script = "limit packets to 100kb/s; delay packets by 100ms";
    send_by_a_slow_line("a_line_has_a_rate_and_a_latency", script);
}

#[test]
fn a_line_has_a_latency_and_a_rate() {
    let script = "delay packets by 100ms; limit packets to 100kb/s";
    send_by_a_slow_line("a_line_has_a_latency_and_a_rate", script);
}

#[test]
fn the_queue_of_a_line_has_no_packets_that_are_late() {
    let script = "limit packets to 1Mb/s queue 2; delay packets by 500ms";
    with("together::the_queue_of_a_line_has_no_packets_that_are_late", script, &[], || {
        let (a, b) = pair(QpType::Ud);
        let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 64));
        let to = a.dest(b.address());
        for n in 0..5 {
            b.recv(0, &[dst.sge(0, 64)]);
            a.send_to(0, SendOp::SendImm(n), &[src.sge(0, 8)], Some(to));
            a.poll(1);
            // The line is free again, and the packet is on its way.
            std::thread::sleep(Duration::from_millis(20));
        }
        assert_eq!(b.poll(5).iter().map(|wc| wc.imm).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    });
}

#[test]
fn rules_about_received_packets_add_up() {
    let script = "on qp 2: mark received packets; on qp 2: duplicate received packets; \
                  on qp 2: rnr received send packet 1; on qp 2: drop received packet 3";
    with("together::rules_about_received_packets_add_up", script, &[], || {
        let (a, b) = pair(QpType::Rc);
        send_through(&a, &b);
        let counters = a.context.counters().unwrap();
        assert_eq!(counters.read(Counter::RnrNakSent), 1);
        assert!(counters.read(Counter::EcnMarked) >= 30);
        assert!(counters.read(Counter::DuplicateRequest) >= 29);
    });
}

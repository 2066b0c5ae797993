//! Lost packets on ways that lose none by themselves. The probe timeout finds them, and no ACK timeout has to.

use super::*;

/// An ACK timeout that never comes.
const NEVER: u8 = 0;

#[test]
fn a_lost_packet_within_a_process_needs_no_ack_timeout() {
    let name = "lossless::a_lost_packet_within_a_process_needs_no_ack_timeout";
    with(name, "on qp 1: drop packets 2 to 4; on qp 2: drop packet 5", &[], || {
        let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
        a.connect_with(b.address(), NEVER, 7);
        b.connect_with(a.address(), NEVER, 7);
        send_through(&a, &b);
        let counters = a.context.counters().unwrap();
        assert_eq!(injected(&a.context), 4);
        assert!(counters.read(Counter::Retransmitted) > 0);
    });
}

#[test]
fn a_packet_that_the_peers_script_loses_needs_no_ack_timeout() {
    let name = "lossless::a_packet_that_the_peers_script_loses_needs_no_ack_timeout";
    with(name, "", &[], || {
        for script in
            ["drop received packets 1 to 2; drop 2% of received packets", "drop 2% of packets"]
        {
            let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", script)]);
            let e = Endpoint::new(QpType::Rc);
            let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
            let remote = peer.connect_with(&e, &dst, NEVER);
            exercise(&e, &src, &dst, remote);
            let counters = e.context.counters().unwrap();
            assert!(counters.read(Counter::Retransmitted) > 0);
            assert!(counters.read(Counter::ShmSentPkts) > 0);
        }
    });
}

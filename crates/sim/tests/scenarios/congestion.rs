//! A congested network marks packets. Their receiver notifies the sender, which keeps less in flight (IBA A17.9.3).

use super::prelude::*;

/// Packets of a message of 100 KB that leave before the first answer.
fn in_flight(t: &mut Pair) -> usize {
    let (a, b) = t.ends();
    t.net.trace.clear();
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100_000)]);
    let sent = t.net.trace.iter().filter(|r| r.from == a.device).count();
    t.run();
    assert_eq!(t.sent(a), [(1, Success)]);
    sent
}

#[test]
fn marked_packets_make_the_window_smaller() {
    let (mut t, a, b) = rc(QpOptions { window: 64 << 10, ..QpOptions::rc() });
    let whole = in_flight(&mut t);
    t.net.rule(move |p| if p.from == a.device { Fate::Mark } else { Fate::Pass });
    for _ in 0..4 {
        in_flight(&mut t);
    }
    assert!(in_flight(&mut t) < whole);
    let notified = t.counter(a.device, Counter::CnpHandled);
    assert!(notified > 0);
    assert_eq!(t.counter(b.device, Counter::CnpSent), notified);
    assert_eq!(t.counter(a.device, Counter::Retransmitted), 0);
    // Many packets, few notifications.
    let packets = t.net.trace.iter().filter(|r| r.from == a.device).count();
    assert!(t.net.trace.count(b.device, O::Cnp) * 8 < packets);

    t.net.clear_rules();
    for _ in 0..50 {
        in_flight(&mut t);
    }
    assert_eq!(in_flight(&mut t), whole);
}

/// A switch marks because its queue is long, so answers take long as well.
#[test]
fn marks_are_no_reason_to_send_again() {
    let probe_after = Some(Duration::from_millis(8));
    let (mut t, a, b) = rc(QpOptions { window: 64 << 10, probe_after, ..QpOptions::rc() });
    let link = Link { delay: Duration::from_millis(1), ..Link::default() };
    t.net.set_link(a.device, b.device, link.clone());
    t.net.set_link(b.device, a.device, link);
    t.net.rule(move |p| if p.from == a.device { Fate::Mark } else { Fate::Pass });
    for n in 0..8 {
        t.post(a, n, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 60_000)]);
    }
    t.run();
    assert_eq!(t.sent(a), [0, 1, 2, 3, 4, 5, 6, 7].map(|n| (n, Success)));
    assert!(t.counter(a.device, Counter::CnpHandled) > 0);
    assert_eq!(t.counter(a.device, Counter::Retransmitted), 0);
}

#[test]
fn notifications_of_others_count_for_nothing() {
    let (mut t, a, b) = rc(QpOptions::rc());
    let stranger = t.device();
    let cnp = |t: &Pair| {
        let opcode = Opcode::new(Service::Cnp, O::Cnp);
        Headers::new(Bth::new(opcode, t.get(a.qp).qpn(), Psn::new(0)))
    };
    let headers = cnp(&t);
    t.inject(stranger, a.device, headers, &[0; 16]);
    assert_eq!(t.counter(a.device, Counter::CnpHandled), 0);
    assert_eq!(t.counter(a.device, Counter::DropForeign), 1);
    let headers = cnp(&t);
    t.inject(b.device, a.device, headers, &[0; 16]);
    assert_eq!(t.counter(a.device, Counter::CnpHandled), 1);
}

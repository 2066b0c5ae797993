//! Packets of another partition are dropped and counted (IBA 9.6.1.2.3, 10.9.3).

use super::prelude::*;
use anyverbs_proto::qp::drops::DropReason;

/// Sends the first packet with another P_Key.
fn with_pkey(options: QpOptions, pkey: u16) -> (Pair, End, End) {
    let mut t = Pair::new(1, options);
    let (a, b) = t.ends();
    let mut done = false;
    t.net.rule(move |p| {
        if done || p.from != a.device {
            return Fate::Pass;
        }
        done = true;
        let mut headers = *p.headers;
        headers.bth.pkey = PKey(pkey);
        Fate::Replace(emit(headers, p.payload))
    });
    t.recv(b, 1, &[b.mr.sge(0, 300)]);
    t.post(a, 2, SendOp::Send, &[a.mr.sge(0, 100)]);
    (t, a, b)
}

#[test]
fn another_partition() {
    for pkey in [0x8001, 0x0001, 0xfffe, 0] {
        let (mut t, a, b) = with_pkey(QpOptions::rc(), pkey);
        t.run();
        assert_eq!(t.counter(b.device, Counter::DropPkey), 1, "{pkey:#x}");
        // On a reliable connection this is a loss.
        assert_eq!(t.sent(a), [(2, Success)]);
        assert_eq!(t.received(b), [(1, Success)]);
        assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 1);

        for options in [QpOptions::uc(), QpOptions::ud()] {
            let (mut t, _, b) = with_pkey(options, pkey);
            t.run();
            assert_eq!(t.counter(b.device, Counter::DropPkey), 1, "{pkey:#x}");
            assert_eq!(t.received(b), []);
            let drops = t.get(b.qp).drops(DropReason::PKey).map(|drops| (drops.count, drops.pkeys));
            let is_datagram = options.qp_type == QpType::Ud;
            assert_eq!(drops, is_datagram.then_some((1, [PKey::DEFAULT, PKey(pkey)])));
        }
    }
}

#[test]
fn a_limited_member_of_ours_is_welcome() {
    for options in [QpOptions::rc(), QpOptions::uc(), QpOptions::ud()] {
        let (mut t, _, b) = with_pkey(options, 0x7fff);
        t.run();
        assert_eq!(t.received(b), [(1, Success)]);
    }
}

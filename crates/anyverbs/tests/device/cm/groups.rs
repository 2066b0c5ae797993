//! Multicast groups.

use anyverbs::cm::*;
use anyverbs::*;

use super::*;
use crate::endpoint::Buffer;

/// A datagram id at an address of the loopback, with a queue pair that can receive.
struct Member {
    node: Node,
    buffer: Buffer,
}

impl Member {
    fn new(ip: &str) -> Self {
        let mut node = Node::new(PortSpace::Udp, QpType::Ud);
        node.id.bind_addr(&at(ip, 0)).unwrap();
        node.attach(QpType::Ud);
        let buffer = Buffer::new(&node.e().pd, 256);
        for i in 0..4 {
            node.e().recv(i, &[buffer.sge(0, 128)]);
        }
        Self { node, buffer }
    }

    fn join(&self, group: &Address, send_only: bool) -> UdEvent {
        self.node.id.join(&Join { group: *group, send_only, cookie: 77 }).unwrap();
        let event = self.node.expect(EventKind::MulticastJoin);
        assert_eq!(event.join_cookie, 77);
        match event.param {
            EventParam::Ud(ud) => ud,
            other => panic!("{other:?}"),
        }
    }

    fn say(&self, to: &UdEvent, text: &[u8]) {
        let e = self.node.e();
        let ah = e.pd.create_ah(&to.ah).unwrap();
        self.buffer.write(128, text);
        let sges = [self.buffer.sge(128, text.len())];
        e.send_to(9, SendOp::Send, &sges, Some(ah.dest(to.qpn, to.qkey)));
        let sent = e.poll(1);
        assert_eq!((sent[0].wr_id, sent[0].status), (9, WcStatus::Success));
    }

    fn hears(&self, text: &[u8]) {
        let wcs = self.node.e().poll(1);
        assert_eq!(wcs[0].status, WcStatus::Success);
        assert_eq!(self.buffer.read(40, text.len()), text);
        self.node.e().recv(1, &[self.buffer.sge(0, 128)]);
    }
}

#[test]
fn a_member_gets_the_groups_messages() {
    for (ip, group, gid) in
        [("127.0.0.1", "239.7.7.1", "::ffff:239.7.7.1"), ("::1", "ff15::7:7:1", "ff15::7:7:1")]
    {
        let group = at(group, 0);
        let (hearer, speaker) = (Member::new(ip), Member::new(ip));
        let heard = hearer.join(&group, false);
        assert_eq!(heard.ah.dgid, Gid(gid.parse::<std::net::Ipv6Addr>().unwrap().octets()));
        assert_eq!((heard.qpn, heard.qkey), (Qpn::MULTICAST, QKey(0x0123_4567)));
        // A member that only sends gets nothing.
        let to = speaker.join(&group, true);
        speaker.say(&to, b"one");
        hearer.hears(b"one");
        // Joined twice, left once: still there.
        hearer.join(&group, false);
        hearer.node.id.leave(&group).unwrap();
        speaker.say(&to, b"two");
        hearer.hears(b"two");
        hearer.node.id.leave(&group).unwrap();
        assert_eq!(hearer.node.id.leave(&group).unwrap_err().errno(), libc::EADDRNOTAVAIL);
        speaker.say(&to, b"three");
        // The queue pair is in no group any more: it can go.
        hearer.node.e().qp.destroy().unwrap();
        speaker.node.id.leave(&group).unwrap();
    }
}

#[test]
fn joins_that_cannot_be_are_refused() {
    let join = |group: &str| Join { group: at(group, 0), send_only: false, cookie: 0 };
    let einval = |id: &Id, group: &str| {
        assert_eq!(id.join(&join(group)).unwrap_err().errno(), libc::EINVAL);
    };
    let connected = Node::tcp();
    connected.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    einval(&connected.id, "239.7.7.2");
    let wildcard = Node::new(PortSpace::Udp, QpType::Ud);
    wildcard.id.bind_addr(&at("0.0.0.0", 0)).unwrap();
    einval(&wildcard.id, "239.7.7.2");
    let member = Member::new("127.0.0.1");
    einval(&member.node.id, "127.0.0.1");
    // An event of a group that was left is not read any more; nor does a queue pair enter it.
    member.node.id.join(&join("239.7.7.2")).unwrap();
    member.node.id.leave(&at("239.7.7.2", 0)).unwrap();
    assert!(is_quiet(&member.node.channel));
    // A queue pair that cannot enter fails the join.
    member.node.e().qp.destroy().unwrap();
    member.node.id.join(&join("239.7.7.2")).unwrap();
    let event = expect(&member.node.channel, EventKind::MulticastError);
    assert_eq!(event.status, -libc::EINVAL);
}

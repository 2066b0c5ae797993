//! Extended reliable connections between two processes: each has an initiator, a target and an SRQ, and both send at once.

use anyverbs::*;

use crate::endpoint::*;
use crate::same_host::Peer;
use crate::xrc::set_up;

/// Lengths of messages, around the path MTU of 1024 and the longest payload in a ring.
const LENGTHS: [usize; 9] = [1, 1024, 1025, 8192, 8193, 32 << 10, (32 << 10) + 1, 100_000, AREA];
const AREA: usize = 256 << 10;
/// Places in a process's memory: what it sends, reads and receives, and what it offers.
const SOURCE: usize = 0;
const TAKEN: usize = AREA;
const RECEIVED: usize = 2 * AREA;
const OFFERED: usize = 3 * AREA;

/// Polls one completion, which is a success.
fn one(cq: &Cq) -> Wc {
    let begin = std::time::Instant::now();
    let mut wcs = [Wc::default()];
    while cq.poll(&mut wcs).unwrap() == 0 {
        assert!(begin.elapsed().as_secs() < 20, "no completion");
    }
    assert_eq!(wcs[0].status, WcStatus::Success);
    wcs[0]
}

/// In a peer process: connects with the other, then sends, writes and reads messages of all lengths.
pub(crate) fn talk() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [send_cq, recv_cq] = [(); 2].map(|()| context.create_cq(64, None, 0, 0).unwrap());
    let xrcd = context.open_xrcd(XrcdInitAttr::default()).unwrap();
    let init = XrcSendInitAttr { send_cq: &send_cq, cap: CAP, sq_sig_all: true, cookie: 0 };
    let initiator = context.create_xrc_send_qp(&pd, &init).unwrap();
    let target = xrcd.create_qp(0).unwrap();
    let srq_init = SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 };
    let srq = xrcd.create_srq(&pd, &recv_cq, &srq_init).unwrap();
    let buffer = Buffer::new(&pd, 4 * AREA);
    let offered = buffer.remote(OFFERED);
    let numbers = [
        initiator.qpn().get().into(),
        target.qpn().get().into(),
        srq.number().unwrap().into(),
        offered.va,
        offered.rkey.into(),
    ];
    println!("@ {}", numbers.map(|n: u64| n.to_string()).join(" "));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let theirs: Vec<u64> = line.split(' ').skip(1).map(|n| n.trim().parse().unwrap()).collect();
    let [their_initiator, their_target, srqn, va, rkey] = theirs[..] else { panic!("{line}") };
    set_up(&target, &context, Qpn::new(their_initiator as u32));
    set_up(&initiator, &context, Qpn::new(their_target as u32));
    println!("@ connected");
    std::io::stdin().read_line(&mut line).unwrap();

    let remote = RemoteAddr { va, rkey: rkey as u32 };
    for (i, len) in LENGTHS.into_iter().enumerate() {
        let data = pattern(len, i as u8);
        buffer.write(SOURCE, &data);
        srq.post_recv(&[RecvWr { wr_id: 0, sges: &[buffer.sge(RECEIVED, AREA)] }]).unwrap();
        for (op, at) in
            [(SendOp::Send, SOURCE), (SendOp::Write(remote), SOURCE), (SendOp::Read(remote), TAKEN)]
        {
            let sges = [buffer.sge(at, len)];
            let (flags, xrc_srqn) = (SendFlags::SIGNALED, srqn as u32);
            initiator
                .post_send(&[SendWr { wr_id: 1, op, flags, sges: &sges, ud: None, xrc_srqn }])
                .unwrap();
        }
        for _ in 0..3 {
            one(&send_cq);
        }
        assert_eq!(one(&recv_cq).byte_len as usize, len);
        assert!(buffer.read(RECEIVED, len) == data, "a SEND of {len} bytes");
        assert!(buffer.read(TAKEN, len) == data, "a WRITE and a READ of {len} bytes");
    }
    let sent = context.counters().unwrap().read(Counter::ShmSentPkts);
    println!("@ {}", if sent > 0 { "by ring" } else { "by udp" });
    std::io::stdin().read_line(&mut line).unwrap();
}

fn long_messages(variables: &[(&str, &str)], way: &str) {
    let [mut a, mut b] = [(); 2].map(|()| Peer::spawn("xrc between processes", variables));
    let (of_a, of_b) = (a.hear(), b.hear());
    a.say(&of_b);
    b.say(&of_a);
    for peer in [&mut a, &mut b] {
        assert_eq!(peer.hear(), "@ connected");
    }
    for peer in [&mut a, &mut b] {
        peer.say("begin");
    }
    for peer in [&mut a, &mut b] {
        assert_eq!(peer.hear(), format!("@ {way}"));
    }
}

#[test]
fn long_messages_by_ring() {
    // WRITE and READ as messages, then as copies without one.
    long_messages(&[("ANYVERBS_DIRECT", "0")], "by ring");
    long_messages(&[], "by ring");
}

/// A target tells of the mark by the ring, and looks the SRQ of the request up behind that.
#[test]
fn marked_messages_by_ring() {
    long_messages(&[("ANYVERBS_FAULTS", "mark received packets")], "by ring");
}

#[test]
fn long_messages_by_udp() {
    long_messages(&[("ANYVERBS_SHM", "0")], "by udp");
}

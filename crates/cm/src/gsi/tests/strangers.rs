//! Datagrams of a socket that is no device: what QP1 takes of them.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyverbs_locks::{FastMutex, rank};
use anyverbs_net::Datagram;
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::disconnect::Dreq;
use anyverbs_proto::cm::message::rej::Rej;
use anyverbs_proto::cm::message::req::Req;
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::types::{PKey, Psn, QKey, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, Packet};
use anyverbs_testing::in_own_process;
use anyverbs_transport::progress::Management as _;
use anyverbs_transport::qp::owed::Debt;

use super::{Device, Peer, TIMEOUT, gsi, ip, service, turn};
use crate::gsi::Incoming;

/// Those of a MAD to the connection manager.
fn headers() -> Headers {
    Headers {
        deth: Some(Deth { qkey: QKey::GSI, src_qpn: Qpn::GSI }),
        ..Headers::new(Bth::new(crate::gsi::send::OPCODE, Qpn::GSI, Psn::new(5)))
    }
}

fn datagram(flow: &Flow, headers: &Headers, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; headers.len() + payload.len()];
    headers.emit(&mut bytes);
    bytes[headers.len()..].copy_from_slice(payload);
    let icrc = flow.compute(0, &bytes);
    bytes.extend_from_slice(&icrc.to_le_bytes());
    bytes
}

/// Debug builds panic where a thread takes the locks of packets within the process under the lock of the receive path.
#[test]
fn a_mad_leaves_packets_within_the_process_for_later() {
    let name = "gsi::tests::strangers::a_mad_leaves_packets_within_the_process_for_later";
    in_own_process(name, || {
        let Device { gsi, .. } = Device::open().0;
        let (here, nobody) = (ip("127.0.0.1"), Qpn::new(0xff_fffe));
        let datagram = Datagram {
            source: SocketAddr::new(here, 7),
            destination: here,
            interface: 0,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            segment: 0,
            bytes: &[],
        };
        let dreq = Mad { transaction_id: 1, modifier: 0, message: Dreq::default().into() }.emit();
        let gid = here.into();
        let arrival = Arrival { source: gid, destination: gid, port: 7, ..Arrival::default() };
        let packet = Packet::new(headers(), &dreq);
        let mad = Incoming { datagram, arrival, packet, was_forwarded: false };
        gsi.transport.owed.note(nobody, &mut Debt::default(), true);
        gsi.transport.links.inproc.owe(nobody);
        let lock = FastMutex::<rank::Receive, ()>::new(());
        let receiving = lock.lock();
        gsi.receive(gsi.core().now(), &[mad]);
        drop(receiving);
        assert_eq!(gsi.state.lock().machine.counters().rx_msgs.of(Attribute::Dreq), 1);
        assert!(gsi.transport.owed.pop() != Some(nobody), "ACKs leave before the answer");
        assert!(gsi.transport.links.inproc.is_pending());
    });
}

#[test]
fn other_packets_to_qp1_are_counted_and_dropped() {
    let _turn = turn();
    let gsi = gsi();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let to = SocketAddr::new(ip("127.0.0.1"), gsi.core().config.udp_port);
    let from = socket.local_addr().unwrap();
    let flow = Flow::new(from.ip(), to.ip(), from.port(), to.port());
    let dreq = Mad { transaction_id: 1, modifier: 0, message: Dreq::default().into() }.emit();
    let right = headers();
    let send = |headers: Headers, payload: &[u8]| {
        socket.send_to(&datagram(&flow, &headers, payload), to).unwrap();
    };
    let received = || gsi.with_cm(|m, _, _| m.counters().rx_msgs.of(Attribute::Dreq));
    let until = |what: &dyn Fn() -> u64, before: u64| {
        let end = Instant::now() + TIMEOUT;
        while what() == before {
            assert!(Instant::now() < end, "not counted");
            std::thread::sleep(Duration::from_micros(200));
        }
    };
    let wrong = |change: &dyn Fn(&mut Headers)| {
        let mut headers = right;
        change(&mut headers);
        headers
    };
    let with_imm = Opcode::new(Service::Ud, Operation::SendOnlyImm);
    let qkey = Some(Deth { qkey: QKey(0x1234), src_qpn: Qpn::GSI });
    for (headers, len, counter) in [
        (wrong(&|h| (h.bth.opcode, h.imm) = (with_imm, Some(1))), 256, Counter::DropQpState),
        (wrong(&|h| h.deth = qkey), 256, Counter::DropQkey),
        (wrong(&|h| h.bth.pkey = PKey(0x8001)), 256, Counter::DropPkey),
        (right, 252, Counter::DropMalformed),
        (right, 0, Counter::DropMalformed),
    ] {
        let (before, was) = (gsi.core().total(counter), received());
        send(headers, &dreq[..len]);
        until(&|| gsi.core().total(counter), before);
        assert_eq!(received(), was, "{counter:?}");
    }
    let before = received();
    send(right, &dreq);
    until(&received, before);
    send(wrong(&|h| h.bth.pkey = PKey(0x7fff)), &dreq);
    until(&received, before + 1);
}

#[test]
fn a_strangers_requests_and_rejections_make_few_copies() {
    let _turn = turn();
    let gsi = gsi();
    let mut others: Vec<_> = (0..3).map(|_| Peer::spawn()).collect();
    let to = SocketAddr::new(ip("127.0.0.1"), gsi.core().config.udp_port);
    let mut copies = || {
        let theirs = others.iter_mut().map(|peer| peer.ask("counter forwarded_pkts"));
        let theirs: u64 = theirs.map(|answer| answer[2..].parse::<u64>().unwrap()).sum();
        theirs + gsi.core().total(Counter::Forwarded)
    };
    let mut made_by = |message: &dyn Fn(u32) -> Message| {
        let before = copies();
        for n in 0..1000 {
            // The kernel chooses a process for each source.
            let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            let from = socket.local_addr().unwrap();
            let flow = Flow::new(from.ip(), to.ip(), from.port(), to.port());
            let mad = Mad { transaction_id: n.into(), modifier: 0, message: message(n) };
            socket.send_to(&datagram(&flow, &headers(), &mad.emit()), to).unwrap();
        }
        let mut last = copies();
        loop {
            std::thread::sleep(Duration::from_millis(100));
            match copies() {
                now if now == last => return now - before,
                now => last = now,
            }
        }
    };
    let own = u32::from(gsi.transport.core.slot) << 24;
    let (service_id, local_comm_id) = (service(1007), CommId);
    let req = |n| Req { service_id, local_comm_id: local_comm_id(n), ..Req::default() }.into();
    assert_eq!(made_by(&req), 0, "a request that nobody listens for");
    let rej = |n| Rej { local_comm_id: local_comm_id(n), ..Rej::default() };
    // The last round has room for copies that a slow process makes late.
    // Each is for three others: more than the first 32 only as time goes by.
    let begin = Instant::now();
    let made = made_by(&|n| rej(n).into());
    let most = 3 * (32 + begin.elapsed().as_millis() as u64 / 20 + 8);
    assert!((3 * 32..=most).contains(&made), "{made}, at most {most}");
    let named = |n| Rej { remote_comm_id: CommId(own | n), ..rej(n) }.into();
    let astray = made_by(&named);
    assert!(astray <= 1000, "{astray}: at most one for each, to the process that it names");
}

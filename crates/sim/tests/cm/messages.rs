//! The contents of messages: every field, as the program or the peer gave it.

use std::cell::RefCell;
use std::net::{IpAddr, Ipv6Addr};
use std::rc::Rc;
use std::time::Duration;

use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::code::{About, ServiceType};
use anyverbs_proto::cm::message::disconnect::{Drep, Dreq};
use anyverbs_proto::cm::message::ece::{Ece, RepVendorId};
use anyverbs_proto::cm::message::mra::Mra;
use anyverbs_proto::cm::message::path::PathRecord;
use anyverbs_proto::cm::message::private_data::PrivateData;
use anyverbs_proto::cm::message::rep::Rep;
use anyverbs_proto::cm::message::req::Req;
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::cm::{
    AcceptParams, CmConfig, CmError, ConnectParams, ConnectionState as S, Path, SidrParams,
    Transport,
};
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, Qpn};

use crate::world::{Fate, World, accept_params, gid};

const SERVICE: u16 = 0x1234;

fn odd_path() -> Path {
    Path {
        sgid: gid(0),
        dgid: gid(1),
        interface: 3,
        pkey: PKey(0x8123),
        mtu: Mtu::Mtu2048,
        flow_label: 0xa_bcde,
        traffic_class: 0x5a,
        hop_limit: 33,
        sl: 9,
        rate: 37,
        packet_life_time: 13,
    }
}

fn odd_params(path: Path) -> ConnectParams<'static> {
    ConnectParams {
        service_id: ServiceId::of_port(PortSpace::Tcp, SERVICE),
        addresses: None,
        path,
        transport: Transport::Rc,
        qpn: Qpn::new(0x12_3456),
        starting_psn: Psn::new(0x65_4321),
        responder_resources: 11,
        initiator_depth: 12,
        flow_control: true,
        retry_count: 5,
        rnr_retry_count: 6,
        srq: true,
        ece: Ece { vendor_id: 0xab_cdef, options: 0x1234_5678 },
        response_timeout: 17,
        max_cm_retries: 14,
        private_data: b"private",
    }
}

fn padded<const N: usize>(bytes: &[u8]) -> PrivateData<N> {
    let mut data = [0; N];
    data[..bytes.len()].copy_from_slice(bytes);
    PrivateData(data)
}

/// The message that a host has just made, and its MAD's modifier.
fn made(w: &mut World, host: usize) -> (Arrival, Mad) {
    let sent = w.hosts[host].cm.poll_transmit(w.now).unwrap();
    assert!(w.hosts[host].cm.poll_transmit(w.now).is_none());
    let arrival = Arrival {
        source: sent.sgid,
        destination: sent.dgid,
        traffic_class: sent.traffic_class,
        hop_limit: sent.hop_limit,
        flow_label: sent.flow_label,
        interface: sent.interface,
        port: 0,
    };
    (arrival, Mad::parse(&sent.mad.emit()).unwrap())
}

#[test]
fn a_req_says_all_that_the_program_asks_for() {
    for (transport, codes) in [
        (Transport::Rc, (ServiceType::Rc, 0)),
        (Transport::Uc, (ServiceType::Uc, 0)),
        (Transport::Xrc, (ServiceType::Extended, Req::XRC)),
    ] {
        for (flow_control, srq, hop_limit) in [(true, false, 33), (false, true, 1), (true, true, 2)]
        {
            let mut w = World::with_config(1, 2, CmConfig { ack_delay: 14, ..CmConfig::default() });
            let path = Path { hop_limit, ..odd_path() };
            let params = ConnectParams { transport, flow_control, srq, ..odd_params(path) };
            let id = w.hosts[0].cm.connect(w.now, &params).unwrap();
            let (arrival, mad) = made(&mut w, 0);
            let wanted = Arrival {
                source: gid(0),
                destination: gid(1),
                traffic_class: 0x5a,
                hop_limit,
                flow_label: 0xa_bcde,
                interface: 3,
                port: 0,
            };
            assert_eq!((arrival, mad.modifier), (wanted, 0x1234_5678));
            let wanted = Req {
                local_comm_id: id,
                vendor_id: 0xab_cdef,
                service_id: params.service_id,
                local_ca_guid: 0x100,
                local_qpn: params.qpn,
                responder_resources: 11,
                initiator_depth: 12,
                remote_response_timeout: 17,
                service_type: codes.0,
                flow_control,
                starting_psn: params.starting_psn,
                local_response_timeout: 17,
                retry_count: 5,
                pkey: PKey(0x8123),
                path_mtu: Some(Mtu::Mtu2048),
                rnr_retry_count: 6,
                max_cm_retries: 14,
                srq,
                extended_transport: codes.1,
                primary: PathRecord {
                    local_lid: 0xffff,
                    remote_lid: 0xffff,
                    local_gid: gid(0),
                    remote_gid: gid(1),
                    flow_label: 0xa_bcde,
                    packet_rate: 37,
                    traffic_class: 0x5a,
                    hop_limit,
                    sl: 9,
                    // A packet that no router may pass stays in its subnet.
                    subnet_local: hop_limit <= 1,
                    // Twice 2^13 and 2^14 units are 2^15.
                    ack_timeout: 15,
                },
                private_data: padded(b"private"),
                ..Req::default()
            };
            assert_eq!(mad.message, Message::Req(wanted));
        }
    }
}

#[test]
fn a_rep_says_all_that_the_program_grants() {
    for (transport, srq) in [(Transport::Rc, false), (Transport::Rc, true), (Transport::Xrc, false)]
    {
        let mut w = World::with_config(1, 2, CmConfig { ack_delay: 14, ..CmConfig::default() });
        let listen = anyverbs_proto::cm::Listen {
            service_id: ServiceId::of_port(PortSpace::Tcp, SERVICE),
            address: anyverbs_proto::cm::ListenAddress::Any,
            serves: anyverbs_proto::cm::Serves::Connections(transport),
            ip_header: false,
            backlog: 1,
        };
        w.hosts[1].cm.listen(listen).unwrap();
        let path = Path { interface: 0, pkey: PKey::DEFAULT, ..odd_path() };
        let params = ConnectParams { transport, ..odd_params(path) };
        let a = w.hosts[0].cm.connect(w.now, &params).unwrap();
        let b = w.take_request(1);
        let accept = AcceptParams { srq, ..accept_params(Qpn::new(0x77)) };
        w.hosts[1].cm.accept(w.now, b, &accept).unwrap();
        let (arrival, mad) = made(&mut w, 1);
        let wanted = Arrival {
            source: gid(1),
            destination: gid(0),
            traffic_class: 0x5a,
            hop_limit: 33,
            flow_label: 0xa_bcde,
            interface: 0,
            port: 0,
        };
        assert_eq!((arrival, mad.modifier), (wanted, 9));
        let is_xrc = transport == Transport::Xrc;
        let if_not = |at: bool| if at { Qpn::default() } else { Qpn::new(0x77) };
        let wanted = Rep {
            local_comm_id: b,
            remote_comm_id: a,
            local_qpn: if_not(is_xrc),
            vendor_id: RepVendorId(0x12_3456),
            local_eecn: if_not(!is_xrc),
            starting_psn: Psn::new(0x77 * 7),
            responder_resources: 3,
            initiator_depth: 2,
            target_ack_delay: 14,
            flow_control: true,
            rnr_retry_count: 6,
            srq: srq || is_xrc,
            local_ca_guid: 0x101,
            private_data: padded(b"welcome"),
            ..Rep::default()
        };
        assert_eq!(mad.message, Message::Rep(wanted));
    }
}

/// Values at the ends of their ranges, and what lies beyond.
#[test]
fn values_out_of_their_range_are_refused() {
    type Change = fn(&mut ConnectParams<'_>, u32);
    let group = Gid::from(IpAddr::from(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1)));
    let fields: [(Change, u32); 10] = [
        (|params, value| params.path.flow_label = value, (1 << 20) - 1),
        (|params, value| params.path.sl = value as u8, 15),
        (|params, value| params.path.rate = value as u8, 63),
        (|params, value| params.path.packet_life_time = value as u8, 31),
        (|params, value| params.retry_count = value as u8, 7),
        (|params, value| params.rnr_retry_count = value as u8, 7),
        (|params, value| params.max_cm_retries = value as u8, 15),
        (|params, value| params.response_timeout = value as u8, 31),
        (|params, value| params.ece.vendor_id = value, (1 << 24) - 1),
        // 92 bytes fit.
        (|params, value| params.private_data = &[1; 93][..value as usize], 92),
    ];
    for (n, (change, most)) in fields.into_iter().enumerate() {
        let connect = |value| {
            let mut w = World::new(1, 2);
            let mut params = odd_params(odd_path());
            change(&mut params, value);
            w.hosts[0].cm.connect(w.now, &params).map(drop)
        };
        let too_long = CmError::PrivateDataTooLong { len: 93, room: 92 };
        let error = if n == 9 { too_long } else { CmError::Value };
        assert_eq!((connect(0), connect(most)), (Ok(()), Ok(())), "{n}");
        assert_eq!(connect(most + 1), Err(error), "{n}");
    }
    for wrong in [Gid::default(), group] {
        for path in [Path { sgid: wrong, ..odd_path() }, Path { dgid: wrong, ..odd_path() }] {
            let mut w = World::new(1, 2);
            let connected = w.hosts[0].cm.connect(w.now, &odd_params(path));
            assert_eq!(connected, Err(CmError::Value), "{path:?}");
            let asks = SidrParams {
                service_id: ServiceId::of_port(PortSpace::Udp, SERVICE),
                addresses: None,
                path,
                timeout: Duration::from_millis(100),
                max_retries: 1,
                private_data: &[],
            };
            assert_eq!(w.hosts[0].cm.sidr_request(w.now, &asks), Err(CmError::Value));
        }
    }
    for (rnr_retry_count, vendor_id, wanted) in
        [(7, (1 << 24) - 1, Ok(())), (8, 0, Err(CmError::Value)), (0, 1 << 24, Err(CmError::Value))]
    {
        let mut w = World::new(1, 2);
        w.listen(1);
        w.connect(0, 1);
        let b = w.take_request(1);
        let ece = Ece { vendor_id, options: 0 };
        let accept = AcceptParams { rnr_retry_count, ece, ..accept_params(Qpn::new(9)) };
        assert_eq!(w.hosts[1].cm.accept(w.now, b, &accept), wanted);
    }
}

/// Keeps the messages of a kind that a host sends from now on, whether they arrive or not.
pub(crate) fn watch(w: &mut World, host: usize, attribute: Attribute) -> Rc<RefCell<Vec<Message>>> {
    let seen = Rc::new(RefCell::new(Vec::new()));
    let kept = Rc::clone(&seen);
    w.rule(move |from, message| {
        if from == host && message.attribute() == attribute {
            kept.borrow_mut().push(message.clone());
        }
        Fate::Pass
    });
    seen
}

/// Both sides tell a peer that repeats its message how long their programs may take.
#[test]
fn an_mra_says_what_it_is_about_and_for_how_long() {
    let mut w = World::with_config(1, 2, CmConfig { service_timeout: 21, ..CmConfig::default() });
    w.listen(1);
    let mras = [watch(&mut w, 0, Attribute::Mra), watch(&mut w, 1, Attribute::Mra)];
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.run_for(Duration::from_secs(1));
    w.accept(1, b);
    w.run_for(Duration::from_secs(1));
    let mra = |local_comm_id, remote_comm_id, about| {
        let service_timeout = 21;
        Message::Mra(Mra {
            local_comm_id,
            remote_comm_id,
            about,
            service_timeout,
            ..Mra::default()
        })
    };
    assert_eq!(mras[1].borrow()[..], [mra(b, a, About::Req)]);
    assert_eq!(mras[0].borrow()[..], [mra(a, b, About::Rep)]);
}

fn drep(local: CommId, remote: CommId, private_data: &[u8]) -> Message {
    Message::Drep(Drep {
        local_comm_id: local,
        remote_comm_id: remote,
        private_data: padded(private_data),
    })
}

#[test]
fn a_drep_names_the_connection_by_both_ids() {
    // An agreement, with the program's own data.
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let (dreqs, dreps) = (watch(&mut w, 0, Attribute::Dreq), watch(&mut w, 1, Attribute::Drep));
    w.hosts[0].cm.disconnect(w.now, a, b"bye").unwrap();
    w.run();
    let remote_qpn = w.hosts[1].cm.qp_params(b).unwrap().qpn.unwrap();
    let private_data = padded(b"bye");
    let dreq = Dreq { local_comm_id: a, remote_comm_id: b, remote_qpn, private_data };
    assert_eq!(dreqs.borrow()[..], [Message::Dreq(dreq)]);
    w.hosts[1].cm.disconnect(w.now, b, b"so long").unwrap();
    w.run();
    assert_eq!(dreps.borrow()[..], [drep(b, a, b"so long")]);

    // A connection that does not exist.
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    w.restart(1, CmConfig::default());
    let dreps = watch(&mut w, 1, Attribute::Drep);
    w.hosts[0].cm.disconnect(w.now, a, &[]).unwrap();
    w.run();
    assert_eq!(dreps.borrow()[..], [drep(b, a, &[])]);

    // The peer asks for the end of what it has ended already: its own answer is not remembered as one.
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    w.hosts[0].cm.disconnect(w.now, a, &[]).unwrap();
    w.run();
    w.hosts[1].cm.disconnect(w.now, b, &[]).unwrap();
    w.run();
    assert_eq!((w.state(0, a), w.state(1, b)), (S::Timewait, S::Timewait));
    let dreps = watch(&mut w, 0, Attribute::Drep);
    let remote_qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn.unwrap();
    let again = Dreq { local_comm_id: b, remote_comm_id: a, remote_qpn, ..Dreq::default() };
    let again = Mad { transaction_id: 77, modifier: 0, message: again.into() };
    w.inject(gid(1), 0, &again.emit());
    w.run();
    assert_eq!(dreps.borrow()[..], [drep(a, b, &[])]);
    assert_eq!(w.hosts[0].cm.counters().rx_duplicates.of(Attribute::Dreq), 1);
}

/// The peer accepts and changes its mind, and only its DREQ arrives.
#[test]
fn a_dreq_before_the_rep_ends_the_wait() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.rule(|from, message| {
        let lost = matches!(message, Message::Rep(_) | Message::Rej(_));
        if from == 1 && lost { Fate::Drop } else { Fate::Pass }
    });
    let dreps = watch(&mut w, 0, Attribute::Drep);
    w.accept(1, b);
    w.hosts[1].cm.destroy(w.now, b).unwrap();
    w.run();
    assert_eq!(dreps.borrow()[..], [drep(a, b, &[])]);
    assert!(matches!(w.event(0), CmEvent::Rejected { id, .. } if id == a));
    assert_eq!(w.state(0, a), S::Closed);
}

#[test]
fn a_process_knows_the_requests_that_it_waits_for() {
    let mut w = World::new(1, 3);
    let (to_port, to_other) = (SERVICE, SERVICE + 1);
    let request = |w: &mut World, from: usize, port| {
        let path = Path { sgid: gid(from), interface: 0, pkey: PKey::DEFAULT, ..odd_path() };
        let service_id = ServiceId::of_port(PortSpace::Tcp, port);
        let params = ConnectParams { service_id, ..odd_params(path) };
        w.hosts[from].cm.connect(w.now, &params).unwrap();
        made(w, from)
    };
    let (arrival, req) = request(&mut w, 0, to_port);
    assert!(!w.hosts[1].cm.awaits_request(&arrival, &req));
    let listener = w.listen_with(1, to_port, 9);
    assert!(w.hosts[1].cm.awaits_request(&arrival, &req));
    assert!(!w.hosts[1].cm.knows_request(&arrival, &req));
    let (_, other) = request(&mut w, 0, to_other);
    assert!(!w.hosts[1].cm.awaits_request(&arrival, &other));
    // Any other message belongs to a connection.
    let dreq = Mad { transaction_id: 1, modifier: 0, message: Dreq::default().into() };
    assert!(w.hosts[2].cm.awaits_request(&arrival, &dreq));
    assert!(!w.hosts[1].cm.knows_request(&arrival, &dreq));
    // A request that has come is known, though nobody listens any more.
    assert!(!w.hosts[1].cm.may_be_asked_again());
    let with_header = {
        w.connect(0, 1);
        made(&mut w, 0)
    };
    w.listen(1);
    w.hosts[1].cm.handle(w.now, &with_header.0, &with_header.1.emit());
    assert!(matches!(w.event(1), CmEvent::ConnectRequest { .. }));
    assert!(w.hosts[1].cm.knows_request(&with_header.0, &with_header.1));
    assert!(w.hosts[1].cm.may_be_asked_again());
    let elsewhere = Arrival { source: gid(2), ..with_header.0 };
    assert!(!w.hosts[1].cm.knows_request(&elsewhere, &with_header.1));
    w.hosts[1].cm.unlisten(w.now, listener).unwrap();
    assert!(!w.hosts[1].cm.awaits_request(&arrival, &req));
    assert!(w.hosts[1].cm.awaits_request(&with_header.0, &with_header.1));
}

#[test]
fn both_disconnected_sides_hear_what_the_other_said() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    w.hosts[0].cm.disconnect(w.now, a, b"bye").unwrap();
    w.run();
    let CmEvent::Disconnected { how: Disconnected::Requested(said), .. } = w.event(1) else {
        panic!()
    };
    assert_eq!((said.len(), &said[..4]), (220, &b"bye\0"[..]));
    w.hosts[1].cm.disconnect(w.now, b, b"so long").unwrap();
    w.run();
    let CmEvent::Disconnected { how: Disconnected::Acknowledged(said), .. } = w.event(0) else {
        panic!()
    };
    assert_eq!((said.len(), &said[..8]), (224, &b"so long\0"[..]));
}

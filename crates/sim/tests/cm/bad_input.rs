//! Messages that are wrong, foreign or senseless.

use std::time::Duration;

use anyverbs_proto::cm::ConnectionState as S;
use anyverbs_proto::cm::counters::DropReason;
use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::mad::{MAD_LEN, Mad, MadBytes};
use anyverbs_proto::cm::message::code::{About, ApStatus, RejReason, ServiceType, SidrStatus};
use anyverbs_proto::cm::message::disconnect::{Drep, Dreq};
use anyverbs_proto::cm::message::lap::{Apr, Lap};
use anyverbs_proto::cm::message::mra::Mra;
use anyverbs_proto::cm::message::path::PathRecord;
use anyverbs_proto::cm::message::private_data::PrivateData;
use anyverbs_proto::cm::message::rej::Rej;
use anyverbs_proto::cm::message::rep::Rep;
use anyverbs_proto::cm::message::req::Req;
use anyverbs_proto::cm::message::rtu::Rtu;
use anyverbs_proto::cm::message::sidr::{SidrRep, SidrReq};
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, Qpn};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::world::{Dial, PORT, World, gid, header};

pub(crate) fn bytes(message: impl Into<Message>) -> MadBytes {
    Mad { transaction_id: 7, modifier: 0, message: message.into() }.emit()
}

/// A REQ from host 0 to host 1 that a listener takes.
pub(crate) fn good_req() -> Req {
    Req {
        local_comm_id: CommId(0x0000_4444),
        service_id: ServiceId::of_port(PortSpace::Tcp, PORT),
        local_qpn: Qpn::new(0x333),
        starting_psn: Psn::new(1),
        pkey: PKey::DEFAULT,
        path_mtu: Some(Mtu::Mtu1024),
        remote_response_timeout: 14,
        local_response_timeout: 14,
        max_cm_retries: 1,
        primary: PathRecord { local_gid: gid(0), remote_gid: gid(1), ..PathRecord::default() },
        private_data: PrivateData::new(&header(0, 1).emit()).unwrap(),
        ..Req::default()
    }
}

/// The answer of host 1 to these bytes from host 0.
fn answer(w: &mut World, bytes: &[u8]) -> Option<Message> {
    w.inject(gid(0), 1, bytes);
    let out = w.hosts[1].cm.poll_transmit(w.now)?;
    assert_eq!((out.sgid, out.dgid), (gid(1), gid(0)));
    assert!(w.hosts[1].cm.poll_transmit(w.now).is_none(), "one answer");
    Some(Mad::parse(&out.mad.emit()).unwrap().message)
}

fn rejection(w: &mut World, req: Req) -> Option<(RejReason, Vec<u8>)> {
    let id = req.local_comm_id;
    match answer(w, &bytes(req)) {
        None => None,
        Some(Message::Rej(rej)) => {
            assert_eq!((rej.local_comm_id, rej.remote_comm_id), (CommId::NONE, id));
            assert_eq!(rej.about, About::Req);
            Some((rej.reason, rej.info().to_vec()))
        }
        Some(other) => panic!("{other}"),
    }
}

#[test]
fn a_request_with_something_wrong_is_told_what() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let mut wrong_version = good_req();
    wrong_version.private_data.0[0] = 0x10;
    let mut no_family = good_req();
    no_family.private_data.0[1] = 0x70;
    let path = good_req().primary;
    // As if from and to this host itself, which other hosts are not.
    let named = |source: &str, destination: &str| {
        let source = std::net::SocketAddr::new(source.parse().unwrap(), 9);
        let destination = destination.parse().unwrap();
        let private_data = PrivateData::new(&IpHeader { source, destination }.emit()).unwrap();
        Req { private_data, ..good_req() }
    };
    for (req, reason) in [
        (Req { service_type: ServiceType::Rd, ..good_req() }, RejReason::InvalidTransport),
        (Req { service_type: ServiceType::Extended, ..good_req() }, RejReason::InvalidTransport),
        (Req { service_type: ServiceType::Uc, ..good_req() }, RejReason::InvalidTransport),
        (Req { path_mtu: None, ..good_req() }, RejReason::InvalidMtu),
        (Req { local_qpn: Qpn::GSI, ..good_req() }, RejReason::UnsupportedRequest),
        (Req { pkey: PKey(0x8001), ..good_req() }, RejReason::UnsupportedRequest),
        (
            Req { primary: PathRecord { local_gid: gid(5), ..path }, ..good_req() },
            RejReason::UnsupportedRequest,
        ),
        (Req { service_id: ServiceId(1), ..good_req() }, RejReason::InvalidServiceId),
        (named("10.0.0.1", "127.0.0.1"), RejReason::UnsupportedRequest),
        (named("10.0.0.3", "10.0.0.2"), RejReason::UnsupportedRequest),
        (wrong_version, RejReason::Consumer),
        (no_family, RejReason::Consumer),
    ] {
        assert_eq!(rejection(&mut w, req.clone()), Some((reason, vec![])), "{req}");
    }
    let elsewhere = Req { primary: PathRecord { remote_gid: gid(5), ..path }, ..good_req() };
    let would_do = gid(1).0.to_vec();
    assert_eq!(rejection(&mut w, elsewhere), Some((RejReason::InvalidGid, would_do)));
    assert_eq!(w.hosts[1].cm.usage().connections, 0);
    assert_eq!(rejection(&mut w, Req { local_comm_id: CommId::NONE, ..good_req() }), None);
    assert_eq!(rejection(&mut w, good_req()), None, "and the right one is taken");
    assert!(matches!(w.event(1), CmEvent::ConnectRequest { .. }));
    w.tear_down();
}

#[test]
fn another_class_version_is_told_ours() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let mut req = bytes(good_req());
    req[2] = 3;
    let Some(Message::Rej(rej)) = answer(&mut w, &req) else { panic!() };
    assert_eq!((rej.reason, rej.info()), (RejReason::InvalidClassVersion, &[2][..]));
    assert_eq!(rej.remote_comm_id, CommId(0x4444));
    let mut rtu = bytes(Rtu::default());
    rtu[2] = 1;
    assert_eq!(answer(&mut w, &rtu), None, "nothing else is answered: no answers to answers");
    assert_eq!(w.hosts[1].cm.counters().dropped(DropReason::Malformed), 1);
    w.tear_down();
}

#[test]
fn unknown_ids_are_answered_as_the_message_needs() {
    let mut w = World::new(1, 2);
    let (local_comm_id, remote_comm_id) = (CommId(0x0000_0007), CommId(0x0100_0009));
    let rep = Rep { local_comm_id, remote_comm_id, ..Rep::default() };
    let Some(Message::Rej(rej)) = answer(&mut w, &bytes(rep)) else { panic!() };
    assert_eq!((rej.reason, rej.about), (RejReason::InvalidCommId, About::Rep));
    let rtu = Rtu { local_comm_id, remote_comm_id, ..Rtu::default() };
    let Some(Message::Rej(rej)) = answer(&mut w, &bytes(rtu)) else { panic!() };
    assert_eq!((rej.reason, rej.about), (RejReason::InvalidCommId, About::No));
    assert_eq!((rej.local_comm_id, rej.remote_comm_id), (remote_comm_id, local_comm_id));
    let dreq = Dreq { local_comm_id, remote_comm_id, ..Dreq::default() };
    let Some(Message::Drep(drep)) = answer(&mut w, &bytes(dreq)) else { panic!() };
    assert_eq!((drep.local_comm_id, drep.remote_comm_id), (remote_comm_id, local_comm_id));
    let lap = Lap { local_comm_id, remote_comm_id, ..Lap::default() };
    let Some(Message::Apr(apr)) = answer(&mut w, &bytes(lap)) else { panic!() };
    assert_eq!(apr.status, ApStatus::InvalidCommId);
    let sidr = SidrReq { request_id: local_comm_id, ..SidrReq::default() };
    let Some(Message::SidrRep(rep)) = answer(&mut w, &bytes(sidr)) else { panic!() };
    assert_eq!(rep.status, SidrStatus::UnsupportedService);
    for silent in [
        bytes(Rej { local_comm_id, remote_comm_id, ..Rej::default() }),
        bytes(Rej { local_comm_id, ..Rej::default() }),
        bytes(Mra { local_comm_id, remote_comm_id, ..Mra::default() }),
        bytes(Drep { local_comm_id, remote_comm_id, ..Drep::default() }),
        bytes(Apr { local_comm_id, remote_comm_id, ..Apr::default() }),
        bytes(SidrRep { request_id: remote_comm_id, ..SidrRep::default() }),
    ] {
        assert_eq!(answer(&mut w, &silent), None);
    }
    w.assert_empty();
}

#[test]
fn an_answer_to_a_request_that_was_not_made_is_refused() {
    let mut w = World::new(1, 3);
    w.listen(1);
    w.listen(0);
    let (a, b) = w.pair(1, 0);
    let (c, d) = w.pair(0, 1);
    let other = CommId(0x77);
    for (source, local_comm_id, remote_comm_id, reason) in [
        // The passive side, which asked for nothing.
        (0, c, d, RejReason::InvalidCommId),
        // A stranger knows both IDs.
        (2, b, a, RejReason::InvalidCommId),
        (2, other, a, RejReason::InvalidCommId),
        // The peer, by an ID that is not that of its connection.
        (0, other, a, RejReason::InvalidCommInstance),
    ] {
        w.inject(gid(source), 1, &bytes(Rep { local_comm_id, remote_comm_id, ..Rep::default() }));
        let out = w.hosts[1].cm.poll_transmit(w.now).unwrap();
        assert_eq!(out.dgid, gid(source));
        let Message::Rej(rej) = Mad::parse(&out.mad.emit()).unwrap().message else { panic!() };
        assert_eq!((rej.reason, rej.about), (reason, About::Rep));
        assert_eq!((rej.local_comm_id, rej.remote_comm_id), (remote_comm_id, local_comm_id));
        assert!(w.hosts[1].cm.poll_transmit(w.now).is_none(), "one answer");
    }
    assert_eq!((w.state(1, a), w.state(1, d)), (S::Established, S::Established));
    w.tear_down();
}

#[test]
fn alternate_paths_are_not_supported() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let remote_qpn = w.hosts[1].cm.qp_params(b).unwrap().qpn.unwrap();
    let lap = Lap { local_comm_id: a, remote_comm_id: b, remote_qpn, ..Lap::default() };
    let Some(Message::Apr(apr)) = answer(&mut w, &bytes(lap.clone())) else { panic!() };
    assert_eq!(apr.status, ApStatus::Unsupported);
    assert_eq!((apr.local_comm_id, apr.remote_comm_id), (b, a));
    let other = Lap { remote_qpn: Qpn::new(2), ..lap };
    let Some(Message::Apr(apr)) = answer(&mut w, &bytes(other)) else { panic!() };
    assert_eq!(apr.status, ApStatus::InvalidQpn);
    assert_eq!((w.state(0, a), w.state(1, b)), (S::Established, S::Established));
    w.tear_down();
}

/// All that could end or move a connection, with its right IDs.
fn attacks(local_comm_id: CommId, remote_comm_id: CommId, remote_qpn: Qpn) -> Vec<MadBytes> {
    let mut attacks = vec![
        bytes(Dreq { local_comm_id, remote_comm_id, remote_qpn, ..Dreq::default() }),
        bytes(Drep { local_comm_id, remote_comm_id, ..Drep::default() }),
        bytes(Rep { local_comm_id, remote_comm_id, local_qpn: remote_qpn, ..Rep::default() }),
        bytes(Rtu { local_comm_id, remote_comm_id, ..Rtu::default() }),
    ];
    for about in [About::Req, About::Rep, About::No] {
        attacks.push(bytes(Rej { local_comm_id, remote_comm_id, about, ..Rej::default() }));
        attacks.push(bytes(Rej { local_comm_id, about, ..Rej::default() }));
        attacks.push(bytes(Mra { local_comm_id, remote_comm_id, about, ..Mra::default() }));
    }
    attacks
}

#[test]
fn strangers_touch_nothing() {
    for steps in 0..3 {
        let mut w = World::new(1, 3);
        w.listen(1);
        let a = w.connect(0, 1);
        let b = w.take_request(1);
        if steps > 0 {
            w.accept(1, b);
            w.run();
            w.event(0);
        }
        if steps > 1 {
            w.hosts[0].cm.ready(w.now, a, &[]).unwrap();
            w.run();
            w.event(1);
        }
        let before = (w.state(0, a), w.state(1, b));
        let qpns =
            [w.hosts[0].cm.qp_params(a).unwrap().qpn, w.hosts[1].cm.qp_params(b).unwrap().qpn];
        for (host, ids) in [(0, (b, a)), (1, (a, b))] {
            for attack in attacks(ids.0, ids.1, qpns[host].unwrap_or_default()) {
                w.inject(gid(2), host, &attack);
                w.run();
                assert_eq!((w.state(0, a), w.state(1, b)), before);
                assert!(w.poll_event(0).is_none() && w.poll_event(1).is_none());
            }
        }
        w.tear_down();
    }
}

#[test]
fn a_rejection_without_its_senders_id_ends_no_connection() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    let attack = |w: &mut World| {
        let before = (w.state(0, a), w.state(1, b));
        for about in [About::Req, About::Rep, About::No] {
            let reason = RejReason::StaleConn;
            w.inject(gid(1), 0, &bytes(Rej { remote_comm_id: a, about, reason, ..Rej::default() }));
            w.inject(gid(0), 1, &bytes(Rej { remote_comm_id: b, about, reason, ..Rej::default() }));
        }
        assert_eq!((w.state(0, a), w.state(1, b)), before);
    };
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { .. }));
    attack(&mut w);
    let now = w.now;
    w.hosts[0].cm.ready(now, a, &[]).unwrap();
    attack(&mut w);
    w.run();
    assert!(matches!(w.event(1), CmEvent::Established { .. }));
    attack(&mut w);
    for (host, id) in [(0, a), (1, b)] {
        assert_eq!(w.state(host, id), S::Established);
        assert!(w.poll_event(host).is_none());
    }
    w.tear_down();
}

/// As Linux looks for the connection of a REJ.
#[test]
fn a_rejected_answer_hears_both_ids() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.restart(0, Default::default());
    w.accept(1, b);
    w.rule(move |_, message| {
        if let Message::Rej(rej) = message {
            assert_eq!((rej.local_comm_id, rej.remote_comm_id), (a, b));
        }
        crate::world::Fate::Pass
    });
    w.run();
    let CmEvent::Rejected { id, rejection } = w.event(1) else { panic!() };
    assert_eq!((id, rejection.reason), (b, RejReason::InvalidCommId));
    w.tear_down();
}

#[test]
fn mras_without_end_are_not_waited_for() {
    let mut w = World::new(1, 2);
    w.kill(1);
    let a = w.dial(0, 1, Dial { max_cm_retries: 1, response_timeout: 20, ..Dial::default() });
    let mra = Mra { local_comm_id: CommId(9), remote_comm_id: a, ..Mra::default() };
    let mra = bytes(Mra { about: About::Req, service_timeout: 31, ..mra });
    let begin = w.now;
    while w.poll_event(0).is_none() {
        assert!(w.now.since(begin) < Duration::from_secs(1000), "it waits still");
        w.inject(gid(1), 0, &mra);
        // Sooner than the request is given up.
        w.run_for(Duration::from_secs(1));
    }
    // The request is sent twice, and each time the peer may ask for as long as Linux does.
    let linux = Duration::from_nanos(4096 << 24);
    assert!(w.now.since(begin) > 2 * linux, "as long as may be asked for");
    assert!(w.now.since(begin) < 3 * linux, "no longer");
    assert_eq!(w.state(0, a), S::Closed);
    w.tear_down();
}

#[test]
fn a_senders_address_that_is_none_is_not_answered() {
    let mut w = World::new(1, 2);
    let group = Gid::from(std::net::IpAddr::from([224, 0, 0, 1]));
    for source in [Gid::ZERO, group] {
        w.inject(source, 1, &bytes(good_req()));
    }
    assert_eq!(w.hosts[1].cm.counters().dropped(DropReason::Address), 2);
    assert!(w.hosts[1].cm.poll_transmit(w.now).is_none());
}

/// Any bytes: nothing panics, a connection between others stands, and connections that the bytes leave behind end.
#[test]
fn noise_leaves_connections_alone() {
    for seed in 0..200 {
        let mut w = World::new(seed, 3);
        w.listen(1);
        let (a, b) = w.pair(0, 1);
        let mut rng = SmallRng::seed_from_u64(seed);
        for _ in 0..300 {
            let mut mad = [0u8; MAD_LEN];
            rng.fill(&mut mad[..]);
            let len = if rng.random_bool(0.9) { MAD_LEN } else { rng.random_range(0..MAD_LEN) };
            if rng.random_bool(0.95) {
                mad[..4].copy_from_slice(&[1, 7, 2, 3]);
                mad[16] = 0;
                mad[17] = rng.random_range(0x0f..0x1c);
            }
            // Names that exist, now and then.
            for at in [24, 28] {
                if rng.random_bool(0.5) {
                    let id = if rng.random() { a } else { b };
                    mad[at..at + 4].copy_from_slice(&id.0.to_be_bytes());
                }
            }
            if mad[17] == Attribute::Req as u8 && rng.random_bool(0.8) {
                let id = CommId(rng.random_range(1..20));
                let qpn = Qpn::new(rng.random_range(2..20));
                let primary =
                    PathRecord { local_gid: gid(2), remote_gid: gid(1), ..PathRecord::default() };
                let req = Req { local_comm_id: id, local_qpn: qpn, primary, ..good_req() };
                mad = bytes(req);
            }
            let host = rng.random_range(0..2);
            w.inject(gid(2), host, &mad[..len]);
            w.run_for(Duration::from_millis(rng.random_range(0..50)));
            while let Some(event) = w.poll_event(1) {
                assert_ne!(event.id(), b, "{event:?}");
                let now = w.now;
                match event {
                    CmEvent::ConnectRequest { id, .. } if rng.random() => w.accept(1, id),
                    event if rng.random() => w.hosts[1].cm.destroy(now, event.id()).unwrap(),
                    _ => {}
                }
            }
            assert!(w.poll_event(0).is_none());
        }
        assert_eq!((w.state(0, a), w.state(1, b)), (S::Established, S::Established));
        w.tear_down();
    }
}

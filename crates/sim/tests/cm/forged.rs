//! Messages from the peer's own address that are not the peer's.

use std::time::Duration;

use anyverbs_proto::cm::ConnectionState as S;
use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::mad::{Mad, MadBytes};
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::cm::message::code::{About, RejReason};
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
use anyverbs_proto::types::{Psn, Qpn};

use crate::bad_input::{bytes, good_req};
use crate::world::{World, gid, header};

/// The names of a connection, as one end and a guesser see it.
#[derive(Clone, Copy)]
struct Names {
    /// Communication ID of the end whose address is forged.
    theirs: CommId,
    their_qpn: Qpn,
    /// Communication ID of the end that is attacked.
    ours: CommId,
    our_qpn: Qpn,
}

/// Every message with every combination of right, wrong and missing names, but for those that name both IDs: they are all
/// that tells the peer from others.
fn forgeries(from: usize, to: usize, names: Names) -> Vec<MadBytes> {
    let Names { theirs, their_qpn, ours, our_qpn } = names;
    let wrong = CommId(0x0000_4444);
    let mut all = Vec::new();
    for local_comm_id in [theirs, ours, wrong, CommId::NONE] {
        for local_qpn in [their_qpn, our_qpn, Qpn::new(0x333)] {
            for starting_psn in [Psn::new(1), Psn::new(their_qpn.get() * 5)] {
                let path = PathRecord {
                    local_gid: gid(from),
                    remote_gid: gid(to),
                    ..PathRecord::default()
                };
                let private_data = PrivateData::new(&header(from, to).emit()).unwrap();
                let (primary, req) = (path, good_req());
                let req =
                    Req { local_comm_id, local_qpn, starting_psn, primary, private_data, ..req };
                all.push(bytes(req));
            }
        }
        for remote_comm_id in [ours, theirs, wrong, CommId::NONE] {
            if (local_comm_id, remote_comm_id) == (theirs, ours) {
                continue;
            }
            for qpn in [our_qpn, their_qpn, Qpn::new(0x333), Qpn::default()] {
                let rep = Rep { local_comm_id, remote_comm_id, local_qpn: qpn, ..Rep::default() };
                all.push(bytes(rep));
                let remote_qpn = qpn;
                all.push(bytes(Dreq {
                    local_comm_id,
                    remote_comm_id,
                    remote_qpn,
                    ..Dreq::default()
                }));
                all.push(bytes(Lap {
                    local_comm_id,
                    remote_comm_id,
                    remote_qpn,
                    ..Lap::default()
                }));
            }
            all.push(bytes(Rtu { local_comm_id, remote_comm_id, ..Rtu::default() }));
            all.push(bytes(Drep { local_comm_id, remote_comm_id, ..Drep::default() }));
            all.push(bytes(Apr { local_comm_id, remote_comm_id, ..Apr::default() }));
            for about in [About::Req, About::Rep, About::No] {
                all.push(bytes(Mra { local_comm_id, remote_comm_id, about, ..Mra::default() }));
                for reason in [RejReason::StaleConn, RejReason::Timeout, RejReason::InvalidMtu] {
                    let rej =
                        Rej { local_comm_id, remote_comm_id, about, reason, ..Rej::default() };
                    all.push(bytes(rej));
                }
            }
            let request_id = remote_comm_id;
            all.push(bytes(SidrRep { request_id, ..SidrRep::default() }));
            all.push(bytes(SidrReq { request_id: local_comm_id, ..SidrReq::default() }));
        }
    }
    all
}

#[test]
fn a_forger_of_the_peers_address_ends_no_connection() {
    for attacked in [0, 1] {
        let mut w = World::new(1, 2);
        for host in [0, 1] {
            w.listen(host);
        }
        let ids = <[_; 2]>::from(w.pair(0, 1));
        let qpn = |w: &World, host: usize| w.hosts[host].cm.qp_params(ids[host]).unwrap().qpn;
        let peer = 1 - attacked;
        let names = Names {
            theirs: ids[peer],
            their_qpn: qpn(&w, peer).unwrap(),
            ours: ids[attacked],
            our_qpn: qpn(&w, attacked).unwrap(),
        };
        let forgeries = forgeries(peer, attacked, names);
        assert!(forgeries.len() > 400);
        for forgery in forgeries {
            let line = Mad::parse(&forgery[..]).unwrap().to_string();
            // A forger repeats, too, and asks again in another transaction.
            for transaction in [7, 7, 7, 7, 7, 8] {
                let mut forgery = forgery;
                forgery[15] = transaction;
                w.inject(gid(peer), attacked, &forgery);
                w.run();
            }
            for host in [0, 1] {
                assert_eq!(w.hosts[host].cm.state(ids[host]), Ok(S::Established), "{line}");
                while let Some(event) = w.poll_event(host) {
                    assert_ne!(event.id(), ids[host], "{event:?} of {line}");
                    // This request is forged.
                    if let CmEvent::ConnectRequest { id, .. } = event {
                        let now = w.now;
                        w.hosts[host].cm.destroy(now, id).unwrap();
                    }
                }
            }
        }
        // The two still hear each other.
        let now = w.now;
        w.hosts[peer].cm.disconnect(now, ids[peer], &[]).unwrap();
        w.run();
        assert!(matches!(w.event(attacked), CmEvent::Disconnected { .. }));
        w.tear_down();
    }
}

/// Two hosts on two links have one link-local address. The one that is not the peer may know everything: it is somebody else.
#[test]
fn the_same_address_on_another_link_is_another_peer() {
    let (link, other) = (2, 3);
    let mut w = World::new(1, 2);
    w.interface = link;
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let their_qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn.unwrap();
    let our_qpn = w.hosts[1].cm.qp_params(b).unwrap().qpn.unwrap();
    let (local_comm_id, remote_comm_id) = (a, b);
    let about = About::No;
    w.interface = other;
    for words in [
        bytes(Dreq { local_comm_id, remote_comm_id, remote_qpn: our_qpn, ..Dreq::default() }),
        bytes(Rej { local_comm_id, remote_comm_id, about, ..Rej::default() }),
    ] {
        w.inject(gid(0), 1, &words);
        assert_eq!(w.state(1, b), S::Established);
        assert!(w.poll_event(1).is_none());
    }
    // Its own request is served, though it names what the peer names.
    let answered = w.datagrams(1);
    w.inject(gid(0), 1, &bytes(Req { local_comm_id, local_qpn: their_qpn, ..good_req() }));
    let CmEvent::ConnectRequest { id, request, .. } = w.event(1) else { panic!() };
    assert_ne!(id, b);
    assert_eq!(request.interface, other);
    assert_eq!(w.datagrams(1), answered, "the peer is not asked whether it has forgotten");
    w.accept(1, id);
    let rep = w.hosts[1].cm.poll_transmit(w.now).unwrap();
    assert_eq!((rep.dgid, rep.interface), (gid(0), other));
    let now = w.now;
    w.hosts[1].cm.destroy(now, id).unwrap();
    w.run();
    assert_eq!((w.state(0, a), w.state(1, b)), (S::Established, S::Established));
    // The same words from the peer's link end the connection.
    w.interface = link;
    w.inject(
        gid(0),
        1,
        &bytes(Dreq { local_comm_id, remote_comm_id, remote_qpn: our_qpn, ..Dreq::default() }),
    );
    assert!(matches!(w.event(1), CmEvent::Disconnected { .. }));
    w.tear_down();
}

/// A guesser that knows of a challenge on its way knows neither its transaction nor both IDs.
#[test]
fn a_forged_answer_to_a_challenge_ends_nothing() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let local_qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn.unwrap();
    w.inject(gid(0), 1, &bytes(Req { local_qpn, ..good_req() }));
    let challenge = w.hosts[1].cm.poll_transmit(w.now).unwrap();
    let Ok(Mad { transaction_id, message: Message::Dreq(dreq), .. }) =
        Mad::parse(&challenge.mad.emit())
    else {
        panic!()
    };
    assert_eq!((dreq.local_comm_id, dreq.remote_comm_id), (b, a));
    assert_ne!(dreq.remote_qpn, local_qpn, "the peer itself does not obey it");
    let drep = |transaction_id, local_comm_id| {
        let drep = Drep { local_comm_id, remote_comm_id: b, ..Drep::default() };
        Mad { transaction_id, modifier: 0, message: drep.into() }.emit()
    };
    w.inject(gid(0), 1, &drep(transaction_id + 1, a));
    w.inject(gid(0), 1, &drep(transaction_id, CommId(a.0 + 1)));
    assert_eq!(w.state(1, b), S::Established);
    w.inject(gid(0), 1, &drep(transaction_id, a));
    assert_eq!(w.state(1, b), S::Timewait, "but the right one does");
    w.tear_down();
}

/// The messages that a host has made.
fn sent(w: &mut World, host: usize) -> Vec<Message> {
    let cm = &mut w.hosts[host].cm;
    let all = std::iter::from_fn(|| cm.poll_transmit(w.now));
    all.map(|sent| Mad::parse(&sent.mad.emit()).unwrap().message).collect()
}

/// A sender that insists is refused in the end, since the peer would have answered by then. Each of its messages is asked about anew.
#[test]
fn the_peer_is_asked_three_times_for_each_message() {
    let mut w = World::new(1, 2);
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let local_qpn = w.hosts[0].cm.qp_params(a).unwrap().qpn.unwrap();
    let mut req = bytes(Req { local_qpn, ..good_req() });
    for transaction in [7, 8] {
        req[15] = transaction;
        for n in 1..=5 {
            w.inject(gid(0), 1, &req);
            let sent = sent(&mut w, 1);
            let [Message::Dreq(_), refusal @ ..] = &sent[..] else { panic!("{sent:?}") };
            match refusal {
                [] => assert!(n <= 3, "{n}"),
                [Message::Rej(rej)] => {
                    assert!(n > 3 && rej.reason == RejReason::StaleConn, "{n}: {rej:?}");
                }
                more => panic!("{more:?}"),
            }
        }
    }
    assert_eq!(w.state(1, b), S::Established);
    w.tear_down();
}

/// Before a connection is established, the side that waits for the RTU asks by its REP, and the other as later.
#[test]
fn a_connection_that_is_being_made_is_asked_about_too() {
    let mut w = World::new(1, 2);
    w.listen(0);
    w.listen(1);
    let a = w.connect(0, 1);
    let b = w.take_request(1);
    w.accept(1, b);
    w.run();
    assert!(matches!(w.event(0), CmEvent::ConnectResponse { id, .. } if id == a));
    assert_eq!((w.state(0, a), w.state(1, b)), (S::RepRcvd, S::RepSent));
    let qpn = |w: &World, host: usize, id| w.hosts[host].cm.qp_params(id).unwrap().qpn.unwrap();
    let (of_a, of_b) = (qpn(&w, 0, a), qpn(&w, 1, b));
    w.inject(gid(0), 1, &bytes(Req { local_qpn: of_a, ..good_req() }));
    let asked = sent(&mut w, 1);
    assert!(matches!(&asked[..], [Message::Rep(rep)] if rep.local_comm_id == b), "{asked:?}");
    let primary = PathRecord { local_gid: gid(1), remote_gid: gid(0), ..good_req().primary };
    w.inject(gid(1), 0, &bytes(Req { local_qpn: of_b, primary, ..good_req() }));
    let challenge = w.hosts[0].cm.poll_transmit(w.now).unwrap().mad.emit();
    let Ok(Mad { transaction_id, message: Message::Dreq(dreq), .. }) = Mad::parse(&challenge)
    else {
        panic!()
    };
    assert_eq!((dreq.local_comm_id, dreq.remote_comm_id), (a, b));
    // The peer has forgotten: the program hears that its request is void.
    let drep = Drep { local_comm_id: b, remote_comm_id: a, ..Drep::default() };
    w.inject(gid(1), 0, &Mad { transaction_id, modifier: 0, message: drep.into() }.emit());
    let event = w.event(0);
    let CmEvent::Rejected { id, rejection } = event else { panic!("{event:?}") };
    assert_eq!((id, rejection.reason, rejection.about), (a, RejReason::StaleConn, About::Rep));
    assert_eq!(w.state(0, a), S::Timewait);
    w.tear_down();
}

/// The program's reaction to a forged request.
#[derive(Clone, Copy, Debug)]
enum Program {
    Waits,
    Rejects,
    Accepts,
    AcceptsAndRejects,
    AcceptsAndDestroys,
    AcceptsAndExits,
}

#[test]
fn a_forged_request_brings_its_victim_three_datagrams_at_most() {
    use Program as P;
    let programs = [
        P::Waits,
        P::Rejects,
        P::Accepts,
        P::AcceptsAndRejects,
        P::AcceptsAndDestroys,
        P::AcceptsAndExits,
    ];
    for quick_repeats in [false, true] {
        for program in programs {
            for code in [0, 14, 20, 31] {
                let config = anyverbs_proto::cm::CmConfig {
                    quick_repeats,
                    ..anyverbs_proto::cm::CmConfig::default()
                };
                let mut w = World::with_config(1, 2, config);
                w.listen(1);
                w.kill(0);
                let req = Req {
                    local_response_timeout: code,
                    remote_response_timeout: code,
                    max_cm_retries: 15,
                    ..good_req()
                };
                w.inject(gid(0), 1, &bytes(req));
                let id = w.take_request(1);
                let begin = w.now;
                if !matches!(program, P::Waits | P::Rejects) {
                    w.accept(1, id);
                    w.run_for(Duration::from_millis(100));
                    assert!(w.datagrams(1) <= 2, "a stranger sets no pace");
                }
                let now = w.now;
                match program {
                    P::Waits | P::Accepts => {}
                    P::Rejects | P::AcceptsAndRejects => {
                        w.hosts[1].cm.reject(now, id, RejReason::Consumer, &[], &[]).unwrap();
                    }
                    P::AcceptsAndDestroys => w.hosts[1].cm.destroy(now, id).unwrap(),
                    P::AcceptsAndExits => w.hosts[1].cm.shutdown(now),
                }
                w.run_out();
                let sent = w.datagrams(1);
                assert!((1..=3).contains(&sent), "{program:?}, code {code}: {sent}");
                assert!(w.now.since(begin) < Duration::from_secs(3600));
                w.tear_down();
                assert_eq!(w.datagrams(1), sent, "nor later");
            }
        }
    }
}

/// A client that lost the answer repeats its request, and gets the answer again each time.
#[test]
fn each_repeated_request_earns_an_answer() {
    let mut w = World::new(1, 2);
    w.listen(1);
    w.kill(0);
    let req = bytes(Req { max_cm_retries: 15, ..good_req() });
    w.inject(gid(0), 1, &req);
    let id = w.take_request(1);
    w.accept(1, id);
    w.run_for(Duration::from_secs(2));
    for _ in 0..12 {
        let before = w.datagrams(1);
        w.inject(gid(0), 1, &req);
        w.run_for(Duration::from_millis(100));
        assert_eq!(w.datagrams(1), before + 1);
    }
    w.tear_down();
}

//! Connections of a process that is gone, ended by another of its host.

use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::cm::{CmConfig, CmError, ConnectionState as S, Record};

use crate::world::{Fate, World};

const CONFIG: CmConfig = CmConfig {
    slot: 0,
    first_id: 1,
    ca_guid: 0,
    ack_delay: 15,
    max_rd_atomic: 16,
    max_connections: 100,
    max_orphans: 100,
    service_timeout: 24,
    quick_repeats: false,
    records: true,
};

fn world() -> World {
    World::with_config(1, 2, CONFIG)
}

/// The record of the one connection of a host.
fn record(w: &mut World, host: usize) -> Record {
    let (id, record) = w.hosts[host].cm.poll_record().unwrap();
    assert_eq!(w.hosts[host].cm.poll_record(), None);
    let record = record.unwrap();
    assert_eq!(record.id, id);
    Record::parse(&record.emit()).unwrap()
}

#[test]
fn either_side_is_told_for_the_other() {
    for dead in [0, 1] {
        let mut w = world();
        w.listen(1);
        let ids = <[_; 2]>::from(w.pair(0, 1));
        let record = record(&mut w, dead);
        assert_eq!((record.id, record.remote_id), (ids[dead], ids[1 - dead]));
        let config = CmConfig { first_id: 77, ..CONFIG };
        w.restart(dead, config);
        let now = w.now;
        w.hosts[dead].cm.disconnect_for(now, &record).unwrap();
        assert_eq!(w.hosts[dead].cm.disconnect_for(now, &record), Err(CmError::InUse));
        assert!(w.hosts[dead].cm.has(record.id));
        assert!(!w.hosts[dead].cm.has_told(record.id), "the DREQ waits to be sent");
        w.run();
        assert!(w.hosts[dead].cm.has_told(record.id));
        let (other, id) = (1 - dead, ids[1 - dead]);
        match w.event(other) {
            CmEvent::Disconnected { how: Disconnected::Requested(_), .. } => {}
            event => panic!("{event:?}"),
        }
        w.hosts[other].cm.disconnect(now, id, &[]).unwrap();
        w.run();
        assert_eq!(w.hosts[dead].cm.poll_record(), Some((record.id, None)), "it is told");
        assert!(w.poll_event(dead).is_none(), "nobody there asked");
        w.run_out();
        assert_eq!(w.hosts[dead].cm.usage().connections, 0);
        assert!(w.hosts[dead].cm.has_told(record.id));
    }
}

#[test]
fn a_lost_request_is_repeated_and_given_up_at_last() {
    for lost in [3, usize::MAX] {
        let mut w = world();
        w.listen(1);
        let (_, b) = w.pair(0, 1);
        let record = record(&mut w, 0);
        w.restart(0, CmConfig { first_id: 77, ..CONFIG });
        w.next(lost, |_, message| matches!(message, Message::Dreq(_)), Fate::Drop);
        let now = w.now;
        w.hosts[0].cm.disconnect_for(now, &record).unwrap();
        w.run_out();
        let sent = w.hosts[0].cm.counters().tx_msgs.of(Attribute::Dreq);
        if lost == usize::MAX {
            assert_eq!(sent, u64::from(record.max_retries) + 1);
            assert_eq!(w.state(1, b), S::Established);
        } else {
            assert!(sent >= 4, "{sent}");
            assert_eq!(w.state(1, b), S::DreqRcvd);
        }
        assert_eq!(w.hosts[0].cm.poll_record(), Some((record.id, None)));
        assert_eq!(w.hosts[0].cm.usage().connections, 0);
    }
}

#[test]
fn an_ended_connection_has_no_record() {
    let mut w = world();
    w.listen(1);
    let (a, b) = w.pair(0, 1);
    let now = w.now;
    let ids = [a, b];
    for (host, id) in [(0, a), (1, b)] {
        assert_eq!(record(&mut w, host).id, id);
    }
    w.hosts[0].cm.disconnect(now, a, &[]).unwrap();
    w.run();
    // The peer has not agreed yet: it would still have to be told.
    assert!((0..2).all(|host| w.hosts[host].cm.poll_record().is_none()));
    assert!(matches!(w.event(1), CmEvent::Disconnected { .. }));
    w.hosts[1].cm.disconnect(w.now, b, &[]).unwrap();
    w.run();
    for (host, id) in ids.into_iter().enumerate() {
        assert_eq!(w.hosts[host].cm.poll_record(), Some((id, None)));
    }
    w.run_out();
    while w.poll_event(0).or_else(|| w.poll_event(1)).is_some() {}
    // A request that is refused never had one.
    w.connect(0, 1);
    let c = w.take_request(1);
    w.hosts[1].cm.destroy(w.now, c).unwrap();
    w.run_out();
    assert!((0..2).all(|host| w.hosts[host].cm.poll_record().is_none()));
}

//! Records of processes that were killed.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyverbs_net::host::PAYLOAD_LEN;
use anyverbs_net::{Journal, Store};
use anyverbs_proto::cm::Record;
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_testing::in_own_process;

use super::{TIMEOUT, gsi};

fn gid(address: &str) -> Gid {
    Gid::from(address.parse::<IpAddr>().unwrap())
}

#[test]
fn connections_that_cannot_end_here_are_left_to_others() {
    in_own_process(
        "gsi::tests::records::connections_that_cannot_end_here_are_left_to_others",
        || {
            let gsi = gsi();
            let registry = gsi.services.store().registry();
            let other = Journal::join(&Store::join(registry).unwrap()).unwrap();
            let record = |id, sgid| Record {
                id: CommId(id),
                remote_id: CommId(7),
                remote_qpn: Qpn::new(8),
                sgid,
                // No host has this address.
                dgid: gid("192.0.2.1"),
                interface: 0,
                traffic_class: 0,
                flow_label: 0,
                hop_limit: 64,
                timeout: Duration::from_secs(60),
                max_retries: 15,
            };
            let ours = record(0xfe00_0001, gsi.core().gids.entries()[0].gid);
            let others = [2, 3].map(|n| record(0xfe00_0000 + n, gid("192.0.2.2")));
            let mut sections = [other.section().unwrap(), other.section().unwrap()];
            for payload in [[0xff; PAYLOAD_LEN], ours.emit(), others[0].emit()] {
                sections[0].add(&payload).unwrap();
            }
            sections[1].add(&others[1].emit()).unwrap();
            drop(sections);
            // The records that others can take. This process holds them now and then, for a moment.
            let expect = |records: &[Record]| {
                let end = Instant::now() + TIMEOUT;
                let expected: BTreeSet<_> = records.iter().map(Record::emit).collect();
                loop {
                    let taken = other.take_abandoned(9).unwrap();
                    let found =
                        taken.iter().flat_map(|left| left.records()).map(|(_, bytes)| *bytes);
                    if found.collect::<BTreeSet<_>>() == expected {
                        return;
                    }
                    drop(taken);
                    assert!(Instant::now() < end, "{records:?}");
                    std::thread::sleep(Duration::from_millis(1));
                }
            };

            gsi.look_for_abandoned();
            assert_eq!(gsi.abandoned(), 1);
            expect(&others[1..]);
            gsi.look_for_abandoned();
            assert_eq!(gsi.abandoned(), 1);
            // Asked in vain.
            assert_eq!(gsi.leave_abandoned(Duration::ZERO), 3);
            expect(&others);

            // It was not asked for long enough.
            let ours = record(0xfe00_0004, ours.sgid);
            let mut section = other.section().unwrap();
            section.add(&ours.emit()).unwrap();
            drop(section);
            let end = Instant::now() + TIMEOUT;
            while gsi.abandoned() == 0 {
                assert!(Instant::now() < end, "it does not begin");
                gsi.look_for_abandoned();
            }
            assert_eq!(gsi.leave_abandoned(Duration::from_secs(3600)), 3);
            expect(&[others[0], others[1], ours]);
        },
    );
}

/// A process without connections holds nothing of the journal.
#[test]
fn a_process_without_connections_does_not_join() {
    in_own_process("gsi::tests::records::a_process_without_connections_does_not_join", || {
        let gsi = gsi();
        gsi.drive_cm(|machine, _, now| machine.on_timer(now));
        assert!(gsi.journal.get().is_none());
        gsi.with_cm(|_, _, _| ());
        assert!(gsi.journal.get().is_some());
    });
}

/// Answers to ended processes reach any process, by chance always the same one. It has to know the successor, and holds
/// nothing of the journal for that.
#[test]
fn successors_are_known_without_joining() {
    let name = "gsi::tests::records::successors_are_known_without_joining";
    in_own_process(name, || {
        let gsi = gsi();
        assert!(gsi.successors().is_empty());
        let registry = gsi.services.store().registry();
        let other = Journal::join(&Store::join(registry).unwrap()).unwrap();
        other.section().unwrap().add(&[1; PAYLOAD_LEN]).unwrap();
        let taken = other.take_abandoned(9).unwrap();
        assert_eq!(taken.len(), 1);
        assert_eq!(gsi.successors(), BTreeSet::from([9]));
        assert!(gsi.journal.get().is_none());
        gsi.with_cm(|_, _, _| ());
        assert_eq!(gsi.successors(), BTreeSet::from([9]));
    });
}

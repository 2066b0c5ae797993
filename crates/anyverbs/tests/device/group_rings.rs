//! Multicast between processes of one host: by rings where every member has one, else by the kernel, never both. Each in a
//! network namespace of its own, since what else has joined a group decides, and the counters of a process are compared.

use std::net::{Ipv4Addr, UdpSocket};

use anyverbs::*;
use anyverbs_net::{Registry, Slot};

use crate::host::{ip, succeeds};
use crate::multicast::{BURST, Member, Process, gid, run};

/// Groups of the loopback interface.
const V4: (&str, &str) = ("239.4.7.92", "127.0.0.1");
const V6: (&str, &str) = ("ff15::4792", "::1");

/// What a process has room for that does not read, where datagrams are handed on.
const FEW: u32 = 10;

fn join(member: &mut Process, (group, source): (&str, &str)) -> String {
    member.ask(&format!("join {group} {source}"))
}

/// Of the process whose queue pair has this number.
fn slot_of(qpn: &str) -> u8 {
    Qpn::new(qpn.parse().unwrap()).slot()
}

fn hear(others: &mut [Process], first: u32, n: u32) {
    for other in others {
        other.ask(&format!("hear {first} {n}"));
    }
}

/// What each has received by rings and in all.
fn counts(others: &mut [Process]) -> Vec<[u64; 2]> {
    let count = |other: &mut Process| {
        let counts = other.ask("count");
        let (by_rings, all) = counts.split_once(' ').unwrap();
        [by_rings, all].map(|n| n.parse().unwrap())
    };
    others.iter_mut().map(count).collect()
}

/// A round of this member's: how many packets went by rings, and how many each of the others has received, by rings and in all.
fn round(a: &mut Member, others: &mut [Process], first: u32) -> (u64, Vec<[u64; 2]>) {
    round_of(BURST, a, others, first)
}

fn round_of(n: u32, a: &mut Member, others: &mut [Process], first: u32) -> (u64, Vec<[u64; 2]>) {
    let (sent, before) = (a.sent_by_rings(), counts(others));
    a.say(first..first + n);
    a.hears(first..first + n);
    hear(others, first, n);
    let after = counts(others);
    let since = before.iter().zip(after).map(|([b, all], [b2, all2])| [b2 - b, all2 - all]);
    (a.sent_by_rings() - sent, since.collect())
}

/// To two others, by rings alone.
fn by_rings() -> (u64, Vec<[u64; 2]>) {
    let n = u64::from(BURST);
    (2 * n, vec![[n, n]; 2])
}

pub(crate) fn by_rings_where_all_have_them() {
    ip("link set lo up");
    ip("link add va type veth peer name vb");
    ip("addr add 10.9.9.1/24 dev va");
    ip("link set vb up");
    ip("link set va up");
    for place in [V4, V6, ("239.4.7.93", "10.9.9.1")] {
        let mut others = [(); 2].map(|()| Process::here(&[]));
        others.iter_mut().for_each(|other| drop(join(other, place)));
        let mut a = Member::new(place.0, place.1);
        assert_eq!(round(&mut a, &mut others, 0), by_rings(), "{place:?}");
        // Others speak, who are members and hear themselves.
        let before = a.received();
        others[1].ask("say 100");
        a.hears(100..100 + BURST);
        hear(&mut others, 100, BURST);
        let since = [0, 1].map(|i| a.received()[i] - before[i]);
        assert_eq!(since, [u64::from(BURST); 2], "{place:?}");
        // One more queue pair, in a process that is a member already, hears it as well.
        let mut b = Member::new(place.0, place.1);
        assert_eq!(round(&mut a, &mut others, 200), by_rings(), "{place:?}");
        b.hears(200..200 + BURST);
        drop(b);
        // Who leaves gets no more; who comes does at once.
        others[0].ask("leave");
        a.say(300..300 + BURST);
        a.hears(300..300 + BURST);
        hear(&mut others[1..], 300, BURST);
        join(&mut others[0], place);
        assert_eq!(round(&mut a, &mut others, 400), by_rings(), "{place:?}");
        // A sender need not be a member.
        a.e.qp.detach_mcast(a.group, 0).unwrap();
        let sent = a.sent_by_rings();
        a.say(500..500 + BURST);
        a.hears(0..0);
        hear(&mut others, 500, BURST);
        assert_eq!(a.sent_by_rings() - sent, 2 * u64::from(BURST), "{place:?}");
    }
}

pub(crate) fn by_the_kernel_where_others_take_part() {
    ip("link set lo up");
    // What joins or leaves any group makes senders look again.
    let look_again = |a: &Member| {
        a.e.qp.attach_mcast(gid("239.4.7.94"), 0).unwrap();
        a.e.qp.detach_mcast(gid("239.4.7.94"), 0).unwrap();
    };
    let mut others = [(); 2].map(|()| Process::here(&[]));
    others.iter_mut().for_each(|other| drop(join(other, V4)));
    let mut a = Member::new(V4.0, V4.1);
    assert_eq!(round(&mut a, &mut others, 0), by_rings());
    // A socket that has nothing to do with the device.
    let stranger = UdpSocket::bind("0.0.0.0:0").unwrap();
    let group = V4.0.parse().unwrap();
    stranger.join_multicast_v4(&group, &Ipv4Addr::LOCALHOST).unwrap();
    look_again(&a);
    let by_udp = (0, vec![[0, u64::from(BURST)]; 2]);
    assert_eq!(round(&mut a, &mut others, 100), by_udp);
    drop(stranger);
    look_again(&a);
    assert_eq!(round(&mut a, &mut others, 200), by_rings());
    drop((a, others));
    for place in [V4, V6] {
        // A process without rings is known at once, and gets what all get.
        let mut others =
            [Process::here(&[("ANYVERBS_SHM", "0")]), Process::here(&[]), Process::here(&[])];
        others.iter_mut().for_each(|other| drop(join(other, place)));
        let mut a = Member::new(place.0, place.1);
        let (sent, received) = round_of(FEW, &mut a, &mut others, 300);
        assert_eq!(sent, 0, "{place:?}");
        assert!(received.iter().all(|[by_rings, _]| *by_rings == 0), "{place:?}: {received:?}");
        // It speaks itself.
        others[0].ask(&format!("say 400 {FEW}"));
        a.hears(400..400 + FEW);
        hear(&mut others, 400, FEW);
        // It ends without a word, and somebody else joins.
        let [gone, second, third] = others;
        drop(gone);
        look_again(&a);
        let mut others = [second, third];
        assert_eq!(round(&mut a, &mut others, 500), by_rings(), "{place:?}");
    }
}

/// A member ends without a word, and a process gets its slot that has rings, but uses no groups.
pub(crate) fn an_heir_of_a_members_slot() {
    ip("link set lo up");
    for place in [V4, V6] {
        let mut a = Member::new(place.0, place.1);
        let mut others = [Process::here(&[])];
        let slot = slot_of(&join(&mut others[0], place));
        assert_eq!(round(&mut a, &mut others, 0).0, u64::from(BURST), "{place:?}");
        drop(others);
        // It is the only one that is free.
        let registry = Registry::new(&std::env::var("ANYVERBS_REGISTRY").unwrap()).unwrap();
        let taken = (1..=255).filter(|n| *n != slot);
        let taken: Vec<_> = taken.filter_map(|n| Slot::claim_number(&registry, n).ok()).collect();
        let mut heir = Process::here(&[]);
        assert_eq!(slot_of(&heir.ask("alone")), slot);
        drop(taken);
        // There are as many members as names on the list.
        let mut others = [Process::here(&[("ANYVERBS_SHM", "0")])];
        join(&mut others[0], place);
        let by_udp = (0, vec![[0, u64::from(FEW)]]);
        assert_eq!(round_of(FEW, &mut a, &mut others, 100), by_udp, "{place:?}");
        // By rings again, where all have them.
        others = [Process::here(&[])];
        join(&mut others[0], place);
        let n = u64::from(BURST);
        assert_eq!(round(&mut a, &mut others, 200), (n, vec![[n, n]]), "{place:?}");
        // It is there still.
        heir.ask("alone");
    }
}

/// Sending does not wait for it, nor do others.
pub(crate) fn a_member_that_does_not_read() {
    ip("link set lo up");
    let mut others = [(); 2].map(|()| Process::here(&[]));
    others.iter_mut().for_each(|other| drop(join(other, V4)));
    let mut a = Member::new(V4.0, V4.1);
    assert_eq!(round(&mut a, &mut others, 0), by_rings());
    a.e.qp.detach_mcast(a.group, 0).unwrap();
    let (stopped, mut status) = (others[0].id() as i32, 0);
    // SAFETY: a child of this process, which has not ended, and a live integer.
    unsafe {
        assert_eq!(libc::kill(stopped, libc::SIGSTOP), 0);
        assert_eq!(libc::waitpid(stopped, &raw mut status, libc::WUNTRACED), stopped);
    }
    assert!(libc::WIFSTOPPED(status));
    let (rounds, sent) = (80, a.sent_by_rings());
    for first in (0..rounds).map(|n| 100 + n * BURST) {
        a.say(first..first + BURST);
        // All have left when the call returns: nothing has been received since that could have made room.
        let mut wcs = [Wc::default(); 64];
        assert_eq!(a.e.cq.poll(&mut wcs).unwrap(), BURST as usize);
        a.sending = 0;
        others[1].ask(&format!("hear {first} {BURST}"));
    }
    let sent = a.sent_by_rings() - sent;
    let all = u64::from(rounds * BURST);
    assert!(sent > all + 1000 && sent < 2 * all, "{sent} of {all} to each of two");
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(stopped, libc::SIGCONT) }, 0);
    others[0].ask("count");
}

#[test]
fn rings_carry_groups_within_a_host() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("rings"));
    }
}

#[test]
fn the_kernel_carries_groups_where_others_take_part() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("others"));
    }
}

#[test]
fn who_has_ended_is_no_member_whoever_has_its_slot() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("heir"));
    }
}

#[test]
fn a_full_ring_drops_what_is_for_groups() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("stopped"));
    }
}

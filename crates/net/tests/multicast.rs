//! Multicast groups: every member gets one copy of each datagram, and no other process gets any.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::{Destination, PortOptions, RxBatch, Slot, TxBatch, UdpPort, is_handed_on};

const PORT: u16 = 4791;
const LOOPBACK: u32 = 1;

/// Three processes that share the port, as far as the kernel can tell.
fn three(name: &str) -> [UdpPort; 3] {
    let slots = [0, 1, 2].map(|_| Arc::new(Slot::claim(name).unwrap()));
    // Joining asks the present members. No thread reads for them here, so it takes some time.
    slots.map(|slot| {
        UdpPort::open(PortOptions { slot: Some(slot), steer_offset: 5, ..PortOptions::new(PORT) })
            .unwrap()
    })
}

fn veth() -> u32 {
    netns::ip("link add va type veth peer name vb");
    netns::plug_in(["va", "vb"]);
    netns::ip("addr add 10.9.0.1/24 dev va");
    netns::ip("addr add fd00::1/64 dev va nodad");
    anyverbs_net::interfaces().unwrap().iter().find(|i| i.name == "va").unwrap().index
}

fn to(group: &str, source: &str, interface: u32) -> Destination {
    Destination {
        interface,
        source: Some(source.parse().unwrap()),
        hop_limit: 7,
        ..Destination::new((group.parse::<IpAddr>().unwrap(), PORT).into())
    }
}

/// Sends a whole GSO batch, whose last datagram is short.
fn send(port: &UdpPort, to: &Destination) -> usize {
    let mut out = TxBatch::new();
    for (fill, len) in [(1, 100), (2, 100), (3, 40)] {
        let (room, _) = out.segment(port, to, len).unwrap();
        room.fill(fill);
    }
    out.flush(port).unwrap();
    3
}

/// The number of datagrams for `group` at a port, after `expected` of them were waited for and checked.
fn count(port: &UdpPort, to: &Destination, expected: usize) -> usize {
    let mut batch = RxBatch::new(8).unwrap();
    let deadline = Instant::now() + Duration::from_secs(5);
    let mut n = 0;
    let mut take = |d: anyverbs_net::Datagram<'_>| {
        assert_eq!((d.destination, d.hop_limit), (to.address.ip(), 7));
        assert_eq!((d.source.ip(), d.interface), (to.source.unwrap(), to.interface));
        n += 1;
        assert!(d.bytes.iter().all(|b| *b == n as u8), "datagram {n}: {:?}", d.bytes);
        n
    };
    let mut seen = 0;
    loop {
        port.receive(&mut batch).unwrap();
        batch.datagrams().for_each(|d| seen = take(d));
        // Datagrams over this host's own links are there when the sender's call returns.
        if seen >= expected || Instant::now() > deadline {
            return seen;
        }
    }
}

/// Lines of the kernel's list of memberships for a group.
fn memberships(group: IpAddr) -> usize {
    let (file, text) = match group {
        IpAddr::V4(ip) => ("igmp", format!("{:08X}", u32::from_ne_bytes(ip.octets()))),
        IpAddr::V6(ip) => ("igmp6", ip.octets().iter().map(|b| format!("{b:02x}")).collect()),
    };
    let list = std::fs::read_to_string(format!("/proc/thread-self/net/{file}")).unwrap();
    list.lines().filter(|line| line.contains(&text)).count()
}

fn everybody_gets_one_copy(name: &str, group: &str, source: &str, interface: u32) {
    let ports = three(name);
    let to = to(group, source, interface);
    let ip = to.address.ip();
    assert_eq!(memberships(ip), 0);
    ports[0].join_multicast(ip, interface).unwrap();
    ports[1].join_multicast(ip, interface).unwrap();
    assert_eq!(memberships(ip), 1);
    for sender in &ports {
        send(sender, &to);
        for (i, port) in ports.iter().enumerate() {
            let expected = if i == 2 { 0 } else { 3 };
            assert_eq!(count(port, &to, expected), expected, "{group} at {i}");
        }
    }
    // Each join has its leave.
    ports[0].join_multicast(ip, interface).unwrap();
    ports[0].leave_multicast(ip, interface).unwrap();
    send(&ports[2], &to);
    assert_eq!(count(&ports[0], &to, 3), 3);
    assert_eq!(count(&ports[1], &to, 3), 3);
    ports[0].leave_multicast(ip, interface).unwrap();
    send(&ports[2], &to);
    assert_eq!(count(&ports[0], &to, 0), 0, "left");
    assert_eq!(count(&ports[1], &to, 3), 3);
    ports[1].leave_multicast(ip, interface).unwrap();
    assert_eq!(memberships(ip), 0);
    let again = ports[0].leave_multicast(ip, interface).unwrap_err();
    assert_eq!(again.kind(), io::ErrorKind::AddrNotAvailable);
}

#[test]
fn on_a_network() {
    if !netns::isolate_as_root() {
        return;
    }
    let va = veth();
    everybody_gets_one_copy("mc-v4", "239.1.2.3", "10.9.0.1", va);
    everybody_gets_one_copy("mc-v4-local", "224.0.0.77", "10.9.0.1", va);
    everybody_gets_one_copy("mc-v6", "ff15::1234", "fd00::1", va);
    let ports = three("mc-errors");
    let error = ports[0].join_multicast("239.1.2.3".parse().unwrap(), 999).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::ENODEV));
    assert!(ports[0].leave_multicast("239.1.2.3".parse().unwrap(), 999).is_err(), "not joined");
}

#[test]
fn on_the_loopback() {
    if !netns::isolate_as_root() {
        return;
    }
    everybody_gets_one_copy("mc-lo-v4", "239.1.2.3", "127.0.0.1", LOOPBACK);
    // IPv6 knows no groups there: the sender forwards.
    let ports = three("mc-lo-v6");
    let group = "ff15::1234".parse().unwrap();
    assert!(is_handed_on(group, LOOPBACK));
    ports[0].join_multicast(group, LOOPBACK).unwrap();
    ports[0].leave_multicast(group, LOOPBACK).unwrap();
    assert!(ports[0].leave_multicast(group, LOOPBACK).is_err());
    let slot = |i: usize| ports[i].slot().unwrap().number();
    let mut others = [slot(1), slot(2)];
    others.sort_unstable();
    assert_eq!(ports[0].sharers().unwrap(), others);
}

#[test]
fn more_groups_than_a_socket_has_room_for() {
    if !netns::isolate_as_root() {
        return;
    }
    let va = veth();
    let ports = three("mc-many");
    let group = |i: u32| IpAddr::from(Ipv4Addr::from_bits(0xef00_0000 + i));
    for i in 0..100 {
        ports[0].join_multicast(group(i), va).unwrap();
    }
    for i in [0, 19, 20, 50, 99] {
        let to = to(&group(i).to_string(), "10.9.0.1", va);
        send(&ports[1], &to);
        assert_eq!(count(&ports[0], &to, 3), 3, "group {i}");
    }
    for i in 0..100 {
        assert_eq!(memberships(group(i)), 1);
        ports[0].leave_multicast(group(i), va).unwrap();
        assert_eq!(memberships(group(i)), 0);
    }
    // It no longer gets the groups that others join.
    ports[1].join_multicast(group(0), va).unwrap();
    let to = to("239.0.0.0", "10.9.0.1", va);
    send(&ports[1], &to);
    assert_eq!(count(&ports[1], &to, 3), 3);
    assert_eq!(count(&ports[0], &to, 0), 0);
}

//! Datagrams by connected sockets: their IPv4 IDs, headers, errors.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use std::collections::BTreeSet;
use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::Duration;

use anyverbs_net::{Destination, Outlet, PortOptions, RxBatch, TxBatch, UdpPort};
use socket2::{Domain, Socket, Type};

const PORT: u16 = 4791;

/// The IPv4 datagrams that leave the cable at its far end, `vb`. None is empty.
struct Wire(Socket);

impl Wire {
    /// A cable from `va`, with 10.9.0.1 and no neighbours. Its device does not segment. None: no raw sockets here.
    fn lay() -> Option<Self> {
        netns::ip("link add va type veth peer name vb");
        netns::ip("link set va mtu 9000 gso_max_segs 1");
        netns::ip("link set vb mtu 9000");
        netns::plug_in(["va", "vb"]);
        netns::ip("addr add 10.9.0.1/24 dev va");
        let packet = Socket::new(Domain::PACKET, Type::RAW, None)
            .inspect_err(|error| {
                anyverbs_testing::skip(format_args!("no AF_PACKET socket: {error}"))
            })
            .ok()?;
        let interfaces = anyverbs_net::interfaces().unwrap();
        // SAFETY: all-zero is a valid sockaddr_ll.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = 0x0800u16.to_be();
        address.sll_ifindex = interfaces.iter().find(|i| i.name == "vb").unwrap().index as i32;
        let len = size_of::<libc::sockaddr_ll>() as u32;
        // SAFETY: a live address of the given size.
        let rc = unsafe { libc::bind(packet.as_raw_fd(), (&raw const address).cast(), len) };
        assert_eq!(rc, 0);
        packet.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        Some(Self(packet))
    }

    /// The ID and the first byte of the next `n` datagrams that are not empty.
    fn next(&self, n: usize) -> Vec<(u16, u8)> {
        let mut seen = Vec::new();
        while seen.len() < n {
            let mut frame = [0; 10_000];
            let len = (&self.0).read(&mut frame).expect("a packet in time");
            let ip = &frame[14..len];
            if ip[9] == 17 {
                assert!(u16::from_be_bytes([ip[24], ip[25]]) > 8, "an empty one");
                assert_eq!(ip[6] >> 5, 2, "DF alone");
                seen.push((u16::from_be_bytes([ip[4], ip[5]]), ip[28]));
            }
        }
        seen
    }
}

fn outlet(port: &UdpPort, source: &str, to: &str) -> Outlet {
    let source: IpAddr = source.parse().unwrap();
    port.connect(Destination { source: Some(source), ..Destination::new(to.parse().unwrap()) })
}

/// Stages a batch of `n` datagrams; their IDs, and their first byte.
fn stage(out: &mut TxBatch, port: &UdpPort, to: &Outlet, n: usize, fill: u8) -> Vec<(u16, u8)> {
    let one = |_| {
        let (room, id) = out.segment(port, to, 100).unwrap();
        room.fill(fill);
        (id, fill)
    };
    (0..n).map(one).collect()
}

/// As [`stage`], and sends them.
fn send(out: &mut TxBatch, port: &UdpPort, to: &Outlet, n: usize, fill: u8) -> Vec<(u16, u8)> {
    let staged = stage(out, port, to, n, fill);
    out.flush(port).unwrap();
    staged
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn without_offloads_no_datagram_has_an_id() {
    if !netns::isolate_as_root() {
        return;
    }
    let Some(wire) = Wire::lay() else { return };
    netns::ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev va");
    let port = UdpPort::open(PortOptions { gso: false, ..PortOptions::new(PORT) }).unwrap();
    let to = outlet(&port, "10.9.0.1", "10.9.0.2:4791");
    let mut out = TxBatch::new();
    for n in [1, 1, 5, 1] {
        let told = send(&mut out, &port, &to, n, 7);
        assert_eq!(told, vec![(0, 7); n]);
        assert_eq!(wire.next(n), told);
    }
}

#[test]
fn each_datagram_has_the_id_that_its_sender_was_told() {
    if !netns::isolate_as_root() {
        return;
    }
    let Some(wire) = Wire::lay() else { return };
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let to = outlet(&port, "10.9.0.1", "10.9.0.2:4791");
    let mut out = TxBatch::new();
    // The first wait for the address of their neighbour.
    let told = send(&mut out, &port, &to, 3, 1);
    netns::ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev va");
    assert_eq!(wire.next(3), told);
    let mut expected = None;
    for round in 0..400 {
        let n = [1, 10, 64, 2][round % 4];
        let batch = send(&mut out, &port, &to, n, round as u8);
        // They count up by one for each batch, once the number is known.
        if let Some(first) = expected {
            assert_eq!(batch[0].0, first, "round {round}");
        }
        expected = (batch[0].0 >= 128).then(|| batch[0].0.wrapping_add(1)).or(expected);
        assert_eq!(wire.next(n), batch, "round {round}");
    }
    assert!(expected.is_some(), "the number is never known");
    assert_eq!(out.stats().dropped, 0);
}

#[test]
fn after_an_error_the_number_is_found_out_again() {
    if !netns::isolate_as_root() {
        return;
    }
    let Some(wire) = Wire::lay() else { return };
    netns::ip("neigh replace 10.9.0.2 lladdr 02:00:00:00:00:02 dev va");
    // A router forwards none of those that are empty.
    std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let to = outlet(&port, "10.9.0.1", "10.9.0.2:4791");
    let mut out = TxBatch::new();
    for round in 0..20 {
        let [first, second] = [1, 5].map(|n| {
            let told = send(&mut out, &port, &to, n, round);
            assert_eq!(wire.next(n), told, "round {round}");
            told[0].0
        });
        assert_eq!(second, first.wrapping_add(1), "by the connected socket");
        // Longer than the path takes: the datagram has got an ID, or not.
        let before = out.stats().dropped;
        let (room, _) = out.segment(&port, &to, 20_000).unwrap();
        room.fill(round);
        let error = out.flush(&port).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EMSGSIZE));
        assert_eq!(out.stats().dropped, before + 1);
    }
}

/// Sends to a port of this host that refuses.
fn refusals_cost_nothing() {
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut out = TxBatch::new();
    for (source, to) in [("127.0.0.1", "127.0.0.1:4790"), ("::1", "[::1]:4790")] {
        let to = outlet(&port, source, to);
        for round in 0..100 {
            send(&mut out, &port, &to, 1 + round % 3, 7);
        }
    }
    assert_eq!((out.stats().dropped, out.stats().sends, out.stats().gso_refused), (0, 200, 0));
}

#[test]
fn a_port_that_nobody_holds_costs_no_datagram() {
    if !netns::isolate() {
        return;
    }
    refusals_cost_nothing();
}

/// As a firewall refuses that says so.
#[test]
fn what_the_network_reports_costs_no_datagram() {
    if !netns::isolate_as_root() {
        return;
    }
    for rule in [
        "add table inet t",
        "add chain inet t in { type filter hook input priority 0 ; }",
        "add rule inet t in ip daddr 127.0.0.1 udp dport 4790 reject with icmp type host-prohibited",
        "add rule inet t in ip6 daddr ::1 udp dport 4790 reject with icmpv6 type admin-prohibited",
    ] {
        let output = std::process::Command::new("nft").args(rule.split(' ')).output();
        if !output.as_ref().is_ok_and(|output| output.status.success()) {
            anyverbs_testing::skip(format_args!("no firewall here: {output:?}"));
            return;
        }
    }
    refusals_cost_nothing();
}

#[test]
fn datagrams_of_another_socket_are_another_batch() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let to = outlet(&port, "127.0.0.1", "127.0.0.1:4791");
    let (mut out, mut batch) = (TxBatch::new(), RxBatch::new(8).unwrap());
    for (fill, connected) in [(0, true), (1, false), (2, true)] {
        let room = if connected {
            out.segment(&port, &to, 50)
        } else {
            out.segment(&port, to.destination(), 50)
        };
        room.unwrap().0.fill(fill);
    }
    out.flush(&port).unwrap();
    let (mut sources, mut came) = ([0; 3], 0);
    while came < 3 {
        port.receive(&mut batch).unwrap();
        for datagram in batch.datagrams() {
            sources[usize::from(datagram.bytes[0])] = datagram.source.port();
            came += 1;
        }
    }
    let ports = [port.source_port(&to).unwrap(), port.source_port(to.destination()).unwrap()];
    assert_ne!(ports[0], ports[1]);
    assert_eq!(sources, [ports[0], ports[1], ports[0]]);
}

#[test]
fn two_batches_at_once_leave_by_one_port() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let to = outlet(&port, "127.0.0.1", "127.0.0.1:4791");
    let (mut out, mut other) = (TxBatch::new(), TxBatch::new());
    let first = stage(&mut out, &port, &to, 3, 1)[0].0;
    // The other one does not wait.
    assert_eq!(send(&mut other, &port, &to, 2, 2), [(0, 2), (1, 2)]);
    assert_eq!(stage(&mut out, &port, &to, 1, 1)[0].0, first.wrapping_add(3));
    out.flush(&port).unwrap();
    // A batch that is never sent gives the number back.
    stage(&mut other, &port, &to, 1, 3);
    drop(other);
    assert_eq!(send(&mut out, &port, &to, 1, 4)[0].0, first.wrapping_add(1));
    let mut batch = RxBatch::new(8).unwrap();
    let (mut seen, mut sources) = (Vec::new(), Vec::new());
    while seen.len() < 7 {
        port.receive(&mut batch).unwrap();
        for datagram in batch.datagrams() {
            seen.push(datagram.bytes[0]);
            sources.push(datagram.source);
        }
    }
    assert_eq!(seen, [2, 2, 1, 1, 1, 1, 4]);
    let source = SocketAddr::new("127.0.0.1".parse().unwrap(), port.source_port(&to).unwrap());
    assert_eq!(sources, [source; 7]);
}

/// Those by which a sender of this host finds out its number come before its packets.
#[test]
fn empty_datagrams_are_passed_over() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let stranger = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut batch = RxBatch::new(8).unwrap();
    for datagrams in [&[0, 0, 5][..], &[0, 5, 0, 6], &[0]] {
        for &len in datagrams {
            stranger.send_to(&[1; 8][..len], (IpAddr::from([127, 0, 0, 1]), PORT)).unwrap();
        }
        let (mut seen, mut calls) = (Vec::new(), 0);
        while port.receive(&mut batch).unwrap() > 0 {
            let before = seen.len();
            seen.extend(batch.datagrams().map(|datagram| datagram.bytes.len()));
            assert!(seen.len() > before, "a call that brings nothing says so");
            calls += 1;
        }
        let full: Vec<_> = datagrams.iter().copied().filter(|len| *len > 0).collect();
        assert_eq!((&seen, calls > 0), (&full, !full.is_empty()));
    }
}

#[test]
fn headers_are_those_of_the_destination() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let (mut out, mut batch) = (TxBatch::new(), RxBatch::new(8).unwrap());
    for (ip, flow_label) in [("127.0.0.1", 0), ("::1", 0xabcde)] {
        let ip: IpAddr = ip.parse().unwrap();
        let to = port.connect(Destination {
            source: Some(ip),
            traffic_class: 0x6a,
            hop_limit: 33,
            flow_label,
            ..Destination::new((ip, PORT).into())
        });
        for round in 0..4 {
            send(&mut out, &port, &to, 2, round);
            let mut came = 0;
            while came < 2 {
                port.receive(&mut batch).unwrap();
                for d in batch.datagrams() {
                    let fields = (d.traffic_class, d.hop_limit, d.flow_label, d.bytes[0]);
                    assert_eq!(fields, (0x6a, 33, flow_label, round));
                    assert_eq!(d.source, (ip, port.source_port(&to).unwrap()).into());
                    came += 1;
                }
            }
        }
    }
}

#[test]
fn sockets_are_shared_bounded_and_closed_with_their_outlets() {
    let name = "sockets_are_shared_bounded_and_closed_with_their_outlets";
    anyverbs_testing::in_own_process(name, || {
        if !netns::isolate() {
            return;
        }
        let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
        let before = descriptors();
        let to = |class| {
            let ip = "127.0.0.1".parse().unwrap();
            port.connect(Destination {
                source: Some(ip),
                traffic_class: class,
                ..Destination::new((ip, PORT).into())
            })
        };
        let same = [to(4), to(4)];
        let [one, other] = same.each_ref().map(|outlet| port.source_port(outlet).unwrap());
        assert_eq!((one, descriptors()), (other, before + 2));
        let many: Vec<_> = (5..=255).map(to).collect();
        let ports: BTreeSet<_> = many.iter().map(|to| port.source_port(to).unwrap()).collect();
        assert_eq!(ports.len(), 63 + 1, "those without one share a port");
        assert_eq!(descriptors(), before + 2 * 64 + 1);
        // Those without one send as well.
        let mut out = TxBatch::new();
        many.iter().for_each(|to| drop(send(&mut out, &port, to, 1, 1)));
        assert_eq!(out.stats().dropped, 0);
        drop((same, many, out));
        // The sending socket of those without.
        assert_eq!(descriptors(), before + 1);
    });
}

//! Datagrams out and in over one port: batches, headers, IPv4 IDs, faults, multicast, errors.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use std::io::Read;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::fault::{Fault, FaultPolicy};
use anyverbs_net::{Destination, OpenError, PortOptions, RxBatch, Slot, TxBatch, UdpPort};
use anyverbs_record::capture::Capture;
use socket2::{Domain, Socket, Type};

const PORT: u16 = 4791;

/// The parts of a datagram that a test looks at.
#[derive(Debug, PartialEq)]
struct Seen {
    source: SocketAddr,
    destination: IpAddr,
    interface: u32,
    traffic_class: u8,
    hop_limit: u8,
    flow_label: u32,
    segment: u16,
    bytes: Vec<u8>,
}

/// Receives until `n` datagrams are there, at most two seconds.
fn receive(port: &UdpPort, batch: &mut RxBatch, n: usize) -> Vec<Seen> {
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut seen = Vec::new();
    while seen.len() < n && Instant::now() < deadline {
        if port.receive(batch).unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
        seen.extend(batch.datagrams().map(|d| Seen {
            source: d.source,
            destination: d.destination,
            interface: d.interface,
            traffic_class: d.traffic_class,
            hop_limit: d.hop_limit,
            flow_label: d.flow_label,
            segment: d.segment,
            bytes: d.bytes.to_vec(),
        }));
    }
    seen
}

fn stage(batch: &mut TxBatch, port: &UdpPort, to: &Destination, len: usize, fill: u8) -> u16 {
    let (room, index) = batch.segment(port, to, len).unwrap();
    room.fill(fill);
    index
}

#[test]
fn a_gso_batch_arrives_whole_with_its_headers() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("addr add 10.1.2.3/32 dev lo");
    netns::ip("addr add 2001:db8::3/128 dev lo nodad");
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut batch = RxBatch::new(8).unwrap();
    let mut out = TxBatch::new();
    for (address, source, flow_label) in
        [("127.0.0.1:4791", "10.1.2.3", 0), ("[::1]:4791", "2001:db8::3", 0xabcde)]
    {
        let source: IpAddr = source.parse().unwrap();
        let to = Destination {
            source: Some(source),
            traffic_class: 0x6a,
            hop_limit: 33,
            flow_label,
            ..Destination::new(address.parse().unwrap())
        };
        // Nine equal segments and a short one go in one batch, then single ones.
        for i in 0..9u8 {
            assert_eq!(stage(&mut out, &port, &to, 1024, i), u16::from(i));
        }
        assert_eq!(stage(&mut out, &port, &to, 20, 9), 9);
        assert_eq!(out.pending(), 10);
        let before = out.stats();
        out.flush(&port).unwrap();
        assert_eq!(out.stats().sends, before.sends + 1);
        assert_eq!(out.stats().segments, before.segments + 10);
        assert_eq!(out.stats().bytes, before.bytes + 9 * 1024 + 20);
        let seen = receive(&port, &mut batch, 10);
        assert_eq!(seen.len(), 10);
        for (i, d) in seen.iter().enumerate() {
            assert_eq!(d.source.ip(), source);
            assert!(d.source.port() >= 0xc000);
            assert_eq!(d.destination, to.address.ip());
            assert_eq!(
                (d.interface, d.traffic_class, d.hop_limit, d.flow_label),
                (1, 0x6a, 33, flow_label)
            );
            assert_eq!(usize::from(d.segment), i);
            assert_eq!(d.bytes, vec![i as u8; if i < 9 { 1024 } else { 20 }]);
        }
        // Those of one length can be had together.
        let mut datagrams = batch.datagrams();
        for i in [0, 1, 5, 8, 9] {
            let datagram = datagrams.next().unwrap();
            assert_eq!(usize::from(datagram.segment), i);
            let equal = datagrams.equal();
            assert_eq!(equal.len(), (9 - i) * 1024);
            for (n, bytes) in equal.chunks(1024).enumerate() {
                assert_eq!(bytes, [(i + n) as u8; 1024]);
            }
            datagrams.pass(match i {
                1 => 3,
                5 => 2,
                _ => 0,
            });
        }
        assert_eq!((datagrams.next(), datagrams.equal()), (None, &[][..]));
    }
    assert_eq!(port.gso(), Some(true));
    assert_eq!(port.dropped(), 0);
    assert_eq!(out.stats().dropped, 0);
}

#[test]
fn equal_datagrams_are_staged_together_as_far_as_they_fit() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut out = TxBatch::new();
    let to = Destination::new("127.0.0.1:4791".parse().unwrap());
    let fill = |out: &mut TxBatch, len, most, value: u8| {
        let rooms = out.equal_segments(&port, &to, len, most).unwrap();
        rooms.map(|(room, index)| (room.fill(value), index).1).collect::<Vec<_>>()
    };
    assert_eq!(fill(&mut out, 4096, 3, 1), [0, 1, 2]);
    // 15 of them make a batch.
    assert_eq!(fill(&mut out, 4096, 64, 2), (3..15).collect::<Vec<_>>());
    assert_eq!(fill(&mut out, 4096, 1, 3), [0]);
    // A shorter one is the last of its batch.
    assert_eq!(fill(&mut out, 100, 9, 4), [1]);
    assert_eq!(fill(&mut out, 100, 64, 5), (0..64).collect::<Vec<_>>());
    assert_eq!(fill(&mut out, 100, 2, 6), [0, 1]);
    out.discard_last(1);
    assert_eq!(fill(&mut out, 100, 2, 7), [1, 2]);
    out.flush(&port).unwrap();

    let mut batch = RxBatch::new(64).unwrap();
    let n = 15 + 2 + 64 + 3;
    let seen = receive(&port, &mut batch, n);
    let values: Vec<_> = seen.iter().map(|d| d.bytes[0]).collect();
    let expected = [(1, 3), (2, 12), (3, 1), (4, 1), (5, 64), (6, 1), (7, 2)];
    let expected = expected.iter().flat_map(|&(value, times)| vec![value; times]);
    assert_eq!(values, expected.collect::<Vec<_>>());
    assert!(seen.iter().all(|d| d.bytes.iter().all(|&b| b == d.bytes[0])));
}

#[test]
fn a_batch_ends_where_the_next_datagram_does_not_fit() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut out = TxBatch::new();
    let to = Destination::new("127.0.0.1:4791".parse().unwrap());
    let sends = |out: &TxBatch| out.stats().sends;

    assert_eq!(stage(&mut out, &port, &to, 100, 1), 0);
    assert_eq!(stage(&mut out, &port, &to, 100, 2), 1);
    // Longer than the batch's segments.
    assert_eq!(stage(&mut out, &port, &to, 101, 3), 0);
    assert_eq!(sends(&out), 1);
    // A shorter one closes the batch.
    assert_eq!(stage(&mut out, &port, &to, 50, 4), 1);
    assert_eq!(stage(&mut out, &port, &to, 50, 5), 0);
    assert_eq!(sends(&out), 2);
    // Another sending socket, another traffic class, another family.
    assert_eq!(stage(&mut out, &port, &Destination { sending_socket: 9, ..to }, 50, 6), 0);
    assert_eq!(
        stage(&mut out, &port, &Destination { sending_socket: 9, traffic_class: 1, ..to }, 50, 7),
        0
    );
    assert_eq!(stage(&mut out, &port, &Destination::new("[::1]:4791".parse().unwrap()), 50, 8), 0);
    assert_eq!(sends(&out), 5);
    out.flush(&port).unwrap();
    assert_eq!(sends(&out), 6);
    out.flush(&port).unwrap();
    assert_eq!(sends(&out), 6, "an empty batch is not sent");
    // Taking one back; the batch then goes on as if it had not been.
    assert_eq!(stage(&mut out, &port, &to, 80, 9), 0);
    assert_eq!(stage(&mut out, &port, &to, 40, 10), 1);
    out.discard_last(1);
    assert_eq!(stage(&mut out, &port, &to, 80, 11), 1);
    out.discard_last(1);
    out.discard_last(1);
    out.discard_last(1);
    assert_eq!((out.pending(), out.pending_bytes()), (0, 0));
    // 64 segments, and 64 KiB.
    for i in 0..65 {
        assert_eq!(stage(&mut out, &port, &to, 10, 12), i % 64);
    }
    assert_eq!((sends(&out), out.pending()), (7, 1));
    out.flush(&port).unwrap();
    for i in 0..16 {
        assert_eq!(stage(&mut out, &port, &to, 4112, 13), i % 15);
    }
    assert_eq!((sends(&out), out.pending()), (9, 1));
    // Lengths that UDP cannot carry.
    for len in [0, 65_508] {
        assert_eq!(
            out.segment(&port, &to, len).unwrap_err().kind(),
            std::io::ErrorKind::InvalidInput
        );
    }
    assert_eq!(stage(&mut out, &port, &to, 65_507, 14), 0);
    out.flush(&port).unwrap();

    let mut batch = RxBatch::new(64).unwrap();
    let n = 8 + 65 + 16 + 1;
    let seen = receive(&port, &mut batch, n);
    assert_eq!(seen.len(), n);
    assert!(seen.iter().all(|d| d.bytes.iter().all(|&b| b == d.bytes[0])));
    let lengths = |fill: u8| {
        seen.iter().filter(|d| d.bytes[0] == fill).map(|d| d.bytes.len()).collect::<Vec<_>>()
    };
    for (fill, len) in
        [(1, 100), (2, 100), (3, 101), (4, 50), (5, 50), (6, 50), (7, 50), (8, 50), (14, 65_507)]
    {
        assert_eq!(lengths(fill), [len], "{fill}");
    }
    assert_eq!(lengths(12), vec![10; 65]);
    assert_eq!(lengths(13), vec![4112; 16]);
    assert!(lengths(9).is_empty() && lengths(10).is_empty() && lengths(11).is_empty());
    // One sending socket, one source port.
    let port_of = |fill: u8| seen.iter().find(|d| d.bytes[0] == fill).map(|d| d.source.port());
    assert_eq!(port_of(1), port_of(14));
    assert_ne!(port_of(1), port_of(6));
}

#[test]
fn errors_of_a_flush_lose_its_batch_and_nothing_else() {
    if !netns::isolate_as_root() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut out = TxBatch::new();
    let nowhere = Destination::new("192.0.2.1:4791".parse().unwrap());
    stage(&mut out, &port, &nowhere, 8, 1);
    stage(&mut out, &port, &nowhere, 8, 1);
    assert_eq!(out.flush(&port).unwrap_err().raw_os_error(), Some(libc::ENETUNREACH));
    stage(&mut out, &port, &nowhere, 8, 1);
    let here = Destination::new("127.0.0.1:4791".parse().unwrap());
    stage(&mut out, &port, &here, 8, 2);
    out.flush(&port).unwrap();
    assert_eq!(
        (out.stats().dropped, out.stats().last_error, out.stats().segments),
        (3, libc::ENETUNREACH, 1)
    );
    // A source that is not ours makes the kernel say EINVAL, which must not be mistaken for a lack of GSO.
    let forged = Destination { source: Some("198.51.100.1".parse().unwrap()), ..here };
    stage(&mut out, &port, &forged, 8, 1);
    stage(&mut out, &port, &forged, 8, 1);
    out.flush(&port).unwrap_err();
    assert_eq!(port.gso(), Some(true));
    // Longer than the path's MTU.
    netns::ip("link set lo mtu 1500");
    for n in [1, 3] {
        for _ in 0..n {
            stage(&mut out, &port, &here, 4000, 3);
        }
        assert!(out.flush(&port).is_err());
    }
    assert_eq!(port.gso(), Some(true));
    let mut batch = RxBatch::new(8).unwrap();
    assert_eq!(receive(&port, &mut batch, 1).len(), 1);
}

#[test]
fn without_gso_datagrams_leave_one_by_one() {
    if !netns::isolate() {
        return;
    }
    let mut batch = RxBatch::new(64).unwrap();
    // Switched off; and refused by the kernel, which does not segment without checksums.
    for (gso, no_checksum6, refused) in [(false, false, 0), (true, true, 1)] {
        let port =
            UdpPort::open(PortOptions { gso, no_checksum6, ..PortOptions::new(PORT) }).unwrap();
        let mut out = TxBatch::new();
        let to = Destination::new("[::1]:4791".parse().unwrap());
        for round in 0..2 {
            for i in 0..10u8 {
                let index = stage(&mut out, &port, &to, if i < 9 { 500 } else { 20 }, i);
                assert_eq!(index, if gso && round == 0 { u16::from(i) } else { 0 });
            }
            out.flush(&port).unwrap();
        }
        assert_eq!(out.stats().gso_refused, refused);
        assert_eq!(out.stats().segments, 20);
        assert_eq!(port.gso(), Some(false));
        let seen = receive(&port, &mut batch, 20);
        let lengths: Vec<_> = seen.iter().map(|d| d.bytes.len()).collect();
        assert_eq!(lengths, [[500; 9].as_slice(), &[20]].concat().repeat(2));
        assert!(seen.iter().all(|d| d.segment == 0));
    }
}

/// The IPv4 ID and fragment word of every UDP packet that `send` puts on a wire whose device does not segment.
fn ip_ids(gso: bool, segments: usize) -> Option<Vec<(u16, u16)>> {
    let packet = match Socket::new(Domain::PACKET, Type::RAW, None) {
        Ok(socket) => socket,
        Err(error) => {
            anyverbs_testing::skip(format_args!("no AF_PACKET socket: {error}"));
            return None;
        }
    };
    // SAFETY: all-zero is a valid sockaddr_ll.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = 0x0800u16.to_be();
    address.sll_ifindex =
        anyverbs_net::interfaces().unwrap().iter().find(|i| i.name == "vb").unwrap().index as i32;
    // SAFETY: a live address of the given size.
    let rc = unsafe {
        libc::bind(
            packet.as_raw_fd(),
            (&raw const address).cast(),
            size_of::<libc::sockaddr_ll>() as u32,
        )
    };
    assert_eq!(rc, 0);
    packet.set_read_timeout(Some(Duration::from_secs(2))).unwrap();

    let port = UdpPort::open(PortOptions { gso, ..PortOptions::new(PORT) }).unwrap();
    let mut out = TxBatch::new();
    let to = Destination::new("10.9.0.2:4791".parse().unwrap());
    for i in 0..segments {
        stage(&mut out, &port, &to, 1000, i as u8);
    }
    out.flush(&port).unwrap();
    let mut ids = Vec::new();
    while ids.len() < segments {
        let mut frame = [0; 70_000];
        let n = (&packet).read(&mut frame).expect("a packet within two seconds");
        let ip = &frame[14..n];
        if ip[9] == 17 {
            assert_eq!(ip.len(), 1028, "a packet of one segment");
            assert_eq!(usize::from(ip[28]), ids.len());
            ids.push((u16::from_be_bytes([ip[4], ip[5]]), u16::from_be_bytes([ip[6], ip[7]])));
        }
    }
    Some(ids)
}

#[test]
fn the_ipv4_id_is_the_index_in_a_gso_batch() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("link add va type veth peer name vb");
    netns::ip("link set va mtu 9000 gso_max_segs 1");
    netns::ip("link set vb mtu 9000");
    netns::plug_in(["va", "vb"]);
    netns::ip("addr add 10.9.0.1/24 dev va");
    netns::ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev va");
    const DF: u16 = 0x4000;
    for round in 0..2 {
        let Some(ids) = ip_ids(true, 10) else { return };
        assert_eq!(ids, (0..10).map(|i| (i, DF)).collect::<Vec<_>>(), "round {round}");
        assert_eq!(ip_ids(true, 1), Some(vec![(0, DF)]));
        assert_eq!(ip_ids(false, 10), Some(vec![(0, DF); 10]));
    }
}

#[test]
fn faults_are_injected_into_what_is_received() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut out = TxBatch::new();
    let mut run = |policy: FaultPolicy| {
        let mut batch = RxBatch::new(8).unwrap();
        batch.set_fault(Some(Fault::new(policy)));
        let to = Destination::new("127.0.0.1:4791".parse().unwrap());
        for i in 0..60 {
            stage(&mut out, &port, &to, 100, i);
        }
        out.flush(&port).unwrap();
        while port.receive(&mut batch).unwrap() == 0 {}
        batch.datagrams().map(|d| d.bytes.to_vec()).collect::<Vec<_>>()
    };
    let clean: Vec<Vec<u8>> = (0..60).map(|i| vec![i; 100]).collect();
    assert_eq!(run(FaultPolicy::default()), clean);
    assert_eq!(run(FaultPolicy { loss: 1.0, ..FaultPolicy::default() }), [[0u8; 0]; 0]);
    let twice = run(FaultPolicy { duplication: 1.0, ..FaultPolicy::default() });
    assert_eq!(twice, clean.iter().flat_map(|d| [d.clone(), d.clone()]).collect::<Vec<_>>());
    let mut moved = run(FaultPolicy { reorder: 0.3, seed: 1, ..FaultPolicy::default() });
    assert_ne!(moved, clean);
    moved.sort();
    assert_eq!(moved, clean);
    let flipped = run(FaultPolicy { corruption: 1.0, ..FaultPolicy::default() });
    assert!(
        flipped
            .iter()
            .zip(&clean)
            .all(|(a, b)| { a.iter().zip(b).map(|(a, b)| (a ^ b).count_ones()).sum::<u32>() == 1 })
    );
}

#[test]
fn memory_can_be_given_back() {
    if !netns::isolate() {
        return;
    }
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    let mut out = TxBatch::new();
    let mut batch = RxBatch::new(1).unwrap();
    let to = Destination::new("127.0.0.1:4791".parse().unwrap());
    for _ in 0..2 {
        stage(&mut out, &port, &to, 60_000, 7);
        out.flush(&port).unwrap();
        assert_eq!(receive(&port, &mut batch, 1)[0].bytes, vec![7; 60_000]);
        batch.release_memory();
        assert_eq!(batch.datagrams().count(), 0);
    }
}

#[test]
fn a_port_that_is_not_shared_gives_a_clear_error() {
    if !netns::isolate() {
        return;
    }
    let open = || {
        let slot = Arc::new(Slot::claim("error-test").unwrap());
        UdpPort::open(PortOptions { slot: Some(slot), ..PortOptions::new(PORT) })
    };
    let other = std::net::UdpSocket::bind(("0.0.0.0", PORT)).unwrap();
    let error = open().unwrap_err();
    assert!(matches!(error, OpenError::NotShared { port: PORT }), "{error:?}");
    assert_eq!(error.to_string(), "UDP port 4791 is in use by a program that does not share it");
    drop(other);
    open().unwrap();
}

#[test]
fn a_port_of_another_user_gives_a_clear_error() {
    if !netns::isolate_as_root() {
        return;
    }
    // The child is this very test program, as user 65534, holding the port until its standard input ends.
    let mut child = Command::new("/proc/self/exe")
        .args(["--ignored", "--exact", "hold_the_port", "--nocapture"])
        .uid(65_534)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
    while !line.contains("holding") {
        assert_ne!(std::io::BufRead::read_line(&mut stdout, &mut line).unwrap(), 0, "{line}");
    }
    let slot = Arc::new(Slot::claim("error-test").unwrap());
    let error =
        UdpPort::open(PortOptions { slot: Some(slot), ..PortOptions::new(PORT) }).unwrap_err();
    assert!(matches!(error, OpenError::OtherUser { port: PORT, uid: 65_534 }), "{error:?}");
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of a_port_of_another_user_gives_a_clear_error"]
fn hold_the_port() {
    let slot = Arc::new(Slot::claim("error-test").unwrap());
    let _port = UdpPort::open(PortOptions { slot: Some(slot), ..PortOptions::new(PORT) }).unwrap();
    println!("holding");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn the_receive_buffer_is_what_was_asked_for_if_allowed() {
    if !netns::isolate() {
        return;
    }
    let port =
        UdpPort::open(PortOptions { receive_buffer: 300_000, ..PortOptions::new(PORT) }).unwrap();
    assert!(
        port.receive_buffer() == 300_000 || port.receive_buffer() >= 100_000,
        "{}",
        port.receive_buffer()
    );
    // Datagrams that do not fit are dropped and counted.
    let mut out = TxBatch::new();
    let to = Destination::new("127.0.0.1:4791".parse().unwrap());
    for i in 0..1000 {
        stage(&mut out, &port, &to, 4000, i as u8);
    }
    out.flush(&port).unwrap();
    assert!(port.dropped() > 0);
    for fd in port.fds() {
        // SAFETY: fcntl with F_GETFD only reads flags of an open fd.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFD) };
        assert_ne!(flags & libc::FD_CLOEXEC, 0);
    }
}

#[test]
fn a_capture_is_read_by_tshark() {
    if !netns::isolate() {
        return;
    }
    let file = std::env::temp_dir().join(format!("anyverbs-capture-{}", std::process::id()));
    let port = UdpPort::open(PortOptions::new(PORT)).unwrap();
    assert!(port.set_capture(Arc::new(Capture::create(&file).unwrap())));
    let (mut out, mut batch) = (TxBatch::new(), RxBatch::new(8).unwrap());
    for to in ["127.0.0.1:4791", "[::1]:4791"] {
        let to =
            Destination { hop_limit: 9, traffic_class: 2, ..Destination::new(to.parse().unwrap()) };
        stage(&mut out, &port, &to, 100, 0);
        stage(&mut out, &port, &to, 60, 0);
        out.note("the second");
        out.flush(&port).unwrap();
        receive(&port, &mut batch, 2);
    }
    let tshark = Command::new("tshark")
        .env("HOME", std::env::temp_dir())
        .arg("-r")
        .arg(&file)
        .args(["-d", "udp.port==4791,data", "-o", "ip.check_checksum:TRUE", "-T", "fields"])
        .args([
            "-E",
            "separator=,",
            "-e",
            "frame.len",
            "-e",
            "eth.src",
            "-e",
            "ip.src",
            "-e",
            "ipv6.src",
            "-e",
            "ip.id",
        ])
        .args(["-e", "ip.ttl", "-e", "ipv6.hlim", "-e", "udp.length", "-e", "ip.checksum.status"])
        .args([
            "-e",
            "frame.interface_name",
            "-e",
            "frame.packet_flags_direction",
            "-e",
            "frame.comment",
        ])
        .stderr(Stdio::null())
        .output();
    std::fs::remove_file(&file).unwrap();
    let output = match tshark {
        Ok(output) => output,
        Err(error) => {
            anyverbs_testing::skip(format_args!("no tshark: {error}"));
            return;
        }
    };
    let text = String::from_utf8(output.stdout).unwrap();
    let process = format!("[{}] ", std::process::id());
    let lines: Vec<_> = text
        .lines()
        .map(|line| {
            let (fields, comment) = line.rsplit_once(',').unwrap();
            let (_, done) = comment.split_once(&process).unwrap();
            format!("{fields},{done}")
        })
        .collect();
    assert_eq!(
        lines,
        [
            "142,02:00:00:00:00:01,0.0.0.0,,0x0000,9,,108,1,udp,0x00000002,sent by udp",
            "102,02:00:00:00:00:01,0.0.0.0,,0x0001,9,,68,1,udp,0x00000002,sent by udp: the second",
            "142,02:00:00:00:00:02,127.0.0.1,,0x0000,9,,108,1,udp,0x00000001,received by udp",
            "102,02:00:00:00:00:02,127.0.0.1,,0x0001,9,,68,1,udp,0x00000001,received by udp",
            "162,02:00:00:00:00:01,,::,,,9,108,,udp,0x00000002,sent by udp",
            "122,02:00:00:00:00:01,,::,,,9,68,,udp,0x00000002,sent by udp: the second",
            "162,02:00:00:00:00:02,,::1,,,9,108,,udp,0x00000001,received by udp",
            "122,02:00:00:00:00:02,,::1,,,9,68,,udp,0x00000001,received by udp",
        ]
    );
}

#[test]
fn a_full_send_buffer_is_waited_for_briefly() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("link add va type veth peer name vb");
    netns::plug_in(["va", "vb"]);
    netns::ip("addr add 10.9.0.1/24 dev va");
    netns::ip("neigh add 10.9.0.2 lladdr 02:00:00:00:00:02 dev va");
    if !netns::choke("va") {
        return;
    }
    let port = UdpPort::open(PortOptions::new(4791)).unwrap();
    let to = Destination::new("10.9.0.2:4791".parse().unwrap());
    let mut batch = TxBatch::new();
    let mut sent = 0;
    let (error, waited) = loop {
        stage(&mut batch, &port, &to, 1400, 7);
        let begin = Instant::now();
        if let Err(error) = batch.flush(&port) {
            break (error, begin.elapsed());
        }
        sent += 1;
        assert!(sent < 1_000_000, "the buffer has no end");
    };
    assert_eq!(error.raw_os_error(), Some(libc::EAGAIN), "{error}");
    assert!((Duration::from_millis(5)..Duration::from_secs(5)).contains(&waited), "{waited:?}");
    assert_eq!(batch.stats().dropped, 1);
}

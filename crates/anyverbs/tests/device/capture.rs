//! Captures: every way of packets, in a file that several processes write. This test binary starts itself as their program.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::icrc::{self, IcrcVerdict, Pseudo};
use anyverbs_proto::wire::opcode::{Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN, Packet};

use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, SIZE, exercise};

const ROLE: &str = "ANYVERBS_TEST_CAPTURE";
pub(crate) const BY_UDP: [(&str, &str); 2] = [("ANYVERBS_SHM", "0"), ("ANYVERBS_INPROC", "0")];

/// The severity of a comment (PI_COMMENT).
const COMMENT: &str = "1048576";

/// A packet of a capture.
struct Captured {
    way: usize,
    sent: bool,
    comment: String,
    source: IpAddr,
    destination: IpAddr,
    ports: (u16, u16),
    id: u16,
    /// From the BTH to the ICRC.
    bytes: Vec<u8>,
}

impl Captured {
    fn packet(&self) -> Option<Packet<'_>> {
        Packet::parse(&self.bytes[..self.bytes.len() - ICRC_LEN]).ok()
    }

    fn icrc(&self) -> IcrcVerdict {
        let ip = match (self.source, self.destination) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => Pseudo::V4 { src, dst, id: self.id },
            (IpAddr::V6(src), IpAddr::V6(dst)) => Pseudo::V6 { src, dst },
            _ => panic!("one family"),
        };
        icrc::check(&ip, self.ports.0, self.ports.1, &self.bytes)
    }
}

fn frame(frame: &[u8]) -> (IpAddr, IpAddr, (u16, u16), u16, Vec<u8>) {
    let u16_at = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
    let v6 = |at: usize| IpAddr::from(<[u8; 16]>::try_from(&frame[at..at + 16]).unwrap());
    let v4 = |at: usize| IpAddr::from(<[u8; 4]>::try_from(&frame[at..at + 4]).unwrap());
    let (source, destination, id, udp) = match u16_at(12) {
        0x0800 => (v4(26), v4(30), u16_at(18), 34),
        _ => (v6(22), v6(38), 0, 54),
    };
    (source, destination, (u16_at(udp), u16_at(udp + 2)), id, frame[udp + 8..].to_vec())
}

/// The packets of a pcapng file.
fn read(path: &Path) -> Vec<Captured> {
    let file = std::fs::read(path).unwrap();
    let mut rest = &file[..];
    let mut packets = Vec::new();
    while !rest.is_empty() {
        let u32_at = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
        let (kind, len) = (u32_at(0), u32_at(4) as usize);
        if kind == 6 {
            let bytes = u32_at(20) as usize;
            let (source, destination, ports, id, packet) = frame(&rest[28..28 + bytes]);
            let options = &rest[28 + bytes.next_multiple_of(4)..];
            let direction = options[4];
            let comment = usize::from(u16::from_le_bytes([options[10], options[11]]));
            packets.push(Captured {
                way: u32_at(8) as usize,
                sent: direction == 2,
                comment: String::from_utf8(options[12..12 + comment].to_vec()).unwrap(),
                source,
                destination,
                ports,
                id,
                bytes: packet,
            });
        }
        rest = &rest[len..];
    }
    packets
}

fn captured(name: &str, role: &str, variables: &[(&str, &str)]) -> PathBuf {
    recorded(name, role, "ANYVERBS_CAPTURE", variables)
}

/// Runs [`talk`] with a file that this variable names; the file.
pub(crate) fn recorded(
    name: &str,
    role: &str,
    variable: &str,
    variables: &[(&str, &str)],
) -> PathBuf {
    isolate();
    let file = format!("anyverbs-{name}-{}.pcapng", std::process::id());
    let path = std::env::temp_dir().join(file);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "capture::talk", "--nocapture", "--test-threads=1"]);
    command.env(ROLE, role).env(variable, &path).envs(variables.iter().copied());
    assert!(command.status().unwrap().success());
    path
}

/// Not a test by itself: the program that is captured. It talks with another process, and with itself.
#[test]
fn talk() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match &*role {
        "alone" => return beside_a_peer_without(),
        "datagrams" => return datagrams(&[80, 81]),
        "fail" => return crate::trace::fail(),
        "kill" => return crate::trace::kill(),
        "ask" => return crate::silence::ask(),
        "fail unanswered" => return crate::silence::fail_unanswered(),
        _ => {}
    }
    let mut peer = Peer::spawn("rc", &[]);
    let e = Endpoint::new(QpType::Rc);
    let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
    let (_, remote) = peer.connect(&e, &dst);
    exercise(&e, &src, &dst, remote);

    let (a, b) = pair(QpType::Rc);
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, OFFERED));
    exercise(&a, &src, &Buffer::new(&a.pd, OFFERED), dst.remote(0));
    for i in 0..3 {
        b.recv(50 + i, &[dst.sge(0, 64)]);
        a.send(70 + i, SendOp::SendImm(5), &[src.sge(0, 3)]);
        a.poll(1);
        b.poll(1);
    }
    if role == "reliable" {
        return;
    }
    datagrams(&[80]);
}

/// Sends a datagram for each number within the process. Some arrive, perhaps twice.
fn datagrams(wr_ids: &[u64]) {
    let (a, b) = pair(QpType::Ud);
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
    let to = a.dest(b.address());
    for wr_id in wr_ids {
        b.recv(1, &[dst.sge(0, 200)]);
        a.send_to(*wr_id, SendOp::Send, &[src.sge(0, 101)], Some(to));
        a.poll(1);
        b.poll(1);
    }
}

/// The peer has no capture. So it sends long packets, and ACKs with its requests, and would copy without a message.
fn beside_a_peer_without() {
    let mut peer = Peer::spawn("rc flood", &[("ANYVERBS_CAPTURE", "")]);
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, OFFERED);
    peer.connect(&e, &buffer);
    let deadline = Instant::now() + Duration::from_secs(10);
    while buffer.read(SIZE - 1, 1) != [0xaa] {
        assert!(Instant::now() < deadline, "nothing was written");
        assert_eq!(e.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    }
}

/// The requests of each connection have PSNs without a gap.
fn assert_no_gap(packets: &[Captured]) {
    let mut next = BTreeMap::new();
    let rc = packets.iter().filter_map(|captured| Some((captured, captured.packet()?)));
    for (captured, packet) in rc {
        let Headers { bth, reth, .. } = packet.headers;
        if bth.opcode.service != Service::Rc || !bth.opcode.is_request() {
            continue;
        }
        let count = match (bth.opcode.operation, reth) {
            (Operation::ReadRequest, Some(reth)) => reth.len.div_ceil(4096),
            _ => 1,
        };
        let next = next.entry((captured.sent, bth.dest_qpn)).or_insert(bth.psn);
        // By UDP a busy machine may lose some, and they are sent again.
        let is_again = captured.comment.ends_with("again") || captured.way == 0 && !captured.sent;
        assert!(bth.psn == *next || is_again, "{}: {bth}, not {}", captured.comment, next.get());
        if bth.psn.since(*next) >= 0 {
            *next = bth.psn.plus(count);
        }
    }
}

fn check(path: &Path, ways: &[usize]) {
    let packets = read(path);
    assert_no_gap(&packets);
    for captured in &packets {
        assert_eq!(captured.icrc(), IcrcVerdict::Exact, "{}", captured.comment);
    }
    let found: BTreeSet<_> = packets.iter().map(|captured| captured.way).collect();
    assert_eq!(found, ways.iter().copied().collect());
    let has = |words: &[&str]| {
        let found = packets.iter().any(|c| words.iter().all(|word| c.comment.contains(word)));
        assert!(found, "no packet is {words:?}");
    };
    has(&["wr_id 1 (0x1), RDMA WRITE, 262144 bytes", "sent by"]);
    has(&["wr_id 2 (0x2), RDMA READ, 262144 bytes", "sent by"]);
    has(&["wr_id 3 (0x3), fetch and add, 8 bytes"]);
    has(&["wr_id 72 (0x48), SEND with immediate, 3 bytes"]);
    has(&["wr_id 80 (0x50), SEND, 101 bytes"]);
    let processes: BTreeSet<_> =
        packets.iter().filter_map(|c| c.comment.split_once(' ')).map(|(name, _)| name).collect();
    assert_eq!(processes.len(), 2, "{processes:?}");
    tshark(path, &packets);
}

/// Wireshark's dissector finds nothing wrong.
fn tshark(path: &Path, packets: &[Captured]) {
    let mut command = Command::new("tshark");
    command.env("HOME", std::env::temp_dir()).arg("-r").arg(path);
    command.args(["-o", &format!("infiniband.rroce.port:{}", packets[0].ports.1)]);
    command.args(["-T", "fields", "-e", "infiniband.bth.opcode", "-e", "_ws.malformed"]);
    command.args(["-e", "_ws.expert.severity", "-e", "_ws.expert.message"]);
    let output = match command.output() {
        Ok(output) => output,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return anyverbs_testing::skip("no tshark");
        }
        Err(error) => panic!("{error}"),
    };
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(text.lines().count(), packets.len());
    let mut opcodes = BTreeSet::new();
    for line in text.lines() {
        let fields: Vec<_> = line.split('\t').collect();
        opcodes.insert(fields[0].to_owned());
        // Each comment is an expert's word, too.
        assert_eq!((fields[1], fields[2]), ("", COMMENT), "{line}");
    }
    for (opcode, what) in [(6, "WRITE first"), (12, "READ request"), (17, "ACK"), (100, "UD SEND")]
    {
        assert!(opcodes.contains(&opcode.to_string()), "{what}: {opcodes:?}");
    }
}

#[test]
fn a_capture_has_what_goes_through_memory() {
    let path = captured("by-memory", "", &[]);
    check(&path, &[1, 2]);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_capture_has_what_goes_by_udp() {
    let path = captured("by-udp", "", &BY_UDP);
    check(&path, &[0]);
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_capture_has_what_a_peer_sends_that_has_none() {
    let path = captured("alone", "alone", &[]);
    let packets = read(&path);
    assert_no_gap(&packets);
    assert!(packets.iter().all(|captured| captured.icrc() == IcrcVerdict::Exact));
    let count = |operation| {
        let packets = packets.iter().filter_map(Captured::packet);
        packets.filter(|packet| packet.headers.bth.opcode.operation == operation).count()
    };
    assert!(count(Operation::WriteFirst) >= 1);
    assert!(count(Operation::WriteMiddle) >= SIZE / 4096 - 2);
    assert!(count(Operation::Ack) >= 1);
    std::fs::remove_file(path).unwrap();
}

/// The question goes to the port of the device from another one, and the answer comes back there.
#[test]
fn a_capture_has_questions_to_a_silent_peer_and_their_answers() {
    let path = captured("ask", "ask", &BY_UDP);
    let packets = read(&path);
    assert!(packets.iter().all(|captured| captured.icrc() == IcrcVerdict::Exact));
    let is_answer = |captured: &&Captured| captured.bytes[0] == 0xc4;
    let (answers, others): (Vec<_>, Vec<_>) = packets.iter().partition(is_answer);
    let asked_from: BTreeSet<_> = others
        .iter()
        .filter(|captured| captured.sent && captured.comment.contains("asks why"))
        .map(|captured| captured.ports.0)
        .collect();
    let answered_to: BTreeSet<_> =
        answers.iter().filter(|captured| !captured.sent).map(|captured| captured.ports.1).collect();
    // There is one at least for each queue pair: the one that fails asks twice.
    assert!(asked_from.len() >= 3, "{asked_from:?}");
    assert!(answered_to.len() >= 2 && answered_to.is_subset(&asked_from), "{answered_to:?}");
    let counted = path.with_extension("pcapng.sent");
    let sent = std::fs::read_to_string(&counted).unwrap();
    assert_eq!(sent, others.iter().filter(|captured| captured.sent).count().to_string());
    std::fs::remove_file(counted).unwrap();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn a_capture_has_what_a_script_repeats_or_delays() {
    let script = "duplicate packet 1; delay packet 2 by 5ms";
    for (variable, sent) in [("ANYVERBS_NOTHING", 2), ("ANYVERBS_FAULTS", 3)] {
        let path = captured("by-script", "datagrams", &[(variable, script)]);
        let packets = read(&path);
        assert_eq!(packets.iter().filter(|captured| captured.sent).count(), sent, "{variable}");
        std::fs::remove_file(path).unwrap();
    }
}

//! Captures of the packets on the wire. Two programs that share no code with the device judge them: tshark and
//! `conformance/rxe/icrc_check.py`.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Deserialize;

use super::guest::Guest;
use super::table::Case;
use crate::conformance::table::Operation;
use crate::conformance::{Process, quiet, wait_for};
use crate::workspace;

const SOON: Duration = Duration::from_secs(10);
/// Time for the last packets, which are under way when the programs have ended.
const SETTLE: Duration = Duration::from_millis(300);

/// Dissectors that guess the protocol of a payload, and find arbitrary bytes malformed.
const GUESSERS: [&str; 9] = [
    "fcoib",
    "infiniband.eoib",
    "infiniband_sdp",
    "iser",
    "lnet",
    "nvme-rdma",
    "rpcordma",
    "smb_direct",
    "smc",
];

/// The one among them that is no protocol of its own: Ethernet types at the start of a payload.
const ETHERNET_GUESSER: &str = "eth_over_ib";

/// BTH opcode, from the manufacturers' range, of the device's credit probes on unreliable paths, which other makes ignore.
const PROBE: u8 = 0xc1;
const ACKNOWLEDGE: u8 = 0x11;
/// Syndromes of a responder that has no receive (IBA 9.7.5.2.8).
const RNR_NAKS: RangeInclusive<u8> = 0x20..=0x3f;

/// The syndrome of a peer that may not touch the memory that it is asked to.
const ACCESS_NAK: u8 = 0x62;

/// A running capture.
pub(super) struct Capture {
    tcpdump: Process,
    file: PathBuf,
}

impl Capture {
    /// Returns when every packet from now on is seen.
    pub(super) fn start(guest: &Guest, file: &Path, log: &Path) -> anyhow::Result<Self> {
        let mut command = guest.host_command("tcpdump");
        // Keeps the user that started it (`-Z root`), looks up no names, and has a ring of 64 MiB in slots that hold a jumbo frame: a busy
        // machine may not let it run for a while. Packets reach it at once, so that none is left behind at the end.
        command
            .args(["-Z", "root", "-n", "--immediate-mode", "-B", "65536", "-s", "9216"])
            .args(["-i", &guest.interface(), "-w"])
            .arg(file)
            .args(["udp", "port", "4791"]);
        let mut tcpdump = Process::start(&mut command, log)?;
        let listens = wait_for(Instant::now() + SOON, || {
            if let Some(status) = tcpdump.ended()? {
                bail!("tcpdump ended with {status}: {}", tcpdump.output().trim());
            }
            Ok(tcpdump.output().contains("listening on"))
        })?;
        if !listens {
            bail!("tcpdump does not listen: {}", tcpdump.output().trim());
        }
        Ok(Capture { tcpdump, file: file.to_owned() })
    }

    /// The process that captures, which lives in the network that it captures.
    pub(super) fn id(&self) -> u32 {
        self.tcpdump.id()
    }

    /// Ends the capture. The inner error is why it is not whole.
    pub(super) fn finish(mut self) -> anyhow::Result<Result<PathBuf, String>> {
        sleep(SETTLE);
        self.tcpdump.signal(libc::SIGINT)?;
        let status = self.tcpdump.wait(Instant::now() + SOON)?;
        let said = self.tcpdump.output();
        match status {
            Some(status) if status.success() => {}
            Some(status) => {
                return Ok(Err(format!("tcpdump ended with {status}: {}", said.trim())));
            }
            None => return Ok(Err(format!("tcpdump does not end: {}", said.trim()))),
        }
        let lost = dropped(&said).context("tcpdump does not say what it lost")?;
        Ok(if lost == 0 { Ok(self.file) } else { Err(format!("the capture lost {lost} packets")) })
    }
}

fn dropped(said: &str) -> Option<u64> {
    said.lines()
        .find_map(|line| line.split_once(" packets dropped by kernel")?.0.trim().parse().ok())
}

/// The output of `icrc_check.py --json` for one file.
#[derive(Debug, Deserialize)]
struct Icrcs {
    senders: BTreeMap<String, Sender>,
    /// Frames with a wrong ICRC.
    wrong: Vec<u64>,
    /// Frames that are not whole.
    short: Vec<u64>,
}

#[derive(Debug, Default, Deserialize)]
struct Sender {
    packets: u64,
    /// Packets by BTH opcode.
    opcodes: BTreeMap<u8, u64>,
}

/// Tshark's output for one file.
#[derive(Debug, Default, PartialEq, Eq)]
struct Dissection {
    packets: u64,
    /// Frames that are no RoCEv2 to tshark, or malformed, and its messages.
    bad: Vec<String>,
    /// AETHs that are no positive ACK: sender and syndrome.
    naks: BTreeMap<(String, u8), u64>,
}

/// The addresses of both sides, without scopes.
#[derive(Debug, Clone)]
pub(super) struct Addresses {
    pub(super) here: String,
    pub(super) rxe: String,
}

/// Judges a case's capture: its figures in a few words, or the complaint.
pub(super) fn check(
    case: &Case,
    file: &Path,
    addresses: &Addresses,
) -> anyhow::Result<Result<String, String>> {
    let icrcs = icrcs(file)?;
    let dissection = dissect(file)?;
    Ok(judge(case, addresses, &icrcs, &dissection))
}

fn icrcs(file: &Path) -> anyhow::Result<Icrcs> {
    let mut command = Command::new("/usr/bin/python3");
    command.arg(workspace::root().join("conformance/rxe/icrc_check.py")).arg("--json").arg(file);
    // Status 1 is a verdict, which the text has as well.
    let output = command.output().context("cannot run python3")?;
    let mut files: Vec<Icrcs> = serde_json::from_slice(&output.stdout).with_context(|| {
        format!("icrc_check.py failed: {}", String::from_utf8_lossy(&output.stderr).trim())
    })?;
    files.pop().context("icrc_check.py says nothing")
}

fn dissect(file: &Path) -> anyhow::Result<Dissection> {
    let mut command = Command::new("tshark");
    for protocol in GUESSERS {
        command.args(["--disable-protocol", protocol]);
    }
    command.args(["--disable-heuristic", ETHERNET_GUESSER]);
    command.args(["-n", "-T", "fields", "-E", "occurrence=f"]);
    for field in [
        "frame.number",
        "frame.protocols",
        "ip.src",
        "ipv6.src",
        "infiniband.bth.opcode",
        "infiniband.aeth.syndrome",
        "_ws.malformed",
    ] {
        command.args(["-e", field]);
    }
    dissection(&quiet(command.arg("-r").arg(file))?)
}

/// Reads tshark's lines of fields.
fn dissection(text: &str) -> anyhow::Result<Dissection> {
    let mut all = Dissection::default();
    for line in text.lines() {
        let fields: Vec<&str> = line.split('\t').collect();
        let [frame, protocols, ipv4, ipv6, opcode, syndrome, malformed] = fields[..] else {
            bail!("not what tshark was asked for: {line:?}");
        };
        let sender = if ipv4.is_empty() { ipv6 } else { ipv4 };
        all.packets += 1;
        if !malformed.is_empty() {
            all.bad.push(format!("frame {frame}: {malformed}"));
        } else if opcode.is_empty() || !protocols.contains(":udp:infiniband") {
            all.bad.push(format!("frame {frame} is {protocols}"));
        }
        if !syndrome.is_empty() {
            let syndrome: u8 =
                syndrome.parse().with_context(|| format!("a syndrome {syndrome:?} from tshark"))?;
            // IBA 9.7.5.2.1: bits 6:5 are 0 in an ACK.
            if syndrome & 0x60 != 0 {
                *all.naks.entry((sender.into(), syndrome)).or_default() += 1;
            }
        }
    }
    Ok(all)
}

fn judge(
    case: &Case,
    addresses: &Addresses,
    icrcs: &Icrcs,
    dissection: &Dissection,
) -> Result<String, String> {
    let total: u64 = icrcs.senders.values().map(|sender| sender.packets).sum();
    if !icrcs.short.is_empty() {
        return Err(format!("frames that are not whole: {}", first(&icrcs.short)));
    }
    if !icrcs.wrong.is_empty() {
        return Err(format!(
            "{} of {total} ICRCs are wrong: frames {}",
            icrcs.wrong.len(),
            first(&icrcs.wrong)
        ));
    }
    if !dissection.bad.is_empty() {
        return Err(format!(
            "tshark objects to {} frames: {}",
            dissection.bad.len(),
            first(&dissection.bad)
        ));
    }
    if dissection.packets != total {
        return Err(format!("tshark sees {} packets, the ICRC check {total}", dissection.packets));
    }
    let strangers = icrcs.senders.keys().find(|name| {
        ![&addresses.here, &addresses.rxe].into_iter().any(|address| address == *name)
    });
    if let Some(stranger) = strangers {
        return Err(format!("packets from {stranger}"));
    }
    let none = Sender::default();
    let mut figures = Vec::new();
    for (name, address, client) in [
        ("here", &addresses.here, case.place.client_is_here()),
        ("rxe", &addresses.rxe, !case.place.client_is_here()),
    ] {
        let sender = icrcs.senders.get(address).unwrap_or(&none);
        opcodes(case, client, name == "here", &sender.opcodes)
            .map_err(|reason| format!("{name} {reason}"))?;
        figures.push(format!("{} from {name}", sender.packets));
    }
    let server = if case.place.client_is_here() { &addresses.rxe } else { &addresses.here };
    for ((sender, syndrome), count) in &dissection.naks {
        let name = if *sender == addresses.here { "here" } else { "rxe" };
        let kind = match syndrome {
            syndrome if RNR_NAKS.contains(syndrome) => "RNR NAK",
            0x60 => "sequence NAK",
            0x61 => return Err(format!("{count} NAKs (invalid request) from {name}")),
            &ACCESS_NAK if case.access_error && sender == server => "remote access error",
            &ACCESS_NAK => return Err(format!("{count} NAKs (remote access error) from {name}")),
            0x63 => return Err(format!("{count} NAKs (remote operational error) from {name}")),
            _ => return Err(format!("{count} AETHs with syndrome {syndrome:#04x} from {name}")),
        };
        figures.push(format!("{count} {kind} from {name}"));
    }
    let refused = |syndromes: RangeInclusive<u8>| {
        dissection
            .naks
            .keys()
            .any(|(sender, syndrome)| sender == server && syndromes.contains(syndrome))
    };
    if case.rnr && !refused(RNR_NAKS) {
        return Err("the server refuses nothing for want of a receive".into());
    }
    if case.access_error && !refused(ACCESS_NAK..=ACCESS_NAK) {
        return Err("the server refuses nothing with a remote access error".into());
    }
    Ok(figures.join(", "))
}

/// Checks that a side sent exactly the opcodes of its role.
fn opcodes(case: &Case, client: bool, here: bool, seen: &BTreeMap<u8, u64>) -> Result<(), String> {
    let posts = case.posts(client);
    let answers: Vec<_> =
        case.posts(!client).iter().filter_map(|operation| operation.answers()).collect();
    for operation in posts {
        if !seen.keys().any(|opcode| operation.requests().contains(opcode)) {
            return Err(format!("sends no requests of {operation:?}"));
        }
    }
    for operation in case.posts(!client) {
        if let Some(wanted) = operation.answers()
            && !seen.keys().any(|opcode| wanted.contains(opcode))
        {
            return Err(format!("sends no answers to {operation:?}"));
        }
    }
    let fits = |opcode: &u8| {
        posts.iter().any(|operation| operation.requests().contains(opcode))
            || answers.iter().any(|wanted| wanted.contains(opcode))
            || (*opcode == ACKNOWLEDGE && !answers.is_empty())
            || (here
                && *opcode == PROBE
                && [posts, case.posts(!client)].concat().into_iter().any(Operation::is_paced))
    };
    match seen.iter().find(|(opcode, _)| !fits(opcode)) {
        Some((opcode, count)) => Err(format!("sends {count} packets with opcode {opcode:#04x}")),
        None => Ok(()),
    }
}

/// The first few of a list.
fn first<T: ToString>(all: &[T]) -> String {
    const FEW: usize = 5;
    let few: Vec<_> = all.iter().take(FEW).map(T::to_string).collect();
    few.join(", ") + if all.len() > FEW { ", ..." } else { "" }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::conformance::table;

    fn case(posts: &str) -> Case {
        let text =
            format!("[[group]]\non = ['to-rxe']\ncommand = 'tool'\nreport = 'perftest'\n{posts}");
        table::expand(&text).unwrap().remove(0)
    }

    fn addresses() -> Addresses {
        Addresses { here: "10.99.0.1".into(), rxe: "10.99.0.2".into() }
    }

    fn seen(opcodes: &[u8]) -> Sender {
        Sender {
            packets: opcodes.len() as u64,
            opcodes: opcodes.iter().map(|opcode| (*opcode, 1)).collect(),
        }
    }

    fn verdict(case: &Case, here: &[u8], rxe: &[u8]) -> Result<String, String> {
        let senders = [("10.99.0.1", here), ("10.99.0.2", rxe)];
        let icrcs = Icrcs {
            senders: senders
                .into_iter()
                .filter(|(_, opcodes)| !opcodes.is_empty())
                .map(|(name, opcodes)| (name.to_owned(), seen(opcodes)))
                .collect(),
            wrong: vec![],
            short: vec![],
        };
        let packets = (here.len() + rxe.len()) as u64;
        judge(case, &addresses(), &icrcs, &Dissection { packets, ..Dissection::default() })
    }

    #[test]
    fn each_side_sends_what_its_role_has_it_send() {
        let write = case("client-posts = ['rc-write']");
        assert_eq!(
            verdict(&write, &[0x06, 0x07, 0x08], &[0x11]).unwrap(),
            "3 from here, 1 from rxe"
        );
        assert!(verdict(&write, &[], &[]).is_err(), "nothing at all");
        assert!(verdict(&write, &[0x06, 0x08], &[]).is_err(), "no answer");
        assert!(verdict(&write, &[0x0a], &[0x11, 0x0a]).is_err(), "the server writes");
        assert!(verdict(&write, &[0x04], &[0x11]).is_err(), "another operation");
        assert!(verdict(&write, &[0x0a, PROBE], &[0x11]).is_err(), "a probe on a reliable path");

        let both = case("client-posts = ['rc-send']\nserver-posts = ['rc-send']");
        assert!(verdict(&both, &[0x04, 0x11], &[0x04, 0x11]).is_ok());
        assert!(verdict(&both, &[0x04], &[0x11]).is_err(), "one side only");

        let datagrams = case("client-posts = ['ud-send']");
        assert!(verdict(&datagrams, &[0x64, PROBE], &[]).is_ok());
        assert!(verdict(&datagrams, &[0x64], &[PROBE]).is_err(), "rxe has no probes");
        assert!(verdict(&datagrams, &[0x64], &[0x11]).is_err());

        let connected = case("client-posts = ['cm', 'rc-send']\nserver-posts = ['cm', 'rc-write']");
        assert!(verdict(&connected, &[0x64, 0x04, 0x11], &[0x64, 0x0a, 0x11]).is_ok());
        assert!(verdict(&connected, &[0x64, 0x04], &[0x64, 0x0a, 0x11]).is_err(), "no ACK");
        assert!(verdict(&connected, &[0x04, 0x11], &[0x64, 0x0a, 0x11]).is_err(), "no CM");
        assert!(
            verdict(&connected, &[0x64, PROBE, 0x04, 0x11], &[0x64, 0x0a, 0x11]).is_err(),
            "a probe to QP 1"
        );
    }

    #[test]
    fn errors_between_the_two_are_found() {
        let read = case("client-posts = ['rc-read']");
        let icrcs = |wrong: &[u64], short: &[u64], other: bool| Icrcs {
            senders: [("10.99.0.1", &[0x0c][..]), ("10.99.0.2", &[0x10][..]), ("10.0.0.9", &[])]
                .into_iter()
                .filter(|(name, _)| other || *name != "10.0.0.9")
                .map(|(name, opcodes)| (name.to_owned(), seen(opcodes)))
                .collect(),
            wrong: wrong.to_vec(),
            short: short.to_vec(),
        };
        let nak = |syndrome: u8| Dissection {
            packets: 2,
            naks: [(("10.99.0.2".to_owned(), syndrome), 3)].into(),
            ..Dissection::default()
        };
        let clean = || Dissection { packets: 2, ..Dissection::default() };
        let judged =
            |icrcs: &Icrcs, dissection: &Dissection| judge(&read, &addresses(), icrcs, dissection);
        assert!(judged(&icrcs(&[], &[], false), &clean()).is_ok());
        assert!(judged(&icrcs(&[2], &[], false), &clean()).unwrap_err().contains("ICRC"));
        assert!(judged(&icrcs(&[], &[2], false), &clean()).is_err());
        assert!(judged(&icrcs(&[], &[], true), &clean()).unwrap_err().contains("10.0.0.9"));
        assert!(judged(&icrcs(&[], &[], false), &Dissection::default()).is_err(), "counts differ");
        let malformed = Dissection { packets: 2, bad: vec!["frame 1".into()], ..clean() };
        assert!(judged(&icrcs(&[], &[], false), &malformed).is_err());
        assert!(judged(&icrcs(&[], &[], false), &nak(0x60)).unwrap().contains("3 sequence NAK"));
        for syndrome in 0x61..=0x7f {
            assert!(judged(&icrcs(&[], &[], false), &nak(syndrome)).is_err());
        }
    }

    #[test]
    fn a_receiver_that_is_to_be_late_must_say_so() {
        let late = case("client-posts = ['rc-send']\nrnr = true");
        let icrcs = Icrcs {
            senders: [("10.99.0.1", &[0x04][..]), ("10.99.0.2", &[ACKNOWLEDGE])]
                .map(|(name, opcodes)| (name.to_owned(), seen(opcodes)))
                .into(),
            wrong: vec![],
            short: vec![],
        };
        let judged = |sender: &str, syndrome: u8| {
            let naks = [((sender.to_owned(), syndrome), 1)].into();
            judge(&late, &addresses(), &icrcs, &Dissection { packets: 2, bad: vec![], naks })
        };
        assert!(judged("10.99.0.2", 0x2c).unwrap().contains("1 RNR NAK from rxe"));
        assert!(judged("10.99.0.2", 0x60).is_err(), "another NAK");
        assert!(judged("10.99.0.1", 0x2c).is_err(), "the client's");
    }

    #[test]
    fn tsharks_fields() {
        let text = "\
1\teth:ethertype:ip:udp:infiniband:data\t10.99.0.1\t\t4\t\t
2\teth:ethertype:ip:udp:infiniband\t10.99.0.2\t\t17\t31\t
3\teth:ethertype:ip:udp:infiniband\t10.99.0.2\t\t17\t96\t
4\teth:ethertype:ip:udp:data\t10.99.0.2\t\t\t\t
5\teth:ethertype:ip:udp:infiniband\t10.99.0.2\t\t17\t\t[Malformed Packet: InfiniBand]
6\teth:ethertype:ipv6:udp:infiniband\t\tfd99::2\t17\t96\t
";
        let all = dissection(text).unwrap();
        assert_eq!((all.packets, all.bad.len()), (6, 2));
        let nak = |sender: &str| ((sender.to_owned(), 0x60), 1);
        assert_eq!(all.naks, [nak("10.99.0.2"), nak("fd99::2")].into());
        assert!(dissection("1\t2\n").is_err());
    }

    #[test]
    fn tcpdump_says_what_it_lost() {
        let said =
            "5 packets captured\n7 packets received by filter\n2 packets dropped by kernel\n";
        assert_eq!(dropped(said), Some(2));
        assert_eq!(dropped("tcpdump: listening on eth0\n"), None);
    }

    /// The kernel's own packets are right, and one changed bit is found wherever the ICRC covers it.
    #[test]
    fn the_icrc_check_finds_a_changed_bit() {
        let data = workspace::root().join("crates/proto/tests/data/rxe/rc-write-2.pcap");
        let golden = icrcs(&data).unwrap();
        assert!(golden.wrong.is_empty() && golden.short.is_empty());
        assert_eq!(golden.senders.len(), 2);

        let bytes = fs::read(&data).unwrap();
        // After the file's header and the first record's.
        let frame = 24 + 16;
        let (ip, udp, bth) = (frame + 14, frame + 34, frame + 42);
        let changed = std::env::temp_dir().join(format!("icrc-check-{}.pcap", std::process::id()));
        for (at, covered) in [
            (ip + 1, false),  // type of service
            (ip + 5, true),   // identification
            (ip + 8, false),  // time to live
            (ip + 19, true),  // destination
            (udp, true),      // source port
            (udp + 6, false), // checksum
            (bth, true),      // opcode
            (bth + 4, false), // FECN, BECN
            (bth + 11, true), // PSN
        ] {
            let mut bytes = bytes.clone();
            bytes[at] ^= 1;
            fs::write(&changed, &bytes).unwrap();
            let found = icrcs(&changed).unwrap();
            assert_eq!(found.wrong, if covered { vec![1] } else { vec![] }, "offset {at}");
        }
        fs::remove_file(&changed).unwrap();
    }
}

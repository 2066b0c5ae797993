//! Several processes share a port. Each gets its own datagrams, whichever processes join, leave, die or stop.
//!
//! The processes are this test program again, running `member` in the test's network namespace.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{TryRecvError, channel};
use std::time::{Duration, Instant};

use anyverbs_net::forward::{ForwardBuffer, Forwarded};
use anyverbs_net::steering::{Resteer, SteeringMode};
use anyverbs_net::{
    Datagram, Destination, PortOptions, Registry, RxBatch, Slot, Store, TxBatch, UdpPort,
};

const NAME: &str = "anyverbs-steering-test";
const PORT: u16 = 4791;
const STEER_OFFSET: usize = 5;

fn open() -> UdpPort {
    let slot = Arc::new(Slot::claim(NAME).unwrap());
    let options = PortOptions {
        slot: Some(slot),
        steer_offset: STEER_OFFSET,
        probe_byte: 0xff,
        ..PortOptions::new(PORT)
    };
    UdpPort::open(options).unwrap()
}

/// Datagrams that a member has received since it was last asked.
#[derive(Default)]
struct Counts {
    direct: usize,
    forwarded: usize,
    foreign: usize,
    last: String,
}

/// A process that shares the port. Commands on standard input: `counts`, `state`, `exit`.
#[test]
#[ignore = "a child process of the other tests"]
fn member() {
    let repairs = std::env::var_os("NO_REPAIR").is_none();
    let port = open();
    let own = port.slot().unwrap().number();
    println!("\nslot {own}");
    let (sender, commands) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.send(line.unwrap()).is_err() {
                break;
            }
        }
    });
    let (mut batch, mut buffer) = (RxBatch::new(8).unwrap(), ForwardBuffer::new());
    let mut counts = Counts::default();
    loop {
        port.receive(&mut batch).unwrap();
        for d in batch.datagrams() {
            match d.bytes[STEER_OFFSET] {
                slot if slot == own => counts.direct += 1,
                slot => {
                    counts.foreign += 1;
                    if port.slot().unwrap().store().is_alive(slot) {
                        port.note_misdelivery();
                    }
                    port.forward(slot, &d);
                }
            }
        }
        while let Some(d) = port.receive_forwarded(&mut buffer).unwrap() {
            assert_eq!(d.bytes[STEER_OFFSET], own);
            counts.forwarded += 1;
            counts.last = describe(&d);
        }
        if repairs && port.needs_resteer() {
            port.resteer().unwrap();
        }
        match commands.try_recv() {
            Ok(command) => match command.as_str() {
                "counts" => {
                    println!(
                        "{} {} {} {}",
                        counts.direct, counts.forwarded, counts.foreign, counts.last
                    );
                    counts = Counts::default();
                }
                "state" => println!("{:?} {:?}", port.steering_state(), port.forward_counters()),
                _ => return,
            },
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => return,
        }
        let mut pfds: Vec<_> = port
            .fds()
            .map(|fd| libc::pollfd {
                fd: std::os::fd::AsRawFd::as_raw_fd(&fd),
                events: libc::POLLIN,
                revents: 0,
            })
            .collect();
        // SAFETY: a live array of its own length.
        unsafe { libc::poll(pfds.as_mut_ptr(), pfds.len() as libc::nfds_t, 1) };
    }
}

fn describe(d: &Datagram<'_>) -> String {
    format!(
        "{} {} {} {} {} {} {}",
        d.source,
        d.destination,
        d.interface,
        d.traffic_class,
        d.hop_limit,
        d.segment,
        d.bytes.len()
    )
}

struct Member {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    slot: u8,
}

impl Member {
    fn spawn(repairs: bool) -> Self {
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--ignored", "--exact", "member", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        if !repairs {
            command.env("NO_REPAIR", "1");
        }
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout, slot: 0 }
    }

    /// Waits until it has joined.
    fn joined(mut self) -> Self {
        loop {
            if let Some(slot) = self.line().strip_prefix("slot ") {
                self.slot = slot.parse().unwrap();
                return self;
            }
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        assert_ne!(
            self.stdout.read_line(&mut line).unwrap(),
            0,
            "the member of slot {} ended",
            self.slot
        );
        line.trim_end().to_owned()
    }

    fn ask(&mut self, command: &str) -> String {
        writeln!(self.stdin, "{command}").unwrap();
        self.line()
    }

    /// Datagrams received directly, by forwarding, and of others, since the last call; and the last forwarded one.
    fn counts(&mut self) -> (usize, usize, usize, String) {
        let line = self.ask("counts");
        let mut fields = line.splitn(4, ' ');
        let mut number = || fields.next().unwrap().parse().unwrap();
        (number(), number(), number(), fields.next().unwrap_or_default().to_owned())
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill touches no memory; the child is ours and not yet waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn stop(&self) {
        anyverbs_testing::stop(&self.child);
    }

    fn exit(mut self) {
        writeln!(self.stdin, "exit").unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends from an ephemeral port, outside the group.
struct Sender {
    port: UdpPort,
    batch: TxBatch,
    sending: u8,
}

impl Sender {
    fn new() -> Self {
        let port = UdpPort::open(PortOptions { ipv6: false, ..PortOptions::new(4000) }).unwrap();
        Self { port, batch: TxBatch::new(), sending: 0 }
    }

    /// `n` datagrams to each slot and family, each by another source port, so that a hash would spread them.
    fn send(&mut self, slots: impl Iterator<Item = u8> + Clone, n: usize) {
        for ip in [IpAddr::V4(Ipv4Addr::LOCALHOST), IpAddr::V6(Ipv6Addr::LOCALHOST)] {
            for slot in slots.clone() {
                for _ in 0..n {
                    self.sending = (self.sending + 1) % 16;
                    let to = Destination {
                        sending_socket: self.sending,
                        traffic_class: 0x29,
                        hop_limit: 77,
                        ..Destination::new((ip, PORT).into())
                    };
                    let (room, _) = self.batch.segment(&self.port, &to, 48).unwrap();
                    room.fill(0);
                    room[STEER_OFFSET] = slot;
                }
            }
        }
        self.batch.flush(&self.port).unwrap();
    }
}

/// Time that a test waits for an event that is certain to come. To check steering, it sends until every member gets
/// everything directly, at most three seconds. Then it demands just that of a fresh round.
const CERTAIN: Duration = Duration::from_secs(20);

/// Counts of the members since they were last asked, as [`Member::counts`] gives them. Returns as soon as that are
/// `expected` datagrams, or after `timeout`.
fn gather(
    members: &mut [Member],
    expected: usize,
    timeout: Duration,
) -> Vec<(usize, usize, usize, String)> {
    let begin = Instant::now();
    let mut sums = vec![(0, 0, 0, String::new()); members.len()];
    loop {
        for (sum, member) in sums.iter_mut().zip(members.iter_mut()) {
            let (direct, forwarded, foreign, example) = member.counts();
            (sum.0, sum.1, sum.2) = (sum.0 + direct, sum.1 + forwarded, sum.2 + foreign);
            if forwarded > 0 {
                sum.3 = example;
            }
        }
        let all: usize = sums.iter().map(|sum| sum.0 + sum.1).sum();
        if all >= expected || begin.elapsed() > timeout {
            return sums;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn assert_steered(members: &mut [Member], sender: &mut Sender, may_repair: bool, what: &str) {
    const N: usize = 5;
    let deadline = Instant::now() + CERTAIN;
    // Datagrams lost before a repair do not come.
    let timeout = if may_repair { Duration::from_millis(100) } else { CERTAIN };
    for member in members.iter_mut() {
        member.counts();
    }
    loop {
        sender.send(members.iter().map(|m| m.slot).collect::<Vec<_>>().into_iter(), N);
        std::thread::sleep(Duration::from_millis(20));
        let gathered = gather(members, members.len() * 2 * N, timeout);
        let counts: Vec<_> = gathered.into_iter().map(|c| (c.0, c.1, c.2)).collect();
        if counts.iter().all(|&c| c == (2 * N, 0, 0)) {
            return;
        }
        if !may_repair || Instant::now() > deadline {
            for member in members.iter_mut() {
                let state = member.ask("state");
                println!("slot {}: {state}", member.slot);
            }
            panic!("{what}: not steered: {counts:?}");
        }
    }
}

#[test]
fn processes_get_their_datagrams_through_joins_exits_and_kills() {
    if !netns::isolate() {
        return;
    }
    let mut sender = Sender::new();
    let mut members = vec![Member::spawn(true).joined()];
    assert_steered(&mut members, &mut sender, false, "one");

    // Six at once.
    let spawned: Vec<_> = (0..6).map(|_| Member::spawn(true)).collect();
    members.extend(spawned.into_iter().map(Member::joined));
    let registry = Registry::new(NAME).unwrap();
    let slots: BTreeSet<u8> = members.iter().map(|m| m.slot).collect();
    assert_eq!(slots.len(), 7);
    assert_eq!(Store::join(&registry).unwrap().live_slots(), slots.into_iter().collect::<Vec<_>>());
    assert_steered(&mut members, &mut sender, false, "seven");

    // Orderly exits: of the first, in the middle, of the last.
    members.remove(0).exit();
    assert_steered(&mut members, &mut sender, true, "the first left");
    members.remove(2).exit();
    assert_steered(&mut members, &mut sender, true, "one of the middle left");
    members.pop().unwrap().exit();
    assert_steered(&mut members, &mut sender, true, "the last left");

    // Joining repairs by itself.
    let spawned: Vec<_> = (0..4).map(|_| Member::spawn(true)).collect();
    members.extend(spawned.into_iter().map(Member::joined));
    assert_steered(&mut members, &mut sender, false, "eight");

    // Several killed at once, and one joins meanwhile.
    for at in [5, 2, 0] {
        members.remove(at).signal(libc::SIGKILL);
    }
    members.push(Member::spawn(true).joined());
    assert_steered(&mut members, &mut sender, true, "three killed, one joined");
    for at in [3, 0] {
        let killed = members.remove(at);
        killed.signal(libc::SIGKILL);
        drop(killed);
    }
    assert_steered(&mut members, &mut sender, true, "two killed");
    for member in &mut members {
        let state = member.ask("state");
        assert!(!state.contains("Assumed"), "{state}");
    }
}

#[test]
fn a_stopped_process_is_not_forgotten() {
    if !netns::isolate() {
        return;
    }
    let mut sender = Sender::new();
    let mut members: Vec<_> = (0..3).map(|_| Member::spawn(true).joined()).collect();
    members[1].stop();
    let begin = Instant::now();
    members.push(Member::spawn(true).joined());
    println!("joined beside a stopped process in {:?}", begin.elapsed());
    members[1].signal(libc::SIGCONT);
    assert_steered(
        &mut members,
        &mut sender,
        false,
        "a single silent process is steered to by elimination",
    );

    // Two silent ones cannot be told apart; they are steered to after they have gone on.
    members[0].stop();
    members[1].stop();
    members.push(Member::spawn(true).joined());
    let state = members[4].ask("state");
    assert!(state.contains("Partial"), "{state}");
    members[0].signal(libc::SIGCONT);
    members[1].signal(libc::SIGCONT);
    assert_steered(&mut members, &mut sender, true, "repaired after both went on");
}

/// The number behind a word.
fn number_after(text: &str, word: &str) -> usize {
    let rest = text.split_once(word).expect(text).1;
    let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
    rest[..end].parse().unwrap()
}

#[test]
fn a_misdirected_datagram_is_forwarded_with_its_headers() {
    if !netns::isolate() {
        return;
    }
    let mut sender = Sender::new();
    let mut members: Vec<_> = (0..5).map(|_| Member::spawn(false).joined()).collect();
    let dead = members.remove(1);
    dead.signal(libc::SIGKILL);
    let dead_slot = dead.slot;
    drop(dead);
    // The last one's socket has moved: datagrams steered to its former index reach any process.
    let (mut direct, mut forwarded, mut foreign, mut example) = (0, 0, 0, String::new());
    for _ in 0..10 {
        sender.send([members[3].slot].into_iter(), 2);
        std::thread::sleep(Duration::from_millis(10));
    }
    for counts in gather(&mut members, 40, CERTAIN) {
        foreign += counts.2;
        if counts.1 > 0 {
            (forwarded, example) = (counts.1, counts.3);
        }
        direct += counts.0;
    }
    assert_eq!(direct + forwarded, 40, "all arrived in the end");
    assert_eq!(foreign, forwarded);
    assert!(forwarded > 0);
    let fields: Vec<&str> = example.split(' ').collect();
    let source = if fields[1] == "::1" { "[::1]:" } else { "127.0.0.1:" };
    assert!(fields[0].starts_with(source), "{example}");
    assert!(["127.0.0.1", "::1"].contains(&fields[1]), "{example}");
    assert_eq!(fields[2..], ["1", "41", "77", "0", "48"], "{example}");

    // A datagram for a dead process is dropped, and counted as such, by the process that has its index now.
    sender.send([dead_slot].into_iter(), 3);
    let begin = Instant::now();
    let states = loop {
        std::thread::sleep(Duration::from_millis(20));
        let states: Vec<String> = members.iter_mut().map(|m| m.ask("state")).collect();
        // The process may differ between datagrams, where an index changed hands meanwhile.
        if states.iter().map(|state| number_after(state, "dropped_dead: ")).sum::<usize>() == 6 {
            break states;
        }
        assert!(begin.elapsed() < CERTAIN, "{states:?}");
    };
    assert!(states.iter().all(|s| s.contains("ignored: 0")), "{states:?}");
}

#[test]
fn a_full_queue_drops_and_counts() {
    if !netns::isolate() {
        return;
    }
    let port = open();
    let registry = Registry::new(NAME).unwrap();
    let other = Slot::claim_in(&registry).unwrap();
    let datagram = Datagram {
        source: "127.0.0.1:50000".parse().unwrap(),
        destination: Ipv4Addr::LOCALHOST.into(),
        interface: 1,
        traffic_class: 0,
        hop_limit: 1,
        flow_label: 0,
        segment: 0,
        bytes: &[0; 65_507],
    };
    for _ in 0..100 {
        port.forward(other.number(), &datagram);
    }
    let counters = port.forward_counters();
    assert!(counters.sent >= 1 && counters.dropped_full >= 1, "{counters:?}");
    assert_eq!(counters.sent + counters.dropped_full, 100, "{counters:?}");
    port.forward(0, &datagram);
    drop(other);
    assert_eq!(port.forward_counters().dropped_dead, 1);
}

#[test]
fn datagrams_without_room_are_kept_in_order() {
    if !netns::isolate() {
        return;
    }
    // Two processes, as far as slots are concerned, each with a port of its own.
    let ports = [4791, 4792].map(|port| {
        let slot = Some(Arc::new(Slot::claim(NAME).unwrap()));
        UdpPort::open(PortOptions { slot, steer_offset: 5, ..PortOptions::new(port) }).unwrap()
    });
    let [from, to] = ports;
    let (slot, mut buffer) = (to.slot().unwrap().number(), ForwardBuffer::new());
    let number = |i: u32| {
        let mut bytes = [0; 280];
        bytes[..4].copy_from_slice(&i.to_le_bytes());
        bytes
    };
    let datagram = |bytes: &'static [u8]| Datagram {
        source: "127.0.0.1:50000".parse().unwrap(),
        destination: Ipv4Addr::LOCALHOST.into(),
        interface: 1,
        traffic_class: 0,
        hop_limit: 1,
        flow_label: 0,
        segment: 0,
        bytes,
    };
    for i in 0..1000 {
        let kept = from.forward_or_keep(slot, &datagram(number(i).to_vec().leak()));
        assert!([Forwarded::Sent, Forwarded::Kept].contains(&kept), "{kept:?}");
    }
    assert!(from.kept() > 0);
    let mut next = 0;
    while next < 1000 {
        while let Some(datagram) = to.receive_forwarded(&mut buffer).unwrap() {
            assert_eq!(datagram.bytes, number(next));
            next += 1;
        }
        if let Some(pause) = from.forward_kept() {
            std::thread::sleep(pause);
        }
    }
    assert_eq!((from.kept(), from.forward_kept()), (0, None));

    // Kept datagrams have bounds, and are dropped when their process ends.
    let whole: &[u8] = &[0; 280];
    let outcomes: Vec<_> =
        (0..6000).map(|_| from.forward_or_keep(slot, &datagram(whole))).collect();
    assert!(outcomes.contains(&Forwarded::Full));
    assert!((4000..=4096).contains(&from.kept()), "{}", from.kept());
    drop(to);
    while let Some(pause) = from.forward_kept() {
        std::thread::sleep(pause);
    }
    assert!(from.forward_counters().dropped_dead > 0);
}

#[test]
fn strangers_messages_are_ignored() {
    if !netns::isolate_as_root() {
        return;
    }
    use socket2::{Domain, SockAddr, Socket, Type};
    let port = open();
    let own = port.slot().unwrap().number();
    let address = SockAddr::unix(format!("\0{NAME}/{own}")).unwrap();
    let mut buffer = ForwardBuffer::new();
    let connect = || {
        let socket = Socket::new(Domain::UNIX, Type::SEQPACKET, None).unwrap();
        socket.connect(&address).unwrap();
        socket
    };
    let stranger = connect();
    for garbage in [&b"x"[..], &[0xf2; 51], &[0xff; 300]] {
        stranger.send(garbage).unwrap();
    }
    assert!(port.receive_forwarded(&mut buffer).unwrap().is_none());
    assert_eq!(port.forward_counters().ignored, 3);

    // A datagram of another user: of a thread that took on user 65534 for itself alone. It is not forwarded, and its
    // contents are not read.
    let datagram = Datagram {
        source: "127.0.0.1:50000".parse().unwrap(),
        destination: Ipv4Addr::LOCALHOST.into(),
        interface: 1,
        traffic_class: 0,
        hop_limit: 1,
        flow_label: 0,
        segment: 0,
        bytes: b"hello",
    };
    port.forward(own, &datagram);
    assert_eq!(port.receive_forwarded(&mut buffer).unwrap(), Some(datagram));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // SAFETY: the raw system call changes the credentials of this thread only and touches
            // no memory.
            let rc = unsafe { libc::syscall(libc::SYS_setresuid, 65_534, 65_534, 65_534) };
            assert_eq!(rc, 0);
            let other = connect();
            other.send(b"anything").unwrap();
        });
    });
    assert!(port.receive_forwarded(&mut buffer).unwrap().is_none());
    assert_eq!(port.forward_counters().ignored, 4);
}

#[test]
fn without_loopback_the_order_of_joining_is_assumed() {
    if !netns::isolate_down() {
        return;
    }
    let first = open();
    assert_eq!(first.steering_state().v4, SteeringMode::Steered { processes: 1 });
    let second = open();
    assert_eq!(second.steering_state().v4, SteeringMode::Assumed { processes: 2 });
    assert_eq!(second.steering_state().v6, SteeringMode::Assumed { processes: 2 });
    // It comes up, and the assumption proves right.
    netns::ip("link set lo up");
    let mut sender = Sender::new();
    sender.send([first.slot().unwrap().number(), second.slot().unwrap().number()].into_iter(), 5);
    let mut batch = RxBatch::new(64).unwrap();
    for port in [&first, &second] {
        // A busy kernel delivers behind the call that sends.
        let (mut got, begin) = (0, Instant::now());
        while got < 10 {
            assert!(begin.elapsed() < Duration::from_secs(60), "{got} of 10 came");
            port.receive(&mut batch).unwrap();
            for d in batch.datagrams() {
                assert_eq!(d.bytes[STEER_OFFSET], port.slot().unwrap().number());
                got += 1;
            }
        }
    }
}

#[test]
fn without_ipv6_ipv4_is_steered_and_nobody_waits() {
    if !netns::isolate_as_root() {
        return;
    }
    std::fs::write("/proc/sys/net/ipv6/conf/all/disable_ipv6", "1").unwrap();
    let mut members: Vec<_> = (0..3).map(|_| Member::spawn(true).joined()).collect();
    let state = members[2].ask("state");
    assert!(state.contains("v4: Steered { processes: 3 }"), "{state}");
    assert!(state.contains("v6: Assumed { processes: 3 }"), "{state}");
}

#[test]
fn repairs_are_limited_and_slow_down_without_effect() {
    if !netns::isolate() {
        return;
    }
    let port = open();
    assert_eq!(port.resteer().unwrap(), Resteer::Idle);
    let begin = Instant::now();
    let mut done = 0;
    while begin.elapsed() < Duration::from_millis(300) {
        port.note_misdelivery();
        assert!(port.needs_resteer());
        match port.resteer().unwrap() {
            Resteer::Pending { retry_after } => {
                std::thread::sleep(retry_after.min(Duration::from_millis(5)))
            }
            Resteer::Done { changed } => {
                assert!(!changed);
                done += 1;
            }
            Resteer::Idle => panic!("a repair was wanted"),
        }
    }
    // After 10, 20, 40, 80 ms and so on.
    assert!((1..=6).contains(&done), "{done}");
}

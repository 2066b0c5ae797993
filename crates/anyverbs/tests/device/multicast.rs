//! Multicast groups: each attached queue pair of every process and host gets one copy. The other processes are this test
//! binary again.

use anyverbs_testing::Stopwatch;
use std::io::{BufRead, BufReader, Write};
use std::net::IpAddr;
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyverbs::*;

use crate::endpoint::*;
use crate::host::{ip, succeeds};

const ROLE: &str = "ANYVERBS_TEST_MULTICAST";
/// Messages that leave by one post, so that they go in batches.
pub(crate) const BURST: u32 = 50;
/// Bytes of a message, without its GRH.
const LEN: usize = 200;

pub(crate) fn gid(ip: &str) -> Gid {
    Gid::from(ip.parse::<IpAddr>().unwrap())
}

/// A queue pair in a group, with receives.
pub(crate) struct Member {
    pub(crate) e: Endpoint,
    buffer: Buffer,
    pub(crate) group: Gid,
    av: AddressVector,
    own: Gid,
    /// Sends not yet completed.
    pub(crate) sending: u32,
}

impl Member {
    /// `sgid_of`: the first address of the interface that has this one and is of the group's family.
    pub(crate) fn new(group: &str, source: &str) -> Self {
        let e = Endpoint::new(QpType::Ud);
        e.connect(e.address());
        let buffer = Buffer::new(&e.pd, 64 * 256);
        let own =
            e.context.addresses().unwrap().into_iter().find(|g| g.gid == gid(source)).unwrap();
        let attr = AhAttr {
            dgid: gid(group),
            sgid_index: own.index as u8,
            hop_limit: 3,
            is_global: true,
            port: 1,
            ..AhAttr::default()
        };
        let av = e.context.resolve(&attr).unwrap();
        let member = Self { e, buffer, group: gid(group), av, own: own.gid, sending: 0 };
        member.e.qp.attach_mcast(member.group, 0).unwrap();
        for i in 0..64 {
            member.post(i);
        }
        member
    }

    fn post(&self, i: u64) {
        self.e.recv(i, &[self.buffer.sge(i as usize * 256, 40 + LEN)]);
    }

    fn dest(&self, qpn: Qpn, qkey: QKey) -> UdDest {
        UdDest::new(self.e.pd.number(), self.av, qpn, qkey)
    }

    /// Sends messages with these numbers to the group.
    pub(crate) fn say(&mut self, numbers: impl Iterator<Item = u32>) {
        self.say_to(numbers, self.dest(Qpn::MULTICAST, QKEY));
    }

    fn say_to(&mut self, numbers: impl Iterator<Item = u32>, dest: UdDest) {
        let sges = [self.buffer.sge(0, LEN)];
        let wrs: Vec<_> = numbers
            .map(|n| SendWr {
                wr_id: 1000,
                op: SendOp::SendImm(n),
                flags: SendFlags::SIGNALED,
                sges: &sges,
                ud: Some(dest),
                xrc_srqn: 0,
            })
            .collect();
        self.e.qp.post_send(&wrs).unwrap();
        self.sending += wrs.len() as u32;
    }

    /// Receives exactly these, in order.
    pub(crate) fn hears(&mut self, numbers: impl ExactSizeIterator<Item = u32>) {
        let (mut wanted, begin) = (numbers.peekable(), Instant::now());
        while self.sending > 0 || wanted.peek().is_some() {
            let mut wcs = [Wc::default(); 16];
            let got = self.e.cq.poll(&mut wcs).unwrap();
            if begin.elapsed() > Duration::from_secs(20) {
                let counters = self.e.context.counters().unwrap();
                let counted = Counter::ALL.iter().map(|c| (c.name(), counters.read(*c)));
                let counted: Vec<_> = counted.filter(|(_, n)| *n > 0).collect();
                panic!(
                    "{:?} does not come, {} to be sent: {counted:?}",
                    wanted.peek(),
                    self.sending
                );
            }
            for wc in &wcs[..got] {
                assert_eq!(wc.status, WcStatus::Success);
                if wc.opcode == WcOpcode::Send {
                    self.sending -= 1;
                    continue;
                }
                assert_eq!(Some(wc.imm), wanted.next(), "of those from {}", wc.src_qpn);
                assert_eq!(wc.byte_len as usize, 40 + LEN);
                assert_eq!(wc.flags, WcFlags::GRH | WcFlags::WITH_IMM);
                // The GRH area shows the group.
                let grh = self.buffer.read(wc.wr_id as usize * 256, 40);
                let (at, hops) = if self.group.to_ip().is_ipv4() { (36, 28) } else { (24, 7) };
                assert_eq!(grh[at..], self.group.0[at - 24..]);
                assert_eq!(grh[hops], 3);
                self.post(wc.wr_id);
            }
        }
    }
}

/// Another process.
pub(crate) struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Process {
    fn spawn(role: &str, own_namespace: bool) -> Self {
        Self::spawn_with(role, own_namespace, &[])
    }

    /// Starts one on this host, with these variables, in no group yet.
    pub(crate) fn here(variables: &[(&str, &str)]) -> Self {
        let mut process = Self::spawn_with("obey", false, variables);
        assert_eq!(process.hear(), "here");
        process
    }

    fn spawn_with(role: &str, own_namespace: bool, variables: &[(&str, &str)]) -> Self {
        isolate();
        let this = std::env::current_exe().unwrap();
        let mut command = Command::new(if own_namespace { "unshare".into() } else { this.clone() });
        if own_namespace {
            command.arg("-n").arg(this);
        }
        let mut child = command
            .args(["--exact", "multicast::alone", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        self.tell(line);
        self.hear()
    }

    /// The next line that is meant for us, among the harness's own.
    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the other process ended");
            if let Some((_, said)) = line.split_once("@ ") {
                return said.trim().to_owned();
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Obeys the parent: `join GROUP SOURCE`, `alone` (a queue pair that is in no group), `say FIRST [COUNT]`, `hear FIRST
/// COUNT`, `detach`, `leave`. Answers with the number of its queue pair.
fn obey() {
    println!("@ here");
    let mut member = None;
    let mut alone = None;
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<u32>().unwrap();
        let mut reply = None;
        match words[0] {
            "ip" => ip(&line[3..]),
            "carrier" => carrier(words[1]),
            "join" => member = Some(Member::new(words[1], words[2])),
            "alone" => {
                let e = alone.get_or_insert_with(|| Endpoint::new(QpType::Ud));
                reply = Some(e.qp.qpn().get().to_string());
            }
            "say" => {
                let n = words.get(2).map_or(BURST, |n| n.parse().unwrap());
                member.as_mut().unwrap().say(number(1)..number(1) + n);
            }
            "hear" => member.as_mut().unwrap().hears(number(1)..number(1) + number(2)),
            "leave" => member = None,
            "detach" => {
                let member = member.as_ref().unwrap();
                member.e.qp.detach_mcast(member.group, 0).unwrap();
            }
            other => panic!("{other}"),
        }
        let qpn = member.as_ref().map_or(0, |m| m.e.qp.qpn().get());
        println!("@ {}", reply.unwrap_or_else(|| qpn.to_string()));
    }
}

/// Not a test by itself: the code of the children.
#[test]
fn alone() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "obey" => obey(),
        "two hosts" => between_two_hosts(),
        "interfaces" => groups_follow_the_interfaces(),
        "handed on" => who_joins_while_others_send(),
        "beside" => whoever_runs_beside_a_member(),
        "stopped" => a_member_that_does_not_read(),
        other => panic!("{other}"),
    }
}

/// Runs [`alone`] in a network namespace of its own.
pub(crate) fn run(role: &str) -> Output {
    isolate();
    Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "multicast::alone", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env("ANYVERBS_INTERFACES", "")
        .output()
        .unwrap()
}

/// Two queue pairs of this process and one of each of two others.
fn several_processes(group: &str, source: &str) {
    let mut others = ["obey"; 2].map(|role| Process::spawn(role, false));
    let mut qpns = Vec::new();
    for other in &mut others {
        assert_eq!(other.hear(), "here");
        qpns.push(Qpn::new(other.ask(&format!("join {group} {source}")).parse().unwrap()));
    }
    let (mut a, mut b) = (Member::new(group, source), Member::new(group, source));
    let mut round = |a: &mut Member, speaker: usize, first: u32| {
        match speaker {
            0 => a.say(first..first + BURST),
            i => drop(others[i - 1].ask(&format!("say {first}"))),
        }
        a.hears(first..first + BURST);
        b.hears(first..first + BURST);
        for other in &mut others {
            other.ask(&format!("hear {first} {BURST}"));
        }
    };
    for speaker in 0..3 {
        round(&mut a, speaker, 100 * speaker as u32);
    }
    // A message to a group for one queue pair reaches none. Neither does one with a wrong Q_Key.
    let foreign = a.dest(qpns[0], QKEY);
    a.say_to(1..3, foreign);
    let wrong = a.dest(Qpn::MULTICAST, QKey(QKEY.0 + 1));
    a.say_to(1..3, wrong);
    round(&mut a, 0, 300);
    // Neither loses its groups by an attempt to destroy it.
    let busy = a.e.qp.destroy().unwrap_err();
    assert!(busy.to_string().contains(&a.group.to_string()), "{busy}");
    round(&mut a, 1, 400);
    a.e.qp.detach_mcast(a.group, 0).unwrap();
    a.e.qp.destroy().unwrap();
    // Now the first of the others does not take part.
    others[0].ask("detach");
    b.say(500..500 + BURST);
    b.hears(500..500 + BURST);
    others[1].ask(&format!("hear 500 {BURST}"));
    others[0].ask("hear 0 0");
}

/// Groups of this process. Another process that joins such a group beside it, in any registry, changes how its
/// datagrams travel.
fn own_group(number: u8) -> String {
    let pid = std::process::id().to_be_bytes();
    format!("239.{}.{}.{number}", pid[2], pid[3])
}

#[test]
fn several_processes_over_the_loopback() {
    several_processes(&own_group(100), "127.0.0.1");
    several_processes(
        &format!("ff15::{:x}:{:x}", std::process::id() >> 16, std::process::id() & 0xffff),
        "::1",
    );
}

/// Waits until an interface is up at both ends: earlier packets are lost.
fn carrier(interface: &str) {
    let shows = ["-br", "link", "show", interface];
    let is_up = || {
        let shown = Command::new("ip").args(shows).output().unwrap().stdout;
        String::from_utf8(shown).unwrap().split_whitespace().nth(1) == Some("UP")
    };
    while !is_up() {
        std::thread::sleep(Duration::from_millis(1));
    }
    // The state shows first and the queue works next, under one hold of the kernel's lock; this takes it, too.
    ip(&format!("link set {interface} up"));
}

/// Interfaces of this network namespace on which the kernel has joined an IPv4 group.
fn joined_on(group: &str) -> Vec<String> {
    let IpAddr::V4(group) = group.parse().unwrap() else { panic!("IPv4 only") };
    let number = format!("{:08X}", u32::from_ne_bytes(group.octets()));
    let (mut interface, mut found) = (String::new(), Vec::new());
    for line in std::fs::read_to_string("/proc/net/igmp").unwrap().lines() {
        if !line.starts_with('\t') {
            interface = line.split_whitespace().nth(1).unwrap_or_default().to_owned();
        } else if line.contains(&number) {
            found.push(interface.clone());
        }
    }
    found
}

/// A process on another host, with a cable from each of `here` to the interface `there` of the same place.
fn other_host(here: &[&str], there: &[&str]) -> Process {
    let mut other = Process::spawn("obey", true);
    assert_eq!(other.hear(), "here");
    ip("link set lo up");
    for (net, (va, vb)) in (9..).zip(here.iter().zip(there)) {
        ip(&format!("link add {va} type veth peer name {vb}"));
        ip(&format!("link set {vb} netns {}", other.child.id()));
        ip(&format!("addr add 10.9.{net}.1/24 dev {va}"));
        ip(&format!("addr add fd{net:02}::1/64 nodad dev {va}"));
        ip(&format!("link set {va} up"));
        other.ask(&format!("ip addr add 10.9.{net}.2/24 dev {vb}"));
        other.ask(&format!("ip addr add fd{net:02}::2/64 dev {vb} nodad"));
        other.ask(&format!("ip link set {vb} up"));
        carrier(va);
        other.ask(&format!("carrier {vb}"));
    }
    other
}

fn between_two_hosts() {
    let mut other = other_host(&["va"], &["vb"]);
    // On this host as well.
    let mut beside = Process::here(&[]);
    for (group, here, there) in [
        ("239.4.7.91", "10.9.9.1", "10.9.9.2"),
        ("224.0.0.77", "10.9.9.1", "10.9.9.2"),
        ("ff15::4791", "fd09::1", "fd09::2"),
        // A program that names its IPv4 address gets this one: another of the same interface.
        ("ff0e::ffff:ef04:75b", "10.9.9.1", "10.9.9.2"),
    ] {
        other.ask(&format!("join {group} {there}"));
        beside.ask(&format!("join {group} {here}"));
        let mut member = Member::new(group, here);
        let sources = member.e.context.gids().unwrap();
        let interface = |gid| sources.iter().find(|g| g.gid == gid).unwrap().interface;
        assert_eq!(interface(member.av.sgid), interface(member.own));
        if group.contains('.') {
            assert_eq!(joined_on(group), ["lo", "va"]);
        }
        for first in [0, 100] {
            if first == 0 {
                member.say(first..first + BURST);
            } else {
                other.ask(&format!("say {first}"));
            }
            member.hears(first..first + BURST);
            other.ask(&format!("hear {first} {BURST}"));
            beside.ask(&format!("hear {first} {BURST}"));
        }
        drop(member);
        beside.ask("leave");
        if group.contains('.') {
            assert!(joined_on(group).is_empty(), "left with the last queue pair");
        }
    }
}

#[test]
fn two_hosts() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("two hosts"));
    }
}

/// Each copy comes from another host, once, even if other processes of the device run on this host.
fn whoever_runs_beside_a_member() {
    // Enough that a kernel that picks one of three processes at random is found out.
    const GROUPS: u32 = 30;
    let mut other = other_host(&["va", "wa"], &["vb", "wb"]);
    let mut member = Process::here(&[]);
    let bystander = || {
        let mut process = Process::here(&[]);
        process.ask("alone");
        process
    };
    let mut number = 0;
    let mut say = |other: &mut Process, members: &mut [&mut Process]| {
        number += 1;
        other.ask(&format!("say {number} 1"));
        other.ask(&format!("hear {number} 1"));
        for member in members {
            member.ask(&format!("hear {number} 1"));
        }
    };
    let mut before = [bystander(), bystander()];
    let mut second = Process::here(&[]);
    for n in 0..GROUPS {
        for (group, net) in [
            (format!("239.4.6.{n}"), "10.9.9"),
            (format!("ff15::46:{n}"), "fd09:"),
            // By the other interface.
            (format!("239.4.5.{n}"), "10.9.10"),
        ] {
            let at = |host: u8| {
                let separator = if net.ends_with(':') { ":" } else { "." };
                format!("{net}{separator}{host}")
            };
            other.ask(&format!("join {group} {}", at(2)));
            member.ask(&format!("join {group} {}", at(1)));
            say(&mut other, &mut [&mut member]);
            // One of two members goes.
            second.ask(&format!("join {group} {}", at(1)));
            say(&mut other, &mut [&mut member, &mut second]);
            second.ask("leave");
            say(&mut other, &mut [&mut member]);
        }
    }
    // The last group again, while a process comes, stands, goes on, and is killed.
    let after = bystander();
    say(&mut other, &mut [&mut member]);
    anyverbs_testing::stop(&after.child);
    before.iter().for_each(|process| anyverbs_testing::stop(&process.child));
    for _ in 0..10 {
        say(&mut other, &mut [&mut member]);
    }
    drop(after);
    say(&mut other, &mut [&mut member]);
    let [killed, stopped] = &mut before;
    killed.child.kill().unwrap();
    killed.child.wait().unwrap();
    say(&mut other, &mut [&mut member]);
    // A member that is killed takes nothing from another.
    // SAFETY: a child of this process, which has not ended.
    assert_eq!(unsafe { libc::kill(stopped.id() as i32, libc::SIGCONT) }, 0);
    second.ask(&format!("join 239.4.5.{} 10.9.10.1", GROUPS - 1));
    say(&mut other, &mut [&mut member, &mut second]);
    drop(second);
    for _ in 0..10 {
        say(&mut other, &mut [&mut member]);
    }
}

#[test]
fn every_member_hears_another_host_whoever_runs_beside_it() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("beside"));
    }
}

/// Sending does not wait for it, nor do others. A message that finds no room is lost.
fn a_member_that_does_not_read() {
    ip("link set lo up");
    for (group, source) in [("239.4.7.92", "127.0.0.1"), ("ff15::4792", "::1")] {
        let mut others = [(); 2].map(|()| Process::here(&[]));
        for other in &mut others {
            other.ask(&format!("join {group} {source}"));
        }
        let mut a = Member::new(group, source);
        a.say(0..BURST);
        a.hears(0..BURST);
        others.iter_mut().for_each(|other| drop(other.ask(&format!("hear 0 {BURST}"))));
        a.e.qp.detach_mcast(a.group, 0).unwrap();
        let [stopped, reads] = &mut others;
        anyverbs_testing::stop(&stopped.child);
        let begin = Stopwatch::start();
        for first in (0..20).map(|n| 100 + n * BURST) {
            a.say(first..first + BURST);
            a.hears(0..0);
            reads.ask(&format!("hear {first} {BURST}"));
        }
        // A stopped member to which datagrams are handed on is waited for once in a second.
        assert!(begin.elapsed() < Duration::from_secs(5), "{group}: {:?}", begin.elapsed());
    }
}

#[test]
fn a_stopped_member_delays_nobody() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("stopped"));
    }
}

fn groups_follow_the_interfaces() {
    ip("link set lo up");
    let e = Endpoint::new(QpType::Ud);
    let group = "239.9.9.9";
    e.qp.attach_mcast(gid(group), 0).unwrap();
    assert_eq!(joined_on(group), ["lo"]);
    ip("link add va type veth peer name vb");
    ip("addr add 10.9.9.1/24 dev va");
    ip("link set va up");
    while joined_on(group) != ["lo", "va"] {
        assert_eq!(e.context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
    }
    ip("addr del 10.9.9.1/24 dev va");
    while joined_on(group) != ["lo"] {
        assert_eq!(e.context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
    }
    e.qp.detach_mcast(gid(group), 0).unwrap();
    assert!(joined_on(group).is_empty());
    // No interface has IPv6 addresses but the loopback; a group of a family that none has waits for one.
    ip("addr del ::1/128 dev lo");
    while e.context.gids().unwrap().iter().any(|g| g.gid.to_ip().is_ipv6()) {
        e.context.get_async_event().unwrap();
    }
    e.qp.attach_mcast(gid("ff15::1"), 0).unwrap();
    let attr = AhAttr { dgid: gid("ff15::1"), is_global: true, port: 1, ..AhAttr::default() };
    assert!(matches!(e.context.resolve(&attr), Err(error::CreateError::Invalid(_))));
}

#[test]
fn new_interfaces_join_the_groups() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("interfaces"));
    }
}

/// Where the kernel delivers no groups, senders forward, and keep a list of the receivers.
fn who_joins_while_others_send() {
    ip("link set lo up");
    let place = ("ff15::4793", "::1");
    let mut speaker = Member::new(place.0, place.1);
    let mut elsewhere = Member::new("ff15::4794", place.1);
    for first in (100..2000).step_by(100) {
        let mut late = Process::here(&[]);
        late.tell(&format!("join {} {}", place.0, place.1));
        let answer = std::thread::spawn(move || {
            late.hear();
            late
        });
        // Fewer than a socket's buffer holds: the other process may not have read any when it has joined.
        for _ in 0..100 {
            if answer.is_finished() {
                break;
            }
            elsewhere.say(0..1);
            elsewhere.hears(0..1);
        }
        let mut late = answer.join().unwrap();
        speaker.say(first..first + 2);
        speaker.hears(first..first + 2);
        late.ask(&format!("hear {first} 2"));
    }
}

#[test]
fn a_new_member_gets_forwarded_messages() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("handed on"));
    }
}

#[test]
fn many_queue_pairs_in_a_group_and_many_groups() {
    let first = Member::new(&own_group(0), "127.0.0.1");
    let attr = first.e.context.device_attr().unwrap();
    let qps: Vec<_> = (1..attr.max_mcast_qp_attach)
        .map(|_| {
            let e = Endpoint::new(QpType::Ud);
            e.qp.attach_mcast(first.group, 0).unwrap();
            e
        })
        .collect();
    let one_more = Endpoint::new(QpType::Ud);
    let refused = one_more.qp.attach_mcast(first.group, 0).unwrap_err();
    assert_eq!(refused.errno(), libc::ENOMEM);
    first.e.qp.attach_mcast(first.group, 0).unwrap();
    drop(qps);
    one_more.qp.attach_mcast(first.group, 0).unwrap();
    for i in 1..100 {
        one_more.qp.attach_mcast(gid(&own_group(i)), 0).unwrap();
    }
    // More than one socket can join.
    let mut last = Member::new(&own_group(99), "127.0.0.1");
    last.say(0..BURST);
    last.hears(0..BURST);
}

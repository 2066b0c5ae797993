//! Processes of one host, through shared memory and beside it: this test binary starts itself as the peers, and, where
//! the configuration differs, as the test.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::counters::Counter;
use anyverbs_testing::Stopwatch;

use crate::endpoint::*;

const ROLE: &str = "ANYVERBS_TEST_SAME_HOST";
pub(crate) const SIZE: usize = 256 << 10;
/// The memory that a peer offers.
pub(crate) const OFFERED: usize = if SIZE > SLOTS * SLOT { SIZE } else { SLOTS * SLOT };
/// Messages of a stream.
const COUNT: usize = 300;
/// Additions of each process that adds to one word, and how many it has under way.
const ADDS: u64 = 2000;
const ADDS_AT_ONCE: u64 = 16;
/// Receives of the receiving end.
const SLOTS: usize = 16;
const SLOT: usize = 80_000;

/// With these variables, one-sided operations to a peer are messages.
const BY_RING: [(&str, &str); 1] = [("ANYVERBS_DIRECT", "0")];

pub(crate) struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    pub(crate) fn spawn(role: &str, variables: &[(&str, &str)]) -> Self {
        Self::spawn_by(&[], role, variables)
    }

    /// A peer that is started by this command.
    pub(crate) fn spawn_by(command: &[&str], role: &str, variables: &[(&str, &str)]) -> Self {
        isolate();
        let this = std::env::current_exe().unwrap();
        let mut words = command.iter().map(std::ffi::OsStr::new).chain([this.as_os_str()]);
        let mut child = Command::new(words.next().unwrap())
            .args(words)
            .args(["--exact", "same_host::peer", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdin, stdout }
    }

    pub(crate) fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    pub(crate) fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the peer ended");
            if let Some(at) = line.find('@') {
                return line[at..].trim().to_owned();
            }
        }
    }

    pub(crate) fn connect(&mut self, e: &Endpoint, buffer: &Buffer) -> (Address, RemoteAddr) {
        let (address, remote) = introduced(&self.hear());
        e.connect(address);
        self.say(&introduce(e, buffer));
        assert_eq!(self.hear(), "@ connected");
        (address, remote)
    }

    /// As [`connect`](Self::connect), with this ACK timeout at our end.
    pub(crate) fn connect_with(
        &mut self,
        e: &Endpoint,
        buffer: &Buffer,
        timeout: u8,
    ) -> RemoteAddr {
        let (address, remote) = introduced(&self.hear());
        e.connect_with(address, timeout, 7);
        self.say(&introduce(e, buffer));
        assert_eq!(self.hear(), "@ connected");
        remote
    }

    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a signal to our own child, which has not been waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }
}

impl Peer {
    /// Stops it; it does nothing any more when this returns.
    pub(crate) fn stop(&self) {
        anyverbs_testing::stop(&self.child);
    }

    /// Waits until nobody holds its output any more.
    pub(crate) fn wait_for_silence(&mut self) {
        std::io::copy(&mut self.stdout, &mut std::io::sink()).unwrap();
    }

    /// Waits for its end.
    pub(crate) fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn go_on(&self) {
        self.signal(libc::SIGCONT);
    }

    /// [`go_on`](Self::go_on) for another thread. To be called while the peer lives.
    fn continuation(&self) -> impl FnOnce() + Send + use<> {
        let pid = self.child.id() as i32;
        // SAFETY: a signal to our own child, which has not been waited for.
        move || assert_eq!(unsafe { libc::kill(pid, libc::SIGCONT) }, 0)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn introduce(e: &Endpoint, buffer: &Buffer) -> String {
    let a = e.address();
    format!("@ {} {} {} {}", a.gid, a.qpn.get(), buffer.addr(), buffer.mr.rkey())
}

pub(crate) fn introduced(line: &str) -> (Address, RemoteAddr) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ip: std::net::Ipv6Addr = words[1].parse().unwrap();
    let number = |i: usize| words[i].parse::<u64>().unwrap();
    let address = Address { gid: Gid(ip.octets()), qpn: Qpn::new(number(2) as u32) };
    (address, RemoteAddr { va: number(3), rkey: number(4) as u32 })
}

fn type_of(role: &str) -> QpType {
    match role.split(' ').next() {
        Some("uc") => QpType::Uc,
        Some("ud") => QpType::Ud,
        _ => QpType::Rc,
    }
}

/// Packets sent and received through shared memory by this process.
fn by_shm(e: &Endpoint) -> (u64, u64) {
    let read = |counter| e.context.counters().unwrap().read(counter);
    (read(Counter::ShmSentPkts), read(Counter::ShmRcvdPkts))
}

/// Not a test by itself: the code of the peer process.
#[test]
fn peer() {
    let Ok(role) = std::env::var(ROLE) else { return };
    if role.starts_with("xrc") {
        return crate::xrc_processes::talk();
    }
    if role == "two hosts" {
        return crate::two_hosts::there();
    }
    if role == "rails" {
        return crate::rails::there();
    }
    if role == "a thousand" {
        return crate::two_hosts::take_all();
    }
    if role.ends_with("no memfd") {
        crate::direct::forbid([libc::SYS_memfd_create; 2]);
    }
    if role.contains("no copies") {
        crate::direct::forbid([libc::SYS_process_vm_readv, libc::SYS_process_vm_writev]);
    }
    let _poor = crate::scarce::before_open(&role);
    let e = crate::lanes::endpoint(&role, type_of(&role));
    let (_pd, buffer) = crate::direct::offered(&role, &e, OFFERED);
    crate::scarce::after_open(&role);
    println!("{}", introduce(&e, &buffer));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let (address, remote) = introduced(&line);
    if role.ends_with("too early") {
        crate::too_early::wait(&e, &buffer);
    }
    match crate::frozen::patience(&role) {
        Some((timeout, retries)) => e.connect_with(address, timeout, retries),
        None => e.connect(address),
    }
    if role.ends_with("qp rights") {
        let attr = QpAttr { access: Access::REMOTE_READ, ..QpAttr::default() };
        e.qp.modify(&attr, QpAttrMask::ACCESS_FLAGS).unwrap();
    }
    println!("@ connected");
    if role.contains("frozen") {
        crate::frozen::talk(&role, &e, &buffer, remote);
    }
    if role.contains("lanes") {
        crate::lanes::serve(&e, &buffer);
        if role.ends_with("steps") {
            crate::steps::serve(&e, &buffer);
        }
        if role == crate::lanes::MANY_LEFT {
            crate::lanes::leave_many(&e, &buffer);
        }
        std::process::exit(0);
    }
    if role.ends_with("fetched") {
        crate::fetched::serve(&e, &buffer);
    }
    if role.ends_with("windows") {
        crate::windows::serve(&e);
    }
    if role.contains("scarce/") {
        crate::scarce::serve(&role, &e, &buffer, remote);
    }
    if role.contains("direct") {
        crate::direct::serve(&role, &e, &buffer, remote);
    }
    if role.ends_with("flood") {
        // It goes on until it is killed.
        buffer.write(0, &vec![0xaa; SIZE]);
        let mut posted = 0;
        loop {
            while posted < 16 {
                e.send(0, SendOp::Write(remote), &[buffer.sge(0, SIZE)]);
                posted += 1;
            }
            let mut wcs = [Wc::default(); 16];
            let n = e.cq.poll(&mut wcs).unwrap();
            if wcs[..n].iter().any(|wc| wc.status != WcStatus::Success) {
                break;
            }
            posted -= n;
        }
    }
    if let Some((_, seed)) = role.split_once("spoiler ") {
        crate::spoiler::serve(&e, &buffer, remote, seed.parse().unwrap());
    }
    if role.ends_with("adds") {
        add_up(&e, &buffer, remote);
        println!("@ added");
    }
    if role.ends_with("sink") {
        let slots = SLOTS as u64;
        let post = |slot: u64| e.recv(slot, &[buffer.sge(slot as usize * SLOT, SLOT)]);
        (0..slots).for_each(post);
        println!("@ posted");
        let grh = if e.qp_type == QpType::Ud { 40 } else { 0 };
        let mut got = 0;
        while got < COUNT {
            let mut wcs = [Wc::default(); 16];
            let n = e.cq.poll(&mut wcs).unwrap();
            for wc in &wcs[..n] {
                assert_eq!(wc.status, WcStatus::Success);
                let len = wc.byte_len as usize - grh;
                let data = buffer.read(wc.wr_id as usize * SLOT + grh, len);
                assert!(data == pattern(len, got as u8), "message {got} of {len} bytes");
                post(wc.wr_id);
                got += 1;
                if got % SLOTS == 0 {
                    println!("@ posted");
                }
            }
        }
        println!("@ got {got} {:?}", by_shm(&e));
    }
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
}

/// Does each round while `e` talks with a peer at full speed, which goes on after every one of them.
pub(crate) fn beside_a_talk(
    e: &Endpoint,
    [src, dst]: [&Buffer; 2],
    remote: RemoteAddr,
    rounds: Range<u32>,
    timeout: Duration,
    mut each: impl FnMut(u32),
) {
    /// Also when the test fails.
    struct Ends<'a>(&'a AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (ends, talks) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let talker = scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                exercise(e, src, dst, remote);
                talks.fetch_add(1, Ordering::Relaxed);
            }
        });
        let _ends = Ends(&ends);
        for round in rounds {
            let talked = talks.load(Ordering::Relaxed);
            each(round);
            let deadline = Instant::now() + timeout;
            while talks.load(Ordering::Relaxed) < talked + 2 {
                assert!(!talker.is_finished(), "round {round}");
                assert!(Instant::now() < deadline, "round {round}: the third is not answered");
                std::thread::yield_now();
            }
        }
    });
}

/// Whether this process may use shared memory: the tests also run without.
pub(crate) fn is_on() -> bool {
    std::env::var("ANYVERBS_SHM").as_deref() != Ok("0")
}

fn complete(e: &Endpoint, timeout: Duration) -> Wc {
    e.poll_for(1, timeout)[0]
}

/// One at a time, since they measure time.
pub(crate) fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Writes, reads and an atomic, whole and right.
pub(crate) fn exercise(e: &Endpoint, src: &Buffer, dst: &Buffer, remote: RemoteAddr) {
    for (i, len) in [1, 28, 29, 4096, 4097, 32 << 10, (32 << 10) + 1, SIZE].into_iter().enumerate()
    {
        let data = pattern(len, i as u8);
        src.write(0, &data);
        e.send(1, SendOp::Write(remote), &[src.sge(0, len)]);
        e.send(2, SendOp::Read(remote), &[dst.sge(0, len)]);
        for wc in e.poll(2) {
            assert_eq!(wc.status, WcStatus::Success);
        }
        assert!(dst.read(0, len) == data, "{len} bytes");
    }
    e.send(3, SendOp::FetchAdd { at: remote, add: 1 }, &[dst.sge(0, 8)]);
    assert_eq!(complete(e, Duration::from_secs(10)).status, WcStatus::Success);
}

#[test]
fn packets_take_the_link_that_both_have() {
    let _turn = turn();
    for peer_has in [true, false] {
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_SHM", if peer_has { "1" } else { "0" })]);
        let e = Endpoint::new(QpType::Rc);
        let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
        let (_, remote) = peer.connect(&e, &src);
        let before = by_shm(&e);
        exercise(&e, &src, &dst, remote);
        let after = by_shm(&e);
        let used = after.0 > before.0 && after.1 > before.1;
        assert_eq!(used, peer_has && is_on(), "{before:?} {after:?}");
    }
}

/// Adds 1 [`ADDS`] times.
fn add_up(e: &Endpoint, results: &Buffer, remote: RemoteAddr) {
    let (mut posted, mut done) = (0, 0);
    while done < ADDS {
        while posted < ADDS && posted < done + ADDS_AT_ONCE {
            let result = results.sge((posted % ADDS_AT_ONCE) as usize * 8, 8);
            e.send(posted, SendOp::FetchAdd { at: remote, add: 1 }, &[result]);
            posted += 1;
        }
        for wc in e.poll(1) {
            assert_eq!(wc.status, WcStatus::Success);
            done += 1;
        }
    }
}

/// Processes add by every link at once.
#[test]
fn several_processes_add_to_one_word() {
    let _turn = turn();
    let owner = Endpoint::new(QpType::Rc);
    let word = Buffer::new(&owner.pd, 8);
    let mut others: Vec<_> = ["1", "1", "0"]
        .into_iter()
        .map(|shm| {
            let mut peer = Peer::spawn("rc adds", &[("ANYVERBS_SHM", shm)]);
            let e = Endpoint::new(QpType::Rc);
            // SAFETY: the word stays, and has no reference.
            let same = unsafe {
                Buffer::of(
                    &e.pd,
                    word.addr() as *mut u8,
                    8,
                    Access::REMOTE_ATOMIC | Access::LOCAL_WRITE,
                )
            };
            peer.connect(&e, &same);
            (peer, e, same)
        })
        .collect();
    let (here, there) = pair(QpType::Rc);
    let access = Access::REMOTE_ATOMIC | Access::LOCAL_WRITE;
    // SAFETY: as above.
    let same = unsafe { Buffer::of(&there.pd, word.addr() as *mut u8, 8, access) };
    add_up(&here, &Buffer::new(&here.pd, SIZE), same.remote(0));
    for (peer, ..) in &mut others {
        assert_eq!(peer.hear(), "@ added");
    }
    let sum = u64::from_ne_bytes(word.read(0, 8).try_into().unwrap());
    assert_eq!(sum, 4 * ADDS);
}

/// A stream to a peer, which stands still in the midst of it for this time. A reliable connection waits for receives. To the
/// others no more is sent than there are receives: an unreliable message that finds none is lost, on hardware at once.
fn stream(role: &str, still: Duration) {
    let _turn = turn();
    let mut peer = Peer::spawn(role, &[]);
    let e = Endpoint::new(type_of(role));
    let src = Buffer::new(&e.pd, SIZE);
    let (address, _) = peer.connect(&e, &src);
    assert_eq!(peer.hear(), "@ posted");
    let ud = (e.qp_type == QpType::Ud).then_some(e.dest(address));
    let most = if e.qp_type == QpType::Ud { 4096 } else { SLOT };
    let mut posted = SLOTS;
    let reliable = e.qp_type == QpType::Rc;
    std::thread::scope(|scope| {
        for i in 0..COUNT {
            if i == COUNT / 2 && !still.is_zero() {
                peer.stop();
                let continue_it = peer.continuation();
                scope.spawn(move || {
                    std::thread::sleep(still);
                    continue_it();
                });
            }
            while !reliable && i == posted {
                assert_eq!(peer.hear(), "@ posted");
                posted += SLOTS;
            }
            let len = i * 997 % (most + 1);
            src.write(0, &pattern(len, i as u8));
            e.send_to(0, SendOp::Send, &[src.sge(0, len)], ud);
            e.poll(1);
        }
    });
    let mut got = peer.hear();
    while got == "@ posted" {
        got = peer.hear();
    }
    let by_shm = got.strip_prefix(&format!("@ got {COUNT} ")).expect(&got);
    let received = by_shm.trim_matches(['(', ')']).split(", ").last().unwrap();
    let received: usize = received.parse().unwrap();
    assert!(if is_on() { received >= COUNT } else { received == 0 }, "{got}");
}

#[test]
fn a_stream_arrives_whole() {
    for role in ["rc sink", "uc sink", "ud sink"] {
        stream(role, Duration::ZERO);
    }
}

/// As a process does that others keep from the processor.
#[test]
fn a_peer_that_stands_still_for_a_while_loses_nothing() {
    for role in ["rc sink", "uc sink", "ud sink"] {
        stream(role, Duration::from_millis(250));
    }
}

#[test]
fn a_peer_killed_under_load_is_noticed_and_leaves_nothing() {
    const ALONE: &str = "ANYVERBS_TEST_KILLS";
    let _turn = turn();
    if std::env::var_os(ALONE).is_some() {
        return kill_under_load();
    }
    // In a process and a registry of its own: there, no other test's processes come and go.
    let name = "same_host::a_peer_killed_under_load_is_noticed_and_leaves_nothing";
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(ALONE, "1")
        .env_remove("ANYVERBS_REGISTRY")
        .env_remove("ANYVERBS_UDP_PORT")
        .status();
    assert!(status.unwrap().success());
}

/// Peers that flood this process, and are flooded, are killed, while another one and this talk on at full speed.
fn kill_under_load() {
    // By UDP a round takes two seconds of retries.
    let rounds = if is_on() { 20 } else { 10 };
    let begin = Instant::now();
    let mut third = Peer::spawn("rc flood", &[]);
    let f = Endpoint::new(QpType::Rc);
    let [src, dst, sink] = [(); 3].map(|()| Buffer::new(&f.pd, SIZE));
    let (_, flooding) = third.connect(&f, &sink);
    // Beyond the region that it floods from, which it fills itself.
    let to_third = RemoteAddr { va: flooding.va + SIZE as u64, ..flooding };
    exercise(&f, &src, &dst, to_third);
    let before = sockets();
    assert!(!before.is_empty());
    let mut killed = Vec::new();
    // The end of one process does not stop another.
    beside_a_talk(&f, [&src, &dst], to_third, 0..rounds, Duration::from_secs(5), |round| {
        killed.push(kill_a_peer(round % 2 == 0));
    });
    assert!(third.child.try_wait().unwrap().is_none());
    assert_eq!(f.qp.state().unwrap(), QpState::Rts);
    assert_eq!(sockets().difference(&before).next(), None, "{before:?}");
    let registry = std::env::var("ANYVERBS_REGISTRY").unwrap();
    for dir in ["/dev/shm", "/tmp"] {
        let ours = |name: &str| {
            name.contains(&registry) || killed.iter().any(|pid| is_of_process(name, *pid))
        };
        let names = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name());
        let left: Vec<_> = names.filter(|name| ours(&name.to_string_lossy())).collect();
        assert!(left.is_empty(), "{dir}: {left:?}");
    }
    eprintln!("{:?} a round", begin.elapsed() / rounds);
}

/// Whether this is a file name of the device with this process in it. Part of a longer number is another process.
fn is_of_process(name: &str, pid: u32) -> bool {
    let mut numbers = name.split(|c: char| !c.is_ascii_digit());
    name.contains("anyverbs") && numbers.any(|number| number == pid.to_string())
}

#[test]
fn a_file_of_a_longer_process_number_is_anothers() {
    assert!(is_of_process("anyverbs-ring-1234.tmp", 1234));
    assert!(!is_of_process("anyverbs-ring-12345", 1234));
    assert!(!is_of_process("other-1234", 1234));
}

/// Kills a peer in the middle of its load, after this process's own writes to it or before their end. The process that was.
fn kill_a_peer(after_writes: bool) -> u32 {
    let mut peer = Peer::spawn("rc flood", &[]);
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, SIZE);
    let (_, remote) = peer.connect(&e, &buffer);
    for i in 0..8 {
        e.send(i, SendOp::Write(remote), &[buffer.sge(0, SIZE)]);
    }
    if after_writes {
        e.poll(8);
    }
    // The memory that it shares has no name that could outlive it.
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", peer.child.id())).unwrap();
    let is_file = |map: &&str| ["/dev/shm/", "/tmp/"].iter().any(|dir| map.contains(dir));
    let shared = |map: &&str| map.split(' ').nth(1).is_some_and(|mode| mode.ends_with('s'));
    let named: Vec<_> = maps.lines().filter(shared).filter(is_file).collect();
    assert!(named.is_empty(), "{named:?}");
    let before = Instant::now();
    peer.signal(libc::SIGKILL);
    peer.child.wait().unwrap();
    let killed = Stopwatch::start();
    e.send(9, SendOp::Write(remote), &[buffer.sge(0, 1)]);
    let of_writes = if after_writes { 1 } else { 9 };
    let wcs = e.poll(of_writes);
    let last = wcs.iter().find(|wc| wc.status != WcStatus::Success);
    assert_eq!(last.map(|wc| wc.status), Some(WcStatus::RetryExcErr));
    assert_eq!(e.qp.state().unwrap(), QpState::Err);
    if is_on() {
        // Retries would take two seconds. If its peer leaves early, a program has a little time to end before.
        assert!(before.elapsed() >= Duration::from_millis(200), "{:?}", before.elapsed());
        assert!(killed.elapsed() < Duration::from_secs(1), "{:?}", killed.elapsed());
    }
    peer.child.id()
}

/// Names of the abstract sockets of this registry.
fn sockets() -> BTreeSet<String> {
    let prefix = format!("@{}/", std::env::var("ANYVERBS_REGISTRY").unwrap());
    let table = std::fs::read_to_string("/proc/net/unix").unwrap();
    let names = table.lines().filter_map(|line| line.split_whitespace().nth(7));
    names.filter(|name| name.starts_with(&prefix)).map(str::to_owned).collect()
}

#[test]
fn a_stopped_peer_delays_no_other_and_retries_end_it() {
    let _turn = turn();
    // A process that is stopped can be written to nevertheless.
    let mut stopped = Peer::spawn("rc", &BY_RING);
    let mut other = Peer::spawn("rc", &[]);
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    let (src, dst) = (Buffer::new(&a.pd, SIZE), Buffer::new(&b.pd, SIZE));
    let (_, to_stopped) = stopped.connect(&a, &src);
    let (_, to_other) = other.connect(&b, &dst);
    a.send(1, SendOp::Write(to_stopped), &[src.sge(0, SIZE)]);
    assert_eq!(complete(&a, Duration::from_secs(10)).status, WcStatus::Success);
    stopped.stop();
    for i in 0..32 {
        a.send(i, SendOp::Write(to_stopped), &[src.sge(0, SIZE)]);
    }
    let begin = Stopwatch::start();
    for i in 0..100 {
        b.send(i, SendOp::Write(to_other), &[dst.sge(0, SIZE)]);
        assert_eq!(complete(&b, Duration::from_secs(10)).status, WcStatus::Success);
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    // Eight timeouts of 67 ms. Each may take four times as long (IBA 9.7.6.1.3).
    let most = Duration::from_millis(4 * 67 * 8) + Duration::from_secs(1);
    let begin = Stopwatch::start();
    assert_eq!(complete(&a, Duration::from_secs(60)).status, WcStatus::RetryExcErr);
    assert!(begin.elapsed() < most, "{:?}", begin.elapsed());
    stopped.signal(libc::SIGCONT);
}

#[test]
fn a_process_stopped_for_a_moment_goes_on() {
    let _turn = turn();
    let mut peer = Peer::spawn("rc", &BY_RING);
    let e = Endpoint::new(QpType::Rc);
    let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
    let (_, remote) = peer.connect(&e, &src);
    for _ in 0..3 {
        peer.stop();
        for i in 0..32 {
            e.send(i, SendOp::Write(remote), &[src.sge(0, SIZE)]);
        }
        // The rings are full long before.
        std::thread::sleep(Duration::from_millis(700));
        peer.signal(libc::SIGCONT);
        for wc in e.poll(32) {
            assert_eq!(wc.status, WcStatus::Success);
        }
        exercise(&e, &src, &dst, remote);
    }
}

/// The tests of two processes with shared memory, again with UDP.
#[test]
fn the_same_by_udp() {
    if !is_on() {
        return;
    }
    let this = std::env::current_exe().unwrap();
    let list = Command::new(&this).args(["--list", "--format", "terse"]).output().unwrap();
    crate::host::succeeds(&list);
    let list = String::from_utf8(list.stdout).unwrap();
    let modules = ["processes::", "same_host::", "direct::", "windows::", "scarce::"];
    let is_one = |name: &&str| modules.iter().any(|module| name.starts_with(module));
    let tests: Vec<_> =
        list.lines().filter_map(|line| line.strip_suffix(": test")).filter(is_one).collect();
    assert!(modules.iter().all(|module| tests.iter().any(|name| name.starts_with(module))));
    // Each in a process, and so with a device, of its own. Two at a time, since many of them wait.
    let next = AtomicUsize::new(0);
    let run = || {
        while let Some(name) = tests.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut test = Command::new(&this);
            crate::host::succeeds(
                &test.args(["--exact", name]).env("ANYVERBS_SHM", "0").output().unwrap(),
            );
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(run);
        run();
    });
}

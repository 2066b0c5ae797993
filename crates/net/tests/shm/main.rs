//! The same-host link between real processes: they exchange messages, sleep, stop, die and belong to others.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod taking_back;

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::shm::{
    Channel, Closed, Config, ConnectError, Endpoint, Event, Local, Poller, Remote, RemoteError,
    SendError,
};
use anyverbs_net::{Registry, Slot};

const TIME_LIMIT: Duration = Duration::from_secs(30);
const HUB: u8 = 1;
const NOBODY: u32 = 65_534;

/// This process, or another, as far as the link is concerned.
struct Party {
    endpoint: Endpoint,
    poller: Poller,
    events: Vec<Event>,
    _slot: Slot,
}

impl Party {
    fn new(name: &str, slot: u8) -> Self {
        let slot = Slot::claim_number(&Registry::new(name).unwrap(), slot).unwrap();
        let (endpoint, poller) = Endpoint::new(&slot, Config::default()).unwrap();
        Self { endpoint, poller, events: Vec::new(), _slot: slot }
    }

    /// One round of control and poll. Returns the number of messages.
    fn turn(&mut self, mut each: impl FnMut(&Arc<Channel>, &[u8])) -> usize {
        self.endpoint.control().unwrap();
        let n = self.poller.poll(|channel, batch| {
            for message in batch {
                let mut payload = vec![0; message.payload_len()];
                message.read_payload(0, &mut payload);
                each(channel, &payload);
            }
        });
        self.events.extend(std::iter::from_fn(|| self.poller.next_event()));
        n
    }

    fn until(&mut self, mut done: impl FnMut(&mut Self) -> bool) {
        let deadline = Instant::now() + TIME_LIMIT;
        while !done(self) {
            assert!(Instant::now() < deadline, "it takes too long");
            self.turn(|_, _| {});
        }
    }

    /// Sleeps until something comes, if nothing is there.
    fn sleep(&mut self) {
        if self.poller.arm() {
            let mut fds = [self.endpoint.wake_fd(), self.endpoint.control_fd()]
                .map(|fd| libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            // SAFETY: a live array of two.
            let n = unsafe { libc::poll(fds.as_mut_ptr(), 2, TIME_LIMIT.as_millis() as i32) };
            assert!(n > 0, "asleep for ever");
            self.poller.disarm();
        }
    }

    fn established(&mut self, slot: u8) -> Arc<Channel> {
        let channel = self.endpoint.connect(slot).unwrap();
        self.until(|_| channel.is_established());
        channel
    }

    fn take_closed(&mut self) -> Option<(u8, Closed)> {
        let at = self.events.iter().position(|e| matches!(e, Event::Closed(..)))?;
        match self.events.remove(at) {
            Event::Closed(channel, reason) => Some((channel.slot(), reason)),
            _ => None,
        }
    }
}

fn send(channel: &Arc<Channel>, payload: &[u8]) -> Result<(), SendError> {
    let mut sender = channel.sender();
    let mut reservation = sender.reserve(0, payload.len())?;
    reservation.write_payload(0, payload);
    reservation.commit();
    sender.flush();
    Ok(())
}

/// Another process, killed at the end.
struct Peer {
    child: Child,
    stdout: BufReader<std::process::ChildStdout>,
}

impl Peer {
    /// Starts this binary in a role and waits until it says that it is ready.
    fn start(role: &str, registry: &str, slot: u8) -> Self {
        Self::start_with(role, registry, slot).0
    }

    /// As [`start`](Self::start), with the further words of its greeting.
    fn start_with(role: &str, registry: &str, slot: u8) -> (Self, String) {
        let mut peer = Self::spawn(role, registry, slot);
        let said = peer.expect("ready");
        (peer, said)
    }

    /// As [`start`](Self::start), without waiting.
    fn spawn(role: &str, registry: &str, slot: u8) -> Self {
        let mut child = Command::new("/proc/self/exe")
            .args(["--ignored", "--exact", "peer", "--nocapture"])
            .env("SHM_ROLE", role)
            .env("SHM_REGISTRY", registry)
            .env("SHM_SLOT", slot.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.child.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Waits for a line that begins with `word`: the rest of it.
    fn expect(&mut self, word: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "no {word}");
            // The test harness prints in front of it.
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    fn signal(&self, signal: i32) {
        // SAFETY: kill takes integers; the child is not reaped yet.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    fn stop(&self) {
        anyverbs_testing::stop(&self.child);
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn name(test: &str) -> String {
    format!("shm-{test}-{}", std::process::id())
}

/// The other processes of the tests below.
#[test]
#[ignore = "a child process of the others"]
fn peer() {
    let role = std::env::var("SHM_ROLE").unwrap();
    let registry = std::env::var("SHM_REGISTRY").unwrap();
    let slot = std::env::var("SHM_SLOT").unwrap().parse().unwrap();
    match role.as_str() {
        "echo" => {
            let mut party = Party::new(&registry, slot);
            println!("ready");
            loop {
                echo(&mut party);
            }
        }
        "sleeping echo" => {
            let mut party = Party::new(&registry, slot);
            println!("ready");
            loop {
                if echo(&mut party) == 0 {
                    party.sleep();
                }
            }
        }
        "spam" => {
            let mut party = Party::new(&registry, slot);
            let channel = party.endpoint.connect(HUB).unwrap();
            println!("ready");
            let mut n = 0u32;
            loop {
                let payload = n.to_le_bytes().repeat(1 + n as usize * 37 % 9000);
                if send(&channel, &payload).is_ok() {
                    n += 1;
                } else {
                    channel.sender().ask_for_room();
                    party.turn(|_, _| {});
                }
            }
        }
        "survivor" => survive(&registry),
        "memory" => {
            let mut party = Party::new(&registry, slot);
            let memory = vec![slot; 1 << 20];
            println!("ready {:x}", memory.as_ptr() as usize);
            wait_for_end(|| {
                party.turn(|_, _| {});
            });
            assert!(memory.iter().all(|&b| b == 0x5a));
            println!("good");
        }
        "undumpable" => {
            become_nobody();
            // SAFETY: prctl with integer arguments.
            unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0) };
            let mut party = Party::new(&registry, slot);
            println!("ready");
            loop {
                echo(&mut party);
            }
        }
        "denied" => {
            become_nobody();
            let mut party = Party::new(&registry, slot);
            println!("ready");
            let channel = party.established(HUB);
            println!("copy {:?}", channel.can_copy());
            send(&channel, b"by the ring").unwrap();
            let mut answers = 0;
            while answers == 0 {
                party.turn(|_, payload| answers += usize::from(payload == b"by the ring"));
            }
            println!("ring works");
        }
        // Begins a copy to the address that it is told, and makes it on command.
        "copier" => {
            let mut party = Party::new(&registry, slot);
            let channel = party.established(HUB);
            println!("ready");
            let mut line = String::new();
            std::io::stdin().read_line(&mut line).unwrap();
            let to = line.trim().parse().unwrap();
            let copying = channel.begin_copy().unwrap();
            println!("marked");
            line.clear();
            std::io::stdin().read_line(&mut line).unwrap();
            if line.trim() == "exec" {
                use std::os::unix::process::CommandExt;
                panic!("{}", Command::new("sleep").arg("1000").exec());
            }
            let mut bytes = [0xaa_u8; 64];
            let local = [Local { iov_base: bytes.as_mut_ptr().cast(), iov_len: 64 }];
            // SAFETY: the local side is an array of this function.
            unsafe { copying.write(&local, to, 64) }.unwrap();
            copying.count_write(5, 64);
            drop(copying);
            println!("copied");
            wait_for_end(|| {
                party.turn(|_, _| {});
            });
        }
        "forker" => {
            let mut party = Party::new(&registry, slot);
            // SAFETY: the child only sleeps: it touches nothing that another thread may have held.
            let child = unsafe { libc::fork() };
            if child == 0 {
                // SAFETY: ends the child if the test cannot.
                unsafe { libc::alarm(120) };
                loop {
                    // SAFETY: pause has no preconditions.
                    unsafe { libc::pause() };
                }
            }
            println!("ready {child}");
            loop {
                echo(&mut party);
            }
        }
        "exec" => {
            let mut party = Party::new(&registry, slot);
            println!("ready");
            while party.events.is_empty() {
                party.turn(|_, _| {});
            }
            use std::os::unix::process::CommandExt;
            panic!("{}", Command::new("sleep").arg("1000").exec());
        }
        "stranger" => {
            become_nobody();
            let address = format!("{registry}/shm/{HUB}");
            let socket = seqpacket();
            let error = connect_raw(&socket, &address).err();
            println!("ready {error:?}");
            let mut byte = [0u8; 1];
            // SAFETY: one live byte. Blocks until the other side has thrown us out.
            let n = unsafe { libc::recv(socket.as_raw_fd(), byte.as_mut_ptr().cast(), 1, 0) };
            println!("received {n}");
        }
        "squatter" => {
            become_nobody();
            let socket = seqpacket();
            let (address, len) = raw_address(&format!("{registry}/shm/{slot}"));
            // SAFETY: a live address of that length.
            unsafe {
                assert_eq!(libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len), 0);
                assert_eq!(libc::listen(socket.as_raw_fd(), 5), 0);
            }
            println!("ready");
            wait_for_end(|| {});
        }
        other => panic!("no such role: {other}"),
    }
}

/// Sends everything back: how many messages that were.
fn echo(party: &mut Party) -> usize {
    let mut again = Vec::new();
    let n = party.turn(|channel, payload| {
        // The peer takes its own messages back before it sends more than a ring holds.
        if send(channel, payload).is_err() {
            again.push((Arc::clone(channel), payload.to_vec()));
        }
    });
    for (channel, payload) in again {
        while send(&channel, &payload) == Err(SendError::Full) {
            std::thread::yield_now();
        }
    }
    n
}

fn wait_for_end(mut meanwhile: impl FnMut()) {
    let end = std::thread::spawn(|| std::io::stdin().read_to_end(&mut Vec::new()));
    while !end.is_finished() {
        meanwhile();
        std::thread::yield_now();
    }
}

fn become_nobody() {
    // SAFETY: integer arguments; the whole process changes.
    assert_eq!(unsafe { libc::setresuid(NOBODY, NOBODY, NOBODY) }, 0);
}

fn seqpacket() -> std::os::fd::OwnedFd {
    use std::os::fd::FromRawFd;
    // SAFETY: plain flags; a new descriptor is ours.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0);
        assert!(fd >= 0);
        std::os::fd::OwnedFd::from_raw_fd(fd)
    }
}

/// An abstract address, with its length.
fn raw_address(name: &str) -> (libc::sockaddr_un, u32) {
    // SAFETY: integers, for which zero is valid.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    (address, (2 + 1 + name.len()) as u32)
}

fn connect_raw(socket: &std::os::fd::OwnedFd, name: &str) -> std::io::Result<()> {
    let (address, len) = raw_address(name);
    // SAFETY: a live address of that length.
    let rc = unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if rc == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

/// Sends messages of many sizes and checks that they come back in order.
fn exchange(party: &mut Party, channel: &Arc<Channel>, messages: u32, sleep: bool) {
    let payload = |n: u32| n.to_le_bytes().repeat(1 + n as usize * 53 % 15_000);
    let (mut sent, mut received) = (0, 0);
    let deadline = Instant::now() + TIME_LIMIT;
    while received < messages {
        assert!(Instant::now() < deadline, "it takes too long");
        // Few in flight, so that the echo never waits for us.
        while sent < messages && sent - received < 4 && send(channel, &payload(sent)).is_ok() {
            sent += 1;
        }
        let n = party.turn(|_, bytes| {
            assert_eq!(bytes, payload(received), "{received}");
            received += 1;
        });
        if n == 0 && sleep && received < sent {
            party.sleep();
        }
    }
}

#[test]
fn two_processes_exchange_messages_while_both_poll() {
    let name = name("poll");
    let mut hub = Party::new(&name, HUB);
    let _peer = Peer::start("echo", &name, 2);
    let channel = hub.established(2);
    exchange(&mut hub, &channel, 3000, false);
}

#[test]
fn two_processes_exchange_messages_while_both_sleep() {
    let name = name("sleep");
    let mut hub = Party::new(&name, HUB);
    let _peer = Peer::start("sleeping echo", &name, 2);
    let channel = hub.established(2);
    exchange(&mut hub, &channel, 3000, true);
}

#[test]
fn a_process_killed_under_load_is_noticed_and_leaves_nothing() {
    // In a process of its own, so that all mappings and descriptors are those of the link.
    let name = name("kill");
    let mut survivor = Peer::start("survivor", &name, HUB);
    assert_eq!(survivor.expect("survived"), "20");
    assert!(survivor.child.wait().unwrap().success());
}

fn survive(name: &str) {
    let mut hub = Party::new(name, HUB);
    println!("ready");
    let mut usage = Vec::new();
    for round in 0..20u8 {
        let mut peer = Peer::start("spam", name, 2);
        let mut n = 0u32;
        let mut check = |_: &Arc<Channel>, bytes: &[u8]| {
            assert_eq!(bytes, n.to_le_bytes().repeat(1 + n as usize * 37 % 9000));
            n += 1;
        };
        let deadline = Instant::now() + TIME_LIMIT;
        let mut left = 50 + usize::from(round) * 13;
        while left > 0 {
            assert!(Instant::now() < deadline);
            left = left.saturating_sub(hub.turn(&mut check));
        }
        peer.kill();
        while hub.take_closed().is_none() {
            assert!(Instant::now() < deadline, "not noticed");
            hub.turn(&mut check);
        }
        assert!(matches!(hub.endpoint.connect(2), Err(ConnectError::Nobody)));
        hub.events.clear();
        drop(peer);
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let mappings = maps.lines().filter(|line| line.contains("memfd:anyverbs")).count();
        usage.push((mappings, std::fs::read_dir("/proc/self/fd").unwrap().count()));
    }
    assert!(usage.iter().all(|&n| n == usage[0]), "{usage:?}");
    println!("survived {}", usage.len());
}

#[test]
fn a_stopped_process_stalls_nobody() {
    let name = name("stop");
    let mut hub = Party::new(&name, HUB);
    let stopped = Peer::start("echo", &name, 2);
    let _running = Peer::start("echo", &name, 3);
    let (to_stopped, to_running) = (hub.established(2), hub.established(3));
    stopped.stop();
    let late = Peer::start("echo", &name, 4);
    late.stop();
    // Never answers: the messages wait in the ring.
    let to_late = hub.endpoint.connect(4).unwrap();
    for channel in [&to_stopped, &to_late] {
        let begin = Instant::now();
        let error = loop {
            if let Err(error) = send(channel, &[7; 10_000]) {
                break error;
            }
        };
        assert_eq!(error, SendError::Full);
        channel.sender().ask_for_room();
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
    exchange(&mut hub, &to_running, 500, false);
    assert!(!to_late.is_established() && to_stopped.closed().is_none());
    // The processes go on where they stopped.
    late.signal(libc::SIGCONT);
    stopped.signal(libc::SIGCONT);
    let (mut from, deadline) = ([0; 5], Instant::now() + TIME_LIMIT);
    while from[2] < 10 || from[4] < 10 {
        assert!(Instant::now() < deadline, "{from:?}");
        hub.turn(|channel, bytes| {
            assert_eq!(bytes, [7; 10_000]);
            from[usize::from(channel.slot())] += 1;
        });
    }
}

#[test]
fn memory_of_a_process_is_accessible_until_it_ends() {
    let name = name("memory");
    let mut hub = Party::new(&name, HUB);
    let (mut peer, address) = Peer::start_with("memory", &name, 2);
    let remote = [Remote::new(u64::from_str_radix(&address, 16).unwrap(), 1 << 20)];
    let channel = hub.established(2);
    assert_eq!(channel.can_copy(), Ok(()));
    let mut bytes = vec![0u8; 1 << 20];
    let local = [Local { iov_base: bytes.as_mut_ptr().cast(), iov_len: 1 << 20 }];
    // SAFETY: the local side is a buffer of this test.
    unsafe { channel.read_remote(&local, &remote) }.unwrap();
    assert!(bytes.iter().all(|&b| b == 2));
    bytes.fill(0x5a);
    let local = [Local { iov_base: bytes.as_mut_ptr().cast(), iov_len: 1 << 20 }];
    // SAFETY: as above.
    unsafe { channel.write_remote(&local, &remote) }.unwrap();
    drop(peer.child.stdin.take());
    peer.expect("good");
    peer.child.wait().unwrap();
    let deadline = Instant::now() + TIME_LIMIT;
    loop {
        // SAFETY: as above.
        match unsafe { channel.read_remote(&local, &remote) } {
            Err(RemoteError::Gone) => break,
            other => assert!(Instant::now() < deadline, "{other:?}"),
        }
    }
    hub.until(|hub| hub.take_closed().is_some());
}

#[test]
fn where_the_kernel_forbids_copies_the_rings_work_on() {
    // It takes on the user nobody.
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let name = name("denied");
    let _peer = Peer::start("undumpable", &name, HUB);
    let mut asking = Peer::start("denied", &name, 2);
    assert_eq!(asking.expect("copy "), "Err(Denied)");
    asking.expect("ring works");
}

#[test]
fn a_death_is_noticed_although_a_child_keeps_the_sockets() {
    let name = name("fork");
    let mut hub = Party::new(&name, HUB);
    let (mut peer, grandchild) = Peer::start_with("forker", &name, 2);
    let grandchild: i32 = grandchild.parse().unwrap();
    let channel = hub.established(2);
    exchange(&mut hub, &channel, 10, false);
    peer.kill();
    hub.until(|hub| hub.events.iter().any(|e| matches!(e, Event::Closed(..))));
    assert_eq!(hub.take_closed(), Some((2, Closed::Died)));
    // SAFETY: kill takes integers; the process only ends by this.
    unsafe { libc::kill(grandchild, libc::SIGKILL) };
}

#[test]
fn a_process_that_runs_another_program_hangs_up() {
    let name = name("exec");
    let mut hub = Party::new(&name, HUB);
    let peer = Peer::start("exec", &name, 2);
    let channel = hub.established(2);
    hub.until(|hub| hub.events.iter().any(|e| matches!(e, Event::Closed(..))));
    assert_eq!(hub.take_closed(), Some((2, Closed::HungUp)));
    assert_eq!(send(&channel, b"x"), Err(SendError::Closed(Closed::HungUp)));
    drop(peer);
}

#[test]
fn another_user_can_neither_attach_nor_pretend() {
    // It takes on the user nobody.
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let name = name("user");
    let mut hub = Party::new(&name, HUB);
    let (mut stranger, error) = Peer::start_with("stranger", &name, 9);
    assert_eq!(error, "None");
    hub.endpoint.control().unwrap();
    assert_eq!(stranger.expect("received"), "0");
    assert_eq!(hub.turn(|_, _| {}), 0);
    assert!(hub.events.is_empty());
    // And a name of ours that another user took is no peer.
    let _squatter = Peer::start("squatter", &name, 77);
    assert!(matches!(hub.endpoint.connect(77), Err(ConnectError::OtherUser)));
}

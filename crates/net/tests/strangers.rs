//! Abilities of another user of the host: it can take names, and nothing else.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use anyverbs_testing::Stopwatch;
use std::io::{BufRead, BufReader, Write};
use std::net::Ipv4Addr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::forward::{ForwardBuffer, Forwarded};
use anyverbs_net::shm::{Config, Endpoint};
use anyverbs_net::{
    Datagram, PortOptions, Registry, ServiceAddress, Services, Slot, Store, UdpPort,
};
use socket2::{Domain, SockAddr, Socket, Type};

const NAME: &str = "strangers";
const STRANGER: u32 = 12_345;

/// Runs `work` in a thread that is another user's.
fn as_stranger<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            // SAFETY: the raw system call changes the credentials of this thread only.
            let rc = unsafe { libc::syscall(libc::SYS_setresuid, STRANGER, STRANGER, STRANGER) };
            assert_eq!(rc, 0);
            work()
        });
        thread.join().unwrap()
    })
}

fn listen(kind: Type, name: &str) -> Socket {
    let socket = Socket::new(Domain::UNIX, kind.nonblocking(), None).unwrap();
    socket.bind(&SockAddr::unix(format!("\0{name}")).unwrap()).unwrap();
    if kind == Type::SEQPACKET {
        socket.listen(64).unwrap();
    }
    socket
}

/// Bytes that came over any connection to a listener.
fn heard(listener: &Socket) -> usize {
    let mut bytes = 0;
    while let Ok((socket, _)) = listener.accept() {
        socket.set_nonblocking(true).unwrap();
        let mut buffer = [std::mem::MaybeUninit::uninit(); 4096];
        while let Ok(n @ 1..) = socket.recv(&mut buffer) {
            bytes += n;
        }
    }
    bytes
}

fn open() -> UdpPort {
    let slot = Some(Arc::new(Slot::claim(NAME).unwrap()));
    UdpPort::open(PortOptions { slot, steer_offset: 5, ..PortOptions::new(4791) }).unwrap()
}

const DATAGRAM: Datagram<'_> = Datagram {
    source: std::net::SocketAddr::V4(std::net::SocketAddrV4::new(Ipv4Addr::LOCALHOST, 50_000)),
    destination: std::net::IpAddr::V4(Ipv4Addr::LOCALHOST),
    interface: 1,
    traffic_class: 0,
    hop_limit: 1,
    flow_label: 0,
    segment: 0,
    bytes: b"secret payload",
};

#[test]
fn payloads_are_not_handed_on_to_another_user() {
    if !netns::isolate_as_root() {
        return;
    }
    let port = open();
    let own = port.slot().unwrap().number();
    let free = if own == 200 { 201 } else { 200 };
    let names = [format!("{NAME}/{free}"), format!("{NAME}/0/slot/{free}")];
    let listeners = as_stranger(|| {
        [
            listen(Type::SEQPACKET, &names[0]),
            listen(Type::DGRAM, &names[0]),
            listen(Type::DGRAM, &names[1]),
        ]
    });
    assert_eq!(port.forward(free, &DATAGRAM), Forwarded::Dead);
    assert_eq!(port.forward_or_keep(free, &DATAGRAM), Forwarded::Dead);
    assert_eq!(heard(&listeners[0]), 0);
    drop(listeners);
    // A process that was handed something, and has ended.
    let registry = Registry::new(NAME).unwrap();
    let other = Slot::claim_number(&registry, free).unwrap();
    assert_eq!(port.forward(free, &DATAGRAM), Forwarded::Sent);
    drop(other);
    let listener = as_stranger(|| listen(Type::SEQPACKET, &names[0]));
    assert_eq!(port.forward(free, &DATAGRAM), Forwarded::Dead);
    assert_eq!(heard(&listener), 0);
    assert_eq!(port.forward_counters().dropped_dead, 3);
    // It is no process of the host, whatever name it holds.
    assert_eq!(port.slot().unwrap().store().live_slots(), [own]);
    let error = Slot::claim_number(&registry, free).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
}

#[test]
fn nobody_is_mistaken_for_the_holder_of_a_service() {
    if !netns::isolate_as_root() {
        return;
    }
    let slots = [(); 2].map(|()| Arc::new(Slot::claim(NAME).unwrap()));
    let [first, second] = slots.clone().map(Services::new);
    let at = Ipv4Addr::LOCALHOST.into();
    let number = slots[0].number();
    let _names = as_stranger(|| {
        let service = format!("{NAME}/0/s/7/any/1");
        let line = format!("x\n0: 0 0 0 0002 01 900092 @{NAME}/0/slot/{number}");
        [service, line, format!("{NAME}/0/port/4791/9")].map(|name| listen(Type::DGRAM, &name))
    });
    let before = first.store().incarnations();
    assert_eq!(first.holder(7, at), None);
    let _held = first.reserve(7, ServiceAddress::Any, false).unwrap();
    assert_eq!(second.holder(7, at), Some(number));
    assert_eq!((second.store().incarnations(), before.len()), (before, 2));
}

#[test]
fn a_user_that_took_the_links_name_is_named() {
    if !netns::isolate_as_root() {
        return;
    }
    let slot = Slot::claim(NAME).unwrap();
    let name = format!("{NAME}/shm/{}", slot.number());
    let _taken = as_stranger(|| listen(Type::SEQPACKET, &name));
    let error = Endpoint::new(&slot, Config::default()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    let who = format!("it belongs to user {STRANGER} (process {})", std::process::id());
    assert!(error.to_string().contains(&who), "{error}");
}

#[test]
fn a_user_that_took_all_names_is_named() {
    if !netns::isolate_as_root() {
        return;
    }
    let begin = Stopwatch::start();
    let names: Vec<_> = as_stranger(|| {
        let slots = (1..=255).map(|n| listen(Type::SEQPACKET, &format!("{NAME}/{n}")));
        slots.chain([listen(Type::SEQPACKET, &format!("{NAME}/start"))]).collect()
    });
    let error = Slot::claim(NAME).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::AddrInUse);
    let pid = std::process::id();
    let who = format!(
        "255 of them not by processes of this user: the name @{NAME}/1: it belongs to user {STRANGER} (process {pid})"
    );
    assert!(error.to_string().contains(&who), "{error}");
    // Names of its own do not make others wait, and nothing was said to any of them.
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    assert!(names.iter().all(|name| heard(name) == 0));
    drop(names);
    let start = as_stranger(|| listen(Type::SEQPACKET, &format!("{NAME}/start")));
    Slot::claim(NAME).unwrap();
    drop(start);
}

/// A process of another user number, in a user namespace of its own or not.
struct Member {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
    slot: u8,
}

impl Member {
    fn spawn(own_user_namespace: bool) -> Self {
        let mut command = Command::new("/proc/self/exe");
        command
            .args(["--ignored", "--exact", "member", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let become_it = move || {
            let done = |rc: libc::c_long| match rc {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            };
            // SAFETY: system calls with integers, in a child that has one thread.
            unsafe {
                done(libc::syscall(libc::SYS_setresgid, STRANGER, STRANGER, STRANGER))?;
                done(libc::syscall(libc::SYS_setresuid, STRANGER, STRANGER, STRANGER))?;
                // Its files in /proc are its own again.
                done(libc::prctl(libc::PR_SET_DUMPABLE, 1).into())?;
                if own_user_namespace {
                    done(libc::unshare(libc::CLONE_NEWUSER).into())?;
                    std::fs::write("/proc/self/uid_map", format!("0 {STRANGER} 1"))?;
                }
            }
            Ok(())
        };
        // SAFETY: see there; what it allocates no other thread of the parent can be at, since it calls malloc(3) after fork(2)
        // only in glibc, which allows that.
        unsafe { command.pre_exec(become_it) };
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut member = Self { child, lines, slot: 0 };
        member.slot = member.expect("slot ").parse().unwrap();
        member
    }

    fn expect(&mut self, prefix: &str) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.lines.read_line(&mut line).unwrap(), 0, "it has ended");
            if let Some((_, rest)) = line.split_once(prefix) {
                return rest.trim().to_owned();
            }
        }
    }

    fn ask(&mut self, word: &str) -> String {
        writeln!(self.child.stdin.as_ref().unwrap(), "{word}").unwrap();
        self.expect("answer ")
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_user_namespace_finds_the_plain_processes_of_its_user() {
    if !netns::isolate_as_root() {
        return;
    }
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    for first_is_within in [false, true] {
        let mut members = [first_is_within, !first_is_within, first_is_within].map(Member::spawn);
        let mut slots = members.each_ref().map(|member| member.slot);
        slots.sort_unstable();
        for member in &mut members {
            assert_eq!(member.ask("live"), format!("{slots:?}"));
        }
        for (from, to) in [(0, 1), (1, 0), (1, 2), (2, 1)] {
            let slot = members[to].slot;
            assert_eq!(members[from].ask(&format!("forward {slot}")), "Sent");
            assert_eq!(members[to].ask("received"), "1");
        }
        // A process with another user is none of them.
        assert_eq!(Store::join(&Registry::new(NAME).unwrap()).unwrap().live_slots(), [0u8; 0]);
    }
}

#[test]
#[ignore = "a child process of a_user_namespace_finds_the_plain_processes_of_its_user"]
fn member() {
    let port = Arc::new(open());
    println!("slot {}", port.slot().unwrap().number());
    let received = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let (reader, count) = (Arc::clone(&port), Arc::clone(&received));
    std::thread::spawn(move || {
        let mut buffer = ForwardBuffer::new();
        loop {
            if reader.receive_forwarded(&mut buffer).unwrap().is_some() {
                count.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let answer = match line.split_once(' ') {
            Some((_, slot)) => format!("{:?}", port.forward(slot.parse().unwrap(), &DATAGRAM)),
            None if line == "live" => format!("{:?}", port.slot().unwrap().store().live_slots()),
            None => {
                let end = Instant::now() + Duration::from_secs(10);
                while received.load(std::sync::atomic::Ordering::SeqCst) == 0 {
                    assert!(Instant::now() < end, "nothing comes");
                    std::thread::sleep(Duration::from_millis(1));
                }
                received.swap(0, std::sync::atomic::Ordering::SeqCst).to_string()
            }
        };
        println!("answer {answer}");
    }
}

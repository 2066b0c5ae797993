//! Two processes of one host. One of them, this test binary as the peer (`same_host::peer`), has no descriptor left, or little
//! memory, or may write no long files.

use anyverbs_testing::Stopwatch;
use std::time::{Duration, Instant};

use anyverbs::*;

use crate::endpoint::*;
use crate::same_host::{Peer, SIZE, turn};

/// Limits this process before it opens the device, as its role says: "scarce RESOURCE LEFT WHAT". What is returned is to be kept.
pub(crate) fn before_open(role: &str) -> Option<Context> {
    match Role::of(role)?.resource {
        "descriptors at all" => Some(open_with_few()),
        "files at all" => {
            set(libc::RLIMIT_FSIZE, Role::of(role)?.left);
            None
        }
        _ => None,
    }
}

/// Limits this process when it has the device open.
pub(crate) fn after_open(role: &str) {
    let Some(Role { resource, left, .. }) = Role::of(role) else { return };
    match resource {
        "descriptors" => set(libc::RLIMIT_NOFILE, descriptors() + left),
        "memory" => {
            wait_for_threads();
            set(libc::RLIMIT_AS, address_space() + left);
        }
        "files" => set(libc::RLIMIT_FSIZE, left),
        _ => {}
    }
}

/// Waits until the other threads sleep. A thread maps memory while it starts, and the standard library ends a process that
/// has none for that.
fn wait_for_threads() {
    // SAFETY: no preconditions.
    let own = unsafe { libc::gettid() }.to_string();
    let is_asleep = |stat: &str| stat.rsplit(')').next().is_some_and(|rest| rest.starts_with(" S"));
    let begin = Instant::now();
    loop {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap());
        let others = tasks.filter(|task| *task.file_name() != *own);
        let stats: Vec<_> = others
            .filter_map(|task| std::fs::read_to_string(task.path().join("stat")).ok())
            .collect();
        if stats.iter().all(|stat| is_asleep(stat)) {
            return;
        }
        assert!(begin.elapsed() < Duration::from_secs(60), "{stats:?}");
        std::thread::yield_now();
    }
}

struct Role<'a> {
    resource: &'a str,
    left: u64,
    does: &'a str,
}

impl<'a> Role<'a> {
    fn of(role: &'a str) -> Option<Self> {
        let mut parts = role.strip_prefix("rc scarce/")?.split('/');
        let (resource, left, does) = (parts.next()?, parts.next()?, parts.next()?);
        Some(Self { resource, left: left.parse().unwrap(), does })
    }
}

/// The context of a process that has as few descriptors as suffice to open the device and to make an [`Endpoint`].
fn open_with_few() -> Context {
    isolate();
    let mut most = descriptors();
    loop {
        set(libc::RLIMIT_NOFILE, most);
        let open = || {
            let contexts = [(); 2].map(|()| Context::open(&devices().ok()?[0].name).ok());
            let [Some(one), Some(other)] = contexts else { return None };
            other.create_comp_channel().ok().map(|_| one)
        };
        if let Some(context) = open() {
            return context;
        }
        most += 1;
    }
}

fn set(resource: libc::__rlimit_resource_t, most: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a live rlimit.
    unsafe {
        assert_eq!(libc::getrlimit(resource, &raw mut limit), 0);
        limit.rlim_cur = most;
        assert_eq!(libc::setrlimit(resource, &raw const limit), 0);
    }
}

/// Fills the holes in the table of descriptors; how many there are then.
fn descriptors() -> u64 {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let numbers = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let highest: i32 = numbers.map(|number| number.parse().unwrap()).max().unwrap();
    loop {
        // SAFETY: duplicates standard input.
        let fd = unsafe { libc::dup(0) };
        assert!(fd >= 0);
        if fd > highest {
            // SAFETY: nobody else knows the number.
            unsafe { libc::close(fd) };
            return fd as u64;
        }
    }
}

fn address_space() -> u64 {
    let sizes = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = sizes.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: an integer argument.
    pages * unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64
}

/// Plays the part of a connected peer whose descriptors or memory are scarce.
pub(crate) fn serve(role: &str, e: &Endpoint, buffer: &Buffer, remote: RemoteAddr) {
    for _ in 0..3 {
        e.recv(1, &[buffer.sge(SIZE, SIZE)]);
    }
    match Role::of(role).unwrap().does {
        "polls" => loop {
            e.cq.poll(&mut [Wc::default(); 16]).unwrap();
        },
        "wants more" => {
            // As a server does that is to accept connections: whatever becomes free is taken.
            let want = || {
                loop {
                    // SAFETY: duplicates standard input, and closes what nobody else knows.
                    unsafe {
                        let taken = libc::dup(0);
                        if taken >= 0 {
                            std::thread::sleep(Duration::from_micros(100));
                            libc::close(taken);
                        }
                    }
                }
            };
            (0..2).for_each(|_| drop(std::thread::spawn(want)));
        }
        "sends" => {
            exercise(e, [buffer.sge(0, SIZE), buffer.sge(SIZE, SIZE)], remote);
            println!("@ done after {} timeouts", timeouts(e));
        }
        _ => {}
    }
}

/// A WRITE, a READ and a SEND of several lengths.
fn exercise(e: &Endpoint, [src, dst]: [Sge; 2], remote: RemoteAddr) {
    for len in [1, 4096, SIZE as u32] {
        for op in [SendOp::Write(remote), SendOp::Read(remote), SendOp::Send] {
            let sge = if matches!(op, SendOp::Read(_)) { dst } else { src };
            e.send(1, op, &[Sge { len, ..sge }]);
            assert_eq!(e.poll(1)[0].status, WcStatus::Success, "{op:?} of {len} bytes");
        }
    }
}

/// How often this process has waited for an ACK in vain.
fn timeouts(e: &Endpoint) -> u64 {
    e.context.counters().unwrap().read(Counter::LocalAckTimeoutErr)
}

/// All kinds of messages, with a peer that has little left.
fn talk(resource: &str, left: u64) {
    for does in ["waits", "polls", "sends"] {
        talk_to(does, resource, left);
    }
}

fn talk_to(does: &str, resource: &str, left: u64) {
    let _turn = turn();
    {
        let mut peer = Peer::spawn(&format!("rc scarce/{resource}/{left}/{does}"), &[]);
        let e = Endpoint::new(QpType::Rc);
        let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
        let (_, remote) = peer.connect(&e, &dst);
        for _ in 0..3 {
            e.recv(1, &[dst.sge(0, SIZE)]);
        }
        let begin = Stopwatch::start();
        let waited = if does == "sends" {
            let heard = peer.hear();
            heard.split(' ').nth(3).unwrap().parse().unwrap()
        } else {
            src.write(0, &pattern(SIZE, 7));
            let before = timeouts(&e);
            exercise(&e, [src.sge(0, SIZE), dst.sge(0, SIZE)], remote);
            assert!(dst.read(0, SIZE) == pattern(SIZE, 7));
            timeouts(&e) - before
        };
        // All retries would take two seconds. On a busy machine a few pass while the peer waits for a processor.
        let took = begin.elapsed();
        let is_quick = took < Duration::from_secs(1) || waited <= 3;
        assert!(is_quick, "{does}, {left}: {took:?}, {waited} timeouts");
    }
}

#[test]
fn without_descriptors_everybody_talks_on() {
    for left in 0..16 {
        talk("descriptors", left);
    }
    talk("descriptors at all", 0);
}

/// The device's own threads are not the only ones that look for a free descriptor.
#[test]
fn a_thread_that_takes_all_descriptors_silences_nobody() {
    for _ in 0..60 {
        talk_to("wants more", "descriptors", 0);
    }
}

#[test]
fn with_little_memory_everybody_talks_on() {
    // With less, a thread of the device that is about to start finds no place for its signal stack.
    for left in [8, 16, 32] {
        talk("memory", left << 20);
    }
}

#[test]
fn without_long_files_everybody_talks_on() {
    for most in [0, 64 << 10, 1 << 20, 32 << 20] {
        talk("files", most);
        talk("files at all", most);
    }
}

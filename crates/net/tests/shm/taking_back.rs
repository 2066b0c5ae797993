//! A process takes its memory back while another is in the middle of a copy: it waits for those that can still write.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::shm::Event;

use super::{HUB, Party, Peer, TIME_LIMIT, name};

/// A process in the middle of a copy to 64 bytes of this one, and this one's settling meanwhile.
struct Settling {
    hub: Arc<Party>,
    peer: Peer,
    target: Box<[u8; 64]>,
    settled: std::sync::mpsc::Receiver<Vec<u8>>,
}

impl Settling {
    fn begin(test: &str) -> Self {
        Self::begin_after(test, || ())
    }

    /// `before`: what this process does before it knows the other one.
    fn begin_after(test: &str, before: impl FnOnce()) -> Self {
        let name = name(test);
        let mut hub = Party::new(&name, HUB);
        let mut peer = Peer::spawn("copier", &name, 2);
        before();
        hub.until(|hub| hub.events.iter().any(|e| matches!(e, Event::Established(_))));
        peer.expect("ready");
        let target = Box::new([0u8; 64]);
        let address = target.as_ptr() as usize;
        peer.say(&address.to_string());
        peer.expect("marked");
        let hub = Arc::new(hub);
        let (sender, settled) = std::sync::mpsc::channel();
        let other = Arc::clone(&hub);
        std::thread::spawn(move || {
            other.endpoint.settle();
            // SAFETY: the test keeps the array for as long as it waits for this.
            let bytes = unsafe { std::ptr::read_volatile(address as *const [u8; 64]) };
            let _ = sender.send(bytes.to_vec());
        });
        Self { hub, peer, target, settled }
    }

    fn is_waiting(&self, time: Duration) -> bool {
        self.settled.recv_timeout(time).is_err()
    }

    /// The bytes in the memory when it had been taken back.
    fn end(&self) -> Vec<u8> {
        self.settled.recv_timeout(TIME_LIMIT).unwrap()
    }
}

#[test]
fn taking_back_waits_for_a_stopped_copier() {
    let mut settling = Settling::begin("stopped copy");
    settling.peer.stop();
    assert!(settling.is_waiting(Duration::from_millis(2500)), "it can still write");
    settling.peer.signal(libc::SIGCONT);
    assert!(settling.is_waiting(Duration::from_millis(50)), "it can still write");
    settling.peer.say("copy");
    assert_eq!(settling.end(), [0xaa; 64], "the copy was before the end");
    settling.peer.expect("copied");
    // The process is not given up: the next copy is waited for as well.
    assert!(settling.hub.endpoint.published().copied(5).writes == 1);
    assert_eq!(settling.target[..], [0xaa; 64]);
}

#[test]
fn taking_back_waits_for_a_copier_in_a_cgroup_freezer() {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let found: Vec<_> = FREEZERS.iter().filter(|freezer| freezer.is_mounted()).collect();
    if found.is_empty() {
        anyverbs_testing::skip("no hierarchy of control groups that can freeze is mounted");
    }
    for (round, kind) in found.into_iter().enumerate() {
        // The thread that has settled may still hold the slot of the round before.
        let mut settling = Settling::begin(&format!("frozen {round}"));
        let freezer = Freezer::new(kind, settling.peer.child.id());
        freezer.freeze(true);
        assert!(settling.is_waiting(Duration::from_millis(1500)), "it can still write");
        freezer.freeze(false);
        settling.peer.say("copy");
        assert_eq!(settling.end(), [0xaa; 64]);
        settling.peer.kill();
    }
}

#[test]
fn taking_back_does_not_wait_for_an_ended_copier() {
    for stopped in [false, true] {
        let mut settling = Settling::begin(&format!("killed copy {stopped}"));
        if stopped {
            settling.peer.stop();
        }
        assert!(settling.is_waiting(Duration::from_millis(100)));
        settling.peer.kill();
        assert_eq!(settling.end(), [0; 64]);
    }
}

#[test]
fn taking_back_does_not_wait_for_a_copier_after_exec() {
    let mut settling = Settling::begin("exec copy");
    assert!(settling.is_waiting(Duration::from_millis(100)));
    settling.peer.say("exec");
    assert_eq!(settling.end(), [0; 64]);
}

/// The kernel gives this thread no descriptors of processes, and shows it no memory of others.
fn see_no_processes() {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter};
    const NUMBER: u32 = 0;
    const THIRD_ARGUMENT: u32 = 16 + 2 * 8;
    const SO_PEERPIDFD: u32 = 77;
    let load = |k| sock_filter { code: (BPF_LD | BPF_W | BPF_ABS) as u16, jt: 0, jf: 0, k };
    let unless = |k, jf| sock_filter { code: (BPF_JMP | BPF_JEQ | BPF_K) as u16, jt: 0, jf, k };
    let end = |k| sock_filter { code: (BPF_RET | BPF_K) as u16, jt: 0, jf: 0, k };
    let fail = |errno: i32| end(libc::SECCOMP_RET_ERRNO | errno as u32);
    let program = [
        load(NUMBER),
        unless(libc::SYS_pidfd_open as u32, 1),
        fail(libc::ENOSYS),
        unless(libc::SYS_process_vm_readv as u32, 1),
        fail(libc::EPERM),
        unless(libc::SYS_getsockopt as u32, 3),
        load(THIRD_ARGUMENT),
        unless(SO_PEERPIDFD, 1),
        fail(libc::ENOPROTOOPT),
        end(libc::SECCOMP_RET_ALLOW),
    ];
    let filter =
        libc::sock_fprog { len: program.len() as u16, filter: program.as_ptr().cast_mut() };
    // SAFETY: a live filter, of the given length. It concerns this thread, and those that it starts.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(
            libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter),
            0
        );
    }
}

#[test]
fn taking_back_does_not_wait_for_a_copier_that_ended_unseen() {
    let test = "taking_back::taking_back_does_not_wait_for_a_copier_that_ended_unseen";
    anyverbs_testing::in_own_process(test, || {
        for execs in [false, true] {
            let begin = || Settling::begin_after(&format!("unseen {execs}"), see_no_processes);
            // The filter is that of a thread.
            let mut settling = std::thread::scope(|scope| scope.spawn(begin).join().unwrap());
            assert!(settling.is_waiting(Duration::from_millis(100)), "it can still write");
            if execs {
                settling.peer.say("exec");
            } else {
                settling.peer.kill();
            }
            // The worker's part.
            let end = Instant::now() + TIME_LIMIT;
            while settling.is_waiting(Duration::from_millis(10)) {
                assert!(Instant::now() < end, "it waits for ever");
                settling.hub.endpoint.control().unwrap();
            }
        }
    });
}

/// A hierarchy of control groups: where it is mounted, its mark, and the file that freezes a group of it.
struct FreezerKind {
    root: &'static str,
    mark: &'static str,
    switch: (&'static str, [&'static str; 2]),
}

const FREEZERS: [FreezerKind; 3] = [
    FreezerKind {
        root: "/sys/fs/cgroup/freezer",
        mark: "tasks",
        switch: ("freezer.state", ["THAWED", "FROZEN"]),
    },
    FreezerKind {
        root: "/sys/fs/cgroup/unified",
        mark: "cgroup.controllers",
        switch: ("cgroup.freeze", ["0", "1"]),
    },
    FreezerKind {
        root: "/sys/fs/cgroup",
        mark: "cgroup.controllers",
        switch: ("cgroup.freeze", ["0", "1"]),
    },
];

impl FreezerKind {
    fn is_mounted(&self) -> bool {
        let root = std::path::Path::new(self.root);
        // A container may see a hierarchy that it cannot change.
        let probe = root.join(format!("anyverbs-probe-{}", std::process::id()));
        root.join(self.mark).exists()
            && std::fs::create_dir(&probe).is_ok()
            && std::fs::remove_dir(&probe).is_ok()
    }
}

/// A control group with one process in it.
struct Freezer {
    directory: std::path::PathBuf,
    switch: (&'static str, [&'static str; 2]),
    pid: u32,
}

impl Freezer {
    fn new(kind: &FreezerKind, pid: u32) -> Self {
        let directory = std::path::Path::new(kind.root).join(format!("anyverbs-test-{pid}"));
        std::fs::create_dir(&directory).unwrap();
        let freezer = Self { directory, switch: kind.switch, pid };
        std::fs::write(freezer.directory.join("cgroup.procs"), pid.to_string()).unwrap();
        freezer
    }

    fn freeze(&self, on: bool) {
        let (file, values) = self.switch;
        std::fs::write(self.directory.join(file), values[usize::from(on)]).unwrap();
        let is_done = || {
            let state = std::fs::read_to_string(self.directory.join(file)).unwrap();
            // The first version says `FREEZING` until all of them stand.
            state.trim() == values[usize::from(on)]
        };
        let begin = Instant::now();
        while !is_done() {
            assert!(begin.elapsed() < TIME_LIMIT, "it does not freeze");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Freezer {
    fn drop(&mut self) {
        let (file, values) = self.switch;
        let _ = std::fs::write(self.directory.join(file), values[0]);
        let root = self.directory.parent().unwrap();
        let _ = std::fs::write(root.join("cgroup.procs"), self.pid.to_string());
        let _ = std::fs::remove_dir(&self.directory);
    }
}

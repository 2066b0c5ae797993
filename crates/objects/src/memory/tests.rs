use super::guard::{PREVIOUS_SEGV, install};
use super::*;
use anyverbs_testing::in_own_process;
use std::fs::File;
use std::io::Write as _;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize};

const PAGE: usize = 4096;

struct Mapping(*mut u8, usize);

impl Mapping {
    fn new(pages: usize) -> Self {
        Self::of(pages, -1, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS)
    }

    fn of(pages: usize, fd: i32, flags: i32) -> Self {
        // SAFETY: a new mapping at a place of the kernel's choice.
        let p = unsafe {
            libc::mmap(
                ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                flags,
                fd,
                0,
            )
        };
        assert_ne!(p, libc::MAP_FAILED);
        Self(p.cast(), pages * PAGE)
    }

    fn addr(&self) -> u64 {
        self.0 as u64
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: our mapping, or a hole in its place.
        unsafe { libc::munmap(self.0.cast(), self.1) };
    }
}

#[test]
fn copies_every_length_and_alignment() {
    let memory = ProcessMemory::default();
    let source: Vec<u8> = (0..5000u32).map(|i| (i * 7 + i / 256) as u8).collect();
    for len in (0..300).chain([511, 512, 513, 1000, 1023, 1024, 1025, 2047, 2048, 4096, 4500]) {
        for skew in [0, 1, 7, 13] {
            let from = &source[skew..skew + len];
            let mut to = vec![0xaa; len + 2];
            memory.read(from.as_ptr() as u64, &mut to[1..=len]).unwrap();
            assert_eq!(&to[1..=len], from, "len {len} skew {skew}");
            assert_eq!((to[0], to[len + 1]), (0xaa, 0xaa), "len {len}");
            let mut back = vec![0xbb; len + 2];
            memory.write(back[1..].as_mut_ptr() as u64, from).unwrap();
            assert_eq!(&back[1..=len], from);
            assert_eq!((back[0], back[len + 1]), (0xbb, 0xbb));
        }
    }
}

#[test]
fn atomics_return_the_old_value() {
    let memory = ProcessMemory::default();
    let mut word = 5u64;
    let addr = &raw mut word as u64;
    assert_eq!(memory.fetch_add(addr, u64::MAX), Ok(5));
    assert_eq!(memory.compare_swap(addr, 5, 9), Ok(4));
    assert_eq!(memory.compare_swap(addr, 4, 9), Ok(4));
    // SAFETY: our own variable.
    assert_eq!(unsafe { ptr::read_volatile(&raw const word) }, 9);
}

#[test]
fn unmapped_and_protected_pages_are_faults() {
    in_own_process("memory::tests::unmapped_and_protected_pages_are_faults", || {
        let memory = ProcessMemory::default();
        let m = Mapping::new(3);
        // SAFETY: the middle page of our mapping.
        unsafe { libc::munmap(m.0.add(PAGE).cast(), PAGE) };
        let mut buf = vec![0u8; 3 * PAGE];
        for len in [1usize, 3, 4, 8, 15, 16, 31, 33, 64, 65, 200, 1023, 1024, 4096] {
            assert_eq!(memory.read(m.addr(), &mut buf[..len]), Ok(()));
            // Across the hole's beginning, and from inside it.
            assert_eq!(
                memory.read(m.addr() + PAGE as u64 - 1, &mut buf[..len + 1]),
                Err(Fault),
                "{len}"
            );
            assert_eq!(memory.write(m.addr() + PAGE as u64, &buf[..len]), Err(Fault), "{len}");
        }
        for bad in [0u64, 8, 1 << 62, u64::MAX - 7] {
            assert_eq!(memory.read(bad, &mut buf[..8]), Err(Fault), "{bad:#x}");
            assert_eq!(memory.fetch_add(bad & !7, 1), Err(Fault));
            assert_eq!(memory.compare_swap(bad & !7, 1, 1), Err(Fault));
        }
        // SAFETY: the first page of our mapping.
        unsafe { libc::mprotect(m.0.cast(), PAGE, libc::PROT_NONE) };
        assert_eq!(memory.read(m.addr(), &mut buf[..8]), Err(Fault));
        // SAFETY: as above.
        unsafe { libc::mprotect(m.0.cast(), PAGE, libc::PROT_READ) };
        assert_eq!(memory.read(m.addr(), &mut buf[..8]), Ok(()));
        assert_eq!(memory.write(m.addr(), &buf[..8]), Err(Fault));
    });
}

#[test]
fn a_file_that_shrank_is_a_fault() {
    let memory = ProcessMemory::default();
    let path = std::env::temp_dir().join(format!("anyverbs-truncated-{}", std::process::id()));
    let mut file =
        File::options().read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    file.write_all(&[1; 2 * PAGE]).unwrap();
    let m = Mapping::of(2, file.as_raw_fd(), libc::MAP_SHARED);
    let mut buf = vec![0; 2 * PAGE];
    assert_eq!(memory.read(m.addr(), &mut buf), Ok(()));
    file.set_len(PAGE as u64).unwrap();
    assert_eq!(memory.read(m.addr(), &mut buf), Err(Fault)); // SIGBUS
    assert_eq!(memory.write(m.addr() + PAGE as u64, &buf[..8]), Err(Fault));
    assert_eq!(memory.read(m.addr(), &mut buf[..PAGE]), Ok(()));
}

/// Copies, while a reader waits for the last byte of each and then looks at an earlier one. Returns how often that was old.
fn looks_behind_copies(len: usize, skew: usize, rounds: usize) -> usize {
    let memory = ProcessMemory::default();
    let place = Mapping::new(len.div_ceil(PAGE) + 1);
    let sources: Vec<Vec<u8>> = (0..=u8::MAX).map(|n| vec![n; len]).collect();
    let (to, done) = (place.addr() + skew as u64, AtomicUsize::new(0));
    // SAFETY: within the mapping, which outlives the threads.
    let at = |n: usize| unsafe { (to as *const u8).add(n).read_volatile() };
    std::thread::scope(|s| {
        let reader = s.spawn(|| {
            let mut old = 0;
            for round in 1..=rounds {
                let (expected, place) = (round as u8, round * 977 % (len - 1));
                let mut spins = 0u32;
                while at(len - 1) != expected {
                    spins += 1;
                    if spins.is_multiple_of(256) {
                        std::thread::yield_now();
                    }
                }
                old += usize::from(at(place) != expected);
                done.store(round, Ordering::Release);
            }
            old
        });
        for round in 1..=rounds {
            memory.write(to, &sources[round % 256]).unwrap();
            while done.load(Ordering::Acquire) < round {
                std::thread::yield_now();
            }
        }
        reader.join().unwrap()
    })
}

#[test]
fn who_sees_the_last_byte_of_a_copy_sees_the_others() {
    for (len, skew) in [(64, 0), (4095, 1), (4096, 0), (4097, 40), (32 << 10, 1)] {
        assert_eq!(looks_behind_copies(len, skew, 200), 0, "len {len} skew {skew}");
    }
}

/// Few processors show the end of a string instruction before its beginning. So this looks at something that all show: what is
/// stored last has to be loaded first.
#[test]
fn a_copy_keeps_its_last_bytes_until_the_end() {
    let memory = ProcessMemory::default();
    let from = Mapping::new(9);
    // SAFETY: the last page of our mapping.
    unsafe { libc::munmap(from.0.add(8 * PAGE).cast(), PAGE) };
    let end = from.addr() + 8 * PAGE as u64;
    // SAFETY: our mapping, but for the page that has gone.
    unsafe { from.0.write_bytes(1, 8 * PAGE) };
    for len in [4usize, 9, 24, 64, 100, 4095, 4096, 4097, 8192, 32 << 10] {
        let mut to = vec![0u8; len];
        let copied = memory.read(end - (len - 1) as u64, &mut to);
        assert_eq!(copied, Err(Fault), "{len}");
        assert_eq!(to.iter().position(|byte| *byte != 0), None, "{len}");
    }
}

#[test]
fn pages_that_vanish_during_copies() {
    let memory = ProcessMemory::default();
    let m = Mapping::new(64);
    let addr = m.addr();
    let stop = AtomicBool::new(false);
    let faults = AtomicUsize::new(0);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let mut buf = vec![0u8; 64 * PAGE];
                while !stop.load(Ordering::Relaxed) {
                    if memory.read(addr, &mut buf).is_err() {
                        faults.fetch_add(1, Ordering::Relaxed);
                    }
                    let _ = memory.write(addr, &buf[..2000]);
                }
            });
        }
        let begin = std::time::Instant::now();
        while faults.load(Ordering::Relaxed) < 100 && begin.elapsed().as_secs() < 20 {
            // The place stays reserved, so that no other mapping gets there: pages lose their rights instead.
            // SAFETY: our mapping.
            unsafe {
                libc::mprotect(m.0.cast(), 64 * PAGE, libc::PROT_NONE);
                libc::mprotect(m.0.cast(), 64 * PAGE, libc::PROT_READ | libc::PROT_WRITE);
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert!(faults.load(Ordering::Relaxed) >= 100);
}

/// Runs `body` in a forked child; its wait status.
fn in_child(body: impl FnOnce()) -> c_int {
    // SAFETY: the child only runs `body`, which allocates nothing that another thread might hold a lock for, and exits.
    unsafe {
        let pid = libc::fork();
        if pid == 0 {
            body();
            libc::_exit(0);
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(pid, &raw mut status, 0), pid);
        status
    }
}

#[test]
fn the_programs_own_fault_reaches_its_own_handler() {
    extern "C" fn own(_: c_int) {
        // SAFETY: _exit may be called from a signal handler.
        unsafe { libc::_exit(42) };
    }
    let status = in_child(|| {
        // SAFETY: installs a handler, then ours in front of it, then faults on purpose.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = own as *const () as usize;
            libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
            install(libc::SIGSEGV, &PREVIOUS_SEGV);
            let memory = ProcessMemory { maps: Maps::open() };
            if memory.read(8, &mut [0; 8]) != Err(Fault) {
                libc::_exit(1);
            }
            ptr::read_volatile(std::hint::black_box(8 as *const u8));
        }
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42, "{status:#x}");
}

#[test]
fn without_a_handler_a_fault_kills_as_ever() {
    let status = in_child(|| {
        // SAFETY: the default action, ours in front of it, then a fault on purpose.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = libc::SIG_DFL;
            libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
            install(libc::SIGSEGV, &PREVIOUS_SEGV);
            ptr::read_volatile(std::hint::black_box(8 as *const u8));
        }
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
}

/// `cargo test --release -p anyverbs -- --ignored --nocapture copy_speed`
#[test]
#[ignore = "a measurement"]
fn copy_speed_beside_memcpy() {
    let memory = ProcessMemory::default();
    let (from, mut to) = (vec![1u8; 1 << 16], vec![0u8; 1 << 16]);
    for len in [8usize, 16, 64, 128, 256, 512, 1023, 1024, 2048, 4095, 4096, 16_384, 65_536] {
        let rounds = (1 << 26) / len.max(64);
        let mut best = [f64::MAX; 2];
        for _ in 0..7 {
            for (which, best) in best.iter_mut().enumerate() {
                let begin = std::time::Instant::now();
                for _ in 0..rounds {
                    let (from, to) =
                        (std::hint::black_box(&from[..len]), std::hint::black_box(&mut to[..len]));
                    if which == 0 {
                        memory.read(from.as_ptr() as u64, to).unwrap();
                    } else {
                        to.copy_from_slice(from);
                    }
                }
                *best = best.min(begin.elapsed().as_nanos() as f64 / rounds as f64);
            }
        }
        println!("{len:6} B: guarded {:8.1} ns, memcpy {:8.1} ns", best[0], best[1]);
    }
}

#[test]
fn a_peers_memory_is_not_mapped_in_a_forked_child() {
    let memory = ProcessMemory::default();
    let mapping = mapping::Mapping::shared(PAGE).unwrap().keep_from_children().unwrap();
    let addr = mapping.addr();
    let mut mapping = Some(mapping);
    let status = in_child(|| {
        let gone = memory.read(addr, &mut [0; 8]) == Err(Fault);
        // SAFETY: nothing lies there. A new mapping in its place is not this object's to give up.
        let own = unsafe {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED_NOREPLACE;
            libc::mmap(addr as *mut _, PAGE, prot, flags, -1, 0)
        };
        drop(mapping.take());
        let stays = memory.read(addr, &mut [0; 8]).is_ok();
        if !gone || own == libc::MAP_FAILED || !stays {
            // SAFETY: ends the child.
            unsafe { libc::_exit(1) };
        }
    });
    assert_eq!(status, 0);
    assert_eq!(memory.read(addr, &mut [0; 8]), Ok(()));
}

/// A device's memory in a child, whose middle page of three is gone. Tells whether accesses there are faults, and
/// others not.
fn survives_a_hole(memory: &ProcessMemory, m: &Mapping) -> bool {
    let mut buf = [0u8; 100];
    let hole = m.addr() + PAGE as u64;
    memory.read(hole, &mut buf) == Err(Fault)
        && memory.read(hole - 50, &mut buf) == Err(Fault)
        && memory.write(hole, &buf[..1]) == Err(Fault)
        && memory.read_and_feed(hole - 600, &mut [0; 1024], 5) == Err(Fault)
        && memory.read_and_feed(hole - 1024, &mut [0; 1024], 5).is_ok()
        && memory.fetch_add(hole, 1) == Err(Fault)
        && memory.compare_swap(hole, 0, 1) == Err(Fault)
        && memory.store(hole, 1) == Err(Fault)
        && memory.write(m.addr(), &[7; 5000][..PAGE]) == Ok(())
        && memory.read(m.addr() + 8, &mut buf) == Ok(())
        && buf == [7; 100]
        && memory.fetch_add(m.addr(), 1) == Ok(0x0707_0707_0707_0707)
        && [libc::PROT_NONE, libc::PROT_READ]
            .into_iter()
            .all(|right| refuses_changes(memory, m, right))
}

/// Whether changes of the last page are faults, if the program has only this right to it.
fn refuses_changes(memory: &ProcessMemory, m: &Mapping, right: c_int) -> bool {
    let page = m.addr() + 2 * PAGE as u64;
    // SAFETY: the last page of our mapping, which nobody uses meanwhile.
    let protect = |right| unsafe { libc::mprotect(page as *mut _, PAGE, right) } == 0;
    protect(right)
        && memory.write(page, &[1]) == Err(Fault)
        && memory.fetch_add(page, 1) == Err(Fault)
        && memory.compare_swap(page, 0, 1) == Err(Fault)
        && memory.store(page, 1) == Err(Fault)
        && protect(libc::PROT_READ | libc::PROT_WRITE)
        && memory.fetch_add(page, 0) == Ok(0)
}

fn child_with_a_hole(body: impl FnOnce(&ProcessMemory, &Mapping) -> bool) {
    let memory = ProcessMemory::default();
    let m = Mapping::new(3);
    let status = in_child(|| {
        // SAFETY: the middle page of our mapping.
        unsafe { libc::munmap(m.0.add(PAGE).cast(), PAGE) };
        if !body(&memory, &m) {
            // SAFETY: ends the child.
            unsafe { libc::_exit(1) };
        }
    });
    assert_eq!(status, 0, "{status:#x}");
}

/// The tick in which the handlers were looked at passes.
fn pass_a_tick() {
    std::thread::sleep(std::time::Duration::from_millis(30));
}

#[test]
fn a_thread_that_blocks_the_signals_survives_a_vanished_page() {
    child_with_a_hole(|memory, m| {
        let before = survives_a_hole(memory, m);
        // SAFETY: a live set; the mask of this thread.
        unsafe {
            let mut all: libc::sigset_t = MaybeUninit::zeroed().assume_init();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, ptr::null_mut());
        }
        pass_a_tick();
        before && survives_a_hole(memory, m)
    });
}

#[test]
fn a_later_handler_does_not_run_for_a_vanished_page() {
    extern "C" fn own(_: c_int) {
        // SAFETY: _exit may be called from a signal handler.
        unsafe { libc::_exit(42) };
    }
    child_with_a_hole(|memory, m| {
        let before = survives_a_hole(memory, m);
        for signal in [libc::SIGSEGV, libc::SIGBUS] {
            // SAFETY: a handler that only ends the process.
            unsafe { libc::signal(signal, own as *const () as usize) };
        }
        pass_a_tick();
        before && survives_a_hole(memory, m)
    });
}

#[test]
fn a_handler_that_is_to_run_once_runs_once() {
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    extern "C" fn own(_: c_int) {
        if RUNS.fetch_add(1, Ordering::Relaxed) > 0 {
            // SAFETY: as above.
            unsafe { libc::_exit(42) };
        }
    }
    let status = in_child(|| {
        // SAFETY: installs a handler, then ours in front of it, then faults on purpose.
        unsafe {
            libc::alarm(20);
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = own as *const () as usize;
            action.sa_flags = libc::SA_RESETHAND;
            libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
            install(libc::SIGSEGV, &PREVIOUS_SEGV);
            ptr::read_volatile(std::hint::black_box(8 as *const u8));
        }
    });
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "{status:#x}");
}

#[test]
fn a_signal_sent_during_a_copy_reaches_the_program() {
    extern "C" fn own(_: c_int) {
        // SAFETY: as above.
        unsafe { libc::_exit(42) };
    }
    let (from, mut to) = (vec![1u8; 64 << 20], vec![0u8; 64 << 20]);
    let status = in_child(|| {
        // SAFETY: installs a handler, then ours in front of it; a timer sends this process the signal.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = own as *const () as usize;
            libc::sigaction(libc::SIGSEGV, &raw const action, ptr::null_mut());
            install(libc::SIGSEGV, &PREVIOUS_SEGV);
            let mut event: libc::sigevent = MaybeUninit::zeroed().assume_init();
            event.sigev_notify = libc::SIGEV_SIGNAL;
            event.sigev_signo = libc::SIGSEGV;
            let mut timer: libc::timer_t = ptr::null_mut();
            libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer);
            let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
            let soon = libc::timespec { tv_sec: 0, tv_nsec: 20_000_000 };
            let once = libc::itimerspec { it_interval: zero, it_value: soon };
            libc::timer_settime(timer, 0, &raw const once, ptr::null_mut());
        }
        // Nearly all of the time passes in copies.
        let begin = std::time::Instant::now();
        while begin.elapsed().as_secs() < 10 {
            // SAFETY: both are buffers of this test.
            if unsafe { copy_guarded(to.as_mut_ptr(), from.as_ptr(), from.len()) }.is_err() {
                // SAFETY: ends the child.
                unsafe { libc::_exit(1) };
            }
        }
    });
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 42, "{status:#x}");
}

//! Copies to and from another process's memory without its help: process_vm_readv(2) and process_vm_writev(2), and to read a
//! little the file of that memory (proc_pid_mem(5)), which takes a fifth less time.
//!
//! Those calls take a process number and no descriptor, so the number must still be the peer's. Numbers are handed out
//! in a cycle: one comes back only after all others were used, which takes far longer than the tick of the coarse clock.
//! Hence it is enough to look once a tick whether the process and its socket (which `execve` closes) are still there.
//!
//! The file is bound to the memory: it is at its end when the process has ended or executed another program. It asks for the
//! right to trace the process once, when it is opened. It heeds what is mapped, but not how: what the process has made
//! inaccessible is read all the same. A program may close its descriptor, and open another file by the same number: hence it
//! has a high one, and is looked at once a tick. Nothing is written by it: it would not heed write protection, and may
//! show the end of a word of 2 bytes, or of a line, before its beginning.

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

use super::handshake::Probe;
use super::process::PeerProcess;
use crate::Uncancelled;

/// Most pieces of one system call, the kernel's limit.
const MAX_PIECES: usize = 1024;

/// Most that is read by the file: from here on the kernel's page between the two sides costs more than it saves.
const SHORT: usize = 1024;
/// Least number of a file that reads memory.
const HIGH: libc::c_int = 48;

/// Why a copy did not happen, or not all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The process has ended or given up its channel. (`ESRCH`)
    #[error("the process is gone")]
    Gone,
    /// The kernel does not permit it: another user or namespace, ptrace restrictions, seccomp. (`EPERM`, `ENOSYS`)
    #[error("the kernel does not permit cross-process copy")]
    Denied,
    /// Memory on either side is not mapped, or not so that it may be copied, after so many bytes. (`EFAULT`)
    #[error("not mapped, after {done} bytes")]
    Fault {
        /// Bytes that were copied before.
        done: usize,
    },
    /// Any other `errno`.
    #[error("cross-process copy failed: errno {0}")]
    Failed(i32),
}

/// A piece of this process's memory: `iov_base` and `iov_len`.
pub type Local = libc::iovec;

/// A piece of the other process's memory.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Remote(libc::iovec);

impl Remote {
    /// `len` bytes at `address`.
    #[must_use]
    pub fn new(address: u64, len: usize) -> Self {
        Self(libc::iovec { iov_base: address as usize as *mut libc::c_void, iov_len: len })
    }

    /// As the system call takes them.
    fn iovecs(pieces: &[Self]) -> &[libc::iovec] {
        // SAFETY: the type is transparent.
        unsafe { std::slice::from_raw_parts(pieces.as_ptr().cast(), pieces.len()) }
    }
}

// SAFETY: an address of another process, which means nothing in this one, and a length.
unsafe impl Send for Remote {}
// SAFETY: as above.
unsafe impl Sync for Remote {}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}+{:#x}", self.0.iov_base as usize, self.0.iov_len)
    }
}

#[derive(Clone, Copy)]
enum Direction {
    Read,
    Write,
}

/// The memory of a process that the kernel lets us copy from and to.
#[derive(Debug)]
pub(crate) struct RemoteMemory {
    pid: i32,
    /// The tick in which the process was last seen alive.
    seen: AtomicU64,
    /// Its memory as a file, if there is `/proc` and it is that of our PID namespace.
    file: Option<File>,
    /// A word there, and the tick in which it was last found by the file.
    probe: Probe,
    found: AtomicU64,
}

impl RemoteMemory {
    /// Tries whether the kernel permits copying and `process` is the one that sent `probe`.
    pub(crate) fn open(process: &PeerProcess, probe: Probe) -> Result<Self, RemoteError> {
        if process.pid <= 0 {
            return Err(RemoteError::Denied);
        }
        let (seen, found) = (AtomicU64::new(0), AtomicU64::new(0));
        let mut this = Self { pid: process.pid, seen, file: None, probe, found };
        let mut value = 0u64;
        let local = Local { iov_base: (&raw mut value).cast(), iov_len: 8 };
        let remote = Remote::new(probe.address, 8);
        // SAFETY: the local piece is a live word.
        match unsafe { this.copy(Direction::Read, &[local], &[remote]) } {
            Ok(()) if value == probe.value => {
                this.file = memory_file(process.pid, probe);
                Ok(this)
            }
            // Some process is there, but not this one: a number of another PID namespace.
            Ok(()) | Err(RemoteError::Fault { .. }) => Err(RemoteError::Denied),
            Err(error) => Err(error),
        }
    }

    /// Copies from the process. `is_alive` is asked once a tick.
    ///
    /// # Safety
    /// The local pieces may be written, as far as they are mapped.
    pub(crate) unsafe fn read(
        &self,
        local: &[Local],
        remote: &[Remote],
        is_alive: impl FnOnce() -> bool,
    ) -> Result<(), RemoteError> {
        let now = self.check(is_alive)?;
        // SAFETY: the caller's promise.
        if unsafe { self.read_short(now, local, remote) }? {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { self.copy(Direction::Read, local, remote) }
    }

    /// Copies to the process. `is_alive` is asked once a tick.
    ///
    /// # Safety
    /// The local pieces may be read, as far as they are mapped.
    pub(crate) unsafe fn write(
        &self,
        local: &[Local],
        remote: &[Remote],
        is_alive: impl FnOnce() -> bool,
    ) -> Result<(), RemoteError> {
        self.check(is_alive)?;
        // SAFETY: the caller's promise.
        unsafe { self.copy(Direction::Write, local, remote) }
    }

    /// Whether the process is still there; asks once a tick. Returns the tick.
    #[inline]
    pub(crate) fn check(&self, is_alive: impl FnOnce() -> bool) -> Result<u64, RemoteError> {
        let now = tick();
        if self.seen.load(Ordering::Relaxed) != now {
            if !is_alive() {
                return Err(RemoteError::Gone);
            }
            self.seen.store(now, Ordering::Relaxed);
        }
        Ok(now)
    }

    /// Reads by the file, if that is faster. False if it is not, or went wrong: the long way finds out how.
    ///
    /// # Safety
    /// As for [`read`](Self::read).
    #[inline]
    unsafe fn read_short(
        &self,
        now: u64,
        local: &[Local],
        remote: &[Remote],
    ) -> Result<bool, RemoteError> {
        let (Some(file), [near], [Remote(far)]) = (&self.file, local, remote) else {
            return Ok(false);
        };
        let len = near.iov_len;
        if len != far.iov_len || !(1..=SHORT).contains(&len) {
            return Ok(false);
        }
        if self.found.load(Ordering::Relaxed) != now {
            if !finds(file, self.probe) {
                return Ok(false);
            }
            self.found.store(now, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        match unsafe { pread(file, near, far.iov_base as u64) } {
            0 => Err(RemoteError::Gone),
            done => Ok(usize::try_from(done) == Ok(len)),
        }
    }

    /// # Safety
    /// The local pieces may be read or written, as `direction` says, as far as they are mapped.
    unsafe fn copy(
        &self,
        direction: Direction,
        local: &[Local],
        remote: &[Remote],
    ) -> Result<(), RemoteError> {
        let remote = Remote::iovecs(remote);
        let total = |pieces: &[libc::iovec]| {
            pieces.iter().try_fold(0usize, |sum, piece| sum.checked_add(piece.iov_len))
        };
        let wanted = total(remote);
        let Some(wanted) = wanted.filter(|_| wanted == total(local)) else {
            return Err(RemoteError::Failed(libc::EINVAL));
        };
        if wanted == 0 {
            return Ok(());
        }
        let few = |pieces| <[libc::iovec]>::get(pieces, ..MAX_PIECES).unwrap_or(pieces);
        // SAFETY: the caller's promise.
        let done = unsafe { self.call(direction, few(local), few(remote)) };
        match done.map_err(|errno| error_of(errno, 0))? {
            done if done == wanted => Ok(()),
            // SAFETY: the caller's promise.
            done => unsafe { self.copy_rest(direction, local, remote, done, wanted) },
        }
    }

    /// What one call left, because there were too many pieces or bytes for it, or because the rest is not mapped.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    #[cold]
    unsafe fn copy_rest(
        &self,
        direction: Direction,
        local: &[libc::iovec],
        remote: &[libc::iovec],
        mut done: usize,
        wanted: usize,
    ) -> Result<(), RemoteError> {
        let (mut near, mut far) = (Cursor::default(), Cursor::default());
        let (mut near_pieces, mut far_pieces) = (Vec::new(), Vec::new());
        let mut step = done;
        while done < wanted {
            if step == 0 {
                return Err(RemoteError::Fault { done });
            }
            near.advance(step, local);
            far.advance(step, remote);
            near.gather(local, &mut near_pieces);
            far.gather(remote, &mut far_pieces);
            // SAFETY: the caller's promise; these are parts of what he gave.
            let result = unsafe { self.call(direction, &near_pieces, &far_pieces) };
            step = result.map_err(|errno| error_of(errno, done))?;
            done += step;
        }
        Ok(())
    }

    /// One system call: bytes copied, or the `errno`.
    ///
    /// # Safety
    /// As for [`copy`](Self::copy).
    #[inline]
    unsafe fn call(
        &self,
        direction: Direction,
        local: &[libc::iovec],
        remote: &[libc::iovec],
    ) -> Result<usize, i32> {
        let (near, far) = (local.as_ptr(), remote.as_ptr());
        let (near_n, far_n) = (local.len() as u64, remote.len() as u64);
        loop {
            // SAFETY: arrays of live iovecs with their lengths. The kernel checks both sides' addresses; that the local
            // ones may be touched is the caller's promise.
            let n = unsafe {
                match direction {
                    Direction::Read => {
                        libc::process_vm_readv(self.pid, near, near_n, far, far_n, 0)
                    }
                    Direction::Write => {
                        libc::process_vm_writev(self.pid, near, near_n, far, far_n, 0)
                    }
                }
            };
            match usize::try_from(n) {
                Ok(n) => return Ok(n),
                Err(_) => match io::Error::last_os_error().raw_os_error().unwrap_or(0) {
                    libc::EINTR => {}
                    errno => return Err(errno),
                },
            }
        }
    }
}

/// The memory of the process with this number, if that is the one that sent `probe`.
fn memory_file(pid: i32, probe: Probe) -> Option<File> {
    let _uncancelled = Uncancelled::new();
    let file = File::open(format!("/proc/{pid}/mem")).ok()?;
    let file = out_of_the_way(&file).unwrap_or(file);
    // `/proc` may be that of another PID namespace.
    finds(&file, probe).then_some(file)
}

/// The file by a higher number. A program that closes all descriptors, ours as well, gets low ones for what it opens then. One
/// above 63 may cost the first READ 20 ms, since the kernel makes the table of descriptors larger.
fn out_of_the_way(file: &File) -> Option<File> {
    // SAFETY: a descriptor and an integer.
    let fd = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_DUPFD_CLOEXEC, HIGH) };
    // SAFETY: on success a new descriptor that is ours.
    (fd >= 0).then(|| unsafe { File::from_raw_fd(fd) })
}

/// Whether the word is found by the file: it is no more where the program has closed the descriptor, and opened something else.
fn finds(file: &File, probe: Probe) -> bool {
    let mut value = 0u64;
    let near = Local { iov_base: (&raw mut value).cast(), iov_len: 8 };
    // SAFETY: the local side is a live word.
    let done = unsafe { pread(file, &near, probe.address) };
    done == 8 && value == probe.value
}

/// pread(2), by number: the function of libc is a cancellation point (pthreads(7)), and the caller holds locks.
///
/// # Safety
/// `into` may be written, as far as it is mapped.
#[inline]
unsafe fn pread(file: &File, into: &Local, at: u64) -> libc::c_long {
    let (fd, at) = (file.as_raw_fd(), at as libc::off_t);
    // SAFETY: the kernel checks both sides' addresses; that the local ones may be written is the caller's promise.
    unsafe { libc::syscall(libc::SYS_pread64, fd, into.iov_base, into.iov_len, at) }
}

fn error_of(errno: i32, done: usize) -> RemoteError {
    match errno {
        libc::ESRCH => RemoteError::Gone,
        libc::EPERM | libc::EACCES | libc::ENOSYS => RemoteError::Denied,
        libc::EFAULT => RemoteError::Fault { done },
        errno => RemoteError::Failed(errno),
    }
}

/// A place in a list of pieces.
#[derive(Clone, Copy, Debug, Default)]
struct Cursor {
    piece: usize,
    inside: usize,
}

impl Cursor {
    /// What is left, in so far as one call takes it.
    fn gather(&self, pieces: &[libc::iovec], into: &mut Vec<libc::iovec>) {
        into.clear();
        let mut skip = self.inside;
        for piece in pieces.iter().skip(self.piece).take(MAX_PIECES) {
            let iov_base = (piece.iov_base as usize).wrapping_add(skip) as *mut libc::c_void;
            into.push(libc::iovec { iov_base, iov_len: piece.iov_len - skip });
            skip = 0;
        }
    }

    fn advance(&mut self, mut bytes: usize, pieces: &[libc::iovec]) {
        while let Some(piece) = pieces.get(self.piece) {
            let left = piece.iov_len - self.inside;
            if bytes < left {
                self.inside += bytes;
                return;
            }
            bytes -= left;
            (self.piece, self.inside) = (self.piece + 1, 0);
        }
    }
}

/// The coarse clock's tick, a few milliseconds; never 0.
#[inline]
fn tick() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;
    use std::time::Duration;

    fn ours() -> RemoteMemory {
        static WORD: u64 = 0x1234_5678;
        let process = PeerProcess { pid: std::process::id() as i32, pidfd: None };
        let probe = Probe { address: (&raw const WORD) as u64, value: WORD };
        RemoteMemory::open(&process, probe).unwrap()
    }

    fn local(bytes: &mut [u8]) -> Local {
        Local { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    #[test]
    fn a_little_is_read_by_the_file() {
        let memory = ours();
        let from: Vec<u8> = (1..=250).cycle().take(SHORT + 1).collect();
        for (len, by_file) in [(1, true), (SHORT, true), (SHORT + 1, false), (0, false)] {
            let far = [Remote::new(from.as_ptr() as u64, len)];
            let mut back = vec![0u8; len];
            // SAFETY: the local side is a buffer of this test.
            let read = unsafe { memory.read_short(tick(), &[local(&mut back)], &far) };
            assert_eq!(read, Ok(by_file), "{len}");
            assert_eq!(by_file, len > 0 && back == from[..len], "{len}");
        }
        let mut bytes = [0u8; 4];
        let far = Remote::new(from.as_ptr() as u64, 2);
        let [two, four] = [local(&mut bytes[..2]), local(&mut bytes)];
        // SAFETY: as above.
        let read = |near: &[Local], far: &[Remote]| unsafe { memory.read_short(tick(), near, far) };
        assert_eq!(read(&[four], &[far]), Ok(false), "lengths must agree");
        assert_eq!(read(&[two, two], &[far, far]), Ok(false), "one piece at a time");
        assert_eq!(read(&[two], &[Remote::new(64, 2)]), Ok(false), "nothing is there");
        assert_eq!(bytes, [0; 4]);
        assert_eq!(read(&[two], &[far]), Ok(true));
        assert_eq!(bytes, [1, 2, 0, 0]);
    }

    /// open(2), pread(2) and close(2) are cancellation points in the C library.
    #[test]
    fn nobody_is_cancelled_while_it_opens_or_reads() {
        unsafe extern "C" {
            fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
        }
        let (sender, done) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            // SAFETY: this thread's own id.
            assert_eq!(unsafe { pthread_cancel(libc::pthread_self()) }, 0);
            let memory = ours();
            let mut byte = [0];
            let far = [Remote::new((&raw const MAX_PIECES_HERE) as u64, 1)];
            // SAFETY: the local side is a byte of this test.
            let read = unsafe { memory.read_short(tick(), &[local(&mut byte)], &far) };
            // For what follows in this thread.
            std::mem::forget(Uncancelled::new());
            sender.send(read).unwrap();
        });
        assert_eq!(done.recv_timeout(Duration::from_secs(20)).unwrap(), Ok(true));
        thread.join().unwrap();
    }

    #[test]
    fn a_file_that_the_program_has_replaced_is_not_read() {
        let memory = ours();
        let fd = memory.file.as_ref().unwrap().as_raw_fd();
        assert!(fd >= HIGH, "{fd}");
        let from = [7u8; 8];
        let mut back = [1u8; 8];
        let near = [local(&mut back)];
        let far = [Remote::new(from.as_ptr() as u64, 8)];
        // SAFETY: the local side is a buffer of this test, which nobody looks at meanwhile.
        let read = || unsafe { memory.read_short(tick(), &near, &far) };
        assert_eq!(read(), Ok(true));
        let zero = File::open("/dev/zero").unwrap();
        // SAFETY: what a program may do, too; the number is closed once, by `memory`.
        assert_eq!(unsafe { libc::dup2(zero.as_raw_fd(), fd) }, fd);
        memory.found.store(0, Ordering::Relaxed);
        assert_eq!([read(), read()], [Ok(false); 2]);
        assert_eq!(back, [7; 8]);
        // SAFETY: as above.
        unsafe { memory.read(&near, &far, || true) }.unwrap();
        assert_eq!(back, [7; 8]);
    }

    #[test]
    fn the_file_ends_with_the_process() {
        let mut word = 5u64;
        // SAFETY: the child makes system calls alone, and ends with its parent.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: no preconditions.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                loop {
                    libc::pause();
                }
            }
        }
        let probe = Probe { address: (&raw const word) as u64, value: 5 };
        let memory = RemoteMemory::open(&PeerProcess { pid: child, pidfd: None }, probe).unwrap();
        let far = [Remote::new(probe.address, 8)];
        let mut read = || {
            let near = [Local { iov_base: (&raw mut word).cast(), iov_len: 8 }];
            // SAFETY: the local side is a word of this test, which nobody looks at meanwhile.
            unsafe { memory.read(&near, &far, || true) }
        };
        assert_eq!(read(), Ok(()));
        // SAFETY: the child of this test, which is waited for once.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, ptr::null_mut(), 0);
        }
        assert_eq!(read(), Err(RemoteError::Gone));
    }

    #[test]
    fn pieces_of_any_sizes_meet() {
        let memory = ours();
        let mut from: Vec<u8> = (0..=255).cycle().take(5000).collect();
        let target = vec![0u8; 5000];
        // 1,250 pieces of 4 bytes into 5,000 of one byte: more than one call takes.
        let near: Vec<Local> = from.chunks_mut(4).map(local).collect();
        let far: Vec<Remote> =
            target.iter().map(|b| Remote::new(ptr::from_ref(b) as u64, 1)).collect();
        // SAFETY: both sides are buffers of this test.
        unsafe { memory.write(&near, &far, || true) }.unwrap();
        let mut back = vec![0u8; 5000];
        let near = [local(&mut back)];
        // SAFETY: as above.
        unsafe { memory.read(&near, &far, || true) }.unwrap();
        assert_eq!(from, back);
    }

    #[test]
    fn faults_tell_how_far_they_got_and_lengths_must_agree() {
        let memory = ours();
        // SAFETY: a new anonymous mapping of two pages, the second of which is made inaccessible.
        let pages = unsafe {
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let pages = libc::mmap(ptr::null_mut(), 8192, rights, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(pages.byte_add(4096), 4096, libc::PROT_NONE), 0);
            pages as u64
        };
        let mut bytes = vec![1u8; 8192];
        let near = [local(&mut bytes)];
        let far = [Remote::new(pages, 8192)];
        // SAFETY: the local side is a buffer of this test.
        let result = unsafe { memory.write(&near, &far, || true) };
        assert_eq!(result, Err(RemoteError::Fault { done: 4096 }));
        let far = [Remote::new(pages + 4096, 8192)];
        // SAFETY: as above.
        let result = unsafe { memory.read(&near, &far, || true) };
        assert_eq!(result, Err(RemoteError::Fault { done: 0 }));
        let far = [Remote::new(pages, 1)];
        // SAFETY: as above.
        let result = unsafe { memory.write(&near, &far, || true) };
        assert_eq!(result, Err(RemoteError::Failed(libc::EINVAL)));
        // SAFETY: nothing is copied.
        assert_eq!(unsafe { memory.write(&[], &[], || true) }, Ok(()));
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(pages as *mut libc::c_void, 8192) };
        // The first page is never mapped.
        let (near, far) = ([local(&mut bytes[..8])], [Remote::new(64, 8)]);
        // SAFETY: the local side is a buffer of this test.
        let results =
            unsafe { [memory.write(&near, &far, || true), memory.read(&near, &far, || true)] };
        assert_eq!(results, [Err(RemoteError::Fault { done: 0 }); 2]);
    }

    #[test]
    fn life_is_asked_once_a_tick_and_death_is_final_for_the_call() {
        let memory = ours();
        let mut word = [0u8; 8];
        let near = [local(&mut word)];
        let far = [Remote::new((&raw const MAX_PIECES_HERE) as u64, 8)];
        // SAFETY: the local side is a buffer of this test.
        let result = unsafe { memory.read(&near, &far, || false) };
        assert_eq!(result, Err(RemoteError::Gone));
        let mut asked = 0;
        for _ in 0..100 {
            // SAFETY: as above.
            let result = unsafe {
                memory.read(&near, &far, || {
                    asked += 1;
                    true
                })
            };
            assert_eq!(result, Ok(()));
        }
        assert!((1..50).contains(&asked), "{asked}");
        assert_eq!(u64::from_ne_bytes(word), MAX_PIECES_HERE);
    }

    static MAX_PIECES_HERE: u64 = 1024;

    #[test]
    fn another_process_than_the_one_expected_is_refused() {
        let word = 1u64;
        let probe = Probe { address: (&raw const word) as u64, value: 2 };
        let process = |pid| PeerProcess { pid, pidfd: None };
        let open = |pid| RemoteMemory::open(&process(pid), probe).map(|_| ());
        assert_eq!(open(std::process::id() as i32), Err(RemoteError::Denied));
        assert_eq!(open(0), Err(RemoteError::Denied));
        assert_eq!(open(i32::MAX), Err(RemoteError::Gone));
    }
}

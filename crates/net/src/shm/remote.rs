//! Copies to and from another process's memory without its help: process_vm_readv(2) and process_vm_writev(2).
//!
//! Those calls take a process number and no descriptor, so the number must still be the peer's. Numbers are handed out
//! in a cycle: one comes back only after all others were used, which takes far longer than the tick of the coarse clock.
//! Hence a look once a tick, at the process and its socket, is enough to find no other process.
//!
//! A process that runs another program (execve(2)) keeps its number. Its socket closes, so the next look finds that. Until
//! then, for up to a tick, a copy may reach the memory of the new program, if something is mapped at the same address
//! and the kernel still permits the copy.
//!
//! The file of a process's memory (proc_pid_mem(5)) would read a little in less time. It ignores protection, so a page that its
//! owner has made inaccessible would be read.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::time::{ClockId, clock_gettime};
use thiserror::Error;

use super::handshake::ProofWord;
use super::process::PeerProcess;

/// Most pieces of one system call, the kernel's limit.
const MAX_PIECES: usize = 1024;

/// The reason why a copy did not happen, or not all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RemoteError {
    /// The process has ended or given up its channel. (`ESRCH`)
    #[error("the process is gone")]
    Gone,
    /// The kernel does not permit it: another user or namespace, ptrace restrictions, seccomp. (`EPERM`, `ENOSYS`)
    #[error("the kernel does not permit cross-process copy")]
    Denied,
    /// Memory on either side is not mapped, or may not be copied, after this many bytes. (`EFAULT`)
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
}

impl RemoteMemory {
    /// Tries whether the kernel permits copying and `process` is the one that sent `proof`.
    pub(crate) fn open(process: &PeerProcess, proof: ProofWord) -> Result<Self, RemoteError> {
        if process.pid <= 0 {
            return Err(RemoteError::Denied);
        }
        let this = Self { pid: process.pid, seen: AtomicU64::new(0) };
        match this.finds(proof)? {
            true => Ok(this),
            // A process is there, but not this one: its number is of another PID namespace.
            false => Err(RemoteError::Denied),
        }
    }

    /// Whether the process has this word.
    fn finds(&self, proof: ProofWord) -> Result<bool, RemoteError> {
        let mut value = 0u64;
        let local = Local { iov_base: (&raw mut value).cast(), iov_len: 8 };
        let remote = Remote::new(proof.address, 8);
        // SAFETY: the local piece is a live word.
        match unsafe { self.copy(Direction::Read, &[local], &[remote]) } {
            Ok(()) => Ok(value == proof.value),
            Err(RemoteError::Fault { .. }) => Ok(false),
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
        self.check(is_alive)?;
        // SAFETY: the caller's promise.
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

    /// Whether the process is still there; asks once a tick.
    #[inline]
    pub(crate) fn check(&self, is_alive: impl FnOnce() -> bool) -> Result<(), RemoteError> {
        let now = tick();
        if self.seen.load(Ordering::Relaxed) != now {
            if !is_alive() {
                return Err(RemoteError::Gone);
            }
            self.seen.store(now, Ordering::Relaxed);
        }
        Ok(())
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

    /// Copies the rest of one call, because there were too many pieces or bytes for it, or because the rest is not
    /// mapped.
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
            // SAFETY: the caller's promise; these are parts of the given ranges.
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

/// Whether the process with this number still has the word that it told of. If not, it runs another program. `None` where the
/// kernel does not let us look.
pub(super) fn still_has(pid: i32, proof: ProofWord) -> Option<bool> {
    let memory = RemoteMemory { pid, seen: AtomicU64::new(0) };
    if pid > 0 { memory.finds(proof).ok() } else { None }
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
    /// The rest, as far as one call takes it.
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
    let now = clock_gettime(ClockId::MonotonicCoarse);
    (now.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(now.tv_nsec as u64) | 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr;

    fn ours() -> RemoteMemory {
        static WORD: u64 = 0x1234_5678;
        let process = PeerProcess::new(std::process::id() as i32, None);
        let proof = ProofWord { address: (&raw const WORD) as u64, value: WORD };
        RemoteMemory::open(&process, proof).unwrap()
    }

    fn local(bytes: &mut [u8]) -> Local {
        Local { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() }
    }

    #[test]
    fn an_ended_process_is_told_from_one_that_called_exec() {
        let word = 5u64;
        let at = |value| ProofWord { address: (&raw const word) as u64, value };
        let pid = std::process::id() as i32;
        assert_eq!((still_has(pid, at(5)), still_has(pid, at(6))), (Some(true), Some(false)));
        let nothing = ProofWord { address: 64, value: 5 };
        assert_eq!(still_has(pid, nothing), Some(false));
        assert_eq!((still_has(0, at(6)), still_has(i32::MAX, at(6))), (None, None));
    }

    #[test]
    fn an_inaccessible_page_is_not_read_at_any_length() {
        let memory = ours();
        // SAFETY: a new anonymous mapping, which is made inaccessible.
        let page = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            let page = libc::mmap(ptr::null_mut(), 4096, libc::PROT_WRITE, flags, -1, 0);
            assert_ne!(page, libc::MAP_FAILED);
            page.cast::<u8>().write_bytes(7, 4096);
            assert_eq!(libc::mprotect(page, 4096, libc::PROT_NONE), 0);
            page as u64
        };
        for len in [1, 2, 64, 1024, 1025, 4096] {
            let mut back = vec![0u8; len];
            let (near, far) = ([local(&mut back)], [Remote::new(page, len)]);
            // SAFETY: the local side is a buffer of this test.
            let read = unsafe { memory.read(&near, &far, || true) };
            assert_eq!(read, Err(RemoteError::Fault { done: 0 }), "{len}");
            assert!(back.iter().all(|&byte| byte == 0), "{len}");
        }
        // SAFETY: the mapping made above.
        unsafe { libc::munmap(page as *mut libc::c_void, 4096) };
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
        // SAFETY: a new anonymous mapping of two pages. The second is made inaccessible.
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
    fn the_kernel_is_asked_for_life_once_a_tick() {
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
        let proof = ProofWord { address: (&raw const word) as u64, value: 2 };
        let process = |pid| PeerProcess::new(pid, None);
        let open = |pid| RemoteMemory::open(&process(pid), proof).map(|_| ());
        assert_eq!(open(std::process::id() as i32), Err(RemoteError::Denied));
        assert_eq!(open(0), Err(RemoteError::Denied));
        assert_eq!(open(i32::MAX), Err(RemoteError::Gone));
    }
}

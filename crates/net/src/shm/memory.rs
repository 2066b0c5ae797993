//! Memory that another process may write at any time. No reference to its bytes ever exists.
//!
//! [`Memory`] is the interface that the algorithms of [`super::ring`] and [`super::notify`] need, so that a model
//! checker can stand in for it. [`Area`] is the real one: a part of a mapped memfd.

use std::ffi::CStr;
use std::fmt;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering, fence};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    fstatfs, ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use rustix::process::{Resource, getrlimit};

use crate::sys;

/// The type of a file system of ordinary pages, as fstatfs(2) has it.
pub(crate) const TMPFS: u64 = 0x0102_1994;

/// Words of 64 bits, at offsets that are multiples of 8, and bytes.
///
/// Offsets are the caller's own or validated: beyond the end every function panics.
pub trait Memory {
    /// Reads a word once.
    fn load(&self, at: usize, order: Ordering) -> u64;
    /// Writes a word.
    fn store(&self, at: usize, value: u64, order: Ordering);
    /// A sequentially consistent fence.
    fn fence(&self);
    /// Copies bytes out, each read once. They may be torn if the peer writes them meanwhile.
    fn read(&self, at: usize, into: &mut [u8]);
    /// Copies bytes in.
    fn write(&self, at: usize, from: &[u8]);
    /// Whether these bytes are inside, and the first word is aligned.
    fn holds(&self, at: usize, len: usize) -> bool {
        let _ = (at, len);
        true
    }
    /// As [`load`](Self::load), without a look at the bounds.
    ///
    /// # Safety
    /// The word is among bytes that the memory [`holds`](Self::holds).
    #[inline]
    unsafe fn load_held(&self, at: usize, order: Ordering) -> u64 {
        self.load(at, order)
    }
    /// As [`store`](Self::store), without a look at the bounds.
    ///
    /// # Safety
    /// As for [`load_held`](Self::load_held).
    #[inline]
    unsafe fn store_held(&self, at: usize, value: u64, order: Ordering) {
        self.store(at, value, order);
    }
    /// A hint: a line will be read soon.
    fn prefetch(&self, at: usize) {
        let _ = at;
    }
    /// Makes sure that there is memory behind these bytes; false if the system has none to give.
    fn allocate(&self, at: usize, len: usize) -> bool {
        let _ = (at, len);
        true
    }
}

/// Memory with words that many write.
pub trait SharedWords: Memory {
    /// Sets bits of a word, sequentially consistent.
    fn fetch_or(&self, at: usize, bits: u64) -> u64;
    /// Replaces a word, sequentially consistent.
    fn swap(&self, at: usize, value: u64) -> u64;
}

/// A word of this process alone, which several of its threads use.
pub trait OwnWord: fmt::Debug {
    /// One with this value.
    fn of(value: u64) -> Self;
    /// As [`AtomicU64::load`].
    fn load(&self, order: Ordering) -> u64;
    /// As [`AtomicU64::store`].
    fn store(&self, value: u64, order: Ordering);
}

impl OwnWord for AtomicU64 {
    #[inline]
    fn of(value: u64) -> Self {
        Self::new(value)
    }

    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }
}

/// Memory at whose words threads of this process work together, by words of their own.
pub trait Owned: Memory {
    /// Such a word. A model checker knows it as it knows the memory.
    type Word: OwnWord;
}

impl Owned for Area {
    type Word = AtomicU64;
}

/// Words of a memory that were found inside it once, as many as a power of two. A number beyond the last begins anew.
#[derive(Clone, Debug)]
pub(crate) struct Words<M> {
    memory: M,
    at: usize,
    /// The last one's number.
    last: usize,
}

impl<M: Memory> Words<M> {
    /// `count` words from `at` on.
    ///
    /// # Panics
    /// When they are not inside, or not as many as a power of two.
    pub(crate) fn new(memory: M, at: usize, count: usize) -> Self {
        assert!(count.is_power_of_two() && memory.holds(at, 8 * count), "words lie inside");
        Self { memory, at, last: count - 1 }
    }

    #[inline]
    fn place(&self, n: usize) -> usize {
        self.at + 8 * (n & self.last)
    }

    #[inline]
    pub(crate) fn load(&self, n: usize, order: Ordering) -> u64 {
        // SAFETY: one of the words that `new` has found inside.
        unsafe { self.memory.load_held(self.place(n), order) }
    }

    #[inline]
    pub(crate) fn store(&self, n: usize, value: u64, order: Ordering) {
        // SAFETY: as above.
        unsafe { self.memory.store_held(self.place(n), value, order) }
    }
}

impl Words<Area> {
    /// The address of a word. It is valid as long as this, and may be touched by raw copies only.
    #[inline]
    pub(crate) fn address(&self, n: usize) -> *mut u8 {
        // SAFETY: as above.
        unsafe { self.memory.address(self.place(n)) }
    }
}

/// A mapping of a shared object, unmapped when the last [`Area`] of it is gone.
#[derive(Debug)]
struct Mapping {
    base: Address,
    len: usize,
    /// The process that made it. A forked child has no such mapping (`MADV_DONTFORK`), and must not unmap another one
    /// in its place.
    owner: u32,
}

/// An address in a mapping.
#[derive(Clone, Copy, Debug)]
struct Address(NonNull<u8>);

// SAFETY: atomics and the guarded copies in assembly touch the bytes there, from any thread.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            // SAFETY: this process mapped exactly this range, and no `Area` is left that could touch it.
            let _ = unsafe { munmap(self.base.0.as_ptr().cast(), self.len) };
        }
    }
}

/// Whether this process writes an area or only reads it. The kernel enforces it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadOnly,
    ReadWrite,
}

/// A part of a mapped shared object.
#[derive(Clone, Debug)]
pub struct Area {
    mapping: Arc<Mapping>,
    base: Address,
    len: usize,
}

impl Area {
    /// Maps the first `len` bytes of `fd`, which must be sealed against shrinking ([`SharedObject::is_sound`]).
    pub(crate) fn map(fd: BorrowedFd<'_>, len: usize, access: Access) -> io::Result<Self> {
        let prot = match access {
            Access::ReadOnly => ProtFlags::READ,
            Access::ReadWrite => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at a place of the kernel's choice touches no existing memory.
        let base = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }?;
        let base = Address(NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        let mapping = Mapping { base, len, owner: std::process::id() };
        // SAFETY: the mapping just made. A child that touched it would write with two pens.
        unsafe { madvise(base.0.as_ptr().cast(), len, Advice::LinuxDontFork) }?;
        Ok(Self { mapping: Arc::new(mapping), base, len })
    }

    /// As [`map`](Self::map), for writing, and forked children keep it.
    pub(crate) fn map_for_children(fd: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let area = Self::map(fd, len, Access::ReadWrite)?;
        // SAFETY: the mapping just made.
        unsafe { madvise(area.at(0, len).cast(), len, Advice::LinuxDoFork) }?;
        Ok(area)
    }

    /// Memory of this process and its forked children alone.
    pub(crate) fn private(len: usize) -> io::Result<Self> {
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at a place of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::SHARED) }?;
        let base = Address(NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?);
        let mapping = Mapping { base, len, owner: std::process::id() };
        Ok(Self { mapping: Arc::new(mapping), base, len })
    }

    /// The bytes from `start` on, `len` of them.
    ///
    /// # Panics
    /// When they are not inside.
    pub(crate) fn part(&self, start: usize, len: usize) -> Self {
        assert!(start <= self.len && len <= self.len - start, "a part lies inside");
        // SAFETY: inside the mapping, as asserted.
        let base = Address(unsafe { self.base.0.add(start) });
        Self { mapping: Arc::clone(&self.mapping), base, len }
    }

    /// Takes the right to write away from whole pages of the mapping.
    pub(crate) fn make_read_only(&self) -> io::Result<()> {
        // SAFETY: the range is a part of our mapping, and only `Area`s refer to it. A later write there breaks the rule
        // of the single writer.
        unsafe { mprotect(self.at(0, self.len).cast(), self.len, MprotectFlags::READ) }?;
        Ok(())
    }

    /// Bytes that have memory behind them (`mincore(2)`).
    #[cfg(test)]
    pub(crate) fn resident(&self) -> usize {
        let mut pages = vec![0u8; self.len / super::layout::page()];
        // SAFETY: a part of our mapping, and a byte for each page of it.
        let rc =
            unsafe { libc::mincore(self.at(0, self.len).cast(), self.len, pages.as_mut_ptr()) };
        assert_eq!(rc, 0);
        pages.iter().filter(|&&page| page & 1 == 1).count() * super::layout::page()
    }

    /// The address of `len` bytes from `at` on. It is valid as long as this area, and may be touched by raw copies
    /// only.
    ///
    /// # Panics
    /// When they are not all inside.
    #[inline]
    pub(crate) fn at(&self, at: usize, len: usize) -> *mut u8 {
        let is_inside = self.len.checked_sub(len).is_some_and(|last| at <= last);
        assert!(is_inside, "shared memory is accessed inside its bounds");
        // SAFETY: as just seen.
        unsafe { self.address(at) }
    }

    /// Keeps these bits of a word and clears the others, sequentially consistent.
    pub(crate) fn fetch_and(&self, at: usize, bits: u64) -> u64 {
        self.word(at).fetch_and(bits, Ordering::SeqCst)
    }

    /// Adds to a word, sequentially consistent.
    pub(crate) fn fetch_add(&self, at: usize, n: u64) -> u64 {
        self.word(at).fetch_add(n, Ordering::SeqCst)
    }

    /// Replaces a word that has this value. False: it has another one.
    pub(crate) fn replace(&self, at: usize, before: u64, value: u64) -> bool {
        let word = self.word(at);
        word.compare_exchange(before, value, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }

    /// # Safety
    /// A place inside.
    #[inline]
    unsafe fn address(&self, at: usize) -> *mut u8 {
        // SAFETY: `len` bytes from `base` are inside the mapping, and `at` is among them.
        unsafe { self.base.0.as_ptr().add(at) }
    }

    #[inline]
    fn word(&self, at: usize) -> &AtomicU64 {
        assert!(self.at(at, 8).cast::<u64>().is_aligned(), "words are aligned");
        // SAFETY: as just seen.
        unsafe { self.word_held(at) }
    }

    /// # Safety
    /// The word is inside, and aligned.
    #[inline]
    unsafe fn word_held(&self, at: usize) -> &AtomicU64 {
        // SAFETY: eight aligned bytes inside a live mapping, which outlives the borrow of `self`. All accesses of this
        // process to words are atomic. (A store through a read-only area would fault: the ring's types do none.)
        unsafe { AtomicU64::from_ptr(self.address(at).cast()) }
    }
}

impl Memory for Area {
    #[inline]
    fn load(&self, at: usize, order: Ordering) -> u64 {
        self.word(at).load(order)
    }

    #[inline]
    fn store(&self, at: usize, value: u64, order: Ordering) {
        self.word(at).store(value, order);
    }

    fn holds(&self, at: usize, len: usize) -> bool {
        self.at(at, len).cast::<u64>().is_aligned()
    }

    #[inline]
    unsafe fn load_held(&self, at: usize, order: Ordering) -> u64 {
        // SAFETY: the caller's promise.
        unsafe { self.word_held(at) }.load(order)
    }

    #[inline]
    unsafe fn store_held(&self, at: usize, value: u64, order: Ordering) {
        // SAFETY: the caller's promise.
        unsafe { self.word_held(at) }.store(value, order);
    }

    #[inline]
    fn fence(&self) {
        fence(Ordering::SeqCst);
    }

    #[inline]
    fn read(&self, at: usize, into: &mut [u8]) {
        let from = self.at(at, into.len());
        let (words, bytes) = match (from as usize).is_multiple_of(8) {
            true => into.as_chunks_mut::<8>(),
            false => (&mut [][..], into),
        };
        let done = 8 * words.len();
        for (n, word) in words.iter_mut().enumerate() {
            // SAFETY: eight aligned bytes inside a live mapping.
            let place = unsafe { AtomicU64::from_ptr(from.add(8 * n).cast()) };
            *word = place.load(Ordering::Relaxed).to_ne_bytes();
        }
        for (n, byte) in bytes.iter_mut().enumerate() {
            // SAFETY: a byte inside a live mapping.
            let place = unsafe { AtomicU8::from_ptr(from.add(done + n)) };
            *byte = place.load(Ordering::Relaxed);
        }
    }

    #[inline]
    fn write(&self, at: usize, from: &[u8]) {
        let to = self.at(at, from.len());
        let (words, bytes) = match (to as usize).is_multiple_of(8) {
            true => from.as_chunks::<8>(),
            false => (&[][..], from),
        };
        for (n, word) in words.iter().enumerate() {
            // SAFETY: eight aligned bytes inside a live mapping.
            let place = unsafe { AtomicU64::from_ptr(to.add(8 * n).cast()) };
            place.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
        for (n, byte) in bytes.iter().enumerate() {
            // SAFETY: a byte inside a live mapping.
            let place = unsafe { AtomicU8::from_ptr(to.add(8 * words.len() + n)) };
            place.store(*byte, Ordering::Relaxed);
        }
    }

    #[inline]
    fn prefetch(&self, at: usize) {
        let line = self.at(at, 1);
        #[cfg(target_arch = "x86_64")]
        // SAFETY: a hint, which changes nothing that can be seen.
        unsafe {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            _mm_prefetch::<_MM_HINT_T0>(line.cast());
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = line;
    }

    fn allocate(&self, at: usize, len: usize) -> bool {
        // SAFETY: a part of our mapping; its content does not change.
        let done = unsafe { madvise(self.at(at, len).cast(), len, Advice::LinuxPopulateWrite) };
        // A kernel older than 5.14 allocates when the bytes are touched.
        matches!(done, Ok(()) | Err(Errno::INVAL))
    }
}

impl SharedWords for Area {
    fn fetch_or(&self, at: usize, bits: u64) -> u64 {
        self.word(at).fetch_or(bits, Ordering::SeqCst)
    }

    fn swap(&self, at: usize, value: u64) -> u64 {
        self.word(at).swap(value, Ordering::SeqCst)
    }
}

/// A memfd, sealed so that it keeps its size.
#[derive(Debug)]
pub(crate) struct SharedObject(OwnedFd);

/// A new memfd without a byte.
pub(crate) fn memfd(name: &CStr) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // A kernel older than 6.3 does not know the flag.
    let fd = memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL);
    sys::above_standard_streams(fd.or_else(|_| memfd_create(name, flags))?)
}

/// Tells whether the process may make a file of this length (`RLIMIT_FSIZE`, which counts for memory files, too). A try
/// would end the process (`SIGXFSZ`).
///
/// # Errors
/// `FileTooLarge`.
pub(crate) fn check_length(len: u64) -> io::Result<()> {
    let limit = getrlimit(Resource::Fsize).current;
    if limit.is_some_and(|limit| len > limit) {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    Ok(())
}

/// Puts memory behind `len` bytes of a file from `start` on.
pub(crate) fn allocate(fd: BorrowedFd<'_>, start: usize, len: usize) -> io::Result<()> {
    check_length((start + len) as u64)?;
    Ok(fallocate(fd, FallocateFlags::empty(), start as u64, len as u64)?)
}

/// Whether a descriptor of a stranger is a memfd of ordinary pages with these seals.
///
/// Files of other file systems have no seals, and no other question is put to these. A server of FUSE need not answer
/// one. A memfd of huge pages has seals. But where none is free, a hole in it ends the process that reads there.
pub(crate) fn is_sealed_memory(fd: BorrowedFd<'_>, needed: SealFlags) -> bool {
    fcntl_get_seals(fd).is_ok_and(|seals| seals.contains(needed))
        && fstatfs(fd).is_ok_and(|stat| stat.f_type as u64 == TMPFS)
}

impl SharedObject {
    /// A new object of `len` zero bytes. There is no memory behind them yet ([`allocate`](Self::allocate)): touched
    /// when the system has none to give, they would end the process.
    pub(crate) fn new(len: usize) -> io::Result<Self> {
        check_length(len as u64)?;
        let fd = memfd(c"anyverbs")?;
        ftruncate(&fd, len as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(Self(fd))
    }

    /// Puts memory behind `len` bytes from `start` on.
    pub(crate) fn allocate(&self, start: usize, len: usize) -> io::Result<()> {
        allocate(self.as_fd(), start, len)
    }

    /// Prevents receivers of the descriptor from writing to it. Mappings that exist stay writable.
    pub(crate) fn seal_future_writes(&self) {
        // Linux 5.1. Without it a peer that obeys maps it read-only nevertheless.
        let _ = fcntl_add_seals(&self.0, SealFlags::FUTURE_WRITE);
    }

    /// Takes a descriptor that a peer sent, if it is a memfd of exactly `len` bytes that cannot shrink.
    pub(crate) fn check(fd: OwnedFd, len: usize) -> Option<Self> {
        let is_whole =
            || fstat(&fd).is_ok_and(|stat| u64::try_from(stat.st_size) == Ok(len as u64));
        (is_sealed_memory(fd.as_fd(), SealFlags::SHRINK) && is_whole()).then_some(Self(fd))
    }
}

impl From<SharedObject> for OwnedFd {
    fn from(object: SharedObject) -> Self {
        object.0
    }
}

impl AsFd for SharedObject {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_keeps_its_size_and_both_mappings_see_it() {
        let object = SharedObject::new(8192).unwrap();
        assert_eq!(ftruncate(object.as_fd(), 0), Err(Errno::PERM));
        let a = Area::map(object.as_fd(), 8192, Access::ReadWrite).unwrap();
        let b = Area::map(object.as_fd(), 8192, Access::ReadOnly).unwrap();
        a.store(8, 7, Ordering::Release);
        a.write(4096, b"abc");
        let mut bytes = [0; 3];
        b.part(4096, 4096).read(0, &mut bytes);
        assert_eq!((b.load(8, Ordering::Acquire), &bytes), (7, b"abc"));
    }

    #[test]
    fn sealed_memory_cannot_be_mapped_for_writing() {
        let object = SharedObject::new(4096).unwrap();
        let ours = Area::map(object.as_fd(), 4096, Access::ReadWrite).unwrap();
        object.seal_future_writes();
        ours.store(0, 1, Ordering::Relaxed);
        let error = Area::map(object.as_fd(), 4096, Access::ReadWrite).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        assert_eq!(
            Area::map(object.as_fd(), 4096, Access::ReadOnly).unwrap().load(0, Ordering::Relaxed),
            1
        );
    }

    #[test]
    fn descriptors_that_could_shrink_or_have_another_size_are_refused() {
        let sealed = SharedObject::new(4096).unwrap().0;
        assert!(SharedObject::check(sealed.try_clone().unwrap(), 8192).is_none());
        assert!(SharedObject::check(sealed, 4096).is_some());
        let unsealed = memfd(c"x").unwrap();
        ftruncate(&unsealed, 4096).unwrap();
        assert!(SharedObject::check(unsealed, 4096).is_none());
        let file: OwnedFd = std::fs::File::open("/proc/self/exe").unwrap().into();
        assert!(SharedObject::check(file, 4096).is_none());
    }

    /// Where no huge page is free, a hole in such an object would end whoever reads there.
    #[test]
    fn objects_of_huge_pages_are_refused() {
        let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
        let Ok(huge) = memfd_create(c"huge", flags) else {
            return anyverbs_testing::skip("the kernel has no huge pages");
        };
        let len = rustix::fs::fstatfs(&huge).unwrap().f_bsize as usize;
        ftruncate(&huge, len as u64).unwrap();
        fcntl_add_seals(&huge, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(SharedObject::check(huge, len).is_none());
    }
}

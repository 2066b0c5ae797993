//! The mappings in an address space: whether a range may be registered, and memory that the device maps itself.

use std::ffi::{c_int, c_void};
use std::fs::{self, File};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};

use anyverbs_net::Uncancelled;
use anyverbs_proto::memory::Fault;
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, fcntl_add_seals, fstatfs, memfd_create, open,
    seek, statfs,
};
use rustix::io::Errno;
use rustix::mm::{
    Advice, MapFlags, MsyncFlags, ProtFlags, madvise, mmap, mmap_anonymous, msync, munmap,
};
use rustix::param::page_size;
use rustix::process::{Resource, getrlimit};

/// `struct procmap_query` of `linux/fs.h` (Linux 6.11).
#[repr(C)]
struct ProcmapQuery {
    size: u64,
    query_flags: u64,
    query_addr: u64,
    vma_start: u64,
    vma_end: u64,
    vma_flags: u64,
    vma_page_size: u64,
    vma_offset: u64,
    inode: u64,
    dev_major: u32,
    dev_minor: u32,
    vma_name_size: u32,
    build_id_size: u32,
    vma_name_addr: u64,
    build_id_addr: u64,
}

const _: () = assert!(size_of::<ProcmapQuery>() == 104);
/// `_IOWR('f', 17, struct procmap_query)`.
const PROCMAP_QUERY: u64 = 0xc068_6611;

/// A part of the address space with one set of rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Area {
    end: u64,
    readable: bool,
    writable: bool,
    /// A shared mapping of a file.
    of_file: bool,
    page_size: u64,
}

/// A region's requirements of its memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Needs {
    /// May be written, not only read.
    pub(crate) writable: bool,
    /// Made of huge pages.
    pub(crate) huge: bool,
    /// A file that survives a loss of power.
    pub(crate) persistent: bool,
}

/// Why memory is not as it is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// Nothing is mapped at this address.
    NotMapped(u64),
    /// The memory at this address may not be read, or not be written as it is needed.
    Protected(u64),
    /// Part of it is of small pages.
    NotHuge,
    /// Part of it is lost with the power.
    Volatile,
}

/// The mappings of this process: `/proc/self/maps`, kept open, since opening takes longer than asking. Not for a forked
/// child, to which it would tell of its parent.
#[derive(Debug)]
pub(crate) struct Maps(Option<File>);

impl Maps {
    pub(crate) fn open() -> Self {
        Self(File::open("/proc/self/maps").ok())
    }

    /// Whether every page of a range is mapped now, as it is needed.
    pub(crate) fn check(&self, addr: u64, len: u64, needs: Needs) -> Result<(), Unfit> {
        let end = addr.checked_add(len).ok_or(Unfit::NotMapped(u64::MAX))?;
        if len == 0 {
            return Ok(());
        }
        let mut text = None;
        let mut at = addr;
        while at < end {
            let area = match self.0.as_ref().map_or(Err(libc::ENOTTY), |maps| query(maps, at)) {
                Ok(area) => Some(area),
                Err(libc::ENOENT) => None,
                // An older kernel, or the program has closed descriptors that it does not know.
                Err(_) => {
                    let text = text.get_or_insert_with(|| read_maps(needs.huge));
                    if text.is_empty() {
                        // Without /proc rights are found out when the memory is used.
                        let unknown = needs.huge || needs.persistent || !is_resident(addr, len);
                        return if unknown { Err(Unfit::NotMapped(at)) } else { Ok(()) };
                    }
                    find(text, at)
                }
            };
            let area = area.ok_or(Unfit::NotMapped(at))?;
            if !area.readable || needs.writable && !area.writable {
                return Err(Unfit::Protected(at));
            }
            if needs.huge && area.page_size <= page_size() as u64 {
                return Err(Unfit::NotHuge);
            }
            let mut lasts =
                || area.of_file && survives(text.get_or_insert_with(|| read_maps(needs.huge)), at);
            if needs.persistent && !lasts() {
                return Err(Unfit::Volatile);
            }
            at = area.end;
        }
        Ok(())
    }
}

/// The text of `/proc/self/maps`, or of the longer `/proc/self/smaps`; empty if there is none.
fn read_maps(verbose: bool) -> String {
    // Opening is a cancellation point, and callers hold locks.
    let _uncancelled = Uncancelled::new();
    fs::read_to_string(if verbose { "/proc/self/smaps" } else { "/proc/self/maps" })
        .unwrap_or_default()
}

/// Asks the kernel for the area at an address; `ENOENT` if there is none, `ENOTTY` if it cannot be asked.
fn query(maps: &File, at: u64) -> Result<Area, c_int> {
    // SAFETY: integers.
    let mut query: ProcmapQuery = unsafe { std::mem::zeroed() };
    query.size = size_of::<ProcmapQuery>() as u64;
    query.query_addr = at;
    // SAFETY: the kernel reads and writes `size` bytes of the live struct, and no name, since its room is 0.
    let rc = unsafe { libc::ioctl(maps.as_raw_fd(), PROCMAP_QUERY as _, &raw mut query) };
    if rc != 0 {
        return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::ENOTTY));
    }
    let has = |bit| query.vma_flags & bit != 0;
    Ok(Area {
        end: query.vma_end,
        readable: has(1),
        writable: has(2),
        of_file: has(8) && query.inode != 0,
        page_size: query.vma_page_size,
    })
}

/// A line of `/proc/self/maps`, which is also the first of an area in `/proc/self/smaps`.
#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    start: u64,
    end: u64,
    rights: &'a str,
    inode: u64,
    /// Empty where there is none.
    path: &'a str,
}

/// None for the further lines of smaps, too.
fn parse_line(line: &str) -> Option<Line<'_>> {
    let number = |hex| u64::from_str_radix(hex, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end, rights) = (number(start)?, number(end)?, words.next()?);
    let inode = words.nth(2)?.parse().ok()?;
    let path = line.find('/').map_or("", |at| &line[at..]);
    Some(Line { start, end, rights, inode, path })
}

/// The area at an address in the text of `/proc/self/maps` or `/proc/self/smaps`.
fn find(text: &str, at: u64) -> Option<Area> {
    let (line, mut rest) = line_at(text, at)?;
    let size = rest.find_map(|line| line.strip_prefix("KernelPageSize:"));
    let kib = size.and_then(|s| s.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    Some(Area {
        end: line.end,
        readable: line.rights.starts_with('r'),
        writable: line.rights.as_bytes().get(1) == Some(&b'w'),
        of_file: line.rights.ends_with('s') && line.inode != 0,
        page_size: kib.map_or(page_size() as u64, |kib| kib << 10),
    })
}

/// The line of the area at an address, and those after it.
fn line_at(text: &str, at: u64) -> Option<(Line<'_>, std::str::Lines<'_>)> {
    let mut lines = text.lines();
    let line = lines.by_ref().filter_map(parse_line).find(|l| (l.start..l.end).contains(&at))?;
    Some((line, lines))
}

/// Whether the file that is mapped at an address lies on something that is still there after a loss of power, as the text of
/// `/proc/self/maps` says.
fn survives(text: &str, at: u64) -> bool {
    const RAMFS_MAGIC: u64 = 0x8584_58f6;
    const LOST: [u64; 3] = [libc::TMPFS_MAGIC as u64, libc::HUGETLBFS_MAGIC as u64, RAMFS_MAGIC];
    let Some((Line { start, end, inode, path, .. }, _)) = line_at(text, at) else { return false };
    // By its name, if that still names it; otherwise by the mapping, which takes privileges.
    let _uncancelled = Uncancelled::new();
    let same = fs::metadata(path).is_ok_and(|file| file.ino() == inode);
    let by_mapping = format!("/proc/self/map_files/{start:x}-{end:x}");
    let kind = file_system(if same { path } else { &by_mapping });
    kind.is_some_and(|kind| !LOST.contains(&kind))
}

/// The kind of file system that a file lies on.
fn file_system(path: &str) -> Option<u64> {
    Some(statfs(path).ok()?.f_type as u64)
}

/// Bytes of a file's pages, in which it is mapped.
pub fn block_size(fd: BorrowedFd<'_>) -> Option<u64> {
    // For huge pages it gives their size, for others the system's.
    Some((fstatfs(fd).ok()?.f_bsize as u64).max(page_size() as u64))
}

/// The whole pages that hold a range: where they begin, and their bytes.
fn pages(addr: u64, len: u64) -> Option<(usize, usize)> {
    let mask = page_size() - 1;
    let (addr, len) = (usize::try_from(addr).ok()?, usize::try_from(len).ok()?);
    let start = addr & !mask;
    let end = addr.checked_add(len)?.checked_add(mask)? & !mask;
    Some((start, end - start))
}

/// Whether `mincore` knows every page of a range.
fn is_resident(addr: u64, len: u64) -> bool {
    const PAGES: usize = 4096;
    let Some((start, len)) = pages(addr, len) else { return false };
    let mut residency = [0u8; PAGES];
    let step = PAGES * page_size();
    (0..len).step_by(step).all(|done| {
        let here = (len - done).min(step);
        // SAFETY: mincore reads no memory of ours and writes a byte for each page of the step, PAGES at most.
        unsafe { libc::mincore((start + done) as *mut c_void, here, residency.as_mut_ptr()) == 0 }
    })
}

/// Writes stores to these bytes back to their file (`msync`), and waits for that.
pub(crate) fn write_back(addr: u64, len: u64) -> Result<(), Fault> {
    let (start, len) = pages(addr, len).ok_or(Fault)?;
    // SAFETY: msync touches no memory of ours; it fails where nothing is mapped.
    unsafe { msync(start as *mut c_void, len, MsyncFlags::SYNC) }.map_err(|_| Fault)
}

/// The way in which pages are to be brought in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Populate {
    /// Soon, if the system likes.
    Soon,
    /// Now, to be read.
    Read,
    /// Now, to be written.
    Write,
}

/// Brings the pages of a range in.
pub(crate) fn populate(addr: u64, len: u64, how: Populate) -> Result<(), Fault> {
    let (start, len) = pages(addr, len).ok_or(Fault)?;
    let advice = match how {
        Populate::Soon => Advice::WillNeed,
        Populate::Read => Advice::LinuxPopulateRead,
        Populate::Write => Advice::LinuxPopulateWrite,
    };
    // SAFETY: none of these changes the contents of the memory.
    match unsafe { madvise(start as *mut c_void, len, advice) } {
        // Linux before 5.14, or a mapping that knows no advice (EBADF: anonymous memory without swap).
        Err(Errno::INVAL | Errno::BADF) => Ok(()),
        Err(_) => Err(Fault),
        Ok(()) => Ok(()),
    }
}

/// Memory that the device has mapped; unmapped by drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<c_void>,
    len: usize,
    /// By which other processes of the user find the file ([`Mapping::shared`]).
    file: Option<File>,
    /// The one process that has it, if forked children do not ([`Mapping::keep_from_children`]).
    owner: Option<u32>,
}

// SAFETY: an address and a length. Only the guarded copies touch the bytes there.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// New memory, all zero.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let (len, prot) = (len.max(1), ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping at a place of the kernel's choice touches no existing memory.
        let base = unsafe { mmap_anonymous(ptr::null_mut(), len, prot, MapFlags::PRIVATE) }?;
        Self::new(base, len)
    }

    /// New memory, all zero, of a file that no other process has yet, and that peers on this host may map as well
    /// ([`anyverbs_links::mapped`]).
    pub(crate) fn shared(len: usize) -> io::Result<Self> {
        // Beyond the limit the process would end.
        if getrlimit(Resource::Fsize).current.is_some_and(|limit| limit < len as u64) {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create(c"anyverbs-buffer", flags)?);
        file.set_len(len as u64)?;
        // Peers do not map it without.
        let _ = fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW);
        let mut mapping = Self::of_file(file.as_fd(), 0, len, true)?;
        mapping.file = Some(file);
        Ok(mapping)
    }

    /// `len` bytes of a file from `offset` on, which is a multiple of the page size; shared with all processes that map
    /// it.
    pub fn of_file(
        fd: BorrowedFd<'_>,
        offset: u64,
        len: usize,
        writable: bool,
    ) -> io::Result<Self> {
        let write = if writable { ProtFlags::WRITE } else { ProtFlags::empty() };
        let (len, prot) = (len.max(1), ProtFlags::READ | write);
        // SAFETY: a new mapping at a place of the kernel's choice touches no existing memory.
        let base = unsafe { mmap(ptr::null_mut(), len, prot, MapFlags::SHARED, fd, offset) }?;
        Self::new(base, len)
    }

    fn new(base: *mut c_void, len: usize) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len, file: None, owner: None })
    }

    /// Has the kernel leave it out of forked children, which would keep the file's memory for as long as they live.
    pub fn keep_from_children(mut self) -> io::Result<Self> {
        // SAFETY: whole pages of this mapping; nothing changes for this process.
        unsafe { madvise(self.base.as_ptr(), self.len, Advice::LinuxDontFork) }?;
        self.owner = Some(std::process::id());
        Ok(self)
    }

    /// Its first byte.
    pub fn addr(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Its first byte, for a caller that may touch it.
    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.base.as_ptr()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // A child may have something else in its place.
        if self.owner.is_some_and(|owner| owner != std::process::id()) {
            return;
        }
        // SAFETY: mapped by this object, and no longer accessed: regions that name it hold it.
        let _ = unsafe { munmap(self.base.as_ptr(), self.len) };
    }
}

/// A dma-buf that another device or driver exported.
pub(crate) mod dmabuf {
    use super::*;

    /// `DMA_BUF_MAGIC` of `linux/magic.h`: the magic that fstatfs gives for one.
    const MAGIC: u64 = 0x444d_4142;
    /// `_IOW('b', 0, struct dma_buf_sync)`.
    const SYNC: u64 = 0x4008_6200;
    const SYNC_RW: u64 = 3;
    const SYNC_END: u64 = 4;
    /// `_IOW('u', 0x42, struct udmabuf_create)`.
    const UDMABUF_CREATE: u64 = 0x4018_7542;
    const UDMABUF_FLAGS_CLOEXEC: u32 = 1;

    /// Bytes of a dma-buf: `EBADF` for no descriptor, `EINVAL` for one of something else.
    pub(crate) fn len(fd: BorrowedFd<'_>) -> Result<u64, c_int> {
        if fstatfs(fd).map_err(|_| libc::EBADF)?.f_type as u64 != MAGIC {
            return Err(libc::EINVAL);
        }
        seek(fd, SeekFrom::End(0)).map_err(|_| libc::EINVAL)
    }

    /// Begins or ends access by the CPU, as this device makes it. Buffers that need no care have no such call.
    pub(crate) fn sync(fd: BorrowedFd<'_>, begin: bool) {
        let flags = SYNC_RW | if begin { 0 } else { SYNC_END };
        // SAFETY: the call reads 8 bytes of a live integer.
        unsafe { libc::ioctl(fd.as_raw_fd(), SYNC as _, &raw const flags) };
    }

    /// Makes a dma-buf of whole pages of a memfd that is sealed against shrinking; needs `/dev/udmabuf`.
    pub(crate) fn export(memfd: BorrowedFd<'_>, offset: u64, len: u64) -> io::Result<OwnedFd> {
        #[repr(C)]
        struct UdmabufCreate {
            memfd: u32,
            flags: u32,
            offset: u64,
            size: u64,
        }
        let device = open(c"/dev/udmabuf", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())
            .map_err(|_| Errno::OPNOTSUPP)?;
        let create = UdmabufCreate {
            memfd: memfd.as_raw_fd().unsigned_abs(),
            flags: UDMABUF_FLAGS_CLOEXEC,
            offset,
            size: len.next_multiple_of(page_size() as u64),
        };
        // SAFETY: the call reads the live struct.
        let fd = unsafe { libc::ioctl(device.as_raw_fd(), UDMABUF_CREATE as _, &raw const create) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

#[cfg(test)]
mod tests;

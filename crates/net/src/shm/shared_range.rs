//! Memory of another process that others can map, too: a shared mapping of a file in memory (tmpfs, memfd, hugetlbfs).
//!
//! The process's `/proc/PID/maps` tells which file is mapped at which address. The file is opened by its name there, or
//! where it has none by the descriptor that the process still has. The kernel allows all of that to a process that may
//! copy from and to the other (ptrace(2), `PTRACE_MODE_READ`). The file's own rights are checked as well. Device and
//! inode tell whether it is the mapped file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};

use rustix::fs::fstatfs;

use super::memory::TMPFS;
use crate::Uncancelled;

const HUGETLBFS: u64 = 0x9584_58f6;

/// A file, and where in it a range of another process's memory lies.
#[derive(Debug)]
pub struct SharedRange {
    /// The file, opened to be read, and written if that was asked for.
    pub file: OwnedFd,
    /// The first byte.
    pub offset: u64,
}

/// A shared mapping, as a line of `/proc/PID/maps` has it.
#[derive(Debug, PartialEq, Eq)]
struct Mapped<'a> {
    start: u64,
    end: u64,
    writable: bool,
    offset: u64,
    device: (u32, u32),
    inode: u64,
    path: &'a str,
}

impl<'a> Mapped<'a> {
    /// None for a private mapping, and for one of no file.
    fn parse(line: &'a str) -> Option<Self> {
        let mut fields = line.splitn(6, ' ');
        let hex = |text: &str| u64::from_str_radix(text, 16).ok();
        let (start, end) = fields.next()?.split_once('-')?;
        let rights = fields.next()?.as_bytes();
        let offset = hex(fields.next()?)?;
        let (major, minor) = fields.next()?.split_once(':')?;
        let device = (u32::from_str_radix(major, 16).ok()?, u32::from_str_radix(minor, 16).ok()?);
        let inode = fields.next()?.parse().ok().filter(|inode| *inode != 0)?;
        if rights.first() != Some(&b'r') || rights.get(3) != Some(&b's') {
            return None;
        }
        let path = fields.next().unwrap_or("").trim_start();
        let writable = rights.get(1) == Some(&b'w');
        Some(Self { start: hex(start)?, end: hex(end)?, writable, offset, device, inode, path })
    }

    /// Opens the file that is mapped by this name, if it is that.
    fn open(&self, path: &str, write: bool) -> Option<OwnedFd> {
        // Memory is on no device.
        if self.device.0 != 0 {
            return None;
        }
        // Looked at before it is opened: a pipe or a device may do anything then, and a file of FUSE may wait.
        let found = OpenOptions::new().read(true).custom_flags(libc::O_PATH).open(path).ok()?;
        if !is_in_memory(&found) {
            return None;
        }
        let stat = found.metadata().ok()?;
        let device = (libc::major(stat.dev()), libc::minor(stat.dev()));
        if !stat.is_file() || stat.ino() != self.inode || device != self.device {
            return None;
        }
        let name = format!("/proc/self/fd/{}", found.as_raw_fd());
        let mut open = OpenOptions::new();
        // A lease of another process is not waited for.
        let file = open.read(true).write(write).custom_flags(libc::O_NONBLOCK).open(name).ok()?;
        Some(file.into())
    }
}

/// Tells whether a file is on no disk. Then only processes that have it mapped see writes to it.
fn is_in_memory(file: &File) -> bool {
    fstatfs(file).is_ok_and(|stat| [TMPFS, HUGETLBFS].contains(&(stat.f_type as u64)))
}

/// The file behind `len` bytes at `address` of process `pid`, which lie in one mapping.
pub(super) fn find(pid: i32, address: u64, len: u64, write: bool) -> Option<SharedRange> {
    let _uncancelled = Uncancelled::new();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let end = address.checked_add(len)?;
    let holds = |mapped: &Mapped<'_>| mapped.start <= address && end <= mapped.end;
    let mapped = maps.lines().filter_map(Mapped::parse).find(holds)?;
    if write && !mapped.writable {
        return None;
    }
    let file =
        by_name(pid, &mapped, write).or_else(|| by_descriptor(pid, &mapped, write).ok()?)?;
    Some(SharedRange { file, offset: mapped.offset.checked_add(address - mapped.start)? })
}

fn by_name(pid: i32, mapped: &Mapped<'_>, write: bool) -> Option<OwnedFd> {
    // Its own root, or the mapping itself, which takes privileges and finds removed files, too.
    let by_path = || {
        let path = mapped.path.strip_prefix('/')?;
        mapped.open(&format!("/proc/{pid}/root/{path}"), write)
    };
    let Mapped { start, end, .. } = mapped;
    by_path().or_else(|| mapped.open(&format!("/proc/{pid}/map_files/{start:x}-{end:x}"), write))
}

fn by_descriptor(pid: i32, mapped: &Mapped<'_>, write: bool) -> io::Result<Option<OwnedFd>> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        // Most are of other files. Their names tell, and no file system is asked.
        if let Some(path) = entry?.path().to_str()
            && fs::read_link(path).is_ok_and(|name| name.as_os_str() == mapped.path)
            && fs::metadata(path).is_ok_and(|stat| stat.ino() == mapped.inode)
            && let Some(file) = mapped.open(path, write)
        {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::memory::{Access, Area, Memory, SharedObject};
    use std::os::fd::AsFd;

    fn here(area: &Area) -> u64 {
        area.at(0, 1) as u64
    }

    #[test]
    fn lines_of_maps_are_read() {
        let line = "7f00-8f00 rw-s 00001000 00:1b 77                         /dev/shm/a file";
        let mapped = Mapped::parse(line).unwrap();
        assert_eq!((mapped.start, mapped.end, mapped.offset), (0x7f00, 0x8f00, 0x1000));
        assert_eq!((mapped.device, mapped.inode, mapped.writable), ((0, 0x1b), 77, true));
        assert_eq!(mapped.path, "/dev/shm/a file");
        assert!(!Mapped::parse(&line.replace("rw-s", "r--s")).unwrap().writable);
        for private in [line.replace("rw-s", "rw-p"), line.replace("rw-s", "---s")] {
            assert_eq!(Mapped::parse(&private), None);
        }
        assert_eq!(Mapped::parse("7f00-8f00 rw-p 00000000 00:00 0 "), None);
        assert_eq!(Mapped::parse(""), None);
    }

    #[test]
    fn unnamed_memory_is_found_by_its_descriptor() {
        let object = SharedObject::new(16384).unwrap();
        let area = Area::map(object.as_fd(), 16384, Access::ReadWrite).unwrap();
        let pid = std::process::id() as i32;
        let range = find(pid, here(&area) + 4096, 8192, true).unwrap();
        assert_eq!(range.offset, 4096);
        let again = Area::map(range.file.as_fd(), 16384, Access::ReadWrite).unwrap();
        again.write(5000, b"abc");
        let mut bytes = [0; 3];
        area.read(5000, &mut bytes);
        assert_eq!(&bytes, b"abc");
        assert!(find(pid, here(&area) + 4096, 16384, true).is_none(), "beyond its end");
        drop(object);
    }

    #[test]
    fn private_read_only_and_disk_mappings_are_not_found() {
        let pid = std::process::id() as i32;
        let private = vec![0u8; 8192];
        assert!(find(pid, private.as_ptr() as u64, 8192, false).is_none());
        let object = SharedObject::new(4096).unwrap();
        let area = Area::map(object.as_fd(), 4096, Access::ReadOnly).unwrap();
        assert!(find(pid, here(&area), 4096, true).is_none());
        assert!(find(pid, here(&area), 4096, false).is_some());
        let on_disk = File::open("/proc/self/exe").unwrap();
        let area = Area::map(on_disk.as_fd(), 4096, Access::ReadOnly).unwrap();
        assert!(find(pid, here(&area), 4096, false).is_none());
    }

    /// A lease makes an open of the file wait until its holder gives it up, or for 45 s.
    #[test]
    fn a_file_under_a_lease_is_not_waited_for() {
        let name = "shm::shared_range::tests::a_file_under_a_lease_is_not_waited_for";
        anyverbs_testing::in_own_process(name, || {
            let path = format!("/dev/shm/anyverbs-lease-{}", std::process::id());
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
            let Ok(file) = file else { return println!("skipped: no /dev/shm") };
            file.set_len(4096).unwrap();
            let fd = file.as_raw_fd();
            // SAFETY: nobody else in this process handles the signal; an open descriptor.
            let rc = unsafe {
                libc::signal(libc::SIGIO, libc::SIG_IGN);
                libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK)
            };
            let leased = if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
            let area = Area::map(file.as_fd(), 4096, Access::ReadWrite).unwrap();
            let begin = std::time::Instant::now();
            let found = find(std::process::id() as i32, here(&area), 4096, true);
            fs::remove_file(&path).unwrap();
            leased.unwrap();
            assert!(found.is_none());
            assert!(begin.elapsed() < std::time::Duration::from_secs(10), "{:?}", begin.elapsed());
        });
    }
}

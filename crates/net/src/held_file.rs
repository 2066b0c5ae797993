//! A memfd that processes of a registry hold together, and that exists as long as one of them does: nothing is in the file
//! system.
//!
//! Who joins says in the registry where it has it (`<registry>/<kind>/<pid>/<descriptor>/<inode>`), and who comes later opens
//! it there, through `/proc`: the kernel lets the same user do that, and needs no help of the other process, which may be
//! stopped. Processes that do not see each other in `/proc` have one each.

use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use crate::registry::{Lock, NameGuard, Registry};
use crate::sys::Uncancelled;

/// For others that join at the same time.
const LOCK_WAIT: Duration = Duration::from_millis(250);

/// The file of this kind that others of the registry have, or a `new` one, and the name by which it is found.
///
/// # Errors
/// `TimedOut` where another process does not get done; those of `new` and of bind(2).
pub(crate) fn join(
    registry: &Registry,
    kind: &str,
    lock: Lock,
    new: impl FnOnce() -> io::Result<File>,
) -> io::Result<(File, NameGuard)> {
    let _uncancelled = Uncancelled::new();
    let _lock = registry.lock(lock, LOCK_WAIT)?;
    let file = match find(registry, kind)? {
        Some(file) => file,
        None => new()?,
    };
    let place = Place {
        pid: std::process::id(),
        descriptor: file.as_raw_fd(),
        inode: file.metadata()?.ino(),
    };
    let name = registry.hold(&format!("{kind}/{place}"))?;
    Ok((file, name))
}

/// Reads up to the end of the file; how many bytes there were.
pub(crate) fn read_at(file: &File, at: u64, into: &mut [u8]) -> io::Result<usize> {
    let _uncancelled = Uncancelled::new();
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

/// The file of this kind that some process has.
pub(crate) fn find(registry: &Registry, kind: &str) -> io::Result<Option<File>> {
    let names = registry.names(kind)?.unwrap_or_default();
    let places = names.iter().filter_map(|(_, name)| Place::parse(name));
    Ok(places.into_iter().find_map(|place| place.open(registry.uid())))
}

/// Where a process has such a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    pid: u32,
    descriptor: i32,
    inode: u64,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.pid, self.descriptor, self.inode)
    }
}

impl Place {
    /// From what follows the kind in its name.
    fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('/');
        let place = Self {
            pid: parts.next()?.parse().ok()?,
            descriptor: parts.next()?.parse().ok()?,
            inode: parts.next()?.parse().ok()?,
        };
        parts.next().is_none().then_some(place)
    }

    /// Opens it, if it is there, and of this user: anybody may bind any name, and a process of another PID namespace has another number.
    fn open(self, uid: u32) -> Option<File> {
        let path = format!("/proc/{}/fd/{}", self.pid, self.descriptor);
        let is_it = |meta: &std::fs::Metadata| {
            let unlinked_file = meta.is_file() && meta.nlink() == 0;
            unlinked_file && meta.ino() == self.inode && meta.uid() == uid
        };
        // Looked at before: to open something else may do something.
        std::fs::metadata(&path).ok().filter(is_it)?;
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        file.metadata().ok().filter(is_it)?;
        Some(file)
    }
}

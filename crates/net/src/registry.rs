//! Process slots of a host, without a daemon and without files.
//!
//! A host is a network namespace. Its processes find each other through abstract Unix datagram sockets, whose names
//! live in the network namespace and vanish with the last process that holds them (unix(7)): `@<name>/<uid>/slot/<n>`.
//! Processes of different users never share names. Anybody can *bind* a name of ours and so take a slot away, but not
//! pretend to be us: each message carries its sender's credentials, and those of other users are ignored.
//!
//! A child that `fork`s without `exec` keeps its parent's slot alive; every descriptor here is close-on-exec.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use crate::sockopt;

/// The names of one user's processes in this network namespace.
#[derive(Clone, Debug)]
pub struct Registry {
    pub(crate) prefix: String,
    pub(crate) uid: u32,
}

/// Excludes the other processes of this user and host until it is dropped or its process ends.
#[derive(Debug)]
pub struct LockGuard {
    _socket: UnixDatagram,
}

/// A name that exists as long as this value or its process.
#[derive(Debug)]
pub(crate) struct NameGuard {
    _socket: UnixDatagram,
}

// A socket's address has 107 bytes for the longest name: this, a user id, and that of a service at an IPv6 address.
const NAME_LEN: usize = 32;

impl Registry {
    /// The registry called `name` of the effective user.
    ///
    /// # Errors
    /// `InvalidInput` when `name` is empty, longer than 32 bytes or contains a zero byte or a slash.
    pub fn new(name: &str) -> io::Result<Self> {
        if name.is_empty() || name.len() > NAME_LEN || name.contains(['\0', '/']) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "registry names have 1 to 32 bytes, none zero or /",
            ));
        }
        // SAFETY: geteuid has no preconditions and cannot fail.
        let uid = unsafe { libc::geteuid() };
        Ok(Self { prefix: format!("{name}/{uid}"), uid })
    }

    /// The user whose processes share this registry.
    #[must_use]
    pub fn uid(&self) -> u32 {
        self.uid
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Takes a name, of up to 64 bytes.
    pub(crate) fn hold(&self, name: &str) -> io::Result<NameGuard> {
        let socket = UnixDatagram::bind_addr(&self.address(format_args!("{name}"))?)?;
        Ok(NameGuard { _socket: socket })
    }

    fn address(&self, rest: std::fmt::Arguments<'_>) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(format!("{}/{rest}", self.prefix))
    }

    fn alive(&self, address: &SocketAddr) -> bool {
        // Connecting a datagram socket looks the name up and sends nothing.
        UnixDatagram::unbound().is_ok_and(|probe| probe.connect_addr(address).is_ok())
    }

    /// Whether some process holds slot `n`.
    #[must_use]
    pub fn is_alive(&self, n: u8) -> bool {
        n != 0 && self.address(format_args!("slot/{n}")).is_ok_and(|address| self.alive(&address))
    }

    /// All slots that some process holds, in ascending order. Takes some 255 system calls.
    #[must_use]
    pub fn live_slots(&self) -> Vec<u8> {
        self.bound(|n| self.address(format_args!("slot/{n}")))
    }

    /// The numbers of 1 to 255 whose name somebody has bound.
    fn bound(&self, address: impl Fn(u8) -> io::Result<SocketAddr>) -> Vec<u8> {
        let Ok(probe) = UnixDatagram::unbound() else {
            return Vec::new();
        };
        (1..=255)
            .filter(|&n| address(n).is_ok_and(|address| probe.connect_addr(&address).is_ok()))
            .collect()
    }

    /// Takes the lock of this registry, if it is free.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2), but a lock that another holds is `Ok(None)`.
    pub fn try_lock(&self) -> io::Result<Option<LockGuard>> {
        match UnixDatagram::bind_addr(&self.address(format_args!("lock"))?) {
            Ok(socket) => Ok(Some(LockGuard { _socket: socket })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes the lock of this registry, waiting up to `timeout` for its holder.
    ///
    /// # Errors
    /// `TimedOut`, and those of [`Registry::try_lock`].
    pub fn lock(&self, timeout: Duration) -> io::Result<LockGuard> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(guard) = self.try_lock()? {
                return Ok(guard);
            }
            if Instant::now() >= deadline {
                return Err(io::Error::new(
                    io::ErrorKind::TimedOut,
                    "the registry's lock is held by another process",
                ));
            }
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Announces that the owner of `slot` has `port` open.
    pub(crate) fn announce(&self, port: u16, slot: u8) -> io::Result<NameGuard> {
        self.hold(&format!("port/{port}/{slot}"))
    }

    /// The slots whose owners have announced `port`.
    pub(crate) fn announced(&self, port: u16) -> Vec<u8> {
        self.bound(|n| self.address(format_args!("port/{port}/{n}")))
    }

    /// As [`Registry::announced`], in the order of announcing: socket inodes are numbered upwards (proc_net(5), unix).
    pub(crate) fn announced_in_order(&self, port: u16) -> Vec<u8> {
        let mut found = self.inodes(&format!("port/{port}"));
        found.sort_unstable();
        found.into_iter().map(|(_, slot)| slot).collect()
    }

    /// All slots that some process holds, each with a number that its next owner will not have. Without `/proc` the number
    /// is always 0.
    #[must_use]
    pub fn incarnations(&self) -> HashMap<u8, u64> {
        let found = self.inodes("slot");
        if found.is_empty() {
            return self.live_slots().into_iter().map(|slot| (slot, 0)).collect();
        }
        found.into_iter().map(|(inode, slot)| (slot, inode)).collect()
    }

    /// The names `<kind>/<slot>` that are bound, by the inodes of their sockets.
    fn inodes(&self, kind: &str) -> Vec<(u64, u8)> {
        let prefix = format!("@{}/{kind}/", self.prefix);
        let table = std::fs::read_to_string("/proc/thread-self/net/unix").unwrap_or_default();
        table
            .lines()
            .filter_map(|line| {
                let mut fields = line.split_ascii_whitespace().skip(6);
                let inode = fields.next()?.parse().ok()?;
                let slot = fields.next()?.strip_prefix(&prefix)?.parse().ok()?;
                Some((inode, slot))
            })
            .collect()
    }

    /// Whether the owner of `slot` has announced `port`.
    pub(crate) fn has_port(&self, port: u16, slot: u8) -> bool {
        self.address(format_args!("port/{port}/{slot}")).is_ok_and(|address| self.alive(&address))
    }
}

/// One process's place on the host: a number from 1 to 255, freed when the process ends.
///
/// Its socket is where other processes of the user hand datagrams on to ([`crate::forward`]).
#[derive(Debug)]
pub struct Slot {
    registry: Registry,
    number: u8,
    socket: UnixDatagram,
}

impl Slot {
    /// Takes a free slot of the registry called `name`, searching from a random place so that a slot is not reused at
    /// once after its owner's death. Slot 0 is never given out.
    ///
    /// # Errors
    /// `InvalidInput` for a bad name, `AddrInUse` when all 255 slots are taken, and those of socket(2).
    pub fn claim(name: &str) -> io::Result<Self> {
        Self::claim_in(&Registry::new(name)?)
    }

    /// As [`Slot::claim`], in a registry that the caller has.
    ///
    /// # Errors
    /// See [`Slot::claim`].
    pub fn claim_in(registry: &Registry) -> io::Result<Self> {
        let start = (random_u64() % 255) as u16;
        for i in 0..255 {
            let number = ((start + i) % 255 + 1) as u8;
            match Self::claim_number(registry, number) {
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                result => return result,
            }
        }
        Err(io::Error::new(
            io::ErrorKind::AddrInUse,
            "all 255 process slots of this host are taken",
        ))
    }

    /// Takes slot `number`.
    ///
    /// # Errors
    /// `AddrInUse` when it is taken, `InvalidInput` for 0, and those of socket(2).
    pub fn claim_number(registry: &Registry, number: u8) -> io::Result<Self> {
        if number == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "slot 0 is reserved"));
        }
        let socket = UnixDatagram::bind_addr(&registry.address(format_args!("slot/{number}"))?)?;
        socket.set_nonblocking(true)?;
        sockopt::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_PASSCRED, 1)?;
        Ok(Self { registry: registry.clone(), number, socket })
    }

    /// This process's number, 1 to 255.
    #[must_use]
    pub fn number(&self) -> u8 {
        self.number
    }

    /// The registry that this slot belongs to.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// Whether some process holds slot `n`. A snapshot: it may end at any time.
    #[must_use]
    pub fn is_alive(&self, n: u8) -> bool {
        n == self.number || self.registry.is_alive(n)
    }
}

impl AsFd for Slot {
    /// Readable when a datagram was handed on to this process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// A random number, from the seed that the standard library takes from the system.
pub(crate) fn random_u64() -> u64 {
    RandomState::new().hash_one(Instant::now())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn registry(test: &str) -> Registry {
        Registry::new(&format!("anyverbs-test-{test}-{}", std::process::id())).unwrap()
    }

    #[test]
    fn slots_are_distinct_and_freed_by_drop() {
        let registry = registry("slots");
        let slots: Vec<_> = (0..255).map(|_| Slot::claim_in(&registry).unwrap()).collect();
        assert_eq!(registry.live_slots(), (1..=255).collect::<Vec<u8>>());
        assert_eq!(Slot::claim_in(&registry).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(!registry.is_alive(0));
        drop(slots);
        assert_eq!(registry.live_slots(), [] as [u8; 0]);
        assert_eq!(
            Slot::claim_number(&registry, 0).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    #[test]
    fn the_next_owner_of_a_slot_is_another() {
        let registry = registry("incarnations");
        let slots = [3, 7].map(|n| Slot::claim_number(&registry, n).unwrap());
        let before = registry.incarnations();
        assert_eq!(before.len(), 2);
        assert_eq!(before, registry.incarnations());
        drop(slots);
        assert_eq!(registry.incarnations(), HashMap::new());
        let _again = Slot::claim_number(&registry, 3).unwrap();
        let after = registry.incarnations();
        assert_eq!(after.len(), 1);
        assert_ne!(after[&3], before[&3]);
    }

    #[test]
    fn slots_begin_at_random_places() {
        let registry = registry("random");
        let numbers: std::collections::BTreeSet<u8> =
            (0..40).map(|_| Slot::claim_in(&registry).unwrap().number()).collect();
        assert!(numbers.len() > 5, "{numbers:?}");
    }

    #[test]
    fn the_lock_excludes_and_waiting_is_bounded() {
        let registry = registry("lock");
        let guard = registry.lock(Duration::ZERO).unwrap();
        assert!(registry.try_lock().unwrap().is_none());
        let begin = Instant::now();
        assert_eq!(
            registry.lock(Duration::from_millis(20)).unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert!(begin.elapsed() >= Duration::from_millis(20));
        drop(guard);
        registry.lock(Duration::ZERO).unwrap();
    }

    #[test]
    fn bad_names_are_refused() {
        for name in ["", "a/b", "a\0b", &"x".repeat(33)] {
            assert_eq!(
                Registry::new(name).unwrap_err().kind(),
                io::ErrorKind::InvalidInput,
                "{name:?}"
            );
        }
    }

    #[test]
    fn descriptors_are_close_on_exec_and_nonblocking() {
        use std::os::fd::AsRawFd;
        let slot = Slot::claim_in(&registry("cloexec")).unwrap();
        let fd = slot.as_fd().as_raw_fd();
        // SAFETY: fcntl with F_GETFD and F_GETFL only reads flags of an open fd.
        let (fd_flags, flags) =
            unsafe { (libc::fcntl(fd, libc::F_GETFD), libc::fcntl(fd, libc::F_GETFL)) };
        assert_ne!(fd_flags & libc::FD_CLOEXEC, 0);
        assert_ne!(flags & libc::O_NONBLOCK, 0);
    }
}

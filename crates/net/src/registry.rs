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
use crate::sys::Uncancelled;

/// The names of one user's processes in this network namespace.
#[derive(Clone, Debug)]
pub struct Registry {
    pub(crate) prefix: String,
    pub(crate) uid: u32,
}

/// What a lock of a registry is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// The order of the sockets of a port; held for as long as it takes to ask all processes.
    Steering,
    /// Who has an XRC domain, or goes on with a target: held for some system calls.
    Xrc,
    /// Who makes the journal: held for some system calls.
    Journal,
    /// Who makes a [shared table](crate::shared_table): held for some system calls.
    Table,
}

impl Lock {
    fn name(self) -> &'static str {
        match self {
            Self::Steering => "lock",
            Self::Xrc => "lock/xrc",
            Self::Journal => "lock/journal",
            Self::Table => "lock/table",
        }
    }
}

/// Excludes the other processes of this user and host until it is dropped or its process ends.
#[derive(Debug)]
pub struct LockGuard {
    _socket: UnixDatagram,
}

/// A name that exists as long as this value or its process.
#[derive(Debug)]
pub struct NameGuard {
    _socket: UnixDatagram,
}

// A socket's address has 107 bytes for the longest name: this, a user id, and that of a service at an IPv6 address.
const NAME_LEN: usize = 32;
/// The type of a datagram socket in /proc/net/unix.
const DATAGRAM: &str = "0002";

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

    /// Says that the owner of `slot` shares in what `name` names, of up to 56 bytes.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2).
    pub fn share(&self, name: &str, slot: u8) -> io::Result<NameGuard> {
        let _uncancelled = Uncancelled::new();
        self.hold(&format!("{name}/{slot}"))
    }

    /// The slots whose owners share in what `name` names.
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn sharers(&self, name: &str) -> io::Result<Vec<u8>> {
        let _uncancelled = Uncancelled::new();
        bound(&UnixDatagram::unbound()?, |n| self.address(format_args!("{name}/{n}")))
    }

    fn address(&self, rest: std::fmt::Arguments<'_>) -> io::Result<SocketAddr> {
        SocketAddr::from_abstract_name(format!("{}/{rest}", self.prefix))
    }

    /// Whether some process holds slot `n`.
    ///
    /// # Errors
    /// Those of socket(2): without a descriptor nobody knows.
    pub fn is_alive(&self, n: u8) -> io::Result<bool> {
        self.is_alive_by(&UnixDatagram::unbound()?, n)
    }

    /// As [`is_alive`](Self::is_alive), with a socket that the caller has.
    pub(crate) fn is_alive_by(&self, probe: &UnixDatagram, n: u8) -> io::Result<bool> {
        Ok(n != 0 && is_bound(probe, &self.address(format_args!("slot/{n}"))?)?)
    }

    /// All slots that some process holds, in ascending order. Takes some 255 system calls.
    ///
    /// # Errors
    /// Those of socket(2).
    pub fn live_slots(&self) -> io::Result<Vec<u8>> {
        self.live_slots_by(&UnixDatagram::unbound()?)
    }

    /// As [`live_slots`](Self::live_slots), with a socket that the caller has.
    pub(crate) fn live_slots_by(&self, probe: &UnixDatagram) -> io::Result<Vec<u8>> {
        bound(probe, |n| self.address(format_args!("slot/{n}")))
    }

    /// Takes a lock of this registry, if it is free.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2), but a lock that another holds is `Ok(None)`.
    pub fn try_lock(&self, lock: Lock) -> io::Result<Option<LockGuard>> {
        match UnixDatagram::bind_addr(&self.address(format_args!("{}", lock.name()))?) {
            Ok(socket) => Ok(Some(LockGuard { _socket: socket })),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes a lock of this registry, waiting up to `timeout` for its holder.
    ///
    /// # Errors
    /// `TimedOut`, and those of [`Registry::try_lock`].
    pub fn lock(&self, lock: Lock, timeout: Duration) -> io::Result<LockGuard> {
        let _uncancelled = Uncancelled::new();
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(guard) = self.try_lock(lock)? {
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
    pub(crate) fn announced(&self, port: u16) -> io::Result<Vec<u8>> {
        bound(&UnixDatagram::unbound()?, |n| self.address(format_args!("port/{port}/{n}")))
    }

    /// As [`Registry::announced`], in the order of announcing: socket inodes are numbered upwards (proc_net(5), unix).
    pub(crate) fn announced_in_order(&self, port: u16) -> Vec<u8> {
        let mut found = self.inodes(&format!("port/{port}")).unwrap_or_default();
        found.sort_unstable();
        found.into_iter().map(|(_, slot)| slot).collect()
    }

    /// Slots that processes hold, each with a number that its next owner will not have, or 0 without `/proc`. The kernel gives
    /// the list in pieces, so that one may be missing while others end: [`is_alive`](Self::is_alive) knows.
    ///
    /// # Errors
    /// Those of open(2), read(2) and socket(2).
    pub fn incarnations(&self) -> io::Result<HashMap<u8, u64>> {
        let found = self.inodes("slot")?;
        if found.is_empty() {
            return Ok(self.live_slots()?.into_iter().map(|slot| (slot, 0)).collect());
        }
        Ok(found.into_iter().map(|(inode, slot)| (slot, inode)).collect())
    }

    /// All names `<kind>/<name>` that processes share ([`share`](Self::share)), with the slot of one of those. Without `/proc`
    /// only that of `wanted` is looked for.
    ///
    /// # Errors
    /// Those of open(2), read(2) and socket(2).
    pub fn shared_names(&self, kind: &str, wanted: &str) -> io::Result<Vec<(String, u8)>> {
        let _uncancelled = Uncancelled::new();
        let Some(names) = self.names(kind)? else {
            let sharers = self.sharers(&format!("{kind}/{wanted}"))?;
            return Ok(sharers
                .first()
                .map(|slot| (wanted.to_owned(), *slot))
                .into_iter()
                .collect());
        };
        let found = names.into_iter().filter_map(|(_, name)| {
            let (name, slot) = name.rsplit_once('/')?;
            Some((name.to_owned(), slot.parse().ok()?))
        });
        Ok(found.collect())
    }

    /// The names `<kind>/<slot>` that are bound, by the inodes of their sockets; none without `/proc`.
    fn inodes(&self, kind: &str) -> io::Result<Vec<(u64, u8)>> {
        let names = self.names(kind)?.unwrap_or_default();
        Ok(names.into_iter().filter_map(|(inode, n)| Some((inode, n.parse().ok()?))).collect())
    }

    /// What follows `<kind>/` in names that are bound, by the inodes of their sockets; `None` without `/proc`.
    pub(crate) fn names(&self, kind: &str) -> io::Result<Option<Vec<(u64, String)>>> {
        let prefix = format!("@{}/{kind}/", self.prefix);
        let table = match std::fs::read("/proc/thread-self/net/unix") {
            Ok(table) => table,
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied
                ) =>
            {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        // Others' names may be any bytes.
        let table = String::from_utf8_lossy(&table);
        let found = table.lines().filter_map(|line| {
            let mut fields = line.split_ascii_whitespace().skip(4);
            // Names of streams are names of their own, which anybody may bind.
            let is_ours = fields.next()? == DATAGRAM;
            let inode = fields.nth(1)?.parse().ok()?;
            let name = fields.next()?.strip_prefix(&prefix)?.to_owned();
            is_ours.then_some((inode, name))
        });
        Ok(Some(found.collect()))
    }

    /// Whether the owner of `slot` has announced `port`.
    pub(crate) fn has_port(&self, port: u16, slot: u8) -> io::Result<bool> {
        let address = self.address(format_args!("port/{port}/{slot}"))?;
        is_bound(&UnixDatagram::unbound()?, &address)
    }
}

/// Whether a datagram socket has a name. Errors are those that say nothing about it.
pub(crate) fn is_bound(probe: &UnixDatagram, address: &SocketAddr) -> io::Result<bool> {
    // Connecting a datagram socket looks the name up and sends nothing.
    match probe.connect_addr(address) {
        Ok(()) => Ok(true),
        Err(error) => match error.raw_os_error() {
            // There is none, or one that is connected to another: no slot's.
            Some(libc::ECONNREFUSED | libc::EPERM | libc::EPROTOTYPE) => Ok(false),
            _ => Err(error),
        },
    }
}

/// The numbers of 1 to 255 whose name somebody has bound.
fn bound(
    probe: &UnixDatagram,
    address: impl Fn(u8) -> io::Result<SocketAddr>,
) -> io::Result<Vec<u8>> {
    let mut found = Vec::new();
    for n in 1..=255 {
        if is_bound(probe, &address(n)?)? {
            found.push(n);
        }
    }
    Ok(found)
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
    /// `AddrInUse` when it is taken, or others hold what its last owner left; `InvalidInput` for 0, and those of socket(2).
    pub fn claim_number(registry: &Registry, number: u8) -> io::Result<Self> {
        if number == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "slot 0 is reserved"));
        }
        let socket = UnixDatagram::bind_addr(&registry.address(format_args!("slot/{number}"))?)?;
        if !registry.sharers(&standbys(number))?.is_empty() {
            return Err(io::ErrorKind::AddrInUse.into());
        }
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
    ///
    /// # Errors
    /// See [`Registry::is_alive`].
    pub fn is_alive(&self, n: u8) -> io::Result<bool> {
        Ok(n == self.number || self.registry.is_alive(n)?)
    }
}

impl AsFd for Slot {
    /// Readable when a datagram was handed on to this process.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The name that those share who hold something of the owner of a slot, and go on with it when that one has ended: the slot is
/// not given out meanwhile.
#[must_use]
pub fn standbys(slot: u8) -> String {
    format!("standby/{slot}")
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
        assert_eq!(registry.live_slots().unwrap(), (1..=255).collect::<Vec<u8>>());
        assert_eq!(Slot::claim_in(&registry).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert!(!registry.is_alive(0).unwrap());
        drop(slots);
        assert_eq!(registry.live_slots().unwrap(), [] as [u8; 0]);
        assert_eq!(
            Slot::claim_number(&registry, 0).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
    }

    #[test]
    fn the_next_owner_of_a_slot_is_another() {
        let registry = registry("incarnations");
        let slots = [3, 7].map(|n| Slot::claim_number(&registry, n).unwrap());
        let before = registry.incarnations().unwrap();
        assert_eq!(before.len(), 2);
        assert_eq!(before, registry.incarnations().unwrap());
        drop(slots);
        assert_eq!(registry.incarnations().unwrap(), HashMap::new());
        let _again = Slot::claim_number(&registry, 3).unwrap();
        // A stream's name is another.
        let name = SocketAddr::from_abstract_name(format!("{}/slot/5", registry.prefix)).unwrap();
        let _stream = std::os::unix::net::UnixListener::bind_addr(&name).unwrap();
        let after = registry.incarnations().unwrap();
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
        let guard = registry.lock(Lock::Steering, Duration::ZERO).unwrap();
        assert!(registry.try_lock(Lock::Steering).unwrap().is_none());
        registry.lock(Lock::Xrc, Duration::ZERO).unwrap();
        let begin = Instant::now();
        assert_eq!(
            registry.lock(Lock::Steering, Duration::from_millis(20)).unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
        assert!(begin.elapsed() >= Duration::from_millis(20));
        drop(guard);
        registry.lock(Lock::Steering, Duration::ZERO).unwrap();
    }

    #[test]
    fn a_slot_whose_owner_has_standbys_is_not_given_out() {
        let registry = registry("standby");
        let owner = Slot::claim_number(&registry, 9).unwrap();
        let successor = registry.share(&standbys(9), 3).unwrap();
        assert_eq!(registry.sharers(&standbys(9)).unwrap(), [3]);
        drop(owner);
        assert_eq!(Slot::claim_number(&registry, 9).unwrap_err().kind(), io::ErrorKind::AddrInUse);
        assert_eq!(registry.shared_names("standby", "9").unwrap(), [("9".to_owned(), 3)]);
        drop(successor);
        Slot::claim_number(&registry, 9).unwrap();
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

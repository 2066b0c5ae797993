//! Names by which processes find each other. This is the one way in: both sides of a connection are asked for their
//! identity.
//!
//! Any process may bind an abstract name, so a name proves nothing. The kernel tells the identity of the listener
//! before a byte is sent (`SO_PEERCRED`, unix(7)), and that of the connecting process before a byte is read. It
//! translates the number of the user into the reader's user namespace.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::process::geteuid;
use socket2::{Domain, SockAddr, Socket, Type};

use crate::sockopt::credentials;
use crate::sys::{self, Uncancelled};

/// A socket's address has 107 bytes for the longest name.
const NAME_LEN: usize = 32;
/// The kernel's number for users that a user namespace does not know.
const OVERFLOW_UID: u32 = 65_534;
/// Connections that wait to be accepted; the system may allow fewer.
const BACKLOG: i32 = 4096;

/// The names by which the processes of one user that share a UDP port find each other in this network namespace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registry {
    prefix: String,
    /// With `None` no other process is trusted.
    uid: Option<u32>,
}

/// The purpose of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Name {
    /// The owner of a slot. It gets forwarded datagrams and requests for the store.
    Slot(u8),
    /// The same for channels in shared memory.
    Channels(u8),
    /// The same for messages.
    Messages(u8),
    /// A process that has the store without a slot.
    Keeper(u8),
    /// A process that is starting.
    Start,
}

impl Registry {
    /// The registry called `name`, of the effective user.
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
        Ok(Self { prefix: name.to_owned(), uid: own_uid() })
    }

    /// The registry of the processes that share a UDP port. The kernel lets only one user share it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn of_port(name: &str, port: u16) -> io::Result<Self> {
        let Self { prefix, uid } = Self::new(name)?;
        Ok(Self { prefix: format!("{prefix}/{port}"), uid })
    }

    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(super) fn is_own_user(&self, uid: u32) -> bool {
        self.uid == Some(uid)
    }

    fn text(&self, name: Name) -> String {
        let prefix = &self.prefix;
        match name {
            Name::Slot(n) => format!("{prefix}/{n}"),
            Name::Channels(n) => format!("{prefix}/shm/{n}"),
            Name::Messages(n) => format!("{prefix}/messages/{n}"),
            Name::Keeper(n) => format!("{prefix}/keeper/{n}"),
            Name::Start => format!("{prefix}/start"),
        }
    }

    fn address(&self, name: Name) -> io::Result<SockAddr> {
        // A name that begins with a zero byte is an abstract one.
        SockAddr::unix(format!("\0{}", self.text(name)))
    }

    /// Listens; non-blocking.
    ///
    /// # Errors
    /// `AddrInUse` if the name is taken; those of socket(2).
    pub(crate) fn listen(&self, name: Name) -> io::Result<Socket> {
        let listener = socket()?;
        listener.bind(&self.address(name)?)?;
        listener.listen(BACKLOG)?;
        Ok(listener)
    }

    /// Connects to a process of this user, which need not have accepted it. Non-blocking.
    ///
    /// # Errors
    /// `ConnectionRefused` if no process listens, `PermissionDenied` if the listener is another user's, `WouldBlock` if
    /// too many wait to be accepted, and those of socket(2).
    pub(crate) fn connect(&self, name: Name) -> io::Result<(Socket, libc::ucred)> {
        let _uncancelled = Uncancelled::new();
        let socket = socket()?;
        socket.connect(&self.address(name)?)?;
        let who = self.check(socket.as_fd()).map_err(|error| {
            io::Error::new(error.kind(), format!("the name @{}: {error}", self.text(name)))
        })?;
        Ok((socket, who))
    }

    /// Accepts one connection, non-blocking; `PermissionDenied` for one of another user, which is closed unread.
    pub(crate) fn accept(&self, listener: &Socket) -> io::Result<Socket> {
        let _uncancelled = Uncancelled::new();
        let (socket, _) = listener.accept()?;
        let socket = Socket::from(sys::above_standard_streams(socket.into())?);
        self.check(socket.as_fd())?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    }

    /// The identity of the process at the other end, if it is this user's.
    fn check(&self, socket: BorrowedFd<'_>) -> io::Result<libc::ucred> {
        let who = credentials(socket)?;
        if self.is_own_user(who.uid) {
            return Ok(who);
        }
        let libc::ucred { uid, pid, .. } = who;
        Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("it belongs to user {uid} (process {pid})"),
        ))
    }

    /// The reason why a name cannot be bound, for people.
    pub(crate) fn holder(&self, name: Name) -> String {
        match self.connect(name) {
            Ok((_, who)) => format!("process {} of this user has it", who.pid),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => error.to_string(),
            Err(_) => format!("somebody has bound @{} and does not listen", self.text(name)),
        }
    }
}

fn socket() -> io::Result<Socket> {
    let socket = Socket::new(Domain::UNIX, Type::SEQPACKET.nonblocking(), None)?;
    Ok(sys::above_standard_streams(socket.into())?.into())
}

/// The effective user; none where strangers could have the same number, in a user namespace that does not know them.
fn own_uid() -> Option<u32> {
    let uid = geteuid().as_raw();
    let knows_all = || {
        let map = std::fs::read_to_string("/proc/self/uid_map").ok()?;
        let words: Vec<&str> = map.split_ascii_whitespace().collect();
        Some(words == ["0", "0", "4294967295"])
    };
    (uid != OVERFLOW_UID || knows_all() == Some(true)).then_some(uid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_names_are_refused() {
        for name in ["", "a/b", "a\0b", &"x".repeat(33)] {
            let error = Registry::new(name).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
    }

    /// Runs `test` in a forked child, after `prepare`, which may fail. None then.
    fn in_child(prepare: impl Fn() -> i32, test: impl Fn() -> bool) -> Option<bool> {
        // SAFETY: the child of a process with one test ends without returning to the harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = if prepare() != 0 { 2 } else { i32::from(!test()) };
            // SAFETY: ends this process.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        // SAFETY: waits for our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        (status >> 8 != 2).then_some(status == 0)
    }

    /// All users that a namespace does not know have one number there, and are not one user.
    #[test]
    fn a_user_that_the_namespace_does_not_know_trusts_nobody() {
        let name = "host::name::tests::a_user_that_the_namespace_does_not_know_trusts_nobody";
        anyverbs_testing::in_own_process(name, || {
            let uid = || Registry::new("whoever").unwrap().uid;
            assert_eq!(uid(), Some(geteuid().as_raw()));
            // SAFETY: they change the child's own user alone.
            let unknown = || unsafe { libc::unshare(libc::CLONE_NEWUSER) };
            // SAFETY: as before.
            let nobody = || unsafe { libc::setresuid(OVERFLOW_UID, OVERFLOW_UID, OVERFLOW_UID) };
            for (prepare, wanted) in
                [(&unknown as &dyn Fn() -> i32, None), (&nobody, Some(OVERFLOW_UID))]
            {
                match in_child(prepare, || uid() == wanted) {
                    Some(right) => assert!(right, "{wanted:?}"),
                    None => anyverbs_testing::skip("this user may not become another one"),
                }
            }
        });
    }

    #[test]
    fn both_ends_are_asked_who_they_are() {
        let name = format!("av-name-{}", std::process::id());
        let registry = Registry::new(&name).unwrap();
        let stranger = Registry { uid: registry.uid.map(|uid| uid + 1), ..registry.clone() };
        let kind = |result: io::Result<_>| result.map(drop).unwrap_err().kind();
        assert_eq!(
            kind(registry.connect(Name::Slot(7)).map(drop)),
            io::ErrorKind::ConnectionRefused
        );
        let listener = registry.listen(Name::Slot(7)).unwrap();
        assert_eq!(kind(registry.listen(Name::Slot(7)).map(drop)), io::ErrorKind::AddrInUse);
        let error = stranger.connect(Name::Slot(7)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert!(
            error.to_string().contains(&format!("(process {})", std::process::id())),
            "{error}"
        );
        let (_socket, who) = registry.connect(Name::Slot(7)).unwrap();
        assert_eq!(who.pid, std::process::id() as i32);
        // Two connections wait here. The stranger's view refuses one, and our own view takes the other.
        assert_eq!(kind(stranger.accept(&listener).map(drop)), io::ErrorKind::PermissionDenied);
        let accepted = registry.accept(&listener).unwrap();
        assert!(accepted.nonblocking().unwrap());
        assert_eq!(kind(registry.accept(&listener).map(drop)), io::ErrorKind::WouldBlock);
    }
}

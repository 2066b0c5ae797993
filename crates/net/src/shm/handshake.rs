//! The handshake of two processes that make a channel: one message each way over a `SOCK_SEQPACKET` socket, with
//! descriptors (`SCM_RIGHTS`).
//!
//! Little-endian: magic 8 | version 4 | status 4 | ring 8 | max payload 8 | page 8 | proof address 8 | proof value 8 |
//! index 4 | slot 1 | 3 zero | published 8.

use std::ffi::c_void;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use super::layout::{RING_SIZES, VERSION, page};
use super::published::MAX_PUBLISHED;
use crate::cmsg::{self, ControlBuffer};
use crate::sys;

const MAGIC: u64 = u64::from_le_bytes(*b"avb-shm\0");
const LEN: usize = 72;
/// Most descriptors of a message.
const MAX_FDS: usize = 5;

/// The answer to a hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ok,
    /// It is of another version or layout.
    Version,
    /// Too many channels, or no descriptor or memory for one.
    Full,
    /// This version does not send such a message, or the slot belongs to another process.
    Nonsense,
}

impl Status {
    const ALL: [Self; 4] = [Self::Ok, Self::Version, Self::Full, Self::Nonsense];
}

/// A hello or the answer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Greeting {
    pub(crate) status: Status,
    /// Bytes of each of the two rings.
    pub(crate) ring: usize,
    pub(crate) max_payload: usize,
    /// The address of a word in the sender's memory, and its value. A process that can read it by cross-process copy
    /// has found the right process, and has the kernel's permission.
    pub(crate) proof: ProofWord,
    /// The number of the ring at its reader, the sender.
    pub(crate) index: u32,
    pub(crate) slot: u8,
    /// Bytes of the sender's published memory.
    pub(crate) published: usize,
}

/// A word in a process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProofWord {
    pub(crate) address: u64,
    pub(crate) value: u64,
}

impl Greeting {
    pub(crate) fn emit(&self) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let mut rest = &mut bytes[..];
        let mut put = |field: &[u8]| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(field.len());
            head.copy_from_slice(field);
            rest = tail;
        };
        put(&MAGIC.to_le_bytes());
        put(&VERSION.to_le_bytes());
        put(&(self.status as u32).to_le_bytes());
        put(&(self.ring as u64).to_le_bytes());
        put(&(self.max_payload as u64).to_le_bytes());
        put(&(page() as u64).to_le_bytes());
        put(&self.proof.address.to_le_bytes());
        put(&self.proof.value.to_le_bytes());
        put(&self.index.to_le_bytes());
        put(&[self.slot, 0, 0, 0]);
        put(&(self.published as u64).to_le_bytes());
        bytes
    }

    /// Reads a greeting. Gives the status to answer if it is none of this version.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Status> {
        let (words, []) = bytes.as_chunks::<8>() else { return Err(Status::Nonsense) };
        // In front of every version's, so that others can be told from nonsense.
        let [magic, versions, ..] = words else { return Err(Status::Nonsense) };
        if u64::from_le_bytes(*magic) != MAGIC {
            return Err(Status::Nonsense);
        }
        let [version, status] = halves(*versions);
        if version != VERSION {
            return Err(Status::Version);
        }
        let &[_, _, ring, max_payload, page_len, address, value, last, published] = words else {
            return Err(Status::Nonsense);
        };
        let size = |bytes| usize::try_from(u64::from_le_bytes(bytes)).unwrap_or(usize::MAX);
        let (ring, max_payload) = (size(ring), size(max_payload));
        let published = size(published);
        if size(page_len) != page() {
            return Err(Status::Version);
        }
        let [index, slot] = halves(last);
        let status = Status::ALL.into_iter().find(|&s| s as u32 == status);
        match (status, u8::try_from(slot)) {
            (Some(status), Ok(slot))
                if slot != 0
                    && is_valid_ring(ring, max_payload)
                    && is_valid_published(published) =>
            {
                let proof = ProofWord {
                    address: u64::from_le_bytes(address),
                    value: u64::from_le_bytes(value),
                };
                Ok(Self { status, ring, max_payload, proof, index, slot, published })
            }
            _ => Err(Status::Nonsense),
        }
    }
}

fn halves(bytes: [u8; 8]) -> [u32; 2] {
    let word = u64::from_le_bytes(bytes);
    [word as u32, (word >> 32) as u32]
}

/// Whether rings of this size can carry such payloads at any position.
pub(crate) fn is_valid_ring(ring: usize, max_payload: usize) -> bool {
    RING_SIZES.contains(&ring) && ring.is_power_of_two() && max_payload <= ring / 4
}

/// Whether published memory may have this size.
fn is_valid_published(len: usize) -> bool {
    (1..=MAX_PUBLISHED).contains(&len) && len.is_multiple_of(page())
}

/// Sends one message with descriptors, at once or not at all.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8; LEN],
    fds: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut control = ControlBuffer::new();
    let mut writer = cmsg::Writer::new(&mut control);
    let raw = |i: usize| fds[i].as_raw_fd();
    match fds.len() {
        0 => {}
        4 => writer.push(libc::SOL_SOCKET, libc::SCM_RIGHTS, [raw(0), raw(1), raw(2), raw(3)]),
        5 => {
            let fds = [raw(0), raw(1), raw(2), raw(3), raw(4)];
            writer.push(libc::SOL_SOCKET, libc::SCM_RIGHTS, fds);
        }
        _ => return Err(io::ErrorKind::InvalidInput.into()),
    }
    let control_len = writer.len();
    let mut iov =
        libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast::<c_void>(), iov_len: LEN };
    // SAFETY: integers and pointers, for which zero is valid.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if control_len > 0 {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control_len as _;
    }
    // SAFETY: the header describes live buffers, which the kernel only reads.
    let n = unsafe {
        sys::sendmsg(
            socket.as_raw_fd(),
            &raw const message,
            libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
        )
    };
    if n < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// A received message and its descriptors.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) greeting: Result<Greeting, Status>,
    pub(crate) fds: Vec<OwnedFd>,
}

/// Receives one message: `None` when the peer is gone.
///
/// # Errors
/// `WouldBlock` when there is none yet.
pub(crate) fn receive(socket: BorrowedFd<'_>) -> io::Result<Option<Received>> {
    let mut bytes = [0u8; LEN + 8];
    let mut control = ControlBuffer::new();
    let mut iov =
        libc::iovec { iov_base: bytes.as_mut_ptr().cast::<c_void>(), iov_len: bytes.len() };
    // SAFETY: integers and pointers, for which zero is valid.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header describes live buffers with their sizes.
    let n = unsafe { sys::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let n = usize::try_from(n).map_err(|_| io::Error::last_os_error())?;
    let mut fds = Vec::new();
    for m in cmsg::messages(&control, message.msg_controllen) {
        if (m.level, m.kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: the kernel made these descriptors for us, and they are named only here.
            let own = m.integers().map(|fd: RawFd| unsafe { OwnedFd::from_raw_fd(fd) });
            // Without a place for one it is as if fewer had come.
            fds.extend(own.filter_map(|fd| sys::above_standard_streams(fd).ok()));
        }
    }
    if n == 0 {
        return Ok(None);
    }
    let has = |flag| message.msg_flags & flag != 0;
    let greeting = match bytes.get(..n) {
        Some(bytes) if !has(libc::MSG_TRUNC) && fds.len() <= MAX_FDS => Greeting::parse(bytes),
        _ => Err(Status::Nonsense),
    };
    // The kernel gave fewer descriptors than were sent: this process has no place for more.
    let greeting =
        greeting.and_then(|g| if has(libc::MSG_CTRUNC) { Err(Status::Full) } else { Ok(g) });
    Ok(Some(Received { greeting, fds }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;

    fn greeting() -> Greeting {
        Greeting {
            status: Status::Full,
            ring: 1 << 20,
            max_payload: 65_536,
            proof: ProofWord { address: 1 << 40, value: 77 },
            index: 513,
            slot: 255,
            published: 1 << 20,
        }
    }

    #[test]
    fn greetings_are_read_back_and_bad_ones_refused() {
        let bytes = greeting().emit();
        assert_eq!(Greeting::parse(&bytes), Ok(greeting()));
        assert_eq!(Greeting::parse(&bytes[..64]), Err(Status::Nonsense));
        assert_eq!(Greeting::parse(&[]), Err(Status::Nonsense));
        let with = |at: usize, value: u8| {
            let mut bytes = bytes;
            bytes[at] = value;
            Greeting::parse(&bytes)
        };
        assert_eq!(with(0, 0), Err(Status::Nonsense));
        assert_eq!(with(8, 99), Err(Status::Version));
        assert_eq!(with(12, 4), Err(Status::Nonsense));
        assert_eq!(with(16, 1), Err(Status::Nonsense), "not a power of two");
        assert_eq!(with(23, 1), Err(Status::Nonsense), "too large");
        assert_eq!(with(31, 1), Err(Status::Nonsense), "payloads larger than the ring");
        assert_eq!(with(60, 0), Err(Status::Nonsense), "slot 0");
        assert_eq!(with(61, 1), Err(Status::Nonsense));
        assert_eq!(with(64, 1), Err(Status::Nonsense), "published memory of no whole pages");
        assert_eq!(with(68, 1), Err(Status::Nonsense), "published memory too large");
    }

    #[test]
    fn descriptors_come_with_the_message_and_are_close_on_exec() {
        let (a, b) = UnixDatagram::pair().unwrap();
        assert_eq!(receive(b.as_fd()).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        send(a.as_fd(), &greeting().emit(), &[a.as_fd(); 4]).unwrap();
        let received = receive(b.as_fd()).unwrap().unwrap();
        assert_eq!((received.greeting, received.fds.len()), (Ok(greeting()), 4));
        // SAFETY: fcntl with F_GETFD reads flags of an open descriptor.
        let flags = unsafe { libc::fcntl(received.fds[3].as_raw_fd(), libc::F_GETFD) };
        assert_ne!(flags & libc::FD_CLOEXEC, 0);
    }
}

//! Ethernet frames (packet(7)): between the processes of a host, and on a real interface.
//!
//! Both are sockets of the packet family, for which a process needs `CAP_NET_RAW` over its network namespace. Between
//! the processes, frames travel over the loopback interface. Each is the payload of an outer frame with the EtherType
//! that IEEE 802 leaves to local experiments. No other program looks at those, so forged addresses do no harm. The
//! kernel gives a copy to each process that listens, so the processes need no list of each other. The outer destination
//! is a number of the segment, the outer source one of the process. A filter in the kernel keeps out other segments and
//! a process's own frames.

mod rx;
mod tx;

use std::ffi::{CString, c_int};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, ipproto, socket_with};
use rustix::rand::{GetRandomFlags, getrandom};

use crate::sockopt;

pub use rx::{FrameBuffers, ReceivedFrame};
pub use tx::FrameBatch;

/// Bytes of the longest frame that travels between processes: the MTU of the loopback interface.
pub const MAX_FRAME: usize = 65_535;

/// IEEE Std 802 Local Experimental EtherType 1.
const ENVELOPE_TYPE: u16 = 0x88b5;
const ENVELOPE_LEN: usize = 14;
const ETH_P_ALL: u16 = 3;
const RECEIVE_BUFFER: c_int = 16 << 20;

// linux/if_packet.h
const SOL_PACKET: c_int = 263;
const PACKET_ADD_MEMBERSHIP: c_int = 1;
const PACKET_AUXDATA: c_int = 8;
const PACKET_IGNORE_OUTGOING: c_int = 23;
const PACKET_MR_PROMISC: u16 = 1;

/// `struct packet_mreq`.
#[repr(C)]
struct PacketMreq {
    ifindex: c_int,
    kind: u16,
    alen: u16,
    address: [u8; 8],
}

/// A socket for frames. It receives nothing until [`listen`](Self::listen).
#[derive(Debug)]
pub struct EthernetSocket {
    fd: OwnedFd,
    ifindex: c_int,
    /// Around each frame.
    envelope: Option<[u8; ENVELOPE_LEN]>,
}

fn packet_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    // Without a protocol nothing is received.
    Ok(socket_with(AddressFamily::PACKET, SocketType::RAW, flags, None)?)
}

fn interface_index(name: &str) -> io::Result<c_int> {
    let name = CString::new(name)?;
    // SAFETY: a C string.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    if index == 0 { Err(io::Error::last_os_error()) } else { Ok(index as c_int) }
}

/// Whether this process may send and receive frames now.
///
/// # Errors
/// `EPERM` without `CAP_NET_RAW`, and those of the system calls.
pub fn check_permission() -> io::Result<()> {
    // Needs the same capability as a packet socket, which takes the kernel milliseconds to close.
    let flags = SocketFlags::CLOEXEC;
    socket_with(AddressFamily::INET, SocketType::RAW, flags, Some(ipproto::RAW))?;
    Ok(())
}

impl EthernetSocket {
    /// A socket for frames between the processes of this host that name the same segment.
    ///
    /// # Errors
    /// `EPERM`, and those of the system calls.
    pub fn between_processes(segment: &str) -> io::Result<Self> {
        let fd = packet_socket()?;
        let dst = segment_number(segment.as_bytes()).to_be_bytes();
        let mut src = [0; 8];
        // So few bytes are always given whole.
        getrandom(&mut src, GetRandomFlags::empty())?;
        let mut envelope = [0; ENVELOPE_LEN];
        // Locally administered addresses.
        envelope[0] = 2;
        envelope[1..6].copy_from_slice(&dst[..5]);
        envelope[6] = 2;
        envelope[7..12].copy_from_slice(&src[..5]);
        envelope[12..].copy_from_slice(&ENVELOPE_TYPE.to_be_bytes());
        sockopt::attach_bpf(fd.as_fd(), libc::SO_ATTACH_FILTER, &filter(&envelope))?;
        Ok(Self { fd, ifindex: interface_index("lo")?, envelope: Some(envelope) })
    }

    /// A socket for the frames of a real interface.
    ///
    /// # Errors
    /// `EPERM`, `ENODEV`, and those of the system calls.
    pub fn on_interface(name: &str) -> io::Result<Self> {
        let fd = packet_socket()?;
        let ifindex = interface_index(name)?;
        // Frames that the host itself sends are not received. A kernel before 4.20 delivers them nevertheless, but
        // marks them.
        let _ = sockopt::set(fd.as_fd(), SOL_PACKET, PACKET_IGNORE_OUTGOING, 1);
        sockopt::set(fd.as_fd(), SOL_PACKET, PACKET_AUXDATA, 1)?;
        Ok(Self { fd, ifindex, envelope: None })
    }

    /// The index of the real interface; `None` for frames between processes.
    #[must_use]
    pub fn interface(&self) -> Option<u32> {
        self.envelope.is_none().then_some(self.ifindex.unsigned_abs())
    }

    /// From now on it receives. On an interface it also gets frames for other addresses.
    ///
    /// # Errors
    /// Those of the system calls.
    pub fn listen(&self) -> io::Result<()> {
        let fd = self.fd.as_fd();
        if sockopt::set(fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, RECEIVE_BUFFER).is_err() {
            sockopt::set(fd, libc::SOL_SOCKET, libc::SO_RCVBUF, RECEIVE_BUFFER)?;
        }
        if self.envelope.is_none() {
            let mreq = PacketMreq {
                ifindex: self.ifindex,
                kind: PACKET_MR_PROMISC,
                alen: 0,
                address: [0; 8],
            };
            // SAFETY: a live structure of the size that is passed.
            let rc = unsafe {
                libc::setsockopt(
                    fd.as_raw_fd(),
                    SOL_PACKET,
                    PACKET_ADD_MEMBERSHIP,
                    (&raw const mreq).cast(),
                    size_of::<PacketMreq>() as libc::socklen_t,
                )
            };
            if rc != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        let protocol = if self.envelope.is_some() { ENVELOPE_TYPE } else { ETH_P_ALL };
        let address = self.address(protocol);
        // SAFETY: a live address of the size that is passed.
        let rc = unsafe {
            libc::bind(
                fd.as_raw_fd(),
                (&raw const address).cast(),
                size_of::<libc::sockaddr_ll>() as libc::socklen_t,
            )
        };
        if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    fn address(&self, protocol: u16) -> libc::sockaddr_ll {
        // SAFETY: integers.
        let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
        address.sll_family = libc::AF_PACKET as u16;
        address.sll_protocol = protocol.to_be();
        address.sll_ifindex = self.ifindex;
        address
    }

    /// Frames that found the receive buffer full, since the socket was made.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        sockopt::drops(self.fd.as_fd()).unwrap_or(0).into()
    }
}

impl AsFd for EthernetSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// The number of a segment, which does not depend on the build: FNV-1a of 64 bits. By it the processes find each other.
fn segment_number(name: &[u8]) -> u64 {
    name.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Takes frames that have the destination of this envelope, and another source.
fn filter(envelope: &[u8; ENVELOPE_LEN]) -> [libc::sock_filter; 9] {
    const LOAD_WORD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const LOAD_HALF: u16 = (libc::BPF_LD | libc::BPF_H | libc::BPF_ABS) as u16;
    const JUMP_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let op = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let word = |at: usize| {
        u32::from_be_bytes([envelope[at], envelope[at + 1], envelope[at + 2], envelope[at + 3]])
    };
    let half = |at: usize| u32::from(u16::from_be_bytes([envelope[at], envelope[at + 1]]));
    [
        op(LOAD_WORD, 0, 0, 0),
        op(JUMP_EQUAL, 0, 6, word(0)),
        op(LOAD_HALF, 0, 0, 4),
        op(JUMP_EQUAL, 0, 4, half(4)),
        op(LOAD_WORD, 0, 0, 8),
        // Five bytes of the source are random: four of them tell processes apart.
        op(JUMP_EQUAL, 1, 0, word(8)),
        op(RETURN, 0, 0, u32::MAX),
        op(RETURN, 0, 0, 0),
        op(RETURN, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_has_the_same_number_everywhere() {
        // The test vectors of the hash's authors.
        assert_eq!(segment_number(b""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(segment_number(b"a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(segment_number(b"foobar"), 0x8594_4171_f739_67e8);
    }
}

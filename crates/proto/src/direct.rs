//! Copies that the device itself does from or to the peer's memory: one-sided operations that need no message, and the payload
//! of a SEND that says where it lies.

use crate::mr::Access;
use crate::types::Qpn;
use crate::wr::{RemoteAddr, Sge};

/// Longest operation that is offered, and most bytes in one go. The queue pair is locked for so long, and within a process its
/// peer as well.
pub const MAX_DIRECT: u32 = 16 << 20;

/// Shortest operation of a reliable queue pair that waits for the answers to messages before it, so that it needs none itself.
/// A shorter one leaves as a message.
pub const WORTH_WAITING: u32 = 16 << 10;

/// Shortest payload of a SEND that the peer fetches. It comes to the peer in one copy then, which costs a system call there.
pub const WORTH_FETCHING: u32 = 16 << 10;

/// Longest payload that the peer fetches in one go.
pub const MAX_FETCH: u32 = 64 << 10;

/// The local side of an operation.
#[derive(Clone, Copy, Debug)]
pub enum Local<'a> {
    /// Inline data to write.
    Inline(&'a [u8]),
    /// Elements to gather from or to scatter to, whose keys have not been looked at.
    Sges(&'a [Sge]),
}

/// The place of a payload in the memory of its sender.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// Address and key.
    pub at: RemoteAddr,
    /// Tells the sender's queue pair apart from the one that it was before a reset.
    pub generation: u32,
}

/// The direction of the copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// RDMA WRITE: to the peer.
    Write,
    /// RDMA READ: from the peer.
    Read,
}

/// A copy of a connected queue pair ([`LinkEnv::direct`](crate::env::LinkEnv::direct)): a WRITE or READ before which nothing of
/// it is outstanding, or the payload of the SEND that comes next.
#[derive(Clone, Copy, Debug)]
pub struct Direct<'a> {
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// WRITE or READ.
    pub direction: Direction,
    /// It reads the payload of a SEND that the peer's queue pair has sent in this generation.
    pub payload_of: Option<u32>,
    /// The peer's memory, as the peer named it.
    pub remote: RemoteAddr,
    /// Bytes, 1 to [`MAX_DIRECT`].
    pub len: u32,
    /// Our own memory, of the same length.
    pub local: Local<'a>,
    /// Protection domain of our own memory.
    pub pd: u32,
}

impl Direction {
    /// The right that the peer must have granted.
    #[inline]
    #[must_use]
    pub fn right(self) -> Access {
        match self {
            Self::Write => Access::REMOTE_WRITE,
            Self::Read => Access::REMOTE_READ,
        }
    }
}

impl Direct<'_> {
    /// The right that the peer must have granted. A payload is the peer's own affair.
    #[inline]
    #[must_use]
    pub fn right(&self) -> Access {
        if self.payload_of.is_some() { Access::empty() } else { self.direction.right() }
    }
}

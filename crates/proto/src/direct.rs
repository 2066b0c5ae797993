//! One-sided operations that need no message: the device itself copies from or to the peer's memory.

use crate::types::Qpn;
use crate::wr::{RemoteAddr, Sge};

/// Longest operation that is offered, and most bytes in one go: the queue pair is locked for so long.
pub const MAX_DIRECT: u32 = 16 << 20;

/// Shortest operation of a reliable queue pair that waits for the answers to messages before it, so that it needs none itself.
/// A shorter one leaves as a message.
pub const WORTH_WAITING: u32 = 16 << 10;

/// The local side of an operation.
#[derive(Clone, Copy, Debug)]
pub enum Local<'a> {
    /// Inline data to write.
    Inline(&'a [u8]),
    /// Elements to gather from or to scatter to, whose keys have not been looked at.
    Sges(&'a [Sge]),
}

/// The direction of the copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// RDMA WRITE: to the peer.
    Write,
    /// RDMA READ: from the peer.
    Read,
}

/// A WRITE or READ of a connected queue pair before which nothing of it is outstanding
/// ([`LinkEnv::direct`](crate::env::LinkEnv::direct)).
#[derive(Clone, Copy, Debug)]
pub struct Direct<'a> {
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// WRITE or READ.
    pub direction: Direction,
    /// The peer's memory, as the peer named it.
    pub remote: RemoteAddr,
    /// Bytes, 1 to [`MAX_DIRECT`].
    pub len: u32,
    /// Our own memory, of the same length.
    pub local: Local<'a>,
    /// Protection domain of the elements.
    pub pd: u32,
}

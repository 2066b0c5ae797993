//! Work requests that a program posts to the queues.

use std::net::IpAddr;

use bitflags::bitflags;

use crate::mr::Bind;
use crate::types::{Gid, QKey, Qpn};
use crate::wire::feth::Feth;

/// Most scatter/gather elements that one work request may have.
pub const MAX_SGE: usize = 32;

/// Bytes of the longest message. The IBA allows twice as much; at the smallest MTU that would take half of all PSNs, and
/// before and behind could no longer be told apart.
pub const MAX_MESSAGE: u32 = 1 << 30;

/// Scatter/gather element: a piece of a registered region (`struct ibv_sge`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sge {
    /// Address, in the region's own (iova) terms.
    pub addr: u64,
    /// Bytes. A length of 0 stands for 2^31 on the wire; through the verbs it is an empty piece.
    pub len: u32,
    /// Local key of the region.
    pub lkey: u32,
}

bitflags! {
    /// `enum ibv_send_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct SendFlags: u32 {
        /// Start only after all earlier READs and atomics have completed.
        const FENCE = 1;
        /// Make a completion even where the queue pair does not signal all.
        const SIGNALED = 2;
        /// The receiver's completion counts as solicited.
        const SOLICITED = 4;
        /// The data is copied at post; the elements' keys are not looked at.
        const INLINE = 8;
    }
}

/// The target of a one-sided operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RemoteAddr {
    /// Address, in the remote region's iova terms.
    pub va: u64,
    /// Remote key.
    pub rkey: u32,
}

/// A send work request (`enum ibv_wr_opcode` with its operands).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SendOp {
    /// SEND.
    Send,
    /// SEND with immediate data (the value of the big-endian field).
    SendImm(u32),
    /// SEND, and invalidate this key of the receiver.
    SendInv(u32),
    /// RDMA WRITE.
    Write(RemoteAddr),
    /// RDMA WRITE with immediate data.
    WriteImm(RemoteAddr, u32),
    /// RDMA READ.
    Read(RemoteAddr),
    /// Atomic compare and swap of 8 bytes.
    CompareSwap {
        /// The word.
        at: RemoteAddr,
        /// Swap if the word equals this.
        compare: u64,
        /// The new value.
        swap: u64,
    },
    /// Atomic fetch and add of 8 bytes.
    FetchAdd {
        /// The word.
        at: RemoteAddr,
        /// The addend.
        add: u64,
    },
    /// Atomic write of 8 bytes (IBA A19.3): of `data`, or else of the request's elements.
    AtomicWrite {
        /// The word.
        at: RemoteAddr,
        /// The new value, as it lies in memory.
        data: Option<[u8; 8]>,
    },
    /// FLUSH (IBA A19.4): places data of earlier WRITEs to this range as deep as `feth` says.
    Flush {
        /// The first byte; with [`Selectivity::Mr`](crate::wire::feth::Selectivity::Mr) only the key counts.
        at: RemoteAddr,
        /// Bytes.
        len: u32,
        /// Depth and range.
        feth: Feth,
    },
    /// Binds a memory window; nothing is sent.
    BindMw(Bind),
    /// Invalidates a key of this side; nothing is sent.
    LocalInv(u32),
}

impl SendOp {
    /// READ, atomic, ATOMIC WRITE or FLUSH: the responder has an answer of its own to each, and remembers it.
    #[must_use]
    pub fn has_response(&self) -> bool {
        matches!(
            self,
            Self::Read(_)
                | Self::CompareSwap { .. }
                | Self::FetchAdd { .. }
                | Self::AtomicWrite { .. }
                | Self::Flush { .. }
        )
    }

    /// READ or atomic: the responder answers with data.
    #[must_use]
    pub fn has_response_data(&self) -> bool {
        matches!(self, Self::Read(_) | Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// The peer's memory that it names.
    #[must_use]
    pub fn remote(&self) -> Option<RemoteAddr> {
        match *self {
            Self::Write(at)
            | Self::WriteImm(at, _)
            | Self::Read(at)
            | Self::CompareSwap { at, .. }
            | Self::FetchAdd { at, .. }
            | Self::AtomicWrite { at, .. }
            | Self::Flush { at, .. } => Some(at),
            Self::Send
            | Self::SendImm(_)
            | Self::SendInv(_)
            | Self::BindMw(_)
            | Self::LocalInv(_) => None,
        }
    }

    /// Done by this side alone: no packet, no PSN.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::BindMw(_) | Self::LocalInv(_))
    }

    /// Compare-swap or fetch-add.
    #[must_use]
    pub fn is_atomic(&self) -> bool {
        matches!(self, Self::CompareSwap { .. } | Self::FetchAdd { .. })
    }

    /// The bytes that its elements must have in all, if it takes no other length.
    pub(crate) fn fixed_len(&self) -> Option<u32> {
        match self {
            Self::CompareSwap { .. }
            | Self::FetchAdd { .. }
            | Self::AtomicWrite { data: None, .. } => Some(8),
            Self::AtomicWrite { data: Some(_), .. } | Self::Flush { .. } => Some(0),
            _ => None,
        }
    }
}

/// The path of packets: the part of an address handle that stays after the device resolved it (IBA 11.2.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct AddressVector {
    /// The peer's port.
    pub dgid: Gid,
    /// Our address: the entry `sgid_index` of the GID table at the time.
    pub sgid: Gid,
    /// Index in our GID table.
    pub sgid_index: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Service level, as given.
    pub sl: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Static rate (`enum ibv_rate`): sends that way are paced ([`crate::qp::pacing`]).
    pub static_rate: u8,
    /// Source path bits, as given: RoCE has no use for them, nor for the DLID.
    pub src_path_bits: u8,
    /// Destination LID, as given.
    pub dlid: u16,
    /// Port, from 1.
    pub port: u8,
    /// Interface of a link-local address or of a multicast group; 0 for others.
    pub scope_id: u32,
}

/// Why no packet goes from one address to another, whatever the routes are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoWay {
    /// One is an IPv4 address, the other an IPv6 address.
    Families = 1,
    /// The destination is the broadcast address, which is that of no port.
    Broadcast = 2,
}

impl NoWay {
    /// Whether one of these holds.
    #[must_use]
    pub fn between(from: IpAddr, to: IpAddr) -> Option<Self> {
        match to {
            IpAddr::V4(to) if to.is_broadcast() => Some(Self::Broadcast),
            _ => (from.is_ipv4() != to.is_ipv4()).then_some(Self::Families),
        }
    }

    pub(crate) fn from_number(number: u64) -> Option<Self> {
        [Self::Families, Self::Broadcast].into_iter().find(|way| *way as u64 == number)
    }

    /// A sentence without its full stop.
    #[must_use]
    pub fn text(self) -> &'static str {
        match self {
            Self::Families => "the two addresses are of different families",
            Self::Broadcast => "the peer's address is that of a broadcast",
        }
    }
}

impl AddressVector {
    /// Whether no packet can go this way, whatever the routes are.
    #[must_use]
    pub fn no_way(&self) -> Option<NoWay> {
        NoWay::between(self.sgid.to_ip(), self.dgid.to_ip())
    }
}

/// Destination of a datagram, which the address handle of its way makes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UdDest {
    /// From the address handle; a copy, so that the handle may be destroyed at once.
    pub av: AddressVector,
    /// Protection domain of the address handle. A queue pair of another one refuses the destination.
    pub(crate) pd: u32,
    /// Queue pair there.
    pub qpn: Qpn,
    /// Its Q_Key; with the high bit set, our own queue pair's is sent.
    pub qkey: QKey,
}

impl UdDest {
    /// The destination by an address handle of the protection domain with this number. Devices call it.
    #[doc(hidden)]
    #[must_use]
    pub fn new(pd: u32, av: AddressVector, qpn: Qpn, qkey: QKey) -> Self {
        Self { av, pd, qpn, qkey }
    }

    /// The number of the address handle's protection domain.
    #[doc(hidden)]
    #[must_use]
    pub fn pd(&self) -> u32 {
        self.pd
    }
}

/// A work request for a send queue (`struct ibv_send_wr`).
#[derive(Clone, Copy, Debug)]
pub struct SendWr<'a> {
    /// The program's cookie.
    pub wr_id: u64,
    /// The operation.
    pub op: SendOp,
    /// Flags.
    pub flags: SendFlags,
    /// Data, in order.
    pub sges: &'a [Sge],
    /// Only, and always, on UD.
    pub ud: Option<UdDest>,
    /// On XRC the number of the peer's SRQ, 24 bits; without a meaning on other types.
    pub xrc_srqn: u32,
}

/// A work request for a receive queue (`struct ibv_recv_wr`).
#[derive(Clone, Copy, Debug)]
pub struct RecvWr<'a> {
    /// The program's cookie.
    pub wr_id: u64,
    /// The places for the data, in order.
    pub sges: &'a [Sge],
}

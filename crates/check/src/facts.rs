//! Facts that the ledger is told.

use std::time::{Duration, Instant};

use smallvec::SmallVec;

/// The kinds of objects.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// `ibv_pd`.
    Pd,
    /// `ibv_mr`.
    Mr,
    /// `ibv_mw`.
    Mw,
    /// `ibv_cq`.
    Cq,
    /// `ibv_srq`.
    Srq,
    /// `ibv_qp`.
    Qp,
    /// `ibv_ah`.
    Ah,
    /// `verbs_context`.
    Context,
    /// `ibv_comp_channel`.
    Channel,
    /// `rdma_event_channel`.
    EventChannel,
    /// `rdma_cm_event`.
    CmEvent,
    /// `rdma_cm_id`.
    CmId,
    /// `ibv_td`.
    Td,
    /// `ibv_xrcd`.
    Xrcd,
    /// `ibv_dm`.
    Dm,
    /// Any other.
    Other,
}

impl Kind {
    /// By the name of its public struct.
    #[must_use]
    pub fn of_struct(name: &str) -> Self {
        match name.rsplit("::").next().unwrap_or_default() {
            "ibv_pd" => Self::Pd,
            "ibv_mr" => Self::Mr,
            "ibv_mw" => Self::Mw,
            "ibv_cq_ex" => Self::Cq,
            "ibv_srq" => Self::Srq,
            "ibv_qp_ex" => Self::Qp,
            "ibv_ah" => Self::Ah,
            "verbs_context" => Self::Context,
            "ibv_comp_channel" => Self::Channel,
            "rdma_event_channel" => Self::EventChannel,
            "rdma_cm_event" => Self::CmEvent,
            "rdma_cm_id" => Self::CmId,
            "ibv_td" => Self::Td,
            "ibv_xrcd" => Self::Xrcd,
            "ibv_dm" => Self::Dm,
            _ => Self::Other,
        }
    }

    /// Its name in a report.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pd => "protection domain",
            Self::Mr => "memory region",
            Self::Mw => "memory window",
            Self::Cq => "completion queue",
            Self::Srq => "shared receive queue",
            Self::Qp => "queue pair",
            Self::Ah => "address handle",
            Self::Context => "context",
            Self::Channel => "completion channel",
            Self::EventChannel => "event channel",
            Self::CmEvent => "event of the connection manager",
            Self::CmId => "communication identifier",
            Self::Td => "thread domain",
            Self::Xrcd => "XRC domain",
            Self::Dm => "device memory",
            Self::Other => "object",
        }
    }

    /// One of these in a report: by the address that the program knows, and by the number that the log and `anyverbs show` print.
    pub(crate) fn at(self, address: usize, number: Option<u32>) -> String {
        let name = self.name();
        match (self, number) {
            (Self::Cq, Some(number)) => format!("{name} at {address:#x} (CQ {number})"),
            (Self::Qp, Some(number)) => format!("{name} at {address:#x} (QP {number:#08x})"),
            // The highest bits are those of the process.
            (Self::Pd, Some(number)) => {
                format!("{name} at {address:#x} (PD {})", number & 0xff_ffff)
            }
            _ => format!("{name} at {address:#x}"),
        }
    }

    /// Whether the memory of one that has ended stays a while, so that a program that uses it is found out and does no harm.
    #[must_use]
    pub fn is_kept(self) -> bool {
        // The others may hold what the program ends next.
        !self.has_descriptor() && !matches!(self, Self::Td | Self::Xrcd | Self::Dm | Self::Other)
    }

    /// Whether it has a descriptor, or a part of one that has. It would stay open while the memory is kept.
    fn has_descriptor(self) -> bool {
        matches!(self, Self::Context | Self::Channel | Self::EventChannel | Self::CmId)
    }

    /// Whether its public struct begins with the pointer to its context.
    #[must_use]
    pub fn begins_with_context(self) -> bool {
        !matches!(
            self,
            Self::Context | Self::EventChannel | Self::CmEvent | Self::CmId | Self::Other
        )
    }

    /// Whether a forked child may end it: that closes its own copy of a descriptor.
    pub(crate) fn is_of_process(self) -> bool {
        matches!(self, Self::Context | Self::Channel | Self::EventChannel)
    }

    /// Whether one that is left at the end is a leak.
    pub(crate) fn can_leak(self) -> bool {
        !matches!(
            self,
            Self::Context | Self::Channel | Self::EventChannel | Self::CmEvent | Self::Other
        )
    }
}

/// Facts about a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QueuePair {
    /// Its number.
    pub number: u32,
    /// Whether it is of type UD.
    pub is_datagram: bool,
    /// Whether it is of type UC.
    pub is_uc: bool,
    /// Whether it is of type RC.
    pub is_reliable: bool,
    /// Whether all its sends make completions.
    pub signals_all: bool,
    /// The longest inline data.
    pub max_inline: u32,
    /// The requests that its send queue has room for.
    pub max_sends: u32,
    /// The address of its SRQ, or 0.
    pub srq: usize,
    /// The address of its protection domain, or 0.
    pub pd: usize,
    /// The address of the completion queue of its sends.
    pub send_cq: usize,
    /// The address of the completion queue of its receives.
    pub recv_cq: usize,
}

/// Facts about a memory region.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// The first byte in memory.
    pub addr: u64,
    /// The address by which work requests name it.
    pub iova: u64,
    /// Bytes.
    pub len: u64,
    /// Its local key.
    pub lkey: u32,
    /// Its remote key.
    pub rkey: u32,
    /// The address of its protection domain.
    pub pd: usize,
    /// Its access flags, as `ibv_reg_mr` takes them.
    pub access: u32,
}

/// `IBV_ACCESS_ON_DEMAND`: memory that is pinned only while it is used.
const ON_DEMAND: u32 = 64;

/// Bytes of a page, as the kernel counts pinned memory.
const PAGE: u64 = 4096;

impl Region {
    /// The bytes that a device pins for it.
    pub(crate) fn pinned(&self) -> u64 {
        if self.access & ON_DEMAND != 0 {
            return 0;
        }
        let end = self.addr.saturating_add(self.len).div_ceil(PAGE);
        (end - self.addr / PAGE) * PAGE
    }
}

/// An element of a work request.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// As in the request.
    pub addr: u64,
    /// Bytes.
    pub len: u32,
    /// The local key.
    pub lkey: u32,
}

/// The use that the device makes of the elements of a work request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Elements {
    /// Nothing.
    Unused,
    /// It reads them.
    Read,
    /// It writes them.
    Written,
}

/// A work request.
#[derive(Clone, Debug)]
pub struct Work {
    /// The name of its operation.
    pub name: &'static str,
    /// As in the request.
    pub wr_id: u64,
    /// Whether it asks for a completion.
    pub is_signaled: bool,
    /// Whether its data was copied when it was posted.
    pub is_inline: bool,
    /// The use that the device makes of its elements.
    pub elements: Elements,
    /// Whether it waits for the READs and atomics before it.
    pub is_fenced: bool,
    /// The address of its address handle, or 0.
    pub ah: usize,
    /// Its elements.
    pub pieces: Pieces,
}

/// The elements of a work request, without allocation for most.
pub type Pieces = SmallVec<[Piece; 2]>;
/// The work requests of a call, without allocation for one.
pub type Works = SmallVec<[Work; 1]>;

/// The way in which a queue pair treats the work that was posted to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Activity {
    /// It has forgotten it, or there is no such queue pair.
    Idle,
    /// It works on it.
    Works,
    /// It is in the error state: it only completes what is left.
    Failed,
}

/// A work completion.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    /// The number of the queue pair.
    pub number: u32,
    /// As in the request.
    pub wr_id: u64,
    /// Whether it is a receive's.
    pub is_receive: bool,
    /// As in the completion; 0 is success.
    pub status: u32,
    /// The number of its cause, if it failed.
    pub cause: u32,
    /// How many sends were posted to the queue pair up to this one, modulo 2^32. `None` for a receive, and where it is not known.
    pub send: Option<u32>,
}

/// A call that the device refuses for what its persona lacks.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Its name.
    pub call: &'static str,
    /// The feature, or the field that is beyond a limit.
    pub lacks: &'static str,
    /// The device's sentence, which has the value and the limit.
    pub why: String,
}

impl QueuePair {
    /// Whether messages that it drops fail no work at either end.
    pub(crate) fn drops_silently(self) -> bool {
        self.is_datagram || self.is_uc
    }
}

/// Datagrams, or messages of UC, that a queue pair dropped for one reason.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DroppedDatagrams {
    /// The reason.
    pub reason: Dropped,
    /// How many there were.
    pub count: u64,
    /// Where the first one came from. Empty for UC, whose peer stands in the reason.
    pub from: String,
}

/// Tells what the queue pair of an address has dropped. It waits for locks until this time.
pub type DropsOf = fn(usize, Instant) -> Vec<DroppedDatagrams>;

/// The longest wait for locks of the device. When the process ends, a thread may hold one for good.
pub const LONGEST_WAIT: Duration = Duration::from_millis(100);

/// The reason why a queue pair dropped datagrams, with facts about the first of them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Dropped {
    /// UC: the number of the cause, and a sentence about the first message. Of other connections: how the two ends differ, or which
    /// request of the peer was refused.
    Message {
        /// As in `vendor_err`.
        cause: u16,
        /// The remote key that it is about, or 0.
        key: u32,
        /// Without its full stop.
        first: String,
    },
    /// Work of the queue pair itself has failed. A completion tells of it.
    Work {
        /// As in `vendor_err`.
        cause: u16,
        /// As in the request.
        wr_id: u64,
        /// Why, as the log has it: a clause.
        why: String,
    },
    /// Its Q_Key was not the queue pair's own.
    QKey {
        /// The queue pair's.
        own: u32,
        /// The datagram's.
        other: u32,
    },
    /// Its P_Key does not match the queue pair's.
    PKey {
        /// The queue pair's.
        own: u16,
        /// The datagram's.
        other: u16,
    },
    /// There was no receive.
    NoReceive,
    /// It was longer than the receive.
    TooLong {
        /// Bytes, with the GRH.
        len: u64,
        /// Bytes that there was room for.
        room: u64,
    },
}

//! Work completions.

use bitflags::bitflags;

use crate::types::Qpn;

/// `enum ibv_wc_status`. A later version of the verbs may have more.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u8)]
#[non_exhaustive]
pub enum WcStatus {
    /// Done.
    #[default]
    Success = 0,
    /// A message does not fit the receive buffer, or is longer than a datagram may be.
    LocLenErr = 1,
    /// The queue pair's type does not have this operation.
    LocQpOpErr = 2,
    /// Reserved for end-to-end contexts.
    LocEecOpErr = 3,
    /// A local key, range or right does not hold, or the memory is gone.
    LocProtErr = 4,
    /// The queue pair went to the error state first.
    WrFlushErr = 5,
    /// A memory window could not be bound.
    MwBindErr = 6,
    /// The responder answered something impossible.
    BadRespErr = 7,
    /// A local access right failed on the responder's side.
    LocAccessErr = 8,
    /// The responder found the request invalid.
    RemInvReqErr = 9,
    /// The responder refused the access.
    RemAccessErr = 10,
    /// The responder could not complete the request.
    RemOpErr = 11,
    /// No answer after all retries.
    RetryExcErr = 12,
    /// The receiver was not ready after all retries.
    RnrRetryExcErr = 13,
    /// The responder gave the operation up. Only a script of faults makes it.
    RemAbortErr = 16,
    /// The device has failed. Only a script of faults makes it.
    FatalErr = 19,
    /// A response came too late. Only a script of faults makes it.
    RespTimeoutErr = 20,
    /// Any other error.
    GeneralErr = 21,
    /// A tag could not be removed: it is not there, or a message has taken it.
    TmErr = 22,
    /// A rendezvous message does not fit the buffer of its tag; its headers lie there.
    TmRndvIncomplete = 23,
}

impl WcStatus {
    /// Its name in C.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Success => "IBV_WC_SUCCESS",
            Self::LocLenErr => "IBV_WC_LOC_LEN_ERR",
            Self::LocQpOpErr => "IBV_WC_LOC_QP_OP_ERR",
            Self::LocEecOpErr => "IBV_WC_LOC_EEC_OP_ERR",
            Self::LocProtErr => "IBV_WC_LOC_PROT_ERR",
            Self::WrFlushErr => "IBV_WC_WR_FLUSH_ERR",
            Self::MwBindErr => "IBV_WC_MW_BIND_ERR",
            Self::BadRespErr => "IBV_WC_BAD_RESP_ERR",
            Self::LocAccessErr => "IBV_WC_LOC_ACCESS_ERR",
            Self::RemInvReqErr => "IBV_WC_REM_INV_REQ_ERR",
            Self::RemAccessErr => "IBV_WC_REM_ACCESS_ERR",
            Self::RemOpErr => "IBV_WC_REM_OP_ERR",
            Self::RetryExcErr => "IBV_WC_RETRY_EXC_ERR",
            Self::RnrRetryExcErr => "IBV_WC_RNR_RETRY_EXC_ERR",
            Self::RemAbortErr => "IBV_WC_REM_ABORT_ERR",
            Self::FatalErr => "IBV_WC_FATAL_ERR",
            Self::RespTimeoutErr => "IBV_WC_RESP_TIMEOUT_ERR",
            Self::GeneralErr => "IBV_WC_GENERAL_ERR",
            Self::TmErr => "IBV_WC_TM_ERR",
            Self::TmRndvIncomplete => "IBV_WC_TM_RNDV_INCOMPLETE",
        }
    }
}

/// `enum ibv_wc_opcode`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u8)]
pub enum WcOpcode {
    /// SEND of any kind.
    #[default]
    Send = 0,
    /// RDMA WRITE of any kind.
    RdmaWrite = 1,
    /// RDMA READ.
    RdmaRead = 2,
    /// Compare and swap.
    CompSwap = 3,
    /// Fetch and add.
    FetchAdd = 4,
    /// Bind of a memory window.
    BindMw = 5,
    /// Invalidation of a key of this side.
    LocalInv = 6,
    /// A request that left in segments.
    Tso = 7,
    /// FLUSH.
    Flush = 8,
    /// ATOMIC WRITE.
    AtomicWrite = 9,
    /// A receive.
    Recv = 128,
    /// A receive that a WRITE with immediate data took.
    RecvRdmaWithImm = 129,
    /// A tag was added to a tag-matching SRQ.
    TmAdd = 130,
    /// A tag was removed.
    TmDel = 131,
    /// A count of unexpected messages was told.
    TmSync = 132,
    /// A message with a tag.
    TmRecv = 133,
    /// A message without one.
    TmNoTag = 134,
}

impl WcOpcode {
    /// Tells whether it belongs to a receive queue or an SRQ.
    #[must_use]
    pub fn is_recv(self) -> bool {
        self as u8 >= Self::Recv as u8
    }
}

bitflags! {
    /// `enum ibv_wc_flags`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct WcFlags: u8 {
        /// The first 40 bytes of the buffer hold the GRH.
        const GRH = 1;
        /// `imm` holds immediate data.
        const WITH_IMM = 2;
        /// The checksums of IPv4 and of TCP or UDP in a raw packet are right.
        const IP_CSUM_OK = 4;
        /// `imm` holds the key that the peer invalidated.
        const WITH_INV = 8;
        /// Messages arrived that the program has not told the tag-matching SRQ to have seen.
        const TM_SYNC_REQ = 16;
        /// A message matched the tag of this buffer.
        const TM_MATCH = 32;
        /// All data of the matched message is in the buffer.
        const TM_DATA_VALID = 64;
    }
}

/// A work completion (`struct ibv_wc`). After an error only `wr_id`, `status`, `qpn` and `vendor_err` hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    /// The ID of the work request.
    pub wr_id: u64,
    /// The result of the operation.
    pub status: WcStatus,
    /// The operation.
    pub opcode: WcOpcode,
    /// The fields that hold.
    pub flags: WcFlags,
    /// The headers that came with a datagram: 0b1010 for IPv4 and 0b1001 for IPv6. RoCE has no service levels.
    pub sl: u8,
    /// After an error: the number of the first cause ([`anyverbs_causes::Cause`]), or 0.
    pub vendor_err: u32,
    /// Bytes received, READ or fetched; with the 40 of the GRH on UD.
    pub byte_len: u32,
    /// Immediate data (value of the big-endian field) or invalidated key; of a raw packet that was received the tag that its
    /// flow rule gave.
    pub imm: u32,
    /// The queue pair that the request was posted to, or received on.
    pub qpn: Qpn,
    /// Sender of a datagram.
    pub src_qpn: Qpn,
    /// For a send: the send queue's count of slots that are free again once this is polled (see [`crate::cq`]). For a raw packet
    /// that was received: the VLAN tag that was taken out of it, or 0.
    pub sq_count: u32,
}

/// The header of a message for a tag-matching SRQ (`struct ibv_wc_tm_info`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TmInfo {
    /// Tag.
    pub tag: u64,
    /// The sending program's own word.
    pub user_data: u32,
}

/// Further fields of a completion that a completion queue keeps if it was made for them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WcDetail {
    /// The device's clock, in its ticks.
    pub timestamp: u64,
    /// Nanoseconds since 1970.
    pub wallclock: u64,
    /// Header of a matched message.
    pub tm: TmInfo,
}

/// A work completion of an extended completion queue (`struct ibv_cq_ex`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WcEx {
    /// The completion.
    pub wc: Wc,
    /// The further fields; zeros where they are not kept.
    pub detail: WcDetail,
}

impl Wc {
    /// The tag that the flow rule gave which led a raw packet here; 0 without one.
    #[must_use]
    pub fn flow_tag(&self) -> u32 {
        let other = WcFlags::WITH_IMM | WcFlags::WITH_INV;
        if self.opcode == WcOpcode::Recv && !self.flags.intersects(other) { self.imm } else { 0 }
    }

    /// The tag control information that was taken out of a raw packet; 0 without one.
    #[must_use]
    pub fn cvlan(&self) -> u16 {
        if self.opcode.is_recv() { self.sq_count as u16 } else { 0 }
    }
}

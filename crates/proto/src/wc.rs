//! Work completions.

use bitflags::bitflags;

use crate::types::Qpn;

/// `enum ibv_wc_status`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
#[repr(u8)]
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
    /// Anything else.
    GeneralErr = 21,
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
    /// A request that left in segments.
    Tso = 7,
    /// A receive.
    Recv = 128,
    /// A receive that a WRITE with immediate data took.
    RecvRdmaWithImm = 129,
}

impl WcOpcode {
    /// Whether a receive queue made it.
    #[must_use]
    pub fn is_recv(self) -> bool {
        matches!(self, Self::Recv | Self::RecvRdmaWithImm)
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
    }
}

/// A work completion (`struct ibv_wc`). After an error only `wr_id`, `status`, `qpn` and `vendor_err` hold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wc {
    /// From the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: WcStatus,
    /// What was done.
    pub opcode: WcOpcode,
    /// Which of the fields hold.
    pub flags: WcFlags,
    /// Service level of a datagram.
    pub sl: u8,
    /// Our own reason code behind an error; 0 for none.
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

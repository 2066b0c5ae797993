//! USDT probes on the way of a message (`docs/probes.md`). Where nobody traces, each is a look at a word of its own.

use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wr::SendOp;
use probe::probe_lazy;

/// A send was posted.
#[inline(always)]
pub(crate) fn post(qpn: Qpn, wr_id: u64, op: &SendOp, len: u32) {
    probe_lazy!(anyverbs, post, qpn.get(), wr_id, opcode(op), len);
}

/// The same, of a SEND, WRITE or READ.
#[inline(always)]
pub(crate) fn post_as(opcode: u32, qpn: Qpn, wr_id: u64, len: u32) {
    probe_lazy!(anyverbs, post, qpn.get(), wr_id, opcode, len);
}

/// Packets of a queue pair were given to a link.
#[inline(always)]
pub(crate) fn transmit(qpn: Qpn, bth: &Bth, packets: u32, len: usize) {
    probe_lazy!(anyverbs, transmit, qpn.get(), bth.psn.get(), bth.opcode.code(), packets, len);
}

/// A short SEND has left by a lane.
#[inline(always)]
pub(crate) fn transmit_short(qpn: Qpn, psn: Psn, len: u32) {
    transmit_send(qpn, psn, 1, len);
}

/// A SEND has left that stands for so many packets.
#[inline(always)]
pub(crate) fn transmit_send(qpn: Qpn, psn: Psn, packets: u32, len: u32) {
    probe_lazy!(anyverbs, transmit, qpn.get(), psn.get(), SEND_ONLY, packets, len);
}

/// A packet came for a queue pair.
#[inline(always)]
pub(crate) fn receive(qpn: Qpn, bth: &Bth, packets: u32, len: usize) {
    probe_lazy!(anyverbs, receive, qpn.get(), bth.psn.get(), bth.opcode.code(), packets, len);
}

/// A short SEND came by a lane.
#[inline(always)]
pub(crate) fn receive_short(qpn: Qpn, psn: Psn, len: usize) {
    receive_send(qpn, psn, 1, len);
}

/// A SEND came that stands for so many packets.
#[inline(always)]
pub(crate) fn receive_send(qpn: Qpn, psn: Psn, packets: u32, len: usize) {
    probe_lazy!(anyverbs, receive, qpn.get(), psn.get(), SEND_ONLY, packets, len);
}

/// The opcode of a packet on an RC connection that is a whole SEND.
const SEND_ONLY: u8 = 4;

// `enum ibv_wr_opcode`.
pub(crate) const WRITE: u32 = 0;
pub(crate) const SEND: u32 = 2;
pub(crate) const READ: u32 = 4;

/// The same of any request.
fn opcode(op: &SendOp) -> u32 {
    match op {
        SendOp::Write(_) => WRITE,
        SendOp::WriteImm(..) => 1,
        SendOp::Send => SEND,
        SendOp::SendImm(_) => 3,
        SendOp::Read(_) => READ,
        SendOp::CompareSwap { .. } => 5,
        SendOp::FetchAdd { .. } => 6,
        SendOp::LocalInv(_) => 7,
        SendOp::BindMw(_) => 8,
        SendOp::SendInv(_) => 9,
        SendOp::Flush { .. } => 14,
        SendOp::AtomicWrite { .. } => 15,
    }
}

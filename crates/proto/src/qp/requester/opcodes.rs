//! The opcodes of a request: of its packets, and of its completion.

use crate::wc::WcOpcode;
use crate::wire::opcode::Operation;
use crate::wr::SendOp;

/// The operation of one packet of a message.
pub(super) fn operation(op: &SendOp, first: bool, last: bool) -> Operation {
    use Operation as O;
    match (op, first, last) {
        (SendOp::Read(_), ..) => O::ReadRequest,
        (SendOp::CompareSwap { .. }, ..) => O::CompareSwap,
        (SendOp::FetchAdd { .. }, ..) => O::FetchAdd,
        (SendOp::AtomicWrite { .. }, ..) => O::AtomicWrite,
        (SendOp::Flush { .. }, ..) => O::Flush,
        (SendOp::Write(_) | SendOp::WriteImm(..), true, false) => O::WriteFirst,
        (SendOp::Write(_) | SendOp::WriteImm(..), false, false) => O::WriteMiddle,
        (SendOp::Write(_), false, true) => O::WriteLast,
        (SendOp::Write(_), true, true) => O::WriteOnly,
        (SendOp::WriteImm(..), false, true) => O::WriteLastImm,
        (SendOp::WriteImm(..), true, true) => O::WriteOnlyImm,
        (_, true, false) => O::SendFirst,
        (_, false, false) => O::SendMiddle,
        // Local operations are no messages and do not come here.
        (SendOp::Send | SendOp::BindMw(_) | SendOp::LocalInv(_), false, true) => O::SendLast,
        (SendOp::Send | SendOp::BindMw(_) | SendOp::LocalInv(_), true, true) => O::SendOnly,
        (SendOp::SendImm(_), false, true) => O::SendLastImm,
        (SendOp::SendImm(_), true, true) => O::SendOnlyImm,
        (SendOp::SendInv(_), false, true) => O::SendLastInv,
        (SendOp::SendInv(_), true, true) => O::SendOnlyInv,
    }
}

pub(super) fn wc_opcode(op: &SendOp) -> WcOpcode {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => WcOpcode::Send,
        SendOp::Write(_) | SendOp::WriteImm(..) => WcOpcode::RdmaWrite,
        SendOp::Read(_) => WcOpcode::RdmaRead,
        SendOp::CompareSwap { .. } => WcOpcode::CompSwap,
        SendOp::FetchAdd { .. } => WcOpcode::FetchAdd,
        SendOp::AtomicWrite { .. } => WcOpcode::AtomicWrite,
        SendOp::Flush { .. } => WcOpcode::Flush,
        SendOp::BindMw(_) => WcOpcode::BindMw,
        SendOp::LocalInv(_) => WcOpcode::LocalInv,
    }
}

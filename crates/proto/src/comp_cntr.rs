//! The operations of a queue pair that a completion counter counts (`ibv_qp_attach_comp_cntr`).

use bitflags::bitflags;

use crate::wr::SendOp;

bitflags! {
    /// `enum ibv_qp_attach_comp_cntr_op`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct CompCntrOps: u8 {
        /// SENDs.
        const SEND = 1;
        /// Receives.
        const RECV = 2;
        /// READs.
        const RDMA_READ = 4;
        /// The peer's READs.
        const REMOTE_RDMA_READ = 8;
        /// WRITEs.
        const RDMA_WRITE = 16;
        /// The peer's WRITEs.
        const REMOTE_RDMA_WRITE = 32;
    }
}

impl CompCntrOps {
    /// The counter that a send belongs to. Operations that the manual does not list belong to none.
    #[must_use]
    pub(crate) fn of(op: &SendOp) -> Self {
        match op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => Self::SEND,
            SendOp::Write(_) | SendOp::WriteImm(..) => Self::RDMA_WRITE,
            SendOp::Read(_) => Self::RDMA_READ,
            SendOp::CompareSwap { .. }
            | SendOp::FetchAdd { .. }
            | SendOp::AtomicWrite { .. }
            | SendOp::Flush { .. }
            | SendOp::BindMw(_)
            | SendOp::LocalInv(_) => Self::empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::feth::Feth;
    use crate::wr::RemoteAddr;

    #[test]
    fn sends_reads_and_writes_are_counted_and_nothing_else() {
        let at = RemoteAddr { va: 0, rkey: 1 };
        for op in [SendOp::Send, SendOp::SendImm(1), SendOp::SendInv(1)] {
            assert_eq!(CompCntrOps::of(&op), CompCntrOps::SEND, "{op:?}");
        }
        for op in [SendOp::Write(at), SendOp::WriteImm(at, 1)] {
            assert_eq!(CompCntrOps::of(&op), CompCntrOps::RDMA_WRITE, "{op:?}");
        }
        assert_eq!(CompCntrOps::of(&SendOp::Read(at)), CompCntrOps::RDMA_READ);
        let others = [
            SendOp::CompareSwap { at, compare: 0, swap: 0 },
            SendOp::FetchAdd { at, add: 0 },
            SendOp::AtomicWrite { at, data: None },
            SendOp::Flush { at, len: 0, feth: Feth::default() },
            SendOp::LocalInv(1),
        ];
        for op in others {
            assert_eq!(CompCntrOps::of(&op), CompCntrOps::empty(), "{op:?}");
        }
    }
}

//! Work requests and completions of the system's devices.

use std::ptr;
use std::sync::Arc;

use anyverbs_objects::error::PostError;
use anyverbs_objects::memory::copy_guarded;
use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::recv_queue::PostRecvError;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::{Wc, WcFlags, WcOpcode, WcStatus};
use anyverbs_proto::wr::{MAX_MESSAGE, MAX_SGE, RecvWr, SendFlags, SendOp, SendWr, Sge};

use super::Qp;
use super::abi::*;
use super::memory::Slice;
use crate::ordinary::{PostFailure, QpExt};
use crate::verbs::Memory;

/// The elements as C has them; none if there are more than `most`, the queue pair's.
fn elements(sges: &[Sge], most: u32) -> Option<[ibv_sge; MAX_SGE]> {
    let mut elements = [ibv_sge::default(); MAX_SGE];
    let room = elements.get_mut(..sges.len()).filter(|room| room.len() <= most as usize)?;
    for (element, sge) in room.iter_mut().zip(sges) {
        *element = ibv_sge { addr: sge.addr, length: sge.len, lkey: sge.lkey };
    }
    Some(elements)
}

/// `enum ibv_wr_opcode`, the word of immediate data, and the operand.
fn operation(op: &SendOp) -> Result<(u32, u32, Operand), PostError> {
    let none = Operand { atomic: Atomic::default() };
    let rdma = |remote_addr, rkey| Operand { rdma: Rdma { remote_addr, rkey } };
    Ok(match *op {
        SendOp::Write(at) => (0, 0, rdma(at.va, at.rkey)),
        SendOp::WriteImm(at, imm) => (1, imm.to_be(), rdma(at.va, at.rkey)),
        SendOp::Send => (2, 0, none),
        SendOp::SendImm(imm) => (3, imm.to_be(), none),
        SendOp::Read(at) => (4, 0, rdma(at.va, at.rkey)),
        SendOp::CompareSwap { at, compare, swap } => {
            let atomic = Atomic { remote_addr: at.va, compare_add: compare, swap, rkey: at.rkey };
            (5, 0, Operand { atomic })
        }
        SendOp::FetchAdd { at, add } => {
            let atomic = Atomic { remote_addr: at.va, compare_add: add, swap: 0, rkey: at.rkey };
            (6, 0, Operand { atomic })
        }
        _ => return Err(PostError::System(libc::EOPNOTSUPP)),
    })
}

impl Qp {
    /// The length of a send. An error is the one of the device of the process.
    fn check(&self, wr: &SendWr<'_>) -> Result<u32, PostError> {
        let is_datagram = self.qp_type == QpType::Ud;
        // The provider reads the handle of each datagram, and the program chooses what else the union holds.
        match wr.ud {
            None if is_datagram => return Err(PostSendError::NoDestination.into()),
            Some(_) if !is_datagram => return Err(PostError::System(libc::EINVAL)),
            Some(to) if to.pd() != self.pd.number => return Err(PostError::Foreign),
            _ => {}
        }
        if is_datagram && !matches!(wr.op, SendOp::Send | SendOp::SendImm(_)) {
            return Err(PostError::System(libc::EOPNOTSUPP));
        }
        let len: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
        let len = u32::try_from(len).ok().filter(|len| *len <= MAX_MESSAGE);
        let len = len.ok_or(PostSendError::TooLong)?;
        if wr.flags.contains(SendFlags::INLINE) {
            if wr.op.has_response_data() {
                return Err(PostSendError::InlineRead.into());
            }
            if len > self.cap.max_inline_data {
                return Err(PostSendError::InlineTooLong.into());
            }
        }
        Ok(len)
    }
}

/// Copies the data of an inline send, `len` bytes. The elements name any addresses, and a provider would read them unguarded.
fn gather(sges: &[Sge], len: u32, data: &mut Vec<u8>) -> Result<(), PostSendError> {
    data.resize(len as usize, 0);
    let mut room = data.as_mut_slice();
    for sge in sges {
        let (here, rest) = room.split_at_mut(sge.len as usize);
        // SAFETY: the piece is ours alone. The other side may be unmapped or written meanwhile.
        let copied = unsafe { copy_guarded(here.as_mut_ptr(), sge.addr as *const u8, here.len()) };
        copied.map_err(|_| PostSendError::Fault)?;
        room = rest;
    }
    Ok(())
}

impl QpExt<Slice> for Qp {
    fn post_send_wr(&self, wr: &SendWr<'_>) -> Result<(), PostError> {
        let most = self.cap.max_send_sge;
        let mut elements = elements(wr.sges, most).ok_or(PostSendError::TooManySges)?;
        let (opcode, imm_data, mut operand) = operation(&wr.op)?;
        let len = self.check(wr)?;
        if let Some(to) = wr.ud {
            let handle =
                self.pd.handle(&to.av).map_err(|error| PostError::System(error.errno()))?;
            let (remote_qpn, remote_qkey) = (to.qpn.get(), to.qkey.0);
            operand.ud = Ud { ah: handle.0, remote_qpn, remote_qkey };
        }
        let mut count = wr.sges.len();
        // The guard is held through the call, which reads the data.
        let mut inline;
        if wr.flags.contains(SendFlags::INLINE) {
            inline = self.inline.lock().unwrap_or_else(|broken| broken.into_inner());
            gather(wr.sges, len, &mut inline)?;
            elements[0] = ibv_sge { addr: inline.as_ptr() as u64, length: len, lkey: 0 };
            count = usize::from(len > 0);
        }
        let mut raw = ibv_send_wr {
            wr_id: wr.wr_id,
            next: ptr::null_mut(),
            sg_list: elements.as_mut_ptr(),
            num_sge: count as i32,
            opcode,
            send_flags: SendFlags::from_bits_truncate(wr.flags.bits()).bits(),
            imm_data,
            wr: operand,
            remote_srqn: 0,
            ext: [0; 6],
        };
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair, the function of its context, and a request that lives through the call. What the call reads by
        // itself is ours: the handle of a datagram and inline data. Other memory is named by key.
        let failed = unsafe {
            let post = (*(*self.raw.0).context).post_send.ok_or(PostError::System(libc::ENOSYS))?;
            post(self.raw.0, &raw mut raw, &raw mut bad)
        };
        if failed == 0 { Ok(()) } else { Err(PostError::System(failed.abs())) }
    }

    fn post_recv_wr(&self, wr: &RecvWr<'_>) -> Result<(), PostError> {
        let most = self.cap.max_recv_sge;
        let mut elements = elements(wr.sges, most).ok_or(PostRecvError::TooManySges)?;
        let mut raw = ibv_recv_wr {
            wr_id: wr.wr_id,
            next: ptr::null_mut(),
            sg_list: elements.as_mut_ptr(),
            num_sge: wr.sges.len() as i32,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair, the function of its context, and a request that lives through the call.
        let failed = unsafe {
            let post = (*(*self.raw.0).context).post_recv.ok_or(PostError::System(libc::ENOSYS))?;
            post(self.raw.0, &raw mut raw, &raw mut bad)
        };
        if failed == 0 { Ok(()) } else { Err(PostError::System(failed.abs())) }
    }

    fn sge_of(&self, slice: &Slice) -> Result<Sge, PostError> {
        Arc::ptr_eq(slice.pd(), &self.pd).then(|| slice.sge()).ok_or(PostError::Foreign)
    }

    fn post_send_list(&self, wrs: &[SendWr<'_>]) -> Result<(), PostFailure> {
        let mut wrs = wrs.iter().enumerate();
        wrs.try_for_each(|(index, wr)| self.post_send_wr(wr).map_err(|e| (index, e).into()))
    }

    fn post_recv_list(&self, wrs: &[RecvWr<'_>]) -> Result<(), PostFailure> {
        let mut wrs = wrs.iter().enumerate();
        wrs.try_for_each(|(index, wr)| self.post_recv_wr(wr).map_err(|e| (index, e).into()))
    }
}

/// A completion in the crate's terms. A status that it does not know becomes [`WcStatus::GeneralErr`].
pub(super) fn completion(wc: &ibv_wc) -> Wc {
    use WcOpcode::*;
    use WcStatus::*;
    let status = [
        Success,
        LocLenErr,
        LocQpOpErr,
        LocEecOpErr,
        LocProtErr,
        WrFlushErr,
        MwBindErr,
        BadRespErr,
        LocAccessErr,
        RemInvReqErr,
        RemAccessErr,
        RemOpErr,
        RetryExcErr,
        RnrRetryExcErr,
    ];
    let status = status.into_iter().find(|known| *known as u32 == wc.status);
    let opcodes = [Send, RdmaWrite, RdmaRead, CompSwap, FetchAdd, Recv, RecvRdmaWithImm];
    let opcode = opcodes.into_iter().find(|known| *known as u32 == wc.opcode);
    let flags = WcFlags::from_bits_truncate(wc.wc_flags as u8);
    let has_imm = flags.contains(WcFlags::WITH_IMM);
    Wc {
        wr_id: wc.wr_id,
        status: status.unwrap_or(GeneralErr),
        opcode: opcode.unwrap_or_default(),
        flags,
        sl: wc.sl,
        vendor_err: wc.vendor_err,
        byte_len: wc.byte_len,
        imm: if has_imm { u32::from_be(wc.imm_data) } else { wc.imm_data },
        qpn: Qpn::new(wc.qp_num),
        src_qpn: Qpn::new(wc.src_qp),
        sq_count: 0,
    }
}

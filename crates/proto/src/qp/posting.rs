//! Posting: checks of a work request when it is queued, and whether a send may wait for others.

use thiserror::Error;

use super::attr::{QpState, QpType};
use super::{Qp, requester};
use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::env::{Env, Side};
use crate::memory::Memory;
use crate::recv_queue::{PostRecvError, RecvQueue};
use crate::wc::{Wc, WcOpcode, WcStatus};
use crate::wr::{MAX_MESSAGE, RecvWr, SendFlags, SendWr, Sge};

/// The reason why a send was not posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PostSendError {
    /// `EINVAL`: sends may be posted in RTS, SQD, SQE and ERR only (IBA 10.3.1).
    #[error("the queue pair is not ready to send")]
    State,
    /// `ENOMEM`: no slot is free; one is when a completion that covers it was polled.
    #[error("the send queue is full")]
    Full,
    /// `EINVAL`.
    #[error("more scatter/gather elements than the queue pair was created for")]
    TooManySges,
    /// `EINVAL`.
    #[error("more inline data than the queue pair was created for")]
    InlineTooLong,
    /// `EFAULT`: the inline data cannot be read.
    #[error("the inline data is not mapped")]
    Fault,
    /// `EINVAL`: a datagram without a destination.
    #[error("a datagram needs an address handle")]
    NoDestination,
    /// `EINVAL`: more than [`MAX_MESSAGE`] bytes.
    #[error("the message is longer than {MAX_MESSAGE} bytes")]
    TooLong,
    /// `EINVAL`: the target of an extended reliable connection, or the send queue is the device's, which matches tags.
    #[error("the queue pair does not send")]
    NoSendQueue,
    /// `EINVAL`: a header longer than the queue pair was created for, or segments of nothing.
    #[error("no segments can be made as asked")]
    Segmentation,
    /// `EINVAL`: a READ or atomic has no data that could be inline.
    #[error("the operation cannot have inline data")]
    InlineRead,
}

impl Qp {
    /// Queues a send. Call [`transmit`](Self::transmit) after the last of a list.
    pub fn post_send<E: Env>(&mut self, wr: &SendWr<'_>, env: &mut E) -> Result<(), PostSendError> {
        if self.post_short_send(wr, env) {
            return Ok(());
        }
        if matches!(self.attr.state, QpState::Reset | QpState::Init | QpState::Rtr) {
            return Err(PostSendError::State);
        }
        if wr.sges.len() > self.sq.max_sge() {
            return Err(PostSendError::TooManySges);
        }
        if self.init.qp_type == QpType::Ud && wr.ud.is_none() {
            return Err(PostSendError::NoDestination);
        }
        if self.sq.is_full(self.attached.credit.released()) {
            let receives_only =
                self.init.qp_type == QpType::XrcRecv || self.srq.tag_matching.is_some();
            if receives_only {
                return Err(PostSendError::NoSendQueue);
            }
            self.explain_full(env);
            return Err(PostSendError::Full);
        }
        let len: u64 = wr.sges.iter().map(|s| u64::from(s.len)).sum();
        let len = u32::try_from(len).ok().filter(|l| *l <= MAX_MESSAGE);
        let len = len.ok_or(PostSendError::TooLong)?;
        if wr.flags.contains(SendFlags::INLINE) {
            if wr.op.has_response_data() {
                return Err(PostSendError::InlineRead);
            }
            if len as usize > self.sq.max_inline() {
                return Err(PostSendError::InlineTooLong);
            }
            let mut room = &mut self.sq.inline_mut()[..len as usize];
            for sge in wr.sges {
                let (here, rest) = std::mem::take(&mut room).split_at_mut(sge.len as usize);
                env.memory().read(sge.addr, here).map_err(|_| PostSendError::Fault)?;
                room = rest;
            }
        }
        self.sq.stage(wr, len);
        self.sq.commit();
        if matches!(self.attr.state, QpState::Err | QpState::Sqe) {
            self.flush_sends(env);
        }
        Ok(())
    }

    /// Tells whether posted sends have not left yet.
    #[must_use]
    #[inline]
    pub fn has_unsent(&self) -> bool {
        self.sq.next != self.sq.head()
    }

    /// Tells whether posted sends may wait for more, to leave with them in one batch of `batch` bytes ([`LinkProps::batch`](crate::env::LinkProps::batch)).
    /// They may if they are small, and an answer on its way will cause the next sending, but for the
    /// [end of a group](Self::ends_group). A caller that lets them wait
    /// calls [`transmit`](Self::transmit) soon all the same.
    #[must_use]
    pub fn may_gather(&self, batch: u32) -> bool {
        let waiting = self.sq.head().wrapping_sub(self.sq.next);
        if waiting == 0 || waiting >= requester::BATCH_PACKETS || !self.awaits_answer() {
            return false;
        }
        let newest = self.sq.at(self.sq.head().wrapping_sub(1));
        let each = newest.len.saturating_add(requester::WRITE_OVERHEAD);
        !newest.op.has_response()
            && !newest.op.is_local()
            && newest.len <= self.mtu()
            && !self.ends_group()
            && waiting.saturating_add(1).saturating_mul(each) <= batch
    }

    /// Tells whether the newest send is the first signaled one behind as many as a batch takes. The program may have nothing to do
    /// until that one is complete, and the queue would run empty.
    fn ends_group(&self) -> bool {
        const BEFORE: u32 = requester::BATCH_PACKETS;
        let is_signaled = |n: u32| {
            let sqe = self.sq.at(self.sq.head().wrapping_sub(n));
            sqe.flags.contains(SendFlags::SIGNALED)
        };
        self.sq.outstanding() > BEFORE && is_signaled(1) && !(2..=BEFORE + 1).any(is_signaled)
    }

    /// Sends that were posted so far, modulo 2^32: [`Wc::sq_count`] of the completion of the next one is higher.
    #[must_use]
    pub fn sends_posted(&self) -> u32 {
        self.sq.head()
    }

    /// The number of sends that the queue takes before one of its completions is polled.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.sq.room(self.attached.credit.released())
    }

    /// Queues a receive.
    pub fn post_recv<E: Env>(&mut self, wr: &RecvWr<'_>, env: &mut E) -> Result<(), PostRecvError> {
        if let Some(queued) = self.queue_recv(wr) {
            return queued;
        }
        if wr.sges.len() > self.init.cap.max_recv_sge as usize {
            return Err(PostRecvError::TooManySges);
        }
        let wc = Wc {
            wr_id: wr.wr_id,
            status: WcStatus::WrFlushErr,
            opcode: WcOpcode::Recv,
            qpn: self.qpn,
            vendor_err: self.vendor_err(),
            ..Wc::default()
        };
        env.count(Counter::RespCqeError, 1);
        self.count_completion(CompCntrOps::RECV, 0, true, env);
        env.complete(Side::Recv, wc, true);
        Ok(())
    }

    /// As [`post_recv`](Self::post_recv), where that touches nothing but the queue. None in the error state: the receive is
    /// flushed at once.
    #[inline]
    #[must_use]
    pub fn queue_recv(&mut self, wr: &RecvWr<'_>) -> Option<Result<(), PostRecvError>> {
        let Some(rq) = &mut self.rq else { return Some(Err(self.without_receives())) };
        match self.attr.state {
            QpState::Reset => Some(Err(PostRecvError::State)),
            QpState::Err => None,
            _ => Some(rq.push(wr)),
        }
    }

    /// Why it takes no receives, though it may get messages.
    #[cold]
    fn without_receives(&self) -> PostRecvError {
        match self.init.qp_type {
            QpType::XrcSend | QpType::XrcRecv => PostRecvError::NoQueue,
            _ => PostRecvError::HasSrq,
        }
    }

    /// Queues a receive of one element. With false nothing was posted, and [`queue_recv`](Self::queue_recv) takes it or says
    /// what is wrong.
    #[inline]
    #[must_use]
    pub fn queue_single(&mut self, wr_id: u64, sge: Sge) -> bool {
        let takes = !matches!(self.attr.state, QpState::Reset | QpState::Err);
        takes && self.rq.as_mut().is_some_and(|rq| rq.push_single(wr_id, sge))
    }

    /// The number of messages that the queue pair's own receive queue has receives for. `None` if it has no such queue,
    /// or takes no packets now.
    #[must_use]
    pub fn recvs_posted(&self) -> Option<usize> {
        self.rq.as_ref().filter(|_| self.attr.state.receives()).map(RecvQueue::len)
    }
}

//! Queue pair: the machines of requester and responder behind one lock.
//!
//! The device calls in, the machines answer through [`Env`]. Nothing here blocks, and nothing is allocated once
//! a queue pair is ready to send.

pub mod attr;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use thiserror::Error;

use crate::env::Env;
use crate::recv_queue::PostRecvError;
use crate::time::Time;
use crate::types::{Gid, Qpn};
use crate::wire::packet::Packet;
use crate::wr::{RecvWr, SendWr};
use attr::{ModifyError, ModifyLimits, QpAttr, QpAttrMask, QpInit, QpState};

/// Why a send was not posted.
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
    /// `EINVAL`: more than 2^31 bytes.
    #[error("the message is too long")]
    TooLong,
}

/// What a poller gives back to a send queue: the slots that polled completions cover (S5.1).
#[derive(Debug, Default)]
pub struct SqCredit(AtomicU32);

impl SqCredit {
    /// Takes [`crate::wc::Wc::sq_count`] of a polled completion of a send. Completions of one queue pair must be handed back in
    /// the order in which they were polled.
    pub fn release(&self, sq_count: u32) {
        self.0.store(sq_count, Ordering::Release);
    }

    fn released(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// How a packet came: its IP header, as far as the machines care.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Arrival {
    /// Sender.
    pub source: Gid,
    /// The address that it was sent to: ours, or a group's.
    pub destination: Gid,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    qpn: Qpn,
}

impl Qp {
    /// A queue pair in RESET.
    #[must_use]
    pub fn new(qpn: Qpn, init: &QpInit) -> Self {
        todo!()
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// What it was made with; `cap` holds the actual sizes.
    #[must_use]
    pub fn init(&self) -> &QpInit {
        todo!()
    }

    /// Its attributes now (`ibv_query_qp`).
    #[must_use]
    pub fn attr(&self) -> &QpAttr {
        todo!()
    }

    /// Its state now.
    #[must_use]
    pub fn state(&self) -> QpState {
        todo!()
    }

    /// Where a poller hands back send slots, without the queue pair's lock.
    #[must_use]
    pub fn sq_credit(&self) -> Arc<SqCredit> {
        todo!()
    }

    /// `ibv_modify_qp`. On an error nothing is changed. The move to ERR flushes both queues; the device purges
    /// the completion queues after a move to RESET.
    pub fn modify<E: Env>(
        &mut self,
        attr: &QpAttr,
        mask: QpAttrMask,
        limits: &ModifyLimits,
        env: &mut E,
    ) -> Result<(), ModifyError> {
        todo!()
    }

    /// Queues a send. Call [`transmit`](Self::transmit) after the last of a list.
    pub fn post_send<E: Env>(&mut self, wr: &SendWr<'_>, env: &mut E) -> Result<(), PostSendError> {
        todo!()
    }

    /// Queues a receive.
    pub fn post_recv<E: Env>(&mut self, wr: &RecvWr<'_>, env: &mut E) -> Result<(), PostRecvError> {
        todo!()
    }

    /// Sends what may be sent now: requests, READ responses that were held back, and an ACK that is owed if
    /// anything else went out. Call it after posting, and when a path that was blocked has room again.
    pub fn transmit<E: Env>(&mut self, env: &mut E) {
        todo!()
    }

    /// Takes a packet whose ICRC is right and whose destination QPN is this queue pair's; whatever it is, the
    /// worst that happens is a count. Sends what it allows (as [`transmit`](Self::transmit)), but holds an ACK back: see
    /// [`owes_ack`](Self::owes_ack).
    pub fn receive<E: Env>(&mut self, arrival: &Arrival, packet: &Packet<'_>, env: &mut E) {
        todo!()
    }

    /// Whether an ACK is held back: the device calls [`acknowledge`](Self::acknowledge) soon, best when nothing else is left to
    /// receive, so that one ACK answers many packets or rides with the program's reply.
    #[must_use]
    pub fn owes_ack(&self) -> bool {
        todo!()
    }

    /// Sends the ACK that is owed, if any.
    pub fn acknowledge<E: Env>(&mut self, env: &mut E) {
        todo!()
    }

    /// When [`on_timer`](Self::on_timer) must be called at the latest. It may move with every call.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        todo!()
    }

    /// Does what is due at `env.now()`: ACK timeout, end of an RNR wait, the next piece of a paced READ response.
    pub fn on_timer<E: Env>(&mut self, env: &mut E) {
        todo!()
    }

    /// The device lost the queue pair's ground (its CQ overran): moves to ERR with [`crate::event::QpEvent::Fatal`].
    pub fn fail<E: Env>(&mut self, env: &mut E) {
        todo!()
    }

    /// Whether requests wait for an answer: such queue pairs share their path's window.
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        todo!()
    }
}

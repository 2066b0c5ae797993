//! The facts about a queue pair for those who look at it from outside: its queues, its traffic, and its wait.
//!
//! All of it follows from state that the machines have anyway.

use anyverbs_causes::Cause;

use super::Qp;
use super::attr::QpState;
use super::timers::Timer;
pub use crate::qp::requester::Repeats;
use crate::recv_queue::RecvQueue;
use crate::time::Time;
use crate::types::Psn;
use crate::wr::SendFlags;

/// The facts about a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its queues.
    pub queues: Queues,
    /// Its traffic.
    pub traffic: Traffic,
    /// How often packets were sent again, since it is ready to send.
    pub repeats: Repeats,
    /// Its packet sequence numbers.
    pub psns: Psns,
    /// The first cause of its failures, if any.
    pub cause: Option<Cause>,
    /// Its wait, and since when, as far as that is known.
    pub waits: (Waits, Option<Time>),
}

/// How full the queues are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queues {
    /// Slots of the send queue that are taken: requests that are not complete, and those whose completion was not polled.
    pub send_taken: u32,
    /// Requests that are not complete.
    pub outstanding: u32,
    /// Requests among these that have not left.
    pub unsent: u32,
    /// Receives that wait in its own queue.
    pub receives: u32,
    /// Receives that were posted to its own queue since its creation or its last reset.
    pub posted: u64,
    /// Receives of these that are complete.
    pub completed: u64,
}

/// Messages since its creation or its last reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests of this end that succeeded: SENDs, WRITEs, READs and atomics.
    pub sent: u64,
    /// Bytes of these.
    pub sent_bytes: u64,
    /// Requests of the peer that were executed, or begun in the case of READs. WRITEs and READs without a message are not among these.
    pub received: u64,
    /// Bytes of these.
    pub received_bytes: u64,
}

/// Packet sequence numbers of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Psns {
    /// The oldest packet without an answer.
    pub unanswered: Psn,
    /// The next new packet.
    pub next: Psn,
    /// The next packet of the peer.
    pub expected: Psn,
}

/// The wait of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// For nothing that it knows of.
    Nothing,
    /// For its program to connect it: it is in RESET or INIT.
    State,
    /// For nothing any more: it is in an error state.
    Failed,
    /// For an answer of the peer.
    Answer,
    /// For the program of the peer to post a receive.
    PeerReceive,
    /// For a rule of a script of faults of the peer, which has it find no receive.
    PeersRule,
    /// For its own program to post a receive: the peer was told to wait.
    OwnReceive,
    /// For the peer, which was told to wait, to send again: a receive is there now.
    PeerRepeat,
    /// For nothing that can come: the peer has given up its message, for which there was no receive.
    PeerGaveUp,
    /// For the rate limit.
    Rate,
    /// For READs and atomics before a fence, or for the peer to take more of these.
    Fence,
    /// For its program: it drains, or has drained, in SQD.
    Drained,
    /// For the link, or for the window, to take more.
    Room,
    /// For nothing that can come: a post was refused, since the send queue is full, and no request in it makes a completion.
    FullSends,
}

impl Qp {
    /// The facts now.
    #[must_use]
    pub fn facts(&self) -> Facts {
        let sq = &self.sq;
        let (sent, sent_bytes) = sq.succeeded();
        let (received, received_bytes) = self.responder.executed();
        let taken = self.rq.as_ref().map_or(0, RecvQueue::taken);
        Facts {
            queues: Queues {
                send_taken: sq.head().wrapping_sub(self.attached.credit.released()),
                outstanding: sq.outstanding(),
                unsent: sq.head().wrapping_sub(sq.next),
                receives: self.rq.as_ref().map_or(0, RecvQueue::len) as u32,
                posted: taken + self.rq.as_ref().map_or(0, RecvQueue::len) as u64,
                completed: taken.saturating_sub(self.responder.has_receive().into()),
            },
            traffic: Traffic { sent, sent_bytes, received, received_bytes },
            repeats: self.requester.repeats(),
            psns: Psns {
                unanswered: self.first_unanswered(),
                next: self.requester.fresh_psn(),
                expected: self.expected(),
            },
            cause: self.first_cause(),
            waits: self.waits(),
        }
    }

    fn waits(&self) -> (Waits, Option<Time>) {
        match self.attr.state {
            QpState::Err | QpState::Sqe => return (Waits::Failed, None),
            QpState::Reset | QpState::Init => return (Waits::State, None),
            QpState::Rtr | QpState::Rts | QpState::Sqd => {}
        }
        if self.timers.is_running(Timer::RnrWait) || self.not_ready_since().is_some() {
            let waits =
                if self.is_put_off_by_rule() { Waits::PeersRule } else { Waits::PeerReceive };
            return (waits, self.not_ready_since());
        }
        if self.awaits_answer() {
            // An answer may leave the timer as it is. Then nobody knows since when the next one is missing.
            let timer = self.timers.started(Timer::Ack).filter(|_| !self.has_answered_lately());
            return (Waits::Answer, self.silent_since().or(timer));
        }
        if self.has_sent_nak() && self.no_receive_since().is_some() {
            let is_posted = self.rq.as_ref().is_some_and(|rq| !rq.is_empty());
            let waits = match is_posted {
                _ if self.has_peer_given_up() => Waits::PeerGaveUp,
                true => Waits::PeerRepeat,
                false => Waits::OwnReceive,
            };
            return (waits, self.no_receive_since());
        }
        if self.attr.state == QpState::Sqd {
            return (Waits::Drained, None);
        }
        if self.has_unsent() {
            let is_fenced = self.sq.at(self.sq.next).flags.contains(SendFlags::FENCE);
            return match self.timers.started(Timer::Rate) {
                Some(since) => (Waits::Rate, Some(since)),
                None if is_fenced => (Waits::Fence, None),
                None => (Waits::Room, None),
            };
        }
        (if self.is_stuck() { Waits::FullSends } else { Waits::Nothing }, None)
    }
}

//! Datagrams that wait to be sent.

use std::collections::VecDeque;

use super::counters::{CmCounters, DropReason};
use super::id::CommId;
use super::mad::Mad;
use super::message::{Attribute, Message};
use crate::qp::Arrival;
use crate::types::Gid;

/// The most datagrams that wait. One more is dropped, as a network would: peers and timers ask again.
const MOST: usize = 16 * 1024;

/// Hop limit of answers to strangers.
const HOP_LIMIT: u8 = 64;

/// A peer's address. Hosts on different links may have the same link-local address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Peer {
    gid: [u8; 16],
    interface: u32,
}

impl Peer {
    /// The sender of a datagram.
    pub(super) fn of(arrival: &Arrival) -> Self {
        Self { gid: arrival.source.0, interface: arrival.interface }
    }
}

/// The destination of datagrams.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Destination {
    pub(super) sgid: Gid,
    pub(super) dgid: Gid,
    /// As [`Transmit::interface`].
    pub(super) interface: u32,
    pub(super) traffic_class: u8,
    pub(super) flow_label: u32,
    pub(super) hop_limit: u8,
}

impl Destination {
    /// Back to where a datagram came from.
    pub(super) fn answering(arrival: &Arrival) -> Self {
        Self {
            sgid: arrival.destination,
            dgid: arrival.source,
            interface: arrival.interface,
            traffic_class: arrival.traffic_class,
            flow_label: arrival.flow_label,
            hop_limit: HOP_LIMIT,
        }
    }

    pub(super) fn peer(&self) -> Peer {
        Peer { gid: self.dgid.0, interface: self.interface }
    }

    /// Tells whether a datagram went between these two addresses.
    pub(super) fn is_of(&self, arrival: &Arrival) -> bool {
        (self.peer(), self.sgid) == (Peer::of(arrival), arrival.destination)
    }
}

/// A datagram to send from QP1 to QP1, with the Q_Key [`crate::types::QKey::GSI`].
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Transmit {
    /// Our address.
    pub sgid: Gid,
    /// The peer's.
    pub dgid: Gid,
    /// The interface of its link, if it is link-local and not of this host; else 0.
    pub interface: u32,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// The payload, to be written by [`Mad::emit`].
    pub mad: Box<Mad>,
}

/// MADs that wait to be sent, and the counters.
#[derive(Debug, Default)]
pub(super) struct MadQueue {
    queue: VecDeque<Transmit>,
    took_last: bool,
    pub(super) counters: CmCounters,
}

impl MadQueue {
    /// Sends a message; returns it for a repetition.
    pub(super) fn send(
        &mut self,
        to: Destination,
        transaction_id: u64,
        message: impl Into<Message>,
    ) -> Box<Mad> {
        self.send_with(to, transaction_id, 0, message)
    }

    /// As [`send`](Self::send); if it may not be sent, it is only made.
    pub(super) fn send_if(
        &mut self,
        may: bool,
        to: Destination,
        transaction_id: u64,
        message: impl Into<Message>,
    ) -> Box<Mad> {
        if may {
            return self.send(to, transaction_id, message);
        }
        self.took_last = false;
        Box::new(Mad { transaction_id, modifier: 0, message: message.into() })
    }

    /// As [`send`](Self::send), with an attribute modifier.
    pub(super) fn send_with(
        &mut self,
        to: Destination,
        transaction_id: u64,
        modifier: u32,
        message: impl Into<Message>,
    ) -> Box<Mad> {
        let mad = Box::new(Mad { transaction_id, modifier, message: message.into() });
        self.push(to, mad.clone());
        mad
    }

    /// Sends a message again, because no answer came.
    pub(super) fn retry(&mut self, to: Destination, mad: &Mad) {
        self.counters.tx_retries.add(mad.message.attribute());
        self.push(to, Box::new(mad.clone()));
    }

    /// Sends a message again, because the peer asked again.
    pub(super) fn replay(&mut self, to: Destination, mad: &Mad) {
        self.push(to, Box::new(mad.clone()));
    }

    fn push(&mut self, to: Destination, mad: Box<Mad>) {
        self.took_last = self.queue.len() < MOST;
        if !self.took_last {
            return self.counters.drop(DropReason::OutboxFull);
        }
        self.counters.tx_msgs.add(mad.message.attribute());
        let Destination { sgid, dgid, interface, traffic_class, flow_label, hop_limit } = to;
        self.queue.push_back(Transmit {
            sgid,
            dgid,
            interface,
            traffic_class,
            flow_label,
            hop_limit,
            mad,
        });
    }

    pub(super) fn pop(&mut self) -> Option<Transmit> {
        self.queue.pop_front()
    }

    pub(super) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Tells whether the last datagram sent waits here. If not, it is lost.
    pub(super) fn took_last(&self) -> bool {
        self.took_last
    }
}

/// The kind and our ID of a message that wants an answer.
pub(super) fn asks(ours: &Mad) -> Option<(Attribute, CommId)> {
    let id = match &ours.message {
        Message::Req(req) => req.local_comm_id,
        Message::Rep(rep) => rep.local_comm_id,
        Message::Dreq(dreq) => dreq.local_comm_id,
        Message::SidrReq(req) => req.request_id,
        _ => return None,
    };
    Some((ours.message.attribute(), id))
}

#[cfg(test)]
mod tests {
    use super::super::message::rtu::Rtu;
    use super::*;

    fn to() -> Destination {
        Destination {
            sgid: Gid([1; 16]),
            dgid: Gid([2; 16]),
            interface: 3,
            traffic_class: 4,
            flow_label: 5,
            hop_limit: 6,
        }
    }

    #[test]
    fn a_datagram_has_all_of_its_destination() {
        let mut queue = MadQueue::default();
        let mad = queue.send(to(), 7, Rtu::default());
        assert!(queue.took_last());
        let Destination { sgid, dgid, interface, traffic_class, flow_label, hop_limit } = to();
        let wanted = Transmit { sgid, dgid, interface, traffic_class, flow_label, hop_limit, mad };
        assert_eq!((queue.pop(), queue.pop()), (Some(wanted), None));
    }

    #[test]
    fn a_full_queue_loses_what_comes_behind_and_says_so() {
        let mut queue = MadQueue::default();
        for n in 0..MOST {
            queue.send(to(), n as u64, Rtu::default());
            assert!(queue.took_last(), "{n}");
        }
        queue.send(to(), 0, Rtu::default());
        assert!(!queue.took_last());
        assert_eq!((queue.len(), queue.counters.dropped(DropReason::OutboxFull)), (MOST, 1));
        assert_eq!(queue.counters.tx_msgs.of(Attribute::Rtu), MOST as u64);
        assert!(queue.pop().is_some());
        queue.send(to(), 0, Rtu::default());
        assert!(queue.took_last());
    }

    #[test]
    fn a_message_that_may_not_be_sent_is_only_made() {
        let mut queue = MadQueue::default();
        let made = queue.send_if(false, to(), 7, Rtu::default());
        assert!(!queue.took_last() && queue.len() == 0);
        assert_eq!(queue.send_if(true, to(), 7, Rtu::default()), made);
        assert!(queue.took_last() && queue.len() == 1);
        queue.retry(to(), &made);
        queue.replay(to(), &made);
        assert_eq!(queue.counters.tx_retries.of(Attribute::Rtu), 1);
        assert_eq!(queue.counters.tx_msgs.of(Attribute::Rtu), 3);
        let sent: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert!(sent.len() == 3 && sent.iter().all(|sent| sent.mad == made));
    }

    #[test]
    fn an_answer_goes_back_to_where_the_question_came_from() {
        let arrival = Arrival {
            source: Gid([8; 16]),
            destination: Gid([9; 16]),
            traffic_class: 10,
            hop_limit: 11,
            flow_label: 12,
            interface: 13,
            port: 14,
        };
        let back = Destination::answering(&arrival);
        let wanted = Destination {
            sgid: Gid([9; 16]),
            dgid: Gid([8; 16]),
            interface: 13,
            traffic_class: 10,
            flow_label: 12,
            hop_limit: HOP_LIMIT,
        };
        assert_eq!(back, wanted);
        assert!(back.is_of(&arrival) && back.peer() == Peer::of(&arrival));
        for other in [
            Arrival { source: Gid([7; 16]), ..arrival },
            Arrival { destination: Gid([7; 16]), ..arrival },
            Arrival { interface: 7, ..arrival },
        ] {
            assert!(!back.is_of(&other));
        }
    }
}

//! The environment: requests of a queue pair's machine to the device around it, for the time of one call.

use std::fmt;
use std::time::Duration;

use anyverbs_causes::Cause;

use crate::arrival::Arrival;
use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::direct::{Direct, Place};
use crate::event::QpEvent;
use crate::memory::{Fault, Memory};
use crate::mr::{Access, KeyError, LastLocal, MrTable};
use crate::payload::Payload;
use crate::reason::Told;
use crate::recv_queue::RecvWqe;
use crate::run::Run;
use crate::tag_list::{Tagged, Taken};
use crate::time::Clock;
use crate::types::{Psn, Qpn};
use crate::wc::{TmInfo, Wc};
use crate::wire::bth::Bth;
use crate::wire::packet::Headers;
use crate::wire::reason::ReasonPacket;
use crate::wr::{AddressVector, Sge};

/// One of a queue pair's two completion queues.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    /// Completions of sends.
    Send,
    /// Completions of receives.
    Recv,
}

/// The reason why a packet was not taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TransmitError {
    /// The payload could not be read. The packet was not sent.
    Fault(Fault),
    /// The path has no room now. The packet was not sent. The device calls [`crate::qp::Qp::transmit`] when there is
    /// room.
    Blocked,
    /// The process at the other end of the link has ended: no answer will come.
    PeerGone,
}

impl From<Fault> for TransmitError {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

/// Facts of the link of a connected queue pair. The device sets them when the route changes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LinkProps {
    /// Longest payload that the link carries in one piece; nothing below the path MTU counts.
    pub segment: u32,
    /// The bytes of a batch, with headers, that the link sends in one call if all packets but the last have one length.
    /// 0 where lengths make no difference.
    pub batch: u32,
    /// Most bytes (payload and 64 a packet) that the queue pair may have in flight on its path now.
    pub window: u32,
    /// The silence of the peer after which the requester sends again without taking it for a timeout. `None` where the
    /// link loses nothing, or the ACK timeout is early enough.
    pub probe_after: Option<Duration>,
    /// Tells whether a silent peer is a queue pair that does not receive. The link loses no packet, and the device
    /// waits for late ones before it calls [`Qp::on_timer`](crate::qp::Qp::on_timer). A longer timeout then gains
    /// nothing.
    pub certain: bool,
    /// Most bytes of requests that came before their turn the responder may keep, until those before them have come; 0
    /// where nothing is lost.
    pub out_of_order_room: usize,
    /// Tells whether the peer sees each message by itself. Then a request may leave while it is posted, since nothing is
    /// gained by waiting for the rest of a list. And it carries a piggybacked ACK ([`LinkEnv::transmit`]).
    pub immediate: bool,
    /// Tells whether a request carries a piggybacked ACK also where the link is not immediate, if the peer takes it
    /// ([`takes`](crate::wire::carried_ack::takes)).
    pub carries_acks: bool,
}

/// Facts where there is no link.
impl Default for LinkProps {
    fn default() -> Self {
        Self::new(0)
    }
}

impl LinkProps {
    /// A link that sends each packet by itself, and loses none, with this window.
    #[must_use]
    pub const fn new(window: u32) -> Self {
        Self {
            segment: 0,
            batch: 0,
            window,
            probe_after: None,
            certain: false,
            out_of_order_room: 0,
            immediate: false,
            carries_acks: false,
        }
    }
}

/// The device around a queue pair.
///
/// All calls come while the queue pair's lock is held. An implementation may take the locks of completion queues, the
/// SRQ and the link below it. It must not take another queue pair's lock.
pub trait Env: Clock + LinkEnv + ReasonEnv + MemoryEnv + CompletionEnv {
    /// Counts.
    fn count(&self, counter: Counter, n: u64);

    /// Takes a line for the log of errors, to be written when no queue pair is locked.
    fn log(&mut self, line: fmt::Arguments<'_>) {
        let _ = line;
    }
}

/// The link that a queue pair sends on.
pub trait LinkEnv {
    /// Its facts, at this moment.
    fn props(&self) -> &LinkProps;

    /// Tells whether a further packet for this queue pair comes at once. If so,
    /// [`Qp::transmit_rest`](crate::qp::Qp::transmit_rest) is called after the last one.
    fn more_follow(&self) -> bool {
        false
    }

    /// Hands one packet to the link, which copies the payload ([`Payload::copy_to`]), pads it (`headers.bth.pad` is not
    /// set) and adds the ICRC. `av` is the queue pair's own path or, on UD, the datagram's. The packet must have left (or be staged, in order) when the device gives up
    /// the queue pair's lock.
    ///
    /// The payload may be as long as [`LinkProps::segment`]. The packet then stands for as many packets as its
    /// payload fills at the path MTU. It takes their PSNs, and arrives with their number in
    /// [`Incoming::packets`](crate::qp::Incoming::packets).
    ///
    /// With `acks` the packet is a request that carries an ACK of everything up to this PSN, which arrives as
    /// [`Incoming::acks`](crate::qp::Incoming::acks). Only a link that is [immediate](LinkProps::immediate) or
    /// [carries ACKs](LinkProps::carries_acks) gets one, and it counts them.
    fn transmit(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
        acks: Option<Psn>,
    ) -> Result<(), TransmitError>;

    /// Hands packets in a row to the link, as [`transmit`](Self::transmit) does one by one. They carry no ACKs. Returns how
    /// many it took, and why not all.
    fn transmit_run(
        &mut self,
        av: &AddressVector,
        run: &Run<'_>,
    ) -> (u32, Result<(), TransmitError>) {
        run.each(|headers, payload| self.transmit(av, headers, payload, None))
    }

    /// Does a WRITE or READ by itself, in the peer's own memory and without a message, if it can: true, and all was copied. Or
    /// fetches the payload of a SEND, if it lay in a region of the peer until the end.
    ///
    /// With false any part may have been copied, and the operation goes the ordinary way: the peer is asked for the payload of its
    /// SEND. So every fault ends in false
    /// and is found on that way: keys, rights, the state of the peer's queue pair, the memory on either side. With true
    /// the peer must be one that would have executed the request: connected to this queue pair, and in a state that
    /// takes requests.
    fn direct(&mut self, operation: &Direct<'_>) -> bool {
        let _ = operation;
        false
    }

    /// Tells whether [`direct`](Self::direct) would do the operation now, as far as the peer's memory says. The requester then
    /// waits for the answers to the messages before it.
    fn admits(&self, operation: &Direct<'_>) -> bool {
        let _ = operation;
        false
    }

    /// Where the peer may fetch the payload of a SEND from, if it can: it is then given to [`transmit`](Self::transmit) with
    /// [`Payload::fetched_from`]. It arrives as [`Data::Elsewhere`](crate::payload::Data::Elsewhere). The payload may be as long
    /// as [`MAX_FETCH`](crate::direct::MAX_FETCH).
    fn fetched(&mut self, payload: &Payload<'_>) -> Option<Place> {
        let _ = payload;
        None
    }
}

/// Reasons of failures, which two devices of this make tell each other.
pub trait ReasonEnv: LinkEnv {
    /// As [`transmit`](LinkEnv::transmit) of a NAK, and tells a peer of this make the reason. The NAK arrives there with the
    /// bytes of `told` as its payload. `is_ours`: the request had the mark [`Bth::OURS`].
    fn refuse(
        &mut self,
        av: &AddressVector,
        headers: &Headers,
        told: Told,
        is_ours: bool,
    ) -> Result<(), TransmitError> {
        let _ = (told, is_ours);
        self.transmit(av, headers, &Payload::EMPTY, None)
    }

    /// The retries of a request have run out, since the peer had no receive for it. Tells a peer of this make so. `is_ours`: its
    /// NAK had the mark [`Bth::OURS`].
    fn tell_given_up(&mut self, av: &AddressVector, packet: &ReasonPacket, is_ours: bool) {
        let _ = (av, packet, is_ours);
    }

    /// Sends the oldest packet that has no answer once more, by a way on which the network and the peer's device can say why.
    /// The packet has the mark [`Bth::ASKS`].
    fn sound(&mut self, av: &AddressVector, headers: &Headers, payload: &Payload<'_>) {
        let _ = (av, headers, payload);
    }

    /// The reason that was heard since. `una` is the PSN of the packet.
    fn heard(&mut self, av: &AddressVector, una: Psn) -> Option<Told> {
        let _ = (av, una);
        None
    }

    /// Whether the peer's process is on this host, and is stopped.
    fn is_stopped(&self, av: &AddressVector, peer: Qpn) -> bool {
        let _ = (av, peer);
        false
    }

    /// The number of the peer's process, if that is or was on this host, and its link is known.
    fn process_of_peer(&self) -> Option<u32> {
        None
    }

    /// The names of the devices of two protection domains of this process, if they are of two devices. The domains are given by the
    /// lower 24 bits of their numbers.
    fn devices_of(&self, pds: [u32; 2]) -> Option<[String; 2]> {
        let _ = pds;
        None
    }

    /// An answer came to a request that this queue pair has not sent. The peer of this address may be connected to this queue pair, and
    /// have a request of another one.
    fn note_stray(&self, av: &AddressVector, psn: Psn) {
        let _ = (av, psn);
    }

    /// Tells in words how a script of faults of this process meddled with the packet `una`, which has no answer. True beside it: that
    /// is why there is none.
    fn meddling(&mut self, una: Psn) -> Option<(bool, String)> {
        let _ = una;
        None
    }

    /// Names the rule of a script of faults of this process that took away a packet of the peer, one from `first` to the one before
    /// `next`.
    fn taken_by_rule(&mut self, first: Psn, next: Psn) -> Option<String> {
        let _ = (first, next);
        None
    }

    /// A packet with the mark [`Bth::ASKS`] was dropped: tells its sender why.
    fn tell_why(&mut self, arrival: &Arrival, dropped: &Bth, cause: Cause) {
        let _ = (arrival, dropped, cause);
    }
}

/// Registered memory, and the keys that name it.
pub trait MemoryEnv {
    /// The memory that regions lie in.
    type Memory: Memory;

    /// Copies to and from registered memory.
    fn memory(&self) -> &Self::Memory;

    /// The device's keys.
    fn mrs(&self) -> &MrTable;

    /// Calls `f` with where the bytes of a local element lie, which stay registered for that long; with `None` if nothing lies
    /// there ([`Access::NULL`]).
    ///
    /// # Errors
    /// As [`MrTable::local`].
    fn with_local<R>(
        &mut self,
        pd: u32,
        sge: &Sge,
        need: Access,
        f: impl FnOnce(&Self::Memory, Option<u64>) -> R,
    ) -> Result<R, KeyError> {
        let mut region = LastLocal::default();
        let addr = region.find(self.mrs(), sge.lkey, pd, sge.addr, sge.len.into(), need)?;
        Ok(f(self.memory(), addr))
    }

    /// Calls `f` with where `len` bytes lie that a peer names to queue pair `qpn`, which stay registered for that long, or
    /// until [`end_remote`](Self::end_remote).
    ///
    /// # Errors
    /// As [`MrTable::remote`].
    fn with_remote<R>(
        &mut self,
        rkey: u32,
        (pd, qpn): (u32, Qpn),
        (va, len): (u64, u64),
        need: Access,
        f: impl FnOnce(&Self::Memory, u64) -> R,
    ) -> Result<R, KeyError> {
        let hold = self.mrs().remote(rkey, (pd, qpn.get()), va, len, need)?;
        Ok(f(self.memory(), hold.addr()))
    }

    /// Releases all that [`with_remote`](Self::with_remote) or READs of peers keep in use. Call it before anything that
    /// takes a window or a region out of use, because that waits for the release.
    fn end_remote(&mut self) {}
}

/// Completions, receives and events of a queue pair.
pub trait CompletionEnv {
    /// Makes a completion. `solicited`: it notifies a channel that is armed for solicited completions only;
    /// errors always do.
    fn complete(&mut self, side: Side, wc: Wc, solicited: bool);

    /// As [`complete`](Self::complete) of the receive side, of a message that has matched a tag.
    fn complete_tagged(&mut self, wc: Wc, tm: TmInfo, solicited: bool) {
        let _ = tm;
        self.complete(Side::Recv, wc, solicited);
    }

    /// One of the operations that the queue pair counts ([`Qp::count`](crate::qp::Qp::count)) has completed.
    fn count_completion(&mut self, op: CompCntrOps, bytes: u32, failed: bool) {
        let _ = (op, bytes, failed);
    }

    /// Takes the oldest WQE of the queue pair's SRQ, and raises the SRQ's limit event where due. Only called
    /// on a queue pair that was created with one, or on XRC after [`select_srq`](Self::select_srq).
    fn take_srq(&mut self, into: &mut RecvWqe) -> bool;

    /// Takes a buffer for a message of the queue pair's tag-matching SRQ. The buffer is the one with the message's tag,
    /// or the oldest of the queue. In the second case a message with a tag counts as unexpected. Raises the SRQ's limit
    /// event where due. `None`: there is no buffer. Only called on a queue pair that was made by
    /// [`Qp::with_tag_matching`](crate::qp::Qp::with_tag_matching).
    fn take_tagged(&mut self, tagged: Tagged, into: &mut RecvWqe) -> Option<Taken> {
        let _ = (tagged, into);
        None
    }

    /// On [`XrcRecv`](crate::qp::attr::QpType::XrcRecv): selects the SRQ with this number and gives its protection
    /// domain. From now on [`take_srq`](Self::take_srq) takes from it, and [`complete`](Self::complete) adds to its
    /// completion queue. `None`, and nothing changes, unless the queue pair's XRC domain has such an SRQ.
    fn select_srq(&mut self, srqn: u32) -> Option<u32> {
        let _ = srqn;
        None
    }

    /// Raises an asynchronous event.
    fn raise(&mut self, event: QpEvent);
}

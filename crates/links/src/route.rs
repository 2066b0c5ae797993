//! The route of a packet: which link it takes, and what follows from that. The links of queue pairs are told apart here and
//! nowhere else.

use std::sync::Arc;

use anyverbs_net::MAX_PAYLOAD_V6;
use anyverbs_proto::counters::Counters;
use anyverbs_proto::direct::{Direct, Place};
use anyverbs_proto::env::{LinkProps, TransmitError};
use anyverbs_proto::mr::LastRemote;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::run::Run;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::credit::CreditPacket;
use anyverbs_proto::wire::reason::ReasonPacket;
use anyverbs_proto::wr::AddressVector;
use anyverbs_record::capture::Way;

use crate::direct::{self, LastCopy, MappedMemory};
pub use crate::outgoing::{Outgoing, Refused};
use crate::path::Path;
use crate::shm::{self, Lanes, Peer, ShmRoute, Spare, Unflushed};
use crate::times::PROBE_AFTER;
use crate::udp::{Asked, Staged, UdpRoute};
use crate::{Links, inproc};

/// Bytes of the out-of-order buffer of a queue pair: a window of a peer like this one.
const OUT_OF_ORDER_ROOM: usize = 256 << 10;

/// Packets that one hold of a queue pair's lock has staged, on any link.
#[derive(Debug, Default)]
pub struct Outbox {
    pub(crate) udp: Staged,
    /// Messages that the same-host link has not shown yet.
    pub(crate) shm: Unflushed,
    /// The region that the peer has named last, in use until the next flush or
    /// [`MemoryEnv::end_remote`](anyverbs_proto::env::MemoryEnv::end_remote). Meanwhile no ring is locked: a thread that has
    /// locked one may be waiting for the end of a window.
    pub target: LastRemote<'static>,
}

impl Outbox {
    /// An empty one, for the packets of a port, by its place.
    #[inline]
    #[must_use]
    pub fn of(device: u8) -> Self {
        let mut out = Self::default();
        out.shm.device = device;
        out
    }

    /// The part that the queue pair keeps for its next sending by the same-host link.
    #[inline]
    pub fn take_spare(&mut self) -> Option<Spare> {
        self.shm.take_spare()
    }

    /// Answers a credit probe: `limit` messages may be sent in all.
    pub fn echo(&mut self, links: &Links, asked: &Asked, limit: u64) {
        let answer = CreditPacket::answer(&asked.packet, limit);
        let by_ring = asked.by_ring
            && links.shm.as_ref().is_some_and(|shm| shm.echo(&mut self.shm, links, asked, answer));
        if !by_ring {
            self.udp.echo(links, asked, answer);
        }
    }

    /// Stages the reason of the NAK that comes next by this route.
    pub fn explain(&mut self, links: &Links, route: &UdpRoute, packet: &ReasonPacket) {
        self.udp.explain(links, route, packet);
    }

    /// Sends what is staged.
    #[inline]
    pub fn flush(&mut self, links: &Links) {
        self.shm.flush(links);
        self.target.release();
        self.udp.flush(links, self.shm.device);
    }
}

/// The way of a packet to its peer.
#[derive(Clone, Debug)]
pub enum Route {
    /// To a queue pair of this process.
    Inproc,
    /// To another process of this host, through shared memory.
    Shm(ShmRoute),
    /// By UDP.
    Udp(UdpRoute),
    /// To a multicast group that the kernel does not deliver: through the queue of this process. The thread that drains
    /// the queue forwards the packets to the other processes.
    HandingOn,
}

impl Route {
    /// The route to a queue pair; `mtu` of a connected one. `reliable`: packets may overtake each other on their way.
    pub fn new(
        links: &'static Links,
        av: &AddressVector,
        dest: Qpn,
        mtu: Option<u32>,
        reliable: bool,
    ) -> Self {
        if is_to_group(av, dest) {
            // The kernel gives copies to the members on this host, too, but where it cannot.
            return if is_handed_on(av, dest) {
                Self::HandingOn
            } else {
                Self::udp(links, av, dest, false)
            };
        }
        let slot = dest.slot();
        if slot == links.core.slot {
            if links.core.config.inproc && links.core.gids.contains(av.dgid) {
                return Self::Inproc;
            }
        } else if let Some(link) = &links.shm
            && slot != 0
            && links.core.gids.is_of_host(av.dgid)
            && let Some(route) = ShmRoute::new(links, link, av, slot, mtu)
        {
            return Self::Shm(route);
        }
        Self::udp(links, av, dest, reliable)
    }

    /// The route that there always is; `reliable` as above.
    pub fn udp(links: &Links, av: &AddressVector, dest: Qpn, reliable: bool) -> Self {
        Self::Udp(UdpRoute::new(links, av, dest.slot(), reliable))
    }

    /// Whether it suits a datagram, whose peer it leads to.
    pub fn suits(&self, av: &AddressVector, dest: Qpn) -> bool {
        matches!(self, Self::HandingOn) == is_handed_on(av, dest)
    }

    /// Its facts for a connected queue pair.
    pub fn props(&self, links: &Links, qp_type: QpType) -> LinkProps {
        let config = &links.core.config;
        match self {
            // Timers wait until queued packets are delivered (`Inproc::has_caught_up`). An XRC target's responder may be
            // in another process.
            Self::Inproc => {
                let certain = qp_type != QpType::XrcSend && !links.may_drop();
                let probe_after = links.loses_packets().then_some(PROBE_AFTER);
                LinkProps { certain, probe_after, ..LinkProps::new(inproc::WINDOW) }
            }
            Self::HandingOn => LinkProps::new(inproc::WINDOW),
            // Packets of a network: without long ones, and with ACKs that travel alone.
            Self::Shm(route) => {
                let peer = route.peer.channel().peer_manner();
                // Until a peer has said that it does nothing to them.
                let needs_packets = links.needs_packets() || !peer.takes_long;
                let loses = links.loses_packets() || peer.loses;
                LinkProps {
                    segment: if needs_packets { 0 } else { shm::SEGMENT },
                    immediate: !needs_packets && !loses,
                    probe_after: loses.then_some(PROBE_AFTER),
                    ..LinkProps::new(shm::WINDOW)
                }
            }
            Self::Udp(udp) => LinkProps {
                batch: if config.udp.gso { MAX_PAYLOAD_V6 as u32 } else { 0 },
                probe_after: Some(PROBE_AFTER),
                out_of_order_room: OUT_OF_ORDER_ROOM,
                carries_acks: links.may_carry_acks(),
                ..LinkProps::new(udp.path.window(false))
            },
        }
    }

    /// The path whose window a reliable queue pair shares with others.
    #[inline]
    pub fn path(&self) -> Option<&Arc<Path>> {
        match self {
            Self::Udp(udp) => Some(&udp.path),
            Self::Inproc | Self::Shm(_) | Self::HandingOn => None,
        }
    }

    /// The way of a datagram that tells a peer the reason of the refusal behind it. `None` where all peers are devices of
    /// this make: there the refusal has the reason as its payload.
    pub fn explains_ahead(&self) -> Option<&UdpRoute> {
        match self {
            Self::Udp(udp) => Some(udp),
            Self::Inproc | Self::Shm(_) | Self::HandingOn => None,
        }
    }

    /// Its part that goes through shared memory, if it does.
    #[inline]
    pub fn shm(&self) -> Option<&ShmRoute> {
        match self {
            Self::Shm(shm) => Some(shm),
            Self::Inproc | Self::Udp(_) | Self::HandingOn => None,
        }
    }

    /// The other process at its end, if it goes through shared memory.
    pub fn shm_peer(&self) -> Option<&Arc<Peer>> {
        self.shm().map(|shm| &shm.peer)
    }

    /// Its name in a capture.
    pub fn way(&self) -> Way {
        match self {
            Self::Shm(_) => Way::Ring,
            Self::Udp(_) => Way::Udp,
            Self::Inproc | Self::HandingOn => Way::InProcess,
        }
    }

    /// Whether it ends in this process.
    pub fn is_inproc(&self) -> bool {
        matches!(self, Self::Inproc)
    }

    /// Sends a packet, or stages it until [`Outbox::flush`].
    #[inline]
    pub fn send(
        &self,
        out: &mut Outbox,
        spare: &mut Spare,
        links: &'static Links,
        packet: &Outgoing<'_>,
        now: impl Fn() -> Time,
    ) -> Result<(), Refused> {
        match self {
            Self::Shm(route) => {
                // The thread that has locked a ring may be waiting for the end of a window.
                out.target.release();
                route.send(&mut out.shm, spare, links, packet, now)
            }
            Self::Udp(route) => Ok(out.udp.send(links, route, packet, &mut out.target, now())?),
            Self::Inproc => Ok(links.inproc.send(links, out.shm.device, packet, false)?),
            Self::HandingOn => {
                out.target.release();
                Ok(links.inproc.send(links, out.shm.device, packet, true)?)
            }
        }
    }

    /// Stages packets in a row of a reliable queue pair; how many, and why not the next. `None`: this link takes each by
    /// itself.
    #[inline]
    pub fn send_run(
        &self,
        out: &mut Outbox,
        links: &'static Links,
        run: &Run<'_>,
    ) -> Option<(u32, Result<(), TransmitError>)> {
        match self {
            Self::Udp(route) => Some(out.udp.send_run(links, route, run, &mut out.target)),
            Self::Shm(_) | Self::Inproc | Self::HandingOn => None,
        }
    }

    /// Asks the peer for a lane of the queue pair `from` to the queue pair `dest`, if the link has lanes, and it is time.
    #[inline]
    pub fn ask_for_lane(
        &self,
        out: &mut Outbox,
        (spare, lanes): (&mut Spare, &mut Lanes),
        links: &'static Links,
        (from, dest): (Qpn, Qpn),
    ) {
        if let Self::Shm(route) = self {
            lanes.ask(links, route, &mut out.shm, spare, (from, dest));
        }
    }

    /// Does a one-sided operation of a queue pair, with the counters of its device, without a message, if the link can.
    #[inline]
    pub fn direct(
        &self,
        links: &'static Links,
        last: &mut LastCopy,
        this: (Qpn, &Counters),
        operation: &Direct<'_>,
    ) -> bool {
        match self {
            Self::Shm(route) => direct::perform(links, route, last, this, operation),
            Self::Inproc | Self::Udp(_) | Self::HandingOn => false,
        }
    }

    /// The memory that a WRITE of a queue pair is about, if this process has mapped it.
    #[must_use]
    pub fn mapped_memory(
        &self,
        links: &'static Links,
        this: (Qpn, &Counters),
        operation: &Direct<'_>,
    ) -> Option<MappedMemory> {
        match self {
            Self::Shm(route) => direct::mapped_memory(links, route, this, operation),
            Self::Inproc | Self::Udp(_) | Self::HandingOn => None,
        }
    }

    /// Where the peer may fetch the payload of a SEND of an RC queue pair from, if the link can.
    #[must_use]
    pub fn fetched(&self, links: &Links, from: Qpn, payload: &Payload<'_>) -> Option<Place> {
        match self {
            Self::Shm(route) => direct::fetched(links, route, from, payload),
            Self::Inproc | Self::Udp(_) | Self::HandingOn => None,
        }
    }

    /// Tells whether the peer takes a one-sided operation of a queue pair without a message.
    #[must_use]
    pub fn admits(&self, links: &Links, from: Qpn, operation: &Direct<'_>) -> bool {
        match self {
            Self::Shm(route) => direct::admits(links, route, from, operation),
            Self::Inproc | Self::Udp(_) | Self::HandingOn => false,
        }
    }
}

fn is_to_group(av: &AddressVector, dest: Qpn) -> bool {
    dest == Qpn::MULTICAST && av.dgid.is_multicast()
}

fn is_handed_on(av: &AddressVector, dest: Qpn) -> bool {
    is_to_group(av, dest) && anyverbs_net::is_handed_on(av.dgid.to_ip(), av.scope_id)
}

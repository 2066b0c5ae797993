//! The kinds of received datagrams.

use std::mem;
use std::net::{IpAddr, SocketAddr};

use anyverbs_net::Datagram;
use anyverbs_objects::base::Core;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::reason::Told;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::credit::CreditPacket;
use anyverbs_proto::wire::icrc::{Flow, IcrcVerdict};
use anyverbs_proto::wire::packet::{ICRC_LEN, Packet};
use anyverbs_proto::wire::reason::ReasonPacket;

use super::Driver;
use super::Mad as ToGsi;
use super::deliver::Arrived;
use super::ip_ids::{Counted, IpIds, SenderIndex};
use super::why::ReasonAhead;

/// The kinds of received datagrams.
pub(super) enum Received<'a> {
    /// It lies where it was to be read to.
    Packet,
    /// To QP1, which every process has. Boxed: it is rare, and long.
    Gsi(Box<ToGsi<'a>>),
    Credit(CreditPacket),
    /// The reason of a NAK. Boxed as well.
    Reason(Box<ReasonAhead<'a>>),
}

/// Packets that a device received, to be counted together: that of the last datagram ([`Senders::tally`]).
#[derive(Debug, Default)]
pub(super) struct Tally {
    device: usize,
    packets: u64,
    bytes: u64,
}

/// Facts about senders.
#[derive(Debug)]
pub(super) struct Senders {
    last: Option<KnownFlow>,
    ids: IpIds,
}

impl Senders {
    pub(super) fn new() -> Self {
        Self { last: None, ids: IpIds::new() }
    }

    /// A tally that begins with the device of the last datagram.
    pub(super) fn tally(&self) -> Tally {
        Tally { device: self.last.as_ref().map_or(0, |last| last.device), ..Tally::default() }
    }
}

/// From where to where the last datagram went: the next one likely goes there, too.
#[derive(Debug)]
struct KnownFlow {
    source: SocketAddr,
    destination: IpAddr,
    /// It decides to which device a datagram of a group, or to a link-local address, belongs.
    interface: u32,
    gids: (Gid, Gid),
    flow: Flow,
    ids: SenderIndex,
    counted: Counted,
    /// The ID of the last datagram was told by that.
    is_foretold: bool,
    /// Its sender has its place among those whose IDs are remembered.
    is_admitted: bool,
    is_link_local: bool,
    /// The device that has the destination.
    device: usize,
}

impl KnownFlow {
    fn new(core: &Core, datagram: &Datagram<'_>, ids: &IpIds) -> Self {
        let (port, device) = (core.config.udp_port, device_of(core, datagram));
        let Datagram { source, destination, interface, .. } = *datagram;
        let (from, to) = (source.ip().to_canonical(), destination.to_canonical());
        let flow = Flow::new(from, to, source.port(), port);
        let (place, counted) = ids.find(source);
        let is_link_local = matches!(from, IpAddr::V6(ip) if ip.is_unicast_link_local());
        let gids = (Gid::from(from), Gid::from(to));
        Self {
            source,
            destination,
            interface,
            gids,
            flow,
            ids: place,
            counted,
            is_foretold: false,
            is_admitted: false,
            is_link_local,
            device,
        }
    }
}

/// The device to which a datagram was sent.
fn device_of(core: &Core, datagram: &Datagram<'_>) -> usize {
    core.gids.port_of(Gid::from(datagram.destination.to_canonical()), datagram.interface)
}

impl Driver {
    pub(super) fn count_received(&self, tally: Tally) {
        self.core.count(tally.device, Counter::RcvdPkts, tally.packets);
        self.core.count(tally.device, Counter::RcvdBytes, tally.bytes);
    }

    /// Counts a datagram that is dropped, for the device to which it was sent.
    #[cold]
    pub(super) fn drop_datagram(&self, datagram: &Datagram<'_>, counter: Counter) {
        self.core.count(device_of(self.core, datagram), counter, 1);
    }

    /// Checks a datagram up to its packet, which is read to `into`. None: it is not for us, and was counted.
    #[inline]
    pub(super) fn classify<'d>(
        &self,
        datagram: &Datagram<'d>,
        Senders { last, ids }: &mut Senders,
        was_forwarded: bool,
        tally: &mut Tally,
        into: &mut Arrived<'d>,
    ) -> Option<Received<'d>> {
        let bytes = datagram.bytes;
        let dest = Bth::dest_of(bytes).filter(|_| bytes.len() >= Bth::LEN + ICRC_LEN);
        let Some(dest) = dest else {
            self.drop_datagram(datagram, Counter::DropMalformed);
            return None;
        };
        let (slot, to_gsi) = (dest.slot(), dest == Qpn::GSI);
        let to_group = datagram.destination.is_multicast();
        if to_group != (dest == Qpn::MULTICAST) {
            // Otherwise a packet for one queue pair that is sent to a group would make all processes forward it.
            self.drop_datagram(datagram, Counter::DropNoQp);
            return None;
        }
        let known = match last {
            Some(known)
                if known.source == datagram.source
                    && known.destination == datagram.destination
                    && known.interface == datagram.interface =>
            {
                known
            }
            _ => {
                if let Some(known) = last.as_ref().filter(|known| known.is_admitted) {
                    ids.keep(known.ids, known.counted);
                }
                let known = last.insert(KnownFlow::new(self.core, datagram, ids));
                if known.device != tally.device {
                    let before = Tally { device: known.device, ..Tally::default() };
                    self.count_received(mem::replace(tally, before));
                }
                known
            }
        };
        let foretold = known.counted.foretell(datagram.segment);
        let id = match known.flow.check(bytes, foretold) {
            IcrcVerdict::Exact => Some(foretold),
            IcrcVerdict::SomeId(id) => Some(id),
            IcrcVerdict::Wrong => None,
        };
        if id.is_some() && !known.is_admitted {
            ids.admit(known.ids, known.source);
            known.is_admitted = true;
        }
        let Some(id) = id.filter(|id| ids.is_plausible(known.ids, *id)) else {
            self.drop_datagram(datagram, Counter::DropIcrc);
            return None;
        };
        known.is_foretold = id == foretold;
        if known.is_foretold && !IpIds::is_small(id) {
            ids.counts(known.ids);
        }
        if !known.is_foretold {
            known.counted = Counted::from(id, datagram.segment);
        }
        if known.is_link_local && self.is_from_elsewhere(datagram) {
            self.drop_datagram(datagram, Counter::DropForeign);
            return None;
        }
        if slot != self.core.slot && !to_group && !to_gsi {
            self.misdelivered(slot, datagram, was_forwarded);
            return None;
        }
        let bytes = &bytes[..bytes.len() - ICRC_LEN];
        if let Some(credit) = CreditPacket::parse(bytes) {
            if to_group {
                self.drop_datagram(datagram, Counter::DropMalformed);
                return None;
            }
            return Some(Received::Credit(credit));
        }
        into.arrival = Arrival {
            source: known.gids.0,
            destination: known.gids.1,
            traffic_class: datagram.traffic_class,
            hop_limit: datagram.hop_limit,
            flow_label: datagram.flow_label,
            interface: if known.is_link_local { self.link_of(datagram) } else { 0 },
            port: datagram.source.port(),
        };
        if to_gsi {
            return self.classify_mad(datagram, bytes, into.arrival, was_forwarded, tally);
        }
        if into.read(bytes).is_err() {
            return self.classify_reason(datagram, bytes, into.arrival, to_group);
        }
        self.tally(datagram, &into.arrival, tally);
        Some(Received::Packet)
    }

    /// Joins to a packet that was read to `into` those that continue it, as far as they are right. `equal` has its datagram
    /// and what came behind that in one buffer. Returns the number of packets that it now stands for.
    #[inline]
    pub(super) fn join<'d>(
        &self,
        datagram: &Datagram<'d>,
        equal: &'d [u8],
        Senders { last, ids }: &mut Senders,
        tally: &mut Tally,
        into: &mut Arrived<'d>,
    ) -> usize {
        let stride = datagram.bytes.len();
        // Each mark is counted by itself. Where IDs do not count up, trying costs a checksum each time.
        let may_join = |known: &&KnownFlow| known.is_foretold && !into.arrival.is_marked();
        let Some(known) = last.as_ref().filter(may_join) else { return 1 };
        let flow = known.flow.of_length(stride - ICRC_LEN);
        let n = into.packet.join(equal, stride, |i, packet| {
            let id = known.counted.id(datagram.segment).wrapping_add(i as u16);
            flow.is_right(id, packet) && ids.is_plausible(known.ids, id)
        });
        tally.packets += n as u64 - 1;
        tally.bytes += ((n - 1) * stride) as u64;
        n
    }

    #[cold]
    fn classify_reason<'d>(
        &self,
        datagram: &Datagram<'d>,
        bytes: &'d [u8],
        arrival: Arrival,
        to_group: bool,
    ) -> Option<Received<'d>> {
        let Some(packet) = ReasonPacket::parse(bytes).filter(|_| !to_group) else {
            self.drop_datagram(datagram, Counter::DropMalformed);
            return None;
        };
        let bytes = &bytes[bytes.len() - Told::LEN..];
        Some(Received::Reason(Box::new(ReasonAhead { arrival, packet, bytes })))
    }

    /// Tells whether a datagram from a link-local address came by another interface than the one that has its
    /// destination. The host there may have the same address as the connected peer.
    #[cold]
    fn is_from_elsewhere(&self, datagram: &Datagram<'_>) -> bool {
        let destination = datagram.destination.to_canonical();
        let interface = self.link_of(datagram);
        interface != 0
            && !destination.is_multicast()
            && self.core.gids.find(Gid::from(destination), interface).is_none()
    }

    /// The interface of a link-local sender, or 0 if it is this host.
    #[cold]
    fn link_of(&self, datagram: &Datagram<'_>) -> u32 {
        match datagram.source {
            SocketAddr::V6(source) if !self.core.gids.contains(Gid::from(datagram.source.ip())) => {
                source.scope_id()
            }
            _ => 0,
        }
    }

    #[cold]
    fn classify_mad<'d>(
        &self,
        datagram: &Datagram<'d>,
        bytes: &'d [u8],
        arrival: Arrival,
        was_forwarded: bool,
        tally: &mut Tally,
    ) -> Option<Received<'d>> {
        let Ok(packet) = Packet::parse(bytes) else {
            self.drop_datagram(datagram, Counter::DropMalformed);
            return None;
        };
        self.tally(datagram, &arrival, tally);
        let datagram = *datagram;
        Some(Received::Gsi(Box::new(ToGsi { datagram, arrival, packet, was_forwarded })))
    }

    #[inline]
    fn tally(&self, datagram: &Datagram<'_>, arrival: &Arrival, tally: &mut Tally) {
        tally.packets += 1;
        tally.bytes += datagram.bytes.len() as u64;
        if arrival.is_marked() {
            self.core.count(tally.device, Counter::EcnMarked, 1);
        }
    }
}

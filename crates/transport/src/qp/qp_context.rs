//! The context of a queue pair: the device's state of it, beside the protocol machine.

use std::any::Any;
use std::sync::Arc;

use anyverbs_proto::env::LinkProps;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::{Arrival, ShortWays};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wr::AddressVector;

use super::owed::Debt;
use super::timers::Registered;
use super::watch::Watch;
use anyverbs_links::Links;
use anyverbs_links::direct::LastCopy;
use anyverbs_links::path::{Path, Turn};
use anyverbs_links::route::Route;
use anyverbs_links::shm::{Digest, Lanes, Peer, Spare};
use anyverbs_links::udp::Asked;
use anyverbs_links::why::Sounding;
use anyverbs_objects::base::directory::PublishedQp;
use anyverbs_objects::comp_cntr::Attached;
use anyverbs_objects::srq::SrqCell;
use anyverbs_page::Way;

/// A timer that is due waits for what came before it to be delivered.
#[derive(Debug, Default)]
pub(crate) struct CatchUp {
    /// Within the process: the round of deliveries in which it began to wait.
    pub(crate) since: Option<u64>,
    /// When it looks again.
    pub(crate) look_at: Option<Time>,
}

/// The device's state of one queue pair, under that queue pair's lock.
#[derive(Debug, Default)]
pub struct QpContext {
    pub(crate) to: Destination,
    pub(crate) same_host: SameHost,
    /// Its share of a path by UDP.
    turn: Turn,
    /// The entries among the timers that count.
    pub(crate) timers: Registered,
    pub(crate) catch_up: CatchUp,
    /// Its peer's process has ended: requests that still wait for it fail at this time.
    pub(crate) peer_gone_at: Option<Time>,
    pub(crate) owed: Owed,
    /// On a list of those that wait for room.
    pub(crate) blocked: bool,
    /// Empty unless it is an XRC target.
    pub xrc: XrcTarget,
    /// The counters of its completions.
    pub(crate) comp_cntrs: Attached,
    /// Out to a peer that does not answer.
    pub(super) sounding: Option<Box<Sounding>>,
    /// Somebody wants to see what it does.
    pub(crate) watch: Option<Box<Watch>>,
}

/// Where packets go to, and where the peer's come from.
#[derive(Debug, Default)]
pub(crate) struct Destination {
    /// Route of a connected queue pair, pinned when its address is set.
    pub(super) route: Option<Route>,
    /// Its facts.
    pub(super) props: LinkProps,
    /// The peer's packets, if it is on this host: their digest, and the addresses that it stands for.
    from_peer: Option<(Digest, Arrival)>,
    /// Address, slot and route of the last datagram.
    pub(super) last: Option<(AddressVector, u8, Route)>,
}

impl Destination {
    /// The route of a connected queue pair, or of the last datagram.
    pub(super) fn route(&self) -> Option<&Route> {
        self.route.as_ref().or(self.last.as_ref().map(|(_, _, route)| route))
    }
}

/// The state that serves peers on this host.
#[derive(Debug, Default)]
pub(crate) struct SameHost {
    /// For sending through shared memory.
    pub(super) spare: Spare,
    /// For short SENDs through shared memory.
    pub(crate) lanes: Lanes,
    /// The ways of these that are open, as of the end of the last general call. Stale while one is under way.
    pub(crate) short_ways: ShortWays,
    /// Target of the last one-sided operation without a message.
    pub(super) last_copy: LastCopy,
    /// The rights that it publishes for peers without a message.
    pub(crate) published: PublishedQp,
}

/// The things that a queue pair still has to send.
#[derive(Debug, Default)]
pub(crate) struct Owed {
    /// It owes an ACK, or has small sends to gather.
    pub(crate) debt: Debt,
    /// As `debt`, to queue pairs of this process.
    pub(crate) inproc: bool,
    /// Has small sends to gather.
    pub(crate) gathers: bool,
    /// A credit probe that found no receives: the answer changes when some are posted.
    pub(crate) credit: Option<Asked>,
}

/// The state of an XRC target.
#[derive(Debug, Default)]
pub struct XrcTarget {
    /// The SRQ that its last request named.
    pub srq: Option<Arc<SrqCell>>,
    /// The share of a target whose responder has been in other processes.
    pub share: Option<Box<dyn Any + Send>>,
}

impl QpContext {
    /// The context of a queue pair without an address.
    pub(super) fn new(watch: Option<Box<Watch>>) -> Self {
        Self { watch, ..Self::default() }
    }

    /// When the queue pair wants to be woken, whose machine has this deadline.
    pub(super) fn deadline(&self, machine: Option<Time>) -> Option<Time> {
        let machine = machine.map(|at| self.catch_up.look_at.map_or(at, |look_at| at.max(look_at)));
        match (machine, self.peer_gone_at) {
            (Some(at), Some(gone_at)) => Some(at.min(gone_at)),
            (at, gone_at) => at.or(gone_at),
        }
    }

    /// Pins a connected queue pair to its path.
    pub fn pin(&mut self, links: &'static Links, machine: &anyverbs_proto::qp::Qp) {
        self.leave_path(machine.qpn());
        let attr = machine.attr();
        if machine.init().qp_type != QpType::Ud {
            let mtu = attr.path_mtu.bytes();
            let (av, dest) = (&attr.av, attr.dest_qpn);
            let is_reliable = machine.init().qp_type != QpType::Uc;
            let route = Route::new(links, av, dest, Some(mtu), is_reliable);
            self.to.from_peer = links.core.gids.is_of_host(av.dgid).then(|| {
                let digest = Digest::new(av.dgid, av.sgid).from_slot(dest.slot());
                let (source, destination) = (av.dgid, av.sgid);
                (digest, Arrival { source, destination, ..Arrival::default() })
            });
            self.to.props = route.props(links, machine.init().qp_type);
            self.to.route = Some(route);
        }
    }

    /// Forgets the path.
    pub fn leave_path(&mut self, qpn: Qpn) {
        self.leave_turn(qpn);
        (self.to.route, self.to.props) = (None, LinkProps::default());
        self.sounding = None;
        self.to.from_peer = None;
        self.to.last = None;
        self.same_host.spare = Spare::default();
        self.leave_lanes();
        self.same_host.last_copy = LastCopy::default();
        self.blocked = false;
        self.peer_gone_at = None;
    }

    /// The digest of the peer's packets, if it is on this host.
    pub(super) fn digest_of_peer(&self) -> Option<Digest> {
        self.to.from_peer.map(|(digest, _)| digest)
    }

    /// Whether a packet with this digest of its addresses came from the peer.
    #[inline]
    pub(crate) fn is_from_peer(&self, digest: Digest) -> bool {
        self.to.from_peer.is_some_and(|(of_peer, _)| of_peer == digest)
    }

    /// Where the peer's packets come from, if it is on this host.
    pub(crate) fn peer_arrival(&self) -> Option<Arrival> {
        self.to.from_peer.map(|(_, arrival)| arrival)
    }

    /// Where a packet came from that has a digest of its addresses: from the peer, or from nobody.
    #[inline]
    pub(crate) fn arrival_of(&self, digest: Digest) -> Arrival {
        let from_peer = self.to.from_peer.filter(|(of_peer, _)| *of_peer == digest);
        from_peer.map_or_else(Arrival::default, |(_, arrival)| arrival)
    }

    fn leave_turn(&mut self, qpn: Qpn) {
        if let Some(path) = self.to.route.as_ref().and_then(Route::path) {
            self.turn.leave(path, qpn);
        }
    }

    /// Tells whether a reliable request may leave now.
    #[inline]
    pub(super) fn may_request(&mut self, qpn: Qpn, psn: Psn) -> bool {
        let path = self.to.route.as_ref().and_then(Route::path);
        path.is_none_or(|path| self.turn.may_send(path, qpn, psn))
    }

    /// Tells whether the request that may leave has to ask for an ACK, for it ends the queue pair's turn.
    #[inline]
    pub(super) fn ends_turn(&self, psn: Psn) -> bool {
        self.turn.ends_at(psn)
    }

    /// How many requests from `psn` on may leave, if one [may](Self::may_request), and whether these end the turn.
    pub(super) fn room_in_turn(&self, psn: Psn, most: u32) -> (u32, bool) {
        self.turn.room(psn, most)
    }

    /// A call ends: a place on a path is kept as long as requests are `in_flight`.
    #[inline]
    pub(super) fn settle_turn(&mut self, qpn: Qpn, in_flight: bool) {
        if let Some(path) = self.to.route.as_ref().and_then(Route::path) {
            self.turn.settle(path, qpn, in_flight);
        }
    }

    /// The peer was silent for a timeout, and requests are in flight.
    pub(crate) fn note_silence(&mut self, qpn: Qpn) {
        if let Some(path) = self.to.route.as_ref().and_then(Route::path) {
            self.turn.note_silence(path, qpn);
        }
    }

    /// It got a place on `path`. False if it does not want it any more.
    pub(crate) fn begin_turn(&mut self, path: &Arc<Path>) -> bool {
        let own = self.to.route.as_ref().and_then(Route::path);
        own.is_some_and(|own| Arc::ptr_eq(own, path)) && self.turn.begin()
    }

    /// Brings the window up to date: the queue pairs of a path share it.
    #[inline]
    pub(super) fn renew_window(&mut self) {
        if let Some(path) = self.to.route.as_ref().and_then(Route::path) {
            self.to.props.window = path.window(self.turn.is_counted());
        }
    }

    /// The other process at the end of its route, if that goes through shared memory.
    pub(crate) fn shm_peer(&self) -> Option<&Arc<Peer>> {
        self.to.route().and_then(Route::shm_peer)
    }

    /// Packets are lost on its way from now on, or no more.
    pub(crate) fn renew_props(&mut self, links: &'static Links, qp_type: QpType) {
        if let Some(route) = &self.to.route {
            self.to.props = route.props(links, qp_type);
            self.renew_window();
        }
    }

    /// Leaves shared memory for UDP.
    pub(crate) fn reroute(
        &mut self,
        links: &'static Links,
        (qpn, qp_type): (Qpn, QpType),
        av: &AddressVector,
        dest: Qpn,
    ) {
        self.leave_turn(qpn);
        if self.to.route.is_some() {
            let is_reliable = !matches!(qp_type, QpType::Uc | QpType::Ud);
            let route = Route::udp(links, av, dest, is_reliable);
            self.to.props = route.props(links, qp_type);
            self.to.route = Some(route);
        }
        self.to.last = None;
        self.same_host.spare = Spare::default();
        self.leave_lanes();
    }

    /// Gives its lanes up.
    pub(crate) fn leave_lanes(&mut self) {
        self.same_host.lanes.leave();
        self.same_host.short_ways = ShortWays::default();
    }

    /// The general way ends.
    #[inline]
    pub(crate) fn settle_short_ways(&mut self, machine: &anyverbs_proto::qp::Qp) {
        if let Some(Route::Shm(route)) = &self.to.route {
            let mut ways = machine.short_ways(&self.to.props);
            ways.sends &= self.same_host.lanes.are_any() && !self.blocked && route.peer.is_open();
            self.same_host.short_ways = ways;
        }
    }

    /// Whether a rule of a script of faults holds something of it. `una` is its oldest packet without an answer.
    pub(crate) fn is_held_by_rule(&self, una: Psn, now: Time) -> bool {
        self.watch.as_ref().is_some_and(|watch| watch.is_held_by_rule(una, now))
    }

    /// The way of its packets, or of its last datagram.
    pub(crate) fn way(&self) -> Way {
        let route = self.to.route.as_ref().or(self.to.last.as_ref().map(|(_, _, route)| route));
        match route {
            None => Way::None,
            Some(Route::Inproc | Route::HandingOn) => Way::Process,
            Some(Route::Shm(_)) if self.same_host.lanes.are_any() => Way::Lanes,
            Some(Route::Shm(_)) => Way::Shm,
            Some(Route::Udp(_)) => Way::Udp,
        }
    }

    /// Whether it may have lanes: where each message is seen by itself.
    pub(crate) fn may_have_lanes(&self) -> bool {
        self.to.props.immediate
    }

    /// Whether a request to a queue pair of this process, or from one, needs no packet: every packet would come, and nobody looks at it.
    #[inline]
    pub(super) fn is_open_within(&self) -> bool {
        self.is_inproc() && self.to.props.certain && self.watch.is_none() && !self.blocked
    }

    pub(crate) fn is_inproc(&self) -> bool {
        self.to.route.as_ref().is_some_and(Route::is_inproc)
    }
}

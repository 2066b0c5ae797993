//! The device's state of each queue pair beside the protocol machine, and the route of its packets.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use anyverbs_net::MAX_PAYLOAD_V6;
use anyverbs_proto::env::LinkProps;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wr::AddressVector;

use super::owed::Debt;
use super::timers::Registered;
use anyverbs_links::Links;
use anyverbs_links::direct::LastTarget;
use anyverbs_links::inproc;
use anyverbs_links::path::{Path, Turn};
use anyverbs_links::shm::{self, Peer, ShmRoute, Spare};
use anyverbs_links::udp::{Asked, UdpRoute};
use anyverbs_objects::base::directory::PublishedQp;
use anyverbs_objects::comp_cntr::Attached;
use anyverbs_objects::srq::SrqCell;

/// Probe timeout for a peer on another host. It is longer than the time to wake a process, and than the kernel's tick.
/// A nearer timer is programmed whenever the worker sleeps, which costs an event 8 us.
const PROBE_AFTER: Duration = Duration::from_millis(8);

/// Bytes of early requests that a queue pair may keep: a window of a peer like this one.
const EARLY_ROOM: usize = 256 << 10;

/// The way of a packet to its peer.
#[derive(Clone, Debug)]
pub(crate) enum Route {
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
    /// `mtu` of a connected queue pair.
    pub(super) fn new(
        links: &'static Links,
        av: &AddressVector,
        dest: Qpn,
        mtu: Option<u32>,
    ) -> Self {
        if is_to_group(av, dest) {
            // The kernel gives copies to the members on this host, too, but where it cannot.
            return if is_handed_on(av, dest) {
                Self::HandingOn
            } else {
                Self::Udp(UdpRoute::new(links, av, dest.slot()))
            };
        }
        let slot = dest.slot();
        if slot == links.core.slot {
            if links.core.config.inproc && links.core.gids.contains(av.dgid) {
                return Self::Inproc;
            }
        } else if let Some(link) = &links.shm
            && slot != 0
            && links.core.gids.contains(av.dgid)
            && let Some(route) = ShmRoute::new(links, link, av, slot, mtu)
        {
            return Self::Shm(route);
        }
        Self::Udp(UdpRoute::new(links, av, slot))
    }

    /// The facts of this route for a connected queue pair.
    fn props(&self, links: &Links, qp_type: QpType) -> LinkProps {
        let config = &links.core.config;
        match self {
            // Timers wait until queued packets are delivered (`Inproc::has_caught_up`). An XRC target's responder may be
            // in another process.
            Self::Inproc => {
                let certain = qp_type != QpType::XrcSend;
                LinkProps { certain, ..LinkProps::new(inproc::WINDOW) }
            }
            Self::HandingOn => LinkProps::new(inproc::WINDOW),
            Self::Shm(_) => LinkProps { segment: shm::SEGMENT, ..LinkProps::new(shm::WINDOW) },
            Self::Udp(udp) => LinkProps {
                batch: if config.gso { MAX_PAYLOAD_V6 as u32 } else { 0 },
                probe_after: Some(PROBE_AFTER),
                early_room: EARLY_ROOM,
                ..LinkProps::new(udp.path.window(false))
            },
        }
    }
}

fn is_to_group(av: &AddressVector, dest: Qpn) -> bool {
    dest == Qpn::MULTICAST && av.dgid.is_multicast()
}

pub(super) fn is_handed_on(av: &AddressVector, dest: Qpn) -> bool {
    is_to_group(av, dest) && anyverbs_net::is_handed_on(av.dgid.to_ip(), av.scope_id)
}

/// The device's state of one queue pair, under that queue pair's lock.
#[derive(Debug, Default)]
pub struct Link {
    /// Route of a connected queue pair, pinned when its address is set.
    pub(super) route: Option<Route>,
    /// Its facts.
    pub(super) props: LinkProps,
    /// Address, slot and route of the last datagram.
    pub(super) last: Option<(AddressVector, u8, Route)>,
    /// For sending through shared memory.
    pub(super) spare: Spare,
    /// Target of the last one-sided operation without a message.
    pub(super) last_target: LastTarget,
    /// Its share of a path by UDP.
    turn: Turn,
    /// The entries among the timers that count.
    pub(crate) timers: Registered,
    /// A timer waits for the link to catch up: in the process from this round on; it looks again at this time.
    pub(crate) catch_up: (Option<u64>, Option<Time>),
    /// Its peer's process has ended: requests that still wait for it fail at this time.
    pub(crate) doomed: Option<Time>,
    /// It owes an ACK, or has small sends to gather.
    pub(crate) debt: Debt,
    /// As `debt`, to queue pairs of this process.
    pub(crate) owed_inproc: bool,
    /// Has small sends to gather.
    pub(crate) gathers: bool,
    /// A credit probe that found no receives: the answer changes when some are posted.
    pub(crate) starved: Option<Asked>,
    /// On a list of those that wait for room.
    pub(crate) blocked: bool,
    /// In an XRC target: the SRQ that its last request named.
    pub xrc_srq: Option<Arc<SrqCell>>,
    /// In an XRC target whose responder has been in other processes.
    pub share: Option<Box<dyn Any + Send>>,
    /// The counters of its completions.
    pub(crate) comp_cntrs: Attached,
    /// The rights that it publishes for peers without a message.
    pub(crate) published: PublishedQp,
}

impl Link {
    /// Pins a connected queue pair to its path.
    pub fn pin(&mut self, links: &'static Links, machine: &anyverbs_proto::qp::Qp) {
        self.leave_path(machine.qpn());
        let attr = machine.attr();
        if machine.init().qp_type != QpType::Ud {
            let mtu = attr.path_mtu.bytes();
            let route = Route::new(links, &attr.av, attr.dest_qpn, Some(mtu));
            self.props = route.props(links, machine.init().qp_type);
            self.route = Some(route);
        }
    }

    /// Forgets the path.
    pub fn leave_path(&mut self, qpn: Qpn) {
        self.leave_turn(qpn);
        (self.route, self.props) = (None, LinkProps::default());
        self.last = None;
        self.spare = Spare::default();
        self.last_target = LastTarget::default();
        self.blocked = false;
        self.doomed = None;
    }

    fn leave_turn(&mut self, qpn: Qpn) {
        if let Some(Route::Udp(udp)) = &self.route {
            self.turn.leave(&udp.path, qpn);
        }
    }

    /// Tells whether a reliable request may leave by UDP now.
    #[inline]
    pub(super) fn may_request(&mut self, qpn: Qpn, psn: Psn) -> bool {
        match &self.route {
            Some(Route::Udp(udp)) => self.turn.may_send(&udp.path, qpn, psn),
            _ => true,
        }
    }

    /// A call ends: a place on a path by UDP is kept as long as requests are `in_flight`.
    #[inline]
    pub(super) fn settle_turn(&mut self, qpn: Qpn, in_flight: bool) {
        if let Some(Route::Udp(udp)) = &self.route {
            self.turn.settle(&udp.path, qpn, in_flight);
        }
    }

    /// A timer has fired, and requests are in flight.
    pub(crate) fn note_silence(&mut self, qpn: Qpn) {
        if let Some(Route::Udp(udp)) = &self.route {
            self.turn.note_silence(&udp.path, qpn);
        }
    }

    /// It got a place on `path`. False if it does not want it any more.
    pub(crate) fn begin_turn(&mut self, path: &Arc<Path>) -> bool {
        let is_here = matches!(&self.route, Some(Route::Udp(udp)) if Arc::ptr_eq(&udp.path, path));
        is_here && self.turn.begin()
    }

    /// Brings the window up to date: the queue pairs of a path by UDP share it.
    #[inline]
    pub(super) fn renew_window(&mut self) {
        if let Some(Route::Udp(udp)) = &self.route {
            self.props.window = udp.path.window(self.turn.is_counted());
        }
    }

    /// The other process at the end of its route, if that goes through shared memory.
    pub(crate) fn shm_peer(&self) -> Option<&Arc<Peer>> {
        match (&self.route, &self.last) {
            (Some(Route::Shm(shm)), _) | (None, Some((_, _, Route::Shm(shm)))) => Some(&shm.peer),
            _ => None,
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
        if self.route.is_some() {
            let route = Route::Udp(UdpRoute::new(links, av, dest.slot()));
            self.props = route.props(links, qp_type);
            self.route = Some(route);
        }
        self.last = None;
        self.spare = Spare::default();
    }

    pub(crate) fn is_inproc(&self) -> bool {
        matches!(self.route, Some(Route::Inproc))
    }
}

//! The state of a queue pair that all its handles share.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};

use anyverbs_causes::Cause;
use anyverbs_links::Links;
use anyverbs_links::pace::NO_LIMIT;
use anyverbs_links::udp::Asked;
use anyverbs_links::why::check_route;
use anyverbs_locks::{FastMutex, FastMutexGuard, Mutex, rank};
use anyverbs_objects::base::{Core, Ticket};
use anyverbs_objects::cq::CqCell;
use anyverbs_objects::error::{ModifyObjectError, PostError};
use anyverbs_objects::holders::Held;
use anyverbs_objects::pd::PdCell;
use anyverbs_objects::privilege;
use anyverbs_objects::srq::SrqCell;
use anyverbs_proto::counters::Counters;
use anyverbs_proto::env::Side;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
use anyverbs_proto::qp::{Arrival, Incoming, SqCredit};
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_proto::wr::AddressVector;
use anyverbs_proto::xrc_message::FileId;

use super::env::Call;
use super::handles::Handles;
use super::qp_context::QpContext;
use super::transport::Transport;
use crate::multicast::Member;

/// A queue pair, as the device holds it.
pub struct QpCell {
    pub(crate) transport: &'static Transport,
    /// Number.
    pub qpn: Qpn,
    /// Transport type.
    pub qp_type: QpType,
    /// The device on which it was made. A target of another process counts as one of the first.
    pub(crate) device: u8,
    /// The port of that device which it got in INIT, and the first before.
    pub(crate) port: OwnPort,
    /// The state that its lock guards.
    pub state: FastMutex<rank::QueuePair, State>,
    /// Where the slots of polled sends go back to.
    pub(crate) sq_credit: Arc<SqCredit>,
    /// None on a target.
    pub send_cq: Option<Arc<CqCell>>,
    /// None on an initiator and a target.
    pub recv_cq: Option<Arc<CqCell>>,
    /// Where receives come from.
    pub srq: Option<Arc<SrqCell>>,
    /// Where an XRC target lives.
    pub xrc: XrcPlace,
    /// Attachments to multicast groups; changed under the lock of [`crate::multicast::Groups`].
    pub(crate) groups: AtomicU32,
    pub(super) blocks_own_multicast: AtomicBool,
    /// Empty once it is destroyed.
    pub(super) handles: Mutex<rank::QueuePairHandles, Handles>,
}

/// The port of a queue pair. It changes under the queue pair's lock, when nothing is on its way.
pub(crate) struct OwnPort {
    place: AtomicU8,
    counters: AtomicPtr<Counters>,
}

impl OwnPort {
    /// The port at a place among those of all devices; there are 64 at most.
    pub(super) fn new(core: &'static Core, port: usize) -> Self {
        let counters = std::ptr::from_ref(core.counters_of(port)).cast_mut();
        Self { place: AtomicU8::new(port as u8), counters: AtomicPtr::new(counters) }
    }

    fn set(&self, core: &'static Core, port: usize) {
        let Self { place, counters } = Self::new(core, port);
        self.place.store(place.into_inner(), Ordering::Relaxed);
        self.counters.store(counters.into_inner(), Ordering::Relaxed);
    }

    /// Its place among the ports of all devices.
    #[inline]
    pub(crate) fn place(&self) -> usize {
        self.number().into()
    }

    /// As [`place`](Self::place).
    #[inline]
    pub(crate) fn number(&self) -> u8 {
        self.place.load(Ordering::Relaxed)
    }

    /// Its counters.
    #[inline]
    pub(crate) fn counters(&self) -> &'static Counters {
        // SAFETY: always made of a reference that lives as long as the process.
        unsafe { &*self.counters.load(Ordering::Relaxed) }
    }
}

/// Where an XRC target lives: its domain, and the process whose it is.
#[derive(Debug)]
pub struct XrcPlace {
    /// Its domain, or [`NO_DOMAIN`].
    pub(super) domain: AtomicU64,
    /// The file of its domain, which other processes may share.
    pub file: Option<FileId>,
    /// The process of a target that is not this one's: open here, or borrowed ([`sharing::Sharing`]).
    pub(super) home: AtomicU8,
    /// The lease under which such a one is borrowed, or 0. Changes under the queue pair's lock.
    pub borrowed: AtomicU64,
}

impl Default for XrcPlace {
    /// The state of a queue pair that is no target.
    fn default() -> Self {
        Self {
            domain: AtomicU64::new(NO_DOMAIN),
            file: None,
            home: AtomicU8::new(0),
            borrowed: AtomicU64::new(0),
        }
    }
}

/// The value in a queue pair that is no target.
pub(super) const NO_DOMAIN: u64 = u64::MAX;

/// The state under the queue pair's lock.
pub struct State {
    /// The protocol.
    pub machine: anyverbs_proto::qp::Qp,
    /// How its packets leave.
    pub link: QpContext,
    /// Multicast groups that it is attached to, in order.
    pub(super) groups: Vec<Gid>,
    /// None once it is destroyed.
    pub(super) hold: Option<Hold>,
}

#[expect(dead_code, reason = "held for their drop")]
pub(super) struct Hold(
    pub(super) Option<Held<PdCell>>,
    pub(super) [Option<Held<CqCell>>; 2],
    pub(super) Option<Held<SrqCell>>,
    pub(super) Option<Ticket>,
);

impl State {
    /// Whether it is destroyed.
    pub fn is_dead(&self) -> bool {
        self.hold.is_none()
    }

    /// Tells whether it takes datagrams to a group.
    pub(crate) fn is_in(&self, group: Gid) -> bool {
        self.groups.binary_search_by_key(&group.0, |g| g.0).is_ok()
    }

    /// The groups to which it takes datagrams.
    pub(crate) fn groups(&self) -> &[Gid] {
        &self.groups
    }

    pub(crate) fn set_in(&mut self, group: Gid, is_in: bool) {
        match self.groups.binary_search_by_key(&group.0, |g| g.0) {
            Ok(at) if !is_in => drop(self.groups.remove(at)),
            Err(at) if is_in => self.groups.insert(at, group),
            _ => {}
        }
    }
}

impl fmt::Debug for QpCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QpCell").field("qpn", &self.qpn).finish_non_exhaustive()
    }
}

impl QpCell {
    /// A queue pair with nothing around its machine, and no open handle.
    pub(super) fn bare(
        transport: &'static Transport,
        qpn: Qpn,
        qp_type: QpType,
        state: State,
    ) -> Self {
        Self {
            transport,
            qpn,
            qp_type,
            device: 0,
            port: OwnPort::new(transport.core, 0),
            sq_credit: state.machine.sq_credit(),
            state: FastMutex::new(state),
            send_cq: None,
            recv_cq: None,
            srq: None,
            xrc: XrcPlace::default(),
            groups: AtomicU32::new(0),
            blocks_own_multicast: AtomicBool::new(false),
            handles: Mutex::default(),
        }
    }

    /// Where a side completes, unless that is an SRQ's affair.
    #[inline]
    pub(crate) fn cq(&self, side: Side) -> Option<&Arc<CqCell>> {
        match side {
            Side::Send => self.send_cq.as_ref(),
            Side::Recv => self.recv_cq.as_ref(),
        }
    }

    /// Ends its work: the peer gets the ACK that is still owed, and the last one once more; nothing else happens any more. None if it was done.
    pub(super) fn retire(&self) -> Option<Hold> {
        let mut state = self.state.lock();
        let hold = state.hold.take()?;
        let mut call = Call::new(self);
        let State { machine, link, .. } = &mut *state;
        machine.repeat_last_answers(&mut call.env(link));
        let last = (std::mem::take(&mut link.comp_cntrs), machine.give_up_queues());
        self.note_modified(&mut state);
        call.finish_last(state);
        drop(last);
        Some(hold)
    }

    /// The answer to a credit probe: how many messages its sender may send in all.
    pub(crate) fn message_limit(&self, state: &State, asked: &Asked) -> u64 {
        let posted = match &self.srq {
            Some(srq) => Some(srq.waiting()),
            None => state.machine.recvs_posted(),
        };
        posted.map_or(NO_LIMIT, |posted| asked.packet.counts.messages.saturating_add(posted as u64))
    }

    /// Whether it takes a packet of a group: it is attached, and the packet is not its own, come back, where it does not
    /// want those.
    pub(crate) fn takes(&self, state: &State, arrival: &Arrival, packet: &Incoming<'_>) -> bool {
        let src_qpn = packet.headers.deth.map(|deth| deth.src_qpn);
        let unwanted = self.blocks_own_multicast.load(Ordering::Relaxed)
            && src_qpn == Some(self.qpn)
            && self.transport.core.gids.contains(arrival.source);
        state.is_in(arrival.destination) && !unwanted
    }

    /// Tells those who share the domain of a target that it was modified, or ends.
    pub(super) fn note_modified(&self, state: &mut State) {
        if self.qp_type == QpType::XrcRecv {
            self.transport.sharing().modified(self, state);
        }
    }

    /// It ends with its last handle; returns its hold. `None` if it was done before.
    pub(super) fn end(&self) -> Option<Hold> {
        let hold = self.retire()?;
        self.transport.qps.remove(self.qpn);
        self.transport.core.mrs.forget_qp(self.qpn.get());
        self.leave_cqs(true);
        Some(hold)
    }

    /// Its completions leave the CQs; with `forget`, the CQs forget the queue pair as well.
    pub(super) fn leave_cqs(&self, forget: bool) {
        if let Some(cq) = &self.send_cq {
            if forget {
                cq.detach(self.qpn);
            } else {
                cq.purge(self.qpn);
            }
        }
        if let Some(cq) = &self.recv_cq {
            cq.purge(self.qpn);
        }
    }
}

impl Member for QpCell {
    fn qpn(&self) -> Qpn {
        self.qpn
    }

    fn links(&self) -> &'static Links {
        self.transport.links
    }

    fn device(&self) -> usize {
        self.device.into()
    }

    fn is_datagram(&self) -> bool {
        self.qp_type == QpType::Ud
    }

    fn attachments(&self) -> &AtomicU32 {
        &self.groups
    }

    fn is_destroyed(&self) -> bool {
        self.state.lock().is_dead()
    }

    fn set_in(&self, gid: Gid, is_in: bool) {
        self.state.lock().set_in(gid, is_in);
    }
}

/// Whether it is the way that lacks, and not a descriptor or the like.
fn is_of_route(error: &std::io::Error) -> bool {
    use std::io::ErrorKind as K;
    matches!(
        error.kind(),
        K::NetworkUnreachable
            | K::HostUnreachable
            | K::AddrNotAvailable
            | K::InvalidInput
            | K::PermissionDenied
    )
}

impl QpCell {
    pub(super) fn lock(
        &self,
    ) -> Result<FastMutexGuard<'_, rank::QueuePair, State>, ModifyObjectError> {
        if !self.transport.core.is_current() {
            return Err(ModifyObjectError::Forked);
        }
        let state = self.state.lock();
        if state.is_dead() { Err(ModifyObjectError::Gone) } else { Ok(state) }
    }

    /// Says now, and not when the retries have run out, that the local address cannot reach the peer.
    fn check_route(&self, av: &AddressVector) {
        if self.transport.core.gids.contains(av.dgid) {
            return;
        }
        let no_way = av.no_way().map(|no_way| no_way.text().to_owned());
        let no_route = || {
            let error = check_route(self.transport.links, av).err().filter(is_of_route);
            error.map(|error| error.to_string())
        };
        if let Some(why) = no_way.or_else(no_route) {
            let now = self.transport.core.now();
            self.transport.aftermath.log(now, format!(
                "queue pair {:#08x}: the local address {} (sgid_index {}) cannot reach the peer at {}: {why}; \
                 see `anyverbs explain {}`",
                self.qpn.get(),
                av.sgid.to_ip(),
                av.sgid_index,
                av.dgid.to_ip(),
                Cause::Unreachable
            ));
        }
    }

    /// Whether it was made on this device.
    pub fn is_on(&self, device: usize) -> bool {
        usize::from(self.device) == device
    }

    /// See [`Qp::takes_read`](super::Qp::takes_read).
    pub(super) fn takes_read(&self, elements: usize) -> Result<(), PostError> {
        let (core, device) = (self.transport.core, self.device.into());
        let limit = core.attr_of(device).max_sge_rd;
        if elements <= limit as usize {
            return Ok(());
        }
        // No element is beyond the longest list of a work request, and no limit either.
        let (elements, limit, device) = (elements as u16, limit as u16, core.name_of(device));
        Err(PostError::ElementsOfRead { elements, limit, device })
    }

    /// See [`Qp::modify`](super::Qp::modify).
    pub fn modify(&self, attr: &QpAttr, mask: QpAttrMask) -> Result<(), ModifyObjectError> {
        let transport = self.transport;
        if mask.contains(QpAttrMask::QKEY) && attr.qkey.is_controlled() && !privilege::has_net_raw()
        {
            return Err(ModifyObjectError::NotPermitted);
        }
        let mut state = self.lock()?;
        let known = state.machine.attr().port;
        let number = if mask.contains(QpAttrMask::PORT) { attr.port } else { known };
        // A number that the device does not have is refused below.
        let port = transport.core.port(self.device.into(), number).unwrap_or(self.device.into());
        let mut max_mtu = transport.core.gids.active_mtu(port);
        if mask.contains(QpAttrMask::AV) {
            let gids = &transport.core.gids;
            max_mtu = gids
                .mtu_of(attr.av.sgid)
                .ok_or(ModifyObjectError::Invalid("GID index of the address vector"))?;
        } else if !state.machine.attr().av.sgid.is_zero() {
            max_mtu = transport.core.gids.mtu_of(state.machine.attr().av.sgid).unwrap_or(max_mtu);
        }
        let limits = transport.modify_limits(port, max_mtu);
        let mut call = Call::new(self);
        let State { machine, link, .. } = &mut *state;
        machine.modify(attr, mask, &limits, &mut call.env(link))?;
        if mask.contains(QpAttrMask::PORT) {
            self.port.set(transport.core, port);
            if let Some(watch) = &mut link.watch {
                watch.moves_to(port, transport.core.now());
            }
        }
        if link.watch.is_some() && machine.state() == QpState::Err {
            call.env(link).flush_hung(Cause::MovedToError.number().into());
        }
        if mask.contains(QpAttrMask::STATE) && attr.state == QpState::Reset {
            link.leave_path(self.qpn);
            if let Some(watch) = &mut link.watch {
                watch.ends("reset");
            }
            link.xrc.srq = None;
            self.leave_cqs(false);
            machine.free_send_slots();
        } else if mask.contains(QpAttrMask::AV) {
            if let Some(directory) = &transport.core.directory {
                // What it says of the peer's address is true no more.
                directory.withdraw_qp(self.qpn, &mut link.same_host.published);
            }
            link.pin(transport.links, machine);
            machine.transmit_rest(&mut call.env(link));
            self.check_route(&attr.av);
        }
        let State { machine, link, .. } = &mut *state;
        // Targets of XRC send nothing, and need not go on to RTS.
        let is_ready = match machine.state() {
            QpState::Rts => true,
            QpState::Rtr => self.qp_type == QpType::XrcRecv,
            _ => false,
        };
        if link.watch.is_some() && is_ready {
            call.env(link).fail_late(machine);
        }
        self.note_modified(&mut state);
        call.settle(&mut state);
        let unsettled = state.link.same_host.published.unsettled();
        call.finish(state);
        if let Some(unsettled) = unsettled {
            transport.core.settle_copies();
            // The next call enters what was withdrawn and is open to the peer.
            self.state.lock().link.same_host.published.note_settled(unsettled);
        }
        Ok(())
    }
}

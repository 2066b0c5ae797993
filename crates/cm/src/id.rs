//! Communication identifier: its life.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::error::DestroyError;
use anyverbs_objects::event_queue::Acks;
use anyverbs_proto::cm::id::{CommId, PortSpace};
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::cm::{ListenerId, Path};
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::types::{Gid, PKey, Psn, QKey};
use anyverbs_transport::multicast::Membership;
use anyverbs_transport::qp::QpCell;

use super::Gsi;
use super::address::Address;
use super::channel::{ChannelCell, EventChannel, Mailbox};
use super::error::CmError;
use super::event::{Event, EventKind, Pending};
use super::local_address::LocalAddress;
use super::params::IdOption;
use super::ports::Port;
use super::random::random;
use super::uptake::Uptake;

/// Communication identifier (`rdma_create_id(3)`). Destroyed when dropped.
#[derive(Debug)]
pub struct Id(pub(crate) Arc<IdCell>);

#[derive(Debug)]
pub(crate) struct IdCell {
    pub(super) gsi: &'static Gsi,
    pub(super) space: PortSpace,
    pub(super) qp_type: QpType,
    /// With which the peer's send queue starts.
    pub(super) psn: Psn,
    cookie: AtomicU64,
    pub(super) acks: Acks,
    pub(super) mailbox: Mutex<rank::CmIdEvents, Mailbox>,
    pub(super) uptake: Arc<Uptake>,
    pub(super) state: Mutex<rank::CmId, State>,
}

/// The stage of an id.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) enum Phase {
    #[default]
    Idle,
    Bound,
    AddrResolved,
    RouteResolved,
    Connect,
    Disconnect,
    Listen,
    Destroyed,
}

impl Phase {
    /// A call is not possible in this one.
    pub(super) fn refuses(self) -> CmError {
        CmError::Invalid(match self {
            Self::Idle => "not possible for an id without an address",
            Self::Bound => "not possible for an id that is bound, and whose peer is not resolved",
            Self::AddrResolved => {
                "not possible for an id whose address is resolved, and its route is not"
            }
            Self::RouteResolved => {
                "not possible for an id whose route is resolved, and that is not connected"
            }
            Self::Connect => "not possible for an id that is connected, or is connecting",
            Self::Disconnect => "not possible for an id whose connection has ended",
            Self::Listen => "not possible for an id that listens",
            Self::Destroyed => "not possible for an id that was destroyed",
        })
    }
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) phase: Phase,
    pub(super) local: Option<Address>,
    pub(super) port: Option<Arc<Port>>,
    /// The port was ours to choose.
    pub(super) is_ephemeral: bool,
    pub(super) peer: Option<Address>,
    pub(super) place: Option<LocalAddress>,
    /// The address is no longer the device's.
    pub(super) is_away: bool,
    pub(super) dgid: Gid,
    pub(super) path: Option<Path>,
    /// The machine's name of the connection or SIDR request.
    pub(super) comm: Option<CommId>,
    /// It came from a request.
    pub(super) is_passive: bool,
    /// An id of a request reports only events after the answer.
    pub(super) is_silent: bool,
    pub(super) listener: Option<ListenerId>,
    pub(super) qp: Option<Arc<QpCell>>,
    pub(super) qkey: Option<QKey>,
    /// READs and atomics that the peer of a request wants and takes.
    pub(super) asked: (u8, u8),
    pub(super) groups: Vec<Group>,
    pub(super) options: Options,
    pub(super) local_ece: Ece,
    pub(super) remote_ece: Ece,
    /// The queue pair could not be moved. The peer's answer to that is not reported.
    pub(super) connect_error: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Options {
    pub(super) tos: Option<u8>,
    pub(super) reuse_address: bool,
    pub(super) only_family: bool,
    pub(super) ack_timeout: Option<u8>,
}

/// A group that an id has joined.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) serial: u64,
    pub(super) address: Address,
    pub(super) gid: Gid,
    /// None: it only sends.
    pub(super) membership: Option<Membership>,
}

/// The place of an id (`struct rdma_route`).
#[derive(Clone, Copy, Debug, Default)]
pub struct IdInfo {
    /// Our address: bound, or found by resolving. On an id of a request, the address that the peer asked for.
    pub local: Option<Address>,
    /// The peer's.
    pub peer: Option<Address>,
    /// The number of the id's device, once it has one: bound to one of its addresses, resolved, or a request.
    pub device: Option<usize>,
    /// The number of its port there, from 1; 0 without one.
    pub port: u8,
    /// Our port's GID, where there is a device.
    pub sgid: Gid,
    /// The peer's, once resolved.
    pub dgid: Gid,
    /// Partition.
    pub pkey: PKey,
    /// The path, once the route is resolved.
    pub path: Option<Path>,
}

impl IdCell {
    pub(super) fn new(
        channel: &Arc<ChannelCell>,
        space: PortSpace,
        qp_type: QpType,
        cookie: u64,
        state: State,
    ) -> Arc<Self> {
        Arc::new(Self {
            gsi: channel.gsi,
            space,
            qp_type,
            psn: Psn::new(random() as u32),
            cookie: AtomicU64::new(cookie),
            acks: Acks::default(),
            mailbox: Mutex::new(Mailbox::new(channel)),
            uptake: Arc::default(),
            state: Mutex::new(state),
        })
    }

    /// A new id for a request to this listener, on its channel. `None` once that is destroyed.
    pub(super) fn child(&self, state: State) -> Option<Arc<Self>> {
        let channel = self.channel()?;
        Some(Self::new(&channel, self.space, self.qp_type, 0, state))
    }

    /// Refuses objects that were inherited across `fork`.
    pub(super) fn check_current(&self) -> Result<(), CmError> {
        if self.gsi.core().is_current() { Ok(()) } else { Err(CmError::Forked) }
    }

    pub(super) fn cookie(&self) -> u64 {
        self.cookie.load(Ordering::Relaxed)
    }

    pub(super) fn is_datagram(&self) -> bool {
        self.qp_type == QpType::Ud
    }

    /// Ends it, without waiting for acknowledgements. False if that was done before.
    pub(super) fn retire(&self) -> bool {
        let old = self.gsi.with_cm(|cm, ids, now| {
            let mut state = self.state.lock();
            if state.phase == Phase::Destroyed {
                return None;
            }
            let old = std::mem::replace(
                &mut *state,
                State { phase: Phase::Destroyed, ..State::default() },
            );
            ids.displace(self);
            // Errors: the machine has forgotten connections that are over.
            if let Some(listener) = old.listener {
                ids.remove_listener(listener);
                let _ = cm.unlisten(now, listener);
            }
            if let Some(comm) = old.comm {
                ids.remove(comm);
                let _ = cm.destroy(now, comm);
            }
            Some(old)
        });
        let Some(old) = old else { return false };
        if let (Some(_), Some(local)) = (old.listener, old.local) {
            self.gsi.leave_service(local.service_id(self.space));
        }
        for pending in self.leave_channel() {
            // The program has not taken this request.
            if let Some(child) = pending.new_id {
                child.retire();
            }
        }
        drop(old);
        true
    }
}

impl Id {
    /// A new id. `qp_type` is RC or UC with [`PortSpace::Tcp`], UD with [`PortSpace::Udp`] and [`PortSpace::Ipoib`], any with [`PortSpace::Ib`].
    ///
    /// # Errors
    /// [`CmError::Invalid`].
    pub fn create(
        channel: &EventChannel,
        space: PortSpace,
        qp_type: QpType,
        cookie: u64,
    ) -> Result<Self, CmError> {
        if !channel.0.gsi.core().is_current() {
            return Err(CmError::Forked);
        }
        let fits = match space {
            PortSpace::Tcp => qp_type != QpType::Ud,
            PortSpace::Udp | PortSpace::Ipoib => qp_type == QpType::Ud,
            PortSpace::Ib => true,
        };
        if !fits {
            return Err(CmError::Invalid("queue pair type for this port space"));
        }
        Ok(Self(IdCell::new(&channel.0, space, qp_type, cookie, State::default())))
    }

    /// Replaces the cookie that events carry, those that wait included.
    pub fn set_cookie(&self, cookie: u64) {
        self.0.cookie.store(cookie, Ordering::Relaxed);
    }

    /// Its place now.
    #[must_use]
    pub fn info(&self) -> IdInfo {
        if !self.0.gsi.core().is_current() {
            return IdInfo::default();
        }
        let config = &self.0.gsi.core().config;
        let state = self.0.state.lock();
        IdInfo {
            local: state.local,
            peer: state.peer,
            device: state.place.map(|place| config.number_of(place.device)),
            port: state.place.map_or(0, |place| place.port),
            sgid: state.place.map_or(Gid::ZERO, |place| place.gid),
            dgid: state.dgid,
            pkey: PKey::DEFAULT,
            path: state.path,
        }
    }

    /// `rdma_migrate_id(3)`: its events, those that wait included, go to another channel. Waits until those that were read before are
    /// acknowledged.
    ///
    /// # Errors
    /// [`CmError::Invalid`] once destroyed, [`CmError::Forked`].
    pub fn migrate(&self, channel: &EventChannel) -> Result<(), CmError> {
        self.0.check_current()?;
        if !channel.0.gsi.core().is_current() {
            return Err(CmError::Forked);
        }
        let Some(read) = self.0.change_channel(&channel.0) else {
            return Err(CmError::Invalid("it was destroyed"));
        };
        self.0.acks.wait_for(read, format_args!("an id's migration"));
        Ok(())
    }

    /// `rdma_set_option(3)`.
    ///
    /// # Errors
    /// [`CmError::Invalid`] for a value out of range, or too late.
    pub fn set_option(&self, option: IdOption) -> Result<(), CmError> {
        self.0.check_current()?;
        let mut state = self.0.state.lock();
        let phase = state.phase;
        let options = &mut state.options;
        match option {
            _ if phase == Phase::Destroyed => return Err(CmError::Invalid("it was destroyed")),
            IdOption::Tos(tos) => options.tos = Some(tos),
            IdOption::ReuseAddr(reuse)
                if (reuse && phase != Phase::Listen) || phase == Phase::Idle =>
            {
                options.reuse_address = reuse;
            }
            IdOption::AfOnly(only) if matches!(phase, Phase::Idle | Phase::Bound) => {
                options.only_family = only;
            }
            IdOption::AckTimeout(code)
                if matches!(self.0.qp_type, QpType::Rc | QpType::XrcSend) && code < 32 =>
            {
                options.ack_timeout = Some(code);
            }
            IdOption::AckTimeout(_) => return Err(CmError::Invalid("ACK timeout")),
            _ => return Err(CmError::Invalid("this option must be set earlier")),
        }
        Ok(())
    }

    /// Options that go to the peer with the next connect or accept (`rdma_set_local_ece(3)`).
    ///
    /// # Errors
    /// [`CmError::Invalid`] without a vendor, or where a queue pair is attached, which brings its own.
    pub fn set_local_ece(&self, ece: Ece) -> Result<(), CmError> {
        self.0.check_current()?;
        let mut state = self.0.state.lock();
        if state.qp.is_some() || ece.vendor_id == 0 || ece.vendor_id >= 1 << 24 {
            return Err(CmError::Invalid("ECE of this id"));
        }
        state.local_ece = ece;
        Ok(())
    }

    /// The peer's options (`rdma_get_remote_ece(3)`).
    ///
    /// # Errors
    /// [`CmError::Invalid`] where a queue pair is attached.
    pub fn remote_ece(&self) -> Result<Ece, CmError> {
        self.0.check_current()?;
        let state = self.0.state.lock();
        if state.qp.is_some() {
            return Err(CmError::Invalid("ECE of this id"));
        }
        Ok(state.remote_ece)
    }

    /// Puts an event of the program's own on the channel (`rdma_write_cm_event`), or of `rdma_resolve_addrinfo`.
    ///
    /// # Errors
    /// [`CmError::Invalid`] for other kinds.
    pub fn write_event(&self, event: Event) -> Result<(), CmError> {
        self.0.check_current()?;
        let kinds = [EventKind::User, EventKind::AddrinfoResolved, EventKind::AddrinfoError];
        if !kinds.contains(&event.kind) || event.new_id.is_some() {
            return Err(CmError::Invalid("kind of event"));
        }
        self.0.post(Pending {
            status: event.status,
            param: event.param,
            ..Pending::new(event.kind)
        });
        Ok(())
    }

    /// Acknowledges events of this id that were read (`rdma_ack_cm_event(3)`); of a request, those of the *listener*.
    pub fn ack_events(&self, n: u32) {
        if self.0.gsi.core().is_current() {
            self.0.acks.acknowledge(n);
        }
    }

    /// Destroys it (`rdma_destroy_id(3)`): ends calls under way, tells the peer, and forgets events that wait. Then
    /// waits until events that were read are acknowledged. An attached queue pair becomes the program's own again, as
    /// it is.
    ///
    /// # Errors
    /// [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.gsi.core().is_current() {
            return Ok(());
        }
        if !self.0.retire() {
            return Err(DestroyError::Gone);
        }
        self.0.acks.wait(format_args!("an id"));
        Ok(())
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // Unlike destroy, a drop cannot wait for a program that dropped its events too. Inherited locks belong to threads
        // of the parent.
        if self.0.gsi.core().is_current() {
            self.0.retire();
        }
    }
}

//! Communication identifier.

use std::sync::Arc;
use std::time::Duration;

use anyverbs_proto::cm::id::PortSpace;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
use anyverbs_proto::types::{Gid, PKey};

use super::address::Address;
use super::channel::EventChannel;
use super::error::CmError;
use super::params::{ConnParam, IdOption, Join};
use super::{Event, Path};
use crate::async_event::AsyncEventKind;
use crate::error::DestroyError;
use crate::qp::Qp;

/// Communication identifier (`rdma_create_id(3)`). Destroyed when dropped.
#[derive(Debug)]
pub struct Id(pub(crate) Arc<IdCell>);

#[derive(Debug)]
pub(crate) struct IdCell {}

/// What is known of an id's place (`struct rdma_route`).
#[derive(Clone, Copy, Debug, Default)]
pub struct IdInfo {
    /// Our address: bound, or found by resolving; of a request's id what the peer asked for.
    pub local: Option<Address>,
    /// The peer's.
    pub peer: Option<Address>,
    /// Whether the id has its device: bound to one of its addresses, resolved, or a request.
    pub has_device: bool,
    /// Our port's GID, where there is a device.
    pub sgid: Gid,
    /// The peer's, once resolved.
    pub dgid: Gid,
    /// Partition.
    pub pkey: PKey,
    /// The path, once the route is resolved.
    pub path: Option<Path>,
}

const NOT_BUILT: CmError = CmError::Unsupported("connection manager");

impl Id {
    /// A new id. `qp_type` is RC or UC with [`PortSpace::Tcp`], UD with [`PortSpace::Udp`] and [`PortSpace::Ipoib`], any with [`PortSpace::Ib`].
    ///
    /// # Errors
    /// [`CmError::Invalid`], [`CmError::Exhausted`].
    pub fn create(
        channel: &EventChannel,
        space: PortSpace,
        qp_type: QpType,
        cookie: u64,
    ) -> Result<Self, CmError> {
        let _ = (channel, space, qp_type, cookie);
        Err(NOT_BUILT)
    }

    /// Replaces the cookie that events carry, those that wait included.
    pub fn set_cookie(&self, cookie: u64) {
        let _ = cookie;
    }

    /// What is known of its place now.
    #[must_use]
    pub fn info(&self) -> IdInfo {
        IdInfo::default()
    }

    /// `rdma_bind_addr(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn bind_addr(&self, address: &Address) -> Result<(), CmError> {
        let _ = address;
        Err(NOT_BUILT)
    }

    /// `rdma_resolve_addr(3)`: an event tells the outcome.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn resolve_addr(
        &self,
        source: Option<&Address>,
        destination: &Address,
        timeout: Duration,
    ) -> Result<(), CmError> {
        let _ = (source, destination, timeout);
        Err(NOT_BUILT)
    }

    /// `rdma_resolve_route(3)`: an event tells the outcome.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn resolve_route(&self, timeout: Duration) -> Result<(), CmError> {
        let _ = timeout;
        Err(NOT_BUILT)
    }

    /// `rdma_listen(3)`; `backlog` 0: the most.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn listen(&self, backlog: usize) -> Result<(), CmError> {
        let _ = backlog;
        Err(NOT_BUILT)
    }

    /// `rdma_connect(3)`; of a UD id a question for the peer's queue pair. An event tells the outcome.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn connect(&self, param: &ConnParam<'_>) -> Result<(), CmError> {
        let _ = param;
        Err(NOT_BUILT)
    }

    /// `rdma_accept(3)`, of a request's id.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn accept(&self, param: Option<&ConnParam<'_>>) -> Result<(), CmError> {
        let _ = param;
        Err(NOT_BUILT)
    }

    /// `rdma_reject(3)`, or `rdma_reject_ece(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn reject(&self, private_data: &[u8], because_of_ece: bool) -> Result<(), CmError> {
        let _ = (private_data, because_of_ece);
        Err(NOT_BUILT)
    }

    /// `rdma_establish(3)`: the program has moved its queue pair.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn establish(&self) -> Result<(), CmError> {
        Err(NOT_BUILT)
    }

    /// `rdma_notify(3)`: what the program heard of its queue pair.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn notify(&self, event: AsyncEventKind) -> Result<(), CmError> {
        let _ = event;
        Err(NOT_BUILT)
    }

    /// `rdma_disconnect(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn disconnect(&self) -> Result<(), CmError> {
        Err(NOT_BUILT)
    }

    /// `rdma_migrate_id(3)`: its events, those that wait included, go to another channel.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn migrate(&self, channel: &EventChannel) -> Result<(), CmError> {
        let _ = channel;
        Err(NOT_BUILT)
    }

    /// `rdma_set_option(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn set_option(&self, option: IdOption) -> Result<(), CmError> {
        let _ = option;
        Err(NOT_BUILT)
    }

    /// What the queue pair is to be set to (`rdma_init_qp_attr(3)`).
    ///
    /// # Errors
    /// [`CmError`].
    pub fn init_qp_attr(&self, to: QpState) -> Result<(QpAttr, QpAttrMask), CmError> {
        let _ = to;
        Err(NOT_BUILT)
    }

    /// The id moves this queue pair from here on; it is brought to INIT, a UD one to RTS (`rdma_create_qp(3)`).
    ///
    /// # Errors
    /// [`CmError`].
    pub fn attach_qp(&self, qp: &Qp) -> Result<(), CmError> {
        let _ = qp;
        Err(NOT_BUILT)
    }

    /// The queue pair is the program's own again (`rdma_destroy_qp(3)`).
    pub fn detach_qp(&self) {}

    /// `rdma_join_multicast_ex(3)`: an event tells the outcome, and an attached queue pair is in the group by then.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn join(&self, join: &Join) -> Result<(), CmError> {
        let _ = join;
        Err(NOT_BUILT)
    }

    /// `rdma_leave_multicast(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn leave(&self, group: &Address) -> Result<(), CmError> {
        let _ = group;
        Err(NOT_BUILT)
    }

    /// Options that go to the peer with the next connect or accept (`rdma_set_local_ece(3)`).
    ///
    /// # Errors
    /// [`CmError`].
    pub fn set_local_ece(&self, ece: Ece) -> Result<(), CmError> {
        let _ = ece;
        Err(NOT_BUILT)
    }

    /// What the peer sent (`rdma_get_remote_ece(3)`).
    ///
    /// # Errors
    /// [`CmError`].
    pub fn remote_ece(&self) -> Result<Ece, CmError> {
        Err(NOT_BUILT)
    }

    /// Puts an event of the program's own on the channel (`rdma_write_cm_event`).
    ///
    /// # Errors
    /// [`CmError`].
    pub fn write_event(&self, event: Event) -> Result<(), CmError> {
        let _ = event;
        Err(NOT_BUILT)
    }

    /// Acknowledges events of this id that were read (`rdma_ack_cm_event(3)`); of a request, those of the *listener*.
    pub fn ack_events(&self, n: u32) {
        let _ = n;
    }

    /// Destroys it (`rdma_destroy_id(3)`): ends what is under way, tells the peer, forgets events that wait; waits until those
    /// that were read are acknowledged.
    ///
    /// # Errors
    /// [`DestroyError::Gone`]; [`DestroyError::Busy`] while a queue pair is attached.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        Err(DestroyError::Gone)
    }
}

//! The address of an id, that of its peer, and the way there: bind, resolve, listen.

use std::net::SocketAddr;
use std::sync::Arc;

use anyverbs_proto::cm::{Listen, Path, Serves, Transport};
use anyverbs_proto::qp::attr::QpType;

use super::address::{Address, Family};
use super::error::CmError;
use super::event::{EventKind, Pending};
use super::id::{Id, IdCell, Phase, State};
use super::local_address::{LocalAddress, flow_label, loopback_of, source_towards};
use super::ports::{self, Port};

/// Requests that may wait at a listener.
const MAX_BACKLOG: usize = 16 * 1024;

/// The purpose of a port.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Peers may be told of it.
    Bound,
    /// To connect.
    Connecting,
}

impl IdCell {
    /// Binds an idle id.
    fn bind(self: &Arc<Self>, address: &Address, purpose: Purpose) -> Result<(), CmError> {
        let idle = |state: &State| match state.phase {
            Phase::Idle => Ok(()),
            phase => Err(phase.refuses()),
        };
        let options = {
            let state = self.state.lock();
            idle(&state)?;
            state.options
        };
        address.check()?;
        if matches!(address, Address::Ip(SocketAddr::V6(a)) if a.ip().to_ipv4_mapped().is_some()) {
            // Requests come to the IPv4 address.
            let errno = libc::EADDRNOTAVAIL;
            return Err(CmError::System { what: "bind to a mapped IPv4 address", errno });
        }
        let mut address = *address;
        let space = address.port_space(self.space)?;
        let place =
            if address.is_any() { None } else { Some(LocalAddress::of(self.gsi, &address)?) };
        let is_ephemeral = address.port() == 0;
        let (port, taken) = if is_ephemeral && purpose == Purpose::Connecting {
            (ports::any(), None)
        } else {
            let share = options.reuse_address;
            let (port, taken) = Port::take(self.gsi, space, &address, share, options.only_family)?;
            (port, Some(Arc::new(taken)))
        };
        self.gsi.with_cm(|_, ids, _| {
            let mut state = self.state.lock();
            idle(&state)?;
            state.local = Some(address.with_port(port));
            state.port = taken;
            state.is_ephemeral = is_ephemeral;
            state.phase = Phase::Bound;
            state.place = place;
            if place.is_some() {
                ids.place(self);
            }
            Ok(())
        })
    }

    /// Makes the port of a listener its own.
    fn own_port(&self) -> Result<(), CmError> {
        // It may have to wait for another process, and the id keeps its port meanwhile.
        let port = self.state.lock().port.clone();
        port.map_or(Ok(()), |port| port.make_exclusive())
    }
}

impl Id {
    /// `rdma_bind_addr(3)`. Ports below 1024 need no capability here, unlike on Linux: they are ports of the device alone.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn bind_addr(&self, address: &Address) -> Result<(), CmError> {
        self.0.check_current()?;
        self.0.bind(address, Purpose::Bound)
    }

    /// `rdma_resolve_addr(3)`: an event tells the outcome. The host's routes choose our address, which takes no time: a peer that
    /// does not answer is found out by connecting.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn resolve_addr(
        &self,
        source: Option<&Address>,
        destination: &Address,
    ) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        let phase = id.state.lock().phase;
        if phase == Phase::Idle {
            id.bind(source.unwrap_or(&Address::any(destination.family())), Purpose::Connecting)?;
        }
        let (phase, local) = {
            let state = id.state.lock();
            (state.phase, state.local)
        };
        let local = local.filter(|_| phase == Phase::Bound).ok_or(phase.refuses())?;
        if local.family() != destination.family() {
            return Err(CmError::Invalid("addresses of different families"));
        }
        let mut peer = *destination;
        if destination.check().is_err() {
            // The link is that of our own address.
            let scope = local.scope();
            if scope == 0 {
                return destination.check();
            }
            peer = peer.at(super::address::scoped(destination.ip(), 0, scope));
        }
        let mut to = loopback_of(peer.socket_addr());
        if peer.is_any() && LocalAddress::find(id.gsi, to.ip().into(), 0).is_none() {
            // A device without the loopback: its first address does as well.
            let core = id.gsi.core();
            let entries = core.gids.entries();
            if let Some(entry) = entries.iter().find(|entry| !core.has_failed(entry.device)) {
                to.set_ip(entry.gid.to_ip());
            }
        }
        let from = source_towards(to, (!local.is_any()).then(|| local.socket_addr()))?;
        let local = local.at(from);
        let place = LocalAddress::find(id.gsi, local.gid(), local.scope());
        let (event, _free) = id.gsi.with_cm(|_, ids, _| {
            let mut state = id.state.lock();
            if state.phase != Phase::Bound {
                return Err(state.phase.refuses());
            }
            let Some(place) = place else {
                return Ok((Pending::failed(EventKind::AddrError, libc::ENODEV), None));
            };
            state.phase = Phase::AddrResolved;
            state.place = Some(place);
            state.local = Some(local);
            state.peer = Some(peer.at(to));
            state.dgid = to.ip().into();
            ids.place(id);
            // No peer will ask here. The program has not named the port, so it cannot miss it.
            let port = if state.is_ephemeral { state.port.take() } else { None };
            Ok((Pending::new(EventKind::AddrResolved), port))
        })?;
        id.post(event);
        Ok(())
    }

    /// `rdma_resolve_route(3)`: an event tells the outcome.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn resolve_route(&self) -> Result<(), CmError> {
        self.0.check_current()?;
        let mut state = self.0.state.lock();
        let (Phase::AddrResolved, Some(place), Some(local), Some(peer)) =
            (state.phase, state.place, state.local, state.peer)
        else {
            return Err(state.phase.refuses());
        };
        let tos = state.options.tos.unwrap_or(0);
        let label = flow_label(local.port(), peer.port());
        let path = place.path(state.dgid, tos, label, state.options.ack_timeout);
        let here = LocalAddress::find(self.0.gsi, state.dgid, 0);
        let interface = if here.is_some() { 0 } else { peer.scope() };
        state.path = Some(Path { mtu: place.mtu_towards(here), interface, ..path });
        state.phase = Phase::RouteResolved;
        drop(state);
        self.0.post(Pending::new(EventKind::RouteResolved));
        Ok(())
    }

    /// `rdma_listen(3)`; `backlog` 0: the most. An id that is not bound gets a port of its own.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn listen(&self, backlog: usize) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        let phase = id.state.lock().phase;
        if phase == Phase::Idle {
            id.bind(&Address::any(Family::V4), Purpose::Bound)?;
        }
        let backlog = match backlog {
            0 => MAX_BACKLOG,
            n => n.min(MAX_BACKLOG),
        };
        let serves = match id.qp_type {
            QpType::Rc => Serves::Connections(Transport::Rc),
            QpType::Uc => Serves::Connections(Transport::Uc),
            QpType::XrcSend | QpType::XrcRecv => Serves::Connections(Transport::Xrc),
            QpType::Ud => Serves::Datagrams,
        };
        if phase == Phase::Idle || phase == Phase::Bound {
            id.own_port()?;
        }
        id.gsi.with_cm(|cm, ids, _| {
            let mut state = id.state.lock();
            let (Phase::Bound, Some(local)) = (state.phase, state.local) else {
                return Err(state.phase.refuses());
            };
            let listen = Listen {
                service_id: local.service_id(id.space),
                address: local.listens_at(state.options.only_family),
                serves,
                ip_header: local.family() != Family::Ib,
                backlog,
            };
            let listener = cm.listen(listen)?;
            state.listener = Some(listener);
            state.phase = Phase::Listen;
            ids.insert_listener(listener, id);
            Ok(())
        })
    }
}

//! Finds the id that an event of the machine is for, and makes the program's event of it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use anyverbs_objects::ah::AhAttr;
use anyverbs_objects::gid::GidEntry;
use anyverbs_proto::cm::event::{CmEvent, ConnectRequest, Disconnected, SidrRequest, SidrResponse};
use anyverbs_proto::cm::id::{CommId, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::message::code::SidrStatus;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::cm::{ListenerId, Path};
use anyverbs_proto::types::{Gid, PKey, QKey};

use super::address::{Address, IbAddress, scoped};
use super::event::{ConnEvent, EventKind, EventParam, Pending, UdEvent};
use super::id::{IdCell, Phase, State};
use super::local_address::LocalAddress;
use crate::gsi::Events;

/// The ids of this process by their communication IDs and listeners. Guarded by the CM's lock.
#[derive(Debug, Default)]
pub struct Ids {
    by_comm: HashMap<CommId, Arc<IdCell>>,
    listeners: HashMap<ListenerId, Arc<IdCell>>,
    /// Ids that are at an address of the device, by their place in memory.
    placed: HashMap<usize, Weak<IdCell>>,
}

impl Events for Ids {
    /// Ids whose own address is gone hear of it.
    fn addresses_changed(&self, find: &dyn Fn(Gid, u32) -> Option<GidEntry>) {
        for id in self.placed.values().filter_map(Weak::upgrade) {
            let mut state = id.state.lock();
            // The program does not know it yet.
            if state.is_silent {
                continue;
            }
            // Its index may be another now.
            let found =
                state.place.map(|place| find(place.gid, place.interface).map(LocalAddress::from));
            if let Some(Some(place)) = found {
                state.place = Some(place);
            }
            let is_here = found.is_none_or(|place| place.is_some());
            let was_away = std::mem::replace(&mut state.is_away, !is_here);
            drop(state);
            if !is_here && !was_away {
                id.post(Pending::new(EventKind::AddrChange));
            }
        }
    }

    /// Ids at an address of the device hear of it (`rdma_get_cm_event(3)`).
    fn device_failed(&self, device: usize) {
        for id in self.placed.values().filter_map(Weak::upgrade) {
            let state = id.state.lock();
            let is_on = state.place.is_some_and(|place| place.device == device);
            let is_known = !state.is_silent;
            drop(state);
            if is_on && is_known {
                id.post(Pending::new(EventKind::DeviceRemoval));
            }
        }
    }

    /// Queues an event on the channel of its id. Called under the CM's lock: takes leaves only.
    fn deliver(&mut self, event: CmEvent) {
        match event {
            CmEvent::ConnectRequest { listener, id, request } => {
                self.connect_request(listener, id, *request);
            }
            CmEvent::SidrRequest { listener, id, request } => {
                self.sidr_request(listener, id, *request);
            }
            event => {
                // A destroyed id reports nothing.
                if let Some(id) = self.by_comm.get(&event.id())
                    && let Some(pending) = id.tell(event)
                {
                    id.post(pending);
                }
            }
        }
    }
}

impl Ids {
    pub(super) fn insert(&mut self, comm: CommId, id: &Arc<IdCell>) {
        self.by_comm.insert(comm, Arc::clone(id));
    }

    pub(super) fn remove(&mut self, comm: CommId) {
        self.by_comm.remove(&comm);
    }

    pub(super) fn insert_listener(&mut self, listener: ListenerId, id: &Arc<IdCell>) {
        self.listeners.insert(listener, Arc::clone(id));
    }

    pub(super) fn remove_listener(&mut self, listener: ListenerId) {
        self.listeners.remove(&listener);
    }

    pub(super) fn place(&mut self, id: &Arc<IdCell>) {
        self.placed.insert(Arc::as_ptr(id).addr(), Arc::downgrade(id));
    }

    /// The id is destroyed.
    pub(super) fn displace(&mut self, id: &IdCell) {
        self.placed.remove(&std::ptr::from_ref(id).addr());
    }

    fn connect_request(&mut self, listener: ListenerId, comm: CommId, request: ConnectRequest) {
        let Some(asked) = self.listeners.get(&listener).cloned() else { return };
        let mut state = asked.requested(
            request.service_id,
            request.addresses,
            (request.sgid, request.dgid),
            request.interface,
        );
        state.comm = Some(comm);
        state.asked = (request.responder_resources, request.initiator_depth);
        state.remote_ece = request.ece;
        state.path = state.place.map(|place| Path {
            mtu: request.mtu,
            interface: request.interface,
            ..place.path(request.dgid, 0, 0, None)
        });
        let param = EventParam::Conn(ConnEvent {
            private_data: request.private_data,
            responder_resources: request.responder_resources,
            initiator_depth: request.initiator_depth,
            flow_control: request.flow_control,
            retry_count: request.retry_count,
            rnr_retry_count: request.rnr_retry_count,
            srq: request.srq,
            qpn: request.remote_qpn,
        });
        self.raise_request(&asked, comm, state, param, request.ece);
    }

    fn sidr_request(&mut self, listener: ListenerId, comm: CommId, request: SidrRequest) {
        let Some(asked) = self.listeners.get(&listener).cloned() else { return };
        let mut state = asked.requested(
            request.service_id,
            request.addresses,
            (request.sgid, request.dgid),
            request.interface,
        );
        state.comm = Some(comm);
        state.path = state.place.map(|place| Path {
            interface: request.interface,
            ..place.path(request.dgid, 0, 0, None)
        });
        let param =
            EventParam::Ud(UdEvent { private_data: request.private_data, ..UdEvent::default() });
        self.raise_request(&asked, comm, state, param, Ece::default());
    }

    fn raise_request(
        &mut self,
        asked: &Arc<IdCell>,
        comm: CommId,
        state: State,
        param: EventParam,
        ece: Ece,
    ) {
        let Some(child) = asked.child(state) else { return };
        self.insert(comm, &child);
        self.place(&child);
        let new_id = Some(child);
        asked.post(Pending { new_id, param, ece, ..Pending::new(EventKind::ConnectRequest) });
    }
}

impl IdCell {
    /// The state of a new id for a peer that asks this listener.
    fn requested(
        &self,
        service_id: ServiceId,
        addresses: Option<IpHeader>,
        (sgid, dgid): (Gid, Gid),
        interface: u32,
    ) -> State {
        let place = LocalAddress::find(self.gsi, sgid, interface);
        let interface = place.map_or(0, |place| place.interface);
        let port = service_id.0 as u16;
        let (local, peer) = match addresses {
            Some(header) => {
                let source = header.source;
                (
                    Address::Ip(scoped(header.destination, port, interface)),
                    Address::Ip(scoped(source.ip(), source.port(), interface)),
                )
            }
            None => {
                let ib = |gid, sid| {
                    Address::Ib(IbAddress {
                        pkey: PKey::DEFAULT,
                        flow_info: 0,
                        gid,
                        sid,
                        sid_mask: !0,
                        scope_id: interface.into(),
                    })
                };
                (ib(sgid, service_id.0), ib(dgid, 0))
            }
        };
        State {
            phase: Phase::Connect,
            local: Some(local),
            peer: Some(peer),
            place,
            dgid,
            is_passive: true,
            is_silent: true,
            options: self.state.lock().options,
            ..State::default()
        }
    }

    /// The program's event for an event of a connection or SIDR request. Updates the id's stage.
    fn tell(&self, event: CmEvent) -> Option<Pending> {
        let mut state = self.state.lock();
        let conn = |kind, param| Pending { param: EventParam::Conn(param), ..Pending::new(kind) };
        let pending = match event {
            CmEvent::ConnectResponse { response, .. } => {
                state.remote_ece = response.ece;
                let param = ConnEvent {
                    private_data: response.private_data,
                    responder_resources: response.responder_resources,
                    initiator_depth: response.initiator_depth,
                    flow_control: response.flow_control,
                    retry_count: 0,
                    rnr_retry_count: response.rnr_retry_count,
                    srq: response.srq,
                    qpn: response.remote_qpn,
                };
                Pending { ece: response.ece, ..conn(EventKind::ConnectResponse, param) }
            }
            // Linux reports no private data of RTU, DREQ and DREP.
            CmEvent::Established { .. } => conn(EventKind::Established, ConnEvent::default()),
            CmEvent::Rejected { rejection, .. } => {
                let param =
                    ConnEvent { private_data: rejection.private_data, ..ConnEvent::default() };
                let status = rejection.reason.code().into();
                Pending { status, ..conn(EventKind::Rejected, param) }
            }
            CmEvent::Unreachable { .. } => Pending::failed(EventKind::Unreachable, libc::ETIMEDOUT),
            CmEvent::Disconnected { how, .. } => {
                if state.phase != Phase::Connect {
                    return None;
                }
                state.phase = Phase::Disconnect;
                let errno = if how == Disconnected::TimedOut { libc::ETIMEDOUT } else { 0 };
                let told = conn(EventKind::Disconnected, ConnEvent::default());
                Pending { status: -errno, ..told }
            }
            CmEvent::TimewaitExit { .. } => Pending::new(EventKind::TimewaitExit),
            CmEvent::SidrResponse { response, .. } => state.answered(*response),
            CmEvent::ConnectRequest { .. } | CmEvent::SidrRequest { .. } => return None,
        };
        (!state.is_silent).then_some(pending)
    }
}

impl State {
    fn answered(&mut self, response: SidrResponse) -> Pending {
        let (Some(place), Some(path)) = (self.place, self.path) else {
            return Pending::failed(EventKind::AddrError, libc::ENODEV);
        };
        let mut param = UdEvent { private_data: response.private_data, ..UdEvent::default() };
        if response.status != SidrStatus::Valid {
            let status = response.status.code().into();
            let param = EventParam::Ud(param);
            return Pending { status, param, ..Pending::new(EventKind::Unreachable) };
        }
        // A queue pair has one key for all its peers.
        let own: QKey = *self.qkey.get_or_insert(response.qkey);
        if own != response.qkey {
            let param = EventParam::Ud(param);
            return Pending { param, ..Pending::failed(EventKind::AddrError, libc::EINVAL) };
        }
        self.remote_ece = response.ece;
        param.ah = AhAttr {
            dgid: path.dgid,
            sgid_index: place.index,
            hop_limit: path.hop_limit,
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            is_global: true,
            sl: path.sl,
            static_rate: path.rate,
            port: place.port,
            ..AhAttr::default()
        };
        (param.qpn, param.qkey) = (response.qpn, response.qkey);
        let ece = response.ece;
        Pending { param: EventParam::Ud(param), ece, ..Pending::new(EventKind::Established) }
    }
}

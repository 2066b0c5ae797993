//! REQ: asking, being asked, and how the program answers yes.

use std::time::Duration;

use super::connection::{Connection, ConnectionState as S, MOST_UNPROVEN};
use super::counters::DropReason;
use super::error::{CmError, private_data};
use super::event::{CmEvent, ConnectRequest};
use super::id::CommId;
use super::ip::IpHeader;
use super::listener::ListenerId;
use super::machine::Cm;
use super::message::Attribute;
use super::message::code::{About, RejReason};
use super::message::ece::RepVendorId;
use super::message::mra::Mra;
use super::message::path::PathRecord;
use super::message::private_data::PrivateData;
use super::message::rep::Rep;
use super::message::req::Req;
use super::outbox::{Destination, Peer};
use super::params::{AcceptParams, ConnectParams, Path, Serves, Transport};
use super::qp_attr::{QpParams, Side};
use super::repeats::Attempt;
use super::timeout;
use crate::qp::Arrival;
use crate::time::Time;
use crate::types::{PKey, Qpn};

/// LIDs mean nothing on RoCE; the kernel writes the permissive one.
const PERMISSIVE_LID: u16 = 0xffff;

/// The first queue pair number that a program can have.
const FIRST_QPN: u32 = 2;

impl Path {
    pub(super) fn is_valid(&self) -> bool {
        let is_port = |gid: crate::types::Gid| !gid.is_zero() && !gid.is_multicast();
        is_port(self.sgid)
            && is_port(self.dgid)
            && self.flow_label < 1 << 20
            && self.sl < 16
            && self.rate < 64
            && self.packet_life_time < 32
    }

    pub(super) fn destination(&self) -> Destination {
        Destination {
            sgid: self.sgid,
            dgid: self.dgid,
            interface: self.interface,
            traffic_class: self.traffic_class,
            flow_label: self.flow_label,
            hop_limit: self.hop_limit,
        }
    }
}

/// The user's private data behind the addresses.
pub(super) fn with_addresses<const N: usize>(
    addresses: Option<IpHeader>,
    user: &[u8],
) -> Result<PrivateData<N>, CmError> {
    match addresses {
        None => private_data(user),
        Some(header) => {
            let header = header.emit();
            let beside = |error| match error {
                CmError::PrivateDataTooLong { room, .. } => {
                    CmError::PrivateDataTooLong { len: user.len(), room: room - header.len() }
                }
                error => error,
            };
            private_data(&[&header[..], user].concat()).map_err(beside)
        }
    }
}

/// Addresses and the user's part of private data.
pub(super) fn split_addresses(
    data: &[u8],
    ip_header: bool,
) -> Option<(Option<IpHeader>, Box<[u8]>)> {
    if !ip_header {
        return Some((None, data.into()));
    }
    let (header, user) = data.split_first_chunk()?;
    Some((Some(IpHeader::parse(header).ok()?), user.into()))
}

impl Cm {
    /// Asks for a connection (`rdma_connect(3)`). The answer is [`CmEvent::ConnectResponse`], [`CmEvent::Rejected`] or
    /// [`CmEvent::Unreachable`].
    ///
    /// # Errors
    /// [`CmError::Value`], [`CmError::PrivateDataTooLong`], [`CmError::Full`].
    pub fn connect(&mut self, now: Time, params: &ConnectParams<'_>) -> Result<CommId, CmError> {
        let ConnectParams { path, transport, .. } = *params;
        let in_range = path.is_valid()
            && params.retry_count < 8
            && params.rnr_retry_count < 8
            && params.max_cm_retries < 16
            && params.response_timeout < 32
            && params.ece.vendor_id < 1 << 24;
        if !in_range {
            return Err(CmError::Value);
        }
        let private_data = with_addresses(params.addresses, params.private_data)?;
        if self.is_full() {
            return Err(CmError::Full);
        }
        let id = self.new_id();
        let transaction_id = self.new_transaction(id);
        let ack_timeout = timeout::ack_code(path.packet_life_time, self.config.ack_delay);
        let (service_type, extended_transport) = transport.codes();
        let req = Req {
            local_comm_id: id,
            vendor_id: params.ece.vendor_id,
            service_id: params.service_id,
            local_ca_guid: self.config.ca_guid,
            local_qpn: params.qpn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            remote_response_timeout: params.response_timeout,
            service_type,
            flow_control: params.flow_control,
            starting_psn: params.starting_psn,
            local_response_timeout: params.response_timeout,
            retry_count: params.retry_count,
            pkey: path.pkey,
            path_mtu: Some(path.mtu),
            rnr_retry_count: params.rnr_retry_count,
            max_cm_retries: params.max_cm_retries,
            srq: params.srq,
            extended_transport,
            primary: PathRecord {
                local_lid: PERMISSIVE_LID,
                remote_lid: PERMISSIVE_LID,
                local_gid: path.sgid,
                remote_gid: path.dgid,
                flow_label: path.flow_label,
                packet_rate: path.rate,
                traffic_class: path.traffic_class,
                hop_limit: path.hop_limit,
                sl: path.sl,
                subnet_local: path.hop_limit <= 1,
                ack_timeout,
            },
            private_data,
            ..Req::default()
        };
        let to = path.destination();
        let sent = self.outbox.send_with(to, transaction_id, params.ece.options, req);
        let mut connection = Connection {
            state: S::ReqSent,
            orphan: false,
            quiet: false,
            waiting: None,
            local_id: id,
            remote_id: None,
            transaction_id,
            to,
            qp: QpParams {
                transport,
                side: Side::Active,
                sgid: path.sgid,
                dgid: path.dgid,
                flow_label: path.flow_label,
                traffic_class: path.traffic_class,
                hop_limit: path.hop_limit,
                sl: path.sl,
                rate: path.rate,
                path_mtu: path.mtu,
                ack_timeout,
                retry_count: params.retry_count,
                rnr_retry_count: 0,
                qpn: Some(params.qpn),
                dest_qpn: None,
                rq_psn: Some(params.starting_psn),
                sq_psn: None,
                responder_resources: params.responder_resources.min(self.config.max_rd_atomic),
                initiator_depth: params.initiator_depth.min(self.config.max_rd_atomic),
            },
            timeout: timeout::answer(params.response_timeout, ack_timeout),
            max_retries: params.max_cm_retries,
            retries: 0,
            attempt: Attempt::default(),
            asked: now,
            deadline: None,
            sent: Some(sent),
            answer: None,
            packet_life_time: path.packet_life_time,
            dreq_transaction: 0,
            peer_asks_for: Duration::ZERO,
            named_id: false,
            named_qpn: false,
            is_recorded: false,
            doubt: None,
            unproven: None,
        };
        connection.attempt = self.repeats.begin(connection.timeout, self.outbox.took_last());
        let next = connection.attempt.deadline(now);
        self.timers.set(id, &mut connection.deadline, Some(next));
        self.connections.insert(id, Box::new(connection));
        Ok(id)
    }

    /// Accepts a connection (`rdma_accept(3)`, passive side): the queue pair is in RTR by now.
    ///
    /// # Errors
    /// [`CmError::State`] where the peer has given up, [`CmError::Value`], [`CmError::PrivateDataTooLong`].
    pub fn accept(
        &mut self,
        now: Time,
        id: CommId,
        params: &AcceptParams<'_>,
    ) -> Result<(), CmError> {
        let c = Self::live_mut(&mut self.connections, id)?;
        if !matches!(c.state, S::ReqRcvd | S::MraReqSent) {
            return Err(CmError::State);
        }
        if params.rnr_retry_count >= 8 || params.ece.vendor_id >= 1 << 24 {
            return Err(CmError::Value);
        }
        let (local_qpn, local_eecn) = match c.qp.transport {
            Transport::Xrc => (Qpn::default(), params.qpn),
            _ => (params.qpn, Qpn::default()),
        };
        let rep = Rep {
            local_comm_id: id,
            remote_comm_id: c.remote(),
            local_qpn,
            vendor_id: RepVendorId(params.ece.vendor_id),
            local_eecn,
            starting_psn: params.starting_psn,
            responder_resources: params.responder_resources,
            initiator_depth: params.initiator_depth,
            target_ack_delay: self.config.ack_delay & 0x1f,
            flow_control: params.flow_control,
            rnr_retry_count: params.rnr_retry_count,
            srq: params.srq || c.qp.transport == Transport::Xrc,
            local_ca_guid: self.config.ca_guid,
            private_data: private_data(params.private_data)?,
            ..Rep::default()
        };
        c.qp.qpn = Some(params.qpn);
        c.qp.rq_psn = Some(params.starting_psn);
        c.qp.responder_resources = params.responder_resources.min(self.config.max_rd_atomic);
        c.qp.initiator_depth = params.initiator_depth.min(self.config.max_rd_atomic);
        c.state = S::RepSent;
        c.retries = 0;
        c.asked = now;
        c.answer = None;
        // It is sent even if the limit is reached: only answers to the peer's REQs count so far.
        c.may_send();
        c.sent = Some(self.outbox.send_with(c.to, c.transaction_id, params.ece.options, rep));
        c.attempt = self.repeats.begin(c.timeout, self.outbox.took_last());
        let next = c.attempt.deadline(now);
        self.timers.set(id, &mut c.deadline, Some(next));
        let waiting = c.waiting.take();
        self.release_backlog(waiting);
        self.record(id);
        Ok(())
    }

    pub(super) fn on_req(
        &mut self,
        now: Time,
        arrival: &Arrival,
        tid: u64,
        modifier: u32,
        req: &Req,
    ) {
        let (peer, remote) = (Peer::of(arrival), req.local_comm_id);
        if remote.is_none() {
            return self.drop(DropReason::Malformed);
        }
        if let Some(id) = self.names.of_remote_id(peer, remote) {
            let c = &self.connections[&id];
            let is_same = c.transaction_id == tid
                && c.qp.dest_qpn == Some(req.local_qpn)
                && c.qp.sq_psn == Some(req.starting_psn);
            if is_same {
                return self.on_req_again(now, id);
            }
            // The peer gives its ID anew. If we are past that connection too, it does so by right.
            if !matches!(c.state, S::Timewait | S::Closed) {
                return self.doubt(arrival, tid, remote, id);
            }
            if let Some(c) = self.connections.get_mut(&id) {
                self.names.leave(c);
            }
        }
        if let Some(id) = self.names.of_remote_qpn(peer, req.local_qpn) {
            // IBA 12.9.8.3.1: the peer has forgotten the connection of this queue pair.
            return self.doubt(arrival, tid, remote, id);
        }
        match self.find_listener(arrival, req) {
            Ok(found) => self.admit(now, arrival, tid, modifier, req, found),
            Err(RejReason::InvalidGid) => {
                let would_do = arrival.destination.0;
                self.refuse(arrival, tid, remote, RejReason::InvalidGid, &would_do);
            }
            Err(reason) => self.refuse(arrival, tid, remote, reason, &[]),
        }
    }

    /// A REQ gives a name of the connection `id` to another one.
    fn doubt(&mut self, arrival: &Arrival, tid: u64, remote: CommId, id: CommId) {
        if self.challenge(id, tid) {
            return self.refuse(arrival, tid, remote, RejReason::StaleConn, &[]);
        }
        self.drop(DropReason::State);
    }

    /// Finds the listener that answers a REQ, or the reason why there is none.
    fn find_listener(&mut self, arrival: &Arrival, req: &Req) -> Result<Found, RejReason> {
        let transport = Transport::of(req).ok_or(RejReason::InvalidTransport)?;
        if req.path_mtu.is_none() {
            return Err(RejReason::InvalidMtu);
        }
        if req.primary.remote_gid != arrival.destination {
            return Err(RejReason::InvalidGid);
        }
        // The path is not the sender's own. A third host must not be drawn into a connection.
        if req.primary.local_gid != arrival.source
            || req.local_qpn.get() < FIRST_QPN
            || !req.pkey.matches(PKey::DEFAULT)
        {
            return Err(RejReason::UnsupportedRequest);
        }
        let listener = self.listeners.any_of(req.service_id).ok_or(RejReason::InvalidServiceId)?;
        let (addresses, user) = split_addresses(&req.private_data.0, listener.listen.ip_header)
            .ok_or(RejReason::Consumer)?;
        let is_it = |header: IpHeader| header.between(arrival.source, arrival.destination);
        let addresses = addresses
            .map(|header| is_it(header).ok_or(RejReason::UnsupportedRequest))
            .transpose()?;
        let destination = arrival.destination.to_ip();
        let (listener, found) =
            self.listeners.find(req.service_id, destination).ok_or(RejReason::InvalidServiceId)?;
        match found.listen.serves {
            Serves::Connections(served) if served == transport => {}
            Serves::Connections(_) => return Err(RejReason::InvalidTransport),
            Serves::Datagrams => return Err(RejReason::InvalidServiceId),
        }
        Ok(Found { listener, transport, addresses, user })
    }

    /// Makes the passive side of a connection.
    fn admit(
        &mut self,
        now: Time,
        arrival: &Arrival,
        tid: u64,
        modifier: u32,
        req: &Req,
        found: Found,
    ) {
        let listener = self.listeners.get_mut(found.listener).expect("just found");
        if listener.is_full() {
            // The REQ is not rejected: the peer asks again, when there may be room.
            return self.drop(DropReason::Backlog);
        }
        if self.is_full() {
            let remote = req.local_comm_id;
            return self.refuse(arrival, tid, remote, RejReason::NoResources, &[]);
        }
        let id = self.new_id();
        let mut connection = self.passive(id, arrival.interface, tid, req, &found);
        self.names.enter(&mut connection);
        let until = now + connection.peer_asks_for;
        self.timers.set(id, &mut connection.deadline, Some(until));
        let request = ConnectRequest {
            service_id: req.service_id,
            addresses: found.addresses,
            sgid: connection.qp.sgid,
            dgid: connection.qp.dgid,
            interface: arrival.interface,
            remote_ca_guid: req.local_ca_guid,
            transport: found.transport,
            remote_qpn: req.local_qpn,
            sq_psn: req.starting_psn,
            mtu: connection.qp.path_mtu,
            responder_resources: req.initiator_depth,
            initiator_depth: req.responder_resources,
            flow_control: req.flow_control,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            srq: req.srq,
            xrc_srqn: req.remote_eecn.get(),
            ece: req.ece(modifier),
            private_data: found.user,
        };
        self.connections.insert(id, Box::new(connection));
        if let Some(listener) = self.listeners.get_mut(found.listener) {
            listener.waiting += 1;
        }
        let request = Box::new(request);
        self.raise(CmEvent::ConnectRequest { listener: found.listener, id, request });
    }

    fn passive(
        &self,
        id: CommId,
        interface: u32,
        tid: u64,
        req: &Req,
        found: &Found,
    ) -> Connection {
        let path = &req.primary;
        let to = Destination {
            sgid: path.remote_gid,
            dgid: path.local_gid,
            interface,
            traffic_class: path.traffic_class,
            flow_label: path.flow_label,
            hop_limit: path.hop_limit,
        };
        let most = self.config.max_rd_atomic;
        let peer_waits = timeout::answer(req.remote_response_timeout, path.ack_timeout);
        Connection {
            state: S::ReqRcvd,
            orphan: false,
            quiet: false,
            waiting: Some(found.listener),
            local_id: id,
            remote_id: Some(req.local_comm_id),
            transaction_id: tid,
            to,
            qp: QpParams {
                transport: found.transport,
                side: Side::Passive,
                sgid: to.sgid,
                dgid: to.dgid,
                flow_label: path.flow_label,
                traffic_class: path.traffic_class,
                hop_limit: path.hop_limit,
                sl: path.sl,
                // The port's own rate (`IBV_RATE_MAX`). The packet rate that the peer names is a guess, on Linux by the
                // kind of its interface, and it would slow us down.
                rate: 0,
                path_mtu: req.path_mtu.expect("checked by find_listener"),
                ack_timeout: path.ack_timeout,
                retry_count: req.retry_count,
                rnr_retry_count: req.rnr_retry_count,
                qpn: None,
                dest_qpn: Some(req.local_qpn),
                rq_psn: None,
                sq_psn: Some(req.starting_psn),
                responder_resources: req.initiator_depth.min(most),
                initiator_depth: req.responder_resources.min(most),
            },
            timeout: timeout::answer_of_peer(req.local_response_timeout, path.ack_timeout),
            max_retries: req.max_cm_retries,
            retries: 0,
            attempt: Attempt::default(),
            asked: Time::default(),
            deadline: None,
            sent: None,
            answer: None,
            packet_life_time: 0,
            dreq_transaction: 0,
            peer_asks_for: peer_waits * (u32::from(req.max_cm_retries) + 1),
            named_id: false,
            named_qpn: false,
            is_recorded: false,
            doubt: None,
            unproven: Some(MOST_UNPROVEN),
        }
    }

    /// The peer repeats its REQ: the last answer is sent again.
    fn on_req_again(&mut self, now: Time, id: CommId) {
        self.outbox.counters.rx_duplicates.add(Attribute::Req);
        let c = self.connections.get_mut(&id).expect("found by its name");
        match c.state {
            S::ReqRcvd => {
                let mra = Mra {
                    local_comm_id: id,
                    remote_comm_id: c.remote(),
                    about: About::Req,
                    service_timeout: self.config.service_timeout & 0x1f,
                    ..Mra::default()
                };
                c.answer = Some(self.outbox.send(c.to, c.transaction_id, mra));
                c.state = S::MraReqSent;
                let wait = c.peer_asks_for + timeout::decode(self.config.service_timeout);
                self.timers.set(id, &mut c.deadline, Some(now + wait));
            }
            S::MraReqSent => {
                let mra = c.answer.as_deref().expect("an MRA was sent");
                self.outbox.replay(c.to, mra);
                let wait = c.peer_asks_for + timeout::decode(self.config.service_timeout);
                self.timers.set(id, &mut c.deadline, Some(now + wait));
            }
            _ if c.answered_with(Attribute::Rej) => {
                let rej = c.answer.as_deref().expect("it is a REJ");
                self.outbox.replay(c.to, rej);
            }
            S::RepSent => {
                let rep = c.sent.as_deref().expect("REP waits for its answer");
                self.outbox.replay(c.to, rep);
            }
            // It has been answered, and the answer has arrived; or the connection is past.
            _ => {}
        }
    }
}

/// The listener that answers a REQ.
struct Found {
    listener: ListenerId,
    transport: Transport,
    addresses: Option<IpHeader>,
    user: Box<[u8]>,
}

/// The queue pair that a REP names.
pub(super) fn rep_qpn(transport: Transport, rep: &Rep) -> Option<Qpn> {
    let qpn = if transport == Transport::Xrc { rep.local_eecn } else { rep.local_qpn };
    (qpn.get() >= FIRST_QPN).then_some(qpn)
}

//! Ids connect, answer and disconnect.

use std::time::Duration;

use anyverbs_objects::async_event::AsyncEventKind;
use anyverbs_proto::cm::id::{CommId, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::message::code::{RejReason, SidrStatus};
use anyverbs_proto::cm::{
    AcceptParams, ConnectParams, ConnectionState, Path, SidrAnswer, SidrParams, Transport,
};
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::types::{QKey, Qpn};

use super::address::Family;
use super::error::CmError;
use super::id::{Id, IdCell, Phase, State};
use super::params::ConnParam;

/// Code of the time in which Linux's CM expects an answer, and how often it asks again.
const RESPONSE_TIMEOUT: u8 = 20;
const MAX_CM_RETRIES: u8 = 15;

/// Q_Key of all datagram ids (`RDMA_UDP_QKEY`).
pub(super) const UDP_QKEY: QKey = QKey(0x0123_4567);

/// `RDMA_MAX_RESP_RES` and `RDMA_MAX_INIT_DEPTH`.
const AS_MANY_AS_CAN_BE: u8 = u8::MAX;

/// The parameters if the program gives none: to try for ever.
const DEFAULT_PARAM: ConnParam<'_> = ConnParam {
    private_data: &[],
    responder_resources: AS_MANY_AS_CAN_BE,
    initiator_depth: AS_MANY_AS_CAN_BE,
    flow_control: false,
    retry_count: 7,
    rnr_retry_count: 7,
    srq: false,
    qpn: Qpn::new(0),
};

/// The address that is asked, and our own.
struct Connecting {
    service_id: ServiceId,
    addresses: Option<IpHeader>,
    path: Path,
}

impl State {
    /// The way of an id that may connect.
    fn connecting(&self, id: &IdCell) -> Result<Connecting, CmError> {
        let (Phase::RouteResolved, Some(local), Some(peer), Some(path)) =
            (self.phase, self.local, self.peer, self.path)
        else {
            return Err(self.phase.refuses());
        };
        let header = IpHeader { source: local.socket_addr(), destination: peer.ip() };
        Ok(Connecting {
            service_id: peer.service_id(id.space),
            addresses: (local.family() != Family::Ib).then_some(header),
            path,
        })
    }

    /// The attached queue pair, or the one that the program names.
    fn named_qp(&self, param: &ConnParam<'_>) -> (Qpn, bool) {
        match &self.qp {
            Some(qp) => (qp.qpn, qp.srq.is_some()),
            None => (param.qpn, param.srq),
        }
    }
}

impl IdCell {
    fn transport(&self) -> Transport {
        match self.qp_type {
            QpType::Uc => Transport::Uc,
            QpType::XrcSend | QpType::XrcRecv => Transport::Xrc,
            QpType::Rc | QpType::Ud => Transport::Rc,
        }
    }

    /// READs and atomics in one direction: the program's number, or the greatest possible.
    fn depth(&self, asked: u8, most: u8) -> Result<u8, CmError> {
        let core = self.gsi.core();
        let place = self.state.lock().place.as_ref().map(|place| place.device);
        let attr = place.map_or(&core.attr, |device| core.attr_of(device));
        let device = attr.max_qp_rd_atom.try_into().unwrap_or(u8::MAX);
        match asked {
            AS_MANY_AS_CAN_BE => Ok(most.min(device)),
            n if n <= device => Ok(n),
            _ => Err(CmError::Invalid("responder resources or initiator depth")),
        }
    }

    fn ask(self: &std::sync::Arc<Self>, param: &ConnParam<'_>) -> Result<(), CmError> {
        let responder_resources = self.depth(param.responder_resources, u8::MAX)?;
        let initiator_depth = self.depth(param.initiator_depth, u8::MAX)?;
        self.gsi.with_cm(|cm, ids, now| {
            let mut state = self.state.lock();
            let Connecting { service_id, addresses, path } = state.connecting(self)?;
            let comm = if self.is_datagram() {
                cm.sidr_request(
                    now,
                    &SidrParams {
                        service_id,
                        addresses,
                        path,
                        // Linux takes a power of two of milliseconds here, near the code's time.
                        timeout: Duration::from_millis(1 << (RESPONSE_TIMEOUT - 8)),
                        max_retries: MAX_CM_RETRIES,
                        private_data: param.private_data,
                    },
                )?
            } else {
                let (qpn, srq) = state.named_qp(param);
                cm.connect(
                    now,
                    &ConnectParams {
                        service_id,
                        addresses,
                        path,
                        transport: self.transport(),
                        qpn,
                        starting_psn: self.psn,
                        responder_resources,
                        initiator_depth,
                        flow_control: param.flow_control,
                        retry_count: param.retry_count.min(7),
                        rnr_retry_count: param.rnr_retry_count.min(7),
                        srq,
                        ece: state.local_ece,
                        response_timeout: RESPONSE_TIMEOUT,
                        max_cm_retries: MAX_CM_RETRIES,
                        private_data: param.private_data,
                    },
                )?
            };
            state.comm = Some(comm);
            state.phase = Phase::Connect;
            ids.insert(comm, self);
            Ok(())
        })
    }

    /// The machine's name of the connection.
    fn comm(&self) -> Result<CommId, CmError> {
        let state = self.state.lock();
        state.comm.ok_or(state.phase.refuses())
    }

    /// The machine's name of a request that waits for our answer.
    fn request(&self) -> Result<(CommId, (u8, u8)), CmError> {
        let state = self.state.lock();
        match (state.phase, state.comm) {
            (Phase::Connect, Some(comm)) if state.is_passive => Ok((comm, state.asked)),
            _ => Err(state.phase.refuses()),
        }
    }

    fn accept_datagrams(&self, comm: CommId, param: &ConnParam<'_>) -> Result<(), CmError> {
        self.gsi.with_cm(|cm, _, now| {
            let mut state = self.state.lock();
            let qkey = *state.qkey.get_or_insert(UDP_QKEY);
            let answer = SidrAnswer {
                status: SidrStatus::Valid,
                qpn: state.named_qp(param).0,
                qkey,
                ece: state.local_ece,
                private_data: param.private_data,
            };
            cm.sidr_reply(now, comm, &answer)?;
            state.is_silent = false;
            Ok(())
        })
    }

    fn accept_connection(
        &self,
        comm: CommId,
        asked: (u8, u8),
        param: &ConnParam<'_>,
    ) -> Result<(), CmError> {
        let responder_resources = self.depth(param.responder_resources, asked.0)?;
        let initiator_depth = self.depth(param.initiator_depth, asked.1)?;
        self.move_qp_to_rts(Some((responder_resources, initiator_depth)))?;
        let result = self.gsi.with_cm(|cm, _, now| {
            let mut state = self.state.lock();
            let (qpn, srq) = state.named_qp(param);
            let accept = AcceptParams {
                qpn,
                starting_psn: self.psn,
                responder_resources,
                initiator_depth,
                flow_control: param.flow_control,
                rnr_retry_count: param.rnr_retry_count.min(7),
                srq,
                ece: state.local_ece,
                private_data: param.private_data,
            };
            cm.accept(now, comm, &accept)?;
            state.is_silent = false;
            Ok(())
        });
        if result.is_err() {
            self.move_qp_to_err();
            self.gsi.with_cm(|cm, _, now| {
                // Refused: the peer has given up.
                let _ = cm.reject(now, comm, RejReason::Consumer, &[], &[]);
            });
        }
        result
    }
}

impl Id {
    /// `rdma_connect(3)`; of a UD id a question for the peer's queue pair. An event tells the outcome.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn connect(&self, param: &ConnParam<'_>) -> Result<(), CmError> {
        self.0.check_current()?;
        self.0.ask(param)
    }

    /// `rdma_accept(3)`, of a request's id. Without parameters as much is granted as the peer asks for. A connection that cannot
    /// be accepted as asked, though the queue pair could be moved, is rejected, as by Linux.
    ///
    /// # Errors
    /// [`CmError`]: [`CmError::Invalid`] too where the peer has given up meanwhile.
    pub fn accept(&self, param: Option<&ConnParam<'_>>) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        let (comm, asked) = id.request()?;
        if param.is_none() && id.state.lock().qp.is_none() {
            return Err(CmError::Invalid("no queue pair"));
        }
        let param = param.unwrap_or(&DEFAULT_PARAM);
        if id.is_datagram() {
            id.accept_datagrams(comm, param)
        } else {
            id.accept_connection(comm, asked, param)
        }
    }

    /// `rdma_reject(3)`, or `rdma_reject_ece(3)`.
    ///
    /// # Errors
    /// [`CmError`].
    pub fn reject(&self, private_data: &[u8], because_of_ece: bool) -> Result<(), CmError> {
        self.0.check_current()?;
        let reason = if because_of_ece { RejReason::VendorOption } else { RejReason::Consumer };
        self.reject_for(reason, private_data)
    }

    /// Rejects a request that the program never saw, since something was missing here to give it to the program. The peer is told
    /// that there are no resources. Nothing happens where there is no request any more.
    #[doc(hidden)] // for the C interface, whose ids need memory of their own: programs in Rust have seen the request
    pub fn decline(&self) {
        if self.0.check_current().is_ok() {
            let _ = self.reject_for(RejReason::NoResources, &[]);
        }
    }

    fn reject_for(&self, reason: RejReason, private_data: &[u8]) -> Result<(), CmError> {
        let id = &self.0;
        id.gsi.with_cm(|cm, _, now| {
            let state = id.state.lock();
            let comm = state.comm.ok_or(state.phase.refuses())?;
            if id.is_datagram() {
                let answer = SidrAnswer {
                    status: SidrStatus::Rejected,
                    qpn: Qpn::default(),
                    qkey: QKey(0),
                    ece: state.local_ece,
                    private_data,
                };
                cm.sidr_reply(now, comm, &answer)?;
            } else {
                cm.reject(now, comm, reason, &[], private_data)?;
            }
            Ok(())
        })
    }

    /// `rdma_establish(3)`: the program has moved its queue pair.
    ///
    /// # Errors
    /// [`CmError::Invalid`] where a queue pair is attached, which needs no such call, or where there is no answer to confirm.
    pub fn establish(&self) -> Result<(), CmError> {
        self.0.check_current()?;
        if self.0.state.lock().qp.is_some() {
            return Err(CmError::Invalid("a queue pair is attached"));
        }
        self.0.confirm()
    }

    /// `rdma_notify(3)`: the program reports an event of its queue pair.
    ///
    /// # Errors
    /// [`CmError::Invalid`] for anything but [`AsyncEventKind::CommEst`]; `EISCONN` where the peer has confirmed meanwhile.
    pub fn notify(&self, event: AsyncEventKind) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        id.gsi.with_cm(|cm, _, _| {
            let comm = id.comm()?;
            if event != AsyncEventKind::CommEst {
                return Err(CmError::Invalid("event"));
            }
            if cm.state(comm) == Ok(ConnectionState::Established) {
                return Err(CmError::System { what: "notify", errno: libc::EISCONN });
            }
            Ok(cm.establish(comm)?)
        })
    }

    /// `rdma_disconnect(3)`: an attached queue pair goes to ERR, and the peer is told, or gets the answer that it waits
    /// for. Without a connection nothing happens.
    ///
    /// # Errors
    /// [`CmError::Invalid`] for an id that never connected.
    pub fn disconnect(&self) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        id.comm()?;
        id.move_qp_to_err();
        id.gsi.with_cm(|cm, _, now| {
            // Refused: it is over, or not yet there.
            let comm = id.state.lock().comm;
            let _ = comm.map(|comm| cm.disconnect(now, comm, &[]));
        });
        Ok(())
    }
}

impl IdCell {
    /// Tells the peer that our queue pair is ready.
    pub(super) fn confirm(&self) -> Result<(), CmError> {
        self.gsi.with_cm(|cm, _, now| {
            let comm = self.comm()?;
            Ok(cm.ready(now, comm, &[])?)
        })
    }
}

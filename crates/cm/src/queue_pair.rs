//! The queue pair of an id, and how it is moved.

use std::sync::Arc;

use anyverbs_proto::cm::qp_attr::{LocalPort, init_attr, ud_attr};
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState};
use anyverbs_proto::types::Psn;
use anyverbs_transport::qp::{Qp, QpCell};

use super::connect::UDP_QKEY;
use super::error::CmError;
use super::id::{Id, IdCell, Phase};
use super::local_address::LocalAddress;

impl IdCell {
    /// The attributes for a queue pair of this id. `qp` may be of another device than the id, which sockets over RDMA do: it uses the
    /// first port of its own then.
    fn qp_attr(&self, to: QpState, qp: Option<&QpCell>) -> Result<(QpAttr, QpAttrMask), CmError> {
        let (port, comm, ack_timeout) = {
            let mut state = self.state.lock();
            let place = state.place.ok_or(CmError::Invalid("the id has no device yet"))?;
            // Where its address is in the table now.
            let place = LocalAddress::find(self.gsi, place.gid, place.interface);
            let place = place.ok_or(CmError::NoDevice)?;
            let is_foreign = qp.is_some_and(|qp| !qp.is_on(place.device));
            let port = if is_foreign { 1 } else { place.port };
            let local_port = LocalPort { port, ..place.local_port() };
            if self.is_datagram() {
                let qkey = *state.qkey.get_or_insert(UDP_QKEY);
                return Ok(ud_attr(to, &local_port, qkey, Psn::new(0))?);
            }
            (local_port, state.comm, state.options.ack_timeout)
        };
        let Some(comm) = comm else {
            return match to {
                QpState::Init => Ok(init_attr(&port)),
                _ => Err(CmError::Invalid("the id is not connected")),
            };
        };
        let mut params = self.gsi.with_cm(|cm, _, _| cm.qp_params(comm))?;
        // Before it is accepted.
        params.rq_psn.get_or_insert(self.psn);
        let (mut attr, mask) = params.attr(to, &port)?;
        if let (true, Some(code)) = (mask.contains(QpAttrMask::TIMEOUT), ack_timeout) {
            attr.timeout = code;
        }
        Ok((attr, mask))
    }

    /// The attached queue pair. No lock is held when it is moved.
    fn qp(&self) -> Option<Arc<QpCell>> {
        self.state.lock().qp.clone()
    }

    /// Brings the attached queue pair to RTS. `depths`: READs and atomics of the peer that it takes and that it may have
    /// outstanding, where that is not yet agreed on.
    pub(super) fn move_qp_to_rts(&self, depths: Option<(u8, u8)>) -> Result<(), CmError> {
        let Some(qp) = self.qp() else { return Ok(()) };
        for to in [QpState::Init, QpState::Rtr, QpState::Rts] {
            let (mut attr, mask) = self.qp_attr(to, Some(&qp))?;
            if let Some((taken, outstanding)) = depths {
                (attr.max_dest_rd_atomic, attr.max_rd_atomic) = (taken, outstanding);
            }
            modify(&qp, &attr, mask)?;
        }
        Ok(())
    }

    /// Moves the attached queue pair to ERR, so that it carries nothing more.
    pub(super) fn move_qp_to_err(&self) {
        let Some(qp) = self.qp() else { return };
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        // It may be gone.
        let _ = modify(&qp, &attr, QpAttrMask::STATE);
    }
}

fn modify(qp: &Arc<QpCell>, attr: &QpAttr, mask: QpAttrMask) -> Result<(), CmError> {
    qp.modify(attr, mask).map_err(|error| {
        tracing::debug!(qpn = %qp.qpn, to = ?attr.state, "queue pair not moved: {error}");
        CmError::System { what: "move the queue pair", errno: error.errno() }
    })
}

impl Id {
    /// The attributes for the queue pair (`rdma_init_qp_attr(3)`): for INIT, RTR or RTS.
    ///
    /// # Errors
    /// [`CmError::Invalid`] for another state, or where the id has not come so far.
    pub fn init_qp_attr(&self, to: QpState) -> Result<(QpAttr, QpAttrMask), CmError> {
        self.0.check_current()?;
        self.0.qp_attr(to, None)
    }

    /// The id moves this queue pair from here on; it is brought to INIT, a UD one to RTS (`rdma_create_qp(3)`).
    ///
    /// # Errors
    /// [`CmError::Invalid`] where there is one already, or no device yet; why the queue pair cannot be moved.
    pub fn attach_qp(&self, qp: &Qp) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        if id.state.lock().qp.is_some() {
            return Err(CmError::Invalid("a queue pair is attached"));
        }
        if qp.0.qp_type != id.qp_type {
            return Err(CmError::Invalid("queue pair of another type"));
        }
        let steps: &[QpState] = if id.is_datagram() {
            &[QpState::Init, QpState::Rtr, QpState::Rts]
        } else {
            &[QpState::Init]
        };
        for to in steps {
            let (attr, mask) = id.qp_attr(*to, Some(&qp.0))?;
            modify(&qp.0, &attr, mask)?;
        }
        let mut state = id.state.lock();
        if state.qp.is_some() || state.phase == Phase::Destroyed {
            return Err(CmError::Invalid("a queue pair is attached"));
        }
        state.qp = Some(Arc::clone(&qp.0));
        Ok(())
    }

    /// The queue pair is the program's own again (`rdma_destroy_qp(3)`).
    pub fn detach_qp(&self) {
        if self.0.gsi.core().is_current() {
            let qp = self.0.state.lock().qp.take();
            drop(qp);
        }
    }
}

//! Multicast groups of an id.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_objects::ah::AhAttr;
use anyverbs_objects::error::AttachError;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_transport::multicast;
use anyverbs_transport::qp::QpCell;

use super::address::Address;
use super::connect::UDP_QKEY;
use super::error::CmError;
use super::event::{EventKind, EventParam, Pending, UdEvent};
use super::id::{Group, Id, IdCell, Phase};
use super::local_address::HOP_LIMIT;
use super::params::Join;

/// The queue pair's attachment to a group needs no LID on RoCE.
const LID: u16 = 0;

fn refused(error: &AttachError) -> CmError {
    CmError::System { what: "join the group", errno: error.errno() }
}

impl IdCell {
    /// The program is about to hear that it has joined: the attached queue pair gets the group's datagrams. `None` if the id
    /// has left again.
    pub(super) fn joined(&self, serial: u64) -> Option<Result<(), CmError>> {
        loop {
            let (gid, qp) = self.to_attach(serial)?;
            let Some(qp) = qp else { return Some(Ok(())) };
            // The id may leave or give up its queue pair meanwhile.
            let is_wanted = || {
                let now = self.to_attach(serial).and_then(|(_, qp)| qp);
                now.is_some_and(|now| Arc::ptr_eq(&now, &qp))
            };
            match self.gsi.transport.groups.attach_if(&qp, gid, LID, is_wanted) {
                Ok(true) => return Some(Ok(())),
                Ok(false) => {}
                Err(error) => return Some(Err(refused(&error))),
            }
        }
    }

    /// The group of a join, and the queue pair that is to hear it.
    fn to_attach(&self, serial: u64) -> Option<(Gid, Option<Arc<QpCell>>)> {
        let state = self.state.lock();
        let group = state.groups.iter().find(|group| group.serial == serial)?;
        Some((group.gid, state.qp.clone().filter(|_| group.membership.is_some())))
    }
}

impl Id {
    /// `rdma_join_multicast_ex(3)`: an event tells the outcome, and an attached queue pair is in the group by then.
    ///
    /// # Errors
    /// [`CmError::Invalid`] for an id that is not for datagrams, has no device, or asks for a queue pair already, and
    /// for an address that is no group's; also the reason why the group cannot be joined.
    pub fn join(&self, join: &Join) -> Result<(), CmError> {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let id = &self.0;
        id.check_current()?;
        let gid = join.group.gid();
        let state = id.state.lock();
        let place = state
            .place
            .filter(|_| id.is_datagram())
            .filter(|_| matches!(state.phase, Phase::Bound | Phase::AddrResolved))
            .ok_or(state.phase.refuses())?;
        drop(state);
        if !gid.is_multicast() {
            return Err(CmError::Invalid("not the address of a group"));
        }
        let membership = if join.send_only {
            None
        } else {
            let joined = multicast::join(id.gsi.transport.links, gid, place.interface);
            Some(joined.map_err(|error| refused(&error))?)
        };
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let mut state = id.state.lock();
        if state.phase == Phase::Destroyed {
            return Err(CmError::Invalid("it was destroyed"));
        }
        let qkey = *state.qkey.get_or_insert(UDP_QKEY);
        let ah = AhAttr {
            dgid: gid,
            sgid_index: place.index,
            hop_limit: HOP_LIMIT,
            traffic_class: state.options.tos.unwrap_or(0),
            is_global: true,
            port: place.port,
            ..AhAttr::default()
        };
        state.groups.push(Group { serial, address: join.group, gid, membership });
        drop(state);
        id.post(Pending {
            join_serial: serial,
            join_cookie: join.cookie,
            param: EventParam::Ud(UdEvent {
                private_data: Box::default(),
                ah,
                qpn: Qpn::MULTICAST,
                qkey,
            }),
            ..Pending::new(EventKind::MulticastJoin)
        });
        Ok(())
    }

    /// `rdma_leave_multicast(3)`: of joins of the same group the latest. Its event, if it was not read, is forgotten; an attached
    /// queue pair gets no more datagrams of the group unless it is joined once more.
    ///
    /// # Errors
    /// `EADDRNOTAVAIL` for a group that the id has not joined.
    pub fn leave(&self, group: &Address) -> Result<(), CmError> {
        let id = &self.0;
        id.check_current()?;
        let mut state = id.state.lock();
        let at = state.groups.iter().rposition(|joined| joined.address == *group);
        let Some(at) = at else {
            return Err(CmError::System { what: "leave the group", errno: libc::EADDRNOTAVAIL });
        };
        let left = state.groups.remove(at);
        let receives = |g: &Group| g.gid == left.gid && g.membership.is_some();
        let detach = receives(&left) && !state.groups.iter().any(receives);
        let qp = state.qp.clone().filter(|_| detach);
        drop(state);
        id.withdraw(|pending| pending.join_serial == left.serial);
        if let Some(qp) = qp {
            // It is not attached: the program never read the event of the join.
            let _ = id.gsi.transport.groups.detach(&qp, left.gid, LID);
        }
        Ok(())
    }
}

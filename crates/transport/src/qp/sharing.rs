//! The services that queue pairs ask of the room that shares XRC domains between processes.

use std::sync::Arc;

use anyverbs_objects::errno::Errno;
use anyverbs_proto::event::QpEvent;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask};
use anyverbs_proto::qp::{Arrival, Incoming};
use anyverbs_proto::types::Qpn;

use super::env::Call;
use super::{QpCell, State};

/// XRC domains that several processes have.
pub trait Sharing: Sync {
    /// Tells another process that has a target open of an event.
    fn tell_event(&self, slot: u8, target: Qpn, event: QpEvent);

    /// Asks a target's process for its attributes.
    ///
    /// # Errors
    /// Those of the question.
    fn query(&self, home: u8, target: Qpn) -> Result<QpAttr, Errno>;

    /// Has a target's process modify it.
    ///
    /// # Errors
    /// Those of the change.
    fn modify(
        &self,
        home: u8,
        target: Qpn,
        attr: &QpAttr,
        mask: QpAttrMask,
    ) -> Result<QpAttr, Errno>;

    /// The last handle that this process had of a target was destroyed.
    fn close(&self, cell: &Arc<QpCell>);

    /// A target was modified, or ends; its lock is held.
    fn modified(&self, cell: &QpCell, state: &mut State);

    /// Hands a request for a target to the process that has its responder, if that is not this one.
    fn is_elsewhere(
        &'static self,
        cell: &QpCell,
        state: &mut State,
        call: &mut Call<'_>,
        arrival: &Arrival,
        packet: &Incoming<'_>,
    ) -> bool;
}

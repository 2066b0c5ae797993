//! Work of an id before the program is handed its event, as librdmacm does it.

use std::sync::Arc;

use anyverbs_proto::cm::message::code::RejReason;

use super::channel::ChannelCell;
use super::event::{Event, EventKind, Pending};
use super::id::{Id, IdCell};

impl IdCell {
    /// The event as the program sees it; `None`: it is not for the program. Called without locks, by the thread that reads
    /// events.
    pub(super) fn hand_out(&self, pending: Pending, channel: &Arc<ChannelCell>) -> Option<Event> {
        let Pending { mut kind, mut status, new_id, param, join_cookie, join_serial, ece } =
            pending;
        let mut taken = None;
        match kind {
            EventKind::ConnectRequest => {
                let child = new_id?;
                child.change_channel(channel);
                let request = child.take()?;
                self.uptake.handed_out(&request.0.uptake, channel);
                taken = Some(request);
            }
            EventKind::ConnectResponse if self.state.lock().qp.is_some() => {
                match self.move_qp_to_rts(None).and_then(|()| self.confirm()) {
                    Ok(()) => kind = EventKind::Established,
                    Err(error) => {
                        tracing::debug!("the connection fails: {error}");
                        (kind, status) = (EventKind::ConnectError, -error.errno());
                        self.state.lock().connect_error = true;
                        self.move_qp_to_err();
                    }
                }
            }
            EventKind::Rejected | EventKind::Disconnected if self.state.lock().connect_error => {
                return None;
            }
            EventKind::Rejected => self.move_qp_to_err(),
            EventKind::MulticastJoin => {
                if let Err(error) = self.joined(join_serial)? {
                    tracing::debug!("the group is not joined: {error}");
                    (kind, status) = (EventKind::MulticastError, -error.errno());
                }
            }
            _ => {}
        }
        let cookie = self.cookie();
        Some(Event { kind, status, cookie, new_id: taken, param, join_cookie, ece })
    }

    /// The program takes a request: it no longer counts against the backlog. `None` where it cannot be served.
    fn take(self: Arc<Self>) -> Option<Id> {
        let id = Id(self);
        let cell = &id.0;
        let serves = cell.gsi.with_cm(|cm, _, now| {
            let mut state = cell.state.lock();
            let Some(comm) = state.comm else { return true };
            // The peer may have given up: an accept will tell.
            let _ = cm.take_request(comm);
            if let (Some(path), Ok(params)) = (&mut state.path, cm.qp_params(comm)) {
                // As the peer wants it.
                path.flow_label = params.flow_label;
                path.traffic_class = params.traffic_class;
                path.hop_limit = params.hop_limit;
                (path.sl, path.rate) = (params.sl, params.rate);
            }
            match (state.path, state.place) {
                (Some(path), Some(place)) if path.mtu > place.mtu => {
                    let _ = cm.reject(now, comm, RejReason::InvalidMtu, &[place.mtu as u8], &[]);
                    false
                }
                (_, place) => place.is_some(),
            }
        });
        serves.then_some(id)
    }
}

impl Id {
    /// The program does something with the id of a request: the listener's next one need not wait any longer in
    /// [`EventChannel::get_event_one_by_one`](super::EventChannel::get_event_one_by_one).
    #[doc(hidden)] // for programs in C: those in Rust get ids by `get_event`, which holds none back
    pub fn take_up(&self) {
        let uptake = &self.0.uptake;
        if !uptake.is_taken_up() && self.0.gsi.core().is_current() {
            uptake.take_up();
        }
    }
}

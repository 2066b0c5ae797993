//! Rules that would never do anything, since an earlier one does the same to all that they are about.

use std::mem::discriminant;

use crate::{CallAction, Fault, PacketAction, PacketKind, Place, Rule, Span, Which};

impl Rule {
    /// Tells what it does already to all that a later rule is about, so that the later one would never do anything. The first rule decides.
    #[must_use]
    pub fn hides(&self, place: &Place, fault: &Fault) -> Option<&'static str> {
        let is_hidden = self.has_place(place) && self.has_peer(place) && self.fault.hides(fault);
        is_hidden.then_some(match fault {
            Fault::Packets { action: PacketAction::Limit(_), .. } => "limits these packets",
            Fault::Packets { .. } => "does so to these packets",
            Fault::Work { receives: false, .. } => "decides about these sends",
            Fault::Work { receives: true, .. } => "decides about these receives",
            _ => "decides about these calls",
        })
    }

    fn has_place(&self, place: &Place) -> bool {
        match (&self.place.device, self.place.qp) {
            (None, None) => true,
            (device, None) => {
                *device == place.device
                    && (self.place.port.is_none() || self.place.port == place.port)
            }
            // Without a device a number counts the queue pairs of the process, and with one those of the device.
            (device, qp) => (device, qp, self.place.port) == (&place.device, place.qp, place.port),
        }
    }

    fn has_peer(&self, place: &Place) -> bool {
        self.place.peer.is_none() || self.place.peer == place.peer
    }
}

impl Fault {
    fn hides(&self, later: &Self) -> bool {
        match (self, later) {
            (
                Self::Packets { action, received, kind, which, span },
                Self::Packets {
                    action: later_action,
                    received: later_received,
                    kind: later_kind,
                    span: later_span,
                    ..
                },
            ) => {
                // Where packets wait in another line, the time counts as well.
                let has_time = match action {
                    PacketAction::Limit(_) => has_time(span, later_span),
                    _ => *span == Span::default(),
                };
                discriminant(action) == discriminant(later_action)
                    && received == later_received
                    && has_kind(*kind, *later_kind)
                    && is_each(*which)
                    && has_time
            }
            (
                Self::Work { receives, which, span, .. },
                Self::Work { receives: later_receives, .. },
            ) => receives == later_receives && is_each(*which) && *span == Span::default(),
            (
                Self::Call { call, site: None, which, action: CallAction::Fails(_), span },
                Self::Call { call: later_call, .. },
            ) => call == later_call && is_each(*which) && *span == Span::default(),
            _ => false,
        }
    }
}

/// Whether it is each thing.
fn is_each(which: Which) -> bool {
    matches!(which, Which::All | Which::Chance(1_000_000..))
}

fn has_kind(kind: Option<PacketKind>, later: Option<PacketKind>) -> bool {
    match (kind, later) {
        (None, _) => true,
        (Some(kind), Some(later)) => kind.covers(later),
        (Some(_), None) => false,
    }
}

/// Whether the time of one begins no later than that of another, and ends no earlier.
fn has_time(span: &Span, later: &Span) -> bool {
    let end = |span: &Span| span.lasts.map(|lasts| span.after.saturating_add(lasts));
    span.after <= later.after
        && end(span).is_none_or(|end_of_it| end(later).is_some_and(|end| end <= end_of_it))
}

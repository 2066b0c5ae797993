//! Rules that would never do anything, since an earlier one does the same to all that they are about.

use std::mem::discriminant;
use std::time::Duration;

use crate::{CallAction, Fault, PacketAction, PacketKind, Place, Rule, Span, Which};

impl Rule {
    /// Tells what it does already to all that a later rule is about, which begins at this age of this one, so that the later one would
    /// never do anything. The first rule decides. One that is over decides nothing.
    #[must_use]
    pub fn hides(&self, age: Duration, place: &Place, fault: &Fault) -> Option<&'static str> {
        let is_hidden = !self.is_over(age)
            && self.has_place(place)
            && self.has_peer(place)
            && self.fault.hides(age, fault);
        is_hidden.then_some(match fault {
            Fault::Packets { action: PacketAction::Limit(_), .. } => "limits these packets",
            Fault::Packets { .. } => "does so to these packets",
            Fault::Work { receives: false, .. } => "decides about these sends",
            Fault::Work { receives: true, .. } => "decides about these receives",
            _ => "decides about these calls",
        })
    }

    /// The same for numbers, of a later rule of the same script: both count the same things, and the first rule decides about each.
    #[must_use]
    pub(crate) fn repeats(&self, place: &Place, fault: &Fault) -> Option<&'static str> {
        let is_same = self.has_place(place) && self.place.peer == place.peer;
        (is_same && self.fault.counts_as(fault)).then_some(match fault {
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
    fn hides(&self, age: Duration, later: &Self) -> bool {
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
                    PacketAction::Limit(_) => has_time(&span.rest(age), later_span),
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

impl Fault {
    /// Whether it counts as a later one does, at all times, and chooses all that the later one chooses.
    fn counts_as(&self, later: &Self) -> bool {
        match (self, later) {
            (
                Self::Packets { action, received, kind, which, span },
                Self::Packets {
                    action: later_action,
                    received: later_received,
                    kind: later_kind,
                    which: later_which,
                    span: later_span,
                },
            ) => {
                discriminant(action) == discriminant(later_action)
                    && (received, kind) == (later_received, later_kind)
                    && has_numbers(*which, *later_which)
                    && [*span, *later_span] == [Span::default(); 2]
            }
            (
                Self::Work { receives, which, span, .. },
                Self::Work {
                    receives: later_receives, which: later_which, span: later_span, ..
                },
            ) => {
                receives == later_receives
                    && has_numbers(*which, *later_which)
                    && [*span, *later_span] == [Span::default(); 2]
            }
            (
                Self::Call { call, site: None, which, action: CallAction::Fails(_), span },
                Self::Call {
                    call: later_call,
                    site: None,
                    which: later_which,
                    span: later_span,
                    ..
                },
            ) => {
                call == later_call
                    && has_numbers(*which, *later_which)
                    && [*span, *later_span] == [Span::default(); 2]
            }
            _ => false,
        }
    }
}

/// Whether the numbers of a later rule are among those of an earlier one.
fn has_numbers(which: Which, later: Which) -> bool {
    match (which, later) {
        (Which::Numbers(first, last), Which::Numbers(later_first, later_last)) => {
            first <= later_first && later_last <= last
        }
        _ => false,
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

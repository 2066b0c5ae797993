//! Counters of the CM: per message as in the kernel's `cm_tx_msgs`, `cm_tx_retries`, `cm_rx_msgs` and `cm_rx_duplicates`.

use super::mad::Malformed;
use super::message::Attribute;

/// The reason why a MAD was dropped without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(usize)]
pub enum DropReason {
    /// No MAD of the CM.
    Malformed,
    /// The source or destination address cannot be a port's.
    Address,
    /// It is not from the connection's peer, or not for this connection.
    Foreign,
    /// Names nothing that we know, and wants no answer.
    Unknown,
    /// Means nothing in the connection's state.
    State,
    /// The listener's backlog is full; the peer will ask again.
    Backlog,
    /// Too many answers wait already.
    OutboxFull,
}

impl DropReason {
    /// All, in the order of their declaration.
    pub const ALL: &'static [Self] = &[
        Self::Malformed,
        Self::Address,
        Self::Foreign,
        Self::Unknown,
        Self::State,
        Self::Backlog,
        Self::OutboxFull,
    ];

    /// Name of the counter.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "cm_drop_malformed",
            Self::Address => "cm_drop_address",
            Self::Foreign => "cm_drop_foreign",
            Self::Unknown => "cm_drop_unknown_id",
            Self::State => "cm_drop_state",
            Self::Backlog => "cm_drop_backlog",
            Self::OutboxFull => "cm_drop_outbox_full",
        }
    }
}

impl From<Malformed> for DropReason {
    fn from(_: Malformed) -> Self {
        Self::Malformed
    }
}

/// One number for each message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PerMessage([u64; Attribute::ALL.len()]);

impl PerMessage {
    pub(super) fn add(&mut self, attribute: Attribute) {
        self.0[attribute as usize - Attribute::Req as usize] += 1;
    }

    /// The number for this message.
    #[must_use]
    pub const fn of(&self, attribute: Attribute) -> u64 {
        self.0[attribute as usize - Attribute::Req as usize]
    }
}

/// The counters of one [`super::Cm`], never reset.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CmCounters {
    /// Sent, repeated ones included.
    pub tx_msgs: PerMessage,
    /// Repeated because no answer came.
    pub tx_retries: PerMessage,
    /// Received.
    pub rx_msgs: PerMessage,
    /// Received again.
    pub rx_duplicates: PerMessage,
    drops: [u64; DropReason::ALL.len()],
}

impl CmCounters {
    pub(super) fn drop(&mut self, reason: DropReason) {
        self.drops[reason as usize] += 1;
    }

    /// The number of MADs dropped for this reason.
    #[must_use]
    pub const fn dropped(&self, reason: DropReason) -> u64 {
        self.drops[reason as usize]
    }
}

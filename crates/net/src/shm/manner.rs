//! Each process tells its peers whether it does anything to single packets.

/// The way in which a process treats packets. A process that has not told it yet counts as the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Manner {
    /// It may lose packets on purpose, those that it reads or those that it writes. Its peers' reliable queue pairs then send again
    /// after a short silence.
    pub loses: bool,
    /// It does nothing to single packets. So a packet may stand for many, and bring an ACK.
    pub takes_long: bool,
}

impl Manner {
    /// As a word of shared memory. A bit that is unknown means nothing.
    pub(super) fn word(self) -> u64 {
        u64::from(self.loses) | u64::from(self.takes_long) << 1
    }

    pub(super) fn of(word: u64) -> Self {
        Self { loses: word & 1 != 0, takes_long: word & 2 != 0 }
    }
}

//! The packets that were on the wire.

use std::collections::VecDeque;
use std::collections::vec_deque::Iter;
use std::fmt;

use anyverbs_proto::time::Time;
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::wire::packet::Headers;

use crate::DeviceId;

/// A packet at the moment when it was sent.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    /// When.
    pub at: Time,
    /// Sender.
    pub from: DeviceId,
    /// Receiver; none if no device has the address.
    pub to: Option<DeviceId>,
    /// Its headers.
    pub headers: Headers,
    /// Bytes of its payload.
    pub payload_len: usize,
    /// Its fate; empty for "it arrives".
    pub fate: &'static str,
}

impl Record {
    /// The operation of the packet.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.headers.bth.opcode.operation
    }
}

impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12.3} us  {} > ", self.at.as_nanos() as f64 / 1e3, self.from)?;
        match self.to {
            Some(to) => write!(f, "{to}")?,
            None => f.write_str("nobody")?,
        }
        write!(f, "  {} len {}", self.headers, self.payload_len)?;
        if !self.fate.is_empty() {
            write!(f, "  [{}]", self.fate)?;
        }
        Ok(())
    }
}

/// The packets of a run, in the order of sending.
#[derive(Debug, Default)]
pub struct Trace {
    records: VecDeque<Record>,
    /// Only the last ones are kept, as many as are printed.
    is_short: bool,
    sent: usize,
    lost: usize,
}

impl Trace {
    /// Lines that a failing test prints.
    const PRINTED: usize = 200;

    /// From now on keeps only what is printed. A long run sends more packets than the memory holds.
    pub fn keep_the_last(&mut self) {
        self.is_short = true;
    }

    pub(crate) fn push(&mut self, record: Record) {
        self.sent += 1;
        let arrives = ["", "twice", "mutated", "marked", "delayed", "replaced", "by a lane"];
        self.lost += usize::from(!arrives.contains(&record.fate));
        if self.is_short && self.records.len() >= Self::PRINTED {
            self.records.pop_front();
        }
        self.records.push_back(record);
    }

    /// The records.
    pub fn iter(&self) -> Iter<'_, Record> {
        self.records.iter()
    }

    /// All packets that were sent, and those of them that were lost.
    #[must_use]
    pub fn counts(&self) -> (usize, usize) {
        (self.sent, self.lost)
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        *self = Self { is_short: self.is_short, ..Self::default() };
    }

    /// The number of packets with this operation that `from` sent.
    #[must_use]
    pub fn count(&self, from: DeviceId, operation: Operation) -> usize {
        self.iter().filter(|r| r.from == from && r.operation() == operation).count()
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let printed = self.records.len().min(Self::PRINTED);
        let skipped = self.sent - printed;
        if skipped > 0 {
            writeln!(f, "({skipped} packets before)")?;
        }
        self.iter()
            .skip(self.records.len() - printed)
            .try_for_each(|record| writeln!(f, "{record}"))
    }
}

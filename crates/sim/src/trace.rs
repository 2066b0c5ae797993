//! The packets that were on the wire.

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

/// All packets of a run, in the order of sending.
#[derive(Debug, Default)]
pub struct Trace(Vec<Record>);

impl Trace {
    /// Lines that a failing test prints.
    const PRINTED: usize = 200;

    pub(crate) fn push(&mut self, record: Record) {
        self.0.push(record);
    }

    /// The records.
    pub fn iter(&self) -> std::slice::Iter<'_, Record> {
        self.0.iter()
    }

    /// Forgets all packets.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// The number of packets with this operation that `from` sent.
    #[must_use]
    pub fn count(&self, from: DeviceId, operation: Operation) -> usize {
        self.iter().filter(|r| r.from == from && r.operation() == operation).count()
    }
}

impl fmt::Display for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let skipped = self.0.len().saturating_sub(Self::PRINTED);
        if skipped > 0 {
            writeln!(f, "({skipped} packets before)")?;
        }
        self.0[skipped..].iter().try_for_each(|record| writeln!(f, "{record}"))
    }
}

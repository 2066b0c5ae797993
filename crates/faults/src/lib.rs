//! Faults by script: the language, its explanation, and the choice of what happens when. No I/O.
//!
//! `docs/recipes/faults.md` describes the language for its users.
#![forbid(unsafe_code)]

mod chance;
mod explain;
mod fired;
mod hidden;
mod names;
mod opcode;
mod parse;
mod site;
#[cfg(test)]
mod tests;
mod words;

use std::net::IpAddr;
use std::time::Duration;

pub use chance::Dice;
pub use fired::Fired;
pub use names::{CALLS, Errno, PortEvent, Status};
pub use opcode::Opcode;
pub use parse::ScriptError;
pub use site::{Running, Site};

/// A script: rules, each a line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Script {
    /// The number with which random choices begin, if the script has one.
    pub seed: Option<u64>,
    /// The rules, in their order.
    pub rules: Vec<Rule>,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Its line, from 1.
    pub line: u32,
    /// Its number among the rules of its line, from 1, if there are several.
    pub of_line: Option<u32>,
    /// Its words, as they stand there.
    pub text: String,
    /// It was added while the process ran.
    pub added: bool,
    /// Where it holds.
    pub place: Place,
    /// The fault.
    pub fault: Fault,
    /// Whether it has ever done something.
    pub fired: Fired,
}

/// The place where a rule holds. Without any part it is the whole process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// The name of a device.
    pub device: Option<String>,
    /// One of its ports, from 1.
    pub port: Option<u8>,
    /// A queue pair.
    pub qp: Option<QpName>,
    /// The address at the other end of the packets, as GIDs have it.
    pub peer: Option<IpAddr>,
}

/// The name of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpName {
    /// Its place in the order in which they are made, from 1. If a device is named, its own are counted.
    Nth(u64),
    /// Its number, which the log shows, and its peer names.
    Number(u32),
}

/// A fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// To packets of a queue pair.
    Packets {
        /// Their fate.
        action: PacketAction,
        /// The rule is about packets that the queue pair receives, and not about those that it sends.
        received: bool,
        /// Those of one kind.
        kind: Option<PacketKind>,
        /// Which of these.
        which: Which,
        /// When.
        span: Span,
    },
    /// To work requests of a queue pair.
    Work {
        /// Their fate.
        action: WorkAction,
        /// Receives, and not sends.
        receives: bool,
        /// Which of these.
        which: Which,
        /// When a send is posted, or a receive completes.
        span: Span,
    },
    /// A call fails, or the process does as it makes it.
    Call {
        /// Its name, one of [`CALLS`].
        call: &'static str,
        /// Those from here.
        site: Option<Site>,
        /// Which of these calls.
        which: Which,
        /// Their fate.
        action: CallAction,
        /// When.
        span: Span,
    },
    /// Registered memory vanishes: a device cannot reach it.
    Memory {
        /// Which pages of a region, from the one with its first byte.
        pages: Which,
        /// Which regions, in the order in which they are made.
        regions: Which,
        /// When.
        span: Span,
    },
    /// The process ends or stands still, after this time.
    Process(ProcessAction, Duration),
    /// Ports are down.
    Down(Span),
    /// Ports have not the address at a place of their GID tables.
    Gid(usize, Span),
    /// Ports have an event, after this time.
    Event(PortEvent, Duration),
    /// Devices fail for good, after this time.
    Fatal(Duration),
    /// As [`Fatal`](Self::Fatal), and the process does not list them any more.
    Removed(Duration),
    /// Queue pairs go to a state of failure, after this time.
    Fails(QpFailure, Duration),
}

/// The fate of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketAction {
    /// It is lost.
    Drop,
    /// It is there twice.
    Duplicate,
    /// It changes places with the next one.
    Reorder,
    /// The check of its bytes fails where it arrives.
    Corrupt,
    /// It leaves later, by a time between these.
    Delay(Duration, Duration),
    /// It has the mark of a network that is congested (ECN, RFC 3168) when it arrives.
    Mark,
    /// If it asks for a receive, it finds none, and its sender is told to try again (RNR NAK).
    NotReady,
    /// It leaves when those before it have, at a rate.
    Limit(Limit),
}

/// The most packets of a queue pair that wait, as many as in a queue of Linux's netem.
pub const MOST_WAITING: u64 = 1000;

/// The rate of a network, and its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Bits in a second.
    pub rate: u64,
    /// So many packets of those that share the rate wait. Another one is lost.
    pub queue: Option<u64>,
}

impl Fault {
    /// Whether queue pairs go to SQE by it.
    #[must_use]
    pub fn is_sqe(&self) -> bool {
        matches!(self, Self::Fails(QpFailure::Sqe, _))
    }

    /// Whether packets are lost by it that their sender can send again with success: the silence of the peer is no reason to wait for long.
    #[must_use]
    pub fn loses_packets(&self) -> bool {
        use PacketAction as A;
        match self {
            Self::Packets { action, .. } => {
                matches!(action, A::Drop | A::Corrupt | A::Limit(Limit { queue: Some(_), .. }))
            }
            Self::Down(_) | Self::Gid(..) => true,
            _ => false,
        }
    }

    /// The state to which a queue pair goes that fails by it, for the log.
    #[must_use]
    pub fn state(&self) -> &'static str {
        if self.is_sqe() { "SQE" } else { "the error state" }
    }
}

impl Limit {
    /// The time that so many bytes take.
    #[must_use]
    pub fn time(&self, bytes: usize) -> Duration {
        let nanos = u128::from(bytes as u64) * 8 * 1_000_000_000 / u128::from(self.rate.max(1));
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    }
}

/// The state of a queue pair that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QpFailure {
    /// The error state.
    Err,
    /// Sends alone have failed. Unreliable queue pairs have this state.
    Sqe,
}

/// The fate of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallAction {
    /// It does nothing, and the program sees this error number.
    Fails(Errno),
    /// The process ends or stands still before it does anything.
    Process(ProcessAction),
}

/// The fate of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessAction {
    /// It is killed.
    Dies,
    /// It is stopped, for this time.
    Pauses(Duration),
}

/// A kind of packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PacketKind {
    /// Any request.
    Request,
    /// A part of a SEND.
    Send,
    /// A part of an RDMA WRITE.
    Write,
    /// The request of an RDMA READ.
    Read,
    /// The request of an atomic operation.
    Atomic,
    /// A part of the answer to a READ or an atomic operation.
    Response,
    /// An ACK or a NAK.
    Ack,
    /// One with this opcode.
    Single(Opcode),
}

impl PacketKind {
    /// Whether each packet of another kind is of this one as well.
    fn covers(self, other: Self) -> bool {
        use PacketKind as Of;
        let is_request =
            |kind| matches!(kind, Of::Request | Of::Send | Of::Write | Of::Read | Of::Atomic);
        match (self, other) {
            (Of::Request, Of::Single(opcode)) => opcode.kind().is_some_and(is_request),
            (kind, Of::Single(opcode)) if opcode.kind() == Some(kind) => true,
            (Of::Request, kind) => is_request(kind),
            _ => self == other,
        }
    }
}

/// The fate of a work request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkAction {
    /// It never completes.
    Never,
    /// It completes later, by this time.
    Late(Duration),
    /// It is not done and completes with this status, later by this time.
    Fails(Status, Duration),
}

/// Which of the things that a rule counts. They are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// Each.
    All,
    /// From the first of these numbers to the last.
    Numbers(u64, u64),
    /// Each with this chance, in parts of a million.
    Chance(u32),
}

/// A time in the life of the process's device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Span {
    /// It begins so long after the device was opened.
    pub after: Duration,
    /// It lasts so long; for good if absent.
    pub lasts: Option<Duration>,
}

impl Span {
    /// Whether it has begun and not ended at this age of the device.
    #[must_use]
    pub fn has(&self, age: Duration) -> bool {
        age >= self.after && !self.is_over(age)
    }

    /// The rest of the time at this age, counted from there. The time is not over.
    fn rest(&self, age: Duration) -> Self {
        let begun = age.saturating_sub(self.after);
        let lasts = self.lasts.map(|lasts| lasts.saturating_sub(begun));
        Self { after: self.after.saturating_sub(age), lasts }
    }

    fn is_over(&self, age: Duration) -> bool {
        self.lasts.is_some_and(|lasts| age >= self.after.saturating_add(lasts))
    }
}

impl Place {
    /// Why it cannot be where there are these ports, each of a device and with its number there.
    #[must_use]
    pub fn lacks<'a, I: Iterator<Item = (&'a str, u8)>>(
        &self,
        ports: impl Fn() -> I,
    ) -> Option<String> {
        let name = self.device.as_deref()?;
        let count = ports().filter(|(device, _)| *device == name).count();
        if count == 0 {
            let known = ports().filter(|(_, port)| *port == 1).map(|(device, _)| device);
            let known: Vec<_> = known.collect();
            return Some(format!("there is no device {name:?}, but {}", known.join(", ")));
        }
        let port = self.port.filter(|port| usize::from(*port) > count)?;
        Some(format!("{name:?} has no port {port}, but port 1 alone"))
    }

    /// Whether it has this port of a device of that name.
    #[must_use]
    pub fn has(&self, device: &str, port: u8) -> bool {
        self.device.as_ref().is_none_or(|name| name == device)
            && self.port.is_none_or(|wanted| wanted == port)
    }
}

impl Rule {
    /// When its time begins, if it has one.
    #[must_use]
    pub fn begins(&self) -> Duration {
        match self.fault {
            Fault::Packets { span, .. }
            | Fault::Work { span, .. }
            | Fault::Call { span, .. }
            | Fault::Memory { span, .. }
            | Fault::Gid(_, span)
            | Fault::Down(span) => span.after,
            Fault::Fails(_, after)
            | Fault::Event(_, after)
            | Fault::Process(_, after)
            | Fault::Removed(after)
            | Fault::Fatal(after) => after,
        }
    }

    /// Its place in its line, behind the number of that. Empty if it is alone there.
    pub(crate) fn part(&self) -> String {
        self.of_line.map_or(String::new(), |n| format!(", rule {n}"))
    }

    /// Its place, for the log.
    #[must_use]
    pub fn named(&self) -> String {
        match self.added {
            true => format!("added rule: {}", self.text),
            false => format!("line {} of the script{}", self.line, self.part()),
        }
    }

    /// Whether it has done all that it will do, by the clock: at this age of the rule. What it counts, queue pairs count.
    #[must_use]
    pub fn is_over(&self, age: Duration) -> bool {
        match self.fault {
            Fault::Packets { span, .. }
            | Fault::Work { span, .. }
            | Fault::Call { span, .. }
            | Fault::Memory { span, .. }
            | Fault::Gid(_, span)
            | Fault::Down(span) => span.is_over(age),
            // The queue pair that it names may come later.
            Fault::Fails(..) if self.place.qp.is_some() => false,
            Fault::Fails(_, after)
            | Fault::Event(_, after)
            | Fault::Process(ProcessAction::Pauses(_), after) => age >= after,
            // A device that has failed stays so.
            Fault::Fatal(_) | Fault::Removed(_) | Fault::Process(ProcessAction::Dies, _) => false,
        }
    }

    /// Whether the rule is about queue pairs, and what they send, receive and do.
    #[must_use]
    pub fn is_of_queue_pairs(&self) -> bool {
        matches!(self.fault, Fault::Packets { .. } | Fault::Work { .. } | Fault::Fails(..))
    }

    /// Whether the rule is about what queue pairs, ports and devices do, and not about calls alone.
    #[must_use]
    pub fn is_of_device(&self) -> bool {
        !matches!(self.fault, Fault::Call { .. })
    }
}

impl Script {
    /// Whether any rule is [of a device](Rule::is_of_device). A script of a seed alone waits for some that are. The log names the script when
    /// the first thing begins that it is about.
    #[must_use]
    pub fn is_of_device(&self) -> bool {
        self.rules.is_empty() || self.rules.iter().any(Rule::is_of_device)
    }
}

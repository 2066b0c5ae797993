//! The target of an extended reliable connection at work in more than one place.
//!
//! A request names an SRQ, and is executed in the process of that SRQ, which has its memory and its receives. So a
//! target of a domain that several devices share lends its responder to that process between two messages. The answers
//! leave from there. Only one process has the responder at a time, so one machine judges PSNs, duplicates and errors.

use crate::types::Psn;

use super::super::attr::{QpAttr, QpInit, QpState, QpType};
use super::super::{Incoming, Qp};
use super::Inbound;
use super::answers::{Answer, AnswerKind};
use crate::env::Env;
use crate::wire::opcode::Operation;

/// Requests of a device to the responder here, for an SRQ of that device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lending {
    /// It is answered here. It is not the next one, or interrupts a message, or the queue pair does not receive.
    Stays,
    /// Answers to earlier requests still have to be sent. The request will come again.
    Later,
    /// It is executed in the process of its SRQ.
    Goes,
}

/// A responder between two messages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// State of the queue pair: RTR, RTS, SQD or ERR.
    pub state: QpState,
    /// `COMM_EST` was raised.
    pub established: bool,
    /// The PSN that comes next.
    pub expected: Psn,
    /// Messages that were completed, 24 bits.
    pub msn: u32,
    /// A NAK went out.
    pub nak_sent: bool,
    /// Answers that the peer may ask for again, oldest first.
    pub answers: Vec<Remembered>,
}

/// An answer that a responder remembers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// PSN of its first packet.
    pub psn: Psn,
    /// The MSN in it.
    pub msn: u32,
    /// Its contents.
    pub kind: RememberedKind,
}

/// The contents of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RememberedKind {
    /// Memory of the protection domain of an SRQ.
    Read {
        /// The address.
        va: u64,
        /// Key of the region.
        rkey: u32,
        /// Bytes.
        len: u32,
        /// The SRQ.
        srqn: u32,
    },
    /// The value before an atomic.
    Atomic {
        /// The value.
        original: u64,
    },
    /// The operation is done.
    Placed,
}

/// The protection domain of no region.
const NO_PD: u32 = u32::MAX;

impl Qp {
    /// Decides where a request of the peer for an SRQ of another device is executed. Sends owed answers before the
    /// responder goes.
    pub fn lending<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Lending {
        if !self.attr.state.receives() || self.init.qp_type != QpType::XrcRecv {
            return Lending::Stays;
        }
        let bth = &packet.headers.bth;
        let again = bth.opcode.operation == Operation::ReadRequest;
        let due = match bth.psn.since(self.responder.expected) {
            0 => true,
            1.. => false,
            _ => again,
        };
        let responder = &self.responder;
        if !due || responder.recv_taken || responder.inbound != Inbound::None {
            return Lending::Stays;
        }
        self.transmit(env);
        self.send_owed_ack(env);
        if self.responder.answers.are_pending() { Lending::Later } else { Lending::Goes }
    }

    /// The responder, if it is between two messages and owes no answers.
    #[must_use]
    pub fn lease(&self) -> Option<Lease> {
        let responder = &self.responder;
        let between = !responder.recv_taken
            && responder.inbound == Inbound::None
            && !responder.answers.are_pending();
        between.then(|| Lease {
            state: self.attr.state,
            established: self.responder.established,
            expected: responder.expected,
            msn: responder.msn(),
            nak_sent: responder.nak_sent,
            answers: responder.answers.remembered().map(Remembered::of).collect(),
        })
    }

    /// Tells whether a message is half received.
    #[must_use]
    pub fn is_within_message(&self) -> bool {
        self.responder.recv_taken || self.responder.inbound != Inbound::None
    }

    /// A target elsewhere, here for as long as its responder is.
    #[must_use]
    pub fn borrowed(
        qpn: crate::types::Qpn,
        attr: &QpAttr,
        lease: &Lease,
        pd_of: impl Fn(u32) -> Option<u32>,
    ) -> Self {
        let init = QpInit {
            qp_type: QpType::XrcRecv,
            cap: super::super::attr::QpCap::default(),
            sq_sig_all: false,
            srq: true,
            pd: NO_PD,
        };
        let mut qp = Self::new(qpn, &init);
        qp.attr = *attr;
        qp.start_responder(lease.expected);
        qp.resume(lease, pd_of);
        qp
    }

    /// The attributes of a borrowed target have changed, in its own process.
    pub fn follow_attr(&mut self, attr: &QpAttr) {
        // The process still has to hear of a failure here, and the MTU is that of the remembered answers.
        let (state, path_mtu) = (self.attr.state, self.attr.path_mtu);
        self.attr = QpAttr { path_mtu, ..*attr };
        if state == QpState::Err {
            self.attr.state = state;
        }
    }

    /// Goes on where a responder has come to. `pd_of` gives the protection domain of an SRQ of this device.
    pub fn resume(&mut self, lease: &Lease, pd_of: impl Fn(u32) -> Option<u32>) {
        if lease.state == QpState::Err {
            self.attr.state = QpState::Err;
        }
        self.responder.established = lease.established;
        self.advance(lease.expected, lease.msn);
        self.responder.nak_sent = lease.nak_sent;
        let mtu = self.mtu();
        let answers = lease.answers.iter().map(|remembered| remembered.answer(mtu, &pd_of));
        self.responder.answers.remember(answers);
    }

    /// As [`resume`](Self::resume), where nothing is left of the responder but how far it had come.
    pub fn advance(&mut self, expected: Psn, msn: u32) {
        let responder = &mut self.responder;
        (responder.expected, responder.executed) = (expected, (msn & 0xff_ffff).into());
        (responder.inbound, responder.recv_taken) = (Inbound::None, false);
        (responder.nak_sent, responder.acks.owed, responder.acks.held) = (false, false, None);
        responder.acks.bytes = 0;
        self.drop_pending_answers();
    }

    /// The responder's position: the PSN that comes next, and the MSN.
    #[must_use]
    pub fn progress(&self) -> (Psn, u32) {
        (self.responder.expected, self.responder.msn())
    }
}

impl Remembered {
    fn of(answer: &Answer) -> Self {
        let &Answer { psn, msn, kind, .. } = answer;
        let kind = match kind {
            AnswerKind::Read { va, rkey, len, srqn, .. } => {
                RememberedKind::Read { va, rkey, len, srqn }
            }
            AnswerKind::Atomic { original } => RememberedKind::Atomic { original },
            AnswerKind::Placed => RememberedKind::Placed,
        };
        Self { psn, msn, kind }
    }

    fn answer(&self, mtu: u32, pd_of: impl Fn(u32) -> Option<u32>) -> Answer {
        let &Self { psn, msn, kind } = self;
        let packets = match kind {
            RememberedKind::Read { len, .. } => len.div_ceil(mtu).max(1),
            _ => 1,
        };
        let kind = match kind {
            RememberedKind::Read { va, rkey, len, srqn } => {
                // Memory of another device is not answered from here.
                let pd = pd_of(srqn).unwrap_or(NO_PD);
                AnswerKind::Read { va, rkey, len, pd, srqn }
            }
            RememberedKind::Atomic { original } => AnswerKind::Atomic { original },
            RememberedKind::Placed => AnswerKind::Placed,
        };
        Answer { psn, packets, msn, kind }
    }
}

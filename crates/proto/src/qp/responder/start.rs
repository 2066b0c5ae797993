//! How a responder begins and is forgotten.

use crate::types::Psn;
use crate::wire::aeth::{NakCode, Syndrome};

use super::super::attr::{QpState, QpType};
use super::super::{Incoming, Qp};
use super::answers::Answers;
use super::{Acks, Responder};

impl Qp {
    /// Notes a request that was dropped. If the queue pair moves to RTR later, the peer is asked to send it again.
    /// It would otherwise wait for its ACK timeout, which programs make long.
    pub(in super::super) fn note_before_rtr(&mut self, packet: &Incoming<'_>) {
        let answers = matches!(self.init.qp_type, QpType::Rc | QpType::XrcRecv);
        let bth = &packet.headers.bth;
        if answers
            && matches!(self.attr.state, QpState::Reset | QpState::Init)
            && bth.opcode.service == self.init.qp_type.service()
            && bth.opcode.is_request()
        {
            self.responder.before_rtr = Some(bth.psn);
        }
    }

    /// Begins to receive at `psn`, in RTR. If this request or a later one came before, a NAK of `psn` waits to be sent
    /// (IBA 9.7.5.2.8): the peer goes back to it at once.
    pub(in super::super) fn start_responder(&mut self, psn: Psn) {
        let came = self.responder.before_rtr.is_some_and(|came| came.since(psn) >= 0);
        self.responder = Responder {
            expected: psn,
            nak_sent: came,
            acks: Acks {
                held: came.then_some((psn, Syndrome::Nak(NakCode::PsnSequence))),
                ..Acks::default()
            },
            pd: self.init.pd,
            answers: Answers::new(self.attr.max_dest_rd_atomic),
            ..Responder::default()
        };
    }
}

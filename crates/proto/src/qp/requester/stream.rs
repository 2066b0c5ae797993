//! The packets of a long message between its first and its last, all as long as the path MTU. Where each leaves by
//! itself, they differ in little but the PSN and the place of their payload.

use crate::env::{Env, TransmitError};
use crate::payload::Payload;
use crate::run::Run;
use crate::types::Psn;
use crate::wire::bth::Bth;
use crate::wire::opcode::Opcode;
use crate::wire::packet::Headers;
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::QpType;
use super::super::send_queue::PACKET_COST;
use super::{ACK_EVERY, has_room, operation, reth};

impl Qp {
    /// Sends such packets from the cursor on, as the general way would, while the window has room. `sent` is set if
    /// there were any. The general way sends what comes next, and all retransmissions.
    pub(super) fn send_stream<E: Env>(
        &mut self,
        window: u64,
        sent: &mut bool,
        env: &mut E,
    ) -> Result<(), TransmitError> {
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (k, packets) = (self.requester.k, sqe.packets);
        let is_stream = self.may_shorten()
            && packets > k + 1
            && (k > 0 || sqe.split)
            && !sqe.op.has_response()
            && !sqe.flags.contains(SendFlags::INLINE)
            && self.init.qp_type == QpType::Rc
            && !self.rate.is_limited()
            && sqe.first_psn.plus(k) == self.requester.max_sent
            && self.segment(env) == self.mtu()
            && !env.props().immediate;
        if !is_stream {
            return Ok(());
        }
        let (op, split, first_psn, len) = (sqe.op, sqe.split, sqe.first_psn, sqe.len);
        let target = match op {
            SendOp::Write(at) if split => Some(at),
            _ => None,
        };
        let opcode = Opcode::new(self.init.qp_type.service(), operation(&op, split, split));
        let mtu = self.mtu();
        let mut headers = Headers::new(Bth { opcode, ..self.bth(first_psn) });
        let cost = u64::from(mtu) + PACKET_COST;
        let mut in_flight = self.cursor_cost().wrapping_sub(self.requester.una_cost);
        let mut next = k;
        let mut result = Ok(());
        while result.is_ok() && next + 1 < packets && has_room(in_flight, cost, window) {
            let (psn, offset) = (first_psn.plus(next), next * mtu);
            headers.bth.psn = psn;
            headers.reth = target.map(|at| reth(at, offset, mtu));
            let sges = self.sq.sges(position);
            let rest = Payload::gather(sges, offset.into(), (len - offset) as usize, self.init.pd);
            let room = (window.saturating_sub(in_flight) / cost).max(1);
            let n = room.min((packets - 1 - next).min(Run::MOST).into()) as u32;
            let run = Run::new(headers, rest, mtu, n, self.asks_in_run(packets, psn, window));
            in_flight += u64::from(n) * cost;
            let (taken, end) = env.transmit_run(&self.attr.av, &run);
            next += taken;
            result = end;
        }
        *sent |= next > k;
        self.requester.k = next;
        self.requester.max_sent = first_psn.plus(next);
        result
    }

    /// A bit for each packet from `psn` on that [asks for an ACK](Self::asks_for_ack), in a message of so many.
    fn asks_in_run(&self, packets: u32, psn: Psn, window: u64) -> u64 {
        const EVERY: u64 = u64::MAX / ((1 << ACK_EVERY) - 1);
        let cost = u64::from(self.mtu()) + PACKET_COST;
        let behind = psn.since(self.requester.una) as u64 + 1;
        // From here on no further packet fits the window.
        let ends = (window / cost).saturating_sub(behind);
        let every = if packets > ACK_EVERY { EVERY } else { 0 };
        every << (ACK_EVERY - 1 - psn.get() % ACK_EVERY)
            | u64::MAX.checked_shl(ends.min(64) as u32).unwrap_or(0)
    }
}

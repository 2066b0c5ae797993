//! UD: one packet a message, to any destination (IBA 9.8.3, 10.2.5).

use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::env::{Env, Side, TransmitError};
use crate::payload::{Data, Payload, scatter};
use crate::types::QKey;
use crate::wc::{Wc, WcFlags, WcOpcode, WcStatus};
use crate::wire::bth::Bth;
use crate::wire::deth::Deth;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::{Headers, ICRC_LEN};
use crate::wr::{SendFlags, SendOp};

use super::attr::QpState;
use super::drops::DropReason;
use super::grh::{self, GRH_LEN};
use super::pacing::Pacing;
use super::{Arrival, Incoming, PACKET_COST, Qp};

impl Qp {
    /// Sends all datagrams that the link takes.
    pub(super) fn send_datagrams<E: Env>(&mut self, env: &mut E) -> bool {
        let mut sent = false;
        while self.attr.state == QpState::Rts
            && self.sq.next != self.sq.head()
            && !self.is_halted_here()
            && self.paces_next(env)
        {
            let bytes = self.sq.at(self.sq.next).len;
            match self.send_datagram(env) {
                Ok(()) => {
                    sent = true;
                    self.note_paced_datagram(bytes, env);
                    self.sq.next = self.sq.next.wrapping_add(1);
                    self.sq.started = self.sq.next;
                    self.complete_oldest(WcStatus::Success, env);
                }
                Err(None) => break,
                Err(Some(status)) => self.fail_oldest(status, env),
            }
        }
        self.after_completion(env);
        sent
    }

    /// Tells whether the program's limit and the static rate of its address handle let the oldest leave now.
    fn paces_next<E: Env>(&mut self, env: &E) -> bool {
        let static_rate = self.sq.dest(self.sq.next).av.static_rate;
        let mut wait = self.rate.limit.as_ref().and_then(|pacing| pacing.wait(env.now()));
        if static_rate != 0
            && let Some(path) = Pacing::of_path(static_rate, self.mtu())
        {
            let pacing = self.rate.path.get_or_insert(path);
            pacing.turns_to(&path);
            wait = wait.or_else(|| pacing.wait(env.now()));
        }
        self.note_wait(wait, env)
    }

    fn note_paced_datagram<E: Env>(&mut self, bytes: u32, env: &E) {
        if !self.rate.is_limited() {
            return;
        }
        let bytes = bytes.saturating_add(PACKET_COST as u32);
        let static_rate = self.sq.dest(self.sq.next).av.static_rate;
        if let Some(pacing) = &mut self.rate.limit {
            pacing.note_sent(bytes, env.now());
        }
        // Datagrams to other destinations take nothing of this path's rate.
        if let Some(pacing) = &mut self.rate.path
            && Pacing::of_path(static_rate, 0).is_some()
        {
            pacing.note_sent(bytes, env.now());
        }
    }

    /// Sends the oldest. An error without status: the path has no room.
    fn send_datagram<E: Env>(&mut self, env: &mut E) -> Result<(), Option<WcStatus>> {
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (operation, imm) = match sqe.op {
            SendOp::Send => (Operation::SendOnly, None),
            SendOp::SendImm(imm) => (Operation::SendOnlyImm, Some(imm)),
            _ => return Err(Some(WcStatus::LocQpOpErr)),
        };
        let dest = self.sq.dest(position);
        if dest.pd != self.init.pd || dest.av.port != self.attr.port {
            return Err(Some(WcStatus::LocQpOpErr));
        }
        if sqe.len > self.mtu() {
            return Err(Some(WcStatus::LocLenErr));
        }
        self.check_sges(position, env)?;
        let mut headers = Headers::new(Bth {
            opcode: Opcode::new(Service::Ud, operation),
            solicited: sqe.flags.contains(SendFlags::SOLICITED),
            dest_qpn: dest.qpn,
            ..self.bth(self.requester.next_datagram)
        });
        let qkey = if dest.qkey.is_controlled() { self.attr.qkey } else { dest.qkey };
        headers.deth = Some(Deth { qkey, src_qpn: self.qpn });
        headers.imm = imm;
        let payload = if sqe.flags.contains(SendFlags::INLINE) {
            Payload::bytes(self.sq.inline(position))
        } else {
            Payload::gather(self.sq.sges(position), 0, sqe.len as usize, self.init.pd)
        };
        match env.transmit(&dest.av, &headers, &payload, None) {
            Ok(()) => {
                self.requester.next_datagram = self.requester.next_datagram.plus(1);
                Ok(())
            }
            // A datagram has no peer that would miss it.
            Err(TransmitError::Blocked | TransmitError::PeerGone) => Err(None),
            Err(TransmitError::Fault(_)) => Err(Some(WcStatus::LocProtErr)),
        }
    }

    /// Takes a datagram. One that does not fit is dropped: a stranger cannot stop the queue pair.
    pub(super) fn receive_datagram<E: Env>(
        &mut self,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        env: &mut E,
    ) {
        let headers = &packet.headers;
        let Some(deth) = headers.deth else { return env.count(Counter::DropMalformed, 1) };
        if deth.qkey != self.attr.qkey {
            return self.drop_datagram(DropReason::QKey, 0, (arrival, packet, deth), env);
        }
        self.note_established(env);
        if !self.take_datagram_recv(env) {
            return self.drop_datagram(DropReason::NoReceive, 0, (arrival, packet, deth), env);
        }
        let len = GRH_LEN as u64 + packet.payload.len() as u64;
        let recv = self.datagram_recv();
        let room = recv.room().min(GRH_LEN as u64 + u64::from(self.mtu()));
        if len > room {
            return self.drop_datagram(DropReason::TooLong, room, (arrival, packet, deth), env);
        }
        let wire_len = packet.len() + ICRC_LEN;
        let grh = grh::build(arrival, wire_len);
        let pd = self.srq.pd.unwrap_or(self.init.pd);
        let (mrs, memory) = (env.mrs(), env.memory());
        let written = scatter(&recv.sges, 0, Data::Bytes(&grh), pd, mrs, memory)
            .and_then(|()| scatter(&recv.sges, GRH_LEN as u64, packet.payload, pd, mrs, memory));
        if written.is_err() {
            return self.fail_datagram_recv((arrival, packet), env);
        }
        let mut wc = Wc {
            opcode: WcOpcode::Recv,
            flags: WcFlags::GRH,
            sl: grh::packet_type(arrival),
            byte_len: len as u32,
            src_qpn: deth.src_qpn,
            ..Wc::default()
        };
        if let Some(imm) = headers.imm {
            wc.imm = imm;
            wc.flags |= WcFlags::WITH_IMM;
        }
        self.finish_datagram_recv(wc, headers.bth.solicited, env);
    }

    /// The Q_Key with which others reach this queue pair.
    #[must_use]
    pub fn qkey(&self) -> QKey {
        self.attr.qkey
    }

    fn finish_datagram_recv<E: Env>(&mut self, wc: Wc, solicited: bool, env: &mut E) {
        let wr_id = self.release_recv();
        self.responder.note_datagram(wc.byte_len.saturating_sub(GRH_LEN as u32));
        self.count_completion(CompCntrOps::RECV, wc.byte_len, false, env);
        env.complete(Side::Recv, Wc { wr_id, qpn: self.qpn, ..wc }, solicited);
    }
}

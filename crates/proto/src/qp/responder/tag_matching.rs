//! SENDs to a queue pair whose SRQ matches tags. The message goes to the buffer of its tag without its header, or whole
//! to a buffer of the queue. This queue pair's own requester fetches the data of a rendezvous by a READ, and then tells
//! the sender. It sends nothing else.

use crate::comp_cntr::CompCntrOps;
use crate::env::{Env, Side};
use crate::payload::{Data, ScatterError, pieces, scatter};
use crate::recv_queue::RecvWqe;
use crate::tag_list::{MAX_TAG_SGE, Tagged, Taken};
use crate::wc::{TmInfo, Wc, WcFlags, WcOpcode, WcStatus};
use crate::wire::tmh::{Rvh, TmOp, Tmh};
use crate::wr::{MAX_MESSAGE, MAX_SGE, RemoteAddr, SendFlags, SendOp, SendWr, Sge};

use super::super::attr::{QpCap, QpState};
use super::super::{Incoming, Qp};
use super::{Inbound, Refusal, Stop};
use arrayvec::ArrayVec;

/// Bytes of the headers of a rendezvous.
const RNDV_LEN: usize = Tmh::LEN + Rvh::LEN;

/// Sizes of the send queue: a READ and a SEND for each of 32 rendezvous.
pub(in super::super) const SEND_CAP: QpCap = QpCap {
    max_send_wr: 64,
    max_recv_wr: 0,
    max_send_sge: MAX_TAG_SGE as u32,
    max_recv_sge: 0,
    max_inline_data: RNDV_LEN as u32,
};

/// The message that is coming in.
#[derive(Debug)]
pub(in super::super) struct TagMatching {
    taken: Taken,
    info: TmInfo,
    /// Headers of a rendezvous that has matched.
    rndv: Option<(Tmh, Rvh)>,
}

impl Default for TagMatching {
    fn default() -> Self {
        Self { taken: Taken::Untagged, info: TmInfo::default(), rndv: None }
    }
}

impl Qp {
    pub(super) fn execute_tagged_send<E: Env>(
        &mut self,
        packet: &Incoming<'_>,
        env: &mut E,
    ) -> Result<(), Stop> {
        let first = match self.responder.inbound {
            Inbound::Send { .. } => false,
            _ => {
                self.take_tagged(packet, env)?;
                true
            }
        };
        let Some(tm) = &self.srq.tag_matching else { return Err(Refusal::INVALID.into()) };
        let matched = tm.taken == Taken::Matched;
        let info = tm.info;
        if let Some((tmh, rvh)) = tm.rndv {
            self.begin_rendezvous(tmh, rvh, packet.headers.bth.solicited, env)?;
            self.responder.inbound = Inbound::Send { received: 0 };
            return Ok(());
        }
        let received = match self.responder.inbound {
            Inbound::Send { received } => received,
            _ => 0,
        };
        let header = if matched && first { Tmh::LEN } else { 0 };
        let data = packet.payload.skip(header);
        let end = received + data.len() as u64;
        let recv = &self.responder.recv;
        if end > recv.room() {
            return Err(Refusal::TOO_LONG.into());
        }
        scatter(&recv.sges, received, data, self.responder.pd, env.mrs(), env.memory())
            .map_err(|_: ScatterError| Refusal::RECEIVE)?;
        let last = packet.headers.bth.opcode.ends_message();
        if first && matched && !last {
            let wc = self.tagged_wc(WcFlags::TM_MATCH, 0);
            env.complete_tagged(wc, info, packet.headers.bth.solicited);
        }
        if !last {
            self.responder.inbound = Inbound::Send { received: end };
            return Ok(());
        }
        let (opcode, flags) = match tm.taken {
            Taken::Matched if first => {
                (WcOpcode::TmRecv, WcFlags::TM_MATCH | WcFlags::TM_DATA_VALID)
            }
            Taken::Matched => (WcOpcode::TmRecv, WcFlags::TM_DATA_VALID),
            Taken::Unexpected => (WcOpcode::TmRecv, WcFlags::empty()),
            Taken::Untagged => (WcOpcode::TmNoTag, WcFlags::empty()),
        };
        let mut wc = Wc { opcode, ..self.tagged_wc(flags, end as u32) };
        self.invalidate_for(packet, &mut wc, env)?;
        self.responder.inbound = Inbound::Send { received: end };
        if let Some(imm) = packet.headers.imm {
            wc.imm = imm;
            wc.flags |= WcFlags::WITH_IMM;
        }
        self.release_recv();
        self.count_completion(CompCntrOps::RECV, wc.byte_len, false, env);
        let info = if matched && first { info } else { TmInfo::default() };
        env.complete_tagged(wc, info, packet.headers.bth.solicited);
        Ok(())
    }

    /// A completion of the receive in hand.
    fn tagged_wc(&self, flags: WcFlags, byte_len: u32) -> Wc {
        Wc {
            wr_id: self.responder.recv.wr_id,
            opcode: WcOpcode::TmRecv,
            flags,
            byte_len,
            qpn: self.qpn,
            src_qpn: self.attr.dest_qpn,
            ..Wc::default()
        }
    }

    /// Reads the headers of a message and takes a buffer for it.
    fn take_tagged<E: Env>(&mut self, packet: &Incoming<'_>, env: &mut E) -> Result<(), Stop> {
        if self.responder.recv_taken {
            return Ok(());
        }
        let mut bytes = [0; RNDV_LEN];
        let read = packet.payload.read(env.memory(), &mut bytes).map_err(|_| Refusal::INVALID)?;
        let (tmh, rvh) = headers(&bytes, read);
        let rvh = rvh.filter(|_| packet.headers.bth.opcode.is_only());
        let tagged = match (tmh, rvh) {
            (Some(Tmh { op: TmOp::Eager, tag, .. }), _) => Tagged::Tag(tag),
            (Some(Tmh { op: TmOp::Rndv, tag, .. }), Some(rvh)) if self.can_fetch(&rvh) => {
                Tagged::Tag(tag)
            }
            (Some(Tmh { op: TmOp::Rndv, .. }), _) => Tagged::Program,
            _ => Tagged::None,
        };
        let taken = env.take_tagged(tagged, &mut self.responder.recv).ok_or(Stop::NotReady)?;
        self.responder.recv_taken = true;
        let matched = tmh.filter(|_| taken == Taken::Matched);
        let info = |tmh: Tmh| TmInfo { tag: tmh.tag, user_data: tmh.user_data };
        if let Some(tm) = &mut self.srq.tag_matching {
            **tm = TagMatching {
                taken,
                info: matched.map_or_else(TmInfo::default, info),
                rndv: matched.filter(|tmh| tmh.op == TmOp::Rndv).zip(rvh),
            };
        }
        Ok(())
    }

    /// Tells whether this queue pair can fetch the data of a rendezvous now. If not, the program has to.
    fn can_fetch(&self, rvh: &Rvh) -> bool {
        self.attr.state == QpState::Rts
            && self.attr.max_rd_atomic > 0
            && rvh.len <= MAX_MESSAGE
            && self.sq.outstanding() + 2 <= SEND_CAP.max_send_wr
    }

    /// A rendezvous has matched: queues the READ of its data and, behind it, the word to the sender.
    fn begin_rendezvous<E: Env>(
        &mut self,
        tmh: Tmh,
        rvh: Rvh,
        solicited: bool,
        env: &mut E,
    ) -> Result<(), Stop> {
        let Some(tm) = &self.srq.tag_matching else { return Err(Refusal::INVALID.into()) };
        let info = tm.info;
        let RecvWqe { wr_id, sges } = &self.responder.recv;
        let (wr_id, room) = (*wr_id, self.responder.recv.room());
        let mut bytes = [0; RNDV_LEN];
        emit(&tmh, &rvh, &mut bytes);
        if room < rvh.len.into() {
            // The program fetches the data to where there is room; from the headers it knows where.
            let len = RNDV_LEN.min(usize::try_from(room).unwrap_or(RNDV_LEN));
            let (pd, mrs, memory) = (self.responder.pd, env.mrs(), env.memory());
            scatter(sges, 0, Data::Bytes(&bytes[..len]), pd, mrs, memory)
                .map_err(|_: ScatterError| Refusal::RECEIVE)?;
            let status = WcStatus::TmRndvIncomplete;
            let wc = Wc { status, ..self.tagged_wc(WcFlags::TM_MATCH, len as u32) };
            self.release_recv();
            env.complete_tagged(wc, info, solicited);
            return Ok(());
        }
        let sges: ArrayVec<Sge, MAX_SGE> = pieces(sges, 0, rvh.len as usize).collect();
        env.complete_tagged(self.tagged_wc(WcFlags::TM_MATCH, 0), info, solicited);
        self.release_recv();
        let read = SendWr {
            wr_id,
            op: SendOp::Read(RemoteAddr { va: rvh.va, rkey: rvh.rkey }),
            flags: SendFlags::empty(),
            sges: &sges,
            ud: None,
            xrc_srqn: 0,
        };
        self.sq.stage(&read, rvh.len);
        self.sq.commit();
        emit(&Tmh { op: TmOp::Fin, ..tmh }, &rvh, &mut bytes);
        let fin = SendWr {
            op: SendOp::Send,
            flags: SendFlags::FENCE | SendFlags::INLINE,
            sges: &[],
            ..read
        };
        self.sq.inline_mut()[..RNDV_LEN].copy_from_slice(&bytes);
        self.sq.stage(&fin, RNDV_LEN as u32);
        self.sq.commit();
        Ok(())
    }

    /// A send of a queue pair that matches tags is done. If it was a READ, the SRQ tells the program.
    pub(in super::super) fn complete_fetch<E: Env>(
        &self,
        wr_id: u64,
        op: &SendOp,
        len: u32,
        status: WcStatus,
        env: &mut E,
    ) {
        if !matches!(op, SendOp::Read(_)) {
            return;
        }
        let flags = match status {
            WcStatus::Success => WcFlags::TM_DATA_VALID,
            _ => WcFlags::empty(),
        };
        let wc = Wc {
            wr_id,
            status,
            opcode: WcOpcode::TmRecv,
            flags,
            byte_len: len,
            qpn: self.qpn,
            src_qpn: self.attr.dest_qpn,
            ..Wc::default()
        };
        self.count_completion(CompCntrOps::RECV, len, status != WcStatus::Success, env);
        env.complete(Side::Recv, wc, true);
    }
}

/// The headers that lie in the first `len` bytes of a message.
fn headers(bytes: &[u8; RNDV_LEN], len: usize) -> (Option<Tmh>, Option<Rvh>) {
    let (Some(tmh), Some(rvh)) = (bytes.first_chunk(), bytes.last_chunk()) else {
        return (None, None);
    };
    let tmh = if len >= Tmh::LEN { Tmh::parse(tmh) } else { None };
    (tmh, (len >= RNDV_LEN).then(|| Rvh::parse(rvh)))
}

fn emit(tmh: &Tmh, rvh: &Rvh, to: &mut [u8; RNDV_LEN]) {
    if let Some(to) = to.first_chunk_mut() {
        tmh.emit(to);
    }
    if let Some(to) = to.last_chunk_mut() {
        rvh.emit(to);
    }
}

//! A queue pair tells the reasons of its failures to the log, by `vendor_err`, and to the peer.
//!
//! All of it is found out once something has failed, by a second look. The machines that find a fault tell only what it
//! means for the connection.

use std::fmt;

use anyverbs_causes::Cause;

use crate::env::Env;
use crate::mr::{Access, BindError};
use crate::reason::{KeyOf, MemoryRange, OF_PEER, Reason, Told, pair};
use crate::time::Time;
use crate::types::{Psn, Qpn};
use crate::wc::WcStatus;
use crate::wire::aeth::NakCode;
use crate::wire::bth::Bth;
use crate::wire::feth::Selectivity;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wr::SendOp;

use super::attr::{QpState, QpType};
use super::drops::{AllDrops, DropReason, Drops, Failed, Lost};
use super::responder::Refusal;
use super::{Arrival, Incoming, Qp};

/// Exists once something went wrong.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    /// The first cause: flushed work carries it.
    first: Option<Cause>,
    /// The first cause is a script of faults of this process.
    is_by_script: bool,
    /// The peer's reason for the NAK of this PSN, which came ahead of it.
    told: Option<(Psn, Told)>,
    /// The peer's process has ended.
    peer_ended: bool,
    /// The oldest packet for which the network and the peer's device were asked last, and whether the retries were about to run
    /// out.
    asked: Option<(Psn, bool)>,
    /// The log says how this end differs from the other.
    has_told: bool,
    /// How often a sender asked why this end, which is in the wrong state, drops its packets; 2 stands for more.
    asked_of_state: u8,
    /// Why the last bind that failed was refused.
    bind_refused: Option<BindError>,
    /// The log says that the send queue is full for good.
    is_stuck: bool,
    /// The place of a request that makes room in the full send queue when it completes.
    makes_room: Option<u32>,
    /// The oldest packet that has no answer, and when its timeout began first.
    silent: Option<(Psn, Time)>,
    /// The oldest packet that the peer was not ready for, and when it said so first.
    not_ready: Option<(Psn, Time)>,
    /// The peer's packet for which there was no receive, and when it came first.
    no_receive: Option<(Psn, Time)>,
    /// The last word of the peer about that packet is that it has given it up.
    pub(super) has_peer_given_up: bool,
    /// The path MTU, and the length of a packet of a READ's response that shows another one.
    other_mtu: Option<(u32, u32)>,
    /// The place of a request that a script of faults lets fail, and whether it waits for the time of that.
    spoiled: Option<(u32, bool)>,
    /// Datagrams that were dropped.
    drops: AllDrops,
    /// Messages of UC that were dropped, and differences between the two ends.
    pub(super) lost: Vec<Lost>,
    /// The last work of this end that failed and was not flushed.
    failed: Option<Failed>,
}

impl Qp {
    pub(super) fn trouble(&mut self) -> &mut Trouble {
        self.trouble.get_or_insert_default()
    }

    /// A bind of a memory window is refused.
    pub(super) fn note_bind_refused(&mut self, error: BindError) {
        self.trouble().bind_refused = Some(error);
    }

    /// Datagrams that were dropped for a reason since the last RESET.
    #[must_use]
    pub fn drops(&self, reason: DropReason) -> Option<Drops> {
        self.trouble.as_ref()?.drops[reason as usize]
    }

    /// Messages of UC that were dropped since the last RESET, and differences between the two ends that were found since. By cause.
    #[must_use]
    pub fn lost(&self) -> &[Lost] {
        self.trouble.as_ref().map_or(&[], |trouble| &trouble.lost)
    }

    /// The last work of this end that has failed since the last RESET, without what was flushed.
    #[must_use]
    pub fn failed(&self) -> Option<&Failed> {
        self.trouble.as_ref()?.failed.as_ref()
    }

    pub(super) fn drops_mut(&mut self) -> &mut AllDrops {
        &mut self.trouble().drops
    }

    /// For [`crate::wc::Wc::vendor_err`].
    pub(super) fn vendor_err(&self) -> u32 {
        let first = self.trouble.as_ref().and_then(|trouble| trouble.first);
        first.map_or(0, |cause| cause.number().into())
    }

    /// Notes a cause, if it is the first.
    pub(super) fn blame(&mut self, cause: Cause) {
        self.trouble().first.get_or_insert(cause);
    }

    /// As [`blame`](Self::blame), of what happened at this end. A script of faults is that of this process then.
    pub(super) fn blame_own(&mut self, cause: Cause) {
        let trouble = self.trouble();
        trouble.is_by_script |= trouble.first.is_none() && cause == Cause::Injected;
        self.blame(cause);
    }

    /// The send that was posted last is not sent. It fails with this status when its turn comes, since a script of faults asks
    /// for it; if it `waits`, not before [`fail_spoiled_send`](Self::fail_spoiled_send).
    pub fn spoil_last_send(&mut self, status: WcStatus, waits: bool) {
        let position = self.sq.head().wrapping_sub(1);
        if self.sq.outstanding() > 0 && self.halt_at(position, status) {
            self.trouble().spoiled = Some((position, waits));
        }
    }

    /// The time has come for the send that waits to fail.
    pub fn fail_spoiled_send<E: Env>(&mut self, env: &mut E) {
        if let Some((position, true)) = self.spoiled() {
            self.trouble().spoiled = Some((position, false));
            self.after_completion(env);
        }
    }

    /// The send that a script of faults lets fail, and whether it waits.
    pub(super) fn spoiled(&self) -> Option<(u32, bool)> {
        self.trouble.as_ref()?.spoiled
    }

    /// Everything is well again.
    pub(super) fn forget_trouble(&mut self) {
        self.trouble = None;
    }

    /// Whether the oldest packet is one for which [`ReasonEnv::sound`](crate::env::ReasonEnv::sound) was called.
    #[must_use]
    pub fn awaits_reason(&self) -> bool {
        let asked = self.trouble.as_ref().and_then(|trouble| trouble.asked);
        asked.is_some_and(|(psn, _)| psn == self.first_unanswered()) && self.awaits_answer()
    }

    /// Notes the reason that came with a NAK, in the place of that of an earlier one.
    pub(super) fn note_nak<E: Env>(&mut self, packet: &Incoming<'_>, env: &E) {
        if let Some(trouble) = &mut self.trouble {
            trouble.told = None;
        }
        let mut bytes = [0; Told::LEN];
        if packet.payload.len() == Told::LEN
            && packet.payload.read(env.memory(), &mut bytes).is_ok()
            && let Some(told) = Told::from_bytes(&bytes)
        {
            self.trouble().told = Some((packet.headers.bth.psn, told));
        }
    }

    /// The peer's process has ended.
    pub(super) fn note_peer_ended(&mut self) {
        self.trouble().peer_ended = true;
    }

    /// The peer was not ready for the oldest packet.
    pub(super) fn note_not_ready(&mut self, una: Psn, now: Time) {
        let since = &mut self.trouble().not_ready;
        if since.is_none_or(|(psn, _)| psn != una) {
            *since = Some((una, now));
        }
    }

    /// The last NAK was for the oldest packet, and by a rule of a script of faults of the peer.
    pub(super) fn is_put_off_by_rule(&self) -> bool {
        let told = self.trouble.as_ref().and_then(|trouble| trouble.told);
        told.is_some_and(|(psn, told)| {
            psn == self.first_unanswered() && told.cause == Cause::Injected
        })
    }

    /// There is no receive for this packet of the peer.
    pub(super) fn note_no_receive(&mut self, psn: Psn, now: Time) {
        let trouble = self.trouble();
        trouble.has_peer_given_up = false;
        if trouble.no_receive.is_none_or(|(known, _)| known != psn) {
            trouble.no_receive = Some((psn, now));
        }
    }

    /// The first cause of a failure.
    pub(super) fn first_cause(&self) -> Option<Cause> {
        self.trouble.as_ref()?.first
    }

    /// Since when the peer is not ready for the oldest packet.
    pub(super) fn not_ready_since(&self) -> Option<Time> {
        let (psn, since) = self.trouble.as_ref()?.not_ready?;
        (psn == self.first_unanswered()).then_some(since)
    }

    /// Since when the oldest packet has no answer, once a timeout has passed.
    pub(super) fn silent_since(&self) -> Option<Time> {
        let (psn, since) = self.trouble.as_ref()?.silent?;
        (psn == self.first_unanswered()).then_some(since)
    }

    /// Since when the peer's next packet finds no receive.
    pub(super) fn no_receive_since(&self) -> Option<Time> {
        let (psn, since) = self.trouble.as_ref()?.no_receive?;
        (psn == self.expected()).then_some(since)
    }

    /// The peer has given up the packet that found no receive.
    pub(super) fn has_peer_given_up(&self) -> bool {
        self.trouble.as_ref().is_some_and(|trouble| trouble.has_peer_given_up)
    }

    /// The peer has never answered.
    pub(super) fn was_never_answered(&self) -> bool {
        self.first_unanswered() == self.attr.sq_psn
    }

    /// The oldest packet has had no answer since then. Asks the network and the peer's device why, if the retries are about to
    /// run out.
    pub(super) fn sound<E: Env>(&mut self, (una, since): (Psn, Time), is_late: bool, env: &mut E) {
        let is_stranger = self.was_never_answered();
        let trouble = self.trouble.get_or_insert_default();
        if trouble.silent.is_none_or(|(psn, _)| psn != una) {
            trouble.silent = Some((una, since));
        }
        let asked = trouble.asked.filter(|(psn, _)| *psn == una);
        // They are asked about a stranger before the first repeat as well: where nobody holds the port, its host reports about six
        // packets, and then one in a second. The repeats would use them up.
        let asks = is_late || is_stranger;
        if !asks || asked.is_some_and(|(_, late)| late || !is_late) {
            return;
        }
        trouble.asked = Some((una, is_late));
        self.with_oldest(|mut headers, payload| {
            headers.bth.reserved |= Bth::ASKS;
            env.sound(&self.attr.av, &headers, &payload);
        });
    }

    /// A packet was dropped. If its sender asks, this tells it why. The log says it once if the two ends differ. A sender of UC asks
    /// nothing.
    #[cold]
    pub(super) fn explain_drop<E: Env>(
        &mut self,
        arrival: &Arrival,
        packet: &Incoming<'_>,
        env: &mut E,
    ) {
        let bth = &packet.headers.bth;
        let asks = bth.reserved & Bth::ASKS != 0;
        let is_uc = self.init.qp_type == QpType::Uc && bth.opcode.service == Service::Uc;
        if !(asks || is_uc) || !bth.opcode.is_request() {
            return;
        }
        let Some(cause) = self.reason_of_drop(arrival, bth) else { return };
        if asks {
            env.tell_why(arrival, bth, cause);
        }
        if !self.is_to_be_said(cause) {
            return;
        }
        let (source, av) = (arrival.source.to_ip(), &self.attr.av);
        let (qpn, psn, rq_psn) = (self.qpn.get(), bth.psn.get(), self.attr.rq_psn.get());
        let said = match cause {
            Cause::GidDiffers => format!(
                "they go to {}, and the queue pair is connected from {} to {}",
                arrival.destination.to_ip(),
                av.sgid.to_ip(),
                av.dgid.to_ip()
            ),
            Cause::PsnDiffers => format!("they begin at PSN {psn:#x}, and rq_psn is {rq_psn:#x}"),
            Cause::PkeyDiffers => format!(
                "they have P_Key {:#06x}, and that of the queue pair is {:#06x}{}",
                bth.pkey.0,
                self.pkey.0,
                if bth.pkey.is_same_partition(self.pkey) {
                    "; both are limited members"
                } else {
                    ""
                }
            ),
            Cause::PeerNotReady | Cause::PeerInError => {
                format!("it is in {}, and takes packets in RTR and RTS", self.attr.state.name())
            }
            _ => format!(
                "the queue pair is of type {}, and {} came",
                self.init.qp_type.name(),
                bth.opcode
            ),
        };
        env.log(format_args!(
            "queue pair {qpn:#08x} drops packets from {source}: {said}; see `anyverbs explain {cause}`"
        ));
        self.note_difference((cause, 0), format!("packets from {source} are dropped: {said}"));
    }

    /// A packet came that this state does not take. Connections that are crossed fail one after the other: the peer goes on to answer here
    /// what another queue pair has sent.
    #[cold]
    pub(super) fn note_crossed<E: Env>(&self, bth: &Bth, env: &E) {
        if bth.opcode.is_response() && self.first_cause() == Some(Cause::QpnDiffers) {
            env.note_stray(&self.attr.av, bth.psn);
        }
    }

    /// A request came as a duplicate. It is acknowledged (IBA 9.7.5.1.3), so its sender takes it for done. If nothing was executed before,
    /// the two ends begin at different PSNs, and nobody else tells of the loss.
    #[cold]
    pub(super) fn explain_duplicate<E: Env>(&mut self, psn: Psn, env: &mut E) {
        let is_first = self.responder.executed().0 == 0 && !self.expects(psn);
        if !is_first || !self.is_to_be_said(Cause::PsnDiffers) {
            return;
        }
        let said = format!(
            "a packet with PSN {:#x} came from {} as a duplicate, but nothing was received before, and rq_psn is {:#x} here; \
             it is not executed, and its sender may take it for done",
            psn.get(),
            self.peer(self.sq.done),
            self.attr.rq_psn.get()
        );
        env.log(format_args!(
            "queue pair {:#08x}: {said}; see `anyverbs explain {}`",
            self.qpn.get(),
            Cause::PsnDiffers
        ));
        self.note_difference((Cause::PsnDiffers, 0), said);
    }

    /// Whether the log is to say now that packets are dropped for this cause. A sender asks first when nobody has answered it yet: this
    /// end may be ready in time for its repeats. It asks again when its retries are about to run out.
    fn is_to_be_said(&mut self, cause: Cause) -> bool {
        let trouble = self.trouble();
        match cause {
            Cause::PeerNotReady | Cause::PeerInError => {
                let before = trouble.asked_of_state;
                trouble.asked_of_state = 2.min(before + 1);
                before == 1
            }
            // An earlier line has told it.
            Cause::Injected | Cause::PeerKeptKey => false,
            _ => !std::mem::replace(&mut trouble.has_told, true),
        }
    }

    fn reason_of_drop(&self, arrival: &Arrival, bth: &Bth) -> Option<Cause> {
        let attr = &self.attr;
        if bth.opcode.service != self.init.qp_type.service() {
            Some(Cause::TypeDiffers)
        } else if matches!(attr.state, QpState::Reset | QpState::Init) {
            Some(Cause::PeerNotReady)
        } else if !arrival.is_from(&attr.av) {
            Some(Cause::GidDiffers)
        } else if attr.state == QpState::Err {
            let trouble = self.trouble.as_deref();
            Some(match trouble.and_then(|trouble| trouble.first) {
                _ if trouble.is_some_and(|trouble| trouble.is_by_script) => Cause::Injected,
                // Nothing told the peer when it happened.
                Some(Cause::KeyNotInvalidated) => Cause::PeerKeptKey,
                _ => Cause::PeerInError,
            })
        } else if !bth.pkey.matches(self.pkey) {
            Some(Cause::PkeyDiffers)
        } else {
            (!self.expects(bth.psn)).then_some(Cause::PsnDiffers)
        }
    }

    /// A work request of this end fails: notes why, and says it.
    pub(super) fn explain_failure<E: Env>(&mut self, status: WcStatus, env: &mut E) {
        let position = self.sq.done;
        let is_spoiled = self.spoiled().is_some_and(|(spoiled, _)| spoiled == position);
        let una = self.first_unanswered();
        let meddling = (!is_spoiled && status == WcStatus::RetryExcErr).then(|| env.meddling(una));
        let meddling = meddling.flatten();
        let is_cause = meddling.as_ref().is_some_and(|(is_cause, _)| *is_cause);
        let reason = match is_spoiled || is_cause {
            true => Reason::new(Cause::Injected),
            false => self.reason_of(status, position, env),
        };
        match is_spoiled || is_cause {
            true => self.blame_own(reason.cause),
            false => self.blame(reason.cause),
        }
        let why = match meddling {
            Some((true, what)) => what,
            Some((false, what)) => format!("{reason}; {what}"),
            None => in_words(&reason, KeyOf::Sender, env),
        };
        let sqe = self.sq.at(position);
        let (op, wr_id, peer) = (name(&sqe.op), sqe.wr_id, self.peer(position));
        env.log(format_args!(
            "queue pair {:#08x}: {op} (wr_id {wr_id:#x}) to {peer} failed with status {} ({}): {why}; \
             see `anyverbs explain {}`",
            self.qpn.get(),
            status as u8,
            status.name(),
            reason.cause
        ));
        self.trouble().failed = Some(Failed { cause: reason.cause, wr_id, why });
    }

    /// Whether a post found the send queue full, and nothing can free it.
    pub(super) fn is_stuck(&self) -> bool {
        self.trouble.as_deref().is_some_and(|trouble| trouble.is_stuck)
    }

    /// The send queue is full. Says so, once, if nothing can free it: no request in it makes a completion.
    #[cold]
    pub(super) fn explain_full<E: Env>(&mut self, env: &mut E) {
        // Flushed requests make completions, whether they are signaled or not.
        if self.init.sq_sig_all || matches!(self.attr.state, QpState::Err | QpState::Sqe) {
            return;
        }
        let first = self.attached.credit.released();
        let queued = self.sq.head().wrapping_sub(first);
        let is_queued = |position: u32| position.wrapping_sub(first) < queued;
        let trouble = self.trouble.get_or_insert_default();
        // A program may try again and again, and most find what they found the last time.
        if trouble.is_stuck || trouble.makes_room.is_some_and(is_queued) || queued == 0 {
            return;
        }
        let last = first.wrapping_add(queued).wrapping_sub(1);
        let is_signaled = |n: &u32| self.sq.was_signaled(*n);
        trouble.makes_room = (0..queued).map(|n| last.wrapping_sub(n)).find(is_signaled);
        trouble.is_stuck = trouble.makes_room.is_none();
        if !trouble.is_stuck {
            return;
        }
        let from = match self.sq.may_have_passed(first) {
            true => String::new(),
            false => format!(", from wr_id {:#x} on,", self.sq.at(first).wr_id),
        };
        env.log(format_args!(
            "queue pair {:#08x}: the send queue is full: none of its {queued} requests{from} is signaled, so nothing \
             frees it; see `anyverbs explain {}`",
            self.qpn.get(),
            Cause::SendQueueFull
        ));
    }

    /// A request of the peer is refused for this reason: notes it, and says it.
    pub(super) fn explain_refusal<E: Env>(&mut self, what: &str, reason: &Reason, env: &mut E) {
        let peer = self.peer(self.sq.done);
        self.tell_refusal((what, peer), reason, env);
    }

    /// As [`explain_refusal`](Self::explain_refusal), of a datagram, which says itself who sent it.
    #[cold]
    pub(super) fn explain_refused_datagram<E: Env>(
        &mut self,
        (arrival, packet): (&Arrival, &Incoming<'_>),
        reason: &Reason,
        env: &mut E,
    ) {
        let qpn = packet.headers.deth.map_or_else(Qpn::default, |deth| deth.src_qpn);
        let peer = Peer { ip: arrival.source.to_ip(), qpn };
        self.tell_refusal(("a datagram", peer), reason, env);
    }

    fn tell_refusal<E: Env>(&mut self, (what, peer): (&str, Peer), reason: &Reason, env: &mut E) {
        self.blame_own(reason.cause);
        let why = in_words(reason, KeyOf::Responder, env);
        let said = format!("{what} of {peer} was refused: {why}");
        let failed = &mut self.trouble().failed;
        if failed.is_none() {
            // The completion of the receive that it has taken tells of it.
            *failed = Some(Failed { cause: reason.cause, wr_id: 0, why });
        }
        env.log(format_args!(
            "queue pair {:#08x}: {said}; see `anyverbs explain {}`",
            self.qpn.get(),
            reason.cause
        ));
        self.note_difference((reason.cause, reason.key()), said);
    }

    pub(super) fn peer(&self, position: u32) -> Peer {
        let (gid, qpn) = match self.init.qp_type {
            QpType::Ud if self.sq.outstanding() > 0 => {
                let dest = self.sq.dest(position);
                (dest.av.dgid, dest.qpn)
            }
            _ => (self.attr.av.dgid, self.attr.dest_qpn),
        };
        Peer { ip: gid.to_ip(), qpn }
    }

    fn reason_of<E: Env>(&mut self, status: WcStatus, position: u32, env: &mut E) -> Reason {
        let (pd, is_ud) = (self.init.pd, self.init.qp_type == QpType::Ud);
        let sqe = *self.sq.at(position);
        let remote =
            sqe.op.remote().map(|at| MemoryRange { key: at.rkey, va: at.va, len: sqe.len.into() });
        match status {
            WcStatus::LocQpOpErr if is_ud && self.sq.dest(position).pd != pd => {
                Reason::new(Cause::AhOfOtherPd)
            }
            WcStatus::LocQpOpErr if is_ud && self.sq.dest(position).av.port != self.attr.port => {
                Reason::new(Cause::AhOfOtherPort)
            }
            WcStatus::LocQpOpErr if sqe.op.has_response() && self.init.qp_type.is_reliable() => {
                Reason::new(Cause::NoReadsGranted)
            }
            WcStatus::LocQpOpErr => Reason::new(Cause::NoSuchOperation),
            WcStatus::LocLenErr if is_ud => {
                Reason::with(Cause::DatagramTooLong, pair(sqe.len, self.mtu()))
            }
            WcStatus::LocLenErr => {
                Reason::with(Cause::FixedLength, pair(sqe.len, sqe.op.fixed_len().unwrap_or(0)))
            }
            WcStatus::LocProtErr => {
                let need =
                    if sqe.op.has_response_data() { Access::LOCAL_WRITE } else { Access::empty() };
                Reason::of_local((env.mrs(), env.memory()), self.sq.sges(position), pd, need)
            }
            WcStatus::MwBindErr => match (&sqe.op, self.trouble().bind_refused) {
                (SendOp::LocalInv(rkey), _) => {
                    Reason::with(Cause::KeyNotInvalidated, (*rkey).into())
                }
                (_, Some(error)) => Reason::of_bind(error),
                (_, None) => Reason::new(Cause::WindowNotBound),
            },
            WcStatus::RemInvReqErr => self.peers_reason(Cause::InvalidRequest, remote),
            WcStatus::RemAccessErr => self.peers_reason(Cause::RemoteAccess, remote),
            WcStatus::RemOpErr => self.peers_reason(Cause::RemoteOperation, None),
            WcStatus::RetryExcErr => self.reason_of_silence(env),
            WcStatus::RnrRetryExcErr => {
                let una = self.first_unanswered();
                let told = self.trouble().told.take();
                if told.is_some_and(|(psn, told)| psn == una && told.cause == Cause::Injected) {
                    return Reason::with(Cause::Injected, OF_PEER);
                }
                self.reason_of_no_receive(env.now())
            }
            _ => {
                let other = self.trouble.as_ref().and_then(|trouble| trouble.other_mtu);
                let value = other.map_or(0, |(mtu, len)| pair(mtu, len));
                Reason::with(Cause::BadResponse, value)
            }
        }
    }

    /// A READ's response does not have the length that it should have. If it is not the end of the message, it is as long as the
    /// path MTU of the peer.
    #[cold]
    pub(super) fn note_other_mtu(&mut self, packet: &Incoming<'_>) {
        let operation = packet.headers.bth.opcode.operation;
        let len = packet.payload.len() as u32 / packet.packets.max(1);
        let is_whole =
            matches!(operation, Operation::ReadResponseFirst | Operation::ReadResponseMiddle);
        let mtu = self.mtu();
        if is_whole && len != mtu {
            self.trouble().other_mtu = Some((mtu, len));
            let reason = Reason::with(Cause::BadResponse, pair(mtu, len));
            let said = format!("a READ to {} has failed: {reason}", self.peer(self.sq.done));
            self.note_difference((Cause::MtuDiffers, 0), said);
        }
    }

    /// The reason that the peer told of the NAK that has come, or `otherwise`.
    fn peers_reason(&mut self, otherwise: Cause, memory: Option<MemoryRange>) -> Reason {
        let una = self.first_unanswered();
        let told = self.trouble().told.take();
        // A cause of another status would be a lie of the peer. A script of its own has any.
        let fits = |told: &Told| {
            told.cause == Cause::Injected || told.cause.number() / 100 == otherwise.number() / 100
        };
        match told.filter(|(psn, told)| *psn == una && fits(told)) {
            Some((_, Told { cause: Cause::Injected, .. })) => {
                Reason { memory, ..Reason::with(Cause::Injected, OF_PEER) }
            }
            Some((_, Told { cause, value })) => Reason { memory, ..Reason::with(cause, value) },
            None => Reason { memory, ..Reason::new(otherwise) },
        }
    }

    fn reason_of_silence<E: Env>(&mut self, env: &mut E) -> Reason {
        let una = self.first_unanswered();
        let trouble = self.trouble.as_deref();
        if trouble.is_some_and(|trouble| trouble.peer_ended) {
            let pid = env.process_of_peer().unwrap_or(0);
            return Reason::with(Cause::PeerEnded, pid.into());
        }
        let silent = trouble.and_then(|trouble| trouble.silent).filter(|(psn, _)| *psn == una);
        let was_answered = una != self.attr.sq_psn;
        let no_way = self.attr.av.no_way();
        let heard = if self.awaits_reason() { env.heard(&self.attr.av, una) } else { None };
        match (heard.map(|told| told.cause), silent) {
            (Some(Cause::NobodyOnPort), _) if was_answered => Reason::new(Cause::PeerEnded),
            (Some(Cause::Injected), _) => Reason::with(Cause::Injected, OF_PEER),
            (Some(cause @ Cause::PsnDiffers), _) => {
                Reason::with(cause, self.attr.sq_psn.get().into())
            }
            (Some(Cause::NoRoute) | None, _) if no_way.is_some() => {
                Reason::with(Cause::NoRoute, no_way.map_or(0, |no_way| no_way as u64))
            }
            (Some(cause), _) => Reason::with(cause, heard.map_or(0, |told| told.value)),
            (None, _) if env.is_stopped(&self.attr.av, self.attr.dest_qpn) => {
                Reason::new(Cause::PeerStopped)
            }
            (None, None) => Reason::new(Cause::PacketLost),
            (None, Some((_, since))) => {
                let ms = env.now().since(since).as_millis().try_into().unwrap_or(u64::MAX);
                Reason::with(if was_answered { Cause::SilentNow } else { Cause::NeverAnswered }, ms)
            }
        }
    }

    /// The reason why a request of the peer cannot be executed.
    pub(super) fn reason_of_refusal<E: Env>(
        &self,
        refusal: &Refusal,
        packet: &Incoming<'_>,
        env: &E,
    ) -> Reason {
        match (refusal.nak, refusal.recv) {
            (_, WcStatus::LocLenErr) => {
                let (end, room) = self.length_of_send(packet);
                Reason::with(Cause::MessageTooLong, pair(end, room))
            }
            (_, WcStatus::LocProtErr) => self.receive_fault(env),
            (None, _) => {
                let key = packet.headers.ieth.unwrap_or(0);
                Reason::with(Cause::KeyNotInvalidated, key.into())
            }
            (Some(NakCode::RemoteAccess), _) => {
                match flushed_whole(packet, env).or_else(|| self.place_of(packet)) {
                    Some(place) => self.remote_fault(place, need(packet), env),
                    None => {
                        let srqn = packet.headers.xrceth.map_or(0, |xrceth| xrceth.srqn);
                        Reason::with(Cause::NoXrcSrq, srqn.into())
                    }
                }
            }
            _ => self.reason_of_invalid(packet),
        }
    }

    fn reason_of_invalid(&self, packet: &Incoming<'_>) -> Reason {
        let opcode = packet.headers.bth.opcode;
        let lacks = need(packet).difference(self.attr.access);
        let len = packet.payload.len() as u32;
        let mtu = self.attr.path_mtu.bytes();
        let whole = opcode.is_only() || opcode.is_last();
        let fits = if whole { len <= mtu } else { len == mtu };
        if !lacks.is_empty() && opcode.starts_message() {
            Reason::with(Cause::QpRight, lacks.bits().into())
        } else if packet.packets == 1 && !fits || packet.packets != self.packets(len) {
            Reason::with(Cause::MtuDiffers, pair(mtu, len / packet.packets.max(1)))
        } else if has_answer(opcode) && !self.has_room_for_answers() {
            Reason::with(Cause::TooManyReads, self.attr.max_dest_rd_atomic.into())
        } else if packet.headers.atomic.is_some() || opcode.operation == Operation::AtomicWrite {
            Reason { memory: self.place_of(packet), ..Reason::new(Cause::Unaligned) }
        } else {
            Reason::new(Cause::BadPacket)
        }
    }

    /// The reason why the range that a request names cannot be touched.
    pub(super) fn remote_fault<E: Env>(&self, place: MemoryRange, need: Access, env: &E) -> Reason {
        let (pd, qpn) = self.reach();
        let range = (place.va, place.len);
        let finding = env.mrs().diagnose_remote(place.key, (pd, qpn.get()), range, need);
        Reason::of_key(finding, KeyOf::Responder, pd, place).or_protected(
            env.memory(),
            need,
            || env.mrs().remote(place.key, (pd, qpn.get()), place.va, place.len, need),
        )
    }

    /// The reason why the receive in hand cannot be written.
    pub(super) fn receive_fault<E: Env>(&self, env: &E) -> Reason {
        let sges = &self.datagram_recv().sges;
        let (of, need) = ((env.mrs(), env.memory()), Access::LOCAL_WRITE);
        match self.srq.pd {
            Some(pd) => Reason::of_local(of, sges, pd, need).from_srq(),
            None => Reason::of_local(of, sges, self.reach().0, need),
        }
    }
}

/// The reason in words. Devices of a process have one table of keys, so that a key of another one is found. A sender is told whose
/// numbers they are.
pub(super) fn in_words<E: Env>(reason: &Reason, of: KeyOf, env: &E) -> String {
    match reason.domains(of).and_then(|pds| env.devices_of(pds)) {
        Some([its, own]) => {
            format!("{reason}; the memory is of device {its}, and the queue pair of {own}")
        }
        None if reason.cause == Cause::RkeyOfOtherPd && of == KeyOf::Sender => {
            format!("{reason}; both numbers are those of the peer")
        }
        None => reason.to_string(),
    }
}

/// The region or window that a FLUSH names as a whole. The range in its headers counts nothing then.
fn flushed_whole<E: Env>(packet: &Incoming<'_>, env: &E) -> Option<MemoryRange> {
    packet.headers.feth.filter(|feth| feth.selectivity == Selectivity::Mr)?;
    let key = packet.headers.reth?.rkey;
    let (va, len) = env.mrs().range_of(key)?;
    Some(MemoryRange { key, va, len })
}

/// The rights that a request needs.
fn need(packet: &Incoming<'_>) -> Access {
    let opcode = packet.headers.bth.opcode;
    match opcode.operation {
        Operation::ReadRequest => Access::REMOTE_READ,
        Operation::CompareSwap | Operation::FetchAdd => Access::REMOTE_ATOMIC,
        Operation::AtomicWrite => Access::REMOTE_WRITE,
        Operation::Flush => {
            packet.headers.feth.map_or(Access::empty(), |feth| feth.placement.rights())
        }
        _ if opcode.is_write() => Access::REMOTE_WRITE,
        _ => Access::empty(),
    }
}

fn has_answer(opcode: Opcode) -> bool {
    matches!(
        opcode.operation,
        Operation::ReadRequest
            | Operation::CompareSwap
            | Operation::FetchAdd
            | Operation::AtomicWrite
            | Operation::Flush
    )
}

/// The name of a request, as the opcode of a work request has it.
fn name(op: &SendOp) -> &'static str {
    match op {
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => "SEND",
        SendOp::Write(_) | SendOp::WriteImm(..) => "WRITE",
        SendOp::Read(_) => "READ",
        SendOp::CompareSwap { .. } | SendOp::FetchAdd { .. } => "atomic",
        SendOp::AtomicWrite { .. } => "ATOMIC WRITE",
        SendOp::Flush { .. } => "FLUSH",
        SendOp::BindMw(_) => "bind of a memory window",
        SendOp::LocalInv(_) => "local invalidation",
    }
}

/// The name of a request that came.
pub(super) fn request_name(opcode: Opcode) -> &'static str {
    match opcode.operation {
        Operation::ReadRequest => "a READ",
        Operation::CompareSwap | Operation::FetchAdd => "an atomic",
        Operation::AtomicWrite => "an ATOMIC WRITE",
        Operation::Flush => "a FLUSH",
        _ if opcode.is_write() => "a WRITE",
        _ => "a SEND",
    }
}

/// The other end.
pub(super) struct Peer {
    ip: std::net::IpAddr,
    qpn: Qpn,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "queue pair {:#08x} at {}", self.qpn.get(), self.ip)
    }
}

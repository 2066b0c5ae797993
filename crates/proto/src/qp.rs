//! Queue pair: the machines of requester and responder behind one lock.
//!
//! The device calls in, and the machines answer through [`Env`]. Nothing here blocks. Once a queue pair is ready to
//! send, it allocates only copies of packets that came out of order.

pub mod attr;
mod congestion;
mod datagram;
pub mod drops;
pub mod facts;
mod given_up;
pub mod grh;
mod joining;
pub mod lane;
pub mod pacing;
mod posting;
mod requester;
mod responder;
mod send_queue;
mod timers;
mod transition;
mod trouble;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_queue_memory::{OutOfMemory, QueueMemory};

pub use crate::arrival::Arrival;
use crate::comp_cntr::CompCntrOps;
use crate::counters::Counter;
use crate::env::{Env, LinkProps};
use crate::event::QpEvent;
use crate::mr::Access;
use crate::payload::Data;
use crate::recv_queue::RecvQueue;
use crate::time::Time;
use crate::types::{PKey, Psn, QKey, Qpn};
use crate::wc::WcStatus;
use crate::wire::bth::Bth;
use crate::wire::carried_ack;
use crate::wire::opcode::{Opcode, Operation, Service};
use crate::wire::packet::{Beginning, Headers, Malformed, Packet};
use crate::wr::{AddressVector, UdDest};
use attr::{ModifyError, ModifyLimits, QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType};
use congestion::Congestion;
use pacing::{Pacing, RateLimit};
pub use posting::PostSendError;
use requester::Requester;
pub use requester::single::{ShortSend, ShortWays};
use responder::Responder;
pub use responder::single::ShortRequest;
use responder::tag_matching::{SEND_CAP, TagMatching};
pub use responder::{OutOfOrderBytes, lending};
use send_queue::{PACKET_COST, SendQueue};
use timers::{Timer, Timers};
use trouble::Trouble;

/// The slots of a send queue that a poller gives back: those that polled completions cover (S5.1).
#[derive(Debug, Default)]
pub struct SqCredit(AtomicU32);

impl SqCredit {
    /// Takes [`crate::wc::Wc::sq_count`] of a polled completion of a send. Several threads may poll, but never two of one
    /// queue pair at once: counts come in the order of the completions.
    #[inline]
    pub fn release(&self, sq_count: u32) {
        let is_newer = |old: u32| sq_count.wrapping_sub(old).cast_signed() >= 0;
        debug_assert!(is_newer(self.0.load(Ordering::Relaxed)), "counts come in their order");
        self.0.store(sq_count, Ordering::Release);
    }

    /// The newest count that was taken.
    #[must_use]
    pub fn released(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }
}

/// A packet that came in.
#[derive(Clone, Copy, Debug)]
pub struct Incoming<'a> {
    /// Its headers.
    pub headers: Headers,
    /// Its payload, without the pad.
    pub payload: Data<'a>,
    /// The number of packets that it stands for. It is one, except if it was [joined](Self::join), and on a link that
    /// carries longer pieces than the path MTU. PSN and opcode are those of the first packet; FIRST and LAST in one make
    /// an ONLY.
    pub packets: u32,
    /// A piggybacked ACK of everything up to this PSN ([`LinkEnv::transmit`](crate::env::LinkEnv::transmit)). It is handled before the packet.
    pub acks: Option<Psn>,
}

/// An ACK of nothing: a place for packets to be read to.
impl Default for Incoming<'_> {
    fn default() -> Self {
        let ack = Opcode::new(Service::Rc, Operation::Ack);
        let headers = Headers::new(Bth::new(ack, Qpn::default(), Psn::default()));
        Self { headers, payload: Data::Bytes(&[]), packets: 1, acks: None }
    }
}

impl<'a> From<Packet<'a>> for Incoming<'a> {
    fn from(Packet { headers, payload }: Packet<'a>) -> Self {
        Self { headers, payload: Data::Bytes(payload), packets: 1, acks: None }
    }
}

impl<'a> Incoming<'a> {
    /// As [`Headers::parse_next`], in place: a packet is long to move about. After an error it is any.
    ///
    /// # Errors
    /// As [`Packet::parse`].
    #[inline]
    pub fn parse_next(&mut self, last: &mut Beginning, bytes: &'a [u8]) -> Result<(), Malformed> {
        let (bytes, acks) = carried_ack::split(bytes);
        self.payload = Data::Bytes(self.headers.parse_next(last, bytes)?);
        if acks.is_some() && !carried_ack::is_carried_by(&self.headers.bth) {
            return Err(Malformed::Length);
        }
        (self.packets, self.acks) = (1, acks);
        Ok(())
    }
}

impl Incoming<'_> {
    /// Bytes from the BTH to the pad.
    #[expect(clippy::len_without_is_empty, reason = "a packet is never empty")]
    #[must_use]
    pub fn len(&self) -> usize {
        self.headers.len() + self.payload.len() + usize::from(self.headers.bth.pad)
    }
}

/// A queue pair.
#[derive(Debug)]
pub struct Qp {
    qpn: Qpn,
    /// The one that its `pkey_index` names.
    pkey: PKey,
    init: QpInit,
    attr: QpAttr,
    sq: SendQueue,
    /// `None`: receives come from an SRQ, or there is no responder.
    rq: Option<RecvQueue>,
    srq: Srq,
    requester: Requester,
    responder: Responder,
    rate: Rate,
    timers: Timers,
    attached: Attached,
    /// Its failures. Nothing looks here before the first.
    trouble: Option<Box<Trouble>>,
}

/// The facts that a queue pair knows of the SRQ that its receives come from.
#[derive(Debug, Default)]
struct Srq {
    /// Its protection domain, which may be another one: the keys of receives are its (IBA 10.2.9.2).
    pd: Option<u32>,
    /// It matches tags, and the send queue is the device's.
    tag_matching: Option<Box<TagMatching>>,
}

/// The bounds of the rate of sends.
#[derive(Debug, Default)]
struct Rate {
    congestion: Congestion,
    /// The program's limit.
    limit: Option<Pacing>,
    /// The static rate of its path. On UD it exists once a datagram went to an address handle that has a static rate.
    path: Option<Pacing>,
}

impl Rate {
    /// Tells whether a rate limit applies.
    #[inline]
    fn is_limited(&self) -> bool {
        self.limit.is_some() || self.path.is_some()
    }
}

/// Things that the device attached to a queue pair. A reset leaves it as it is.
#[derive(Debug)]
struct Attached {
    credit: Arc<SqCredit>,
    /// Completions that a counter counts.
    counted: CompCntrOps,
    /// Counts its out-of-order buffer.
    out_of_order_bytes: Arc<OutOfOrderBytes>,
    #[cfg(feature = "general-way")]
    general_way: bool,
}

impl Default for Attached {
    fn default() -> Self {
        Self {
            credit: Arc::default(),
            counted: CompCntrOps::empty(),
            out_of_order_bytes: Arc::default(),
            #[cfg(feature = "general-way")]
            general_way: false,
        }
    }
}

impl Qp {
    /// The P_Key that its `pkey_index` names.
    #[must_use]
    pub fn pkey(&self) -> PKey {
        self.pkey
    }

    /// A queue pair in RESET.
    #[must_use]
    pub fn new(qpn: Qpn, init: &QpInit) -> Self {
        Self::in_memory(init, &QueueMemory::HEAP).expect("the heap has room").numbered(qpn)
    }

    /// As [`new`](Self::new), with queues in a program's own memory; without a number yet.
    pub fn in_memory(init: &QpInit, memory: &QueueMemory) -> Result<Self, OutOfMemory> {
        let no_dest = UdDest {
            av: AddressVector::default(),
            pd: 0,
            qpn: Qpn::default(),
            qkey: QKey::default(),
        };
        let qp_type = init.qp_type;
        let srq = qp_type.has_responder() && (init.srq || qp_type == QpType::XrcRecv);
        let mut init = QpInit { srq, ..*init };
        if srq || !qp_type.has_responder() {
            (init.cap.max_recv_wr, init.cap.max_recv_sge) = (0, 0);
        }
        if qp_type == QpType::XrcRecv {
            init.cap = QpCap::default();
        }
        let cap = &init.cap;
        let has_rq = qp_type.has_responder() && !srq;
        let rq = || RecvQueue::in_memory(cap.max_recv_wr, cap.max_recv_sge, memory);
        Ok(Self {
            qpn: Qpn::default(),
            pkey: PKey::DEFAULT,
            attr: QpAttr::default(),
            sq: SendQueue::new(cap, (qp_type == QpType::Ud).then_some(no_dest), memory)?,
            rq: has_rq.then(rq).transpose()?,
            srq: Srq::default(),
            requester: Requester::default(),
            responder: Responder::default(),
            rate: Rate::default(),
            timers: Timers::default(),
            attached: Attached::default(),
            trouble: None,
            init,
        })
    }

    /// Takes receives from an SRQ of this protection domain.
    #[must_use]
    pub fn with_srq_pd(self, pd: u32) -> Self {
        Self { srq: Srq { pd: Some(pd), ..self.srq }, ..self }
    }

    /// Counts its out-of-order buffer among those of a device, which bounds them together.
    #[must_use]
    pub fn with_out_of_order_bytes(self, out_of_order_bytes: Arc<OutOfOrderBytes>) -> Self {
        Self { attached: Attached { out_of_order_bytes, ..self.attached }, ..self }
    }

    /// Has it handle every request in the general way. The short ways of frequent requests must not be told apart from
    /// that by packets, completions or memory.
    #[cfg(feature = "general-way")]
    #[must_use]
    pub fn without_short_ways(self) -> Self {
        Self { attached: Attached { general_way: true, ..self.attached }, ..self }
    }

    /// Whether frequent requests may take a short way.
    #[inline]
    fn may_shorten(&self) -> bool {
        #[cfg(feature = "general-way")]
        return !self.attached.general_way;
        #[cfg(not(feature = "general-way"))]
        true
    }

    /// Gives it this number.
    #[must_use]
    pub fn numbered(self, qpn: Qpn) -> Self {
        Self { qpn, ..self }
    }

    /// As [`in_memory`](Self::in_memory), of a reliable connection with a tag-matching SRQ. The program posts no sends.
    pub fn with_tag_matching(init: &QpInit, memory: &QueueMemory) -> Result<Self, OutOfMemory> {
        let sq = SendQueue::new(&SEND_CAP, None, memory)?.of_the_device();
        let srq = Srq { pd: None, tag_matching: Some(Box::default()) };
        Ok(Self { sq, srq, ..Self::in_memory(init, memory)? })
    }

    /// Gives up the queues of a queue pair that gets no further calls. Their memory may be a program's, which wants it
    /// back.
    pub fn give_up_queues(&mut self) -> impl Sized + use<> {
        self.clear_out_of_order_buffer();
        let none = SendQueue::new(&QpCap::default(), None, &QueueMemory::HEAP);
        (none.ok().map(|none| std::mem::replace(&mut self.sq, none)), self.rq.take())
    }

    /// Its number.
    #[must_use]
    pub fn qpn(&self) -> Qpn {
        self.qpn
    }

    /// The number of its peer.
    #[must_use]
    #[inline]
    pub fn dest_qpn(&self) -> Qpn {
        self.attr.dest_qpn
    }

    /// Its parameters; `cap` holds the actual sizes.
    #[must_use]
    pub fn init(&self) -> &QpInit {
        &self.init
    }

    /// Limits the rate of its sends from now on (`ibv_modify_qp_rate_limit`). The caller checked it against the limits
    /// of the device. Sends that waited for the old limit leave with the next [`transmit`](Self::transmit).
    pub fn limit_rate(&mut self, limit: &RateLimit) {
        self.attr.rate_limit = limit.kbps;
        self.rate.limit = Pacing::new(limit, self.mtu());
        self.timers.stop(Timer::Rate);
    }

    fn pacers(&mut self) -> impl Iterator<Item = &mut Pacing> {
        self.rate.limit.iter_mut().chain(&mut self.rate.path)
    }

    /// Tells whether the rate limits let a packet leave now. If not, a timer runs until they do.
    fn paces_one_more<E: Env>(&mut self, env: &E) -> bool {
        if !self.rate.is_limited() {
            return true;
        }
        let wait = self.pacers().find_map(|pacing| pacing.wait(env.now()));
        self.note_wait(wait, env)
    }

    fn note_wait<E: Env>(&mut self, wait: Option<Duration>, env: &E) -> bool {
        if let Some(wait) = wait {
            self.timers.start(Timer::Rate, env.now(), wait);
        }
        wait.is_none()
    }

    fn note_paced<E: Env>(&mut self, bytes: u32, env: &E) {
        if self.rate.is_limited() {
            let bytes = bytes.saturating_add(PACKET_COST as u32);
            self.pacers().for_each(|pacing| pacing.note_sent(bytes, env.now()));
        }
    }

    /// From now on [`CompletionEnv::count_completion`](crate::env::CompletionEnv::count_completion) is called for these, too. Before RTR.
    pub fn count(&mut self, ops: CompCntrOps) {
        self.attached.counted |= ops;
    }

    fn count_completion<E: Env>(&self, op: CompCntrOps, bytes: u32, failed: bool, env: &mut E) {
        if self.attached.counted.intersects(op) {
            env.count_completion(op, bytes, failed);
        }
    }

    /// Its attributes now (`ibv_query_qp`).
    #[must_use]
    pub fn attr(&self) -> QpAttr {
        QpAttr { cur_state: self.attr.state, ..self.attr }
    }

    /// Its state now.
    #[must_use]
    pub fn state(&self) -> QpState {
        self.attr.state
    }

    /// Tells whether it is in SQD and sends still wait for their answers.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.attr.state == QpState::Sqd && !self.requester.is_drained()
    }

    /// The place where a poller hands back send slots, without the queue pair's lock.
    #[must_use]
    pub fn sq_credit(&self) -> Arc<SqCredit> {
        Arc::clone(&self.attached.credit)
    }

    /// Gives all send slots back after a move to RESET, once the completion queues hold none of its completions: then no
    /// poller gives some back meanwhile.
    pub fn free_send_slots(&self) {
        self.attached.credit.release(self.sq.head());
    }

    /// `ibv_modify_qp`. On an error nothing is changed. The move to ERR flushes both queues. After a move to RESET the
    /// device purges the completion queues and calls [`free_send_slots`](Self::free_send_slots). Call [`transmit_rest`](Self::transmit_rest) when the path that
    /// `attr` names is ready: a NAK may wait.
    pub fn modify<E: Env>(
        &mut self,
        attr: &QpAttr,
        mask: QpAttrMask,
        limits: &ModifyLimits,
        env: &mut E,
    ) -> Result<(), ModifyError> {
        let from = self.attr.state;
        let to = transition::check(self.init.qp_type, from, attr, mask, limits, &self.attr)?;
        if matches!(to, QpState::Reset | QpState::Err) {
            // Executed requests stay executed, so the peer gets their ACK.
            self.clear_out_of_order_buffer();
            self.send_owed_ack(env);
        }
        self.assign(attr, mask);
        if mask.contains(QpAttrMask::PKEY_INDEX) {
            let pkey = limits.pkeys.get(usize::from(attr.pkey_index));
            self.pkey = *pkey.expect("the index was checked");
        }
        match to {
            QpState::Reset => self.reset(),
            QpState::Err => {
                self.blame(Cause::MovedToError);
                self.enter_error(env);
            }
            _ => {
                self.attr.state = to;
                match (from, to) {
                    (QpState::Init, QpState::Rtr) => {
                        if self.init.qp_type == QpType::Ud {
                            self.attr.path_mtu = limits.max_mtu;
                        }
                        self.start_responder(self.attr.rq_psn);
                    }
                    (QpState::Rtr, QpState::Rts) => self.start_requester(self.attr.sq_psn),
                    (QpState::Sqe, QpState::Rts) => self.forget_trouble(),
                    (_, QpState::Sqd) if from != QpState::Sqd => self.requester.begin_drain(),
                    _ => {}
                }
                if matches!(to, QpState::Rts | QpState::Sqd) {
                    self.after_completion(env);
                    self.transmit(env);
                }
            }
        }
        Ok(())
    }

    fn assign(&mut self, from: &QpAttr, mask: QpAttrMask) {
        use QpAttrMask as M;
        let to = &mut self.attr;
        macro_rules! take {
            ($($bit:ident: $($field:ident),+;)+) => {
                $(if mask.contains(M::$bit) { $(to.$field = from.$field;)+ })+
            };
        }
        take! {
            EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
            ACCESS_FLAGS: access;
            PKEY_INDEX: pkey_index;
            PORT: port;
            QKEY: qkey;
            AV: av;
            PATH_MTU: path_mtu;
            TIMEOUT: timeout;
            RETRY_CNT: retry_cnt;
            RNR_RETRY: rnr_retry;
            RQ_PSN: rq_psn;
            MAX_QP_RD_ATOMIC: max_rd_atomic;
            MIN_RNR_TIMER: min_rnr_timer;
            SQ_PSN: sq_psn;
            MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
            DEST_QPN: dest_qpn;
        }
        if mask.contains(M::AV) || mask.contains(M::PATH_MTU) {
            self.rate.path = Pacing::of_path(self.attr.av.static_rate, self.mtu());
        }
        if mask.contains(M::RATE_LIMIT) {
            self.limit_rate(&RateLimit { kbps: from.rate_limit, ..RateLimit::default() });
        }
        self.requester.set_retries(
            mask.contains(M::RETRY_CNT).then_some(from.retry_cnt),
            mask.contains(M::RNR_RETRY).then_some(from.rnr_retry),
        );
        if mask.contains(M::MAX_DEST_RD_ATOMIC) {
            self.responder.set_depth(from.max_dest_rd_atomic);
        }
    }

    /// All is forgotten; no completion is made (IBA 10.3.1.1).
    fn reset(&mut self) {
        self.attr = QpAttr::default();
        self.pkey = PKey::DEFAULT;
        self.sq.clear();
        self.requester = Requester::default();
        (self.rate.limit, self.rate.path) = (None, None);
        self.timers = Timers::default();
        self.forget_receives();
        self.forget_trouble();
    }

    /// ERR: everything that waits is flushed, in posting order per queue (IBA 10.3.1.6, S1.3).
    fn enter_error<E: Env>(&mut self, env: &mut E) {
        if self.attr.state != QpState::Err {
            self.attr.state = QpState::Err;
            self.flush_sends(env);
            self.flush_receives(env);
        }
    }

    /// Tells whether the peer may execute requests by itself ([`LinkEnv::direct`](crate::env::LinkEnv::direct)), and with which rights. It may if the
    /// responder would execute a request now without an event. In RTR the first message raises `COMM_EST`, so it has to
    /// arrive.
    #[must_use]
    pub fn open_to_direct(&self) -> Option<Access> {
        let open = match self.attr.state {
            QpState::Rtr => self.responder.established,
            QpState::Rts | QpState::Sqd | QpState::Sqe => true,
            QpState::Reset | QpState::Init | QpState::Err => false,
        };
        // An XRC target's requests are checked against the SRQ that each one names. Operations that the peer does by
        // itself are not counted here.
        let remote = CompCntrOps::REMOTE_RDMA_READ | CompCntrOps::REMOTE_RDMA_WRITE;
        if !open
            || !matches!(self.init.qp_type, QpType::Rc | QpType::Uc)
            || self.attached.counted.intersects(remote)
        {
            return None;
        }
        let mut access = self.attr.access;
        access.set(
            Access::REMOTE_READ,
            access.contains(Access::REMOTE_READ) && self.attr.max_dest_rd_atomic > 0,
        );
        Some(access)
    }

    /// Sends all that may be sent now: requests, READ responses that were held back, and an ACK that is owed if
    /// anything else went out. Call it after posting, and when a path that was blocked has room again.
    pub fn transmit<E: Env>(&mut self, env: &mut E) {
        // The sends may now wait for another reason than the rate. Then the moment of the rate would stay the deadline
        // after it has passed.
        self.timers.stop(Timer::Rate);
        // A program expects its own send to be complete when the reply comes. So the ACK leaves before the requests, unless
        // one of them carries it, or it shares a batch with them, of which the receiver takes it first.
        let &LinkProps { immediate, carries_acks, batch, .. } = env.props();
        let leaves_first = !immediate && !carries_acks && batch == 0;
        if leaves_first && self.responder.owes_ack() && self.has_unsent() {
            self.send_owed_ack(env);
        }
        let sent = match self.init.qp_type {
            QpType::Ud => self.send_datagrams(env),
            QpType::Uc | QpType::XrcSend => self.send_requests(env),
            QpType::Rc => self.send_kept(env) | self.send_requests(env),
            QpType::XrcRecv => self.send_kept(env),
        };
        if sent && self.responder.owes_ack() {
            self.send_owed_ack(env);
        }
    }

    /// Takes a packet whose ICRC is right and whose destination QPN is this queue pair's (or the multicast QPN). A bad
    /// packet at worst causes a count. Sends what the packet makes room for (as [`transmit`](Self::transmit)), but
    /// delays the ACK: see [`owes_ack`](Self::owes_ack).
    pub fn receive<E: Env>(&mut self, arrival: &Arrival, packet: &Incoming<'_>, env: &mut E) {
        let Data::Joined(joined) = packet.payload else {
            return self.receive_single(arrival, packet, env);
        };
        if self.execute_joined(arrival, packet, env) {
            self.responder.takes_acks = carried_ack::takes(&packet.headers.bth);
            return self.transmit_rest(env);
        }
        // Something is unusual about one of them.
        for packet in joined.packets() {
            self.receive_single(arrival, &packet.into(), env);
        }
    }

    /// As [`receive`](Self::receive), of a packet that was not joined.
    fn receive_single<E: Env>(&mut self, arrival: &Arrival, packet: &Incoming<'_>, env: &mut E) {
        let bth = &packet.headers.bth;
        let service = self.init.qp_type.service();
        let notifies = bth.opcode.service == Service::Cnp;
        if !self.attr.state.receives() || (bth.opcode.service != service && !notifies) {
            self.note_before_rtr(packet);
            self.note_crossed(bth, env);
            self.explain_drop(arrival, packet, env);
            return env.count(Counter::DropQpState, 1);
        }
        if !bth.pkey.matches(self.pkey) {
            return self.drop_of_partition(arrival, packet, env);
        }
        if notifies {
            return self.receive_notification(arrival, env);
        }
        if service == Service::Ud {
            return self.receive_datagram(arrival, packet, env);
        }
        // Only the peer may touch a connection, and only on the path that it is on.
        if !arrival.is_from(&self.attr.av) {
            self.explain_drop(arrival, packet, env);
            return env.count(Counter::DropForeign, 1);
        }
        if arrival.is_marked() {
            self.note_mark(env);
        }
        if let Some(psn) = packet.acks {
            self.receive_ack(psn, env);
            if self.attr.state == QpState::Err {
                // The retries ran out with it: the request has come too late.
                return env.count(Counter::DropQpState, 1);
            }
        }
        let is_response = bth.opcode.is_response();
        if self.execute_single(packet, env) {
            // The likely request.
            self.responder.takes_acks = carried_ack::takes(bth);
        } else if is_response {
            self.receive_response(packet, env);
        } else {
            self.receive_request(arrival, packet, env);
        }
        // The requests for which many responses make room leave together.
        if !(is_response && env.more_follow()) {
            self.transmit_rest(env);
        }
    }

    /// As [`transmit`](Self::transmit), if there is anything to send.
    #[inline]
    pub fn transmit_rest<E: Env>(&mut self, env: &mut E) {
        if self.has_to_send() {
            self.transmit(env);
        }
    }

    /// Tells whether [`transmit`](Self::transmit) might send a packet now.
    #[inline]
    fn has_to_send(&self) -> bool {
        self.sq.next != self.sq.head() || self.keeps_any() || self.rate.is_limited()
    }

    /// Tells whether a delayed ACK waits. The device calls [`acknowledge`](Self::acknowledge) soon, best after the last
    /// packet received. So one ACK answers many packets or goes along with the program's reply. An ACK that has to wait
    /// for answers before it does not count: it leaves behind them, with no call of its own.
    #[must_use]
    pub fn owes_ack(&self) -> bool {
        self.responder.may_acknowledge()
    }

    /// Tells whether the peers take turns and the last message was the other's. Then the program's reply is likely to
    /// come soon and to carry the ACK.
    #[must_use]
    pub fn may_piggyback(&self) -> bool {
        self.responder.may_piggyback()
    }

    /// Sends the ACK that is owed, if any, or in its place the NAK of a packet that is missing after those which it would
    /// acknowledge.
    pub fn acknowledge<E: Env>(&mut self, env: &mut E) {
        self.send_owed_ack(env);
    }

    /// Sends the last packets before the queue pair, or its process, ends. These are the ACK that is owed, and once
    /// more the last one, since a packet lost now is lost for good. A peer that has it already takes it for a duplicate
    /// (IBA 9.7.5.1.1).
    pub fn repeat_last_answers<E: Env>(&mut self, env: &mut E) {
        self.clear_out_of_order_buffer();
        self.acknowledge(env);
        self.send_last_ack(env);
    }

    /// When [`on_timer`](Self::on_timer) must be called at the latest. It may move with every call.
    #[must_use]
    pub fn deadline(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Runs the timers that are due at `env.now()`.
    ///
    /// Tells whether the peer was silent: a probe timeout or an ACK timeout has ended.
    pub fn on_timer<E: Env>(&mut self, env: &mut E) -> bool {
        let now = env.now();
        let mut was_silent = false;
        for timer in Timer::ALL {
            let Some(expired) = self.timers.expire(timer, now) else { continue };
            was_silent |= matches!(timer, Timer::Probe | Timer::Ack);
            match timer {
                Timer::Probe => self.on_probe_timeout(expired, env),
                Timer::Ack => self.on_ack_timeout(expired, env),
                // The transmission below goes on with all that waited for it.
                Timer::RnrWait | Timer::Responses | Timer::Rate => {}
            }
        }
        self.transmit(env);
        was_silent
    }

    /// The device lost the queue pair's ground, such as a CQ that overran: moves to ERR with [`QpEvent::Fatal`].
    pub fn fail<E: Env>(&mut self, cause: Cause, env: &mut E) {
        if self.attr.state != QpState::Err {
            self.blame_own(cause);
            env.raise(QpEvent::Fatal);
            self.enter_error(env);
        }
    }

    /// The send queue of an unreliable queue pair in RTS lost its ground: moves to SQE, in which receives go on. No event tells of it.
    pub fn fail_sends<E: Env>(&mut self, cause: Cause, env: &mut E) {
        if self.attr.state == QpState::Rts && !self.init.qp_type.is_reliable() {
            self.blame_own(cause);
            self.attr.state = QpState::Sqe;
            self.flush_sends(env);
        }
    }

    /// The link knows that the peer's process has ended. Requests that wait for it fail now, as they would when the
    /// retries had run out.
    pub fn peer_gone<E: Env>(&mut self, env: &mut E) {
        let sends = matches!(self.attr.state, QpState::Rts | QpState::Sqd);
        if sends && self.init.qp_type.is_reliable() && self.sq.outstanding() > 0 {
            env.count(Counter::RetryExceeded, 1);
            self.note_peer_ended();
            self.fail_oldest(WcStatus::RetryExcErr, env);
        }
    }

    /// Tells whether requests wait for an answer. Such queue pairs share their path's window.
    #[must_use]
    pub fn is_in_flight(&self) -> bool {
        self.awaits_answer()
    }

    /// The first packet in RTR says that the peer is there (IBA 11.6.3.1).
    fn note_established<E: Env>(&mut self, env: &mut E) {
        if self.attr.state == QpState::Rtr && !self.responder.established {
            self.responder.established = true;
            env.raise(QpEvent::CommEst);
        }
    }

    fn mtu(&self) -> u32 {
        self.attr.path_mtu.bytes()
    }

    /// The number of packets of the path MTU that a message or piece of `len` bytes fills. An empty one is a packet,
    /// too. The MTU is a power of two, which the compiler does not know.
    fn packets(&self, len: u32) -> u32 {
        let mtu = self.mtu();
        debug_assert!(mtu.is_power_of_two());
        ((len >> mtu.trailing_zeros()) + u32::from(len & (mtu - 1) != 0)).max(1)
    }

    /// Longest payload of one piece: whole packets of the path MTU, one at least.
    fn segment<E: Env>(&self, env: &E) -> u32 {
        let mtu = self.mtu();
        if self.rate.is_limited() {
            return mtu;
        }
        (env.props().segment & !(mtu - 1)).max(mtu)
    }

    /// The base header of a packet to the peer; the opcode is to be replaced.
    fn bth(&self, psn: Psn) -> Bth {
        Bth {
            opcode: Opcode::new(Service::Rc, Operation::Ack),
            solicited: false,
            migreq: true,
            pad: 0,
            pkey: self.pkey,
            fecn: false,
            becn: false,
            reserved: Bth::OURS,
            dest_qpn: self.attr.dest_qpn,
            ack_req: false,
            resv7: 0,
            psn,
        }
    }
}

#[cfg(test)]
mod tests;

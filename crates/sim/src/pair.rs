//! Two connected queue pairs.

use std::ops::{Deref, DerefMut};
use std::time::Duration;

use anyverbs_proto::event::QpEvent;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState, QpType};
use anyverbs_proto::wc::{Wc, WcStatus};
use anyverbs_proto::wr::{RecvWr, SendFlags, SendOp, SendWr, Sge};

use crate::device::{CqId, DeviceId, Event, Mr, QpId, SrqId};
use crate::options::QpOptions;
use crate::sim::Sim;

/// One side of a [`Pair`].
#[derive(Clone, Copy, Debug)]
pub struct End {
    /// Device.
    pub device: DeviceId,
    /// Protection domain.
    pub pd: u32,
    /// Completions of sends.
    pub send_cq: CqId,
    /// Completions of receives.
    pub recv_cq: CqId,
    /// The source of receives, if they are shared.
    pub srq: Option<SrqId>,
    /// Queue pair.
    pub qp: QpId,
    /// 128 KiB, everything allowed, filled with noise that is another one at the other end.
    pub mr: Mr,
}

/// Two devices with a queue pair each, connected to the other and ready to send.
#[derive(Debug)]
pub struct Pair {
    sim: Sim,
    /// One side.
    pub a: End,
    /// The other.
    pub b: End,
}

impl Deref for Pair {
    type Target = Sim;
    fn deref(&self) -> &Sim {
        &self.sim
    }
}

impl DerefMut for Pair {
    fn deref_mut(&mut self) -> &mut Sim {
        &mut self.sim
    }
}

impl Sim {
    /// A queue pair in RESET with everything around it.
    pub fn end(&mut self, device: DeviceId, options: &QpOptions) -> End {
        let pd = self.pd(device);
        let send_cq = self.cq(device, options.cqe);
        let recv_cq = self.cq(device, options.cqe);
        let max_sge = options.cap.max_recv_sge;
        let (srq, qp) = if options.qp_type == QpType::XrcRecv {
            let max_wr = options.srq.unwrap_or(options.cap.max_recv_wr);
            // There is a domain for each end, with the number of the protection domain.
            let srq = self.xrc_srq(pd, pd, recv_cq, max_wr, max_sge);
            (Some(srq), self.xrc_target(pd, recv_cq, options))
        } else {
            let srq = options.srq.map(|max_wr| self.srq(device, max_wr, max_sge));
            (srq, self.qp(pd, send_cq, recv_cq, srq, options))
        };
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let mr = self.mr(device, pd, 128 << 10, access);
        self.fill(mr, mr.addr);
        End { device, pd, send_cq, recv_cq, srq, qp, mr }
    }

    /// Brings two queue pairs from RESET to RTS, each with its options except the type, which it already has. They may
    /// be on one device.
    pub fn connect(&mut self, a: (QpId, &QpOptions), b: (QpId, &QpOptions)) {
        for ((qp, mine), (peer, theirs)) in [(a, b), (b, a)] {
            self.to_init(qp, mine);
            self.to_rtr(qp, mine, peer, theirs);
            self.to_rts(qp, mine);
        }
    }

    /// RESET to INIT.
    pub fn to_init(&mut self, qp: QpId, options: &QpOptions) {
        use QpAttrMask as M;
        let attr = QpAttr {
            state: QpState::Init,
            port: 1,
            access: options.access & !Access::LOCAL_WRITE,
            qkey: options.qkey,
            ..QpAttr::default()
        };
        let datagrams = self.get(qp).init().qp_type == QpType::Ud;
        let by_type = if datagrams { M::QKEY } else { M::ACCESS_FLAGS };
        let mask = M::STATE | M::PKEY_INDEX | M::PORT | by_type;
        self.modify(qp, &attr, mask).expect("RESET to INIT");
    }

    /// INIT to RTR.
    pub fn to_rtr(&mut self, qp: QpId, mine: &QpOptions, peer: QpId, theirs: &QpOptions) {
        use QpAttrMask as M;
        let attr = QpAttr {
            state: QpState::Rtr,
            av: self.av(qp.device, peer.device),
            path_mtu: mine.mtu,
            dest_qpn: self.get(peer).qpn(),
            rq_psn: theirs.sq_psn,
            max_dest_rd_atomic: mine.max_dest_rd_atomic,
            min_rnr_timer: mine.min_rnr_timer,
            ..QpAttr::default()
        };
        let connected = M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        let by_type = match self.get(qp).init().qp_type {
            QpType::Rc | QpType::XrcRecv => connected | M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER,
            QpType::Uc | QpType::XrcSend => connected,
            QpType::Ud => M::empty(),
        };
        self.modify(qp, &attr, M::STATE | by_type).expect("INIT to RTR");
    }

    /// RTR to RTS.
    pub fn to_rts(&mut self, qp: QpId, options: &QpOptions) {
        use QpAttrMask as M;
        let attr = QpAttr {
            state: QpState::Rts,
            timeout: options.timeout,
            retry_cnt: options.retry_cnt,
            rnr_retry: options.rnr_retry,
            sq_psn: options.sq_psn,
            max_rd_atomic: options.max_rd_atomic,
            ..QpAttr::default()
        };
        let by_type = match self.get(qp).init().qp_type {
            QpType::Rc | QpType::XrcSend => {
                M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC
            }
            QpType::XrcRecv => M::TIMEOUT,
            QpType::Uc | QpType::Ud => M::empty(),
        };
        self.modify(qp, &attr, M::STATE | M::SQ_PSN | by_type).expect("RTR to RTS");
    }
}

impl Pair {
    /// Two ends with the same options.
    #[must_use]
    pub fn new(seed: u64, options: QpOptions) -> Self {
        Self::with(seed, options, options)
    }

    /// Two ends, each with its own options.
    #[must_use]
    pub fn with(seed: u64, a: QpOptions, b: QpOptions) -> Self {
        let mut sim = Sim::new(seed);
        let devices = [sim.device(), sim.device()];
        Self::on(sim, devices, a, b)
    }

    /// Two ends on devices of this simulation.
    #[must_use]
    pub fn on(mut sim: Sim, devices: [DeviceId; 2], a: QpOptions, b: QpOptions) -> Self {
        let end_a = sim.end(devices[0], &a);
        let end_b = sim.end(devices[1], &b);
        let mut this = Self { sim, a: end_a, b: end_b };
        if a.has_lanes() && b.has_lanes() {
            this.connect_with_lanes(a, b);
        } else {
            this.sim.connect((end_a.qp, &a), (end_b.qp, &b));
        }
        this
    }

    /// Connects the ends, with a lane each way. An empty SEND starts the ACK timer, without which a SEND takes no lane. What follows
    /// begins with the PSNs of the options.
    fn connect_with_lanes(&mut self, a: QpOptions, b: QpOptions) {
        let ends = self.ends();
        let before = |end: QpOptions| QpOptions { sq_psn: end.sq_psn.prev(), ..end };
        self.sim.connect((ends.0.qp, &before(a)), (ends.1.qp, &before(b)));
        self.use_long_lanes();
        for (from, to) in [ends, (ends.1, ends.0)] {
            self.sim.open_lane(from.qp);
            self.recv(to, 0, &[]);
            self.post(from, 0, SendOp::Send, &[]);
            self.run_for(Duration::from_micros(100));
            let both = (self.sent(from), self.received(to));
            assert_eq!(both, (vec![(0, WcStatus::Success)], vec![(0, WcStatus::Success)]));
        }
        self.net.trace.clear();
    }

    /// Both ends.
    #[must_use]
    pub fn ends(&self) -> (End, End) {
        (self.a, self.b)
    }

    fn peer(&self, end: End) -> End {
        if end.qp == self.a.qp { self.b } else { self.a }
    }

    /// Posts a signaled request to the other end.
    ///
    /// # Panics
    /// If it is refused.
    pub fn post(&mut self, end: End, wr_id: u64, op: SendOp, sges: &[Sge]) {
        let posted = self.try_post(end, wr_id, op, SendFlags::SIGNALED, sges);
        posted.expect("there is room");
    }

    /// Posts a request to the other end, with these flags alone.
    pub fn try_post(
        &mut self,
        end: End,
        wr_id: u64,
        op: SendOp,
        flags: SendFlags,
        sges: &[Sge],
    ) -> Result<(), PostSendError> {
        let datagram = self.get(end.qp).init().qp_type == QpType::Ud;
        let peer = self.peer(end);
        let ud = datagram.then(|| self.dest(end.qp, peer.qp));
        let xrc_srqn = peer.srq.map_or(0, |srq| self.srqn(srq));
        self.sim.post_send(end.qp, &SendWr { wr_id, op, flags, sges, ud, xrc_srqn })
    }

    /// Posts a receive, to the end's shared receive queue if it has one.
    ///
    /// # Panics
    /// If it is refused.
    pub fn recv(&mut self, end: End, wr_id: u64, sges: &[Sge]) {
        let wr = RecvWr { wr_id, sges };
        let posted = match end.srq {
            Some(srq) => self.sim.post_srq_recv(srq, &wr),
            None => self.sim.post_recv(end.qp, &wr),
        };
        posted.expect("there is room");
    }

    /// Polls the completions of an end's sends.
    pub fn sends(&mut self, end: End) -> Vec<Wc> {
        self.poll(end.send_cq)
    }

    /// Polls the completions of an end's receives.
    pub fn recvs(&mut self, end: End) -> Vec<Wc> {
        self.poll(end.recv_cq)
    }

    /// Polls the completions of an end's sends: identity and status.
    pub fn sent(&mut self, end: End) -> Vec<(u64, WcStatus)> {
        self.sends(end).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    /// Polls the completions of an end's receives: identity and status.
    pub fn received(&mut self, end: End) -> Vec<(u64, WcStatus)> {
        self.recvs(end).iter().map(|wc| (wc.wr_id, wc.status)).collect()
    }

    /// State of an end's queue pair.
    #[must_use]
    pub fn state(&self, end: End) -> QpState {
        self.get(end.qp).state()
    }

    /// The events of an end's queue pair since the last call; those of others are lost.
    pub fn qp_events(&mut self, end: End) -> Vec<QpEvent> {
        let of_it = |event| match event {
            Event::Qp(qp, event) if qp == end.qp => Some(event),
            _ => None,
        };
        self.events(end.device).into_iter().filter_map(of_it).collect()
    }
}

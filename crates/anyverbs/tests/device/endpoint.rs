//! One side of a connection, for tests.

use std::sync::Once;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_testing::UdpPort;

/// A registry and a port of this test process and its children alone, over the loopback.
pub(crate) fn isolate() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let pid = std::process::id();
        for (name, value) in [
            ("ANYVERBS_REGISTRY", format!("anyverbs-test-{pid}")),
            ("ANYVERBS_UDP_PORT", UdpPort::of_this_process().to_string()),
            ("ANYVERBS_INTERFACES", "lo".into()),
            ("ANYVERBS_SHM", "1".into()),
        ] {
            if std::env::var_os(name).is_none() {
                // SAFETY: before the first open; nothing else in these tests writes the environment.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

pub(crate) fn context() -> Context {
    isolate();
    Context::open(&devices().unwrap()[0].name).unwrap()
}

/// Registered memory that lives as long as the region.
pub(crate) struct Buffer {
    pub(crate) mr: Mr,
    bytes: *mut u8,
    len: usize,
}

// SAFETY: access is by raw pointer only.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(pd: &Pd, len: usize) -> Self {
        let all = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        Self::with_access(pd, len, all)
    }

    pub(crate) fn with_access(pd: &Pd, len: usize, access: Access) -> Self {
        let bytes =
            Box::leak(vec![0u64; len.div_ceil(8)].into_boxed_slice()).as_mut_ptr().cast::<u8>();
        // SAFETY: leaked memory, used by raw pointer only.
        unsafe { Self::of(pd, bytes, len, access) }
    }

    /// # Safety
    /// `len` bytes that stay, and that have no reference.
    pub(crate) unsafe fn of(pd: &Pd, bytes: *mut u8, len: usize, access: Access) -> Self {
        // SAFETY: the caller's promise.
        let mr = unsafe { pd.reg_mr(bytes as u64, len as u64, bytes as u64, access) }.unwrap();
        Self { mr, bytes, len }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.bytes as u64
    }

    pub(crate) fn write(&self, at: usize, data: &[u8]) {
        assert!(at + data.len() <= self.len);
        // SAFETY: inside the leaked allocation.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.bytes.add(at), data.len()) };
    }

    pub(crate) fn read(&self, at: usize, len: usize) -> Vec<u8> {
        assert!(at + len <= self.len);
        let mut data = vec![0; len];
        // SAFETY: inside the leaked allocation.
        unsafe { std::ptr::copy_nonoverlapping(self.bytes.add(at), data.as_mut_ptr(), len) };
        data
    }

    pub(crate) fn sge(&self, at: usize, len: usize) -> Sge {
        Sge { addr: self.addr() + at as u64, len: len as u32, lkey: self.mr.lkey() }
    }

    pub(crate) fn remote(&self, at: usize) -> RemoteAddr {
        RemoteAddr { va: self.addr() + at as u64, rkey: self.mr.rkey() }
    }
}

pub(crate) struct Endpoint {
    pub(crate) context: Context,
    pub(crate) pd: Pd,
    pub(crate) channel: CompChannel,
    pub(crate) cq: Cq,
    pub(crate) qp: Qp,
    pub(crate) qp_type: QpType,
    pub(crate) port: u8,
}

/// The data that the other side needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Address {
    pub(crate) gid: Gid,
    pub(crate) qpn: Qpn,
}

pub(crate) const QKEY: QKey = QKey(0x1234);
pub(crate) const CAP: QpCap = QpCap {
    max_send_wr: 64,
    max_recv_wr: 64,
    max_send_sge: 4,
    max_recv_sge: 4,
    max_inline_data: 64,
};

impl Endpoint {
    pub(crate) fn new(qp_type: QpType) -> Self {
        Self::with(qp_type, CAP, 256)
    }

    pub(crate) fn with(qp_type: QpType, cap: QpCap, cqe: u32) -> Self {
        Self::of(context(), qp_type, cap, cqe)
    }

    /// One on a device.
    pub(crate) fn on(context: Context, qp_type: QpType) -> Self {
        Self::of(context, qp_type, CAP, 256)
    }

    fn of(context: Context, qp_type: QpType, cap: QpCap, cqe: u32) -> Self {
        let pd = context.alloc_pd().unwrap();
        let channel = context.create_comp_channel().unwrap();
        let cq = context.create_cq(cqe, Some(&channel), 0, 7).unwrap();
        let qp = create_qp(&context, &pd, &cq, cap, qp_type);
        Self { context, pd, channel, cq, qp, qp_type, port: 1 }
    }

    /// One on a port of a device.
    pub(crate) fn on_port(context: Context, port: u8, qp_type: QpType) -> Self {
        Self { port, ..Self::on(context, qp_type) }
    }

    /// One more queue pair with the same protection domain and completion queue.
    pub(crate) fn another(&self) -> Qp {
        create_qp(&self.context, &self.pd, &self.cq, CAP, self.qp_type)
    }

    pub(crate) fn address(&self) -> Address {
        Address { gid: self.context.gid(self.port, 0).unwrap().unwrap().gid, qpn: self.qp.qpn() }
    }

    pub(crate) fn av(&self, to: Address) -> AddressVector {
        let (dgid, port) = (to.gid, self.port);
        let attr = AhAttr { dgid, hop_limit: 64, is_global: true, port, ..AhAttr::default() };
        self.context.resolve(&attr).unwrap()
    }

    /// The destination of datagrams to a peer.
    pub(crate) fn dest(&self, to: Address) -> UdDest {
        UdDest::new(self.pd.number(), self.av(to), to.qpn, QKEY)
    }

    /// Moves it to INIT, RTR and RTS.
    pub(crate) fn connect(&self, peer: Address) {
        self.connect_with(peer, 14, 7);
    }

    /// As [`connect`](Self::connect), with this ACK timeout and number of retries.
    pub(crate) fn connect_with(&self, peer: Address, timeout: u8, retry_cnt: u8) {
        self.connect_qp(&self.qp, peer, timeout, retry_cnt);
    }

    /// As [`connect_with`](Self::connect_with), for [`another`](Self::another) queue pair.
    pub(crate) fn connect_qp(&self, qp: &Qp, peer: Address, timeout: u8, retry_cnt: u8) {
        self.connect_at(qp, peer, (timeout, retry_cnt), (Mtu::Mtu4096, Psn::new(100)));
    }

    /// As [`connect_qp`](Self::connect_qp), with an MTU and a first PSN of both directions.
    pub(crate) fn connect_at(
        &self,
        qp: &Qp,
        peer: Address,
        (timeout, retry_cnt): (u8, u8),
        (mtu, psn): (Mtu, Psn),
    ) {
        self.qp_to_init(qp);
        self.qp_to_rtr(qp, peer, mtu, psn);
        self.qp_to_rts(qp, timeout, retry_cnt, psn);
    }

    /// As [`connect_with`](Self::connect_with), with an index of the P_Key table.
    pub(crate) fn connect_in(&self, pkey_index: u16, peer: Address, timeout: u8, retry_cnt: u8) {
        self.qp_to_init(&self.qp);
        let attr = QpAttr { pkey_index, ..QpAttr::default() };
        self.qp.modify(&attr, QpAttrMask::PKEY_INDEX).unwrap();
        self.qp_to_rtr(&self.qp, peer, Mtu::Mtu4096, Psn::new(100));
        self.qp_to_rts(&self.qp, timeout, retry_cnt, Psn::new(100));
    }

    pub(crate) fn to_init(&self) {
        self.qp_to_init(&self.qp);
    }

    fn qp_to_init(&self, qp: &Qp) {
        use QpAttrMask as M;
        let access = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        let (state, port) = (QpState::Init, self.port);
        let attr = QpAttr { state, port, access, qkey: QKEY, ..QpAttr::default() };
        let by_type = if self.qp_type == QpType::Ud { M::QKEY } else { M::ACCESS_FLAGS };
        qp.modify(&attr, M::STATE | M::PKEY_INDEX | M::PORT | by_type).unwrap();
    }

    pub(crate) fn to_rtr(&self, peer: Address) {
        self.qp_to_rtr(&self.qp, peer, Mtu::Mtu4096, Psn::new(100));
    }

    fn qp_to_rtr(&self, qp: &Qp, peer: Address, path_mtu: Mtu, rq_psn: Psn) {
        use QpAttrMask as M;
        let mut mask = M::STATE;
        if self.qp_type != QpType::Ud {
            mask |= M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
        }
        if self.qp_type == QpType::Rc {
            mask |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
        }
        let attr = QpAttr {
            state: QpState::Rtr,
            av: self.av(peer),
            path_mtu,
            dest_qpn: peer.qpn,
            rq_psn,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 1,
            ..QpAttr::default()
        };
        qp.modify(&attr, mask).unwrap();
    }

    fn qp_to_rts(&self, qp: &Qp, timeout: u8, retry_cnt: u8, sq_psn: Psn) {
        use QpAttrMask as M;
        let mut mask = M::STATE | M::SQ_PSN;
        if self.qp_type == QpType::Rc {
            mask |= M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
        }
        let attr = QpAttr {
            state: QpState::Rts,
            sq_psn,
            timeout,
            retry_cnt,
            rnr_retry: 7,
            max_rd_atomic: 16,
            ..QpAttr::default()
        };
        qp.modify(&attr, mask).unwrap();
    }

    pub(crate) fn send(&self, wr_id: u64, op: SendOp, sges: &[Sge]) {
        self.send_to(wr_id, op, sges, None);
    }

    pub(crate) fn send_to(&self, wr_id: u64, op: SendOp, sges: &[Sge], ud: Option<UdDest>) {
        let wr = SendWr { wr_id, op, flags: SendFlags::SIGNALED, sges, ud, xrc_srqn: 0 };
        self.qp.post_send(&[wr]).unwrap();
    }

    pub(crate) fn recv(&self, wr_id: u64, sges: &[Sge]) {
        self.qp.post_recv(&[RecvWr { wr_id, sges }]).unwrap();
    }

    /// Polls until `n` completions are there.
    pub(crate) fn poll(&self, n: usize) -> Vec<Wc> {
        self.poll_for(n, Duration::from_secs(10))
    }

    pub(crate) fn poll_for(&self, n: usize, timeout: Duration) -> Vec<Wc> {
        let begin = Instant::now();
        let mut all = Vec::new();
        while all.len() < n {
            let mut wcs = [Wc::default(); 16];
            let got = self.cq.poll(&mut wcs).unwrap();
            all.extend_from_slice(&wcs[..got]);
            assert!(begin.elapsed() < timeout, "{} of {n} completions: {all:?}", all.len());
        }
        all
    }

    /// Waits for `n` completions by events.
    pub(crate) fn wait(&self, n: usize) -> Vec<Wc> {
        let mut all = Vec::new();
        loop {
            let mut wcs = [Wc::default(); 16];
            let got = self.cq.poll(&mut wcs).unwrap();
            all.extend_from_slice(&wcs[..got]);
            if all.len() >= n {
                return all;
            }
            if got > 0 {
                continue;
            }
            self.cq.req_notify(false).unwrap();
            let got = self.cq.poll(&mut wcs).unwrap();
            all.extend_from_slice(&wcs[..got]);
            if got == 0 {
                let event = self.channel.get_event().unwrap();
                assert_eq!(event.cookie(), 7);
            }
        }
    }
}

fn create_qp(context: &Context, pd: &Pd, cq: &Cq, cap: QpCap, qp_type: QpType) -> Qp {
    let init = QpInitAttr {
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        cap,
        qp_type,
        sq_sig_all: true,
        cookie: 9,
    };
    context.create_qp(pd, &init).unwrap()
}

/// Two connected endpoints of this process.
pub(crate) fn pair(qp_type: QpType) -> (Endpoint, Endpoint) {
    let (a, b) = (Endpoint::new(qp_type), Endpoint::new(qp_type));
    a.connect(b.address());
    b.connect(a.address());
    (a, b)
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8).wrapping_add(seed))
        .collect()
}

//! Datagrams that come to the port of a whole device: from its peer's address or another, with a right ICRC or not, for a
//! queue pair, for QP1 or for nobody.
//!
//! No panic. Memory that the peer has no right to stays as it is. Receives complete once each and in order. What comes from
//! another address reaches no connected queue pair. In the end the queue pair can be flushed, and the next input finds the
//! device as it was.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::icrc::Flow;

use super::input::Input;

const MAX_STEPS: usize = 64;
const LEN: usize = 4096;
/// The first receive's number.
const FIRST: u64 = 1000;
const SECRET: u8 = 0xa7;
const HERE: Ipv4Addr = Ipv4Addr::LOCALHOST;
const ELSEWHERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 2);
const QKEY: u32 = 0x1234;

struct World {
    context: Context,
    pd: Pd,
    cq: Cq,
    /// The memory that the peer may write and read.
    open: Region,
    /// Memory that the peer may not reach, though it knows the key.
    closed: Region,
    /// The memory of the receives.
    inbox: Region,
    port: u16,
    peer: UdpSocket,
    stranger: UdpSocket,
    /// For the ICRC of the peer and of the stranger.
    flow: [Flow; 2],
}

struct Region {
    mr: Mr,
    bytes: *mut u8,
}

// SAFETY: access is by raw pointer only.
unsafe impl Send for Region {}

impl Region {
    fn new(pd: &Pd, fill: u8, access: Access) -> Self {
        let bytes = vec![fill; LEN].leak().as_mut_ptr();
        // SAFETY: leaked memory, used by raw pointer only.
        let mr = unsafe { pd.reg_mr(bytes as u64, LEN as u64, bytes as u64, access) };
        Self { mr: mr.expect("a small region"), bytes }
    }

    fn is_all(&self, value: u8) -> bool {
        // SAFETY: inside the leaked allocation.
        (0..LEN).all(|at| unsafe { self.bytes.add(at).read_volatile() } == value)
    }
}

impl World {
    fn open() -> Self {
        let port = UdpSocket::bind((HERE, 0)).and_then(|socket| socket.local_addr());
        let port = port.expect("a free port").port();
        for (name, value) in [
            ("ANYVERBS_REGISTRY", format!("receive-path-{}", std::process::id())),
            ("ANYVERBS_UDP_PORT", port.to_string()),
            ("ANYVERBS_INTERFACES", "lo".into()),
            ("ANYVERBS_SHM", "0".into()),
        ] {
            // SAFETY: before the device is opened, and no other thread reads the environment.
            unsafe { std::env::set_var(name, value) };
        }
        let device = &devices().expect("a device")[0];
        let context = Context::open(&device.name).expect("it opens");
        let pd = context.alloc_pd().expect("a domain");
        let cq = context.create_cq(4096, None, 0, 0).expect("a completion queue");
        let all = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let open = Region::new(&pd, 1, all);
        let closed = Region::new(&pd, SECRET, Access::LOCAL_WRITE);
        let inbox = Region::new(&pd, 0, Access::LOCAL_WRITE);
        let socket = |from| UdpSocket::bind((from, 0)).expect("a socket of the loopback interface");
        let (peer, stranger) = (socket(HERE), socket(ELSEWHERE));
        let flow = [&peer, &stranger].map(|socket| {
            let from = socket.local_addr().expect("it is bound");
            Flow::new(from.ip(), IpAddr::V4(HERE), from.port(), port)
        });
        Self { context, pd, cq, open, closed, inbox, port, peer, stranger, flow }
    }

    fn create_qp(&self, qp_type: QpType) -> Qp {
        let cap = QpCap {
            max_send_wr: 8,
            max_recv_wr: 64,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let init = QpInitAttr {
            send_cq: &self.cq,
            recv_cq: &self.cq,
            srq: None,
            cap,
            qp_type,
            sq_sig_all: true,
            cookie: 0,
        };
        self.context.create_qp(&self.pd, &init).expect("a queue pair")
    }

    /// Moves it to RTS. Its peer is a number of this process that nobody has.
    fn connect(&self, qp: &Qp, qp_type: QpType) {
        use QpAttrMask as M;
        let to = AhAttr {
            dgid: Gid::from(IpAddr::V4(HERE)),
            hop_limit: 64,
            is_global: true,
            port: 1,
            ..AhAttr::default()
        };
        let attr = QpAttr {
            state: QpState::Init,
            port: 1,
            access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            qkey: QKey(QKEY),
            av: self.context.resolve(&to).expect("our own address"),
            path_mtu: Mtu::Mtu256,
            dest_qpn: Qpn::new(qp.qpn().get() ^ 0x00_4000),
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            min_rnr_timer: 1,
            retry_cnt: 7,
            rnr_retry: 7,
            ..QpAttr::default()
        };
        let (connected, reliable) = (qp_type != QpType::Ud, qp_type == QpType::Rc);
        let some = |mask, is_wanted: bool| if is_wanted { mask } else { M::empty() };
        let init = some(M::ACCESS_FLAGS, connected) | some(M::QKEY, !connected);
        let rtr = some(M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN, connected)
            | some(M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER, reliable);
        let rts = some(M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC, reliable);
        for (state, mask) in [
            (QpState::Init, M::PKEY_INDEX | M::PORT | init),
            (QpState::Rtr, rtr),
            (QpState::Rts, M::SQ_PSN | rts),
        ] {
            qp.modify(&QpAttr { state, ..attr }, M::STATE | mask).expect("as every program does");
        }
    }

    fn send(&self, is_stranger: bool, bytes: &[u8]) {
        let socket = if is_stranger { &self.stranger } else { &self.peer };
        // A full queue loses it, as on any network.
        let _ = socket.send_to(bytes, (HERE, self.port));
    }

    /// Receives all that was sent: a datagram that is too short comes behind it.
    fn receive(&self, wcs: &mut Vec<Wc>) {
        let counters = self.context.counters().expect("the device's");
        let read = || counters.read(Counter::DropMalformed);
        for is_stranger in [false, true] {
            let (before, begin) = (read(), Instant::now());
            self.send(is_stranger, &[0]);
            while read() == before {
                self.poll(wcs);
                assert!(begin.elapsed() < Duration::from_secs(10), "the device receives nothing");
            }
        }
        // The device's thread may have received it all.
        while self.poll(wcs) > 0 {}
    }

    fn poll(&self, wcs: &mut Vec<Wc>) -> usize {
        let mut some = [Wc::default(); 16];
        let got = self.cq.poll(&mut some).expect("it has room");
        wcs.extend_from_slice(&some[..got]);
        got
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    static WORLD: OnceLock<Mutex<World>> = OnceLock::new();
    let world = WORLD.get_or_init(|| Mutex::new(World::open())).lock();
    world.expect("no input has failed before").run(Input(input));
}

impl World {
    fn run(&self, mut input: Input<'_>) {
        let qp_type = input.one_of(&[QpType::Rc, QpType::Uc, QpType::Ud]);
        let qp = self.create_qp(qp_type);
        self.connect(&qp, qp_type);
        let (mut posted, mut wcs, mut from_peer) = (0, Vec::new(), false);
        let mut psn = 0;
        for _ in 0..MAX_STEPS {
            if input.is_empty() {
                break;
            }
            let kind = input.byte();
            if kind & 7 == 0 {
                let sges =
                    [Sge { addr: self.inbox.bytes as u64, len: 300, lkey: self.inbox.mr.lkey() }];
                if qp.post_recv(&[RecvWr { wr_id: FIRST + posted, sges: &sges }]).is_ok() {
                    posted += 1;
                }
                continue;
            }
            let is_stranger = kind & 8 != 0;
            let mut bytes = match kind & 7 {
                1 => input.rest(usize::from(kind >> 4) * 20),
                2 => mad(&mut input),
                3 => credit(&mut input, &qp),
                _ => self.packet(&mut input, (&qp, qp_type), &mut psn),
            };
            let icrc = self.flow[usize::from(is_stranger)].compute(0, &bytes);
            let damage = if input.rarely() { u32::from(input.word()) } else { 0 };
            bytes.extend((icrc ^ damage).to_le_bytes());
            from_peer |= !is_stranger;
            self.send(is_stranger, &bytes);
            if kind & 16 != 0 {
                self.receive(&mut wcs);
            }
        }
        self.receive(&mut wcs);
        if !from_peer && qp_type != QpType::Ud {
            assert_eq!(wcs.len(), 0, "another address completes nothing");
            assert!(self.open.is_all(1), "another address writes nothing");
        }
        // To the end: all receives complete.
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        qp.modify(&attr, QpAttrMask::STATE).expect("from any state");
        self.receive(&mut wcs);
        let numbers: Vec<u64> = wcs.iter().map(|wc| wc.wr_id).collect();
        assert_eq!(numbers, (FIRST..FIRST + posted).collect::<Vec<_>>(), "receives");
        let flushed = wcs.iter().skip_while(|wc| wc.status == WcStatus::Success);
        let late = flushed.skip(1).find(|wc| wc.status != WcStatus::WrFlushErr);
        assert!(late.is_none(), "{late:?} after the first error");
        assert!(self.closed.is_all(SECRET), "memory without a right was written");
        qp.destroy().expect("nothing uses it");
        // SAFETY: the peer's region, which nobody writes now.
        unsafe { self.open.bytes.write_bytes(1, LEN) };
    }

    /// A packet for the queue pair, most of it as the peer would send it.
    fn packet(
        &self,
        input: &mut Input<'_>,
        (qp, qp_type): (&Qp, QpType),
        psn: &mut u32,
    ) -> Vec<u8> {
        let opcode = input.byte();
        let service = match qp_type {
            QpType::Ud => 3 << 5,
            QpType::Uc => 1 << 5,
            _ => 0,
        };
        // Mostly an operation of its own service.
        let opcode = if opcode & 0x60 == 0x60 { opcode } else { opcode & 0x1f | service };
        let odd = input.byte();
        let qpn = if odd == 0xff { u32::from(input.word()) << 8 } else { qp.qpn().get() };
        let at = psn.wrapping_add(if odd & 0x70 == 0x70 { u32::from(input.byte() % 7) } else { 0 });
        *psn = at.wrapping_add(1) & 0xff_ffff;
        let mut bytes = vec![opcode, odd & 0x80, 0xff, 0xff, 0];
        bytes.extend(&qpn.to_be_bytes()[1..]);
        bytes.push(if odd & 1 == 0 { 0x80 } else { 0 });
        bytes.extend(&at.to_be_bytes()[1..]);
        if opcode >> 5 == 3 {
            bytes.extend(QKEY.to_be_bytes());
            bytes.extend([0, 0, 0, input.byte()]);
        }
        let len = u32::from(input.word() % 300);
        // RETH or AtomicETH where the operation may have one: WRITE first, only, READ, atomics.
        if matches!(opcode & 0x1f, 6 | 10 | 11 | 12 | 19 | 20 | 28 | 29) {
            let region = if input.rarely() { &self.closed } else { &self.open };
            let at = region.bytes as u64 + u64::from(input.word() % (LEN as u16 + 64));
            bytes.extend(at.to_be_bytes());
            bytes.extend(region.mr.rkey().to_be_bytes());
            bytes.extend(len.to_be_bytes());
        }
        let more = input.rarely();
        let payload = if more { input.byte().into() } else { len as usize };
        let fill = input.byte();
        bytes.resize(bytes.len() + payload, fill);
        let pad = payload.wrapping_neg() & 3;
        bytes.resize(bytes.len() + pad, 0);
        bytes[1] |= (pad as u8) << 4;
        bytes
    }
}

/// A packet to QP1.
fn mad(input: &mut Input<'_>) -> Vec<u8> {
    let mut bytes = vec![0x64, 0, 0xff, 0xff, 0, 0, 0, 1, 0, 0, 0, 0];
    bytes.extend(0x8001_0000_u32.to_be_bytes());
    bytes.extend([0, 0, 0, 1]);
    // The connection manager's class, an attribute of its, and any fields.
    let mut mad = vec![1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, input.byte()];
    mad.extend([0, 0x10 + input.byte() % 16, 0, 0, 0, 0, 0, 0]);
    let len = usize::from(input.byte());
    mad.extend(input.rest(len));
    mad.resize(if input.rarely() { len } else { 256 }, 0);
    bytes.extend(mad);
    bytes
}

/// A credit probe or an answer.
fn credit(input: &mut Input<'_>, qp: &Qp) -> Vec<u8> {
    let mut bytes = vec![0xc1 + input.byte() % 2, 0, 0xff, 0xff, 0];
    bytes.extend(&qp.qpn().get().to_be_bytes()[1..]);
    bytes.push(0);
    bytes.extend(input.rest(3));
    let counts = input.rest(16);
    bytes.extend(counts);
    bytes.resize(if input.rarely() { 20 } else { 28 }, 0);
    bytes
}

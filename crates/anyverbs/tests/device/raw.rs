//! Raw packets: frames between queue pairs of a process and of two, rules, work queues.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyverbs::error::*;
use anyverbs::raw::*;
use anyverbs::*;

use crate::endpoint::*;

mod flow_action;
mod rate;

const ALICE: u64 = 0x0200_0000_000a;
const BOB: u64 = 0x0200_0000_000b;

/// One test at a time: each would get copies of the others' frames. None where raw packets are not permitted.
fn alone() -> Option<MutexGuard<'static, ()>> {
    static ALONE: Mutex<()> = Mutex::new(());
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(1, None, 0, 0).unwrap();
    match context.create_raw_qp(&pd, &init(&cq, ReceiveFlags::empty())).map(drop) {
        Err(CreateError::NotPermitted) => {
            anyverbs_testing::skip("no CAP_NET_RAW");
            None
        }
        made => {
            made.unwrap();
            Some(alone)
        }
    }
}

/// One queue pair, ready, with memory.
struct Port {
    context: Context,
    pd: Pd,
    cq: Cq,
    qp: RawQp,
    buffer: Buffer,
}

fn init<'a>(cq: &'a Cq, flags: ReceiveFlags) -> RawQpInit<'a> {
    RawQpInit {
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        cap: CAP,
        sq_sig_all: true,
        max_tso_header: 128,
        flags,
        cookie: 0,
    }
}

fn start(qp: &RawQp) {
    let port = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
    qp.modify(&port, QpAttrMask::STATE | QpAttrMask::PORT).unwrap();
    for state in [QpState::Rtr, QpState::Rts] {
        qp.modify(&QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    }
}

impl Port {
    fn new() -> Self {
        Self::with(ReceiveFlags::empty())
    }

    fn with(flags: ReceiveFlags) -> Self {
        let context = context();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(256, None, 0, 0).unwrap();
        let qp = context.create_raw_qp(&pd, &init(&cq, flags)).unwrap();
        start(&qp);
        let buffer = Buffer::new(&pd, 1 << 17);
        Self { context, pd, cq, qp, buffer }
    }

    fn recv(&self, wr_id: u64, at: usize, len: usize) {
        self.qp.recv(&RecvWr { wr_id, sges: &[self.buffer.sge(at, len)] }).unwrap();
    }

    /// Posts a frame that lies in the second half of the memory.
    fn send(&self, frame: &[u8]) {
        self.buffer.write(1 << 16, frame);
        self.post(&RawSendWr { sges: &[self.buffer.sge(1 << 16, frame.len())], ..wr() }).unwrap();
    }

    fn post(&self, wr: &RawSendWr<'_>) -> Result<(), PostError> {
        self.qp.post().unwrap().send(wr)
    }

    fn poll(&self, n: usize) -> Vec<Wc> {
        poll(&self.cq, n)
    }
}

fn wr() -> RawSendWr<'static> {
    RawSendWr {
        wr_id: 77,
        flags: SendFlags::SIGNALED,
        fill_in_checksums: false,
        segmentation: None,
        sges: &[],
    }
}

fn poll(cq: &Cq, n: usize) -> Vec<Wc> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let (mut got, mut wcs) = (Vec::new(), [Wc::default(); 16]);
    while got.len() < n {
        let k = cq.poll(&mut wcs).unwrap();
        got.extend_from_slice(&wcs[..k]);
        assert!(Instant::now() < deadline, "{} of {n} completions: {got:?}", got.len());
    }
    got
}

fn mac(mac: u64) -> [u8; 6] {
    mac.to_be_bytes()[2..].try_into().unwrap()
}

fn frame(dst: u64, ether_type: u16, payload: &[u8]) -> Vec<u8> {
    [&mac(dst)[..], &mac(ALICE), &ether_type.to_be_bytes(), payload].concat()
}

/// UDP over IPv4, without checksums.
fn udp(dst: u64, src_ip: [u8; 4], dst_port: u16, payload: &[u8]) -> Vec<u8> {
    let len = |more: usize| ((payload.len() + more) as u16).to_be_bytes();
    let ip =
        [&[0x45, 0][..], &len(28), &[0, 1, 0, 0, 64, 17, 0, 0], &src_ip, &[10, 0, 0, 2]].concat();
    let udp = [&1000u16.to_be_bytes()[..], &dst_port.to_be_bytes(), &len(8), &[0, 0]].concat();
    frame(dst, 0x0800, &[&ip[..], &udp, payload].concat())
}

fn rule(filters: &[Filter]) -> FlowAttr {
    FlowAttr {
        flow_type: FlowType::Normal,
        priority: 0,
        specs: filters.iter().map(|f| Spec { filter: *f, inner: false, over: None }).collect(),
        dont_trap: false,
        egress: false,
        drop: false,
        tag: None,
    }
}

fn to(dst: u64) -> Filter {
    Filter::Ethernet {
        dst: Masked { val: dst, mask: 0xffff_ffff_ffff },
        src: Masked::default(),
        ether_type: Masked::default(),
        vlan: Masked::default(),
    }
}

fn to_port(port: u16) -> Filter {
    Filter::Udp { dst: Masked { val: port, mask: u16::MAX }, src: Masked::default() }
}

#[test]
fn a_frame_follows_its_rule_and_arrives_unchanged() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(FlowAttr { tag: Some(0xabcdef), ..rule(&[to(BOB)]) }, None, None);
    b.recv(5, 0, 2048);
    a.recv(6, 0, 2048);
    let sent = frame(BOB, 0x88b6, b"hello");
    a.send(&frame(ALICE, 0x88b6, b"nobody wants this"));
    a.send(&sent);
    let wcs = a.poll(2);
    assert!(wcs.iter().all(|wc| (wc.wr_id, wc.opcode) == (77, WcOpcode::Send)));
    let wc = b.poll(1)[0];
    assert_eq!((wc.wr_id, wc.status, wc.opcode), (5, WcStatus::Success, WcOpcode::Recv));
    assert_eq!((wc.byte_len as usize, wc.qpn), (sent.len(), b.qp.qpn()));
    assert_eq!((wc.flow_tag(), wc.cvlan(), wc.flags), (0xabcdef, 0, WcFlags::empty()));
    assert_eq!(b.buffer.read(0, sent.len()), sent);
    assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
}

#[test]
fn checksums_are_filled_in_and_checked() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    b.recv(1, 0, 2048);
    b.recv(2, 2048, 2048);
    let sent = udp(BOB, [10, 0, 0, 1], 9, b"odd");
    a.send(&sent);
    a.buffer.write(1 << 16, &sent);
    let sges = [a.buffer.sge(1 << 16, 20), a.buffer.sge((1 << 16) + 20, sent.len() - 20)];
    a.post(&RawSendWr { fill_in_checksums: true, sges: &sges, ..wr() }).unwrap();
    let flags: Vec<_> = b.poll(2).iter().map(|wc| wc.flags).collect();
    assert_eq!(flags, [WcFlags::empty(), WcFlags::IP_CSUM_OK]);
    assert_eq!(b.buffer.read(0, sent.len()), sent);
    assert_ne!(b.buffer.read(2048, sent.len()), sent);
}

#[test]
fn a_tag_is_taken_out_and_the_check_sequence_given() {
    let Some(_alone) = alone() else { return };
    let flags = ReceiveFlags::CVLAN_STRIPPING | ReceiveFlags::SCATTER_FCS;
    let (a, b) = (Port::new(), Port::with(flags));
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    b.recv(1, 0, 256);
    let plain = frame(BOB, 0x88b6, b"payload");
    let tagged = [&plain[..12], &[0x81, 0, 0x60, 0x05], &plain[12..]].concat();
    a.send(&tagged);
    let wc = b.poll(1)[0];
    assert_eq!((wc.byte_len as usize, wc.cvlan()), (plain.len() + 4, 0x6005));
    assert_eq!(b.buffer.read(0, plain.len()), plain);
    assert_ne!(b.buffer.read(plain.len(), 4), [0; 4]);
}

#[test]
fn too_long_frames_fail_and_unexpected_ones_are_dropped() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    let dropped = || b.context.counters().unwrap().read(Counter::DropNoRecv);
    let before = dropped();
    a.send(&frame(BOB, 0x88b6, &[1; 100]));
    assert_eq!(dropped(), before + 1);
    b.recv(1, 0, 64);
    b.recv(2, 0, 2048);
    a.send(&frame(BOB, 0x88b6, &[2; 100]));
    a.send(&frame(BOB, 0x88b6, &[3; 100]));
    let wcs = b.poll(2);
    assert_eq!((wcs[0].wr_id, wcs[0].status), (1, WcStatus::LocLenErr));
    assert_eq!((wcs[1].wr_id, wcs[1].status, wcs[1].byte_len), (2, WcStatus::Success, 114));
    // A request with memory that is not ours ends the queue.
    let foreign = Sge { addr: b.buffer.addr(), len: 2048, lkey: 1 };
    b.qp.recv(&RecvWr { wr_id: 3, sges: &[foreign] }).unwrap();
    b.recv(4, 0, 2048);
    a.send(&frame(BOB, 0x88b6, &[4; 100]));
    let statuses: Vec<_> = b.poll(2).iter().map(|wc| wc.status).collect();
    assert_eq!(statuses, [WcStatus::LocProtErr, WcStatus::WrFlushErr]);
    assert_eq!(b.qp.state().unwrap(), QpState::Err);
    b.recv(5, 0, 2048);
    assert_eq!(b.poll(1)[0].status, WcStatus::WrFlushErr);
    let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    b.qp.modify(&reset, QpAttrMask::STATE).unwrap();
    start(&b.qp);
    b.recv(6, 0, 2048);
    a.send(&frame(BOB, 0x88b6, &[5; 100]));
    assert_eq!(b.poll(1)[0].status, WcStatus::Success);
}

#[test]
fn a_bad_send_moves_the_queue_to_sqe_and_back() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    a.send(b"no frame");
    assert_eq!(a.poll(1)[0].status, WcStatus::LocLenErr);
    assert_eq!(a.qp.state().unwrap(), QpState::Sqe);
    a.send(&frame(BOB, 0x88b6, b""));
    assert_eq!(a.poll(1)[0].status, WcStatus::WrFlushErr);
    a.qp.modify(&QpAttr { state: QpState::Rts, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    a.send(&frame(BOB, 0x88b6, b""));
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    let foreign = [Sge { addr: a.buffer.addr(), len: 64, lkey: 1 }];
    a.post(&RawSendWr { sges: &foreign, ..wr() }).unwrap();
    assert_eq!(a.poll(1)[0].status, WcStatus::LocProtErr);
}

#[test]
fn posting_is_checked_and_slots_come_back_with_completions() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let sges = [a.buffer.sge(0, 64); 5];
    let refused = |wr: &RawSendWr<'_>| a.post(wr).unwrap_err();
    assert_eq!(
        refused(&RawSendWr { sges: &sges, ..wr() }),
        PostError::Send(PostSendError::TooManySges)
    );
    let inline = SendFlags::INLINE;
    let long = [a.buffer.sge(0, 65)];
    assert_eq!(
        refused(&RawSendWr { flags: inline, sges: &long, ..wr() }),
        PostError::Send(PostSendError::InlineTooLong)
    );
    let nowhere = [Sge { addr: 8, len: 60, lkey: 0 }];
    assert_eq!(
        refused(&RawSendWr { flags: inline, sges: &nowhere, ..wr() }),
        PostError::Send(PostSendError::Fault)
    );
    let segmentation = Segmentation { header_addr: a.buffer.addr(), header_len: 129, mss: 1 };
    for bad in [segmentation, Segmentation { header_len: 54, mss: 0, ..segmentation }] {
        assert_eq!(
            refused(&RawSendWr { segmentation: Some(bad), ..wr() }),
            PostError::Send(PostSendError::Segmentation)
        );
    }
    let frame = frame(BOB, 0x88b6, b"");
    for round in 0..3 {
        for _ in 0..CAP.max_send_wr {
            a.send(&frame);
        }
        a.buffer.write(0, &frame);
        let sges = [a.buffer.sge(0, frame.len())];
        let error = refused(&RawSendWr { sges: &sges, ..wr() });
        assert_eq!(error, PostError::Send(PostSendError::Full), "{round}");
        assert_eq!(a.poll(CAP.max_send_wr as usize).len(), 64);
    }
    let fresh = a.context.create_raw_qp(&a.pd, &init(&a.cq, ReceiveFlags::empty())).unwrap();
    assert_eq!(fresh.post().unwrap().send(&wr()), Err(PostError::Send(PostSendError::State)));
    let recv = fresh.recv(&RecvWr { wr_id: 0, sges: &[] });
    assert_eq!(recv, Err(PostError::Recv(PostRecvError::State)));
}

#[test]
fn payload_leaves_in_segments() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    for i in 0..3 {
        b.recv(i, i as usize * 2048, 2048);
    }
    let ip = [&[0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6, 0, 0][..], &[10, 0, 0, 1, 10, 0, 0, 2]].concat();
    let tcp = [&[0, 1, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0][..]].concat();
    let header = frame(BOB, 0x0800, &[ip, tcp].concat());
    a.buffer.write(0, &header);
    let payload: Vec<u8> = (0..250u8).collect();
    a.buffer.write(1 << 16, &payload);
    let segmentation =
        Segmentation { header_addr: a.buffer.addr(), header_len: header.len() as u16, mss: 100 };
    let sges = [a.buffer.sge(1 << 16, payload.len())];
    a.post(&RawSendWr { segmentation: Some(segmentation), sges: &sges, ..wr() }).unwrap();
    let sent = a.poll(1)[0];
    assert_eq!((sent.status, sent.opcode), (WcStatus::Success, WcOpcode::Tso));
    let mut got = Vec::new();
    for (i, wc) in b.poll(3).iter().enumerate() {
        assert_eq!((wc.status, wc.flags), (WcStatus::Success, WcFlags::IP_CSUM_OK));
        let len = wc.byte_len as usize - header.len();
        assert_eq!(len, [100, 100, 50][i]);
        got.extend(b.buffer.read(i * 2048 + header.len(), len));
    }
    assert_eq!(got, payload);
}

#[test]
fn rules_are_held_counted_and_dropped() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let counters = b.context.create_counters().unwrap();
    counters.attach(CounterKind::Packets, 0).unwrap();
    counters.attach(CounterKind::Bytes, 1).unwrap();
    counters.attach(CounterKind::Bytes, 1).unwrap();
    let counted = b.qp.create_flow(rule(&[to(BOB), to_port(7)]), Some(&counters), None).unwrap();
    let drops = FlowAttr { drop: true, priority: 1, ..rule(&[to(BOB)]) };
    let drops = b.qp.create_flow(drops, None, None).unwrap();
    assert_eq!(b.qp.destroy(), Err(DestroyError::Busy("2 flow rule".into())));
    assert_eq!(counters.destroy(), Err(DestroyError::Busy("1 flow rule".into())));
    assert_eq!(counters.attach(CounterKind::Bytes, 2), Err(CounterError::Bound));
    for i in 0..4 {
        b.recv(i, 0, 2048);
    }
    let frame = udp(BOB, [10, 0, 0, 1], 7, b"1234");
    a.send(&frame);
    a.send(&udp(BOB, [10, 0, 0, 1], 8, b"dropped"));
    a.send(&frame);
    assert_eq!(b.poll(2).len(), 2);
    let mut values = [9; 2];
    counters.read(&mut values).unwrap();
    assert_eq!(values, [2, 4 * frame.len() as u64]);
    assert!(counters.read(&mut [0; 3]).is_err());
    counted.destroy().unwrap();
    assert_eq!(counted.destroy(), Err(DestroyError::Gone));
    drops.destroy().unwrap();
    counters.destroy().unwrap();
    a.send(&frame);
    assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    let bad = FlowAttr { egress: true, tag: Some(1), ..rule(&[]) };
    let refused = b.qp.create_flow(bad, None, None).unwrap_err();
    assert_eq!((refused.errno(), refused), (libc::EINVAL, CreateError::Flow(FlowError::Egress)));
    b.qp.destroy().unwrap();
    assert!(matches!(b.qp.create_flow(rule(&[]), None, None), Err(CreateError::Foreign(_))));
}

#[test]
fn egress_rules_look_at_what_is_sent() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    let egress = FlowAttr { egress: true, drop: true, ..rule(&[to_port(6)]) };
    let egress = a.qp.create_flow(egress, None, None).unwrap();
    b.recv(1, 0, 2048);
    a.send(&udp(BOB, [1; 4], 6, b"kept in"));
    a.send(&udp(BOB, [1; 4], 5, b""));
    assert_eq!(b.poll(1)[0].byte_len, 42);
    egress.destroy().unwrap();
}

#[test]
fn the_sender_gets_no_copy_but_sniffers_do() {
    let Some(_alone) = alone() else { return };
    let (a, b, ears) = (Port::new(), Port::new(), Port::new());
    let all = FlowAttr { flow_type: FlowType::AllDefault, ..rule(&[]) };
    let _a = a.qp.create_flow(all.clone(), None, None).unwrap();
    let _b = b.qp.create_flow(all, None, None).unwrap();
    let sniffer = FlowAttr { flow_type: FlowType::Sniffer, ..rule(&[]) };
    let _ears = ears.qp.create_flow(sniffer, None, None).unwrap();
    for port in [&a, &b, &ears] {
        port.recv(1, 0, 2048);
    }
    a.send(&frame(BOB, 0x88b6, b"who is there?"));
    assert_eq!(b.poll(1)[0].wr_id, 1);
    assert_eq!(ears.poll(1)[0].wr_id, 1);
    assert_eq!(a.poll(1)[0].opcode, WcOpcode::Send);
    assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
}

/// Four work queues on two CQs, spread by the source address.
#[test]
fn frames_are_spread_over_work_queues() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let b = Port::new();
    let cqs = [0; 2].map(|_| b.context.create_cq(64, None, 0, 0).unwrap());
    let wqs: Vec<Wq> = (0..4)
        .map(|i| {
            let flags = ReceiveFlags::empty();
            let init = WqInit { cq: &cqs[i % 2], max_wr: 64, max_sge: 1, flags, cookie: 0 };
            b.context.create_wq(&b.pd, &init).unwrap()
        })
        .collect();
    let recv = |wq: &Wq| wq.recv(&RecvWr { wr_id: 3, sges: &[b.buffer.sge(0, 2048)] });
    assert_eq!(recv(&wqs[0]), Err(PostError::Recv(PostRecvError::State)), "in RESET");
    let ready = WqAttr { state: Some(WqState::Ready), ..WqAttr::default() };
    for wq in &wqs {
        wq.modify(&ready).unwrap();
        (0..32).for_each(|_| recv(wq).unwrap());
    }
    let table = b.context.create_rwq_ind_table(&wqs.iter().collect::<Vec<_>>()).unwrap();
    assert!(b.context.create_rwq_ind_table(&[&wqs[0], &wqs[1], &wqs[2]]).is_err());
    assert!(b.context.create_rwq_ind_table(&[]).is_err());
    let key: Vec<u8> = (0..40u8).map(|i| i.wrapping_mul(37) ^ 0x6d).collect();
    let hash = RxHash::new(&key, 1).unwrap();
    let qp =
        b.context.create_hash_qp(&b.pd, &HashQpInit { table: &table, hash, cookie: 0 }).unwrap();
    assert_eq!(table.destroy(), Err(DestroyError::Busy("1 QP".into())));
    assert_eq!(wqs[0].destroy(), Err(DestroyError::Busy("1 indirection table".into())));
    let port = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
    let refused = qp.modify(&port, QpAttrMask::STATE | QpAttrMask::PORT).unwrap_err();
    assert_eq!(refused.errno(), libc::EOPNOTSUPP);
    assert!(qp.recv(&RecvWr { wr_id: 0, sges: &[] }).is_err());
    assert!(qp.post().unwrap().send(&wr()).is_err());

    let flow = qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    for i in 0..32 {
        a.send(&udp(BOB, [10, 0, i, i.wrapping_mul(7)], 1, b""));
    }
    a.poll(32);
    let mut got: Vec<Wc> = Vec::new();
    let deadline = Instant::now() + Duration::from_secs(10);
    while got.len() < 32 {
        let mut wcs = [Wc::default(); 32];
        for cq in &cqs {
            let n = cq.poll(&mut wcs).unwrap();
            got.extend_from_slice(&wcs[..n]);
        }
        assert!(Instant::now() < deadline, "{}", got.len());
    }
    let by_queue = |wq: &Wq| got.iter().filter(|wc| wc.qpn == wq.number()).count();
    assert!(
        wqs.iter().all(|wq| by_queue(wq) > 0),
        "{:?}",
        wqs.iter().map(by_queue).collect::<Vec<_>>()
    );
    // The same flow goes to the same queue.
    a.send(&udp(BOB, [10, 0, 1, 7], 1, b""));
    a.send(&udp(BOB, [10, 0, 1, 7], 2, b""));
    let twice: Vec<Wc> = loop {
        let mut wcs = [Wc::default(); 8];
        let n = cqs.iter().map(|cq| cq.poll(&mut wcs).unwrap()).max().unwrap();
        if n > 0 {
            break wcs[..n].to_vec();
        }
    };
    assert!(twice.windows(2).all(|w| w[0].qpn == w[1].qpn));

    flow.destroy().unwrap();
    qp.destroy().unwrap();
    table.destroy().unwrap();
    let error = WqAttr { state: Some(WqState::Error), ..WqAttr::default() };
    let wrong = WqAttr { current: Some(WqState::Reset), ..error };
    assert!(wqs[0].modify(&wrong).is_err());
    wqs[0].modify(&error).unwrap();
    assert_eq!(wqs[0].modify(&ready).unwrap_err().errno(), libc::EINVAL);
    let flushed = poll(&cqs[0], 1)[0];
    assert_eq!((flushed.status, flushed.qpn), (WcStatus::WrFlushErr, wqs[0].number()));
    recv(&wqs[0]).unwrap();
    wqs[0].destroy().unwrap();
    assert_eq!(cqs[0].poll(&mut [Wc::default(); 64]).unwrap(), 0, "its completions have left");
    assert_eq!(wqs[0].destroy(), Err(DestroyError::Gone));
    assert_eq!(recv(&wqs[0]), Err(PostError::Gone));
}

/// Debug builds panic where a thread takes locks against their order.
#[test]
fn a_protection_domain_that_was_dropped_ends_with_the_last_queue_on_it() {
    let Some(_alone) = alone() else { return };
    let context = context();
    let cq = context.create_cq(4, None, 0, 0).unwrap();
    let flags = ReceiveFlags::empty();
    let drop_pd = |pd: Pd| {
        let cell = Arc::downgrade(&pd.cell);
        drop(pd);
        assert!(cell.strong_count() > 0, "the queue holds it");
        cell
    };
    for by_drop in [false, true] {
        let pd = context.alloc_pd().unwrap();
        let qp = context.create_raw_qp(&pd, &init(&cq, flags)).unwrap();
        let cell = drop_pd(pd);
        if !by_drop {
            qp.destroy().unwrap();
        }
        drop(qp);
        assert_eq!(cell.strong_count(), 0);

        let pd = context.alloc_pd().unwrap();
        let init = WqInit { cq: &cq, max_wr: 4, max_sge: 1, flags, cookie: 0 };
        let wq = context.create_wq(&pd, &init).unwrap();
        let cell = drop_pd(pd);
        if !by_drop {
            wq.destroy().unwrap();
        }
        drop(wq);
        assert_eq!(cell.strong_count(), 0);
    }
}

#[test]
fn a_full_cq_fails_who_uses_it() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let small = b.context.create_cq(1, None, 0, 0).unwrap();
    let flags = ReceiveFlags::empty();
    let init = WqInit { cq: &small, max_wr: 4, max_sge: 1, flags, cookie: 42 };
    let wq = b.context.create_wq(&b.pd, &init).unwrap();
    wq.modify(&WqAttr { state: Some(WqState::Ready), ..WqAttr::default() }).unwrap();
    for _ in 0..3 {
        wq.recv(&RecvWr { wr_id: 0, sges: &[b.buffer.sge(0, 2048)] }).unwrap();
    }
    let table = b.context.create_rwq_ind_table(&[&wq]).unwrap();
    let hash = RxHash::new(&[1; KEY_LEN], 0).unwrap();
    let qp =
        b.context.create_hash_qp(&b.pd, &HashQpInit { table: &table, hash, cookie: 0 }).unwrap();
    let _flow = qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    a.send(&frame(BOB, 0x88b6, b""));
    a.send(&frame(BOB, 0x88b6, b""));
    assert_eq!(wq.state().unwrap(), WqState::Error);
    let kinds: Vec<_> = (0..2)
        .map(|_| {
            let event = b.context.get_async_event().unwrap();
            if event.kind() == AsyncEventKind::WqFatal {
                assert_eq!(event.element(), EventElement::Wq { cookie: 42 });
            }
            event.kind()
        })
        .collect();
    assert_eq!(kinds, [AsyncEventKind::CqErr, AsyncEventKind::WqFatal]);
}

#[test]
fn a_shared_receive_queue_feeds_raw_queue_pairs() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let b = Port::new();
    let srq = b.pd.create_srq(&SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 }).unwrap();
    let qp = b
        .context
        .create_raw_qp(&b.pd, &RawQpInit { srq: Some(&srq), ..init(&b.cq, ReceiveFlags::empty()) });
    let qp = qp.unwrap();
    start(&qp);
    let flow = qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    srq.post_recv(&[RecvWr { wr_id: 8, sges: &[b.buffer.sge(0, 2048)] }]).unwrap();
    assert!(qp.recv(&RecvWr { wr_id: 0, sges: &[] }).is_err());
    a.send(&frame(BOB, 0x88b6, b""));
    assert_eq!((b.poll(1)[0].wr_id, srq.destroy().is_err()), (8, true));
    flow.destroy().unwrap();
    let error = QpAttr { state: QpState::Err, ..QpAttr::default() };
    qp.modify(&error, QpAttrMask::STATE).unwrap();
    let event = b.context.get_async_event().unwrap();
    assert_eq!(event.kind(), AsyncEventKind::QpLastWqeReached);
    drop(event);
    qp.destroy().unwrap();
    srq.destroy().unwrap();
}

#[test]
fn receives_of_an_srq_use_its_protection_domain() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let b = Port::new();
    let others = b.context.alloc_pd().unwrap();
    let buffer = Buffer::new(&others, 2048);
    let srq = others.create_srq(&SrqInitAttr { max_wr: 4, max_sge: 1, cookie: 0 }).unwrap();
    let init = RawQpInit { srq: Some(&srq), ..init(&b.cq, ReceiveFlags::empty()) };
    let qp = b.context.create_raw_qp(&b.pd, &init).unwrap();
    start(&qp);
    let _flow = qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    let sent = frame(BOB, 0x88b6, b"by way of another");
    srq.post_recv(&[RecvWr { wr_id: 1, sges: &[buffer.sge(0, 2048)] }]).unwrap();
    a.send(&sent);
    assert_eq!(b.poll(1)[0].status, WcStatus::Success);
    assert_eq!(buffer.read(0, sent.len()), sent);
    srq.post_recv(&[RecvWr { wr_id: 2, sges: &[b.buffer.sge(0, 2048)] }]).unwrap();
    a.send(&sent);
    assert_eq!(b.poll(1)[0].status, WcStatus::LocProtErr);
}

const PEER: &str = "ANYVERBS_TEST_RAW_PEER";

/// The other process: sleeps until a frame comes, and sends it back, as often as it is asked to.
#[test]
fn peer() {
    let Some(_alone) = alone() else { return };
    let Ok(rounds) = std::env::var(PEER) else { return };
    let b = Waiter::new(BOB);
    b.listen();
    println!("\nready");
    for _ in 0..rounds.parse().unwrap() {
        let wc = b.wait();
        let reply = [&mac(ALICE)[..], &b.port.buffer.read(6, wc.byte_len as usize - 6)].concat();
        b.listen();
        b.port.send(&reply);
        b.port.poll(1);
    }
}

/// A queue pair that gets the frames for one address, and whose receives make events.
struct Waiter {
    port: Port,
    channel: CompChannel,
    cq: Cq,
    qp: RawQp,
    _rule: Flow,
}

impl Waiter {
    fn new(address: u64) -> Self {
        let port = Port::new();
        let channel = port.context.create_comp_channel().unwrap();
        let cq = port.context.create_cq(16, Some(&channel), 0, 0).unwrap();
        let init = RawQpInit { recv_cq: &cq, ..init(&port.cq, ReceiveFlags::empty()) };
        let qp = port.context.create_raw_qp(&port.pd, &init).unwrap();
        start(&qp);
        let _rule = qp.create_flow(rule(&[to(address)]), None, None).unwrap();
        Self { port, channel, cq, qp, _rule }
    }

    fn listen(&self) {
        self.qp.recv(&RecvWr { wr_id: 1, sges: &[self.port.buffer.sge(0, 2048)] }).unwrap();
        self.cq.req_notify(false).unwrap();
    }

    fn wait(&self) -> Wc {
        self.channel.get_event().unwrap();
        poll(&self.cq, 1)[0]
    }
}

/// Starts [`peer`]; it listens.
fn spawn_peer(rounds: usize) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "raw::peer", "--nocapture", "--test-threads=1"])
        .env(PEER, rounds.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "ready"));
    child
}

#[test]
fn frames_cross_to_another_process_and_back() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let _rule = a.qp.create_flow(rule(&[to(ALICE)]), None, None).unwrap();
    let mut child = spawn_peer(3);
    for round in 0..3u8 {
        a.recv(9, 0, 2048);
        let payload = vec![round; 700];
        a.send(&frame(BOB, 0x88b6, &payload));
        let wcs = a.poll(2);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        assert_eq!(a.buffer.read(14, 700), payload);
    }
    assert!(child.wait().unwrap().success());
}

#[test]
fn a_frame_wakes_who_waits_for_its_event_at_once() {
    const ROUNDS: usize = 200;
    let Some(_alone) = alone() else { return };
    let a = Waiter::new(ALICE);
    let mut child = spawn_peer(ROUNDS);
    let mut times: Vec<Duration> = (0..ROUNDS)
        .map(|_| {
            a.listen();
            let begin = Instant::now();
            a.port.send(&frame(BOB, 0x88b6, b"ping"));
            assert_eq!(a.wait().status, WcStatus::Success);
            a.port.poll(1);
            begin.elapsed()
        })
        .collect();
    assert!(child.wait().unwrap().success());
    times.sort();
    // Polls that have just ended would keep the worker away for 700 us in each round. On a busy machine some rounds take as long.
    let quick = times[ROUNDS / 10];
    eprintln!("{quick:?} there and back");
    assert!(quick < Duration::from_micros(500), "{quick:?}");
}

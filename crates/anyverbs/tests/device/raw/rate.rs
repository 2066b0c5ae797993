//! Rate limits: frames wait for their time, in order, and what waits ends with the queue pair.

use super::*;
use anyverbs_testing::Stopwatch;

/// 8 Mbit/s: a frame of 1,000 bytes a millisecond, two at once.
const LIMIT: RateLimit = RateLimit { kbps: 8000, max_burst: 2000, typical_packet: 1000 };
/// A limit under which nothing more leaves while a test lasts.
const STANDSTILL: RateLimit = RateLimit { kbps: 1, max_burst: 1000, typical_packet: 1000 };

/// A frame of 1,000 bytes, with its number in the first of the payload.
fn numbered(n: u8) -> Vec<u8> {
    frame(BOB, 0x88b6, &[&[n][..], &[0; 985]].concat())
}

/// Sends it from a place of its own: the memory is the device's until the send completes.
fn send(port: &Port, n: u8) {
    let at = (1 << 16) + usize::from(n) * 1000;
    port.buffer.write(at, &numbered(n));
    port.post(&RawSendWr { sges: &[port.buffer.sge(at, 1000)], ..wr() }).unwrap();
}

fn modify(qp: &RawQp, state: QpState) {
    qp.modify(&QpAttr { state, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
}

#[test]
fn frames_leave_at_the_rate_and_in_order() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    (0..60).for_each(|n| b.recv(n, n as usize * 1000, 1000));
    a.qp.limit_rate(&LIMIT).unwrap();
    assert_eq!(a.qp.query().unwrap().0.rate_limit, 8000);
    let (begun, watch) = (Instant::now(), Stopwatch::start());
    (0..60).for_each(|n| send(&a, n));
    let least = Duration::from_millis(56);
    let wcs = b.poll(60);
    let took = begun.elapsed();
    assert!(took >= least, "60 frames of a millisecond in {took:?}");
    assert!(watch.elapsed() < least * 20, "{took:?}");
    assert!(wcs.iter().all(|wc| (wc.status, wc.byte_len) == (WcStatus::Success, 1000)));
    let order: Vec<u8> = (0..60).map(|n| b.buffer.read(n * 1000 + 14, 1)[0]).collect();
    assert!(order.is_sorted() && order[59] == 59, "{order:?}");
}

#[test]
fn what_waits_leaves_when_the_limit_ends() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    a.qp.limit_rate(&STANDSTILL).unwrap();
    (0..10).for_each(|n| send(&a, n));
    // A send completes when its frame has left.
    let mut wcs = [Wc::default(); 16];
    let first = a.cq.poll(&mut wcs).unwrap();
    assert!((1..=2).contains(&first), "{first} of 10");
    assert_eq!(a.cq.poll(&mut wcs).unwrap(), 0);
    a.qp.limit_rate(&RateLimit::default()).unwrap();
    assert_eq!(a.cq.poll(&mut wcs).unwrap(), 10 - first);
    assert!(wcs[..10 - first].iter().all(|wc| wc.status == WcStatus::Success));
    assert_eq!(a.qp.query().unwrap().0.rate_limit, 0);
    send(&a, 0);
    assert_eq!(a.cq.poll(&mut wcs).unwrap(), 1);
}

#[test]
fn what_waits_is_flushed_and_a_reset_ends_the_limit() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let rate = QpAttr { rate_limit: 1, ..QpAttr::default() };
    a.qp.modify(&rate, QpAttrMask::RATE_LIMIT).unwrap();
    (0..10).for_each(|n| send(&a, n));
    modify(&a.qp, QpState::Err);
    let wcs = a.poll(10);
    let flushed = wcs.iter().skip_while(|wc| wc.status == WcStatus::Success);
    assert!(flushed.clone().count() >= 3);
    assert!(flushed.clone().all(|wc| wc.status == WcStatus::WrFlushErr));
    modify(&a.qp, QpState::Reset);
    assert_eq!(a.qp.query().unwrap().0.rate_limit, 0);
    // Sends that wait at a reset are gone, and all slots are free.
    start(&a.qp);
    a.qp.limit_rate(&STANDSTILL).unwrap();
    for _ in 0..3 {
        (0..CAP.max_send_wr).for_each(|n| send(&a, n as u8));
        modify(&a.qp, QpState::Reset);
        start(&a.qp);
        a.qp.limit_rate(&STANDSTILL).unwrap();
    }
    assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
}

/// A receive that fails moves the queue pair to ERR without a call.
#[test]
fn what_waits_is_flushed_before_what_is_posted_in_err() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    let _rule = a.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    let foreign = Sge { addr: a.buffer.addr(), len: 2048, lkey: 1 };
    a.qp.recv(&RecvWr { wr_id: 99, sges: &[foreign] }).unwrap();
    a.qp.limit_rate(&STANDSTILL).unwrap();
    (0..6).for_each(|n| send(&a, n));
    let other = Port::new();
    send(&other, 0);
    other.poll(1);
    assert_eq!(a.qp.state().unwrap(), QpState::Err);
    send(&a, 6);
    let sent: Vec<_> = a.poll(8).into_iter().filter(|wc| !wc.opcode.is_recv()).collect();
    assert!(sent.iter().map(|wc| wc.sq_count).eq(1..=7), "{sent:?}");
    assert_eq!(sent[6].status, WcStatus::WrFlushErr);
}

#[test]
fn a_bad_request_keeps_its_place() {
    let Some(_alone) = alone() else { return };
    let a = Port::new();
    a.qp.limit_rate(&RateLimit { kbps: 8000, max_burst: 1000, typical_packet: 1000 }).unwrap();
    send(&a, 0);
    send(&a, 1);
    a.post(&RawSendWr { sges: &[a.buffer.sge(0, 8)], ..wr() }).unwrap();
    send(&a, 3);
    let statuses: Vec<_> = a.poll(4).iter().map(|wc| wc.status).collect();
    use WcStatus::*;
    assert_eq!(statuses, [Success, Success, LocLenErr, WrFlushErr]);
    assert_eq!(a.qp.state().unwrap(), QpState::Sqe);
}

#[test]
fn segments_are_paced_one_by_one() {
    let Some(_alone) = alone() else { return };
    let (a, b) = (Port::new(), Port::new());
    let _rule = b.qp.create_flow(rule(&[to(BOB)]), None, None).unwrap();
    (0..4).for_each(|n| b.recv(n, n as usize * 2048, 2048));
    let ip = [&[0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6, 0, 0][..], &[10, 0, 0, 1, 10, 0, 0, 2]].concat();
    let tcp = [0, 1, 0, 2, 0, 0, 0, 7, 0, 0, 0, 0, 0x50, 0x18, 1, 0, 0, 0, 0, 0];
    let header = frame(BOB, 0x0800, &[&ip[..], &tcp].concat());
    a.buffer.write(0, &header);
    a.buffer.write(1 << 16, &[7; 3000]);
    let header_len = header.len() as u16;
    let segmentation = Segmentation { header_addr: a.buffer.addr(), header_len, mss: 1000 };
    let sges = [a.buffer.sge(1 << 16, 3000)];
    a.qp.limit_rate(&STANDSTILL).unwrap();
    a.post(&RawSendWr { segmentation: Some(segmentation), sges: &sges, ..wr() }).unwrap();
    assert_eq!(b.poll(1)[0].byte_len, 1054);
    assert_eq!(b.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    assert_eq!(a.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    a.qp.limit_rate(&RateLimit::default()).unwrap();
    assert_eq!(b.poll(2).len(), 2);
    let sent = a.poll(1)[0];
    assert_eq!((sent.status, sent.opcode), (WcStatus::Success, WcOpcode::Tso));
    let got: Vec<u8> = (0..3).flat_map(|n| b.buffer.read(n * 2048 + header.len(), 1000)).collect();
    assert_eq!(got, [7; 3000]);
}

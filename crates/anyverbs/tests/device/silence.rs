//! A peer that does not answer, and what it says about that.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::opcode::Operation;

use crate::endpoint::*;
use crate::forged::*;

/// The least ACK timeout.
const TIMEOUT: u8 = 8;

fn sockets() -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with("socket:")).count()
}

#[track_caller]
fn soon(what: impl Fn() -> bool) {
    let begin = Instant::now();
    while !what() {
        assert!(begin.elapsed() < Duration::from_secs(60), "it does not happen");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A queue pair that sends to one in INIT, and the sockets of this process before it asked for the reason.
fn unanswered() -> (Endpoint, Endpoint, [Buffer; 2], usize) {
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect_with(b.address(), TIMEOUT, 7);
    b.to_init();
    let (from, to) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    b.recv(0, &[to.sge(0, 64)]);
    let before = sockets();
    a.send(1, SendOp::Send, &[from.sge(0, 64)]);
    soon(|| sockets() > before);
    (a, b, [from, to], before)
}

#[test]
fn the_socket_that_asks_closes_when_the_peer_answers() {
    let _alone = counting_alone();
    let (a, b, _buffers, before) = unanswered();
    b.to_rtr(a.address());
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    soon(|| sockets() == before);
}

#[test]
fn the_socket_that_asks_closes_after_the_last_retry() {
    let _alone = counting_alone();
    let (a, _b, _buffers, before) = unanswered();
    let wc = a.poll(1)[0];
    assert_eq!((wc.status, wc.vendor_err), (WcStatus::RetryExcErr, 1206));
    soon(|| sockets() == before);
}

/// Not a test: a program that is traced, whose request is not answered.
pub(crate) fn fail_unanswered() {
    let (a, _b, _buffers, _) = unanswered();
    assert_eq!(a.poll(1)[0].status, WcStatus::RetryExcErr);
}

/// Not a test: a program that is captured. One queue pair waits for the reason, and another one is destroyed before it looks. Leaves
/// how many packets the program has sent.
pub(crate) fn ask() {
    let (a, _b, _buffers, _) = unanswered();
    a.poll(1);
    let counters = a.context.counters().unwrap();
    let drops = counters.read(Counter::DropQpState);
    let (c, _d, _others, before) = unanswered();
    // The request, the question, and a repeat of the request: now the answer lies in the socket.
    soon(|| counters.read(Counter::DropQpState) >= drops + 3);
    let Endpoint { qp, .. } = c;
    qp.destroy().unwrap();
    soon(|| sockets() == before);
    let sent = counters.read(Counter::SentPkts);
    let capture = std::env::var("ANYVERBS_CAPTURE").unwrap();
    std::fs::write(capture + ".sent", sent.to_string()).unwrap();
}

#[test]
fn the_socket_that_asks_closes_with_its_queue_pair() {
    let _alone = counting_alone();
    let (a, _b, _buffers, before) = unanswered();
    let Endpoint { qp, .. } = a;
    qp.destroy().unwrap();
    soon(|| sockets() == before);
}

/// The answer to a forged packet: its bytes without the ICRC, if there is one.
fn answer(to: &Endpoint, operation: Operation, marks: u8) -> Option<Vec<u8>> {
    let mut headers = forged(operation, to, Psn::new(0x12_3456));
    headers.bth.reserved = marks;
    let before = to.context.counters().unwrap().read(Counter::DropForeign);
    let socket = Forged::from(Ipv4Addr::new(127, 0, 0, 2)).send(headers, &[]);
    counted(to, Counter::DropForeign, before);
    socket.set_nonblocking(true).unwrap();
    let mut bytes = [0; 64];
    let len = socket.recv(&mut bytes).ok()?;
    Some(bytes[..len - 4].to_vec())
}

/// Peers of another make ask for nothing and get nothing new.
#[test]
fn a_drop_is_explained_to_those_who_ask_alone() {
    let _alone = counting_alone();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect(b.address());
    for marks in [0, Bth::OURS, 0x3f & !Bth::ASKS] {
        assert_eq!(answer(&a, Operation::SendOnly, marks), None, "{marks:#x}");
    }
    let wanted = [0xc4, 0, 0xff, 0xff, 0, 0, 0x04, 0xb9, 0, 0x12, 0x34, 0x56];
    let marks = Bth::OURS | Bth::ASKS;
    // AV1209. It is as long as the packet.
    assert_eq!(answer(&a, Operation::SendOnly, marks).as_deref(), Some(&wanted[..]));
    // An answer is none to an answer.
    assert_eq!(answer(&a, Operation::ReadResponseMiddle, marks), None);
}

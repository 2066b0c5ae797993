//! A peer that sends before this end receives. Programs that exchange addresses on their own do not wait for each other.

use anyverbs_testing::Stopwatch;
use std::io::BufRead;
use std::time::Duration;

use anyverbs::*;

use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, introduce, introduced, turn};

/// 4.3 s, and how soon after RTR the request has to be done.
const TIMEOUT: u8 = 20;
const SOON: Duration = Duration::from_millis(500);

/// In the peer: goes to INIT, and on when it is told.
pub(crate) fn wait(e: &Endpoint, buffer: &Buffer) {
    e.to_init();
    e.recv(0, &[buffer.sge(0, 4096)]);
    println!("@ in INIT");
    std::io::stdin().lock().read_line(&mut String::new()).unwrap();
}

/// Sends from `a`, and moves the other end on after this time.
fn send_early(a: &Endpoint, late: Duration, to_rtr: impl FnOnce()) {
    let src = Buffer::new(&a.pd, 4096);
    a.send(1, SendOp::Send, &[src.sge(0, 100)]);
    std::thread::sleep(late);
    assert!(a.cq.poll(&mut [Wc::default(); 1]).unwrap() == 0);
    let begin = Stopwatch::start();
    to_rtr();
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    let took = begin.elapsed();
    println!("{late:?} late: {took:?} after RTR");
    assert!(took < SOON, "{took:?}");
}

fn between_processes(variables: &[(&str, &str)], late: Duration) {
    let _turn = turn();
    let mut peer = Peer::spawn("rc too early", variables);
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, OFFERED);
    let (address, _) = introduced(&peer.hear());
    e.connect_with(address, TIMEOUT, 7);
    peer.say(&introduce(&e, &buffer));
    assert_eq!(peer.hear(), "@ in INIT");
    send_early(&e, late, || peer.say("go"));
}

#[test]
fn a_request_before_rtr_is_asked_for_within_a_process() {
    let _turn = turn();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect_with(b.address(), TIMEOUT, 7);
    b.to_init();
    let dst = Buffer::new(&b.pd, 4096);
    b.recv(0, &[dst.sge(0, 4096)]);
    send_early(&a, Duration::from_millis(50), || b.to_rtr(a.address()));
}

#[test]
fn a_request_before_rtr_is_asked_for_between_processes() {
    between_processes(&[], Duration::from_millis(50));
}

/// Late enough that the requester's own next attempt is a second away.
#[test]
fn a_request_before_rtr_is_asked_for_by_udp() {
    between_processes(&[("ANYVERBS_SHM", "0")], Duration::from_millis(1100));
}

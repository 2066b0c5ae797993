//! Long SENDs to another process, which fetches their payload from where it lies. The peer is this test binary
//! (`same_host::peer`).

use std::io::BufRead;

use anyverbs::*;
use anyverbs_proto::counters::Counter;

use crate::endpoint::*;
use crate::same_host::{Peer, SIZE, is_on, turn};

/// Two packets that are fetched.
const LEN: usize = 100_000;

/// FNV-1a of the bytes.
fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// In the peer: posts a receive, waits for a completion, or says how many there are, as it is told.
pub(crate) fn serve(e: &Endpoint, buffer: &Buffer) {
    for line in std::io::stdin().lock().lines() {
        match line.unwrap().as_str() {
            "receive" => {
                e.recv(7, &[buffer.sge(5, LEN / 2), buffer.sge(5 + LEN / 2, LEN)]);
                println!("@ posted");
            }
            "wait" => {
                let wc = e.poll(1)[0];
                let sum = sum(&buffer.read(5, wc.byte_len as usize));
                println!("@ {:?} {} {sum}", wc.status, wc.byte_len);
            }
            "count" => {
                let mut wcs = [Wc::default(); 4];
                println!("@ {}", e.cq.poll(&mut wcs).unwrap());
            }
            _ => break,
        }
    }
}

fn ask(peer: &mut Peer, line: &str) -> String {
    peer.say(line);
    peer.hear()
}

fn refused_packets(e: &Endpoint) -> u64 {
    e.context.counters().unwrap().read(Counter::PacketSeqErr)
}

/// Sends `LEN` bytes, whole.
fn send(e: &Endpoint, peer: &mut Peer, src: &Buffer, seed: u8) {
    let data = pattern(LEN, seed);
    src.write(3, &data);
    assert_eq!(ask(peer, "receive"), "@ posted");
    e.send(1, SendOp::Send, &[src.sge(3, LEN)]);
    assert_eq!(e.poll(1)[0].status, WcStatus::Success);
    assert_eq!(ask(peer, "wait"), format!("@ Success {LEN} {}", sum(&data)));
}

/// Connects to a peer, and sends until payloads are fetched, if they are: the processes have to know each other.
fn connected(peer: &mut Peer) -> (Endpoint, Buffer) {
    let e = Endpoint::new(QpType::Rc);
    let src = Buffer::with_access(&e.pd, SIZE, Access::LOCAL_WRITE);
    let before = refused_packets(&e);
    peer.connect(&e, &src);
    for seed in 0..5 {
        send(&e, peer, &src, seed);
    }
    assert_eq!(refused_packets(&e), before, "what the peer could not fetch");
    (e, src)
}

/// A SEND to a peer that is stopped until `meanwhile` is done. The status of the SEND, and the peer.
fn send_while_it_stands(
    meanwhile: impl FnOnce(&Endpoint, &mut Option<Buffer>),
) -> (WcStatus, Peer) {
    let mut peer = Peer::spawn("rc fetched", &[]);
    let (e, src) = connected(&mut peer);
    assert_eq!(ask(&mut peer, "receive"), "@ posted");
    src.write(3, &pattern(LEN, 100));
    peer.stop();
    e.send(2, SendOp::Send, &[src.sge(3, LEN)]);
    let mut src = Some(src);
    meanwhile(&e, &mut src);
    peer.go_on();
    (e.poll(1)[0].status, peer)
}

/// The SEND has failed for its memory, and the peer has received nothing.
fn is_a_fault((status, mut peer): (WcStatus, Peer)) {
    if is_on() {
        assert_eq!(status, WcStatus::LocProtErr);
        assert_eq!(ask(&mut peer, "count"), "@ 0");
    }
}

#[test]
fn a_payload_is_fetched_when_the_peer_receives_it() {
    let _turn = turn();
    let changed = pattern(LEN, 101);
    let (status, mut peer) = send_while_it_stands(|_, src| {
        src.as_ref().unwrap().write(3, &changed);
    });
    assert_eq!(status, WcStatus::Success);
    let got = ask(&mut peer, "wait");
    if is_on() {
        // The program changed the bytes before its SEND was complete.
        assert_eq!(got, format!("@ Success {LEN} {}", sum(&changed)));
    }
}

#[test]
fn a_region_that_ends_before_its_send_is_a_fault() {
    let _turn = turn();
    is_a_fault(send_while_it_stands(|_, src| drop(src.take())));
}

#[test]
fn memory_that_is_unmapped_before_its_send_is_a_fault() {
    let _turn = turn();
    is_a_fault(send_while_it_stands(|_, src| {
        let begin = src.as_ref().unwrap().addr().next_multiple_of(4096);
        let (at, len) = (begin as usize as *mut _, LEN / 4096 * 4096);
        // SAFETY: pages in the middle of the buffer, which nobody touches by a reference; what lies there is given up.
        let held = unsafe {
            libc::mmap(
                at,
                len,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        assert_ne!(held, libc::MAP_FAILED);
    }));
}

#[test]
fn a_send_that_was_flushed_never_arrives() {
    let _turn = turn();
    let (status, mut peer) = send_while_it_stands(|e, src| {
        let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
        e.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        src.as_ref().unwrap().write(3, &pattern(LEN, 102));
    });
    assert_eq!(status, WcStatus::WrFlushErr);
    if is_on() {
        assert_eq!(ask(&mut peer, "count"), "@ 0");
    }
}

/// The peer, which was not reset, may expect the very PSN of the message that a reset has ended.
#[test]
fn a_send_of_before_a_reset_is_not_fetched_after_it() {
    let _turn = turn();
    let mut peer = Peer::spawn("rc fetched", &[]);
    let e = Endpoint::new(QpType::Rc);
    let src = Buffer::with_access(&e.pd, SIZE, Access::LOCAL_WRITE);
    let (address, _) = peer.connect(&e, &src);
    for seed in 0..5 {
        send(&e, &mut peer, &src, seed);
    }
    assert_eq!(ask(&mut peer, "receive"), "@ posted");
    src.write(3, &pattern(LEN, 100));
    peer.stop();
    e.send(2, SendOp::Send, &[src.sge(3, LEN)]);
    let attr = QpAttr { state: QpState::Reset, ..QpAttr::default() };
    e.qp.modify(&attr, QpAttrMask::STATE).unwrap();
    e.connect(address);
    src.write(3, &pattern(LEN, 101));
    peer.go_on();
    if is_on() {
        // It has read what was in the ring when it answers.
        assert_eq!(ask(&mut peer, "count"), "@ 0");
    }
}

#[test]
fn a_peer_that_fetches_nothing_is_sent_all() {
    let _turn = turn();
    let capture = std::env::temp_dir().join(format!("fetched-{}.pcapng", std::process::id()));
    let path = capture.to_str().unwrap();
    // A container's filter refuses the copies of the last.
    for (role, variable) in [
        ("rc fetched", ("ANYVERBS_DIRECT", "0")),
        ("rc fetched", ("ANYVERBS_CAPTURE", path)),
        ("rc no copies, fetched", ("ANYVERBS_DIRECT", "1")),
    ] {
        connected(&mut Peer::spawn(role, &[variable]));
    }
    let _ = std::fs::remove_file(capture);
}

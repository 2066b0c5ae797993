//! Traces: spans of work requests, packets, retries and waits, in a file that several processes write.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use anyverbs::*;
use serde_json::Value;

use crate::capture::{BY_UDP, recorded};
use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer};

/// The events of a file; each line is whole.
fn read(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.strip_prefix("[\n").unwrap().lines();
    lines.map(|line| serde_json::from_str(line.strip_suffix(',').unwrap()).unwrap()).collect()
}

fn is(event: &Value, phase: &str, kind: &str) -> bool {
    event["ph"] == phase && event["cat"] == kind
}

/// Packets by what both ends know of them: destination, PSN and opcode.
fn packets(events: &[Value], direction: &str) -> BTreeMap<(u64, u64, String), usize> {
    let mut found = BTreeMap::new();
    for event in
        events.iter().filter(|e| is(e, "i", "packet") && e["args"]["direction"] == direction)
    {
        let number = |key: &str| event["args"][key].as_u64().unwrap();
        let name = event["name"].as_str().unwrap().to_owned();
        *found.entry((number("dest"), number("psn"), name)).or_default() += 1;
    }
    found
}

#[test]
fn a_trace_has_each_request_from_its_post_to_its_completion() {
    let path = recorded("trace", "", "ANYVERBS_TRACE", &[]);
    let events = read(&path);
    std::fs::remove_file(path).unwrap();
    let spans = |phase: &str| {
        let spans = events.iter().filter(|event| is(event, phase, "work"));
        spans.map(|e| (e["pid"].as_u64(), e["id2"]["local"].as_u64())).collect::<Vec<_>>()
    };
    let (begun, ended) = (spans("b"), spans("e"));
    assert_eq!(begun.iter().collect::<BTreeSet<_>>(), ended.iter().collect::<BTreeSet<_>>());
    // 17 requests each to another process and within this one, 3 messages, and a datagram.
    assert_eq!((begun.len(), ended.len()), (2 * 17 + 2 * 3 + 2, 2 * 17 + 2 * 3 + 2));
    let bad = events.iter().find(|e| is(e, "e", "work") && e["args"]["status"] != "IBV_WC_SUCCESS");
    assert_eq!(bad, None);
    assert_eq!(packets(&events, "out"), packets(&events, "in"), "nothing is lost through memory");
    let named = events.iter().filter(|event| event["name"] == "process_name");
    assert_eq!(named.count(), 2);
    // As the log names queue pairs.
    for event in events.iter().filter(|event| event["name"] == "thread_name") {
        let (name, qpn) = (event["args"]["name"].as_str(), event["tid"].as_u64().unwrap());
        assert!(name.is_some_and(|name| name.starts_with(&format!("QP {qpn:#08x} ("))), "{event}");
    }
    let ways: BTreeSet<_> =
        events.iter().filter_map(|event| event["args"]["way"].as_str()).collect();
    assert_eq!(ways, BTreeSet::from(["in-process", "ring"]));
}

#[test]
fn a_trace_shows_retries() {
    let loss = [BY_UDP[0], BY_UDP[1], ("ANYVERBS_LOSS", "0.1")];
    let path = recorded("retries", "reliable", "ANYVERBS_TRACE", &loss);
    let events = read(&path);
    std::fs::remove_file(path).unwrap();
    assert!(events.iter().any(|event| is(event, "i", "retry")));
    assert!(events.iter().any(|event| event["args"]["again"] == true));
    let (out, came) = (packets(&events, "out"), packets(&events, "in"));
    assert!(came.keys().all(|packet| out.contains_key(packet)));
    assert!(out.values().sum::<usize>() > came.values().sum::<usize>());
}

/// They go by UDP, whichever way the queue pair has.
#[test]
fn a_trace_has_the_packets_that_ask_why_there_is_no_answer() {
    let path = recorded("asked", "fail unanswered", "ANYVERBS_TRACE", &[]);
    let events = read(&path);
    std::fs::remove_file(path).unwrap();
    let by_udp = |direction: &str| {
        let is_it = |args: &Value| args["way"] == "udp" && args["direction"] == direction;
        let packets = events.iter().filter(|event| is(event, "i", "packet"));
        packets.map(|event| &event["args"]).filter(|args| is_it(args)).collect::<Vec<_>>()
    };
    let out = by_udp("out");
    assert!(!out.is_empty() && out.iter().all(|args| args["again"] == true), "{out:?}");
    assert_eq!(out.len(), by_udp("in").len());
}

#[test]
fn a_trace_shows_injected_faults() {
    let script = [("ANYVERBS_FAULTS", "on qp 1: drop packet 3")];
    let path = recorded("injected", "reliable", "ANYVERBS_TRACE", &script);
    let events = read(&path);
    std::fs::remove_file(path).unwrap();
    let faults: Vec<_> = events.iter().filter(|event| is(event, "i", "fault")).collect();
    // One of each of two processes.
    assert_eq!(faults.len(), 2, "{faults:?}");
    let name = faults[0]["name"].as_str().unwrap();
    assert!(name.starts_with("sent packet 3 is lost: RC "), "{name}");
    let args = serde_json::json!({ "rule": "on qp 1: drop packet 3", "qp": 1 });
    assert_eq!(faults[0]["args"], args);
    let (out, came) = (packets(&events, "out"), packets(&events, "in"));
    assert!(came.keys().all(|packet| out.contains_key(packet)), "what is lost has not left");
}

/// The part of the program that is traced for [`a_trace_shows_waits_and_failures`].
pub(crate) fn fail() {
    let (a, b) = pair(QpType::Rc);
    let [src, dst] = [&a, &b].map(|e| Buffer::new(&e.pd, 4096));
    // The peer asks for waits of 10.24 ms.
    let attr = QpAttr { min_rnr_timer: 20, ..QpAttr::default() };
    b.qp.modify(&attr, QpAttrMask::MIN_RNR_TIMER).unwrap();
    a.send(1, SendOp::Send, &[src.sge(0, 8)]);
    let counters = a.context.counters().unwrap();
    let begin = Instant::now();
    while counters.read(Counter::RnrNakReceived) == 0 {
        a.cq.poll(&mut [Wc::default()]).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(60), "no RNR NAK came");
    }
    // An ACK of the peer's request leaves meanwhile.
    b.send(6, SendOp::Write(src.remote(0)), &[dst.sge(0, 8)]);
    b.poll(1);
    b.recv(2, &[dst.sge(0, 8)]);
    a.poll(1);
    b.poll(1);
    let nowhere = RemoteAddr { rkey: 0xdead, ..dst.remote(0) };
    a.send(3, SendOp::Write(nowhere), &[src.sge(0, 8)]);
    a.send(4, SendOp::Send, &[src.sge(0, 8)]);
    assert_eq!(a.poll(2)[0].status, WcStatus::RemAccessErr);
    b.recv(5, &[dst.sge(0, 8)]);
}

#[test]
fn a_trace_shows_waits_and_failures() {
    let path = recorded("waits", "fail", "ANYVERBS_TRACE", &[]);
    let events = read(&path);
    std::fs::remove_file(path).unwrap();
    let waits: Vec<_> = events.iter().filter(|event| is(event, "X", "wait")).collect();
    assert!(waits.iter().all(|wait| wait["name"] == "waits for a receive (RNR)"), "{waits:?}");
    // As long as the RNR NAK asks for, whatever leaves meanwhile.
    let is_long = |wait: &&Value| wait["dur"].as_f64().is_some_and(|micros| micros >= 10_000.0);
    assert!(!waits.is_empty() && waits.iter().all(is_long), "{waits:?}");
    let status = |wr_id: u64| {
        let mut events = events.iter();
        let begun = events.find(|e| is(e, "b", "work") && e["args"]["wr_id"] == wr_id).unwrap();
        let ended = events.find(|e| is(e, "e", "work") && e["id2"] == begun["id2"]).unwrap();
        ended["args"]["status"].as_str().unwrap().to_owned()
    };
    assert_eq!(
        [1, 2, 3, 4].map(status),
        ["IBV_WC_SUCCESS", "IBV_WC_SUCCESS", "IBV_WC_REM_ACCESS_ERR", "IBV_WC_WR_FLUSH_ERR"]
    );
    assert!(events.iter().any(|e| is(e, "i", "error") && e["name"] == "IBV_WC_REM_ACCESS_ERR"));
}

/// The part of the program that is traced for [`a_killed_process_leaves_whole_lines`].
pub(crate) fn kill() {
    let mut peer = Peer::spawn("rc flood", &[]);
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, OFFERED);
    peer.connect(&e, &buffer);
    let deadline = Instant::now() + Duration::from_secs(10);
    while buffer.read(0, 1) != [0xaa] {
        assert!(Instant::now() < deadline, "nothing was written");
        e.cq.poll(&mut [Wc::default()]).unwrap();
    }
    peer.signal(libc::SIGKILL);
    peer.wait();
}

#[test]
fn a_killed_process_leaves_whole_lines() {
    let path = recorded("killed", "kill", "ANYVERBS_TRACE", &[]);
    let events = read(&path);
    std::fs::remove_file(path).unwrap();
    let count = |phase: &str| events.iter().filter(|event| is(event, phase, "work")).count();
    assert!(count("b") > count("e"), "the killed process had work outstanding");
}

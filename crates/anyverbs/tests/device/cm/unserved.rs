//! Requests that come before their listener.

use std::time::Instant;

use super::*;

/// The reason of a refusal because there is no listener (IBA table 108).
const INVALID_SERVICE_ID: i32 = 8;

/// Requests that are kept; more are refused at once.
const MOST: usize = 64;

/// One after the other: only a few requests are kept.
#[test]
fn requests_wait_for_their_listener() {
    a_listener_that_is_a_little_late_gets_the_request();
    nobody_is_waited_for_long();
    who_stopped_listening_may_come_back();
    who_never_listened_is_not_waited_for();
    not_many_are_waited_for();
}

fn a_listener_that_is_a_little_late_gets_the_request() {
    let late = Node::tcp();
    late.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    let active = Node::towards(&late.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    assert!(!poll(&active.channel, 20), "refused at once");
    late.id.listen(0).unwrap();
    let (passive, _) = late.request();
    drop(passive);
    expect(&active.channel, EventKind::Rejected);
}

fn nobody_is_waited_for_long() {
    let nobody = Node::tcp();
    nobody.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    let active = Node::towards(&nobody.on("127.0.0.1"));
    let begin = Instant::now();
    active.id.connect(&PARAM).unwrap();
    let event = expect(&active.channel, EventKind::Rejected);
    assert_eq!(event.status, INVALID_SERVICE_ID);
    assert!(begin.elapsed() >= SECOND / 10, "{:?}", begin.elapsed());
}

fn who_stopped_listening_may_come_back() {
    let first = Node::tcp();
    first.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    first.id.listen(0).unwrap();
    let here = first.on("127.0.0.1");
    drop(first);
    let active = Node::towards(&here);
    // As perftest does between its two connections.
    std::thread::sleep(SECOND + SECOND / 10);
    active.id.connect(&PARAM).unwrap();
    assert!(!poll(&active.channel, 20), "refused at once");
    let second = Node::tcp();
    second.id.bind_addr(&here).unwrap();
    second.id.listen(0).unwrap();
    let (passive, _) = second.request();
    drop(passive);
    expect(&active.channel, EventKind::Rejected);
}

/// The refusal comes sooner than any wait would end. A machine that is too slow proves nothing.
fn who_never_listened_is_not_waited_for() {
    let refused_at_once = (0..20).any(|_| {
        let bound = Node::tcp();
        bound.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
        let there = bound.on("127.0.0.1");
        drop(bound);
        let active = Node::towards(&there);
        let begin = Instant::now();
        active.id.connect(&PARAM).unwrap();
        assert_eq!(expect(&active.channel, EventKind::Rejected).status, INVALID_SERVICE_ID);
        begin.elapsed() < SECOND / 10
    });
    assert!(refused_at_once);
}

/// Further requests are refused at once, so that a flood to a closed port takes no memory.
fn not_many_are_waited_for() {
    let nobody = Node::tcp();
    nobody.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    // A machine may be too slow to ask that often while the first wait. Then the test says nothing.
    let tells = || {
        let towards = || Node::towards(&nobody.on("127.0.0.1"));
        let asking: Vec<_> = (0..MOST + 8).map(|_| towards()).collect();
        for active in &asking {
            active.id.connect(&PARAM).unwrap();
        }
        let (kept, refused) = asking.split_at(MOST);
        for active in refused {
            assert_eq!(expect(&active.channel, EventKind::Rejected).status, INVALID_SERVICE_ID);
        }
        let waits = kept.iter().any(|active| is_quiet(&active.channel));
        for active in kept {
            assert_eq!(expect(&active.channel, EventKind::Rejected).status, INVALID_SERVICE_ID);
        }
        waits
    };
    assert!((0..20).any(|_| tells()), "as many more are kept");
}

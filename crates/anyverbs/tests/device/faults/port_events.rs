//! The asynchronous events of ports and devices by rules.

use std::os::fd::AsRawFd;

use AsyncEventKind::{DeviceFatal, GidChange, LidChange, PortActive, PortErr, SmChange};

use super::*;

/// The events of the second device that are there when the first one has its own.
fn events_by_then() -> Vec<AsyncEventKind> {
    let [a, b] = [0, 1].map(|n| Context::open(&devices().unwrap()[n].name).unwrap());
    assert_eq!(event(&a), LidChange);
    let fd = b.async_fd().as_raw_fd();
    // SAFETY: a descriptor that is open.
    let is_set = unsafe { libc::fcntl(fd, libc::F_SETFL, libc::O_NONBLOCK) };
    assert_eq!(is_set, 0);
    std::iter::from_fn(|| b.get_async_event().ok()).map(|event| event.kind()).collect()
}

/// The contexts are open by the first event, on a busy machine too. One at the start may be earlier.
fn told(name: &str, rules: &[&str], wanted: &[AsyncEventKind]) {
    let rules: String = rules.iter().map(|rule| format!("on device anyverbs1: {rule}\n")).collect();
    let script = format!("{rules}on device anyverbs0: event LID_CHANGE after 3s");
    let devices = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];
    with(&format!("port_events::{name}"), &script, &devices, || {
        let events = events_by_then();
        let from_start = !rules.contains("after");
        let at = usize::from(from_start && wanted.len() > events.len());
        assert_eq!(events, wanted[at..]);
    });
}

#[test]
fn a_port_that_is_down_for_two_reasons_is_down_once() {
    told(
        "a_port_that_is_down_for_two_reasons_is_down_once",
        &["down for 300ms after 2s", "gid 0 removed for 300ms after 2100ms"],
        &[PortErr, GidChange, GidChange, PortActive],
    );
}

#[test]
fn a_port_without_an_address_that_goes_down_too_is_down_once() {
    told(
        "a_port_without_an_address_that_goes_down_too_is_down_once",
        &[
            "gid 0 removed for 200ms after 2s",
            "down for 200ms after 2100ms",
            "down for 9s after 2s",
        ],
        &[GidChange, PortErr, GidChange],
    );
}

#[test]
fn a_port_that_has_no_address_from_the_start_comes_up_with_it() {
    told(
        "a_port_that_has_no_address_from_the_start_comes_up_with_it",
        &["gid 0 removed for 2500ms", "down for 100ms after 2s"],
        &[GidChange, PortActive],
    );
}

#[test]
fn a_port_that_is_down_twice_from_the_start_comes_up_once() {
    told(
        "a_port_that_is_down_twice_from_the_start_comes_up_once",
        &["down for 2200ms", "down for 2500ms"],
        &[PortErr, PortActive],
    );
}

#[test]
fn a_dead_device_has_no_more_events() {
    told(
        "a_dead_device_has_no_more_events",
        &[
            "event SM_CHANGE after 2s",
            "fatal after 2100ms",
            "gid 0 removed for 100ms after 2200ms",
            "down for 100ms after 2250ms",
            "removed after 2400ms",
            "event SM_CHANGE after 2500ms",
        ],
        &[SmChange, DeviceFatal],
    );
}

#[test]
fn events_that_nobody_reads_wait_in_their_order() {
    told(
        "events_that_nobody_reads_wait_in_their_order",
        &["down for 100ms after 2s", "down for 100ms after 2300ms", "down after 2600ms"],
        &[PortErr, PortActive, PortErr, PortActive, PortErr],
    );
}

//! Network namespaces for tests: a test thread moves into one of its own, which ends with the thread and its children.

#![allow(dead_code, reason = "each test binary uses a part")]

use std::process::Command;
use std::time::{Duration, Instant};

/// With this variable set, the caller has made a network namespace with loopback up and runs the tests there one by
/// one, as any user. Tests that need more are skipped.
const GIVEN: &str = "ANYVERBS_TEST_IN_THIS_NETNS";

/// Moves the calling thread into a new network namespace with loopback up. Answers false without privileges: the
/// test is skipped.
pub(crate) fn isolate() -> bool {
    if std::env::var_os(GIVEN).is_some() {
        return true;
    }
    if !isolate_down() {
        return false;
    }
    ip("link set lo up");
    true
}

/// As [`isolate`], with loopback down.
pub(crate) fn isolate_down() -> bool {
    // SAFETY: unshare(CLONE_NEWNET) changes the calling thread's network namespace and touches no memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
        let error = std::io::Error::last_os_error();
        anyverbs_testing::skip(format_args!("cannot make a network namespace: {error}"));
        return false;
    }
    true
}

/// As [`isolate`], for tests that configure the namespace or change users.
pub(crate) fn isolate_as_root() -> bool {
    anyverbs_testing::root_or_skip() && isolate()
}

/// Runs `ip` with `arguments`, which must succeed; its output.
pub(crate) fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("ip prints text")
}

/// Lets an interface send a frame of the largest size every other second, and keep the others. Answers false where that
/// cannot be had: the test is skipped.
pub(crate) fn choke(interface: &str) -> bool {
    let arguments = format!("qdisc add dev {interface} root tbf rate 8kbit burst 2kb limit 1gb");
    let output = Command::new("tc").args(arguments.split_whitespace()).output();
    if !output.as_ref().is_ok_and(|output| output.status.success()) {
        anyverbs_testing::skip(format_args!(
            "tc cannot limit the rate of an interface: {output:?}"
        ));
        return false;
    }
    true
}

/// Sets both ends of a cable up, and waits until they carry: frames sent before that are lost silently.
pub(crate) fn plug_in(ends: [&str; 2]) {
    for end in ends {
        ip(&format!("link set {end} up"));
    }
    let deadline = Instant::now() + Duration::from_secs(20);
    while !ends.iter().all(|end| ip(&format!("link show {end}")).contains("state UP")) {
        assert!(Instant::now() < deadline, "{ends:?} do not carry: {}", ip("link show"));
        std::thread::sleep(Duration::from_millis(1));
    }
}

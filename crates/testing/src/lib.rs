//! What the tests of several crates share.

use std::env;
use std::process::Command;

/// Runs `test`, the body of the test called `name`, in a process where nothing else runs.
///
/// `cargo test` runs all tests of a crate in one process. There they share its engine, what one unmaps another may map, and what one
/// closes the child of another still holds until it calls exec.
///
/// # Panics
/// If the test fails, or is not called `name`.
pub fn in_own_process(name: &str, test: impl FnOnce()) {
    const ALONE: &str = "ANYVERBS_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return test();
    }
    let exe = env::current_exe().expect("a test knows its executable");
    let mut alone = Command::new(exe);
    // Nor does it share a registry with them.
    alone.env_remove("ANYVERBS_REGISTRY").env_remove("ANYVERBS_UDP_PORT");
    let output = alone.args(["--exact", name]).env(ALONE, "1").output();
    let output = output.expect("a test can start its executable");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

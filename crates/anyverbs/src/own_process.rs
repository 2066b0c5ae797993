//! Tests that need a process of their own: `cargo test` runs all tests of a crate in one, where they share its engine, and
//! memory that one has unmapped may be mapped by another.

use std::env;
use std::process::Command;

/// Runs `test`, the body of the test called `name`, in a process where nothing else runs.
pub(crate) fn in_own_process(name: &str, test: impl FnOnce()) {
    const ALONE: &str = "ANYVERBS_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return test();
    }
    let mut alone = Command::new(env::current_exe().unwrap());
    // Nor does it share a registry with them.
    alone.env_remove("ANYVERBS_REGISTRY").env_remove("ANYVERBS_UDP_PORT");
    let output = alone.args(["--exact", name]).env(ALONE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

//! `cargo xtask sanitize`: tests below sanitizers.
//!
//! Sanitizers are not stable: `RUSTC_BOOTSTRAP` lets the stable compiler have them. The standard library stays as it is, without
//! them, which AddressSanitizer does not mind.

use std::process::Command;

use anyhow::bail;

use crate::conformance::Tally;
use crate::interrupt;
use crate::test::{libtest_summary, run_counted, run_each_alone};
use crate::workspace::{cargo, target};

const TRIPLE: &str = env!("XTASK_TARGET");

/// The runs, and their sanitizers.
const RUNS: [(&str, &[&str]); 1] = [(
    "address",
    // Crates with unsafe code of their own that start no processes by the path of a library.
    &[
        "-p",
        "anyverbs-net",
        "-p",
        "anyverbs-queue-memory",
        "-p",
        "anyverbs-objects",
        "-p",
        "anyverbs-links",
        "-p",
        "anyverbs-transport",
        "-p",
        "anyverbs-cm",
        "-p",
        "anyverbs-raw",
        "-p",
        "anyverbs-xrc",
        "-p",
        "anyverbs",
        "--lib",
    ],
)];

/// Tests that only builds without a sanitizer run. Processes that are slowed ten times each overflow a socket again and
/// again, and wait for their timers. They run the same code as the tests beside them.
const NOT_SLOWED: &[&str] = &[
    "a_thousand_at_once_to_a_socket_of_ordinary_size",
    "many_clients_at_once_to_a_socket_of_ordinary_size",
];

/// Runs all, and fails if one finds something.
pub(crate) fn run() -> anyhow::Result<()> {
    interrupt::catch();
    let tally = run_counted_all()?;
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} tests failed", tally.failed);
    }
    Ok(())
}

/// The same, counted.
pub(crate) fn run_counted_all() -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    for (sanitizer, what) in RUNS {
        let skipped = NOT_SLOWED.iter().flat_map(|test| ["--skip", test]);
        let what = ["--target", TRIPLE].iter().chain(what).chain(&["--"]).copied();
        let what: Vec<_> = what.chain(skipped).collect();
        tally += run_each_alone(&mut sanitized(sanitizer), &what)?;
    }
    tally += miri()?;
    Ok(tally)
}

fn sanitized(sanitizer: &str) -> Command {
    let mut command = cargo();
    command
        .env("RUSTC_BOOTSTRAP", "1")
        .env("CARGO_ENCODED_RUSTFLAGS", format!("-Zsanitizer={sanitizer}"))
        .env("CARGO_TARGET_DIR", target().join(format!("sanitize-{sanitizer}")))
        // A copy from a page that is not there is meant to fail, and is caught.
        .env("ASAN_OPTIONS", "allow_user_segv_handler=1:detect_leaks=0");
    command
}

/// Miri interprets `proto` and the rings, where it is installed: it comes with nightly toolchains only.
fn miri() -> anyhow::Result<Tally> {
    let has_miri = Command::new("rustup")
        .args(["run", "nightly", "cargo", "miri", "--version"])
        .output()
        .is_ok_and(|output| output.status.success());
    if !has_miri {
        println!("skip miri: no nightly toolchain with the components miri and rust-src");
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    let mut command = Command::new("rustup");
    command
        .current_dir(crate::workspace::root())
        .args(["run", "nightly", "cargo", "miri", "test", "--quiet", "--no-fail-fast"])
        .args([
            "-p",
            "anyverbs-keys",
            "-p",
            "anyverbs-proto",
            "-p",
            "anyverbs-queue-memory",
            "--lib",
        ])
        .env("CARGO_TARGET_DIR", target().join("miri"));
    run_counted(&mut command, libtest_summary, &mut std::io::stdout())
}

//! Other people's suites and tools, run on the device with their expected results as data in `conformance/`.

mod exchange;
mod failover;
mod findings;
mod hosts;
mod impair;
mod mpi4py;
mod process;
mod pyverbs;
mod results;
mod rxe;
mod survive;
mod table;
mod tools;

use std::fmt;
use std::ops::AddAssign;

use anyhow::bail;
use clap::ValueEnum;

use crate::dist::{self, Dist};
use crate::interrupt;

pub(crate) use hosts::{Hosts, Side, Sockets, Topology};
pub(crate) use process::{Process, quiet, wait_for};
pub(crate) use results::{Report, cmtime_connects, iperf3_gbits, transfers};
pub(crate) use rxe::{Family, Guest};

/// A suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// Debian's RDMA programs, between processes and between hosts
    Tools,
    /// rdma-core's Python tests
    Pyverbs,
    /// The same of rdma-core 59, built from its package on PyPI
    #[value(name = "pyverbs-59")]
    Pyverbs59,
    /// The Linux kernel's Soft-RoCE as a peer
    Rxe,
    /// Bad networks between two hosts
    Impair,
    /// Processes that are killed and stopped
    Survive,
    /// Programs of which a device fails
    Failover,
    /// The tests of mpi4py on Debian's Open MPI
    Mpi4py,
}

/// The cases to run, and the options for the run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// The suite; without it, tools and pyverbs
    suite: Option<Suite>,
    #[command(flatten)]
    selection: Selection,
    #[command(flatten)]
    dist: dist::Options,
}

/// The selected cases of a suite.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Selection {
    /// Every case, not the default selection only
    #[arg(long)]
    pub(crate) all: bool,
    /// Only cases with this in their name, whether or not they are in the default selection
    #[arg(long, value_name = "TEXT")]
    pub(crate) filter: Option<String>,
    /// Cases at the same time, each on hosts of its own; more than one disturbs timing on a small machine
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub(crate) jobs: usize,
    /// Check the programs as `anyverbs run --check` does: each finding has to stand in conformance/findings.toml
    #[arg(long)]
    pub(crate) check: bool,
    /// Begins the random choices of suites that make some (impair, survive)
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// Rounds of a suite that has some (survive)
    #[arg(long, value_name = "N")]
    pub(crate) rounds: Option<u64>,
    /// Write the result of a whole run to its page in docs/ (impair, rxe, survive)
    #[arg(long, requires = "all", conflicts_with_all = ["filter", "rounds"])]
    pub(crate) write_docs: bool,
}

impl Selection {
    fn takes(&self, name: &str, default: bool) -> bool {
        match &self.filter {
            Some(text) => name.contains(text.as_str()),
            None => self.all || default,
        }
    }
}

/// The number of cases by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// `cargo xtask conformance`.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    let suites: &[Suite] = match &options.suite {
        Some(suite) => std::slice::from_ref(suite),
        None => &[Suite::Pyverbs, Suite::Tools],
    };
    if options.selection.check && suites.contains(&Suite::Rxe) {
        bail!("--check says nothing of the programs of rxe, which run in a virtual machine");
    }
    let dist = dist::run(&options.dist)?;
    let mut tally = Tally::default();
    for suite in suites {
        tally += run_suite(*suite, &dist, &options.selection)?;
    }
    println!("{tally}");
    if tally.failed > 0 {
        bail!("{} failed", tally.failed);
    }
    Ok(())
}

/// Runs one suite on a finished layout.
pub(crate) fn run_suite(suite: Suite, dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    match suite {
        Suite::Tools => tools::run(dist, selection),
        Suite::Pyverbs => pyverbs::run(dist, pyverbs::Release::Debian, selection),
        Suite::Pyverbs59 => pyverbs::run(dist, pyverbs::Release::Pypi, selection),
        Suite::Rxe => rxe::run(dist, selection),
        Suite::Impair => impair::run(dist, selection),
        Suite::Survive => survive::run(dist, selection),
        Suite::Failover => failover::run(dist, selection),
        Suite::Mpi4py => mpi4py::run(dist, selection),
    }
}

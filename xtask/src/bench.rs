//! `cargo xtask bench`: the device beside its peers, in turn (A B A B ...), one core a side; medians, and ratios against their targets.
//!
//! Absolute figures mean little on a busy or virtual machine; the ratio of two programs that ran in turn does.

mod contender;
mod docs;
mod emulated;
mod machine;
mod place;
mod plot;
mod readings;
mod report;
mod rows;
mod runner;
mod sweep;
mod turns;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde::Serialize;

use self::contender::Contender;
use self::emulated::Guests;
use self::machine::{Machine, Ticks};
use self::report::Outcome;
use self::rows::Row;
use self::runner::{Rounds, Runner};
use self::sweep::{Chart, Sweep};
use crate::dist;
use crate::interrupt;
use crate::packages::{self, Package};
use crate::workspace::{cargo, root, succeed, target};

/// The measurements to run.
///
/// A run of everything takes about 20 minutes, with `--runs 1` about 10. The guests of Soft-RoCE take 3 of these. No other program should use the machine: two
/// programs at a time spin on one core each.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Rounds in which every side of a comparison runs once; a round in which the machine changed its state is repeated
    #[arg(long, default_value_t = 5, value_name = "N")]
    runs: usize,
    /// Rounds for a point of a plot
    #[arg(long, default_value_t = 1, value_name = "N")]
    plot_runs: usize,
    /// Seconds of a bandwidth run
    #[arg(long, default_value_t = 1, value_name = "S", value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Only measurements with this in their name
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    /// Print the names of the measurements and end
    #[arg(long)]
    list: bool,
    /// Count the instructions of each call of a message on one host instead, exactly, by single steps
    #[arg(long, conflicts_with_all = ["filter", "list", "write_docs"])]
    instructions: bool,
    /// Name the cache lines at which two threads meet that have queue pairs of their own instead, by single steps
    #[arg(long, conflicts_with_all = ["filter", "list", "write_docs", "instructions"])]
    sharing: bool,
    /// Put the result into docs/performance.md and docs/performance/
    #[arg(long, conflicts_with = "filter")]
    write_docs: bool,
    #[command(flatten)]
    dist: dist::Options,
}

/// Programs on the device, their peers, and further needs.
const PACKAGES: [Package; 13] = [
    packages::PERFTEST,
    packages::IBVERBS_UTILS,
    packages::RDMACM_UTILS,
    packages::IPERF3,
    packages::QPERF,
    packages::UCX_UTILS,
    packages::LIBFABRIC_BIN,
    packages::IPROUTE2,
    packages::NFTABLES,
    packages::ETHTOOL,
    packages::CC,
    packages::LIBIBVERBS_DEV,
    packages::LIBRDMACM_DEV,
];

/// Packages whose version matters to a reader.
const PEERS: [&str; 5] = ["perftest", "iperf3", "qperf", "ucx-utils", "libfabric-bin"];

/// C programs of `benches/`, each linked with their common set-up.
const PROGRAMS: [&str; 3] = ["footprint", "connections", "messages"];
/// Percent of the processors' time that others may have without a remark.
const MUCH_STOLEN: f64 = 2.0;

/// All that was measured.
#[derive(Debug, Serialize)]
struct Results {
    machine: Machine,
    profile: String,
    runs: usize,
    seconds: u32,
    rows: Vec<Outcome>,
    charts: Vec<Chart>,
}

/// Measures and prints; fails where a program of ours does, not where a target is missed.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let takes = |name: &str| options.filter.as_ref().is_none_or(|text| name.contains(text));
    let mut rows = rows::all(options.seconds);
    rows.retain(|row| takes(&row.name()));
    let sweeps: Vec<_> = sweep::ALL.into_iter().filter(|sweep| takes(&sweep.name())).collect();
    if options.list {
        rows.iter().for_each(|row| println!("{}", row.name()));
        sweeps.iter().for_each(|sweep| println!("{}", sweep.name()));
        return Ok(());
    }
    if rows.is_empty() && sweeps.is_empty() {
        bail!("no measurement has this in its name; `--list` prints them");
    }
    interrupt::catch();
    packages::ensure(&PACKAGES)?;
    packages::ensure(&[packages::LIBC6_DEV])?;
    if options.instructions || options.sharing {
        return by_steps(options, if options.sharing { "sharing" } else { "instructions" });
    }
    let mut runner = prepare(options)?;
    // Read before the first measurement makes the machine busy, and after the compiler did.
    let machine = Machine::read(&PEERS);
    if machine.is_busy() {
        eprintln!("the machine is not idle (load {}): figures are worth little", machine.load);
    }
    let mut results = Results {
        machine,
        profile: options.dist.profile.clone(),
        runs: options.runs,
        seconds: options.seconds,
        rows: Vec::new(),
        charts: Vec::new(),
    };
    let begin = Ticks::now()?;
    let finished = measure_all(&mut runner, &rows, &sweeps, options, &mut results);
    results.machine.stolen = Ticks::now()?.stolen_since(begin);
    if results.machine.stolen > MUCH_STOLEN {
        let stolen = results.machine.stolen;
        eprintln!("others had {stolen:.0}% of the processors' time: figures are worth little");
    }
    // Results from before an interruption are kept, too.
    print!("{}", report::table(&results.rows));
    save(&results, &results_folder())?;
    finished?;
    if options.write_docs {
        docs::write(&results, &results_folder())?;
    }
    match results.rows.iter().filter(|row| row.failed()).count() {
        0 => Ok(()),
        failed => bail!("{failed} measurements of the device failed"),
    }
}

/// Follows a program's calls in single steps.
fn by_steps(options: &Options, what: &str) -> anyhow::Result<()> {
    let dist = dist::run(&options.dist)?;
    let programs = results_folder().join("programs");
    compile(&programs)?;
    let mut limits = Command::new(limits(options)?);
    succeed(limits.arg(what).arg(dist.lib()).arg(programs.join("messages")))
}

/// Builds the programs of the crate beside the device.
fn limits(options: &Options) -> anyhow::Result<PathBuf> {
    let profile = &options.dist.profile;
    succeed(cargo().args(["build", "--profile", profile, "-p", "anyverbs-benches"]))?;
    Ok(target().join(dist::folder(profile)).join("limits"))
}

/// Builds everything that runs.
fn prepare(options: &Options) -> anyhow::Result<Runner> {
    let dist = dist::run(&options.dist)?;
    let limits = limits(options)?;
    let scratch = results_folder().join("run");
    // Output of earlier runs.
    if scratch.exists() {
        fs::remove_dir_all(&scratch)
            .with_context(|| format!("cannot empty {}", scratch.display()))?;
    }
    let programs = scratch.join("programs");
    compile(&programs)?;
    Runner::new(dist, limits, programs, scratch)
}

/// Compiles the C programs of `benches/` into this folder.
fn compile(programs: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(programs).with_context(|| format!("cannot make {}", programs.display()))?;
    let sources = root().join("benches");
    for name in PROGRAMS {
        let mut cc = Command::new("cc");
        // At fixed addresses, so that the marks of `messages` are where its symbols say.
        cc.args(["-O1", "-Wall", "-no-pie", "-o"])
            .arg(programs.join(name))
            .args([sources.join(name).with_extension("c"), sources.join("setup.c")])
            .args(["-lrdmacm", "-libverbs"]);
        succeed(&mut cc)?;
    }
    Ok(())
}

fn measure_all(
    runner: &mut Runner,
    rows: &[Row],
    sweeps: &[Sweep],
    options: &Options,
    results: &mut Results,
) -> anyhow::Result<()> {
    for row in rows {
        results.rows.push(measure(runner, row, options.runs)?);
    }
    for sweep in sweeps {
        eprint!("{}", sweep.name());
        results.charts.push(sweep.measure(runner, options.plot_runs)?);
        eprintln!();
    }
    let charts = &mut results.charts;
    add_soft_roce(charts.iter_mut().filter(|chart| chart.between_hosts).collect(), runner)?;
    for chart in charts {
        for curve in &chart.curves {
            for (size, why) in &curve.failures {
                eprintln!("{}: {}, {size} B: {}", chart.name, curve.name, report::brief(why));
            }
        }
        plot::write(chart, &picture(&results_folder(), &chart.name))?;
    }
    Ok(())
}

/// Adds the curves of guests, which run after everything else: they would take time from it.
fn add_soft_roce(charts: Vec<&mut Chart>, runner: &Runner) -> anyhow::Result<()> {
    for chart in charts {
        // New ones for each: a guest in which a program hangs is of no more use.
        let guests = match Guests::start(&runner.scratch)? {
            Ok(guests) => guests,
            Err(reason) => {
                eprintln!("no curve of Soft-RoCE: {reason}");
                return Ok(());
            }
        };
        eprint!("{}, Soft-RoCE", chart.name);
        chart.curves.push(guests.curve(chart.quantity, sweep::sizes())?);
        eprintln!();
    }
    Ok(())
}

fn measure(runner: &mut Runner, row: &Row, runs: usize) -> anyhow::Result<Outcome> {
    eprint!("{}", row.name());
    let peers = row.against.iter().filter_map(|against| against.peer.as_ref());
    let contenders: Vec<&Contender> = std::iter::once(&row.ours).chain(peers).collect();
    let rounds = if row.once { Rounds::Once } else { Rounds::Settled(runs) };
    let turns = runner.in_turn(row.place, &contenders, rounds)?;
    eprintln!();
    Ok(Outcome::new(row, turns))
}

/// The folder of the JSON and the pictures.
fn results_folder() -> PathBuf {
    target().join("bench")
}

fn picture(folder: &Path, name: &str) -> PathBuf {
    folder.join(name).with_extension("svg")
}

fn save(results: &Results, folder: &Path) -> anyhow::Result<()> {
    let path = folder.join("results.json");
    fs::write(&path, serde_json::to_string_pretty(results)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("written to {}", folder.display());
    Ok(())
}

//! `cargo xtask bench`: the device beside its peers, in turn (A B A B ...), one core a side; medians and ratios.
//!
//! Absolute figures mean little on a busy or virtual machine; the ratio of two programs that ran in turn does.

use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::conformance::{
    Hosts, Process, Side, Topology, iperf3_gbits, perftest_figure, quiet, wait_for,
};
use crate::dist::{self, Dist};
use crate::interrupt;
use crate::packages;
use crate::workspace::{cargo, root, shown, succeed, target};

/// What to measure.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Runs of each side of a comparison
    #[arg(long, default_value_t = 5, value_name = "N")]
    runs: usize,
    /// Seconds of a bandwidth run
    #[arg(long, default_value_t = 2, value_name = "S")]
    seconds: u32,
    /// Only measurements with this in their name
    #[arg(long, value_name = "TEXT")]
    filter: Option<String>,
    #[command(flatten)]
    dist: dist::Options,
}

const PATIENCE: Duration = Duration::from_secs(60);
const PORT: u16 = 20_500;

/// A program pair and how its figure is read.
struct Contender {
    name: &'static str,
    /// Whether it runs on the device.
    device: bool,
    server: String,
    client: String,
    figure: fn(&str) -> Option<f64>,
}

/// What the ratio of ours to theirs should be.
#[derive(Clone, Copy)]
enum Target {
    AtLeast(f64),
    AtMost(f64),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtLeast(x) => write!(f, ">= {x}"),
            Self::AtMost(x) => write!(f, "<= {x}"),
        }
    }
}

impl Target {
    fn is_met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(x) => value >= x,
            Self::AtMost(x) => value <= x,
        }
    }
}

struct Comparison {
    name: &'static str,
    unit: &'static str,
    ours: Contender,
    theirs: Contender,
    target: Target,
}

/// A line of the result.
struct Row {
    name: String,
    ours: f64,
    theirs: Option<(f64, &'static str)>,
    unit: &'static str,
    target: Target,
}

impl Row {
    /// What the target is about: the ratio, or the figure itself.
    fn judged(&self) -> f64 {
        self.theirs.map_or(self.ours, |(theirs, _)| self.ours / theirs)
    }
}

/// Measures and prints; fails where a program does, not where a target is missed.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    packages::ensure(&[
        packages::PERFTEST,
        packages::IPERF3,
        packages::IPROUTE2,
        packages::CC,
        packages::LIBC6_DEV,
        packages::LIBIBVERBS_DEV,
    ])?;
    let dist = dist::run(&options.dist)?;
    let mut build = cargo();
    succeed(build.args(["build", "--profile", "release", "-p", "anyverbs-benches"]))?;
    let scratch = target().join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let Some(hosts) = Hosts::new(Topology::TwoHosts9000, 0, &scratch)? else {
        bail!("two hosts are network namespaces, and making them takes root");
    };
    let bench = Bench { options, dist, hosts, scratch };
    let mut rows = Vec::new();
    for comparison in comparisons(options.seconds) {
        if bench.takes(comparison.name) {
            rows.push(bench.compare(&comparison)?);
        }
    }
    if bench.takes("footprint") {
        rows.extend(bench.footprint()?);
    }
    print(&rows);
    bench.save(&rows)
}

fn comparisons(seconds: u32) -> Vec<Comparison> {
    let iperf3 = || Contender {
        name: "iperf3 TCP",
        device: false,
        server: format!("iperf3 -s -1 -p {PORT}"),
        client: format!("iperf3 -f m -t {seconds} -p {PORT} -c ADDRESS"),
        figure: iperf3_gbits,
    };
    let bandwidth = |tool: &str, options: &str| {
        let command = format!("{tool} -D {seconds} --report_gbits {options} -p {PORT}");
        Contender {
            name: "anyverbs",
            device: true,
            client: format!("{command} ADDRESS"),
            server: command,
            figure: perftest,
        }
    };
    let pong = format!("{}", target().join("release/udp-pingpong").display());
    vec![
        Comparison {
            name: "RC WRITE 64 KiB, veth, MTU 9000",
            unit: "Gb/s",
            ours: bandwidth("ib_write_bw", "-s 65536"),
            theirs: iperf3(),
            target: Target::AtLeast(0.8),
        },
        Comparison {
            name: "RC SEND 64 KiB, veth, MTU 9000",
            unit: "Gb/s",
            ours: bandwidth("ib_send_bw", "-s 65536"),
            theirs: iperf3(),
            target: Target::AtLeast(0.8),
        },
        Comparison {
            name: "RC READ 64 KiB, veth, MTU 9000",
            unit: "Gb/s",
            ours: bandwidth("ib_read_bw", "-s 65536"),
            theirs: iperf3(),
            target: Target::AtLeast(0.8),
        },
        Comparison {
            name: "RC SEND 2 B latency, veth, both spin",
            unit: "us",
            ours: Contender {
                name: "anyverbs",
                device: true,
                server: format!("ib_send_lat -s 2 -n 20000 -p {PORT}"),
                client: format!("ib_send_lat -s 2 -n 20000 -p {PORT} ADDRESS"),
                figure: perftest,
            },
            theirs: Contender {
                name: "bare UDP",
                device: false,
                server: format!("{pong} server 0.0.0.0:{PORT}"),
                client: format!("{pong} client ADDRESS:{PORT}"),
                figure: |out| out.trim().parse().ok(),
            },
            target: Target::AtMost(2.0),
        },
    ]
}

struct Bench<'a> {
    options: &'a Options,
    dist: Dist,
    hosts: Hosts,
    scratch: PathBuf,
}

impl Bench<'_> {
    fn takes(&self, name: &str) -> bool {
        self.options.filter.as_ref().is_none_or(|text| name.contains(text.as_str()))
    }

    fn compare(&self, comparison: &Comparison) -> anyhow::Result<Row> {
        eprint!("{}", comparison.name);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.options.runs {
            ours.push(self.measure(&comparison.ours)?);
            theirs.push(self.measure(&comparison.theirs)?);
            eprint!(" .");
        }
        eprintln!();
        Ok(Row {
            name: comparison.name.into(),
            ours: median(&mut ours),
            theirs: Some((median(&mut theirs), comparison.theirs.name)),
            unit: comparison.unit,
            target: comparison.target,
        })
    }

    fn measure(&self, contender: &Contender) -> anyhow::Result<f64> {
        let mut server = self.start(Side::Server, contender, &contender.server)?;
        // UDP has no listener to wait for: its client starts when the server has bound.
        let ready = wait_for(Instant::now() + PATIENCE, || {
            if server.ended()?.is_some() {
                bail!("the server ended early:\n{}", server.output());
            }
            let sockets = self.hosts.sockets(Side::Server);
            Ok(sockets.listens(PORT)? || sockets.is_bound(PORT)?)
        })?;
        if !ready {
            bail!("the server does not listen:\n{}", server.output());
        }
        let address = self.hosts.server_address(true);
        let words = contender.client.replace("ADDRESS", address);
        let mut client = self.start(Side::Client, contender, &words)?;
        let status = client.wait(Instant::now() + PATIENCE)?;
        server.wait(Instant::now() + PATIENCE)?;
        let output = client.output();
        if status.is_none_or(|s| !s.success()) {
            bail!("{words} failed:\n{output}{}", server.output());
        }
        (contender.figure)(&output).with_context(|| format!("no figure in:\n{output}"))
    }

    fn start(&self, side: Side, contender: &Contender, words: &str) -> anyhow::Result<Process> {
        let (core, file) = match side {
            Side::Server => ("0", "server.out"),
            Side::Client => ("1", "client.out"),
        };
        let mut command = self.hosts.command(side, "taskset".as_ref());
        command.args(["-c", core]);
        if contender.device {
            command.arg(self.dist.anyverbs()).args(["run", "--"]);
        }
        command.args(words.split_ascii_whitespace());
        Process::start(&mut command, &self.scratch.join(file))
    }

    /// What the device costs a process that does nothing.
    fn footprint(&self) -> anyhow::Result<Vec<Row>> {
        let program = self.scratch.join("footprint");
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-o"])
            .arg(&program)
            .arg(root().join("benches/footprint.c"))
            .arg("-libverbs");
        succeed(&mut cc)?;
        let mut command = self.hosts.command(Side::Server, &self.dist.anyverbs());
        let output = quiet(command.args(["run", "--"]).arg(&program))?;
        let value = |name: &str| {
            output
                .lines()
                .find_map(|line| line.strip_prefix(name)?.trim().parse::<f64>().ok())
                .with_context(|| format!("no {name} in what {} said", shown(&command)))
        };
        let row = |name: &str, ours: f64, unit, most| Row {
            name: name.into(),
            ours,
            theirs: None,
            unit,
            target: Target::AtMost(most),
        };
        Ok(vec![
            row("memory of the idle engine", value("engine_kib")? / 1024.0, "MiB", 8.0),
            row("memory of a connected RC QP", value("qp_bytes")? / 1024.0, "KiB", 16.0),
            row("CPU of an idle process", value("idle_cpu_percent")?, "%", 0.1),
        ])
    }

    fn save(&self, rows: &[Row]) -> anyhow::Result<()> {
        let results: Vec<_> = rows
            .iter()
            .map(|row| {
                serde_json::json!({
                    "name": row.name,
                    "unit": row.unit,
                    "ours": row.ours,
                    "peer": row.theirs.map(|(_, name)| name),
                    "theirs": row.theirs.map(|(value, _)| value),
                    "ratio": row.theirs.map(|_| row.judged()),
                    "target": row.target.to_string(),
                    "met": row.target.is_met(row.judged()),
                })
            })
            .collect();
        let path = self.scratch.join("results.json");
        fs::write(&path, serde_json::to_string_pretty(&results)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        eprintln!("written to {}", path.display());
        Ok(())
    }
}

fn print(rows: &[Row]) {
    println!(
        "{:<38} {:>10} {:>12} {:>7}  {:<8} peer",
        "what (medians)", "anyverbs", "peer", "ratio", "target"
    );
    for row in rows {
        let ours = format!("{:.2} {}", row.ours, row.unit);
        let (theirs, ratio, peer) = match row.theirs {
            Some((value, name)) => {
                (format!("{value:.2} {}", row.unit), format!("{:.2}", row.judged()), name)
            }
            None => ("-".into(), "-".into(), "-"),
        };
        let verdict = if row.target.is_met(row.judged()) { "" } else { "  MISSED" };
        let target = row.target.to_string();
        println!(
            "{:<38} {ours:>10} {theirs:>12} {ratio:>7}  {target:<8} {peer}{verdict}",
            row.name
        );
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len().is_multiple_of(2) && middle > 0 {
        f64::midpoint(values[middle - 1], values[middle])
    } else {
        values.get(middle).copied().unwrap_or(f64::NAN)
    }
}

/// Average bandwidth, or typical latency.
fn perftest(output: &str) -> Option<f64> {
    perftest_figure(output, 1).ok().map(|figure| figure.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_few() {
        assert_eq!(median(&mut [3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&mut [4.0, 1.0, 2.0, 3.0]), 2.5);
    }
}

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
    Hosts, Process, Side, Topology, cmtime_connects, iperf3_gbits, perftest_figure, quiet,
    transfers, wait_for,
};
use crate::dist::{self, Dist};
use crate::interrupt;
use crate::packages;
use crate::workspace::{cargo, root, succeed, target};

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
    topology: Topology,
    ours: Contender,
    /// Without one, the target is about the figure itself.
    theirs: Option<Contender>,
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
        packages::LIBRDMACM_DEV,
        packages::RDMACM_UTILS,
    ])?;
    let dist = dist::run(&options.dist)?;
    let mut build = cargo();
    succeed(build.args(["build", "--profile", "release", "-p", "anyverbs-benches"]))?;
    let scratch = target().join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let hosts = |topology, label| {
        Hosts::new(topology, label, &scratch)?
            .context("hosts are network namespaces, and making them takes root")
    };
    let bench = Bench {
        options,
        dist,
        two_hosts: hosts(Topology::TwoHosts9000, 0)?,
        loopback: hosts(Topology::Loopback, 1)?,
        scratch: scratch.clone(),
    };
    let mut rows = Vec::new();
    for comparison in comparisons(options.seconds) {
        if bench.takes(comparison.name) {
            rows.push(bench.compare(&comparison)?);
        }
    }
    if bench.takes("footprint") {
        rows.extend(bench.footprint()?);
    }
    if bench.takes("connections") {
        rows.extend(bench.connections()?);
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
    let rstream = |options: &str, device| {
        let command = format!("rstream -S 1048576 -C 1000 {options} -p {PORT}");
        Contender {
            name: if device { "anyverbs" } else { "rstream TCP" },
            device,
            server: format!("{command} -b ADDRESS"),
            client: format!("{command} -s ADDRESS"),
            figure: |out| transfers(out).last().map(|row| row.gbits),
        }
    };
    let pong = format!("{}", target().join("release/udp-pingpong").display());
    vec![
        Comparison {
            name: "RC WRITE 64 KiB, veth, MTU 9000",
            unit: "Gb/s",
            topology: Topology::TwoHosts9000,
            ours: bandwidth("ib_write_bw", "-s 65536"),
            theirs: Some(iperf3()),
            target: Target::AtLeast(0.8),
        },
        Comparison {
            name: "RC SEND 64 KiB, veth, MTU 9000",
            unit: "Gb/s",
            topology: Topology::TwoHosts9000,
            ours: bandwidth("ib_send_bw", "-s 65536"),
            theirs: Some(iperf3()),
            target: Target::AtLeast(0.8),
        },
        Comparison {
            name: "RC READ 64 KiB, veth, MTU 9000",
            unit: "Gb/s",
            topology: Topology::TwoHosts9000,
            ours: bandwidth("ib_read_bw", "-s 65536"),
            theirs: Some(iperf3()),
            target: Target::AtLeast(0.8),
        },
        Comparison {
            name: "RC SEND 2 B latency, veth, both spin",
            unit: "us",
            topology: Topology::TwoHosts9000,
            ours: Contender {
                name: "anyverbs",
                device: true,
                server: format!("ib_send_lat -s 2 -n 20000 -p {PORT}"),
                client: format!("ib_send_lat -s 2 -n 20000 -p {PORT} ADDRESS"),
                figure: perftest,
            },
            theirs: Some(Contender {
                name: "bare UDP",
                device: false,
                server: format!("{pong} server 0.0.0.0:{PORT}"),
                client: format!("{pong} client ADDRESS:{PORT}"),
                figure: |out| out.trim().parse().ok(),
            }),
            target: Target::AtMost(2.0),
        },
        Comparison {
            name: "rstream 1 MiB, loopback, both spin",
            unit: "Gb/s",
            topology: Topology::Loopback,
            ours: rstream("", true),
            theirs: Some(rstream("-T s", false)),
            target: Target::AtLeast(1.0),
        },
        Comparison {
            name: "rstream 1 MiB, loopback, both block",
            unit: "Gb/s",
            topology: Topology::Loopback,
            ours: rstream("-T b", true),
            theirs: Some(rstream("-T b -T s", false)),
            target: Target::AtLeast(1.0),
        },
        Comparison {
            name: "cmtime, 1000 connections, loopback",
            unit: "/s",
            topology: Topology::Loopback,
            ours: Contender {
                name: "anyverbs",
                device: true,
                server: format!("cmtime -b ADDRESS -p {PORT}"),
                client: format!("cmtime -c 1000 -s ADDRESS -p {PORT}"),
                figure: |out| cmtime_connects(out).ok().map(|us| 1e6 / us),
            },
            theirs: None,
            target: Target::AtLeast(2000.0),
        },
    ]
}

struct Bench<'a> {
    options: &'a Options,
    dist: Dist,
    two_hosts: Hosts,
    loopback: Hosts,
    scratch: PathBuf,
}

impl Bench<'_> {
    fn takes(&self, name: &str) -> bool {
        self.options.filter.as_ref().is_none_or(|text| name.contains(text.as_str()))
    }

    fn hosts(&self, topology: Topology) -> &Hosts {
        if topology == Topology::Loopback { &self.loopback } else { &self.two_hosts }
    }

    fn compare(&self, comparison: &Comparison) -> anyhow::Result<Row> {
        eprint!("{}", comparison.name);
        let hosts = self.hosts(comparison.topology);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..self.options.runs {
            ours.push(self.measure(hosts, &comparison.ours)?);
            if let Some(contender) = &comparison.theirs {
                theirs.push(self.measure(hosts, contender)?);
            }
            eprint!(" .");
        }
        eprintln!();
        Ok(Row {
            name: comparison.name.into(),
            ours: median(&mut ours),
            theirs: comparison
                .theirs
                .as_ref()
                .map(|contender| (median(&mut theirs), contender.name)),
            unit: comparison.unit,
            target: comparison.target,
        })
    }

    fn measure(&self, hosts: &Hosts, contender: &Contender) -> anyhow::Result<f64> {
        let address = hosts.server_address(true);
        let words = contender.server.replace("ADDRESS", address);
        let mut server = self.start(hosts, Side::Server, contender.device, &words)?;
        let sockets = hosts.sockets(Side::Server);
        // UDP has no listener to wait for: its client starts when the server has bound.
        let ready = wait_for(Instant::now() + PATIENCE, || {
            if server.ended()?.is_some() {
                bail!("the server ended early:\n{}", server.output());
            }
            Ok(sockets.listens(PORT)? || sockets.cm_listens(PORT)? || sockets.is_bound(PORT)?)
        })?;
        if !ready {
            bail!("the server does not listen:\n{}", server.output());
        }
        let words = contender.client.replace("ADDRESS", address);
        let mut client = self.start(hosts, Side::Client, contender.device, &words)?;
        let status = client.wait(Instant::now() + PATIENCE)?;
        let output = client.output();
        if status.is_none_or(|s| !s.success()) {
            bail!("{words} failed:\n{output}{}", server.output());
        }
        // The server of cmtime goes on: it is ended with its handle.
        if !contender.server.starts_with("cmtime") {
            server.wait(Instant::now() + PATIENCE)?;
        }
        (contender.figure)(&output).with_context(|| format!("no figure in:\n{output}"))
    }

    fn start(
        &self,
        hosts: &Hosts,
        side: Side,
        device: bool,
        words: &str,
    ) -> anyhow::Result<Process> {
        let (core, file) = match side {
            Side::Server => ("0", "server.out"),
            Side::Client => ("1", "client.out"),
        };
        let mut command = hosts.command(side, "taskset".as_ref());
        command.args(["-c", core]);
        if device {
            command.arg(self.dist.anyverbs()).args(["run", "--"]);
        }
        command.args(words.split_ascii_whitespace());
        Process::start(&mut command, &self.scratch.join(file))
    }

    /// What the device costs a process that does nothing.
    fn footprint(&self) -> anyhow::Result<Vec<Row>> {
        let figures = self.run_c("footprint", &["-libverbs"], &self.two_hosts, &[])?;
        Ok(vec![
            row(
                "memory of the idle engine",
                figures("engine_kib")? / 1024.0,
                "MiB",
                Target::AtMost(8.0),
            ),
            row(
                "memory of a connected RC QP",
                figures("qp_bytes")? / 1024.0,
                "KiB",
                Target::AtMost(16.0),
            ),
            row("CPU of an idle process", figures("idle_cpu_percent")?, "%", Target::AtMost(0.1)),
        ])
    }

    /// Many connections of one process to itself.
    fn connections(&self) -> anyhow::Result<Vec<Row>> {
        const COUNT: &str = "10000";
        let port = PORT.to_string();
        let arguments = [self.loopback.server_address(true), &port, COUNT];
        let figures =
            self.run_c("connections", &["-lrdmacm", "-libverbs"], &self.loopback, &arguments)?;
        Ok(vec![
            row(
                "10000 connections of one process",
                figures("per_second")?,
                "/s",
                Target::AtLeast(2000.0),
            ),
            row(
                "memory of a side of a connection",
                figures("side_bytes")? / 1024.0,
                "KiB",
                Target::AtMost(24.0),
            ),
        ])
    }

    /// Compiles and runs a program of `benches` that prints lines `name figure`.
    fn run_c(
        &self,
        name: &str,
        libraries: &[&str],
        hosts: &Hosts,
        arguments: &[&str],
    ) -> anyhow::Result<impl Fn(&str) -> anyhow::Result<f64> + use<>> {
        let program = self.scratch.join(name);
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-o"])
            .arg(&program)
            .arg(root().join(format!("benches/{name}.c")))
            .args(libraries);
        succeed(&mut cc)?;
        let mut command = hosts.command(Side::Server, &self.dist.anyverbs());
        // Both sides of 10,000 connections are more queue pairs than the device has by itself.
        command.env("ANYVERBS_MAX_QP", "32768");
        let output = quiet(command.args(["run", "--"]).arg(&program).args(arguments))?;
        let name = name.to_owned();
        Ok(move |figure: &str| {
            output
                .lines()
                .find_map(|line| line.strip_prefix(figure)?.trim().parse::<f64>().ok())
                .with_context(|| format!("no {figure} in what {name} said:\n{output}"))
        })
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

/// A line without a peer.
fn row(name: &str, ours: f64, unit: &'static str, target: Target) -> Row {
    Row { name: name.into(), ours, theirs: None, unit, target }
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

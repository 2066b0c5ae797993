//! `cargo xtask demo`: Debian's own tools on the device, and their figures.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::conformance::{Process, Report, Sockets, quiet, wait_for};
use crate::dist::{self, Dist};
use crate::{interrupt, packages, workspace};

const TIME: Duration = Duration::from_secs(60);

/// Builds, runs and reports.
pub(crate) fn run(options: &dist::Options) -> anyhow::Result<()> {
    interrupt::catch();
    packages::ensure(&[packages::IBVERBS_UTILS, packages::PERFTEST])?;
    let dist = dist::run(options)?;
    let scratch = workspace::target().join("demo");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;

    println!("Unmodified Debian programs on a RoCEv2 device in user space.\n");
    let devinfo = quiet(Command::new(dist.anyverbs()).args(["run", "--", "ibv_devinfo"]))?;
    println!("$ anyverbs run -- ibv_devinfo");
    let wanted = ["hca_id", "fw_ver", "node_guid", "state", "active_mtu", "link_layer"];
    let facts: Vec<&str> = devinfo
        .lines()
        .filter(|line| wanted.iter().any(|name| line.trim_start().starts_with(name)))
        .collect();
    if !devinfo.contains("PORT_ACTIVE") {
        bail!("no active port:\n{devinfo}");
    }
    println!("{}\n", facts.join("\n"));

    for (tool, options, report, what) in [
        (
            "ibv_rc_pingpong",
            &["-g", "0", "-c"][..],
            Report::Pingpong,
            "RC SEND, 4096 B there and back, data checked",
        ),
        ("ib_write_bw", &[], Report::Perftest, "RC RDMA WRITE, two processes"),
    ] {
        let figures = pair(&dist, &scratch, tool, options, report)
            .with_context(|| format!("{tool} failed"))?;
        println!("$ anyverbs run -- {}", [&[tool], options].concat().join(" "));
        println!("  {what}: {figures}\n");
    }
    println!("Your own program: {} run -- PROGRAM", dist.anyverbs().display());
    Ok(())
}

/// Runs server and client of a tool and returns its figures.
fn pair(
    dist: &Dist,
    scratch: &Path,
    tool: &str,
    options: &[&str],
    report: Report,
) -> anyhow::Result<String> {
    let deadline = Instant::now() + TIME;
    let port = free_port()?;
    let number = port.to_string();
    let start = |side: &str, host: &[&str]| {
        let mut command = Command::new(dist.anyverbs());
        command
            .args(["run", "--", tool])
            .args(options)
            .args(["-p", &number])
            .args(host)
            .current_dir(scratch);
        Process::start(&mut command, &scratch.join(format!("{tool}-{side}.out")))
    };
    let mut server = start("server", &[])?;
    let listens =
        wait_for(deadline, || Ok(server.ended()?.is_some() || Sockets::of("self").listens(port)?))?;
    if !listens || server.ended()?.is_some() {
        bail!("the server does not listen:\n{}", server.output());
    }
    let mut client = start("client", &["127.0.0.1"])?;
    for (side, process) in [("client", &mut client), ("server", &mut server)] {
        match process.wait(deadline)? {
            Some(status) if status.success() => {}
            Some(status) => bail!("the {side} ended with {status}:\n{}", process.output()),
            None => bail!("the {side} did not end in {} s:\n{}", TIME.as_secs(), process.output()),
        }
    }
    let read = |process: &Process| {
        report.read(&process.output(), 1).map_err(|reason| anyhow::anyhow!("{reason}"))
    };
    if report.on_both_sides() {
        read(&server)?;
    }
    read(&client)
}

/// A TCP port that was free just now.
fn free_port() -> anyhow::Result<u16> {
    let listener =
        std::net::TcpListener::bind("127.0.0.1:0").context("cannot listen on loopback")?;
    Ok(listener.local_addr()?.port())
}

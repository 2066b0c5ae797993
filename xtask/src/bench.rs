//! `cargo xtask bench`: the device beside TCP and plain UDP, between two network namespaces with MTU 9000, one core a side,
//! the two measured in turn so that a disturbance meets both.

use std::env;
use std::fs;
use std::hint::spin_loop;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::conformance::{Hosts, Process, Side, Topology, perftest_figure, wait_for};
use crate::dist::{self, Dist};
use crate::{interrupt, packages, workspace};

const PORT: u16 = 18_600;
const PINGS: u32 = 20_000;

/// How much to measure.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Runs of each measurement, of which the median counts
    #[arg(long, default_value_t = 5, value_name = "N")]
    runs: usize,
    /// Seconds of each run of a throughput measurement
    #[arg(long, default_value_t = 5, value_name = "S")]
    seconds: u32,
    #[command(flatten)]
    dist: dist::Options,
}

/// Measures and prints; what is slower than it should be is for the reader to see, not a failure.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    packages::ensure(&[packages::IPROUTE2, packages::IPERF3, packages::PERFTEST])?;
    let dist = dist::run(&options.dist)?;
    let scratch = workspace::target().join("bench");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let Some(hosts) = Hosts::new(Topology::TwoHosts9000, 0, &scratch)? else {
        bail!("the measurements need network namespaces: run this as root");
    };
    let bench = Bench {
        dist: &dist,
        hosts: &hosts,
        scratch: &scratch,
    };
    let (mut tcp, mut write, mut udp, mut send) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for run in 1..=options.runs.max(1) {
        tcp.push(bench.tcp(options.seconds)?);
        write.push(bench.perftest(&format!(
            "ib_write_bw -s 65536 -D {} --report_gbits",
            options.seconds
        ))?);
        udp.push(bench.udp()?);
        send.push(bench.perftest(&format!("ib_send_lat -s 2 -n {PINGS}"))?);
        println!(
            "run {run}: TCP {:.2} Gb/s, WRITE {:.2} Gb/s; UDP {:.2} us, SEND {:.2} us",
            tcp[run - 1],
            write[run - 1],
            udp[run - 1],
            send[run - 1]
        );
    }
    let (tcp, write, udp, send) = (median(tcp), median(write), median(udp), median(send));
    println!(
        "\nmedians of {} runs, MTU 9000, one core a side",
        options.runs.max(1)
    );
    println!(
        "RC WRITE, 64 KiB  {write:8.2} Gb/s   TCP, one stream   {tcp:8.2} Gb/s   ratio {:.2} (at least 0.8)",
        write / tcp
    );
    println!(
        "RC SEND, 2 B      {send:8.2} us     UDP ping-pong     {udp:8.2} us     ratio {:.2} (at most 2)",
        send / udp
    );
    Ok(())
}

struct Bench<'a> {
    dist: &'a Dist,
    hosts: &'a Hosts,
    scratch: &'a Path,
}

impl Bench<'_> {
    /// Gb/s of one TCP stream.
    fn tcp(&self, seconds: u32) -> anyhow::Result<f64> {
        let port = PORT.to_string();
        let host = self.hosts.server_address(false);
        let time = seconds.to_string();
        let report = self.pair(
            &["iperf3", "--server", "--one-off", "--port", &port],
            &[
                "iperf3", "--client", host, "--port", &port, "--time", &time, "--json",
            ],
            true,
        )?;
        let report: serde_json::Value = serde_json::from_str(&report).context("iperf3's report")?;
        let bits = report["end"]["sum_received"]["bits_per_second"].as_f64();
        Ok(bits.context("iperf3 reports no throughput")? / 1e9)
    }

    /// The figure of a perftest program.
    fn perftest(&self, command: &str) -> anyhow::Result<f64> {
        let port = PORT.to_string();
        let anyverbs = self.dist.anyverbs();
        let mut words = vec![
            anyverbs
                .to_str()
                .context("the target directory's name is not UTF-8")?,
            "run",
            "--",
        ];
        words.extend(command.split(' ').chain(["-p", &port]));
        let server = words.clone();
        words.push(self.hosts.server_address(false));
        let output = self.pair(&server, &words, true)?;
        let figure = perftest_figure(&output, 1)
            .map_err(anyhow::Error::msg)
            .with_context(|| command.to_owned())?;
        Ok(figure.value)
    }

    /// Half a round trip of a UDP datagram, in microseconds, with both sides spinning.
    fn udp(&self) -> anyhow::Result<f64> {
        let xtask = env::current_exe().context("cannot find my own executable")?;
        let xtask = xtask
            .to_str()
            .context("the target directory's name is not UTF-8")?;
        let host = self.hosts.server_address(false);
        let output = self.pair(
            &[xtask, "udp-pingpong"],
            &[xtask, "udp-pingpong", host],
            false,
        )?;
        output
            .trim()
            .parse()
            .with_context(|| format!("not a time: {output:?}"))
    }

    /// Runs two programs, each on a core of its own, and returns what the client printed.
    fn pair(&self, server: &[&str], client: &[&str], tcp: bool) -> anyhow::Result<String> {
        let start = |side, core: &str, words: &[&str], name: &str| {
            let mut command: Command = self.hosts.command(side, Path::new("taskset"));
            command
                .args(["--cpu-list", core])
                .args(words)
                .current_dir(self.scratch);
            Process::start(&mut command, &self.scratch.join(name))
        };
        let deadline = Instant::now() + Duration::from_secs(120);
        let mut server = start(Side::Server, "0", server, "server.out")?;
        if tcp
            && !wait_for(deadline, || {
                Ok(server.ended()?.is_some() || self.hosts.listens(PORT)?)
            })?
        {
            bail!("the server does not listen");
        }
        let mut client = start(Side::Client, "1", client, "client.out")?;
        for process in [&mut client, &mut server] {
            match process.wait(deadline)? {
                Some(status) if status.success() => {}
                Some(status) => bail!("a program ended with {status}:\n{}", process.output()),
                None => bail!("a program did not end:\n{}", process.output()),
            }
        }
        Ok(client.output())
    }
}

/// One side of a ping-pong of 2-byte datagrams; the client prints half the median round trip in microseconds. The first
/// datagrams may find no server yet and are repeated; the last one, of 1 byte, ends the server.
pub(crate) fn udp_pingpong(server: Option<IpAddr>) -> anyhow::Result<()> {
    let port = if server.is_some() { 0 } else { PORT };
    let socket =
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).context("cannot bind a UDP socket")?;
    socket.set_nonblocking(true)?;
    let mut buffer = [0u8; 16];
    let Some(server) = server else {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            match spin(&socket, &mut buffer, deadline)?.context("no client came")? {
                (1, _) => return Ok(()),
                (length, peer) => _ = socket.send_to(&buffer[..length], peer)?,
            }
        }
    };
    let server = SocketAddr::new(server, PORT);
    let mut times = Vec::new();
    let mut lost = 0;
    while times.len() < PINGS as usize {
        let started = Instant::now();
        socket.send_to(&[0, 1], server)?;
        // A refused datagram (no server yet) is lost like any other.
        match spin(&socket, &mut buffer, started + Duration::from_millis(10)) {
            Ok(Some(_)) => times.push(started.elapsed().as_secs_f64() * 1e6 / 2.0),
            Ok(None) | Err(_) if lost < 1000 => {
                lost += 1;
                std::thread::sleep(Duration::from_millis(5));
            }
            Ok(None) => bail!("no server answers"),
            Err(error) => return Err(error.into()),
        }
    }
    socket.send_to(&[0], server)?;
    println!("{:.3}", median(times));
    Ok(())
}

fn spin(
    socket: &UdpSocket,
    buffer: &mut [u8],
    until: Instant,
) -> io::Result<Option<(usize, SocketAddr)>> {
    loop {
        match socket.recv_from(buffer) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() >= until {
                    return Ok(None);
                }
                spin_loop();
            }
            received => return received.map(Some),
        }
    }
}

/// The middle of some measurements; there is at least one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(vec![3.0]), 3.0);
        assert_eq!(median(vec![9.0, 1.0, 5.0]), 5.0);
    }
}

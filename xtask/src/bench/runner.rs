//! Runs contenders in turn, one core a side, and keeps only the rounds in which the machine did not change its state.

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde::Serialize;

use super::contender::{Contender, PORT};
use super::machine::{State, cache_line};
use crate::conformance::{Hosts, Process, Side, Topology, quiet, wait_for};
use crate::dist::Dist;
use crate::interrupt;

/// For one program; the longest test takes a few seconds on an idle machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// For a server after its client.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// What lies between the two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    SameHost,
    /// As [`Place::SameHost`], with the device as it is by default.
    Loopback,
    TwoHosts {
        mtu: Mtu,
    },
    /// Every hundredth packet that arrives is dropped, on both hosts.
    Loss {
        mtu: Mtu,
        offloads: bool,
    },
}

/// Of the cable between the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mtu {
    Ethernet,
    Jumbo,
}

impl Place {
    fn topology(self) -> Topology {
        match self {
            Self::SameHost | Self::Loopback => Topology::Loopback,
            Self::TwoHosts { mtu } | Self::Loss { mtu, .. } => match mtu {
                Mtu::Ethernet => Topology::TwoHosts,
                Mtu::Jumbo => Topology::TwoHosts9000,
            },
        }
    }

    /// What the device is told.
    fn environment(self) -> &'static [(&'static str, &'static str)] {
        // Shared memory between processes is not yet the default.
        if self == Self::SameHost { &[("ANYVERBS_SHM", "1")] } else { &[] }
    }
}

/// Of contenders that ran in turn.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Turns {
    /// Each with a figure of each contender that has not failed.
    pub(super) rounds: Vec<Round>,
    /// Rounds in which the machine changed its state: their figures are not kept.
    pub(super) discarded: usize,
    /// Why a contender has no figures.
    pub(super) failures: Vec<Option<String>>,
}

/// Each contender once.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Round {
    /// Nanoseconds of a cache line to the other processor: before, and after.
    pub(super) cache_line_ns: [f64; 2],
    pub(super) figures: Vec<Option<f64>>,
}

impl Round {
    /// The state in which all ran, if it was one.
    fn state(&self) -> Option<State> {
        let [before, after] = self.cache_line_ns.map(State::of);
        (before == after).then_some(before)
    }
}

impl Turns {
    /// The median of a contender, or why there is none.
    pub(super) fn median(&self, contender: usize) -> Result<f64, String> {
        self.median_of(contender, |round| round.figures[contender])
    }

    /// The median of the rounds' ratios of one contender to another.
    pub(super) fn ratio(&self, ours: usize, theirs: usize) -> Result<f64, String> {
        if let Some(failure) = &self.failures[ours] {
            return Err(failure.clone());
        }
        self.median_of(theirs, |round| Some(round.figures[ours]? / round.figures[theirs]?))
    }

    fn median_of(
        &self,
        contender: usize,
        value: impl Fn(&Round) -> Option<f64>,
    ) -> Result<f64, String> {
        if let Some(failure) = &self.failures[contender] {
            return Err(failure.clone());
        }
        median(self.rounds.iter().filter_map(value).collect()).ok_or_else(|| {
            format!("the machine changed its state in each of {} rounds", self.discarded)
        })
    }

    /// The states of the rounds that count, as `near`, `far` or both.
    pub(super) fn states(&self) -> String {
        let mut states: Vec<_> = self.rounds.iter().filter_map(Round::state).collect();
        states.sort_unstable();
        states.dedup();
        states.iter().map(State::to_string).collect::<Vec<_>>().join("/")
    }
}

pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], upper)
    } else {
        upper
    })
}

/// Where programs are, and the hosts that they run on.
pub(super) struct Runner {
    pub(super) dist: Dist,
    pub(super) limits: PathBuf,
    /// The compiled C programs.
    pub(super) programs: PathBuf,
    pub(super) scratch: PathBuf,
    hosts: BTreeMap<Topology, Hosts>,
}

impl Runner {
    pub(super) fn new(dist: Dist, limits: PathBuf, programs: PathBuf, scratch: PathBuf) -> Self {
        Runner { dist, limits, programs, scratch, hosts: BTreeMap::new() }
    }

    /// Runs `contenders` one after the other, `runs` times; a round in which the machine changed its state is
    /// repeated, as often again as there are rounds. Fails only where the measurement itself is impossible.
    pub(super) fn in_turn(
        &mut self,
        place: Place,
        contenders: &[&Contender],
        runs: usize,
    ) -> anyhow::Result<Turns> {
        self.prepare(place)?;
        let hosts = &self.hosts[&place.topology()];
        conditions(hosts, place, true)?;
        let turns = self.rounds(hosts, place, contenders, runs);
        conditions(hosts, place, false)?;
        turns
    }

    fn rounds(
        &self,
        hosts: &Hosts,
        place: Place,
        contenders: &[&Contender],
        runs: usize,
    ) -> anyhow::Result<Turns> {
        let mut turns =
            Turns { rounds: Vec::new(), discarded: 0, failures: vec![None; contenders.len()] };
        let mut before = cache_line(&self.limits)?;
        while turns.rounds.len() < runs && turns.discarded <= runs {
            let mut figures = Vec::with_capacity(contenders.len());
            for (contender, failure) in contenders.iter().zip(&mut turns.failures) {
                // Once failed, a contender has no figure: trying again until one comes would hide it.
                let figure = failure.is_none().then(|| self.measure(hosts, place, contender));
                interrupt::check()?;
                figures.push(match figure.transpose() {
                    Ok(figure) => figure,
                    Err(error) => {
                        *failure = Some(format!("{error:#}"));
                        None
                    }
                });
            }
            let after = cache_line(&self.limits)?;
            let round = Round { cache_line_ns: [before, after], figures };
            before = after;
            if turns.failures.iter().all(Option::is_some) {
                break;
            }
            if round.state().is_some() {
                eprint!(" .");
                turns.rounds.push(round);
            } else {
                eprint!(" x");
                turns.discarded += 1;
            }
        }
        Ok(turns)
    }

    fn prepare(&mut self, place: Place) -> anyhow::Result<()> {
        let topology = place.topology();
        if !self.hosts.contains_key(&topology) {
            let hosts = Hosts::new(topology, self.hosts.len(), &self.scratch)?
                .context("hosts are network namespaces, and making them takes root")?;
            self.hosts.insert(topology, hosts);
        }
        Ok(())
    }

    fn measure(&self, hosts: &Hosts, place: Place, contender: &Contender) -> anyhow::Result<f64> {
        let server = match &contender.server {
            Some(words) => Some(self.serve(hosts, place, contender, words)?),
            None => None,
        };
        let mut client = self.start(hosts, place, Side::Client, contender, &contender.client)?;
        let status = client.wait(Instant::now() + PATIENCE)?;
        let output = client.output();
        let said = |server: &Option<Process>| server.as_ref().map(Process::output);
        match status {
            None => bail!("{} does not end\n{output}", contender.client),
            Some(status) if !status.success() => {
                let server = said(&server).unwrap_or_default();
                bail!("{} failed ({status})\n{output}{server}", contender.client);
            }
            Some(_) => {}
        }
        let printed = match server {
            Some(mut server) => {
                // Some serve for ever and are ended with their handle.
                let status = server.wait(Instant::now() + AFTERWARDS)?;
                if status.is_some_and(|status| !status.success()) {
                    bail!("the server failed\n{}", server.output());
                }
                if contender.printer == Side::Server { server.output() } else { output }
            }
            None => output,
        };
        let figure = contender.reading.read(&printed);
        Ok(figure.with_context(|| format!("no figure in\n{printed}"))? * contender.scale)
    }

    fn serve(
        &self,
        hosts: &Hosts,
        place: Place,
        contender: &Contender,
        words: &str,
    ) -> anyhow::Result<Process> {
        let mut server = self.start(hosts, place, Side::Server, contender, words)?;
        let sockets = hosts.sockets(Side::Server);
        // UDP has no listener to wait for: its client starts when the server has bound.
        let ready = wait_for(Instant::now() + PATIENCE, || {
            if server.ended()?.is_some() {
                bail!("the server ended early\n{}", server.output());
            }
            Ok(sockets.listens(PORT)? || sockets.cm_listens(PORT)? || sockets.is_bound(PORT)?)
        })?;
        if !ready {
            bail!("the server does not listen\n{}", server.output());
        }
        Ok(server)
    }

    fn start(
        &self,
        hosts: &Hosts,
        place: Place,
        side: Side,
        contender: &Contender,
        words: &str,
    ) -> anyhow::Result<Process> {
        let (core, file) = match side {
            Side::Server => ("0", "server.out"),
            Side::Client => ("1", "client.out"),
        };
        let mut command = hosts.command(side, "taskset".as_ref());
        command.args(["-c", core]).envs(contender.environment.iter().copied());
        if contender.device {
            command.envs(place.environment().iter().copied());
            command.arg(self.dist.anyverbs()).args(["run", "--"]);
        }
        let address = hosts.server_address(true);
        let programs = format!("{}/", self.programs.display());
        command.args(words.split_ascii_whitespace().map(|word| {
            word.replace("ADDRESS", address)
                .replace("LIMITS", &self.limits.to_string_lossy())
                .replace("PROGRAMS/", &programs)
        }));
        Process::start(&mut command, &self.scratch.join(file))
    }
}

/// Sets what a place has besides its topology, or takes it away.
fn conditions(hosts: &Hosts, place: Place, set: bool) -> anyhow::Result<()> {
    let Place::Loss { offloads, .. } = place else { return Ok(()) };
    for side in [Side::Server, Side::Client] {
        let run = |program: &str, words: &str| {
            let mut command = hosts.command(side, Path::new(program));
            quiet(command.args(words.split(' '))).map(|_| ())
        };
        if set {
            run("nft", "add table inet bench")?;
            run("nft", "add chain inet bench in { type filter hook prerouting priority 0 ; }")?;
            run("nft", "add rule inet bench in iif eth0 numgen random mod 1000 < 10 drop")?;
        } else {
            run("nft", "delete table inet bench")?;
        }
        if !offloads {
            let switch = if set { "off" } else { "on" };
            for feature in ["tso", "gso", "gro", "tx-udp-segmentation"] {
                run("ethtool", &format!("-K eth0 {feature} {switch}"))?;
            }
        }
    }
    Ok(())
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |mtu: &Mtu| match mtu {
            Mtu::Ethernet => 1500,
            Mtu::Jumbo => 9000,
        };
        match self {
            Self::SameHost => f.write_str("same host"),
            Self::Loopback => f.write_str("loopback"),
            Self::TwoHosts { mtu } => write!(f, "two hosts, MTU {}", bytes(mtu)),
            Self::Loss { mtu, offloads } => {
                let offloads = if *offloads { "offloads" } else { "no offloads" };
                write!(f, "1% loss, {offloads}, MTU {}", bytes(mtu))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(rounds: &[(f64, f64)]) -> Turns {
        let round = |(ours, theirs): &(f64, f64)| Round {
            cache_line_ns: [50.0, 60.0],
            figures: vec![Some(*ours), Some(*theirs)],
        };
        Turns {
            rounds: rounds.iter().map(round).collect(),
            discarded: 0,
            failures: vec![None, None],
        }
    }

    #[test]
    fn the_median_of_few() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn the_ratio_is_of_rounds_and_not_of_medians() {
        // The machine ran three times as fast in two rounds.
        let turns = turns(&[(2.0, 1.0), (6.0, 3.0), (6.0, 3.0)]);
        assert_eq!(turns.ratio(0, 1), Ok(2.0));
        assert_eq!(turns.median(0), Ok(6.0));
        assert_eq!(turns.states(), "near");
    }

    #[test]
    fn who_failed_has_no_figure() {
        let mut turns = turns(&[(2.0, 1.0)]);
        turns.failures[1] = Some("gone".into());
        assert_eq!(turns.median(1), Err("gone".into()));
        assert_eq!(turns.ratio(0, 1), Err("gone".into()));
        assert_eq!(turns.median(0), Ok(2.0));
    }

    #[test]
    fn no_round_without_a_change_is_no_figure() {
        let turns = Turns { rounds: vec![], discarded: 4, failures: vec![None] };
        assert!(turns.median(0).unwrap_err().contains("each of 4 rounds"));
    }
}

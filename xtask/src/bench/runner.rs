//! Runs contenders in turn, one core a side, and keeps only the rounds in which the machine did not change its state.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::contender::{Contender, PORT};
use super::machine::cache_line;
use super::place::Place;
use super::turns::{Round, Turns};
use crate::conformance::{Hosts, Process, Side, Topology, wait_for};
use crate::dist::Dist;
use crate::interrupt;

/// Time for one program; the longest test takes a few seconds on an idle machine.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Time for a server after its client.
const AFTERWARDS: Duration = Duration::from_secs(1);

/// The number of rounds of a measurement.
#[derive(Debug, Clone, Copy)]
pub(super) enum Rounds {
    /// This many rounds. A round in which the machine changed its state is repeated, as often again as there are
    /// rounds.
    Settled(usize),
    /// One round, for measurements that do not depend on the machine's state.
    Once,
}

/// The folders of programs, and the hosts that they run on.
pub(super) struct Runner {
    pub(super) dist: Dist,
    pub(super) limits: PathBuf,
    /// The compiled C programs.
    pub(super) programs: PathBuf,
    pub(super) scratch: PathBuf,
    shared: SharedFile,
    hosts: BTreeMap<Topology, Hosts>,
}

/// A file in memory that programs map.
pub(super) struct SharedFile(PathBuf);

impl SharedFile {
    const BYTES: u64 = 16 << 20;

    fn create() -> anyhow::Result<Self> {
        let this = Self(format!("/dev/shm/anyverbs-bench-{}", std::process::id()).into());
        File::create(&this.0)?.set_len(Self::BYTES)?;
        Ok(this)
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

impl Runner {
    pub(super) fn new(
        dist: Dist,
        limits: PathBuf,
        programs: PathBuf,
        scratch: PathBuf,
    ) -> anyhow::Result<Self> {
        let shared = SharedFile::create().context("cannot make a file in /dev/shm")?;
        Ok(Runner { dist, limits, programs, scratch, shared, hosts: BTreeMap::new() })
    }

    /// Runs `contenders` one after the other, in this many rounds. Fails only where the measurement itself is
    /// impossible.
    pub(super) fn in_turn(
        &mut self,
        place: Place,
        contenders: &[&Contender],
        rounds: Rounds,
    ) -> anyhow::Result<Turns> {
        self.prepare(place)?;
        let hosts = &self.hosts[&place.topology()];
        place.set(hosts)?;
        let turns = self.rounds(hosts, contenders, rounds);
        if place.changes_hosts() {
            // The next contender gets fresh hosts.
            self.hosts.remove(&place.topology());
        }
        turns
    }

    fn rounds(
        &self,
        hosts: &Hosts,
        contenders: &[&Contender],
        rounds: Rounds,
    ) -> anyhow::Result<Turns> {
        let (runs, any_state) = match rounds {
            Rounds::Settled(runs) => (runs, false),
            Rounds::Once => (1, true),
        };
        let mut turns =
            Turns { rounds: Vec::new(), discarded: 0, failures: vec![None; contenders.len()] };
        let mut before = cache_line(&self.limits)?;
        while turns.rounds.len() < runs && turns.discarded <= runs {
            let mut figures = Vec::with_capacity(contenders.len());
            for (contender, failure) in contenders.iter().zip(&mut turns.failures) {
                // Once failed, a contender has no figure: trying again until one comes would hide it.
                let figure = failure.is_none().then(|| self.measure(hosts, contender));
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
            if any_state || round.state().is_some() {
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
            let hosts = Hosts::new(topology, topology as usize, &self.scratch)?
                .context("hosts are network namespaces, and making them takes root")?;
            self.hosts.insert(topology, hosts);
        }
        Ok(())
    }

    fn measure(&self, hosts: &Hosts, contender: &Contender) -> anyhow::Result<f64> {
        let server = match &contender.server {
            Some(words) => Some(self.serve(hosts, contender, words)?),
            None => None,
        };
        let mut client = self.start(hosts, Side::Client, contender, &contender.client)?;
        let status = client.wait(Instant::now() + TIME_LIMIT)?;
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

    fn serve(&self, hosts: &Hosts, contender: &Contender, words: &str) -> anyhow::Result<Process> {
        let mut server = self.start(hosts, Side::Server, contender, words)?;
        let sockets = hosts.sockets(Side::Server);
        // UDP has no listener to wait for: its client starts when the server has bound.
        let ready = wait_for(Instant::now() + TIME_LIMIT, || {
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
        side: Side,
        contender: &Contender,
        words: &str,
    ) -> anyhow::Result<Process> {
        let (core, file) = match side {
            Side::Server => ("0", "server.out"),
            Side::Client => ("1", "client.out"),
        };
        let mut command = hosts.command(side, "taskset".as_ref());
        command.args(["-c", core]);
        if contender.device {
            command.arg(self.dist.anyverbs()).arg("run");
            command.args(contender.sockets.then_some("--sockets")).arg("--");
        }
        // A contender may differ from its place.
        command.envs(contender.environment.iter().copied());
        let address = hosts.server_address(true);
        let programs = format!("{}/", self.programs.display());
        command.args(words.split_ascii_whitespace().map(|word| {
            word.replace("ADDRESS", address)
                .replace("LIMITS", &self.limits.to_string_lossy())
                .replace("PROGRAMS/", &programs)
                .replace("SHARED_FILE", &self.shared.0.to_string_lossy())
        }));
        Process::start(&mut command, &self.scratch.join(file))
    }
}

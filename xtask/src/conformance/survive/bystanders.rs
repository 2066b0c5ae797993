//! Those who talk on.

use std::time::{Duration, Instant};

use anyhow::bail;

use super::super::hosts::Side;
use super::super::process::{Process, wait_for};
use super::Stage;

const SOON: Duration = Duration::from_secs(10);

/// A pair on one host and a pair between the hosts, which exchange without end.
pub(super) struct Bystanders {
    processes: Vec<Process>,
    /// Lines of each that were looked at.
    read: Vec<usize>,
}

impl Bystanders {
    pub(super) fn start(stage: &Stage<'_>) -> anyhow::Result<Self> {
        let mut processes = Vec::new();
        for (name, port, client) in [("one", 30_001, Side::Server), ("two", 30_002, Side::Client)] {
            let options = format!("-b -e -q 2 -D 2 -s 5000 -p {port}");
            let server =
                stage.start(Side::Server, &format!("{name}-server"), &stage.exchange, &options)?;
            let listens = wait_for(Instant::now() + SOON, || {
                stage.hosts.sockets(Side::Server).listens(port)
            })?;
            if !listens {
                bail!("a bystander does not listen: {}", server.output());
            }
            processes.push(server);
            let options = format!("{options} 10.77.0.1");
            processes.push(stage.start(
                client,
                &format!("{name}-client"),
                &stage.exchange,
                &options,
            )?);
        }
        let mut bystanders = Self { read: vec![0; processes.len()], processes };
        let talk = wait_for(Instant::now() + SOON, || {
            Ok(bystanders
                .processes
                .iter()
                .all(|process| process.output().matches("\nat ").count() > 5))
        })?;
        if !talk {
            bail!("the bystanders do not talk: {}", bystanders.processes[0].output());
        }
        bystanders.slowest()?;
        Ok(bystanders)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u32> {
        self.processes.iter().map(Process::id)
    }

    /// The slowest operation since the last call, of all of them; fails if one has ended.
    pub(super) fn slowest(&mut self) -> anyhow::Result<Duration> {
        let mut slowest = 0.0f64;
        for (process, read) in self.processes.iter_mut().zip(&mut self.read) {
            let output = process.output();
            if let Some(status) = process.ended()? {
                bail!(
                    "a bystander ended with {status}: {}",
                    output.lines().last().unwrap_or_default()
                );
            }
            let lines: Vec<&str> = output.lines().collect();
            let times = lines[*read..].iter().filter_map(|line| {
                line.split_once("slowest ")?.1.strip_suffix(" ms")?.parse::<f64>().ok()
            });
            slowest = times.fold(slowest, f64::max);
            *read = lines.len();
        }
        Ok(Duration::from_secs_f64(slowest / 1e3))
    }

    /// Whether all still make progress.
    pub(super) fn finish(&mut self) -> anyhow::Result<Option<String>> {
        let counts = |this: &Self| {
            this.processes
                .iter()
                .map(|p| p.output().matches(" operations,").count())
                .collect::<Vec<_>>()
        };
        let before = counts(self);
        let go_on = wait_for(Instant::now() + SOON, || {
            Ok(counts(self).iter().zip(&before).all(|(now, before)| now > before))
        })?;
        Ok((!go_on).then(|| "a bystander does not go on".into()))
    }
}

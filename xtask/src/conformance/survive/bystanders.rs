//! The bystanders, which talk on.

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

/// Their work in 100 ms.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Sample {
    /// The end of the 100 ms by the monotonic clock.
    pub(super) at: f64,
    pub(super) operations: u64,
    /// The time of the slowest operation, without the time in which the process or its peer waited for a processor.
    pub(super) slowest: Duration,
}

/// One process's report for 100 ms.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Line {
    at: f64,
    operations: u64,
    /// Seconds of the slowest operation that ended, and that the process' threads were ready and did not run.
    slowest: f64,
    waited: f64,
}

/// Operations, and the time of one process that they took.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Rate {
    pub(super) operations: u64,
    pub(super) seconds: f64,
}

/// The monotonic clock in seconds, as `exchange` prints it.
pub(super) fn monotonic() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to `time` only.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// The length of a sample.
const SAMPLE: f64 = 0.1;

impl Rate {
    /// The rate of the samples between two times.
    pub(super) fn between(samples: &[Sample], from: f64, to: f64) -> Self {
        let within = |sample: &&Sample| sample.at - SAMPLE >= from && sample.at <= to;
        let operations: Vec<u64> = samples.iter().filter(within).map(|s| s.operations).collect();
        Rate { operations: operations.iter().sum(), seconds: operations.len() as f64 * SAMPLE }
    }

    pub(super) fn per_second(self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.operations as f64 / self.seconds)
    }
}

impl std::ops::AddAssign for Rate {
    fn add_assign(&mut self, other: Self) {
        self.operations += other.operations;
        self.seconds += other.seconds;
    }
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
        if let Err(ended) = bystanders.samples()? {
            bail!(ended);
        }
        Ok(bystanders)
    }

    pub(super) fn ids(&self) -> impl Iterator<Item = u32> {
        self.processes.iter().map(Process::id)
    }

    /// The work of all of them since the last call. An error says which one has ended.
    pub(super) fn samples(&mut self) -> anyhow::Result<Result<Vec<Sample>, String>> {
        let mut said = Vec::new();
        for (process, read) in self.processes.iter_mut().zip(&mut self.read) {
            let output = process.output();
            if let Some(status) = process.ended()? {
                let last = output.lines().last().unwrap_or_default();
                return Ok(Err(format!("a bystander ended with {status}: {last}")));
            }
            // The last line may not be whole.
            let whole = output.rsplit_once('\n').map_or("", |(whole, _)| whole);
            let lines: Vec<&str> = whole.lines().collect();
            said.push(lines[*read..].iter().filter_map(|line| parse(line)).collect::<Vec<_>>());
            *read = lines.len();
        }
        let pairs = said.chunks(2).flat_map(|pair| [(&pair[0], &pair[1]), (&pair[1], &pair[0])]);
        Ok(Ok(pairs.flat_map(|(one, other)| samples(one, other)).collect()))
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

/// The samples of one of a pair.
fn samples(one: &[Line], other: &[Line]) -> Vec<Sample> {
    let of = |line: &Line| {
        let begin = line.at - SAMPLE - line.slowest;
        let during = |other: &&Line| other.at >= begin && other.at - SAMPLE <= line.at;
        let waited: f64 = one.iter().chain(other).filter(during).map(|line| line.waited).sum();
        Sample {
            at: line.at,
            operations: line.operations,
            slowest: Duration::from_secs_f64((line.slowest - waited).max(0.0)),
        }
    };
    one.iter().map(of).collect()
}

/// Reads `at 12.345: 100 operations, 20 more, slowest 1.5 ms, waited 0.2 ms for processors`.
fn parse(line: &str) -> Option<Line> {
    let (at, rest) = line.strip_prefix("at ")?.split_once(": ")?;
    let (more, rest) = rest.split_once(" operations, ")?.1.split_once(" more, slowest ")?;
    let (slowest, rest) = rest.split_once(" ms, waited ")?;
    let waited = rest.strip_suffix(" ms for processors")?;
    Some(Line {
        at: at.parse().ok()?,
        operations: more.parse().ok()?,
        slowest: slowest.parse::<f64>().ok()? / 1e3,
        waited: waited.parse::<f64>().ok()? / 1e3,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(at: f64, more: u64, slowest: f64, waited: f64) -> Line {
        let counts = format!("1000 operations, {more} more");
        let times = format!("slowest {slowest:.1} ms, waited {waited:.1} ms for processors");
        parse(&format!("at {at:.3}: {counts}, {times}")).unwrap()
    }

    #[test]
    fn a_rate_is_of_what_lies_wholly_between() {
        let lines = [1, 2, 4, 8].map(|more| line(1.0 + more as f64 / 100.0, more, 1.5, 0.0));
        let samples = samples(&lines, &[]);
        assert_eq!(samples[0].slowest, Duration::from_micros(1500));
        let rate = Rate::between(&samples, 0.915, 1.045);
        assert_eq!((rate.operations, rate.per_second()), (6, Some(30.0)));
        assert_eq!(Rate::between(&samples, 2.0, 3.0).per_second(), None);
        assert_eq!(parse("connected"), None);
    }

    #[test]
    fn waiting_for_a_processor_is_not_slowness() {
        let slow = |waited: [f64; 2]| {
            let one = [line(5.0, 1, 0.1, 0.0), line(8.0, 1, 3000.0, waited[0])];
            let other = [line(4.0, 1, 0.1, 900.0), line(8.0, 1, 0.1, waited[1])];
            samples(&one, &other)[1].slowest
        };
        assert_eq!(slow([0.0, 0.0]), Duration::from_secs(3));
        assert_eq!(slow([1000.0, 1500.0]), Duration::from_millis(500));
        assert_eq!(slow([2000.0, 1500.0]), Duration::ZERO);
    }
}

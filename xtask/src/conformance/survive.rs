//! Processes that are killed or stopped at random moments, while others talk on.
//!
//! Each round draws what two programs do, on one host or on two, which of them is struck, how and when. The other one must
//! end with the right error in time, or go on; nothing of the struck one may stay; and two pairs of bystanders, one on one
//! host and one between the hosts, talk on all the time.

mod bystanders;
mod leaks;
mod round;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use self::bystanders::Bystanders;
use self::leaks::Traces;
use self::round::{Plan, Verdict};
use super::hosts::{Hosts, Side, Topology, sweep};
use super::process::{Process, quiet};
use super::{Selection, Tally, exchange};
use crate::dist::Dist;
use crate::{interrupt, packages, page, workspace};

/// Of an ordinary run, and of a whole one.
const ROUNDS: u64 = 40;
const ALL_ROUNDS: u64 = 500;
const FIRST_SEED: u64 = 1;
/// What an operation between others may take while somebody ends.
const BYSTANDERS_MOST: Duration = Duration::from_secs(2);

const BEGIN: &str =
    "<!-- result: written by `cargo xtask conformance survive --all --write-docs` -->";

/// Where rounds run.
struct Stage<'a> {
    dist: &'a Dist,
    hosts: Hosts,
    scratch: &'a Path,
    exchange: PathBuf,
}

impl Stage<'_> {
    /// Starts a program of one side, without a launcher between, so that its process id is the program's.
    fn start(
        &self,
        side: Side,
        name: &str,
        program: &Path,
        words: &str,
    ) -> anyhow::Result<Process> {
        let mut command = self.hosts.command(side, program);
        command.args(words.split_ascii_whitespace());
        command.env("LD_LIBRARY_PATH", self.dist.lib()).current_dir(self.scratch);
        Process::start(&mut command, &self.scratch.join(format!("{name}.out")))
    }

    /// Starts a program of one side below `anyverbs run`.
    fn launch(
        &self,
        side: Side,
        name: &str,
        program: &Path,
        words: &str,
    ) -> anyhow::Result<Process> {
        let mut command = self.hosts.command(side, &self.dist.anyverbs());
        command.args(["run", "--"]).arg(program).args(words.split_ascii_whitespace());
        command.current_dir(self.scratch);
        Process::start(&mut command, &self.scratch.join(format!("{name}.out")))
    }
}

/// Runs the rounds and says what became of them.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[packages::IPROUTE2, packages::RDMACM_UTILS])?;
    let rounds = selection.rounds.unwrap_or(if selection.all { ALL_ROUNDS } else { ROUNDS });
    let seed = selection.seed.unwrap_or(FIRST_SEED);
    let scratch = workspace::target().join("conformance/survive");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    sweep();
    println!("survive: {rounds} rounds");
    // SAFETY: cannot fail and touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        println!("skip survive  needs root for network namespaces");
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    let hosts = Hosts::new(Topology::TwoHosts, 0, &scratch)?.context("no network namespaces")?;
    let stage = Stage { dist, hosts, scratch: &scratch, exchange: exchange::build(&scratch)? };
    // What an earlier run left behind is not this one's.
    sweep_views(dist)?;
    let mut bystanders = Bystanders::start(&stage)?;
    let before = Traces::of(&stage, &bystanders)?;

    let (mut tally, mut verdicts) = (Tally::default(), Vec::new());
    for number in 0..rounds {
        interrupt::check()?;
        let plan = Plan::draw(seed + number);
        if selection.filter.as_ref().is_some_and(|text| !plan.to_string().contains(text.as_str())) {
            continue;
        }
        let started = Instant::now();
        let mut verdict = round::run(&stage, &plan)?;
        if verdict.complaint.is_none() {
            verdict.complaint = before.left_behind(&stage, &bystanders)?;
        }
        let slowest = bystanders.slowest()?;
        if verdict.complaint.is_none() && slowest > BYSTANDERS_MOST {
            verdict.complaint = Some(format!("a bystander's operation took {slowest:?}"));
        }
        let head = format!("[{:>3}/{rounds}] seed {} {plan}", number + 1, seed + number);
        let seconds = started.elapsed().as_secs_f64();
        match &verdict.complaint {
            None => {
                tally.passed += 1;
                let took = verdict
                    .took
                    .map_or(String::new(), |took| format!(" after {} ms", took.as_millis()));
                println!(
                    "ok   {head}: {}{took}; others at most {} ms  ({seconds:.1} s)",
                    verdict.what,
                    slowest.as_millis()
                );
            }
            Some(complaint) => {
                tally.failed += 1;
                println!("FAIL {head}: {complaint}  ({seconds:.1} s)\n{}", verdict.said);
                println!(
                    "  again: cargo xtask conformance survive --rounds 1 --seed {}",
                    seed + number
                );
            }
        }
        verdicts.push((plan, verdict, slowest));
    }
    if tally.passed + tally.failed == 0 {
        bail!("no round has that in its name");
    }
    if let Some(complaint) = after(&stage, &mut bystanders)? {
        tally.failed += 1;
        println!("FAIL in the end: {complaint}");
    }
    println!("survive: {tally}");
    if selection.write_docs {
        let text = table(&verdicts, seed);
        page::write(&workspace::root().join("docs/reliability.md"), BEGIN, &text)?;
    }
    Ok(tally)
}

/// What is still to be seen when all rounds are over.
fn after(stage: &Stage<'_>, bystanders: &mut Bystanders) -> anyhow::Result<Option<String>> {
    sweep_views(stage.dist)?;
    let left = leaks::views();
    if !left.is_empty() {
        return Ok(Some(format!("views of killed launchers stay: {left:?}")));
    }
    bystanders.finish()
}

/// A launcher removes what killed ones have left.
fn sweep_views(dist: &Dist) -> anyhow::Result<()> {
    quiet(Command::new(dist.anyverbs()).args(["run", "--", "true"])).map(|_| ())
}

fn table(verdicts: &[(Plan, Verdict, Duration)], seed: u64) -> String {
    let mut text = String::from(
        "| what two programs do, and what happens to one | rounds | promised of the other | as promised | slowest | slowest operation of the bystanders |\n\
         |---|---|---|---|---|---|\n",
    );
    let mut rows: Vec<(String, &str)> =
        verdicts.iter().map(|(plan, ..)| (plan.subject(), plan.promise())).collect();
    rows.sort();
    rows.dedup();
    for (subject, promise) in rows {
        let of: Vec<_> = verdicts
            .iter()
            .filter(|(plan, ..)| (plan.subject(), plan.promise()) == (subject.clone(), promise))
            .collect();
        let kept = of.iter().filter(|(_, verdict, _)| verdict.complaint.is_none()).count();
        let slowest = of.iter().filter_map(|(_, verdict, _)| verdict.took).max();
        let slowest = slowest.map_or("-".into(), |took| format!("{} ms", took.as_millis()));
        let others = of.iter().map(|(.., slowest)| *slowest).max().unwrap_or_default();
        text += &format!(
            "| {subject} | {} | {promise} | {kept} | {slowest} | {} ms |\n",
            of.len(),
            others.as_millis()
        );
    }
    text + &format!(
        "\nSeeds from {seed}. One of them again: `cargo xtask conformance survive --rounds 1 --seed {seed}`."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_its_marks() {
        let page = fs::read_to_string(workspace::root().join("docs/reliability.md")).unwrap();
        assert!(page::replaced(&page, BEGIN, "").is_some());
    }
}

//! Processes that are killed or stopped at random moments, while others talk on.
//!
//! Each round draws the work of two programs, on one host or on two, the victim, its fault, and the time. The survivor
//! must end with the right error in time, or go on. No trace of the victim may stay. Two pairs of bystanders, one on
//! one host and one between the hosts, must go on all the time at their speed.

mod bystanders;
mod leaks;
mod plan;
mod round;
mod shared_xrc;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use self::bystanders::{Bystanders, Rate};
use self::leaks::Traces;
use self::plan::Plan;
use self::round::{Round, Verdict};
use super::findings::{self, Known};
use super::hosts::{Hosts, Side, Topology, sweep};
use super::process::{Process, quiet};
use super::{Selection, Tally, exchange};
use crate::dist::Dist;
use crate::{interrupt, packages, page, workspace};

/// Rounds of an ordinary run, and of a whole one.
const ROUNDS: u64 = 20;
const ALL_ROUNDS: u64 = 500;
const FIRST_SEED: u64 = 1;
/// Ports of TCP and of the CM: one for each seed.
const FIRST_PORT: u16 = 20_000;
/// Rounds before the first that counts, in which bystanders open everything that they open once in their lives.
const WARM_UP: u64 = 14;
/// The longest time of an operation between bystanders while another process ends.
const BYSTANDERS_MOST: Duration = Duration::from_secs(2);
/// The part of their speed that the bystanders must keep after the faults, taken over a run, and how much of each must
/// have been seen. Before the faults, two more programs use the processors.
const SPEED_KEPT: f64 = 0.8;
const SPEED_SEEN: f64 = 20.0;

const BEGIN: &str =
    "<!-- result: written by `cargo xtask conformance survive --all --write-docs` -->";

/// The place of rounds.
struct Stage<'a> {
    dist: &'a Dist,
    hosts: Hosts,
    scratch: &'a Path,
    /// The programs' private directory for temporary files.
    temporary: PathBuf,
    exchange: PathBuf,
    xrc_share: PathBuf,
    known: Option<Known>,
    /// The file of findings.
    findings: PathBuf,
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
        self.keep_apart(&mut command);
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
        self.keep_apart(&mut command);
        Process::start(&mut command, &self.scratch.join(format!("{name}.out")))
    }

    /// A launcher removes the views that killed ones have left.
    fn sweep_views(&self) -> anyhow::Result<()> {
        let mut launcher = Command::new(self.dist.anyverbs());
        self.keep_apart(&mut launcher);
        quiet(launcher.args(["run", "--", "true"])).map(|_| ())
    }

    fn keep_apart(&self, command: &mut Command) {
        command.env("TMPDIR", &self.temporary).env_remove("XDG_RUNTIME_DIR");
        if self.known.is_some() {
            findings::ask(command, &self.findings);
        }
    }
}

/// The result of a round, for the table.
struct Entry {
    plan: Plan,
    round: Round,
    /// The slowest operation of the bystanders, and their rates while both programs worked and after the fault.
    slowest: Duration,
    before: Rate,
    after: Rate,
}

/// Runs the rounds and reports their results.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[packages::IPROUTE2, packages::RDMACM_UTILS])?;
    let rounds = selection.rounds.unwrap_or(if selection.all { ALL_ROUNDS } else { ROUNDS });
    let seed = selection.seed.unwrap_or(FIRST_SEED);
    let scratch = workspace::target().join("conformance/survive");
    let temporary = scratch.join("tmp");
    fs::create_dir_all(&temporary)
        .with_context(|| format!("cannot make {}", temporary.display()))?;
    sweep();
    println!("survive: {rounds} rounds");
    // SAFETY: cannot fail and touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        println!("skip survive  needs root for network namespaces");
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    let hosts = Hosts::new(Topology::TwoHosts, 0, &scratch)?.context("no network namespaces")?;
    let exchange = exchange::build(&scratch)?;
    let xrc_share = exchange::compile(&scratch, "xrc_share", &["xrc_share.c", "waited.c"])?;
    let (known, findings) = (Known::wanted(selection)?, scratch.join("findings"));
    fs::write(&findings, "")?;
    let scratch = &scratch;
    let stage = Stage { dist, hosts, scratch, temporary, exchange, xrc_share, known, findings };
    // Leftovers of an earlier run do not count for this one.
    stage.sweep_views()?;
    let mut bystanders = Bystanders::start(&stage)?;
    for seed in 0..WARM_UP {
        round::run(&stage, &Plan::draw(seed))?;
    }
    if let Err(ended) = bystanders.samples()? {
        bail!(ended);
    }
    let mut baseline = Traces::of(&stage, &bystanders)?;

    let (mut tally, mut entries) = (Tally::default(), Vec::new());
    for number in 0..rounds {
        interrupt::check()?;
        let plan = Plan::draw(seed + number);
        if selection.filter.as_ref().is_some_and(|text| !plan.to_string().contains(text.as_str())) {
            continue;
        }
        let started = Instant::now();
        let mut entry = play(&stage, plan, &mut bystanders, &mut baseline)?;
        let head = format!("[{:>3}/{rounds}] seed {} {}", number + 1, seed + number, entry.plan);
        let seconds = started.elapsed().as_secs_f64();
        match &mut entry.round.verdict {
            Verdict::Kept(what, took) => {
                tally.passed += 1;
                let took =
                    took.map_or(String::new(), |took| format!(" after {} ms", took.as_millis()));
                let most = entry.slowest.as_millis();
                println!("ok   {head}: {what}{took}; others at most {most} ms  ({seconds:.1} s)");
            }
            Verdict::Void => {
                tally.skipped += 1;
                println!("skip {head}: the victim ended before the fault each time");
            }
            Verdict::Broken(complaint) => {
                tally.failed += 1;
                println!("FAIL {head}: {complaint}  ({seconds:.1} s)\n{}", entry.round.said);
                println!(
                    "  again: cargo xtask conformance survive --rounds 1 --seed {}",
                    seed + number
                );
            }
        }
        entries.push(entry);
    }
    if entries.is_empty() {
        bail!("no round has that in its name");
    }
    for complaint in after(&stage, &mut bystanders, &entries)? {
        tally.failed += 1;
        println!("FAIL in the end: {complaint}");
    }
    if let Some(known) = &stage.known {
        println!("{known}");
    }
    let drawn_again: u32 = entries.iter().map(|entry| entry.round.drawn_again).sum();
    println!("survive: {tally}; {drawn_again} times the victim had ended before the fault");
    if selection.write_docs {
        let text = table(&entries, seed);
        page::write(&workspace::root().join("docs/reliability.md"), BEGIN, &text)?;
    }
    Ok(tally)
}

/// Runs a round, and checks its leftovers and the bystanders.
fn play(
    stage: &Stage<'_>,
    plan: Plan,
    bystanders: &mut Bystanders,
    baseline: &mut Traces,
) -> anyhow::Result<Entry> {
    let mut round = round::run(stage, &plan)?;
    let (samples, mut complaint) = match bystanders.samples()? {
        Ok(samples) => (samples, baseline.left_behind(stage, bystanders)?),
        // Nothing can be read of a process that has ended.
        Err(ended) => {
            *bystanders = Bystanders::start(stage)?;
            *baseline = Traces::of(stage, bystanders)?;
            (Vec::new(), Some(ended))
        }
    };
    let slowest = samples.iter().map(|sample| sample.slowest).max().unwrap_or_default();
    if slowest > BYSTANDERS_MOST {
        complaint = complaint.or(Some(format!("a bystander's operation took {slowest:?}")));
    }
    if let Some(complaint) = complaint
        && !matches!(round.verdict, Verdict::Broken(_))
    {
        round.verdict = Verdict::Broken(complaint);
    }
    let rate = |from, to| Rate::between(&samples, from, to);
    let (before, after) = match round.times {
        Some([begin, fault, end]) if !matches!(round.verdict, Verdict::Void) => {
            (rate(begin, fault), rate(fault, end))
        }
        _ => Default::default(),
    };
    Ok(Entry { plan, round, slowest, before, after })
}

/// Finds leftovers when all rounds are over.
fn after(
    stage: &Stage<'_>,
    bystanders: &mut Bystanders,
    entries: &[Entry],
) -> anyhow::Result<Vec<String>> {
    let mut complaints = Vec::new();
    stage.sweep_views()?;
    let left = leaks::views(&stage.temporary);
    if !left.is_empty() {
        complaints.push(format!("views of killed launchers stay: {left:?}"));
    }
    complaints.extend(bystanders.finish()?);
    if let Some(known) = &stage.known {
        complaints.extend(known.judge(&stage.findings, None)?.err());
    }
    let (before, after) = speeds(entries);
    if let (Some(was), Some(is)) = (before.per_second(), after.per_second()) {
        println!("bystanders: {was:.0} operations/s each before the faults, {is:.0} after them");
        let seen = before.seconds.min(after.seconds) >= SPEED_SEEN;
        if seen && is < was * SPEED_KEPT {
            complaints.push(format!("the bystanders fell from {was:.0} to {is:.0} operations/s"));
        }
    }
    Ok(complaints)
}

/// Speeds of the bystanders, before and after all faults of these rounds.
fn speeds<'a>(entries: impl IntoIterator<Item = &'a Entry>) -> (Rate, Rate) {
    let (mut before, mut after) = (Rate::default(), Rate::default());
    for entry in entries {
        before += entry.before;
        after += entry.after;
    }
    (before, after)
}

fn table(entries: &[Entry], seed: u64) -> String {
    let mut text = String::from(
        "| what programs do, and what happens to one | rounds | promised of the survivors | as promised | slowest | slowest operation of the bystanders |\n\
         |---|---|---|---|---|---|\n",
    );
    let mut rows: Vec<(String, &str)> =
        entries.iter().map(|entry| (entry.plan.subject(), entry.plan.promise())).collect();
    rows.sort();
    rows.dedup();
    for row in rows {
        let of: Vec<_> = entries
            .iter()
            .filter(|entry| (entry.plan.subject(), entry.plan.promise()) == row)
            .filter(|entry| !matches!(entry.round.verdict, Verdict::Void))
            .collect();
        let took = of.iter().filter_map(|entry| match entry.round.verdict {
            Verdict::Kept(_, took) => Some(took),
            _ => None,
        });
        let kept = took.clone().count();
        let slowest =
            took.flatten().max().map_or("-".into(), |took| format!("{} ms", took.as_millis()));
        let others = of.iter().map(|entry| entry.slowest).max().unwrap_or_default();
        let (subject, promise) = row;
        text += &format!(
            "| {subject} | {} | {promise} | {kept} | {slowest} | {} ms |\n",
            of.len(),
            others.as_millis()
        );
    }
    text += "\n| fault | bystanders before, each | after |\n|---|---|---|\n";
    let mut faults: Vec<&str> = entries.iter().map(|entry| entry.plan.fault_name()).collect();
    faults.sort_unstable();
    faults.dedup();
    for fault in faults {
        let (before, after) =
            speeds(entries.iter().filter(|entry| entry.plan.fault_name() == fault));
        let shown = |rate: Rate| {
            rate.per_second().map_or("-".into(), |rate| format!("{rate:.0} operations/s"))
        };
        text += &format!("| {fault} | {} | {} |\n", shown(before), shown(after));
    }
    let drawn_again: u32 = entries.iter().map(|entry| entry.round.drawn_again).sum();
    let void = entries.iter().filter(|entry| matches!(entry.round.verdict, Verdict::Void)).count();
    text + &format!(
        "\n{} rounds, seeds from {seed}; {drawn_again} times the victim had ended by itself before the fault, and the round was drawn again with an \
         earlier one; {void} rounds are not counted because that never helped. One of them again: \
         `cargo xtask conformance survive --rounds 1 --seed {seed}`.",
        entries.len()
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

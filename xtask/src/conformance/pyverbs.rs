//! rdma-core's own Python suite, as Debian ships it and in a newer release, with the expected skips of
//! `conformance/pyverbs.toml` and `conformance/pyverbs-59.toml`.

mod package;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use super::findings::{self, Known};
use super::hosts::{Hosts, Side, Topology};
use super::process::{Process, quiet};
use super::{Selection, Tally};
use crate::dist::Dist;
use crate::{packages, workspace};

const SUITE: &str = "/usr/share/doc/rdma-core/tests";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    device: String,
    module: Vec<Module>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Module {
    name: String,
    timeout_s: u64,
    /// Only `--all` runs it.
    #[serde(default)]
    all_only: bool,
    /// Test (`Class.test`) to the reason that its skip must give.
    #[serde(default)]
    skips: BTreeMap<String, String>,
    /// Test to the reason why it is not built yet: it may skip, fail or pass, and is counted as skipped.
    #[serde(default)]
    not_yet: BTreeMap<String, String>,
    /// Huge pages of 2 MiB that its tests need.
    #[serde(default)]
    huge_pages: u32,
    /// Tests that skip where the system has no huge pages, and their reasons.
    #[serde(default)]
    huge_page_skips: BTreeMap<String, String>,
}

/// Huge pages that the system keeps. Their number is restored when this is dropped.
struct HugePages {
    before: u32,
}

impl HugePages {
    const COUNT: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";

    fn count() -> Option<u32> {
        fs::read_to_string(Self::COUNT).ok()?.trim().parse().ok()
    }

    /// Makes sure that there are this many. `None` if the system has no memory for them, or lets no process ask.
    fn reserve(count: u32) -> Option<Self> {
        let reserved = Self { before: Self::count()? };
        if reserved.before < count {
            // It gives as many as it can, and reports no error.
            fs::write(Self::COUNT, count.to_string()).ok()?;
        }
        (Self::count()? >= count).then_some(reserved)
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if Self::count().is_some_and(|count| count != self.before) {
            // Whoever may reserve them may give them back.
            let _ = fs::write(Self::COUNT, self.before.to_string());
        }
    }
}

/// The result of a test, by unittest.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Outcome {
    Ok,
    Skipped(String),
    Bad(String),
}

/// The source of a suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Release {
    /// Debian's packages.
    Debian,
    /// PyPI's, built here.
    Pypi,
}

impl Release {
    fn table(self) -> &'static str {
        match self {
            Self::Debian => "conformance/pyverbs.toml",
            Self::Pypi => "conformance/pyverbs-59.toml",
        }
    }
}

/// A suite that is ready to run.
#[derive(Debug)]
struct Ready {
    device: String,
    /// Has `tests`, and `pyverbs` unless that is the system's.
    dir: PathBuf,
    /// The folder of the runs' output.
    logs: PathBuf,
}

/// Runs the suite's modules.
pub(crate) fn run(dist: &Dist, release: Release, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[packages::IPROUTE2])?;
    let path = workspace::root().join(release.table());
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let table: Table = toml::from_str(&text).with_context(|| format!("in {}", path.display()))?;
    let scratch = workspace::target().join("conformance/pyverbs");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let ready = match release {
        Release::Debian => {
            packages::ensure(&[packages::PYVERBS, packages::RDMA_CORE])?;
            unpack(&scratch.join("tests"))?;
            Ready { device: table.device, dir: scratch.clone(), logs: scratch.clone() }
        }
        Release::Pypi => {
            let dir = package::build(&scratch)?;
            Ready { device: table.device, logs: dir.clone(), dir }
        }
    };
    let modules: Vec<_> = table
        .module
        .iter()
        .filter(|module| selection.takes(&module.name, !module.all_only))
        .collect();
    ensure!(!modules.is_empty(), "no module of {} has that in its name", path.display());

    let known = Known::wanted(selection)?;
    let mut total = Tally::default();
    let started = Instant::now();
    // Whoever uses the device on this machine's network, or changes its addresses, does not matter there.
    let host = Hosts::new(Topology::OneHost, 0, &scratch)?.context("namespaces need root")?;
    for module in modules {
        total += run_module(dist, &ready, &host, known.as_ref(), module)?;
    }
    if let Some(known) = &known {
        println!("{known}");
    }
    println!("{}: {total} ({:.0} s)", release.table(), started.elapsed().as_secs_f64());
    Ok(total)
}

fn run_module(
    dist: &Dist,
    ready: &Ready,
    host: &Hosts,
    known: Option<&Known>,
    module: &Module,
) -> anyhow::Result<Tally> {
    let huge_pages = (module.huge_pages > 0).then(|| HugePages::reserve(module.huge_pages));
    let mut module = module.clone();
    if matches!(huge_pages, Some(None)) {
        module.skips.append(&mut module.huge_page_skips);
    }
    let module = &module;
    let name = &module.name;
    let log = ready.logs.join(format!("{name}.out"));
    let mut command = host.command(Side::Server, &dist.anyverbs());
    command.arg("run");
    let report = ready.logs.join(format!("{name}.findings"));
    if known.is_some() {
        fs::write(&report, "").with_context(|| report.display().to_string())?;
        command.arg("--check").arg("--check-report").arg(&report);
    }
    command.args(["--", "/usr/bin/python3", "run_tests.py", "--dev", &ready.device, "-v"]);
    command.arg(format!("tests.{name}")).current_dir(ready.dir.join("tests"));
    command.env("PYTHONPATH", &ready.dir);
    let started = Instant::now();
    let mut process = Process::start(&mut command, &log)?;
    let ended = process.wait(started + Duration::from_secs(module.timeout_s))?;
    process.stop();
    let output = process.output();
    let results = parse(&output);
    let mut tally = Tally::default();
    let mut complaints = judge(module, &results, &mut tally);
    if let Some(known) = known {
        complaints.extend(known.judge(&report, Some(name))?.err());
    }

    match ended {
        None => complaints.push(format!("ran out of time ({} s)", module.timeout_s)),
        Some(status) => {
            // unittest exits with 1 if a test failed, which a test of `not_yet` may do; never with anything else.
            let may_fail = results.iter().any(|(test, outcome)| {
                module.not_yet.contains_key(test) && matches!(outcome, Outcome::Bad(_))
            });
            if !(findings::has_done_its_work(status, known.is_some())
                || status.code() == Some(1) && (may_fail || !complaints.is_empty()))
            {
                complaints.push(format!("the run ended with {status}"));
            }
        }
    }
    match ran(&output) {
        Some(count) if count == results.len() => {}
        Some(count) => {
            complaints.push(format!("unittest counts {count} tests, {} were seen", results.len()))
        }
        None => complaints.push("unittest did not come to its end".into()),
    }
    if results.is_empty() {
        complaints.push("no test ran".into());
    }
    // A complaint about the run as a whole fails something too.
    if !complaints.is_empty() && tally.failed == 0 {
        tally.failed = 1;
    }
    println!(
        "{} {name}: {tally} ({:.1} s)",
        if complaints.is_empty() { "ok  " } else { "FAIL" },
        started.elapsed().as_secs_f64()
    );
    for complaint in &complaints {
        println!("       {complaint}");
    }
    if !complaints.is_empty() {
        println!("       all of it: {}", log.display());
    }
    Ok(tally)
}

/// Compares the results with the table; returns one complaint for each difference.
fn judge(module: &Module, results: &[(String, Outcome)], tally: &mut Tally) -> Vec<String> {
    let mut complaints = Vec::new();
    for (test, outcome) in results {
        if module.not_yet.contains_key(test) {
            tally.skipped += 1;
            if *outcome == Outcome::Ok {
                complaints.push(format!("{test} passes: take it out of `not-yet`"));
                tally.failed += 1;
                tally.skipped -= 1;
            }
            continue;
        }
        let complaint = match (outcome, module.skips.get(test)) {
            (Outcome::Ok, None) => {
                tally.passed += 1;
                continue;
            }
            // One of several reasons, where it depends on the machine.
            (Outcome::Skipped(reason), Some(expected))
                if expected.split(" | ").any(|part| reason.contains(part)) =>
            {
                tally.skipped += 1;
                continue;
            }
            (Outcome::Ok, Some(_)) => format!("{test} passes: take it out of `skips`"),
            (Outcome::Skipped(reason), Some(_)) => {
                format!("{test} skips for another reason: {reason:?}")
            }
            (Outcome::Skipped(reason), None) => format!("{test} skips: {reason:?}"),
            (Outcome::Bad(how), _) => format!("{test}: {how}"),
        };
        tally.failed += 1;
        complaints.push(complaint);
    }
    for test in module.skips.keys().chain(module.not_yet.keys()) {
        if !results.iter().any(|(ran, _)| ran == test) {
            complaints.push(format!("{test} is in the table and did not run"));
            tally.failed += 1;
        }
    }
    complaints
}

/// Reads `python -m unittest -v`: a line `name (tests.module.Class.name)`, then perhaps a line of documentation, then `
/// ... result`. A test (or a child of it) may print anything in between. A test without a result crashed.
fn parse(output: &str) -> Vec<(String, Outcome)> {
    let mut results: Vec<(String, Outcome)> = Vec::new();
    let mut open = false;
    // The list of failures at the end repeats the names.
    let end = format!("\n{}\n", "=".repeat(70));
    let list = output.split(end.as_str()).next().unwrap_or_default();
    for line in list.lines() {
        if let Some(test) = heading(line) {
            results.push((test, Outcome::Bad("no result: it crashed, or the run did".into())));
            open = true;
        }
        if !open {
            continue;
        }
        let word = line.rsplit_once("... ").map_or(line, |(_, word)| word).trim();
        let outcome = if word == "ok" {
            Outcome::Ok
        } else if let Some(reason) = word.strip_prefix("skipped ") {
            Outcome::Skipped(reason.trim_matches(['\'', '"']).to_owned())
        } else if ["FAIL", "ERROR", "expected failure", "unexpected success"].contains(&word) {
            Outcome::Bad(word.to_owned())
        } else {
            continue;
        };
        if let Some((_, last)) = results.last_mut() {
            *last = outcome;
        }
        open = false;
    }
    results
}

/// The `Class.test` of a line `test (tests.module.Class.test)`; Python before 3.11 leaves the last part out.
fn heading(line: &str) -> Option<String> {
    let (name, rest) = line.split_once(" (tests.")?;
    // Output of a test without a newline stands before the next name.
    let name = name.rsplit(|letter: char| !(letter.is_alphanumeric() || letter == '_')).next()?;
    let id = &rest[..rest.find(')')?];
    let path = id.strip_suffix(&format!(".{name}")).unwrap_or(id);
    let class = path.rsplit_once('.')?.1;
    (name.starts_with("test")).then(|| format!("{class}.{name}"))
}

/// The number of tests that unittest says it ran.
fn ran(output: &str) -> Option<usize> {
    let line =
        output.lines().rev().find(|line| line.starts_with("Ran ") && line.contains(" test"))?;
    line.split(' ').nth(1)?.parse().ok()
}

/// Copies the suite to where it can be run, without compression.
fn unpack(to: &Path) -> anyhow::Result<()> {
    let fresh: PathBuf = to.with_extension("new");
    for old in [&fresh, &to.to_owned()] {
        if old.exists() {
            fs::remove_dir_all(old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
    }
    fs::create_dir_all(&fresh).with_context(|| format!("cannot make {}", fresh.display()))?;
    let mut packed = Vec::new();
    for entry in fs::read_dir(SUITE).with_context(|| format!("cannot read {SUITE}"))? {
        let path = entry?.path();
        let Some(name) = path.file_name().filter(|_| path.is_file()) else {
            continue;
        };
        let copy = fresh.join(name);
        fs::copy(&path, &copy).with_context(|| format!("cannot copy {}", path.display()))?;
        if copy.extension().is_some_and(|extension| extension == "gz") {
            packed.push(copy);
        }
    }
    if packed.is_empty() {
        bail!("{SUITE} is not the suite of Debian 12");
    }
    quiet(Command::new("gzip").arg("-d").args(&packed))?;
    fs::rename(&fresh, to).with_context(|| format!("cannot write {}", to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = "\
test_a (tests.test_m.One.test_a)
Verify that a works ... ok
test_b (tests.test_m.One.test_b) ... skipped 'Link layer of port=1 is X , skip'
noise from a child
test_c (tests.test_m.Two.test_c)
Verify c ... printed by the test
ERROR
test_d (tests.test_m.Two.test_d) ... FAIL
test_e (tests.test_m.Two.test_e)
Something ... 
======================================================================
ERROR: test_c (tests.test_m.Two.test_c)
ok
----------------------------------------------------------------------
Ran 5 tests in 0.1s

FAILED (failures=1, errors=1, skipped=1)
";

    fn module(skips: &[(&str, &str)], not_yet: &[(&str, &str)]) -> Module {
        let map = |list: &[(&str, &str)]| {
            list.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect()
        };
        Module {
            name: "test_m".into(),
            timeout_s: 1,
            all_only: false,
            skips: map(skips),
            not_yet: map(not_yet),
            huge_pages: 0,
            huge_page_skips: BTreeMap::new(),
        }
    }

    fn results(list: &[(&str, Outcome)]) -> Vec<(String, Outcome)> {
        list.iter().map(|(test, outcome)| (test.to_string(), outcome.clone())).collect()
    }

    #[test]
    fn unittest_output() {
        let parsed = parse(OUTPUT);
        let of = |test: &str| {
            parsed
                .iter()
                .find(|(name, _)| name == test)
                .map(|(_, outcome)| outcome.clone())
                .unwrap()
        };
        assert_eq!(parsed.len(), 5);
        assert_eq!(of("One.test_a"), Outcome::Ok);
        assert_eq!(of("One.test_b"), Outcome::Skipped("Link layer of port=1 is X , skip".into()));
        assert_eq!(of("Two.test_c"), Outcome::Bad("ERROR".into()));
        assert_eq!(of("Two.test_d"), Outcome::Bad("FAIL".into()));
        assert!(matches!(of("Two.test_e"), Outcome::Bad(how) if how.contains("crashed")));
        assert_eq!(ran(OUTPUT), Some(5));
        assert_eq!(ran("Segmentation fault\n"), None);
        assert_eq!(
            heading("printed.test_a (tests.test_m.One.test_a)").as_deref(),
            Some("One.test_a")
        );
        assert_eq!(heading("test_a (tests.test_m.One)").as_deref(), Some("One.test_a"));
    }

    #[test]
    fn every_difference_from_the_table_is_a_failure() {
        let judged = |module: &Module, list: &[(&str, Outcome)]| {
            let mut tally = Tally::default();
            let complaints = judge(module, &results(list), &mut tally);
            (complaints.len(), tally)
        };
        let skip = || Outcome::Skipped("not supported".into());
        let bad = || Outcome::Bad("ERROR".into());
        let tally = |passed, failed, skipped| Tally { passed, failed, skipped };
        assert_eq!(judged(&module(&[], &[]), &[("A.t", Outcome::Ok)]), (0, tally(1, 0, 0)));
        assert_eq!(judged(&module(&[], &[]), &[("A.t", skip())]), (1, tally(0, 1, 0)));
        assert_eq!(judged(&module(&[], &[]), &[("A.t", bad())]), (1, tally(0, 1, 0)));
        let skips = module(&[("A.t", "supported")], &[]);
        assert_eq!(judged(&skips, &[("A.t", skip())]), (0, tally(0, 0, 1)));
        assert_eq!(
            judged(&skips, &[("A.t", Outcome::Skipped("else".into()))]),
            (1, tally(0, 1, 0))
        );
        assert_eq!(judged(&skips, &[("A.t", Outcome::Ok)]), (1, tally(0, 1, 0)));
        assert_eq!(judged(&skips, &[("A.t", bad())]), (1, tally(0, 1, 0)));
        assert_eq!(judged(&skips, &[]), (1, tally(0, 1, 0)));
        let not_yet = module(&[], &[("A.t", "later")]);
        assert_eq!(judged(&not_yet, &[("A.t", bad())]), (0, tally(0, 0, 1)));
        assert_eq!(judged(&not_yet, &[("A.t", Outcome::Ok)]), (1, tally(0, 1, 0)));
    }
}

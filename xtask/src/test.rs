//! `cargo xtask test`: every test, and one line at the end.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read, Write};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::conformance::{Selection, Suite, Tally, run_suite};
use crate::dist;
use crate::workspace::{cargo, root, shown, target};
use crate::{
    abi_check, book, deny, fuzz, interrupt, mutants, package, packages, report, sanitize, soak,
};

/// The extent of the run.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Options {
    /// Only what takes minutes: lints, unit tests with a third of the seeds, model checks, corpora, exported symbols
    #[arg(long, conflicts_with = "full")]
    gate: bool,
    /// Everything: whole conformance tables, fuzzing, mutants, a soak, installed packages
    #[arg(long)]
    full: bool,
}

/// The extent of a run. Each does all that the one before it does, with at least as many seeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Tier {
    /// Before a commit.
    Gate,
    /// Before a merge: `.ci/run`.
    Merge,
    Full,
}

impl Options {
    fn tier(&self) -> Tier {
        match self {
            Self { gate: true, .. } => Tier::Gate,
            Self { full: true, .. } => Tier::Full,
            _ => Tier::Merge,
        }
    }
}

/// Runs everything, goes on after a failure, and fails at the end.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    packages::ensure(&[
        packages::CC,
        packages::CXX,
        packages::CLANG,
        packages::CLANG_RT,
        packages::LIBC6_DEV,
        packages::VALGRIND,
        packages::LIBIBVERBS_DEV,
        packages::LIBRDMACM_DEV,
        packages::IPROUTE2,
        packages::IBVERBS_UTILS,
        packages::PERFTEST,
        packages::QPERF,
        packages::UCX_UTILS,
        packages::PCIUTILS,
        packages::HWLOC,
        packages::RDMACM_UTILS,
        packages::IPERF3,
        packages::FIO,
        packages::ETHTOOL,
        packages::NFTABLES,
        packages::PYVERBS,
        packages::RDMA_CORE,
        packages::TSHARK,
    ])?;
    let mut steps = Steps::default();
    steps.whole("format", || check(cargo().args(["fmt", "--all", "--check"])))?;
    let lint = ["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"];
    steps.whole("clippy", || check(cargo().args(lint)))?;
    let docs = ["doc", "-p", "anyverbs", "--no-deps", "--all-features", "--quiet"];
    steps.whole("rustdoc", || check(cargo().args(docs).env("RUSTDOCFLAGS", "-D warnings")))?;
    steps.counted("deny", deny::run_counted)?;
    let tier = options.tier();
    steps.counted("unit and integration tests", || unit_tests(tier))?;
    if tier == Tier::Gate {
        steps.whole("abi-check", abi_check_of_tests)?;
        return steps.finish();
    }
    steps.whole("fuzz targets", fuzz::compile)?;
    steps.counted("sanitize", sanitize::run_counted_all)?;
    if tier == Tier::Full {
        steps.counted("mutants", || mutants::run_counted(&mutants::Options::of_today()))?;
        steps.counted("fuzz", || fuzz::run_counted(&fuzz::Options::all(900)))?;
    }
    shipped(tier, &mut steps)?;
    steps.finish()
}

/// Suites whose programs are looked at for mistakes in a full run.
const CHECKED: [(&str, Suite); 4] = [
    ("pyverbs, checked", Suite::Pyverbs),
    ("pyverbs-59, checked", Suite::Pyverbs59),
    ("tools, checked", Suite::Tools),
    ("mpi4py, checked", Suite::Mpi4py),
];

/// The steps that need the shipped files.
fn shipped(tier: Tier, steps: &mut Steps) -> anyhow::Result<()> {
    let full = tier == Tier::Full;
    let mut built = None;
    steps.whole("dist", || {
        built = Some(dist::run(&dist::Options::default())?);
        Ok(())
    })?;
    match built {
        Some(dist) => {
            steps.whole("abi-check", || abi_check::run_all(&root(), &dist))?;
            let selection = Selection { all: full, jobs: 1, ..Selection::default() };
            if full {
                steps.whole("soak", || soak::run_on(&dist, Duration::from_secs(30 * 60)))?;
            }
            steps.counted("book", || book::run_counted(&dist, None))?;
            steps.counted("report", || report::run_counted(&dist))?;
            steps.counted("pyverbs", || run_suite(Suite::Pyverbs, &dist, &selection))?;
            steps.counted("pyverbs-59", || run_suite(Suite::Pyverbs59, &dist, &selection))?;
            steps.counted("tools", || run_suite(Suite::Tools, &dist, &selection))?;
            steps.counted("impair", || run_suite(Suite::Impair, &dist, &selection))?;
            steps.counted("survive", || run_suite(Suite::Survive, &dist, &selection))?;
            steps.counted("failover", || run_suite(Suite::Failover, &dist, &selection))?;
            steps.counted("rxe", || run_suite(Suite::Rxe, &dist, &selection))?;
            if full {
                // The same programs again: mistakes that they do not make may not be reported.
                let checked = Selection { check: true, ..selection };
                for (name, suite) in CHECKED {
                    steps.counted(name, || run_suite(suite, &dist, &checked))?;
                }
            }
        }
        // Tests that cannot run have not passed, and the number of their cases is unknown.
        None => {
            let names = [
                "abi-check",
                "book",
                "report",
                "pyverbs",
                "pyverbs-59",
                "tools",
                "impair",
                "survive",
                "failover",
                "rxe",
            ];
            let checked = CHECKED.map(|(name, _)| name);
            let of_full = ["soak"].into_iter().chain(checked).filter(|_| full);
            for name in names.into_iter().chain(of_full) {
                steps.whole(name, || bail!("there is no dist to run it on"))?;
            }
        }
    }
    if full {
        steps.counted("package", package::run_counted)?;
    } else {
        // Sizes and needs of what users get, which no other build has.
        steps.whole("package", package::make_own)?;
    }
    Ok(())
}

/// Checks the objects that the unit tests built: the version script is the same in every profile.
fn abi_check_of_tests() -> anyhow::Result<()> {
    check(cargo().args(["build", "--quiet", "-p", "anyverbs-capi", "-p", "anyverbs-rspreload"]))?;
    let built = target().join("debug");
    for object in ["libanyverbs_capi.so", "librspreload.so"] {
        abi_check::run(&root(), &built.join(object))?;
    }
    Ok(())
}

#[derive(Default)]
struct Steps {
    tally: Tally,
    failed: Vec<String>,
}

impl Steps {
    /// A step that passes or fails as one.
    fn whole(
        &mut self,
        name: &str,
        step: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.counted(name, || step().map(|()| Tally { passed: 1, ..Tally::default() }))
    }

    /// A step that counts its own cases. A step that breaks off counts as a failure; only an interruption ends the run.
    fn counted(
        &mut self,
        name: &str,
        step: impl FnOnce() -> anyhow::Result<Tally>,
    ) -> anyhow::Result<()> {
        println!("== {name}");
        let started = Instant::now();
        let result = step();
        interrupt::check()?;
        let tally = result.unwrap_or_else(|error| {
            println!("{name}: {error:#}");
            Tally { failed: 1, ..Tally::default() }
        });
        if tally.failed > 0 {
            self.failed.push(name.to_owned());
        }
        println!("== {name}: {tally} ({:.0} s)", started.elapsed().as_secs_f64());
        self.tally += tally;
        Ok(())
    }

    fn finish(self) -> anyhow::Result<()> {
        if !self.failed.is_empty() {
            println!("failed: {}", self.failed.join(", "));
        }
        println!("{}", self.tally);
        if self.tally.failed > 0 || self.tally.passed == 0 {
            bail!("the tests failed");
        }
        Ok(())
    }
}

fn check(command: &mut Command) -> anyhow::Result<()> {
    crate::workspace::succeed(command)
}

/// The workspace's own tests, and documentation's examples.
///
/// A gate runs a share of the random seeds and leaves out what its profile does. A full run has the load that takes minutes,
/// too.
fn unit_tests(tier: Tier) -> anyhow::Result<Tally> {
    let cargo = || {
        let mut command = cargo();
        match tier {
            Tier::Gate => {
                command.env(anyverbs_testing::SHARE, "3").env("NEXTEST_PROFILE", "gate");
            }
            Tier::Merge => {}
            // The profile has longer time limits.
            Tier::Full => {
                command.env("ANYVERBS_FULL", "1").env("NEXTEST_PROFILE", "full");
            }
        }
        command
    };
    if !has_nextest() {
        return run_counted(
            cargo().args(["test", "--workspace", "--no-fail-fast", "--quiet"]),
            libtest_summary,
            &mut io::stdout(),
        );
    }
    let mut tally = run_each_alone(&mut cargo(), &["--workspace"])?;
    // Nextest leaves these to cargo.
    tally += run_counted(
        cargo().args(["test", "--workspace", "--doc", "--no-fail-fast", "--quiet"]),
        libtest_summary,
        &mut io::stdout(),
    )?;
    Ok(tally)
}

/// Runs `which` tests, each in a process of its own so that one crash does not hide the others, where nextest is installed.
pub(crate) fn run_each_alone(cargo: &mut Command, which: &[&str]) -> anyhow::Result<Tally> {
    if has_nextest() {
        cargo.args(["nextest", "run", "--no-fail-fast", "--cargo-quiet", "--no-tests", "pass"]);
        return run_counted(cargo.args(which), nextest_summary, &mut io::stdout());
    }
    cargo.args(["test", "--no-fail-fast", "--quiet"]);
    run_counted(cargo.args(which), libtest_summary, &mut io::stdout())
}

fn has_nextest() -> bool {
    let mut command = cargo();
    command.args(["nextest", "--version"]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// The file that tests add a line to when they cannot run: see `anyverbs_testing::skip`.
const SKIPS: &str = "ANYVERBS_TEST_SKIPS";

/// Runs a test command, shows its output, and counts by its summary. A command that fails without a failed test (it
/// does not build, it crashed) counts as one failure. Tests that could not run count as skipped, and their reasons are
/// shown.
pub(crate) fn run_counted(
    command: &mut Command,
    summary: fn(&str) -> Tally,
    shown_on: &mut dyn Write,
) -> anyhow::Result<Tally> {
    // Both outputs in one pipe, in the order written: nextest reports on standard error.
    let (mut reader, writer) = io::pipe().context("cannot make a pipe")?;
    static RUNS: AtomicU32 = AtomicU32::new(0);
    let run = RUNS.fetch_add(1, Ordering::Relaxed);
    let skips = std::env::temp_dir().join(format!("anyverbs-skips-{}-{run}", std::process::id()));
    fs::write(&skips, "").with_context(|| format!("cannot write {}", skips.display()))?;
    command.env(SKIPS, &skips);
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer);
    let mut child = command.spawn().with_context(|| format!("cannot run {}", shown(command)))?;
    // The command holds the writing ends; the pipe ends when the child's do.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let mut output = Vec::new();
    let mut part = [0; 4096];
    loop {
        match reader.read(&mut part).context("cannot read the tests' output")? {
            0 => break,
            count => {
                output.extend_from_slice(&part[..count]);
                shown_on
                    .write_all(&part[..count])
                    .and_then(|()| shown_on.flush())
                    .context("cannot show the tests' output")?;
            }
        }
    }
    let status = child.wait().context("cannot wait for the tests")?;
    let mut tally = summary(&String::from_utf8_lossy(&output));
    if !status.success() && tally.failed == 0 {
        println!("{} ended with {status}", shown(command));
        tally.failed = 1;
    }
    let text = fs::read_to_string(&skips).context("cannot read which tests were skipped")?;
    fs::remove_file(&skips).context("cannot remove the list of skipped tests")?;
    let skipped = skipped_tests(&text);
    for (test, reason) in &skipped {
        writeln!(shown_on, "skip {test}: {reason}").context("cannot show the skipped tests")?;
    }
    // A test that skips returns, and its runner counts it as passed.
    tally.passed = tally.passed.checked_sub(skipped.len()).with_context(|| {
        format!("{} tests skipped, but only {} passed", skipped.len(), tally.passed)
    })?;
    tally.skipped += skipped.len();
    Ok(tally)
}

/// Each test that could not run, and why.
fn skipped_tests(text: &str) -> BTreeMap<&str, &str> {
    text.lines().filter_map(|line| line.split_once('\t')).collect()
}

/// Sums `test result: ok. 5 passed; 0 failed; 1 ignored; ...`, one line for each executable.
pub(crate) fn libtest_summary(output: &str) -> Tally {
    let mut tally = Tally::default();
    for line in output.lines().filter(|line| line.contains("test result: ")) {
        tally.passed += number_before(line, " passed");
        tally.failed += number_before(line, " failed");
        tally.skipped += number_before(line, " ignored");
    }
    tally
}

/// Reads `Summary [ 0.1s] 29 tests run: 28 passed, 1 failed, 1 timed out, 2 skipped`.
fn nextest_summary(output: &str) -> Tally {
    let mut tally = Tally::default();
    for line in output.lines().filter(|line| line.contains("Summary [")) {
        tally.passed += number_before(line, " passed");
        tally.failed += number_before(line, " failed")
            + number_before(line, " timed out")
            + number_before(line, " exec failed");
        tally.skipped += number_before(line, " skipped");
    }
    tally
}

/// The number that stands before a word; 0 if the word is not there.
fn number_before(line: &str, word: &str) -> usize {
    let Some((before, _)) = line.split_once(word) else {
        return 0;
    };
    let digits = before.trim_end_matches(['\u{1b}', '[', 'm']);
    let start = digits.rfind(|letter: char| !letter.is_ascii_digit()).map_or(0, |at| at + 1);
    digits[start..].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_has_one_tier() {
        use clap::Parser;
        #[derive(Parser)]
        struct Args {
            #[command(flatten)]
            options: Options,
        }
        let tier = |words: &[&str]| {
            let words = ["test"].iter().chain(words);
            Args::try_parse_from(words).map(|args| args.options.tier())
        };
        assert_eq!(tier(&[]).unwrap(), Tier::Merge);
        assert_eq!(tier(&["--gate"]).unwrap(), Tier::Gate);
        assert_eq!(tier(&["--full"]).unwrap(), Tier::Full);
        assert!(tier(&["--gate", "--full"]).is_err());
    }

    #[test]
    fn summaries_are_read() {
        let libtest = "\ntest result: ok. 5 passed; 0 failed; 1 ignored; 0 measured\ntest result: FAILED. 2 passed; 3 failed; 0 ignored\n";
        assert_eq!(libtest_summary(libtest), Tally { passed: 7, failed: 3, skipped: 1 });
        let nextest = "     Summary [   0.031s] 9 tests run: 6 passed (1 slow), 2 failed, 1 timed out, 4 skipped\n";
        assert_eq!(nextest_summary(nextest), Tally { passed: 6, failed: 3, skipped: 4 });
        assert_eq!(nextest_summary("error: could not compile"), Tally::default());
    }

    #[test]
    fn a_command_that_fails_without_a_test_is_a_failure() {
        let tally = run_counted(
            Command::new("sh").args(["-c", "echo oops; exit 101"]),
            libtest_summary,
            &mut io::sink(),
        )
        .unwrap();
        assert_eq!(tally, Tally { failed: 1, ..Tally::default() });
        let tally = run_counted(
            Command::new("sh").args(["-c", "echo 'test result: ok. 2 passed; 0 failed;'"]),
            libtest_summary,
            &mut io::sink(),
        )
        .unwrap();
        assert_eq!(tally, Tally { passed: 2, ..Tally::default() });
    }

    #[test]
    fn a_test_that_cannot_run_counts_as_skipped() {
        let mut shown = Vec::new();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["test::tests::roles::", "--nocapture"]).env(ROLE, "1");
        let tally = run_counted(&mut command, libtest_summary, &mut shown).unwrap();
        let shown = String::from_utf8(shown).unwrap();
        assert_eq!(tally, Tally { passed: 1, skipped: 2, failed: 0 }, "{shown}");
        assert!(shown.contains("test::tests::roles::skips: no such thing here\n"), "{shown}");
        assert!(shown.contains("test::tests::roles::skips_twice: the second\n"), "{shown}");
    }

    /// Set where the tests of `roles` are run by another test.
    const ROLE: &str = "XTASK_TEST_ROLE";

    /// The child of `a_test_that_cannot_run_counts_as_skipped`.
    mod roles {
        fn asked() -> bool {
            std::env::var_os(super::ROLE).is_some()
        }

        #[test]
        fn runs() {}

        #[test]
        fn skips() {
            if asked() {
                anyverbs_testing::skip("no such\nthing here");
            }
        }

        #[test]
        fn skips_twice() {
            if asked() {
                anyverbs_testing::skip("the first");
                anyverbs_testing::skip("the second");
            }
        }
    }
}

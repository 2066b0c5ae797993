//! `cargo xtask mutants`: small defects put into the code, one at a time. A test has to notice each of them.
//!
//! The tool is `cargo-mutants`, which this installs below `target`. All mutants together take days. So a run takes a part of them:
//! those of some files, or a share of all. `cargo xtask test --full` takes another share each day. With `--together`, one build
//! holds all mutants.

mod build;
mod choice;
mod together;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use crate::conformance::Tally;
use crate::interrupt;
use crate::workspace::{cargo, root, shown, succeed, target};

const VERSION: &str = "27.1.0";

/// Share of the mutants, in percent, that tests must notice.
const WANTED: usize = 95;

/// The mutated code, and the packages whose tests have to notice.
const AREAS: [(&str, &[&str]); 3] = [
    ("crates/proto/src/", &["anyverbs-proto", "anyverbs-sim"]),
    ("crates/keys/src/", &["anyverbs-keys", "anyverbs-proto", "anyverbs-sim"]),
    ("crates/net/src/", &["anyverbs-net"]),
];

/// Shares of all mutants: one takes about two hours.
const SHARES: u64 = 60;

/// The mutants that no test can or needs to notice.
const EXPECTED: &str = "conformance/mutants.toml";

/// The mutants to run.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Options {
    /// Mutants of this file, or of files that this pattern matches; may be given several times
    #[arg(long)]
    file: Vec<String>,
    /// A share of them, K/N with K from 0 on
    #[arg(long)]
    shard: Option<String>,
    /// Only name the mutants
    #[arg(long)]
    list: bool,
    /// Longest time of the tests of one mutant, in seconds
    #[arg(long, default_value_t = 600)]
    timeout: u32,
    /// All mutants in one build: a mutant takes a run of the tests that reach it, and goes on where the last one ended
    #[arg(long)]
    together: bool,
    /// With --together: every K-th mutant of each part
    #[arg(long, default_value_t = 1)]
    every: usize,
    /// With --every: the first of them, from 0 on, for another sample
    #[arg(long, default_value_t = 0)]
    first: usize,
    /// With --together: also those that survived before
    #[arg(long)]
    again: bool,
    /// With --together: end after this time
    #[arg(long)]
    minutes: Option<u64>,
    /// With --together: seconds after which no further test is asked to notice a mutant
    #[arg(long, default_value_t = 60)]
    patience: u64,
}

impl Options {
    /// The share of today.
    pub(crate) fn of_today() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let share = since.as_secs() / (24 * 60 * 60) % SHARES;
        Self { shard: Some(format!("{share}/{SHARES}")), timeout: 600, ..Self::default() }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Expected {
    /// Pattern of mutants that are not made, to the reason.
    #[serde(default)]
    not_made: BTreeMap<String, String>,
    /// Mutant, as [`name`] says it, to the reason why it survives.
    survives: BTreeMap<String, String>,
}

/// Runs the mutants, and fails where too many survive or one does that the list does not have.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    interrupt::catch();
    let tally = run_counted(options)?;
    println!("{tally}");
    ensure!(tally.failed == 0, "tests did not notice {} mutants", tally.failed);
    Ok(())
}

/// The same, counted.
pub(crate) fn run_counted(options: &Options) -> anyhow::Result<Tally> {
    let tool = install()?;
    let path = root().join(EXPECTED);
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let expected: Expected = toml::from_str(&text).with_context(|| format!("in {EXPECTED}"))?;
    if options.together {
        return together::run(&tool, options, &expected, &AREAS.map(|(area, _)| area));
    }
    let mut found = Found::default();
    for (area, tests) in AREAS {
        let files = options.file.iter().filter(|file| file.starts_with(area)).cloned();
        let files: Vec<_> = files.collect();
        if !options.file.is_empty() && files.is_empty() {
            continue;
        }
        let files = if files.is_empty() { vec![format!("{area}**/*.rs")] } else { files };
        found.add(mutate(&tool, options, area, &files, tests, &expected)?);
    }
    if options.list {
        return Ok(Tally::default());
    }
    Ok(found.judge(&expected))
}

/// The tool, which is built the first time.
fn install() -> anyhow::Result<PathBuf> {
    let dir = target().join(format!("cargo-mutants-{VERSION}"));
    let tool = dir.join("bin/cargo-mutants");
    if !tool.exists() {
        let mut install = cargo();
        // Its own speed does not matter, and it builds in a third of the time.
        install.args(["install", "cargo-mutants", "--debug", "--locked", "--version", VERSION]);
        install.arg("--root");
        succeed(install.arg(&dir))?;
    }
    Ok(tool)
}

/// Runs the mutants of some files.
fn mutate(
    tool: &Path,
    options: &Options,
    area: &str,
    files: &[String],
    tests: &[&str],
    expected: &Expected,
) -> anyhow::Result<Found> {
    let name = area.replace('/', "-");
    let out = target().join("mutants").join(name.trim_end_matches('-'));
    fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
    let mut command = Command::new(tool);
    command.arg("mutants").current_dir(root()).env_remove("CARGO_TARGET_DIR");
    command.env("NEXTEST_PROFILE", "mutants");
    command.args(["--test-tool", "nextest", "--no-shuffle", "--colors", "never"]);
    command.args(["--timeout", &options.timeout.to_string(), "--build-timeout", "1200"]);
    command.args(["--test-package", &tests.join(","), "--output"]).arg(&out);
    for file in files {
        command.args(["--file", file]);
    }
    for pattern in expected.not_made.keys() {
        command.args(["--exclude-re", pattern]);
    }
    if let Some(shard) = &options.shard {
        // By default a shard is a run of neighbours: all mutants of a few files.
        command.args(["--sharding", "round-robin", "--shard", shard]);
    }
    if options.list {
        succeed(command.arg("--list"))?;
        return Ok(Found::default());
    }
    // 0: all were noticed, 2: some survived, 3: some ran out of time.
    let status = command.status().with_context(|| format!("cannot run {}", shown(&command)))?;
    interrupt::check()?;
    if !matches!(status.code(), Some(0 | 2 | 3)) {
        bail!("{} ended with {status}", shown(&command));
    }
    Found::read(&out.join("mutants.out"))
}

/// The results of the mutants.
#[derive(Debug, Default)]
struct Found {
    noticed: usize,
    survived: Vec<String>,
}

impl Found {
    fn read(dir: &Path) -> anyhow::Result<Self> {
        let lines = |name: &str| -> anyhow::Result<Vec<String>> {
            let path = dir.join(name);
            let text = fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            Ok(text.lines().map(str::to_owned).collect())
        };
        // A mutant that hangs is noticed: a test has a time limit.
        let noticed = lines("caught.txt")?.len() + lines("timeout.txt")?.len();
        Ok(Self { noticed, survived: lines("missed.txt")? })
    }

    fn add(&mut self, other: Self) {
        self.noticed += other.noticed;
        self.survived.extend(other.survived);
    }

    /// Counts noticed mutants as passed, those that may survive as skipped, and other survivors as failed. Too many
    /// survivors are a failure, with reasons or without.
    fn judge(&self, expected: &Expected) -> Tally {
        let mut tally = Tally { passed: self.noticed, ..Tally::default() };
        for mutant in &self.survived {
            match expected.survives.get(&name(mutant)) {
                Some(reason) => {
                    println!("skip {mutant}: {reason}");
                    tally.skipped += 1;
                }
                None => {
                    println!("FAIL {mutant}: no test notices");
                    tally.failed += 1;
                }
            }
        }
        let all = self.noticed + self.survived.len();
        println!("{} of {all} mutants were noticed", self.noticed);
        if tally.failed == 0 && self.noticed * 100 < all * WANTED {
            println!("FAIL fewer than {WANTED} of 100 were noticed");
            tally.failed = 1;
        }
        tally
    }
}

/// A mutant without its place in the file: `crates/net/src/x.rs: replace f with ()`.
fn name(mutant: &str) -> String {
    let mut parts = mutant.splitn(4, ':');
    match [parts.next(), parts.next(), parts.next(), parts.next()] {
        [Some(file), Some(_), Some(_), Some(what)] => format!("{file}:{what}"),
        _ => mutant.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_are_counted_and_those_that_may_survive_are_known() {
        let dir = std::env::temp_dir().join(format!("anyverbs-mutants-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let known = "crates/proto/src/a.rs:7:9: replace a::b -> bool with true";
        let file =
            |name: &str, lines: &[&str]| fs::write(dir.join(name), lines.join("\n")).unwrap();
        let caught: Vec<String> =
            (0..40).map(|n| format!("crates/proto/src/a.rs:{n}:1: x")).collect();
        file("caught.txt", &caught.iter().map(String::as_str).collect::<Vec<_>>());
        file("timeout.txt", &["crates/proto/src/a.rs:90:1: y"]);
        file("missed.txt", &[known]);
        let expected = |mutant: &str| Expected {
            survives: BTreeMap::from([(name(mutant), "why".to_owned())]),
            ..Expected::default()
        };
        let found = Found::read(&dir).unwrap();
        assert_eq!(found.judge(&expected(known)), Tally { passed: 41, failed: 0, skipped: 1 });
        assert_eq!(
            found.judge(&expected("crates/proto/src/a.rs:7:9: replace a::b -> bool with false")),
            Tally { passed: 41, failed: 1, skipped: 0 }
        );
        // One of three is too many, though it has a reason.
        file("caught.txt", &["crates/proto/src/a.rs:1:1: x"]);
        let found = Found::read(&dir).unwrap();
        assert_eq!(found.judge(&expected(known)), Tally { passed: 2, failed: 1, skipped: 1 });
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_projects_list_is_sound() {
        let expected: Expected =
            toml::from_str(&fs::read_to_string(root().join(EXPECTED)).unwrap()).unwrap();
        for (mutant, reason) in &expected.survives {
            let (file, _) = mutant.split_once(": ").unwrap();
            assert!(root().join(file).exists(), "{mutant}");
            assert!(!reason.is_empty(), "{mutant}");
        }
        assert!(expected.not_made.values().all(|reason| !reason.is_empty()));
    }

    #[test]
    fn the_place_is_not_part_of_a_name() {
        let mutant = "crates/net/src/x.rs:12:5: replace X::f -> u8 with 1";
        assert_eq!(name(mutant), "crates/net/src/x.rs: replace X::f -> u8 with 1");
    }
}

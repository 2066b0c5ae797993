//! `cargo xtask mutants --together`: one build holds all mutants, and the environment chooses one.
//!
//! First each test runs alone, and every choice that it reaches is noted. Then each mutant runs only the tests that reach it,
//! the quickest first, until one fails. What was found out stays in a file, so that a run goes on where the last one ended.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::build::{Binary, Tree, test};
use super::choice::{Id, Mutant};
use super::{Expected, Options, WANTED, name};
use crate::conformance::Tally;
use crate::interrupt;
use crate::workspace::{root, shown, target};

/// Parts of the code with figures of their own, in the order in which they are tried.
const PARTS: [(&str, &str); 7] = [
    ("keys", "crates/keys/"),
    ("net/host", "crates/net/src/host"),
    ("proto/qp", "crates/proto/src/qp"),
    ("proto/cm", "crates/proto/src/cm"),
    ("proto/wire", "crates/proto/src/wire"),
    ("proto, the rest", "crates/proto/"),
    ("net, the rest", "crates/net/"),
];

const PACKAGES: [&str; 4] = ["anyverbs-keys", "anyverbs-net", "anyverbs-proto", "anyverbs-sim"];

/// Tests that take longer are not asked: others that reach the same are quicker.
const LONG: Duration = Duration::from_secs(20);

/// The time that a test has beyond four times of what it took.
const GRACE: Duration = Duration::from_secs(5);

/// A test that noticed the last mutants is asked first, unless it takes longer.
const QUICK: Duration = Duration::from_millis(500);

#[derive(Serialize, Deserialize)]
struct Test {
    binary: usize,
    name: String,
    took: Duration,
    reaches: BTreeSet<Id>,
}

/// The mutants that tests reach, and the binaries of which that is known.
#[derive(Serialize, Deserialize)]
struct Known {
    binaries: Vec<String>,
    tests: Vec<Test>,
}

/// The fate of a mutant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Noticed,
    Survived,
    /// No test reaches it.
    Unreached,
}

impl Fate {
    const ALL: [(Self, &str); 3] =
        [(Self::Noticed, "noticed"), (Self::Survived, "survived"), (Self::Unreached, "unreached")];

    fn word(self) -> &'static str {
        Self::ALL.iter().find(|(fate, _)| *fate == self).map_or("", |(_, word)| word)
    }

    fn of(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, of_fate)| *of_fate == word).map(|(fate, _)| *fate)
    }
}

/// Figures of a part.
#[derive(Default)]
struct Figures {
    noticed: usize,
    survived: Vec<String>,
    explained: usize,
    not_built: usize,
    constant: usize,
    not_tried: usize,
}

/// Runs the mutants that are wanted, and counts them.
pub(super) fn run(
    tool: &Path,
    options: &Options,
    expected: &Expected,
    areas: &[&str],
) -> anyhow::Result<Tally> {
    let dir = target().join("mutants-together");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut mutants = Vec::new();
    for area in areas {
        mutants.extend(list(tool, area, expected)?);
    }
    println!("{} mutants", mutants.len());
    let mut tree = Tree::new(&dir.join("tree"), mutants)?;
    let built = tree.build(&PACKAGES)?;
    println!("{} mutants in one build, {} in constants", built.chosen.len(), built.constant.len());
    let mut results = Results::open(&dir.join("results.txt"))?;
    let keys = keys(tree.mutants())?;
    let picked = pick(tree.mutants(), options);
    let todo: Vec<Id> = picked
        .iter()
        .copied()
        .filter(|id| built.chosen.contains(id))
        .filter(|id| match results.fates.get(&keys[*id as usize - 1]) {
            None => true,
            Some(fate) => options.again && *fate != Fate::Noticed,
        })
        .collect();
    println!("{} of {} picked mutants are to be tried", todo.len(), picked.len());
    if !todo.is_empty() {
        let patience = Duration::from_secs(options.patience);
        let mut judge = Judge::new(&built.binaries, &dir, patience)?;
        let end = options.minutes.map(|minutes| Instant::now() + Duration::from_secs(minutes * 60));
        for (n, id) in todo.iter().enumerate() {
            interrupt::check()?;
            if end.is_some_and(|end| Instant::now() >= end) {
                println!("the time is over: {} mutants are left", todo.len() - n);
                break;
            }
            let mutant = &tree.mutants()[*id as usize - 1];
            let (fate, by) = judge.fate(*id, mutant)?;
            let what = &mutant.name;
            println!(
                "{} {what}{}",
                fate.word(),
                by.map(|by| format!(": {by}")).unwrap_or_default()
            );
            results.add(&keys[*id as usize - 1], fate)?;
        }
    }
    let fate = |id: Id| results.fates.get(&keys[id as usize - 1]).copied();
    let mut figures: BTreeMap<usize, Figures> = BTreeMap::new();
    for id in picked {
        let mutant = &tree.mutants()[id as usize - 1];
        let part = figures.entry(part(mutant)).or_default();
        match fate(id) {
            _ if built.constant.contains(&id) => part.constant += 1,
            _ if !built.chosen.contains(&id) => part.not_built += 1,
            None => part.not_tried += 1,
            Some(Fate::Noticed) => part.noticed += 1,
            Some(_) if expected.survives.contains_key(&name(&mutant.name)) => part.explained += 1,
            Some(fate) => part.survived.push(format!("{} ({})", mutant.name, fate.word())),
        }
    }
    Ok(judge_all(&figures))
}

/// The mutants of an area.
fn list(tool: &Path, area: &str, expected: &Expected) -> anyhow::Result<Vec<Mutant>> {
    let mut command = Command::new(tool);
    command.arg("mutants").current_dir(root()).env_remove("CARGO_TARGET_DIR");
    command.args(["--list", "--json", "--file", &format!("{area}**/*.rs")]);
    for pattern in expected.not_made.keys() {
        command.args(["--exclude-re", pattern]);
    }
    let output = command.output().with_context(|| format!("cannot run {}", shown(&command)))?;
    ensure!(output.status.success(), "{} failed", shown(&command));
    let mutants: Vec<Mutant> = serde_json::from_slice(&output.stdout)?;
    // The fields of a struct are left out by the tool's own patterns only from its next version on.
    Ok(mutants)
}

fn part(mutant: &Mutant) -> usize {
    PARTS.iter().position(|(_, begin)| mutant.file.starts_with(begin)).unwrap_or(PARTS.len() - 1)
}

/// The mutants to try: part after part, and evenly spread over each.
fn pick(mutants: &[Mutant], options: &Options) -> Vec<Id> {
    let mut parts: Vec<Vec<Id>> = vec![Vec::new(); PARTS.len()];
    for (id, mutant) in (1..).zip(mutants) {
        let matches = |begin: &String| mutant.file.starts_with(begin.as_str());
        if options.file.is_empty() || options.file.iter().any(matches) {
            parts[part(mutant)].push(id);
        }
    }
    let every = options.every.max(1);
    let sample = |ids: Vec<Id>| ids.into_iter().skip(options.first).step_by(every);
    parts.into_iter().flat_map(sample).collect()
}

/// The key of a result: the mutant, and the digest of its file without the tests at the end.
fn keys(mutants: &[Mutant]) -> anyhow::Result<Vec<String>> {
    let mut digests: HashMap<&str, String> = HashMap::new();
    let mut keys = Vec::new();
    for mutant in mutants {
        if !digests.contains_key(mutant.file.as_str()) {
            let text = fs::read_to_string(root().join(&mutant.file))?;
            let code = text.split("\n#[cfg(test)]\nmod tests").next().unwrap_or_default();
            let digest = Sha256::digest(code.as_bytes());
            let short = digest.iter().take(4).map(|byte| format!("{byte:02x}")).collect();
            digests.insert(&mutant.file, short);
        }
        keys.push(format!("{} {}", digests[mutant.file.as_str()], mutant.name.replace('\n', " ")));
    }
    Ok(keys)
}

/// The fates that are known, in a file: a word, and the mutant.
struct Results {
    fates: HashMap<String, Fate>,
    file: File,
}

impl Results {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let known = fs::read_to_string(path).unwrap_or_default();
        let fates = known
            .lines()
            .filter_map(|line| line.split_once(' '))
            .filter_map(|(word, key)| Some((key.to_owned(), Fate::of(word)?)))
            .collect();
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.with_context(|| format!("cannot open {}", path.display()))?;
        Ok(Self { fates, file })
    }

    fn add(&mut self, key: &str, fate: Fate) -> anyhow::Result<()> {
        writeln!(self.file, "{} {key}", fate.word())?;
        self.fates.insert(key.to_owned(), fate);
        Ok(())
    }
}

/// Runs tests with mutants.
struct Judge<'a> {
    binaries: &'a [Binary],
    tests: Vec<Test>,
    /// Tests that have noticed a mutant, the last one first: the next mutant is likely to be beside it.
    keen: Vec<usize>,
    /// The longest time that is spent on one mutant.
    patience: Duration,
}

impl<'a> Judge<'a> {
    /// Runs each test without a mutant, and notes what it reaches, unless that is known.
    fn new(binaries: &'a [Binary], dir: &Path, patience: Duration) -> anyhow::Result<Self> {
        let path = dir.join("reached.json");
        let of = binaries.iter().map(stamp).collect::<anyhow::Result<Vec<_>>>()?;
        let known: Option<Known> =
            fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let known = match known.filter(|known| known.binaries == of) {
            Some(known) => known,
            None => Known { binaries: of, tests: note(binaries, dir)? },
        };
        fs::write(&path, serde_json::to_vec(&known)?)?;
        Ok(Self { binaries, tests: known.tests, keen: Vec::new(), patience })
    }

    /// The fate of a mutant, and the test that noticed it.
    fn fate(&mut self, id: Id, mutant: &Mutant) -> anyhow::Result<(Fate, Option<String>)> {
        let mut order: Vec<usize> =
            (0..self.tests.len()).filter(|n| self.tests[*n].reaches.contains(&id)).collect();
        if order.is_empty() {
            return Ok((Fate::Unreached, None));
        }
        let place = |n: &usize| self.keen.iter().position(|keen| keen == n).unwrap_or(usize::MAX);
        // The tests of its own crate know it best.
        let is_foreign = |n: &usize| {
            let package = &self.binaries[self.tests[*n].binary].package;
            !mutant.file.starts_with(&format!("crates/{package}/"))
        };
        order.sort_by_key(|n| (place(n), is_foreign(n), self.tests[*n].took));
        let begin = Instant::now();
        for n in order {
            interrupt::check()?;
            if begin.elapsed() > self.patience {
                break;
            }
            let Test { binary, name, took, .. } = &self.tests[n];
            let mut command = test(&self.binaries[*binary], name);
            command.env("ANYVERBS_MUTANT", id.to_string());
            if !passes(command, *took * 4 + GRACE)? {
                let by = name.clone();
                self.keen.retain(|keen| *keen != n);
                if *took < QUICK {
                    self.keen.insert(0, n);
                    self.keen.truncate(5);
                }
                return Ok((Fate::Noticed, Some(by)));
            }
        }
        Ok((Fate::Survived, None))
    }
}

/// Runs each test without a mutant, and notes what it reaches.
fn note(binaries: &[Binary], dir: &Path) -> anyhow::Result<Vec<Test>> {
    let notes = dir.join("notes");
    let (mut tests, mut left_out) = (Vec::new(), Vec::new());
    for (binary, of) in binaries.iter().enumerate() {
        for name in names(of)? {
            interrupt::check()?;
            let _ = fs::remove_file(&notes);
            let mut command = test(of, &name);
            command.env("ANYVERBS_MUTANT_NOTES", &notes);
            let begin = Instant::now();
            let passed = passes(command, LONG)?;
            let (took, reaches) = (begin.elapsed(), read_notes(&notes));
            if passed {
                tests.push(Test { binary, name, took, reaches });
            } else {
                left_out.push(format!("{}: {name} ({took:.1?})", of.package));
            }
        }
    }
    println!("{} tests; left out, since they fail or take too long:", tests.len());
    left_out.iter().for_each(|name| println!("  {name}"));
    ensure!(!tests.is_empty(), "no test passes without a mutant");
    Ok(tests)
}

/// A binary, and when it was built.
fn stamp(binary: &Binary) -> anyhow::Result<String> {
    let modified = fs::metadata(&binary.path)?.modified()?;
    Ok(format!("{} {modified:?}", binary.path.display()))
}

/// The names of a binary's tests.
fn names(binary: &Binary) -> anyhow::Result<Vec<String>> {
    let output = Command::new(&binary.path)
        .args(["--list", "--format", "terse"])
        .current_dir(&binary.dir)
        .output()
        .with_context(|| format!("cannot run {}", binary.path.display()))?;
    let lines = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(lines.lines().filter_map(|line| line.strip_suffix(": test")).map(str::to_owned).collect())
}

/// Runs a test with a limit of time and of memory. One that runs out of either has failed.
fn passes(mut command: Command, limit: Duration) -> anyhow::Result<bool> {
    const MEMORY: libc::rlim_t = 8 << 30;
    // SAFETY: setrlimit(2) is async-signal-safe, and the value is a live one.
    unsafe {
        command.process_group(0).pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: MEMORY, rlim_max: MEMORY };
            libc::setrlimit(libc::RLIMIT_AS, &raw const limit);
            Ok(())
        });
    }
    let begin = Instant::now();
    let mut child = command.spawn().with_context(|| format!("cannot run {}", shown(&command)))?;
    let group = child.id() as i32;
    let mut pause = Duration::from_micros(500);
    let passed = loop {
        if let Some(status) = child.try_wait()? {
            break status.success();
        }
        if begin.elapsed() > limit {
            break false;
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(Duration::from_millis(20));
    };
    // SAFETY: the test's own group of processes, which has the number of the child that is not waited for or has left
    // children behind.
    unsafe { libc::kill(-group, libc::SIGKILL) };
    let _ = child.wait();
    Ok(passed)
}

fn read_notes(path: &PathBuf) -> BTreeSet<Id> {
    let bytes = fs::read(path).unwrap_or_default();
    bytes.chunks_exact(4).filter_map(|id| Some(Id::from_le_bytes(id.try_into().ok()?))).collect()
}

/// Prints the figures. Passed are the noticed ones, skipped those that have a reason to survive.
fn judge_all(figures: &BTreeMap<usize, Figures>) -> Tally {
    let mut tally = Tally::default();
    for figures in figures.values() {
        figures.survived.iter().for_each(|name| println!("FAIL {name}"));
    }
    for (part, figures) in figures {
        let Figures { noticed, survived, explained, .. } = figures;
        let tried = noticed + survived.len() + explained;
        println!(
            "{}: {noticed} of {tried} noticed, {explained} explained, {} open; {} do not compile, {} in constants, {} not tried",
            PARTS[*part].0,
            survived.len(),
            figures.not_built,
            figures.constant,
            figures.not_tried,
        );
        tally.passed += noticed;
        tally.skipped += explained;
        tally.failed += survived.len();
    }
    let (noticed, open) = (tally.passed, tally.failed);
    println!("{noticed} noticed, {} explained, {open} open", tally.skipped);
    if noticed * 100 >= (noticed + open) * WANTED {
        // The rest is work for tests, and no reason to stop.
        tally.failed = 0;
    }
    tally
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::choice::{Genre, LineColumn, Place};

    fn mutant(file: &str) -> Mutant {
        let at = LineColumn { line: 1, column: 1 };
        Mutant {
            name: format!("{file}:1:1: replace x"),
            file: file.to_owned(),
            genre: Genre::FnValue,
            replacement: String::new(),
            span: Place { start: at, end: at },
        }
    }

    #[test]
    fn each_part_gives_an_even_share_in_order() {
        let files = ["crates/net/src/udp.rs", "crates/keys/src/lib.rs", "crates/net/src/host.rs"];
        let mutants: Vec<_> = files.iter().flat_map(|file| vec![mutant(file); 5]).collect();
        let options = |every| Options { every, ..Options::default() };
        assert_eq!(pick(&mutants, &options(2)), [6, 8, 10, 11, 13, 15, 1, 3, 5]);
        let other = Options { first: 1, ..options(2) };
        assert_eq!(pick(&mutants, &other), [7, 9, 12, 14, 2, 4]);
        let one = Options { file: vec![files[1].to_owned()], ..options(1) };
        assert_eq!(pick(&mutants, &one), [6, 7, 8, 9, 10]);
    }

    #[test]
    fn what_was_found_out_stays() {
        let path = std::env::temp_dir().join(format!("anyverbs-results-{}", std::process::id()));
        let mut results = Results::open(&path).unwrap();
        results.add("0123 a.rs:1:2: replace f with ()", Fate::Survived).unwrap();
        results.add("0123 a.rs:2:2: replace g with ()", Fate::Unreached).unwrap();
        results.add("0123 a.rs:1:2: replace f with ()", Fate::Noticed).unwrap();
        let again = Results::open(&path).unwrap();
        assert_eq!(again.fates["0123 a.rs:1:2: replace f with ()"], Fate::Noticed);
        assert_eq!(again.fates["0123 a.rs:2:2: replace g with ()"], Fate::Unreached);
        fs::remove_file(&path).unwrap();
    }

    #[test]
    fn a_test_that_hangs_or_fails_has_noticed() {
        let run = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]);
            passes(command, Duration::from_millis(500)).unwrap()
        };
        assert!(run("true"));
        assert!(!run("false"));
        assert!(!run("sleep 100"));
    }
}

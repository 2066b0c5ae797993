//! A copy of the workspace that holds all mutants, and what it is built into.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::choice::{self, Id, Mutant, Mutated};
use crate::workspace::{cargo, root, shown};

/// Attempts to compile, of which each leaves out what did not.
const ATTEMPTS: usize = 60;

/// In the tree, the names of the mutants and constant functions that are left out.
const LEFT_OUT: &str = "left-out.txt";

/// In the tree, the crates with choices begin so: what a mutant makes of them is no matter of lints.
const ALLOW: &str = "#![allow(warnings, clippy::all, arithmetic_overflow, unconditional_panic, \
                     overflowing_literals, unconditional_recursion)] ";

/// The room of a crate that knows the number. In a run that notes, each choice writes its own, once.
const ROOM: &str = r#"
#[doc(hidden)]
pub(crate) mod __mutants {
    use std::io::Write;
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

    const UNKNOWN: u32 = u32::MAX;
    const NOTING: u32 = u32::MAX - 1;
    static CHOSEN: AtomicU32 = AtomicU32::new(UNKNOWN);
    static NOTED: [AtomicBool; COUNT] = [const { AtomicBool::new(false) }; COUNT];

    #[inline]
    pub(crate) fn is(id: u32) -> bool {
        let mut chosen = CHOSEN.load(Relaxed);
        if chosen >= NOTING {
            chosen = slow(chosen, id);
        }
        chosen == id
    }

    #[cold]
    fn slow(mut chosen: u32, id: u32) -> u32 {
        if chosen == UNKNOWN {
            let named = std::env::var("ANYVERBS_MUTANT");
            chosen = if std::env::var_os("ANYVERBS_MUTANT_NOTES").is_some() {
                NOTING
            } else {
                named.ok().and_then(|id| id.parse().ok()).unwrap_or(0)
            };
            CHOSEN.store(chosen, Relaxed);
        }
        if chosen == NOTING
            && !NOTED[id as usize].swap(true, Relaxed)
            && let Some(path) = std::env::var_os("ANYVERBS_MUTANT_NOTES")
            && let Ok(mut file) = std::fs::OpenOptions::new().append(true).create(true).open(path)
        {
            let _ = file.write_all(&id.to_le_bytes());
        }
        chosen
    }
}
"#;

/// A test binary.
#[derive(Debug, Clone)]
pub(super) struct Binary {
    pub(super) path: PathBuf,
    /// The folder of its package.
    pub(super) dir: PathBuf,
    pub(super) package: String,
}

/// All mutants in one build.
#[derive(Debug, Default)]
pub(super) struct Built {
    pub(super) binaries: Vec<Binary>,
    /// Mutants that a number chooses.
    pub(super) chosen: BTreeSet<Id>,
    pub(super) constant: BTreeSet<Id>,
}

/// The copy of the sources, below `target`.
pub(super) struct Tree {
    dir: PathBuf,
    /// Crates that have mutants.
    mutated: Vec<String>,
    mutants: Vec<Mutant>,
    dropped: BTreeSet<Id>,
    constants: BTreeSet<String>,
    files: BTreeMap<String, Mutated>,
}

impl Tree {
    /// Copies the workspace. The mutants have the numbers from 1 on.
    pub(super) fn new(dir: &Path, mutants: Vec<Mutant>) -> anyhow::Result<Self> {
        let mut mutated: Vec<String> = mutants
            .iter()
            .filter_map(|mutant| mutant.file.split_once("/src/").map(|(name, _)| name.to_owned()))
            .collect();
        mutated.dedup();
        mutated.sort();
        mutated.dedup();
        copy(&root(), dir, &mut |name| !matches!(name, ".git" | "target"), &|path| {
            // `write` writes the files that have choices.
            path.extension().is_some_and(|extension| extension == "rs")
                && mutated.iter().any(|name| path.starts_with(root().join(name).join("src")))
        })?;
        let (dropped, constants) = (BTreeSet::new(), BTreeSet::new());
        let files = BTreeMap::new();
        let mut tree = Self { dir: dir.to_owned(), mutated, mutants, dropped, constants, files };
        tree.recall();
        Ok(tree)
    }

    /// Leaves out at once what did not compile before. If it does now, it is tried by the tool itself alone.
    fn recall(&mut self) {
        let known = fs::read_to_string(self.dir.join(LEFT_OUT)).unwrap_or_default();
        let known: BTreeSet<&str> = known.lines().collect();
        let ids = (1..).zip(&self.mutants);
        let left_out = ids.filter(|(_, mutant)| known.contains(mutant.name.as_str()));
        self.dropped = left_out.map(|(id, _)| id).collect();
        let functions = known.iter().filter_map(|line| line.strip_prefix("const fn "));
        self.constants = functions.map(str::to_owned).collect();
    }

    fn remember(&self) -> anyhow::Result<()> {
        let ids = self.dropped.iter();
        let mut lines: Vec<String> =
            ids.map(|id| self.mutants[*id as usize - 1].name.clone()).collect();
        lines.extend(self.constants.iter().map(|name| format!("const fn {name}")));
        Ok(fs::write(self.dir.join(LEFT_OUT), lines.join("\n"))?)
    }

    /// Builds the tests of these packages, with as many mutants as compile together.
    pub(super) fn build(&mut self, packages: &[&str]) -> anyhow::Result<Built> {
        for attempt in 1..=ATTEMPTS {
            self.write()?;
            crate::interrupt::check()?;
            let (before, constants) = (self.dropped.len(), self.constants.len());
            // Tests are compiled as well: they may need constants.
            let messages = self.cargo(&["check", "--tests", "--keep-going"], packages)?;
            let failed = self.leave_out(&messages)?;
            self.remember()?;
            println!(
                "attempt {attempt}: {} mutants and {} functions left out",
                self.dropped.len() - before,
                self.constants.len() - constants
            );
            if !failed {
                return self.link(packages);
            }
            let went_on = self.dropped.len() > before || self.constants.len() > constants;
            ensure!(went_on, "the copy in {} does not compile", self.dir.display());
        }
        bail!("the mutants do not compile together after {ATTEMPTS} attempts");
    }

    /// Brings the mutated files up to date.
    fn write(&mut self) -> anyhow::Result<()> {
        let mut by_file: BTreeMap<&str, Vec<(Id, &Mutant)>> = BTreeMap::new();
        for (id, mutant) in (1..).zip(&self.mutants) {
            by_file.entry(&mutant.file).or_default().push((id, mutant));
        }
        let mut files = BTreeMap::new();
        for name in &self.mutated {
            for path in rust_files(&root().join(name).join("src"))? {
                let inside = path.strip_prefix(root()).unwrap_or(&path);
                let file = inside.to_string_lossy().into_owned();
                let source = fs::read_to_string(&path)?;
                let mut text = source.clone();
                if let Some(mutants) = by_file.get(file.as_str()) {
                    let (dropped, constants) = (&self.dropped, &self.constants);
                    let mutated = choice::mutate(&source, mutants, dropped, constants)
                        .with_context(|| format!("in {file}"))?;
                    text.clone_from(&mutated.text);
                    files.insert(file.clone(), mutated);
                }
                if file == format!("{name}/src/lib.rs") {
                    let room = ROOM.replace("COUNT", &(self.mutants.len() + 1).to_string());
                    text = format!("{ALLOW}{text}{room}");
                }
                write_if_new(&self.dir.join(inside), text.as_bytes())?;
            }
        }
        self.files = files;
        Ok(())
    }

    fn cargo(&self, words: &[&str], packages: &[&str]) -> anyhow::Result<Vec<Value>> {
        let mut command = cargo();
        command.current_dir(&self.dir).args(words).args(["--offline", "--message-format", "json"]);
        // Cargo takes crates of the same place in two workspaces for the same: in one folder they would replace each other.
        command.env("CARGO_TARGET_DIR", self.dir.with_extension("target"));
        for package in packages {
            command.args(["--package", package]);
        }
        // Doubled warnings of the tree are of no use to anybody.
        let output = command.stderr(Stdio::null()).output();
        let output = output.with_context(|| format!("cannot run {}", shown(&command)))?;
        let lines = String::from_utf8_lossy(&output.stdout).into_owned();
        let messages = lines.lines().filter_map(|line| serde_json::from_str(line).ok());
        Ok(messages.collect())
    }

    /// Leaves out what the compiler complains of. Tells whether it did.
    fn leave_out(&mut self, messages: &[Value]) -> anyhow::Result<bool> {
        let mut failed = false;
        for message in messages.iter().filter(|message| message["reason"] == "compiler-message") {
            let message = &message["message"];
            if message["level"] != "error" {
                continue;
            }
            failed = true;
            let text = message["message"].as_str().unwrap_or_default();
            if message["code"]["code"] == "E0015" {
                self.constants.extend(constant_function(text));
                continue;
            }
            self.leave_out_at(message);
        }
        let finished = messages.iter().find(|message| message["reason"] == "build-finished");
        ensure!(finished.is_some(), "cargo did not begin to build the copy");
        Ok(failed || finished.is_some_and(|message| message["success"] != true))
    }

    /// Leaves out the mutants that an error is about.
    fn leave_out_at(&mut self, error: &Value) {
        let mut spans: Vec<&Value> = error["spans"].as_array().into_iter().flatten().collect();
        spans.sort_by_key(|span| span["is_primary"] != true);
        let mut lines = Vec::new();
        for span in spans {
            let place = |name: &str| span[name].as_u64().unwrap_or_default() as usize;
            let mut place: Range<usize> = place("byte_start")..place("byte_end");
            let Some(name) = span["file_name"].as_str() else { continue };
            let Some(file) = self.files.get(name) else { continue };
            if name.ends_with("/src/lib.rs") {
                let by = ALLOW.len();
                place = place.start.saturating_sub(by)..place.end.saturating_sub(by);
            }
            let ids = file.at(&place);
            if !ids.is_empty() {
                return self.dropped.extend(ids);
            }
            lines.extend(file.on_line(&place));
        }
        if lines.is_empty() {
            println!("{}", error["rendered"].as_str().unwrap_or_default());
        }
        self.dropped.extend(lines);
    }

    fn link(&self, packages: &[&str]) -> anyhow::Result<Built> {
        let messages = self.cargo(&["test", "--no-run"], packages)?;
        let mut built = Built::default();
        for message in &messages {
            if message["reason"] != "compiler-artifact" || message["profile"]["test"] != true {
                continue;
            }
            let Some(path) = message["executable"].as_str() else { continue };
            let manifest = Path::new(message["manifest_path"].as_str().unwrap_or_default());
            let dir = manifest.parent().unwrap_or(manifest).to_owned();
            let package = dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
            built.binaries.push(Binary { path: path.into(), dir, package });
        }
        // Cargo tells them in any order.
        built.binaries.sort_by(|a, b| a.path.cmp(&b.path));
        ensure!(!built.binaries.is_empty(), "the copy in {} has no tests", self.dir.display());
        for file in self.files.values() {
            built.chosen.extend(&file.chosen);
            built.constant.extend(&file.constant);
        }
        Ok(built)
    }

    /// The mutants, of which the first has the number 1.
    pub(super) fn mutants(&self) -> &[Mutant] {
        &self.mutants
    }
}

/// The function that was called in a constant: the last part of its path, behind its type if it has one.
fn constant_function(error: &str) -> Option<String> {
    let path = error.split('`').nth(1)?;
    // Without the arguments of generic types.
    let mut depth = 0;
    let plain: String = path
        .chars()
        .filter(|c| {
            depth += i32::from(*c == '<');
            let outside = depth == 0;
            depth -= i32::from(*c == '>');
            outside
        })
        .collect();
    let parts: Vec<&str> = plain.split("::").filter(|part| !part.is_empty()).collect();
    match parts[..] {
        [.., of_type, name] if of_type.starts_with(char::is_uppercase) => {
            Some(format!("{of_type}::{name}"))
        }
        [.., name] => Some(name.to_owned()),
        [] => None,
    }
}

fn rust_files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).with_context(|| format!("cannot list {}", dir.display()))? {
        let path = entry?.path();
        if path.is_dir() {
            found.extend(rust_files(&path)?);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    Ok(found)
}

/// Copies what has changed, so that cargo builds no more than that anew.
fn copy(
    from: &Path,
    to: &Path,
    takes: &mut impl FnMut(&str) -> bool,
    leaves: &impl Fn(&Path) -> bool,
) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot make {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot list {}", from.display()))? {
        let entry = entry?;
        let (path, name) = (entry.path(), entry.file_name());
        if !takes(&name.to_string_lossy()) || leaves(&path) {
            continue;
        }
        // Links are followed: the copy has what they lead to.
        let kind =
            fs::metadata(&path).with_context(|| format!("cannot look at {}", path.display()))?;
        if kind.is_dir() {
            copy(&path, &to.join(name), takes, leaves)?;
        } else if kind.is_file() {
            write_if_new(&to.join(name), &fs::read(&path)?)?;
        }
    }
    Ok(())
}

fn write_if_new(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    if fs::read(path).is_ok_and(|old| old == bytes) {
        return Ok(());
    }
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir)?;
    }
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

/// A test's own process.
pub(super) fn test(binary: &Binary, name: &str) -> Command {
    let mut command = Command::new("nice");
    command.args(["-n", "19"]).arg(&binary.path).args(["--exact", name, "--test-threads=1"]);
    command.current_dir(&binary.dir).env("CARGO_MANIFEST_DIR", &binary.dir);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // All seeds would take longer than any test may that is asked.
    command.env(anyverbs_testing::SHARE, "25");
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_follows_links_and_changes_no_more_than_needed() {
        let dir = std::env::temp_dir().join(format!("anyverbs-copy-{}", std::process::id()));
        let (from, to) = (dir.join("from"), dir.join("to"));
        fs::create_dir_all(from.join("inside/target")).unwrap();
        fs::write(from.join("inside/file"), "one").unwrap();
        fs::write(from.join("inside/left.rs"), "two").unwrap();
        fs::write(from.join("inside/target/built"), "three").unwrap();
        std::os::unix::fs::symlink("inside", from.join("link")).unwrap();
        let again = || {
            let leaves = |path: &Path| path.extension().is_some_and(|extension| extension == "rs");
            copy(&from, &to, &mut |name| name != "target", &leaves).unwrap();
            fs::metadata(to.join("link/file")).unwrap().modified().unwrap()
        };
        let first = again();
        assert_eq!(fs::read_to_string(to.join("link/file")).unwrap(), "one");
        assert!(to.join("inside/file").exists() && !to.join("inside/left.rs").exists());
        assert!(!to.join("inside/target").exists());
        assert_eq!(again(), first);
        fs::write(from.join("inside/file"), "four").unwrap();
        again();
        assert_eq!(fs::read_to_string(to.join("link/file")).unwrap(), "four");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn the_function_in_a_constant_is_named_by_the_error() {
        let error = "cannot call non-const associated function `types::Qpn::new` in constants";
        assert_eq!(constant_function(error).as_deref(), Some("Qpn::new"));
        let error = "cannot call non-const method `Uses::<u8>::len` in constant functions";
        assert_eq!(constant_function(error).as_deref(), Some("Uses::len"));
        let error = "cannot call non-const function `wire::field::mask` in statics";
        assert_eq!(constant_function(error).as_deref(), Some("mask"));
    }
}

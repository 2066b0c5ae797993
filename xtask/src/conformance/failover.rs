//! Programs that go on, or end in time, when a device fails under them: the scripts of `conformance/failover`. Those of
//! `conformance/programs` that need no fault run in the same way, after the tools.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;

use super::findings::{self, Known};
use super::hosts::{Hosts, Side, Topology, sweep};
use super::process::{Process, quiet};
use super::{Selection, Tally};
use crate::dist::Dist;
use crate::packages::{self, Package};
use crate::{interrupt, workspace};

/// Debian packages that the table may name.
const DEBIAN: [Package; 7] = [
    packages::NODE_EXPORTER,
    packages::PERFTEST,
    packages::UCX_UTILS,
    packages::OPENMPI_BIN,
    packages::PYTHON3_MPI4PY,
    packages::PYTHON3_VENV,
    packages::BINUTILS,
];

/// A script has a limit for each thing that it waits for, and says which one did not come. This one is for all of them.
const LIMIT: Duration = Duration::from_secs(600);

const PYTHON: &str = "/usr/bin/python3";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Table {
    group: Vec<Group>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    script: String,
    arguments: Vec<String>,
    #[serde(default)]
    debian: Vec<String>,
    pip: Option<String>,
    #[serde(default)]
    default: Vec<String>,
}

impl Group {
    fn packages(&self) -> anyhow::Result<Vec<Package>> {
        let known = |name: &String| {
            let package = DEBIAN.into_iter().find(|(package, _)| package == name);
            package.with_context(|| format!("{name} is not in the list of packages"))
        };
        self.debian.iter().map(known).collect()
    }
}

/// Runs the selected cases and reports their results.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    let known = Known::wanted(selection)?;
    let tally = run_scripts(dist, selection, "failover", known.as_ref())?;
    if tally == Tally::default() {
        bail!("no case of the failover table has that in its name");
    }
    if let Some(known) = &known {
        println!("{known}");
    }
    println!("failover: {tally}");
    Ok(tally)
}

/// Runs the selected scripts of a folder of `conformance`, whose table has its name. With `known`, their programs are looked at for mistakes.
pub(super) fn run_scripts(
    dist: &Dist,
    selection: &Selection,
    folder: &str,
    known: Option<&Known>,
) -> anyhow::Result<Tally> {
    let scratch = workspace::target().join("conformance").join(folder);
    let folder = workspace::root().join("conformance").join(folder);
    let table = read(&folder.with_extension("toml"))?;
    let is_selected = |group: &Group, argument: &String| {
        selection.takes(&name(group, argument), group.default.contains(argument))
    };
    if !table.group.iter().any(|group| group.arguments.iter().any(|a| is_selected(group, a))) {
        return Ok(Tally::default());
    }
    packages::ensure(&[packages::IPROUTE2, packages::PYTHON3])?;
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    sweep();
    let hosts = Hosts::new(Topology::OneHost, 0, &scratch)?;
    let report = scratch.join("findings");
    let mut tally = Tally::default();
    for group in &table.group {
        let arguments: Vec<_> = group.arguments.iter().filter(|a| is_selected(group, a)).collect();
        if arguments.is_empty() {
            continue;
        }
        let ready = match &hosts {
            None => Err("needs root for a network namespace".to_owned()),
            Some(hosts) => prepare(group, &scratch)?.map(|python| (hosts, python)),
        };
        for argument in arguments {
            interrupt::check()?;
            let name = name(group, argument);
            let started = Instant::now();
            let verdict = match &ready {
                Err(reason) => {
                    println!("skip {name}  {reason}");
                    tally.skipped += 1;
                    continue;
                }
                Ok((hosts, python)) => {
                    let mut command = hosts.command(Side::Server, Path::new(PYTHON));
                    command.arg(folder.join(&group.script)).arg(argument);
                    command.env("ANYVERBS", dist.anyverbs()).env("PYTHON", python);
                    if known.is_some() {
                        fs::write(&report, "")?;
                        findings::ask(&mut command, &report);
                    }
                    let verdict = run_script(&mut command, &scratch)?;
                    let judge = |known: &Known| known.judge(&report, Some(&group.script));
                    match known.map(judge).transpose()? {
                        Some(Err(unknown)) => Err(unknown),
                        _ => verdict,
                    }
                }
            };
            let seconds = started.elapsed().as_secs_f64();
            match verdict {
                Ok(said) => {
                    tally.passed += 1;
                    println!("ok   {name}  {said}  ({seconds:.1} s)");
                }
                Err(output) => {
                    tally.failed += 1;
                    println!("FAIL {name}  ({seconds:.1} s)\n{output}");
                }
            }
        }
    }
    Ok(tally)
}

fn name(group: &Group, argument: &str) -> String {
    format!("{} {argument}", group.script)
}

fn read(path: &Path) -> anyhow::Result<Table> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let table: Table = toml::from_str(&text).with_context(|| format!("in {}", path.display()))?;
    for group in &table.group {
        group.packages()?;
        let stray = group.default.iter().find(|argument| !group.arguments.contains(argument));
        ensure!(stray.is_none(), "{stray:?} of `default` is no argument of {}", group.script);
    }
    Ok(table)
}

/// Installs what a group needs. Returns the Python that has its package, or why it cannot run.
fn prepare(group: &Group, scratch: &Path) -> anyhow::Result<Result<PathBuf, String>> {
    let packages = group.packages()?;
    let installed = packages::ensure(&packages).and_then(|()| match &group.pip {
        None => Ok(PYTHON.into()),
        Some(package) => environment(package, scratch),
    });
    interrupt::check()?;
    Ok(installed.map_err(|error| {
        let text = format!("{error:#}");
        text.lines().last().unwrap_or_default().to_owned()
    }))
}

/// The Python of a virtual environment that has a package, which this makes once.
fn environment(package: &str, scratch: &Path) -> anyhow::Result<PathBuf> {
    let folder = scratch.join(package);
    let (python, done) = (folder.join("bin/python"), folder.join("installed"));
    if !done.exists() {
        println!("installing {package}, once");
        quiet(Command::new(PYTHON).args(["-m", "venv", "--clear"]).arg(&folder))?;
        let pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet"];
        quiet(Command::new(&python).args(pip).arg(package))?;
        fs::write(&done, "").with_context(|| format!("cannot write {}", done.display()))?;
    }
    Ok(python)
}

/// Runs a script in a folder of its own. Returns its last line, or all that it said if it failed.
fn run_script(command: &mut Command, scratch: &Path) -> anyhow::Result<Result<String, String>> {
    let work = scratch.join("work");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    }
    fs::create_dir(&work).with_context(|| format!("cannot make {}", work.display()))?;
    command.current_dir(&work).env("PYTHONDONTWRITEBYTECODE", "1");
    let mut script = Process::start(command, &scratch.join("script.out"))?;
    let status = script.wait(Instant::now() + LIMIT)?;
    script.stop();
    let output = script.output();
    Ok(match status {
        Some(status) if status.success() && !output.trim().is_empty() => {
            Ok(output.lines().last().unwrap_or_default().to_owned())
        }
        Some(status) => Err(format!("{output}the script ended with {status}")),
        None => Err(format!("{output}the script did not end in {} s", LIMIT.as_secs())),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_name_scripts_and_packages_that_there_are() {
        for folder in ["failover", "programs"] {
            let folder = workspace::root().join("conformance").join(folder);
            let table = read(&folder.with_extension("toml")).unwrap();
            assert!(!table.group.is_empty());
            for group in &table.group {
                assert!(folder.join(&group.script).is_file(), "{}", group.script);
            }
        }
    }

    #[test]
    fn a_script_passes_by_its_status_and_a_last_line() {
        let scratch =
            std::env::temp_dir().join(format!("anyverbs-failover-{}", std::process::id()));
        fs::create_dir(&scratch).unwrap();
        let verdict =
            |script: &str| run_script(Command::new("sh").args(["-c", script]), &scratch).unwrap();
        assert_eq!(verdict("echo much; echo good"), Ok("good".into()));
        assert!(verdict("echo good; exit 1").unwrap_err().starts_with("good\n"));
        assert!(verdict("true").is_err(), "it says nothing");
        // Nothing of one script is there for the next one.
        assert!(verdict("touch enough; echo good").is_ok());
        assert!(verdict("test -e enough && echo good").is_err());
        fs::remove_dir_all(&scratch).unwrap();
    }
}

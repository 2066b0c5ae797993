//! Installs the packages in clean roots of Debian's releases, without Rust, and uses them there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::Made;
use crate::conformance::Tally;
use crate::interrupt;
use crate::packages;
use crate::workspace::{root, succeed, target};

/// glibc 2.31, 2.36 and 2.41; Python 3.9, 3.11 and 3.13.
const SUITES: [&str; 3] = ["bullseye", "bookworm", "trixie"];
const CASES: [&str; 7] = ["one-file", "tarball", "deb", "wheel", "oci", "cdi", "action"];
const INSIDE: &str = "ibverbs-utils,rdmacm-utils,python3-venv,python3-pytest";

/// Runs every case in every root.
pub(super) fn run_counted(made: &Made) -> anyhow::Result<Tally> {
    let mut tally = Tally::default();
    // SAFETY: cannot fail and touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        println!("skip packages: mounting and entering a root need root");
        tally.skipped = SUITES.len() * CASES.len();
        return Ok(tally);
    }
    packages::ensure(&[packages::MMDEBSTRAP, packages::IPROUTE2])?;
    let chosen = beside(made)?;
    for suite in SUITES {
        let debian = root_of(suite).with_context(|| format!("cannot make a root of {suite}"))?;
        for case in CASES {
            interrupt::check()?;
            let cases = root().join("conformance/install");
            let mut command = Command::new("unshare");
            command.args(["--mount", "--pid", "--net", "--fork", "--kill-child", "sh"]);
            command.arg(cases.join("enter.sh")).args([&debian, &chosen, &cases]).arg(case);
            match succeed(&mut command) {
                Ok(()) => {
                    println!("ok   {suite} {case}");
                    tally.passed += 1;
                }
                Err(error) => {
                    println!("FAIL {suite} {case}: {error:#}");
                    tally.failed += 1;
                }
            }
        }
    }
    Ok(tally)
}

/// A directory with these packages alone, for older ones may lie beside them, and the action.
fn beside(made: &Made) -> anyhow::Result<PathBuf> {
    let dir = target().join("package-tests/packages");
    if dir.exists() {
        fs::remove_dir_all(&dir)?;
    }
    fs::create_dir_all(&dir)?;
    for file in &made.files {
        let name = file.file_name().context("a package has a name")?;
        fs::copy(file, dir.join(name))?;
    }
    let action = dir.join("action");
    fs::create_dir(&action)?;
    for name in ["action.yml", "setup.sh"] {
        fs::copy(root().join("action").join(name), action.join(name))
            .with_context(|| format!("cannot copy {name}"))?;
    }
    Ok(dir)
}

/// A root of a release with RDMA programs and Python inside, made once.
fn root_of(suite: &str) -> anyhow::Result<PathBuf> {
    let roots = target().join("package-tests/roots");
    let (done, fresh) = (roots.join(suite), roots.join(format!("{suite}.new")));
    if done.exists() {
        return Ok(done);
    }
    remove(&fresh)?;
    fs::create_dir_all(&roots)?;
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=minbase", "--include", INSIDE, suite]);
    command.arg(&fresh).arg(format!("deb http://deb.debian.org/debian {suite} main"));
    succeed(&mut command)?;
    fs::rename(&fresh, &done)?;
    Ok(done)
}

fn remove(dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    Ok(())
}

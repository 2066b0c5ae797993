//! A newer release of rdma-core's Python suite than Debian's: the package of PyPI is rdma-core's source.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use crate::conformance::process::quiet;
use crate::packages;

const RELEASE: &str = "59.0";
/// The last of the series for which the source was written: later ones refuse some of it.
const CYTHON: &str = "cython==3.0.12";

/// Builds the package's modules below `dir` unless they are there. Returns where `pyverbs` and `tests` lie.
pub(super) fn build(dir: &Path) -> anyhow::Result<PathBuf> {
    let done = dir.join(format!("pyverbs-{RELEASE}"));
    if done.is_dir() {
        return Ok(done);
    }
    packages::ensure(&[
        packages::CC,
        packages::LIBC6_DEV,
        packages::PYTHON3_DEV,
        packages::PYTHON3_VENV,
        packages::CMAKE,
        packages::NINJA,
        packages::PKG_CONFIG,
        packages::LIBNL_3_DEV,
        packages::LIBNL_ROUTE_3_DEV,
        packages::LIBUDEV_DEV,
    ])?;
    println!("building pyverbs {RELEASE}, once; some minutes");
    let work = dir.join("build");
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    }
    fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let venv = work.join("venv");
    quiet(Command::new("/usr/bin/python3").args(["-m", "venv"]).arg(&venv))?;
    let bin = venv.join("bin");
    let pip = |arguments: &[&str]| {
        let mut pip = Command::new(bin.join("pip"));
        quiet(pip.arg("--disable-pip-version-check").args(arguments).current_dir(&work))
    };
    pip(&["install", "--quiet", CYTHON, "scikit-build-core", "setuptools-scm"])?;
    let package = format!("pyverbs=={RELEASE}");
    // Its build dependencies are there: only the package itself is looked at.
    pip(&[
        "download",
        "--quiet",
        "--no-deps",
        "--no-binary=pyverbs",
        "--no-build-isolation",
        &package,
    ])?;
    let archive = format!("pyverbs-{RELEASE}.tar.gz");
    quiet(Command::new("tar").args(["-xzf", &archive]).current_dir(&work))?;

    let source = work.join(format!("pyverbs-{RELEASE}/rdma-core"));
    let build = source.join("build");
    let path = format!("{}:{}", bin.display(), std::env::var("PATH").unwrap_or_default());
    quiet(
        Command::new("cmake")
            .args(["-GNinja", "-DNO_MAN_PAGES=1", "-DNO_PYVERBS=0"])
            // For Cython's code -O2, the default, takes the compiler five times as long. The suite runs for seconds.
            .args(["-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O0", "-S"])
            .arg(&source)
            .arg("-B")
            .arg(&build)
            .arg(format!("-DPYTHON_EXECUTABLE={}", bin.join("python").display()))
            .env("PATH", &path),
    )?;
    let ninja = |arguments: &[&str]| {
        let mut ninja = Command::new("ninja");
        ninja.arg("-C").arg(&build).args(arguments).env("PATH", &path);
        ninja
    };
    let targets = ninja(&["-t", "targets", "all"]).output().context("cannot run ninja")?;
    let targets = String::from_utf8_lossy(&targets.stdout);
    let modules: Vec<&str> = targets.lines().filter_map(module).collect();
    ensure!(!modules.is_empty(), "the source of pyverbs {RELEASE} has no modules");
    quiet(&mut ninja(&modules))?;

    let fresh = work.join("suite");
    fs::create_dir(&fresh).with_context(|| format!("cannot make {}", fresh.display()))?;
    // The Python files of the build are links to the source.
    quiet(Command::new("cp").arg("-rL").arg(build.join("python/pyverbs")).arg(&fresh))?;
    quiet(Command::new("cp").arg("-r").arg(source.join("tests")).arg(&fresh))?;
    fs::rename(&fresh, &done).with_context(|| format!("cannot write {}", done.display()))?;
    fs::remove_dir_all(&work).with_context(|| format!("cannot remove {}", work.display()))?;
    Ok(done)
}

/// The module that a line `target: rule` of ninja's list makes.
fn module(line: &str) -> Option<&str> {
    let (target, _) = line.split_once(": ")?;
    let is_module = target.starts_with("python/pyverbs/")
        && target.contains(".cpython-")
        && target.ends_with(".so");
    is_module.then_some(target)
}

#[cfg(test)]
mod tests {
    use super::module;

    #[test]
    fn modules_are_told_from_other_targets() {
        let qp = "python/pyverbs/qp.cpython-311-x86_64-linux-gnu.so";
        assert_eq!(module(&format!("{qp}: C_SHARED_LIBRARY_LINKER")), Some(qp));
        let efa = "python/pyverbs/providers/efa/efadv.cpython-311-x86_64-linux-gnu.so";
        assert_eq!(module(&format!("{efa}: C_SHARED_LIBRARY_LINKER")), Some(efa));
        for other in [
            "lib/libibverbs.so: phony",
            "python/pyverbs/qp.c: CUSTOM_COMMAND",
            "pyverbs/qp.cpython-311.dir/qp.c.o: C_COMPILER",
        ] {
            assert_eq!(module(other), None, "{other}");
        }
    }
}

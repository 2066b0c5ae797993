//! The tests of mpi4py on Open MPI: the script `conformance/programs/mpi4py_suite.sh`, which sets up hosts of its own.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::findings::{self, Known};
use super::process::Process;
use super::{Selection, Tally};
use crate::dist::Dist;
use crate::{interrupt, packages, workspace};

/// The script has shorter ones of its own, and says what did not end.
const LIMIT: Duration = Duration::from_secs(1800);
const RANKS: usize = 3;

/// Runs all of the tests.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[packages::IPROUTE2, packages::PYTHON3])?;
    let large = [packages::OPENMPI_BIN, packages::PYTHON3_MPI4PY, packages::PYTHON3_VENV];
    // SAFETY: cannot fail and touches no memory.
    let is_root = unsafe { libc::geteuid() } == 0;
    let ready = packages::ensure(&large).and_then(|()| {
        anyhow::ensure!(is_root, "needs root for network namespaces");
        Ok(())
    });
    if let Err(error) = ready {
        interrupt::check()?;
        println!("skip mpi4py: {error:#}");
        return Ok(Tally { skipped: 1, ..Tally::default() });
    }
    let scratch = workspace::target().join("conformance/mpi4py");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    let report = scratch.join("findings");
    let known = Known::wanted(selection)?;
    let mut command = Command::new("bash");
    command.arg(workspace::root().join("conformance/programs/mpi4py_suite.sh"));
    command.arg(dist.anyverbs());
    if known.is_some() {
        fs::write(&report, "")?;
        findings::ask(&mut command, &report);
    }
    let started = Instant::now();
    let verdict = run_script(&mut command, &scratch)?;
    let judge = |known: &Known| known.judge(&report, Some("mpi4py"));
    let verdict = match known.as_ref().map(judge).transpose()? {
        Some(Err(unknown)) => Err(unknown),
        _ => verdict,
    };
    let seconds = started.elapsed().as_secs_f64();
    let mut tally = Tally::default();
    match verdict {
        Ok(said) => {
            tally.passed += 1;
            println!("ok   mpi4py  {said}  ({seconds:.1} s)");
        }
        Err(output) => {
            tally.failed += 1;
            println!("FAIL mpi4py  ({seconds:.1} s)\n{output}");
        }
    }
    if let Some(known) = &known {
        println!("{known}");
    }
    Ok(tally)
}

/// The words of the ranks about their tests, or all that the script said if it failed.
fn run_script(command: &mut Command, scratch: &Path) -> anyhow::Result<Result<String, String>> {
    let mut script = Process::start(command, &scratch.join("script.out"))?;
    let status = script.wait(Instant::now() + LIMIT)?;
    script.stop();
    let output = script.output();
    let good: Vec<_> = output.lines().filter(|line| line.contains(": OK")).collect();
    Ok(match status {
        Some(status) if status.success() && good.len() == RANKS => Ok(good.join(", ")),
        Some(status) => Err(format!("{output}the script ended with {status}")),
        None => Err(format!("{output}the script did not end in {} s", LIMIT.as_secs())),
    })
}

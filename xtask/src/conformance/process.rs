//! A child process. Its output is kept, and it never outlives its handle.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::interrupt;
use crate::workspace::shown;

const POLL: Duration = Duration::from_millis(5);
/// Time from SIGTERM to SIGKILL.
const GRACE: Duration = Duration::from_secs(3);

/// A running child.
pub(crate) struct Process {
    child: Child,
    output: PathBuf,
    status: Option<ExitStatus>,
}

impl Process {
    /// Starts `command` with both outputs going to one file, in the order written.
    pub(crate) fn start(command: &mut Command, output: &Path) -> anyhow::Result<Self> {
        let file =
            File::create(output).with_context(|| format!("cannot write {}", output.display()))?;
        let twin = file.try_clone().context("cannot duplicate a descriptor")?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file)
            .stderr(twin)
            .spawn()
            .with_context(|| format!("cannot run {}", shown(command)))?;
        Ok(Process { child, output: output.to_owned(), status: None })
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// The status if the child has ended.
    pub(crate) fn ended(&mut self) -> anyhow::Result<Option<ExitStatus>> {
        if self.status.is_none() {
            self.status = self.child.try_wait().context("cannot wait for a child")?;
        }
        Ok(self.status)
    }

    /// Waits until the child ends, or `until`; then `None`.
    pub(crate) fn wait(&mut self, until: Instant) -> anyhow::Result<Option<ExitStatus>> {
        let mut ended = None;
        wait_for(until, || {
            ended = self.ended()?;
            Ok(ended.is_some())
        })?;
        Ok(ended)
    }

    /// Its output so far.
    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.output).unwrap_or_default()).into_owned()
    }

    /// Sends a signal, if the child still runs.
    pub(crate) fn signal(&mut self, signal: libc::c_int) -> anyhow::Result<()> {
        if self.ended()?.is_none() {
            // SAFETY: the child has not been waited for, so that its process id is still its own.
            unsafe { libc::kill(self.child.id().cast_signed(), signal) };
        }
        Ok(())
    }

    /// Kills the programs that the child has started, and not the child, a launcher.
    pub(crate) fn kill_program(&mut self) -> anyhow::Result<()> {
        if self.ended()?.is_none() {
            for program in descendants(self.child.id()) {
                // SAFETY: touches no memory. While its parent has not waited for it, the process id is its own; it may have by
                // now, within the moment since it was listed.
                unsafe { libc::kill(program.cast_signed(), libc::SIGKILL) };
            }
        }
        Ok(())
    }

    /// Ends the child: politely, so that it can take its own children and files along, then by force.
    pub(crate) fn stop(&mut self) {
        let end = Instant::now() + GRACE;
        while let Ok(None) = self.ended() {
            // Repeated, since the launcher passes signals on only once its program runs.
            let _ = self.signal(libc::SIGTERM);
            if Instant::now() > end {
                // They are found while their parents live. Afterwards their origin is unknown.
                let family = descendants(self.id());
                let _ = self.child.kill();
                let _ = self.child.wait();
                for id in family {
                    // SAFETY: touches no memory. It ran an instant ago, so that its id is hardly another's by now.
                    unsafe { libc::kill(id.cast_signed(), libc::SIGKILL) };
                }
                return;
            }
            sleep(POLL * 4);
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The children of a process, their children, and so on.
fn descendants(id: u32) -> Vec<u32> {
    let threads = fs::read_dir(format!("/proc/{id}/task")).into_iter().flatten().flatten();
    let children = threads.flat_map(|thread| {
        let list = fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        list.split_ascii_whitespace().filter_map(|id| id.parse().ok()).collect::<Vec<u32>>()
    });
    children.flat_map(|child| [vec![child], descendants(child)].concat()).collect()
}

/// Polls `done` until it says so or the time is over, and returns whether it did.
pub(crate) fn wait_for(
    until: Instant,
    mut done: impl FnMut() -> anyhow::Result<bool>,
) -> anyhow::Result<bool> {
    loop {
        if done()? {
            return Ok(true);
        }
        interrupt::check()?;
        if Instant::now() >= until {
            return Ok(false);
        }
        sleep(POLL);
    }
}

/// Runs a command to its end, quietly. An error has its output.
pub(crate) fn quiet(command: &mut Command) -> anyhow::Result<String> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("cannot run {}", shown(command)))?;
    if !output.status.success() {
        bail!("{} failed: {}", shown(command), String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_children_of_children_are_found() {
        let mut shell =
            Command::new("sh").args(["-c", "sh -c 'sleep 100 & wait' & wait"]).spawn().unwrap();
        let found = wait_for(Instant::now() + Duration::from_secs(20), || {
            Ok(descendants(shell.id()).len() == 2)
        });
        let family = descendants(shell.id());
        shell.kill().unwrap();
        shell.wait().unwrap();
        for id in family {
            // SAFETY: touches no memory.
            unsafe { libc::kill(id.cast_signed(), libc::SIGKILL) };
        }
        assert!(found.unwrap());
    }
}

//! `anyverbs sysfs`: a tree as in `/sys`, kept fresh for programs that the view cannot reach, static ones above all.

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, ensure};
use anyverbs::abandoned::Membership;
use anyverbs::config::Config;

use crate::args::Sysfs;
use crate::live::Files;
use crate::look;
use crate::{device, view_pci, view_tree};

/// Keeps the tree until a signal comes, and removes it.
pub(crate) fn run(args: &Sysfs) -> anyhow::Result<ExitCode> {
    let dir = &args.directory;
    let signals = block().context("cannot block signals")?;
    let config = Config::load_with(&args.settings.variables())?;
    let devices = device::list(&args.settings)?;
    ensure!(!devices.is_empty(), "there is no device");
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))?;
    ensure!(fs::read_dir(dir)?.next().is_none(), "{} is not empty", dir.display());
    let kept = keep(dir, (devices, &config), &signals);
    for name in ["sys", "dev", "netlink", view_pci::MARK] {
        let path = dir.join(name);
        if path.exists() {
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    kept.map(|()| ExitCode::SUCCESS)
}

fn keep(
    dir: &Path,
    (devices, config): (Vec<device::Device>, &Config),
    signals: &libc::sigset_t,
) -> anyhow::Result<()> {
    view_tree::write_devices(dir, &devices)
        .with_context(|| format!("cannot write to {}", dir.display()))?;
    let host = Membership::join(&devices[0].registry, devices[0].udp_port)?;
    let mut files = Files::new(dir.join("sys"), None, (devices, config), host)?;
    loop {
        files
            .follow()
            .and_then(|()| files.refresh())
            .with_context(|| format!("cannot write to {}", dir.display()))?;
        if has_come(signals) {
            return Ok(());
        }
    }
}

/// The signals that end it, blocked.
fn block() -> std::io::Result<libc::sigset_t> {
    // SAFETY: signal sets are plain data that sigemptyset initialises; the mask is this thread's own.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
            libc::sigaddset(&raw mut set, signal);
        }
        match libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) {
            0 => Ok(set),
            error => Err(std::io::Error::from_raw_os_error(error)),
        }
    }
}

/// Whether one of them comes while it waits for the next look.
fn has_come(signals: &libc::sigset_t) -> bool {
    let time = libc::timespec { tv_sec: look::pause().as_secs() as libc::time_t, tv_nsec: 0 };
    // SAFETY: an initialised set and a live time; nothing else is asked for.
    unsafe { libc::sigtimedwait(signals, std::ptr::null_mut(), &raw const time) > 0 }
}

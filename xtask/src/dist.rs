//! `cargo xtask dist`: builds the shipped files and lays them out as an installation has them.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::workspace::{cargo, shown, succeed, target};

/// The other names of `libibverbs.so.1`, which all lead to the one object, so that a process has one copy of the device.
pub(crate) const LINKS: [&str; 6] = [
    "libibverbs.so",
    "librdmacm.so.1",
    "librdmacm.so",
    "libmlx5.so.1",
    "libmlx4.so.1",
    "libefa.so.1",
];

pub(crate) const SHELLS: [(&str, &str); 3] =
    [("bash", "anyverbs"), ("zsh", "_anyverbs"), ("fish", "anyverbs.fish")];

/// The objects to build.
#[derive(Debug, Clone, clap::Args)]
// Flattened into commands with a group of the same name.
#[group(skip)]
pub(crate) struct Options {
    /// Cargo profile to build with
    #[arg(long, default_value = "release")]
    pub(crate) profile: String,
}

impl Default for Options {
    fn default() -> Self {
        Options { profile: "release".into() }
    }
}

/// A finished layout.
#[derive(Debug, Clone)]
pub(crate) struct Dist {
    root: PathBuf,
}

impl Dist {
    pub(crate) fn anyverbs(&self) -> PathBuf {
        self.root.join("bin/anyverbs")
    }

    pub(crate) fn rspreload(&self) -> PathBuf {
        self.root.join("lib/librspreload.so")
    }

    pub(crate) fn lib(&self) -> PathBuf {
        self.root.join("lib")
    }

    pub(crate) fn libibverbs(&self) -> PathBuf {
        self.root.join("lib/libibverbs.so.1")
    }
}

/// Builds and lays out `target/dist`.
pub(crate) fn run(options: &Options) -> anyhow::Result<Dist> {
    let mut build = cargo();
    build.args([
        "build",
        "--profile",
        &options.profile,
        "-p",
        "anyverbs-capi",
        "-p",
        "anyverbs-view",
        "-p",
        "anyverbs-rspreload",
        "-p",
        "anyverbs-cli",
    ]);
    succeed(&mut build)?;
    let built = target().join(folder(&options.profile));
    let dist = Dist { root: target().join("dist") };

    for folder in ["bin", "lib", "share/man/man1", "share/completions"] {
        let folder = dist.root.join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    install(&built.join("anyverbs"), &dist.anyverbs())?;
    install(&built.join("libanyverbs_capi.so"), &dist.libibverbs())?;
    install(&built.join("libanyverbs_view.so"), &dist.root.join("lib/libanyverbs_view.so"))?;
    install(&built.join("librspreload.so"), &dist.rspreload())?;
    for name in LINKS {
        link("libibverbs.so.1", &dist.root.join("lib").join(name))?;
    }
    succeed(
        Command::new(dist.anyverbs())
            .args(["man", "--directory"])
            .arg(dist.root.join("share/man/man1")),
    )?;
    for (shell, file) in SHELLS {
        let mut command = Command::new(dist.anyverbs());
        let out = command
            .args(["completions", shell])
            .output()
            .context("cannot run the built anyverbs")?;
        if !out.status.success() {
            bail!("{} failed ({})", shown(&command), out.status);
        }
        write(&dist.root.join("share/completions").join(file), &out.stdout)?;
    }
    Ok(dist)
}

/// Cargo's name for the folder of a profile.
pub(crate) fn folder(profile: &str) -> &str {
    if profile == "dev" { "debug" } else { profile }
}

/// Puts a file in place in one step: a program that runs from the old one keeps it.
fn install(from: &Path, to: &Path) -> anyhow::Result<()> {
    let fresh = to.with_extension("new");
    fs::copy(from, &fresh).with_context(|| format!("cannot copy {}", from.display()))?;
    fs::rename(&fresh, to).with_context(|| format!("cannot write {}", to.display()))
}

fn link(target: &str, at: &Path) -> anyhow::Result<()> {
    match fs::remove_file(at) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot replace {}", at.display()));
        }
        _ => {}
    }
    symlink(target, at).with_context(|| format!("cannot write {}", at.display()))
}

fn write(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
}

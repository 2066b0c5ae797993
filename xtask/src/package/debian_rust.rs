//! A compiler for another kind of machine, from Debian's packages, where rustup's standard library for it is not installed.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};

use super::build::{Machine, Rust, write};
use crate::packages;
use crate::workspace::succeed;

/// The newest compiler that Debian has for its stable releases: that of its web browsers.
const COMPILER: &str = "rustc-web";
const STANDARD_LIBRARY: &str = "libstd-rust-web-dev";
const SUITE: &str = "bookworm";

/// Unpacks the compiler for this machine, and the standard library and GCC's runtime of the other.
pub(super) fn fetch(machine: Machine, tools: &Path) -> anyhow::Result<Rust> {
    packages::ensure(&[packages::MMDEBSTRAP])?;
    let (here, there) = (tools.join("debian-rust"), tools.join(format!("debian-{}", machine.arch)));
    let done = tools.join(format!("debian-{}.done", machine.arch));
    if !done.exists() {
        unpack(&here, "native", &[COMPILER])?;
        unpack(&there, machine.debian, &[STANDARD_LIBRARY, "libgcc-s1"])?;
        let library = Path::new("usr/lib/rustlib").join(machine.triple);
        fs::rename(there.join(&library), here.join(&library))
            .with_context(|| format!("{STANDARD_LIBRARY} is not laid out as expected"))?;
        write(&done, b"")?;
    }
    let compiler = tools.join("debian-rustc");
    let root = here.display();
    let text = format!(
        "#!/bin/sh\nLD_LIBRARY_PATH=$(echo '{root}'/usr/lib/*-linux-gnu) exec '{root}/usr/bin/rustc' \"$@\"\n"
    );
    write(&compiler, text.as_bytes())?;
    fs::set_permissions(&compiler, fs::Permissions::from_mode(0o755))?;
    let libgcc = there.join(format!("lib/{}-linux-gnu/libgcc_s.so.1", machine.arch));
    if !libgcc.exists() {
        bail!("{} is not there", libgcc.display());
    }
    Ok(Rust { compiler: Some(compiler), libgcc })
}

/// Unpacks Debian packages and their dependencies, without installing them.
fn unpack(into: &Path, architecture: &str, packages: &[&str]) -> anyhow::Result<()> {
    if into.exists() {
        fs::remove_dir_all(into)?;
    }
    let mut command = Command::new("mmdebstrap");
    command.args(["--quiet", "--variant=extract"]);
    if architecture != "native" {
        command.arg(format!("--architectures={architecture}"));
    }
    command.arg(format!("--include={}", packages.join(","))).arg(SUITE).arg(into);
    let main = format!("deb http://deb.debian.org/debian {SUITE} main");
    let security = format!("deb http://deb.debian.org/debian-security {SUITE}-security main");
    succeed(command.args([main, security]))
}

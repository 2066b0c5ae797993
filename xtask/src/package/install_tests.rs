//! Installs the packages in clean roots of Debian's releases, without Rust, and uses them there. Those for 64-bit ARM are
//! emulated on other machines.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context;

use super::build::{self, Machine};
use super::{Made, remove};
use crate::conformance::Tally;
use crate::interrupt;
use crate::packages;
use crate::workspace::{root, succeed, target};

/// A clean root of a Debian release, and what is tried there.
struct Place {
    name: &'static str,
    suite: &'static str,
    /// Debian's packages inside.
    include: &'static str,
    cases: &'static [&'static str],
}

/// It installs the wheel as well.
const UV: &str = "uv==0.13.9";
const PYTHON: &str = "ibverbs-utils,rdmacm-utils,perftest,python3-venv,python3-pytest";
const NETWORK: &str = "ibverbs-utils,rdmacm-utils,perftest,iproute2";
const PODMAN: &str = "ibverbs-utils,rdmacm-utils,perftest,podman,crun";
const DOCKER: &str = "ibverbs-utils,rdmacm-utils,perftest,docker.io,docker-cli,iptables";
const CASES: &[&str] = &["one-file", "tarball", "deb", "wheel", "oci", "cdi", "action"];

/// glibc 2.31, 2.36 and 2.41; Python 3.9, 3.11 and 3.13.
const HERE: [Place; 6] = [
    Place { name: "bullseye", suite: "bullseye", include: PYTHON, cases: CASES },
    Place { name: "bookworm", suite: "bookworm", include: PYTHON, cases: CASES },
    Place { name: "trixie", suite: "trixie", include: PYTHON, cases: CASES },
    Place { name: "two-hosts", suite: "trixie", include: NETWORK, cases: &["two-hosts"] },
    Place { name: "podman", suite: "trixie", include: PODMAN, cases: &["podman"] },
    Place { name: "docker", suite: "trixie", include: DOCKER, cases: &["docker"] },
];
/// The cases that run below qemu-user.
const EMULATED: [Place; 1] = [Place {
    name: "bullseye-arm64",
    suite: "bullseye",
    include: NETWORK,
    cases: &["one-file", "tarball", "deb", "two-hosts"],
}];

/// Whether packages for a machine can be tried here. Only programs for 64-bit ARM are emulated.
pub(super) fn can_run(machine: Machine) -> bool {
    machine.arch == env::consts::ARCH || machine.arch == "aarch64"
}

/// Runs every case in every root of the packages' machine.
pub(super) fn run_counted(made: &Made) -> anyhow::Result<Tally> {
    let emulated = made.machine.arch != env::consts::ARCH;
    let places: &[Place] = if emulated { &EMULATED } else { &HERE };
    let mut tally = Tally::default();
    if let Err(reason) = possible(emulated) {
        println!("skip packages for {}: {reason}", made.machine.arch);
        tally.skipped = places.iter().map(|place| place.cases.len()).sum();
        return Ok(tally);
    }
    packages::ensure(&[packages::MMDEBSTRAP, packages::IPROUTE2])?;
    let chosen = beside(made)?;
    let cases = root().join("conformance/install");
    for place in places {
        let debian = match root_of(place, made, emulated) {
            Ok(debian) => debian,
            Err(error) => {
                interrupt::check()?;
                println!("skip {}: cannot make the root: {error:#}", place.name);
                tally.skipped += place.cases.len();
                continue;
            }
        };
        for case in place.cases {
            interrupt::check()?;
            let mut command = launcher(emulated);
            command.args(["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "sh"]);
            command.arg(cases.join("enter.sh")).args([&debian, &chosen, &cases]).arg(case);
            match succeed(&mut command) {
                Ok(()) => {
                    println!("ok   {} {case}", place.name);
                    tally.passed += 1;
                }
                Err(error) => {
                    println!("FAIL {} {case}: {error:#}", place.name);
                    tally.failed += 1;
                }
            }
        }
    }
    Ok(tally)
}

/// Why the cases cannot run here, as the error.
fn possible(emulated: bool) -> Result<(), String> {
    // SAFETY: cannot fail and touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        return Err("mounting and entering a root need root".into());
    }
    if !emulated {
        return Ok(());
    }
    packages::ensure(&[packages::QEMU_USER, packages::ARCH_TEST])
        .map_err(|error| format!("{error:#}"))?;
    // Since Linux 6.7 a user namespace may have emulators of its own.
    let tried = launcher(true).arg("true").output();
    let tried = tried.map_err(|error| format!("cannot run a shell: {error}"))?;
    if tried.status.success() {
        return Ok(());
    }
    let errors = String::from_utf8_lossy(&tried.stderr);
    Err(format!("no emulation in a user namespace: {}", errors.trim_end()))
}

/// Runs the words that follow; for another kind of machine, where its programs are emulated.
fn launcher(emulated: bool) -> Command {
    if !emulated {
        return Command::new("env");
    }
    let mut command = Command::new("sh");
    command.arg(root().join("conformance/install/emulate.sh"));
    command.env("OVERLAY_OPTIONS", ",userxattr");
    command
}

/// A directory with these packages alone, for older ones may lie beside them, the action, and uv.
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
    let mut download = Command::new(build::venv_python());
    download.args(["-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]);
    succeed(download.args([UV, "--dest"]).arg(&dir))?;
    Ok(dir)
}

/// The root, made once for what is inside.
fn root_of(place: &Place, made: &Made, emulated: bool) -> anyhow::Result<PathBuf> {
    let roots = target().join("package-tests/roots");
    let name = format!("{}-{}", place.suite, place.include.replace(',', "-"));
    let name = format!("{name}-{}", made.machine.debian);
    let (done, fresh) = (roots.join(&name), roots.join(format!("{name}.new")));
    if done.exists() {
        return Ok(done);
    }
    remove(&fresh)?;
    fs::create_dir_all(&roots)?;
    let mut command = launcher(emulated);
    command.args(["mmdebstrap", "--quiet", "--variant=minbase", "--include", place.include]);
    if emulated {
        // A user namespace cannot mount it while the network is the machine's.
        command.arg("--skip=chroot/mount/sys");
    }
    command.args(["--architectures", made.machine.debian, place.suite]).arg(&fresh);
    command.arg(format!("deb http://deb.debian.org/debian {} main", place.suite));
    succeed(&mut command)?;
    fs::rename(&fresh, &done)?;
    Ok(done)
}

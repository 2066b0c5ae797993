//! `cargo xtask package`: the files that users install, in `target/package`.

mod aliases;
mod archive;
mod build;
mod crates;
mod deb;
mod debian_rust;
mod install_tests;
mod licences;
mod oci;
mod payload;
mod reproduce;
mod sbom;
mod tarball;
mod wheel;

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use self::archive::{hex, sha256};
use self::build::{Built, MACHINES, Machine};
use crate::conformance::Tally;
use crate::workspace::target;

/// The packages to make.
#[derive(Debug, Clone, Default, clap::Args)]
#[group(skip)]
pub(crate) struct Options {
    /// The machine that they are for, as Rust names it: x86_64-unknown-linux-gnu or aarch64-unknown-linux-gnu
    #[arg(long, value_name = "TRIPLE")]
    target: Option<String>,
    /// Install them in clean roots of Debian's releases, and use them there
    #[arg(long)]
    test: bool,
}

/// Makes every package. Without a target the tests are those of all machines that this one can run or emulate.
pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let machine = machine(options.target.as_deref())?;
    if !options.test {
        make(machine)?;
        return Ok(());
    }
    let tally = match options.target {
        Some(_) => run_counted_for(machine)?,
        None => run_counted()?,
    };
    println!("packages: {tally}");
    if tally.failed > 0 {
        bail!("{} of the install tests failed", tally.failed);
    }
    Ok(())
}

/// Makes the packages of this machine, which fails if one is too large or needs a newer C library.
pub(crate) fn make_own() -> anyhow::Result<()> {
    make(machine(None)?).map(drop)
}

/// Makes the packages of this machine and of those that it can emulate, and tests them. This machine's are made twice, and the
/// crates packed.
pub(crate) fn run_counted() -> anyhow::Result<Tally> {
    let own = machine(None)?;
    let made = make(own)?;
    let mut tally = install_tests::run_counted(&made)?;
    tally += reproduce::run_counted(&made)?;
    tally += crates::run_counted()?;
    for machine in MACHINES {
        if machine != own && install_tests::can_run(machine) {
            tally += run_counted_for(machine)?;
        }
    }
    Ok(tally)
}

fn run_counted_for(machine: Machine) -> anyhow::Result<Tally> {
    if !install_tests::can_run(machine) {
        bail!("this machine cannot run packages for {}", machine.triple);
    }
    install_tests::run_counted(&make(machine)?)
}

/// The packages of one kind of machine.
#[derive(Debug)]
struct Made {
    machine: Machine,
    /// The time of the files in archives.
    epoch: u64,
    files: Vec<PathBuf>,
}

fn make(machine: Machine) -> anyhow::Result<Made> {
    let built = build::build(machine)?;
    let one_file = payload::one_file(&built.anyverbs, &built.objects, &built.licences)?;
    let sbom = sbom::cyclonedx(machine, built.version)?;
    let stem = built.stem();
    let mut files = vec![
        (format!("{stem}.tar.gz"), tarball::make(&built, &sbom)?),
        (
            format!("{stem}-debug.tar.gz"),
            built.debug.tar_gz(&format!("{stem}-debug/"), built.epoch)?,
        ),
        (format!("{stem}.cdx.json"), sbom),
        (wheel::name(&built), wheel::make(&built, &one_file)?),
        (format!("{stem}.oci.tar"), oci::make(&built, &one_file)?),
    ];
    files.extend(deb::make(&built)?);
    // Last, for it is large and needed no more.
    files.push((stem, one_file));
    files.sort();
    write(&built, &files)
}

/// Writes the packages, and the digests of all of them.
fn write(built: &Built, files: &[(String, Vec<u8>)]) -> anyhow::Result<Made> {
    let dir = target().join("package");
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    let mut digests = String::new();
    let mut paths = Vec::new();
    for (name, bytes) in files {
        let path = dir.join(name);
        build::write(&path, bytes)?;
        if *name == built.stem() {
            fs::set_permissions(&path, fs::Permissions::from_mode(0o755))?;
        }
        println!("{:>9} {}", bytes.len(), path.display());
        digests += &format!("{}  {name}\n", hex(&sha256(bytes)));
        paths.push(path);
    }
    build::write(&dir.join(format!("SHA256SUMS-{}", built.machine.arch)), digests.as_bytes())?;
    Ok(Made { machine: built.machine, epoch: built.epoch, files: paths })
}

fn remove(dir: &Path) -> anyhow::Result<()> {
    if dir.exists() {
        fs::remove_dir_all(dir).with_context(|| format!("cannot remove {}", dir.display()))?;
    }
    Ok(())
}

fn machine(triple: Option<&str>) -> anyhow::Result<Machine> {
    let is_it = |machine: &&Machine| {
        triple.map_or(machine.arch == env::consts::ARCH, |triple| machine.triple == triple)
    };
    match MACHINES.iter().find(is_it) {
        Some(machine) => Ok(*machine),
        None => bail!(
            "there are packages for {} only",
            MACHINES.map(|machine| machine.triple).join(" and ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::root;

    #[test]
    fn cargo_binstall_is_told_the_name_of_the_one_file() {
        let text = fs::read_to_string(root().join("crates/cli/Cargo.toml")).unwrap();
        let manifest: toml::Table = toml::from_str(&text).unwrap();
        let told = &manifest["package"]["metadata"]["binstall"];
        for machine in MACHINES {
            let stem = build::stem("1.2.3", machine);
            let expand = |key: &str| {
                let text = told[key].as_str().unwrap();
                [
                    ("{ repo }", "https://example.com"),
                    ("{ version }", "1.2.3"),
                    ("{ target-arch }", machine.arch),
                ]
                .iter()
                .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
            };
            let url = format!("https://example.com/releases/download/v1.2.3/{stem}");
            assert_eq!(expand("pkg-url"), url);
        }
        assert_eq!(told["pkg-fmt"].as_str(), Some("bin"));
    }

    #[test]
    fn machines_are_known_by_rusts_names() {
        assert_eq!(machine(Some("aarch64-unknown-linux-gnu")).unwrap().debian, "arm64");
        assert!(machine(Some("riscv64gc-unknown-linux-gnu")).is_err());
    }
}

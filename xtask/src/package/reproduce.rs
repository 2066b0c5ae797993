//! Makes the packages a second time, from a copy of the source in another directory: the bytes must be the same.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use anyhow::Context;

use super::build::{output, read};
use super::{Made, remove};
use crate::conformance::Tally;
use crate::workspace::{cargo, root, succeed, target};

pub(super) fn run_counted(made: &Made) -> anyhow::Result<Tally> {
    let digests = format!("SHA256SUMS-{}", made.machine.arch);
    let first = read(&target().join("package").join(&digests))?;
    let place = target().join("package-tests/again");
    remove(&place)?;
    let source = place.join("source");
    fs::create_dir_all(&source).with_context(|| format!("cannot make {}", source.display()))?;
    // The first packages were made from the work tree, committed or not, so these are as well.
    let files = output(Command::new("git").current_dir(root()).args(["ls-files"]))?;
    for file in files.lines().filter(|file| root().join(file).exists()) {
        let to = source.join(file);
        let folder = to.parent().context("a file lies in a folder")?;
        fs::create_dir_all(folder)
            .and_then(|()| copy(&root().join(file), &to))
            .with_context(|| format!("cannot copy {file}"))?;
    }
    let built = place.join("target");
    let mut again = cargo();
    again.current_dir(&source).env("CARGO_TARGET_DIR", &built);
    again.env("SOURCE_DATE_EPOCH", made.epoch.to_string());
    again.args(["run", "--quiet", "--locked", "--package", "xtask", "--", "package"]);
    succeed(again.args(["--target", made.machine.triple]))?;
    let second = read(&built.join("package").join(&digests))?;
    if first == second {
        remove(&place)?;
        println!("ok   {} the same bytes again", made.machine.arch);
        return Ok(Tally { passed: 1, ..Tally::default() });
    }
    println!("FAIL {} other bytes (left in {})", made.machine.arch, place.display());
    for text in [first, second] {
        print!("{}", String::from_utf8_lossy(&text));
    }
    Ok(Tally { failed: 1, ..Tally::default() })
}

/// Copies a file, or a link as what it is: some lead to directories.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    if from.is_symlink() {
        return symlink(fs::read_link(from)?, to);
    }
    fs::copy(from, to).map(|_| ())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_a_directory_stays_one() {
        let dir = std::env::temp_dir().join(format!("anyverbs-reproduce-{}", std::process::id()));
        fs::create_dir_all(dir.join("pages")).unwrap();
        fs::write(dir.join("pages/one"), "text").unwrap();
        symlink("pages", dir.join("link")).unwrap();
        copy(&dir.join("link"), &dir.join("copied link")).unwrap();
        copy(&dir.join("pages/one"), &dir.join("copied file")).unwrap();
        assert_eq!(fs::read_link(dir.join("copied link")).unwrap(), Path::new("pages"));
        assert_eq!(fs::read_to_string(dir.join("copied link/one")).unwrap(), "text");
        assert_eq!(fs::read_to_string(dir.join("copied file")).unwrap(), "text");
        fs::remove_dir_all(dir).unwrap();
    }
}

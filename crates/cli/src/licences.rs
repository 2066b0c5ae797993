//! `anyverbs licenses`: the licences of the code of others. They are inside the command that is one file, and beside any other.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, bail};

use crate::embedded::{self, LICENCES};

/// Prints them.
pub(crate) fn print() -> anyhow::Result<ExitCode> {
    if let Some(text) = embedded::licences()? {
        return crate::write_out(&text);
    }
    let executable = env::current_exe().context("cannot find my own executable")?;
    let places = places(&executable);
    let Some(file) = places.iter().find(|file| file.is_file()) else {
        let places: Vec<_> = places.iter().map(|file| file.display().to_string()).collect();
        bail!(
            "this executable has no list of licences inside, and none is in {}: a build of cargo has none",
            places.join(" or ")
        );
    };
    let text = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    crate::write_out(&text)
}

/// The files in which packages have them: that of the archive, and that of Debian.
fn places(executable: &Path) -> Vec<PathBuf> {
    let prefix = executable.parent().and_then(Path::parent).unwrap_or(Path::new("/"));
    let folder = prefix.join("share/doc/anyverbs");
    [LICENCES, "copyright"].map(|name| folder.join(name)).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_where_the_packages_put_them() {
        let archive = places(Path::new("/home/me/.local/bin/anyverbs"));
        let file = "/home/me/.local/share/doc/anyverbs/THIRD-PARTY-LICENSES.txt";
        assert_eq!(archive[0], Path::new(file));
        let debian = places(Path::new("/usr/bin/anyverbs"));
        assert_eq!(debian[1], Path::new("/usr/share/doc/anyverbs/copyright"));
    }
}

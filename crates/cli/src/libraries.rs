//! The place of the shared objects for programs.

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::args::Settings;
use crate::embedded;

/// The preload object that shows the device in `/sys` and `/dev`.
pub(crate) const VIEW: &str = "libanyverbs_view.so";

/// The preload object that gives a program rsockets.
pub(crate) const RSPRELOAD: &str = "librspreload.so";

/// The device's library, preloaded for programs that bring a libibverbs of their own. It has the functions of librdmacm as well.
pub(crate) const PRELOAD: &str = "libibverbs.so.1";

/// The names that programs look for; all but the first are links to it.
pub(crate) const NAMES: &[&str] = &[
    "libibverbs.so.1",
    "libibverbs.so",
    "librdmacm.so.1",
    "librdmacm.so",
    "libmlx5.so.1",
    "libmlx4.so.1",
    "libefa.so.1",
];

/// The files behind all the names.
pub(crate) const OBJECTS: [&str; 3] = [NAMES[0], VIEW, RSPRELOAD];

/// Finds the directory: the one that the user named, else the one beside the executable, else the objects inside the
/// executable.
pub(crate) fn find(settings: &Settings) -> anyhow::Result<PathBuf> {
    let named = settings
        .lib_dir
        .clone()
        .or_else(|| anyverbs_environment::variable("ANYVERBS_LIB_DIR").map(PathBuf::from));
    if let Some(dir) = named {
        let dir = match dir.canonicalize() {
            Ok(dir) => dir,
            Err(error) => bail!(
                "the library directory {} cannot be used ({error}); name another with --lib-dir or ANYVERBS_LIB_DIR, or none",
                dir.display()
            ),
        };
        check(&dir)?;
        return Ok(dir);
    }
    let executable = env::current_exe()
        .and_then(|path| path.canonicalize())
        .context("cannot find my own executable")?;
    let candidates = candidates(&executable);
    match candidates.iter().find(|dir| dir.join(VIEW).exists()) {
        Some(dir) => {
            let dir =
                dir.canonicalize().with_context(|| format!("cannot enter {}", dir.display()))?;
            check(&dir)?;
            Ok(dir)
        }
        None => match embedded::find(&executable)? {
            Some(dir) => Ok(dir),
            None => bail!(
                "no library directory (looked in {}); install anyverbs again, run `cargo xtask dist` in a checkout, or set ANYVERBS_LIB_DIR",
                candidates
                    .iter()
                    .map(|dir| dir.display().to_string())
                    .collect::<Vec<_>>()
                    .join(", ")
            ),
        },
    }
}

/// An installation has `bin/anyverbs` and `lib/` or `lib/anyverbs/`; a build has `target/<profile>/anyverbs` and
/// `target/dist/lib`.
fn candidates(executable: &Path) -> Vec<PathBuf> {
    let Some(above) = executable.parent().and_then(Path::parent) else {
        return Vec::new();
    };
    ["lib", "lib/anyverbs", "dist/lib"].map(|dir| above.join(dir)).into()
}

/// The files that the directory should have, and has not.
pub(crate) fn missing(dir: &Path) -> Vec<&'static str> {
    NAMES.iter().chain(&OBJECTS[1..]).copied().filter(|name| !dir.join(name).exists()).collect()
}

/// Fails if one of the shared objects is missing.
fn check(dir: &Path) -> anyhow::Result<()> {
    let missing = missing(dir);
    if !missing.is_empty() {
        bail!(
            "{} is incomplete, without {}; install anyverbs again, or run `cargo xtask dist` in a checkout",
            dir.display(),
            missing.join(", ")
        );
    }
    check_name(dir)
}

/// Fails if a list of the loader cannot hold the name.
pub(crate) fn check_name(dir: &Path) -> anyhow::Result<()> {
    // The loader separates both lists with colons, and LD_PRELOAD with spaces too; neither has an escape.
    if dir.as_os_str().as_encoded_bytes().iter().any(|byte| b": ;\t\n".contains(byte)) {
        bail!(
            "the loader cannot use {:?}: its name has a space, a colon or a semicolon; move it to a place without them",
            dir
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn scratch(name: &str) -> PathBuf {
        let dir = env::temp_dir().join(format!("anyverbs-libraries-{}-{name}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn an_incomplete_directory_is_named() {
        let dir = scratch("incomplete");
        fs::write(dir.join("libibverbs.so.1"), "").unwrap();
        let settings = Settings { lib_dir: Some(dir.clone()), ..Settings::default() };
        let error = find(&settings).unwrap_err().to_string();
        assert!(
            error.contains("librdmacm.so.1")
                && error.contains(VIEW)
                && !error.contains("libibverbs.so.1,"),
            "{error}"
        );
        for name in NAMES.iter().chain([&VIEW, &RSPRELOAD]) {
            fs::write(dir.join(name), "").unwrap();
        }
        assert_eq!(find(&settings).unwrap(), dir.canonicalize().unwrap());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_name_that_the_loader_would_split_is_refused() {
        let dir = scratch("with space");
        for name in NAMES.iter().chain([&VIEW, &RSPRELOAD]) {
            fs::write(dir.join(name), "").unwrap();
        }
        let settings = Settings { lib_dir: Some(dir.clone()), ..Settings::default() };
        assert!(find(&settings).is_err());
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn both_layouts_are_looked_for() {
        let dirs = candidates(Path::new("/opt/target/debug/anyverbs"));
        assert!(dirs.contains(&PathBuf::from("/opt/target/lib")));
        assert!(dirs.contains(&PathBuf::from("/opt/target/dist/lib")));
    }
}

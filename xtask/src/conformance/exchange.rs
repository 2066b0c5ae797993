//! `conformance/c/exchange*.c`: two of them exercise all verbs between each other, and check every byte.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;

use super::process::quiet;
use crate::{packages, workspace};

/// Compiles it into a folder, against the system's headers.
pub(super) fn build(folder: &Path) -> anyhow::Result<PathBuf> {
    let sources = [
        "exchange.c",
        "exchange_side.c",
        "exchange_reliable.c",
        "exchange_unreliable.c",
        "waited.c",
    ];
    compile(folder, "exchange", &sources)
}

/// Compiles a program of `conformance/c`.
pub(super) fn compile(folder: &Path, name: &str, sources: &[&str]) -> anyhow::Result<PathBuf> {
    packages::ensure(&[packages::CC, packages::LIBC6_DEV, packages::LIBIBVERBS_DEV])?;
    let program = folder.join(name);
    let from = workspace::root().join("conformance/c");
    let mut compile = Command::new("cc");
    compile.args(["-Wall", "-Wextra", "-Werror", "-D_GNU_SOURCE", "-O2", "-o"]).arg(&program);
    compile.args(sources.iter().map(|source| from.join(source)));
    quiet(compile.arg("-libverbs")).with_context(|| format!("{name} does not compile"))?;
    Ok(program)
}

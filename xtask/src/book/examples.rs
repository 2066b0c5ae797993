//! The programs to begin with, and the README: short, and run.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use super::blocks::{self, Kind};
use super::{pages, run};

/// Lines that nobody minds reading.
const LONG: usize = 150;

/// Examples that are long or that no page runs, and a long README.
pub(super) fn faulty(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut commands = String::new();
    for page in run::pages_of(root)? {
        let text = fs::read_to_string(root.join(&page))
            .with_context(|| format!("cannot read {}", page.display()))?;
        for block in blocks::of(&text).into_iter().filter(|block| block.kind == Kind::Run) {
            commands.push_str(&block.text);
            commands.push('\n');
        }
    }
    let mut programs = Vec::new();
    for kind in ["c", "py", "rs"] {
        pages::below(root, Path::new("examples"), kind, &mut programs)?;
    }
    programs.retain(|program| !is_test(program));
    let mut faults: Vec<_> = programs
        .iter()
        .filter(|program| !is_run(program, &commands))
        .map(|program| format!("no page runs {}", program.display()))
        .collect();
    programs.push(PathBuf::from("README.md"));
    for file in programs {
        let text = fs::read_to_string(root.join(&file))
            .with_context(|| format!("cannot read {}", file.display()))?;
        let lines = text.lines().count();
        if lines > LONG {
            faults.push(format!("{} has {lines} lines, more than {LONG}", file.display()));
        }
    }
    Ok(faults)
}

/// Whether it is a test, which runs with those of the workspace.
fn is_test(program: &Path) -> bool {
    program.parent().is_some_and(|folder| folder.ends_with("tests"))
}

/// Whether a command has the program, or what is built from it, among its words.
fn is_run(program: &Path, commands: &str) -> bool {
    commands.split_whitespace().map(Path::new).any(|word| {
        word == program
            || (word.starts_with("target/debug") && word.file_name() == program.file_stem())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_test_is_no_example() {
        assert!(is_test(Path::new("examples/rust/tests/mistakes.rs")));
        assert!(!is_test(Path::new("examples/rust/src/bin/tests.rs")));
    }

    #[test]
    fn a_program_is_run_by_its_name_or_as_built() {
        let commands = "cc -o target/x examples/c/x.c\ntarget/debug/kv serve 2\n";
        assert!(is_run(Path::new("examples/c/x.c"), commands));
        assert!(is_run(Path::new("examples/rust/src/bin/kv.rs"), commands));
        assert!(!is_run(Path::new("examples/c/y.c"), commands));
        assert!(!is_run(Path::new("examples/rust/src/bin/serve.rs"), commands));
    }
}

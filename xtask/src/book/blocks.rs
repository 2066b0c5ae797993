//! Code blocks of a page that a test looks at.
//!
//! - ` ```sh run `: the commands are run, in the order of the page, in the checkout.
//! - ` ```text output `: what the block before it prints, among other lines; `...` stands for anything.
//! - ` ```c from FILE ` (or another language): the lines stand in the file, one after the other.
//!
//! A block of ` ```sh ` alone is not run. `UNRUN` says why.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

/// Blocks of commands that no test runs as they stand: the page, how the block begins, and the reason.
const UNRUN: [(&str, &str, &str); 20] = [
    ("README.md", "cargo xtask package", "`cargo xtask test` makes the packages"),
    ("README.md", "anyverbs run -- cargo test", "the crate is the reader's"),
    ("README.md", "cargo xtask demo", "takes half an hour, and is the test itself"),
    ("docs/packaging.md", "sudo anyverbs cdi", "needs Podman: conformance/install/podman.sh"),
    ("docs/performance.md", "cargo xtask bench  ", "takes 20 minutes of an idle machine"),
    ("docs/probes.md", "# Time from posting", "needs bpftrace, and a kernel with uprobes"),
    ("docs/recipes/cargo-test.md", "anyverbs run -- cargo test", "the crate is the reader's"),
    (
        "docs/recipes/ceph.md",
        "anyverbs run -- ceph-mon",
        "the next block of the page is a script that does it",
    ),
    ("docs/recipes/ceph.md", "conformance/programs/ceph.sh", "needs Ceph, and namespaces of root"),
    ("docs/recipes/containers.md", "docker run", "needs Docker: conformance/install/docker.sh"),
    (
        "docs/recipes/containers.md",
        "sudo anyverbs cdi",
        "needs Podman: conformance/install/podman.sh",
    ),
    ("docs/recipes/kubernetes.md", "tar xzf", "needs Docker, kind and kubectl"),
    ("docs/recipes/mooncake.md", "pip install", "needs the network: conformance/programs/wheel.sh"),
    (
        "docs/recipes/mpi.md",
        "UCX_TLS=rc,self anyverbs",
        "the program is the reader's; `xtask conformance mpi4py`",
    ),
    (
        "docs/recipes/mpi.md",
        "conformance/programs/mpi_sizes.sh",
        "needs MPI's compiler, and namespaces of root",
    ),
    ("docs/recipes/nccl.md", "NCCL_IB_HCA=", "the program is the reader's, and needs a GPU"),
    ("docs/recipes/nixl.md", "anyverbs doctor", "needs the network: conformance/programs/wheel.sh"),
    ("docs/recipes/valkey.md", "make BUILD_RDMA=yes", "needs the source of Valkey"),
    (
        "docs/reliability.md",
        "ANYVERBS_FAULT_ROUNDS",
        "takes ten minutes; the tests run fewer rounds",
    ),
    (
        "docs/tutorial/python.md",
        "python3 -m venv",
        "needs the network: conformance/install/wheel.sh",
    ),
];

/// A code block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Block {
    /// Its first line in the page.
    pub(super) line: usize,
    pub(super) kind: Kind,
    pub(super) text: String,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Run,
    Output,
    From(String),
    /// Commands without a mark.
    Unrun,
}

/// The blocks of a page that are marked, and those of commands.
pub(super) fn of(page: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        let Some(info) = line.trim_start().strip_prefix("```") else { continue };
        let words: Vec<_> = info.split_whitespace().collect();
        let body: Vec<_> = lines
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| !line.trim_start().starts_with("```"))
            .collect();
        let kind = match words[..] {
            [_, "run"] => Kind::Run,
            [_, "output"] => Kind::Output,
            [_, "from", file] => Kind::From(file.to_owned()),
            ["sh" | "bash" | "shell" | "console"] => Kind::Unrun,
            _ => continue,
        };
        blocks.push(Block { line: number + 1, kind, text: body.join("\n") });
    }
    blocks
}

/// Excerpts that do not stand in the file that they name.
pub(super) fn strange_excerpts(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut strange = Vec::new();
    for page in super::run::pages_of(root)? {
        let text = fs::read_to_string(root.join(&page))
            .with_context(|| format!("cannot read {}", page.display()))?;
        for block in of(&text) {
            let Kind::From(file) = &block.kind else { continue };
            let place = format!("{}:{}", page.display(), block.line);
            match fs::read_to_string(root.join(file)) {
                Ok(source) if stands_in(&block.text, &source) => {}
                Ok(_) => strange.push(format!("{place}: not in {file}")),
                Err(error) => strange.push(format!("{place}: {file}: {error}")),
            }
        }
    }
    Ok(strange)
}

/// Commands that are not run without a reason, reasons without such commands, and output of no command that is run.
pub(super) fn unrun_without_reason(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut faults = Vec::new();
    let mut reasons = UNRUN.to_vec();
    for page in super::run::pages_of(root)? {
        let text = fs::read_to_string(root.join(&page))
            .with_context(|| format!("cannot read {}", page.display()))?;
        let blocks = of(&text);
        let runs =
            blocks.iter().find(|block| block.kind == Kind::Run).map_or(usize::MAX, |b| b.line);
        let output = blocks.iter().filter(|b| b.kind == Kind::Output && b.line < runs);
        faults.extend(output.map(|b| format!("{}:{}: what prints it?", page.display(), b.line)));
        for block in blocks.into_iter().filter(|block| block.kind == Kind::Unrun) {
            let is_of = |&(its, start, _): &(&str, &str, &str)| {
                Path::new(its) == page && block.text.trim_start().starts_with(start)
            };
            match reasons.iter().position(is_of) {
                Some(at) => drop(reasons.swap_remove(at)),
                None => faults.push(format!(
                    "{}:{}: mark it as `sh run`, or say in UNRUN why it is not run",
                    page.display(),
                    block.line
                )),
            }
        }
    }
    faults.extend(reasons.iter().map(|(page, start, _)| format!("UNRUN: {page} has no {start:?}")));
    Ok(faults)
}

/// Commands that write where a reader has no place yet.
pub(super) fn without_place(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut without = Vec::new();
    for page in super::run::pages_of(root)? {
        let text = fs::read_to_string(root.join(&page))
            .with_context(|| format!("cannot read {}", page.display()))?;
        let faults = places_missing(&text).into_iter();
        without.extend(faults.map(|(line, fault)| format!("{}:{line}: {fault}", page.display())));
    }
    Ok(without)
}

/// A checkout has no `target`, and a reader may begin at any section. A name in `/tmp` may be another user's.
fn places_missing(page: &str) -> Vec<(usize, &'static str)> {
    // What builds into `target/debug` makes it, and what runs from there was built before.
    const MAKES: [&str; 4] =
        ["mkdir -p target", "cargo build", "target/debug/", "anyverbs run -- target/"];
    let headings: Vec<_> =
        (1..).zip(page.lines()).filter(|(_, line)| line.starts_with("## ")).collect();
    let section = |line| headings.iter().take_while(|(heading, _)| *heading < line).count();
    let (mut faults, mut made) = (Vec::new(), None);
    for block in of(page).into_iter().filter(|block| block.kind == Kind::Run) {
        for (line, command) in (block.line + 1..).zip(block.text.lines()) {
            if command.contains("/tmp/") {
                faults.push((line, "a fixed name in /tmp"));
            }
            let section = Some(section(line));
            if MAKES.iter().any(|start| command.starts_with(start)) {
                made = section;
            } else if command.contains("target/") && made != section {
                faults.push((line, "no `target` yet: mkdir -p target"));
                made = section;
            }
        }
    }
    faults
}

/// Whether the lines stand in a file together. Indentation does not count.
fn stands_in(excerpt: &str, source: &str) -> bool {
    fn plain(text: &str) -> Vec<&str> {
        text.lines().map(str::trim).collect()
    }
    let (excerpt, source) = (plain(excerpt), plain(source));
    !excerpt.is_empty() && source.windows(excerpt.len()).any(|lines| lines == excerpt)
}

/// Whether all lines of `wanted` are in `output`, in this order.
pub(super) fn check_output(wanted: &str, output: &str) -> anyhow::Result<()> {
    let mut lines = output.lines();
    for line in wanted.lines().map(str::trim).filter(|line| !line.is_empty() && *line != "...") {
        if !lines.any(|said| matches(line, said.trim())) {
            bail!("it did not print {line:?}");
        }
    }
    Ok(())
}

/// Whether a line is as wanted, where `...` stands for anything.
fn matches(wanted: &str, line: &str) -> bool {
    let mut parts = wanted.split("...");
    let first = parts.next().unwrap_or_default();
    let Some(mut rest) = line.strip_prefix(first) else { return false };
    let mut open = false;
    for part in parts {
        open = true;
        match rest.find(part) {
            Some(at) => rest = &rest[at + part.len()..],
            None => return false,
        }
    }
    rest.is_empty() || (open && wanted.ends_with("..."))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_blocks_are_found() {
        let page = "a\n```sh run\necho 1\n```\n```sh\nnot me\n```\n```c from x.c\nint i;\n```\n";
        let blocks = of(page);
        assert_eq!(blocks.len(), 3);
        assert_eq!((blocks[0].line, &blocks[0].kind, &*blocks[0].text), (2, &Kind::Run, "echo 1"));
        assert_eq!((blocks[1].line, &blocks[1].kind), (5, &Kind::Unrun));
        assert_eq!(blocks[2].kind, Kind::From("x.c".into()));
    }

    #[test]
    fn commands_are_run_or_have_a_reason() {
        let root = std::env::temp_dir().join(format!("anyverbs-unrun-{}", std::process::id()));
        fs::create_dir_all(root.join("docs")).unwrap();
        fs::write(root.join("README.md"), "```sh\nanyverbs run -- cargo test\n```\n").unwrap();
        fs::write(root.join("docs/a.md"), "```sh run\nx\n```\n```sh\nx\n```\n").unwrap();
        fs::write(root.join("docs/b.md"), "```text output\ny\n```\n```sh run\nx\n```\n").unwrap();
        let faults = unrun_without_reason(&root).unwrap();
        let (missing, stale): (Vec<_>, Vec<_>) =
            faults.into_iter().partition(|fault| !fault.starts_with("UNRUN"));
        assert_eq!(
            missing,
            [
                "docs/a.md:4: mark it as `sh run`, or say in UNRUN why it is not run",
                "docs/b.md:1: what prints it?"
            ]
        );
        assert_eq!(stale.len(), UNRUN.len() - 1, "{stale:?}");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn output_is_compared_in_order() {
        let output = "start\n  took 1.5 us each\nend\n";
        check_output("took ... us each\nend", output).unwrap();
        check_output("start\n...\nend", output).unwrap();
        for wrong in ["end\nstart", "took 2", "took ... us", "other ..."] {
            assert!(check_output(wrong, output).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_section_makes_the_directory_that_it_writes_to() {
        let page = "# One\n```sh run\nmkdir -p target\ncc -o target/a\n```\n\
                    ## Two\n```sh run\nhead > target/b\ncc -o target/c\n```\n\
                    ## Three\n```sh run\ncargo build --bin d\ntarget/debug/d > target/e\n```\n";
        assert_eq!(places_missing(page), [(8, "no `target` yet: mkdir -p target")]);
        let page = "```sh run\necho > /tmp/a\n```\n";
        assert_eq!(places_missing(page), [(2, "a fixed name in /tmp")]);
    }

    #[test]
    fn an_excerpt_is_whole_lines_that_follow_each_other() {
        let source = "int main(void)\n{\n\treturn 0;\n}\n";
        assert!(stands_in("{\n  return 0;", source));
        assert!(!stands_in("int main(void)\n}", source));
        assert!(!stands_in("", source));
    }
}

//! Code blocks of a page that a test looks at.
//!
//! - ` ```sh run `: the commands are run, in the order of the page, in the checkout.
//! - ` ```text output `: what the block before it prints, among other lines; `...` stands for anything.
//! - ` ```c from FILE ` (or another language): the lines stand in the file, one after the other.

use std::fs;
use std::path::Path;

use anyhow::{Context, bail};

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
}

/// The blocks of a page that are marked.
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
        assert_eq!(blocks.len(), 2);
        assert_eq!((blocks[0].line, &blocks[0].kind, &*blocks[0].text), (2, &Kind::Run, "echo 1"));
        assert_eq!(blocks[1].kind, Kind::From("x.c".into()));
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

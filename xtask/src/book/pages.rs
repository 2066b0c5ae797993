//! Links and the table of contents.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::Context;

/// Pages outside of the book whose links are checked as well.
const BESIDE: [&str; 5] =
    ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"];

/// The pages of the book, and those beside it, by their names from `root`.
fn all(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut pages = BESIDE.map(PathBuf::from).to_vec();
    below(root, Path::new("docs"), "md", &mut pages)?;
    pages.sort();
    Ok(pages)
}

/// Adds the files of one kind in `dir` and below it, by their names from `root`.
pub(super) fn below(
    root: &Path,
    dir: &Path,
    kind: &str,
    files: &mut Vec<PathBuf>,
) -> anyhow::Result<()> {
    let entries = fs::read_dir(root.join(dir));
    for entry in entries.with_context(|| format!("cannot read {}", dir.display()))? {
        let entry = entry?;
        let path = dir.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            below(root, &path, kind, files)?;
        } else if path.extension().is_some_and(|its| its == kind) {
            files.push(path);
        }
    }
    Ok(())
}

/// The targets of a page's links, with their lines; those in code are none.
pub(super) fn links(text: &str) -> Vec<(usize, String)> {
    let mut links = Vec::new();
    let (mut in_block, mut in_code) = (false, false);
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            (in_block, in_code) = (!in_block, false);
            continue;
        }
        if in_block {
            continue;
        }
        // Code that begins on one line may end on the next, but not in another paragraph or row.
        in_code &= !line.trim().is_empty() && !line.starts_with('|');
        for (at, part) in line.split('`').enumerate() {
            in_code ^= at > 0;
            if in_code {
                continue;
            }
            for (at, _) in part.match_indices("](") {
                let target = part[at + 2..].split([')', ' ']).next().unwrap_or_default();
                links.push((number + 1, target.to_owned()));
            }
        }
    }
    links
}

/// Whether a target is outside of the repository.
fn is_elsewhere(target: &str) -> bool {
    target.contains("://") || target.starts_with("mailto:")
}

/// Links to files or headings that do not exist. Links to other sites are not followed.
pub(super) fn broken_links(root: &Path) -> anyhow::Result<Vec<String>> {
    let mut broken = Vec::new();
    for page in all(root)? {
        let text = fs::read_to_string(root.join(&page))
            .with_context(|| format!("cannot read {}", page.display()))?;
        for (line, target) in links(&text) {
            if is_elsewhere(&target) {
                continue;
            }
            let (file, heading) = match target.split_once('#') {
                Some((file, heading)) => (file, Some(heading)),
                None => (target.as_str(), None),
            };
            let folder = page.parent().unwrap_or(Path::new(""));
            let path = if file.is_empty() { page.clone() } else { flat(&folder.join(file)) };
            let fault = if !root.join(&path).exists() {
                Some("does not exist")
            } else if heading.is_some_and(|heading| !has_heading(&root.join(&path), heading)) {
                Some("has no such heading")
            } else {
                None
            };
            if let Some(fault) = fault {
                broken.push(format!("{}:{line}: {target} {fault}", page.display()));
            }
        }
    }
    Ok(broken)
}

/// A path without `..` and `.`.
fn flat(path: &Path) -> PathBuf {
    let mut flat = PathBuf::new();
    for component in path.components() {
        match component {
            Component::ParentDir => {
                flat.pop();
            }
            Component::CurDir => {}
            other => flat.push(other),
        }
    }
    flat
}

fn has_heading(page: &Path, wanted: &str) -> bool {
    let text = fs::read_to_string(page).unwrap_or_default();
    text.lines().filter(|line| line.starts_with('#')).any(|line| slug(line) == wanted)
}

/// The anchor of a heading, as GitHub and mdBook make it.
fn slug(heading: &str) -> String {
    let text = heading.trim_start_matches('#').trim().to_lowercase();
    text.chars()
        .filter_map(|c| match c {
            ' ' => Some('-'),
            c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c),
            _ => None,
        })
        .collect()
}

/// Pages below `docs/` that `docs/SUMMARY.md` does not name.
pub(super) fn unlisted(root: &Path) -> anyhow::Result<Vec<String>> {
    let summary =
        fs::read_to_string(root.join("docs/SUMMARY.md")).context("cannot read docs/SUMMARY.md")?;
    let listed: BTreeSet<_> =
        links(&summary).into_iter().map(|(_, page)| Path::new("docs").join(page)).collect();
    let mut pages = Vec::new();
    below(root, Path::new("docs"), "md", &mut pages)?;
    pages.retain(|page| !page.ends_with("SUMMARY.md") && !listed.contains(page));
    Ok(pages.iter().map(|page| format!("{} is not in docs/SUMMARY.md", page.display())).collect())
}

/// The text of a page in `folder`, with links that leave `docs/` led to `repository`.
pub(super) fn with_links_of_the_repository(text: &str, folder: &Path, repository: &str) -> String {
    let mut lines: Vec<_> = text.split_inclusive('\n').map(str::to_owned).collect();
    for (number, target) in links(text) {
        let path = flat(&folder.join(&target));
        if !is_elsewhere(&target) && target.starts_with("..") && !path.starts_with("docs") {
            let there = format!("]({repository}/{}", path.display());
            let line = &mut lines[number - 1];
            *line = line.replace(&format!("]({target}"), &there);
        }
    }
    lines.concat()
}

/// The text of a page that goes elsewhere with the files of `beside` alone. Links to others lead to `repository`.
pub(crate) fn with_absolute_links(text: &str, beside: &[&str], repository: &str) -> String {
    let mut lines: Vec<_> = text.split_inclusive('\n').map(str::to_owned).collect();
    for (number, target) in links(text) {
        let file = target.split('#').next().unwrap_or_default();
        if !file.is_empty() && !is_elsewhere(&target) && !beside.contains(&file) {
            let line = &mut lines[number - 1];
            *line = line.replace(&format!("]({target})"), &format!("]({repository}/{target})"));
        }
    }
    lines.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_in_code_are_none() {
        let text = "[a](b.md#c) and `x[i](j)`\n```sh\n[no](no.md)\n```\n![p](q.svg \"t\")\n";
        assert_eq!(links(text), [(1, "b.md#c".into()), (5, "q.svg".into())]);
        let text = "a `word\nx[i](j)` [a](b.md)\n\n[c](d.md) a ` alone\n| [e](f.md) |\n";
        let links: Vec<_> = links(text).into_iter().map(|(_, target)| target).collect();
        assert_eq!(links, ["b.md", "d.md", "f.md"]);
    }

    #[test]
    fn headings_have_the_anchors_of_github() {
        assert_eq!(
            slug("## The `anyverbs run` command, and more"),
            "the-anyverbs-run-command-and-more"
        );
    }

    #[test]
    fn missing_files_headings_and_pages_are_found() {
        let root = std::env::temp_dir().join(format!("anyverbs-book-{}", std::process::id()));
        fs::create_dir_all(root.join("docs/part")).unwrap();
        for page in BESIDE {
            fs::write(root.join(page), "# Title\n").unwrap();
        }
        fs::write(root.join("docs/SUMMARY.md"), "[One](part/one.md)\n").unwrap();
        let page = "[up](../../README.md#title) [no](../none.md) [bad](../../README.md#other)\n";
        fs::write(root.join("docs/part/one.md"), page).unwrap();
        fs::write(root.join("docs/two.md"), "text\n").unwrap();
        let broken = broken_links(&root).unwrap();
        assert_eq!(
            broken,
            [
                "docs/part/one.md:1: ../none.md does not exist",
                "docs/part/one.md:1: ../../README.md#other has no such heading",
            ]
        );
        assert_eq!(unlisted(&root).unwrap(), ["docs/two.md is not in docs/SUMMARY.md"]);
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn links_to_what_is_not_there_lead_to_the_repository() {
        let text = "[a](docs/a.md#x) [b](#b)\n[c](CHANGES.md#1) [d](https://d) [a](docs/a.md)\n";
        assert_eq!(
            with_absolute_links(text, &["CHANGES.md"], "https://r"),
            "[a](https://r/docs/a.md#x) [b](#b)\n\
             [c](CHANGES.md#1) [d](https://d) [a](https://r/docs/a.md)\n"
        );
    }

    #[test]
    fn links_that_leave_the_book_lead_to_the_repository() {
        let text = "[a](../README.md#x) [b](../docs/c.md) [d](e.md)\n";
        assert_eq!(
            with_links_of_the_repository(text, Path::new("docs"), "https://r"),
            "[a](https://r/README.md#x) [b](../docs/c.md) [d](e.md)\n"
        );
    }
}

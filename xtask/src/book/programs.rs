//! The table of programs that run, and the scripts that run them.

use std::fs;
use std::path::Path;

use anyhow::Context;

use super::pages;

const PAGE: &str = "docs/programs.md";

/// Scripts that others read, and that run no program themselves.
const PARTS: [&str; 1] = ["hosts.sh"];

/// A row of a table.
#[derive(Debug)]
struct Row {
    line: usize,
    /// The heading of its section.
    section: String,
    /// What stands between the heading and the table.
    introduction: String,
    cells: Vec<String>,
}

impl Row {
    fn text(&self) -> String {
        format!("{} {}", self.introduction, self.cells.join(" "))
    }

    /// The first package that it names.
    fn package(&self) -> &str {
        codes(&self.cells[0]).first().copied().unwrap_or_default()
    }
}

/// The rows that a script stands behind.
fn rows(page: &str) -> Vec<Row> {
    let (mut section, mut introduction, mut rows) = (String::new(), String::new(), Vec::new());
    for (line, text) in (1..).zip(page.lines()) {
        if let Some(heading) = text.strip_prefix('#') {
            (section, introduction) =
                (heading.trim_start_matches(['#', ' ']).to_owned(), String::new());
        } else if let Some(row) = text.strip_prefix('|') {
            let cells: Vec<_> = row.split('|').map(|cell| cell.trim().to_owned()).collect();
            let is_head =
                cells.get(1).is_some_and(|cell| cell == "version" || cell.starts_with("---"));
            if !is_head && section != "Untried" {
                rows.push(Row {
                    line,
                    section: section.clone(),
                    introduction: introduction.clone(),
                    cells,
                });
            }
        } else {
            introduction.push_str(text);
            introduction.push(' ');
        }
    }
    rows
}

/// The words in code.
fn codes(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// A script without what its language has beside the words of a command.
fn words(script: &str) -> String {
    let one_line = script.replace("\\\n", " ").replace("\": \"", "=");
    // The runner makes an option of the key.
    let one_line = one_line.replace("sockets = true", "anyverbs run --sockets");
    let kept: String = one_line.chars().filter(|c| !"\"',".contains(*c)).collect();
    kept.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ") + "\n").collect()
}

/// The number before " processes".
fn processes(text: &str) -> Option<String> {
    let (before, _) = text.split_once(" processes")?;
    let word = before.split_whitespace().last()?.to_lowercase();
    let spelled = ["one", "two", "three", "four"];
    Some(spelled.iter().position(|name| *name == word).map_or(word, |at| (at + 1).to_string()))
}

/// The numbers of processes in the commands of MPI.
fn processes_of_mpi(script: &str) -> Vec<String> {
    let numbers = script.lines().filter_map(|line| {
        let (_, options) = line.split_once("mpiexec").or_else(|| line.split_once("mpirun"))?;
        let (_, rest) = options.split_once(" -n ")?;
        rest.split_whitespace().next().map(str::to_owned)
    });
    numbers.collect()
}

/// Rows of the table that differ from their scripts, and scripts without a row.
pub(super) fn strange(root: &Path) -> anyhow::Result<Vec<String>> {
    let read = |path: &Path| {
        fs::read_to_string(root.join(path))
            .with_context(|| format!("cannot read {}", path.display()))
    };
    let page = read(Path::new(PAGE))?;
    let mut all = String::new();
    let mut faults = Vec::new();
    let table = read(Path::new("conformance/programs.toml"))?;
    for kind in ["sh", "py", "toml"] {
        let mut files = Vec::new();
        pages::below(root, Path::new("conformance"), kind, &mut files)?;
        files.sort();
        for file in files {
            all += &read(&file)?;
            let name = file.file_name().map_or_else(String::new, |name| name.display().to_string());
            let runs =
                kind == "sh" && !PARTS.contains(&&*name) || table.contains(&format!("\"{name}\""));
            if file.starts_with("conformance/programs")
                && runs
                && !page.contains(&format!("/{name})"))
            {
                faults.push(format!("{PAGE} has no row with {}", file.display()));
            }
        }
    }
    for row in rows(&page) {
        let mut expect = |is_right: bool, what: String| {
            if !is_right {
                faults.push(format!("{PAGE}:{}: {what}", row.line));
            }
        };
        let [_, version, set, result, ..] = &row.cells[..] else {
            expect(false, "it has too few columns".into());
            continue;
        };
        let (mut scripts, mut started) = (String::new(), Vec::new());
        for (_, target) in pages::links(&row.text()) {
            if let Some(file) =
                target.strip_prefix("../conformance/").filter(|file| file.contains('.'))
            {
                let script = words(&read(&Path::new("conformance").join(file))?);
                started.extend(processes_of_mpi(&script));
                scripts += &script;
            }
        }
        if result.starts_with("cannot") {
            continue;
        }
        for code in codes(set) {
            let wanted = words(code);
            expect(scripts.contains(wanted.trim()), format!("no script of it has {code:?}"));
        }
        if let Some(number) = processes(&row.text()) {
            let wrong: Vec<_> = started.iter().filter(|its| **its != number).collect();
            expect(
                wrong.is_empty(),
                format!("{number} processes, and its script starts {wrong:?}"),
            );
        }
        if row.section.contains("Debian") {
            continue;
        }
        let package = row.package();
        let is_named =
            ["==", "@"].iter().any(|is| all.contains(&format!("{package}{is}{version}")));
        expect(is_named, format!("no script has version {version} of {package}"));
        if row.section == "Crates" {
            let is_example = |code: &&str| code.chars().all(|c| c.is_ascii_lowercase() || c == '_');
            for example in codes(result).into_iter().filter(is_example) {
                let command = format!("cargo run --example {example}");
                expect(scripts.contains(&command), format!("no script has `{command}`"));
            }
        }
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_differ_from_their_scripts_are_told() {
        let root = std::env::temp_dir().join(format!("anyverbs-programs-{}", std::process::id()));
        fs::create_dir_all(root.join("docs")).unwrap();
        fs::create_dir_all(root.join("conformance/programs")).unwrap();
        let write = |name: &str, text: &str| fs::write(root.join(name), text).unwrap();
        write("conformance/programs.toml", "script = \"b.py\"\n");
        write("conformance/programs/hosts.sh", "");
        write("conformance/programs/a.sh", "pip install a==1\nA=1 mpiexec \\\n -n 3 a\n");
        write("conformance/programs/b.py", "run(\"--to\", \"b\")\ncargo run --example ping\nb@2\n");
        write("conformance/programs/part.py", "");
        let page = |a: &str, b: &str| {
            let head = "| package | version | set | result |\n|---|---|---|---|\n";
            let text = format!(
                "## Wheels\n[a](../conformance/programs/a.sh)\n{head}{a}\n\
                 ## Crates\n[b](../conformance/programs/b.py)\n{head}{b}\n## Untried\n{head}| `c` | x | y | z |\n"
            );
            write(PAGE, &text);
            strange(&root).unwrap()
        };
        let (a, b) =
            ("| `a` | 1 | `A=1` | passes, 3 processes |", "| `b` | 2 | `--to b` | `ping` passes |");
        assert!(page(a, b).is_empty(), "{:?}", page(a, b));
        for (from, to) in [("`A=1`", "`A=2`"), ("| 1 |", "| 2 |"), ("3", "two")] {
            assert_eq!(page(&a.replace(from, to), b).len(), 1, "{to}");
        }
        for (from, to) in [("--to b", "--to c"), ("| 2 |", "| 3 |"), ("ping", "pong")] {
            assert_eq!(page(a, &b.replace(from, to)).len(), 1, "{to}");
        }
        write("conformance/programs/c.sh", "");
        assert_eq!(page(a, b), ["docs/programs.md has no row with conformance/programs/c.sh"]);
        fs::remove_dir_all(root).unwrap();
    }
}

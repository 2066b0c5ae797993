//! Help texts, manual pages and completions.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::process::{Command, Output};

/// All commands that users see, and those with a longer form.
const COMMANDS: [&str; 15] = [
    "run",
    "devices",
    "doctor",
    "explain",
    "licenses",
    "top",
    "show",
    "sysfs",
    "report",
    "faults",
    "fault",
    "simulate",
    "cdi",
    "completions",
    "man",
];

fn anyverbs(arguments: &[&str], columns: u32) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    command.args(arguments).env("COLUMNS", columns.to_string()).output().unwrap()
}

fn said(arguments: &[&str], columns: u32) -> String {
    let output = anyverbs(arguments, columns);
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn examples_are_whole_lines_in_80_columns() {
    let mut broken = Vec::new();
    for command in COMMANDS {
        for help in ["-h", "--help"] {
            let text = said(&[command, help], 300);
            let examples = text.split_once("Example").map_or("", |(_, examples)| examples);
            let is_long = |line: &&str| line.starts_with("  ") && line.chars().count() > 80;
            let long = examples.lines().filter(is_long);
            broken.extend(long.map(|line| format!("{command} {help}: {line}")));
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}

#[test]
fn help_fits_80_columns() {
    let mut long = Vec::new();
    for command in COMMANDS {
        for help in ["-h", "--help"] {
            let text = said(&[command, help], 80);
            let lines = text.lines().filter(|line| line.chars().count() > 80);
            long.extend(lines.map(|line| format!("{command} {help}: {line}")));
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
}

#[test]
fn completions_offer_no_hidden_command() {
    for shell in ["bash", "zsh", "fish"] {
        let script = said(&["completions", shell], 80);
        for hidden in ["device-facts", "disconnect-abandoned"] {
            assert!(!script.contains(hidden), "{shell}: {hidden}");
        }
        for command in COMMANDS {
            assert!(script.contains(command), "{shell}: {command}");
        }
        assert!(script.contains("check-suppressions"), "{shell}");
    }
}

#[test]
fn the_manual_names_no_page_that_is_not_there() {
    let directory = std::env::temp_dir().join(format!("anyverbs-man-{}", std::process::id()));
    said(&["man", "--directory", directory.to_str().unwrap()], 80);
    let page = std::fs::read_to_string(directory.join("anyverbs.1")).unwrap();
    let named: Vec<_> = page
        .split_whitespace()
        .filter_map(|word| word.strip_suffix("(1)"))
        .map(|name| name.replace('\\', "").replace("fB", "").replace("fR", ""))
        .filter(|name| name.starts_with("anyverbs-"))
        .collect();
    assert!(named.iter().any(|name| name == "anyverbs-run"), "{named:?}");
    let missing: Vec<_> =
        named.iter().filter(|name| !directory.join(format!("{name}.1")).exists()).collect();
    std::fs::remove_dir_all(&directory).unwrap();
    assert!(missing.is_empty(), "{missing:?}");
    assert!(!said(&["man"], 80).contains("help(1)"));
}

#[test]
fn help_tells_the_status_of_wrong_options() {
    assert!(said(&["run", "--help"], 300).contains("2 if its own options are wrong"));
    assert_eq!(anyverbs(&["run", "--nope", "--", "true"], 80).status.code(), Some(2));
}

#[test]
fn a_number_that_is_none_is_refused_with_an_example() {
    let output = anyverbs(&["show", "qp", "abc"], 80);
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("expected a number such as 0x30011"), "{error}");
}

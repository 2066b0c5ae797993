//! `anyverbs simulate`.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::process::{Command, Output};

fn simulate(arguments: &[&str]) -> Output {
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/simulate");
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    command.arg("simulate").args(arguments).current_dir(examples).output().unwrap()
}

#[test]
fn settings_are_compared_and_drawn() {
    let plot = std::env::temp_dir().join(format!("anyverbs-simulate-{}.svg", std::process::id()));
    let output = simulate(&["incast.toml", "--compare", "--plot", plot.to_str().unwrap()]);
    let (said, svg) = (String::from_utf8(output.stdout).unwrap(), std::fs::read_to_string(&plot));
    std::fs::remove_file(&plot).unwrap();
    assert!(said.contains("\nas given ") && said.contains("\nbest by the 99 % time: "), "{said}");
    assert!(said.lines().all(|line| line.chars().count() <= 100), "{said}");
    assert!(svg.unwrap().ends_with("</svg>\n"));
}

#[test]
fn a_seed_decides_a_run() {
    let run = |seed| simulate(&["incast.toml", "--json", "--seed", seed]).stdout;
    assert_eq!(run("5"), run("5"));
    assert_ne!(run("5"), run("6"));
}

#[test]
fn a_file_that_is_not_there_is_an_error() {
    let output = simulate(&["none.toml"]);
    assert_eq!(output.status.code(), Some(125));
    assert!(
        String::from_utf8(output.stderr).unwrap().starts_with("anyverbs: cannot read none.toml")
    );
}

//! Programs across bad networks: every fault of `conformance/impair.toml` with every program of it.

mod fault;
mod network;

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::AtomicU16;
use std::time::Instant;

use anyhow::{Context, bail};

use self::fault::{Fault, Matrix};
use self::network::Network;
use super::findings::Known;
use super::hosts::sweep;
use super::tools::{Case, Outcome, Runner};
use super::{Selection, Tally, exchange};
use crate::dist::Dist;
use crate::{interrupt, packages, page, workspace};

const BEGIN: &str =
    "<!-- result: written by `cargo xtask conformance impair --all --write-docs` -->";

/// The results of all cases of one fault.
#[derive(Default)]
struct Row {
    cases: usize,
    right: usize,
    /// RoCE packets that came to the fault, and how often it was injected.
    packets: u64,
    injected: u64,
    /// The time of the slowest operation of a reliable connection in milliseconds, if a program measured it, and its
    /// limit.
    slowest: Option<(f64, f64)>,
}

/// Runs the selected cases and reports their results.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[
        packages::IPROUTE2,
        packages::ETHTOOL,
        packages::NFTABLES,
        packages::IBVERBS_UTILS,
        packages::RDMACM_UTILS,
    ])?;
    let matrix = Matrix::read(&workspace::root().join("conformance/impair.toml"))?;
    let cases = matrix.cases();
    let all = cases.len();
    let cases: Vec<_> = cases
        .into_iter()
        .filter(|(fault, case)| selection.takes(&name(fault, case), fault.default && case.default))
        .collect();
    if cases.is_empty() {
        bail!("no case of the table of bad networks has that in its name");
    }
    println!("impair: {} of {all} cases", cases.len());
    let scratch = workspace::target().join("conformance/impair");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    sweep();
    exchange::build(&scratch)?;
    let bridge = network::build_bridge()?;

    let known = Known::wanted(selection)?;
    let seed = selection.seed.unwrap_or(matrix.seed);
    let (port, mut tally, mut rows) = (AtomicU16::new(20_000), Tally::default(), BTreeMap::new());
    let mut failures = Vec::new();
    let mut network: Option<Network<'_>> = None;
    for (number, (fault, case)) in cases.iter().enumerate() {
        interrupt::check()?;
        if network.as_ref().is_none_or(|network| !network.serves(fault)) {
            // The old one goes first: names are free again.
            drop(network.take());
            network = Network::new(fault, &bridge, &scratch)?;
        }
        let head = format!("[{:>3}/{}] {}", number + 1, cases.len(), name(fault, case));
        let Some(network) = &network else {
            tally.skipped += 1;
            println!("skip {head}  needs root for network namespaces");
            continue;
        };
        let started = Instant::now();
        let injection = network.start(fault, seed)?;
        let (hosts, scratch) = (network.hosts(), &scratch);
        let runner = Runner { dist, hosts, case, scratch, label: 0, known: known.as_ref() };
        let outcome = runner.run(&port)?;
        let counts = injection.finish()?;
        let row: &mut Row = rows.entry(position(&matrix, fault)).or_default();
        row.cases += 1;
        row.packets += counts.packets;
        row.injected += counts.injected;
        let outcome = match outcome {
            Outcome::Passed(_) if counts.is_missing(fault) => {
                Outcome::Failed("the fault was never injected".into(), counts.text.clone())
            }
            Outcome::Passed(_) if counts.is_foreign(fault) => {
                Outcome::Failed("another fault was injected".into(), counts.text.clone())
            }
            outcome => outcome,
        };
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Outcome::Passed(figures) => {
                tally.passed += 1;
                row.right += 1;
                row.slowest = slower(row.slowest, took(&figures));
                let injected = counts.injected;
                println!("ok   {head}  {figures}; injected {injected}  ({seconds:.1} s)");
            }
            Outcome::Failed(reason, said) => {
                tally.failed += 1;
                println!("FAIL {head}  {reason}  ({seconds:.1} s)\n{said}");
                failures.push(name(fault, case));
            }
            Outcome::Skipped(reason) => {
                tally.skipped += 1;
                println!("skip {head}  {reason}");
            }
        }
    }
    if let Some(known) = &known {
        println!("{known}");
    }
    println!("impair: {tally}");
    for name in failures {
        println!(
            "  failed: {name}\n    cargo xtask conformance impair --seed {seed} --filter {name:?}"
        );
    }
    if selection.write_docs && tally.skipped == 0 {
        page::write(
            &workspace::root().join("docs/reliability.md"),
            BEGIN,
            &table(&matrix, &rows, seed),
        )?;
    }
    Ok(tally)
}

fn name(fault: &Fault, case: &Case) -> String {
    format!("{} | {}", fault.name, case.name())
}

fn position(matrix: &Matrix, fault: &Fault) -> usize {
    matrix.faults.iter().position(|other| other.name == fault.name).expect("it is of the matrix")
}

/// Reads `the slowest took 72.0 ms of 3147 ms` (of either side), or how long a failure took.
fn took(figures: &str) -> Option<(f64, f64)> {
    let (_, rest) = figures.split_once("the slowest took ")?;
    let (took, rest) = rest.split_once(" ms of ")?;
    Some((took.parse().ok()?, rest.split_once(" ms")?.0.parse().ok()?))
}

fn slower(one: Option<(f64, f64)>, other: Option<(f64, f64)>) -> Option<(f64, f64)> {
    [one, other].into_iter().flatten().max_by(|a, b| a.0.total_cmp(&b.0))
}

fn table(matrix: &Matrix, rows: &BTreeMap<usize, Row>, seed: u64) -> String {
    let mut text = String::from(
        "| fault | packets | injected | promised of RC | programs | all right | slowest operation, and what it may take |\n\
         |---|---|---|---|---|---|---|\n",
    );
    for (position, row) in rows {
        let fault = &matrix.faults[*position];
        let slowest = row
            .slowest
            .map_or(String::from("-"), |(took, bound)| format!("{took:.0} of {bound:.0} ms"));
        // The network's own filter only counts the packets that it drops.
        let packets = if row.packets > 0 { row.packets.to_string() } else { "-".into() };
        let injected = if fault.is_counted() { row.injected.to_string() } else { "all".into() };
        text += &format!(
            "| {} | {packets} | {injected} | {} | {} | {} | {slowest} |\n",
            fault.name, fault.promise, row.cases, row.right
        );
    }
    text + &format!(
        "\nSeed {seed}. One of them again: `cargo xtask conformance impair --seed {seed} --filter \"loss 1 %\"`."
    )
}

#[cfg(test)]
mod tests {
    use super::super::hosts::Topology;
    use super::*;

    #[test]
    fn the_projects_table_is_sound() {
        let matrix = Matrix::read(&workspace::root().join("conformance/impair.toml")).unwrap();
        let cases = matrix.cases();
        assert!(cases.iter().any(|(fault, case)| fault.default && case.default));
        for (fault, case) in &cases {
            assert_eq!(fault.ends, case.fails_with.is_some(), "{}", name(fault, case));
        }
        // Every fault meets a program.
        for fault in &matrix.faults {
            assert!(cases.iter().any(|(other, _)| other.name == fault.name), "{}", fault.name);
        }
        assert!(cases.iter().any(|(fault, case)| fault.on == Topology::BridgedIpv6
            && case.place == Topology::BridgedIpv6));
    }

    #[test]
    fn the_page_has_its_marks() {
        let page = fs::read_to_string(workspace::root().join("docs/reliability.md")).unwrap();
        assert!(page::replaced(&page, BEGIN, "").is_some());
    }

    #[test]
    fn the_slowest_operation_is_read() {
        let said = "8000 operations, the slowest took 72.0 ms of 3147 ms";
        assert_eq!(took(said), Some((72.0, 3147.0)));
        assert_eq!(took("7.00 usec/iter"), None);
        assert_eq!(slower(Some((1.0, 2.0)), Some((3.0, 4.0))), Some((3.0, 4.0)));
        assert_eq!(slower(None, None), None);
    }
}

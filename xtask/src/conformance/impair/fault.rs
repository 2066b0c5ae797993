//! The table of faults and programs.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use serde::Deserialize;

use super::super::hosts::Topology;
use super::super::table;
use super::super::tools::Case;

/// The file: faults, and beside them a table of programs.
pub(super) struct Matrix {
    pub(super) seed: u64,
    pub(super) faults: Vec<Fault>,
    programs: Vec<Case>,
}

/// The fault of the network.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Fault {
    pub(super) name: String,
    /// Options of the bridge.
    pub(super) bridge: Option<String>,
    /// Packets of 1000 that nftables drops.
    pub(super) nft: Option<u32>,
    #[serde(default)]
    pub(super) offloads: bool,
    #[serde(default = "bridged")]
    pub(super) on: Topology,
    /// First words of the commands that it is run with; all where empty.
    #[serde(default)]
    only: Vec<String>,
    /// The time limit of a program, if longer than its own.
    #[serde(default)]
    timeout_s: u64,
    /// The bridge's counter that must move.
    pub(super) injects: Option<String>,
    pub(super) promise: String,
    /// The network stays down.
    #[serde(default)]
    pub(super) ends: bool,
    #[serde(default)]
    pub(super) default: bool,
}

fn bridged() -> Topology {
    Topology::Bridged
}

impl Fault {
    /// Whether it is injected a number of times, rather than all the time.
    pub(super) fn is_counted(&self) -> bool {
        self.injects.is_some() || self.nft.is_some()
    }
}

impl Matrix {
    pub(super) fn read(path: &Path) -> anyhow::Result<Self> {
        let text =
            fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&text).with_context(|| format!("in {}", path.display()))
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let mut whole: toml::Table = toml::from_str(text)?;
        let faults = whole.remove("fault").context("no faults")?;
        let mut faults: Vec<Fault> = faults.try_into()?;
        let seed: u64 = whole.remove("seed").context("no seed")?.try_into()?;
        // The fault decides where a program runs.
        whole.insert("on".into(), vec![toml::Value::from("bridged")].into());
        let programs = table::expand(&toml::to_string(&whole)?)?;
        for fault in &mut faults {
            ensure!(
                fault.bridge.is_some() != fault.nft.is_some(),
                "{:?} needs either `bridge` or `nft`",
                fault.name
            );
            if fault.nft.is_some() {
                fault.on = Topology::TwoHosts;
            }
        }
        Ok(Matrix { seed, faults, programs })
    }

    /// Every fault with every program that it can be run with; those of one network side by side.
    pub(super) fn cases(&self) -> Vec<(Fault, Case)> {
        let mut faults: Vec<&Fault> = self.faults.iter().collect();
        faults.sort_by_key(|fault| fault.on);
        let with = |fault: &Fault, case: &Case| {
            let timeout_s = case.timeout_s.max(fault.timeout_s);
            (fault.clone(), Case { place: fault.on, timeout_s, ..case.clone() })
        };
        faults
            .into_iter()
            .flat_map(|fault| {
                let fits = |case: &&Case| {
                    let named = |words: &String| case.command.starts_with(words.as_str());
                    case.fails_with.is_some() == fault.ends
                        && (fault.only.is_empty() || fault.only.iter().any(named))
                };
                self.programs.iter().filter(fits).map(|case| with(fault, case)).collect::<Vec<_>>()
            })
            .collect()
    }
}

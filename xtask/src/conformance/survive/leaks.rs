//! What processes leave behind: names, sockets, files, and what others hold of them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::super::hosts::Side;
use super::super::process::wait_for;
use super::{Bystanders, Stage};

/// In which what was left must be gone: others look once a second.
const PATIENCE: Duration = Duration::from_secs(5);

/// What a process opens once in its life, when it is first needed, and not for each peer: a leak is more after a few rounds.
const LAZY: usize = 4;

/// What there is of the device on both hosts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Traces {
    /// Abstract names and UDP sockets of each host.
    names: [BTreeSet<String>; 2],
    udp: [usize; 2],
    /// Files with our name in shared memory and among the temporary ones.
    files: BTreeSet<String>,
    /// Descriptors and shared mappings of each bystander.
    held: Vec<(usize, usize)>,
}

impl Traces {
    pub(super) fn of(stage: &Stage<'_>, bystanders: &Bystanders) -> anyhow::Result<Self> {
        let mut names = [BTreeSet::new(), BTreeSet::new()];
        let mut udp = [0; 2];
        for (at, side) in [Side::Server, Side::Client].into_iter().enumerate() {
            let sockets = stage.hosts.sockets(side);
            names[at] = sockets.names_with("@anyverbs")?;
            udp[at] = sockets.bound_to(4791)?;
        }
        let held = bystanders.ids().map(held).collect::<anyhow::Result<_>>()?;
        Ok(Traces { names, udp, files: files(), held })
    }

    /// What is there now and was not before, if it does not go away.
    pub(super) fn left_behind(
        &self,
        stage: &Stage<'_>,
        bystanders: &Bystanders,
    ) -> anyhow::Result<Option<String>> {
        let mut complaint = None;
        wait_for(Instant::now() + PATIENCE, || {
            complaint = self.excess(&Traces::of(stage, bystanders)?);
            Ok(complaint.is_none())
        })?;
        Ok(complaint)
    }

    fn excess(&self, now: &Traces) -> Option<String> {
        for host in 0..2 {
            let names: Vec<_> = now.names[host].difference(&self.names[host]).collect();
            if !names.is_empty() {
                return Some(format!("names stay: {names:?}"));
            }
            if now.udp[host] > self.udp[host] {
                return Some(format!("UDP sockets stay: {} of {}", now.udp[host], self.udp[host]));
            }
        }
        let files: Vec<_> = now.files.difference(&self.files).collect();
        if !files.is_empty() {
            return Some(format!("files stay: {files:?}"));
        }
        for (now, before) in now.held.iter().zip(&self.held) {
            if now.0 > before.0 + LAZY || now.1 > before.1 + LAZY {
                return Some(format!(
                    "a bystander holds {} descriptors and {} shared mappings, not {} and {}",
                    now.0, now.1, before.0, before.1
                ));
            }
        }
        None
    }
}

/// Descriptors and shared mappings of a process.
fn held(id: u32) -> anyhow::Result<(usize, usize)> {
    let folder = format!("/proc/{id}/fd");
    let descriptors =
        fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))?.count();
    let maps = fs::read_to_string(format!("/proc/{id}/maps")).context("cannot read maps")?;
    let shared = |line: &&str| line.split(' ').nth(1).is_some_and(|mode| mode.ends_with('s'));
    Ok((descriptors, maps.lines().filter(shared).count()))
}

/// Files with our name, but for the views of launchers, which the next launcher removes.
fn files() -> BTreeSet<String> {
    names_in("/dev/shm")
        .chain(names_in("/tmp"))
        .filter(|name| !name.contains("/anyverbs-view-"))
        .collect()
}

/// Views of launchers that do not live any more.
pub(super) fn views() -> Vec<String> {
    let launcher_lives = |view: &str| {
        let id = view.split('-').nth_back(1).unwrap_or_default();
        Path::new("/proc").join(id).exists()
    };
    names_in("/tmp")
        .filter(|name| name.contains("/anyverbs-view-") && !launcher_lives(name))
        .collect()
}

fn names_in(folder: &'static str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(move |entry| format!("{folder}/{}", entry.file_name().to_string_lossy()))
        .filter(|name| name.contains("anyverbs"))
}

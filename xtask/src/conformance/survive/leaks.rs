//! Leftovers of processes: names, sockets, files, and descriptors that others hold for them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::super::hosts::Side;
use super::super::process::wait_for;
use super::{Bystanders, Stage};

/// Time in which leftovers must be gone: others look once a second.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Sending sockets of a process: one for each slot that a peer can have, and family. It is opened at the first packet
/// to a process in that slot (`net/src/udp/sending.rs`), even if that process has ended.
const MOST_SENDING: usize = 512;

/// The prefix of a launcher's private tree.
const VIEW: &str = "anyverbs-view-";

/// Traces of the device on both hosts.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Traces {
    /// Abstract names and UDP sockets of each host.
    names: [BTreeSet<String>; 2],
    udp: [usize; 2],
    /// Files with our name in shared memory and among the temporary ones.
    files: BTreeSet<String>,
    /// Descriptors and shared mappings of each bystander: how many of each kind.
    held: Vec<BTreeMap<String, usize>>,
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
        Ok(Traces { names, udp, files: files(&stage.temporary), held })
    }

    /// New traces since then, if they do not go away.
    pub(super) fn left_behind(
        &self,
        stage: &Stage<'_>,
        bystanders: &Bystanders,
    ) -> anyhow::Result<Option<String>> {
        let mut complaint = None;
        wait_for(Instant::now() + TIME_LIMIT, || {
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
            let total = |held: &BTreeMap<String, usize>| held.values().sum::<usize>();
            if total(now) > total(before) {
                let more: Vec<String> = now
                    .iter()
                    .filter(|(kind, count)| before.get(*kind).is_none_or(|had| had < count))
                    .map(|(kind, count)| {
                        format!("{count} {kind}, not {}", before.get(kind).unwrap_or(&0))
                    })
                    .collect();
                return Some(format!("a bystander holds {}", more.join("; ")));
            }
        }
        None
    }
}

/// Descriptors and shared mappings of a process, by kind.
fn held(id: u32) -> anyhow::Result<BTreeMap<String, usize>> {
    let folder = format!("/proc/{id}/fd");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot read {folder}"))?;
    // A descriptor that was closed meanwhile leads nowhere.
    let descriptors = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    let table = |name: &str| fs::read_to_string(format!("/proc/{id}/net/{name}"));
    let udp =
        table("udp").context("cannot read the UDP sockets")? + &table("udp6").unwrap_or_default();
    let mut kinds = BTreeMap::new();
    let mut sending = 0;
    for target in descriptors {
        let target = target.to_string_lossy();
        if is_lane(&udp, &target) {
            sending += 1;
        // Files that `exchange` itself looks up now and then.
        } else if !target.starts_with("/proc/") {
            *kinds.entry(format!("descriptors of {}", kind(&target))).or_default() += 1;
        }
    }
    if sending > MOST_SENDING {
        kinds.insert("sending sockets".to_owned(), sending);
    }
    let maps = fs::read_to_string(format!("/proc/{id}/maps")).context("cannot read maps")?;
    let shared = |line: &&str| line.split(' ').nth(1).is_some_and(|mode| mode.ends_with('s'));
    for line in maps.lines().filter(shared) {
        let target = line.split_ascii_whitespace().nth(5).unwrap_or("nothing");
        *kinds.entry(format!("mappings of {}", kind(target))).or_default() += 1;
    }
    Ok(kinds)
}

/// Whether a link of `/proc/PID/fd` leads to a socket by which the device sends: UDP, at another port than RoCE's. `udp` are
/// lines as in `/proc/net/udp`.
fn is_lane(udp: &str, target: &str) -> bool {
    let Some(inode) = target.strip_prefix("socket:[").and_then(|rest| rest.strip_suffix(']'))
    else {
        return false;
    };
    udp.lines().any(|line| {
        let mut fields = line.split_ascii_whitespace();
        let port = fields.nth(1).and_then(|address| address.rsplit_once(':'));
        fields.nth(7) == Some(inode) && port.is_some_and(|(_, port)| port != "12B7")
    })
}

/// The target of a link of `/proc/PID/fd`, without its number: `socket:[12345]` is a `socket`.
fn kind(target: &str) -> &str {
    match target.split_once(":[") {
        Some((kind, number)) if number.starts_with(|c: char| c.is_ascii_digit()) => kind,
        _ => target,
    }
}

/// Files with our name, but for the views of launchers, which the next launcher removes.
fn files(temporary: &Path) -> BTreeSet<String> {
    names_in(Path::new("/dev/shm"))
        .chain(names_in(temporary))
        .filter(|name| !name.contains(VIEW))
        .collect()
}

/// Views of launchers that do not live any more.
pub(super) fn views(temporary: &Path) -> Vec<String> {
    let launcher_lives = |view: &str| {
        let id = view.split('-').nth_back(1).unwrap_or_default();
        Path::new("/proc").join(id).exists()
    };
    names_in(temporary).filter(|name| name.contains(VIEW) && !launcher_lives(name)).collect()
}

fn names_in(folder: &Path) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path().to_string_lossy().into_owned())
        .filter(|path| path.rsplit('/').next().is_some_and(|name| name.contains("anyverbs")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn traces(held: &[(&str, usize)]) -> Traces {
        let held = held.iter().map(|(kind, count)| ((*kind).to_owned(), *count)).collect();
        Traces {
            names: [BTreeSet::new(), BTreeSet::new()],
            udp: [0; 2],
            files: BTreeSet::new(),
            held: vec![held],
        }
    }

    #[test]
    fn one_descriptor_more_is_told_by_its_kind() {
        let before = traces(&[("descriptors of socket", 4), ("mappings of /memfd:anyverbs", 2)]);
        let now = traces(&[("descriptors of socket", 5), ("mappings of /memfd:anyverbs", 2)]);
        assert_eq!(
            before.excess(&now).unwrap(),
            "a bystander holds 5 descriptors of socket, not 4"
        );
        assert_eq!(now.excess(&before), None);
        let udp = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
             12: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 77 2 0 0\n\
             13: 00000000:D7A8 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 78 2 0 0\n";
        assert!(is_lane(udp, "socket:[78]"));
        assert!(!is_lane(udp, "socket:[77]") && !is_lane(udp, "socket:[7]"));
        assert_eq!(kind("socket:[12345]"), "socket");
        assert_eq!(kind("anon_inode:[eventfd]"), "anon_inode:[eventfd]");
        assert_eq!(kind("/memfd:anyverbs (deleted)"), "/memfd:anyverbs (deleted)");
    }
}

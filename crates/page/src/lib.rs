//! The page that a process shows to others of its user: its queue pairs, completion queues, counters, and what each queue pair
//! waits for. `docs/design/pages.md` tells how they read it.
//!
//! A page is words of 64 bits, in the order of the machine's bytes. It begins with the magic number and the version. Sections of
//! rows follow in a fixed order. A section begins with the number of words of a row, and the number of rows. A reader knows the
//! first words of a row, and skips further ones. A text is its length in bytes and the words that hold them.
//!
//! The reader takes a page for something that anybody may have written. [`Snapshot::decode`] checks every length and the range
//! of every value. It needs no more memory than the page has.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

mod rows;
mod words;

pub use rows::{
    Attributes, CompletionQueue, Counter, Group, Objects, Peer, Process, Psns, QueuePair, Receives,
    Sends, Traffic, Wait, Waiting, Way,
};
use words::{Malformed as _, Reader, Writer};

/// The time from one page of a process to its next while somebody looks, in milliseconds. Readers look each second, and see nothing
/// that is older than a fraction of that. The waits of both sides are multiples of it (the tests of `progress::observer` in
/// `anyverbs-transport`, and `tests/top.rs` of `anyverbs-cli`).
pub const INTERVAL: Duration = Duration::from_millis(250);

const MAGIC: u64 = u64::from_le_bytes(*b"avb-page");
const VERSION: u64 = 7;

/// The queue pairs of a page, at most. The others are counted.
pub const MAX_QUEUE_PAIRS: usize = 16_384;
/// The completion queues of a page, at most.
pub const MAX_COMPLETION_QUEUES: usize = 16_384;

/// All that a process tells at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Snapshot {
    /// The process.
    pub process: Process,
    /// The name of its program.
    pub command: String,
    /// The names of its ports: those of the devices, with the number of the port behind it where a device has two (`mlx4_0/2`).
    pub devices: Vec<String>,
    /// The names of those that are down in this process, because a script of faults says so.
    pub down: Vec<String>,
    /// Its counters, of all devices together.
    pub counters: Vec<Counter>,
    /// Those of each port that are not zero. Empty where there is one port.
    pub counters_of: Vec<Vec<Counter>>,
    /// Its calls that wait until events are acknowledged.
    pub calls: Vec<WaitingCall>,
    /// Its queue pairs.
    pub queue_pairs: Vec<QueuePair>,
    /// The multicast groups that they are attached to.
    pub groups: Vec<Group>,
    /// Its completion queues.
    pub completion_queues: Vec<CompletionQueue>,
}

/// A call of the program that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct WaitingCall {
    /// The thread, the object and what is missing, in words.
    pub what: String,
    /// How long it has waited.
    pub ns: u64,
}

/// The reason why a page cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unreadable {
    /// The process has another version of this library.
    OtherVersion,
    /// It is no page.
    Malformed,
}

impl std::fmt::Display for Unreadable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::OtherVersion => "the process has another version of anyverbs",
            Self::Malformed => "the process writes nonsense",
        })
    }
}

impl Snapshot {
    /// Appends it to a page.
    pub fn encode(&self, page: &mut Vec<u8>) {
        let mut to = Writer::new(page);
        to.word(MAGIC);
        to.word(VERSION);
        to.rows(std::slice::from_ref(&self.process));
        to.text(&self.command);
        let is_down = |name: &String| u64::from(self.down.contains(name));
        to.texts(self.devices.iter().map(|name| (name.as_str(), is_down(name))));
        to.texts(self.counters.iter().map(|counter| (counter.name.as_str(), counter.value)));
        to.word(self.counters_of.len() as u64);
        for counters in &self.counters_of {
            to.texts(counters.iter().map(|counter| (counter.name.as_str(), counter.value)));
        }
        to.texts(self.calls.iter().map(|call| (call.what.as_str(), call.ns)));
        to.rows(&self.queue_pairs);
        to.rows(&self.groups);
        to.rows(&self.completion_queues);
    }

    /// Reads a page, which anybody may have written.
    ///
    /// # Errors
    /// [`Unreadable`].
    pub fn decode(page: &[u8]) -> Result<Self, Unreadable> {
        let mut from = Reader::new(page);
        if from.word().or_malformed()? != MAGIC {
            return Err(Unreadable::Malformed);
        }
        if from.word().or_malformed()? != VERSION {
            return Err(Unreadable::OtherVersion);
        }
        let mut read = || {
            let (process, command) = (from.rows::<Process>()?.pop()?, from.text()?);
            let devices: Vec<(String, u64)> = from.texts()?.collect();
            let down = devices.iter().filter(|(_, down)| *down != 0);
            Some(Self {
                process,
                command,
                down: down.map(|(name, _)| name.clone()).collect(),
                devices: devices.into_iter().map(|(name, _)| name).collect(),
                counters: counters(from.texts()?),
                counters_of: {
                    // Each has a word for its length at least.
                    let ports = from.count(1)?;
                    (0..ports).map(|_| Some(counters(from.texts()?))).collect::<Option<_>>()?
                },
                calls: from.texts()?.map(|(what, ns)| WaitingCall { what, ns }).collect(),
                queue_pairs: from.rows()?,
                groups: from.rows()?,
                completion_queues: from.rows()?,
            })
        };
        read().or_malformed()
    }

    /// The value of a counter of all devices; 0 if the process has none of that name.
    #[must_use]
    pub fn counter(&self, name: &str) -> u64 {
        value(&self.counters, name)
    }

    /// The value of a counter of a port; 0 if the process has none of that name, or no such port.
    #[must_use]
    pub fn counter_of(&self, port: usize, name: &str) -> u64 {
        match self.counters_of.get(port) {
            Some(counters) => value(counters, name),
            None if port == 0 && self.counters_of.is_empty() => self.counter(name),
            None => 0,
        }
    }

    /// The name of a port of the process.
    #[must_use]
    pub fn port(&self, place: u32) -> &str {
        self.devices.get(place as usize).map_or("", String::as_str)
    }

    /// The groups of a queue pair.
    pub fn groups_of(&self, number: u32) -> impl Iterator<Item = u128> {
        self.groups.iter().filter(move |group| group.queue_pair == number).map(|group| group.gid)
    }
}

/// A GID as people write it.
#[must_use]
pub fn address(gid: u128) -> IpAddr {
    let address = Ipv6Addr::from_bits(gid);
    address.to_ipv4_mapped().map_or(IpAddr::V6(address), IpAddr::V4)
}

fn counters(texts: impl Iterator<Item = (String, u64)>) -> Vec<Counter> {
    texts.map(|(name, value)| Counter { name, value }).collect()
}

fn value(counters: &[Counter], name: &str) -> u64 {
    counters.iter().find(|counter| counter.name == name).map_or(0, |counter| counter.value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Snapshot {
        let queue_pair = QueuePair {
            number: 0x1_0011,
            kind: 2,
            state: 3,
            way: Way::Shm,
            peer: Peer { number: 0x2_0012, gid: u128::MAX - 3, ..Peer::default() },
            waiting: Waiting { what: Wait::PeerReceive, known: true, ns: 1 << 40, cause: 1301 },
            traffic: Traffic { sent: u64::MAX, sent_bytes: 7, ..Traffic::default() },
            receives: Receives {
                fill: 3,
                posted: 1 << 40,
                completed: (1 << 40) - 3,
                ..Receives::default()
            },
            ..QueuePair::default()
        };
        Snapshot {
            process: Process { pid: 4711, slot: 255, ..Process::default() },
            command: "ib_send_bw".into(),
            devices: vec!["rail0".into(), "rail1".into()],
            down: vec!["rail1".into()],
            counters: vec![Counter { name: "sent_pkts".into(), value: 1 << 60 }],
            counters_of: vec![vec![], vec![Counter { name: "sent_pkts".into(), value: 1 << 60 }]],
            calls: vec![WaitingCall { what: "thread 7 is ending CQ 1".into(), ns: 1 << 33 }],
            queue_pairs: vec![queue_pair.clone(), QueuePair { number: 1, ..queue_pair }],
            groups: vec![Group { queue_pair: 1, gid: 5 << 100 }],
            completion_queues: vec![CompletionQueue {
                number: 1,
                depth: 64,
                fill: 3,
                ..Default::default()
            }],
        }
    }

    fn page(snapshot: &Snapshot) -> Vec<u8> {
        let mut page = Vec::new();
        snapshot.encode(&mut page);
        page
    }

    #[test]
    fn what_is_written_is_read() {
        for snapshot in [example(), Snapshot::default()] {
            assert_eq!(Snapshot::decode(&page(&snapshot)).unwrap(), snapshot);
        }
        assert_eq!(example().counter("sent_pkts"), 1 << 60);
        assert_eq!(example().groups_of(1).collect::<Vec<_>>(), [5 << 100]);
    }

    #[test]
    fn a_page_that_is_cut_off_or_of_another_version_is_refused() {
        let whole = page(&example());
        for len in 0..whole.len() {
            assert_eq!(Snapshot::decode(&whole[..len]), Err(Unreadable::Malformed), "{len}");
        }
        let mut other = whole;
        other[8] += 1;
        assert_eq!(Snapshot::decode(&other), Err(Unreadable::OtherVersion));
    }

    /// Every word is replaced by values that are likely to hurt: nothing panics, and nothing is believed that does not fit.
    #[test]
    fn hostile_words_are_bounded() {
        let whole = page(&example());
        for at in (0..whole.len()).step_by(8) {
            for word in
                [0, 1, 255, 256, 1 << 16, u64::from(u32::MAX), 1 << 40, u64::MAX / 8, u64::MAX]
            {
                let mut hostile = whole.clone();
                hostile[at..at + 8].copy_from_slice(&word.to_ne_bytes());
                if let Ok(snapshot) = Snapshot::decode(&hostile) {
                    let rows = snapshot.queue_pairs.len() + snapshot.groups.len();
                    assert!(rows + snapshot.completion_queues.len() <= whole.len() / 8);
                }
            }
        }
    }

    #[test]
    fn further_words_of_a_row_are_skipped() {
        let snapshot =
            Snapshot { groups: vec![Group { queue_pair: 9, gid: 7 }], ..Snapshot::default() };
        let mut words: Vec<u64> = page(&snapshot)
            .chunks_exact(8)
            .map(|word| u64::from_ne_bytes(word.try_into().unwrap()))
            .collect();
        // The last section but one: a row of three words; the section of completion queues is empty.
        let row = words.len() - 2 - 3;
        assert_eq!(words[row - 2..row + 1], [3, 1, 9]);
        words.insert(row + 3, 1234);
        words[row - 2] = 4;
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(Snapshot::decode(&bytes).unwrap(), snapshot);
    }
}

//! Reading traces and findings.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, bail};
use anyverbs_causes::Cause;
use serde::Deserialize;
use serde_json::Value;

use crate::finding::Finding;
use crate::look::qpn;

/// All that the files say.
#[derive(Debug, Default)]
pub(super) struct Story {
    /// Names of processes by their numbers.
    pub(super) processes: BTreeMap<u64, String>,
    pub(super) queue_pairs: Vec<QueuePair>,
    /// In the order of time, once all is read.
    pub(super) events: Vec<Event>,
    pub(super) findings: Vec<Finding>,
    /// Files without a byte, as findings of a program that makes no mistake.
    pub(super) empty: Vec<String>,
    /// Files whose last line is cut.
    pub(super) cut: Vec<String>,
    /// Names that events share.
    names: Names,
}

/// A queue pair of a process.
#[derive(Debug)]
pub(super) struct QueuePair {
    pub(super) process: u64,
    pub(super) qpn: u32,
    pub(super) name: String,
}

/// Something that happened at a queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Event {
    /// Microseconds.
    pub(super) at: f64,
    /// Its place in [`Story::queue_pairs`].
    pub(super) queue_pair: usize,
    pub(super) what: What,
}

/// Its kind. Names are places in the story's list.
#[derive(Clone, Copy, Debug)]
pub(super) enum What {
    Posted {
        operation: u32,
        wr_id: u64,
    },
    Done {
        operation: u32,
        wr_id: u64,
        bytes: u64,
        since: f64,
        status: u32,
    },
    Out(Packet),
    In(Packet),
    /// It waited so many microseconds.
    Waited {
        name: u32,
        micros: f64,
    },
    /// A retry, an error, a drop, an asynchronous event.
    Trouble {
        kind: u32,
        name: u32,
        n: u64,
        /// Not of those that a good run has as well.
        is_bad: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Packet {
    pub(super) opcode: u32,
    /// The queue pair that it is for.
    pub(super) dest: u32,
    pub(super) psn: u32,
    pub(super) bytes: u64,
    pub(super) is_again: bool,
}

/// An event of a trace, as it stands in a file.
#[derive(Debug, Deserialize)]
struct Line {
    ph: String,
    #[serde(default)]
    cat: String,
    #[serde(default)]
    name: String,
    pid: u64,
    tid: u32,
    #[serde(default)]
    ts: f64,
    #[serde(default)]
    dur: f64,
    #[serde(default)]
    id2: Value,
    #[serde(default)]
    args: Value,
}

/// Each name once.
#[derive(Debug, Default)]
struct Names {
    all: Vec<String>,
    places: HashMap<String, u32>,
}

impl Names {
    fn place(&mut self, name: &str) -> u32 {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        let place = self.all.len() as u32;
        self.all.push(name.to_owned());
        self.places.insert(name.to_owned(), place);
        place
    }
}

/// Whether something has gone wrong. A connection comes up, a queue runs empty, an ACK comes late: these go as they should.
fn is_bad(kind: &str, name: &str) -> bool {
    !matches!(
        (kind, name),
        ("event", "CommEst" | "SqDrained" | "LastWqeReached") | ("drop", "drop_stale_ack")
    )
}

/// The cause of an error that a completion told.
fn cause(line: &Line) -> Option<Cause> {
    let number = line.args["vendor_err"].as_u64().filter(|_| line.cat == "error")?;
    Cause::from_number(number.try_into().ok()?)
}

/// Spans that have begun, by process and number: when, and with what.
type Open = HashMap<(u64, u64), (f64, u32, u64, u64)>;

impl Story {
    /// Reads files: traces of `--trace`, and findings of `--check-report`.
    pub(super) fn read<P: AsRef<Path>>(files: &[P]) -> anyhow::Result<Self> {
        let mut story = Self::default();
        for file in files {
            let file = file.as_ref();
            story.read_file(file).with_context(|| format!("cannot read {}", file.display()))?;
        }
        story.sort();
        if story.events.is_empty() && story.findings.is_empty() {
            if story.empty.is_empty() {
                bail!("there is no event and no finding: did the program use the device?");
            }
            bail!("no findings in {}, and no events", story.empty.join(", "));
        }
        Ok(story)
    }

    /// Puts all in an order that does not depend on that of the files.
    fn sort(&mut self) {
        let mut order: Vec<usize> = (0..self.queue_pairs.len()).collect();
        order.sort_by_key(|i| (self.queue_pairs[*i].process, self.queue_pairs[*i].qpn));
        let mut places = vec![0; order.len()];
        for (place, i) in order.iter().enumerate() {
            places[*i] = place;
        }
        self.queue_pairs.sort_by_key(|qp| (qp.process, qp.qpn));
        for event in &mut self.events {
            event.queue_pair = places[event.queue_pair];
        }
        self.events.sort_by(|a, b| a.at.total_cmp(&b.at));
    }

    /// The moments of the first event and the last one. Receives that are posted in advance do not begin it: a program may
    /// post them long before its peer is there.
    pub(super) fn span(&self) -> (f64, f64) {
        let is_advance = |event: &&Event| match event.what {
            What::Posted { operation, .. } => self.name(operation) == "RECV",
            _ => false,
        };
        let first = self.events.iter().find(|event| !is_advance(event));
        let at = |event: Option<&Event>| event.map_or(0.0, |event| event.at);
        (at(first.or(self.events.first())), at(self.events.last()))
    }

    /// A name of an event.
    pub(super) fn name(&self, place: u32) -> &str {
        &self.names.all[place as usize]
    }

    fn read_file(&mut self, path: &Path) -> anyhow::Result<()> {
        let mut reader = BufReader::new(File::open(path)?);
        let sarif = "it is a SARIF document, which is for services of code scanning; give --check-report a name that does \
                     not end in .sarif, and read those lines of JSON";
        anyhow::ensure!(!crate::sarif::is_named(path), sarif);
        let mut known = HashMap::new();
        let mut open = Open::new();
        let mut bytes = Vec::new();
        for number in 1.. {
            bytes.clear();
            if reader.read_until(b'\n', &mut bytes)? == 0 {
                if number == 1 {
                    self.empty.push(path.display().to_string());
                }
                break;
            }
            let is_whole = bytes.last() == Some(&b'\n');
            let text = bytes.trim_ascii();
            let text = text.strip_suffix(b",").unwrap_or(text);
            if matches!(text, b"" | b"[" | b"]") {
                continue;
            }
            // The other files have no line of a brace alone.
            anyhow::ensure!(number > 1 || text != b"{", sarif);
            let taken = self.take(text, &mut known, &mut open);
            match taken {
                // A process was killed while it wrote, or the disk was full.
                Err(_) if !is_whole && number > 1 => self.cut.push(path.display().to_string()),
                taken => taken.with_context(|| format!("line {number}"))?,
            }
        }
        Ok(())
    }

    /// Takes a line: an event or a finding.
    fn take(
        &mut self,
        text: &[u8],
        known: &mut HashMap<(u64, u32), usize>,
        open: &mut Open,
    ) -> anyhow::Result<()> {
        let line: Line = match serde_json::from_slice(text) {
            Ok(line) => line,
            Err(error) => {
                let finding = serde_json::from_slice(text);
                self.findings.push(finding.map_err(|_| error).context("no event, and no finding")?);
                return Ok(());
            }
        };
        let number = |key: &str| line.args[key].as_u64().unwrap_or(0);
        if line.ph == "M" {
            let name = line.args["name"].as_str().unwrap_or_default();
            if line.name == "process_name" {
                self.processes.insert(line.pid, name.to_owned());
            } else {
                let at = self.queue_pair(known, line.pid, line.tid);
                self.queue_pairs[at].name = name.to_owned();
            }
            return Ok(());
        }
        let queue_pair = self.queue_pair(known, line.pid, line.tid);
        let span = (line.pid, line.id2["local"].as_u64().unwrap_or(0));
        let packet = Packet {
            opcode: match (line.args["says"].as_str(), cause(&line)) {
                (Some(says), _) => self.names.place(&format!("{}: {says}", line.name)),
                (None, Some(cause)) => {
                    self.names.place(&format!("{}, {cause}: {}", line.name, cause.text()))
                }
                (None, None) => self.names.place(&line.name),
            },
            dest: number("dest") as u32,
            psn: number("psn") as u32,
            bytes: number("bytes"),
            is_again: line.args["again"] == true,
        };
        let what = match (&*line.ph, &*line.cat) {
            ("b", _) => {
                let operation = self.names.place(line.args["operation"].as_str().unwrap_or("work"));
                let wr_id = number("wr_id");
                open.insert(span, (line.ts, operation, wr_id, number("bytes")));
                What::Posted { operation, wr_id }
            }
            ("e", _) => {
                let Some((since, operation, wr_id, bytes)) = open.remove(&span) else {
                    return Ok(());
                };
                let bytes = line.args["bytes"].as_u64().unwrap_or(bytes);
                let status = self.names.place(line.args["status"].as_str().unwrap_or("unknown"));
                What::Done { operation, wr_id, bytes, since, status }
            }
            ("i", "packet") if line.args["direction"] == "out" => What::Out(packet),
            ("i", "packet") => What::In(packet),
            ("i", kind) => {
                let is_bad = is_bad(kind, &line.name);
                let kind = self.names.place(kind);
                What::Trouble { kind, name: packet.opcode, n: number("n").max(1), is_bad }
            }
            ("X", _) => What::Waited { name: packet.opcode, micros: line.dur },
            // Others' events.
            _ => return Ok(()),
        };
        self.events.push(Event { at: line.ts, queue_pair, what });
        Ok(())
    }

    fn queue_pair(&mut self, known: &mut HashMap<(u64, u32), usize>, pid: u64, tid: u32) -> usize {
        *known.entry((pid, tid)).or_insert_with(|| {
            let same = |qp: &QueuePair| (qp.process, qp.qpn) == (pid, tid);
            self.queue_pairs.iter().position(same).unwrap_or_else(|| {
                let name = format!("QP {}", qpn(tid));
                self.queue_pairs.push(QueuePair { process: pid, qpn: tid, name });
                self.queue_pairs.len() - 1
            })
        })
    }
}

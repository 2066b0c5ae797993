//! Looks at the device's processes, and says what it sees in words and numbers. All texts and numbers come from other processes.

use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, Instant};

use anyhow::bail;
use anyverbs::config::Config;
use anyverbs::watch::{Condition, Seen, Watcher};
use anyverbs::{QpState, QpType};
use anyverbs_causes::Cause;
use anyverbs_page::{INTERVAL, QueuePair, Snapshot, Wait, address};
use serde::Serialize;

use crate::args::Settings;

/// The time between two looks. Rates are those of a second, and exporters are asked every few.
pub(crate) fn pause() -> Duration {
    4 * INTERVAL
}

/// Longest wait for a process that does not answer.
pub(crate) fn longest_wait() -> Duration {
    3 * INTERVAL
}

/// A process.
#[derive(Debug)]
pub(crate) struct Process {
    /// Its number here, or by its own account in another PID namespace.
    pub(crate) pid: u32,
    /// Printable.
    pub(crate) command: String,
    /// When it told what is known of it.
    pub(crate) at: Instant,
    pub(crate) seen: Seen,
}

/// A process in JSON.
#[derive(Debug, Serialize)]
pub(crate) struct Json<'a> {
    pid: u32,
    command: &'a str,
    slot: u8,
    condition: String,
    age_ms: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    page: Option<serde_json::Value>,
}

impl Process {
    fn new(seen: Seen) -> Self {
        let page = seen.page.as_ref().and_then(|page| page.as_ref().ok());
        let pid = if seen.pid != 0 { seen.pid } else { page.map_or(0, |page| page.process.pid) };
        let command = match page {
            Some(page) => page.command.clone(),
            None => std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default(),
        };
        let now = Instant::now();
        let at = now.checked_sub(seen.age).unwrap_or(now);
        Self { pid, command: printable(command.trim()), at, seen }
    }

    /// The name of its program, without directory and arguments.
    pub(crate) fn program(&self) -> &str {
        let path = self.command.split(' ').next().unwrap_or_default();
        path.rsplit('/').next().unwrap_or_default()
    }

    /// Its last page.
    pub(crate) fn page(&self) -> Option<&Snapshot> {
        self.seen.page.as_ref()?.as_ref().ok()
    }

    /// Its unusual condition, in words.
    pub(crate) fn trouble(&self) -> Option<String> {
        if let Some(Err(error)) = &self.seen.page {
            return Some(error.to_string());
        }
        let age = || match &self.seen.page {
            Some(_) => format!("; this is {} old", span(self.seen.age)),
            None => String::new(),
        };
        match self.seen.condition {
            Condition::Fresh => None,
            Condition::Stopped => Some(format!("stopped{}", age())),
            Condition::Silent => Some(format!("does not answer{}", age())),
            Condition::Refuses => Some("may have no memory file to show what it does".into()),
        }
    }

    pub(crate) fn json(&self) -> Json<'_> {
        Json {
            pid: self.pid,
            command: &self.command,
            slot: self.seen.slot,
            condition: format!("{:?}", self.seen.condition).to_lowercase(),
            age_ms: self.seen.age.as_millis().try_into().unwrap_or(u64::MAX),
            error: self
                .seen
                .page
                .as_ref()
                .and_then(|page| page.as_ref().err())
                .map(ToString::to_string),
            page: self.page().map(named_page),
        }
    }
}

/// The processes of this user and device.
#[derive(Debug)]
pub(crate) struct Looker(Watcher);

impl Looker {
    pub(crate) fn new(settings: &Settings) -> anyhow::Result<Self> {
        let config = Config::load_with(&settings.variables())?;
        Ok(Self(Watcher::new(&config.registry, config.udp_port)?))
    }

    /// In the order of their numbers.
    pub(crate) fn look(&mut self, patience: Duration) -> Vec<Process> {
        let mut processes: Vec<_> = self.0.look(patience).into_iter().map(Process::new).collect();
        processes.sort_by_key(|process| process.pid);
        processes
    }
}

/// The process of this number, or the only one with a program of this name, for a command.
pub(crate) fn find<'a>(
    processes: &'a [Process],
    wanted: &str,
    command: &str,
) -> anyhow::Result<&'a Process> {
    let number = wanted.parse::<u32>().ok();
    let is_it = |process: &&Process| match number {
        Some(pid) => process.pid == pid,
        None => process.program() == wanted,
    };
    let found: Vec<_> = processes.iter().filter(is_it).collect();
    match (&found[..], number) {
        ([process], _) => Ok(process),
        ([], Some(pid)) => {
            let owner = std::fs::metadata(format!("/proc/{pid}")).map(|it| it.uid());
            // SAFETY: it has no arguments, and cannot fail.
            let own = unsafe { libc::geteuid() };
            match owner {
                Ok(owner) if owner != own => bail!("process {pid} is another user's"),
                Ok(_) if is_elsewhere(pid) => bail!(
                    "process {pid} is in another network namespace; run this there: `nsenter -t {pid} -n anyverbs {command} ...`"
                ),
                Ok(_) => bail!(
                    "process {pid} does not run with this device; `anyverbs show` lists those that do"
                ),
                Err(_) => bail!("there is no process {pid}"),
            }
        }
        ([], None) => bail!(
            "no process of yours with this device runs {wanted:?} in this network namespace; `anyverbs show` lists those there are"
        ),
        (several, _) => {
            let of = |process: &&Process| {
                format!("{} ({})", process.pid, cut(&printable(&process.command), 40))
            };
            let list: Vec<_> = several.iter().map(of).collect();
            bail!("several processes run {wanted:?}; give the number of one: {}", list.join(", "))
        }
    }
}

/// Whether a process is known to be in another network namespace, from where no message reaches it.
fn is_elsewhere(pid: u32) -> bool {
    let namespace = |of: &str| std::fs::read_link(format!("/proc/{of}/ns/net")).ok();
    namespace(&pid.to_string()).is_some_and(|there| Some(there) != namespace("self"))
}

/// The process of a queue pair, by its number, if it is among these.
pub(crate) fn owner(processes: &[Process], number: u32) -> Option<&Process> {
    let has_it = |page: &Snapshot| page.queue_pairs.iter().any(|qp| qp.number == number);
    processes.iter().find(|process| process.page().is_some_and(has_it))
}

/// The calls of a process that wait until events are acknowledged, in words.
pub(crate) fn calls(page: &Snapshot) -> impl Iterator<Item = String> {
    page.calls
        .iter()
        .map(|call| format!("{}: {}", span(Duration::from_nanos(call.ns)), printable(&call.what)))
}

/// The wait of a queue pair, in words. None if there is none, or it will be over in a moment.
pub(crate) fn waits(processes: &[Process], qp: &QueuePair) -> Option<String> {
    let waiting = &qp.waiting;
    let time = Duration::from_nanos(waiting.ns);
    let peer = || match owner(processes, qp.peer.number).filter(|_| qp.peer.number != 0) {
        Some(process) => format!("process {} ({})", process.pid, cut(process.program(), 14)),
        None => format!("{} at {}", qpn(qp.peer.number), address(qp.peer.gid)),
    };
    let cause = Cause::from_number(waiting.cause);
    let what = match waiting.what {
        Wait::Nothing | Wait::State => return None,
        Wait::Failed => {
            let why = cause.map_or(String::new(), |cause| format!(", {cause}: {}", cause.text()));
            return Some(format!("failed{why}"));
        }
        Wait::FullSends => {
            let cause = Cause::SendQueueFull;
            return Some(format!("stuck, {cause}: no request in the full send queue is signaled"));
        }
        Wait::PeerGaveUp => {
            let cause = Cause::NoReceive;
            return Some(format!("the peer has given up, {cause}: this program posted no receive"));
        }
        Wait::Answer | Wait::Rate | Wait::Fence | Wait::Room | Wait::Credit | Wait::Rule
            if time < INTERVAL =>
        {
            return None;
        }
        Wait::Answer => format!("an ACK of {}", peer()),
        Wait::PeerReceive => format!("{} to post a receive", peer()),
        Wait::OwnReceive => "a receive that this program must post; the peer waits".into(),
        Wait::PeerRepeat => "the peer to send again; a receive is posted now".into(),
        Wait::PollSends => format!("its program to poll CQ {}", qp.sends.completion_queue),
        Wait::PollReceives => format!("its program to poll CQ {}", qp.receives.completion_queue),
        Wait::Rate
        | Wait::Fence
        | Wait::Drained
        | Wait::Room
        | Wait::Credit
        | Wait::PeerEnded
        | Wait::Rule => waiting.what.text().into(),
    };
    let over = if waiting.known { "" } else { "over " };
    Some(format!("waits {over}{} for {what}", span(time)))
}

/// `0x030011`.
pub(crate) fn qpn(number: u32) -> String {
    format!("{number:#08x}")
}

/// A queue pair for scripts: the codes of its type and state have their names beside them.
pub(crate) fn named(qp: &QueuePair) -> serde_json::Value {
    let mut value = serde_json::json!(qp);
    value["kind_name"] = kind(qp.kind).into();
    value["state_name"] = state(qp.state).into();
    value
}

/// A page whose queue pairs are [`named`].
fn named_page(page: &Snapshot) -> serde_json::Value {
    let mut value = serde_json::json!(page);
    value["queue_pairs"] = page.queue_pairs.iter().map(named).collect();
    value
}

pub(crate) fn kind(code: u8) -> &'static str {
    const KINDS: [(QpType, &str); 5] = [
        (QpType::Rc, "RC"),
        (QpType::Uc, "UC"),
        (QpType::Ud, "UD"),
        (QpType::XrcSend, "XRCs"),
        (QpType::XrcRecv, "XRCt"),
    ];
    KINDS.iter().find(|(kind, _)| *kind as u8 == code).map_or("?", |(_, name)| *name)
}

pub(crate) fn state(code: u8) -> &'static str {
    const NAMES: [&str; 7] = ["RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR"];
    QpState::from_code(code.into()).map_or("?", |state| NAMES[state as usize])
}

/// A time in at most seven characters.
pub(crate) fn span(time: Duration) -> String {
    let seconds = time.as_secs();
    match seconds {
        0 => format!("{} ms", time.as_millis()),
        1..60 => format!("{:.1} s", time.as_secs_f64()),
        60..3600 => format!("{} min", seconds / 60),
        3600..86400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86400),
    }
}

/// A number in at most five characters, with a suffix of 1000.
pub(crate) fn short(number: u64) -> String {
    scaled(number, 1000.0, &["", "k", "M", "G", "T", "P", "E"])
}

/// Bytes in at most six characters, with a suffix of 1024.
pub(crate) fn bytes(number: u64) -> String {
    scaled(number, 1024.0, &["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"])
}

fn scaled(number: u64, base: f64, suffixes: &[&str]) -> String {
    let (mut value, mut at) = (number as f64, 0);
    while value >= 999.5 && at + 1 < suffixes.len() {
        value /= base;
        at += 1;
    }
    let digits = usize::from(at > 0 && value < 99.95);
    format!("{value:.digits$}{}", suffixes[at])
}

/// A text of another process, without anything that a terminal obeys.
pub(crate) fn printable(text: &str) -> String {
    let is_plain = |c: char| {
        let changes_direction = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        !c.is_control() && !changes_direction
    };
    text.chars().map(|c| if is_plain(c) { c } else { '\u{fffd}' }).collect()
}

/// The first characters of a text.
pub(crate) fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    let mut short: String = text.chars().take(most.saturating_sub(3)).collect();
    short.push_str("...");
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1.0k"),
            (99_949, "99.9k"),
            (99_950, "100k"),
            (u64::MAX, "18.4E"),
        ] {
            assert_eq!(short(number), text);
        }
        for (number, text) in [(0, "0"), (1023, "1.0Ki"), (1 << 20, "1.0Mi"), (u64::MAX, "16.0Ei")]
        {
            assert_eq!(bytes(number), text);
        }
        for exponent in 0..64 {
            for number in [1 << exponent, (1 << exponent) - 1, 3 << (exponent.max(1) - 1)] {
                assert!(short(number).len() <= 5 && bytes(number).len() <= 6, "{number}");
            }
        }
        assert_eq!(span(Duration::from_millis(999)), "999 ms");
        assert_eq!(span(Duration::from_millis(12_345)), "12.3 s");
        assert_eq!(span(Duration::from_nanos(u64::MAX)), "213503 d");
    }

    #[test]
    fn texts_of_others_move_no_cursor() {
        assert_eq!(printable("a\u{1b}[2Jb\n\u{202e}c"), "a\u{fffd}[2Jb\u{fffd}\u{fffd}c");
        assert_eq!(cut("abcdef", 6), "abcdef");
        assert_eq!(cut("abcdefg", 6), "abc...");
    }

    #[test]
    fn addresses_and_codes() {
        assert_eq!(address(0xffff_7f00_0001).to_string(), "127.0.0.1");
        assert_eq!(address(1).to_string(), "::1");
        assert_eq!((kind(2), kind(200), state(3), state(77)), ("RC", "?", "RTS", "?"));
    }
}

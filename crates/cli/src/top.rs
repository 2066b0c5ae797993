//! `anyverbs top`.

mod screen;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::io::{self, IsTerminal as _};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyverbs_page::{QueuePair, Traffic};

use crate::args::Top;
use crate::look::{self, Looker, Process, bytes, cut, short};
use screen::{Key, Screen};

/// Traffic of queue pairs at an earlier time, by process and number.
#[derive(Debug)]
pub(crate) struct Before {
    /// With the time when its process has told it.
    traffic: HashMap<(u32, u32), (Traffic, Instant)>,
}

/// The traffic of a queue pair in a second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Rates {
    messages: [u64; 2],
    bytes: [u64; 2],
}

impl Before {
    fn new(processes: &[Process]) -> Self {
        let mut traffic = HashMap::new();
        for process in processes {
            for qp in process.page().into_iter().flat_map(|page| &page.queue_pairs) {
                traffic.insert((process.pid, qp.number), (qp.traffic.clone(), process.at));
            }
        }
        Self { traffic }
    }

    fn rates(&self, process: &Process, qp: &QueuePair) -> Rates {
        let Some((before, at)) = self.traffic.get(&(process.pid, qp.number)) else {
            return Rates::default();
        };
        let seconds = process.at.saturating_duration_since(*at).as_secs_f64().max(0.001);
        let rate = |of: fn(&Traffic) -> u64| {
            (of(&qp.traffic).saturating_sub(of(before)) as f64 / seconds) as u64
        };
        Rates {
            messages: [rate(|t| t.sent), rate(|t| t.received)],
            bytes: [rate(|t| t.sent_bytes), rate(|t| t.received_bytes)],
        }
    }
}

/// Shows the processes until the user ends it, or once.
pub(crate) fn run(args: &Top) -> anyhow::Result<ExitCode> {
    let mut looker = Looker::new(&args.settings)?;
    if args.json {
        let processes = looker.look(look::longest_wait());
        let json: Vec<_> = processes.iter().map(Process::json).collect();
        return crate::write_out((serde_json::to_string_pretty(&json)? + "\n").as_bytes());
    }
    if args.once || !io::stdout().is_terminal() || !io::stdin().is_terminal() {
        let before = Before::new(&looker.look(look::longest_wait()));
        std::thread::sleep(look::pause());
        let processes = looker.look(look::longest_wait());
        return crate::write_out(list(&processes, Some(&before), 80).as_bytes());
    }
    watch(&mut looker)
}

/// The full screen.
fn watch(looker: &mut Looker) -> anyhow::Result<ExitCode> {
    let mut screen = Screen::open()?;
    let mut processes = looker.look(look::longest_wait() / 4);
    let mut before = Before::new(&processes);
    let mut scroll = 0usize;
    let mut next = Instant::now() + look::pause();
    loop {
        let (columns, rows) = screen.size();
        let text = list(&processes, Some(&before), columns);
        let lines: Vec<&str> = text.lines().collect();
        let room = rows.saturating_sub(1).max(1);
        scroll = scroll.min(lines.len().saturating_sub(room));
        let more = lines.len().saturating_sub(scroll + room);
        let footer =
            if more > 0 { format!("{more} more lines below; q ends") } else { "q ends".into() };
        if screen.show(lines.iter().skip(scroll).take(room).copied(), &footer)? == Key::End {
            return Ok(ExitCode::SUCCESS);
        }
        // A process that is stopped is not waited for: the screen answers to keys.
        match screen.key(next.saturating_duration_since(Instant::now()))? {
            Key::End => return Ok(ExitCode::SUCCESS),
            Key::Up(lines) => scroll = scroll.saturating_sub(lines),
            Key::Down(lines) => scroll = scroll.saturating_add(lines),
            Key::Other => {}
            Key::None => {
                before = Before::new(&processes);
                processes = looker.look(Duration::from_millis(100));
                next = Instant::now() + look::pause();
            }
        }
    }
}

/// All processes and their queue pairs, no line longer than `columns`.
pub(crate) fn list(processes: &[Process], before: Option<&Before>, columns: usize) -> String {
    let queue_pairs: usize =
        processes.iter().filter_map(Process::page).map(|page| page.queue_pairs.len()).sum();
    let queue_pairs = count(queue_pairs, "queue pair", "s");
    // One that was stopped before anybody looked, for instance.
    let silent = processes.iter().filter(|process| process.page().is_none()).count();
    let queue_pairs = match silent {
        0 => queue_pairs,
        all if all == processes.len() => "queue pairs not known".to_owned(),
        some => format!("{queue_pairs}; those of {} not known", count(some, "process", "es")),
    };
    let mut text = String::new();
    push(
        &mut text,
        columns,
        &format!("{}, {queue_pairs}", count(processes.len(), "process", "es")),
    );
    for process in processes {
        let title = format!("\nprocess {}  ", process.pid);
        text.push_str(&title);
        let width = columns.saturating_sub(title.chars().count() - 1);
        text.push_str(&cut(&process.command, width));
        text.push('\n');
        if let Some(trouble) = process.trouble() {
            push(&mut text, columns, &format!("  {trouble}"));
        }
        if let Some(page) = process.page() {
            let objects = &page.process.objects;
            push(
                &mut text,
                columns,
                &format!(
                    "  {}  {} QP  {} CQ  {} MR with {}B",
                    look::printable(&page.devices.join(", ")),
                    objects.queue_pairs,
                    objects.completion_queues,
                    objects.regions,
                    bytes(objects.region_bytes)
                ),
            );
        }
        for call in process.page().into_iter().flat_map(look::calls) {
            let (call, missing) = call.split_once("; ").unwrap_or((&call, ""));
            push(&mut text, columns, &format!("  waits {call}"));
            push(&mut text, columns, &format!("      {missing}"));
        }
        text.push_str(&self::queue_pairs(process, processes, before, columns));
    }
    text
}

fn count(n: usize, what: &str, plural: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { plural })
}

fn push(text: &mut String, columns: usize, line: &str) {
    text.push_str(&cut(line, columns));
    text.push('\n');
}

/// The queue pairs of a process. Those that wait for something come first, then those that do most.
pub(crate) fn queue_pairs(
    process: &Process,
    processes: &[Process],
    before: Option<&Before>,
    columns: usize,
) -> String {
    let mut text = String::new();
    let Some(page) = process.page().filter(|page| !page.queue_pairs.is_empty()) else {
        return text;
    };
    let unit = if before.is_some() { "/s" } else { "" };
    let head = format!(
        "  {:<8} {:<4} {:<5} {:<8} {:<7} {:>5} {:>5} {:>6} {:>6} {:>6} {:>7}",
        "QP",
        "TYPE",
        "STATE",
        "PEER",
        "WAY",
        "SENDS",
        "RECVS",
        format!("OUT{unit}"),
        format!("BYTES{unit}"),
        format!("IN{unit}"),
        format!("BYTES{unit}")
    );
    push(&mut text, columns, &head);
    let mut rows: Vec<_> = page
        .queue_pairs
        .iter()
        .map(|qp| {
            let rates = before.map_or(
                Rates {
                    messages: [qp.traffic.sent, qp.traffic.received],
                    bytes: [qp.traffic.sent_bytes, qp.traffic.received_bytes],
                },
                |before| before.rates(process, qp),
            );
            (look::waits(processes, qp), rates, qp)
        })
        .collect();
    rows.sort_by_key(|(waits, rates, qp)| {
        let does = rates.bytes[0].saturating_add(rates.bytes[1]).saturating_add(rates.messages[0]);
        (waits.is_none(), u64::MAX - does, qp.number)
    });
    for (waits, rates, qp) in rows {
        let peer = if qp.peer.number == 0 { "-".into() } else { look::qpn(qp.peer.number) };
        let line = if qp.busy {
            format!("  {:<8} {:<4} busy", look::qpn(qp.number), look::kind(qp.kind))
        } else {
            format!(
                "  {:<8} {:<4} {:<5} {:<8} {:<7} {:>5} {:>5} {:>6} {:>6} {:>6} {:>7}",
                look::qpn(qp.number),
                look::kind(qp.kind),
                look::state(qp.state),
                peer,
                qp.way.text(),
                short(qp.sends.taken.into()),
                short(qp.receives.fill.into()),
                short(rates.messages[0]),
                bytes(rates.bytes[0]),
                short(rates.messages[1]),
                bytes(rates.bytes[1])
            )
        };
        push(&mut text, columns, &line);
        let (retries, rnr_naks) = (qp.traffic.retries, qp.traffic.rnr_naks);
        let mut notes: Vec<String> = waits.into_iter().collect();
        if qp.unacknowledged > 0 {
            notes.push(format!("{} events to acknowledge", qp.unacknowledged));
        }
        if retries > 0 || rnr_naks > 0 {
            notes.push(format!("{retries} retries, {rnr_naks} RNR NAKs"));
        }
        for note in notes {
            push(&mut text, columns, &format!("      {note}"));
        }
    }
    if page.process.left_out > 0 {
        let _ = writeln!(text, "  and {} more", page.process.left_out);
    }
    text
}

#[cfg(test)]
mod tests {
    use anyverbs::watch::{Condition, Seen};
    use anyverbs_page::{Peer, Sends, Snapshot, Wait, Waiting, Way};

    use super::*;

    fn example() -> Vec<Process> {
        let qp = QueuePair {
            number: 0xff_ffff,
            kind: 10,
            state: 0,
            way: Way::Process,
            peer: Peer { number: 0xff_fffe, gid: u128::MAX, ..Peer::default() },
            sends: Sends { taken: 16_384, depth: 16_384, ..Sends::default() },
            traffic: Traffic {
                sent: u64::MAX,
                sent_bytes: u64::MAX,
                received: u64::MAX,
                received_bytes: u64::MAX,
                retries: u32::MAX,
                rnr_naks: u32::MAX,
            },
            waiting: Waiting { what: Wait::PeerReceive, known: false, ns: u64::MAX, cause: 0 },
            unacknowledged: 3,
            ..QueuePair::default()
        };
        let page =
            Snapshot { command: "x".repeat(300), queue_pairs: vec![qp], ..Snapshot::default() };
        let seen = Seen {
            pid: 4_194_303,
            slot: 255,
            page: Some(Ok(page)),
            age: Duration::from_secs(9),
            condition: Condition::Stopped,
        };
        vec![Process { pid: seen.pid, command: "x".repeat(200), at: Instant::now(), seen }]
    }

    #[test]
    fn rates_are_those_between_two_looks() {
        let mut processes = example();
        let set = |process: &mut Process, sent| {
            let Some(Ok(page)) = &mut process.seen.page else { unreachable!() };
            page.queue_pairs[0].traffic.sent = sent;
            page.queue_pairs[0].clone()
        };
        set(&mut processes[0], 100);
        let before = Before::new(&processes);
        let qp = set(&mut processes[0], 700);
        processes[0].at += Duration::from_secs(2);
        // Whenever they are drawn.
        for _ in 0..2 {
            assert_eq!(before.rates(&processes[0], &qp).messages[0], 300);
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    #[test]
    fn queue_pairs_that_nobody_could_ask_for_are_not_counted_as_none() {
        let head = |processes: &[Process]| {
            list(processes, None, 80).lines().next().unwrap_or_default().to_owned()
        };
        assert_eq!(head(&[]), "0 processes, 0 queue pairs");
        let mut processes = example();
        assert_eq!(head(&processes), "1 process, 1 queue pair");
        processes.extend(example());
        processes[0].seen.page = None;
        let some = "2 processes, 1 queue pair; those of 1 process not known";
        assert_eq!(head(&processes), some);
        assert_eq!(head(&processes[..1]), "1 process, queue pairs not known");
    }

    #[test]
    fn no_line_is_longer_than_the_terminal() {
        let processes = example();
        let before = Before { traffic: HashMap::new() };
        for columns in [80, 40, 200] {
            for before in [None, Some(&before)] {
                let text = list(&processes, before, columns);
                assert!(text.lines().all(|line| line.chars().count() <= columns), "{text}");
            }
        }
        let text = list(&processes, None, 80);
        let row = text.lines().find(|line| line.contains("0xffffff")).unwrap();
        assert!(!row.contains("..."), "the longest numbers fit into 80 columns: {row}");
        assert!(text.contains("stopped; this is 9.0 s old"), "{text}");
    }
}

//! A sequence diagram between queue pairs.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::charts::duration;
use super::escaped;
use super::read::{Packet, Story, What};
use crate::look::qpn;

/// Rows from the beginning, and rows around the first trouble or lost packet.
pub(super) const FIRST: usize = 80;
pub(super) const AROUND: usize = 80;
/// Most columns.
pub(super) const COLUMNS: usize = 8;

/// High enough for the label of an arrow and the one of a mark in the row above it.
const ROW: f64 = 22.0;
const TOP: f64 = 44.0;
const LEFT: f64 = 90.0;
/// The width of a character, in fonts that are rather wide.
const CHARACTER: f64 = 7.0;

/// One row: an arrow from a column to another, or a word at a column.
struct Row {
    at: f64,
    from: Column,
    to: Option<Column>,
    label: String,
    class: &'static str,
}

impl Row {
    /// Where its label ends at the right.
    fn end(&self, x_of: impl Fn(Column) -> f64) -> f64 {
        let length = CHARACTER * self.label.chars().count() as f64;
        let from = x_of(self.from);
        match self.to.map(x_of) {
            Some(to) if (to - from).abs() > 1.0 => f64::midpoint(from, to) + length / 2.0,
            _ => from + 8.0 + length,
        }
    }
}

/// A queue pair of the trace, or one that only its peer's packets name.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Column {
    Traced(usize),
    Untraced(u32),
}

/// The fate of each packet that was sent, by its place among the events: it came, or its receiver's trace does not have it.
struct Fates {
    arrived: Vec<bool>,
    /// The places of arrivals that have a sending.
    explained: Vec<bool>,
}

impl Fates {
    fn of(story: &Story) -> Self {
        let mut waiting: HashMap<(u32, u32, u32), Vec<usize>> = HashMap::new();
        let n = story.events.len();
        let mut fates = Self { arrived: vec![false; n], explained: vec![false; n] };
        for (i, event) in story.events.iter().enumerate() {
            match event.what {
                What::Out(packet) => waiting.entry(key(&packet)).or_default().push(i),
                // The latest of equal ones: what was sent before it again is lost.
                What::In(packet) => {
                    if let Some(sent) = waiting.get_mut(&key(&packet)).and_then(Vec::pop) {
                        fates.arrived[sent] = true;
                        fates.explained[i] = true;
                    }
                }
                _ => {}
            }
        }
        fates
    }

    /// Whether a packet that was sent to `to` is lost. Nothing is known of a receiver that is not traced.
    fn is_lost(&self, place: usize, to: Column) -> bool {
        !self.arrived[place] && matches!(to, Column::Traced(_))
    }
}

fn key(packet: &Packet) -> (u32, u32, u32) {
    (packet.dest, packet.psn, packet.opcode)
}

/// The diagram, and what it leaves out in words.
pub(super) fn diagram(story: &Story) -> Option<(String, String)> {
    let fates = Fates::of(story);
    let by_number: HashMap<u32, usize> =
        story.queue_pairs.iter().enumerate().map(|(i, qp)| (qp.qpn, i)).collect();
    // The peer of a queue pair, by what it sends.
    let mut peers = HashMap::new();
    for event in &story.events {
        if let What::Out(packet) = event.what {
            peers.entry(event.queue_pair).or_insert(packet.dest);
        }
    }
    let column = |number: u32| {
        by_number.get(&number).map_or(Column::Untraced(number), |i| Column::Traced(*i))
    };
    let is_shown = |i: &usize| match story.events[*i].what {
        What::In(_) => !fates.explained[*i],
        // Programs post many in advance.
        What::Posted { operation, .. } => story.name(operation) != "RECV",
        _ => true,
    };
    let all: Vec<usize> = (0..story.events.len()).filter(is_shown).collect();
    let is_trouble = |i: &usize| match story.events[*i].what {
        What::Trouble { is_bad, .. } => is_bad,
        // It comes before all that follows from it.
        What::Out(packet) => fates.is_lost(*i, column(packet.dest)),
        _ => false,
    };
    let mut chosen: Vec<usize> = all.iter().copied().take(FIRST).collect();
    let mut cut = None;
    if let Some(at) = all.iter().position(is_trouble) {
        let from = at.saturating_sub(AROUND / 2).max(chosen.len());
        cut = (from > chosen.len()).then(|| all[from]);
        chosen.extend(all.iter().copied().skip(from).take(AROUND));
    }
    let rows: Vec<(usize, Row)> =
        chosen.iter().map(|i| (*i, row(story, *i, &fates, &column, &peers))).collect();
    let mut columns: Vec<Column> = Vec::new();
    for (_, row) in &rows {
        for end in [Some(row.from), row.to].into_iter().flatten() {
            if !columns.contains(&end) {
                columns.push(end);
            }
        }
    }
    if rows.is_empty() {
        return None;
    }
    columns.truncate(COLUMNS);
    let shown: Vec<_> = rows
        .into_iter()
        .filter(|(_, row)| {
            columns.contains(&row.from) && row.to.is_none_or(|to| columns.contains(&to))
        })
        .collect();
    let rule = format!(
        "{} of {} events: the first {FIRST}, and up to {AROUND} around the first loss, retry or error; at most {COLUMNS} queue pairs. A packet that came is one row with its sending; postings of receives are left out.",
        shown.len(),
        all.len()
    );
    Some((draw(story, &columns, &shown, cut), rule))
}

fn row(
    story: &Story,
    place: usize,
    fates: &Fates,
    column: &impl Fn(u32) -> Column,
    peers: &HashMap<usize, u32>,
) -> Row {
    let event = &story.events[place];
    let own = Column::Traced(event.queue_pair);
    let packet = |packet: &Packet| {
        let again = if packet.is_again { ", again" } else { "" };
        let bytes = if packet.bytes > 0 { format!(", {} B", packet.bytes) } else { String::new() };
        format!("{} psn {:#x}{bytes}{again}", story.name(packet.opcode), packet.psn)
    };
    let (from, to, label, class) = match event.what {
        What::Out(sent) => {
            let to = column(sent.dest);
            let is_lost = fates.is_lost(place, to);
            let class = match (is_lost, sent.is_again) {
                (true, _) => "lost",
                (false, true) => "again",
                (false, false) => "packet",
            };
            let fate = if is_lost { " (lost)" } else { "" };
            (own, Some(to), packet(&sent) + fate, class)
        }
        What::In(came) => {
            let from = peers.get(&event.queue_pair).map_or(Column::Untraced(0), |n| column(*n));
            (from, Some(own), packet(&came), "packet")
        }
        What::Posted { operation, wr_id } => {
            (own, None, format!("post {} wr_id {wr_id:#x}", story.name(operation)), "work")
        }
        What::Done { operation, wr_id, status, .. } => {
            let (operation, status) = (story.name(operation), story.name(status));
            let is_good = matches!(status, "IBV_WC_SUCCESS" | "unsignaled");
            let how = if is_good { String::new() } else { format!(": {status}") };
            let class = if is_good { "work" } else { "trouble" };
            (own, None, format!("done {operation} wr_id {wr_id:#x}{how}"), class)
        }
        What::Waited { name, micros } => {
            (own, None, format!("{} {}", story.name(name), duration(micros)), "wait")
        }
        What::Trouble { name, is_bad, .. } => {
            let class = if is_bad { "trouble" } else { "work" };
            (own, None, story.name(name).to_owned(), class)
        }
    };
    Row { at: event.at, from, to, label, class }
}

fn draw(story: &Story, columns: &[Column], rows: &[(usize, Row)], cut: Option<usize>) -> String {
    let gap = (1040.0 / columns.len() as f64).clamp(170.0, 420.0);
    let x_of = |column: Column| {
        let at = columns.iter().position(|other| *other == column).unwrap_or(0);
        LEFT + gap * (at as f64 + 0.5)
    };
    let height = TOP + ROW * rows.len() as f64 + 20.0;
    let ends = rows.iter().map(|(_, row)| row.end(x_of));
    let width = ends.fold(LEFT + gap * columns.len() as f64, f64::max) + 20.0;
    let mut out = format!(
        "<svg class=\"sequence\" viewBox=\"0 0 {width:.0} {height:.0}\" style=\"min-width:{width:.0}px\" role=\"img\"><title>Sequence diagram</title>\n"
    );
    out.push_str("<defs><marker id=\"tip\" markerWidth=\"8\" markerHeight=\"8\" refX=\"7\" refY=\"4\" orient=\"auto\"><path d=\"M0 0 L8 4 L0 8 z\"/></marker></defs>\n");
    for column in columns {
        let (name, process) = match column {
            Column::Traced(i) => {
                let qp = &story.queue_pairs[*i];
                let process = story.processes.get(&qp.process);
                (qp.name.clone(), process.cloned().unwrap_or_else(|| qp.process.to_string()))
            }
            Column::Untraced(0) => ("another queue pair".to_owned(), "not traced".to_owned()),
            Column::Untraced(number) => (format!("QP {}", qpn(*number)), "not traced".to_owned()),
        };
        let x = x_of(*column);
        let _ = writeln!(
            out,
            "<text class=\"head\" x=\"{x:.0}\" y=\"16\" text-anchor=\"middle\">{}</text><text x=\"{x:.0}\" y=\"32\" text-anchor=\"middle\">{}</text>\
             <line class=\"life\" x1=\"{x:.0}\" x2=\"{x:.0}\" y1=\"38\" y2=\"{:.0}\"/>",
            escaped(&name),
            escaped(&process),
            height - 8.0
        );
    }
    let (begin, _) = story.span();
    for (n, (place, row)) in rows.iter().enumerate() {
        let y = TOP + ROW * (n as f64 + 0.7);
        let _ = writeln!(
            out,
            "<text class=\"time\" x=\"{:.0}\" y=\"{:.0}\" text-anchor=\"end\">{}</text>",
            LEFT - 10.0,
            y + 4.0,
            format_args!("{:.3} ms", (row.at - begin) / 1e3)
        );
        // The rows around the first trouble may come much later.
        if cut.is_some_and(|cut| cut == *place) {
            let y = y - ROW / 2.0;
            let _ = writeln!(
                out,
                "<line class=\"cut\" x1=\"0\" x2=\"{width:.0}\" y1=\"{y:.0}\" y2=\"{y:.0}\"/>"
            );
        }
        draw_row(&mut out, row, y, x_of);
    }
    out.push_str("</svg>\n");
    out
}

fn draw_row(out: &mut String, row: &Row, y: f64, x_of: impl Fn(Column) -> f64) {
    let (class, from) = (row.class, x_of(row.from));
    let label = escaped(&row.label);
    match row.to.map(x_of) {
        Some(to) if (to - from).abs() > 1.0 => {
            let side = (to - from).signum();
            let (begin, middle) = (from + 3.0 * side, (from + to) / 2.0);
            let end = if class == "lost" { middle + 70.0 * side } else { to - 2.0 * side };
            let _ = writeln!(
                out,
                "<line class=\"{class}\" x1=\"{begin:.0}\" x2=\"{end:.0}\" y1=\"{y:.0}\" y2=\"{y:.0}\" marker-end=\"url(#tip)\"/>\
                 <text class=\"{class}\" x=\"{middle:.0}\" y=\"{:.0}\" text-anchor=\"middle\">{label}</text>",
                y - 5.0
            );
        }
        _ => {
            let _ = writeln!(
                out,
                "<circle class=\"{class}\" cx=\"{from:.0}\" cy=\"{y:.0}\" r=\"3\"/><text class=\"{class}\" x=\"{:.0}\" y=\"{:.0}\">{label}</text>",
                from + 8.0,
                y + 3.0
            );
        }
    }
}

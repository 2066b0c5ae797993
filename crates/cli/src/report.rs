//! `anyverbs report`: one HTML page out of traces and findings. The page needs nothing but a browser.

mod charts;
mod diagram;
mod read;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::io::IsTerminal;
use std::process::ExitCode;

use anyhow::Context;

use crate::args::Report;
use crate::finding::Finding;
use charts::{amount, duration, histogram, quantile, throughput};
use read::{Story, What};

/// Most rows of a list.
const MOST_ROWS: usize = 100;

const STYLE: &str = include_str!("report/style.css");

/// Writes the page to its file, or to standard output.
pub(crate) fn print(args: &Report) -> anyhow::Result<ExitCode> {
    anyhow::ensure!(
        args.output.is_some() || !std::io::stdout().is_terminal(),
        "standard output is a terminal: name a file (--output report.html)"
    );
    let story = Story::read(&args.files)?;
    for file in &story.cut {
        eprintln!(
            "anyverbs: the last line of {file} is cut: a process was killed, or the disk was full"
        );
    }
    for file in &story.empty {
        eprintln!("anyverbs: no findings in {file}");
    }
    let page = page(&story);
    match &args.output {
        Some(file) => {
            let failed = || format!("cannot write {}", file.display());
            std::fs::write(file, page).with_context(failed)?;
            Ok(ExitCode::SUCCESS)
        }
        None => crate::write_out(page.as_bytes()),
    }
}

/// Text inside of HTML. What no XML may hold becomes a question mark.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() && c != '\n' => out.push('?'),
            c => out.push(c),
        }
    }
    out
}

fn page(story: &Story) -> String {
    let mut out = format!(
        "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\"><title>anyverbs report</title>\n<style>\n{STYLE}</style></head><body>\n<h1>anyverbs report</h1>\n"
    );
    for file in &story.cut {
        let _ = writeln!(
            out,
            "<p class=\"note\">The last line of {} is cut: a process was killed, or the disk was full.</p>",
            escaped(file)
        );
    }
    let mut sections = Sections::default();
    if !story.events.is_empty() {
        summary(&mut out, story);
        sections.add("Queue pairs", queue_pairs(story));
        sections.add("Throughput over time", times(story));
        sections.add("Latencies", latencies(story));
        sections.add("Retransmissions, waits and errors", troubles(story));
        if let Some((svg, rule)) = diagram::diagram(story) {
            let text = format!("<p>{rule}</p>\n<div class=\"wide\">{svg}</div>\n");
            sections.add("Who sent what to whom", text);
        }
    }
    if !story.findings.is_empty() {
        sections.add("Findings of --check", findings(&story.findings));
    }
    sections.write(&mut out);
    out.push_str("</body></html>\n");
    out
}

/// Parts of the page with their titles.
#[derive(Default)]
struct Sections(Vec<(&'static str, String)>);

impl Sections {
    fn add(&mut self, title: &'static str, text: String) {
        self.0.push((title, text));
    }

    /// The last part may be far below the first one, so links lead to each.
    fn write(&self, out: &mut String) {
        let place = |title: &str| title.to_lowercase().replace(|c: char| !c.is_alphanumeric(), "-");
        if self.0.len() > 1 {
            out.push_str("<nav>\n");
            for (title, _) in &self.0 {
                let _ = writeln!(out, "<a href=\"#{}\">{title}</a>", place(title));
            }
            out.push_str("</nav>\n");
        }
        for (title, text) in &self.0 {
            let _ = write!(out, "<h2 id=\"{}\">{title}</h2>\n{text}", place(title));
        }
    }
}

/// Figures of one queue pair.
#[derive(Clone, Default)]
struct Figures {
    posted: u64,
    done: u64,
    failed: u64,
    bytes: u64,
    out: u64,
    came: u64,
    again: u64,
    waits: u64,
    waited: f64,
}

fn is_good(status: &str) -> bool {
    matches!(status, "IBV_WC_SUCCESS" | "unsignaled")
}

fn figures(story: &Story) -> Vec<Figures> {
    let mut all = vec![Figures::default(); story.queue_pairs.len()];
    for event in &story.events {
        let of = &mut all[event.queue_pair];
        match event.what {
            What::Posted { .. } => of.posted += 1,
            What::Done { status, bytes, .. } => {
                of.done += 1;
                let is_good = is_good(story.name(status));
                of.failed += u64::from(!is_good);
                of.bytes += if is_good { bytes } else { 0 };
            }
            What::Out(packet) => {
                of.out += 1;
                of.again += u64::from(packet.is_again);
            }
            What::In(_) => of.came += 1,
            What::Waited { micros, .. } => {
                of.waits += 1;
                of.waited += micros;
            }
            What::Trouble { .. } => {}
        }
    }
    all
}

fn table(out: &mut String, heads: &[&str], rows: impl Iterator<Item = Vec<String>>) {
    out.push_str("<div class=\"wide\"><table><tr>");
    for head in heads {
        let _ = write!(out, "<th>{}</th>", escaped(head));
    }
    out.push_str("</tr>\n");
    for row in rows {
        out.push_str("<tr>");
        for cell in row {
            let is_figure = cell.starts_with(|c: char| c.is_ascii_digit());
            let class = if is_figure { " class=\"n\"" } else { "" };
            let _ = write!(out, "<td{class}>{}</td>", escaped(&cell));
        }
        out.push_str("</tr>\n");
    }
    out.push_str("</table></div>\n");
}

fn summary(out: &mut String, story: &Story) {
    let (from, to) = story.span();
    // A receive may wait longer than all that is shown lasts.
    let advance = match story.events.first().map(|event| from - event.at) {
        Some(before) if before > 0.0 => {
            format!(", after {} in which receives alone were posted", duration(before))
        }
        _ => String::new(),
    };
    let _ = writeln!(
        out,
        "<p>{} of {} in {}{advance}.</p>",
        count(story.events.len(), "event"),
        count(story.queue_pairs.len(), "queue pair"),
        duration(to - from)
    );
}

fn queue_pairs(story: &Story) -> String {
    let mut out = String::new();
    let all = figures(story);
    let heads = [
        "process",
        "queue pair",
        "posted",
        "done",
        "failed",
        "open",
        "bytes",
        "packets out",
        "packets in",
        "sent again",
        "waits",
        "waited",
    ];
    let rows = story.queue_pairs.iter().zip(&all).take(MOST_ROWS).map(|(qp, f)| {
        let process =
            story.processes.get(&qp.process).cloned().unwrap_or_else(|| qp.process.to_string());
        let open = f.posted.saturating_sub(f.done);
        let mut row = vec![process, qp.name.clone()];
        row.extend([f.posted, f.done, f.failed, open].map(|n| n.to_string()));
        row.push(amount(f.bytes as f64));
        row.extend([f.out, f.came, f.again, f.waits].map(|n| n.to_string()));
        row.push(duration(f.waited));
        row
    });
    table(&mut out, &heads, rows);
    left_out(&mut out, story.queue_pairs.len(), "queue pairs");
    out
}

fn left_out(out: &mut String, n: usize, what: &str) {
    if n > MOST_ROWS {
        let _ = writeln!(out, "<p>The first {MOST_ROWS} of {n} {what}.</p>");
    }
}

fn times(story: &Story) -> String {
    let (mut done, mut troubles) = (Vec::new(), Vec::new());
    for event in &story.events {
        match event.what {
            // Somebody has sent what was received.
            What::Done { operation, bytes, status, .. }
                if story.name(operation) != "RECV" && is_good(story.name(status)) =>
            {
                done.push((event.at, bytes));
            }
            What::Trouble { is_bad: true, .. } => troubles.push(event.at),
            _ => {}
        }
    }
    // A queue pair may live long after its work. Its last ACK leaves when it is destroyed.
    let matters = |event: &&read::Event| {
        !matches!(event.what, What::Out(_) | What::In(_) | What::Trouble { is_bad: false, .. })
    };
    let (from, to) = story.span();
    let to = story.events.iter().rev().find(matters).map_or(to, |event| event.at);
    let chart = throughput(&done, &troubles, (from, to.max(from)));
    format!(
        "<p>Bytes of sends when they succeed. Red marks below are retries and errors.</p>\n{chart}"
    )
}

fn latencies(story: &Story) -> String {
    let mut by_operation: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for event in &story.events {
        if let What::Done { operation, since, status, .. } = event.what
            && story.name(status) == "IBV_WC_SUCCESS"
        {
            by_operation.entry(story.name(operation)).or_default().push(event.at - since);
        }
    }
    let mut out = String::from(
        "<p>From the posting of a work request to its completion, of those that succeeded. The time of a receive is how long it waited for its message.</p>\n",
    );
    for values in by_operation.values_mut() {
        values.sort_by(f64::total_cmp);
    }
    let rows = by_operation.iter().map(|(operation, values)| {
        let mut row = vec![(*operation).to_owned(), values.len().to_string()];
        row.extend([0.0, 0.5, 0.9, 0.99, 1.0].map(|part| duration(quantile(values, part))));
        row
    });
    table(&mut out, &["operation", "requests", "least", "half", "90%", "99%", "most"], rows);
    for (operation, values) in by_operation.iter().filter(|(operation, _)| **operation != "RECV") {
        let chart = histogram(&format!("Latencies of {operation}"), values);
        let _ = write!(out, "<h3>{}</h3>\n{chart}", escaped(operation));
    }
    out
}

fn troubles(story: &Story) -> String {
    let mut counts: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    let mut rows = Vec::new();
    let (begin, _) = story.span();
    for event in &story.events {
        let What::Trouble { kind, name, n, .. } = event.what else { continue };
        let (kind, name) = (story.name(kind), story.name(name));
        *counts.entry((kind, name)).or_default() += n;
        if rows.len() < MOST_ROWS {
            let qp = story.queue_pairs[event.queue_pair].name.clone();
            rows.push(vec![duration(event.at - begin), qp, kind.to_owned(), name.to_owned()]);
        }
    }
    let again = figures(story).iter().map(|f| f.again).sum::<u64>();
    let mut out = format!("<p>Packets that were sent again: {again}.</p>\n");
    if counts.is_empty() {
        return out;
    }
    let counted = counts
        .iter()
        .map(|((kind, name), n)| vec![(*kind).to_owned(), (*name).to_owned(), n.to_string()]);
    table(&mut out, &["kind", "what", "times"], counted);
    let _ = writeln!(out, "<details><summary>When (the first {MOST_ROWS})</summary>");
    table(&mut out, &["time", "queue pair", "kind", "what"], rows.into_iter());
    out.push_str("</details>\n");
    out
}

/// `1 kind`, `2 kinds`.
fn count(n: usize, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

fn findings(findings: &[Finding]) -> String {
    let kinds: BTreeSet<&str> = findings.iter().map(|finding| &*finding.check).collect();
    let mut out =
        format!("<p>{} of {}.</p>\n", count(findings.len(), "finding"), count(kinds.len(), "kind"));
    for finding in findings.iter().take(MOST_ROWS) {
        let _ = writeln!(
            out,
            "<details open class=\"finding\"><summary><b>{}</b>: {} (process {})</summary><p>{}</p><p><b>What to do:</b> {}</p>",
            escaped(&finding.check),
            escaped(&finding.message),
            finding.process,
            escaped(&finding.why),
            escaped(&finding.remedy)
        );
        for stack in &finding.stacks {
            let _ = write!(out, "<p>{}</p><pre>", escaped(&stack.title));
            for frame in &stack.frames {
                let function = frame.function.as_deref().unwrap_or("?");
                let place = match (&frame.file, frame.line) {
                    (Some(file), Some(line)) => format!(" {file}:{line}"),
                    (Some(file), None) => format!(" {file}"),
                    (None, _) => match (&frame.object, frame.offset) {
                        (Some(object), Some(offset)) => format!(" ({object}+{offset:#x})"),
                        (Some(object), None) => format!(" ({object})"),
                        (None, _) => String::new(),
                    },
                };
                let _ = writeln!(out, "{}{}", escaped(function), escaped(&place));
            }
            out.push_str("</pre>\n");
        }
        out.push_str("</details>\n");
    }
    left_out(&mut out, findings.len(), "findings");
    out
}

#[cfg(test)]
mod tests;

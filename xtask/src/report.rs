//! `cargo xtask report`: opens pages of `anyverbs report` in a headless browser, and judges what a reader sees there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Deserialize;

use crate::browser::{self, Browser, Opened};
use crate::conformance::{Tally, quiet};
use crate::dist::{self, Dist};
use crate::workspace::{root, target};
use crate::{interrupt, packages};

/// The width of a window on a desk, and on a phone.
const WIDE: u32 = 1240;
const NARROW: u32 = 480;

/// The bounds of a page of a large trace.
const LARGE_REPORT: Duration = Duration::from_secs(10);
const LARGE_BYTES: u64 = 500_000;
const LARGE_LOAD: Duration = Duration::from_secs(5);

/// A run of two programs, and its page.
struct Run {
    name: &'static str,
    queue_pairs: usize,
    /// The messages of each queue pair.
    messages: usize,
    faults: &'static str,
}

const SMALL: Run =
    Run { name: "small", queue_pairs: 1, messages: 300, faults: "drop received packet 3" };
/// 20,000 sends and as many receives.
const LARGE: Run = Run {
    name: "large",
    queue_pairs: 8,
    messages: 2_500,
    faults: "on qp 1: drop received packet 1000",
};

/// A page, and what it was made of.
struct Page {
    file: PathBuf,
    /// The findings of the run, as lines of JSON.
    found: Vec<Finding>,
    /// The length of the trace.
    bytes: u64,
    /// That the report took.
    time: Duration,
}

#[derive(Debug, Deserialize)]
struct Finding {
    check: String,
    message: String,
}

/// The answer of the script in `page.js`.
#[derive(Debug, Deserialize)]
struct Seen {
    title: String,
    elements: usize,
    window: f64,
    content: f64,
    resources: Vec<String>,
    broken_links: Vec<String>,
    drawings: Vec<Drawing>,
    findings: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct Drawing {
    title: String,
    width: f64,
    height: f64,
    overlapping: Vec<String>,
    outside: Vec<String>,
    smallest_text: f64,
    bars: Vec<Bar>,
    is_painted: bool,
    heads: Vec<String>,
    arrows: Vec<Arrow>,
    marks: usize,
}

#[derive(Debug, Deserialize)]
struct Bar {
    class: String,
    title: String,
    is_seen: bool,
}

#[derive(Debug, Deserialize)]
struct Arrow {
    class: String,
    label: String,
    length: f64,
    is_drawn: bool,
}

/// Builds, and opens the pages.
pub(crate) fn run(options: &dist::Options) -> anyhow::Result<()> {
    interrupt::catch();
    let tally = run_counted(&dist::run(options)?)?;
    println!("{tally}");
    ensure!(tally.failed == 0 && tally.skipped == 0, "the pages were not all right");
    Ok(())
}

/// Opens the pages. Where there is no browser, they count as skipped.
pub(crate) fn run_counted(dist: &Dist) -> anyhow::Result<Tally> {
    packages::ensure(&[packages::IPROUTE2, packages::PERFTEST])?;
    if let Err(error) = packages::ensure(&[packages::CHROMIUM]) {
        interrupt::check()?;
        println!("skip report: no browser: {error:#}");
        return Ok(Tally { skipped: 4, ..Tally::default() });
    }
    let scratch = scratch()?;
    let mut browser = Browser::start(&scratch)?;
    let mut tally = Tally::default();
    for run in [&SMALL, &LARGE] {
        interrupt::check()?;
        let page = run.page(dist, &scratch)?;
        for width in [WIDE, NARROW] {
            let opened = browser.open(&page.file, width)?;
            let seen = browser.evaluate(include_str!("report/page.js"))?;
            let seen = serde_json::from_value(seen).context("what the page's script says")?;
            let complaints = run.judge(&page, &opened, &seen);
            let facts = format!(
                "{} kB out of a trace of {} kB in {:.2} s, loaded in {:.2} s, {} elements",
                page.length()? / 1000,
                page.bytes / 1000,
                page.time.as_secs_f64(),
                opened.time.as_secs_f64(),
                seen.elements,
            );
            if complaints.is_empty() {
                tally.passed += 1;
                println!("ok   {} page, {width} pixels  {facts}", run.name);
            } else {
                tally.failed += 1;
                let file = page.file.display();
                println!("FAIL {} page, {width} pixels: {file}  {facts}", run.name);
                complaints.iter().for_each(|complaint| println!("       {complaint}"));
            }
        }
    }
    Ok(tally)
}

/// Draws `docs/images/report.png` anew.
pub(crate) fn picture(dist: &Dist) -> anyhow::Result<()> {
    const TO: &str = "docs/images/report.png";
    packages::ensure(&[packages::CHROMIUM])?;
    let scratch = scratch()?;
    let page = SMALL.page(dist, &scratch)?;
    browser::picture(&page.file, &root().join(TO), (1160, 1900), &scratch)?;
    println!("{TO}");
    Ok(())
}

fn scratch() -> anyhow::Result<PathBuf> {
    let scratch = target().join("report");
    fs::create_dir_all(&scratch).with_context(|| format!("cannot make {}", scratch.display()))?;
    Ok(scratch)
}

impl Page {
    fn length(&self) -> anyhow::Result<u64> {
        Ok(fs::metadata(&self.file)?.len())
    }
}

impl Run {
    /// Runs the programs on a host of their own, and makes the page.
    fn page(&self, dist: &Dist, scratch: &Path) -> anyhow::Result<Page> {
        let folder = scratch.join(self.name);
        if folder.exists() {
            fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot empty {}", folder.display()))?;
        }
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        // Status 66 is that of a program with findings.
        let script = "ip link set lo up\n\
            run() { \"$ANYVERBS\" run --trace trace.json --check --check-report found.json \"$@\"; }\n\
            run --faults \"$FAULTS\" -- $PROGRAM >server.out 2>&1 & server=$!\n\
            until ss -ltn | grep -q :18515; do kill -0 $server; sleep 0.05; done\n\
            run -- $PROGRAM 127.0.0.1 >client.out 2>&1 || test $? = 66\n\
            wait $server || test $? = 66\n";
        let program =
            format!("ib_send_bw -s 3000 -t 4 -Q 1 -n {} -q {}", self.messages, self.queue_pairs);
        // SAFETY: cannot fail and touches no memory.
        let is_root = unsafe { libc::geteuid() } == 0;
        let mut command = Command::new("timeout");
        command.args(["60", "unshare", if is_root { "-n" } else { "-rn" }]);
        command.args(["sh", "-eu", "-c", script]).current_dir(&folder);
        command.env("ANYVERBS", dist.anyverbs()).env("PROGRAM", program);
        command.env("FAULTS", self.faults);
        quiet(&mut command).with_context(|| {
            let said = fs::read_to_string(folder.join("client.out")).unwrap_or_default();
            format!("the programs failed:\n{said}")
        })?;
        let found = fs::read_to_string(folder.join("found.json")).context("found.json")?;
        let found = found
            .lines()
            .map(|line| serde_json::from_str(line).with_context(|| line.to_owned()))
            .collect::<anyhow::Result<_>>()?;
        let bytes = fs::metadata(folder.join("trace.json")).context("trace.json")?.len();
        let mut report = Command::new(dist.anyverbs());
        report.args(["report", "trace.json", "found.json", "--output", "report.html"]);
        let begin = Instant::now();
        quiet(report.current_dir(&folder))?;
        Ok(Page { file: folder.join("report.html"), found, bytes, time: begin.elapsed() })
    }

    /// The faults of a page.
    fn judge(&self, page: &Page, opened: &Opened, seen: &Seen) -> Vec<String> {
        let mut wrong = Vec::new();
        let mut expect = |is_right: bool, what: String| {
            if !is_right {
                wrong.push(what);
            }
        };
        expect(seen.title == "anyverbs report", format!("its title is {:?}", seen.title));
        expect(
            opened.fetched == [browser::address(&page.file)] && seen.resources.is_empty(),
            format!("it fetches {:?} {:?}", opened.fetched, seen.resources),
        );
        expect(opened.complaints.is_empty(), format!("the console: {:?}", opened.complaints));
        expect(seen.broken_links.is_empty(), format!("links to nothing: {:?}", seen.broken_links));
        expect(
            seen.content <= seen.window,
            format!("{} pixels in a window of {}", seen.content, seen.window),
        );
        self.judge_drawings(seen, &mut expect);
        expect(!page.found.is_empty(), "the programs have no finding".into());
        expect(
            seen.findings.len() == page.found.len(),
            format!("{} findings, not {}", seen.findings.len(), page.found.len()),
        );
        for (shown, found) in seen.findings.iter().zip(&page.found) {
            expect(
                shown.contains(&found.check) && shown.contains(&found.message),
                format!("it shows {shown:?} for {found:?}"),
            );
        }
        if self.name == LARGE.name {
            let length = page.length().unwrap_or(u64::MAX);
            expect(page.time < LARGE_REPORT, format!("the report took {:?}", page.time));
            expect(length < LARGE_BYTES, format!("it has {length} bytes"));
            expect(opened.time < LARGE_LOAD, format!("it took {:?} to load", opened.time));
        }
        wrong
    }

    fn judge_drawings(&self, seen: &Seen, expect: &mut impl FnMut(bool, String)) {
        let titles: Vec<_> = seen.drawings.iter().map(|drawing| drawing.title.as_str()).collect();
        let wanted = ["Throughput over time", "Latencies of SEND", "Sequence diagram"];
        expect(titles == wanted, format!("it draws {titles:?}"));
        for drawing in &seen.drawings {
            let title = &drawing.title;
            let mut holds =
                |is_right: bool, what: String| expect(is_right, format!("{title}: {what}"));
            holds(drawing.width > 300.0 && drawing.height > 80.0, "it is too small".into());
            holds(
                drawing.smallest_text >= 9.0,
                format!("text of {} pixels", drawing.smallest_text),
            );
            holds(drawing.overlapping.is_empty(), format!("overlapping {:?}", drawing.overlapping));
            holds(drawing.outside.is_empty(), format!("cut off {:?}", drawing.outside));
            match title.as_str() {
                "Throughput over time" => {
                    let of = |class: &str| drawing.bars.iter().filter(|b| b.class == class).count();
                    holds(of("bar") > 0, "no bar".into());
                    holds(of("bad") > 0, "no mark of the loss".into());
                    Self::judge_bars(drawing, &mut holds);
                }
                "Latencies of SEND" => {
                    let counts = drawing.bars.iter().map(|bar| bar.title.split(':').next());
                    let sum: usize = counts.flatten().filter_map(|n| n.parse::<usize>().ok()).sum();
                    let sends = self.queue_pairs * self.messages;
                    holds(sum == sends, format!("its bars are of {sum} sends, not {sends}"));
                    Self::judge_bars(drawing, &mut holds);
                }
                _ => self.judge_sequence(drawing, &mut holds),
            }
        }
    }

    fn judge_bars(drawing: &Drawing, holds: &mut impl FnMut(bool, String)) {
        let hidden: Vec<_> = drawing.bars.iter().filter(|bar| !bar.is_seen).collect();
        holds(hidden.is_empty(), format!("no size, or outside: {hidden:?}"));
        holds(drawing.is_painted, "something hides its highest bar".into());
    }

    fn judge_sequence(&self, drawing: &Drawing, holds: &mut impl FnMut(bool, String)) {
        // Each has a peer. A diagram of many events begins with those of a few queue pairs, and has 8 at most.
        let heads = 2..=(2 * self.queue_pairs).min(8);
        let mut names = drawing.heads.clone();
        names.sort();
        names.dedup();
        holds(heads.contains(&names.len()), format!("its queue pairs are {:?}", drawing.heads));
        holds(drawing.marks > 10, format!("{} marks of work", drawing.marks));
        holds(drawing.arrows.len() > 20, format!("{} arrows", drawing.arrows.len()));
        let stunted: Vec<_> = drawing
            .arrows
            .iter()
            .filter(|arrow| arrow.length < 40.0 || !arrow.is_drawn || arrow.label.is_empty())
            .collect();
        holds(stunted.is_empty(), format!("no arrows to see: {stunted:?}"));
        let lost: Vec<_> = drawing.arrows.iter().filter(|arrow| arrow.class == "lost").collect();
        holds(
            lost.len() == 1 && lost[0].label.ends_with("(lost)"),
            format!("one packet was lost: {lost:?}"),
        );
        let is_again = |arrow: &&Arrow| arrow.class == "again" && arrow.label.contains("again");
        // Among many packets some come in between.
        let is_near = self.name == SMALL.name;
        let any = drawing.arrows.iter().any(|arrow| is_again(&arrow));
        holds(any || !is_near, "no packet is sent again".into());
    }
}

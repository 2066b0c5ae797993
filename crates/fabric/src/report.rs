//! The outcomes for people: a table, JSON, and a plot.

use std::fmt::Write as _;

use serde::Serialize;

use crate::file::{Kind, Plan};
use crate::run::Outcome;

/// Points of a curve in the plot.
const POINTS: usize = 400;
/// Colours of the curves, in turn. They differ for people who do not tell red from green as well.
const COLOURS: [&str; 8] =
    ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#000000", "#999999"];

/// The best setting: the one with the least 99 % flow completion time among those of which no connection gave up.
#[must_use]
pub fn best(outcomes: &[Outcome]) -> Option<&Outcome> {
    let whole = outcomes.iter().filter(|outcome| outcome.failed == 0);
    whole.min_by(|a, b| {
        (a.p99_us, a.mean_us).partial_cmp(&(b.p99_us, b.mean_us)).expect("times are numbers")
    })
}

impl Plan {
    /// The network and the workload in a sentence.
    #[must_use]
    pub fn summary(&self) -> String {
        let (network, w) = (&self.topology, &self.workload);
        let what = match w.kind {
            Kind::Incast => {
                let senders = w.senders.map_or(network.hosts() - 1, |n| n as usize);
                let senders = counted(senders, "sender");
                format!("incast of {senders}, {} x {} bytes each", w.count, w.size)
            }
            Kind::AllToAll => format!("all-to-all, {} x {} bytes for each pair", w.count, w.size),
            Kind::RingAllReduce => format!("ring all-reduce, {} x {} bytes", w.count, w.size),
        };
        let (hosts, switches, links) = (network.hosts(), network.switches(), network.links());
        let switches = if switches == 1 { "1 switch" } else { &format!("{switches} switches") };
        let links = counted(links, "link");
        format!("{hosts} hosts, {switches}, {links}; {what}; seed {}", self.seed)
    }
}

/// The first of these outcomes that is the same as a later one in all but its name: what the settings change did not matter.
fn twin<'a>(outcomes: &'a [Outcome], of: &Outcome) -> Option<&'a Outcome> {
    let is_same = |other: &&Outcome| {
        let named = Outcome { setting: of.setting.clone(), ..(*other).clone() };
        named == *of
    };
    outcomes.iter().find(is_same)
}

/// A table of at most 100 columns.
#[must_use]
pub fn table(outcomes: &[Outcome]) -> String {
    let mut text = format!(
        "{:16} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7} {:>6} {:>6}\n",
        "setting",
        "total",
        "mean",
        "median",
        "99 %",
        "max",
        "Gbit/s",
        "drops",
        "marks",
        "again",
        "queue"
    );
    for (n, o) in outcomes.iter().enumerate() {
        let name: String = o.setting.chars().take(16).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "{name:16} {:>8} {:>8} {:>8} {:>8} {:>8} {:>7} {:>7} {:>7} {:>6} {:>6}",
            time(o.total_us),
            time(o.mean_us),
            time(o.median_us),
            time(o.p99_us),
            time(o.max_us),
            three(o.goodput_gbps),
            count(o.drops + o.losses),
            count(o.marks),
            count(o.retransmitted),
            count(o.longest_queue_bytes),
        );
        if o.failed > 0 {
            let _ = writeln!(
                text,
                "  {} gave up; the times are those of {} that arrived",
                counted(o.failed, "connection"),
                counted(o.messages, "message")
            );
        }
        if o.retransmitted > 0 && o.drops + o.losses == 0 {
            let _ = writeln!(
                text,
                "  nothing was lost: answers took longer than probe_us, with up to {} in one queue",
                time(o.longest_wait_us)
            );
        }
        if let Some(twin) = twin(&outcomes[..n], o) {
            let _ = writeln!(
                text,
                "  the same run as {:?}: what they differ in did not matter",
                twin.setting
            );
        }
    }
    text
}

/// The meaning of the table, in words.
#[must_use]
pub fn verdict(outcomes: &[Outcome]) -> String {
    let Some(best) = best(outcomes) else {
        return "connections gave up with every setting\n".to_owned();
    };
    let over = (best.total_us / best.bound_us - 1.0) * 100.0;
    let over = if over.abs() < 0.05 { 0.0 } else { over };
    let bound = format!(
        "the busiest link of a host needs {} for its bytes and their headers",
        time(best.bound_us)
    );
    if outcomes.len() == 1 {
        return format!("{bound}; the run took {over:.1} % more\n");
    }
    format!("best by the 99 % time: {}\n{bound}; that run took {over:.1} % more\n", best.setting)
}

/// All outcomes as JSON.
#[must_use]
pub fn json(plan: &Plan, outcomes: &[Outcome]) -> String {
    #[derive(Serialize)]
    struct Report<'a> {
        seed: u64,
        hosts: usize,
        switches: usize,
        links: usize,
        workload: Kind,
        best: Option<&'a str>,
        outcomes: &'a [Outcome],
    }
    let report = Report {
        seed: plan.seed,
        hosts: plan.topology.hosts(),
        switches: plan.topology.switches(),
        links: plan.topology.links(),
        workload: plan.workload.kind,
        best: best(outcomes).map(|best| best.setting.as_str()),
        outcomes,
    };
    let mut text = serde_json::to_string_pretty(&report).expect("numbers and strings");
    text.push('\n');
    text
}

/// The shares of messages that were complete within a time, as an SVG picture. The axis of time is logarithmic.
#[must_use]
pub fn plot(plan: &Plan, outcomes: &[Outcome]) -> String {
    let (left, top, width, height) = (60.0, 40.0, 620.0, 360.0);
    let times = || outcomes.iter().flat_map(|o| [o.times_us.first(), o.times_us.last()]).flatten();
    let least = times().fold(f64::INFINITY, |a, b| a.min(*b)).clamp(1e-3, 1e12);
    let most = times().fold(0.0_f64, |a, b| a.max(*b)).max(least * 1.01);
    let (low, high) = (least.log10().floor(), most.log10().ceil());
    let x = |us: f64| left + width * (us.log10() - low) / (high - low);
    let y = |share: f64| top + height * (1.0 - share);
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 860 460\" \
         font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"860\" height=\"460\" fill=\"white\"/>\n",
    );
    // Writing to a String cannot fail.
    let _ = writeln!(svg, "<text x=\"{left}\" y=\"20\">{}</text>", escaped(&plan.summary()));
    let mut line = |x1: f64, y1: f64, x2: f64, y2: f64, label: &str, at: (f64, f64, &str)| {
        let (tx, ty, anchor) = at;
        let _ = writeln!(
            svg,
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"#dddddd\"/>\
             <text x=\"{tx:.1}\" y=\"{ty:.1}\" text-anchor=\"{anchor}\">{label}</text>"
        );
    };
    for exponent in low as i32..=high as i32 {
        let at = x(10f64.powi(exponent));
        let label = time(10f64.powi(exponent));
        line(at, top, at, top + height, &label, (at, top + height + 18.0, "middle"));
    }
    for percent in [0, 25, 50, 75, 100] {
        let at = y(f64::from(percent) / 100.0);
        let label = format!("{percent} %");
        line(left, at, left + width, at, &label, (left - 6.0, at + 4.0, "end"));
    }
    let middle = left + width / 2.0;
    let _ = writeln!(
        svg,
        "<text x=\"{middle}\" y=\"445\" text-anchor=\"middle\">flow completion time</text>"
    );
    for (number, outcome) in outcomes.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let count = outcome.times_us.len();
        let mut points = String::new();
        for step in 0..=POINTS.min(count) {
            let rank = step * count / POINTS.min(count).max(1);
            let us = outcome.times_us.get(rank.saturating_sub(1)).copied().unwrap_or(least);
            let _ = write!(points, "{:.1},{:.1} ", x(us), y(rank as f64 / count.max(1) as f64));
        }
        let at = top + 14.0 + 20.0 * number as f64;
        let _ = writeln!(
            svg,
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>\n\
             <line x1=\"695\" y1=\"{at}\" x2=\"715\" y2=\"{at}\" stroke=\"{colour}\" stroke-width=\"3\"/>\
             <text x=\"720\" y=\"{}\">{}</text>",
            points.trim_end(),
            at + 4.0,
            escaped(&outcome.setting)
        );
    }
    svg.push_str("</svg>\n");
    svg
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// A time with three digits and a unit.
fn time(us: f64) -> String {
    match us {
        us if us < 0.9995 => format!("{} ns", three(us * 1e3)),
        us if us < 999.5 => format!("{} us", three(us)),
        us if us < 999_500.0 => format!("{} ms", three(us / 1e3)),
        us => format!("{} s", three(us / 1e6)),
    }
}

/// Three digits of a number below a thousand.
fn three(number: f64) -> String {
    match number {
        // Without a sign, which is left of a sum of differences.
        n if n.abs() < 0.005 => "0.00".to_owned(),
        n if n < 9.995 => format!("{n:.2}"),
        n if n < 99.95 => format!("{n:.1}"),
        n => format!("{n:.0}"),
    }
}

/// A number of things.
fn counted(number: usize, thing: &str) -> String {
    format!("{number} {thing}{}", if number == 1 { "" } else { "s" })
}

/// A count of at most five signs.
fn count(number: u64) -> String {
    match number {
        0..=9999 => number.to_string(),
        10_000..=9_999_999 => format!("{}k", number / 1000),
        10_000_000..=9_999_999_999 => format!("{}M", number / 1_000_000),
        _ => format!("{}G", number / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes() -> (Plan, Vec<Outcome>) {
        let plan = Plan::parse(
            "[network]\nshape = 'star'\nhosts = 9\n[workload]\nkind = 'incast'\nsize = 50_000",
        )
        .unwrap();
        let outcomes = plan.settings.iter().map(|(name, t)| plan.run(name, *t)).collect();
        (plan, outcomes)
    }

    #[test]
    fn the_table_is_narrow_and_names_the_best() {
        let (_, outcomes) = outcomes();
        let table = table(&outcomes);
        // Nothing is lost, so it does not matter what a receiver keeps behind a loss.
        let twin = "  the same run as \"as given\": what they differ in did not matter";
        let go_back = table.lines().skip_while(|line| !line.starts_with("go-back-n")).nth(1);
        assert_eq!(go_back, Some(twin), "{table}");
        let twins = table.lines().filter(|line| line.starts_with("  the same run as ")).count();
        assert_eq!(table.lines().count(), outcomes.len() + 1 + twins);
        assert!(twins < outcomes.len() - 1, "{table}");
        assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
        let least = outcomes.iter().map(|o| o.p99_us).fold(f64::INFINITY, f64::min);
        assert!((best(&outcomes).unwrap().p99_us - least).abs() < 1e-9);
        assert!(verdict(&outcomes).contains(&best(&outcomes).unwrap().setting));
    }

    #[test]
    fn a_setting_with_which_connections_gave_up_is_not_the_best() {
        let (_, mut outcomes) = outcomes();
        let first = best(&outcomes).unwrap().setting.clone();
        for outcome in outcomes.iter_mut().filter(|outcome| outcome.setting == first) {
            outcome.failed = 1;
        }
        assert_ne!(best(&outcomes).unwrap().setting, first);
        assert!(table(&outcomes).contains("  1 connection gave up; the times are those of "));
    }

    #[test]
    fn what_is_sent_again_without_a_loss_is_explained() {
        let text = "[network]\nshape = 'star'\nhosts = 9\nlink = { queue_bytes = 100_000_000 }
            [workload]\nkind = 'incast'\nsize = 500_000\n[transport]\nprobe_us = 1\ncontrol = 'none'";
        let plan = Plan::parse(text).unwrap();
        let outcome = plan.run("a", plan.transport);
        assert!(outcome.retransmitted > 0 && outcome.drops + outcome.losses == 0, "{outcome:?}");
        assert!(outcome.longest_wait_us > 1.0);
        let table = table(&[outcome]);
        assert!(
            table.contains("\n  nothing was lost: answers took longer than probe_us, "),
            "{table}"
        );
        assert!(table.lines().all(|line| line.chars().count() <= 100), "{table}");
    }

    /// The switches mark long before the wait in their queues is as long as the probe timeout.
    #[test]
    fn marks_make_nothing_leave_again() {
        let text = "[network]\nshape = 'two-tier'\nhosts = 8\nhosts_per_leaf = 4\nspines = 1\nlink = { gbps = 100 }
            uplink = { gbps = 25, queue_bytes = 100_000_000 }\n[workload]\nkind = 'all-to-all'\nsize = 500_000";
        let plan = Plan::parse(text).unwrap();
        let outcome = plan.run("a", plan.transport);
        assert!(outcome.marks > 0 && outcome.longest_wait_us > 400.0, "{outcome:?}");
        assert_eq!((outcome.retransmitted, outcome.drops), (0, 0));
    }

    /// With these seeds a window became so small that it closed over packets of which none asked for an ACK.
    #[test]
    fn a_window_that_shrinks_leaves_nobody_waiting() {
        let text = "[network]\nshape = 'two-tier'\nhosts = 16\nhosts_per_leaf = 4\nspines = 2
            uplink = { gbps = 50 }\n[workload]\nkind = 'all-to-all'\nsize = 1_000_000";
        let mut plan = Plan::parse(text).unwrap();
        for seed in [4, 6, 7, 8] {
            plan.seed = seed;
            let outcome = plan.run("a", plan.transport);
            assert!(outcome.marks > 0 && outcome.drops == 0, "{outcome:?}");
            assert_eq!(outcome.retransmitted, 0, "seed {seed}");
        }
    }

    #[test]
    fn the_plot_has_a_curve_for_each_setting() {
        let (plan, outcomes) = outcomes();
        let svg = plot(&plan, &outcomes);
        assert_eq!(svg.matches("<polyline").count(), outcomes.len());
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let value: serde_json::Value = serde_json::from_str(&json(&plan, &outcomes)).unwrap();
        assert_eq!(value["outcomes"].as_array().unwrap().len(), outcomes.len());
    }

    #[test]
    fn one_thing_is_no_plural() {
        let links = "shape = 'links'\nhosts = ['a', 'b']\n[[network.links]]\nends = ['a', 'b']";
        let work = "[workload]\nkind = 'incast'\nsize = 1";
        let plan = Plan::parse(&format!("[network]\n{links}\n{work}")).unwrap();
        let wanted = "2 hosts, 0 switches, 1 link; incast of 1 sender, 1 x 1 bytes each; seed 1";
        assert_eq!(plan.summary(), wanted);
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!([0.5, 1.0, 12.34, 999.6].map(time), ["500 ns", "1.00 us", "12.3 us", "1.00 ms"]);
        assert_eq!([-0.0, -1e-9, 0.0].map(time), ["0.00 ns"; 3]);
        assert_eq!([7, 12_345, 123_456_789].map(count), ["7", "12k", "123M"]);
    }
}

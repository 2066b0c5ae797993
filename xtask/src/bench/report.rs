//! The result: as a table to read, as JSON, and as the table of docs/performance.md.

use std::fmt::Write;

use serde::Serialize;

use super::rows::{Row, Target};
use super::turns::{Missing, Turns};

/// A row that was measured.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Outcome {
    pub(super) place: String,
    pub(super) what: String,
    pub(super) unit: &'static str,
    /// The median, or why there is none.
    #[serde(flatten)]
    pub(super) ours: Figure,
    pub(super) checks: Vec<Check>,
    pub(super) states: String,
    /// The runs behind the figure; the first contender is ours.
    pub(super) turns: Turns,
}

/// A figure, or why there is none.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Figure {
    Median(f64),
    Missing(Missing),
}

/// A target and whether it was met.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Check {
    pub(super) peer: Option<&'static str>,
    pub(super) theirs: Option<Figure>,
    /// The ratio to the peer or, without one, the figure.
    pub(super) value: Option<f64>,
    pub(super) target: String,
    pub(super) verdict: Verdict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    Met,
    Missed,
    /// There is no target, or there was nothing to judge.
    None,
}

impl Verdict {
    fn text(self) -> &'static str {
        match self {
            Self::Met => "met",
            Self::Missed => "MISSED",
            Self::None => "",
        }
    }
}

impl From<Result<f64, Missing>> for Figure {
    fn from(result: Result<f64, Missing>) -> Self {
        result.map_or_else(Figure::Missing, Figure::Median)
    }
}

impl Figure {
    fn text(&self, unit: &str) -> String {
        match self {
            Self::Median(value) => format!("{} {unit}", number(*value)),
            Self::Missing(Missing::Failed(_)) => "failed".into(),
            Self::Missing(Missing::Unsettled { .. }) => "unsettled".into(),
        }
    }

    fn trouble(&self) -> Option<&Missing> {
        match self {
            Self::Median(_) => None,
            Self::Missing(why) => Some(why),
        }
    }
}

/// Three digits that count.
fn number(value: f64) -> String {
    match value.abs() {
        x if x >= 99.95 => format!("{value:.0}"),
        x if x >= 9.995 => format!("{value:.1}"),
        x if x >= 0.9995 || x == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

impl Outcome {
    /// `turns` has our figures, then those of the peers in their order.
    pub(super) fn new(row: &Row, turns: Turns) -> Self {
        let ours = turns.median(0).into();
        let mut peers = 0;
        let checks = row.against.iter().map(|against| {
            let peer = against.peer.as_ref();
            let at = peer.map(|_| {
                peers += 1;
                peers
            });
            let value = match (at, &ours) {
                (Some(at), _) => turns.ratio(0, at).ok(),
                (None, Figure::Median(value)) => Some(*value),
                _ => None,
            };
            Check {
                peer: peer.map(|peer| peer.name),
                theirs: at.map(|at| turns.median(at).into()),
                value,
                target: against.target.to_string(),
                verdict: match value {
                    Some(_) if against.target == Target::Open => Verdict::None,
                    Some(value) if against.target.is_met(value) => Verdict::Met,
                    Some(_) => Verdict::Missed,
                    None => Verdict::None,
                },
            }
        });
        Outcome {
            place: row.place.to_string(),
            what: row.what.clone(),
            unit: row.unit,
            checks: checks.collect(),
            ours,
            states: turns.states(),
            turns,
        }
    }

    /// Whether a program on the device failed.
    pub(super) fn failed(&self) -> bool {
        matches!(self.ours, Figure::Missing(Missing::Failed(_)))
    }

    /// Its lines: row, ours, peer, theirs, ratio, target, verdict, state.
    fn cells(&self) -> Vec<[String; 8]> {
        let line = |at: usize, check: &Check| {
            let first = at == 0;
            let peer = check.peer.unwrap_or("-").to_owned();
            let theirs = check.theirs.as_ref().map_or("-".into(), |f| f.text(self.unit));
            // Without a peer the figure stands in our column already.
            let ratio = check.value.filter(|_| check.peer.is_some());
            [
                if first { self.what.clone() } else { String::new() },
                if first { self.ours.text(self.unit) } else { String::new() },
                peer,
                theirs,
                ratio.map_or("-".into(), number),
                check.target.clone(),
                check.verdict.text().into(),
                if first { self.states.clone() } else { String::new() },
            ]
        };
        self.checks.iter().enumerate().map(|(at, check)| line(at, check)).collect()
    }

    /// The reasons why figures are missing.
    fn troubles(&self) -> impl Iterator<Item = String> {
        let ours = self.ours.trouble().map(|why| ("anyverbs", why));
        let theirs = self.checks.iter().filter_map(|check| {
            Some((check.peer.unwrap_or_default(), check.theirs.as_ref()?.trouble()?))
        });
        ours.into_iter().chain(theirs).map(|(who, why)| {
            format!("{}, {}: {who}: {}", self.place, self.what, brief(&why.to_string()))
        })
    }
}

/// The reason of a failure, without the rest of the programs' output, which is in the JSON.
pub(super) fn brief(why: &str) -> String {
    const LINES: usize = 4;
    let mut lines = why.lines().filter(|line| !line.trim().is_empty());
    let mut text = lines.by_ref().take(LINES).collect::<Vec<_>>().join("\n  ");
    if lines.next().is_some() {
        text += "\n  ...";
    }
    text
}

const HEADER: [&str; 8] = ["", "anyverbs", "peer", "", "ratio", "target", "", "state"];

/// The table for the terminal.
pub(super) fn table(outcomes: &[Outcome]) -> String {
    let lines: Vec<_> = outcomes.iter().map(|outcome| (outcome, outcome.cells())).collect();
    let mut widths = HEADER.map(str::len);
    for cells in lines.iter().flat_map(|(_, cells)| cells) {
        for (width, cell) in widths.iter_mut().zip(cells) {
            *width = (*width).max(cell.len());
        }
    }
    // Numbers stand to the right.
    let line = |cells: &[String; 8]| {
        let cells = cells.iter().zip(widths).enumerate().map(|(at, (cell, width))| match at {
            1 | 3 | 4 => format!("{cell:>width$}"),
            _ => format!("{cell:<width$}"),
        });
        format!("  {}", cells.collect::<Vec<_>>().join("  ").trim_end())
    };
    let mut text = line(&HEADER.map(str::to_owned)) + "\n";
    let mut place = "";
    for (outcome, cells) in &lines {
        if outcome.place != place {
            place = &outcome.place;
            let _ = writeln!(text, "{place}");
        }
        for cells in cells {
            let _ = writeln!(text, "{}", line(cells));
        }
    }
    let count = |verdict| {
        outcomes.iter().flat_map(|o| &o.checks).filter(|check| check.verdict == verdict).count()
    };
    let (met, missed) = (count(Verdict::Met), count(Verdict::Missed));
    let _ = writeln!(text, "{met} targets met, {missed} missed");
    for trouble in outcomes.iter().flat_map(Outcome::troubles) {
        let _ = writeln!(text, "{trouble}");
    }
    text
}

/// The table for docs/performance.md.
pub(super) fn markdown(outcomes: &[Outcome]) -> String {
    let mut text = String::from(
        "| what | anyverbs | peer | its figure | ratio | target | result | state |\n\
         |---|--:|---|--:|--:|---|---|---|\n",
    );
    let mut place = "";
    for outcome in outcomes {
        if outcome.place != place {
            place = &outcome.place;
            let _ = writeln!(text, "| **{place}** | | | | | | | |");
        }
        for cells in outcome.cells() {
            let _ = writeln!(text, "| {} |", cells.join(" | "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::contender::{Contender, GBITS};
    use super::super::place::Place;
    use super::super::readings::Reading;
    use super::super::rows::Against;
    use super::super::turns::Round;
    use super::*;

    fn row(targets: &[(Option<&'static str>, Target)]) -> Row {
        let contender = |name| Contender::alone(name, String::new(), Reading::Number);
        Row {
            what: "WRITE".into(),
            place: Place::SameHost,
            unit: GBITS,
            ours: contender("anyverbs"),
            against: targets
                .iter()
                .map(|(peer, target)| Against { peer: peer.map(contender), target: *target })
                .collect(),
            once: false,
        }
    }

    fn turns(figures: &[Option<f64>]) -> Turns {
        let failed = |f: &Option<f64>| f.is_none().then(|| "it hangs".to_owned());
        Turns {
            rounds: vec![Round { cache_line_ns: [50.0, 50.0], figures: figures.to_vec() }],
            discarded: 0,
            failures: figures.iter().map(failed).collect(),
        }
    }

    #[test]
    fn each_peer_has_its_verdict() {
        let row = row(&[
            (Some("A"), Target::AtLeast(1.5)),
            (None, Target::AtMost(25.0)),
            (Some("B"), Target::AtLeast(1.5)),
            (Some("C"), Target::Open),
        ]);
        let outcome = Outcome::new(&row, turns(&[Some(20.0), Some(10.0), Some(40.0), Some(1.0)]));
        let verdicts: Vec<_> = outcome.checks.iter().map(|c| (c.value, c.verdict)).collect();
        assert_eq!(
            verdicts,
            [
                (Some(2.0), Verdict::Met),
                (Some(20.0), Verdict::Met),
                (Some(0.5), Verdict::Missed),
                (Some(20.0), Verdict::None)
            ]
        );
        let text = table(&[outcome]);
        assert!(text.contains("2 targets met, 1 missed"), "{text}");
    }

    #[test]
    fn a_failed_contender_is_named_and_not_judged() {
        let row = row(&[(Some("A"), Target::AtLeast(1.5)), (None, Target::AtLeast(1.0))]);
        let peer_failed = Outcome::new(&row, turns(&[Some(20.0), None]));
        assert!(!peer_failed.failed());
        assert_eq!(peer_failed.checks[0].verdict, Verdict::None);
        assert_eq!(peer_failed.checks[1].verdict, Verdict::Met);
        let text = table(&[peer_failed]);
        assert!(text.contains("same host, WRITE: A: it hangs"), "{text}");
        let ours_failed = Outcome::new(&row, turns(&[None, Some(20.0)]));
        assert!(ours_failed.failed());
        assert!(ours_failed.checks.iter().all(|check| check.verdict == Verdict::None));
    }

    #[test]
    fn three_digits() {
        let shown = [1234.5, 99.96, 26.04, 3.456, 0.0534, 0.0].map(number);
        assert_eq!(shown, ["1234", "100", "26.0", "3.46", "0.053", "0.00"]);
    }
}

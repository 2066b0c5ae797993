//! The figures of contenders that ran in turn.

use std::fmt;

use serde::Serialize;

use super::machine::State;

/// The results of contenders that ran in turn.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Turns {
    /// Each with a figure of each contender that has not failed.
    pub(super) rounds: Vec<Round>,
    /// Rounds in which the machine changed its state: their figures are not kept.
    pub(super) discarded: usize,
    /// The reasons why contenders have no figures.
    pub(super) failures: Vec<Option<String>>,
}

/// The reason why there is no figure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Missing {
    /// The program failed with this output.
    Failed(String),
    /// The machine changed its state in each of this many rounds.
    Unsettled { rounds: usize },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(why) => f.write_str(why),
            Self::Unsettled { rounds } => {
                write!(f, "the machine changed its state in each of {rounds} rounds")
            }
        }
    }
}

/// Each contender once.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Round {
    /// Nanoseconds of a cache line to the other processor: before, and after.
    pub(super) cache_line_ns: [f64; 2],
    pub(super) figures: Vec<Option<f64>>,
}

impl Round {
    /// The state in which all ran, if it was one.
    pub(super) fn state(&self) -> Option<State> {
        let [before, after] = self.cache_line_ns.map(State::of);
        (before == after).then_some(before)
    }
}

impl Turns {
    /// The median of a contender, or why there is none.
    pub(super) fn median(&self, contender: usize) -> Result<f64, Missing> {
        self.median_of(contender, |round| round.figures[contender])
    }

    /// The median of the rounds' ratios of one contender to another.
    pub(super) fn ratio(&self, ours: usize, theirs: usize) -> Result<f64, Missing> {
        if let Some(failure) = &self.failures[ours] {
            return Err(Missing::Failed(failure.clone()));
        }
        self.median_of(theirs, |round| Some(round.figures[ours]? / round.figures[theirs]?))
    }

    fn median_of(
        &self,
        contender: usize,
        value: impl Fn(&Round) -> Option<f64>,
    ) -> Result<f64, Missing> {
        if let Some(failure) = &self.failures[contender] {
            return Err(Missing::Failed(failure.clone()));
        }
        let unsettled = Missing::Unsettled { rounds: self.discarded };
        median(self.rounds.iter().filter_map(value).collect()).ok_or(unsettled)
    }

    /// The states of the rounds that count, as `near` or `near/far`.
    pub(super) fn states(&self) -> String {
        let mut states: Vec<_> = self.rounds.iter().filter_map(Round::state).collect();
        states.sort_unstable();
        states.dedup();
        states.iter().map(State::to_string).collect::<Vec<_>>().join("/")
    }
}

pub(super) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    let upper = *values.get(middle)?;
    Some(if values.len().is_multiple_of(2) {
        f64::midpoint(values[middle - 1], upper)
    } else {
        upper
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(rounds: &[(f64, f64)]) -> Turns {
        let round = |(ours, theirs): &(f64, f64)| Round {
            cache_line_ns: [50.0, 60.0],
            figures: vec![Some(*ours), Some(*theirs)],
        };
        Turns {
            rounds: rounds.iter().map(round).collect(),
            discarded: 0,
            failures: vec![None, None],
        }
    }

    #[test]
    fn the_median_of_few() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(vec![4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median(vec![]), None);
    }

    #[test]
    fn the_ratio_is_of_rounds_and_not_of_medians() {
        // The machine ran three times as fast in two rounds.
        let turns = turns(&[(2.0, 1.0), (6.0, 3.0), (6.0, 3.0)]);
        assert_eq!(turns.ratio(0, 1), Ok(2.0));
        assert_eq!(turns.median(0), Ok(6.0));
        assert_eq!(turns.states(), "near");
    }

    #[test]
    fn a_failed_contender_has_no_figure() {
        let mut turns = turns(&[(2.0, 1.0)]);
        turns.failures[1] = Some("gone".into());
        assert_eq!(turns.median(1), Err(Missing::Failed("gone".into())));
        assert_eq!(turns.ratio(0, 1), Err(Missing::Failed("gone".into())));
        assert_eq!(turns.median(0), Ok(2.0));
    }

    #[test]
    fn no_round_without_a_change_is_no_figure() {
        let turns = Turns { rounds: vec![], discarded: 4, failures: vec![None] };
        assert_eq!(turns.median(0), Err(Missing::Unsettled { rounds: 4 }));
    }
}

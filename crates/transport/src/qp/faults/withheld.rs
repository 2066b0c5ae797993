//! The deeds of rules on requests that may have no answer yet. If such a request fails for want of an answer, its peer is not blamed.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::time::Duration;

use anyverbs_faults::{Fault, Rule};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Psn;

/// Packets of which it is known what became of them. Far older ones than the newest have been answered.
const MOST: usize = 16_384;

/// The fate of a packet of a request.
#[derive(Clone, Copy, Debug)]
pub(in crate::qp) enum Fate {
    /// The rule has lost it.
    Lost(&'static Rule),
    /// It waits by the rule.
    Waits(&'static Rule),
    /// It has waited, and leaves.
    Released,
    /// It has waited, and this rule has lost it then.
    LostLate(&'static Rule),
    /// It left as ever.
    Left,
}

/// The deeds of rules on a packet that has no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::qp) struct Meddling {
    /// It is why there is no answer.
    pub(in crate::qp) is_cause: bool,
    /// They are told in words.
    pub(in crate::qp) what: String,
}

/// The packets that rules have lost or have let wait, by their PSNs, and the last answer that they have lost.
#[derive(Debug, Default)]
pub(super) struct Withheld {
    requests: HashMap<Psn, Tries>,
    answer: Option<LostAnswer>,
}

/// The last answer that a rule has lost.
#[derive(Clone, Copy, Debug)]
struct LostAnswer {
    /// It was one to this packet, and to those before it.
    psn: Psn,
    rule: &'static Rule,
    /// A packet that it answers has left since: the peer could have answered again.
    left_again: bool,
}

impl LostAnswer {
    /// Whether it answers a packet that is no older than those of which it is known what became of them.
    fn answers(&self, psn: Psn) -> bool {
        (0..MOST as i32).contains(&self.psn.since(psn))
    }
}

/// All that was sent of one packet, since a rule first decided about it.
#[derive(Clone, Copy, Debug)]
struct Tries {
    /// The last one.
    rule: &'static Rule,
    lost: u32,
    /// So many wait now.
    waiting: u32,
    since: Time,
    /// When one of them left first.
    left_at: Option<Time>,
    /// When one of them was lost first since no packet passes the port. From then on no answer has come either.
    cut_at: Option<Time>,
}

impl Withheld {
    /// Notes what becomes of a packet. `is_again`: it was sent before.
    pub(super) fn note(&mut self, psn: Psn, fate: Fate, is_again: bool, now: Time) {
        if let Some(answer) = &mut self.answer {
            if psn.since(answer.psn) > MOST as i32 {
                self.answer = None;
            } else if matches!(fate, Fate::Left | Fate::Released) && answer.answers(psn) {
                answer.left_again = true;
            }
        }
        let (Fate::Lost(rule) | Fate::LostLate(rule) | Fate::Waits(rule)) = fate else {
            if let Some(tries) = self.requests.get_mut(&psn) {
                tries.left_at.get_or_insert(now);
                tries.cut_at = None;
                tries.waiting -= u32::from(matches!(fate, Fate::Released) && tries.waiting > 0);
            }
            return;
        };
        if self.requests.len() >= MOST {
            let is_new = |old: &Psn| psn.since(*old).unsigned_abs() < MOST as u32 / 2;
            self.requests.retain(|old, _| is_new(old));
        }
        // No rule has touched what was sent of it before.
        let left_at = is_again.then_some(now);
        let new = Tries { rule, lost: 0, waiting: 0, since: now, left_at, cut_at: None };
        let tries = self.requests.entry(psn).or_insert(new);
        tries.rule = rule;
        match fate {
            Fate::Lost(_) => tries.lost += 1,
            Fate::LostLate(_) => {
                tries.lost += 1;
                tries.waiting = tries.waiting.saturating_sub(1);
            }
            _ => tries.waiting += 1,
        }
        if matches!(rule.fault, Fault::Down(_) | Fault::Gid(..)) {
            tries.cut_at.get_or_insert(now);
        }
    }

    /// A rule has lost an answer: to this packet, and to those before it.
    pub(super) fn note_answer(&mut self, psn: Psn, rule: &'static Rule) {
        self.answer = Some(LostAnswer { psn, rule, left_again: false });
    }

    /// Whether a try of a packet has left.
    pub(super) fn has_left(&self, psn: Psn) -> bool {
        self.requests.get(&psn).is_none_or(|tries| tries.left_at.is_some())
    }

    /// Tells the deeds of the rules on the oldest packet that has no answer.
    pub(super) fn with(&self, una: Psn, now: Time) -> Option<Meddling> {
        if let Some(answer) = self.answer.filter(|answer| answer.answers(una)) {
            let named = answer.rule.named();
            let mut what = format!("injected fault ({named}): the answer of the peer was lost");
            if answer.left_again {
                what += " before, and its packet left again";
            }
            return Some(Meddling { is_cause: !answer.left_again, what });
        }
        let Tries { rule, lost, waiting, since, left_at, cut_at } = *self.requests.get(&una)?;
        // An answer had to come before the port was down.
        let last = cut_at.unwrap_or(now);
        let withheld = left_at.unwrap_or(now).since(since) + now.since(last);
        let had = left_at.map_or(Duration::ZERO, |at| last.since(at));
        let is_cause = left_at.is_none() || withheld >= had;
        if !is_cause && lost == 0 && waiting == 0 {
            // It has waited for a while, and the peer had time enough.
            return None;
        }
        let mut what = format!("injected fault ({}): ", rule.named());
        let _ = match (lost, left_at) {
            (0, None) => write!(what, "its packet waits for {withheld:.1?} and has not left"),
            (0, Some(_)) => {
                write!(what, "its packet waited for {withheld:.1?}, and {had:.1?} were left")
            }
            (1, _) => write!(what, "its packet was lost once"),
            (lost, _) => write!(what, "its packet was lost {lost} times"),
        };
        if lost > 0 && waiting > 0 {
            what += ", and waits now";
        }
        if lost > 0 && left_at.is_some() {
            what += ", and left all the same";
        }
        Some(Meddling { is_cause, what })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use anyverbs_faults::Script;

    use super::*;

    fn rule(text: &str) -> &'static Rule {
        let script: &'static Script = Box::leak(Box::new(Script::parse(text).unwrap()));
        &script.rules[0]
    }

    fn at(ms: u64) -> Time {
        Time::from_nanos(ms * 1_000_000)
    }

    /// Gives the words about packet 7 at 1000 ms, after it had these fates at these times.
    fn said(fates: &[(u64, Fate)]) -> Option<(bool, String)> {
        let mut withheld = Withheld::default();
        for (n, (ms, fate)) in fates.iter().enumerate() {
            withheld.note(Psn::new(7), *fate, n > 0, at(*ms));
        }
        assert!(withheld.with(Psn::new(8), at(1000)).is_none());
        let has_left = fates.iter().any(|(_, fate)| matches!(fate, Fate::Left | Fate::Released));
        assert_eq!(withheld.has_left(Psn::new(7)), has_left, "{fates:?}");
        let Meddling { is_cause, what } = withheld.with(Psn::new(7), at(1000))?;
        let what = what.strip_prefix("injected fault (line 1 of the script): its packet ");
        Some((is_cause, what.unwrap().to_owned()))
    }

    #[test]
    fn the_script_is_the_cause_if_the_peer_had_less_time_than_the_rules_took() {
        let rule = rule("drop packets");
        let (lost, waits) = (Fate::Lost(rule), Fate::Waits(rule));
        let (left, released) = (Fate::Left, Fate::Released);
        let wanted = |is_cause, what: &str| Some((is_cause, what.to_owned()));
        for (fates, wanted) in [
            (&[(0, left), (100, left)][..], None),
            (&[(0, lost)], wanted(true, "was lost once")),
            (&[(0, lost), (500, lost)], wanted(true, "was lost 2 times")),
            (&[(0, waits), (500, waits)], wanted(true, "waits for 1.0s and has not left")),
            (&[(0, waits), (500, lost)], wanted(true, "was lost once, and waits now")),
            (
                &[(0, waits), (600, released)],
                wanted(true, "waited for 600.0ms, and 400.0ms were left"),
            ),
            // The peer had time enough.
            (&[(0, waits), (400, released)], None),
            (&[(0, lost), (100, left)], wanted(false, "was lost once, and left all the same")),
            // The first try left.
            (&[(0, left), (900, lost)], wanted(false, "was lost once, and left all the same")),
        ] {
            assert_eq!(said(fates), wanted, "{fates:?}");
        }
    }

    #[test]
    fn the_scripts_of_failing_rails_wait_for_these_words() {
        let scripts =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../conformance/failover/rails.py");
        let scripts = std::fs::read_to_string(scripts).unwrap();
        let mut withheld = Withheld::default();
        let rule = Rule { added: true, ..rule("down after 0s").clone() };
        withheld.note(Psn::new(7), Fate::Lost(Box::leak(Box::new(rule))), false, at(0));
        let said = withheld.with(Psn::new(7), at(1)).unwrap().what;
        let (before, _) = said.split_once("its packet was lost").unwrap();
        let wanted = before.replace("down after 0s", "{}");
        assert!(scripts.contains(&format!("\nOWN_RULE = \"{wanted}\"\n")), "{wanted}");
    }

    #[test]
    fn a_port_that_goes_down_keeps_answers_away_as_well() {
        let (delay, down) = (rule("delay packets by 1ms"), rule("down after 60ms"));
        let (waits, lost) = (Fate::Waits(delay), Fate::Lost(down));
        let wanted = |is_cause, what: &str| Some((is_cause, what.to_owned()));
        for (fates, wanted) in [
            // It was due when the port was down.
            (&[(59, waits), (60, Fate::LostLate(down))][..], wanted(true, "was lost once")),
            // It left, and its answer came too late.
            (
                &[(58, waits), (59, Fate::Released), (126, lost), (260, lost)],
                wanted(true, "was lost 2 times, and left all the same"),
            ),
            // The peer was silent for long before.
            (
                &[(58, waits), (59, Fate::Released), (700, lost)],
                wanted(false, "was lost once, and left all the same"),
            ),
        ] {
            assert_eq!(said(fates), wanted, "{fates:?}");
        }
    }

    #[test]
    fn an_answer_that_was_lost_is_the_cause_for_all_packets_that_it_answers() {
        let mut withheld = Withheld::default();
        withheld.note_answer(Psn::new(0xff_ffff), rule("drop received packet 5"));
        let is_cause = |psn| withheld.with(Psn::new(psn), at(5)).map(|meddling| meddling.is_cause);
        assert_eq!([0xff_fffe, 0xff_ffff, 0].map(is_cause), [Some(true), Some(true), None]);
        assert_eq!([0x7f_ffff, 0x80_0001].map(is_cause), [None, None], "they are far older");
    }

    #[test]
    fn an_answer_that_was_lost_is_no_cause_once_its_packet_has_left_again() {
        let mut withheld = Withheld::default();
        let rule = rule("drop received packet 1");
        withheld.note_answer(Psn::new(7), rule);
        let is_cause = |withheld: &Withheld| withheld.with(Psn::new(7), at(5)).map(|m| m.is_cause);
        // Those behind it are no second try.
        withheld.note(Psn::new(8), Fate::Left, false, at(1));
        assert_eq!(is_cause(&withheld), Some(true));
        withheld.note(Psn::new(7), Fate::Left, false, at(2));
        assert_eq!(is_cause(&withheld), Some(false));
        withheld.note_answer(Psn::new(7), rule);
        assert_eq!(is_cause(&withheld), Some(true), "that of the second try was lost as well");
        withheld.note(Psn::new(7 + 2 * MOST as u32), Fate::Left, false, at(3));
        assert_eq!(is_cause(&withheld), None, "packets so much younger leave when it was answered");
    }

    #[test]
    fn packets_are_forgotten_when_far_newer_ones_came() {
        let mut withheld = Withheld::default();
        let waits = Fate::Waits(rule("delay packets by 1s"));
        let first = 0xff_ff00;
        for n in 0..100_000 {
            withheld.note(Psn::new(first + n), waits, false, at(0));
            assert!(withheld.requests.len() <= MOST);
        }
        let knows = |n: u32| withheld.with(Psn::new(first + n), at(1)).is_some();
        assert_eq!([0, 99_000, 99_999].map(knows), [false, true, true]);
    }
}

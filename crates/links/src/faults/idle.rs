//! Rules that never did anything. The log names them at the end of the process: a test with such a rule has tested nothing.

use anyverbs_faults::{Fault, Place, QpFailure, QpName};
use anyverbs_proto::time::Time;

use super::{Active, CALLS, Faults, FaultyPort, Ordering, Plan};

/// The most rules that the log names.
const MOST_NAMED: usize = 20;

impl Plan {
    /// The rules do not hold any more. Those about calls are asked now: nobody knows them later.
    pub(super) fn end_rules(&mut self) {
        self.rules.iter().filter(|active| active.has_fired()).for_each(|a| a.rule.fired.set());
        self.past.append(&mut self.rules);
    }
}

impl Active {
    fn has_fired(&self) -> bool {
        let calls = || CALLS.get().is_some_and(|calls| calls.has_fired(self.number));
        self.rule.fired.is_set() || (!self.rule.is_of_device() && calls())
    }
}

impl Faults {
    /// The rules that have done nothing until now, a line each.
    pub fn idle(&self, now: Time) -> Vec<String> {
        let plan = self.plan.lock();
        let past = plan.past.iter().filter(|active| !active.rule.fired.is_set());
        let past = past.map(|active| self.say_idle(active, Some("it was cleared".into())));
        let idle = plan.rules.iter().filter(|active| !active.has_fired());
        let idle = idle.map(|active| self.say_idle(active, self.why_idle(active, now)));
        let mut lines: Vec<_> = past.chain(idle).collect();
        let others = lines.len().saturating_sub(MOST_NAMED);
        if others > 0 {
            lines.truncate(MOST_NAMED);
            lines.push(format!("{others} more rules never did anything"));
        }
        lines
    }

    fn say_idle(&self, Active { rule, .. }: &Active, why: Option<String>) -> String {
        let text = if rule.added { String::new() } else { format!(": {}", rule.text) };
        let why = why.map_or(String::new(), |why| format!("; {why}"));
        format!("a rule never did anything ({}){text}{why}", rule.named())
    }

    /// Why a rule has done nothing, where that is plain.
    fn why_idle(&self, Active { rule, since, .. }: &Active, now: Time) -> Option<String> {
        if matches!(rule.fault, Fault::Call { .. }) && CALLS.get().is_none() {
            return Some("the process makes no calls of C".into());
        }
        let age = now.since(*since);
        if age < rule.begins() {
            return Some(format!("its time had not come after {age:.1?}"));
        }
        let who = rule.place.device.as_deref().unwrap_or("the process");
        let named = rule.place.device.as_ref();
        let is_of = |port: &&FaultyPort| port.number == 1 && named.is_none_or(|d| *d == port.name);
        let devices = || self.ports.iter().filter(is_of);
        let made: u64 = devices().map(|device| device.made.load(Ordering::Relaxed)).sum();
        let raw: u64 = devices().map(|device| device.raw.load(Ordering::Relaxed)).sum();
        // Without a number the rule is about each queue pair, and raw packets have none that it could be about.
        let wants = rule.is_of_queue_pairs().then(|| match rule.place.qp {
            Some(QpName::Nth(n)) => n,
            Some(QpName::Number(_)) => 1,
            None => u64::from(raw > 0),
        })?;
        let queue_pairs =
            |n, kind| format!("{n} {kind}queue pair{}", if n == 1 { "" } else { "s" });
        if wants <= made {
            // A queue pair of an exact place that waits for this state would have failed in it.
            let Place { qp: Some(QpName::Nth(_)), port: None, peer: None, .. } = rule.place else {
                return None;
            };
            let waits = matches!(rule.fault, Fault::Fails(QpFailure::Err, _));
            return waits.then(|| "its queue pair was not in RTS after that time".into());
        }
        Some(match raw {
            0 => format!("{who} had {}", queue_pairs(made, "")),
            _ => format!(
                "{who} had {} and {}, and the rule does not hold for raw packets",
                queue_pairs(made, ""),
                queue_pairs(raw, "raw ")
            ),
        })
    }

    /// A queue pair for raw packets is made on a device. Rules of queue pairs do not hold for it, and do not count it.
    pub fn add_raw_qp(&self, device: usize) {
        if let Some(device) = self.ports.get(device) {
            device.raw.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use anyverbs_objects::config::Config;

    use super::*;

    fn faults(text: &str) -> Faults {
        let variable = |name: &str| match name {
            "ANYVERBS_DEVICES" => Some("2".to_owned()),
            "ANYVERBS_FAULTS" => Some(text.to_owned()),
            _ => None,
        };
        Faults::new(&Config::parse("", "", variable).unwrap()).unwrap()
    }

    fn second(n: u64) -> Time {
        Time::from_nanos(n * 1_000_000_000)
    }

    #[test]
    fn a_rule_that_did_nothing_is_named_with_its_place_and_the_reason() {
        let faults = faults(
            "drop packet 1\non qp 2: drop packet 2; on device anyverbs1 qp 1: fails after 1s\n\
             on device anyverbs0 qp 4: send 1 never completes\nevent SM_CHANGE after 20s\n\
             ibv_reg_mr fails with EIO",
        );
        for _ in 0..2 {
            faults.add_qp(0, 16);
        }
        let rule = |text: &str| format!("a rule never did anything (line {text}");
        let wanted = [
            "1 of the script): drop packet 1",
            "2 of the script, rule 1): on qp 2: drop packet 2",
            "2 of the script, rule 2): on device anyverbs1 qp 1: fails after 1s; anyverbs1 had 0 queue pairs",
            "3 of the script): on device anyverbs0 qp 4: send 1 never completes; anyverbs0 had 2 queue pairs",
            "4 of the script): event SM_CHANGE after 20s; its time had not come after 19.0s",
            "5 of the script): ibv_reg_mr fails with EIO; the process makes no calls of C",
        ];
        assert_eq!(faults.idle(second(19)), wanted.map(rule));
    }

    /// Such as a passive end of RC, which may stay in RTR.
    #[test]
    fn a_queue_pair_that_was_not_ready_to_send_is_named() {
        let faults = faults("on qp 1: fails after 1s");
        faults.add_qp(0, 16);
        let [line] = &faults.idle(second(2))[..] else { panic!("one rule") };
        assert!(line.ends_with("; its queue pair was not in RTS after that time"), "{line}");
    }

    #[test]
    fn queue_pairs_for_raw_packets_are_named_where_a_rule_misses_a_queue_pair() {
        let faults = faults(
            "drop packet 1\non qp 2: drop packet 2\non device anyverbs1: send 1 never completes\n\
             on device anyverbs1 qp 1: fails after 0s\nregion 1 vanishes",
        );
        let why = || {
            let lines = faults.idle(second(1)).into_iter();
            lines
                .map(|line| line.split("; ").nth(1).unwrap_or_default().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            why(),
            ["", "the process had 0 queue pairs", "", "anyverbs1 had 0 queue pairs", ""]
        );
        faults.add_raw_qp(1);
        faults.add_raw_qp(0);
        let process = "the process had 0 queue pairs and 2 raw queue pairs, and the rule does not hold for raw packets";
        let device = "anyverbs1 had 0 queue pairs and 1 raw queue pair, and the rule does not hold for raw packets";
        assert_eq!(why(), [process, process, device, device, ""]);
        faults.add_qp(0, 16);
        let process = process.replace("0 queue pairs", "1 queue pair");
        assert_eq!(why(), ["", &process, device, device, ""]);
    }

    #[test]
    fn a_rule_of_a_second_port_is_named_with_the_queue_pairs_of_its_device() {
        let script = "on device a port 2 qp 2: drop packet 1";
        let variable = |name: &str| (name == "ANYVERBS_FAULTS").then(|| script.to_owned());
        let file = "devices = [{ name = 'a', ports = 2 }]";
        let faults = Faults::new(&Config::parse("", file, variable).unwrap()).unwrap();
        faults.add_qp(0, 16);
        let lines = faults.idle(second(1));
        assert!(lines.len() == 1 && lines[0].ends_with("; a had 1 queue pair"), "{lines:?}");
    }

    #[test]
    fn a_rule_that_did_something_is_not_named() {
        let faults = faults("down after 1s; fatal after 9s; on device anyverbs1: down; seed 3");
        let due = |at| while faults.take_due(second(at), &|_, _| (), &|_, _| ()).is_some() {};
        // A port may be down from the start, before anybody runs a timer.
        assert_eq!(faults.idle(second(0)).len(), 2);
        due(1);
        let idle = faults.idle(second(1));
        assert!(idle.len() == 1 && idle[0].contains("fatal after 9s"), "{idle:?}");
        due(9);
        assert!(faults.idle(second(9)).is_empty());
        let mut known = super::super::Known::default();
        faults.add("drop packet 1; drop packet 2", second(9), |_| false).unwrap();
        faults.news(&mut known).1[3].rule.fired.set();
        let wanted = "a rule never did anything (added rule: drop packet 2)";
        assert_eq!(faults.idle(second(9)), [wanted]);
        faults.clear(&|_, _| ());
        assert_eq!(faults.idle(second(9)), [format!("{wanted}; it was cleared")]);
    }

    #[test]
    fn a_long_script_does_not_fill_the_log() {
        let faults = faults(&(1..=1000).map(|n| format!("drop packet {n}\n")).collect::<String>());
        let idle = faults.idle(second(0));
        assert_eq!(idle.len(), MOST_NAMED + 1);
        assert_eq!(idle[MOST_NAMED], "980 more rules never did anything");
    }
}

//! Rules that never did anything. The log names them at the end of the process: a test with such a rule has tested nothing.

use anyverbs_faults::Fault;
use anyverbs_proto::time::Time;

use super::{Active, CALLS, Faults, Ordering, Plan};

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
        let (who, made) = match &rule.place.device {
            None => ("the process", self.made.load(Ordering::Relaxed)),
            Some(name) => {
                let device = self.ports.iter().find(|port| port.name == *name)?;
                (name.as_str(), device.made.load(Ordering::Relaxed))
            }
        };
        let is_missing = rule.place.qp.is_some_and(|wanted| wanted > made);
        is_missing.then(|| match made {
            1 => format!("{who} had 1 queue pair"),
            _ => format!("{who} had {made} queue pairs"),
        })
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
            "drop packet 1\non qp 2: drop packet 1; on device anyverbs1 qp 1: fails after 1s\n\
             on device anyverbs0 qp 4: send 1 never completes\nevent SM_CHANGE after 20s\n\
             ibv_reg_mr fails with EIO",
        );
        for _ in 0..2 {
            faults.add_qp(0);
        }
        let rule = |text: &str| format!("a rule never did anything (line {text}");
        let wanted = [
            "1 of the script): drop packet 1",
            "2 of the script): on qp 2: drop packet 1",
            "2 of the script): on device anyverbs1 qp 1: fails after 1s; anyverbs1 had 0 queue pairs",
            "3 of the script): on device anyverbs0 qp 4: send 1 never completes; anyverbs0 had 2 queue pairs",
            "4 of the script): event SM_CHANGE after 20s; its time had not come after 19.0s",
            "5 of the script): ibv_reg_mr fails with EIO; the process makes no calls of C",
        ];
        assert_eq!(faults.idle(second(19)), wanted.map(rule));
    }

    #[test]
    fn a_rule_that_did_something_is_not_named() {
        let faults = faults("down after 1s; fatal after 9s; on device anyverbs1: down; seed 3");
        let due = |at| while faults.take_due(second(at), &|_, _| ()).is_some() {};
        // A port may be down from the start, before anybody runs a timer.
        assert_eq!(faults.idle(second(0)).len(), 2);
        due(1);
        let idle = faults.idle(second(1));
        assert!(idle.len() == 1 && idle[0].contains("fatal after 9s"), "{idle:?}");
        due(9);
        assert!(faults.idle(second(9)).is_empty());
        let mut known = super::super::Known::default();
        faults.add("drop packet 1; drop packet 2", second(9)).unwrap();
        faults.news(&mut known).1[3].rule.fired.set();
        let wanted = "a rule never did anything (added rule: drop packet 2)";
        assert_eq!(faults.idle(second(9)), [wanted]);
        faults.clear(&|_, _| ());
        assert_eq!(faults.idle(second(9)), [format!("{wanted}; it was cleared")]);
    }

    #[test]
    fn a_long_script_does_not_fill_the_log() {
        let faults = faults(&"drop packet 1\n".repeat(1000));
        let idle = faults.idle(second(0));
        assert_eq!(idle.len(), MOST_NAMED + 1);
        assert_eq!(idle[MOST_NAMED], "980 more rules never did anything");
    }
}

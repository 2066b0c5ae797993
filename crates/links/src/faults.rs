//! A script of faults in a process: what its devices do when. What happens to packets and requests, each queue pair decides.
//!
//! Rules may be added while the process runs. They hold from then on, for queue pairs that there are as well.

mod happening;
mod idle;
mod line;
mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyverbs_faults::{Dice, Fault, PacketAction, Rule, Script, Span};
use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::async_event::AsyncEventKind;
use anyverbs_objects::base::NEVER;
use anyverbs_objects::config::Config;
use anyverbs_proto::time::Time;

pub use happening::{Happening, Standstill};
pub use line::{InLine, Line};
use memory::Regions;

/// The most rules that a process takes in its life. Each stays in memory until it ends: queue pairs and others refer to it.
const MOST_RULES: usize = 10_000;

/// The script of a process that has one for its devices.
#[derive(Debug)]
pub struct Faults {
    seed: u64,
    /// The ports of all devices.
    ports: Vec<FaultyPort>,
    /// Queue pairs made so far.
    made: AtomicU64,
    plan: Mutex<rank::Faults, Plan>,
    regions: Regions,
    /// Rules that hold lose packets; written under the lock.
    loses: AtomicBool,
    /// How often a GID is not there.
    gids_gone: AtomicUsize,
    /// When the next thing happens, in nanoseconds; written under the lock.
    next: AtomicU64,
}

/// The rules that hold, and what they will do.
#[derive(Debug, Default)]
struct Plan {
    rules: Vec<Active>,
    /// Rules that there ever were.
    count: usize,
    /// How often the rules were cleared.
    cleared: u64,
    /// Rules that held until then.
    past: Vec<Active>,
    /// Things that were ever scheduled.
    scheduled: u64,
    /// Things that happen at a time, the earliest first, each with its number. True beside it: it holds already.
    schedule: BTreeMap<(u64, u64), (Happening, bool)>,
    /// The ports that are down by the last event of them.
    told_down: BTreeSet<usize>,
}

/// Takes the rules about calls that come while the process runs. The library of the calls does, if the process has one.
pub trait Calls: Sync {
    /// A rule holds from now on. It has this number among all that there ever were.
    fn add(&self, number: usize, rule: &'static Rule);

    /// No rule holds any more.
    fn clear(&self);

    /// Whether the rule of this number, which holds, has ever done something.
    fn has_fired(&self, number: usize) -> bool;
}

/// The library of this process. It is there before there is a device.
static CALLS: OnceLock<&dyn Calls> = OnceLock::new();

/// Says who takes the rules about calls. Once in a process.
pub fn take_calls(calls: &'static dyn Calls) {
    let is_first = CALLS.set(calls).is_ok();
    debug_assert!(is_first, "a process has one library of the calls");
}

/// Raises an event of a port, by its place among all. It is called under the lock of the rules, so that events come in the order of the changes.
pub type Raise<'a> = &'a dyn Fn(usize, AsyncEventKind);

/// Tells the log of what is about to happen, and whether something changes by it. It is called under the same lock: a program that sees the
/// change may end at once, and the log has it by then.
pub type Tell<'a> = &'a dyn Fn(Happening, bool);

/// A rule that holds.
#[derive(Clone, Copy, Debug)]
pub struct Active {
    /// Its number among all that there ever were, from 0.
    pub number: usize,
    /// The rule.
    pub rule: &'static Rule,
    /// Its times count from here.
    pub since: Time,
    /// The line behind each port, if the rule limits its rate.
    pub lines: &'static [Line],
}

/// The rules that a queue pair knows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Known {
    cleared: u64,
    rules: usize,
}

#[derive(Debug, Default)]
struct FaultyPort {
    /// The name of its device.
    name: String,
    /// Its number in that one, from 1.
    number: u8,
    /// How it is called.
    shown: String,
    /// Queue pairs of its device made so far, if it is the first port.
    made: AtomicU64,
    /// Those for raw packets, which have no numbers for rules.
    raw: AtomicU64,
    /// Reasons for which it is down.
    down: AtomicI32,
    /// Its device has failed for good.
    failed: AtomicBool,
    /// Its device, of which it is the first port, was removed.
    removed: AtomicBool,
}

/// A queue pair, as rules name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpPlace {
    /// Its device.
    pub device: usize,
    /// Its port, among those of all devices.
    pub port: usize,
    /// Its number among the process's, from 1.
    pub of_process: u64,
    /// Its number among its device's, from 1.
    pub of_device: u64,
}

impl Faults {
    /// The faults of a configuration, if it has a script. One about calls alone counts: rules about devices may come later.
    pub fn new(config: &Config) -> Option<Self> {
        let script = config.faults.as_ref()?;
        let port = |(at, port): (usize, &anyverbs_objects::config::PortConfig)| FaultyPort {
            name: port.name.clone(),
            number: port.port,
            shown: config.port_name(at),
            ..FaultyPort::default()
        };
        let seed = script.seed_or(Some(config.fault_seed));
        // The library of the calls, where there is one, has said it of a script about calls alone.
        if script.is_of_device() || CALLS.get().is_none() {
            tracing::warn!(
                target: "anyverbs",
                "faults are injected: seed {seed}, rules: {}; `anyverbs faults --explain` explains them",
                script.rules.len()
            );
        }
        let faults = Self {
            seed,
            ports: config.ports.iter().enumerate().map(port).collect(),
            made: AtomicU64::new(0),
            plan: Mutex::new(Plan::default()),
            regions: Regions::default(),
            loses: AtomicBool::new(false),
            gids_gone: AtomicUsize::new(0),
            next: AtomicU64::new(NEVER),
        };
        let mut plan = faults.plan.lock();
        for rule in &script.rules {
            faults.arm(&mut plan, rule.clone(), Time::from_nanos(0));
        }
        for ((at, _), (happening, holds)) in &mut plan.schedule {
            if *at == 0 {
                faults.apply(*happening);
                *holds = true;
            }
        }
        drop(plan);
        Some(faults)
    }

    /// A rule holds from this time on.
    fn arm(&self, plan: &mut Plan, rule: Rule, since: Time) {
        let rule: &'static Rule = Box::leak(Box::new(rule));
        let limits = matches!(rule.fault, Fault::Packets { action: PacketAction::Limit(_), .. });
        let lines = self.ports.iter().take_while(|_| limits).map(|_| Line::default());
        let lines = Box::leak(lines.collect::<Box<[_]>>());
        plan.rules.push(Active { number: plan.count, rule, since, lines });
        self.loses.fetch_or(rule.fault.loses_packets(), Ordering::Release);
        plan.count += 1;
        let mut happens = |after: Duration, happening| {
            let at = since.as_nanos().saturating_add(nanos(after)).min(NEVER - 1);
            plan.scheduled += 1;
            plan.schedule.insert((at, plan.scheduled), (happening, false));
        };
        let ports = self.ports.iter().enumerate();
        let those = ports.filter(|(_, port)| rule.place.has(&port.name, port.number));
        match rule.fault {
            Fault::Down(Span { after, lasts }) => {
                for (port, _) in those {
                    happens(after, Happening::Down(port, rule));
                    if let Some(lasts) = lasts {
                        happens(after.saturating_add(lasts), Happening::Up(port, rule));
                    }
                }
            }
            Fault::Gid(index, Span { after, lasts }) => {
                for (port, _) in those {
                    happens(after, Happening::GidGone(port, index, rule));
                    if let Some(lasts) = lasts {
                        happens(after.saturating_add(lasts), Happening::GidBack(port, index, rule));
                    }
                }
            }
            Fault::Event(event, after) => {
                those.for_each(|(port, _)| happens(after, Happening::Event(port, event, rule)));
            }
            Fault::Fatal(after) | Fault::Removed(after) => {
                let devices = those.filter(|(_, port)| port.number == 1);
                devices.for_each(|(device, _)| happens(after, Happening::Fatal(device, rule)));
            }
            Fault::Fails(_, after) => happens(after, Happening::Fails(rule)),
            Fault::Process(action, after) => happens(after, Happening::Process(action, rule)),
            Fault::Memory { .. } => {
                self.regions.add_rule(Active { number: plan.count - 1, rule, since, lines });
            }
            Fault::Packets { .. } | Fault::Work { .. } | Fault::Call { .. } => {}
        }
        self.publish(plan);
    }

    fn publish(&self, plan: &Plan) {
        let next = plan.schedule.first_key_value().map_or(NEVER, |((at, _), _)| *at);
        self.next.store(next, Ordering::Release);
    }

    /// Adds the rules of a script. They hold from now on, and so do their times. Returns how many there are.
    ///
    /// # Errors
    /// The reason why none of them can hold, for people.
    pub fn add(&self, text: &str, now: Time) -> Result<usize, String> {
        let script = Script::parse(text).map_err(|error| error.to_string())?;
        if script.seed.is_some() {
            return Err(format!("the seed stays that of the start, {}", self.seed));
        }
        if script.rules.is_empty() {
            return Err("the script has no rules".into());
        }
        for rule in &script.rules {
            if !rule.is_of_device() && CALLS.get().is_none() {
                return Err(format!("line {}: the process makes no calls of C", rule.line));
            }
            let known = || self.ports.iter().map(|port| (&*port.name, port.number));
            if let Some(reason) = rule.place.lacks(known) {
                return Err(format!("line {}: {reason}", rule.line));
            }
        }
        let mut plan = self.plan.lock();
        if plan.count + script.rules.len() > MOST_RULES {
            return Err(format!("a process takes {MOST_RULES} rules in its life, and no more"));
        }
        for rule in &script.rules {
            let hides = |active: &Active| {
                Some((&active.rule.text, active.rule.hides(&rule.place, &rule.fault)?))
            };
            if let Some((earlier, does)) = plan.rules.iter().find_map(hides) {
                return Err(format!(
                    "line {}: {earlier:?} {does} already, and the first rule decides; `clear` ends it",
                    rule.line
                ));
            }
        }
        let before = plan.rules.len();
        for rule in script.rules {
            self.arm(&mut plan, Rule { added: true, ..rule }, now);
        }
        let added = &plan.rules[before..];
        // Below the lock, or a rule could come after the `clear` that counts it.
        if let Some(calls) = CALLS.get() {
            for Active { number, rule, .. } in added.iter().filter(|a| !a.rule.is_of_device()) {
                calls.add(*number, rule);
            }
        }
        Ok(added.len())
    }

    /// No rule holds any more. Returns how many did, and the ports that come up by it. A device that has failed stays so. The caller
    /// gives the GIDs back that are gone.
    pub fn clear(&self, raise: Raise<'_>) -> (usize, Vec<usize>) {
        let mut plan = self.plan.lock();
        let count = plan.rules.len();
        plan.end_rules();
        if let Some(calls) = CALLS.get() {
            calls.clear();
        }
        plan.cleared += 1;
        plan.schedule.clear();
        self.regions.clear_rules();
        self.loses.store(false, Ordering::Release);
        self.gids_gone.store(0, Ordering::Release);
        self.publish(&plan);
        let mut up = Vec::new();
        for (n, port) in self.ports.iter().enumerate() {
            port.down.store(0, Ordering::Release);
            if self.tell(&mut plan, n, raise) {
                up.push(n);
            }
        }
        (count, up)
    }

    /// Raises the event of a port whose state is not that of its last event. Returns whether there was one.
    fn tell(&self, plan: &mut Plan, port: usize, raise: Raise<'_>) -> bool {
        let is_new = if self.is_down(port) {
            plan.told_down.insert(port).then_some(AsyncEventKind::PortErr)
        } else {
            plan.told_down.remove(&port).then_some(AsyncEventKind::PortActive)
        };
        if let Some(kind) = is_new {
            raise(port, kind);
        }
        is_new.is_some()
    }

    /// The rules that were not cleared, a line each: as many as fit into so many bytes, and how many others there are. One whose time is
    /// over says so.
    pub fn list(&self, bytes: usize, now: Time) -> String {
        let plan = self.plan.lock();
        let mut text = String::new();
        for (n, active) in plan.rules.iter().enumerate() {
            let others = format!("and {} more\n", plan.rules.len() - n);
            let is_over = active.rule.is_over(now.since(active.since));
            let line = format!("{}{}\n", active.rule.text, if is_over { " # is over" } else { "" });
            if text.len() + line.len() + others.len() > bytes {
                return text + &others;
            }
            text += &line;
        }
        text
    }

    /// Gives the rules that are new to a queue pair, and whether those that it knows do not hold any more.
    pub fn news(&self, known: &mut Known) -> (bool, Vec<Active>) {
        let plan = self.plan.lock();
        let is_cleared = known.cleared != plan.cleared;
        let from = if is_cleared { 0 } else { known.rules };
        *known = Known { cleared: plan.cleared, rules: plan.rules.len() };
        (is_cleared, plan.rules[from..].to_vec())
    }

    /// The ports whose devices have failed.
    pub(crate) fn failed(&self) -> impl Iterator<Item = usize> {
        let ports = self.ports.iter().enumerate();
        ports.filter(|(_, port)| port.failed.load(Ordering::Acquire)).map(|(n, _)| n)
    }

    /// The choices of a rule, by its number, for a queue pair.
    pub fn dice(&self, rule: usize, place: QpPlace) -> Dice {
        Dice::new(self.seed, rule, place.of_process)
    }

    /// The choices of a rule, by its number, for what is of the process.
    fn dice_of_process(&self, rule: usize) -> Dice {
        Dice::new(self.seed, rule, 0)
    }

    /// A queue pair is made on a device.
    pub fn add_qp(&self, device: usize) -> QpPlace {
        let count = |made: &AtomicU64| made.fetch_add(1, Ordering::Relaxed) + 1;
        let of_device = self.ports.get(device).map_or(0, |device| count(&device.made));
        QpPlace { device, port: device, of_process: count(&self.made), of_device }
    }

    /// Whether a rule holds for a queue pair.
    pub fn concerns(&self, rule: &Rule, place: QpPlace) -> bool {
        let is_there = |port: &FaultyPort| rule.place.has(&port.name, port.number);
        if !self.ports.get(place.port).is_some_and(is_there) {
            return false;
        }
        let counts_process = rule.place.device.is_none();
        let number = if counts_process { place.of_process } else { place.of_device };
        rule.place.qp.is_none_or(|wanted| wanted == number)
    }

    /// The name of a device.
    pub fn name(&self, device: usize) -> &str {
        self.ports.get(device).map_or("", |device| &device.name)
    }

    /// The name of a port: the device's, with the number behind it if there are two.
    pub fn port_name(&self, port: usize) -> &str {
        self.ports.get(port).map_or("", |port| &port.shown)
    }

    /// Whether a port is down.
    pub fn is_down(&self, port: usize) -> bool {
        self.ports.get(port).is_some_and(FaultyPort::is_down)
    }

    /// Whether rules that hold lose packets.
    pub(crate) fn loses_packets(&self) -> bool {
        self.loses.load(Ordering::Acquire)
    }

    /// Whether GIDs are gone.
    pub fn lacks_gids(&self) -> bool {
        self.gids_gone.load(Ordering::Acquire) > 0
    }

    /// Whether a device was removed.
    pub fn is_removed(&self, device: &str) -> bool {
        let mut ports = self.ports.iter();
        ports.any(|port| port.name == device && port.removed.load(Ordering::Acquire))
    }

    /// Whether a device has failed for good, or was removed.
    pub fn has_failed(&self, device: &str) -> bool {
        let mut ports = self.ports.iter();
        ports.any(|port| port.name == device && port.failed.load(Ordering::Acquire))
    }

    /// The time of the next thing that happens, in nanoseconds.
    pub(crate) fn next(&self) -> u64 {
        self.next.load(Ordering::Acquire)
    }
}

impl FaultyPort {
    fn is_down(&self) -> bool {
        self.down.load(Ordering::Acquire) > 0 || self.failed.load(Ordering::Acquire)
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use anyverbs_faults::ProcessAction;

    use super::*;

    fn faults(text: &str) -> Faults {
        let variable = |name: &str| match name {
            "ANYVERBS_DEVICES" => Some("3".to_owned()),
            "ANYVERBS_FAULTS" => Some(text.to_owned()),
            _ => None,
        };
        Faults::new(&Config::parse("", "", variable).unwrap()).unwrap()
    }

    fn short(happening: Happening) -> String {
        match happening {
            Happening::Down(device, _) => format!("down {device}"),
            Happening::Up(device, _) => format!("up {device}"),
            Happening::Event(port, event, _) => format!("{event} {port}"),
            Happening::Fatal(device, _) => format!("fatal {device}"),
            Happening::GidGone(port, index, _) => format!("no gid {index} {port}"),
            Happening::GidBack(port, index, _) => format!("gid {index} {port}"),
            Happening::Fails(_) => "fails".into(),
            Happening::Process(..) => "process".into(),
        }
    }

    #[test]
    fn rules_come_and_go() {
        let second = |n: u64| Time::from_nanos(n * 1_000_000_000);
        let faults = faults("drop packet 1");
        let due = |n| faults.take_due(second(n), &|_, _| (), &|_, _| ());
        let mut known = Known::default();
        let texts = |(cleared, rules): (bool, Vec<Active>)| {
            (cleared, rules.iter().map(|a| (a.number, a.rule.text.clone())).collect::<Vec<_>>())
        };
        assert_eq!(texts(faults.news(&mut known)), (false, vec![(0, "drop packet 1".into())]));
        let added = "on device anyverbs2: down for 5s after 1s; drop packet 2";
        assert_eq!(faults.add(added, second(10)), Ok(2));
        let new = [(1, "on device anyverbs2: down for 5s after 1s"), (2, "drop packet 2")];
        let new: Vec<_> = new.map(|(n, text)| (n, text.to_owned())).into();
        assert_eq!(texts(faults.news(&mut known)), (false, new));
        assert_eq!(texts(faults.news(&mut known)), (false, vec![]));
        let rules = |over: &str| {
            format!(
                "drop packet 1\non device anyverbs2: down for 5s after 1s{over}\ndrop packet 2\n"
            )
        };
        assert_eq!(faults.list(1000, second(15)), rules(""));
        assert_eq!(faults.list(1000, second(16)), rules(" # is over"));
        for bytes in 20..90 {
            let short = faults.list(bytes, second(16));
            assert!(short.len() <= bytes && short.ends_with(" more\n"), "{bytes}: {short}");
        }
        // Its time counts from then.
        assert_eq!(faults.next(), second(11).as_nanos());
        assert!(due(10).is_none());
        assert!(due(11).is_some() && faults.is_down(2));
        assert_eq!(faults.clear(&|_, _| ()), (3, vec![2]));
        assert!(
            !faults.is_down(2)
                && faults.next() == NEVER
                && faults.list(1000, second(20)).is_empty()
        );
        assert_eq!(faults.add("drop packet 3", second(20)), Ok(1));
        assert_eq!(texts(faults.news(&mut known)), (true, vec![(3, "drop packet 3".into())]));
        // A device that has failed does not come back.
        faults.add("on device anyverbs0: fatal after 0s", second(30)).unwrap();
        assert!(due(30).is_some());
        assert_eq!(faults.clear(&|_, _| ()), (2, vec![]));
        assert!(faults.is_down(0));
    }

    #[test]
    fn a_script_about_calls_alone_takes_rules_about_devices() {
        let faults = faults("ibv_reg_mr 1 fails with EIO");
        assert_eq!(faults.add("drop packet 1", Time::from_nanos(1)), Ok(1));
        let (_, rules) = faults.news(&mut Known::default());
        let rules = rules.iter().map(|active| (active.number, &*active.rule.text));
        let wanted = [(0, "ibv_reg_mr 1 fails with EIO"), (1, "drop packet 1")];
        assert_eq!(rules.collect::<Vec<_>>(), wanted);
    }

    #[test]
    fn what_cannot_hold_is_refused_and_changes_nothing() {
        let faults = faults("seed 5");
        let now = Time::from_nanos(1);
        for (text, wanted) in [
            ("drop pocket 1", "line 1, column 6: expected"),
            ("drop packet 1; seed 3", "the seed stays that of the start, 5"),
            ("# nothing", "the script has no rules"),
            ("drop packet 1\nibv_reg_mr fails with EIO", "line 2: the process makes no calls of C"),
            (
                "on device rail9: drop packets",
                "line 1: there is no device \"rail9\", but anyverbs0, anyverbs1, anyverbs2",
            ),
        ] {
            let error = faults.add(text, now).unwrap_err();
            assert!(error.starts_with(wanted), "{error}");
        }
        assert_eq!(faults.add("limit packets to 1Gb/s", now), Ok(1));
        let hidden = faults.add("drop packet 1\nlimit packets to 2Gb/s", now).unwrap_err();
        let wanted = "line 2: \"limit packets to 1Gb/s\" limits these packets already";
        assert!(hidden.starts_with(wanted), "{hidden}");
        let many: String = (1..MOST_RULES).map(|n| format!("drop packet {n};")).collect();
        assert_eq!(faults.add(&many, now), Ok(MOST_RULES - 1));
        assert!(faults.add("drop packet 1", now).unwrap_err().starts_with("a process takes 10000"));
    }

    #[test]
    fn a_port_is_down_while_any_rule_says_so() {
        let faults = faults(
            "on device anyverbs1: down after 1s for 2s; down after 2s for 3s; drop packet 1",
        );
        let mut changes = Vec::new();
        for second in 0..7 {
            let now = Time::from_nanos(second * 1_000_000_000);
            while let Some((happening, changed)) = faults.take_due(now, &|_, _| (), &|_, _| ()) {
                if changed {
                    changes.push((second, short(happening)));
                }
            }
        }
        let wanted =
            [(1, "down 1"), (2, "down 0"), (2, "down 2"), (5, "up 0"), (5, "up 1"), (5, "up 2")];
        assert_eq!(changes, wanted.map(|(second, what)| (second, what.to_owned())));
        assert_eq!(faults.next(), NEVER);
        assert!((0..4).all(|device| !faults.is_down(device)));
    }

    #[test]
    fn pauses_that_overlap_are_one_and_a_process_dies_in_one() {
        let seconds = Duration::from_secs;
        let stands = |text: &str, at: u64| {
            let (faults, now) = (faults(text), Time::from_nanos(at * 1_000_000_000));
            let Some((Happening::Process(ProcessAction::Pauses(time), _), _)) =
                faults.take_due(now, &|_, _| (), &|_, _| ())
            else {
                panic!("{text}: no pause");
            };
            let Standstill { lasts, dies, taken } = faults.take_during(now, time);
            (lasts, dies, taken.len(), faults.plan.lock().schedule.len())
        };
        let one = "process pauses for 4s after 1s";
        assert_eq!(stands(one, 1), (seconds(4), false, 0, 0));
        // It began late.
        assert_eq!(stands(one, 3), (seconds(4), false, 0, 0));
        for (other, wanted) in [
            ("process pauses for 1s after 2s", (seconds(4), false, 1, 0)),
            ("process pauses for 4s after 4s", (seconds(7), false, 1, 0)),
            // The second one makes it so long that the third one is in it.
            (
                "process pauses for 3s after 4s; process pauses for 3s after 6s",
                (seconds(8), false, 2, 0),
            ),
            ("process pauses for 1s after 5s", (seconds(4), false, 0, 1)),
            ("process dies after 3s; process pauses for 9s after 4s", (seconds(2), true, 1, 1)),
            ("process dies after 1s", (seconds(0), true, 1, 0)),
            ("process dies after 9s", (seconds(4), false, 0, 1)),
            // Rules of a device wait until the process goes on, and are not lost.
            ("on device anyverbs1: down for 1s after 2s", (seconds(4), false, 0, 2)),
        ] {
            assert_eq!(stands(&format!("{one}; {other}"), 1), wanted, "{other}");
        }
    }

    #[test]
    fn a_port_may_be_down_from_the_start() {
        let faults = faults("on device anyverbs1: down for 1s");
        assert!(faults.is_down(1) && !faults.is_down(0));
        let at = |second: u64| Time::from_nanos(second * 1_000_000_000);
        let due = |second: u64| faults.take_due(at(second), &|_, _| (), &|_, _| ());
        let due = |second| due(second).map(|(happening, changed)| (short(happening), changed));
        assert_eq!(due(0), Some(("down 1".into(), true)));
        assert!(faults.is_down(1));
        assert_eq!(due(1), Some(("up 1".into(), true)));
        assert!(!faults.is_down(1));
    }

    #[test]
    fn a_gid_goes_and_comes_and_may_be_gone_from_the_start() {
        let faults = faults(
            "on device anyverbs1: gid 1 removed for 3s; on device anyverbs2: gid 0 removed for 1s after 2s",
        );
        let gone = faults.gids_gone_at_start();
        assert_eq!(gone.iter().map(|gone| (gone.0, gone.1)).collect::<Vec<_>>(), [(1, 1)]);
        let due = |second: u64| {
            let now = Time::from_nanos(second * 1_000_000_000);
            let taken =
                faults.take_due(now, &|_, _| panic!("the caller raises the event"), &|_, _| ());
            taken.map(|(happening, changes)| (short(happening), changes, faults.lacks_gids()))
        };
        let gone = |what: &str, changes, lacks| Some((what.to_owned(), changes, lacks));
        assert_eq!(due(0), gone("no gid 1 1", false, true));
        assert_eq!(due(2), gone("no gid 0 2", true, true));
        assert_eq!(due(3), gone("gid 1 1", true, true));
        assert_eq!(due(3), gone("gid 0 2", true, false));
        assert_eq!(due(9), None);
        faults.add("gid 1 removed after 0s", Time::from_nanos(0)).unwrap();
        assert_eq!(due(9), gone("no gid 1 0", true, true));
        faults.clear(&|_, _| ());
        assert!(!faults.lacks_gids() && due(9).is_none());
    }

    #[test]
    fn a_device_that_is_removed_has_failed() {
        let faults =
            faults("on device anyverbs1: removed after 1s; on device anyverbs2: fatal after 1s");
        let state = || {
            let removed =
                ["anyverbs0", "anyverbs1", "anyverbs2"].map(|name| faults.is_removed(name));
            (removed, faults.failed().collect::<Vec<_>>())
        };
        assert_eq!(state(), ([false; 3], vec![]));
        while faults.take_due(Time::from_nanos(1_000_000_000), &|_, _| (), &|_, _| ()).is_some() {}
        assert_eq!(state(), ([false, true, false], vec![1, 2]));
        faults.clear(&|_, _| ());
        assert_eq!(state(), ([false, true, false], vec![1, 2]));
    }

    #[test]
    fn an_event_comes_once_and_changes_nothing() {
        let script =
            "on device anyverbs1: event CLIENT_REREGISTER after 1s; event LID_CHANGE after 2s";
        let faults = faults(script);
        let told = std::cell::RefCell::new(Vec::new());
        let raise = |port, kind| told.borrow_mut().push((port, kind));
        while faults.take_due(Time::from_nanos(9_000_000_000), &raise, &|_, _| ()).is_some() {}
        let lids = [0, 1, 2].map(|port| (port, AsyncEventKind::LidChange));
        let wanted = [&[(1, AsyncEventKind::ClientReregister)][..], &lids].concat();
        assert_eq!(told.into_inner(), wanted);
        assert!((0..3).all(|port| !faults.is_down(port)));
        assert_eq!(faults.next(), NEVER);
    }

    /// Timers run in any thread of the process, and orders come to one of them.
    #[test]
    fn events_come_in_the_order_of_the_changes() {
        use AsyncEventKind::{PortActive, PortErr};
        let faults = faults("on device anyverbs1: down after 1s");
        let (told, is_down) = (std::sync::Mutex::new(Vec::new()), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                is_down.wait();
                faults.clear(&|device, kind| told.lock().unwrap().push((device, kind)));
            });
            faults.take_due(
                Time::from_nanos(1_000_000_000),
                &|device, kind| {
                    is_down.wait();
                    // The other thread comes to its own change meanwhile, or waits for this one.
                    std::thread::sleep(Duration::from_millis(100));
                    told.lock().unwrap().push((device, kind));
                },
                &|_, _| (),
            );
        });
        assert_eq!(told.into_inner().unwrap(), [(1, PortErr), (1, PortActive)]);
        assert!(!faults.is_down(1));
    }

    /// A program may end as soon as it sees the change.
    #[test]
    fn the_log_has_a_change_before_it_is_there() {
        let faults = faults(
            "on device anyverbs0: down; on device anyverbs1: down for 2s after 1s; on device anyverbs1: down for 1s after 2s",
        );
        assert_eq!(faults.at_start().into_iter().map(short).collect::<Vec<_>>(), ["down 0"]);
        let told = std::cell::RefCell::new(Vec::new());
        let tell = |happening, changes| {
            told.borrow_mut().push((short(happening), changes, faults.is_down(1)));
        };
        let now = Time::from_nanos(9_000_000_000);
        while faults.take_due(now, &|_, _| (), &tell).is_some() {}
        let of = |what: &str, changes, was_down| (what.to_owned(), changes, was_down);
        let wanted = [
            of("down 1", true, false),
            of("down 1", true, true),
            of("up 1", false, true),
            of("up 1", true, true),
        ];
        assert_eq!(*told.borrow(), wanted);
    }

    #[test]
    fn a_port_that_is_down_twice_from_the_start_is_told_once() {
        use AsyncEventKind::{PortActive, PortErr};
        let faults = faults("on device anyverbs1: down for 1s; on device anyverbs1: down for 2s");
        let told = std::cell::RefCell::new(Vec::new());
        let raise = |_, kind| told.borrow_mut().push(kind);
        while faults.take_due(Time::from_nanos(3_000_000_000), &raise, &|_, _| ()).is_some() {}
        assert_eq!(*told.borrow(), [PortErr, PortActive]);
    }

    #[test]
    fn queue_pairs_are_counted_by_process_and_by_device() {
        let faults = faults("on qp 2: drop packet 1; on device anyverbs1 qp 2: drop packet 1");
        let places = [0, 1, 1].map(|device| faults.add_qp(device));
        let (_, rules) = faults.news(&mut Known::default());
        let concerns = |rule: usize| places.map(|place| faults.concerns(rules[rule].rule, place));
        assert_eq!(concerns(0), [false, true, false]);
        assert_eq!(concerns(1), [false, false, true]);
    }

    #[test]
    fn rules_of_a_port_leave_the_other_port_of_its_device() {
        let script = "on device a port 2: down after 1s; on device a: drop packet 1; on device a port 2: drop packet 2";
        let variable = |name: &str| (name == "ANYVERBS_FAULTS").then(|| script.to_owned());
        let file = "devices = [{ name = 'a', ports = 2 }, { name = 'b' }]";
        let faults = Faults::new(&Config::parse("", file, variable).unwrap()).unwrap();
        while faults.take_due(Time::from_nanos(1_000_000_000), &|_, _| (), &|_, _| ()).is_some() {}
        assert_eq!([0, 1, 2].map(|port| faults.is_down(port)), [false, true, false]);
        let place = faults.add_qp(0);
        let places = [place, QpPlace { port: 1, ..place }, faults.add_qp(2)];
        let (_, rules) = faults.news(&mut Known::default());
        let concerns = |rule: usize| places.map(|place| faults.concerns(rules[rule].rule, place));
        assert_eq!(concerns(1), [true, true, false]);
        assert_eq!(concerns(2), [false, true, false]);
        let time = Time::from_nanos(0);
        let refused = faults.add("on device b port 2: down", time).unwrap_err();
        assert_eq!(refused, "line 1: \"b\" has no port 2, but port 1 alone");
        faults.add("on device a: fatal after 0s", time).unwrap();
        while faults.take_due(Time::from_nanos(1_000_000_000), &|_, _| (), &|_, _| ()).is_some() {}
        assert_eq!([0, 1, 2].map(|port| faults.is_down(port)), [true, true, false]);
        assert_eq!(faults.failed().collect::<Vec<_>>(), [0, 1]);
    }
}

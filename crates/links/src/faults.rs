//! A script of faults in a process: what its devices do when. What happens to packets and requests, each queue pair decides.
//!
//! Rules may be added while the process runs. They hold from then on, for queue pairs that there are as well.

mod happening;
mod idle;
mod line;
mod memory;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyverbs_faults::{Dice, Fault, PacketAction, QpName, Rule, Script, Span};
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

/// Raises an event of a port, by its place among all. Without one: the rules have taken the port down or up, and its state may be another.
/// It is called under the lock of the rules, so that events come in the order of the changes.
pub type Raise<'a> = &'a dyn Fn(usize, Option<AsyncEventKind>);

/// Tells the log of what is about to happen, and whether something changes by it. A program that sees the change may end at once, and the log
/// has it by then. The lock of the rules is free meanwhile: the log may be the program's, which may poll.
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
    /// The number by which its peer names it.
    pub number: u32,
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
        let seed = config.fault_seed;
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

    /// Adds the rules of a script. They hold from now on, and so do their times. Returns how many there are. `is_there` says whether
    /// there is a queue pair of a number.
    ///
    /// # Errors
    /// The reason why none of them can hold, for people.
    pub fn add(
        &self,
        text: &str,
        now: Time,
        is_there: impl Fn(u32) -> bool,
    ) -> Result<usize, String> {
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
            if let Some(reason) = self.lacks_qp(rule, &is_there) {
                return Err(format!("line {}: {reason}", rule.line));
            }
        }
        let mut plan = self.plan.lock();
        if plan.count + script.rules.len() > MOST_RULES {
            return Err(format!("a process takes {MOST_RULES} rules in its life, and no more"));
        }
        for rule in &script.rules {
            let hides = |active: &Active| {
                let age = now.since(active.since);
                Some((&active.rule.text, active.rule.hides(age, &rule.place, &rule.fault)?))
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

    /// Why there is no queue pair that a rule names. One that is counted may come later.
    fn lacks_qp(&self, rule: &Rule, is_there: impl Fn(u32) -> bool) -> Option<String> {
        match rule.place.qp? {
            QpName::Number(number) => {
                let is_gone = !is_there(number);
                is_gone.then(|| format!("the process has no queue pair {number:#08x}"))
            }
            QpName::Nth(n) => {
                let is_later = n > self.made.load(Ordering::Relaxed);
                let number = u32::try_from(n).ok().filter(|n| is_later && is_there(*n))?;
                Some(format!(
                    "{n} is the number of a queue pair, and not its place in their order: write {number:#08x}"
                ))
            }
        }
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
            let was_down = port.is_down();
            port.down.store(0, Ordering::Release);
            if was_down && !port.is_down() {
                up.push(n);
                raise(n, None);
            }
        }
        (count, up)
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

    /// Whether a rule has not been cleared.
    pub fn has(&self, rule: &Rule) -> bool {
        self.plan.lock().rules.iter().any(|active| std::ptr::eq(active.rule, rule))
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

    /// A queue pair of this number is made on a device.
    pub fn add_qp(&self, device: usize, number: u32) -> QpPlace {
        let count = |made: &AtomicU64| made.fetch_add(1, Ordering::Relaxed) + 1;
        let of_device = self.ports.get(device).map_or(0, |device| count(&device.made));
        QpPlace { device, port: device, of_process: count(&self.made), of_device, number }
    }

    /// Whether a rule holds for a queue pair.
    pub fn concerns(&self, rule: &Rule, place: QpPlace) -> bool {
        let is_there = |port: &FaultyPort| rule.place.has(&port.name, port.number);
        if !self.ports.get(place.port).is_some_and(is_there) {
            return false;
        }
        let counts_process = rule.place.device.is_none();
        let nth = if counts_process { place.of_process } else { place.of_device };
        rule.place.qp.is_none_or(|wanted| match wanted {
            QpName::Nth(wanted) => wanted == nth,
            QpName::Number(wanted) => wanted == place.number,
        })
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
mod tests;

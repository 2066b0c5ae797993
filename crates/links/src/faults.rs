//! A script of faults in a process: what its devices do when. What happens to packets and requests, each queue pair decides.

use std::sync::atomic::{AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyverbs_faults::{Dice, Fault, Rule, Script, Span};
use anyverbs_objects::base::NEVER;
use anyverbs_objects::config::Config;
use anyverbs_proto::time::Time;

/// The script of a process that has one for its devices.
#[derive(Debug)]
pub struct Faults {
    script: Script,
    seed: u64,
    devices: Vec<FaultyDevice>,
    /// Queue pairs made so far.
    made: AtomicU64,
    /// Things that happen at a time, the earliest first.
    schedule: Vec<(u64, Happening)>,
    /// The place of the next one.
    next: AtomicUsize,
    /// So many of them hold from the start.
    from_start: usize,
}

#[derive(Debug, Default)]
struct FaultyDevice {
    name: String,
    /// Queue pairs made so far.
    made: AtomicU64,
    /// Reasons for which its port is down.
    down: AtomicI32,
}

/// Something that happens at a time, by the rule at this place of the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happening {
    /// The port of a device goes down.
    Down(usize, usize),
    /// It comes up again.
    Up(usize, usize),
    /// A device fails for good.
    Fatal(usize, usize),
    /// Queue pairs go to the error state.
    Fails(usize),
}

/// A queue pair, as rules name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QpPlace {
    /// The number of its device.
    pub device: usize,
    /// Its number among the process's, from 1.
    pub of_process: u64,
    /// Its number among its device's, from 1.
    pub of_device: u64,
}

impl Faults {
    /// The faults of a configuration, if it has any for devices.
    pub fn new(config: &Config) -> Option<Self> {
        let script = config.faults.clone().filter(Script::is_of_device)?;
        let device = |device: &anyverbs_objects::config::DeviceConfig| FaultyDevice {
            name: device.name.clone(),
            ..FaultyDevice::default()
        };
        let devices: Vec<_> = config.devices.iter().map(device).collect();
        let schedule = schedule(&script, &devices);
        let seed = script.seed_or(Some(config.fault_seed));
        tracing::warn!(
            target: "anyverbs",
            "faults are injected: seed {seed}, rules: {}; `anyverbs faults --explain` explains them",
            script.rules.len()
        );
        let (made, next) = (AtomicU64::new(0), AtomicUsize::new(0));
        let from_start = schedule.iter().take_while(|(at, _)| *at == 0).count();
        let faults = Self { script, seed, devices, made, schedule, next, from_start };
        for (_, happening) in &faults.schedule[..from_start] {
            faults.apply(*happening);
        }
        Some(faults)
    }

    /// The devices that have failed from the start.
    pub(crate) fn failed(&self) -> impl Iterator<Item = usize> {
        let schedule = self.schedule[..self.from_start].iter();
        schedule.filter_map(|(_, happening)| match happening {
            Happening::Fatal(device, _) => Some(*device),
            _ => None,
        })
    }

    /// Its rules.
    pub fn rules(&self) -> &[Rule] {
        &self.script.rules
    }

    /// The choices of the rule at a place of the script, for a queue pair.
    pub fn dice(&self, rule: usize, place: QpPlace) -> Dice {
        Dice::new(self.seed, rule, place.of_process)
    }

    /// A queue pair is made on a device.
    pub fn add_qp(&self, device: usize) -> QpPlace {
        let count = |made: &AtomicU64| made.fetch_add(1, Ordering::Relaxed) + 1;
        let of_device = self.devices.get(device).map_or(0, |device| count(&device.made));
        QpPlace { device, of_process: count(&self.made), of_device }
    }

    /// Whether a rule holds for a queue pair.
    pub fn concerns(&self, rule: &Rule, place: QpPlace) -> bool {
        let device = match &rule.place.device {
            None => None,
            Some(name) if self.name(place.device) == name => Some(place.of_device),
            Some(_) => return false,
        };
        let number = device.unwrap_or(place.of_process);
        rule.place.qp.is_none_or(|wanted| wanted == number)
    }

    /// The name of a device.
    pub fn name(&self, device: usize) -> &str {
        self.devices.get(device).map_or("", |device| &device.name)
    }

    /// Whether the port of a device is down.
    pub fn is_down(&self, device: usize) -> bool {
        self.devices.get(device).is_some_and(|device| device.down.load(Ordering::Acquire) > 0)
    }

    /// The time of the next thing that happens, in nanoseconds.
    pub(crate) fn next(&self) -> u64 {
        self.schedule.get(self.next.load(Ordering::Acquire)).map_or(NEVER, |(at, _)| *at)
    }

    /// Takes the next thing that is due. True beside it: the state of the port has changed.
    pub fn take_due(&self, now: Time) -> Option<(Happening, bool)> {
        let at = self.next.load(Ordering::Acquire);
        let (time, happening) = *self.schedule.get(at)?;
        let is_mine = time <= now.as_nanos()
            && self.next.compare_exchange(at, at + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        is_mine.then(|| (happening, at < self.from_start || self.apply(happening)))
    }

    fn apply(&self, happening: Happening) -> bool {
        let count = |device: usize, n| {
            self.devices.get(device).map_or(0, |device| device.down.fetch_add(n, Ordering::AcqRel))
        };
        match happening {
            Happening::Down(device, _) | Happening::Fatal(device, _) => count(device, 1) == 0,
            Happening::Up(device, _) => count(device, -1) == 1,
            Happening::Fails(_) => false,
        }
    }
}

/// The schedule of a script, the earliest first.
fn schedule(script: &Script, devices: &[FaultyDevice]) -> Vec<(u64, Happening)> {
    let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(NEVER - 1);
    let mut schedule = Vec::new();
    for (n, rule) in script.rules.iter().enumerate() {
        let named = rule.place.device.as_ref();
        let those =
            (0..devices.len()).filter(|d| named.is_none_or(|name| devices[*d].name == *name));
        match rule.fault {
            Fault::Down(Span { after, lasts }) => {
                for device in those {
                    schedule.push((nanos(after), Happening::Down(device, n)));
                    let up = lasts.map(|lasts| after.saturating_add(lasts));
                    schedule.extend(up.map(|up| (nanos(up), Happening::Up(device, n))));
                }
            }
            Fault::Fatal(after) => {
                schedule.extend(those.map(|device| (nanos(after), Happening::Fatal(device, n))));
            }
            Fault::Fails(after) => schedule.push((nanos(after), Happening::Fails(n))),
            Fault::Packets { .. } | Fault::Work { .. } | Fault::Call { .. } => {}
        }
    }
    schedule.sort_by_key(|(at, _)| *at);
    schedule
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(text: &str) -> Faults {
        let variable = |name: &str| match name {
            "ANYVERBS_DEVICES" => Some("3".to_owned()),
            "ANYVERBS_FAULTS" => Some(text.to_owned()),
            _ => None,
        };
        Faults::new(&Config::parse("", "", variable).unwrap()).unwrap()
    }

    #[test]
    fn a_port_is_down_while_any_rule_says_so() {
        let faults = faults(
            "on device anyverbs1: down after 1s for 2s; down after 2s for 3s; drop packet 1",
        );
        let mut changes = Vec::new();
        for second in 0..7 {
            let now = Time::from_nanos(second * 1_000_000_000);
            while let Some((happening, changed)) = faults.take_due(now) {
                if changed {
                    changes.push((second, happening));
                }
            }
        }
        use Happening::{Down, Up};
        let wanted = [
            (1, Down(1, 0)),
            (2, Down(0, 1)),
            (2, Down(2, 1)),
            (5, Up(0, 1)),
            (5, Up(1, 1)),
            (5, Up(2, 1)),
        ];
        assert_eq!(changes, wanted);
        assert_eq!(faults.next(), NEVER);
        assert!((0..4).all(|device| !faults.is_down(device)));
    }

    #[test]
    fn a_port_may_be_down_from_the_start() {
        let faults = faults("on device anyverbs1: down for 1s");
        assert!(faults.is_down(1) && !faults.is_down(0));
        let due = |second: u64| faults.take_due(Time::from_nanos(second * 1_000_000_000));
        assert_eq!(due(0), Some((Happening::Down(1, 0), true)));
        assert!(faults.is_down(1));
        assert_eq!(due(1), Some((Happening::Up(1, 0), true)));
        assert!(!faults.is_down(1));
    }

    #[test]
    fn queue_pairs_are_counted_by_process_and_by_device() {
        let faults = faults("on qp 2: drop packet 1; on device anyverbs1 qp 2: drop packet 1");
        let places = [0, 1, 1].map(|device| faults.add_qp(device));
        let concerns =
            |rule: usize| places.map(|place| faults.concerns(&faults.rules()[rule], place));
        assert_eq!(concerns(0), [false, true, false]);
        assert_eq!(concerns(1), [false, false, true]);
    }
}

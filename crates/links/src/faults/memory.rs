//! Registered memory that vanishes by rules. The program has it still; the table of keys sends the device elsewhere.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};

use anyverbs_faults::{Dice, Fault, Rule, Which};
use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::mr::Vanishing;
use anyverbs_proto::time::Time;

use super::{Active, Faults};
use crate::Links;

/// The size of a page is 2 to the power of this.
const PAGE_BITS: u32 = 12;

/// Lines of the log for one rule; the counter and the trace have all.
const MOST_SAID: u32 = 10;

/// The regions of a process, and the rules about their memory.
#[derive(Debug, Default)]
pub(super) struct Regions {
    /// Whether there are rules.
    any: AtomicBool,
    state: Mutex<rank::VanishingRegions, State>,
}

#[derive(Debug, Default)]
struct State {
    /// By their places in the table of keys. That of a region which has ended stays until another one has the place.
    known: HashMap<usize, Region>,
    /// How many each device has made, by its place.
    made: BTreeMap<usize, u64>,
    /// The rules, each with the lines of the log about it.
    rules: Vec<(Active, u32)>,
}

#[derive(Clone, Copy, Debug)]
struct Region {
    device: usize,
    /// Its number among the process's, from 1.
    of_process: u64,
    /// Its number among its device's, from 1.
    of_device: u64,
    /// The number of the page with its first byte, from address 0.
    first: u64,
}

/// Memory that is gone.
#[derive(Debug, PartialEq, Eq)]
struct Gone {
    /// The place of the rule.
    at: usize,
    /// The number of the region, as the rule counts it.
    region: u64,
    /// The first page of it that is gone, from 1.
    page: u64,
}

impl Regions {
    pub(super) fn add_rule(&self, rule: Active) {
        self.state.lock().rules.push((rule, 0));
        self.any.store(true, Ordering::Release);
    }

    pub(super) fn clear_rules(&self) {
        self.any.store(false, Ordering::Release);
        self.state.lock().rules.clear();
    }

    fn register(&self, place: usize, device: usize, addr: u64) {
        let mut state = self.state.lock();
        let made = state.made.entry(device).or_default();
        *made += 1;
        let of_device = *made;
        let of_process = state.made.values().sum();
        let first = addr >> PAGE_BITS;
        state.known.insert(place, Region { device, of_process, of_device, first });
    }

    fn change(&self, place: usize, addr: u64) {
        if let Some(region) = self.state.lock().known.get_mut(&place) {
            region.first = addr >> PAGE_BITS;
        }
    }
}

impl State {
    /// The part that is gone of `len` bytes at an address.
    fn find(
        &self,
        faults: &Faults,
        place: usize,
        (addr, len): (u64, u64),
        now: Time,
    ) -> Option<Gone> {
        let region = self.known.get(&place)?;
        let last = addr.checked_add(len.checked_sub(1)?)? >> PAGE_BITS;
        let number = |page: u64| page.saturating_sub(region.first) + 1;
        let pages = (number(addr >> PAGE_BITS), number(last));
        let device = faults.name(region.device);
        self.rules.iter().enumerate().find_map(|(at, (active, _))| {
            let Active { number, rule, since, .. } = active;
            let Fault::Memory { pages: of_pages, regions, span } = rule.fault else { return None };
            if rule.place.device.as_deref().is_some_and(|name| name != device)
                || !span.has(now.since(*since))
            {
                return None;
            }
            let counts_process = rule.place.device.is_none();
            let region_number = if counts_process { region.of_process } else { region.of_device };
            if !faults.dice_of_process(*number).chooses(regions, region_number) {
                return None;
            }
            let dice = Dice::new(faults.seed, *number, region.of_process);
            let page = first_of(of_pages, dice, pages)?;
            Some(Gone { at, region: region_number, page })
        })
    }
}

/// The first of these pages that a rule chooses.
fn first_of(which: Which, dice: Dice, (first, last): (u64, u64)) -> Option<u64> {
    match which {
        Which::All => Some(first),
        Which::Numbers(from, to) => {
            let found = first.max(from);
            (found <= last.min(to)).then_some(found)
        }
        Which::Chance(_) => (first..=last).find(|page| dice.chooses(which, *page)),
    }
}

impl Vanishing for Links {
    fn registered(&self, place: usize, device: usize, addr: u64) {
        if let Some(faults) = &self.faults {
            faults.regions.register(place, device, addr);
        }
    }

    fn moved(&self, place: usize, addr: u64) {
        if let Some(faults) = &self.faults {
            faults.regions.change(place, addr);
        }
    }

    fn is_gone(&self, place: usize, addr: u64, len: u64) -> bool {
        let rules = |faults: &&Faults| faults.regions.any.load(Ordering::Acquire);
        let Some(faults) = self.faults.as_ref().filter(rules) else { return false };
        let now = self.core.now();
        faults.regions.state.lock().find(faults, place, (addr, len), now).is_some()
    }

    fn has_failed(&self, place: usize, addr: u64, len: u64) {
        let Some(faults) = &self.faults else { return };
        let now = self.core.now();
        let mut state = faults.regions.state.lock();
        let Some(Gone { at, region, page }) = state.find(faults, place, (addr, len), now) else {
            return;
        };
        let device = state.known.get(&place).map_or(0, |region| region.device);
        let (active, said) = &mut state.rules[at];
        let rule = active.rule;
        *said = said.saturating_add(1);
        let said = *said;
        drop(state);
        let what = format!("page {page} of region {region} has vanished: a request fails");
        self.core.count(device, Counter::InjectedFaults, 1);
        self.trace_fault(rule, &what);
        if said <= MOST_SAID {
            let more = if said == MOST_SAID { "; further ones are counted" } else { "" };
            tracing::error!(target: "anyverbs", "injected fault ({}): {what}{more}", rule.named());
        }
    }
}

impl Links {
    /// Tells the trace of a fault that belongs to no queue pair.
    pub fn trace_fault(&self, rule: &Rule, what: &str) {
        if let Some(trace) = &self.trace {
            let args = anyverbs_record::trace::Object::default().text("rule", &rule.text);
            trace.instant(0, "fault", what, &args);
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
        let faults = Faults::new(&Config::parse("", "", variable).unwrap()).unwrap();
        // The second one is of the other device. None begins with a page.
        for (place, device) in [(10, 0), (11, 1), (12, 0)] {
            faults.regions.register(place, device, at(place, 1) + 0x10);
        }
        faults
    }

    /// The address of a page of a region.
    fn at(place: usize, page: u64) -> u64 {
        (place as u64) << 24 | (page - 1) << PAGE_BITS
    }

    /// The region and the page that are gone.
    fn gone(faults: &Faults, place: usize, range: (u64, u64), second: u64) -> Option<(u64, u64)> {
        let now = Time::from_nanos(second * 1_000_000_000);
        let gone = faults.regions.state.lock().find(faults, place, range, now)?;
        Some((gone.region, gone.page))
    }

    #[test]
    fn a_page_is_gone_and_those_beside_it_are_not() {
        let faults = faults("page 3 of region 2 vanishes");
        for (page, offset, len, wanted) in [
            (1, 0x10, 0x1ff0, None),
            (2, 0, 0x1000, None),
            (2, 0xfff, 2, Some((2, 3))),
            (3, 0, 1, Some((2, 3))),
            (3, 0xfff, 1, Some((2, 3))),
            (4, 0, 0x1000, None),
            (1, 0x10, 0x5000, Some((2, 3))),
            (3, 0, 0, None),
        ] {
            let found = gone(&faults, 11, (at(11, page) + offset, len), 0);
            assert_eq!(found, wanted, "{page} {offset} {len}");
        }
        assert_eq!(gone(&faults, 10, (at(10, 3), 1), 0), None);
        assert_eq!(gone(&faults, 13, (at(13, 3), 1), 0), None, "no such region");
        faults.regions.change(11, at(11, 3) + 5);
        assert_eq!(gone(&faults, 11, (at(11, 3), 1), 0), None);
        assert_eq!(gone(&faults, 11, (at(11, 5), 1), 0), Some((2, 3)));
    }

    #[test]
    fn regions_are_counted_by_process_and_by_device() {
        let all = |text: &str| {
            let faults = faults(text);
            [10, 11, 12].map(|place| gone(&faults, place, (at(place, 7), 1), 0))
        };
        assert_eq!(all("region 2 vanishes"), [None, Some((2, 7)), None]);
        assert_eq!(all("on device anyverbs0: region 2 vanishes"), [None, None, Some((2, 7))]);
        assert_eq!(all("on device anyverbs1: regions vanish"), [None, Some((1, 7)), None]);
        assert_eq!(all("regions 2 to 9 vanish"), [None, Some((2, 7)), Some((3, 7))]);
        assert_eq!(all("drop packet 1"), [None; 3]);
    }

    #[test]
    fn memory_comes_back_in_time_or_when_the_rules_are_cleared() {
        let faults = faults("region 1 vanishes after 2s for 3s");
        let is_gone = |second| gone(&faults, 10, (at(10, 1) + 0x10, 1), second).is_some();
        assert_eq!([1, 2, 4, 5].map(is_gone), [false, true, true, false]);
        // Its time counts from then.
        faults.add("region 1 vanishes after 1s", Time::from_nanos(9_000_000_000)).unwrap();
        assert_eq!([9, 10, 100].map(is_gone), [false, true, true]);
        assert!(faults.regions.any.load(Ordering::Relaxed));
        faults.clear(&|_, _| ());
        assert!(!is_gone(100) && !faults.regions.any.load(Ordering::Relaxed));
    }

    #[test]
    fn a_chance_chooses_the_same_pages_again_and_others_elsewhere() {
        let pages = |faults: &Faults, place: usize| -> Vec<u64> {
            (1..=1000)
                .filter(|page| gone(faults, place, (at(place, *page), 1), 0).is_some())
                .collect()
        };
        let text = "10% of pages of regions vanish";
        let first = pages(&faults(text), 10);
        assert!((60..150).contains(&first.len()), "{}", first.len());
        assert_eq!(pages(&faults(text), 10), first);
        assert_ne!(pages(&faults(text), 11), first);
        assert_ne!(pages(&faults(&format!("seed 2; {text}")), 10), first);
        let half = faults("50% of regions vanish");
        let chosen: Vec<_> = (10..=12).map(|place| pages(&half, place).len()).collect();
        assert!(chosen.iter().all(|n| [0, 1000].contains(n)), "{chosen:?}");
    }
}

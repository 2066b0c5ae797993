//! Registered memory that vanishes by rules. The program has it still; the table of keys sends the device elsewhere.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};

use anyverbs_faults::{Dice, Fault, Rule, Which};
use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::mr::Vanishing;
use anyverbs_proto::time::Time;
use tracing::Level;

use super::{Active, Faults};
use crate::Links;

/// The size of a page is 2 to the power of this.
const PAGE_BITS: u32 = 12;

/// Lines of the log for one rule; the counter and the trace have all.
const MOST_SAID: u32 = 10;

/// Accesses that found memory gone and were not diagnosed. A request is diagnosed by the thread that has failed, so a thread has few.
const MOST_FOUND: usize = 256;

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
    /// Accesses that found memory gone, the last one at the end. A diagnosis looks here: the rules may say something else by then.
    found: VecDeque<Found>,
}

/// An access found memory gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Found {
    place: usize,
    device: usize,
    range: (u64, u64),
    gone: Gone,
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Gone {
    /// The number of the rule among all that there ever were.
    number: usize,
    rule: &'static Rule,
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

    /// Whether some of these bytes are gone. If so, notes that an access found it.
    fn look(&self, faults: &Faults, place: usize, range: (u64, u64), now: Time) -> bool {
        let mut state = self.state.lock();
        let Some(gone) = state.find(faults, place, range, now) else { return false };
        let device = state.known.get(&place).map_or(0, |region| region.device);
        let found = Found { place, device, range, gone };
        state.found.retain(|other| (other.place, other.range) != (place, range));
        if state.found.len() >= MOST_FOUND {
            state.found.pop_front();
        }
        state.found.push_back(found);
        true
    }

    /// The last access that found some of these bytes gone, and how often its rule was named with this time. It is forgotten.
    fn take_found(&self, place: usize, range: (u64, u64)) -> Option<(Found, u32)> {
        let mut state = self.state.lock();
        let end = |(addr, len): (u64, u64)| addr.saturating_add(len);
        let is_it = |found: &Found| {
            found.place == place && found.range.0 < end(range) && range.0 < end(found.range)
        };
        let found = *state.found.iter().rev().find(|found| is_it(found))?;
        state.found.retain(|found| !is_it(found));
        let mut rules = state.rules.iter_mut();
        let said = match rules.find(|(active, _)| active.number == found.gone.number) {
            Some((_, said)) => {
                *said = said.saturating_add(1);
                *said
            }
            // It was cleared since.
            None => 1,
        };
        Some((found, said))
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
        self.rules.iter().find_map(|(active, _)| {
            let Active { number, rule, since, .. } = *active;
            let Fault::Memory { pages: of_pages, regions, span } = rule.fault else { return None };
            if rule.place.device.as_deref().is_some_and(|name| name != device)
                || !span.has(now.since(since))
            {
                return None;
            }
            let counts_process = rule.place.device.is_none();
            let region_number = if counts_process { region.of_process } else { region.of_device };
            if !faults.dice_of_process(number).chooses(regions, region_number) {
                return None;
            }
            let dice = Dice::new(faults.seed, number, region.of_process);
            let page = first_of(of_pages, dice, pages)?;
            Some(Gone { number, rule, region: region_number, page })
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
        faults.regions.look(faults, place, (addr, len), self.core.now())
    }

    fn has_failed(&self, place: usize, addr: u64, len: u64) -> bool {
        let found =
            self.faults.as_ref().map(|faults| faults.regions.take_found(place, (addr, len)));
        let Some((Found { device, gone, .. }, said)) = found.flatten() else { return false };
        let Gone { rule, region, page, .. } = gone;
        let what = format!("page {page} of region {region} has vanished: a request fails");
        rule.fired.set();
        self.core.count(device, Counter::InjectedFaults, 1);
        self.trace_fault(rule, &what);
        if said <= MOST_SAID {
            let more = if said == MOST_SAID { "; further ones are counted" } else { "" };
            let line = format!("injected fault ({}): {what}{more}", rule.named());
            self.core.progress().say_each(Level::ERROR, line);
        }
        true
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
        faults
            .add("region 1 vanishes after 1s", Time::from_nanos(9_000_000_000), |_| false)
            .unwrap();
        assert_eq!([9, 10, 100].map(is_gone), [false, true, true]);
        assert!(faults.regions.any.load(Ordering::Relaxed));
        faults.clear(&|_, _| ());
        assert!(!is_gone(100) && !faults.regions.any.load(Ordering::Relaxed));
    }

    #[test]
    fn a_failure_is_explained_by_what_the_access_found_and_not_by_the_rules_of_then() {
        let faults = faults("page 2 of region 1 vanishes after 2s for 3s");
        let regions = &faults.regions;
        let look = |range, second: u64| {
            let now = Time::from_nanos(second * 1_000_000_000);
            regions.look(&faults, 10, range, now)
        };
        let explained =
            |range| regions.take_found(10, range).map(|(found, said)| (found.gone.page, said));
        let (page, packet) = ((at(10, 1) + 0x10, 0x2000), (at(10, 2), 0x400));
        // The program has unmapped it: that the rule began since is no reason.
        assert!(!look(page, 1));
        assert_eq!(explained(page), None);
        // The rule is over when somebody asks, for the request of which the packet was a part.
        assert!(look(packet, 4) && look(packet, 4));
        assert_eq!(regions.take_found(12, page), None, "another region");
        assert_eq!(explained((at(10, 3), 0x1000)), None, "other bytes");
        assert_eq!(explained(page), Some((2, 1)));
        assert_eq!(explained(page), None, "another request");
        // The rules are cleared.
        assert!(look(packet, 4) && look(page, 4));
        faults.clear(&|_, _| ());
        assert_eq!(explained(page), Some((2, 1)));
        assert_eq!(explained(packet), None);
    }

    #[test]
    fn what_nobody_asks_for_is_forgotten() {
        let faults = faults("region 1 vanishes");
        for byte in 0..2 * MOST_FOUND as u64 {
            assert!(faults.regions.look(&faults, 10, (at(10, 1) + byte, 1), Time::from_nanos(0)));
        }
        assert_eq!(faults.regions.state.lock().found.len(), MOST_FOUND);
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

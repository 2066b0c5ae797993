//! The flow rules of the other processes of the host: each says in a table of the host ([`SharedTable`]) what its rules take, so that all
//! steer as by one table.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_net::{CoarseClock, SharedTable, Slot, shared_table};
use anyverbs_proto::raw::flow::record::{self, ForeignRule};
use anyverbs_proto::raw::flow::{FlowRule, FlowTable, MAX_FLOWS, Reach};
use parking_lot::Mutex;

use crate::error::CreateError;

const _: () = assert!(record::RECORD_LEN == shared_table::RECORD_LEN);

/// Of the table and the records in it: others do not find it under another number.
const LAYOUT: u32 = 2;
/// A frame that another process's rule takes has it looked at whether that process lives; not again for as long.
const LOOK_AGAIN: Duration = Duration::from_millis(4);
/// A section that could not be read, or found no room, is read again after this.
const READ_AGAIN: Duration = Duration::from_millis(100);
/// As many records of a section are read in one tick of the clock, so that nobody keeps others from all else by his changes.
const RECORDS_IN_A_TICK: usize = 2 * shared_table::MAX_RECORDS;

/// What this process knows of the others.
#[derive(Debug)]
pub(super) struct HostRules {
    table: SharedTable,
    /// Its generation when it was read.
    seen: AtomicU64,
    sections: Mutex<[Known; 256]>,
    /// The millisecond, of this clock, in which sections are read again that were not read; 0 without any.
    again: AtomicU64,
    clock: CoarseClock,
    /// When the owner of a section was last seen to live.
    looked: [AtomicU32; 256],
    /// Records that were no rules, or found no room.
    ignored: AtomicU64,
}

/// What is known of a section.
#[derive(Clone, Copy, Debug)]
struct Known {
    /// When it was read; none if it has to be read again.
    version: Option<u64>,
    /// It is not read before this millisecond.
    not_before: u64,
    /// How many records were read of it in which millisecond.
    read: (u64, usize),
}

/// Some of the processes.
#[derive(Debug, Default)]
pub(super) struct Owners([u64; 4]);

impl Owners {
    pub(super) fn insert(&mut self, slot: u8) {
        self.0[usize::from(slot / 64)] |= 1 << (slot % 64);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0 == [0; 4]
    }

    fn contains(&self, slot: u8) -> bool {
        self.0[usize::from(slot / 64)] >> (slot % 64) & 1 != 0
    }
}

impl HostRules {
    /// Joins the table of those that share a port, or makes it.
    ///
    /// # Errors
    /// Those of [`SharedTable::join`].
    pub(super) fn join(slot: &Slot, port: u16) -> std::io::Result<Self> {
        let table = SharedTable::join(slot, &format!("flows/{LAYOUT}/{port}"))?;
        let unread = Known { version: Some(0), not_before: 0, read: (0, 0) };
        Ok(Self {
            // Not the present one: what stands there was not read.
            seen: AtomicU64::new(table.generation().wrapping_sub(1)),
            table,
            sections: Mutex::new([unread; 256]),
            again: AtomicU64::new(0),
            clock: CoarseClock::new(),
            looked: [const { AtomicU32::new(0) }; 256],
            ignored: AtomicU64::new(0),
        })
    }

    fn now(&self) -> u64 {
        self.clock.soon().as_millis() as u64
    }

    /// Whether there is something to read: a section has changed, or has to be read again.
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        if self.table.generation() != self.seen.load(Ordering::Acquire) {
            return true;
        }
        let again = self.again.load(Ordering::Relaxed);
        again != 0 && self.now() >= again
    }

    /// Enters what has changed.
    pub(super) fn refresh<D>(&self, rules: &mut FlowTable<D>) {
        let sections = &mut *self.sections.lock();
        if !self.has_changed() {
            return;
        }
        // What changes while this reads makes another generation.
        let generation = self.table.generation();
        drop_those(rules, |owner| !self.lives(owner));
        let now = self.now();
        let mut again: Option<u64> = None;
        for (slot, version) in self.table.versions() {
            let known = &mut sections[usize::from(slot)];
            if known.version == Some(version) {
                continue;
            }
            if now >= known.not_before {
                self.read(rules, slot, now, known);
                if known.version.is_some() {
                    continue;
                }
            }
            again = Some(again.map_or(known.not_before, |again| again.min(known.not_before)));
        }
        self.again.store(again.map_or(0, |at| at.max(1)), Ordering::Relaxed);
        self.seen.store(generation, Ordering::Release);
    }

    /// Enters what a process has.
    fn read<D>(&self, rules: &mut FlowTable<D>, slot: u8, now: u64, known: &mut Known) {
        (known.version, known.not_before) = (None, now + READ_AGAIN.as_millis() as u64);
        let section = match self.table.section(slot) {
            Ok(section) => section,
            Err(error) => {
                tracing::debug!(%error, slot, "another process's flow rules were not read");
                return;
            }
        };
        let mut ignored = 0;
        let records = section.records.iter();
        let all = records.filter_map(|record| {
            let rule = ForeignRule::parse(record);
            ignored += u64::from(rule.is_none());
            rule
        });
        let all: Vec<_> = all.collect();
        if rules.foreign_len() + all.len() > MAX_FLOWS {
            self.drop_ended(rules);
        }
        let fits = rules.set_foreign(slot, all);
        ignored += u64::from(!fits);
        // What is read while it is written may be anything, and is read again.
        if section.settled && ignored > 0 && self.ignored.fetch_add(ignored, Ordering::Relaxed) == 0
        {
            tracing::warn!(
                slot,
                ignored,
                "what another process has told of its flow rules is ignored: it is none, or too much"
            );
        }
        if !fits {
            return;
        }
        let before = if known.read.0 == now { known.read.1 } else { 0 };
        known.read = (now, before + section.records.len());
        let pause = u64::from(known.read.1 > RECORDS_IN_A_TICK);
        (known.version, known.not_before) = (Some(section.version), now + pause);
    }

    /// Whether a process has not ended, as far as was seen of late.
    pub(super) fn lives(&self, slot: u8) -> bool {
        let now = self.now() as u32;
        let looked = &self.looked[usize::from(slot)];
        let since = now.wrapping_sub(looked.load(Ordering::Relaxed));
        if Duration::from_millis(since.into()) < LOOK_AGAIN {
            return true;
        }
        let lives = self.table.lives(slot);
        // That it has ended is seen by the next one, too.
        if lives {
            looked.store(now, Ordering::Relaxed);
        }
        lives
    }

    /// Takes out the rules of those that were seen to have ended.
    pub(super) fn forget<D>(&self, rules: &mut FlowTable<D>, ended: &Owners) {
        // Others may have their slots by now.
        self.refresh(rules);
        // Whatever its section says: who has the slot next changes that.
        drop_those(rules, |owner| ended.contains(owner) && !self.table.lives(owner));
    }

    /// Takes out the rules of those that have ended; whether there were any.
    pub(super) fn drop_ended<D>(&self, rules: &mut FlowTable<D>) -> bool {
        drop_those(rules, |owner| !self.table.lives(owner))
    }

    /// Tells the others of a rule, if it takes anything from them; its age, and where it stands.
    ///
    /// # Errors
    /// [`CreateError::Exhausted`].
    pub(super) fn publish(
        &self,
        rule: &FlowRule,
        reach: Reach,
    ) -> Result<(u64, Option<usize>), CreateError> {
        let age = self.table.take_number();
        let Some(record) = rule.record(age, reach) else { return Ok((age, None)) };
        let at = self.table.add(&record).map_err(|error| {
            tracing::warn!(%error, "a flow rule cannot be told to the other processes");
            CreateError::Exhausted("flow rules")
        })?;
        Ok((age, Some(at)))
    }

    /// Tells the others that a rule has ended.
    pub(super) fn withdraw(&self, record: usize) {
        self.table.remove(record);
    }

    /// Tells the others that all have, for good. False if that takes longer.
    pub(super) fn leave(&self, patience: Duration) -> bool {
        self.table.leave(patience)
    }
}

/// Takes out the rules of some owners; whether there were any.
fn drop_those<D>(rules: &mut FlowTable<D>, which: impl Fn(u8) -> bool) -> bool {
    let owners: Vec<_> = rules.owners().filter(|owner| which(*owner)).collect();
    for owner in &owners {
        rules.set_foreign(*owner, []);
    }
    !owners.is_empty()
}

#[cfg(test)]
mod tests {
    use anyverbs_proto::raw::flow::{FlowAttr, FlowType};

    use super::*;

    const REACH: Reach = Reach { host: true, interface: 0 };

    fn hosts<const N: usize>(name: &str) -> [(u8, HostRules); N] {
        let name = format!("{name}-{}", std::process::id());
        // All before the first is given back: each has a slot of its own.
        let slots = [(); N].map(|()| Slot::claim(&name).unwrap());
        slots.each_ref().map(|slot| (slot.number(), HostRules::join(slot, 1).unwrap()))
    }

    fn rule() -> FlowRule {
        let specs = Default::default();
        let (flow_type, priority) = (FlowType::AllDefault, 0);
        let (dont_trap, egress, drop) = (false, false, false);
        let attr = FlowAttr { flow_type, priority, specs, dont_trap, egress, drop, tag: None };
        FlowRule::new(attr).unwrap()
    }

    /// Longer than anybody is believed to live, by the clock that is looked at.
    fn wait(host: &HostRules) {
        let begin = host.now();
        while host.now() - begin <= LOOK_AGAIN.as_millis() as u64 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn owners(table: &FlowTable<()>) -> Vec<u8> {
        table.owners().collect()
    }

    #[test]
    fn of_several_that_have_ended_none_is_believed_to_live() {
        let [(a, first), (b, second), (c, third), (_, here)] = hosts("rules-ended");
        let mut table = FlowTable::<()>::default();
        for host in [&first, &second, &third] {
            host.publish(&rule(), REACH).unwrap();
        }
        here.refresh(&mut table);
        let mut all = vec![a, b, c];
        all.sort_unstable();
        assert_eq!(owners(&table), all);
        wait(&here);
        drop((first, second));
        for _ in 0..3 {
            assert_eq!([a, b, c].map(|owner| here.lives(owner)), [false, false, true]);
        }
        let mut ended = Owners::default();
        all.iter().for_each(|owner| ended.insert(*owner));
        here.forget(&mut table, &ended);
        assert_eq!(owners(&table), [c]);
    }

    #[test]
    fn the_rules_of_those_that_have_ended_go_when_something_changes_or_room_is_wanted() {
        let [(_, first), (c, third), (_, here)] = hosts("rules-go");
        let mut table = FlowTable::<()>::default();
        first.publish(&rule(), REACH).unwrap();
        here.refresh(&mut table);
        drop(first);
        wait(&here);
        assert!(!here.has_changed());
        third.publish(&rule(), REACH).unwrap();
        here.refresh(&mut table);
        assert_eq!(owners(&table), [c]);
        assert!(!here.drop_ended(&mut table));
        drop(third);
        assert!(here.drop_ended(&mut table) && owners(&table).is_empty());
    }

    #[test]
    fn who_leaves_takes_his_rules_along() {
        let [(_, first), (_, here)] = hosts("rules-leave");
        let mut table = FlowTable::<()>::default();
        first.publish(&rule(), REACH).unwrap();
        here.refresh(&mut table);
        assert!(first.leave(Duration::ZERO) && here.has_changed());
        here.refresh(&mut table);
        assert!(owners(&table).is_empty());
        first.publish(&rule(), REACH).unwrap_err();
    }

    #[test]
    fn what_found_no_room_is_read_again() {
        let [(_, a), (_, b), (_, c), (_, d), (last, e), (_, here)] = hosts("rules-full");
        let mut table = FlowTable::<()>::default();
        for host in [&a, &b, &c, &d] {
            for _ in 0..shared_table::MAX_RECORDS {
                host.publish(&rule(), REACH).unwrap();
            }
        }
        here.refresh(&mut table);
        assert_eq!(table.foreign_len(), MAX_FLOWS);
        e.publish(&rule(), REACH).unwrap();
        here.refresh(&mut table);
        assert_eq!(table.foreign_len(), MAX_FLOWS);
        assert_eq!(owners(&table).len(), 4);
        drop(a);
        // Nobody says so.
        let deadline = std::time::Instant::now() + Duration::from_secs(10);
        while !owners(&table).contains(&last) {
            assert!(std::time::Instant::now() < deadline);
            wait(&here);
            here.refresh(&mut table);
        }
        assert_eq!(table.foreign_len(), MAX_FLOWS - shared_table::MAX_RECORDS + 1);
        wait(&here);
        assert!(!here.has_changed());
    }
}

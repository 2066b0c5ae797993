//! The flow rules of the other processes of the host: each says in a table of the host ([`SharedTable`]) what its rules take, so that all
//! steer as by one table.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use anyverbs_net::{CoarseClock, SharedTable, Slot, shared_table};
use anyverbs_proto::raw::flow::record::{self, ForeignRule};
use anyverbs_proto::raw::flow::{FlowRule, FlowTable, Reach};
use parking_lot::Mutex;

use crate::error::CreateError;

const _: () = assert!(record::RECORD_LEN == shared_table::RECORD_LEN);

/// A frame that another process's rule takes has it looked at whether that process lives; in milliseconds, not again for as long.
const LOOK_AGAIN: u32 = 4;

/// What this process knows of the others.
#[derive(Debug)]
pub(super) struct HostRules {
    table: SharedTable,
    /// Its generation when it was read.
    seen: AtomicU64,
    /// The version of each section then.
    versions: Mutex<[Option<u64>; 256]>,
    clock: CoarseClock,
    /// When it was looked at whether the owner of a section lives.
    looked: [AtomicU32; 256],
    /// Records that were no rules, or found no room.
    ignored: AtomicU64,
}

impl HostRules {
    /// Joins the table of those that share a port, or makes it.
    ///
    /// # Errors
    /// Those of [`SharedTable::join`].
    pub(super) fn join(slot: &Slot, port: u16) -> std::io::Result<Self> {
        let table = SharedTable::join(slot, &format!("flows/{port}"))?;
        Ok(Self {
            // Not the present one: what stands there was not read.
            seen: AtomicU64::new(table.generation().wrapping_sub(1)),
            table,
            versions: Mutex::new([None; 256]),
            clock: CoarseClock::new(),
            looked: [const { AtomicU32::new(0) }; 256],
            ignored: AtomicU64::new(0),
        })
    }

    /// Whether a section has changed since the table was read.
    #[inline]
    pub(super) fn has_changed(&self) -> bool {
        self.table.generation() != self.seen.load(Ordering::Acquire)
    }

    /// Enters what has changed, and what another process has whether or not that is seen to have changed.
    pub(super) fn refresh<D>(&self, rules: &mut FlowTable<D>, of: Option<u8>) {
        let versions = &mut *self.versions.lock();
        if let Some(slot) = of {
            versions[usize::from(slot)] = None;
        } else if !self.has_changed() {
            return;
        }
        // What changes while this reads makes another generation.
        let generation = self.table.generation();
        for (slot, version) in self.table.versions() {
            let known = &mut versions[usize::from(slot)];
            if *known != Some(version) {
                *known = self.read(rules, slot);
            }
        }
        self.seen.store(generation, Ordering::Release);
    }

    /// Enters what a process has; the version of that, if it could be read.
    fn read<D>(&self, rules: &mut FlowTable<D>, slot: u8) -> Option<u64> {
        let section = match self.table.section(slot) {
            Ok(section) => section,
            Err(error) => {
                tracing::debug!(%error, slot, "another process's flow rules were not read");
                return None;
            }
        };
        let mut ignored = 0;
        let records = section.records.iter();
        let all = records.filter_map(|record| {
            let rule = ForeignRule::parse(record);
            ignored += u64::from(rule.is_none());
            rule
        });
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
        Some(section.version)
    }

    /// Whether a process has not ended, as far as was seen of late.
    pub(super) fn lives(&self, slot: u8) -> bool {
        let now = self.clock.soon().as_millis() as u32;
        let looked = &self.looked[usize::from(slot)];
        if now.wrapping_sub(looked.load(Ordering::Relaxed)) < LOOK_AGAIN {
            return true;
        }
        looked.store(now, Ordering::Relaxed);
        self.table.lives(slot)
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
            tracing::debug!(%error, "a flow rule was not told");
            CreateError::Exhausted("flow rules")
        })?;
        Ok((age, Some(at)))
    }

    /// Tells the others that a rule has ended.
    pub(super) fn withdraw(&self, record: usize) {
        self.table.remove(record);
    }
}

//! Counters of flow rules (`ibv_create_counters(3)`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::Core;
use anyverbs_objects::error::{CounterError, DestroyError};
use anyverbs_objects::holders::{Holdable, Holders};

/// The highest index at which a counter may be read.
pub const MAX_COUNTER_INDEX: u32 = 8191;

/// The unit of a counter (`enum ibv_counter_description`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CounterKind {
    /// Frames.
    Packets,
    /// Their bytes.
    Bytes,
}

/// A set of counters (`ibv_create_counters`).
#[derive(Debug)]
pub struct FlowCounters(pub(super) Arc<CountersCell>);

#[derive(Debug)]
pub(super) struct CountersCell {
    pub(super) core: &'static Core,
    holders: Holders,
    packets: AtomicU64,
    bytes: AtomicU64,
    points: Mutex<rank::CounterPoints, Vec<Point>>,
}

/// A counter that is read at an index.
#[derive(Debug)]
struct Point {
    kind: CounterKind,
    index: u32,
    /// The count before it was attached.
    base: u64,
}

impl Holdable for CountersCell {
    fn holders(&self) -> &Holders {
        &self.holders
    }
}

impl CountersCell {
    pub(super) fn count(&self, bytes: usize) {
        self.packets.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    fn value(&self, kind: CounterKind) -> u64 {
        match kind {
            CounterKind::Packets => self.packets.load(Ordering::Relaxed),
            CounterKind::Bytes => self.bytes.load(Ordering::Relaxed),
        }
    }
}

impl FlowCounters {
    #[doc(hidden)]
    pub fn create(core: &'static Core) -> Self {
        Self(Arc::new(CountersCell {
            core,
            holders: Holders::default(),
            packets: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            points: Mutex::new(Vec::new()),
        }))
    }

    /// Has a counter read at `index`, from now on (`ibv_attach_counters_point_flow` without a flow). Counters attached
    /// to one index add up.
    ///
    /// # Errors
    /// [`CounterError::Bound`] while a rule uses it, [`CounterError::Invalid`].
    pub fn attach(&self, kind: CounterKind, index: u32) -> Result<(), CounterError> {
        if self.0.holders.is_dead() || index > MAX_COUNTER_INDEX {
            return Err(CounterError::Invalid("index"));
        }
        if self.0.holders.is_held() {
            return Err(CounterError::Bound);
        }
        let base = self.0.value(kind);
        self.0.points.lock().push(Point { kind, index, base });
        Ok(())
    }

    /// Fills `values`, index by index (`ibv_read_counters`).
    ///
    /// # Errors
    /// [`CounterError::Invalid`] if there are more values than indexes.
    pub fn read(&self, values: &mut [u64]) -> Result<(), CounterError> {
        let points = self.0.points.lock();
        let indexes = points.iter().map(|point| point.index as usize + 1).max().unwrap_or(0);
        if self.0.holders.is_dead() || values.len() > indexes {
            return Err(CounterError::Invalid("number of counters"));
        }
        values.fill(0);
        for point in points.iter() {
            if let Some(value) = values.get_mut(point.index as usize) {
                *value = value.wrapping_add(self.0.value(point.kind).wrapping_sub(point.base));
            }
        }
        Ok(())
    }

    /// Destroys it (`ibv_destroy_counters`).
    ///
    /// # Errors
    /// [`DestroyError::Busy`] while a rule uses it.
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.0.core.is_current() {
            return Ok(());
        }
        self.0.holders.retire().inspect_err(|e| {
            anyverbs_objects::say_again!(
                error,
                self.0.holders.id(),
                "counters are not destroyed: {e}; see `anyverbs explain AV8009`"
            )
        })
    }
}

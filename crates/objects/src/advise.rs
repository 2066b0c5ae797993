//! Advice about memory that is paged on demand (`ibv_advise_mr`).

use anyverbs_proto::memory::Fault;
use anyverbs_proto::mr::Access;
use anyverbs_proto::payload::hold_local;
use anyverbs_proto::wr::Sge;

use crate::error::AdviseError;
use crate::memory::mapping::{self, Needs, Populate};
use crate::pd::{Pd, PdCell};

/// The coming use of a range (`enum ibv_advise_mr_advice`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// It will be read.
    Prefetch,
    /// It will be written.
    PrefetchWrite,
    /// It will be used, but missing pages shall not be brought in.
    PrefetchNoFault,
}

impl PdCell {
    /// Pages the ranges in; with `flush` before it returns.
    pub(crate) fn advise(
        &self,
        advice: Advice,
        flush: bool,
        sges: &[Sge],
    ) -> Result<(), AdviseError> {
        if !self.core.is_current() {
            return Err(AdviseError::Forked);
        }
        let write = advice == Advice::PrefetchWrite;
        let need = if write { Access::LOCAL_WRITE } else { Access::empty() } | Access::ON_DEMAND;
        for sge in sges {
            let hold = hold_local(&self.core.mrs, self.number, sge, need)
                .map_err(|_| AdviseError::Range)?;
            let (addr, len) = (hold.addr(), u64::from(sge.len));
            // A page that comes and goes is the program's business; the region is not held up for that.
            drop(hold);
            let needs = Needs { writable: write, ..Needs::default() };
            self.core.memory.maps.check(addr, len, needs).map_err(|_| AdviseError::Range)?;
            let how = match advice {
                Advice::PrefetchNoFault => continue,
                _ if !flush => Populate::Soon,
                Advice::Prefetch => Populate::Read,
                Advice::PrefetchWrite => Populate::Write,
            };
            match mapping::populate(addr, len, how) {
                Err(Fault) if flush => return Err(AdviseError::Range),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Pd {
    /// Announces the coming use of ranges of regions that are paged on demand (`ibv_advise_mr`). With `flush` the work
    /// is done when this returns.
    ///
    /// # Errors
    /// [`AdviseError`].
    pub fn advise_mr(&self, advice: Advice, flush: bool, sges: &[Sge]) -> Result<(), AdviseError> {
        self.cell.advise(advice, flush, sges)
    }
}

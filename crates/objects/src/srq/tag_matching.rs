//! Shared receive queues that match tags (`ibv_create_srq_ex`, `ibv_post_srq_ops`).

use std::sync::Arc;

use anyverbs_proto::recv_queue::RecvWqe;
use anyverbs_proto::tag_list::{TagAdd, TagHandle, TagList, Tagged, Taken};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::{Wc, WcFlags, WcOpcode, WcStatus};

use super::{Hold, Srq, SrqCell, SrqInitAttr};
use crate::cq::Cq;
use crate::error::{CreateError, PostError};
use crate::features::Feature;
use crate::holders::{Held, Holder};
use crate::pd::Pd;

/// Parameters of an SRQ that matches tags (`struct ibv_srq_init_attr_ex`).
#[derive(Clone, Copy, Debug)]
pub struct TmSrqInitAttr<'a> {
    /// Parameters of its own receives, which take messages without a tag or a match.
    pub srq: SrqInitAttr,
    /// Where its operations and the receives of its queue pairs complete.
    pub cq: &'a Cq,
    /// Tags that the list can hold.
    pub max_num_tags: u32,
    /// Operations that may be outstanding.
    pub max_ops: u32,
}

/// An operation on the list of tags (`struct ibv_ops_wr`).
#[derive(Clone, Copy, Debug)]
pub struct TagOp<'a> {
    /// The program's cookie.
    pub wr_id: u64,
    /// Makes a completion; one that fails does in any case.
    pub signaled: bool,
    /// The number of unexpected messages that the program has handled, if it says so.
    pub handled: Option<u32>,
    /// The operation.
    pub kind: TagOpKind<'a>,
}

/// The kinds of operations.
#[derive(Clone, Copy, Debug)]
pub enum TagOpKind<'a> {
    /// Adds a tag.
    Add(TagAdd<'a>),
    /// Removes one.
    Del(TagHandle),
    /// No contents.
    Sync,
}

impl SrqCell {
    /// Takes the buffer for a message, and counts an unexpected one as such. Both happen in one step, so that a tag
    /// that is added comes before or after.
    pub fn take_tagged(&self, tagged: Tagged, into: &mut RecvWqe) -> Option<Taken> {
        let mut state = self.state.lock();
        let tags = state.tags.as_mut()?;
        if let Tagged::Tag(tag) = tagged
            && tags.take(tag, into)
        {
            return Some(Taken::Matched);
        }
        if state.queue.is_empty() {
            return None;
        }
        if tagged != Tagged::None
            && let Some(tags) = &mut state.tags
        {
            tags.count_unexpected();
        }
        let taken = if tagged == Tagged::None { Taken::Untagged } else { Taken::Unexpected };
        self.take_locked(state, into).then_some(taken)
    }
}

impl Srq {
    pub(crate) fn create_tm(pd: &Pd, init: &TmSrqInitAttr<'_>) -> Result<Self, CreateError> {
        let (pd_hold, ticket) = Self::hold(&pd.cell, &init.srq)?;
        pd.cell.core.offers(pd.cell.device, Feature::TagMatching)?;
        let attr = pd.cell.core.attr_of(pd.cell.device);
        let max_num_tags = u16::try_from(init.max_num_tags)
            .ok()
            .filter(|n| (1..=attr.max_num_tags).contains(n))
            .ok_or(CreateError::Invalid("max_num_tags"))?;
        if init.max_ops > attr.max_tag_ops {
            return Err(CreateError::Invalid("max_ops"));
        }
        if !init.cq.0.is_of(pd.cell.core, &pd.context) {
            return Err(CreateError::Foreign("completion queue"));
        }
        let cq_hold =
            Held::new(&init.cq.0, Holder::Srq).ok_or(CreateError::Foreign("completion queue"))?;
        let hold = Hold(pd_hold, None, Some(cq_hold), ticket);
        let queue = Self::queue(&pd.cell, &init.srq)?;
        let tm = (Arc::clone(&init.cq.0), TagList::new(max_num_tags));
        Ok(Self(Arc::new(SrqCell::new(pd, &init.srq, queue, hold, None, Some(tm)))))
    }

    /// Changes the list of tags (`ibv_post_srq_ops`). An operation is done when this returns; the handle of a tag that was
    /// added.
    ///
    /// # Errors
    /// [`PostError::Tag`], [`PostError::NoTags`], [`PostError::Gone`], [`PostError::Forked`]. A completion tells that a
    /// tag cannot be removed ([`WcStatus::TmErr`]).
    pub fn post_tag_op(&self, op: &TagOp<'_>) -> Result<Option<TagHandle>, PostError> {
        self.0.check()?;
        let cq = self.0.tm_cq.as_ref().ok_or(PostError::NoTags)?;
        let mut state = self.0.state.lock();
        let tags = state.tags.as_mut().ok_or(PostError::NoTags)?;
        if let Some(handled) = op.handled {
            tags.sync(handled);
        }
        let mut status = WcStatus::Success;
        let (opcode, handle) = match &op.kind {
            TagOpKind::Add(add) => (WcOpcode::TmAdd, Some(tags.add(add)?)),
            TagOpKind::Del(handle) => {
                if !tags.remove(*handle) {
                    status = WcStatus::TmErr;
                }
                (WcOpcode::TmDel, None)
            }
            TagOpKind::Sync => (WcOpcode::TmSync, None),
        };
        let flags = if tags.in_sync() { WcFlags::empty() } else { WcFlags::TM_SYNC_REQ };
        if op.signaled || status != WcStatus::Success {
            let wc = Wc { wr_id: op.wr_id, status, opcode, flags, ..Wc::default() };
            // Under the lock: completions come in the order in which the list was changed.
            if cq.push(wc, false) {
                self.0.core.progress().note_overrun(Arc::clone(cq) as _, Qpn::default());
            }
        }
        drop(state);
        self.0.core.progress().after_unlock();
        Ok(handle)
    }
}

impl Pd {
    /// Makes a shared receive queue that matches tags (`ibv_create_srq_ex`, `IBV_SRQT_TM`), for reliable connections.
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_tm_srq(&self, init: &TmSrqInitAttr<'_>) -> Result<Srq, CreateError> {
        Srq::create_tm(self, init)
    }
}

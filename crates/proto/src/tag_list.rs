//! The list of tags of a tag-matching SRQ. It makes the program and the device agree on the order of tags and messages
//! (`ibv_post_srq_ops(3)`; "Hardware tag matching" in the documentation of libibverbs).
//!
//! Messages are matched in the order in which tags were added. A message without a match goes to the program, which
//! looks among the buffers that it did not hand over. If a tag that it adds meanwhile matched a *later* message, that
//! one would overtake. So each message that is handed to the program is counted, and the program says how many it has
//! handled. Tags that are added while the two counts differ are not matched before they agree.

use arrayvec::ArrayVec;
use thiserror::Error;

use crate::recv_queue::RecvWqe;
use crate::wr::Sge;

/// Most elements of the buffer of a tag.
pub const MAX_TAG_SGE: usize = 4;

/// A buffer for messages with a tag.
#[derive(Clone, Copy, Debug)]
pub struct TagAdd<'a> {
    /// The program's cookie, for the completions of the message.
    pub wr_id: u64,
    /// The places for the data.
    pub sges: &'a [Sge],
    /// A message matches if its tag, under the mask, is this.
    pub tag: u64,
    /// Bits of the message's tag that count.
    pub mask: u64,
}

/// Names a tag that was added.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TagHandle(pub u32);

/// The reason why a tag was not added.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum TagError {
    /// `ENOMEM`.
    #[error("the list of tags is full")]
    Full,
    /// `EINVAL`.
    #[error("more scatter/gather elements than a tag may have")]
    TooManySges,
}

/// The tag of a message for the SRQ.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tagged {
    /// It has this tag.
    Tag(u64),
    /// It has a tag, but only the program can deal with it.
    Program,
    /// It has no tag.
    None,
}

/// The buffer that a message got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Taken {
    /// The buffer of its tag.
    Matched,
    /// A buffer of the queue. The message counts as unexpected.
    Unexpected,
    /// A buffer of the queue. The message has no tag.
    Untagged,
}

#[derive(Clone, Debug, Default)]
struct Entry {
    wr_id: u64,
    sges: ArrayVec<Sge, MAX_TAG_SGE>,
    tag: u64,
    mask: u64,
    /// Counts how often the place was used: an old handle does not name a new tag.
    generation: u16,
    /// It is not matched before program and device agree.
    waits: bool,
}

/// The tags of an SRQ. The list allocates only at creation.
#[derive(Debug)]
pub struct TagList {
    entries: Box<[Entry]>,
    free: Vec<u16>,
    /// Places of the tags that are there, oldest first.
    order: Vec<u16>,
    /// Messages handed to the program as unexpected.
    unexpected: u32,
    /// The number of them that the program says it has handled.
    handled: u32,
}

impl TagList {
    /// A list for `max` tags.
    #[must_use]
    pub fn new(max: u16) -> Self {
        Self {
            entries: vec![Entry::default(); max.into()].into(),
            free: (0..max).rev().collect(),
            order: Vec::with_capacity(max.into()),
            unexpected: 0,
            handled: 0,
        }
    }

    /// Tells whether the program has handled all messages that it was handed.
    #[must_use]
    pub fn in_sync(&self) -> bool {
        self.unexpected == self.handled
    }

    /// Tags that are there.
    #[must_use]
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Tells whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// The program has handled this many unexpected messages in all.
    pub fn sync(&mut self, handled: u32) {
        self.handled = handled;
        if self.in_sync() {
            for place in &self.order {
                self.entries[usize::from(*place)].waits = false;
            }
        }
    }

    /// Adds a tag at the end.
    pub fn add(&mut self, add: &TagAdd<'_>) -> Result<TagHandle, TagError> {
        let sges = ArrayVec::try_from(add.sges).map_err(|_| TagError::TooManySges)?;
        let place = self.free.pop().ok_or(TagError::Full)?;
        self.order.push(place);
        let waits = !self.in_sync();
        let entry = &mut self.entries[usize::from(place)];
        let generation = entry.generation.wrapping_add(1);
        let TagAdd { wr_id, tag, mask, .. } = *add;
        *entry = Entry { wr_id, sges, tag, mask, generation, waits };
        Ok(TagHandle(u32::from(generation) << 16 | u32::from(place)))
    }

    /// Removes a tag. False if it is not there: a message has taken it.
    pub fn remove(&mut self, handle: TagHandle) -> bool {
        let (generation, place) = ((handle.0 >> 16) as u16, handle.0 as u16);
        let at = self.order.iter().position(|p| *p == place);
        let current = self.entries.get(usize::from(place)).map(|entry| entry.generation);
        match at.filter(|_| current == Some(generation)) {
            Some(at) => {
                self.release(at);
                true
            }
            None => false,
        }
    }

    fn release(&mut self, at: usize) {
        let place = self.order.remove(at);
        self.free.push(place);
    }

    /// Takes the oldest buffer that a message with this tag matches.
    pub fn take(&mut self, tag: u64, into: &mut RecvWqe) -> bool {
        let matches = |place: &u16| {
            let entry = &self.entries[usize::from(*place)];
            !entry.waits && tag & entry.mask == entry.tag
        };
        let Some(at) = self.order.iter().position(matches) else { return false };
        let entry = &self.entries[usize::from(self.order[at])];
        into.wr_id = entry.wr_id;
        into.sges.clear();
        into.sges.extend(entry.sges.iter().copied());
        self.release(at);
        true
    }

    /// A message is handed to the program.
    pub fn count_unexpected(&mut self) {
        self.unexpected = self.unexpected.wrapping_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tag(wr_id: u64, tag: u64, mask: u64) -> TagAdd<'static> {
        TagAdd { wr_id, sges: &[], tag, mask }
    }

    fn take(list: &mut TagList, tag: u64) -> Option<u64> {
        let mut wqe = RecvWqe::default();
        list.take(tag, &mut wqe).then_some(wqe.wr_id)
    }

    #[test]
    fn the_oldest_tag_that_matches_under_its_mask_is_taken() {
        let mut list = TagList::new(4);
        for (wr_id, t, mask) in [(1, 0x10, 0xff), (2, 0x20, 0xf0), (3, 0x20, 0xff)] {
            list.add(&tag(wr_id, t, mask)).unwrap();
        }
        assert_eq!(take(&mut list, 0xa20), Some(2));
        assert_eq!(take(&mut list, 0xa20), Some(3));
        assert_eq!(take(&mut list, 0xa20), None);
        assert_eq!(take(&mut list, 0x10), Some(1));
        assert!(list.is_empty());
    }

    #[test]
    fn a_handle_names_its_tag_until_that_is_gone() {
        let mut list = TagList::new(1);
        let first = list.add(&tag(1, 1, !0)).unwrap();
        assert_eq!(list.add(&tag(2, 2, !0)), Err(TagError::Full));
        assert!(list.remove(first) && !list.remove(first));
        let second = list.add(&tag(2, 2, !0)).unwrap();
        assert!(!list.remove(first));
        assert_eq!(take(&mut list, 2), Some(2));
        assert!(!list.remove(second) && !list.remove(TagHandle(u32::MAX)));
        let sges = [Sge::default(); MAX_TAG_SGE + 1];
        let add = TagAdd { sges: &sges, ..tag(1, 1, 1) };
        assert_eq!(list.add(&add), Err(TagError::TooManySges));
    }

    #[test]
    fn a_tag_added_out_of_step_waits_for_agreement() {
        let mut list = TagList::new(4);
        list.add(&tag(1, 1, !0)).unwrap();
        list.count_unexpected();
        assert!(!list.in_sync());
        list.add(&tag(2, 2, !0)).unwrap();
        // Tags that were there before are still matched.
        assert_eq!((take(&mut list, 2), take(&mut list, 1)), (None, Some(1)));
        list.count_unexpected();
        list.sync(1);
        assert_eq!(take(&mut list, 2), None);
        list.sync(2);
        assert!(list.in_sync());
        assert_eq!(take(&mut list, 2), Some(2));
    }
}

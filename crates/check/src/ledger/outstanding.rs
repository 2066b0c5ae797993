//! The work of a queue that has no completion.

use std::collections::{VecDeque, vec_deque};

use crate::facts::{Elements, Work};
use crate::stack::Stack;

/// A work request without a completion.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) work: Work,
    pub(super) stack: Stack,
    /// The checksum of its elements, if nothing may change them.
    pub(super) checksum: Option<u32>,
}

impl Posted {
    fn is_filled(&self) -> bool {
        self.work.elements == Elements::Written
    }
}

/// Such requests, the oldest first. What each post and each poll asks for is counted, so that a long queue costs them no more.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    works: VecDeque<Posted>,
    /// The number of those that make a completion.
    signaled: usize,
    /// The number of those whose elements the device writes.
    filled: usize,
    /// The number of those that have a checksum.
    summed: usize,
}

impl Outstanding {
    pub(super) fn len(&self) -> usize {
        self.works.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.works.is_empty()
    }

    /// How many of them make a completion.
    pub(super) fn signaled(&self) -> usize {
        self.signaled
    }

    /// Whether the device has still to write the elements of one.
    pub(super) fn is_any_filled(&self) -> bool {
        self.filled > 0
    }

    pub(super) fn oldest(&self) -> Option<&Posted> {
        self.works.front()
    }

    pub(super) fn iter(&self) -> vec_deque::Iter<'_, Posted> {
        self.works.iter()
    }

    /// The place of the oldest one for which `is_it` holds.
    pub(super) fn position(&self, is_it: impl FnMut(&Posted) -> bool) -> Option<usize> {
        self.works.iter().position(is_it)
    }

    pub(super) fn push(&mut self, posted: Posted) {
        self.signaled += usize::from(posted.work.is_signaled);
        self.filled += usize::from(posted.is_filled());
        self.summed += usize::from(posted.checksum.is_some());
        self.works.push_back(posted);
    }

    /// The elements of those for which `is_it` holds may change.
    pub(super) fn forget_checksums(&mut self, is_it: impl Fn(&Posted) -> bool) {
        if self.summed == 0 {
            return;
        }
        for posted in self.works.iter_mut().filter(|posted| posted.checksum.is_some()) {
            if is_it(posted) {
                posted.checksum = None;
                self.summed -= 1;
            }
        }
    }

    /// Takes one away; 0 is the oldest.
    pub(super) fn take(&mut self, n: usize) -> Option<Posted> {
        let posted = if n == 0 { self.works.pop_front() } else { self.works.remove(n) }?;
        self.forget(&posted);
        Some(posted)
    }

    /// Keeps the oldest, so many.
    pub(super) fn truncate(&mut self, len: usize) {
        while self.works.len() > len
            && let Some(posted) = self.works.pop_back()
        {
            self.forget(&posted);
        }
    }

    fn forget(&mut self, posted: &Posted) {
        self.signaled -= usize::from(posted.work.is_signaled);
        self.filled -= usize::from(posted.is_filled());
        self.summed -= usize::from(posted.checksum.is_some());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Pieces;

    fn posted(wr_id: u64, is_signaled: bool, elements: Elements) -> Posted {
        let work = Work {
            name: "request",
            wr_id,
            is_signaled,
            is_inline: false,
            elements,
            is_fenced: false,
            ah: 0,
            pieces: Pieces::new(),
        };
        Posted { work, stack: Stack::here(), checksum: None }
    }

    #[test]
    fn the_counts_are_of_what_is_left() {
        let mut queue = Outstanding::default();
        queue.push(posted(1, true, Elements::Read));
        queue.push(posted(2, false, Elements::Written));
        queue.push(posted(3, true, Elements::Written));
        assert_eq!((queue.len(), queue.signaled(), queue.is_any_filled()), (3, 2, true));
        assert_eq!(queue.take(1).unwrap().work.wr_id, 2);
        assert_eq!((queue.len(), queue.signaled(), queue.is_any_filled()), (2, 2, true));
        queue.truncate(1);
        assert_eq!((queue.len(), queue.signaled(), queue.is_any_filled()), (1, 1, false));
        assert_eq!(queue.take(0).unwrap().work.wr_id, 1);
        assert_eq!((queue.is_empty(), queue.signaled()), (true, 0));
        assert!(queue.take(0).is_none());
    }
}

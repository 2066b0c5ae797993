//! The work of a queue that has no completion.

use std::collections::{VecDeque, vec_deque};

use crate::facts::{Completion, Elements, Work};
use crate::map::Map;
use crate::stack::Stack;

/// A work request without a completion.
#[derive(Debug)]
pub(super) struct Posted {
    pub(super) work: Work,
    pub(super) stack: Stack,
    /// The checksum of its elements, if nothing may change them.
    pub(super) checksum: Option<u32>,
    /// When, by [`now`].
    pub(super) at: u64,
}

/// The time after which a completion that was not polled is believed, in milliseconds. Other devices may take as long.
const SLOWEST: u64 = 50;

/// Milliseconds, by the cheapest clock of the system.
pub(super) fn now() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a writable struct.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut now) };
    now.tv_sec as u64 * 1000 + now.tv_nsec as u64 / 1_000_000
}

impl Posted {
    /// Whether another device might still work on it now, though it is complete here.
    fn is_recent(&self, now: u64) -> bool {
        now.saturating_sub(self.at) < SLOWEST
    }

    fn is_filled(&self) -> bool {
        self.work.elements == Elements::Written
    }

    /// Whether the device needs the region of this local key for it.
    pub(super) fn uses_region(&self, lkey: u32) -> bool {
        self.region_keys().any(|key| key == lkey)
    }

    fn region_keys(&self) -> impl Iterator<Item = u32> + '_ {
        let pieces = if self.work.is_inline { &[] } else { &self.work.pieces[..] };
        pieces.iter().filter(|piece| piece.len > 0).map(|piece| piece.lkey)
    }
}

/// How many outstanding requests use each region and each address handle. So the end of one does not look through all of them.
#[derive(Debug, Default)]
pub(super) struct Users {
    /// Some of them: most programs use few. Without a count a place is free.
    few: [(u64, u32); 4],
    others: Map<u64, u32>,
}

/// An address handle's bit: a local key has none.
const AH: u64 = 1 << 63;

impl Users {
    pub(super) fn of_region(&self, lkey: u32) -> bool {
        self.has(lkey.into())
    }

    pub(super) fn of_ah(&self, ah: usize) -> bool {
        self.has(ah as u64 | AH)
    }

    fn has(&self, key: u64) -> bool {
        self.few.iter().any(|few| few.0 == key && few.1 > 0) || self.others.contains_key(&key)
    }

    fn each(posted: &Posted, mut tell: impl FnMut(u64)) {
        posted.region_keys().for_each(|key| tell(key.into()));
        if posted.work.ah != 0 {
            tell(posted.work.ah as u64 | AH);
        }
    }

    fn add(&mut self, posted: &Posted) {
        Self::each(posted, |key| {
            let Self { few, others } = self;
            let at = few.iter().position(|few| few.0 == key);
            match at.or_else(|| few.iter().position(|few| few.1 == 0)) {
                Some(n) => few[n] = (key, few[n].1 + 1),
                None => *others.entry(key).or_default() += 1,
            }
        });
    }

    fn remove(&mut self, posted: &Posted) {
        Self::each(posted, |key| {
            let Self { few, others } = self;
            if let Some(few) = few.iter_mut().find(|few| few.0 == key && few.1 > 0) {
                few.1 -= 1;
            } else if let Some(count) = others.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    others.remove(&key);
                }
            }
        });
    }
}

/// Such requests, the oldest first. What each post and each poll asks for is counted, so that a long queue costs them no more.
#[derive(Debug, Default)]
pub(super) struct Outstanding {
    works: VecDeque<Posted>,
    /// How many were posted before the oldest of them, modulo 2^32.
    before: u32,
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

    /// Those sends that hardware may still work on, if these completions were not polled. They come in order: each one speaks for all
    /// before it.
    pub(super) fn unsent<'a>(
        &self,
        waiting: impl Iterator<Item = &'a Completion>,
    ) -> impl Iterator<Item = &Posted> {
        let mut unseen = count(waiting);
        let mut is_its_own = |posted: &Posted| match unseen.get_mut(&posted.work.wr_id) {
            Some(Unseen { all, failed }) if *all > 0 && (posted.work.is_signaled || *failed) => {
                *all -= 1;
                true
            }
            _ => false,
        };
        let done = self.works.iter().enumerate().filter(|(_, posted)| is_its_own(posted)).last();
        let (done, now) = (done.map_or(0, |(n, _)| n + 1), now());
        let works = self.works.iter().enumerate();
        works
            .filter(move |(n, posted)| *n >= done || posted.is_recent(now))
            .map(|(_, posted)| posted)
    }

    /// The same for receives, which may complete in any order.
    pub(super) fn unreceived<'a>(
        &self,
        waiting: impl Iterator<Item = &'a Completion>,
    ) -> impl Iterator<Item = &Posted> {
        let (mut unseen, now) = (count(waiting), now());
        self.works.iter().filter(move |posted| match unseen.get_mut(&posted.work.wr_id) {
            Some(Unseen { all, .. }) if *all > 0 => {
                *all -= 1;
                posted.is_recent(now)
            }
            _ => true,
        })
    }

    /// The place of the oldest one for which `is_it` holds.
    pub(super) fn position(&self, is_it: impl FnMut(&Posted) -> bool) -> Option<usize> {
        self.works.iter().position(is_it)
    }

    /// Whether the last one of so many that were posted since the beginning, modulo 2^32, was taken away.
    pub(super) fn has_taken(&self, posted: u32) -> bool {
        posted.wrapping_sub(self.before).cast_signed() <= 0
    }

    /// The place of the last one of so many that were posted since the beginning, modulo 2^32.
    pub(super) fn place_of(&self, posted: u32) -> Option<usize> {
        let place = posted.wrapping_sub(self.before).checked_sub(1)? as usize;
        (place < self.len()).then_some(place)
    }

    pub(super) fn push(&mut self, posted: Posted, users: &mut Users) {
        users.add(&posted);
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
    pub(super) fn take(&mut self, n: usize, users: &mut Users) -> Option<Posted> {
        let posted = if n == 0 { self.works.pop_front() } else { self.works.remove(n) }?;
        self.before = self.before.wrapping_add(1);
        self.forget(&posted, users);
        Some(posted)
    }

    /// The queue forgets them all.
    pub(super) fn clear(&mut self, users: &mut Users) {
        self.before = self.before.wrapping_add(self.len() as u32);
        self.truncate(0, users);
    }

    /// The oldest, so many, have completed: their elements may change.
    pub(super) fn forget_oldest_checksums(&mut self, count: usize) {
        for posted in self.works.iter_mut().take(count) {
            self.summed -= usize::from(posted.checksum.take().is_some());
        }
    }

    /// Keeps the oldest, so many.
    pub(super) fn truncate(&mut self, len: usize, users: &mut Users) {
        while self.works.len() > len
            && let Some(posted) = self.works.pop_back()
        {
            self.forget(&posted, users);
        }
    }

    fn forget(&mut self, posted: &Posted, users: &mut Users) {
        users.remove(posted);
        self.signaled -= usize::from(posted.work.is_signaled);
        self.filled -= usize::from(posted.is_filled());
        self.summed -= usize::from(posted.checksum.is_some());
    }
}

/// Completions with one `wr_id` that were not polled.
#[derive(Default)]
struct Unseen {
    all: usize,
    /// One of them failed. It may be of a request that asked for none.
    failed: bool,
}

fn count<'a>(completions: impl Iterator<Item = &'a Completion>) -> Map<u64, Unseen> {
    let mut unseen: Map<u64, Unseen> = Map::default();
    for completion in completions {
        let of_id = unseen.entry(completion.wr_id).or_default();
        of_id.all += 1;
        of_id.failed |= completion.status != 0;
    }
    unseen
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::{Piece, Pieces};

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
        Posted { work, stack: Stack::here(), checksum: None, at: 0 }
    }

    #[test]
    fn the_counts_are_of_what_is_left() {
        let (mut queue, mut users) = (Outstanding::default(), Users::default());
        let users = &mut users;
        queue.push(posted(1, true, Elements::Read), users);
        queue.push(posted(2, false, Elements::Written), users);
        queue.push(posted(3, true, Elements::Written), users);
        assert_eq!((queue.len(), queue.signaled(), queue.is_any_filled()), (3, 2, true));
        assert_eq!(queue.take(1, users).unwrap().work.wr_id, 2);
        assert_eq!((queue.len(), queue.signaled(), queue.is_any_filled()), (2, 2, true));
        queue.truncate(1, users);
        assert_eq!((queue.len(), queue.signaled(), queue.is_any_filled()), (1, 1, false));
        assert_eq!(queue.take(0, users).unwrap().work.wr_id, 1);
        assert_eq!((queue.is_empty(), queue.signaled()), (true, 0));
        assert!(queue.take(0, users).is_none());
    }

    #[test]
    fn the_users_are_of_what_is_left() {
        let (mut queue, mut users) = (Outstanding::default(), Users::default());
        let using = |lkey, len, is_inline, ah| {
            let mut posted = posted(1, true, Elements::Read);
            posted.work.pieces.push(Piece { addr: 0, len, lkey });
            (posted.work.is_inline, posted.work.ah) = (is_inline, ah);
            posted
        };
        for (lkey, len, is_inline, ah) in
            [(5, 8, false, 0), (5, 8, false, 5), (6, 0, false, 0), (7, 8, true, 0)]
        {
            queue.push(using(lkey, len, is_inline, ah), &mut users);
        }
        let of = |users: &Users| ([5, 6, 7].map(|lkey| users.of_region(lkey)), users.of_ah(5));
        assert_eq!(of(&users), ([true, false, false], true));
        queue.truncate(2, &mut users);
        queue.take(1, &mut users);
        assert_eq!(of(&users), ([true, false, false], false));
        queue.take(0, &mut users);
        assert_eq!(of(&users), ([false; 3], false));
    }

    #[test]
    fn many_regions_have_users() {
        let (mut queue, mut users) = (Outstanding::default(), Users::default());
        let users = &mut users;
        for lkey in (0..20).chain(0..20) {
            let mut posted = posted(1, true, Elements::Read);
            posted.work.pieces.push(Piece { addr: 0, len: 8, lkey });
            queue.push(posted, users);
        }
        for taken in 0..40 {
            let used = (0..20).filter(|lkey| users.of_region(*lkey)).count();
            assert_eq!(used, 20.min(40 - taken));
            queue.take(0, users);
        }
        assert!(users.others.is_empty() && users.few.iter().all(|few| few.1 == 0));
    }
}

//! Published memory: what a process lets its peers read, so that they copy from and to its memory. This also waits for those
//! copies.
//!
//! A [`Published`] consists of words that only their owner writes, and that the processes at the other ends of its channels
//! see. They say which peers may touch which parts of its memory. Peers copy without asking, so there has to be a way
//! to take back what was published. A process that copies *marks* that in words of its own, which the owner sees, and
//! reads the published memory only under the mark.
//!
//! | the process that copies | the process that takes back |
//! |---|---|
//! | marks, fence, reads the published memory, copies, unmarks | changes the published memory, fence, looks at the marks, waits for those that are set |
//!
//! Both fences are sequentially consistent, so at least one side sees the other: the copying side the change, or the
//! owner the mark. An entry that is read under a mark stays as it is until the mark goes, if the owner changes an entry
//! only after it has taken it back and [waited](Marks::wait). `tests/shm_loom` checks that, and that it fails
//! without the fences.
//!
//! # A process that stops in the middle of a copy
//!
//! The mark and the copy are two steps. A process that is stopped between them (a signal, a debugger, a frozen cgroup)
//! copies when it goes on. So the owner waits as long as the mark stays, and logs after a second which process it waits
//! for. The wait also ends if the process has ended, or if it runs another program. The kernel tells both. The second
//! shows by the word that the process had told us of ([`ProofWord`]): the old program's threads are gone when its memory
//! is. Where it does not tell, the hang-up of the channel's socket does.
//!
//! An owner that closes a channel says so in a word that the other side reads under each mark. From then on no copy begins, so
//! a closed channel is forgotten as soon as its marks are clear.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use std::{fmt, io, thread};

use anyverbs_locks::{Mutex, rank};

use super::handshake::ProofWord;
use super::layout::{COPIES, COUNTS, DEVICES, LINE, MARK_COUNT, MARKS, REVOKED, copies, page};
use super::memory::{Access, Area, Memory, SharedObject, SharedWords, Words};
use super::process::PeerProcess;
use super::remote;
use crate::host::{LOOK_AGAIN, WAIT};
use crate::sys;

/// Words from one mark to the next. The first of them says how often the mark was set and removed (odd: it is set).
const STRIDE: usize = LINE / 8;
/// Words of its counts, since the beginning.
const WRITES: usize = 0;
const WRITTEN: usize = 1;
const READS: usize = 2;
const READ: usize = 3;

/// Copies of other processes from and to a process's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copied {
    /// Writes.
    pub writes: u64,
    /// Bytes written.
    pub written: u64,
    /// Reads.
    pub reads: u64,
    /// Bytes read.
    pub read: u64,
}

impl std::ops::AddAssign for Copied {
    /// Wraps: a peer writes these numbers.
    fn add_assign(&mut self, other: Self) {
        self.writes = self.writes.wrapping_add(other.writes);
        self.written = self.written.wrapping_add(other.written);
        self.reads = self.reads.wrapping_add(other.reads);
        self.read = self.read.wrapping_add(other.read);
    }
}

/// The marks of one channel on the side of the process that copies. There is a line for each thread that may do so at
/// the same time.
#[derive(Debug)]
pub struct Marks<M> {
    side: M,
    states: Words<M>,
    counts: Words<M>,
    /// The marks that threads of this process have, a bit each.
    taken: AtomicU32,
}

impl<M: Memory + Clone> Marks<M> {
    /// The marks in `side`, which this process writes or, to [wait](Self::wait), another.
    ///
    /// # Panics
    /// When they are not inside.
    pub fn new(side: M) -> Self {
        let states = Words::new(side.clone(), MARKS, MARK_COUNT * STRIDE);
        let counts = Words::new(side.clone(), COPIES, COUNTS);
        Self { side, states, counts, taken: AtomicU32::new(0) }
    }
}

impl<M: Memory> Marks<M> {
    /// Whether no thread of this process has a mark.
    pub(super) fn are_free(&self) -> bool {
        self.taken.load(Ordering::SeqCst) == 0
    }

    /// Sets a mark. `None` if all marks are taken.
    #[inline]
    pub fn set(&self) -> Option<Mark<'_, M>> {
        let mut taken = self.taken.load(Ordering::Relaxed);
        let index = loop {
            let free = !taken & ((1 << MARK_COUNT) - 1);
            if free == 0 {
                return None;
            }
            let bit = free & free.wrapping_neg();
            // Acquire: the words of the mark are as the thread left them that had it before.
            match self.taken.compare_exchange_weak(
                taken,
                taken | bit,
                Ordering::Acquire,
                Ordering::Relaxed,
            ) {
                Ok(_) => break bit.trailing_zeros() as usize,
                Err(now) => taken = now,
            }
        };
        let state = self.states.load(index * STRIDE, Ordering::Relaxed) | 1;
        // Release: an owner that waits for the copy before this one may see this mark instead of none.
        self.states.store(index * STRIDE, state, Ordering::Release);
        self.side.fence();
        Some(Mark { marks: self, index, state })
    }

    /// Waits until no copy is in progress that began before the caller's last change of its published memory. `goes_on` is
    /// called again and again, and says whether to go on waiting. False if it did not.
    ///
    /// The caller has issued a sequentially consistent fence since the change.
    pub fn wait(&self, mut goes_on: impl FnMut() -> bool) -> bool {
        (0..MARK_COUNT).all(|index| {
            let now = || self.states.load(index * STRIDE, Ordering::Acquire);
            let state = now();
            if state & 1 == 0 {
                return true;
            }
            while now() == state {
                if !goes_on() {
                    return false;
                }
            }
            true
        })
    }

    /// Whether no mark is set.
    pub fn are_clear(&self) -> bool {
        self.wait(|| false)
    }

    /// The copies made under the marks, from and to the memory of a device.
    fn copied(&self, device: usize) -> Copied {
        let mut sum = Copied::default();
        for index in 0..MARK_COUNT {
            let word = |n| self.counts.load(copies(index, device) + n, Ordering::Relaxed);
            let (writes, written) = (word(WRITES), word(WRITTEN));
            sum += Copied { writes, written, reads: word(READS), read: word(READ) };
        }
        sum
    }
}

/// A mark that is set, until this is dropped.
#[derive(Debug)]
pub struct Mark<'a, M: Memory> {
    marks: &'a Marks<M>,
    index: usize,
    state: u64,
}

impl<M: Memory> Mark<'_, M> {
    #[inline]
    pub(super) fn count_write(&self, device: usize, bytes: usize) {
        self.add(device, [(WRITES, 1), (WRITTEN, bytes as u64)]);
    }

    #[inline]
    pub(super) fn count_read(&self, device: usize, bytes: usize) {
        self.add(device, [(READS, 1), (READ, bytes as u64)]);
    }

    #[inline]
    fn add(&self, device: usize, words: [(usize, u64); 2]) {
        let (counts, first) = (&self.marks.counts, copies(self.index, device));
        for (n, more) in words {
            let sum = counts.load(first + n, Ordering::Relaxed).wrapping_add(more);
            counts.store(first + n, sum, Ordering::Relaxed);
        }
    }
}

impl<M: Memory> Drop for Mark<'_, M> {
    #[inline]
    fn drop(&mut self) {
        let Self { marks, index, state } = self;
        marks.states.store(*index * STRIDE, state.wrapping_add(1), Ordering::Release);
        // Before a look whether the channel was closed.
        marks.taken.fetch_and(!(1 << *index), Ordering::SeqCst);
    }
}

/// A process that sees it.
#[derive(Debug)]
pub(super) struct Attached {
    /// The part that this process writes for the other.
    own: Area,
    marks: Marks<Area>,
    process: Arc<PeerProcess>,
    slot: u8,
    /// A word of the other process, once it has told of it.
    proof: OnceLock<ProofWord>,
    /// The channel is closed.
    revoked: AtomicBool,
    /// The log already says that the process does not get on.
    reported: AtomicBool,
}

/// Words that a process publishes.
pub struct Published {
    pub(super) object: SharedObject,
    area: Area,
    len: usize,
    attached: Mutex<rank::AttachedPages, Vec<Arc<Attached>>>,
    /// The copies of processes that are no longer attached, by device.
    past: Mutex<rank::PastCopies, Vec<Copied>>,
}

impl Published {
    /// Published memory of `len` bytes, rounded up to pages. They take memory as they are [allocated](Self::allocate).
    pub(super) fn new(len: usize) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(page());
        let object = SharedObject::new(len)?;
        object.allocate(0, page())?;
        let area = Area::map(object.as_fd(), len, Access::ReadWrite)?;
        object.seal_future_writes();
        let past = Mutex::new(vec![Copied::default(); DEVICES]);
        let attached = Mutex::default();
        Ok(Self { object, area, len, attached, past })
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "a page at least")]
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// A word.
    ///
    /// # Panics
    /// When it does not lie inside, at a multiple of 8.
    #[must_use]
    pub fn load(&self, at: usize) -> u64 {
        self.area.load(at, Ordering::Acquire)
    }

    /// Writes a word. A reader that sees it sees earlier writes, too.
    ///
    /// # Panics
    /// As for [`load`](Self::load).
    pub fn store(&self, at: usize, value: u64) {
        self.area.store(at, value, Ordering::Release);
    }

    /// Sets bits of a word.
    ///
    /// # Panics
    /// As for [`load`](Self::load).
    pub fn set_bits(&self, at: usize, bits: u64) {
        self.area.fetch_or(at, bits);
    }

    /// Puts memory behind bytes of the published memory; the first page has some already. Call it before they are written.
    /// False if the system has none.
    ///
    /// # Panics
    /// When they do not lie inside.
    #[must_use]
    pub fn allocate(&self, at: usize, len: usize) -> bool {
        assert!(at <= self.len && len <= self.len - at, "inside the published memory");
        self.object.allocate(at, len).is_ok()
    }

    /// Waits until all copies have ended that may have begun before the caller's last change. Memory that it has taken
    /// back is then no longer touched. It does not wait for a process that has ended; it waits for any other, however
    /// long that takes.
    pub(super) fn settle(&self) {
        self.area.fence();
        let busy: Vec<_> = {
            let mut attached = self.attached.lock();
            attached.retain(|one| !self.is_past(one));
            attached.iter().filter(|one| !one.marks.are_clear()).map(Arc::clone).collect()
        };
        busy.iter().for_each(|one| one.wait());
    }

    /// Tells whether a process cannot copy any more. If so, adds up its copies.
    fn is_past(&self, one: &Attached) -> bool {
        let is_past =
            one.revoked.load(Ordering::Acquire) && (one.marks.are_clear() || one.is_gone());
        if is_past {
            for (past, device) in self.past.lock().iter_mut().zip(0..) {
                *past += one.marks.copied(device);
            }
        }
        is_past
    }

    /// Enters the process with this slot, before it can see the published memory. `sides` are this process's side of the
    /// channel and the other's. False if the process has a copy in progress through a channel that is closed. Each of these
    /// keeps memory and a descriptor here, and a process could claim one after the other.
    #[must_use]
    pub(super) fn attach(&self, slot: u8, sides: [&Area; 2], process: &Arc<PeerProcess>) -> bool {
        let [own, peer] = sides.map(Area::clone);
        let (marks, process) = (Marks::new(peer), Arc::clone(process));
        let (proof, revoked, reported) = Default::default();
        let mut attached = self.attached.lock();
        attached.retain(|one| !self.is_past(one));
        let lingers = |one: &Arc<Attached>| {
            one.process.pid == process.pid && one.revoked.load(Ordering::Acquire)
        };
        if attached.iter().any(lingers) {
            return false;
        }
        attached.push(Arc::new(Attached { own, marks, process, slot, proof, revoked, reported }));
        true
    }

    /// The process has told of a word in its memory.
    pub(super) fn introduce(&self, process: &Arc<PeerProcess>, proof: ProofWord) {
        for one in self.attached.lock().iter().filter(|one| Arc::ptr_eq(&one.process, process)) {
            let _ = one.proof.set(proof);
        }
    }

    /// The channel to this process is closed.
    pub(super) fn detach(&self, process: &Arc<PeerProcess>) {
        for one in self.attached.lock().iter().filter(|one| Arc::ptr_eq(&one.process, process)) {
            one.own.store(REVOKED, 1, Ordering::Release);
            // Either this process sees the mark of a copy, or the copying process sees the word.
            one.own.fence();
            one.revoked.store(true, Ordering::Release);
        }
    }

    /// Copies of others from and to this process's memory, as they report them, by the device of its queue pairs.
    #[must_use]
    pub fn copied(&self, device: usize) -> Copied {
        let attached = self.attached.lock();
        let mut sum = self.past.lock().get(device).copied().unwrap_or_default();
        attached.iter().for_each(|one| sum += one.marks.copied(device));
        sum
    }
}

impl fmt::Debug for Published {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Published").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Attached {
    /// Whether the process has ended or runs another program. The kernel tells neither if it gives no descriptor of the process
    /// (before Linux 5.3, or in another PID namespace), nor an exec if this process may not look at its memory. Then the hang-up
    /// of its socket tells.
    fn is_gone(&self) -> bool {
        if self.process.has_ended() {
            return true;
        }
        let seen = self.proof.get().and_then(|&proof| remote::still_has(self.process.pid, proof));
        match seen {
            Some(is_there) if self.process.pidfd.is_some() => !is_there,
            Some(false) => true,
            _ => self.process.has_left(),
        }
    }

    /// Waits for the marks that are set.
    fn wait(&self) {
        let begin = Instant::now();
        self.marks.wait(|| {
            let waited = begin.elapsed();
            if waited < LOOK_AGAIN {
                thread::yield_now();
                return true;
            }
            if self.is_gone() {
                return false;
            }
            if waited > WAIT && !self.reported.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    pid = self.process.pid,
                    slot = self.slot,
                    "memory or a queue pair is not taken back before this process ends the copy that it has begun; is it \
                     stopped?"
                );
            }
            // It is a long copy, which takes milliseconds.
            sys::sleep(LOOK_AGAIN);
            true
        });
        if self.reported.swap(false, Ordering::Relaxed) {
            let (pid, seconds) = (self.process.pid, begin.elapsed().as_secs());
            tracing::warn!(pid, slot = self.slot, seconds, "the copy of this process has ended");
        }
    }
}

/// The published memory of a peer. Whatever it holds was written by another process.
#[derive(Clone, Debug)]
pub(super) struct PeerPublished {
    area: Area,
    /// The bytes of its whole words.
    len: usize,
}

impl PeerPublished {
    pub(super) fn new(object: &SharedObject, len: usize) -> io::Result<Self> {
        let area = Area::map(object.as_fd(), len, Access::ReadOnly)?;
        Ok(Self { area, len: len / 8 * 8 })
    }

    /// A word; None beyond the end.
    #[inline]
    pub(super) fn load(&self, at: usize) -> Option<u64> {
        let is_inside = at.is_multiple_of(8) && at < self.len;
        // SAFETY: a whole word, which is inside and aligned.
        is_inside.then(|| unsafe { self.area.load_held(at, Ordering::Acquire) })
    }
}

/// Largest published memory that is accepted.
pub(super) const MAX_PUBLISHED: usize = 1 << 30;

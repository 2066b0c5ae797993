//! A queue of receive WQEs: a queue pair's own, or a shared one.

use anyverbs_queue_memory::{OutOfMemory, QueueMemory, QueueVec, filled};
use arrayvec::ArrayVec;
use thiserror::Error;

use crate::wr::{MAX_SGE, RecvWr, Sge};

/// A receive WQE, taken out of its queue.
#[derive(Clone, Debug, Default)]
pub struct RecvWqe {
    /// The program's cookie.
    pub wr_id: u64,
    /// The places for the data.
    pub sges: ArrayVec<Sge, MAX_SGE>,
}

impl RecvWqe {
    /// Bytes that fit.
    #[must_use]
    pub fn room(&self) -> u64 {
        self.sges.iter().map(|s| u64::from(s.len)).sum()
    }
}

/// The reason why a receive was not posted (`docs/semantics.md`, smaller rules).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PostRecvError {
    /// `ENOMEM`.
    #[error("the receive queue is full")]
    Full,
    /// `EINVAL`.
    #[error("more scatter/gather elements than the queue was created for")]
    TooManySges,
    /// `EINVAL`: state RESET (IBA 10.3.1).
    #[error("the queue is in RESET, and takes no receives before it leaves it")]
    State,
    /// `EINVAL`: the queue pair takes its receives from an SRQ.
    #[error("the queue pair has an SRQ: call ibv_post_srq_recv")]
    HasSrq,
    /// `EINVAL`: a queue pair of XRC, or one that spreads frames over work queues.
    #[error(
        "a queue pair of this type has no receive queue: receives go to its SRQs or work queues"
    )]
    NoQueue,
}

/// Copies elements between slices of one length: mostly one, for which a call of memcpy takes longer than the copy.
#[inline]
pub(crate) fn copy_sges(to: &mut [Sge], from: &[Sge]) {
    if let ([to], [from]) = (&mut *to, from) {
        *to = *from;
    } else {
        to.copy_from_slice(from);
    }
}

/// A ring of receive WQEs. It allocates only at creation.
#[derive(Debug)]
pub struct RecvQueue {
    wqes: QueueVec<(u64, u8)>,
    sges: QueueVec<Sge>,
    max_sge: usize,
    head: usize,
    len: usize,
    /// Requests taken in the earlier rounds of the ring. It changes when `head` returns to 0.
    taken_before: u64,
}

impl RecvQueue {
    /// A queue for `max_wr` requests of up to `max_sge` elements (at most [`MAX_SGE`]).
    #[must_use]
    pub fn new(max_wr: u32, max_sge: u32) -> Self {
        Self::in_memory(max_wr, max_sge, &QueueMemory::HEAP).expect("the heap has room")
    }

    /// As [`new`](Self::new), in a program's own memory.
    pub fn in_memory(max_wr: u32, max_sge: u32, memory: &QueueMemory) -> Result<Self, OutOfMemory> {
        let max_sge = (max_sge as usize).min(MAX_SGE);
        Ok(Self {
            wqes: filled((0, 0), max_wr as usize, memory)?,
            sges: filled(Sge::default(), max_wr as usize * max_sge, memory)?,
            max_sge,
            head: 0,
            len: 0,
            taken_before: 0,
        })
    }

    /// Requests that the queue can hold.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.wqes.len()
    }

    /// Requests that wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Tells whether the queue is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a request at the end.
    pub fn push(&mut self, wr: &RecvWr<'_>) -> Result<(), PostRecvError> {
        if wr.sges.len() > self.max_sge {
            return Err(PostRecvError::TooManySges);
        }
        if self.len == self.wqes.len() {
            return Err(PostRecvError::Full);
        }
        let at = self.wrap(self.head + self.len);
        self.wqes[at] = (wr.wr_id, wr.sges.len() as u8);
        let first = at * self.max_sge;
        copy_sges(&mut self.sges[first..first + wr.sges.len()], wr.sges);
        self.len += 1;
        Ok(())
    }

    /// Adds a request of one element at the end, if there is room.
    #[inline(always)]
    pub(crate) fn push_single(&mut self, wr_id: u64, sge: Sge) -> bool {
        let at = self.wrap(self.head + self.len);
        if self.len == self.wqes.len() || self.max_sge == 0 {
            return false;
        }
        let (Some(wqe), Some(first)) =
            (self.wqes.get_mut(at), self.sges.get_mut(at * self.max_sge))
        else {
            return false;
        };
        (*wqe, *first) = ((wr_id, 1), sge);
        self.len += 1;
        true
    }

    /// Moves the oldest request to `into`. False if none waits.
    pub fn pop(&mut self, into: &mut RecvWqe) -> bool {
        if self.len == 0 {
            return false;
        }
        let (wr_id, count) = self.wqes[self.head];
        into.wr_id = wr_id;
        into.sges.clear();
        let first = self.head * self.max_sge;
        into.sges.extend(self.sges[first..first + usize::from(count)].iter().copied());
        self.advance();
        true
    }

    /// The oldest request, if it has one element: cookie and element.
    #[inline]
    pub(crate) fn single(&self) -> Option<(u64, &Sge)> {
        let (wr_id, 1) = *self.wqes.get(self.head).filter(|_| self.len > 0)? else { return None };
        Some((wr_id, self.sges.get(self.head * self.max_sge)?))
    }

    /// Takes the oldest request. The queue must not be empty.
    #[inline]
    pub(crate) fn skip(&mut self) {
        debug_assert!(self.len > 0);
        self.advance();
    }

    /// The oldest request is taken.
    #[inline]
    fn advance(&mut self) {
        self.head += 1;
        self.len -= 1;
        if self.head == self.wqes.len() {
            self.taken_before += self.head as u64;
            self.head = 0;
        }
    }

    /// Requests that were taken since the queue was made, or [cleared](Self::clear) last.
    #[must_use]
    pub fn taken(&self) -> u64 {
        self.taken_before + self.head as u64
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.head = 0;
        self.len = 0;
        self.taken_before = 0;
    }

    /// The memory in which it was made.
    #[must_use]
    pub fn memory(&self) -> &QueueMemory {
        self.wqes.allocator()
    }

    /// Takes the capacity, and the memory, of an empty queue for requests of as many elements, and gives it the old
    /// ones. False if the requests that wait do not fit.
    pub fn resize(&mut self, room: &mut Self) -> bool {
        if self.len > room.capacity() || self.max_sge > room.max_sge {
            return false;
        }
        room.clear();
        room.taken_before = self.taken();
        let mut wqe = RecvWqe::default();
        while self.pop(&mut wqe) {
            let pushed = room.push(&RecvWr { wr_id: wqe.wr_id, sges: &wqe.sges });
            debug_assert!(pushed.is_ok());
        }
        std::mem::swap(self, room);
        true
    }

    fn wrap(&self, at: usize) -> usize {
        if at >= self.wqes.len() { at - self.wqes.len() } else { at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_in_first_out_across_the_end() {
        let mut q = RecvQueue::new(3, 2);
        let sges = [Sge { addr: 1, len: 2, lkey: 3 }; 3];
        assert_eq!(q.push(&RecvWr { wr_id: 0, sges: &sges }), Err(PostRecvError::TooManySges));
        let mut wqe = RecvWqe::default();
        let mut expected = 0;
        for wr_id in 0..20 {
            if q.len() == 3 {
                assert_eq!(q.push(&RecvWr { wr_id, sges: &[] }), Err(PostRecvError::Full));
                assert!(q.pop(&mut wqe));
                assert_eq!(wqe.wr_id, expected);
                assert_eq!(wqe.sges.len(), expected as usize % 3);
                expected += 1;
                assert_eq!(q.taken(), expected);
            }
            assert_eq!(q.push(&RecvWr { wr_id, sges: &sges[..(wr_id % 3) as usize] }), Ok(()));
            if wr_id % 3 == 1 {
                let [five, three] = &mut [5, 3].map(|n| RecvQueue::new(n, 2));
                assert!(q.resize(five) && q.resize(three));
                assert_eq!(q.taken(), expected);
            }
        }
        q.clear();
        assert_eq!(q.taken(), 0);
    }

    #[test]
    fn a_queue_of_nothing() {
        let mut q = RecvQueue::new(0, 0);
        assert_eq!(q.push(&RecvWr { wr_id: 0, sges: &[] }), Err(PostRecvError::Full));
        assert!(!q.pop(&mut RecvWqe::default()));
    }
}

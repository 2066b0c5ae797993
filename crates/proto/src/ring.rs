//! A queue of values in memory of its own. Its memory is allocated at creation and touched as it fills.

use anyverbs_queue_memory::{OutOfMemory, QueueMemory, QueueVec, with_capacity};

/// First in, first out; of a fixed capacity.
#[derive(Debug)]
pub(crate) struct Ring<T> {
    /// Grows to the capacity the first time around.
    slots: QueueVec<T>,
    capacity: usize,
    head: usize,
    len: usize,
}

impl<T: Copy> Ring<T> {
    pub(crate) fn new(capacity: usize, memory: &QueueMemory) -> Result<Self, OutOfMemory> {
        Ok(Self { slots: with_capacity(capacity, memory)?, capacity, head: 0, len: 0 })
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The place of the oldest value, which changes when one is taken.
    pub(crate) fn head(&self) -> usize {
        self.head
    }

    /// Adds a value; the caller checked that there is room.
    #[inline]
    pub(crate) fn push_back(&mut self, value: T) {
        debug_assert!(self.len < self.capacity);
        let at = self.wrap(self.head + self.len);
        match self.slots.get_mut(at) {
            Some(slot) => *slot = value,
            None => self.slots.push(value),
        }
        self.len += 1;
    }

    pub(crate) fn pop_front(&mut self) -> Option<T> {
        if self.len == 0 {
            return None;
        }
        let value = self.slots[self.head];
        self.head = self.wrap(self.head + 1);
        self.len -= 1;
        Some(value)
    }

    /// Takes the oldest `n` out, in two parts. There must be at least `n`.
    #[inline]
    pub(crate) fn take(&mut self, n: usize) -> (&[T], &[T]) {
        let first = n.min(self.capacity - self.head);
        let at = self.head;
        self.head = self.wrap(at + n);
        self.len -= n;
        (&self.slots[at..at + first], &self.slots[..n - first])
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        (0..self.len).map(|i| &self.slots[self.wrap(self.head + i)])
    }

    /// Forgets all values for which `keep` is false.
    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&T) -> bool) {
        let mut kept = 0;
        for i in 0..self.len {
            let value = self.slots[self.wrap(self.head + i)];
            if keep(&value) {
                let to = self.wrap(self.head + kept);
                self.slots[to] = value;
                kept += 1;
            }
        }
        self.len = kept;
    }

    pub(crate) fn memory(&self) -> &QueueMemory {
        self.slots.allocator()
    }

    /// Moves to `room`, which is empty and large enough, and gives it the old memory.
    pub(crate) fn move_to(&mut self, room: &mut Self) {
        while let Some(value) = self.pop_front() {
            room.push_back(value);
        }
        std::mem::swap(self, room);
    }

    fn wrap(&self, at: usize) -> usize {
        if at >= self.capacity { at - self.capacity } else { at }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    #[test]
    fn behaves_as_a_deque() {
        let mut ring = Ring::new(5, &QueueMemory::HEAP).unwrap();
        let mut oracle = VecDeque::new();
        let mut seed = 1u32;
        for i in 0..10_000u32 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            match seed >> 29 {
                0..=3 if oracle.len() < ring.capacity() => {
                    ring.push_back(i);
                    oracle.push_back(i);
                }
                4 => assert_eq!(ring.pop_front(), oracle.pop_front()),
                5 => {
                    let n = oracle.len().min(2);
                    let (a, b) = ring.take(n);
                    assert_eq!([a, b].concat(), oracle.drain(..n).collect::<Vec<_>>());
                }
                6 => {
                    ring.retain(|v| v % 3 != 0);
                    oracle.retain(|v| v % 3 != 0);
                }
                7 => {
                    let capacity = oracle.len() + 1 + (seed >> 8) as usize % 4;
                    let mut room = Ring::new(capacity, ring.memory()).unwrap();
                    ring.move_to(&mut room);
                }
                _ => {}
            }
            assert_eq!(ring.len(), oracle.len());
            assert!(ring.iter().eq(oracle.iter()));
        }
    }
}

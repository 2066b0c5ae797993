//! The receiving half of a stream.

use std::collections::VecDeque;

use anyverbs::RemoteAddr;

use super::{Sizes, Violation};
use crate::wire::{ConnData, Target};

/// Bytes in the receive ring: offset and length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Part {
    pub(crate) at: u32,
    pub(crate) len: u32,
}

/// See the [module](super).
#[derive(Debug)]
pub(crate) struct Receiver {
    ring: RemoteAddr,
    size: u32,
    queue: u16,
    /// Lengths of the messages that were not read; for the first, the rest of its length. Never grows beyond its first
    /// capacity.
    messages: VecDeque<u32>,
    unread: u32,
    read_at: u32,
    /// Bytes that the peer may still write.
    granted: u32,
    /// Bytes that were read and not granted again.
    freed: u32,
    /// The start of the next half to grant.
    free_at: u32,
    /// Messages that were read, and the count at which credits go back by themselves; both modulo 2^16.
    read: u16,
    grant_at: u16,
    /// The peer's table, and the entry that is written next.
    table: Target,
    entry: u32,
}

impl Receiver {
    pub(super) fn new(sizes: &Sizes, ring: RemoteAddr) -> Self {
        let half = sizes.recv_buffer / 2;
        Self {
            ring,
            size: half * 2,
            queue: sizes.recv_queue,
            messages: VecDeque::with_capacity(sizes.recv_queue.into()),
            unread: 0,
            read_at: 0,
            granted: half,
            freed: half,
            free_at: half,
            read: 0,
            grant_at: sizes.recv_queue / 2,
            table: Target::default(),
            entry: 1,
        }
    }

    pub(super) fn connect(&mut self, peer: &ConnData) {
        self.table = peer.sgl;
        if self.entry >= self.table.len {
            self.entry = 0;
        }
    }

    pub(super) fn on_data(&mut self, len: u32, written: u32) -> Result<(), Violation> {
        // On one host the sender may have written them before.
        if (written > 0 && len != written) || len > self.granted {
            return Err(Violation("data beyond what was granted"));
        }
        if self.messages.len() >= self.queue.into() {
            return Err(Violation("a message without a credit"));
        }
        if len == 0 {
            self.read = self.read.wrapping_add(1);
            return Ok(());
        }
        self.granted -= len;
        self.unread += len;
        self.messages.push_back(len);
        Ok(())
    }

    /// A message that carries no data of the stream, but cost a credit.
    pub(super) fn on_map_entry(&mut self) {
        self.read = self.read.wrapping_add(1);
    }

    /// Bytes that wait to be read.
    pub(crate) fn unread(&self) -> u32 {
        self.unread
    }

    /// Up to `want` contiguous bytes, `skip` bytes after the first unread one.
    pub(crate) fn peek(&self, skip: u32, want: usize) -> Option<Part> {
        let left = self.unread.checked_sub(skip).filter(|left| *left > 0)?;
        let at = (u64::from(self.read_at) + u64::from(skip)) % u64::from(self.size);
        let at = u32::try_from(at).unwrap_or(0);
        let len = u32::try_from(want).unwrap_or(u32::MAX).min(left).min(self.size - at);
        (len > 0).then_some(Part { at, len })
    }

    /// The first `len` unread bytes were taken.
    pub(crate) fn consume(&mut self, mut len: u32) {
        debug_assert!(len <= self.unread);
        self.unread -= len;
        self.freed += len;
        self.read_at = ((u64::from(self.read_at) + u64::from(len)) % u64::from(self.size)) as u32;
        while len > 0 {
            let Some(first) = self.messages.front_mut() else { break };
            let taken = len.min(*first);
            *first -= taken;
            len -= taken;
            if *first == 0 {
                self.messages.pop_front();
                self.read = self.read.wrapping_add(1);
            }
        }
    }

    pub(crate) fn owes_grant(&self) -> bool {
        self.freed >= self.size / 2 || (self.read.wrapping_sub(self.grant_at) as i16) >= 0
    }

    /// The half that is free, if one is, and where in the peer's table it is entered.
    pub(super) fn grant_half(&mut self) -> Option<(Target, RemoteAddr)> {
        let half = self.size / 2;
        if self.freed < half {
            return None;
        }
        let target =
            Target { addr: self.ring.va + u64::from(self.free_at), key: self.ring.rkey, len: half };
        let at = u64::from(self.entry) * Target::LEN as u64;
        let to = RemoteAddr { va: self.table.addr.wrapping_add(at), rkey: self.table.key };
        self.freed -= half;
        self.granted += half;
        self.free_at = if self.free_at == 0 { half } else { 0 };
        self.entry += 1;
        if self.entry >= self.table.len {
            self.entry = 0;
        }
        Some((target, to))
    }

    /// The count at which the peer's credits end from now on.
    pub(super) fn grant_messages(&mut self) -> u16 {
        self.grant_at = self.read.wrapping_add(self.queue / 2);
        self.read.wrapping_add(self.queue)
    }

    #[cfg(any(test, fuzzing))]
    pub(crate) fn check(&self) {
        assert_eq!(self.granted + self.unread + self.freed, self.size);
        assert!(self.messages.len() <= usize::from(self.queue));
        assert_eq!(self.messages.iter().sum::<u32>(), self.unread);
    }
}

//! The sending half of a stream.

use anyverbs::RemoteAddr;

use super::{CONTROL_SLOTS, Posted, SEND_LOW_WATER, Sizes, Violation};
use crate::wire::{ConnData, IoMapEntry, Message, SGL_LEN, Target};

/// The longest message. Long ones let the copy of the next overlap with the transmission of the last.
const MAX_PIECE: u32 = 64 << 10;

/// Fewest bytes that are written to the peer at once. Fewer are copied twice more, and take less time so.
const MIN_AT_ONCE: u32 = 4 << 10;

/// The place of a piece's bytes when its message is posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Source {
    /// The send ring, in up to two parts: offset and length. The second is empty unless the ring's end lies between.
    Ring([(u32, u32); 2]),
    Inline,
    /// They are with the peer already.
    AtOnce,
}

/// A write to be posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Piece {
    pub(crate) len: u32,
    pub(crate) source: Source,
    pub(crate) to: RemoteAddr,
    /// Immediate data; none for writes that the peer need not notice.
    pub(crate) imm: Option<u32>,
    pub(crate) posted: Posted,
    before: Before,
}

/// The state of a sender before it planned a piece.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Before {
    current: usize,
    target: Target,
    ring_at: u32,
}

/// See the [module](super).
#[derive(Debug)]
pub(crate) struct Sender {
    inline: u32,
    /// Work requests that may be posted, and how many in all.
    slots: u32,
    max_slots: u32,
    ring_size: u32,
    ring_free: u32,
    ring_at: u32,
    /// Messages sent, and the count at which credits end; both modulo 2^16.
    sent: u16,
    limit: u16,
    /// The rest of the halves that the peer granted.
    targets: [Target; SGL_LEN],
    /// The one that is written to.
    current: usize,
    /// The one that the peer grants next.
    next: usize,
    /// The peer's I/O map.
    iomap: Target,
}

impl Sender {
    pub(super) fn new(sizes: &Sizes) -> Self {
        let slots = u32::from(sizes.send_queue).saturating_sub(CONTROL_SLOTS).max(1);
        Self {
            inline: sizes.inline,
            slots,
            max_slots: slots,
            ring_size: sizes.send_buffer,
            ring_free: sizes.send_buffer,
            ring_at: 0,
            sent: 0,
            limit: 0,
            targets: [Target::default(); SGL_LEN],
            current: 0,
            next: 1,
            iomap: Target::default(),
        }
    }

    pub(super) fn connect(&mut self, peer: &ConnData) {
        self.targets[0] = peer.buffer;
        self.limit = peer.credits;
        let table = u64::from(peer.sgl.len).saturating_mul(Target::LEN as u64);
        self.iomap = Target {
            addr: peer.sgl.addr.wrapping_add(table),
            key: peer.sgl.key,
            len: peer.iomap_len.into(),
        };
    }

    /// The entry of our table that the peer writes next.
    pub(super) fn next_entry(&self) -> usize {
        self.next
    }

    pub(super) fn on_entry(&mut self, target: Target) -> Result<(), Violation> {
        if target.len == 0 || self.targets[self.next].len != 0 {
            return Err(Violation("a grant that was not due"));
        }
        self.targets[self.next] = target;
        self.next = (self.next + 1) % SGL_LEN;
        Ok(())
    }

    pub(super) fn on_credits(&mut self, limit: u16) {
        self.limit = limit;
    }

    pub(super) fn on_sent(&mut self, ring_bytes: u32) {
        self.slots += 1;
        self.ring_free += ring_bytes;
        debug_assert!(self.slots <= self.max_slots && self.ring_free <= self.ring_size);
    }

    pub(super) fn all_sent(&self) -> bool {
        self.slots == self.max_slots
    }

    /// Whether a message beside the stream can be sent now.
    pub(crate) fn has_room(&self) -> bool {
        self.slots > 0 && self.ring_free >= SEND_LOW_WATER.min(self.ring_size)
    }

    /// Whether a message of the stream can be sent now.
    pub(crate) fn can_send(&self) -> bool {
        self.has_room() && self.sent != self.limit && self.targets[self.current].len > 0
    }

    /// Takes room for the stream's next `want` bytes, or fewer.
    pub(crate) fn plan(&mut self, want: usize) -> Option<Piece> {
        let before = self.now();
        let (len, to) = self.take_target(want, self.ring_free)?;
        Some(self.piece(len, to, Some(Message::Data(len)), before))
    }

    /// As [`plan`](Self::plan), for bytes that are written to the peer before their message is posted, and lie nowhere in the ring.
    /// `None` if they are too few for that.
    pub(crate) fn plan_at_once(&mut self, want: usize) -> Option<Piece> {
        if clamp(want).min(self.targets[self.current].len) < MIN_AT_ONCE {
            return None;
        }
        let before = self.now();
        let (len, to) = self.take_target(want, MAX_PIECE)?;
        self.slots -= 1;
        let imm = Some(Message::Data(len).encode());
        Some(Piece { len, source: Source::AtOnce, to, imm, posted: Posted::Data(0), before })
    }

    fn now(&self) -> Before {
        let Self { current, ring_at, .. } = *self;
        Before { current, target: self.targets[current], ring_at }
    }

    /// Takes a place at the peer for `want` bytes, or fewer.
    fn take_target(&mut self, want: usize, most: u32) -> Option<(u32, RemoteAddr)> {
        if want == 0 || !self.can_send() {
            return None;
        }
        let target = &mut self.targets[self.current];
        let len = clamp(want).min(MAX_PIECE).min(target.len).min(most);
        let to = RemoteAddr { va: target.addr, rkey: target.key };
        target.addr = target.addr.wrapping_add(len.into());
        target.len -= len;
        if target.len == 0 {
            self.current = (self.current + 1) % SGL_LEN;
        }
        self.sent = self.sent.wrapping_add(1);
        Some((len, to))
    }

    /// Gives back a piece that was not posted, before another one is planned.
    pub(crate) fn cancel(&mut self, piece: &Piece) {
        let Posted::Data(ring_bytes) = piece.posted else { return };
        self.slots += 1;
        self.ring_free += ring_bytes;
        let Before { current, target, ring_at } = piece.before;
        (self.current, self.ring_at) = (current, ring_at);
        // A peer that granted this half meanwhile had no right to.
        self.targets[current] = target;
        if piece.imm.is_some() {
            self.sent = self.sent.wrapping_sub(1);
        }
    }

    /// Takes room for `want` bytes, or fewer, that go to `to` beside the stream.
    pub(crate) fn plan_direct(&mut self, want: usize, to: RemoteAddr) -> Option<Piece> {
        if want == 0 || !self.has_room() {
            return None;
        }
        let len = clamp(want).min(MAX_PIECE).min(self.ring_free);
        let before = self.now();
        Some(self.piece(len, to, None, before))
    }

    /// Entries of the peer's I/O map.
    pub(crate) fn iomap_len(&self) -> u32 {
        self.iomap.len
    }

    /// Takes room for an entry of the peer's I/O map.
    pub(crate) fn plan_map_entry(&mut self, index: u16) -> Option<Piece> {
        if !self.can_send() || u32::from(index) >= self.iomap.len {
            return None;
        }
        self.sent = self.sent.wrapping_add(1);
        let at = u64::from(index) * IoMapEntry::LEN as u64;
        let to = RemoteAddr { va: self.iomap.addr.wrapping_add(at), rkey: self.iomap.key };
        let before = self.now();
        Some(self.piece(IoMapEntry::LEN as u32, to, Some(Message::IoMap(index)), before))
    }

    fn piece(
        &mut self,
        len: u32,
        to: RemoteAddr,
        message: Option<Message>,
        before: Before,
    ) -> Piece {
        self.slots -= 1;
        let imm = message.map(Message::encode);
        if len <= self.inline {
            let posted = Posted::Data(0);
            return Piece { len, source: Source::Inline, to, imm, posted, before };
        }
        let first = len.min(self.ring_size - self.ring_at);
        let ring = [(self.ring_at, first), (0, len - first)];
        self.ring_at = if first < len { len - first } else { self.ring_at + len };
        if self.ring_at == self.ring_size {
            self.ring_at = 0;
        }
        self.ring_free -= len;
        Piece { len, source: Source::Ring(ring), to, imm, posted: Posted::Data(len), before }
    }

    #[cfg(test)]
    pub(super) fn credits(&self) -> u16 {
        self.limit.wrapping_sub(self.sent)
    }
}

fn clamp(want: usize) -> u32 {
    u32::try_from(want).unwrap_or(u32::MAX)
}

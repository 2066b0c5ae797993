//! A ring of messages from one writer to one reader in another process.
//!
//! A message is a control word, a header and a payload, contiguous, at a multiple of 64 bytes. The control word says
//! that the message is there. The reader looks at the place where the next one will be, so a small message costs the
//! transfer of one cache line. Before the writer publishes a batch, it puts a zero behind it, lest the reader take old
//! bytes for a control word. (Where there was time, it has done so after the batch before.) Then it writes all control
//! words of the batch but the first, and last, with release ordering, the first. One acquire load thus makes the whole
//! batch visible. The first control word also tells the length of the batch. So the reader can fetch its lines ahead,
//! and need not look for more messages behind it.
//!
//! Each side has a [`Memory`] of its own, to which it alone writes; [`super`] describes its layout. Positions count
//! bytes since the beginning and are taken modulo the size of the ring.
//!
//! The peer's words are believed as far as they can be true. A head that goes backwards or beyond the published
//! messages breaks the ring for good. So does a control word that no writer writes or that reaches out of the ring.

use std::sync::atomic::Ordering;

use thiserror::Error;

use super::layout::{
    ALLOCATION, Control, HEAD, LINE, MAX_HEADER, ROOM_ASKED, ROOM_GIVEN, extent, shown, with_shown,
};
use super::memory::{Area, Memory};

/// The reason why there is no room for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ReserveError {
    /// The reader has not got so far, or the system is out of memory. Room may come.
    #[error("the ring is full")]
    Full,
    /// A header longer than [`MAX_HEADER`] or a payload longer than [`Writer::max_payload`].
    #[error("the message is longer than the ring takes")]
    TooLong,
    /// The peer wrote words that no reader writes.
    #[error("the peer broke the ring")]
    Broken,
}

/// Bytes of header and payload that go into one line.
pub const ONE_LINE: usize = LINE - 8;

/// The distance up to which a reader fetches lines ahead.
const AHEAD: u64 = 8 * LINE as u64;

/// The side that writes messages.
#[derive(Debug)]
pub struct Writer<M = Area> {
    own: M,
    peer: M,
    /// The place of the ring in the own memory, and its size.
    data: usize,
    size: u64,
    max_payload: usize,
    /// Up to where messages are committed, and up to where published.
    committed: u64,
    published: u64,
    /// Behind a message of one line at `published` stands a zero already, at this position; 0 if none does.
    zeroed: u64,
    /// The control word at `published`, which is held back.
    first: u64,
    /// The rest of its line, if the message there fills no more than that. The reader looks at that line all the time,
    /// and takes it from this processor's cache between one write to it and the next. So all of it is written together.
    line: [u8; LINE],
    /// Bytes of it behind the control word; 0 if the message is not there, but in its place.
    held: usize,
    /// The reader's position, as last seen.
    head: u64,
    asked: u64,
    /// Bytes of the ring that have memory behind them: all, after the first lap.
    allocated: usize,
    broken: bool,
}

impl<M: Memory> Writer<M> {
    /// A writer into `own`, which is zero, from offset `data` on: a ring of `size` bytes, a power of two.
    pub fn new(own: M, peer: M, data: usize, size: usize, max_payload: usize) -> Self {
        Self {
            own,
            peer,
            data,
            size: size as u64,
            max_payload,
            committed: 0,
            published: 0,
            zeroed: 0,
            first: 0,
            line: [0; LINE],
            held: 0,
            head: 0,
            asked: 0,
            allocated: ALLOCATION.min(size),
            broken: false,
        }
    }

    /// Longest payload of one message.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.max_payload
    }

    /// Whether messages are committed that the reader cannot see yet.
    #[must_use]
    pub fn has_unpublished(&self) -> bool {
        self.committed != self.published
    }

    /// Whether the reader has taken everything that was published.
    ///
    /// # Errors
    /// [`ReserveError::Broken`].
    pub fn is_drained(&mut self) -> Result<bool, ReserveError> {
        self.refresh_head()?;
        Ok(self.head == self.published)
    }

    #[inline]
    fn offset(&self, position: u64) -> usize {
        self.data + (position & (self.size - 1)) as usize
    }

    /// Reserves room for a message. It is not sent until it is committed, and dropping it loses nothing.
    ///
    /// # Errors
    /// See [`ReserveError`].
    #[inline]
    pub fn reserve(
        &mut self,
        header: usize,
        payload: usize,
    ) -> Result<Reservation<'_, M>, ReserveError> {
        if header > MAX_HEADER || payload > self.max_payload {
            return Err(ReserveError::TooLong);
        }
        let (front, len) = extent(header, payload);
        let to_end = self.size - (self.committed & (self.size - 1));
        let skip = if len as u64 > to_end { to_end } else { 0 };
        // This includes one line more, for the zero behind the batch.
        let need = skip + (len + LINE) as u64;
        if self.broken || self.free() < need {
            self.refresh_head()?;
            if self.free() < need {
                return Err(ReserveError::Full);
            }
        }
        let start = self.offset(self.committed + skip);
        let end = (start - self.data + len + LINE).min(self.size as usize);
        if end > self.allocated && !self.allocate(end) {
            return Err(ReserveError::Full);
        }
        let is_held = self.committed == self.published && skip == 0 && len == LINE;
        if !is_held {
            // The message is written to its place, and maybe never committed.
            self.zeroed = 0;
        }
        Ok(Reservation { writer: self, skip, start, header, front, payload, len, is_held })
    }

    /// Commits a message of one line, header and payload, which the caller has put together. False where there may be no room,
    /// or the message is too long: [`reserve`](Self::reserve) finds out.
    #[inline]
    #[must_use]
    pub fn commit_line(&mut self, header: usize, payload: usize, line: &[u8; ONE_LINE]) -> bool {
        let position = self.committed;
        let at = self.offset(position);
        // This includes the zero behind it. No line reaches out of the ring.
        let end = (at - self.data + 2 * LINE).min(self.size as usize);
        let is_room = self.free() >= 2 * LINE as u64 && end <= self.allocated && !self.broken;
        let fits = header <= ONE_LINE && payload <= (ONE_LINE - header).min(self.max_payload);
        if !is_room || !fits {
            return false;
        }
        if position == self.published {
            self.line[8..].copy_from_slice(line);
            self.held = header + payload;
        } else {
            // This overwrites a zero that was put there ahead, if any. No reader relies on that once this is committed.
            self.own.write(at + 8, line);
        }
        self.append(Control::Message { header, payload }, LINE as u64);
        true
    }

    #[inline]
    fn free(&self) -> u64 {
        self.size - (self.committed - self.head)
    }

    #[cold]
    fn allocate(&mut self, end: usize) -> bool {
        let end = end.next_multiple_of(ALLOCATION).min(self.size as usize);
        let is_there = self.own.allocate(self.data + self.allocated, end - self.allocated);
        if is_there {
            self.allocated = end;
        }
        is_there
    }

    fn refresh_head(&mut self) -> Result<(), ReserveError> {
        let head = self.peer.load(HEAD, Ordering::Acquire);
        let is_possible =
            (self.head..=self.published).contains(&head) && head.is_multiple_of(LINE as u64);
        if self.broken || !is_possible {
            self.broken = true;
            return Err(ReserveError::Broken);
        }
        self.head = head;
        Ok(())
    }

    #[inline]
    fn append(&mut self, control: Control, len: u64) {
        if self.committed == self.published {
            self.first = control.encode();
        } else {
            self.own.store(self.offset(self.committed), control.encode(), Ordering::Relaxed);
        }
        self.committed += len;
    }

    /// Shows the reader the committed messages. Tells whether there was any. The caller then wakes the reader, if it
    /// must be woken ([`super::notify::Doorbell::ring`]).
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.committed == self.published {
            return false;
        }
        if self.zeroed != self.committed {
            self.own.store(self.offset(self.committed), 0, Ordering::Relaxed);
        }
        let (start, first) = (self.offset(self.published), self.first);
        match std::mem::take(&mut self.held) {
            0 => {}
            // Lengths known here make a few moves of it.
            1..=8 => self.own.write(start + 8, &self.line[8..16]),
            _ => self.own.write(start + 8, &self.line[8..]),
        }
        let first = with_shown(first, self.committed - self.published);
        self.own.store(start, first, Ordering::Release);
        self.published = self.committed;
        true
    }

    /// Puts a zero behind the place of the next message of one line, so that publishing it takes no other line. Call it
    /// when there is time: the reader may have that line.
    #[inline]
    pub fn prepare(&mut self) {
        let position = self.committed + LINE as u64;
        let at = self.offset(position);
        let has_memory = at - self.data + LINE <= self.allocated;
        if self.committed == self.published && has_memory && self.free() >= 2 * LINE as u64 {
            self.own.store(at, 0, Ordering::Relaxed);
            self.zeroed = position;
        }
    }

    /// Asks the reader to tell when there is room. The caller tells it, as after [`publish`](Self::publish), and tries
    /// once more to reserve. The question's number.
    pub fn ask_for_room(&mut self) -> u64 {
        self.asked += 1;
        self.own.store(ROOM_ASKED, self.asked, Ordering::Release);
        self.asked
    }

    /// Whether the reader has answered the last [`ask_for_room`](Self::ask_for_room).
    #[must_use]
    pub fn was_answered(&self) -> bool {
        self.peer.load(ROOM_GIVEN, Ordering::Acquire) == self.asked
    }

    #[cfg(test)]
    pub(crate) fn own(&self) -> &M {
        &self.own
    }

    /// The peer's memory.
    pub(crate) fn peer(&self) -> &M {
        &self.peer
    }
}

/// Room for one message; given back by dropping it.
#[derive(Debug)]
pub struct Reservation<'a, M = Area> {
    writer: &'a mut Writer<M>,
    skip: u64,
    start: usize,
    header: usize,
    front: usize,
    payload: usize,
    len: usize,
    /// The message is written to [`Writer::line`].
    is_held: bool,
}

impl<M: Memory> Reservation<'_, M> {
    /// Writes bytes to offset `at` of the message.
    #[inline]
    fn write(&mut self, at: usize, bytes: &[u8]) {
        if self.is_held {
            self.writer.line[at..at + bytes.len()].copy_from_slice(bytes);
        } else {
            self.writer.own.write(self.start + at, bytes);
        }
    }

    /// Writes the header: its first bytes, if `bytes` is shorter than the header, and never more than the header.
    #[inline]
    pub fn write_header(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(self.header);
        self.write(8, &bytes[..len]);
    }

    /// As [`write_header`](Self::write_header), of a buffer whose first bytes are the header. Call it before the
    /// payload is written: bytes behind the header may be overwritten.
    #[inline]
    pub fn write_front(&mut self, bytes: &[u8; MAX_HEADER]) {
        if self.header <= ONE_LINE {
            // A length known here makes a few moves of it; a message has its first line for itself.
            self.write(8, &bytes[..ONE_LINE]);
        } else {
            self.write(8, &bytes[..self.header]);
        }
    }

    /// Writes payload from offset `at` on.
    ///
    /// # Panics
    /// When it does not fit into the payload.
    #[inline]
    pub fn write_payload(&mut self, at: usize, bytes: &[u8]) {
        assert!(at <= self.payload && bytes.len() <= self.payload - at, "inside the payload");
        self.write(self.front + at, bytes);
    }

    /// Bytes of the payload.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.payload
    }

    /// Completes the message. The reader sees it after [`Writer::publish`].
    #[inline]
    pub fn commit(self) {
        let Self { writer, skip, header, payload, len, is_held, .. } = self;
        if is_held {
            writer.held = (header + payload).max(1);
        }
        if skip > 0 {
            writer.append(Control::Skip, skip);
        }
        writer.append(Control::Message { header, payload }, len as u64);
    }
}

impl Reservation<'_, Area> {
    /// The place of the payload: [`payload_len`](Self::payload_len) bytes, which hold old ones. Write it by raw copies
    /// while this reservation lives, and after the header. No reference may be made to it: the peer may write there.
    #[must_use]
    #[inline]
    pub fn payload_ptr(&mut self) -> *mut u8 {
        if self.is_held {
            self.writer.line[self.front..self.front + self.payload].as_mut_ptr()
        } else {
            self.writer.own.at(self.start + self.front, self.payload)
        }
    }
}

/// The side that reads messages.
#[derive(Debug)]
pub struct Reader<M = Area> {
    own: M,
    peer: M,
    cursor: Cursor,
    /// The position that the writer can know.
    released: u64,
    given: u64,
}

/// The position of a reader.
#[derive(Debug)]
struct Cursor {
    data: usize,
    size: u64,
    max_payload: usize,
    position: u64,
    /// The position up to which the writer says that messages are published, and the one up to which they are fetched.
    /// Both are hints.
    shown: u64,
    fetched: u64,
    /// The last control word was a skip.
    skipped: bool,
    messages: u64,
    broken: bool,
}

impl<M: Memory> Reader<M> {
    /// The reader of the ring that `peer` writes, with the same numbers.
    pub fn new(own: M, peer: M, data: usize, size: usize, max_payload: usize) -> Self {
        let cursor = Cursor {
            data,
            size: size as u64,
            max_payload,
            position: 0,
            shown: 0,
            fetched: 0,
            skipped: false,
            messages: 0,
            broken: false,
        };
        Self { own, peer, cursor, released: 0, given: 0 }
    }

    /// Whether there is something to read: messages, or nonsense.
    #[inline]
    #[must_use]
    pub fn is_ready(&self) -> bool {
        !self.cursor.broken && self.peer.load(self.cursor.offset(), Ordering::Relaxed) != 0
    }

    /// Tells whether the peer wrote words that no writer writes. No message comes any more.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        self.cursor.broken
    }

    /// Messages taken so far.
    #[must_use]
    pub fn messages(&self) -> u64 {
        self.cursor.messages
    }

    /// Bytes of the ring passed so far.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.cursor.position
    }

    /// Bytes of the ring.
    pub(crate) fn size(&self) -> u64 {
        self.cursor.size
    }

    /// The messages that are there now, at most `limit`. They stay in place until [`release`](Self::release).
    #[inline]
    pub fn batch(&mut self, limit: usize) -> Batch<'_, M> {
        Batch { peer: &self.peer, cursor: &mut self.cursor, left: limit, ends: false }
    }

    /// Gives the place of all messages taken so far back to the writer.
    #[inline]
    pub fn release(&mut self) {
        if self.released != self.cursor.position {
            self.released = self.cursor.position;
            self.own.store(HEAD, self.released, Ordering::Release);
        }
    }

    /// Whether the writer asked for room ([`Writer::ask_for_room`]) and was not answered. Exact after a fence.
    #[inline]
    #[must_use]
    pub fn is_room_asked(&self) -> bool {
        self.peer.load(ROOM_ASKED, Ordering::Relaxed) != self.given
    }

    /// Answers the writer, which the caller then tells ([`super::notify::Doorbell::ring_always`]).
    pub fn feed(&mut self) {
        self.release();
        self.given = self.peer.load(ROOM_ASKED, Ordering::Acquire);
        self.own.store(ROOM_GIVEN, self.given, Ordering::Release);
    }

    pub(crate) fn own(&self) -> &M {
        &self.own
    }
}

impl Cursor {
    #[inline]
    fn offset(&self) -> usize {
        self.data + (self.position & (self.size - 1)) as usize
    }

    /// Fetches lines behind the one with this control word that the writer says are published.
    #[inline]
    fn fetch<M: Memory>(&mut self, word: u64, ring: &M) {
        let shown = shown(word);
        if shown > 0 {
            self.shown = self.position + shown;
        }
        let until = self.shown.min(self.position + AHEAD);
        self.fetched = self.fetched.max(self.position + LINE as u64);
        while self.fetched < until {
            ring.prefetch(self.data + (self.fetched & (self.size - 1)) as usize);
            self.fetched += LINE as u64;
        }
    }

    /// Moves on to the next message: where its parts lie.
    #[inline]
    fn advance<M: Memory>(&mut self, ring: &M) -> Option<MessageParts> {
        while !self.broken {
            let at = self.offset();
            // Read once, so that the checked value is the used value.
            let word = ring.load(at, Ordering::Acquire);
            if word == 0 {
                return None;
            }
            let to_end = self.size - (self.position & (self.size - 1));
            self.fetch(word, ring);
            match Control::decode(word) {
                // Skips without messages between them would be an endless loop.
                Some(Control::Skip) if !self.skipped && to_end < self.size => {
                    self.skipped = true;
                    self.position += to_end;
                }
                Some(Control::Message { header, payload }) if payload <= self.max_payload => {
                    let (front, len) = extent(header, payload);
                    if len as u64 > to_end {
                        break;
                    }
                    self.skipped = false;
                    self.position += len as u64;
                    self.messages += 1;
                    let is_last = self.position == self.shown;
                    return Some(MessageParts { at, header, front, payload, is_last });
                }
                _ => break,
            }
        }
        self.broken = true;
        None
    }
}

/// The places of the parts of a validated message.
#[derive(Clone, Copy, Debug)]
struct MessageParts {
    at: usize,
    header: usize,
    front: usize,
    payload: usize,
    is_last: bool,
}

/// Iterates over the messages that are there. Messages that are not taken stay for the next time.
#[derive(Debug)]
pub struct Batch<'a, M = Area> {
    peer: &'a M,
    cursor: &'a mut Cursor,
    left: usize,
    ends: bool,
}

impl<M: Memory> Batch<'_, M> {
    /// Ends it behind the last message of those that were published together, even if more have come since.
    #[inline]
    #[must_use]
    pub fn of_one_publication(self) -> Self {
        Self { ends: true, ..self }
    }
}

impl<'a, M: Memory> Iterator for Batch<'a, M> {
    type Item = Message<'a, M>;

    #[inline]
    fn next(&mut self) -> Option<Message<'a, M>> {
        self.left = self.left.checked_sub(1)?;
        let place = self.cursor.advance(self.peer)?;
        if place.is_last && self.ends {
            self.left = 0;
        }
        Some(Message { memory: self.peer, place })
    }
}

/// A message in shared memory. The peer may change its bytes at any time: check copies, never the original.
#[derive(Clone, Copy, Debug)]
pub struct Message<'a, M = Area> {
    memory: &'a M,
    place: MessageParts,
}

impl<M: Memory> Message<'_, M> {
    /// The header, copied to `into`.
    #[inline]
    pub fn header<'b>(&self, into: &'b mut [u8; MAX_HEADER]) -> &'b [u8] {
        if self.place.header <= ONE_LINE {
            // As in `Reservation::write_front`.
            self.memory.read(self.place.at + 8, &mut into[..ONE_LINE]);
        } else {
            self.memory.read(self.place.at + 8, &mut into[..self.place.header]);
        }
        &into[..self.place.header]
    }

    /// Bytes of the payload.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.place.payload
    }

    /// Copies payload from offset `at` on.
    ///
    /// # Panics
    /// When it is not all inside the payload.
    #[inline]
    pub fn read_payload(&self, at: usize, into: &mut [u8]) {
        assert!(at <= self.place.payload && into.len() <= self.place.payload - at, "inside");
        self.memory.read(self.place.at + self.place.front + at, into);
    }
}

impl Message<'_, Area> {
    /// The place of the payload: [`payload_len`](Self::payload_len) bytes. Read it by raw copies while this message is
    /// borrowed. No reference may be made to it.
    #[must_use]
    #[inline]
    pub fn payload_ptr(&self) -> *const u8 {
        self.memory.at(self.place.at + self.place.front, self.place.payload)
    }
}

#[cfg(test)]
mod tests;

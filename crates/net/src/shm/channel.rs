//! One connection to one process: a ring in each direction.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock};

use anyverbs_locks::{Mutex, MutexGuard, rank};
use rustix::net::{Shutdown, shutdown};
use thiserror::Error;

use super::bells::{BellPlace, Listener, Looks, Ringer, Spot};
use super::endpoint::Waker;
use super::handshake::ProofWord;
use super::lane::{self, LanePlace, LaneReader, LaneWriter};
use super::layout::{
    ABLE, CELLS_LEN, LANES, LINE, MANNER, REVOKED, ROOM_GIVEN, answers, bells, lanes,
};
use super::manner::Manner;
use super::memory::{Area, Memory};
use super::notify::Doorbell;
use super::process::PeerProcess;
use super::published::{Mark, Marks, PeerPublished};
use super::remote::{Local, Remote, RemoteError, RemoteMemory};
use super::ring::{ONE_LINE, Reservation, ReserveError, Writer};
use super::shared_range::{self, SharedRange};
use crate::sys::Descriptor;

/// The reason why a channel is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Closed {
    /// The other process has ended.
    #[error("the process has ended")]
    Died = 1,
    /// The other process gave the channel up, or ran another program.
    #[error("the process closed the channel")]
    HungUp,
    /// The other process wrote words that no peer of this version writes.
    #[error("the process wrote nonsense")]
    Nonsense,
    /// The other process has another version of the protocol.
    #[error("the process speaks another version")]
    Version,
    /// The other process has no place for more channels.
    #[error("the process has too many channels")]
    Refused,
    /// This process closed it.
    #[error("closed")]
    Local,
}

impl Closed {
    const ALL: [Self; 6] =
        [Self::Died, Self::HungUp, Self::Nonsense, Self::Version, Self::Refused, Self::Local];
}

/// The reason why a message cannot be sent now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendError {
    /// The ring is full. See [`Sender::ask_for_room`].
    #[error("the ring is full")]
    Full,
    /// Longer than [`Channel::max_payload`], or the header longer than [`super::MAX_HEADER`].
    #[error("the message is longer than the ring takes")]
    TooLong,
    /// The channel is closed for good.
    #[error("{0}")]
    Closed(Closed),
}

/// The way to wake the peer's reader.
#[derive(Debug)]
pub(super) struct PeerDoorbell {
    pub(super) doorbell: Doorbell,
    pub(super) waker: Waker,
    pub(super) proof: ProofWord,
    pub(super) published: PeerPublished,
}

/// A connection to one process of the host. See [`super`] for its life.
pub struct Channel {
    pub(super) id: ChannelId,
    pub(super) process: Arc<PeerProcess>,
    pub(super) socket: Descriptor,
    /// 0, or the reason why it is closed.
    closed: AtomicU8,
    max_payload: usize,
    writer: Mutex<rank::RingWriter, Writer>,
    /// The part that the peer writes.
    peer: Area,
    /// The question for room that was not answered yet, 0 for none.
    asked: AtomicU64,
    /// Known once the other side has answered.
    doorbell: OnceLock<PeerDoorbell>,
    copies: Copies,
    marks: Marks<Area>,
    lanes: Lanes,
}

/// The name of a channel within this process.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChannelId {
    /// The number of our ring: its place in the poller and its doorbell.
    pub(super) index: usize,
    /// Names it among the descriptors that are watched; never reused.
    pub(super) key: u64,
    /// The slot of the other process.
    pub(super) slot: u8,
}

/// Whether memory of the other process can be copied.
#[derive(Default)]
struct Copies {
    remote: OnceLock<Result<RemoteMemory, RemoteError>>,
    /// The kernel forbade a copy that it had permitted before.
    denied: AtomicBool,
}

/// The lanes to the other process, and the places of those that come from it.
struct Lanes {
    /// The part that this side writes.
    own: Area,
    /// Bytes of a ring, behind which lanes lie.
    ring: usize,
    taken: Mutex<rank::Lanes, Vec<Option<Arc<LaneWriter>>>>,
    bells: BellPlace,
    /// The spots at which the other process looks.
    looks: Looks<Area>,
    ringer: Mutex<rank::Bells, Ringer<Area>>,
}

impl Lanes {
    fn new(own: Area, peer: Area, ring: usize) -> Self {
        let bells = bells(ring);
        let (looks, taken) = (Looks::new(peer, bells), Mutex::new(vec![None; LANES]));
        let ringer = Mutex::new(Ringer::new(own.clone(), bells));
        Self { own, ring, taken, bells, looks, ringer }
    }

    fn place(&self, index: usize) -> LanePlace {
        LanePlace::new(index, lanes(self.ring), answers(self.ring))
    }
}

impl Channel {
    pub(super) fn new(
        id: ChannelId,
        process: Arc<PeerProcess>,
        socket: OwnedFd,
        (writer, ring): (Writer, usize),
        marks: Marks<Area>,
        own: Area,
    ) -> Self {
        Self {
            id,
            process,
            socket: socket.into(),
            closed: AtomicU8::new(0),
            max_payload: writer.max_payload(),
            lanes: Lanes::new(own, writer.peer().clone(), ring),
            peer: writer.peer().clone(),
            writer: Mutex::new(writer),
            asked: AtomicU64::new(0),
            doorbell: OnceLock::new(),
            copies: Copies::default(),
            marks,
        }
    }

    /// A lane to the other process, which has to be told of it. `None` if there is no free one, or no memory.
    #[must_use]
    pub fn open_lane(&self) -> Option<Arc<LaneWriter>> {
        if !self.is_established() || self.closed().is_some() {
            return None;
        }
        let Lanes { own, taken, .. } = &self.lanes;
        let mut taken = taken.lock();
        let is_free = |lane: &Option<Arc<LaneWriter>>| lane.as_ref().is_none_or(|l| l.is_free());
        let index = taken.iter().position(is_free)?;
        let place = self.lanes.place(index);
        let first = match &taken[index] {
            Some(last) => last.first_of_next(),
            None if own.allocate(place.cells, CELLS_LEN) => lane::FIRST,
            None => return None,
        };
        let lane = Arc::new(LaneWriter::new(own.clone(), self.peer.clone(), place, first));
        taken[index] = Some(Arc::clone(&lane));
        Some(lane)
    }

    /// Accepts lane `index` of the other process, whose first cell has the number `first`. `None` if there is no such lane.
    #[must_use]
    pub fn accept_lane(&self, index: usize, first: u32) -> Option<LaneReader> {
        let place = (index < LANES).then(|| self.lanes.place(index))?;
        Some(LaneReader::new(self.lanes.own.clone(), self.peer.clone(), place, first))
    }

    /// Refuses lane `index` of the other process.
    pub fn refuse_lane(&self, index: usize, first: u32) {
        if index < LANES {
            LaneReader::refuse(&self.lanes.own, self.lanes.place(index), first);
        }
    }

    /// Tells the other process that something new was shown at a spot, if it does not look there by itself, or sleeps.
    #[inline]
    pub fn tell(&self, spot: Spot) {
        self.lanes.own.fence();
        if !self.lanes.looks.has(spot) {
            return self.ring_for(spot);
        }
        if let Some(doorbell) = self.doorbell.get()
            && doorbell.doorbell.is_asleep()
        {
            doorbell.waker.wake();
        }
    }

    fn ring_for(&self, spot: Spot) {
        self.lanes.ringer.lock().ring(spot);
        // Whoever establishes the channel meanwhile calls the peer, or is seen here.
        self.lanes.own.fence();
        if let Some(doorbell) = self.doorbell.get()
            && doorbell.doorbell.ring(&self.peer)
        {
            doorbell.waker.wake();
        }
    }

    /// The bells of the other process.
    pub(super) fn listener(&self) -> Listener<Area> {
        Listener::new(self.lanes.own.clone(), self.peer.clone(), self.lanes.bells)
    }

    /// The slot of the other process.
    #[must_use]
    pub fn slot(&self) -> u8 {
        self.id.slot
    }

    /// The other process's number, 0 when it lives in a PID namespace that we cannot see.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.pid
    }

    /// Longest payload of one message.
    #[must_use]
    pub fn max_payload(&self) -> usize {
        self.max_payload
    }

    /// Whether the other process has answered. Messages can be sent before.
    #[must_use]
    pub fn is_established(&self) -> bool {
        self.doorbell.get().is_some()
    }

    /// The reason why the channel is closed, if it is.
    #[inline]
    #[must_use]
    pub fn closed(&self) -> Option<Closed> {
        match self.closed.load(Ordering::Acquire) {
            0 => None,
            code => Closed::ALL.into_iter().find(|&c| c as u8 == code),
        }
    }

    /// Closes it; whether it was open. The socket hangs up when no copy is in progress: until then the other process has to
    /// wait for the copy.
    pub(super) fn close(&self, reason: Closed) -> bool {
        let was_open = self
            .closed
            .compare_exchange(0, reason as u8, Ordering::SeqCst, Ordering::Acquire)
            .is_ok();
        // Either this sees the mark of a copy, or the copy sees that the channel is closed.
        fence(Ordering::SeqCst);
        if was_open {
            self.hang_up();
        }
        was_open
    }

    /// Lets the socket of a closed channel hang up if no copy is in progress. Both pollers hear of the end by that.
    #[cold]
    fn hang_up(&self) {
        if self.marks.are_free() {
            let _ = shutdown(&self.socket, Shutdown::Both);
        }
    }

    /// The peer has written nonsense to a lane: closes the channel. The poller hears of it by the socket.
    #[cold]
    pub fn break_off(&self) {
        self.close(Closed::Nonsense);
    }

    /// The sending side, for one thread at a time.
    #[must_use]
    pub fn sender(self: &Arc<Self>) -> Sender {
        Arc::clone(self).into_sender()
    }

    /// As [`sender`](Self::sender), of a reference that [`Sender::release`] gives back. A caller that keeps it for the
    /// next time counts no reference.
    #[inline]
    #[must_use]
    pub fn into_sender(self: Arc<Self>) -> Sender {
        // Given back by the sender's end.
        std::mem::forget(self.writer.lock());
        Sender { channel: self, _guard: PhantomData }
    }

    pub(super) fn establish(&self, doorbell: PeerDoorbell) {
        let _ = self.doorbell.set(doorbell);
        if self.can_copy().is_ok() {
            self.lanes.own.store(ABLE, 1, Ordering::Release);
        }
        // Publications from before the doorbell was known have not been told.
        self.call();
    }

    /// Says what this side does to packets. The peer hears of a change as an [`Event::Manner`](super::Event::Manner).
    pub(super) fn say(&self, manner: Manner) {
        self.lanes.own.store(MANNER, manner.word(), Ordering::Release);
        self.call();
    }

    /// The manner of the other process, as far as it has said so.
    #[must_use]
    pub fn peer_manner(&self) -> Manner {
        Manner::of(self.peer.load(MANNER, Ordering::Acquire))
    }

    /// Tells the peer's reader to look at its side of this channel.
    pub(super) fn call(&self) {
        if let Some(doorbell) = self.doorbell.get()
            && doorbell.doorbell.ring_always()
        {
            doorbell.waker.wake();
        }
    }

    /// Tells whether a request for room is answered, and the asking side has not been told yet.
    pub(super) fn is_answered(&self) -> bool {
        let asked = self.asked.load(Ordering::SeqCst);
        asked != 0 && self.peer.load(ROOM_GIVEN, Ordering::Acquire) == asked
    }

    /// As [`is_answered`](Self::is_answered), once for each question.
    pub(super) fn take_answer(&self) -> bool {
        self.is_answered() && self.asked.swap(0, Ordering::SeqCst) != 0
    }

    /// The part that this side writes.
    #[cfg(test)]
    pub(super) fn own(&self) -> Area {
        self.writer.lock().own().clone()
    }

    /// Tells whether the other process still has the channel. This asks the kernel; [`closed`](Self::closed) only knows
    /// the results of [`super::Endpoint::control`].
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.closed().is_none() && !has_hung_up(self.socket.as_fd()) && !self.process.has_ended()
    }

    fn remote(&self) -> Result<&RemoteMemory, RemoteError> {
        let doorbell = self.doorbell.get().ok_or(RemoteError::Denied)?;
        self.copies
            .remote
            .get_or_init(|| RemoteMemory::open(&self.process, doorbell.proof))
            .as_ref()
            .map_err(|&error| error)
    }

    /// Whether the kernel lets us copy from and to the other process's memory. Tried once, when the channel is
    /// [established](Self::is_established); before, it is `Denied`.
    ///
    /// # Errors
    /// See [`RemoteError`].
    pub fn can_copy(&self) -> Result<(), RemoteError> {
        self.remote().map(|_| ())
    }

    /// Begins a copy from or to the other process's memory as its published memory allows it. None while there is no such way:
    /// the other process has not answered, the kernel does not permit it, or too many threads are doing it.
    #[inline]
    #[must_use]
    pub fn begin_copy(&self) -> Option<Copying<'_>> {
        if self.closed().is_some() || self.copies.denied.load(Ordering::Relaxed) {
            return None;
        }
        let doorbell = self.doorbell.get()?;
        let remote = self.remote().ok()?;
        let mark = self.marks.set()?;
        let published = &doorbell.published;
        let copying = Copying { channel: self, remote, published, mark, _end: CopyEnd(self) };
        // Behind the mark's fence: an owner that has not seen the mark has said it before.
        let is_over = self.peer.load(REVOKED, Ordering::Relaxed) != 0 || self.closed().is_some();
        (!is_over).then_some(copying)
    }

    /// Copies from the other process's memory. Its pieces must have as many bytes in all as the local ones.
    ///
    /// # Errors
    /// See [`RemoteError`]. Any part may have been copied.
    ///
    /// # Safety
    /// The local pieces may be written, as far as they are mapped.
    pub unsafe fn read_remote(
        &self,
        local: &[Local],
        remote: &[Remote],
    ) -> Result<(), RemoteError> {
        // SAFETY: the caller's promise.
        unsafe { self.remote()?.read(local, remote, || self.is_alive()) }
    }

    /// Copies to the other process's memory. Its pieces must have as many bytes in all as the local ones.
    ///
    /// # Errors
    /// See [`RemoteError`]. Any part may have been copied.
    ///
    /// # Safety
    /// The local pieces may be read, as far as they are mapped.
    pub unsafe fn write_remote(
        &self,
        local: &[Local],
        remote: &[Remote],
    ) -> Result<(), RemoteError> {
        // SAFETY: the caller's promise.
        unsafe { self.remote()?.write(local, remote, || self.is_alive()) }
    }
}

/// Hangs up behind a copy if the channel was closed meanwhile.
#[derive(Debug)]
struct CopyEnd<'a>(&'a Channel);

impl Drop for CopyEnd<'_> {
    #[inline]
    fn drop(&mut self) {
        // In one order with the end of the mark and with `close`: one of the two sees the other.
        if self.0.closed.load(Ordering::SeqCst) != 0 {
            self.0.hang_up();
        }
    }
}

/// A copy that is about to be made. While this lives, entries in the other process's published memory stay valid.
#[derive(Debug)]
pub struct Copying<'a> {
    channel: &'a Channel,
    remote: &'a RemoteMemory,
    published: &'a PeerPublished,
    mark: Mark<'a, Area>,
    /// It stands behind the mark, and so is dropped after it.
    _end: CopyEnd<'a>,
}

impl Copying<'_> {
    /// A word of the other process's published memory, which may have written anything there. None beyond its end.
    #[inline]
    #[must_use]
    pub fn published(&self, at: usize) -> Option<u64> {
        self.published.load(at)
    }

    /// Copies `len` bytes from the other process's memory.
    ///
    /// # Errors
    /// See [`RemoteError`]. Any part may have been copied.
    ///
    /// # Safety
    /// The local pieces may be written, as far as they are mapped.
    pub unsafe fn read(&self, local: &[Local], from: u64, len: usize) -> Result<(), RemoteError> {
        let remote = [Remote::new(from, len)];
        // SAFETY: the caller's promise.
        let result = unsafe { self.remote.read(local, &remote, || self.channel.is_alive()) };
        self.note(result)
    }

    /// Copies `len` bytes to the other process's memory. A reader that sees the last of them sees all the others, too.
    ///
    /// # Errors
    /// See [`RemoteError`]. Any part may have been copied.
    ///
    /// # Safety
    /// The local pieces may be read, as far as they are mapped.
    pub unsafe fn write(&self, local: &[Local], to: u64, len: usize) -> Result<(), RemoteError> {
        // The kernel copies one page after the other, upwards. But inside a page a processor's string instruction may
        // let the end be seen before the beginning. So the last line gets a copy of its own, after all others.
        let end = to.wrapping_add(len as u64);
        let line = end.wrapping_sub(1) / LINE as u64 * LINE as u64;
        let head = (line.saturating_sub(to) as usize).min(len);
        let pieces = [Remote::new(to, head), Remote::new(to.wrapping_add(head as u64), len - head)];
        let remote = if head == 0 { &pieces[1..] } else { &pieces[..] };
        // SAFETY: the caller's promise.
        let result = unsafe { self.remote.write(local, remote, || self.channel.is_alive()) };
        self.note(result)
    }

    /// The file behind `len` bytes of the other process's memory, if they are a shared mapping of one; slow.
    #[must_use]
    pub fn shared_range(&self, address: u64, len: u64, write: bool) -> Option<SharedRange> {
        self.is_current().then(|| shared_range::find(self.channel.pid(), address, len, write))?
    }

    /// Tells whether the other process was there lately. Ask before copying from or to a [`SharedRange`], which
    /// outlives the process.
    #[inline]
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.remote.check(|| self.channel.is_alive()).is_ok()
    }

    /// Whether the kernel lets the other process copy from our memory too, as far as that says.
    #[must_use]
    pub fn is_mutual(&self) -> bool {
        self.channel.peer.load(ABLE, Ordering::Acquire) != 0
    }

    /// Counts a copy that the caller has made, for the other process's device whose memory it has read.
    #[inline]
    pub fn count_read(&self, device: usize, len: usize) {
        self.mark.count_read(device, len);
    }

    /// Counts a copy that the caller has made, for the other process's device whose memory it has written.
    #[inline]
    pub fn count_write(&self, device: usize, len: usize) {
        self.mark.count_write(device, len);
    }

    #[inline]
    fn note(&self, result: Result<(), RemoteError>) -> Result<(), RemoteError> {
        if result == Err(RemoteError::Denied) {
            self.channel.copies.denied.store(true, Ordering::Relaxed);
            self.channel.lanes.own.store(ABLE, 0, Ordering::Release);
        }
        result
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel")
            .field("slot", &self.id.slot)
            .field("pid", &self.process.pid)
            .field("established", &self.is_established())
            .field("closed", &self.closed())
            .finish_non_exhaustive()
    }
}

/// Whether the other end of a connected socket is closed.
pub(super) fn has_hung_up(socket: BorrowedFd<'_>) -> bool {
    crate::sockopt::poll(socket, libc::POLLRDHUP, 0).unwrap_or(false)
}

/// The sending side of a channel, held by one thread until this is dropped.
///
/// Messages that are committed and not flushed stay invisible to the peer until the next flush.
#[derive(Debug)]
pub struct Sender {
    /// Its writer's lock is held.
    channel: Arc<Channel>,
    /// It stays on its thread, as a guard does.
    _guard: PhantomData<MutexGuard<'static, rank::RingWriter, Writer>>,
}

impl Sender {
    #[inline]
    fn writer(&mut self) -> &mut Writer {
        // SAFETY: the lock is this sender's from `Channel::sender` on. No one else makes a reference to its contents
        // meanwhile, and this one borrows the sender.
        unsafe { &mut *self.channel.writer.data_ptr() }
    }

    /// Ends it. Messages that are committed and not flushed stay so.
    #[inline]
    #[must_use]
    pub fn release(self) -> Arc<Channel> {
        let this = ManuallyDrop::new(self);
        this.unlock();
        // SAFETY: read once, of a value that is not dropped.
        unsafe { std::ptr::read(&this.channel) }
    }

    #[inline]
    fn unlock(&self) {
        // SAFETY: locked by this thread in `Channel::sender`, which forgot the guard; called once, by this sender's end.
        unsafe { self.channel.writer.force_unlock() };
    }

    /// The slot of the other process.
    #[inline]
    #[must_use]
    pub fn slot(&self) -> u8 {
        self.channel.id.slot
    }

    /// Whether it is that of `channel`.
    #[inline]
    #[must_use]
    pub fn is_of(&self, channel: &Arc<Channel>) -> bool {
        Arc::ptr_eq(&self.channel, channel)
    }

    /// Room for a message, to be filled in place and committed.
    ///
    /// # Errors
    /// See [`SendError`].
    #[inline]
    pub fn reserve(&mut self, header: usize, payload: usize) -> Result<Reservation<'_>, SendError> {
        if let Some(reason) = self.channel.closed() {
            return Err(SendError::Closed(reason));
        }
        let channel = &self.channel;
        // SAFETY: as in `writer`; the result borrows the sender.
        let writer = unsafe { &mut *channel.writer.data_ptr() };
        writer.reserve(header, payload).map_err(|error| match error {
            ReserveError::Full => SendError::Full,
            ReserveError::TooLong => SendError::TooLong,
            ReserveError::Broken => {
                channel.close(Closed::Nonsense);
                SendError::Closed(Closed::Nonsense)
            }
        })
    }

    /// As [`Writer::commit_line`]. False also where the channel is closed.
    #[inline]
    #[must_use]
    pub fn commit_line(&mut self, header: usize, payload: usize, line: &[u8; ONE_LINE]) -> bool {
        self.channel.closed().is_none() && self.writer().commit_line(header, payload, line)
    }

    /// Sends the committed messages, and wakes the peer if it sleeps.
    #[inline]
    pub fn flush(&mut self) {
        if self.writer().publish() {
            self.tell();
            self.writer().prepare();
        }
    }

    /// Whether something is committed and not flushed.
    #[must_use]
    pub fn has_unflushed(&mut self) -> bool {
        self.writer().has_unpublished()
    }

    /// Asks for [`super::Event::Room`] after [`SendError::Full`]. Flushes. Room that came meanwhile may not be told:
    /// reserve once more afterwards.
    pub fn ask_for_room(&mut self) {
        self.writer().publish();
        let asked = self.writer().ask_for_room();
        self.channel.asked.store(asked, Ordering::SeqCst);
        self.tell();
    }

    /// Whether the peer has taken everything that was flushed.
    #[must_use]
    pub fn is_drained(&mut self) -> bool {
        self.writer().is_drained().unwrap_or(true)
    }

    #[inline]
    fn tell(&self) {
        let known = &self.channel.doorbell;
        let doorbell = known.get().or_else(|| {
            // The side that makes it known calls afterwards: one of us sees the other's write.
            fence(Ordering::SeqCst);
            known.get()
        });
        if let Some(doorbell) = doorbell
            && doorbell.doorbell.ring(&self.channel.peer)
        {
            doorbell.waker.wake();
        }
    }
}

impl Drop for Sender {
    #[inline]
    fn drop(&mut self) {
        self.unlock();
    }
}

//! Reading: which of many rings have something, without looking into all of them.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::channel::{Channel, Closed};
use super::control::News;
use super::endpoint::{Shared, read_wakes};
use super::lane::{LaneReader, LaneWriter};
use super::notify::{self, Ears, OWN_DOORBELL, doorbell_of};
use super::ring::{Batch, Reader};

/// Most rings that are watched: an empty poll costs a load for each, from the own cache.
const WATCHED: usize = 4;
/// Polls without a message after which a ring may be unwatched for the sake of another.
const COLD_AFTER: u64 = 256;
/// Most messages of one ring in one poll.
const BATCH: usize = 64;
/// After how many polls one of the other rings is looked into although it did not ring.
const SWEEP_EVERY: u64 = 64;

/// A change of a channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// Both sides know each other.
    Established(Arc<Channel>),
    /// The peer has made room, after [`super::Sender::ask_for_room`].
    Room(Arc<Channel>),
    /// The channel is closed, and all that had been sent before was delivered.
    Closed(Arc<Channel>, Closed),
}

/// Reads all rings of a process. For one thread at a time.
#[derive(Debug)]
pub struct Poller {
    shared: Arc<Shared>,
    ears: Ears,
    lines: Vec<Option<Line>>,
    watched: [Option<usize>; WATCHED],
    /// Doorbells whose rings still have to be looked at.
    rung: u64,
    look_into_all: bool,
    closed: Vec<usize>,
    polls: u64,
    sweep: usize,
    events: VecDeque<Event>,
    lanes: Vec<Lane>,
}

/// An end of a lane, which is looked at in each poll.
#[derive(Debug)]
struct Lane {
    end: LaneEnd,
    /// The name that its owner has for it.
    tag: u32,
    /// The channel by which it was opened, if it is read.
    channel: Option<Arc<Channel>>,
}

#[derive(Debug)]
enum LaneEnd {
    Reader(Arc<LaneReader>),
    Writer(Arc<LaneWriter>),
}

impl LaneEnd {
    #[inline]
    fn has_news(&self) -> bool {
        match self {
            Self::Reader(lane) => lane.is_ready(),
            Self::Writer(lane) => lane.has_answer(),
        }
    }

    fn is_over(&self) -> bool {
        match self {
            Self::Reader(lane) => !lane.is_open(),
            Self::Writer(lane) => lane.is_given_up(),
        }
    }
}

#[derive(Debug)]
struct Line {
    channel: Arc<Channel>,
    reader: Box<Reader>,
    watched: bool,
    /// The poll that brought its last message.
    last: u64,
}

impl Poller {
    pub(super) fn new(shared: Arc<Shared>, ears: Ears) -> Self {
        Self {
            shared,
            ears,
            lines: Vec::new(),
            watched: [None; WATCHED],
            rung: 0,
            look_into_all: false,
            closed: Vec::new(),
            polls: 0,
            sweep: 0,
            events: VecDeque::new(),
            lanes: Vec::new(),
        }
    }

    /// Reads a lane from now on that was opened by `channel`, and names it by `tag`.
    pub fn watch_lane(&mut self, channel: &Arc<Channel>, lane: Arc<LaneReader>, tag: u32) {
        let channel = Some(Arc::clone(channel));
        self.add_lane(Lane { end: LaneEnd::Reader(lane), tag, channel });
    }

    fn add_lane(&mut self, lane: Lane) {
        self.lanes.retain(|lane| !lane.end.is_over());
        self.lanes.push(lane);
    }

    /// The peer has written nonsense to the lane that is read for `tag`: closes its channel.
    #[cold]
    pub fn break_lane(&mut self, tag: u32) {
        let of_tag = |lane: &&Lane| lane.tag == tag && lane.channel.is_some();
        if let Some(channel) = self.lanes.iter().find(of_tag).and_then(|l| l.channel.as_ref()) {
            channel.close(Closed::Nonsense);
            self.closed.push(channel.id.index);
            self.rung |= OWN_DOORBELL;
        }
    }

    /// Forgets the lane at this place, if nobody uses it any more; whether it did.
    #[cold]
    pub fn forget_lane(&mut self, place: usize) -> bool {
        let is_over = self.lanes.get(place).is_some_and(|lane| lane.end.is_over());
        if is_over {
            self.lanes.remove(place);
        }
        is_over
    }

    /// Whether a ring has messages that were not read.
    #[must_use]
    pub fn has_messages(&self) -> bool {
        self.lines.iter().flatten().any(|line| line.reader.is_ready())
    }

    /// Lanes that are read.
    #[must_use]
    pub fn lanes_read(&self) -> usize {
        let is_read = |lane: &&Lane| matches!(lane.end, LaneEnd::Reader(_)) && !lane.end.is_over();
        self.lanes.iter().filter(is_read).count()
    }

    /// The first lane from place `from` on with a cell or an answer: its place and tag.
    #[inline]
    #[must_use]
    pub fn next_lane(&self, from: usize) -> Option<(usize, u32)> {
        let rest = self.lanes.get(from..)?;
        let at = rest.iter().position(|lane| lane.end.has_news())?;
        Some((from + at, rest[at].tag))
    }

    /// Hands the messages that have come to `each`, those of one channel together, in the order of sending. Messages
    /// that `each` leaves are offered again. Their places are given back when it returns. Returns the number of
    /// messages it took.
    ///
    /// `each` may send, on any channel.
    #[inline]
    pub fn poll(&mut self, mut each: impl FnMut(&Arc<Channel>, Batch<'_>)) -> usize {
        self.polls = self.polls.wrapping_add(1);
        let mut n = 0;
        for place in 0..WATCHED {
            let Some(index) = self.watched[place] else { break };
            n += self.read(index, &mut each);
        }
        let due = self.polls.is_multiple_of(SWEEP_EVERY) || self.rung != 0 || self.look_into_all;
        if due || self.ears.is_rung() {
            n += self.poll_others(&mut each);
        }
        n
    }

    /// A [`poll`](Self::poll) without work and without an event to tell of. False if a real poll is needed: then
    /// nothing was done.
    #[inline]
    pub fn finds_nothing(&mut self) -> bool {
        let polls = self.polls.wrapping_add(1);
        let is_ready = |&index: &usize| {
            self.lines.get(index).and_then(Option::as_ref).is_some_and(|l| l.reader.is_ready())
        };
        let is_due = polls.is_multiple_of(SWEEP_EVERY)
            || self.rung != 0
            || self.look_into_all
            || self.ears.is_rung()
            || !self.events.is_empty();
        if is_due
            || self.watched.iter().map_while(Option::as_ref).any(is_ready)
            || self.next_lane(0).is_some()
        {
            return false;
        }
        self.polls = polls;
        true
    }

    /// The next change of a channel that [`poll`](Self::poll) has found.
    pub fn next_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Asks to be woken through [`super::Endpoint::wake_fd`]. False if there is something to do: poll again instead.
    pub fn arm(&mut self) -> bool {
        self.ears.fall_asleep();
        if self.is_idle() {
            return true;
        }
        self.ears.wake();
        self.look_into_all = true;
        false
    }

    /// After sleeping, or instead of it: writers need not wake us any more.
    pub fn disarm(&mut self) {
        if self.ears.is_asleep() {
            self.ears.wake();
            read_wakes(self.shared.wake.as_fd());
            self.look_into_all = true;
        }
    }

    /// Whether writers are asked to wake us.
    #[must_use]
    pub fn is_armed(&self) -> bool {
        self.ears.is_asleep()
    }

    /// Clears all doorbells, as a peer may do.
    #[cfg(test)]
    pub(super) fn forget_doorbells(&mut self) {
        self.ears.take();
    }

    fn is_idle(&self) -> bool {
        self.events.is_empty()
            && self.closed.is_empty()
            && self.rung == 0
            && !self.ears.is_rung()
            && !self.lines.iter().flatten().any(Line::has_work)
            && self.next_lane(0).is_none()
    }

    #[cold]
    #[inline(never)]
    fn poll_others(&mut self, each: &mut impl FnMut(&Arc<Channel>, Batch<'_>)) -> usize {
        if self.ears.is_rung() {
            self.rung |= self.ears.take();
        }
        let rung = std::mem::take(&mut self.rung);
        if rung & OWN_DOORBELL != 0 {
            self.hear();
        }
        let mut n = 0;
        if std::mem::take(&mut self.look_into_all) {
            for index in 0..self.lines.len() {
                n += self.look_into(index, each);
            }
        } else {
            let mut doorbells = rung & !OWN_DOORBELL;
            while doorbells != 0 {
                let first = doorbells.trailing_zeros() as usize - 1;
                doorbells &= doorbells - 1;
                for index in (first..self.lines.len()).step_by(63) {
                    n += self.look_into(index, each);
                }
            }
            if self.polls.is_multiple_of(SWEEP_EVERY) {
                for place in 0..WATCHED {
                    if let Some(index) = self.watched[place] {
                        n += self.look_into(index, each);
                    }
                }
                self.sweep = if self.sweep + 1 < self.lines.len() { self.sweep + 1 } else { 0 };
                n += self.look_into(self.sweep, each);
            }
        }
        for index in std::mem::take(&mut self.closed) {
            n += self.finish(index, each);
        }
        n
    }

    /// Takes the news of the control side.
    fn hear(&mut self) {
        for news in self.shared.take_news() {
            match news {
                News::Opened(channel, reader) => {
                    let index = channel.id.index;
                    if self.lines.len() <= index {
                        self.lines.resize_with(index + 1, || None);
                    }
                    self.lines[index] = Some(Line { channel, reader, watched: false, last: 0 });
                    // The peer may have sent before it could ring.
                    self.rung |= doorbell_of(index);
                }
                News::Answered(channel) => self.events.push_back(Event::Established(channel)),
                News::Lane(lane, tag) => {
                    self.add_lane(Lane { end: LaneEnd::Writer(lane), tag, channel: None });
                }
                News::Closed(channel) => {
                    let line = self.lines.get(channel.id.index).and_then(Option::as_ref);
                    if line.is_some_and(|line| Arc::ptr_eq(&line.channel, &channel)) {
                        self.closed.push(channel.id.index);
                    }
                }
            }
        }
    }

    /// Reads a batch of one ring.
    #[inline]
    fn read(&mut self, index: usize, each: &mut impl FnMut(&Arc<Channel>, Batch<'_>)) -> usize {
        let Some(Some(line)) = self.lines.get_mut(index) else { return 0 };
        if !line.reader.is_ready() {
            return 0;
        }
        let before = line.reader.messages();
        let mut batch = line.reader.batch(BATCH);
        if line.last.wrapping_add(1) != self.polls {
            // The poll before this one found nothing: it is no stream, and the next message is not there yet.
            batch = batch.of_one_publication();
        }
        each(&line.channel, batch);
        line.reader.release();
        line.last = self.polls;
        let n = (line.reader.messages() - before) as usize;
        line.feed();
        if line.reader.is_broken() {
            line.channel.close(Closed::Nonsense);
            self.closed.push(index);
            self.rung |= OWN_DOORBELL;
        }
        n
    }

    /// Serves all requests of a ring.
    fn look_into(
        &mut self,
        index: usize,
        each: &mut impl FnMut(&Arc<Channel>, Batch<'_>),
    ) -> usize {
        let n = self.read(index, each);
        let Some(Some(line)) = self.lines.get_mut(index) else { return n };
        line.feed();
        if line.channel.take_answer() {
            self.events.push_back(Event::Room(Arc::clone(&line.channel)));
        }
        if n > 0 && !line.watched {
            self.watch(index);
        }
        if let Some(Some(line)) = self.lines.get(index)
            && !line.watched
            && line.reader.is_ready()
        {
            self.rung |= doorbell_of(index);
        }
        n
    }

    /// Watches a ring from now on, if there is a place or a ring that has been quiet for long.
    fn watch(&mut self, index: usize) {
        let (polls, lines) = (self.polls, &mut self.lines);
        let is_cold = |line: &Option<Line>| {
            line.as_ref().is_none_or(|line| polls.wrapping_sub(line.last) > COLD_AFTER)
        };
        let place = self
            .watched
            .iter()
            .position(|place| place.is_none_or(|i| lines.get(i).is_none_or(is_cold)));
        let Some(place) = place else { return };
        if let Some(old) = self.watched[place].replace(index)
            && let Some(Some(line)) = lines.get_mut(old)
        {
            line.watched = false;
            notify::unwatch(line.reader.own());
            if line.has_work() {
                self.rung |= doorbell_of(old);
            }
        }
        if let Some(Some(line)) = lines.get_mut(index) {
            line.watched = true;
            notify::watch(line.reader.own());
        }
    }

    /// Reads the rest of a closed channel, and ends it.
    fn finish(&mut self, index: usize, each: &mut impl FnMut(&Arc<Channel>, Batch<'_>)) -> usize {
        let mut n = 0;
        let bound = match self.lines.get(index) {
            // Another process that inherited the ring might write for ever.
            Some(Some(line)) => line.reader.position() + line.reader.size(),
            _ => return 0,
        };
        while let Some(Some(line)) = self.lines.get(index)
            && line.reader.position() < bound
            && line.channel.closed() != Some(Closed::Nonsense)
        {
            let taken = self.read(index, each);
            n += taken;
            if taken == 0 {
                break;
            }
        }
        self.closed.retain(|&i| i != index);
        let Some(line) = self.lines[index].take() else { return n };
        if line.watched {
            // The watched ones stand in front.
            let mut rest = [None; WATCHED];
            let kept = self.watched.iter().flatten().filter(|&&i| i != index);
            rest.iter_mut().zip(kept).for_each(|(place, &i)| *place = Some(i));
            self.watched = rest;
        }
        self.shared.give_back(&line.channel);
        let reason = line.channel.closed().unwrap_or(Closed::Local);
        self.events.push_back(Event::Closed(line.channel, reason));
        n
    }
}

impl Line {
    /// Tells whether there is work of which the peer might not tell again.
    fn has_work(&self) -> bool {
        self.reader.is_ready()
            || (self.reader.is_room_asked() && self.channel.is_established())
            || self.channel.is_answered()
    }

    /// Answers a writer that waits for room.
    #[inline]
    fn feed(&mut self) {
        if self.reader.is_room_asked() && self.channel.is_established() {
            self.reader.feed();
            self.channel.call();
        }
    }
}

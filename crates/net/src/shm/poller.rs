//! Reading: which of many rings have something, without looking into all of them.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;

use super::bells::{Listener, Rung, Spot};
use super::channel::{Channel, Closed};
use super::control::News;
use super::endpoint::{Shared, read_wakes};
use super::lane::{LaneReader, LaneWriter};
use super::layout::{BELLS, CELLS};
use super::manner::Manner;
use super::memory::Area;
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

/// Most ends of lanes that are looked at in each poll.
const HOT: usize = 32;
/// Looks at the lanes of a channel that ends, before what is left is given up. A look takes at least one cell of a lane, or waits
/// with the first for packets, once. Whoever writes on meanwhile is not heard for ever.
const LAST_LOOKS: usize = CELLS as usize + 1;
/// A lane whose bell rings twice among so many is worth a look in each poll.
const FREQUENT: u64 = 64;

/// A change of a channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// Both sides know each other.
    Established(Arc<Channel>),
    /// The peer has made room, after [`super::Sender::ask_for_room`].
    Room(Arc<Channel>),
    /// The peer has said what it does to packets from now on ([`Channel::peer_manner`]).
    Manner(Arc<Channel>),
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
    lanes: Lanes,
}

/// The ends of lanes that are looked at.
#[derive(Debug, Default)]
struct Lanes {
    /// The ends that are looked at in each poll.
    hot: Vec<Hot>,
    /// The place among these that is asked next to make room.
    hand: usize,
    /// Others that have something, or had.
    called: VecDeque<(usize, usize)>,
    /// Bells that were heard.
    bells: u64,
}

/// An end that is looked at in each poll.
#[derive(Debug)]
struct Hot {
    end: LaneEnd,
    id: LaneId,
    /// It had something since it was asked last.
    is_used: bool,
}

/// An end of a lane, at its spot of a channel.
#[derive(Debug)]
struct Lane {
    end: LaneEnd,
    /// The name that its owner has for it.
    tag: u32,
    /// The bell that rang last for it.
    bell: u64,
    /// It stands among those that are called.
    is_called: bool,
}

/// Names an end of a lane that has something.
#[derive(Clone, Copy, Debug)]
pub struct LaneId {
    line: usize,
    spot: usize,
    /// It is not looked at in each poll.
    was_called: bool,
    /// The name that its owner has for it.
    pub tag: u32,
}

/// A look at the lanes that is under way.
#[derive(Debug)]
pub struct LaneLook {
    hot: usize,
    called: usize,
}

#[derive(Clone, Debug)]
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
    /// The poll that heard its last bell.
    heard: u64,
    /// How often its end was put off, since lanes had something.
    put_off: usize,
    listener: Listener<Area>,
    /// The peer's manner, as far as was told.
    manner: Manner,
    /// The ends of lanes by their spots.
    lanes: Vec<Option<Lane>>,
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
            lanes: Lanes::default(),
        }
    }

    /// Reads a lane from now on that was opened by `channel`, and names it by `tag`.
    pub fn watch_lane(&mut self, channel: &Channel, lane: Arc<LaneReader>, tag: u32) {
        let spot = Spot::Cells(lane.index());
        self.add_lane(channel, spot, LaneEnd::Reader(lane), tag);
    }

    /// Cells or answers may have come before.
    fn add_lane(&mut self, channel: &Channel, spot: Spot, end: LaneEnd, tag: u32) {
        let (line, spot) = (channel.id.index, spot.number());
        self.cool(line, Some(spot));
        // News of a channel that has ended may come after the next one has its place.
        if let Some(Some(of_channel)) = self.lines.get_mut(line)
            && std::ptr::eq(&raw const *of_channel.channel, channel)
        {
            of_channel.lanes.resize_with(Spot::COUNT, || None);
            of_channel.lanes[spot] = Some(Lane { end, tag, bell: 0, is_called: false });
            of_channel.call((line, spot), &mut self.lanes.called);
        }
    }

    /// The peer has written nonsense to a lane: closes its channel.
    #[cold]
    pub fn break_lane(&mut self, id: LaneId) {
        if let Some(Some(line)) = self.lines.get(id.line) {
            line.channel.close(Closed::Nonsense);
            self.closed.push(id.line);
            self.rung |= OWN_DOORBELL;
        }
    }

    /// Forgets a lane, if nobody uses it any more.
    #[cold]
    pub fn forget_lane(&mut self, id: LaneId) {
        let Some(Some(line)) = self.lines.get_mut(id.line) else { return };
        let Some(place) = line.lanes.get_mut(id.spot) else { return };
        if place.as_ref().is_some_and(|lane| lane.end.is_over()) {
            *place = None;
            self.cool(id.line, Some(id.spot));
        }
    }

    /// Begins a look at the lanes.
    #[inline]
    pub fn look_at_lanes(&mut self) -> LaneLook {
        for place in 0..WATCHED {
            let Some(index) = self.watched[place] else { break };
            if self.lines.get(index).is_some_and(|line| line.as_ref().is_some_and(Line::is_called))
            {
                self.hear_bells(index);
            }
        }
        LaneLook { hot: 0, called: self.lanes.called.len() }
    }

    /// The next lane with a cell or an answer.
    #[inline]
    pub fn next_lane(&mut self, look: &mut LaneLook) -> Option<LaneId> {
        while let Some(hot) = self.lanes.hot.get_mut(look.hot) {
            look.hot += 1;
            if hot.end.has_news() {
                hot.is_used = true;
                return Some(hot.id);
            }
        }
        if look.called > 0 { self.next_called(look) } else { None }
    }

    fn next_called(&mut self, look: &mut LaneLook) -> Option<LaneId> {
        while look.called > 0 {
            look.called -= 1;
            let (index, spot) = self.lanes.called.pop_front()?;
            let Some(Some(line)) = self.lines.get_mut(index) else { continue };
            let Some(Some(lane)) = line.lanes.get_mut(spot) else { continue };
            lane.is_called = false;
            if lane.end.has_news() {
                let id = LaneId { line: index, spot, was_called: true, tag: lane.tag };
                let is_frequent =
                    self.lanes.bells.wrapping_sub(lane.bell) <= FREQUENT && lane.bell != 0;
                lane.bell = self.lanes.bells.max(1);
                if is_frequent {
                    self.heat(id);
                }
                return Some(id);
            }
        }
        None
    }

    /// A lane was served. It is called once more if it has something still, which no bell tells.
    #[inline]
    pub fn end_lane(&mut self, id: LaneId) {
        if id.was_called {
            let Some(Some(line)) = self.lines.get_mut(id.line) else { return };
            if line.lanes.get(id.spot).and_then(Option::as_ref).is_some_and(|l| l.end.has_news()) {
                line.call((id.line, id.spot), &mut self.lanes.called);
            }
        }
    }

    /// Looks at a lane in each poll from now on, if there is room, or one that was not used of late gives way.
    fn heat(&mut self, id: LaneId) {
        let Lanes { hot, hand, .. } = &mut self.lanes;
        if hot.iter().any(|hot| (hot.id.line, hot.id.spot) == (id.line, id.spot)) {
            return;
        }
        let id = LaneId { was_called: false, ..id };
        if hot.len() == HOT {
            *hand = (*hand + 1) % HOT;
            if std::mem::take(&mut hot[*hand].is_used) {
                return;
            }
            let LaneId { line, spot, .. } = hot[*hand].id;
            self.cool(line, Some(spot));
        }
        let Some(Some(line)) = self.lines.get(id.line) else { return };
        let Some(Some(lane)) = line.lanes.get(id.spot) else { return };
        line.listener.look_at(id.spot);
        self.lanes.hot.push(Hot { end: lane.end.clone(), id, is_used: true });
    }

    /// Whether lanes of a channel that ends have cells or answers, which are to be read first.
    fn puts_off(&mut self, index: usize) -> bool {
        let Some(Some(line)) = self.lines.get_mut(index) else { return false };
        if line.put_off == LAST_LOOKS || line.channel.closed() == Some(Closed::Nonsense) {
            return false;
        }
        line.put_off += 1;
        let spots: Vec<usize> = line.lanes_where(|end| end.has_news()).collect();
        spots.iter().for_each(|spot| line.call((index, *spot), &mut self.lanes.called));
        let puts_off = !spots.is_empty();
        if puts_off {
            self.closed.push(index);
            self.rung |= OWN_DOORBELL;
        }
        puts_off
    }

    /// Looks no more at a lane, or at all of a channel, without a bell.
    fn cool(&mut self, index: usize, spot: Option<usize>) {
        let Self { lines, lanes: Lanes { hot, called, .. }, .. } = self;
        hot.retain(|hot| {
            let is_it = hot.id.line == index && spot.is_none_or(|spot| spot == hot.id.spot);
            if is_it && let Some(Some(line)) = lines.get_mut(index) {
                line.listener.look_away(hot.id.spot);
                if hot.end.has_news() {
                    line.call((index, hot.id.spot), called);
                }
            }
            !is_it
        });
    }

    /// Hears the bells of a channel; whether any rang.
    fn hear_bells(&mut self, index: usize) -> bool {
        let Some(Some(line)) = self.lines.get_mut(index) else { return false };
        let Lanes { called, bells, .. } = &mut self.lanes;
        let (before, mut has_lost_some) = (*bells, false);
        // A peer that rings for ever waits for the next look.
        for _ in 0..BELLS {
            match line.listener.hear() {
                Some(Rung::Spot(spot)) => line.call((index, spot), called),
                Some(Rung::All) => has_lost_some = true,
                Some(Rung::Nonsense) => {
                    line.channel.close(Closed::Nonsense);
                    self.closed.push(index);
                    self.rung |= OWN_DOORBELL;
                    break;
                }
                None => break,
            }
            *bells += 1;
        }
        if has_lost_some {
            let spots: Vec<usize> = line.lanes_where(|_| true).collect();
            spots.into_iter().for_each(|spot| line.call((index, spot), called));
        }
        let is_any = *bells > before;
        if is_any {
            line.heard = self.polls;
        }
        is_any
    }

    /// Whether a ring has messages that were not read.
    #[must_use]
    pub fn has_messages(&self) -> bool {
        self.lines.iter().flatten().any(|line| line.reader.is_ready())
    }

    /// Whether bells rang for lanes that were not looked at since.
    #[inline]
    #[must_use]
    pub fn has_called_lanes(&self) -> bool {
        !self.lanes.called.is_empty()
    }

    /// Whether a lane has a cell or an answer, or may have.
    #[inline]
    fn have_lanes_news(&self) -> bool {
        !self.lanes.called.is_empty() || self.lanes.hot.iter().any(|hot| hot.end.has_news())
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
            let line = self.lines.get(index).and_then(Option::as_ref);
            line.is_some_and(|line| line.reader.is_ready() || line.is_called())
        };
        let is_due = polls.is_multiple_of(SWEEP_EVERY)
            || self.rung != 0
            || self.look_into_all
            || self.ears.is_rung()
            || !self.events.is_empty();
        if is_due
            || self.watched.iter().map_while(Option::as_ref).any(is_ready)
            || self.have_lanes_news()
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
            && !self.have_lanes_news()
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
                    let listener = channel.listener();
                    self.lines[index] = Some(Line {
                        channel,
                        reader,
                        watched: false,
                        last: 0,
                        heard: 0,
                        put_off: 0,
                        listener,
                        manner: Manner::default(),
                        lanes: Vec::new(),
                    });
                    // The peer may have sent before it could ring.
                    self.rung |= doorbell_of(index);
                }
                News::Answered(channel) => self.events.push_back(Event::Established(channel)),
                News::Lane(channel, lane, tag) => {
                    let spot = Spot::Answers(lane.index());
                    self.add_lane(&channel, spot, LaneEnd::Writer(lane), tag);
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
        let is_called = self.hear_bells(index);
        let Some(Some(line)) = self.lines.get_mut(index) else { return n };
        line.feed();
        if line.channel.take_answer() {
            self.events.push_back(Event::Room(Arc::clone(&line.channel)));
        }
        let manner = line.channel.peer_manner();
        if std::mem::replace(&mut line.manner, manner) != manner {
            self.events.push_back(Event::Manner(Arc::clone(&line.channel)));
        }
        if (n > 0 || is_called) && !line.watched {
            self.watch(index);
        }
        if let Some(Some(line)) = self.lines.get(index)
            && !line.watched
            && (line.reader.is_ready() || line.is_called())
        {
            self.rung |= doorbell_of(index);
        }
        n
    }

    /// Watches a ring from now on, if there is a place or a ring that has been quiet for long.
    fn watch(&mut self, index: usize) {
        let (polls, lines) = (self.polls, &mut self.lines);
        let is_cold = |line: &Option<Line>| {
            let since =
                |line: &Line| polls.wrapping_sub(line.last).min(polls.wrapping_sub(line.heard));
            line.as_ref().is_none_or(|line| since(line) > COLD_AFTER)
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
        if self.puts_off(index) {
            return n;
        }
        self.cool(index, None);
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
    /// The spots of its lanes whose ends are such.
    fn lanes_where(&self, is_such: impl Fn(&LaneEnd) -> bool) -> impl Iterator<Item = usize> {
        let all = self.lanes.iter().enumerate();
        all.filter_map(move |(spot, lane)| lane.as_ref().filter(|l| is_such(&l.end)).map(|_| spot))
    }

    /// Has a lane looked at, which is at a place of this line: once, however often it is called before.
    fn call(&mut self, (index, spot): (usize, usize), called: &mut VecDeque<(usize, usize)>) {
        if let Some(Some(lane)) = self.lanes.get_mut(spot)
            && !std::mem::replace(&mut lane.is_called, true)
        {
            called.push_back((index, spot));
        }
    }

    /// Whether a bell rang for a lane.
    #[inline]
    fn is_called(&self) -> bool {
        self.listener.is_rung()
    }

    /// Tells whether there is work of which the peer might not tell again.
    fn has_work(&self) -> bool {
        self.reader.is_ready()
            || self.is_called()
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

//! Paths: one for each receiving process of each address. The senders on a path share the receiver's socket buffer:
//! reliable queue pairs by window, unreliable ones by the credit of [`super::pace`].
//!
//! The window carries a limited number of queue pairs, each with a packet of the largest MTU. So a path has that many
//! *places*, and a reliable queue pair needs one for its new requests. It keeps its place until nothing of it is in
//! flight. Those that find no place wait in turn. While somebody waits, a holder sends [`TURN`] packets and then lets
//! its requests be answered.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use anyverbs_locks::{Mutex, RwLock, rank};
use anyverbs_objects::base::NEVER;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Psn, Qpn};

use super::pace::{Credit, Pace};

/// Unused paths are forgotten when there are more than this.
const MANY: usize = 4096;
/// A packet of the largest MTU with its overhead always fits.
const MIN_WINDOW: u32 = 4096 + 64;
/// PSNs for which a queue pair may keep its place while others wait.
const TURN: u32 = 32;
/// Timeouts without an answer after which a queue pair loses its place. Its peer may never answer.
const SILENCES: u8 = 2;

/// A path to another host, for all queue pairs that use it.
#[derive(Debug)]
pub struct Path {
    /// The bytes that may be in flight.
    whole: u32,
    /// Places that are taken.
    taken: AtomicU32,
    /// The length of `queue`.
    waiting: AtomicU32,
    /// Queue pairs without a place that have something to send.
    queue: Mutex<rank::PathQueue, VecDeque<Qpn>>,
    admitted: Arc<Admitted>,
    pace: Mutex<rank::PathPace, Pace>,
}

/// Queue pairs that got a place and have to be called.
#[derive(Debug, Default)]
struct Admitted {
    list: Mutex<rank::Admitted, VecDeque<(Arc<Path>, Qpn)>>,
    any: AtomicBool,
}

impl Path {
    /// `ours`: to a process of this host.
    fn new(ours: bool, whole: u32, admitted: Arc<Admitted>) -> Self {
        Self {
            whole,
            taken: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            queue: Mutex::default(),
            admitted,
            pace: Mutex::new(Pace::new(ours)),
        }
    }

    /// One queue pair's share of the window; `counted`: it has a place.
    pub fn window(&self, counted: bool) -> u32 {
        let sharers = self.taken.load(Ordering::Relaxed) + u32::from(!counted);
        (self.whole / sharers.max(1)).max(MIN_WINDOW)
    }

    fn take_place(&self) -> bool {
        let places = (self.whole / MIN_WINDOW).max(1);
        let one_more = |taken| (taken < places).then_some(taken + 1);
        self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).is_ok()
    }

    /// Gives a place back, which a queue pair had or did not want.
    pub fn release(self: &Arc<Self>) {
        self.taken.fetch_sub(1, Ordering::SeqCst);
        if self.is_awaited() {
            self.admit();
        }
    }

    fn is_awaited(&self) -> bool {
        self.waiting.load(Ordering::SeqCst) > 0
    }

    fn enqueue(&self, qpn: Qpn) {
        let mut queue = self.queue.lock();
        queue.push_back(qpn);
        self.waiting.store(queue.len() as u32, Ordering::SeqCst);
    }

    fn forget(&self, qpn: Qpn) {
        let mut queue = self.queue.lock();
        queue.retain(|waiting| *waiting != qpn);
        self.waiting.store(queue.len() as u32, Ordering::SeqCst);
    }

    /// Gives free places to those who wait longest.
    fn admit(self: &Arc<Self>) {
        let mut queue = self.queue.lock();
        while let Some(qpn) = queue.front().copied().filter(|_| self.take_place()) {
            queue.pop_front();
            self.admitted.list.lock().push_back((Arc::clone(self), qpn));
            self.admitted.any.store(true, Ordering::Release);
        }
        self.waiting.store(queue.len() as u32, Ordering::SeqCst);
    }

    /// Asks to send an unreliable packet; see [`Pace::ask`].
    pub(crate) fn ask(
        &self,
        len: usize,
        from: Qpn,
        to: Qpn,
        takes_recv: bool,
        now: Time,
    ) -> Credit {
        self.pace.lock().ask(len, from, to, takes_recv, now)
    }
}

/// A queue pair's part in the sharing of its path.
#[derive(Debug, Default)]
pub struct Turn {
    place: PathPlace,
    /// Requests before this PSN may leave. `None` before the first of a turn. It outlasts the place as long as requests
    /// are in flight, so that these may be repeated.
    end: Option<Psn>,
    /// Timeouts without an answer since the turn began, or was renewed.
    silences: u8,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum PathPlace {
    #[default]
    None,
    /// In the path's queue, or admitted and not called yet.
    Awaited,
    Held,
    /// Held, and to be given back for others when its requests are answered. It has more.
    Over,
    /// Given back because of silence. Its requests are still in flight.
    Lost,
}

impl Turn {
    /// Tells whether a request may leave. If not, the queue pair is called when it may.
    #[inline]
    pub fn may_send(&mut self, path: &Arc<Path>, qpn: Qpn, psn: Psn) -> bool {
        self.end.is_some_and(|end| psn.since(end) < 0) || self.may_begin(path, qpn, psn)
    }

    /// Whether the request at `psn` is the last that may leave: it has to ask for an ACK, which ends the turn.
    #[inline]
    #[must_use]
    pub fn ends_at(&self, psn: Psn) -> bool {
        self.end == Some(psn.plus(1))
    }

    /// How many requests from `psn` on may leave in this turn, and whether they end it. One [may](Self::may_send).
    #[inline]
    #[must_use]
    pub fn room(&self, psn: Psn, most: u32) -> (u32, bool) {
        let room = self.end.map_or(1, |end| end.since(psn).max(1) as u32);
        (most.min(room), most >= room && self.end.is_some())
    }

    fn may_begin(&mut self, path: &Arc<Path>, qpn: Qpn, psn: Psn) -> bool {
        match self.place {
            PathPlace::Awaited => return false,
            PathPlace::Held | PathPlace::Over if self.end.is_none() || !path.is_awaited() => {}
            PathPlace::Held | PathPlace::Over => {
                self.place = PathPlace::Over;
                return false;
            }
            PathPlace::None | PathPlace::Lost if path.is_awaited() || !path.take_place() => {
                self.place = PathPlace::Awaited;
                path.enqueue(qpn);
                // One may have become free meanwhile.
                path.admit();
                return false;
            }
            PathPlace::None | PathPlace::Lost => {}
        }
        self.silences = 0;
        self.place = PathPlace::Held;
        self.end = Some(psn.plus(TURN));
        true
    }

    /// It was admitted. False if it did not wait for that.
    pub fn begin(&mut self) -> bool {
        if self.place != PathPlace::Awaited {
            return false;
        }
        *self = Self { place: PathPlace::Held, ..Self::default() };
        true
    }

    /// A call into the queue pair ends.
    #[inline]
    pub fn settle(&mut self, path: &Arc<Path>, qpn: Qpn, in_flight: bool) {
        if !in_flight && self.place != PathPlace::None {
            self.rest(path, qpn);
        }
    }

    /// Nothing is in flight any more.
    fn rest(&mut self, path: &Arc<Path>, qpn: Qpn) {
        self.end = None;
        match self.place {
            PathPlace::None | PathPlace::Awaited => {}
            PathPlace::Lost => self.place = PathPlace::None,
            PathPlace::Held | PathPlace::Over => self.give_back(path, qpn, PathPlace::None),
        }
    }

    fn give_back(&mut self, path: &Arc<Path>, qpn: Qpn, place: PathPlace) {
        if self.place == PathPlace::Over {
            path.enqueue(qpn);
            self.place = PathPlace::Awaited;
        } else {
            self.place = place;
        }
        path.release();
    }

    /// The peer was silent for a timeout while requests were in flight.
    pub fn note_silence(&mut self, path: &Arc<Path>, qpn: Qpn) {
        if self.is_counted() {
            self.silences += 1;
            if self.silences >= SILENCES {
                self.give_back(path, qpn, PathPlace::Lost);
            }
        }
    }

    /// The queue pair leaves the path.
    pub fn leave(&mut self, path: &Arc<Path>, qpn: Qpn) {
        match std::mem::take(self).place {
            PathPlace::None | PathPlace::Lost => {}
            PathPlace::Awaited => path.forget(qpn),
            PathPlace::Held | PathPlace::Over => path.release(),
        }
    }

    /// Whether it has a place.
    pub fn is_counted(&self) -> bool {
        matches!(self.place, PathPlace::Held | PathPlace::Over)
    }
}

/// Address, scope of a link-local one, and slot of a receiving process.
type Key = (IpAddr, u32, u8);

/// All paths.
#[derive(Debug)]
pub struct Paths {
    paths: RwLock<rank::Paths, HashMap<Key, Arc<Path>>>,
    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    next: AtomicU64,
    /// Bytes that may be in flight on each.
    window: u32,
    admitted: Arc<Admitted>,
}

impl Paths {
    /// `window`: bytes that may be in flight on each path.
    #[must_use]
    pub fn new(window: u32) -> Self {
        let next = AtomicU64::new(NEVER);
        Self { paths: RwLock::default(), next, window, admitted: Arc::default() }
    }

    /// Whether a queue pair was admitted to its path.
    #[inline]
    pub fn any_admitted(&self) -> bool {
        self.admitted.any.load(Ordering::Acquire)
    }

    /// Takes a queue pair that was admitted. The caller calls it ([`Turn::begin`]), or releases its place.
    pub fn take_admitted(&self) -> Option<(Arc<Path>, Qpn)> {
        let mut list = self.admitted.list.lock();
        let first = list.pop_front();
        self.admitted.any.store(!list.is_empty(), Ordering::Release);
        first
    }

    /// The path to the process `slot` at an address; `ours`: of this host.
    pub(crate) fn path(&self, ip: IpAddr, scope_id: u32, slot: u8, ours: bool) -> Arc<Path> {
        let key = (ip, scope_id, slot);
        if let Some(path) = self.paths.read().get(&key) {
            return Arc::clone(path);
        }
        let mut paths = self.paths.write();
        if paths.len() > MANY {
            paths.retain(|_, path| Arc::strong_count(path) > 1);
        }
        let path = || Arc::new(Path::new(ours, self.window, Arc::clone(&self.admitted)));
        Arc::clone(paths.entry(key).or_insert_with(path))
    }

    /// An answer came from `ip`, about its queue pair `receiver`.
    pub fn echo(&self, ip: IpAddr, receiver: Qpn, bytes: u64, limit: u64, resume: &mut Vec<Qpn>) {
        for ((path_ip, _, slot), path) in self.paths.read().iter() {
            if (*path_ip, *slot) == (ip, receiver.slot()) {
                path.pace.lock().echo(bytes, receiver, limit, resume);
            }
        }
    }

    /// Somebody waits until `at`.
    pub(crate) fn wait_until(&self, at: Time) {
        self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
    }

    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    pub fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    /// Lets queue pairs that have waited long enough ask again.
    pub fn expire(&self, now: Time, resume: &mut Vec<Qpn>) {
        if now.as_nanos() < self.next() {
            return;
        }
        self.next.store(NEVER, Ordering::SeqCst);
        for path in self.paths.read().values() {
            if let Some(at) = path.pace.lock().expire(now, resume) {
                self.next.fetch_min(at.as_nanos(), Ordering::SeqCst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: u32 = 128 << 10;
    const PLACES: u32 = WINDOW / MIN_WINDOW;

    struct Sharing {
        paths: Paths,
        path: Arc<Path>,
        turns: Vec<Turn>,
    }

    impl Sharing {
        /// A path with these queue pairs.
        fn of(qps: u32) -> Self {
            let paths = Paths::new(WINDOW);
            let path = paths.path([10, 0, 0, 1].into(), 0, 1, false);
            Self { paths, path, turns: (0..qps).map(|_| Turn::default()).collect() }
        }

        fn may_send(&mut self, n: u32, psn: u32) -> bool {
            self.turns[n as usize].may_send(&self.path, Qpn::new(n), Psn::new(psn))
        }

        fn settle(&mut self, n: u32, in_flight: bool) {
            self.turns[n as usize].settle(&self.path, Qpn::new(n), in_flight);
        }

        /// Queue pairs that are called, in turn.
        fn called(&mut self) -> Vec<u32> {
            std::iter::from_fn(|| self.paths.take_admitted())
                .map(|(path, qpn)| {
                    assert!(Arc::ptr_eq(&path, &self.path));
                    qpn.get()
                })
                .collect()
        }

        /// All places are taken, and the others wait.
        fn full(qps: u32) -> Self {
            let mut sharing = Self::of(qps);
            for n in 0..qps {
                assert_eq!(sharing.may_send(n, 0), n < PLACES);
                sharing.settle(n, n < PLACES);
            }
            assert!(!sharing.paths.any_admitted());
            sharing
        }
    }

    #[test]
    fn the_window_is_shared_and_never_less_than_a_packet() {
        let mut sharing = Sharing::of(1000);
        assert_eq!(sharing.path.window(false), WINDOW);
        assert!(sharing.may_send(0, 7));
        assert_eq!(sharing.path.window(true), WINDOW);
        assert_eq!(sharing.path.window(false), WINDOW / 2);
        for n in 1..1000 {
            sharing.may_send(n, 7);
        }
        assert_eq!(sharing.path.taken.load(Ordering::Relaxed), PLACES);
        assert!((MIN_WINDOW..MIN_WINDOW + 200).contains(&sharing.path.window(true)));
    }

    #[test]
    fn who_waits_longest_gets_the_next_place() {
        let mut sharing = Sharing::full(PLACES + 3);
        sharing.settle(5, false);
        assert_eq!(sharing.called(), [PLACES]);
        // Another one does not overtake those who wait.
        assert!(!sharing.may_send(5, 1));
        sharing.settle(6, false);
        sharing.settle(7, false);
        sharing.settle(8, false);
        assert_eq!(sharing.called(), [PLACES + 1, PLACES + 2, 5]);
        assert!(sharing.turns[5].begin());
        assert!(sharing.may_send(5, 1));
        sharing.settle(5, true);
        sharing.settle(9, false);
        assert!(sharing.may_send(6, 1), "nobody waits");
        assert!(!sharing.may_send(7, 1), "none is free");
    }

    #[test]
    fn a_holder_gives_way_only_to_those_who_wait() {
        let mut sharing = Sharing::of(PLACES + 1);
        for n in 0..PLACES {
            assert!((0..10 * TURN).all(|psn| sharing.may_send(n, psn)));
            sharing.settle(n, true);
        }
        assert!(!sharing.may_send(PLACES, 0));
        assert!(!sharing.may_send(0, 10 * TURN));
        assert!(sharing.may_send(0, 10 * TURN - 1), "what was sent may be repeated");
        sharing.settle(0, true);
        assert_eq!(sharing.called(), []);
        sharing.settle(0, false);
        assert_eq!(sharing.called(), [PLACES]);
        // It has more to send, and was not forgotten.
        sharing.settle(1, false);
        assert_eq!(sharing.called(), [0]);
        assert!(sharing.turns[0].begin());
        assert!(sharing.may_send(0, 10 * TURN));
    }

    #[test]
    fn requests_in_a_row_end_with_the_turn() {
        let mut sharing = Sharing::of(1);
        assert!(sharing.may_send(0, 10));
        let turn = &sharing.turns[0];
        for (psn, most) in [(10, 64), (10, TURN), (10, 2 * TURN), (10 + TURN - 1, 64)] {
            let (n, ends) = turn.room(Psn::new(psn), most);
            assert!((1..=most).contains(&n));
            let last = Psn::new(psn + n - 1);
            assert_eq!(ends, turn.ends_at(last));
            assert!(ends || n == most, "as many as may leave");
            assert!((psn..psn + n - 1).all(|psn| !turn.ends_at(Psn::new(psn))));
        }
    }

    #[test]
    fn leaving_gives_place_or_turn_to_the_next() {
        let mut sharing = Sharing::full(PLACES + 3);
        for n in [PLACES, 0] {
            let path = Arc::clone(&sharing.path);
            sharing.turns[n as usize].leave(&path, Qpn::new(n));
        }
        assert_eq!(sharing.called(), [PLACES + 1]);
        // That one has left when it is called.
        sharing.turns[PLACES as usize + 1] = Turn::default();
        assert!(!sharing.turns[PLACES as usize + 1].begin());
        sharing.path.release();
        assert_eq!(sharing.called(), [PLACES + 2]);
        assert_eq!(sharing.path.waiting.load(Ordering::Relaxed), 0);
        assert_eq!(sharing.path.taken.load(Ordering::Relaxed), PLACES);
    }

    #[test]
    fn a_silent_one_loses_its_place_and_may_repeat() {
        let mut sharing = Sharing::full(PLACES + 1);
        let path = Arc::clone(&sharing.path);
        for _ in 0..SILENCES {
            assert_eq!(sharing.called(), []);
            sharing.turns[0].note_silence(&path, Qpn::new(0));
        }
        assert_eq!(sharing.called(), [PLACES]);
        assert!(sharing.may_send(0, TURN - 1));
        assert!(!sharing.may_send(0, TURN));
        sharing.settle(0, true);
        sharing.settle(1, false);
        assert_eq!(sharing.called(), [0]);
    }
}

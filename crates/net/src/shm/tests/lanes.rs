//! Lanes of a channel: who is looked at, called and woken.

use super::*;

/// Lanes between two parties, of which most are not looked at in each poll.
struct ManyLanes {
    a: Party,
    b: Party,
    from_a: Arc<Channel>,
    to_b: Vec<Arc<LaneWriter>>,
    at_b: Vec<Arc<LaneReader>>,
    /// Cells that were read of each.
    read: Vec<u64>,
}

impl ManyLanes {
    fn open(lanes: usize) -> Self {
        let registry = registry();
        let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
        let from_a = a.endpoint.connect(2).unwrap();
        until([&mut a, &mut b], |_| from_a.is_established());
        // The same channel, from its other side.
        let at_b_side = b.endpoint.connect(1).unwrap();
        let (mut to_b, mut at_b) = (Vec::new(), Vec::new());
        for tag in 0..lanes {
            let writer = from_a.open_lane().unwrap();
            let reader =
                at_b_side.accept_lane(writer.index(), writer.next()).map(Arc::new).unwrap();
            a.endpoint.watch_lane(&from_a, &writer, tag as u32);
            b.poller.watch_lane(&at_b_side, Arc::clone(&reader), tag as u32);
            at_b_side.tell(Spot::Answers(writer.index()));
            to_b.push(writer);
            at_b.push(reader);
        }
        Self { a, b, from_a, to_b, at_b, read: vec![0; lanes] }
    }

    fn show(&self, lane: usize) {
        self.to_b[lane].show(0, 0);
        self.from_a.tell(Spot::Cells(self.to_b[lane].index()));
    }

    /// The lanes of `b` that have something; reads up to `most` cells of each.
    fn read(&mut self, most: usize) -> Vec<u32> {
        let mut found = Vec::new();
        let mut look = self.b.poller.look_at_lanes();
        while let Some(id) = self.b.poller.next_lane(&mut look) {
            let reader = &self.at_b[id.tag as usize];
            for _ in 0..most {
                if reader.peek().is_some() {
                    reader.take();
                    self.read[id.tag as usize] += 1;
                }
            }
            reader.answer(None);
            self.b.poller.end_lane(id);
            found.push(id.tag);
        }
        self.b.turn();
        found
    }

    /// The lanes of `a` that have answers, which it takes.
    fn take_answers(&mut self) -> usize {
        let mut n = 0;
        let mut look = self.a.poller.look_at_lanes();
        while let Some(id) = self.a.poller.next_lane(&mut look) {
            n += usize::from(self.to_b[id.tag as usize].take_answer().is_some());
            self.a.poller.end_lane(id);
        }
        self.a.turn();
        n
    }
}

#[test]
fn cells_of_all_lanes_are_found_whoever_is_busy() {
    let mut lanes = ManyLanes::open(100);
    let mut shown = vec![0; 100];
    let mut state = 1_u64;
    for round in 0..20_000_u64 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Now many lanes are busy, now few.
        let lane = (state >> 33) as usize % if round / 2000 % 2 == 0 { 100 } else { 5 };
        lanes.take_answers();
        if lanes.to_b[lane].has_room() {
            lanes.show(lane);
            shown[lane] += 1;
        }
        if round % 7 == 0 {
            lanes.read((state >> 20) as usize % 3 + 1);
        }
    }
    let deadline = Instant::now() + TIME_LIMIT;
    while lanes.read != shown {
        assert!(Instant::now() < deadline, "{:?} {shown:?}", lanes.read);
        lanes.read(1);
    }
    assert!(shown.iter().all(|&n| n > 50), "{shown:?}");
    assert_eq!(lanes.read(1), []);
    assert!(lanes.b.poller.arm() && lanes.b.poller.is_armed());
}

#[test]
fn a_sleeper_is_woken_by_a_lane_at_which_it_does_not_look() {
    let mut lanes = ManyLanes::open(100);
    while !lanes.read(1).is_empty() || !lanes.b.poller.arm() {
        lanes.b.poller.disarm();
    }
    let wake = lanes.b.endpoint.wake_fd().as_fd().try_clone_to_owned().unwrap();
    let is_woken = || {
        let mut fds = [rustix::event::PollFd::new(&wake, rustix::event::PollFlags::IN)];
        rustix::event::poll(&mut fds, Some(&rustix::time::Timespec { tv_sec: 0, tv_nsec: 0 }))
            .unwrap()
            == 1
    };
    assert!(!is_woken());
    lanes.show(99);
    assert!(is_woken());
    lanes.b.poller.disarm();
    let deadline = Instant::now() + TIME_LIMIT;
    while lanes.read[99] == 0 {
        assert!(Instant::now() < deadline);
        lanes.read(1);
    }
}

#[test]
fn a_peer_that_rings_for_all_spots_at_once_costs_one_look() {
    let mut lanes = ManyLanes::open(3);
    // More bells than are noted.
    for _ in 0..2000 {
        lanes.from_a.tell(Spot::Cells(lanes.to_b[0].index()));
        lanes.from_a.tell(Spot::Answers(70));
    }
    lanes.show(2);
    let deadline = Instant::now() + TIME_LIMIT;
    while lanes.read[2] == 0 {
        assert!(Instant::now() < deadline);
        lanes.read(1);
    }
    assert_eq!(lanes.read, [0, 0, 1]);
}

/// Cells may have to wait for a packet of the ring, while bells ring on.
#[test]
fn a_lane_that_waits_is_looked_at_once_however_often_it_is_called() {
    let mut lanes = ManyLanes::open(100);
    (0..100).for_each(|lane| lanes.show(lane));
    for round in 0..50 {
        for _ in 0..2 * layout::BELLS {
            lanes.from_a.tell(Spot::Cells(lanes.to_b[round].index()));
        }
        let mut found = lanes.read(0);
        let looks = found.len();
        found.sort_unstable();
        found.dedup();
        assert_eq!(looks, found.len(), "round {round}");
    }
}

#[test]
fn cells_are_read_after_their_writer_has_ended() {
    for lane in [0, 99] {
        let mut lanes = ManyLanes::open(100);
        while !lanes.read(1).is_empty() {}
        for _ in 0..100 {
            lanes.show(lane);
        }
        let other = Party::new(&registry(), 3);
        drop(std::mem::replace(&mut lanes.a, other));
        lanes.from_a.call();
        let deadline = Instant::now() + TIME_LIMIT;
        while lanes.b.take_closed().is_none() {
            assert!(Instant::now() < deadline);
            lanes.read(50);
        }
        assert_eq!(lanes.read[lane], 100, "lane {lane}");
    }
}

#[test]
fn a_bell_for_no_spot_closes_the_channel() {
    let mut lanes = ManyLanes::open(2);
    while !lanes.read(1).is_empty() {}
    let place = layout::bells(Config::default().ring);
    let own = lanes.from_a.own();
    for n in 0..layout::BELLS {
        let word = own.load(place.bells + 8 * n, Ordering::Relaxed);
        own.store(place.bells + 8 * n, word | 0xffff, Ordering::Relaxed);
    }
    for _ in 0..layout::BELLS {
        lanes.from_a.tell(Spot::Cells(0));
    }
    let number = 3 * layout::BELLS as u64;
    for n in 0..layout::BELLS as u64 {
        own.store(
            place.bells + 8 * n as usize,
            (number + n) << 32 | 1 << 31 | 0xffff,
            Ordering::Relaxed,
        );
    }
    lanes.from_a.call();
    until([&mut lanes.b], |[b]| b.take_closed() == Some((1, Closed::Nonsense)));
}

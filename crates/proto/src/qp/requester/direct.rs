//! WRITEs and READs that the device does by itself, without a message ([`Env::direct`]).
//!
//! A queue pair may do so only when everything before was executed. A program that keeps its queue full never reaches
//! that point once messages are in flight. So the queue pair comes to rest after some WRITEs and READs in a row that
//! went as messages, if the link says that it is worth it ([`Env::worth_of_rest`]). The next operation waits until all
//! messages are answered. If it is then done without a message, so are those behind it. If it has to be a message all
//! the same, the queue pair rests again after twice as many messages.
//!
//! Where the link does not know the faster way, the queue pair tries it. Some operations that are done without messages
//! are compared with the messages before them. Messages also take time of the peer's processor. So the stream goes on
//! with them only if they were well faster. Else it goes on without messages, until the next trial.

use std::time::Duration;

use crate::direct::{Direct, Direction, Local, MAX_DIRECT, Worth};
use crate::env::Env;
use crate::time::Time;
use crate::wc::WcStatus;
use crate::wr::{SendFlags, SendOp};

use super::super::Qp;
use super::super::attr::QpState;
use super::super::send_queue::PACKET_COST;

/// WRITEs and READs that go as messages before the queue pair comes to rest: at first, and at most.
const FIRST_REST: u32 = 16;
const LAST_REST: u32 = 4096;
/// The shortest row that is compared with a trial, and where in a row its time begins.
const FIRST_TRIAL: u32 = 64;
const TIMED_FROM: u32 = 16;
/// Work without messages before the timed part of a trial, since at first the peer's processor has the data in its
/// cache; the timed work of a trial; and the fewest operations of a trial. The first two count bytes and cost of
/// packets.
const WARM_UP: u64 = 1024 * 1024;
const TRIAL: u64 = 1024 * 1024;
const TRIED_AT_LEAST: u32 = 4;
/// Work without messages before messages are tried again: its cost, and its number of operations.
const TRIED_AGAIN: u64 = 256 * 1024 * 1024;
const TRIED_AGAIN_AFTER: u32 = 32 * FIRST_TRIAL;
/// Messages in a row that begin with nothing unanswered where messages are faster, before the stream counts as ended.
const PAUSES: u32 = 16;

/// The way of the WQE `next`.
pub(super) enum Way {
    /// It was done.
    Done,
    /// It has to be a message.
    Message,
    /// It may be done as soon as everything before it is answered.
    Wait,
}

/// When the queue pair comes to rest.
#[derive(Debug)]
pub(super) struct Rest {
    /// Messages in a row that might have been done without.
    row: u32,
    /// Length of the row after which the queue pair rests.
    after: u32,
    /// Kind of the last operation.
    kind: Kind,
    /// The row began with another kind.
    is_mixed: bool,
    /// The time at which the row began.
    began: Mark,
    trial: Trial,
}

/// Operations of like kinds can be compared.
#[derive(Clone, Copy, Debug)]
struct Kind {
    direction: Direction,
    /// The logarithm of the length.
    log: u32,
}

impl Kind {
    fn is_like(self, other: Self) -> bool {
        self.direction == other.direction && self.log.abs_diff(other.log) <= 1
    }
}

/// A point in time, and the cost that was answered by then.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    at: Time,
    /// Cost of all that was answered.
    answered: u64,
}

/// The comparison of the two ways: its state or its result.
#[derive(Clone, Copy, Debug)]
enum Trial {
    None,
    /// It begins as soon as the queue pair has come to rest.
    Next,
    Goes {
        /// Speed of the messages before it.
        messages: Speed,
        /// When its time began.
        since: Option<Time>,
        /// Cost and number of the operations done since then, or since the trial began if the time has not begun.
        cost: u64,
        done: u32,
    },
    /// Messages were not much faster. Counts the cost and number of operations without messages since then.
    Won {
        cost: u64,
        done: u32,
    },
    /// Messages were faster. Counts how many more of them may begin while all others are answered.
    Lost {
        pauses: u32,
    },
}

/// A cost and the time that it took.
#[derive(Clone, Copy, Debug)]
struct Speed {
    cost: u64,
    time: Duration,
}

impl Speed {
    /// Tells whether it is faster by more than an eighth.
    fn is_well_above(self, other: Self) -> bool {
        let product = |cost: u64, time: Duration| u128::from(cost) * time.as_nanos();
        8 * product(self.cost, other.time) > 9 * product(other.cost, self.time)
    }
}

impl Default for Rest {
    fn default() -> Self {
        Self {
            row: 0,
            after: FIRST_REST,
            kind: Kind { direction: Direction::Write, log: 0 },
            is_mixed: false,
            began: Mark::default(),
            trial: Trial::None,
        }
    }
}

impl Rest {
    /// Something that is a message in any case comes next.
    #[inline]
    pub(super) fn interrupt(&mut self) {
        self.row = 0;
        self.trial = Trial::None;
    }

    /// An operation that might be done without a message comes next.
    #[inline]
    fn see(&mut self, direction: Direction, len: u32) {
        let kind = Kind { direction, log: len.ilog2() };
        if !kind.is_like(self.kind) {
            (self.kind, self.is_mixed, self.trial) = (kind, true, Trial::None);
        }
    }

    /// A message begins that might have been done without, if all answers were there. Tells whether it waits for them.
    fn begins(&mut self, mark: impl FnOnce() -> Mark) -> bool {
        self.trial = match self.trial {
            Trial::Lost { .. } => Trial::Lost { pauses: PAUSES },
            _ => Trial::None,
        };
        if self.row == 0 {
            self.is_mixed = false;
        }
        if self.row < self.after {
            self.row += 1;
            if self.row == TIMED_FROM && self.after >= FIRST_TRIAL {
                self.began = mark();
            }
        }
        self.row == self.after
    }

    /// Tells whether the queue pair should wait.
    fn is_worth(&mut self, worth: Worth) -> bool {
        match worth {
            Worth::Nothing => false,
            // A few messages do not tell how fast they are, nor those of other kinds.
            Worth::Perhaps if self.after < FIRST_TRIAL || self.is_mixed => false,
            Worth::Perhaps => {
                self.trial = Trial::Next;
                true
            }
            Worth::Much => true,
        }
    }

    /// Tells whether the next operation had better be a message, although everything is answered.
    #[inline]
    fn prefers_message(&mut self, mark: impl FnOnce() -> Mark) -> bool {
        !matches!(self.trial, Trial::None) && self.judges(mark)
    }

    fn judges(&mut self, mark: impl FnOnce() -> Mark) -> bool {
        match &mut self.trial {
            Trial::Next => {
                let now = mark();
                let cost = now.answered.wrapping_sub(self.began.answered);
                let messages = Speed { cost, time: now.at.since(self.began.at) };
                self.trial = Trial::Goes { messages, since: None, cost: 0, done: 0 };
                false
            }
            Trial::Goes { done, .. } if *done < TRIED_AT_LEAST => false,
            Trial::Goes { since: since @ None, cost, done, .. } if *cost >= WARM_UP => {
                (*since, *cost, *done) = (Some(mark().at), 0, 0);
                false
            }
            Trial::Goes { messages, since: Some(since), cost, .. } if *cost >= TRIAL => {
                let direct = Speed { cost: *cost, time: mark().at.since(*since) };
                let is_lost = messages.is_well_above(direct);
                if is_lost {
                    self.refused();
                    self.trial = Trial::Lost { pauses: PAUSES };
                } else {
                    self.trial = Trial::Won { cost: 0, done: 0 };
                }
                is_lost
            }
            Trial::Won { cost, done } if *cost >= TRIED_AGAIN && *done >= TRIED_AGAIN_AFTER => {
                (self.row, self.after, self.trial) = (0, FIRST_TRIAL, Trial::None);
                true
            }
            Trial::Lost { pauses: 0 } => {
                self.trial = Trial::None;
                false
            }
            Trial::Lost { pauses } => {
                *pauses -= 1;
                true
            }
            _ => false,
        }
    }

    #[inline]
    fn done(&mut self, its_cost: impl FnOnce() -> u64) {
        match &mut self.trial {
            Trial::Goes { cost, done, .. } | Trial::Won { cost, done } => {
                *cost += its_cost();
                *done = done.saturating_add(1);
            }
            _ => (self.row, self.after) = (0, FIRST_REST),
        }
    }

    /// The operation had to be a message, although everything was answered.
    fn refused(&mut self) {
        if self.row == self.after {
            self.after = (self.after * 2).min(LAST_REST);
        }
        self.row = 0;
        self.trial = Trial::None;
    }
}

impl Qp {
    /// Has the device do the WQE `next` without a message, where that keeps the order: everything before it was
    /// executed. It takes no PSNs. A faulty WQE goes the ordinary way, where the fault is found.
    pub(super) fn send_direct<E: Env>(&mut self, env: &mut E) -> Way {
        let position = self.sq.next;
        let sqe = self.sq.at(position);
        let (direction, remote) = match sqe.op {
            SendOp::Write(remote) => (Direction::Write, remote),
            SendOp::Read(remote) => (Direction::Read, remote),
            _ => {
                self.requester.rest.interrupt();
                return Way::Message;
            }
        };
        if self.attr.state != QpState::Rts
            || self.is_paced()
            || !(1..=MAX_DIRECT).contains(&sqe.len)
            || (direction == Direction::Read && self.attr.max_rd_atomic == 0)
        {
            self.requester.rest.interrupt();
            return Way::Message;
        }
        self.requester.rest.see(direction, sqe.len);
        let reliable = self.init.qp_type.is_reliable();
        if reliable && self.requester.una != self.requester.fresh_psn {
            let answered = self.requester.una_cost;
            if !self.requester.rest.begins(|| Mark { at: env.clock(), answered }) {
                return Way::Message;
            }
            let worth = env.worth_of_rest(self.attr.dest_qpn, direction, remote, sqe.len);
            if self.requester.rest.is_worth(worth) {
                return Way::Wait;
            }
            self.requester.rest.refused();
            return Way::Message;
        }
        // Without answers it is unknown when the peer has executed the packets.
        let in_order = reliable || self.requester.fresh_cost == 0;
        if !in_order || self.sq.done != position {
            return Way::Message;
        }
        let answered = self.requester.una_cost;
        if self.requester.rest.prefers_message(|| Mark { at: env.clock(), answered }) {
            return Way::Message;
        }
        let len = sqe.len;
        let inline = sqe.flags.contains(SendFlags::INLINE);
        let operation = Direct {
            dest_qpn: self.attr.dest_qpn,
            direction,
            remote,
            len: sqe.len,
            local: if inline {
                Local::Inline(self.sq.inline(position))
            } else {
                Local::Sges(self.sq.sges(position))
            },
            pd: self.init.pd,
        };
        if !env.direct(&operation) {
            self.requester.rest.refused();
            return Way::Message;
        }
        let packets = self.packets(len);
        self.requester.rest.done(|| u64::from(len) + u64::from(packets) * PACKET_COST);
        let next = position.wrapping_add(1);
        (self.sq.next, self.sq.started) = (next, next);
        self.complete_oldest(WcStatus::Success, env);
        Way::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages in a row until it rests.
    fn row(rest: &mut Rest) -> u32 {
        (1..).find(|_| rest.begins(Mark::default)).expect("it rests some time")
    }

    #[test]
    fn refused_operations_rest_less_often() {
        let mut rest = Rest::default();
        for expected in [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096] {
            assert_eq!(row(&mut rest), expected);
            assert!(rest.is_worth(Worth::Much), "it waits for all answers");
            assert!(rest.begins(Mark::default), "and goes on waiting");
            assert!(!rest.prefers_message(Mark::default));
            rest.refused();
        }
        rest.refused();
        assert_eq!(row(&mut rest), 4096, "a refusal without a rest changes nothing");
        rest.done(|| 1);
        assert_eq!(row(&mut rest), FIRST_REST);
    }

    #[test]
    fn others_between_them_keep_it_from_resting() {
        let mut rest = Rest::default();
        for _ in 0..100 {
            assert!((1..FIRST_REST).all(|_| !rest.begins(Mark::default)));
            rest.interrupt();
        }
    }

    /// A stream in which a message takes `message` ns, and an operation without one `direct`. Each costs `COST`.
    struct Stream {
        rest: Rest,
        now: u64,
        answered: u64,
        message: u64,
        direct: u64,
    }

    const COST: u64 = TRIAL / 8;
    /// The number of operations in a trial.
    const TRIED: u32 = ((WARM_UP + TRIAL) / COST) as u32;

    impl Stream {
        fn new(message: u64, direct: u64) -> Self {
            Self { rest: Rest::default(), now: 77, answered: u64::MAX - COST, message, direct }
        }

        fn mark(&self) -> impl Fn() -> Mark + use<> {
            let mark = Mark { at: Time::from_nanos(self.now), answered: self.answered };
            move || mark
        }

        /// Messages up to a trial.
        fn messages(&mut self) -> u32 {
            for n in 1.. {
                let mark = self.mark();
                if self.rest.begins(&mark) {
                    if self.rest.is_worth(Worth::Perhaps) {
                        return n;
                    }
                    self.rest.refused();
                }
                self.now += self.message;
                self.answered = self.answered.wrapping_add(COST);
            }
            unreachable!()
        }

        /// Does operations without messages, up to `most` or until a message is preferred. Gives their number.
        fn directs(&mut self, most: u32) -> u32 {
            for n in 0..most {
                let mark = self.mark();
                if self.rest.prefers_message(&mark) {
                    return n;
                }
                self.now += self.direct;
                self.rest.done(|| COST);
            }
            most
        }
    }

    #[test]
    fn the_faster_way_is_found_by_trial() {
        let mut stream = Stream::new(1000, 900);
        assert_eq!(stream.messages(), 16 + 32 + 64, "not before a row tells something");
        assert_eq!(stream.directs(1000), 1000, "without messages it goes on");
        let mut stream = Stream::new(1000, 1200);
        stream.messages();
        assert_eq!(stream.directs(1000), TRIED, "with messages it goes on");
        assert_eq!(stream.messages(), 128);
        assert_eq!(stream.directs(1000), TRIED);
        for (message, expected) in [(800, 1000), (799, TRIED)] {
            let mut stream = Stream::new(message, 900);
            stream.messages();
            assert_eq!(stream.directs(1000), expected, "{message}");
        }
    }

    #[test]
    fn the_first_without_messages_are_not_timed() {
        let mut stream = Stream::new(1000, 3000);
        stream.messages();
        let warm_up = (WARM_UP / COST) as u32;
        assert_eq!(stream.directs(warm_up), warm_up);
        stream.direct = 1000;
        assert_eq!(stream.directs(1000), 1000);
    }

    #[test]
    fn a_trial_has_some_long_operations() {
        let mut stream = Stream::new(1, 0);
        stream.messages();
        for _ in 0..2 * TRIED_AT_LEAST {
            assert!(!stream.rest.prefers_message(stream.mark()));
            stream.rest.done(|| WARM_UP + TRIAL);
            stream.now += 1_000_000_000;
        }
        assert!(stream.rest.prefers_message(stream.mark()));
    }

    #[test]
    fn messages_are_not_tried_again_for_a_few_long_operations() {
        let mut stream = Stream::new(1000, 900);
        stream.messages();
        assert_eq!(stream.directs(TRIED + 1), TRIED + 1);
        for _ in 1..TRIED_AGAIN_AFTER {
            assert!(!stream.rest.prefers_message(stream.mark()));
            stream.rest.done(|| TRIED_AGAIN);
        }
        assert!(stream.rest.prefers_message(stream.mark()));
    }

    #[test]
    fn the_faster_way_is_tried_again() {
        let mut stream = Stream::new(1000, 900);
        stream.messages();
        let again = TRIED + (TRIED_AGAIN / COST) as u32;
        assert_eq!(stream.directs(again + 1), again, "then one is a message");
        stream.message = 700;
        assert_eq!(stream.messages(), FIRST_TRIAL);
        assert_eq!(stream.directs(1000), TRIED, "messages have become faster");
        assert_eq!(stream.messages(), 128);
        stream.direct = 600;
        assert_eq!(stream.directs(1000), 1000, "and slower again");
    }

    #[test]
    fn a_stream_of_messages_may_pause() {
        let mut stream = Stream::new(1000, 1200);
        stream.messages();
        stream.directs(1000);
        for _ in 0..3 {
            for _ in 0..PAUSES {
                assert_eq!(stream.directs(1), 0, "it goes on with a message");
            }
            assert!(!stream.rest.begins(stream.mark()));
        }
        for _ in 0..PAUSES {
            assert_eq!(stream.directs(1), 0);
        }
        assert_eq!(stream.directs(1000), 1000, "there is no stream any more");
    }

    #[test]
    fn only_like_is_compared_with_like() {
        let (write, read) = (Direction::Write, Direction::Read);
        let stream = || {
            let mut stream = Stream::new(1000, 1200);
            stream.rest.see(write, 65536);
            stream.messages();
            stream
        };
        for (direction, len, like) in [
            (write, 65535, true),
            (write, 131_072, true),
            (write, 262_144, false),
            (read, 65536, false),
        ] {
            // Within a trial.
            let mut stream = stream();
            assert_eq!(stream.directs(4), 4);
            stream.rest.see(direction, len);
            assert_eq!(
                stream.directs(1000),
                if like { TRIED - 4 } else { 1000 },
                "{direction:?} {len}"
            );
            // In the row before a trial.
            let mut rest = Rest { after: FIRST_TRIAL, ..Rest::default() };
            for n in 0..FIRST_TRIAL {
                rest.see(write, if n == 0 { 65536 } else { 65000 });
                if n == 40 {
                    rest.see(direction, len);
                    rest.see(write, 65536);
                }
                rest.begins(Mark::default);
            }
            assert_eq!(rest.is_worth(Worth::Perhaps), like, "{direction:?} {len}");
            assert!(rest.is_worth(Worth::Much));
        }
    }

    #[test]
    fn a_trial_ends_with_a_message_of_another_kind() {
        let mut stream = Stream::new(1000, 1200);
        stream.messages();
        assert_eq!(stream.directs(4), 4);
        stream.rest.interrupt();
        assert_eq!(stream.directs(1000), 1000, "nothing is judged that was not tried");
    }
}

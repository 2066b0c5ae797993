//! WRITEs and READs that the device does by itself, without a message ([`Env::direct`]).
//!
//! That keeps the order only when everything before was executed, and a program that keeps its queue full never comes to
//! that point once messages are in flight: the first of a stream, or those before it. So after some WRITEs and READs in a
//! row that went as messages the queue pair comes to rest, if the link says that it is worth it
//! ([`Env::worth_of_rest`]): the next one waits until all are answered, and if it is done then, so are those behind it.
//! Where it has to be a message all the same, it is asked again after twice as many.
//!
//! Where the link does not know what is faster, it is tried: some that are done without messages are compared with the
//! messages before them, and where those were faster, the stream goes on with messages until it is tried again.

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
/// The shortest row that is compared with a trial.
const FIRST_TRIAL: u32 = 64;
/// What is done without messages before it is compared, in bytes and cost of packets.
const TRIAL: u64 = 512 * 1024;

/// What becomes of the WQE `next`.
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
    /// How many make it rest.
    after: u32,
    /// Where the row began.
    began: Mark,
    trial: Trial,
}

/// How far the queue pair had come, and when.
#[derive(Clone, Copy, Debug, Default)]
struct Mark {
    at: Time,
    /// Cost of all that was answered.
    answered: u64,
}

/// Whether some are done without messages to see how long that takes.
#[derive(Clone, Copy, Debug)]
enum Trial {
    None,
    /// As soon as the queue pair has come to rest.
    Next,
    Goes {
        /// What the messages before it took.
        messages: Speed,
        since: Time,
        /// What was done since then.
        cost: u64,
    },
}

/// So much in so much time.
#[derive(Clone, Copy, Debug)]
struct Speed {
    cost: u64,
    time: Duration,
}

impl Speed {
    fn is_above(self, other: Self) -> bool {
        let product = |cost: u64, time: Duration| u128::from(cost) * time.as_nanos();
        product(self.cost, other.time) > product(other.cost, self.time)
    }
}

impl Default for Rest {
    fn default() -> Self {
        Self { row: 0, after: FIRST_REST, began: Mark::default(), trial: Trial::None }
    }
}

impl Rest {
    /// Something that is a message in any case comes next.
    #[inline]
    pub(super) fn interrupt(&mut self) {
        self.row = 0;
        self.trial = Trial::None;
    }

    /// A message that might have been done without, for the answers to others are missing. Whether it waits for them.
    fn begins(&mut self, mark: impl FnOnce() -> Mark) -> bool {
        self.trial = Trial::None;
        if self.row == 0 {
            self.began = mark();
        }
        if self.row < self.after {
            self.row += 1;
        }
        self.row == self.after
    }

    /// Whether to wait.
    fn is_worth(&mut self, worth: Worth) -> bool {
        match worth {
            Worth::Nothing => false,
            // A few messages do not tell how fast they are.
            Worth::Perhaps if self.after < FIRST_TRIAL => false,
            Worth::Perhaps => {
                self.trial = Trial::Next;
                true
            }
            Worth::Much => true,
        }
    }

    /// Everything is answered, and the next one can be done. Whether a message is faster.
    fn judges(&mut self, mark: impl FnOnce() -> Mark) -> bool {
        match self.trial {
            Trial::None => {}
            Trial::Next => {
                let now = mark();
                let cost = now.answered.wrapping_sub(self.began.answered);
                let messages = Speed { cost, time: now.at.since(self.began.at) };
                self.trial = Trial::Goes { messages, since: now.at, cost: 0 };
            }
            Trial::Goes { cost, .. } if cost < TRIAL => {}
            Trial::Goes { messages, since, cost } => {
                let time = mark().at.since(since);
                // The clock stands while one call does them all.
                if !time.is_zero() {
                    if messages.is_above(Speed { cost, time }) {
                        self.refused();
                        return true;
                    }
                    self.trial = Trial::None;
                }
            }
        }
        false
    }

    fn done(&mut self, cost_of: u64) {
        match &mut self.trial {
            Trial::Goes { cost, .. } => *cost += cost_of,
            _ => *self = Self::default(),
        }
    }

    /// Everything was answered, and it had to be a message all the same.
    fn refused(&mut self) {
        if self.row == self.after {
            self.after = (self.after * 2).min(LAST_REST);
        }
        self.row = 0;
        self.trial = Trial::None;
    }
}

impl Qp {
    /// Has the device do the WQE `next` without a message, where that keeps the order: everything before it was executed. It
    /// takes no PSNs. What is wrong with one is found out as it goes the ordinary way.
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
            return Way::Message;
        }
        let reliable = self.init.qp_type.is_reliable();
        if reliable && self.requester.una != self.requester.fresh_psn {
            let answered = self.requester.una_cost;
            if !self.requester.rest.begins(|| Mark { at: env.now(), answered }) {
                return Way::Message;
            }
            let worth = env.worth_of_rest(self.attr.dest_qpn, direction, remote, sqe.len);
            if self.requester.rest.is_worth(worth) {
                return Way::Wait;
            }
            self.requester.rest.refused();
            return Way::Message;
        }
        // Without answers nobody tells when the peer has executed what was sent.
        let in_order = reliable || self.requester.fresh_cost == 0;
        if !in_order || self.sq.done != position {
            return Way::Message;
        }
        let answered = self.requester.una_cost;
        if self.requester.rest.judges(|| Mark { at: env.now(), answered }) {
            return Way::Message;
        }
        let cost = u64::from(sqe.len) + u64::from(sqe.len.div_ceil(self.mtu())) * PACKET_COST;
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
        self.requester.rest.done(cost);
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
    fn what_is_refused_rests_less_often() {
        let mut rest = Rest::default();
        for expected in [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 4096] {
            assert_eq!(row(&mut rest), expected);
            assert!(rest.is_worth(Worth::Much), "it waits for all answers");
            assert!(rest.begins(Mark::default), "and goes on waiting");
            assert!(!rest.judges(Mark::default));
            rest.refused();
        }
        rest.refused();
        assert_eq!(row(&mut rest), 4096, "a refusal without a rest changes nothing");
        rest.done(1);
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

    /// A stream of which a message takes `message` ns, and what is done without one `direct`, each at a cost of `COST`.
    struct Stream {
        rest: Rest,
        now: u64,
        answered: u64,
        message: u64,
        direct: u64,
    }

    const COST: u64 = TRIAL / 8;

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

        /// Those that are done without, up to `most` or one that had better be a message.
        fn directs(&mut self, most: u32) -> u32 {
            for n in 0..most {
                let mark = self.mark();
                if self.rest.judges(&mark) {
                    return n;
                }
                self.now += self.direct;
                self.rest.done(COST);
            }
            most
        }
    }

    #[test]
    fn the_faster_way_is_found_by_trial() {
        let mut stream = Stream::new(1000, 900);
        assert_eq!(stream.messages(), 16 + 32 + 64, "not before a row tells something");
        assert_eq!(stream.directs(1000), 1000, "without messages it goes on");
        let mut stream = Stream::new(1000, 1100);
        stream.messages();
        assert_eq!(stream.directs(1000), 8, "with messages it goes on");
        assert_eq!(stream.messages(), 128);
        assert_eq!(stream.directs(1000), 8);
        // It changes.
        assert_eq!(stream.messages(), 256);
        stream.direct = 800;
        assert_eq!(stream.directs(1000), 1000);
        for (message, expected) in [(800, 1000), (799, 8)] {
            let mut stream = Stream::new(message, 800);
            stream.messages();
            assert_eq!(stream.directs(1000), expected, "{message}");
        }
    }

    #[test]
    fn what_one_call_does_takes_no_time_and_is_judged_after_it() {
        let mut stream = Stream::new(1000, 0);
        stream.messages();
        assert_eq!(stream.directs(500), 500);
        stream.now += 500 * 1100;
        assert_eq!(stream.directs(500), 0, "slower");
        stream.messages();
        assert_eq!(stream.directs(500), 500);
        stream.now += 500 * 900;
        assert_eq!(stream.directs(500), 500, "faster");
    }

    #[test]
    fn a_trial_ends_with_a_message_of_another_kind() {
        let mut stream = Stream::new(1000, 1100);
        stream.messages();
        assert_eq!(stream.directs(4), 4);
        stream.rest.interrupt();
        assert_eq!(stream.directs(1000), 1000, "nothing is judged that was not tried");
    }
}

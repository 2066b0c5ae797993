//! Short SENDs between processes of one host, which leave by lanes.

use std::os::fd::{AsFd, AsRawFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::counters::Counter;
use anyverbs_testing::{Stopwatch, in_own_process};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer};

pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);
/// Receives that a peer has posted.
const POSTED: usize = 32;
/// The place of a receive.
pub(crate) const SLOT: usize = 4096;
/// The place of what is sent.
pub(crate) const OUT: usize = POSTED * SLOT;
/// Messages of a mixture.
const MIXTURE: usize = 20_000;
const SHORT: usize = 8;
/// The ACK timeout: 67 ms.
const TIMEOUT_CODE: u8 = 14;

/// The role of a peer that ends behind a long list of SENDs.
pub(crate) const MANY_LEFT: &str = "rc lanes, then many left";
/// Its SENDs, and the bytes of each. They fill most of the cells of a lane.
const MANY: usize = 2000;
const FEW_BYTES: usize = 3;

/// An endpoint for a role.
pub(crate) fn endpoint(role: &str, qp_type: QpType) -> Endpoint {
    let many = MANY as u32 + 64;
    match role {
        MANY_LEFT => {
            Endpoint::with(qp_type, QpCap { max_send_wr: many, max_recv_wr: many, ..CAP }, 4 * many)
        }
        _ => Endpoint::new(qp_type),
    }
}

pub(crate) fn post(e: &Endpoint, buffer: &Buffer, slot: u64) {
    e.recv(slot, &[buffer.sge(slot as usize * SLOT, SLOT)]);
}

/// The peer's work: it sends each message back. An empty one ends it, and it does nothing for a second after one of a byte.
pub(crate) fn serve(e: &Endpoint, buffer: &Buffer) {
    (0..POSTED as u64).for_each(|slot| post(e, buffer, slot));
    println!("@ posted");
    let mut asleep = false;
    loop {
        for wc in e.poll_for(1, TIMEOUT) {
            assert_eq!(wc.status, WcStatus::Success);
            if wc.opcode != WcOpcode::Recv {
                continue;
            }
            let (at, len) = (wc.wr_id as usize * SLOT, wc.byte_len as usize);
            match len {
                0 => {
                    post(e, buffer, wc.wr_id);
                    return;
                }
                1 => asleep = true,
                _ => e.send(wc.wr_id, SendOp::Send, &[buffer.sge(at, len)]),
            }
            post(e, buffer, wc.wr_id);
        }
        if std::mem::take(&mut asleep) {
            println!("@ computes");
            sleep(Duration::from_secs(1));
        }
    }
}

pub(crate) struct Talk {
    pub(crate) e: Endpoint,
    pub(crate) buffer: Buffer,
    pub(crate) peer: Peer,
    remote: RemoteAddr,
}

impl Talk {
    pub(crate) fn begin() -> Self {
        Self::begin_with(TIMEOUT_CODE)
    }

    /// With this ACK timeout at our end.
    fn begin_with(timeout: u8) -> Self {
        Self::begin_as("rc lanes", timeout)
    }

    /// With a peer of this role, which begins as that of the others.
    pub(crate) fn begin_as(role: &str, timeout: u8) -> Self {
        let mut peer = Peer::spawn(role, &[]);
        let e = endpoint(role, QpType::Rc);
        let buffer = Buffer::new(&e.pd, OFFERED);
        let remote = peer.connect_with(&e, &buffer, timeout);
        assert_eq!(peer.hear(), "@ posted");
        Self { e, buffer, peer, remote }
    }

    /// Ends the peer's echo.
    pub(crate) fn end(&self) {
        self.e.send(100, SendOp::Send, &[self.buffer.sge(OUT, 0)]);
        assert_eq!(self.e.poll_for(1, TIMEOUT)[0].status, WcStatus::Success);
    }

    /// Sends `data` and waits for its return. The own send is complete before that, if nothing had to be repeated.
    pub(crate) fn echo(&self, data: &[u8]) {
        assert_eq!(self.echo_in_some_order(data), [WcOpcode::Send, WcOpcode::Recv]);
    }

    /// As [`echo`](Self::echo), and returns the order of the completions.
    fn echo_in_some_order(&self, data: &[u8]) -> Vec<WcOpcode> {
        let Self { e, buffer, .. } = self;
        post(e, buffer, 0);
        buffer.write(OUT, data);
        e.send(100, SendOp::Send, &[buffer.sge(OUT, data.len())]);
        let wcs = e.poll_for(2, TIMEOUT);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        assert_eq!(buffer.read(0, data.len()), data);
        wcs.iter().map(|wc| wc.opcode).collect()
    }

    /// Talks until short SENDs leave by a lane.
    pub(crate) fn warm(&self) {
        let begin = self.by_lane();
        let until = Instant::now() + TIMEOUT;
        while self.by_lane() < begin + 20 {
            self.echo(b"to and fro");
            assert!(Instant::now() < until, "no lane was opened");
        }
    }

    /// Packets that left by a lane.
    fn by_lane(&self) -> u64 {
        self.e.context.counters().unwrap().read(Counter::ShmLanePkts)
    }
}

// Alone, since it counts what the whole process sends.
#[test]
fn short_sends_take_a_lane_and_others_do_not() {
    in_own_process("lanes::short_sends_take_a_lane_and_others_do_not", lengths);
}

fn lengths() {
    let talk = Talk::begin();
    talk.warm();
    for len in [1025, 2000] {
        let begin = talk.by_lane();
        talk.echo(&vec![len as u8; len]);
        assert_eq!(talk.by_lane(), begin, "{len} bytes");
    }
    for len in [2, 48, 49, 64, 1000, 1024, 3] {
        let (begin, until) = (talk.by_lane(), Instant::now() + TIMEOUT);
        // One that finds no timer running takes the ring.
        while talk.by_lane() == begin {
            talk.echo(&vec![len as u8; len]);
            assert!(Instant::now() < until, "{len} bytes");
        }
    }
}

/// A poll looks at the lanes of its thread's last queue pair first. What comes by other ways is received as well.
#[test]
fn threads_with_queues_of_their_own_get_all() {
    std::thread::scope(|scope| {
        for thread in 0..3u8 {
            scope.spawn(move || {
                let talk = Talk::begin();
                for n in 0..1500usize {
                    // Now and then one by the ring.
                    let len = if n % 7 == usize::from(thread) { 3000 } else { 2 + n % 300 };
                    // Six busy threads: one may get no processor for longer than the ACK timeout.
                    let mut kinds =
                        talk.echo_in_some_order(&vec![thread.wrapping_add(n as u8); len]);
                    kinds.sort_by_key(|kind| *kind == WcOpcode::Recv);
                    assert_eq!(kinds, [WcOpcode::Send, WcOpcode::Recv]);
                }
                assert!(talk.by_lane() > 0);
            });
        }
    });
}

/// A program that polls now and then finds what comes by the ring behind what came by a lane.
#[test]
fn rare_polls_find_long_messages_behind_short_ones() {
    let talk = Talk::begin();
    talk.warm();
    let Talk { e, buffer, .. } = &talk;
    let mut polls: Vec<usize> = (0..41)
        .map(|_| {
            talk.echo(b"to and fro");
            post(e, buffer, 0);
            e.send(100, SendOp::Send, &[buffer.sge(OUT, 2000)]);
            let (mut polls, mut found) = (0, 0);
            while found < 2 {
                // Less than polls keep the worker away for.
                sleep(Duration::from_micros(250));
                found += e.cq.poll(&mut [Wc::default(); 2]).unwrap();
                polls += 1;
            }
            polls
        })
        .collect();
    polls.sort_unstable();
    // The worker takes them. The next look of a poll at everything may be the sixteenth.
    assert!(polls[30] <= 8, "{polls:?}");
    talk.end();
}

// Alone, so that no other thread gets the number of the descriptor.
#[test]
fn a_completion_channel_is_closed_with_its_handle() {
    in_own_process("lanes::a_completion_channel_is_closed_with_its_handle", || {
        let talk = Talk::begin();
        talk.warm();
        talk.end();
        let fd = talk.e.channel.as_fd().as_raw_fd();
        // SAFETY: takes no pointers.
        let is_open = || unsafe { libc::fcntl(fd, libc::F_GETFD) } >= 0;
        assert!(is_open());
        talk.e.qp.destroy().unwrap();
        talk.e.cq.destroy().unwrap();
        talk.e.channel.destroy().unwrap();
        // This thread knows its queue pair still, as the one that gave it a completion.
        drop(talk);
        assert!(!is_open());
    });
}

#[test]
fn sends_complete_while_the_receiver_computes() {
    let mut talk = Talk::begin();
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    let begin = talk.by_lane();
    e.send(1, SendOp::Send, &[buffer.sge(OUT, 1)]);
    assert_eq!(talk.peer.hear(), "@ computes");
    let computes = Stopwatch::start();
    for wr_id in 2..10 {
        e.send(wr_id, SendOp::Send, &[buffer.sge(OUT, 1)]);
    }
    let wcs = e.poll_for(9, TIMEOUT);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
    assert!(computes.elapsed() < Duration::from_millis(700), "{:?}", computes.elapsed());
    assert!(talk.by_lane() > begin);
}

// Alone, since it counts what the whole process sends.
#[test]
fn short_and_long_messages_arrive_in_order() {
    in_own_process("lanes::short_and_long_messages_arrive_in_order", mixture);
}

fn mixture() {
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer, begin) = (&talk.e, &talk.buffer, talk.by_lane());
    let mut random = SmallRng::seed_from_u64(7);
    let lens: Vec<usize> = (0..MIXTURE)
        .map(|_| match random.random_range(0..8) {
            0 => random.random_range(1025..SLOT),
            1..3 => random.random_range(49..=1024),
            _ => random.random_range(4..=48),
        })
        .collect();
    (0..SHORT as u64).for_each(|slot| post(e, buffer, slot));
    let (mut sent, mut got, mut under_way) = (0, 0, 0);
    while got < MIXTURE {
        while sent < MIXTURE && sent - got < SHORT && under_way < 2 * SHORT {
            let at = OUT + sent % SHORT * SLOT;
            buffer.write(at, &(sent as u32).to_le_bytes());
            buffer.write(at + lens[sent] - 1, &[sent as u8]);
            e.send(1000, SendOp::Send, &[buffer.sge(at, lens[sent])]);
            (sent, under_way) = (sent + 1, under_way + 1);
        }
        for wc in e.poll_for(1, TIMEOUT) {
            assert_eq!(wc.status, WcStatus::Success);
            if wc.wr_id == 1000 {
                under_way -= 1;
                continue;
            }
            let at = wc.wr_id as usize * SLOT;
            assert_eq!(wc.byte_len as usize, lens[got], "message {got}");
            let mut head = (got as u32).to_le_bytes();
            if lens[got] == 4 {
                head[3] = got as u8;
            }
            assert_eq!(buffer.read(at, 4), head, "message {got}");
            assert_eq!(buffer.read(at + lens[got] - 1, 1), [got as u8]);
            got += 1;
            post(e, buffer, wc.wr_id);
        }
    }
    assert_eq!(gaps(e), [0; 4], "a request overtook another: {:?}", counted(e));
    let by_lane = talk.by_lane() - begin;
    assert!(by_lane > MIXTURE as u64 / 8, "{by_lane} of {MIXTURE} left by the lane");
}

/// Short SENDs of one call share cells. Two calls post more than the peer has receives: a cell may be executed in part.
#[test]
fn lists_of_short_sends_arrive_in_order() {
    const STRIDE: usize = 1024;
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    let mut random = SmallRng::seed_from_u64(11);
    for round in 0..300u32 {
        let mut messages = Vec::new();
        let calls = [(); 2].map(|()| random.random_range(1..=24));
        while messages.len() < calls.iter().sum() {
            let most = if random.random_ratio(1, 4) { STRIDE } else { 48 };
            let (len, times) = (random.random_range(2..=most), random.random_range(1..=20));
            messages.extend((0..times).map(|_| (len, random.random_ratio(1, 40))));
        }
        messages.truncate(calls.iter().sum());
        for (i, (len, _)) in messages.iter().enumerate() {
            let data: Vec<u8> = (0..*len).map(|at| (round as u8) ^ (i * 5 + at) as u8).collect();
            buffer.write(OUT + i * STRIDE, &data);
            e.recv(i as u64, &[buffer.sge(i * STRIDE, STRIDE)]);
        }
        let sges: Vec<[Sge; 1]> = messages
            .iter()
            .enumerate()
            .map(|(i, (len, _))| [buffer.sge(OUT + i * STRIDE, *len)])
            .collect();
        let wr = |i: usize| SendWr {
            wr_id: 1000 + i as u64,
            op: SendOp::Send,
            flags: if messages[i].1 {
                SendFlags::SIGNALED | SendFlags::SOLICITED
            } else {
                SendFlags::SIGNALED
            },
            sges: &sges[i],
            ud: None,
            xrc_srqn: 0,
        };
        let wrs: Vec<SendWr<'_>> = (0..messages.len()).map(wr).collect();
        let (first, second) = wrs.split_at(calls[0]);
        e.qp.post_send(first).unwrap();
        e.qp.post_send(second).unwrap();
        let wcs = e.poll_for(2 * messages.len(), TIMEOUT);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "round {round}: {wcs:?}");
        for first in [0, 1000] {
            let ids = wcs.iter().map(|wc| wc.wr_id).filter(|id| (*id >= 1000) == (first >= 1000));
            assert!(ids.eq(first..first + messages.len() as u64), "round {round}: {wcs:?}");
        }
        for (i, (len, _)) in messages.iter().enumerate() {
            let (at, sent) = (i * STRIDE, OUT + i * STRIDE);
            assert_eq!(buffer.read(at, *len), buffer.read(sent, *len), "{round} {i}");
        }
    }
}

#[test]
fn a_send_that_finds_no_receive_is_refused_and_repeated() {
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    // This process takes its echoes late: the peer's SENDs find no receive.
    for round in 0..20u8 {
        for slot in 0..4 {
            buffer.write(OUT + slot * SLOT, &[round, slot as u8, 0, 0]);
            e.send(1000, SendOp::Send, &[buffer.sge(OUT + slot * SLOT, 4)]);
        }
        let wcs = e.poll_for(4, TIMEOUT);
        assert!(wcs.iter().all(|wc| wc.wr_id == 1000), "{wcs:?}");
        (0..4).for_each(|slot| post(e, buffer, slot));
        let wcs = e.poll_for(4, TIMEOUT);
        for (slot, wc) in wcs.iter().enumerate() {
            assert_eq!((wc.status, wc.wr_id), (WcStatus::Success, slot as u64));
            assert_eq!(buffer.read(slot * SLOT, 2), [round, slot as u8]);
        }
    }
    assert!(talk.e.context.counters().unwrap().read(Counter::RnrNakSent) > 0);
}

/// Requests that came out of order, and answers that showed a gap.
fn gaps(e: &Endpoint) -> [u64; 4] {
    use Counter as C;
    let counters = e.context.counters().unwrap();
    [C::OutOfSequence, C::PacketSeqErr, C::ImpliedNakSeqErr, C::RetryExceeded]
        .map(|counter| counters.read(counter))
}

/// All that was counted.
fn counted(e: &Endpoint) -> Vec<(&'static str, u64)> {
    let counters = e.context.counters().unwrap();
    let all = Counter::ALL.iter().map(|counter| (counter.name(), counters.read(*counter)));
    all.filter(|(_, n)| *n > 0).collect()
}

// Alone, since it counts what the whole process sends.
#[test]
fn a_short_send_waits_for_earlier_requests_of_its_list() {
    in_own_process("lanes::a_short_send_waits_for_earlier_requests_of_its_list", lists);
}

fn lists() {
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    let remote = talk.remote;
    let at = |offset: usize| RemoteAddr { va: remote.va + (OUT + offset) as u64, ..remote };
    buffer.write(OUT, b"last");
    let (last, long) = ([buffer.sge(OUT, 4)], [buffer.sge(OUT + 8, 100)]);
    let parts = [buffer.sge(OUT + 8, 8), buffer.sge(OUT + 64, 8)];
    let firsts: [(&str, SendOp, SendFlags, &[Sge]); 7] = [
        ("WRITE", SendOp::Write(at(0)), SendFlags::SIGNALED, &long),
        ("READ", SendOp::Read(at(0)), SendFlags::SIGNALED, &[buffer.sge(OUT + 2000, 64)]),
        ("FETCH_ADD", SendOp::FetchAdd { at: at(4096), add: 1 }, SendFlags::SIGNALED, &[parts[0]]),
        ("SEND_IMM", SendOp::SendImm(7), SendFlags::SIGNALED, &long),
        ("long SEND", SendOp::Send, SendFlags::SIGNALED, &long),
        ("SEND of parts", SendOp::Send, SendFlags::SIGNALED, &parts),
        ("fenced SEND", SendOp::Send, SendFlags::SIGNALED.union(SendFlags::FENCE), &long),
    ];
    let counted = gaps(e);
    for round in 0..50 {
        for (name, op, flags, sges) in &firsts {
            let echoes = 1 + usize::from(matches!(op, SendOp::Send | SendOp::SendImm(_)));
            (0..echoes as u64).for_each(|slot| post(e, buffer, slot));
            let wr =
                |wr_id, op, flags, sges| SendWr { wr_id, op, flags, sges, ud: None, xrc_srqn: 0 };
            let first = wr(1000, *op, *flags, sges);
            let second = wr(1001, SendOp::Send, SendFlags::SIGNALED, &last);
            e.qp.post_send(&[first, second]).unwrap();
            let wcs = e.poll_for(2 + echoes, TIMEOUT);
            assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{name}: {wcs:?}");
            let ids: Vec<u64> = wcs.iter().map(|wc| wc.wr_id).filter(|id| *id >= 1000).collect();
            assert_eq!(ids, [1000, 1001], "{name}, round {round}");
            let last_slot = (echoes - 1) * SLOT;
            assert_eq!(buffer.read(last_slot, 4), b"last", "{name}, round {round}");
        }
    }
    assert_eq!(gaps(e), counted, "a request overtook another");
}

// Alone, since it counts what the whole process sends.
#[test]
fn a_short_send_is_answered_behind_a_pending_atomic() {
    in_own_process("lanes::a_short_send_is_answered_behind_a_pending_atomic", atomics);
}

fn atomics() {
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer, counted) = (&talk.e, &talk.buffer, gaps(&talk.e));
    let at = RemoteAddr { va: talk.remote.va + (OUT + 4096) as u64, ..talk.remote };
    buffer.write(OUT, b"last");
    for round in 0..300 {
        post(e, buffer, 0);
        e.send(1000, SendOp::FetchAdd { at, add: 1 }, &[buffer.sge(OUT + 64, 8)]);
        e.send(1001, SendOp::Send, &[buffer.sge(OUT, 4)]);
        let wcs = e.poll_for(3, TIMEOUT);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        let ids: Vec<u64> = wcs.iter().map(|wc| wc.wr_id).filter(|id| *id >= 1000).collect();
        assert_eq!(ids, [1000, 1001], "round {round}");
    }
    assert_eq!(gaps(e), counted, "an answer overtook another");
}

#[test]
fn a_send_to_an_ended_peer_fails_without_a_timeout() {
    let mut talk = Talk::begin_with(0);
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    talk.peer.signal(libc::SIGKILL);
    talk.peer.wait();
    let until = Instant::now() + Duration::from_secs(1);
    while Instant::now() < until {
        // It learns of the end.
        assert_eq!(e.cq.poll(&mut [Wc::default()]).unwrap(), 0);
    }
    e.send(7, SendOp::Send, &[buffer.sge(OUT, 4)]);
    let wcs = e.poll_for(1, TIMEOUT);
    assert_eq!((wcs[0].status, wcs[0].wr_id), (WcStatus::RetryExcErr, 7));
}

// Alone, since it counts what the whole process sends.
#[test]
fn sends_that_a_peer_has_taken_before_its_end_complete() {
    in_own_process("lanes::sends_that_a_peer_has_taken_before_its_end_complete", taken);
}

fn taken() {
    for is_killed in [false, true] {
        let is_by_lane = (0..20).any(|_| is_taken(is_killed));
        assert!(is_by_lane, "every SEND found no timer running, and took the ring");
    }
}

/// Ends a peer that has taken a SEND. False if that has not left by the lane: a peer that is killed may owe its ACK.
fn is_taken(is_killed: bool) -> bool {
    let mut talk = Talk::begin();
    talk.warm();
    let before = talk.by_lane();
    let (e, buffer) = (&talk.e, &talk.buffer);
    e.send(7, SendOp::Send, &[buffer.sge(OUT, usize::from(is_killed))]);
    if talk.by_lane() == before {
        return false;
    }
    if is_killed {
        assert_eq!(talk.peer.hear(), "@ computes");
        talk.peer.signal(libc::SIGKILL);
    }
    // It has ended when this process looks.
    talk.peer.wait();
    let wcs = e.poll_for(1, TIMEOUT);
    assert_eq!((wcs[0].status, wcs[0].wr_id), (WcStatus::Success, 7));
    true
}

/// The peer's work: it stops its parent, posts a list, and ends. Later a process that it leaves behind has the parent go on.
#[expect(clippy::zombie_processes, reason = "the process that it leaves behind outlives it")]
pub(crate) fn leave_many(e: &Endpoint, buffer: &Buffer) {
    // The parent polls no more.
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let parent = std::os::unix::process::parent_id();
    let resume = format!("sleep 0.5; kill -CONT {parent}");
    std::process::Command::new("sh").args(["-c", &resume]).spawn().unwrap();
    // SAFETY: kill has no preconditions.
    assert_eq!(unsafe { libc::kill(parent.cast_signed(), libc::SIGSTOP) }, 0);
    let count = || e.context.counters().unwrap().read(Counter::ShmLanePkts);
    // This one finds no timer running, and takes the ring.
    e.send(0, SendOp::Send, &[buffer.sge(OUT, FEW_BYTES)]);
    let before = count();
    for n in 0..MANY {
        buffer.write(OUT + n * FEW_BYTES, &n.to_le_bytes()[..FEW_BYTES]);
    }
    let sges: Vec<[Sge; 1]> =
        (0..MANY).map(|n| [buffer.sge(OUT + n * FEW_BYTES, FEW_BYTES)]).collect();
    let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
    let wr = |sges| SendWr { wr_id: 1, op, flags, sges, ud: None, xrc_srqn: 0 };
    let wrs: Vec<SendWr<'_>> = sges.iter().map(|sges| wr(sges)).collect();
    e.qp.post_send(&wrs).unwrap();
    println!("@ {} by the lane", count() - before);
}

// Alone, since it is stopped for a while.
#[test]
fn sends_that_a_peer_left_in_its_lane_arrive_after_its_end() {
    in_own_process("lanes::sends_that_a_peer_left_in_its_lane_arrive_after_its_end", || {
        // Several times, since the reader may see the end before the lane, or after it.
        let seen = (0..20).filter(|_| are_left()).take(4).count();
        assert!(seen > 0, "every list took the ring");
    });
}

/// False if the list has not left by the lane: the SEND before it was answered too soon.
fn are_left() -> bool {
    let mut talk = Talk::begin_as(MANY_LEFT, TIMEOUT_CODE);
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    for n in 0..=MANY {
        e.recv(n as u64, &[buffer.sge(n * FEW_BYTES, FEW_BYTES)]);
    }
    talk.end();
    talk.peer.say("leave");
    if talk.peer.hear() != format!("@ {MANY} by the lane") {
        return false;
    }
    talk.peer.wait();
    // It does not poll meanwhile, as a program that waits for events.
    let until = Instant::now() + Duration::from_secs(10);
    while e.cq.waiting().len() <= MANY && Instant::now() < until {
        sleep(Duration::from_millis(10));
    }
    let wcs = e.cq.waiting();
    assert_eq!(wcs.len(), MANY + 1);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success));
    for n in 0..MANY {
        let received = buffer.read((n + 1) * FEW_BYTES, FEW_BYTES);
        assert_eq!(received, n.to_le_bytes()[..FEW_BYTES]);
    }
    true
}

#[test]
fn a_killed_peer_ends_sends_by_the_lane() {
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    talk.peer.stop();
    for wr_id in 0..10 {
        e.send(wr_id, SendOp::Send, &[buffer.sge(OUT, 4)]);
    }
    talk.peer.signal(libc::SIGKILL);
    let wcs = e.poll_for(10, TIMEOUT);
    assert!(wcs.iter().all(|wc| wc.status != WcStatus::Success), "{wcs:?}");
    let ids: Vec<_> = wcs.iter().map(|wc| wc.wr_id).collect();
    assert_eq!(ids, (0..10).collect::<Vec<_>>());
}

#[test]
fn a_stopped_peer_gets_all_when_it_goes_on() {
    let talk = Talk::begin();
    talk.warm();
    let (e, buffer) = (&talk.e, &talk.buffer);
    talk.peer.stop();
    (0..10).for_each(|slot| post(e, buffer, slot));
    for n in 0..10u8 {
        buffer.write(OUT + usize::from(n) * SLOT, &[n; 4]);
        e.send(1000, SendOp::Send, &[buffer.sge(OUT + usize::from(n) * SLOT, 4)]);
    }
    sleep(Duration::from_millis(200));
    talk.peer.go_on();
    let wcs = e.poll_for(20, TIMEOUT);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
    for n in 0..10u8 {
        assert_eq!(buffer.read(usize::from(n) * SLOT, 4), [n; 4]);
    }
}

// Alone, since it counts what the whole process sends.
#[test]
fn the_regions_of_short_messages_can_be_deregistered() {
    in_own_process("lanes::the_regions_of_short_messages_can_be_deregistered", deregistered);
}

/// A queue pair keeps these regions in use. Their deregistration does not wait for its next message.
fn deregistered() {
    let talk = Talk::begin();
    talk.warm();
    let e = &talk.e;
    let (mut last, mut by_lane) = (None, 0);
    let until = Instant::now() + TIMEOUT;
    for round in 0u8.. {
        let (from, to) = (Buffer::new(&e.pd, 64), Buffer::new(&e.pd, 64));
        let before = talk.by_lane();
        from.write(0, &[round; 40]);
        e.recv(1, &[to.sge(0, 64)]);
        e.send(2, SendOp::Send, &[from.sge(0, 40)]);
        let wcs = e.poll_for(2, TIMEOUT);
        assert!(wcs.iter().all(|wc| wc.status == WcStatus::Success), "{wcs:?}");
        assert_eq!(to.read(0, 40), vec![round; 40]);
        // One that finds no timer running takes the ring.
        by_lane += talk.by_lane() - before;
        assert!(Instant::now() < until, "{by_lane} left by the lane");
        // By a call, or by their drop.
        if round % 2 == 0 {
            from.mr.destroy().unwrap();
            to.mr.destroy().unwrap();
        }
        last = Some(from.sge(0, 40));
        if by_lane == 5 {
            break;
        }
    }
    e.send(3, SendOp::Send, &last.into_iter().collect::<Vec<_>>());
    let [wc] = e.poll_for(1, TIMEOUT)[..] else { panic!("one completion") };
    assert_eq!((wc.wr_id, wc.status), (3, WcStatus::LocProtErr));
}

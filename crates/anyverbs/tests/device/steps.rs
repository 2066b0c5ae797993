//! A process that is stopped or killed at any step of a SEND by a lane, or of the poll that receives one.
//!
//! The test traces its peer (ptrace(2)), stops the peer's other threads, and lets the calling thread go on by one instruction at a
//! time. `ANYVERBS_STEPS_ROUNDS=N` kills N peers in each case instead of [`KILLS`].

use std::fs;
use std::io::{self, BufRead};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::counters::Counter;
use anyverbs_testing::{Stopwatch, in_own_process, seeds, skip};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::endpoint::*;
use crate::lanes::{OUT, SLOT, TIMEOUT, Talk, post};

/// Peers that are killed in each case.
const KILLS: u64 = 8;
/// Moments of a call at which the test looks at everybody.
const LOOKS: usize = 200;
/// Calls until one uses the lane.
const TRIES: u32 = 20;
/// Messages of ours that a stopped peer does not take at once.
const QUEUED: u64 = 12;
/// Each byte of a message of the stepped call.
const FILL: u8 = 0x5a;
/// The identifier of our own messages.
const OURS: u64 = 1000;
/// The longest time that others may take for a message meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// ACK timeouts of 67 ms, and of 4.3 s: eight of them outlast the steps of a call.
const SHORT: u8 = 14;
const LONG: u8 = 20;

/// The call that a peer makes step by step.
#[derive(Clone, Copy, Debug)]
enum Case {
    /// It sends so many bytes.
    Send(usize),
    /// It polls, and a message of so many bytes has come.
    Poll(usize),
}

/// A payload in its cell, and one in the room of the lane.
const CASES: [Case; 4] = [Case::Send(2), Case::Send(200), Case::Poll(2), Case::Poll(200)];

/// In the peer: what its input says, line by line. It counts the messages that arrive, and looks at each.
pub(crate) fn serve(e: &Endpoint, buffer: &Buffer) -> ! {
    // SAFETY: cannot fail and touches no memory.
    println!("@ steps {}", unsafe { libc::gettid() });
    let mut got = 0;
    let mut take = |wcs: &[Wc]| {
        for wc in wcs {
            assert_eq!(wc.status, WcStatus::Success);
            if wc.opcode == WcOpcode::Recv {
                let len = wc.byte_len as usize;
                assert_eq!(buffer.read(wc.wr_id as usize * SLOT, len), vec![FILL; len]);
                post(e, buffer, wc.wr_id);
                got += 1;
            }
        }
        got
    };
    let mut wcs = [Wc::default(); 16];
    for line in io::stdin().lock().lines() {
        let line = line.unwrap();
        let (verb, number) = line.split_once(' ').unwrap();
        let number = number.parse().unwrap();
        match verb {
            "send" => {
                buffer.write(OUT, &vec![FILL; number]);
                let begin = by_lane(e);
                mark();
                e.send(OURS, SendOp::Send, &[buffer.sge(OUT, number)]);
                mark();
                println!("@ sent {} by the lane", by_lane(e) - begin);
            }
            "poll" => {
                mark();
                let n = e.cq.poll(&mut wcs[..number]).unwrap();
                mark();
                println!("@ polled {n}");
                take(&wcs[..n]);
            }
            "take" => {
                while take(&[]) < number {
                    let n = e.cq.poll(&mut wcs).unwrap();
                    take(&wcs[..n]);
                }
                println!("@ took {number}");
            }
            _ => panic!("{line}"),
        }
    }
    std::process::exit(0)
}

fn by_lane(e: &Endpoint) -> u64 {
    e.context.counters().unwrap().read(Counter::ShmLanePkts)
}

/// Where the stepped call begins and ends: the tracer takes the signal.
fn mark() {
    // SAFETY: a signal to the calling thread.
    unsafe { libc::raise(libc::SIGTRAP) };
}

/// The threads of a traced process.
struct Traced {
    pid: i32,
    /// The one that makes the call.
    caller: i32,
    others: Vec<i32>,
}

impl Traced {
    fn seize(pid: i32, caller: i32) -> io::Result<Self> {
        let mut others = Vec::new();
        for task in fs::read_dir(format!("/proc/{pid}/task"))? {
            let tid = task?.file_name().to_str().unwrap().parse().unwrap();
            request(libc::PTRACE_SEIZE, tid)?;
            if tid != caller {
                others.push(tid);
            }
        }
        Ok(Self { pid, caller, others })
    }

    /// Waits until the call begins, and stops the other threads where they sleep in the kernel. One that is at work may hold a
    /// lock that the call needs.
    fn begin(&self) {
        assert!(self.is_at_mark(), "the peer's call begins");
        let until = Instant::now() + TIMEOUT;
        loop {
            for tid in &self.others {
                request(libc::PTRACE_INTERRUPT, *tid).unwrap();
                wait(*tid);
            }
            let sleeps = |tid: &i32| {
                let file = format!("/proc/{}/task/{tid}/syscall", self.pid);
                !fs::read_to_string(file).unwrap().starts_with("-1 ")
            };
            if self.others.iter().all(sleeps) {
                return;
            }
            assert!(Instant::now() < until, "a thread of the peer never sleeps");
            self.others.iter().for_each(|tid| request(libc::PTRACE_CONT, *tid).unwrap());
            sleep(Duration::from_millis(1));
        }
    }

    /// One instruction. False at the end of the call.
    fn step(&self) -> bool {
        request(libc::PTRACE_SINGLESTEP, self.caller).unwrap();
        !self.is_at_mark()
    }

    /// Waits until the caller stops: whether at a mark.
    fn is_at_mark(&self) -> bool {
        assert_eq!(wait(self.caller), libc::SIGTRAP);
        // SAFETY: zero is a valid siginfo_t, and the call gets a live one.
        let code = unsafe {
            let mut info: libc::siginfo_t = std::mem::zeroed();
            let rc = libc::ptrace(libc::PTRACE_GETSIGINFO, self.caller, 0u64, &raw mut info);
            assert_eq!(rc, 0);
            info.si_code
        };
        code == libc::SI_TKILL
    }

    fn go_on(&self) {
        for tid in self.others.iter().chain([&self.caller]) {
            request(libc::PTRACE_CONT, *tid).unwrap();
        }
    }
}

impl Drop for Traced {
    /// Kills it. Its owner can wait for it once each other traced thread was waited for.
    fn drop(&mut self) {
        // SAFETY: a process that its owner has not waited for.
        unsafe { libc::kill(self.pid, libc::SIGKILL) };
        for tid in self.others.iter().chain([&self.caller]).filter(|tid| **tid != self.pid) {
            let mut status = 0;
            // SAFETY: a live int.
            while unsafe { libc::waitpid(*tid, &raw mut status, libc::__WALL) } == *tid
                && libc::WIFSTOPPED(status)
            {}
        }
    }
}

fn request(request: u32, tid: i32) -> io::Result<()> {
    // SAFETY: requests without memory of this process.
    match unsafe { libc::ptrace(request, tid, 0u64, 0u64) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Waits until a traced thread stops, and says by which signal.
fn wait(tid: i32) -> i32 {
    let mut status = 0;
    // SAFETY: a live int.
    assert_eq!(unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) }, tid);
    assert!(libc::WIFSTOPPED(status), "thread {tid} has ended: {status:#x}");
    libc::WSTOPSIG(status)
}

/// A connection to a peer whose next call goes step by step.
struct Stepped {
    case: Case,
    /// Before the connection, whose end waits for the peer. None once the peer was killed.
    traced: Option<Traced>,
    talk: Talk,
    /// Our messages: posted, and complete. And the peer's that have arrived.
    sent: u64,
    completed: u64,
    received: u64,
}

impl Stepped {
    /// Talks until both directions have a lane, then lets the peer begin its call. None if it cannot be traced.
    fn begin(case: Case, timeout: u8) -> Option<Self> {
        let mut talk = Talk::begin_as("rc lanes, then steps", timeout);
        talk.warm();
        talk.end();
        let heard = talk.peer.hear();
        let caller = heard.strip_prefix("@ steps ").unwrap().parse().unwrap();
        let traced = match Traced::seize(talk.peer.id().cast_signed(), caller) {
            Ok(traced) => traced,
            Err(error) => {
                skip(format!("the peer cannot be traced: {error}"));
                return None;
            }
        };
        post(&talk.e, &talk.buffer, 0);
        match case {
            Case::Send(len) => talk.peer.say(&format!("send {len}")),
            Case::Poll(_) => talk.peer.say("poll 1"),
        }
        traced.begin();
        let traced = Some(traced);
        let mut stepped = Self { case, traced, talk, sent: 0, completed: 0, received: 0 };
        if let Case::Poll(len) = case {
            stepped.send(len);
        }
        Some(stepped)
    }

    /// One instruction of the peer. False at the end of its call.
    fn step(&self) -> bool {
        self.traced.as_ref().unwrap().step()
    }

    fn send(&mut self, len: usize) {
        let (e, buffer) = (&self.talk.e, &self.talk.buffer);
        buffer.write(OUT, &vec![FILL; len]);
        e.send(OURS + self.sent, SendOp::Send, &[buffer.sge(OUT, len)]);
        self.sent += 1;
    }

    /// Takes the completions that are there, and says whether one has failed. A message has arrived as a whole or not at all.
    fn poll(&mut self) -> Option<WcStatus> {
        let mut wcs = [Wc::default(); 4];
        let n = self.talk.e.cq.poll(&mut wcs).unwrap();
        for wc in &wcs[..n] {
            if wc.status != WcStatus::Success {
                return Some(wc.status);
            }
            if wc.opcode == WcOpcode::Recv {
                let Case::Send(len) = self.case else { panic!("nobody sent that: {wc:?}") };
                assert_eq!((wc.wr_id, wc.byte_len as usize), (0, len));
                assert_eq!(self.talk.buffer.read(0, len), vec![FILL; len]);
                self.received += 1;
                assert_eq!(self.received, 1);
            } else {
                assert_eq!(wc.wr_id, OURS + self.completed);
                self.completed += 1;
            }
        }
        None
    }
}

/// A connection of the same process to another peer, which must not notice.
struct Bystander(Talk);

impl Bystander {
    fn begin() -> Self {
        let talk = Talk::begin();
        talk.warm();
        Self(talk)
    }

    fn look(&self, when: &str) {
        let watch = Stopwatch::start();
        self.0.echo(b"beside");
        assert!(watch.elapsed() < PATIENCE, "{when}: {:?}", watch.elapsed());
    }
}

/// The instructions of a call, and the one behind which the other side sees what it did.
fn steps_of(case: Case) -> Option<(usize, usize)> {
    let mut stepped = Stepped::begin(case, LONG)?;
    let (mut step, mut seen) = (0, None);
    while stepped.step() {
        step += 1;
        assert_eq!(stepped.poll(), None, "{case:?}, step {step}");
        seen = seen.or((stepped.received + stepped.completed > 0).then_some(step));
    }
    let seen = seen.unwrap_or_else(|| panic!("{case:?}: nothing came of {step} steps"));
    println!("{case:?}: {step} steps, seen after {seen}");
    Some((step, seen))
}

// Alone, since only the thread that traces may wait for the peer.
#[test]
fn a_process_stopped_at_a_step_of_a_short_message_harms_nobody() {
    in_own_process("steps::a_process_stopped_at_a_step_of_a_short_message_harms_nobody", stopped);
}

fn stopped() {
    let bystander = Bystander::begin();
    for case in CASES {
        let Some((all, _)) = steps_of(case) else { return };
        // A SEND that finds no timer running takes the ring.
        assert!((0..TRIES).any(|_| stop(case, all, &bystander)), "{case:?}: by no lane");
    }
}

/// Stops a peer at each step of its call, and lets it go on. Whether the call used the lane.
fn stop(case: Case, all: usize, bystander: &Bystander) -> bool {
    let mut stepped = Stepped::begin(case, LONG).unwrap();
    let mut step = 0;
    while stepped.step() {
        step += 1;
        assert_eq!(stepped.poll(), None, "{case:?}, step {step}");
        if step % (all / LOOKS + 1) == 0 {
            bystander.look(&format!("{case:?}, step {step}"));
        }
        if stepped.sent < QUEUED && step % (all / QUEUED as usize) == 0 {
            stepped.send(2);
        }
    }
    stepped.traced.as_ref().unwrap().go_on();
    // It goes on: all that was sent meanwhile arrives.
    let heard = stepped.talk.peer.hear();
    let wanted = match case {
        Case::Send(_) => 1,
        Case::Poll(_) => {
            assert_eq!(heard, "@ polled 1");
            0
        }
    };
    stepped.talk.peer.say(&format!("take {}", stepped.sent));
    let until = Instant::now() + TIMEOUT;
    while stepped.completed < stepped.sent || stepped.received < wanted {
        assert_eq!(stepped.poll(), None, "{case:?}, at the end");
        assert!(Instant::now() < until, "{case:?}: {} complete", stepped.completed);
    }
    assert_eq!(stepped.talk.peer.hear(), format!("@ took {}", stepped.sent));
    heard != "@ sent 0 by the lane"
}

// Alone, since only the thread that traces may wait for the peer.
#[test]
fn a_process_killed_at_a_step_of_a_short_message_harms_nobody() {
    in_own_process("steps::a_process_killed_at_a_step_of_a_short_message_harms_nobody", killed);
}

fn killed() {
    let rounds = std::env::var("ANYVERBS_STEPS_ROUNDS").ok();
    let rounds = rounds.map_or_else(|| seeds(KILLS), |n| n.parse().unwrap());
    let bystander = Bystander::begin();
    for case in CASES {
        let Some((all, seen)) = steps_of(case) else { return };
        let (mut arrived, mut answered) = (0, 0);
        for seed in 0..rounds {
            // By turns before and after the other side sees it. The same call may take a few steps more or less.
            let range = if seed % 2 == 0 { 1..seen } else { seen..all };
            let last = SmallRng::seed_from_u64(seed).random_range(range);
            let mut stepped = Stepped::begin(case, SHORT).unwrap();
            (0..last).all(|_| stepped.step());
            stepped.traced = None;
            stepped.send(2);
            let until = Instant::now() + TIMEOUT;
            let failed = loop {
                if let Some(status) = stepped.poll() {
                    break status;
                }
                assert!(Instant::now() < until, "{case:?}, seed {seed}: a SEND never ends");
            };
            // Nobody was there to take the last message.
            assert_eq!(failed, WcStatus::RetryExcErr, "{case:?}, seed {seed}");
            assert!(stepped.completed < stepped.sent, "{case:?}, seed {seed}");
            arrived += stepped.received;
            answered += stepped.completed;
            bystander.look(&format!("{case:?}, seed {seed}"));
        }
        println!("{case:?}: {rounds} killed, {arrived} had sent, {answered} had answered");
    }
}

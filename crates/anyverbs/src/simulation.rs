//! Hosts in virtual time: tests of programs on a network that delays, loses and repeats packets (feature `simulation`).
//!
//! A program that is written for the trait [`Verbs`](crate::Verbs) runs on a [`Host`] as it runs on a [`Context`](crate::Context). A
//! [`Simulation`] has hosts, the network between them and the programs that run there. It has one thread and its own time: a
//! timeout of a minute takes no longer than the events in it. What is random comes from the seed, so a failure comes again. The queue
//! pairs are the very code that runs on the wire.
//!
//! ```
//! use std::cell::RefCell;
//! use std::error::Error;
//! use std::rc::Rc;
//! use std::time::Duration;
//!
//! use anyverbs::prelude::*;
//! use anyverbs::simulation::{Host, Link, Simulation};
//!
//! /// Answers one call: the sum of the bytes.
//! async fn serve<V: Verbs>(device: V, qp: V::Qp, cq: V::Cq, memory: V::Slice) -> Result<(), Box<dyn Error>> {
//!     device.completion(&cq, Duration::from_secs(60)).await?;
//!     let sum = memory.slice(..4).to_vec().iter().sum();
//!     memory.slice(..1).write(&[sum]);
//!     qp.send(2, &memory.slice(..1))?;
//!     device.completion(&cq, Duration::from_secs(60)).await?;
//!     Ok(())
//! }
//!
//! # fn main() -> Result<(), Box<dyn Error>> {
//! # fn qp(host: &Host) -> Result<(<Host as Verbs>::Qp, <Host as Verbs>::Cq, <Host as Verbs>::Slice), Box<dyn Error>> {
//! #     let (pd, cq) = (host.alloc_pd()?, host.create_default_cq(4)?);
//! #     let memory = host.alloc(&pd, 8, Access::LOCAL_WRITE)?;
//! #     Ok((host.create_default_qp(&pd, &cq, QpType::Rc)?, cq, memory))
//! # }
//! let mut simulation = Simulation::new(42);
//! simulation.set_link(Link { loss: 0.2, delay: Duration::from_micros(50), ..Link::default() })?;
//! let (server, client) = (simulation.host(), simulation.host());
//!
//! // `qp` makes a queue pair, a completion queue and memory.
//! let (server_qp, server_cq, server_memory) = qp(&server)?;
//! let (client_qp, cq, memory) = qp(&client)?;
//! let (of_server, of_client) = (server.endpoint(&server_qp)?, client.endpoint(&client_qp)?);
//! server_qp.recv(1, &server_memory)?;
//! server.connect(&server_qp, &of_server, &of_client)?;
//! client.connect(&client_qp, &of_client, &of_server)?;
//! simulation.spawn(serve(server, server_qp, server_cq, server_memory));
//!
//! let answer = Rc::new(RefCell::new(Vec::new()));
//! let answered = Rc::clone(&answer);
//! simulation.spawn(async move {
//!     memory.slice(..4).write(&[1, 2, 3, 4]);
//!     client_qp.recv(1, &memory.slice(4..))?;
//!     client_qp.send(2, &memory.slice(..4))?;
//!     for _ in 0..2 {
//!         client.completion(&cq, Duration::from_secs(60)).await?;
//!     }
//!     *answered.borrow_mut() = memory.slice(4..5).to_vec();
//!     Ok(())
//! });
//! simulation.run()?;
//! assert_eq!(*answer.borrow(), [10]);
//! # Ok(())
//! # }
//! ```
//!
//! # Time
//!
//! Time stands still while a program runs, and passes when all programs wait. So a program that polls never sees an event come: it
//! has to await one. A wait of no time lets what is due at this moment happen. A program that goes on and on at one
//! moment ends the run: with [`RunError::Spins`] if it awaits, and with a panic if it does not.
//!
//! Time ends after 292 years. A longer wait, as one of `Duration::MAX`, ends by its event only.
//!
//! # What a host lacks
//!
//! A host has what [`Verbs`](crate::Verbs) has: queue pairs of the types RC, UC and UD, completion queues that are waited for, and
//! memory that the host allocates. It has no connection manager, shared receive queues, XRC, memory windows, multicast groups,
//! raw packets, completion channels or asynchronous events, and [`Context`](crate::Context) has all of these. Neither settings nor
//! faults by script apply; [`Link`] has faults of its own.

mod host;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use anyverbs_proto::time::Time;
use anyverbs_sim::{CqId, Sim};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use thiserror::Error;

pub use anyverbs_sim::link::{Burst, Corruption, Full, Link, LinkError, Rate};
pub use host::{Cq, Host, Pd, Qp, Slice};

/// Why a simulation did not come to its end.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RunError {
    /// A program returned an error.
    #[error("a program failed (seed {seed}, at {at:?}): {source}")]
    Failed {
        /// The seed of the simulation.
        seed: u64,
        /// The virtual time.
        at: Duration,
        /// The program's error.
        source: Box<dyn Error>,
    },
    /// Programs wait for what will never come.
    #[error("nothing more happens, but {waiting} programs wait (seed {seed}, at {at:?})")]
    Stuck {
        /// The seed of the simulation.
        seed: u64,
        /// The virtual time.
        at: Duration,
        /// The number of programs that have not ended.
        waiting: usize,
    },
    /// Programs go on without end at one moment. A program that polls has to wait between its polls, for some time or for an event.
    #[error("programs go on and on, and no time passes (seed {seed}, at {at:?})")]
    Spins {
        /// The seed of the simulation.
        seed: u64,
        /// The virtual time.
        at: Duration,
    },
}

/// Why a way between two hosts was not set.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SetLinkError {
    /// No link can be so.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// The other host is of another simulation.
    #[error("the other host is of another simulation")]
    Foreign,
}

/// The steps of programs at one moment after which they count as endless. A loop makes as many in five seconds of a debug build.
const ENDLESS_STEPS: u32 = 1_000_000;

/// The looks of a program in one step after which it counts as endless. A loop makes as many in two seconds of a debug build.
const ENDLESS_LOOKS: u32 = 10_000_000;

/// The end of time: an event that is due later never comes. Timers that start before it end before the numbers do.
const END: Time = Time::from_nanos(1 << 63);

/// Hosts, the network between them, and programs, in virtual time.
///
/// If a test panics, the simulation prints its seed and the last packets.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use anyverbs::Verbs;
/// use anyverbs::simulation::Simulation;
///
/// let mut simulation = Simulation::new(1);
/// let host = simulation.host();
/// simulation.spawn(async move {
///     host.sleep(Duration::from_secs(3600)).await;
///     Ok(())
/// });
/// simulation.run()?; // takes no time
/// assert_eq!(simulation.now(), Duration::from_secs(3600));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Simulation {
    world: Rc<World>,
    programs: Vec<Program>,
}

/// All that hosts share.
struct World {
    seed: u64,
    sim: RefCell<Sim>,
    start: Time,
    rng: RefCell<SmallRng>,
    /// Wakers, each with its time and a number that no other has.
    timers: RefCell<BTreeMap<(Time, u64), Waker>>,
    last_wait: Cell<u64>,
    /// Wakers by the number of the wait, each with the queue whose next completion wakes it.
    waiting: RefCell<BTreeMap<u64, (CqId, Waker)>>,
    /// The steps of programs at this moment.
    steps: Cell<u32>,
    /// The times that programs looked at something in this step.
    looks: Cell<u32>,
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World").field("seed", &self.seed).finish_non_exhaustive()
    }
}

type Outcome = Result<(), Box<dyn Error>>;

struct Program {
    future: Pin<Box<dyn Future<Output = Outcome>>>,
    awake: Arc<Awake>,
    waker: Waker,
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").field("awake", &self.awake).finish_non_exhaustive()
    }
}

/// Whether a program wants to be asked.
#[derive(Debug)]
struct Awake(AtomicBool);

impl Wake for Awake {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Simulation {
    /// No hosts yet, and a network that takes 5 us for each packet.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        let mut sim = Sim::new(seed);
        sim.net.trace.keep_the_last();
        let world = World {
            seed,
            start: sim.now(),
            sim: RefCell::new(sim),
            // Another sequence than that of the network.
            rng: RefCell::new(SmallRng::seed_from_u64(seed.rotate_left(32) ^ 1)),
            timers: RefCell::default(),
            last_wait: Cell::default(),
            waiting: RefCell::default(),
            steps: Cell::default(),
            looks: Cell::default(),
        };
        Self { world: Rc::new(world), programs: Vec::new() }
    }

    /// A new host, with the next address of 10.0.0.0/24.
    ///
    /// # Panics
    /// If there are 254 already.
    pub fn host(&mut self) -> Host {
        Host::new(&self.world)
    }

    /// Sets the way between all hosts that have none of their own ([`Host::set_link_to`]).
    ///
    /// # Errors
    /// [`LinkError`]; nothing is changed.
    pub fn set_link(&mut self, link: Link) -> Result<(), LinkError> {
        link.check()?;
        self.world.sim.borrow_mut().net.default_link = link;
        Ok(())
    }

    /// Adds a program. It begins with the next [`run`](Self::run). Where several programs can go on, the seed decides
    /// which one does.
    ///
    /// A program may wait for what hosts give, and for other programs by channels that need no runtime.
    pub fn spawn(&mut self, program: impl Future<Output = Result<(), Box<dyn Error>>> + 'static) {
        let awake = Arc::new(Awake(AtomicBool::new(true)));
        let waker = Arc::clone(&awake).into();
        self.programs.push(Program { future: Box::pin(program), awake, waker });
    }

    /// Runs until all programs have ended.
    ///
    /// # Errors
    /// [`RunError`]: the first error of a program, or that programs wait or go on without end.
    pub fn run(&mut self) -> Result<(), RunError> {
        loop {
            self.ask_programs()?;
            let waiting = self.programs.len();
            if waiting == 0 {
                return Ok(());
            }
            if !self.world.step(None) {
                return Err(RunError::Stuck { seed: self.world.seed, at: self.now(), waiting });
            }
        }
    }

    /// Runs for a time. Programs that have not ended by then go on with the next call. If time would end before that, as with
    /// `Duration::MAX`, runs until nothing more happens.
    ///
    /// # Errors
    /// [`RunError::Failed`]: the first error of a program. [`RunError::Spins`].
    pub fn run_for(&mut self, time: Duration) -> Result<(), RunError> {
        let end = Some(self.world.time() + time).filter(|end| *end <= END);
        loop {
            self.ask_programs()?;
            if !self.world.step(end) {
                return Ok(());
            }
        }
    }

    /// Lets every program go on that can.
    fn ask_programs(&mut self) -> Result<(), RunError> {
        loop {
            let is_awake = |program: &Program| program.awake.0.load(Ordering::Relaxed);
            let count = self.programs.iter().filter(|program| is_awake(program)).count();
            if count == 0 {
                return Ok(());
            }
            if self.world.steps.get() >= ENDLESS_STEPS {
                return Err(RunError::Spins { seed: self.world.seed, at: self.now() });
            }
            let choice = self.world.rng.borrow_mut().random_range(0..count);
            let mut awake = (0..).zip(&self.programs).filter(|(_, program)| is_awake(program));
            let (at, _): (usize, _) = awake.nth(choice).expect("there are more than this");
            let program = &mut self.programs[at];
            program.awake.0.store(false, Ordering::Relaxed);
            self.world.steps.set(self.world.steps.get() + 1);
            self.world.looks.set(0);
            let asked = program.future.as_mut().poll(&mut Context::from_waker(&program.waker));
            if let Poll::Ready(result) = asked {
                // Dropped before anything else runs: what it had is gone when it has ended.
                drop(self.programs.remove(at));
                let (seed, at) = (self.world.seed, self.now());
                result.map_err(|source| RunError::Failed { seed, at, source })?;
            }
            // A call of this program may have made a completion for another one.
            self.world.wake_completed();
        }
    }

    /// The virtual time since the beginning.
    #[must_use]
    pub fn now(&self) -> Duration {
        self.world.time().since(self.world.start)
    }

    /// The packets so far: all that were sent, and those of them that were lost.
    #[must_use]
    pub fn packets(&self) -> (usize, usize) {
        self.world.sim.borrow().net.trace.counts()
    }

    /// The last 200 packets, a line each: time, hosts (A is the first), headers, fate.
    #[must_use]
    pub fn trace(&self) -> String {
        self.world.sim.borrow().net.trace.to_string()
    }
}

impl World {
    fn time(&self) -> Time {
        self.sim.borrow().now()
    }

    /// Wakes those who wait for completions that are there.
    fn wake_completed(&self) {
        let sim = self.sim.borrow();
        self.waiting.borrow_mut().retain(|_, (cq, waker)| {
            let comes = sim.completions(*cq) > 0;
            if comes {
                waker.wake_by_ref();
            }
            !comes
        });
    }

    /// Goes to the next moment at which something happens, and wakes those who wait for it. False if nothing will, or not
    /// until `end`.
    fn step(&self, end: Option<Time>) -> bool {
        let mut sim = self.sim.borrow_mut();
        let now = sim.now();
        let timer = self.timers.borrow().keys().next().map(|(at, _)| (*at).max(now));
        let next = sim.next().into_iter().chain(timer).min().filter(|next| *next <= END);
        if next.is_some_and(|next| next > now) {
            self.steps.set(0);
        }
        match (next, end) {
            (Some(next), Some(end)) if next > end => {
                sim.run_for(end.since(now));
                return false;
            }
            (Some(next), _) if sim.next() == Some(next) => {
                sim.step();
            }
            (Some(next), _) => sim.run_for(next.since(now)),
            (None, Some(end)) => {
                sim.run_for(end.since(now));
                return false;
            }
            (None, None) => return false,
        }
        let now = sim.now();
        drop(sim);
        self.wake_completed();
        let mut timers = self.timers.borrow_mut();
        while timers.first_key_value().is_some_and(|((at, _), _)| *at <= now) {
            if let Some((_, waker)) = timers.pop_first() {
                waker.wake();
            }
        }
        true
    }

    /// A program looks at something. Nothing that it sees changes before it awaits.
    fn look(&self) {
        self.looks.set(self.looks.get() + 1);
        assert!(
            self.looks.get() < ENDLESS_LOOKS,
            "a program looks again and again and does not await, so no time passes (seed {})",
            self.seed
        );
    }
}

/// A program waits, until this is dropped.
#[derive(Debug)]
struct Wait<'a> {
    world: &'a World,
    until: Time,
    number: u64,
    /// It was not over at once: others went on.
    began: Cell<bool>,
}

impl<'a> Wait<'a> {
    fn new(world: &'a World, time: Duration) -> Self {
        let number = world.last_wait.get() + 1;
        world.last_wait.set(number);
        Self { world, until: world.time() + time, number, began: Cell::new(false) }
    }

    /// Whether its time is over. If not, the waker will be woken then.
    fn is_over(&self, waker: &Waker) -> bool {
        let over = self.began.replace(true) && self.world.time() >= self.until;
        if !over {
            self.world.timers.borrow_mut().insert((self.until, self.number), waker.clone());
        }
        over
    }

    /// Has the waker woken by the next completion, too.
    fn also_for(&self, cq: CqId, waker: &Waker) {
        self.world.waiting.borrow_mut().insert(self.number, (cq, waker.clone()));
    }
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.world.timers.borrow_mut().remove(&(self.until, self.number));
        self.world.waiting.borrow_mut().remove(&self.number);
    }
}

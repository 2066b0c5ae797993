//! Finding the map out and attaching the program, step by step.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyverbs_locks::{Mutex, rank};
use socket2::SockRef;

use crate::host::{LOOK_AGAIN, Lock, LockGuard, Slot, TIME_SLICES, WAIT};
use crate::sys::bound_udp_socket;
use crate::udp::{Family, Meta};
use crate::{random_u64, sockopt};

use super::probe::{ANSWER_LEN, Answer, SlotProbe};
use super::program::{self, Map, Rules};

/// Rounds of probes within [`TIME_SLICES`], after which nobody is waited for any longer. Each comes later than the last.
const ROUNDS: u32 = 5;
/// Indices that each repetition tries beyond those tried so far: other programs of this user may share the port.
const MORE_INDICES: usize = 4;

type Fds<'a> = [Option<BorrowedFd<'a>>; 2];

/// The result of [`crate::UdpPort::resteer`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resteer {
    /// There is nothing to do.
    Idle,
    /// Call again after this time.
    Pending {
        /// Time to wait.
        retry_after: Duration,
    },
    /// The program was replaced.
    Done {
        /// Whether it differs from the one that this process attached before.
        changed: bool,
    },
}

/// The way in which datagrams of one address family find their process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum SteeringMode {
    /// The port is not shared, or does not receive this family.
    #[default]
    Off,
    /// By a program that knows every process.
    Steered {
        /// Processes that share the port.
        processes: usize,
    },
    /// By a program that lacks some processes, which did not answer; theirs are forwarded.
    Partial {
        /// Processes that share the port.
        processes: usize,
        /// Slots of those that did not answer.
        missing: Vec<u8>,
    },
    /// By an assumption, because the family's loopback address is missing and no process can be asked. The assumption
    /// is that the sockets are in the order of the other family's, or in the order of joining if that is unknown, too.
    Assumed {
        /// Processes that share the port.
        processes: usize,
    },
}

/// The state of steering, for diagnostics.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SteeringState {
    /// IPv4.
    pub v4: SteeringMode,
    /// IPv6.
    pub v6: SteeringMode,
    /// Programs that this process attached.
    pub attached: u64,
    /// Datagrams of other live processes that this one received.
    pub misdeliveries: u64,
}

impl SteeringState {
    pub(crate) const UNSHARED: Self =
        Self { v4: SteeringMode::Off, v6: SteeringMode::Off, attached: 0, misdeliveries: 0 };
}

/// Steering of one shared port, as one process takes part in it.
#[derive(Debug)]
pub(crate) struct Steering {
    slot: Arc<Slot>,
    port: u16,
    rules: Rules,
    /// Whether [`Steering::resteer`] has something to do.
    wanted: AtomicBool,
    misdeliveries: AtomicU64,
    inner: Mutex<rank::Steering, Inner>,
}

#[derive(Debug)]
struct Inner {
    phase: Phase,
    maps: [Option<Box<Map>>; 2],
    modes: [SteeringMode; 2],
    attached: u64,
    finished: Instant,
    /// The pause before the next repair. It is as long as a repair takes at most, and doubles while they change nothing.
    pause: Duration,
}

#[derive(Debug)]
enum Phase {
    Idle,
    Locking { since: Instant },
    Probing(Discovery),
}

/// One attempt to find the map out.
#[derive(Debug)]
struct Discovery {
    _lock: Option<LockGuard>,
    begun: Instant,
    round: u32,
    /// Slots of the processes that share the port.
    members: Vec<u8>,
    cookie: u64,
    groups: [Option<Group>; 2],
}

/// Findings about one family's sockets.
#[derive(Debug)]
struct Group {
    /// From which probes are sent; `None` when loopback cannot carry them.
    socket: Option<UdpSocket>,
    /// Indices probed.
    probed: usize,
    /// The slot that answered, by index.
    answers: Box<Map>,
}

impl Group {
    fn open(family: Family) -> Self {
        let loopback: SocketAddr = (loopback(family), 0).into();
        let socket = bound_udp_socket(loopback)
            .and_then(|socket| socket.set_nonblocking(true).map(|()| socket));
        Self { socket: socket.ok(), probed: 0, answers: Box::new([None; 256]) }
    }

    /// The map from slot to index: a process that answered twice has the lower one.
    fn map(&self) -> Map {
        let mut map = [None; 256];
        for (slot, index) in
            self.answers.iter().zip(0u8..=255).filter_map(|(slot, index)| Some(((*slot)?, index)))
        {
            map[usize::from(slot)].get_or_insert(index);
        }
        map
    }

    fn knows_all(&self, members: &[u8]) -> bool {
        self.socket.is_none() || members.iter().all(|slot| self.answers.contains(&Some(*slot)))
    }
}

fn longer(pause: Duration) -> Duration {
    (pause * 2).clamp(TIME_SLICES, WAIT)
}

fn loopback(family: Family) -> std::net::IpAddr {
    match family {
        Family::V4 => Ipv4Addr::LOCALHOST.into(),
        Family::V6 => Ipv6Addr::LOCALHOST.into(),
    }
}

impl Steering {
    pub(crate) fn new(slot: &Arc<Slot>, port: u16, rules: Rules) -> Self {
        Self {
            slot: slot.clone(),
            port,
            rules,
            wanted: AtomicBool::new(false),
            misdeliveries: AtomicU64::new(0),
            inner: Mutex::new(Inner {
                phase: Phase::Idle,
                maps: [None, None],
                modes: [SteeringMode::Off, SteeringMode::Off],
                attached: 0,
                finished: Instant::now(),
                pause: Duration::ZERO,
            }),
        }
    }

    pub(crate) fn rules(&self) -> &Rules {
        &self.rules
    }

    pub(crate) fn note_misdelivery(&self) {
        self.misdeliveries.fetch_add(1, Ordering::Relaxed);
        self.wanted.store(true, Ordering::Release);
    }

    pub(crate) fn wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    pub(crate) fn state(&self) -> SteeringState {
        let inner = self.inner.lock();
        let [v4, v6] = inner.modes.clone();
        SteeringState {
            v4,
            v6,
            attached: inner.attached,
            misdeliveries: self.misdeliveries.load(Ordering::Relaxed),
        }
    }

    /// Answers a received datagram, if it is a probe; whether it was one. Only loopback is believed: the kernel does
    /// not let datagrams with such addresses in from elsewhere.
    pub(crate) fn answer(&self, fds: Fds<'_>, meta: &Meta, bytes: &[u8]) -> bool {
        if bytes.first() != Some(&self.rules.probe_byte) {
            return false;
        }
        if !meta.source.ip().is_loopback() || !meta.destination.is_loopback() {
            return false;
        }
        let Some(probe) = SlotProbe::parse(self.rules.probe_byte, bytes) else {
            return false;
        };
        let answer = Answer { index: probe.index, slot: self.slot.number(), cookie: probe.cookie };
        if let Some(fd) = fds[Family::of(meta.source.ip()) as usize]
            && let Err(error) = SockRef::from(&fd).send_to(&answer.datagram(), &meta.source.into())
        {
            // The prober repeats its question.
            tracing::debug!(%error, "a steering answer was not sent");
        }
        true
    }

    /// Begins at once, with the lock that the caller holds.
    pub(crate) fn start_join(&self, lock: Option<LockGuard>) {
        self.inner.lock().phase = Phase::Probing(self.begin(lock));
    }

    /// One step of a wanted repair.
    pub(crate) fn resteer(&self, fds: Fds<'_>) -> io::Result<Resteer> {
        if !self.wanted() {
            return Ok(Resteer::Idle);
        }
        // Another thread is working on it.
        let Some(mut inner) = self.inner.try_lock() else {
            return Ok(Resteer::Pending { retry_after: LOOK_AGAIN });
        };
        if matches!(inner.phase, Phase::Idle) {
            let since = inner.finished.elapsed();
            if since < inner.pause {
                return Ok(Resteer::Pending { retry_after: inner.pause - since });
            }
            if since > WAIT {
                inner.pause = TIME_SLICES;
            }
            inner.phase = Phase::Locking { since: Instant::now() };
        }
        // Failures from here on count anew. While a repair is under way, the flag keeps it going.
        let result = self.advance(&mut inner, fds);
        match result {
            Ok(Resteer::Pending { .. }) => {}
            Ok(_) => self.wanted.store(false, Ordering::Release),
            Err(_) => {
                inner.phase = Phase::Idle;
                inner.finished = Instant::now();
                inner.pause = longer(inner.pause);
            }
        }
        result
    }

    /// Does one step of the repair under way.
    pub(crate) fn step(&self, fds: Fds<'_>) -> io::Result<Resteer> {
        self.advance(&mut self.inner.lock(), fds)
    }

    /// Waits for probes to answer, answers to probes, or the end of `timeout`.
    pub(crate) fn wait(&self, fds: Fds<'_>, timeout: Duration) {
        let inner = self.inner.lock();
        let probing: &[Option<Group>] = match &inner.phase {
            Phase::Probing(discovery) => &discovery.groups,
            _ => &[],
        };
        let probes =
            probing.iter().flatten().filter_map(|group| group.socket.as_ref()).map(AsFd::as_fd);
        sockopt::poll_any(fds.into_iter().flatten().chain(probes), timeout);
    }

    fn begin(&self, lock: Option<LockGuard>) -> Discovery {
        let members = self.slot.store().announced(self.port);
        Discovery {
            _lock: lock,
            begun: Instant::now(),
            round: 0,
            members,
            cookie: random_u64(),
            groups: [None, None],
        }
    }

    fn advance(&self, inner: &mut Inner, fds: Fds<'_>) -> io::Result<Resteer> {
        if let Phase::Locking { since } = inner.phase {
            let lock = self.slot.store().try_lock(Lock::Steering);
            if lock.is_none() && since.elapsed() < WAIT {
                return Ok(Resteer::Pending { retry_after: LOOK_AGAIN });
            }
            inner.phase = Phase::Probing(self.begin(lock));
        }
        let Phase::Probing(discovery) = &mut inner.phase else {
            return Ok(Resteer::Idle);
        };
        if !self.discover(discovery, fds) {
            return Ok(Resteer::Pending { retry_after: LOOK_AGAIN });
        }
        let Phase::Probing(discovery) = std::mem::replace(&mut inner.phase, Phase::Idle) else {
            return Ok(Resteer::Idle);
        };
        let changed = self.finish(inner, &discovery, fds)?;
        inner.finished = Instant::now();
        inner.pause = if changed { TIME_SLICES } else { longer(inner.pause) };
        Ok(Resteer::Done { changed })
    }

    /// Sends probes that are due and takes the answers that are there. Tells whether that was all.
    fn discover(&self, discovery: &mut Discovery, fds: Fds<'_>) -> bool {
        // Also where no other process is known: a forked child of one that has ended may keep its socket.
        for family in Family::ALL {
            if fds[family as usize].is_some() {
                let group =
                    discovery.groups[family as usize].get_or_insert_with(|| Group::open(family));
                receive_answers(group, discovery.cookie);
            }
        }
        let done =
            |d: &Discovery| d.groups.iter().flatten().all(|group| group.knows_all(&d.members));
        if discovery.round > 0 && done(discovery) {
            return true;
        }
        let elapsed = discovery.begun.elapsed();
        if elapsed >= TIME_SLICES {
            return true;
        }
        let n = discovery.round;
        if n < ROUNDS && elapsed >= TIME_SLICES * (n * n) / (ROUNDS * ROUNDS) {
            if discovery.round > 0 {
                let (store, port) = (self.slot.store(), self.port);
                discovery.members.retain(|&slot| store.has_port(port, slot));
            }
            for family in Family::ALL {
                if let Some(group) = &mut discovery.groups[family as usize] {
                    let more =
                        if discovery.round == 0 { discovery.members.len() } else { MORE_INDICES };
                    group.probed = (group.probed + more).min(256);
                    self.send_probes(group, family, discovery.cookie);
                }
            }
            discovery.round += 1;
            return done(discovery);
        }
        false
    }

    /// Asks all indices that have not answered.
    fn send_probes(&self, group: &mut Group, family: Family, cookie: u64) {
        let Some(socket) = &group.socket else { return };
        let to: SocketAddr = (loopback(family), self.port).into();
        for index in (0u8..=255).take(group.probed) {
            if group.answers[usize::from(index)].is_some() {
                continue;
            }
            let probe = SlotProbe { index, cookie }
                .datagram(self.rules.probe_byte, self.rules.steer_offset);
            match socket.send_to(&probe, to) {
                Ok(_) => {}
                // A full buffer: the next round asks again.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) => {
                    tracing::debug!(?family, %error, "loopback does not carry steering probes");
                    group.socket = None;
                    return;
                }
            }
        }
    }

    /// Attaches programs by these findings. Tells whether they differ from the last ones.
    fn finish(&self, inner: &mut Inner, discovery: &Discovery, fds: Fds<'_>) -> io::Result<bool> {
        let members = &discovery.members;
        let found: [Option<(Map, Vec<u8>)>; 2] = [0, 1].map(|i| {
            let group = discovery.groups[i].as_ref().filter(|group| group.socket.is_some())?;
            Some(resolve(group, members))
        });
        let mut changed = false;
        for family in Family::ALL {
            let i = family as usize;
            let Some(fd) = fds[i] else { continue };
            let processes = members.len();
            let alone = members.iter().all(|&slot| slot == self.slot.number());
            let (map, mode) = match (&found[i], &found[1 - i]) {
                (None, None) if alone => {
                    let mut map = [None; 256];
                    map[usize::from(self.slot.number())] = Some(0);
                    (map, SteeringMode::Steered { processes: 1 })
                }
                (Some((map, missing)), _) if missing.is_empty() => {
                    (*map, SteeringMode::Steered { processes })
                }
                (Some((map, missing)), _) => {
                    (*map, SteeringMode::Partial { processes, missing: missing.clone() })
                }
                // All processes bind both families in one order, so the other one's map serves.
                (None, Some((map, _))) => (*map, SteeringMode::Assumed { processes }),
                (None, None) => {
                    tracing::warn!(?family, "loopback is down: steering by the order of joining");
                    (self.order_of_joining(), SteeringMode::Assumed { processes })
                }
            };
            if inner.modes[i] != mode {
                tracing::debug!(?family, ?mode, "steering");
            }
            program::attach(fd, &program::build(&self.rules, &map))?;
            inner.attached += 1;
            inner.modes[i] = mode;
            changed |= inner.maps[i].as_deref() != Some(&map);
            inner.maps[i] = Some(Box::new(map));
        }
        Ok(changed)
    }

    fn order_of_joining(&self) -> Map {
        let mut map = [None; 256];
        for (slot, index) in
            self.slot.store().announced_in_order(self.port).into_iter().zip(0u8..=255)
        {
            map[usize::from(slot)] = Some(index);
        }
        map
    }
}

/// The map, and the slots that are not in it. A single process that does not answer has the lowest silent index.
fn resolve(group: &Group, members: &[u8]) -> (Map, Vec<u8>) {
    let mut map = group.map();
    let mut missing: Vec<u8> =
        members.iter().copied().filter(|&slot| map[usize::from(slot)].is_none()).collect();
    let silent = group.answers.iter().take(group.probed).position(Option::is_none);
    if let ([slot], Some(index)) = (&missing[..], silent) {
        map[usize::from(*slot)] = u8::try_from(index).ok();
        missing.clear();
    }
    (map, missing)
}

fn receive_answers(group: &mut Group, cookie: u64) {
    let Some(socket) = &group.socket else { return };
    let mut bytes = [0; ANSWER_LEN + 1];
    // Bounded: a flood of strangers' datagrams must not hold the caller.
    for _ in 0..1024 {
        match socket.recv_from(&mut bytes) {
            Ok((n, from)) => {
                if let Some(answer) = Answer::parse(&bytes[..n])
                    && from.ip().is_loopback()
                    && answer.cookie == cookie
                {
                    group.answers[usize::from(answer.index)].get_or_insert(answer.slot);
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

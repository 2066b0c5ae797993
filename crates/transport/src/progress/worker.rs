//! The worker: one thread that serves the process when no caller does.
//!
//! It sleeps in epoll on the sockets. While a program polls, its polls do the work, and waking the worker for each
//! packet as well would cost both. So the sockets are armed for one event only. When the worker is woken while polls
//! are fresh, it does nothing, leaves the sockets disarmed and looks again after [`BUSY_POLL`]. When the polls have
//! stopped, it does the work and arms the sockets again. A program that is about to sleep says so.

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::time::Duration;

use anyverbs_links::shm::Shm;
use anyverbs_links::{Links, Opened};
use anyverbs_net::AddressMonitor;
use anyverbs_net::host::TIME_SLICES;
use anyverbs_net::steering::Resteer;
use anyverbs_objects::async_event::AsyncEventKind;
use anyverbs_objects::base::{IS_WORKER, NEVER};
use anyverbs_objects::gid::GidTables;
use anyverbs_proto::time::Time;
use anyverbs_sanitizers::Quiet;

use super::Driver;
use super::observer::Observer;
use super::owed::Debts;
use super::receive::Reader;
use crate::qp::owed::{ACK_DELAY, Owed};

/// The time, in microseconds, for which a poll keeps the worker away. Each look of the worker interrupts a program that polls
/// (`it_leaves_the_sockets_to_polls_until_they_stop`).
const BUSY_POLL: Duration = Duration::from_micros(700);
/// The time after a one-sided request that the worker had to take. During it polls keep the worker away for no longer
/// than [`WAKE_UP`] (`one_sided_requests_make_it_look_sooner`).
const ONE_SIDED: Duration = TIME_SLICES;
/// The time that it takes to wake a thread, in microseconds. To wait or to look for so long costs no more than a sleep: for
/// more of a stream, at quiet sockets beside a busy same-host link, and after one-sided requests, as [`BUSY_POLL`]
/// (`it_waits_for_more_of_a_stream_before_it_sleeps`, `one_sided_requests_make_it_look_sooner`,
/// `polls_rarely_look_at_quiet_sockets`).
pub(super) const WAKE_UP: Duration = Duration::from_micros(25);
/// Bytes in one go, in and out, that make a stream.
const STREAM: u64 = 32 << 10;
/// Bytes in one go that make a stream where the last ones came no longer ago than [`BUSY_POLL`]: where packets are lost,
/// windows are small.
const PIECE: u64 = 3 << 10;
/// The time, in microseconds, for which the worker leaves arrivals to a program that polls. A poll takes less, and so does a
/// look at whether there was one (`it_leaves_one_sided_requests_to_polls_that_go_on`).
const MOMENT: Duration = Duration::from_micros(10);
/// Packets that came alone, likely. Behind a batch of so few the sockets are armed, without another look that finds nothing. If
/// more did come, an event wakes the worker once more. So a larger number costs bursts a wake-up for each batch.
const FEW: usize = 4;
/// Batches in a row before the worker looks at anything else. A peer that sends without a pause would otherwise keep it from
/// timers, from new channels and from the program's calls for it. A batch is up to 8 buffers of 64 KiB, so the looks
/// cost nothing beside them.
const BATCHES: usize = 64;

const TOKEN_KICK: u64 = 0;
const TOKEN_MONITOR: u64 = 1;
const TOKEN_SHM: u64 = 2;
const TOKEN_SHM_CONTROL: u64 = 3;
/// The first of the links' descriptors; the others follow in their order.
const TOKEN_INPUT: u64 = 4;
/// Where the bits of the sockets for frames begin, behind those of the links.
const FRAMES_BIT: usize = 30;

/// State that callers and the worker share.
#[derive(Debug)]
pub struct Shared {
    epoll: OwnedFd,
    monitor: Option<AddressMonitor>,
    /// The links' descriptors that were disarmed by their events, a bit each.
    disarmed: AtomicU32,
    /// Sockets for frames, two at most; their bits in `disarmed` begin at [`FRAMES_BIT`].
    frames: OnceLock<Vec<BorrowedFd<'static>>>,
    /// The worker found another thread at the sockets.
    left_to_reader: AtomicBool,
    /// The same-host link has woken the worker, or somebody polls instead: it must be armed before the worker sleeps.
    shm_spent: AtomicBool,
    /// The count of looks when it was last read.
    seen: AtomicU64,
    /// One-sided requests came since the worker last looked.
    one_sided: AtomicBool,
    /// A thread of the program sleeps at the sockets, or did lately.
    waited_for: AtomicBool,
}

/// The events that woke the worker.
#[derive(Clone, Copy, Debug, Default)]
struct Found {
    kicked: bool,
    addresses: bool,
    /// The links' descriptors that are ready, a bit each.
    input: u32,
    shm: bool,
    shm_control: bool,
}

/// Sets an eventfd to zero.
fn clear(fd: BorrowedFd<'_>) {
    let mut count = 0u64;
    // SAFETY: eight live bytes; the descriptor does not block.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut count).cast(), 8) };
}

fn control(epoll: &OwnedFd, op: i32, fd: BorrowedFd<'_>, flags: i32, token: u64) -> io::Result<()> {
    let mut event = libc::epoll_event { events: flags as u32, u64: token };
    // SAFETY: a live event; both descriptors are open.
    let rc = unsafe { libc::epoll_ctl(epoll.as_raw_fd(), op, fd.as_raw_fd(), &raw mut event) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Without it the GID table stays as it is; nothing else depends on it.
pub fn watch_addresses() -> Option<AddressMonitor> {
    AddressMonitor::new()
        .inspect_err(|error| tracing::warn!(%error, "addresses are not watched"))
        .ok()
}

impl Shared {
    /// `monitor` was there before the GID table read the addresses, so it shows later changes.
    pub fn new(opened: &Opened, monitor: Option<AddressMonitor>) -> io::Result<Self> {
        // SAFETY: takes no pointers.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        if epoll < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that the kernel has just made and that has no other owner.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        control(&epoll, libc::EPOLL_CTL_ADD, opened.waker.as_fd(), libc::EPOLLIN, TOKEN_KICK)?;
        if let Some(monitor) = &monitor {
            control(&epoll, libc::EPOLL_CTL_ADD, monitor.as_fd(), libc::EPOLLIN, TOKEN_MONITOR)?;
        }
        for (fd, token) in opened.fds().zip(TOKEN_INPUT..) {
            control(&epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN | libc::EPOLLONESHOT, token)?;
        }
        if let Some(endpoint) = opened.shm.as_ref().map(Shm::endpoint) {
            for (fd, token) in
                [(endpoint.wake_fd(), TOKEN_SHM), (endpoint.control_fd(), TOKEN_SHM_CONTROL)]
            {
                control(&epoll, libc::EPOLL_CTL_ADD, fd, libc::EPOLLIN, token)?;
            }
        }
        Ok(Self {
            epoll,
            monitor,
            disarmed: AtomicU32::new(0),
            frames: OnceLock::new(),
            left_to_reader: AtomicBool::new(false),
            shm_spent: AtomicBool::new(opened.shm.is_some()),
            seen: AtomicU64::new(0),
            one_sided: AtomicBool::new(false),
            waited_for: AtomicBool::new(false),
        })
    }

    /// The worker leaves the sockets to the thread that reads them, and which looks once more if it has found nothing.
    pub(super) fn leave_to_reader(&self) {
        self.left_to_reader.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_left_to_reader(&self) -> bool {
        self.left_to_reader.load(Ordering::SeqCst)
    }

    pub(super) fn take_left_to_reader(&self) -> bool {
        self.is_left_to_reader() && self.left_to_reader.swap(false, Ordering::SeqCst)
    }

    pub(super) fn note_one_sided(&self) {
        if !self.one_sided.load(Ordering::Relaxed) {
            self.one_sided.store(true, Ordering::Relaxed);
        }
    }

    /// A thread of the program goes to sleep at the sockets. The same-host link does not wake it.
    pub(super) fn note_waiter(&self) {
        self.waited_for.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_shm_spent(&self) -> bool {
        self.shm_spent.load(Ordering::SeqCst)
    }

    pub(super) fn take_shm_spent(&self) -> bool {
        self.is_shm_spent() && self.shm_spent.swap(false, Ordering::SeqCst)
    }

    pub(super) fn note_shm_spent(&self) {
        self.shm_spent.store(true, Ordering::SeqCst);
    }

    /// Polls up to now no longer keep the worker away.
    pub(super) fn end_polling(&self, looks: u64) {
        self.seen.store(looks, Ordering::SeqCst);
    }

    pub(super) fn rearm_if_disarmed(&self, links: &Links) {
        if self.disarmed.load(Ordering::SeqCst) == 0 {
            return;
        }
        let disarmed = self.disarmed.swap(0, Ordering::SeqCst);
        let frames = self.frames.get().into_iter().flatten().copied();
        let fds = links.fds().enumerate().chain((FRAMES_BIT..).zip(frames));
        for (i, fd) in fds.filter(|(i, _)| disarmed & 1 << i != 0) {
            let armed = control(
                &self.epoll,
                libc::EPOLL_CTL_MOD,
                fd,
                libc::EPOLLIN | libc::EPOLLONESHOT,
                TOKEN_INPUT + i as u64,
            );
            debug_assert!(armed.is_ok(), "the descriptors stay in the set: {armed:?}");
        }
    }

    /// Has the worker receive frames as well; once.
    pub(super) fn watch(&self, mut fds: Vec<BorrowedFd<'static>>) -> io::Result<()> {
        fds.truncate(32 - FRAMES_BIT);
        let fds = self.frames.get_or_init(|| fds);
        for (i, fd) in (FRAMES_BIT..).zip(fds) {
            let token = TOKEN_INPUT + i as u64;
            let flags = libc::EPOLLIN | libc::EPOLLONESHOT;
            control(&self.epoll, libc::EPOLL_CTL_ADD, *fd, flags, token)?;
        }
        Ok(())
    }

    /// Whether there are sockets for frames.
    #[inline]
    pub(super) fn watches_frames(&self) -> bool {
        self.frames.get().is_some()
    }

    /// Waits for events for at most `timeout`; which came.
    fn wait(&self, timeout: Option<Duration>) -> Found {
        let mut pfd = libc::pollfd { fd: self.epoll.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        let spec = timeout.map(|t| libc::timespec {
            tv_sec: t.as_secs().min(i32::MAX as u64) as libc::time_t,
            tv_nsec: t.subsec_nanos().into(),
        });
        let spec_at = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // epoll's own timeout has no microseconds.
        // SAFETY: one live pollfd, a live timespec or null.
        let n = unsafe { libc::ppoll(&raw mut pfd, 1, spec_at, std::ptr::null()) };
        let mut found = Found::default();
        if n <= 0 {
            return found;
        }
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        // SAFETY: eight live events.
        let n = unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), events.as_mut_ptr(), 8, 0) };
        for event in events.iter().take(n.max(0) as usize) {
            match event.u64 {
                TOKEN_KICK => found.kicked = true,
                TOKEN_MONITOR => found.addresses = true,
                TOKEN_SHM => found.shm = true,
                TOKEN_SHM_CONTROL => found.shm_control = true,
                token => found.input |= 1 << (token - TOKEN_INPUT),
            }
        }
        found
    }
}

/// Gives the worker its driver.
pub type Starter = Sender<&'static Driver>;

/// Starts the worker. It waits until it is sent its driver, and ends if there comes none.
pub fn spawn() -> io::Result<Starter> {
    let (sender, driver) = mpsc::channel();
    spawn_quiet(c"anyverbs", move || {
        if let Ok(driver) = driver.recv() {
            run(driver);
        }
    })?;
    Ok(sender)
}

/// Starts a thread with all signals blocked: they are for the program's threads. The program's sanitizers leave out what it does,
/// so it gives itself its name.
pub fn spawn_quiet(name: &'static CStr, f: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: all-zero is a valid sigset_t, and the calls get live pointers to such.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        // The guarded copies of registered memory rely on these signals.
        libc::sigdelset(&raw mut all, libc::SIGSEGV);
        libc::sigdelset(&raw mut all, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let spawned = std::thread::Builder::new().stack_size(256 << 10).spawn(move || {
        let _quiet = Quiet::new();
        // SAFETY: a C string of at most 15 bytes.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        f();
    });
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    spawned.map(drop)
}

/// Asks the scheduler for short time slices (sched_setattr(2), since Linux 6.12). A thread with a shorter one than the
/// thread that runs gets the processor when it wakes. The program may be spinning on its memory for data that the
/// worker has to receive.
fn ask_for_short_slices() {
    // SAFETY: all-zero is a valid sched_attr; the calls get a live one of the given size, for the calling thread.
    unsafe {
        let mut attr: libc::sched_attr = std::mem::zeroed();
        let size = size_of::<libc::sched_attr>() as u32;
        let known = libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attr, size, 0) == 0;
        if known && attr.sched_policy == libc::SCHED_OTHER as u32 {
            attr.size = size;
            // The scheduler grants the least that it has.
            attr.sched_runtime = 1;
            libc::syscall(libc::SYS_sched_setattr, 0, &raw const attr, 0);
        }
    }
}

fn run(driver: &'static Driver) {
    IS_WORKER.set(true);
    ask_for_short_slices();
    let least: libc::c_ulong = 1;
    // SAFETY: takes no pointers, and concerns the calling thread. Where it fails, timers are 50 us late.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, least, 0_u64, 0_u64, 0_u64) };
    let mut worker = Worker::new(driver);
    serve(driver, false, &mut worker.last);
    loop {
        let timeout = worker.lie_down();
        let found = driver.worker.wait(timeout);
        worker.get_up();
        worker.act(found);
    }
}

/// The state of the worker that lasts from one sleep to the next.
struct Worker {
    driver: &'static Driver,
    /// For how long polls keep the worker away at the moment.
    away: Option<Duration>,
    /// Somebody polled during the last sleep.
    polled: bool,
    /// A program that waits on its memory polls in between, for its own sends.
    needed_until: Time,
    /// When the last piece of a stream came.
    last: Time,
    resteer_at: u64,
    /// The debts before the last sleep.
    owed: Owed,
    /// Exists while somebody looks at the process.
    observer: Option<Box<Observer>>,
    /// The looks that were seen.
    looks: u64,
    /// The orders that were seen.
    told: u64,
}

impl Worker {
    fn new(driver: &'static Driver) -> Self {
        let (now, owed) = (driver.core.now(), driver.transport.owed.now());
        Self {
            driver,
            away: None,
            polled: false,
            needed_until: now,
            last: now,
            resteer_at: NEVER,
            owed,
            observer: None,
            looks: 0,
            told: 0,
        }
    }

    fn next_deadline(&self) -> u64 {
        let observe_at = self.observer.as_ref().map_or(NEVER, |observer| observer.next());
        self.driver.next_deadline().min(self.resteer_at).min(observe_at)
    }

    /// How long it is until a time. While another thread does what a script of faults has due, it is long enough to sleep: the log of that
    /// thread may take its time (`it_does_not_spin_while_another_thread_tells_of_a_fault`).
    fn time_until(&self, until: u64) -> Duration {
        let driver = self.driver;
        let time = Duration::from_nanos(until.saturating_sub(driver.core.now().as_nanos()));
        if driver.script.is_locked() { time.max(BUSY_POLL) } else { time }
    }

    /// Says until when it will sleep, and returns for how long. `None`: until something comes.
    fn lie_down(&mut self) -> Option<Duration> {
        let driver = self.driver;
        let waker = &driver.links.waker;
        self.owed = driver.transport.owed.now();
        if let Some(away) = self.away {
            // It looks again by itself, so no thread need wake it for an earlier time.
            let now = driver.core.now().as_nanos();
            let timer = self.time_until(self.next_deadline());
            let away = if self.owed.is_any() { away.min(ACK_DELAY) } else { away };
            let timeout = away.min(timer.max(WAKE_UP));
            waker.set_away_until(now + timeout.as_nanos() as u64);
            return Some(timeout);
        }
        // Looks once more after it has said so: a later caller sees it asleep.
        let mut until;
        loop {
            until = self.next_deadline();
            waker.set_asleep_until(until.max(1));
            if self.next_deadline() >= until {
                break;
            }
        }
        if driver.transport.owed.now().is_any() || driver.links.inproc.is_pending() {
            return Some(ACK_DELAY);
        }
        let timer = (until != NEVER).then(|| self.time_until(until));
        // Whoever polls may leave an ACK behind.
        if self.polled { Some(timer.map_or(BUSY_POLL, |t| t.min(BUSY_POLL))) } else { timer }
    }

    fn get_up(&self) {
        self.driver.links.waker.set_away_until(0);
        self.driver.links.waker.set_asleep_until(0);
    }

    /// Does what the events ask for, unless polls do.
    fn act(&mut self, found: Found) {
        let driver = self.driver;
        let shared = &driver.worker;
        if found.kicked {
            driver.links.waker.take_kick();
        }
        if found.addresses {
            refresh_addresses(driver);
        }
        if let Some(shm) = &driver.links.shm {
            if found.shm_control {
                shm.control();
            }
            if found.shm {
                clear(shm.endpoint().wake_fd());
                shared.note_shm_spent();
            }
        }
        if found.input != 0 {
            shared.disarmed.fetch_or(found.input, Ordering::SeqCst);
        }
        let looks = driver.poll_looks.sum();
        self.polled = shared.seen.swap(looks, Ordering::SeqCst) != looks;
        let now = driver.core.now();
        if shared.one_sided.swap(false, Ordering::Relaxed) {
            self.needed_until = now + ONE_SIDED;
        }
        let needed = now < self.needed_until;
        if found.shm && shared.waited_for.swap(false, Ordering::SeqCst) {
            self.polled = false;
        }
        let contended = self.polled && found.input != 0;
        let takes = match (needed, contended) {
            (true, true) => takes_it(driver),
            // Polls that go on take it all. Where they stop, it is seen at the next look.
            (true, false) => self.polled && !found.shm,
            (false, _) => self.polled,
        };
        // Woken by input that is gone, or that somebody is taking: the program polls.
        self.away = if takes || !serve(driver, contended, &mut self.last) {
            Some(if needed { WAKE_UP } else { BUSY_POLL })
        } else {
            None
        };
        if self.away.is_some() && self.owed.is_any() && self.owed == driver.transport.owed.now() {
            // The program polled, but not since. Its answer may still carry its new ACKs. An ACK that leaves before
            // would end the peer's poll, and have it wait on its memory for the answer.
            driver.flush(Debts::All);
        }
        driver.run_timers();
        driver.drain_inproc(true);
        self.observe();
        self.obey();
        if driver.links.port.needs_resteer() || self.resteer_at != NEVER {
            self.resteer_at = match driver.links.port.resteer() {
                Ok(Resteer::Pending { retry_after }) => {
                    (driver.core.now() + retry_after).as_nanos()
                }
                Ok(_) => NEVER,
                Err(error) => {
                    tracing::debug!(%error, "steering was not repaired");
                    NEVER
                }
            };
        }
    }
}

impl Worker {
    /// Does what others of the user tell the process to do.
    fn obey(&mut self) {
        let Some(slot) = self.driver.links.port.slot() else { return };
        if slot.told() == self.told {
            return;
        }
        self.told = slot.told();
        while let Some(order) = slot.take_order() {
            let (mark, text) = match self.driver.obey(&order.bytes) {
                Ok(text) => (b'+', text),
                Err(text) => (b'-', text),
            };
            slot.answer(&order, &[&[mark], text.as_bytes()].concat());
        }
    }

    /// Tells those who look at the process what it does.
    fn observe(&mut self) {
        let Some(page) = self.driver.links.port.slot().map(|slot| slot.page()) else { return };
        let looks = page.looks();
        if looks == self.looks && self.observer.is_none() {
            return;
        }
        let is_new = std::mem::replace(&mut self.looks, looks) != looks;
        let observer = self.observer.get_or_insert_with(|| Box::new(Observer::new(self.driver)));
        if !observer.observe(page, is_new) {
            page.clear();
            self.observer = None;
        }
    }
}

/// Tells whether the program is polling at this moment, and so takes new arrivals. It may run on this very processor,
/// and be in the middle of a poll. If it has polled before and now waits on its memory, the worker has to take them.
fn takes_it(driver: &'static Driver) -> bool {
    std::thread::sleep(MOMENT);
    let looks = driver.poll_looks.sum();
    driver.worker.seen.swap(looks, Ordering::SeqCst) != looks
}

/// Receives all there is, acknowledges, and arms the sockets again.
///
/// In the middle of a stream the worker waits a little for more before it sleeps: a wake-up costs as much as the wait.
/// If other threads are said to take arrivals (`contended`), and there are none, nothing else is done: false. The same
/// holds if another thread is at the sockets. If they were armed while that one does not get the processor, they would
/// wake the worker at once. It does not wait for small messages, whose program may be spinning on its memory on this
/// very core.
fn serve(driver: &'static Driver, contended: bool, last: &mut Time) -> bool {
    let stream = if driver.core.now().since(*last) <= BUSY_POLL { PIECE } else { STREAM };
    let is_stream = |begin| driver.bytes_moved().wrapping_sub(begin) >= stream;
    let looks = driver.poll_looks.sum();
    let begin = driver.bytes_moved();
    let mut batches = 0;
    let mut give_up = None;
    while batches < BATCHES {
        // While it waits it asks as cheaply as a poller, and thoroughly before it gives up.
        let reader =
            if give_up.is_none() { Reader::Worker } else { Reader::Poll { is_due: false } };
        let n = driver.receive(reader);
        if n > 0 {
            batches += 1;
            give_up = None;
            if driver.bytes_moved().wrapping_sub(begin) >= PIECE {
                *last = driver.core.now();
            }
            if n <= FEW && !is_stream(begin) {
                // More makes an event when the sockets are armed, which costs less than to ask.
                driver.flush(Debts::Unawaited);
                arm(driver);
                return true;
            }
            continue;
        }
        if batches == 0 && (contended || driver.worker.is_left_to_reader()) {
            return false;
        }
        if batches > 0 {
            driver.flush(Debts::Unawaited);
            if driver.transport.owed.now().is_any() {
                // However long it was, the program is to answer it. It may be spinning on its memory on this very core, and
                // its answer carries the ACK.
                arm(driver);
                return true;
            }
        }
        driver.flush(Debts::All);
        let polled = driver.poll_looks.sum() != looks;
        if polled || !is_stream(begin) {
            break;
        }
        let now = driver.core.now();
        if now >= *give_up.get_or_insert(now + WAKE_UP) {
            if driver.receive(Reader::Worker) == 0 {
                break;
            }
            give_up = None;
        }
        std::hint::spin_loop();
    }
    driver.flush(Debts::All);
    arm(driver);
    true
}

/// Call it last: later arrivals make an event at once.
fn arm(driver: &'static Driver) {
    driver.worker.rearm_if_disarmed(driver.links);
    if !driver.rearm_shm() {
        // Something came meanwhile: another round.
        driver.kick_worker();
    }
}

fn refresh_addresses(driver: &'static Driver) {
    if let Some(monitor) = &driver.worker.monitor
        && let Err(error) = monitor.drain()
    {
        tracing::debug!(%error, "reading address changes");
    }
    change_addresses(driver, |gids| {
        gids.refresh().unwrap_or_else(|error| {
            tracing::warn!(%error, "the host's addresses could not be read");
            Vec::new()
        })
    });
}

/// Changes the tables of addresses, by a call that returns the ports whose addresses have changed. Tells all who know them.
pub(super) fn change_addresses(
    driver: &'static Driver,
    change: impl FnOnce(&GidTables) -> Vec<usize>,
) {
    let gids = &driver.core.gids;
    let changed = change(gids);
    if changed.is_empty() {
        return;
    }
    driver.transport.groups.follow(&driver.links.port, gids);
    for &port in &changed {
        driver.raise_of_port(port, AsyncEventKind::GidChange);
    }
    driver.above().management.addresses_changed();
    for port in changed {
        driver.tell_state(port);
    }
}

#[cfg(test)]
mod tests;

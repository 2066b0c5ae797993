//! `epoll(7)` of sockets and ordinary descriptors.

use std::cell::Cell;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::config::config;
use crate::epoll::Epoll;
use crate::errno::{Errno, Result};
use crate::poll::give_up;
use crate::sleep;
use crate::sleepers::{Asleep, Sleepers};
use crate::socket::Socket;
use crate::table;

/// A socket of the set.
#[derive(Debug)]
struct Item {
    fd: RawFd,
    socket: Weak<Socket>,
    events: u32,
    data: u64,
    /// The last report, for callers that want changes only (`EPOLLET`).
    told: Option<(u64, u64)>,
    /// It was reported once and wants no more (`EPOLLONESHOT`).
    spent: bool,
}

impl Item {
    /// The events to report now; 0 for none.
    fn look(&mut self, socket: &Socket) -> u32 {
        if self.spent {
            return 0;
        }
        let ready = socket.ready();
        // The bits of poll(2) and of epoll(7) are the same.
        let mut events = u32::from(ready.asked(self.events as u16 as i16) as u16);
        if self.events & libc::EPOLLET as u32 != 0
            && let Some((read, write)) = self.told
        {
            let write_bits = (libc::EPOLLOUT | libc::EPOLLWRNORM) as u32;
            if read == ready.read_edges && write == ready.write_edges {
                events = 0;
            } else if write == ready.write_edges {
                events &= !write_bits;
            } else if read == ready.read_edges {
                events &= write_bits | (libc::EPOLLERR | libc::EPOLLHUP) as u32;
            }
        }
        if events != 0 {
            self.told = Some((ready.read_edges, ready.write_edges));
            self.spent = self.events & libc::EPOLLONESHOT as u32 != 0;
        }
        events
    }
}

#[derive(Debug, Default)]
struct Items {
    list: Vec<Item>,
    /// The place where the next look begins, so that no socket is passed over.
    next: usize,
}

/// An epoll set that may hold sockets.
#[derive(Debug)]
pub struct Repoll {
    /// Everything, for sleeping: sockets by their descriptors, `others` and `sleepers`.
    all: Epoll,
    /// Ordinary descriptors, with the events that the program wants of them.
    others: Epoll,
    items: Mutex<Items>,
    /// The threads that sleep on `all`, with the sockets that it had when they began.
    sleepers: Sleepers,
    /// The process that made it.
    owner: u32,
}

/// The key in `all` of a descriptor that is no socket's.
const OTHERS: u64 = u64::MAX;
/// The key in `all` of `sleepers`.
const SLEEPERS: u64 = u64::MAX - 1;

#[derive(Default)]
struct Scratch {
    sockets: Vec<Arc<Socket>>,
    /// The thread's sleep on each of them.
    asleep: Vec<Asleep>,
    woken: Vec<libc::epoll_event>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Repoll {
    pub(crate) fn new(close_on_exec: bool) -> Result<Self> {
        let (all, others) = (Epoll::new(close_on_exec)?, Epoll::new(true)?);
        let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: OTHERS };
        all.control(libc::EPOLL_CTL_ADD, others.as_raw_fd(), event)?;
        let sleepers = Sleepers::new()?;
        let event = libc::epoll_event { u64: SLEEPERS, ..event };
        all.control(libc::EPOLL_CTL_ADD, sleepers.as_fd().as_raw_fd(), event)?;
        Ok(Self { all, others, items: Mutex::default(), sleepers, owner: std::process::id() })
    }

    /// Whether the process inherited it across `fork`. A thread of the parent may have locked it, and nobody unlocks it here.
    pub(crate) fn is_inherited(&self) -> bool {
        self.owner != std::process::id()
    }

    /// Its descriptors.
    pub(crate) fn descriptors(&self) -> [RawFd; 3] {
        let sleepers = self.sleepers.as_fd().as_raw_fd();
        [self.all.as_raw_fd(), self.others.as_raw_fd(), sleepers]
    }

    /// Its descriptor.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.all.as_raw_fd()
    }

    /// `epoll_ctl(2)`. `events` and `data` are those of `struct epoll_event`.
    ///
    /// # Errors
    /// As that call's.
    pub fn control(&self, op: i32, fd: RawFd, events: u32, data: u64) -> Result<()> {
        let Ok(socket) = table::get(fd) else {
            // A socket that was closed is out of the set already.
            return self.others.control(op, fd, libc::epoll_event { events, u64: data });
        };
        let mut items = self.items.lock();
        items.list.retain(|item| item.socket.strong_count() > 0);
        let at = items
            .list
            .iter()
            .position(|item| item.fd == fd && std::ptr::eq(item.socket.as_ptr(), &*socket));
        let event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
        match (op, at) {
            (libc::EPOLL_CTL_ADD, None) => {
                self.all.control(op, fd, event)?;
                let socket = Arc::downgrade(&socket);
                items.list.push(Item { fd, socket, events, data, told: None, spent: false });
                drop(items);
                // A thread that sleeps does not know the socket, which owes it no event.
                self.sleepers.wake();
                Ok(())
            }
            (libc::EPOLL_CTL_ADD, Some(_)) => Err(Errno(libc::EEXIST)),
            (libc::EPOLL_CTL_MOD, Some(at)) => {
                let item = &mut items.list[at];
                (item.events, item.data) = (events, data);
                (item.told, item.spent) = (None, false);
                drop(items);
                // The descriptor tells of later events. The item as it was did not want the earlier ones.
                if self.sleepers.are_there() && socket.ready().asked(events as u16 as i16) != 0 {
                    self.sleepers.wake();
                }
                Ok(())
            }
            (libc::EPOLL_CTL_DEL, Some(at)) => {
                items.list.remove(at);
                let removed = self.all.control(op, fd, event);
                drop(items);
                // The socket still counts a thread that sleeps, and cannot wake it any more.
                self.sleepers.wake();
                removed
            }
            (libc::EPOLL_CTL_MOD | libc::EPOLL_CTL_DEL, None) => Err(Errno(libc::ENOENT)),
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Whether it has sockets.
    #[must_use]
    pub fn has_sockets(&self) -> bool {
        !self.items.lock().list.is_empty()
    }

    /// `epoll_wait(2)`: how many events there are. Without a timeout for ever.
    ///
    /// # Errors
    /// As that call's.
    pub fn wait(
        &self,
        events: &mut [libc::epoll_event],
        timeout: Option<Duration>,
    ) -> Result<usize> {
        if events.is_empty() {
            return Err(Errno(libc::EINVAL));
        }
        let begin = Instant::now();
        let deadline = timeout.and_then(|timeout| begin.checked_add(timeout));
        loop {
            let n = self.look(events)?;
            if n > 0 || timeout.is_some_and(|timeout| timeout.is_zero()) {
                return Ok(n);
            }
            if begin.elapsed() >= config().polling_time {
                break;
            }
            std::hint::spin_loop();
        }
        let mut scratch = SCRATCH.try_with(Cell::take).unwrap_or_default();
        let result = self.sleep(events, deadline, &mut scratch);
        scratch.sockets.clear();
        let _ = SCRATCH.try_with(|cell| cell.set(scratch));
        result
    }

    fn sleep(
        &self,
        events: &mut [libc::epoll_event],
        deadline: Option<Instant>,
        scratch: &mut Scratch,
    ) -> Result<usize> {
        let Scratch { sockets, asleep, woken } = scratch;
        loop {
            // Before the list is read: a later change of it wakes the thread.
            let itself = self.sleepers.begin(None);
            sockets.clear();
            sockets.extend(self.items.lock().list.iter().filter_map(|item| item.socket.upgrade()));
            let mut wake = Instant::now().checked_add(config().wake_up_interval);
            asleep.clear();
            let dues = sockets.iter().map(|socket| {
                let (begun, due) = socket.begin_sleep();
                asleep.push(begun);
                due
            });
            for at in dues.chain([deadline]).flatten() {
                wake = Some(wake.map_or(at, |wake| wake.min(at)));
            }
            let asleep = || sockets.iter().zip(asleep.iter().copied());
            let before = self.look(events);
            if !matches!(before, Ok(0)) {
                asleep().for_each(|(socket, asleep)| socket.end_sleep(asleep, false));
                self.sleepers.end(itself, false, None);
                return before;
            }
            let mut set = [libc::pollfd {
                fd: self.all.as_fd().as_raw_fd(),
                events: libc::POLLIN,
                revents: 0,
            }];
            let undo = || {
                give_up(asleep());
                self.sleepers.end(itself, false, None);
            };
            let slept = sleep::wait(&mut set, wake.map(sleep::until), undo);
            woken.clear();
            if matches!(slept, Ok(1..)) {
                woken.resize(sockets.len() + 2, libc::epoll_event { events: 0, u64: 0 });
                let n = self.all.look(woken).unwrap_or(0);
                woken.truncate(n);
            }
            for (socket, asleep) in asleep() {
                let fd = socket.fd() as u64;
                socket.end_sleep(asleep, woken.iter().any(|event| event.u64 == fd));
            }
            self.sleepers.end(itself, false, None);
            slept?;
            let n = self.look(events)?;
            if n > 0 || deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Ok(n);
            }
        }
    }

    /// The events that hold now.
    fn look(&self, events: &mut [libc::epoll_event]) -> Result<usize> {
        let mut n = 0;
        let mut items = self.items.lock();
        let Items { list, next } = &mut *items;
        for _ in 0..list.len() {
            if n == events.len() {
                break;
            }
            *next = if *next + 1 < list.len() { *next + 1 } else { 0 };
            let item = &mut list[*next];
            let Some(socket) = item.socket.upgrade() else { continue };
            let found = item.look(&socket);
            if found != 0 {
                events[n] = libc::epoll_event { events: found, u64: item.data };
                n += 1;
            }
        }
        drop(items);
        Ok(n + self.others.look(&mut events[n..])?)
    }
}

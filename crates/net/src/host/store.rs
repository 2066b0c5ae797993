//! The store of a host: how it is found, checked and kept, and which processes live.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{SealFlags, fcntl_add_seals};
use socket2::Socket;

use super::lock::Owner;
use super::name::{Name, Registry};
use super::pass;
use super::table::{self, ENTRY_BITS, Entry, Fact, Header, Kind, Table};
use crate::shm::{Area, allocate, check_length, is_sealed_memory, memfd};
use crate::sockopt;
use crate::sys::{Uncancelled, above_standard_streams};

/// Datagrams that may be handed to all processes at once.
const AT_ONCE: u32 = 32;
/// The time after which one more may be.
const EACH: Duration = Duration::from_millis(20);
/// Longest wait of a process for others of its host, in seconds. They only have to be scheduled, unless they are
/// stopped, and then the process goes on without them (`a_process_stopped_while_starting_does_not_split_the_host`).
pub const WAIT: Duration = Duration::from_secs(2);
/// Some time slices of a busy machine, in milliseconds: a thread that can run has run by then, as a rule. It bounds waits
/// where it does no harm to go on too soon (`a_name_that_nobody_serves_is_not_waited_for`).
pub const TIME_SLICES: Duration = Duration::from_millis(25);
/// Pause before another look at what another process is about to change and sends no event about, in microseconds. It
/// doubles where many looks may be needed. A process that looks so often takes a hundredth of a processor
/// (`a_full_process_is_tried_ever_less_and_given_up`).
pub const LOOK_AGAIN: Duration = Duration::from_micros(500);
/// A process that has the store without a slot is found by one of this many names.
const KEEPERS: u8 = 16;
/// Seals of the file. It does not shrink, and its writers cannot be locked out by further seals. The journal lets it
/// grow.
const SEALS: SealFlags = SealFlags::SHRINK.union(SealFlags::SEAL);

// Bytes of the file that are locked: one for each slot, then these.
const LOCKS_AT: u64 = 256;
pub(super) const JOURNAL_LOCKS_AT: u64 = 1024;

/// The purpose of a lock of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lock {
    /// The order of the sockets of a port; held for as long as it takes to ask all processes.
    Steering,
    /// Guards the processes of an XRC domain: held for some system calls.
    Xrc,
    /// Guards the adding of entries: held for some system calls.
    Entries,
}

/// Excludes the other processes of this store until it is dropped or its process ends.
#[derive(Debug)]
pub struct LockGuard {
    store: Arc<Store>,
    lock: Lock,
}

/// An entry that exists as long as this value or its process.
#[derive(Debug)]
pub struct Said {
    store: Arc<Store>,
    at: usize,
    slot: u8,
}

/// The memory that the processes of a registry share, as one of them sees it.
#[derive(Debug)]
pub struct Store {
    registry: Registry,
    table: Table,
    /// None where the process may have no such file: then it shares nothing.
    file: Option<File>,
    locks: Owner,
    /// Bytes of the file before the journal's records.
    pub(super) base: u64,
    /// Locks that this process has: to the kernel its own are none.
    taken: [AtomicBool; 3],
    /// The slot of this process, or 0.
    own: AtomicU8,
    /// The process that made this value, and that alone takes its entries back. A forked child shares the file and its
    /// locks.
    owner: u32,
    /// The name by which others find it that have no slot to look at.
    keeper: Option<Socket>,
}

/// Excludes others that start, as far as that is possible.
#[derive(Debug)]
pub(super) struct Start {
    _listener: Option<Socket>,
}

impl Start {
    pub(super) fn begin(registry: &Registry) -> Self {
        let (begin, mut new_since) = (Instant::now(), None);
        loop {
            match registry.listen(Name::Start) {
                Ok(listener) => return Self { _listener: Some(listener) },
                Err(error) if error.kind() != io::ErrorKind::AddrInUse => {
                    tracing::warn!(%error, "starting beside others");
                    break;
                }
                Err(_) => {}
            }
            let holder = registry.connect(Name::Start);
            let is_new = match &holder {
                Ok(_) => false,
                // So many processes wait that its queue is full.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    Self::give_up(registry);
                    break;
                }
                // It is bound, and does not listen yet. Others may have been waited for before.
                Err(_) => true,
            };
            new_since = is_new.then(|| new_since.unwrap_or_else(Instant::now));
            let left = match new_since {
                Some(since) => TIME_SLICES.saturating_sub(since.elapsed()),
                None => WAIT.saturating_sub(begin.elapsed()),
            };
            if left.is_zero() {
                Self::give_up(registry);
                break;
            }
            match holder {
                // The holder accepts nothing: the connection ends with its listener.
                Ok((socket, _)) => sockopt::poll_any([socket.as_fd()].into_iter(), left),
                Err(_) => std::thread::sleep(LOOK_AGAIN),
            }
        }
        Self { _listener: None }
    }

    fn give_up(registry: &Registry) {
        let holder = registry.holder(Name::Start);
        tracing::warn!(holder, "starting beside others: the lock of those who start is taken");
    }
}

impl Store {
    /// The store of a registry, for a process that takes no slot. It is the store that others have, or a new one.
    ///
    /// # Errors
    /// `Unsupported` where another version of this library has it; those of mmap(2).
    pub fn join(registry: &Registry) -> io::Result<Arc<Self>> {
        let _uncancelled = Uncancelled::new();
        let _start = Start::begin(registry);
        let mut store = Self::find(registry)?.map_or_else(|| Self::make(registry), Ok)?;
        let names = (1..=KEEPERS).map(Name::Keeper);
        store.keeper = names.into_iter().find_map(|name| registry.listen(name).ok());
        Ok(Arc::new(store))
    }

    /// The store that others have.
    pub(super) fn find(registry: &Registry) -> io::Result<Option<Self>> {
        let (mut silent, mut living) = (0, Vec::new());
        let names = (1..=255).map(Name::Slot).chain((1..=KEEPERS).map(Name::Keeper));
        for name in names {
            let Ok((socket, who)) = registry.connect(name) else { continue };
            if let Some(store) = Self::find_at(registry, who.pid)? {
                return Ok(Some(store));
            }
            silent += 1;
            if matches!(name, Name::Slot(_)) && !has_ended(who.pid) {
                living.push(socket);
            }
        }
        let found = Self::ask(registry, living)?;
        if found.is_none() && silent > 0 {
            tracing::warn!(silent, "other processes of this user do not hand over what they share");
        }
        Ok(found)
    }

    /// The store of a process, by `/proc`. The process may be stopped, and does not even notice.
    fn find_at(registry: &Registry, pid: i32) -> io::Result<Option<Self>> {
        let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Ok(None) };
        let name = format!("/memfd:{} (deleted)", file_name(registry));
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            // The link is read before, since opening another file may have effects.
            if std::fs::read_link(&path).is_ok_and(|link| link.as_os_str() == &*name)
                && let Ok(file) = OpenOptions::new().read(true).write(true).open(&path)
                && let Some(store) = Self::open(registry, file, Owner::Description)?
            {
                return Ok(Some(store));
            }
        }
        Ok(None)
    }

    /// The store of one of the processes that listen at slots, by a message. While one is silent, the next is asked as
    /// well. All together get [`WAIT`].
    fn ask(registry: &Registry, processes: Vec<Socket>) -> io::Result<Option<Self>> {
        let end = Instant::now() + WAIT;
        let mut asked: Vec<Socket> = Vec::new();
        let mut processes = processes.into_iter();
        loop {
            let next = processes.next();
            let is_last = next.is_none();
            asked.extend(next.filter(|socket| pass::ask(socket).is_ok()));
            let left = end.saturating_duration_since(Instant::now());
            if asked.is_empty() && is_last || left.is_zero() {
                return Ok(None);
            }
            let readable = sockopt::poll_all(&asked, if is_last { left } else { TIME_SLICES });
            for at in readable.into_iter().rev() {
                if let Some(store) = Self::take(registry, &asked.swap_remove(at))? {
                    return Ok(Some(store));
                }
            }
        }
    }

    /// The store that a process gives in its answer, if it gives one.
    fn take(registry: &Registry, socket: &Socket) -> io::Result<Option<Self>> {
        match pass::take(socket) {
            Some((file, pass::Given::Own)) => Self::open(registry, file, Owner::Description),
            // The lock of its description would be the other's.
            Some((file, pass::Given::Shared)) => match reopen(&file) {
                Ok(file) => Self::open(registry, file, Owner::Description),
                Err(_) => Self::open(registry, file, Owner::Process),
            },
            None => Ok(None),
        }
    }

    /// Takes a file for the store if it is one. Its giver is not trusted.
    fn open(registry: &Registry, file: File, locks: Owner) -> io::Result<Option<Self>> {
        if !is_sealed_memory(file.as_fd(), SEALS) {
            return Ok(None);
        }
        let meta = file.metadata()?;
        let is_sound = meta.is_file() && meta.nlink() == 0 && registry.is_own_user(meta.uid());
        if !is_sound {
            return Ok(None);
        }
        let mut header = [0; 16];
        if read_at(&file, 0, &mut header)? < header.len() {
            return Ok(None);
        }
        let entry_bits = match table::parse_header(header) {
            Header::Table { entry_bits } => entry_bits,
            Header::Nonsense => return Ok(None),
            Header::OtherVersion => {
                return Err(io::Error::new(
                    io::ErrorKind::Unsupported,
                    "processes of another version of this library share the port",
                ));
            }
        };
        let len = table::len(entry_bits);
        if meta.len() < len as u64 {
            return Ok(None);
        }
        let area = Area::map_for_children(file.as_fd(), len)?;
        Ok(Some(Self::with(registry, Table::new(area, entry_bits), Some(file), locks)))
    }

    /// The services that processes hold alone, by the open file of a store of this user: for tools that look on from another network
    /// namespace. None if it is no store.
    ///
    /// # Errors
    /// As [`join`](Self::join).
    pub fn held_services(file: File) -> io::Result<Option<Vec<u64>>> {
        let registry = Registry::new("onlooker")?;
        let Some(store) = Self::open(&registry, file, Owner::Description)? else { return Ok(None) };
        let is_held = |e: &Entry| {
            e.fact.kind == Kind::Exclusive && store.table.is_current(e) && store.is_alive(e.slot)
        };
        Ok(Some(store.table.all().filter(is_held).map(|entry| entry.fact.number).collect()))
    }

    /// A new one; of this process alone where it may have no such file.
    pub(super) fn make(registry: &Registry) -> io::Result<Self> {
        let sizes = ENTRY_BITS.rev();
        let fits = |bits: &u32| check_length(table::len(*bits) as u64).is_ok();
        let made = sizes.into_iter().find(fits).ok_or(io::Error::from(io::ErrorKind::FileTooLarge));
        let made = made.and_then(|entry_bits| {
            let name = CString::new(file_name(registry)).unwrap_or_default();
            let file = File::from(memfd(&name)?);
            let len = table::len(entry_bits);
            allocate(file.as_fd(), 0, len)?;
            fcntl_add_seals(&file, SEALS)?;
            Ok((entry_bits, Area::map_for_children(file.as_fd(), len)?, Some(file)))
        });
        let (entry_bits, area, file) = match made {
            Ok(made) => made,
            Err(error) => {
                let why = "this process shares nothing with others of its host but the port, so that requests of other hosts may not find it";
                tracing::warn!(%error, "{why}");
                let entry_bits = *ENTRY_BITS.start();
                (entry_bits, Area::private(table::len(entry_bits))?, None)
            }
        };
        let table = Table::new(area, entry_bits);
        table.begin();
        Ok(Self::with(registry, table, file, Owner::Description))
    }

    /// The place where the entries of a number begin, for fuzzing.
    #[doc(hidden)]
    #[must_use]
    pub fn place_of(&self, number: u64) -> u64 {
        self.table.place_of(number) as u64
    }

    /// Writes a word behind the header, as any process of the user can, for fuzzing.
    #[doc(hidden)]
    pub fn overwrite(&self, at: u64, word: u64) {
        self.table.overwrite(at as usize, word);
    }

    /// The same for records of the journal.
    #[doc(hidden)]
    pub fn overwrite_record(&self, at: u64, byte: u8) {
        if let Some(file) = &self.file {
            let _ = file.write_at(&[byte; 8], self.base + at);
        }
    }

    fn with(registry: &Registry, table: Table, file: Option<File>, locks: Owner) -> Self {
        let base = table.len().next_multiple_of(4096) as u64;
        Self {
            registry: registry.clone(),
            table,
            file,
            locks,
            base,
            taken: [const { AtomicBool::new(false) }; 3],
            own: AtomicU8::new(0),
            owner: std::process::id(),
            keeper: None,
        }
    }

    /// The store of another process that has begun with a `new` store at the same time as this one. Other processes may
    /// have joined either of the two. That of the lower slot counts.
    pub(super) fn older(registry: &Registry, new: &Self, own: u8) -> io::Result<Option<Self>> {
        let id = |store: &Self| {
            let meta = store.file.as_ref()?.metadata().ok()?;
            Some((meta.dev(), meta.ino()))
        };
        for slot in (1..=255).filter(|slot| *slot != own) {
            let Ok((socket, who)) = registry.connect(Name::Slot(slot)) else { continue };
            let other = match Self::find_at(registry, who.pid)? {
                None if !has_ended(who.pid) => Self::ask(registry, vec![socket])?,
                found => found,
            };
            let is_taken =
                |store: &Self| id(store) != id(new) && (slot < own || store.table.is_settled());
            if let Some(other) = other.filter(is_taken) {
                return Ok(Some(other));
            }
        }
        Ok(None)
    }

    /// Its first process has joined it.
    pub(super) fn settle(&self) {
        self.table.settle();
    }

    /// The registry in which its processes find each other.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    pub(super) fn table(&self) -> &Table {
        &self.table
    }

    pub(super) fn file(&self) -> Option<&File> {
        self.file.as_ref()
    }

    /// Whether this is the process that made the value, and no forked child.
    pub(super) fn is_own(&self) -> bool {
        self.owner == std::process::id()
    }

    /// Copies for other processes, each of which needs an open file for itself. The copy is shared where that is
    /// impossible.
    pub(super) fn copy(&self) -> Option<(OwnedFd, pass::Given)> {
        let file = self.file.as_ref()?;
        match reopen(file) {
            Ok(file) => Some((file.into(), pass::Given::Own)),
            Err(_) => Some((file.try_clone().ok()?.into(), pass::Given::Shared)),
        }
    }

    pub(super) fn try_lock_byte(&self, byte: u64) -> bool {
        self.file.as_ref().is_none_or(|file| self.locks.try_lock(file.as_fd(), byte))
    }

    pub(super) fn unlock_byte(&self, byte: u64) {
        if let Some(file) = &self.file {
            self.locks.unlock(file.as_fd(), byte);
        }
    }

    /// Takes a slot, whose name the caller has bound. False if a child of its last owner still has it.
    pub(super) fn take_slot(&self, slot: u8) -> bool {
        if !self.try_lock_byte(slot.into()) {
            return false;
        }
        self.table.enter(slot);
        self.own.store(slot, Ordering::Relaxed);
        true
    }

    pub(super) fn leave_slot(&self, slot: u8) {
        if self.is_own() {
            self.table.leave(slot);
            self.own.store(0, Ordering::Relaxed);
            self.unlock_byte(slot.into());
        }
    }

    /// Whether some process holds a slot. A snapshot: it may end at any time. One system call, if any.
    #[must_use]
    pub fn is_alive(&self, slot: u8) -> bool {
        if slot == self.own.load(Ordering::Relaxed) {
            return slot != 0;
        }
        match &self.file {
            Some(file) => {
                self.table.incarnation(slot) != 0
                    && self.locks.is_locked_by_another(file.as_fd(), slot.into())
            }
            // A private store tells nothing about others.
            None => slot != 0 && self.registry.connect(Name::Slot(slot)).is_ok(),
        }
    }

    /// All slots that some process holds, in ascending order.
    #[must_use]
    pub fn live_slots(&self) -> Vec<u8> {
        (1..=255).filter(|slot| self.is_alive(*slot)).collect()
    }

    /// Adds the counters of each device of this process, which is ending, to those of ended processes; the first 64 of each.
    /// `names` is a number of the names of all. Those of a process with other names are left out.
    pub fn add_ended<C: AsRef<[u64]>>(&self, names: u64, devices: &[C]) {
        let own = self.own.load(Ordering::Relaxed);
        if self.is_own() && own != 0 {
            self.table.add_ended(own, names, devices);
        }
    }

    /// A counter of a device of processes that have ended; 0 where these have other names.
    #[must_use]
    pub fn ended(&self, names: u64, device: usize, index: usize) -> u64 {
        self.table.ended(names, device, index)
    }

    /// Whether the counters of the owner of a slot are among those: it is ending.
    #[must_use]
    pub fn is_counted(&self, slot: u8) -> bool {
        self.table.is_counted(slot)
    }

    /// Whether a datagram of a stranger may be handed to all processes of the host now. A stranger chooses how many come
    /// and whom they reach, so this is the right of the host: [`AT_ONCE`] of them, and one more for each [`EACH`].
    #[must_use]
    pub fn may_tell_all(&self) -> bool {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
        let now = time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64;
        let all = u64::from(AT_ONCE) * EACH.as_nanos() as u64;
        for _ in 0..AT_ONCE {
            let written = self.table.told_all();
            // A time that no process writes is nonsense.
            let used = if written > now + all { now } else { written.max(now) };
            let next = used + EACH.as_nanos() as u64;
            if next > now + all {
                return false;
            }
            if self.table.replace_told_all(written, next) {
                return true;
            }
        }
        // Each change by another process has taken one of the rights.
        false
    }

    /// The slots that processes hold, each with a number that its next owner will not have.
    #[must_use]
    pub fn incarnations(&self) -> HashMap<u8, u32> {
        // A thread's first map takes a random number, which is a cancellation point.
        let _uncancelled = Uncancelled::new();
        let slots = self.live_slots().into_iter();
        slots.map(|slot| (slot, self.table.incarnation(slot))).collect()
    }

    /// The slots of the processes that have `port` open, in ascending order. A private store only knows the slots
    /// that are taken.
    #[must_use]
    pub(crate) fn announced(&self, port: u16) -> Vec<u8> {
        (1..=255).filter(|slot| self.has_port(port, *slot)).collect()
    }

    /// As [`announced`](Self::announced), in the order of opening it.
    pub(crate) fn announced_in_order(&self, port: u16) -> Vec<u8> {
        let mut all = self.announced(port);
        all.sort_by_key(|slot| self.table.order(*slot));
        all
    }

    /// Whether the owner of a slot has `port` open.
    pub(crate) fn has_port(&self, port: u16, slot: u8) -> bool {
        let is_known = self.file.is_some() || slot == self.own.load(Ordering::Relaxed);
        (!is_known || self.table.port(slot) == Some(port)) && self.is_alive(slot)
    }

    /// The `wanted` entries of a number whose owners have not ended.
    pub(super) fn find_entries(
        &self,
        number: u64,
        wanted: impl Fn(&Entry) -> bool,
    ) -> impl Iterator<Item = Entry> {
        let current = self.table.find(number).filter(|entry| self.table.is_current(entry));
        current.filter(wanted).filter(|entry| self.is_alive(entry.slot))
    }

    /// Says something of the owner of `slot`, which is this process. The lock is that of entries.
    pub(super) fn say(
        self: &Arc<Self>,
        fact: Fact,
        slot: u8,
        lock: &LockGuard,
    ) -> io::Result<Said> {
        debug_assert_eq!(lock.lock, Lock::Entries);
        let at = self.table.add(fact, slot, |slot| self.is_alive(slot));
        let at = at.ok_or(io::ErrorKind::StorageFull)?;
        Ok(Said { store: Arc::clone(self), at, slot })
    }

    /// Enters this process as a sharer of `name`.
    ///
    /// # Errors
    /// `TimedOut`, and `StorageFull`.
    pub fn share(self: &Arc<Self>, name: u128) -> io::Result<Said> {
        let _uncancelled = Uncancelled::new();
        let lock = self.lock(Lock::Entries)?;
        self.say(common(name), self.own.load(Ordering::Relaxed), &lock)
    }

    /// The slots of the sharers of `name`.
    #[must_use]
    pub fn sharers(&self, name: u128) -> Vec<u8> {
        let wanted = common(name);
        let all = self.find_entries(wanted.number, |entry| entry.fact == wanted);
        let mut slots: Vec<u8> = all.map(|entry| entry.slot).collect();
        slots.sort_unstable();
        slots.dedup();
        slots
    }

    /// Takes a lock of this store, if it is free.
    pub fn try_lock(self: &Arc<Self>, lock: Lock) -> Option<LockGuard> {
        let taken = &self.taken[lock as usize];
        if taken.swap(true, Ordering::Acquire) {
            return None;
        }
        if self.try_lock_byte(LOCKS_AT + lock as u64) {
            return Some(LockGuard { store: Arc::clone(self), lock });
        }
        taken.store(false, Ordering::Release);
        None
    }

    /// Takes a lock of this store, waiting up to `timeout` for its holder.
    ///
    /// # Errors
    /// `TimedOut`.
    pub fn lock(self: &Arc<Self>, lock: Lock) -> io::Result<LockGuard> {
        self.lock_within(lock, WAIT)
    }

    /// Why a lock is not to be had, for people.
    #[cold]
    fn who_holds_up(&self) -> String {
        let pid = |slot: &u8| self.registry.process_of(*slot);
        let stopped: Vec<_> = self
            .live_slots()
            .iter()
            .filter_map(pid)
            .filter(|&pid| is_stopped(pid))
            .map(|pid| pid.to_string())
            .collect();
        let held =
            "another process of this user holds a lock of the host and does not give it back";
        match stopped.as_slice() {
            [] => held.into(),
            stopped => {
                format!("{held}; stopped (by SIGSTOP or a debugger): {}", stopped.join(", "))
            }
        }
    }

    fn lock_within(self: &Arc<Self>, lock: Lock, timeout: Duration) -> io::Result<LockGuard> {
        let _uncancelled = Uncancelled::new();
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(guard) = self.try_lock(lock) {
                return Ok(guard);
            }
            if Instant::now() >= deadline {
                let what = self.who_holds_up();
                static TIMES: AtomicU64 = AtomicU64::new(0);
                let times = TIMES.fetch_add(1, Ordering::Relaxed) + 1;
                // The caller has it each time. The log has the first, the tenth, the hundredth.
                if 10u64.checked_pow(times.ilog10()) == Some(times) {
                    tracing::warn!(times, "{what}");
                }
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }
}

fn common(name: u128) -> Fact {
    let number = (name >> 64) as u64 ^ (name as u64).rotate_left(32);
    Fact { kind: Kind::Common, number, form: 0, details: name }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if self.store.is_own() {
            self.store.unlock_byte(LOCKS_AT + self.lock as u64);
            self.store.taken[self.lock as usize].store(false, Ordering::Release);
        }
    }
}

impl Said {
    pub(super) fn at(&self) -> usize {
        self.at
    }
}

impl Drop for Said {
    fn drop(&mut self) {
        if self.store.is_own() {
            self.store.table.remove(self.at, self.slot);
        }
    }
}

/// Tells whether the process that made a socket has ended. A child that it forked may have the socket still, and serves nobody.
/// A process of another PID namespace has no number here.
fn has_ended(pid: i32) -> bool {
    // SAFETY: signal 0 is none.
    pid > 0
        && unsafe { libc::kill(pid, 0) } == -1
        && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH)
}

impl Registry {
    fn process_of(&self, slot: u8) -> Option<i32> {
        Some(self.connect(Name::Slot(slot)).ok()?.1.pid)
    }

    /// Whether the process that holds a slot is stopped, by a signal or a debugger.
    pub(crate) fn is_process_stopped(&self, slot: u8) -> bool {
        self.process_of(slot).is_some_and(is_stopped)
    }
}

/// Tells whether a process is stopped (proc(5), `stat`).
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

/// Another open file of the same file.
fn reopen(file: &File) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    Ok(above_standard_streams(file.into())?.into())
}

fn file_name(registry: &Registry) -> String {
    format!("anyverbs-host:{}", registry.prefix())
}

/// Reads up to the end of the file; how many bytes there were.
pub(super) fn read_at(file: &File, at: u64, into: &mut [u8]) -> io::Result<usize> {
    let _uncancelled = Uncancelled::new();
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(done)
}

#[cfg(test)]
mod tests;

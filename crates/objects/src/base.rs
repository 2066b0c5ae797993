//! The base of a device's objects: configuration, tables, memory and clock.
//!
//! Objects hold a [`Core`]. It knows neither links nor queue pairs; what objects need of those above it, they ask
//! through [`Progress`].

mod adaptive_spin;
mod clock;
mod digest;
pub mod directory;
mod pd_numbers;
mod quota;
mod register;
mod waker;

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::mr::{Keepers, Keys, MrTable, Region};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{PKey, Qpn};
use anyverbs_proto::wc::Wc;
use tracing::Level;

use crate::config::Config;
use crate::error::{CreateError, Full, LimitOf, ModifyObjectError};
use crate::features::Feature;
use crate::fork;
use crate::gid::GidTables;
use crate::limits::{self, Bound, DeviceAttr};
use crate::memory::ProcessMemory;
use crate::persona::Persona;
pub use adaptive_spin::{AdaptiveSpin, IS_WORKER};
pub use clock::{DeviceClock, LATE};
pub use digest::Digest;
use directory::Directory;
pub use pd_numbers::PdNumbers;
pub use quota::{Quota, Quotas, Ticket};
pub use register::Register;
pub use waker::Waker;

/// Longest that the device holds up exit(3), in seconds, and once more sockets built on it: a peer that lives has answered
/// by then, and a user who waits still waits (test `device::exit::tests::the_end_of_the_process_is_not_delayed_long` of `anyverbs`).
pub const AT_EXIT: Duration = Duration::from_secs(1);

/// Interval, in seconds, of what is looked after while there is some of it: processes that may have ended, memory of them that
/// is still mapped, peers that were asked in vain. A look takes some system calls for each (tests
/// `gsi::tests::neighbours` and `records::tests::it_is_tried_again_to_join` of `anyverbs-cm`,
/// `pace::tests::a_sender_without_receives_asks_again_and_gives_up` of `anyverbs-links`).
pub const HOUSEKEEPING: Duration = Duration::from_secs(1);

/// The time, in microseconds, within which a program that is awake answers a message, if it answers at once. A peer that looks
/// for the answer need not sleep, and the answer carries the ACK (tests
/// `a_waiting_thread_looks_for_a_while_and_then_sleeps` and `an_ack_that_a_reply_may_carry_waits_for_it` of
/// `anyverbs-transport`; the rows "events" in `docs/performance.md`).
pub const PROMPT_REPLY: Duration = Duration::from_micros(60);

/// "Never", as a deadline in nanoseconds.
pub const NEVER: u64 = u64::MAX;

/// The part of the device that every object holds.
pub struct Core {
    /// The configuration of the process.
    pub config: Config,
    /// Limits and capabilities of all devices of the process together.
    pub attr: DeviceAttr,
    /// Those of the device of each port ([`Core::attr_of`]).
    pub attrs: Box<[DeviceAttr]>,
    /// The process's slot of the host.
    pub slot: u8,
    /// Addresses.
    pub gids: GidTables,
    /// Memory keys.
    pub mrs: MrTable,
    /// Copies from and to the memory of programs.
    pub memory: ProcessMemory,
    /// The counters of each port ([`Core::counters_of`]).
    pub counters: Box<[Counters]>,
    /// Objects that may still be made, of all devices together.
    pub quotas: Quotas,
    /// Those of each device, at the place of its first port ([`Core::take`]).
    pub quotas_of: Box<[Quotas]>,
    /// The completion queues.
    pub cqs: Register,
    /// The machines' clock.
    pub clock: DeviceClock,
    /// Numbers of protection domains.
    pub pd_numbers: PdNumbers,
    /// The directory of what other processes of this host may reach without a message; `None` where all goes by messages.
    pub directory: Option<Directory>,
    /// For each port whether its device has failed for good ([`Core::fail`]).
    pub failed: Box<[AtomicBool]>,
    /// Set before the first object is made.
    pub progress: OnceLock<&'static dyn Progress>,
}

/// The services that objects ask of the rooms above them.
pub trait Progress: Sync {
    /// A poll found nothing: does what the network and the clock ask for. Whether that was next to nothing. Completions
    /// of the queue that is polled may go straight `into` the caller's room.
    fn poll(&'static self, into: Option<&mut dyn Caller>) -> bool;

    /// The program is about to sleep: what it owes leaves, and the worker serves it from now on.
    fn end_polling(&'static self);

    /// Receives until `found` says that there is an event of the channel whose descriptor is given. False: the caller
    /// waits at the descriptor, and calls [`end_wait`](Self::end_wait) then.
    ///
    /// # Errors
    /// That of poll(2).
    fn wait_for_event(
        &'static self,
        spin: &AdaptiveSpin,
        channel: BorrowedFd<'_>,
        found: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool>;

    /// The caller waits no longer.
    fn end_wait(&'static self);

    /// Does what had to wait until no object is locked.
    fn after_unlock(&'static self);

    /// Queue pairs release the regions that they keep in use.
    fn release_regions(&'static self, of: Keepers);

    /// Has `what` called at a time.
    fn call_at(&'static self, at: Time, what: Weak<dyn Timed>);

    /// Has the worker receive what comes to some sockets for frames, two at most; once.
    ///
    /// # Errors
    /// That of epoll_ctl(2).
    fn watch(&'static self, fds: Vec<BorrowedFd<'static>>) -> io::Result<()>;

    /// A completion queue lost a completion of a queue pair: that one and all that use the queue fail when the present
    /// lock is released.
    fn note_overrun(&'static self, cq: Arc<dyn Any + Send + Sync>, qpn: Qpn);

    /// Has the log say a line as soon as nothing is locked. Of many lines in a second, most are counted instead.
    fn say(&'static self, level: Level, line: String);

    /// As [`say`](Self::say), of lines that have a bound of their own.
    fn say_each(&'static self, level: Level, line: String);

    /// The program is about to see a completion that failed, or an event: the log says why. A program may end at once.
    fn explain_failures(&'static self);
}

/// The caller of a poll that found nothing at first. While it receives from the network, completions of its queue go
/// straight to it: the queue's lock and its ring are not touched.
pub trait Caller {
    /// Gives it a completion of the queue at this address, if it polls that, none waits there, and nobody else is to be
    /// told. The slots of a send are the giver's to return.
    fn take(&mut self, cq: *const (), wc: &Wc) -> bool;

    /// The address of the queue that it polls.
    fn queue(&self) -> *const ();
}

/// Something that is called at a time that it asked for.
pub trait Timed: Send + Sync {
    /// The time has come.
    fn on_time(self: Arc<Self>, now: Time);
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl Core {
    /// Whether this is the process's own, and not its parent's.
    #[inline]
    pub fn is_current(&'static self) -> bool {
        fork::is_current(self)
    }

    /// A device of the process fails for good: it takes no new objects.
    pub fn fail(&self, device: usize) {
        if let Some(failed) = self.failed.get(device) {
            failed.store(true, Ordering::Release);
        }
    }

    /// Whether a device has failed for good.
    pub fn has_failed(&self, device: usize) -> bool {
        self.failed.get(device).is_some_and(|failed| failed.load(Ordering::Acquire))
    }

    /// Refuses a new object on a device that has failed, or is the parent process's.
    ///
    /// # Errors
    /// [`CreateError::Forked`], [`CreateError::Failed`].
    pub fn may_make(&'static self, device: usize) -> Result<(), CreateError> {
        if !self.is_current() {
            return Err(CreateError::Forked);
        }
        if self.has_failed(device) { Err(CreateError::Failed) } else { Ok(()) }
    }

    /// The clock of the machines.
    #[inline]
    pub fn now(&self) -> Time {
        self.clock.now()
    }

    /// The place of a device's port among those of all devices, by its number from 1. None if it has no such port.
    pub fn port(&self, device: usize, number: u8) -> Option<usize> {
        let has = (1..=self.attr_of(device).phys_port_cnt).contains(&number);
        has.then(|| device + usize::from(number) - 1)
    }

    /// Why a device does not have a port.
    #[cold]
    pub fn no_port(&self, device: usize, number: u8) -> CreateError {
        let most = self.attr_of(device).phys_port_cnt.into();
        CreateError::OutOfRange { what: "port_num", value: number.into(), least: 1, most }
    }

    /// The limits and capabilities of a device.
    pub fn attr_of(&self, device: usize) -> &DeviceAttr {
        self.attrs.get(device).unwrap_or(&self.attr)
    }

    /// A place for a new object of a device.
    ///
    /// # Errors
    /// The limit of the device or of the process that is reached.
    pub fn take(&'static self, device: usize, kind: fn(&Quotas) -> &Quota) -> Result<Ticket, Full> {
        let of_device = kind(&self.quotas_of[device]);
        Ticket::of(of_device, kind(&self.quotas)).map_err(|full| {
            let device = std::ptr::eq(full, of_device).then_some(device);
            self.full(device, full.what, full.limit, full.max)
        })
    }

    /// A limit that is reached, of a device or of all together. Of queue pairs, a device may have as many as the process.
    #[cold]
    pub fn full(
        &'static self,
        device: Option<usize>,
        what: &'static str,
        limit: &'static str,
        max: u32,
    ) -> Full {
        let port = device.and_then(|device| self.config.ports.get(device));
        let of_process = self.config.max_qp.as_ref().filter(|all| {
            let own = port.and_then(|port| port.limits.max_qp());
            limit == "max_qp" && own.is_none_or(|own| own > all.number)
        });
        let device = port.filter(|_| of_process.is_none()).map(|port| &*port.name);
        Full { device, what, limit: of_process.map_or(limit, |all| &all.named_by), max }
    }

    /// The vendor's device that a device looks like.
    pub fn persona_of(&self, device: usize) -> Option<&Persona> {
        self.config.ports.get(device)?.persona.as_deref()
    }

    /// The P_Keys of a port.
    pub fn pkeys_of(&self, port: usize) -> &[PKey] {
        self.config.ports.get(port).map_or(&[PKey::DEFAULT], |port| &port.pkeys)
    }

    /// Refuses a feature that a device's persona lacks.
    ///
    /// # Errors
    /// [`CreateError::Persona`].
    pub fn offers(&self, device: usize, feature: Feature) -> Result<(), CreateError> {
        if !self.attr_of(device).lacks.has(feature) {
            return Ok(());
        }
        let persona = self.persona_name(device).to_owned();
        Err(CreateError::Persona { persona, lacks: feature })
    }

    /// Refuses a value beyond a limit of the device.
    ///
    /// # Errors
    /// [`CreateError::PersonaLimit`] if the engine holds more than the persona, [`CreateError::Limit`].
    pub fn within(
        &self,
        device: usize,
        what: &'static str,
        value: u32,
        bound: Bound,
    ) -> Result<(), CreateError> {
        let limit = (bound.of)(self.attr_of(device));
        if value <= limit {
            return Ok(());
        }
        let of = Some(LimitOf { device: self.name_of(device).to_owned(), limit: bound.name });
        let has_it = |persona: &&Persona| {
            let promised = (bound.of)(&persona.apply(limits::DEFAULT));
            promised == limit && promised != (bound.of)(&limits::DEFAULT)
        };
        Err(match self.persona_of(device).filter(has_it) {
            None => CreateError::Limit { what, value, limit, of },
            Some(persona) => {
                let persona = persona.name.clone();
                CreateError::PersonaLimit { persona, what, value, limit, of }
            }
        })
    }

    /// As [`within`](Self::within), for an object that is changed. It has one at least.
    ///
    /// # Errors
    /// [`ModifyObjectError::OutOfRange`] for 0, [`ModifyObjectError::Limit`].
    pub fn changes_within(
        &'static self,
        device: usize,
        what: &'static str,
        value: u32,
        bound: Bound,
    ) -> Result<(), ModifyObjectError> {
        let limit = (bound.of)(self.attr_of(device));
        // C's numbers may have a sign.
        if value.cast_signed() <= 0 {
            return Err(ModifyObjectError::OutOfRange { what, value, least: 1, most: limit });
        }
        if value <= limit {
            return Ok(());
        }
        let (name, device) = (bound.name, self.name_of(device));
        Err(ModifyObjectError::Limit { what, value, limit, name, device })
    }

    /// The name of a device.
    pub fn name_of(&self, device: usize) -> &str {
        self.config.ports.get(device).map_or("", |port| &port.name)
    }

    /// The name of a device's persona; empty without one.
    pub(crate) fn persona_name(&self, device: usize) -> &str {
        self.persona_of(device).map_or("", |persona| &persona.name)
    }

    /// The counters of a port.
    #[inline]
    pub fn counters_of(&self, port: usize) -> &Counters {
        self.counters.get(port).unwrap_or(&self.counters[0])
    }

    /// Adds to a counter of a port.
    pub fn count(&self, port: usize, counter: Counter, n: u64) {
        self.counters_of(port).add(counter, n);
    }

    /// Adds to a counter of what belongs to no device, which the first one shows.
    pub fn count_for_none(&self, counter: Counter, n: u64) {
        self.count(0, counter, n);
    }

    /// A counter of all devices together.
    pub fn total(&self, counter: Counter) -> u64 {
        self.counters.iter().map(|of| of.read(counter)).fold(0, u64::wrapping_add)
    }

    /// Lets peers see a region.
    pub(crate) fn publish_region(&self, keys: Keys, region: &Region) {
        if let Some(directory) = &self.directory {
            directory.publish_region(keys, region);
        }
    }

    /// No copy touches a region any more when this returns.
    pub(crate) fn withdraw_region(&self, keys: Keys) {
        if let Some(directory) = &self.directory {
            directory.withdraw_region(keys);
        }
    }

    /// Waits until no peer copies by what was taken back from the directory before.
    pub fn settle_copies(&self) {
        if let Some(directory) = &self.directory {
            directory.settle();
        }
    }

    /// The rooms above.
    #[inline]
    pub fn progress(&self) -> &'static dyn Progress {
        *self.progress.get().expect("set before the first object is made")
    }
}

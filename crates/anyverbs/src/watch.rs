//! Looks at the device's processes from outside: what `anyverbs top` shows.
//!
//! A process that is looked at tells what it does on its own thread. Its program does not notice it. It tells that to processes of its user
//! only, and nothing while nobody looks.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use anyverbs_net::host;
pub use anyverbs_net::host::MAX_ORDER;
use anyverbs_net::{AddressMonitor, Registry};
use anyverbs_objects::config::Config;
use anyverbs_objects::gid::{GidEntry, GidTables};
use anyverbs_objects::persona::Persona;
pub use anyverbs_page::{INTERVAL, Snapshot, Unreadable};
use anyverbs_proto::counters::Counter;

pub use crate::abandoned::Membership;
use crate::device::{PortState, guid, lid_of};

/// The addresses of a configuration's ports, as a process has them that began when this did. They follow those of the host.
#[derive(Debug)]
pub struct Addresses {
    monitor: AddressMonitor,
    gids: GidTables,
    personas: Vec<Option<Arc<Persona>>>,
}

/// The addresses of a port, and what they decide.
#[derive(Clone, Debug)]
pub struct OfPort {
    /// The entries of its GID table.
    pub gids: Vec<GidEntry>,
    /// Its state, if no script of faults says another.
    pub state: PortState,
    /// Its LID.
    pub lid: u16,
}

impl Addresses {
    /// Those of now.
    ///
    /// # Errors
    /// Those of listing the host's interfaces, and of watching them.
    pub fn new(config: &Config) -> io::Result<Self> {
        // Before they are read, so that none that changes meanwhile is missed.
        let monitor = AddressMonitor::new()?;
        let gids = GidTables::of(config, &config.device_attrs(guid))?;
        let personas = config.ports.iter().map(|port| port.persona.clone()).collect();
        Ok(Self { monitor, gids, personas })
    }

    /// Reads them anew. Until this or the host's addresses change again, its descriptor is not readable.
    ///
    /// # Errors
    /// Those of listing the host's interfaces, and of watching them.
    pub fn follow(&self) -> io::Result<()> {
        self.monitor.drain()?;
        self.gids.refresh().map(drop)
    }

    /// Those of each port of each device, in the order of the configuration.
    pub fn ports(&self) -> impl Iterator<Item = OfPort> {
        self.personas.iter().enumerate().map(|(number, persona)| OfPort {
            gids: self.gids.listed(number),
            state: PortState::of(&self.gids, number),
            lid: lid_of(&self.gids, number, persona.as_deref()),
        })
    }
}

/// Readable when addresses of the host have changed.
impl AsFd for Addresses {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.monitor.as_fd()
    }
}

/// Looks at the processes of this user that share a UDP port.
#[derive(Debug)]
pub struct Watcher(host::Watcher);

/// Tells a process of this user that shares a UDP port to change its faults: a script to add, `clear` or `list`. Returns its answer, or the
/// reason why it does not do that.
///
/// # Errors
/// `TimedOut` if it does not answer within `patience`; `NotFound` if it has ended.
pub fn change_faults(
    (registry, port): (&str, u16),
    process: &Seen,
    order: &str,
    patience: Duration,
) -> io::Result<Result<String, String>> {
    let pid = i32::try_from(process.pid).map_err(|_| io::ErrorKind::NotFound)?;
    let registry = Registry::of_port(registry, port)?;
    let answer = host::tell(&registry, (process.slot, pid), order.as_bytes(), patience)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match answer.split_first() {
        Some((b'+', done)) => Ok(Ok(text(done))),
        Some((b'-', why)) => Ok(Err(text(why))),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

/// A process, as it was seen last.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Its number here; 0 where it has none, in another PID namespace.
    pub pid: u32,
    /// The top byte of its queue pair numbers.
    pub slot: u8,
    /// Its last page, if it has told any.
    pub page: Option<Result<Snapshot, Unreadable>>,
    /// The age of that.
    pub age: Duration,
    /// The reason why it does not answer, if so.
    pub condition: Condition,
}

/// The condition of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// It has told something just now.
    Fresh,
    /// It is stopped, by a signal or a debugger.
    Stopped,
    /// It does not run, or its worker thread does not get the processor.
    Silent,
    /// It may have no page: a limit or a filter of the process forbids it.
    Refuses,
}

impl Watcher {
    /// Looks at the processes of a [registry and a port](crate::Details).
    ///
    /// # Errors
    /// `InvalidInput` for a bad name.
    pub fn new(registry: &str, port: u16) -> io::Result<Self> {
        Ok(Self(host::Watcher::new(Registry::of_port(registry, port)?)))
    }

    /// Ends its connections. The next look makes them anew.
    pub fn rest(&mut self) {
        self.0.rest();
    }

    /// Looks now, and waits up to `patience` for processes that do not answer at once.
    pub fn look(&mut self, patience: Duration) -> Vec<Seen> {
        let seen = self.0.look(patience);
        seen.iter()
            .map(|seen| Seen {
                pid: seen.pid.try_into().unwrap_or(0),
                slot: seen.slot,
                page: seen.contents.map(Snapshot::decode),
                age: seen.age,
                condition: match seen.contents {
                    // Its process has missed several.
                    Some(_) if seen.age < 6 * INTERVAL => Condition::Fresh,
                    _ if is_stopped(seen.pid) => Condition::Stopped,
                    _ if seen.refuses => Condition::Refuses,
                    _ => Condition::Silent,
                },
            })
            .collect()
    }
}

/// Tells whether a process is stopped (proc(5), `stat`).
fn is_stopped(pid: i32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    matches!(state, Some('T' | 't'))
}

/// The counters of the devices of this host and user: of all its processes, those that have ended as well. They never fall. A
/// device is the same in two processes if its place among those of its process is.
///
/// A process that ends leaves its counters in the memory that the processes of the host share. One that is killed cannot. What it had
/// when it was seen last is kept here. When the last process has ended that has this memory, a launcher among them, the
/// counters begin anew.
#[derive(Debug)]
pub struct Totals {
    host: Membership,
    /// The counters of living processes when they were seen last, and the incarnations of their slots.
    living: HashMap<(u32, u8), (Values, Option<u32>)>,
    ended: Values,
    /// The part of those that were killed.
    killed: Values,
    shown: Values,
}

/// By device.
type Values = Vec<[u64; Counter::ALL.len()]>;

impl Totals {
    /// Counts for so many devices of the processes of this host.
    #[must_use]
    pub fn new(host: Membership, devices: usize) -> Self {
        let zeros = vec![[0; Counter::ALL.len()]; devices];
        let (ended, killed, shown) = (zeros.clone(), zeros.clone(), zeros);
        Self { host, living: HashMap::new(), ended, killed, shown }
    }

    /// The counters of each device now, where these processes live.
    pub fn update(
        &mut self,
        seen: &[Seen],
    ) -> impl Iterator<Item = impl Iterator<Item = (&'static str, u64)>> {
        let (store, devices) = (&self.host.0, 0..self.shown.len());
        let of_ended = |device| std::array::from_fn(|n| store.ended(Counter::DIGEST, device, n));
        let ended: Values = devices.clone().map(of_ended).collect();
        let of_page = |page: &Snapshot| -> Values {
            let value = |device, n: usize| page.counter_of(device, Counter::ALL[n].name());
            devices.clone().map(|device| std::array::from_fn(|n| value(device, n))).collect()
        };
        let owners = store.incarnations();
        let mut past = std::mem::take(&mut self.living);
        let mut sum = ended.clone();
        for process in seen {
            let key = (process.pid, process.slot);
            let known = past.remove(&key);
            let values = match &process.page {
                Some(Ok(page)) => Some(of_page(page)),
                _ => known.map(|(values, _)| values),
            };
            // One that has left its counters and is not gone yet counts once. This is looked at after they were read.
            if let Some(values) = values.filter(|_| !store.is_counted(process.slot)) {
                add(&mut sum, &values);
                self.living.insert(key, (values, owners.get(&process.slot).copied()));
            }
        }
        // The counters that gone processes had, and did not leave. The mark of a slot tells until another process has it.
        let zeros = vec![[0; Counter::ALL.len()]; devices.len()];
        let (mut left, mut unclear) = (zeros.clone(), zeros);
        for ((_, slot), (values, owner)) in past {
            if owners.get(&slot).is_some_and(|now| Some(*now) != owner) {
                add(&mut unclear, &values);
            } else if store.is_counted(slot) {
                add(&mut left, &values);
            } else {
                add(&mut self.killed, &values);
            }
        }
        for device in devices {
            for (n, unclear) in unclear[device].iter().enumerate() {
                let left = ended[device][n]
                    .saturating_sub(self.ended[device][n])
                    .saturating_sub(left[device][n]);
                let killed = &mut self.killed[device][n];
                *killed = killed.saturating_add(unclear.saturating_sub(left));
            }
        }
        self.ended = ended;
        add(&mut sum, &self.killed);
        for (shown, now) in self.shown.iter_mut().flatten().zip(sum.iter().flatten()) {
            *shown = (*now).max(*shown);
        }
        let named = |of: [u64; Counter::ALL.len()]| {
            Counter::ALL.iter().zip(of).map(|(counter, value)| (counter.name(), value))
        };
        self.shown.clone().into_iter().map(named)
    }
}

fn add(sum: &mut Values, values: &Values) {
    for (sum, value) in sum.iter_mut().flatten().zip(values.iter().flatten()) {
        // Another process wrote it.
        *sum = sum.saturating_add(*value);
    }
}

#[cfg(test)]
mod tests {
    use anyverbs_net::Slot;

    use super::*;

    fn seen(slot: &Slot, pid: u32, packets: u64) -> Seen {
        let counter =
            anyverbs_page::Counter { name: Counter::ALL[0].name().into(), value: packets };
        let page = Snapshot { counters: vec![counter], ..Snapshot::default() };
        let (page, age, condition) = (Some(Ok(page)), Duration::ZERO, Condition::Fresh);
        Seen { pid, slot: slot.number(), page, age, condition }
    }

    #[test]
    fn a_killed_process_counts_though_another_ends_at_the_same_time() {
        let name = format!("anyverbs-totals-{}", std::process::id());
        let registry = Registry::of_port(&name, 4791).unwrap();
        let mut totals = Totals::new(Membership::join(&name, 4791).unwrap(), 1);
        let mut first = |seen: &[Seen]| totals.update(seen).next().unwrap().next().unwrap().1;
        let [killed, ends] = [(); 2].map(|()| Slot::claim_in(&registry).unwrap());
        assert_eq!(first(&[seen(&killed, 1, 10), seen(&ends, 2, 100)]), 110);
        // It has counted much since.
        ends.store().add_ended(Counter::DIGEST, &[[5000]]);
        drop((killed, ends));
        assert_eq!(first(&[]), 5010);
        // The counters of another version of the library are none of these.
        let other = Slot::claim_in(&registry).unwrap();
        other.store().add_ended(Counter::DIGEST + 2, &[[1 << 40]]);
        drop(other);
        assert_eq!(first(&[]), 5010);
    }
}

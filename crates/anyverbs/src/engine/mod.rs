//! The engine: one in a process, started by the first open, shared by all contexts.
//!
//! Locks, in the order in which they may be taken: control of multicast groups, queue pair, SRQ, CQ, then the queues of
//! channels and asynchronous events. No thread holds the locks of two queue pairs. The receive path's lock is taken
//! before any of them. The lock of the connection manager comes after the receive path's, too, and before the queues of
//! event channels; it and those of queue pairs are never held together. Before it comes that of its sender or that of its
//! neighbours, after it that of what lingers ([`gsi`]). The locks of timers, paths, the in-process link, requests that wait
//! for a listener, the services of the host (`anyverbs_net::services`)
//! and the lists of queue pairs that wait are leaves: nothing is locked under
//! them, but that the table of queue pairs may attach a new one to its CQ.

mod arrivals;
mod datagrams;
mod deliver;
pub(crate) mod env;
mod exit;
pub(crate) mod gsi;
mod ip_ids;
mod moderation;
mod owed;
pub(crate) mod pace;
pub(crate) mod path;
mod progress;
mod qp_table;
mod ring;
mod srq_table;
pub(crate) mod timers;
pub(crate) mod waiter;
mod worker;
pub(crate) mod xrc;

use std::collections::{HashSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use anyverbs_net::{CoarseClock, PortOptions, Registry, Services, Slot, UdpPort};
use anyverbs_proto::cm::CmConfig;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::mr::MrTable;
use anyverbs_proto::qp::attr::ModifyLimits;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Mtu, Qpn};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::async_event::{AsyncEventKind, EventElement};
use crate::config::Config;
use crate::context::ContextCell;
use crate::cq::CqCell;
use crate::device::{Details, PortAttr, PortState, guids};
use crate::error::OpenError;
use crate::fork;
use crate::gid::GidTable;
use crate::lid;
use crate::limits::{self, DeviceAttr};
use crate::link::inproc::Inproc;
use crate::link::shm::Shm;
use crate::link::udp::BatchPool;
use crate::memory::ProcessMemory;
use crate::multicast::Groups;
use crate::raw::switch::Switch;
use crate::xrcd::Domains;
use exit::Farewell;
use gsi::Gsi;
use moderation::Moderated;
use path::Paths;
use progress::RxState;
use qp_table::QpTable;
use srq_table::SrqTable;
use timers::Timers;
use worker::Shared;
use xrc::Sharing;

/// How many objects of a kind the device holds at most, and has.
#[derive(Debug)]
pub(crate) struct Quota {
    max: u32,
    used: AtomicU32,
}

/// One object's place in its quota, given back by drop.
#[derive(Debug)]
pub(crate) struct Ticket(&'static Quota);

impl Quota {
    fn new(max: u32) -> Self {
        Self { max, used: AtomicU32::new(0) }
    }

    pub(crate) fn take(&'static self) -> Option<Ticket> {
        let used = self
            .used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < self.max).then_some(n + 1));
        // A ticket that is made is given back: not before there is a place.
        used.is_ok().then(|| Ticket(self))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.used.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug)]
pub(crate) struct Quotas {
    pub(crate) pd: Quota,
    pub(crate) mr: Quota,
    pub(crate) mw: Quota,
    pub(crate) cq: Quota,
    pub(crate) srq: Quota,
    pub(crate) xrcd: Quota,
    pub(crate) wq: Quota,
    pub(crate) ind_table: Quota,
    pub(crate) ah: Quota,
    pub(crate) qp: Quota,
    pub(crate) comp_cntr: Quota,
}

/// A CQ that has overrun, and the queue pair whose completion was lost.
struct Overrun {
    cq: Arc<CqCell>,
    qpn: Qpn,
}

/// Numbers of protection domains, but for the slot in their top byte.
#[derive(Debug, Default)]
struct PdNumbers {
    last: u32,
    live: HashSet<u32>,
}

impl PdNumbers {
    /// The greatest: with the last slot no number of all ones, which is no domain's.
    const LAST: u32 = (1 << 24) - 2;
}

pub(crate) struct Engine {
    pub(crate) config: Config,
    pub(crate) attr: DeviceAttr,
    pub(crate) port: UdpPort,
    pub(crate) slot: u8,
    pub(crate) gids: GidTable,
    pub(crate) mrs: MrTable,
    pub(crate) memory: ProcessMemory,
    counters: Counters,
    pub(crate) qps: QpTable,
    pub(crate) xrc_srqs: SrqTable,
    pub(crate) xrc_domains: Domains,
    /// With processes that have the same domains.
    pub(crate) sharing: Sharing,
    pub(crate) gsi: Gsi,
    /// Who listens on this host.
    pub(crate) services: Arc<Services>,
    pub(crate) groups: Groups,
    /// Of raw packets.
    pub(crate) switch: Switch,
    pub(crate) quotas: Quotas,
    pub(crate) inproc: Inproc,
    /// The link to other processes of this user, unless it is switched off.
    pub(crate) shm: Option<Shm>,
    pub(crate) batches: BatchPool,
    pub(crate) paths: Paths,
    timers: Timers,
    rx: Mutex<RxState>,
    /// Queue pairs that owe an ACK to a peer in another process, or did.
    owed: Mutex<VecDeque<Qpn>>,
    /// How many of them do, and how often one began to: see [`owed::Owed`].
    owing: AtomicU64,
    /// Those of them that some thread is seeing to. Locked after `owed`.
    acking: Mutex<Vec<Qpn>>,
    /// CQs that have overrun, whose queue pairs must fail.
    overrun: Mutex<Vec<Overrun>>,
    any_overrun: AtomicBool,
    /// CQs whose channel is told later.
    moderated: Moderated,
    contexts: Mutex<Vec<Weak<ContextCell>>>,
    pds: Mutex<PdNumbers>,
    start: Instant,
    /// Begun with `start`.
    pub(crate) coarse: CoarseClock,
    worker: Shared,
    farewell: Farewell,
    /// When the socket was last found empty with no ACK owed, in nanoseconds.
    rx_empty_at: AtomicU64,
    /// Datagrams that the kernel dropped, as last read.
    kernel_drops: AtomicU64,
    /// Packets that the kernel would not send.
    pub(crate) send_drops: AtomicU64,
    /// Empty polls: a program that polls does the worker's work.
    lease: AtomicU64,
    /// Threads that wait for a completion event.
    waiters: AtomicU32,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl From<std::io::Error> for OpenError {
    fn from(source: std::io::Error) -> Self {
        Self::System { what: "map a page", source }
    }
}

impl Engine {
    /// This process's engine, started where there is none.
    pub(crate) fn current() -> Result<&'static Self, OpenError> {
        let mut fresh = None;
        let engine = fork::singleton(|| {
            let engine = Self::new()?;
            let worker = worker::spawn()
                .map_err(|source| OpenError::System { what: "start a thread", source })?;
            fresh = Some(worker);
            Ok::<_, OpenError>(engine)
        })?;
        if let Some(worker) = fresh {
            worker.send(engine).expect("the worker waits for its engine");
            engine.watch_for_exit();
        }
        Ok(engine)
    }

    /// This process's engine, if there is one.
    pub(crate) fn running() -> Option<&'static Self> {
        fork::current()
    }

    /// Whether this engine is this process's own, and not its parent's.
    #[inline]
    pub(crate) fn is_current(&'static self) -> bool {
        fork::is_current(self)
    }

    fn new() -> Result<Self, OpenError> {
        let config = Config::load()?;
        // Before they are read, so that none that changes meanwhile is missed.
        let monitor = worker::watch_addresses();
        let gids = GidTable::new(&config.interfaces)
            .map_err(|source| OpenError::System { what: "list the network interfaces", source })?;
        let unusable = gids.unusable();
        if gids.is_empty() {
            return Err(if unusable.is_empty() {
                OpenError::NoInterface
            } else {
                OpenError::Interfaces(unusable.join("; "))
            });
        }
        for reason in unusable {
            tracing::warn!("ANYVERBS_INTERFACES: {reason}");
        }
        let registry = Registry::of_port(&config.registry, config.udp_port);
        let slot = registry.and_then(|r| Slot::claim_in(&r)).map_err(OpenError::Slot)?;
        let slot = Arc::new(slot);
        let number = slot.number();
        // Before others can know the slot: who sends here by UDP has found nobody at the link.
        let (shm, poller) = config
            .shm
            .then(|| Shm::new(&slot, config.direct))
            .transpose()
            .inspect_err(|error| tracing::warn!(%error, "no link through shared memory"))
            .ok()
            .flatten()
            .unzip();
        let services = Services::new(Arc::clone(&slot));
        let port = UdpPort::open(PortOptions {
            slot: Some(slot),
            steer_offset: 5, // top byte of the BTH's destination QPN
            steer_by_kind: Some(gsi::STEERING),
            probe_byte: 0xff, // an opcode of the manufacturers' range that this device does not use
            receive_buffer: config.receive_buffer,
            gso: config.gso,
            ..PortOptions::new(config.udp_port)
        })?;
        if let Some(path) = &config.capture {
            let capture = anyverbs_net::capture::Capture::create(path)
                .map_err(|source| OpenError::System { what: "create the capture file", source })?;
            port.set_capture(Arc::new(capture));
        }
        let rx = RxState::new(&config, poller)
            .map_err(|source| OpenError::System { what: "map receive buffers", source })?;
        let worker = Shared::new(&port, shm.as_ref(), monitor)
            .map_err(|source| OpenError::System { what: "make an epoll set", source })?;
        let mut rng = StdRng::from_os_rng();
        let (node_guid, sys_image_guid) = guids();
        let attr =
            DeviceAttr { node_guid, sys_image_guid, max_qp: config.max_qp, ..limits::DEFAULT };
        tracing::info!(slot = number, port = config.udp_port, "device {} is open", config.device);
        Ok(Self {
            attr,
            slot: number,
            gids,
            mrs: MrTable::with_rng(attr.max_mr + attr.max_mw, StdRng::from_rng(&mut rng)),
            memory: ProcessMemory::new(),
            counters: Counters::default(),
            qps: QpTable::new(number, rng.random()),
            xrc_srqs: SrqTable::new(number, rng.random()),
            xrc_domains: Domains::default(),
            sharing: Sharing::default(),
            gsi: Gsi::new(
                CmConfig {
                    slot: number,
                    early_repeats: true,
                    records: true,
                    first_id: rng.random(),
                    ca_guid: node_guid,
                    ack_delay: attr.local_ca_ack_delay,
                    max_rd_atomic: attr.max_qp_rd_atom.try_into().unwrap_or(u8::MAX),
                    ..CmConfig::default()
                },
                rng.random(),
                port.kept() > 0,
            ),
            services,
            groups: Groups::default(),
            switch: Switch::default(),
            quotas: Quotas {
                pd: Quota::new(attr.max_pd),
                mr: Quota::new(attr.max_mr),
                mw: Quota::new(attr.max_mw),
                cq: Quota::new(attr.max_cq),
                srq: Quota::new(attr.max_srq),
                // The device has no number of its own for them.
                xrcd: Quota::new(attr.max_pd),
                wq: Quota::new(attr.max_wq),
                ind_table: Quota::new(attr.max_rwq_ind_tables),
                ah: Quota::new(attr.max_ah),
                qp: Quota::new(attr.max_qp),
                comp_cntr: Quota::new(attr.max_comp_cntr),
            },
            inproc: Inproc::default(),
            shm,
            batches: BatchPool::default(),
            paths: Paths::default(),
            timers: Timers::new(),
            rx: Mutex::new(rx),
            owed: Mutex::new(VecDeque::with_capacity(64)),
            owing: AtomicU64::new(0),
            acking: Mutex::new(Vec::with_capacity(8)),
            overrun: Mutex::new(Vec::new()),
            any_overrun: AtomicBool::new(false),
            moderated: Moderated::new(),
            contexts: Mutex::new(Vec::new()),
            pds: Mutex::default(),
            start: Instant::now(),
            coarse: CoarseClock::new(),
            worker,
            farewell: Farewell::default(),
            rx_empty_at: AtomicU64::new(0),
            kernel_drops: AtomicU64::new(0),
            send_drops: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            waiters: AtomicU32::new(0),
            port,
            config,
        })
    }

    /// The clock of the machines.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        Time::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    pub(crate) fn count(&self, counter: Counter, n: u64) {
        self.counters.add(counter, n);
    }

    pub(crate) fn counter(&self, counter: Counter) -> u64 {
        self.counters.read(counter)
    }

    pub(crate) fn counters(&self) -> &Counters {
        self.count_rings();
        self.count_direct();
        // The kernel's own count of what found the socket full.
        let dropped = self.port.dropped() + self.switch.dropped();
        let known = self.kernel_drops.swap(dropped, Ordering::Relaxed);
        self.count(Counter::DropSocketFull, dropped.saturating_sub(known));
        &self.counters
    }

    /// Bytes of packets in and out, since the start.
    fn bytes_moved(&self) -> u64 {
        let by_ring = self.shm.as_ref().map_or(0, |shm| shm.traffic().uncounted());
        let counted = [Counter::SentBytes, Counter::RcvdBytes].map(|c| self.counters.read(c));
        by_ring.wrapping_add(counted[0]).wrapping_add(counted[1])
    }

    /// A number that no protection domain has that is there now, in no process of the host: it is the handle in C, and that of
    /// another process names nothing here.
    pub(crate) fn take_pd(&self) -> u32 {
        let mut pds = self.pds.lock();
        loop {
            pds.last = pds.last % PdNumbers::LAST + 1;
            let number = u32::from(self.slot) << 24 | pds.last;
            if pds.live.insert(number) {
                return number;
            }
        }
    }

    /// It is nobody's any more.
    pub(crate) fn give_back_pd(&self, number: u32) {
        self.pds.lock().live.remove(&number);
    }

    pub(crate) fn modify_limits(&self, max_mtu: Mtu) -> ModifyLimits {
        ModifyLimits {
            ports: self.attr.phys_port_cnt,
            pkeys: self.attr.max_pkeys,
            max_mtu,
            max_rd_atomic: self.attr.max_qp_rd_atom.try_into().unwrap_or(u8::MAX),
            max_rate_limit: self.attr.max_rate_limit,
        }
    }

    pub(crate) fn add_context(&self, context: &Arc<ContextCell>) {
        let mut contexts = self.contexts.lock();
        contexts.retain(|c| c.strong_count() > 0);
        contexts.push(Arc::downgrade(context));
    }

    /// Raises an event of the port in every context.
    fn raise_port(&self, kind: AsyncEventKind) {
        let contexts: Vec<_> = self.contexts.lock().iter().filter_map(Weak::upgrade).collect();
        for context in contexts {
            context.events.raise(kind, EventElement::Port(1), None);
        }
    }

    pub(crate) fn port_attr(&self) -> PortAttr {
        let violations = |counter| u32::try_from(self.counters.read(counter)).unwrap_or(u32::MAX);
        PortAttr {
            state: if self.gids.is_empty() { PortState::Down } else { PortState::Active },
            max_mtu: Mtu::Mtu4096,
            active_mtu: self.gids.active_mtu(),
            lid: self.gids.entry(0).map_or(0, |entry| lid::of(entry.gid.to_ip())),
            gid_tbl_len: limits::GID_TABLE_LEN as u32,
            max_msg_sz: limits::MAX_MSG_SIZE,
            pkey_tbl_len: self.attr.max_pkeys,
            bad_pkey_cntr: violations(Counter::DropPkey),
            qkey_viol_cntr: violations(Counter::DropQkey),
        }
    }

    pub(crate) fn details(&self) -> Details {
        Details {
            gids: self.gids.listed(),
            port: self.port_attr(),
            udp_port: self.config.udp_port,
            registry: self.config.registry.clone(),
            inproc: self.config.inproc,
            shm: self.shm.is_some(),
            slot: self.slot,
        }
    }

    /// A CQ lost a completion of a queue pair: that one and all that use the CQ fail when the present lock is released.
    pub(crate) fn note_overrun(&self, cq: &Arc<CqCell>, qpn: Qpn) {
        self.overrun.lock().push(Overrun { cq: Arc::clone(cq), qpn });
        self.any_overrun.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::Quota;

    #[test]
    fn a_quota_that_refused_is_whole_again_when_all_is_given_back() {
        let quota: &'static Quota = Box::leak(Box::new(Quota::new(3)));
        for _ in 0..3 {
            let tickets: Vec<_> = std::iter::from_fn(|| quota.take()).collect();
            assert_eq!(tickets.len(), 3);
            assert!(quota.take().is_none());
        }
        assert!(quota.take().is_some());
    }
}

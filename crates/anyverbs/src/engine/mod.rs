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

mod datagrams;
mod deliver;
mod exit;
pub(crate) mod gsi;
mod handing;
mod ip_ids;
mod moderation;
mod owed;
mod progress;
mod ring;
pub(crate) mod timers;
pub(crate) mod waiter;
mod worker;
pub(crate) mod xrc;

use std::any::Any;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use anyverbs_net::{PortOptions, Registry, Services, Slot, UdpPort};
use anyverbs_proto::cm::CmConfig;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::mr::MrTable;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Mtu, Qpn};
use anyverbs_proto::wire::packet::Packet;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::async_event::{AsyncEventKind, EventElement};
use crate::base::{Core, DeviceClock, Patience, PdNumbers, Progress, Quotas, Timed, Waker};
use crate::config::Config;
use crate::context_cell::ContextCell;
use crate::device::{Details, PortAttr, PortState, guids};
use crate::error::OpenError;
use crate::fork;
use crate::gid::GidTable;
use crate::lid;
use crate::limits::{self, DeviceAttr};
use crate::link::Links;
use crate::link::inproc::{Inbound, Inproc};
use crate::link::path::Paths;
use crate::link::shm::Shm;
use crate::link::udp::BatchPool;
use crate::memory::ProcessMemory;
use crate::multicast::Groups;
use crate::qp::owed::OwedList;
use crate::qp::table::QpTable;
use crate::qp::timers::Timers;
use crate::qp::transport::{Overruns, Transport};
use crate::raw::switch::Switch;
use crate::srq::table::SrqTable;
use crate::xrcd::Domains;
use exit::Farewell;
use gsi::Gsi;
use handing::Handing;
use moderation::Moderated;
use progress::RxState;
use worker::Shared;
use xrc::Sharing;

pub(crate) struct Engine {
    pub(crate) core: &'static Core,
    pub(crate) links: &'static Links,
    pub(crate) transport: &'static Transport,
    pub(crate) xrc_domains: Domains,
    /// With processes that have the same domains.
    pub(crate) sharing: Sharing,
    pub(crate) gsi: Gsi,
    /// Who listens on this host.
    pub(crate) services: Arc<Services>,
    /// Of raw packets.
    pub(crate) switch: Switch,
    rx: Mutex<RxState>,
    /// What hands packets of groups on to other processes.
    handing: Mutex<Handing>,
    /// CQs whose channel is told later.
    moderated: Moderated,
    contexts: Mutex<Vec<Weak<ContextCell>>>,
    worker: Shared,
    farewell: Farewell,
    /// When the socket was last found empty with no ACK owed, in nanoseconds.
    rx_empty_at: AtomicU64,
    /// Datagrams that the kernel dropped, as last read.
    kernel_drops: AtomicU64,
    /// Empty polls: a program that polls does the worker's work.
    lease: AtomicU64,
    /// Threads that wait for a completion event.
    waiters: AtomicU32,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("slot", &self.core.slot).finish_non_exhaustive()
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
            let _ = engine.core.progress.set(engine);
            let _ = engine.transport.sharing.set(engine);
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
    pub(crate) fn is_current(&self) -> bool {
        self.core.is_current()
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
        let no_epoll = |source| OpenError::System { what: "make an epoll set", source };
        let waker = Waker::new().map_err(no_epoll)?;
        let worker = Shared::new(&waker, &port, shm.as_ref(), monitor).map_err(no_epoll)?;
        let mut rng = StdRng::from_os_rng();
        let (node_guid, sys_image_guid) = guids();
        let attr =
            DeviceAttr { node_guid, sys_image_guid, max_qp: config.max_qp, ..limits::DEFAULT };
        tracing::info!(slot = number, port = config.udp_port, "device {} is open", config.device);
        let directory = shm.as_ref().and_then(Shm::directory);
        // Last of what may fail: it lives until the process ends.
        let core: &'static Core = Box::leak(Box::new(Core {
            attr,
            slot: number,
            gids,
            mrs: MrTable::with_rng(attr.max_mr + attr.max_mw, StdRng::from_rng(&mut rng)),
            memory: ProcessMemory::new(),
            counters: Counters::default(),
            quotas: Quotas::new(&attr),
            clock: DeviceClock::new(),
            pd_numbers: PdNumbers::new(number),
            directory,
            progress: OnceLock::new(),
            config,
        }));
        fork::set_owner(core);
        let kept = port.kept() > 0;
        let links: &'static Links = Box::leak(Box::new(Links {
            core,
            port,
            shm,
            inproc: Inproc::default(),
            batches: BatchPool::default(),
            paths: Paths::default(),
            send_drops: AtomicU64::new(0),
            waker,
        }));
        let transport: &'static Transport = Box::leak(Box::new(Transport {
            core,
            links,
            qps: QpTable::new(number, rng.random()),
            xrc_srqs: SrqTable::new(number, rng.random()),
            groups: Groups::default(),
            timers: Timers::new(),
            owed: OwedList::new(),
            overruns: Overruns::default(),
            sharing: OnceLock::new(),
        }));
        Ok(Self {
            core,
            links,
            transport,
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
                kept,
            ),
            services,
            switch: Switch::new(transport),
            rx: Mutex::new(rx),
            handing: Mutex::default(),
            moderated: Moderated::new(),
            contexts: Mutex::new(Vec::new()),
            worker,
            farewell: Farewell::default(),
            rx_empty_at: AtomicU64::new(0),
            kernel_drops: AtomicU64::new(0),
            lease: AtomicU64::new(0),
            waiters: AtomicU32::new(0),
        })
    }

    pub(crate) fn counters(&self) -> &Counters {
        if let Some(shm) = &self.links.shm {
            shm.traffic().count(&self.core.counters);
        }
        if let Some(directory) = &self.core.directory {
            directory.count(&self.core.counters);
        }
        // The kernel's own count of what found the socket full.
        let dropped = self.links.port.dropped() + self.switch.dropped();
        let known = self.kernel_drops.swap(dropped, Ordering::Relaxed);
        self.core.count(Counter::DropSocketFull, dropped.saturating_sub(known));
        &self.core.counters
    }

    /// Bytes of packets in and out, since the start.
    fn bytes_moved(&self) -> u64 {
        let by_ring = self.links.shm.as_ref().map_or(0, |shm| shm.traffic().uncounted());
        let counted = [Counter::SentBytes, Counter::RcvdBytes].map(|c| self.core.counters.read(c));
        by_ring.wrapping_add(counted[0]).wrapping_add(counted[1])
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
        let violations =
            |counter| u32::try_from(self.core.counters.read(counter)).unwrap_or(u32::MAX);
        PortAttr {
            state: if self.core.gids.is_empty() { PortState::Down } else { PortState::Active },
            max_mtu: Mtu::Mtu4096,
            active_mtu: self.core.gids.active_mtu(),
            lid: self.core.gids.entry(0).map_or(0, |entry| lid::of(entry.gid.to_ip())),
            gid_tbl_len: limits::GID_TABLE_LEN as u32,
            max_msg_sz: limits::MAX_MSG_SIZE,
            pkey_tbl_len: self.core.attr.max_pkeys,
            bad_pkey_cntr: violations(Counter::DropPkey),
            qkey_viol_cntr: violations(Counter::DropQkey),
        }
    }

    pub(crate) fn details(&self) -> Details {
        Details {
            gids: self.core.gids.listed(),
            port: self.port_attr(),
            udp_port: self.core.config.udp_port,
            registry: self.core.config.registry.clone(),
            inproc: self.core.config.inproc,
            shm: self.links.shm.is_some(),
            slot: self.core.slot,
        }
    }
}

impl Progress for Engine {
    fn poll(&'static self) -> bool {
        self.poll_progress()
    }

    fn end_polling(&'static self) {
        self.end_lease();
    }

    fn wait_for_event(
        &'static self,
        patience: &Patience,
        channel: BorrowedFd<'_>,
        found: &mut dyn FnMut() -> bool,
    ) -> io::Result<bool> {
        self.wait_for_event(patience, channel, found)
    }

    fn end_wait(&'static self) {
        self.end_wait();
    }

    fn after_unlock(&'static self) {
        self.after_unlock();
    }

    fn call_at(&'static self, at: Time, what: Weak<dyn Timed>) {
        self.moderated.add(at, what);
        self.links.waker.look_before(at.as_nanos());
    }

    fn watch(&'static self, fds: Vec<BorrowedFd<'static>>) -> io::Result<()> {
        self.worker.watch(fds)
    }

    fn note_overrun(&'static self, cq: Arc<dyn Any + Send + Sync>, qpn: Qpn) {
        self.transport.overruns.note(cq, qpn);
    }
}

impl Inbound for &'static Engine {
    fn deliver<'p>(&self, packets: impl Iterator<Item = (Arrival, Packet<'p>)>) {
        let packets = packets.map(|(arrival, packet)| (arrival, packet.into()));
        Engine::deliver(self, self.core.now(), packets);
    }

    fn hand_on<'p>(&self, packets: impl Iterator<Item = (Arrival, Packet<'p>)>) {
        self.handing.lock().hand_on(self, packets);
    }

    fn acknowledge(&self, qpn: Qpn) {
        Engine::acknowledge(self, qpn);
    }

    fn resume(&self, qpn: Qpn) {
        Engine::resume(self, qpn);
    }
}

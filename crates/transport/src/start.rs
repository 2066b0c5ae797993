//! The data path of this process, put together: port, links, queue pairs and progress.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use anyverbs_links::{Links, Opened};
use anyverbs_net::{ROOM, Registry, Services, Slot, StandardStreams, SteerByKind, check_room};
use anyverbs_objects::base::{Core, DeviceClock, PdNumbers, Quotas, Register};
use anyverbs_objects::config::Config;
use anyverbs_objects::error::OpenError;
use anyverbs_objects::gid::GidTables;
use anyverbs_objects::limits::DeviceAttr;
use anyverbs_objects::memory::ProcessMemory;
use anyverbs_objects::srq::table::SrqTable;
use anyverbs_objects::{fork, limits};
use anyverbs_proto::counters::Counters;
use anyverbs_proto::mr::MrTable;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::multicast::Groups;
use crate::progress::worker::{self, Shared};
use crate::progress::{Driver, RxState};
use crate::qp::owed::OwedList;
use crate::qp::table::QpTable;
use crate::qp::timers::Timers;
use crate::qp::transport::{Aftermath, Transport};

/// The data path, whose parts live until the process ends. It still lacks the rooms above it ([`Driver::above`],
/// [`Transport::sharing`]), and its worker waits until [`starter`](Self::starter) is told the driver.
pub struct DataPath {
    /// The queue pairs.
    pub transport: &'static Transport,
    /// Their progress.
    pub driver: &'static Driver,
    /// Port numbers and service IDs of the host.
    pub services: Arc<Services>,
    /// The port keeps rules of the host's other processes.
    pub kept: bool,
    /// Starts the worker.
    pub starter: worker::Starter,
}

/// Gives a value the life of the process.
pub fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

impl DataPath {
    /// Takes a slot of the host and opens the port, for devices with these attributes. `steer_by_kind` says which process gets packets to QP1; any if absent.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(
        config: Config,
        attrs: Box<[DeviceAttr]>,
        steer_by_kind: Option<SteerByKind>,
        rng: &mut StdRng,
    ) -> Result<Self, OpenError> {
        let _others = StandardStreams::hold();
        check_room(ROOM).map_err(|source| OpenError::System {
            what: "map the memory that a device needs",
            source,
        })?;
        // Before they are read, so that none that changes meanwhile is missed.
        let monitor = worker::watch_addresses();
        let attr = limits::of_all(&attrs, config.max_qp.as_ref());
        let gids = gids(&config, &attrs)?;
        let registry = Registry::of_port(&config.registry, config.udp_port);
        let slot = registry.and_then(|r| Slot::claim_in(&r)).map_err(OpenError::Slot)?;
        let slot = Arc::new(slot);
        let number = slot.number();
        let services = Services::new(Arc::clone(&slot));
        let (opened, poller) = Opened::new(&config, slot, steer_by_kind)?;
        let rx = RxState::new(&config, poller)
            .map_err(|source| OpenError::System { what: "map receive buffers", source })?;
        let worker = Shared::new(&opened, monitor)
            .map_err(|source| OpenError::System { what: "make an epoll set", source })?;
        anyverbs_locks::fast::prepare();
        let starter = worker::spawn()
            .map_err(|source| OpenError::System { what: "start a thread", source })?;
        let names: Vec<&str> = config.devices().map(|(_, device)| device.name.as_str()).collect();
        tracing::info!(
            slot = number,
            port = config.udp_port,
            "device {} is open",
            names.join(", ")
        );
        let directory = opened.shm.as_ref().and_then(|shm| shm.directory(config.ports.len()));
        let quotas_of = attrs.iter().map(Quotas::new).collect();
        // Nothing may fail from here on: what is made lives until the process ends.
        let core = leak(Core {
            failed: config.ports.iter().map(|_| AtomicBool::new(false)).collect(),
            attr,
            attrs,
            slot: number,
            gids,
            mrs: MrTable::with_rng(attr.max_mr + attr.max_mw, StdRng::from_rng(rng)),
            memory: ProcessMemory::default(),
            counters: config.ports.iter().map(|_| Counters::default()).collect(),
            quotas: Quotas::new(&attr),
            quotas_of,
            cqs: Register::default(),
            clock: DeviceClock::default(),
            pd_numbers: PdNumbers::new(number),
            directory,
            progress: OnceLock::new(),
            config,
        });
        fork::set_owner(core);
        let kept = opened.port.kept() > 0;
        let links = leak(Links::new(core, opened));
        // Payloads that are fetched are in no packet.
        if let Some(directory) = core.directory.as_ref().filter(|_| !links.needs_packets()) {
            directory.offer_to_fetch();
        }
        if links.faults.is_some() {
            core.mrs.let_vanish(links);
        }
        let transport = leak(Transport {
            core,
            links,
            qps: QpTable::new(number, rng.random()),
            xrc_srqs: SrqTable::new(number, rng.random()),
            groups: Groups::default(),
            timers: Timers::default(),
            owed: OwedList::default(),
            aftermath: Aftermath::default(),
            out_of_order_bytes: Arc::default(),
            sharing: OnceLock::new(),
        });
        let driver = leak(Driver::new(transport, rx, worker));
        // Set once.
        let _ = core.progress.set(driver);
        driver.tell_of_start();
        if let Some(slot) = links.port.slot() {
            slot.page().on_look(|| links.waker.kick());
        }
        Ok(Self { transport, driver, services, kept, starter })
    }
}

/// The addresses of the devices. Only a process whose devices have no address at all has none.
fn gids(config: &Config, attrs: &[DeviceAttr]) -> Result<GidTables, OpenError> {
    let gids = GidTables::of(config, attrs)
        .map_err(|source| OpenError::System { what: "list the network interfaces", source })?;
    let ports = 0..config.ports.len();
    let faults = |port: usize| {
        let faults = gids.unusable(port).into_iter();
        faults.map(move |fault| config.fault_of_addresses(port, &fault))
    };
    let unusable: Vec<_> = ports.clone().flat_map(faults).collect();
    if ports.clone().all(|port| gids.is_empty(port)) {
        return Err(if unusable.is_empty() {
            OpenError::NoInterface
        } else {
            OpenError::Interfaces(unusable.join("; "))
        });
    }
    for fault in unusable {
        tracing::warn!("{fault}");
    }
    Ok(gids)
}

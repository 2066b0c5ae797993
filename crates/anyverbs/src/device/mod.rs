//! The device of this process: all its rooms, put together at the first open.

mod exit;
mod listing;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use anyverbs_net::{PortOptions, Registry, Services, Slot, UdpPort};
use anyverbs_proto::cm::CmConfig;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::mr::MrTable;
use anyverbs_proto::types::Mtu;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::base::{Core, DeviceClock, PdNumbers, Quotas, Waker};
use crate::cm::{CmError, EventChannel, Gsi};
use crate::config::Config;
use crate::error::OpenError;
use crate::fork;
use crate::gid::GidTable;
use crate::gsi::STEERING;
use crate::lid;
use crate::limits::{self, DeviceAttr};
use crate::link::Links;
use crate::link::inproc::Inproc;
use crate::link::path::Paths;
use crate::link::shm::Shm;
use crate::link::udp::BatchPool;
use crate::memory::ProcessMemory;
use crate::multicast::Groups;
use crate::progress::worker::{self, Shared};
use crate::progress::{Above, Driver, RxState};
use crate::qp::owed::OwedList;
use crate::qp::table::QpTable;
use crate::qp::timers::Timers;
use crate::qp::transport::{Overruns, Transport};
use crate::raw::switch::Switch;
use crate::srq::table::SrqTable;
use crate::xrc::SharedDomains;
use exit::Farewell;
use listing::guids;
pub use listing::{Details, DeviceInfo, PortAttr, PortState, devices};

/// The device of a process, shared by all contexts. Its parts live until the process ends.
#[derive(Debug)]
pub(crate) struct Device {
    pub(crate) core: &'static Core,
    pub(crate) transport: &'static Transport,
    pub(crate) driver: &'static Driver,
    /// QP1 and the connection manager.
    pub(crate) gsi: &'static Gsi,
    /// XRC domains that several processes have.
    pub(crate) xrc: &'static SharedDomains,
    /// Raw packets.
    pub(crate) switch: &'static Switch,
    farewell: Farewell,
    /// Datagrams that the kernel dropped, as last read.
    kernel_drops: AtomicU64,
}

impl From<std::io::Error> for OpenError {
    fn from(source: std::io::Error) -> Self {
        Self::System { what: "map a page", source }
    }
}

/// Gives a value the life of the process.
fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

impl Device {
    /// This process's device, started where there is none.
    pub(crate) fn current() -> Result<&'static Self, OpenError> {
        let mut fresh = None;
        let device = fork::singleton(|| {
            let (device, thread) = Self::new()?;
            fresh = Some(thread);
            Ok::<_, OpenError>(device)
        })?;
        if let Some(thread) = fresh {
            thread.send(device.driver).expect("the worker waits for its device");
            device.watch_for_exit();
        }
        Ok(device)
    }

    /// This process's device, if there is one.
    pub(crate) fn running() -> Option<&'static Self> {
        fork::current()
    }

    fn new() -> Result<(Self, worker::Starter), OpenError> {
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
        // Before others can know the slot: a process that sends here by UDP has found no listener at the link.
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
            steer_by_kind: Some(STEERING),
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
        let thread = worker::spawn()
            .map_err(|source| OpenError::System { what: "start a thread", source })?;
        let mut rng = StdRng::from_os_rng();
        let (node_guid, sys_image_guid) = guids();
        let attr =
            DeviceAttr { node_guid, sys_image_guid, max_qp: config.max_qp, ..limits::DEFAULT };
        tracing::info!(slot = number, port = config.udp_port, "device {} is open", config.device);
        let directory = shm.as_ref().and_then(Shm::directory);
        // Nothing may fail from here on: what is made lives until the process ends.
        let core = leak(Core {
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
        });
        fork::set_owner(core);
        let kept = port.kept() > 0;
        let links = leak(Links {
            core,
            port,
            shm,
            inproc: Inproc::default(),
            batches: BatchPool::default(),
            paths: Paths::default(),
            send_drops: AtomicU64::new(0),
            waker,
        });
        let transport = leak(Transport {
            core,
            links,
            qps: QpTable::new(number, rng.random()),
            xrc_srqs: SrqTable::new(number, rng.random()),
            groups: Groups::default(),
            timers: Timers::new(),
            owed: OwedList::new(),
            overruns: Overruns::default(),
            sharing: OnceLock::new(),
        });
        let driver = leak(Driver::new(transport, rx, worker));
        let config = CmConfig {
            slot: number,
            early_repeats: true,
            records: true,
            first_id: rng.random(),
            ca_guid: node_guid,
            ack_delay: attr.local_ca_ack_delay,
            max_rd_atomic: attr.max_qp_rd_atom.try_into().unwrap_or(u8::MAX),
            ..CmConfig::default()
        };
        let gsi = leak(Gsi::new(transport, driver, services, config, rng.random(), kept));
        let xrc = leak(SharedDomains::new(transport));
        let switch = leak(Switch::new(transport));
        // Each is set once.
        let _ = core.progress.set(driver);
        let _ = transport.sharing.set(xrc);
        let _ = driver.above.set(Above { management: gsi, frames: switch });
        let (farewell, kernel_drops) = (Farewell::default(), AtomicU64::new(0));
        Ok((Self { core, transport, driver, gsi, xrc, switch, farewell, kernel_drops }, thread))
    }

    pub(crate) fn counters(&self) -> &Counters {
        if let Some(shm) = &self.transport.links.shm {
            shm.traffic().count(&self.core.counters);
        }
        if let Some(directory) = &self.core.directory {
            directory.count(&self.core.counters);
        }
        // The kernel's own count of datagrams that found the socket full.
        let dropped = self.transport.links.port.dropped() + self.switch.dropped_frames();
        let known = self.kernel_drops.swap(dropped, Ordering::Relaxed);
        self.core.count(Counter::DropSocketFull, dropped.saturating_sub(known));
        &self.core.counters
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
            shm: self.transport.links.shm.is_some(),
            slot: self.core.slot,
        }
    }
}

impl EventChannel {
    /// A new channel; starts the device.
    ///
    /// # Errors
    /// [`CmError::System`].
    pub fn new() -> Result<Self, CmError> {
        let device = Device::current().map_err(|error| {
            crate::say_again!(error, 0, "cannot open the device: {error}");
            CmError::System { what: "open the device", errno: error.errno() }
        })?;
        Self::with(device.gsi)
    }
}

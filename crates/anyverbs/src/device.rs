//! The device of this process: all its rooms, put together at the first open.

mod exit;
mod listing;
#[cfg(test)]
mod tests;

use anyverbs_cm::gsi::STEERING;
use anyverbs_cm::{CmError, EventChannel, Gsi};
use anyverbs_objects::base::Core;
use anyverbs_objects::config::Config;
use anyverbs_objects::error::OpenError;
use anyverbs_objects::fork;
use anyverbs_objects::limits::{self, DeviceAttr};
use anyverbs_objects::persona::Rate;
use anyverbs_proto::cm::CmConfig;
use anyverbs_proto::counters::{Counter, Counters};
use anyverbs_proto::types::Mtu;
use anyverbs_raw::switch::Switch;
use anyverbs_transport::progress::{Above, Driver, worker};
use anyverbs_transport::qp::transport::Transport;
use anyverbs_transport::{DataPath, leak};
use anyverbs_xrc::SharedDomains;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use exit::ExitThread;
pub use listing::{
    Details, DeviceInfo, PortAttr, PortDetails, PortState, all_devices, device_age, devices,
    has_failed, is_removed, note_injected,
};
pub(crate) use listing::{guid, lid_of};

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
    exit_thread: ExitThread,
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
        let attrs = config.device_attrs(guid);
        let mut rng = StdRng::from_os_rng();
        let DataPath { transport, driver, services, kept, starter } =
            DataPath::open(config, attrs, Some(STEERING), &mut rng)?;
        let core = transport.core;
        let attr = &core.attr;
        let config = CmConfig {
            slot: core.slot,
            quick_repeats: true,
            records: true,
            first_id: rng.random(),
            ca_guid: attr.node_guid,
            ack_delay: attr.local_ca_ack_delay,
            max_rd_atomic: attr.max_qp_rd_atom.try_into().unwrap_or(u8::MAX),
            ..CmConfig::default()
        };
        let gsi = leak(Gsi::new(transport, driver, services, config, rng.random(), kept));
        let xrc = leak(SharedDomains::new(transport));
        let switch = leak(Switch::new(transport));
        // Each is set once.
        let _ = transport.sharing.set(xrc);
        let _ = driver.above.set(Above { management: gsi, frames: switch });
        let exit_thread = ExitThread::default();
        Ok((Self { core, transport, driver, gsi, xrc, switch, exit_thread }, starter))
    }

    /// The counters of each port, up to date.
    pub(crate) fn counters(&self) -> &[Counters] {
        self.driver.counters()
    }

    /// The device whose name is of this kind: the place of its first port.
    pub(crate) fn find(&self, is_it: impl Fn(&str) -> bool) -> Option<usize> {
        self.core.config.devices().find(|(_, device)| is_it(&device.name)).map(|(at, _)| at)
    }

    /// The attributes of a device.
    pub(crate) fn attr(&self, number: usize) -> DeviceAttr {
        *self.core.attr_of(number)
    }

    /// The attributes of a port, by its place among those of all devices.
    pub(crate) fn port_attr(&self, number: usize) -> PortAttr {
        let violations = |counter| {
            u32::try_from(self.core.counters_of(number).read(counter)).unwrap_or(u32::MAX)
        };
        PortAttr {
            state: match self.transport.links.is_down(number) {
                true => PortState::Down,
                false => PortState::of(&self.core.gids, number),
            },
            max_mtu: self.core.config.ports.get(number).map_or(Mtu::Mtu4096, |port| port.mtu),
            active_mtu: self.core.gids.active_mtu(number),
            lid: lid_of(&self.core.gids, number, self.core.persona_of(number)),
            gid_tbl_len: limits::GID_TABLE_LEN as u32,
            max_msg_sz: limits::MAX_MSG_SIZE,
            pkey_tbl_len: self.core.pkeys_of(number).len() as u16,
            rate: self.core.persona_of(number).map_or(Rate::DEFAULT, |persona| persona.rate),
            bad_pkey_cntr: violations(Counter::DropPkey),
            qkey_viol_cntr: violations(Counter::DropQkey),
        }
    }

    pub(crate) fn details(&self, number: usize) -> Details {
        let port = |port| PortDetails {
            gids: self.core.gids.listed(port),
            unusable: self.core.gids.unusable(port),
            pkeys: self.core.pkeys_of(port).to_vec(),
            attr: self.port_attr(port),
        };
        let count = usize::from(self.attr(number).phys_port_cnt);
        Details {
            ports: (number..number + count).map(port).collect(),
            udp_port: self.core.config.udp_port,
            registry: self.core.config.registry.clone(),
            inproc: self.core.config.inproc,
            shm: self.transport.links.shm.is_some(),
            slot: self.core.slot,
        }
    }
}

/// A new event channel (`rdma_create_event_channel(3)`); starts the device.
///
/// # Errors
/// [`CmError::System`].
pub fn create_event_channel() -> Result<EventChannel, CmError> {
    let device = Device::current().map_err(|error| {
        crate::say_again!(error, 0, "cannot open the device: {error}");
        CmError::System { what: "open the device", errno: error.errno() }
    })?;
    EventChannel::with(device.gsi)
}

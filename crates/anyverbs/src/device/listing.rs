//! The devices that exist.

use std::sync::Arc;
use std::time::Duration;

use anyverbs_objects::config::{Config, PortConfig};
use anyverbs_objects::error::OpenError;
use anyverbs_objects::gid::{GidEntry, GidTables, node_guid};
use anyverbs_objects::lid;
use anyverbs_objects::persona::{Persona, Rate};
use anyverbs_proto::types::{Mtu, PKey};

use super::Device;

/// A device that can be opened (`ibv_get_device_list`).
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name: `anyverbs0`, or the one in the configuration.
    pub name: String,
    /// Identifies it.
    pub node_guid: u64,
    /// Identifies the adapter, which here has one device: the same number.
    pub sys_image_guid: u64,
    /// The vendor's device that it looks like.
    pub persona: Option<Arc<Persona>>,
}

/// An open device's properties beside its attributes.
#[derive(Clone, Debug)]
pub struct Details {
    /// Its ports, one or two.
    pub ports: Vec<PortDetails>,
    /// UDP port.
    pub udp_port: u16,
    /// Name of the registry in which the processes of this host find each other.
    pub registry: String,
    /// Whether queue pairs of one process talk directly.
    pub inproc: bool,
    /// Whether it talks to other processes of this user and host through shared memory.
    pub shm: bool,
    /// This process's slot on the host: the top byte of its queue pair numbers.
    pub slot: u8,
}

/// A port of an open device.
#[derive(Clone, Debug)]
pub struct PortDetails {
    /// The addresses in its GID table.
    pub gids: Vec<GidEntry>,
    /// Why it has fewer addresses than it was given: an interface that does not exist or is down, for instance.
    pub unusable: Vec<String>,
    /// Its P_Keys.
    pub pkeys: Vec<PKey>,
    /// Its attributes.
    pub attr: PortAttr,
}

/// State of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PortState {
    /// No address is up.
    Down = 1,
    /// Ready.
    Active = 4,
}

impl PortState {
    /// That of a port with these addresses.
    pub(crate) fn of(gids: &GidTables, number: usize) -> Self {
        if gids.is_empty(number) { Self::Down } else { Self::Active }
    }
}

/// The LID of a port with these addresses.
pub(crate) fn lid_of(gids: &GidTables, number: usize, persona: Option<&Persona>) -> u16 {
    match (persona, gids.principal(number)) {
        (None, Some(entry)) => lid::of(entry.gid.to_ip()),
        // RoCE hardware has none.
        _ => 0,
    }
}

/// A port's attributes (`struct ibv_port_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// State.
    pub state: PortState,
    /// Largest path MTU of the device, which a configuration may lower.
    pub max_mtu: Mtu,
    /// Largest path MTU of GID 0's interface.
    pub active_mtu: Mtu,
    /// Made up from GID 0; 0 where that is no IPv4 address, and with a persona. An address handle or a queue pair without GRH may
    /// name it.
    pub lid: u16,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// Longest message.
    pub max_msg_sz: u32,
    /// P_Keys.
    pub pkey_tbl_len: u16,
    /// Packets with a wrong P_Key.
    pub bad_pkey_cntr: u32,
    /// Packets with a wrong Q_Key.
    pub qkey_viol_cntr: u32,
    /// Speed, which a persona gives.
    pub rate: Rate,
}

/// The devices of this process: one, unless the configuration asks for more or cannot be read. Whether one can be opened shows
/// when it is opened ([`Context::open`](crate::Context::open)): many programs list the devices and open none, and nothing is
/// started for them. A device that a script of faults has removed is not among them.
///
/// # Errors
/// [`OpenError::Config`].
pub fn devices() -> Result<Vec<DeviceInfo>, OpenError> {
    let mut found = all_devices()?;
    found.retain(|device| !is_removed(&device.name));
    Ok(found)
}

/// Whether a script of faults has removed the device of a name.
#[must_use]
pub fn is_removed(name: &str) -> bool {
    let faults = Device::running().and_then(|device| device.transport.links.faults.as_ref());
    faults.is_some_and(|faults| faults.is_removed(name))
}

/// Whether a script of faults has let the device of a name fail for good, or has removed it.
#[must_use]
pub fn has_failed(name: &str) -> bool {
    let faults = Device::running().and_then(|device| device.transport.links.faults.as_ref());
    faults.is_some_and(|faults| faults.has_failed(name))
}

/// As [`devices`], with those that were removed.
///
/// # Errors
/// [`OpenError::Config`].
pub fn all_devices() -> Result<Vec<DeviceInfo>, OpenError> {
    let loaded;
    let config = match Device::running() {
        Some(Device { core, .. }) => &core.config,
        None => {
            loaded = Config::load()?;
            &loaded
        }
    };
    let info = |(at, device): (usize, &PortConfig)| {
        let PortConfig { name, persona, .. } = device.clone();
        let node_guid = config.guid_of(at, guid);
        DeviceInfo { name, node_guid, sys_image_guid: node_guid, persona }
    };
    Ok(config.devices().map(info).collect())
}

/// Tells counters and trace what a rule of a script of faults did to a call, if there is a device that has them.
pub fn note_injected(rule: &anyverbs_faults::Rule, what: &str) {
    if let Some(device) = Device::running() {
        device.core.count_for_none(anyverbs_proto::counters::Counter::InjectedFaults, 1);
        device.transport.links.trace_fault(rule, what);
    }
}

/// The time since the process opened its device, from which the times of a script of faults count. Zero before.
#[must_use]
pub fn device_age() -> Duration {
    let age = |device: &Device| Duration::from_nanos(device.core.now().as_nanos());
    Device::running().map_or(Duration::ZERO, age)
}

/// The GUID of a device's node, by the place of its first port: equal in all processes of a host (network namespace), different between
/// hosts. A persona's begins with the bytes of its vendor.
pub(crate) fn guid(persona: Option<&Persona>, number: u64) -> u64 {
    use std::hash::{DefaultHasher, Hasher};
    let mut hasher = DefaultHasher::new();
    for path in ["/etc/machine-id", "/proc/sys/kernel/random/boot_id"] {
        hasher.write(&std::fs::read(path).unwrap_or_default());
    }
    if let Ok(namespace) = std::fs::read_link("/proc/self/ns/net") {
        hasher.write(namespace.as_os_str().as_encoded_bytes());
    }
    // Locally administered, so that no vendor's prefix is claimed where nobody asked for it.
    let first = (hasher.finish() & !(3 << 56)) | (2 << 56);
    node_guid(persona.map_or(first, |persona| persona.guid(first)), number)
}

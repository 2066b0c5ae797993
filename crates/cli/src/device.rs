//! The command's knowledge of the devices. Only this module asks for it.
//!
//! The facts come from the device itself, so that the view and the listing show what a program will find. To ask, a
//! process opens the device and starts its threads. That takes one of the host's process slots for as long as the
//! process lives. So a short-lived child asks: a launcher must not hold a slot beside its program's.

use std::collections::BTreeMap;
use std::env;
use std::net::{IpAddr, Ipv6Addr};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, bail};
use anyverbs::limits::DeviceAttr;
use anyverbs::persona::Limits;
use anyverbs::watch::OfPort;
use anyverbs::{GidKind, persona};
use serde::{Deserialize, Serialize};

use crate::args::Settings;

/// A device with its ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) fw_ver: String,
    pub(crate) board_id: Option<String>,
    pub(crate) hca_type: Option<String>,
    /// The name of the persona, if it has one.
    pub(crate) persona: Option<String>,
    /// Its place on the PCI bus, if the persona has one.
    pub(crate) pci: Option<Pci>,
    /// The limits that a configuration or a persona may lower, by their names.
    pub(crate) limits: BTreeMap<String, u32>,
    pub(crate) udp_port: u16,
    /// The registry in which the processes of this host find each other.
    pub(crate) registry: String,
    /// Ways to peers, the first that leads there is taken: `inproc`, `shm`, `udp`.
    pub(crate) links: Vec<String>,
    /// One or two.
    pub(crate) ports: Vec<Port>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Port {
    /// `IBV_PORT_*`: 4 is ACTIVE, 1 is DOWN.
    pub(crate) state: u8,
    /// Largest RDMA payload of a packet, in bytes: what the configuration says, 4096 without it.
    pub(crate) max_mtu: u32,
    /// The same, as the interface lets it pass.
    pub(crate) active_mtu: u32,
    pub(crate) lid: u16,
    pub(crate) gid_tbl_len: u32,
    pub(crate) gids: Vec<Gid>,
    /// Why it has fewer addresses than it was given.
    pub(crate) unusable: Vec<String>,
    pub(crate) pkeys: Vec<u16>,
    /// As sysfs writes it.
    pub(crate) rate: String,
}

/// A place on the PCI bus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Pci {
    pub(crate) vendor: u16,
    pub(crate) device: u16,
    pub(crate) subsystem_vendor: u16,
    pub(crate) subsystem_device: u16,
    pub(crate) class: u32,
    pub(crate) revision: u8,
    pub(crate) driver: String,
    /// In tenths of gigatransfers a second.
    pub(crate) speed: u16,
    pub(crate) width: u8,
    /// The NUMA nodes of the devices in turn, or none.
    pub(crate) numa_nodes: Vec<u16>,
}

/// An entry of the GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gid {
    pub(crate) index: usize,
    /// As an IPv6 address; an IPv4 address is mapped.
    pub(crate) gid: Ipv6Addr,
    pub(crate) address: IpAddr,
    /// The interface that has the address.
    pub(crate) ndev: String,
    pub(crate) ifindex: u32,
    /// As sysfs writes it.
    #[serde(rename = "type")]
    pub(crate) kind: String,
    /// Whether it carries traffic: a persona may list entries that carry none.
    pub(crate) carries: bool,
}

impl Gid {
    fn of(entry: &anyverbs::GidEntry) -> Self {
        let address = entry.gid.to_ip();
        Self {
            index: entry.index,
            gid: match address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            },
            address,
            ndev: entry.interface_name.clone(),
            ifindex: entry.interface,
            kind: match entry.kind {
                GidKind::RoceV1 => "IB/RoCE v1".into(),
                GidKind::RoceV2 | GidKind::NoInterface => "RoCE v2".into(),
            },
            carries: entry.carries(),
        }
    }
}

impl Device {
    /// Its ports with their numbers.
    pub(crate) fn numbered(&self) -> impl Iterator<Item = (u32, &Port)> {
        (1..).zip(&self.ports)
    }

    /// The name of a port of it, as processes call it.
    pub(crate) fn port_name(&self, number: u32) -> String {
        if self.ports.len() == 1 { self.name.clone() } else { format!("{}/{number}", self.name) }
    }

    /// The first address of its ports that carries traffic.
    pub(crate) fn address(&self) -> Option<&Gid> {
        self.ports.iter().find_map(Port::address)
    }
}

impl Port {
    /// The port with other addresses; `None` if they are the same.
    pub(crate) fn with(&self, addresses: &OfPort) -> Option<Self> {
        let new = Self {
            state: addresses.state as u8,
            lid: addresses.lid,
            gids: addresses.gids.iter().map(Gid::of).collect(),
            ..self.clone()
        };
        (new != *self).then_some(new)
    }

    /// The first address that carries traffic.
    pub(crate) fn address(&self) -> Option<&Gid> {
        let mut carriers = self.gids.iter().filter(|gid| gid.carries);
        let is_link_local = |gid: &Gid| gid.gid.is_unicast_link_local();
        let other = carriers.clone().find(|gid| !is_link_local(gid));
        other.or_else(|| carriers.next())
    }
}

/// The name of the hidden command by which the child is asked.
pub(crate) const ASK: &str = "device-facts";

/// The devices that a program would see with these settings; without one, why there is none.
pub(crate) fn list(settings: &Settings) -> anyhow::Result<Vec<Device>> {
    let mut child = Command::new(env::current_exe().context("cannot find my own executable")?);
    child.arg(ASK).envs(settings.variables()).stdin(Stdio::null());
    let output = child.output().context("cannot run a child to ask the device")?;
    if !output.status.success() {
        let reason = String::from_utf8_lossy(&output.stderr);
        let reason = reason.lines().last().unwrap_or_default();
        match reason.strip_prefix("anyverbs: ") {
            Some(reason) => bail!("{reason}"),
            None => bail!("the child that asks the device ended with {}: {reason}", output.status),
        }
    }
    serde_json::from_slice(&output.stdout)
        .context("the child that asks the device answers nonsense")
}

/// The child's side: prints the facts about the device.
pub(crate) fn answer() -> anyhow::Result<ExitCode> {
    let describe = |info: &anyverbs::DeviceInfo| {
        let context = anyverbs::Context::open(&info.name)?;
        anyhow::Ok(describe(info, &context.details()?, &context.device_attr()?))
    };
    let devices = anyverbs::devices()?.iter().map(describe).collect::<anyhow::Result<Vec<_>>>()?;
    crate::write_out(&serde_json::to_vec(&devices)?)
}

fn describe(info: &anyverbs::DeviceInfo, details: &anyverbs::Details, attr: &DeviceAttr) -> Device {
    let pci = |pci: &persona::Pci| Pci {
        vendor: pci.vendor,
        device: pci.device,
        subsystem_vendor: pci.subsystem_vendor,
        subsystem_device: pci.subsystem_device,
        class: pci.class,
        revision: pci.revision,
        driver: pci.driver.clone(),
        speed: pci.speed,
        width: pci.width,
        numa_nodes: pci.numa_nodes.clone(),
    };
    let persona = info.persona.as_deref();
    let port = |port: &anyverbs::PortDetails| Port {
        state: port.attr.state as u8,
        max_mtu: port.attr.max_mtu.bytes(),
        active_mtu: port.attr.active_mtu.bytes(),
        lid: port.attr.lid,
        gid_tbl_len: port.attr.gid_tbl_len,
        gids: port.gids.iter().map(Gid::of).collect(),
        unusable: port.unusable.clone(),
        pkeys: port.pkeys.iter().map(|pkey| pkey.0).collect(),
        rate: format!("{} Gb/sec ({})", port.attr.rate.gbps, port.attr.rate.lanes),
    };
    let ours = || Some("anyverbs".to_owned());
    Device {
        name: info.name.clone(),
        node_guid: info.node_guid,
        sys_image_guid: info.sys_image_guid,
        vendor_id: attr.vendor_id,
        vendor_part_id: attr.vendor_part_id,
        hw_ver: attr.hw_ver,
        fw_ver: persona.map_or(env!("CARGO_PKG_VERSION"), |persona| &persona.fw_ver).into(),
        board_id: persona.map_or_else(ours, |persona| persona.board_id.clone()),
        hca_type: persona.map_or_else(ours, |persona| persona.hca_type.clone()),
        persona: persona.map(|persona| persona.name.clone()),
        pci: persona.and_then(|persona| persona.pci.as_ref()).map(pci),
        limits: Limits::of(attr).map(|(name, value)| (name.to_owned(), value)).collect(),
        udp_port: details.udp_port,
        registry: details.registry.clone(),
        links: [(details.inproc, "inproc"), (details.shm, "shm"), (true, "udp")]
            .into_iter()
            .filter(|(is_on, _)| *is_on)
            .map(|(_, name)| name.to_owned())
            .collect(),
        ports: details.ports.iter().map(port).collect(),
    }
}

/// `IBV_PORT_DOWN`.
pub(crate) const DOWN: u8 = 1;
/// `IBV_PORT_ACTIVE`.
pub(crate) const ACTIVE: u8 = 4;

/// The physical state that goes with a logical one (`IBV_PORT_PHYS_STATE_*`).
pub(crate) fn phys_state(state: u8) -> u8 {
    if state == ACTIVE { 5 } else { 3 }
}

/// A port's logical state, as sysfs writes it.
pub(crate) fn state(state: u8) -> String {
    let name = ["NOP", "DOWN", "INIT", "ARMED", "ACTIVE", "ACTIVE_DEFER"].get(usize::from(state));
    format!("{state}: {}", name.unwrap_or(&"<unknown>"))
}

/// The files that tell the state of a port.
pub(crate) fn state_files(port: u8) -> [(&'static str, String); 2] {
    let physical = phys_state(port);
    let name = if physical == 5 { "LinkUp" } else { "Disabled" };
    [("state", state(port)), ("phys_state", format!("{physical}: {name}"))]
}

/// A one-line attribute of an interface.
pub(crate) fn attribute(ndev: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{ndev}/{name}")).ok()?;
    Some(text.trim_end().to_owned())
}

#[cfg(test)]
pub(crate) fn example() -> Device {
    let gid = |index, address: IpAddr| Gid {
        index,
        gid: match address {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        },
        address,
        ndev: "lo".into(),
        ifindex: 1,
        kind: "RoCE v2".into(),
        carries: true,
    };
    Device {
        name: "anyverbs0".into(),
        node_guid: 0x0200_0000_0000_0001,
        sys_image_guid: 0x0200_0000_0000_0002,
        vendor_id: 1,
        vendor_part_id: 1,
        hw_ver: 0,
        fw_ver: "0".into(),
        board_id: Some("anyverbs".into()),
        hca_type: Some("anyverbs".into()),
        persona: None,
        pci: None,
        limits: BTreeMap::new(),
        udp_port: 4791,
        registry: "anyverbs".into(),
        links: vec!["inproc".into(), "shm".into(), "udp".into()],
        ports: vec![Port {
            state: 4,
            max_mtu: 4096,
            active_mtu: 1024,
            lid: 0x8001,
            gid_tbl_len: 16,
            pkeys: vec![0xffff, 0x8001],
            unusable: Vec::new(),
            gids: vec![
                gid(0, std::net::Ipv4Addr::LOCALHOST.into()),
                gid(2, Ipv6Addr::LOCALHOST.into()),
            ],
            rate: "100 Gb/sec (4X EDR)".into(),
        }],
    }
}

//! The interfaces of this network namespace and their addresses, by rtnetlink(7).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::netlink;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interface {
    /// Index, from 1.
    pub index: u32,
    /// Name, as `ip link` shows it.
    pub name: String,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// Operational: up and with carrier (`IFF_RUNNING`).
    pub running: bool,
    /// Loopback.
    pub loopback: bool,
    /// Can multicast.
    pub multicast: bool,
    /// Maximum transmission unit: the longest IP packet, in bytes.
    pub mtu: u32,
    /// Ethernet address, where there is one other than zero.
    pub mac: Option<[u8; 6]>,
    /// The number of a VLAN interface.
    pub vlan: Option<u16>,
    /// Addresses, in the kernel's order.
    pub addresses: Vec<InterfaceAddress>,
}

/// An address of an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InterfaceAddress {
    /// The address.
    pub ip: IpAddr,
    /// Length of its network prefix, in bits.
    pub prefix_len: u8,
    /// The interface's index for a link-local IPv6 address, which means nothing without it; else 0.
    pub scope_id: u32,
    /// The address is not usable yet, or not at all. Duplicate address detection is under way or found a duplicate.
    pub tentative: bool,
    /// The address must not be used for new communication.
    pub deprecated: bool,
    /// An additional IPv4 address of a subnet, or a temporary IPv6 address.
    pub secondary: bool,
}

impl InterfaceAddress {
    /// Whether the address is valid on one link only.
    #[must_use]
    pub fn is_link_local(&self) -> bool {
        match self.ip {
            IpAddr::V4(ip) => ip.is_link_local(),
            IpAddr::V6(ip) => ip.is_unicast_link_local(),
        }
    }
}

// include/uapi/linux/if_link.h
const IFLA_VLAN_ID: u16 = 1;
// include/uapi/linux/if_addr.h
const IFA_F_SECONDARY: u32 = 0x01;
const IFA_F_OPTIMISTIC: u32 = 0x04;
const IFA_F_DADFAILED: u32 = 0x08;
const IFA_F_DEPRECATED: u32 = 0x20;
const IFA_F_TENTATIVE: u32 = 0x40;

/// All interfaces of this network namespace, in the order of their indices.
///
/// # Errors
/// Those of the netlink socket.
pub fn interfaces() -> io::Result<Vec<Interface>> {
    let fd = netlink::open(0, false)?;
    // A dump that changed under way is asked for again, but not for ever.
    for _ in 0..8 {
        let mut interfaces: Vec<Interface> = Vec::new();
        let links = netlink::dump(&fd, libc::RTM_GETLINK, |kind, bytes| {
            if kind == libc::RTM_NEWLINK {
                interfaces.extend(link(bytes));
            }
        })?;
        let addresses = netlink::dump(&fd, libc::RTM_GETADDR, |kind, bytes| {
            if kind == libc::RTM_NEWADDR
                && let Some((index, address)) = address(bytes)
                && let Some(interface) =
                    interfaces.iter_mut().find(|interface| interface.index == index)
            {
                interface.addresses.push(address);
            }
        })?;
        if links && addresses {
            interfaces.sort_by_key(|interface| interface.index);
            return Ok(interfaces);
        }
    }
    Err(io::Error::new(io::ErrorKind::ResourceBusy, "interfaces change too fast to list them"))
}

pub(crate) fn u32_of(bytes: &[u8]) -> Option<u32> {
    bytes.first_chunk().map(|&bytes| u32::from_ne_bytes(bytes))
}

/// An `RTM_NEWLINK` message: ifinfomsg, then attributes.
fn link(bytes: &[u8]) -> Option<Interface> {
    let (head, attributes) = bytes.split_first_chunk::<16>()?;
    let flags = u32_of(&head[8..])? as i32;
    let mut interface = Interface {
        index: u32_of(&head[4..])?,
        name: String::new(),
        up: flags & libc::IFF_UP != 0,
        running: flags & libc::IFF_RUNNING != 0,
        loopback: flags & libc::IFF_LOOPBACK != 0,
        multicast: flags & libc::IFF_MULTICAST != 0,
        mtu: 0,
        mac: None,
        vlan: None,
        addresses: Vec::new(),
    };
    for (kind, value) in netlink::attributes(attributes) {
        match kind {
            libc::IFLA_IFNAME => {
                let name = value.split(|&byte| byte == 0).next().unwrap_or_default();
                interface.name = String::from_utf8_lossy(name).into_owned();
            }
            libc::IFLA_MTU => interface.mtu = u32_of(value)?,
            libc::IFLA_ADDRESS => {
                interface.mac = value.try_into().ok().filter(|mac| *mac != [0; 6])
            }
            libc::IFLA_LINKINFO => interface.vlan = vlan(value),
            _ => {}
        }
    }
    Some(interface)
}

/// Reads `IFLA_LINKINFO` of a VLAN interface: its kind, and the data of that kind.
fn vlan(info: &[u8]) -> Option<u16> {
    let of = |wanted| netlink::attributes(info).find(|(kind, _)| *kind == wanted).map(|(_, v)| v);
    let kind = of(libc::IFLA_INFO_KIND)?;
    if kind.strip_suffix(&[0]).unwrap_or(kind) != b"vlan" {
        return None;
    }
    let id =
        netlink::attributes(of(libc::IFLA_INFO_DATA)?).find(|(kind, _)| *kind == IFLA_VLAN_ID)?.1;
    Some(u16::from_ne_bytes(*id.first_chunk()?))
}

/// An `RTM_NEWADDR` message: ifaddrmsg, then attributes.
fn address(bytes: &[u8]) -> Option<(u32, InterfaceAddress)> {
    let (head, attributes) = bytes.split_first_chunk::<8>()?;
    let [family, prefix_len, flags, ..] = *head;
    let index = u32_of(&head[4..])?;
    let (mut flags, mut local, mut peer) = (u32::from(flags), None, None);
    for (kind, value) in netlink::attributes(attributes) {
        match kind {
            libc::IFA_LOCAL => local = ip(family, value),
            libc::IFA_ADDRESS => peer = ip(family, value),
            libc::IFA_FLAGS => flags = u32_of(value)?,
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the other end.
    let ip = local.or(peer)?;
    let link_local = matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local());
    let tentative = flags & IFA_F_DADFAILED != 0
        || flags & (IFA_F_TENTATIVE | IFA_F_OPTIMISTIC) == IFA_F_TENTATIVE;
    Some((
        index,
        InterfaceAddress {
            ip,
            prefix_len,
            scope_id: if link_local { index } else { 0 },
            tentative,
            deprecated: flags & IFA_F_DEPRECATED != 0,
            secondary: flags & IFA_F_SECONDARY != 0,
        },
    ))
}

pub(crate) fn ip(family: u8, value: &[u8]) -> Option<IpAddr> {
    match i32::from(family) {
        libc::AF_INET => Some(Ipv4Addr::from(<[u8; 4]>::try_from(value).ok()?).into()),
        libc::AF_INET6 => Some(Ipv6Addr::from(<[u8; 16]>::try_from(value).ok()?).into()),
        _ => None,
    }
}

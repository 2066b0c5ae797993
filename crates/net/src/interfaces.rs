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

#[cfg(test)]
mod tests {
    use super::*;

    fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
        let mut bytes = ((4 + value.len()) as u16).to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn info(kind: &[u8], data: &[u8]) -> Vec<u8> {
        let kind = attribute(libc::IFLA_INFO_KIND, kind);
        [kind, attribute(libc::IFLA_INFO_DATA, data)].concat()
    }

    #[test]
    fn a_vlan_interface_has_its_number() {
        let id = attribute(IFLA_VLAN_ID, &0x0123u16.to_ne_bytes());
        for kind in [&b"vlan\0"[..], b"vlan"] {
            assert_eq!(vlan(&info(kind, &id)), Some(0x0123));
        }
        // Behind other attributes.
        let behind = [attribute(5, &[1, 0, 0, 0]), id.clone()].concat();
        assert_eq!(vlan(&info(b"vlan\0", &behind)), Some(0x0123));
        for kind in [&b"veth\0"[..], b"vlan2\0", b"vla\0", b"\0", b""] {
            assert_eq!(vlan(&info(kind, &id)), None, "the data mean something else");
        }
        assert_eq!(vlan(&info(b"vlan\0", &[])), None);
        assert_eq!(vlan(&info(b"vlan\0", &attribute(IFLA_VLAN_ID, &[1]))), None);
        assert_eq!(vlan(&attribute(libc::IFLA_INFO_KIND, b"vlan\0")), None);
        assert_eq!(vlan(&attribute(libc::IFLA_INFO_DATA, &id)), None);
        assert_eq!(vlan(&[]), None);
    }

    fn newlink(flags: i32, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![0; 16];
        bytes[4..8].copy_from_slice(&7i32.to_ne_bytes());
        bytes[8..12].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend(attributes.concat());
        bytes
    }

    #[test]
    fn a_link_is_read_from_its_message() {
        let vlan_id = attribute(IFLA_VLAN_ID, &9u16.to_ne_bytes());
        let attributes = [
            attribute(libc::IFLA_IFNAME, b"eth0\0"),
            attribute(libc::IFLA_MTU, &1500u32.to_ne_bytes()),
            attribute(libc::IFLA_ADDRESS, &[2, 0, 0, 0, 0, 1]),
            attribute(libc::IFLA_LINKINFO, &info(b"vlan\0", &vlan_id)),
        ];
        let wanted = Interface {
            index: 7,
            name: "eth0".to_owned(),
            up: false,
            running: false,
            loopback: false,
            multicast: false,
            mtu: 1500,
            mac: Some([2, 0, 0, 0, 0, 1]),
            vlan: Some(9),
            addresses: Vec::new(),
        };
        assert_eq!(link(&newlink(0, &attributes)), Some(wanted.clone()));
        let flags = |flags| {
            let link = link(&newlink(flags, &attributes)).unwrap();
            (link.up, link.running, link.loopback, link.multicast)
        };
        assert_eq!(flags(libc::IFF_UP), (true, false, false, false));
        assert_eq!(flags(libc::IFF_RUNNING), (false, true, false, false));
        assert_eq!(flags(libc::IFF_LOOPBACK), (false, false, true, false));
        assert_eq!(flags(libc::IFF_MULTICAST), (false, false, false, true));
        assert_eq!(flags(libc::IFF_BROADCAST | libc::IFF_PROMISC), (false, false, false, false));
        let loopback = attribute(libc::IFLA_ADDRESS, &[0; 6]);
        let plain = Interface { mac: None, vlan: None, ..wanted };
        let [name, mtu, ..] = attributes;
        assert_eq!(link(&newlink(0, &[name, mtu, loopback])), Some(plain));
        assert_eq!(link(&newlink(0, &[])[..15]), None);
    }

    fn newaddr(family: i32, flags: u8, attributes: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = vec![family as u8, 24, flags, 0];
        bytes.extend(5u32.to_ne_bytes());
        bytes.extend(attributes.concat());
        bytes
    }

    #[test]
    fn an_address_is_read_from_its_message() {
        let (own, peer) = (
            attribute(libc::IFA_LOCAL, &[10, 0, 0, 1]),
            attribute(libc::IFA_ADDRESS, &[10, 0, 0, 2]),
        );
        let of = |attributes: &[Vec<u8>]| address(&newaddr(libc::AF_INET, 0, attributes));
        let wanted = |ip: &str| InterfaceAddress {
            ip: ip.parse().unwrap(),
            prefix_len: 24,
            scope_id: 0,
            tentative: false,
            deprecated: false,
            secondary: false,
        };
        // On a point-to-point link the second one is the other end's.
        assert_eq!(of(&[peer.clone(), own.clone()]), Some((5, wanted("10.0.0.1"))));
        assert_eq!(of(&[peer]), Some((5, wanted("10.0.0.2"))));
        assert_eq!(of(&[]), None);
        assert_eq!(
            address(&newaddr(libc::AF_INET6, 0, std::slice::from_ref(&own))),
            None,
            "of another length"
        );
        assert_eq!(address(&newaddr(libc::AF_UNIX, 0, &[own])), None);

        let six = |ip: &str, flags: u32| {
            let ip: Ipv6Addr = ip.parse().unwrap();
            let ip = attribute(libc::IFA_ADDRESS, &ip.octets());
            let flags = attribute(libc::IFA_FLAGS, &flags.to_ne_bytes());
            // The long flags count, not the short ones of the header.
            address(&newaddr(libc::AF_INET6, 0xff, &[ip, flags])).unwrap().1
        };
        assert_eq!(six("fd00::1", 0), wanted("fd00::1"));
        let link_local = InterfaceAddress { scope_id: 5, ..wanted("fe80::1") };
        assert_eq!(six("fe80::1", 0), link_local);
        let state = |flags| {
            let address = six("fd00::1", flags);
            (address.tentative, address.deprecated, address.secondary)
        };
        assert_eq!(state(IFA_F_TENTATIVE), (true, false, false));
        assert_eq!(state(IFA_F_TENTATIVE | IFA_F_OPTIMISTIC), (false, false, false));
        assert_eq!(state(IFA_F_OPTIMISTIC), (false, false, false));
        assert_eq!(state(IFA_F_DADFAILED), (true, false, false));
        assert_eq!(
            state(IFA_F_DADFAILED | IFA_F_OPTIMISTIC | IFA_F_TENTATIVE),
            (true, false, false)
        );
        assert_eq!(state(IFA_F_DEPRECATED), (false, true, false));
        assert_eq!(state(IFA_F_SECONDARY), (false, false, true));
        assert_eq!(state(0x80), (false, false, false));
    }

    #[test]
    fn addresses_of_one_link_are_known() {
        let is_link_local = |ip: &str| {
            let ip = ip.parse().unwrap();
            let address = InterfaceAddress {
                ip,
                prefix_len: 1,
                scope_id: 0,
                tentative: false,
                deprecated: false,
                secondary: false,
            };
            address.is_link_local()
        };
        assert!(is_link_local("fe80::1") && is_link_local("169.254.3.4"));
        assert!(!is_link_local("fd00::1") && !is_link_local("10.0.0.1"));
    }
}

//! The Ethernet address that a packet for an IP address carries: that of the host itself, of its next hop, or of a
//! group.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsFd;

use crate::interfaces::{Interface, interfaces, ip, u32_of};
use crate::sys::bound_udp_socket;
use crate::{netlink, sockopt};

/// The discard service. No host answers, but the kernel has to find the next hop's address.
const DISCARD: u16 = 9;

/// The kernel's knowledge of a neighbour.
enum Neighbour {
    Unknown,
    /// The kernel is asking.
    Incomplete,
    At([u8; 6]),
}

/// The Ethernet address for packets to `destination`, whose scope is `scope_id` if it is link-local. Waits until the kernel
/// has resolved it or given up, which takes it 3 s by default. All zeros for what does not leave the host by Ethernet.
///
/// # Errors
/// `EHOSTUNREACH` if nobody answers, `ENETUNREACH` without a route, those of the sockets.
pub fn ethernet_address(destination: IpAddr, scope_id: u32) -> io::Result<[u8; 6]> {
    if destination.is_multicast() {
        return Ok(of_group(destination));
    }
    let interfaces = interfaces()?;
    let owns = |i: &&Interface| i.addresses.iter().any(|a| a.ip == destination);
    if let Some(own) = interfaces.iter().find(owns) {
        return Ok(own.mac.unwrap_or_default());
    }
    let fd = netlink::open(0, false)?;
    let (next_hop, interface) = match route(&fd, destination, scope_id)? {
        Some(route) => route,
        None => return Err(io::Error::from_raw_os_error(libc::ENETUNREACH)),
    };
    if interfaces.iter().any(|i| i.index == interface && i.mac.is_none()) {
        return Ok([0; 6]);
    }
    // Before the first look, lest a change be missed.
    let changes = netlink::open(libc::RTMGRP_NEIGH as u32, true)?;
    let mut asked = false;
    loop {
        match known(&fd, next_hop, interface)? {
            Neighbour::At(mac) => return Ok(mac),
            // The kernel tells of its end.
            Neighbour::Incomplete => {
                sockopt::poll(changes.as_fd(), libc::POLLIN, -1)?;
                netlink::drain(&changes)?;
            }
            Neighbour::Unknown if asked => {
                return Err(io::Error::from_raw_os_error(libc::EHOSTUNREACH));
            }
            Neighbour::Unknown => {
                ask(destination, scope_id)?;
                asked = true;
            }
        }
    }
}

/// RFC 1112, RFC 2464.
fn of_group(group: IpAddr) -> [u8; 6] {
    match group {
        IpAddr::V4(v4) => {
            let [_, b, c, d] = v4.octets();
            [0x01, 0x00, 0x5e, b & 0x7f, c, d]
        }
        IpAddr::V6(v6) => {
            let [.., a, b, c, d] = v6.octets();
            [0x33, 0x33, a, b, c, d]
        }
    }
}

/// Makes the kernel resolve the address.
fn ask(destination: IpAddr, scope_id: u32) -> io::Result<()> {
    let any: IpAddr = match destination {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let mut to = SocketAddr::new(destination, DISCARD);
    if let SocketAddr::V6(v6) = &mut to {
        v6.set_scope_id(scope_id);
    }
    bound_udp_socket((any, 0))?.send_to(&[], to).map(drop)
}

/// Next hop and interface of a route.
fn route(
    fd: &std::os::fd::OwnedFd,
    destination: IpAddr,
    scope_id: u32,
) -> io::Result<Option<(IpAddr, u32)>> {
    let (family, bytes, bits) = match destination {
        IpAddr::V4(v4) => (libc::AF_INET, v4.octets().to_vec(), 32u8),
        IpAddr::V6(v6) => (libc::AF_INET6, v6.octets().to_vec(), 128),
    };
    // rtmsg: family, destination length, and ten bytes that do not matter here.
    let mut request = vec![family as u8, bits, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    netlink::add_attribute(&mut request, libc::RTA_DST, &bytes);
    if scope_id != 0 {
        netlink::add_attribute(&mut request, libc::RTA_OIF, &scope_id.to_ne_bytes());
    }
    let mut found = None;
    netlink::ask(fd, libc::RTM_GETROUTE, &request, |kind, bytes| {
        let Some((head, attributes)) = bytes.split_first_chunk::<12>() else { return };
        if kind != libc::RTM_NEWROUTE {
            return;
        }
        let (mut gateway, mut interface) = (None, None);
        for (kind, value) in netlink::attributes(attributes) {
            match kind {
                libc::RTA_GATEWAY => gateway = ip(head[0], value),
                libc::RTA_OIF => interface = u32_of(value),
                _ => {}
            }
        }
        found = interface.map(|interface| (gateway.unwrap_or(destination), interface));
    })?;
    Ok(found)
}

/// The entry in the kernel's table of neighbours.
fn known(fd: &std::os::fd::OwnedFd, neighbour: IpAddr, interface: u32) -> io::Result<Neighbour> {
    let mut found = Neighbour::Unknown;
    netlink::dump(fd, libc::RTM_GETNEIGH, |kind, bytes| {
        // ndmsg: family, 3 bytes of padding, interface, state, flags, type.
        let Some((head, attributes)) = bytes.split_first_chunk::<12>() else { return };
        let state = u16::from_ne_bytes([head[8], head[9]]);
        let is_of_interface = u32_of(&head[4..]) == Some(interface);
        if kind != libc::RTM_NEWNEIGH || !is_of_interface || state & libc::NUD_FAILED != 0 {
            return;
        }
        let (mut address, mut mac) = (None, None);
        for (kind, value) in netlink::attributes(attributes) {
            match kind {
                libc::NDA_DST => address = ip(head[0], value),
                libc::NDA_LLADDR => mac = value.try_into().ok(),
                _ => {}
            }
        }
        if address == Some(neighbour) {
            let is_incomplete = state & libc::NUD_INCOMPLETE != 0;
            match mac.filter(|_| !is_incomplete) {
                Some(mac) => found = Neighbour::At(mac),
                None if is_incomplete => found = Neighbour::Incomplete,
                None => {}
            }
        }
    })?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_the_loopback_need_no_neighbour() {
        let of = |ip: &str| ethernet_address(ip.parse().unwrap(), 0).unwrap();
        assert_eq!(of("239.129.2.3"), [0x01, 0x00, 0x5e, 0x01, 2, 3]);
        assert_eq!(of("ff0e::1:2:304"), [0x33, 0x33, 0, 2, 3, 4]);
        assert_eq!(of("127.0.0.1"), [0; 6]);
    }

    #[test]
    fn a_route_through_the_loopback_is_found() {
        let fd = netlink::open(0, false).unwrap();
        let (next_hop, interface) = route(&fd, "127.1.2.3".parse().unwrap(), 0).unwrap().unwrap();
        assert_eq!((next_hop, interface), ("127.1.2.3".parse().unwrap(), 1));
    }
}

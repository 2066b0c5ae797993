//! Where an id is: its address in the device, and the way to its peer.

use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};

use anyverbs_net::bound_udp_socket;
use anyverbs_objects::gid::GidEntry;
use anyverbs_proto::cm::Path;
use anyverbs_proto::cm::qp_attr::LocalPort;
use anyverbs_proto::types::{Gid, Mtu, PKey};

use super::Gsi;
use super::address::Address;
use super::error::CmError;

/// Code of a packet's life time that Linux takes for RoCE.
const PACKET_LIFE_TIME: u8 = 16;
/// `IBV_RATE_100_GBPS`: that of the port.
const RATE: u8 = 16;
pub(super) const HOP_LIMIT: u8 = 64;

/// An address of the device.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalAddress {
    pub(super) device: usize,
    pub(super) port: u8,
    pub(super) gid: Gid,
    pub(super) index: u8,
    pub(super) interface: u32,
    pub(super) mtu: Mtu,
}

impl From<GidEntry> for LocalAddress {
    fn from(e: GidEntry) -> Self {
        Self {
            device: e.device,
            port: e.port,
            gid: e.gid,
            index: u8::try_from(e.index).expect("the table has fewer than 256 entries"),
            interface: e.interface,
            mtu: e.mtu,
        }
    }
}

impl LocalAddress {
    /// The device's entry of a GID, on one interface unless that is 0. A device that has failed for good has none.
    pub(super) fn find(gsi: &Gsi, gid: Gid, interface: u32) -> Option<Self> {
        let entry = gsi.core().gids.find(gid, interface);
        entry.filter(|entry| !gsi.core().has_failed(entry.device)).map(Self::from)
    }

    /// Where an id that is bound to `address` is.
    pub(super) fn of(gsi: &Gsi, address: &Address) -> Result<Self, CmError> {
        if let Some(place) = Self::find(gsi, address.gid(), address.scope()) {
            return Ok(place);
        }
        let mut ip = address.socket_addr();
        ip.set_port(0);
        match bound_udp_socket(ip) {
            // Sockets may be bound to a group, devices have no such address.
            Ok(_) if address.gid().is_multicast() => {
                let errno = libc::EADDRNOTAVAIL;
                Err(CmError::System { what: "bind to this address", errno })
            }
            // The host's, but not the device's.
            Ok(_) => Err(CmError::NoDevice),
            Err(error) => Err(refused("bind to this address", &error)),
        }
    }

    /// As the queue pair's attributes name it.
    pub(super) fn local_port(&self) -> LocalPort {
        let is_local = match self.gid.to_ip() {
            std::net::IpAddr::V6(ip) => ip.is_unicast_link_local(),
            std::net::IpAddr::V4(_) => false,
        };
        LocalPort {
            port: self.port,
            sgid_index: self.index,
            pkey_index: 0,
            scope_id: if is_local { self.interface } else { 0 },
        }
    }

    /// The path MTU to a peer: ours, or that of its interface where the peer is this host.
    pub(super) fn mtu_towards(&self, peer: Option<Self>) -> Mtu {
        peer.map_or(self.mtu, |peer| self.mtu.min(peer.mtu))
    }

    /// The path to a peer, as Linux makes it up for RoCE.
    pub(super) fn path(
        &self,
        peer: Gid,
        tos: u8,
        flow_label: u32,
        ack_timeout: Option<u8>,
    ) -> Path {
        Path {
            sgid: self.gid,
            dgid: peer,
            interface: 0,
            pkey: PKey::DEFAULT,
            mtu: self.mtu,
            flow_label,
            traffic_class: tos,
            hop_limit: HOP_LIMIT,
            sl: 0,
            rate: RATE,
            // IBA 12.7.34: the ACK timeout is twice this, and the peer's delay.
            packet_life_time: match ack_timeout {
                Some(code @ 1..) => code - 1,
                _ => PACKET_LIFE_TIME,
            },
        }
    }
}

pub(super) fn refused(what: &'static str, error: &io::Error) -> CmError {
    match error.raw_os_error() {
        Some(libc::ENETUNREACH) => CmError::Unreachable,
        errno => CmError::System { what, errno: errno.unwrap_or(libc::EIO) },
    }
}

/// The loopback address of a destination that stands for every address: this host.
pub(super) fn loopback_of(destination: SocketAddr) -> SocketAddr {
    let ip = match destination {
        _ if !destination.ip().is_unspecified() => return destination,
        SocketAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
        SocketAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
    };
    SocketAddr::new(ip, destination.port())
}

/// The address of ours that the host's routes choose towards `destination`; `source`, if it is one.
pub(super) fn source_towards(
    destination: SocketAddr,
    source: Option<SocketAddr>,
) -> Result<SocketAddr, CmError> {
    const WHAT: &str = "find a route";
    let any: SocketAddr = match destination {
        SocketAddr::V4(_) => (Ipv4Addr::UNSPECIFIED, 0).into(),
        SocketAddr::V6(_) => (Ipv6Addr::UNSPECIFIED, 0).into(),
    };
    let mut from = source.unwrap_or(any);
    from.set_port(0);
    // A datagram socket that is connected asks the routes and sends nothing.
    let route = || {
        let socket = bound_udp_socket(from)?;
        socket.connect(destination)?;
        socket.local_addr()
    };
    route().map_err(|error| refused(WHAT, &error))
}

/// A flow label for a connection between two ports, so that connections spread over a network's paths.
pub(super) fn flow_label(source_port: u16, destination_port: u16) -> u32 {
    let ports = u32::from(source_port) << 16 | u32::from(destination_port);
    // Fibonacci hashing: the product's upper bits depend on all of the ports'.
    ports.wrapping_mul(0x9e37_79b9) >> 12
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_interfaces_of_a_host_the_smaller_mtu_counts() {
        let (device, port, gid) = (0, 1, Gid([1; 16]));
        let at = |mtu| LocalAddress { device, port, gid, index: 0, interface: 1, mtu };
        let (large, small) = (at(Mtu::Mtu4096), at(Mtu::Mtu1024));
        assert_eq!(large.mtu_towards(Some(small)), Mtu::Mtu1024);
        assert_eq!(small.mtu_towards(Some(large)), Mtu::Mtu1024);
        assert_eq!(large.mtu_towards(None), Mtu::Mtu4096);
    }
}

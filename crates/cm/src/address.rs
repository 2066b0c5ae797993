//! Addresses of ids.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use anyverbs_proto::cm::ListenAddress;
use anyverbs_proto::cm::id::{PortSpace, ServiceId};
use anyverbs_proto::types::{Gid, PKey};

use super::error::CmError;

/// The address of an id or of its peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Address {
    /// `AF_INET` and `AF_INET6`; the scope of a link-local address is its interface.
    Ip(SocketAddr),
    /// `AF_IB`.
    Ib(IbAddress),
}

/// `struct sockaddr_ib`, in host byte order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IbAddress {
    /// Partition; 0: any.
    pub pkey: PKey,
    /// Flow label.
    pub flow_info: u32,
    /// The port's GID; zero: any.
    pub gid: Gid,
    /// Service ID.
    pub sid: u64,
    /// The bits of `sid` that count.
    pub sid_mask: u64,
    /// Interface of a link-local GID.
    pub scope_id: u64,
}

/// `AF_INET`, `AF_INET6` or `AF_IB`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Family {
    V4,
    V6,
    Ib,
}

impl Address {
    /// Every address of a family, and any port.
    pub(super) fn any(family: Family) -> Self {
        match family {
            Family::V4 => Self::Ip((Ipv4Addr::UNSPECIFIED, 0).into()),
            Family::V6 => Self::Ip((Ipv6Addr::UNSPECIFIED, 0).into()),
            Family::Ib => Self::Ib(IbAddress {
                pkey: PKey(0),
                flow_info: 0,
                gid: Gid::ZERO,
                sid: 0,
                sid_mask: 0,
                scope_id: 0,
            }),
        }
    }

    pub(super) fn family(&self) -> Family {
        match self {
            Self::Ip(SocketAddr::V4(_)) => Family::V4,
            Self::Ip(SocketAddr::V6(_)) => Family::V6,
            Self::Ib(_) => Family::Ib,
        }
    }

    /// Whether it stands for every address.
    pub(super) fn is_any(&self) -> bool {
        match self {
            Self::Ip(a) => a.ip().is_unspecified(),
            Self::Ib(a) => a.gid.is_zero(),
        }
    }

    /// The IP address behind it, with its scope.
    pub(super) fn socket_addr(&self) -> SocketAddr {
        match self {
            Self::Ip(a) => *a,
            Self::Ib(a) => {
                let scope = u32::try_from(a.scope_id).unwrap_or(0);
                match a.gid.to_ip() {
                    IpAddr::V4(v4) => (v4, self.port()).into(),
                    IpAddr::V6(v6) => SocketAddrV6::new(v6, self.port(), 0, scope).into(),
                }
            }
        }
    }

    pub(super) fn ip(&self) -> IpAddr {
        self.socket_addr().ip()
    }

    /// The GID that stands for it.
    #[must_use]
    pub fn gid(&self) -> Gid {
        match self {
            Self::Ip(a) => a.ip().into(),
            Self::Ib(a) => a.gid,
        }
    }

    /// The port; of `AF_IB` the low 16 bits of the service ID.
    pub(super) fn port(&self) -> u16 {
        match self {
            Self::Ip(a) => a.port(),
            Self::Ib(a) => a.sid as u16,
        }
    }

    pub(super) fn with_port(self, port: u16) -> Self {
        match self {
            Self::Ip(mut a) => {
                a.set_port(port);
                Self::Ip(a)
            }
            Self::Ib(a) => {
                Self::Ib(IbAddress { sid: a.sid & !0xffff | u64::from(port), sid_mask: !0, ..a })
            }
        }
    }

    /// The same port at another address.
    pub(super) fn at(self, ip: SocketAddr) -> Self {
        match self {
            Self::Ip(a) => {
                let mut ip = ip;
                ip.set_port(a.port());
                Self::Ip(ip)
            }
            Self::Ib(a) => Self::Ib(IbAddress {
                gid: ip.ip().into(),
                scope_id: scope(&ip).into(),
                pkey: PKey::DEFAULT,
                ..a
            }),
        }
    }

    /// The scope of a link-local address; 0 for others.
    pub(super) fn scope(&self) -> u32 {
        scope(&self.socket_addr())
    }

    /// A link-local address means nothing without its interface.
    pub(super) fn check(&self) -> Result<(), CmError> {
        match self.socket_addr() {
            SocketAddr::V6(a) if a.ip().is_unicast_link_local() && a.scope_id() == 0 => {
                Err(CmError::Invalid("a link-local address without a scope"))
            }
            _ => Ok(()),
        }
    }

    /// The service ID by which a peer reaches this address.
    pub(super) fn service_id(&self, space: PortSpace) -> ServiceId {
        match self {
            Self::Ip(a) => ServiceId::of_port(space, a.port()),
            Self::Ib(a) => ServiceId(a.sid),
        }
    }

    /// The address that a listener here answers for.
    pub(super) fn listens_at(&self, only_family: bool) -> ListenAddress {
        match (self.is_any(), self.family()) {
            (false, _) => ListenAddress::Ip(self.ip()),
            (true, Family::V4) => ListenAddress::AnyV4,
            (true, Family::V6) if only_family => ListenAddress::AnyV6,
            (true, Family::V6 | Family::Ib) => ListenAddress::Any,
        }
    }

    /// The port space that an address reserves a port in. `AF_IB` names it by service ID and mask; 0 stands for the id's own.
    pub(super) fn port_space(&mut self, space: PortSpace) -> Result<PortSpace, CmError> {
        let Self::Ib(a) = self else { return Ok(space) };
        let named = [PortSpace::Ib, PortSpace::Tcp, PortSpace::Udp].into_iter().find(|s| {
            let base = ServiceId::of_port(*s, 0).0;
            let mask = a.sid_mask & !0xffff;
            let fits = space == PortSpace::Ib || space == *s;
            fits && a.sid & mask == base & mask
        });
        let named = named.ok_or(CmError::System {
            what: "bind to a service ID of another port space",
            errno: libc::EPROTONOSUPPORT,
        })?;
        let port = if a.sid_mask & 0xffff == 0 { 0 } else { a.sid & 0xffff };
        a.sid = ServiceId::of_port(named, port as u16).0;
        a.sid_mask = !0;
        Ok(named)
    }
}

fn scope(a: &SocketAddr) -> u32 {
    match a {
        SocketAddr::V6(a) if is_link_scoped(*a.ip()) => a.scope_id(),
        _ => 0,
    }
}

fn is_link_scoped(ip: Ipv6Addr) -> bool {
    ip.is_unicast_link_local() || (ip.is_multicast() && ip.octets()[1] & 0xf == 2)
}

/// An address as a peer named it, with the scope of the interface that it came by.
pub(super) fn scoped(ip: IpAddr, port: u16, interface: u32) -> SocketAddr {
    match ip {
        IpAddr::V6(v6) if is_link_scoped(v6) => SocketAddrV6::new(v6, port, 0, interface).into(),
        ip => (ip, port).into(),
    }
}

//! Names that the connection manager gives and takes.

use std::fmt;

/// Communication ID: one side's name of a connection, or of a SIDR request (IBA 12.7.1).
///
/// The top byte is the slot of the process that gave it, as in a [`crate::types::Qpn`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct CommId(pub u32);

impl CommId {
    /// In a message: the sender has, or knows, none.
    pub const NONE: Self = Self(0);

    /// The slot of the process that gave it.
    #[must_use]
    pub const fn slot(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// Whether this stands for no ID.
    #[must_use]
    pub fn is_none(self) -> bool {
        self == Self::NONE
    }
}

impl fmt::Debug for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CommId({self})")
    }
}

impl fmt::Display for CommId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

/// Port space of librdmacm (`enum rdma_port_space`).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
#[repr(u16)]
pub enum PortSpace {
    /// IP over InfiniBand.
    Ipoib = 0x0002,
    /// Reliable connections.
    Tcp = 0x0106,
    /// Datagrams.
    Udp = 0x0111,
    /// Any transport.
    Ib = 0x013f,
}

impl PortSpace {
    /// From the value of `enum rdma_port_space`.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        [Self::Ipoib, Self::Tcp, Self::Udp, Self::Ib].into_iter().find(|s| *s as u32 == code)
    }
}

/// Service ID, by which a listener is found (IBA 12.7.3).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct ServiceId(pub u64);

impl ServiceId {
    /// The service ID of a port, in host byte order (annex A11.3.2).
    #[must_use]
    pub const fn of_port(space: PortSpace, port: u16) -> Self {
        Self((space as u64) << 16 | port as u64)
    }

    /// Port space and port, if this is the service ID of one.
    #[must_use]
    pub fn port(self) -> Option<(PortSpace, u16)> {
        let space = u32::try_from(self.0 >> 16).ok().and_then(PortSpace::from_code)?;
        Some((space, self.0 as u16))
    }
}

impl fmt::Debug for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServiceId({self})")
    }
}

impl fmt::Display for ServiceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port() {
            Some((space, port)) => write!(f, "{space:?}/{port}"),
            None => write!(f, "{:#018x}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_ids_name_ports() {
        let id = ServiceId::of_port(PortSpace::Tcp, 9999);
        assert_eq!(id, ServiceId(0x0106_270f));
        assert_eq!(id.port(), Some((PortSpace::Tcp, 9999)));
        assert_eq!(ServiceId::of_port(PortSpace::Udp, 1), ServiceId(0x0111_0001));
        assert_eq!(ServiceId(0x1000_0000_0106_270f).port(), None);
        assert_eq!(ServiceId(0x0107_0001).port(), None);
        assert_eq!(id.to_string(), "Tcp/9999");
    }

    #[test]
    fn the_slot_is_the_top_byte() {
        assert_eq!(CommId(0x1234_5678).slot(), 0x12);
    }
}

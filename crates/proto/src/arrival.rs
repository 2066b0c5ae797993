//! Where a packet came from.

use crate::types::Gid;
use crate::wr::AddressVector;

/// The IP header of a packet, as far as the machines need it.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Arrival {
    /// Sender.
    pub source: Gid,
    /// The address that it was sent to: ours, or a group's.
    pub destination: Gid,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// The interface by which the packet of a link-local sender came; 0 if it has another address, or one of ours.
    pub interface: u32,
    /// The UDP port from which it came; 0 if it did not come by UDP.
    pub port: u16,
}

impl Arrival {
    /// Tells whether the network has marked the packet: it met congestion (RFC 3168).
    #[must_use]
    pub fn is_marked(&self) -> bool {
        self.traffic_class & 3 == 3
    }

    /// Gives it that mark.
    pub fn mark(&mut self) {
        self.traffic_class |= 3;
    }

    /// Tells whether the packet came from the peer at `av`, to the address that is its peer. Hosts on other links may have the
    /// same link-local addresses.
    #[must_use]
    pub fn is_from(&self, av: &AddressVector) -> bool {
        self.source == av.dgid
            && self.destination == av.sgid
            && (self.interface == 0 || self.interface == av.scope_id)
    }
}

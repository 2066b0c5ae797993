//! One UDP port, shared by all processes of a user on this host; datagrams in and out by the batch.
//!
//! ```no_run
//! use std::sync::Arc;
//! use anyverbs_net::{Destination, PortOptions, RxBatch, Slot, TxBatch, UdpPort};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let slot = Arc::new(Slot::claim("anyverbs")?);
//! let port = UdpPort::open(PortOptions { slot: Some(slot), steer_offset: 5, probe_byte: 0xff, ..PortOptions::new(4791) })?;
//!
//! let mut out = TxBatch::new();
//! let to = Destination::new("192.0.2.1:4791".parse()?);
//! let (room, _index_in_gso_batch) = out.segment(&port, &to, 5)?;
//! room.copy_from_slice(b"hello");
//! out.flush(&port)?;
//!
//! let mut batch = RxBatch::new(8)?;
//! port.receive(&mut batch)?;
//! for datagram in batch.datagrams() {
//!     println!("{} from {}", datagram.bytes.len(), datagram.source);
//! }
//! # Ok(())
//! # }
//! ```

mod capture;
mod connected;
mod error;
pub mod forward;
mod multicast;
mod outlet;
mod port;
mod rx;
mod sending;
mod sounding;
mod tx;

pub use error::OpenError;
pub use multicast::{LOOPBACK, SHARERS_VALID, is_handed_on};
pub use outlet::{Outlet, OutletRef};
pub use port::{PortOptions, UdpPort};
pub(crate) use rx::Meta;
pub use rx::{Datagram, Datagrams, RxBatch};
pub use sounding::Sounding;
pub use tx::{Destination, MAX_SEGMENTS, TxBatch, TxStats};

/// Largest IPv4 UDP payload: 65535 less the IP and UDP headers.
pub const MAX_PAYLOAD_V4: usize = 65_535 - 20 - 8;
/// Largest UDP payload that this crate sends over IPv6.
pub const MAX_PAYLOAD_V6: usize = 65_535 - 40 - 8;

/// The two address families; also the index of arrays that have one entry for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// IPv4.
    V4 = 0,
    /// IPv6.
    V6 = 1,
}

impl Family {
    pub(crate) const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub(crate) fn of(address: std::net::IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

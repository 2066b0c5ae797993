//! Addresses of ids.

use std::net::SocketAddr;

use anyverbs_proto::types::{Gid, PKey};

/// Where an id is, or whom it asks.
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
    /// Which bits of `sid` count.
    pub sid_mask: u64,
    /// Interface of a link-local GID.
    pub scope_id: u64,
}

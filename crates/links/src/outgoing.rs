//! A packet on its way to a link.

use anyverbs_proto::env::TransmitError;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::AddressVector;

/// A packet that is to leave.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// The queue pair that sends it.
    pub from: Qpn,
    /// Its address: that of the connection, or of a datagram.
    pub av: &'a AddressVector,
    /// Its headers.
    pub headers: &'a Headers,
    /// Its payload, good until the packet is sent or staged.
    pub payload: &'a Payload<'a>,
    /// Whether its queue pair is reliable.
    pub reliable: bool,
    /// The ACK that it carries, of everything up to this PSN.
    pub acks: Option<Psn>,
    /// The comment of a capture of datagrams.
    pub note: Option<&'a str>,
}

/// Why a packet did not go out.
#[derive(Clone, Copy, Debug)]
pub enum Refused {
    /// The packet was not taken.
    Transmit(TransmitError),
    /// The peer does not have this link any more: the packet needs another route.
    Reroute,
}

impl<T: Into<TransmitError>> From<T> for Refused {
    fn from(error: T) -> Self {
        Self::Transmit(error.into())
    }
}

//! Datagrams into the capture of the process.

use std::net::{IpAddr, SocketAddr};

use anyverbs_record::capture::{Capture, Frame, Way};

use super::{Datagram, Destination};

/// Writes a datagram that was sent from a port of this host. `note` says what it is, where that is known.
pub(crate) fn record_sent(
    capture: &Capture,
    source_port: u16,
    to: &Destination,
    id: u16,
    (bytes, note): (&[u8], Option<&str>),
) {
    let unspecified: IpAddr = match to.address {
        SocketAddr::V4(_) => [0; 4].into(),
        SocketAddr::V6(_) => [0; 16].into(),
    };
    let source = to.source.filter(|ip| ip.is_ipv4() == to.address.is_ipv4()).unwrap_or(unspecified);
    let frame = Frame {
        sent: true,
        source: (source, source_port).into(),
        destination: to.address,
        traffic_class: to.traffic_class,
        hop_limit: if to.hop_limit == 0 { 64 } else { to.hop_limit },
        flow_label: to.flow_label,
        id,
        bytes,
    };
    capture.record(Way::Udp, &frame, note);
}

/// Writes a datagram that came to a socket which only the sender of a question looks at, now and then.
pub(crate) fn record_answer(
    capture: &Capture,
    source: SocketAddr,
    destination: SocketAddr,
    bytes: &[u8],
) {
    // The socket shows no more of it.
    let frame = Frame {
        sent: false,
        source,
        destination,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        id: 0,
        bytes,
    };
    capture.record(Way::Udp, &frame, Some("it may have come some time before it was read"));
}

/// Writes a datagram that came to this port.
pub(crate) fn record_received(capture: &Capture, port: u16, datagram: &Datagram<'_>, id: u16) {
    let frame = Frame {
        sent: false,
        source: datagram.source,
        destination: (datagram.destination, port).into(),
        traffic_class: datagram.traffic_class,
        hop_limit: datagram.hop_limit,
        flow_label: datagram.flow_label,
        id,
        bytes: datagram.bytes,
    };
    capture.record(Way::Udp, &frame, None);
}

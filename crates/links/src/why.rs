//! Two devices of this make tell each other about failures. Others get none of it.
//!
//! A refusal has room for a code only, so its reason goes ahead of it, in a datagram. A packet that has no answer is sent once
//! more, from a socket of its own. It asks for the reason, and whoever drops it answers that socket.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyverbs_causes::Cause;
use anyverbs_net::{self as net, Destination, Uncancelled, bound_udp_socket};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::types::Psn;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::icrc::{Flow, IcrcVerdict};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN};
use anyverbs_proto::wire::reason::{ReasonPacket, drop_reason, parse_drop_reason};
use anyverbs_proto::wr::AddressVector;

use crate::Links;
use crate::udp::{address, seal};

/// Tells the sender of a packet that was dropped why. `to` is where it came from, with the address that it was sent to as
/// source.
pub fn tell_why(links: &Links, to: &Destination, psn: Psn, cause: Cause) {
    let Some(source) = to.source else { return };
    let port = links.core.config.udp_port;
    let flow = Flow::new(source, to.address.ip(), port, to.address.port());
    let mut bytes = [0; Bth::LEN + ICRC_LEN];
    bytes[..Bth::LEN].copy_from_slice(&drop_reason(cause, psn));
    seal(&flow, 0, &mut bytes);
    if let Err(error) = links.port.answer(to, &bytes) {
        tracing::debug!(%error, "a reason was not sent");
    }
}

/// Tells the peer that this end has given up a message, by UDP whatever the way of its packets: the peer has no answer to give.
pub fn tell_given_up(links: &Links, av: &AddressVector, packet: &ReasonPacket) {
    let (here, there, port) = (av.sgid.to_ip(), av.dgid.to_ip(), links.core.config.udp_port);
    let send = || {
        let _place = Place::take()?;
        let socket = net::Sounding::new(address(here, 0, av.scope_id), links.capture.clone())?;
        let mut bytes = [0; ReasonPacket::LEN + ICRC_LEN];
        bytes[..ReasonPacket::LEN].copy_from_slice(&packet.to_bytes());
        seal(&Flow::new(here, there, socket.port(), port), 0, &mut bytes);
        let note = format!("PSN {} is given up for want of a receive", packet.psn.get());
        socket.send(address(there, port, av.scope_id), &bytes, &note)
    };
    if let Err(error) = send() {
        tracing::debug!(%error, "the peer was not told of a message that was given up");
    }
}

/// Whether the system has a route from the local address to the peer.
///
/// # Errors
/// The system's reason why there is none.
pub fn check_route(links: &Links, av: &AddressVector) -> io::Result<()> {
    let _uncancelled = Uncancelled::new();
    let to = address(av.dgid.to_ip(), links.core.config.udp_port, av.scope_id);
    bound_udp_socket(address(av.sgid.to_ip(), 0, av.scope_id))?.connect(to)
}

/// The right to a socket, the socket, and the way back from the peer.
type Asking = (Place, net::Sounding, Flow);

/// A packet that had no answer, sent once more for what the network and the peer's device have to say about it.
#[derive(Debug)]
pub struct Sounding {
    socket: io::Result<Asking>,
    psn: Psn,
    /// The network tells each error once.
    found: Option<Cause>,
}

impl Sounding {
    /// Sends it for this device. `before` is what was heard of this packet earlier.
    #[must_use]
    pub fn new(
        (links, device): (&Links, u8),
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
        before: Option<Cause>,
    ) -> Self {
        let socket = send(links, av, headers, payload).map(|(len, socket)| {
            links.core.count(device.into(), Counter::SentPkts, 1);
            links.core.count(device.into(), Counter::SentBytes, len as u64);
            socket
        });
        Self { socket, psn: headers.bth.psn, found: before }
    }

    /// Whether the packet has left.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.socket.is_ok()
    }

    /// The cause that was heard so far. The peer's device knows more than the network.
    #[must_use]
    pub fn verdict(&mut self) -> Option<Cause> {
        use io::ErrorKind as K;
        let network = match &self.socket {
            Ok((_, socket, _)) => socket.error().map_or(K::Other, |error| error.kind()),
            Err(error) if net::Sounding::has_no_way(error) => K::NetworkUnreachable,
            Err(error) => error.kind(),
        };
        let mut found = match network {
            K::ConnectionRefused => Some(Cause::NobodyOnPort),
            K::HostUnreachable | K::NetworkUnreachable | K::NetworkDown => Some(Cause::NoRoute),
            _ => None,
        };
        if let Ok((_, socket, back)) = &self.socket {
            let mut room = [0; Bth::LEN + ICRC_LEN + 1];
            for _ in 0..MOST_ANSWERS {
                let Some(len) = socket.receive(&mut room) else { break };
                found = parse_answer(&room[..len], back, self.psn).or(found);
            }
        }
        self.found = found.or(self.found);
        self.found
    }
}

/// Datagrams that are looked at in one go.
const MOST_ANSWERS: usize = 16;

/// Sockets that a process may have for this at once, since the number of its descriptors is limited. A queue pair that gets none
/// fails without a reason.
const MOST_AT_ONCE: usize = 128;

/// How many there are.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// The right to have one of them.
#[derive(Debug)]
struct Place;

impl Place {
    fn take() -> io::Result<Self> {
        let more = |open| (open < MOST_AT_ONCE).then_some(open + 1);
        match OPEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more) {
            Ok(_) => Ok(Self),
            Err(_) => Err(io::Error::other("too many packets without an answer")),
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
    }
}

fn parse_answer(datagram: &[u8], back: &Flow, psn: Psn) -> Option<Cause> {
    let (bytes, _) = datagram.split_last_chunk::<ICRC_LEN>()?;
    let is_whole = back.check(datagram, 0) != IcrcVerdict::Wrong;
    if is_whole { parse_drop_reason(bytes, psn) } else { None }
}

/// Sends it; its length, and where to wait.
fn send(
    links: &Links,
    av: &AddressVector,
    headers: &Headers,
    payload: &Payload<'_>,
) -> io::Result<(usize, Asking)> {
    let place = Place::take()?;
    let (here, there, port) = (av.sgid.to_ip(), av.dgid.to_ip(), links.core.config.udp_port);
    let socket = net::Sounding::new(address(here, 0, av.scope_id), links.capture.clone())?;
    let pad = Bth::pad_of(payload.len());
    let headers = Headers { bth: Bth { pad, ..headers.bth }, ..*headers };
    let (head, end) = (headers.len(), headers.len() + payload.len());
    let mut packet = vec![0; end + usize::from(pad) + ICRC_LEN];
    headers.emit(&mut packet);
    payload
        .copy_to(&links.core.mrs, &links.core.memory, &mut packet[head..end])
        .map_err(|_| io::Error::other("its memory is gone"))?;
    seal(&Flow::new(here, there, socket.port(), port), 0, &mut packet);
    let note = format!("PSN {} once more, which asks why it has no answer", headers.bth.psn.get());
    socket.send(address(there, port, av.scope_id), &packet, &note)?;
    let back = Flow::new(there, here, port, socket.port());
    Ok((packet.len(), (place, socket, back)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The only test here that takes places.
    #[test]
    fn a_process_has_few_sockets_for_reasons() {
        let mut places: Vec<_> = (0..MOST_AT_ONCE).map(|_| Place::take().unwrap()).collect();
        assert!(Place::take().is_err());
        places.pop();
        assert!(Place::take().is_ok());
        drop(places);
        assert_eq!(OPEN.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_reason_of_a_drop_counts_for_its_packet_alone() {
        let (here, there) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let (back, psn) = (Flow::new(there, here, 4791, 50_000), Psn::new(0x12_3456));
        let datagram = |cause, psn| {
            let mut bytes = [0; Bth::LEN + ICRC_LEN];
            bytes[..Bth::LEN].copy_from_slice(&drop_reason(cause, psn));
            seal(&back, 0, &mut bytes);
            bytes
        };
        let good = datagram(Cause::PsnDiffers, psn);
        assert_eq!(parse_answer(&good, &back, psn), Some(Cause::PsnDiffers));
        assert_eq!(parse_answer(&good, &back, psn.plus(1)), None);
        assert_eq!(parse_answer(&datagram(Cause::RkeyUnknown, psn), &back, psn), None);
        let mut damaged = good;
        damaged[10] ^= 1;
        assert_eq!(parse_answer(&damaged, &back, psn), None);
        for len in 0..good.len() {
            assert_eq!(parse_answer(&good[..len], &back, psn), None, "{len}");
        }
    }
}

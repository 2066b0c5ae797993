//! An ACK that a request carries, between devices of this make. It lies in four bytes behind the pad: a zero, and the PSN of the
//! newest request that was executed.
//!
//! The seven reserved bits beside the ACK request ([`Bth::resv7`]) say that it is there, and in other packets that the sender
//! takes such ACKs. Other devices send them as zero and ignore them. The ICRC covers the bits and the ACK.

use super::bth::Bth;
use super::field::{byte_and_u24, u24_at};
use super::opcode::Service;
use crate::types::Psn;

/// Bytes on the wire.
pub const LEN: usize = 4;

/// The place of the ACK request and of the reserved bits.
const AT: usize = 8;
const ACK_REQ: u8 = 0x80;
/// The sender takes ACKs that requests carry.
const TAKES: u8 = 0x2a;
/// The packet carries one, and the sender takes them.
const CARRIES: u8 = 0x55;

/// Says in a packet that its sender takes ACKs.
///
/// # Panics
/// If the packet has no whole base header.
#[inline]
pub fn announce(packet: &mut [u8]) {
    packet[AT] = packet[AT] & ACK_REQ | TAKES;
}

/// Adds an ACK to a packet, without its ICRC, whose last four bytes are free.
///
/// # Panics
/// If the packet is shorter than its base header and the ACK.
#[inline]
pub fn write(acks: Psn, packet: &mut [u8]) {
    packet[AT] = packet[AT] & ACK_REQ | CARRIES;
    let room = packet.last_chunk_mut::<LEN>().expect("the packet has room for the ACK");
    *room = byte_and_u24(0, acks.get());
}

/// Whether the sender of a packet takes ACKs.
#[inline]
#[must_use]
pub const fn takes(bth: &Bth) -> bool {
    matches!(bth.resv7, TAKES | CARRIES)
}

/// Whether a packet carries an ACK: a request of a reliable connection.
#[inline]
#[must_use]
pub(crate) fn is_carried_by(bth: &Bth) -> bool {
    bth.resv7 == CARRIES && bth.opcode.service == Service::Rc && bth.opcode.is_request()
}

/// Takes the ACK off a packet, without its ICRC, if it has one.
#[inline]
#[must_use]
pub fn split(packet: &[u8]) -> (&[u8], Option<Psn>) {
    if packet.get(AT).is_none_or(|byte| byte & !ACK_REQ != CARRIES) {
        return (packet, None);
    }
    match packet.split_last_chunk::<LEN>() {
        Some((rest, ack)) if rest.len() >= Bth::LEN => (rest, Some(Psn::new(u24_at(ack, 1)))),
        _ => (packet, None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qp::Incoming;
    use crate::types::Qpn;
    use crate::wire::opcode::{Opcode, Operation};
    use crate::wire::packet::{Beginning, Headers, Malformed, Packet};

    const PSN: Psn = Psn::new(0x00ab_cdef);

    /// A packet of eight bytes that carries an ACK.
    fn carrier(service: Service, operation: Operation) -> Vec<u8> {
        let bth = Bth::new(Opcode::new(service, operation), Qpn::new(7), Psn::new(9));
        let headers = Headers::new(Bth { ack_req: true, ..bth });
        let mut bytes = vec![0; headers.len() + 8 + LEN];
        headers.emit(&mut bytes);
        bytes[headers.len()..][..8].fill(3);
        write(PSN, &mut bytes);
        bytes
    }

    fn read(bytes: &[u8]) -> Result<(usize, Option<Psn>, bool), Malformed> {
        let mut packet = Incoming::default();
        packet.parse_next(&mut Beginning::default(), bytes)?;
        assert!(packet.headers.bth.ack_req);
        Ok((packet.payload.len(), packet.acks, takes(&packet.headers.bth)))
    }

    #[test]
    fn a_request_carries_an_ack() {
        let mut bytes = carrier(Service::Rc, Operation::SendOnly);
        assert_eq!(read(&bytes), Ok((8, Some(PSN), true)));
        bytes.truncate(bytes.len() - LEN);
        announce(&mut bytes);
        assert_eq!(read(&bytes), Ok((8, None, true)));
    }

    #[test]
    fn others_carry_none() {
        let bytes = carrier(Service::Rc, Operation::SendOnly);
        for bits in (0..ACK_REQ).filter(|bits| *bits != CARRIES) {
            let mut other = bytes.clone();
            other[AT] = ACK_REQ | bits;
            assert_eq!(read(&other), Ok((8 + LEN, None, bits == TAKES)), "{bits:#x}");
        }
        for (service, operation) in
            [(Service::Uc, Operation::SendOnly), (Service::Rc, Operation::ReadResponseMiddle)]
        {
            assert_eq!(read(&carrier(service, operation)), Err(Malformed::Length));
        }
    }

    #[test]
    fn a_packet_without_room_for_it_carries_none() {
        let bytes = carrier(Service::Rc, Operation::SendOnly);
        for len in 0..Bth::LEN + LEN {
            assert_eq!(split(&bytes[..len]), (&bytes[..len], None));
        }
        assert_eq!(Packet::parse(&bytes[..Bth::LEN]).unwrap().payload, []);
        assert!(split(&bytes[..Bth::LEN + LEN]).1.is_some());
    }
}

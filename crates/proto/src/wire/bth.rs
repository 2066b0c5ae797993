//! Base transport header (IBA 9.2).

use std::fmt;

use super::field::{byte_and_u24, u16_at, u24_at};
use super::opcode::Opcode;
use super::packet::Malformed;
use crate::types::{PKey, Psn, Qpn};

/// Base transport header: every packet starts with one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// Service and operation.
    pub opcode: Opcode,
    /// SE: the completion of this message is a solicited event.
    pub solicited: bool,
    /// Migration state; sent as 0 or 1 by different peers, and without meaning here.
    pub migreq: bool,
    /// Zero bytes after the payload, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: PKey,
    /// A switch on the way saw congestion.
    pub fecn: bool,
    /// The receiver of an earlier packet saw congestion.
    pub becn: bool,
    /// The six reserved bits beside them, for [`OURS`](Self::OURS) and [`ASKS`](Self::ASKS).
    pub reserved: u8,
    /// Destination queue pair.
    pub dest_qpn: Qpn,
    /// The requester asks for an acknowledgement.
    pub ack_req: bool,
    /// The seven reserved bits beside it, for [ACKs that requests carry](super::carried_ack).
    pub resv7: u8,
    /// Packet sequence number.
    pub psn: Psn,
}

impl Bth {
    /// Bytes on the wire.
    pub const LEN: usize = 12;

    /// In [`reserved`](Self::reserved): the sender is a device of this make, and understands reasons. Other receivers ignore
    /// these bits, and no checksum covers them.
    pub const OURS: u8 = 1;

    /// In [`reserved`](Self::reserved): the sender repeats a packet that had no answer. If the receiver drops it, the sender
    /// wants to know why.
    pub const ASKS: u8 = 2;

    /// A header with the default partition and no flags.
    #[must_use]
    pub const fn new(opcode: Opcode, dest_qpn: Qpn, psn: Psn) -> Self {
        Self {
            opcode,
            solicited: false,
            migreq: false,
            pad: 0,
            pkey: PKey::DEFAULT,
            fecn: false,
            becn: false,
            reserved: 0,
            dest_qpn,
            ack_req: false,
            resv7: 0,
            psn,
        }
    }

    /// The pad that a payload of `len` bytes needs.
    #[must_use]
    pub const fn pad_of(len: usize) -> u8 {
        (len.wrapping_neg() & 3) as u8
    }

    /// Reads a header.
    ///
    /// # Errors
    /// [`Malformed::Version`] and [`Malformed::Opcode`].
    #[inline]
    pub const fn parse(b: &[u8; Self::LEN]) -> Result<Self, Malformed> {
        if b[1] & 0x0f != 0 {
            return Err(Malformed::Version);
        }
        let Some(opcode) = Opcode::parse(b[0]) else {
            return Err(Malformed::Opcode);
        };
        Ok(Self {
            opcode,
            solicited: b[1] & 0x80 != 0,
            migreq: b[1] & 0x40 != 0,
            pad: b[1] >> 4 & 3,
            pkey: PKey(u16_at(b, 2)),
            fecn: b[4] & 0x80 != 0,
            becn: b[4] & 0x40 != 0,
            reserved: b[4] & 0x3f,
            dest_qpn: Qpn::new(u24_at(b, 5)),
            ack_req: b[8] & 0x80 != 0,
            resv7: b[8] & 0x7f,
            psn: Psn::new(u24_at(b, 9)),
        })
    }

    /// The destination queue pair of a packet that was not parsed yet. `None` if it has no whole header.
    #[must_use]
    #[inline]
    pub fn dest_of(packet: &[u8]) -> Option<Qpn> {
        Some(Qpn::new(u24_at(packet.first_chunk::<{ Self::LEN }>()?, 5)))
    }

    /// The bytes of a header of the default partition with an opcode of the manufacturers' range, and two numbers of 24 bits
    /// where others have the destination and the PSN.
    pub(super) const fn of_manufacturer(opcode: u8, high: u32, low: u32) -> [u8; Self::LEN] {
        let [p, k] = PKey::DEFAULT.0.to_be_bytes();
        let ([c, q, r, s], [a, x, y, z]) = (byte_and_u24(0, high), byte_and_u24(0, low));
        [opcode, 0, p, k, c, q, r, s, a, x, y, z]
    }

    /// Writes the header.
    #[inline]
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        debug_assert!(self.opcode.is_legal() && self.pad < 4 && self.reserved < 64);
        debug_assert!(self.resv7 < 128);
        let flags =
            u8::from(self.solicited) << 7 | u8::from(self.migreq) << 6 | (self.pad & 3) << 4;
        let congestion = u8::from(self.fecn) << 7 | u8::from(self.becn) << 6 | self.reserved;
        let [p, k] = self.pkey.0.to_be_bytes();
        let [c, q, r, s] = byte_and_u24(congestion, self.dest_qpn.get());
        let [a, x, y, z] = byte_and_u24(u8::from(self.ack_req) << 7 | self.resv7, self.psn.get());
        // In one piece, so that it is a few stores.
        *b = [self.opcode.code(), flags, p, k, c, q, r, s, a, x, y, z];
    }
}

impl fmt::Display for Bth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} qp {} psn {}", self.opcode, self.dest_qpn, self.psn.get())?;
        let flags = [
            (self.ack_req, " ack"),
            (self.solicited, " se"),
            (self.fecn, " fecn"),
            (self.becn, " becn"),
            (self.reserved & Self::ASKS != 0, " asks"),
        ];
        for (_, name) in flags.into_iter().filter(|(set, _)| *set) {
            f.write_str(name)?;
        }
        if self.pkey != PKey::DEFAULT {
            write!(f, " pkey {:#06x}", self.pkey.0)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: [u8; 12] = [0x04, 0xf0, 0x80, 0x01, 0xff, 0x0a, 0, 1, 0xff, 0, 0, 17];

    #[test]
    fn reads_every_field() {
        let bth = Bth::parse(&BYTES).unwrap();
        assert!(bth.solicited && bth.migreq && bth.fecn && bth.becn && bth.ack_req);
        assert_eq!(bth.resv7, 0x7f);
        assert_eq!((bth.pad, bth.pkey, bth.psn), (3, PKey(0x8001), Psn::new(17)));
        assert_eq!(bth.reserved, 0x3f);
        assert_eq!(bth.dest_qpn, Qpn::new(0x0a_0001));
        assert_eq!(
            bth.to_string(),
            "RC SEND_ONLY qp 0x0a0001 psn 17 ack se fecn becn asks pkey 0x8001"
        );
    }

    #[test]
    fn finds_the_destination_before_all_is_parsed() {
        assert_eq!(Bth::dest_of(&[&BYTES[..], &[7; 9]].concat()), Some(Qpn::new(0x0a_0001)));
        assert_eq!(Bth::dest_of(&BYTES[..11]), None);
    }

    #[test]
    fn writes_the_reserved_bits_that_it_read() {
        assert_eq!(BYTES[8], 0xff);
        let mut out = [0; 12];
        Bth::parse(&BYTES).unwrap().emit(&mut out);
        assert_eq!(out, BYTES);
    }

    #[test]
    fn refuses_other_versions_and_opcodes() {
        let mut bytes = BYTES;
        bytes[1] |= 1;
        assert_eq!(Bth::parse(&bytes), Err(Malformed::Version));
        bytes = BYTES;
        bytes[0] = 0x15;
        assert_eq!(Bth::parse(&bytes), Err(Malformed::Opcode));
    }

    #[test]
    fn pad_fills_four_bytes() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(Bth::pad_of), [0, 3, 2, 1, 0, 3]);
    }
}

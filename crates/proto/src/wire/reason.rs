//! Reasons of failures, between devices of this make. The opcode is of the range that the IBA leaves to manufacturers. Others
//! ignore it.

use anyverbs_causes::Cause;

use super::bth::Bth;
use super::field::u24_at;
use crate::reason::Told;
use crate::types::{Psn, Qpn};

/// Opcode of a reason, by its length of either kind: BTH (destination and PSN of the NAK that follows), two zeros, the cause and its
/// value. Or BTH alone (in the place of the destination the cause, PSN of the packet that was dropped).
const REASON: u8 = 0xc4;

/// The bytes of a base header that stands for a reason.
const fn bth(high: u32, psn: Psn) -> [u8; Bth::LEN] {
    Bth::of_manufacturer(REASON, high, psn.get())
}

/// The numbers in such a header.
fn parse_bth(bytes: &[u8; Bth::LEN]) -> Option<(u32, Psn)> {
    (bytes[0] == REASON).then(|| (u24_at(bytes, 5), Psn::new(u24_at(bytes, 9))))
}

/// The reason for the NAK that follows it, without its ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasonPacket {
    /// The queue pair that it is for.
    pub dest: Qpn,
    /// The PSN of the NAK.
    pub psn: Psn,
    /// The reason.
    pub told: Told,
}

impl ReasonPacket {
    /// Bytes: a multiple of four, as every packet has. Otherwise the IPv4 ID behind its ICRC could not be found out.
    pub const LEN: usize = Self::TOLD_AT + Told::LEN;
    const TOLD_AT: usize = Bth::LEN + 2;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..Bth::LEN].copy_from_slice(&bth(self.dest.get(), self.psn));
        bytes[Self::TOLD_AT..].copy_from_slice(&self.told.to_bytes());
        bytes
    }

    /// Reads one. `None` for anything else.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let head = bytes.first_chunk()?;
        let (dest, psn) = parse_bth(head)?;
        let told = Told::from_bytes(bytes[Self::TOLD_AT..].try_into().ok()?)?;
        Some(Self { dest: Qpn::new(dest), psn, told })
    }
}

/// The reason why a packet was dropped. It is as short as the shortest packet.
#[must_use]
pub fn drop_reason(cause: Cause, psn: Psn) -> [u8; Bth::LEN] {
    bth(cause.number().into(), psn)
}

/// Reads the reason why the packet `psn` was dropped. `None` for anything else.
#[must_use]
pub fn parse_drop_reason(bytes: &[u8], psn: Psn) -> Option<Cause> {
    let (number, of) = parse_bth(bytes.try_into().ok()?)?;
    let cause = Cause::from_number(number.try_into().ok()?)?;
    // A cause of another status would be a lie of the peer. A script of its own has any.
    (of == psn && (number / 100 == 12 || cause == Cause::Injected)).then_some(cause)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reason_of_a_nak_survives_the_way() {
        let told = Told { cause: Cause::RkeyUnknown, value: 7 };
        let packet = ReasonPacket { dest: Qpn::new(9), psn: Psn::new(0xab_cdef), told };
        assert_eq!(ReasonPacket::parse(&packet.to_bytes()), Some(packet));
        assert_eq!(ReasonPacket::LEN % 4, 0);
        assert_eq!(ReasonPacket::parse(&[0xc1; ReasonPacket::LEN]), None);
        assert_eq!(ReasonPacket::parse(&packet.to_bytes()[1..]), None);
    }

    #[test]
    fn the_reason_of_a_drop_survives_the_way() {
        let psn = Psn::new(0x12_3456);
        let bytes = drop_reason(Cause::PsnDiffers, psn);
        assert_eq!(bytes[0], 0xc4);
        assert_eq!(parse_drop_reason(&bytes, psn), Some(Cause::PsnDiffers));
        assert_eq!(parse_drop_reason(&bytes, psn.plus(1)), None);
        assert_eq!(parse_drop_reason(&bytes[1..], psn), None);
    }
}

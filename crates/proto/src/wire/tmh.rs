//! Headers of messages for a tag-matching SRQ. They lie in front of the payload of a SEND, where other devices see data
//! (`tm_types.h` of rdma-core, `ibv_post_srq_ops(3)`).

use std::fmt;

use super::field::{put, u32_at, u64_at};

/// The kind of a message (`enum ibv_tmh_op`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum TmOp {
    /// For the program alone.
    NoTag = 0,
    /// Announces data that the receiver fetches.
    Rndv = 1,
    /// The data was fetched.
    Fin = 2,
    /// Carries its data.
    Eager = 3,
}

impl TmOp {
    /// From its code; `None` for one that does not exist.
    #[must_use]
    pub fn from_code(code: u8) -> Option<Self> {
        [Self::NoTag, Self::Rndv, Self::Fin, Self::Eager].into_iter().find(|op| *op as u8 == code)
    }
}

/// Tag-matching header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tmh {
    /// The kind of the message.
    pub op: TmOp,
    /// The sending program's own word.
    pub user_data: u32,
    /// Tag.
    pub tag: u64,
}

impl Tmh {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Reads a header; `None` for an operation that does not exist. The reserved bytes are ignored.
    #[must_use]
    pub fn parse(b: &[u8; Self::LEN]) -> Option<Self> {
        Some(Self { op: TmOp::from_code(b[0])?, user_data: u32_at(b, 4), tag: u64_at(b, 8) })
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        *b = [0; Self::LEN];
        b[0] = self.op as u8;
        put(b, 4, self.user_data.to_be_bytes());
        put(b, 8, self.tag.to_be_bytes());
    }
}

impl fmt::Display for Tmh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} tag {:#x}", self.op, self.tag)
    }
}

/// Rendezvous header: follows the tag-matching header of [`TmOp::Rndv`] and [`TmOp::Fin`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rvh {
    /// The address of the sender's data.
    pub va: u64,
    /// Its key.
    pub rkey: u32,
    /// Bytes.
    pub len: u32,
}

impl Rvh {
    /// Bytes on the wire.
    pub const LEN: usize = 16;

    /// Reads a header.
    #[must_use]
    pub const fn parse(b: &[u8; Self::LEN]) -> Self {
        Self { va: u64_at(b, 0), rkey: u32_at(b, 8), len: u32_at(b, 12) }
    }

    /// Writes the header.
    pub fn emit(&self, b: &mut [u8; Self::LEN]) {
        put(b, 0, self.va.to_be_bytes());
        put(b, 8, self.rkey.to_be_bytes());
        put(b, 12, self.len.to_be_bytes());
    }
}

impl fmt::Display for Rvh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "va {:#x} rkey {:#010x} len {}", self.va, self.rkey, self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_are_laid_out_as_in_tm_types_h() {
        let tmh = Tmh { op: TmOp::Rndv, user_data: 0x0102_0304, tag: 0x1112_1314_1516_1718 };
        let mut b = [0xff; Tmh::LEN];
        tmh.emit(&mut b);
        assert_eq!(b, [1, 0, 0, 0, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18]);
        assert_eq!(Tmh::parse(&b), Some(tmh));
        b[0] = 4;
        assert_eq!(Tmh::parse(&b), None);

        let rvh = Rvh { va: 0x2122_2324_2526_2728, rkey: 0x3132_3334, len: 0x4142_4344 };
        let mut b = [0; Rvh::LEN];
        rvh.emit(&mut b);
        assert_eq!((b[0], b[8], b[12]), (0x21, 0x31, 0x41));
        assert_eq!(Rvh::parse(&b), rvh);
    }

    #[test]
    fn headers_print_as_their_fields() {
        let tmh = Tmh { op: TmOp::Rndv, user_data: 1, tag: 0x1f };
        assert_eq!(tmh.to_string(), "Rndv tag 0x1f");
        let rvh = Rvh { va: 0x2000, rkey: 0x31, len: 64 };
        assert_eq!(rvh.to_string(), "va 0x2000 rkey 0x00000031 len 64");
    }
}

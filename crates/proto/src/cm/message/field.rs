//! Fields of a message: where each lies, and how its type is read and written there.

use crate::cm::id::{CommId, ServiceId};
use crate::types::{Gid, Mtu, PKey, Psn, QKey, Qpn};

/// Bytes of a message behind the MAD header.
pub const BODY_LEN: usize = 232;

/// A message behind the MAD header.
pub type Body = [u8; BODY_LEN];

/// The place of a field: first bit, counted from the most significant of the body, and width.
#[derive(Clone, Copy, Debug)]
pub(super) struct FieldPosition {
    pub(super) first: usize,
    /// `None`: as wide as the type.
    pub(super) width: Option<usize>,
}

/// A whole field at a byte, as wide as its type.
pub(super) const fn at(byte: usize) -> FieldPosition {
    FieldPosition { first: byte * 8, width: None }
}

/// Some bits of a byte (or from there on), `bit` counted from the most significant.
pub(super) const fn bits(byte: usize, bit: usize, width: usize) -> FieldPosition {
    FieldPosition { first: byte * 8 + bit, width: Some(width) }
}

/// The unsigned number in `width` (at most 64) bits from `first` on.
pub(super) fn read(body: &[u8], first: usize, width: usize) -> u64 {
    let end = first + width;
    let bytes = &body[first / 8..end.div_ceil(8)];
    let number = bytes.iter().fold(0u128, |n, b| n << 8 | u128::from(*b));
    ((number >> (end.div_ceil(8) * 8 - end)) & ((1u128 << width) - 1)) as u64
}

/// Writes the low `width` bits of a number; the bits around them stay.
pub(super) fn write(body: &mut [u8], first: usize, width: usize, value: u64) {
    let end = first + width;
    let shift = end.div_ceil(8) * 8 - end;
    let mask = ((1u128 << width) - 1) << shift;
    let mut number = (u128::from(value) << shift) & mask;
    let mut mask = mask;
    for byte in body[first / 8..end.div_ceil(8)].iter_mut().rev() {
        *byte = *byte & !(mask as u8) | number as u8;
        number >>= 8;
        mask >>= 8;
    }
}

/// A type that can stand in a message.
pub(super) trait Value: Sized {
    /// Its width where the place does not say.
    const BITS: usize;
    fn read(body: &[u8], first: usize, width: usize) -> Self;
    fn write(&self, body: &mut [u8], first: usize, width: usize);
}

macro_rules! number {
    ($($ty:ty: $bits:literal, $from:expr, $to:expr;)*) => { $(
        impl Value for $ty {
            const BITS: usize = $bits;
            fn read(body: &[u8], first: usize, width: usize) -> Self {
                $from(read(body, first, width))
            }
            fn write(&self, body: &mut [u8], first: usize, width: usize) {
                write(body, first, width, $to(*self));
            }
        }
    )* };
}
pub(super) use number;

number! {
    bool: 1, |n| n != 0, u64::from;
    u8: 8, |n| n as u8, u64::from;
    u16: 16, |n| n as u16, u64::from;
    u32: 32, |n| n as u32, u64::from;
    u64: 64, |n| n, |n| n;
    CommId: 32, |n| CommId(n as u32), |id: CommId| u64::from(id.0);
    ServiceId: 64, ServiceId, |id: ServiceId| id.0;
    Qpn: 24, |n| Qpn::new(n as u32), |n: Qpn| u64::from(n.get());
    Psn: 24, |n| Psn::new(n as u32), |n: Psn| u64::from(n.get());
    QKey: 32, |n| QKey(n as u32), |k: QKey| u64::from(k.0);
    PKey: 16, |n| PKey(n as u16), |k: PKey| u64::from(k.0);
    Option<Mtu>: 4, |n| Mtu::from_code(n as u32), |m: Option<Mtu>| m.map_or(0, |m| m as u64);
}

impl<const N: usize> Value for [u8; N] {
    const BITS: usize = N * 8;
    fn read(body: &[u8], first: usize, _: usize) -> Self {
        *body[first / 8..].first_chunk().expect("the field lies inside the body")
    }
    fn write(&self, body: &mut [u8], first: usize, _: usize) {
        body[first / 8..][..N].copy_from_slice(self);
    }
}

impl Value for Gid {
    const BITS: usize = 128;
    fn read(body: &[u8], first: usize, width: usize) -> Self {
        Self(Value::read(body, first, width))
    }
    fn write(&self, body: &mut [u8], first: usize, width: usize) {
        self.0.write(body, first, width);
    }
}

/// Makes the type of a message from its table: each field with its place, once for reading and writing.
macro_rules! message {
    (
        $(#[$doc:meta])*
        $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $ty:ty = $place:expr,)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl $name {
            /// Reads the message; reserved bits are ignored.
            #[must_use]
            pub fn parse(body: &$crate::cm::message::Body) -> Self {
                Self { $($field: {
                    let place = $place;
                    let width = place.width.unwrap_or(<$ty as $crate::cm::message::field::Value>::BITS);
                    <$ty as $crate::cm::message::field::Value>::read(body, place.first, width)
                },)* }
            }

            /// Writes the message; reserved bits are zero.
            pub fn emit(&self, body: &mut $crate::cm::message::Body) {
                body.fill(0);
                $({
                    let place = $place;
                    let width = place.width.unwrap_or(<$ty as $crate::cm::message::field::Value>::BITS);
                    $crate::cm::message::field::Value::write(&self.$field, body, place.first, width);
                })*
            }

            /// First bit, width and name of each field.
            #[cfg(test)]
            pub(super) fn places() -> Vec<(usize, usize, &'static str)> {
                vec![$({
                    let place = $place;
                    let width = place.width.unwrap_or(<$ty as $crate::cm::message::field::Value>::BITS);
                    (place.first, width, stringify!($field))
                },)*]
            }
        }

        impl Default for $name {
            /// All zero.
            fn default() -> Self {
                Self::parse(&[0; $crate::cm::message::BODY_LEN])
            }
        }
    };
}
pub(super) use message;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_read_where_they_were_written() {
        for first in 0..24 {
            for width in 1..=64 {
                let mut body = [0xa5u8; 12];
                let value = 0x0123_4567_89ab_cdef & (((1u128 << width) - 1) as u64);
                write(&mut body, first, width, 0x0123_4567_89ab_cdef);
                assert_eq!(read(&body, first, width), value, "{first} {width}");
                write(&mut body, first, width, read(&[0xa5; 12], first, width));
                assert_eq!(body, [0xa5; 12], "the bits around stay: {first} {width}");
            }
        }
    }

    #[test]
    fn fields_are_big_endian() {
        let mut body = [0; 4];
        write(&mut body, 8, 16, 0x1234);
        assert_eq!(body, [0, 0x12, 0x34, 0]);
        write(&mut body, 24, 5, 0x1f);
        assert_eq!(body[3], 0xf8);
    }
}

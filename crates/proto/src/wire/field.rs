//! Big-endian fields at fixed places of a header.
//!
//! Every caller passes an array of the header's length and constant offsets inside it.

pub(super) const fn u16_at<const N: usize>(b: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([b[at], b[at + 1]])
}

pub(super) const fn u24_at<const N: usize>(b: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([0, b[at], b[at + 1], b[at + 2]])
}

pub(super) const fn u32_at<const N: usize>(b: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

pub(super) const fn u64_at<const N: usize>(b: &[u8; N], at: usize) -> u64 {
    (u32_at(b, at) as u64) << 32 | u32_at(b, at + 4) as u64
}

/// Writes the bytes of one field (`to_be_bytes` of its value) at its place.
#[inline]
pub(super) fn put<const N: usize, const M: usize>(b: &mut [u8; N], at: usize, field: [u8; M]) {
    b[at..at + M].copy_from_slice(&field);
}

/// A byte and a 24-bit number, as four bytes.
pub(super) const fn byte_and_u24(byte: u8, n: u32) -> [u8; 4] {
    ((byte as u32) << 24 | n & 0xff_ffff).to_be_bytes()
}

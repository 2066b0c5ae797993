//! The register of CRC-32 as a linear machine over GF(2).
//!
//! A register holds a polynomial modulo the generator, bit 31 its constant term ("reflected"). Feeding a zero byte
//! multiplies it by x^8. Feeding a byte `b` first adds `b` to the low eight bits. So the contribution of a byte depends
//! only on how many bytes follow it, contributions add up, and every step can be undone.

/// The generator, reflected, without its term x^32.
const POLY: u32 = 0xedb8_8320;

const fn step(r: u32) -> u32 {
    r >> 1 ^ if r & 1 != 0 { POLY } else { 0 }
}

const fn step_back(r: u32) -> u32 {
    if r >> 31 != 0 { (r ^ POLY) << 1 | 1 } else { r << 1 }
}

/// The contribution of each byte value after `following` more bytes.
pub(super) const fn contribution(following: usize) -> [u32; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut r = byte as u32;
        let mut steps = 8 * (following + 1);
        while steps > 0 {
            r = step(r);
            steps -= 1;
        }
        table[byte] = r;
        byte += 1;
    }
    table
}

/// Contributions of bytes with 0 to 7 more behind them.
pub(super) static AFTER: [[u32; 256]; 8] = [
    contribution(0),
    contribution(1),
    contribution(2),
    contribution(3),
    contribution(4),
    contribution(5),
    contribution(6),
    contribution(7),
];

/// Feeds one byte.
#[inline]
pub(super) fn feed(r: u32, byte: u8) -> u32 {
    r >> 8 ^ AFTER[0][usize::from(r as u8 ^ byte)]
}

/// Feeds eight bytes.
#[inline]
pub(super) fn feed_8(r: u32, bytes: [u8; 8]) -> u32 {
    let [a, b, c, d, e, f, g, h] = bytes.map(usize::from);
    let [r0, r1, r2, r3] = r.to_le_bytes().map(usize::from);
    AFTER[7][a ^ r0]
        ^ AFTER[6][b ^ r1]
        ^ AFTER[5][c ^ r2]
        ^ AFTER[4][d ^ r3]
        ^ AFTER[3][e]
        ^ AFTER[2][f]
        ^ AFTER[1][g]
        ^ AFTER[0][h]
}

/// The factors by which a vector of 16 bytes is carried over so many bytes: for its first and its last eight.
#[must_use]
pub const fn fold_keys(bytes: usize) -> [u64; 2] {
    const fn power(mut n: usize) -> u64 {
        // 1, as a register.
        let mut r = 1 << 31;
        while n > 0 {
            r = step(r);
            n -= 1;
        }
        // The product of two reflected numbers lacks a bit.
        (r as u64) << 1
    }
    [power(8 * bytes + 32), power(8 * bytes - 32)]
}

/// Feeds many bytes.
#[inline]
#[must_use]
pub fn feed_all(r: u32, bytes: &[u8]) -> u32 {
    // crc32fast keeps the complement of the register.
    let mut hasher = crc32fast::Hasher::new_with_initial(!r);
    hasher.update(bytes);
    !hasher.finalize()
}

/// The product without carries. Each operand is split by bit position modulo 4: a product of two
/// such parts has at most eight addends per bit, which stay inside the four bits that belong to it.
fn carryless_product(a: u32, b: u32) -> u64 {
    const EVERY_4TH: u64 = 0x1111_1111_1111_1111;
    let split = |n: u32| [0, 1, 2, 3].map(|i| u64::from(n) & EVERY_4TH << i);
    let (a, b) = (split(a), split(b));
    let mut product = 0;
    for residue in 0..4 {
        let mut sum = 0;
        for i in 0..4 {
            sum ^= a[i].wrapping_mul(b[(residue + 4 - i) % 4]);
        }
        product |= sum & EVERY_4TH << residue;
    }
    product
}

/// The product modulo the generator.
fn multiply(a: u32, b: u32) -> u32 {
    // The constant term of the 63-bit product lies in bit 62: up to bit 63 with it. The upper half
    // is then a register, the lower one a register times x^32, that is one with four bytes to feed.
    let product = carryless_product(a, b) << 1;
    let high = (product >> 32) as u32;
    let [l0, l1, l2, l3] = (product as u32).to_le_bytes().map(usize::from);
    high ^ AFTER[3][l0] ^ AFTER[2][l1] ^ AFTER[1][l2] ^ AFTER[0][l3]
}

/// x^(-8 * `stride` * n), by n.
const fn inverse_powers(stride: usize) -> [u32; 128] {
    let mut table = [0; 128];
    let mut power = 1 << 31;
    let mut n = 0;
    while n < 128 {
        table[n] = power;
        let mut steps = 8 * stride;
        while steps > 0 {
            power = step_back(power);
            steps -= 1;
        }
        n += 1;
    }
    table
}

static BACK_4: [u32; 128] = inverse_powers(4);
static BACK_512: [u32; 128] = inverse_powers(512);

/// Takes back `words` * 4 zero bytes; `words` below 2^14.
pub(super) fn unfeed_words(r: u32, words: usize) -> u32 {
    debug_assert!(words < 1 << 14);
    let r = multiply(r, BACK_4[words % 128]);
    match words / 128 % 128 {
        0 => r,
        n => multiply(r, BACK_512[n]),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Shift and add: the definition.
    fn multiply_slowly(a: u32, mut b: u32) -> u32 {
        let mut product = 0;
        for bit in (0..32).rev() {
            if a >> bit & 1 != 0 {
                product ^= b;
            }
            b = step(b);
        }
        product
    }

    #[test]
    fn x_and_its_inverse_make_one() {
        assert_eq!(multiply(1 << 30, step_back(1 << 31)), 1 << 31);
    }

    #[test]
    fn check_value_of_crc_32() {
        let r = b"123456789".iter().fold(u32::MAX, |r, b| feed(r, *b));
        assert_eq!(!r, 0xcbf4_3926);
    }

    proptest! {
        #[test]
        fn products_agree_with_the_definition(a: u32, b: u32) {
            prop_assert_eq!(multiply(a, b), multiply_slowly(a, b));
        }

        #[test]
        fn ways_to_feed_agree(r: u32, bytes: [u8; 8]) {
            let one_by_one = bytes.iter().fold(r, |r, b| feed(r, *b));
            prop_assert_eq!(feed_8(r, bytes), one_by_one);
            prop_assert_eq!(feed_all(r, &bytes), one_by_one);
        }

        #[test]
        fn contributions_add_up(r: u32, bytes: [u8; 8]) {
            let sum = bytes.iter().rev().enumerate().fold(feed_8(r, [0; 8]), |sum, (following, b)| {
                sum ^ contribution(following)[usize::from(*b)]
            });
            prop_assert_eq!(sum, feed_8(r, bytes));
        }

        #[test]
        fn unfeeding_undoes_feeding_zeros(r: u32, words in 0usize..1 << 14) {
            let fed = feed_all(r, &vec![0; 4 * words]);
            prop_assert_eq!(unfeed_words(fed, words), r);
        }
    }
}

//! Tables by addresses and numbers that this library gave out. Nobody chooses them to make the tables slow.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A table by address or number.
pub(crate) type Map<K, V> = HashMap<K, V, BuildHasherDefault<Product>>;

/// Multiplies by a large odd number, and folds the upper half of the product into the lower.
#[derive(Default, Debug)]
pub(crate) struct Product(u64);

impl Hasher for Product {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        // A slice of numbers comes as its bytes.
        let (words, rest) = bytes.as_chunks();
        words.iter().for_each(|word| self.write_u64(u64::from_ne_bytes(*word)));
        rest.iter().for_each(|byte| self.write_u64((*byte).into()));
    }

    fn write_u32(&mut self, n: u32) {
        self.write_u64(n.into());
    }

    fn write_usize(&mut self, n: usize) {
        self.write_u64(n as u64);
    }

    fn write_u64(&mut self, n: u64) {
        let product = u128::from(self.0 ^ n) * 0x9e37_79b9_7f4a_7c15;
        self.0 = product as u64 ^ (product >> 64) as u64;
    }
}

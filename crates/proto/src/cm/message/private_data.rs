//! Private data: bytes that the CM carries for the programs.

use std::fmt;

use super::field::Value;

/// Private data of a message that has room for `N` bytes. Bytes that the program does not fill are zero. The length
/// that the program gave is not on the wire.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PrivateData<const N: usize>(pub [u8; N]);

impl<const N: usize> PrivateData<N> {
    /// None.
    pub const EMPTY: Self = Self([0; N]);

    /// These bytes and then zeros; `None` if there is no room.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let mut data = Self::EMPTY;
        data.0.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(data)
    }
}

impl<const N: usize> fmt::Debug for PrivateData<N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let used = N - self.0.iter().rev().take_while(|b| **b == 0).count();
        write!(f, "PrivateData({:02x?})", &self.0[..used])
    }
}

impl<const N: usize> Value for PrivateData<N> {
    const BITS: usize = N * 8;
    fn read(body: &[u8], first: usize, width: usize) -> Self {
        Self(Value::read(body, first, width))
    }
    fn write(&self, body: &mut [u8], first: usize, width: usize) {
        self.0.write(body, first, width);
    }
}

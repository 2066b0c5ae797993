//! The frame check sequence (IEEE 802.3 3.2.9): a network card gives it to queues that ask for it.

/// Bytes of a frame check sequence.
pub const FCS_LEN: usize = 4;

/// The sequence of a frame, as it follows it on the wire.
#[must_use]
pub fn fcs(frame: &[u8]) -> [u8; FCS_LEN] {
    crc32fast::hash(frame).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_check_value_of_crc_32() {
        assert_eq!(fcs(b"123456789"), 0xcbf4_3926u32.to_le_bytes());
    }
}

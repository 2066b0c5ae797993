//! Probes and their answers.

const MAGIC: [u8; 4] = *b"aVp1";
/// Bytes of an answer.
pub(super) const ANSWER_LEN: usize = 14;
const PROBE_LEN: usize = 14;

/// "Which slot has the socket of index `index`?"
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotProbe {
    pub(super) index: u8,
    pub(super) cookie: u64,
}

/// "The one of index `index` has slot `slot`."
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) index: u8,
    pub(super) slot: u8,
    pub(super) cookie: u64,
}

impl SlotProbe {
    /// The datagram, long enough that it has a byte at `steer_offset`.
    pub(super) fn datagram(self, probe_byte: u8, steer_offset: usize) -> Vec<u8> {
        let mut bytes = vec![probe_byte, self.index];
        bytes.extend_from_slice(&MAGIC);
        bytes.extend_from_slice(&self.cookie.to_le_bytes());
        bytes.resize(PROBE_LEN.max(steer_offset + 1), 0);
        bytes
    }

    pub(super) fn parse(probe_byte: u8, bytes: &[u8]) -> Option<Self> {
        let (head, padding) = bytes.split_first_chunk::<PROBE_LEN>()?;
        let [first, index, magic @ .., _, _, _, _, _, _, _, _] = *head;
        let (_, cookie) = head.split_last_chunk::<8>()?;
        (first == probe_byte && magic == MAGIC && padding.iter().all(|&b| b == 0))
            .then_some(Self { index, cookie: u64::from_le_bytes(*cookie) })
    }
}

impl Answer {
    pub(super) fn datagram(self) -> [u8; ANSWER_LEN] {
        let mut bytes = [0; ANSWER_LEN];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4] = self.index;
        bytes[5] = self.slot;
        bytes[6..].copy_from_slice(&self.cookie.to_le_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; ANSWER_LEN] = bytes.try_into().ok()?;
        let (_, cookie) = bytes.split_last_chunk::<8>()?;
        (bytes[..4] == MAGIC && bytes[5] != 0).then_some(Self {
            index: bytes[4],
            slot: bytes[5],
            cookie: u64::from_le_bytes(*cookie),
        })
    }
}

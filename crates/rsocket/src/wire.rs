//! The wire format between two rsockets: the bytes of rdma-core's protocol, version 1.
//!
//! A stream's messages are RDMA WRITEs with immediate data, whose upper three bits are the operation. Numbers that one
//! side writes into the other's memory (scatter/gather entries, I/O maps) are in the byte order of the memory's owner.

/// Version of the protocol.
pub(crate) const VERSION: u8 = 1;

/// Entries of the table through which a receiver tells where to write next.
pub(crate) const SGL_LEN: usize = 2;

/// Bytes of immediate data that carry the operand.
const OPERAND: u32 = 0x1fff_ffff;

/// A message, as immediate data.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Message {
    /// This many bytes of the stream were written.
    Data(u32),
    /// Messages that may have been sent in all, modulo 2^16; if the write had data, an entry of the table came with it.
    Credits(u16),
    /// An entry of the I/O map came with the write: its index.
    IoMap(u16),
    /// A control message.
    Control(Control),
    /// An operation that version 1 does not send.
    Unknown(u32),
}

/// A control message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Control {
    /// The sender sends no more, and takes no more.
    Disconnect,
    /// Still there.
    Keepalive,
    /// The sender sends no more.
    Shutdown,
    /// A message that version 1 does not know.
    Unknown(u32),
}

impl Message {
    const DATA: u32 = 0;
    const SGL: u32 = 4;
    const IOMAP: u32 = 6;
    const CONTROL: u32 = 7;

    pub(crate) fn encode(self) -> u32 {
        match self {
            Self::Data(len) => (Self::DATA << 29) | (len & OPERAND),
            Self::Credits(seq) => (Self::SGL << 29) | u32::from(seq),
            Self::IoMap(index) => (Self::IOMAP << 29) | u32::from(index),
            Self::Control(control) => {
                let code = match control {
                    Control::Disconnect => 0,
                    Control::Keepalive => 1,
                    Control::Shutdown => 2,
                    Control::Unknown(code) => code & OPERAND,
                };
                (Self::CONTROL << 29) | code
            }
            Self::Unknown(imm) => imm,
        }
    }

    pub(crate) fn decode(imm: u32) -> Self {
        let operand = imm & OPERAND;
        match imm >> 29 {
            Self::DATA => Self::Data(operand),
            // rdma-core adds without taking the remainder; 16 bits count.
            Self::SGL => Self::Credits(operand as u16),
            Self::IOMAP => Self::IoMap(operand as u16),
            Self::CONTROL => Self::Control(match operand {
                0 => Control::Disconnect,
                1 => Control::Keepalive,
                2 => Control::Shutdown,
                code => Control::Unknown(code),
            }),
            _ => Self::Unknown(imm),
        }
    }
}

/// Byte order of the owner of some memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ByteOrder {
    Little,
    Big,
}

impl ByteOrder {
    pub(crate) const NATIVE: Self =
        if cfg!(target_endian = "big") { Self::Big } else { Self::Little };

    fn u64(self, v: u64) -> [u8; 8] {
        match self {
            Self::Little => v.to_le_bytes(),
            Self::Big => v.to_be_bytes(),
        }
    }

    fn u32(self, v: u32) -> [u8; 4] {
        match self {
            Self::Little => v.to_le_bytes(),
            Self::Big => v.to_be_bytes(),
        }
    }

    fn read_u64(self, b: [u8; 8]) -> u64 {
        match self {
            Self::Little => u64::from_le_bytes(b),
            Self::Big => u64::from_be_bytes(b),
        }
    }

    fn read_u32(self, b: [u8; 4]) -> u32 {
        match self {
            Self::Little => u32::from_le_bytes(b),
            Self::Big => u32::from_be_bytes(b),
        }
    }
}

/// `N` bytes at `at`, which the caller's array has.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

/// Memory of the other side that may be written (`struct rs_sge`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Target {
    pub(crate) addr: u64,
    pub(crate) key: u32,
    pub(crate) len: u32,
}

impl Target {
    pub(crate) const LEN: usize = 16;

    pub(crate) fn encode(&self, order: ByteOrder) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&order.u64(self.addr));
        bytes[8..12].copy_from_slice(&order.u32(self.key));
        bytes[12..].copy_from_slice(&order.u32(self.len));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN], order: ByteOrder) -> Self {
        Self {
            addr: order.read_u64(part(bytes, 0)),
            key: order.read_u32(part(bytes, 8)),
            len: order.read_u32(part(bytes, 12)),
        }
    }
}

/// An entry of the I/O map (`struct rs_iomap`): the memory at `offset`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct IoMapEntry {
    pub(crate) offset: u64,
    pub(crate) target: Target,
}

impl IoMapEntry {
    pub(crate) const LEN: usize = 24;

    pub(crate) fn encode(&self, order: ByteOrder) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&order.u64(self.offset));
        bytes[8..].copy_from_slice(&self.target.encode(order));
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::LEN], order: ByteOrder) -> Self {
        Self {
            offset: order.read_u64(part(bytes, 0)),
            target: Target::decode(&part(bytes, 8), order),
        }
    }
}

/// The private data of REQ and REP (`struct rs_conn_data`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ConnData {
    /// Byte order of the sender.
    pub(crate) order: ByteOrder,
    /// Messages that its receive queue takes.
    pub(crate) credits: u16,
    /// Entries of its I/O map; 0 for none.
    pub(crate) iomap_len: u16,
    /// Its table: [`Target::len`] counts entries.
    pub(crate) sgl: Target,
    /// The first half of its receive buffer.
    pub(crate) buffer: Target,
}

impl ConnData {
    pub(crate) const LEN: usize = 40;
    const FLAG_BIG_ENDIAN: u8 = 1;
    const FLAG_IOMAP: u8 = 2;

    pub(crate) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[0] = VERSION;
        bytes[1] =
            Self::FLAG_IOMAP | if self.order == ByteOrder::Big { Self::FLAG_BIG_ENDIAN } else { 0 };
        bytes[2..4].copy_from_slice(&self.credits.to_be_bytes());
        bytes[7] = to_scale(self.iomap_len);
        bytes[8..24].copy_from_slice(&self.sgl.encode(ByteOrder::Big));
        bytes[24..40].copy_from_slice(&self.buffer.encode(ByteOrder::Big));
        // `struct rs_sge` is address, key, length, here as in memory.
        bytes
    }

    /// `None` for another protocol or version, and for a table without entries: there is no place to grant anything.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.first_chunk()?;
        if bytes[0] != VERSION {
            return None;
        }
        let big = bytes[1] & Self::FLAG_BIG_ENDIAN != 0;
        let sgl = Target::decode(&part(bytes, 8), ByteOrder::Big);
        (sgl.len > 0).then(|| Self {
            order: if big { ByteOrder::Big } else { ByteOrder::Little },
            credits: u16::from_be_bytes(part(bytes, 2)),
            iomap_len: if bytes[1] & Self::FLAG_IOMAP != 0 { from_scale(bytes[7]) } else { 0 },
            sgl,
            buffer: Target::decode(&part(bytes, 24), ByteOrder::Big),
        })
    }
}

/// A number in eight bits: as it is up to 128, above that in steps of 256.
pub(crate) fn to_scale(value: u16) -> u8 {
    if value <= 128 { value as u8 } else { 128 | (value >> 8) as u8 }
}

/// The number behind eight bits.
pub(crate) fn from_scale(scale: u8) -> u16 {
    if scale <= 128 { scale.into() } else { u16::from(scale & 127) << 8 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_rdma_cores_numbers() {
        for (message, imm) in [
            (Message::Data(65536), 0x0001_0000),
            (Message::Credits(0xfffe), 0x8000_fffe),
            (Message::IoMap(3), 0xc000_0003),
            (Message::Control(Control::Disconnect), 0xe000_0000),
            (Message::Control(Control::Keepalive), 0xe000_0001),
            (Message::Control(Control::Shutdown), 0xe000_0002),
        ] {
            assert_eq!(message.encode(), imm, "{message:?}");
            assert_eq!(Message::decode(imm), message);
        }
        assert_eq!(Message::decode(0x8001_0005), Message::Credits(5));
        assert_eq!(Message::decode(0x4000_0001), Message::Unknown(0x4000_0001));
    }

    #[test]
    fn private_data_lies_as_the_structure_does() {
        let data = ConnData {
            order: ByteOrder::Little,
            credits: 384,
            iomap_len: 8,
            sgl: Target { addr: 0x0102_0304_0506_0708, key: 0x1112_1314, len: 2 },
            buffer: Target { addr: 0x2122_2324_2526_2728, key: 0x3132_3334, len: 65536 },
        };
        let bytes = data.encode();
        assert_eq!(&bytes[..8], &[1, 2, 1, 128, 0, 0, 0, 8]);
        assert_eq!(&bytes[8..16], &[1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(&bytes[16..24], &[0x11, 0x12, 0x13, 0x14, 0, 0, 0, 2]);
        assert_eq!(&bytes[32..40], &[0x31, 0x32, 0x33, 0x34, 0, 1, 0, 0]);
        assert_eq!(ConnData::decode(&bytes), Some(data));
        // The CM pads private data.
        assert_eq!(ConnData::decode(&[&bytes[..], &[0; 16]].concat()), Some(data));
        assert_eq!(ConnData::decode(&bytes[..39]), None);
        assert_eq!(ConnData::decode(&[2; 40]), None);
        let no_table = ConnData { sgl: Target { len: 0, ..data.sgl }, ..data };
        assert_eq!(ConnData::decode(&no_table.encode()), None);
    }

    #[test]
    fn sizes_are_scaled_as_rdma_core_does() {
        for value in 0..=128 {
            assert_eq!(from_scale(to_scale(value)), value);
        }
        assert_eq!(from_scale(to_scale(512)), 512);
        assert_eq!(from_scale(to_scale(700)), 512);
        assert_eq!(from_scale(to_scale(u16::MAX)), 127 << 8);
    }

    #[test]
    fn entries_are_in_the_owners_byte_order() {
        let entry = IoMapEntry { offset: 1, target: Target { addr: 2, key: 3, len: 4 } };
        for order in [ByteOrder::Little, ByteOrder::Big] {
            assert_eq!(IoMapEntry::decode(&entry.encode(order), order), entry);
        }
        assert_eq!(entry.encode(ByteOrder::Little)[12], 0);
        assert_eq!(entry.encode(ByteOrder::Little)[16], 3);
        assert_eq!(entry.encode(ByteOrder::Big)[23], 4);
    }
}

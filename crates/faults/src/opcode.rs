//! Opcodes of packets, by the names that the IBA gives them (table 38).

use std::fmt;

use crate::PacketKind;

/// A single opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Opcode {
    /// The byte of the base transport header.
    pub code: u8,
}

/// The services of the device, and the first code of each.
const SERVICES: [(&str, u8); 4] = [("RC", 0x00), ("UC", 0x20), ("UD", 0x60), ("XRC", 0xa0)];

/// The only one that belongs to no service of a queue pair.
const CNP: Opcode = Opcode { code: 0x81 };

/// The low five bits of a code, and their name.
const OPERATIONS: [(u8, &str); 25] = [
    (0x00, "SEND_FIRST"),
    (0x01, "SEND_MIDDLE"),
    (0x02, "SEND_LAST"),
    (0x03, "SEND_LAST_WITH_IMMEDIATE"),
    (0x04, "SEND_ONLY"),
    (0x05, "SEND_ONLY_WITH_IMMEDIATE"),
    (0x06, "RDMA_WRITE_FIRST"),
    (0x07, "RDMA_WRITE_MIDDLE"),
    (0x08, "RDMA_WRITE_LAST"),
    (0x09, "RDMA_WRITE_LAST_WITH_IMMEDIATE"),
    (0x0a, "RDMA_WRITE_ONLY"),
    (0x0b, "RDMA_WRITE_ONLY_WITH_IMMEDIATE"),
    (0x0c, "RDMA_READ_REQUEST"),
    (0x0d, "RDMA_READ_RESPONSE_FIRST"),
    (0x0e, "RDMA_READ_RESPONSE_MIDDLE"),
    (0x0f, "RDMA_READ_RESPONSE_LAST"),
    (0x10, "RDMA_READ_RESPONSE_ONLY"),
    (0x11, "ACKNOWLEDGE"),
    (0x12, "ATOMIC_ACKNOWLEDGE"),
    (0x13, "COMPARE_SWAP"),
    (0x14, "FETCH_ADD"),
    (0x16, "SEND_LAST_WITH_INVALIDATE"),
    (0x17, "SEND_ONLY_WITH_INVALIDATE"),
    (0x1c, "FLUSH"),
    (0x1d, "ATOMIC_WRITE"),
];

impl Opcode {
    /// The opcode of a name such as `RC_SEND_ONLY`, in the spelling of the IBA or of this device's log and captures.
    pub(crate) fn find(word: &str) -> Option<Self> {
        if !Self::is_meant(word) {
            return None;
        }
        let plain = plain(word);
        Self::all().find(|opcode| plain == self::plain(&opcode.to_string()))
    }

    /// Whether a word is meant to be the name of one.
    pub(crate) fn is_meant(word: &str) -> bool {
        let upper = word.to_ascii_uppercase();
        service(&upper).is_some() || upper == "CNP"
    }

    /// The opcodes for a message: those of the service that a word begins with.
    pub(crate) fn names_near(word: &str) -> String {
        let upper = word.to_ascii_uppercase();
        let of = service(&upper).map(|(_, base)| base);
        let near = Self::all().filter(|opcode| opcode.service().map(|(_, base)| base) == of);
        near.map(|opcode| opcode.to_string()).collect::<Vec<_>>().join(", ")
    }

    /// All that the device sends or takes.
    pub fn all() -> impl Iterator<Item = Self> {
        let of_service = |(name, base): (&'static str, u8)| {
            let knows = move |operation: u8| match name {
                "UC" => operation <= 0x0b,
                "UD" => matches!(operation, 0x04 | 0x05),
                _ => true,
            };
            let operations = OPERATIONS.into_iter().map(|(operation, _)| operation);
            operations.filter(move |n| knows(*n)).map(move |n| Self { code: base | n })
        };
        SERVICES.into_iter().flat_map(of_service).chain([CNP])
    }

    /// The kind of packets that it belongs to, if it is of one.
    #[must_use]
    pub fn kind(self) -> Option<PacketKind> {
        self.service()?;
        Some(match self.code & 0x1f {
            0x00..=0x05 | 0x16 | 0x17 => PacketKind::Send,
            0x06..=0x0b | 0x1d => PacketKind::Write,
            0x0c => PacketKind::Read,
            0x13 | 0x14 => PacketKind::Atomic,
            0x0d..=0x10 | 0x12 => PacketKind::Response,
            0x11 => PacketKind::Ack,
            _ => PacketKind::Request,
        })
    }

    fn service(self) -> Option<(&'static str, u8)> {
        SERVICES.into_iter().find(|(_, base)| self.code & 0xe0 == *base)
    }
}

/// The service with whose name a word begins.
fn service(upper: &str) -> Option<(&'static str, u8)> {
    SERVICES
        .into_iter()
        .find(|(name, _)| upper.strip_prefix(name).is_some_and(|rest| rest.starts_with('_')))
}

/// A name without that in which spellings differ.
fn plain(word: &str) -> String {
    let upper = word.to_ascii_uppercase();
    let upper = upper.replace("_RDMA_", "_").replace("_WITH_", "_");
    let upper = upper.replace("IMMEDIATE", "IMM").replace("INVALIDATE", "INV");
    upper.replace("ACKNOWLEDGE", "ACK")
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((service, _)) = self.service() else { return f.write_str("CNP") };
        let operation = self.code & 0x1f;
        let found = OPERATIONS.into_iter().find(|(known, _)| *known == operation);
        write!(f, "{service}_{}", found.map_or("", |(_, name)| name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_opcode_is_found_by_its_names() {
        assert_eq!(Opcode::all().count(), 25 + 12 + 2 + 25 + 1);
        for opcode in Opcode::all() {
            let name = opcode.to_string();
            let of_the_log = name.replace("RDMA_", "").replace("IMMEDIATE", "IMM");
            let of_the_log = of_the_log.replace("INVALIDATE", "INV").replace("ACKNOWLEDGE", "ACK");
            for spelling in [name.clone(), name.to_lowercase(), of_the_log] {
                assert_eq!(Opcode::find(&spelling), Some(opcode), "{spelling}");
            }
        }
        for (name, code) in [
            ("RC_RDMA_WRITE_ONLY_WITH_IMMEDIATE", 0x0b),
            ("RC_READ_RESPONSE_LAST", 0x0f),
            ("RC_SEND_LAST_INV", 0x16),
            ("UC_SEND_FIRST", 0x20),
            ("UD_SEND_ONLY_WITH_IMM", 0x65),
            ("XRC_ACK", 0xb1),
            ("CNP", 0x81),
        ] {
            assert_eq!(Opcode::find(name), Some(Opcode { code }), "{name}");
        }
        for none in ["SEND_ONLY", "UD_SEND_FIRST", "UC_ACK", "RC_", "RC_CNP", "RD_SEND_ONLY", ""] {
            assert_eq!(Opcode::find(none), None, "{none}");
        }
    }
}

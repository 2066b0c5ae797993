//! Opcodes, and the one table that defines each of them.

use std::fmt;

/// Transport service: the top three bits of an opcode (IBA 9.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Service {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Unreliable datagram.
    Ud,
    /// Extended reliable connection.
    Xrc,
    /// Congestion notification (IBA A17.9.3).
    Cnp,
    /// Left to manufacturers; no opcode of it parses.
    Vendor,
}

impl Service {
    /// The service of an opcode byte. `None` for reliable datagram, which no device implements.
    #[must_use]
    pub const fn of(code: u8) -> Option<Self> {
        Some(match code >> 5 {
            0 => Self::Rc,
            1 => Self::Uc,
            3 => Self::Ud,
            4 => Self::Cnp,
            5 => Self::Xrc,
            6 | 7 => Self::Vendor,
            _ => return None,
        })
    }

    /// The opcode of this service whose low five bits are zero.
    const fn base(self) -> u8 {
        match self {
            Self::Rc => 0x00,
            Self::Uc => 0x20,
            Self::Ud => 0x60,
            Self::Cnp => 0x80,
            Self::Xrc => 0xa0,
            Self::Vendor => 0xc0,
        }
    }
}

impl fmt::Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
            Self::Xrc => "XRC",
            Self::Cnp => "CNP",
            Self::Vendor => "VENDOR",
        })
    }
}

/// The operation of a packet: the low five bits of an opcode.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names are the IBA's")]
pub enum Operation {
    SendFirst = 0x00,
    SendMiddle = 0x01,
    SendLast = 0x02,
    SendLastImm = 0x03,
    SendOnly = 0x04,
    SendOnlyImm = 0x05,
    WriteFirst = 0x06,
    WriteMiddle = 0x07,
    WriteLast = 0x08,
    WriteLastImm = 0x09,
    WriteOnly = 0x0a,
    WriteOnlyImm = 0x0b,
    ReadRequest = 0x0c,
    ReadResponseFirst = 0x0d,
    ReadResponseMiddle = 0x0e,
    ReadResponseLast = 0x0f,
    ReadResponseOnly = 0x10,
    Ack = 0x11,
    AtomicAck = 0x12,
    CompareSwap = 0x13,
    FetchAdd = 0x14,
    SendLastInv = 0x16,
    SendOnlyInv = 0x17,
    Flush = 0x1c,
    AtomicWrite = 0x1d,
    /// Exists in [`Service::Cnp`] alone.
    Cnp = 0x81,
}

/// The kind of message that an operation belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Send,
    Write,
    OtherRequest,
    Response,
    Notification,
}

/// The place of a packet in its message.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Position {
    First,
    Middle,
    Last,
    Only,
}

/// The payload that an operation may carry.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Payload {
    None,
    Any,
    Exactly(usize),
}

/// Extension headers as a set of bits, lowest first on the wire.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Ext(u16);

impl Ext {
    pub(super) const NONE: Self = Self(0);
    pub(super) const XRCETH: Self = Self(1);
    pub(super) const DETH: Self = Self(1 << 1);
    pub(super) const FETH: Self = Self(1 << 2);
    pub(super) const RETH: Self = Self(1 << 3);
    pub(super) const ATOMIC: Self = Self(1 << 4);
    pub(super) const AETH: Self = Self(1 << 5);
    pub(super) const ATOMIC_ACK: Self = Self(1 << 6);
    pub(super) const IMM: Self = Self(1 << 7);
    pub(super) const IETH: Self = Self(1 << 8);

    /// Bytes of each, in the order of the bits.
    const LEN: [usize; 9] = [4, 8, 4, 16, 28, 4, 8, 4, 4];

    const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    pub(super) const fn has(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    #[inline]
    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    const fn len(self) -> usize {
        let (mut i, mut sum) = (0, 0);
        while i < Self::LEN.len() {
            if self.0 >> i & 1 != 0 {
                sum += Self::LEN[i];
            }
            i += 1;
        }
        sum
    }
}

/// Services that know an operation, as bits.
const RC_XRC: u8 = 1;
const CONNECTED: u8 = RC_XRC | 2;
const ALL: u8 = CONNECTED | 4;

struct Row {
    operation: Operation,
    name: &'static str,
    services: u8,
    kind: Kind,
    place: Position,
    ext: Ext,
    payload: Payload,
}

const fn row(
    operation: Operation,
    name: &'static str,
    services: u8,
    kind: Kind,
    place: Position,
    ext: Ext,
    payload: Payload,
) -> Row {
    Row { operation, name, services, kind, place, ext, payload }
}

/// Every operation (IBA table 38). XRCETH and DETH are not in it: they depend on the service alone.
#[rustfmt::skip]
static TABLE: [Row; 26] = {
    use {Kind::*, Operation as O, Payload::Any};
    use Position::{First, Last, Middle, Only};
    const NO: Payload = Payload::None;
    [
        row(O::SendFirst, "SEND_FIRST", CONNECTED, Send, First, Ext::NONE, Any),
        row(O::SendMiddle, "SEND_MIDDLE", CONNECTED, Send, Middle, Ext::NONE, Any),
        row(O::SendLast, "SEND_LAST", CONNECTED, Send, Last, Ext::NONE, Any),
        row(O::SendLastImm, "SEND_LAST_WITH_IMM", CONNECTED, Send, Last, Ext::IMM, Any),
        row(O::SendOnly, "SEND_ONLY", ALL, Send, Only, Ext::NONE, Any),
        row(O::SendOnlyImm, "SEND_ONLY_WITH_IMM", ALL, Send, Only, Ext::IMM, Any),
        row(O::WriteFirst, "WRITE_FIRST", CONNECTED, Write, First, Ext::RETH, Any),
        row(O::WriteMiddle, "WRITE_MIDDLE", CONNECTED, Write, Middle, Ext::NONE, Any),
        row(O::WriteLast, "WRITE_LAST", CONNECTED, Write, Last, Ext::NONE, Any),
        row(O::WriteLastImm, "WRITE_LAST_WITH_IMM", CONNECTED, Write, Last, Ext::IMM, Any),
        row(O::WriteOnly, "WRITE_ONLY", CONNECTED, Write, Only, Ext::RETH, Any),
        row(O::WriteOnlyImm, "WRITE_ONLY_WITH_IMM", CONNECTED, Write, Only, Ext::RETH.and(Ext::IMM), Any),
        row(O::ReadRequest, "READ_REQUEST", RC_XRC, OtherRequest, Only, Ext::RETH, NO),
        row(O::ReadResponseFirst, "READ_RESPONSE_FIRST", RC_XRC, Response, First, Ext::AETH, Any),
        row(O::ReadResponseMiddle, "READ_RESPONSE_MIDDLE", RC_XRC, Response, Middle, Ext::NONE, Any),
        row(O::ReadResponseLast, "READ_RESPONSE_LAST", RC_XRC, Response, Last, Ext::AETH, Any),
        row(O::ReadResponseOnly, "READ_RESPONSE_ONLY", RC_XRC, Response, Only, Ext::AETH, Any),
        row(O::Ack, "ACK", RC_XRC, Response, Only, Ext::AETH, NO),
        row(O::AtomicAck, "ATOMIC_ACK", RC_XRC, Response, Only, Ext::AETH.and(Ext::ATOMIC_ACK), NO),
        row(O::CompareSwap, "COMPARE_SWAP", RC_XRC, OtherRequest, Only, Ext::ATOMIC, NO),
        row(O::FetchAdd, "FETCH_ADD", RC_XRC, OtherRequest, Only, Ext::ATOMIC, NO),
        row(O::SendLastInv, "SEND_LAST_WITH_INV", RC_XRC, Send, Last, Ext::IETH, Any),
        row(O::SendOnlyInv, "SEND_ONLY_WITH_INV", RC_XRC, Send, Only, Ext::IETH, Any),
        row(O::Flush, "FLUSH", RC_XRC, OtherRequest, Only, Ext::FETH.and(Ext::RETH), NO),
        row(O::AtomicWrite, "ATOMIC_WRITE", RC_XRC, OtherRequest, Only, Ext::RETH, Payload::Exactly(8)),
        row(O::Cnp, "CNP", 0, Notification, Only, Ext::NONE, Payload::Exactly(16)),
    ]
};

impl Operation {
    /// The place of this operation in [`TABLE`].
    #[inline]
    const fn index(self) -> usize {
        match self {
            Self::SendLastInv => 21,
            Self::SendOnlyInv => 22,
            Self::Flush => 23,
            Self::AtomicWrite => 24,
            Self::Cnp => 25,
            _ => self as usize,
        }
    }

    #[inline]
    const fn row(self) -> &'static Row {
        &TABLE[self.index()]
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.row().name)
    }
}

/// Opcode of a packet: a service and one of the operations that it knows.
///
/// The fields are public so that senders can write one down. [`Opcode::is_legal`] says whether the service knows the
/// operation. [`Opcode::parse`] returns only legal ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Opcode {
    /// The transport service.
    pub service: Service,
    /// The operation of the packet.
    pub operation: Operation,
}

impl Opcode {
    /// An opcode from its parts.
    #[must_use]
    pub const fn new(service: Service, operation: Operation) -> Self {
        Self { service, operation }
    }

    /// Reads the byte of the BTH. `None` if no service that this device knows defines it.
    #[must_use]
    pub const fn parse(code: u8) -> Option<Self> {
        BY_CODE[code as usize]
    }

    /// The byte of the BTH.
    #[must_use]
    #[inline]
    pub const fn code(self) -> u8 {
        self.service.base() | (self.operation as u8 & 0x1f)
    }

    /// Whether the service knows the operation.
    #[must_use]
    pub const fn is_legal(self) -> bool {
        let services = self.operation.row().services;
        match self.service {
            Service::Rc | Service::Xrc => services & RC_XRC != 0,
            Service::Uc => services & CONNECTED & !RC_XRC != 0,
            Service::Ud => services & ALL & !CONNECTED != 0,
            Service::Cnp => matches!(self.operation, Operation::Cnp),
            Service::Vendor => false,
        }
    }

    /// Whether a requester sends it.
    #[must_use]
    #[inline]
    pub const fn is_request(self) -> bool {
        matches!(self.operation.row().kind, Kind::Send | Kind::Write | Kind::OtherRequest)
    }

    /// Whether a responder sends it: READ responses, ACKs, atomic ACKs.
    #[must_use]
    #[inline]
    pub const fn is_response(self) -> bool {
        matches!(self.operation.row().kind, Kind::Response)
    }

    /// Tells whether it is a request to memory that the program named before: a WRITE, a READ, an atomic, an ATOMIC
    /// WRITE or a FLUSH. The target's program may wait for it without polling.
    #[must_use]
    #[inline]
    pub const fn is_one_sided(self) -> bool {
        matches!(self.operation.row().kind, Kind::Write | Kind::OtherRequest)
    }

    /// Whether this is a FIRST packet: more of the message follow.
    #[must_use]
    pub const fn is_first(self) -> bool {
        matches!(self.operation.row().place, Position::First)
    }

    /// Whether this is a MIDDLE packet.
    #[must_use]
    pub const fn is_middle(self) -> bool {
        matches!(self.operation.row().place, Position::Middle)
    }

    /// Whether no further packet of the message follows: LAST or ONLY.
    #[must_use]
    pub const fn is_last(self) -> bool {
        matches!(self.operation.row().place, Position::Last | Position::Only)
    }

    /// Whether this packet is a whole message; so are READ requests, atomics and ACKs.
    #[must_use]
    pub const fn is_only(self) -> bool {
        matches!(self.operation.row().place, Position::Only)
    }

    /// FIRST or ONLY.
    #[must_use]
    pub const fn starts_message(self) -> bool {
        matches!(self.operation.row().place, Position::First | Position::Only)
    }

    /// LAST or ONLY.
    #[must_use]
    pub const fn ends_message(self) -> bool {
        self.is_last()
    }

    /// Whether bytes may follow the headers.
    #[must_use]
    pub const fn carries_payload(self) -> bool {
        !matches!(self.operation.row().payload, Payload::None)
    }

    /// Tells whether the operation can have a payload of `len` bytes. The path MTU is not looked at: it belongs to the
    /// queue pair.
    #[must_use]
    pub const fn admits_payload(self, len: usize) -> bool {
        match self.operation.row().payload {
            Payload::Any => true,
            Payload::None => len == 0,
            Payload::Exactly(n) => len == n,
        }
    }

    /// Whether it carries immediate data.
    #[must_use]
    pub const fn has_imm(self) -> bool {
        self.ext().has(Ext::IMM)
    }

    /// Whether it carries an rkey to invalidate.
    #[must_use]
    pub const fn has_inv(self) -> bool {
        self.ext().has(Ext::IETH)
    }

    /// Whether it belongs to a SEND, of any form.
    #[must_use]
    pub const fn is_send(self) -> bool {
        matches!(self.operation.row().kind, Kind::Send)
    }

    /// Whether it belongs to an RDMA WRITE, with or without immediate data.
    #[must_use]
    pub const fn is_write(self) -> bool {
        matches!(self.operation.row().kind, Kind::Write)
    }

    /// Whether the packet makes the receiver take a receive: a SEND with its first, a WRITE with immediate with its last.
    #[must_use]
    #[inline]
    pub const fn takes_recv(self) -> bool {
        if self.is_send() { self.starts_message() } else { self.is_write() && self.has_imm() }
    }

    /// Bytes of extension headers between the BTH and the payload.
    #[must_use]
    #[inline]
    pub const fn ext_len(self) -> usize {
        const LEN: [u8; 512] = {
            let mut len = [0; 512];
            let mut ext = 0;
            while ext < 512 {
                len[ext] = Ext(ext as u16).len() as u8;
                ext += 1;
            }
            len
        };
        const _: () = assert!(LEN.len() == 1 << Ext::LEN.len());
        LEN[self.ext().0 as usize] as usize
    }

    /// The extension headers. In XRC the requests carry an XRCETH, the responses do not (IBA A14.3).
    #[inline]
    pub(super) const fn ext(self) -> Ext {
        let ext = self.operation.row().ext;
        match self.service {
            Service::Ud => ext.and(Ext::DETH),
            Service::Xrc if self.is_request() => ext.and(Ext::XRCETH),
            _ => ext,
        }
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.service {
            Service::Cnp => write!(f, "{}", self.operation),
            service => write!(f, "{service} {}", self.operation),
        }
    }
}

static BY_CODE: [Option<Opcode>; 256] = {
    const SERVICES: [Service; 5] =
        [Service::Rc, Service::Uc, Service::Ud, Service::Xrc, Service::Cnp];
    let mut by_code = [None; 256];
    let mut s = 0;
    while s < SERVICES.len() {
        let mut i = 0;
        while i < TABLE.len() {
            let opcode = Opcode::new(SERVICES[s], TABLE[i].operation);
            if opcode.is_legal() {
                by_code[opcode.code() as usize] = Some(opcode);
            }
            i += 1;
        }
        s += 1;
    }
    by_code
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_stands_in_its_place() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.operation.index(), i, "{}", row.name);
        }
    }

    #[test]
    fn legal_opcodes_are_those_of_the_table() {
        let legal: Vec<u8> = (0..=255).filter(|c| Opcode::parse(*c).is_some()).collect();
        let rc = (0x00..=0x14).chain([0x16, 0x17, 0x1c, 0x1d]);
        let expected: Vec<u8> = rc
            .clone()
            .chain(0x20..=0x2b)
            .chain([0x64, 0x65, 0x81])
            .chain(rc.map(|c| 0xa0 | c))
            .collect();
        assert_eq!(legal, expected);
    }

    #[test]
    fn code_and_parse_are_inverse() {
        for code in 0..=255 {
            if let Some(opcode) = Opcode::parse(code) {
                assert_eq!(opcode.code(), code);
                assert!(opcode.is_legal());
                assert_eq!(Service::of(code), Some(opcode.service));
            }
        }
        assert_eq!(Service::of(0x40), None, "reliable datagram");
        assert_eq!(Service::of(0xc0), Some(Service::Vendor));
    }

    #[test]
    fn extension_headers_have_the_lengths_of_the_spec() {
        let len = |code| Opcode::parse(code).unwrap().ext_len();
        assert_eq!(len(0x04), 0);
        assert_eq!(len(0x0b), 20, "RETH and ImmDt");
        assert_eq!(len(0x0a), 16);
        assert_eq!(len(0x11), 4);
        assert_eq!(len(0x12), 12);
        assert_eq!(len(0x13), 28);
        assert_eq!(len(0x1c), 20);
        assert_eq!(len(0x65), 12, "DETH and ImmDt");
        assert_eq!(len(0xb3), 32, "XRCETH and AtomicETH");
        assert_eq!(len(0xb1), 4, "an XRC response has no XRCETH");
    }

    #[test]
    fn one_sided_requests_take_no_receive() {
        use Operation as O;
        for code in 0..=255u8 {
            let Some(opcode) = Opcode::parse(code) else { continue };
            let operation = opcode.operation;
            let is_write = matches!(
                operation,
                O::WriteFirst
                    | O::WriteMiddle
                    | O::WriteLast
                    | O::WriteLastImm
                    | O::WriteOnly
                    | O::WriteOnlyImm
            );
            let is_other = matches!(
                operation,
                O::ReadRequest | O::CompareSwap | O::FetchAdd | O::AtomicWrite | O::Flush
            );
            assert_eq!(opcode.is_one_sided(), is_write || is_other, "{opcode}");
        }
    }

    #[test]
    fn places_and_kinds() {
        let op = |code| Opcode::parse(code).unwrap();
        assert!(op(0x00).is_first() && op(0x00).starts_message() && !op(0x00).ends_message());
        assert!(op(0x01).is_middle() && !op(0x01).starts_message());
        assert!(op(0x03).is_last() && !op(0x03).is_only() && op(0x03).has_imm());
        assert!(op(0x17).is_only() && op(0x17).is_last() && op(0x17).has_inv());
        assert!(op(0x0c).is_request() && !op(0x0c).carries_payload());
        assert!(op(0x10).is_response() && op(0x10).carries_payload());
        assert!(op(0x2a).is_write() && !op(0x2a).is_send());
        assert!(!op(0x81).is_request() && !op(0x81).is_response());
        assert!(op(0x1d).admits_payload(8) && !op(0x1d).admits_payload(4));
        assert_eq!(op(0x04).to_string(), "RC SEND_ONLY");
        assert_eq!(op(0x81).to_string(), "CNP");
    }
}

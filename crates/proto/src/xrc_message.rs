//! Messages between processes that share an XRC domain. Usually both processes run one build of the library, but not
//! always. So a message that does not parse, or that names no known responder, is ignored.

use crate::event::QpEvent;
use crate::memory::Memory;
use crate::mr::Access;
use crate::payload::Data;
use crate::qp::attr::{QpAttr, QpAttrMask, QpState};
use crate::qp::lending::{Lease, Remembered, RememberedKind};
use crate::qp::{Arrival, Incoming};
use crate::types::{Gid, Mtu, Psn, QKey, Qpn};
use crate::wire::packet::Headers;
use crate::wr::{AddressVector, MAX_MESSAGE};

/// Device and inode of the file that names a domain.
pub type FileId = (u64, u64);

/// A message, but for packets ([`packet`]).
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields say what they are: whose, under which lease, and what")]
pub enum Message {
    /// The responder of a target comes to where the SRQ of its next message is.
    Lend { target: Qpn, lease: u64, domain: FileId, attr: QpAttr, state: Lease },
    /// The target's process wants the responder back.
    Recall { target: Qpn, lease: u64 },
    /// The responder goes back.
    Return { target: Qpn, lease: u64, state: Lease },
    /// The responder cannot go back: a message is half received, or (`later`) answers are still to be sent.
    Busy { target: Qpn, lease: u64, later: bool },
    /// So far it has come, and no ACK says more.
    Progress { target: Qpn, lease: u64, expected: Psn, msn: u32 },
    /// The target was reset or destroyed: the loan is void.
    Revoke { target: Qpn, lease: u64 },
    /// The target was modified otherwise, while it is lent.
    Attributes { target: Qpn, lease: u64, attr: QpAttr },
    /// An event of a target: from a borrower for all processes that have it open, or from the target's process for one
    /// of them.
    Event { target: Qpn, event: QpEvent },
    /// A process that opens, queries or modifies a target waits for the answer.
    Ask { request: u64, target: Qpn, question: Question },
    /// An errno value or 0, and the attributes.
    Answer { request: u64, errno: i32, attr: QpAttr },
}

/// A question to a target's process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "as above")]
pub enum Question {
    /// The process asks to be counted among those that have it open.
    Open { domain: FileId },
    /// Its attributes.
    Query,
    /// The last handle of the process was destroyed.
    Close,
    /// The process asks to change attributes.
    Modify { attr: QpAttr, mask: QpAttrMask },
}

/// Kind of a packet's message. The rest is target 4, packets 4, source 16, destination 16, traffic class 1, hop limit
/// 1, flow label 4, length of the headers 1, headers, payload.
const PACKET: u8 = 0;
const PACKET_HEAD: usize = 48;

/// A request for a borrower of its target; none if its payload is not there any more.
pub fn packet(
    target: Qpn,
    arrival: &Arrival,
    packet: &Incoming<'_>,
    memory: &impl Memory,
) -> Option<Vec<u8>> {
    let headers_len = packet.headers.len();
    let mut bytes = Writer(Vec::with_capacity(PACKET_HEAD + headers_len + packet.payload.len()));
    bytes.u8(PACKET);
    bytes.u32(target.get());
    bytes.u32(packet.packets);
    bytes.gid(arrival.source);
    bytes.gid(arrival.destination);
    bytes.u8(arrival.traffic_class);
    bytes.u8(arrival.hop_limit);
    bytes.u32(arrival.flow_label);
    bytes.u8(headers_len as u8);
    let mut bytes = bytes.0;
    bytes.resize(PACKET_HEAD + headers_len + packet.payload.len(), 0);
    let (headers, payload) = bytes[PACKET_HEAD..].split_at_mut(headers_len);
    packet.headers.emit(headers);
    packet.payload.read(memory, payload).ok()?;
    Some(bytes)
}

/// The target, and the request.
#[must_use]
pub fn parse_packet(bytes: &[u8]) -> Option<(Qpn, Arrival, Incoming<'_>)> {
    let mut from = Reader(bytes);
    if from.u8()? != PACKET {
        return None;
    }
    let target = Qpn::new(from.u32()?);
    let packets = from.u32()?;
    let arrival = Arrival {
        source: from.gid()?,
        destination: from.gid()?,
        traffic_class: from.u8()?,
        hop_limit: from.u8()?,
        flow_label: from.u32()?,
        interface: 0,
        port: 0,
    };
    let headers_len = usize::from(from.u8()?);
    let (headers, payload) = from.0.split_at_checked(headers_len)?;
    let headers = Headers::parse(headers, payload.len()).ok()?;
    let packet = Incoming { headers, payload: Data::Bytes(payload), packets, acks: None };
    Some((target, arrival, packet))
}

impl Message {
    /// Its bytes.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let mut to = Writer(Vec::with_capacity(128));
        match self {
            Self::Lend { target, lease, domain, attr, state } => {
                to.head(1, *target, *lease);
                to.u64(domain.0);
                to.u64(domain.1);
                to.attr(attr);
                to.lease(state);
            }
            Self::Recall { target, lease } => to.head(2, *target, *lease),
            Self::Return { target, lease, state } => {
                to.head(3, *target, *lease);
                to.lease(state);
            }
            Self::Busy { target, lease, later } => {
                to.head(4, *target, *lease);
                to.u8((*later).into());
            }
            Self::Progress { target, lease, expected, msn } => {
                to.head(5, *target, *lease);
                to.u32(expected.get());
                to.u32(*msn);
            }
            Self::Revoke { target, lease } => to.head(6, *target, *lease),
            Self::Attributes { target, lease, attr } => {
                to.head(14, *target, *lease);
                to.attr(attr);
            }
            Self::Event { target, event } => {
                to.head(7, *target, 0);
                to.u8(EVENTS.iter().position(|e| e == event).unwrap_or_default() as u8);
            }
            Self::Ask { request, target, question } => {
                to.head(8, *target, *request);
                match question {
                    Question::Open { domain } => {
                        to.u8(0);
                        to.u64(domain.0);
                        to.u64(domain.1);
                    }
                    Question::Query => to.u8(1),
                    Question::Close => to.u8(3),
                    Question::Modify { attr, mask } => {
                        to.u8(2);
                        to.attr(attr);
                        to.u32(mask.bits());
                    }
                }
            }
            Self::Answer { request, errno, attr } => {
                to.head(9, Qpn::default(), *request);
                to.u32(errno.cast_unsigned());
                to.attr(attr);
            }
        }
        to.0
    }

    /// From bytes; none if they are no message.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut from = Reader(bytes);
        let kind = from.u8()?;
        let target = Qpn::new(from.u32()?);
        let lease = from.u64()?;
        let message = match kind {
            1 => {
                let domain = (from.u64()?, from.u64()?);
                Self::Lend { target, lease, domain, attr: from.attr()?, state: from.lease()? }
            }
            2 => Self::Recall { target, lease },
            3 => Self::Return { target, lease, state: from.lease()? },
            4 => Self::Busy { target, lease, later: from.u8()? != 0 },
            5 => {
                Self::Progress { target, lease, expected: Psn::new(from.u32()?), msn: from.u32()? }
            }
            6 => Self::Revoke { target, lease },
            7 => Self::Event { target, event: *EVENTS.get(usize::from(from.u8()?))? },
            8 => {
                let question = match from.u8()? {
                    0 => Question::Open { domain: (from.u64()?, from.u64()?) },
                    1 => Question::Query,
                    3 => Question::Close,
                    2 => {
                        let attr = from.attr()?;
                        Question::Modify { attr, mask: QpAttrMask::from_bits_retain(from.u32()?) }
                    }
                    _ => return None,
                };
                Self::Ask { request: lease, target, question }
            }
            9 => {
                let errno = from.u32()?.cast_signed();
                Self::Answer { request: lease, errno, attr: from.attr()? }
            }
            14 => Self::Attributes { target, lease, attr: from.attr()? },
            _ => return None,
        };
        from.0.is_empty().then_some(message)
    }
}

const EVENTS: [QpEvent; 6] = [
    QpEvent::Fatal,
    QpEvent::ReqErr,
    QpEvent::AccessErr,
    QpEvent::CommEst,
    QpEvent::SqDrained,
    QpEvent::LastWqeReached,
];

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn gid(&mut self, gid: Gid) {
        self.0.extend(gid.0);
    }

    fn head(&mut self, kind: u8, target: Qpn, number: u64) {
        self.u8(kind);
        self.u32(target.get());
        self.u64(number);
    }

    fn attr(&mut self, attr: &QpAttr) {
        self.u8(attr.state as u8);
        self.u8(attr.cur_state as u8);
        self.u8(attr.en_sqd_async_notify.into());
        self.u32(attr.access.bits());
        self.u16(attr.pkey_index);
        self.u8(attr.port);
        self.u32(attr.qkey.0);
        let av = &attr.av;
        self.gid(av.dgid);
        self.gid(av.sgid);
        for byte in [av.sgid_index, av.hop_limit, av.traffic_class, av.sl] {
            self.u8(byte);
        }
        self.u32(av.flow_label);
        self.u8(av.static_rate);
        self.u8(av.src_path_bits);
        self.u16(av.dlid);
        self.u8(av.port);
        self.u32(av.scope_id);
        self.u8(attr.path_mtu as u8);
        for byte in [attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic] {
            self.u8(byte);
        }
        self.u32(attr.rq_psn.get());
        self.u8(attr.min_rnr_timer);
        self.u32(attr.sq_psn.get());
        self.u8(attr.max_dest_rd_atomic);
        self.u32(attr.dest_qpn.get());
        self.u32(attr.rate_limit);
    }

    fn lease(&mut self, lease: &Lease) {
        self.u8(lease.state as u8);
        self.u8(lease.established.into());
        self.u32(lease.expected.get());
        self.u32(lease.msn);
        self.u8(lease.nak_sent.into());
        // No responder answers more at a time.
        let answers = &lease.answers[..lease.answers.len().min(u8::MAX.into())];
        self.u8(answers.len() as u8);
        for answer in answers {
            self.u32(answer.psn.get());
            self.u32(answer.msn);
            match answer.kind {
                RememberedKind::Read { va, rkey, len, srqn } => {
                    self.u8(0);
                    self.u64(va);
                    self.u32(rkey);
                    self.u32(len);
                    self.u32(srqn);
                }
                RememberedKind::Atomic { original } => {
                    self.u8(1);
                    self.u64(original);
                }
                RememberedKind::Placed => self.u8(2),
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take().map(|[byte]| byte)
    }

    fn up_to(&mut self, most: u8) -> Option<u8> {
        self.u8().filter(|value| *value <= most)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn gid(&mut self) -> Option<Gid> {
        self.take().map(Gid)
    }

    fn state(&mut self) -> Option<QpState> {
        QpState::from_code(self.u8()?.into())
    }

    fn attr(&mut self) -> Option<QpAttr> {
        Some(QpAttr {
            state: self.state()?,
            cur_state: self.state()?,
            en_sqd_async_notify: self.u8()? != 0,
            access: Access::from_bits_truncate(self.u32()?),
            pkey_index: self.u16()?,
            port: self.u8()?,
            qkey: QKey(self.u32()?),
            av: AddressVector {
                dgid: self.gid()?,
                sgid: self.gid()?,
                sgid_index: self.u8()?,
                hop_limit: self.u8()?,
                traffic_class: self.u8()?,
                sl: self.u8()?,
                flow_label: self.u32()?,
                static_rate: self.u8()?,
                src_path_bits: self.u8()?,
                dlid: self.u16()?,
                port: self.u8()?,
                scope_id: self.u32()?,
            },
            path_mtu: Mtu::from_code(self.u8()?.into())?,
            timeout: self.up_to(31)?,
            retry_cnt: self.up_to(7)?,
            rnr_retry: self.up_to(7)?,
            max_rd_atomic: self.u8()?,
            rq_psn: Psn::new(self.u32()?),
            min_rnr_timer: self.up_to(31)?,
            sq_psn: Psn::new(self.u32()?),
            max_dest_rd_atomic: self.u8()?,
            dest_qpn: Qpn::new(self.u32()?),
            rate_limit: self.u32()?,
        })
    }

    fn lease(&mut self) -> Option<Lease> {
        let (state, established) = (self.state()?, self.u8()? != 0);
        let (expected, msn, nak_sent) = (Psn::new(self.u32()?), self.u32()?, self.u8()? != 0);
        let count = self.u8()?;
        let answers = (0..count).map(|_| self.remembered()).collect::<Option<_>>()?;
        Some(Lease { state, established, expected, msn, nak_sent, answers })
    }

    fn remembered(&mut self) -> Option<Remembered> {
        let (psn, msn) = (Psn::new(self.u32()?), self.u32()?);
        let kind = match self.u8()? {
            0 => RememberedKind::Read {
                va: self.u64()?,
                rkey: self.u32()?,
                len: self.u32().filter(|len| *len <= MAX_MESSAGE)?,
                srqn: self.u32()?,
            },
            1 => RememberedKind::Atomic { original: self.u64()? },
            2 => RememberedKind::Placed,
            _ => return None,
        };
        Some(Remembered { psn, msn, kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_that_no_responder_has_are_refused() {
        let target = Qpn::new(5);
        let attr = QpAttr { path_mtu: Mtu::Mtu256, ..QpAttr::default() };
        let read = |len| RememberedKind::Read { va: 0, rkey: 1, len, srqn: 2 };
        let state = |len| Lease {
            state: QpState::Rts,
            established: true,
            expected: Psn::new(1),
            msn: 2,
            nak_sent: false,
            answers: vec![Remembered { psn: Psn::new(0), msn: 1, kind: read(len) }; 300],
        };
        let parsed = |len, min_rnr_timer| {
            let attr = QpAttr { min_rnr_timer, ..attr };
            let (lease, domain, state) = (1, (2, 3), state(len));
            Message::parse(&Message::Lend { target, lease, domain, attr, state }.emit())
        };
        assert_eq!(parsed(MAX_MESSAGE + 1, 1), None);
        assert_eq!(parsed(1, 32), None);
        let Some(Message::Lend { state, .. }) = parsed(MAX_MESSAGE, 31) else { panic!() };
        assert_eq!(state.answers.len(), 255);
    }

    fn messages() -> Vec<Message> {
        let target = Qpn::new(0x12_3456);
        let attr = QpAttr {
            state: QpState::Rts,
            port: 1,
            access: Access::REMOTE_WRITE,
            path_mtu: Mtu::Mtu4096,
            rq_psn: Psn::new(0xff_fffe),
            dest_qpn: Qpn::new(7),
            max_dest_rd_atomic: 4,
            av: AddressVector { dgid: Gid([3; 16]), dlid: 5, port: 1, ..AddressVector::default() },
            ..QpAttr::default()
        };
        let kinds = [
            RememberedKind::Read { va: 1 << 40, rkey: 2, len: 3, srqn: 4 },
            RememberedKind::Atomic { original: 1 << 50 },
            RememberedKind::Placed,
        ];
        let answer = |kind| Remembered { psn: Psn::new(9), msn: 8, kind };
        let state = Lease {
            state: QpState::Rtr,
            established: true,
            expected: Psn::new(11),
            msn: 12,
            nak_sent: true,
            answers: kinds.map(answer).to_vec(),
        };
        let ask = |question| Message::Ask { request: 4, target, question };
        let mask = QpAttrMask::STATE | QpAttrMask::AV;
        vec![
            Message::Lend { target, lease: 1, domain: (2, 3), attr, state: state.clone() },
            Message::Recall { target, lease: 1 << 40 },
            Message::Return { target, lease: 2, state },
            Message::Busy { target, lease: 3, later: true },
            Message::Progress { target, lease: 3, expected: Psn::new(1), msn: 2 },
            Message::Revoke { target, lease: 3 },
            Message::Attributes { target, lease: 3, attr },
            Message::Event { target, event: QpEvent::LastWqeReached },
            ask(Question::Open { domain: (1, 2) }),
            ask(Question::Query),
            ask(Question::Close),
            ask(Question::Modify { attr, mask }),
            Message::Answer { request: 1, errno: 22, attr },
        ]
    }

    #[test]
    fn messages_are_read_as_written_or_not_at_all() {
        for message in messages() {
            let bytes = message.emit();
            assert_eq!(Message::parse(&bytes), Some(message));
            for len in 0..bytes.len() {
                assert_eq!(Message::parse(&bytes[..len]), None);
            }
            assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), None);
        }
    }
}

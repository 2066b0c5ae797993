//! Datagrams by which two devices of this make explain failures to each other. Others ignore them.
//!
//! A queue pair whose peer is silent asks the peer's device for the reason. A refusal, which has room for a code only, is
//! preceded by its reason. Both are UDP datagrams, whatever the link of the queue pair is: they are rare, and a silent peer
//! may have lost its link.

use std::io;
use std::net::UdpSocket;

use anyverbs_causes::Cause;
use anyverbs_net::{self as net, Uncancelled};
use anyverbs_proto::env::Question;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::reason::Told;
use anyverbs_proto::types::{Gid, Mtu, Psn, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wr::AddressVector;

use crate::Links;
use crate::udp::address;

/// Opcode of a question: BTH (PSN: the asker's QPN); then the asker's first PSN, 4 bytes, its path MTU and type, 1 byte each,
/// as in C.
const QUESTION: u8 = 0xc3;
/// Opcode of a reason: BTH (PSN: that of the NAK, or 0 in an answer), then the cause and its value.
const REASON: u8 = 0xc4;

/// Such a datagram, without its ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhyPacket {
    /// Why does this queue pair not answer? The addresses are those of the datagram.
    Question(Question),
    /// The reason for a NAK, or the answer to a question.
    Reason {
        /// The queue pair that it is for.
        dest: Qpn,
        /// The PSN of the NAK that follows; 0 in an answer.
        psn: Psn,
        /// The reason.
        told: Told,
    },
}

impl WhyPacket {
    /// Bytes.
    pub const LEN: usize = Bth::LEN + Told::LEN;

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let (opcode, dest, psn) = match self {
            Self::Question(question) => {
                bytes[12..16].copy_from_slice(&question.sq_psn.get().to_be_bytes());
                bytes[16] = question.mtu as u8;
                bytes[17] = question.qp_type as u8;
                (QUESTION, question.dest, question.from.get())
            }
            Self::Reason { dest, psn, told } => {
                bytes[12..].copy_from_slice(&told.to_bytes());
                (REASON, *dest, psn.get())
            }
        };
        bytes[..5].copy_from_slice(&[opcode, 0, 0xff, 0xff, 0]);
        bytes[5..8].copy_from_slice(&dest.get().to_be_bytes()[1..]);
        bytes[9..12].copy_from_slice(&psn.to_be_bytes()[1..]);
        bytes
    }

    /// Reads one that came from one address to another. `None` for anything else.
    #[must_use]
    pub fn parse(bytes: &[u8], from: Gid, to: Gid) -> Option<Self> {
        let bytes: &[u8; Self::LEN] = bytes.try_into().ok()?;
        let at = |at: usize| u32::from_be_bytes([0, bytes[at], bytes[at + 1], bytes[at + 2]]);
        let (dest, psn) = (Qpn::new(at(5)), at(9));
        match bytes[0] {
            QUESTION => {
                let sq_psn = Psn::new(at(13));
                let qp_type = qp_type(bytes[17])?;
                let mtu = Mtu::from_code(bytes[16].into())?;
                let av = AddressVector { sgid: from, dgid: to, ..AddressVector::default() };
                Some(Self::Question(Question {
                    av,
                    dest,
                    from: Qpn::new(psn),
                    sq_psn,
                    mtu,
                    qp_type,
                }))
            }
            REASON => {
                let told = Told::from_bytes(bytes[12..].try_into().ok()?)?;
                Some(Self::Reason { dest, psn: Psn::new(psn), told })
            }
            _ => None,
        }
    }
}

/// The type of this number, among those that answer.
fn qp_type(number: u8) -> Option<QpType> {
    [QpType::Rc, QpType::Uc, QpType::XrcSend, QpType::XrcRecv]
        .into_iter()
        .find(|qp_type| *qp_type as u8 == number)
}

/// Whether the system has a route from the local address to the peer.
///
/// # Errors
/// The system's reason why there is none.
pub fn check_route(links: &Links, av: &AddressVector) -> io::Result<()> {
    let _uncancelled = Uncancelled::new();
    let to = address(av.dgid.to_ip(), links.core.config.udp_port, av.scope_id);
    UdpSocket::bind(address(av.sgid.to_ip(), 0, av.scope_id))?.connect(to)
}

/// A question to the network whether it can deliver to a peer.
#[derive(Debug)]
pub struct Sounding {
    socket: io::Result<net::Sounding>,
    /// The network tells each error once.
    found: Option<Cause>,
}

impl Sounding {
    /// Asks.
    #[must_use]
    pub fn new(links: &Links, av: &AddressVector) -> Self {
        let to = address(av.dgid.to_ip(), links.core.config.udp_port, av.scope_id);
        let from = address(av.sgid.to_ip(), 0, av.scope_id);
        Self { socket: net::Sounding::new(from, to), found: None }
    }

    /// The reason that the network has given so far.
    #[must_use]
    pub fn verdict(&mut self) -> Option<Cause> {
        use io::ErrorKind as K;
        let kind = match &self.socket {
            Ok(socket) => socket.error().map_or(K::Other, |error| error.kind()),
            Err(error) => error.kind(),
        };
        let found = match kind {
            K::ConnectionRefused => Some(Cause::NobodyOnPort),
            K::HostUnreachable | K::NetworkUnreachable | K::NetworkDown => Some(Cause::NoRoute),
            _ => None,
        };
        self.found = found.or(self.found);
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_survive_the_way() {
        let (here, there) = (Gid([1; 16]), Gid([2; 16]));
        let question = Question {
            av: AddressVector { sgid: here, dgid: there, ..AddressVector::default() },
            dest: Qpn::new(0x02_0007),
            from: Qpn::new(0x01_0005),
            sq_psn: Psn::new(0x12_3456),
            mtu: Mtu::Mtu1024,
            qp_type: QpType::Rc,
        };
        let told = Told { cause: Cause::PsnDiffers, value: 7 };
        let reason = WhyPacket::Reason { dest: Qpn::new(9), psn: Psn::new(0xab_cdef), told };
        for packet in [WhyPacket::Question(question), reason] {
            assert_eq!(WhyPacket::parse(&packet.to_bytes(), here, there), Some(packet));
        }
        assert_eq!(WhyPacket::parse(&[0xc1; WhyPacket::LEN], here, there), None);
        assert_eq!(WhyPacket::parse(&reason.to_bytes()[1..], here, there), None);
    }
}

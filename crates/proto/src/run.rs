//! Packets of one length in a row, which a link may send in one loop.

use std::fmt;

use crate::env::TransmitError;
use crate::payload::Payload;
use crate::wire::bth::Bth;
use crate::wire::packet::Headers;
use crate::wire::repeated::Repeated;

/// Packets in a row with payloads of one length: full packets of one message, or messages of one packet. They differ in the
/// PSN, in the place of their payload, in the address of a RETH, and in whether they ask for an ACK.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    headers: Headers,
    contents: Contents<'a>,
    payload_len: u32,
    len: u32,
    /// A bit for each packet that asks for an ACK.
    asks: u64,
}

/// Tells of messages of one packet the address of the RETH, if they have one, and the payload.
pub type Messages<'a> = dyn Fn(u32) -> (u64, Payload<'a>) + 'a;

#[derive(Clone, Copy)]
enum Contents<'a> {
    /// One message, from the first packet on.
    Message(Payload<'a>),
    /// Messages from this one on.
    Messages(&'a Messages<'a>, u32),
}

impl fmt::Debug for Contents<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(payload) => f.debug_tuple("Message").field(payload).finish(),
            Self::Messages(_, first) => f.debug_tuple("Messages").field(first).finish(),
        }
    }
}

impl<'a> Run<'a> {
    /// Most packets of one.
    pub const MOST: u32 = u64::BITS;

    /// `len` packets, at most [`MOST`](Self::MOST). The first has these headers. `payload` is that of the whole message from
    /// there on. Where the headers name an address ([`Headers::reth`]), that moves on with the payload. `asks` has a bit for
    /// each packet that asks for an ACK.
    #[must_use]
    pub fn new(headers: Headers, payload: Payload<'a>, mtu: u32, len: u32, asks: u64) -> Self {
        debug_assert!(len <= Self::MOST);
        Self { headers, contents: Contents::Message(payload), payload_len: mtu, len, asks }
    }

    /// `len` messages of one packet and `payload_len` bytes, at most [`MOST`](Self::MOST). The first has these headers, and the
    /// others differ in PSN and address. All ask for an ACK, whatever the headers say.
    #[must_use]
    pub fn of_messages(headers: Headers, of: &'a Messages<'a>, payload_len: u32, len: u32) -> Self {
        debug_assert!(len <= Self::MOST);
        Self { headers, contents: Contents::Messages(of, 0), payload_len, len, asks: u64::MAX }
    }

    /// The headers of the first packet.
    #[must_use]
    pub fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Packets.
    #[must_use]
    pub fn len(&self) -> u32 {
        self.len
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes of payload of each packet.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.payload_len as usize
    }

    /// The payload of all packets. `None`: each is a message of its own.
    #[must_use]
    pub fn whole(&self) -> Option<Payload<'a>> {
        match self.contents {
            Contents::Message(payload) => {
                Some(payload.part(0, self.len as usize * self.payload_len()))
            }
            Contents::Messages(..) => None,
        }
    }

    /// Prepares `headers` for packet `i`, which is to be written next, and returns its payload.
    #[inline]
    #[must_use]
    pub fn go_to(&self, i: u32, headers: &mut Repeated) -> Payload<'a> {
        match self.contents {
            Contents::Message(payload) => {
                payload.part(i as usize * self.payload_len(), self.payload_len())
            }
            Contents::Messages(of, first) => {
                let (va, payload) = of(first + i);
                headers.aim(va);
                payload
            }
        }
    }

    /// `n` packets from packet `at` on. If `ends`, the last one asks for an ACK.
    #[must_use]
    pub fn part(&self, at: u32, n: u32, ends: bool) -> Self {
        let mut headers = self.headers;
        let contents = self.aim(at, &mut headers);
        let asks = self.asks >> at | u64::from(ends) << (n - 1);
        Self { headers, contents, payload_len: self.payload_len, len: n, asks }
    }

    /// Whether packet `i` asks for an ACK.
    #[inline]
    #[must_use]
    pub fn asks(&self, i: u32) -> bool {
        self.asks >> i & 1 != 0
    }

    /// Makes the headers of packet `i` of those of another one, and returns its contents.
    #[inline]
    fn aim(&self, i: u32, headers: &mut Headers) -> Contents<'a> {
        headers.bth.psn = self.headers.bth.psn.plus(i);
        match self.contents {
            Contents::Message(payload) => {
                let skip = u64::from(i) * u64::from(self.payload_len);
                if let (Some(reth), Some(first)) = (&mut headers.reth, self.headers.reth) {
                    reth.va = first.va.wrapping_add(skip);
                }
                Contents::Message(payload.skip(skip as usize))
            }
            Contents::Messages(of, first) => {
                if let Some(reth) = &mut headers.reth {
                    reth.va = of(first + i).0;
                }
                Contents::Messages(of, first + i)
            }
        }
    }

    /// The headers of packet `i`, made of those of another one, and its payload.
    #[inline]
    fn packet_from(&self, i: u32, headers: &mut Headers) -> Payload<'a> {
        headers.bth.ack_req = self.asks(i);
        match self.aim(i, headers) {
            Contents::Message(payload) => payload.part(0, self.payload_len()),
            Contents::Messages(of, first) => of(first).1,
        }
    }

    /// Packet `i`.
    #[must_use]
    pub fn packet(&self, i: u32) -> (Headers, Payload<'a>) {
        let mut headers = self.headers;
        let payload = self.packet_from(i, &mut headers);
        (headers, payload)
    }

    /// The headers, to be written one after the other.
    #[must_use]
    pub fn repeated(&self) -> Repeated {
        let mut headers = self.headers;
        headers.bth.pad = Bth::pad_of(self.payload_len());
        Repeated::new(&headers, self.payload_len)
    }

    /// Gives the packets to `send`, one by one. Returns how many it took, and why not all.
    pub fn each(
        &self,
        mut send: impl FnMut(&Headers, &Payload<'a>) -> Result<(), TransmitError>,
    ) -> (u32, Result<(), TransmitError>) {
        let mut headers = self.headers;
        for i in 0..self.len {
            let payload = self.packet_from(i, &mut headers);
            if let Err(error) = send(&headers, &payload) {
                return (i, Err(error));
            }
        }
        (self.len, Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{Psn, Qpn};
    use crate::wire::opcode::{Opcode, Operation, Service};
    use crate::wire::reth::Reth;
    use crate::wr::Sge;

    const MTU: u32 = 256;

    fn of(operation: Operation, reth: Option<Reth>, sges: &[Sge]) -> Run<'_> {
        let opcode = Opcode::new(Service::Rc, operation);
        let mut headers = Headers::new(Bth::new(opcode, Qpn::new(7), Psn::new(0xff_fffe)));
        headers.reth = reth;
        Run::new(headers, Payload::gather(sges, 100, 5 * MTU as usize, 1), MTU, 5, 0b10010)
    }

    #[test]
    fn headers_in_a_row_are_those_of_each_packet() {
        let sges = [Sge { addr: 1 << 20, len: 1 << 16, lkey: 3 }];
        let reth = Reth { va: u64::MAX - 300, rkey: 9, len: MTU };
        for run in
            [of(Operation::WriteOnly, Some(reth), &sges), of(Operation::SendMiddle, None, &sges)]
        {
            let (mut repeated, mut expected) = (run.repeated(), run.repeated());
            for i in 0..run.len() {
                let (headers, payload) = run.packet(i);
                let (mut one, mut other) = ([0; 40], [0; 40]);
                let len = headers.emit(&mut one);
                assert_eq!(repeated.write(run.asks(i), &mut other), len);
                assert_eq!(one, other, "packet {i}");
                let mut twin = expected;
                assert_eq!(expected.has(&one), Some(run.asks(i)), "packet {i}");
                assert_eq!(twin.has(&one[..len - 1]), None);
                assert_eq!(payload.len(), MTU as usize);
            }
        }
    }

    /// A link that writes the headers one after the other sends what another one sends packet by packet.
    #[test]
    fn messages_in_a_row_are_those_of_each_packet() {
        let opcode = Opcode::new(Service::Rc, Operation::WriteOnly);
        let bth = Bth { pad: Bth::pad_of(9), ..Bth::new(opcode, Qpn::new(7), Psn::new(0xff_fffe)) };
        let at = |i: u32| u64::from(i * 7919 % 64) << 4;
        let bytes: Vec<u8> = (0..=255).cycle().take(2048).collect();
        let of = |i: u32| (at(i), Payload::bytes(&bytes[at(i) as usize..][..9]));
        let mut headers = Headers::new(bth);
        headers.reth = Some(Reth { va: at(0), rkey: 9, len: 9 });
        let whole = Run::of_messages(headers, &of, 9, 20);
        for (first, part) in
            [(0, whole), (0, whole.part(0, 20, true)), (3, whole.part(3, 11, false))]
        {
            let mut repeated = part.repeated();
            for i in 0..part.len() {
                let payload = part.go_to(i, &mut repeated);
                let (headers, expected) = part.packet(i);
                let (mut one, mut other) = ([0; 40], [0; 40]);
                let len = Headers { bth: Bth { pad: 3, ..headers.bth }, ..headers }.emit(&mut one);
                assert_eq!(repeated.write(part.asks(i), &mut other), len);
                assert_eq!(one, other, "packet {i} of the part from {first} on");
                assert_eq!(headers.reth.unwrap().va, at(first + i));
                assert!(headers.bth.ack_req);
                assert_eq!(format!("{payload:?}"), format!("{expected:?}"));
            }
        }
    }

    #[test]
    fn a_part_of_a_run_has_the_same_packets() {
        let sges = [Sge { addr: 1 << 20, len: 1 << 16, lkey: 3 }];
        let reth = Reth { va: 1000, rkey: 9, len: MTU };
        let run = of(Operation::WriteOnly, Some(reth), &sges);
        let part = run.part(1, 3, true);
        assert_eq!(part.len(), 3);
        for i in 0..3 {
            let ((mut whole, _), (headers, _)) = (run.packet(1 + i), part.packet(i));
            whole.bth.ack_req |= i == 2;
            assert_eq!(headers, whole);
        }
        assert_eq!(part.whole().unwrap().len(), 3 * MTU as usize);
    }
}

//! Full packets of one message in a row, which a link may send in one loop.

use crate::env::TransmitError;
use crate::payload::Payload;
use crate::wire::packet::Headers;
use crate::wire::repeated::Repeated;

/// Packets of one message in a row, each with a payload as long as the path MTU. They differ in the PSN, in the place of
/// their payload, and in whether they ask for an ACK.
#[derive(Clone, Copy, Debug)]
pub struct Run<'a> {
    headers: Headers,
    payload: Payload<'a>,
    mtu: u32,
    len: u32,
    /// A bit for each packet that asks for an ACK.
    asks: u64,
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
        Self { headers, payload, mtu, len, asks }
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
    pub fn mtu(&self) -> usize {
        self.mtu as usize
    }

    /// The payload of all packets.
    #[must_use]
    pub fn payload(&self) -> Payload<'a> {
        self.payload.part(0, self.len as usize * self.mtu())
    }

    /// `n` packets from packet `at` on. If `ends`, the last one asks for an ACK.
    #[must_use]
    pub fn part(&self, at: u32, n: u32, ends: bool) -> Self {
        let (headers, payload) = self.packet_from(at);
        let asks = self.asks >> at | u64::from(ends) << (n - 1);
        Self { headers, payload, mtu: self.mtu, len: n, asks }
    }

    /// Whether packet `i` asks for an ACK.
    #[inline]
    #[must_use]
    pub fn asks(&self, i: u32) -> bool {
        self.asks >> i & 1 != 0
    }

    fn packet_from(&self, i: u32) -> (Headers, Payload<'a>) {
        let (mut headers, skip) = (self.headers, u64::from(i) * u64::from(self.mtu));
        headers.bth.psn = headers.bth.psn.plus(i);
        if let Some(reth) = &mut headers.reth {
            reth.va = reth.va.wrapping_add(skip);
        }
        (headers, self.payload.skip(skip as usize))
    }

    /// Packet `i`.
    #[must_use]
    pub fn packet(&self, i: u32) -> (Headers, Payload<'a>) {
        let (mut headers, payload) = self.packet_from(i);
        headers.bth.ack_req = self.asks(i);
        (headers, payload.part(0, self.mtu()))
    }

    /// The headers, to be written one after the other.
    #[must_use]
    pub fn repeated(&self) -> Repeated {
        Repeated::new(&self.headers, self.mtu)
    }

    /// Gives the packets to `send`, one by one. Returns how many it took, and why not all.
    pub fn each(
        &self,
        mut send: impl FnMut(&Headers, &Payload<'a>) -> Result<(), TransmitError>,
    ) -> (u32, Result<(), TransmitError>) {
        for i in 0..self.len {
            let (headers, payload) = self.packet(i);
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
    use crate::wire::bth::Bth;
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
        assert_eq!(part.payload().len(), 3 * MTU as usize);
    }
}

//! A packet: base header, extension headers, payload.

use std::fmt;

use super::aeth::Aeth;
use super::atomic::{AtomicAckEth, AtomicEth};
use super::bth::Bth;
use super::deth::Deth;
use super::feth::Feth;
use super::field::u24_at;
use super::ieth::Ieth;
use super::imm::ImmDt;
use super::opcode::{Ext, Opcode, Operation, Service};
use super::reth::Reth;
use super::xrceth::XrcEth;
use crate::types::{Psn, Qpn};

/// The longest headers that a packet can have: BTH, XRCETH, AtomicETH.
pub const MAX_HEADERS: usize = Bth::LEN + XrcEth::LEN + AtomicEth::LEN;

/// Bytes of the ICRC behind the pad.
pub const ICRC_LEN: usize = 4;

/// The reason why bytes are no packet. The receiver drops them and counts the reason.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, thiserror::Error)]
#[non_exhaustive]
pub enum Malformed {
    /// Shorter than the headers of its opcode.
    #[error("shorter than its headers")]
    Truncated,
    /// The transport header version is not 0.
    #[error("unknown transport header version")]
    Version,
    /// No opcode that this device knows.
    #[error("unknown opcode")]
    Opcode,
    /// The pad is longer than the bytes behind the headers.
    #[error("more pad than payload")]
    Pad,
    /// A reserved AETH syndrome.
    #[error("reserved syndrome")]
    Syndrome,
    /// The length is not a multiple of four bytes, or the operation cannot have that payload.
    #[error("wrong length for its opcode")]
    Length,
}

/// The headers of a packet. Headers that the opcode has are `Some`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Headers {
    /// Base header.
    pub bth: Bth,
    /// In XRC requests.
    pub xrceth: Option<XrcEth>,
    /// In datagrams.
    pub deth: Option<Deth>,
    /// In READ requests, the first packet of a WRITE, FLUSH and ATOMIC WRITE.
    pub reth: Option<Reth>,
    /// In compare-swap and fetch-add.
    pub atomic: Option<AtomicEth>,
    /// In responses other than MIDDLE ones.
    pub aeth: Option<Aeth>,
    /// In answers to atomics.
    pub atomic_ack: Option<AtomicAckEth>,
    /// In FLUSH.
    pub feth: Option<Feth>,
    /// Immediate data: the value of the big-endian field.
    pub imm: Option<u32>,
    /// The key that a SEND with invalidate names.
    pub ieth: Option<u32>,
}

/// The first bytes of a packet, if many of its kind may follow each other: its base header up to the destination. Two
/// packets with the same beginning differ only in the rest of that header and, where they have one, in their RETH or
/// AETH.
#[derive(Clone, Copy, Default, Debug)]
pub struct Beginning(Option<[u8; 8]>);

impl Headers {
    /// A base header alone.
    #[must_use]
    pub const fn new(bth: Bth) -> Self {
        Self {
            bth,
            xrceth: None,
            deth: None,
            reth: None,
            atomic: None,
            aeth: None,
            atomic_ack: None,
            feth: None,
            imm: None,
            ieth: None,
        }
    }

    /// Whether the packet has no header but the base header.
    #[inline]
    #[must_use]
    pub const fn is_bare(&self) -> bool {
        self.bth.opcode.ext().is_empty()
    }

    /// Bytes on the wire. The opcode decides, even if other headers are `Some`.
    #[expect(clippy::len_without_is_empty, reason = "headers are never empty")]
    #[must_use]
    pub const fn len(&self) -> usize {
        Bth::LEN + self.bth.opcode.ext_len()
    }

    /// Writes the headers that the opcode has, in wire order, and returns their length. A missing
    /// one is written as zeros, and is a mistake of the caller.
    ///
    /// # Panics
    /// If `buf` is shorter than [`Headers::len`].
    #[inline]
    pub fn emit(&self, buf: &mut [u8]) -> usize {
        let ext = self.bth.opcode.ext();
        let mut out = Writer { rest: buf, written: 0 };
        self.bth.emit(out.next());
        match self.reth {
            // The RETH of a WRITE, the likely case.
            Some(reth) if ext == Ext::RETH => reth.emit(out.next()),
            _ if !ext.is_empty() => self.emit_ext(ext, &mut out),
            _ => {}
        }
        out.written
    }

    /// Writes the headers behind the base header, and returns their length.
    ///
    /// # Panics
    /// If `buf` is shorter than they are.
    #[inline]
    pub fn emit_extensions(&self, buf: &mut [u8]) -> usize {
        let ext = self.bth.opcode.ext();
        if ext.is_empty() {
            return 0;
        }
        let mut out = Writer { rest: buf, written: 0 };
        self.emit_ext(ext, &mut out);
        out.written
    }

    /// Writes the extension headers.
    fn emit_ext(&self, ext: Ext, out: &mut Writer<'_>) {
        if ext.has(Ext::XRCETH) {
            out.header(self.xrceth, XrcEth::emit);
        }
        if ext.has(Ext::DETH) {
            out.header(self.deth, Deth::emit);
        }
        if ext.has(Ext::FETH) {
            out.header(self.feth, Feth::emit);
        }
        if ext.has(Ext::RETH) {
            out.header(self.reth, Reth::emit);
        }
        if ext.has(Ext::ATOMIC) {
            out.header(self.atomic, AtomicEth::emit);
        }
        if ext.has(Ext::AETH) {
            out.header(self.aeth, Aeth::emit);
        }
        if ext.has(Ext::ATOMIC_ACK) {
            out.header(self.atomic_ack, AtomicAckEth::emit);
        }
        if ext.has(Ext::IMM) {
            out.header(self.imm.map(ImmDt), ImmDt::emit);
        }
        if ext.has(Ext::IETH) {
            out.header(self.ieth.map(|rkey| Ieth { rkey }), Ieth::emit);
        }
    }

    /// Reads the headers of a packet whose payload, of `payload_len` bytes and without a pad, lies elsewhere. No bytes
    /// may follow them.
    ///
    /// # Errors
    /// As [`Packet::parse`].
    pub fn parse(bytes: &[u8], payload_len: usize) -> Result<Self, Malformed> {
        let any = Opcode::new(Service::Rc, Operation::Ack);
        let mut headers = Self::new(Bth::new(any, Qpn::default(), Psn::default()));
        headers.parse_from(bytes, payload_len)?;
        Ok(headers)
    }

    /// As [`parse`](Self::parse), in place: headers are long to move about. After an error they are any.
    ///
    /// # Errors
    /// As [`Packet::parse`].
    #[inline]
    pub fn parse_from(&mut self, bytes: &[u8], payload_len: usize) -> Result<(), Malformed> {
        let mut rest = bytes;
        *self = Self::new(Bth::parse(take(&mut rest)?)?);
        self.parse_ext(&mut rest)?;
        if !rest.is_empty() || !self.bth.opcode.admits_payload(payload_len) {
            return Err(Malformed::Length);
        }
        if self.bth.pad != Bth::pad_of(payload_len) {
            return Err(Malformed::Pad);
        }
        Ok(())
    }

    /// As [`parse_from`](Self::parse_from), of a packet whose base header is known already: `bytes` are those behind it.
    ///
    /// # Errors
    /// As [`Packet::parse`].
    #[inline]
    pub fn parse_extensions(
        &mut self,
        bth: Bth,
        mut bytes: &[u8],
        payload_len: usize,
    ) -> Result<(), Malformed> {
        if bth.opcode.ext().is_empty() && self.is_bare() {
            // As in the packet before.
            self.bth = bth;
        } else {
            *self = Self::new(bth);
            self.parse_ext(&mut bytes)?;
        }
        if !bytes.is_empty() || !bth.opcode.admits_payload(payload_len) {
            return Err(Malformed::Length);
        }
        Ok(())
    }

    /// As [`Packet::parse`], in place; the payload. After an error the headers are any.
    ///
    /// # Errors
    /// As [`Packet::parse`].
    #[inline]
    pub fn parse_packet<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Malformed> {
        let mut rest = bytes;
        *self = Self::new(Bth::parse(take(&mut rest)?)?);
        self.parse_ext(&mut rest)?;
        if !rest.len().is_multiple_of(4) {
            return Err(Malformed::Length);
        }
        let len = rest.len().checked_sub(self.bth.pad.into()).ok_or(Malformed::Pad)?;
        if !self.bth.opcode.admits_payload(len) {
            return Err(Malformed::Length);
        }
        Ok(&rest[..len])
    }

    /// As [`parse_packet`](Self::parse_packet), of one of many packets that are read to the same headers; `last` says how the
    /// last one began.
    ///
    /// # Errors
    /// As [`Packet::parse`].
    #[inline]
    pub fn parse_next<'a>(
        &mut self,
        last: &mut Beginning,
        bytes: &'a [u8],
    ) -> Result<&'a [u8], Malformed> {
        if let Some((begins, rest)) = bytes.split_first_chunk()
            && last.0 == Some(*begins)
            && let Some(payload) = self.parse_alike(rest)
        {
            return Ok(payload);
        }
        last.0 = None;
        let payload = self.parse_packet(bytes)?;
        if [Ext::NONE, Ext::RETH, Ext::AETH].contains(&self.bth.opcode.ext()) {
            last.0 = bytes.first_chunk().copied();
        }
        Ok(payload)
    }

    /// Reads the fields that differ between two packets with the same beginning, behind that beginning. `None` if
    /// the general parser has to find the fault.
    #[inline]
    fn parse_alike<'a>(&mut self, rest: &'a [u8]) -> Option<&'a [u8]> {
        let (&[ack, psn @ ..], mut rest) = rest.split_first_chunk::<4>()?;
        match (&mut self.reth, &mut self.aeth) {
            (Some(reth), _) => *reth = Reth::parse(take(&mut rest).ok()?),
            (None, Some(aeth)) => *aeth = Aeth::parse(take(&mut rest).ok()?).ok()?,
            (None, None) => {}
        }
        let len = rest.len().checked_sub(self.bth.pad.into())?;
        if !rest.len().is_multiple_of(4) || !self.bth.opcode.admits_payload(len) {
            return None;
        }
        (self.bth.ack_req, self.bth.resv7) = (ack & 0x80 != 0, ack & 0x7f);
        self.bth.psn = Psn::new(u24_at(&psn, 0));
        Some(&rest[..len])
    }

    /// Reads the extension headers that the opcode has off the front of `rest`.
    #[inline]
    fn parse_ext(&mut self, rest: &mut &[u8]) -> Result<(), Malformed> {
        let ext = self.bth.opcode.ext();
        if ext.is_empty() {
            return Ok(());
        }
        if ext.has(Ext::XRCETH) {
            self.xrceth = Some(XrcEth::parse(take(rest)?));
        }
        if ext.has(Ext::DETH) {
            self.deth = Some(Deth::parse(take(rest)?));
        }
        if ext.has(Ext::FETH) {
            self.feth = Some(Feth::parse(take(rest)?));
        }
        if ext.has(Ext::RETH) {
            self.reth = Some(Reth::parse(take(rest)?));
        }
        if ext.has(Ext::ATOMIC) {
            self.atomic = Some(AtomicEth::parse(take(rest)?));
        }
        if ext.has(Ext::AETH) {
            self.aeth = Some(Aeth::parse(take(rest)?)?);
        }
        if ext.has(Ext::ATOMIC_ACK) {
            self.atomic_ack = Some(AtomicAckEth::parse(take(rest)?));
        }
        if ext.has(Ext::IMM) {
            self.imm = Some(ImmDt::parse(take(rest)?).0);
        }
        if ext.has(Ext::IETH) {
            self.ieth = Some(Ieth::parse(take(rest)?).rkey);
        }
        Ok(())
    }
}

/// The next `N` bytes.
fn take<'a, const N: usize>(rest: &mut &'a [u8]) -> Result<&'a [u8; N], Malformed> {
    let (first, tail) = rest.split_first_chunk().ok_or(Malformed::Truncated)?;
    *rest = tail;
    Ok(first)
}

struct Writer<'a> {
    rest: &'a mut [u8],
    written: usize,
}

impl<'a> Writer<'a> {
    fn next<const N: usize>(&mut self) -> &'a mut [u8; N] {
        self.written += N;
        let (first, tail) = std::mem::take(&mut self.rest)
            .split_first_chunk_mut()
            .expect("the buffer holds Headers::len bytes");
        self.rest = tail;
        first
    }

    fn header<const N: usize, H>(&mut self, header: Option<H>, emit: fn(&H, &mut [u8; N])) {
        let out = self.next();
        debug_assert!(header.is_some(), "the opcode has a header that was not given");
        match header {
            Some(header) => emit(&header, out),
            None => out.fill(0),
        }
    }
}

impl fmt::Display for Headers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fn part(f: &mut fmt::Formatter<'_>, header: Option<impl fmt::Display>) -> fmt::Result {
            header.map_or(Ok(()), |header| write!(f, " {header}"))
        }
        write!(f, "{}", self.bth)?;
        part(f, self.xrceth)?;
        part(f, self.deth)?;
        part(f, self.feth)?;
        part(f, self.reth)?;
        part(f, self.atomic)?;
        part(f, self.aeth)?;
        part(f, self.atomic_ack)?;
        part(f, self.imm.map(ImmDt))?;
        part(f, self.ieth.map(|rkey| Ieth { rkey }))
    }
}

/// A packet from the BTH to the end of the payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// The headers; `bth.pad` fits the payload.
    pub headers: Headers,
    /// The payload without its pad.
    pub payload: &'a [u8],
}

impl<'a> Packet<'a> {
    /// A packet of these parts; sets the pad.
    #[must_use]
    pub const fn new(mut headers: Headers, payload: &'a [u8]) -> Self {
        headers.bth.pad = Bth::pad_of(payload.len());
        Self { headers, payload }
    }

    /// Reads a packet: the bytes from the BTH to the pad, *without* the ICRC. Reserved bits and the
    /// content of the pad are ignored.
    ///
    /// # Errors
    /// The reason why the bytes are no packet.
    #[inline]
    pub fn parse(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let any = Opcode::new(Service::Rc, Operation::Ack);
        let mut headers = Headers::new(Bth::new(any, Qpn::default(), Psn::default()));
        let payload = headers.parse_packet(bytes)?;
        Ok(Self { headers, payload })
    }

    /// Bytes from the BTH to the pad.
    #[expect(clippy::len_without_is_empty, reason = "a packet is never empty")]
    #[must_use]
    pub const fn len(&self) -> usize {
        self.headers.len() + self.payload.len() + self.headers.bth.pad as usize
    }

    /// Writes the packet from the BTH to the pad, and returns its length.
    ///
    /// # Panics
    /// If `buf` is shorter than [`Packet::len`].
    pub fn emit(&self, buf: &mut [u8]) -> usize {
        debug_assert_eq!(self.headers.bth.pad, Bth::pad_of(self.payload.len()));
        let payload_at = self.headers.emit(buf);
        let pad_at = payload_at + self.payload.len();
        let end = self.len();
        buf[payload_at..pad_at].copy_from_slice(self.payload);
        buf[pad_at..end].fill(0);
        end
    }
}

impl fmt::Display for Packet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.headers)?;
        if self.headers.bth.opcode.carries_payload() {
            write!(f, " len {}", self.payload.len())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;

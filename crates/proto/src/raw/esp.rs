//! IPsec ESP (RFC 4303) with AES-GCM (RFC 4106), done to frames as they leave or arrive (`ibv_flow_action_esp(3)`).
//!
//! A security association ([`Esp`]) has state: sequence number, IV, replay window. Its user holds its lock.

mod aead;
mod edit;
mod sequence;

use arrayvec::ArrayVec;
use thiserror::Error;

use super::MAX_FRAME;
use super::frame::{Frame, Headers, Transport};
use aead::{Aead, IV_LEN};
use edit::Packet;
use sequence::{ReplayWindow, extend};

pub use edit::{Encapsulation, OuterIp};

/// SPI and sequence number.
const HEADER_LEN: usize = 8;
/// Bytes of the longest key.
pub const MAX_KEY_LEN: usize = 32;
/// Most bits of a replay window.
pub const MAX_REPLAY_WINDOW: u32 = 1 << 16;

/// `struct ib_uverbs_flow_action_esp_keymat_aes_gcm`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AesGcm {
    /// 16, 24 or 32 bytes.
    pub key: ArrayVec<u8, MAX_KEY_LEN>,
    /// The part of the nonce that is not sent.
    pub salt: [u8; 4],
    /// The IV of the first packet that is encrypted in full offload; each following one is one more. Sent in network byte order.
    pub iv: u64,
    /// Bytes of the integrity check value: 8, 12 or 16.
    pub icv_len: usize,
}

/// The work on a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// As it leaves.
    Encrypt,
    /// As it arrives.
    Decrypt,
}

/// The part of the work that the device does (`enum ib_uverbs_flow_action_esp_flags`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Offload {
    /// The program makes and takes away outer headers, ESP header and IV; the device encrypts, and adds trailer and ICV, or
    /// the reverse. It keeps no state.
    InlineCrypto {
        /// The extended sequence number's lower half is about to begin anew: packets with a small one belong to the next `esn`.
        new_window: bool,
        /// The packet is carried whole, not only the payload of its IP header.
        tunnel: bool,
    },
    /// The device does all of it.
    Full(FullOffload),
}

/// Parameters of [`Offload::Full`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FullOffload {
    /// Security parameters index.
    pub spi: u32,
    /// The sequence number that was used last: the first packet has one more (RFC 4303, 3.3.3).
    pub seq: u32,
    /// Bytes of zeros behind the encrypted payload (RFC 4303, 2.7).
    pub tfc_pad: u32,
    /// Packets after which nothing passes any more.
    pub hard_limit: u64,
    /// Bits of the window in which each packet is taken once; 0 for no window.
    pub replay_window: u32,
    /// The headers around a packet: in tunnel mode.
    pub tunnel: Option<Encapsulation>,
}

impl Offload {
    /// Tells whether a packet is carried whole: tunnel mode, not transport mode.
    #[must_use]
    pub fn is_tunnel(&self) -> bool {
        match self {
            Self::InlineCrypto { tunnel, .. } => *tunnel,
            Self::Full(full) => full.tunnel.is_some(),
        }
    }
}

/// Parameters of a security association.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EspAttr {
    /// Encrypt or decrypt.
    pub direction: Direction,
    /// The division of work between device and program.
    pub offload: Offload,
    /// Key material.
    pub keymat: AesGcm,
    /// The upper half of 64-bit sequence numbers; `None` for sequence numbers of 32 bits.
    pub esn: Option<u32>,
}

/// The reason why a security association is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum EspError {
    /// `EINVAL`.
    #[error("a key has 16, 24 or 32 bytes")]
    KeyLen,
    /// `EINVAL`.
    #[error("an integrity check value has 8, 12 or 16 bytes")]
    IcvLen,
    /// `EOPNOTSUPP`: nothing tells which protocol is carried.
    #[error(
        "in transport mode the trailer names a protocol, which a packet without a trailer does not tell"
    )]
    InlineTransport,
    /// `EOPNOTSUPP`: nothing tells where the padding begins.
    #[error("padding against traffic analysis is for tunnels")]
    TfcPad,
    /// `EINVAL`.
    #[error("a replay window has at most 65536 bits")]
    ReplayWindow,
    /// `EINVAL`: a modification may not change this.
    #[error("direction, offload and mode stay what they are")]
    Fixed,
}

impl EspError {
    /// Tells whether the request makes sense, but this device does not do it.
    #[must_use]
    pub fn is_unsupported(self) -> bool {
        matches!(self, Self::InlineTransport | Self::TfcPad)
    }
}

/// The reason why a packet is dropped.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum EspDrop {
    /// It is a fragment, or has no IP header, or no ESP header where it needs one.
    #[error("not a packet of this association")]
    NotOurs,
    /// It was changed on its way, or encrypted with another key.
    #[error("the integrity check failed")]
    Integrity,
    /// The decrypted trailer makes no sense.
    #[error("the trailer is wrong")]
    Trailer,
    /// It was there before, or is older than the window.
    #[error("replayed")]
    Replayed,
    /// The association has come to its end: packets, or sequence numbers.
    #[error("the association has come to its end")]
    Exhausted,
    /// With the added bytes it is longer than a frame may be.
    #[error("too long")]
    TooLong,
}

/// A security association.
#[derive(Debug)]
pub struct Esp {
    attr: EspAttr,
    aead: Aead,
    /// The number of the packet that was sent last.
    sent: u64,
    iv: u64,
    packets: u64,
    window: ReplayWindow,
}

impl Esp {
    /// Checks a program's request.
    ///
    /// # Errors
    /// [`EspError`].
    pub fn new(attr: EspAttr) -> Result<Self, EspError> {
        let aead = Aead::new(&attr.keymat)?;
        let inline = matches!(attr.offload, Offload::InlineCrypto { .. });
        if inline && !attr.offload.is_tunnel() && attr.direction == Direction::Encrypt {
            return Err(EspError::InlineTransport);
        }
        let (mut seq, mut window) = (0, 0);
        if let Offload::Full(full) = &attr.offload {
            if full.tfc_pad != 0 && full.tunnel.is_none() {
                return Err(EspError::TfcPad);
            }
            if full.replay_window > MAX_REPLAY_WINDOW {
                return Err(EspError::ReplayWindow);
            }
            (seq, window) = (full.seq, full.replay_window);
        }
        let sent = u64::from(attr.esn.unwrap_or(0)) << 32 | u64::from(seq);
        let iv = attr.keymat.iv;
        Ok(Self { aead, sent, iv, packets: 0, window: ReplayWindow::new(window, sent), attr })
    }

    /// Its parameters, as last modified.
    #[must_use]
    pub fn attr(&self) -> &EspAttr {
        &self.attr
    }

    /// Takes other parameters (`ibv_modify_flow_action_esp`). Sequence numbers, IVs and the window go on, unless `restart` says
    /// that the program gave new ones.
    ///
    /// # Errors
    /// [`EspError`]; nothing has changed then.
    pub fn modify(&mut self, attr: EspAttr, restart: Restart) -> Result<(), EspError> {
        let same = attr.direction == self.attr.direction
            && attr.offload.is_tunnel() == self.attr.offload.is_tunnel()
            && std::mem::discriminant(&attr.offload) == std::mem::discriminant(&self.attr.offload);
        if !same {
            return Err(EspError::Fixed);
        }
        let mut next = Self::new(attr)?;
        if !restart.sequence {
            next.sent = self.sent;
            next.packets = self.packets;
            std::mem::swap(&mut next.window, &mut self.window);
            if let Some(esn) = next.attr.esn.filter(|_| restart.esn) {
                next.sent = u64::from(esn) << 32 | next.sent & u64::from(u32::MAX);
            }
        }
        if !restart.key {
            next.iv = self.iv;
        }
        *self = next;
        Ok(())
    }

    /// Encrypts or decrypts a packet. The result replaces the contents of `to`.
    ///
    /// # Errors
    /// [`EspDrop`]: the packet ends here.
    pub fn transform(&mut self, frame: &Frame<'_>, to: &mut Vec<u8>) -> Result<(), EspDrop> {
        to.clear();
        if frame.outer.network.is_none() || frame.outer.is_fragment {
            return Err(EspDrop::NotOurs);
        }
        let inline = matches!(self.attr.offload, Offload::InlineCrypto { .. });
        match (self.attr.direction, inline) {
            (Direction::Encrypt, true) => self.encrypt_inline(frame, to),
            (Direction::Encrypt, false) => self.encrypt(frame, to),
            (Direction::Decrypt, true) => self.decrypt_inline(frame, to),
            (Direction::Decrypt, false) => self.decrypt(frame, to),
        }
    }

    fn full(&self) -> &FullOffload {
        match &self.attr.offload {
            Offload::Full(full) => full,
            Offload::InlineCrypto { .. } => unreachable!("only called for full offload"),
        }
    }

    /// Counts a packet that passes.
    fn count(&mut self) -> Result<(), EspDrop> {
        if self.full().hard_limit != 0 && self.packets >= self.full().hard_limit {
            return Err(EspDrop::Exhausted);
        }
        self.packets += 1;
        Ok(())
    }

    fn encrypt(&mut self, frame: &Frame<'_>, to: &mut Vec<u8>) -> Result<(), EspDrop> {
        let last = if self.attr.esn.is_some() { u64::MAX } else { u32::MAX.into() };
        if self.sent >= last {
            return Err(EspDrop::Exhausted);
        }
        let packet = Packet::new(frame).ok_or(EspDrop::NotOurs)?;
        self.count()?;
        self.sent += 1;
        let iv = self.iv;
        self.iv = self.iv.wrapping_add(1);
        let full = self.full();
        let (carried, next_header, tfc) = match &full.tunnel {
            Some(outer) => {
                let next_header = packet.open_tunnel(outer, to);
                (packet.whole(), next_header, full.tfc_pad as usize)
            }
            None => (packet.above_ip(), packet.open_transport(to), 0),
        };
        if carried.len() + tfc > MAX_FRAME {
            return Err(EspDrop::TooLong);
        }
        to.extend(full.spi.to_be_bytes());
        to.extend((self.sent as u32).to_be_bytes());
        to.extend(iv.to_be_bytes());
        let begin = to.len();
        to.extend(carried);
        to.resize(to.len() + tfc, 0);
        let udp = full.tunnel.as_ref().is_some_and(|outer| outer.udp.is_some());
        let udp_at = udp.then_some(begin - IV_LEN - HEADER_LEN - edit::UDP_LEN);
        self.seal(to, begin, next_header, self.sent);
        if to.len() > MAX_FRAME {
            return Err(EspDrop::TooLong);
        }
        edit::finish(to, frame.outer.network_at, udp_at);
        Ok(())
    }

    fn encrypt_inline(&mut self, frame: &Frame<'_>, to: &mut Vec<u8>) -> Result<(), EspDrop> {
        let at = esp_at(&frame.outer, false)?;
        let payload = at + HEADER_LEN + IV_LEN;
        let packet = frame.bytes.get(..frame.outer.network_end).ok_or(EspDrop::NotOurs)?;
        let first = packet.get(payload).ok_or(EspDrop::NotOurs)?;
        let next_header = edit::version_protocol(*first).ok_or(EspDrop::NotOurs)?;
        to.extend(packet);
        let number = self.inline_number(be32(to, at + 4));
        // Sequential, and never used twice with a key, as sequence numbers are not.
        to[at + HEADER_LEN..payload].copy_from_slice(&number.to_be_bytes());
        self.seal(to, payload, next_header, number);
        if to.len() > MAX_FRAME {
            return Err(EspDrop::TooLong);
        }
        edit::finish(to, frame.outer.network_at, None);
        Ok(())
    }

    /// Adds padding and trailer, encrypts from `begin` on, and adds the ICV. SPI, sequence number and IV lie before `begin`.
    fn seal(&self, to: &mut Vec<u8>, begin: usize, next_header: u8, number: u64) {
        let unpadded = to.len() - begin + 2;
        let pad = unpadded.wrapping_neg() & 3;
        to.extend((1..=pad as u8).chain([pad as u8, next_header]));
        let (head, text) = to.split_at_mut(begin);
        let (aad, iv) = self.around(head, number);
        let tag = self.aead.seal(iv, &aad, text);
        to.extend(tag);
    }

    /// Additional authenticated data and IV of a packet whose text begins where `head` ends.
    fn around(&self, head: &[u8], number: u64) -> (ArrayVec<u8, 12>, [u8; IV_LEN]) {
        let header = &head[head.len() - HEADER_LEN - IV_LEN..];
        let mut aad = ArrayVec::new();
        aad.extend(header[..4].iter().copied());
        if self.attr.esn.is_some() {
            aad.extend(((number >> 32) as u32).to_be_bytes());
        }
        aad.extend(header[4..HEADER_LEN].iter().copied());
        let mut iv = [0; IV_LEN];
        iv.copy_from_slice(&header[HEADER_LEN..]);
        (aad, iv)
    }

    fn decrypt(&mut self, frame: &Frame<'_>, to: &mut Vec<u8>) -> Result<(), EspDrop> {
        let in_udp = self.full().tunnel.as_ref().is_some_and(|outer| outer.udp.is_some());
        let at = esp_at(&frame.outer, in_udp)?;
        let packet = frame.bytes.get(..frame.outer.network_end).ok_or(EspDrop::NotOurs)?;
        if packet.len() < at + HEADER_LEN || be32(packet, at) != self.full().spi {
            return Err(EspDrop::NotOurs);
        }
        let low = be32(packet, at + 4);
        let number = match self.attr.esn {
            None => low.into(),
            Some(_) => self.window.number(low),
        };
        self.window.check(number)?;
        to.extend(packet);
        let payload = self.open(to, at, number)?;
        self.count()?;
        self.window.take(number);
        let next_header = edit::cut_trailer(to, payload).ok_or(EspDrop::Trailer)?;
        if self.attr.offload.is_tunnel() {
            return edit::leave_tunnel(to, &frame.outer, payload, next_header)
                .ok_or(EspDrop::Trailer);
        }
        edit::leave_transport(to, &frame.outer, payload, next_header);
        Ok(())
    }

    fn decrypt_inline(&mut self, frame: &Frame<'_>, to: &mut Vec<u8>) -> Result<(), EspDrop> {
        let at = esp_at(&frame.outer, false)?;
        let packet = frame.bytes.get(..frame.outer.network_end).ok_or(EspDrop::NotOurs)?;
        if packet.len() < at + HEADER_LEN {
            return Err(EspDrop::NotOurs);
        }
        to.extend(packet);
        let number = self.inline_number(be32(to, at + 4));
        let payload = self.open(to, at, number)?;
        edit::cut_trailer(to, payload).ok_or(EspDrop::Trailer)?;
        edit::finish(to, frame.outer.network_at, None);
        Ok(())
    }

    /// Checks and decrypts the ESP packet that begins at `at` and reaches to the end, and takes the ICV away; where its text
    /// begins.
    fn open(&self, to: &mut Vec<u8>, at: usize, number: u64) -> Result<usize, EspDrop> {
        let begin = at + HEADER_LEN + IV_LEN;
        let end = to.len().checked_sub(self.attr.keymat.icv_len).ok_or(EspDrop::Integrity)?;
        if end < begin {
            return Err(EspDrop::Integrity);
        }
        let (head, rest) = to.split_at_mut(begin);
        let (aad, iv) = self.around(head, number);
        let (text, icv) = rest.split_at_mut(end - begin);
        if !self.aead.open(iv, &aad, text, icv) {
            return Err(EspDrop::Integrity);
        }
        to.truncate(end);
        Ok(begin)
    }

    /// The 64-bit number of a packet of inline crypto, by the rule of the manual page.
    fn inline_number(&self, low: u32) -> u64 {
        let next = matches!(self.attr.offload, Offload::InlineCrypto { new_window: true, .. });
        self.attr.esn.map_or(low.into(), |esn| extend(esn, next, low))
    }
}

/// The state that a modification sets anew.
#[derive(Clone, Copy, Debug, Default)]
pub struct Restart {
    /// SPI, sequence number, limit, window.
    pub sequence: bool,
    /// Key and IV.
    pub key: bool,
    /// The upper half of sequence numbers.
    pub esn: bool,
}

/// The place of the ESP header.
fn esp_at(outer: &Headers, in_udp: bool) -> Result<usize, EspDrop> {
    match outer.transport {
        Some(Transport::Esp { .. }) if !in_udp => Ok(outer.transport_at),
        Some(Transport::Udp { .. }) if in_udp => Ok(outer.transport_at + 8),
        _ => Err(EspDrop::NotOurs),
    }
}

/// The big-endian number at `at`, which is there.
fn be32(bytes: &[u8], at: usize) -> u32 {
    super::frame::be32(bytes, at).expect("the length was checked")
}

#[cfg(test)]
mod tests;

//! A packet's payload, by reference.

use crate::direct::Place;
use crate::env::Env;
use crate::joined::Joined;
use crate::memory::{Fault, Memory};
use crate::mr::{Access, Hold, KeyError, LastLocal, LastRemote, MrTable};
use crate::types::Qpn;
use crate::wr::{RemoteAddr, Sge};

/// The payload of an outgoing packet. Its keys and bounds were checked, and are checked again piece by piece as it is
/// copied: a region that was deregistered in between is a [`Fault`].
#[derive(Clone, Copy, Debug)]
pub struct Payload<'a> {
    source: Source<'a>,
    len: usize,
    pd: u32,
    /// Where the peer fetches it from.
    at: Option<Place>,
}

#[derive(Clone, Copy, Debug)]
enum Source<'a> {
    Bytes(&'a [u8]),
    Gather { sges: &'a [Sge], skip: u64 },
    Remote { rkey: u32, va: u64, qpn: Qpn },
}

impl<'a> Payload<'a> {
    /// None.
    pub const EMPTY: Payload<'static> =
        Payload { source: Source::Bytes(&[]), len: 0, pd: 0, at: None };

    /// Bytes that the machine itself holds: inline data.
    #[must_use]
    pub fn bytes(bytes: &'a [u8]) -> Self {
        Self { source: Source::Bytes(bytes), len: bytes.len(), ..Self::EMPTY }
    }

    /// `len` bytes of a scatter/gather list of protection domain `pd`, from `skip` on.
    #[must_use]
    pub fn gather(sges: &'a [Sge], skip: u64, len: usize, pd: u32) -> Self {
        Self { source: Source::Gather { sges, skip }, len, pd, at: None }
    }

    /// `len` bytes that a peer READs through queue pair `qpn` of protection domain `pd`.
    #[must_use]
    pub fn remote(rkey: u32, va: u64, len: usize, (pd, qpn): (u32, Qpn)) -> Self {
        Self { source: Source::Remote { rkey, va, qpn }, len, pd, at: None }
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// All but the first `n` bytes.
    #[must_use]
    pub fn skip(self, n: usize) -> Self {
        self.part(n, self.len - n)
    }

    /// `len` bytes from the byte `at` on.
    ///
    /// # Panics
    /// When these are not inside.
    #[inline]
    #[must_use]
    pub fn part(self, at: usize, len: usize) -> Self {
        assert!(at <= self.len && len <= self.len - at, "inside the payload");
        let n = at as u64;
        let source = match self.source {
            Source::Bytes(bytes) => Source::Bytes(&bytes[at..at + len]),
            Source::Gather { sges, skip } => Source::Gather { sges, skip: skip + n },
            Source::Remote { rkey, va, qpn } => {
                Source::Remote { rkey, va: va.wrapping_add(n), qpn }
            }
        };
        Self { source, len, pd: self.pd, at: None }
    }

    /// Has the peer fetch it, by the key that is good for that ([`LinkEnv::fetched`](crate::env::LinkEnv::fetched)).
    #[must_use]
    pub fn fetched_from(self, at: Place) -> Self {
        Self { at: Some(at), ..self }
    }

    /// Where the peer fetches it from, if it does.
    #[inline]
    #[must_use]
    pub fn fetched(&self) -> Option<Place> {
        self.at
    }

    /// The element that it lies in, if that is one, and its protection domain.
    #[must_use]
    pub fn element(&self) -> Option<(Sge, u32)> {
        let Source::Gather { sges: [sge], skip } = self.source else { return None };
        let addr = sge.addr.wrapping_add(skip);
        Some((Sge { addr, len: self.len as u32, lkey: sge.lkey }, self.pd))
    }

    /// Tells whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Copies everything to `dst`, which has [`len`](Self::len) bytes.
    pub fn copy_to(
        &self,
        mrs: &MrTable,
        memory: &impl Memory,
        dst: &mut [u8],
    ) -> Result<(), Fault> {
        debug_assert_eq!(dst.len(), self.len);
        match self.source {
            Source::Bytes(bytes) => {
                dst.copy_from_slice(bytes);
                Ok(())
            }
            Source::Remote { rkey, va, qpn } => {
                if dst.is_empty() {
                    return Ok(());
                }
                let hold = mrs
                    .remote(rkey, (self.pd, qpn.get()), va, dst.len() as u64, Access::REMOTE_READ)
                    .map_err(|_| Fault)?;
                memory.read(hold.addr(), dst)
            }
            Source::Gather { sges, skip } => {
                let mut rest = dst;
                for piece in pieces(sges, skip, rest.len()) {
                    let (here, more) = rest.split_at_mut(piece.len as usize);
                    let hold =
                        hold_local(mrs, self.pd, &piece, Access::empty()).map_err(|_| Fault)?;
                    if hold.is_null() {
                        here.fill(0);
                    } else {
                        memory.read(hold.addr(), here)?;
                    }
                    rest = more;
                }
                // The machine never asks for more than the list holds.
                debug_assert!(rest.is_empty());
                Ok(())
            }
        }
    }
}

impl Payload<'_> {
    /// Where all of it lies, if that is in one piece of memory. The region stays in use as for
    /// [`copy_to_addr`](Self::copy_to_addr). If not, or if the keys do not allow it, that copies what it can.
    pub fn place<'m>(
        &self,
        mrs: &'m MrTable,
        (region, target): (&mut LastLocal<'m>, &mut LastRemote<'m>),
    ) -> Option<u64> {
        match self.source {
            Source::Gather { sges: [sge], skip } if self.len > 0 => {
                let addr = sge.addr.wrapping_add(skip);
                let part = Sge { addr, len: self.len as u32, lkey: sge.lkey };
                find_local(region, mrs, self.pd, &part).ok().flatten()
            }
            Source::Remote { rkey, va, qpn } if self.len > 0 => {
                let (reach, len) = ((self.pd, qpn.get()), self.len as u64);
                target.find(mrs, rkey, reach, va, len, Access::REMOTE_READ).ok()
            }
            _ => None,
        }
    }

    /// As [`copy_to`](Self::copy_to), to [`len`](Self::len) bytes at an address that `memory` may write. The region of
    /// the last local element stays in use as `region`, the region that a peer reads as `target`.
    pub fn copy_to_addr<'m>(
        &self,
        mrs: &'m MrTable,
        (region, target): (&mut LastLocal<'m>, &mut LastRemote<'m>),
        memory: &impl Memory,
        mut to: u64,
    ) -> Result<(), Fault> {
        match self.source {
            Source::Bytes(bytes) => memory.write(to, bytes),
            Source::Remote { .. } if self.len == 0 => Ok(()),
            Source::Remote { rkey, va, qpn } => {
                let (reach, len) = ((self.pd, qpn.get()), self.len as u64);
                let from = target.find(mrs, rkey, reach, va, len, Access::REMOTE_READ);
                memory.copy(to, from.map_err(|_| Fault)?, self.len)
            }
            Source::Gather { sges: [sge], skip } if self.len > 0 => {
                let addr = sge.addr.wrapping_add(skip);
                let part = Sge { addr, len: self.len as u32, lkey: sge.lkey };
                // The machine never asks for more than the list holds.
                debug_assert!(skip + self.len as u64 <= sge.len.into());
                match find_local(region, mrs, self.pd, &part).map_err(|_| Fault)? {
                    Some(from) => memory.copy(to, from, self.len),
                    None => write_zeros(to, part.len, memory),
                }
            }
            Source::Gather { sges, skip } => {
                for piece in pieces(sges, skip, self.len) {
                    match find_local(region, mrs, self.pd, &piece).map_err(|_| Fault)? {
                        Some(from) => memory.copy(to, from, piece.len as usize)?,
                        None => write_zeros(to, piece.len, memory)?,
                    }
                    to = to.wrapping_add(piece.len.into());
                }
                Ok(())
            }
        }
    }
}

/// Where the bytes of an element lie that is sent; `None` if it has no memory.
#[inline]
fn find_local<'m>(
    region: &mut LastLocal<'m>,
    mrs: &'m MrTable,
    pd: u32,
    sge: &Sge,
) -> Result<Option<u64>, KeyError> {
    region.find(mrs, sge.lkey, pd, sge.addr, sge.len.into(), Access::empty())
}

#[cold]
fn write_zeros(to: u64, len: u32, memory: &impl Memory) -> Result<(), Fault> {
    const ZEROS: [u8; 1024] = [0; 1024];
    (0..len).step_by(ZEROS.len()).try_for_each(|done| {
        let here = (len - done).min(ZEROS.len() as u32);
        memory.write(to.wrapping_add(done.into()), &ZEROS[..here as usize])
    })
}

/// The payload of a packet that came in.
#[derive(Clone, Copy, Debug)]
pub enum Data<'a> {
    /// Bytes that do not change.
    Bytes(&'a [u8]),
    /// Bytes at an address that the device's [`Memory`] may read, which their sender may still be changing.
    Shared {
        /// Their address.
        addr: u64,
        /// The number of bytes.
        len: usize,
    },
    /// Bytes of packets in a row, which do not change.
    Joined(Joined<'a>),
    /// So many bytes that lie with the sender, from where [`LinkEnv::direct`](crate::env::LinkEnv::direct) fetches them. All
    /// else refuses them.
    Elsewhere(Place, u32),
}

impl Data<'_> {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Shared { len, .. } => *len,
            Self::Joined(joined) => joined.len(),
            Self::Elsewhere(_, len) => *len as usize,
        }
    }

    /// Tells whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Copies the beginning to `dst`; how many bytes there were.
    pub fn read(&self, memory: &impl Memory, dst: &mut [u8]) -> Result<usize, Fault> {
        let len = self.len().min(dst.len());
        match *self {
            Self::Bytes(bytes) => dst[..len].copy_from_slice(&bytes[..len]),
            Self::Shared { addr, .. } => memory.read(addr, &mut dst[..len])?,
            Self::Joined(joined) => joined.read(&mut dst[..len])?,
            Self::Elsewhere(..) => return Err(Fault),
        }
        Ok(len)
    }

    /// The bytes after the first `n`. There must be at least `n`.
    #[must_use]
    pub fn skip(self, n: usize) -> Self {
        self.split_at(n).1
    }

    /// Copies everything to an address.
    pub fn write(&self, to: u64, memory: &impl Memory) -> Result<(), Fault> {
        match *self {
            Self::Bytes(bytes) => memory.write(to, bytes),
            Self::Shared { addr, len } => memory.copy(to, addr, len),
            Self::Joined(joined) => joined.write(to, memory),
            Self::Elsewhere(..) => Err(Fault),
        }
    }

    /// The 8 bytes that this is, as a word of memory.
    pub fn word(&self, memory: &impl Memory) -> Result<u64, Fault> {
        let mut bytes = [0; 8];
        match *self {
            Self::Bytes(data) => bytes = data.try_into().map_err(|_| Fault)?,
            Self::Shared { addr, len: 8 } => memory.read(addr, &mut bytes)?,
            Self::Shared { .. } | Self::Joined(_) | Self::Elsewhere(..) => return Err(Fault),
        }
        Ok(u64::from_ne_bytes(bytes))
    }

    fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Bytes(bytes) => {
                let (here, rest) = bytes.split_at(at);
                (Self::Bytes(here), Self::Bytes(rest))
            }
            Self::Shared { addr, len } => (
                Self::Shared { addr, len: at },
                Self::Shared { addr: addr.wrapping_add(at as u64), len: len - at },
            ),
            Self::Joined(joined) => {
                let (here, rest) = joined.split_at(at);
                (Self::Joined(here), Self::Joined(rest))
            }
            Self::Elsewhere(from, len) => {
                let va = from.at.va.wrapping_add(at as u64);
                let behind = Place { at: RemoteAddr { va, ..from.at }, ..from };
                (Self::Elsewhere(from, at as u32), Self::Elsewhere(behind, len - at as u32))
            }
        }
    }
}

/// The non-empty parts of `sges` that cover `len` bytes from `skip` on.
pub fn pieces(sges: &[Sge], mut skip: u64, len: usize) -> impl Iterator<Item = Sge> {
    let mut left = len as u64;
    sges.iter().filter_map(move |sge| {
        let size = u64::from(sge.len);
        if skip >= size {
            skip -= size;
            return None;
        }
        let take = (size - skip).min(left);
        let piece = Sge { addr: sge.addr.wrapping_add(skip), len: take as u32, lkey: sge.lkey };
        skip = 0;
        left -= take;
        (take > 0).then_some(piece)
    })
}

/// Holds the memory behind one element.
pub fn hold_local<'a>(
    mrs: &'a MrTable,
    pd: u32,
    sge: &Sge,
    need: Access,
) -> Result<Hold<'a>, KeyError> {
    mrs.local(sge.lkey, pd, sge.addr, sge.len.into(), need)
}

/// The reason why data could not be scattered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ScatterError {
    /// A key, a bound or a right.
    Key(KeyError),
    /// The memory is gone.
    Fault,
}

/// Writes `src` to the list, from `skip` on. The list is long enough.
pub fn scatter<M: Memory>(
    sges: &[Sge],
    skip: u64,
    src: Data<'_>,
    pd: u32,
    mrs: &MrTable,
    memory: &M,
) -> Result<(), ScatterError> {
    let mut rest = src;
    for piece in pieces(sges, skip, src.len()) {
        let (here, more) = rest.split_at(piece.len as usize);
        let hold = hold_local(mrs, pd, &piece, Access::LOCAL_WRITE).map_err(ScatterError::Key)?;
        if !hold.is_null() {
            here.write(hold.addr(), memory).map_err(|Fault| ScatterError::Fault)?;
        }
        rest = more;
    }
    debug_assert!(rest.is_empty());
    Ok(())
}

/// As [`scatter`], to a list of `env`'s device.
pub fn scatter_by<E: Env>(
    sges: &[Sge],
    skip: u64,
    src: Data<'_>,
    pd: u32,
    env: &mut E,
) -> Result<(), ScatterError> {
    match sges {
        [sge] if !src.is_empty() => {
            let addr = sge.addr.wrapping_add(skip);
            let part = Sge { addr, len: src.len() as u32, lkey: sge.lkey };
            let written = env.with_local(pd, &part, Access::LOCAL_WRITE, |memory, to| {
                to.map_or(Ok(()), |to| src.write(to, memory))
            });
            written.map_err(ScatterError::Key)?.map_err(|Fault| ScatterError::Fault)
        }
        _ => scatter(sges, skip, src, pd, env.mrs(), env.memory()),
    }
}

#[cfg(test)]
mod tests;

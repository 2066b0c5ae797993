//! Registered memory that owns its bytes, pieces of it, and names of pieces for peers.

use std::ops::{Bound, RangeBounds};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use anyverbs_objects::buf::Buf;
use anyverbs_objects::error::{CreateError, RegisterError};
use anyverbs_objects::memory::copy_guarded;
use anyverbs_objects::mr::Mr;
use anyverbs_objects::pd::Pd;
use anyverbs_proto::mr::Access;
use anyverbs_proto::wr::{RemoteAddr, Sge};
use thiserror::Error;

/// Registered memory that owns its bytes. It needs no `unsafe`: no Rust reference to the bytes exists, since the device and peers
/// may write them at any time. [`read`](Self::read) and [`write`](Self::write) copy instead.
///
/// A clone is the same memory. The memory is deregistered and freed when the last clone and the last [`Slice`] are gone. A
/// work request that still names it then completes with [`WcStatus::LocProtErr`](crate::WcStatus::LocProtErr).
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let region = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
/// region.write(100, b"hello");
/// assert_eq!(region.slice(100..105).to_vec(), b"hello");
///
/// // Bytes that the program has: it gives them away, and takes them back afterwards.
/// let table = pd.adopt(vec![7; 1000].into(), Access::LOCAL_WRITE)?;
/// table.write(0, b"hello");
/// let bytes = table.into_bytes().expect("no slice of it is left");
/// assert_eq!(bytes[..6], *b"hello\x07");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Region(Arc<Memory>);

/// The fields are dropped in this order: the registration ends before the memory goes.
#[derive(Debug)]
struct Memory {
    mr: Mr,
    bytes: Bytes,
}

/// Where the bytes of a region lie.
#[derive(Debug)]
enum Bytes {
    Buf(Buf),
    Adopted(Adopted),
}

impl Bytes {
    fn as_ptr(&self) -> *mut u8 {
        match self {
            Self::Buf(buf) => buf.as_ptr(),
            Self::Adopted(Adopted(bytes)) => bytes.as_ptr().cast(),
        }
    }

    fn len(&self) -> usize {
        match self {
            Self::Buf(buf) => buf.len() as usize,
            Self::Adopted(Adopted(bytes)) => bytes.len(),
        }
    }
}

/// A box that was taken apart: a `Box` would say that nobody else reaches the bytes, but the device does.
#[derive(Debug)]
struct Adopted(NonNull<[u8]>);

impl Adopted {
    fn new(bytes: Box<[u8]>) -> Self {
        Self(NonNull::from(Box::leak(bytes)))
    }

    /// The box again. Nothing may reach the bytes by another way any more.
    fn into_box(self) -> Box<[u8]> {
        let bytes = self.0;
        std::mem::forget(self);
        // SAFETY: the pointer came from a box, and `forget` left this the only owner.
        unsafe { Box::from_raw(bytes.as_ptr()) }
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // SAFETY: the pointer came from a box that nobody else owns.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

// SAFETY: the memory is reached by guarded copies alone, which any thread may do at any time.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

/// Why no region was made.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum AllocError {
    /// The memory was not allocated.
    #[error("cannot allocate {len} bytes: {source}")]
    Memory {
        /// The length that was asked for.
        len: usize,
        /// The reason.
        source: CreateError,
    },
    /// The memory was not registered.
    #[error("cannot register {len} bytes with {access:?}: {source}")]
    Register {
        /// The length that was asked for.
        len: usize,
        /// The rights that were asked for.
        access: Access,
        /// The reason.
        source: RegisterError,
    },
}

impl Region {
    /// Allocates `len` bytes, all zero, and registers them; the same as [`PdExt::alloc`](crate::PdExt::alloc).
    ///
    /// # Errors
    /// [`AllocError::Memory`] if `len` is 0 or the system has not so much; [`AllocError::Register`] for rights that do not go together:
    /// [`Access::REMOTE_WRITE`] needs [`Access::LOCAL_WRITE`].
    pub fn alloc(pd: &Pd, len: usize, access: Access) -> Result<Self, AllocError> {
        let buf = pd.alloc_buf(len as u64).map_err(|source| AllocError::Memory { len, source })?;
        let addr = buf.as_ptr() as u64;
        // SAFETY: the memory is new, and no reference to it is ever made.
        let mr = unsafe { pd.reg_buf_mr(&buf, (addr, len as u64, addr), access, None) }
            .map_err(|source| AllocError::Register { len, access, source })?;
        Ok(Self(Arc::new(Memory { mr, bytes: Bytes::Buf(buf) })))
    }

    /// Registers bytes that the program gives away; the same as [`PdExt::adopt`](crate::PdExt::adopt). They stay where they are.
    ///
    /// # Errors
    /// [`AllocError::Register`] for rights that do not go together, [`AllocError::Memory`] if there is no byte. The bytes are lost then.
    pub fn adopt(pd: &Pd, bytes: Box<[u8]>, access: Access) -> Result<Self, AllocError> {
        let len = bytes.len();
        if len == 0 {
            let source = CreateError::Invalid("length of a region");
            return Err(AllocError::Memory { len, source });
        }
        let bytes = Bytes::Adopted(Adopted::new(bytes));
        let addr = bytes.as_ptr() as u64;
        // SAFETY: `bytes` owns the range, and no reference to it is made until the registration has ended.
        let mr = unsafe { pd.reg_mr(addr, len as u64, addr, access) }
            .map_err(|source| AllocError::Register { len, access, source })?;
        Ok(Self(Arc::new(Memory { mr, bytes })))
    }

    /// Ends the registration and gives the bytes back, without a copy if they were [adopted](Self::adopt). Waits for accesses
    /// in progress. A work request that still names them completes with an error.
    ///
    /// # Errors
    /// The region itself, while a clone or a slice of it exists.
    pub fn into_bytes(self) -> Result<Box<[u8]>, Self> {
        let Memory { mr, bytes } = Arc::try_unwrap(self.0).map_err(Self)?;
        drop(mr);
        Ok(match bytes {
            Bytes::Adopted(adopted) => adopted.into_box(),
            Bytes::Buf(buf) => {
                let mut copy = vec![0; buf.len() as usize];
                // SAFETY: the registration has ended, so nothing writes the buffer, and a copy of its own has the same length.
                unsafe { ptr::copy_nonoverlapping(buf.as_ptr(), copy.as_mut_ptr(), copy.len()) };
                copy.into()
            }
        })
    }

    /// Bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.bytes.len()
    }

    /// The first byte, for code that needs an address. The device and peers may write it at any time, so make no reference of it while
    /// they may.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.bytes.as_ptr()
    }

    /// The registration.
    #[must_use]
    pub fn mr(&self) -> &Mr {
        &self.0.mr
    }

    /// A piece of it, which keeps it alive.
    ///
    /// # Panics
    /// If the range does not lie within the region, as slices do.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Slice {
        let (start, len) = within(&range, self.len());
        Slice { region: self.clone(), start, len }
    }

    /// Copies `bytes` into it, from `offset` on.
    ///
    /// # Panics
    /// If they do not fit.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.slice(offset..offset + bytes.len()).write(bytes);
    }

    /// Copies from it, from `offset` on, until `bytes` is full. Each byte is as it was at some moment of the copy.
    ///
    /// # Panics
    /// If it has not so many.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        self.slice(offset..offset + bytes.len()).read(bytes);
    }

    /// The name of a piece for a peer that READs or WRITEs it.
    ///
    /// # Panics
    /// If the range does not lie within the region.
    #[must_use]
    pub fn remote(&self, range: impl RangeBounds<usize>) -> RemoteSlice {
        self.slice(range).remote()
    }
}

/// A piece of a [`Region`]. It keeps the region alive.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use anyverbs::prelude::*;
/// # let context = Context::open(&anyverbs::devices()?[0].name)?;
/// # let pd = context.alloc_pd()?;
/// let region = pd.alloc(4096, Access::LOCAL_WRITE)?;
/// let header = region.slice(..64);
/// let word = header.slice(8..16);
/// word.write(&7u64.to_le_bytes());
/// let elements = [word.sge()]; // for a `SendWr` or a `RecvWr`
/// assert_eq!(elements[0].len, 8);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Slice {
    region: Region,
    start: usize,
    len: usize,
}

impl Slice {
    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A piece of this piece.
    ///
    /// # Panics
    /// If the range does not lie within it.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let (start, len) = within(&range, self.len);
        Self { region: self.region.clone(), start: self.start + start, len }
    }

    fn ptr(&self) -> *mut u8 {
        self.region.as_ptr().wrapping_add(self.start)
    }

    /// Its scatter/gather element. The element is numbers alone: keep the slice or the region until the request has completed.
    ///
    /// # Panics
    /// If it is 4 GiB or longer, which no element can be.
    #[must_use]
    pub fn sge(&self) -> Sge {
        let len = u32::try_from(self.len).expect("an element is shorter than 4 GiB");
        Sge { addr: self.ptr() as u64, len, lkey: self.region.mr().lkey() }
    }

    /// Copies `bytes` into it.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "the slice and the bytes have one length");
        // SAFETY: the range lies within memory that this slice keeps, and no reference to that exists. A forked child shares it.
        let copied = unsafe { copy_guarded(self.ptr(), bytes.as_ptr(), self.len) };
        copied.expect("the memory is mapped while a slice of it exists");
    }

    /// Copies it into `bytes`. Each byte is as it was at some moment of the copy.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn read(&self, bytes: &mut [u8]) {
        assert_eq!(bytes.len(), self.len, "the slice and the bytes have one length");
        // SAFETY: the range lies within memory that this slice keeps, and `bytes` is the caller's alone.
        let copied = unsafe { copy_guarded(bytes.as_mut_ptr(), self.ptr(), self.len) };
        copied.expect("the memory is mapped while a slice of it exists");
    }

    /// A copy of its bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.read(&mut bytes);
        bytes
    }

    /// Its name for a peer.
    #[must_use]
    pub fn remote(&self) -> RemoteSlice {
        RemoteSlice { va: self.ptr() as u64, len: self.len as u64, rkey: self.region.mr().rkey() }
    }
}

/// Pieces of memory that is registered, but is no [`Region`]: device memory, a dma-buf, memory of other code.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::prelude::*;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?;
/// let memory = context.alloc_dm(4096, 3)?;
/// let rights = Access::ZERO_BASED | Access::LOCAL_WRITE | Access::REMOTE_READ;
/// let mr = pd.reg_dm_mr(&memory, 0, 4096, rights)?;
/// assert_eq!(mr.sge(64..128), Sge { addr: 64, len: 64, lkey: mr.lkey() });
/// assert_eq!(mr.remote(..8).rkey, mr.rkey());
/// # Ok(())
/// # }
/// ```
pub trait MrExt {
    /// The scatter/gather element of a piece. It keeps nothing alive: keep the registration until the request has completed.
    ///
    /// # Panics
    /// If the range does not lie within the registration, or has 4 GiB or more.
    fn sge(&self, range: impl RangeBounds<usize>) -> Sge;

    /// The name of a piece for a peer that READs or WRITEs it.
    ///
    /// # Panics
    /// If the range does not lie within the registration.
    fn remote(&self, range: impl RangeBounds<usize>) -> RemoteSlice;
}

impl MrExt for Mr {
    fn sge(&self, range: impl RangeBounds<usize>) -> Sge {
        let (addr, len) = place(self, &range);
        let len = u32::try_from(len).expect("an element is shorter than 4 GiB");
        Sge { addr, len, lkey: self.lkey() }
    }

    fn remote(&self, range: impl RangeBounds<usize>) -> RemoteSlice {
        let (va, len) = place(self, &range);
        RemoteSlice { va, len: len as u64, rkey: self.rkey() }
    }
}

/// Address and length of a piece of a registration, in its own terms.
fn place(mr: &Mr, range: &impl RangeBounds<usize>) -> (u64, usize) {
    let whole = usize::try_from(mr.len()).unwrap_or(usize::MAX);
    let (start, len) = within(range, whole);
    (mr.start() + start as u64, len)
}

/// The name of memory of a peer: address, length and key. It travels as [`LEN`](Self::LEN) bytes.
///
/// ```
/// use anyverbs::RemoteSlice;
///
/// let table = RemoteSlice { va: 0x1000, len: 4096, rkey: 0x123 };
/// let same = RemoteSlice::from_bytes(table.to_bytes());
/// assert_eq!(same.slice(64..128).va, 0x1040);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteSlice {
    /// Address, in the peer's terms.
    pub va: u64,
    /// Bytes.
    pub len: u64,
    /// The peer's key.
    pub rkey: u32,
}

impl RemoteSlice {
    /// Bytes of its form on a wire: address, length, key, each with the highest byte first.
    pub const LEN: usize = 20;

    /// For the peer that is to use it.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.va.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_be_bytes());
        bytes[16..].copy_from_slice(&self.rkey.to_be_bytes());
        bytes
    }

    /// Reads the bytes that a peer sent. Every value is one: the peer's device checks address and key at each use.
    #[must_use]
    pub fn from_bytes(bytes: [u8; Self::LEN]) -> Self {
        let [word, len] = [0, 8].map(|at| {
            u64::from_be_bytes(*bytes[at..].first_chunk().expect("the array has 20 bytes"))
        });
        let rkey = u32::from_be_bytes(*bytes.last_chunk().expect("the array has 20 bytes"));
        Self { va: word, len, rkey }
    }

    /// A piece of it.
    ///
    /// # Panics
    /// If the range does not lie within it.
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let whole = usize::try_from(self.len).unwrap_or(usize::MAX);
        let (start, len) = within(&range, whole);
        Self { va: self.va.wrapping_add(start as u64), len: len as u64, rkey: self.rkey }
    }

    /// The target of a one-sided operation.
    #[must_use]
    pub fn addr(&self) -> RemoteAddr {
        RemoteAddr { va: self.va, rkey: self.rkey }
    }
}

/// Start and length of a range of something of `len` bytes.
pub(crate) fn within(range: &impl RangeBounds<usize>, len: usize) -> (usize, usize) {
    let start = match range.start_bound() {
        Bound::Included(start) => *start,
        Bound::Excluded(before) => before + 1,
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(last) => last + 1,
        Bound::Excluded(end) => *end,
        Bound::Unbounded => len,
    };
    assert!(start <= end && end <= len, "range {start}..{end} of {len} bytes");
    (start, end - start)
}

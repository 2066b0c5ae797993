//! Registered memory of the system's devices.

use std::mem::ManuallyDrop;
use std::ops::RangeBounds;
use std::ptr;
use std::sync::Arc;

use anyverbs_objects::error::{CreateError, RegisterError};
use anyverbs_objects::memory::copy_guarded;
use anyverbs_proto::mr::Access;
use anyverbs_proto::wr::Sge;

use super::abi::ibv_mr;
use super::{Domain, Raw, errno};
use crate::region::{AllocError, RemoteSlice, within};
use crate::verbs::Memory;

/// The rights that a region can have: those of the verbs. One whose addresses begin at 0 has no names for peers, which
/// [`Memory::remote`] promises.
const RIGHTS: Access = Access::VERBS.difference(Access::ZERO_BASED);

/// Registered memory of a [`Device`](super::Device), or a piece of it, which keeps all of it registered.
#[derive(Clone, Debug)]
pub struct Slice {
    region: Arc<Registered>,
    start: usize,
    len: usize,
}

#[derive(Debug)]
struct Registered {
    pd: Arc<Domain>,
    mr: Raw<ibv_mr>,
    bytes: ManuallyDrop<Bytes>,
}

/// Whole pages, which nothing else shares, and no reference to them: the device and peers may write them at any time.
#[derive(Debug)]
struct Bytes {
    start: *mut u8,
    size: usize,
}

// SAFETY: the bytes are reached by the device and by guarded copies alone, which any thread may do at any time.
unsafe impl Send for Bytes {}
// SAFETY: as above.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// At least `len` bytes, all zero; none if the system has not so much.
    fn alloc(len: usize) -> Option<Self> {
        // SAFETY: a number of the system.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).ok()?;
        let size = len.checked_next_multiple_of(page)?;
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at an address that the system chooses.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, -1, 0) };
        (start != libc::MAP_FAILED).then(|| Self { start: start.cast(), size })
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: the whole of a mapping, which is registered no more and has no other owner.
        unsafe { libc::munmap(self.start.cast(), self.size) };
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: nobody else has the registration.
        let failed = unsafe { (self.pd.device.0.library.0.ibv_dereg_mr)(self.mr.0) };
        if failed == 0 {
            // SAFETY: nothing uses the field afterwards.
            unsafe { ManuallyDrop::drop(&mut self.bytes) };
        } else {
            // The device may still write to them.
            tracing::warn!(
                errno = failed.abs(),
                bytes = self.bytes.size,
                "libibverbs did not deregister memory, so it stays allocated"
            );
        }
    }
}

impl Slice {
    pub(super) fn alloc(pd: &Arc<Domain>, len: usize, access: Access) -> Result<Self, AllocError> {
        let no_memory = |source| AllocError::Memory { len, source };
        let refused = |source| AllocError::Register { len, access, source };
        if len == 0 {
            return Err(no_memory(CreateError::Invalid("length of a region")));
        }
        let unsupported = access.difference(RIGHTS);
        if !unsupported.is_empty() {
            return Err(refused(RegisterError::Unsupported(unsupported.bits())));
        }
        if access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC)
            && !access.contains(Access::LOCAL_WRITE)
        {
            return Err(refused(RegisterError::Access));
        }
        let bytes = Bytes::alloc(len).ok_or(no_memory(CreateError::Exhausted("memory")))?;
        let library = pd.device.0.library.0;
        let start = bytes.start.cast();
        // SAFETY: a live domain; the memory outlives the registration.
        let mr = unsafe { (library.ibv_reg_mr)(pd.raw.0, start, len, access.bits() as i32) };
        if mr.is_null() {
            return Err(refused(RegisterError::System(errno())));
        }
        let bytes = ManuallyDrop::new(bytes);
        let region = Registered { pd: Arc::clone(pd), mr: Raw(mr), bytes };
        Ok(Self { region: Arc::new(region), start: 0, len })
    }

    pub(super) fn pd(&self) -> &Arc<Domain> {
        &self.region.pd
    }

    fn at(&self) -> *mut u8 {
        self.region.bytes.start.wrapping_add(self.start)
    }
}

impl Memory for Slice {
    fn len(&self) -> usize {
        self.len
    }

    fn slice(&self, range: impl RangeBounds<usize>) -> Self {
        let (start, len) = within(&range, self.len);
        Self { region: Arc::clone(&self.region), start: self.start + start, len }
    }

    fn write(&self, bytes: &[u8]) {
        assert_eq!(bytes.len(), self.len, "the slice and the bytes have one length");
        // SAFETY: the range lies within memory that this slice keeps, and no reference to that exists.
        let copied = unsafe { copy_guarded(self.at(), bytes.as_ptr(), self.len) };
        copied.expect("the memory is mapped while a slice of it exists");
    }

    fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: as above, and `bytes` is ours alone.
        let copied = unsafe { copy_guarded(bytes.as_mut_ptr(), self.at(), self.len) };
        copied.expect("the memory is mapped while a slice of it exists");
        bytes
    }

    fn sge(&self) -> Sge {
        let len = u32::try_from(self.len).expect("an element is shorter than 4 GiB");
        // SAFETY: a live registration, whose key does not change.
        let lkey = unsafe { (*self.region.mr.0).lkey };
        Sge { addr: self.at() as u64, len, lkey }
    }

    fn remote(&self) -> RemoteSlice {
        // SAFETY: a live registration, whose key does not change.
        let rkey = unsafe { (*self.region.mr.0).rkey };
        RemoteSlice { va: self.at() as u64, len: self.len as u64, rkey }
    }
}

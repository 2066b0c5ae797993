//! Registered memory of the system's devices.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ops::RangeBounds;
use std::ptr;
use std::sync::Arc;

use anyverbs_objects::error::{CreateError, RegisterError};
use anyverbs_proto::mr::Access;
use anyverbs_proto::wr::Sge;

use super::abi::ibv_mr;
use super::{Domain, Raw, errno};
use crate::region::{AllocError, RemoteSlice, within};
use crate::verbs::Memory;

/// Where memory for a device begins: nothing else shares its pages.
const PAGE: usize = 4096;

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
    bytes: Bytes,
}

/// Memory without a reference to it: the device and peers may write it at any time.
#[derive(Debug)]
struct Bytes {
    start: Raw<u8>,
    layout: Layout,
}

impl Drop for Bytes {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and registered no more.
        unsafe { dealloc(self.start.0, self.layout) };
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // SAFETY: nobody else has the registration. The bytes go afterwards.
        unsafe { (self.pd.device.0.library.0.ibv_dereg_mr)(self.mr.0) };
    }
}

impl Slice {
    pub(super) fn alloc(pd: &Arc<Domain>, len: usize, access: Access) -> Result<Self, AllocError> {
        let none = || AllocError::Memory { len, source: CreateError::Exhausted("memory") };
        let layout = Layout::from_size_align(len.max(1), PAGE).map_err(|_| none())?;
        // SAFETY: the layout has a size.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            return Err(none());
        }
        let bytes = Bytes { start: Raw(start), layout };
        let library = pd.device.0.library.0;
        // SAFETY: a live domain; the memory outlives the registration.
        let mr = unsafe { (library.ibv_reg_mr)(pd.raw.0, start.cast(), len, access.bits() as i32) };
        if mr.is_null() {
            let source = RegisterError::System(errno());
            return Err(AllocError::Register { len, access, source });
        }
        let region = Registered { pd: Arc::clone(pd), mr: Raw(mr), bytes };
        Ok(Self { region: Arc::new(region), start: 0, len })
    }

    pub(super) fn pd(&self) -> &Arc<Domain> {
        &self.region.pd
    }

    fn at(&self) -> *mut u8 {
        // SAFETY: `start` lies within the memory.
        unsafe { self.region.bytes.start.0.add(self.start) }
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
        // SAFETY: as long as the slice, and apart from it, since no reference to the memory exists.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(), self.len) };
    }

    fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        // SAFETY: as above.
        unsafe { ptr::copy_nonoverlapping(self.at(), bytes.as_mut_ptr(), self.len) };
        bytes
    }

    fn sge(&self) -> Sge {
        let len = u32::try_from(self.len).expect("an element is shorter than 4 GiB");
        // SAFETY: a live registration, whose key does not change.
        let lkey = unsafe { (*self.region.mr.0).lkey };
        Sge { addr: self.at() as u64, len, lkey }
    }

    fn remote(&self) -> RemoteSlice {
        // SAFETY: as above.
        let rkey = unsafe { (*self.region.mr.0).rkey };
        RemoteSlice { va: self.at() as u64, len: self.len as u64, rkey }
    }
}

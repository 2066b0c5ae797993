//! Registered memory of a socket, and the program's buffers: the one place that touches either.
//!
//! The peer may write a ring at any time, and a program's pointer may be wrong. So all copies are the device's guarded
//! ones, and nothing here ever makes a reference to such memory.

use std::ptr;

use anyverbs::{Access, Buf, Mr, Pd, RemoteAddr, Sge};

use crate::errno::{Errno, Result};

/// Registered memory, zero at first.
#[derive(Debug)]
pub(crate) struct Ring {
    // Dropped in this order: the region before the memory.
    mr: Mr,
    memory: Memory,
    len: usize,
}

#[derive(Debug)]
enum Memory {
    /// A file that peers on this host may map. It holds a descriptor.
    Shared(Buf),
    Private(Pages),
}

impl Memory {
    fn base(&self) -> *mut u8 {
        match self {
            Self::Shared(buf) => buf.as_ptr(),
            Self::Private(pages) => pages.base,
        }
    }
}

/// A mapping of our own.
#[derive(Debug)]
struct Pages {
    base: *mut u8,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Result<Self> {
        let (prot, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new private anonymous mapping touches no existing memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(Errno::last());
        }
        Ok(Self { base: base.cast(), len })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: our mapping, which nothing reaches any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}

// SAFETY: the memory is only reached by guarded copies through a raw pointer.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// Memory that peers reach by the device alone.
    pub(crate) fn new(pd: &Pd, len: usize, access: Access) -> Result<Self> {
        let len = len.max(1);
        Self::of(pd, Memory::Private(Pages::new(len)?), len, access)
    }

    /// Memory that peers on this host may map.
    pub(crate) fn shared(pd: &Pd, len: usize, access: Access) -> Result<Self> {
        Self::of(pd, Memory::Shared(pd.alloc_buf(len as u64)?), len, access)
    }

    fn of(pd: &Pd, memory: Memory, len: usize, access: Access) -> Result<Self> {
        let base = memory.base() as u64;
        // SAFETY: the memory is the ring's own, is never referenced, and outlives the region.
        let mr = unsafe { pd.reg_mr(base, len as u64, base, access) }?;
        Ok(Self { mr, memory, len })
    }

    /// Its beginning, as peers see it.
    pub(crate) fn remote(&self) -> RemoteAddr {
        RemoteAddr { va: self.memory.base() as u64, rkey: self.mr.rkey() }
    }

    pub(crate) fn sge(&self, at: usize, len: usize) -> Sge {
        debug_assert!(at + len <= self.len);
        let base = self.memory.base() as u64;
        Sge { addr: base + at as u64, len: len as u32, lkey: self.mr.lkey() }
    }

    fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at <= self.len && len <= self.len - at, "inside the ring");
        // SAFETY: inside the mapping.
        unsafe { self.memory.base().add(at) }
    }

    /// Copies the program's bytes into the ring.
    pub(crate) fn fill(&self, at: usize, from: &mut Cursor<'_>, len: usize) -> Result<()> {
        // SAFETY: the ring is ours to write.
        unsafe { from.copy_out(self.at(at, len), len) }
    }

    /// Copies bytes of the ring to the program.
    pub(crate) fn drain(&self, at: usize, to: &mut Cursor<'_>, len: usize) -> Result<()> {
        to.copy_in(self.at(at, len), len)
    }

    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the ring is ours to write, and stays mapped while `self` lives, so that the copy cannot fail.
        let _ = unsafe {
            anyverbs::copy_guarded(self.at(at, bytes.len()), bytes.as_ptr(), bytes.len())
        };
    }

    pub(crate) fn read<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        // SAFETY: the array is ours to write; the ring stays mapped while `self` lives.
        let _ = unsafe { anyverbs::copy_guarded(bytes.as_mut_ptr(), self.at(at, N), N) };
        bytes
    }
}

/// A walk through the program's buffers.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    rest: &'a [libc::iovec],
    /// Bytes of the first that are done.
    offset: usize,
    left: usize,
}

impl<'a> Cursor<'a> {
    /// Longest list (`UIO_MAXIOV`).
    const MAX: usize = 1024;

    /// # Safety
    /// The program lets the buffers be read, and written where they are received into, while the cursor is in use. They
    /// need not be mapped.
    pub(crate) unsafe fn new(buffers: &'a [libc::iovec]) -> Result<Self> {
        if buffers.len() > Self::MAX {
            return Err(Errno(libc::EMSGSIZE));
        }
        let left = buffers.iter().try_fold(0usize, |sum, b| sum.checked_add(b.iov_len));
        match left {
            Some(left) if isize::try_from(left).is_ok() => {
                Ok(Self { rest: buffers, offset: 0, left })
            }
            _ => Err(Errno(libc::EINVAL)),
        }
    }

    /// Bytes that are not done.
    pub(crate) fn left(&self) -> usize {
        self.left
    }

    /// The next bytes that lie together, `most` at most; none at the end.
    pub(crate) fn contiguous(&self, most: usize) -> Option<(*mut u8, usize)> {
        let mut offset = self.offset;
        for buffer in self.rest {
            let len = (buffer.iov_len - offset).min(most);
            if len > 0 {
                return Some((buffer.iov_base.cast::<u8>().wrapping_add(offset), len));
            }
            offset = 0;
        }
        None
    }

    /// `len` bytes are done.
    pub(crate) fn advance(&mut self, len: usize) {
        self.left -= len;
        self.offset += len;
        while let [first, rest @ ..] = self.rest
            && self.offset >= first.iov_len
        {
            self.offset -= first.iov_len;
            self.rest = rest;
        }
    }

    /// Copies the next `len` bytes of the program to `to`.
    ///
    /// # Safety
    /// `to` may be written.
    pub(crate) unsafe fn copy_out(&mut self, to: *mut u8, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            let (from, n) = self.contiguous(len - done).ok_or(Errno(libc::EFAULT))?;
            // SAFETY: the caller's promise; the program's side may be unmapped.
            unsafe { anyverbs::copy_guarded(to.add(done), from, n) }
                .map_err(|_| Errno(libc::EFAULT))?;
            self.advance(n);
            done += n;
        }
        Ok(())
    }

    /// Copies `len` bytes from `from`, which may be unmapped, to the program.
    pub(crate) fn copy_in(&mut self, from: *const u8, len: usize) -> Result<()> {
        let mut done = 0;
        while done < len {
            let (to, n) = self.contiguous(len - done).ok_or(Errno(libc::EFAULT))?;
            // SAFETY: the maker of the cursor vouched that the program lets its buffers be written.
            unsafe { anyverbs::copy_guarded(to, from.wrapping_add(done), n) }
                .map_err(|_| Errno(libc::EFAULT))?;
            self.advance(n);
            done += n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cursor_walks_over_all_buffers() {
        let (mut a, mut b) = ([1u8, 2, 3], [4u8, 5]);
        let iov = |b: &mut [u8]| libc::iovec { iov_base: b.as_mut_ptr().cast(), iov_len: b.len() };
        let list = [iov(&mut []), iov(&mut a), iov(&mut []), iov(&mut b)];
        // SAFETY: live buffers, unused meanwhile.
        let mut cursor = unsafe { Cursor::new(&list) }.unwrap();
        assert_eq!(cursor.left(), 5);
        let mut out = [0u8; 4];
        // SAFETY: live bytes.
        unsafe { cursor.copy_out(out.as_mut_ptr(), 4) }.unwrap();
        assert_eq!((out, cursor.left()), ([1, 2, 3, 4], 1));
        assert_eq!(cursor.contiguous(9).map(|(_, n)| n), Some(1));
        cursor.copy_in([9].as_ptr(), 1).unwrap();
        assert_eq!((b, cursor.contiguous(1)), ([4, 9], None));
        let long = vec![iov(&mut []); 1025];
        // SAFETY: empty buffers.
        assert!(unsafe { Cursor::new(&long) }.is_err());
        let huge = [libc::iovec { iov_base: ptr::null_mut(), iov_len: usize::MAX }];
        // SAFETY: never used.
        assert!(unsafe { Cursor::new(&huge) }.is_err());
    }
}

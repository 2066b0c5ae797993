//! Where the memory of queues comes from: the heap, or a program's own allocator (`ibv_alloc_parent_domain(3)`).

use std::alloc::Layout;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use allocator_api2::alloc::{AllocError, Allocator, Global};
use allocator_api2::vec::Vec;

/// The purpose of memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum Queue {
    /// The queues of a queue pair.
    Qp = 1,
    /// A completion queue.
    Cq = 2,
    /// A shared receive queue.
    Srq = 3,
    /// A work queue.
    Wq = 4,
}

/// A program's own allocator.
///
/// # Safety
/// The memory that [`lend`](Self::lend) gives has the requested size and alignment. It has no other user until it is
/// taken back, and stays mapped until then.
pub unsafe trait Lender: Send + Sync {
    /// Gives memory; `None` if there is none.
    fn lend(&self, queue: Queue, layout: Layout) -> Option<NonNull<u8>>;

    /// Takes it back.
    ///
    /// # Safety
    /// It was lent for the same queue with the same layout, and is no longer used.
    unsafe fn take_back(&self, queue: Queue, at: NonNull<u8>, layout: Layout);
}

/// The allocator of queues.
#[derive(Clone)]
pub struct QueueMemory {
    lender: Option<Arc<dyn Lender>>,
    queue: Queue,
}

impl QueueMemory {
    /// The process's heap.
    pub const HEAP: Self = Self { lender: None, queue: Queue::Qp };

    /// A program's own.
    #[must_use]
    pub fn lent(lender: Arc<dyn Lender>) -> Self {
        Self { lender: Some(lender), ..Self::HEAP }
    }

    /// The same, for this kind of queue.
    #[must_use]
    pub fn of(&self, queue: Queue) -> Self {
        Self { lender: self.lender.clone(), queue }
    }
}

impl fmt::Debug for QueueMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = if self.lender.is_some() { "lent" } else { "heap" };
        write!(f, "QueueMemory({place}, {:?})", self.queue)
    }
}

// SAFETY: both the heap and a lender keep a block where it is, valid until it is given back; clones share them.
unsafe impl Allocator for QueueMemory {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        match &self.lender {
            None => Global.allocate(layout),
            Some(lender) => {
                let at = lender.lend(self.queue, layout).ok_or(AllocError)?;
                Ok(NonNull::slice_from_raw_parts(at, layout.size()))
            }
        }
    }

    unsafe fn deallocate(&self, at: NonNull<u8>, layout: Layout) {
        match &self.lender {
            // SAFETY: the caller's promise.
            None => unsafe { Global.deallocate(at, layout) },
            // SAFETY: as above; `lend` gave it for the same queue.
            Some(lender) => unsafe { lender.take_back(self.queue, at, layout) },
        }
    }
}

/// The allocator has nothing left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no memory for a queue")
    }
}

impl std::error::Error for OutOfMemory {}

/// Elements of a queue.
pub type QueueVec<T> = Vec<T, QueueMemory>;

/// Room for `len` elements; none is there yet, and no page is touched.
///
/// # Errors
/// [`OutOfMemory`].
pub fn with_capacity<T>(len: usize, memory: &QueueMemory) -> Result<QueueVec<T>, OutOfMemory> {
    let mut vec = Vec::new_in(memory.clone());
    vec.try_reserve_exact(len).map_err(|_| OutOfMemory)?;
    Ok(vec)
}

/// `len` times the same.
///
/// # Errors
/// [`OutOfMemory`].
pub fn filled<T: Clone>(
    value: T,
    len: usize,
    memory: &QueueMemory,
) -> Result<QueueVec<T>, OutOfMemory> {
    let mut vec = with_capacity(len, memory)?;
    vec.resize(len, value);
    Ok(vec)
}

/// Bytes of zero. On the heap no page is touched.
///
/// # Errors
/// [`OutOfMemory`].
pub fn zeroed(len: usize, memory: &QueueMemory) -> Result<QueueVec<u8>, OutOfMemory> {
    if len == 0 || memory.lender.is_some() {
        return filled(0, len, memory);
    }
    let layout = Layout::array::<u8>(len).map_err(|_| OutOfMemory)?;
    let at = Global.allocate_zeroed(layout).map_err(|_| OutOfMemory)?;
    // SAFETY: `memory` is the heap, from which these `len` bytes come; zero is a value of each.
    Ok(unsafe { Vec::from_raw_parts_in(at.as_ptr().cast(), len, len, memory.clone()) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Lends from the heap, and counts.
    #[derive(Default)]
    struct Counting {
        lent: AtomicUsize,
        most: usize,
    }

    // SAFETY: as the heap does.
    unsafe impl Lender for Counting {
        fn lend(&self, queue: Queue, layout: Layout) -> Option<NonNull<u8>> {
            assert_eq!(queue, Queue::Srq);
            if self.lent.fetch_add(layout.size(), Ordering::Relaxed) + layout.size() > self.most {
                self.lent.fetch_sub(layout.size(), Ordering::Relaxed);
                return None;
            }
            Global.allocate(layout).ok().map(NonNull::cast)
        }

        unsafe fn take_back(&self, queue: Queue, at: NonNull<u8>, layout: Layout) {
            assert_eq!(queue, Queue::Srq);
            self.lent.fetch_sub(layout.size(), Ordering::Relaxed);
            // SAFETY: `lend` took it from there.
            unsafe { Global.deallocate(at, layout) };
        }
    }

    #[test]
    fn lent_memory_is_used_and_given_back() {
        let lender = Arc::new(Counting { most: 100, ..Counting::default() });
        let memory = QueueMemory::lent(lender.clone()).of(Queue::Srq);
        let vec = filled(7u64, 10, &memory).unwrap();
        assert_eq!((&vec[..], lender.lent.load(Ordering::Relaxed)), (&[7; 10][..], 80));
        assert_eq!(with_capacity::<u64>(3, &memory).err(), Some(OutOfMemory));
        let empty = with_capacity::<u64>(0, &memory).unwrap();
        drop((vec, empty));
        assert_eq!(lender.lent.load(Ordering::Relaxed), 0);
        assert_eq!(filled(1u8, 3, &QueueMemory::HEAP).unwrap().len(), 3);
        for memory in [memory, QueueMemory::HEAP] {
            assert!(zeroed(99, &memory).unwrap().iter().eq(&[0; 99]));
            assert!(zeroed(0, &memory).unwrap().is_empty());
        }
        assert_eq!(lender.lent.load(Ordering::Relaxed), 0);
    }
}

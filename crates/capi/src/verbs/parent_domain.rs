//! Thread domains and parent domains.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    collections::HashSet,
    ffi::{c_int, c_void},
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
};

use anyverbs::{Lender, Queue, QueueMemory};
use parking_lot::Mutex;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, in_use, pointer, value},
    object::{self, Object},
    verbs::{Context, Pd, PdInner, activity, context, publish_pd},
};

pub(crate) type Td = Object<ibv_td>;

/// The device's part of a thread domain.
pub(crate) struct TdInner {
    device: anyverbs::Td,
    context: Arc<Context>,
}

/// Slot of `ibv_alloc_td`: NULL with `errno` on failure.
///
/// # Safety
/// `init` is NULL or readable.
pub(crate) unsafe extern "C" fn alloc_td(
    context_: *mut ibv_context,
    init: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let init = unsafe { init.as_ref() };
    pointer(
        "ibv_alloc_td",
        context(context_).and_then(|context| {
            if init.is_none_or(|init| init.comp_mask != 0) {
                return Err(Errno::invalid("init_attr is NULL, or comp_mask is not 0"));
            }
            let device = context.inner.device.alloc_td()?;
            let public = ibv_td { context: context.pointer() };
            Ok(object::publish(public, 0, TdInner { device, context }))
        }),
    )
}

/// Slot of `ibv_dealloc_td`: 0, or the errno value; `EBUSY` while a parent domain uses it.
pub(crate) unsafe extern "C" fn dealloc_td(td: *mut ibv_td) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_dealloc_td",
        object::find(td).and_then(|td: Arc<Td>| {
            check::ending(td.public(), activity, || td.inner.device.destroy().map_err(in_use))?;
            object::retire(&td)
        }),
    )
}

/// An allocator returns this to have the default one used.
const USE_DEFAULT: usize = usize::MAX;

/// The least alignment of memory from a program's allocator, and the unit of its sizes: a cache line. `posix_memalign`,
/// which such allocators like to use, takes no alignment below the size of a pointer. Simple allocators count sizes
/// without the alignment.
const ALIGN: usize = 64;

/// A program's allocator. It is called with its own parent domain, and with a type of resource whose upper half, the
/// driver's number, is 0.
struct Allocators {
    alloc: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void,
    free: unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, u64),
    pd_context: AtomicPtr<c_void>,
    pd: AtomicPtr<ibv_pd>,
    /// The blocks that it left to the default allocator.
    by_default: Mutex<HashSet<usize>>,
}

// SAFETY: `lend` passes on the program's promise (`ibv_alloc_parent_domain(3)`), having checked the alignment, or
// memory of the system's allocator.
unsafe impl Lender for Allocators {
    fn lend(&self, queue: Queue, layout: Layout) -> Option<NonNull<u8>> {
        let (pd, context) =
            (self.pd.load(Ordering::Acquire), self.pd_context.load(Ordering::Relaxed));
        let align = layout.align().max(ALIGN);
        let size = layout.size().next_multiple_of(align);
        // SAFETY: the program's function, called as its manual page says.
        let at = unsafe { (self.alloc)(pd, context, size, align, queue as u64) };
        if at.addr() == USE_DEFAULT {
            // SAFETY: no caller asks for memory of size 0.
            let at = NonNull::new(unsafe { System.alloc_zeroed(layout) })?;
            self.by_default.lock().insert(at.addr().get());
            return Some(at);
        }
        let at = NonNull::new(at.cast::<u8>())?;
        if at.addr().get() % align != 0 {
            anyverbs::say_again!(
                warn,
                pd.addr() as u64,
                "memory of a parent domain's allocator is not aligned to {align}"
            );
            // SAFETY: as above; `alloc` has just returned it.
            unsafe { (self.free)(pd, context, at.as_ptr().cast(), queue as u64) };
            return None;
        }
        Some(at)
    }

    unsafe fn take_back(&self, queue: Queue, at: NonNull<u8>, layout: Layout) {
        if self.by_default.lock().remove(&at.addr().get()) {
            // SAFETY: `lend` took it from there, with this layout.
            return unsafe { System.dealloc(at.as_ptr(), layout) };
        }
        let (pd, context) =
            (self.pd.load(Ordering::Acquire), self.pd_context.load(Ordering::Relaxed));
        // SAFETY: the program's function, with the address that its `alloc` returned.
        unsafe { (self.free)(pd, context, at.as_ptr().cast(), queue as u64) };
    }
}

const KNOWN: u32 = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS
    | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT
    | IBV_PARENT_DOMAIN_INIT_ATTR_ALLOW_CC_UNPROTECTED_ALLOC;

/// Slot of `ibv_alloc_parent_domain`: NULL with `errno` on failure, `EINVAL` for a parent domain of a parent domain.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn alloc_parent_domain(
    context_: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer(
        "ibv_alloc_parent_domain",
        context(context_).and_then(|context| {
            let attr = attr.ok_or(Errno::NULL)?;
            let has = |bit| attr.comp_mask & bit != 0;
            if attr.comp_mask & !KNOWN != 0 {
                return Err(Errno::COMP_MASK);
            }
            let pd_context = if has(IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT) {
                attr.pd_context
            } else {
                ptr::null_mut()
            };
            let allocators = if has(IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS) {
                let (alloc, free) = attr
                    .alloc
                    .zip(attr.free)
                    .ok_or(Errno::invalid("one of alloc and free is NULL"))?;
                Some(Arc::new(Allocators {
                    alloc,
                    free,
                    pd_context: AtomicPtr::new(pd_context),
                    pd: AtomicPtr::default(),
                    by_default: Mutex::default(),
                }))
            } else {
                None
            };
            let pd: Arc<Pd> = object::find(attr.pd)?;
            let td: Option<Arc<Td>> =
                if attr.td.is_null() { None } else { Some(object::find(attr.td)?) };
            let contexts = [Some(&pd.inner.context), td.as_ref().map(|td| &td.inner.context)];
            if contexts.into_iter().flatten().any(|c| !Arc::ptr_eq(c, &context)) {
                return Err(Errno::OTHER_CONTEXT);
            }
            let memory = match &allocators {
                Some(own) => QueueMemory::lent(Arc::clone(own) as Arc<dyn Lender>),
                None => QueueMemory::HEAP,
            };
            let uses = [pd.public() as usize, attr.td as usize];
            let td = td.as_ref().map(|td| &td.inner.device);
            let device = pd.inner.device.parent_domain(td, memory)?;
            let published = publish_pd(PdInner { device, context });
            check::made_of(published, &uses);
            if let Some(allocators) = allocators {
                // Before the program can make anything on it.
                allocators.pd.store(published, Ordering::Release);
            }
            Ok(published)
        }),
    )
}

//! The objects that programs hold: the public C struct first, this library's part behind it.
//!
//! A program gets a pointer to the public struct. Control calls (`find`) look the pointer up among the live objects
//! before they touch it. So NULL, a stale pointer and one of another kind are refused. They also compare the public
//! `handle`, which programs and suites garble. They hold the object by `Arc`: a destroy in another thread does not take
//! it away from under a call. The data path (`deref`) only checks for NULL.

use std::{
    any::{Any, type_name},
    cell::UnsafeCell,
    collections::HashMap,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicU32, Ordering},
    },
    time::Duration,
};

use parking_lot::RwLock;

use anyverbs_check::Kind;
use anyverbs_sanitizers as sanitizers;

use crate::{check, errno::Errno};

/// A public C struct that leads an object.
///
/// # Safety
/// `handle` only reads through the pointer it is given.
pub(crate) unsafe trait Public: Sized + 'static {
    /// This library's part of the object.
    type Inner: Send + Sync + 'static;

    /// The public `handle` field, if C's struct has one.
    ///
    /// # Safety
    /// `this` is valid for reads.
    unsafe fn handle(this: *const Self) -> Option<u32>;
}

/// A public struct with the library's part behind it. C sees the address of `public`.
#[repr(C)]
pub(crate) struct Object<P: Public> {
    /// The program reads it, and may write it, at any time: by raw pointer only.
    public: UnsafeCell<P>,
    handle: u32,
    pub(crate) inner: P::Inner,
}

// SAFETY: `public` is only reached by raw pointer, and the memory it points to belongs to C; `inner` is Send and Sync.
unsafe impl<P: Public> Send for Object<P> {}
// SAFETY: as above.
unsafe impl<P: Public> Sync for Object<P> {}

impl<P: Public> Object<P> {
    /// The pointer that C holds. It may be used for the whole object, not for the public struct alone.
    pub(crate) fn public(&self) -> *mut P {
        ptr::from_ref(self).cast::<P>().cast_mut()
    }

    /// The number that its public `handle` was given.
    pub(crate) fn handle(&self) -> u32 {
        self.handle
    }
}

type Objects = HashMap<usize, Arc<dyn Any + Send + Sync>>;
type Live = RwLock<Objects>;

/// Every object that was created and not destroyed, by the address that C holds. A forked child gets a lock of its
/// own: threads that only the parent has may be waiting at the old one.
static LIVE: AtomicPtr<Live> = AtomicPtr::new(ptr::null_mut());

fn live() -> &'static Live {
    let live = LIVE.load(Ordering::Acquire);
    if !live.is_null() {
        // SAFETY: a leaked box.
        return unsafe { &*live };
    }
    let new = Box::into_raw(Box::<Live>::default());
    match LIVE.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            // SAFETY: the handlers are valid for the life of the process: this object is never unloaded.
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(in_child)) };
            // SAFETY: just leaked.
            unsafe { &*new }
        }
        Err(theirs) => {
            // SAFETY: `new` was never shared; `theirs` is a leaked box.
            unsafe {
                drop(Box::from_raw(new));
                &*theirs
            }
        }
    }
}

/// Keeps the table whole across the fork.
unsafe extern "C" fn before_fork() {
    std::mem::forget(live().write());
}

unsafe extern "C" fn after_fork() {
    // SAFETY: `before_fork` locked it, in this thread.
    unsafe { live().force_unlock_write() };
}

unsafe extern "C" fn in_child() {
    // SAFETY: `before_fork` holds the lock, and the child has no other thread. The old lock is never touched again.
    let objects = std::mem::take(unsafe { &mut *live().data_ptr() });
    LIVE.store(Box::into_raw(Box::new(RwLock::new(objects))), Ordering::Release);
}

/// A number for a new object's public `handle`; never 0.
pub(crate) fn new_handle() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    loop {
        let handle = NEXT.fetch_add(1, Ordering::Relaxed);
        if handle != 0 {
            return handle;
        }
    }
}

/// Gives the object to the program. `handle` must be the one in `public`, if it has one.
pub(crate) fn publish<P: Public>(public: P, handle: u32, inner: P::Inner) -> *mut P {
    let object = Arc::new(Object { public: UnsafeCell::new(public), handle, inner });
    let pointer = object.public();
    sanitizers::initialised(pointer);
    live().write().insert(pointer as usize, object);
    check::made(pointer);
    pointer
}

/// There is no object where the program says that one is.
const NOTHING: Errno = Errno::invalid("a pointer names no object, or one that was destroyed");

/// The live object behind a pointer; `EINVAL` if there is none of this kind.
pub(crate) fn lookup<P: Public>(pointer: *const P) -> Result<Arc<Object<P>>, Errno> {
    let object = live().read().get(&(pointer as usize)).cloned().ok_or(NOTHING)?;
    object
        .downcast::<Object<P>>()
        .map_err(|_| Errno::invalid("a pointer names an object of another kind"))
}

/// The same where the table of all objects may be locked for good. It is waited for no longer than this.
pub(crate) fn lookup_within<P: Public>(
    pointer: *const P,
    within: Duration,
) -> Option<Arc<Object<P>>> {
    let object = live().try_read_for(within)?.get(&(pointer as usize)).cloned()?;
    object.downcast::<Object<P>>().ok()
}

/// The live object behind a program's pointer, for a control call: `EINVAL` for a pointer that is none of this
/// kind's, `ENOENT` for a garbled handle.
pub(crate) fn find<P: Public>(pointer: *const P) -> Result<Arc<Object<P>>, Errno> {
    let object = lookup(pointer).map_err(|_| nothing(pointer))?;
    // SAFETY: the object is live and its Arc is held.
    match unsafe { P::handle(object.public()) } {
        Some(handle) if handle != object.handle => {
            Err(Errno::because(libc::ENOENT, "the program has changed the handle of an object"))
        }
        _ => Ok(object),
    }
}

/// Why there is no object behind a program's pointer.
#[cold]
fn nothing<P>(pointer: *const P) -> Errno {
    let name = type_name::<P>();
    let kind = match Kind::of_struct(name) {
        Kind::Other => name.rsplit("::").next().unwrap_or(name),
        kind => kind.name(),
    };
    let a = if kind.starts_with(['a', 'e', 'i', 'o', 'X']) { "an" } else { "a" };
    // The outer structure of a context that is NULL begins a little before that.
    if pointer.is_null() || pointer.addr() > usize::MAX - 4096 {
        return Errno::invalid_in_words(&format_args!("the pointer to {a} {kind} is NULL"));
    }
    check::uses_dead(pointer);
    Errno::invalid_in_words(&format_args!(
        "{pointer:p} is no pointer to {a} {kind}, or to one that was destroyed"
    ))
}

/// Any live object of this kind that fits. `fits` does not wait: it is called with the table of all objects locked.
pub(crate) fn any<P: Public>(fits: impl Fn(&Object<P>) -> bool) -> Option<Arc<Object<P>>> {
    let live = live().read();
    let mut of_kind = live.values().filter_map(|o| Arc::clone(o).downcast::<Object<P>>().ok());
    of_kind.find(|object| fits(object))
}

/// Takes the object from the program: its pointer is dead from here on. `EINVAL` if it was already.
pub(crate) fn retire<P: Public>(object: &Arc<Object<P>>) -> Result<(), Errno> {
    let address = object.public() as usize;
    let object = live().write().remove(&address).ok_or(NOTHING)?;
    check::keep::<P>(object);
    // After `keep`: a child that is forked when nothing is left finds its lock free.
    check::ended(address);
    Ok(())
}

/// The object behind a pointer on the data path, where only NULL is refused.
///
/// # Safety
/// `pointer` is NULL or came from `publish` and was not retired.
pub(crate) unsafe fn deref<'a, P: Public>(pointer: *const P) -> Option<&'a Object<P>> {
    // SAFETY: `public` is the first field of a `repr(C)` struct, so the addresses are the same; the caller's promise.
    unsafe { pointer.cast::<Object<P>>().as_ref() }
}

/// `Public` for structs that have a `handle` field.
macro_rules! public {
    ($($name:ident($($field:ident).+) => $inner:ty;)*) => { $(
        // SAFETY: reads one field.
        unsafe impl $crate::object::Public for $name {
            type Inner = $inner;
            unsafe fn handle(this: *const Self) -> Option<u32> {
                // SAFETY: the caller's promise.
                Some(unsafe { (&raw const (*this).$($field).+).read() })
            }
        }
    )* };
}

/// `Public` for structs without one.
macro_rules! public_without_handle {
    ($($name:ident => $inner:ty;)*) => { $(
        // SAFETY: reads nothing.
        unsafe impl $crate::object::Public for $name {
            type Inner = $inner;
            unsafe fn handle(_: *const Self) -> Option<u32> {
                None
            }
        }
    )* };
}

pub(crate) use {public, public_without_handle};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::abi::ibv_mr;

    /// A kind of object for these tests.
    #[repr(C)]
    struct Thing {
        handle: u32,
    }

    public! { Thing(handle) => (); }

    fn thing(handle: u32) -> Thing {
        Thing { handle }
    }

    #[test]
    fn a_control_call_knows_null_stale_foreign_and_garbled() {
        let handle = new_handle();
        let p = publish(thing(handle), handle, ());
        assert_eq!(find(ptr::null::<Thing>()).err(), Some(NOTHING));
        assert_eq!(find(p.cast::<ibv_mr>()).err(), Some(NOTHING));
        // SAFETY: `p` is live.
        unsafe { (*p).handle ^= 0xffff };
        assert_eq!(find(p).err(), Some(Errno::said(libc::ENOENT)));
        // SAFETY: as above.
        unsafe { (*p).handle ^= 0xffff };
        let object = find(p).unwrap();
        assert_eq!(object.public(), p);
        assert!(retire(&object).is_ok() && retire(&object).is_err());
        assert_eq!(find(p).err(), Some(NOTHING));
        // The destroyed object's memory stays while it is referenced.
        assert_eq!(object.handle, handle);
    }
}

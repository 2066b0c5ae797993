//! Reporting the outcome of a call: `errno`, and the three conventions of the manual pages.

use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, ptr};

use anyverbs_causes::Cause;

use crate::check;

/// Lines about refused calls, each said once.
const MOST: usize = 1000;

/// A positive errno value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Errno(pub(crate) c_int);

impl Errno {
    pub(crate) const EINVAL: Self = Self(libc::EINVAL);
    pub(crate) const ENOENT: Self = Self(libc::ENOENT);
    pub(crate) const ENODEV: Self = Self(libc::ENODEV);
    pub(crate) const ENOMEM: Self = Self(libc::ENOMEM);
    pub(crate) const EOPNOTSUPP: Self = Self(libc::EOPNOTSUPP);

    /// The `errno` of this thread's last C call; `EIO` if it is 0.
    pub(crate) fn last() -> Self {
        // SAFETY: as in `set`.
        match unsafe { *libc::__errno_location() } {
            0 => Self(libc::EIO),
            errno => Self(errno),
        }
    }

    /// Makes it the calling thread's `errno`.
    pub(crate) fn set(self) -> c_int {
        // SAFETY: glibc gives every thread a valid `errno` location.
        unsafe { *libc::__errno_location() = self.0 };
        self.0
    }
}

/// The hashes of lines that were said, 0 where there is room. Takes no lock, which a forked child might have inherited locked.
struct Said([AtomicU64; MOST]);

impl Said {
    /// Whether a line was not said before. A line beyond the last place counts as said.
    fn is_new(&self, line: &str) -> bool {
        let mut hasher = DefaultHasher::new();
        line.hash(&mut hasher);
        let hash = hasher.finish().max(1);
        for place in &self.0 {
            match place.compare_exchange(0, hash, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return true,
                Err(other) if other == hash => return false,
                Err(_) => {}
            }
        }
        false
    }
}

/// Says why a call was refused, for a number says little. A mistake that has a page is an error; programs try other refusals
/// out on purpose.
pub(crate) fn say(what: &str, error: &dyn fmt::Display, cause: Option<Cause>) {
    let Some(cause) = cause else { return tracing::debug!("refused: {what}{error}") };
    say_once(&format!("refused: {what}{error}; see `anyverbs explain {cause}`"));
}

/// Logs an error, unless it was logged before.
pub(crate) fn say_once(line: &str) {
    static SAID: Said = Said([const { AtomicU64::new(0) }; MOST]);
    if SAID.is_new(line) {
        tracing::error!(target: "anyverbs", "{line}");
    }
}

/// Says that an argument of a call has no such value.
#[cold]
pub(crate) fn no_value(call: &str, what: &dyn fmt::Display) -> Errno {
    say(&format!("{call}: "), what, Some(Cause::AttributeValue));
    Errno::EINVAL
}

macro_rules! with_pages {
    ($($error:ident)*) => { $(
        impl From<anyverbs::error::$error> for Errno {
            fn from(error: anyverbs::error::$error) -> Self {
                say("", &error, error.cause());
                if let Some(lacks) = error.lacks() {
                    check::refused_by_persona(lacks, &error);
                }
                Self(error.errno())
            }
        }
    )* };
}

with_pages!(CreateError RegisterError);

impl From<anyverbs::error::ModifyObjectError> for Errno {
    fn from(error: anyverbs::error::ModifyObjectError) -> Self {
        say("", &error, error.cause());
        Self(error.errno())
    }
}

/// The device's errors carry their error number.
macro_rules! from_device {
    ($($error:ident)*) => { $(
        impl From<anyverbs::error::$error> for Errno {
            fn from(error: anyverbs::error::$error) -> Self {
                tracing::debug!("refused: {error}");
                Self(error.errno())
            }
        }
    )* };
}

impl From<anyverbs::cm::CmError> for Errno {
    fn from(error: anyverbs::cm::CmError) -> Self {
        tracing::debug!("refused: {error}");
        Self(error.errno())
    }
}

from_device!(OpenError DestroyError DmError AdviseError AttachError PostError CounterError CqError EventError);

/// 0, or the errno value, which is set as well: most of libibverbs.
pub(crate) fn value(result: Result<(), Errno>) -> c_int {
    result.map_or_else(Errno::set, |()| 0)
}

/// The pointer, or NULL with `errno`: calls that create.
pub(crate) fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|e| {
        e.set();
        ptr::null_mut()
    })
}

/// The number, or -1 with `errno`: librdmacm, and the older half of libibverbs.
pub(crate) fn minus_one(result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|e| {
        e.set();
        -1
    })
}

/// Gives the program a value.
///
/// # Safety
/// `to` is writable.
pub(crate) unsafe fn give<T>(to: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { to.write(value) };
    anyverbs_sanitizers::initialised(to);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_convention_sets_errno() {
        let errno = || std::io::Error::last_os_error().raw_os_error();
        assert_eq!((value(Err(Errno::EINVAL)), errno()), (libc::EINVAL, Some(libc::EINVAL)));
        assert_eq!((minus_one(Err(Errno::ENOENT)), errno()), (-1, Some(libc::ENOENT)));
        assert!(pointer::<u8>(Err(Errno(libc::ENOMEM))).is_null());
        assert_eq!(errno(), Some(libc::ENOMEM));
        assert_eq!((value(Ok(())), minus_one(Ok(7))), (0, 7));
    }

    #[test]
    fn each_line_is_said_once_whoever_says_it() {
        let said = Said([const { AtomicU64::new(0) }; MOST]);
        let new = |n: usize| (0..n).filter(|i| said.is_new(&i.to_string())).count();
        let all: usize = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(|| new(MOST))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(all, MOST);
        assert_eq!(new(2 * MOST), 0, "there is no room for more");
    }
}

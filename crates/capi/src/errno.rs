//! Reporting the outcome of a call: `errno`, and the three conventions of the manual pages.

use std::cell::Cell;
use std::ffi::c_int;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering};
use std::{fmt, ptr};

use anyverbs_causes::{Cause, name_of_error};
use anyverbs_sanitizers::Quiet;

use crate::check;

/// Lines about refused calls, each said once.
const MOST: usize = 1000;

/// A positive errno value, and why a call returns it. There is none without a reason, unless it is [said](Errno::said) elsewhere.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Errno(pub(crate) c_int, Why);

/// The reason for which a call is refused. The call's name is known where its result is made, so it is said there.
#[derive(Clone, Copy, Debug)]
enum Why {
    /// It was said, or the number says all.
    Said,
    Text(&'static str),
    /// The words that [`WORDS`] holds.
    Words,
}

thread_local! {
    /// A reason with values, and its cause. It belongs to the last [`Errno`] of the thread that has words.
    static WORDS: Cell<Option<(String, Option<Cause>)>> = const { Cell::new(None) };
}

/// Makes this thread's [`WORDS`], whose destructor the C library notes.
pub(crate) fn prepare() {
    let _ = WORDS.try_with(|_| ());
}

/// Reasons are for people: numbers are compared.
impl PartialEq for Errno {
    fn eq(&self, other: &Self) -> bool {
        self.0 == other.0
    }
}

impl Eq for Errno {}

impl Errno {
    /// An argument is NULL.
    pub(crate) const NULL: Self = Self::invalid("an argument that the call needs is NULL");
    /// Two objects do not go together.
    pub(crate) const OTHER_CONTEXT: Self =
        Self::invalid("an object that is named belongs to another context");
    /// `comp_mask` is wrong.
    pub(crate) const COMP_MASK: Self = Self::invalid("comp_mask has a bit that is not known here");

    /// `EINVAL` for this reason: a clause without its full stop.
    pub(crate) const fn invalid(why: &'static str) -> Self {
        Self::because(libc::EINVAL, why)
    }

    /// This number for this reason: a clause without its full stop.
    pub(crate) const fn because(number: c_int, why: &'static str) -> Self {
        Self(number, Why::Text(why))
    }

    /// `EOPNOTSUPP`, for what the device does not have. Programs try that out, so the log says it at the level `debug` alone.
    pub(crate) const fn lacks(why: &'static str) -> Self {
        Self::because(libc::EOPNOTSUPP, why)
    }

    /// This number, whose reason was said already, or which says all.
    pub(crate) const fn said(number: c_int) -> Self {
        Self(number, Why::Said)
    }

    /// This number for a reason that has values.
    #[cold]
    fn in_words(number: c_int, why: &dyn fmt::Display, cause: Option<Cause>) -> Self {
        // A thread that ends has none any more.
        let kept = WORDS.try_with(|words| words.set(Some((why.to_string(), cause))));
        Self(number, if kept.is_ok() { Why::Words } else { Why::Said })
    }

    /// `EINVAL` for a reason that has values: a clause without its full stop.
    #[cold]
    pub(crate) fn invalid_in_words(why: &dyn fmt::Display) -> Self {
        Self::in_words(libc::EINVAL, why, None)
    }

    /// The `errno` of this thread's last C call; `EIO` if it is 0.
    pub(crate) fn last() -> Self {
        // SAFETY: as in `set`.
        match unsafe { *libc::__errno_location() } {
            0 => Self::said(libc::EIO),
            errno => Self::said(errno),
        }
    }

    /// The reason, if it has still to be said.
    pub(crate) fn reason(self) -> Option<(String, Option<Cause>)> {
        match self.1 {
            Why::Said => None,
            Why::Text(why) => Some((why.to_owned(), None)),
            Why::Words => WORDS.try_with(Cell::take).ok().flatten(),
        }
    }

    /// As [`refuse`](Self::refuse), where the number is set later.
    #[cold]
    pub(crate) fn explained(self, call: &dyn fmt::Display) -> Self {
        Self::said(self.refuse(&call.to_string()))
    }

    /// As [`set`](Self::set), once the log says why this call is refused. No queue is locked.
    #[cold]
    pub(crate) fn refuse(self, call: &str) -> c_int {
        // Not all calls are quiet until here.
        let _quiet = Quiet::new();
        if let Some((why, cause)) = self.reason() {
            let page = match cause {
                Some(cause) => cause.to_string(),
                None => name_of_error(self.0).unwrap_or("EINVAL").to_owned(),
            };
            if cause.is_none() && is_tried(self.0) {
                tracing::debug!("refused: {call}: {why}");
            } else {
                say_once(&format!("refused: {call}: {why}; see `anyverbs explain {page}`"));
            }
        }
        self.set()
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

/// Whether programs get this number on purpose: they ask what a device has, whether something is there yet, or which of a host's
/// addresses is a device's.
pub(crate) fn is_tried(number: c_int) -> bool {
    matches!(
        number,
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENODATA | libc::EAGAIN | libc::EINTR | libc::ENODEV
    )
}

/// Says why a call was refused, for a number says little. A mistake that has a page is an error; programs try other refusals
/// out on purpose.
pub(crate) fn say(what: &str, error: &dyn fmt::Display, cause: Option<Cause>) {
    let Some(cause) = cause else { return tracing::debug!("refused: {what}{error}") };
    say_once(&format!("refused: {what}{error}; see `anyverbs explain {cause}`"));
}

/// Logs an error, unless it was logged before.
pub(crate) fn say_once(line: &str) {
    if is_new(line) {
        tracing::error!(target: "anyverbs", "{line}");
    }
}

/// Whether this line was not said before, or what stands for it.
fn is_new(line: &str) -> bool {
    static SAID: Said = Said([const { AtomicU64::new(0) }; MOST]);
    SAID.is_new(line)
}

/// `EINVAL`: an argument has no such value.
#[cold]
pub(crate) fn no_value(what: &dyn fmt::Display) -> Errno {
    Errno::in_words(libc::EINVAL, what, Some(Cause::AttributeValue))
}

impl From<anyverbs::error::CreateError> for Errno {
    #[cold]
    fn from(error: anyverbs::error::CreateError) -> Self {
        use anyverbs::error::CreateError as E;
        if let Some(lacks) = error.lacks() {
            check::refused_by_persona(lacks, &error);
        }
        match error {
            // Libraries find the largest by trying: the first refusal of a device is said.
            E::Limit { what: what @ "max_inline_data", ref of, .. }
            | E::PersonaLimit { what: what @ "max_inline_data", ref of, .. } => {
                let device = of.as_ref().map_or("", |of| &of.device);
                if !is_new(&format!("{what} of device {device}")) {
                    tracing::debug!("refused: {error}");
                    return Self::said(error.errno());
                }
                Self::in_words(error.errno(), &error, Some(Cause::Limit))
            }
            _ => Self::in_words(error.errno(), &error, error.cause()),
        }
    }
}

impl From<anyverbs::error::RegisterError> for Errno {
    #[cold]
    fn from(error: anyverbs::error::RegisterError) -> Self {
        if let Some(lacks) = error.lacks() {
            check::refused_by_persona(lacks, &error);
        }
        Self::in_words(error.errno(), &error, error.cause())
    }
}

/// The device's errors carry their error number.
macro_rules! from_device {
    ($($error:ident: $cause:expr;)*) => { $(
        impl From<anyverbs::error::$error> for Errno {
            #[cold]
            fn from(error: anyverbs::error::$error) -> Self {
                let cause: fn(&anyverbs::error::$error) -> Option<Cause> = $cause;
                Self::in_words(error.errno(), &error, cause(&error))
            }
        }
    )* };
}

from_device! {
    ModifyObjectError: |error| error.cause();
    DmError: |_| None;
    AdviseError: |_| None;
    AttachError: |_| None;
    CounterError: |_| None;
    EventError: |_| None;
}

impl From<anyverbs::error::PostError> for Errno {
    #[cold]
    fn from(error: anyverbs::error::PostError) -> Self {
        // A program may post until the queue is full.
        if error.errno() == libc::ENOMEM {
            return Self::said(libc::ENOMEM);
        }
        Self::in_words(error.errno(), &error, error.cause())
    }
}

impl From<anyverbs::error::OpenError> for Errno {
    #[cold]
    fn from(error: anyverbs::error::OpenError) -> Self {
        Self::in_words(error.errno(), &error, None)
    }
}

impl From<anyverbs::error::DestroyError> for Errno {
    #[cold]
    fn from(error: anyverbs::error::DestroyError) -> Self {
        match error {
            // The device says who they are.
            anyverbs::error::DestroyError::Busy(_) => Self::said(error.errno()),
            _ => Self::in_words(error.errno(), &error, None),
        }
    }
}

/// As the conversion, for objects of which the device does not say who uses them.
#[cold]
pub(crate) fn in_use(error: anyverbs::error::DestroyError) -> Errno {
    Errno::in_words(error.errno(), &error, Some(Cause::InUse))
}

impl From<anyverbs::error::CqError> for Errno {
    #[cold]
    fn from(error: anyverbs::error::CqError) -> Self {
        match error {
            // The device says it when it happens.
            anyverbs::error::CqError::Overrun => Self::said(error.errno()),
            _ => Self::in_words(error.errno(), &error, None),
        }
    }
}

impl From<anyverbs::cm::CmError> for Errno {
    #[cold]
    fn from(error: anyverbs::cm::CmError) -> Self {
        Self::in_words(error.errno(), &error, None)
    }
}

/// 0, or the errno value, which is set as well: most of libibverbs.
pub(crate) fn value(call: &str, result: Result<(), Errno>) -> c_int {
    result.map_or_else(|e| e.refuse(call), |()| 0)
}

/// The pointer, or NULL with `errno`: calls that create.
pub(crate) fn pointer<T>(call: &str, result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|e| {
        e.refuse(call);
        ptr::null_mut()
    })
}

/// The number, or -1 with `errno`: librdmacm, and the older half of libibverbs.
pub(crate) fn minus_one(call: &str, result: Result<c_int, Errno>) -> c_int {
    result.unwrap_or_else(|e| {
        e.refuse(call);
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
        let refused = |number| Errno::because(number, "a test asks for it");
        let said = value("f", Err(refused(libc::EINVAL)));
        assert_eq!((said, errno()), (libc::EINVAL, Some(libc::EINVAL)));
        assert_eq!((minus_one("f", Err(refused(libc::ENOENT))), errno()), (-1, Some(libc::ENOENT)));
        assert!(pointer::<u8>("f", Err(refused(libc::ENOMEM))).is_null());
        assert_eq!(errno(), Some(libc::ENOMEM));
        assert_eq!((value("f", Ok(())), minus_one("f", Ok(7))), (0, 7));
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

//! The reasons why calls fail: error numbers, as sockets have them.

use std::fmt;
use std::io;

/// An error number (`errno(3)`).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub i32);

impl Errno {
    /// The `errno` of the libc call that just failed.
    pub(crate) fn last() -> Self {
        io::Error::last_os_error().into()
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Errno({}: {})", self.0, io::Error::from_raw_os_error(self.0))
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for Errno {}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

/// The device makes no object for a socket. The program sees a number, which does not say what the device lacks.
macro_rules! from_refusal {
    ($($error:path)*) => { $(
        impl From<$error> for Errno {
            fn from(error: $error) -> Self {
                let number = error.errno();
                anyverbs::say_again!(error, number.unsigned_abs().into(), "rsocket: {error}");
                Self(number)
            }
        }
    )* };
}

from_refusal! {
    anyverbs::error::CreateError
    anyverbs::error::RegisterError
}

/// The device's errors carry their numbers; their text goes to the log.
macro_rules! from_device {
    ($($error:path)*) => { $(
        impl From<$error> for Errno {
            fn from(error: $error) -> Self {
                tracing::debug!("refused: {error}");
                Self(error.errno())
            }
        }
    )* };
}

from_device! {
    anyverbs::error::OpenError
    anyverbs::error::DestroyError
    anyverbs::error::ModifyObjectError
    anyverbs::error::PostError
    anyverbs::error::CqError
    anyverbs::error::EventError
    anyverbs::cm::CmError
}

/// A call's result.
pub type Result<T> = std::result::Result<T, Errno>;

//! The reasons why calls fail: error numbers, as sockets have them.

use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::io;

use anyverbs::error::{CreateError, RegisterError};

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

/// Stands for a text. Refusals with one error number may have several.
fn hash_of(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// The device makes no object for a socket. The program sees a number, which does not say what the device lacks.
macro_rules! say_refusal {
    ($error:ident) => {{
        let text = $error.to_string();
        anyverbs::say_again!(error, hash_of(&text), "rsocket: {text}")
    }};
}

impl From<CreateError> for Errno {
    fn from(error: CreateError) -> Self {
        say_refusal!(error);
        match error {
            // `EINVAL` would blame the call of the program, which knows no sizes of the device.
            CreateError::Limit { .. } | CreateError::PersonaLimit { .. } => Self(libc::ENOMEM),
            _ => Self(error.errno()),
        }
    }
}

impl From<RegisterError> for Errno {
    fn from(error: RegisterError) -> Self {
        say_refusal!(error);
        Self(error.errno())
    }
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use anyverbs::error::CreateError;
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    /// Counts lines.
    struct Log(Arc<AtomicU32>);

    impl Subscriber for Log {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }
        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }
        fn record(&self, _: &Id, _: &Record<'_>) {}
        fn record_follows_from(&self, _: &Id, _: &Id) {}
        fn event(&self, _: &Event<'_>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
        fn enter(&self, _: &Id) {}
        fn exit(&self, _: &Id) {}
    }

    #[test]
    fn each_refusal_is_said_though_the_numbers_are_the_same() {
        let said = Arc::new(AtomicU32::new(0));
        tracing::subscriber::with_default(Log(Arc::clone(&said)), || {
            for (what, lines) in [("a", 1), ("b", 2), ("a", 2)] {
                assert_eq!(Errno::from(CreateError::Invalid(what)), Errno(libc::EINVAL));
                assert_eq!(said.load(Ordering::SeqCst), lines, "{what}");
            }
        });
    }
}

//! Why calls on ids fail.

use thiserror::Error;

/// Why a call was refused; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CmError {
    /// `EINVAL`: a value out of range, or not possible in the present state; the text says which.
    #[error("invalid: {0}")]
    Invalid(&'static str),
    /// `EADDRINUSE`.
    #[error("address in use")]
    InUse,
    /// `EADDRNOTAVAIL`: in use, and either is a wildcard; or no port is left.
    #[error("address not available")]
    NotAvailable,
    /// `EADDRNOTAVAIL`, `ENODEV`: not an address of this device.
    #[error("no device has this address")]
    NoDevice,
    /// `ENETUNREACH`, `EHOSTUNREACH`: no route.
    #[error("the destination cannot be reached")]
    Unreachable,
    /// `ENOMEM`.
    #[error("too many {0}")]
    Exhausted(&'static str),
    /// `EOPNOTSUPP` (`ENOSYS` where the manual page says so).
    #[error("not supported: {0}")]
    Unsupported(&'static str),
    /// `EIO`: inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
    /// The errno of a failed system call.
    #[error("{what}: errno {errno}")]
    System {
        /// The action that failed.
        what: &'static str,
        /// Why it was refused.
        errno: i32,
    },
}

impl From<anyverbs_proto::cm::CmError> for CmError {
    fn from(error: anyverbs_proto::cm::CmError) -> Self {
        use anyverbs_proto::cm::CmError as E;
        match error {
            E::InUse => Self::InUse,
            E::Full => Self::Exhausted("connections"),
            E::State | E::UnknownId => {
                Self::Invalid("not possible in the present state of the connection")
            }
            E::PrivateDataTooLong => Self::Invalid("too much private data"),
            _ => Self::Invalid("a value is out of range"),
        }
    }
}

impl CmError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Invalid(_) => libc::EINVAL,
            Self::InUse => libc::EADDRINUSE,
            Self::NotAvailable => libc::EADDRNOTAVAIL,
            Self::NoDevice => libc::ENODEV,
            Self::Unreachable => libc::ENETUNREACH,
            Self::Exhausted(_) => libc::ENOMEM,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::Forked => libc::EIO,
            Self::System { errno, .. } => *errno,
        }
    }
}

//! Why calls on ids fail.

use thiserror::Error;

/// Why a call was refused; nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CmError {
    /// `EINVAL`: a value out of range, or not possible in the present state; the text says which.
    #[error("invalid: {0}")]
    Invalid(&'static str),
    /// `EINVAL`: more private data than the message has room for.
    #[error("{len} bytes of private data, and the message has room for {room}")]
    TooLong {
        /// Bytes.
        len: usize,
        /// The most.
        room: usize,
    },
    /// `EADDRINUSE`: another id holds this port at the address.
    #[error("port {0} is taken: another id holds it")]
    InUse(u16),
    /// `EADDRNOTAVAIL`: another id holds this port, and one of the two is for all addresses.
    #[error("port {0} is taken: another id holds it, and one of the two is bound to all addresses")]
    NotAvailable(u16),
    /// `EADDRINUSE`: an id listens there already, or has the connection.
    #[error("another id listens there already, or has this connection")]
    Twice,
    /// `EADDRNOTAVAIL`.
    #[error("all ports that the system gives out are taken")]
    NoPort,
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
    #[error("{what}: {}", std::io::Error::from_raw_os_error(*.errno))]
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
            E::InUse => Self::Twice,
            E::Full => Self::Exhausted("connections"),
            E::State | E::UnknownId => {
                Self::Invalid("not possible in the present state of the connection")
            }
            E::PrivateDataTooLong { len, room } => Self::TooLong { len, room },
            _ => Self::Invalid("a value is out of range"),
        }
    }
}

impl CmError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Invalid(_) | Self::TooLong { .. } => libc::EINVAL,
            Self::InUse(_) | Self::Twice => libc::EADDRINUSE,
            Self::NotAvailable(_) | Self::NoPort => libc::EADDRNOTAVAIL,
            Self::NoDevice => libc::ENODEV,
            Self::Unreachable => libc::ENETUNREACH,
            Self::Exhausted(_) => libc::ENOMEM,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::Forked => libc::EIO,
            Self::System { errno, .. } => *errno,
        }
    }
}

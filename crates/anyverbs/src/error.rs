//! Why calls fail, and the errno that the C ABI answers with.

use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::qp::attr::ModifyError;
use anyverbs_proto::recv_queue::PostRecvError;
use thiserror::Error;

use crate::config::ConfigError;

/// Why there is no device, or it could not be opened. `Display` is one clear line.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A variable or the configuration file does not parse.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The UDP port could not be had.
    #[error(transparent)]
    Port(#[from] anyverbs_net::OpenError),
    /// All process slots of the host are taken, or the registry cannot be reached.
    #[error("cannot take a process slot of this host: {0}")]
    Slot(std::io::Error),
    /// No interface is up, not even the loopback.
    #[error("no network interface is up; bring one up, for instance `ip link set lo up`")]
    NoInterface,
    /// No device of that name.
    #[error("there is no device {0:?}")]
    NoSuchDevice(String),
    /// The system refused a descriptor, a thread or memory.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Why an object could not be made or asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CreateError {
    /// `EINVAL`: a value out of range; the text says which.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// `ENOMEM`: the device holds no more of these.
    #[error("the device holds no more {0}")]
    Exhausted(&'static str),
    /// `EOPNOTSUPP`.
    #[error("this device does not support {0}")]
    Unsupported(&'static str),
    /// `EINVAL`: an object of another context, or one that is already destroyed.
    #[error("the {0} is not of this context, or was destroyed")]
    Foreign(&'static str),
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
    /// `EIO`: the device could not be started again in a forked child.
    #[error("the device could not be opened: {0}")]
    Device(String),
    /// `EMFILE` and its like: the system refused a descriptor.
    #[error("the system refused a descriptor: errno {0}")]
    System(i32),
}

/// Why memory could not be registered, or a registration changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// `EINVAL`: remote write or atomic access needs local write access.
    #[error("remote write and atomic access need local write access")]
    Access,
    /// `EOPNOTSUPP`: access flags that this device does not have.
    #[error("access flags {0:#x} are not supported")]
    Unsupported(u32),
    /// `EINVAL`: the range wraps around the end of the address space.
    #[error("the range wraps around")]
    Range,
    /// `EFAULT`: part of the range is not mapped.
    #[error("part of the range is not mapped")]
    NotMapped,
    /// `ENOMEM`: the device holds no more regions.
    #[error("the device holds no more memory regions")]
    Exhausted,
    /// `EINVAL`: an object of another context, or one that is already destroyed.
    #[error("the {0} is not of this context, or was destroyed")]
    Foreign(&'static str),
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
}

/// Why an object was not destroyed. It stays usable.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DestroyError {
    /// `EBUSY`: others use it; the text names them.
    #[error("in use by {0}")]
    Busy(String),
    /// `EINVAL`: it was destroyed before.
    #[error("already destroyed")]
    Gone,
}

/// Why a queue pair, CQ or SRQ was not modified; nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ModifyObjectError {
    /// The queue pair's rules.
    #[error(transparent)]
    Qp(#[from] ModifyError),
    /// `EINVAL`: a value out of range; the text says which.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// `EINVAL`: what the object holds does not fit.
    #[error("what the queue holds does not fit")]
    DoesNotFit,
    /// `EINVAL`: it was destroyed before.
    #[error("already destroyed")]
    Gone,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
}

/// Why a work request was not posted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PostError {
    /// The send queue refused it.
    #[error(transparent)]
    Send(#[from] PostSendError),
    /// The receive queue refused it.
    #[error(transparent)]
    Recv(#[from] PostRecvError),
    /// `EINVAL`: the object was destroyed.
    #[error("already destroyed")]
    Gone,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
}

/// Why no completions were polled or asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CqError {
    /// `EIO`: the queue overran.
    #[error("the completion queue has overrun")]
    Overrun,
    /// `EINVAL`: notification without a completion channel.
    #[error("the completion queue has no channel")]
    NoChannel,
    /// `EINVAL`: it was destroyed.
    #[error("already destroyed")]
    Gone,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
}

/// Why no event was read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum EventError {
    /// `EAGAIN`: none waits, and the program set `O_NONBLOCK`.
    #[error("no event waits")]
    WouldBlock,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
    /// Reading the descriptor failed (`EINTR` too).
    #[error("reading the event descriptor: {0}")]
    Io(std::io::Error),
}

impl OpenError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Config(_) => libc::EINVAL,
            Self::Port(_) => libc::EADDRINUSE,
            Self::Slot(source) | Self::System { source, .. } => {
                source.raw_os_error().unwrap_or(libc::EIO)
            }
            Self::NoInterface => libc::ENETDOWN,
            Self::NoSuchDevice(_) => libc::ENODEV,
        }
    }
}

impl CreateError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Invalid(_) | Self::Foreign(_) => libc::EINVAL,
            Self::Exhausted(_) => libc::ENOMEM,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::Forked | Self::Device(_) => libc::EIO,
            Self::System(errno) => *errno,
        }
    }
}

impl RegisterError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Access | Self::Range | Self::Foreign(_) => libc::EINVAL,
            Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::NotMapped => libc::EFAULT,
            Self::Exhausted => libc::ENOMEM,
            Self::Forked => libc::EIO,
        }
    }
}

impl DestroyError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Busy(_) => libc::EBUSY,
            Self::Gone => libc::EINVAL,
        }
    }
}

impl ModifyObjectError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Qp(ModifyError::Unsupported(_)) => libc::EOPNOTSUPP,
            Self::Qp(_) | Self::Invalid(_) | Self::DoesNotFit | Self::Gone => libc::EINVAL,
            Self::Forked => libc::EIO,
        }
    }
}

impl PostError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Send(PostSendError::Full) | Self::Recv(PostRecvError::Full) => libc::ENOMEM,
            Self::Send(PostSendError::Fault) => libc::EFAULT,
            Self::Send(_) | Self::Recv(_) | Self::Gone => libc::EINVAL,
            Self::Forked => libc::EIO,
        }
    }
}

impl CqError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NoChannel | Self::Gone => libc::EINVAL,
            Self::Overrun | Self::Forked => libc::EIO,
        }
    }
}

impl EventError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::WouldBlock => libc::EAGAIN,
            Self::Forked => libc::EIO,
            Self::Io(source) => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

//! Error numbers of C for the errors of this room, in one table. The C library and sockets give them to their programs, and the
//! processes that share a target tell them each other. Nothing below decides by them.

use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::qp::attr::ModifyError;
use anyverbs_proto::raw::esp::EspError;
use anyverbs_proto::recv_queue::PostRecvError;
use anyverbs_proto::tag_list::TagError;

use crate::error::{
    AdviseError, AttachError, CounterError, CqError, CreateError, DestroyError, DmError,
    EventError, ModifyObjectError, OpenError, PostError, RegisterError,
};

/// An error number of C, which another process told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub i32);

fn esp_errno(error: EspError) -> i32 {
    if error.is_unsupported() { libc::EOPNOTSUPP } else { libc::EINVAL }
}

impl OpenError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Config(_) | Self::NotCommand => libc::EINVAL,
            Self::Port(_) => libc::EADDRINUSE,
            Self::Slot(source) | Self::System { source, .. } => {
                source.raw_os_error().unwrap_or(libc::EIO)
            }
            Self::NoInterface | Self::Interfaces(_) => libc::ENETDOWN,
            Self::NoSuchDevice(_) => libc::ENODEV,
            Self::Failed => libc::EIO,
        }
    }
}

impl CreateError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Invalid(_)
            | Self::Limit { .. }
            | Self::OutOfRange { .. }
            | Self::NoGid { .. }
            | Self::PersonaLimit { .. }
            | Self::Foreign(_)
            | Self::XrcDomainExists
            | Self::Flow(_)
            | Self::Hash(_) => libc::EINVAL,
            Self::NotPermitted => libc::EPERM,
            Self::NoXrcDomain => libc::EAGAIN,
            Self::Full(_) | Self::Exhausted(_) => libc::ENOMEM,
            Self::Unsupported(_) | Self::Persona { .. } | Self::NoTraffic { .. } => {
                libc::EOPNOTSUPP
            }
            Self::Esp(error) => esp_errno(*error),
            Self::Forked | Self::Failed | Self::Device(_) => libc::EIO,
            Self::System(errno) | Self::Unreachable { errno, .. } => *errno,
        }
    }
}

impl RegisterError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Access | Self::Range | Self::Invalid(_) | Self::Foreign(_) => libc::EINVAL,
            Self::Unsupported(_) | Self::Persona { .. } => libc::EOPNOTSUPP,
            Self::NotMapped(_) | Self::Protected(_) => libc::EFAULT,
            Self::Bound => libc::EBUSY,
            Self::System(errno) => *errno,
            Self::Full(_) | Self::Exhausted => libc::ENOMEM,
            Self::Forked | Self::Failed => libc::EIO,
        }
    }
}

impl DmError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Range => libc::EINVAL,
            Self::Fault => libc::EFAULT,
            Self::Export(errno) => *errno,
        }
    }
}

impl AdviseError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Range => libc::EFAULT,
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
            Self::NotPermitted => libc::EPERM,
            Self::Qp(ModifyError::Unsupported(_)) | Self::Unsupported(_) => libc::EOPNOTSUPP,
            Self::Qp(_)
            | Self::Invalid(_)
            | Self::OutOfRange { .. }
            | Self::Limit { .. }
            | Self::DoesNotFit
            | Self::Gone => libc::EINVAL,
            Self::Esp(error) => esp_errno(*error),
            Self::Forked | Self::Failed => libc::EIO,
            Self::Elsewhere(errno) | Self::System(errno) => *errno,
        }
    }
}

impl AttachError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NotDatagram | Self::NotGroup | Self::NotAttached | Self::Gone => libc::EINVAL,
            Self::Foreign(_) | Self::NoOperation | Self::TooLate => libc::EINVAL,
            Self::Counted => libc::EBUSY,
            Self::Full(_) => libc::ENOMEM,
            Self::Join(source) => source.raw_os_error().unwrap_or(libc::EIO),
            Self::Forked => libc::EIO,
        }
    }
}

impl PostError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Send(PostSendError::Full)
            | Self::Recv(PostRecvError::Full)
            | Self::Tag(TagError::Full) => libc::ENOMEM,
            Self::Send(PostSendError::Fault) => libc::EFAULT,
            Self::Send(_)
            | Self::Recv(_)
            | Self::Tag(_)
            | Self::NoTags
            | Self::Bind
            | Self::Foreign
            | Self::ElementsOfRead { .. }
            | Self::Longer { .. }
            | Self::Gone => libc::EINVAL,
            Self::Forked => libc::EIO,
            Self::System(errno) => *errno,
        }
    }
}

impl CounterError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Invalid(_) => libc::EINVAL,
            Self::Bound => libc::EBUSY,
        }
    }
}

impl CqError {
    /// The error number of the C ABI.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NoChannel | Self::Foreign | Self::Gone => libc::EINVAL,
            Self::Overrun | Self::Forked => libc::EIO,
            Self::System(errno) => *errno,
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

#[cfg(test)]
mod tests {
    use anyverbs_proto::qp::attr::{QpAttrMask, QpState};
    use anyverbs_proto::raw::flow::FlowError;
    use anyverbs_proto::raw::rss::HashError;

    use super::*;
    use crate::config::ConfigError;
    use crate::features::Feature;

    #[test]
    fn every_error_has_the_errno_of_its_manual_page() {
        use libc::{
            EADDRINUSE, EAGAIN, EBUSY, EFAULT, EINTR, EINVAL, EIO, EMFILE, ENETDOWN, ENODEV,
            ENOMEM, EOPNOTSUPP,
        };
        let io = std::io::Error::from_raw_os_error;
        let config = ConfigError::Value {
            variable: String::new(),
            value: String::new(),
            expected: String::new(),
        };
        let system = |e| OpenError::System { what: "", source: io(e) };
        for (error, errno) in [
            (OpenError::Config(config), EINVAL),
            (OpenError::Port(anyverbs_net::OpenError::NotShared { port: 1 }), EADDRINUSE),
            (OpenError::Slot(io(EADDRINUSE)), EADDRINUSE),
            (OpenError::NoInterface, ENETDOWN),
            (OpenError::NotCommand, EINVAL),
            (OpenError::NoSuchDevice(String::new()), ENODEV),
            (OpenError::Failed, EIO),
            (system(EMFILE), EMFILE),
            (OpenError::System { what: "", source: std::io::ErrorKind::Other.into() }, EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        let full = crate::error::Full { device: None, what: "", limit: "", max: 1 };
        for (error, errno) in [
            (CreateError::Invalid(""), EINVAL),
            (CreateError::Limit { what: "", value: 2, limit: 1, of: None }, EINVAL),
            (
                CreateError::PersonaLimit {
                    persona: String::new(),
                    what: "",
                    value: 2,
                    limit: 1,
                    of: None,
                },
                EINVAL,
            ),
            (CreateError::OutOfRange { what: "", value: 2, least: 0, most: 1 }, EINVAL),
            (CreateError::NoGid { port: 1, index: 2, last: Some(1), taken_by: None }, EINVAL),
            (CreateError::Full(full), ENOMEM),
            (CreateError::Exhausted(""), ENOMEM),
            (CreateError::Unsupported(""), EOPNOTSUPP),
            (CreateError::Persona { persona: String::new(), lacks: Feature::Srq }, EOPNOTSUPP),
            (CreateError::NoTraffic { persona: String::new(), what: String::new() }, EOPNOTSUPP),
            (CreateError::Foreign(""), EINVAL),
            (CreateError::NoXrcDomain, EAGAIN),
            (CreateError::XrcDomainExists, EINVAL),
            (CreateError::Forked, EIO),
            (CreateError::Failed, EIO),
            (CreateError::Device(String::new()), EIO),
            (CreateError::System(EMFILE), EMFILE),
            (CreateError::NotPermitted, libc::EPERM),
            (CreateError::Flow(FlowError::Twice), EINVAL),
            (CreateError::Hash(HashError::KeyLen), EINVAL),
            (CreateError::Esp(EspError::KeyLen), EINVAL),
            (CreateError::Esp(EspError::InlineTransport), EOPNOTSUPP),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        for (error, errno) in [
            (RegisterError::Access, EINVAL),
            (RegisterError::Unsupported(1), EOPNOTSUPP),
            (RegisterError::Persona { persona: "", lacks: Feature::Odp }, EOPNOTSUPP),
            (RegisterError::Range, EINVAL),
            (RegisterError::NotMapped(0), EFAULT),
            (RegisterError::Protected(0), EFAULT),
            (RegisterError::Invalid(""), EINVAL),
            (RegisterError::Bound, EBUSY),
            (RegisterError::System(EMFILE), EMFILE),
            (RegisterError::Full(full), ENOMEM),
            (RegisterError::Exhausted, ENOMEM),
            (RegisterError::Foreign(""), EINVAL),
            (RegisterError::Forked, EIO),
            (RegisterError::Failed, EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        assert_eq!(DestroyError::Busy(String::new()).errno(), EBUSY);
        assert_eq!(DestroyError::Gone.errno(), EINVAL);
        assert_eq!(DmError::Range.errno(), EINVAL);
        assert_eq!(DmError::Fault.errno(), EFAULT);
        assert_eq!(DmError::Export(EOPNOTSUPP).errno(), EOPNOTSUPP);
        assert_eq!(AdviseError::Range.errno(), EFAULT);
        assert_eq!(AdviseError::Forked.errno(), EIO);
        let (from, to) = (QpState::Reset, QpState::Rts);
        for (error, errno) in [
            (ModifyObjectError::Qp(ModifyError::Transition { from, to }), EINVAL),
            (ModifyObjectError::Qp(ModifyError::CurState(from)), EINVAL),
            (ModifyObjectError::Qp(ModifyError::Missing(QpAttrMask::AV)), EINVAL),
            (ModifyObjectError::Qp(ModifyError::Extra(QpAttrMask::AV)), EINVAL),
            (ModifyObjectError::Qp(ModifyError::Value(QpAttrMask::AV)), EINVAL),
            (ModifyObjectError::Qp(ModifyError::Unsupported(QpAttrMask::CAP)), EOPNOTSUPP),
            (ModifyObjectError::Invalid(""), EINVAL),
            (ModifyObjectError::OutOfRange { what: "", value: 2, least: 0, most: 1 }, EINVAL),
            (
                ModifyObjectError::Limit { what: "", value: 2, limit: 1, name: "", device: "" },
                EINVAL,
            ),
            (ModifyObjectError::DoesNotFit, EINVAL),
            (ModifyObjectError::Unsupported(""), EOPNOTSUPP),
            (ModifyObjectError::Esp(EspError::Fixed), EINVAL),
            (ModifyObjectError::Esp(EspError::TfcPad), EOPNOTSUPP),
            (ModifyObjectError::Gone, EINVAL),
            (ModifyObjectError::Forked, EIO),
            (ModifyObjectError::Failed, EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        for (error, errno) in [
            (AttachError::NotDatagram, EINVAL),
            (AttachError::NotGroup, EINVAL),
            (AttachError::NotAttached, EINVAL),
            (AttachError::Full(full), ENOMEM),
            (AttachError::Join(io(ENODEV)), ENODEV),
            (AttachError::Join(std::io::ErrorKind::Other.into()), EIO),
            (AttachError::Foreign(""), EINVAL),
            (AttachError::NoOperation, EINVAL),
            (AttachError::TooLate, EINVAL),
            (AttachError::Counted, EBUSY),
            (AttachError::Gone, EINVAL),
            (AttachError::Forked, EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        for (error, errno) in [
            (PostError::Send(PostSendError::State), EINVAL),
            (PostError::Send(PostSendError::Full), ENOMEM),
            (PostError::Send(PostSendError::TooManySges), EINVAL),
            (PostError::Send(PostSendError::InlineTooLong), EINVAL),
            (PostError::Send(PostSendError::Fault), EFAULT),
            (PostError::Send(PostSendError::NoDestination), EINVAL),
            (PostError::Send(PostSendError::TooLong), EINVAL),
            (PostError::Send(PostSendError::InlineRead), EINVAL),
            (PostError::Send(PostSendError::NoSendQueue), EINVAL),
            (PostError::Send(PostSendError::Segmentation), EINVAL),
            (PostError::Recv(PostRecvError::Full), ENOMEM),
            (PostError::Recv(PostRecvError::TooManySges), EINVAL),
            (PostError::Recv(PostRecvError::State), EINVAL),
            (PostError::Recv(PostRecvError::HasSrq), EINVAL),
            (PostError::Recv(PostRecvError::NoQueue), EINVAL),
            (PostError::Tag(TagError::Full), ENOMEM),
            (PostError::Tag(TagError::TooManySges), EINVAL),
            (PostError::NoTags, EINVAL),
            (PostError::Bind, EINVAL),
            (PostError::Foreign, EINVAL),
            (PostError::ElementsOfRead { elements: 2, limit: 1, device: "" }, EINVAL),
            (PostError::Longer { local: 2, remote: 1 }, EINVAL),
            (PostError::Gone, EINVAL),
            (PostError::Forked, EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        assert_eq!(CounterError::Invalid("").errno(), EINVAL);
        assert_eq!(CounterError::Bound.errno(), EBUSY);
        for (error, errno) in [
            (CqError::NoChannel, EINVAL),
            (CqError::Foreign, EINVAL),
            (CqError::Gone, EINVAL),
            (CqError::Overrun, EIO),
            (CqError::Forked, EIO),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
        for (error, errno) in [
            (EventError::WouldBlock, EAGAIN),
            (EventError::Forked, EIO),
            (EventError::Io(io(EINTR)), EINTR),
        ] {
            assert_eq!(error.errno(), errno, "{error:?}");
        }
    }
}

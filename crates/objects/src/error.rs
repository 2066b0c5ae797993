//! Why calls fail. [`errno`](crate::errno) has their numbers in C.

use anyverbs_causes::Cause;
use anyverbs_proto::qp::PostSendError;
use anyverbs_proto::qp::attr::ModifyError;
use anyverbs_proto::raw::esp::EspError;
use anyverbs_proto::raw::flow::FlowError;
use anyverbs_proto::raw::rss::HashError;
use anyverbs_proto::recv_queue::PostRecvError;
use anyverbs_proto::tag_list::TagError;
use anyverbs_proto::wr::NoWay;
use anyverbs_queue_memory::OutOfMemory;
use thiserror::Error;

use crate::config::ConfigError;
use crate::features::Feature;

/// Why an object does nothing any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Useless {
    /// It was destroyed.
    Gone,
    /// It was inherited across `fork`.
    Forked,
}

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
    /// No interface that the configuration names can be used.
    #[error("no interface or address that the configuration names can be used: {0}")]
    Interfaces(String),
    /// No device of that name.
    #[error("there is no device {0:?}")]
    NoSuchDevice(String),
    /// `EIO`: the device has failed for good.
    #[error("the device has failed")]
    Failed,
    /// `EINVAL`: a descriptor that is of no open device of that name.
    #[error("the descriptor is of no open device")]
    NotCommand,
    /// The system refused a descriptor, a thread or memory.
    #[error("cannot {what}: {source}")]
    System {
        /// The action that failed.
        what: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl From<std::io::Error> for OpenError {
    fn from(source: std::io::Error) -> Self {
        Self::System { what: "map a page", source }
    }
}

/// The limit that leaves no room for another object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error(
    "{} holds no more {what} ({limit} = {max})",
    device.map_or_else(|| "the process".to_owned(), |device| format!("device {device}"))
)]
pub struct Full {
    /// The device; `None` where the devices of the process hold no more together.
    pub device: Option<&'static str>,
    /// The objects.
    pub what: &'static str,
    /// The name of the limit: one of the device, or what limits the process.
    pub limit: &'static str,
    /// Its value.
    pub max: u32,
}

/// A limit of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LimitOf {
    /// The device.
    pub device: String,
    /// The name of the limit.
    pub limit: &'static str,
}

/// Why an object could not be made or asked.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CreateError {
    /// `EINVAL`: a value out of range; the text says which.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// `EINVAL`: a value beyond a limit of the device.
    #[error("{what} is {value}, and the limit is {limit}{}", in_brackets(of.as_ref()))]
    Limit {
        /// The field.
        what: &'static str,
        /// The value that was asked for.
        value: u32,
        /// The largest that the device has.
        limit: u32,
        /// The limit and the device, unless it is one of a simulation.
        of: Option<LimitOf>,
    },
    /// `EINVAL`: a number that must lie between two others.
    #[error("{what} is {}, and it must be between {least} and {most}", value.cast_signed())]
    OutOfRange {
        /// The field.
        what: &'static str,
        /// The value that was asked for.
        value: u32,
        /// The smallest that is allowed.
        least: u32,
        /// The largest that is allowed.
        most: u32,
    },
    /// `EINVAL`: a GID index without an address.
    #[error("GID index {index} of port {port} holds no address{}", other_gids(*last, taken_by.as_deref()))]
    NoGid {
        /// The port.
        port: u8,
        /// The index that was asked for.
        index: u32,
        /// The last index with an address, if there is one.
        last: Option<u32>,
        /// The rule of a script of faults that has taken the address away.
        taken_by: Option<String>,
    },
    /// `EINVAL`: the engine takes the value, and it is beyond a limit of the device's persona.
    #[error("persona {persona}: {what} is {value}, and the limit is {limit}{}", in_brackets(of.as_ref()))]
    PersonaLimit {
        /// Its name.
        persona: String,
        /// The field.
        what: &'static str,
        /// The value that was asked for.
        value: u32,
        /// The largest that the persona has.
        limit: u32,
        /// The limit and the device.
        of: Option<LimitOf>,
    },
    /// The system has no route from the local address to the peer; its error number.
    #[error(
        "the local address {from} (sgid_index {index}) cannot reach the peer at {to}: {}",
        NoWay::between(*from, *to).map_or_else(
            || std::io::Error::from_raw_os_error(*errno).to_string(),
            |no_way| no_way.text().to_owned()
        )
    )]
    Unreachable {
        /// The local address.
        from: std::net::IpAddr,
        /// Its place in the GID table.
        index: u8,
        /// The peer's address.
        to: std::net::IpAddr,
        /// As the system says, or would say.
        errno: i32,
    },
    /// `ENOMEM`: a limit of the device, or of the process, is reached.
    #[error(transparent)]
    Full(#[from] Full),
    /// `ENOMEM`: the device holds no more of these.
    #[error("the device holds no more {0}")]
    Exhausted(&'static str),
    /// `EOPNOTSUPP`.
    #[error("this device does not support {0}")]
    Unsupported(&'static str),
    /// `EOPNOTSUPP`: the engine has it, but the device's persona does not.
    #[error("persona {persona}: it lacks {}", lacks.text())]
    Persona {
        /// Its name.
        persona: String,
        /// The feature.
        lacks: Feature,
    },
    /// `EOPNOTSUPP`: a GID that the persona lists, and that carries no traffic.
    #[error("persona {persona}: {what}")]
    NoTraffic {
        /// Its name.
        persona: String,
        /// The reason.
        what: String,
    },
    /// `EINVAL`: an object of another context, or one that is already destroyed.
    #[error("the {0} is not of this context, or was destroyed")]
    Foreign(&'static str),
    /// `EAGAIN`, as Linux: the file has no XRC domain, and none was to be made.
    #[error("the file has no XRC domain, and O_CREAT was not given")]
    NoXrcDomain,
    /// `EINVAL`, as Linux: the file has an XRC domain already.
    #[error("the file has an XRC domain, and O_EXCL was given")]
    XrcDomainExists,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
    /// `EIO`: the device has failed for good (`IBV_EVENT_DEVICE_FATAL`).
    #[error("the device has failed")]
    Failed,
    /// `EIO`: the device could not be started again in a forked child.
    #[error("the device could not be opened: {0}")]
    Device(String),
    /// `EMFILE` and its like: the system refused a descriptor, or its libibverbs the object.
    #[error("the system refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
    /// `EPERM`: raw packets need `CAP_NET_RAW`.
    #[error("raw packets need CAP_NET_RAW")]
    NotPermitted,
    /// `EINVAL`: a flow rule that is none.
    #[error(transparent)]
    Flow(#[from] FlowError),
    /// `EINVAL`: a receive hash that is none.
    #[error(transparent)]
    Hash(#[from] HashError),
    /// `EINVAL`, `EOPNOTSUPP`: a security association that is none, or that this device cannot do.
    #[error(transparent)]
    Esp(#[from] EspError),
}

/// Why memory could not be registered, or a registration changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// `EINVAL`: remote write or atomic access needs local write access.
    #[error("remote write and atomic access need local write access (IBV_ACCESS_LOCAL_WRITE)")]
    Access,
    /// `EOPNOTSUPP`: access flags that this device does not have.
    #[error("access flags {0:#x} are not supported")]
    Unsupported(u32),
    /// `EOPNOTSUPP`: the device's persona lacks it.
    #[error("persona {persona}: it lacks {}", lacks.text())]
    Persona {
        /// Its name.
        persona: &'static str,
        /// The feature.
        lacks: Feature,
    },
    /// `EINVAL`: the range wraps around the end of the address space.
    #[error("the range wraps around")]
    Range,
    /// `EFAULT`: nothing is mapped at this address of the range.
    #[error("nothing is mapped at {0:#x}")]
    NotMapped(u64),
    /// `EFAULT`: the memory at this address may not be read, or not written where the region may.
    #[error(
        "the memory at {0:#x} may not be read, or not written as IBV_ACCESS_LOCAL_WRITE asks for"
    )]
    Protected(u64),
    /// `EINVAL`: the text gives the reason.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// `EBUSY`: memory windows are bound to the region.
    #[error("memory windows are bound to the region")]
    Bound,
    /// The system's error number: a descriptor that is no dma-buf, or cannot be mapped; or that of its libibverbs.
    #[error("the system refused the registration: {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
    /// `ENOMEM`: a limit of the device, or of the process, is reached.
    #[error(transparent)]
    Full(#[from] Full),
    /// `ENOMEM`: there is no key for another region.
    #[error("the device holds no more memory regions")]
    Exhausted,
    /// `EINVAL`: an object of another context, or one that is already destroyed.
    #[error("the {0} is not of this context, or was destroyed")]
    Foreign(&'static str),
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
    /// `EIO`: the device has failed for good (`IBV_EVENT_DEVICE_FATAL`).
    #[error("the device has failed")]
    Failed,
}

/// Why device memory was not copied or exported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DmError {
    /// `EINVAL`: not within the memory, or an offset or a length that is no multiple of 4.
    #[error("not within the device memory, or not in units of 4 bytes")]
    Range,
    /// `EFAULT`: the other side of the copy is not mapped.
    #[error("part of the memory is not mapped")]
    Fault,
    /// The system's error number; `EOPNOTSUPP` where it makes no dma-bufs.
    #[error("the system made no dma-buf: {}", std::io::Error::from_raw_os_error(*.0))]
    Export(i32),
}

/// Why no advice was taken (`ibv_advise_mr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AdviseError {
    /// `EFAULT`: a key of no such region of the protection domain, a range beyond it, or one that is not mapped.
    #[error("a range that is not within a region that is paged on demand, or is not mapped")]
    Range,
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
    /// `EINVAL`: a number that must lie between two others.
    #[error("{what} is {}, and it must be between {least} and {most}", value.cast_signed())]
    OutOfRange {
        /// The field.
        what: &'static str,
        /// The value that was asked for.
        value: u32,
        /// The smallest that is allowed.
        least: u32,
        /// The largest that is allowed.
        most: u32,
    },
    /// `EINVAL`: a value beyond a limit of the device.
    #[error("{what} is {value}, and the limit is {limit} ({name} of device {device})")]
    Limit {
        /// The field.
        what: &'static str,
        /// The value that was asked for.
        value: u32,
        /// The largest that the device has.
        limit: u32,
        /// The name of the limit.
        name: &'static str,
        /// The device.
        device: &'static str,
    },
    /// `EPERM`: a Q_Key with the high bit set needs `CAP_NET_RAW` (IBA 3.5.3).
    #[error("a controlled Q_Key needs CAP_NET_RAW")]
    NotPermitted,
    /// `EOPNOTSUPP`.
    #[error("the object does not have {0}")]
    Unsupported(&'static str),
    /// `EINVAL`: the object's contents do not fit.
    #[error("what the queue holds does not fit")]
    DoesNotFit,
    /// `EINVAL`: it was destroyed before.
    #[error("already destroyed")]
    Gone,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
    /// `EIO`: the device has failed for good (`IBV_EVENT_DEVICE_FATAL`).
    #[error("the device has failed")]
    Failed,
    /// `EINVAL`, `EOPNOTSUPP`: the flow action's parameters.
    #[error(transparent)]
    Esp(#[from] EspError),
    /// The errno value of the process that a target is of.
    #[error("the process of the queue pair refuses it: {}", std::io::Error::from_raw_os_error(*.0))]
    Elsewhere(i32),
    /// The error number of the system's libibverbs.
    #[error("the system refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
}

/// Why a queue pair was not attached to a multicast group or a completion counter, or detached.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AttachError {
    /// `EINVAL`: only datagram queue pairs have groups.
    #[error("not a queue pair for datagrams")]
    NotDatagram,
    /// `EINVAL`: not the address of a group.
    #[error("not a multicast GID")]
    NotGroup,
    /// `EINVAL`: it is not attached to that group.
    #[error("not attached to that group")]
    NotAttached,
    /// `ENOMEM`: a limit of the device, or of the process, is reached.
    #[error(transparent)]
    Full(#[from] Full),
    /// `EINVAL`: an object of another context.
    #[error("the {0} is not of this context")]
    Foreign(&'static str),
    /// `EINVAL`: a counter of nothing.
    #[error("no operation to count")]
    NoOperation,
    /// `EINVAL`: counters are attached in RESET and INIT.
    #[error("the queue pair is beyond INIT")]
    TooLate,
    /// `EBUSY`: another counter counts one of the operations.
    #[error("another counter counts one of the operations")]
    Counted,
    /// The system's error number: the group could not be joined.
    #[error("joining the group: {0}")]
    Join(std::io::Error),
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
    /// The list of tags refused it.
    #[error(transparent)]
    Tag(#[from] TagError),
    /// `EINVAL`: the SRQ does not match tags.
    #[error("the SRQ does not match tags")]
    NoTags,
    /// The receive queue refused it.
    #[error(transparent)]
    Recv(#[from] PostRecvError),
    /// `EINVAL`: rights that no memory window can have, a length without a region, or objects of another context.
    #[error("a bind that no memory window can have")]
    Bind,
    /// `EINVAL`: memory or a destination of another simulation or device.
    #[error("an object of another simulation or device, or a destination of another host")]
    Foreign,
    /// `EINVAL`: a READ into more elements than the device takes.
    #[error(
        "a READ has {elements} elements, and the limit is {limit} (max_sge_rd of device {device})"
    )]
    ElementsOfRead {
        /// Its elements.
        elements: u16,
        /// The most that the device takes.
        limit: u16,
        /// The device.
        device: &'static str,
    },
    /// `EINVAL`: the slice for a READ or WRITE is longer than that of the peer.
    #[error("the slice has {local} bytes, and that of the peer {remote}")]
    Longer {
        /// Bytes of the own slice.
        local: u64,
        /// Bytes of the peer's.
        remote: u64,
    },
    /// The error number of the system's libibverbs.
    #[error("the system refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
    /// `EINVAL`: the object was destroyed.
    #[error("already destroyed")]
    Gone,
    /// `EIO`: the object was inherited across `fork`.
    #[error("objects that were inherited across fork do no work")]
    Forked,
}

/// Why counters were not attached or read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum CounterError {
    /// `EINVAL`: a value out of range; the text says which.
    #[error("invalid {0}")]
    Invalid(&'static str),
    /// `EBUSY`: a flow rule uses them.
    #[error("the counters belong to a flow rule already")]
    Bound,
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
    /// `EINVAL`: it is of another simulation or device.
    #[error("the completion queue is of another simulation or device")]
    Foreign,
    /// The error number of the system's libibverbs.
    #[error("the system refused it: {}", std::io::Error::from_raw_os_error(*.0))]
    System(i32),
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

macro_rules! from_useless {
    ($($error:ident)*) => {
        $(impl From<Useless> for $error {
            #[inline]
            fn from(useless: Useless) -> Self {
                match useless {
                    Useless::Gone => Self::Gone,
                    Useless::Forked => Self::Forked,
                }
            }
        })*
    };
}

from_useless!(CqError ModifyObjectError PostError);

impl From<OutOfMemory> for CreateError {
    fn from(_: OutOfMemory) -> Self {
        Self::Exhausted("memory for queues")
    }
}

impl CreateError {
    /// Refuses a value beyond a limit.
    ///
    /// # Errors
    /// [`Limit`](Self::Limit).
    pub fn check(what: &'static str, value: u32, limit: u32) -> Result<(), Self> {
        if value > limit { Err(Self::Limit { what, value, limit, of: None }) } else { Ok(()) }
    }

    /// The cause, of which there is a page. `None` for what programs try out.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self {
            // Libraries find the largest by trying (libfabric's verbs provider): that is no mistake.
            Self::Limit { what: "max_inline_data", .. }
            | Self::PersonaLimit { what: "max_inline_data", .. } => None,
            Self::Limit { .. } | Self::PersonaLimit { .. } => Some(Cause::Limit),
            Self::Persona { .. } => Some(Cause::Persona),
            Self::NoTraffic { .. } => Some(Cause::GidWithoutTraffic),
            Self::Unreachable { .. } => Some(Cause::Unreachable),
            Self::Invalid(_) | Self::OutOfRange { .. } | Self::NoGid { .. } => {
                Some(Cause::AttributeValue)
            }
            _ => None,
        }
    }

    /// The feature that the persona lacks, or the field that is beyond its limit. `None` for what programs try out.
    #[must_use]
    pub fn lacks(&self) -> Option<&'static str> {
        match self {
            Self::Persona { lacks, .. } => Some(lacks.text()),
            Self::PersonaLimit { what, .. } if *what != "max_inline_data" => Some(what),
            _ => None,
        }
    }
}

impl ModifyObjectError {
    /// The cause, of which there is a page.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        let error = match self {
            Self::Qp(error) => error,
            Self::Invalid(_) | Self::OutOfRange { .. } => return Some(Cause::AttributeValue),
            Self::Limit { .. } => return Some(Cause::Limit),
            _ => return None,
        };
        match error {
            ModifyError::Transition { .. } | ModifyError::CurState(_) => Some(Cause::NoTransition),
            ModifyError::Missing(_) => Some(Cause::AttributesMissing),
            ModifyError::Extra(_) => Some(Cause::AttributesExtra),
            ModifyError::Value(_) => Some(Cause::AttributeValue),
            _ => None,
        }
    }
}

impl PostError {
    /// The cause, of which there is a page. `None` for a full queue, which programs poll for, and for objects that have ended.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::Send(PostSendError::Full) | Self::Recv(PostRecvError::Full) => None,
            Self::Send(_) | Self::Recv(_) | Self::Bind | Self::ElementsOfRead { .. } => {
                Some(Cause::WorkRequest)
            }
            _ => None,
        }
    }
}

impl RegisterError {
    /// The cause, of which there is a page.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self {
            Self::NotMapped(_) | Self::Protected(_) => Some(Cause::NotMapped),
            Self::Persona { .. } => Some(Cause::Persona),
            Self::Access => Some(Cause::LocalWriteMissing),
            Self::Range | Self::Invalid(_) => Some(Cause::AttributeValue),
            _ => None,
        }
    }

    /// The feature that the persona lacks.
    #[must_use]
    pub fn lacks(&self) -> Option<&'static str> {
        match self {
            Self::Persona { lacks, .. } => Some(lacks.text()),
            _ => None,
        }
    }
}

/// The limit that a value is beyond.
fn in_brackets(of: Option<&LimitOf>) -> String {
    of.map_or_else(String::new, |LimitOf { device, limit }| {
        format!(" ({limit} of device {device})")
    })
}

/// What a GID table has besides an index without an address.
fn other_gids(last: Option<u32>, taken_by: Option<&str>) -> String {
    match (taken_by, last) {
        (Some(rule), _) => format!(": a fault has taken it away ({rule})"),
        (None, Some(last)) => format!(", and the last that does is {last}"),
        (None, None) => ", and no other does".to_owned(),
    }
}

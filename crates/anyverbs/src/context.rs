//! An open device.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use anyverbs_proto::counters::Counters;
use anyverbs_proto::types::PKey;
use anyverbs_proto::wr::AddressVector;

use crate::ah::{self, AhAttr};
use crate::async_event::{AsyncEvent, AsyncQueue};
use crate::comp_channel::{ChannelCell, CompChannel};
use crate::cq::Cq;
use crate::device::PortAttr;
use crate::engine::Engine;
use crate::error::{CreateError, EventError, OpenError};
use crate::gid::GidEntry;
use crate::holders::Holders;
use crate::limits::DeviceAttr;
use crate::pd::{Pd, PdCell};
use crate::raw::FlowCounters;
use crate::xrcd::{Xrcd, XrcdInitAttr};

/// An open device (`ibv_open_device`).
///
/// The first one starts the process's engine, which stays until the process ends. A context that was inherited across
/// `fork` starts a new engine at its first use; the objects that were made from it before do no work.
#[derive(Debug)]
pub struct Context(Arc<ContextCell>);

#[derive(Debug)]
pub(crate) struct ContextCell {
    pub(crate) events: AsyncQueue,
}

impl Context {
    /// Opens the device called `name` (see [`crate::devices`]).
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let engine = Engine::current()?;
        if name != engine.config.device {
            return Err(OpenError::NoSuchDevice(name.to_owned()));
        }
        let events = AsyncQueue::new()
            .map_err(|source| OpenError::System { what: "make an eventfd", source })?;
        let cell = Arc::new(ContextCell { events });
        engine.add_context(&cell);
        Ok(Self(cell))
    }

    /// The engine, started anew in a forked child.
    pub(crate) fn engine(&self) -> Result<&'static Engine, CreateError> {
        match Engine::current() {
            Ok(engine) => Ok(engine),
            Err(error) => {
                tracing::error!("{error}");
                Err(CreateError::Device(error.to_string()))
            }
        }
    }

    /// What the device can do (`ibv_query_device`).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn device_attr(&self) -> Result<DeviceAttr, CreateError> {
        Ok(self.engine()?.attr)
    }

    /// State of a port (`ibv_query_port`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] unless `port` is 1.
    pub fn port_attr(&self, port: u8) -> Result<PortAttr, CreateError> {
        check_port(port)?;
        Ok(self.engine()?.port_attr())
    }

    /// An entry of the GID table (`ibv_query_gid`, `ibv_query_gid_ex`); `None` for an empty one.
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or an index that does not exist.
    pub fn gid(&self, port: u8, index: usize) -> Result<Option<GidEntry>, CreateError> {
        check_port(port)?;
        if index >= crate::limits::GID_TABLE_LEN {
            return Err(CreateError::Invalid("GID index"));
        }
        Ok(self.engine()?.gids.entry(index))
    }

    /// All entries of the GID table that hold an address (`ibv_query_gid_table`).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn gids(&self) -> Result<Vec<GidEntry>, CreateError> {
        Ok(self.engine()?.gids.entries())
    }

    /// An entry of the P_Key table (`ibv_query_pkey`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or an index that does not exist.
    pub fn pkey(&self, port: u8, index: usize) -> Result<PKey, CreateError> {
        check_port(port)?;
        if index == 0 { Ok(PKey::DEFAULT) } else { Err(CreateError::Invalid("P_Key index")) }
    }

    /// Checks an address and completes it from the GID table, for [`crate::Qp::modify`].
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or GID index that does not exist, or without a global route.
    pub fn resolve(&self, attr: &AhAttr) -> Result<AddressVector, CreateError> {
        ah::resolve(self.engine()?, attr)
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// [`CreateError::Exhausted`].
    pub fn alloc_pd(&self) -> Result<Pd, CreateError> {
        let engine = self.engine()?;
        let ticket = engine.quotas.pd.take().ok_or(CreateError::Exhausted("protection domains"))?;
        Ok(Pd(Arc::new(PdCell {
            engine,
            context: Arc::clone(&self.0),
            number: engine.next_pd(),
            holders: Holders::default(),
            _ticket: ticket,
        })))
    }

    /// Opens a domain of extended reliable connections (`ibv_open_xrcd`).
    ///
    /// # Errors
    /// [`CreateError::NoXrcDomain`], [`CreateError::XrcDomainExists`], [`CreateError::Exhausted`],
    /// [`CreateError::System`] for a file that has no identity.
    pub fn open_xrcd(&self, init: XrcdInitAttr) -> Result<Xrcd, CreateError> {
        Xrcd::open(self.engine()?, &self.0, init)
    }

    /// Makes counters for flow rules (`ibv_create_counters`).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn create_counters(&self) -> Result<FlowCounters, CreateError> {
        Ok(FlowCounters::create(self.engine()?))
    }

    /// Makes a completion channel.
    ///
    /// # Errors
    /// [`CreateError::System`] when the system refuses a descriptor.
    pub fn create_comp_channel(&self) -> Result<CompChannel, CreateError> {
        let cell = ChannelCell::new(self.engine()?)
            .map_err(|e| CreateError::System(e.raw_os_error().unwrap_or(libc::EMFILE)))?;
        Ok(CompChannel(Arc::new(cell)))
    }

    /// Makes a completion queue for `cqe` completions. Its events carry `cookie`.
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_cq(
        &self,
        cqe: u32,
        channel: Option<&CompChannel>,
        comp_vector: u32,
        cookie: u64,
    ) -> Result<Cq, CreateError> {
        Cq::create(self.engine()?, &self.0, cqe, channel, comp_vector, cookie)
    }

    /// Reads the oldest asynchronous event (`ibv_get_async_event`). Waits for one unless the program set `O_NONBLOCK`
    /// on the descriptor; holds no lock meanwhile.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn get_async_event(&self) -> Result<AsyncEvent, EventError> {
        self.0.events.pop()
    }

    /// The descriptor that is readable while an asynchronous event waits.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.0.events.fd()
    }

    /// The port's counters.
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn counters(&self) -> Result<&'static Counters, CreateError> {
        Ok(self.engine()?.counters())
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}

fn check_port(port: u8) -> Result<(), CreateError> {
    if port == 1 { Ok(()) } else { Err(CreateError::Invalid("port")) }
}

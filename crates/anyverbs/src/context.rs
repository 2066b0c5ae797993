//! An open device.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use anyverbs_net::Uncancelled;
use anyverbs_objects::ah::{self, AhAttr};
use anyverbs_objects::async_event::{AsyncEvent, AsyncQueue};
use anyverbs_objects::base::{Core, Progress as _};
use anyverbs_objects::clock;
use anyverbs_objects::command::CommandFile;
use anyverbs_objects::comp_channel::CompChannel;
use anyverbs_objects::comp_cntr::{CompCntr, CompCntrKind};
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::{Cq, CqInitAttr};
use anyverbs_objects::dm::Dm;
use anyverbs_objects::dmah::{Dmah, DmahAttr};
use anyverbs_objects::error::{CreateError, EventError, OpenError};
use anyverbs_objects::gid::GidEntry;
use anyverbs_objects::limits::{Bound, DeviceAttr};
use anyverbs_objects::pd::Pd;
use anyverbs_objects::persona::{Feature, Persona};
use anyverbs_objects::td::Td;
use anyverbs_proto::counters::Counters;
use anyverbs_proto::types::PKey;
use anyverbs_proto::wr::AddressVector;
use anyverbs_raw::{
    EspAttr, FlowActionEsp, FlowCounters, HashQpInit, RawQp, RawQpInit, RwqIndTable, Wq, WqInit,
};
use anyverbs_transport::qp::{Qp, QpInitAttr, XrcSendInitAttr};
use anyverbs_xrc::{Xrcd, XrcdInitAttr};

use crate::device::{Details, Device, PortAttr};

/// An open device (`ibv_open_device`).
///
/// The first one starts the process's device, which stays until the process ends. A context that was inherited across
/// `fork` starts a new device at its first use; the objects that were made from it before do no work.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use anyverbs::Context;
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// println!("at most {} queue pairs", context.device_attr()?.max_qp);
/// let port = context.port_attr(1)?;
/// println!("port 1: {:?}, path MTU {}", port.state, port.active_mtu.bytes());
/// for entry in context.gids()? {
///     println!("GID {}: {}", entry.index, entry.gid.to_ip());
/// }
/// let pd = context.alloc_pd()?; // and so on: a context makes all other objects
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Context(Arc<ContextCell>, usize);

impl Context {
    /// Opens the device called `name` (see [`crate::devices`]).
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let device = Device::current()?;
        let number =
            device.find(|known| known == name).ok_or(OpenError::NoSuchDevice(name.to_owned()))?;
        let command = CommandFile::create(name)
            .map_err(|source| OpenError::System { what: "make a memfd", source })?;
        Self::with(device, number, command)
    }

    /// Opens the device of a [`command_fd`](Self::command_fd) that was passed on, perhaps by another process
    /// (`ibv_import_device`). It is this process's own device, and a context of its own, which shares the device memory
    /// with the original.
    ///
    /// # Errors
    /// [`OpenError::NotCommand`] for a descriptor of something else.
    pub fn import(fd: OwnedFd) -> Result<Self, OpenError> {
        let device = Device::current()?;
        let command = CommandFile::open(fd).map_err(|_| OpenError::NotCommand)?;
        let number = device.find(|name| command.is_of(name)).ok_or(OpenError::NotCommand)?;
        Self::with(device, number, command)
    }

    fn with(
        device: &'static Device,
        number: usize,
        command: CommandFile,
    ) -> Result<Self, OpenError> {
        if device.core.has_failed(number) {
            return Err(OpenError::Failed);
        }
        let events = AsyncQueue::new()
            .map_err(|source| OpenError::System { what: "make an eventfd", source })?;
        let cell = Arc::new(ContextCell { device: number, events, command });
        device.driver.listeners.add(&cell);
        Ok(Self(cell, device.core.config.number_of(number)))
    }

    /// The number of its device, in the order of [`crate::devices`].
    #[must_use]
    pub fn number(&self) -> usize {
        self.1
    }

    /// The place of a port of its device among the ports of all.
    fn port(&self, number: u8) -> Result<usize, CreateError> {
        let core = self.core()?;
        core.port(self.0.device, number).ok_or_else(|| core.no_port(self.0.device, number))
    }

    /// The places of all ports of its device.
    fn ports(&self) -> Result<std::ops::Range<usize>, CreateError> {
        let count = self.device_attr()?.phys_port_cnt;
        Ok(self.0.device..self.0.device + usize::from(count))
    }

    /// The core of this process's own device.
    fn core(&self) -> Result<&'static Core, CreateError> {
        Ok(self.device()?.core)
    }

    /// The device, started anew in a forked child.
    fn device(&self) -> Result<&'static Device, CreateError> {
        match Device::current() {
            Ok(device) => Ok(device),
            Err(error) => {
                anyverbs_objects::say_again!(error, 0, "cannot open the device: {error}");
                Err(CreateError::Device(error.to_string()))
            }
        }
    }

    /// The device for a new object on it.
    fn maker(&self) -> Result<&'static Device, CreateError> {
        let device = self.device()?;
        device.core.may_make(self.0.device)?;
        Ok(device)
    }

    /// Refuses a command to a device that has failed for good. What ends objects, posts work or looks for it is no command.
    ///
    /// # Errors
    /// [`CreateError::Failed`].
    pub fn answers(&self) -> Result<(), CreateError> {
        let failed = Device::running().is_some_and(|own| own.core.has_failed(self.0.device));
        if failed { Err(CreateError::Failed) } else { Ok(()) }
    }

    /// The device's limits and capabilities (`ibv_query_device`).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn device_attr(&self) -> Result<DeviceAttr, CreateError> {
        Ok(self.device()?.attr(self.0.device))
    }

    /// The device's properties beside its attributes.
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn details(&self) -> Result<Details, CreateError> {
        Ok(self.device()?.details(self.0.device))
    }

    /// The name of the device.
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn name(&self) -> Result<&'static str, CreateError> {
        Ok(self.core()?.config.ports.get(self.0.device).map_or("", |port| &port.name))
    }

    /// The vendor's device that it looks like.
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn persona(&self) -> Result<Option<&'static Persona>, CreateError> {
        Ok(self.core()?.persona_of(self.0.device))
    }

    /// Refuses a feature that the persona lacks.
    ///
    /// # Errors
    /// [`CreateError::Persona`], [`CreateError::Device`].
    pub fn offers(&self, feature: Feature) -> Result<(), CreateError> {
        self.core()?.offers(self.0.device, feature)
    }

    /// Refuses a value beyond a limit of the device.
    ///
    /// # Errors
    /// [`CreateError::PersonaLimit`], [`CreateError::Limit`], [`CreateError::Device`].
    pub fn within(&self, what: &'static str, value: u32, bound: Bound) -> Result<(), CreateError> {
        self.core()?.within(self.0.device, what, value, bound)
    }

    /// State of a port (`ibv_query_port`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port that does not exist.
    pub fn port_attr(&self, port: u8) -> Result<PortAttr, CreateError> {
        let port = self.port(port)?;
        Ok(self.device()?.port_attr(port))
    }

    /// An entry of the GID table (`ibv_query_gid`, `ibv_query_gid_ex`); `None` for an empty one.
    ///
    /// # Errors
    /// [`CreateError::OutOfRange`] for a port or an index that does not exist.
    pub fn gid(&self, port: u8, index: usize) -> Result<Option<GidEntry>, CreateError> {
        let entry = self.core()?.gids.entry(self.port(port)?, index);
        let most = anyverbs_objects::limits::GID_TABLE_LEN as u32 - 1;
        if entry.is_none() && index > most as usize {
            let value = u32::try_from(index).unwrap_or(u32::MAX);
            return Err(CreateError::OutOfRange { what: "GID index", value, least: 0, most });
        }
        Ok(entry)
    }

    /// All entries of the GID tables of all ports that hold an address (`ibv_query_gid_table`). With a persona some may carry no traffic
    /// ([`GidEntry::carries`]).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn gids(&self) -> Result<Vec<GidEntry>, CreateError> {
        let gids = &self.core()?.gids;
        Ok(self.ports()?.flat_map(|port| gids.listed(port)).collect())
    }

    /// All addresses of all ports: the tables', and those of the loopback interface where no table lists them.
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn addresses(&self) -> Result<Vec<GidEntry>, CreateError> {
        let gids = &self.core()?.gids;
        Ok(self.ports()?.flat_map(|port| gids.of_port(port)).collect())
    }

    /// An entry of the P_Key table (`ibv_query_pkey`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or an index that does not exist.
    pub fn pkey(&self, port: u8, index: usize) -> Result<PKey, CreateError> {
        let pkeys = self.core()?.pkeys_of(self.port(port)?);
        pkeys.get(index).copied().ok_or(CreateError::Invalid("P_Key index"))
    }

    /// Checks an address and completes it from the GID table, for [`crate::Qp::modify`].
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or GID index that does not exist, or without a global route.
    pub fn resolve(&self, attr: &AhAttr) -> Result<AddressVector, CreateError> {
        ah::resolve(self.core()?, self.0.device, attr)
    }

    /// The Ethernet address to which packets for an address go, and the VLAN of the interface that they leave by
    /// (`ibv_resolve_eth_l2_from_gid`). Asks the network where the host does not know, and waits for at most three seconds.
    ///
    /// # Errors
    /// [`CreateError::Invalid`] as [`resolve`](Self::resolve), [`CreateError::System`] if the neighbour does not
    /// answer.
    pub fn resolve_ethernet(&self, attr: &AhAttr) -> Result<([u8; 6], Option<u16>), CreateError> {
        ah::resolve_ethernet(self.core()?, self.0.device, attr)
    }

    /// Makes a protection domain.
    ///
    /// # Errors
    /// [`CreateError::Full`].
    pub fn alloc_pd(&self) -> Result<Pd, CreateError> {
        Pd::new(self.maker()?.core, &self.0)
    }

    /// Makes a thread domain (`ibv_alloc_td`).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn alloc_td(&self) -> Result<Td, CreateError> {
        Ok(Td::alloc(self.maker()?.core, &self.0))
    }

    /// Makes a completion counter (`ibv_create_comp_cntr`); [`Qp::attach_comp_cntr`](crate::Qp::attach_comp_cntr) has it count.
    ///
    /// # Errors
    /// [`CreateError::Full`].
    pub fn create_comp_cntr(&self, kind: CompCntrKind) -> Result<CompCntr, CreateError> {
        CompCntr::create(self.maker()?.core, &self.0, kind)
    }

    /// The clock of [`WcDetail::timestamp`](crate::WcDetail) now (`ibv_query_rt_values_ex`).
    #[must_use]
    pub fn raw_clock(&self) -> u64 {
        clock::raw()
    }

    /// The same protection domain for this context: objects made through it report their events here (`ibv_import_pd`).
    #[must_use]
    pub fn import_pd(&self, pd: &Pd) -> Pd {
        Pd { cell: Arc::clone(&pd.cell), context: Arc::clone(&self.0) }
    }

    /// Allocates device memory, all zero, at a multiple of 2^`log_align` (`ibv_alloc_dm`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn alloc_dm(&self, len: u64, log_align: u32) -> Result<Dm, CreateError> {
        Dm::alloc(self.maker()?.core, &self.0, len, log_align)
    }

    /// The device memory with this handle, of any context that shares this one's descriptor, in this process or another
    /// (`ibv_import_dm`).
    ///
    /// # Errors
    /// [`CreateError::Foreign`].
    pub fn import_dm(&self, handle: u32) -> Result<Dm, CreateError> {
        Dm::import(self.maker()?.core, &self.0, handle)
    }

    /// Makes a DMA handle (`ibv_alloc_dmah`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`].
    pub fn alloc_dmah(&self, attr: &DmahAttr) -> Result<Dmah, CreateError> {
        self.maker()?;
        Dmah::alloc(attr)
    }

    /// The descriptor that stands for this context: its duplicates [`import`](Self::import) it, here or in another process.
    #[must_use]
    pub fn command_fd(&self) -> BorrowedFd<'_> {
        self.0.command.as_fd()
    }

    /// An identity that only contexts with the same descriptor share.
    #[must_use]
    pub fn identity(&self) -> (u64, u64) {
        self.0.command.identity
    }

    /// Whether the context that the descriptor was made for is of this process.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.0.command.is_own()
    }

    /// Opens a domain of extended reliable connections (`ibv_open_xrcd`).
    ///
    /// # Errors
    /// [`CreateError::NoXrcDomain`], [`CreateError::XrcDomainExists`], [`CreateError::Full`],
    /// [`CreateError::System`] for a file that has no identity.
    pub fn open_xrcd(&self, init: XrcdInitAttr) -> Result<Xrcd, CreateError> {
        Xrcd::open(self.maker()?.xrc, &self.0, init)
    }

    /// Makes a queue pair (`ibv_create_qp`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_qp(&self, pd: &Pd, init: &QpInitAttr<'_>) -> Result<Qp, CreateError> {
        Qp::create(self.maker()?.transport, pd, init)
    }

    /// Makes the initiator of an extended reliable connection: a queue pair that only sends (`ibv_create_qp_ex`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_xrc_send_qp(
        &self,
        pd: &Pd,
        init: &XrcSendInitAttr<'_>,
    ) -> Result<Qp, CreateError> {
        Qp::create_xrc_send(self.maker()?.transport, pd, init)
    }

    /// Makes a queue pair for raw packets (`IBV_QPT_RAW_PACKET`).
    ///
    /// # Errors
    /// [`CreateError::NotPermitted`] without `CAP_NET_RAW`; [`CreateError`].
    pub fn create_raw_qp(&self, pd: &Pd, init: &RawQpInit<'_>) -> Result<RawQp, CreateError> {
        RawQp::create(self.maker()?.switch, pd, init)
    }

    /// Makes a queue pair that spreads frames over the work queues of a table. It receives from the beginning.
    ///
    /// # Errors
    /// As [`create_raw_qp`](Self::create_raw_qp).
    pub fn create_hash_qp(&self, pd: &Pd, init: &HashQpInit<'_>) -> Result<RawQp, CreateError> {
        RawQp::create_hash(self.maker()?.switch, pd, init)
    }

    /// Makes a work queue, in RESET (`ibv_create_wq`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_wq(&self, pd: &Pd, init: &WqInit<'_>) -> Result<Wq, CreateError> {
        Wq::create(self.maker()?.switch, pd, init)
    }

    /// Makes an indirection table of work queues, a power of two; one may stand in it several times.
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_rwq_ind_table(&self, wqs: &[&Wq]) -> Result<RwqIndTable, CreateError> {
        RwqIndTable::create(self.maker()?.core, self.0.device, wqs)
    }

    /// Makes counters for flow rules (`ibv_create_counters`).
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn create_counters(&self) -> Result<FlowCounters, CreateError> {
        Ok(FlowCounters::create(self.maker()?.core))
    }

    /// Makes a flow action that encrypts or decrypts (`ibv_create_flow_action_esp`).
    ///
    /// # Errors
    /// [`CreateError::Esp`], [`CreateError::Device`].
    pub fn create_flow_action_esp(&self, attr: EspAttr) -> Result<FlowActionEsp, CreateError> {
        self.offers(Feature::RawPackets)?;
        FlowActionEsp::create(self.maker()?.core, attr)
    }

    /// Makes a completion channel.
    ///
    /// # Errors
    /// [`CreateError::System`] when the system refuses a descriptor.
    pub fn create_comp_channel(&self) -> Result<CompChannel, CreateError> {
        CompChannel::create(self.maker()?.core, self.0.device)
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
        let init = CqInitAttr { channel, comp_vector, cookie, ..CqInitAttr::new(cqe) };
        self.create_cq_ex(&init)
    }

    /// Makes a completion queue with options (`ibv_create_cq_ex`).
    ///
    /// # Errors
    /// [`CreateError`].
    pub fn create_cq_ex(&self, init: &CqInitAttr<'_>) -> Result<Cq, CreateError> {
        Cq::create(self.maker()?.core, &self.0, init)
    }

    /// Reads the oldest asynchronous event (`ibv_get_async_event`). Waits for one unless the program set `O_NONBLOCK`
    /// on the descriptor; holds no lock meanwhile. The log has said why a queue pair failed when this returns.
    ///
    /// # Errors
    /// [`EventError`].
    pub fn get_async_event(&self) -> Result<AsyncEvent, EventError> {
        let event = self.0.events.pop()?;
        if let Some(device) = Device::running() {
            // The log may write to a file, and a thread that is cancelled there would leave its lines behind.
            let _uncancelled = Uncancelled::new();
            device.driver.explain_failures();
        }
        Ok(event)
    }

    /// The descriptor that is readable while an asynchronous event waits.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        self.0.events.fd()
    }

    /// The counters of port 1.
    ///
    /// # Errors
    /// [`CreateError::Device`].
    pub fn counters(&self) -> Result<&'static Counters, CreateError> {
        self.counters_of_port(1)
    }

    /// The counters of a port.
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port that does not exist, [`CreateError::Device`].
    pub fn counters_of_port(&self, port: u8) -> Result<&'static Counters, CreateError> {
        let (device, port) = (self.device()?, self.port(port)?);
        device.counters();
        Ok(device.core.counters_of(port))
    }
}

impl AsFd for Context {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.async_fd()
    }
}

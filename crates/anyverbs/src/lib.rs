//! RDMA verbs anywhere: a complete RDMA device in user space, RoCEv2 on the wire.
//!
//! The device lives in the process that uses this crate. It needs no hardware, no kernel module, no root and no launcher, so
//! `cargo test` is enough.
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use anyverbs::prelude::*;
//!
//! let context = Context::open(&anyverbs::devices()?[0].name)?;
//! let pd = context.alloc_pd()?;
//! let cq = context.create_cq(64, None, 0, 0)?;
//! let client = context.create_default_qp(&pd, &cq, QpType::Rc)?;
//! let server = context.create_default_qp(&pd, &cq, QpType::Rc)?;
//!
//! // Two programs would send each other the bytes of their endpoints.
//! let (ours, theirs) = (context.endpoint(&client)?, context.endpoint(&server)?);
//! context.connect(&client, &ours, &theirs)?;
//! context.connect(&server, &theirs, &ours)?;
//!
//! let table = pd.alloc(4096, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
//! table.write(0, b"a value");
//! let copy = pd.alloc(4096, Access::LOCAL_WRITE)?;
//! client.read(1, &copy.slice(..7), &table.remote(..7))?; // the server's thread does nothing
//! cq.wait(Duration::from_secs(10))?;
//! assert_eq!(copy.slice(..7).to_vec(), b"a value");
//! # Ok(())
//! # }
//! ```
//!
//! # Where to start
//!
//! | for | see |
//! |---|---|
//! | a device and its objects | [`Context`] |
//! | memory | [`PdExt::alloc`], [`PdExt::adopt`], [`Region`], [`Slice`]; of other registrations: [`MrExt`]; names for peers: [`RemoteSlice`] |
//! | a connection by bytes that programs exchange | [`Endpoint`](endpoint::Endpoint), [`Context::endpoint`], [`Context::connect`] |
//! | a connection by address | [`cm`] |
//! | single requests | [`QpExt`]; lists without allocation: [`Qp::post`] |
//! | completions | [`CqExt::wait`], [`Cq::poll`], [`CompChannel`] |
//! | futures | the feature `tokio`: `anyverbs::with_tokio` |
//! | hardware, by the system's libibverbs | the trait [`Verbs`]; the feature `system`: `anyverbs::system` |
//! | tests in virtual time, on a network that loses packets | the trait [`Verbs`]; the feature `simulation`: `anyverbs::simulation` |
//!
//! Every object may be used from any thread. Objects are destroyed by `destroy`, which refuses while others use them
//! (`EBUSY`), or released when dropped and no longer in use. `cookie` arguments are for the caller: events carry them.
//!
//! # The log
//!
//! The device tells why a request, a connection or a call failed, as events of the crate [`tracing`]. They are seen only if the program
//! installs a subscriber, such as that of the crate `tracing-subscriber`:
//!
//! ```ignore
//! use tracing_subscriber::filter::LevelFilter;
//! tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(LevelFilter::WARN).init();
//! ```
//!
//! The level `ERROR` has the failures alone, and `DEBUG` also each call that was refused.
//!
//! # Beside other crates
//!
//! `ibverbs`, `sideway`, `rdma-io` and `async-rdma` use the system's libibverbs and so run on any device that has a provider. They run
//! on this device, too: `anyverbs run -- cargo test`. This crate *is* the device. By its feature `system`, programs for the trait [`Verbs`] run on others as well. The table is of what their
//! documentation said in September 2026; an empty cell is not known.
//!
//! | | this crate | `ibverbs` | `sideway` | `rdma-io` | `async-rdma` | why here |
//! |---|---|---|---|---|---|---|
//! | runs on | this device; by the trait [`Verbs`], any | any | any | any | any | tests need no launcher |
//! | lifetimes | none, reference counts | none, reference counts | reference counts | reference counts | reference counts | objects can be stored anywhere |
//! | memory | [`PdExt::alloc`] and [`PdExt::adopt`] own it, no `unsafe`; [`Pd::reg_mr`] is `unsafe` | `allocate` owns it; registering a raw range is `unsafe` | registers a range | owned | `LocalMr`, typed | a borrowed buffer cannot be safe: peers write it at any time |
//! | access to memory | copies ([`Region::read`]) | references | addresses | | guards | a reference to bytes that a peer writes is undefined behaviour |
//! | where `unsafe` is | at the registration of foreign memory | at the post | at registration and post | within | within | a posted request is checked by key at each access, so it cannot reach freed memory |
//! | type of a queue pair | a value, [`QpType`] | a type parameter | a value | RC | RC | programs choose it when they run ([below](#why-the-transport-is-a-value)) |
//! | connection | [`Context::connect`], [`cm`], or states | endpoints and `handshake` | states | connection manager | one call, with a task on both sides | nothing runs that the program did not start |
//! | posts | [`QpExt`]; lists and [`Poster`] without allocation | batches | guards | futures | futures | a dropped [`Poster`] cannot lose an error: each post returns its own |
//! | errors | name the field, [`errno`](error::CreateError::errno) | name the verb | per call | its own | `io::Error` | |
//! | events | acknowledged on drop; those of [`cm`] by [`ack_events`](cm::Id::ack_events) | descriptors | | tokio | tokio | `destroy` waits for events that were not acknowledged |
//! | futures | feature `tokio`, the caller's runtime | none, descriptors | none | tokio | tokio | no hidden task |
//!
//! # Why the transport is a value
//!
//! [`Qp`] is one type for all transports, and [`QpType`] is a value. With a type `Qp<Ud>` the compiler could refuse a READ by datagrams.
//! This crate has no such type, for three reasons:
//!
//! - Programs choose the transport when they run: by an option, or by the [`Endpoint`](endpoint::Endpoint) of a peer. They would have
//!   each path once a transport.
//! - An [`Id`](cm::Id), a device of the trait [`Verbs`] and the C interface have queue pairs of any transport. Each would need a form
//!   without the type beside the one with it.
//! - The transport decides few of the mistakes. State, sizes, rights of memory and the peer decide the others, when the program runs.
//!
//! A request that a transport does not have completes with an error, as on hardware. `anyverbs explain` tells more of its
//! [cause](CompletionError::cause).
//!
//! ```
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::time::Duration;
//! # use anyverbs::prelude::*;
//! # use anyverbs::WaitError;
//! # let context = Context::open(&anyverbs::devices()?[0].name)?;
//! # let pd = context.alloc_pd()?;
//! # let cq = context.create_default_cq(16)?;
//! let datagrams = context.create_default_qp(&pd, &cq, QpType::Ud)?;
//! let peer = context.endpoint(&datagrams)?;
//! # let memory = pd.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_READ)?;
//! let ah = context.address_of(&pd, &peer)?;
//! let (op, flags) = (SendOp::Read(memory.remote(..8).addr()), SendFlags::SIGNALED);
//! let (sges, ud) = ([memory.slice(8..16).sge()], Some(ah.dest(peer.qpn, peer.qkey)));
//! datagrams.post_send_wr(&SendWr { wr_id: 1, op, flags, sges: &sges, ud, xrc_srqn: 0 })?;
//! let Err(WaitError::Failed(failure)) = cq.wait(Duration::from_secs(10)) else { panic!() };
//! assert_eq!(failure.status, WcStatus::LocQpOpErr);
//! # Ok(())
//! # }
//! ```
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

#[doc(hidden)] // for launchers: the command `anyverbs run`
pub mod abandoned;
pub mod cm;
mod context;
mod device;
pub mod endpoint;
mod ordinary;
pub mod prelude;
pub mod raw;
mod region;
#[cfg(feature = "simulation")]
pub mod simulation;
mod start;
#[cfg(feature = "system")]
pub mod system;
mod verbs;
pub mod watch;
#[cfg(feature = "tokio")]
pub mod with_tokio;

pub use ordinary::{CompletionError, CqExt, PdExt, PostFailure, QpExt, WaitError};
pub use region::{AllocError, MrExt, Region, RemoteSlice, Slice};
pub use start::{Ah, AsyncEvent, CompChannel, Cq, Mr, Mw, Pd, Poster, Qp, Srq};
pub use verbs::{Memory, Verbs};

pub use anyverbs_causes::Cause;
pub use anyverbs_objects::{config, error, limits, persona};
pub use anyverbs_proto::comp_cntr::CompCntrOps;
pub use anyverbs_proto::counters::{Counter, Counters};
pub use anyverbs_proto::cq::Moderation;
pub use anyverbs_proto::memory::Fault;
pub use anyverbs_proto::mr::{Access, Bind, WindowType};
pub use anyverbs_proto::qp::PostSendError;
pub use anyverbs_proto::qp::attr::{
    ModifyError, QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType,
};
pub use anyverbs_proto::qp::drops::{DropReason, Drops, Failed, Lost};
pub use anyverbs_proto::qp::pacing::{RateLimit, static_rate_mbps};
pub use anyverbs_proto::recv_queue::PostRecvError;
pub use anyverbs_proto::tag_list::{MAX_TAG_SGE, TagAdd, TagError, TagHandle};
pub use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, QKey, Qpn, timer_code};
pub use anyverbs_proto::wc::{TmInfo, Wc, WcDetail, WcEx, WcFlags, WcOpcode, WcStatus};
pub use anyverbs_proto::wire::feth::{Feth, Placement, Selectivity};
pub use anyverbs_proto::wr::{
    AddressVector, MAX_MESSAGE, MAX_SGE, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, UdDest,
};

/// A program's own allocator, for the queues of objects that are made on a parent domain (`ibv_alloc_parent_domain(3)`).
///
/// Where [`lend`](Lender::lend) returns `None`, the call that makes or resizes the object fails with `ENOMEM`. Both methods may be called by
/// any thread that makes, resizes, destroys or drops an object. They may use the device, since no queue is locked meanwhile.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::alloc::{self, Layout};
/// use std::ptr::NonNull;
/// use std::sync::Arc;
/// use anyverbs::prelude::*;
/// use anyverbs::{Lender, Queue, QueueMemory, SrqInitAttr};
///
/// struct Heap;
///
/// // SAFETY: the heap gives memory of the layout, to nobody else meanwhile.
/// unsafe impl Lender for Heap {
///     fn lend(&self, queue: Queue, layout: Layout) -> Option<NonNull<u8>> {
///         println!("{} bytes for a queue of {queue:?}", layout.size());
///         // SAFETY: queues of no size are not asked for.
///         NonNull::new(unsafe { alloc::alloc(layout) })
///     }
///
///     unsafe fn take_back(&self, _: Queue, at: NonNull<u8>, layout: Layout) {
///         // SAFETY: `lend` took it from there with this layout.
///         unsafe { alloc::dealloc(at.as_ptr(), layout) };
///     }
/// }
///
/// let context = Context::open(&anyverbs::devices()?[0].name)?;
/// let pd = context.alloc_pd()?.parent_domain(None, QueueMemory::lent(Arc::new(Heap)))?;
/// let srq = pd.create_srq(&SrqInitAttr { max_wr: 8, max_sge: 1, cookie: 0 })?;
/// # let _ = srq;
/// # Ok(())
/// # }
/// ```
pub use anyverbs_queue_memory::Lender;
pub use anyverbs_queue_memory::{OutOfMemory, Queue, QueueMemory};

pub use anyverbs_objects::advise::Advice;
pub use anyverbs_objects::ah::AhAttr;
pub use anyverbs_objects::async_event::{AsyncEventKind, EventElement};
pub use anyverbs_objects::buf::Buf;
pub use anyverbs_objects::comp_channel::CompEvent;
pub use anyverbs_objects::comp_cntr::{CompCntr, CompCntrKind};
pub use anyverbs_objects::cq::{CqFields, CqInitAttr};
pub use anyverbs_objects::dm::Dm;
pub use anyverbs_objects::dmah::{Dmah, DmahAttr};
pub use anyverbs_objects::gid::{GidEntry, GidKind};
pub use anyverbs_objects::mr::Rereg;
pub use anyverbs_objects::mw::BindInfo;
pub use anyverbs_objects::srq::tag_matching::{TagOp, TagOpKind, TmSrqInitAttr};
pub use anyverbs_objects::srq::{SrqAttr, SrqInitAttr, SrqPoster};
pub use anyverbs_objects::td::Td;
pub use anyverbs_transport::qp::{QpInitAttr, XrcSendInitAttr};
pub use anyverbs_xrc::{Xrcd, XrcdInitAttr};
pub use context::Context;
pub use device::{Details, DeviceInfo, PortAttr, PortDetails, PortState, devices};

// For the C interface, the rsockets and the command: none of these is part of the Rust API.
#[doc(hidden)]
pub use anyverbs_net::{
    Uncancelled, bound_udp_socket, cancellable, check_room, udp_socket, undone_if_cancelled,
};
#[doc(hidden)]
pub use anyverbs_objects::{base::AT_EXIT, memory::copy_guarded, say_again};
#[doc(hidden)]
pub use anyverbs_transport::process::strike as strike_process;
#[doc(hidden)]
pub use anyverbs_transport::{FaultyCalls, take_faulty_calls};
#[doc(hidden)]
pub use device::{all_devices, device_age, has_failed, is_removed, note_injected};

//! RDMA verbs anywhere: a complete RDMA device in user space, RoCEv2 on the wire.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let device = &anyverbs::devices()?[0];
//! let context = anyverbs::Context::open(&device.name)?;
//! let pd = context.alloc_pd()?;
//! let cq = context.create_cq(64, None, 0, 0)?;
//! # Ok(())
//! # }
//! ```
//!
//! Every object may be used from any thread. Objects are destroyed by `destroy`, which refuses while others use them
//! (`EBUSY`), or released when dropped and no longer in use. `cookie` arguments are for the caller: events carry them.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod abandoned;
pub mod cm;
mod context;
mod device;
pub mod raw;

pub use anyverbs_net::Uncancelled;
pub use anyverbs_objects::{config, error, limits, say_again};
pub use anyverbs_proto::comp_cntr::CompCntrOps;
pub use anyverbs_proto::counters::{Counter, Counters};
pub use anyverbs_proto::cq::Moderation;
pub use anyverbs_proto::memory::Fault;
pub use anyverbs_proto::mr::{Access, Bind, WindowType};
pub use anyverbs_proto::qp::PostSendError;
pub use anyverbs_proto::qp::attr::{
    ModifyError, QpAttr, QpAttrMask, QpCap, QpInit, QpState, QpType,
};
pub use anyverbs_proto::qp::pacing::{RateLimit, static_rate_mbps};
pub use anyverbs_proto::recv_queue::PostRecvError;
pub use anyverbs_proto::tag_list::{MAX_TAG_SGE, TagAdd, TagError, TagHandle};
pub use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, QKey, Qpn};
pub use anyverbs_proto::wc::{TmInfo, Wc, WcDetail, WcEx, WcFlags, WcOpcode, WcStatus};
pub use anyverbs_proto::wire::feth::{Feth, Placement, Selectivity};
pub use anyverbs_proto::wr::{
    AddressVector, MAX_MESSAGE, MAX_SGE, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, UdDest,
};

pub use anyverbs_queue_memory::{Lender, OutOfMemory, Queue, QueueMemory};

pub use anyverbs_objects::Repeats;
pub use anyverbs_objects::advise::Advice;
pub use anyverbs_objects::ah::{Ah, AhAttr};
pub use anyverbs_objects::async_event::{AsyncEvent, AsyncEventKind, EventElement};
#[doc(hidden)]
pub use anyverbs_objects::base::AT_EXIT;
pub use anyverbs_objects::buf::Buf;
pub use anyverbs_objects::comp_channel::{CompChannel, CompEvent};
pub use anyverbs_objects::comp_cntr::{CompCntr, CompCntrKind};
pub use anyverbs_objects::cq::{Cq, CqFields, CqInitAttr};
pub use anyverbs_objects::dm::Dm;
pub use anyverbs_objects::dmah::{Dmah, DmahAttr};
pub use anyverbs_objects::gid::GidEntry;
pub use anyverbs_objects::memory::copy_guarded;
pub use anyverbs_objects::mr::{Mr, Rereg};
pub use anyverbs_objects::mw::{BindInfo, Mw};
pub use anyverbs_objects::pd::Pd;
pub use anyverbs_objects::srq::tag_matching::{TagOp, TagOpKind, TmSrqInitAttr};
pub use anyverbs_objects::srq::{Srq, SrqAttr, SrqInitAttr, SrqPoster};
pub use anyverbs_objects::td::Td;
pub use anyverbs_transport::qp::{Poster, Qp, QpInitAttr, XrcSendInitAttr};
pub use anyverbs_xrc::{Xrcd, XrcdInitAttr};
pub use context::Context;
pub use device::{Details, DeviceInfo, PortAttr, PortState, devices};

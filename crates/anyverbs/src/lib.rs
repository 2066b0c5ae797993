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
mod advise;
mod ah;
mod async_event;
mod base;
mod buf;
mod clock;
pub mod cm;
mod command;
mod comp_channel;
mod comp_cntr;
pub mod config;
mod context;
mod context_cell;
mod cq;
mod device;
mod dm;
mod dmah;
pub mod error;
mod event_queue;
mod fork;
mod gid;
mod gsi;
mod holders;
mod lid;
pub mod limits;
mod link;
mod memory;
mod mr;
mod multicast;
mod mw;
mod pd;
mod privilege;
mod progress;
mod qp;
pub mod raw;
mod repeats;
mod srq;
mod td;
mod xrc;

pub use anyverbs_net::Uncancelled;
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

pub use advise::Advice;
pub use ah::{Ah, AhAttr};
pub use async_event::{AsyncEvent, AsyncEventKind, EventElement};
pub use buf::Buf;
pub use comp_channel::{CompChannel, CompEvent};
pub use comp_cntr::{CompCntr, CompCntrKind};
pub use context::Context;
pub use cq::{Cq, CqFields, CqInitAttr};
pub use device::{Details, DeviceInfo, PortAttr, PortState, devices};
pub use dm::Dm;
pub use dmah::{Dmah, DmahAttr};
pub use gid::GidEntry;
pub use memory::copy_guarded;
pub use mr::{Mr, Rereg};
pub use mw::{BindInfo, Mw};
pub use pd::Pd;
pub use qp::{Poster, Qp, QpInitAttr, XrcSendInitAttr};
pub use repeats::Repeats;
pub use srq::tag_matching::{TagOp, TagOpKind, TmSrqInitAttr};
pub use srq::{Srq, SrqAttr, SrqInitAttr, SrqPoster};
pub use td::Td;
pub use xrc::{Xrcd, XrcdInitAttr};

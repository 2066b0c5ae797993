//! libibverbs: one file for each kind of object, as the manual groups them.

mod ah;
mod comp_channel;
mod comp_cntr;
mod context;
mod cq;
mod cq_ex;
mod device;
mod event;
mod fork;
mod marshall;
mod mr;
mod multicast;
mod parent_domain;
mod pd;
mod port;
mod post;
mod qp;
mod rate;
mod srq;
mod srq_ops;
mod strings;
mod sysfs;
mod unbuilt;
mod wr;
mod xrcd;

// Only the trampolines name them.
#[cfg_attr(test, allow(unused_imports))]
pub(crate) use {
    ah::*, comp_channel::*, comp_cntr::*, context::*, cq::*, cq_ex::*, device::*, event::*,
    fork::*, marshall::*, mr::*, multicast::*, parent_domain::*, pd::*, port::*, post::*, qp::*,
    rate::*, srq::*, srq_ops::*, strings::*, sysfs::*, unbuilt::*, wr::*, xrcd::*,
};

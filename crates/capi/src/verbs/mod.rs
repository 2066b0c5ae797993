//! libibverbs: one file for each kind of object, as the manual groups them.

mod ah;
mod comp_channel;
mod context;
mod counters;
mod cq;
mod cq_ex;
mod device;
mod event;
mod flow;
mod flow_spec;
mod fork;
mod marshall;
mod mr;
mod multicast;
mod pd;
mod port;
mod post;
mod qp;
mod rate;
mod raw_qp;
mod srq;
mod strings;
mod sysfs;
mod unbuilt;
mod wq;
mod wr;
mod xrcd;

// Only the trampolines name them.
#[cfg_attr(test, allow(unused_imports))]
pub(crate) use {
    ah::*, comp_channel::*, context::*, counters::*, cq::*, cq_ex::*, device::*, event::*, flow::*,
    flow_spec::*, fork::*, marshall::*, mr::*, multicast::*, pd::*, port::*, post::*, qp::*,
    rate::*, raw_qp::*, srq::*, strings::*, sysfs::*, unbuilt::*, wq::*, wr::*, xrcd::*,
};

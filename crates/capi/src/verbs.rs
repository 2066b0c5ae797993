//! libibverbs: one file for each kind of object, as the manual groups them.

mod ah;
mod buf;
mod comp_channel;
mod comp_cntr;
mod context;
mod counters;
mod cq;
mod cq_ex;
mod device;
mod dispatch;
mod dm;
mod ece;
mod event;
mod flow;
mod flow_action;
mod flow_spec;
mod fork;
mod import;
mod kinds;
mod marshall;
mod mr;
mod multicast;
mod mw;
mod node;
mod parent_domain;
mod pd;
mod port;
mod post;
mod qp;
mod rate;
mod raw_qp;
mod sanitized;
mod srq;
mod srq_ops;
mod strings;
mod sysfs;
mod unbuilt;
mod watched;
mod wq;
mod wr;
mod xrcd;

// Only the trampolines name them.
#[cfg_attr(test, allow(unused_imports))]
pub(crate) use {
    ah::*,
    buf::*,
    comp_channel::*,
    comp_cntr::*,
    context::*,
    counters::*,
    cq::*,
    cq_ex::*,
    device::*,
    dispatch::*,
    dm::*,
    ece::*,
    event::*,
    flow::*,
    flow_action::*,
    flow_spec::*,
    fork::*,
    import::*,
    marshall::*,
    mr::*,
    multicast::*,
    mw::*,
    parent_domain::*,
    pd::*,
    port::*,
    post::*,
    qp::*,
    rate::*,
    raw_qp::*,
    srq::*,
    srq_ops::*,
    strings::*,
    sysfs::*,
    unbuilt::*,
    watched::{activity, drops_at_exit, waiting},
    wq::*,
    wr::*,
    xrcd::*,
};

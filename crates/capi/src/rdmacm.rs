//! librdmacm: the connection manager.
//!
//! The device's `anyverbs::cm` does the work of the kernel under librdmacm; this module adds librdmacm's part. An id's
//! public fields are updated whenever a call or an event may have changed them (`id::refresh`), so that programs find
//! them as rdma-core leaves them. An id without an event channel has one of its own, and each of its calls waits there
//! (`sync`).

mod addrinfo;
mod channel;
mod connect;
mod cqs;
mod device;
mod ece;
mod ep;
mod event;
mod id;
mod multicast;
mod option;
mod qp;
mod resolve;
mod resolve_addrinfo;
pub(crate) mod sockaddr;
mod srq;
mod strings;
mod sync;

// Only the trampolines name them.
#[cfg_attr(test, allow(unused_imports))]
pub(crate) use {
    addrinfo::*, channel::*, connect::*, device::*, ece::*, ep::*, event::*, id::*, multicast::*,
    option::*, qp::*, resolve::*, resolve_addrinfo::*, sockaddr::*, srq::*, strings::*, sync::*,
};

use crate::{
    abi::{rdma_cm_event, rdma_cm_id, rdma_event_channel},
    errno::{Errno, minus_one},
    object::public_without_handle,
};

public_without_handle! {
    rdma_event_channel => ChannelInner;
    rdma_cm_id => IdInner;
    rdma_cm_event => EventInner;
}

/// 0, or -1 with `errno`: nearly all of librdmacm.
fn zero(call: &str, result: Result<(), Errno>) -> std::ffi::c_int {
    minus_one(call, result.map(|()| 0))
}

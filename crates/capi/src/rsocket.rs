//! rsockets: `anyverbs_rsocket`'s calls as `rsocket.h` has them. Beyond rdma-core's, `socket(2)`'s flags may be added to a type.
//!
//! EPIPE comes without SIGPIPE, as with rdma-core; the preload object raises that for programs that expect it.

mod data;
mod epoll;
mod iomap;
mod names;
mod option;
mod poll;
mod select;

use std::ffi::c_int;

// Only the trampolines name them.
#[cfg_attr(test, allow(unused_imports))]
pub(crate) use {data::*, epoll::*, iomap::*, names::*, option::*, poll::*, select::*};

use crate::{
    cancel::Uncancelled,
    errno::{Errno, minus_one},
    log,
};

impl From<anyverbs_rsocket::Errno> for Errno {
    fn from(errno: anyverbs_rsocket::Errno) -> Self {
        Self::said(errno.0)
    }
}

fn zero(call: &str, result: Result<(), Errno>) -> c_int {
    minus_one(call, result.map(|()| 0))
}

/// The number, or -1 with `errno`.
fn size(result: Result<usize, Errno>) -> libc::ssize_t {
    match result.map(libc::ssize_t::try_from) {
        Ok(Ok(n)) => n,
        Ok(Err(_)) => {
            Errno::said(libc::EOVERFLOW).set();
            -1
        }
        Err(errno) => {
            errno.set();
            -1
        }
    }
}

/// `rsocket`.
pub(crate) unsafe extern "C" fn rsocket(domain: c_int, kind: c_int, protocol: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    log::init();
    minus_one("rsocket", anyverbs_rsocket::socket(domain, kind, protocol).map_err(Errno::from))
}

/// `rlisten`.
pub(crate) unsafe extern "C" fn rlisten(socket: c_int, backlog: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rlisten",
        anyverbs_rsocket::get(socket).and_then(|s| s.listen(backlog)).map_err(Errno::from),
    )
}

/// `rshutdown`: waits until the peer's device has all data sent.
pub(crate) unsafe extern "C" fn rshutdown(socket: c_int, how: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    let (read, write) = match how {
        libc::SHUT_RD => (true, false),
        libc::SHUT_WR => (false, true),
        libc::SHUT_RDWR => (true, true),
        _ => {
            Errno::said(libc::EINVAL).set();
            return -1;
        }
    };
    zero(
        "rshutdown",
        anyverbs_rsocket::get(socket).and_then(|s| s.shutdown(read, write)).map_err(Errno::from),
    )
}

/// `rclose`.
pub(crate) unsafe extern "C" fn rclose(socket: c_int) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero("rclose", anyverbs_rsocket::close(socket).map_err(Errno::from))
}

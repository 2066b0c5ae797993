//! The libc functions that this object defines.
//!
//! `fcntl` and `ioctl` are variadic in C. Here they take a fixed argument. On x86-64 and AArch64 Linux a variadic
//! integer or pointer travels in the same register. Its content is ignored where the command takes none.

mod data;
mod descriptor;
mod epoll;
mod option;
mod poll;
mod setup;

use core::ffi::c_int;

use crate::rdma::{Rdma, rdma};
use crate::table;

/// The rsocket beside a descriptor, and the library to call for it.
#[inline]
fn beside(fd: c_int) -> Option<(&'static Rdma, c_int)> {
    let socket = table::get(fd)?;
    Some((rdma()?, socket))
}

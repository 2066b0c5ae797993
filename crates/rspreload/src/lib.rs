//! Preload object that gives ordinary socket programs rsockets (`librspreload.so` of `rsocket(7)`).
//!
//! A TCP socket of the program stays the same to the system: a descriptor of a TCP socket, which can be duplicated, set
//! up and queried as ever. An rsocket stands beside it (`table`), and the calls that connect and move data go there.
//! They go to `librdmacm.so.1`, which lies in this object's directory and is loaded when the first socket is made.
//! Where no RDMA connection can be had, the TCP socket connects, and the rsocket goes.
//!
//! Streams become rsockets, unless `ANYVERBS_SOCKETS` or `/etc/rdma/rsocket/preload_config` say otherwise (`config`).
//!
//! Bounds: programs that make system calls without libc (static ones, Go), and libc's own use of a socket (`fdopen`) go
//! past this object. Another program after `fork` and `exec` has the TCP socket alone, which is not connected. A
//! listener takes RDMA connections only.
//!
//! The library is loaded so that its own calls do not come back here (`RTLD_DEEPBIND`). Descriptors that are not in the
//! table cost a bounds check and a load.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod bell;
mod calls;
mod config;
mod rdma;
mod real;
mod table;

/// Resolves everything before `main`, so that later calls, in a `vfork` child above all, need no dynamic linker.
extern "C" fn init() {
    for function in real::ALL {
        function.resolve();
    }
    table::init();
}

#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

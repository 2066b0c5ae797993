//! Preload object that shows `/sys/class/infiniband` and `/dev/infiniband` to a program without root.
//!
//! With `ANYVERBS_VIEW=<dir>` in the environment, every libc call that takes one of the [`path::ROOTS`] is answered
//! from the tree below `<dir>` (`<dir>/sys/class/infiniband/...`, `<dir>/dev/infiniband/...`). Without the variable,
//! and for every other path, a call costs a few byte comparisons and goes straight on to libc.
//!
//! RDMA netlink sockets are answered from the same tree ([`netlink`]): `rdma link` shows the device.
//!
//! Bounds: programs that make system calls without libc (static ones, Go), and listings of the directories *above* a
//! root (`ls /sys/class`), see the machine as it is.
//!
//! The object allocates nothing, takes no lock and uses nothing of `std` that could call back into libc's file
//! functions, which resolve to this object. It may run in a `vfork` child, in a signal handler and before `main`. Many
//! of these calls are cancellation points: a cancelled thread unwinds through the frames of this object. That works
//! because they hold nothing to drop, and because libc is called as `C`, not `C-unwind`: the latter aborts the process
//! under `panic = "abort"`.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod answer;
mod calls;
mod netlink;
mod path;
mod real;
mod tree;

#[cfg(test)]
mod tests;

/// Resolves everything before `main`, so that later calls, in a `vfork` child above all, need no dynamic linker.
extern "C" fn init() {
    anyverbs_sanitizers::init();
    tree::init();
    answer::init();
    for function in real::ALL {
        function.resolve();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static INIT: extern "C" fn() = init;

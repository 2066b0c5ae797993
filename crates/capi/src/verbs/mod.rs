//! libibverbs: one file for each kind of object, as the manual groups them.

mod device;
mod fork;
mod marshall;
mod rate;
mod strings;
mod sysfs;
mod unbuilt;

// Only the trampolines name them.
#[cfg_attr(test, allow(unused_imports))]
pub(crate) use {device::*, fork::*, marshall::*, rate::*, strings::*, sysfs::*, unbuilt::*};

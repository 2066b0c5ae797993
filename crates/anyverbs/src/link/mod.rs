//! Links: how packets get from one queue pair to another.

pub(crate) mod direct;
mod handing;
pub(crate) mod inproc;
pub(crate) mod mapped;
pub(crate) mod shm;
pub(crate) mod udp;

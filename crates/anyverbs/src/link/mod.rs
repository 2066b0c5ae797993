//! Links: how packets get from one queue pair to another.

pub(crate) mod inproc;
pub(crate) mod udp;

//! Connections of processes that were killed, as their launcher sees them.
//!
//! Processes of the device write down their connections to other hosts in a journal of the host, which exists as long
//! as one process that joined it. They end the connections of processes that are killed. A launcher joins as well, so
//! that its program's connections are known when no other process is left.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use anyverbs_net::host::WAIT;
use anyverbs_net::{Journal, Registry, Store};
use anyverbs_objects::error::OpenError;

use crate::device::Device;

/// The store that the processes of a host share, for a tool that is no process of the device. A host has few places for such.
#[derive(Clone, Debug)]
pub struct Membership(pub(crate) Arc<Store>);

impl Membership {
    /// Joins the processes of the registry of this name that share this UDP port ([`Details`](crate::Details)).
    ///
    /// # Errors
    /// Those of memory files, and `InvalidInput` for a bad name.
    pub fn join(registry: &str, port: u16) -> io::Result<Self> {
        Store::join(&Registry::of_port(registry, port)?).map(Self)
    }
}

/// Keeps the records of killed processes, without being a process of the device.
#[derive(Debug)]
pub struct Keeper(Arc<Journal>);

impl Keeper {
    /// For the processes of this host.
    ///
    /// # Errors
    /// Why there is no journal.
    pub fn new(host: &Membership) -> io::Result<Self> {
        Journal::join(&host.0).map(Self)
    }

    /// Whether a process has ended and left connections, to be ended by [`disconnect`].
    ///
    /// # Errors
    /// Those of pread(2).
    pub fn has_any(&self) -> io::Result<bool> {
        self.0.has_abandoned()
    }
}

/// Ends the connections that processes of this host left: sends their peers DREQs, four times at most, and waits for the
/// answers, for two seconds at most. Starts the process's device. 0 if all peers have answered, else how many have not. Those that were asked for half
/// of the time at least nobody asks again; the others, also those that this process has no address for, are left to other
/// processes.
///
/// # Errors
/// Why there is no device.
pub fn disconnect() -> Result<usize, OpenError> {
    let device = Device::current()?;
    let end = Instant::now() + WAIT;
    // Again, because there may not have been room for all.
    loop {
        device.gsi.look_for_abandoned();
        let begun = device.gsi.abandoned() > 0;
        device.gsi.await_abandoned(end);
        if !begun || Instant::now() >= end {
            return Ok(device.gsi.leave_abandoned(WAIT / 2));
        }
    }
}

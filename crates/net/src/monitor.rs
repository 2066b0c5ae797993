//! A pollable "interfaces or addresses have changed".

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::netlink;

/// Becomes readable when links or addresses of this network namespace change. Subscribe first, then read
/// [`crate::interfaces()`]: then nothing is missed.
#[derive(Debug)]
pub struct AddressMonitor {
    fd: OwnedFd,
}

impl AddressMonitor {
    /// Subscribes.
    ///
    /// # Errors
    /// Those of socket(2) and bind(2).
    pub fn new() -> io::Result<Self> {
        let groups = libc::RTMGRP_LINK | libc::RTMGRP_IPV4_IFADDR | libc::RTMGRP_IPV6_IFADDR;
        Ok(Self { fd: netlink::open(groups as u32, true)? })
    }

    /// Takes all notifications. Tells whether there was any. A loss of some for want of buffer counts as a change.
    ///
    /// # Errors
    /// Those of recv(2).
    pub fn drain(&self) -> io::Result<bool> {
        netlink::drain(&self.fd)
    }
}

impl AsFd for AddressMonitor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

//! Links: how packets get from one queue pair to another. `docs/design/links.md` tells how to add one.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod direct;
pub mod inproc;
pub mod mapped;
pub mod outbox;
pub mod pace;
pub mod path;
pub mod route;
pub mod shm;
pub mod udp;

use std::sync::atomic::AtomicU64;

use anyverbs_net::UdpPort;
use anyverbs_objects::base::{Core, Waker};
use anyverbs_proto::time::Time;

use inproc::Inproc;
use path::Paths;
use shm::Shm;
use udp::BatchPool;

/// The links of a device, and what sending by them needs.
#[derive(Debug)]
pub struct Links {
    /// The device.
    pub core: &'static Core,
    /// UDP.
    pub port: UdpPort,
    /// The link to other processes of this user, unless it is switched off.
    pub shm: Option<Shm>,
    /// Within this process.
    pub inproc: Inproc,
    /// Batches of datagrams to be filled.
    pub batches: BatchPool,
    /// Paths to other hosts.
    pub paths: Paths,
    /// Packets that the kernel would not send.
    pub send_drops: AtomicU64,
    /// Wakes the worker.
    pub waker: Waker,
}

impl Links {
    /// Asks for credit again at this time. A program that polls does that itself: the worker, woken, would only take the
    /// processor from the thread whose locks it needs.
    pub(crate) fn wait_for_credit(&self, until: Time) {
        self.paths.wait_until(until);
        self.wake_before(until);
    }

    /// The worker is to look at the clock at this time, if no thread polls.
    pub fn wake_before(&self, until: Time) {
        self.waker.wake_before(until.as_nanos());
    }
}

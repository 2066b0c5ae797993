//! Links: how packets get from one queue pair to another.

pub(crate) mod direct;
pub(crate) mod inproc;
pub(crate) mod mapped;
pub(crate) mod pace;
pub(crate) mod path;
pub(crate) mod shm;
pub(crate) mod udp;

use std::sync::atomic::AtomicU64;

use anyverbs_net::UdpPort;
use anyverbs_proto::time::Time;

use crate::base::{Core, Waker};
use inproc::Inproc;
use path::Paths;
use shm::Shm;
use udp::BatchPool;

/// The links of a device, and what sending by them needs.
#[derive(Debug)]
pub(crate) struct Links {
    pub(crate) core: &'static Core,
    pub(crate) port: UdpPort,
    /// The link to other processes of this user, unless it is switched off.
    pub(crate) shm: Option<Shm>,
    pub(crate) inproc: Inproc,
    pub(crate) batches: BatchPool,
    pub(crate) paths: Paths,
    /// Packets that the kernel would not send.
    pub(crate) send_drops: AtomicU64,
    pub(crate) waker: Waker,
}

impl Links {
    /// Asks for credit again at this time. A program that polls does that itself: the worker, woken, would only take the
    /// processor from the thread whose locks it needs.
    pub(crate) fn wait_for_credit(&self, until: Time) {
        self.paths.wait_until(until);
        self.wake_before(until);
    }

    /// The worker is to look at the clock at this time, if no thread polls.
    pub(crate) fn wake_before(&self, until: Time) {
        self.waker.wake_before(until.as_nanos());
    }
}

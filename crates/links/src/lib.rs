//! Links: how packets get from one queue pair to another. `docs/design/links.md` tells how to add one.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod direct;
pub mod faults;
pub mod inproc;
pub mod mapped;
mod outgoing;
pub mod pace;
pub mod path;
pub mod route;
pub mod shm;
pub mod times;
pub mod udp;
pub mod why;

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use anyverbs_net::shm::{Manner, Poller};
use anyverbs_net::{PortOptions, ROOM, Slot, SteerByKind, UdpPort, check_room};
use anyverbs_objects::base::{Core, NEVER, Waker};
use anyverbs_objects::config::Config;
use anyverbs_objects::error::OpenError;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Qpn};
use anyverbs_record::capture::Capture;
use anyverbs_record::trace::Trace;

use faults::Faults;
use inproc::Inproc;
use path::Paths;
use shm::Shm;
use udp::BatchPool;

/// The links of a process that has no device yet, since opening them may fail.
#[derive(Debug)]
pub struct Opened {
    /// UDP.
    pub port: UdpPort,
    /// The link to other processes of this user, unless it is switched off.
    pub shm: Option<Shm>,
    /// Takes all packets, if somebody wants to see them.
    pub capture: Option<Arc<Capture>>,
    /// Takes all work, if somebody wants to see it.
    pub trace: Option<Trace>,
    /// Wakes the worker.
    pub waker: Waker,
}

impl Opened {
    /// Opens the links of the process that has a slot of the host. `steer_by_kind` says which process gets packets to QP1;
    /// any if absent. Beside them is the receiving side of the same-host link.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn new(
        config: &Config,
        slot: Arc<Slot>,
        steer_by_kind: Option<SteerByKind>,
    ) -> Result<(Self, Option<Poller>), OpenError> {
        // Before others can know the slot: a process that sends here by UDP has found no listener at the link.
        let (shm, poller) = config
            .shm
            .then(|| {
                let made = Shm::new(&slot, config.direct, config.ports.len())?;
                // It takes more than all the rest, which can do without it.
                check_room(ROOM).map(|()| made)
            })
            .transpose()
            .inspect_err(|error| tracing::warn!(%error, "no link through shared memory"))
            .ok()
            .flatten()
            .unzip();
        let port = UdpPort::open(PortOptions {
            slot: Some(slot),
            steer_offset: 5, // top byte of the BTH's destination QPN
            steer_by_kind,
            probe_byte: 0xff, // an opcode of the manufacturers' range that this device does not use
            receive_buffer: config.udp.receive_buffer,
            gso: config.udp.gso,
            id_of: udp::ip_id,
            ..PortOptions::new(config.udp_port)
        })?;
        let failed = |what| move |source| OpenError::System { what, source };
        let capture = config.capture.as_deref().map(Capture::create).transpose();
        let capture = capture.map_err(failed("write the capture"))?.map(Arc::new);
        let trace = config.trace.as_deref().map(Trace::create).transpose();
        let trace = trace.map_err(failed("write the trace"))?;
        if let Some(capture) = &capture {
            port.set_capture(Arc::clone(capture));
        }
        let waker =
            Waker::new().map_err(|source| OpenError::System { what: "make an eventfd", source })?;
        Ok((Self { port, shm, capture, trace, waker }, poller))
    }

    /// As [`Links::fds`].
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.port.fds()
    }
}

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
    /// Takes all packets, if somebody wants to see them.
    pub capture: Option<Arc<Capture>>,
    /// Takes all work, if somebody wants to see it.
    pub trace: Option<Trace>,
    /// The script of faults, if there is one.
    pub faults: Option<Faults>,
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
    /// Whether a script of this process loses packets now.
    pub(crate) fn loses_packets(&self) -> bool {
        self.faults.as_ref().is_some_and(Faults::loses_packets)
    }

    /// The rules of the script have changed: other processes of this host hear what it does to packets.
    pub fn tell_of_rules(&self) {
        if let Some(shm) = &self.shm {
            // Rules may come later, and count packets from the first one on.
            let takes_long = self.faults.is_none();
            shm.endpoint().say(Manner { loses: self.loses_packets(), takes_long });
        }
    }

    /// Whether all that queue pairs do has to be packets, as a network has them: they are recorded, a script of faults changes
    /// them, or they may have P_Keys other than the default. A lane has no place for a P_Key.
    pub fn needs_packets(&self) -> bool {
        self.is_recorded() || self.may_drop()
    }

    /// Whether ACKs may go with requests by UDP. Otherwise each is a packet of its own, as RoCEv2 has them.
    pub(crate) fn may_carry_acks(&self) -> bool {
        !self.needs_packets()
    }

    /// Whether packets may be lost that no network has: by a script of faults, or by their P_Keys.
    pub(crate) fn may_drop(&self) -> bool {
        self.faults.is_some() || self.core.config.partitioned
    }

    /// Whether a capture or a trace is written.
    pub fn is_recorded(&self) -> bool {
        self.capture.is_some() || self.trace.is_some()
    }

    /// Whether a port is down, because a script of faults says so.
    pub fn is_down(&self, port: usize) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.is_down(port))
    }

    /// Whether the port that has an address is down, or a script of faults has taken the address away.
    pub fn is_cut(&self, gid: Gid) -> bool {
        let Some(faults) = &self.faults else { return false };
        match self.core.gids.find(gid, 0) {
            Some(entry) => faults.is_down(entry.port_place()),
            None => faults.lacks_gids() && !gid.is_multicast(),
        }
    }

    /// The most descriptors that [`fds`](Self::fds) gives.
    pub const MOST_FDS: usize = 3;

    /// The links of a device.
    pub fn new(core: &'static Core, Opened { port, shm, capture, trace, waker }: Opened) -> Self {
        let faults = Faults::new(&core.config);
        faults.iter().flat_map(Faults::failed).for_each(|device| core.fail(device));
        for (port, index, rule) in faults.iter().flat_map(Faults::gids_gone_at_start) {
            core.gids.withhold(port, index, rule.named());
        }
        let links = Self {
            core,
            port,
            shm,
            inproc: Inproc::default(),
            capture,
            trace,
            faults,
            batches: BatchPool::default(),
            paths: Paths::new(core.config.udp.window),
            send_drops: AtomicU64::new(0),
            waker,
        };
        links.tell_of_rules();
        links
    }

    /// The descriptors at which a thread sleeps that waits for packets, always in one order. The same-host link has none:
    /// its writers wake the worker.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.port.fds()
    }

    /// When [`expire`](Self::expire) has something to do, in nanoseconds.
    pub fn next(&self) -> u64 {
        let faults = self.faults.as_ref().map_or(NEVER, Faults::next);
        self.paths.next().min(self.shm.as_ref().map_or(NEVER, Shm::next)).min(faults)
    }

    /// Does what is due, and gives the queue pairs that may send again.
    pub fn expire(&self, now: Time, resume: &mut Vec<Qpn>) {
        self.paths.expire(now, resume);
        if let Some(shm) = &self.shm {
            shm.expire(now, resume);
        }
    }

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

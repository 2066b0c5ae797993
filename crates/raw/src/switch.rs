//! The switch that raw queue pairs are plugged into: the rules of this process, and the sockets to the other processes
//! of the host and to the real interface.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use anyverbs_locks::{Mutex, RwLock, rank};
use anyverbs_net::ethernet::{EthernetSocket, FrameBatch, FrameBuffers, check_permission};
use anyverbs_objects::base::Core;
use anyverbs_objects::cq::CqCell;
use anyverbs_objects::error::CreateError;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::raw::checksum;
use anyverbs_proto::raw::flow::{FlowRule, FlowTable, Verdict};
use anyverbs_proto::raw::frame::Frame;
use anyverbs_proto::types::Qpn;
use anyverbs_transport::progress::Frames;
use anyverbs_transport::qp::transport::Transport;

use super::counters::CountersCell;
use super::flow_action::EspCell;
use super::qp::RawCell;
use super::receive::Arrived;

/// Rules of a process.
const MAX_FLOWS: usize = 65_536;
/// Batches that are read from a socket before anything else is looked at.
const BATCHES: usize = 4;

/// Where a rule leads.
#[derive(Debug)]
pub(super) struct Destination {
    pub(super) qp: Arc<RawCell>,
    pub(super) counters: Option<Arc<CountersCell>>,
    pub(super) esp: Option<Arc<EspCell>>,
}

/// A user of completion queues, which fails when one has overrun.
pub(super) trait CqUser: Send + Sync + std::fmt::Debug {
    /// Whether it completes in one of some CQs.
    fn uses(&self, which: &dyn Fn(&Arc<CqCell>) -> bool) -> bool;

    /// Whether it is of a device.
    fn belongs_to(&self, device: usize) -> bool;

    /// One of its CQs has overrun, or its device has failed.
    fn fail(&self);
}

/// Raw packets of a device: rules, receivers and sockets.
#[derive(Debug)]
pub struct Switch {
    pub(super) transport: &'static Transport,
    rules: RwLock<rank::FlowRules, Rules>,
    /// Made with the first queue pair.
    sockets: OnceLock<Vec<EthernetSocket>>,
    opening: Mutex<rank::RawOpening, ()>,
    /// The sockets receive: there is or was a rule.
    listens: AtomicBool,
    /// Made with the first rule.
    buffers: Mutex<rank::FrameBuffers, Option<FrameBuffers>>,
    members: Mutex<rank::FanoutMembers, Vec<Weak<dyn CqUser>>>,
}

#[derive(Debug, Default)]
struct Rules {
    table: FlowTable<Destination>,
    len: usize,
}

fn refused(what: &str, error: &std::io::Error) -> CreateError {
    match error.raw_os_error() {
        Some(libc::EPERM) => CreateError::NotPermitted,
        errno => {
            anyverbs_objects::say_again!(error, 0, "raw packets: {what}: {error}");
            CreateError::System(errno.unwrap_or(libc::EIO))
        }
    }
}

/// A receiver of a frame, and its verdict.
type Recipient<'a> = (&'a Destination, Verdict);

/// Delivers the result of a flow action.
fn receive(bytes: &[u8], first: Recipient<'_>, more: &[Recipient<'_>]) {
    let Some(frame) = Frame::parse(bytes) else { return };
    let arrived = Arrived::new(&frame);
    for (dest, verdict) in std::iter::once(&first).chain(more) {
        dest.qp.receive(&arrived, verdict.tag);
    }
}

impl Switch {
    /// No rules.
    pub fn new(transport: &'static Transport) -> Self {
        Self {
            transport,
            rules: RwLock::default(),
            sockets: OnceLock::new(),
            opening: Mutex::default(),
            listens: AtomicBool::new(false),
            buffers: Mutex::default(),
            members: Mutex::default(),
        }
    }

    pub(super) fn core(&self) -> &'static Core {
        self.transport.core
    }

    /// Checks that the process may send and receive raw packets, and opens the sockets.
    pub(super) fn open(&self) -> Result<(), CreateError> {
        check_permission().map_err(|error| refused("the system refuses a socket", &error))?;
        let _opening = self.opening.lock();
        if self.sockets.get().is_some() {
            return Ok(());
        }
        let mut sockets = Vec::new();
        let config = &self.core().config;
        match EthernetSocket::between_processes(&format!("{}:{}", config.registry, config.udp_port))
        {
            Ok(socket) => sockets.push(socket),
            Err(error) => {
                tracing::warn!(%error, "raw packets stay within the process");
            }
        }
        if let Some(interface) = &config.raw_interface {
            let socket = EthernetSocket::on_interface(interface)
                .map_err(|error| refused(&format!("interface {interface:?}"), &error))?;
            sockets.push(socket);
        }
        let _ = self.sockets.set(sockets);
        Ok(())
    }

    /// Enters a rule; its number. The first one has the sockets receive.
    pub(super) fn insert(
        &'static self,
        rule: FlowRule,
        dest: Destination,
    ) -> Result<u64, CreateError> {
        check_permission().map_err(|error| refused("the system refuses a socket", &error))?;
        let mut rules = self.rules.write();
        if rules.len >= MAX_FLOWS {
            return Err(CreateError::Exhausted("flow rules"));
        }
        rules.len += 1;
        let id = rules.table.insert(rule, dest);
        let receives = !rules.table.is_empty();
        drop(rules);
        if receives && let Err(error) = self.listen() {
            drop(self.remove(id));
            return Err(error);
        }
        Ok(id)
    }

    pub(super) fn remove(&self, id: u64) -> Option<Destination> {
        let mut rules = self.rules.write();
        let removed = rules.table.remove(id);
        rules.len -= usize::from(removed.is_some());
        removed
    }

    fn listen(&'static self) -> Result<(), CreateError> {
        let _opening = self.opening.lock();
        if self.is_listening() {
            return Ok(());
        }
        for socket in self.sockets() {
            socket.listen().map_err(|error| refused("receiving", &error))?;
        }
        *self.buffers.lock() = Some(FrameBuffers::default());
        self.listens.store(true, Ordering::Release);
        if let Err(error) = self.core().progress().watch(self.fds()) {
            tracing::warn!(%error, "frames are received while the program polls, and not else");
        }
        Ok(())
    }

    fn is_listening(&self) -> bool {
        self.listens.load(Ordering::Acquire)
    }

    fn sockets(&self) -> &[EthernetSocket] {
        self.sockets.get().map_or(&[], Vec::as_slice)
    }

    /// Remembers users of completion queues.
    pub(super) fn join(&self, member: Weak<dyn CqUser>) {
        let mut members = self.members.lock();
        members.retain(|member| member.strong_count() > 0);
        members.push(member);
    }

    fn fail_members(&self, which: impl Fn(&dyn CqUser) -> bool) {
        let members: Vec<_> = self.members.lock().iter().filter_map(Weak::upgrade).collect();
        members.iter().filter(|member| which(&***member)).for_each(|member| member.fail());
    }

    /// Delivers a frame as the rules say. `from` sent it: a switch does not send back.
    fn deliver(&self, frame: &Frame<'_>, from: Option<Qpn>) {
        let arrived = Arrived::new(frame);
        let rules = self.rules.read();
        // The receivers of a copy, by action: each action takes a packet once. Few rules have twins, and none has twins
        // of many actions.
        let mut first: Option<(&Arc<EspCell>, Recipient<'_>)> = None;
        let mut more: Vec<(&Arc<EspCell>, Recipient<'_>)> = Vec::new();
        rules.table.steer(frame, |dest, verdict| {
            if let Some(counters) = &dest.counters {
                counters.count(frame.bytes.len());
            }
            if verdict.drop || from == Some(dest.qp.qpn()) {
                return;
            }
            let Some(esp) = &dest.esp else { return dest.qp.receive(&arrived, verdict.tag) };
            match first {
                None => first = Some((esp, (dest, verdict))),
                Some(_) => more.push((esp, (dest, verdict))),
            }
        });
        let mut next = first;
        while let Some((esp, recipient)) = next {
            let same = more.extract_if(.., |(other, _)| Arc::ptr_eq(other, esp));
            let same: Vec<_> = same.map(|(_, recipient)| recipient).collect();
            esp.apply(frame, |bytes| receive(bytes, recipient, &same));
            next = more.pop();
        }
    }

    /// Sends a frame of a queue pair. It goes to others of this process at once, and to all else by way of
    /// `batch`, which is sent when it is full.
    pub(super) fn send(&self, from: &RawCell, bytes: &[u8], batch: &mut FrameBatch) {
        let Some(frame) = Frame::parse(bytes) else { return };
        let rules = self.rules.read();
        let any = !rules.table.is_empty();
        if rules.table.has_egress() {
            let mut esp = None;
            let leaves = rules.table.leave(&frame, |dest| {
                if let Some(counters) = &dest.counters {
                    counters.count(bytes.len());
                }
                esp.clone_from(&dest.esp);
            });
            if !leaves {
                return;
            }
            if let Some(esp) = esp {
                drop(rules);
                return esp.apply(&frame, |bytes| {
                    if let Some(frame) = Frame::parse(bytes) {
                        self.transmit(from, &frame, any, batch);
                    }
                });
            }
        }
        drop(rules);
        self.transmit(from, &frame, any, batch);
    }

    /// Sends a frame as it is; `any`: there are rules for received frames.
    fn transmit(&self, from: &RawCell, frame: &Frame<'_>, any: bool, batch: &mut FrameBatch) {
        let bytes = frame.bytes;
        if any {
            self.deliver(frame, Some(from.qpn()));
        }
        let counters = self.core().counters_of(from.port());
        counters.add(Counter::SentPkts, 1);
        counters.add(Counter::SentBytes, bytes.len() as u64);
        batch.push(bytes);
        if batch.is_full() {
            self.flush(batch);
        }
    }

    /// Sends waiting frames.
    pub(super) fn flush(&self, batch: &mut FrameBatch) {
        if batch.is_empty() {
            return;
        }
        for socket in self.sockets() {
            let lost = socket.send(batch);
            self.transport.links.send_drops.fetch_add(lost as u64, Ordering::Relaxed);
        }
        batch.clear();
    }

    fn take_in(&self, bytes: &[u8]) {
        if let Some(frame) = Frame::parse(bytes) {
            self.deliver(&frame, None);
        }
    }

    /// Frames that found a socket's buffer full.
    pub fn dropped_frames(&self) -> u64 {
        self.sockets().iter().map(EthernetSocket::dropped).sum()
    }
}

impl Frames for Switch {
    fn dropped(&self) -> u64 {
        self.dropped_frames()
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        let sockets = if self.is_listening() { self.sockets() } else { &[] };
        sockets.iter().map(AsFd::as_fd).collect()
    }

    fn receive(&self) -> usize {
        let Some(mut buffers) = self.buffers.try_lock() else { return 0 };
        let Some(buffers) = &mut *buffers else { return 0 };
        let mut n = 0;
        for socket in self.sockets() {
            for _ in 0..BATCHES {
                let received = socket.receive(buffers).unwrap_or_else(|error| {
                    tracing::debug!(%error, "receiving frames");
                    0
                });
                for received in buffers.frames() {
                    if received.checksum_pending {
                        let mut bytes = received.bytes.to_vec();
                        checksum::fill_in(&mut bytes);
                        self.take_in(&bytes);
                    } else {
                        self.take_in(received.bytes);
                    }
                }
                n += received;
                if received == 0 {
                    break;
                }
            }
        }
        n
    }

    fn fail_users(&self, overrun: &dyn Fn(&Arc<CqCell>) -> bool) {
        self.fail_members(|member| member.uses(overrun));
    }

    fn fail_device(&self, device: usize) {
        self.fail_members(|member| member.belongs_to(device));
    }
}

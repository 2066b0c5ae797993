//! The switch that raw queue pairs are plugged into: the rules of the host, and the sockets to its other processes and to the
//! real interface.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use anyverbs_net::ethernet::{EthernetSocket, FrameBatch, FrameBuffers, check_permission};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::raw::checksum;
use anyverbs_proto::raw::flow::{FlowRule, FlowTable, Ingress, MAX_FLOWS, Reach, Verdict};
use anyverbs_proto::raw::frame::Frame;
use anyverbs_proto::types::Qpn;
use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::counters::CountersCell;
use super::flow_action::EspCell;
use super::host_rules::{HostRules, Owners};
use super::qp::RawCell;
use super::receive::Arrived;
use super::wq::WqCell;
use crate::cq::CqCell;
use crate::engine::Engine;
use crate::error::CreateError;

/// Batches that are read from a socket before anything else is looked at.
const BATCHES: usize = 4;
/// How often, at most, the host's table is tried to be joined.
const JOIN_AGAIN: Duration = Duration::from_secs(1);

/// Where a rule leads.
#[derive(Debug)]
pub(super) struct Destination {
    pub(super) qp: Arc<RawCell>,
    pub(super) counters: Option<Arc<CountersCell>>,
    pub(super) esp: Option<Arc<EspCell>>,
}

/// Who fails when a CQ has overrun.
#[derive(Debug)]
pub(super) enum Member {
    Qp(Weak<RawCell>),
    Wq(Weak<WqCell>),
}

#[derive(Debug, Default)]
pub(crate) struct Switch {
    rules: RwLock<Rules>,
    /// Made with the first queue pair.
    sockets: OnceLock<Vec<EthernetSocket>>,
    opening: Mutex<()>,
    /// The sockets receive: there is or was a rule.
    listens: AtomicBool,
    /// Made with the first rule.
    buffers: Mutex<Option<FrameBuffers>>,
    /// Joined with the first rule, or a later one. Without it the rules of others count for nothing, as theirs do for them. Set with the
    /// rules locked.
    host: OnceLock<HostRules>,
    /// When it was not joined.
    join_failed: Mutex<Option<Instant>>,
    members: Mutex<Vec<Member>>,
}

#[derive(Debug, Default)]
struct Rules {
    table: FlowTable<Destination>,
    /// The age of the last one to which the host gave none.
    last_age: u64,
    /// Where others read those of this process.
    records: BTreeMap<u64, usize>,
}

/// A rule that stands in the table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entered(u64);

fn refused(what: &str, error: &std::io::Error) -> CreateError {
    match error.raw_os_error() {
        Some(libc::EPERM) => CreateError::NotPermitted,
        errno => {
            tracing::error!(%error, "raw packets: {what}");
            CreateError::System(errno.unwrap_or(libc::EIO))
        }
    }
}

/// One who gets a frame, and how.
type Recipient<'a> = (&'a Destination, Verdict);

/// Delivers what a flow action made of a frame.
fn receive(bytes: &[u8], first: Recipient<'_>, more: &[Recipient<'_>]) {
    let Some(frame) = Frame::parse(bytes) else { return };
    let arrived = Arrived::new(&frame);
    for (dest, verdict) in std::iter::once(&first).chain(more) {
        dest.qp.receive(&arrived, verdict.tag);
    }
}

impl Switch {
    /// Checks that the process may send and receive raw packets, and opens the sockets.
    pub(super) fn open(&self, engine: &Engine) -> Result<(), CreateError> {
        check_permission().map_err(|error| refused("the system refuses a socket", &error))?;
        let _opening = self.opening.lock();
        if self.sockets.get().is_some() {
            return Ok(());
        }
        let mut sockets = Vec::new();
        let config = &engine.config;
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

    /// Enters a rule, and tells the other processes of it. The first one has the sockets receive.
    pub(super) fn insert(
        &self,
        engine: &'static Engine,
        rule: FlowRule,
        dest: Destination,
    ) -> Result<Entered, CreateError> {
        check_permission().map_err(|error| refused("the system refuses a socket", &error))?;
        if !rule.is_egress() {
            // Before others leave frames to it.
            engine.switch.listen(engine)?;
            self.join_host(engine);
        }
        let rules = &mut *self.rules.write();
        // Nobody else heeds what is for frames that are sent.
        let host = self.host.get().filter(|_| !rule.is_egress());
        let is_full = |table: &FlowTable<_>| {
            let others = if host.is_some() { table.foreign_len() } else { 0 };
            table.own_len() + others >= MAX_FLOWS
        };
        if let Some(host) = host {
            host.refresh(&mut rules.table);
            if is_full(&rules.table) {
                host.drop_ended(&mut rules.table);
            }
        }
        if is_full(&rules.table) {
            return Err(CreateError::Exhausted("flow rules"));
        }
        let (age, record) = match host {
            // Others may be told before the rule is here, since no frame is looked up meanwhile.
            Some(host) => host.publish(&rule, self.reach())?,
            None => {
                rules.last_age += 1;
                (rules.last_age, None)
            }
        };
        let id = rules.table.insert(rule, age, dest);
        rules.records.extend(record.map(|record| (id, record)));
        Ok(Entered(id))
    }

    /// Joins the table of the host, and tells it of the rules that are here already.
    fn join_host(&self, engine: &Engine) {
        if self.host.get().is_some() {
            return;
        }
        let mut failed = self.join_failed.lock();
        let is_early = failed.is_some_and(|at| at.elapsed() < JOIN_AGAIN);
        if is_early || self.host.get().is_some() {
            return;
        }
        let joined = match engine.port.slot() {
            None => Err("it has no slot in the registry".to_owned()),
            // Not with the rules locked: it may wait for other processes.
            Some(slot) => HostRules::join(slot, engine.config.udp_port)
                .map_err(|error| error.to_string())
                .and_then(|host| self.set_host(host).map_err(|error| error.to_string())),
        };
        if let Err(error) = joined {
            if failed.is_none() {
                tracing::warn!(
                    error,
                    "the flow rules of this process do not rank with those of others"
                );
            }
            *failed = Some(Instant::now());
        }
    }

    /// What is here is as old as if it were made now.
    fn set_host(&self, host: HostRules) -> Result<(), CreateError> {
        let rules = &mut *self.rules.write();
        let (mut ages, mut records) = (BTreeMap::new(), BTreeMap::new());
        for (id, rule) in rules.table.own_rules() {
            let (age, record) = host.publish(rule, self.reach())?;
            ages.insert(id, age);
            records.extend(record.map(|record| (id, record)));
        }
        rules.table.set_ages(&ages);
        rules.records = records;
        drop(self.host.set(host));
        Ok(())
    }

    /// Tells other processes that this one ends. False if that takes longer.
    pub(crate) fn leave(&self, patience: Duration) -> bool {
        self.host.get().is_none_or(|host| host.leave(patience))
    }

    /// Which frames come here.
    fn reach(&self) -> Reach {
        let mut interfaces = self.sockets().iter().map(EthernetSocket::interface);
        Reach {
            host: interfaces.clone().any(|interface| interface.is_none()),
            interface: interfaces.find_map(|interface| interface).unwrap_or(0),
        }
    }

    pub(super) fn remove(&self, entered: Entered) -> Option<Destination> {
        let mut rules = self.rules.write();
        let removed = rules.table.remove(entered.0);
        if let (Some(host), Some(record)) = (self.host.get(), rules.records.remove(&entered.0)) {
            host.withdraw(record);
        }
        removed
    }

    fn listen(&'static self, engine: &'static Engine) -> Result<(), CreateError> {
        let _opening = self.opening.lock();
        if self.is_listening() {
            return Ok(());
        }
        for socket in self.sockets() {
            socket.listen().map_err(|error| refused("receiving", &error))?;
        }
        *self.buffers.lock() = Some(FrameBuffers::default());
        self.listens.store(true, Ordering::Release);
        engine.watch_frames(self.fds());
        Ok(())
    }

    #[inline]
    pub(crate) fn is_listening(&self) -> bool {
        self.listens.load(Ordering::Acquire)
    }

    /// What frames come to, two at most; none before there is a rule.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let sockets = if self.is_listening() { self.sockets() } else { &[] };
        sockets.iter().map(AsFd::as_fd)
    }

    fn sockets(&self) -> &[EthernetSocket] {
        self.sockets.get().map_or(&[], Vec::as_slice)
    }

    /// Remembers who uses completion queues.
    pub(super) fn join(&self, member: Member) {
        let mut members = self.members.lock();
        members.retain(|member| match member {
            Member::Qp(qp) => qp.strong_count() > 0,
            Member::Wq(wq) => wq.strong_count() > 0,
        });
        members.push(member);
    }

    /// Fails all that use a CQ for which `overrun` holds.
    pub(crate) fn fail_users(&self, overrun: impl Fn(&Arc<CqCell>) -> bool) {
        let (mut qps, mut wqs) = (Vec::new(), Vec::new());
        for member in &*self.members.lock() {
            match member {
                Member::Qp(qp) => qps.extend(qp.upgrade()),
                Member::Wq(wq) => wqs.extend(wq.upgrade()),
            }
        }
        qps.iter().filter(|qp| qp.uses(&overrun)).for_each(|qp| qp.fail());
        wqs.iter().filter(|wq| overrun(wq.queue.cq())).for_each(|wq| wq.fail());
    }

    /// The rules as they stand now.
    fn current(&self) -> RwLockReadGuard<'_, Rules> {
        let rules = self.rules.read();
        match self.host.get() {
            Some(host) if !rules.table.is_empty() && host.has_changed() => {
                drop(rules);
                host.refresh(&mut self.rules.write().table);
                self.rules.read()
            }
            _ => rules,
        }
    }

    /// Delivers a frame as the rules say. `from` sent it: a switch does not send back.
    fn deliver(&self, frame: &Frame<'_>, ingress: Ingress, from: Option<Qpn>) {
        let arrived = Arrived::new(frame);
        let rules = self.current();
        if rules.table.is_empty() {
            return;
        }
        // Who gets a copy by which action: each takes a packet once. Few rules have twins, and none twins of many actions.
        let mut first: Option<(&Arc<EspCell>, Recipient<'_>)> = None;
        let mut more: Vec<(&Arc<EspCell>, Recipient<'_>)> = Vec::new();
        let mut ended = Owners::default();
        let lives = |owner| {
            let lives = self.host.get().is_none_or(|host| host.lives(owner));
            if !lives {
                ended.insert(owner);
            }
            lives
        };
        rules.table.steer(frame, ingress, lives, |dest, verdict| {
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
        drop(rules);
        if let Some(host) = self.host.get()
            && !ended.is_empty()
        {
            host.forget(&mut self.rules.write().table, &ended);
        }
    }

    /// Sends a frame of queue pair `from`: to others of this process at once, to all else by way of `batch`, which is sent
    /// when it is full.
    pub(super) fn send(
        &self,
        engine: &'static Engine,
        from: Qpn,
        bytes: &[u8],
        batch: &mut FrameBatch,
    ) {
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
                        self.transmit(engine, from, &frame, any, batch);
                    }
                });
            }
        }
        drop(rules);
        self.transmit(engine, from, &frame, any, batch);
    }

    /// Sends a frame as it is; `any`: there are rules for what is received.
    fn transmit(
        &self,
        engine: &'static Engine,
        from: Qpn,
        frame: &Frame<'_>,
        any: bool,
        batch: &mut FrameBatch,
    ) {
        let bytes = frame.bytes;
        if any {
            let ingress = if self.reach().host { Ingress::Host } else { Ingress::Process };
            self.deliver(frame, ingress, Some(from));
        }
        engine.count(Counter::SentPkts, 1);
        engine.count(Counter::SentBytes, bytes.len() as u64);
        batch.push(bytes);
        if batch.is_full() {
            self.flush(engine, batch);
        }
    }

    /// Sends what waits.
    pub(super) fn flush(&self, engine: &Engine, batch: &mut FrameBatch) {
        if batch.is_empty() {
            return;
        }
        for socket in self.sockets() {
            let lost = socket.send(batch);
            engine.send_drops.fetch_add(lost as u64, Ordering::Relaxed);
        }
        batch.clear();
    }

    /// Receives frames; how many. 0 also while another thread is at it.
    pub(crate) fn receive(&self) -> usize {
        let Some(mut buffers) = self.buffers.try_lock() else { return 0 };
        let Some(buffers) = &mut *buffers else { return 0 };
        let mut n = 0;
        for socket in self.sockets() {
            let ingress = socket.interface().map_or(Ingress::Host, Ingress::Interface);
            for _ in 0..BATCHES {
                let received = socket.receive(buffers).unwrap_or_else(|error| {
                    tracing::debug!(%error, "receiving frames");
                    0
                });
                for received in buffers.frames() {
                    if received.checksum_pending {
                        let mut bytes = received.bytes.to_vec();
                        checksum::fill_in(&mut bytes);
                        self.take_in(&bytes, ingress);
                    } else {
                        self.take_in(received.bytes, ingress);
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

    fn take_in(&self, bytes: &[u8], ingress: Ingress) {
        if let Some(frame) = Frame::parse(bytes) {
            self.deliver(&frame, ingress, None);
        }
    }

    /// Frames that found a socket's buffer full.
    pub(crate) fn dropped(&self) -> u64 {
        self.sockets().iter().map(EthernetSocket::dropped).sum()
    }
}

impl Engine {
    /// Has the worker receive frames.
    fn watch_frames(&'static self, fds: impl Iterator<Item = BorrowedFd<'static>>) {
        if let Err(error) = self.watch(fds) {
            tracing::warn!(%error, "frames are received while the program polls, and not else");
        }
    }
}

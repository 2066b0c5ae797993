//! MADs out: in their order, in batches of one way, and not more at a time than a receiving socket holds.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_net::{Destination, TxBatch};
use anyverbs_proto::cm::mad::{MAD_LEN, Mad};
use anyverbs_proto::cm::{Route, Transmit, route};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Psn, QKey, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN};
use parking_lot::Mutex;

use super::{HINT_AT, MAD_AT, STEERING};
use crate::engine::Engine;
use crate::engine::timers::NEVER;
use crate::link::udp;

const PACKET_LEN: usize = MAD_AT + MAD_LEN + ICRC_LEN;

/// The opcode of every packet of QP1.
pub(super) const OPCODE: Opcode = Opcode::new(Service::Ud, Operation::SendOnly);

/// Datagrams that leave at once, besides those that answers have paid for. The socket of a process without privilege
/// holds about 250.
const BURST: u32 = 64;
/// What answers can add to that.
const MOST: u32 = 2 * BURST;
/// In this time a burst more may leave.
const PERIOD: Duration = Duration::from_millis(2);
/// How often those that wait are looked after: in quarters of a burst.
const LOOK: Duration = PERIOD.checked_div(4).expect("four is not zero");

/// What waits to be sent, and how much may be.
#[derive(Debug)]
pub(super) struct Sender {
    queue: Mutex<VecDeque<Transmit>>,
    /// Datagrams that were received since the sender last looked: each pays for an answer.
    earned: AtomicU32,
    /// When more may be sent, in nanoseconds.
    at: AtomicU64,
    line: Mutex<Line>,
}

/// The one that sends.
#[derive(Debug)]
struct Line {
    pace: Pace,
    psn: u32,
    batch: Option<TxBatch>,
    way: Option<Way>,
}

/// How datagrams between two addresses leave.
#[derive(Debug)]
struct Way {
    to: Destination,
    flow: Flow,
}

/// How many datagrams may leave.
#[derive(Debug)]
struct Pace {
    tokens: u32,
    /// Up to when time was turned into tokens.
    until: Time,
}

impl Pace {
    fn refill(&mut self, now: Time, earned: u32) {
        const EACH: u64 = PERIOD.as_nanos() as u64 / BURST as u64;
        let n = now.since(self.until).as_nanos() as u64 / EACH;
        self.until = self.until + Duration::from_nanos(n.saturating_mul(EACH));
        let n = u32::try_from(n).unwrap_or(u32::MAX);
        // Time alone makes no more than a burst.
        let by_time = self.tokens.saturating_add(n).min(self.tokens.max(BURST));
        self.tokens = by_time.saturating_add(earned).min(MOST);
    }
}

impl Sender {
    pub(super) fn new(psn: u32) -> Self {
        Self {
            queue: Mutex::default(),
            earned: AtomicU32::new(0),
            at: AtomicU64::new(NEVER),
            line: Mutex::new(Line {
                pace: Pace { tokens: BURST, until: Time::default() },
                psn,
                batch: None,
                way: None,
            }),
        }
    }

    /// Adds to what waits.
    pub(super) fn queue(&self, transmits: impl Iterator<Item = Transmit>) {
        let mut transmits = transmits.peekable();
        if transmits.peek().is_some() {
            self.queue.lock().extend(transmits);
        }
    }

    /// A datagram was received.
    pub(super) fn earn(&self, n: u32) {
        self.earned.fetch_add(n, Ordering::Relaxed);
    }

    /// When more may be sent, in nanoseconds; [`NEVER`] if nothing waits.
    pub(super) fn next(&self) -> u64 {
        self.at.load(Ordering::SeqCst)
    }
}

impl Engine {
    /// Sends what waits, as far as it may. The caller holds no lock of the machine.
    pub(super) fn send_mads(&'static self, now: Time) {
        let sender = &self.gsi.sender;
        if sender.queue.lock().is_empty() {
            return;
        }
        let mut line = sender.line.lock();
        line.pace.refill(now, sender.earned.swap(0, Ordering::Relaxed));
        let mut slot = None;
        while line.pace.tokens > 0 {
            let Some(transmit) = sender.queue.lock().pop_front() else { break };
            line.pace.tokens -= 1;
            self.stage(&mut line, &transmit, &mut slot);
        }
        self.flush(&mut line);
        // Under the lock of the line, so that who adds later looks later.
        let waits = !sender.queue.lock().is_empty();
        let at = if waits { (now + LOOK).as_nanos() } else { NEVER };
        sender.at.store(at, Ordering::SeqCst);
        drop(line);
        if waits {
            self.worker.wake_before(at);
        }
    }

    /// Puts a datagram into the batch. A receiving host steers a batch by its first one, so that it is sent before one
    /// that goes to another process; `slot` is where those in it go.
    fn stage(&self, line: &mut Line, transmit: &Transmit, slot: &mut Option<u8>) {
        let hint = self.hint(transmit);
        let mad = &transmit.mad;
        let attribute = u16::from_be_bytes([mad[16], mad[17]]);
        let kind = STEERING.slot_offsets.iter().find(|(kind, _)| *kind == attribute);
        let steered =
            kind.map_or(0, |&(_, at)| if at == HINT_AT { hint } else { mad[at - MAD_AT] });
        if *slot != Some(steered) {
            self.flush(line);
            *slot = Some(steered);
        }
        let Some(to) = self.way(line, transmit) else {
            // As if the network had lost it.
            self.send_drops.fetch_add(1, Ordering::Relaxed);
            return;
        };
        line.psn = line.psn.wrapping_add(1);
        let psn = Psn::new(u32::from(hint) << 16 | line.psn & 0xffff);
        let Line { batch, way: Some(way), .. } = line else { return };
        let batch = batch.get_or_insert_default();
        let Ok((room, id)) = batch.segment(&self.port, &to, PACKET_LEN) else {
            self.send_drops.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let headers = Headers {
            deth: Some(Deth { qkey: QKey::GSI, src_qpn: Qpn::GSI }),
            ..Headers::new(Bth::new(OPCODE, Qpn::GSI, psn))
        };
        headers.emit(room);
        room[MAD_AT..MAD_AT + MAD_LEN].copy_from_slice(&mad[..]);
        udp::seal(&way.flow, id, room);
        self.count(Counter::SentPkts, 1);
        self.count(Counter::SentBytes, PACKET_LEN as u64);
    }

    /// The process that listens, of a request to this host: there the kernel hands it to it at once. 0 otherwise.
    fn hint(&self, transmit: &Transmit) -> u8 {
        if !self.gids.contains(transmit.dgid) {
            return 0;
        }
        let Ok(mad) = Mad::parse(&transmit.mad[..]) else { return 0 };
        match route(&mad) {
            Route::Service { service_id, destination } => {
                self.listener(service_id, destination, transmit.dgid).unwrap_or(self.slot)
            }
            Route::Slot(_) | Route::Everyone => 0,
        }
    }

    /// How a datagram leaves; `None` if its addresses are none.
    fn way(&self, line: &mut Line, transmit: &Transmit) -> Option<Destination> {
        let (source, ip) = (transmit.sgid.to_ip(), transmit.dgid.to_ip());
        let is_known = |to: &Destination| to.source == Some(source) && to.address.ip() == ip;
        if !line.way.as_ref().is_some_and(|way| is_known(&way.to)) {
            line.way = None;
            if source.is_ipv4() != ip.is_ipv4() {
                return None;
            }
            let interface = self.gids.interface_of(transmit.sgid)?;
            let scope_id = match ip {
                IpAddr::V6(ip) if ip.is_unicast_link_local() => interface,
                _ => 0,
            };
            let port = self.config.udp_port;
            let to = Destination {
                source: Some(source),
                interface: scope_id,
                ..Destination::new(udp::address(ip, port, scope_id))
            };
            let from = self.port.source_port(&to).ok()?;
            line.way = Some(Way { to, flow: Flow::new(source, ip, from, port) });
        }
        line.way.as_ref().map(|way| Destination {
            traffic_class: transmit.traffic_class,
            hop_limit: transmit.hop_limit,
            flow_label: transmit.flow_label,
            ..way.to
        })
    }

    fn flush(&self, line: &mut Line) {
        let Some(batch) = &mut line.batch else { return };
        let dropped = batch.stats().dropped;
        if let Err(error) = batch.flush(&self.port) {
            tracing::debug!(%error, "datagrams of the connection manager were not sent");
        }
        self.send_drops.fetch_add(batch.stats().dropped - dropped, Ordering::Relaxed);
    }
}

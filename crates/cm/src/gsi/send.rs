//! MADs out: in their order, in batches of one way, and not more at a time than a receiving socket holds.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use anyverbs_links::udp;
use anyverbs_locks::{Mutex, MutexGuard, rank};
use anyverbs_net::{Destination, TxBatch};
use anyverbs_objects::base::NEVER;
use anyverbs_proto::cm::id::ServiceId;
use anyverbs_proto::cm::mad::MAD_LEN;
use anyverbs_proto::cm::{Recipient, Transmit, recipient};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn, QKey, Qpn};
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::deth::Deth;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::opcode::{Opcode, Operation, Service};
use anyverbs_proto::wire::packet::{Headers, ICRC_LEN};

use super::MAD_AT;
use super::requests::Requests;
use super::{Events, Gsi};

const PACKET_LEN: usize = MAD_AT + MAD_LEN + ICRC_LEN;

/// The opcode of every packet of QP1.
pub(super) const OPCODE: Opcode = Opcode::new(Service::Ud, Operation::SendOnly);

/// Datagrams that may leave at once, beside those that answers allow. The socket of a process without privilege holds
/// about 250.
const BURST: u32 = 64;
/// The most that answers can add to that.
const MOST: u32 = 2 * BURST;
/// In this time a burst more may leave, in milliseconds: a process that has the processor reads a burst in less
/// (`a_burst_then_as_time_and_answers_allow`).
const PERIOD: Duration = Duration::from_millis(2);

/// Datagrams that wait to be sent, and the number that may leave.
#[derive(Debug)]
pub(super) struct Sender {
    /// Datagrams that wait in the machine.
    waiting: AtomicUsize,
    /// Datagrams that were received since the sender last looked: each pays for an answer.
    earned: AtomicU32,
    /// When more may be sent, in nanoseconds.
    at: AtomicU64,
    line: Mutex<rank::CmSend, Line>,
}

/// The one that sends.
#[derive(Debug)]
pub(super) struct Line {
    pace: Pace,
    psn: u32,
    batch: Option<TxBatch>,
    /// Where the datagrams in the batch are steered to.
    slot: u8,
    way: Option<Way>,
    requests: Requests,
    /// Taken from the machine, to be sent. Empty between calls.
    ready: Vec<Transmit>,
}

/// The way of datagrams between two addresses.
#[derive(Debug)]
struct Way {
    to: Destination,
    /// As [`Transmit::interface`].
    interface: u32,
    flow: Flow,
}

/// The number of datagrams that may leave.
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
        // At least the size of the batch just received: its senders have room for the answers.
        self.tokens = by_time.saturating_add(earned).min(MOST.max(earned));
    }
}

impl Sender {
    pub(super) fn new(psn: u32) -> Self {
        Self {
            waiting: AtomicUsize::new(0),
            earned: AtomicU32::new(0),
            at: AtomicU64::new(NEVER),
            line: Mutex::new(Line {
                pace: Pace { tokens: BURST, until: Time::default() },
                psn,
                batch: None,
                slot: 0,
                way: None,
                requests: Requests::default(),
                ready: Vec::new(),
            }),
        }
    }

    /// Notes the number of datagrams that wait in the machine, whose lock the caller holds.
    pub(super) fn waits(&self, n: usize) {
        self.waiting.store(n, Ordering::SeqCst);
    }

    /// The right to send, for a caller that cannot wait long for it.
    pub(super) fn try_line(&self, timeout: Duration) -> Option<MutexGuard<'_, rank::CmSend, Line>> {
        self.line.try_lock_for(timeout)
    }

    /// Time alone lets nothing leave before `until`.
    #[cfg(test)]
    pub(super) fn pause_until(&self, until: Time) {
        self.line.lock().pace = Pace { tokens: 0, until };
    }

    /// A process accepted a request.
    pub(super) fn answered(&self, transaction: u64, from: Gid, slot: u8) {
        self.line.lock().requests.answered(transaction, from, slot);
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

impl<I: Events> Gsi<I> {
    /// Sends waiting datagrams, as far as it may. The caller does not hold the machine's lock.
    pub(super) fn send_mads(&'static self, now: Time) {
        let sender = &self.sender;
        if sender.waiting.load(Ordering::SeqCst) > 0 {
            self.send_in(&mut sender.line.lock(), now);
        }
    }

    /// As [`send_mads`](Self::send_mads), for a caller that has the line.
    pub(super) fn send_in(&self, line: &mut Line, now: Time) {
        let sender = &self.sender;
        line.pace.refill(now, sender.earned.swap(0, Ordering::Relaxed));
        while line.pace.tokens > 0 && sender.waiting.load(Ordering::SeqCst) > 0 {
            let mut ready = std::mem::take(&mut line.ready);
            self.poll_cm(now, line.pace.tokens as usize, &mut ready);
            line.pace.tokens -= ready.len() as u32;
            for transmit in ready.drain(..) {
                self.stage(line, &transmit);
            }
            line.ready = ready;
            self.flush(line);
        }
        // A thread that adds more after this looks itself.
        let waits = sender.waiting.load(Ordering::SeqCst) > 0;
        // A quarter of a burst may leave by then.
        let at = if waits { (now + PERIOD / 4).as_nanos() } else { NEVER };
        sender.at.store(at, Ordering::SeqCst);
        if waits {
            self.transport.links.waker.wake_before(at);
        }
    }

    /// Puts a datagram into the batch. A receiving host steers a batch by its first one, so that it is sent before one
    /// that goes to another process.
    fn stage(&self, line: &mut Line, transmit: &Transmit) {
        if self.transport.links.is_cut(transmit.sgid) {
            return;
        }
        // As the receiving host steers it ([`STEERING`](super::STEERING)).
        let (slot, hint, sending) = match recipient(&transmit.mad) {
            Recipient::Service(service_id) => {
                let (hint, sending) = self.hint(&mut line.requests, transmit, service_id);
                (hint, hint, sending)
            }
            Recipient::Slot(slot) => (slot, 0, 0),
            Recipient::Everyone => (0, 0, 0),
        };
        if slot != line.slot {
            self.flush(line);
            line.slot = slot;
        }
        let Some(to) = self.way(line, transmit, sending) else {
            // As if the network had lost it.
            self.transport.links.send_drops.fetch_add(1, Ordering::Relaxed);
            return;
        };
        line.psn = line.psn.wrapping_add(1);
        let psn = Psn::new(u32::from(hint) << 16 | line.psn & 0xffff);
        let Line { batch, way: Some(way), .. } = line else { return };
        let batch = batch.get_or_insert_default();
        let Ok((room, id)) = batch.segment(&self.transport.links.port, &to, PACKET_LEN) else {
            self.transport.links.send_drops.fetch_add(1, Ordering::Relaxed);
            return;
        };
        let headers = Headers {
            deth: Some(Deth { qkey: QKey::GSI, src_qpn: Qpn::GSI }),
            ..Headers::new(Bth::new(OPCODE, Qpn::GSI, psn))
        };
        headers.emit(room);
        room[MAD_AT..MAD_AT + MAD_LEN].copy_from_slice(&transmit.mad.emit());
        udp::seal(&way.flow, id, room);
        let core = self.transport.core;
        let port = core.gids.port_of(transmit.sgid, transmit.interface);
        core.count(port, Counter::SentPkts, 1);
        core.count(port, Counter::SentBytes, PACKET_LEN as u64);
    }

    /// The slot of the process that listens, or 0, and the sending socket of a request: 0, for a repetition another.
    fn hint(
        &self,
        requests: &mut Requests,
        transmit: &Transmit,
        service_id: ServiceId,
    ) -> (u8, u8) {
        if self.transport.core.gids.is_of_host(transmit.dgid) {
            let slot = self.listener(service_id, transmit.dgid);
            // If there is no listener, this process says so.
            return (slot.unwrap_or(self.transport.core.slot), 0);
        }
        let (slot, repeated) = requests.ask(transmit.mad.transaction_id, transmit.dgid, service_id);
        // Any sending socket does, but each a descriptor.
        let sending = match repeated % 16 {
            0 => 0,
            n => self.transport.core.slot.wrapping_add(16 * n),
        };
        (slot.unwrap_or(0), sending)
    }

    /// The way of a datagram; `None` if its addresses are none.
    fn way(&self, line: &mut Line, transmit: &Transmit, sending: u8) -> Option<Destination> {
        let (source, ip) = (transmit.sgid.to_ip(), transmit.dgid.to_ip());
        let wanted = (Some(source), ip, transmit.interface, sending);
        let is_known = |way: &Way| {
            (way.to.source, way.to.address.ip(), way.interface, way.to.sending_socket) == wanted
        };
        if !line.way.as_ref().is_some_and(is_known) {
            line.way = None;
            if source.is_ipv4() != ip.is_ipv4() {
                return None;
            }
            let own = self.transport.core.gids.interface_of(transmit.sgid)?;
            let scope_id = match (ip, transmit.interface) {
                // One of this host's own.
                (IpAddr::V6(ip), 0) if ip.is_unicast_link_local() => own,
                (_, interface) => interface,
            };
            let port = self.transport.core.config.udp_port;
            let to = Destination {
                source: Some(source),
                interface: scope_id,
                sending_socket: sending,
                ..Destination::new(udp::address(ip, port, scope_id))
            };
            let from = self.transport.links.port.source_port(&to).ok()?;
            line.way = Some(Way {
                to,
                interface: transmit.interface,
                flow: Flow::new(source, ip, from, port),
            });
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
        if let Err(error) = batch.flush(&self.transport.links.port) {
            tracing::debug!(%error, "datagrams of the connection manager were not sent");
        }
        self.transport
            .links
            .send_drops
            .fetch_add(batch.stats().dropped - dropped, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_then_as_time_and_answers_allow() {
        let mut pace = Pace { tokens: BURST, until: Time::default() };
        let at = |ms: u64| Time::from_nanos(ms * 1_000_000);
        pace.refill(at(1000), 0);
        assert_eq!(pace.tokens, BURST, "time alone makes no more than a burst");
        pace.tokens = 0;
        pace.refill(at(1001), 0);
        assert_eq!(pace.tokens, BURST / 2);
        pace.refill(at(1001), 10);
        assert_eq!(pace.tokens, BURST / 2 + 10);
        pace.refill(at(1001), 100);
        assert_eq!(pace.tokens, MOST);
        pace.tokens = 10;
        pace.refill(at(1001), 10_000);
        assert_eq!(pace.tokens, 10_000, "a batch pays for all its answers");
        pace.tokens = 0;
        pace.refill(at(1001), MOST);
        pace.refill(at(9000), 0);
        assert_eq!(pace.tokens, MOST, "what answers have paid for stays");
        // Time is not lost by looking often.
        let mut often = Pace { tokens: 0, until: Time::default() };
        for us in 0..2000 {
            often.refill(Time::from_nanos(us * 1000), 0);
        }
        assert!((BURST - 1..=BURST).contains(&often.tokens), "{}", often.tokens);
    }
}

//! Packets of groups that the kernel does not deliver (IPv6 over the loopback interface), handed on to every other process of
//! the host.
//!
//! No queue pair is locked meanwhile. A process's queue for these is short, so the sender waits for it, and receives
//! itself while it does: the other may be waiting for this one.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyverbs_net::forward::Forwarded;
use anyverbs_net::{Datagram, SHARERS_LEASE};
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::packet::{ICRC_LEN, Packet};

use super::Driver;
use super::receive::Reader;

/// Longest wait for a process that does not read.
const PATIENCE: Duration = Duration::from_millis(200);
/// The time after that for which it is not waited for.
const REST: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_micros(50);
/// The source port of these datagrams, which no UDP socket has.
const SOURCE_PORT: u16 = 0xc000;

#[derive(Debug, Default)]
pub(super) struct Handing {
    bytes: Vec<u8>,
    /// Slots that did not read, and until when they are not waited for.
    stuck: Vec<(u8, Instant)>,
    sharers: Sharers,
}

/// The other processes of the host.
#[derive(Debug, Default)]
struct Sharers {
    slots: Vec<u8>,
    /// None before the first look.
    until: Option<Instant>,
}

impl Sharers {
    fn look(&mut self, driver: &Driver) {
        let now = Instant::now();
        if self.until.is_some_and(|until| now < until) {
            return;
        }
        match driver.links.port.sharers() {
            Ok(slots) => *self = Self { slots, until: Some(now + SHARERS_LEASE) },
            Err(error) => tracing::debug!(%error, "who shares the port is not known"),
        }
    }
}

impl Handing {
    /// Hands on packets for groups.
    pub(super) fn hand_on<'p>(
        &mut self,
        driver: &'static Driver,
        packets: impl Iterator<Item = (Arrival, Packet<'p>)>,
    ) {
        for (arrival, packet) in packets {
            self.sharers.look(driver);
            let slots = &self.sharers.slots;
            if slots.is_empty() {
                continue;
            }
            self.stuck.retain(|(slot, until)| slots.contains(slot) && Instant::now() < *until);
            write(&mut self.bytes, driver, &arrival, &packet);
            let source = SocketAddr::new(arrival.source.to_ip(), SOURCE_PORT);
            let datagram = Datagram {
                source,
                destination: arrival.destination.to_ip(),
                interface: 0,
                traffic_class: arrival.traffic_class,
                hop_limit: arrival.hop_limit,
                flow_label: arrival.flow_label,
                segment: 0,
                bytes: &self.bytes,
            };
            for slot in slots {
                let begin = Instant::now();
                while driver.links.port.forward(*slot, &datagram) == Forwarded::Full
                    && !self.stuck.iter().any(|(stuck, _)| stuck == slot)
                {
                    if begin.elapsed() > PATIENCE {
                        self.stuck.push((*slot, Instant::now() + REST));
                    } else if driver.receive(Reader::Wait) == 0 {
                        std::thread::sleep(RETRY);
                    }
                }
            }
            driver.above().management.forwarded(driver.core.now());
        }
    }
}

/// The packet as it would be on the wire, with pad and ICRC.
fn write(bytes: &mut Vec<u8>, driver: &Driver, arrival: &Arrival, packet: &Packet<'_>) {
    bytes.clear();
    bytes.resize(packet.len() + ICRC_LEN, 0);
    let (body, icrc) = bytes.split_at_mut(packet.len());
    packet.emit(body);
    let (source, destination) = (arrival.source.to_ip(), arrival.destination.to_ip());
    let flow = Flow::new(source, destination, SOURCE_PORT, driver.core.config.udp_port);
    icrc.copy_from_slice(&flow.compute(0, body).to_le_bytes());
}

//! Packets of groups that the kernel does not deliver (IPv6 over the loopback interface), handed on to every other process of
//! the host.
//!
//! No queue pair is locked meanwhile. A process's queue for these is short, so the sender waits for it, and receives
//! itself while it does: the other may be waiting for this one.

use std::net::SocketAddr;

use anyverbs_links::times::{ASK_AGAIN, NOT_READING};
use anyverbs_net::forward::Forwarded;
use anyverbs_net::{Datagram, SHARERS_VALID};
use anyverbs_objects::base::PROMPT_REPLY;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::wire::icrc::Flow;
use anyverbs_proto::wire::packet::{ICRC_LEN, Packet};

use super::Driver;
use super::receive::Reader;

/// The source port of these datagrams, which no UDP socket has.
const SOURCE_PORT: u16 = 0xc000;

#[derive(Debug, Default)]
pub(super) struct Handing {
    bytes: Vec<u8>,
    stuck: Stuck,
    sharers: Sharers,
}

/// Slots that did not read, and until when they are not waited for.
#[derive(Debug, Default)]
struct Stuck(Vec<(u8, Time)>);

impl Stuck {
    /// Whether a slot that has no room is waited for, if that began at `since`.
    fn waits_for(&mut self, slot: u8, since: Time, now: Time) -> bool {
        self.0.retain(|(_, until)| now < *until);
        if self.0.iter().any(|(stuck, _)| *stuck == slot) {
            return false;
        }
        let waits = now.since(since) <= NOT_READING;
        if !waits {
            self.0.push((slot, now + ASK_AGAIN));
        }
        waits
    }
}

/// The other processes of the host.
#[derive(Debug, Default)]
struct Sharers {
    slots: Vec<u8>,
    /// None before the first look.
    until: Option<Time>,
}

impl Sharers {
    fn look(&mut self, driver: &Driver) {
        let now = driver.core.now();
        if self.until.is_some_and(|until| now < until) {
            return;
        }
        match driver.links.port.sharers() {
            Ok(slots) => *self = Self { slots, until: Some(now + SHARERS_VALID) },
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
                let begin = driver.core.now();
                while driver.links.port.forward(*slot, &datagram) == Forwarded::Full
                    && self.stuck.waits_for(*slot, begin, driver.core.now())
                {
                    if driver.receive(Reader::Wait) == 0 {
                        std::thread::sleep(PROMPT_REPLY);
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_process_that_never_reads_is_waited_for_rarely() {
        let at = Time::from_nanos;
        let (begin, mut stuck) = (at(1), Stuck::default());
        assert!(stuck.waits_for(3, begin, begin + NOT_READING));
        let given_up = begin + NOT_READING + Duration::from_nanos(1);
        assert!(!stuck.waits_for(3, begin, given_up));
        assert!(!stuck.waits_for(3, given_up, given_up), "not for the next packet");
        assert!(stuck.waits_for(4, given_up, given_up), "another one reads");
        assert!(stuck.waits_for(3, given_up + ASK_AGAIN, given_up + ASK_AGAIN));
    }
}

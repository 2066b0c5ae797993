//! MADs in: checked, and given to the machine of the process that they are for.

use anyverbs_net::Datagram;
use anyverbs_net::forward::Forwarded;
use anyverbs_net::host::LOOK_AGAIN;
use anyverbs_proto::cm::id::ServiceId;
use anyverbs_proto::cm::mad::{MAD_LEN, Mad, Malformed};
use anyverbs_proto::cm::message::Message;
use anyverbs_proto::cm::{Recipient, recipient};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, PKey, QKey};
use anyverbs_proto::wire::packet::Packet;

use super::send::OPCODE;
use super::{Events, Gsi, Incoming};

impl<I: Events> Gsi<I> {
    /// Takes packets to QP1. Their ICRC is right. The caller has locked the receive path.
    pub(super) fn receive_mads(&'static self, now: Time, incoming: &[Incoming<'_>]) {
        let is_mad = |i: &&Incoming<'_>| {
            if self.transport.links.is_cut(i.arrival.destination) {
                return false;
            }
            let reason = self.why_not(i);
            let core = self.transport.core;
            let device =
                |i: &Incoming<'_>| core.gids.port_of(i.arrival.destination, i.arrival.interface);
            reason.inspect(|counter| core.count(device(i), *counter, 1)).is_none()
        };
        let parsed = incoming.iter().filter(is_mad).map(|i| (i, Mad::parse(i.packet.payload)));
        let ours: Vec<_> = parsed.filter(|(i, mad)| self.is_for_machine(now, i, mad)).collect();
        if ours.is_empty() {
            return;
        }
        self.sender.earn(ours.len() as u32);
        self.drive_receiving(|machine, _, now| {
            for (Incoming { arrival, packet, .. }, mad) in ours {
                match mad {
                    Ok(mad) => machine.handle_mad(now, arrival, &mad),
                    Err(error) => machine.handle_malformed(arrival, packet.payload, error),
                }
            }
        });
    }

    /// The fault of a packet.
    fn why_not(&self, incoming: &Incoming<'_>) -> Option<Counter> {
        let Packet { headers, payload } = &incoming.packet;
        if headers.bth.opcode != OPCODE {
            Some(Counter::DropQpState)
        } else if headers.deth.is_none_or(|deth| deth.qkey != QKey::GSI) {
            Some(Counter::DropQkey)
        } else if !headers.bth.pkey.matches(PKey::DEFAULT) {
            Some(Counter::DropPkey)
        } else if payload.len() != MAD_LEN {
            Some(Counter::DropMalformed)
        } else if !self.transport.core.gids.contains(incoming.arrival.destination) {
            Some(Counter::DropForeign)
        } else {
            None
        }
    }

    /// Whether the machine of this process is to have it now. If not, it was handed on, or waits.
    fn is_for_machine(
        &self,
        now: Time,
        incoming: &Incoming<'_>,
        mad: &Result<Mad, Malformed>,
    ) -> bool {
        match mad {
            Ok(mad) => self.is_ours(now, incoming, mad) && !self.keep_disconnect(incoming, mad),
            // The machine counts it, or answers it as any process would.
            Err(_) => true,
        }
    }

    /// Whether a MAD is for this process. If not, it was handed on.
    fn is_ours(&self, now: Time, incoming: &Incoming<'_>, mad: &Mad) -> bool {
        if let Message::Rep(rep) = &mad.message {
            let slot = rep.local_comm_id.slot();
            self.sender.answered(mad.transaction_id, incoming.arrival.source, slot);
        }
        match recipient(mad) {
            Recipient::Slot(slot) if slot == self.transport.core.slot || incoming.was_forwarded => {
                !self.is_for_successor(now, incoming, mad)
            }
            Recipient::Slot(slot) => {
                let handed_on = self.hand_on(now, slot, &incoming.datagram);
                if handed_on {
                    self.transport.links.port.note_misdelivery();
                    if self.transport.links.port.needs_resteer() {
                        self.transport.links.waker.kick();
                    }
                }
                !handed_on && !self.is_for_successor(now, incoming, mad)
            }
            // Even for a forwarded one: the listener may have changed.
            Recipient::Service(service_id) => {
                let port = incoming.arrival.destination;
                match self.listener(service_id, port) {
                    Some(slot) if slot != self.transport.core.slot => {
                        !self.hand_on(now, slot, &incoming.datagram)
                    }
                    // It may hold the port and not listen yet.
                    Some(_) => !self.keep_for_listener(now, incoming, mad),
                    None => {
                        self.is_asked_in_vain(incoming, mad)
                            && !(self.was_left(service_id)
                                && self.keep_for_listener(now, incoming, mad))
                    }
                }
            }
            Recipient::Everyone => {
                // Beyond a stranger's share, a connection that its peer has given up ends by its own timer.
                if !incoming.was_forwarded && self.services.store().may_tell_all() {
                    let others = self.services.store().live_slots().into_iter();
                    for slot in others.filter(|slot| *slot != self.transport.core.slot) {
                        self.hand_on(now, slot, &incoming.datagram);
                    }
                }
                true
            }
        }
    }

    /// The process of this host that listens to a service at a port.
    pub(super) fn listener(&self, service_id: ServiceId, port: Gid) -> Option<u8> {
        self.services.holder(service_id.0, port.to_ip())
    }

    /// Hands a datagram on to another process. False if there is none.
    pub(super) fn hand_on(&self, now: Time, slot: u8, datagram: &Datagram<'_>) -> bool {
        match self.transport.links.port.forward_or_keep(slot, datagram) {
            Forwarded::Sent => {
                self.transport.core.count_for_none(Counter::Forwarded, 1);
                self.note_forwarded(now);
            }
            Forwarded::Kept => {
                self.transport.core.count_for_none(Counter::Forwarded, 1);
                self.forward_later(now + LOOK_AGAIN);
            }
            Forwarded::Full => self.transport.core.count_for_none(Counter::DropSocketFull, 1),
            Forwarded::Dead | Forwarded::Failed => return false,
        }
        true
    }
}

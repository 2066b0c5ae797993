//! The way of packets by this link.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyverbs_net::shm::{Copying, MAX_HEADER, ONE_LINE, SendError, Sender};
use anyverbs_objects::base::HOUSEKEEPING;
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::mr::{LastLocal, LastRemote};
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::wire::credit::{CreditCounts, CreditPacket};
use anyverbs_proto::wr::AddressVector;

use super::message::{Front, emit_connected, is_connected};
use super::{Digest, Gone, Peer, Shm, Spare, Unflushed};
use crate::Links;
use crate::mapped::{Lookup, Target};
use crate::outgoing::{Outgoing, Refused};
use crate::pace::Credit;
use crate::path::Path;
use crate::times::SILENCE;
use crate::udp::Asked;

/// The way of packets of one queue pair, or to one address handle.
#[derive(Clone, Debug)]
pub struct ShmRoute {
    /// The process at the other end.
    pub peer: Arc<Peer>,
    path: Arc<Path>,
    /// MTU of a connected queue pair, else 0.
    mtu: usize,
    front: Front,
    /// The digest of a connected queue pair's packets.
    digest: Digest,
}

impl ShmRoute {
    /// The way to an address of this host; `mtu` of a connected queue pair. None where there is no such way.
    pub fn new(
        links: &Links,
        shm: &Shm,
        av: &AddressVector,
        slot: u8,
        mtu: Option<u32>,
    ) -> Option<Self> {
        let peer = shm.peer(slot, mtu.is_some())?;
        Some(Self::to(links, peer, av, slot, mtu))
    }

    fn to(links: &Links, peer: Arc<Peer>, av: &AddressVector, slot: u8, mtu: Option<u32>) -> Self {
        Self {
            peer,
            path: links.paths.path(av.dgid.to_ip(), av.scope_id, slot, true),
            mtu: mtu.unwrap_or(0) as usize,
            digest: Digest::new(av.sgid, av.dgid),
            front: Front::new(&Arrival {
                source: av.sgid,
                destination: av.dgid,
                traffic_class: av.traffic_class,
                hop_limit: av.hop_limit,
                flow_label: av.flow_label,
                interface: 0,
                port: 0,
            }),
        }
    }

    pub(crate) fn digest(&self) -> Digest {
        self.digest
    }

    /// Whether this process has mapped a region of the peer, or does so now.
    #[inline]
    pub(crate) fn mapped(&self, links: &Links, copying: &Copying<'_>, target: &Target) -> Lookup {
        let found = self.peer.mapped.get(copying, target);
        if let Lookup::Mapped { is_new: true, .. } = found
            && let Some(shm) = &links.shm
        {
            let until = links.core.now() + HOUSEKEEPING;
            shm.next.fetch_min(until.as_nanos(), Ordering::SeqCst);
            links.wake_before(until);
        }
        found
    }

    /// Puts a packet into the ring.
    #[inline]
    pub(crate) fn send(
        &self,
        out: &mut Unflushed,
        spare: &mut Spare,
        links: &'static Links,
        packet: &Outgoing<'_>,
        now: impl Fn() -> Time,
    ) -> Result<(), Refused> {
        let Outgoing { from, headers, payload, reliable, acks, .. } = *packet;
        let opcode = headers.bth.opcode;
        let mut head = [0; MAX_HEADER];
        let bytes = payload.len();
        // A datagram is one packet.
        let is_long = self.mtu > 0 && bytes > self.mtu;
        let packets = if is_long { bytes.div_ceil(self.mtu) as u8 } else { 1 };
        let elsewhere = payload.fetched().map(|at| (at, bytes as u32));
        // The part that is in the message.
        let (payload, len) =
            if elsewhere.is_some() { (&Payload::EMPTY, 0) } else { (payload, bytes) };
        let (begin, end) = if is_connected(opcode) {
            (0, emit_connected(headers, self.digest, packets, acks, elsewhere, &mut head))
        } else {
            self.front.emit(headers, len, packets.into(), &mut head)
        };
        let probe =
            if reliable { None } else { self.ask(out, links, packet, end - begin + len, &now)? };
        let (sender, region) = out.sender(links, &self.peer, spare);
        // The payload is read first: if that fails, other obstacles do not matter.
        if end + len <= ONE_LINE {
            copy_payload(payload, links, region, head[end..].as_mut_ptr() as u64)?;
        }
        let line = head.first_chunk().filter(|_| end + len <= ONE_LINE);
        if line.is_none_or(|line| !sender.commit_line(end, len, line)) {
            loop {
                match sender.reserve(end, len) {
                    Ok(mut room) => {
                        room.write_front(&head);
                        copy_payload(payload, links, region, room.payload_ptr() as u64)?;
                        room.commit();
                        break;
                    }
                    Err(error) => {
                        if let Some(end) = self.obstacle(sender, links, packet, error, &now) {
                            return end;
                        }
                    }
                }
            }
        }
        out.note(headers.len() + bytes, bytes, acks.is_some());
        if let Some(counts) = probe {
            let dest = headers.bth.dest_qpn;
            self.credit(out, links, CreditPacket { is_probe: true, dest, from, counts });
        }
        Ok(())
    }

    /// Takes credit for a packet of an unreliable queue pair; the probe that is to follow it.
    #[inline(never)]
    fn ask(
        &self,
        out: &mut Unflushed,
        links: &'static Links,
        packet: &Outgoing<'_>,
        bytes: usize,
        now: &impl Fn() -> Time,
    ) -> Result<Option<CreditCounts>, Refused> {
        let Outgoing { from, headers, .. } = *packet;
        let (dest, opcode) = (headers.bth.dest_qpn, headers.bth.opcode);
        match self.path.ask(bytes, from, dest, opcode.takes_recv(), now()) {
            Credit::Send(probe) => Ok(probe),
            Credit::Blocked(probe, until) => {
                if let Some(counts) = probe {
                    self.credit(out, links, CreditPacket { is_probe: true, dest, from, counts });
                }
                links.wait_for_credit(until);
                Err(TransmitError::Blocked.into())
            }
        }
    }

    /// A packet finds no room, or the channel is closed; what becomes of it. `None`: it is to be tried once more.
    #[cold]
    #[inline(never)]
    fn obstacle(
        &self,
        sender: &mut Sender,
        links: &'static Links,
        packet: &Outgoing<'_>,
        error: SendError,
        now: &impl Fn() -> Time,
    ) -> Option<Result<(), Refused>> {
        let Outgoing { from, headers, reliable, .. } = *packet;
        let mut waiting = self.peer.waiting.lock();
        Some(match error {
            SendError::Full if waiting.stalled => Ok(()),
            SendError::Full if waiting.asked.is_some() => {
                waiting.blocked.push(from);
                Err(TransmitError::Blocked.into())
            }
            SendError::Full => {
                // Room that came before the question may not be told.
                let now = now();
                waiting.asked = Some(now);
                sender.ask_for_room();
                drop(waiting);
                let until = now + SILENCE;
                if let Some(shm) = &links.shm {
                    shm.next.fetch_min(until.as_nanos(), Ordering::SeqCst);
                }
                links.wake_before(until);
                return None;
            }
            SendError::Closed(_) if self.mtu == 0 => Err(Refused::Reroute),
            SendError::Closed(_) => match waiting.gone {
                Some(Gone::Unwilling) => Err(Refused::Reroute),
                Some(Gone::Dead)
                    if reliable
                        && !headers.bth.opcode.is_response()
                        && waiting.is_grace_over(now()) =>
                {
                    Err(TransmitError::PeerGone.into())
                }
                Some(Gone::Dead) => Ok(()),
                None => {
                    // The last that it sent may not be read yet.
                    waiting.blocked.push(from);
                    Err(TransmitError::Blocked.into())
                }
            },
            error => {
                debug_assert!(false, "no segment is longer than a ring takes: {error}");
                Ok(())
            }
        })
    }

    fn credit(&self, out: &mut Unflushed, links: &Links, packet: CreditPacket) {
        // A probe that finds no room is asked for again.
        let _ = put_credit(&self.peer, &self.front, out, links, packet);
    }
}

/// Copies a payload into a message.
#[inline]
fn copy_payload(
    payload: &Payload<'_>,
    links: &'static Links,
    region: &mut LastLocal<'static>,
    to: u64,
) -> Result<(), TransmitError> {
    if payload.is_empty() {
        return Ok(());
    }
    let regions = (region, &mut LastRemote::default());
    Ok(payload.copy_to_addr(&links.core.mrs, regions, &links.core.memory, to)?)
}

fn put_credit(
    peer: &Peer,
    front: &Front,
    out: &mut Unflushed,
    links: &Links,
    packet: CreditPacket,
) -> bool {
    let mut head = [0; MAX_HEADER];
    let at = front.write(&mut head);
    let end = at + CreditPacket::LEN;
    packet.emit(&mut head[at..end]);
    let Ok(mut room) = out.sender(links, peer, &mut Spare::default()).0.reserve(end, 0) else {
        return false;
    };
    room.write_header(&head[..end]);
    room.commit();
    true
}

impl Shm {
    /// Answers a credit probe that came by this link. False if it has to take another.
    pub(crate) fn echo(
        &self,
        out: &mut Unflushed,
        links: &Links,
        asked: &Asked,
        packet: CreditPacket,
    ) -> bool {
        let Some(peer) = self.peer(packet.dest.slot(), false) else { return false };
        let front = Front::new(&Arrival {
            source: asked.to_us.into(),
            destination: asked.from.into(),
            traffic_class: 0,
            hop_limit: 0,
            flow_label: 0,
            interface: 0,
            port: 0,
        });
        put_credit(&peer, &front, out, links, packet)
    }
}

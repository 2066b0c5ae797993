//! The way of packets by this link.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyverbs_net::shm::{Copying, MAX_HEADER, ONE_LINE, SendError};
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::mr::LastRemote;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Gid;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::AddressVector;

use super::message::{FRONT_V4, Front, PLAIN};
use super::{Gone, Peer, Shm, Spare, Unflushed};
use crate::Links;
use crate::mapped::{Lookup, Target};
use crate::pace::Credit;
use crate::path::Path;
use crate::route::{Outgoing, Refused};
use crate::times::{SILENCE, SWEEP_EVERY};
use crate::udp::{Asked, CreditPacket, takes_recv};

/// The way of packets of one queue pair, or to one address handle.
#[derive(Clone, Debug)]
pub struct ShmRoute {
    /// The process at the other end.
    pub peer: Arc<Peer>,
    path: Arc<Path>,
    /// MTU of a connected queue pair, else 0.
    mtu: usize,
    front: Front,
    /// Our address on it.
    source: Gid,
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
            source: av.sgid,
            front: Front::new(&Arrival {
                source: av.sgid,
                destination: av.dgid,
                traffic_class: av.traffic_class,
                hop_limit: av.hop_limit,
                flow_label: av.flow_label,
                interface: 0,
            }),
        }
    }

    pub(crate) fn source(&self) -> Gid {
        self.source
    }

    /// Whether this process has mapped a region of the peer, or does so now.
    #[inline]
    pub(crate) fn mapped(&self, links: &Links, copying: &Copying<'_>, target: &Target) -> Lookup {
        let found = self.peer.mapped.get(copying, target);
        if let Lookup::Mapped { is_new: true, .. } = found
            && let Some(shm) = &links.shm
        {
            let until = links.core.now() + SWEEP_EVERY;
            shm.next.fetch_min(until.as_nanos(), Ordering::SeqCst);
            links.wake_before(until);
        }
        found
    }

    /// Puts a packet into the ring.
    pub(crate) fn send(
        &self,
        out: &mut Unflushed,
        spare: &mut Spare,
        links: &'static Links,
        packet: &Outgoing<'_>,
        now: impl Fn() -> Time,
    ) -> Result<(), Refused> {
        let Outgoing { from, headers, payload, reliable, .. } = *packet;
        if reliable && let Some(sent) = self.send_line(out, spare, links, headers, payload) {
            return sent.map_err(Refused::Transmit);
        }
        let mut head = [0; MAX_HEADER];
        let len = payload.len();
        let (at, end) = self.emit(headers, len, &mut head);
        if len > self.mtu && self.mtu > 0 {
            head[6..8].copy_from_slice(&(len.div_ceil(self.mtu) as u16).to_be_bytes());
        }
        let dest = headers.bth.dest_qpn;
        let opcode = headers.bth.opcode;
        let mut probe = None;
        if !reliable {
            match self.path.ask(end + len, from, dest, takes_recv(opcode), now()) {
                Credit::Send(with) => probe = with,
                Credit::Blocked(with, until) => {
                    if let Some(counts) = with {
                        self.credit(
                            out,
                            links,
                            CreditPacket { is_probe: true, dest, from, counts },
                        );
                    }
                    links.wait_for_credit(until);
                    return Err(TransmitError::Blocked.into());
                }
            }
        }
        let (sender, region) = out.sender(links, &self.peer, spare);
        let message = loop {
            match sender.reserve(end, len) {
                Ok(mut room) => {
                    room.write_front(&head);
                    if len > 0 {
                        let to = room.payload_ptr() as u64;
                        let regions = (&mut *region, &mut LastRemote::default());
                        payload
                            .copy_to_addr(&links.core.mrs, regions, &links.core.memory, to)
                            .map_err(TransmitError::from)?;
                    }
                    break room.commit();
                }
                Err(SendError::Full) => {
                    let mut waiting = self.peer.waiting.lock();
                    if waiting.stalled {
                        return Ok(());
                    }
                    if waiting.asked.is_some() {
                        waiting.blocked.push(from);
                        return Err(TransmitError::Blocked.into());
                    }
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
                }
                Err(SendError::Closed(_)) if self.mtu == 0 => return Err(Refused::Reroute),
                Err(SendError::Closed(_)) => {
                    let mut waiting = self.peer.waiting.lock();
                    return match waiting.gone {
                        Some(Gone::Unwilling) => Err(Refused::Reroute),
                        Some(Gone::Dead)
                            if reliable
                                && !opcode.is_response()
                                && waiting.grace.is_some_and(|until| now() >= until) =>
                        {
                            Err(TransmitError::PeerGone.into())
                        }
                        Some(Gone::Dead) => Ok(()),
                        None => {
                            // The last that it sent may not be read yet.
                            waiting.blocked.push(from);
                            Err(TransmitError::Blocked.into())
                        }
                    };
                }
                Err(error) => {
                    debug_assert!(false, "no segment is longer than a ring takes: {error}");
                    return Ok(());
                }
            }
        };
        out.note(end - at + len, len, opcode.is_request().then_some(message));
        if let Some(counts) = probe {
            self.credit(out, links, CreditPacket { is_probe: true, dest, from, counts });
        }
        Ok(())
    }

    /// As [`send`](Self::send), for a packet with only a base header that goes into one line with its payload: the
    /// likely one of a program that sends short messages. `None` if it is no such packet, or there may be no room. The
    /// payload is read first: if that fails, other obstacles do not matter.
    #[inline]
    fn send_line(
        &self,
        out: &mut Unflushed,
        spare: &mut Spare,
        links: &'static Links,
        headers: &Headers,
        payload: &Payload<'_>,
    ) -> Option<Result<(), TransmitError>> {
        let (front, len) = (self.front.v4()?, payload.len());
        if len > ONE_LINE - PLAIN || !headers.is_bare() {
            return None;
        }
        let mut line = [0; ONE_LINE];
        line[..FRONT_V4].copy_from_slice(front);
        let bth: &mut [u8; Bth::LEN] = (&mut line[FRONT_V4..PLAIN]).try_into().ok()?;
        Bth { pad: Bth::pad_of(len), ..headers.bth }.emit(bth);
        let (sender, region) = out.sender(links, &self.peer, spare);
        if len > 0 {
            let to = line[PLAIN..].as_mut_ptr() as u64;
            let regions = (region, &mut LastRemote::default());
            if let Err(fault) =
                payload.copy_to_addr(&links.core.mrs, regions, &links.core.memory, to)
            {
                return Some(Err(fault.into()));
            }
        }
        let message = sender.commit_line(PLAIN, len, &line)?;
        out.note(Bth::LEN + len, len, headers.bth.opcode.is_request().then_some(message));
        Some(Ok(()))
    }

    /// Writes the part before a payload of `len` bytes; returns where the packet's headers begin and end.
    #[inline]
    fn emit(&self, headers: &Headers, len: usize, head: &mut [u8; MAX_HEADER]) -> (usize, usize) {
        let at = self.front.write(head);
        let end = at + headers.emit(&mut head[at..]);
        // The pad count, which is the link's affair.
        head[at + 1] = head[at + 1] & !0x30 | Bth::pad_of(len) << 4;
        (at, end)
    }

    fn credit(&self, out: &mut Unflushed, links: &Links, packet: CreditPacket) {
        // A probe that finds no room is asked for again.
        let _ = put_credit(&self.peer, &self.front, out, links, packet);
    }
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
        });
        put_credit(&peer, &front, out, links, packet)
    }
}

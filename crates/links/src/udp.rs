//! The UDP link: packets staged in batches, with their ICRC.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use anyverbs_locks::{Mutex, rank};
use anyverbs_net::{Datagram, Destination, Outlet, OutletRef, TxBatch};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::mr::{LastLocal, LastRemote};
use anyverbs_proto::run::Run;
use anyverbs_proto::time::Time;
use anyverbs_proto::wire::bth::Bth;
use anyverbs_proto::wire::carried_ack;
use anyverbs_proto::wire::credit::CreditPacket;
use anyverbs_proto::wire::icrc::{Flow, FlowOfLength, IcrcVerdict};
use anyverbs_proto::wire::packet::ICRC_LEN;
use anyverbs_proto::wire::reason::ReasonPacket;
use anyverbs_proto::wr::AddressVector;

use crate::Links;
use crate::outgoing::Outgoing;
use crate::pace::Credit;
use crate::path::Path;

const CREDIT_LEN: usize = CreditPacket::LEN + ICRC_LEN;

/// Batches kept for use again; a 64 KiB buffer each.
const POOL: usize = 16;

/// Unused batches.
#[derive(Debug, Default)]
#[expect(clippy::vec_box, reason = "they move in and out as pointers")]
pub struct BatchPool(Mutex<rank::BatchPool, Vec<Box<TxBatch>>>);

impl BatchPool {
    fn take(&self) -> Box<TxBatch> {
        self.0.lock().pop().unwrap_or_default()
    }

    fn put(&self, batch: Box<TxBatch>) {
        let mut pool = self.0.lock();
        if pool.len() < POOL {
            pool.push(batch);
        }
    }
}

/// The way of packets of one queue pair, or to one address handle.
#[derive(Clone, Debug)]
pub struct UdpRoute {
    outlet: Outlet,
    flow: Option<Flow>,
    /// To a multicast group.
    pub(crate) is_group: bool,
    /// The path that it shares with other queue pairs.
    pub path: Arc<Path>,
}

impl UdpRoute {
    /// The route to a peer whose process has this slot. `reliable`: by a connected socket, and by an unconnected one now and then,
    /// whose packets may overtake each other.
    pub fn new(links: &Links, av: &AddressVector, slot: u8, reliable: bool) -> Self {
        let (ip, source) = (av.dgid.to_ip(), av.sgid.to_ip());
        let port = links.core.config.udp_port;
        let to = Destination {
            source: Some(source),
            interface: av.scope_id,
            traffic_class: av.traffic_class,
            hop_limit: av.hop_limit,
            flow_label: av.flow_label,
            sending_socket: slot,
            ..Destination::new(address(ip, port, av.scope_id))
        };
        // Without a sending socket nothing is sent, and every try says so in the counters.
        let outlet = if reliable { links.port.connect(to) } else { to.into() };
        let from = links.port.source_port(&outlet);
        let flow = from.ok().map(|from| Flow::new(source, ip, from, port));
        Self {
            outlet,
            flow,
            is_group: ip.is_multicast(),
            path: links.paths.path(ip, av.scope_id, slot, links.core.gids.is_of_host(av.dgid)),
        }
    }
}

/// The socket address of a peer.
pub fn address(ip: IpAddr, port: u16, scope_id: u32) -> SocketAddr {
    match ip {
        IpAddr::V4(ip) => (ip, port).into(),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, scope_id).into(),
    }
}

/// Datagrams that are staged and not yet sent.
#[derive(Debug, Default)]
pub struct Staged {
    /// Boxed: each call into a queue pair has an outbox, moves it about, and may send nothing by UDP.
    batch: Option<Box<TxBatch>>,
    /// Packets of queue pairs in it, and their bytes, to be counted together.
    sent: (u64, u64),
    /// ACKs that they carry.
    acks: u64,
    /// The region of the last element that was copied, while there is a batch.
    region: LastLocal<'static>,
}

impl Staged {
    /// Stages a packet. `target` is the region that the peer has named last.
    pub(crate) fn send(
        &mut self,
        links: &'static Links,
        route: &UdpRoute,
        packet: &Outgoing<'_>,
        target: &mut LastRemote<'static>,
        now: Time,
    ) -> Result<(), TransmitError> {
        let Outgoing { from, headers, payload, reliable, acks, note, .. } = *packet;
        let pad = usize::from(Bth::pad_of(payload.len()));
        let (head, body) = (headers.len(), payload.len());
        let carried = if acks.is_some() { carried_ack::LEN } else { 0 };
        let len = head + body + pad + carried + ICRC_LEN;
        let Some(flow) = &route.flow else {
            self.lose(links, 1);
            return Ok(());
        };
        let dest = headers.bth.dest_qpn;
        // A group does not answer.
        let probe = if reliable || route.is_group {
            None
        } else {
            match route.path.ask(len, from, dest, headers.bth.opcode.takes_recv(), now) {
                Credit::Send(probe) => probe,
                Credit::Blocked(probe, until) => {
                    if let Some(counts) = probe {
                        let probe = CreditPacket { is_probe: true, dest, from, counts };
                        self.credit(links, &route.outlet, flow, probe);
                    }
                    links.wait_for_credit(until);
                    return Err(TransmitError::Blocked);
                }
            }
        };
        let batch = self.batch.get_or_insert_with(|| links.batches.take());
        let Ok((room, id)) = batch.segment(&links.port, &route.outlet, len) else {
            // As if the network had lost it.
            self.sent.0 += 1;
            return Ok(());
        };
        headers.emit(room);
        // The pad count, which is the link's affair, as the ACKs are.
        room[1] = room[1] & !0x30 | (pad as u8) << 4;
        if reliable && links.may_carry_acks() {
            carried_ack::announce(room);
        }
        let to = room[head..head + body].as_mut_ptr() as u64;
        if let Err(fault) = payload.copy_to_addr(
            &links.core.mrs,
            (&mut self.region, target),
            &links.core.memory,
            to,
        ) {
            batch.discard_last(1);
            return Err(fault.into());
        }
        if pad > 0 {
            room[head + body..][..pad].fill(0);
        }
        if let Some(acks) = acks {
            carried_ack::write(acks, &mut room[..len - ICRC_LEN]);
            self.acks += 1;
        }
        seal(flow, id, room);
        if let Some(note) = note {
            batch.note(note);
        }
        if let Some(counts) = probe {
            let probe = CreditPacket { is_probe: true, dest, from, counts };
            self.credit(links, &route.outlet, flow, probe);
        }
        self.sent = (self.sent.0 + 1, self.sent.1 + len as u64);
        Ok(())
    }

    /// Stages packets in a row of a reliable queue pair. How many: perhaps not all fit one batch. After an error the packet
    /// behind those was not taken.
    pub(crate) fn send_run(
        &mut self,
        links: &'static Links,
        route: &UdpRoute,
        run: &Run<'_>,
        target: &mut LastRemote<'static>,
    ) -> (u32, Result<(), TransmitError>) {
        let (body, mrs) = (run.payload_len(), &links.core.mrs);
        let Some(flow) = &route.flow else {
            self.lose(links, run.len().into());
            return (run.len(), Ok(()));
        };
        let (head, pad) = (run.headers().len(), usize::from(Bth::pad_of(body)));
        let len = head + body + pad + ICRC_LEN;
        let batch = self.batch.get_or_insert_with(|| links.batches.take());
        let rooms = match batch.equal_segments(&links.port, &route.outlet, len, run.len() as usize)
        {
            Ok(rooms) => rooms,
            Err(_) => {
                // As if the network had lost them.
                self.sent.0 += u64::from(run.len());
                return (run.len(), Ok(()));
            }
        };
        let (staged, mut headers) = (rooms.len() as u32, run.repeated());
        let regions = (&mut self.region, &mut *target);
        let place = run.whole().and_then(|whole| whole.place(mrs, regions));
        let flow = flow.of_length(len - ICRC_LEN);
        let (mut n, mut result, takes_acks) = (0, Ok(()), links.may_carry_acks());
        for (room, id) in rooms {
            let payload = run.go_to(n, &mut headers);
            headers.write(run.asks(n), room);
            if takes_acks {
                carried_ack::announce(room);
            }
            let at = (n as usize * body) as u64;
            let (packet, bytes) = room.split_at_mut(head);
            let bytes = &mut bytes[..body];
            let copied = match place {
                Some(from) => {
                    let register = flow.register(id, packet);
                    links
                        .core
                        .memory
                        .read_and_feed(from.wrapping_add(at), bytes, register)
                        .map(Some)
                }
                None => {
                    let (to, regions) =
                        (bytes.as_mut_ptr() as u64, (&mut self.region, &mut *target));
                    payload.copy_to_addr(mrs, regions, &links.core.memory, to).map(|()| None)
                }
            };
            room[head + body..len - ICRC_LEN].fill(0);
            match copied {
                Ok(Some(register)) => FlowOfLength::end(register, &mut room[head + body..]),
                Ok(None) => flow.seal(id, room),
                Err(fault) => {
                    result = Err(fault.into());
                    break;
                }
            }
            n += 1;
        }
        batch.discard_last((staged - n) as usize);
        self.sent = (self.sent.0 + u64::from(n), self.sent.1 + u64::from(n) * len as u64);
        (n, result)
    }

    /// Counts packets for which there is no sending socket. The flush counts where there is a batch.
    #[cold]
    fn lose(&mut self, links: &Links, packets: u64) {
        self.batch.get_or_insert_with(|| links.batches.take());
        self.sent.0 += packets;
    }

    fn credit<'a>(
        &mut self,
        links: &Links,
        to: impl Into<OutletRef<'a>>,
        flow: &Flow,
        packet: CreditPacket,
    ) {
        let batch = self.batch.get_or_insert_with(|| links.batches.take());
        if let Ok((room, id)) = batch.segment(&links.port, to, CREDIT_LEN) {
            packet.emit(&mut room[..CreditPacket::LEN]);
            seal(flow, id, room);
        }
    }

    /// Stages the reason of the NAK that comes next.
    pub(crate) fn explain(&mut self, links: &Links, route: &UdpRoute, packet: &ReasonPacket) {
        let Some(flow) = &route.flow else { return };
        let batch = self.batch.get_or_insert_with(|| links.batches.take());
        let len = ReasonPacket::LEN + ICRC_LEN;
        if let Ok((room, id)) = batch.segment(&links.port, &route.outlet, len) {
            room[..ReasonPacket::LEN].copy_from_slice(&packet.to_bytes());
            seal(flow, id, room);
        }
    }

    /// Answers a credit probe.
    pub(crate) fn echo(&mut self, links: &Links, asked: &Asked, answer: CreditPacket) {
        let Asked { packet: probe, from, scope_id, to_us, .. } = asked;
        let port = links.core.config.udp_port;
        let to = Destination {
            source: Some(*to_us),
            interface: *scope_id,
            sending_socket: probe.from.slot(),
            ..Destination::new(address(*from, port, *scope_id))
        };
        if let Ok(source_port) = links.port.source_port(&to) {
            let flow = Flow::new(*to_us, *from, source_port, port);
            self.credit(links, &to, &flow, answer);
        }
    }

    /// Sends the staged packets of a device.
    #[inline]
    pub(crate) fn flush(&mut self, links: &Links, device: u8) {
        if let Some(batch) = self.batch.take() {
            self.flush_batch(batch, links, device);
        }
    }

    fn flush_batch(&mut self, mut batch: Box<TxBatch>, links: &Links, device: u8) {
        self.region.release();
        let dropped = batch.stats().dropped;
        if let Err(error) = batch.flush(&links.port) {
            tracing::debug!(%error, "packets were not sent");
        }
        links.send_drops.fetch_add(batch.stats().dropped - dropped, Ordering::Relaxed);
        links.batches.put(batch);
        let (packets, bytes) = std::mem::take(&mut self.sent);
        links.core.count(device.into(), Counter::SentPkts, packets);
        links.core.count(device.into(), Counter::SentBytes, bytes);
        if self.acks > 0 {
            links.core.count(device.into(), Counter::AcksSent, std::mem::take(&mut self.acks));
        }
    }
}

/// The ID in the IPv4 header of a datagram that came to `port`: the one with which its ICRC is right, or else the likeliest.
pub(crate) fn ip_id(datagram: &Datagram<'_>, port: u16) -> u16 {
    let Datagram { source, destination, segment, bytes, .. } = *datagram;
    match Flow::new(source.ip(), destination, source.port(), port).check(bytes, segment) {
        IcrcVerdict::SomeId(id) => id,
        IcrcVerdict::Exact | IcrcVerdict::Wrong => segment,
    }
}

/// Writes the ICRC into the last four bytes.
pub fn seal(flow: &Flow, id: u16, packet: &mut [u8]) {
    flow.of_length(packet.len() - ICRC_LEN).seal(id, packet);
}

/// A probe that came, and from where.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    /// The question.
    pub packet: CreditPacket,
    /// The host that asks.
    pub from: IpAddr,
    /// The interface of a link-local address.
    pub scope_id: u32,
    /// Our address that was asked.
    pub to_us: IpAddr,
    /// By the same-host link.
    pub by_ring: bool,
}

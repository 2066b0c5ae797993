//! The queue pair of a datagram socket, its buffers, and the peers that it knows.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};

use anyverbs::{
    Access, AhAttr, CompChannel, Cq, Gid, QKey, Qp, QpAttr, QpAttrMask, QpInitAttr, QpState,
    QpType, Qpn, RecvWr, SendFlags, SendOp, SendWr, UdDest, Wc, WcStatus,
};
use parking_lot::Mutex;
use socket2::Socket;

use super::wire::{Header, MAX_DATAGRAM, Purpose, UdpHeader};
use crate::device::Device;
use crate::errno::{Errno, Result};
use crate::needs::{datagram_cap, datagram_cqe};
use crate::ring::{Cursor, Ring};
use crate::sleep::set_nonblocking;
use crate::sleepers::Sleepers;

/// Q_Key of all datagram ids (`RDMA_UDP_QKEY`).
const QKEY: QKey = QKey(0x0123_4567);
/// Bytes before a datagram in a receive buffer.
const GRH: usize = 40;
/// A receive buffer; a multiple of 8.
const STRIDE: usize = GRH + MAX_DATAGRAM;
/// Completions taken at once.
const BATCH: usize = 16;
/// Datagrams read from UDP in one go.
const UDP_BUDGET: usize = 16;
/// Peers that are remembered.
const MAX_PEERS: usize = 4096;

/// A datagram that waits to be read.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) from: SocketAddr,
    pub(super) data: Data,
}

#[derive(Debug)]
pub(super) enum Data {
    /// In a receive buffer: its number, and the place and length in it.
    Buffer { slot: u32, at: usize, len: usize },
    /// The datagram came over UDP.
    Owned(Box<[u8]>),
}

impl Received {
    pub(super) fn len(&self) -> usize {
        match &self.data {
            Data::Buffer { len, .. } => *len,
            Data::Owned(data) => data.len(),
        }
    }
}

/// A peer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Peer {
    /// The header of our datagrams to it.
    header: Header,
    /// Our address towards it, which a port of the device has.
    ip: IpAddr,
    port: u8,
    sgid_index: u8,
    mtu: usize,
    /// The address of its queue pair, once it has told it.
    dest: Option<UdDest>,
}

#[derive(Debug, Default)]
pub(super) struct State {
    /// Send buffers that are free.
    free: Vec<u32>,
    slots: usize,
    pub(super) received: VecDeque<Received>,
    peers: HashMap<SocketAddr, Peer>,
    pub(super) connected: Option<SocketAddr>,
    pub(super) edges: (u64, u64),
}

impl State {
    pub(super) fn can_send(&self) -> bool {
        !self.free.is_empty()
    }

    pub(super) fn all_sent(&self) -> bool {
        self.free.len() == self.slots
    }
}

/// The queue pair on a port of the device, and the buffers of its receives.
#[derive(Debug)]
struct End {
    qp: Qp,
    recv_ring: Ring,
}

impl End {
    /// Posts a receive buffer by its number, which is this one of the whole socket.
    fn post_recv(&self, slot: u32, buffer: usize) -> Result<()> {
        let sges = [self.recv_ring.sge(buffer * STRIDE, STRIDE)];
        let wr = RecvWr { wr_id: slot.into(), sges: &sges };
        self.qp.post_recv(&[wr]).map_err(|(_, error)| error.into())
    }
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Endpoint {
    /// For each port of the device, made when the first peer is met there.
    ends: Box<[OnceLock<End>]>,
    making: Mutex<()>,
    pub(super) cq: Cq,
    pub(super) channel: CompChannel,
    send_ring: Ring,
    pub(super) state: Mutex<State>,
    polling: Mutex<()>,
    inline: usize,
    queue: usize,
    /// The system's error for an earlier datagram, or for the queue pair; reported once.
    pub(super) error: AtomicI32,
    /// The threads that sleep on the socket.
    sleepers: Arc<Sleepers>,
    device: Arc<Device>,
}

impl Endpoint {
    pub(super) fn new(
        device: &Arc<Device>,
        sleepers: &Arc<Sleepers>,
        send: u32,
        recv: u32,
        inline: u32,
    ) -> Result<Self> {
        let (send_slots, recv_slots) = (send as usize, recv as usize);
        let (pd, context) = (&device.pd, &device.context);
        let channel = context.create_comp_channel()?;
        set_nonblocking(&channel)?;
        let ports = context.device_attr()?.phys_port_cnt;
        let cqe = datagram_cqe(send, recv, ports);
        let cq = context.create_cq(cqe, Some(&channel), 0, 0)?;
        let send_ring = Ring::new(pd, send_slots * MAX_DATAGRAM, Access::LOCAL_WRITE)?;
        let state = State {
            free: (0..send_slots as u32).collect(),
            slots: send_slots,
            received: VecDeque::with_capacity(recv_slots),
            edges: (0, 1),
            ..State::default()
        };
        Ok(Self {
            ends: (0..ports).map(|_| OnceLock::new()).collect(),
            making: Mutex::new(()),
            cq,
            channel,
            send_ring,
            state: Mutex::new(state),
            polling: Mutex::new(()),
            inline: inline as usize,
            queue: recv_slots,
            error: AtomicI32::new(0),
            sleepers: Arc::clone(sleepers),
            device: Arc::clone(device),
        })
    }

    /// The end on a port of the device.
    fn end(&self, port: u8) -> Result<&End> {
        let index = usize::from(port).wrapping_sub(1);
        let slot = self.ends.get(index).ok_or(Errno(libc::EADDRNOTAVAIL))?;
        if let Some(end) = slot.get() {
            return Ok(end);
        }
        let _turn = self.making.lock();
        if let Some(end) = slot.get() {
            return Ok(end);
        }
        let end = self.make_end(port)?;
        let first = index * self.queue;
        for n in 0..self.queue {
            end.post_recv((first + n) as u32, n)?;
        }
        Ok(slot.get_or_init(|| end))
    }

    fn make_end(&self, port: u8) -> Result<End> {
        let Device { pd, context } = &*self.device;
        let send = self.state.lock().slots as u32;
        let cap = datagram_cap(send, self.queue as u32, self.inline as u32);
        let qp = context.create_qp(
            pd,
            &QpInitAttr {
                send_cq: &self.cq,
                recv_cq: &self.cq,
                srq: None,
                cap,
                qp_type: QpType::Ud,
                sq_sig_all: true,
                cookie: 0,
            },
        )?;
        use QpAttrMask as M;
        let init = QpAttr { state: QpState::Init, port, qkey: QKEY, ..QpAttr::default() };
        qp.modify(&init, M::STATE | M::PKEY_INDEX | M::PORT | M::QKEY)?;
        qp.modify(&QpAttr { state: QpState::Rtr, ..init }, M::STATE)?;
        qp.modify(&QpAttr { state: QpState::Rts, ..init }, M::STATE | M::SQ_PSN)?;
        let recv_ring = Ring::new(pd, self.queue * STRIDE, Access::LOCAL_WRITE)?;
        Ok(End { qp, recv_ring })
    }

    /// The end with a receive buffer, and the number of the buffer there.
    fn buffer(&self, slot: u32) -> Result<(&End, usize)> {
        let slot = slot as usize;
        let end = self.ends.get(slot / self.queue).and_then(OnceLock::get);
        Ok((end.ok_or(Errno(libc::EIO))?, slot % self.queue))
    }

    /// Takes datagrams from the network, over RDMA and over UDP.
    pub(super) fn progress(&self, udp: &Socket) {
        // A caller that finds nothing must know that no other caller has taken it without telling yet.
        let _turn = self.polling.lock();
        loop {
            let mut wcs = [Wc::default(); BATCH];
            let n = self.cq.poll(&mut wcs).unwrap_or_else(|error| {
                self.fail(error.errno());
                0
            });
            for wc in &wcs[..n] {
                self.complete(wc);
            }
            if n < BATCH {
                break;
            }
        }
        self.read_udp(udp);
    }

    fn complete(&self, wc: &Wc) {
        let slot = wc.wr_id as u32;
        if wc.wr_id >> 32 != 0 {
            let mut state = self.state.lock();
            if state.free.is_empty() {
                state.edges.1 += 1;
            }
            state.free.push(slot);
            return;
        }
        if wc.status != WcStatus::Success {
            return;
        }
        let Ok((end, buffer)) = self.buffer(slot) else { return };
        let base = buffer * STRIDE + GRH;
        let received = (wc.byte_len as usize).saturating_sub(GRH).min(MAX_DATAGRAM);
        let header = Header::parse(&end.recv_ring.read(base), received);
        let Some((from, skip)) = header else {
            self.give_back(slot);
            return;
        };
        let mut state = self.state.lock();
        if state.connected.is_some_and(|peer| !same(peer, from)) {
            drop(state);
            self.give_back(slot);
            return;
        }
        let data = Data::Buffer { slot, at: base + skip, len: received - skip };
        state.received.push_back(Received { from, data });
        state.edges.0 += 1;
    }

    /// A receive buffer was read.
    pub(super) fn give_back(&self, slot: u32) {
        let posted = self.buffer(slot).and_then(|(end, buffer)| end.post_recv(slot, buffer));
        if let Err(errno) = posted {
            self.fail(errno.0);
        }
    }

    fn fail(&self, errno: i32) {
        self.error.store(errno, Ordering::Release);
        self.sleepers.wake();
    }

    /// Copies a datagram to the program, as far as there is room.
    pub(super) fn copy(&self, received: &Received, to: &mut Cursor<'_>) -> Result<()> {
        let len = received.len().min(to.left());
        match &received.data {
            Data::Buffer { slot, at, .. } => self.buffer(*slot)?.0.recv_ring.drain(*at, to, len),
            Data::Owned(data) => to.copy_in(data.as_ptr(), len),
        }
    }

    fn read_udp(&self, udp: &Socket) {
        for _ in 0..UDP_BUDGET {
            let mut bytes = [0; MAX_DATAGRAM + UdpHeader::MAX];
            let (n, from) = match receive(udp, &mut bytes) {
                Ok(Some(received)) => received,
                Ok(None) => return,
                Err(errno) => {
                    self.fail(errno.0);
                    return;
                }
            };
            let Some((header, data)) = UdpHeader::parse(&bytes[..n], from) else { continue };
            self.take(udp, from, header, data);
        }
    }

    /// A peer tells its queue pair, over UDP.
    fn take(&self, udp: &Socket, from: SocketAddr, header: UdpHeader, data: &[u8]) {
        let known = self.state.lock().peers.get(&from).copied();
        let peer = match (known, header.purpose) {
            (Some(peer), _) => peer,
            (None, Purpose::Data) => match self.meet(udp, from) {
                Ok(peer) => peer,
                Err(errno) => {
                    tracing::debug!(%from, "rsocket: a datagram of somebody out of reach: {errno}");
                    return;
                }
            },
            // This answers a question that we never asked.
            (None, Purpose::Control) => return,
        };
        if peer.dest.is_none_or(|dest| dest.qpn != header.qpn) {
            match self.dest(&peer, from.ip(), header.qpn) {
                Ok(dest) => {
                    if let Some(peer) = self.state.lock().peers.get_mut(&from) {
                        peer.dest = Some(dest);
                    }
                }
                Err(errno) => tracing::debug!(%from, "rsocket: no path to a peer: {errno}"),
            }
        }
        if header.purpose == Purpose::Data {
            let _ = self.send_udp(udp, &peer, from, Purpose::Control, &[]);
            let mut state = self.state.lock();
            let strange = state.connected.is_some_and(|peer| !same(peer, from));
            if !strange && state.received.len() < self.queue {
                state.received.push_back(Received { from, data: Data::Owned(data.into()) });
                state.edges.0 += 1;
                drop(state);
                // It is gone from the UDP socket, and other threads may wait for it.
                self.sleepers.wake();
            }
        }
    }

    fn dest(&self, peer: &Peer, ip: IpAddr, qpn: Qpn) -> Result<UdDest> {
        let attr = AhAttr {
            dgid: Gid::from(ip),
            sgid_index: peer.sgid_index,
            hop_limit: 64,
            is_global: true,
            port: peer.port,
            ..AhAttr::default()
        };
        let ah = self.device.pd.create_ah(&attr)?;
        Ok(ah.dest(qpn, QKEY))
    }

    /// The properties of a peer, which are found out at its first datagram.
    pub(super) fn peer(&self, udp: &Socket, to: SocketAddr) -> Result<Peer> {
        if let Some(peer) = self.state.lock().peers.get(&to) {
            return Ok(*peer);
        }
        self.meet(udp, to)
    }

    fn meet(&self, udp: &Socket, to: SocketAddr) -> Result<Peer> {
        let local = source_towards(udp, to)?;
        let gid = Gid::from(local.ip());
        let scope = match to {
            SocketAddr::V6(v6) if v6.ip().is_unicast_link_local() => v6.scope_id(),
            _ => 0,
        };
        let entry = self
            .device
            .context
            .addresses()?
            .into_iter()
            .find(|entry| entry.gid == gid && (scope == 0 || entry.interface == scope))
            .ok_or(Errno(libc::EADDRNOTAVAIL))?;
        self.end(entry.port)?;
        let peer = Peer {
            header: Header::new(local),
            ip: local.ip(),
            port: entry.port,
            sgid_index: u8::try_from(entry.index).map_err(|_| Errno(libc::EADDRNOTAVAIL))?,
            mtu: entry.mtu.bytes() as usize,
            dest: None,
        };
        let mut state = self.state.lock();
        if state.peers.len() >= MAX_PEERS
            && let Some(other) = state.peers.keys().next().copied()
        {
            // The peer is met again when it is needed.
            state.peers.remove(&other);
        }
        state.peers.insert(to, peer);
        Ok(peer)
    }

    /// Sends a datagram. False: there is no free buffer.
    pub(super) fn send(
        &self,
        udp: &Socket,
        to: SocketAddr,
        peer: &Peer,
        from: &mut Cursor<'_>,
    ) -> Result<bool> {
        let len = peer.header.len() + from.left();
        if len > MAX_DATAGRAM {
            return Err(Errno(libc::EMSGSIZE));
        }
        let dest = match peer.dest {
            Some(dest) if len <= peer.mtu => dest,
            // The peer is not known yet, or the datagram is too long for one packet, and UDP cuts it.
            _ => {
                let mut data = [0; MAX_DATAGRAM];
                let data = &mut data[..from.left()];
                // SAFETY: a live array of that length.
                unsafe { from.copy_out(data.as_mut_ptr(), data.len()) }?;
                self.send_udp(udp, peer, to, Purpose::Data, data)?;
                return Ok(true);
            }
        };
        let Some(slot) = self.state.lock().free.pop() else { return Ok(false) };
        let at = slot as usize * MAX_DATAGRAM;
        self.send_ring.write(at, peer.header.bytes());
        let data = from.left();
        let posted = self.send_ring.fill(at + peer.header.len(), from, data).and_then(|()| {
            let sges = [self.send_ring.sge(at, len)];
            let flags = if len <= self.inline { SendFlags::INLINE } else { SendFlags::empty() };
            let wr_id = (1 << 32) | u64::from(slot);
            let wr =
                SendWr { wr_id, op: SendOp::Send, flags, sges: &sges, ud: Some(dest), xrc_srqn: 0 };
            self.end(peer.port)?.qp.post_send(&[wr]).map_err(|(_, error)| error.into())
        });
        if posted.is_err() {
            self.state.lock().free.push(slot);
            // Another thread may have found no buffer meanwhile.
            self.sleepers.wake();
        }
        posted.map(|()| true)
    }

    fn send_udp(
        &self,
        udp: &Socket,
        peer: &Peer,
        to: SocketAddr,
        purpose: Purpose,
        data: &[u8],
    ) -> Result<()> {
        let header = UdpHeader { purpose, qpn: self.end(peer.port)?.qp.qpn(), ip: peer.ip };
        let (header, len) = header.encode();
        let parts = [std::io::IoSlice::new(&header[..len]), std::io::IoSlice::new(data)];
        let connected = self.state.lock().connected.is_some_and(|peer| same(peer, to));
        let sent = if connected {
            udp.send_vectored(&parts)
        } else {
            udp.send_to_vectored(&parts, &to.into())
        };
        sent.map(|_| ()).map_err(Errno::from)
    }

    /// The socket is no longer connected, and may have another address.
    pub(super) fn forget(&self) {
        let mut state = self.state.lock();
        state.connected = None;
        state.peers.clear();
    }
}

/// Whether two addresses are one; flow and scope do not count.
fn same(a: SocketAddr, b: SocketAddr) -> bool {
    a.ip() == b.ip() && a.port() == b.port()
}

/// Reads a datagram if one waits.
fn receive(udp: &Socket, bytes: &mut [u8]) -> Result<Option<(usize, SocketAddr)>> {
    use std::os::fd::AsRawFd;
    // SAFETY: all-zero is a valid sockaddr_storage; the buffers are as long as said.
    let (n, from) = unsafe {
        socket2::SockAddr::try_init(|storage, len| {
            let n = libc::recvfrom(
                udp.as_raw_fd(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                libc::MSG_DONTWAIT,
                storage.cast(),
                len,
            );
            if n < 0 { Err(std::io::Error::last_os_error()) } else { Ok(n as usize) }
        })
    }
    .map_err(Errno::from)
    .map_or_else(
        |errno| match errno.0 {
            libc::EAGAIN | libc::EINTR => Ok((None, None)),
            _ => Err(errno),
        },
        |(n, from)| Ok((Some(n), from.as_socket())),
    )?;
    Ok(n.zip(from))
}

/// Our address towards a peer: the one that is bound, or the one that the system would take. A socket without a port gets one, as
/// by its first datagram.
fn source_towards(udp: &Socket, to: SocketAddr) -> Result<SocketAddr> {
    let local = || -> Result<_> { udp.local_addr()?.as_socket().ok_or(Errno(libc::EINVAL)) };
    let mut bound = local()?;
    if bound.port() == 0 {
        udp.bind(&bound.into())?;
        bound = local()?;
    }
    if !bound.ip().is_unspecified() {
        return Ok(bound);
    }
    let any = match to {
        SocketAddr::V4(_) => SocketAddr::from(([0, 0, 0, 0], 0)),
        SocketAddr::V6(_) => SocketAddr::from(([0u16; 8], 0)),
    };
    let probe = anyverbs::bound_udp_socket(any)?;
    probe.connect(to)?;
    let mut local = probe.local_addr()?;
    local.set_port(bound.port());
    Ok(local)
}

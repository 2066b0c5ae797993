//! The queue pair of a stream, its rings, and how its completions are taken.
//!
//! Locks, in this order: `send` or `recv` (the turn to move bytes), `control`, `polling`, `core`. `core` is held for
//! some arithmetic only, never while bytes are copied or work requests are posted. No thread sleeps with any of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Instant;

use anyverbs::{
    Access, CompChannel, Cq, Qp, QpInitAttr, QpType, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr,
    Wc, WcStatus,
};
use parking_lot::Mutex;

use crate::config::config;
use crate::device::Device;
use crate::errno::Result;
use crate::machine::{Grant, Machine, Piece, Posted, Sizes, Source, Violation};
use crate::needs;
use crate::ring::{Cursor, Ring};
use crate::sleep::set_nonblocking;
use crate::sleepers::Sleepers;
use crate::wire::{ByteOrder, ConnData, Control, IoMapEntry, SGL_LEN, Target};

/// Completions taken at once.
const BATCH: usize = 32;

/// Bytes of inline data that a message of several pieces is gathered into.
const MAX_INLINE: usize = crate::config::MAX_INLINE as usize;

/// See the [module](self).
#[derive(Debug)]
pub(crate) struct Connection {
    // Dropped in this order: the queue pair before the objects that it uses.
    pub(crate) qp: Qp,
    pub(super) cq: Cq,
    pub(super) channel: CompChannel,
    send_ring: Ring,
    recv_ring: Ring,
    /// Memory that the peer writes beside the stream: the table of two, then the I/O map.
    pub(super) table: Ring,
    pub(super) iomap_len: u16,
    sizes: Sizes,
    pub(super) core: Mutex<Machine>,
    pub(super) send: Mutex<()>,
    pub(super) recv: Mutex<()>,
    control: Mutex<()>,
    polling: Mutex<()>,
    /// The reason for its end, other than the peer's disconnect; reported once.
    error: AtomicI32,
    /// The threads that sleep on the socket.
    sleepers: Arc<Sleepers>,
    pub(super) device: Arc<Device>,
}

impl Connection {
    pub(super) fn new(
        device: &Arc<Device>,
        sleepers: &Arc<Sleepers>,
        sizes: &Sizes,
        iomap_len: u16,
    ) -> Result<Self> {
        let pd = &device.pd;
        let channel = device.context.create_comp_channel()?;
        set_nonblocking(&channel)?;
        let cq = device.context.create_cq(needs::cqe(sizes), Some(&channel), 0, 0)?;
        let init = QpInitAttr {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            cap: needs::cap(sizes),
            qp_type: QpType::Rc,
            sq_sig_all: true,
            cookie: 0,
        };
        let qp = device.context.create_qp(pd, &init)?;
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let send_ring = Ring::new(pd, sizes.send_buffer as usize, Access::LOCAL_WRITE)?;
        let recv_ring = Ring::shared(pd, sizes.recv_buffer as usize, written)?;
        let table_len = SGL_LEN * Target::LEN + usize::from(iomap_len) * IoMapEntry::LEN;
        let table = Ring::new(pd, table_len, written)?;
        let machine = Machine::new(sizes, recv_ring.remote());
        Ok(Self {
            qp,
            cq,
            channel,
            send_ring,
            recv_ring,
            table,
            iomap_len,
            sizes: *sizes,
            core: Mutex::new(machine),
            send: Mutex::new(()),
            recv: Mutex::new(()),
            control: Mutex::new(()),
            polling: Mutex::new(()),
            error: AtomicI32::new(0),
            sleepers: Arc::clone(sleepers),
            device: Arc::clone(device),
        })
    }

    /// Fills the receive queue, once the queue pair takes receives.
    pub(super) fn post_receives(&self) -> Result<()> {
        self.repost(self.sizes.recv_queue.into())
    }

    /// The description of our side for the peer.
    pub(super) fn conn_data(&self) -> ConnData {
        let (table, ring) = (self.table.remote(), self.recv_ring.remote());
        ConnData {
            order: ByteOrder::NATIVE,
            credits: self.sizes.recv_queue,
            iomap_len: self.iomap_len,
            sgl: Target { addr: table.va, key: table.rkey, len: SGL_LEN as u32 },
            buffer: Target { addr: ring.va, key: ring.rkey, len: self.sizes.recv_buffer / 2 },
        }
    }

    /// Ends it, and remembers why.
    pub(super) fn fail(&self, errno: i32) {
        let mut core = self.core.lock();
        if core.connected {
            self.error.store(errno, Ordering::Release);
            core.disconnect();
            drop(core);
            self.sleepers.wake();
        }
    }

    /// The reason for its end, once.
    pub(super) fn take_error(&self) -> i32 {
        self.error.swap(0, Ordering::AcqRel)
    }

    pub(super) fn has_error(&self) -> bool {
        self.error.load(Ordering::Acquire) != 0
    }

    /// Takes completions, and with them all that arrived; sends grants that are due.
    pub(super) fn progress(&self) {
        let mut broken = None;
        {
            // A caller that finds nothing must know that no other caller has taken it without telling yet.
            let _turn = self.polling.lock();
            let mut wcs = [Wc::default(); BATCH];
            loop {
                let n = match self.cq.poll(&mut wcs) {
                    Ok(n) => n,
                    Err(error) => {
                        self.fail(error.errno());
                        break;
                    }
                };
                broken = self.complete(&wcs[..n]).or(broken);
                if n < BATCH {
                    break;
                }
            }
        }
        if let Some(Violation(what)) = broken {
            // Without a lock: the log may be the program's. A peer may do so with connection after connection.
            anyverbs::say_again!(warn, 0, "rsocket: a peer broke the protocol: {what}");
        }
        self.grant();
    }

    /// Takes completions. Returns what the peer may not do, if it did that.
    fn complete(&self, wcs: &[Wc]) -> Option<Violation> {
        if wcs.is_empty() {
            return None;
        }
        let mut broken = None;
        let mut received = 0;
        let mut core = self.core.lock();
        for wc in wcs {
            let posted = Posted::from_wr_id(wc.wr_id);
            let failure = match (posted, wc.status) {
                (Posted::Receive, WcStatus::Success) => {
                    received += 1;
                    let entry = |i: usize| self.table.read(i * Target::LEN);
                    core.on_message(wc.imm, wc.byte_len, entry).err().map(|violation| {
                        broken = Some(violation);
                        libc::EPROTO
                    })
                }
                (Posted::Receive, _) => Some(libc::ECONNRESET),
                (posted, status) => {
                    core.on_sent(posted);
                    match status {
                        WcStatus::Success => None,
                        WcStatus::RetryExcErr | WcStatus::RnrRetryExcErr => Some(libc::ETIMEDOUT),
                        WcStatus::WrFlushErr => Some(libc::ECONNRESET),
                        _ => Some(libc::EIO),
                    }
                }
            };
            if let Some(errno) = failure
                && core.connected
            {
                self.error.store(errno, Ordering::Release);
                core.disconnect();
            }
        }
        let connected = core.connected;
        drop(core);
        if connected
            && received > 0
            && let Err(errno) = self.repost(received)
        {
            self.fail(errno.0);
        }
        broken
    }

    fn repost(&self, count: usize) -> Result<()> {
        let mut poster = self.qp.post()?;
        for _ in 0..count {
            poster.recv(&RecvWr { wr_id: Posted::Receive.wr_id(), sges: &[] })?;
        }
        Ok(())
    }

    /// Tells the peer of room, if that is due.
    pub(super) fn grant(&self) {
        if !self.core.lock().owes_grant() {
            return;
        }
        // In the order of planning: each goes to the next entry of the peer's table.
        let _turn = self.control.lock();
        loop {
            let Some(Grant { entry, imm }) = self.core.lock().plan_grant() else { return };
            let posted = Posted::Control;
            let result = match &entry {
                Some((bytes, to)) => {
                    let sge = anyverbs::Sge {
                        addr: bytes.as_ptr() as u64,
                        len: bytes.len() as u32,
                        lkey: 0,
                    };
                    self.post(posted, SendOp::WriteImm(*to, imm), SendFlags::INLINE, &[sge])
                }
                None => self.post_message(posted, imm),
            };
            if let Err(errno) = result {
                self.fail(errno.0);
            }
        }
    }

    fn post(
        &self,
        posted: Posted,
        op: SendOp,
        flags: SendFlags,
        sges: &[anyverbs::Sge],
    ) -> Result<()> {
        let wr = SendWr { wr_id: posted.wr_id(), op, flags, sges, ud: None, xrc_srqn: 0 };
        self.qp.post_send(&[wr]).map_err(|(_, error)| error.into())
    }

    fn post_message(&self, posted: Posted, imm: u32) -> Result<()> {
        let nowhere = RemoteAddr { va: 0, rkey: 0 };
        self.post(posted, SendOp::WriteImm(nowhere, imm), SendFlags::empty(), &[])
    }

    /// Posts a control message if a slot is free.
    pub(super) fn post_control(&self, control: Control) -> Result<bool> {
        let _turn = self.control.lock();
        let Some((posted, imm)) = self.core.lock().plan_control(control) else { return Ok(false) };
        match control {
            // rdma-core's has no immediate data: the acknowledgement is all it wants.
            Control::Keepalive => {
                let nowhere = RemoteAddr { va: 0, rkey: 0 };
                self.post(posted, SendOp::Write(nowhere), SendFlags::empty(), &[])?;
            }
            _ => self.post_message(posted, imm)?,
        }
        Ok(true)
    }

    /// Writes a piece to the peer at once, from the next bytes of the program, and posts its message. False if the link cannot,
    /// or the bytes do not lie together.
    pub(super) fn post_at_once(&self, piece: &Piece, from: &mut Cursor<'_>) -> Result<bool> {
        let len = piece.len as usize;
        let (Some((at, n)), Some(imm)) = (from.contiguous(len), piece.imm) else {
            return Ok(false);
        };
        // SAFETY: the maker of the cursor vouched that the program lets its buffers be read.
        if n < len || !unsafe { self.qp.write_at_once(piece.to, at, piece.len) } {
            return Ok(false);
        }
        self.post_message(piece.posted, imm)?;
        from.advance(len);
        Ok(true)
    }

    /// Posts a piece, with the next bytes of the program.
    pub(super) fn post_piece(&self, piece: &Piece, from: &mut Cursor<'_>) -> Result<()> {
        let op = match piece.imm {
            Some(imm) => SendOp::WriteImm(piece.to, imm),
            None => SendOp::Write(piece.to),
        };
        let len = piece.len as usize;
        let Source::Ring(parts) = piece.source else {
            if let Some((at, n)) = from.contiguous(len)
                && n == len
            {
                let sge = anyverbs::Sge { addr: at as u64, len: piece.len, lkey: 0 };
                self.post(piece.posted, op, SendFlags::INLINE, &[sge])?;
                from.advance(len);
                return Ok(());
            }
            let mut gathered = [0; MAX_INLINE];
            // SAFETY: a live array, as long as the longest inline data.
            unsafe { from.copy_out(gathered[..len].as_mut_ptr(), len) }?;
            let sge = anyverbs::Sge { addr: gathered.as_ptr() as u64, len: piece.len, lkey: 0 };
            return self.post(piece.posted, op, SendFlags::INLINE, &[sge]);
        };
        let mut sges = [anyverbs::Sge::default(); 2];
        let mut used = 0;
        for (at, n) in parts.map(|(at, n)| (at as usize, n as usize)) {
            if n > 0 {
                self.send_ring.fill(at, from, n)?;
                sges[used] = self.send_ring.sge(at, n);
                used += 1;
            }
        }
        self.post(piece.posted, op, SendFlags::empty(), &sges[..used])
    }

    /// Copies received bytes to the program.
    pub(super) fn copy_received(&self, at: u32, to: &mut Cursor<'_>, len: u32) -> Result<()> {
        self.recv_ring.drain(at as usize, to, len as usize)
    }

    /// Whether `test` holds now, or does so while the call polls for as long as the configuration says.
    pub(super) fn spin(&self, test: impl Fn(&Machine) -> bool) -> bool {
        let mut begin = None;
        loop {
            self.progress();
            if test(&self.core.lock()) {
                return true;
            }
            let begin = *begin.get_or_insert_with(Instant::now);
            if begin.elapsed() >= config().polling_time {
                return false;
            }
            std::hint::spin_loop();
        }
    }
}

//! `ibv_wr_*`: sends that are built call by call, and posted together or not at all.
//!
//! Between `ibv_wr_start` and `ibv_wr_complete` requests lie in buffers that were allocated with the queue pair, as
//! large as its send queue. The first mistake is kept, and `ibv_wr_complete` returns it.

use std::{
    ffi::{c_int, c_void},
    slice,
};

use anyverbs::{
    Feth, MAX_MESSAGE, MAX_SGE, Placement, QpCap, QpType, RemoteAddr, Selectivity, SendFlags,
    SendOp, SendWr, Sge, UdDest,
    error::PostError,
    raw::{RawQp, RawSendWr, Segmentation},
};
use anyverbs_check::{Elements, Piece, Work, Works};

use crate::{
    abi::*,
    errno::{Errno, value},
    object::deref,
    session::Session,
    verbs::{Device, Qp, Refused, Sizes, bind, destination, raw_flags, send_flags},
};

/// The atomics among the operations of a queue pair.
pub(crate) const ATOMIC_OPS: u64 = (IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
    | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    | IBV_QP_EX_WITH_ATOMIC_WRITE) as u64;

/// Operations that a type of queue pair offers (`enum ibv_qp_create_send_ops_flags`).
pub(crate) fn offered(qp_type: QpType) -> u64 {
    let send = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let write = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM;
    let reliable = IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
        | IBV_QP_EX_WITH_SEND_WITH_INV
        | IBV_QP_EX_WITH_FLUSH
        | IBV_QP_EX_WITH_ATOMIC_WRITE;
    let local = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV;
    u64::from(match qp_type {
        QpType::Rc | QpType::XrcSend => send | write | reliable | local,
        QpType::Uc => send | write | local,
        QpType::Ud => send,
        QpType::XrcRecv => 0,
    })
}

/// A request without its data.
struct Queued {
    wr_id: u64,
    op: SendOp,
    flags: SendFlags,
    /// The number of the batch's elements that are its own.
    sges: usize,
    ud: Option<UdDest>,
    /// The address of its address handle, or 0.
    ah: usize,
    xrc_srqn: Option<u32>,
    /// The part of a raw packet.
    raw: RawPart,
}

impl Queued {
    fn work(&self, sges: &[Sge]) -> Work {
        let (name, elements) = match self.op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) => ("SEND", Elements::Read),
            SendOp::Write(_) | SendOp::WriteImm(..) => ("WRITE", Elements::Read),
            SendOp::Read(_) => ("READ", Elements::Written),
            SendOp::CompareSwap { .. } => ("COMPARE AND SWAP", Elements::Written),
            SendOp::FetchAdd { .. } => ("FETCH AND ADD", Elements::Written),
            _ => ("request", Elements::Unused),
        };
        let piece = |s: &Sge| Piece { addr: s.addr, len: s.len, lkey: s.lkey };
        Work {
            name,
            wr_id: self.wr_id,
            is_signaled: self.flags.contains(SendFlags::SIGNALED),
            is_inline: self.flags.contains(SendFlags::INLINE),
            elements,
            is_fenced: self.flags.contains(SendFlags::FENCE),
            ah: self.ah,
            pieces: sges.iter().map(piece).collect(),
        }
    }
}

/// The fields that only requests of raw queue pairs have.
#[derive(Clone, Copy, Default)]
struct RawPart {
    fill_in_checksums: bool,
    segmentation: Option<Segmentation>,
}

macro_rules! names_of_ops {
    ($($name:ident)*) => {
        /// The names of operations.
        const NAMES_OF_OPS: &[(u32, &str)] = &[$(($name, stringify!($name)),)*];
    };
}

names_of_ops! {
    IBV_QP_EX_WITH_RDMA_WRITE IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM IBV_QP_EX_WITH_SEND IBV_QP_EX_WITH_SEND_WITH_IMM
    IBV_QP_EX_WITH_RDMA_READ IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD
    IBV_QP_EX_WITH_LOCAL_INV IBV_QP_EX_WITH_BIND_MW IBV_QP_EX_WITH_SEND_WITH_INV IBV_QP_EX_WITH_TSO
    IBV_QP_EX_WITH_FLUSH IBV_QP_EX_WITH_ATOMIC_WRITE
}

/// A setter comes before its request.
const NO_REQUEST: Errno =
    Errno::invalid("a setter was called, and there is no request that it is for");

/// Requests that were built and not posted.
pub(crate) struct Requests {
    queued: Vec<Queued>,
    /// The elements of all requests, in order. An inline request has one, which points into `inline`.
    sges: Vec<Sge>,
    /// Inline data of all requests.
    inline: Vec<u8>,
    /// Headers of segments, of all requests.
    headers: Vec<u8>,
    /// The first mistake since the start.
    failed: Option<Refused>,
}

/// A queue pair's buffers for `ibv_wr_*`.
pub(crate) struct Batch {
    ops: u64,
    /// In a raw queue pair: the longest header of segments.
    raw: Option<u16>,
    cap: QpCap,
    requests: Session<Requests>,
}

impl Batch {
    /// Buffers for a queue pair of these sizes. Memory is touched as it is used.
    pub(crate) fn new(ops: u64, cap: &QpCap) -> Self {
        Self::with(ops, cap, None)
    }

    /// As [`new`](Self::new), for a raw queue pair.
    pub(crate) fn raw(ops: u64, cap: &QpCap, max_tso_header: u16) -> Self {
        Self::with(ops, cap, Some(max_tso_header))
    }

    fn with(ops: u64, cap: &QpCap, raw: Option<u16>) -> Self {
        let wrs = cap.max_send_wr as usize;
        let requests = Requests {
            queued: Vec::with_capacity(wrs),
            sges: Vec::with_capacity(wrs * (cap.max_send_sge as usize).max(1)),
            inline: Vec::with_capacity(wrs * cap.max_inline_data as usize),
            headers: Vec::with_capacity(wrs * usize::from(raw.unwrap_or(0))),
            failed: None,
        };
        Self { ops, raw, cap: *cap, requests: Session::new(requests) }
    }

    /// Whether this thread builds requests.
    pub(crate) fn is_mine(&self) -> bool {
        self.requests.is_mine()
    }

    /// Whether a thread builds requests.
    pub(crate) fn is_begun(&self) -> bool {
        self.requests.is_begun()
    }
}

impl Requests {
    fn clear(&mut self) {
        self.queued.clear();
        self.sges.clear();
        self.inline.clear();
        self.headers.clear();
        self.failed = None;
    }

    fn fail(&mut self, refused: Refused) {
        self.failed.get_or_insert(refused);
    }
}

/// The data that a setter gives the last request.
enum Data<'a> {
    Sges(&'a [ibv_sge]),
    Inline(&'a [ibv_data_buf]),
}

impl Batch {
    /// Changes the requests, if this thread has started and made no mistake yet.
    fn change(&self, f: impl FnOnce(&mut Requests) -> Result<(), Refused>) {
        self.requests.with(|requests| {
            if requests.failed.is_none()
                && let Err(e) = f(requests)
            {
                requests.fail(e);
            }
        });
    }

    fn push(&self, wr_id: u64, flags: u32, needs: u32, op: Result<SendOp, Errno>) {
        self.change(|requests| {
            if self.ops & u64::from(needs) == 0 {
                let ops = NAMES_OF_OPS.iter().filter(|(op, _)| needs & op != 0);
                let names: Vec<_> = ops.map(|(_, name)| *name).collect();
                let lacks = names.join(" and ");
                let why = format!("send_ops_flags at the creation of the queue pair lacks {lacks}");
                return Err(Refused::lacks(why));
            }
            let op = op?;
            let (flags, fill_in_checksums) = match self.raw {
                Some(_) => raw_flags(flags)?,
                None => (send_flags(flags)?, false),
            };
            let raw = RawPart { fill_in_checksums, segmentation: None };
            if requests.queued.len() >= self.cap.max_send_wr as usize {
                return Err(Errno::said(libc::ENOMEM).into());
            }
            // Whether data is inline says the setter.
            let flags = flags.difference(SendFlags::INLINE);
            let (ud, ah, xrc_srqn) = (None, 0, None);
            requests.queued.push(Queued { wr_id, op, flags, sges: 0, ud, ah, xrc_srqn, raw });
            Ok(())
        });
    }

    /// Has the last request leave in segments that begin with a header.
    ///
    /// # Safety
    /// Registered or not, memory that is not there is found out.
    unsafe fn segment(&self, header: *const u8, header_len: u16, mss: u16) {
        self.change(|requests| {
            let most =
                self.raw.ok_or(Errno::lacks("segments are for raw packet queue pairs alone"))?;
            let last = requests.queued.last_mut().ok_or(NO_REQUEST)?;
            if header_len > most || mss == 0 {
                return Err(
                    Errno::invalid("hdr_sz is longer than max_tso_header, or mss is 0").into()
                );
            }
            let (start, len) = (requests.headers.len(), usize::from(header_len));
            requests.headers.resize(start + len, 0);
            // Never moves: the buffer has room for a whole queue of headers.
            let to = &mut requests.headers[start..];
            // SAFETY: room for that many; the source may be anything.
            unsafe { anyverbs::copy_guarded(to.as_mut_ptr(), header, len) }.map_err(|_| {
                Errno::because(libc::EFAULT, "the header of the segments is not mapped")
            })?;
            let header_addr = to.as_ptr() as u64;
            last.raw.segmentation = Some(Segmentation { header_addr, header_len, mss });
            Ok(())
        });
    }

    /// Gives the last request its data, once.
    ///
    /// # Safety
    /// Inline data is readable.
    unsafe fn set(&self, device: &Device, data: Data<'_>) {
        self.change(|requests| {
            let Requests { queued, sges, inline, .. } = requests;
            let last = queued.last_mut().ok_or(NO_REQUEST)?;
            let has_data = !last.op.is_local()
                && !matches!(last.op, SendOp::AtomicWrite { .. } | SendOp::Flush { .. });
            if last.sges > 0 || last.flags.contains(SendFlags::INLINE) || !has_data {
                return Err(
                    Errno::invalid("the request has its data already, or takes none").into()
                );
            }
            match data {
                Data::Sges(list) => {
                    let most = self.cap.max_send_sge;
                    if list.len() > most as usize {
                        let asked = list.len();
                        let why = format!("num_sge is {asked}, and the limit is {most}");
                        return Err(Refused::value(why));
                    }
                    if list.len() > 1 && matches!(last.op, SendOp::Read(_)) {
                        device.transport()?.takes_read(list.len())?;
                    }
                    let len = list.iter().map(|s| u64::from(s.length)).sum::<u64>();
                    if len > u64::from(MAX_MESSAGE) {
                        let why = format!("it has {len} bytes, and the limit is {MAX_MESSAGE}");
                        return Err(Refused::value(why));
                    }
                    last.sges = list.len();
                    sges.extend(list.iter().map(|s| Sge {
                        addr: s.addr,
                        len: s.length,
                        lkey: s.lkey,
                    }));
                }
                Data::Inline(list) => {
                    let len = list.iter().try_fold(0usize, |sum, b| sum.checked_add(b.length));
                    let len = len.ok_or(Errno::invalid(
                        "the inline data is longer than the address space",
                    ))?;
                    let most = self.cap.max_inline_data;
                    if len > most as usize {
                        let why =
                            format!("the inline data has {len} bytes, and the limit is {most}");
                        return Err(Refused::value(why));
                    }
                    if last.op.has_response_data()
                        || list.iter().any(|b| b.length > 0 && b.addr.is_null())
                    {
                        return Err(Errno::invalid(
                            "inline data goes with a SEND or a WRITE, and an address is not NULL",
                        )
                        .into());
                    }
                    let start = inline.len();
                    for buf in list.iter().filter(|b| b.length > 0) {
                        // SAFETY: the caller's promise.
                        inline.extend_from_slice(unsafe {
                            slice::from_raw_parts(buf.addr.cast::<u8>(), buf.length)
                        });
                    }
                    last.flags.insert(SendFlags::INLINE);
                    if len > 0 && self.cap.max_send_sge > 0 {
                        last.sges = 1;
                        // Never moves: the buffer has room for a whole queue of inline data.
                        let addr = inline[start..].as_ptr() as u64;
                        sges.push(Sge { addr, len: len as u32, lkey: 0 });
                    } else if len > 0 {
                        return Err(
                            Errno::invalid("max_send_sge is 0, and the request has data").into()
                        );
                    }
                }
            }
            Ok(())
        });
    }

    /// The requests that were built so far, for the checker.
    pub(super) fn works(&self) -> Works {
        let all = |requests: &mut Requests| {
            let mut sges = &requests.sges[..];
            let works = requests.queued.iter().map(|queued| {
                let (own, rest) = sges.split_at(queued.sges);
                sges = rest;
                queued.work(own)
            });
            works.collect()
        };
        self.requests.with(all).unwrap_or_default()
    }

    /// The same, for data that is given to the last of them. None if the device takes no more, since the program has made a mistake.
    pub(super) fn works_to_fill(&self) -> Works {
        let has_failed = self.requests.with(|requests| requests.failed.is_some());
        if has_failed == Some(false) { self.works() } else { Works::new() }
    }

    /// Posts everything, or nothing.
    fn complete(&self, qp: &Qp) -> Result<(), Errno> {
        let post = |requests: &mut Requests| {
            if let Some(refused) = requests.failed.take() {
                return Err(refused);
            }
            let device = match &qp.inner.device {
                Device::Transport(device) => device,
                Device::Raw(device) => return Ok(post_raw(device, requests)?),
            };
            let ud = qp.inner.qp_type == Some(QpType::Ud);
            let xrc = qp.inner.qp_type == Some(QpType::XrcSend);
            let unaddressed = |q: &Queued| {
                (ud && q.ud.is_none()) || (xrc != q.xrc_srqn.is_some() && !(xrc && q.op.is_local()))
            };
            if requests.queued.iter().any(unaddressed) {
                return Err(Refused::value("the request has no destination".to_owned()));
            }
            let mut poster = device.post()?;
            if requests.queued.len() > poster.send_room() as usize {
                return Err(Errno::said(libc::ENOMEM).into());
            }
            let mut sges = &requests.sges[..];
            for queued in &requests.queued {
                let (own, rest) = sges.split_at(queued.sges);
                sges = rest;
                let Queued { wr_id, op, flags, ud, xrc_srqn, .. } = *queued;
                let xrc_srqn = xrc_srqn.unwrap_or_default();
                // All reasons for a refusal after the first request were checked before it.
                poster.send(&SendWr { wr_id, op, flags, sges: own, ud, xrc_srqn })?;
            }
            Ok(())
        };
        let posted = self.requests.with(post).unwrap_or_else(|| {
            Err(Errno::invalid("ibv_wr_start was not called before, by this thread").into())
        });
        self.abort();
        posted.map_err(|refused| {
            let to =
                format!("ibv_wr_complete of queue pair {:#08x}: ", qp.inner.device.qpn().get());
            let state = qp.inner.device.transport().ok().and_then(|device| device.state().ok());
            // Sizes that are too large were found before.
            refused.say(&to, &Sizes { sges: (0, self.cap.max_send_sge), state, ..Sizes::NONE })
        })
    }

    fn abort(&self) {
        self.requests.with(Requests::clear);
        self.requests.end();
    }
}

/// Posts the requests of a raw queue pair, or none.
fn post_raw(device: &RawQp, requests: &Requests) -> Result<(), Errno> {
    let mut poster = device.post()?;
    if requests.queued.len() > poster.send_room() as usize {
        return Err(Errno::said(libc::ENOMEM));
    }
    let mut sges = &requests.sges[..];
    for queued in &requests.queued {
        let (own, rest) = sges.split_at(queued.sges);
        sges = rest;
        let Queued { wr_id, flags, raw, .. } = *queued;
        let RawPart { fill_in_checksums, segmentation } = raw;
        // All reasons for a refusal after the first request were checked before it.
        poster.send(&RawSendWr { wr_id, flags, fill_in_checksums, segmentation, sges: own })?;
    }
    Ok(())
}

/// The batch of a queue pair that has one, for the calls between start and end.
///
/// # Safety
/// `qp` is NULL or live.
unsafe fn batch<'a>(qp: *mut ibv_qp_ex) -> Option<&'a Batch> {
    // SAFETY: the caller's promise.
    unsafe { with_batch(qp) }.map(|(_, batch)| batch)
}

/// As [`batch`], with the device's part of the queue pair.
///
/// # Safety
/// `qp` is NULL or live.
unsafe fn with_batch<'a>(qp: *mut ibv_qp_ex) -> Option<(&'a Device, &'a Batch)> {
    // SAFETY: the caller's promise.
    let qp = unsafe { deref(qp) }?;
    Some((&qp.inner.device, qp.inner.batch.as_ref()?))
}

/// Adds a request with the public `wr_id` and `wr_flags`.
///
/// # Safety
/// `qp` is NULL or live.
unsafe fn push(qp: *mut ibv_qp_ex, needs: u32, op: Result<SendOp, Errno>) {
    // SAFETY: the caller's promise.
    unsafe {
        if let Some(batch) = batch(qp) {
            let (wr_id, flags) =
                ((&raw const (*qp).wr_id).read(), (&raw const (*qp).wr_flags).read());
            batch.push(wr_id, flags, needs, op);
        }
    }
}

/// Fills the function pointers of a queue pair: all of them. So an operation that was not asked for at creation is an
/// error of `ibv_wr_complete` and not a crash.
pub(crate) fn set_send_ops(qp: &mut ibv_qp_ex) {
    qp.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    qp.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    qp.wr_bind_mw = Some(wr_bind_mw);
    qp.wr_local_inv = Some(wr_local_inv);
    qp.wr_rdma_read = Some(wr_rdma_read);
    qp.wr_rdma_write = Some(wr_rdma_write);
    qp.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    qp.wr_send = Some(wr_send);
    qp.wr_send_imm = Some(wr_send_imm);
    qp.wr_send_inv = Some(wr_send_inv);
    qp.wr_send_tso = Some(wr_send_tso);
    qp.wr_set_ud_addr = Some(wr_set_ud_addr);
    qp.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    qp.wr_set_inline_data = Some(wr_set_inline_data);
    qp.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    qp.wr_set_sge = Some(wr_set_sge);
    qp.wr_set_sge_list = Some(wr_set_sge_list);
    qp.wr_start = Some(wr_start);
    qp.wr_complete = Some(wr_complete);
    qp.wr_abort = Some(wr_abort);
    qp.wr_atomic_write = Some(wr_atomic_write);
    qp.wr_flush = Some(wr_flush);
}

// Every function below gets a queue pair that is live, or NULL: the promise that the SAFETY comments mean.

pub(super) unsafe extern "C" fn wr_start(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's promise.
    let Some(qp) = (unsafe { deref(qp) }) else { return };
    let Some(batch) = &qp.inner.batch else { return };
    let inherited = || match &qp.inner.device {
        Device::Transport(device) => matches!(device.post().err(), Some(PostError::Forked)),
        Device::Raw(device) => matches!(device.post().err(), Some(PostError::Forked)),
    };
    if batch.requests.begin(inherited) {
        batch.requests.with(Requests::clear);
    }
}

pub(super) unsafe extern "C" fn wr_complete(qp: *mut ibv_qp_ex) -> c_int {
    // SAFETY: the caller's promise.
    let qp = unsafe { deref(qp) }.ok_or(Errno::NULL);
    value(
        "ibv_wr_complete",
        qp.and_then(|qp| {
            qp.inner
                .batch
                .as_ref()
                .ok_or(Errno::invalid(
                    "the queue pair was made without IBV_QP_INIT_ATTR_SEND_OPS_FLAGS",
                ))?
                .complete(qp)
        }),
    )
}

pub(crate) unsafe extern "C" fn wr_abort(qp: *mut ibv_qp_ex) {
    // SAFETY: the caller's promise.
    if let Some(batch) = unsafe { batch(qp) } {
        batch.abort();
    }
}

/// Defines operations: the C arguments, the flag that offers it, and the operation.
macro_rules! operations {
    ($($name:ident($($argument:ident: $type:ty),*) $flag:ident => $op:expr;)*) => { $(
        unsafe extern "C" fn $name(qp: *mut ibv_qp_ex $(, $argument: $type)*) {
            // SAFETY: the caller's promise.
            unsafe { push(qp, $flag, Ok($op)) };
        }
    )* };
}

operations! {
    wr_send() IBV_QP_EX_WITH_SEND => SendOp::Send;
    wr_send_imm(imm: u32) IBV_QP_EX_WITH_SEND_WITH_IMM => SendOp::SendImm(u32::from_be(imm));
    wr_send_inv(rkey: u32) IBV_QP_EX_WITH_SEND_WITH_INV => SendOp::SendInv(rkey);
    wr_rdma_write(rkey: u32, va: u64) IBV_QP_EX_WITH_RDMA_WRITE =>
        SendOp::Write(RemoteAddr { va, rkey });
    wr_rdma_write_imm(rkey: u32, va: u64, imm: u32) IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM =>
        SendOp::WriteImm(RemoteAddr { va, rkey }, u32::from_be(imm));
    wr_rdma_read(rkey: u32, va: u64) IBV_QP_EX_WITH_RDMA_READ =>
        SendOp::Read(RemoteAddr { va, rkey });
    wr_atomic_cmp_swp(rkey: u32, va: u64, compare: u64, swap: u64) IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP =>
        SendOp::CompareSwap { at: RemoteAddr { va, rkey }, compare, swap };
    wr_atomic_fetch_add(rkey: u32, va: u64, add: u64) IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD =>
        SendOp::FetchAdd { at: RemoteAddr { va, rkey }, add };
    wr_local_inv(rkey: u32) IBV_QP_EX_WITH_LOCAL_INV => SendOp::LocalInv(rkey);
}

/// Binds a window of type 2.
unsafe extern "C" fn wr_bind_mw(
    qp: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: the caller's promise; `info` is NULL or readable.
    unsafe {
        let op = info
            .as_ref()
            .ok_or(Errno::invalid("bind_info is NULL"))
            .and_then(|info| bind(mw, rkey, info));
        push(qp, IBV_QP_EX_WITH_BIND_MW, op);
    }
}

/// Writes the 8 bytes that lie at `word` now.
unsafe extern "C" fn wr_atomic_write(qp: *mut ibv_qp_ex, rkey: u32, va: u64, word: *const c_void) {
    // SAFETY: the caller's promise; `word` is NULL or has 8 readable bytes.
    unsafe {
        let op = word
            .cast::<[u8; 8]>()
            .as_ref()
            .ok_or(Errno::invalid("the data of the atomic WRITE is NULL"))
            .map(|data| SendOp::AtomicWrite { at: RemoteAddr { va, rkey }, data: Some(*data) });
        push(qp, IBV_QP_EX_WITH_ATOMIC_WRITE, op);
    }
}

/// The checked request of a FLUSH.
fn flush(at: RemoteAddr, len: usize, placement: u8, level: u8) -> Result<SendOp, Errno> {
    let placement = Placement::from_bits(placement).filter(|p| !p.is_empty());
    let selectivity = match level.into() {
        IBV_FLUSH_RANGE => Selectivity::Range,
        IBV_FLUSH_MR => Selectivity::Mr,
        _ => return Err(Errno::invalid("level is neither IBV_FLUSH_RANGE nor IBV_FLUSH_MR")),
    };
    let len = u32::try_from(len)
        .map_err(|_| Errno::invalid("the length of the FLUSH is 4 GiB or more"))?;
    let feth = Feth {
        placement: placement.ok_or(Errno::invalid("type is no type of a FLUSH"))?,
        selectivity,
    };
    Ok(SendOp::Flush { at, len, feth })
}

unsafe extern "C" fn wr_flush(
    qp: *mut ibv_qp_ex,
    rkey: u32,
    va: u64,
    len: usize,
    placement: u8,
    level: u8,
) {
    // SAFETY: the caller's promise.
    unsafe {
        push(qp, IBV_QP_EX_WITH_FLUSH, flush(RemoteAddr { va, rkey }, len, placement, level));
    }
}

unsafe extern "C" fn wr_send_tso(qp: *mut ibv_qp_ex, hdr: *mut c_void, hdr_sz: u16, mss: u16) {
    // SAFETY: the caller's promise.
    unsafe {
        push(qp, IBV_QP_EX_WITH_TSO, Ok(SendOp::Send));
        if let Some(batch) = batch(qp) {
            batch.segment(hdr.cast(), hdr_sz, mss);
        }
    }
}

unsafe extern "C" fn wr_set_ud_addr(qp: *mut ibv_qp_ex, ah: *mut ibv_ah, qpn: u32, qkey: u32) {
    // SAFETY: the caller's promise, of the AH as well.
    unsafe {
        if let Some(batch) = batch(qp) {
            batch.change(|requests| {
                let to = destination(ah, qpn, qkey)?;
                let last = requests.queued.last_mut().ok_or(NO_REQUEST)?;
                (last.ud, last.ah) = (Some(to), ah as usize);
                Ok(())
            });
        }
    }
}

unsafe extern "C" fn wr_set_xrc_srqn(qp: *mut ibv_qp_ex, srqn: u32) {
    // SAFETY: the caller's promise.
    if let Some(batch) = unsafe { batch(qp) } {
        batch.change(|requests| {
            requests.queued.last_mut().ok_or(NO_REQUEST)?.xrc_srqn = Some(srqn);
            Ok(())
        });
    }
}

unsafe extern "C" fn wr_set_sge(qp: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ibv_sge { addr, length, lkey };
    // SAFETY: the caller's promise.
    unsafe { wr_set_sge_list(qp, 1, &raw const sge) };
}

unsafe extern "C" fn wr_set_sge_list(qp: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    // SAFETY: the caller's promise; the list is bounded, so that a nonsensical count reads nothing.
    unsafe {
        let Some((device, batch)) = with_batch(qp) else { return };
        match list_of(list, count) {
            Ok(list) => batch.set(device, Data::Sges(list)),
            Err(e) => batch.change(|_| Err(e.into())),
        }
    }
}

unsafe extern "C" fn wr_set_inline_data(qp: *mut ibv_qp_ex, addr: *mut c_void, length: usize) {
    let buf = ibv_data_buf { addr, length };
    // SAFETY: the caller's promise.
    unsafe { wr_set_inline_data_list(qp, 1, &raw const buf) };
}

pub(super) unsafe extern "C" fn wr_set_inline_data_list(
    qp: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    // SAFETY: as in `wr_set_sge_list`.
    unsafe {
        let Some((device, batch)) = with_batch(qp) else { return };
        match list_of(list, count) {
            Ok(list) => batch.set(device, Data::Inline(list)),
            Err(e) => batch.change(|_| Err(e.into())),
        }
    }
}

/// A program's list.
///
/// # Safety
/// `list` is NULL or has `count` readable elements.
unsafe fn list_of<'a, T>(list: *const T, count: usize) -> Result<&'a [T], Errno> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() || count > MAX_SGE {
        return Err(Errno::invalid("the list of elements is NULL, or has too many"));
    }
    // SAFETY: the caller's promise.
    Ok(unsafe { slice::from_raw_parts(list, count) })
}

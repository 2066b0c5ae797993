//! Posting: the slots of `ibv_post_send`, `ibv_post_recv` and `ibv_post_srq_recv`. Nothing here allocates, unless a
//! request is refused. Only memory windows are looked up by pointer.

use std::{ffi::c_int, fmt, mem::MaybeUninit};

use anyverbs::error::PostError;
use anyverbs::persona::Feature;
use anyverbs::{
    MAX_SGE, PostRecvError, PostSendError, QpState, QpType, RecvWr, RemoteAddr, SendFlags, SendOp,
    SendWr, Sge,
};
use anyverbs_causes::Cause;

use crate::{
    abi::*,
    errno::{Errno, is_tried, say, say_once},
    object::deref,
    verbs::{Device, Qp, bind, destination, name_bound, post_send_raw},
};

/// Why a work request was not posted. Queues are locked when it is found out, so it is said later.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) errno: Errno,
    why: Why,
}

#[derive(Clone, Debug)]
enum Why {
    /// Programs try it out, or the number says all.
    Silent,
    /// Programs try it out: the log says it at the level `debug`.
    Tried(String),
    Text(String),
    /// A forked child posts to its parent's queue.
    OfParent(PostError),
    /// A receive queue is full.
    Full,
    /// The state of the queue pair, and the least that the call needs.
    State(&'static str),
    Sges,
    Inline,
}

/// The numbers of a request that was refused, and their limits.
pub(crate) struct Sizes {
    pub(crate) sges: (i64, u32),
    pub(crate) inline: (u64, u32),
    /// The state of the queue pair, where there is one.
    pub(crate) state: Option<QpState>,
    /// The receives that the queue holds.
    pub(crate) receives: u32,
}

impl Sizes {
    /// Nothing is known of the queue.
    pub(crate) const NONE: Self = Self { sges: (0, 0), inline: (0, 0), state: None, receives: 0 };
}

impl Refused {
    /// `EINVAL` with its reason.
    #[cold]
    pub(crate) fn value(why: String) -> Self {
        Self { errno: Errno::said(libc::EINVAL), why: Why::Text(why) }
    }

    /// `EOPNOTSUPP` with its reason. Nobody tries out what a queue does by posting to it.
    #[cold]
    pub(crate) fn lacks(why: String) -> Self {
        Self { errno: Errno::said(libc::EOPNOTSUPP), why: Why::Text(why) }
    }

    /// The elements are too many, or not there.
    #[cold]
    pub(crate) fn sges(errno: Errno) -> Self {
        Self { errno: Errno::said(errno.0), why: Why::Sges }
    }

    /// There is nothing to say. A full queue is refused often: no time is lost on the limits.
    fn is_silent(&self) -> bool {
        matches!(self.why, Why::Silent)
    }

    /// Says it. No queue is locked.
    #[cold]
    pub(crate) fn say(&self, to: &str, sizes: &Sizes) -> Errno {
        let why = match &self.why {
            Why::Silent => return self.errno,
            Why::Tried(why) => {
                say(to, why, None);
                return self.errno;
            }
            Why::OfParent(why) => {
                say_once(&format!("refused: {to}{why}; see `anyverbs explain EIO`"));
                return self.errno;
            }
            Why::Full => {
                let receives = sizes.receives;
                say_once(&format!(
                    "refused: {to}the queue is full: it holds {receives} receives; see `anyverbs explain ENOMEM`"
                ));
                return self.errno;
            }
            Why::Text(why) => why.clone(),
            Why::State(needs) => match sizes.state {
                Some(state) => {
                    format!("the queue pair is in {}, and the call needs {needs}", state.name())
                }
                None => format!("the call needs {needs}"),
            },
            Why::Sges => match sizes.sges {
                (asked, limit) if asked < 0 || asked > limit.into() => {
                    format!("num_sge is {asked}, and the limit is {limit}")
                }
                (asked, _) => format!("num_sge is {asked}, and sg_list is NULL"),
            },
            Why::Inline => {
                let (asked, limit) = sizes.inline;
                format!("the inline data has {asked} bytes, and the limit is {limit}")
            }
        };
        say(to, &why, Some(Cause::WorkRequest));
        self.errno
    }
}

impl From<Errno> for Refused {
    #[cold]
    fn from(errno: Errno) -> Self {
        let tried = is_tried(errno.0);
        let why = match errno.reason() {
            None => Why::Silent,
            Some((why, None)) if tried => Why::Tried(why),
            Some((why, _)) => Why::Text(why),
        };
        Self { errno: Errno::said(errno.0), why }
    }
}

impl From<PostError> for Refused {
    #[cold]
    fn from(error: PostError) -> Self {
        let why = match error {
            PostError::Send(PostSendError::TooManySges)
            | PostError::Recv(PostRecvError::TooManySges) => Why::Sges,
            PostError::Send(PostSendError::InlineTooLong) => Why::Inline,
            PostError::Send(PostSendError::State) => Why::State("RTS"),
            PostError::Recv(PostRecvError::Full) => Why::Full,
            // A program may post until the queue is full.
            _ if error.errno() == libc::ENOMEM => {
                if tracing::enabled!(tracing::Level::DEBUG) {
                    Why::Tried(error.to_string())
                } else {
                    Why::Silent
                }
            }
            PostError::Forked => Why::OfParent(error),
            _ => Why::Text(error.to_string()),
        };
        Self { errno: Errno::said(error.errno()), why }
    }
}

const NO_QUEUE: Errno = Errno::invalid("the queue is NULL");

/// Says why a send was not posted.
#[cold]
fn refused_send(qp: Option<&Qp>, wr: *const ibv_send_wr, refused: &Refused) -> Errno {
    if refused.is_silent() {
        return refused.errno;
    }
    let device = qp.and_then(|qp| qp.inner.device.transport().ok());
    // SAFETY: NULL, or the request at which posting ended: the caller's promise.
    let (Some(device), Some(wr)) = (device, unsafe { wr.as_ref() }) else {
        return refused.say("ibv_post_send: ", &Sizes::NONE);
    };
    let cap = device.cap();
    let elements = usize::try_from(wr.num_sge).ok().filter(|_| !wr.sg_list.is_null()).unwrap_or(0);
    // SAFETY: the list has so many elements: the caller's promise.
    let len = |i| u64::from(unsafe { wr.sg_list.add(i).read() }.length);
    let bytes = match refused.why {
        Why::Inline => (0..elements).map(len).sum(),
        _ => 0,
    };
    let sizes = Sizes {
        sges: (wr.num_sge.into(), cap.max_send_sge),
        inline: (bytes, cap.max_inline_data),
        state: device.state().ok(),
        receives: 0,
    };
    refused.say(&format!("ibv_post_send to queue pair {:#08x}: ", device.qpn().get()), &sizes)
}

/// Says why a receive was not posted.
#[cold]
fn refused_receive(
    to: &dyn fmt::Display,
    wr: *const ibv_recv_wr,
    limits: impl FnOnce() -> (u32, u32),
    refused: &Refused,
) -> Errno {
    if refused.is_silent() {
        return refused.errno;
    }
    // SAFETY: NULL, or the request at which posting ended: the caller's promise.
    let asked = unsafe { wr.as_ref() }.map_or(0, |wr| wr.num_sge);
    let (max_sge, receives) = limits();
    let sizes = Sizes { sges: (asked.into(), max_sge), receives, ..Sizes::NONE };
    refused.say(&format!("{to}: "), &sizes)
}

/// Room for the elements of one work request.
pub(crate) type SgeRoom = [MaybeUninit<Sge>; MAX_SGE];

const WRONG_SGES: Errno = Errno::invalid("num_sge is negative or too large, or sg_list is NULL");

/// Copies a program's elements to `room`; `EINVAL` for a number that no queue takes.
///
/// # Safety
/// `list` is NULL or has `count` readable elements.
pub(crate) unsafe fn sges(
    room: &mut SgeRoom,
    list: *const ibv_sge,
    count: c_int,
) -> Result<&[Sge], Errno> {
    let count = usize::try_from(count).ok().filter(|n| *n <= MAX_SGE).ok_or(WRONG_SGES)?;
    if count > 0 && list.is_null() {
        return Err(WRONG_SGES);
    }
    for (i, to) in room[..count].iter_mut().enumerate() {
        // SAFETY: the caller's promise.
        let sge = unsafe { list.add(i).read() };
        to.write(Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey });
    }
    // SAFETY: the first `count` were just written.
    Ok(unsafe { std::slice::from_raw_parts(room.as_ptr().cast(), count) })
}

/// The memory that a WRITE or READ names.
///
/// # Safety
/// `wr` holds the members that such a request uses.
#[inline]
unsafe fn remote(wr: &ibv_send_wr) -> RemoteAddr {
    // SAFETY: plain integers: the caller's promise.
    unsafe { RemoteAddr { va: wr.wr.rdma.remote_addr, rkey: wr.wr.rdma.rkey } }
}

#[cold]
fn lacks(opcode: &str) -> Refused {
    Refused::lacks(format!("opcode is {opcode}"))
}

/// The operation of a request; `EINVAL` for an opcode that does not exist, `EOPNOTSUPP` for one that is not built.
///
/// # Safety
/// The unions of `wr` hold the members that its opcode uses.
unsafe fn op(qp: &Qp, wr: &ibv_send_wr) -> Result<SendOp, Refused> {
    // SAFETY: plain integers, initialised as far as the opcode needs: the caller's promise.
    unsafe {
        let remote = || remote(wr);
        let atomics =
            || qp.inner.context.inner.device.offers(Feature::Atomics).map_err(Errno::from);
        let word = || RemoteAddr { va: wr.wr.atomic.remote_addr, rkey: wr.wr.atomic.rkey };
        Ok(match wr.opcode {
            IBV_WR_RDMA_WRITE => SendOp::Write(remote()),
            IBV_WR_RDMA_WRITE_WITH_IMM => {
                SendOp::WriteImm(remote(), u32::from_be(wr.data.imm_data))
            }
            IBV_WR_SEND => SendOp::Send,
            IBV_WR_SEND_WITH_IMM => SendOp::SendImm(u32::from_be(wr.data.imm_data)),
            IBV_WR_SEND_WITH_INV => SendOp::SendInv(wr.data.invalidate_rkey),
            IBV_WR_RDMA_READ => SendOp::Read(remote()),
            IBV_WR_ATOMIC_CMP_AND_SWP => {
                atomics()?;
                let (compare, swap) = (wr.wr.atomic.compare_add, wr.wr.atomic.swap);
                SendOp::CompareSwap { at: word(), compare, swap }
            }
            IBV_WR_ATOMIC_FETCH_AND_ADD => {
                atomics()?;
                SendOp::FetchAdd { at: word(), add: wr.wr.atomic.compare_add }
            }
            IBV_WR_LOCAL_INV => SendOp::LocalInv(wr.data.invalidate_rkey),
            IBV_WR_BIND_MW => {
                let to = wr.ext.bind_mw;
                bind(to.mw, to.rkey, &to.bind_info)?
            }
            IBV_WR_ATOMIC_WRITE => {
                atomics()?;
                SendOp::AtomicWrite { at: remote(), data: None }
            }
            // A FLUSH has operands for which `ibv_send_wr` has no fields.
            IBV_WR_TSO => return Err(lacks("IBV_WR_TSO, which goes with raw packets alone")),
            IBV_WR_DRIVER1 => return Err(lacks("IBV_WR_DRIVER1, which is no operation here")),
            IBV_WR_FLUSH => return Err(lacks("IBV_WR_FLUSH: call ibv_wr_flush instead")),
            other => {
                return Err(Refused::value(format!("opcode is {other}, which is no operation")));
            }
        })
    }
}

/// The flags of a request; `EINVAL` for one that does not exist.
pub(crate) fn send_flags(flags: u32) -> Result<SendFlags, Refused> {
    SendFlags::from_bits(flags).ok_or_else(|| {
        let unknown = flags & !SendFlags::all().bits();
        Refused::value(format!("send_flags is {flags:#x}, and {unknown:#x} is no flag"))
    })
}

/// One request as the device takes it.
///
/// # Safety
/// `wr` is as its manual page says.
unsafe fn send_wr<'a>(
    qp: &Qp,
    wr: &ibv_send_wr,
    room: &'a mut SgeRoom,
) -> Result<SendWr<'a>, Refused> {
    // SAFETY: the caller's promise.
    unsafe {
        let ud = if qp.inner.qp_type == Some(QpType::Ud) {
            let to = wr.wr.ud;
            Some(destination(to.ah, to.remote_qpn, to.remote_qkey)?)
        } else {
            None
        };
        let xrc = qp.inner.qp_type == Some(QpType::XrcSend);
        let op = op(qp, wr)?;
        if op.is_local() && wr.num_sge != 0 {
            let why = format!("num_sge is {}, and the operation has no data", wr.num_sge);
            return Err(Refused::value(why));
        }
        Ok(SendWr {
            wr_id: wr.wr_id,
            op,
            flags: send_flags(wr.send_flags)?,
            sges: sges(room, wr.sg_list, wr.num_sge).map_err(Refused::sges)?,
            ud,
            xrc_srqn: if xrc { wr.qp_type.xrc.remote_srqn } else { 0 },
        })
    }
}

/// A SEND, WRITE or READ that has one element, and no immediate data: its operation, flags and element.
///
/// # Safety
/// `wr` is as its manual page says.
#[inline]
unsafe fn plain(wr: &ibv_send_wr) -> Option<(SendOp, SendFlags, Sge)> {
    if wr.num_sge != 1 {
        return None;
    }
    let op = match wr.opcode {
        IBV_WR_SEND => SendOp::Send,
        // SAFETY: the caller's promise.
        IBV_WR_RDMA_WRITE => SendOp::Write(unsafe { remote(wr) }),
        // SAFETY: the caller's promise.
        IBV_WR_RDMA_READ => SendOp::Read(unsafe { remote(wr) }),
        _ => return None,
    };
    // SAFETY: the caller's promise.
    let sge = unsafe { wr.sg_list.as_ref() }?;
    let flags = SendFlags::from_bits(wr.send_flags)?;
    Some((op, flags, Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey }))
}

/// Reports the request that was refused. The reason was said.
///
/// # Safety
/// `bad` is NULL or writable.
#[cold]
pub(crate) unsafe fn refuse_wr<T>(bad: *mut *mut T, wr: *mut T, errno: Errno) -> c_int {
    if !bad.is_null() {
        // SAFETY: the caller's promise.
        unsafe { bad.write(wr) };
    }
    errno.set()
}

/// Slot of `ibv_post_send`: 0, or the errno value with `*bad_wr` the first request that was not posted.
///
/// # Safety
/// `qp` is NULL or live; the list is as its manual page says; `bad_wr` is NULL or writable.
pub(crate) unsafe extern "C" fn post_send(
    qp: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let qp = unsafe { deref::<ibv_qp_ex>(qp.cast()) };
    // SAFETY: the caller's promise.
    if let (Some(qp), Some(one)) = (qp, unsafe { wr.as_ref() })
        && one.next.is_null()
        && let Device::Transport(device) = &qp.inner.device
        // SAFETY: as above.
        && let Some((op, flags, sge)) = unsafe { plain(one) }
        && device.post_short(one.wr_id, op, flags, sge)
    {
        return 0;
    }
    // SAFETY: as above.
    unsafe { post_sends(qp, wr, bad_wr) }
}

/// As [`post_send`], whatever the requests are.
///
/// # Safety
/// As for [`post_send`].
#[inline(never)]
unsafe fn post_sends(
    qp: Option<&Qp>,
    mut wr: *mut ibv_send_wr,
    bad_wr: *mut *mut ibv_send_wr,
) -> c_int {
    if let Some(Device::Raw(device)) = qp.map(|qp| &qp.inner.device) {
        // SAFETY: the caller's promise.
        return unsafe { post_send_raw(device, wr, bad_wr) };
    }
    let posted = qp.ok_or_else(|| Refused::from(NO_QUEUE)).and_then(|qp| {
        let mut poster = qp.inner.device.transport()?.post()?;
        let mut room = [const { MaybeUninit::uninit() }; MAX_SGE];
        // SAFETY: the caller's promise.
        while let Some(next) = unsafe { wr.as_ref() } {
            // SAFETY: as above.
            if let Some((op, flags, sge)) = unsafe { plain(next) }
                && poster.post_short(next.wr_id, op, flags, sge)
            {
                wr = next.next;
                continue;
            }
            // SAFETY: as above.
            poster.queue(&unsafe { send_wr(qp, next, &mut room) }?)?;
            if next.opcode == IBV_WR_BIND_MW {
                // SAFETY: as above.
                let to = unsafe { next.ext.bind_mw };
                name_bound(to.mw, to.rkey);
            }
            wr = next.next;
        }
        Ok(())
    });
    let posted = posted.map_err(|refused| refused_send(qp, wr, &refused));
    // SAFETY: the caller's promise.
    posted.map_or_else(|e| unsafe { refuse_wr(bad_wr, wr, e) }, |()| 0)
}

/// Posts a list of receives, one at a time.
///
/// # Safety
/// The list is as its manual page says.
unsafe fn receives(
    wr: &mut *mut ibv_recv_wr,
    mut post: impl FnMut(&RecvWr<'_>) -> Result<(), Refused>,
) -> Result<(), Refused> {
    let mut room = [const { MaybeUninit::uninit() }; MAX_SGE];
    // SAFETY: the caller's promise.
    while let Some(next) = unsafe { wr.as_ref() } {
        // SAFETY: as above.
        let sges = unsafe { sges(&mut room, next.sg_list, next.num_sge) }.map_err(Refused::sges)?;
        post(&RecvWr { wr_id: next.wr_id, sges })?;
        *wr = next.next;
    }
    Ok(())
}

/// Posts receives to a queue that takes them one by one: 0, or the errno value with `*bad_wr` the first that was not posted. `to` names
/// the queue, and `limits` are its elements and receives.
///
/// # Safety
/// The list is as its manual page says; `bad_wr` is NULL or writable.
pub(crate) unsafe fn post_receives(
    mut wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
    (to, limits): (&dyn fmt::Display, impl FnOnce() -> (u32, u32)),
    post: impl FnMut(&RecvWr<'_>) -> Result<(), Refused>,
) -> c_int {
    // SAFETY: the caller's promise.
    let posted = unsafe { receives(&mut wr, post) };
    let posted = posted.map_err(|refused| refused_receive(to, wr, limits, &refused));
    // SAFETY: as above.
    posted.map_or_else(|e| unsafe { refuse_wr(bad_wr, wr, e) }, |()| 0)
}

/// Slot of `ibv_post_recv`: 0, or the errno value with `*bad_wr` the first request that was not posted.
///
/// # Safety
/// As for [`post_send`].
pub(crate) unsafe extern "C" fn post_recv(
    qp: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let qp = unsafe { deref::<ibv_qp_ex>(qp.cast()) };
    // SAFETY: the caller's promise.
    if let (Some(qp), Some(one)) = (qp, unsafe { wr.as_ref() })
        && one.next.is_null()
        && one.num_sge == 1
        && let Device::Transport(device) = &qp.inner.device
        // SAFETY: as above.
        && let Some(sge) = unsafe { one.sg_list.as_ref() }
        && let sge = (Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey })
        && device.post_recv_short(one.wr_id, sge)
    {
        return 0;
    }
    // SAFETY: as above.
    unsafe { post_recvs(qp, wr, bad_wr) }
}

/// As [`post_recv`], whatever the requests are.
///
/// # Safety
/// As for [`post_recv`].
#[inline(never)]
unsafe fn post_recvs(
    qp: Option<&Qp>,
    mut wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    if let Some(Device::Raw(device)) = qp.map(|qp| &qp.inner.device) {
        let to = format_args!("ibv_post_recv to queue pair {:#08x}", device.qpn().get());
        let limits = || (device.cap().max_recv_sge, device.cap().max_recv_wr);
        let queue: (&dyn fmt::Display, _) = (&to, limits);
        // SAFETY: the caller's promise.
        return unsafe { post_receives(wr, bad_wr, queue, |r| Ok(device.recv(r)?)) };
    }
    let posted = qp.ok_or_else(|| Refused::from(NO_QUEUE)).and_then(|qp| {
        let mut poster = qp.inner.device.transport()?.post()?;
        // SAFETY: the caller's promise.
        unsafe { receives(&mut wr, |r| Ok(poster.recv(r)?)) }
    });
    let posted = posted.map_err(|refused| {
        let Some(device) = qp.and_then(|qp| qp.inner.device.transport().ok()) else {
            return refused_receive(&"ibv_post_recv", wr, || (0, 0), &refused);
        };
        let to = format_args!("ibv_post_recv to queue pair {:#08x}", device.qpn().get());
        let limits = || (device.cap().max_recv_sge, device.cap().max_recv_wr);
        refused_receive(&to, wr, limits, &refused)
    });
    // SAFETY: the caller's promise.
    posted.map_or_else(|e| unsafe { refuse_wr(bad_wr, wr, e) }, |()| 0)
}

/// Slot of `ibv_post_srq_recv`: 0, or the errno value with `*bad_wr` the first request that was not posted.
///
/// # Safety
/// As for [`post_send`].
pub(crate) unsafe extern "C" fn post_srq_recv(
    srq: *mut ibv_srq,
    mut wr: *mut ibv_recv_wr,
    bad_wr: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the caller's promise.
    let srq = unsafe { deref(srq) };
    let posted = srq.ok_or_else(|| Refused::from(NO_QUEUE)).and_then(|srq| {
        let mut poster = srq.inner.device.post()?;
        // SAFETY: the caller's promise.
        unsafe { receives(&mut wr, |r| Ok(poster.recv(r)?)) }
    });
    let posted = posted.map_err(|refused| {
        let Some(srq) = srq.map(|srq| &srq.inner.device) else {
            return refused_receive(&"ibv_post_srq_recv", wr, || (0, 0), &refused);
        };
        let limits = || (srq.attr().max_sge, srq.attr().max_wr);
        refused_receive(&format_args!("ibv_post_srq_recv to {}", srq.name()), wr, limits, &refused)
    });
    // SAFETY: the caller's promise.
    posted.map_or_else(|e| unsafe { refuse_wr(bad_wr, wr, e) }, |()| 0)
}

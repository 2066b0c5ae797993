//! A receive queue for frames: that of a raw queue pair, or a work queue.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyverbs_causes::Cause;
use anyverbs_locks::{Mutex, rank};
use anyverbs_objects::base::Core;
use anyverbs_objects::cq::CqCell;
use anyverbs_objects::srq::SrqCell;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::payload::{Data, scatter};
use anyverbs_proto::raw::checksum;
use anyverbs_proto::raw::fcs::{FCS_LEN, fcs};
use anyverbs_proto::raw::frame::{Frame, VLAN_LEN};
use anyverbs_proto::recv_queue::{PostRecvError, RecvQueue, RecvWqe};
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::{Wc, WcFlags, WcOpcode, WcStatus};
use anyverbs_proto::wr::RecvWr;
use bitflags::bitflags;

use super::trouble::{Failing, Kind};

bitflags! {
    /// Actions on frames on receipt (`enum ibv_wq_flags`, `enum ibv_qp_create_flags`).
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct ReceiveFlags: u32 {
        /// A C-VLAN tag is taken out of the frame and given in the completion.
        const CVLAN_STRIPPING = 1;
        /// The frame check sequence follows the frame.
        const SCATTER_FCS = 2;
    }
}

/// The mode of a receive queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// Takes no requests.
    Closed,
    /// Takes requests; frames are dropped.
    Idle,
    /// Receives.
    Ready,
    /// Requests are flushed.
    Error,
}

/// A frame on its way to several receivers.
pub(super) struct Arrived<'a> {
    pub(super) frame: &'a Frame<'a>,
    checksums_right: Cell<Option<bool>>,
}

impl<'a> Arrived<'a> {
    pub(super) fn new(frame: &'a Frame<'a>) -> Self {
        Self { frame, checksums_right: Cell::new(None) }
    }

    fn checksums_right(&self) -> bool {
        self.checksums_right.get().unwrap_or_else(|| {
            let right = checksum::is_right(self.frame);
            self.checksums_right.set(Some(right));
            right
        })
    }
}

#[derive(Debug)]
pub(super) struct ReceiveQueue {
    core: &'static Core,
    /// The queue's number in completions.
    number: Qpn,
    /// Protection domain of the memory that requests may touch: those of an SRQ belong to the SRQ's.
    pd: u32,
    cq: Arc<CqCell>,
    srq: Option<Arc<SrqCell>>,
    /// The port, by its place among those of all devices, that counts what comes.
    port: AtomicUsize,
    /// It got to [`Mode::Error`] by itself; written under the lock.
    failed: AtomicBool,
    state: Mutex<rank::RawReceiveQueue, State>,
}

#[derive(Debug)]
struct State {
    mode: Mode,
    queue: RecvQueue,
    flags: ReceiveFlags,
    /// The request that is being filled.
    wqe: RecvWqe,
    /// The cause for which it got to [`Mode::Error`] by itself.
    first_failure: u32,
}

impl ReceiveQueue {
    pub(super) fn new(
        core: &'static Core,
        number: Qpn,
        pd: u32,
        cq: &Arc<CqCell>,
        srq: Option<&Arc<SrqCell>>,
        queue: RecvQueue,
        flags: ReceiveFlags,
    ) -> Self {
        Self {
            core,
            number,
            pd: srq.map_or(pd, |srq| srq.pd),
            cq: Arc::clone(cq),
            port: AtomicUsize::new(cq.device()),
            srq: srq.map(Arc::clone),
            failed: AtomicBool::new(false),
            state: Mutex::new(State {
                mode: Mode::Closed,
                queue,
                flags,
                wqe: RecvWqe::default(),
                first_failure: 0,
            }),
        }
    }

    pub(super) fn cq(&self) -> &Arc<CqCell> {
        &self.cq
    }

    /// Another port counts what comes.
    pub(super) fn counts_at(&self, port: usize) {
        self.port.store(port, Ordering::Relaxed);
    }

    pub(super) fn has_srq(&self) -> bool {
        self.srq.is_some()
    }

    /// Whether a receive failed since the queue was last reset.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(super) fn set_flags(&self, flags: ReceiveFlags, which: ReceiveFlags) {
        let mut state = self.state.lock();
        state.flags = state.flags.difference(which) | flags.intersection(which);
    }

    /// Flushes, or forgets, waiting requests, as the mode says.
    pub(super) fn set_mode(&self, mode: Mode) {
        let mut state = self.state.lock();
        match mode {
            Mode::Error if state.mode != Mode::Error => self.flush(&mut state),
            Mode::Closed => {
                state.queue.clear();
                self.cq.purge(self.number);
            }
            _ => {}
        }
        state.mode = mode;
        if matches!(mode, Mode::Closed | Mode::Idle) {
            self.failed.store(false, Ordering::Release);
            state.first_failure = 0;
        }
    }

    /// Ends it. It takes no requests any more, and has no memory: that may be a program's, which wants it back.
    pub(super) fn end(&self) {
        self.set_mode(Mode::Closed);
        let queue = std::mem::replace(&mut self.state.lock().queue, RecvQueue::new(0, 0));
        drop(queue);
    }

    pub(super) fn post(&self, wr: &RecvWr<'_>) -> Result<(), PostRecvError> {
        if self.srq.is_some() {
            return Err(PostRecvError::HasSrq);
        }
        let mut state = self.state.lock();
        match state.mode {
            Mode::Closed => Err(PostRecvError::State),
            Mode::Error => {
                state.queue.push(wr)?;
                self.flush(&mut state);
                Ok(())
            }
            Mode::Idle | Mode::Ready => state.queue.push(wr),
        }
    }

    /// Completes everything that waits with an error.
    fn flush(&self, state: &mut State) {
        while state.queue.pop(&mut state.wqe) {
            let cause = match self.core.has_failed(self.cq.device()) {
                true => Cause::Injected.number().into(),
                false if state.first_failure != 0 => state.first_failure,
                false => Cause::MovedToError.number().into(),
            };
            self.complete_in_error(&state.wqe, WcStatus::WrFlushErr, cause);
        }
    }

    fn count(&self, counter: Counter, n: u64) {
        self.core.count(self.port.load(Ordering::Relaxed), counter, n);
    }

    /// A receive fails, for a frame of this length. Returns the number of the cause.
    #[cold]
    fn fail(&self, wqe: &RecvWqe, len: u64, status: WcStatus) -> u32 {
        let kind = Kind::Receive { len, room: wqe.room(), from_srq: self.srq.is_some() };
        let (core, number) = (self.core, self.number);
        let failing =
            Failing { core, number, wr_id: wqe.wr_id, sges: &wqe.sges, pd: self.pd, kind };
        let cause = failing.explain(status);
        self.complete_in_error(wqe, status, cause);
        cause
    }

    fn complete_in_error(&self, wqe: &RecvWqe, status: WcStatus, vendor_err: u32) {
        self.count(Counter::RespCqeError, 1);
        self.complete(Wc {
            wr_id: wqe.wr_id,
            status,
            vendor_err,
            opcode: WcOpcode::Recv,
            qpn: self.number,
            ..Wc::default()
        });
    }

    fn complete(&self, wc: Wc) {
        if self.cq.push(wc, false) {
            self.core.progress().note_overrun(Arc::clone(&self.cq) as _, self.number);
        }
    }

    /// Takes a frame. True if the memory of the request failed, and the queue with it.
    #[must_use]
    pub(super) fn deliver(&self, arrived: &Arrived<'_>, tag: u32) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        if state.mode != Mode::Ready {
            self.count(Counter::DropQpState, 1);
            return false;
        }
        let taken = match &self.srq {
            Some(srq) => srq.take(&mut state.wqe),
            None => state.queue.pop(&mut state.wqe),
        };
        if !taken {
            self.count(Counter::DropNoRecv, 1);
            return false;
        }
        let bytes = arrived.frame.bytes;
        let cvlan = if state.flags.contains(ReceiveFlags::CVLAN_STRIPPING) {
            arrived.frame.cvlan()
        } else {
            None
        };
        // The frame in pieces: before the tag, behind it, and the check sequence.
        let (head, rest) = match cvlan {
            Some(_) => (&bytes[..12], &bytes[12 + VLAN_LEN..]),
            None => (bytes, &bytes[..0]),
        };
        let check;
        let tail: &[u8] = if state.flags.contains(ReceiveFlags::SCATTER_FCS) {
            check = fcs(bytes);
            &check
        } else {
            &[]
        };
        debug_assert!(tail.len() <= FCS_LEN);
        let len = head.len() + rest.len() + tail.len();
        self.count(Counter::RcvdPkts, 1);
        self.count(Counter::RcvdBytes, len as u64);
        let wqe = &state.wqe;
        if len as u64 > wqe.room() {
            self.fail(wqe, len as u64, WcStatus::LocLenErr);
            return false;
        }
        let mut at = 0;
        for piece in [head, rest, tail] {
            let (mrs, memory) = (&self.core.mrs, &self.core.memory);
            if scatter(&wqe.sges, at, Data::Bytes(piece), self.pd, mrs, memory).is_err() {
                state.first_failure = self.fail(wqe, len as u64, WcStatus::LocProtErr);
                self.failed.store(true, Ordering::Release);
                self.flush(state);
                state.mode = Mode::Error;
                return true;
            }
            at += piece.len() as u64;
        }
        let mut flags = WcFlags::empty();
        flags.set(WcFlags::IP_CSUM_OK, arrived.checksums_right());
        self.complete(Wc {
            wr_id: wqe.wr_id,
            opcode: WcOpcode::Recv,
            flags,
            byte_len: len as u32,
            imm: tag,
            qpn: self.number,
            sq_count: cvlan.unwrap_or(0).into(),
            ..Wc::default()
        });
        false
    }
}

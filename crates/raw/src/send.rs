//! Sends of raw packets. A frame leaves while it is posted: there is no peer to wait for. Only a rate limit holds it back ([`pacing`]).

pub(super) mod pacing;

use std::fmt;
use std::sync::Arc;

use anyverbs_causes::Cause;
use anyverbs_locks::{MutexGuard, rank};
use anyverbs_net::ethernet::FrameBatch;
use anyverbs_objects::error::PostError;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::memory::Memory;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::qp::attr::{QpCap, QpState};
use anyverbs_proto::qp::{PostSendError, SqCredit};
use anyverbs_proto::raw::frame::ETHERNET_LEN;
use anyverbs_proto::raw::tso::{MAX_HEADER, Segmenter};
use anyverbs_proto::raw::{MAX_FRAME, checksum};
use anyverbs_proto::wc::{Wc, WcOpcode, WcStatus};
use anyverbs_proto::wr::{SendFlags, Sge};

use super::qp::RawCell;
use super::trouble::{Failing, Kind};
use pacing::Paced;

/// A frame to send, or several.
#[derive(Clone, Copy, Debug)]
pub struct RawSendWr<'a> {
    /// The program's cookie.
    pub wr_id: u64,
    /// Only SIGNALED and INLINE count.
    pub flags: SendFlags,
    /// The checksums of IPv4 and of TCP or UDP are filled in (`IBV_SEND_IP_CSUM`).
    pub fill_in_checksums: bool,
    /// The data is payload that leaves in segments (`IBV_WR_TSO`).
    pub segmentation: Option<Segmentation>,
    /// The frame, or the payload, in order.
    pub sges: &'a [Sge],
}

/// The segmentation of payload. Each segment has its checksums.
#[derive(Clone, Copy, Debug)]
pub struct Segmentation {
    /// Where the headers of each segment lie in the program's memory: Ethernet, IP, TCP.
    pub header_addr: u64,
    /// Their bytes.
    pub header_len: u16,
    /// Most bytes of payload in a segment.
    pub mss: u16,
}

/// The send side of a queue pair.
#[derive(Debug)]
pub(super) struct Sends {
    pub(super) state: QpState,
    pub(super) port: u8,
    pub(super) cap: QpCap,
    sig_all: bool,
    max_tso_header: u32,
    credit: Arc<SqCredit>,
    /// Requests posted, as [`SqCredit`] counts them.
    head: u32,
    /// The frame that is being sent.
    pub(super) frame: Vec<u8>,
    /// The payload that leaves in segments.
    pub(super) payload: Vec<u8>,
    /// Frames for other processes.
    pub(super) batch: FrameBatch,
    /// The cause for which the queue pair went to SQE.
    first_failure: u32,
    /// Its rate limit, if it has one.
    pub(super) paced: Option<Box<Paced>>,
}

impl Sends {
    pub(super) fn new(
        cap: QpCap,
        sig_all: bool,
        max_tso_header: u32,
        credit: Arc<SqCredit>,
    ) -> Self {
        Self {
            state: QpState::Reset,
            port: 0,
            cap,
            sig_all,
            max_tso_header,
            credit,
            head: 0,
            frame: Vec::new(),
            payload: Vec::new(),
            batch: FrameBatch::default(),
            first_failure: 0,
            paced: None,
        }
    }

    /// For a queue pair that does not send.
    pub(super) fn none() -> Self {
        Self::new(QpCap::default(), false, 0, Arc::default())
    }

    /// All slots are free, and nothing waits.
    pub(super) fn reset(&mut self) {
        self.paced = None;
        self.credit.release(self.head);
    }

    fn room(&self) -> u32 {
        self.cap.max_send_wr.saturating_sub(self.head.wrapping_sub(self.credit.released()))
    }
}

/// Posts sends to a raw queue pair; see [`super::RawQp::post`].
pub struct RawPoster<'a> {
    cell: &'a Arc<RawCell>,
    /// Some until the drop.
    sends: Option<MutexGuard<'a, rank::RawQueuePair, Sends>>,
}

impl<'a> RawPoster<'a> {
    pub(super) fn new(cell: &'a Arc<RawCell>) -> Self {
        Self { cell, sends: Some(cell.sends.lock()) }
    }

    /// The number of sends that the queue still takes, so that a list can be posted whole or not at all.
    #[must_use]
    pub fn send_room(&self) -> u32 {
        self.sends.as_ref().map_or(0, |sends| sends.room())
    }

    /// Sends a frame, or payload in segments. A fault of the frame itself is told in the completion, and moves the
    /// queue pair to SQE.
    ///
    /// # Errors
    /// [`PostError::Send`]; nothing was posted.
    pub fn send(&mut self, wr: &RawSendWr<'_>) -> Result<(), PostError> {
        let cell = self.cell;
        let Some(sends) = self.sends.as_deref_mut() else { return Err(PostError::Gone) };
        check(cell, sends, wr)?;
        let state = cell.current(sends);
        if state == QpState::Rts && sends.paced.is_some() {
            return pacing::post(cell, sends, wr);
        }
        let status = if state == QpState::Rts {
            match fill(cell, sends, wr)? {
                Ok(()) => transmit(cell, sends, wr),
                Err(status) => status,
            }
        } else {
            // Requests complete in their order.
            pacing::flush(cell, sends);
            WcStatus::WrFlushErr
        };
        let posted = Posted::new(cell, sends, wr, status);
        complete(cell, sends, &posted, status);
        Ok(())
    }
}

/// A request that has its place in the queue, as its completion needs it.
#[derive(Debug)]
pub(super) struct Posted {
    wr_id: u64,
    /// A completion is wanted also if it succeeds.
    is_signaled: bool,
    opcode: WcOpcode,
    /// Requests posted up to this one.
    count: u32,
    /// For [`Wc::vendor_err`], if it fails.
    vendor_err: u32,
}

impl Posted {
    /// Gives a request the next place. What is known of its end is `status`.
    pub(super) fn new(
        cell: &RawCell,
        sends: &mut Sends,
        wr: &RawSendWr<'_>,
        status: WcStatus,
    ) -> Self {
        sends.head = sends.head.wrapping_add(1);
        Self {
            wr_id: wr.wr_id,
            is_signaled: sends.sig_all || wr.flags.contains(SendFlags::SIGNALED),
            opcode: if wr.segmentation.is_some() { WcOpcode::Tso } else { WcOpcode::Send },
            count: sends.head,
            vendor_err: match status {
                WcStatus::Success | WcStatus::WrFlushErr => 0,
                _ => failing(cell, wr).explain(status),
            },
        }
    }
}

/// A request that fails, as the log says it.
fn failing<'a>(cell: &RawCell, wr: &RawSendWr<'a>) -> Failing<'a> {
    let core = cell.switch().core();
    let len = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
    let kind = match &wr.segmentation {
        None => Kind::Frame(len),
        Some(Segmentation { header_len, mss, .. }) => Kind::Segments {
            payload: len,
            segment: usize::from(*header_len) + usize::from(*mss),
            max_tso: core.attr_of(cell.device()).max_tso,
        },
    };
    Failing { core, number: cell.qpn(), wr_id: wr.wr_id, sges: wr.sges, pd: cell.pd, kind }
}

/// Completes a request. A fault moves the queue pair to SQE.
pub(super) fn complete(cell: &RawCell, sends: &mut Sends, posted: &Posted, status: WcStatus) {
    if status != WcStatus::Success {
        if cell.current(sends) == QpState::Rts {
            // IBA 10.3.1.6: the receives of an unreliable queue pair go on.
            sends.state = QpState::Sqe;
            sends.first_failure = posted.vendor_err;
        }
        cell.switch().core().count(cell.port(), Counter::ReqCqeError, 1);
    } else if !posted.is_signaled {
        return;
    }
    let Some(cq) = &cell.send_cq else { return };
    let wc = Wc {
        wr_id: posted.wr_id,
        status,
        // It may have been posted before its device failed. Flushed work has the cause of the first failure.
        vendor_err: match status {
            WcStatus::WrFlushErr if cell.switch().core().has_failed(cell.device()) => {
                Cause::Injected.number().into()
            }
            WcStatus::WrFlushErr if cell.current(sends) == QpState::Sqe => sends.first_failure,
            WcStatus::WrFlushErr => Cause::MovedToError.number().into(),
            _ => posted.vendor_err,
        },
        opcode: posted.opcode,
        qpn: cell.qpn(),
        sq_count: posted.count,
        ..Wc::default()
    };
    if cq.push(wc, false) {
        cell.switch().core().progress().note_overrun(Arc::clone(cq) as _, cell.qpn());
    }
}

/// Finds faults that are refused at once.
fn check(cell: &RawCell, sends: &Sends, wr: &RawSendWr<'_>) -> Result<(), PostSendError> {
    if cell.send_cq.is_none() {
        return Err(PostSendError::NoSendQueue);
    }
    if !matches!(cell.current(sends), QpState::Rts | QpState::Sqe | QpState::Err) {
        return Err(PostSendError::State);
    }
    if wr.sges.len() > sends.cap.max_send_sge as usize {
        return Err(PostSendError::TooManySges);
    }
    let len: u64 = wr.sges.iter().map(|sge| u64::from(sge.len)).sum();
    if wr.flags.contains(SendFlags::INLINE) && len > sends.cap.max_inline_data.into() {
        return Err(PostSendError::InlineTooLong);
    }
    if let Some(segmentation) = &wr.segmentation
        && (u32::from(segmentation.header_len) > sends.max_tso_header || segmentation.mss == 0)
    {
        return Err(PostSendError::Segmentation);
    }
    if sends.room() == 0 {
        return Err(PostSendError::Full);
    }
    Ok(())
}

/// Gathers the frame, or the payload. Inline data that cannot be read is refused, as it is by others.
pub(super) fn fill(
    cell: &RawCell,
    sends: &mut Sends,
    wr: &RawSendWr<'_>,
) -> Result<Result<(), WcStatus>, PostSendError> {
    let switch = cell.switch();
    let len = wr.sges.iter().map(|sge| sge.len as usize).sum::<usize>();
    let (to, most) = match wr.segmentation {
        Some(_) => (&mut sends.payload, switch.core().attr_of(cell.device()).max_tso as usize),
        None => (&mut sends.frame, MAX_FRAME),
    };
    if len > most {
        return Ok(Err(WcStatus::LocLenErr));
    }
    to.resize(len, 0);
    if !wr.flags.contains(SendFlags::INLINE) {
        let payload = Payload::gather(wr.sges, 0, len, cell.pd);
        let copied = payload.copy_to(&switch.core().mrs, &switch.core().memory, to);
        return Ok(copied.map_err(|_| WcStatus::LocProtErr));
    }
    let mut rest = &mut to[..];
    for sge in wr.sges {
        let (here, more) = rest.split_at_mut(sge.len as usize);
        switch.core().memory.read(sge.addr, here).map_err(|_| PostSendError::Fault)?;
        rest = more;
    }
    Ok(Ok(()))
}

/// The segments of a request, but for their payload.
#[derive(Debug)]
pub(super) struct Segments {
    segmenter: Segmenter,
    header: [u8; MAX_HEADER],
    header_len: usize,
    mss: usize,
}

impl Segments {
    /// Segments of so many bytes of payload. A payload of nothing is one segment, too.
    pub(super) fn count(&self, payload_len: usize) -> usize {
        payload_len.div_ceil(self.mss).max(1)
    }

    /// Makes one of them.
    pub(super) fn make(&self, payload: &[u8], index: usize, frame: &mut Vec<u8>) {
        let offset = index * self.mss;
        let end = payload.len().min(offset + self.mss);
        frame.clear();
        frame.extend_from_slice(&self.header[..self.header_len]);
        frame.extend_from_slice(&payload[offset..end]);
        self.segmenter.finish(frame, index, offset, end == payload.len());
    }
}

/// Completes the frame that was gathered, or finds out the segments of the payload that was.
pub(super) fn prepare(
    cell: &RawCell,
    sends: &mut Sends,
    wr: &RawSendWr<'_>,
) -> Result<Option<Segments>, WcStatus> {
    let Sends { frame, payload, .. } = sends;
    let Some(Segmentation { header_addr, header_len, mss }) = wr.segmentation else {
        if frame.len() < ETHERNET_LEN {
            return Err(WcStatus::LocLenErr);
        }
        if wr.fill_in_checksums {
            checksum::fill_in(frame);
        }
        return Ok(None);
    };
    let (header_len, mss) = (usize::from(header_len), usize::from(mss));
    let mut header = [0; MAX_HEADER];
    let read = cell.switch().core().memory.read(header_addr, &mut header[..header_len]);
    read.map_err(|_| WcStatus::LocProtErr)?;
    let segmenter = Segmenter::new(&header[..header_len]).map_err(|_| WcStatus::LocQpOpErr)?;
    if header_len + payload.len().min(mss) > MAX_FRAME {
        return Err(WcStatus::LocLenErr);
    }
    Ok(Some(Segments { segmenter, header, header_len, mss }))
}

fn transmit(cell: &RawCell, sends: &mut Sends, wr: &RawSendWr<'_>) -> WcStatus {
    let segments = match prepare(cell, sends, wr) {
        Ok(segments) => segments,
        Err(status) => return status,
    };
    let switch = cell.switch();
    let Sends { frame, payload, batch, .. } = sends;
    let Some(segments) = segments else {
        switch.send(cell, frame, batch);
        return WcStatus::Success;
    };
    for index in 0..segments.count(payload.len()) {
        segments.make(payload, index, frame);
        switch.send(cell, frame, batch);
    }
    WcStatus::Success
}

impl Drop for RawPoster<'_> {
    fn drop(&mut self) {
        let Some(mut sends) = self.sends.take() else { return };
        let switch = self.cell.switch();
        // Under the lock, so that two threads cannot overtake each other.
        switch.flush(&mut sends.batch);
        drop(sends);
        switch.transport.after_unlock();
    }
}

impl fmt::Debug for RawPoster<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawPoster").finish_non_exhaustive()
    }
}

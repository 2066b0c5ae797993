//! Sends of a queue pair with a rate limit (`ibv_modify_qp_rate_limit`). A request is gathered when it is posted. Its frames leave when
//! the rate lets them, and then it completes. Requests keep their order.

use std::collections::VecDeque;
use std::sync::Arc;

use anyverbs_objects::base::Timed;
use anyverbs_objects::error::PostError;
use anyverbs_proto::qp::attr::QpState;
use anyverbs_proto::qp::pacing::{Pacing, RateLimit};
use anyverbs_proto::time::Time;
use anyverbs_proto::wc::WcStatus;

use super::{Posted, RawSendWr, Segments, Sends, complete, fill, prepare};
use crate::qp::RawCell;

/// A limit, and what waits for it.
#[derive(Debug)]
pub(crate) struct Paced {
    kbps: u32,
    /// None once the limit has ended: all that waits may leave.
    pacing: Option<Pacing>,
    waiting: VecDeque<Request>,
    /// When the worker looks again.
    look_at: Option<Time>,
}

#[derive(Debug)]
struct Request {
    posted: Posted,
    /// The frames that leave, or the fault with which it completes.
    frames: Result<Frames, WcStatus>,
}

/// Frames of a request that have not left.
#[derive(Debug)]
struct Frames {
    /// The frame, or the payload of the segments.
    bytes: Vec<u8>,
    segments: Option<Box<Segments>>,
    next: usize,
}

impl Frames {
    fn count(&self) -> usize {
        self.segments.as_ref().map_or(1, |segments| segments.count(self.bytes.len()))
    }
}

impl Paced {
    pub(crate) fn kbps(&self) -> u32 {
        self.kbps
    }
}

/// Sets a limit, or ends it with 0 kbps; what may leave now leaves. A frame has `packet` bytes, unless the limit says otherwise.
pub(crate) fn limit(cell: &Arc<RawCell>, sends: &mut Sends, limit: &RateLimit, packet: u32) {
    let before = sends.paced.take();
    let pacing = Pacing::new(limit, packet);
    if pacing.is_none() && before.is_none() {
        return;
    }
    let (waiting, look_at) = before.map_or_else(Default::default, |b| (b.waiting, b.look_at));
    sends.paced = Some(Box::new(Paced { kbps: limit.kbps, pacing, waiting, look_at }));
    advance(cell, sends);
}

/// Posts a request behind those that wait.
pub(crate) fn post(
    cell: &Arc<RawCell>,
    sends: &mut Sends,
    wr: &RawSendWr<'_>,
) -> Result<(), PostError> {
    let filled = fill(cell, sends, wr)?;
    let frames = filled.and_then(|()| prepare(cell, sends, wr)).map(|segments| {
        let bytes = match segments {
            None => &mut sends.frame,
            Some(_) => &mut sends.payload,
        };
        Frames { bytes: std::mem::take(bytes), segments: segments.map(Box::new), next: 0 }
    });
    let known = frames.as_ref().err().copied().unwrap_or(WcStatus::Success);
    let posted = Posted::new(cell, sends, wr, known);
    if let Some(paced) = &mut sends.paced {
        paced.waiting.push_back(Request { posted, frames });
    }
    advance(cell, sends);
    Ok(())
}

/// Sends what may leave now, and has the rest looked at in time.
fn advance(cell: &Arc<RawCell>, sends: &mut Sends) {
    let Some(mut paced) = sends.paced.take() else { return };
    let switch = cell.switch();
    let now = switch.core().now();
    while let Some(request) = paced.waiting.front_mut() {
        let status = match &mut request.frames {
            _ if cell.current(sends) != QpState::Rts => WcStatus::WrFlushErr,
            Err(status) => *status,
            Ok(frames) => {
                if let Some(wait) = paced.pacing.and_then(|pacing| pacing.wait(now)) {
                    let at = now + wait;
                    if paced.look_at.is_none_or(|earlier| at < earlier) {
                        paced.look_at = Some(at);
                        let cell = Arc::<RawCell>::downgrade(cell);
                        switch.core().progress().call_at(at, cell);
                    }
                    break;
                }
                let frame = match &frames.segments {
                    None => &frames.bytes,
                    Some(segments) => {
                        segments.make(&frames.bytes, frames.next, &mut sends.frame);
                        &sends.frame
                    }
                };
                if let Some(pacing) = &mut paced.pacing {
                    pacing.note_sent(frame.len() as u32, now);
                }
                switch.send(cell, frame, &mut sends.batch);
                frames.next += 1;
                if frames.next < frames.count() {
                    continue;
                }
                WcStatus::Success
            }
        };
        if let Some(request) = paced.waiting.pop_front() {
            complete(cell, sends, &request.posted, status);
        }
    }
    sends.paced = paced.pacing.is_some().then_some(paced);
}

/// Completes what waits: the queue pair has failed.
pub(crate) fn flush(cell: &RawCell, sends: &mut Sends) {
    let Some(paced) = &mut sends.paced else { return };
    for request in std::mem::take(&mut paced.waiting) {
        complete(cell, sends, &request.posted, WcStatus::WrFlushErr);
    }
}

impl Timed for RawCell {
    fn on_time(self: Arc<Self>, _: Time) {
        let mut sends = self.sends.lock();
        if let Some(paced) = &mut sends.paced {
            paced.look_at = None;
        }
        advance(&self, &mut sends);
        self.switch().flush(&mut sends.batch);
    }
}

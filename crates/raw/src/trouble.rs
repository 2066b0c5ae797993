//! Why a request of a raw queue pair failed, for its completion and for the log.

use anyverbs_causes::Cause;
use anyverbs_objects::base::Core;
use anyverbs_proto::mr::Access;
use anyverbs_proto::raw::MAX_FRAME;
use anyverbs_proto::raw::frame::ETHERNET_LEN;
use anyverbs_proto::raw::tso::NotTcp;
use anyverbs_proto::reason::Reason;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wc::WcStatus;
use anyverbs_proto::wr::Sge;

/// A request that fails.
#[derive(Debug)]
pub(super) struct Failing<'a> {
    pub(super) core: &'static Core,
    /// The queue pair, or the work queue.
    pub(super) number: Qpn,
    pub(super) wr_id: u64,
    pub(super) sges: &'a [Sge],
    /// The protection domain that its memory must have.
    pub(super) pd: u32,
    pub(super) kind: Kind,
}

/// What a request does, and its lengths.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    /// It sends a frame of so many bytes.
    Frame(u64),
    /// It sends so many bytes of payload in segments of so many bytes with their headers. A payload has so many at most.
    Segments { payload: u64, segment: usize, max_tso: u32 },
    /// It receives a frame of so many bytes, from an SRQ or not.
    Receive { len: u64, room: u64, from_srq: bool },
}

impl Failing<'_> {
    /// Has the log say why it fails. Returns the number of the cause, for `vendor_err`.
    #[cold]
    pub(super) fn explain(&self, status: WcStatus) -> u32 {
        let (cause, why) = self.reason(status);
        let name = match self.kind {
            Kind::Receive { .. } => "a receive",
            _ => "a SEND",
        };
        let line = format!(
            "queue pair {:#08x}: {name} (wr_id {:#x}) of a raw packet failed with status {} ({}): {why}; \
             see `anyverbs explain {cause}`",
            self.number.get(),
            self.wr_id,
            status as u8,
            status.name(),
        );
        self.core.progress().say(tracing::Level::ERROR, line);
        cause.number().into()
    }

    fn reason(&self, status: WcStatus) -> (Cause, String) {
        match status {
            WcStatus::LocProtErr => {
                let (need, from_srq) = match self.kind {
                    Kind::Receive { from_srq, .. } => (Access::LOCAL_WRITE, from_srq),
                    _ => (Access::empty(), false),
                };
                let of = (&self.core.mrs, &self.core.memory);
                let reason = Reason::of_local(of, self.sges, self.pd, need);
                let reason = if from_srq { reason.from_srq() } else { reason };
                (reason.cause, reason.to_string())
            }
            WcStatus::LocLenErr => self.length(),
            _ => (Cause::NotSegments, NotTcp.to_string()),
        }
    }

    fn length(&self) -> (Cause, String) {
        match self.kind {
            Kind::Frame(len) => (
                Cause::FrameLength,
                format!(
                    "the frame has {len} bytes, and it must have between {ETHERNET_LEN} and {MAX_FRAME}"
                ),
            ),
            Kind::Segments { payload, max_tso, .. } if payload > max_tso.into() => (
                Cause::FrameLength,
                format!("the payload has {payload} bytes, and max_tso is {max_tso}"),
            ),
            Kind::Segments { segment, .. } => (
                Cause::FrameLength,
                format!(
                    "a segment has {segment} bytes with its header, and the limit is {MAX_FRAME}"
                ),
            ),
            Kind::Receive { len, room, .. } => (
                Cause::MessageTooLong,
                format!("the frame has {len} bytes, and the receive buffer {room}"),
            ),
        }
    }
}

//! The parts of an extended reliable connection that work as a reliable one: the same scenarios, with an initiator as
//! `a` and a target and its SRQ as `b`.

pub(crate) mod prelude {
    pub(crate) use crate::prelude::*;

    /// An initiator, a target, and an SRQ as deep as the receive queue would be.
    pub(crate) fn rc(options: QpOptions) -> (Pair, End, End) {
        let a = QpOptions { qp_type: QpType::XrcSend, ..options };
        let srq = Some(options.srq.unwrap_or(options.cap.max_recv_wr));
        let b = QpOptions { qp_type: QpType::XrcRecv, srq, ..options };
        let t = Pair::with(1, a, b);
        let (a, b) = t.ends();
        (t, a, b)
    }

    /// Only the initiator sends.
    pub(crate) fn both_ways(_: QpOptions) -> Option<(Pair, End, End)> {
        None
    }
}

#[path = "access_errors.rs"]
mod access_errors;
#[path = "ack_coalescing.rs"]
mod ack_coalescing;
#[path = "atomic_write.rs"]
mod atomic_write;
#[path = "bad_response.rs"]
mod bad_response;
#[path = "duplicate_atomic.rs"]
mod duplicate_atomic;
#[path = "duplicate_read.rs"]
mod duplicate_read;
#[path = "duplicate_send.rs"]
mod duplicate_send;
#[path = "error_flush.rs"]
mod error_flush;
#[path = "fence.rs"]
mod fence;
#[path = "flush.rs"]
mod flush;
#[path = "inline_reuse.rs"]
mod inline_reuse;
#[path = "invalid_request.rs"]
mod invalid_request;
#[path = "local_errors.rs"]
mod local_errors;
#[path = "long_messages.rs"]
mod long_messages;
#[path = "lost_ack.rs"]
mod lost_ack;
#[path = "lost_read_response.rs"]
mod lost_read_response;
#[path = "lost_request.rs"]
mod lost_request;
#[path = "max_rd_atomic.rs"]
mod max_rd_atomic;
#[path = "multi_sge.rs"]
mod multi_sge;
#[path = "psn_wrap.rs"]
mod psn_wrap;
#[path = "reset.rs"]
mod reset;
#[path = "retry_exhausted.rs"]
mod retry_exhausted;
#[path = "rnr.rs"]
mod rnr;
#[path = "rnr_retry_exhausted.rs"]
mod rnr_retry_exhausted;
#[path = "send_inv.rs"]
mod send_inv;
#[path = "send_queue_full.rs"]
mod send_queue_full;
#[path = "sequence_nak.rs"]
mod sequence_nak;
#[path = "solicited.rs"]
mod solicited;
#[path = "sqd.rs"]
mod sqd;
#[path = "too_early.rs"]
mod too_early;
#[path = "vanished_pages.rs"]
mod vanished_pages;
#[path = "window.rs"]
mod window;
#[path = "write_imm.rs"]
mod write_imm;
#[path = "zero_byte.rs"]
mod zero_byte;

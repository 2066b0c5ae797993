//! USDT probes where a program polls (`docs/probes.md`). Where nobody traces, each is a look at a word of its own.

use anyverbs::{Wc, WcStatus};
use probe::probe_lazy;

/// A completion was polled.
#[inline(always)]
pub(crate) fn complete(wc: &Wc) {
    let (qpn, opcode, status) = (wc.qpn.get(), wc.opcode as u32, wc.status as u32);
    probe_lazy!(anyverbs, complete, qpn, wc.wr_id, opcode, wc.byte_len, status);
    if wc.status != WcStatus::Success {
        probe_lazy!(anyverbs, error, qpn, wc.wr_id, opcode, wc.vendor_err, status);
    }
}

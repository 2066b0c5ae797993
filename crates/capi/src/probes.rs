//! USDT probes where a program polls (`docs/probes.md`). Where nobody traces, each is a look at a word of its own.

use std::hint::black_box;

use anyverbs::{Wc, WcStatus};
use probe::probe_lazy;

/// A completion was polled.
#[inline(always)]
pub(crate) fn complete(wc: &Wc) {
    // Each probe reads the fields once more. Otherwise the way without a probe keeps all of it in registers.
    let anew = || black_box(wc);
    probe_lazy!(
        anyverbs,
        complete,
        anew().qpn.get(),
        anew().wr_id,
        anew().opcode as u32,
        anew().byte_len,
        anew().status as u32
    );
    if wc.status != WcStatus::Success {
        probe_lazy!(
            anyverbs,
            error,
            anew().qpn.get(),
            anew().wr_id,
            anew().opcode as u32,
            anew().vendor_err,
            anew().status as u32
        );
    }
}

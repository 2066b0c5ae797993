//! One processor a side.

use std::io;
use std::mem::{size_of_val, zeroed};

use anyhow::{Context, bail};

/// Binds the calling thread to a processor.
pub(crate) fn pin(processor: usize) -> anyhow::Result<()> {
    if processor >= libc::CPU_SETSIZE as usize {
        bail!("there is no processor {processor}");
    }
    // SAFETY: zero is a valid cpu_set_t, the number is within it, and the call gets a live one with its size.
    let result = unsafe {
        let mut set: libc::cpu_set_t = zeroed();
        libc::CPU_SET(processor, &mut set);
        libc::sched_setaffinity(0, size_of_val(&set), &raw const set)
    };
    if result != 0 {
        return Err(io::Error::last_os_error())
            .with_context(|| format!("cannot run on processor {processor}"));
    }
    Ok(())
}

/// The median of measured values, which are sorted.
pub(crate) fn median(values: &mut [f64]) -> anyhow::Result<f64> {
    percentile(values, 50.0)
}

/// A percentile of measured values, which are sorted.
pub(crate) fn percentile(values: &mut [f64], percent: f64) -> anyhow::Result<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let at = (values.len() as f64 * percent / 100.0) as usize;
    values.get(at).copied().context("nothing was measured")
}

//! Ports of ids.

use std::sync::atomic::{AtomicU16, Ordering};

use super::id::random;

/// Ports for ids that connect without being bound: peers do not find anybody by them, so they are not reserved.
const FIRST: u16 = 32_768;
const COUNT: u16 = 28_232;

/// A port for an id that connects.
pub(super) fn any() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static START: std::sync::OnceLock<u16> = std::sync::OnceLock::new();
    let start = *START.get_or_init(|| random() as u16);
    FIRST + start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT
}

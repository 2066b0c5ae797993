//! Conversions of `enum ibv_rate`: to multiples of 2.5 Gb/s and to Mb/s, and back.

use std::ffi::c_int;

use anyverbs::static_rate_mbps;

use crate::abi::*;

/// The rates for which rdma-core names a multiple of 2.5 Gb/s.
const MULTIPLES: &[(ibv_rate, c_int)] = &[
    (IBV_RATE_2_5_GBPS, 1),
    (IBV_RATE_5_GBPS, 2),
    (IBV_RATE_10_GBPS, 4),
    (IBV_RATE_20_GBPS, 8),
    (IBV_RATE_28_GBPS, 11),
    (IBV_RATE_30_GBPS, 12),
    (IBV_RATE_40_GBPS, 16),
    (IBV_RATE_50_GBPS, 20),
    (IBV_RATE_60_GBPS, 24),
    (IBV_RATE_80_GBPS, 32),
    (IBV_RATE_120_GBPS, 48),
    (IBV_RATE_400_GBPS, 160),
    (IBV_RATE_600_GBPS, 240),
    (IBV_RATE_800_GBPS, 320),
    (IBV_RATE_1200_GBPS, 480),
];

/// Mb/s of a rate.
fn mbps(rate: ibv_rate) -> Option<c_int> {
    let mbps = static_rate_mbps(u8::try_from(rate).ok()?)?;
    Some(mbps as c_int)
}

/// `ibv_rate_to_mult`: multiple of 2.5 Gb/s, or -1.
pub(crate) unsafe extern "C" fn ibv_rate_to_mult(rate: ibv_rate) -> c_int {
    MULTIPLES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.1)
}

/// `mult_to_ibv_rate`: the rate, or `IBV_RATE_MAX`.
pub(crate) unsafe extern "C" fn mult_to_ibv_rate(mult: c_int) -> ibv_rate {
    MULTIPLES.iter().find(|r| r.1 == mult).map_or(IBV_RATE_MAX, |r| r.0)
}

/// `ibv_rate_to_mbps`: Mb/s, or -1.
pub(crate) unsafe extern "C" fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int {
    mbps(rate).unwrap_or(-1)
}

/// `mbps_to_ibv_rate`: the rate, or `IBV_RATE_MAX`.
pub(crate) unsafe extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate {
    (0..=ibv_rate::from(u8::MAX))
        .find(|rate| self::mbps(*rate) == Some(mbps))
        .unwrap_or(IBV_RATE_MAX)
}

//! Conversions of `enum ibv_rate`: to multiples of 2.5 Gb/s and to Mb/s, and back.

use std::ffi::c_int;

use crate::abi::*;

/// Rate, multiple of 2.5 Gb/s where rdma-core names one, Mb/s.
const RATES: &[(ibv_rate, Option<c_int>, c_int)] = &[
    (IBV_RATE_2_5_GBPS, Some(1), 2_500),
    (IBV_RATE_5_GBPS, Some(2), 5_000),
    (IBV_RATE_10_GBPS, Some(4), 10_000),
    (IBV_RATE_14_GBPS, None, 14_062),
    (IBV_RATE_20_GBPS, Some(8), 20_000),
    (IBV_RATE_25_GBPS, None, 25_781),
    (IBV_RATE_28_GBPS, Some(11), 28_125),
    (IBV_RATE_30_GBPS, Some(12), 30_000),
    (IBV_RATE_40_GBPS, Some(16), 40_000),
    (IBV_RATE_50_GBPS, Some(20), 53_125),
    (IBV_RATE_56_GBPS, None, 56_250),
    (IBV_RATE_60_GBPS, Some(24), 60_000),
    (IBV_RATE_80_GBPS, Some(32), 80_000),
    (IBV_RATE_100_GBPS, None, 103_125),
    (IBV_RATE_112_GBPS, None, 112_500),
    (IBV_RATE_120_GBPS, Some(48), 120_000),
    (IBV_RATE_168_GBPS, None, 168_750),
    (IBV_RATE_200_GBPS, None, 206_250),
    (IBV_RATE_300_GBPS, None, 309_375),
    (IBV_RATE_400_GBPS, Some(160), 425_000),
    (IBV_RATE_600_GBPS, Some(240), 637_500),
    (IBV_RATE_800_GBPS, Some(320), 850_000),
    (IBV_RATE_1200_GBPS, Some(480), 1_275_000),
];

/// `ibv_rate_to_mult`: multiple of 2.5 Gb/s, or -1.
pub(crate) unsafe extern "C" fn ibv_rate_to_mult(rate: ibv_rate) -> c_int {
    RATES.iter().find(|r| r.0 == rate).and_then(|r| r.1).unwrap_or(-1)
}

/// `mult_to_ibv_rate`: the rate, or `IBV_RATE_MAX`.
pub(crate) unsafe extern "C" fn mult_to_ibv_rate(mult: c_int) -> ibv_rate {
    RATES.iter().find(|r| r.1 == Some(mult)).map_or(IBV_RATE_MAX, |r| r.0)
}

/// `ibv_rate_to_mbps`: Mb/s, or -1.
pub(crate) unsafe extern "C" fn ibv_rate_to_mbps(rate: ibv_rate) -> c_int {
    RATES.iter().find(|r| r.0 == rate).map_or(-1, |r| r.2)
}

/// `mbps_to_ibv_rate`: the rate, or `IBV_RATE_MAX`.
pub(crate) unsafe extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> ibv_rate {
    RATES.iter().find(|r| r.2 == mbps).map_or(IBV_RATE_MAX, |r| r.0)
}

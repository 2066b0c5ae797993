//! The properties of a seed's world.

use std::time::Duration;

use anyverbs_proto::qp::attr::{QpCap, QpType};
use anyverbs_proto::types::{Mtu, Psn};
use anyverbs_sim::QpOptions;
use anyverbs_sim::link::{Burst, Full, Link, Rate};
use rand::Rng;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;

use crate::Ways;

#[derive(Clone, Debug)]
pub(crate) struct Config {
    pub(crate) devices: usize,
    /// Type of each pair of queue pairs; datagram ones talk to all of their kind. The other one of an initiator is a
    /// target.
    pub(crate) pairs: Vec<QpType>,
    pub(crate) max_len: usize,
    pub(crate) ops: usize,
    pub(crate) link: Link,
    pub(crate) ack_delay: Duration,
    /// Receives are often posted late.
    pub(crate) lazy_receiver: bool,
    /// Things break on purpose.
    pub(crate) trouble: bool,
    pub(crate) srq: bool,
    pub(crate) shared_cq: bool,
    /// The probability that an operation is done without a message if it can be.
    pub(crate) direct: f64,
    /// The probability that a short SEND takes a lane if it can.
    pub(crate) lanes: f64,
    /// Frequent requests take their short ways.
    pub(crate) short_ways: bool,
}

fn one_of<T: Copy>(rng: &mut SmallRng, items: &[T]) -> T {
    *items.choose(rng).expect("not empty")
}

fn us(n: u64) -> Duration {
    Duration::from_micros(n)
}

impl Config {
    pub(crate) fn new(rng: &mut SmallRng, ways: Ways) -> Self {
        use QpType::{Rc, Uc, Ud, XrcSend};
        let max_len = match rng.random_range(0..30) {
            // READs in pieces, and paced.
            0 => 300_000,
            1..5 => 64,
            5..14 => 2000,
            14..23 => 8000,
            23..27 => 20_000,
            _ => 65_536,
        };
        let most = if max_len > 100_000 { 2 } else { 4 };
        let lanes = one_of(rng, &[0.0, 0.5, 1.0]) * f64::from(ways == Ways::Lanes);
        let types = if lanes > 0.0 {
            [Rc, Rc, Rc, Rc, Rc, Rc, XrcSend, Uc]
        } else {
            [Rc, Rc, Rc, Rc, XrcSend, XrcSend, Uc, Ud]
        };
        let pairs = (0..rng.random_range(1..=most)).map(|_| one_of(rng, &types)).collect();
        Self {
            devices: rng.random_range(2..=3),
            pairs,
            max_len,
            ops: rng.random_range(10..=150).min(20 + 800_000 / max_len),
            link: link(rng),
            ack_delay: one_of(rng, &[us(0), us(0), us(3), us(40)]),
            lazy_receiver: rng.random_bool(0.3),
            trouble: rng.random_bool(0.25),
            srq: rng.random_bool(0.4),
            shared_cq: rng.random_bool(0.5),
            direct: one_of(rng, &[0.0, 0.0, 0.5, 0.9, 1.0]),
            lanes,
            short_ways: ways != Ways::General,
        }
    }

    /// The longest queue.
    pub(crate) fn depth(&self) -> u32 {
        match self.max_len {
            0..10_000 => 16,
            10_000..30_000 => 8,
            30_000..100_000 => 4,
            _ => 2,
        }
    }

    pub(crate) fn options(&self, rng: &mut SmallRng, qp_type: QpType) -> QpOptions {
        let depth = self.depth();
        let rd_atomic = one_of(rng, &[1, 2, 4, 16]);
        QpOptions {
            qp_type,
            cap: QpCap {
                max_send_wr: rng.random_range(1..=depth),
                max_recv_wr: rng.random_range(1..=depth),
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: one_of(rng, &[0, 64, 256]),
            },
            sq_sig_all: rng.random_bool(0.2),
            mtu: one_of(rng, &Mtu::ALL),
            timeout: one_of(rng, &[1, 8, 13, 14]),
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: rng.random_range(1..=8),
            max_rd_atomic: rd_atomic,
            max_dest_rd_atomic: rd_atomic,
            sq_psn: one_of(
                rng,
                &[Psn::new(0), Psn::new(0xff_ffff), Psn::new(0xff_ffe0), Psn::new(77)],
            ),
            window: one_of(rng, &[1, 3000, 10_000, 64 << 10, 64 << 10, 1 << 20]),
            segment: match one_of(rng, &[0, 0, 0, 2048, 7000, 32 << 10]) {
                // Lanes need segments.
                0 if self.lanes > 0.0 => 4096,
                segment => segment,
            },
            batch: one_of(rng, &[0, 10_000, 65_000]),
            certain: false,
            probe_after: one_of(rng, &[None, Some(us(100)), Some(us(2000))]),
            out_of_order_room: one_of(rng, &[0, 5000, 256 << 10]),
            carries_acks: rng.random_bool(0.5),
            cqe: 10_000,
            short_ways: self.short_ways,
            ..QpOptions::rc()
        }
    }
}

/// As bad as it may be for eight tries in a row to fail never (once in 10^9 losses).
fn link(rng: &mut SmallRng) -> Link {
    let mut link = Link {
        delay: us(rng.random_range(1..20)),
        jitter: one_of(rng, &[us(0), us(0), us(1), us(30)]),
        spread: us(one_of(rng, &[2, 20, 200])),
        ..Link::default()
    };
    let often = one_of(rng, &[0.0, 0.002, 0.01, 0.03]);
    for what in [&mut link.loss, &mut link.duplicate, &mut link.reorder] {
        if rng.random_bool(0.5) {
            *what = often;
        }
    }
    if rng.random_bool(0.15) {
        let loss = one_of(rng, &[0.3, 1.0]);
        link.burst = Some(Burst { good: us(1500), bad: us(30), loss });
        link.loss = link.loss.min(0.01);
    }
    if rng.random_bool(0.2) {
        let full = one_of(rng, &[Full::Block, Full::Block, Full::Drop]);
        let queue = if full == Full::Block { rng.random_range(1..40) } else { 40 };
        let bytes_per_sec = one_of(rng, &[100_000_000, 1_000_000_000]);
        link.rate = Some(Rate { bytes_per_sec, queue, full });
    }
    link
}

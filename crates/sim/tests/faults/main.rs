//! Every fault of a network with every service, every operation and every MTU, some seeds of each, in virtual time.
//!
//! The promises stand in `docs/reliability.md`. Over RC and XRC everything arrives once, in order and right, or the
//! requester gets `RETRY_EXC_ERR`, then flushes. That happens within 4 x 4.096 us x 2^timeout x (retry_cnt + 1) + 1 s
//! of the last sign of life. Over UC and UD a message arrives as it was sent or not at all.
//!
//! `ANYVERBS_SIM_SEEDS=N` runs N seeds of each instead of [`SEEDS`]; `ANYVERBS_SIM_CASE=NAME` runs the cases with this in their
//! names alone. `cargo xtask test --gate` runs a third of the seeds.

mod exchange;

use std::env;
use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::types::Mtu;
use anyverbs_sim::link::{Burst, Full, Link, Rate};

/// Seeds of each case in an ordinary run.
const SEEDS: u64 = 3;

/// The fault of the network.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    None,
    Loss(u32),
    BurstLoss,
    Duplication,
    Reordering,
    /// The ICRC tells.
    Corruption,
    Delay,
    ShortQueue,
    Everything,
    /// No packet passes for 300 ms.
    Partition,
    /// No packet passes any more.
    End,
}

const FAULTS: [Fault; 13] = [
    Fault::None,
    Fault::Loss(1),
    Fault::Loss(10),
    Fault::Loss(50),
    Fault::BurstLoss,
    Fault::Duplication,
    Fault::Reordering,
    Fault::Corruption,
    Fault::Delay,
    Fault::ShortQueue,
    Fault::Everything,
    Fault::Partition,
    Fault::End,
];

impl Fault {
    /// Loss is in thousandths.
    fn link(self) -> Link {
        let us = Duration::from_micros;
        let mut link = Link { spread: us(200), ..Link::default() };
        match self {
            Fault::None | Fault::Partition | Fault::End => {}
            Fault::Loss(thousandths) => link.loss = f64::from(thousandths) / 1000.0,
            Fault::BurstLoss => link.burst = Some(Burst { good: us(1500), bad: us(30), loss: 1.0 }),
            Fault::Duplication => link.duplicate = 0.1,
            Fault::Reordering => link.reorder = 0.1,
            Fault::Corruption => link.corrupt = 0.02,
            Fault::Delay => {
                link.delay = Duration::from_millis(50);
                link.jitter = us(1000);
            }
            Fault::ShortQueue => {
                link.rate = Some(Rate { bytes_per_sec: 20_000_000, queue: 10, full: Full::Drop });
            }
            Fault::Everything => {
                link.jitter = us(20);
                for what in
                    [&mut link.loss, &mut link.duplicate, &mut link.reorder, &mut link.corrupt]
                {
                    *what = 0.02;
                }
            }
        }
        link
    }
}

/// The operation that is posted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Op {
    Send,
    SendImm,
    Write,
    WriteImm,
    Read,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
    /// WRITEs, READs and atomics in an order of the seed's.
    Mixed,
}

/// A case of the matrix.
#[derive(Clone, Copy, Debug)]
struct Case {
    fault: Fault,
    service: QpType,
    op: Op,
    mtu: Mtu,
    seed: u64,
}

impl Case {
    fn name(&self) -> String {
        let Case { fault, service, op, mtu, seed } = self;
        format!("{fault:?} {service:?} {op:?} {} seed {seed}", mtu.bytes())
    }
}

/// Says how to repeat a case that failed.
struct Replay(String);

impl Drop for Replay {
    fn drop(&mut self) {
        if thread::panicking() {
            let name = &self.0;
            eprintln!(
                "to repeat: ANYVERBS_SIM_CASE='{name}' cargo test -p anyverbs-sim --test faults"
            );
        }
    }
}

fn cases(seeds: u64) -> Vec<Case> {
    use Op::{AtomicWrite, CompareSwap, FetchAdd, Mixed, Read, Send, SendImm, Write, WriteImm};
    let reliable =
        [Send, SendImm, Write, WriteImm, Read, CompareSwap, FetchAdd, AtomicWrite, Mixed]
            .as_slice();
    let services = [
        (QpType::Rc, reliable),
        (QpType::XrcSend, reliable),
        (QpType::Uc, [SendImm, WriteImm].as_slice()),
        (QpType::Ud, [SendImm].as_slice()),
    ];
    let mut cases = Vec::new();
    for fault in FAULTS {
        for (service, ops) in services {
            for &op in ops {
                for mtu in Mtu::ALL {
                    let case = |seed| Case { fault, service, op, mtu, seed };
                    cases.extend((0..seeds).map(case));
                }
            }
        }
    }
    cases
}

#[test]
fn every_fault_with_every_service_operation_and_mtu() {
    let seeds = env::var("ANYVERBS_SIM_SEEDS")
        .map_or_else(|_| anyverbs_testing::seeds(SEEDS), |n| n.parse().expect("a number"));
    let filter = env::var("ANYVERBS_SIM_CASE").unwrap_or_default();
    let mut cases = cases(seeds);
    cases.retain(|case| case.name().contains(&filter));
    assert!(!cases.is_empty(), "no case has {filter:?} in its name");
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let _replay = Replay(case.name());
                    exchange::run(case);
                }
            });
        }
    });
}

#[test]
fn thousands_are_run_and_repeat_exactly() {
    assert!(cases(SEEDS).len() > 3000);
    for seed in 0..3 {
        let mtu = Mtu::Mtu512;
        let case = Case { fault: Fault::Everything, service: QpType::Rc, op: Op::Read, mtu, seed };
        assert_eq!(exchange::run(&case), exchange::run(&case));
    }
}

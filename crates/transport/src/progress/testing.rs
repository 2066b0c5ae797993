//! A driver for tests: its clock stands until a test sets it, and its worker does nothing by itself.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyverbs_objects::ah::{self, AhAttr};
use anyverbs_objects::async_event::AsyncQueue;
use anyverbs_objects::base::NEVER;
use anyverbs_objects::command::CommandFile;
use anyverbs_objects::config::Config;
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::{Cq, CqCell, CqInitAttr};
use anyverbs_objects::limits::DEFAULT;
use anyverbs_objects::pd::Pd;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpCap, QpState, QpType};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Mtu, Psn, Qpn};
use anyverbs_proto::wr::{RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge};
use anyverbs_testing::isolate_device;
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::{Above, Driver, Frames, Mad, Management};
use crate::DataPath;
use crate::progress::worker::Starter;
use crate::qp::{Qp, QpInitAttr};

/// QP1 without connections, and no raw packets.
#[derive(Debug)]
pub(super) struct Nothing {
    /// When its timer is due, in nanoseconds.
    pub(super) next: AtomicU64,
}

/// The rooms above of this process, whose devices are one.
pub(super) static NOTHING: Nothing = Nothing { next: AtomicU64::new(NEVER) };

impl Management for Nothing {
    fn next(&self) -> u64 {
        self.next.load(Ordering::SeqCst)
    }

    fn run(&'static self, now: Time) {
        if self.next() <= now.as_nanos() {
            self.next.store(NEVER, Ordering::SeqCst);
        }
    }

    fn receive(&'static self, _now: Time, _mads: &[Mad<'_>]) {}

    fn keeps_disconnects(&self) -> bool {
        false
    }

    fn look_at_disconnects(&'static self, _now: Time, _empty: Time) {}

    fn forwarded(&self, _now: Time) {}

    fn addresses_changed(&'static self) {}

    fn device_failed(&'static self, _device: usize) {}
}

impl Frames for Nothing {
    fn receive(&self) -> usize {
        0
    }

    fn dropped(&self) -> u64 {
        0
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn fail_users(&self, _overrun: &dyn Fn(&Arc<CqCell>) -> bool) {}

    fn fail_device(&self, _device: usize) {}
}

/// The driver of this process, and what starts its worker.
pub(super) fn open(change: impl FnOnce(&mut Config)) -> (&'static Driver, Starter) {
    isolate_device();
    let (mut config, mut rng) = (Config::load().unwrap(), StdRng::from_os_rng());
    change(&mut config);
    let DataPath { driver, starter, .. } =
        DataPath::open(config, [DEFAULT].into(), None, &mut rng).unwrap();
    assert!(driver.above.set(Above { management: &NOTHING, frames: &NOTHING }).is_ok());
    (driver, starter)
}

/// The driver of this process. All packets go by UDP, and come back to it. Nobody else receives.
pub(super) fn stopped() -> &'static Driver {
    stopped_with(|_| ())
}

/// As [`stopped`], with a further change of its configuration.
pub(super) fn stopped_with(change: impl FnOnce(&mut Config)) -> &'static Driver {
    let (driver, _starter) = open(|config| {
        (config.inproc, config.shm) = (false, false);
        // The path has places for all queue pairs of a test.
        config.udp.window = 1 << 20;
        change(config);
    });
    set(driver, at(0));
    // The slot's sockets may have heard of others.
    while driver.receive(super::receive::Reader::Wait) > 0 {}
    driver
}

/// A moment of the test.
pub(super) fn at(us: u64) -> Time {
    Time::from_nanos(1_000_000_000) + Duration::from_micros(us)
}

pub(super) fn set(driver: &Driver, now: Time) {
    driver.core.clock.set(now);
}

pub(super) fn count(driver: &Driver, counter: Counter) -> u64 {
    driver.core.total(counter)
}

/// A queue pair that is connected to a queue pair of this process.
pub(super) struct Connected {
    pub(super) qp: Qp,
    pub(super) cq: Cq,
    pd: Pd,
}

impl Connected {
    fn new(driver: &'static Driver) -> Self {
        Self::with(driver, &CqInitAttr::new(1024))
    }

    /// One whose completion queue has these parameters.
    fn with(driver: &'static Driver, cq: &CqInitAttr<'_>) -> Self {
        let events = AsyncQueue::new().unwrap();
        let context = Arc::new(ContextCell {
            device: 0,
            events,
            command: CommandFile::create("test").unwrap(),
        });
        let pd = Pd::new(driver.core, &context).unwrap();
        let cq = Cq::create(driver.core, &context, cq).unwrap();
        let cap = QpCap {
            max_send_wr: 256,
            max_recv_wr: 256,
            max_send_sge: 1,
            max_recv_sge: 1,
            ..QpCap::default()
        };
        let init = QpInitAttr {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            cap,
            qp_type: QpType::Rc,
            sq_sig_all: true,
            cookie: 0,
        };
        let qp = Qp::create(driver.transport, &pd, &init).unwrap();
        Self { qp, cq, pd }
    }

    /// The attributes with which it is connected to a queue pair of this process.
    pub(super) fn attr(driver: &Driver, dest_qpn: Qpn, retry_cnt: u8) -> QpAttr {
        let gid = driver.core.gids.listed(0)[0].gid;
        let attr =
            AhAttr { dgid: gid, hop_limit: 64, is_global: true, port: 1, ..AhAttr::default() };
        QpAttr {
            port: 1,
            av: ah::resolve(driver.core, 0, &attr).unwrap(),
            path_mtu: Mtu::Mtu1024,
            dest_qpn,
            rq_psn: Psn::new(100),
            sq_psn: Psn::new(100),
            max_dest_rd_atomic: 1,
            max_rd_atomic: 1,
            timeout: 14,
            retry_cnt,
            rnr_retry: 7,
            access: Access::REMOTE_WRITE,
            ..QpAttr::default()
        }
    }

    pub(super) fn connect(&self, driver: &Driver, dest_qpn: Qpn, retry_cnt: u8) {
        use QpAttrMask as M;
        let attr = Self::attr(driver, dest_qpn, retry_cnt);
        for (state, mask) in [
            (QpState::Init, M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS),
            (
                QpState::Rtr,
                M::AV
                    | M::PATH_MTU
                    | M::DEST_QPN
                    | M::RQ_PSN
                    | M::MAX_DEST_RD_ATOMIC
                    | M::MIN_RNR_TIMER,
            ),
            (
                QpState::Rts,
                M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC,
            ),
        ] {
            self.qp.modify(&QpAttr { state, ..attr }, M::STATE | mask).unwrap();
        }
    }

    /// Posts an empty SEND.
    pub(super) fn send(&self) {
        self.post(SendOp::Send);
    }

    /// Posts an empty WRITE.
    pub(super) fn write(&self) {
        self.post(SendOp::Write(RemoteAddr { va: 0, rkey: 0 }));
    }

    /// Posts a WRITE of so many bytes to the peer.
    pub(super) fn write_bytes(&self, peer: &Self, len: usize) {
        let [from, to] = [self, peer].map(|end| {
            let bytes = vec![0u8; len].leak();
            let (addr, access) =
                (bytes.as_ptr() as u64, Access::LOCAL_WRITE | Access::REMOTE_WRITE);
            // SAFETY: leaked, and nobody else's.
            let mr = unsafe { end.pd.reg_mr(addr, len as u64, addr, access) }.unwrap();
            let keys = (mr.lkey(), mr.rkey());
            // Registered until the process ends.
            std::mem::forget(mr);
            (addr, keys)
        });
        let sge = Sge { addr: from.0, len: len as u32, lkey: from.1.0 };
        self.post_with(SendOp::Write(RemoteAddr { va: to.0, rkey: to.1.1 }), &[sge]);
    }

    fn post(&self, op: SendOp) {
        self.post_with(op, &[]);
    }

    fn post_with(&self, op: SendOp, sges: &[Sge]) {
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 0, op, flags, sges, ud: None, xrc_srqn: 0 };
        self.qp.post_send(&[wr]).unwrap();
    }

    pub(super) fn recv(&self) {
        self.qp.post_recv(&[RecvWr { wr_id: 0, sges: &[] }]).unwrap();
    }
}

/// Two queue pairs that are connected to each other.
pub(super) fn pair(driver: &'static Driver) -> [Connected; 2] {
    let pair = [(); 2].map(|()| Connected::new(driver));
    pair[0].connect(driver, pair[1].qp.qpn(), 7);
    pair[1].connect(driver, pair[0].qp.qpn(), 7);
    pair
}

/// A queue pair without retries, whose peer does not exist.
pub(super) fn alone(driver: &'static Driver) -> Connected {
    alone_with(driver, &CqInitAttr::new(1024))
}

/// As [`alone`], with a completion queue of these parameters.
pub(super) fn alone_with(driver: &'static Driver, cq: &CqInitAttr<'_>) -> Connected {
    let qp = Connected::with(driver, cq);
    let nobody = Qpn::new(qp.qp.qpn().get() ^ 0xffff);
    qp.connect(driver, nobody, 0);
    qp
}

//! Completion queues with options, counters, rates and parent domains.

use std::alloc::{self, Layout};
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use anyverbs::error::*;
use anyverbs::*;

use crate::endpoint::*;

/// A connected pair. The first end completes in a queue of these fields.
fn pair_with(fields: CqFields) -> (Endpoint, Endpoint) {
    let (mut a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    let cq = a.context.create_cq_ex(&CqInitAttr { fields, ..CqInitAttr::new(64) }).unwrap();
    let init = QpInitAttr {
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        cap: CAP,
        qp_type: QpType::Rc,
        sq_sig_all: true,
        cookie: 0,
    };
    a.qp = a.context.create_qp(&a.pd, &init).unwrap();
    a.cq = cq;
    a.connect(b.address());
    b.connect(a.address());
    (a, b)
}

#[test]
fn completions_are_stamped_in_order() {
    let (a, b) = pair_with(CqFields::TIMESTAMP | CqFields::WALLCLOCK);
    let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    let mut last = a.context.raw_clock();
    for i in 0..10 {
        a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
        let mut out = [WcEx::default(); 1];
        let begin = Instant::now();
        while a.cq.poll_ex(&mut out).unwrap() == 0 {
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
        let [WcEx { wc, detail }] = out;
        assert_eq!((wc.wr_id, wc.status), (i, WcStatus::Success));
        assert!(detail.timestamp >= last && detail.timestamp <= a.context.raw_clock());
        assert!(detail.wallclock > 0);
        last = detail.timestamp;
    }
    // A plain one keeps nothing.
    b.recv(1, &[dst.sge(0, 64)]);
    a.send(10, SendOp::Send, &[src.sge(0, 8)]);
    let mut out = [WcEx::default(); 1];
    while b.cq.poll_ex(&mut out).unwrap() == 0 {}
    assert_eq!((out[0].wc.wr_id, out[0].detail), (1, WcDetail::default()));
}

#[test]
fn a_moderated_channel_is_told_when_the_period_is_over() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    b.cq.moderate(Moderation { count: 1000, period: 20_000 }).unwrap();
    b.recv(1, &[dst.sge(0, 64)]);
    b.cq.req_notify(false).unwrap();
    let begin = Instant::now();
    a.send(2, SendOp::Send, &[src.sge(0, 8)]);
    a.poll(1);
    let mut pfd =
        libc::pollfd { fd: b.channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    assert_eq!(unsafe { libc::poll(&raw mut pfd, 1, 10_000) }, 1);
    assert!(begin.elapsed() >= Duration::from_millis(19));
    b.channel.get_event().unwrap();
    assert_eq!(b.poll(1)[0].wr_id, 1);
    // A queue that goes while a notification is held back harms nothing.
    b.recv(3, &[dst.sge(0, 64)]);
    b.cq.req_notify(false).unwrap();
    a.send(4, SendOp::Send, &[src.sge(0, 8)]);
    a.poll(1);
    b.qp.destroy().unwrap();
    b.cq.destroy().unwrap();
    thread::sleep(Duration::from_millis(30));
}

#[test]
fn a_counter_counts_what_its_queue_pairs_do() {
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    let cntr = a.context.create_comp_cntr(CompCntrKind::Bytes).unwrap();
    a.qp.attach_comp_cntr(&cntr, CompCntrOps::RDMA_WRITE).unwrap();
    let again = a.qp.attach_comp_cntr(&cntr, CompCntrOps::all());
    assert!(matches!(again, Err(AttachError::Counted)), "{again:?}");
    let foreign = b.qp.attach_comp_cntr(&cntr, CompCntrOps::SEND);
    assert!(matches!(foreign, Err(AttachError::Foreign(_))), "{foreign:?}");
    a.connect(b.address());
    b.connect(a.address());
    let (src, dst) = (Buffer::new(&a.pd, 4096), Buffer::new(&b.pd, 4096));
    for len in [1, 10, 4000] {
        a.send(0, SendOp::Write(dst.remote(0)), &[src.sge(0, len)]);
    }
    a.send(0, SendOp::Read(dst.remote(0)), &[src.sge(0, 100)]);
    a.poll(4);
    assert_eq!((cntr.completed(), cntr.failed()), (4011, 0));
    assert_eq!(cntr.destroy(), Err(DestroyError::Busy("1 QP".into())));
    a.qp.destroy().unwrap();
    cntr.destroy().unwrap();
}

#[test]
fn a_parent_domain_stands_for_its_protection_domain() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let td = context.alloc_td().unwrap();
    let parent = pd.parent_domain(Some(&td), QueueMemory::HEAP).unwrap();
    assert!(parent.is_parent_domain() && !pd.is_parent_domain());
    assert_eq!(parent.number(), pd.number());
    assert_eq!(pd.destroy(), Err(DestroyError::Busy("1 parent domain".into())));
    assert_eq!(td.destroy(), Err(DestroyError::Busy("1 parent domain".into())));
    let twice = parent.parent_domain(None, QueueMemory::HEAP);
    assert!(matches!(twice, Err(CreateError::Invalid(_))), "{twice:?}");
    let cq = context.create_cq_ex(&CqInitAttr { pd: Some(&parent), ..CqInitAttr::new(4) }).unwrap();
    assert_eq!(parent.destroy(), Err(DestroyError::Busy("1 CQ".into())));
    cq.destroy().unwrap();
    parent.destroy().unwrap();
    td.destroy().unwrap();
    pd.destroy().unwrap();
}

/// Debug builds panic where a thread takes locks against their order.
#[test]
fn a_protection_domain_that_was_dropped_ends_with_the_last_object_on_it() {
    let context = context();
    let drop_pd = |pd: Pd| {
        let cell = Arc::downgrade(&pd.cell);
        drop(pd);
        assert!(cell.strong_count() > 0, "the object holds it");
        cell
    };

    let pd = context.alloc_pd().unwrap();
    let attr = AhAttr {
        dgid: context.gid(1, 0).unwrap().unwrap().gid,
        is_global: true,
        port: 1,
        ..AhAttr::default()
    };
    let ah = pd.create_ah(&attr).unwrap();
    let cell = drop_pd(pd);
    ah.destroy().unwrap();
    assert_eq!(cell.strong_count(), 0);

    for by_drop in [false, true] {
        let pd = context.alloc_pd().unwrap();
        let srq = pd.create_srq(&SrqInitAttr { max_wr: 1, max_sge: 1, cookie: 0 }).unwrap();
        let cell = drop_pd(pd);
        if !by_drop {
            srq.destroy().unwrap();
        }
        drop(srq);
        assert_eq!(cell.strong_count(), 0);
    }

    let pd = context.alloc_pd().unwrap();
    let parent = pd.parent_domain(None, QueueMemory::HEAP).unwrap();
    let cell = drop_pd(pd);
    let cq = context.create_cq_ex(&CqInitAttr { pd: Some(&parent), ..CqInitAttr::new(4) }).unwrap();
    cq.destroy().unwrap();
    parent.destroy().unwrap();
    assert_eq!(cell.strong_count(), 0);

    let pd = context.alloc_pd().unwrap();
    let parent = pd.parent_domain(None, QueueMemory::HEAP).unwrap();
    let cq = context.create_cq_ex(&CqInitAttr { pd: Some(&parent), ..CqInitAttr::new(4) }).unwrap();
    drop(pd);
    let cell = drop_pd(parent);
    cq.destroy().unwrap();
    assert_eq!(cell.strong_count(), 0);
}

#[test]
fn a_limit_of_the_rate_is_kept() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 65_536), Buffer::new(&b.pd, 65_536));
    // 16 bytes a microsecond.
    a.qp.limit_rate(&RateLimit { kbps: 128_000, max_burst: 8192, typical_packet: 0 }).unwrap();
    let begin = Instant::now();
    for i in 0..8 {
        a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 65_536)]);
    }
    a.poll(8);
    let least = Duration::from_micros((8 * 65_536 - 8192) / 16);
    assert!(begin.elapsed() >= least, "{:?} instead of {least:?}", begin.elapsed());
    let too_fast = RateLimit { kbps: u32::MAX, ..RateLimit::default() };
    assert!(a.qp.limit_rate(&too_fast).is_err());
}

/// An allocator that looks, from another thread, at the queues whose memory it gives and takes.
#[derive(Default)]
struct Curious {
    queues: Mutex<Option<Arc<(Cq, Srq)>>>,
    looked: AtomicU32,
    found_locked: AtomicU32,
}

impl Curious {
    fn look(&self) {
        let Some(queues) = self.queues.lock().unwrap().clone() else { return };
        let (tell, told) = mpsc::channel();
        thread::spawn(move || {
            let sizes = (queues.0.capacity(), queues.1.attr().max_wr);
            // The receiver may have given up.
            let _ = tell.send(sizes);
        });
        self.looked.fetch_add(1, Ordering::Relaxed);
        if told.recv_timeout(Duration::from_secs(2)).is_err() {
            self.found_locked.fetch_add(1, Ordering::Relaxed);
        }
    }
}

// SAFETY: the heap's memory.
unsafe impl Lender for Curious {
    fn lend(&self, _: Queue, layout: Layout) -> Option<NonNull<u8>> {
        self.look();
        // SAFETY: queues of no size are not asked for.
        NonNull::new(unsafe { alloc::alloc(layout) })
    }

    unsafe fn take_back(&self, _: Queue, at: NonNull<u8>, layout: Layout) {
        self.look();
        // SAFETY: `lend` took it from there with this layout.
        unsafe { alloc::dealloc(at.as_ptr(), layout) };
    }
}

#[test]
fn a_programs_allocator_is_called_while_no_queue_is_locked() {
    let e = Endpoint::new(QpType::Rc);
    let lender = Arc::new(Curious::default());
    let pd = e.pd.parent_domain(None, QueueMemory::lent(lender.clone())).unwrap();
    let cq = e.context.create_cq_ex(&CqInitAttr { pd: Some(&pd), ..CqInitAttr::new(8) }).unwrap();
    let srq = pd.create_srq(&SrqInitAttr { max_wr: 8, max_sge: 1, cookie: 0 }).unwrap();
    srq.post().unwrap().recv(&RecvWr { wr_id: 1, sges: &[] }).unwrap();
    let queues = Arc::new((cq, srq));
    *lender.queues.lock().unwrap() = Some(Arc::clone(&queues));
    queues.0.resize(16).unwrap();
    queues.1.modify(Some(32), Some(2)).unwrap();
    let none = queues.1.modify(Some(0), None);
    assert!(matches!(none, Err(ModifyObjectError::OutOfRange { value: 0, .. })), "{none:?}");
    assert_eq!((queues.0.capacity(), queues.1.attr().max_wr), (16, 32));
    *lender.queues.lock().unwrap() = None;
    // Memory was given and taken, of both.
    assert!(lender.looked.load(Ordering::Relaxed) >= 4);
    assert_eq!(lender.found_locked.load(Ordering::Relaxed), 0);
}

#[test]
fn a_leftover_notification_does_not_end_the_next_period() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    let send = || {
        b.recv(1, &[dst.sge(0, 64)]);
        a.send(2, SendOp::Send, &[src.sge(0, 8)]);
        a.poll(1);
    };
    let mut pfd =
        libc::pollfd { fd: b.channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // Two make a notification at once; the period of the first is not over.
    b.cq.moderate(Moderation { count: 2, period: 30_000 }).unwrap();
    b.cq.req_notify(false).unwrap();
    send();
    send();
    // SAFETY: one live pollfd.
    assert_eq!(unsafe { libc::poll(&raw mut pfd, 1, 10_000) }, 1);
    b.channel.get_event().unwrap();
    b.poll(2);
    thread::sleep(Duration::from_millis(10));
    b.cq.req_notify(false).unwrap();
    let begin = Instant::now();
    send();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::poll(&raw mut pfd, 1, 10_000) }, 1);
    assert!(begin.elapsed() >= Duration::from_millis(29), "{:?}", begin.elapsed());
    b.channel.get_event().unwrap();
    b.poll(1);
}

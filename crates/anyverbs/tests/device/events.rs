//! Completion channels and asynchronous events.

use std::os::fd::{AsFd, AsRawFd};
use std::time::{Duration, Instant};

use anyverbs::error::*;
use anyverbs::*;

use crate::endpoint::*;

fn readable(fd: &impl AsFd) -> bool {
    let mut pfd = libc::pollfd { fd: fd.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&raw mut pfd, 1, 0) == 1 }
}

#[test]
fn a_sleeping_receiver_is_told() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 4096), Buffer::new(&b.pd, 4096));
    std::thread::scope(|s| {
        s.spawn(|| {
            for i in 0..200 {
                b.recv(i, &[dst.sge(0, 4096)]);
                let wc = b.wait(1)[0];
                assert_eq!((wc.status, wc.opcode), (WcStatus::Success, WcOpcode::Recv));
                b.send(i, SendOp::Send, &[dst.sge(0, 8)]);
                b.wait(1);
            }
        });
        for i in 0..200 {
            a.recv(i, &[src.sge(8, 8)]);
            a.send(i, SendOp::Send, &[src.sge(0, 8)]);
            a.wait(2);
        }
    });
}

#[test]
fn destroying_a_cq_waits_for_acknowledgements() {
    let context = context();
    let channel = context.create_comp_channel().unwrap();
    let (a, b) = pair(QpType::Rc);
    drop(b);
    let cq = context.create_cq(4, Some(&channel), 0, 0).unwrap();
    let init = QpInitAttr {
        send_cq: &cq,
        recv_cq: &cq,
        srq: None,
        cap: CAP,
        qp_type: QpType::Rc,
        sq_sig_all: true,
        cookie: 0,
    };
    let qp = a.context.create_qp(&a.pd, &init).unwrap();
    assert_eq!(cq.destroy(), Err(DestroyError::Busy("1 QP".into())));
    assert_eq!(channel.destroy(), Err(DestroyError::Busy("1 CQ".into())));
    use QpAttrMask as M;
    let attr = QpAttr { state: QpState::Init, port: 1, ..QpAttr::default() };
    qp.modify(&attr, M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS).unwrap();
    cq.req_notify(false).unwrap();
    qp.post_recv(&[RecvWr { wr_id: 5, sges: &[] }]).unwrap();
    qp.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, M::STATE).unwrap();
    assert!(readable(&channel));
    let event = channel.get_event().unwrap();
    let mut wcs = [Wc::default(); 2];
    assert_eq!(cq.poll(&mut wcs), Ok(1));
    assert_eq!((wcs[0].wr_id, wcs[0].status), (5, WcStatus::WrFlushErr));
    qp.destroy().unwrap();
    let begin = Instant::now();
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            drop(event);
        });
        cq.destroy().unwrap();
    });
    assert!(begin.elapsed() >= Duration::from_millis(50));
    channel.destroy().unwrap();
    assert_eq!(cq.poll(&mut wcs), Err(CqError::Gone));
}

#[test]
fn an_unread_event_of_a_destroyed_cq_is_withdrawn() {
    let (a, _b) = pair(QpType::Rc);
    a.cq.req_notify(false).unwrap();
    a.recv(1, &[]);
    a.qp.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    assert!(readable(&a.channel));
    a.qp.destroy().unwrap();
    a.cq.destroy().unwrap();
    assert!(!readable(&a.channel));
}

#[test]
fn an_unread_event_of_a_dropped_cq_goes_with_it() {
    let (a, _b) = pair(QpType::Rc);
    a.cq.req_notify(false).unwrap();
    a.recv(1, &[]);
    a.qp.modify(&QpAttr { state: QpState::Err, ..QpAttr::default() }, QpAttrMask::STATE).unwrap();
    let Endpoint { qp, cq, channel, .. } = a;
    drop(qp);
    assert!(readable(&channel));
    // Had the event kept the CQ, that would keep the channel, too.
    drop(cq);
    assert!(!readable(&channel));
}

#[test]
fn an_overrun_cq_fails_its_queue_pairs() {
    let (a, b) = (Endpoint::with(QpType::Rc, CAP, 2), Endpoint::new(QpType::Rc));
    a.connect(b.address());
    b.connect(a.address());
    let dst = Buffer::new(&b.pd, 64);
    let src = Buffer::new(&a.pd, 64);
    for i in 0..3 {
        a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 8)]);
    }
    let begin = Instant::now();
    while a.qp.state().unwrap() != QpState::Err {
        assert!(begin.elapsed() < Duration::from_secs(60));
        std::thread::yield_now();
    }
    let mut kinds = Vec::new();
    for _ in 0..2 {
        let event = a.context.get_async_event().unwrap();
        kinds.push(event.kind());
    }
    assert_eq!(kinds, [AsyncEventKind::CqErr, AsyncEventKind::QpFatal]);
}

#[test]
fn destroying_a_queue_pair_waits_for_acknowledgements() {
    let (a, b) = pair(QpType::Rc);
    let src = Buffer::new(&a.pd, 64);
    a.send(1, SendOp::Write(RemoteAddr { va: 0, rkey: 1 }), &[src.sge(0, 64)]);
    a.poll(1);
    b.context.get_async_event().unwrap().leave_unacknowledged();
    let begin = Instant::now();
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(50));
            b.qp.ack_async_events(1);
        });
        b.qp.destroy().unwrap();
    });
    assert!(begin.elapsed() >= Duration::from_millis(50));
}

#[test]
fn nonblocking_descriptors_do_not_block() {
    let context = context();
    let channel = context.create_comp_channel().unwrap();
    for fd in [channel.as_fd(), context.as_fd()] {
        // SAFETY: fcntl on a live descriptor, no pointers.
        assert_eq!(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
    }
    assert!(matches!(channel.get_event(), Err(EventError::WouldBlock)));
    assert!(matches!(context.get_async_event(), Err(EventError::WouldBlock)));
}

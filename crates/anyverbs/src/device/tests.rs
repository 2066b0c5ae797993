//! The events of a program whose peer has acknowledged its message and disconnects.

use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyverbs_testing::{in_own_process, isolate_device};

use super::Device;
use crate::cm::{Address, ConnParam, EventChannel, EventKind, Id, PortSpace, create_event_channel};
use crate::{
    Context, Cq, Pd, Qp, QpCap, QpInitAttr, QpType, RecvWr, SendFlags, SendOp, SendWr, Wc,
    WcStatus, devices,
};
use anyverbs_transport::progress::Management as _;

const TIMEOUT: Duration = Duration::from_secs(20);
const PARAM: ConnParam<'_> = ConnParam {
    private_data: &[],
    responder_resources: 1,
    initiator_depth: 1,
    flow_control: false,
    retry_count: 7,
    rnr_retry_count: 7,
    srq: false,
    qpn: anyverbs_proto::types::Qpn::new(0),
};

struct Side {
    channel: EventChannel,
    id: Id,
    _pd: Pd,
    cq: Cq,
    qp: Qp,
}

impl Side {
    fn new(channel: EventChannel, id: Id) -> Self {
        let context = Context::open(&devices().unwrap()[0].name).unwrap();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(16, None, 0, 0).unwrap();
        let cap = QpCap { max_send_wr: 4, max_recv_wr: 4, ..QpCap::default() };
        let init = QpInitAttr {
            send_cq: &cq,
            recv_cq: &cq,
            srq: None,
            cap,
            qp_type: QpType::Rc,
            sq_sig_all: true,
            cookie: 0,
        };
        let qp = context.create_qp(&pd, &init).unwrap();
        id.attach_qp(&qp).unwrap();
        Self { channel, id, _pd: pd, cq, qp }
    }

    fn poll(&self) -> Option<Wc> {
        let mut wc = [Wc::default()];
        (self.cq.poll(&mut wc).unwrap() == 1).then_some(wc[0])
    }
}

/// The id of a request comes along.
fn expect(channel: &EventChannel, id: &Id, kind: EventKind) -> Option<Id> {
    let event = channel.get_event().unwrap();
    assert_eq!(event.kind, kind, "{event:?}");
    id.ack_events(1);
    event.new_id
}

fn is_readable(channel: &EventChannel) -> bool {
    let mut pfd =
        libc::pollfd { fd: channel.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd.
    unsafe { libc::poll(&raw mut pfd, 1, 0) == 1 }
}

fn connected() -> (Side, Side) {
    let channel = || create_event_channel().unwrap();
    let (at_listener, at_active) = (channel(), channel());
    let id = |channel| Id::create(channel, PortSpace::Tcp, QpType::Rc, 0).unwrap();
    let (listener, active) = (id(&at_listener), id(&at_active));
    listener.bind_addr(&Address::Ip(SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
    listener.listen(1).unwrap();
    let at = listener.info().local.unwrap();
    active.resolve_addr(None, &at).unwrap();
    expect(&at_active, &active, EventKind::AddrResolved);
    active.resolve_route().unwrap();
    expect(&at_active, &active, EventKind::RouteResolved);
    let active = Side::new(at_active, active);
    active.id.connect(&PARAM).unwrap();
    let passive = expect(&at_listener, &listener, EventKind::ConnectRequest).unwrap();
    let at_passive = channel();
    passive.migrate(&at_passive).unwrap();
    let passive = Side::new(at_passive, passive);
    passive.id.accept(Some(&PARAM)).unwrap();
    expect(&active.channel, &active.id, EventKind::Established);
    expect(&passive.channel, &passive.id, EventKind::Established);
    (active, passive)
}

#[test]
fn threads_that_start_at_once_share_the_device() {
    in_own_process("device::tests::threads_that_start_at_once_share_the_device", || {
        isolate_device();
        let start = Barrier::new(8);
        let address = || {
            start.wait();
            std::ptr::from_ref(Device::current().unwrap()).addr()
        };
        let addresses: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(address)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(addresses, [addresses[0]; 8]);
    });
}

#[test]
fn a_program_that_does_not_poll_hears_of_the_end() {
    let name = "device::tests::a_program_that_does_not_poll_hears_of_the_end";
    in_own_process(name, || {
        isolate_device();
        let (a, b) = connected();
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
        a.qp.post_send(&[SendWr { wr_id: 2, op, flags, sges: &[], ud: None, xrc_srqn: 0 }])
            .unwrap();
        let end = Instant::now() + TIMEOUT;
        while b.poll().is_none() {
            assert!(Instant::now() < end, "the message does not come");
        }
        b.id.disconnect().unwrap();
        while !is_readable(&a.channel) {
            assert!(Instant::now() < end, "the end is not heard");
            std::thread::sleep(Duration::from_millis(1));
        }
        expect(&a.channel, &a.id, EventKind::Disconnected);
        assert_eq!(a.poll().map(|wc| wc.wr_id), Some(2), "it was not polled before");
    });
}

#[test]
fn acknowledged_sends_are_polled_before_the_disconnection() {
    let name = "device::tests::acknowledged_sends_are_polled_before_the_disconnection";
    in_own_process(name, || {
        isolate_device();
        let (a, b) = connected();
        b.qp.post_recv(&[RecvWr { wr_id: 1, sges: &[] }]).unwrap();
        let op = SendOp::Send;
        let flags = SendFlags::SIGNALED;
        a.qp.post_send(&[SendWr { wr_id: 2, op, flags, sges: &[], ud: None, xrc_srqn: 0 }])
            .unwrap();
        let end = Instant::now() + TIMEOUT;
        while b.poll().is_none() {
            assert!(Instant::now() < end, "the message does not come");
        }
        // As in a program whose other thread, or next round, polls the completion.
        let gsi = Device::current().unwrap().gsi;
        // This thread may lose the processor for a while.
        gsi.keep_disconnects_for(TIMEOUT);
        b.id.disconnect().unwrap();
        while !gsi.keeps_disconnects() {
            assert!(!is_readable(&a.channel), "the end is heard first");
            assert!(Instant::now() < end, "the DREQ does not come");
            b.poll();
        }
        for _ in 0..100 {
            b.poll();
        }
        assert!(!is_readable(&a.channel), "the end is heard first");
        let sent = a.poll().expect("what was acknowledged is complete");
        assert_eq!((sent.wr_id, sent.status), (2, WcStatus::Success));
        expect(&a.channel, &a.id, EventKind::Disconnected);
    });
}

//! The calls for ordinary use: regions, endpoints, single requests, events that acknowledge themselves, futures.

use std::error::Error as _;
use std::future::poll_fn;
use std::pin::pin;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use anyverbs::endpoint::Endpoint;
use anyverbs::with_tokio::{AsyncCq, AsyncEventChannel, AsyncEvents};
use anyverbs::*;

use crate::endpoint::context;

const SOON: Duration = Duration::from_secs(20);

/// Two connected queue pairs on one completion queue each.
fn pair(context: &Context, pd: &Pd) -> [(Qp, Cq); 2] {
    let sides = [0, 1].map(|_| {
        let cq = context.create_cq(16, None, 0, 0).unwrap();
        (context.create_default_qp(pd, &cq, QpType::Rc).unwrap(), cq)
    });
    connect(context, &sides[0].0, &sides[1].0);
    sides
}

fn connect(context: &Context, a: &Qp, b: &Qp) {
    let [of_a, of_b] = [a, b].map(|qp| context.endpoint(qp).unwrap());
    let sent = Endpoint::from_bytes(of_b.to_bytes()).unwrap();
    assert_eq!(sent, of_b);
    context.connect(a, &of_a, &sent).unwrap();
    context.connect(b, &of_b, &of_a).unwrap();
}

#[test]
fn slices_are_sent_received_read_and_written() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [(a, of_a), (b, of_b)] = pair(&context, &pd);
    let all = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
    let (mine, theirs) = (pd.alloc(8192, all).unwrap(), pd.alloc(8192, all).unwrap());
    assert_eq!(theirs.slice(..).to_vec(), vec![0; 8192], "new memory is zero");
    b.recv(1, &theirs.slice(100..200)).unwrap();
    mine.write(0, b"first");
    a.send(2, &mine.slice(..5)).unwrap();
    assert_eq!(of_a.wait(SOON).unwrap().wr_id, 2);
    assert_eq!(of_b.wait(SOON).unwrap().byte_len, 5);
    assert_eq!(theirs.slice(100..105).to_vec(), b"first");
    let place = RemoteSlice::from_bytes(theirs.remote(1000..2000).to_bytes()).slice(24..29);
    a.write(3, &mine.slice(..5), &place).unwrap();
    of_a.wait(SOON).unwrap();
    assert_eq!(theirs.slice(1024..1029).to_vec(), b"first");
    // The bytes behind the peer's slice are not offered.
    let longer = Err(anyverbs::error::PostError::Longer { local: 6, remote: 5 });
    assert_eq!(a.write(4, &mine.slice(..6), &place), longer);
    assert_eq!(a.read(4, &mine.slice(..6), &place), longer);
    a.read(4, &mine.slice(4096..4101), &place).unwrap();
    of_a.wait(SOON).unwrap();
    assert_eq!(mine.slice(4096..).slice(..5).to_vec(), b"first");
    assert_eq!(of_a.wait(Duration::ZERO), Err(WaitError::Timeout(Duration::ZERO)));
}

#[test]
fn bytes_of_the_program_become_a_region_and_come_back() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [(a, of_a), _b] = pair(&context, &pd);
    let table: Box<[u8]> = (0..=255).collect();
    let place = table.as_ptr();
    let region = pd.adopt(table, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    assert_eq!(region.as_ptr().cast_const(), place, "they stay where they are");
    let name = region.remote(..);
    let mine = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    mine.write(0, b"written by a peer");
    a.write(1, &mine.slice(..17), &name.slice(100..117)).unwrap();
    of_a.wait(SOON).unwrap();

    let slice = region.slice(..1);
    let region = region.into_bytes().expect_err("a slice is left");
    drop(slice);
    let table = region.into_bytes().unwrap();
    assert_eq!(table.as_ptr(), place);
    assert_eq!(
        (&table[..100], &table[100..117]),
        (&(0..100).collect::<Vec<u8>>()[..], &b"written by a peer"[..])
    );
    assert_eq!(mine.into_bytes().unwrap()[..17], *b"written by a peer");

    // The registration has ended.
    let other = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    a.write(2, &other.slice(..8), &name).unwrap();
    let Err(WaitError::Failed(error)) = of_a.wait(SOON) else { panic!("the key has ended") };
    assert_eq!(error.status, WcStatus::RemAccessErr);
    assert_eq!(table[0], 0);
}

#[test]
fn bytes_that_cannot_be_registered_are_refused() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let error = pd.adopt(Box::default(), Access::LOCAL_WRITE).unwrap_err();
    assert!(matches!(error, AllocError::Memory { len: 0, .. }), "{error}");
    let error = pd.adopt([0; 8].into(), Access::REMOTE_WRITE).unwrap_err();
    assert!(matches!(error, AllocError::Register { len: 8, .. }), "{error}");
}

#[test]
fn atomics_take_slices() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [(a, of_a), _b] = pair(&context, &pd);
    let mine = pd.alloc(8, Access::LOCAL_WRITE).unwrap();
    let word = pd.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_ATOMIC).unwrap();
    word.write(8, &40u64.to_ne_bytes());
    let (into, at) = (mine.slice(..), word.remote(8..16));
    let before = |posted: Result<(), error::PostError>| {
        posted.unwrap();
        of_a.wait(SOON).unwrap();
        u64::from_ne_bytes(into.to_vec().try_into().unwrap())
    };
    assert_eq!(before(a.fetch_add(1, &mine.slice(..), &at, 2)), 40);
    assert_eq!(before(a.compare_swap(2, &mine.slice(..), &at, 41, 7)), 42);
    assert_eq!(before(a.compare_swap(3, &mine.slice(..), &at, 42, 7)), 42);
    assert_eq!(word.slice(8..16).to_vec(), 7u64.to_ne_bytes());
}

#[test]
fn pieces_of_device_memory_are_read_by_a_peer() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [(a, of_a), (b, of_b)] = pair(&context, &pd);
    let memory = context.alloc_dm(4096, 3).unwrap();
    memory.write(128, b"on the device...").unwrap();
    let rights = Access::ZERO_BASED | Access::LOCAL_WRITE | Access::REMOTE_READ;
    // It begins at byte 64 of the device memory.
    let mr = pd.reg_dm_mr(&memory, 64, 1024, rights).unwrap();
    let mine = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    a.read(1, &mine.slice(..13), &mr.remote(64..77)).unwrap();
    of_a.wait(SOON).unwrap();
    assert_eq!(mine.slice(..13).to_vec(), b"on the device");

    b.recv(2, &mine.slice(32..)).unwrap();
    let (op, flags) = (SendOp::Send, SendFlags::SIGNALED);
    let sges = [mr.sge(67..70), mr.sge(71..77)];
    let send = SendWr { wr_id: 3, op, flags, sges: &sges, ud: None, xrc_srqn: 0 };
    a.post_send_list(&[send]).unwrap();
    assert_eq!(of_b.wait(SOON).unwrap().byte_len, 9);
    assert_eq!(mine.slice(32..41).to_vec(), b"thedevice");
}

#[test]
fn a_request_for_a_deregistered_region_completes_with_an_error() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [(a, of_a), (b, of_b)] = pair(&context, &pd);
    let region = pd.alloc(64, Access::LOCAL_WRITE | Access::REMOTE_READ).unwrap();
    let (slice, name) = (region.slice(..8), region.remote(..8));
    drop(region);
    assert_eq!(slice.to_vec(), [0; 8], "a slice keeps its region");
    b.recv(1, &slice).unwrap();
    drop(slice);
    let other = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    a.send(2, &other.slice(..8)).unwrap();
    let Err(WaitError::Failed(error)) = of_b.wait(SOON) else { panic!("no memory to receive") };
    assert_eq!((error.wr_id, error.status), (1, WcStatus::LocProtErr));
    assert!(error.to_string().contains("LocProtErr"), "{error}");
    let Err(WaitError::Failed(error)) = of_a.wait(SOON) else { panic!("the peer failed") };
    assert_eq!(error.status, WcStatus::RemOpErr);

    let [(a, of_a), _b] = pair(&context, &pd);
    a.read(3, &other.slice(..8), &name).unwrap();
    let Err(WaitError::Failed(error)) = of_a.wait(SOON) else { panic!("no memory to read") };
    assert_eq!(error.status, WcStatus::RemAccessErr);
}

#[test]
fn datagrams_go_to_an_endpoint() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16, None, 0, 0).unwrap();
    let [a, b] = [0, 1].map(|_| context.create_default_qp(&pd, &cq, QpType::Ud).unwrap());
    let (of_a, of_b) = (context.endpoint(&a).unwrap(), context.endpoint(&b).unwrap());
    let memory = pd.alloc(256, Access::LOCAL_WRITE).unwrap();
    b.recv(1, &memory.slice(..128)).unwrap();
    memory.write(128, b"datagram");
    let ah = context.address_of(&pd, &of_b).unwrap();
    a.send_to(2, &memory.slice(128..136), ah.dest(of_b.qpn, of_b.qkey)).unwrap();
    let both = [cq.wait(SOON).unwrap(), cq.wait(SOON).unwrap()];
    assert!(both.iter().any(|wc| (wc.wr_id, wc.byte_len) == (1, 48)));
    assert_eq!(memory.slice(40..48).to_vec(), b"datagram");
    let error = context.connect(&a, &of_a, &of_b).unwrap_err();
    assert!(error.to_string().contains("qp_type of the local endpoint"), "{error}");
}

#[test]
fn errors_name_the_field() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let [(a, cq), (b, _)] = pair(&context, &pd);
    let fresh = context.create_default_qp(&pd, &cq, QpType::Rc).unwrap();
    let local = context.endpoint(&fresh).unwrap();
    let text = context.endpoint(&fresh).unwrap_err().to_string();
    assert!(text.contains("not new, but in INIT"), "{text}");
    let fails = |local: &Endpoint, remote: &Endpoint| {
        context.connect(&fresh, local, remote).unwrap_err().to_string()
    };
    let text = fails(&Endpoint { qpn: a.qpn(), ..local }, &local);
    assert!(text.starts_with("qpn of the local endpoint"), "{text}");
    let text = fails(&local, &Endpoint { qp_type: QpType::Uc, ..local });
    assert!(text.starts_with("qp_type of the remote endpoint: Uc"), "{text}");
    let nobody = Gid([7; 16]);
    let text = fails(&Endpoint { gid: nobody, ..local }, &local);
    assert!(text.starts_with("gid of the local endpoint"), "{text}");
    // It is still as it was.
    context.connect(&fresh, &local, &local).unwrap();
    let text = context.endpoint(&fresh).unwrap_err().to_string();
    assert!(text.contains("not new, but in RTS"), "{text}");

    let mut bytes = local.to_bytes();
    bytes[2] = 9;
    let error = Endpoint::from_bytes(bytes).unwrap_err();
    assert_eq!((error.field, error.value), ("mtu", 9));
    assert_eq!(Endpoint::from_bytes([0; 32]).unwrap_err().field, "the version");

    let region = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    let sges = [region.slice(..).sge(); 5];
    let wr = |count| RecvWr { wr_id: 0, sges: &sges[..count] };
    let failure = b.post_recv_list(&[wr(1), wr(5), wr(1)]).unwrap_err();
    assert_eq!(failure.index, 1);
    assert!(failure.source().is_some() && failure.to_string().contains("request 1"), "{failure}");
    let text = pd.alloc(64, Access::REMOTE_WRITE).unwrap_err().to_string();
    assert!(text.contains("REMOTE_WRITE") && text.contains("local write"), "{text}");
}

#[test]
#[should_panic = "range 60..70 of 64 bytes"]
fn a_slice_lies_within_its_region() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let region = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    let _beyond = region.slice(60..70);
}

#[test]
fn an_event_is_acknowledged_when_dropped_or_later_by_hand() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let channel = context.create_comp_channel().unwrap();
    let cq = context.create_cq(16, Some(&channel), 0, 7).unwrap();
    let [a, b] = [0, 1].map(|_| context.create_default_qp(&pd, &cq, QpType::Rc).unwrap());
    connect(&context, &a, &b);
    let memory = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    let event = || {
        cq.req_notify(false).unwrap();
        b.recv(1, &memory.slice(..8)).unwrap();
        a.send(2, &memory.slice(8..16)).unwrap();
        let event = channel.get_event().unwrap();
        for _ in 0..2 {
            cq.wait(SOON).unwrap();
        }
        event
    };
    drop(event());
    let left = event();
    assert_eq!(left.cookie(), 7);
    left.leave_unacknowledged();
    drop((a, b));
    let started = Instant::now();
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(100));
            cq.ack_events(1);
        });
        cq.destroy().unwrap();
    });
    assert!(
        started.elapsed() >= Duration::from_millis(100),
        "destroy waits for the event that was left"
    );
}

/// Runs a future on a runtime of one thread.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(future)
}

#[test]
fn completions_are_futures() {
    let context = context();
    let pd = context.alloc_pd().unwrap();
    let memory = pd.alloc(1024, Access::LOCAL_WRITE).unwrap();
    block_on(async {
        let (of_a, of_b) =
            (AsyncCq::new(&context, 16).unwrap(), AsyncCq::new(&context, 16).unwrap());
        let a = context.create_default_qp(&pd, of_a.cq(), QpType::Rc).unwrap();
        let b = context.create_default_qp(&pd, of_b.cq(), QpType::Rc).unwrap();
        connect(&context, &a, &b);
        let none = of_b.next_within(Duration::from_millis(20)).await;
        assert!(matches!(none, Err(anyverbs::with_tokio::WaitError::Timeout(_))), "{none:?}");
        for round in 0..100u64 {
            b.recv(round, &memory.slice(..8)).unwrap();
            // The receiver waits before the message is there.
            let mut received = pin!(of_b.next_within(SOON));
            let first = poll_fn(|cx| Poll::Ready(received.as_mut().poll(cx))).await;
            assert!(first.is_pending(), "{first:?}");
            memory.write(8, &round.to_le_bytes());
            a.send(round, &memory.slice(8..16)).unwrap();
            let received = received.await;
            assert_eq!(received.unwrap().wr_id, round);
            assert_eq!(memory.slice(..8).to_vec(), round.to_le_bytes());
            assert_eq!(of_a.next_within(SOON).await.unwrap().status, WcStatus::Success);
        }
        drop((a, b));
        of_a.cq().destroy().unwrap();
    });
}

#[test]
fn asynchronous_events_are_futures() {
    let own = context();
    let pd = own.alloc_pd().unwrap();
    let [(a, of_a), (b, of_b)] = pair(&own, &pd);
    let region = pd.alloc(64, Access::LOCAL_WRITE).unwrap();
    // A WRITE to memory without the right raises an event at the responder.
    a.write(1, &region.slice(..8), &region.remote(8..16)).unwrap();
    block_on(async {
        let events = AsyncEvents::new(own).unwrap();
        let event = events.next_within(SOON).await.unwrap();
        assert_eq!(event.kind(), AsyncEventKind::QpAccessErr);
        assert!(matches!(event.element(), EventElement::Qp { qpn, .. } if qpn == b.qpn()));
    });
    assert!(of_a.wait(SOON).is_err());
    b.destroy().unwrap();
    drop(of_b);
}

#[test]
fn events_of_the_connection_manager_are_futures() {
    use anyverbs::cm::{Address, EventKind, Id, PortSpace, create_event_channel};
    let _context = context();
    block_on(async {
        let events = AsyncEventChannel::new(create_event_channel().unwrap()).unwrap();
        let id = Id::create(events.channel(), PortSpace::Tcp, QpType::Rc, 5).unwrap();
        let none = events.next_within(Duration::from_millis(20)).await;
        assert!(matches!(none, Err(anyverbs::with_tokio::WaitError::Timeout(_))), "{none:?}");
        let to = Address::Ip("127.0.0.1:7471".parse().unwrap());
        id.resolve_addr(None, &to).unwrap();
        let event = events.next_within(SOON).await.unwrap();
        assert_eq!((event.kind, event.cookie), (EventKind::AddrResolved, 5));
        id.ack_events(1);
        id.destroy().unwrap();
    });
}

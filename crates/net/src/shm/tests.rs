//! Endpoints in one process: all tests that need no second process.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

mod lanes;

use super::handshake::{self, Greeting, ProofWord, Status};
use super::layout::{HEAD, MARKS, page, side_len, words};
use super::memory::Memory as _;
use super::memory::SharedObject;
use super::*;
use crate::host::{Registry, Slot};
use crate::sockopt;
use anyverbs_testing::in_own_process;

const TIME_LIMIT: Duration = Duration::from_secs(20);

/// A process as far as the link is concerned.
struct Party {
    endpoint: Endpoint,
    poller: Poller,
    events: VecDeque<Event>,
    received: Vec<(u8, Vec<u8>)>,
    _slot: Slot,
}

fn registry() -> Registry {
    static TESTS: AtomicUsize = AtomicUsize::new(0);
    let n = TESTS.fetch_add(1, Ordering::Relaxed);
    Registry::new(&format!("anyverbs-shm-{}-{n}", std::process::id())).unwrap()
}

impl Party {
    fn new(registry: &Registry, slot: u8) -> Self {
        let slot = Slot::claim_number(registry, slot).unwrap();
        let (endpoint, poller) = Endpoint::new(&slot, Config::default()).unwrap();
        Self { endpoint, poller, events: VecDeque::new(), received: Vec::new(), _slot: slot }
    }

    /// One round of control and poll.
    fn turn(&mut self) -> usize {
        self.endpoint.control().unwrap();
        let received = &mut self.received;
        let n = self.poller.poll(|channel, batch| {
            for message in batch {
                let mut payload = vec![0; message.payload_len()];
                message.read_payload(0, &mut payload);
                received.push((channel.slot(), payload));
            }
        });
        while let Some(event) = self.poller.next_event() {
            self.events.push_back(event);
        }
        n
    }

    fn take_closed(&mut self) -> Option<(u8, Closed)> {
        let at = self.events.iter().position(|e| matches!(e, Event::Closed(..)))?;
        match self.events.remove(at) {
            Some(Event::Closed(channel, reason)) => Some((channel.slot(), reason)),
            _ => None,
        }
    }
}

fn send(channel: &Arc<Channel>, payload: &[u8]) -> Result<(), SendError> {
    let mut sender = channel.sender();
    let mut reservation = sender.reserve(4, payload.len())?;
    reservation.write_header(b"head");
    reservation.write_payload(0, payload);
    reservation.commit();
    sender.flush();
    Ok(())
}

/// Turns all parties until `done`.
fn until<const N: usize>(
    mut parties: [&mut Party; N],
    mut done: impl FnMut(&mut [&mut Party; N]) -> bool,
) {
    let deadline = Instant::now() + TIME_LIMIT;
    while !done(&mut parties) {
        assert!(Instant::now() < deadline, "it takes too long");
        for party in &mut parties {
            party.turn();
        }
    }
}

#[test]
fn messages_sent_before_an_early_end_arrive() {
    let registry = registry();
    let (a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    for n in 0..3 {
        send(&channel, &[n]).unwrap();
    }
    // It answers no more: the socket is closed.
    drop((channel, a));
    until([&mut b], |[b]| b.take_closed() == Some((1, Closed::HungUp)));
    assert_eq!(b.received, [(1, vec![0]), (1, vec![1]), (1, vec![2])]);
    assert_eq!(b.endpoint.in_use(), (0, 0));
}

#[test]
fn messages_sent_before_the_peer_answers_arrive() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    assert!(!channel.is_established() && channel.slot() == 2);
    send(&channel, b"hello").unwrap();
    until([&mut a, &mut b], |[a, b]| {
        channel.is_established() && b.received.len() == 1 && !a.events.is_empty()
    });
    assert_eq!(b.received, [(1, b"hello".to_vec())]);
    let back = b.endpoint.connect(1).unwrap();
    assert!(back.is_established(), "the one that was accepted serves both ways");
    send(&back, b"answer").unwrap();
    until([&mut a], |[a]| a.received.len() == 1);
    assert_eq!(a.received, [(2, b"answer".to_vec())]);
    assert!(Arc::ptr_eq(&channel, &a.endpoint.connect(2).unwrap()));
    assert!(
        matches!(a.events.pop_front(), Some(Event::Established(c)) if Arc::ptr_eq(&c, &channel))
    );
    assert!(matches!(b.events.pop_front(), Some(Event::Established(c)) if Arc::ptr_eq(&c, &back)));
}

#[test]
fn a_process_says_to_each_peer_what_it_does_to_packets() {
    let registry = registry();
    let [mut a, mut b, mut c] = [1, 2, 3].map(|slot| Party::new(&registry, slot));
    let said = |party: &Party| {
        let channels = party.events.iter().filter_map(|event| match event {
            Event::Manner(channel) => Some((channel.slot(), channel.peer_manner())),
            _ => None,
        });
        channels.collect::<Vec<_>>()
    };
    let nothing = Manner::default();
    let loses = Manner { loses: true, ..nothing };
    b.endpoint.say(loses);
    // Whoever connects.
    let channels = [a.endpoint.connect(2).unwrap(), b.endpoint.connect(3).unwrap()];
    until([&mut a, &mut b, &mut c], |[a, _, c]| !said(a).is_empty() && !said(c).is_empty());
    assert_eq!([said(&a), said(&c)], [[(2, loses)]; 2]);
    assert_eq!([0, 1].map(|n: usize| channels[n].peer_manner()), [loses, nothing]);
    assert!(said(&b).is_empty());
    let takes_long = Manner { takes_long: true, ..nothing };
    b.endpoint.say(takes_long);
    until([&mut a, &mut b, &mut c], |[a, _, c]| said(a).len() == 2 && said(c).len() == 2);
    assert_eq!(channels[0].peer_manner(), takes_long);
}

#[test]
fn two_that_connect_at_the_same_time_both_get_through() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let (ab, ba) = (a.endpoint.connect(2).unwrap(), b.endpoint.connect(1).unwrap());
    send(&ab, b"from a").unwrap();
    send(&ba, b"from b").unwrap();
    until([&mut a, &mut b], |[a, b]| a.received.len() == 1 && b.received.len() == 1);
    until([&mut a, &mut b], |_| ab.is_established() && ba.is_established());
    send(&a.endpoint.connect(2).unwrap(), b"again").unwrap();
    until([&mut a, &mut b], |[_, b]| b.received.len() == 2);
    assert!(a.take_closed().is_none() && b.take_closed().is_none());
}

#[test]
fn nobody_oneself_and_slot_zero_are_no_peers() {
    let registry = registry();
    let a = Party::new(&registry, 1);
    assert!(matches!(a.endpoint.connect(9), Err(ConnectError::Nobody)));
    assert!(matches!(a.endpoint.connect(1), Err(ConnectError::NotAnother)));
    assert!(matches!(a.endpoint.connect(0), Err(ConnectError::NotAnother)));
    let slot = Slot::claim_number(&registry, 3).unwrap();
    let config = Config { ring: 64 << 10, max_payload: 64 << 10, ..Config::default() };
    assert_eq!(Endpoint::new(&slot, config).unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
}

#[test]
fn a_full_ring_refuses_and_tells_when_there_is_room() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    for round in 0..20 {
        let mut sent = 0;
        while send(&channel, &vec![round; 50_000]).is_ok() {
            sent += 1;
        }
        assert!(sent >= 8);
        channel.sender().ask_for_room();
        assert_eq!(send(&channel, &[0; 50_000]), Err(SendError::Full));
        a.events.clear();
        a.turn();
        assert!(a.events.is_empty(), "no room yet");
        until([&mut a, &mut b], |[a, _]| !a.events.is_empty());
        assert!(matches!(a.events.pop_front(), Some(Event::Room(c)) if Arc::ptr_eq(&c, &channel)));
        until([&mut b], |[b]| b.received.len() == sent);
        assert!(b.received.drain(..).all(|(_, payload)| payload == vec![round; 50_000]));
        assert!(channel.sender().is_drained());
    }
}

#[test]
fn a_channel_takes_memory_as_it_is_used() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    let resident = || channel.own().resident();
    let begin = resident();
    assert!(begin <= 2 * (64 << 10) && begin < Config::default().ring / 2, "{begin}");
    for n in 1..100 {
        send(&channel, &[1; 40_000]).unwrap();
        until([&mut b], |[b]| b.received.len() == n);
    }
    // Each poll reads the bells, so their page is there too.
    assert_eq!(resident(), 2 * page() + Config::default().ring);
}

#[test]
fn many_peers_are_all_heard_and_the_busy_ones_watched() {
    let registry = registry();
    let mut hub = Party::new(&registry, 200);
    let mut peers: Vec<Party> = (1..=80).map(|n| Party::new(&registry, n)).collect();
    let channels: Vec<_> = peers.iter().map(|p| p.endpoint.connect(200).unwrap()).collect();
    let mut expected = 0;
    let deadline = Instant::now() + TIME_LIMIT;
    for round in 0..50usize {
        for (n, channel) in channels.iter().enumerate() {
            if (n + round).is_multiple_of(n % 9 + 1) {
                send(channel, &[round as u8]).unwrap();
                expected += 1;
            }
        }
        while hub.received.len() < expected {
            assert!(Instant::now() < deadline);
            hub.turn();
        }
    }
    for peer in &mut peers {
        peer.turn();
    }
    assert!(channels.iter().all(|c| c.is_established()));
    for n in 1..=80 {
        let from: Vec<u8> =
            hub.received.iter().filter(|(slot, _)| *slot == n).map(|(_, p)| p[0]).collect();
        assert!(!from.is_empty() && from.is_sorted(), "{n}");
    }
}

#[test]
fn only_a_sleeping_reader_is_woken_and_once() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    until([&mut a, &mut b], |[a, b]| a.turn() + b.turn() == 0);
    let is_woken = |b: &Party| sockopt::poll(b.endpoint.wake_fd(), libc::POLLIN, 0).unwrap();
    for n in 0..10u8 {
        send(&channel, &[n]).unwrap();
        assert!(!is_woken(&b), "awake");
        assert!(!b.poller.arm(), "there is something to do");
        assert!(!b.poller.is_armed());
        assert_eq!(b.turn(), 1);
        assert!(b.poller.arm() && b.poller.is_armed());
        assert!(!is_woken(&b));
        send(&channel, &[n]).unwrap();
        assert!(is_woken(&b));
        b.poller.disarm();
        assert!(!is_woken(&b) && !b.poller.is_armed());
        assert_eq!(b.turn(), 1);
        // Armed twice in a row, with nothing between.
        assert!(b.poller.arm() && b.poller.arm());
        send(&channel, &[n]).unwrap();
        send(&channel, &[n]).unwrap();
        assert!(is_woken(&b));
        b.poller.disarm();
        assert_eq!(b.turn(), 2);
    }
}

#[test]
fn a_peer_that_clears_doorbells_does_not_silence_others() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    send(&channel, b"heard").unwrap();
    b.poller.forget_doorbells();
    until([&mut b], |[b]| b.received.len() == 1);
    assert!(b.poller.arm());
    send(&channel, b"asleep").unwrap();
    b.poller.forget_doorbells();
    assert!(sockopt::poll(b.endpoint.wake_fd(), libc::POLLIN, 0).unwrap());
    b.poller.disarm();
    assert_eq!(b.turn(), 1);
}

#[test]
fn a_hang_up_is_noticed_after_the_last_message() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    for _ in 0..200 {
        send(&channel, b"last words").unwrap();
    }
    drop(a);
    until([&mut b], |[b]| !b.events.iter().all(|e| matches!(e, Event::Established(_))));
    assert_eq!(b.take_closed(), Some((1, Closed::HungUp)));
    assert_eq!(b.received.len(), 200);
    assert_eq!(send(&channel, b"x"), Err(SendError::Closed(Closed::Local)));
    assert!(matches!(b.endpoint.connect(1), Err(ConnectError::Nobody)));
    // The slot's next owner is another peer.
    let mut c = Party::new(&registry, 1);
    let again = c.endpoint.connect(2).unwrap();
    send(&again, b"new").unwrap();
    until([&mut b, &mut c], |[b, _]| b.received.len() == 201);
}

#[test]
fn nonsense_ends_one_channel_and_no_other() {
    for side in 0..2 {
        let registry = registry();
        let (mut a, mut b, mut c) =
            (Party::new(&registry, 1), Party::new(&registry, 2), Party::new(&registry, 3));
        let bad = a.endpoint.connect(2).unwrap();
        let good = c.endpoint.connect(2).unwrap();
        until([&mut a, &mut b, &mut c], |_| bad.is_established() && good.is_established());
        let back = b.endpoint.connect(1).unwrap();
        if side == 0 {
            // In the ring of which B is the reader.
            bad.own().store(words(), 0xdead_beef, Ordering::Release);
        } else {
            // Into the word that B reads as a writer.
            bad.own().store(HEAD, 1 << 20, Ordering::Release);
            let error = loop {
                if let Err(error) = send(&back, &[0; 60_000]) {
                    break error;
                }
            };
            assert_eq!(error, SendError::Closed(Closed::Nonsense));
        }
        until([&mut b], |[b]| b.events.iter().any(|e| matches!(e, Event::Closed(..))));
        assert_eq!(b.take_closed(), Some((1, Closed::Nonsense)));
        assert_eq!(back.closed(), Some(Closed::Nonsense));
        until([&mut a], |[a]| a.take_closed() == Some((2, Closed::HungUp)));
        send(&good, b"still here").unwrap();
        until([&mut b], |[b]| b.received.last() == Some(&(3, b"still here".to_vec())));
        // And the two may try again.
        let again = a.endpoint.connect(2).unwrap();
        send(&again, b"sorry").unwrap();
        until([&mut a, &mut b], |[_, b]| b.received.last() == Some(&(1, b"sorry".to_vec())));
    }
}

#[test]
fn bad_hellos_are_refused_and_leave_nothing_behind() {
    let registry = registry();
    let mut b = Party::new(&registry, 2);
    let side = side_len(64 << 10);
    let good = Greeting {
        status: Status::Ok,
        ring: 64 << 10,
        max_payload: 16 << 10,
        proof: ProofWord::default(),
        index: 0,
        slot: 7,
        published: page(),
    };
    let object = SharedObject::new(2 * side).unwrap();
    let word = SharedObject::new(page()).unwrap();
    let (_reader, wake) = std::io::pipe().unwrap();
    let (socket, _other) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let object = object.as_fd();
    let fds = [object, word.as_fd(), word.as_fd(), wake.as_fd(), word.as_fd()];
    let mut wrong_version = good.emit();
    wrong_version[8] ^= 0x80;
    let cases = [
        (good.emit(), fds.to_vec(), Status::Ok),
        (wrong_version, fds.to_vec(), Status::Version),
        (good.emit(), fds[..4].to_vec(), Status::Nonsense),
        (good.emit(), vec![], Status::Nonsense),
        (
            good.emit(),
            vec![word.as_fd(), word.as_fd(), word.as_fd(), wake.as_fd(), word.as_fd()],
            Status::Nonsense,
        ),
        (
            good.emit(),
            vec![object, object, word.as_fd(), wake.as_fd(), word.as_fd()],
            Status::Nonsense,
        ),
        (
            good.emit(),
            vec![object, word.as_fd(), word.as_fd(), socket.as_fd(), word.as_fd()],
            Status::Nonsense,
        ),
        (Greeting { published: 2 * page(), ..good }.emit(), fds.to_vec(), Status::Nonsense),
        (Greeting { slot: 2, ..good }.emit(), fds.to_vec(), Status::Nonsense),
        (Greeting { status: Status::Full, ..good }.emit(), fds.to_vec(), Status::Nonsense),
        (Greeting { index: 5000, ..good }.emit(), fds.to_vec(), Status::Nonsense),
        (Greeting { ring: 128 << 10, ..good }.emit(), fds.to_vec(), Status::Nonsense),
        ([0; 72], fds.to_vec(), Status::Nonsense),
    ];
    for (n, (bytes, fds, expected)) in cases.into_iter().enumerate() {
        let socket = b.endpoint.dial(2);
        handshake::send(socket.as_fd(), &bytes, &fds).unwrap();
        b.turn();
        b.turn();
        let answer = handshake::receive(socket.as_fd()).unwrap().unwrap();
        assert_eq!(answer.greeting.unwrap().status, expected, "case {n}");
        assert_eq!(answer.fds.len(), if n == 0 { 4 } else { 0 });
        drop((socket, answer));
        b.turn();
        b.turn();
        assert_eq!(b.endpoint.in_use(), (0, 0), "case {n}");
    }
    assert_eq!(b.take_closed(), Some((7, Closed::HungUp)));
    assert!(b.take_closed().is_none());
}

#[test]
fn strangers_that_say_nothing_do_not_keep_others_out() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let strangers: Vec<_> = (0..300).map(|_| b.endpoint.dial(2)).collect();
    for _ in 0..10 {
        b.turn();
    }
    assert_eq!(b.endpoint.in_use(), (64, 0), "the oldest make room");
    let channel = a.endpoint.connect(2).unwrap();
    send(&channel, b"me").unwrap();
    until([&mut a, &mut b], |[_, b]| b.received.len() == 1);
    drop(strangers);
    drop((a, channel));
    until([&mut b], |[b]| b.endpoint.in_use() == (0, 0));
}

#[test]
fn an_established_channel_copies_from_and_to_the_peer() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    assert_eq!(channel.can_copy(), Err(RemoteError::Denied));
    until([&mut a, &mut b], |_| channel.is_established());
    assert_eq!(channel.can_copy(), Ok(()));
    let (mut from, to) = (*b"payload!", [0u8; 8]);
    let local = [Local { iov_base: from.as_mut_ptr().cast(), iov_len: 8 }];
    let remote = [Remote::new(to.as_ptr() as u64, 8)];
    // SAFETY: both are arrays of this test.
    unsafe { channel.write_remote(&local, &remote) }.unwrap();
    let mut back = [0u8; 8];
    let local = [Local { iov_base: back.as_mut_ptr().cast(), iov_len: 8 }];
    // SAFETY: as above.
    unsafe { channel.read_remote(&local, &remote) }.unwrap();
    assert_eq!(&back, b"payload!");
    drop(b);
    until([&mut a], |[a]| a.take_closed() == Some((2, Closed::HungUp)));
    // It is seen with the next tick of the coarse clock.
    until([&mut a], |_| {
        // SAFETY: as above.
        let result = unsafe { channel.read_remote(&local, &remote) };
        result == Err(RemoteError::Gone)
    });
}

#[test]
fn threads_on_one_channel_do_not_mix_messages() {
    const EACH: usize = 2000;
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    std::thread::scope(|scope| {
        for thread in 0..3u8 {
            let channel = &channel;
            scope.spawn(move || {
                for n in 0..EACH {
                    let payload = vec![thread; n * 37 % 3000 + 1];
                    while let Err(error) = send(channel, &payload) {
                        assert_eq!(error, SendError::Full);
                        std::thread::yield_now();
                    }
                }
            });
        }
        until([&mut b], |[b]| b.received.len() == 3 * EACH);
    });
    for thread in 0..3u8 {
        let of_it: Vec<_> = b.received.iter().filter(|(_, p)| p[0] == thread).collect();
        assert_eq!(of_it.len(), EACH);
        for (n, (_, payload)) in of_it.into_iter().enumerate() {
            assert_eq!(*payload, vec![thread; n * 37 % 3000 + 1]);
        }
    }
}

#[test]
fn a_peer_whose_pipe_is_full_makes_nobody_wait() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    until([&mut a, &mut b], |[a, b]| a.turn() + b.turn() == 0);
    assert!(b.poller.arm());
    // B, or another of its peers, may do this with the end that it gives away.
    b.endpoint.fill_pipe();
    let (sender, done) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        let sent = send(&channel, b"wake up");
        sender.send(sent).unwrap();
    });
    assert_eq!(done.recv_timeout(TIME_LIMIT), Ok(Ok(())), "it waits for a reader");
    thread.join().unwrap();
    b.poller.disarm();
    until([&mut b], |[b]| b.received.len() == 1);
    assert!(b.poller.arm() && !sockopt::poll(b.endpoint.wake_fd(), libc::POLLIN, 0).unwrap());
}

#[test]
fn a_side_that_gave_up_gets_no_copy() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    assert!(channel.begin_copy().is_some());
    let copying = channel.begin_copy().unwrap();
    let back = b.endpoint.connect(1).unwrap();
    back.close(Closed::Nonsense);
    b.endpoint.forget(&back);
    // A has not heard of it.
    assert!(channel.closed().is_none() && channel.begin_copy().is_none());
    let (sender, settled) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            b.endpoint.settle();
            sender.send(()).unwrap();
        });
        let waits = settled.recv_timeout(Duration::from_millis(50)).is_err();
        drop(copying);
        assert!(waits, "the copy had begun before");
        settled.recv_timeout(TIME_LIMIT).unwrap();
    });
}

#[test]
fn a_channel_that_closes_during_a_copy_hangs_up_behind_it() {
    let registry = registry();
    let (mut a, mut b) = (Party::new(&registry, 1), Party::new(&registry, 2));
    let channel = a.endpoint.connect(2).unwrap();
    until([&mut a, &mut b], |_| channel.is_established());
    let copies = [(); 2].map(|()| channel.begin_copy().unwrap());
    channel.break_off();
    for copying in copies {
        (0..100).for_each(|_| _ = a.turn() + b.turn());
        assert!(a.take_closed().is_none() && b.take_closed().is_none(), "a copy is in progress");
        drop(copying);
    }
    until([&mut a, &mut b], |[a, _]| a.take_closed() == Some((2, Closed::Nonsense)));
    until([&mut a, &mut b], |[_, b]| b.take_closed() == Some((1, Closed::HungUp)));
}

/// A process that says that it copies, and begins a new channel again and again. Its marks are believed, since a real copy
/// would look the same.
#[test]
fn a_peer_that_claims_copies_and_reconnects_takes_no_more() {
    let name = "shm::tests::a_peer_that_claims_copies_and_reconnects_takes_no_more";
    in_own_process(name, || {
        let registry = registry();
        let (mut victim, mut peer) = (Party::new(&registry, 1), Party::new(&registry, 2));
        let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
        let reconnect = |victim: &mut Party, peer: &mut Party, victim_dials: bool| {
            let channel = if victim_dials {
                let dialled = victim.endpoint.connect(2);
                until([victim, peer], |_| true);
                dialled.ok().map(|_| peer.endpoint.connect(1).unwrap())
            } else {
                peer.endpoint.connect(1).ok()
            };
            let Some(channel) = channel else { return };
            for _ in 0..20 {
                victim.turn();
                peer.turn();
            }
            channel.own().store(MARKS, 1, Ordering::SeqCst);
            channel.close(Closed::Local);
            peer.endpoint.forget(&channel);
            drop(channel);
            for _ in 0..20 {
                victim.turn();
                peer.turn();
            }
            victim.events.clear();
            peer.events.clear();
        };
        reconnect(&mut victim, &mut peer, false);
        let before = open();
        for round in 0..40 {
            reconnect(&mut victim, &mut peer, round % 2 == 0);
        }
        let after = open();
        assert!(after <= before + 4, "{before} descriptors, then {after}");
    });
}

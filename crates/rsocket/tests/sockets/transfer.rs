//! Moving bytes, and coming to the end.

use std::time::{Duration, Instant};

use anyverbs_rsocket::*;

use crate::pair::*;

#[test]
fn much_more_than_the_buffers_in_both_directions_at_once() {
    let (a, b) = pair();
    const LEN: usize = 3_000_000;
    std::thread::scope(|scope| {
        for (from, to, seed) in [(&a, &b, 3u8), (&b, &a, 9)] {
            scope.spawn(move || {
                for part in pattern(LEN, seed).chunks(177_013) {
                    assert_eq!(from.send(part, 0).unwrap(), part.len());
                }
            });
            scope.spawn(move || {
                let expected = pattern(LEN, seed);
                let mut got = Vec::new();
                let mut part = vec![0; 100_000];
                while got.len() < LEN {
                    let n = to.recv(&mut part, 0).unwrap();
                    assert!(n > 0);
                    got.extend_from_slice(&part[..n]);
                }
                assert!(got == expected);
            });
        }
    });
}

#[test]
fn tiny_and_odd_sizes() {
    let (a, b) = pair_with(|socket| {
        socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 2048);
        socket.set(SOL_RDMA, RDMA_RQSIZE, 16);
        socket.set(SOL_RDMA, RDMA_SQSIZE, 16);
    });
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for len in 1..700 {
                a.send(&pattern(len, len as u8), 0).unwrap();
            }
        });
        for len in 1..700 {
            assert_eq!(b.recv_exactly(len), pattern(len, len as u8));
        }
    });
}

#[test]
fn one_thread_with_itself() {
    let (client, server) = pair();
    for round in 0..2000 {
        let data = pattern(round % 300 + 1, round as u8);
        client.send(&data, 0).unwrap();
        assert_eq!(server.recv_exactly(data.len()), data);
        server.send(&data, 0).unwrap();
        assert_eq!(client.recv_exactly(data.len()), data);
    }
}

#[test]
fn lists_of_buffers() {
    let (a, b) = pair();
    let data = pattern(5000, 4);
    let iov = |part: &[u8]| libc::iovec {
        iov_base: part.as_ptr().cast_mut().cast(),
        iov_len: part.len(),
    };
    let list = [iov(&data[..10]), iov(&[]), iov(&data[10..30]), iov(&data[30..])];
    // SAFETY: live slices that are only read.
    let sent = unsafe { a.send_message(&list, 0, None) }.unwrap();
    // SAFETY: as above. Small enough to go inline, from three places.
    let small = unsafe { a.send_message(&[iov(&data[..9]), iov(&data[9..20])], 0, None) }.unwrap();
    assert_eq!((sent, small), (5000, 20));
    let (mut x, mut y) = (vec![0u8; 7], vec![0u8; 5013]);
    let out =
        |part: &mut [u8]| libc::iovec { iov_base: part.as_mut_ptr().cast(), iov_len: part.len() };
    let list = [out(&mut x), out(&mut y)];
    // SAFETY: live, and without another user.
    let got = unsafe { b.recv_message(&list, libc::MSG_WAITALL, true) }.unwrap();
    assert_eq!((got.len, got.from), (5020, Some(b.peer_address().unwrap())));
    assert_eq!([x, y].concat(), [&data[..], &data[..20]].concat());
}

#[test]
fn peeking_takes_nothing() {
    let (a, b) = pair();
    a.send(b"abc", 0).unwrap();
    a.send(b"def", 0).unwrap();
    let mut data = [0; 16];
    while b.recv(&mut data, libc::MSG_PEEK).unwrap() < 6 {}
    assert_eq!(&data[..6], b"abcdef");
    assert_eq!(b.int(SOL_RDMA, RDMA_UNREAD), 6);
    assert_eq!(b.recv(&mut data, 0).unwrap(), 6);
    assert_eq!(errno(b.recv(&mut data, libc::MSG_DONTWAIT)), libc::EAGAIN);
    assert_eq!(errno(b.recv(&mut data, libc::MSG_DONTWAIT | libc::MSG_PEEK)), libc::EAGAIN);
    assert_eq!(b.recv(&mut [], 0).unwrap(), 0);
}

#[test]
fn a_full_stream_would_block_and_goes_on() {
    let (a, b) = pair();
    a.set_nonblocking(true);
    let data = pattern(1 << 20, 5);
    let mut sent = 0;
    let errno = loop {
        match a.send(&data[sent..], 0) {
            Ok(n) => sent += n,
            Err(error) => break error.0,
        }
    };
    assert_eq!(errno, libc::EAGAIN);
    // The receiver grants the second half of its buffer when it first looks.
    assert!(sent == 64 << 10 || sent == 128 << 10, "{sent}");
    assert_eq!(a.events(libc::POLLOUT), 0);
    assert_eq!(b.recv_exactly(sent), data[..sent]);
    assert_eq!(a.wait(libc::POLLOUT, 5000), libc::POLLOUT);
}

#[test]
fn half_closed_and_then_closed() {
    let (a, b) = pair();
    a.send(b"last words", 0).unwrap();
    a.shutdown(false, true).unwrap();
    assert_eq!(errno(a.send(b"x", 0)), libc::EPIPE);
    assert_eq!(b.recv_exactly(10), b"last words");
    assert_eq!(b.recv(&mut [0], 0).unwrap(), 0);
    assert_eq!(b.recv(&mut [0], 0).unwrap(), 0);
    let events = b.events(libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP);
    assert_eq!(events, libc::POLLIN | libc::POLLOUT | libc::POLLRDHUP);
    b.send(b"answer", 0).unwrap();
    assert_eq!(a.recv_exactly(6), b"answer");
    b.shutdown(false, true).unwrap();
    assert_eq!(a.recv(&mut [0], 0).unwrap(), 0);
    assert_ne!(a.events(libc::POLLIN) & libc::POLLHUP, 0);
}

#[test]
fn closing_leaves_what_was_sent_and_ends_the_peer() {
    let (a, b) = pair();
    let data = pattern(60_000, 6);
    a.send(&data, 0).unwrap();
    drop(a);
    assert_eq!(b.recv_exactly(data.len()), data);
    assert_eq!(b.recv(&mut [0], 0).unwrap(), 0);
    assert_eq!(errno(b.send(b"x", 0)), libc::ECONNRESET);
    assert_eq!(errno(b.send(b"x", 0)), libc::EPIPE);
    let all = libc::POLLIN | libc::POLLOUT | libc::POLLHUP;
    assert_eq!(b.events(libc::POLLIN | libc::POLLOUT) & all, all);
}

#[test]
fn closed_as_soon_as_accepted() {
    let (a, b) = pair();
    drop(b);
    assert_eq!(a.recv(&mut [0], 0), Ok(0));
}

#[test]
fn a_close_wakes_who_waits() {
    let (a, b) = pair();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| b.recv(&mut [0], 0));
        std::thread::sleep(Duration::from_millis(30));
        drop(a);
        assert_eq!(reader.join().unwrap(), Ok(0));
    });
}

#[test]
fn an_abrupt_end_is_a_reset() {
    let (a, b) = pair();
    let linger = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
    a.set_option(libc::SOL_SOCKET, libc::SO_LINGER, &linger).unwrap();
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| b.recv(&mut [0], 0));
        std::thread::sleep(Duration::from_millis(30));
        drop(a);
        assert_eq!(reader.join().unwrap(), Err(Errno(libc::ECONNRESET)));
    });
    assert_eq!(b.recv(&mut [0], 0), Ok(0));
    assert_eq!(errno(b.send(b"x", 0)), libc::ECONNRESET);
}

#[test]
fn a_waiting_receive_times_out() {
    let (a, _b) = pair();
    let time = [0i64.to_ne_bytes(), 30_000i64.to_ne_bytes()].concat();
    a.set_option(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &time).unwrap();
    let begin = Instant::now();
    assert_eq!(errno(a.recv(&mut [0], 0)), libc::EAGAIN);
    assert!(begin.elapsed() >= Duration::from_millis(30));
}

#[test]
fn keepalives_do_not_disturb() {
    let (a, b) = pair();
    a.set(libc::IPPROTO_TCP, libc::TCP_KEEPIDLE, 1);
    a.set(libc::SOL_SOCKET, libc::SO_KEEPALIVE, 1);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| a.recv_exactly(1));
        std::thread::sleep(Duration::from_millis(2200));
        b.send(b"k", 0).unwrap();
        assert_eq!(reader.join().unwrap(), b"k");
    });
}

#[test]
fn bad_addresses_are_faults_and_disturb_nothing() {
    let (a, b) = pair();
    let bad = |len| libc::iovec { iov_base: 8 as *mut _, iov_len: len };
    for len in [4, 4000] {
        // SAFETY: nothing is mapped there.
        let result = unsafe { a.send_message(&[bad(len)], 0, None) };
        assert_eq!(errno(result), libc::EFAULT);
    }
    a.send(&pattern(4000, 2), 0).unwrap();
    assert_ne!(b.wait(libc::POLLIN, 5000), 0);
    // SAFETY: as above.
    assert_eq!(errno(unsafe { b.recv_message(&[bad(4)], 0, false) }), libc::EFAULT);
    assert_eq!(b.recv_exactly(4000), pattern(4000, 2));
}

#[test]
fn memory_that_the_peer_maps_is_written() {
    let (a, b) = pair_with(|socket| socket.set(SOL_RDMA, RDMA_IOMAPSIZE, 2));
    let target = Box::leak(vec![0u8; 100_000].into_boxed_slice()).as_mut_ptr();
    let (addr, len) = (target as u64, 100_000);
    // SAFETY: leaked memory, read only after the peer said that it has written.
    let offset = unsafe { b.map(addr, len, true, Some(1000)) }.unwrap();
    assert_eq!(offset, 1000);
    // SAFETY: as above.
    unsafe {
        assert_eq!(b.map(addr, len, true, None).unwrap(), addr);
        assert_eq!(errno(b.map(addr, len, true, None)), libc::ENOMEM);
    }
    b.send(b"mapped", 0).unwrap();
    a.recv_exactly(6);
    let data = pattern(80_000, 7);
    let list = [libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() }];
    // SAFETY: a live slice that is only read.
    unsafe {
        assert_eq!(a.write_mapped(&list, 1000 + 500, 0).unwrap(), data.len());
        // Beyond the end there is nothing.
        assert_eq!(a.write_mapped(&list, 1000 + len, 0).unwrap(), 0);
        assert_eq!(a.write_mapped(&list, 1000 + len - 10, 0).unwrap(), 10);
    }
    a.send(b"written", 0).unwrap();
    assert_eq!(b.recv_exactly(7), b"written");
    // SAFETY: inside the leaked memory.
    let got: Vec<u8> = (0..data.len()).map(|i| unsafe { *target.add(500 + i) }).collect();
    assert!(got == data);
    b.unmap(addr, len).unwrap();
    assert_eq!(errno(b.unmap(addr, 5)), libc::EINVAL);
}

/// A peer that is stopped takes nothing, and may never go on.
#[test]
fn a_close_does_not_wait_for_ever() {
    const TO: &str = "ANYVERBS_TEST_PEER_OF";
    if let Ok(port) = std::env::var(TO) {
        let peer = stream();
        peer.connect(&v4(port.parse().unwrap())).unwrap();
        assert_eq!(peer.recv_exactly(1), b"x");
        std::thread::sleep(Duration::from_secs(3600));
    }
    let listener = stream();
    listener.bind(&v4(0)).unwrap();
    listener.listen(1).unwrap();
    let mut peer = std::process::Command::new(std::env::current_exe().unwrap());
    peer.args(["--exact", "transfer::a_close_does_not_wait_for_ever"]);
    let mut peer = peer.env(TO, listener.local().port().to_string()).spawn().unwrap();
    let socket = listener.accept();
    socket.send(b"x", 0).unwrap();
    anyverbs_testing::stop(&peer);
    socket.send(b"never read", 0).unwrap();
    let begin = Instant::now();
    drop(socket);
    let waited = begin.elapsed();
    peer.kill().unwrap();
    peer.wait().unwrap();
    assert!(waited >= Duration::from_secs(9), "{waited:?}: a peer may be slow");
    assert!(waited < Duration::from_secs(30), "{waited:?}");
}

/// The client of [`long_messages_are_written_straight_to_the_peer`], in a process of its own.
fn send_long_messages(port: u16) {
    let peer = stream();
    peer.connect(&v4(port)).unwrap();
    let data = pattern(3_000_000, 11);
    for part in data[..2_000_000].chunks(70_001) {
        assert_eq!(peer.send(part, 0).unwrap(), part.len());
    }
    // All but the first 8 KiB is not there.
    let pages = 2 * (64 << 10);
    let (prot, flags) = (libc::PROT_READ, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping, of which nothing else knows.
    let hole = unsafe {
        let at = libc::mmap(std::ptr::null_mut(), pages, prot, flags, -1, 0);
        assert_ne!(at, libc::MAP_FAILED);
        assert_eq!(libc::munmap(at.wrapping_byte_add(8192), pages - 8192), 0);
        at
    };
    let list = [libc::iovec { iov_base: hole, iov_len: pages }];
    // SAFETY: the device finds the hole.
    assert_eq!(errno(unsafe { peer.send_message(&list, 0, None) }), libc::EFAULT);
    let iov = |part: &[u8]| libc::iovec {
        iov_base: part.as_ptr().cast_mut().cast(),
        iov_len: part.len(),
    };
    for part in data[2_000_000..].chunks(100_000) {
        let list = [iov(&part[..3000]), iov(&part[3000..60_000]), iov(&part[60_000..])];
        // SAFETY: live slices that are only read.
        assert_eq!(unsafe { peer.send_message(&list, 0, None) }.unwrap(), part.len());
    }
    let device = anyverbs::devices().unwrap().remove(0).name;
    let context = anyverbs::Context::open(&device).unwrap();
    let written = context.counters().unwrap().read(anyverbs::Counter::ShmDirectWrites);
    assert!(written > 20, "{written} pieces went straight to the peer");
    assert_eq!(peer.recv_exactly(3), b"end");
}

#[test]
fn long_messages_are_written_straight_to_the_peer() {
    const TO: &str = "ANYVERBS_TEST_PEER_OF";
    if let Ok(port) = std::env::var(TO) {
        return send_long_messages(port.parse().unwrap());
    }
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    // SAFETY: no memory is involved.
    let is_root = unsafe { libc::geteuid() } == 0;
    if scope.is_ok_and(|scope| scope.trim() != "0") && !is_root {
        return anyverbs_testing::skip("Yama keeps a child from the memory of its parent");
    }
    let listener = stream();
    listener.bind(&v4(0)).unwrap();
    listener.listen(1).unwrap();
    let mut peer = std::process::Command::new(std::env::current_exe().unwrap());
    peer.args(["--exact", "transfer::long_messages_are_written_straight_to_the_peer"]);
    let mut peer = peer.env(TO, listener.local().port().to_string()).spawn().unwrap();
    let socket = listener.accept();
    let expected = pattern(3_000_000, 11);
    let mut at = 0;
    for len in (1..).map(|i| i * 7919 % 200_000 + 1) {
        let len = len.min(expected.len() - at);
        if len == 0 {
            break;
        }
        assert!(socket.recv_exactly(len) == expected[at..at + len], "{len} bytes from {at}");
        at += len;
    }
    socket.send(b"end", 0).unwrap();
    assert!(peer.wait().unwrap().success());
}

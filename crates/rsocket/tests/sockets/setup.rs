//! Connecting, and the calls that are refused.

use std::time::Duration;

use anyverbs::cm::Address;
use anyverbs_rsocket::*;

use crate::pair::*;

#[test]
fn both_ends_know_their_names() {
    let (listener, address) = listener();
    let (client, server) = meet(&listener, stream(), &address);
    assert_eq!(client.peer_address().unwrap(), address);
    assert_eq!(server.peer_address().unwrap(), Address::Ip(client.local()), "at once");
    server.send(b"x", 0).unwrap();
    assert_eq!(server.local_address().unwrap(), Some(address));
    assert_eq!(server.peer_address().unwrap(), Address::Ip(client.local()));
    assert_eq!(client.recv_exactly(1), b"x");
    assert_eq!(errno(client.connect(&address)), libc::EISCONN);
    assert_eq!(errno(listener.peer_address()), libc::ENOTCONN);
}

#[test]
fn nobody_there_refuses() {
    let (gone, address) = listener();
    drop(gone);
    assert_eq!(errno(stream().connect(&address)), libc::ECONNREFUSED);
    // Without blocking.
    let client = stream();
    client.set_nonblocking(true);
    assert_eq!(errno(client.connect(&address)), libc::EINPROGRESS);
    let events = client.wait(libc::POLLOUT, 5000);
    assert_eq!(events, libc::POLLOUT | libc::POLLERR | libc::POLLHUP);
    assert_eq!(client.int(libc::SOL_SOCKET, libc::SO_ERROR), libc::ECONNREFUSED);
    assert_eq!(client.int(libc::SOL_SOCKET, libc::SO_ERROR), 0);
    assert_eq!(errno(client.send(b"x", 0)), libc::ENOTCONN);
}

#[test]
fn connecting_and_accepting_without_blocking() {
    let (listener, address) = listener();
    listener.set_nonblocking(true);
    assert_eq!(errno(accept(&listener, 0)), libc::EAGAIN);
    assert_eq!(listener.events(libc::POLLIN), 0);
    let client = stream();
    client.set_nonblocking(true);
    assert_eq!(errno(client.connect(&address)), libc::EINPROGRESS);
    assert_eq!(errno(client.recv(&mut [0], 0)), libc::EAGAIN);
    assert_eq!(listener.wait(libc::POLLIN, 5000), libc::POLLIN);
    let fd = accept(&listener, libc::SOCK_NONBLOCK).unwrap();
    let server = Owned(get(fd).unwrap());
    assert!(server.is_nonblocking());
    assert_eq!(client.wait(libc::POLLOUT, 5000), libc::POLLOUT);
    assert_eq!(client.int(libc::SOL_SOCKET, libc::SO_ERROR), 0);
    client.connect(&address).map_or_else(|e| assert_eq!(e.0, libc::EISCONN), |()| ());
    client.send(b"hello", 0).unwrap();
    assert_eq!(server.wait(libc::POLLIN, 5000), libc::POLLIN);
    let mut data = [0; 8];
    assert_eq!(server.recv(&mut data, 0).unwrap(), 5);
    assert_eq!(errno(server.recv(&mut data, 0)), libc::EAGAIN);
}

#[test]
fn many_clients_of_one_listener() {
    let (listener, address) = listener();
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..20u8)
            .map(|i| {
                let address = &address;
                scope.spawn(move || {
                    let client = stream();
                    client.connect(address).unwrap();
                    client.send(&[i], 0).unwrap();
                    assert_eq!(client.recv_exactly(1), [i ^ 0xff]);
                })
            })
            .collect();
        for _ in 0..20 {
            let server = listener.accept();
            let [byte] = server.recv_exactly(1)[..] else { panic!() };
            server.send(&[byte ^ 0xff], 0).unwrap();
            assert_eq!(server.recv(&mut [0], 0).unwrap(), 0, "the client closed");
        }
        clients.into_iter().for_each(|c| c.join().unwrap());
    });
}

#[test]
fn ipv6_and_a_wildcard() {
    let listener = Owned::new(libc::AF_INET6, libc::SOCK_STREAM);
    listener.listen(1).unwrap();
    let port = listener.local().port();
    assert_ne!(port, 0);
    let client = Owned::new(libc::AF_INET6, libc::SOCK_STREAM);
    let address = Address::Ip((std::net::Ipv6Addr::LOCALHOST, port).into());
    let (client, server) = meet(&listener, client, &address);
    client.send(b"six", 0).unwrap();
    assert_eq!(server.recv_exactly(3), b"six");
    assert_eq!(errno(client.bind(&v4(0))), libc::EAFNOSUPPORT);
}

#[test]
fn what_is_refused() {
    isolate();
    assert_eq!(errno(socket(libc::AF_UNIX, libc::SOCK_STREAM, 0)), libc::EAFNOSUPPORT);
    assert_eq!(errno(socket(libc::AF_INET, libc::SOCK_RAW, 0)), libc::EPROTONOSUPPORT);
    let udp = libc::IPPROTO_UDP;
    assert_eq!(errno(socket(libc::AF_INET, libc::SOCK_STREAM, udp)), libc::EPROTONOSUPPORT);
    assert_eq!(errno(get(-1)), libc::EBADF);
    assert_eq!(errno(get(1 << 20)), libc::EBADF);
    assert_eq!(errno(close(1 << 20)), libc::EBADF);
    let fresh = stream();
    assert_eq!(errno(fresh.send(b"x", 0)), libc::ENOTCONN);
    assert_eq!(errno(fresh.recv(&mut [0], 0)), libc::ENOTCONN);
    assert_eq!(errno(fresh.shutdown(true, true)), libc::ENOTCONN);
    assert_eq!(errno(accept(&fresh, 0)), libc::EINVAL);
    let (first, address) = listener();
    // Taken at the latest when it is listened on.
    assert_eq!(errno(fresh.bind(&address).and_then(|()| fresh.listen(1))), libc::EADDRINUSE);
    let fresh = stream();
    assert_eq!(errno(first.bind(&v4(0))), libc::EINVAL);
    let elsewhere = Address::Ip("192.0.2.1:9".parse().unwrap());
    assert_eq!(errno(fresh.bind(&elsewhere)), libc::EADDRNOTAVAIL);
    // Closed once, gone for good.
    let fd = fresh.fd();
    drop(fresh);
    assert_eq!(errno(get(fd)), libc::EBADF);
}

#[test]
fn descriptors_are_closed_on_exec_when_asked() {
    isolate();
    for (flag, expected) in [(0, 0), (libc::SOCK_CLOEXEC, libc::FD_CLOEXEC)] {
        let fd = socket(libc::AF_INET, libc::SOCK_STREAM | flag, 0).unwrap();
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::fcntl(fd, libc::F_GETFD) }, expected);
        close(fd).unwrap();
    }
}

#[test]
fn options_before_and_after() {
    let (client, server) = pair_with(|socket| {
        socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, 4000);
        socket.set(SOL_RDMA, RDMA_SQSIZE, 40);
        socket.set(SOL_RDMA, RDMA_INLINE, 200);
    });
    assert_eq!(server.int(libc::SOL_SOCKET, libc::SO_RCVBUF), 8000, "as the listener's");
    assert_eq!(client.int(SOL_RDMA, RDMA_SQSIZE), 40);
    let late = client.set_option(SOL_RDMA, RDMA_SQSIZE, &50i32.to_ne_bytes());
    assert_eq!(errno(late), libc::EINVAL);
    assert_eq!(client.int(libc::SOL_SOCKET, libc::SO_TYPE), libc::SOCK_STREAM);
    assert!(client.int(libc::IPPROTO_TCP, libc::TCP_MAXSEG) >= 256);
    assert_eq!(client.option(SOL_RDMA, RDMA_ROUTE).unwrap().bytes().len(), 72);
    client.send(&pattern(100_000, 1)[..3000], 0).unwrap();
    assert_eq!(server.recv_exactly(3000), pattern(3000, 1));
}

#[test]
fn a_waiting_accept_times_out() {
    let (listener, _) = listener();
    let time = [0i64.to_ne_bytes(), 30_000i64.to_ne_bytes()].concat();
    listener.set_option(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &time).unwrap();
    let begin = std::time::Instant::now();
    assert_eq!(errno(accept(&listener, 0)), libc::EAGAIN);
    assert!(begin.elapsed() >= Duration::from_millis(30));
}

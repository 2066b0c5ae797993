//! Datagrams.

use anyverbs::cm::Address;
use anyverbs_rsocket::*;

use crate::pair::*;

pub(crate) fn dgram(family: i32, bind: &str) -> Owned {
    let socket = Owned::new(family, libc::SOCK_DGRAM);
    socket.bind(&Address::Ip(bind.parse().unwrap())).unwrap();
    socket
}

pub(crate) fn send_to(from: &Socket, data: &[u8], to: &Address) -> Result<usize> {
    let list = [libc::iovec { iov_base: data.as_ptr().cast_mut().cast(), iov_len: data.len() }];
    // SAFETY: a live slice that is only read.
    unsafe { from.send_message(&list, 0, Some(to)) }
}

fn recv_from(socket: &Socket, room: usize, flags: i32) -> Result<(Vec<u8>, Received)> {
    let mut data = vec![0; room];
    let list = [libc::iovec { iov_base: data.as_mut_ptr().cast(), iov_len: room }];
    // SAFETY: live, and without another user.
    let received = unsafe { socket.recv_message(&list, flags, true) }?;
    data.truncate(received.len);
    Ok((data, received))
}

#[test]
fn there_and_back_with_names() {
    for (family, any) in [(libc::AF_INET, "127.0.0.1:0"), (libc::AF_INET6, "[::1]:0")] {
        let (a, b) = (dgram(family, any), dgram(family, any));
        let (to_a, to_b) = (Address::Ip(a.local()), Address::Ip(b.local()));
        for round in 0..200u8 {
            let data = pattern(usize::from(round) * 10, round);
            assert_eq!(send_to(&a, &data, &to_b).unwrap(), data.len());
            let (got, received) = recv_from(&b, 2048, 0).unwrap();
            assert_eq!((got, received.from), (data, Some(to_a)), "round {round}");
            send_to(&b, &[round], &to_a).unwrap();
            assert_eq!(recv_from(&a, 10, 0).unwrap().0, [round]);
        }
    }
}

#[test]
fn many_peers_of_one_socket() {
    let server = dgram(libc::AF_INET, "0.0.0.0:0");
    let to = v4(server.local().port());
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..8u8)
            .map(|i| {
                let to = &to;
                scope.spawn(move || {
                    let client = dgram(libc::AF_INET, "127.0.0.1:0");
                    for round in 0..20 {
                        send_to(&client, &[i, round], to).unwrap();
                        assert_eq!(recv_from(&client, 9, 0).unwrap().0, [i, round, 1]);
                    }
                })
            })
            .collect();
        for _ in 0..8 * 20 {
            let (mut data, received) = recv_from(&server, 9, 0).unwrap();
            data.push(1);
            send_to(&server, &data, &received.from.unwrap()).unwrap();
        }
        clients.into_iter().for_each(|c| c.join().unwrap());
    });
}

#[test]
fn connected_datagrams() {
    let (a, b, c) = (
        dgram(libc::AF_INET, "127.0.0.1:0"),
        dgram(libc::AF_INET, "127.0.0.1:0"),
        dgram(libc::AF_INET, "127.0.0.1:0"),
    );
    assert_eq!(errno(a.send(b"x", 0)), libc::EDESTADDRREQ);
    assert_eq!(errno(a.peer_address()), libc::ENOTCONN);
    let (to_a, to_b) = (Address::Ip(a.local()), Address::Ip(b.local()));
    a.connect(&to_b).unwrap();
    assert_eq!(a.peer_address().unwrap(), to_b);
    for i in 0..5u8 {
        a.send(&[i], 0).unwrap();
        assert_eq!(recv_from(&b, 9, 0).unwrap().0, [i]);
        // From another sender: not for a connected socket.
        send_to(&c, b"stranger", &to_a).unwrap();
        send_to(&b, &[i, i], &to_a).unwrap();
        assert_eq!(recv_from(&a, 9, 0).unwrap().0, [i, i]);
    }
    a.disconnect().unwrap();
    // As with UDP, a port that the program did not choose is another one now.
    send_to(&a, b"now", &Address::Ip(c.local())).unwrap();
    let (data, received) = recv_from(&c, 9, 0).unwrap();
    assert_eq!((&data[..], received.from), (&b"now"[..], Some(Address::Ip(a.local()))));
    send_to(&c, b"back", &received.from.unwrap()).unwrap();
    assert_eq!(recv_from(&a, 9, 0).unwrap().0, b"back");
}

#[test]
fn boundaries_are_kept() {
    let (a, b) = (dgram(libc::AF_INET, "127.0.0.1:0"), dgram(libc::AF_INET, "127.0.0.1:0"));
    let to_b = Address::Ip(b.local());
    for _ in 0..3 {
        send_to(&a, b"0123456789", &to_b).unwrap();
        let (peeked, _) = recv_from(&b, 4, libc::MSG_PEEK).unwrap();
        assert_eq!(peeked, b"0123");
        assert_eq!(b.int(SOL_RDMA, RDMA_UNREAD), 10);
        let (cut, received) = recv_from(&b, 4, 0).unwrap();
        assert_eq!((&cut[..], received.full), (&b"0123"[..], 10));
        send_to(&a, b"", &to_b).unwrap();
        assert_eq!(recv_from(&b, 4, 0).unwrap().0, b"");
    }
    let longest = pattern(2040, 1);
    send_to(&a, &longest, &to_b).unwrap();
    assert_eq!(recv_from(&b, 4096, 0).unwrap().0, longest);
    assert_eq!(errno(send_to(&a, &[0; 2041], &to_b)), libc::EMSGSIZE);
    b.set_nonblocking(true);
    assert_eq!(errno(recv_from(&b, 4, 0)), libc::EAGAIN);
    assert_eq!(b.events(libc::POLLIN | libc::POLLOUT), libc::POLLOUT);
    send_to(&a, b"x", &to_b).unwrap();
    assert_eq!(b.wait(libc::POLLIN, 5000), libc::POLLIN);
}

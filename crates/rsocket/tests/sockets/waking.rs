//! Several threads wait for one socket, and one of them takes what the others wait for.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyverbs::cm::Address;
use anyverbs_rsocket::*;

use crate::datagram::{dgram, send_to};
use crate::pair::*;

/// Longer than anything here takes. A thread that is not woken sleeps for ever.
const LONG: Duration = Duration::from_secs(20);

/// A thread falls asleep meanwhile, as a rule: otherwise a round shows less.
const ASLEEP: Duration = Duration::from_millis(2);

/// Which thread sees an event first is chance.
const ROUNDS: usize = 40;

/// A call in a thread of its own, which a test that fails does not wait for.
struct Call<T>(mpsc::Receiver<T>);

impl<T: Send + 'static> Call<T> {
    fn of(socket: &Owned, call: impl FnOnce(&Socket) -> T + Send + 'static) -> Self {
        let (result, receiver) = mpsc::channel();
        let socket = Arc::clone(&socket.0);
        std::thread::spawn(move || result.send(call(&socket)));
        Self(receiver)
    }

    fn result(&self) -> T {
        self.0.recv_timeout(LONG).expect("the thread sleeps")
    }

    /// The result, with the events of a socket taken meanwhile.
    fn result_beside_a_poll_of(&self, socket: &Owned) -> T {
        let begin = Instant::now();
        loop {
            socket.events(libc::POLLIN | libc::POLLOUT);
            match self.0.try_recv() {
                Ok(result) => return result,
                Err(_) => assert!(begin.elapsed() < LONG, "the thread sleeps"),
            }
        }
    }
}

#[test]
fn a_thread_that_connects_beside_one_that_polls() {
    let (listener, address) = listener();
    for _ in 0..ROUNDS {
        let client = stream();
        let server = Call::of(&listener, |listener| {
            std::thread::sleep(ASLEEP);
            Owned(get(accept(listener, 0).unwrap()).unwrap())
        });
        let connect = Call::of(&client, move |client| client.connect(&address));
        assert_eq!(connect.result_beside_a_poll_of(&client), Ok(()));
        client.send(b"c", 0).unwrap();
        assert_eq!(server.result().recv_exactly(1), b"c");
    }
}

#[test]
fn a_thread_that_accepts_beside_one_that_polls() {
    let (listener, address) = listener();
    for _ in 0..ROUNDS {
        let client = stream();
        let server = Call::of(&listener, |listener| accept(listener, 0));
        let connect = Call::of(&client, move |client| {
            std::thread::sleep(ASLEEP);
            client.connect(&address)
        });
        let server = Owned(get(server.result_beside_a_poll_of(&listener).unwrap()).unwrap());
        assert_eq!(connect.result(), Ok(()));
        client.send(b"c", 0).unwrap();
        assert_eq!(server.recv_exactly(1), b"c");
    }
}

/// An accepted socket opens when its peer's confirmation comes. Both of its threads wait for that.
#[test]
fn both_threads_of_an_accepted_socket() {
    let (listener, address) = listener();
    for _ in 0..ROUNDS {
        let client = stream();
        let connect = Call::of(&client, move |client| client.connect(&address));
        let server = listener.accept();
        let receive = Call::of(&server, |server| server.recv(&mut [0], 0));
        let send = Call::of(&server, |server| server.send(b"s", 0));
        assert_eq!(connect.result(), Ok(()));
        assert_eq!(client.recv_exactly(1), b"s", "the server speaks first");
        client.send(b"c", 0).unwrap();
        assert_eq!((receive.result(), send.result()), (Ok(1), Ok(1)));
    }
}

/// The only news of the end is one event of the connection manager.
#[test]
fn threads_whose_peer_is_killed() {
    for _ in 0..ROUNDS {
        let (a, b) = pair();
        let threads = [(); 3].map(|()| Call::of(&b, |b| b.recv(&mut [0], 0)));
        std::thread::sleep(ASLEEP);
        // So a close says nothing, and the manager disconnects, as for a process that is killed.
        let at_once = [1i32.to_ne_bytes(), 0i32.to_ne_bytes()].concat();
        a.set_option(libc::SOL_SOCKET, libc::SO_LINGER, &at_once).unwrap();
        drop(a);
        let mut results = threads.map(|thread| thread.result().map_err(|errno| errno.0));
        results.sort_unstable();
        assert_eq!(results, [Ok(0), Ok(0), Err(libc::ECONNRESET)], "the reason is told once");
    }
}

/// The peer is told nothing of it, so no completion comes.
#[test]
fn a_thread_that_receives_while_another_shuts_that_down() {
    for _ in 0..ROUNDS {
        let (_a, b) = pair();
        let receive = Call::of(&b, |b| b.recv(&mut [0], 0));
        std::thread::sleep(ASLEEP);
        b.shutdown(true, false).unwrap();
        assert_eq!(receive.result(), Ok(0));
    }
}

/// The first datagram of a peer comes over UDP. So does the address of its queue pair.
#[test]
fn a_thread_that_receives_a_datagram_beside_one_that_polls() {
    let server = dgram(libc::AF_INET, "127.0.0.1:0");
    let to = Address::Ip(server.local());
    for i in 0..250 {
        let receive = Call::of(&server, |server| {
            let mut data = [0];
            server.recv(&mut data, 0).map(|_| data[0])
        });
        let client = dgram(libc::AF_INET, "127.0.0.1:0");
        let send = Call::of(&client, move |client| {
            std::thread::sleep(ASLEEP);
            send_to(client, &[i], &to)
        });
        assert_eq!(receive.result_beside_a_poll_of(&server), Ok(i));
        assert_eq!(send.result(), Ok(1));
    }
}

#[test]
fn a_thread_that_receives_datagrams_while_another_shuts_that_down() {
    let (a, b) = (dgram(libc::AF_INET, "127.0.0.1:0"), dgram(libc::AF_INET, "127.0.0.1:0"));
    a.connect(&Address::Ip(b.local())).unwrap();
    let receive = Call::of(&a, |a| a.recv(&mut [0], 0));
    std::thread::sleep(ASLEEP);
    a.shutdown(true, false).unwrap();
    assert_eq!(receive.result(), Ok(0));
}

/// A socket that is polled before it has a queue.
#[test]
fn a_thread_that_polls_a_socket_which_another_binds() {
    let b = dgram(libc::AF_INET, "127.0.0.1:0");
    let to_b = Address::Ip(b.local());
    for _ in 0..ROUNDS {
        let a = Owned::new(libc::AF_INET, libc::SOCK_DGRAM);
        let polled = Call::of(&a, |a| {
            let mut fds = [libc::pollfd { fd: a.fd(), events: libc::POLLIN, revents: 0 }];
            let begin = Instant::now();
            poll(&mut fds, None).map(|found| (found, begin.elapsed()))
        });
        std::thread::sleep(ASLEEP);
        a.bind(&v4(0)).unwrap();
        let to_a = Address::Ip(a.local());
        send_to(&a, b"1", &to_b).unwrap();
        b.recv_exactly(1);
        // Takes the answer over UDP, which may wake the thread otherwise. The next datagram goes by the queue pair.
        assert_eq!(a.events(libc::POLLIN), 0);
        std::thread::sleep(ASLEEP);
        send_to(&b, b"2", &to_a).unwrap();
        let (found, slept) = polled.result().unwrap();
        assert_eq!(found, 1);
        // A thread that nobody wakes looks after five seconds.
        assert!(slept < Duration::from_secs(3), "woken after {slept:?}");
    }
}

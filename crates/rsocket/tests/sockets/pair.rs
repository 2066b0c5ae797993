//! Sockets for tests.

use std::net::SocketAddr;
use std::sync::{Arc, Once};

use anyverbs::cm::Address;
use anyverbs_rsocket::*;
use anyverbs_testing::UdpPort;

/// A registry and a port of this test process alone, over the loopback.
pub(crate) fn isolate() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let pid = std::process::id();
        for (name, value) in [
            ("ANYVERBS_REGISTRY", format!("anyverbs-test-{pid}")),
            ("ANYVERBS_UDP_PORT", UdpPort::of_this_process().to_string()),
            ("ANYVERBS_INTERFACES", "lo".into()),
            ("ANYVERBS_RSOCKET_CONFIG", "/nonexistent".into()),
        ] {
            if std::env::var_os(name).is_none() {
                // SAFETY: before the first socket; nothing else in these tests writes the environment.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

/// A socket that is closed when dropped.
pub(crate) struct Owned(pub(crate) Arc<Socket>);

impl Owned {
    pub(crate) fn new(family: i32, kind: i32) -> Self {
        isolate();
        Self(get(socket(family, kind, 0).unwrap()).unwrap())
    }

    pub(crate) fn accept(&self) -> Self {
        Self(get(accept(&self.0, 0).unwrap()).unwrap())
    }

    pub(crate) fn set(&self, level: i32, name: i32, value: i32) {
        self.set_option(level, name, &value.to_ne_bytes()).unwrap();
    }

    pub(crate) fn int(&self, level: i32, name: i32) -> i32 {
        i32::from_ne_bytes(self.option(level, name).unwrap().bytes().try_into().unwrap())
    }

    pub(crate) fn local(&self) -> SocketAddr {
        match self.local_address().unwrap() {
            Some(Address::Ip(address)) => address,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn recv_exactly(&self, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        assert_eq!(self.recv(&mut data, libc::MSG_WAITALL).unwrap(), len);
        data
    }

    /// The events that hold, without waiting.
    pub(crate) fn events(&self, events: i16) -> i16 {
        self.wait(events, 0)
    }

    /// The events that hold within a time.
    pub(crate) fn wait(&self, events: i16, millis: u64) -> i16 {
        let mut fds = [libc::pollfd { fd: self.fd(), events, revents: 0 }];
        poll(&mut fds, Some(std::time::Duration::from_millis(millis))).unwrap();
        fds[0].revents
    }
}

impl std::ops::Deref for Owned {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.0
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        let _ = close(self.fd());
    }
}

pub(crate) fn v4(port: u16) -> Address {
    Address::Ip(([127, 0, 0, 1], port).into())
}

pub(crate) fn stream() -> Owned {
    Owned::new(libc::AF_INET, libc::SOCK_STREAM)
}

/// A listener on a port of its own.
pub(crate) fn listener() -> (Owned, Address) {
    let listener = stream();
    listener.bind(&v4(0)).unwrap();
    listener.listen(64).unwrap();
    let address = Address::Ip(listener.local());
    (listener, address)
}

/// A connected pair, made after `prepare` saw the listener and the client.
pub(crate) fn pair_with(prepare: impl Fn(&Owned)) -> (Owned, Owned) {
    let (listener, address) = listener();
    let client = stream();
    prepare(&listener);
    prepare(&client);
    meet(&listener, client, &address)
}

/// Connects a client. A connection is there only when it was accepted: it takes two.
pub(crate) fn meet(listener: &Owned, client: Owned, address: &Address) -> (Owned, Owned) {
    let server = std::thread::scope(|scope| {
        let server = scope.spawn(|| listener.accept());
        client.connect(address).unwrap();
        server.join().unwrap()
    });
    (client, server)
}

pub(crate) fn pair() -> (Owned, Owned) {
    pair_with(|_| ())
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ ((i >> 8) as u8).wrapping_add(seed)).collect()
}

/// The error that a call fails with.
pub(crate) fn errno<T: std::fmt::Debug>(result: Result<T>) -> i32 {
    result.unwrap_err().0
}

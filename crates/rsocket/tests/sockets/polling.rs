//! Waiting for many.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use anyverbs_rsocket::*;

use crate::pair::*;

fn pfd(fd: i32, events: i16) -> libc::pollfd {
    libc::pollfd { fd, events, revents: 0x7777 }
}

const LONG: Option<Duration> = Some(Duration::from_secs(10));

#[test]
fn sockets_and_pipes_together() {
    let (a, b) = pair();
    let (reader, mut writer) = std::io::pipe().unwrap();
    let mut fds =
        [pfd(b.fd(), libc::POLLIN), pfd(reader.as_raw_fd(), libc::POLLIN), pfd(-1, libc::POLLIN)];
    assert_eq!(poll(&mut fds, Some(Duration::from_millis(20))).unwrap(), 0);
    assert_eq!(fds.map(|f| f.revents), [0; 3]);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            writer.write_all(b"p").unwrap();
        });
        assert_eq!(poll(&mut fds, LONG).unwrap(), 1);
        assert_eq!(fds.map(|f| f.revents), [0, libc::POLLIN, 0]);
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            a.send(b"s", 0).unwrap();
        });
        fds[1].events = 0;
        assert_eq!(poll(&mut fds, LONG).unwrap(), 1);
        assert_eq!(fds.map(|f| f.revents), [libc::POLLIN, 0, 0]);
    });
    fds[1].events = libc::POLLIN;
    assert_eq!(poll(&mut fds, None).unwrap(), 2);
    // No socket at all.
    assert_eq!(poll(&mut fds[1..], None).unwrap(), 1);
}

#[test]
fn sleepers_in_poll_and_in_recv_are_both_woken() {
    let (a, b) = pair();
    for _ in 0..50 {
        std::thread::scope(|scope| {
            let poller = scope.spawn(|| b.wait(libc::POLLIN, 10_000));
            let reader = scope.spawn(|| {
                let mut data = [0; 1];
                b.recv(&mut data, libc::MSG_PEEK).unwrap()
            });
            std::thread::sleep(Duration::from_micros(500));
            a.send(b"w", 0).unwrap();
            assert_eq!(poller.join().unwrap(), libc::POLLIN);
            assert_eq!(reader.join().unwrap(), 1);
        });
        b.recv_exactly(1);
    }
}

struct Set(std::sync::Arc<Repoll>);

impl Set {
    fn new() -> Self {
        isolate();
        Self(get_epoll(make_epoll(true).unwrap()).unwrap())
    }

    fn add(&self, fd: i32, events: i32, data: u64) {
        self.0.control(libc::EPOLL_CTL_ADD, fd, events as u32, data).unwrap();
    }

    fn wait(&self, timeout: Option<Duration>) -> Vec<(u64, i32)> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 8];
        let n = self.0.wait(&mut events, timeout).unwrap();
        let mut found: Vec<_> = events[..n].iter().map(|e| (e.u64, e.events as i32)).collect();
        found.sort_unstable();
        found
    }

    fn now(&self) -> Vec<(u64, i32)> {
        self.wait(Some(Duration::ZERO))
    }
}

impl Drop for Set {
    fn drop(&mut self) {
        close(self.0.fd()).unwrap();
    }
}

#[test]
fn an_epoll_set_of_both_kinds() {
    let set = Set::new();
    let (a, b) = pair();
    let (reader, mut writer) = std::io::pipe().unwrap();
    set.add(b.fd(), libc::EPOLLIN, 1);
    set.add(reader.as_raw_fd(), libc::EPOLLIN, 2);
    assert!(set.0.has_sockets());
    assert_eq!(set.now(), []);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            a.send(b"s", 0).unwrap();
        });
        assert_eq!(set.wait(LONG), [(1, libc::EPOLLIN)]);
        assert_eq!(set.now(), [(1, libc::EPOLLIN)], "by level");
        b.recv_exactly(1);
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            writer.write_all(b"p").unwrap();
        });
        assert_eq!(set.wait(LONG), [(2, libc::EPOLLIN)]);
    });
    let add = set.0.control(libc::EPOLL_CTL_ADD, b.fd(), 0, 0);
    assert_eq!(errno(add), libc::EEXIST);
    set.0.control(libc::EPOLL_CTL_MOD, b.fd(), libc::EPOLLOUT as u32, 3).unwrap();
    assert_eq!(set.now(), [(2, libc::EPOLLIN), (3, libc::EPOLLOUT)]);
    set.0.control(libc::EPOLL_CTL_DEL, b.fd(), 0, 0).unwrap();
    assert_eq!(errno(set.0.control(libc::EPOLL_CTL_DEL, b.fd(), 0, 0)), libc::ENOENT);
    assert_eq!(set.now(), [(2, libc::EPOLLIN)]);
}

/// Longer than a thread takes to fall asleep.
const ASLEEP: Duration = Duration::from_millis(50);

/// The events that wake a thread which sleeps on the set while `change` happens.
fn woken_by(set: &Set, change: impl FnOnce()) -> Vec<(u64, i32)> {
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| (set.wait(LONG), Instant::now()));
        std::thread::sleep(ASLEEP);
        let begin = Instant::now();
        change();
        let (events, end) = sleeper.join().unwrap();
        let slept = end.duration_since(begin);
        // A thread that nobody wakes looks after five seconds.
        assert!(slept < Duration::from_secs(3), "woken after {slept:?}");
        events
    })
}

#[test]
fn a_change_of_the_set_wakes_who_sleeps_on_it() {
    let set = Set::new();
    let (a, b) = pair();
    let once = libc::EPOLLIN | libc::EPOLLONESHOT;
    let modify = |events: i32| {
        set.0.control(libc::EPOLL_CTL_MOD, b.fd(), events as u32, 1).unwrap();
    };
    set.add(b.fd(), once, 1);
    a.send(b"1", 0).unwrap();
    assert_eq!(set.wait(LONG), [(1, libc::EPOLLIN)]);
    // The byte is there still.
    assert_eq!(woken_by(&set, || modify(once)), [(1, libc::EPOLLIN)]);
    assert_eq!(woken_by(&set, || modify(libc::EPOLLOUT)), [(1, libc::EPOLLOUT)]);
    b.recv_exactly(1);
    modify(0);
    let later = || {
        modify(once);
        std::thread::sleep(ASLEEP);
        a.send(b"2", 0).unwrap();
    };
    assert_eq!(woken_by(&set, later), [(1, libc::EPOLLIN)]);
    let (c, d) = pair();
    // So no event is left, or owed, that would wake the thread without its doing.
    std::thread::scope(|scope| {
        scope.spawn(|| d.recv_exactly(1));
        std::thread::sleep(ASLEEP);
        c.send(b"0", 0).unwrap();
    });
    let added = || {
        set.add(d.fd(), libc::EPOLLIN, 2);
        std::thread::sleep(ASLEEP);
        c.send(b"3", 0).unwrap();
    };
    assert_eq!(woken_by(&set, added), [(2, libc::EPOLLIN)]);
}

/// The time for which the calling thread had a processor.
fn processor_time() -> Duration {
    // SAFETY: all-zero is a valid timespec, which the call fills.
    unsafe {
        let mut time: libc::timespec = std::mem::zeroed();
        assert_eq!(libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time), 0);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
}

/// Threads that wait for a socket wait for all who sleep on it. They would run in circles until one woke up that cannot hear
/// the socket.
#[test]
fn who_sleeps_on_the_set_does_not_sleep_on_a_socket_that_left_it() {
    let set = Set::new();
    let (a, b) = pair();
    let (reader, mut writer) = std::io::pipe().unwrap();
    set.add(b.fd(), libc::EPOLLIN, 1);
    set.add(reader.as_raw_fd(), libc::EPOLLIN, 2);
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| set.wait(LONG));
        std::thread::sleep(ASLEEP);
        set.0.control(libc::EPOLL_CTL_DEL, b.fd(), 0, 0).unwrap();
        std::thread::sleep(ASLEEP);
        a.send(b"1", 0).unwrap();
        b.recv_exactly(1);
        let timeout = [0i64.to_ne_bytes(), 500_000i64.to_ne_bytes()].concat();
        b.set_option(libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeout).unwrap();
        let receive = scope.spawn(|| (errno(b.recv(&mut [0], 0)), processor_time()));
        let (errno, ran) = receive.join().unwrap();
        writer.write_all(b"p").unwrap();
        assert_eq!(errno, libc::EAGAIN);
        assert!(ran < Duration::from_millis(50), "ran for {ran:?}");
        assert_eq!(sleeper.join().unwrap(), [(2, libc::EPOLLIN)]);
    });
}

#[test]
fn by_edges_and_once() {
    let set = Set::new();
    let (a, b) = pair();
    set.add(b.fd(), libc::EPOLLIN | libc::EPOLLET | libc::EPOLLRDHUP, 1);
    assert_eq!(set.now(), []);
    a.send(b"1", 0).unwrap();
    assert_eq!(set.wait(LONG), [(1, libc::EPOLLIN)]);
    assert_eq!(set.now(), [], "told already");
    a.send(b"2", 0).unwrap();
    assert_eq!(set.wait(LONG), [(1, libc::EPOLLIN)], "more came");
    b.recv_exactly(2);
    assert_eq!(set.now(), []);
    set.add(a.fd(), libc::EPOLLOUT | libc::EPOLLONESHOT, 2);
    assert_eq!(set.now(), [(2, libc::EPOLLOUT)]);
    assert_eq!(set.now(), []);
    set.0.control(libc::EPOLL_CTL_MOD, a.fd(), libc::EPOLLOUT as u32, 2).unwrap();
    assert_eq!(set.now(), [(2, libc::EPOLLOUT)]);
    // A socket that is closed leaves the set, and its peer sees the end.
    drop(a);
    let end = set.wait(LONG);
    assert_eq!(end.len(), 1);
    assert_eq!(end[0].1 & (libc::EPOLLIN | libc::EPOLLRDHUP), libc::EPOLLIN | libc::EPOLLRDHUP);
    assert_eq!(set.now(), []);
}

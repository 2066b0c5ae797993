//! Forked children.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyverbs_rsocket::*;

use crate::pair::*;

/// Longer than a child takes.
const LONG: Duration = Duration::from_secs(20);

/// The status of a child that ends soon. One that hangs is killed.
fn status_of(child: libc::pid_t) -> i32 {
    let begin = Instant::now();
    let mut is_killed = false;
    loop {
        let mut status = -1;
        // SAFETY: waits for our child.
        match unsafe { libc::waitpid(child, &raw mut status, libc::WNOHANG) } {
            0 if begin.elapsed() > LONG && !is_killed => {
                is_killed = true;
                // SAFETY: our child, which was not waited for yet.
                assert_eq!(unsafe { libc::kill(child, libc::SIGKILL) }, 0);
            }
            0 => std::thread::sleep(Duration::from_micros(200)),
            ended => {
                assert_eq!(ended, child);
                return status;
            }
        }
    }
}

#[test]
fn a_child_closes_what_it_inherited_while_threads_of_its_parent_look_up() {
    let (a, b) = pair();
    let done = AtomicBool::new(false);
    let bad = std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    assert!(is_socket(a.fd()));
                }
            });
        }
        let fork = || {
            // SAFETY: the child runs only the code below, and ends without returning to the test harness.
            let child = unsafe { libc::fork() };
            if child == 0 {
                let is_closed = close(a.fd()).is_ok() && !is_socket(a.fd()) && is_socket(b.fd());
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!is_closed)) };
            }
            status_of(child)
        };
        let bad = (0..500).map(|_| fork()).find(|status| *status != 0);
        done.store(true, Ordering::Relaxed);
        bad
    });
    assert_eq!(bad, None, "a child that hung was killed (9)");
    a.send(b"p", 0).unwrap();
    assert_eq!(b.recv_exactly(1), b"p", "the connection stays the parent's");
}

#[test]
fn a_child_closes_a_set_that_a_thread_of_its_parent_waits_for() {
    let fd = make_epoll(true).unwrap();
    // As such a thread holds it.
    let held = get_epoll(fd).unwrap();
    // SAFETY: the child runs only the code below, and ends without returning to the test harness.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: no pointers; ends the child.
        unsafe {
            let is_closed = close(fd).is_ok() && libc::fcntl(fd, libc::F_GETFD) == -1;
            libc::_exit(i32::from(!is_closed));
        }
    }
    assert_eq!(status_of(child), 0);
    assert!(!held.has_sockets(), "the parent has it still");
    close(fd).unwrap();
}

//! Neighbours that live, end, are stopped, or cannot be asked for.

use super::*;

/// Limits the descriptors of this process from now on. Open ones stay.
pub(super) fn allow_descriptors(n: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a live rlimit.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = n.min(limit.rlim_max);
    // SAFETY: a live rlimit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn neighbours_are_not_gone_for_want_of_a_descriptor() {
    let _turn = turn();
    let gsi = gsi();
    let (listener, held) = listen(gsi, 1006);
    let (mut peer, mut seen) = (Peer::spawn(), Seen::default());
    peer.say("connect 127.0.0.1 1006 1 20");
    let end = Instant::now() + TIMEOUT;
    while seen.established < 1 {
        assert!(Instant::now() < end, "{seen:?}");
        serve(gsi, &mut seen);
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(peer.hear(), "@ connected");
    // Once with known neighbours, once without.
    peer.ask("descriptors 3");
    peer.ask("look");
    assert_eq!(peer.ask("seen"), "@ 0 0 0");
    peer.ask("descriptors 1024");
    peer.ask("look");
    peer.ask("descriptors 3");
    peer.ask("look");
    assert_eq!(peer.ask("seen"), "@ 0 0 0");
    peer.ask("descriptors 1024");
    peer.close();
    while seen.ended < 1 {
        assert!(Instant::now() < end, "{seen:?}");
        serve(gsi, &mut seen);
        std::thread::sleep(Duration::from_micros(200));
    }
    gsi.with_cm(|machine, _, now| machine.unlisten(now, listener)).unwrap();
    drop(held);
}

#[test]
fn a_stopped_lingering_process_swallows_no_request_for_long() {
    let _turn = turn();
    let (mut peer, _other) = (Peer::spawn(), Peer::spawn());
    let gsi = gsi();
    peer.ask("listen 1007");
    peer.ask("hold");
    let id = connect(gsi, ip("127.0.0.1"), 1007, 20);
    peer.expect("seen", "@ 1 0 0");
    peer.ask("unlisten");
    let end = Instant::now() + TIMEOUT;
    while gsi.services.lingering().is_empty() {
        assert!(Instant::now() < end, "it does not linger");
    }
    anyverbs_testing::stop(&peer.child);
    // The connection to it holds some (net.core.wmem_default), which it may know: no more.
    let queued = std::fs::read_to_string("/proc/sys/net/core/wmem_default").unwrap();
    let queued = queued.trim().parse::<usize>().unwrap() / 512;
    let ids: Vec<_> = (0..queued + 20).map(|_| connect(gsi, ip("127.0.0.1"), 1008, 20)).collect();
    let mut refused = 0;
    while refused < 20 {
        assert!(Instant::now() < end, "{refused}");
        for event in gsi.state.lock().tap.events.drain(..) {
            refused += usize::from(matches!(event, CmEvent::Rejected { .. }));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: a child of this process that was not waited for.
    assert_eq!(unsafe { libc::kill(peer.child.id() as i32, libc::SIGCONT) }, 0);
    for id in ids.into_iter().chain([id]) {
        gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    }
    gsi.state.lock().tap.events.clear();
}

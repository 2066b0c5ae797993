//! Neighbours that live, end, are stopped, or cannot be asked for.

use super::*;

/// Of this process, from now on. Those that are open stay.
pub(super) fn allow_descriptors(n: u64) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a live rlimit.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit.rlim_cur = n.min(limit.rlim_max);
    // SAFETY: a live rlimit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }, 0);
}

#[test]
fn neighbours_are_not_gone_while_there_is_no_descriptor_to_ask_with() {
    let _turn = turn();
    let engine = engine();
    let (listener, held) = listen(engine, 1006);
    let (mut peer, mut seen) = (Peer::spawn(), Seen::default());
    peer.say("connect 127.0.0.1 1006 1 20");
    let end = Instant::now() + PATIENCE;
    while seen.established < 1 {
        assert!(Instant::now() < end, "{seen:?}");
        serve(engine, &mut seen);
        std::thread::sleep(Duration::from_micros(200));
    }
    assert_eq!(peer.hear(), "@ connected");
    // Once knowing whom to look for, once not.
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
        serve(engine, &mut seen);
        std::thread::sleep(Duration::from_micros(200));
    }
    engine.with_cm(|machine, _, now| machine.unlisten(now, listener)).unwrap();
    drop(held);
}

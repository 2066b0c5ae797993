//! A process that a script stops or kills.

use super::*;

/// The state of a process, as in proc(5).
fn process_state(id: u32) -> char {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap();
    stat.rsplit_once(") ").unwrap().1.chars().next().unwrap()
}

#[test]
fn a_process_stands_still_and_goes_on() {
    with("stopped::a_process_stands_still_and_goes_on", "seed 1", &[], || {
        // It is connected by then, on a busy machine too.
        let script = "process pauses for 2s after 3s";
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", script)]);
        let e = Endpoint::new(QpType::Rc);
        let [src, dst] = [(); 2].map(|()| Buffer::new(&e.pd, OFFERED));
        let (_, remote) = peer.connect(&e, &dst);
        let wait_for = |wanted: bool| {
            let begin = Instant::now();
            while (process_state(peer.id()) == 'T') != wanted {
                assert!(begin.elapsed() < Duration::from_secs(30), "stopped: {}", !wanted);
                std::thread::yield_now();
            }
        };
        wait_for(true);
        let begin = Instant::now();
        wait_for(false);
        assert!(begin.elapsed() > Duration::from_millis(500), "{:?}", begin.elapsed());
        exercise(&e, &src, &dst, remote);
    });
}

#[test]
fn a_process_that_is_killed_while_it_stands_still_leaves_nothing() {
    let name = "stopped::a_process_that_is_killed_while_it_stands_still_leaves_nothing";
    with(name, "seed 1", &[], || {
        let script = "process pauses for 60s after 1s";
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", script)]);
        let begin = Instant::now();
        while process_state(peer.id()) != 'T' {
            assert!(begin.elapsed() < Duration::from_secs(30), "it does not stop");
            std::thread::yield_now();
        }
        peer.signal(libc::SIGKILL);
        // The process that would let it go on had all its descriptors.
        peer.wait_for_silence();
        assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
    });
}

#[test]
fn a_process_dies_while_it_stands_still() {
    use std::os::unix::process::ExitStatusExt;
    with("stopped::a_process_dies_while_it_stands_still", "seed 1", &[], || {
        let script = "process pauses for 60s after 1s; process dies after 3s";
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", script)]);
        let begin = Instant::now();
        assert_eq!(peer.wait().signal(), Some(libc::SIGKILL));
        assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
    });
}

#[test]
fn a_process_is_killed_and_its_peer_learns_of_it() {
    use std::os::unix::process::ExitStatusExt;
    with("stopped::a_process_is_killed_and_its_peer_learns_of_it", "seed 1", &[], || {
        // It is connected by then, on a busy machine too.
        let script = "process dies after 3s";
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_FAULTS", script)]);
        let e = Endpoint::new(QpType::Rc);
        let src = Buffer::new(&e.pd, 64);
        let (_, remote) = peer.connect(&e, &src);
        assert_eq!(peer.wait().signal(), Some(libc::SIGKILL));
        e.send(1, SendOp::Write(remote), &[src.sge(0, 8)]);
        assert_eq!(e.poll(1)[0].status, WcStatus::RetryExcErr);
    });
}

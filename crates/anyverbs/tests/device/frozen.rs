//! Processes that are stopped for longer than their ACK timeouts, as by a suspended machine or a frozen container. They
//! are stopped in the midst of traffic, and go on without an error.

use std::io::BufRead;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyverbs::*;

use crate::endpoint::*;
use crate::same_host::{Peer, turn};

/// Requests that a process has under way, and their length.
const AT_ONCE: usize = 8;
const LEN: usize = 8 << 10;

/// ACK timeouts and retries. The longer stops outlast two timeouts of 0.54 s. With 67 ms and no retry, a connection ends also where
/// nobody is stopped, but others keep the peer from the processor for that long. A stop of 5 s outlasts all seven.
const PATIENCE: [(u8, u8); 3] = [(17, 0), (17, 7), (14, 7)];

/// The last words of the role of a peer that talks here.
pub(crate) fn patience(role: &str) -> Option<(u8, u8)> {
    let (_, words) = role.split_once("frozen ")?;
    let (timeout, retries) = words.split_once(' ').unwrap();
    Some((timeout.parse().unwrap(), retries.parse().unwrap()))
}

/// In the peer: WRITEs without a pause, until it is told to end, unless it only listens. Says how that went.
pub(crate) fn talk(role: &str, e: &Endpoint, buffer: &Buffer, remote: RemoteAddr) {
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::io::stdin().lock().read_line(&mut String::new()).unwrap();
            ends.store(true, Ordering::Relaxed);
        });
        let (mut posted, mut done, mut last) = (0, 0, WcStatus::Success);
        loop {
            let goes_on = !ends.load(Ordering::Relaxed) && last == WcStatus::Success;
            while goes_on && !role.contains("silent") && posted < done + AT_ONCE {
                e.send(0, SendOp::Write(remote), &[buffer.sge(0, LEN)]);
                posted += 1;
            }
            let mut wcs = [Wc::default(); AT_ONCE];
            let n = e.cq.poll(&mut wcs).unwrap();
            done += n;
            if let Some(failed) = wcs[..n].iter().find(|wc| wc.status != WcStatus::Success) {
                last = failed.status;
            }
            if done == posted && !goes_on {
                break;
            }
        }
        println!("@ {last:?} after {done}");
    });
}

/// Connects two processes, and stops both for each of these times; or the first alone, which then talks alone.
fn stop_while_they_talk(variables: &[(&str, &str)], both: bool, stops: &[u64]) {
    let _turn = turn();
    for (timeout, retries) in PATIENCE {
        let first = format!("rc frozen {timeout} {retries}");
        let second =
            if both { first.clone() } else { format!("rc silent frozen {timeout} {retries}") };
        let mut peers = [first, second].map(|role| Peer::spawn(&role, variables));
        let [a, b] = &mut peers;
        let of_a = a.hear();
        let of_b = b.hear();
        b.say(&of_a);
        assert_eq!(b.hear(), "@ connected");
        a.say(&of_b);
        assert_eq!(a.hear(), "@ connected");
        for &ms in stops {
            std::thread::sleep(Duration::from_millis(200));
            if both {
                b.stop();
            }
            a.stop();
            std::thread::sleep(Duration::from_millis(ms));
            b.go_on();
            a.go_on();
        }
        std::thread::sleep(Duration::from_millis(500));
        for peer in &mut peers {
            peer.say("end");
            let said = peer.hear();
            println!("timeout {timeout}, {retries} retries: {said}");
            assert!(said.starts_with("@ Success after"), "{timeout}, {retries} retries: {said}");
        }
    }
}

const BY_RING: &[(&str, &str)] = &[("ANYVERBS_DIRECT", "0")];
const BY_UDP: &[(&str, &str)] = &[("ANYVERBS_SHM", "0")];
const STOPS: &[u64] = &[1500, 300, 3000];
/// The ordinary link of one host, where the kernel copies.
const DIRECT: &[(&str, &str)] = &[];

#[test]
fn processes_stopped_together_go_on_by_shared_memory() {
    stop_while_they_talk(BY_RING, true, STOPS);
}

#[test]
fn processes_stopped_together_go_on_by_direct_copies() {
    stop_while_they_talk(DIRECT, true, &[5000, 100, 300]);
}

#[test]
fn processes_stopped_together_go_on_by_udp() {
    stop_while_they_talk(BY_UDP, true, STOPS);
}

#[test]
fn a_stopped_process_reads_the_answers_that_wait_for_it() {
    stop_while_they_talk(BY_RING, false, &[1500, 300]);
    stop_while_they_talk(BY_UDP, false, &[1500, 300]);
}

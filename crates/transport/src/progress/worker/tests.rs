use std::fs;
use std::net::UdpSocket;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyverbs_objects::base::NEVER;
use anyverbs_objects::config::Config;
use anyverbs_objects::cq::CqCell;
use anyverbs_objects::limits::DEFAULT;
use anyverbs_proto::time::Time;
use anyverbs_testing::{in_own_process, isolate_device};
use rand::SeedableRng;
use rand::rngs::StdRng;

use super::SHORT_LEASE;
use crate::DataPath;
use crate::progress::{Above, Driver, Frames, Mad, Management};

/// No QP1 and no raw packets.
struct Nothing;

impl Management for Nothing {
    fn next(&self) -> u64 {
        NEVER
    }

    fn run(&'static self, _now: Time) {}

    fn receive(&'static self, _now: Time, _mads: &[Mad<'_>]) {}

    fn keeps_disconnects(&self) -> bool {
        false
    }

    fn look_at_disconnects(&'static self, _now: Time, _empty: Time) {}

    fn forwarded(&self, _now: Time) {}

    fn addresses_changed(&'static self) {}
}

impl Frames for Nothing {
    fn receive(&self) -> usize {
        0
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn fail_users(&self, _overrun: &dyn Fn(&Arc<CqCell>) -> bool) {}
}

/// The driver of this process, which has a worker.
fn driver() -> &'static Driver {
    isolate_device();
    let (config, mut rng) = (Config::load().unwrap(), StdRng::from_os_rng());
    let DataPath { driver, starter, .. } = DataPath::open(config, DEFAULT, None, &mut rng).unwrap();
    assert!(driver.above.set(Above { management: &Nothing, frames: &Nothing }).is_ok());
    starter.send(driver).unwrap();
    driver
}

/// The worker's directory in `/proc`, once it has given itself its name.
fn worker() -> PathBuf {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(10) {
        let tasks = fs::read_dir("/proc/self/task").unwrap().map(|task| task.unwrap().path());
        let worker = |task: &PathBuf| {
            fs::read_to_string(task.join("comm")).is_ok_and(|comm| comm.trim() == "anyverbs")
        };
        let tasks: Vec<_> = tasks.filter(worker).collect();
        assert!(tasks.len() < 2, "one worker: {tasks:?}");
        if let Some(task) = tasks.into_iter().next() {
            return task;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("no worker");
}

/// The processor's time that a thread has had.
fn time_of(task: &Path) -> Duration {
    let stat = fs::read_to_string(task.join("stat")).unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    let ticks: u64 =
        fields.split(' ').skip(11).take(2).map(|ticks| ticks.parse::<u64>().unwrap()).sum();
    // A tick of a hundredth of a second, whatever the kernel's are.
    Duration::from_millis(10 * ticks)
}

/// Alone: other tests of a process use its one worker, too.
#[test]
fn it_does_not_spin_while_another_thread_receives() {
    let name = "progress::worker::tests::it_does_not_spin_while_another_thread_receives";
    in_own_process(name, || {
        let driver = driver();
        let reading = driver.rx.lock();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut packet = [0; 64];
        packet[5] = driver.core.slot;
        socket.send_to(&packet, ("127.0.0.1", driver.core.config.udp_port)).unwrap();
        let worker = worker();
        let begin = time_of(&worker);
        std::thread::sleep(Duration::from_millis(400));
        let used = time_of(&worker) - begin;
        drop(reading);
        assert!(used < Duration::from_millis(100), "{used:?}");
    });
}

/// Each of its rounds at the sockets interrupts the program, which shares the processor with it, in the middle of a poll.
#[test]
fn it_leaves_one_sided_requests_to_polls_that_go_on() {
    let name = "progress::worker::tests::it_leaves_one_sided_requests_to_polls_that_go_on";
    in_own_process(name, || {
        let driver = driver();
        // Worker and sockets are ready.
        worker();
        std::thread::sleep(Duration::from_millis(20));
        // At the sockets, the worker finds this and says so.
        let reading = driver.rx.lock();
        // On a busy machine the polls of one go may hardly ever go on.
        let found: Vec<_> = std::iter::repeat_with(|| {
            let (mut looks, mut rounds, mut seen) = (0, 0, 0);
            let mut polled_at = Instant::now();
            driver.kick_worker();
            while looks < 500 {
                driver.worker.note_one_sided();
                driver.lease.fetch_add(1, Ordering::SeqCst);
                // Where this thread does not get the processor, polls do not go on, and the worker is right to take over.
                let goes_on = polled_at.elapsed() < SHORT_LEASE;
                polled_at = Instant::now();
                let last = std::mem::replace(&mut seen, driver.worker.seen.load(Ordering::SeqCst));
                looks += u32::from(goes_on && seen != last);
                if driver.worker.take_left_to_reader() {
                    rounds += u32::from(goes_on);
                    driver.kick_worker();
                }
            }
            (rounds, looks)
        })
        .take(10)
        .collect();
        drop(reading);
        assert!(found.iter().any(|(rounds, looks)| *rounds < looks / 2), "{found:?}");
    });
}

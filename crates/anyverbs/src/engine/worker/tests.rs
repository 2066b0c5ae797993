use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::Engine;
use crate::engine::gsi::tests::isolate;
use anyverbs_testing::in_own_process;

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
    // Of a hundredth of a second, whatever the kernel's are.
    Duration::from_millis(10 * ticks)
}

/// Alone: other tests of a process use its one worker, too.
#[test]
fn it_does_not_spin_while_another_thread_is_at_the_sockets() {
    let name = "engine::worker::tests::it_does_not_spin_while_another_thread_is_at_the_sockets";
    in_own_process(name, || {
        isolate();
        let engine = Engine::current().unwrap();
        let reading = engine.rx.lock();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        let mut packet = [0; 64];
        packet[5] = engine.slot;
        socket.send_to(&packet, ("127.0.0.1", engine.config.udp_port)).unwrap();
        let worker = worker();
        let begin = time_of(&worker);
        std::thread::sleep(Duration::from_millis(400));
        let used = time_of(&worker) - begin;
        drop(reading);
        assert!(used < Duration::from_millis(100), "{used:?}");
    });
}

use std::fs;
use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyverbs_faults::Script;
use anyverbs_objects::base::NEVER;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::time::Time;
use anyverbs_testing::in_own_process;

use super::{BUSY_POLL, Found, ONE_SIDED, WAKE_UP, Worker};
use crate::progress::Driver;
use crate::progress::owed::Debts;
use crate::progress::receive::Reader;
use crate::progress::testing::{
    Connected, NOTHING, at, count, open, pair, set, stopped, stopped_with,
};
use crate::qp::owed::ACK_DELAY;

/// The driver of this process, which has a worker.
fn driver() -> &'static Driver {
    let (driver, starter) = open(|_| {});
    starter.send(driver).unwrap();
    driver
}

/// The worker's directory in `/proc`, once it has given itself its name.
fn worker() -> PathBuf {
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(60) {
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

#[test]
fn it_does_not_spin_while_another_thread_tells_of_a_fault() {
    let name = "progress::worker::tests::it_does_not_spin_while_another_thread_tells_of_a_fault";
    in_own_process(name, || {
        let script = Script::parse("down after 3s").unwrap();
        let driver = stopped_with(|config| config.faults = Some(script));
        let mut worker = Worker::new(driver);
        set(driver, at(2_000_000));
        let telling = driver.script.lock();
        assert_eq!(worker.lie_down(), Some(BUSY_POLL));
        worker.get_up();
        drop(telling);
        assert_eq!(worker.lie_down(), Some(Duration::ZERO));
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
                driver.poll_looks.note();
                // Where this thread does not get the processor, polls do not go on, and the worker is right to take over.
                let goes_on = polled_at.elapsed() < WAKE_UP;
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

fn by_clock(name: &str, test: impl FnOnce(&'static Driver, Worker)) {
    in_own_process(&format!("progress::worker::tests::{name}"), || {
        let driver = stopped();
        test(driver, Worker::new(driver));
    });
}

/// Sockets are ready.
const INPUT: Found =
    Found { kicked: false, addresses: false, input: 1, shm: false, shm_control: false };

/// A request is in the socket.
fn request(driver: &'static Driver) -> [Connected; 2] {
    let [a, b] = pair(driver);
    b.recv();
    a.send();
    [a, b]
}

fn poll(driver: &'static Driver) {
    driver.poll_looks.note();
}

#[test]
fn it_sleeps_without_a_timer_where_nothing_is_due() {
    by_clock("it_sleeps_without_a_timer_where_nothing_is_due", |driver, mut worker| {
        worker.act(Found::default());
        assert_eq!(worker.lie_down(), None);
        assert!(driver.links.waker.is_asleep());
        worker.get_up();
        NOTHING.next.store(at(5000).as_nanos(), Ordering::SeqCst);
        assert_eq!(worker.lie_down(), Some(Duration::from_micros(5000)));
        worker.get_up();
        set(driver, at(5000));
        worker.act(Found::default());
        assert_eq!((worker.lie_down(), driver.next_deadline()), (None, NEVER));
    });
}

#[test]
fn it_receives_and_arms_the_sockets_where_no_one_polls() {
    by_clock("it_receives_and_arms_the_sockets_where_no_one_polls", |driver, mut worker| {
        let [_a, _b] = request(driver);
        let [received, acks] = [Counter::RcvdPkts, Counter::AcksSent].map(|c| count(driver, c));
        worker.act(INPUT);
        assert_eq!(count(driver, Counter::RcvdPkts), received + 1);
        assert_eq!(count(driver, Counter::AcksSent), acks + 1);
        assert_eq!(driver.worker.disarmed.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn an_ack_that_a_reply_may_carry_waits_for_it() {
    by_clock("an_ack_that_a_reply_may_carry_waits_for_it", |driver, mut worker| {
        let [a, b] = pair(driver);
        // The programs answer each other's WRITEs.
        b.write();
        // The WRITE, nothing, and the ACK.
        for _ in 0..3 {
            driver.receive(Reader::Wait);
        }
        a.write();
        let acks = count(driver, Counter::AcksSent);
        worker.act(INPUT);
        assert_eq!(count(driver, Counter::AcksSent), acks);
        assert_eq!(worker.lie_down(), Some(ACK_DELAY));
        worker.get_up();
        set(driver, at(0) + ACK_DELAY);
        worker.act(Found::default());
        assert_eq!(count(driver, Counter::AcksSent), acks + 1);
    });
}

#[test]
fn it_leaves_the_sockets_to_polls_until_they_stop() {
    by_clock("it_leaves_the_sockets_to_polls_until_they_stop", |driver, mut worker| {
        let [_a, _b] = request(driver);
        let received = count(driver, Counter::RcvdPkts);
        poll(driver);
        worker.act(INPUT);
        assert_eq!(count(driver, Counter::RcvdPkts), received);
        assert_eq!(driver.worker.disarmed.load(Ordering::SeqCst), 1, "nothing wakes it again");
        // The ACK timeout of the request is later.
        assert_eq!(worker.lie_down(), Some(BUSY_POLL));
        assert!(!driver.links.waker.is_asleep());
        worker.get_up();
        set(driver, at(0) + BUSY_POLL);
        poll(driver);
        worker.act(Found::default());
        assert_eq!(count(driver, Counter::RcvdPkts), received, "polls go on");
        worker.act(Found::default());
        assert_eq!(count(driver, Counter::RcvdPkts), received + 1, "polls have stopped");
        assert_eq!(driver.worker.disarmed.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn a_program_that_ends_polling_has_the_sockets_armed() {
    by_clock("a_program_that_ends_polling_has_the_sockets_armed", |driver, mut worker| {
        let [_a, _b] = request(driver);
        poll(driver);
        worker.act(INPUT);
        driver.end_polling();
        assert_eq!(driver.worker.disarmed.load(Ordering::SeqCst), 0);
        let received = count(driver, Counter::RcvdPkts);
        worker.act(INPUT);
        assert_eq!(count(driver, Counter::RcvdPkts), received + 1, "its polls count no more");
    });
}

#[test]
fn one_sided_requests_make_it_look_sooner() {
    by_clock("one_sided_requests_make_it_look_sooner", |driver, mut worker| {
        let away_after = |worker: &mut Worker, now: Time| {
            set(driver, now);
            poll(driver);
            worker.act(Found::default());
            let timeout = worker.lie_down();
            worker.get_up();
            worker.act(Found::default());
            timeout
        };
        assert_eq!(away_after(&mut worker, at(1)), Some(BUSY_POLL));
        driver.worker.note_one_sided();
        let short = Some(WAKE_UP);
        assert_eq!(away_after(&mut worker, at(2)), short);
        assert_eq!(away_after(&mut worker, at(1) + ONE_SIDED), short);
        assert_eq!(away_after(&mut worker, at(2) + ONE_SIDED), Some(BUSY_POLL));
    });
}

#[test]
fn it_hands_the_sockets_to_the_thread_that_reads_them() {
    by_clock("it_hands_the_sockets_to_the_thread_that_reads_them", |driver, mut worker| {
        let [_a, _b] = request(driver);
        let reading = driver.rx.lock();
        // Another thread, since this one has locked.
        let worker = std::thread::scope(|scope| {
            scope
                .spawn(move || {
                    worker.act(INPUT);
                    worker
                })
                .join()
                .unwrap()
        });
        drop(reading);
        assert_eq!(worker.away, Some(BUSY_POLL), "it does not come back at once");
        let received = count(driver, Counter::RcvdPkts);
        // The reader has found nothing, and looks once more for the note.
        assert_eq!(driver.receive(Reader::Poll { is_due: false }), 1);
        assert_eq!(count(driver, Counter::RcvdPkts), received + 1);
        assert!(!driver.worker.is_left_to_reader());
    });
}

#[test]
fn it_waits_for_more_of_a_stream_before_it_sleeps() {
    by_clock("it_waits_for_more_of_a_stream_before_it_sleeps", |driver, mut worker| {
        let [a, b] = pair(driver);
        let send = || {
            b.recv();
            a.send();
        };
        // The message that comes late is the first of its queue pair, so it leaves at once. A message that gathers is a
        // debt. The worker goes to sleep where the process has debts, since its sleep is then short.
        let [late_sender, late_receiver] = pair(driver);
        late_receiver.recv();
        (0..240).for_each(|_| send());
        // The first left at once, the others gather until then.
        assert_eq!(driver.receive(Reader::Worker), 1);
        driver.flush(Debts::Unawaited);
        let received = || count(driver, Counter::RcvdPkts);
        let wait_for = |packets| {
            let start = Instant::now();
            while received() < packets {
                assert!(start.elapsed() < Duration::from_secs(60), "{} received", received());
                std::thread::yield_now();
            }
        };
        let begin = received();
        std::thread::scope(|scope| {
            // The last piece came just now, so this one is of a stream.
            let worker = scope.spawn(move || worker.act(INPUT));
            wait_for(begin + 239);
            // By the clock no time has passed. Nothing would wake the worker, since the sockets are disarmed.
            assert_eq!(driver.worker.disarmed.load(Ordering::SeqCst), 1);
            let begin = received();
            late_sender.send();
            wait_for(begin + 1);
            while !worker.is_finished() {
                set(driver, driver.core.now() + WAKE_UP);
                std::thread::yield_now();
            }
        });
        assert_eq!(driver.worker.disarmed.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn it_leaves_the_ack_of_a_long_answer_to_the_reply() {
    by_clock("it_leaves_the_ack_of_a_long_answer_to_the_reply", |driver, mut worker| {
        let [a, b] = pair(driver);
        b.recv();
        a.send();
        while driver.receive(Reader::Worker) > 0 {}
        driver.flush(Debts::All);
        while driver.receive(Reader::Worker) > 0 {}
        let acks = count(driver, Counter::AcksSent);
        // The first packet is longer than the others, and comes by itself.
        let received = count(driver, Counter::RcvdPkts);
        b.write_bytes(&a, 8 << 10);
        let mut worker = std::thread::scope(|scope| {
            let acting = scope.spawn(move || {
                (0..2).for_each(|_| worker.act(INPUT));
                worker
            });
            // Should it wait for more.
            while !acting.is_finished() {
                set(driver, driver.core.now() + Duration::from_nanos(100));
                std::thread::yield_now();
            }
            acting.join().unwrap()
        });
        assert_eq!(count(driver, Counter::RcvdPkts), received + 8);
        assert_eq!(count(driver, Counter::AcksSent), acks, "an ACK ends the peer's poll");
        set(driver, driver.core.now() + ACK_DELAY);
        worker.act(Found::default());
        assert_eq!(count(driver, Counter::AcksSent), acks + 1, "there is no reply");
    });
}

/// The same-host link has woken the worker.
const SHM: Found =
    Found { kicked: false, addresses: false, input: 0, shm: true, shm_control: false };

#[test]
fn a_thread_asleep_at_the_sockets_polls_no_rings() {
    let name = "a_thread_asleep_at_the_sockets_polls_no_rings";
    in_own_process(&format!("progress::worker::tests::{name}"), || {
        let (driver, _starter) = open(|config| config.inproc = false);
        set(driver, at(0));
        let mut worker = Worker::new(driver);
        // Its polls before it slept keep the worker away from nothing.
        poll(driver);
        driver.worker.note_waiter();
        worker.act(SHM);
        assert_eq!(worker.away, None);
        poll(driver);
        worker.act(SHM);
        assert_eq!(worker.away, Some(BUSY_POLL));
    });
}

/// Whether the worker's descriptor was written to.
fn is_woken(driver: &Driver) -> bool {
    driver.worker.wait(Some(Duration::ZERO)).kicked
}

#[test]
fn only_an_earlier_deadline_wakes_it() {
    by_clock("only_an_earlier_deadline_wakes_it", |driver, mut worker| {
        let waker = &driver.links.waker;
        NOTHING.next.store(at(5000).as_nanos(), Ordering::SeqCst);
        worker.act(Found::default());
        assert_eq!(worker.lie_down(), Some(Duration::from_micros(5000)));
        waker.wake_before(at(5000).as_nanos());
        assert!(!is_woken(driver));
        waker.wake_before(at(4999).as_nanos());
        assert!(is_woken(driver));
        worker.get_up();
        worker.act(Found { kicked: true, ..Found::default() });
        assert!(!is_woken(driver), "one wake-up for each deadline");
    });
}

#[test]
fn work_that_polls_do_not_do_wakes_it_meanwhile() {
    let name = "work_that_polls_do_not_do_wakes_it_meanwhile";
    by_clock(name, |driver, mut worker| {
        poll(driver);
        worker.act(Found::default());
        assert_eq!(worker.lie_down(), Some(BUSY_POLL));
        let waker = &driver.links.waker;
        waker.wake_before(at(1).as_nanos());
        assert!(!is_woken(driver), "polls run the timers");
        waker.look_before((at(0) + BUSY_POLL).as_nanos());
        assert!(!is_woken(driver), "it looks by then");
        waker.look_before(at(1).as_nanos());
        assert!(is_woken(driver));
        worker.get_up();
    });
}

#[test]
fn a_timer_is_no_shorter_than_a_wake_up() {
    by_clock("a_timer_is_no_shorter_than_a_wake_up", |driver, mut worker| {
        let mut lie_down = |timer: u64| {
            NOTHING.next.store(at(timer).as_nanos(), Ordering::SeqCst);
            poll(driver);
            worker.act(Found::default());
            let timeout = worker.lie_down();
            worker.get_up();
            timeout
        };
        assert_eq!(lie_down(300), Some(Duration::from_micros(300)));
        assert_eq!(lie_down(1), Some(WAKE_UP));
        assert_eq!(lie_down(900), Some(BUSY_POLL));
    });
}

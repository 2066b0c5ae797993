//! Tests of progress, by a clock that they set. Each has a process of its own, since a process has one device.

use std::io::pipe;
use std::os::fd::AsFd as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_faults::Script;
use anyverbs_links::shm::{Digest, LaneCall};
use anyverbs_links::why::tell_given_up;
use anyverbs_net::host::{Registry, Slot};
use anyverbs_net::shm::{Closed, Config as ShmConfig, Endpoint};
use anyverbs_objects::base::{AdaptiveSpin, LATE, NEVER, Progress as _, Timed};
use anyverbs_objects::cq::CqInitAttr;
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::{CompletionEnv as _, Side};
use anyverbs_proto::qp::attr::{QpAttr, QpAttrMask, QpState};
use anyverbs_proto::qp::lane::LaneEnv as _;
use anyverbs_proto::reason::Told;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Psn, Qpn};
use anyverbs_proto::wc::{Wc, WcOpcode};
use anyverbs_proto::wire::reason::ReasonPacket;
use anyverbs_testing::in_own_process;

use super::Driver;
use super::owed::Debts;
use super::receive::Reader;
use super::testing::{
    Connected, NOTHING, alone, alone_with, at, count, open, pair, set, stopped, stopped_with,
};
use crate::qp::State;
use crate::qp::arrivals::Arrivals;
use crate::qp::env::Call;
use crate::qp::owed::ACK_DELAY;
use crate::qp::transport::tests::Log;

/// Runs the test of this name here.
fn alone_in_process(name: &str, test: impl FnOnce()) {
    in_own_process(&format!("progress::tests::{name}"), test);
}

struct Ticks(AtomicU32);

impl Timed for Ticks {
    fn on_time(self: Arc<Self>, _now: Time) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

#[test]
fn timers_run_when_they_are_due() {
    alone_in_process("timers_run_when_they_are_due", || {
        let driver = stopped();
        assert_eq!(driver.next_deadline(), NEVER);
        let ticks = Arc::new(Ticks(AtomicU32::new(0)));
        let timed: Arc<dyn Timed> = ticks.clone();
        driver.call_at(at(50), Arc::downgrade(&timed));
        NOTHING.next.store(at(80).as_nanos(), Ordering::SeqCst);
        for (now, ran, next) in [
            (at(49), 0, at(50).as_nanos()),
            (at(50), 1, at(80).as_nanos()),
            (at(79), 1, at(80).as_nanos()),
            (at(80), 1, NEVER),
        ] {
            set(driver, now);
            driver.run_timers();
            assert_eq!((ticks.0.load(Ordering::SeqCst), driver.next_deadline()), (ran, next));
        }
    });
}

/// Posts a request to nobody, and lets time pass beyond its deadline.
fn wait_for_nobody(driver: &'static super::Driver) -> (Connected, Time) {
    let qp = alone(driver);
    qp.send();
    let deadline = Time::from_nanos(driver.next_deadline());
    assert!(deadline > at(0) && deadline < at(1_000_000), "{deadline:?}");
    (qp, deadline)
}

#[test]
fn a_timer_waits_for_what_lies_in_the_sockets() {
    alone_in_process("a_timer_waits_for_what_lies_in_the_sockets", || {
        let driver = stopped();
        let (_qp, deadline) = wait_for_nobody(driver);
        let sent = count(driver, Counter::SentPkts);
        set(driver, deadline);
        driver.run_timers();
        assert_eq!(count(driver, Counter::SentPkts), sent, "the answer may lie in the socket");
        let look = Time::from_nanos(driver.next_deadline());
        assert!(look > deadline && look <= deadline + Duration::from_millis(1), "{look:?}");
        // The packet itself lies there, and is for nobody. Then there is nothing more.
        assert_eq!(driver.receive(Reader::Wait), 1);
        set(driver, look);
        driver.run_timers();
        assert_eq!(count(driver, Counter::SentPkts), sent, "there may be more");
        assert_eq!(driver.receive(Reader::Wait), 0);
        set(driver, Time::from_nanos(driver.next_deadline()));
        driver.run_timers();
        assert!(count(driver, Counter::SentPkts) > sent);
    });
}

/// However often the sockets were asked before: timers wait for a look that found all of them empty.
#[test]
fn a_poll_that_is_due_asks_all_sockets() {
    alone_in_process("a_poll_that_is_due_asks_all_sockets", || {
        let driver = stopped();
        for n in 1..20 {
            driver.receive(Reader::Poll { is_due: false });
            set(driver, at(n));
            driver.receive(Reader::Poll { is_due: true });
            assert_eq!(driver.rx_empty_at.load(Ordering::SeqCst), at(n).as_nanos());
        }
    });
}

#[test]
fn a_timer_does_not_wait_for_ever() {
    alone_in_process("a_timer_does_not_wait_for_ever", || {
        let driver = stopped();
        let (_qp, deadline) = wait_for_nobody(driver);
        let sent = count(driver, Counter::SentPkts);
        let mut now = deadline;
        while count(driver, Counter::SentPkts) == sent {
            assert!(now < deadline + 2 * LATE, "nobody reads the sockets, and it still waits");
            set(driver, now);
            driver.run_timers();
            now = Time::from_nanos(driver.next_deadline());
        }
        assert!(now > deadline + LATE, "{:?}", now.since(deadline));
    });
}

#[test]
fn time_in_which_the_process_stood_is_no_silence() {
    alone_in_process("time_in_which_the_process_stood_is_no_silence", || {
        let driver = stopped();
        // No retries, and nothing left to be read: the first timeout is an error. Probes come before it.
        let completions = |nobody: &Connected| {
            while driver.receive(Reader::Wait) > 0 {}
            driver.run_timers();
            nobody.cq.poll(&mut [Wc::default(); 2]).unwrap()
        };
        let next = || Time::from_nanos(driver.next_deadline());
        let (nobody, begin) = (alone(driver), driver.core.now());
        nobody.send();
        let mut looks = Vec::new();
        while completions(&nobody) == 0 {
            looks.push(next().since(begin));
            set(driver, next());
        }
        let timeout = looks.pop().expect("the timeout");
        let (nobody, begin) = (alone(driver), driver.core.now());
        nobody.send();
        for look in looks {
            set(driver, begin + look);
            assert_eq!(completions(&nobody), 0);
        }
        assert_eq!(next(), begin + timeout);
        let go_on = begin + timeout + Duration::from_secs(10);
        set(driver, go_on);
        assert_eq!(completions(&nobody), 0, "it waits anew");
        while completions(&nobody) == 0 {
            assert!(next() < go_on + Duration::from_secs(1), "{:?}", next());
            set(driver, next());
        }
    });
}

#[test]
fn an_ack_leaves_when_the_sockets_are_empty() {
    alone_in_process("an_ack_leaves_when_the_sockets_are_empty", || {
        let driver = stopped();
        let [a, b] = pair(driver);
        b.recv();
        a.send();
        assert_eq!(driver.receive(Reader::Wait), 1);
        assert!(driver.transport.owed.now().is_any(), "it may go with the program's reply");
        let acks = count(driver, Counter::AcksSent);
        assert_eq!(driver.receive(Reader::Wait), 0);
        assert_eq!(count(driver, Counter::AcksSent), acks + 1);
        assert!(!driver.transport.owed.now().is_any());
    });
}

/// The poller gives slots back as well, for completions that the reset takes out of the queue.
#[test]
fn a_reset_beside_a_poller_frees_all_send_slots() {
    alone_in_process("a_reset_beside_a_poller_frees_all_send_slots", || {
        let driver = stopped();
        let alone = alone(driver);
        let dest = alone.qp.query().unwrap().0.dest_qpn;
        let ends = AtomicBool::new(false);
        let room = alone.qp.post().unwrap().send_room();
        let to = |state| {
            let attr = QpAttr { state, ..QpAttr::default() };
            alone.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while !ends.load(Ordering::Relaxed) {
                    alone.cq.poll(&mut [Wc::default(); 3]).unwrap();
                }
            });
            for round in 0..1500 {
                (0..room).for_each(|_| alone.send());
                to(QpState::Err);
                to(QpState::Reset);
                assert_eq!(alone.qp.post().unwrap().send_room(), room, "in round {round}");
                alone.connect(driver, dest, 0);
            }
            ends.store(true, Ordering::Relaxed);
        });
    });
}

/// Between devices of this make an ACK by UDP is four bytes of the reply, and no packet.
#[test]
fn a_reply_by_udp_carries_the_ack() {
    alone_in_process("a_reply_by_udp_carries_the_ack", || {
        let driver = stopped();
        let [a, b] = pair(driver);
        let counts =
            || [Counter::SentPkts, Counter::AcksSent].map(|counter| count(driver, counter));
        let mut before = counts();
        let mut more = |what: &str, expected: [u64; 2]| {
            let now = counts();
            assert_eq!([now[0] - before[0], now[1] - before[1]], expected, "{what}");
            before = now;
        };
        a.recv();
        b.recv();
        a.send();
        assert_eq!(driver.receive(Reader::Worker), 1);
        more("a request", [1, 0]);
        b.send();
        more("a reply", [1, 1]);
        assert_eq!(driver.receive(Reader::Worker), 1);
        let mut wcs = [Wc::default(); 2];
        assert_eq!(a.cq.poll(&mut wcs), Ok(2));
        let opcodes = wcs.map(|wc| wc.opcode);
        assert_eq!(opcodes, [WcOpcode::Send, WcOpcode::Recv], "its send completes first");
        driver.flush(Debts::All);
        more("nothing carries the ACK of the reply", [1, 1]);
    });
}

#[test]
fn acks_leave_at_the_latest_after_128_packets() {
    alone_in_process("acks_leave_at_the_latest_after_128_packets", || {
        let driver = stopped();
        let pairs: Vec<_> = (0..160).map(|_| pair(driver)).collect();
        for [a, b] in &pairs {
            b.recv();
            a.send();
        }
        let acks = count(driver, Counter::AcksSent);
        let mut received = 0;
        while count(driver, Counter::AcksSent) == acks {
            let n = driver.receive(Reader::Worker);
            assert!(n > 0, "none after {received} packets");
            received += n;
        }
        // A batch may end later.
        assert!((128..160).contains(&received), "{received}");
    });
}

#[test]
fn a_flush_pays_all_debts_once() {
    alone_in_process("a_flush_pays_all_debts_once", || {
        let driver = stopped();
        let pairs = [(); 3].map(|()| pair(driver));
        for [a, b] in &pairs {
            b.recv();
            a.send();
        }
        while driver.receive(Reader::Worker) > 0 {}
        let acks = count(driver, Counter::AcksSent);
        for debts in [Debts::All, Debts::AtOnce, Debts::AtExit] {
            driver.flush(debts);
            assert_eq!(count(driver, Counter::AcksSent), acks + 3, "{debts:?}");
        }
    });
}

#[test]
fn polls_rarely_look_at_quiet_sockets() {
    alone_in_process("polls_rarely_look_at_quiet_sockets", || {
        let driver = stopped();
        let [a, b] = pair(driver);
        // As if the same-host link were busy.
        let busy = || driver.rx.lock().pretend_busy(at(0));
        busy();
        b.recv();
        a.send();
        let poll = |is_due| driver.receive(Reader::Poll { is_due });
        set(driver, at(24));
        assert_eq!((poll(false), poll(true)), (0, 0));
        set(driver, at(26));
        busy();
        assert_eq!(poll(false), 0, "only a poll that is due looks at the clock");
        assert!(poll(true) > 0);
    });
}

#[test]
fn a_waiting_thread_looks_for_a_while_and_then_sleeps() {
    alone_in_process("a_waiting_thread_looks_for_a_while_and_then_sleeps", || {
        let driver = stopped();
        let (channel, event) = pipe().unwrap();
        let (spin, mut looks, mut now) = (AdaptiveSpin::default(), 0, 0);
        let found = driver.wait_for_event(&spin, channel.as_fd(), &mut || {
            looks += 1;
            now += 10;
            set(driver, at(now));
            if now == 60 {
                // It finds this event asleep.
                std::io::Write::write_all(&mut &event, b"e").unwrap();
            }
            now > 60
        });
        assert!(found.unwrap());
        assert_eq!(looks, 7, "six in 60 us, and one after the sleep");
        assert_eq!(driver.waiters.load(Ordering::SeqCst), 0);
    });
}

#[test]
fn one_thread_at_a_time_waits_at_the_sockets() {
    alone_in_process("one_thread_at_a_time_waits_at_the_sockets", || {
        let driver = stopped();
        let (channel, _event) = pipe().unwrap();
        driver.waiters.fetch_add(1, Ordering::SeqCst);
        let mut found = || panic!("it does not look");
        assert!(
            !driver.wait_for_event(&AdaptiveSpin::default(), channel.as_fd(), &mut found).unwrap()
        );
        driver.end_wait();
        assert_eq!(driver.waiters.load(Ordering::SeqCst), 1);
    });
}

#[test]
fn small_sends_leave_without_the_program() {
    alone_in_process("small_sends_leave_without_the_program", || {
        let driver = stopped();
        let [a, b] = pair(driver);
        let sent = count(driver, Counter::SentPkts);
        for _ in 0..4 {
            b.recv();
            a.send();
        }
        assert_eq!(count(driver, Counter::SentPkts), sent + 1, "the others wait for more");
        assert!(driver.transport.owed.now().is_any());
        assert!(ACK_DELAY <= Duration::from_micros(100));
        driver.flush(Debts::Unawaited);
        assert_eq!(count(driver, Counter::SentPkts), sent + 4);
        assert!(!driver.transport.owed.now().is_any());
        drop((a.cq, b.cq));
    });
}

#[test]
fn completions_are_in_their_queue_before_the_peer_has_an_answer() {
    alone_in_process("completions_are_in_their_queue_before_the_peer_has_an_answer", || {
        let driver = stopped();
        let [qp, _peer] = pair(driver);
        let cell = driver.transport.qps.find(qp.qp.qpn()).unwrap();
        let mut state = cell.state.lock();
        let (mut call, mut arrivals) = (Call::new(&cell), Arrivals::new(&cell, None));
        let State { machine, link, .. } = &mut *state;
        let mut env = call.env_with(link, &mut arrivals);
        env.complete(Side::Recv, Wc { qpn: cell.qpn, ..Wc::default() }, false);
        env.answer((1, 12), machine.executed());
        // The peer may write to memory from here on, and the program may poll because of that.
        assert!(cell.recv_cq.as_ref().unwrap().holds_of(cell.qpn));
        arrivals.end();
    });
}

/// Debug builds panic where a thread takes the locks of packets within the process under the lock of the receive path.
#[test]
fn a_reason_that_comes_alone_leaves_packets_within_the_process_for_later() {
    let name = "a_reason_that_comes_alone_leaves_packets_within_the_process_for_later";
    alone_in_process(name, || {
        let driver = stopped();
        let [qp, _peer] = pair(driver);
        let (dest, psn) = (qp.qp.qpn(), Psn::new(100));
        let told = Told { cause: Cause::NoReceive, value: 0 };
        tell_given_up(
            driver.links,
            &Connected::attr(driver, dest, 7).av,
            &ReasonPacket { dest, psn, told },
        );
        driver.links.inproc.owe(dest);
        assert_eq!(driver.receive(Reader::Wait), 1);
        assert!(!driver.links.inproc.is_pending(), "they come after it");
    });
}

/// The log of a Rust program may use the device. Debug builds panic where it is called under a lock of that.
#[test]
fn the_log_is_called_without_a_lock() {
    let name = "the_log_is_called_without_a_lock";
    alone_in_process(name, || {
        let script = Script::parse("on qp 1: drop packet 1; on qp 1: fails after 3s").unwrap();
        let driver = stopped_with(|config| config.faults = Some(script));
        let faulty: &'static Connected = Box::leak(Box::new(alone(driver)));
        let one = CqInitAttr { ignore_overrun: true, ..CqInitAttr::new(1) };
        let full: &'static Connected = Box::leak(Box::new(alone_with(driver, &one)));
        let lines = |of: &'static Connected, f: &dyn Fn()| {
            let said = Arc::new(AtomicU32::new(0));
            let count = Arc::clone(&said);
            let log = Log(move || {
                drop(of.qp.post());
                of.cq.poll(&mut [Wc::default()]).unwrap();
                count.fetch_add(1, Ordering::SeqCst);
            });
            tracing::subscriber::with_default(log, f);
            said.load(Ordering::SeqCst)
        };
        assert_eq!(lines(faulty, &|| faulty.send()), 1, "a packet is lost");
        set(driver, at(2_000_000));
        assert!(lines(faulty, &|| driver.run_timers()) >= 1, "the queue pair fails");
        full.recv();
        full.recv();
        let err = QpAttr { state: QpState::Err, ..QpAttr::default() };
        let overruns = || full.qp.modify(&err, QpAttrMask::STATE).unwrap();
        assert_eq!(lines(full, &overruns), 1, "a completion is lost");
    });
}

/// A queue pair that a rule lets fail, and what is done to it when the log is told of that.
fn fails_while(
    meanwhile: impl Fn(&'static Driver, &Connected) + Send + Sync + 'static,
) -> (&'static Driver, &'static Connected) {
    let script = Script::parse("on qp 1: fails after 3s").unwrap();
    let driver = stopped_with(|config| config.faults = Some(script));
    let faulty: &'static Connected = Box::leak(Box::new(alone(driver)));
    set(driver, at(2_000_000));
    let said = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&said);
    let log = Log(move || {
        if count.fetch_add(1, Ordering::SeqCst) == 0 {
            meanwhile(driver, faulty);
        }
    });
    tracing::subscriber::with_default(log, || driver.run_timers());
    assert_eq!(said.load(Ordering::SeqCst), 1);
    (driver, faulty)
}

#[test]
fn a_queue_pair_that_is_reset_while_its_fault_is_told_fails_when_it_is_ready_again() {
    let name = "a_queue_pair_that_is_reset_while_its_fault_is_told_fails_when_it_is_ready_again";
    alone_in_process(name, || {
        let (driver, faulty) = fails_while(|_, faulty| {
            let reset = QpAttr { state: QpState::Reset, ..QpAttr::default() };
            faulty.qp.modify(&reset, QpAttrMask::STATE).unwrap();
        });
        assert_eq!(faulty.qp.state().unwrap(), QpState::Reset);
        faulty.connect(driver, Qpn::new(faulty.qp.qpn().get() ^ 0xffff), 0);
        assert_eq!(faulty.qp.state().unwrap(), QpState::Err);
    });
}

#[test]
fn a_queue_pair_does_not_fail_by_a_rule_that_is_cleared_while_it_is_told() {
    let name = "a_queue_pair_does_not_fail_by_a_rule_that_is_cleared_while_it_is_told";
    alone_in_process(name, || {
        let (_, faulty) = fails_while(|driver, _| {
            thread::spawn(|| driver.obey(b"clear").unwrap()).join().unwrap();
        });
        assert_eq!(faulty.qp.state().unwrap(), QpState::Rts);
    });
}

#[test]
fn an_address_that_a_script_removes_comes_back_whichever_thread_looks() {
    let name = "an_address_that_a_script_removes_comes_back_whichever_thread_looks";
    alone_in_process(name, || {
        let script = Script::parse("gid 0 removed for 1s after 3s").unwrap();
        let driver = stopped_with(|config| config.faults = Some(script));
        let entry = driver.core.gids.entry(0, 0);
        assert!(entry.is_some());
        // Its end is due as well, and another thread looks when the log is told of its begin.
        set(driver, at(4_000_000));
        let said = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&said);
        let log = Log(move || {
            count.fetch_add(1, Ordering::SeqCst);
            thread::spawn(|| driver.run_timers()).join().unwrap();
        });
        tracing::subscriber::with_default(log, || driver.run_timers());
        assert_eq!(said.load(Ordering::SeqCst), 2, "it goes and comes");
        assert_eq!(driver.core.gids.entry(0, 0), entry);
    });
}

#[test]
fn nonsense_in_a_lane_that_is_read_before_a_packet_closes_its_channel() {
    let name = "nonsense_in_a_lane_that_is_read_before_a_packet_closes_its_channel";
    alone_in_process(name, || {
        let mut registry = None;
        let (driver, _starter) = open(|config| {
            config.inproc = false;
            registry = Registry::of_port(&config.registry, config.udp_port).ok();
        });
        let [qp, _other] = pair(driver);
        let shm = driver.links.shm.as_ref().unwrap();
        // A peer of the same process.
        let number = (1..=u8::MAX).find(|number| *number != driver.core.slot).unwrap();
        let slot = Slot::claim_number(&registry.unwrap(), number).unwrap();
        let (peer, _poller) = Endpoint::new(&slot, ShmConfig::default()).unwrap();
        let theirs = peer.connect(driver.core.slot).unwrap();
        while !theirs.is_established() {
            shm.endpoint().control().unwrap();
            peer.control().unwrap();
        }
        let (ours, lane) =
            (shm.endpoint().connect(slot.number()).unwrap(), theirs.open_lane().unwrap());
        let cell = driver.transport.qps.find(qp.qp.qpn()).unwrap();
        let mut state = cell.state.lock();
        let State { machine, link, .. } = &mut *state;
        let gid = driver.core.gids.listed(0)[0].gid;
        let call = LaneCall {
            index: lane.index() as u8,
            first: lane.next(),
            digest: Digest::new(gid, gid),
            from: machine.dest_qpn(),
            dest: cell.qpn,
        };
        link.same_host.lanes.accept(shm, 0, &ours, &call).unwrap();
        lane.show(0, u64::MAX);
        let mut call = Call::new(&cell);
        // A packet comes that is not the next: that may be in the lane.
        machine.read_lane_before(Psn::new(101), &mut call.env(link));
        assert!(!link.same_host.lanes.are_any(), "the lanes were left");
        assert_eq!(ours.closed(), Some(Closed::Nonsense));
    });
}

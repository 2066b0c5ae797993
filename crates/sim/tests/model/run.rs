//! A run: random actions, then everything comes to its end, then memory is looked at.

use std::time::Duration;

use anyverbs_proto::event::QpEvent;
use anyverbs_proto::qp::attr::{QpState, QpType};
use anyverbs_sim::Event;
use anyverbs_sim::link::Link;
use rand::Rng;

use crate::Ways;
use crate::world::{COUNTERS, World};

/// The result of a run, as its devices and their programs saw it.
#[derive(PartialEq, Eq, Debug)]
pub(crate) struct Outcome {
    completions: Vec<(u64, u8, u32)>,
    /// The packets: time, sender, headers and length.
    packets: Vec<String>,
    /// All bytes that programs look at.
    memory: Vec<Vec<u8>>,
}

/// Runs a seed.
pub(crate) fn run(seed: u64, ways: Ways) -> Outcome {
    let mut world = World::new(seed, ways);
    world.act();
    world.finish();
    world.check_memory();
    world.check_liveness();
    let packets = world.sim.net.trace.iter().map(ToString::to_string).collect();
    Outcome { packets, memory: world.memory(), completions: world.log }
}

impl World {
    fn any_qp(&mut self) -> usize {
        self.rng.random_range(0..self.qps.len())
    }

    fn act(&mut self) {
        let mut left = self.config.ops;
        if !self.config.lazy_receiver {
            for q in 0..self.qps.len() {
                while self.rng.random_bool(0.9) && self.post_recv(q) {}
            }
        }
        while left > 0 && self.qps.iter().any(|qp| !qp.destroyed) {
            let q = self.any_qp();
            match self.rng.random_range(0..20) {
                0..8 if !self.qps[q].destroyed => {
                    for _ in 0..self.rng.random_range(1..5) {
                        if self.qps[q].sends.len() == self.qps[q].max_send_wr {
                            self.post_to_full(q);
                            break;
                        }
                        self.post_random(q);
                        left = left.saturating_sub(1);
                    }
                    self.sim.transmit(self.qps[q].id);
                }
                8..12 => {
                    let count = if self.config.lazy_receiver { 1 } else { 8 };
                    for _ in 0..count {
                        self.post_recv(q);
                    }
                }
                12..16 => {
                    let cq = self.cqs[self.rng.random_range(0..self.cqs.len())];
                    let most = self.rng.random_range(1..20);
                    self.poll(cq, most);
                }
                16 if self.config.trouble && self.rng.random_bool(0.1) => self.cause_trouble(q),
                17 if self.rng.random_bool(0.2) => self.drain_and_resume(q),
                _ => {
                    let nanos = self.rng.random_range(0..60_000);
                    self.sim.run_for(Duration::from_nanos(nanos));
                }
            }
        }
    }

    fn drain_and_resume(&mut self, q: usize) {
        let qp = &self.qps[q];
        if qp.destroyed || self.sim.get(qp.id).state() != QpState::Rts {
            return;
        }
        let id = qp.id;
        self.sim.to_state(id, QpState::Sqd);
        let nanos = self.rng.random_range(0..100_000);
        self.sim.run_for(Duration::from_nanos(nanos));
        if self.sim.get(id).state() == QpState::Sqd {
            self.sim.to_state(id, QpState::Rts);
        }
    }

    fn cause_trouble(&mut self, q: usize) {
        if self.qps[q].destroyed {
            return;
        }
        match self.rng.random_range(0..5) {
            0 => {
                self.break_connection(q);
                self.sim.to_state(self.qps[q].id, QpState::Err);
            }
            1 => {
                self.break_connection(q);
                self.sim.destroy(self.qps[q].id);
                self.forget(q);
            }
            _ if self.qps[q].sends.len() < self.qps[q].max_send_wr => {
                self.post_bad(q);
                self.sim.transmit(self.qps[q].id);
            }
            _ => {}
        }
    }

    /// A destroyed queue pair holds no buffers any more, but for one that it took from a shared queue.
    fn forget(&mut self, q: usize) {
        let World { sim, qps, hosts, .. } = self;
        let qp = &mut qps[q];
        qp.destroyed = true;
        let slots = &mut hosts[qp.host].slots;
        for slot in qp.sends.drain(..).flat_map(|send| send.release) {
            slots.release(sim, &slot);
        }
        for (_, slot) in qp.recvs.drain(..) {
            slots.release(sim, &slot);
        }
    }

    /// Runs until every sound connection has done all that it was asked for.
    fn finish(&mut self) {
        for q in 0..self.qps.len() {
            if !self.qps[q].destroyed {
                self.post_last(q);
                self.sim.transmit(self.qps[q].id);
            }
        }
        let mut rounds = 0;
        while !self.is_done() {
            rounds += 1;
            assert!(rounds < 5000, "no end in sight: {}", self.what_is_left());
            for q in 0..self.qps.len() {
                self.post_recv(q);
            }
            let pause = if rounds < 100 { 50 } else { 5000 };
            self.sim.run_for(Duration::from_micros(pause));
            self.poll_all();
        }
        // Broken ones get time to find out.
        for _ in 0..50 {
            for q in 0..self.qps.len() {
                self.post_recv(q);
            }
            self.sim.run_for(Duration::from_millis(5));
            self.poll_all();
        }
        for q in 0..self.qps.len() {
            self.check_end(q);
        }
        // Late packets, held ACKs, timers.
        self.sim.run();
        self.poll_all();
        for qp in self.qps.iter().filter(|qp| !qp.broken) {
            assert_eq!(self.sim.get(qp.id).state(), QpState::Rts);
        }
        for h in 0..self.hosts.len() {
            let events = self.sim.events(self.hosts[h].device);
            for event in events {
                let Event::Qp(id, event) = event else { panic!("{event:?}") };
                let broken = self.qps.iter().any(|qp| qp.id == id && qp.broken);
                assert!(broken || event == QpEvent::CommEst, "{event:?} of {id:?}");
            }
        }
    }

    fn is_done(&self) -> bool {
        self.qps.iter().filter(|qp| !qp.broken).all(|qp| {
            let received = !qp.is_reliable() || qp.next_message == qp.messages.len();
            qp.sends.is_empty() && received
        })
    }

    fn what_is_left(&self) -> String {
        let left = self.qps.iter().filter(|qp| !qp.broken).map(|qp| {
            let state = self.sim.get(qp.id).state();
            format!(
                "{:?} {} {state:?}: sends {:?}, messages {} of {}",
                qp.qp_type(),
                qp.qpn,
                qp.sends,
                qp.next_message,
                qp.messages.len()
            )
        });
        left.collect::<Vec<_>>().join("\n")
    }

    fn check_end(&mut self, q: usize) {
        let qp = &self.qps[q];
        if qp.destroyed {
            return;
        }
        let id = qp.id;
        if !qp.broken {
            return;
        }
        // ERR flushes all that is left, and all else was done.
        self.sim.to_state(id, QpState::Err);
        self.poll_all();
        let qp = &self.qps[q];
        for send in &qp.sends {
            assert!(!send.signaled && !qp.send_failed, "never completed: {send:?}");
        }
        assert!(qp.recvs.is_empty(), "never completed: {:?}", qp.recvs);
        let peer = &self.qps[qp.peer];
        if qp.is_reliable() && !peer.destroyed {
            // Acknowledged messages had arrived.
            assert!(qp.sent_messages <= peer.next_message, "acknowledged and not received");
        }
    }

    /// The regions that peers reach, and the receive buffers.
    fn memory(&self) -> Vec<Vec<u8>> {
        let boards = self.qps.iter().map(|qp| qp.board);
        let hosts = self.hosts.iter().flat_map(|host| [host.counters, host.slots.mr()]);
        boards.chain(hosts).map(|mr| self.sim.bytes(mr, 0, mr.len)).collect()
    }

    fn check_memory(&self) {
        for qp in &self.qps {
            let theirs = &self.qps[qp.peer];
            let there = self.sim.bytes(theirs.board, 0, theirs.board_len());
            let word = self.sim.word(theirs.board, theirs.board_len());
            match qp.qp_type() {
                reliable if reliable.is_reliable() && !qp.broken => {
                    assert!(there == qp.shadow, "the board of {} is not as written", theirs.qpn);
                    assert_eq!(word, qp.word, "swaps of {}", qp.qpn);
                }
                QpType::Uc => {
                    // Behind the ranges of the messages, written in whole or in part or not at all, the memory is
                    // untouched.
                    let written = qp.written.last().map_or(0, |range| range.end);
                    assert!(there[written..] == qp.shadow[written..]);
                }
                _ => {}
            }
        }
        for host in &self.hosts {
            host.slots.check_free(&self.sim);
        }
        for h in 0..self.hosts.len() {
            for counter in 0..COUNTERS {
                self.check_counter(h, counter);
            }
        }
    }

    /// Each fetch-add saw the sum of those before it, in some order of all.
    fn check_counter(&self, h: usize, counter: usize) {
        let mut seen = self.added.get(&(h, counter)).cloned().unwrap_or_default();
        seen.sort_unstable();
        let last = self.sim.word(self.hosts[h].counters, counter * 8);
        // Atomics of broken connections may have happened without an answer.
        if self.qps.iter().any(|qp| qp.broken) {
            return;
        }
        let mut sum = 0;
        for (old, add) in seen {
            assert_eq!(old, sum, "an add was lost, or done twice");
            sum += add;
        }
        assert_eq!(last, sum);
    }

    /// Over a sound link the unreliable ones deliver, after any earlier faults.
    fn check_liveness(&mut self) {
        self.sim.net.default_link = Link::default();
        for q in 0..self.qps.len() {
            let qp = &self.qps[q];
            let peer = &self.qps[qp.peer];
            let sound = !qp.broken && !peer.broken && !qp.destroyed && !peer.destroyed;
            if !sound || qp.is_reliable() {
                continue;
            }
            let peer = qp.peer;
            self.post_recv(peer);
            self.post_probe(q);
            self.sim.transmit(self.qps[q].id);
            self.sim.run();
            self.poll_all();
            let last = self.qps[peer].messages.last();
            assert!(last.is_some_and(|m| m.received == 1), "the probe of {q} did not arrive");
        }
    }
}

//! Tells those who look at the process what it does (`docs/design/pages.md`). The worker does that, now and then, while somebody looks.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use anyverbs_causes::Cause;
use anyverbs_net::host::Page;
use anyverbs_objects::cq::CqCell;
use anyverbs_objects::event_queue;
use anyverbs_objects::srq::SrqCell;
use anyverbs_page::{
    Attributes, CompletionQueue, Counter, Group, INTERVAL, MAX_COMPLETION_QUEUES, MAX_QUEUE_PAIRS,
    Objects, Peer, Process, Psns, QueuePair, Receives, Sends, Snapshot, Traffic, Wait, Waiting,
    WaitingCall,
};
use anyverbs_proto::counters;
use anyverbs_proto::env::Side;
use anyverbs_proto::qp::attr::QpType;
use anyverbs_proto::qp::facts::{Facts, Waits};
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Psn, Qpn};

use super::Driver;
use crate::qp::{QpCell, State};

/// Longest wait for a thread that holds the lock of a queue pair or queue. One that locks it again and again gives it up by then.
fn longest_wait() -> Duration {
    INTERVAL / 100
}

/// Whether completions that wait for so long count as not polled.
fn is_unpolled(time: Duration) -> bool {
    time >= 4 * INTERVAL
}

/// Exists while somebody looks.
pub(super) struct Observer {
    driver: &'static Driver,
    command: String,
    pace: Pace,
    /// Since when each queue pair has waited for the same, with the oldest packet that has no answer.
    waits: HashMap<u32, (Wait, Psn, Time)>,
    /// The place of the oldest completion of each queue, and since when it is there.
    oldest: HashMap<u32, (usize, Time)>,
    /// The queues with completions that nobody has polled for long, and the queue pairs of these.
    held: HashSet<(u32, Qpn)>,
    bytes: Vec<u8>,
}

/// Says when the page is written.
#[derive(Default)]
struct Pace {
    /// When nobody looks any more.
    until: Time,
    /// The next snapshot is not before, however many look.
    soonest: Time,
    next: Time,
}

impl Pace {
    /// Somebody looks.
    fn look(&mut self, now: Time) {
        self.until = now + 12 * INTERVAL;
        self.next = self.soonest.min(self.until);
    }

    /// A snapshot was made.
    fn done(&mut self, begin: Time, end: Time) {
        self.soonest = end + (INTERVAL / 5).max(20 * end.since(begin));
        self.next = self.soonest.max(begin + INTERVAL).min(self.until);
    }
}

impl Observer {
    pub(super) fn new(driver: &'static Driver) -> Self {
        Self {
            driver,
            command: command(),
            pace: Pace::default(),
            waits: HashMap::new(),
            oldest: HashMap::new(),
            held: HashSet::new(),
            bytes: Vec::new(),
        }
    }

    /// When it has something to do, in nanoseconds.
    pub(super) fn next(&self) -> u64 {
        self.pace.next.as_nanos()
    }

    /// Writes the page if it is time, or if somebody looks anew. False: nobody has looked for long.
    pub(super) fn observe(&mut self, page: &Page, is_new: bool) -> bool {
        let now = self.driver.core.now();
        if is_new {
            self.pace.look(now);
        }
        if now >= self.pace.until {
            return false;
        }
        if now < self.pace.next {
            return true;
        }
        let snapshot = self.snapshot(now);
        self.bytes.clear();
        snapshot.encode(&mut self.bytes);
        if let Err(error) = page.write(&self.bytes) {
            tracing::debug!(%error, "the page is not written");
        }
        self.pace.done(now, self.driver.core.now());
        true
    }

    fn snapshot(&mut self, now: Time) -> Snapshot {
        let core = self.driver.core;
        let mut cqs = CqCell::all(core);
        let mut qps = self.driver.transport.qps.filter(|_| true);
        let left_out = qps.len().saturating_sub(MAX_QUEUE_PAIRS)
            + cqs.len().saturating_sub(MAX_COMPLETION_QUEUES);
        cqs.truncate(MAX_COMPLETION_QUEUES);
        qps.truncate(MAX_QUEUE_PAIRS);
        let oldest = std::mem::take(&mut self.oldest);
        self.held.clear();
        let completion_queues =
            cqs.iter().filter_map(|cq| self.completion_queue(cq, &oldest, now)).collect();
        let waits = std::mem::take(&mut self.waits);
        let (mut groups, mut srqs) = (Vec::new(), HashMap::new());
        let queue_pairs = qps
            .iter()
            .filter_map(|cell| {
                // Many may share one, and each is asked once.
                let waiting = |srq: &Arc<SrqCell>| {
                    let key = Arc::as_ptr(srq);
                    *srqs.entry(key).or_insert_with(|| srq.waiting_within(longest_wait()))
                };
                let shared = cell.srq.as_ref().map(waiting);
                self.queue_pair(cell, shared, &waits, &mut groups, now)
            })
            .collect();
        let all = self.driver.counters();
        let counter =
            |counter: &counters::Counter, value| Counter { name: counter.name().into(), value };
        let of_device = |counters: &counters::Counters| {
            let values = counters::Counter::ALL.iter().map(|c| (c, counters.read(*c)));
            values.filter(|(_, value)| *value > 0).map(|(c, value)| counter(c, value)).collect()
        };
        let ports = 0..core.config.ports.len();
        let name = |port| core.config.port_name(port);
        Snapshot {
            process: Process {
                pid: std::process::id(),
                slot: core.slot,
                udp_port: core.config.udp_port,
                objects: self.objects(),
                left_out: left_out as u32,
            },
            command: self.command.clone(),
            devices: ports.clone().map(name).collect(),
            down: ports.filter(|port| self.driver.links.is_down(*port)).map(name).collect(),
            counters: counters::Counter::ALL.iter().map(|c| counter(c, core.total(*c))).collect(),
            counters_of: if all.len() > 1 {
                all.iter().map(of_device).collect()
            } else {
                Vec::new()
            },
            calls: event_queue::waiting_calls()
                .into_iter()
                .map(|(what, time)| WaitingCall { what, ns: time.as_nanos() as u64 })
                .collect(),
            queue_pairs,
            groups,
            completion_queues,
        }
    }

    fn objects(&self) -> Objects {
        let core = self.driver.core;
        let (quotas, (regions, region_bytes)) = (&core.quotas, core.mrs.totals());
        Objects {
            queue_pairs: quotas.qp.used(),
            completion_queues: quotas.cq.used(),
            shared_receive_queues: quotas.srq.used(),
            protection_domains: quotas.pd.used(),
            regions,
            region_bytes,
            windows: quotas.mw.used(),
            address_handles: quotas.ah.used(),
        }
    }

    fn completion_queue(
        &mut self,
        cq: &CqCell,
        before: &HashMap<u32, (usize, Time)>,
        now: Time,
    ) -> Option<CompletionQueue> {
        let facts = cq.facts(longest_wait())?;
        let mut unpolled = Duration::ZERO;
        if facts.len > 0 {
            let known = before.get(&cq.number).filter(|(place, _)| *place == facts.place);
            let since = known.map_or(now, |(_, since)| *since);
            self.oldest.insert(cq.number, (facts.place, since));
            unpolled = now.since(since);
        }
        if is_unpolled(unpolled) {
            let queue_pairs = cq.queue_pairs(facts.len, longest_wait()).into_iter();
            self.held.extend(queue_pairs.map(|qpn| (cq.number, qpn)));
        }
        Some(CompletionQueue {
            number: cq.number,
            depth: facts.capacity as u32,
            fill: facts.len as u32,
            overrun: facts.overrun,
            has_channel: facts.has_channel,
            unpolled_ns: unpolled.as_nanos() as u64,
            unacknowledged: facts.unacknowledged as u32,
            device: cq.device() as u32,
        })
    }

    /// Whether a queue has completions that nobody has polled for long; since when.
    fn unpolled(&self, cq: Option<&CqCell>, now: Time) -> Option<Time> {
        let (_, since) = self.oldest.get(&cq?.number)?;
        is_unpolled(now.since(*since)).then_some(*since)
    }

    fn queue_pair(
        &mut self,
        cell: &QpCell,
        shared: Option<Option<usize>>,
        before: &HashMap<u32, (Wait, Psn, Time)>,
        groups: &mut Vec<Group>,
        now: Time,
    ) -> Option<QueuePair> {
        let number = cell.qpn.get();
        let (kind, port) = (cell.qp_type as u8, cell.port.number().into());
        let busy = || Some(QueuePair { number, kind, port, busy: true, ..QueuePair::default() });
        if shared == Some(None) {
            return busy();
        }
        let Some(state) = cell.state.try_lock_for(longest_wait()) else { return busy() };
        if state.is_dead() || cell.home().is_some() {
            return None;
        }
        let (facts, attr, init) =
            (state.machine.facts(), state.machine.attr(), *state.machine.init());
        let pkey = state.machine.pkey().0;
        let (way, of_link) = (state.link.way(), waits_for_link(cell.qp_type, &state, &facts, now));
        groups
            .extend(state.groups().iter().map(|gid| Group { queue_pair: number, gid: word(*gid) }));
        drop(state);
        // No other lock is taken under that of the queue pair.
        let sends = cell.cq(Side::Send).map(|cq| &**cq);
        let receives = cell.cq(Side::Recv).map(|cq| &**cq);
        let waiting = {
            let (what, since) = of_link.map_or_else(
                || self.waits_for_polls(cell.qpn, &facts, [sends, receives], now),
                |what| (what, None),
            );
            let known = before
                .get(&number)
                .filter(|(w, psn, _)| (*w, *psn) == (what, facts.psns.unanswered));
            let seen = known.map_or(now, |(.., since)| *since);
            self.waits.insert(number, (what, facts.psns.unanswered, seen));
            Waiting {
                what,
                known: since.is_some(),
                ns: now.since(since.unwrap_or(seen)).as_nanos() as u64,
                cause: facts.cause.map_or(0, Cause::number),
            }
        };
        let (queues, traffic, is_ud) = (facts.queues, facts.traffic, cell.qp_type == QpType::Ud);
        Some(QueuePair {
            number,
            kind,
            state: attr.cur_state as u8,
            way,
            protection_domain: init.pd,
            sends: Sends {
                depth: init.cap.max_send_wr,
                taken: queues.send_taken,
                outstanding: queues.outstanding,
                unsent: queues.unsent,
                completion_queue: sends.map_or(0, |cq| cq.number),
            },
            receives: Receives {
                depth: init.cap.max_recv_wr,
                fill: shared.flatten().map_or(queues.receives, |waiting| waiting as u32),
                shared: init.srq,
                completion_queue: receives.map_or(0, |cq| cq.number),
                posted: queues.posted,
                completed: queues.completed,
            },
            peer: Peer {
                number: if is_ud { 0 } else { attr.dest_qpn.get() },
                gid: word(attr.av.dgid),
                source: word(attr.av.sgid),
                mtu: attr.path_mtu.bytes(),
                psns: Psns {
                    unanswered: facts.psns.unanswered.get(),
                    next: facts.psns.next.get(),
                    expected: facts.psns.expected.get(),
                },
            },
            traffic: Traffic {
                sent: traffic.sent,
                sent_bytes: traffic.sent_bytes,
                received: traffic.received,
                received_bytes: traffic.received_bytes,
                retries: facts.repeats.retries,
                rnr_naks: facts.repeats.rnr_naks,
            },
            waiting,
            unacknowledged: cell.unacknowledged() as u32,
            busy: false,
            port,
            attributes: Attributes {
                timeout: attr.timeout,
                retry_cnt: attr.retry_cnt,
                rnr_retry: attr.rnr_retry,
                min_rnr_timer: attr.min_rnr_timer,
                max_rd_atomic: attr.max_rd_atomic,
                max_dest_rd_atomic: attr.max_dest_rd_atomic,
                qp_access_flags: attr.access.bits(),
                sgid_index: attr.av.sgid_index,
                pkey,
                qkey: if is_ud { attr.qkey.0 } else { 0 },
            },
        })
    }

    /// Its wait, by its machine or by its completion queues.
    fn waits_for_polls(
        &self,
        qpn: Qpn,
        facts: &Facts,
        [sends, receives]: [Option<&CqCell>; 2],
        now: Time,
    ) -> (Wait, Option<Time>) {
        let (waits, since) = facts.waits;
        if waits != Waits::Nothing {
            return (wait(waits), since);
        }
        let queues = &facts.queues;
        if queues.send_taken > queues.outstanding
            && let Some(since) = self.unpolled(sends, now)
            && sends.is_some_and(|cq| self.held.contains(&(cq.number, qpn)))
        {
            return (Wait::PollSends, Some(since));
        }
        if let Some(since) = self.unpolled(receives, now)
            && receives.is_some_and(|cq| self.held.contains(&(cq.number, qpn)))
        {
            return (Wait::PollReceives, Some(since));
        }
        (Wait::Nothing, None)
    }
}

/// Its wait by its link, or by a script of faults, if any.
fn waits_for_link(qp_type: QpType, state: &State, facts: &Facts, now: Time) -> Option<Wait> {
    let has_unsent = facts.queues.unsent > 0;
    if state.link.is_held_by_rule(facts.psns.unanswered, now) {
        Some(Wait::Rule)
    } else if state.link.peer_gone_at.is_some() && facts.queues.outstanding > 0 {
        Some(Wait::PeerEnded)
    } else if state.link.blocked && has_unsent {
        Some(if qp_type.is_reliable() { Wait::Room } else { Wait::Credit })
    } else {
        None
    }
}

fn wait(waits: Waits) -> Wait {
    match waits {
        Waits::Nothing => Wait::Nothing,
        Waits::State => Wait::State,
        Waits::Failed => Wait::Failed,
        Waits::Answer => Wait::Answer,
        Waits::PeerReceive => Wait::PeerReceive,
        Waits::PeersRule => Wait::Rule,
        Waits::OwnReceive => Wait::OwnReceive,
        Waits::PeerRepeat => Wait::PeerRepeat,
        Waits::PeerGaveUp => Wait::PeerGaveUp,
        Waits::Rate => Wait::Rate,
        Waits::Fence => Wait::Fence,
        Waits::Drained => Wait::Drained,
        Waits::Room => Wait::Room,
        Waits::FullSends => Wait::FullSends,
    }
}

fn word(gid: Gid) -> u128 {
    u128::from_be_bytes(gid.0)
}

/// The command line of this process, or what there is of it.
fn command() -> String {
    let read = |name| std::fs::read(format!("/proc/self/{name}")).unwrap_or_default();
    let mut bytes = read("cmdline");
    if bytes.is_empty() {
        bytes = read("comm");
    }
    bytes.truncate(200);
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// However many look, and whatever the limits of a look are.
    #[test]
    fn snapshots_take_a_twentieth_of_the_time() {
        for took in [1, 10, 40, 200, 1000].map(Duration::from_millis) {
            let (mut pace, mut now, mut busy) = (Pace::default(), Time::default(), Duration::ZERO);
            let step = Duration::from_millis(1);
            while now < Time::default() + Duration::from_secs(300) {
                pace.look(now);
                if now < pace.next {
                    now = now + step;
                    continue;
                }
                let begin = now;
                now = now + took;
                busy += took;
                pace.done(begin, now);
            }
            let all = now.since(Time::default());
            assert!(20 * busy <= all + 21 * took, "{took:?}: {busy:?} of {all:?}");
        }
    }

    #[test]
    fn one_who_looks_sees_several_pages_a_second() {
        let mut pace = Pace::default();
        let at = |ms| Time::default() + Duration::from_millis(ms);
        pace.look(at(0));
        assert_eq!(pace.next, at(0));
        pace.done(at(0), at(1));
        assert_eq!((pace.soonest, pace.next), (at(51), at(250)));
        pace.look(at(20));
        assert_eq!(pace.next, at(51));
    }
}

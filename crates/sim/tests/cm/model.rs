//! Programs that do anything at any time, over networks that lose, double and reorder: in the end both sides agree, and
//! nothing is left.

use std::collections::BTreeMap;
use std::time::Duration;

use anyverbs_proto::cm::CmConfig;
use anyverbs_proto::cm::ConnectionState as S;
use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::id::CommId;
use anyverbs_proto::cm::message::code::RejReason;
use anyverbs_proto::time::Time;
use rand::Rng;

use crate::world::{Dial, Weather, World};

const HOSTS: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Connect,
    Accept(CommId),
    Reject(CommId),
    Ready(CommId),
    Establish(CommId),
    Disconnect(CommId),
    Destroy(CommId),
}

/// Both ends of a connection that one end asked for; `None` for an end that never was.
#[derive(Default, Debug)]
struct Pair {
    active: Option<(usize, CommId)>,
    /// The last that was made for it: one that was destroyed unanswered may be asked for again.
    passive: Option<(usize, CommId)>,
}

struct Model {
    w: World,
    agenda: BTreeMap<(Time, u64), (usize, Action)>,
    planned: u64,
    pairs: Vec<Pair>,
}

impl Model {
    fn new(seed: u64) -> Self {
        let config = CmConfig { quick_repeats: seed % 2 == 1, ..CmConfig::default() };
        let mut w = World::with_config(seed, HOSTS, config);
        w.weather = Weather {
            delay: Duration::from_micros(w.rng.random_range(20..2000)),
            jitter: Duration::from_micros(w.rng.random_range(0..20_000)),
            loss: *[0.0, 0.05, 0.2].get(w.rng.random_range(0..3)).unwrap(),
            duplicate: *[0.0, 0.3].get(w.rng.random_range(0..2)).unwrap(),
        };
        for host in 0..HOSTS {
            w.listen(host);
        }
        Self { w, agenda: BTreeMap::new(), planned: 0, pairs: Vec::new() }
    }

    fn plan(&mut self, host: usize, most: Duration, action: Action) {
        // Half of all programs answer at once.
        let quick = self.w.rng.random_bool(0.5);
        let most = if quick { Duration::from_millis(1) } else { most };
        let after = Duration::from_nanos(self.w.rng.random_range(0..most.as_nanos() as u64));
        self.planned += 1;
        self.agenda.insert((self.w.now + after, self.planned), (host, action));
    }

    fn act(&mut self, host: usize, action: Action) {
        let now = self.w.now;
        let qpn = self.w.qpn(host);
        let accept = crate::world::accept_params(qpn);
        let cm = &mut self.w.hosts[host].cm;
        // An error: the peer or the program itself was faster.
        let _ = match action {
            Action::Connect => {
                let number = self.pairs.len() as u32;
                let to = self.w.rng.random_range(0..HOSTS);
                let private_data = &number.to_be_bytes();
                let id = self.w.dial(host, to, Dial { private_data, ..Dial::default() });
                self.pairs.push(Pair { active: Some((host, id)), passive: None });
                Ok(())
            }
            Action::Accept(id) => cm.accept(now, id, &accept),
            Action::Reject(id) => cm.reject(now, id, RejReason::Consumer, b"why", b"because"),
            Action::Ready(id) => cm.ready(now, id, &[]),
            Action::Establish(id) => cm.establish(id),
            Action::Disconnect(id) => cm.disconnect(now, id, &[]),
            Action::Destroy(id) => cm.destroy(now, id),
        };
    }

    fn hear(&mut self, host: usize, event: CmEvent) {
        let id = event.id();
        let dice = self.w.rng.random_range(0..100);
        let soon = Duration::from_secs(2);
        match event {
            CmEvent::ConnectRequest { request, .. } => {
                self.w.hosts[host].cm.take_request(id).unwrap();
                let number = u32::from_be_bytes(*request.private_data.first_chunk().unwrap());
                let pair = &mut self.pairs[number as usize];
                if let Some((_, earlier)) = pair.passive.replace((host, id)) {
                    let state = self.w.hosts[host].cm.state(earlier);
                    assert!(state.is_err(), "asked twice\n{}", self.w.log.join("\n"));
                }
                match dice {
                    0..70 => self.plan(host, soon, Action::Accept(id)),
                    70..90 => self.plan(host, soon, Action::Reject(id)),
                    _ => self.plan(host, soon, Action::Destroy(id)),
                }
                if dice < 10 {
                    // A change of mind: maybe before the peer is ready.
                    self.plan(host, soon * 2, Action::Destroy(id));
                }
            }
            CmEvent::ConnectResponse { .. } => match dice {
                0..80 => self.plan(host, soon, Action::Ready(id)),
                80..90 => self.plan(host, soon, Action::Reject(id)),
                _ => self.plan(host, soon, Action::Destroy(id)),
            },
            CmEvent::Established { .. } => match dice {
                0..40 => self.plan(host, soon, Action::Disconnect(id)),
                40..60 => self.plan(host, soon, Action::Destroy(id)),
                _ => {}
            },
            CmEvent::Disconnected { how: Disconnected::Requested(_), .. } => match dice {
                0..70 => self.plan(host, soon, Action::Disconnect(id)),
                _ => self.plan(host, soon, Action::Destroy(id)),
            },
            _ if dice < 50 => self.plan(host, soon, Action::Destroy(id)),
            _ => {}
        }
    }

    /// The passive program may call `establish` when data came: the peer is ready then.
    fn establish_is_true(&mut self) {
        for number in 0..self.pairs.len() {
            let (Some((ah, a)), Some((bh, b))) =
                (self.pairs[number].active, self.pairs[number].passive)
            else {
                continue;
            };
            let ready = self.w.hosts[ah].cm.state(a) == Ok(S::Established);
            if ready && self.w.rng.random_bool(0.002) {
                self.act(bh, Action::Establish(b));
            }
        }
    }

    fn run(&mut self) {
        let end = Time::default() + Duration::from_secs(7 * 86_400);
        loop {
            for host in 0..HOSTS {
                while let Some(event) = self.w.poll_event(host) {
                    self.hear(host, event);
                }
            }
            self.establish_is_true();
            let next = self.agenda.first_key_value().map(|((at, _), _)| *at);
            if !self.w.step(next.unwrap_or(end)) {
                let Some((_, (host, action))) = self.agenda.pop_first() else { break };
                self.w.now = self.w.now.max(next.expect("there was one"));
                self.act(host, action);
            }
        }
    }

    fn agree(&self, seed: u64) {
        for pair in &self.pairs {
            let state = |end: Option<(usize, CommId)>| {
                end.and_then(|(host, id)| self.w.hosts[host].cm.state(id).ok())
            };
            let (a, b) = (state(pair.active), state(pair.passive));
            let log = || {
                let id = pair.active.map_or(CommId::NONE, |(_, id)| id).to_string();
                let other = pair.passive.map_or(id.clone(), |(_, id)| id.to_string());
                let of_pair = |l: &&String| l.contains(&id) || l.contains(&other);
                let lines: Vec<_> = self.w.log.iter().filter(of_pair).cloned().collect();
                format!("seed {seed} {a:?} {b:?}\n{}", lines.join("\n"))
            };
            let connected = |s| s == Some(S::Established);
            assert_eq!(connected(a), connected(b), "{}", log());
            // Connections without a waiting program are over.
            for end in [a, b].into_iter().flatten() {
                assert!(matches!(end, S::Established | S::Closed), "{}", log());
            }
        }
    }
}

#[test]
fn both_sides_agree_and_nothing_is_left() {
    let (mut connected, mut refused) = (0, 0);
    for seed in 0..3000 {
        let mut model = Model::new(seed);
        for host in 0..HOSTS {
            for _ in 0..3 {
                model.plan(host, Duration::from_secs(5), Action::Connect);
            }
        }
        model.run();
        model.agree(seed);
        for (host, id) in model.pairs.iter().filter_map(|p| p.active) {
            match model.w.hosts[host].cm.state(id) {
                Ok(S::Established) => connected += 1,
                _ => refused += 1,
            }
        }
        model.w.weather = Weather::FAIR;
        model.w.tear_down();
    }
    assert!(connected > 1000 && refused > 1000, "{connected} {refused}: both happen");
}

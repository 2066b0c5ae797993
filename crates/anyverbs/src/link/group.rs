//! Datagrams of multicast groups: to each member process of this host by its ring, to queue pairs of this process through the
//! queue in memory, to other hosts as one UDP datagram that this host's sockets do not get.
//!
//! That is possible where every member on this host is known and has a ring ([`UdpPort::members`](anyverbs_net::UdpPort::members)
//! says how many there are). Else all of them get what the kernel gives out, or what is handed on where it does not: no member
//! gets a datagram in both ways. A member of this user's processes is known from its joining on, at the cost of one word that
//! the sender looks at; whoever else joins (another user's process, a program that has nothing to do with this device, a process that
//! could not join the host's list, or whose groups are more than it has room for) may miss what is sent in the next [`LOOK_AGAIN`].
//!
//! Nobody answers for a group, so nothing waits: what finds a ring full is dropped, as by a full socket.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyverbs_net::{LOOPBACK, Members, is_handed_on};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::env::TransmitError;
use anyverbs_proto::payload::Payload;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::Qpn;
use anyverbs_proto::wire::packet::Headers;
use anyverbs_proto::wr::AddressVector;
use parking_lot::Mutex;

use super::shm::{ShmRoute, Spare};
use super::udp::{Outbox, UdpRoute};
use crate::engine::Engine;

/// How long it is not asked who has joined, while no process of this user has joined or left.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// How many routes to groups the process keeps.
const KEPT: usize = 16;

/// How datagrams to one group leave by one interface.
#[derive(Clone, Debug)]
pub(crate) struct GroupRoute {
    way: Way,
    generation: u64,
    /// By the coarse clock.
    until: Duration,
}

#[derive(Clone, Debug)]
enum Way {
    /// The members on this host, and the way to others.
    Rings { peers: Vec<ShmRoute>, own: bool, others: Option<UdpRoute> },
    /// As the kernel does.
    Kernel(UdpRoute),
    /// Through the queue of this process; whoever drains that hands them on.
    HandingOn,
}

/// The routes that the process's queue pairs use, so that who sends to several groups in turn looks no more often than who sends to one.
#[derive(Debug, Default)]
pub(crate) struct GroupRoutes {
    /// The one that was looked for last at the end.
    kept: Mutex<Vec<(AddressVector, Arc<GroupRoute>)>>,
}

impl GroupRoutes {
    pub(crate) fn find(&self, engine: &'static Engine, av: &AddressVector) -> Arc<GroupRoute> {
        // Without rings there is nothing to look for.
        if engine.shm.is_none() {
            return Arc::new(GroupRoute::new(engine, av));
        }
        let fits =
            |(a, route): &&(AddressVector, Arc<GroupRoute>)| a == av && route.is_current(engine);
        if let Some((_, route)) = self.kept.lock().iter().find(fits) {
            return Arc::clone(route);
        }
        // Without the lock: it takes system calls.
        let route = Arc::new(GroupRoute::new(engine, av));
        let mut kept = self.kept.lock();
        let (mut current, mut old): (Vec<_>, Vec<_>) = std::mem::take(&mut *kept)
            .into_iter()
            .partition(|(a, route)| a != av && route.is_current(engine));
        if current.len() == KEPT {
            old.push(current.remove(0));
        }
        current.push((*av, Arc::clone(&route)));
        *kept = current;
        // What they hold may end now.
        drop(kept);
        drop(old);
        route
    }

    /// A process has ended: its ring is not kept for the sake of groups that nobody sends to.
    pub(crate) fn forget(&self) {
        let old = std::mem::take(&mut *self.kept.lock());
        drop(old);
    }
}

impl GroupRoute {
    fn new(engine: &'static Engine, av: &AddressVector) -> Self {
        let until = engine.coarse.soon() + LOOK_AGAIN;
        let (group, interface) = (av.dgid.to_ip(), av.scope_id);
        let members = engine.shm.as_ref().and_then(|_| {
            let members = engine.port.members(group, interface);
            let unknown = |error: &_| tracing::debug!(%error, %group, "members are not known");
            members.inspect_err(unknown).ok().flatten()
        });
        let generation = members.as_ref().map_or(0, |members| members.generation);
        let way = members.and_then(|members| rings(engine, av, &members)).unwrap_or_else(|| {
            if is_handed_on(group, interface) {
                Way::HandingOn
            } else {
                Way::Kernel(UdpRoute::new(engine, av, Qpn::MULTICAST.slot()))
            }
        });
        Self { way, generation, until }
    }

    /// Whether it is still right. No system call.
    #[inline]
    pub(crate) fn is_current(&self, engine: &Engine) -> bool {
        engine.shm.is_none()
            || self.generation == engine.port.groups_generation()
                && engine.coarse.soon() < self.until
    }

    /// Sends a datagram; counts it.
    #[expect(clippy::too_many_arguments, reason = "the parts of one packet")]
    pub(crate) fn send(
        &self,
        out: &mut Outbox,
        spare: &mut Spare,
        engine: &'static Engine,
        from: Qpn,
        now: impl Fn() -> Time,
        av: &AddressVector,
        headers: &Headers,
        payload: &Payload<'_>,
    ) -> Result<(), TransmitError> {
        // First, since it is the only part that may have to be done again.
        let queue = |hand_on| {
            let queued = engine.inproc.send(engine, from, false, hand_on, av, headers, payload);
            queued.map(|bytes| count(engine, bytes))
        };
        match &self.way {
            Way::Kernel(udp) => out.send(engine, udp, from, false, now(), headers, payload),
            Way::HandingOn => queue(true),
            Way::Rings { peers, own, others } => {
                if *own {
                    queue(false)?;
                }
                for peer in peers {
                    if !peer.offer(&mut out.shm, spare, engine, headers, payload)? {
                        engine.send_drops.fetch_add(1, Ordering::Relaxed);
                    }
                }
                match others {
                    Some(udp) => out.send(engine, udp, from, false, now(), headers, payload),
                    None => Ok(()),
                }
            }
        }
    }
}

fn count(engine: &Engine, bytes: usize) {
    engine.count(Counter::SentPkts, 1);
    engine.count(Counter::SentBytes, bytes as u64);
}

/// The way by rings, where there is one to each member.
fn rings(engine: &'static Engine, av: &AddressVector, members: &Members) -> Option<Way> {
    let shm = engine.shm.as_ref().filter(|_| av.scope_id != 0)?;
    let own = members.slots.contains(&engine.slot);
    if own && !engine.config.inproc {
        return None;
    }
    // Who has ended since it was listed has no ring, and is not counted. Where the kernel counts it still, all get the kernel's copy.
    let others = members.slots.iter().filter(|slot| **slot != engine.slot);
    let peers: Vec<_> =
        others.filter_map(|slot| ShmRoute::of_group(engine, shm, av, *slot)).collect();
    if peers.len() + usize::from(own) != members.count {
        return None;
    }
    // There is nobody else on the loopback interface.
    let others = (av.scope_id != LOOPBACK).then(|| UdpRoute::to_others(engine, av));
    Some(Way::Rings { peers, own, others })
}

#[cfg(test)]
mod tests {
    use anyverbs_proto::types::Gid;
    use anyverbs_testing::in_own_process;

    use super::*;
    use crate::engine::gsi::tests::isolate;

    fn av(n: u16) -> AddressVector {
        let ip = |s: String| Gid::from(s.parse::<std::net::IpAddr>().unwrap());
        AddressVector {
            dgid: ip(format!("239.4.8.{n}")),
            sgid: ip("127.0.0.1".into()),
            scope_id: LOOPBACK,
            ..AddressVector::default()
        }
    }

    #[test]
    fn who_sends_to_groups_in_turn_looks_as_seldom_as_for_one() {
        let name = "link::group::tests::who_sends_to_groups_in_turn_looks_as_seldom_as_for_one";
        in_own_process(name, || {
            isolate();
            let engine = Engine::current().unwrap();
            assert!(engine.shm.is_some());
            let routes = &engine.groups.routes;
            let all: Vec<_> = (0..KEPT as u16).map(av).collect();
            let mut before: Vec<Option<Arc<GroupRoute>>> = vec![None; KEPT];
            for _ in 0..100 {
                for (av, before) in all.iter().zip(&mut before) {
                    let route = routes.find(engine, av);
                    // It is another one only where the time has come to look again.
                    let last = before.replace(Arc::clone(&route));
                    assert!(last.is_none_or(|l| Arc::ptr_eq(&l, &route) || !l.is_current(engine)));
                }
            }
            // One more takes the place of another, and who has ended leaves nothing.
            (0..100).for_each(|n| drop(routes.find(engine, &av(n))));
            assert!(routes.kept.lock().len() <= KEPT);
            // A change is seen at once.
            let route = routes.find(engine, &av(0));
            engine.port.join_multicast("239.4.8.200".parse().unwrap(), LOOPBACK).unwrap();
            assert!(!Arc::ptr_eq(&route, &routes.find(engine, &av(0))));
            routes.forget();
            assert!(routes.kept.lock().is_empty());
        });
    }
}

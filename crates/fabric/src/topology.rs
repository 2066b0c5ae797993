//! Hosts, switches, the links between them, and the ways through them.

use std::collections::{HashMap, VecDeque};

use serde::Deserialize;

/// Most ways that switches know: a number for each switch and host.
const MAX_WAYS: usize = 20_000_000;
/// Most links between leaves and spines.
const MAX_LINKS: usize = 200_000;

/// A link: its two directions are alike.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Link {
    /// Gigabits a second.
    pub gbps: f64,
    /// Microseconds from end to end.
    pub delay_us: f64,
    /// Bytes that may wait for it in a switch. A host's packets wait in its queue pairs.
    pub queue_bytes: u64,
    /// Bytes in the queue from which on packets are marked.
    pub kmin_bytes: u64,
    /// Bytes in the queue from which on all packets are marked.
    pub kmax_bytes: u64,
    /// The share that is marked just below `kmax_bytes`.
    pub pmax: f64,
    /// The share of packets that it loses by chance.
    pub loss: f64,
}

impl Default for Link {
    /// 100 Gbit/s, 1 us, and marks as the makers of HPCC set them for DCQCN at this rate.
    fn default() -> Self {
        Self {
            gbps: 100.0,
            delay_us: 1.0,
            queue_bytes: 4_000_000,
            kmin_bytes: 400_000,
            kmax_bytes: 1_600_000,
            pmax: 0.2,
            loss: 0.0,
        }
    }
}

impl Link {
    /// The reason why it makes no sense.
    pub(crate) fn check(&self) -> Result<(), String> {
        let Self { gbps, delay_us, queue_bytes, kmin_bytes, kmax_bytes, pmax, loss } = *self;
        if !(0.001..=10_000.0).contains(&gbps) {
            return Err(format!("gbps = {gbps}: expected 0.001 to 10000"));
        }
        if !(0.0..=1e6).contains(&delay_us) {
            return Err(format!("delay_us = {delay_us}: expected 0 to 1000000"));
        }
        if !(10_000..=1 << 30).contains(&queue_bytes) {
            return Err(format!(
                "queue_bytes = {queue_bytes}: expected 10000 (two packets) to {}",
                1 << 30
            ));
        }
        if kmin_bytes > queue_bytes {
            return Err(format!(
                "kmin_bytes = {kmin_bytes} is above queue_bytes = {queue_bytes}: no packet would be marked"
            ));
        }
        if kmin_bytes > kmax_bytes {
            return Err(format!("kmin_bytes = {kmin_bytes} is above kmax_bytes = {kmax_bytes}"));
        }
        if !(0.0..=1.0).contains(&pmax) {
            return Err(format!("pmax = {pmax}: expected 0 to 1"));
        }
        if !(0.0..=0.5).contains(&loss) {
            return Err(format!("loss = {loss}: expected 0 to 0.5"));
        }
        Ok(())
    }

    /// Picoseconds of a byte.
    pub(crate) fn ps_per_byte(&self) -> f64 {
        8000.0 / self.gbps
    }
}

/// One direction of a link, at the node that sends on it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Port {
    pub(crate) to: u32,
    pub(crate) link: Link,
}

/// Nodes are numbers: the hosts first, then the switches.
#[derive(Clone, Debug)]
pub struct Topology {
    names: Vec<String>,
    hosts: usize,
    pub(crate) ports: Vec<Port>,
    /// The ports of each node.
    ports_of: Vec<Vec<u32>>,
    /// Sets of ports, and for each switch and host the set by which packets go there.
    sets: Vec<Vec<u32>>,
    ways: Vec<u32>,
}

impl Topology {
    /// `links` has the numbers of two nodes each.
    pub(crate) fn new(
        names: Vec<String>,
        hosts: usize,
        links: &[(usize, usize, Link)],
    ) -> Result<Self, String> {
        if (names.len() - hosts).saturating_mul(hosts) > MAX_WAYS {
            return Err(format!("{} switches are too many for {hosts} hosts", names.len() - hosts));
        }
        let mut ports_of = vec![Vec::new(); names.len()];
        let mut ports = Vec::with_capacity(links.len() * 2);
        for &(a, b, link) in links {
            for (from, to) in [(a, b), (b, a)] {
                ports_of[from].push(ports.len() as u32);
                ports.push(Port { to: to as u32, link });
            }
        }
        if let Some(host) = (0..hosts).find(|host| ports_of[*host].len() != 1) {
            let n = ports_of[host].len();
            return Err(format!("host {} has {n} links: expected 1", names[host]));
        }
        let mut topology =
            Self { names, hosts, ports, ports_of, sets: Vec::new(), ways: Vec::new() };
        topology.find_ways()?;
        Ok(topology)
    }

    /// All hosts at one switch.
    pub(crate) fn star(hosts: usize, link: Link) -> Result<Self, String> {
        let mut names = host_names(hosts);
        names.push("switch".to_owned());
        let links: Vec<_> = (0..hosts).map(|host| (host, hosts, link)).collect();
        Self::new(names, hosts, &links)
    }

    /// Leaf switches with some hosts each, and spine switches that have a link to every leaf.
    pub(crate) fn two_tier(
        hosts: usize,
        hosts_per_leaf: usize,
        spines: usize,
        link: Link,
        uplink: Link,
    ) -> Result<Self, String> {
        let leaves = hosts.div_ceil(hosts_per_leaf);
        if leaves * spines > MAX_LINKS {
            return Err(format!("{leaves} leaves and {spines} spines have too many links"));
        }
        let mut names = host_names(hosts);
        names.extend((0..leaves).map(|n| format!("leaf{n}")));
        names.extend((0..spines).map(|n| format!("spine{n}")));
        let mut links: Vec<_> =
            (0..hosts).map(|host| (host, hosts + host / hosts_per_leaf, link)).collect();
        for leaf in 0..leaves {
            links.extend((0..spines).map(|spine| (hosts + leaf, hosts + leaves + spine, uplink)));
        }
        Self::new(names, hosts, &links)
    }

    /// The number of hosts.
    #[must_use]
    pub fn hosts(&self) -> usize {
        self.hosts
    }

    /// The number of switches.
    #[must_use]
    pub fn switches(&self) -> usize {
        self.names.len() - self.hosts
    }

    /// The number of links.
    #[must_use]
    pub fn links(&self) -> usize {
        self.ports.len() / 2
    }

    /// The name of a node.
    #[cfg(test)]
    pub(crate) fn name(&self, node: usize) -> &str {
        &self.names[node]
    }

    /// The port of a host.
    pub(crate) fn host_port(&self, host: u32) -> usize {
        self.ports_of[host as usize][0] as usize
    }

    /// The port by which a switch sends the packets of a flow to a host: one of those on the shortest ways (ECMP).
    pub(crate) fn next_port(&self, node: u32, host: u32, flow: u32) -> usize {
        let row = node as usize - self.hosts;
        let set = &self.sets[self.ways[row * self.hosts + host as usize] as usize];
        if let [port] = set[..] {
            return port as usize;
        }
        // Each switch must choose by another hash than those before it.
        let hash = mix(u64::from(flow) << 32 | u64::from(node));
        set[(hash % set.len() as u64) as usize] as usize
    }

    fn find_ways(&mut self) -> Result<(), String> {
        const FAR: u32 = u32::MAX;
        let nodes = self.names.len();
        let mut numbers = HashMap::new();
        self.ways = vec![0; self.switches() * self.hosts];
        for host in 0..self.hosts {
            let mut distance = vec![FAR; nodes];
            distance[host] = 0;
            let mut queue = VecDeque::from([host]);
            while let Some(node) = queue.pop_front() {
                // Hosts forward nothing.
                if node != host && node < self.hosts {
                    continue;
                }
                for port in &self.ports_of[node] {
                    let to = self.ports[*port as usize].to as usize;
                    if distance[to] == FAR {
                        distance[to] = distance[node] + 1;
                        queue.push_back(to);
                    }
                }
            }
            if let Some(from) = (0..self.hosts).find(|from| distance[*from] == FAR) {
                let (from, to) = (&self.names[from], &self.names[host]);
                return Err(format!("no way leads from {from} to {to}"));
            }
            for node in self.hosts..nodes {
                if distance[node] == FAR {
                    continue;
                }
                let leads = |port: &&u32| {
                    let to = self.ports[**port as usize].to as usize;
                    distance[to] != FAR
                        && distance[to] + 1 == distance[node]
                        && (to == host || to >= self.hosts)
                };
                let set: Vec<u32> = self.ports_of[node].iter().filter(leads).copied().collect();
                let number = *numbers.entry(set).or_insert_with_key(|set| {
                    self.sets.push(set.clone());
                    self.sets.len() as u32 - 1
                });
                self.ways[(node - self.hosts) * self.hosts + host] = number;
            }
        }
        Ok(())
    }
}

fn host_names(hosts: usize) -> Vec<String> {
    (0..hosts).map(|n| format!("h{n}")).collect()
}

/// The finalizer of SplitMix64: every bit of the result depends on every bit of the number.
pub(crate) fn mix(number: u64) -> u64 {
    let z = (number ^ number >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The nodes between two hosts.
    fn way(topology: &Topology, from: u32, to: u32, flow: u32) -> Vec<u32> {
        let mut nodes = vec![from];
        while *nodes.last().unwrap() != to {
            let port = match *nodes.last().unwrap() {
                host if (host as usize) < topology.hosts() => topology.host_port(host),
                switch => topology.next_port(switch, to, flow),
            };
            nodes.push(topology.ports[port].to);
        }
        nodes
    }

    #[test]
    fn ways_are_short_and_flows_use_every_spine() {
        let link = Link::default();
        let topology = Topology::two_tier(16, 4, 3, link, link).unwrap();
        assert_eq!((topology.switches(), topology.links()), (7, 28));
        assert_eq!(way(&topology, 0, 3, 9), [0, 16, 3]);
        let mut by_spine = [0; 3];
        for flow in 0..3000 {
            let nodes = way(&topology, 0, 15, flow);
            assert_eq!((nodes.len(), nodes[1], nodes[3]), (5, 16, 19));
            by_spine[nodes[2] as usize - 20] += 1;
        }
        assert!(by_spine.iter().all(|n| (900..1100).contains(n)), "{by_spine:?}");
    }

    #[test]
    fn hosts_forward_nothing_and_all_are_reachable() {
        let names = || ["a", "b", "s", "t"].map(str::to_owned).to_vec();
        let link = Link::default();
        let apart = Topology::new(names(), 2, &[(0, 2, link), (1, 3, link)]);
        assert_eq!(apart.unwrap_err(), "no way leads from b to a");
        let twice = Topology::new(names(), 2, &[(0, 2, link), (0, 3, link), (1, 3, link)]);
        assert_eq!(twice.unwrap_err(), "host a has 2 links: expected 1");
    }
}

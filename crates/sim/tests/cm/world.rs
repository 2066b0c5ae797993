//! Hosts with a connection manager each, and a network between them, in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::mad::Mad;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::cm::message::{Attribute, Message};
use anyverbs_proto::cm::{
    AcceptParams, Cm, CmConfig, ConnectParams, ConnectionState, Listen, ListenAddress, ListenerId,
    Path, Serves, SidrParams, Transport, Usage,
};
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, Qpn};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

/// The port of the tests' listeners.
pub(crate) const PORT: u16 = 7471;

/// The effects of the network on a datagram; probabilities from 0 to 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weather {
    pub(crate) delay: Duration,
    /// Up to this is added to each, so that they pass one another.
    pub(crate) jitter: Duration,
    pub(crate) loss: f64,
    pub(crate) duplicate: f64,
}

impl Weather {
    pub(crate) const FAIR: Self = Self {
        delay: Duration::from_micros(50),
        jitter: Duration::ZERO,
        loss: 0.0,
        duplicate: 0.0,
    };
}

/// The fate of a single datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fate {
    Pass,
    Drop,
    /// Arrives this much later.
    Delay(Duration),
    /// Arrives, and again this much later.
    Again(Duration),
}

type Rule = Box<dyn FnMut(usize, &Message) -> Fate>;

struct Flying {
    to: Gid,
    arrival: Arrival,
    bytes: Vec<u8>,
}

pub(crate) struct Host {
    pub(crate) cm: Cm,
    pub(crate) gid: Gid,
    events: VecDeque<CmEvent>,
    alive: bool,
    next_qpn: u32,
}

/// Hosts 0, 1, ... at 10.0.0.1, 10.0.0.2, ...
pub(crate) struct World {
    pub(crate) now: Time,
    pub(crate) hosts: Vec<Host>,
    flying: BTreeMap<(Time, u64), Flying>,
    sent: u64,
    pub(crate) rng: SmallRng,
    pub(crate) weather: Weather,
    /// The interface by which every host is reached: not 0 if the addresses are link-local.
    pub(crate) interface: u32,
    rules: Vec<Rule>,
    /// A line for each datagram and event.
    pub(crate) log: Vec<String>,
}

/// The parts of a connection that tests vary.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dial<'a> {
    pub(crate) port: u16,
    pub(crate) qpn: Option<Qpn>,
    pub(crate) response_timeout: u8,
    pub(crate) max_cm_retries: u8,
    pub(crate) packet_life_time: u8,
    pub(crate) transport: Transport,
    pub(crate) private_data: &'a [u8],
}

impl Default for Dial<'_> {
    fn default() -> Self {
        Self {
            port: PORT,
            qpn: None,
            response_timeout: 14,
            max_cm_retries: 15,
            packet_life_time: 12,
            transport: Transport::Rc,
            private_data: b"hello",
        }
    }
}

pub(crate) fn ip(host: usize) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, host as u8 + 1).into()
}

pub(crate) fn gid(host: usize) -> Gid {
    Gid::from(ip(host))
}

pub(crate) fn path(from: usize, to: usize) -> Path {
    Path {
        sgid: gid(from),
        dgid: gid(to),
        interface: 0,
        pkey: PKey::DEFAULT,
        mtu: Mtu::Mtu1024,
        flow_label: 0,
        traffic_class: 0,
        hop_limit: 64,
        sl: 0,
        rate: 3,
        packet_life_time: 12,
    }
}

pub(crate) fn header(from: usize, to: usize) -> IpHeader {
    IpHeader { source: SocketAddr::new(ip(from), 40000), destination: ip(to) }
}

pub(crate) fn accept_params(qpn: Qpn) -> AcceptParams<'static> {
    AcceptParams {
        qpn,
        starting_psn: Psn::new(qpn.get() * 7),
        responder_resources: 3,
        initiator_depth: 2,
        flow_control: true,
        rnr_retry_count: 6,
        srq: false,
        ece: Ece { vendor_id: 0x12_3456, options: 9 },
        private_data: b"welcome",
    }
}

impl World {
    pub(crate) fn new(seed: u64, hosts: usize) -> Self {
        Self::with_config(seed, hosts, CmConfig::default())
    }

    pub(crate) fn with_config(seed: u64, hosts: usize, config: CmConfig) -> Self {
        let mut rng = SmallRng::seed_from_u64(seed);
        let hosts = (0..hosts)
            .map(|i| {
                let (slot, first_id) = (i as u8, rng.random());
                let ca_guid = 0x100 + i as u64;
                let cm = Cm::new(CmConfig { slot, first_id, ca_guid, ..config });
                Host { cm, gid: gid(i), events: VecDeque::new(), alive: true, next_qpn: 16 }
            })
            .collect();
        Self {
            now: Time::default(),
            hosts,
            flying: BTreeMap::new(),
            sent: 0,
            rng,
            weather: Weather::FAIR,
            interface: 0,
            rules: Vec::new(),
            log: Vec::new(),
        }
    }

    /// Adds a rule, which sees every datagram that the earlier ones let pass; told the sender.
    pub(crate) fn rule(&mut self, rule: impl FnMut(usize, &Message) -> Fate + 'static) {
        self.rules.push(Box::new(rule));
    }

    /// The first `count` that `picks` picks have this fate.
    pub(crate) fn next(
        &mut self,
        mut count: usize,
        picks: impl Fn(usize, &Message) -> bool + 'static,
        fate: Fate,
    ) {
        self.rule(move |from, message| {
            if count > 0 && picks(from, message) {
                count -= 1;
                fate
            } else {
                Fate::Pass
            }
        });
    }

    pub(crate) fn clear_rules(&mut self) {
        self.rules.clear();
    }

    /// A host neither receives nor sends any more.
    pub(crate) fn kill(&mut self, host: usize) {
        self.hosts[host].alive = false;
    }

    /// A host starts anew: it has forgotten everything.
    pub(crate) fn restart(&mut self, host: usize, config: CmConfig) {
        self.hosts[host].cm = Cm::new(CmConfig { slot: host as u8, ..config });
        self.hosts[host].events.clear();
        self.hosts[host].alive = true;
    }

    pub(crate) fn qpn(&mut self, host: usize) -> Qpn {
        self.hosts[host].next_qpn += 1;
        Qpn::new((host as u32) << 16 | self.hosts[host].next_qpn)
    }

    pub(crate) fn listen(&mut self, host: usize) -> ListenerId {
        self.listen_with(host, PORT, 100)
    }

    pub(crate) fn listen_with(&mut self, host: usize, port: u16, backlog: usize) -> ListenerId {
        self.listen_as(host, port, backlog, Transport::Rc)
    }

    /// Listens for connections of this transport.
    pub(crate) fn listen_for(&mut self, host: usize, transport: Transport) -> ListenerId {
        self.listen_as(host, PORT, 100, transport)
    }

    fn listen_as(
        &mut self,
        host: usize,
        port: u16,
        backlog: usize,
        transport: Transport,
    ) -> ListenerId {
        let listen = Listen {
            service_id: ServiceId::of_port(PortSpace::Tcp, port),
            address: ListenAddress::Any,
            serves: Serves::Connections(transport),
            ip_header: true,
            backlog,
        };
        self.hosts[host].cm.listen(listen).unwrap()
    }

    pub(crate) fn connect(&mut self, from: usize, to: usize) -> CommId {
        self.dial(from, to, Dial::default())
    }

    pub(crate) fn dial(&mut self, from: usize, to: usize, dial: Dial<'_>) -> CommId {
        let qpn = dial.qpn.unwrap_or_else(|| self.qpn(from));
        let params = ConnectParams {
            service_id: ServiceId::of_port(PortSpace::Tcp, dial.port),
            addresses: Some(header(from, to)),
            path: Path {
                interface: self.interface,
                packet_life_time: dial.packet_life_time,
                ..path(from, to)
            },
            transport: dial.transport,
            qpn,
            starting_psn: Psn::new(qpn.get() * 5),
            responder_resources: 4,
            initiator_depth: 5,
            flow_control: true,
            retry_count: 7,
            rnr_retry_count: 4,
            srq: false,
            ece: Ece { vendor_id: 0x65_4321, options: 5 },
            response_timeout: dial.response_timeout,
            max_cm_retries: dial.max_cm_retries,
            private_data: dial.private_data,
        };
        self.hosts[from].cm.connect(self.now, &params).unwrap()
    }

    pub(crate) fn ask(&mut self, from: usize, to: usize) -> CommId {
        let params = SidrParams {
            service_id: ServiceId::of_port(PortSpace::Udp, PORT),
            addresses: Some(header(from, to)),
            path: Path { interface: self.interface, ..path(from, to) },
            timeout: Duration::from_millis(100),
            max_retries: 7,
            private_data: b"who",
        };
        self.hosts[from].cm.sidr_request(self.now, &params).unwrap()
    }

    pub(crate) fn accept(&mut self, host: usize, id: CommId) {
        let qpn = self.qpn(host);
        self.hosts[host].cm.accept(self.now, id, &accept_params(qpn)).unwrap();
    }

    pub(crate) fn state(&self, host: usize, id: CommId) -> ConnectionState {
        self.hosts[host].cm.state(id).unwrap()
    }

    /// Connects and tells both ids, the connecting one first.
    pub(crate) fn pair(&mut self, from: usize, to: usize) -> (CommId, CommId) {
        self.pair_by(from, to, Dial::default())
    }

    /// As [`pair`](Self::pair), dialed like this.
    pub(crate) fn pair_by(&mut self, from: usize, to: usize, dial: Dial<'_>) -> (CommId, CommId) {
        let a = self.dial(from, to, dial);
        let b = self.take_request(to);
        self.accept(to, b);
        self.run();
        match self.event(from) {
            CmEvent::ConnectResponse { id, .. } => assert_eq!(id, a),
            other => panic!("{other:?}"),
        }
        self.hosts[from].cm.ready(self.now, a, b"go").unwrap();
        self.run();
        match self.event(to) {
            CmEvent::Established { id, .. } => assert_eq!(id, b),
            other => panic!("{other:?}"),
        }
        (a, b)
    }

    /// Runs until a connection request is there, and takes it.
    pub(crate) fn take_request(&mut self, host: usize) -> CommId {
        self.run();
        match self.event(host) {
            CmEvent::ConnectRequest { id, .. } => {
                self.hosts[host].cm.take_request(id).unwrap();
                id
            }
            other => panic!("{other:?}"),
        }
    }

    /// The next event of a host, which must be there.
    #[track_caller]
    pub(crate) fn event(&mut self, host: usize) -> CmEvent {
        self.poll_event(host).unwrap_or_else(|| panic!("no event\n{}", self.log.join("\n")))
    }

    /// Runs until a host has an event.
    #[track_caller]
    pub(crate) fn wait_event(&mut self, host: usize) -> CmEvent {
        let day = self.now + Duration::from_secs(86_400);
        loop {
            if let Some(event) = self.poll_event(host) {
                return event;
            }
            assert!(self.step(day), "no event\n{}", self.log.join("\n"));
        }
    }

    pub(crate) fn poll_event(&mut self, host: usize) -> Option<CmEvent> {
        let polled = self.hosts[host].cm.poll_event();
        if let Some(event) = &polled {
            let name = format!("{event:?}");
            let name = name.split([' ', '(']).next().unwrap_or_default();
            self.log.push(format!("{:?} {host}: {name} {}", self.now, event.id()));
        }
        polled
    }

    fn pick_up(&mut self) {
        for from in 0..self.hosts.len() {
            while let Some(out) = self.hosts[from].cm.poll_transmit(self.now) {
                assert_eq!(out.sgid, self.hosts[from].gid, "from another address");
                if !self.hosts[from].alive {
                    continue;
                }
                let mad = Mad::parse(&out.mad.emit()).expect("ours");
                let fates = self.rules.iter_mut().map(|rule| rule(from, &mad.message));
                let fate = fates.fold(Fate::Pass, |a, b| if a == Fate::Pass { b } else { a });
                let mut line = format!("{:?} {from}: {mad}", self.now);
                let mut arrivals = Vec::new();
                let Weather { delay, jitter, loss, duplicate } = self.weather;
                let up_to = |rng: &mut SmallRng, most: Duration| {
                    Duration::from_nanos(rng.random_range(0..=most.as_nanos() as u64))
                };
                match fate {
                    Fate::Drop => line.push_str(" DROPPED"),
                    Fate::Delay(by) => arrivals.push(delay + by),
                    Fate::Again(by) => arrivals.extend([delay, delay + by]),
                    Fate::Pass if self.rng.random_bool(loss) => line.push_str(" LOST"),
                    Fate::Pass => {
                        arrivals.push(delay + up_to(&mut self.rng, jitter));
                        if self.rng.random_bool(duplicate) {
                            arrivals.push(delay + up_to(&mut self.rng, jitter * 3));
                        }
                    }
                }
                self.log.push(line);
                for after in arrivals {
                    let arrival = Arrival {
                        source: out.sgid,
                        destination: out.dgid,
                        traffic_class: out.traffic_class,
                        hop_limit: out.hop_limit,
                        flow_label: out.flow_label,
                        interface: out.interface,
                        port: 0,
                    };
                    let flying = Flying { to: out.dgid, arrival, bytes: out.mad.emit().to_vec() };
                    self.sent += 1;
                    self.flying.insert((self.now + after, self.sent), flying);
                }
            }
        }
    }

    /// The number of datagrams that a host has sent.
    pub(crate) fn datagrams(&self, host: usize) -> u64 {
        let sent = &self.hosts[host].cm.counters().tx_msgs;
        Attribute::ALL.iter().map(|attribute| sent.of(*attribute)).sum()
    }

    /// Hands a host any bytes, as from another.
    pub(crate) fn inject(&mut self, from: Gid, to: usize, bytes: &[u8]) {
        let arrival = Arrival {
            source: from,
            destination: self.hosts[to].gid,
            traffic_class: 0,
            hop_limit: 64,
            flow_label: 0,
            interface: self.interface,
            port: 0,
        };
        self.hosts[to].cm.handle(self.now, &arrival, bytes);
    }

    /// Handles one datagram, or the timers of one moment. False if nothing is left, or nothing before `until`.
    pub(crate) fn step(&mut self, until: Time) -> bool {
        self.pick_up();
        let alive = self.hosts.iter().filter(|h| h.alive);
        let timer = alive.filter_map(|h| h.cm.deadline()).min();
        let arrival = self.flying.first_key_value().map(|((at, _), _)| *at);
        let Some(next) = [timer, arrival].into_iter().flatten().min() else { return false };
        if next > until {
            return false;
        }
        self.now = self.now.max(next);
        if arrival == Some(next) {
            let (_, flying) = self.flying.pop_first().unwrap();
            let host = self.hosts.iter_mut().find(|h| h.gid == flying.to && h.alive);
            if let Some(host) = host {
                host.cm.handle(self.now, &flying.arrival, &flying.bytes);
            }
        } else {
            for host in self.hosts.iter_mut().filter(|h| h.alive) {
                host.cm.on_timer(self.now);
                assert!(host.cm.deadline().is_none_or(|d| d > self.now), "a timer that stays due");
            }
        }
        self.pick_up();
        true
    }

    /// Runs for 5 ms: datagrams, but hardly a timer.
    pub(crate) fn run(&mut self) {
        self.run_for(Duration::from_millis(5));
    }

    pub(crate) fn run_for(&mut self, time: Duration) {
        let until = self.now + time;
        while self.step(until) {}
        self.now = until;
    }

    /// Runs until nothing happens any more; a virtual day must be enough.
    pub(crate) fn run_out(&mut self) {
        let day = self.now + Duration::from_secs(86_400);
        while self.step(day) {}
        assert!(self.flying.is_empty());
        for host in self.hosts.iter().filter(|h| h.alive) {
            assert_eq!(host.cm.deadline(), None, "timers end\n{}", self.log.join("\n"));
        }
    }

    /// All tables are empty but for this many listeners.
    #[track_caller]
    pub(crate) fn assert_empty(&mut self) {
        for host in (0..self.hosts.len()).filter(|h| self.hosts[*h].alive).collect::<Vec<_>>() {
            while self.poll_event(host).is_some() {}
            let usage = self.hosts[host].cm.usage();
            let expected = Usage { listeners: usage.listeners, ..Usage::default() };
            assert_eq!(usage, expected, "host {host}\n{}", self.log.join("\n"));
        }
    }

    /// Destroys everything everywhere, waits, and checks that nothing is left.
    pub(crate) fn tear_down(&mut self) {
        for host in &mut self.hosts {
            host.cm.shutdown(self.now);
        }
        self.run_out();
        self.assert_empty();
    }
}

//! MADs of any bytes, and a connection manager to which they happen in any order with any calls.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyverbs_proto::cm::event::CmEvent;
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::mad::{MAD_LEN, Mad};
use anyverbs_proto::cm::message::code::{RejReason, SidrStatus};
use anyverbs_proto::cm::message::{Attribute, BODY_LEN, Message};
use anyverbs_proto::cm::{
    AcceptParams, Cm, CmConfig, ConnectParams, ConnectionState, Listen, ListenAddress, ListenerId,
    Path, Serves, SidrAnswer, SidrParams, Transport, Usage, recipient,
};
use anyverbs_proto::qp::Arrival;
use anyverbs_proto::time::Time;
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, QKey, Qpn};

/// Most connections that the victim may have.
const MOST: usize = 12;

/// Hosts: the victim, its friend, and a stranger that has no CM but the input. The stranger can also send from the friend's
/// address.
const VICTIM: u8 = 1;
const FRIEND: u8 = 2;
const STRANGER: u8 = 3;

fn gid(host: u8) -> Gid {
    Gid::from(ip(host))
}

fn ip(host: u8) -> IpAddr {
    Ipv4Addr::new(10, 0, 0, host).into()
}

/// Any bytes as a MAD: a message that parses is written as the same message.
pub fn parse(bytes: &[u8]) {
    let mad = match Mad::parse(bytes) {
        Ok(mad) => mad,
        Err(reason) => {
            assert!(!reason.to_string().is_empty());
            return;
        }
    };
    assert!(!mad.to_string().contains('\n'));
    let written = mad.emit();
    assert_eq!(Mad::parse(&written), Ok(mad.clone()));
    let _ = recipient(&mad);
}

/// The input as a list of steps; see `World::step`.
pub fn run(input: &[u8]) {
    parse(input);
    let mut world = World::new();
    let mut rest = input;
    for _ in 0..200 {
        if rest.is_empty() {
            break;
        }
        world.step(&mut rest);
        world.check();
    }
    world.finish();
}

struct World {
    now: Time,
    victim: Cm,
    friend: Cm,
    /// The connection of the two: the victim's ID, the friend's.
    bystander: (CommId, CommId),
    listeners: Vec<ListenerId>,
    /// Names that the input may use: all that the victim gave or was given.
    ids: Vec<CommId>,
}

fn byte(rest: &mut &[u8]) -> u8 {
    match rest.split_first() {
        Some((first, tail)) => {
            *rest = tail;
            *first
        }
        None => 0,
    }
}

fn bytes<'a>(rest: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (head, tail) = rest.split_at(most.min(rest.len()));
    *rest = tail;
    head
}

impl World {
    fn new() -> Self {
        let config = CmConfig {
            quick_repeats: true,
            max_connections: MOST,
            max_orphans: MOST,
            ..CmConfig::default()
        };
        let cm = |slot| Cm::new(CmConfig { slot, first_id: 0x0100, ..config });
        let mut world = Self {
            now: Time::default(),
            victim: cm(VICTIM),
            friend: cm(FRIEND),
            bystander: (CommId::NONE, CommId::NONE),
            listeners: Vec::new(),
            ids: Vec::new(),
        };
        world.befriend();
        world
    }

    fn befriend(&mut self) {
        self.listen(0);
        let a = self.friend.connect(self.now, &connect(FRIEND, VICTIM, &[])).expect("valid");
        self.carry();
        let Some(CmEvent::ConnectRequest { id: b, .. }) = self.victim.poll_event() else {
            panic!("a request has come");
        };
        self.victim.accept(self.now, b, &accept(&[])).expect("it waits for it");
        self.carry();
        assert!(matches!(self.friend.poll_event(), Some(CmEvent::ConnectResponse { .. })));
        self.friend.ready(self.now, a, &[]).expect("it waits for it");
        self.carry();
        assert!(matches!(self.victim.poll_event(), Some(CmEvent::Established { .. })));
        self.bystander = (b, a);
        self.ids.extend([a, b]);
    }

    /// Carries messages between the two. Messages to the stranger are looked at.
    fn carry(&mut self) {
        loop {
            let mut quiet = true;
            for from in [VICTIM, FRIEND] {
                let cm = if from == VICTIM { &mut self.victim } else { &mut self.friend };
                let Some(out) = cm.poll_transmit(self.now) else { continue };
                quiet = false;
                assert_eq!(out.sgid, gid(from));
                let mad = Mad::parse(&out.mad.emit()).expect("well-formed");
                let arrival = arrival(out.sgid, out.dgid);
                if out.dgid == gid(VICTIM) {
                    self.victim.handle(self.now, &arrival, &out.mad.emit());
                } else if out.dgid == gid(FRIEND) {
                    self.friend.handle(self.now, &arrival, &out.mad.emit());
                } else {
                    self.learn(&mad.message);
                }
            }
            if quiet {
                break;
            }
        }
    }

    /// The stranger learns names from messages to it.
    fn learn(&mut self, message: &Message) {
        let id = match message {
            Message::Req(req) => req.local_comm_id,
            Message::Rep(rep) => rep.local_comm_id,
            Message::SidrReq(req) => req.request_id,
            _ => return,
        };
        if self.ids.len() < 64 {
            self.ids.push(id);
        }
    }

    fn listen(&mut self, choice: u8) {
        let datagrams = choice & 1 != 0;
        let space = if datagrams { PortSpace::Udp } else { PortSpace::Tcp };
        let serves = if datagrams { Serves::Datagrams } else { Serves::Connections(Transport::Rc) };
        let address = match choice >> 1 & 3 {
            0 => ListenAddress::Any,
            1 => ListenAddress::AnyV4,
            2 => ListenAddress::AnyV6,
            _ => ListenAddress::Ip(ip(VICTIM)),
        };
        let listen = Listen {
            service_id: ServiceId::of_port(space, 7471),
            address,
            serves,
            ip_header: choice & 8 == 0,
            backlog: 4,
        };
        if let Ok(id) = self.victim.listen(listen) {
            self.listeners.push(id);
        }
    }

    fn id(&self, choice: u8) -> CommId {
        self.ids[usize::from(choice) % self.ids.len()]
    }

    fn inject(&mut self, source: u8, bytes: &[u8]) {
        // Both IDs of the bystander are the only difference between the friend and a forger of its address.
        let names_both = bytes.len() == MAD_LEN && {
            let body = &bytes[MAD_LEN - BODY_LEN..];
            body[..4] == self.bystander.1.0.to_be_bytes()
                && body[4..8] == self.bystander.0.0.to_be_bytes()
        };
        if source == FRIEND && names_both {
            return;
        }
        self.victim.handle(self.now, &arrival(gid(source), gid(VICTIM)), bytes);
    }

    fn step(&mut self, rest: &mut &[u8]) {
        let op = byte(rest);
        let id = self.id(byte(rest));
        // Errors: calls of a program that is mistaken are refused; the bystander's is not.
        let is_ours = id != self.bystander.0;
        let now = self.now;
        let data =
            if op & 0x80 == 0 { &[][..] } else { &[0x5a; 240][..usize::from(op & 0x7f) * 2 % 240] };
        match op % 16 {
            0 => {
                let source = if op & 0x10 == 0 { STRANGER } else { FRIEND };
                self.inject(source, bytes(rest, MAD_LEN));
            }
            1..=4 => {
                let source = if op & 0x10 == 0 { STRANGER } else { FRIEND };
                let mad = self.forge(op % 16, source, id, rest);
                parse(&mad);
                self.inject(source, &mad);
            }
            5 | 6 => {
                self.now = now + Duration::from_micros(1 << (byte(rest) % 34));
                self.victim.on_timer(self.now);
                self.friend.on_timer(self.now);
                assert!(self.victim.deadline().is_none_or(|at| at > self.now));
            }
            7 => {
                let _ = self
                    .victim
                    .connect(now, &connect(VICTIM, STRANGER, data))
                    .map(|id| self.ids.push(id));
            }
            8 if is_ours => {
                let _ = self.victim.accept(now, id, &accept(data));
            }
            9 if is_ours => {
                let reason = RejReason::from_code(byte(rest).into());
                let _ = self.victim.reject(now, id, reason, data, data);
            }
            10 if is_ours => {
                let _ = self.victim.ready(now, id, data);
            }
            11 if is_ours => {
                let _ = self.victim.establish(id);
            }
            12 if is_ours => {
                let _ = self.victim.disconnect(now, id, data);
            }
            13 if is_ours => {
                let _ = self.victim.destroy(now, id);
            }
            14 => {
                let answer = SidrAnswer {
                    status: SidrStatus::Valid,
                    qpn: Qpn::new(9),
                    qkey: QKey(1),
                    ece: Default::default(),
                    private_data: data,
                };
                let _ = self.victim.sidr_reply(now, id, &answer);
                let ConnectParams { service_id, addresses, path, .. } =
                    connect(VICTIM, STRANGER, data);
                let timeout = Duration::from_millis(100);
                let ask = SidrParams {
                    service_id,
                    addresses,
                    path,
                    timeout,
                    max_retries: 3,
                    private_data: data,
                };
                let _ = self.victim.sidr_request(now, &ask).map(|id| self.ids.push(id));
            }
            15 => match byte(rest) {
                choice @ 0..128 => self.listen(choice),
                choice => {
                    let at = usize::from(choice) % self.listeners.len().max(1);
                    if at < self.listeners.len() {
                        let listener = self.listeners.swap_remove(at);
                        self.victim.unlisten(now, listener).expect("it listens");
                    }
                }
            },
            _ => {}
        }
        self.carry();
    }

    /// A message with a right header and names that exist, and otherwise the input's bytes.
    fn forge(&self, how: u8, source: u8, id: CommId, rest: &mut &[u8]) -> [u8; MAD_LEN] {
        let which = usize::from(byte(rest)) % Attribute::ALL.len();
        let attribute = Attribute::ALL[which];
        let mut mad = [0; MAD_LEN];
        mad[..4].copy_from_slice(&[1, 7, 2, 3]);
        mad[15] = byte(rest) & 3;
        mad[17] = attribute as u8;
        let body = &mut mad[MAD_LEN - BODY_LEN..];
        let at = usize::from(byte(rest)) % BODY_LEN;
        let given = bytes(rest, 32);
        let given = &given[..given.len().min(BODY_LEN - at)];
        if matches!(attribute, Attribute::Req | Attribute::SidrReq) {
            body[3] = 1 + byte(rest) % 8;
            let header = header(source, VICTIM).emit();
            let service = match attribute {
                Attribute::Req => {
                    body[35 - 1] = 2 + byte(rest) % 8;
                    if how == 3 {
                        // As if the friend's queue pair, or ID, were in another connection.
                        body[32..35].copy_from_slice(&[0, 1, FRIEND]);
                    }
                    if how == 4 {
                        body[..4].copy_from_slice(&self.bystander.1.0.to_be_bytes());
                    }
                    body[48..52].copy_from_slice(&[0xff, 0xff, 0x30, 0x10]);
                    body[56..72].copy_from_slice(&gid(source).0);
                    body[72..88].copy_from_slice(&gid(VICTIM).0);
                    body[140..176].copy_from_slice(&header);
                    ServiceId::of_port(PortSpace::Tcp, 7471)
                }
                _ => {
                    body[16..52].copy_from_slice(&header);
                    ServiceId::of_port(PortSpace::Udp, 7471)
                }
            };
            body[8..16].copy_from_slice(&service.0.to_be_bytes());
        } else {
            body[3] = 1 + byte(rest) % 8;
            let ours = if attribute == Attribute::SidrRep { 0 } else { 4 };
            body[ours..ours + 4].copy_from_slice(&id.0.to_be_bytes());
            if how == 2 {
                // As if from the friend's side of the bystander.
                body[..4].copy_from_slice(&self.bystander.1.0.to_be_bytes());
            }
            body[14] = 2 + byte(rest) % 8;
        }
        body[at..at + given.len()].copy_from_slice(given);
        mad
    }

    fn check(&mut self) {
        while let Some(event) = self.victim.poll_event() {
            assert_ne!(event.id(), self.bystander.0, "{event:?}");
            if self.ids.len() < 64 {
                self.ids.push(event.id());
            }
        }
        assert!(self.friend.poll_event().is_none());
        let Usage { connections, sidrs, orphans, timers, names, .. } = self.victim.usage();
        assert!(connections + sidrs <= MOST + orphans && orphans <= MOST);
        assert!(timers <= connections + sidrs && names <= 2 * connections + sidrs);
        let (b, a) = self.bystander;
        assert_eq!(self.victim.state(b), Ok(ConnectionState::Established));
        assert_eq!(self.friend.state(a), Ok(ConnectionState::Established));
    }

    /// All end, and nothing is left.
    fn finish(mut self) {
        self.victim.shutdown(self.now);
        self.friend.shutdown(self.now);
        for _ in 0..10_000 {
            self.carry();
            let next = [self.victim.deadline(), self.friend.deadline()].into_iter().flatten().min();
            let Some(next) = next else { break };
            self.now = self.now.max(next);
            self.victim.on_timer(self.now);
            self.friend.on_timer(self.now);
        }
        for cm in [&mut self.victim, &mut self.friend] {
            assert!(cm.poll_event().is_none());
            assert_eq!(cm.usage(), Usage::default());
        }
    }
}

fn arrival(source: Gid, destination: Gid) -> Arrival {
    Arrival {
        source,
        destination,
        traffic_class: 0,
        hop_limit: 64,
        flow_label: 0,
        interface: 0,
        port: 0,
    }
}

fn header(from: u8, to: u8) -> IpHeader {
    IpHeader { source: SocketAddr::new(ip(from), 1), destination: ip(to) }
}

fn connect(from: u8, to: u8, private_data: &[u8]) -> ConnectParams<'_> {
    ConnectParams {
        service_id: ServiceId::of_port(PortSpace::Tcp, 7471),
        addresses: Some(header(from, to)),
        path: Path {
            sgid: gid(from),
            dgid: gid(to),
            interface: 0,
            pkey: PKey::DEFAULT,
            mtu: Mtu::Mtu1024,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 64,
            sl: 0,
            rate: 0,
            packet_life_time: 10,
        },
        transport: Transport::Rc,
        qpn: Qpn::new(0x0100 | u32::from(from)),
        starting_psn: Psn::new(1),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        ece: Default::default(),
        response_timeout: 12,
        max_cm_retries: 3,
        private_data,
    }
}

fn accept(private_data: &[u8]) -> AcceptParams<'_> {
    AcceptParams {
        qpn: Qpn::new(0x0200),
        starting_psn: Psn::new(2),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        ece: Default::default(),
        private_data,
    }
}

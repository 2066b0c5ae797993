//! The machine alone, over the device: connections between this process and others of its host, or of another.

mod hosts;
mod neighbours;
mod records;
mod strangers;

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyverbs_net::{Reservation, ServiceAddress};
use anyverbs_objects::async_event::AsyncQueue;
use anyverbs_objects::command::CommandFile;
use anyverbs_objects::config::Config;
use anyverbs_objects::context_cell::ContextCell;
use anyverbs_objects::cq::{Cq, CqCell, CqInitAttr};
use anyverbs_objects::limits::DEFAULT;
use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::message::Attribute;
use anyverbs_proto::cm::message::code::RejReason;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::cm::{
    AcceptParams, CmConfig, ConnectParams, Listen, ListenAddress, ListenerId, Path, Serves,
    Transport,
};
use anyverbs_proto::counters::Counter;
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, Qpn};
use anyverbs_proto::wc::Wc;
use anyverbs_testing::{Stopwatch, isolate_device};
use anyverbs_transport::progress::worker::Starter;
use anyverbs_transport::progress::{Above, Driver, Frames};
use anyverbs_transport::qp::owed::Debt;
use anyverbs_transport::{DataPath, leak};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::STEERING;
use crate::Gsi;

/// Takes the machine's events where no ids were made.
#[derive(Debug, Default)]
pub(super) struct Tap {
    on: bool,
    events: VecDeque<CmEvent>,
}

impl Tap {
    pub(super) fn take(&mut self, event: CmEvent) -> Option<CmEvent> {
        if !self.on {
            return Some(event);
        }
        self.events.push_back(event);
        None
    }
}

const ROLE: &str = "ANYVERBS_TEST_CM_ROLE";
const TIMEOUT: Duration = Duration::from_secs(20);

struct NoFrames;

impl Frames for NoFrames {
    fn receive(&self) -> usize {
        0
    }

    fn dropped(&self) -> u64 {
        0
    }

    fn fds(&self) -> Vec<BorrowedFd<'_>> {
        Vec::new()
    }

    fn fail_users(&self, _overrun: &dyn Fn(&Arc<CqCell>) -> bool) {}

    fn fail_device(&self, _device: usize) {}
}

/// QP1 of this process, on a data path without XRC domains and raw packets.
pub(crate) struct Device {
    pub(crate) gsi: &'static Gsi,
    pub(crate) driver: &'static Driver,
}

impl Device {
    pub(crate) fn current() -> &'static Self {
        static DEVICE: OnceLock<Device> = OnceLock::new();
        DEVICE.get_or_init(|| {
            let (device, starter) = Self::open();
            starter.send(device.driver).unwrap();
            device
        })
    }

    /// The only device of a process, and what starts its worker.
    fn open() -> (Self, Starter) {
        isolate_device();
        let mut rng = StdRng::from_os_rng();
        let path =
            DataPath::open(Config::load().unwrap(), [DEFAULT].into(), Some(STEERING), &mut rng)
                .unwrap();
        let DataPath { transport, driver, services, kept, starter } = path;
        let config = CmConfig {
            slot: transport.core.slot,
            quick_repeats: true,
            records: true,
            first_id: rng.random(),
            ack_delay: DEFAULT.local_ca_ack_delay,
            max_rd_atomic: DEFAULT.max_qp_rd_atom.try_into().unwrap(),
            ..CmConfig::default()
        };
        let gsi = leak(Gsi::new(transport, driver, services, config, rng.random(), kept));
        assert!(driver.above.set(Above { management: gsi, frames: &NoFrames }).is_ok());
        (Self { gsi, driver }, starter)
    }
}

pub(super) fn gsi() -> &'static Gsi {
    let gsi = Device::current().gsi;
    gsi.state.lock().tap.on = true;
    gsi
}

/// A completion queue for 16 completions.
pub(crate) fn cq(gsi: &'static Gsi) -> Cq {
    Cq::create(gsi.core(), &context(), &CqInitAttr::new(16)).unwrap()
}

/// A context of a device of any name.
pub(crate) fn context() -> Arc<ContextCell> {
    let command = CommandFile::create("tests").unwrap();
    Arc::new(ContextCell { device: 0, events: AsyncQueue::new().unwrap(), command })
}

fn service(port: u16) -> ServiceId {
    ServiceId::of_port(PortSpace::Tcp, port)
}

fn listen(gsi: &'static Gsi, port: u16) -> (ListenerId, Reservation) {
    let services = &gsi.services;
    let held = services.reserve(service(port).0, ServiceAddress::Any, false).unwrap();
    let listen = Listen {
        service_id: service(port),
        address: ListenAddress::Any,
        serves: Serves::Connections(Transport::Rc),
        ip_header: true,
        backlog: 100_000,
    };
    (gsi.with_cm(|machine, _, _| machine.listen(listen)).unwrap(), held)
}

/// The address from which `to` is reached: itself, or one of its kind.
fn source(gsi: &Gsi, to: IpAddr) -> Gid {
    let kind = |ip: IpAddr| match ip {
        IpAddr::V4(_) => 0,
        IpAddr::V6(ip) => 1 + u8::from(ip.is_unicast_link_local()),
    };
    let entries = gsi.core().gids.entries();
    let own = entries.iter().find(|e| e.gid.to_ip() == to);
    let same = |e: &&anyverbs_objects::gid::GidEntry| {
        kind(e.gid.to_ip()) == kind(to) && e.interface_name != "lo"
    };
    own.or_else(|| entries.iter().find(same)).unwrap().gid
}

fn connect(gsi: &'static Gsi, to: IpAddr, port: u16, timeout: u8) -> CommId {
    let from = source(gsi, to);
    let interface = match to {
        IpAddr::V6(ip) if ip.is_unicast_link_local() && from.to_ip() != to => {
            gsi.core().gids.interface_of(from).unwrap()
        }
        _ => 0,
    };
    let params = ConnectParams {
        service_id: service(port),
        addresses: Some(IpHeader {
            source: SocketAddr::new(from.to_ip(), 40_000),
            destination: to,
        }),
        path: Path {
            sgid: from,
            dgid: Gid::from(to),
            interface,
            pkey: PKey::DEFAULT,
            mtu: Mtu::Mtu1024,
            flow_label: 0,
            traffic_class: 0,
            hop_limit: 64,
            sl: 0,
            rate: 0,
            packet_life_time: 12,
        },
        transport: Transport::Rc,
        qpn: qpn(gsi),
        starting_psn: Psn::new(7),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        retry_count: 7,
        rnr_retry_count: 7,
        srq: false,
        ece: Ece::default(),
        response_timeout: timeout,
        max_cm_retries: 15,
        private_data: b"hello",
    };
    gsi.with_cm(|machine, _, now| machine.connect(now, &params)).unwrap()
}

/// A number that no other on this host has, nor a former owner of the slot had, as far as chance goes.
fn qpn(gsi: &Gsi) -> Qpn {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let start = std::process::id().wrapping_mul(7919);
    let number = NEXT.fetch_add(1, Ordering::Relaxed).wrapping_add(start) & 0xffff;
    Qpn::new(u32::from(gsi.core().slot) << 16 | number)
}

/// The first event of those that `wanted` likes, which leaves the others. The worker brings it.
fn event(gsi: &'static Gsi, wanted: impl Fn(&CmEvent) -> bool) -> CmEvent {
    let end = Instant::now() + TIMEOUT;
    loop {
        let mut state = gsi.state.lock();
        if let Some(at) = state.tap.events.iter().position(&wanted) {
            return state.tap.events.remove(at).unwrap();
        }
        drop(state);
        if Instant::now() >= end {
            let drops = gsi.transport.links.send_drops.load(Ordering::Relaxed);
            gsi.with_cm(|machine, _, _| {
                panic!("no event; {drops} not sent, {:?}", machine.counters());
            });
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn of(id: CommId) -> impl Fn(&CmEvent) -> bool {
    move |event| event.id() == id
}

/// The active side of a connection up to its end.
fn establish(gsi: &'static Gsi, id: CommId) {
    match event(gsi, of(id)) {
        CmEvent::ConnectResponse { .. } => {}
        other => panic!("{other:?}"),
    }
    gsi.with_cm(|machine, _, now| machine.ready(now, id, &[])).unwrap();
}

fn disconnect(gsi: &'static Gsi, id: CommId) {
    gsi.with_cm(|machine, _, now| machine.disconnect(now, id, &[])).unwrap();
    match event(gsi, of(id)) {
        CmEvent::Disconnected { how: Disconnected::Acknowledged(_), .. } => {}
        other => panic!("{other:?}"),
    }
    gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
}

/// The events of a listening process.
#[derive(Debug, Default)]
struct Seen {
    requests: usize,
    established: usize,
    ended: usize,
    /// Requests are taken, and accepted later.
    hold: bool,
    held: Vec<CommId>,
}

fn accept(gsi: &'static Gsi, id: CommId) {
    let accept = AcceptParams {
        qpn: qpn(gsi),
        starting_psn: Psn::new(9),
        responder_resources: 1,
        initiator_depth: 1,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        ece: Ece::default(),
        private_data: &[],
    };
    gsi.with_cm(|machine, _, now| machine.accept(now, id, &accept)).unwrap();
}

/// Serves all waiting events as a server does.
fn serve(gsi: &'static Gsi, seen: &mut Seen) {
    let events: Vec<_> = gsi.state.lock().tap.events.drain(..).collect();
    for event in events {
        let id = event.id();
        match event {
            CmEvent::ConnectRequest { .. } => {
                seen.requests += 1;
                gsi.with_cm(|machine, _, _| machine.take_request(id)).unwrap();
                if seen.hold {
                    seen.held.push(id);
                } else {
                    accept(gsi, id);
                }
            }
            CmEvent::Established { .. } => seen.established += 1,
            CmEvent::Disconnected { how: Disconnected::Requested(_), .. } => {
                seen.ended += 1;
                gsi.with_cm(|machine, _, now| {
                    machine.disconnect(now, id, &[]).unwrap();
                    machine.destroy(now, id).unwrap();
                });
            }
            CmEvent::Disconnected { .. } | CmEvent::Rejected { .. } => {
                seen.ended += 1;
                gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
            }
            _ => {}
        }
    }
}

/// Not a test by itself: the code of the other processes. Commands come on standard input.
#[test]
fn peer() {
    let Some(role) = std::env::var(ROLE).ok().filter(|role| role != "hosts") else { return };
    let (sender, commands) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            if sender.send(line.unwrap()).is_err() {
                break;
            }
        }
    });
    if role == "later" {
        println!("@ waits");
        commands.recv().unwrap();
    }
    let gsi = gsi();
    println!("@ slot {}", gsi.core().slot);
    let mut seen = Seen::default();
    let (mut listeners, mut connected) = (Vec::new(), Vec::new());
    loop {
        serve(gsi, &mut seen);
        match commands.recv_timeout(Duration::from_millis(1)) {
            Ok(line) => match line.split(' ').collect::<Vec<_>>()[..] {
                ["listen", port] => {
                    listeners.push(listen(gsi, port.parse().unwrap()));
                    println!("@ listens");
                }
                ["unlisten"] => {
                    for (listener, _held) in listeners.drain(..) {
                        gsi.with_cm(|machine, _, now| machine.unlisten(now, listener)).unwrap();
                    }
                    println!("@ no more");
                }
                ["hold"] => {
                    seen.hold = true;
                    println!("@ holds");
                }
                ["accept"] => {
                    for id in seen.held.drain(..) {
                        accept(gsi, id);
                    }
                    println!("@ accepted");
                }
                ["descriptors", n] => {
                    neighbours::allow_descriptors(n.parse().unwrap());
                    println!("@ allowed");
                }
                ["look"] => {
                    gsi.look_after_neighbours();
                    println!("@ looked");
                }
                ["abandoned"] => println!("@ {}", gsi.abandoned()),
                ["seen"] => {
                    println!("@ {} {} {}", seen.requests, seen.established, seen.ended);
                }
                ["counter", name] => {
                    let counter = Counter::ALL.iter().find(|c| c.name() == name).unwrap();
                    println!("@ {}", gsi.core().total(*counter));
                }
                ["connect", to, port, n, timeout] => {
                    let (to, port) = (to.parse().unwrap(), port.parse().unwrap());
                    let ids: Vec<_> = (0..n.parse().unwrap())
                        .map(|_| connect(gsi, to, port, timeout.parse().unwrap()))
                        .collect();
                    for &id in &ids {
                        establish(gsi, id);
                    }
                    connected.extend(ids);
                    println!("@ connected");
                }
                ["disconnect"] => {
                    for id in std::mem::take(&mut connected) {
                        disconnect(gsi, id);
                    }
                    println!("@ disconnected");
                }
                ref other => panic!("{other:?}"),
            },
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => {
                // As a device does when its process ends.
                return gsi.shut_down(Instant::now() + Duration::from_secs(1));
            }
        }
    }
}

struct Peer {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Peer {
    fn command() -> Command {
        isolate_device();
        Command::new(std::env::current_exe().unwrap())
    }

    fn spawn() -> Self {
        let mut peer = Self::run(Self::command(), "now");
        assert!(peer.hear().starts_with("@ slot"));
        peer
    }

    fn run(mut command: Command, role: &str) -> Self {
        let mut child = command
            .args(["--exact", "gsi::tests::peer", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin: Some(stdin), stdout }
    }

    fn say(&mut self, line: &str) {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the peer ended");
            if let Some(at) = line.find('@') {
                return line[at..].trim().to_owned();
            }
        }
    }

    /// Lets it end by itself.
    fn close(&mut self) {
        self.stdin = None;
    }

    fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.hear()
    }

    /// Asks until the answer is this.
    fn expect(&mut self, line: &str, answer: &str) {
        let end = Instant::now() + TIMEOUT;
        loop {
            let heard = self.ask(line);
            if heard == answer {
                return;
            }
            assert!(Instant::now() < end, "{line}: {heard}, not {answer}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The tests share one machine, and count its messages.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn an_acknowledgement_that_is_owed_precedes_a_mad() {
    let _turn = turn();
    let gsi = gsi();
    let nobody = Qpn::new(0xff_fffe);
    gsi.transport.owed.note(nobody, &mut Debt::default(), true);
    gsi.with_cm(|_, _, _| ());
    assert!(gsi.transport.owed.pop() != Some(nobody));
}

#[test]
fn one_process_connects_to_itself() {
    let _turn = turn();
    let gsi = gsi();
    let (listener, held) = listen(gsi, 1000);
    for address in ["127.0.0.1", "::1"] {
        let id = connect(gsi, ip(address), 1000, 20);
        let is_request = |e: &CmEvent| matches!(e, CmEvent::ConnectRequest { listener: l, .. } if *l == listener);
        let request = event(gsi, is_request);
        let theirs = request.id();
        gsi.state.lock().tap.events.push_back(request);
        let mut seen = Seen::default();
        serve(gsi, &mut seen);
        assert_eq!(seen.requests, 1);
        establish(gsi, id);
        event(gsi, of(theirs));
        // While nothing happens, no timer runs; but that others were watched may take a look to find out.
        let end = Instant::now() + TIMEOUT;
        while Device::current().driver.next_deadline() != super::NEVER {
            assert!(Instant::now() < end, "a timer runs");
            std::thread::sleep(Duration::from_millis(1));
        }
        disconnect_both(gsi, id, theirs);
    }
    gsi.with_cm(|machine, _, now| machine.unlisten(now, listener)).unwrap();
    drop(held);
}

fn disconnect_both(gsi: &'static Gsi, id: CommId, theirs: CommId) {
    gsi.with_cm(|machine, _, now| machine.disconnect(now, id, &[])).unwrap();
    event(gsi, of(theirs));
    gsi.with_cm(|machine, _, now| machine.disconnect(now, theirs, &[])).unwrap();
    event(gsi, of(id));
    for id in [id, theirs] {
        gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    }
}

#[test]
fn a_thousand_at_once_to_a_socket_of_ordinary_size() {
    let _turn = turn();
    let mut command = Peer::command();
    command.env("ANYVERBS_RECEIVE_BUFFER", "212992");
    let mut peer = Peer::run(command, "now");
    peer.hear();
    peer.ask("listen 1002");
    let gsi = gsi();
    let begin = Instant::now();
    let ids: Vec<_> = (0..1000).map(|_| connect(gsi, ip("127.0.0.1"), 1002, 20)).collect();
    for &id in &ids {
        establish(gsi, id);
    }
    peer.expect("seen", "@ 1000 1000 0");
    // The number that the socket loses is the machine's affair. The socket holds the datagrams of 8 ms (`send::Pace`),
    // and the peer may not run for longer. Every lost one is made good.
    let lost = peer.ask("counter drop_socket_full");
    println!("1000 connections in {:?}, lost: {}", begin.elapsed(), &lost[2..]);
    for id in ids {
        gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    }
    peer.expect("seen", "@ 1000 1000 1000");
}

#[test]
fn polling_a_completion_queue_answers_too() {
    let _turn = turn();
    let mut peer = Peer::spawn();
    let gsi = gsi();
    let cq = cq(gsi);
    let (listener, held) = listen(gsi, 1003);
    peer.say("connect 127.0.0.1 1003 20 20");
    let (end, mut seen) = (Instant::now() + TIMEOUT, Seen::default());
    while seen.established < 20 {
        assert!(Instant::now() < end, "{seen:?}");
        cq.poll(&mut [Wc::default(); 4]).unwrap();
        serve(gsi, &mut seen);
    }
    assert_eq!(peer.hear(), "@ connected");
    peer.close();
    while seen.ended < 20 {
        assert!(Instant::now() < end, "{seen:?}");
        cq.poll(&mut [Wc::default(); 4]).unwrap();
        serve(gsi, &mut seen);
    }
    gsi.with_cm(|machine, _, now| machine.unlisten(now, listener)).unwrap();
    drop(held);
}

#[test]
fn a_request_is_repeated_after_its_listener_is_gone() {
    let _turn = turn();
    let (mut peer, _other) = (Peer::spawn(), Peer::spawn());
    let gsi = gsi();
    peer.ask("listen 1004");
    peer.ask("hold");
    let mras = || gsi.with_cm(|m, _, _| m.counters().rx_msgs.of(Attribute::Mra));
    let before = mras();
    let id = connect(gsi, ip("127.0.0.1"), 1004, 16);
    peer.expect("seen", "@ 1 0 0");
    peer.ask("unlisten");
    let end = Instant::now() + TIMEOUT;
    while mras() == before {
        assert!(Instant::now() < end, "it is not asked again");
        std::thread::sleep(Duration::from_millis(1));
    }
    peer.ask("accept");
    establish(gsi, id);
    // New ones are refused all the same.
    let another = connect(gsi, ip("127.0.0.1"), 1004, 16);
    assert!(matches!(event(gsi, of(another)), CmEvent::Rejected { .. }));
    disconnect(gsi, id);
    gsi.with_cm(|machine, _, now| machine.destroy(now, another)).unwrap();
}

#[test]
fn nobody_listens() {
    let _turn = turn();
    let gsi = gsi();
    let _other = Peer::spawn();
    let id = connect(gsi, ip("127.0.0.1"), 1001, 20);
    match event(gsi, of(id)) {
        CmEvent::Rejected { .. } => {}
        other => panic!("{other:?}"),
    }
    gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
}

#[test]
fn each_request_finds_the_process_that_listens() {
    let _turn = turn();
    let mut peers: Vec<_> = (0..4).map(|_| Peer::spawn()).collect();
    let gsi = gsi();
    for (i, peer) in peers.iter_mut().enumerate() {
        assert_eq!(peer.ask(&format!("listen {}", 2000 + i)), "@ listens");
    }
    for (i, peer) in peers.iter_mut().enumerate() {
        let port = 2000 + i as u16;
        let ids: Vec<_> = (0..50).map(|_| connect(gsi, ip("127.0.0.1"), port, 20)).collect();
        for &id in &ids {
            establish(gsi, id);
        }
        peer.expect("seen", "@ 50 50 0");
        for &id in &ids {
            disconnect(gsi, id);
        }
        peer.expect("seen", "@ 50 50 50");
    }
    // A killed listener is none, and its connected peers learn that.
    let id = connect(gsi, ip("::1"), 2000, 20);
    establish(gsi, id);
    let other = connect(gsi, ip("127.0.0.1"), 2001, 20);
    establish(gsi, other);
    drop(peers.remove(0));
    match event(gsi, of(id)) {
        CmEvent::Disconnected { how: Disconnected::Requested(_), .. } => {}
        // Another process has rejected the RTU, which is sent more than once.
        CmEvent::Disconnected { how: Disconnected::Rejected(RejReason::InvalidCommId), .. } => {}
        event => panic!("{event:?}"),
    }
    gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    disconnect(gsi, other);
    let id = connect(gsi, ip("127.0.0.1"), 2000, 20);
    assert!(matches!(event(gsi, of(id)), CmEvent::Rejected { .. }));
    gsi.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
}

#[test]
fn many_clients_at_once_to_a_socket_of_ordinary_size() {
    let _turn = turn();
    let mut command = Peer::command();
    command.env("ANYVERBS_RECEIVE_BUFFER", "212992");
    let mut server = Peer::run(command, "now");
    server.hear();
    server.ask("listen 1005");
    let mut clients: Vec<_> = (0..10).map(|_| Peer::spawn()).collect();
    let begin = Stopwatch::start();
    for client in &mut clients {
        client.say("connect 127.0.0.1 1005 200 20");
    }
    for client in &mut clients {
        assert_eq!(client.hear(), "@ connected");
    }
    server.expect("seen", "@ 2000 2000 0");
    let took = begin.elapsed();
    println!("10 times 200 connections in {took:?}");
    // Some are lost; that costs a second at most, or by and by two, not 4.3 for each step.
    assert!(took < Duration::from_secs(8), "{took:?}");
}

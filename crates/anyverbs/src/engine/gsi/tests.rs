//! The machine alone, over the device: connections between this process and others of its host, or of another.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use anyverbs_net::{Reservation, ServiceAddress};
use anyverbs_proto::cm::event::{CmEvent, Disconnected};
use anyverbs_proto::cm::id::{CommId, PortSpace, ServiceId};
use anyverbs_proto::cm::ip::IpHeader;
use anyverbs_proto::cm::message::ece::Ece;
use anyverbs_proto::cm::{
    AcceptParams, ConnectParams, Listen, ListenAddress, ListenerId, Path, Serves, Transport,
};
use anyverbs_proto::types::{Gid, Mtu, PKey, Psn, Qpn};

use crate::engine::Engine;

/// Takes the machine's events where nobody has made ids.
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
const PATIENCE: Duration = Duration::from_secs(20);

fn isolate() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let pid = std::process::id();
        for (name, value) in [
            ("ANYVERBS_REGISTRY", format!("anyverbs-gsi-{pid}")),
            ("ANYVERBS_UDP_PORT", (32_000 + pid % 12_000).to_string()),
            ("ANYVERBS_INTERFACES", "lo".into()),
        ] {
            if std::env::var_os(name).is_none() {
                // SAFETY: before the first open; nothing else in these tests writes the environment.
                unsafe { std::env::set_var(name, value) };
            }
        }
    });
}

fn engine() -> &'static Engine {
    isolate();
    let engine = Engine::current().unwrap();
    engine.gsi.state.lock().tap.on = true;
    engine
}

fn service(port: u16) -> ServiceId {
    ServiceId::of_port(PortSpace::Tcp, port)
}

fn locals(engine: &Engine) -> Vec<IpAddr> {
    engine.gids.entries().iter().map(|entry| entry.gid.to_ip()).collect()
}

fn listen(engine: &'static Engine, port: u16) -> (ListenerId, Reservation) {
    let locals = locals(engine);
    let services = &engine.services;
    let held = services.reserve(service(port).0, ServiceAddress::Any, false, &locals).unwrap();
    let listen = Listen {
        service_id: service(port),
        address: ListenAddress::Any,
        serves: Serves::Connections(Transport::Rc),
        ip_header: true,
        backlog: 100_000,
    };
    (engine.with_cm(|machine, _, _| machine.listen(listen)).unwrap(), held)
}

/// The address from which `to` is reached: itself, or one of its kind.
fn source(engine: &Engine, to: IpAddr) -> Gid {
    let kind = |ip: IpAddr| match ip {
        IpAddr::V4(_) => 0,
        IpAddr::V6(ip) => 1 + u8::from(ip.is_unicast_link_local()),
    };
    let entries = engine.gids.entries();
    let own = entries.iter().find(|e| e.gid.to_ip() == to);
    let same =
        |e: &&crate::gid::GidEntry| kind(e.gid.to_ip()) == kind(to) && e.interface_name != "lo";
    own.or_else(|| entries.iter().find(same)).unwrap().gid
}

fn connect(engine: &'static Engine, to: IpAddr, port: u16, timeout: u8) -> CommId {
    let from = source(engine, to);
    let params = ConnectParams {
        service_id: service(port),
        addresses: Some(IpHeader {
            source: SocketAddr::new(from.to_ip(), 40_000),
            destination: to,
        }),
        path: Path {
            sgid: from,
            dgid: Gid::from(to),
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
        qpn: qpn(engine),
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
    engine.with_cm(|machine, _, now| machine.connect(now, &params)).unwrap()
}

/// One that no other on this host has.
fn qpn(engine: &Engine) -> Qpn {
    static NEXT: AtomicU32 = AtomicU32::new(2);
    let number = NEXT.fetch_add(1, Ordering::Relaxed) & 0xffff;
    Qpn::new(u32::from(engine.slot) << 16 | number)
}

/// The first event of those that `wanted` likes, which leaves the others. The worker brings it.
fn event(engine: &'static Engine, wanted: impl Fn(&CmEvent) -> bool) -> CmEvent {
    let end = Instant::now() + PATIENCE;
    loop {
        let mut state = engine.gsi.state.lock();
        if let Some(at) = state.tap.events.iter().position(&wanted) {
            return state.tap.events.remove(at).unwrap();
        }
        drop(state);
        assert!(Instant::now() < end, "no event");
        std::thread::sleep(Duration::from_micros(200));
    }
}

fn of(id: CommId) -> impl Fn(&CmEvent) -> bool {
    move |event| event.id() == id
}

/// The active side of a connection up to its end.
fn establish(engine: &'static Engine, id: CommId) {
    match event(engine, of(id)) {
        CmEvent::ConnectResponse { .. } => {}
        other => panic!("{other:?}"),
    }
    engine.with_cm(|machine, _, _| machine.ready(id, &[])).unwrap();
}

fn disconnect(engine: &'static Engine, id: CommId) {
    engine.with_cm(|machine, _, now| machine.disconnect(now, id, &[])).unwrap();
    match event(engine, of(id)) {
        CmEvent::Disconnected { how: Disconnected::Acknowledged(_), .. } => {}
        other => panic!("{other:?}"),
    }
    engine.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
}

/// What a listening process has seen.
#[derive(Debug, Default)]
struct Seen {
    requests: usize,
    established: usize,
    ended: usize,
}

/// Does what a server does, for all events that wait.
fn serve(engine: &'static Engine, seen: &mut Seen) {
    let events: Vec<_> = engine.gsi.state.lock().tap.events.drain(..).collect();
    for event in events {
        let id = event.id();
        match event {
            CmEvent::ConnectRequest { .. } => {
                seen.requests += 1;
                let accept = AcceptParams {
                    qpn: qpn(engine),
                    starting_psn: Psn::new(9),
                    responder_resources: 1,
                    initiator_depth: 1,
                    flow_control: false,
                    rnr_retry_count: 7,
                    srq: false,
                    ece: Ece::default(),
                    private_data: &[],
                };
                engine.with_cm(|machine, _, now| {
                    machine.take_request(id).unwrap();
                    machine.accept(now, id, &accept).unwrap();
                });
            }
            CmEvent::Established { .. } => seen.established += 1,
            CmEvent::Disconnected { how: Disconnected::Requested(_), .. } => {
                seen.ended += 1;
                engine.with_cm(|machine, _, now| {
                    machine.disconnect(now, id, &[]).unwrap();
                    machine.destroy(now, id).unwrap();
                });
            }
            CmEvent::Disconnected { .. } | CmEvent::Rejected { .. } => {
                seen.ended += 1;
                engine.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
            }
            _ => {}
        }
    }
}

/// Not a test by itself: what the other processes run. Commands on standard input.
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
    let engine = engine();
    println!("@ slot {}", engine.slot);
    let mut seen = Seen::default();
    let (mut listeners, mut connected) = (Vec::new(), Vec::new());
    loop {
        serve(engine, &mut seen);
        match commands.recv_timeout(Duration::from_millis(1)) {
            Ok(line) => match line.split(' ').collect::<Vec<_>>()[..] {
                ["listen", port] => {
                    listeners.push(listen(engine, port.parse().unwrap()));
                    println!("@ listens");
                }
                ["seen"] => {
                    println!("@ {} {} {}", seen.requests, seen.established, seen.ended);
                }
                ["counter", name] => {
                    let counter = anyverbs_proto::counters::Counter::ALL
                        .iter()
                        .find(|c| c.name() == name)
                        .unwrap();
                    println!("@ {}", engine.counters().read(*counter));
                }
                ["connect", to, port, n] => {
                    let (to, port) = (to.parse().unwrap(), port.parse().unwrap());
                    let ids: Vec<_> =
                        (0..n.parse().unwrap()).map(|_| connect(engine, to, port, 20)).collect();
                    for &id in &ids {
                        establish(engine, id);
                    }
                    connected.extend(ids);
                    println!("@ connected");
                }
                ["disconnect"] => {
                    for id in std::mem::take(&mut connected) {
                        disconnect(engine, id);
                    }
                    println!("@ disconnected");
                }
                ref other => panic!("{other:?}"),
            },
            Err(std::sync::mpsc::RecvTimeoutError::Timeout) => {}
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => return,
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
        isolate();
        Command::new(std::env::current_exe().unwrap())
    }

    fn spawn() -> Self {
        let mut peer = Self::run(Self::command(), "now");
        assert!(peer.hear().starts_with("@ slot"));
        peer
    }

    fn run(mut command: Command, role: &str) -> Self {
        let mut child = command
            .args(["--exact", "engine::gsi::tests::peer", "--nocapture", "--test-threads=1"])
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
        let end = Instant::now() + PATIENCE;
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

/// The tests share one machine, and count what comes.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn one_process_connects_to_itself() {
    let _turn = turn();
    let engine = engine();
    let (listener, held) = listen(engine, 1000);
    for address in ["127.0.0.1", "::1"] {
        let id = connect(engine, ip(address), 1000, 20);
        let is_request = |e: &CmEvent| matches!(e, CmEvent::ConnectRequest { listener: l, .. } if *l == listener);
        let request = event(engine, is_request);
        let theirs = request.id();
        engine.gsi.state.lock().tap.events.push_back(request);
        let mut seen = Seen::default();
        serve(engine, &mut seen);
        assert_eq!(seen.requests, 1);
        establish(engine, id);
        event(engine, of(theirs));
        disconnect_both(engine, id, theirs);
    }
    engine.with_cm(|machine, _, now| machine.unlisten(now, listener)).unwrap();
    drop(held);
}

fn disconnect_both(engine: &'static Engine, id: CommId, theirs: CommId) {
    engine.with_cm(|machine, _, now| machine.disconnect(now, id, &[])).unwrap();
    event(engine, of(theirs));
    engine.with_cm(|machine, _, now| machine.disconnect(now, theirs, &[])).unwrap();
    event(engine, of(id));
    for id in [id, theirs] {
        engine.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
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
    let engine = engine();
    let begin = Instant::now();
    let ids: Vec<_> = (0..1000).map(|_| connect(engine, ip("127.0.0.1"), 1002, 20)).collect();
    for &id in &ids {
        establish(engine, id);
    }
    peer.expect("seen", "@ 1000 1000 0");
    let took = begin.elapsed();
    println!("1000 connections in {took:?}");
    // Nothing was lost: the first repetition is after 4 s.
    assert!(took < Duration::from_secs(3), "{took:?}");
    for id in ids {
        engine.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
    }
    peer.expect("seen", "@ 1000 1000 1000");
}

#[test]
fn nobody_listens() {
    let _turn = turn();
    let engine = engine();
    let _other = Peer::spawn();
    let id = connect(engine, ip("127.0.0.1"), 1001, 20);
    match event(engine, of(id)) {
        CmEvent::Rejected { .. } => {}
        other => panic!("{other:?}"),
    }
    engine.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
}

#[test]
fn each_request_finds_the_process_that_listens() {
    let _turn = turn();
    let mut peers: Vec<_> = (0..4).map(|_| Peer::spawn()).collect();
    let engine = engine();
    for (i, peer) in peers.iter_mut().enumerate() {
        assert_eq!(peer.ask(&format!("listen {}", 2000 + i)), "@ listens");
    }
    for (i, peer) in peers.iter_mut().enumerate() {
        let port = 2000 + i as u16;
        let ids: Vec<_> = (0..50).map(|_| connect(engine, ip("127.0.0.1"), port, 20)).collect();
        for &id in &ids {
            establish(engine, id);
        }
        peer.expect("seen", "@ 50 50 0");
        for &id in &ids {
            disconnect(engine, id);
        }
        peer.expect("seen", "@ 50 50 50");
    }
    // A listener that is killed is none.
    drop(peers.remove(0));
    let id = connect(engine, ip("127.0.0.1"), 2000, 20);
    assert!(matches!(event(engine, of(id)), CmEvent::Rejected { .. }));
    engine.with_cm(|machine, _, now| machine.destroy(now, id)).unwrap();
}

fn run(arguments: &str) -> bool {
    let mut words = arguments.split(' ');
    Command::new(words.next().unwrap()).args(words).status().unwrap().success()
}

/// Two hosts, in namespaces of their own: this process and more on one, others on the second.
#[test]
fn two_hosts() {
    let can = Command::new("unshare").args(["-Urn", "ip", "link"]).output();
    if !can.is_ok_and(|output| output.status.success()) {
        eprintln!("skipped: no network namespaces for this user here");
        return;
    }
    let output = Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "engine::gsi::tests::on_two_hosts", "--nocapture", "--test-threads=1"])
        .env(ROLE, "hosts")
        .envs([("ANYVERBS_REGISTRY", "hosts"), ("ANYVERBS_INTERFACES", "")])
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("1 passed"), "{out}\n{err}");
    println!("{out}");
}

/// Not a test by itself: what [`two_hosts`] runs.
#[test]
fn on_two_hosts() {
    if std::env::var(ROLE).as_deref() != Ok("hosts") {
        return;
    }
    let exe = std::env::current_exe().unwrap();
    let mut other_host = Command::new("unshare");
    other_host.arg("-n").arg(&exe);
    let mut first = Peer::run(other_host, "later");
    assert_eq!(first.hear(), "@ waits");
    let there = first.child.id();
    let enter = format!("nsenter -n -t {there} ");
    for (ns, commands) in [
        ("", format!("ip link add av0 type veth peer name av1 netns {there}")),
        ("", "ip link set lo up;ip addr add 10.77.0.1/24 dev av0;ip addr add fd77::1/64 dev av0 nodad;ip addr add fe80::77:1/64 dev av0 nodad;ip link set av0 up".into()),
        (&enter, "ip link set lo up;ip addr add 10.77.0.2/24 dev av1;ip addr add fd77::2/64 dev av1 nodad;ip addr add fe80::77:2/64 dev av1 nodad;ip link set av1 up".into()),
    ] {
        for command in commands.split(';') {
            assert!(run(&format!("{ns}{command}")), "{ns}{command}");
        }
    }
    first.say("go");
    assert!(first.hear().starts_with("@ slot"));
    let mut there: Vec<_> = (0..4)
        .map(|_| {
            let mut command = Command::new("nsenter");
            command.args(["-n", "-t", &there.to_string()]).arg(&exe);
            let mut peer = Peer::run(command, "now");
            assert!(peer.hear().starts_with("@ slot"));
            peer
        })
        .collect();
    there.push(first);
    let mut server = there.remove(0);
    assert_eq!(server.ask("listen 3000"), "@ listens");

    // Every kind of address.
    let engine = engine();
    for address in ["10.77.0.2", "fd77::2", "fe80::77:2"] {
        let id = connect(engine, ip(address), 3000, 20);
        establish(engine, id);
        disconnect(engine, id);
    }
    server.expect("seen", "@ 3 3 3");

    // Somebody's requests reach another process there than the one that listens, which hands them on.
    let handed_on = |there: &mut [Peer]| -> u64 {
        let counts = there.iter_mut().map(|peer| peer.ask("counter forwarded_pkts"));
        counts.map(|answer| answer[2..].parse::<u64>().unwrap()).sum()
    };
    let mut n = 3;
    let mut astray = loop {
        let before = handed_on(&mut there);
        let mut client = Peer::spawn();
        assert_eq!(client.ask("connect 10.77.0.2 3000 10"), "@ connected");
        n += 10;
        if handed_on(&mut there) >= before + 10 {
            break client;
        }
        assert_eq!(client.ask("disconnect"), "@ disconnected");
        assert!(n < 500, "they always go to the right process");
    };
    // More than a Unix socket's queue holds.
    assert_eq!(astray.ask("connect 10.77.0.2 3000 1000"), "@ connected");
    n += 1000;
    server.expect("seen", &format!("@ {n} {n} {}", n - 1010));

    // A process that ends says so.
    astray.close();
    assert!(astray.child.wait().unwrap().success());
    server.expect("seen", &format!("@ {n} {n} {n}"));

    // Nobody is left of one that was killed: another process there says that.
    let id = connect(engine, ip("10.77.0.2"), 3000, 20);
    establish(engine, id);
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let begin = Instant::now();
    disconnect(engine, id);
    let id = connect(engine, ip("10.77.0.2"), 3000, 20);
    assert!(matches!(event(engine, of(id)), CmEvent::Rejected { .. }));
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
}

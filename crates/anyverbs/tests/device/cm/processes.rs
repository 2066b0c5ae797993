//! Two processes of a host, and two hosts. The other process is this test binary again.

use anyverbs_testing::Stopwatch;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyverbs::cm::*;
use anyverbs::*;

use super::*;
use crate::endpoint::{Buffer, pattern};
use crate::host::ip;

const ROLE: &str = "ANYVERBS_TEST_CM";
const LEN: usize = 5000;

/// One of the server's connections.
struct Served {
    id: Id,
    endpoint: Endpoint,
    buffer: Buffer,
}

impl Served {
    fn accept(id: Id, cookie: u64) -> Self {
        id.set_cookie(cookie);
        let endpoint = Endpoint::with(QpType::Rc, CAP, 64);
        let buffer = Buffer::new(&endpoint.pd, LEN);
        id.attach_qp(&endpoint.qp).unwrap();
        endpoint.recv(0, &[buffer.sge(0, LEN)]);
        id.accept(Some(&PARAM)).unwrap();
        Self { id, endpoint, buffer }
    }

    /// Sends back the first message.
    fn echo(&self) {
        assert_eq!(self.endpoint.poll(1)[0].status, WcStatus::Success);
        self.endpoint.send(1, SendOp::Send, &[self.buffer.sge(0, LEN)]);
        self.endpoint.poll(1);
    }
}

/// Listens, and returns one message to each client.
fn serve(listener: &Node) {
    let mut served = std::collections::HashMap::new();
    for cookie in 1000.. {
        let mut event = listener.channel.get_event().unwrap();
        let taken = event.new_id.take();
        match (event.kind, served.get(&event.cookie)) {
            (EventKind::ConnectRequest, _) => {
                served.insert(cookie, Served::accept(taken.unwrap(), cookie));
                listener.id.ack_events(1);
            }
            (EventKind::Established, Some(connection)) => {
                connection.id.ack_events(1);
                connection.echo();
            }
            (EventKind::Disconnected, Some(connection)) => {
                connection.id.ack_events(1);
                connection.id.disconnect().unwrap();
                served.remove(&event.cookie);
                println!("@ parted");
            }
            (EventKind::TimewaitExit, _) => {}
            (kind, _) => panic!("{kind:?}"),
        }
    }
}

/// Not a test by itself: the code of the other processes.
#[test]
fn other() {
    match std::env::var(ROLE).as_deref() {
        Ok("later") => {
            println!("@ waits");
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
        Ok("now") => {}
        Ok("hosts") => return two_hosts_from_one(),
        Ok("addresses") => return addresses_come_and_go(),
        Ok("loopback") => return loopback_beside_another_address(),
        _ => return,
    }
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let Some(address) = line.strip_prefix("listen ") else { panic!("{line}") };
        let listener = Node::tcp();
        match listener.id.bind_addr(&Address::Ip(address.parse().unwrap())) {
            Ok(()) => listener.id.listen(0).unwrap(),
            Err(error) => {
                println!("@ {}", error.errno());
                continue;
            }
        }
        println!("@ port {}", listener.port());
        std::thread::spawn(move || serve(&listener));
    }
}

struct Other {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
}

impl Other {
    fn spawn() -> Self {
        isolate();
        Self::run(Command::new(std::env::current_exe().unwrap()), "now")
    }

    fn run(mut command: Command, role: &str) -> Self {
        let mut child = command
            .args(["--exact", "cm::processes::other", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) =
            (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        Self { child, stdin: Some(stdin), stdout }
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the other process ended");
            if let Some(at) = line.find('@') {
                return line[at..].trim().to_owned();
            }
        }
    }

    fn ask(&mut self, line: &str) -> String {
        writeln!(self.stdin.as_mut().unwrap(), "{line}").unwrap();
        self.hear()
    }

    /// Lets it listen; its port.
    fn listen(&mut self, address: &str) -> u16 {
        let answer = self.ask(&format!("listen {address}"));
        answer.strip_prefix("@ port ").unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Connects to a server and gets a message back.
fn echo(to: &Address) -> Node {
    let node = Node::towards(to);
    node.id.connect(&PARAM).unwrap();
    node.expect(EventKind::Established);
    let e = node.e();
    let (src, dst) = (Buffer::new(&e.pd, LEN), Buffer::new(&e.pd, LEN));
    let data = pattern(LEN, 8);
    src.write(0, &data);
    e.recv(1, &[dst.sge(0, LEN)]);
    e.send(2, SendOp::Send, &[src.sge(0, LEN)]);
    for wc in e.poll(2) {
        assert_eq!(wc.status, WcStatus::Success);
    }
    assert_eq!(dst.read(0, LEN), data);
    node
}

fn part(node: &Node, server: &mut Other) {
    node.id.disconnect().unwrap();
    node.expect(EventKind::Disconnected);
    assert_eq!(server.hear(), "@ parted");
}

#[test]
fn two_processes_connect_send_and_part() {
    let mut server = Other::spawn();
    for ip in ["127.0.0.1", "::1"] {
        let port = server.listen(&std::net::SocketAddr::new(ip.parse().unwrap(), 0).to_string());
        let node = echo(&at(ip, port));
        part(&node, &mut server);
        // A port is taken once on a host.
        assert_eq!(Node::tcp().id.bind_addr(&at(ip, port)).unwrap_err(), CmError::InUse(port));
    }
    let ours = Node::listener(&at("0.0.0.0", 0));
    let taken = server.ask(&format!("listen 127.0.0.1:{}", ours.port()));
    assert_eq!(taken, format!("@ {}", libc::EADDRNOTAVAIL));
}

#[test]
fn each_of_two_processes_is_found() {
    let mut servers = [Other::spawn(), Other::spawn()];
    let ports = [servers[0].listen("0.0.0.0:0"), servers[1].listen("0.0.0.0:0")];
    for _ in 0..20 {
        for i in 0..2 {
            let node = echo(&at("127.0.0.1", ports[i]));
            part(&node, &mut servers[i]);
        }
    }
}

#[test]
fn a_server_that_ends_is_noticed() {
    let mut server = Other::spawn();
    let port = server.listen("127.0.0.1:0");
    let node = echo(&at("127.0.0.1", port));
    server.stdin = None;
    // The server says so, and does not wait for our answer.
    node.expect(EventKind::Disconnected);
    assert!(server.child.wait().unwrap().success());
    node.id.disconnect().unwrap();

    // A killed server does not, but no other process answers for it.
    let mut server = Other::spawn();
    let port = server.listen("127.0.0.1:0");
    let node = echo(&at("127.0.0.1", port));
    server.child.kill().unwrap();
    server.child.wait().unwrap();
    let begin = Stopwatch::start();
    node.id.disconnect().unwrap();
    node.expect(EventKind::Disconnected);
    let late = Node::towards(&at("127.0.0.1", port));
    late.id.connect(&PARAM).unwrap();
    assert_eq!(expect(&late.channel, EventKind::Rejected).status, 8);
    assert!(begin.elapsed() < Duration::from_secs(3), "{:?}", begin.elapsed());
    Node::listener(&at("127.0.0.1", port));
}

#[test]
fn two_hosts() {
    if anyverbs_testing::unshare_or_skip() {
        let output = Command::new("unshare")
            .arg("-Urn")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "cm::processes::other", "--nocapture", "--test-threads=1"])
            .env(ROLE, "hosts")
            // One port for all processes of both hosts, for any user that runs this test.
            .envs([
                ("ANYVERBS_REGISTRY", "cm-hosts"),
                ("ANYVERBS_INTERFACES", ""),
                ("ANYVERBS_UDP_PORT", "4791"),
            ])
            .output()
            .unwrap();
        crate::host::succeeds(&output);
    }
}

/// The part of [`two_hosts`] on a host of its own.
fn two_hosts_from_one() {
    let exe = std::env::current_exe().unwrap();
    let mut there = Command::new("unshare");
    there.arg("-n").arg(&exe);
    let mut server = Other::run(there, "later");
    assert_eq!(server.hear(), "@ waits");
    let pid = server.child.id();
    let on_both = |here: &str, there: &str| {
        ip(here);
        let enter = ["-n", "-t", &pid.to_string(), "ip"].map(str::to_owned);
        let done = Command::new("nsenter").args(enter).args(there.split(' ')).status();
        assert!(done.unwrap().success(), "{there}");
    };
    for (name, net) in [("a", "77"), ("b", "78")] {
        ip(&format!("link add {name}0 type veth peer name {name}1 netns {pid}"));
        on_both("link set lo up", "link set lo up");
        // No link-local address of the kernel's making: it would be a source as good as the test's once its check is over.
        on_both(
            &format!("link set {name}0 addrgenmode none"),
            &format!("link set {name}1 addrgenmode none"),
        );
        for address in [
            format!("10.{net}.0.H/24 dev {name}D"),
            format!("fd{net}::H/64 dev {name}D nodad"),
            format!("fe80::{net}:H/64 dev {name}D nodad"),
        ] {
            let add = |host: &str, device: &str| {
                format!("addr add {}", address.replace('H', host).replace('D', device))
            };
            on_both(&add("1", "0"), &add("2", "1"));
        }
        on_both(&format!("link set {name}0 up"), &format!("link set {name}1 up"));
    }
    // A link whose far end has a smaller MTU than the near one.
    ip("link set b0 mtu 9000");
    writeln!(server.stdin.as_mut().unwrap(), "go").unwrap();
    let port = server.listen("[::]:0");

    for to in ["10.77.0.2", "fd77::2"] {
        let node = echo(&at(to, port));
        assert_eq!(node.id.info().path.unwrap().mtu, Mtu::Mtu1024);
        part(&node, &mut server);
    }
    // A link-local address needs its link, and has it on both sides.
    // SAFETY: a string that ends with a zero.
    let index = unsafe { libc::if_nametoindex(c"a0".as_ptr()) };
    let scoped = |ip: &str, port| {
        Address::Ip(std::net::SocketAddrV6::new(ip.parse().unwrap(), port, 0, index).into())
    };
    let node = echo(&scoped("fe80::77:2", port));
    assert_eq!(node.id.info().local, Some(scoped("fe80::77:1", node.port())));
    part(&node, &mut server);
    // Our own address, over the loopback.
    let own = Node::listener(&at("10.77.0.1", 0));
    let active = Node::towards(&own.on("10.77.0.1"));
    active.id.connect(&PARAM).unwrap();
    own.request();

    // The far end cannot receive as much, and gives the value that it would accept.
    let node = echo(&at("10.78.0.2", port));
    assert_eq!(node.id.info().path.unwrap().mtu, Mtu::Mtu4096);
    assert_eq!(node.e().qp.query().unwrap().0.path_mtu, Mtu::Mtu1024);
    part(&node, &mut server);

    // Nowhere.
    let node = Node::tcp();
    let error = node.id.resolve_addr(None, &at("192.0.2.1", 1)).unwrap_err();
    assert_eq!(error.errno(), libc::ENETUNREACH);
    // Its state is as good as before.
    node.resolve(&at("10.77.0.2", port));
}

#[test]
fn an_id_hears_when_its_address_goes() {
    if anyverbs_testing::unshare_or_skip() {
        let output = Command::new("unshare")
            .arg("-Urn")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "cm::processes::other", "--nocapture", "--test-threads=1"])
            .env(ROLE, "addresses")
            .envs([("ANYVERBS_REGISTRY", "cm-addresses"), ("ANYVERBS_INTERFACES", "")])
            .output()
            .unwrap();
        crate::host::succeeds(&output);
    }
}

#[test]
fn loopback_addresses_work_that_the_gid_table_does_not_list() {
    if anyverbs_testing::unshare_or_skip() {
        let output = Command::new("unshare")
            .arg("-Urn")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "cm::processes::other", "--nocapture", "--test-threads=1"])
            .env(ROLE, "loopback")
            .envs([("ANYVERBS_REGISTRY", "cm-loopback"), ("ANYVERBS_INTERFACES", "")])
            .output()
            .unwrap();
        crate::host::succeeds(&output);
    }
}

/// The child of [`loopback_addresses_work_that_the_gid_table_does_not_list`].
fn loopback_beside_another_address() {
    ip("link set lo up");
    let context = crate::endpoint::context();
    let early = Node::tcp();
    early.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    ip("addr add 10.9.9.1/24 dev lo");
    assert_eq!(context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
    let listed = context.gids().unwrap();
    let listed: Vec<_> = listed.iter().map(|entry| entry.gid.to_ip().to_string()).collect();
    assert_eq!(listed, ["10.9.9.1"]);
    let all = context.addresses().unwrap();
    let unlisted = all.iter().find(|entry| entry.gid.to_ip().is_loopback()).unwrap();
    assert_eq!(unlisted.index, limits::GID_TABLE_LEN);
    assert_eq!(context.gid(1, unlisted.index).unwrap().as_ref(), Some(unlisted));
    assert!(context.gid(1, limits::GID_TABLE_LEN + 100).is_err());
    for ip in ["127.0.0.1", "::1", "10.9.9.1"] {
        super::connections::connect_send_and_part(ip);
        super::datagrams::ask_and_send(ip);
    }
    // An id from before has the address still, at its new index.
    early.id.listen(0).unwrap();
    let active = Node::towards(&early.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    let (mut passive, _) = early.request();
    passive.attach(QpType::Rc);
    passive.id.accept(Some(&PARAM)).unwrap();
    active.expect(EventKind::Established);
    assert!(is_quiet(&early.channel));
}

/// The child of [`an_id_hears_when_its_address_goes`].
fn addresses_come_and_go() {
    ip("link set lo up");
    ip("addr add 10.9.9.1/24 dev lo");
    let context = crate::endpoint::context();
    let (bound, other) = (Node::tcp(), Node::tcp());
    bound.id.bind_addr(&at("10.9.9.1", 0)).unwrap();
    other.id.bind_addr(&at("127.0.0.1", 0)).unwrap();
    for _ in 0..2 {
        ip("addr del 10.9.9.1/24 dev lo");
        bound.expect(EventKind::AddrChange);
        assert_eq!(context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
        // The id cannot do anything there.
        assert_eq!(bound.id.init_qp_attr(QpState::Init).unwrap_err().errno(), libc::ENODEV);
        ip("addr add 10.9.9.1/24 dev lo");
        assert_eq!(context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
        bound.id.init_qp_attr(QpState::Init).unwrap();
    }
    assert!(is_quiet(&other.channel) && is_quiet(&bound.channel));
}

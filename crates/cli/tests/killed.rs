//! A program that is killed below the launcher: its peer on another host, a network namespace, is told of it.
#![expect(clippy::unwrap_used, reason = "a test")]

mod library_names;

use anyverbs_testing::Stopwatch;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyverbs::cm::{Address, ConnParam, EventKind, Id, PortSpace, create_event_channel};
use anyverbs::{QpType, Qpn};

const ROLE: &str = "ANYVERBS_TEST_ROLE";
const SERVER: &str = "10.78.0.2:5555";
/// The launcher's message if peers did not answer.
const NOT_TOLD: &str = "could not be told";

fn run(line: &str) {
    let words: Vec<_> = line.split(' ').collect();
    assert!(Command::new(words[0]).args(&words[1..]).status().unwrap().success(), "{line}");
}

/// This test program in another role, in the host of the process `host`.
fn role(host: u32, launcher: Option<&Path>, role: &str) -> (Child, BufReader<ChildStdout>) {
    let mut command = Command::new("nsenter");
    command.args(["-n", "-t", &host.to_string()]);
    if let Some(libraries) = launcher {
        command.arg(env!("CARGO_BIN_EXE_anyverbs")).args(["run", "--"]);
        command.env("ANYVERBS_LIB_DIR", libraries).stderr(Stdio::piped());
    }
    command
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env_remove("LD_PRELOAD")
        .stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let out = BufReader::new(child.stdout.take().unwrap());
    (child, out)
}

/// The rest of the next line that begins with `@`.
fn hear(out: &mut BufReader<ChildStdout>) -> String {
    for line in out.lines() {
        if let Some((_, said)) = line.unwrap().split_once("@ ") {
            return said.to_owned();
        }
    }
    panic!("it ended");
}

#[test]
fn a_peer_hears_of_it_from_the_launcher() {
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    let output = Command::new("unshare")
        .arg("-Urn")
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"])
        .env(ROLE, "hosts")
        .envs([("ANYVERBS_REGISTRY", "killed"), ("ANYVERBS_UDP_PORT", "4791")])
        .output()
        .unwrap();
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && out.contains("@ done"), "{out}\n{err}");
}

/// Not a test by itself: the code of the other processes.
#[test]
fn in_a_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("hosts") => hosts(),
        Ok("server") => server(),
        Ok("client") => client(),
        _ => {}
    }
}

fn hosts() {
    let mut other = Command::new("unshare").args(["-n", "sleep", "60"]).spawn().unwrap();
    let (here, there) = (std::process::id(), other.id());
    let own = fs::read_link("/proc/self/ns/net").unwrap();
    while fs::read_link(format!("/proc/{there}/ns/net")).unwrap() == own {
        std::thread::sleep(Duration::from_millis(1));
    }
    run(&format!("ip link add av0 type veth peer name av1 netns {there}"));
    for (host, name, address) in [(here, "av0", "10.78.0.1/24"), (there, "av1", "10.78.0.2/24")] {
        let enter = format!("nsenter -n -t {host} ip");
        run(&format!("{enter} link set lo up"));
        run(&format!("{enter} addr add {address} dev {name}"));
        run(&format!("{enter} link set {name} up"));
    }
    // The test's own program has the device in itself.
    let libraries = std::env::temp_dir().join(format!("anyverbs-killed-{here}"));
    library_names::fill(&libraries);
    let connect = || {
        let (launcher, mut server) = role(there, Some(&libraries), "server");
        assert_eq!(hear(&mut server), "listens");
        let (client, mut heard) = role(here, None, "client");
        assert_eq!(hear(&mut heard), "connected");
        let pid: i32 = hear(&mut server).parse().unwrap();
        (launcher, pid, client, heard)
    };
    let end = |launcher: Child| {
        let output = launcher.wait_with_output().unwrap();
        assert!(!output.status.success());
        String::from_utf8(output.stderr).unwrap()
    };
    let (launcher, pid, mut client, mut heard) = connect();
    let begin = Stopwatch::start();
    // SAFETY: touches no memory; a descendant, whose launcher waits for it.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    assert_eq!(hear(&mut heard), "disconnected");
    // Otherwise it would have been minutes.
    assert!(begin.elapsed() < Duration::from_secs(10), "{:?}", begin.elapsed());
    let said = end(launcher);
    assert!(!said.contains(NOT_TOLD), "{said}");
    assert!(client.wait().unwrap().success());

    // The peer of this one does not answer.
    let (launcher, pid, mut client, _) = connect();
    client.kill().unwrap();
    client.wait().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
    let said = end(launcher);
    assert!(said.contains(NOT_TOLD), "{said}");
    other.kill().unwrap();
    other.wait().unwrap();
    fs::remove_dir_all(libraries).unwrap();
    println!("@ done");
}

fn address() -> Address {
    Address::Ip(SERVER.parse::<SocketAddr>().unwrap())
}

fn params() -> ConnParam<'static> {
    ConnParam { qpn: Qpn::new(0x12_3456), ..ConnParam::default() }
}

fn server() {
    let channel = create_event_channel().unwrap();
    let listener = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0).unwrap();
    listener.bind_addr(&address()).unwrap();
    listener.listen(0).unwrap();
    println!("@ listens");
    let request = channel.get_event().unwrap();
    assert_eq!(request.kind, EventKind::ConnectRequest);
    let id = request.new_id.unwrap();
    id.accept(Some(&params())).unwrap();
    assert_eq!(channel.get_event().unwrap().kind, EventKind::Established);
    println!("@ {}", std::process::id());
    std::thread::sleep(Duration::from_secs(60));
}

fn client() {
    let channel = create_event_channel().unwrap();
    let expect = |kind| assert_eq!(channel.get_event().unwrap().kind, kind);
    let id = Id::create(&channel, PortSpace::Tcp, QpType::Rc, 0).unwrap();
    id.resolve_addr(None, &address()).unwrap();
    expect(EventKind::AddrResolved);
    id.resolve_route().unwrap();
    expect(EventKind::RouteResolved);
    id.connect(&params()).unwrap();
    expect(EventKind::ConnectResponse);
    id.establish().unwrap();
    println!("@ connected");
    expect(EventKind::Disconnected);
    println!("@ disconnected");
}

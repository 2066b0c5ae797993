//! Effects of the host on the device: addresses that come and go, a port that is taken, idleness. Each runs in a
//! process of its own, since a process has one device.

use std::io::Write as _;
use std::net::UdpSocket;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_testing::UdpPort;

use crate::endpoint::*;

const ROLE: &str = "ANYVERBS_TEST_ALONE";
/// The delay of [`ROLE`], in microseconds.
const DELAY: &str = "ANYVERBS_TEST_DELAY";

/// Runs [`alone`] in a child with these variables; in a network namespace of its own if `namespace`.
fn run(role: &str, variables: &[(&str, &str)], namespace: bool) -> Output {
    isolate();
    let this = std::env::current_exe().unwrap();
    let mut command = Command::new(if namespace { Path::new("unshare") } else { &this });
    if namespace {
        command.arg("-Urn").arg(&this);
    }
    command.args(["--exact", "host::alone", "--nocapture", "--test-threads=1"]);
    let port = UdpPort::reserve();
    // Apart from the processes of the other tests, whose start and end would wake it.
    command.env("ANYVERBS_REGISTRY", format!("anyverbs-alone-{}", std::process::id()));
    command.env("ANYVERBS_UDP_PORT", port.number().to_string());
    command.env(ROLE, role).envs(variables.iter().copied());
    if namespace {
        command.env("ANYVERBS_INTERFACES", "");
    }
    command.output().unwrap()
}

pub(crate) fn succeeds(output: &Output) {
    assert!(
        output.status.success(),
        "{}\n{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

pub(crate) fn ip(arguments: &str) {
    assert!(
        Command::new("ip").args(arguments.split(' ')).status().unwrap().success(),
        "ip {arguments}"
    );
}

/// One line with the reason why the device cannot be opened, although it is listed.
fn refusal() -> String {
    let text = Context::open(&devices().unwrap()[0].name).unwrap_err().to_string();
    assert!(!text.contains('\n'), "{text}");
    text
}

/// Not a test by itself: the code of the children.
#[test]
fn alone() {
    let Ok(role) = std::env::var(ROLE) else { return };
    match role.as_str() {
        "addresses" => {
            ip("link set lo up");
            let context = context();
            let has = |ip: &str| {
                let gid = Gid::from(ip.parse::<std::net::IpAddr>().unwrap());
                context.gids().unwrap().iter().any(|e| e.gid == gid)
            };
            assert_eq!(context.gid(1, 0).unwrap().unwrap().gid.to_ip().to_string(), "127.0.0.1");
            assert!(!has("10.9.9.1"));
            ip("addr add 10.9.9.1/24 dev lo");
            assert_eq!(context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
            assert!(has("10.9.9.1"));
            ip("addr del 10.9.9.1/24 dev lo");
            assert_eq!(context.get_async_event().unwrap().kind(), AsyncEventKind::GidChange);
            assert!(!has("10.9.9.1") && has("127.0.0.1"));
        }
        "an address meanwhile" => {
            ip("link set lo up");
            let mut batch = Command::new("ip");
            let mut batch = batch.args(["-batch", "-"]).stdin(Stdio::piped()).spawn().unwrap();
            let mut lines = batch.stdin.take().unwrap();
            let mut add = move |ip: &str| writeln!(lines, "addr add {ip}/32 dev lo").unwrap();
            let is_there = |ip: &str| UdpSocket::bind((ip, 0)).is_ok();
            let wait = |condition: &dyn Fn() -> bool| {
                let end = Instant::now() + Duration::from_secs(10);
                while !condition() {
                    assert!(Instant::now() < end);
                    std::thread::sleep(Duration::from_millis(1));
                }
            };
            // Its own start takes longer than the device's.
            add("10.9.9.1");
            wait(&|| is_there("10.9.9.1"));
            let delay = std::env::var(DELAY).unwrap().parse().unwrap();
            let adder = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_micros(delay));
                add("10.9.9.2");
                add
            });
            let context = context();
            drop(adder.join().unwrap());
            assert!(batch.wait().unwrap().success());
            wait(&|| is_there("10.9.9.2"));
            let gid = Gid::from("10.9.9.2".parse::<std::net::IpAddr>().unwrap());
            wait(&|| context.gids().unwrap().iter().any(|e| e.gid == gid));
        }
        "port" => {
            ip("link set lo up");
            let context = context();
            let event = || {
                let event = context.get_async_event().unwrap();
                (event.kind(), event.element())
            };
            let state = || context.port_attr(1).unwrap().state;
            let port = EventElement::Port(1);
            assert_eq!(state(), PortState::Active);
            ip("link set lo down");
            assert_eq!(event(), (AsyncEventKind::GidChange, port));
            assert_eq!(event(), (AsyncEventKind::PortErr, port));
            assert_eq!(state(), PortState::Down);
            ip("link set lo up");
            assert_eq!(event(), (AsyncEventKind::GidChange, port));
            assert_eq!(event(), (AsyncEventKind::PortActive, port));
            assert_eq!(state(), PortState::Active);
        }
        "nothing is up" => assert!(refusal().contains("no network interface is up")),
        "port taken" => assert!(refusal().contains("in use"), "{}", refusal()),
        "no such interface" => {
            let text = refusal();
            let by = match std::env::var("ANYVERBS_CONFIG") {
                Ok(file) => format!("configuration file {file:?}: device 1 of devices: interface"),
                Err(_) => "ANYVERBS_INTERFACES".to_owned(),
            };
            let fault = "there is no interface \"nosuch\", but lo";
            let wanted = format!("can be used: device anyverbs0, by {by}: {fault}");
            assert!(text.contains(&wanted), "{text}");
        }
        "bad variable" => {
            let text = devices().unwrap_err().to_string();
            assert!(text.contains("ANYVERBS_WINDOW") && !text.contains('\n'), "{text}");
        }
        "listing" => {
            let entries = |of: &str| std::fs::read_dir(format!("/proc/self/{of}")).unwrap().count();
            let handler = |signal| {
                // SAFETY: zero is a valid sigaction, which the call fills; it changes nothing.
                unsafe {
                    let mut action: libc::sigaction = std::mem::zeroed();
                    assert_eq!(libc::sigaction(signal, std::ptr::null(), &raw mut action), 0);
                    action.sa_sigaction
                }
            };
            let state = || {
                let names = std::fs::read_to_string("/proc/net/unix").unwrap();
                let ours = format!("@{}/", std::env::var("ANYVERBS_REGISTRY").unwrap());
                (
                    entries("task"),
                    entries("fd"),
                    handler(libc::SIGSEGV),
                    handler(libc::SIGBUS),
                    names.contains(&ours),
                    ["udp", "udp6"].map(|of| {
                        std::fs::read_to_string(format!("/proc/self/net/{of}")).unwrap().len()
                    }),
                )
            };
            ip("link set lo up");
            let before = state();
            let listed = devices().unwrap();
            assert_eq!(state(), before);
            let context = Context::open(&listed[0].name).unwrap();
            assert_ne!(state(), before, "opening is seen in what is compared");
            let attr = context.device_attr().unwrap();
            assert_eq!(
                (listed[0].node_guid, listed[0].sys_image_guid),
                (attr.node_guid, attr.sys_image_guid)
            );
        }
        "idle" => {
            let (a, b) = pair(QpType::Rc);
            let (src, dst) = (Buffer::new(&a.pd, 4096), Buffer::new(&b.pd, 4096));
            for i in 0..100 {
                a.send(i, SendOp::Write(dst.remote(0)), &[src.sge(0, 4096)]);
                a.poll(1);
            }
            std::thread::sleep(Duration::from_millis(100));
            let before = cpu();
            std::thread::sleep(Duration::from_secs(2));
            let used = cpu() - before;
            println!("idle: {used:?} in 2 s");
            assert!(used < Duration::from_millis(2), "{used:?} in 2 s");
        }
        other => panic!("{other}"),
    }
}

/// Processor time of this process.
fn cpu() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

#[test]
fn the_gid_table_follows_the_addresses() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("addresses", &[], true));
    }
}

/// The device reads the addresses first of all when it is opened.
#[test]
fn an_address_added_during_the_open_is_not_missed() {
    if anyverbs_testing::unshare_or_skip() {
        for delay in (0..60).map(|n| n * 25) {
            succeeds(&run("an address meanwhile", &[(DELAY, &delay.to_string())], true));
        }
    }
}

#[test]
fn the_port_follows_the_interface() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("port", &[], true));
    }
}

#[test]
fn without_an_interface_there_is_no_device() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("nothing is up", &[], true));
    }
}

#[test]
fn a_port_that_somebody_else_has_is_told() {
    let taken = UdpSocket::bind("0.0.0.0:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    succeeds(&run("port taken", &[("ANYVERBS_UDP_PORT", &port)], false));
}

#[test]
fn an_interface_that_is_not_there_is_told() {
    succeeds(&run("no such interface", &[("ANYVERBS_INTERFACES", "nosuch")], false));
    let name = format!("anyverbs-nosuch-{}.toml", std::process::id());
    let file = std::env::temp_dir().join(name);
    std::fs::write(&file, "devices = [{ interface = 'nosuch' }]").unwrap();
    let variables = [("ANYVERBS_INTERFACES", ""), ("ANYVERBS_CONFIG", file.to_str().unwrap())];
    succeeds(&run("no such interface", &variables, false));
    std::fs::remove_file(file).unwrap();
}

#[test]
fn listing_the_devices_starts_nothing() {
    if anyverbs_testing::unshare_or_skip() {
        succeeds(&run("listing", &[("ANYVERBS_REGISTRY", "anyverbs-listing")], true));
    }
}

#[test]
fn a_variable_that_does_not_parse_is_told() {
    succeeds(&run("bad variable", &[("ANYVERBS_WINDOW", "lots")], false));
}

#[test]
fn an_idle_device_sleeps() {
    succeeds(&run("idle", &[("ANYVERBS_INPROC", "0")], false));
    succeeds(&run("idle", &[("ANYVERBS_INPROC", "1")], false));
}

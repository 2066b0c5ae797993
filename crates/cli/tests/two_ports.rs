//! A device with two ports, as programs of others see it.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyverbs_testing::{UdpPort, skip};

const RACK: &str = "
[[devices]]
name = 'dual0'

[[devices.ports]]

[[devices.ports]]
pkeys = [0xffff, 0x8001]

[[devices]]
name = 'plain0'
";

/// A library directory with a configuration, and a port that no other test has.
struct Scratch {
    dir: PathBuf,
    port: UdpPort,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

impl Scratch {
    fn new() -> Self {
        let port = UdpPort::reserve();
        let name = format!("anyverbs-ports-{}-{}", std::process::id(), port.number());
        let dir = env::temp_dir().join(name);
        built_libraries::link(&dir.join("lib"));
        fs::write(dir.join("rack.toml"), RACK).unwrap();
        Self { dir, port }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.current_dir(&self.dir).env("ANYVERBS_LIB_DIR", self.dir.join("lib"));
        command.env("ANYVERBS_UDP_PORT", self.port.number().to_string());
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-ports-{}", self.port.number()));
        command.env("ANYVERBS_CONFIG", "rack.toml");
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        command
    }

    /// The output of the command with these arguments, for an exit status.
    fn says(&self, arguments: &[&str]) -> String {
        let output = self.command().args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// The output of a script below the device.
    fn prints(&self, script: &str) -> String {
        self.says(&["run", "--", "sh", "-c", script])
    }
}

fn is_there(program: &str) -> bool {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output();
    found.unwrap().status.success()
}

#[test]
fn the_listings_have_both_ports() {
    let scratch = Scratch::new();
    let devices: Vec<serde_json::Value> =
        serde_json::from_str(&scratch.says(&["devices", "--json"])).unwrap();
    let address = |device: usize, port: usize| {
        devices[device]["ports"][port]["gids"][0]["address"].as_str().unwrap_or("none").to_owned()
    };
    assert_eq!([address(0, 0), address(0, 1)], ["127.0.0.1", "127.0.0.2"]);
    assert_eq!([address(1, 0), address(1, 1)], ["127.0.0.3", "none"]);
    assert!(devices.iter().all(|device| device["port"] == device["ports"][0]));
    let text = scratch.says(&["devices"]);
    let named = ["port 1  ", "port 2  ", "GID table of port 1", "GID table of port 2"];
    assert!(named.iter().all(|name| text.contains(name)), "{text}");
    let text = scratch.says(&["show"]);
    let lines: Vec<&str> = text.lines().take(3).collect();
    let begins = ["dual0  port 1 4: ACTIVE  127.0.0.1", "dual0  port 2 4: ACTIVE  127.0.0.2"];
    assert!(lines.iter().zip(begins).all(|(line, begin)| line.starts_with(begin)), "{text}");
    assert!(lines[2].starts_with("plain0  port 1"), "{text}");
}

#[test]
fn the_view_has_both_ports() {
    let scratch = Scratch::new();
    let seen = scratch.prints(
        "cd /sys/class/infiniband && ls dual0/ports plain0/ports && cat dual0/ports/2/gids/0 \
         dual0/ports/1/pkeys/* dual0/ports/2/pkeys/1 dual0/ports/2/state dual0/ports/2/hw_counters/sent_pkts",
    );
    let wanted = "dual0/ports:\n1\n2\n\nplain0/ports:\n1\n0000:0000:0000:0000:0000:ffff:7f00:0002\n\
                  0xffff\n0x8001\n4: ACTIVE\n0\n";
    assert_eq!(seen, wanted);
}

/// The places of three ports, of which the first alone has its address when the device begins.
const AWAY: &str = "devices = [{ name = 'dual0', ports = ['10.9.8.6', '10.9.8.7'] }, { name = 'plain0', address = '10.9.8.8' }]";

/// The files of the ports while addresses of the host come and go.
const FOLLOW: &str = r#"
cd $ANYVERBS_VIEW/sys/class/infiniband
ports="dual0/ports/1 dual0/ports/2 plain0/ports/1"
show() {
    for port in $ports; do
        echo "$port $(cut -d: -f7- $port/gids/0) $(ls $port/gid_attrs/ndevs 2>/dev/null | wc -l)" \
            "$(cat /sys/class/infiniband/$port/state)"
    done
    echo net $(ls dual0/device/net 2>/dev/null)
}
soon() {
    n=0
    until eval "$1"; do
        n=$((n + 1))
        if [ $n = 3000 ]; then echo "not: $1"; show; exit 1; fi
        sleep 0.02
    done
}
show
ip addr add 10.9.8.8/32 dev lo
soon 'grep -q 0a09:0808 plain0/ports/1/gids/0'
ip addr add 10.9.8.7/32 dev lo
soon 'grep -q 0a09:0807 dual0/ports/2/gids/0'
show
ip addr del 10.9.8.6/32 dev lo
soon '! grep -q 0a09:0806 dual0/ports/1/gids/0'
soon '[ $(ls dual0/device/net 2>/dev/null | wc -l) = 1 ]'
soon 'grep -q DOWN /sys/class/infiniband/dual0/ports/1/state'
show
"#;

#[test]
fn the_gids_of_each_port_follow_the_addresses_of_the_host() {
    if !anyverbs_testing::unshare_or_skip() {
        return;
    }
    let scratch = Scratch::new();
    fs::write(scratch.dir.join("rack.toml"), AWAY).unwrap();
    let within = scratch.command();
    let mut command = Command::new("unshare");
    let begin = "ip link set lo up && ip addr add 10.9.8.6/32 dev lo && exec \"$@\"";
    command.args(["-Urn", "sh", "-c", begin, "sh"]).arg(within.get_program());
    command.args(["run", "--", "sh", "-c", FOLLOW]).current_dir(&scratch.dir);
    for (name, value) in within.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let output = command.output().unwrap();
    let wanted = "dual0/ports/1 0a09:0806 1 4: ACTIVE\n\
                  dual0/ports/2 0000:0000 0 1: DOWN\n\
                  plain0/ports/1 0000:0000 0 1: DOWN\n\
                  net lo\n\
                  dual0/ports/1 0a09:0806 1 4: ACTIVE\n\
                  dual0/ports/2 0a09:0807 1 4: ACTIVE\n\
                  plain0/ports/1 0a09:0808 1 4: ACTIVE\n\
                  net lo\n\
                  dual0/ports/1 0000:0000 0 1: DOWN\n\
                  dual0/ports/2 0a09:0807 1 4: ACTIVE\n\
                  plain0/ports/1 0a09:0808 1 4: ACTIVE\n\
                  net lo\n";
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8(output.stdout).unwrap(), wanted, "{said}");
}

#[test]
fn programs_find_both_ports() {
    let scratch = Scratch::new();
    if is_there("ibv_devinfo") {
        let seen = scratch.prints("ibv_devinfo -d dual0");
        let words: Vec<&str> = seen.split_whitespace().collect();
        let has = |pair: [&str; 2]| words.windows(2).any(|words| words == pair);
        assert!(
            has(["phys_port_cnt:", "2"]) && has(["port:", "1"]) && has(["port:", "2"]),
            "{seen}"
        );
        assert_eq!(seen.matches("PORT_ACTIVE").count(), 2, "{seen}");
    } else {
        skip("no ibv_devinfo (ibverbs-utils)");
    }
    if is_there("rdma") {
        let seen = scratch.prints("rdma link && rdma link show dual0/2");
        let ports: Vec<&str> = seen.lines().map(|line| line.split(' ').nth(1).unwrap()).collect();
        assert_eq!(ports, ["dual0/1", "dual0/2", "plain0/1", "dual0/2"], "{seen}");
        let counted = scratch.prints("rdma statistic show link dual0/2");
        assert!(counted.starts_with("link dual0/2 "), "{counted}");
        let refused = scratch
            .prints("rdma link show dual0/3 2>&1; rdma statistic show link plain0/2 2>&1; true");
        assert!(!refused.contains("link "), "{refused}");
    } else {
        skip("no rdma (iproute2)");
    }
}

/// iproute2 asks by netlink. The objects are those of the processes that live, each under the port that it uses.
#[test]
fn iproute2_shows_the_objects_of_each_port() {
    if !is_there("rdma") || !is_there("ib_write_bw") {
        return skip("no rdma (iproute2) or ib_write_bw (perftest)");
    }
    let scratch = Scratch::new();
    let tcp = scratch.port.number();
    let write = format!("ib_write_bw -d dual0 -i 2 -q 3 -D 60 -p {tcp}");
    // The client ends where its server does not listen yet. The server's queue pairs stay in RTR.
    let seen = scratch.prints(&format!(
        "state() {{ rdma resource show qp | grep -c \"state $1\"; }}
         {write} >server.log 2>&1 & server=$! n=0
         until {{ {write} 127.0.0.2 >client.log 2>&1 & client=$!
             while kill -0 $client 2>/dev/null && [ $(state RTS),$(state RTR) != 3,3 ]; do sleep 0.05; done
             kill -0 $client 2>/dev/null; }}; do
             n=$((n + 1)); [ $n -lt 300 ] || {{ cat server.log client.log >&2; exit 1; }}
         done
         echo all; rdma resource show; echo qps; rdma resource show qp
         echo port; rdma resource show qp link dual0/2
         echo other; rdma resource show qp link dual0/1; rdma resource show qp link plain0/1
         echo ready; rdma resource show qp link dual0/2 state RTS; echo cqs; rdma resource show cq dev dual0
         kill $server $client; wait; true"
    ));
    let part = |from: &str, to: &str| {
        let (_, rest) = seen.split_once(&format!("{from}\n")).unwrap_or_else(|| panic!("{seen}"));
        let (part, _) = rest.split_once(&format!("{to}\n")).unwrap_or((rest, ""));
        part.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let number = |line: &str, name: &str| -> u64 {
        let mut words = line.split(' ').skip_while(|word| *word != name);
        words.nth(1).and_then(|word| word.parse().ok()).unwrap_or_else(|| panic!("{name}: {line}"))
    };
    let all = part("all", "qps");
    let of = |name: &str| all.iter().find(|line| line.contains(&format!(" {name}: "))).unwrap();
    // The summary of each device is that of all.
    for device in ["dual0", "plain0"] {
        let counts = ["pd", "cq", "qp", "mr"].map(|kind| number(of(device), kind));
        assert_eq!(counts, [2, 2, 6, 2], "{all:?}");
    }
    let qps = part("qps", "port");
    assert_eq!(qps.len(), 6, "{qps:?}");
    assert_eq!(part("port", "other"), qps);
    assert_eq!(part("other", "ready"), [""; 0]);
    for qp in &qps {
        assert!(qp.starts_with("link dual0/2 lqpn "), "{qp}");
        assert!(qp.contains(" type RC state RT") && qp.contains(" comm ib_write_bw"), "{qp}");
        // Its peer is the other process's, whose peer it is.
        let (own, peer) = (number(qp, "lqpn"), number(qp, "rqpn"));
        let back = qps.iter().find(|other| number(other, "lqpn") == peer).unwrap();
        assert_eq!(number(back, "rqpn"), own);
        assert_ne!(number(back, "pid"), number(qp, "pid"));
    }
    let ready = qps.iter().filter(|qp| qp.contains(" state RTS ")).cloned().collect::<Vec<_>>();
    assert_eq!((ready.len(), part("ready", "cqs")), (3, ready));
    let cqs = part("cqs", "end");
    assert!(cqs.len() == 2 && cqs.iter().all(|cq| cq.starts_with("dev dual0 cqn ")), "{cqs:?}");
}

#[test]
fn traffic_is_that_of_the_port() {
    if !is_there("ib_write_lat") || !is_there("rping") {
        return skip("no ib_write_lat (perftest) or rping (rdmacm-utils)");
    }
    let scratch = Scratch::new();
    // Both ends are below one launcher, whose view counts both.
    let counts = "cd /sys/class/infiniband; for p in dual0/ports/1 dual0/ports/2 plain0/ports/1; do cat $p/hw_counters/sent_pkts; done";
    let read = |seen: &str| -> Vec<u64> {
        let numbers = seen.lines().filter_map(|line| line.trim().parse().ok());
        numbers.collect::<Vec<u64>>()
    };
    let run = |server: &str, client: &str| {
        let script = format!(
            "{server} >server.log 2>&1 & n=0; until {client} >client.log 2>&1; do n=$((n + 1)); \
             [ $n -lt 1000 ] || {{ cat server.log client.log >&2; exit 1; }}; done; wait; {counts}"
        );
        read(&scratch.prints(&script))
    };
    let lat = "ib_write_lat -d dual0 -i 2 -n 100";
    // Programs take no port of the kernel's choice. That of UDP is this test's own, and so most likely free for TCP.
    let tcp = scratch.port.number();
    let sent = run(&format!("{lat} -p {tcp}"), &format!("{lat} -p {tcp} 127.0.0.1"));
    assert!(sent.len() == 3 && sent[0] == 0 && sent[1] >= 200 && sent[2] == 0, "{sent:?}");
    let at = "-a 127.0.0.2 -C 20";
    let sent =
        run(&format!("rping -s {at} -p {tcp}"), &format!("rping -c {at} -p {tcp} -I 127.0.0.2"));
    assert!(sent[0] == 0 && sent[1] >= 40 && sent[2] == 0, "{sent:?}");
}

#[test]
fn a_fault_of_one_port_is_seen_there() {
    let scratch = Scratch::new();
    if !is_there("ibv_devinfo") {
        return skip("no ibv_devinfo (ibverbs-utils)");
    }
    let faults =
        ["run", "--faults", "on device dual0 port 2: down", "--", "ibv_devinfo", "-d", "dual0"];
    let seen = scratch.says(&faults);
    let states: Vec<&str> = seen.lines().filter(|line| line.contains("PORT_")).collect();
    assert!(states.len() == 2 && states[0].contains("PORT_ACTIVE"), "{seen}");
    assert!(states[1].contains("PORT_DOWN"), "{seen}");
}

#[test]
fn a_mistake_names_the_file_the_device_the_port_and_the_key() {
    let scratch = Scratch::new();
    fs::write(scratch.dir.join("rack.toml"), "devices = [{ ports = ['lo', { address = '::' }] }]")
        .unwrap();
    let output = scratch.command().arg("devices").output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    let wanted = "configuration file \"rack.toml\": device 1 of devices: port 2 of ports: address=\"::\": expected an address of the host";
    assert!(said.contains(wanted), "{said}");
}

#[test]
fn a_refusal_names_each_port_and_the_key_of_its_address() {
    let scratch = Scratch::new();
    let rack =
        "devices = [{ name = 'dual0', ports = ['nosuch0', { interface = 'nosuch1' }] }, 'nosuch2']";
    fs::write(scratch.dir.join("rack.toml"), rack).unwrap();
    let output = scratch.command().arg("devices").output().unwrap();
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    for (port, key, name) in [
        ("dual0/1", "device 1 of devices: ports", "nosuch0"),
        ("dual0/2", "device 1 of devices: port 2 of ports: interface", "nosuch1"),
        ("anyverbs1", "devices", "nosuch2"),
    ] {
        let wanted = format!(
            "device {port}, by configuration file \"rack.toml\": {key}: there is no interface \"{name}\", but "
        );
        assert!(said.contains(&wanted), "{said}");
    }
}

//! Hosts to run programs on: this machine's network, or network namespaces made for the run.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use anyverbs_net::Store;
use serde::Deserialize;

use super::process::{Process, quiet, wait_for};
use super::table::Place;

/// The place of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Topology {
    /// One host, with a loopback interface only.
    Loopback,
    /// The same; programs are given `::1`.
    LoopbackIpv6,
    /// One host with an Ethernet interface, MTU 1500; both programs use it.
    OneHost,
    /// The same; programs are given IPv6 addresses.
    OneHostIpv6,
    /// Two hosts on a cable, MTU 1500.
    TwoHosts,
    /// Two hosts on a cable, MTU 9000.
    #[serde(rename = "two-hosts-9000")]
    TwoHosts9000,
    /// Two hosts on a cable, MTU 1500; programs are given IPv6 addresses.
    TwoHostsIpv6,
    /// Two hosts on a cable, MTU 1500; programs are given link-local addresses with their scope.
    TwoHostsLinkLocal,
    /// Two hosts, MTU 1500, and a machine between them, to which each has a cable; they send single packets with checksums.
    Bridged,
    /// The same; programs are given IPv6 addresses.
    BridgedIpv6,
}

impl Place for Topology {
    fn name(self) -> &'static str {
        match self {
            Topology::Loopback => "loopback",
            Topology::LoopbackIpv6 => "loopback-ipv6",
            Topology::OneHost => "one-host",
            Topology::OneHostIpv6 => "one-host-ipv6",
            Topology::TwoHosts => "two-hosts",
            Topology::TwoHosts9000 => "two-hosts-9000",
            Topology::TwoHostsIpv6 => "two-hosts-ipv6",
            Topology::TwoHostsLinkLocal => "two-hosts-link-local",
            Topology::Bridged => "bridged",
            Topology::BridgedIpv6 => "bridged-ipv6",
        }
    }
}

impl Topology {
    fn mtu(self) -> u32 {
        if self == Topology::TwoHosts9000 { 9000 } else { 1500 }
    }

    fn one_host(self) -> bool {
        matches!(
            self,
            Topology::Loopback | Topology::LoopbackIpv6 | Topology::OneHost | Topology::OneHostIpv6
        )
    }

    fn bridged(self) -> bool {
        matches!(self, Topology::Bridged | Topology::BridgedIpv6)
    }

    /// Whether there is a loopback interface only.
    fn loopback(self) -> bool {
        matches!(self, Topology::Loopback | Topology::LoopbackIpv6)
    }
}

/// The Ethernet interface of each host, where there is one.
pub(crate) const INTERFACE: &str = "eth0";

/// The interfaces of the machine between two hosts.
pub(crate) const MIDDLE: [&str; 2] = ["left", "right"];

/// Arguments of `ethtool -K eth0` that make a host send single packets with their checksums, and receive them one by
/// one.
pub(crate) const SINGLE_PACKETS: &str = "tx off tso off gso off gro off tx-udp-segmentation off";

/// The hosts of one topology, gone when this value is.
pub(crate) struct Hosts {
    topology: Topology,
    /// Server's, then client's; one if both run on it; then that of the machine between them. Empty: this machine's own network.
    namespaces: Vec<Namespace>,
}

/// An end of a test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Side {
    Server,
    Client,
}

impl Hosts {
    /// Sets the hosts up; `label` tells those of parallel workers apart. `None` if that takes root.
    pub(crate) fn new(
        topology: Topology,
        label: usize,
        scratch: &Path,
    ) -> anyhow::Result<Option<Self>> {
        // SAFETY: cannot fail and touches no memory.
        if unsafe { libc::geteuid() } != 0 {
            return Ok(topology.loopback().then(|| Hosts { topology, namespaces: Vec::new() }));
        }
        let name = |side| format!("{PREFIX}{}-{label}{side}", std::process::id());
        // A cable has two ends; with one host the other end only keeps the link up.
        let sides: &[&str] = match topology {
            _ if topology.loopback() => &["a"],
            _ if topology.bridged() => &["a", "b", "m"],
            _ => &["a", "b"],
        };
        let namespaces = sides
            .iter()
            .map(|side| Namespace::new(name(side), scratch))
            .collect::<anyhow::Result<Vec<_>>>()?;
        if let [a, b, middle @ ..] = &namespaces[..] {
            let mtu = topology.mtu().to_string();
            match middle.first() {
                None => cable((a, INTERFACE), (b, INTERFACE), &mtu)?,
                Some(middle) => {
                    for (host, end) in [a, b].into_iter().zip(MIDDLE) {
                        cable((host, INTERFACE), (middle, end), &mtu)?;
                        ip(&["-n", &middle.name, "link", "set", end, "addrgenmode", "none", "up"])?;
                        let mut ethtool = Command::new("ip");
                        ethtool.args(["netns", "exec", &host.name, "ethtool", "-K", INTERFACE]);
                        quiet(ethtool.args(SINGLE_PACKETS.split(' ')))?;
                    }
                }
            }
            for (host, number) in [(a, "1"), (b, "2")] {
                let on_host = |words: &[&str]| ip(&[&["-n", &host.name], words].concat());
                // Without link-local addresses the GID table does not change while duplicate detection runs.
                on_host(&["link", "set", "eth0", "addrgenmode", "none"])?;
                on_host(&["link", "set", "eth0", "up"])?;
                let mut addresses =
                    vec![format!("10.77.0.{number}/24"), format!("fd77::{number}/64")];
                if topology == Topology::TwoHostsLinkLocal {
                    addresses.push(format!("fe80::{number}/64"));
                }
                for address in &addresses {
                    let mut words = vec!["address", "add", address, "dev", "eth0"];
                    if address.contains(':') {
                        words.push("nodad");
                    }
                    on_host(&words)?;
                }
            }
        }
        Ok(Some(Hosts { topology, namespaces }))
    }

    /// The address that a client dials.
    pub(crate) fn server_address(&self, ipv4: bool) -> &'static str {
        match self.topology {
            Topology::Loopback => "127.0.0.1",
            Topology::LoopbackIpv6 if ipv4 => "127.0.0.1",
            Topology::LoopbackIpv6 => "::1",
            Topology::OneHost | Topology::TwoHosts | Topology::TwoHosts9000 | Topology::Bridged => {
                "10.77.0.1"
            }
            _ if ipv4 => "10.77.0.1",
            Topology::OneHostIpv6 | Topology::TwoHostsIpv6 | Topology::BridgedIpv6 => "fd77::1",
            Topology::TwoHostsLinkLocal => "fe80::1%eth0",
        }
    }

    /// The address that a side uses in this topology.
    pub(crate) fn own_address(&self, side: Side) -> &'static str {
        match (self.topology, side) {
            (Topology::TwoHostsIpv6 | Topology::BridgedIpv6, Side::Client) => "fd77::2",
            (Topology::TwoHostsLinkLocal, Side::Client) => "fe80::2%eth0",
            (Topology::TwoHosts | Topology::TwoHosts9000 | Topology::Bridged, Side::Client) => {
                "10.77.0.2"
            }
            _ => self.server_address(false),
        }
    }

    fn namespace(&self, side: Side) -> Option<&Namespace> {
        match side {
            Side::Client if !self.topology.one_host() => self.namespaces.get(1),
            _ => self.namespaces.first(),
        }
    }

    /// A command that runs `program` on one side.
    pub(crate) fn command(&self, side: Side, program: &Path) -> Command {
        within(self.namespace(side), program)
    }

    /// A command that runs `program` on the machine between the hosts of [`Topology::Bridged`].
    pub(crate) fn in_the_middle(&self, program: &Path) -> Command {
        within(self.namespaces.get(2), program)
    }

    /// The sockets of a side's host.
    pub(crate) fn sockets(&self, side: Side) -> Sockets {
        match self.namespace(side) {
            Some(host) => Sockets::of(&host.holder.id().to_string()),
            None => Sockets::of("self"),
        }
    }
}

fn within(namespace: Option<&Namespace>, program: &Path) -> Command {
    match namespace {
        None => Command::new(program),
        Some(namespace) => namespace.command(program),
    }
}

/// Connects two interfaces, which this makes.
fn cable(one: (&Namespace, &str), other: (&Namespace, &str), mtu: &str) -> anyhow::Result<()> {
    ip(&[
        "-n",
        &one.0.name,
        "link",
        "add",
        one.1,
        "mtu",
        mtu,
        "type",
        "veth",
        "peer",
        "name",
        other.1,
        "mtu",
        mtu,
        "netns",
        &other.0.name,
    ])
}

/// The sockets of a process' network namespace.
pub(crate) struct Sockets {
    process: String,
}

impl Sockets {
    /// The sockets of a process, by its id, or `self`.
    pub(crate) fn of(process: &str) -> Self {
        Sockets { process: process.into() }
    }

    /// Tells whether a process listens on a TCP port.
    pub(crate) fn listens(&self, port: u16) -> anyhow::Result<bool> {
        const LISTEN: &str = "0A";
        self.any(["tcp", "tcp6"], port, LISTEN)
    }

    /// Tells whether a process is bound to a UDP port.
    pub(crate) fn is_bound(&self, port: u16) -> anyhow::Result<bool> {
        const UNCONNECTED: &str = "07";
        self.any(["udp", "udp6"], port, UNCONNECTED)
    }

    /// Whether a program on the device listens on a port of librdmacm.
    pub(crate) fn cm_listens(&self, port: u16) -> anyhow::Result<bool> {
        let namespace = |process: &Path| fs::read_link(process.join("ns/net")).ok();
        let wanted = namespace(&Path::new("/proc").join(&self.process));
        let processes = fs::read_dir("/proc").context("cannot read /proc")?;
        for process in processes.filter_map(|entry| Some(entry.ok()?.path())) {
            if wanted.is_none() || namespace(&process) != wanted {
                continue;
            }
            if let Some(services) = services_of(&process) {
                return Ok(services.into_iter().any(|id| is_cm_port(id, port)));
            }
        }
        Ok(false)
    }

    /// The abstract names of Unix sockets that begin so.
    pub(crate) fn names_with(&self, prefix: &str) -> anyhow::Result<BTreeSet<String>> {
        let table = self.table("unix")?;
        let names = table.lines().filter_map(|line| line.split_ascii_whitespace().nth(7));
        Ok(names.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect())
    }

    /// The number of sockets that are bound to a UDP port.
    pub(crate) fn bound_to(&self, port: u16) -> anyhow::Result<usize> {
        let local = format!(":{port:04X}");
        let bound = |table: String| {
            let lines = table.lines().skip(1);
            lines
                .filter_map(|line| line.split_ascii_whitespace().nth(1))
                .filter(|address| address.ends_with(&local))
                .count()
        };
        Ok(bound(self.table("udp")?) + bound(self.table("udp6").unwrap_or_default()))
    }

    fn table(&self, name: &str) -> anyhow::Result<String> {
        let path = format!("/proc/{}/net/{name}", self.process);
        fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))
    }

    fn any(&self, [ipv4, ipv6]: [&str; 2], port: u16, state: &str) -> anyhow::Result<bool> {
        let path = |table| format!("/proc/{}/net/{table}", self.process);
        let table = fs::read_to_string(path(ipv4))
            .with_context(|| format!("cannot read {}", path(ipv4)))?;
        // A kernel without IPv6 has no second table.
        let table6 = fs::read_to_string(path(ipv6)).unwrap_or_default();
        Ok(has_socket(&table, port, state) || has_socket(&table6, port, state))
    }
}

/// Whether a table as in `/proc/net/tcp` has a socket on `port` in this state.
fn has_socket(table: &str, port: u16, wanted: &str) -> bool {
    table.lines().skip(1).any(|line| {
        let mut fields = line.split_ascii_whitespace();
        let local = fields.nth(1).and_then(|address| address.rsplit_once(':'));
        let state = fields.nth(1);
        local.and_then(|(_, hex)| u16::from_str_radix(hex, 16).ok()) == Some(port)
            && state == Some(wanted)
    })
}

/// The services that processes of the device hold, as the store says that a process shares with others.
fn services_of(process: &Path) -> Option<Vec<u64>> {
    let files = fs::read_dir(process.join("fd")).ok()?;
    let is_store = |path: &PathBuf| {
        let link = fs::read_link(path);
        link.is_ok_and(|link| link.to_string_lossy().starts_with("/memfd:anyverbs-host:"))
    };
    let path = files.filter_map(|entry| Some(entry.ok()?.path())).find(is_store)?;
    let file = fs::File::options().read(true).write(true).open(path).ok()?;
    Store::held_services(file).ok()?
}

/// Whether a service is a port of librdmacm: 0x1, the port space and the port (IBA A11).
fn is_cm_port(service: u64, port: u16) -> bool {
    service >> 24 == 1 && service & 0xffff == u64::from(port)
}

const PREFIX: &str = "avt-";

/// A network namespace with loopback up, and a process that holds it open.
struct Namespace {
    name: String,
    holder: Process,
    /// Entrances of the network namespace, and of the holder's mounts, which have this network's `/sys`.
    entrances: [Arc<File>; 2],
}

impl Namespace {
    fn new(name: String, scratch: &Path) -> anyhow::Result<Self> {
        ip(&["netns", "add", &name])?;
        let made = Self::hold(&name, scratch);
        if made.is_err() {
            remove(&name);
        }
        made
    }

    fn hold(name: &str, scratch: &Path) -> anyhow::Result<Self> {
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        let mut command = Command::new("ip");
        let script = "echo inside; exec sleep infinity";
        command.args(["netns", "exec", name, "sh", "-c", script]);
        let mut holder = Process::start(&mut command, &scratch.join(format!("{name}.out")))?;
        let there = wait_for(Instant::now() + Duration::from_secs(5), || {
            if holder.ended()?.is_some() {
                bail!("cannot enter {name}: {}", holder.output().trim());
            }
            Ok(holder.output().contains("inside"))
        })?;
        if !there {
            bail!("cannot enter {name}");
        }
        let entrance = |kind| {
            let path = format!("/proc/{}/ns/{kind}", holder.id());
            File::open(&path).map(Arc::new).with_context(|| format!("cannot open {path}"))
        };
        let entrances = [entrance("net")?, entrance("mnt")?];
        Ok(Namespace { name: name.to_owned(), holder, entrances })
    }

    /// A command that runs `program` inside.
    ///
    /// Enters without `ip netns exec`, which gives each program mounts of its own. The last thread of a process that
    /// ends would wait in the kernel until these are gone. That is a grace period of RCU, which takes seconds on a busy
    /// machine.
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        let [net, mounts] = self.entrances.clone();
        let enter = move || enter(&net, &mounts);
        // SAFETY: nothing but system calls on memory of its own stack.
        unsafe { command.pre_exec(enter) };
        command
    }
}

/// Takes the calling process into namespaces; it stays in its directory, by name.
fn enter(net: &File, mounts: &File) -> io::Result<()> {
    const PATH_MAX: usize = libc::PATH_MAX as usize;
    let check = |done: bool| if done { Ok(()) } else { Err(io::Error::last_os_error()) };
    let mut here: [libc::c_char; PATH_MAX] = [0; PATH_MAX];
    // SAFETY: writes at most the length of `here` to it, with an end.
    check(!unsafe { libc::getcwd(here.as_mut_ptr(), here.len()) }.is_null())?;
    for (file, kind) in [(net, libc::CLONE_NEWNET), (mounts, libc::CLONE_NEWNS)] {
        // SAFETY: touches no memory.
        check(unsafe { libc::setns(file.as_raw_fd(), kind) } == 0)?;
    }
    // SAFETY: reads a string that has an end.
    check(unsafe { libc::chdir(here.as_ptr()) } == 0)
}

impl Drop for Namespace {
    fn drop(&mut self) {
        self.holder.stop();
        remove(&self.name);
    }
}

fn remove(name: &str) {
    if let Err(error) = ip(&["netns", "delete", name]) {
        eprintln!("xtask: {error:#}");
    }
}

fn ip(arguments: &[&str]) -> anyhow::Result<()> {
    quiet(Command::new("ip").args(arguments)).map(|_| ())
}

/// Removes leftovers of a run that was killed.
pub(crate) fn sweep() {
    for entry in fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let owner = name
            .strip_prefix(PREFIX)
            .and_then(|rest| rest.split_once('-'))
            .map(|(id, _)| id.to_owned());
        if owner
            .is_some_and(|id| id.parse::<u32>().is_ok() && !Path::new("/proc").join(id).exists())
        {
            remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_of_the_device_is_seen() {
        assert!(is_cm_port(0x106_4e20, 20_000) && is_cm_port(0x111_4e20, 20_000));
        assert!(!is_cm_port(0x106_4e20, 20_001) && !is_cm_port(0x4e20, 20_000));
    }

    #[test]
    fn holders_of_a_device_port_are_seen() {
        let registry = format!("av-xtask-{}", std::process::id());
        let slot = std::sync::Arc::new(anyverbs_net::Slot::claim(&registry).unwrap());
        let services = anyverbs_net::Services::new(slot);
        let own = Sockets::of("self");
        let port = 20_123;
        assert!(!own.cm_listens(port).unwrap());
        let held = services.reserve(
            0x106_0000 | u64::from(port),
            anyverbs_net::ServiceAddress::Any,
            false,
        );
        assert!(services_of(Path::new("/proc/self")).unwrap().contains(&0x106_4e9b));
        drop(held);
        assert!(services_of(Path::new("/proc/self")).unwrap().is_empty());
    }

    #[test]
    fn a_listener_is_seen_and_a_connection_is_not_one() {
        let table = "  sl  local_address rem_address   st tx_queue rx_queue\n   \
             0: 0100007F:4853 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1\n   \
             1: 0100007F:4854 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 1\n";
        assert!(has_socket(table, 0x4853, "0A"));
        assert!(!has_socket(table, 0x4854, "0A"));
        assert!(!has_socket(table, 0x9999, "0A"));
    }
}

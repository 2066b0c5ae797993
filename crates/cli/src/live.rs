//! The part of a tree that changes: counters, states of ports, and what `rdma` asks for. The files are made when somebody wants them.
//! Those of the addresses are made when an address of the host comes or goes.
//!
//! The preload object asks for fresh files by a connection to a socket in the tree, before it opens one, and waits for a byte. So a launcher
//! does not look at processes that nobody asks about.

use std::fs;
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyverbs::abandoned::Membership;
use anyverbs::config::Config;
use anyverbs::watch::{Addresses, Seen, Totals, Watcher};
use anyverbs_page::INTERVAL;

use crate::device::{self, Device};
use crate::{counters, view_netlink, view_port};
use view_netlink::replace;

/// The socket that answers when the files are fresh. The view knows its name.
pub(crate) const SOCKET: &str = ".fresh";
/// When nobody has asked for so many intervals, no connection to a process is kept.
const KEPT_FOR: u32 = 20;

/// Makes the files of one tree fresh.
#[derive(Debug)]
pub(crate) struct Files {
    /// The directory with the classes.
    sys: PathBuf,
    /// The directory with the answers to netlink requests, if any.
    netlink: Option<PathBuf>,
    devices: Vec<Device>,
    addresses: Addresses,
    watcher: Watcher,
    totals: Totals,
    last: Option<Instant>,
}

impl Files {
    /// For the devices of a process with this configuration, one at least.
    pub(crate) fn new(
        sys: PathBuf,
        netlink: Option<PathBuf>,
        (devices, config): (Vec<Device>, &Config),
        host: Membership,
    ) -> io::Result<Self> {
        let first = devices.first().ok_or(io::ErrorKind::NotFound)?;
        Ok(Self {
            sys,
            netlink,
            watcher: Watcher::new(&first.registry, first.udp_port)?,
            totals: Totals::new(host, devices.iter().map(|device| device.ports.len()).sum()),
            devices,
            addresses: Addresses::new(config)?,
            last: None,
        })
    }

    /// Writes all files, unless they are fresh.
    pub(crate) fn refresh(&mut self) -> io::Result<()> {
        if self.last.is_some_and(|last| last.elapsed() < INTERVAL) {
            return Ok(());
        }
        let seen = self.watcher.look(INTERVAL);
        self.write(&seen)?;
        self.last = Some(Instant::now());
        Ok(())
    }

    /// Writes the files of the addresses that have changed.
    pub(crate) fn follow(&mut self) -> io::Result<()> {
        self.addresses.follow()?;
        let mut all = self.addresses.ports();
        for device in &mut self.devices {
            let ib = self.sys.join("class/infiniband").join(&device.name);
            for (at, addresses) in (0..device.ports.len()).zip(&mut all) {
                if let Some(port) = device.ports[at].with(&addresses) {
                    view_port::rewrite_addresses(&ib, device, (at, &port))?;
                    device.ports[at] = port;
                    // The state of the port may be another.
                    self.last = None;
                }
            }
        }
        Ok(())
    }

    /// Nobody has asked for long: keeps no connection to any process.
    fn rest(&mut self) {
        self.watcher.rest();
        self.last = None;
    }

    /// Whether a process has this view.
    fn has(&self, pid: u32) -> bool {
        let wanted =
            [b"ANYVERBS_VIEW=", self.sys.parent().unwrap_or(&self.sys).as_os_str().as_bytes()];
        let wanted = wanted.concat();
        fs::read(format!("/proc/{pid}/environ"))
            .is_ok_and(|all| all.split(|byte| *byte == 0).any(|variable| variable == wanted))
    }

    /// Writes all files, with what these processes have.
    fn write(&mut self, seen: &[Seen]) -> io::Result<()> {
        let all: Vec<counters::Counters> =
            self.totals.update(seen).map(Iterator::collect).collect();
        // A script of faults is one of a process, and the view is one of all programs of a launcher. It shows a port as down that is
        // down for any of them.
        let pages =
            seen.iter().filter_map(|seen| Some((seen.pid, seen.page.as_ref()?.as_ref().ok()?)));
        let down: Vec<&str> = pages
            .filter(|(pid, page)| !page.down.is_empty() && self.has(*pid))
            .flat_map(|(_, page)| &page.down)
            .map(String::as_str)
            .collect();
        let mut rest = &all[..];
        for (device, index) in self.devices.iter().zip(0..) {
            let first = (all.len() - rest.len()) as u32;
            let counted;
            (counted, rest) = rest.split_at(device.ports.len());
            let ports = self.sys.join("class/infiniband").join(&device.name).join("ports");
            for ((number, port), counted) in device.numbered().zip(counted) {
                let is_down = down.contains(&device.port_name(number).as_str());
                let state = if is_down { device::DOWN } else { port.state };
                write_port(&ports.join(number.to_string()), state, counted)?;
                if let Some(dir) = &self.netlink {
                    view_netlink::write_port(dir, (device, index), (number, port), state)?;
                }
            }
            if let Some(dir) = &self.netlink {
                view_netlink::write_live(dir, (device, index), (first, counted), seen)?;
            }
        }
        Ok(())
    }
}

/// Writes the files of a port in this state.
fn write_port(port: &Path, state: u8, counted: &counters::Counters) -> io::Result<()> {
    let files =
        [("counters", counters::port(counted)), ("hw_counters", counters::hardware(counted))];
    fs::create_dir_all(port)?;
    for (name, value) in device::state_files(state) {
        replace(&port.join(name), format!("{value}\n").as_bytes())?;
    }
    for (dir, files) in &files {
        let dir = port.join(dir);
        fs::create_dir_all(&dir)?;
        for (name, value) in files {
            replace(&dir.join(name), format!("{value}\n").as_bytes())?;
        }
    }
    Ok(())
}

/// Serves a tree until it is dropped.
#[derive(Debug)]
pub(crate) struct Service {
    /// None once it is dropped.
    files: Arc<Mutex<Option<Files>>>,
}

impl Service {
    /// Makes the files without a look at any process, and answers at the socket of `tree`.
    pub(crate) fn start(tree: &Path, mut files: Files) -> io::Result<Self> {
        files.follow()?;
        files.write(&[])?;
        let addresses = files.addresses.as_fd().try_clone_to_owned()?;
        let listener = UnixListener::bind(tree.join(SOCKET))?;
        let files = Arc::new(Mutex::new(Some(files)));
        let service = Self { files: Arc::clone(&files) };
        thread::Builder::new().name("anyverbs-fresh".into()).spawn(move || {
            // `is_late`: the files do not follow yet, and no change will tell of it again.
            let (mut has_connections, mut is_late) = (false, false);
            loop {
                let patience = match (is_late, has_connections) {
                    (true, _) => Some(INTERVAL),
                    (false, true) => Some(KEPT_FOR * INTERVAL),
                    (false, false) => None,
                };
                let (is_asked, has_changed) = wait(&listener, &addresses, patience);
                let mut files = files.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(live) = &mut *files else { return };
                let is_due = is_late || has_changed;
                is_late = is_due && live.follow().is_err();
                if is_late && has_changed {
                    // There may be no descriptor for a while.
                    drop(files);
                    thread::sleep(INTERVAL);
                    continue;
                }
                if !is_asked {
                    if !is_due {
                        live.rest();
                        has_connections = false;
                    }
                    continue;
                }
                match listener.accept() {
                    Ok((mut socket, _)) => {
                        // The one who asks reads the old files then.
                        let _ = live.refresh();
                        has_connections = true;
                        let _ = socket.write_all(b"1");
                    }
                    // There may be no descriptor for a while, and the question still waits.
                    Err(_) => {
                        drop(files);
                        thread::sleep(INTERVAL);
                    }
                }
            }
        })?;
        Ok(service)
    }
}

/// Waits for a question or for other addresses, or until its patience ends.
fn wait(listener: &UnixListener, addresses: &OwnedFd, patience: Option<Duration>) -> (bool, bool) {
    let timeout = patience.map_or(-1, |patience| patience.as_millis() as libc::c_int);
    let mut entries = [listener.as_raw_fd(), addresses.as_raw_fd()].map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    // SAFETY: two live entries.
    unsafe { libc::poll(entries.as_mut_ptr(), 2, timeout) };
    let [is_asked, has_changed] = entries.map(|entry| entry.revents != 0);
    (is_asked, has_changed)
}

impl Drop for Service {
    fn drop(&mut self) {
        *self.files.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A program that runs in a view, until it is killed.
    fn process_of(view: &Path) -> Child {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.env("ANYVERBS_VIEW", view).spawn().unwrap();
        // Its environment shows in /proc when it runs, which may be after it was spawned.
        child.stdin.as_mut().unwrap().write_all(b"!").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        child
    }

    /// The files of two devices, in a tree of this name.
    fn two_rails(name: &str) -> (PathBuf, Files) {
        let registry = format!("anyverbs-{name}-{}", std::process::id());
        let tree = std::env::temp_dir().join(&registry);
        let devices = ["rail0", "rail1"].map(|name| Device {
            name: name.into(),
            registry: registry.clone(),
            ..crate::device::example()
        });
        let host = Membership::join(&registry, devices[0].udp_port).unwrap();
        let netlink = Some(tree.join("netlink"));
        let config = Config::default();
        let files = Files::new(tree.join("sys"), netlink, (devices.into(), &config), host).unwrap();
        (tree, files)
    }

    #[test]
    fn every_device_has_its_answers() {
        let (tree, mut files) = two_rails("live");
        let netlink = tree.join("netlink");
        files.refresh().unwrap();
        for (name, index) in [("rail0", 0u8), ("rail1", 1)] {
            for command in [9, 10, 12, 17] {
                let answer = fs::read(netlink.join(format!("{index}/c{command}"))).unwrap();
                assert_eq!(answer[8], index, "{name}, command {command}");
                assert!(answer.windows(5).any(|text| text == name.as_bytes()));
            }
            let port = tree.join("sys/class/infiniband").join(name).join("ports/1");
            assert!(port.join("hw_counters/sent_pkts").exists());
        }
        fs::remove_dir_all(tree).unwrap();
    }

    #[test]
    fn a_port_that_is_down_in_a_process_of_the_view_is_down_in_the_view() {
        use anyverbs::watch::{Condition, Snapshot};
        let (tree, mut files) = two_rails("down");
        let netlink = tree.join("netlink");
        let [mut own, mut other] = [&tree, &tree.join("other")].map(|view| process_of(view));
        let seen = |pid: u32, down: &str| Seen {
            pid,
            slot: 1,
            page: Some(Ok(Snapshot { down: vec![down.into()], ..Snapshot::default() })),
            age: std::time::Duration::ZERO,
            condition: Condition::Fresh,
        };
        let read = |name: &str| {
            let port = tree.join("sys/class/infiniband").join(name).join("ports/1");
            ["state", "phys_state"].map(|file| fs::read_to_string(port.join(file)).unwrap())
        };
        let state_of = |index: u8| {
            let answer = fs::read(netlink.join(format!("{index}/1"))).unwrap();
            let attribute = [&5_u16.to_ne_bytes()[..], &12_u16.to_ne_bytes()].concat();
            let at = answer.windows(4).position(|bytes| bytes == attribute).unwrap();
            answer[at + 4]
        };
        files.write(&[seen(own.id(), "rail1"), seen(other.id(), "rail0")]).unwrap();
        assert_eq!(read("rail0"), ["4: ACTIVE\n", "5: LinkUp\n"]);
        assert_eq!(read("rail1"), ["1: DOWN\n", "3: Disabled\n"]);
        assert_eq!([state_of(0), state_of(1)], [4, 1]);
        files.write(&[]).unwrap();
        assert_eq!(read("rail1"), ["4: ACTIVE\n", "5: LinkUp\n"]);
        for child in [&mut own, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        fs::remove_dir_all(tree).unwrap();
    }

    #[test]
    fn each_port_has_its_state_counters_and_queue_pairs() {
        use anyverbs::watch::{Condition, Snapshot};
        use anyverbs_page::{Counter, QueuePair};
        let (tree, mut files) = two_rails("ports");
        let port = files.devices[0].ports[0].clone();
        files.devices[0].ports.push(port);
        let host = Membership::join(&files.devices[0].registry, 4791).unwrap();
        files.totals = Totals::new(host, 3);
        let netlink = tree.join("netlink");
        let mut own = process_of(&tree);
        let counted = |value| vec![Counter { name: "sent_pkts".into(), value }];
        let queue_pair = |number, port| QueuePair { number, port, ..QueuePair::default() };
        let page = Snapshot {
            devices: ["rail0/1", "rail0/2", "rail1"].map(Into::into).into(),
            down: vec!["rail0/2".into()],
            counters_of: [5, 6, 7].map(counted).into(),
            queue_pairs: vec![queue_pair(0x51, 0), queue_pair(0x52, 1), queue_pair(0x53, 2)],
            ..Snapshot::default()
        };
        let (pid, age) = (own.id(), std::time::Duration::ZERO);
        let seen = Seen { pid, slot: 1, page: Some(Ok(page)), age, condition: Condition::Fresh };
        files.write(&[seen]).unwrap();
        let class = tree.join("sys/class/infiniband");
        let read = |file: &str| fs::read_to_string(class.join(file)).unwrap();
        for (port, state, sent) in [
            ("rail0/ports/1", "4: ACTIVE\n", "5\n"),
            ("rail0/ports/2", "1: DOWN\n", "6\n"),
            ("rail1/ports/1", "4: ACTIVE\n", "7\n"),
        ] {
            assert_eq!(read(&format!("{port}/state")), state, "{port}");
            assert_eq!(read(&format!("{port}/hw_counters/sent_pkts")), sent, "{port}");
        }
        // Number of a port (3), and of a queue pair (21).
        let attribute = |kind: u16, value: u32| {
            [&8_u16.to_ne_bytes()[..], &kind.to_ne_bytes(), &value.to_ne_bytes()].concat()
        };
        let has = |file: &str, kind, value| {
            let answer = fs::read(netlink.join(file)).unwrap();
            answer.windows(8).any(|bytes| bytes == attribute(kind, value))
        };
        assert!(has("0/1", 3, 1) && has("0/2", 3, 2) && !netlink.join("1/2").exists());
        assert_eq!([1, 2, 3].map(|port| has("0/c17", 3, port)), [true, true, false]);
        assert_eq!([1, 2].map(|port| has("1/c17", 3, port)), [true, false]);
        assert_eq!([0x51, 0x52, 0x53].map(|qp| has("0/c10", 21, qp)), [true, true, false]);
        assert_eq!([0x51, 0x52, 0x53].map(|qp| has("1/c10", 21, qp)), [false, false, true]);
        assert!(has("0/c10", 3, 2) && !has("1/c10", 3, 2));
        own.kill().unwrap();
        own.wait().unwrap();
        fs::remove_dir_all(tree).unwrap();
    }

    #[test]
    fn processes_are_met_when_somebody_asks() {
        use std::io::Read as _;
        use std::os::fd::AsFd as _;
        let tree = std::env::temp_dir().join(format!("anyverbs-lazy-{}", std::process::id()));
        let device = Device {
            registry: format!("anyverbs-lazy-{}", std::process::id()),
            ..crate::device::example()
        };
        let registry = anyverbs_net::Registry::of_port(&device.registry, device.udp_port).unwrap();
        // It looks for others itself.
        let host = Membership::join(&device.registry, device.udp_port).unwrap();
        let slot = anyverbs_net::Slot::claim_in(&registry).unwrap();
        let is_met = || {
            let fd = slot.as_fd().as_raw_fd();
            let mut entry = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
            // SAFETY: one live entry.
            unsafe { libc::poll(&raw mut entry, 1, 0) == 1 }
        };
        let devices = (vec![device], &Config::default());
        let files = Files::new(tree.join("sys"), None, devices, host).unwrap();
        let service = Service::start(&tree, files).unwrap();
        let counters = tree.join("sys/class/infiniband/anyverbs0/ports/1/hw_counters");
        assert!(counters.join("sent_pkts").exists() && !is_met());
        let mut question = std::os::unix::net::UnixStream::connect(tree.join(SOCKET)).unwrap();
        question.read_exact(&mut [0]).unwrap();
        assert!(is_met());
        drop(service);
        fs::remove_dir_all(tree).unwrap();
    }
}

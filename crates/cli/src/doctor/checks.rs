//! The checks. Each looks at one thing, changes nothing, and reports its finding.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyverbs::config::{Config, read_configuration};
use anyverbs_environment as environment;

use super::elf;
use super::loading::Loader;
use super::{Finding, Severity};
use crate::args::{Doctor, Settings};
use crate::device::{Device, Port};
use crate::{device, libraries, misspelt};

/// Below this a burst of a few messages overruns a socket's buffer.
const BUFFER: u64 = 4 << 20;

/// Files of rsockets' defaults, each of one number.
const RSOCKET_SETTINGS: [&str; 8] = [
    "mem_default",
    "wmem_default",
    "sqsize_default",
    "rqsize_default",
    "inline_default",
    "iomap_size",
    "polling_time",
    "wake_up_interval",
];

pub(super) fn all(args: &Doctor) -> Vec<Finding> {
    let mut findings = vec![library_directory(&args.settings)];
    let devices = device::list(&args.settings);
    findings.extend(interfaces(&devices));
    findings.push(loopback());
    findings.push(port(udp_port()));
    findings.push(view_directory(devices.as_deref().unwrap_or_default()));
    if libraries::find(&args.settings).is_ok() {
        let directory = rsocket_settings();
        let lacking = no_sockets(&args.settings);
        findings.extend(lacking.is_empty().then(|| rsockets(&directory)));
        findings.extend(lacking);
    }
    findings.push(buffers());
    findings.extend(offloads());
    findings.push(cross_process_copy());
    findings.extend(nat(devices.as_deref().unwrap_or_default()));
    findings.extend(preload());
    findings.extend(other_devices());
    findings.extend(descriptors());
    findings.extend(configuration(&args.settings));
    findings.extend(replaced_tables(&args.settings));
    findings.extend(
        misspelt::all()
            .iter()
            .map(|misspelt| Finding::new(Severity::Note, misspelt.what(), misspelt.remedy())),
    );
    if let Some(program) = args.program.first() {
        let loader = Loader::new(library_path(&args.settings), preloaded(&args.settings));
        findings.extend(elf::program(Path::new(program), &loader));
    }
    findings
}

/// The folders in which `anyverbs run` lets the loader look.
fn library_path(settings: &Settings) -> Vec<PathBuf> {
    let before = environment::variable("LD_LIBRARY_PATH").unwrap_or_default();
    let before = std::env::split_paths(&before).filter(|dir| !dir.as_os_str().is_empty());
    libraries::find(settings).ok().into_iter().chain(before.collect::<Vec<_>>()).collect()
}

/// The objects that `anyverbs run` lets the loader load first, as far as they matter to others.
fn preloaded(settings: &Settings) -> Vec<PathBuf> {
    let ours = libraries::find(settings).ok().map(|dir| dir.join(libraries::PRELOAD));
    let others = environment::variable("LD_PRELOAD").unwrap_or_default();
    let others = others.as_bytes().split(|byte| b" :".contains(byte)).filter(|o| !o.is_empty());
    ours.into_iter().chain(others.map(|other| OsStr::from_bytes(other).into())).collect()
}

fn library_directory(settings: &Settings) -> Finding {
    match libraries::find(settings) {
        Ok(dir) => Finding::good(format!("the libraries are in {}", dir.display())),
        Err(error) => Finding::stop("there are no libraries to give to a program", &error),
    }
}

fn interfaces(devices: &anyhow::Result<Vec<Device>>) -> Vec<Finding> {
    let devices = match devices {
        Ok(devices) => devices,
        Err(error) => {
            return vec![Finding::stop("there is no device", error)];
        }
    };
    let describe = |(name, port): (String, &Port)| {
        let Some(gid) = port.address() else {
            if !port.unusable.is_empty() {
                let (what, why) = (format!("{name} has no address"), port.unusable.join(", and "));
                return Finding::stop(&what, &anyhow::anyhow!(why));
            }
            return Finding::new(
                Severity::Stop,
                format!("{name} has no address"),
                "bring an interface up: ip link set NAME up (as root)",
            );
        };
        let what = format!(
            "{name}: GID {} is {} on {}, active MTU {}",
            gid.index, gid.address, gid.ndev, port.active_mtu
        );
        if gid.address.is_loopback() {
            return Finding::new(
                Severity::Note,
                format!("{what}: no other host can be reached"),
                "give an interface an IPv4 address and bring it up, unless programs of this host are enough",
            );
        }
        Finding::good(what)
    };
    let ports = |device: &'_ Device| {
        let named = |(number, port)| describe((device.port_name(number), port));
        device.numbered().map(named).collect::<Vec<_>>()
    };
    devices.iter().flat_map(ports).collect()
}

/// Sends a datagram: an address can be bound although its interface is down.
fn loopback() -> Finding {
    let sent = || -> io::Result<()> {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        socket.connect(socket.local_addr()?)?;
        socket.send(&[1])?;
        socket.recv(&mut [0]).map(|_| ())
    };
    match sent() {
        Ok(()) => Finding::good("the loopback interface is up"),
        Err(error) => Finding::new(
            Severity::Stop,
            format!("no datagram can be sent to 127.0.0.1: {error}"),
            "ip link set lo up (as root)",
        ),
    }
}

/// The configured port, or RoCEv2's where the configuration cannot be read, which is reported on its own.
fn udp_port() -> u16 {
    Config::load().unwrap_or_default().udp_port
}

/// A socket in `/proc/net/udp`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Holder {
    user: u32,
    inode: u64,
}

/// Looks for the owner of the port, and tries to take it only if it is free. One more socket among those of running
/// devices would take packets from them.
fn port(port: u16) -> Finding {
    let holders: Vec<Holder> = ["/proc/net/udp", "/proc/net/udp6"]
        .iter()
        .flat_map(|path| holders(&fs::read_to_string(path).unwrap_or_default(), port))
        .collect();
    // SAFETY: cannot fail and touches no memory.
    let me = unsafe { libc::geteuid() };
    if let Some(other) = holders.iter().find(|holder| holder.user != me) {
        return Finding::new(
            Severity::Stop,
            format!("UDP port {port} belongs to user {}: {}", other.user, owner(other.inode)),
            "stop it, run as that user, or run in a network namespace of your own (`ip netns exec`, `unshare -rn`)",
        );
    }
    if let Some(holder) = holders.first() {
        let owner = owner(holder.inode);
        // A socket of the kernel has no inode and counts as root's.
        if holder.inode == 0 {
            return Finding::new(
                Severity::Stop,
                format!("UDP port {port} belongs to {owner}"),
                "remove the Soft-RoCE link (as root: `rdma link`, then `rdma link delete NAME`), or run in a network namespace of your own",
            );
        }
        return Finding::new(
            Severity::Note,
            format!("UDP port {port} is in use by {owner}"),
            "that is right if it runs on anyverbs: programs of one user share the port; otherwise stop it",
        );
    }
    match UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)) {
        Ok(_) => Finding::good(format!("UDP port {port} is free")),
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => Finding::new(
            Severity::Stop,
            format!("UDP port {port} is taken by somebody whom this system does not show"),
            "if Soft-RoCE (rdma_rxe) is loaded, remove its link (as root: `rdma link delete NAME`); else run in a network namespace of your own",
        ),
        Err(error) => Finding::new(
            Severity::Stop,
            format!("UDP port {port} cannot be bound: {error}"),
            "a security policy forbids it: allow UDP sockets for this user or container",
        ),
    }
}

/// The sockets on a port in a table as in `/proc/net/udp`.
fn holders(table: &str, port: u16) -> Vec<Holder> {
    table
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let (_, hex) = fields.get(1)?.rsplit_once(':')?;
            (u16::from_str_radix(hex, 16).ok()? == port).then_some(Holder {
                user: fields.get(7)?.parse().ok()?,
                inode: fields.get(9)?.parse().ok()?,
            })
        })
        .collect()
}

/// The owner of a socket, as far as this user may look.
fn owner(inode: u64) -> String {
    if inode == 0 {
        return "the kernel's Soft-RoCE (rdma_rxe)".into();
    }
    let wanted = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    for process in
        processes.filter(|entry| entry.file_name().as_encoded_bytes()[0].is_ascii_digit())
    {
        let descriptors = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        if descriptors
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .any(|link| link == Path::new(&wanted))
        {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return format!("process {} ({})", process.file_name().display(), name.trim());
        }
    }
    "a process that this user cannot see".into()
}

fn view_directory(devices: &[Device]) -> Finding {
    match crate::view_tree::ViewTree::new(devices) {
        Ok(tree) => {
            let base = tree.path().parent().unwrap_or(Path::new("/")).display().to_string();
            Finding::good(format!(
                "the files that show the device in /sys and /dev can lie in {base}"
            ))
        }
        Err(error) => Finding::stop(
            "there is no place for the files that show the device in /sys and /dev",
            &error,
        ),
    }
}

/// The folder from which rsockets read their defaults.
fn rsocket_settings() -> PathBuf {
    environment::variable("ANYVERBS_RSOCKET_CONFIG")
        .map_or_else(|| "/etc/rdma/rsocket".into(), PathBuf::from)
}

/// The first device, which gives all sockets, lacks something for them.
fn no_sockets(settings: &Settings) -> Vec<Finding> {
    // A configuration that cannot be read is reported with the devices.
    let Ok(config) = Config::load_with(&settings.variables()) else { return Vec::new() };
    let attrs = config.device_attrs(|_, _| 0);
    let (Some(device), Some(attr)) = (config.ports.first(), attrs.first()) else {
        return Vec::new();
    };
    let finding = |(kind, why): (&str, String)| {
        let what = format!(
            "`anyverbs run --sockets` gives no {kind} sockets: device {}: {why}",
            device.name
        );
        Finding::new(
            Severity::Note,
            what,
            "change the limits or the persona of that device, which is the first, if programs need sockets over RDMA",
        )
    };
    anyverbs_rsocket::obstacles(attr).map(finding).collect()
}

/// The object was found with the libraries. This checks whether its settings are right.
fn rsockets(directory: &Path) -> Finding {
    let mut odd: Vec<String> = RSOCKET_SETTINGS
        .iter()
        .filter(|name| {
            let text = fs::read_to_string(directory.join(name));
            text.is_ok_and(|text| {
                text.split_whitespace().next().is_none_or(|word| word.parse::<u64>().is_err())
            })
        })
        .map(|name| directory.join(name).display().to_string())
        .collect();
    odd.extend(
        ["RS_SQ_SIZE", "RS_RQ_SIZE", "RS_INLINE"]
            .into_iter()
            .filter(|name| {
                environment::text(name).is_some_and(|value| value.trim().parse::<u32>().is_err())
            })
            .map(str::to_owned),
    );
    if odd.is_empty() {
        return Finding::good(format!(
            "`anyverbs run --sockets` can give programs sockets over RDMA ({})",
            libraries::RSPRELOAD
        ));
    }
    Finding::new(
        Severity::Note,
        format!("rsockets: {} has no number, and is ignored", odd.join(", ")),
        "write one number, or remove it",
    )
}

fn buffers() -> Finding {
    let read = |name: &str| -> Option<u64> {
        fs::read_to_string(format!("/proc/sys/net/core/{name}")).ok()?.trim().parse().ok()
    };
    let small: Vec<String> = ["rmem_max", "wmem_max"]
        .iter()
        .filter_map(|name| Some((name, read(name)?)))
        .filter(|(_, bytes)| *bytes < BUFFER)
        .map(|(name, bytes)| format!("net.core.{name} = {bytes}"))
        .collect();
    if small.is_empty() {
        return Finding::good("the system allows socket buffers that are large enough");
    }
    Finding::new(
        Severity::Slow,
        format!(
            "the system allows small socket buffers only ({}): packets of fast senders from other hosts are lost and sent again",
            small.join(", ")
        ),
        format!("sysctl -w net.core.rmem_max={BUFFER} net.core.wmem_max={BUFFER} (as root)"),
    )
}

/// GSO and GRO of UDP, which carry many packets with one system call.
fn offloads() -> Vec<Finding> {
    let socket = match UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)) {
        Ok(socket) => socket,
        // Reported by `loopback`.
        Err(_) => return Vec::new(),
    };
    [("GSO", libc::UDP_SEGMENT, 1024), ("GRO", libc::UDP_GRO, 1)]
        .into_iter()
        .map(|(name, option, value): (_, _, libc::c_int)| {
            let length = size_of_val(&value) as libc::socklen_t;
            let pointer = std::ptr::from_ref(&value).cast();
            // SAFETY: the descriptor is open, and the value is as long as said.
            match unsafe {
                libc::setsockopt(socket.as_raw_fd(), libc::SOL_UDP, option, pointer, length)
            } {
                0 => Finding::good(format!(
                    "the kernel has UDP {name}, which carries many packets with one system call"
                )),
                _ => Finding::new(
                    Severity::Slow,
                    format!(
                        "the kernel has no UDP {name} ({}): each packet takes a system call",
                        io::Error::last_os_error()
                    ),
                    "a Linux kernel from 5.0 on has it; gVisor and some sandboxes do not",
                ),
            }
        })
        .collect()
}

/// Tries it: a child copies from this process, which is none of its descendants, as a peer is none.
fn cross_process_copy() -> Finding {
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let effect = "large messages between processes of this host are copied twice";
    match copy_by_a_child() {
        Ok(()) => Finding::good("processes of one user may copy from and to each other's memory"),
        Err(_) if !matches!(scope.trim(), "" | "0") => Finding::new(
            Severity::Slow,
            format!("kernel.yama.ptrace_scope is {}: {effect}", scope.trim()),
            "sysctl -w kernel.yama.ptrace_scope=0 (as root)",
        ),
        Err(Refusal::Killed) => Finding::new(
            Severity::Stop,
            "a seccomp filter kills a process that copies from another one",
            "set ANYVERBS_DIRECT=0, or allow process_vm_readv and process_vm_writev",
        ),
        Err(Refusal::Errno(errno)) => Finding::new(
            Severity::Slow,
            format!(
                "this system does not permit copies between processes ({}): {effect}",
                io::Error::from_raw_os_error(errno)
            ),
            "in a container: docker run --cap-add SYS_PTRACE, or a seccomp profile that allows process_vm_readv",
        ),
    }
}

enum Refusal {
    Errno(i32),
    Killed,
}

fn copy_by_a_child() -> Result<(), Refusal> {
    static WORD: u64 = 1;
    // SAFETY: getpid and fork have no preconditions. The child makes system calls only, on its own stack and on an
    // address of the parent that is the same in both, and ends.
    let child = unsafe {
        let parent = libc::getpid();
        let child = libc::fork();
        if child == 0 {
            let mut copy = 0u64;
            let near = libc::iovec { iov_base: (&raw mut copy).cast(), iov_len: 8 };
            let far = libc::iovec { iov_base: (&raw const WORD).cast_mut().cast(), iov_len: 8 };
            let copied =
                libc::process_vm_readv(parent, &raw const near, 1, &raw const far, 1, 0) == 8;
            libc::_exit(if copied { 0 } else { *libc::__errno_location() & 0x7f });
        }
        child
    };
    if child < 0 {
        return Err(Refusal::Errno(io::Error::last_os_error().raw_os_error().unwrap_or(0)));
    }
    let mut status = 0;
    // SAFETY: our own child and a live int.
    if unsafe { libc::waitpid(child, &raw mut status, 0) } != child || !libc::WIFEXITED(status) {
        return Err(Refusal::Killed);
    }
    match libc::WEXITSTATUS(status) {
        0 => Ok(()),
        errno => Err(Refusal::Errno(errno)),
    }
}

/// A guess, and said to be one: an address translator on the way cannot be seen from here.
fn nat(devices: &[Device]) -> Option<Finding> {
    let container =
        ["/.dockerenv", "/run/.containerenv"].iter().any(|path| Path::new(path).exists())
            || environment::variable("KUBERNETES_SERVICE_HOST").is_some();
    let address = devices.first()?.address()?.address;
    let private = matches!(address, IpAddr::V4(address) if address.is_private());
    (container && private).then(|| {
        Finding::new(
            Severity::Note,
            format!("this is a container with the private address {address}: if hosts outside see another address (NAT), they cannot reach it"),
            "for peers outside: docker run --network host, or a macvlan or ipvlan network",
        )
    })
}

fn preload() -> Option<Finding> {
    let list = environment::text("LD_PRELOAD").filter(|list| !list.is_empty())?;
    Some(Finding::new(
        Severity::Note,
        format!("LD_PRELOAD is set already: {list}"),
        "`anyverbs run` adds its own objects before it; if a sanitizer complains that it is not first, use --no-view --no-preload",
    ))
}

fn other_devices() -> Option<Finding> {
    let names: Vec<String> = fs::read_dir("/sys/class/infiniband")
        .ok()?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    (!names.is_empty()).then(|| {
        Finding::new(
            Severity::Note,
            format!("this machine has RDMA devices: {}", names.join(", ")),
            "nothing to do: under `anyverbs run` a program sees only the device of anyverbs",
        )
    })
}

fn descriptors() -> Option<Finding> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the structure is valid for the call to fill.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 || limit.rlim_cur >= 1024 {
        return None;
    }
    Some(Finding::new(
        Severity::Note,
        format!(
            "a process may have {} open files: programs with many completion channels and connections need more",
            limit.rlim_cur
        ),
        "ulimit -n 4096",
    ))
}

fn configuration(settings: &Settings) -> Option<Finding> {
    let path = settings
        .config
        .clone()
        .or_else(|| environment::variable("ANYVERBS_CONFIG").map(Into::into))?;
    Some(match read_configuration(&path) {
        Ok(_) => Finding::good(format!("the configuration {} can be read", path.display())),
        Err(error) => Finding::new(
            Severity::Stop,
            format!("the configuration {} cannot be read: {error}", path.display()),
            "name another with --config, or unset ANYVERBS_CONFIG",
        ),
    })
}

/// Tables of the file that do not hold.
fn replaced_tables(settings: &Settings) -> Option<Finding> {
    // A configuration that cannot be read is reported with the devices.
    let what = Config::load_with(&settings.variables()).ok()?.replaced?;
    Some(Finding::new(
        Severity::Note,
        what,
        "leave out --devices and unset ANYVERBS_DEVICES if the tables should hold",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::env;

    #[test]
    fn the_ports_holders_are_found() {
        let table = "   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops\n \
             1: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  1000        0 4242 2 0000000000000000 0\n \
             2: 00000000:0035 00000000:0000 07 00000000:00000000 00:00000000 00000000     0        0 17 2 0000000000000000 0\n";
        assert_eq!(holders(table, 4791), [Holder { user: 1000, inode: 4242 }]);
        assert_eq!(holders("", 4791), []);
        assert_eq!(holders("header\nnonsense\n", 4791), []);
    }

    #[test]
    fn a_socket_of_this_process_is_found() {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = socket.local_addr().unwrap().port();
        let table = fs::read_to_string("/proc/net/udp").unwrap();
        let [holder] = holders(&table, port)[..] else { panic!("one holder") };
        assert!(owner(holder.inode).starts_with("process "), "{}", owner(holder.inode));
    }

    #[test]
    fn settings_of_rsockets_that_are_no_numbers_are_named() {
        let directory = env::temp_dir().join(format!("anyverbs-doctor-{}", std::process::id()));
        fs::create_dir_all(&directory).unwrap();
        assert_eq!(rsockets(&directory).severity, Severity::Good, "none at all");
        fs::write(directory.join("mem_default"), "131072\n").unwrap();
        assert_eq!(rsockets(&directory).severity, Severity::Good);
        fs::write(directory.join("inline_default"), "many\n").unwrap();
        let finding = rsockets(&directory);
        assert_eq!(finding.severity, Severity::Note);
        assert!(finding.what.contains("inline_default") && !finding.what.contains("mem_default"));
        fs::remove_dir_all(directory).unwrap();
    }

    #[test]
    fn each_severe_finding_has_a_remedy() {
        let args = Doctor {
            settings: Settings {
                lib_dir: Some("/nonexistent".into()),
                config: Some("/nonexistent".into()),
                ..Settings::default()
            },
            program: Vec::new(),
        };
        let stops: Vec<_> =
            all(&args).into_iter().filter(|finding| finding.severity == Severity::Stop).collect();
        assert!(stops.len() >= 2, "{stops:?}");
        assert!(stops.iter().all(|finding| !finding.remedy.is_empty()), "{stops:?}");
    }
}

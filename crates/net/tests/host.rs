//! The host's interfaces as `ip` shows them, change notifications, and a lock that dies with its holder.

#![allow(clippy::unwrap_used, reason = "a failed unwrap is a failed test")]

mod netns;

use anyverbs_testing::Stopwatch;
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyverbs_net::{
    AddressMonitor, Lock, Registry, ServiceAddress, Services, Slot, Store, interfaces,
};

#[test]
fn interfaces_are_those_that_ip_shows() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("link add va type veth peer name vb");
    netns::ip("link set va address 02:11:22:33:44:55 mtu 9000 up");
    netns::ip("addr add 10.9.0.1/24 dev va label va:x");
    netns::ip("addr add 10.9.0.2/24 dev va");
    netns::ip("addr add 10.8.0.1 peer 10.8.0.2/32 dev va");
    netns::ip("addr add 2001:db8::1/64 dev va nodad");
    netns::ip("addr add 2001:db8::2/64 dev va");
    let text = netns::ip("-j addr");
    let mut expected: Vec<serde_json::Value> = serde_json::from_str(&text).unwrap();
    expected.sort_by_key(|i| i["ifindex"].as_u64());
    let found = interfaces().unwrap();
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(&expected) {
        assert_eq!(found.index as u64, expected["ifindex"].as_u64().unwrap());
        assert_eq!(found.name, expected["ifname"].as_str().unwrap());
        assert_eq!(u64::from(found.mtu), expected["mtu"].as_u64().unwrap());
        let flag = |name: &str| expected["flags"].as_array().unwrap().iter().any(|f| f == name);
        assert_eq!(
            (found.up, found.loopback, found.multicast),
            (flag("UP"), flag("LOOPBACK"), flag("MULTICAST"))
        );
        let mac = found.mac.unwrap_or_default().map(|b| format!("{b:02x}")).join(":");
        assert_eq!(mac, expected["address"].as_str().unwrap());
        let addresses: Vec<_> = expected["addr_info"]
            .as_array()
            .unwrap()
            .iter()
            .map(|a| (a["local"].as_str().unwrap().to_owned(), a["prefixlen"].as_u64().unwrap()))
            .collect();
        let ours: Vec<_> =
            found.addresses.iter().map(|a| (a.ip.to_string(), u64::from(a.prefix_len))).collect();
        assert_eq!(ours, addresses);
    }
    let lo = &found[0];
    assert!(lo.loopback && lo.up && lo.running && lo.mac.is_none());
    let va = found.iter().find(|i| i.name == "va").unwrap();
    assert!(va.up && !va.running, "no carrier: the other end is down");
    assert_eq!(va.mac, Some([2, 0x11, 0x22, 0x33, 0x44, 0x55]));
    let address = |ip: &str| va.addresses.iter().find(|a| a.ip.to_string() == ip).unwrap();
    assert!(!address("10.9.0.1").secondary && address("10.9.0.2").secondary);
    assert!(!address("2001:db8::1").tentative && address("2001:db8::2").tentative);
    netns::ip("link set vb up");
    // The kernel makes a link-local address when the carrier comes.
    let deadline = Instant::now() + Duration::from_secs(2);
    let (va, link_local) = loop {
        let va = interfaces().unwrap().into_iter().find(|i| i.name == "va").unwrap();
        if let Some(&link_local) = va.addresses.iter().find(|a| a.is_link_local()) {
            break (va, link_local);
        }
        assert!(Instant::now() < deadline, "a link-local address");
        std::thread::sleep(Duration::from_millis(5));
    };
    assert_eq!((link_local.scope_id, link_local.prefix_len), (va.index, 64));
    assert!(va.addresses.iter().filter(|a| !a.is_link_local()).all(|a| a.scope_id == 0));
}

#[test]
fn the_monitor_tells_of_links_and_addresses() {
    if !netns::isolate_as_root() {
        return;
    }
    let monitor = AddressMonitor::new().unwrap();
    assert!(!monitor.drain().unwrap());
    for change in [
        "link add va type veth peer name vb",
        "addr add 10.9.0.1/24 dev va",
        "addr add fd00::1/64 dev va nodad",
        "link set va mtu 1400",
        "addr del 10.9.0.1/24 dev va",
        "link del va",
    ] {
        netns::ip(change);
        // The kernel tells of IPv6 addresses from a work queue, not before `ip` returns.
        let deadline = Instant::now() + Duration::from_secs(2);
        while !monitor.drain().unwrap() {
            assert!(Instant::now() < deadline, "{change}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    let deadline = Instant::now() + Duration::from_secs(2);
    while monitor.drain().unwrap() {
        assert!(Instant::now() < deadline, "the monitor calms down");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn lock_and_slot_are_released_by_death() {
    if !netns::isolate() {
        return;
    }
    let mut child = Command::new("/proc/self/exe")
        .args(["--ignored", "--exact", "hold_lock_and_slot", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("holding") {
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "{line}");
    }
    let registry = Registry::new("host-test").unwrap();
    let store = Store::join(&registry).unwrap();
    assert!(store.try_lock(Lock::Steering).is_none());
    assert!(store.is_alive(77));
    child.kill().unwrap();
    store.lock(Lock::Steering).unwrap();
    child.wait().unwrap();
    assert!(!store.is_alive(77));
    Slot::claim_number(&registry, 77).unwrap();
}

#[test]
#[ignore = "a child process of lock_and_slot_are_released_by_death"]
fn hold_lock_and_slot() {
    let registry = Registry::new("host-test").unwrap();
    let slot = Slot::claim_number(&registry, 77).unwrap();
    let _lock = slot.store().try_lock(Lock::Steering).unwrap();
    println!("holding");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

#[test]
fn a_neighbour_is_waited_for_until_the_kernel_decides() {
    if !netns::isolate_as_root() {
        return;
    }
    netns::ip("link add va type veth peer name vb");
    netns::plug_in(["va", "vb"]);
    netns::ip("addr add 10.9.0.1/24 dev va");
    let of = |ip: &str| anyverbs_net::ethernet_address(ip.parse().unwrap(), 0);
    // A neighbour that answers after the first look.
    let answer = std::thread::spawn(|| {
        while !netns::ip("neigh show 10.9.0.3").contains("INCOMPLETE") {}
        netns::ip("neigh replace 10.9.0.3 lladdr 02:00:00:00:00:03 dev va");
    });
    assert_eq!(of("10.9.0.3").unwrap(), [2, 0, 0, 0, 0, 3]);
    answer.join().unwrap();
    // The kernel asks three times, here at an interval of 50 ms.
    std::fs::write("/proc/sys/net/ipv4/neigh/va/retrans_time_ms", "50").unwrap();
    for _ in 0..2 {
        let begin = Instant::now();
        assert_eq!(of("10.9.0.4").unwrap_err().raw_os_error(), Some(libc::EHOSTUNREACH));
        let waited = begin.elapsed();
        assert!(waited >= Duration::from_millis(100), "{waited:?}");
        assert!(waited < Duration::from_secs(3), "{waited:?}");
    }
}

/// A process is stopped in the microseconds of `rdma_bind_addr` or `ibv_open_xrcd` in which it has a lock. Others wait as long as
/// docs/reliability.md says, then say for whom. Who looks for a listener does not wait.
#[test]
fn a_stopped_holder_of_a_lock_holds_others_up_for_two_seconds() {
    if !netns::isolate() {
        return;
    }
    let mut child = Command::new("/proc/self/exe")
        .args(["--ignored", "--exact", "hold_the_locks_of_reservations", "--nocapture"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("holding") {
        assert_ne!(stdout.read_line(&mut line).unwrap(), 0, "{line}");
    }
    anyverbs_testing::stop(&child);
    let slot = Slot::claim("host-test").unwrap();
    let services = Services::new(Arc::new(slot));
    let bound = Duration::from_secs(2);
    for refused in [&|| services.reserve(7, ServiceAddress::Any, false).map(drop), &|| {
        services.store().lock(Lock::Xrc).map(drop)
    }] as [&dyn Fn() -> std::io::Result<()>; 2]
    {
        let (begin, watch) = (Instant::now(), Stopwatch::start());
        let error = refused().unwrap_err();
        let (took, quiet) = (begin.elapsed(), watch.elapsed());
        assert!(took >= bound && quiet < bound + Duration::from_secs(1), "{took:?}, {quiet:?}");
        assert_eq!(error.kind(), std::io::ErrorKind::TimedOut);
        let stopped = format!("stopped (by SIGSTOP or a debugger): {}", child.id());
        assert!(error.to_string().contains(&stopped), "{error}");
    }
    let begin = Stopwatch::start();
    assert_eq!(services.holder(7, [10, 0, 0, 1].into()), None);
    assert!(services.store().live_slots().len() == 2 && begin.elapsed() < bound / 4);
    // It goes on, and then ends.
    // SAFETY: signals our child.
    assert_eq!(unsafe { libc::kill(child.id() as i32, libc::SIGCONT) }, 0);
    drop(child.stdin.take());
    let _kept = services.reserve(7, ServiceAddress::Any, false).unwrap();
    services.store().lock(Lock::Xrc).unwrap();
    assert!(child.wait().unwrap().success());
}

#[test]
#[ignore = "a child process of a_stopped_holder_of_a_lock_holds_others_up_for_two_seconds"]
fn hold_the_locks_of_reservations() {
    let slot = Slot::claim("host-test").unwrap();
    let _locks = [Lock::Entries, Lock::Xrc].map(|lock| slot.store().try_lock(lock).unwrap());
    println!("holding");
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
}

use std::collections::HashSet;

use super::*;
use crate::host::Registry;

/// Two processes, as far as services are concerned.
fn pair(test: &str) -> [Arc<Services>; 2] {
    let name = format!("av-services-{test}-{}", std::process::id());
    let registry = Registry::new(&name).unwrap();
    [(); 2].map(|()| Services::new(Arc::new(Slot::claim_in(&registry).unwrap())))
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn in_use<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

fn not_available<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[test]
fn wildcards_conflict_with_what_they_cover() {
    use ServiceAddress::{Any, AnyV4, AnyV6, Ip};
    let locals = [ip("10.0.0.1"), ip("10.0.0.2"), ip("fd00::1")];
    let [v4, other_v4, v6] = locals.map(Ip);
    let all = pair("conflicts");
    let yes = [
        (v4, v4),
        (v6, v6),
        (AnyV4, v4),
        (AnyV6, v6),
        (Any, v4),
        (Any, v6),
        (Any, AnyV4),
        (Any, AnyV6),
        (Any, Any),
    ];
    for ((a, b), [first, second]) in yes.into_iter().flat_map(|(a, b)| {
        let [p, q] = &all;
        [((a, b), [p, q]), ((b, a), [p, q]), ((a, b), [p, p])]
    }) {
        let held = first.reserve(7, a, false).unwrap();
        let refused = second.reserve(7, b, false);
        let one_address = matches!((a, b), (Ip(_), Ip(_)));
        let right = if one_address { in_use(refused) } else { not_available(refused) };
        assert!(right, "{a:?} {b:?}");
        drop(second.reserve(8, b, false).unwrap());
        drop(held);
        drop(second.reserve(7, b, false).unwrap());
    }
    let [first, second] = all;
    let _v4 = first.reserve(7, v4, false).unwrap();
    let _others: Vec<_> =
        [other_v4, AnyV6].into_iter().map(|a| second.reserve(7, a, false).unwrap()).collect();
}

#[test]
fn a_service_is_shared_until_one_wants_it_alone() {
    let locals = [ip("10.0.0.1")];
    let [first, second] = pair("shared");
    let at = ServiceAddress::Ip(locals[0]);
    let a = first.reserve(7, at, true).unwrap();
    let b = first.reserve(7, at, true).unwrap();
    let c = second.reserve(7, at, true).unwrap();
    assert!(in_use(second.reserve(7, at, false)));
    assert!(not_available(second.reserve(7, ServiceAddress::Any, false)));
    assert!(in_use(a.make_exclusive()));
    drop(b);
    assert!(in_use(a.make_exclusive()));
    assert_eq!(second.holder(7, locals[0]), None);
    drop(c);
    a.make_exclusive().unwrap();
    a.make_exclusive().unwrap();
    assert_eq!(second.holder(7, locals[0]), Some(first.slot.number()));
    assert!(in_use(second.reserve(7, at, true)));
    assert!(in_use(first.reserve(7, at, true)));
    drop(a);
    drop(second.reserve(7, at, true).unwrap());
    drop(second.reserve(7, at, false).unwrap());
}

#[test]
fn holders_are_found_wherever_they_hold_it() {
    let locals = [ip("10.0.0.1"), ip("2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff")];
    let [first, second] = pair("holders");
    let numbers = [first.slot.number(), second.slot.number()];
    for address in [
        ServiceAddress::Any,
        ServiceAddress::AnyV4,
        ServiceAddress::AnyV6,
        ServiceAddress::Ip(locals[0]),
        ServiceAddress::Ip(locals[1]),
    ] {
        let service = u64::MAX - 1;
        for (owner, number) in [(&first, numbers[0]), (&second, numbers[1])] {
            let held = owner.reserve(service, address, false).unwrap();
            for asked in [&first, &second, &first] {
                for at in locals {
                    let here = address.covers(at);
                    assert_eq!(asked.holder(service, at), here.then_some(number), "{address:?}");
                }
            }
            drop(held);
            assert_eq!(first.holder(service, locals[0]), None);
            assert_eq!(second.holder(service, locals[1]), None);
        }
    }
}

/// A stranger chooses the number.
#[test]
fn a_search_for_no_holder_takes_no_system_call() {
    let [first, second] = pair("misses");
    let at = ip("10.0.0.1");
    let _held = second.reserve(5, ServiceAddress::Any, false).unwrap();
    let _left = second.leave(6, Duration::from_secs(60));
    let calls = anyverbs_testing::system_calls(|| {
        for n in 100..100_000 {
            assert_eq!(first.holder(n, at), None);
            assert!(!first.was_left(n));
            assert!(first.lingering().is_empty());
        }
    });
    assert!(calls.is_none_or(|calls| calls == 0), "{calls:?}");
    let calls = anyverbs_testing::system_calls(|| {
        assert_eq!(first.holder(5, at), Some(second.slot.number()));
    });
    assert!(calls.is_none_or(|calls| calls == 1), "{calls:?}");
}

/// connect(2), nanosleep(2) and close(2) are cancellation points in the C library.
#[test]
fn nobody_is_cancelled_with_a_lock() {
    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
    }
    let [first, second] = pair("cancelled");
    let at = ip("10.0.0.1");
    let busy = second.lock().unwrap();
    let (sender, done) = std::sync::mpsc::channel();
    let services = Arc::clone(&first);
    let thread = std::thread::spawn(move || {
        // SAFETY: this thread's own id.
        assert_eq!(unsafe { pthread_cancel(libc::pthread_self()) }, 0);
        let late = services.reserve(7, ServiceAddress::Any, false).is_err();
        drop(busy);
        let free = services.reserve(8, ServiceAddress::Any, true).unwrap();
        free.make_exclusive().unwrap();
        drop(free);
        let others = services.holder(9, at).is_none()
            && services.lingering().is_empty()
            && !services.store().incarnations().is_empty();
        // For the rest of this thread.
        std::mem::forget(Uncancelled::new());
        sender.send(late && others).unwrap();
    });
    assert!(done.recv_timeout(Duration::from_secs(20)).unwrap());
    thread.join().unwrap();
}

#[test]
fn a_lingering_process_is_found() {
    let [first, second] = pair("lingering");
    let lingering = first.linger();
    assert_eq!(second.lingering(), [first.slot.number()]);
    assert!(first.lingering().is_empty());
    drop(lingering);
    assert!(second.lingering().is_empty());
}

#[test]
fn a_left_service_stays_known_as_long_as_asked() {
    const LONG: Duration = Duration::from_secs(60);
    let [first, second] = pair("left");
    assert_eq!((first.was_left(5), first.forget_left()), (false, None));
    let held = first.reserve(8, ServiceAddress::Any, false).unwrap();
    first.leave(5, Duration::ZERO).unwrap();
    first.leave(6, Duration::ZERO).unwrap();
    assert!(second.was_left(5) && second.was_left(6));
    assert!(!second.was_left(7) && !second.was_left(8), "one that is held, or is nobody's");
    // It left the service again meanwhile, for longer.
    first.leave(5, LONG).unwrap();
    let rest = first.forget_left().unwrap();
    assert!(rest <= LONG && rest > LONG / 2, "{rest:?}");
    assert!(second.was_left(5) && !second.was_left(6));
    // Only the last ones count, and a repetition takes no place of another.
    for n in (0..LEFT as u64).flat_map(|n| [100 + n; 2]) {
        first.leave(n, LONG).unwrap();
    }
    assert!(!second.was_left(5));
    assert!((0..LEFT as u64).all(|n| second.was_left(100 + n)));
    drop((held, first));
    assert!(!second.was_left(100), "by a process that has ended");
}

#[test]
fn the_longest_name_fits() {
    let registry = Registry::of_port(&"x".repeat(32), u16::MAX).unwrap();
    let slot = Arc::new(Slot::claim_number(&registry, 255).unwrap());
    let address = ServiceAddress::Ip(ip("2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff"));
    let _held = Services::new(slot).reserve(u64::MAX, address, true).unwrap();
}

#[test]
fn ephemeral_ports_are_free_ones_of_the_range() {
    let [first, second] = pair("ephemeral");
    let ports: Vec<u16> = ephemeral_ports().collect();
    let distinct: HashSet<_> = ports.iter().collect();
    assert_eq!(distinct.len(), ports.len());
    let range = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
    let range: Vec<u16> = range.split_whitespace().map(|word| word.parse().unwrap()).collect();
    assert!((range[0]..=range[1]).all(|port| distinct.contains(&port)), "all of it");
    let take = |services: &Arc<Services>| {
        services.reserve_ephemeral(u64::from, ServiceAddress::Any, false).unwrap()
    };
    let (a, b) = (take(&first), take(&second));
    assert_ne!(a.0, b.0);
    assert!(distinct.contains(&a.0) && distinct.contains(&b.0));
    assert_eq!(first.holder(b.0.into(), ip("10.0.0.1")), Some(second.slot.number()));

    // A port that is to be shared is shared from the beginning.
    let (port, _shared) = first.reserve_ephemeral(u64::from, ServiceAddress::Any, true).unwrap();
    let _more = second.reserve(port.into(), ServiceAddress::Any, true).unwrap();
    assert!(not_available(second.reserve(port.into(), ServiceAddress::Any, false)));
}

/// The lock is taken and given back; three read the range of ports; one asks whether each owner in the way lives.
#[test]
fn an_ephemeral_port_takes_few_system_calls() {
    let [first, second] = pair("calls");
    let _busy: Vec<_> = (0..100)
        .map(|_| second.reserve_ephemeral(u64::from, ServiceAddress::Any, false).unwrap())
        .collect();
    let calls = anyverbs_testing::system_calls(|| {
        drop(first.reserve_ephemeral(u64::from, ServiceAddress::Any, false).unwrap());
    });
    assert!(calls.is_none_or(|calls| calls <= 16), "{calls:?}");
}

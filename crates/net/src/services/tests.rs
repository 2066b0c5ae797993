//! Alone are those that give names back: what other tests fork has them, too, until it calls exec.

use anyverbs_testing::in_own_process;

use super::*;
use crate::registry::Registry;

/// Two processes, as far as services are concerned.
fn pair(test: &str) -> [Arc<Services>; 2] {
    let name = format!("av-services-{test}-{}", std::process::id());
    let registry = Registry::new(&name).unwrap();
    [(); 2].map(|()| Services::new(Arc::new(Slot::claim_in(&registry).unwrap())))
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// Who holds a service, once what was not there a moment ago is looked for again.
fn holder(services: &Services, service: u64, address: IpAddr) -> Option<u8> {
    services.absent.lock().clear();
    services.holder(service, address)
}

fn in_use<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::AddrInUse)
}

fn not_available<T>(result: io::Result<T>) -> bool {
    result.is_err_and(|error| error.kind() == io::ErrorKind::AddrNotAvailable)
}

#[test]
fn wildcards_conflict_with_what_they_cover() {
    in_own_process("services::tests::wildcards_conflict_with_what_they_cover", || {
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
            let held = first.reserve(7, a, false, &locals).unwrap();
            let refused = second.reserve(7, b, false, &locals);
            let one_address = matches!((a, b), (Ip(_), Ip(_)));
            let right = if one_address { in_use(refused) } else { not_available(refused) };
            assert!(right, "{a} {b}");
            drop(second.reserve(8, b, false, &locals).unwrap());
            drop(held);
            drop(second.reserve(7, b, false, &locals).unwrap());
        }
        let [first, second] = all;
        let _v4 = first.reserve(7, v4, false, &locals).unwrap();
        let _others: Vec<_> = [other_v4, AnyV6]
            .into_iter()
            .map(|a| second.reserve(7, a, false, &locals).unwrap())
            .collect();
    });
}

#[test]
fn what_is_shared_is_shared_until_one_wants_it_alone() {
    in_own_process("services::tests::what_is_shared_is_shared_until_one_wants_it_alone", || {
        let locals = [ip("10.0.0.1")];
        let [first, second] = pair("shared");
        let at = ServiceAddress::Ip(locals[0]);
        let a = first.reserve(7, at, true, &locals).unwrap();
        let b = first.reserve(7, at, true, &locals).unwrap();
        let c = second.reserve(7, at, true, &locals).unwrap();
        assert!(in_use(second.reserve(7, at, false, &locals)));
        assert!(not_available(second.reserve(7, ServiceAddress::Any, false, &locals)));
        assert!(in_use(a.make_exclusive(&locals)));
        drop(b);
        assert!(in_use(a.make_exclusive(&locals)));
        assert_eq!(second.holder(7, locals[0]), None);
        drop(c);
        a.make_exclusive(&locals).unwrap();
        a.make_exclusive(&locals).unwrap();
        assert_eq!(holder(&second, 7, locals[0]), Some(first.slot.number()));
        assert!(in_use(second.reserve(7, at, true, &locals)));
        assert!(in_use(first.reserve(7, at, true, &locals)));
        drop(a);
        drop(second.reserve(7, at, true, &locals).unwrap());
        drop(second.reserve(7, at, false, &locals).unwrap());
    });
}

#[test]
fn holders_are_found_wherever_they_hold_it() {
    in_own_process("services::tests::holders_are_found_wherever_they_hold_it", || {
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
                let held = owner.reserve(service, address, false, &locals).unwrap();
                for asked in [&first, &second, &first] {
                    for at in locals {
                        let here = ServiceAddress::candidates(at).contains(&address);
                        assert_eq!(holder(asked, service, at), here.then_some(number), "{address}");
                    }
                }
                drop(held);
                assert_eq!(first.holder(service, locals[0]), None);
                assert_eq!(second.holder(service, locals[1]), None);
            }
        }
    });
}

#[test]
fn many_may_ask_for_what_nobody_holds() {
    let [first, second] = pair("misses");
    let at = ip("10.0.0.1");
    let begin = Instant::now();
    for n in 0..1000 {
        assert_eq!(first.holder(n % 10, at), None);
    }
    let took = begin.elapsed();
    // The list of processes once in 4 ms, three names for each of two processes in 800 us, for each of ten services.
    let lists = 1 + took.as_micros() / MISS_FRESH.as_micros();
    let rounds = 1 + took.as_micros() / ABSENT.as_micros();
    let lookups = first.lookups.load(std::sync::atomic::Ordering::Relaxed) as u128;
    assert!(lookups <= 255 * lists + 60 * rounds, "{lookups} in {took:?}");
    let held = second.reserve(5, ServiceAddress::Any, false, &[]).unwrap();
    let end = Instant::now() + Duration::from_secs(10);
    while first.holder(5, at).is_none() {
        assert!(Instant::now() < end, "it is not found");
    }
    drop(held);
    assert_eq!(first.holder(5, at), None);
}

/// connect(2), nanosleep(2) and close(2) are cancellation points in the C library.
#[test]
fn nobody_is_cancelled_with_a_lock() {
    unsafe extern "C" {
        fn pthread_cancel(thread: libc::pthread_t) -> libc::c_int;
    }
    let [first, second] = pair("cancelled");
    let at = ip("10.0.0.1");
    let busy = second.lock(7, LOCK_WAIT).unwrap();
    let (sender, done) = std::sync::mpsc::channel();
    let services = Arc::clone(&first);
    let thread = std::thread::spawn(move || {
        // SAFETY: this thread's own id.
        assert_eq!(unsafe { pthread_cancel(libc::pthread_self()) }, 0);
        let free = services.reserve(8, ServiceAddress::Any, true, &[]).unwrap();
        free.make_exclusive(&[]).unwrap();
        drop(free);
        let late = services.reserve(7, ServiceAddress::Any, false, &[]).is_err();
        let others = services.holder(9, at).is_none()
            && services.lingering(Duration::ZERO).is_empty()
            && services.is_alive(services.slot.number()).unwrap()
            && !services.incarnations().unwrap().is_empty();
        // For what follows in this thread.
        std::mem::forget(Uncancelled::new());
        sender.send(late && others).unwrap();
    });
    assert!(done.recv_timeout(Duration::from_secs(20)).unwrap());
    thread.join().unwrap();
    drop(busy);
}

#[test]
fn who_lingers_is_found() {
    in_own_process("services::tests::who_lingers_is_found", || {
        let [first, second] = pair("lingering");
        let lingering = first.linger().unwrap();
        assert_eq!(second.lingering(Duration::ZERO), [first.slot.number()]);
        assert!(first.lingering(Duration::ZERO).is_empty());
        drop(lingering);
        assert!(second.lingering(Duration::ZERO).is_empty());
    });
}

#[test]
fn the_longest_name_fits() {
    let registry = Registry { prefix: format!("{}/{}", "x".repeat(32), u32::MAX), uid: 0 };
    let slot = Arc::new(Slot::claim_number(&registry, 255).unwrap());
    let address = ServiceAddress::Ip(ip("2001:db8:aaaa:bbbb:cccc:dddd:eeee:ffff"));
    let _held = Services::new(slot).reserve(u64::MAX, address, true, &[]).unwrap();
}

#[test]
fn ephemeral_ports_are_free_ones_of_the_range() {
    in_own_process("services::tests::ephemeral_ports_are_free_ones_of_the_range", || {
        let [first, second] = pair("ephemeral");
        let ports: Vec<u16> = ephemeral_ports().collect();
        let distinct: HashSet<_> = ports.iter().collect();
        assert_eq!(distinct.len(), ports.len());
        let take = |services: &Arc<Services>| {
            services.reserve_ephemeral(u64::from, ServiceAddress::Any, false, &[]).unwrap()
        };
        let (a, b) = (take(&first), take(&second));
        assert_ne!(a.0, b.0);
        assert!(distinct.contains(&a.0) && distinct.contains(&b.0));
        assert_eq!(first.holder(b.0.into(), ip("10.0.0.1")), Some(second.slot.number()));

        // One that is just being reserved is passed over; one that is to be shared is shared from the beginning.
        let _busy = second.lock(100, LOCK_WAIT).unwrap();
        let tries = std::cell::Cell::new(0);
        let service = |port: u16| {
            tries.set(tries.get() + 1);
            if tries.get() == 1 { 100 } else { 1 << 32 | u64::from(port) }
        };
        let (_, shared) = first.reserve_ephemeral(service, ServiceAddress::Any, true, &[]).unwrap();
        assert_eq!(tries.get(), 2);
        let name = shared.name.0;
        let _more = second.reserve(name, ServiceAddress::Any, true, &[]).unwrap();
        assert!(not_available(second.reserve(name, ServiceAddress::Any, false, &[])));
    });
}

#[test]
fn what_this_process_does_not_hold_it_has_not_bound() {
    in_own_process("services::tests::what_this_process_does_not_hold_it_has_not_bound", || {
        let [services, _] = pair("given-back");
        for _ in 0..300 {
            let held = services.reserve(7, ServiceAddress::Any, false, &[]).unwrap();
            let name = services.name(held.name, services.slot.number());
            std::thread::scope(|scope| {
                scope.spawn(move || drop(held));
                loop {
                    let own = services.own.lock();
                    if own.exclusive.is_empty() {
                        assert!(!services.is_held(&name));
                        break;
                    }
                }
            });
        }
    });
}

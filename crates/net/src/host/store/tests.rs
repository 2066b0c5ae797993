use super::super::slot::Slot;
use super::*;
use anyverbs_testing::Stopwatch;

fn registry(test: &str) -> Registry {
    Registry::new(&format!("av-store-{test}-{}", std::process::id())).unwrap()
}

fn inode(store: &Store) -> u64 {
    store.file.as_ref().unwrap().metadata().unwrap().ino()
}

#[test]
fn all_have_one_store_and_know_who_lives() {
    let registry = registry("one");
    let slots = [(); 3].map(|()| Slot::claim_in(&registry).unwrap());
    let keeper = Store::join(&registry).unwrap();
    for slot in &slots {
        assert_eq!(inode(slot.store()), inode(&keeper));
    }
    let [a, b, c] = slots;
    let number = a.number();
    let _said = a.store().share(1 << 100 | 7).unwrap();
    b.store().share(1 << 100 | 8).unwrap();
    assert_eq!(c.store().sharers(1 << 100 | 7), [number]);
    assert_eq!(keeper.sharers(1 << 100 | 8), [0u8; 0]);
    // It is killed: it says nothing more, and its lock ends with its file.
    std::mem::forget(_said);
    let file = a.store().file.as_ref().unwrap().as_raw_fd();
    assert!(c.store().is_alive(number));
    a.store().unlock_byte(number.into());
    assert!(!c.store().is_alive(number) && c.store().sharers(1 << 100 | 7).is_empty());
    assert!(file >= 0);
    // The last one but the keeper ends, and the store stays.
    drop((a, b, c));
    let next = Slot::claim_in(&registry).unwrap();
    assert_eq!(inode(next.store()), inode(&keeper));
}

#[test]
fn an_onlooker_sees_services_of_living_processes_alone() {
    let registry = registry("onlooker");
    let [a, b] = [(); 2].map(|()| Slot::claim_in(&registry).unwrap());
    let say = |slot: &Slot, kind, number| {
        let lock = slot.store().lock(Lock::Entries).unwrap();
        let fact = Fact { kind, number, form: 0, details: 0 };
        slot.store().say(fact, slot.number(), &lock).unwrap()
    };
    let alone = Kind::Exclusive;
    let _said = [say(&a, alone, 5), say(&a, Kind::Shared, 6), say(&b, alone, 7)];
    let held = || {
        let file = reopen(a.store().file.as_ref().unwrap()).unwrap();
        let mut held = Store::held_services(file).unwrap().unwrap();
        held.sort_unstable();
        held
    };
    assert_eq!(held(), [5, 7]);
    // The slot has another owner.
    a.store().table.enter(b.number());
    assert_eq!(held(), [5]);
}

#[test]
fn a_forked_child_takes_nothing_back() {
    let name = "host::store::tests::a_forked_child_takes_nothing_back";
    anyverbs_testing::in_own_process(name, || {
        let registry = registry("child");
        let [a, b] = [(); 2].map(|()| Slot::claim_in(&registry).unwrap());
        let number = a.number();
        let said = a.store().share(7).unwrap();
        let guard = a.store().lock_within(Lock::Xrc, Duration::ZERO).unwrap();
        // SAFETY: the child runs the drops below, and ends without returning to the test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            drop((said, guard));
            drop(a);
            // SAFETY: ends this process.
            unsafe { libc::_exit(0) };
        }
        let mut status = 1;
        // SAFETY: waits for our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
        assert_eq!(b.store().sharers(7), [number]);
        assert!(b.store().is_alive(number));
        assert!(b.store().try_lock(Lock::Xrc).is_none());
        drop((said, guard));
        assert!(b.store().try_lock(Lock::Xrc).is_some() && b.store().sharers(7).is_empty());
    });
}

#[test]
fn a_process_that_shares_a_name_twice_is_one_sharer() {
    let registry = registry("sharers");
    let slot = Slot::claim_in(&registry).unwrap();
    let _said = [(); 2].map(|()| slot.store().share(7).unwrap());
    assert_eq!(slot.store().sharers(7), [slot.number()]);
}

#[test]
fn a_lock_excludes_and_waiting_is_bounded() {
    let registry = registry("lock");
    let [a, b] = [(); 2].map(|()| Store::join(&registry).unwrap());
    let guard = a.lock_within(Lock::Steering, Duration::ZERO).unwrap();
    assert!(a.try_lock(Lock::Steering).is_none() && b.try_lock(Lock::Steering).is_none());
    b.lock_within(Lock::Xrc, Duration::ZERO).unwrap();
    let begin = Instant::now();
    let error = b.lock_within(Lock::Steering, Duration::from_millis(20)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    assert!(begin.elapsed() >= Duration::from_millis(20));
    drop(guard);
    b.lock_within(Lock::Steering, Duration::ZERO).unwrap();
}

#[test]
fn a_stopped_process_is_told_from_others() {
    let pid = std::process::id().cast_signed();
    assert!(!super::is_stopped(pid) && !super::is_stopped(i32::MAX));
    let mut child = std::process::Command::new("sleep").arg("100").spawn().unwrap();
    let pid = child.id().cast_signed();
    // SAFETY: a child of ours.
    unsafe { libc::kill(pid, libc::SIGSTOP) };
    let begin = Instant::now();
    while !super::is_stopped(pid) {
        assert!(begin.elapsed() < Duration::from_secs(10), "it is stopped");
        std::thread::yield_now();
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn only_a_process_that_was_here_has_ended() {
    let mut child = std::process::Command::new("true").spawn().unwrap();
    let pid = child.id().cast_signed();
    assert!(!has_ended(pid), "it is not waited for");
    child.wait().unwrap();
    assert!(has_ended(pid));
    // A process of another PID namespace has the number 0. A negative one is none.
    for pid in [std::process::id().cast_signed(), 0, -1, -i32::MAX] {
        assert!(!has_ended(pid), "{pid}");
    }
}

#[test]
fn a_store_without_proc_is_asked_for() {
    let registry = registry("asked");
    let slot = Arc::new(Slot::claim_in(&registry).unwrap());
    let (socket, _) = registry.connect(Name::Slot(slot.number())).unwrap();
    let server = Arc::clone(&slot);
    let stop = Arc::new(AtomicBool::new(false));
    let until = Arc::clone(&stop);
    let thread = std::thread::spawn(move || {
        while !until.load(Ordering::Relaxed) {
            server.receive(&mut [0; 100]).unwrap();
        }
    });
    let store = Store::ask(&registry, vec![socket]).unwrap().unwrap();
    assert_eq!(inode(&store), inode(slot.store()));
    assert!(store.is_alive(slot.number()), "its locks are its own");
    // With the descriptor of the other process, the locks are process-owned.
    let file = slot.store().file.as_ref().unwrap().try_clone().unwrap();
    let store = Store::open(&registry, file, Owner::Process).unwrap().unwrap();
    assert!(store.is_alive(slot.number()));
    stop.store(true, Ordering::Relaxed);
    thread.join().unwrap();
}

/// Whatever is given, nothing is written to it.
#[test]
fn other_files_are_not_taken() {
    let registry = registry("files");
    let name = CString::new(file_name(&registry)).unwrap();
    let file = |len: usize, seals: SealFlags, begin: &[u8]| {
        let file = File::from(memfd(&name).unwrap());
        file.set_len(len as u64).unwrap();
        file.write_at(begin, 0).unwrap();
        fcntl_add_seals(&file, seals).unwrap();
        file
    };
    let model = Store::make(&registry).unwrap();
    let mut header = [0; 16];
    model.file.as_ref().unwrap().read_at(&mut header, 0).unwrap();
    let len = model.table.len();
    // It would be taken.
    drop(model);
    let open = |file: &File| {
        let before = std::fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        let found = Store::open(&registry, file.try_clone().unwrap(), Owner::Description);
        let after = std::fs::read(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
        assert!(before == after);
        found.map(|store| store.is_some())
    };
    let innocent = [
        file(len, SEALS, b"my own data, sealed"),
        file(len, SealFlags::SHRINK, &header),
        file(len, SealFlags::empty(), &header),
        file(len - 1, SEALS, &header),
        file(8, SEALS, &header[..8]),
        file(0, SEALS, b""),
    ];
    // They are found before the store, in the same process.
    let slot = Slot::claim_in(&registry).unwrap();
    for (n, file) in innocent.iter().enumerate() {
        assert!(!open(file).unwrap(), "{n}");
    }
    assert!(open(&file(len, SEALS, &header)).unwrap());
    let other = Slot::claim_in(&registry).unwrap();
    assert_ne!(inode(other.store()), innocent[0].metadata().unwrap().ino());
    assert!(slot.store().is_alive(other.number()));
    let mut newer = header;
    newer[8] += 1;
    let error = open(&file(len, SEALS, &newer)).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    // One of another user.
    // SAFETY: geteuid cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        let foreign = file(len, SEALS, &header);
        std::os::unix::fs::fchown(&foreign, Some(12_345), None).unwrap();
        assert!(!open(&foreign).unwrap());
    } else {
        anyverbs_testing::skip("needs root");
    }
}

#[test]
fn a_limit_on_the_length_of_files_ends_nobody() {
    let name = "host::store::tests::a_limit_on_the_length_of_files_ends_nobody";
    anyverbs_testing::in_own_process(name, || {
        for bytes in [64 << 10, 0] {
            let registry = registry(&format!("limit-{bytes}"));
            let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
            // SAFETY: a limit to read.
            assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
            let [a, b] = [(); 2].map(|()| Slot::claim_in(&registry).unwrap());
            assert_ne!(a.number(), b.number());
            assert_eq!(a.store().file.is_some(), bytes > 0);
            let mut both = [a.number(), b.number()];
            both.sort_unstable();
            assert_eq!(
                (a.store().live_slots(), b.store().live_slots()),
                (both.to_vec(), both.to_vec())
            );
            let _said = a.store().share(7).unwrap();
            assert_eq!(b.store().sharers(7).is_empty(), bytes == 0);
            drop(b);
            assert_eq!(a.store().live_slots(), [a.number()]);
        }
    });
}

#[test]
fn a_private_store_knows_that_others_live_and_not_their_ports() {
    let registry = registry("private");
    let bits = *ENTRY_BITS.start();
    let table = Table::new(Area::private(table::len(bits)).unwrap(), bits);
    table.begin();
    let store = Store::with(&registry, table, None, Owner::Description);
    assert!(store.take_slot(7));
    store.table.set_port(7, Some(4791));
    let _other = registry.listen(Name::Slot(9)).unwrap();
    assert_eq!([7, 8, 9].map(|slot| store.has_port(4791, slot)), [true, false, true]);
    assert_eq!([7, 8, 9].map(|slot| store.has_port(4792, slot)), [false, false, true]);
    assert_eq!(store.live_slots(), [7, 9]);
}

/// A process that is stopped as it starts holds up others for 2 s, and makes no second store when it goes on.
#[test]
fn a_process_stopped_while_starting_does_not_split_the_host() {
    let registry = registry("split");
    let start = Start::begin(&registry);
    let (begin, watch) = (Instant::now(), Stopwatch::start());
    let slot = Slot::claim_in(&registry).unwrap();
    assert!(begin.elapsed() >= WAIT && watch.elapsed() < 3 * WAIT);
    // It goes on.
    let late = Store::make(&registry).unwrap();
    drop(start);
    let own = if slot.number() == 1 { 2 } else { 1 };
    let found = Store::older(&registry, &late, own).unwrap().unwrap();
    assert_eq!(inode(&found), inode(slot.store()));
}

/// A process lies between bind(2) and listen(2) for a moment. Another user's may stay there.
#[test]
fn a_name_that_nobody_serves_is_not_waited_for() {
    let registry = registry("bound");
    let bound = Socket::new(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None).unwrap();
    let name = format!("\0{}/start", registry.prefix());
    bound.bind(&socket2::SockAddr::unix(name).unwrap()).unwrap();
    let (begin, watch) = (Instant::now(), Stopwatch::start());
    let start = Start::begin(&registry);
    assert!(start._listener.is_none());
    assert!(begin.elapsed() >= TIME_SLICES && watch.elapsed() < WAIT);
}

/// Most of many processes that start at once have waited for long before they see that moment.
#[test]
fn a_name_that_is_bound_after_a_long_wait_is_waited_for_as_well() {
    let registry = registry("bound-late");
    // The waiting thread may be the first that binds the name.
    let tries = std::iter::repeat_with(|| {
        let first = Start::begin(&registry);
        std::thread::scope(|scope| {
            let next = scope.spawn(|| {
                std::thread::sleep(2 * TIME_SLICES);
                let bound = Socket::new(socket2::Domain::UNIX, socket2::Type::SEQPACKET, None);
                let (bound, name) = (bound.unwrap(), format!("\0{}/start", registry.prefix()));
                let name = socket2::SockAddr::unix(name).unwrap();
                drop(first);
                let is_bound = bound.bind(&name).is_ok();
                std::thread::sleep(TIME_SLICES / 5);
                is_bound
            });
            let start = Start::begin(&registry);
            assert!(start._listener.is_some());
            next.join().unwrap()
        })
    });
    assert!(tries.take(100).any(|is_bound| is_bound), "the waiting thread was always first");
}

#[test]
fn a_starting_process_goes_on_after_the_one_before() {
    let registry = registry("turns");
    let first = Start::begin(&registry);
    let (begin, watch) = (Instant::now(), Stopwatch::start());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(2 * TIME_SLICES);
            drop(first);
        });
        let second = Start::begin(&registry);
        assert!(second._listener.is_some());
        assert!(begin.elapsed() >= 2 * TIME_SLICES && watch.elapsed() < WAIT);
    });
}

#[test]
fn while_one_process_is_silent_another_is_asked() {
    let registry = registry("silent");
    let [silent, ended, slot] = [(); 3].map(|()| Slot::claim_in(&registry).unwrap());
    let connect = |slot: &Slot| registry.connect(Name::Slot(slot.number())).unwrap().0;
    let asked = vec![connect(&silent), connect(&ended), connect(&slot)];
    drop(ended);
    let (begin, watch) = (Instant::now(), Stopwatch::start());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                slot.receive(&mut [0; 100]).unwrap();
            }
        });
        let store = Store::ask(&registry, asked).unwrap();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(inode(&store.unwrap()), inode(slot.store()));
    });
    assert!(watch.elapsed() < WAIT);
    // Nobody answers.
    assert!(Store::ask(&registry, vec![connect(&silent)]).unwrap().is_none());
    assert!(begin.elapsed() >= WAIT);
}

#[test]
fn a_store_is_found_by_the_name_of_its_registry() {
    let [one, other] = ["named", "unnamed"].map(registry);
    let store = Store::join(&one).unwrap();
    let found = |registry| {
        let store = Store::find_at(registry, std::process::id().cast_signed()).unwrap();
        store.map(|store| inode(&store))
    };
    assert_eq!((found(&one), found(&other)), (Some(inode(&store)), None));
}

#[test]
fn all_are_told_of_few_datagrams_whoever_receives_them() {
    let registry = registry("all");
    let slots = [(); 3].map(|()| Slot::claim_in(&registry).unwrap());
    let told = |n: usize| (0..n).filter(|i| slots[i % 3].store().may_tell_all()).count();
    let begin = Instant::now();
    let first = told(10_000);
    let by_time = (begin.elapsed().as_nanos() / EACH.as_nanos()) as usize + 2;
    assert!((AT_ONCE as usize..=AT_ONCE as usize + by_time).contains(&first), "{first}");
    std::thread::sleep(3 * EACH);
    assert!(slots[0].store().may_tell_all(), "time gives the right back");
    // Another process may write anything there.
    let table = &slots[1].store().table;
    assert!(table.replace_told_all(table.told_all(), u64::MAX));
    assert!(slots[0].store().may_tell_all());
}

#[test]
fn a_right_that_another_process_takes_meanwhile_is_not_taken_twice() {
    let registry = registry("once");
    let slots = [(); 2].map(|()| Slot::claim_in(&registry).unwrap());
    let table = &slots[0].store().table;
    let seen = table.told_all();
    assert!(slots[1].store().may_tell_all());
    let taken = table.told_all();
    assert!(taken > seen);
    assert!(!table.replace_told_all(seen, seen + 1));
    assert_eq!(table.told_all(), taken);
    assert!(table.replace_told_all(taken, taken + 1));
}

use super::*;

const REGION: Region = Region {
    pd: 7,
    access: Access::LOCAL_WRITE.union(Access::REMOTE_READ),
    iova: 0x1000,
    len: 0x100,
    addr: 0xabc0_0000,
};

#[test]
fn checks_key_pd_range_and_access() {
    let table = MrTable::new(10, 1);
    let keys = table.register(REGION).unwrap();
    assert_ne!(keys.lkey, keys.rkey);
    let need = Access::LOCAL_WRITE;
    let at = |va, len| table.local(keys.lkey, 7, va, len, need).map(|h| h.addr());
    assert_eq!(at(0x1000, 0x100), Ok(0xabc0_0000));
    assert_eq!(at(0x10ff, 1), Ok(0xabc0_00ff));
    assert_eq!(at(0x1100, 0), Ok(0xabc0_0100));
    assert_eq!(at(0x10ff, 2), Err(KeyError::Range));
    assert_eq!(at(0xfff, 1), Err(KeyError::Range));
    assert_eq!(at(u64::MAX, u64::MAX), Err(KeyError::Range));
    let err = |r: Result<Hold<'_>, KeyError>| r.map(|h| h.addr()).unwrap_err();
    assert_eq!(err(table.local(keys.rkey, 7, 0x1000, 1, need)), KeyError::Key);
    assert_eq!(err(table.local(keys.lkey, 8, 0x1000, 1, need)), KeyError::Pd);
    assert_eq!(
        err(table.remote(keys.rkey, (7, 1), 0x1000, 1, Access::REMOTE_WRITE)),
        KeyError::Access
    );
    assert_eq!(err(table.local(0, 7, 0, 0, Access::empty())), KeyError::Key);
    assert_eq!(err(table.local(u32::MAX, 7, 0, 0, Access::empty())), KeyError::Key);
}

#[test]
fn bounds_hold_at_the_end_of_the_address_space() {
    let table = MrTable::new(10, 1);
    let whole = Region { iova: 0, addr: 0, len: u64::MAX, ..REGION };
    let keys = table.register(whole).unwrap();
    let at = |va, len| table.local(keys.lkey, 7, va, len, Access::empty()).map(|h| h.addr());
    assert_eq!(at(u64::MAX - 1, 1), Ok(u64::MAX - 1));
    assert_eq!(at(u64::MAX, 1), Err(KeyError::Range));
}

#[test]
fn a_dead_key_stays_dead_and_the_table_fills_up() {
    let table = MrTable::new(3, 1);
    let keys: Vec<_> = (0..3).map(|_| table.register(REGION).unwrap()).collect();
    assert!(table.register(REGION).is_none());
    assert_eq!(table.deregister(keys[1].lkey, |_| ()), Ok(()));
    assert_eq!(table.deregister(keys[1].lkey, |_| ()), Err(RetireError::Key));
    assert!(table.local(keys[1].lkey, 7, 0x1000, 1, Access::empty()).is_err());
    let again = table.register(REGION).unwrap();
    assert_ne!(again, keys[1]);
    assert_eq!(table.deregister(again.rkey, |_| ()), Err(RetireError::Key));
}

/// 2^18 indices fit into a key, and index 0 is no region's.
#[test]
fn the_largest_table_has_another_key_for_each_region() {
    let table = MrTable::new(u32::MAX, 1);
    assert_eq!(table.chunks.len(), MAX_REGIONS / CHUNK);
    let mut regions = 0;
    while let Some(keys) = table.register(REGION) {
        regions += 1;
        assert_eq!((index(keys.lkey), index(keys.rkey)), (regions, regions));
    }
    assert_eq!(regions, MAX_REGIONS - 1);
}

#[test]
fn an_index_rests_and_repeated_registration_takes_no_memory() {
    let table = MrTable::new(1 << 17, 1);
    let mut last = std::collections::HashMap::new();
    let mut shortest = usize::MAX;
    for turn in 0..10 * RESTING {
        let keys = table.register(REGION).unwrap();
        if let Some(before) = last.insert(index(keys.lkey), turn) {
            shortest = shortest.min(turn - before);
        }
        table.deregister(keys.lkey, |_| ()).unwrap();
    }
    assert_eq!(shortest, RESTING, "as SECURITY.md says");
    let chunks = table.chunks.iter().filter(|c| c.get().is_some()).count();
    assert!(chunks <= RESTING / CHUNK + 1, "{chunks}");
}

#[test]
fn deregistration_waits_for_the_access_in_progress() {
    let table = MrTable::new(3, 1);
    let keys = table.register(REGION).unwrap();
    let done = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|s| {
        let hold = table.local(keys.lkey, 7, 0x1000, 1, Access::empty()).ok();
        assert!(hold.is_some());
        s.spawn(|| {
            assert_eq!(table.deregister(keys.lkey, |_| ()), Ok(()));
            done.store(true, Ordering::SeqCst);
        });
        while table.local(keys.lkey, 7, 0x1000, 1, Access::empty()).is_ok() {
            std::thread::yield_now();
        }
        assert!(!done.load(Ordering::SeqCst));
        drop(hold);
    });
    assert!(done.load(Ordering::SeqCst));
}

#[test]
fn a_null_region_has_no_memory_and_no_remote_key() {
    let table = MrTable::new(3, 1);
    let access = Access::LOCAL_WRITE | Access::NULL;
    let null = Region { pd: 7, access, iova: 0, len: u64::MAX, addr: 0 };
    let keys = table.register(null).unwrap();
    assert_eq!(keys.rkey, 0);
    let hold = table.local(keys.lkey, 7, u64::MAX - 10, 10, Access::LOCAL_WRITE).ok().unwrap();
    assert!(hold.is_null());
    drop(hold);
    let plain = table.register(REGION).unwrap();
    assert!(!table.local(plain.lkey, 7, 0x1000, 1, Access::empty()).ok().unwrap().is_null());
    assert!(table.remote(0, (7, 1), 0, 1, Access::empty()).is_err());
    assert_eq!(table.deregister(keys.lkey, |_| ()), Ok(()));
}

#[test]
fn an_invalidatable_region_is_invalidated_once() {
    let table = MrTable::new(3, 1);
    let access = Access::REMOTE_READ | Access::INVALIDATABLE;
    let keys = table.register(Region { access, ..REGION }).unwrap();
    let qpn = 1;
    assert_eq!(table.invalidate(keys.rkey, 8, Some(qpn)), Err(KeyError::Pd));
    assert_eq!(table.invalidate(keys.rkey, 7, Some(qpn)), Ok(()));
    assert_eq!(table.invalidate(keys.rkey, 7, Some(qpn)), Err(KeyError::Key));
    assert_eq!(table.invalidate(0, 7, Some(qpn)), Err(KeyError::Key));
    assert!(table.local(keys.lkey, 7, 0x1000, 1, Access::empty()).is_ok());
    let plain = table.register(REGION).unwrap();
    assert_eq!(table.invalidate(plain.rkey, 7, Some(qpn)), Err(KeyError::Access));
}

#[test]
fn an_invalidated_key_is_good_again_after_a_re_registration() {
    let table = MrTable::new(10, 1);
    let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
    let region = Region { pd: 7, access, iova: 0x1000, len: 0x100, addr: 0xabc0_0000 };
    let qpn = 3;
    let first = Region { access: access | Access::INVALIDATABLE, ..region };
    let keys = table.register(first).unwrap();
    let open = || table.remote(keys.rkey, (7, qpn), 0x1000, 8, Access::REMOTE_WRITE).is_ok();
    assert_eq!(table.invalidate(keys.rkey, 7, Some(qpn)), Ok(()));
    assert!(!open());
    assert_eq!(table.replace(keys, region, |_| ()), Ok(()));
    assert!(open());
}

/// A guesser has to find 14 random bits in each key. Neither the other key nor earlier keys tell any of them.
#[test]
fn tags_are_random_in_every_bit() {
    const ROUNDS: u32 = 4000;
    let (one, other) = (MrTable::new(10, 1), MrTable::new(10, 2));
    // Counts how often each bit is set in an rkey, and how often it differs from the lkey, the rkey before, and another
    // process's.
    let mut set = [[0u32; TAG_BITS as usize]; 4];
    let mut last = 0;
    for _ in 0..ROUNDS {
        let (keys, others) = (one.register(REGION).unwrap(), other.register(REGION).unwrap());
        let words = [keys.rkey, keys.rkey ^ keys.lkey, keys.rkey ^ last, keys.rkey ^ others.rkey];
        for (counts, word) in set.iter_mut().zip(words) {
            counts.iter_mut().enumerate().for_each(|(bit, n)| *n += word >> bit & 1);
        }
        last = keys.rkey;
        one.deregister(keys.lkey, |_| ()).unwrap();
        other.deregister(others.lkey, |_| ()).unwrap();
    }
    // Five deviations of a fair coin are 158.
    let fair = ROUNDS / 2 - 158..=ROUNDS / 2 + 158;
    assert!(set.iter().flatten().all(|n| fair.contains(n)), "{set:?}");
}

#[test]
fn the_last_remote_access_answers_as_a_new_one_would() {
    let table = MrTable::new(10, 1);
    let region = Region { access: REGION.access | Access::REMOTE_WRITE, ..REGION };
    let (keys, other) = (table.register(region).unwrap(), table.register(REGION).unwrap());
    let mut last = LastRemote::default();
    let here = (7, 1);
    for rkey in [keys.rkey, keys.rkey, other.rkey, keys.lkey, 0, keys.rkey] {
        for (va, len) in [(0x1000, 0x100), (0x10ff, 2), (0xfff, 1), (0x1100, 0)] {
            for reach in [here, (8, 1)] {
                let need = Access::REMOTE_WRITE;
                let alone = table.remote(rkey, reach, va, len, need).map(|hold| hold.addr());
                assert_eq!(last.find(&table, rkey, reach, va, len, need), alone);
            }
        }
    }
}

#[test]
fn an_invalidated_key_is_not_found_while_in_use() {
    let table = MrTable::new(10, 1);
    let access = REGION.access | Access::INVALIDATABLE;
    let keys = table.register(Region { access, ..REGION }).unwrap();
    let mut last = LastRemote::default();
    let mut find = || last.find(&table, keys.rkey, (7, 1), 0x1000, 1, Access::REMOTE_READ).is_ok();
    assert!(find() && find());
    std::thread::scope(|scope| {
        // It waits for the access that is kept, which ends when the key is looked for again.
        let ends = scope.spawn(|| table.invalidate(keys.rkey, 7, None));
        while find() {
            std::thread::yield_now();
        }
        assert_eq!(ends.join().unwrap(), Ok(()));
    });
}

#[test]
fn a_window_stays_closed_to_other_queue_pairs() {
    let table = MrTable::new(10, 1);
    let access = REGION.access | Access::MW_BIND;
    let keys = table.register(Region { access, ..REGION }).unwrap();
    let window = table.alloc_window(7, WindowType::Type2).unwrap();
    let (access, qpn) = (Access::REMOTE_READ, 1);
    let bind = Bind { window, rkey: 1, lkey: keys.lkey, access, addr: 0x1000, len: 0x10 };
    let rkey = table.bind(&bind, 7, qpn).unwrap();
    let mut last = LastRemote::default();
    let mut find = |qpn| last.find(&table, rkey, (7, qpn), 0x1000, 1, Access::REMOTE_READ);
    assert!(find(qpn).is_ok());
    assert_eq!(find(2), Err(KeyError::Access));
    assert!(find(qpn).is_ok());
}

#[test]
fn deregistration_waits_until_the_last_remote_access_is_released() {
    let table = MrTable::new(10, 1);
    let keys = table.register(REGION).unwrap();
    let mut last = LastRemote::default();
    let reach = (7, 1);
    last.find(&table, keys.rkey, reach, 0x1000, 1, Access::REMOTE_READ).unwrap();
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| table.deregister(keys.lkey, |_| ()));
        while table.remote(keys.rkey, reach, 0x1000, 1, Access::REMOTE_READ).is_ok() {
            std::thread::yield_now();
        }
        assert!(!ends.is_finished());
        last.release();
        assert_eq!(ends.join().unwrap(), Ok(()));
    });
    let again = last.find(&table, keys.rkey, reach, 0x1000, 1, Access::REMOTE_READ);
    assert_eq!(again, Err(KeyError::Key));
}

/// A packet of a message that is under way still finds the memory, since deregistration waits for the message.
#[test]
fn what_is_in_use_is_found_while_its_deregistration_waits() {
    let table = MrTable::new(10, 1);
    let keys = table.register(REGION).unwrap();
    let (mut local, mut remote) = (LastLocal::default(), LastRemote::default());
    let need = Access::REMOTE_READ;
    local.find(&table, keys.lkey, 7, 0x1000, 1, Access::LOCAL_WRITE).unwrap();
    remote.find(&table, keys.rkey, (7, 1), 0x1000, 1, need).unwrap();
    std::thread::scope(|scope| {
        let ends = scope.spawn(|| table.deregister(keys.lkey, |_| ()));
        while table.remote(keys.rkey, (7, 1), 0x1000, 1, need).is_ok() {
            std::thread::yield_now();
        }
        let again = local.find(&table, keys.lkey, 7, 0x1001, 1, Access::LOCAL_WRITE);
        assert_eq!(again, Ok(Some(0xabc0_0001)));
        let again = remote.find(&table, keys.rkey, (7, 1), 0x1001, 1, need);
        assert_eq!(again, Ok(0xabc0_0001));
        remote.release();
        assert!(!ends.is_finished(), "the local access is still under way");
        local.release();
        assert_eq!(ends.join().unwrap(), Ok(()));
    });
    let again = local.find(&table, keys.lkey, 7, 0x1000, 1, Access::LOCAL_WRITE);
    assert_eq!(again, Err(KeyError::Key));
}

#[test]
fn the_last_local_access_answers_as_a_new_one_would() {
    let table = MrTable::new(10, 1);
    let far = Region { addr: 0xdef0_0000, ..REGION };
    let null = Region { access: Access::LOCAL_WRITE | Access::NULL, ..REGION };
    let [keys, other, null] = [REGION, far, null].map(|region| table.register(region).unwrap());
    let mut last = LastLocal::default();
    for lkey in [keys.lkey, keys.lkey, other.lkey, null.lkey, keys.rkey, 0, keys.lkey] {
        for (va, len) in [(0x1000, 0x100), (0x10ff, 2), (0xfff, 1), (0x1100, 0)] {
            for pd in [7, 8] {
                for need in [Access::LOCAL_WRITE, Access::REMOTE_WRITE] {
                    let alone = table.local(lkey, pd, va, len, need);
                    let alone = alone.map(|hold| (!hold.is_null()).then_some(hold.addr()));
                    assert_eq!(last.find(&table, lkey, pd, va, len, need), alone);
                }
            }
        }
    }
}

#[test]
fn a_region_or_window_is_found_by_key_alone() {
    let table = MrTable::new(10, 1);
    let access = REGION.access | Access::MW_BIND;
    let keys = table.register(Region { access, ..REGION }).unwrap();
    let read = Access::REMOTE_READ;
    let all =
        |rkey, reach, need| table.extent(rkey, reach, need).map(|(hold, len)| (hold.addr(), len));
    assert_eq!(all(keys.rkey, (7, 1), read), Ok((0xabc0_0000, 0x100)));
    assert_eq!(all(keys.rkey, (8, 1), read), Err(KeyError::Pd));
    assert_eq!(all(keys.rkey, (7, 1), Access::REMOTE_WRITE), Err(KeyError::Access));
    assert_eq!(all(keys.lkey, (7, 1), read), Err(KeyError::Key));
    let window = table.alloc_window(7, WindowType::Type2).unwrap();
    let bind = Bind { window, rkey: 1, lkey: keys.lkey, access: read, addr: 0x1010, len: 0x20 };
    let rkey = table.bind(&bind, 7, 1).unwrap();
    assert_eq!(all(rkey, (7, 1), read), Ok((0xabc0_0010, 0x20)));
    assert_eq!(all(rkey, (7, 2), read), Err(KeyError::Access));
}

/// Tells whether `end` returns only after the access to the key in progress has ended.
fn waits_for_access(table: &MrTable, rkey: u32, end: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let reach = (7, 1);
        let hold = table.remote(rkey, reach, 0x1000, 1, Access::REMOTE_READ).unwrap();
        let ends = scope.spawn(end);
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!ends.is_finished(), "it did not wait");
        drop(hold);
        ends.join().unwrap();
    });
}

#[test]
fn invalidating_waits_for_the_accesses_in_progress() {
    let table = MrTable::new(10, 1);
    let access = REGION.access | Access::INVALIDATABLE;
    let keys = table.register(Region { access, ..REGION }).unwrap();
    // An access by the local key is not waited for, since that key stays.
    let local = table.local(keys.lkey, 7, 0x1000, 1, Access::empty()).unwrap();
    waits_for_access(&table, keys.rkey, || table.invalidate(keys.rkey, 7, None).unwrap());
    let reach = (7, 1);
    let again = table.remote(keys.rkey, reach, 0x1000, 1, Access::REMOTE_READ).map(|_| ());
    assert_eq!(again, Err(KeyError::Key));
    drop(local);
    // A region that is changed has both keys again.
    table.replace(keys, Region { access, ..REGION }, |_| ()).unwrap();
    waits_for_access(&table, keys.rkey, || table.invalidate(keys.rkey, 7, None).unwrap());
}

#[test]
fn rebinding_or_ending_a_window_waits_for_accesses() {
    for kind in [WindowType::Type1, WindowType::Type2] {
        let table = MrTable::new(10, 1);
        let access = REGION.access | Access::MW_BIND;
        let keys = table.register(Region { access, ..REGION }).unwrap();
        let window = table.alloc_window(7, kind).unwrap();
        let (access, qpn) = (Access::REMOTE_READ, 1);
        let bind = Bind { window, rkey: 1, lkey: keys.lkey, access, addr: 0x1000, len: 0x10 };
        let mut rkey = table.bind(&bind, 7, qpn).unwrap();
        if kind == WindowType::Type1 {
            let again = Bind { rkey: 2, ..bind };
            waits_for_access(&table, rkey, || rkey = table.bind(&again, 7, qpn).unwrap());
        } else {
            waits_for_access(&table, rkey, || table.invalidate(rkey, 7, Some(qpn)).unwrap());
            rkey = table.bind(&Bind { rkey: 3, ..bind }, 7, qpn).unwrap();
            waits_for_access(&table, rkey, || table.forget_qp(qpn));
            rkey = table.bind(&Bind { rkey: 4, ..bind }, 7, qpn).unwrap();
        }
        waits_for_access(&table, rkey, || assert!(table.free_window(window)));
    }
}

#[test]
fn a_table_holds_the_regions_it_was_made_for() {
    // A multiple of the table's steps, and one more.
    for capacity in [2 * CHUNK as u32, 2 * CHUNK as u32 + 1] {
        let table = MrTable::new(capacity, 1);
        assert!((0..capacity).all(|_| table.register(REGION).is_some()));
        assert!(table.register(REGION).is_none());
    }
}

#[test]
fn the_oldest_index_is_used_again_when_enough_others_rest() {
    let table = MrTable::new(3 * RESTING as u32, 1);
    let all: Vec<_> = (0..=RESTING).map(|_| table.register(REGION).unwrap()).collect();
    for keys in &all[1..] {
        table.deregister(keys.lkey, |_| ()).unwrap();
    }
    let next = table.register(REGION).unwrap();
    assert_eq!(index(next.lkey), index(all[1].lkey));
    // One fewer rests now, so the next index is new.
    let next = table.register(REGION).unwrap();
    assert_eq!(index(next.lkey), all.len() + 1);
}

#[test]
fn the_two_keys_of_a_region_differ_in_any_bit() {
    let table = MrTable::new(2000, 1);
    let mut differ = 0;
    for _ in 0..2000 {
        let keys = table.register(REGION).unwrap();
        assert_ne!(keys.lkey, keys.rkey);
        assert_eq!(index(keys.lkey), index(keys.rkey));
        differ |= keys.lkey & !keys.rkey;
    }
    // The remote key is not the local one with more bits.
    assert_eq!(differ, TAG_MASK);
}

#[test]
fn deregistration_asks_the_last_keeper_and_then_all() {
    let table = MrTable::new(10, 1);
    let keys = table.register(REGION).unwrap();
    let (mut one, mut other) = (LastLocal::default(), LastLocal::default());
    let (place, need) = ((0x1000, 1), Access::LOCAL_WRITE);
    // The third finds it kept already, and the other one stays the last.
    assert!(one.find_kept(&table, 5, keys.lkey, 7, place, need).is_ok());
    assert!(other.find_kept(&table, 6, keys.lkey, 7, place, need).is_ok());
    assert!(one.find_kept(&table, 5, keys.lkey, 7, place, need).is_ok());
    let mut asked = Vec::new();
    let ended = table.deregister(keys.lkey, |keepers| {
        match keepers {
            Keepers::One(_) => other.release(),
            Keepers::All => one.release(),
        }
        asked.push(keepers);
    });
    assert_eq!((ended, asked), (Ok(()), vec![Keepers::One(6), Keepers::All]));
    assert_eq!(one.find_kept(&table, 5, keys.lkey, 7, place, need), Err(KeyError::Key));
}

#[test]
fn nobody_is_asked_for_a_region_that_is_not_in_use() {
    let table = MrTable::new(10, 1);
    let keys = table.register(REGION).unwrap();
    let mut last = LastLocal::default();
    last.find_kept(&table, 5, keys.lkey, 7, (0x1000, 1), Access::LOCAL_WRITE).unwrap();
    last.release();
    let ended = table.deregister(keys.lkey, |keepers| panic!("{keepers:?}"));
    assert_eq!(ended, Ok(()));
    // Once it has released the region, no other is asked.
    let keys = table.register(REGION).unwrap();
    last.find_kept(&table, 6, keys.lkey, 7, (0x1000, 1), Access::LOCAL_WRITE).unwrap();
    let mut asked = Vec::new();
    let ended = table.replace(keys, REGION, |keepers| {
        asked.push(keepers);
        last.release();
    });
    assert_eq!((ended, asked), (Ok(()), vec![Keepers::One(6)]));
}

//! Rules that come, hold and end.

use anyverbs_faults::ProcessAction;

use super::*;

fn faults(text: &str) -> Faults {
    let variable = |name: &str| match name {
        "ANYVERBS_DEVICES" => Some("3".to_owned()),
        "ANYVERBS_FAULTS" => Some(text.to_owned()),
        _ => None,
    };
    Faults::new(&Config::parse("", "", variable).unwrap()).unwrap()
}

/// Adds rules, where there is no queue pair.
fn add(faults: &Faults, text: &str, now: Time) -> Result<usize, String> {
    faults.add(text, now, |_| false)
}

fn second(n: u64) -> Time {
    Time::from_nanos(n * 1_000_000_000)
}

fn short(happening: Happening) -> String {
    match happening {
        Happening::Down(device, _) => format!("down {device}"),
        Happening::Up(device, _) => format!("up {device}"),
        Happening::Event(port, event, _) => format!("{event} {port}"),
        Happening::Fatal(device, _) => format!("fatal {device}"),
        Happening::GidGone(port, index, _) => format!("no gid {index} {port}"),
        Happening::GidBack(port, index, _) => format!("gid {index} {port}"),
        Happening::Fails(_) => "fails".into(),
        Happening::Process(..) => "process".into(),
    }
}

#[test]
fn rules_come_and_go() {
    let faults = faults("drop packet 1");
    let due = |n| faults.take_due(second(n), &|_, _| (), &|_, _| ());
    let mut known = Known::default();
    let texts = |(cleared, rules): (bool, Vec<Active>)| {
        (cleared, rules.iter().map(|a| (a.number, a.rule.text.clone())).collect::<Vec<_>>())
    };
    assert_eq!(texts(faults.news(&mut known)), (false, vec![(0, "drop packet 1".into())]));
    let added = "on device anyverbs2: down for 5s after 1s; drop packet 2";
    assert_eq!(add(&faults, added, second(10)), Ok(2));
    let new = [(1, "on device anyverbs2: down for 5s after 1s"), (2, "drop packet 2")];
    let new: Vec<_> = new.map(|(n, text)| (n, text.to_owned())).into();
    assert_eq!(texts(faults.news(&mut known)), (false, new));
    assert_eq!(texts(faults.news(&mut known)), (false, vec![]));
    let rules = |over: &str| {
        format!("drop packet 1\non device anyverbs2: down for 5s after 1s{over}\ndrop packet 2\n")
    };
    assert_eq!(faults.list(1000, second(15)), rules(""));
    assert_eq!(faults.list(1000, second(16)), rules(" # is over"));
    for bytes in 20..90 {
        let short = faults.list(bytes, second(16));
        assert!(short.len() <= bytes && short.ends_with(" more\n"), "{bytes}: {short}");
    }
    // Its time counts from then.
    assert_eq!(faults.next(), second(11).as_nanos());
    assert!(due(10).is_none());
    assert!(due(11).is_some() && faults.is_down(2));
    assert_eq!(faults.clear(&|_, _| ()), (3, vec![2]));
    assert!(
        !faults.is_down(2) && faults.next() == NEVER && faults.list(1000, second(20)).is_empty()
    );
    assert_eq!(add(&faults, "drop packet 3", second(20)), Ok(1));
    assert_eq!(texts(faults.news(&mut known)), (true, vec![(3, "drop packet 3".into())]));
    // A device that has failed does not come back.
    add(&faults, "on device anyverbs0: fatal after 0s", second(30)).unwrap();
    assert!(due(30).is_some());
    assert_eq!(faults.clear(&|_, _| ()), (2, vec![]));
    assert!(faults.is_down(0));
}

#[test]
fn a_script_about_calls_alone_takes_rules_about_devices() {
    let faults = faults("ibv_reg_mr 1 fails with EIO");
    assert_eq!(add(&faults, "drop packet 1", Time::from_nanos(1)), Ok(1));
    let (_, rules) = faults.news(&mut Known::default());
    let rules = rules.iter().map(|active| (active.number, &*active.rule.text));
    let wanted = [(0, "ibv_reg_mr 1 fails with EIO"), (1, "drop packet 1")];
    assert_eq!(rules.collect::<Vec<_>>(), wanted);
}

#[test]
fn what_cannot_hold_is_refused_and_changes_nothing() {
    let faults = faults("seed 5");
    let now = Time::from_nanos(1);
    for (text, wanted) in [
        ("drop pocket 1", "line 1, column 6: expected"),
        ("drop packet 1; seed 3", "the seed stays that of the start, 5"),
        ("# nothing", "the script has no rules"),
        ("drop packet 1\nibv_reg_mr fails with EIO", "line 2: the process makes no calls of C"),
        (
            "on device rail9: drop packets",
            "line 1: there is no device \"rail9\", but anyverbs0, anyverbs1, anyverbs2",
        ),
    ] {
        let error = add(&faults, text, now).unwrap_err();
        assert!(error.starts_with(wanted), "{error}");
    }
    assert_eq!(add(&faults, "limit packets to 1Gb/s", now), Ok(1));
    let hidden = add(&faults, "drop packet 1\nlimit packets to 2Gb/s", now).unwrap_err();
    let wanted = "line 2: \"limit packets to 1Gb/s\" limits these packets already";
    assert!(hidden.starts_with(wanted), "{hidden}");
    let many: String = (1..MOST_RULES).map(|n| format!("drop packet {n};")).collect();
    assert_eq!(add(&faults, &many, now), Ok(MOST_RULES - 1));
    assert!(add(&faults, "drop packet 1", now).unwrap_err().starts_with("a process takes 10000"));
}

#[test]
fn a_queue_pair_that_is_not_there_is_refused_by_its_number() {
    let faults = faults("seed 5");
    faults.add_qp(0, 0x30_af32);
    let add = |text| faults.add(text, second(1), |number| number == 0x30_af32);
    assert_eq!(add("on qp 0x30af32: drop packet 1; on qp 7: drop packet 1"), Ok(2));
    let gone = "line 1: the process has no queue pair 0x30af33";
    assert_eq!(add("on qp 0x30af33: drop packet 1").unwrap_err(), gone);
    let meant = "line 1: 3190578 is the number of a queue pair, and not its place in their order: write 0x30af32";
    assert_eq!(add("on qp 3190578: drop packet 1").unwrap_err(), meant);
}

#[test]
fn a_rule_that_is_over_does_not_stand_in_the_way_of_a_new_one() {
    let faults = faults("seed 5");
    let rule = "limit packets to 1Mb/s for 2s";
    assert_eq!(add(&faults, rule, second(10)), Ok(1));
    let refused = |text, at| add(&faults, text, second(at)).is_err();
    assert!(refused("limit packets to 1kb/s for 1s", 11));
    assert!(refused("drop packet 1; limit packets to 1kb/s for 1s", 11));
    // It holds for longer than the first one.
    assert_eq!(add(&faults, "limit packets to 1kb/s for 2s", second(11)), Ok(1));
    assert_eq!(faults.list(1000, second(13)).matches("# is over").count(), 2);
    assert_eq!(add(&faults, &format!("drop packet 1; {rule}"), second(13)), Ok(2));
}

#[test]
fn a_port_is_down_while_any_rule_says_so() {
    let faults =
        faults("on device anyverbs1: down after 1s for 2s; down after 2s for 3s; drop packet 1");
    let mut changes = Vec::new();
    for second in 0..7 {
        let now = Time::from_nanos(second * 1_000_000_000);
        while let Some((happening, changed)) = faults.take_due(now, &|_, _| (), &|_, _| ()) {
            if changed {
                changes.push((second, short(happening)));
            }
        }
    }
    let wanted =
        [(1, "down 1"), (2, "down 0"), (2, "down 2"), (5, "up 0"), (5, "up 1"), (5, "up 2")];
    assert_eq!(changes, wanted.map(|(second, what)| (second, what.to_owned())));
    assert_eq!(faults.next(), NEVER);
    assert!((0..4).all(|device| !faults.is_down(device)));
}

#[test]
fn pauses_that_overlap_are_one_and_a_process_dies_in_one() {
    let seconds = Duration::from_secs;
    let stands = |text: &str, at: u64| {
        let (faults, now) = (faults(text), Time::from_nanos(at * 1_000_000_000));
        let Some((Happening::Process(ProcessAction::Pauses(time), _), _)) =
            faults.take_due(now, &|_, _| (), &|_, _| ())
        else {
            panic!("{text}: no pause");
        };
        let Standstill { lasts, dies, taken } = faults.take_during(now, time);
        (lasts, dies, taken.len(), faults.plan.lock().schedule.len())
    };
    let one = "process pauses for 4s after 1s";
    assert_eq!(stands(one, 1), (seconds(4), false, 0, 0));
    // It began late.
    assert_eq!(stands(one, 3), (seconds(4), false, 0, 0));
    for (other, wanted) in [
        ("process pauses for 1s after 2s", (seconds(4), false, 1, 0)),
        ("process pauses for 4s after 4s", (seconds(7), false, 1, 0)),
        // The second one makes it so long that the third one is in it.
        (
            "process pauses for 3s after 4s; process pauses for 3s after 6s",
            (seconds(8), false, 2, 0),
        ),
        ("process pauses for 1s after 5s", (seconds(4), false, 0, 1)),
        ("process dies after 3s; process pauses for 9s after 4s", (seconds(2), true, 1, 1)),
        ("process dies after 1s", (seconds(0), true, 1, 0)),
        ("process dies after 9s", (seconds(4), false, 0, 1)),
        // Rules of a device wait until the process goes on, and are not lost.
        ("on device anyverbs1: down for 1s after 2s", (seconds(4), false, 0, 2)),
    ] {
        assert_eq!(stands(&format!("{one}; {other}"), 1), wanted, "{other}");
    }
}

#[test]
fn a_port_may_be_down_from_the_start() {
    let faults = faults("on device anyverbs1: down for 1s");
    assert!(faults.is_down(1) && !faults.is_down(0));
    let at = |second: u64| Time::from_nanos(second * 1_000_000_000);
    let due = |second: u64| faults.take_due(at(second), &|_, _| (), &|_, _| ());
    let due = |second| due(second).map(|(happening, changed)| (short(happening), changed));
    assert_eq!(due(0), Some(("down 1".into(), true)));
    assert!(faults.is_down(1));
    assert_eq!(due(1), Some(("up 1".into(), true)));
    assert!(!faults.is_down(1));
}

#[test]
fn a_gid_goes_and_comes_and_may_be_gone_from_the_start() {
    let faults = faults(
        "on device anyverbs1: gid 1 removed for 3s; on device anyverbs2: gid 0 removed for 1s after 2s",
    );
    let gone = faults.gids_gone_at_start();
    assert_eq!(gone.iter().map(|gone| (gone.0, gone.1)).collect::<Vec<_>>(), [(1, 1)]);
    let due = |second: u64| {
        let now = Time::from_nanos(second * 1_000_000_000);
        let taken = faults.take_due(now, &|_, _| panic!("the caller raises the event"), &|_, _| ());
        taken.map(|(happening, changes)| (short(happening), changes, faults.lacks_gids()))
    };
    let gone = |what: &str, changes, lacks| Some((what.to_owned(), changes, lacks));
    assert_eq!(due(0), gone("no gid 1 1", false, true));
    assert_eq!(due(2), gone("no gid 0 2", true, true));
    assert_eq!(due(3), gone("gid 1 1", true, true));
    assert_eq!(due(3), gone("gid 0 2", true, false));
    assert_eq!(due(9), None);
    add(&faults, "gid 1 removed after 0s", Time::from_nanos(0)).unwrap();
    assert_eq!(due(9), gone("no gid 1 0", true, true));
    faults.clear(&|_, _| ());
    assert!(!faults.lacks_gids() && due(9).is_none());
}

#[test]
fn a_device_that_is_removed_has_failed() {
    let faults =
        faults("on device anyverbs1: removed after 1s; on device anyverbs2: fatal after 1s");
    let state = || {
        let removed = ["anyverbs0", "anyverbs1", "anyverbs2"].map(|name| faults.is_removed(name));
        (removed, faults.failed().collect::<Vec<_>>())
    };
    assert_eq!(state(), ([false; 3], vec![]));
    while faults.take_due(Time::from_nanos(1_000_000_000), &|_, _| (), &|_, _| ()).is_some() {}
    assert_eq!(state(), ([false, true, false], vec![1, 2]));
    faults.clear(&|_, _| ());
    assert_eq!(state(), ([false, true, false], vec![1, 2]));
}

#[test]
fn an_event_comes_once_and_changes_nothing() {
    let script = "on device anyverbs1: event CLIENT_REREGISTER after 1s; event LID_CHANGE after 2s";
    let faults = faults(script);
    let told = std::cell::RefCell::new(Vec::new());
    let raise = |port, kind| told.borrow_mut().push((port, kind));
    while faults.take_due(Time::from_nanos(9_000_000_000), &raise, &|_, _| ()).is_some() {}
    let lids = [0, 1, 2].map(|port| (port, Some(AsyncEventKind::LidChange)));
    let wanted = [&[(1, Some(AsyncEventKind::ClientReregister))][..], &lids].concat();
    assert_eq!(told.into_inner(), wanted);
    assert!((0..3).all(|port| !faults.is_down(port)));
    assert_eq!(faults.next(), NEVER);
}

/// Timers run in any thread of the process, and orders come to one of them.
#[test]
fn events_come_in_the_order_of_the_changes() {
    let faults = faults("on device anyverbs1: down after 1s");
    let (told, is_down) = (std::sync::Mutex::new(Vec::new()), std::sync::Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            is_down.wait();
            faults.clear(&|port, _| told.lock().unwrap().push(faults.is_down(port)));
        });
        faults.take_due(
            Time::from_nanos(1_000_000_000),
            &|port, _| {
                is_down.wait();
                // The other thread comes to its own change meanwhile, or waits for this one.
                std::thread::sleep(Duration::from_millis(100));
                told.lock().unwrap().push(faults.is_down(port));
            },
            &|_, _| (),
        );
    });
    assert_eq!(told.into_inner().unwrap(), [true, false]);
    assert!(!faults.is_down(1));
}

/// A program may end as soon as it sees the change.
#[test]
fn the_log_has_a_change_before_it_is_there() {
    let faults = faults(
        "on device anyverbs0: down; on device anyverbs1: down for 2s after 1s; on device anyverbs1: down for 1s after 2s",
    );
    assert_eq!(faults.at_start().into_iter().map(short).collect::<Vec<_>>(), ["down 0"]);
    let told = std::cell::RefCell::new(Vec::new());
    let tell = |happening, changes| {
        told.borrow_mut().push((short(happening), changes, faults.is_down(1)));
    };
    let now = Time::from_nanos(9_000_000_000);
    while faults.take_due(now, &|_, _| (), &tell).is_some() {}
    let of = |what: &str, changes, was_down| (what.to_owned(), changes, was_down);
    let wanted = [
        of("down 1", true, false),
        of("down 1", false, true),
        of("up 1", false, true),
        of("up 1", true, true),
    ];
    assert_eq!(*told.borrow(), wanted);
}

/// The log of a Rust program may use the device.
#[test]
fn the_log_is_told_of_a_change_without_a_lock() {
    let faults = faults("on device anyverbs1: down after 1s; on device anyverbs1: down after 2s");
    let tell = |happening, _| match short(happening).as_str() {
        "down 1" => assert!(faults.list(1000, second(1)).contains("down after 1s")),
        other => panic!("{other}"),
    };
    assert!(faults.take_due(second(1), &|_, _| (), &tell).is_some());
    assert!(faults.is_down(1));
    // The rules are cleared meanwhile.
    let tell = |_, _| assert_eq!(faults.clear(&|_, _| ()), (2, vec![1]));
    assert_eq!(faults.take_due(second(2), &|_, _| panic!("it is not down"), &tell), None);
    assert!(!faults.is_down(1));
}

#[test]
fn a_device_fails_once_and_has_no_events_then() {
    let faults = faults(
        "on device anyverbs1: fatal after 1s; on device anyverbs1: removed after 2s; event SM_CHANGE after 3s",
    );
    let raised = std::cell::RefCell::new(Vec::new());
    let raise = |port, kind| raised.borrow_mut().push((port, kind));
    let (mut failures, told) = (Vec::new(), std::cell::RefCell::new(Vec::new()));
    let tell = |happening, changes| told.borrow_mut().push((short(happening), changes));
    while let Some((happening, changes)) = faults.take_due(second(3), &raise, &tell) {
        if matches!(happening, Happening::Fatal(..)) {
            failures.push(changes);
        }
    }
    assert_eq!(failures, [true, false]);
    assert!(faults.is_removed("anyverbs1") && !faults.is_removed("anyverbs0"));
    let sm = Some(AsyncEventKind::SmChange);
    assert_eq!(*raised.borrow(), [(1, Some(AsyncEventKind::DeviceFatal)), (0, sm), (2, sm)]);
    let changes: Vec<_> = told.borrow().iter().map(|(_, changes)| *changes).collect();
    assert_eq!(changes, [true, false, true, false, true]);
}

#[test]
fn queue_pairs_are_counted_by_process_and_by_device() {
    let faults = faults(
        "on qp 2: drop packet 1; on device anyverbs1 qp 2: drop packet 1; on qp 0x12: drop packet 1; on device anyverbs0 qp 0x12: drop packet 1",
    );
    let places = [(0, 16), (1, 17), (1, 18)].map(|(device, n)| faults.add_qp(device, n));
    let (_, rules) = faults.news(&mut Known::default());
    let concerns = |rule: usize| places.map(|place| faults.concerns(rules[rule].rule, place));
    assert_eq!(concerns(0), [false, true, false]);
    assert_eq!(concerns(1), [false, false, true]);
    assert_eq!([2, 3].map(concerns), [[false, false, true], [false; 3]]);
}

#[test]
fn rules_of_a_port_leave_the_other_port_of_its_device() {
    let script = "on device a port 2: down after 1s; on device a: drop packet 1; on device a port 2: drop packet 2";
    let variable = |name: &str| (name == "ANYVERBS_FAULTS").then(|| script.to_owned());
    let file = "devices = [{ name = 'a', ports = 2 }, { name = 'b' }]";
    let faults = Faults::new(&Config::parse("", file, variable).unwrap()).unwrap();
    while faults.take_due(Time::from_nanos(1_000_000_000), &|_, _| (), &|_, _| ()).is_some() {}
    assert_eq!([0, 1, 2].map(|port| faults.is_down(port)), [false, true, false]);
    let place = faults.add_qp(0, 16);
    let places = [place, QpPlace { port: 1, ..place }, faults.add_qp(2, 17)];
    let (_, rules) = faults.news(&mut Known::default());
    let concerns = |rule: usize| places.map(|place| faults.concerns(rules[rule].rule, place));
    assert_eq!(concerns(1), [true, true, false]);
    assert_eq!(concerns(2), [false, true, false]);
    let time = Time::from_nanos(0);
    let refused = add(&faults, "on device b port 2: down", time).unwrap_err();
    assert_eq!(refused, "line 1: \"b\" has no port 2, but port 1 alone");
    add(&faults, "on device a: fatal after 0s", time).unwrap();
    while faults.take_due(Time::from_nanos(1_000_000_000), &|_, _| (), &|_, _| ()).is_some() {}
    assert_eq!([0, 1, 2].map(|port| faults.is_down(port)), [true, true, false]);
    assert_eq!(faults.failed().collect::<Vec<_>>(), [0, 1]);
}

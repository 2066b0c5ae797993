//! Events, channels, acknowledgements.

use std::sync::mpsc;
use std::time::Duration;

use anyverbs::cm::*;
use anyverbs::error::EventError;
use anyverbs::*;

use super::*;

fn id_on(channel: &EventChannel, cookie: u64) -> Id {
    Id::create(channel, PortSpace::Tcp, QpType::Rc, cookie).unwrap()
}

fn note(arg: u64) -> Event {
    Event {
        kind: EventKind::User,
        status: 3,
        cookie: 0,
        new_id: None,
        param: EventParam::Arg(arg),
        join_cookie: 0,
        ece: Ece::default(),
    }
}

fn arg(event: &Event) -> u64 {
    match event.param {
        EventParam::Arg(arg) => arg,
        ref other => panic!("{other:?}"),
    }
}

#[test]
fn a_channel_is_readable_exactly_while_an_event_waits() {
    isolate();
    let channel = create_event_channel().unwrap();
    set_nonblocking(&channel);
    assert!(matches!(channel.get_event(), Err(EventError::WouldBlock)));
    let (a, b) = (id_on(&channel, 1), id_on(&channel, 2));
    for i in 0..3 {
        a.write_event(note(i)).unwrap();
        b.write_event(note(10 + i)).unwrap();
    }
    let event = channel.get_event().unwrap();
    assert_eq!((event.cookie, arg(&event), event.status), (1, 0, 3));
    // Events carry the cookie of when they are read.
    b.set_cookie(7);
    let event = channel.get_event().unwrap();
    assert_eq!((event.cookie, arg(&event)), (7, 10));
    // Events of a destroyed id are gone; the others stay in order.
    a.ack_events(1);
    a.destroy().unwrap();
    let rest: Vec<_> = (0..2).map(|_| arg(&channel.get_event().unwrap())).collect();
    assert_eq!(rest, [11, 12]);
    assert!(is_quiet(&channel));
    assert!(matches!(channel.get_event(), Err(EventError::WouldBlock)));
    let user_only = b.write_event(Event { kind: EventKind::Established, ..note(0) });
    assert_eq!(user_only.unwrap_err().errno(), libc::EINVAL);
}

#[test]
fn a_reader_waits_for_the_next_event() {
    let node = Node::tcp();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let event = node.channel.get_event().unwrap();
            tell.send(arg(&event)).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(30)).is_err());
        node.id.write_event(note(4)).unwrap();
        assert_eq!(told.recv().unwrap(), 4);
    });
}

#[test]
fn destroying_waits_for_acknowledgements() {
    let node = Node::tcp();
    for i in 0..3 {
        node.id.write_event(note(i)).unwrap();
    }
    node.channel.get_event().unwrap();
    node.channel.get_event().unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            node.id.destroy().unwrap();
            tell.send(()).unwrap();
        });
        node.id.ack_events(1);
        assert!(told.recv_timeout(Duration::from_millis(30)).is_err());
        node.id.ack_events(1);
        told.recv().unwrap();
    });
    assert!(is_quiet(&node.channel), "the third was withdrawn");
}

/// A reader of the new channel may need what the caller of `migrate` holds, before it acknowledges.
#[test]
fn a_migration_waits_for_the_events_that_were_read_before_it() {
    let node = Node::tcp();
    let to = create_event_channel().unwrap();
    node.id.write_event(note(1)).unwrap();
    node.channel.get_event().unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            node.id.migrate(&to).unwrap();
            tell.send(()).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(30)).is_err());
        node.id.write_event(note(2)).unwrap();
        assert_eq!(arg(&to.get_event().unwrap()), 2);
        node.id.ack_events(1);
        let is_done = told.recv_timeout(Duration::from_secs(20));
        node.id.ack_events(1);
        is_done.expect("it waits for the event that was read later");
    });
}

#[test]
fn a_request_is_acknowledged_at_its_listener() {
    let listener = Node::listener(&at("127.0.0.1", 0));
    let active = Node::towards(&listener.on("127.0.0.1"));
    active.id.connect(&PARAM).unwrap();
    let mut event = expect(&listener.channel, EventKind::ConnectRequest);
    assert_eq!(event.cookie, 5);
    // The new id has nothing to wait for.
    event.new_id.take().unwrap().destroy().unwrap();
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            listener.id.destroy().unwrap();
            tell.send(()).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(30)).is_err());
        listener.id.ack_events(1);
        told.recv().unwrap();
    });
}

#[test]
fn an_id_takes_its_events_along() {
    isolate();
    let (from, to) = (create_event_channel().unwrap(), create_event_channel().unwrap());
    let (moving, staying) = (id_on(&from, 1), id_on(&from, 2));
    for i in 0..2 {
        moving.write_event(note(i)).unwrap();
        staying.write_event(note(10 + i)).unwrap();
    }
    moving.migrate(&to).unwrap();
    moving.write_event(note(2)).unwrap();
    let drain = |channel: &EventChannel| {
        let mut args = Vec::new();
        while !is_quiet(channel) {
            args.push(arg(&channel.get_event().unwrap()));
        }
        args
    };
    assert_eq!((drain(&from), drain(&to)), (vec![10, 11], vec![0, 1, 2]));
    moving.ack_events(3);
    // There and back.
    moving.write_event(note(5)).unwrap();
    moving.migrate(&from).unwrap();
    moving.migrate(&to).unwrap();
    moving.migrate(&from).unwrap();
    assert_eq!((drain(&from), drain(&to)), (vec![5], vec![]));
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            moving.migrate(&to).unwrap();
            tell.send(()).unwrap();
        });
        assert!(told.recv_timeout(Duration::from_millis(30)).is_err(), "one is unacknowledged");
        moving.ack_events(1);
        told.recv().unwrap();
    });
    // A channel outlives its id, and an id's channel its handle.
    drop(to);
    moving.write_event(note(1)).unwrap();
}

#[test]
fn many_events_of_many_ids_come_and_go() {
    isolate();
    let channel = create_event_channel().unwrap();
    set_nonblocking(&channel);
    let ids: Vec<_> = (0..2_000).map(|i| id_on(&channel, i)).collect();
    for _ in 0..5 {
        for id in &ids {
            id.write_event(note(0)).unwrap();
        }
    }
    let other = create_event_channel().unwrap();
    let mut left = Vec::new();
    for (i, id) in ids.into_iter().enumerate() {
        match i % 3 {
            0 => id.destroy().unwrap(),
            1 => id.migrate(&other).unwrap(),
            _ => {}
        }
        left.push(id);
    }
    for round in 0..5 {
        for i in (0..2_000).filter(|i| i % 3 == 2) {
            assert_eq!(channel.get_event().unwrap().cookie, i, "round {round}");
        }
    }
    assert!(matches!(channel.get_event(), Err(EventError::WouldBlock)));
    for i in (0..2_000).filter(|i| i % 3 == 1).flat_map(|i| [i; 5]) {
        assert_eq!(other.get_event().unwrap().cookie, i);
    }
    assert!(is_quiet(&other));
}

/// Whatever reads, destroys and migrates at the same time, no event is lost, and no reader hangs.
#[test]
fn readers_and_movers_race() {
    const ROUNDS: u64 = 2_000;
    isolate();
    let channels = [create_event_channel().unwrap(), create_event_channel().unwrap()];
    let (steady, moving) = (id_on(&channels[0], 1), id_on(&channels[0], 2));
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        for channel in &channels {
            let tell = tell.clone();
            let (steady, moving) = (&steady, &moving);
            scope.spawn(move || {
                loop {
                    let event = channel.get_event().unwrap();
                    match event.cookie {
                        1 => steady.ack_events(1),
                        2 => moving.ack_events(1),
                        _ => return,
                    }
                    tell.send((event.cookie, arg(&event))).unwrap();
                }
            });
        }
        for i in 0..ROUNDS {
            steady.write_event(note(i)).unwrap();
            moving.write_event(note(i)).unwrap();
            moving.migrate(&channels[(i % 2) as usize]).unwrap();
            let fleeting = id_on(&channels[0], 9);
            if i % 64 == 0 {
                fleeting.destroy().unwrap();
            }
        }
        let mut seen = [Vec::new(), Vec::new()];
        for _ in 0..2 * ROUNDS {
            let (cookie, arg) = told.recv_timeout(Duration::from_secs(10)).unwrap();
            seen[cookie as usize - 1].push(arg);
        }
        for args in &mut seen {
            args.sort_unstable();
            assert_eq!(*args, (0..ROUNDS).collect::<Vec<_>>());
        }
        for channel in &channels {
            id_on(channel, 3);
            let end = id_on(channel, 3);
            end.write_event(note(0)).unwrap();
            std::mem::forget(end);
        }
    });
}

#[test]
fn a_forked_child_leaves_what_it_inherited_alone() {
    let (listener, active, passive) = connected();
    // SAFETY: the child runs only the code below and exits without returning to the test harness.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let check = |ok: bool, code: i32| {
            if !ok {
                // SAFETY: ends the child.
                unsafe { libc::_exit(code) };
            }
        };
        let forked = |result: Result<(), CmError>| result == Err(CmError::Forked);
        check(forked(active.id.disconnect()) && forked(active.id.connect(&PARAM)), 1);
        check(forked(listener.id.listen(0)) && forked(passive.id.accept(None)), 2);
        check(matches!(active.channel.get_event(), Err(EventError::Forked)), 3);
        check(forked(active.id.write_event(note(0))), 4);
        active.id.detach_qp();
        check(active.id.destroy().is_ok() && listener.id.destroy().is_ok(), 5);
        check(forked(Id::create(&active.channel, PortSpace::Tcp, QpType::Rc, 0).map(drop)), 6);
        drop((listener, active, passive));
        // Its own device works.
        drop(connected());
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for our child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    let port = listener.port();
    assert_eq!(Node::tcp().id.bind_addr(&at("127.0.0.1", port)).unwrap_err(), CmError::InUse(port));
    active.id.disconnect().unwrap();
    passive.expect(EventKind::Disconnected);
}

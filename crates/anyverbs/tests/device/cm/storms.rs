//! Ids that are given up at any moment, by many threads.

use std::sync::atomic::{AtomicBool, Ordering};

use anyverbs::cm::*;
use anyverbs::*;

use super::*;

struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        // Knuth's MMIX generator.
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

fn queue_pair(e: &Endpoint, id: &Id) -> Qp {
    let init = QpInitAttr {
        send_cq: &e.cq,
        recv_cq: &e.cq,
        srq: None,
        cap: CAP,
        qp_type: QpType::Rc,
        sq_sig_all: true,
        cookie: 0,
    };
    let qp = e.context.create_qp(&e.pd, &init).unwrap();
    // The connection may be over by now.
    let _ = id.attach_qp(&qp);
    qp
}

/// Accepts, rejects and forgets.
fn serve(listener: &Node, done: &AtomicBool, mut dice: Dice) {
    let e = Endpoint::with(QpType::Rc, CAP, 64);
    let mut held = Vec::new();
    while !done.load(Ordering::Relaxed) {
        if !poll(&listener.channel, 20) {
            // A peer may wait for an answer to its disconnection.
            held.clear();
            continue;
        }
        // The other one may have been faster.
        let Some(id) = listener.channel.get_event().ok().and_then(|event| event.new_id) else {
            continue;
        };
        listener.id.ack_events(1);
        // Its events come here, too, and belong to no id.
        id.set_cookie(u64::MAX);
        match dice.roll(4) {
            0 => drop(id.reject(b"no", false)),
            1 => {}
            _ => {
                let qp = queue_pair(&e, &id);
                if id.accept(Some(&PARAM)).is_ok() {
                    held.push((id, qp));
                }
            }
        }
        if held.len() > 5 || dice.roll(3) == 0 {
            let at = dice.roll(held.len().max(1) as u64) as usize;
            if at < held.len() {
                held.swap_remove(at);
            }
        }
    }
}

fn ask(to: &Address, rounds: usize, mut dice: Dice) {
    let e = Endpoint::with(QpType::Rc, CAP, 64);
    let channels = [create_event_channel().unwrap(), create_event_channel().unwrap()];
    for _ in 0..rounds {
        let id = Id::create(&channels[0], PortSpace::Tcp, QpType::Rc, 1).unwrap();
        let most_steps = dice.roll(7);
        let event = |channel: &EventChannel, steps: u64| {
            (most_steps >= steps && poll(channel, 10_000))
                .then(|| channel.get_event().unwrap().kind)
        };
        id.resolve_addr(None, to).unwrap();
        if event(&channels[0], 1).is_none() {
            continue;
        }
        id.resolve_route().unwrap();
        if event(&channels[0], 2).is_none() {
            continue;
        }
        let qp = queue_pair(&e, &id);
        id.connect(&PARAM).unwrap();
        let mut at = 0;
        if dice.roll(3) == 0 {
            id.ack_events(2);
            id.migrate(&channels[1]).unwrap();
            at = 1;
        }
        match event(&channels[at], 3) {
            Some(EventKind::Established) if most_steps > 3 => id.disconnect().unwrap(),
            _ => continue,
        }
        if most_steps > 4 {
            assert!(poll(&channels[at], 10_000));
            channels[at].get_event().unwrap();
        }
        if most_steps > 5 {
            id.detach_qp();
        }
        drop((id, qp));
    }
    for channel in &channels {
        assert!(is_quiet(channel), "what was destroyed says nothing");
    }
}

#[test]
fn ids_are_given_up_at_any_moment() {
    let listener = Node::listener(&at("127.0.0.1", 0));
    set_nonblocking(&listener.channel);
    let to = listener.on("127.0.0.1");
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (listener, done) = (&listener, &done);
            scope.spawn(move || serve(listener, done, Dice(seed)));
        }
        let asking: Vec<_> =
            (10..13).map(|seed| scope.spawn(move || ask(&to, 150, Dice(seed)))).collect();
        let panicked = asking.into_iter().any(|thread| thread.join().is_err());
        done.store(true, Ordering::Relaxed);
        assert!(!panicked);
    });
    listener.id.destroy().unwrap();
    // All is as before.
    drop(connected());
}

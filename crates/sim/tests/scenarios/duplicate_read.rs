//! READ requests that arrive twice are executed again (IBA 9.7.5.1.3); their responses are thrown away.

use super::prelude::*;

#[test]
fn at_any_distance() {
    // While the first answer is on its way, and long after.
    for later in [0, 1, 3, 8, 15, 100, 10_000] {
        let (mut t, a, b) = rc(QpOptions::rc());
        t.net.rule(move |p| match p.operation() {
            O::ReadRequest => Fate::Again(Duration::from_micros(later)),
            _ => Fate::Pass,
        });
        for i in 0..6 {
            let offset = i as usize * 5000;
            t.post(a, i, SendOp::Read(b.mr.remote(offset)), &[a.mr.sge(offset, 5000)]);
        }
        t.run();
        assert_eq!(t.sent(a), (0..6).map(|i| (i, Success)).collect::<Vec<_>>());
        assert_eq!(t.bytes(a.mr, 0, 30_000), t.bytes(b.mr, 0, 30_000));
        assert_eq!(t.state(b), QpState::Rts);
    }
}

#[test]
fn a_late_answer_does_not_touch_released_memory() {
    let (mut t, a, b) = rc(QpOptions::rc());
    t.net.once(is(O::ReadRequest), Fate::Again(Duration::from_millis(1)));
    t.post(a, 1, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 5000)]);
    t.run_for(Duration::from_micros(500));
    assert_eq!(t.sent(a), [(1, Success)]);
    t.write(a.mr, 0, &[9; 5000]);
    t.run();
    assert_eq!(t.bytes(a.mr, 0, 5000), [9; 5000]);
}

#[test]
fn a_duplicate_that_the_responder_has_forgotten_is_dropped() {
    let (mut t, a, b) =
        rc(QpOptions { max_dest_rd_atomic: 2, max_rd_atomic: 2, ..QpOptions::rc() });
    t.net.once(is(O::ReadRequest), Fate::Again(Duration::from_millis(1)));
    for i in 0..8 {
        t.post(a, i, SendOp::Read(b.mr.remote(0)), &[a.mr.sge(0, 5000)]);
    }
    t.run();
    assert_eq!(t.sent(a).len(), 8);
    assert_eq!(t.state(b), QpState::Rts);
    assert_eq!(t.state(a), QpState::Rts);
}

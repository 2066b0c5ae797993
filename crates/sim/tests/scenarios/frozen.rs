//! Time in which the devices did not run is not silence of the peer.

use super::prelude::*;

const LONG: Duration = Duration::from_secs(3);

#[test]
fn frozen_together_they_go_on_without_a_retry() {
    // While the request is on its way, and while its answer is.
    for begun in [1, 6].map(Duration::from_micros) {
        for op in every_op(rc(QpOptions::rc()).2) {
            let (mut t, a, b) = rc(QpOptions { retry_cnt: 0, ..QpOptions::rc() });
            for round in 0..3 {
                t.recv(b, 100, &[b.mr.sge(0, 4096)]);
                t.post(a, round, op, &[a.mr.sge(0, len_of(&op))]);
                t.run_for(begun);
                assert_eq!(t.sent(a), []);
                t.freeze(LONG);
                t.run();
                assert_eq!(t.sent(a), [(round, Success)], "{op:?}, frozen after {begun:?}");
            }
            assert_eq!(t.counter(a.device, Counter::LocalAckTimeoutErr), 0);
        }
    }
}

#[test]
fn a_device_that_is_always_late_gives_up_silent_peers() {
    let (mut t, a, b) = rc(QpOptions { retry_cnt: 2, ..QpOptions::rc() });
    t.net.rule(move |p| if p.from == b.device { Fate::Drop } else { Fate::Pass });
    t.post(a, 1, SendOp::Write(b.mr.remote(0)), &[a.mr.sge(0, 100)]);
    for _ in 0..4 {
        assert_eq!(t.sent(a), []);
        t.freeze(LONG);
        t.run_for(Duration::from_micros(1));
    }
    assert_eq!(t.sent(a), [(1, RetryExcErr)]);
}

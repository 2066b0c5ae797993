//! Ten thousand connections between two processes, all at once.

use std::time::Duration;

use anyverbs_proto::cm::event::CmEvent;

use crate::world::{PORT, World};

const MANY: usize = 10_000;

#[test]
fn ten_thousand_connections_pair_up_and_part() {
    let mut w = World::new(1, 2);
    w.listen_with(1, PORT, MANY);
    for _ in 0..MANY {
        w.connect(0, 1);
    }
    let mut established = 0;
    for _ in 0..4 {
        w.run();
        while let Some(event) = w.poll_event(1) {
            match event {
                CmEvent::ConnectRequest { id, .. } => w.accept(1, id),
                CmEvent::Established { .. } => established += 1,
                other => panic!("{other:?}"),
            }
        }
        while let Some(event) = w.poll_event(0) {
            let CmEvent::ConnectResponse { id, .. } = event else { panic!("{event:?}") };
            w.hosts[0].cm.ready(w.now, id, &[]).unwrap();
        }
    }
    assert_eq!(established, MANY);
    // RTUs are repeated for a while.
    w.run_for(Duration::from_secs(20));
    for host in [0, 1] {
        let usage = w.hosts[host].cm.usage();
        assert_eq!((usage.connections, usage.timers), (MANY, 0), "nothing waits");
    }
    w.tear_down();
}

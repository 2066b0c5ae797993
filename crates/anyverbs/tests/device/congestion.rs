//! Congestion that the network announces, by the kernel's own sockets.

use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_proto::wire::reth::Reth;

use crate::endpoint::*;
use crate::forged::*;

/// The ECN field of a packet that may be marked, and of one that is (RFC 3168 5).
const ECT_0: u8 = 2;
const CE: u8 = 3;

/// The receiver of a packet that the network has marked tells the peer, which heeds that. A packet that could have been
/// marked, but was not, causes nothing.
#[test]
fn a_marked_packet_notifies_the_peer() {
    let _alone = counting_alone();
    let (a, b) = (Endpoint::new(QpType::Rc), Endpoint::new(QpType::Rc));
    a.connect(b.address());
    b.connect(a.address());
    let to = Buffer::new(&b.pd, 64);
    let counters = b.context.counters().unwrap();
    let read =
        || [Counter::EcnMarked, Counter::CnpSent, Counter::CnpHandled].map(|c| counters.read(c));
    let [marked, sent, handled] = read();
    for (n, tos) in [0, ECT_0, CE].into_iter().enumerate() {
        assert_eq!(read(), [marked, sent, handled]);
        let payload = [n as u8 + 1; 64];
        let mut write = forged(Operation::WriteOnly, &b, Psn::new(100).plus(n as u32));
        write.reth = Some(Reth { va: to.addr(), rkey: to.mr.rkey(), len: 64 });
        Forged { tos, ..Forged::from(VICTIM) }.send(write, &payload);
        let begin = Instant::now();
        while to.read(0, 64) != payload {
            b.cq.poll(&mut [Wc::default(); 4]).unwrap();
            assert!(begin.elapsed() < Duration::from_secs(60), "a packet has not arrived");
        }
    }
    counted(&a, Counter::CnpHandled, handled);
    assert_eq!(read(), [marked + 1, sent + 1, handled + 1]);
}

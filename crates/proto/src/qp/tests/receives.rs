//! Receives of a shared queue.

use super::trouble::cause;
use super::*;
use crate::types::QKey;
use crate::wire::deth::Deth;

const QKEY: QKey = QKey(7);

impl World {
    /// Takes its receives from a queue of this protection domain.
    fn sharing(qp_type: QpType, pd: u32) -> Self {
        let mut world = Self::in_reset(qp_type, LinkProps::new(1 << 20));
        let init = QpInit { srq: true, ..*world.qp.init() };
        world.qp = Qp::new(Qpn::new(OURS), &init).with_srq_pd(pd);
        world.risen(|attr| attr.qkey = QKEY)
    }

    /// A message of 8 bytes arrives, for which a shared receive waits whose place is of this protection domain.
    fn message_for(mut self, pd: u32) -> Self {
        let region = Region { pd, access: Access::LOCAL_WRITE, iova: IOVA, len: 4096, addr: 0 };
        let lkey = self.device.mrs.register(region).unwrap().lkey;
        let sges = [Sge { addr: IOVA, len: 64, lkey }].into_iter().collect();
        self.device.shared.push(RecvWqe { wr_id: 3, sges });
        let mut headers = self.headers(Operation::SendOnly, 0);
        if self.qp.init().qp_type == QpType::Ud {
            headers.deth = Some(Deth { qkey: QKEY, src_qpn: Qpn::new(PEER) });
        }
        self.receive(headers, &[3; 8]);
        self
    }
}

/// IBA 10.2.9: not the one of the queue pair.
#[test]
fn a_shared_receive_needs_the_domain_of_its_queue() {
    const SHARED: u32 = PD + 1;
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let mut world = World::sharing(qp_type, SHARED).message_for(SHARED);
        assert_eq!(world.statuses(), [WcStatus::Success], "{qp_type:?}");

        let mut world = World::sharing(qp_type, SHARED).message_for(PD);
        let (status, vendor_err) = world.failure();
        let wanted = (WcStatus::LocProtErr, cause(Cause::LkeyOfOtherPd));
        assert_eq!((status, vendor_err), wanted, "{qp_type:?}");
    }
}

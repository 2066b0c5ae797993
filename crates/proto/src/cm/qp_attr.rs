//! Attributes for the queue pair of a connection (`rdma_init_qp_attr(3)`).

use super::params::Transport;
use crate::mr::Access;
use crate::qp::attr::{QpAttr, QpAttrMask, QpState};
use crate::types::{Gid, Mtu, Psn, QKey, Qpn};
use crate::wr::AddressVector;

use super::error::CmError;

/// An end of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Side {
    /// The one that sent the REQ.
    Active,
    /// The one that was asked.
    Passive,
}

/// Our port, as the device knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalPort {
    /// Port, from 1.
    pub port: u8,
    /// Index of the path's `sgid` in the GID table.
    pub sgid_index: u8,
    /// Index of the partition in the P_Key table.
    pub pkey_index: u16,
    /// Interface of a link-local address; 0 for others.
    pub scope_id: u32,
}

/// The parameters that the two sides of a connection agreed on, seen from our side.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpParams {
    /// Transport.
    pub transport: Transport,
    /// Our end of the connection.
    pub side: Side,
    /// Our port.
    pub sgid: Gid,
    /// The peer's.
    pub dgid: Gid,
    /// IPv6 flow label.
    pub flow_label: u32,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Service level.
    pub sl: u8,
    /// Static rate.
    pub rate: u8,
    /// Path MTU.
    pub path_mtu: Mtu,
    /// ACK timeout code.
    pub ack_timeout: u8,
    /// Transport retries of our send queue.
    pub retry_count: u8,
    /// RNR retries of our send queue.
    pub rnr_retry_count: u8,
    /// Our queue pair; on the passive side only once accepted.
    pub qpn: Option<Qpn>,
    /// The peer's; on the active side only once accepted.
    pub dest_qpn: Option<Qpn>,
    /// The first PSN that we expect; on the passive side only once accepted.
    pub rq_psn: Option<Psn>,
    /// The first PSN that we send; on the active side only once accepted.
    pub sq_psn: Option<Psn>,
    /// READs and atomics of the peer that we take at a time.
    pub responder_resources: u8,
    /// READs and atomics that we may have outstanding.
    pub initiator_depth: u8,
}

impl QpParams {
    /// Attributes, and the mask that says which count, for a move to INIT, RTR or RTS.
    ///
    /// # Errors
    /// [`CmError::State`] where the connection has not come so far; [`CmError::Value`] for another state.
    pub fn attr(&self, to: QpState, port: &LocalPort) -> Result<(QpAttr, QpAttrMask), CmError> {
        use QpAttrMask as M;
        let mut attr = QpAttr { state: to, cur_state: to, ..QpAttr::default() };
        let mut mask = M::STATE;
        // XRC: the initiator has only a requester, the target only a responder.
        let responds = match self.transport {
            Transport::Rc => true,
            Transport::Uc => false,
            Transport::Xrc => self.side == Side::Passive,
        };
        let requests = match self.transport {
            Transport::Rc => true,
            Transport::Uc => false,
            Transport::Xrc => self.side == Side::Active,
        };
        match to {
            QpState::Init => {
                attr.access = Access::REMOTE_WRITE;
                if self.responder_resources > 0 {
                    attr.access |= Access::REMOTE_READ | Access::REMOTE_ATOMIC;
                }
                (attr.pkey_index, attr.port) = (port.pkey_index, port.port);
                mask |= M::ACCESS_FLAGS | M::PKEY_INDEX | M::PORT;
            }
            QpState::Rtr => {
                attr.av = self.address_vector(port);
                attr.path_mtu = self.path_mtu;
                attr.dest_qpn = self.dest_qpn.ok_or(CmError::State)?;
                attr.rq_psn = self.rq_psn.ok_or(CmError::State)?;
                mask |= M::AV | M::PATH_MTU | M::DEST_QPN | M::RQ_PSN;
                if responds {
                    attr.max_dest_rd_atomic = self.responder_resources;
                    attr.min_rnr_timer = 0;
                    mask |= M::MAX_DEST_RD_ATOMIC | M::MIN_RNR_TIMER;
                }
            }
            QpState::Rts => {
                attr.sq_psn = self.sq_psn.ok_or(CmError::State)?;
                mask |= M::SQ_PSN;
                if requests {
                    attr.retry_cnt = self.retry_count;
                    attr.rnr_retry = self.rnr_retry_count;
                    attr.max_rd_atomic = self.initiator_depth;
                    mask |= M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC;
                }
                if requests || responds {
                    attr.timeout = self.ack_timeout;
                    mask |= M::TIMEOUT;
                }
            }
            _ => return Err(CmError::Value),
        }
        Ok((attr, mask))
    }

    fn address_vector(&self, port: &LocalPort) -> AddressVector {
        AddressVector {
            dgid: self.dgid,
            sgid: self.sgid,
            sgid_index: port.sgid_index,
            hop_limit: self.hop_limit,
            traffic_class: self.traffic_class,
            sl: self.sl,
            flow_label: self.flow_label,
            static_rate: self.rate,
            port: port.port,
            scope_id: port.scope_id,
            ..AddressVector::default()
        }
    }
}

/// As [`QpParams::attr`], for INIT of a connected queue pair whose connection does not exist yet. The peer has no
/// rights so far.
#[must_use]
pub fn init_attr(port: &LocalPort) -> (QpAttr, QpAttrMask) {
    use QpAttrMask as M;
    let attr = QpAttr {
        state: QpState::Init,
        cur_state: QpState::Init,
        pkey_index: port.pkey_index,
        port: port.port,
        ..QpAttr::default()
    };
    (attr, M::STATE | M::ACCESS_FLAGS | M::PKEY_INDEX | M::PORT)
}

/// As [`QpParams::attr`], for a UD queue pair: it needs no connection.
///
/// # Errors
/// [`CmError::Value`] for a state other than INIT, RTR and RTS.
pub fn ud_attr(
    to: QpState,
    port: &LocalPort,
    qkey: QKey,
    sq_psn: Psn,
) -> Result<(QpAttr, QpAttrMask), CmError> {
    use QpAttrMask as M;
    let (attr, mask) = init_attr(port);
    let attr = QpAttr { state: to, cur_state: to, qkey, sq_psn, ..attr };
    let mask = match to {
        QpState::Init => mask.difference(M::ACCESS_FLAGS) | M::QKEY,
        QpState::Rtr => M::STATE,
        QpState::Rts => M::STATE | M::SQ_PSN,
        _ => return Err(CmError::Value),
    };
    Ok((attr, mask))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::counters::Counter;
    use crate::env::{
        CompletionEnv, Env, LinkEnv, LinkProps, MemoryEnv, ReasonEnv, Side as CqSide, TransmitError,
    };
    use crate::event::QpEvent;
    use crate::memory::{Fault, Memory};
    use crate::mr::MrTable;
    use crate::payload::Payload;
    use crate::qp::Qp;
    use crate::qp::attr::{ModifyLimits, QpCap, QpInit, QpType};
    use crate::recv_queue::RecvWqe;
    use crate::time::{Clock, Time};
    use crate::types::PKey;
    use crate::wc::Wc;
    use crate::wire::packet::Headers;

    const PORT: LocalPort = LocalPort { port: 1, sgid_index: 3, pkey_index: 0, scope_id: 0 };

    fn params(transport: Transport, side: Side) -> QpParams {
        QpParams {
            transport,
            side,
            sgid: Gid([1; 16]),
            dgid: Gid([2; 16]),
            flow_label: 7,
            traffic_class: 8,
            hop_limit: 64,
            sl: 1,
            rate: 2,
            path_mtu: Mtu::Mtu1024,
            ack_timeout: 17,
            retry_count: 6,
            rnr_retry_count: 5,
            qpn: Some(Qpn::new(11)),
            dest_qpn: Some(Qpn::new(12)),
            rq_psn: Some(Psn::new(100)),
            sq_psn: Some(Psn::new(200)),
            responder_resources: 4,
            initiator_depth: 3,
        }
    }

    struct Bare(MrTable);

    impl Memory for Bare {
        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Fault> {
            Err(Fault)
        }
        fn write(&self, _: u64, _: &[u8]) -> Result<(), Fault> {
            Err(Fault)
        }
        fn compare_swap(&self, _: u64, _: u64, _: u64) -> Result<u64, Fault> {
            Err(Fault)
        }
        fn store(&self, _: u64, _: u64) -> Result<(), Fault> {
            Err(Fault)
        }
        fn persist(&self, _: u64, _: u64) -> Result<(), Fault> {
            Err(Fault)
        }
        fn fetch_add(&self, _: u64, _: u64) -> Result<u64, Fault> {
            Err(Fault)
        }
    }

    impl Clock for Bare {
        fn now(&self) -> Time {
            Time::default()
        }
    }

    impl Env for Bare {
        fn count(&self, _: Counter, _: u64) {}
    }

    impl LinkEnv for Bare {
        fn props(&self) -> &LinkProps {
            &const { LinkProps::new(0) }
        }
        fn transmit(
            &mut self,
            _: &AddressVector,
            _: &Headers,
            _: &Payload<'_>,
            _: Option<Psn>,
        ) -> Result<(), TransmitError> {
            Err(TransmitError::Blocked)
        }
    }

    impl ReasonEnv for Bare {}

    impl MemoryEnv for Bare {
        type Memory = Self;
        fn memory(&self) -> &Self {
            self
        }
        fn mrs(&self) -> &MrTable {
            &self.0
        }
    }

    impl CompletionEnv for Bare {
        fn complete(&mut self, _: CqSide, _: Wc, _: bool) {}
        fn take_srq(&mut self, _: &mut RecvWqe) -> bool {
            false
        }
        fn raise(&mut self, _: QpEvent) {}
    }

    /// A queue pair takes the attributes at each step, with none added.
    #[test]
    fn a_queue_pair_takes_the_attributes() {
        let cap = QpCap {
            max_send_wr: 1,
            max_recv_wr: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let limits = ModifyLimits {
            ports: 1,
            pkeys: &[PKey::DEFAULT],
            max_mtu: Mtu::Mtu4096,
            max_rd_atomic: 16,
            max_rate_limit: 400_000_000,
        };
        let mut env = Bare(MrTable::new(1, 1));
        let steps = [QpState::Init, QpState::Rtr, QpState::Rts];
        for (transport, qp_type) in [(Transport::Rc, QpType::Rc), (Transport::Uc, QpType::Uc)] {
            for side in [Side::Active, Side::Passive] {
                let init = QpInit { qp_type, cap, sq_sig_all: false, srq: false, pd: 1 };
                let mut qp = Qp::new(Qpn::new(11), &init);
                for to in steps {
                    let (attr, mask) = params(transport, side).attr(to, &PORT).unwrap();
                    qp.modify(&attr, mask, &limits, &mut env).unwrap();
                }
                let attr = qp.attr();
                assert_eq!((attr.dest_qpn, attr.rq_psn), (Qpn::new(12), Psn::new(100)));
                assert_eq!(attr.sq_psn, Psn::new(200));
                assert_eq!((attr.av.sgid_index, attr.av.flow_label), (3, 7));
            }
        }
        let init = QpInit { qp_type: QpType::Ud, cap, sq_sig_all: false, srq: false, pd: 1 };
        let mut qp = Qp::new(Qpn::new(11), &init);
        for to in steps {
            let (attr, mask) = ud_attr(to, &PORT, QKey(5), Psn::new(9)).unwrap();
            qp.modify(&attr, mask, &limits, &mut env).unwrap();
        }
        assert_eq!((qp.attr().qkey, qp.attr().sq_psn), (QKey(5), Psn::new(9)));
    }

    #[test]
    fn the_address_vector_has_all_that_was_agreed() {
        let port = LocalPort { port: 2, sgid_index: 3, pkey_index: 0, scope_id: 4 };
        let (attr, _) = params(Transport::Rc, Side::Active).attr(QpState::Rtr, &port).unwrap();
        let wanted = AddressVector {
            dgid: Gid([2; 16]),
            sgid: Gid([1; 16]),
            sgid_index: 3,
            hop_limit: 64,
            traffic_class: 8,
            sl: 1,
            flow_label: 7,
            static_rate: 2,
            src_path_bits: 0,
            dlid: 0,
            port: 2,
            scope_id: 4,
        };
        assert_eq!(attr.av, wanted);
    }

    #[test]
    fn rc_has_both_sides_of_rdma() {
        let params = params(Transport::Rc, Side::Active);
        let (init, _) = params.attr(QpState::Init, &PORT).unwrap();
        let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
        assert_eq!(init.access, all);
        let poor = QpParams { responder_resources: 0, ..params };
        assert_eq!(poor.attr(QpState::Init, &PORT).unwrap().0.access, Access::REMOTE_WRITE);
        let (rtr, _) = params.attr(QpState::Rtr, &PORT).unwrap();
        assert_eq!((rtr.max_dest_rd_atomic, rtr.path_mtu), (4, Mtu::Mtu1024));
        let (rts, _) = params.attr(QpState::Rts, &PORT).unwrap();
        assert_eq!((rts.max_rd_atomic, rts.retry_cnt, rts.rnr_retry, rts.timeout), (3, 6, 5, 17));
    }

    #[test]
    fn xrc_has_one_side_each() {
        use QpAttrMask as M;
        let mask = |side, to| params(Transport::Xrc, side).attr(to, &PORT).unwrap().1;
        assert!(!mask(Side::Active, QpState::Rtr).contains(M::MAX_DEST_RD_ATOMIC));
        assert!(mask(Side::Passive, QpState::Rtr).contains(M::MAX_DEST_RD_ATOMIC));
        assert!(mask(Side::Active, QpState::Rts).contains(M::RETRY_CNT | M::TIMEOUT));
        assert_eq!(mask(Side::Passive, QpState::Rts), M::STATE | M::SQ_PSN | M::TIMEOUT);
    }

    #[test]
    fn attributes_not_agreed_yet_are_refused() {
        let early =
            QpParams { dest_qpn: None, sq_psn: None, ..params(Transport::Rc, Side::Active) };
        assert!(early.attr(QpState::Init, &PORT).is_ok());
        assert_eq!(early.attr(QpState::Rtr, &PORT), Err(CmError::State));
        assert_eq!(early.attr(QpState::Rts, &PORT), Err(CmError::State));
        assert_eq!(early.attr(QpState::Sqd, &PORT), Err(CmError::Value));
    }
}

//! Attributes of a queue pair, as `ibv_modify_qp` sets and `ibv_query_qp` reads them.

use std::fmt;

use bitflags::bitflags;
use thiserror::Error;

use crate::mr::Access;
use crate::types::{Mtu, PKey, Psn, QKey, Qpn};
use crate::wire::opcode::Service;
use crate::wr::AddressVector;

/// Transport type (`enum ibv_qp_type`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[repr(u8)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection.
    Uc = 3,
    /// Unreliable datagram.
    Ud = 4,
    /// Initiator of an extended reliable connection: only a requester (IBA A14).
    XrcSend = 9,
    /// Target of an extended reliable connection: only a responder. Each request names the SRQ that it is for.
    XrcRecv = 10,
}

impl QpType {
    /// The service in the opcodes of its packets.
    #[must_use]
    pub const fn service(self) -> Service {
        match self {
            Self::Rc => Service::Rc,
            Self::Uc => Service::Uc,
            Self::Ud => Service::Ud,
            Self::XrcSend | Self::XrcRecv => Service::Xrc,
        }
    }

    /// Its name as people write it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
            Self::XrcSend => "XRC_SEND",
            Self::XrcRecv => "XRC_RECV",
        }
    }

    /// Whether requests are acknowledged.
    #[must_use]
    pub const fn is_reliable(self) -> bool {
        matches!(self, Self::Rc | Self::XrcSend | Self::XrcRecv)
    }

    /// Whether requests take receives that this side posts to a queue pair or an SRQ.
    #[must_use]
    pub const fn has_responder(self) -> bool {
        !matches!(self, Self::XrcSend)
    }
}

/// State of a queue pair (`enum ibv_qp_state`, IBA 10.3.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash, Default)]
#[repr(u8)]
pub enum QpState {
    /// New, or reset.
    #[default]
    Reset = 0,
    /// Takes receives.
    Init = 1,
    /// Ready to receive.
    Rtr = 2,
    /// Ready to send.
    Rts = 3,
    /// The send queue drains, or has drained.
    Sqd = 4,
    /// The send queue is in error (UC, UD).
    Sqe = 5,
    /// Everything is flushed.
    Err = 6,
}

impl QpState {
    /// From the value of `enum ibv_qp_state`.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        [Reset, Init, Rtr, Rts, Sqd, Sqe, Err].into_iter().find(|s| *s as u32 == code)
    }

    /// Its name, as the manual pages write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Sqd => "SQD",
            Self::Sqe => "SQE",
            Self::Err => "ERR",
        }
    }

    /// Whether packets are taken, and answered.
    #[must_use]
    pub fn receives(self) -> bool {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd, Sqe};
        match self {
            Rtr | Rts | Sqd | Sqe => true,
            Reset | Init | Err => false,
        }
    }
}

bitflags! {
    /// `enum ibv_qp_attr_mask`.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub struct QpAttrMask: u32 {
        /// `state`.
        const STATE = 1;
        /// `cur_state`.
        const CUR_STATE = 1 << 1;
        /// `en_sqd_async_notify`.
        const EN_SQD_ASYNC_NOTIFY = 1 << 2;
        /// `access`.
        const ACCESS_FLAGS = 1 << 3;
        /// `pkey_index`.
        const PKEY_INDEX = 1 << 4;
        /// `port`.
        const PORT = 1 << 5;
        /// `qkey`.
        const QKEY = 1 << 6;
        /// `av`.
        const AV = 1 << 7;
        /// `path_mtu`.
        const PATH_MTU = 1 << 8;
        /// `timeout`.
        const TIMEOUT = 1 << 9;
        /// `retry_cnt`.
        const RETRY_CNT = 1 << 10;
        /// `rnr_retry`.
        const RNR_RETRY = 1 << 11;
        /// `rq_psn`.
        const RQ_PSN = 1 << 12;
        /// `max_rd_atomic`.
        const MAX_QP_RD_ATOMIC = 1 << 13;
        /// `alt`.
        const ALT_PATH = 1 << 14;
        /// `min_rnr_timer`.
        const MIN_RNR_TIMER = 1 << 15;
        /// `sq_psn`.
        const SQ_PSN = 1 << 16;
        /// `max_dest_rd_atomic`.
        const MAX_DEST_RD_ATOMIC = 1 << 17;
        /// `path_mig_state`.
        const PATH_MIG_STATE = 1 << 18;
        /// Sizes of the queues.
        const CAP = 1 << 19;
        /// `dest_qpn`.
        const DEST_QPN = 1 << 20;
        /// `rate_limit`, in kilobits a second.
        const RATE_LIMIT = 1 << 25;
    }
}

/// Sizes of a queue pair (`struct ibv_qp_cap`).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QpCap {
    /// Send requests.
    pub max_send_wr: u32,
    /// Receive requests.
    pub max_recv_wr: u32,
    /// Elements of a send.
    pub max_send_sge: u32,
    /// Elements of a receive.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
}

/// The parameters of a new queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Transport type.
    pub qp_type: QpType,
    /// Sizes; already checked against the device's limits.
    pub cap: QpCap,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Receives come from an SRQ. On XRC the type alone says it.
    pub srq: bool,
    /// Number of the protection domain. [`QpType::XrcRecv`] has none: that of each request's SRQ counts.
    pub pd: u32,
}

/// Modifiable attributes (`struct ibv_qp_attr`). In a modify only the fields of the mask count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QpAttr {
    /// The new state.
    pub state: QpState,
    /// The state in which the program believes the queue pair to be.
    pub cur_state: QpState,
    /// Raise `SQ_DRAINED` when drained.
    pub en_sqd_async_notify: bool,
    /// The rights of peers: the REMOTE bits of [`Access`].
    pub access: Access,
    /// Index in the P_Key table.
    pub pkey_index: u16,
    /// Port, from 1.
    pub port: u8,
    /// Q_Key of a UD queue pair.
    pub qkey: QKey,
    /// Primary path.
    pub av: AddressVector,
    /// Payload of a full packet.
    pub path_mtu: Mtu,
    /// ACK timeout code, 5 bits.
    pub timeout: u8,
    /// Retries after a timeout or sequence NAK, 3 bits.
    pub retry_cnt: u8,
    /// Retries after RNR NAKs, 3 bits; 7: for ever.
    pub rnr_retry: u8,
    /// First PSN that we expect.
    pub rq_psn: Psn,
    /// READs and atomics that we have outstanding at most.
    pub max_rd_atomic: u8,
    /// Timer code in our RNR NAKs, 5 bits.
    pub min_rnr_timer: u8,
    /// First PSN that we send.
    pub sq_psn: Psn,
    /// READs and atomics of the peer that we remember.
    pub max_dest_rd_atomic: u8,
    /// The peer's queue pair.
    pub dest_qpn: Qpn,
    /// Kilobits a second that are sent at most; 0: no limit.
    pub rate_limit: u32,
}

impl Default for QpAttr {
    fn default() -> Self {
        Self {
            state: QpState::Reset,
            cur_state: QpState::Reset,
            en_sqd_async_notify: false,
            access: Access::empty(),
            pkey_index: 0,
            port: 0,
            qkey: QKey(0),
            av: AddressVector::default(),
            path_mtu: Mtu::Mtu256,
            timeout: 0,
            retry_cnt: 0,
            rnr_retry: 0,
            rq_psn: Psn::default(),
            max_rd_atomic: 0,
            min_rnr_timer: 0,
            sq_psn: Psn::default(),
            max_dest_rd_atomic: 0,
            dest_qpn: Qpn::default(),
            rate_limit: 0,
        }
    }
}

/// The device's limits for a modify. The caller checked `av` against its GID table before.
#[derive(Clone, Copy, Debug)]
pub struct ModifyLimits {
    /// Ports of the device.
    pub ports: u8,
    /// The P_Keys of the port.
    pub pkeys: &'static [PKey],
    /// Largest path MTU of the interface that `av.sgid` belongs to.
    pub max_mtu: Mtu,
    /// Largest `max_rd_atomic` and `max_dest_rd_atomic`.
    pub max_rd_atomic: u8,
    /// Largest `rate_limit`.
    pub max_rate_limit: u32,
}

/// Bits of a mask by their names in C.
struct Bits(QpAttrMask);

impl fmt::Display for Bits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, (name, _)) in self.0.iter_names().enumerate() {
            write!(f, "{}IBV_QP_{name}", if n == 0 { "" } else { " and " })?;
        }
        Ok(())
    }
}

impl QpAttr {
    /// The values of these attributes, as a program gave them, with the largest that are allowed: `timeout 40 of at most 31`. The path MTU
    /// is more than `mtu`, in words.
    #[must_use]
    pub fn values(&self, bits: QpAttrMask, mtu: &str) -> String {
        use QpAttrMask as M;
        let av = &self.av;
        let wrong = match av.dgid {
            gid if gid.is_zero() => "dgid is no address",
            gid if gid.is_multicast() => "dgid is a group, and the peer is one queue pair",
            _ => "port_num is not that of the queue pair",
        };
        let address = format!(
            "ah_attr with port_num {}, sgid_index {}, dgid {}; {wrong}",
            av.port, av.sgid_index, av.dgid
        );
        [
            (M::PORT, format!("port_num {}", self.port)),
            (M::PKEY_INDEX, format!("pkey_index {}", self.pkey_index)),
            (M::AV, address),
            (M::PATH_MTU, format!("path_mtu of {} bytes, more than {mtu}", self.path_mtu.bytes())),
            (M::RATE_LIMIT, format!("rate_limit {}", self.rate_limit)),
            (M::TIMEOUT, format!("timeout {} of at most 31", self.timeout)),
            (M::RETRY_CNT, format!("retry_cnt {} of at most 7", self.retry_cnt)),
            (M::RNR_RETRY, format!("rnr_retry {} of at most 7", self.rnr_retry)),
            (M::MIN_RNR_TIMER, format!("min_rnr_timer {} of at most 31", self.min_rnr_timer)),
            (M::MAX_QP_RD_ATOMIC, format!("max_rd_atomic {}", self.max_rd_atomic)),
            (M::MAX_DEST_RD_ATOMIC, format!("max_dest_rd_atomic {}", self.max_dest_rd_atomic)),
        ]
        .into_iter()
        .filter(|(bit, _)| bits.contains(*bit))
        .map(|(_, value)| value)
        .collect::<Vec<_>>()
        .join(", ")
    }
}

/// The reason why a modify was refused; nothing was changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// `EINVAL`: IBA 10.3.1 knows no such transition for this type.
    #[error("no move leads from {} to {} for a queue pair of its type", from.name(), to.name())]
    Transition {
        /// The present state.
        from: QpState,
        /// The state that was asked for.
        to: QpState,
    },
    /// `EINVAL`: `cur_state` is not the present state.
    #[error("the queue pair is in {}", .0.name())]
    CurState(QpState),
    /// `EINVAL`: attributes that the transition needs are missing.
    #[error("the move needs {}, which the mask lacks", Bits(*.0))]
    Missing(QpAttrMask),
    /// `EINVAL`: attributes that the transition does not take.
    #[error("the mask has {}, which the move does not take", Bits(*.0))]
    Extra(QpAttrMask),
    /// `EINVAL`: a value out of range.
    #[error("the value of {} is not allowed", Bits(*.0))]
    Value(QpAttrMask),
    /// `EOPNOTSUPP`: alternate paths.
    #[error("this device does not support {}", Bits(*.0))]
    Unsupported(QpAttrMask),
}

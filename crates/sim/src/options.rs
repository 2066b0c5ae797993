//! Options for the queue pairs of a test.

use std::time::Duration;

use anyverbs_proto::mr::Access;
use anyverbs_proto::qp::attr::{QpCap, QpType};
use anyverbs_proto::types::{Mtu, Psn, QKey};

/// If this variable is set, all queue pairs of the process take the general way.
pub const GENERAL_WAY: &str = "ANYVERBS_SIM_GENERAL_WAY";

/// If this variable is set, reliable connections are on links of one host, and those of a [`Pair`](crate::Pair) begin with
/// open lanes: every short SEND takes one if it can.
pub const LANES: &str = "ANYVERBS_SIM_LANES";

/// Attributes of a queue pair, for creation and connection.
#[derive(Clone, Copy, Debug)]
pub struct QpOptions {
    /// Transport type.
    pub qp_type: QpType,
    /// Sizes of its queues.
    pub cap: QpCap,
    /// Every send makes a completion.
    pub sq_sig_all: bool,
    /// Takes its receives from a shared queue of this many requests. On XRC: of the SRQ that the peer names.
    pub srq: Option<u32>,
    /// The rights of the peer.
    pub access: Access,
    /// Payload of a full packet.
    pub mtu: Mtu,
    /// ACK timeout code.
    pub timeout: u8,
    /// Retries after timeouts and sequence NAKs.
    pub retry_cnt: u8,
    /// Retries after RNR NAKs.
    pub rnr_retry: u8,
    /// Code of the time in our RNR NAKs.
    pub min_rnr_timer: u8,
    /// READs and atomics outstanding at most, as requester.
    pub max_rd_atomic: u8,
    /// The same as responder.
    pub max_dest_rd_atomic: u8,
    /// First PSN that it sends.
    pub sq_psn: Psn,
    /// Q_Key of a datagram queue pair.
    pub qkey: QKey,
    /// Bytes in flight, see `LinkProps::window`.
    pub window: u32,
    /// Longest payload of a packet that stands for several, see `LinkProps::segment`; 0: there are none.
    pub segment: u32,
    /// Bytes of a batch, see `LinkProps::batch`.
    pub batch: u32,
    /// Silence after which the requester sends again, see `LinkProps::probe_after`.
    pub probe_after: Option<Duration>,
    /// Bytes of requests that came before their turn, see `LinkProps::out_of_order_room`.
    pub out_of_order_room: usize,
    /// Whether silence of the peer says that it does not receive, see `LinkProps::certain`.
    pub certain: bool,
    /// Whether requests carry ACKs, see `LinkProps::carries_acks`.
    pub carries_acks: bool,
    /// Completions that each of its completion queues holds.
    pub cqe: u32,
    /// Whether frequent requests take their short ways.
    pub short_ways: bool,
    /// Whether a reliable connection has lanes from the beginning, on a link without segments too.
    pub lanes: bool,
}

impl QpOptions {
    /// Whether its link has lanes, also without segments.
    pub(crate) fn has_lanes(&self) -> bool {
        self.lanes && self.qp_type == QpType::Rc
    }

    /// A reliable connection with everything allowed: MTU 1024, timeout 14 (67 ms), 7 retries of both kinds (RNR: for ever).
    #[must_use]
    pub fn rc() -> Self {
        Self {
            qp_type: QpType::Rc,
            cap: QpCap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 4,
                max_recv_sge: 4,
                max_inline_data: 256,
            },
            sq_sig_all: false,
            srq: None,
            access: Access::LOCAL_WRITE
                | Access::REMOTE_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_ATOMIC,
            mtu: Mtu::Mtu1024,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            sq_psn: Psn::new(0x12_3456),
            qkey: QKey(0x1111_1111),
            window: 1 << 20,
            segment: 0,
            batch: 0,
            probe_after: None,
            out_of_order_room: 0,
            certain: false,
            carries_acks: false,
            cqe: 1024,
            short_ways: std::env::var_os(GENERAL_WAY).is_none(),
            lanes: std::env::var_os(LANES).is_some(),
        }
    }

    /// A reliable connection that knows of its path what the device knows of one by UDP.
    #[must_use]
    pub fn udp() -> Self {
        Self {
            window: 200 << 10,
            probe_after: Some(Duration::from_millis(8)),
            out_of_order_room: 256 << 10,
            carries_acks: true,
            ..Self::rc()
        }
    }

    /// An unreliable connection.
    #[must_use]
    pub fn uc() -> Self {
        Self { qp_type: QpType::Uc, ..Self::rc() }
    }

    /// The initiator of an extended reliable connection.
    #[must_use]
    pub fn xrc_send() -> Self {
        Self { qp_type: QpType::XrcSend, ..Self::rc() }
    }

    /// The target of an extended reliable connection, and an SRQ for it.
    #[must_use]
    pub fn xrc_recv() -> Self {
        Self { qp_type: QpType::XrcRecv, srq: Some(64), ..Self::rc() }
    }

    /// Unreliable datagrams.
    #[must_use]
    pub fn ud() -> Self {
        Self { qp_type: QpType::Ud, ..Self::rc() }
    }
}

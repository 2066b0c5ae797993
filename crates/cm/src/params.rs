//! Parameters that a program gives when it connects, joins, or sets an option.

use anyverbs_proto::types::Qpn;

use super::address::Address;

/// `struct rdma_conn_param`, of [`super::Id::connect`] and [`super::Id::accept`].
#[derive(Clone, Copy, Debug, Default)]
pub struct ConnParam<'a> {
    /// For the peer. Its room depends on message and port space.
    pub private_data: &'a [u8],
    /// READs and atomics that we take; `u8::MAX`: the device's maximum (`RDMA_MAX_RESP_RES`).
    pub responder_resources: u8,
    /// READs and atomics that we want outstanding; `u8::MAX`: the device's maximum (`RDMA_MAX_INIT_DEPTH`).
    pub initiator_depth: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// Transport retries.
    pub retry_count: u8,
    /// RNR retries; 7: for ever.
    pub rnr_retry_count: u8,
    /// Our queue pair has an SRQ. Ignored where a queue pair is attached.
    pub srq: bool,
    /// Our queue pair. Ignored where one is attached.
    pub qpn: Qpn,
}

/// Options of an id (`rdma_set_option(3)`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdOption {
    /// `RDMA_OPTION_ID_TOS`.
    Tos(u8),
    /// `RDMA_OPTION_ID_REUSEADDR`.
    ReuseAddr(bool),
    /// `RDMA_OPTION_ID_AFONLY`.
    AfOnly(bool),
    /// `RDMA_OPTION_ID_ACK_TIMEOUT`: a code, 5 bits.
    AckTimeout(u8),
}

/// Parameters of [`super::Id::join`] (`rdma_join_multicast_ex(3)`).
#[derive(Clone, Copy, Debug)]
pub struct Join {
    /// The group; for `AF_IB` its GID.
    pub group: Address,
    /// Only to send (`RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER`).
    pub send_only: bool,
    /// For the events.
    pub cookie: u64,
}

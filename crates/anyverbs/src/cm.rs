//! RDMA communication manager: connections by address (`rdma_cm(7)`).

pub use anyverbs_cm::{
    Address, CmError, ConnEvent, ConnParam, Ece, Event, EventChannel, EventKind, EventParam,
    IbAddress, Id, IdInfo, IdOption, Join, Path, PortSpace, UdEvent,
};

pub use crate::device::create_event_channel;

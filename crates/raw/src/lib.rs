//! Raw packets: queue pairs that send and receive whole Ethernet frames, the work queues and tables that spread frames
//! over several receivers, and the flow rules that choose the receivers.
//!
//! A frame is delivered on the sender's thread to the queue pairs of the process. It is staged for the other processes
//! of the host and, if the configuration names an interface, for that. A receiver looks each frame up in the rules of
//! its own process ([`switch`]).
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod counters;
mod flow;
mod flow_action;
mod ind_table;
mod number;
mod qp;
mod receive;
mod send;
pub mod switch;
mod trouble;
mod wq;

pub use anyverbs_proto::raw::esp::{
    AesGcm, Direction, Encapsulation, EspAttr, EspError, FullOffload, Offload, OuterIp, Restart,
};
pub use anyverbs_proto::raw::flow::{FlowAttr, FlowError, FlowType, MAX_SPECS};
pub use anyverbs_proto::raw::frame::MplsOver;
pub use anyverbs_proto::raw::rss::{HashError, HashFields, KEY_LEN, RxHash};
pub use anyverbs_proto::raw::spec::{Filter, Layer, Masked, Spec};
pub use anyverbs_proto::raw::{MAX_FRAME, tso::MAX_HEADER as MAX_TSO_HEADER};

pub use counters::{CounterKind, FlowCounters, MAX_COUNTER_INDEX};
pub use flow::Flow;
pub use flow_action::FlowActionEsp;
pub use ind_table::RwqIndTable;
pub use qp::{HashQpInit, RawQp, RawQpInit};
pub use receive::ReceiveFlags;
pub use send::{RawPoster, RawSendWr, Segmentation};
pub use wq::{Wq, WqAttr, WqInit, WqState};

//! RDMA communication manager: connections by address (`rdma_cm(7)`).
//!
//! An [`Id`] is what a socket is for TCP: it is bound to an address, listens or resolves a peer, connects, and tells what
//! happens as [`Event`]s on its [`EventChannel`]. The messages between the peers are `anyverbs_proto::cm`'s, and travel
//! over QP1 ([`crate::engine::gsi`]); this module is what the kernel's `rdma_cm` and `rdma_ucm` are under librdmacm.
//!
//! An id moves the queue pair that is attached to it: to INIT at [`Id::attach_qp`], to RTR and RTS before an accept leaves
//! or the event is handed out that says the connection is there, to ERR when it is disconnected or rejected. A queue pair that is not
//! attached is the program's own to move: [`Id::init_qp_attr`] says to what, [`EventKind::ConnectResponse`] when, and
//! [`Id::establish`] goes on.
//!
//! Locks: an id's own state is a leaf of the CM's lock ([`crate::engine::gsi`]); no queue pair is locked under either.

mod address;
mod channel;
mod connect;
mod error;
mod event;
mod group;
mod hand_out;
mod id;
mod ids;
mod params;
mod place;
mod ports;
mod queue_pair;
mod resolve;

pub use address::{Address, IbAddress};
pub use anyverbs_proto::cm::Path;
pub use anyverbs_proto::cm::id::PortSpace;
pub use anyverbs_proto::cm::message::ece::Ece;
pub use channel::EventChannel;
pub use error::CmError;
pub use event::{ConnEvent, Event, EventKind, EventParam, UdEvent};
pub use id::{Id, IdInfo};
pub(crate) use ids::Ids;
pub use params::{ConnParam, IdOption, Join};

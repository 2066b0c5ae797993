//! RDMA communication manager: connections by address (`rdma_cm(7)`).
//!
//! An [`Id`] is what a socket is for TCP: it is bound to an address, listens or resolves a peer, connects, and tells what
//! happens as [`Event`]s on its [`EventChannel`]. The messages between the peers are `anyverbs_proto::cm`'s, and travel
//! over QP1 ([`gsi`]); this module is what the kernel's `rdma_cm` and `rdma_ucm` are under librdmacm.
//!
//! An id moves the queue pair that is attached to it. It goes to INIT at [`Id::attach_qp`]. It goes to RTR and RTS
//! before an accept leaves, or before the event of the connection is handed out (by the thread that reads it). It goes
//! to ERR when it is disconnected or rejected. A queue pair that is not attached is the program's own to move.
//! [`Id::init_qp_attr`] gives the attributes, [`EventKind::ConnectResponse`] the time, and [`Id::establish`] goes on.
//!
//! An id goes from idle over bound, address resolved and route resolved to connected and disconnected, or from bound to
//! listening. A call that does not fit is `EINVAL`, as with Linux's `rdma_cm`. Events follow Linux as well, in contents
//! and in time. Resolving takes no time here: the host's routes choose our address, and its neighbours are the sockets'
//! business. The new id of a request reports nothing before it is accepted. If the peer gives up meanwhile, the accept
//! fails.
//!
//! A port that a program binds or listens on is reserved on the host (`anyverbs_net::Services`). An id that merely
//! connects takes a number without reserving it, since no peer looks for it.
//!
//! The CM's lock ([`gsi`]) guards the machine and the tables of ids. No lock of this crate is held while a queue pair is
//! locked, a program's event is waited for, or another id is destroyed. A change that the machine's events must not
//! overtake is made under the CM's lock.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod address;
mod channel;
mod connect;
mod error;
mod event;
mod group;
pub mod gsi;
mod hand_out;
mod id;
mod ids;
mod local_address;
mod params;
mod ports;
mod queue_pair;
mod random;
mod resolve;
#[cfg(test)]
mod tests;
mod uptake;

pub use address::{Address, IbAddress};
pub use anyverbs_proto::cm::Path;
pub use anyverbs_proto::cm::id::PortSpace;
pub use anyverbs_proto::cm::message::ece::Ece;
pub use channel::EventChannel;
pub use error::CmError;
pub use event::{ConnEvent, Event, EventKind, EventParam, UdEvent};
pub use id::{Id, IdInfo};
use ids::Ids;
pub use params::{ConnParam, IdOption, Join};

/// QP1 with the ids of this process.
pub type Gsi = crate::gsi::Gsi<Ids>;

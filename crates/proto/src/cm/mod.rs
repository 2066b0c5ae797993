//! IB communication management (IBA chapter 12) for RoCEv2, without I/O.
//!
//! One [`Cm`] per device and process holds listeners and connections, and is driven like a queue pair: datagrams that came to
//! QP1 go in by [`Cm::handle`], those to send come out of [`Cm::poll_transmit`], what the program should hear out of
//! [`Cm::poll_event`]; [`Cm::on_timer`] is due at [`Cm::deadline`]. Time comes in as an argument.
//!
//! A connection, active side on the left:
//!
//! ```text
//! connect    ReqSent      --REQ-->  ReqRcvd      ConnectRequest
//!            MraReqRcvd   <--MRA--  MraReqSent   (a second REQ came before the answer)
//! ConnectResponse RepRcvd <--REP--  RepSent      accept
//!            MraRepSent   --MRA-->  MraRepRcvd   (a second REP came before the answer)
//! ready      Established  --RTU-->  Established  Established
//! disconnect DreqSent     --DREQ->  DreqRcvd     Disconnected
//! Disconnected Timewait   <-DREP--  Timewait     disconnect
//! ```
//!
//! What a message asks for is done once; its duplicates get the same answer again. Every message that expects an answer is
//! repeated on a timer and given up at last; every other wait that depends on a peer ends by itself. What a program
//! destroys goes on without it until the peer was told, and then is gone; nothing that a peer sends can make the tables
//! longer than [`CmConfig`] says.

mod challenge;
mod connection;
pub mod counters;
mod disconnect;
mod early;
pub mod event;
pub mod id;
pub mod ip;
mod listener;
mod machine;
pub mod mad;
pub mod message;
mod outbox;
mod params;
mod peer_gone;
pub mod qp_attr;
mod record;
mod reject;
mod reply;
mod request;
mod route;
mod sidr;
mod timeout;
mod timers;

pub use connection::ConnectionState;
pub use listener::ListenerId;
pub use machine::{Cm, CmConfig, CmError, Usage};
pub use outbox::Transmit;
pub use params::{
    AcceptParams, ConnectParams, Listen, ListenAddress, Path, Serves, SidrAnswer, SidrParams,
    Transport,
};
pub use record::Record;
pub use route::{Route, route};

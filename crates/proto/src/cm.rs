//! IB communication management (IBA chapter 12) for RoCEv2, without I/O.
//!
//! One [`Cm`] per device and process holds listeners and connections. It is driven like a queue pair. Datagrams that
//! came to QP1 go in by [`Cm::handle`], and datagrams to send come out of [`Cm::poll_transmit`]. Events for the program
//! come out of [`Cm::poll_event`]. [`Cm::on_timer`] is due at [`Cm::deadline`]. Time comes in as an argument.
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
//! The CM executes a message once and gives its duplicates the same answer again. It repeats every message that expects
//! an answer on a timer, and gives it up at last. Every other wait that depends on a peer ends by itself. When a
//! program destroys a connection, the CM keeps it until the peer was told. Nothing that a peer sends can make the
//! tables longer than [`CmConfig`] says.

mod challenge;
mod connection;
pub mod counters;
mod disconnect;
mod error;
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
mod recipient;
mod record;
mod reject;
mod repeats;
mod reply;
mod request;
mod sidr;
mod timeout;
mod timers;

pub use connection::ConnectionState;
pub use error::CmError;
pub use listener::ListenerId;
pub use machine::{Cm, CmConfig, Usage};
pub use outbox::Transmit;
pub use params::{
    AcceptParams, ConnectParams, Listen, ListenAddress, Path, Serves, SidrAnswer, SidrParams,
    Transport,
};
pub use recipient::{Recipient, recipient};
pub use record::Record;
pub use timeout::LONGEST as LONGEST_WAIT;

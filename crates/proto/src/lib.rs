//! RoCEv2 without I/O: wire formats and the machines behind the verbs.
//!
//! No clock, no socket, no thread: time, randomness and memory come in as arguments.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]
#![forbid(unsafe_code)]

pub mod arrival;
pub mod cm;
pub mod comp_cntr;
pub mod counters;
pub mod cq;
pub mod direct;
pub mod env;
pub mod event;
pub mod joined;
pub mod memory;
/// The table of memory keys.
pub use anyverbs_keys as mr;
pub mod payload;
pub mod qp;
pub mod raw;
pub mod reason;
pub mod recv_queue;
mod ring;
pub mod run;
pub mod tag_list;
pub mod time;
pub mod types;
pub mod wc;
pub mod wire;
pub mod wr;
pub mod xrc_message;

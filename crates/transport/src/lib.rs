//! Queue pairs of a device, and the progress that receives for them.
//!
//! [`qp`] drives a queue pair's machine (`anyverbs_proto`) by the links; [`progress`] receives, runs timers and is the
//! worker. What stands above them (QP1, raw packets, XRC domains of several processes) they ask through
//! [`progress::Management`], [`progress::Frames`] and [`qp::sharing::Sharing`].
//!
//! Programs use the crate `anyverbs`, which gives out the types that are theirs. What is hidden from their documentation
//! is for the crates of the device alone.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod multicast;
mod probes;
#[doc(hidden)]
pub mod process;
pub mod progress;
pub mod qp;
mod start;

pub use anyverbs_links::faults::{Calls as FaultyCalls, take_calls as take_faulty_calls};
pub use start::{DataPath, leak};

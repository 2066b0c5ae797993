//! RoCEv2 without I/O: wire formats and the machines behind the verbs.
//!
//! No clock, no socket, no thread: time, randomness and memory come in as arguments.
#![forbid(unsafe_code)]

pub mod time;
pub mod types;
pub mod wire;

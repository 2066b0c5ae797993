//! Objects of a device below its queue pairs, and what they stand on.
//!
//! [`base`] is what every object holds: configuration, keys, memory and clock. Above it stand protection domains, memory
//! regions and windows, completion queues and channels, shared receive queues, address handles and the like. Nothing
//! here knows a link or a queue pair; what objects need of those, they ask through [`base::Progress`].
//!
//! Programs use the crate `anyverbs`, which gives out the types that are theirs. What is hidden from their documentation
//! is for the crates of the device alone.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

pub mod advise;
pub mod ah;
pub mod async_event;
pub mod base;
pub mod buf;
pub mod clock;
pub mod command;
pub mod comp_channel;
pub mod comp_cntr;
pub mod config;
pub mod context_cell;
pub mod cq;
pub mod dm;
pub mod dmah;
pub mod errno;
pub mod error;
pub mod event_queue;
pub mod features;
pub mod fork;
pub mod gid;
pub mod holders;
pub mod lid;
pub mod limits;
pub mod memory;
pub mod mr;
pub mod mw;
pub mod pd;
pub mod persona;
pub mod privilege;
pub mod repeats;
pub mod srq;
pub mod td;
mod text;

pub use repeats::Repeats;

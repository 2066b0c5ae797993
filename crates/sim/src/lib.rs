//! Many devices, one thread, virtual time: where the protocol's scenario tests live.
//!
//! A [`Sim`] holds devices and the [`net::Net`] between them. A device is just the environment that `anyverbs_proto`
//! needs around a queue pair ([`anyverbs_proto::env::Env`]): memory, keys, completion queues, shared receive queues,
//! timers. Packets are real bytes: written by `Headers::emit`, read by `Incoming::parse_next`. Everything random comes from
//! one seed, so a run repeats exactly. A test that fails prints the seed and the packets that were on the wire.
//!
//! [`Pair`] is two connected queue pairs, as most scenarios need them:
//!
//! ```
//! use anyverbs_proto::wr::SendOp;
//! use anyverbs_sim::{Pair, QpOptions};
//!
//! let mut t = Pair::new(1, QpOptions::rc());
//! t.recv(t.b, 1, &[t.b.mr.sge(0, 100)]);
//! t.post(t.a, 2, SendOp::Send, &[t.a.mr.sge(0, 100)]);
//! t.run();
//! assert_eq!(t.bytes(t.b.mr, 0, 100), t.bytes(t.a.mr, 0, 100));
//! ```
#![forbid(unsafe_code)]

mod by_lane;
mod device;
mod direct;
mod lane;
pub mod link;
mod memory;
pub mod net;
mod options;
mod pair;
mod progress;
mod sim;
pub mod trace;

pub use device::{CqId, DeviceId, Event, Mr, QpId, SrqId};
pub use memory::{Arena, PAGE};
pub use options::{GENERAL_WAY, LANES, QpOptions};
pub use pair::{End, Pair};
pub use sim::Sim;

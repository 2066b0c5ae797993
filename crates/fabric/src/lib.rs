//! A network in virtual time: hosts, links and switches with queues, ECN and loss, in one thread and from one seed.
//!
//! The queue pairs are those of `anyverbs_proto`: what is simulated is all around them. `anyverbs-sim` is for the
//! protocol's scenarios. It records each packet and looks at each queue pair at each moment. This crate has a queue of
//! events instead, and packets whose payload has a length and no bytes, so that it runs a thousand hosts.
//!
//! ```
//! let plan = anyverbs_fabric::Plan::parse(
//!     "[network]\nshape = 'star'\nhosts = 3\n[workload]\nkind = 'incast'\nsize = 100_000",
//! )
//! .unwrap();
//! let outcome = plan.run("as given", plan.transport);
//! assert_eq!(outcome.messages, 2);
//! assert!(outcome.total_us >= outcome.bound_us);
//! ```
#![forbid(unsafe_code)]

mod dcqcn;
mod file;
mod net;
mod nic;
pub mod report;
mod run;
mod topology;

pub use dcqcn::Parameters;
pub use file::{Control, Kind, Plan, Recovery, Transport, Workload};
pub use run::Outcome;
pub use topology::{Link, Topology};

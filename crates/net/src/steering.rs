//! Steering: each datagram of a shared port goes to the process of the host that it is for.
//!
//! The receiving sockets of all processes form one `SO_REUSEPORT` group for each address family. A classic BPF program
//! (`SO_ATTACH_REUSEPORT_CBPF`, socket(7); no privilege needed) picks the socket. It loads the byte of the payload that
//! holds the slot of the receiving process, and answers the index of that process's socket in the group.
//!
//! An index is not a slot. Sockets are numbered in the order of binding, and when one closes, the last takes its
//! number. So the map is never remembered but found out. Every program begins with a rule that sends a *probe* to the
//! index in its second byte. To find out the map, a process sends probes for index 0, 1, 2, ... over loopback, and each
//! process that receives one answers with its slot. An index past the end reaches some process by the kernel's hash.
//! That process answers its true index too, which is the lower one, and sent first.
//!
//! ```text
//! probe:  probe byte | index | magic 4 | cookie 8    | zeros up to behind the slot's byte
//! answer: magic 4    | index | slot    | cookie 8
//! ```
//!
//! Answers return by UDP to the prober's own socket and carry its random cookie, which only sockets of this group saw.
//! The registry's lock lets one process at a time find out and attach. A process that does not answer (because it is
//! stopped) is left out. If it is the only silent one, its index is the lowest silent index. A datagram that is not
//! steered reaches some process by hash, which forwards it ([`crate::udp::forward`]).

mod probe;
mod program;
mod state;

pub(crate) use program::Rules;
pub use program::SteerByKind;
pub(crate) use state::Steering;
pub use state::{Resteer, SteeringMode, SteeringState};

#[cfg(test)]
mod tests;

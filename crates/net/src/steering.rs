//! Which process of the host gets which datagram of a shared port.
//!
//! The receiving sockets of all processes form one `SO_REUSEPORT` group for each address family. A classic BPF program
//! (`SO_ATTACH_REUSEPORT_CBPF`, socket(7); no privilege needed) picks the socket: it loads the byte of the payload that
//! holds the slot of the receiving process, and answers the index of that process's socket in the group.
//!
//! Index is not slot. Sockets are numbered in the order of binding, and when one closes, the last takes its number. So
//! the map is never remembered but found out: every program begins with a rule that sends a *probe* to the index in
//! its second byte, whatever else it does. Who wants to know the map sends probes for index 0, 1, 2, ... over loopback,
//! and each process that receives one answers with its slot. An index past the end reaches anybody by the kernel's
//! hash; that process answers its true index too, which is the lower one, and sent first.
//!
//! ```text
//! probe:  probe byte | index | magic 4 | cookie 8    | zeros up to behind the slot's byte
//! answer: magic 4    | index | slot    | cookie 8
//! ```
//!
//! Answers return by UDP to the prober's own socket and carry its random cookie, which only sockets of this group saw.
//! The registry's lock lets one process at a time find out and attach. A process that does not answer (stopped) is
//! left out unless there is only one, whose index then is the lowest silent one; what is not steered reaches somebody
//! by hash, who forwards it ([`crate::forward`]).

mod probe;
mod program;
mod state;

pub(crate) use program::Rules;
pub use program::SteerByKind;
pub(crate) use state::Steering;
pub use state::{Resteer, SteeringMode, SteeringState};

#[cfg(test)]
mod tests;

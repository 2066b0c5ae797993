//! Packet I/O for anyverbs, without any knowledge of RDMA. Linux only.
//!
//! | module | what it does |
//! |---|---|
//! | [`interfaces`], [`monitor`] | the host's interfaces and addresses, and a pollable "something changed" |
//! | [`host`] | state that the processes of a host (= network namespace) share: slots, services and their holders, a journal; no daemon, no files |
//! | [`udp`] | one UDP port shared by all processes of a user: batches in ([`udp::RxBatch`]) and out ([`udp::TxBatch`]) |
//! | [`steering`] | a classic BPF program in the kernel gives each datagram to its process of the host |
//! | [`forward`] | forwards datagrams that arrived at the wrong process to the right one |
//! | [`messages`] | messages between processes of a host, in order and whole |
//! | [`ethernet`] | Ethernet frames, between the processes of a host and on a real interface |
//! | [`shm`] | messages between two processes of one user through shared memory, and copies into each other's memory |
//! | [`fault`] | seeded loss, duplication, reordering and corruption |
//!
//! Everything is non-blocking and close-on-exec. Nothing allocates per packet, except messages that [`messages`] keeps.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod clock;
mod cmsg;
pub mod ethernet;
pub mod fault;
pub mod host;
pub mod interfaces;
pub mod messages;
pub mod monitor;
mod neighbour;
mod netlink;
pub mod shm;
mod sockopt;
pub mod steering;
mod sys;
pub mod udp;

pub use clock::CoarseClock;
pub use host::{
    Journal, Lingering, Lock, Registry, Reservation, Said, ServiceAddress, Services, Slot, Store,
};
pub use interfaces::{Interface, InterfaceAddress, interfaces};
pub use messages::{Delivery, MessageBuffer, Messages, Told};
pub use monitor::AddressMonitor;
pub use neighbour::ethernet_address;
pub use steering::SteerByKind;
pub use sys::{
    Descriptor, ROOM, StandardStreams, Uncancelled, bound_udp_socket, cancellable, check_room,
    udp_socket, undone_if_cancelled,
};
pub use udp::{
    Datagram, Destination, LOOPBACK, MAX_PAYLOAD_V6, OpenError, Outlet, OutletRef, PortOptions,
    RxBatch, SHARERS_VALID, Sounding, TxBatch, UdpPort, forward, is_handed_on,
};

/// A random number, from the seed that the standard library takes from the system.
pub(crate) fn random_u64() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::time::Instant::now())
}

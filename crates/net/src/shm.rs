//! Messages between two processes of one user on one host, through shared memory, and copies into each other's
//! memory.
//!
//! No file is in a file system; everything vanishes with the processes. No lock lies in shared memory.
//!
//! # Life of a channel
//!
//! Each process has an [`Endpoint`]. That is a `SOCK_SEQPACKET` listener at `@<registry>/<uid>/shm/<slot>`, two pages in
//! memfds, the *doorbells* and the *epoch* ([`notify`]), and *published memory* ([`published`]). [`Endpoint::connect`]
//! connects to the listener of another slot and checks by `SO_PEERCRED` that it belongs to the same user. It makes a memfd
//! with a ring for each direction, sealed so that it keeps its size. It sends that with a hello that tells version and layout.
//! It does not wait: messages sent before the other side answers lie in the ring. The other side's [`Endpoint::control`]
//! checks user, seals, size and version, maps the rings and answers. It then has a [`Channel`] as well, and its own `connect`
//! returns that one. Two processes that connect at the same time get two channels. Each sends on its own and reads both.
//!
//! The socket stays open. It hangs up when the peer closes it or runs another program. A pidfd tells of the peer's
//! death, also if a forked child keeps the socket. Either closes the channel. Then sending fails at once, and
//! [`Event::Closed`] comes when all messages that the peer had published are read. A message that was not published
//! when its writer died was not sent. A peer that is stopped is not dead: its ring fills, and no process waits for it.
//!
//! # Memory
//!
//! The memfd holds two *sides*, the connecting process's first. A side is written by its process alone, and mapped
//! read-only by the other:
//!
//! | offset | what |
//! |---|---|
//! | 0 | up to where this process has read the other's ring |
//! | 128 | whether it looks into that ring by itself, or wants its doorbell rung |
//! | 256 | the last question for room that it answered |
//! | 384 | the last question for room that it asked |
//! | 448 | whether it has given the channel up: the other begins no further copy |
//! | 456 | whether the kernel lets it copy from and to the other's memory |
//! | 464 | what it does to packets ([`Manner`]) |
//! | 512 | marks of the copies that it makes from and to the other's memory ([`published`]) |
//! | 1024 | counts of these copies, for each mark and each device of the other |
//! | behind it, on a page | its ring, 64 KiB to 64 MiB, in which memory is allocated as it is used |
//! | behind it | its answers to the other's lanes, where it looks and its bells ([`bells`]), then its own lanes ([`lane`]) |
//!
//! A message is `control word 8 | header 0 to 120 | payload`, at a multiple of 64. A header and payload that fit into
//! one line share it; longer payloads begin on a line. Messages do not wrap: a *skip* fills the end of the ring.
//!
//! # Memory ordering
//!
//! *Data.* The writer fills the lines of a batch and puts a zero behind it. It stores all control words but the first,
//! relaxed, and then the first with release. The reader loads the control word at its position with acquire. If it is
//! non-zero, it and all earlier writes are visible, with the zero that ends the batch. The reader copies, and then
//! stores its position with release. The writer loads that with acquire before it writes to these lines again.
//!
//! *Notification* needs sequentially consistent fences, one in each publication and one in the reader's steps that
//! end in not looking any more; [`notify`] has the pairs. `tests/shm_loom` checks both under every interleaving,
//! and that the checks fail without the fences.
//!
//! # Nonsense
//!
//! Words that another process may write are loaded once into a register or a local copy, and checked before use:
//! control words, positions. If one is impossible, the channel is closed with [`Closed::Nonsense`]; other channels do
//! not notice. Header and payload mean nothing here, and their parser works on a copy. There are no references to
//! shared bytes, only atomics and raw copies. A peer can delay only itself: doorbells, which all peers can write, are a
//! hint. There is no defence against things that a process of the same user can do anyway, with `kill(2)` or
//! `ptrace(2)`. A process that has our eventfd could steal wake-ups.
//!
//! # Use
//!
//! - [`Endpoint::new`] gives the endpoint and the [`Poller`], which belongs into the receive path's lock.
//! - `endpoint.control_fd()` is watched at all times; when it is readable, [`Endpoint::control`] and then
//!   [`Poller::poll`] are called. New channels and the ends of old ones come as [`Event`]s from
//!   [`Poller::next_event`].
//! - Sending: [`Channel::sender`] locks the sending side. [`Sender::reserve`], fill in place, [`Reservation::commit`],
//!   and so on for more messages. One [`Sender::flush`] ends it, which makes a system call only if the peer sleeps.
//!   [`SendError::Full`]: ask for [`Event::Room`] by [`Sender::ask_for_room`], and try once more, since room may have
//!   come before the request.
//! - Receiving: [`Poller::poll`] gives batches in place. An empty poll costs a load, and one for each of up to four
//!   rings that were busy lately.
//! - Sleeping: [`Poller::arm`]. If it returns false, poll again; else wait for `endpoint.wake_fd()` (epoll), then
//!   [`Poller::disarm`] and poll. While disarmed no peer writes to the eventfd, so it may stay in the epoll set.
//!
//! Copies:
//! - [`Channel::can_copy`], [`Channel::read_remote`] and [`Channel::write_remote`] are process_vm_readv(2) and
//!   process_vm_writev(2) with a check that the process is still the same.
//! - [`Channel::begin_copy`] does the same as far as the other process's [`Published`] memory allows it, which can be read
//!   meanwhile. When its owner takes something back from [`Endpoint::published`], it waits in [`Endpoint::settle`] until
//!   the copy has ended.
//!
//! After `fork` the child has none of the mappings. It must not use the inherited objects, but may drop them.

pub mod bells;
mod channel;
mod control;
mod endpoint;
mod handshake;
pub mod lane;
mod layout;
mod manner;
mod memory;
pub mod notify;
mod own_table;
mod poller;
mod process;
pub mod published;
mod remote;
pub mod ring;
mod room;
mod shared_range;

pub use bells::Spot;
pub use channel::{Channel, Closed, Copying, SendError, Sender};
pub use endpoint::{Config, ConnectError, Endpoint};
pub use lane::{LaneReader, LaneWriter};
pub use layout::{LANES, MAX_HEADER};
pub use manner::Manner;
pub use memory::{Area, Memory, OwnWord, Owned, SharedWords};
pub(crate) use memory::{allocate, check_length, is_sealed_memory, memfd};
pub use poller::{Event, LaneId, LaneLook, Poller};
pub(crate) use process::{PeerProcess, peer as peer_process};
pub use published::{Copied, Published};
pub use remote::{Local, Remote, RemoteError};
pub use ring::{Batch, Message, ONE_LINE, Reservation};
pub use shared_range::SharedRange;

#[cfg(test)]
mod tests;

//! Messages between two processes of one user on one host, through shared memory, and copies into each other's
//! memory.
//!
//! Nothing is in the file system; everything vanishes with the processes. No lock lies in shared memory.
//!
//! # Life of a channel
//!
//! Each process has an [`Endpoint`]: a `SOCK_SEQPACKET` listener at `@<registry>/<uid>/shm/<slot>`, and two pages in
//! memfds, the *bells* and the *epoch* ([`notify`]), and a *board* ([`published`]). [`Endpoint::connect`] connects to the listener of another slot,
//! checks by `SO_PEERCRED` that it belongs to the same user, makes a memfd with a ring for each direction, sealed so
//! that it keeps its size, and sends it with a hello that says version and layout. It does not wait: what is sent
//! before the other side answers lies in the ring. The other side's [`Endpoint::control`] checks user, seals, size
//! and version, maps the rings, answers, and has a [`Channel`] as well; its own `connect` then returns that one. Two
//! that connect at the same time get two channels, each sends on its own and reads both.
//!
//! The socket stays open: it hangs up when the peer closes it or runs another program. A pidfd tells of its death,
//! also if a forked child keeps the socket. Either closes the channel: sending fails at once, and when everything
//! that the peer had published is read, [`Event::Closed`] comes. A message that was not published when its writer
//! died was not sent. A peer that is stopped is not dead: its ring fills, and nobody waits.
//!
//! # Memory
//!
//! The memfd holds two *sides*, the connecting process's first. A side is written by its process alone, and mapped
//! read-only by the other:
//!
//! | offset | what |
//! |---|---|
//! | 0 | up to where this process has read the other's ring |
//! | 128 | whether it looks into that ring by itself, or wants its bell rung |
//! | 256 | the last question for room that it answered |
//! | 384 | the last question for room that it asked |
//! | 512 | marks of the copies that it makes from and to the other's memory ([`published`]) |
//! | one page | its ring, 64 KiB to 64 MiB, in which memory is allocated as it is used |
//!
//! A message is `control word 8 | header 0 to 120 | payload`, at a multiple of 64; header and payload that fit into
//! one line share it, longer payloads begin on a line. Messages do not wrap: a *skip* fills the end of the ring.
//!
//! # Memory ordering
//!
//! *Data.* The writer fills the lines of a batch, puts a zero behind it, stores the control words but the first,
//! relaxed, and then the first with release. The reader loads the control word at its position with acquire:
//! non-zero, it and all that was written before it are visible, the zero that ends the batch included. The reader
//! copies, and then stores its position with release; the writer loads that with acquire before it writes to these
//! lines again.
//!
//! *Notification* needs sequentially consistent fences, one in each publication and one in the reader's steps that
//! end in not looking any more; [`notify`] has the pairs. `tests/shm_loom.rs` checks both under every interleaving,
//! and that the checks fail without the fences.
//!
//! # Nonsense
//!
//! What another process may write is loaded once into a register or a local copy, and checked before it is used:
//! control words, positions. If it is impossible the channel is closed with [`Closed::Nonsense`]; other channels do
//! not notice. Header and payload mean nothing here; whoever parses them parses a copy. There are no references to
//! shared bytes, only atomics and raw copies. A peer can delay nobody but itself: bells, which all peers can write,
//! are a hint. What a process of the same user can do anyway, with `kill(2)` or `ptrace(2)`, is not defended against:
//! who has our eventfd could steal wake-ups.
//!
//! # Use
//!
//! - [`Endpoint::new`] gives the endpoint and the [`Poller`], which belongs into the receive path's lock.
//! - `endpoint.control_fd()` is watched at all times; when it is readable, [`Endpoint::control`] and then
//!   [`Poller::poll`] are called. New channels and the ends of old ones come as [`Event`]s from
//!   [`Poller::next_event`].
//! - Sending: [`Channel::sender`] locks the sending side; [`Sender::reserve`], fill in place,
//!   [`Reservation::commit`], more of these, and one [`Sender::flush`], which makes a system call only if the peer
//!   sleeps. [`SendError::Full`]: ask for [`Event::Room`] by [`Sender::ask_for_room`], and try once more, since room
//!   may have come before the question.
//! - Receiving: [`Poller::poll`] gives batches in place. One that finds nothing costs a load, and one for each of up
//!   to four rings that were busy lately.
//! - Sleeping: [`Poller::arm`]; if it says false, poll again; else wait for `endpoint.wake_fd()` (epoll), then
//!   [`Poller::disarm`] and poll. While disarmed nobody writes to the eventfd, so it may stay in the epoll set.
//! - [`Channel::can_copy`], [`Channel::read_remote`] and [`Channel::write_remote`] are process_vm_readv(2) and
//!   process_vm_writev(2) with a check that the process is still the same, or to read a little proc_pid_mem(5).
//! - [`Channel::begin_copy`] is the same as the other process's [`Board`] allows it: it can be read meanwhile, and its owner,
//!   who takes something back from [`Endpoint::board`], waits in [`Endpoint::settle`] until the copy has ended.
//!
//! After `fork` the child has none of the mappings; it must not use what it inherited, but may drop it.

mod channel;
mod control;
mod endpoint;
mod handshake;
mod layout;
mod memory;
pub mod notify;
mod poller;
mod process;
pub mod published;
mod remote;
pub mod ring;
mod shared_range;

pub use channel::{Channel, Closed, Copying, SendError, Sender};
pub use endpoint::{Config, ConnectError, Endpoint};
pub use layout::MAX_HEADER;
pub use memory::{Area, Memory};
pub(crate) use memory::{allocate, check_length, memfd, seal};
pub use poller::{Event, Poller};
pub use published::{Board, Copied};
pub use remote::{Local, Remote, RemoteError};
pub use ring::{Batch, Committed, Message, ONE_LINE, Reservation};
pub use shared_range::SharedRange;

#[cfg(test)]
mod tests;

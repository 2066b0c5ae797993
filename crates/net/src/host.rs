//! One store that the processes of a host share, and one authenticated way to each of them.
//!
//! A *host* is a network namespace; its *processes* are those of one user that share a UDP port. There is no daemon, and nothing is in the
//! file system.
//!
//! # Life
//! The store is a memfd that all processes have ([`Store`]): it exists as long as one of them does. A process that
//! starts connects to the names of the 255 slots ([`Registry`]), and takes the store of the first that is of its user.
//! It does so by `/proc`, which needs no help of the other process, which may be stopped. If that fails, the other
//! answers a message with a descriptor (containers of one pod, user namespaces). If no process has a store, it makes
//! one. Processes that start wait for each other, 2 s at most. A launcher has the store without a slot. Where a limit
//! on the length of files, or a container's filter, allows no such file, the process has a private store. Datagrams are
//! then still forwarded to and from it, but other processes do not find its services.
//!
//! # Who lives
//! The owner of a slot holds a lock of a byte of the file, and listens at the slot's name. Both end with it, however it ends. A child
//! that forked and did not exec keeps both. If such children alone are left, the next process makes a new store, for they
//! hand nothing over. No two processes have one slot nevertheless: the name is taken. The sockets of these children are
//! still among those of the port, so steering asks every socket who reads it (`steering/state.rs`). Connections that
//! their parent has left in the journal are ended by nobody.
//!
//! # Layout and memory ordering
//! See `table.rs`. Sections have one writer each, entries are added under a lock and published by one store. There is no count of
//! changes: an entry has its own. The journal's records lie behind the table and are read and written by system calls.
//!
//! # Hostile input
//! | from | what holds |
//! |---|---|
//! | another user | It may bind any name, and take slots away. It gets nothing and is believed nothing: whoever listens or connects is asked for its user (`SO_PEERCRED`) before a byte is sent or read. Nothing is read from `/proc/net`. |
//! | a file that is none of ours | A file is taken only if it is unlinked, of this user, cannot shrink and begins with the magic number: nothing is written before. |
//! | a process of the same user | It may write anything into the store. Lengths and indices are bounded, and all loops are (fuzz target `host_store`). |
//!
//! # Pages
//! A process says nothing of itself before another one of its user asks, by a message over the same connections. Then it keeps a file
//! fresh for some seconds, and gives the other a descriptor of it ([`Page`], [`Watcher`]).
//!
//! # Orders
//! By the same connections a process of the user may tell another one what to do, and gets an answer ([`tell`], [`Order`]).
//!
//! # Use
//! [`Slot`] is a place on the host, [`Services`] tells which process listens where, and [`Journal`] outlives its
//! processes.

mod journal;
mod lock;
mod name;
mod orders;
mod page;
mod pass;
mod services;
mod slot;
mod store;
mod table;
mod watch;

pub use journal::{Abandoned, Journal, PAYLOAD_LEN, Payload, Section};
pub(crate) use name::Name;
pub use name::Registry;
pub use orders::{MAX_ORDER, Order, tell};
pub use page::{MAX_PAGE, Page};
pub use services::{Lingering, Reservation, ServiceAddress, Services, ephemeral_ports};
pub use slot::Slot;
pub(crate) use slot::{Announced, Received};
pub use store::{LOOK_AGAIN, Lock, LockGuard, Said, Store, TIME_SLICES, WAIT};
pub use table::{MAX_ENDED, MOST_PORTS};
pub use watch::{Seen, Watcher};

//! Sockets over RDMA (`rsocket(7)`), in the wire format of rdma-core's rsockets, on the connection manager and the queue
//! pairs of [`anyverbs`].
//!
//! A socket is named by its descriptor, a real one: it can be polled, and is readable when the socket must be looked
//! at. [`socket`], [`accept`] and [`close`] make and end sockets, and [`get`] finds one. [`poll`] and [`Repoll`] wait
//! for many, ordinary descriptors among them. Calls fail with the error numbers of the socket calls of the same name.
//!
//! The calling thread does the work: a socket has no thread of its own. Calls that wait send keepalives.
//!
//! ```no_run
//! # fn main() -> anyverbs_rsocket::Result<()> {
//! use anyverbs::cm::Address;
//! let fd = anyverbs_rsocket::socket(libc::AF_INET, libc::SOCK_STREAM, 0)?;
//! let socket = anyverbs_rsocket::get(fd)?;
//! socket.connect(&Address::Ip(([127, 0, 0, 1], 7471).into()))?;
//! socket.send(b"hello", 0)?;
//! anyverbs_rsocket::close(fd)?;
//! # Ok(())
//! # }
//! ```
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod config;
mod device;
mod dgram;
mod epoll;
mod errno;
mod eventfd;
mod fork;
#[cfg(any(test, fuzzing))]
#[allow(missing_docs, unreachable_pub, reason = "public for the fuzz target alone")]
pub mod fuzzed;
mod machine;
mod needs;
mod options;
mod poll;
mod ready;
mod repoll;
mod ring;
mod sleep;
mod sleepers;
mod socket;
mod stream;
mod table;
mod wire;

pub use config::Config;
pub use errno::{Errno, Result};
pub use needs::obstacles;
pub use options::{
    RDMA_INLINE, RDMA_IOMAPSIZE, RDMA_ROUTE, RDMA_RQSIZE, RDMA_SQSIZE, RDMA_UNREAD, SOL_RDMA, Value,
};
pub use poll::poll;
pub use repoll::Repoll;
pub use sleep::Call;
pub use socket::{Received, Socket};
pub use table::{accept, close, get, get_epoll, is_socket, make_epoll, socket};

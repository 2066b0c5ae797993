//! The same-host link.

mod channel;
mod control;
mod endpoint;
mod handshake;
mod layout;
mod memory;
pub mod notify;
mod poller;
mod process;
mod remote;
pub mod ring;

pub use channel::{Channel, Closed, SendError, Sender};
pub use endpoint::{Config, ConnectError, Endpoint};
pub use layout::MAX_HEADER;
pub use memory::{Area, Memory};
pub use poller::{Event, Poller};
pub use remote::{Local, Remote, RemoteError};
pub use ring::{Batch, Message, Reservation};

#[cfg(test)]
mod tests;

//! Sockets of one process, over the loopback device.
#![expect(clippy::unwrap_used, reason = "tests")]

mod datagram;
mod fork;
mod pair;
mod polling;
mod setup;
mod transfer;
mod waking;

//! Connection management between hosts, in virtual time: one file for each kind of behaviour.
#![expect(clippy::unwrap_used, reason = "a test")]

mod bad_input;
mod connect;
mod disconnect;
mod forged;
mod fuzzed;
mod listener;
mod loss;
mod many;
mod messages;
mod model;
mod peer_gone;
mod sidr;
mod stale;
mod successor;
mod vanished_peer;
mod world;

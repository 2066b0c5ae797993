//! The bodies of the fuzz targets. The tests of the crates include these files and run them over the corpus, without
//! libFuzzer.
//!
//! A body panics if a promise of the code under test is broken, and returns on everything else.

pub mod cm;
pub mod config;
pub mod copy_and_crc;
pub mod host_store;
pub mod input;
pub mod packet;
pub mod qp_sequence;
pub mod receive_path;
pub mod requester;
pub mod responder;
pub mod shm_handshake;
pub mod shm_ring;
pub mod xrc_message;

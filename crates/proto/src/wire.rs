//! RoCEv2 on the wire: one file per header, the packet that they form, and its checksum.

pub mod aeth;
pub mod atomic;
pub mod bth;
pub mod carried_ack;
pub mod crc32;
pub mod credit;
pub mod deth;
pub mod feth;
mod field;
pub mod icrc;
pub mod ieth;
pub mod imm;
pub mod opcode;
pub mod packet;
pub mod reason;
pub mod repeated;
pub mod reth;
pub mod tmh;
pub mod xrceth;

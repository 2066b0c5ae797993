//! IB communication management (IBA chapter 12) for RoCEv2, without I/O.

pub mod id;
pub mod ip;
pub mod mad;
pub mod message;

//! RoCEv2 on the wire.
pub mod packet;

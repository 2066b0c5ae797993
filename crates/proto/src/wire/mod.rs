//! RoCEv2 on the wire.

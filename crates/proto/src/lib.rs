//! RoCEv2 without I/O.
#![forbid(unsafe_code)]

//! placeholder, replaced by branch wire
/// Headers.
#[derive(Clone, Copy, Debug)]
pub struct Headers;
/// Packet.
#[derive(Debug)]
pub struct Packet<'a>(&'a ());

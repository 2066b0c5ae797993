//! Ethernet frames as queue pairs of type RAW_PACKET send and receive them: parsing, flow rules, receive-side scaling and
//! the offloads of a network card. No I/O, and nothing is allocated per frame.

pub mod checksum;
pub mod esp;
pub mod fcs;
pub mod flow;
pub mod frame;
pub mod rss;
pub mod spec;
pub mod transition;
pub mod tso;

/// Bytes of the longest frame, without the frame check sequence.
pub const MAX_FRAME: usize = 65_535;

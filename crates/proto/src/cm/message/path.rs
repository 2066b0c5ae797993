//! A path as REQ and LAP describe it (IBA 12.7.11 to 12.7.24).

use super::field::{Value, at, bits};
use crate::types::Gid;

/// A path, seen from the sender of the message.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct PathRecord {
    /// LID of the sender's port; 0xffff on RoCE.
    pub local_lid: u16,
    /// LID of the recipient's port; 0xffff on RoCE.
    pub remote_lid: u16,
    /// The sender's port.
    pub local_gid: Gid,
    /// The recipient's port.
    pub remote_gid: Gid,
    /// 20 bits.
    pub flow_label: u32,
    /// Static rate, 6 bits.
    pub packet_rate: u8,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub sl: u8,
    /// Both ports lie in one subnet.
    pub subnet_local: bool,
    /// Code of the ACK timeout that the recipient shall use, 5 bits: see [`crate::types::timer_code::ack`].
    pub ack_timeout: u8,
}

impl PathRecord {
    /// Bytes in a REQ.
    pub const LEN: usize = 44;
}

/// The table, once for both directions: `f` is called with each field and its place.
macro_rules! fields {
    ($f:ident, $path:ident) => {
        $f!($path.local_lid, at(0));
        $f!($path.remote_lid, at(2));
        $f!($path.local_gid, at(4));
        $f!($path.remote_gid, at(20));
        $f!($path.flow_label, bits(36, 0, 20));
        $f!($path.packet_rate, bits(39, 2, 6));
        $f!($path.traffic_class, at(40));
        $f!($path.hop_limit, at(41));
        $f!($path.sl, bits(42, 0, 4));
        $f!($path.subnet_local, bits(42, 4, 1));
        $f!($path.ack_timeout, bits(43, 0, 5));
    };
}

fn width<T: Value>(_: &T, width: Option<usize>) -> usize {
    width.unwrap_or(T::BITS)
}

impl Value for PathRecord {
    const BITS: usize = Self::LEN * 8;

    fn read(body: &[u8], first: usize, _: usize) -> Self {
        let mut path = Self::default();
        macro_rules! read {
            ($field:expr, $place:expr) => {
                let width = width(&$field, $place.width);
                $field = Value::read(body, first + $place.first, width);
            };
        }
        fields!(read, path);
        path
    }

    fn write(&self, body: &mut [u8], first: usize, _: usize) {
        macro_rules! write {
            ($field:expr, $place:expr) => {
                let width = width(&$field, $place.width);
                Value::write(&$field, body, first + $place.first, width);
            };
        }
        fields!(write, self);
    }
}

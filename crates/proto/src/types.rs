//! Numbers of the field, each as its own checked type.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// Queue pair number: 24 bits, names a queue pair of a host.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// The general services interface, which carries the CM's datagrams.
    pub const GSI: Self = Self(1);
    /// The destination of every multicast datagram.
    pub const MULTICAST: Self = Self(0xff_ffff);

    /// Takes the low 24 bits.
    #[must_use]
    pub const fn new(n: u32) -> Self {
        Self(n & 0xff_ffff)
    }

    /// The number itself.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The top byte: the slot of the process that owns the queue pair.
    #[must_use]
    pub const fn slot(self) -> u8 {
        (self.0 >> 16) as u8
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#08x})", self.0)
    }
}

impl fmt::Display for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#08x}", self.0)
    }
}

/// Packet sequence number: 24 bits, compared in serial arithmetic (IBA 9.7.1).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// Takes the low 24 bits.
    #[must_use]
    pub const fn new(n: u32) -> Self {
        Self(n & 0xff_ffff)
    }

    /// The number itself.
    #[must_use]
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number `n` packets later.
    #[must_use]
    pub const fn plus(self, n: u32) -> Self {
        Self::new(self.0.wrapping_add(n))
    }

    /// The number before this one.
    #[must_use]
    pub const fn prev(self) -> Self {
        Self::new(self.0.wrapping_sub(1))
    }

    /// The distance of `self` from `other`: negative if before, within +-2^23.
    #[must_use]
    pub const fn since(self, other: Self) -> i32 {
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({})", self.0)
    }
}

/// Global identifier: the 128-bit address of a port. For RoCEv2 it is an IP address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The empty entry of a GID table.
    pub const ZERO: Self = Self([0; 16]);

    /// The IP address that the GID stands for; an IPv4 address is stored mapped (`::ffff:a.b.c.d`).
    #[must_use]
    pub fn to_ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// Whether no address is stored here.
    #[must_use]
    pub fn is_zero(self) -> bool {
        self == Self::ZERO
    }

    /// Whether this is the address of a multicast group.
    #[must_use]
    pub fn is_multicast(self) -> bool {
        self.to_ip().is_multicast() || self.0[0] == 0xff
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Ipv6Addr::from(self.0))
    }
}

/// Path MTU: the largest payload of one packet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u8)]
pub enum Mtu {
    /// 256 bytes.
    Mtu256 = 1,
    /// 512 bytes.
    Mtu512 = 2,
    /// 1024 bytes.
    Mtu1024 = 3,
    /// 2048 bytes.
    Mtu2048 = 4,
    /// 4096 bytes.
    Mtu4096 = 5,
}

impl Mtu {
    /// Bytes on an IP link that a RoCEv2 packet needs in addition to its payload: IPv6 40, UDP 8, BTH 12, the largest
    /// extension headers 32, ICRC 4.
    pub const OVERHEAD: u32 = 96;

    /// All sizes, smallest first.
    pub const ALL: [Self; 5] =
        [Self::Mtu256, Self::Mtu512, Self::Mtu1024, Self::Mtu2048, Self::Mtu4096];

    /// Payload bytes.
    #[must_use]
    pub const fn bytes(self) -> u32 {
        128 << self as u32
    }

    /// From the encoding of `enum ibv_mtu` and of the CM (1 to 5).
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|m| *m as u32 == code)
    }

    /// The largest path MTU that fits a link with this IP MTU; 256 if none does.
    #[must_use]
    pub fn fitting(link_mtu: u32) -> Self {
        let room = link_mtu.saturating_sub(Self::OVERHEAD);
        Self::ALL.into_iter().rev().find(|m| m.bytes() <= room).unwrap_or(Self::Mtu256)
    }
}

/// Partition key: the partition in 15 bits, and the highest bit for a full member.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PKey(pub u16);

impl PKey {
    /// The default partition, full member.
    pub const DEFAULT: Self = Self(0xffff);

    /// Whether two keys name one partition and are not both limited members (IBA 10.9.3).
    #[must_use]
    pub const fn matches(self, other: Self) -> bool {
        self.is_same_partition(other) && (self.0 | other.0) & 0x8000 != 0
    }

    /// Whether two keys name one partition.
    #[must_use]
    pub const fn is_same_partition(self, other: Self) -> bool {
        self.0 & 0x7fff == other.0 & 0x7fff
    }
}

impl Default for PKey {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// Queue key of a datagram: must equal the receiving queue pair's (IBA 10.2.5).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct QKey(pub u32);

impl QKey {
    /// The Q_Key of QP1.
    pub const GSI: Self = Self(0x8001_0000);

    /// In a work request, the high bit stands for "the queue pair's own".
    #[must_use]
    pub const fn is_controlled(self) -> bool {
        self.0 & 0x8000_0000 != 0
    }
}

/// ACK timeout and `min_rnr_timer` are small codes on the wire; these are their meanings.
pub mod timer_code {
    use std::time::Duration;

    /// RNR NAK timer in microseconds, by code (IBA table 45).
    const RNR_MICROS: [u32; 32] = [
        655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840,
        5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840,
        245_760, 327_680, 491_520,
    ];

    /// The time that a requester waits after an RNR NAK with this code (low five bits count).
    #[must_use]
    pub fn rnr(code: u8) -> Duration {
        Duration::from_micros(RNR_MICROS[usize::from(code & 0x1f)].into())
    }

    /// ACK timeout, 4.096 us * 2^code; `None` for 0: never (IBA 9.9.2.1.2).
    #[must_use]
    pub fn ack(code: u8) -> Option<Duration> {
        (code & 0x1f != 0).then(|| Duration::from_nanos(4096 << (code & 0x1f)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn psn_wraps_in_serial_order() {
        assert_eq!(Psn::new(0).since(Psn::new(0xff_ffff)), 1);
        assert_eq!(Psn::new(0xff_ffff).since(Psn::new(0)), -1);
        assert_eq!(Psn::new(0x80_0000).since(Psn::new(0)), -(1 << 23));
        assert_eq!(Psn::new(0xff_fff0).plus(0x20), Psn::new(0x10));
        assert_eq!(Psn::new(0).prev(), Psn::new(0xff_ffff));
    }

    #[test]
    fn mtu_fits_the_link() {
        assert_eq!(Mtu::fitting(1500), Mtu::Mtu1024);
        assert_eq!(Mtu::fitting(9000), Mtu::Mtu4096);
        assert_eq!(Mtu::fitting(65536), Mtu::Mtu4096);
        assert_eq!(Mtu::fitting(100), Mtu::Mtu256);
        assert_eq!(Mtu::from_code(3).map(Mtu::bytes), Some(1024));
        assert_eq!(Mtu::from_code(6), None);
    }

    #[test]
    fn gid_maps_ipv4() {
        let ip: IpAddr = "10.1.2.3".parse().unwrap();
        assert_eq!(Gid::from(ip).to_ip(), ip);
        assert!(Gid::from("224.0.0.7".parse::<IpAddr>().unwrap()).is_multicast());
    }

    #[test]
    fn timers_double_and_zero_means_never() {
        use std::time::Duration;
        assert_eq!(timer_code::ack(0), None);
        assert_eq!(timer_code::ack(14), Some(Duration::from_nanos(67_108_864)));
        assert_eq!(timer_code::rnr(0), Duration::from_micros(655_360));
        assert_eq!(timer_code::rnr(31), Duration::from_micros(491_520));
    }

    #[test]
    fn keys_of_a_partition_match_unless_both_are_limited() {
        let matches = |a, b| PKey(a).matches(PKey(b)) && PKey(b).matches(PKey(a));
        for (one, other) in [(0xffff, 0xffff), (0xffff, 0x7fff), (0x8001, 0x8001), (0x8001, 1)] {
            assert!(matches(one, other), "{one:#x} {other:#x}");
        }
        for (one, other) in [(0x7fff, 0x7fff), (1, 1), (0x8001, 0x8002), (0x8001, 0x8003)] {
            assert!(!matches(one, other), "{one:#x} {other:#x}");
        }
        assert!(!PKey(0x8001).matches(PKey::DEFAULT) && !PKey::DEFAULT.matches(PKey(0x8001)));
    }

    #[test]
    fn a_q_keys_high_bit_names_the_queue_pairs_own() {
        assert!(QKey::GSI.is_controlled() && QKey(0x8000_0000).is_controlled());
        assert!(!QKey(0x7fff_ffff).is_controlled() && !QKey(0).is_controlled());
    }
}

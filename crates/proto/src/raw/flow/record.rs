//! A rule as processes of a host tell each other of it: what it takes, and when it comes; not what it leads to.
//!
//! | offset | bytes | what |
//! |---|---|---|
//! | 0 | 1 | type: 1 normal, 2 all default, 3 multicast default |
//! | 1 | 1 | 1 drops, 2 does not trap, 4 its process gets the frames of the host's processes |
//! | 2 | 2 | priority |
//! | 4 | 4 | index of the interface whose frames its process gets; 0 for none |
//! | 8 | 8 | age |
//! | 16 | 1 | how many filters follow |
//!
//! Each filter is a byte that names it (0x80 more for one of inner headers), and its values, each with its mask behind it, in the order of
//! [`Filter`]. Integers are little-endian. Zeros follow.

use super::{FlowAttr, FlowRule, FlowType, MAX_SPECS, Reach};
use crate::raw::spec::{Filter, Masked, Spec};
use arrayvec::ArrayVec;

/// Bytes of a record.
pub const RECORD_LEN: usize = 319;

/// A rule of another process.
#[derive(Clone, Debug)]
pub struct ForeignRule {
    /// What it takes.
    pub rule: FlowRule,
    /// The older rule has the smaller one.
    pub age: u64,
    /// Which frames its process gets.
    pub reach: Reach,
}

const DROP: u8 = 1;
const DONT_TRAP: u8 = 2;
const HOST: u8 = 4;
const INNER: u8 = 0x80;

impl FlowRule {
    /// The record of a rule, for others; none of one that takes nothing from anybody: a sniffer, or a rule for frames that are sent.
    #[must_use]
    pub fn record(&self, age: u64, reach: Reach) -> Option<[u8; RECORD_LEN]> {
        let attr = &self.0;
        let kind: u8 = match attr.flow_type {
            FlowType::Normal if !attr.egress => 1,
            FlowType::AllDefault => 2,
            FlowType::McDefault => 3,
            FlowType::Normal | FlowType::Sniffer => return None,
        };
        let flag = |set: bool, flag: u8| if set { flag } else { 0 };
        let flags =
            flag(attr.drop, DROP) | flag(attr.dont_trap, DONT_TRAP) | flag(reach.host, HOST);
        let mut to = Writer { bytes: [0; RECORD_LEN], at: 0 };
        to.put(kind);
        to.put(flags);
        to.put(attr.priority);
        to.put(reach.interface);
        to.put(age);
        to.put(attr.specs.len() as u8);
        attr.specs.iter().for_each(|spec| to.put_spec(spec));
        Some(to.bytes)
    }
}

impl ForeignRule {
    /// Reads a record, from where anything may come. `None` for what is no rule.
    #[must_use]
    pub fn parse(bytes: &[u8; RECORD_LEN]) -> Option<Self> {
        let mut from = Reader(bytes);
        let flow_type = match from.take::<u8>()? {
            1 => FlowType::Normal,
            2 => FlowType::AllDefault,
            3 => FlowType::McDefault,
            _ => return None,
        };
        let flags: u8 = from.take()?;
        let priority = from.take()?;
        let interface = from.take()?;
        let age = from.take()?;
        let count: u8 = from.take()?;
        if flags & !(DROP | DONT_TRAP | HOST) != 0 || usize::from(count) > MAX_SPECS {
            return None;
        }
        let specs = (0..count).map(|_| from.take_spec()).collect::<Option<ArrayVec<_, _>>>()?;
        if from.0.iter().any(|byte| *byte != 0) {
            return None;
        }
        let rule = FlowRule::new(FlowAttr {
            flow_type,
            priority,
            specs,
            dont_trap: flags & DONT_TRAP != 0,
            egress: false,
            drop: flags & DROP != 0,
            tag: None,
        });
        let reach = Reach { host: flags & HOST != 0, interface };
        Some(Self { rule: rule.ok()?, age, reach })
    }
}

trait Integer: Sized {
    fn put(self, to: &mut [u8]) -> usize;
    fn take(from: &mut &[u8]) -> Option<Self>;
}

macro_rules! integers {
    ($($t:ty)*) => {$(
        impl Integer for $t {
            fn put(self, to: &mut [u8]) -> usize {
                let bytes = self.to_le_bytes();
                to[..bytes.len()].copy_from_slice(&bytes);
                bytes.len()
            }

            fn take(from: &mut &[u8]) -> Option<Self> {
                let (bytes, rest) = from.split_first_chunk()?;
                *from = rest;
                Some(Self::from_le_bytes(*bytes))
            }
        }
    )*};
}

integers!(u8 u16 u32 u64 u128);

impl<T: Integer> Integer for Masked<T> {
    fn put(self, to: &mut [u8]) -> usize {
        let len = self.val.put(to);
        len + self.mask.put(&mut to[len..])
    }

    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(Self { val: T::take(from)?, mask: T::take(from)? })
    }
}

/// The longest rule fits: one filter of each layer, with Ethernet, IPv6 and ESP or GRE below a tunnel, outside and inside.
const _: () = assert!(17 + 2 * ((1 + 40) + (1 + 78) + (1 + 16) + (1 + 8)) <= RECORD_LEN);

struct Writer {
    bytes: [u8; RECORD_LEN],
    at: usize,
}

impl Writer {
    fn put(&mut self, value: impl Integer) {
        self.at += value.put(&mut self.bytes[self.at..]);
    }

    fn put_spec(&mut self, spec: &Spec) {
        let inner = if spec.inner { INNER } else { 0 };
        match spec.filter {
            Filter::Ethernet { dst, src, ether_type, vlan } => {
                self.put(1 | inner);
                self.put(dst);
                self.put(src);
                self.put(ether_type);
                self.put(vlan);
            }
            Filter::Ipv4 { src, dst, proto, tos, ttl, flags } => {
                self.put(2 | inner);
                self.put(src);
                self.put(dst);
                [proto, tos, ttl, flags].into_iter().for_each(|v| self.put(v));
            }
            Filter::Ipv6 { src, dst, flow_label, next_hdr, traffic_class, hop_limit } => {
                self.put(3 | inner);
                self.put(src);
                self.put(dst);
                self.put(flow_label);
                [next_hdr, traffic_class, hop_limit].into_iter().for_each(|v| self.put(v));
            }
            Filter::Tcp { dst, src } => {
                self.put(4 | inner);
                self.put(dst);
                self.put(src);
            }
            Filter::Udp { dst, src } => {
                self.put(5 | inner);
                self.put(dst);
                self.put(src);
            }
            Filter::Esp { spi, seq } => {
                self.put(6 | inner);
                self.put(spi);
                self.put(seq);
            }
            Filter::Gre { flags, protocol, key } => {
                self.put(7 | inner);
                self.put(flags);
                self.put(protocol);
                self.put(key);
            }
            Filter::Vxlan { vni } => {
                self.put(8 | inner);
                self.put(vni);
            }
            Filter::Mpls { entry } => {
                self.put(9 | inner);
                self.put(entry);
            }
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<T: Integer>(&mut self) -> Option<T> {
        T::take(&mut self.0)
    }

    fn take_spec(&mut self) -> Option<Spec> {
        let kind: u8 = self.take()?;
        // Fields are read in the order in which they stand here.
        let filter = match kind & !INNER {
            1 => Filter::Ethernet {
                dst: self.take()?,
                src: self.take()?,
                ether_type: self.take()?,
                vlan: self.take()?,
            },
            2 => Filter::Ipv4 {
                src: self.take()?,
                dst: self.take()?,
                proto: self.take()?,
                tos: self.take()?,
                ttl: self.take()?,
                flags: self.take()?,
            },
            3 => Filter::Ipv6 {
                src: self.take()?,
                dst: self.take()?,
                flow_label: self.take()?,
                next_hdr: self.take()?,
                traffic_class: self.take()?,
                hop_limit: self.take()?,
            },
            4 => Filter::Tcp { dst: self.take()?, src: self.take()? },
            5 => Filter::Udp { dst: self.take()?, src: self.take()? },
            6 => Filter::Esp { spi: self.take()?, seq: self.take()? },
            7 => Filter::Gre { flags: self.take()?, protocol: self.take()?, key: self.take()? },
            8 => Filter::Vxlan { vni: self.take()? },
            9 => Filter::Mpls { entry: self.take()? },
            _ => return None,
        };
        Some(Spec { filter, inner: kind & INNER != 0, over: None })
    }
}

#[cfg(test)]
mod tests;

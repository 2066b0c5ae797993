//! LIDs: for programs that know no other address (`qperf`, and others written for InfiniBand).
//!
//! RoCE has no LIDs; this device makes them up. A LID is 0x8000 and the low 14 bits of GID 0's IPv4 address, in the
//! range of InfiniBand's unicast LIDs. It reaches every host whose address differs in those bits only. An address with
//! any other LID and no GRH is refused, as on other RoCE devices.

use std::net::{IpAddr, Ipv4Addr};

const BASE: u16 = 0x8000;
const BITS: u32 = 14;
const MASK: u16 = (1 << BITS) - 1;

/// The LID of the host whose GID 0 is this address; 0, no LID, for IPv6.
pub fn of(ip: IpAddr) -> u16 {
    match ip {
        IpAddr::V4(ip) => BASE | (ip.to_bits() as u16 & MASK),
        IpAddr::V6(_) => 0,
    }
}

/// The address of the host with this LID, seen from one with the address `own`.
pub(crate) fn resolve(lid: u16, own: IpAddr) -> Option<IpAddr> {
    let IpAddr::V4(own) = own else { return None };
    (lid & !MASK == BASE).then(|| {
        Ipv4Addr::from_bits(own.to_bits() & !u32::from(MASK) | u32::from(lid & MASK)).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lid_leads_back_to_its_address() {
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        for (own, peer) in
            [("10.77.0.1", "10.77.0.2"), ("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.63.255")]
        {
            let lid = of(ip(peer));
            assert!((1..0xc000).contains(&lid), "a unicast LID");
            assert_eq!(resolve(lid, ip(own)), Some(ip(peer)));
        }
        assert_eq!(resolve(0, ip("10.0.0.1")), None);
        assert_eq!(resolve(1, ip("10.0.0.1")), None);
        assert_eq!(resolve(0xffff, ip("10.0.0.1")), None);
        assert_eq!(resolve(of(ip("10.0.0.2")), ip("fd00::1")), None);
        assert_eq!(of(ip("fd00::1")), 0);
    }
}

//! What the command knows about the devices: the one place that asks for it.
//!
//! PLACEHOLDER until `anyverbs::devices()` exists: the interfaces are read here, by the rules that the device follows.

use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::{io, ptr};

use anyhow::Context;
use serde::Serialize;

use crate::args::Settings;

/// One device with its one port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) node_guid: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) fw_ver: String,
    pub(crate) port: Port,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Port {
    /// `IBV_PORT_*`: 4 is ACTIVE, 1 is DOWN.
    pub(crate) state: u8,
    /// 5 is LINK_UP, 3 is DISABLED.
    pub(crate) phys_state: u8,
    /// Largest RDMA payload of a packet, in bytes.
    pub(crate) active_mtu: u32,
    /// In units of 100 Mbit/s.
    pub(crate) rate: u32,
    pub(crate) port_cap_flags: u32,
    pub(crate) gids: Vec<Gid>,
}

/// An entry of the GID table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Gid {
    pub(crate) index: u32,
    /// As an IPv6 address; an IPv4 address is mapped.
    pub(crate) gid: Ipv6Addr,
    pub(crate) address: IpAddr,
    /// The interface that has the address.
    pub(crate) ndev: String,
    pub(crate) ifindex: u32,
}

/// The devices that a program would see with these settings. An empty list has a reason, which is an error here.
pub(crate) fn list(settings: &Settings) -> anyhow::Result<Vec<Device>> {
    let mut addresses = addresses().context("cannot list the network interfaces")?;
    // The rule of index 0: the first IPv4 address that is not loopback, else 127.0.0.1.
    let first = addresses
        .iter()
        .position(|found| found.address.is_ipv4() && !found.loopback)
        .or_else(|| {
            addresses.iter().position(|found| found.address == IpAddr::V4(Ipv4Addr::LOCALHOST))
        })
        .context(
            "no network interface is up, not even loopback: run `ip link set lo up` as root",
        )?;
    addresses[..=first].rotate_right(1);
    let mtu = addresses[0].mtu;
    let node_guid = guid(addresses[0].mac);
    let gids = addresses
        .into_iter()
        .zip(0..)
        .map(|(found, index)| Gid {
            index,
            gid: match found.address {
                IpAddr::V4(address) => address.to_ipv6_mapped(),
                IpAddr::V6(address) => address,
            },
            address: found.address,
            ndev: found.ndev,
            ifindex: found.ifindex,
        })
        .collect();
    let name = settings.device.clone().or_else(|| std::env::var("ANYVERBS_DEVICE").ok());
    Ok(vec![Device {
        name: name.unwrap_or_else(|| "anyverbs0".into()),
        node_guid,
        vendor_id: 0xffff,
        vendor_part_id: 1,
        hw_ver: 0,
        fw_ver: env!("CARGO_PKG_VERSION").into(),
        port: Port {
            state: 4,
            phys_state: 5,
            active_mtu: payload(mtu),
            rate: 250,
            port_cap_flags: 0x0401_0000,
            gids,
        },
    }])
}

struct Address {
    ndev: String,
    ifindex: u32,
    address: IpAddr,
    loopback: bool,
    mtu: u32,
    mac: [u8; 6],
}

/// Every address of every interface that is up.
fn addresses() -> io::Result<Vec<Address>> {
    let mut first: *mut libc::ifaddrs = ptr::null_mut();
    // SAFETY: the call fills the pointer.
    if unsafe { libc::getifaddrs(&mut first) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let mut found = Vec::new();
    let mut next = first;
    // SAFETY: the list is valid until freeifaddrs, and each entry's address has the type that its family says.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        let up = entry.ifa_flags & libc::IFF_UP.cast_unsigned() != 0;
        // SAFETY: as above.
        let Some(address) = (unsafe { address(entry.ifa_addr) }).filter(|_| up) else {
            continue;
        };
        // SAFETY: the name is a NUL-terminated string.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) };
        let ndev = name.to_string_lossy().into_owned();
        found.push(Address {
            // SAFETY: the name is a NUL-terminated string.
            ifindex: unsafe { libc::if_nametoindex(name.as_ptr()) },
            loopback: entry.ifa_flags & libc::IFF_LOOPBACK.cast_unsigned() != 0,
            mtu: attribute(&ndev, "mtu").and_then(|text| text.parse().ok()).unwrap_or(1500),
            mac: attribute(&ndev, "address").and_then(|text| mac(&text)).unwrap_or_default(),
            ndev,
            address,
        });
    }
    // SAFETY: `first` came from getifaddrs and is not used again.
    unsafe { libc::freeifaddrs(first) };
    Ok(found)
}

/// # Safety
/// Null, or a socket address as long as its family says.
unsafe fn address(address: *const libc::sockaddr) -> Option<IpAddr> {
    // SAFETY: the caller's promise.
    unsafe {
        match i32::from(address.as_ref()?.sa_family) {
            libc::AF_INET => {
                let v4 = address.cast::<libc::sockaddr_in>().read_unaligned();
                Some(Ipv4Addr::from(v4.sin_addr.s_addr.to_ne_bytes()).into())
            }
            libc::AF_INET6 => {
                let v6 = address.cast::<libc::sockaddr_in6>().read_unaligned();
                Some(Ipv6Addr::from(v6.sin6_addr.s6_addr).into())
            }
            _ => None,
        }
    }
}

/// A one-line attribute of an interface.
pub(crate) fn attribute(ndev: &str, name: &str) -> Option<String> {
    let text = std::fs::read_to_string(format!("/sys/class/net/{ndev}/{name}")).ok()?;
    Some(text.trim_end().to_owned())
}

fn mac(text: &str) -> Option<[u8; 6]> {
    let mut mac = [0; 6];
    let mut bytes = text.split(':');
    for byte in &mut mac {
        *byte = u8::from_str_radix(bytes.next()?, 16).ok()?;
    }
    Some(mac)
}

/// The EUI-64 of a MAC address; loopback has none and gets a locally administered one.
fn guid(mac: [u8; 6]) -> u64 {
    let [a, b, c, d, e, f] = if mac == [0; 6] { [0, 0, 0, 0, 0, 1] } else { mac };
    u64::from_be_bytes([a ^ 2, b, c, 0xff, 0xfe, d, e, f])
}

/// The largest RDMA payload (256 to 4096 bytes) whose packet fits into an interface's MTU.
fn payload(mtu: u32) -> u32 {
    // GRH in place of the IP header, UDP, BTH, XRCETH, AtomicETH, ICRC.
    const HEADERS: u32 = 40 + 8 + 12 + 4 + 28 + 4;
    [4096, 2048, 1024, 512].into_iter().find(|payload| payload + HEADERS <= mtu).unwrap_or(256)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_follows_the_mtu() {
        for (mtu, want) in [
            (1280, 1024),
            (1500, 1024),
            (2200, 2048),
            (9000, 4096),
            (65536, 4096),
            (576, 256),
            (700, 512),
        ] {
            assert_eq!(payload(mtu), want, "{mtu}");
        }
    }

    #[test]
    fn index_zero_is_ipv4_and_every_entry_has_an_interface() {
        let devices = list(&Settings::default()).unwrap();
        let gids = &devices[0].port.gids;
        assert!(gids[0].address.is_ipv4());
        for (gid, index) in gids.iter().zip(0..) {
            assert_eq!(gid.index, index);
            assert!(gid.ifindex > 0 && !gid.ndev.is_empty());
        }
    }
}

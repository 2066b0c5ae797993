//! Addresses as sockets have them: `sockaddr_in`, `sockaddr_in6`, `sockaddr_ib`.

use std::{
    ffi::c_int,
    mem::{size_of, zeroed},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
    sync::Arc,
};

use anyverbs::{
    Gid, PKey,
    cm::{Address, IbAddress},
};
use libc::{AF_INET, AF_INET6, sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};

use crate::{
    abi::*,
    errno::Errno,
    rdmacm::{Id, id},
};

/// The length of an address of this family; `EINVAL` for other families.
fn length(family: c_int) -> Result<usize, Errno> {
    match family {
        AF_INET => Ok(size_of::<sockaddr_in>()),
        AF_INET6 => Ok(size_of::<sockaddr_in6>()),
        AF_IB => Ok(size_of::<sockaddr_ib>()),
        _ => Err(Errno::invalid("the family of the address is not known here")),
    }
}

/// A program's address: `EINVAL` for NULL and for families that there are none of.
///
/// # Safety
/// `addr` is NULL, or readable for the length of its family.
pub(crate) unsafe fn address(addr: *const sockaddr) -> Result<Address, Errno> {
    if addr.is_null() {
        return Err(Errno::invalid("the address is NULL"));
    }
    // SAFETY: every address begins with its family; programs need not align it.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    match c_int::from(family) {
        AF_INET => {
            // SAFETY: the caller's promise.
            let c = unsafe { addr.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(c.sin_addr.s_addr));
            Ok(Address::Ip(SocketAddrV4::new(ip, u16::from_be(c.sin_port)).into()))
        }
        AF_INET6 => {
            // SAFETY: the caller's promise.
            let c = unsafe { addr.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(c.sin6_addr.s6_addr);
            let port = u16::from_be(c.sin6_port);
            let address =
                SocketAddrV6::new(ip, port, u32::from_be(c.sin6_flowinfo), c.sin6_scope_id);
            Ok(Address::Ip(address.into()))
        }
        AF_IB => {
            // SAFETY: the caller's promise.
            let c = unsafe { addr.cast::<sockaddr_ib>().read_unaligned() };
            Ok(Address::Ib(IbAddress {
                pkey: PKey(u16::from_be(c.sib_pkey)),
                flow_info: u32::from_be(c.sib_flowinfo),
                gid: Gid(c.sib_addr),
                sid: u64::from_be(c.sib_sid),
                sid_mask: u64::from_be(c.sib_sid_mask),
                scope_id: c.sib_scope_id,
            }))
        }
        _ => Err(Errno::invalid("the family of the address is not known here")),
    }
}

/// As `address`, where the program gives the length too: `EINVAL` if it is too short.
///
/// # Safety
/// `addr` is NULL, or readable for `len` bytes.
pub(crate) unsafe fn address_of_length(
    addr: *const sockaddr,
    len: socklen_t,
) -> Result<Address, Errno> {
    if addr.is_null() || (len as usize) < size_of::<libc::sa_family_t>() {
        return Err(Errno::invalid("the address is NULL, or too short"));
    }
    // SAFETY: the caller's promise; the family fits.
    let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
    if (len as usize) < length(family.into())? {
        return Err(Errno::invalid("the address is too short for its family"));
    }
    // SAFETY: `len` covers the family's length.
    unsafe { address(addr) }
}

/// An address as C has it.
pub(crate) fn storage(address: &Address) -> sockaddr_storage {
    // SAFETY: bytes.
    let mut storage: sockaddr_storage = unsafe { zeroed() };
    let to = &raw mut storage;
    match address {
        Address::Ip(SocketAddr::V4(v4)) => {
            // SAFETY: integers and bytes.
            let mut c: sockaddr_in = unsafe { zeroed() };
            c.sin_family = AF_INET as _;
            c.sin_port = v4.port().to_be();
            c.sin_addr.s_addr = u32::from(*v4.ip()).to_be();
            // SAFETY: a storage holds an address of any family.
            unsafe { to.cast::<sockaddr_in>().write(c) };
        }
        Address::Ip(SocketAddr::V6(v6)) => {
            // SAFETY: integers and bytes.
            let mut c: sockaddr_in6 = unsafe { zeroed() };
            c.sin6_family = AF_INET6 as _;
            c.sin6_port = v6.port().to_be();
            c.sin6_flowinfo = v6.flowinfo().to_be();
            c.sin6_addr.s6_addr = v6.ip().octets();
            c.sin6_scope_id = v6.scope_id();
            // SAFETY: as above.
            unsafe { to.cast::<sockaddr_in6>().write(c) };
        }
        Address::Ib(ib) => {
            let c = sockaddr_ib {
                sib_family: AF_IB as _,
                sib_pkey: ib.pkey.0.to_be(),
                sib_flowinfo: ib.flow_info.to_be(),
                sib_addr: ib.gid.0,
                sib_sid: ib.sid.to_be(),
                sib_sid_mask: ib.sid_mask.to_be(),
                sib_scope_id: ib.scope_id,
            };
            // SAFETY: as above.
            unsafe { to.cast::<sockaddr_ib>().write(c) };
        }
    }
    storage
}

/// The port of an id's address, in host byte order; 0 if it has none.
fn port(id: *mut rdma_cm_id, of: impl FnOnce(*mut rdma_addr) -> *const sockaddr) -> u16 {
    let found: Result<Arc<Id>, _> = id::find(id);
    let Ok(id) = found else { return 0 };
    // SAFETY: the object is live; only the field's address is taken.
    let route = unsafe { &raw mut (*id.public()).route.addr };
    // SAFETY: both unions are as large as any address.
    match unsafe { address(of(route)) } {
        Ok(Address::Ip(ip)) => ip.port(),
        Ok(Address::Ib(ib)) => ib.sid as u16,
        Err(_) => 0,
    }
}

/// `rdma_get_src_port`: network byte order; 0 if the id is not bound.
pub(crate) unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: `port` passes a live field; only an address is taken.
    port(id, |route| unsafe { &raw const (*route).src.src_addr }).to_be()
}

/// `rdma_get_dst_port`: network byte order; 0 if the id has no peer.
pub(crate) unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: as in `rdma_get_src_port`.
    port(id, |route| unsafe { &raw const (*route).dst.dst_addr }).to_be()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(address_: Address) {
        let c = storage(&address_);
        // SAFETY: a storage is large enough for any family.
        assert_eq!(unsafe { address((&raw const c).cast()) }, Ok(address_));
    }

    #[test]
    fn addresses_come_back_as_they_were() {
        round(Address::Ip("10.1.2.3:7471".parse().unwrap()));
        round(Address::Ip(SocketAddrV6::new("fe80::1".parse().unwrap(), 18515, 7, 3).into()));
        round(Address::Ib(IbAddress {
            pkey: PKey(0xffff),
            flow_info: 5,
            gid: Gid([9; 16]),
            sid: 0x0106_1234,
            sid_mask: !0,
            scope_id: 2,
        }));
    }

    #[test]
    fn other_families_null_and_short_addresses_are_refused() {
        let mut c = storage(&Address::Ip("10.1.2.3:1".parse().unwrap()));
        let p = (&raw const c).cast::<sockaddr>();
        // SAFETY: as above; NULL is allowed.
        unsafe {
            assert_eq!(address(std::ptr::null()), Err(Errno::said(libc::EINVAL)));
            assert!(address_of_length(p, 16).is_ok());
            assert_eq!(address_of_length(p, 15), Err(Errno::said(libc::EINVAL)));
            assert_eq!(address_of_length(p, 1), Err(Errno::said(libc::EINVAL)));
        }
        c.ss_family = libc::AF_UNIX as _;
        // SAFETY: as above.
        assert_eq!(unsafe { address((&raw const c).cast()) }, Err(Errno::said(libc::EINVAL)));
    }
}

//! Addresses of sockets.

use std::ffi::c_int;

use anyverbs::cm::Address;
use libc::{sockaddr, sockaddr_storage, socklen_t};

use anyverbs_rsocket::Call;
use anyverbs_sanitizers as sanitizers;

use super::zero;
use crate::{
    cancel::{Uncancelled, holding},
    errno::{Errno, minus_one},
    rdmacm::sockaddr::{address_of_length, storage},
};

/// Gives the program an address: as much as it has room for, and the length that it would have taken.
///
/// # Safety
/// `len` may be read and written; `addr` may be written for that length.
pub(super) unsafe fn give_address(
    address: &Address,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> Result<(), Errno> {
    if addr.is_null() && len.is_null() {
        return Ok(());
    }
    if len.is_null() {
        return Err(Errno::said(libc::EFAULT));
    }
    let full = match address {
        Address::Ip(a) if a.is_ipv4() => size_of::<libc::sockaddr_in>(),
        Address::Ip(_) => size_of::<libc::sockaddr_in6>(),
        Address::Ib(_) => size_of::<crate::abi::sockaddr_ib>(),
    };
    let storage: sockaddr_storage = storage(address);
    // SAFETY: the caller's promise.
    let room = unsafe { len.read_unaligned() } as usize;
    if !addr.is_null() {
        // SAFETY: `addr` has that room, and a storage is longer than any address.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const storage).cast::<u8>(),
                addr.cast(),
                room.min(full),
            );
        }
        sanitizers::initialised_bytes(addr.cast(), room.min(full));
    }
    // SAFETY: the caller's promise.
    unsafe { len.write_unaligned(full as socklen_t) };
    sanitizers::initialised(len);
    Ok(())
}

/// `rbind`.
pub(crate) unsafe extern "C" fn rbind(
    socket: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rbind",
        (|| {
            let socket = anyverbs_rsocket::get(socket)?;
            // SAFETY: the program passes an address of that length, or NULL.
            let address = unsafe { address_of_length(addr, len) }?;
            Ok(socket.bind(&address)?)
        })(),
    )
}

/// `rconnect`; to `AF_UNSPEC` it ends a datagram socket's connection.
pub(crate) unsafe extern "C" fn rconnect(
    socket: c_int,
    addr: *const sockaddr,
    len: socklen_t,
) -> c_int {
    let _call = Call::begin();
    zero(
        "rconnect",
        (|| {
            let socket = anyverbs_rsocket::get(socket)?;
            if !addr.is_null() && len as usize >= size_of::<libc::sa_family_t>() {
                // SAFETY: the family fits.
                let family = unsafe { (&raw const (*addr).sa_family).read_unaligned() };
                if c_int::from(family) == libc::AF_UNSPEC {
                    return Ok(socket.disconnect()?);
                }
            }
            // SAFETY: the program passes an address of that length, or NULL.
            let address = unsafe { address_of_length(addr, len) }?;
            Ok(holding(socket, |socket| socket.connect(&address))?)
        })(),
    )
}

/// `raccept`. The new socket is a blocking one.
pub(crate) unsafe extern "C" fn raccept(
    socket: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let _call = Call::begin();
    minus_one(
        "raccept",
        (|| {
            let listener = anyverbs_rsocket::get(socket)?;
            let fd = holding(listener, |listener| anyverbs_rsocket::accept(listener, 0))?;
            if !addr.is_null() {
                let peer = anyverbs_rsocket::get(fd).and_then(|new| new.peer_address());
                // SAFETY: the program passes an address with its length.
                let given =
                    peer.map_err(Errno::from).and_then(|a| unsafe { give_address(&a, addr, len) });
                if let Err(errno) = given {
                    let _ = anyverbs_rsocket::close(fd);
                    return Err(errno);
                }
            }
            Ok(fd)
        })(),
    )
}

/// `rgetsockname`.
pub(crate) unsafe extern "C" fn rgetsockname(
    socket: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rgetsockname",
        (|| {
            let socket = anyverbs_rsocket::get(socket)?;
            let unbound = || {
                let any = match socket.family() {
                    libc::AF_INET => std::net::SocketAddr::from(([0; 4], 0)),
                    _ => std::net::SocketAddr::from(([0u16; 8], 0)),
                };
                Address::Ip(any)
            };
            let address = socket.local_address()?.unwrap_or_else(unbound);
            // SAFETY: the program passes an address with its length.
            unsafe { give_address(&address, addr, len) }
        })(),
    )
}

/// `rgetpeername`.
pub(crate) unsafe extern "C" fn rgetpeername(
    socket: c_int,
    addr: *mut sockaddr,
    len: *mut socklen_t,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    zero(
        "rgetpeername",
        (|| {
            let address = anyverbs_rsocket::get(socket)?.peer_address()?;
            // SAFETY: the program passes an address with its length.
            unsafe { give_address(&address, addr, len) }
        })(),
    )
}

//! Ports of ids.

use std::io;
use std::mem::ManuallyDrop;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use anyverbs_net::{Reservation, ServiceAddress};
use anyverbs_proto::cm::ListenAddress;
use anyverbs_proto::cm::id::{PortSpace, ServiceId};

use super::Gsi;
use super::address::Address;
use super::error::CmError;
use super::random::random;

/// Ports for ids that connect without a port of their own. No peer looks for them, so they are not reserved.
const FIRST: u16 = 32_768;
const COUNT: u16 = 28_232;

/// A port that an id has taken on this host, at its address; given back by drop.
#[derive(Debug)]
pub(super) struct Port {
    gsi: &'static Gsi,
    number: u16,
    reservation: ManuallyDrop<Reservation>,
}

impl Port {
    /// Takes the port of `address`, or a free one where that is 0. Two may share it as long as neither listens.
    pub(super) fn take(
        gsi: &'static Gsi,
        space: PortSpace,
        address: &Address,
        share: bool,
        only_family: bool,
    ) -> Result<(u16, Self), CmError> {
        let at = match address.listens_at(only_family) {
            ListenAddress::Any => ServiceAddress::Any,
            ListenAddress::AnyV4 => ServiceAddress::AnyV4,
            ListenAddress::AnyV6 => ServiceAddress::AnyV6,
            ListenAddress::Ip(ip) => ServiceAddress::Ip(ip),
        };
        let service = |port| ServiceId::of_port(space, port).0;
        let reserve = |port| {
            let reserved = gsi.services.reserve(service(port), at, share);
            reserved.map(|reservation| (port, reservation))
        };
        let taken = match address.port() {
            0 => gsi.services.reserve_ephemeral(service, at, share),
            port => reserve(port),
        };
        let (port, reservation) = taken.map_err(|error| refused(&error, address.port()))?;
        Ok((port, Self { gsi, number: port, reservation: ManuallyDrop::new(reservation) }))
    }

    /// It is not shared any more.
    pub(super) fn make_exclusive(&self) -> Result<(), CmError> {
        self.reservation.make_exclusive().map_err(|error| refused(&error, self.number))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // In a forked child it is still the parent's, as are the locks.
        if self.gsi.core().is_current() {
            // SAFETY: dropped here only, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.reservation) };
        }
    }
}

/// `port` is 0 if any would do.
fn refused(error: &io::Error, port: u16) -> CmError {
    let errno = match error.kind() {
        io::ErrorKind::AddrInUse => return CmError::InUse(port),
        io::ErrorKind::AddrNotAvailable if port == 0 => return CmError::NoPort,
        io::ErrorKind::AddrNotAvailable => return CmError::NotAvailable(port),
        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        _ => error.raw_os_error().unwrap_or(libc::EIO),
    };
    CmError::System { what: "reserve the port", errno }
}

/// A port for an id that connects.
pub(super) fn any() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    static START: OnceLock<u16> = OnceLock::new();
    let start = *START.get_or_init(|| random() as u16);
    FIRST + start.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % COUNT
}

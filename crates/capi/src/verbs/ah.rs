//! Address handles, and addresses as C has them.

use std::{
    collections::VecDeque,
    ffi::c_int,
    net::IpAddr,
    ptr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicPtr, Ordering},
    },
};

use anyverbs::{AddressVector, AhAttr, Gid, GidEntry, QKey, Qpn, UdDest};
use parking_lot::Mutex;

use crate::{
    abi::*,
    cancel::Uncancelled,
    check,
    errno::{Errno, give, minus_one, pointer, value},
    faults,
    object::{self, Object},
    verbs::{Context, Pd, answering, watched::activity},
};

pub(crate) type Ah = Object<ibv_ah>;

/// The device's part of an AH.
pub(crate) struct AhInner {
    pub(crate) device: anyverbs::Ah,
    /// Destroyed: the data path, which does not look pointers up, finds out here.
    pub(crate) dead: AtomicBool,
    /// `ibv_ah.context` during its life.
    _context: Arc<Context>,
}

/// Destroyed AHs whose memory is kept a while, so that posting with one is refused instead of reading freed memory. AHs
/// are small, and the mistake is common (S3.2).
type Destroyed = Mutex<VecDeque<Arc<Ah>>>;

/// A forked child begins with another: a thread that only its parent has may hold the lock. The child keeps the
/// parent's AHs for good.
static DESTROYED: AtomicPtr<Destroyed> = AtomicPtr::new(ptr::null_mut());
const DESTROYED_MAX: usize = 1024;

fn destroyed() -> &'static Destroyed {
    let destroyed = DESTROYED.load(Ordering::Acquire);
    if !destroyed.is_null() {
        // SAFETY: a leaked box.
        return unsafe { &*destroyed };
    }
    let new = Box::into_raw(Box::<Destroyed>::default());
    match DESTROYED.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            // SAFETY: the handler is valid for the life of the process: this object is never unloaded.
            unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
            // SAFETY: just leaked.
            unsafe { &*new }
        }
        Err(theirs) => {
            // SAFETY: `new` was never shared; `theirs` is a leaked box.
            unsafe {
                drop(Box::from_raw(new));
                &*theirs
            }
        }
    }
}

unsafe extern "C" fn in_child() {
    DESTROYED.store(Box::into_raw(Box::<Destroyed>::default()), Ordering::Release);
}

/// A C address as the device takes it.
pub(crate) fn ah_attr(attr: &ibv_ah_attr) -> AhAttr {
    AhAttr {
        // SAFETY: any 16 bytes are a GID.
        dgid: Gid(unsafe { attr.grh.dgid.raw }),
        sgid_index: attr.grh.sgid_index,
        hop_limit: attr.grh.hop_limit,
        traffic_class: attr.grh.traffic_class,
        flow_label: attr.grh.flow_label,
        is_global: attr.is_global != 0,
        sl: attr.sl,
        static_rate: attr.static_rate,
        src_path_bits: attr.src_path_bits,
        dlid: attr.dlid,
        port: attr.port_num,
    }
}

/// An address as the device takes it, for C.
pub(crate) fn c_ah_attr_of(attr: &AhAttr) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: attr.dgid.0 },
            flow_label: attr.flow_label,
            sgid_index: attr.sgid_index,
            hop_limit: attr.hop_limit,
            traffic_class: attr.traffic_class,
        },
        dlid: attr.dlid,
        sl: attr.sl,
        src_path_bits: attr.src_path_bits,
        static_rate: attr.static_rate,
        is_global: attr.is_global.into(),
        port_num: attr.port,
    }
}

/// A resolved address as C has it. All zeros where there is none.
pub(crate) fn c_ah_attr(av: &AddressVector) -> ibv_ah_attr {
    ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: av.dgid.0 },
            flow_label: av.flow_label,
            sgid_index: av.sgid_index,
            hop_limit: av.hop_limit,
            traffic_class: av.traffic_class,
        },
        dlid: av.dlid,
        sl: av.sl,
        src_path_bits: av.src_path_bits,
        static_rate: av.static_rate,
        is_global: u8::from(!av.dgid.is_zero()),
        port_num: av.port,
    }
}

/// `ibv_create_ah`: NULL with `errno` on failure.
///
/// # Safety
/// `attr` is NULL or readable.
pub(crate) unsafe extern "C" fn ibv_create_ah(
    pd: *mut ibv_pd,
    attr: *mut ibv_ah_attr,
) -> *mut ibv_ah {
    faults::may_fail!("ibv_create_ah", pointer);
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    pointer("ibv_create_ah", attr.ok_or(Errno::NULL).and_then(|attr| create(pd, attr)))
}

fn create(pd: *mut ibv_pd, attr: &ibv_ah_attr) -> Result<*mut ibv_ah, Errno> {
    let pd: Arc<Pd> = object::find(pd)?;
    let device = pd.inner.device.create_ah(&ah_attr(attr))?;
    let handle = object::new_handle();
    let context = Arc::clone(&pd.inner.context);
    let public = ibv_ah { context: context.pointer(), pd: pd.public(), handle };
    let inner = AhInner { device, dead: AtomicBool::new(false), _context: context };
    let published = object::publish(public, handle, inner);
    check::made_of(published, &[pd.public() as usize]);
    Ok(published)
}

/// `ibv_destroy_ah`: 0, or the errno value. Sends that were posted go on (S3.2).
pub(crate) unsafe extern "C" fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int {
    let _uncancelled = Uncancelled::new();
    value(
        "ibv_destroy_ah",
        object::find(ah).and_then(|ah: Arc<Ah>| {
            check::ending(ah.public(), activity, || Ok(ah.inner.device.destroy()?))?;
            ah.inner.dead.store(true, Ordering::Release);
            object::retire(&ah)?;
            let mut destroyed = destroyed().lock();
            let oldest =
                if destroyed.len() == DESTROYED_MAX { destroyed.pop_front() } else { None };
            destroyed.push_back(ah);
            // Not under the lock: the end of one may end its context.
            drop(destroyed);
            drop(oldest);
            Ok(())
        }),
    )
}

/// Sender and receiver of a datagram, from the 40 bytes in front of it.
struct GrhAddresses {
    source: Gid,
    destination: Gid,
    flow_label: u32,
    traffic_class: u8,
}

/// Reads a GRH: an IPv6 header, or 20 bytes of nothing and an IPv4 header (RoCEv2, A17.4.5.2).
fn route(grh: &[u8; 40]) -> Option<GrhAddresses> {
    let gid = |bytes: &[u8]| -> Option<Gid> {
        let gid = match bytes.len() {
            4 => Gid::from(IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?)),
            _ => Gid(bytes.try_into().ok()?),
        };
        Some(gid)
    };
    let v4 = &grh[20..];
    if v4[0] == 0x45 && checksum(v4) == 0xffff {
        return Some(GrhAddresses {
            source: gid(&v4[12..16])?,
            destination: gid(&v4[16..20])?,
            flow_label: 0,
            traffic_class: v4[1],
        });
    }
    let first = u32::from_be_bytes([grh[0], grh[1], grh[2], grh[3]]);
    (first >> 28 == 6).then_some(GrhAddresses {
        source: gid(&grh[8..24])?,
        destination: gid(&grh[24..40])?,
        flow_label: first & 0xf_ffff,
        traffic_class: (first >> 20) as u8,
    })
}

/// The ones' complement sum of an IPv4 header: 0xffff if it is whole.
fn checksum(header: &[u8]) -> u16 {
    let sum: u32 =
        header.chunks_exact(2).map(|b| u32::from(u16::from_be_bytes([b[0], b[1]]))).sum();
    let folded = (sum & 0xffff) + (sum >> 16);
    ((folded & 0xffff) + (folded >> 16)) as u16
}

/// The GID table's entry that a datagram to `destination` came in by: the address itself; for a group, the first
/// address of its family.
fn receiver(gids: &[GidEntry], destination: Gid) -> Option<&GidEntry> {
    let same_family = |e: &&GidEntry| e.gid.to_ip().is_ipv4() == destination.to_ip().is_ipv4();
    gids.iter()
        .find(|e| e.gid == destination)
        .or_else(|| gids.iter().find(same_family).filter(|_| destination.is_multicast()))
}

/// `ibv_init_ah_from_wc`: the address of a datagram's sender; 0, or -1 with `errno`.
///
/// # Safety
/// The pointers are NULL or valid.
pub(crate) unsafe extern "C" fn ibv_init_ah_from_wc(
    context_: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let (wc, grh) = unsafe { (wc.as_ref(), grh.cast::<[u8; 40]>().as_ref()) };
    minus_one(
        "ibv_init_ah_from_wc",
        sender(context_, port, wc, grh).and_then(|found| {
            if attr.is_null() {
                return Err(Errno::NULL);
            }
            // SAFETY: the caller's promise.
            unsafe { give(attr, found) };
            Ok(0)
        }),
    )
}

fn sender(
    context_: *mut ibv_context,
    port: u8,
    wc: Option<&ibv_wc>,
    grh: Option<&[u8; 40]>,
) -> Result<ibv_ah_attr, Errno> {
    let context = answering(context_)?;
    let (Some(wc), Some(grh)) = (wc, grh) else { return Err(Errno::NULL) };
    context.inner.device.port_attr(port)?;
    if wc.wc_flags & IBV_WC_GRH == 0 {
        return Err(Errno::invalid(
            "wc_flags lacks IBV_WC_GRH, and the GRH says where the datagram came from",
        ));
    }
    let route = route(grh).ok_or(Errno::invalid("the GRH has no addresses of IPv4 or IPv6"))?;
    let mut gids = context.inner.device.addresses()?;
    gids.retain(|entry| entry.port == port);
    let own = receiver(&gids, route.destination).ok_or(Errno::because(
        libc::ENOENT,
        "the datagram was for an address that the port does not have",
    ))?;
    Ok(ibv_ah_attr {
        grh: ibv_global_route {
            dgid: ibv_gid { raw: route.source.0 },
            flow_label: route.flow_label,
            sgid_index: own.index as u8,
            hop_limit: 0xff,
            traffic_class: route.traffic_class,
        },
        dlid: wc.slid,
        // The service level of the completion describes its headers.
        sl: 0,
        src_path_bits: wc.dlid_path_bits,
        static_rate: 0,
        is_global: 1,
        port_num: port,
    })
}

/// `ibv_create_ah_from_wc`: an AH for the sender of a datagram; NULL with `errno` on failure.
///
/// # Safety
/// `wc` and `grh` are NULL or valid.
pub(crate) unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let (wc, grh) = unsafe { (wc.as_ref(), grh.cast::<[u8; 40]>().as_ref()) };
    pointer(
        "ibv_create_ah_from_wc",
        object::find(pd).and_then(|found: Arc<Pd>| {
            let attr = sender(found.inner.context.pointer(), port, wc, grh)?;
            create(pd, &attr)
        }),
    )
}

/// The value for "no VLAN".
const NO_VLAN: u16 = 0xffff;

/// `ibv_resolve_eth_l2_from_gid`: 0, or the negative errno value, as in rdma-core. `vid` is `0xffff` without a VLAN. May take
/// three seconds.
///
/// # Safety
/// `attr` is NULL or readable; `mac` has 6 writable bytes, or is NULL; `vid` is NULL or writable.
pub(crate) unsafe extern "C" fn ibv_resolve_eth_l2_from_gid(
    context_: *mut ibv_context,
    attr: *mut ibv_ah_attr,
    mac: *mut u8,
    vid: *mut u16,
) -> c_int {
    let _uncancelled = Uncancelled::new();
    // SAFETY: the caller's promise.
    let attr = unsafe { attr.as_ref() };
    let resolved = answering(context_).and_then(|context| {
        let attr = attr.filter(|_| !mac.is_null()).ok_or(Errno::NULL)?;
        let (found, vlan) = context.inner.device.resolve_ethernet(&ah_attr(attr))?;
        // SAFETY: the caller's promise.
        unsafe {
            give(mac.cast::<[u8; 6]>(), found);
            if !vid.is_null() {
                give(vid, vlan.unwrap_or(NO_VLAN));
            }
        }
        Ok(())
    });
    -value("ibv_resolve_eth_l2_from_gid", resolved)
}

/// The destination of a datagram. An AH of another protection domain is refused by the queue.
///
/// # Safety
/// `ah` is NULL, or an AH that is live or was destroyed a short while ago.
pub(crate) unsafe fn destination(ah: *mut ibv_ah, qpn: u32, qkey: u32) -> Result<UdDest, Errno> {
    // SAFETY: the caller's promise.
    let ah = unsafe { object::deref(ah) }.ok_or(Errno::invalid("the address handle is NULL"))?;
    if ah.inner.dead.load(Ordering::Acquire) {
        return Err(Errno::invalid("the address handle was destroyed"));
    }
    Ok(ah.inner.device.dest(Qpn::new(qpn), QKey(qkey)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_can_destroy_while_a_thread_of_its_parent_does() {
        let destroying = destroyed().lock();
        // SAFETY: the child runs only the code below, and ends without returning to the test harness.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_free = destroyed().try_lock().is_some();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!is_free)) };
        }
        drop(destroying);
        let mut status = -1;
        // SAFETY: waits for our child.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "the lock is held for ever");
        assert!(destroyed().try_lock().is_some(), "the parent's");
    }

    #[test]
    fn a_grh_of_either_family_names_the_sender() {
        let mut grh = [0u8; 40];
        grh[20..].copy_from_slice(&[
            0x45, 0x20, 0, 60, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2,
        ]);
        let sum = !checksum(&grh[20..]);
        grh[30..32].copy_from_slice(&sum.to_be_bytes());
        let found = route(&grh).unwrap();
        assert_eq!(found.source.to_ip(), "10.0.0.1".parse::<IpAddr>().unwrap());
        assert_eq!(found.destination.to_ip(), "10.0.0.2".parse::<IpAddr>().unwrap());
        assert_eq!(found.traffic_class, 0x20);
        // With a wrong checksum it is no header at all.
        grh[31] ^= 1;
        assert!(route(&grh).is_none());

        let mut grh = [0u8; 40];
        grh[..4].copy_from_slice(&0x6a5b_4321u32.to_be_bytes());
        grh[8..10].copy_from_slice(&[0xfe, 0x80]);
        grh[23] = 1;
        grh[39] = 2;
        let found = route(&grh).unwrap();
        assert_eq!(found.source.to_ip(), "fe80::1".parse::<IpAddr>().unwrap());
        assert_eq!((found.flow_label, found.traffic_class), (0xb_4321, 0xa5));
    }
}

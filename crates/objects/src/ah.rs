//! Address handle: where a datagram goes.

use std::net::{IpAddr, SocketAddr, SocketAddrV6};
use std::sync::Arc;

use anyverbs_locks::{Mutex, rank};
use anyverbs_proto::types::{Gid, QKey, Qpn};
use anyverbs_proto::wr::{AddressVector, UdDest};

use crate::base::{Core, Ticket};
use crate::error::{CreateError, DestroyError};
use crate::gid::{GidEntry, GidKind};
use crate::holders::{Held, Holder};
use crate::lid;
use crate::pd::{Pd, PdCell};

/// Attributes of an address handle or of a queue pair's path (`struct ibv_ah_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct AhAttr {
    /// The peer's port, or a multicast group.
    pub dgid: Gid,
    /// Index of our address in the GID table.
    pub sgid_index: u8,
    /// Hop limit or TTL.
    pub hop_limit: u8,
    /// Traffic class or TOS.
    pub traffic_class: u8,
    /// IPv6 flow label, 20 bits.
    pub flow_label: u32,
    /// Whether those above hold. Otherwise `dlid` must be the LID of a device of this kind.
    pub is_global: bool,
    /// Service level.
    pub sl: u8,
    /// Static rate (`enum ibv_rate`): sends that way are paced.
    pub static_rate: u8,
    /// Source path bits, as given.
    pub src_path_bits: u8,
    /// Destination LID; without meaning where `is_global`.
    pub dlid: u16,
    /// Port, from 1.
    pub port: u8,
}

/// Address handle (`ibv_create_ah`). A posted send keeps a copy of the parts that it needs: the handle may be destroyed
/// at once.
#[derive(Debug)]
pub struct Ah {
    core: &'static Core,
    av: AddressVector,
    pd: u32,
    hold: Mutex<rank::ObjectHold, Option<(Held<PdCell>, Ticket)>>,
}

impl Ah {
    fn create(pd: &Arc<PdCell>, device: usize, attr: &AhAttr) -> Result<Self, CreateError> {
        let core = pd.core;
        core.may_make(device)?;
        let av = resolve(core, device, attr)?;
        // No datagram would reach anybody. The system would take it for an address of this host.
        if av.dgid.to_ip().is_unspecified() {
            return Err(CreateError::Invalid("address: grh.dgid is that of no port (::)"));
        }
        check_route(core, &av)?;
        let ticket = core.take(device, |all| &all.ah)?;
        let hold = Held::new(pd, Holder::Ah).ok_or(CreateError::Foreign("protection domain"))?;
        Ok(Self { core, av, pd: pd.number, hold: Mutex::new(Some((hold, ticket))) })
    }

    /// The resolved address.
    #[must_use]
    pub fn av(&self) -> &AddressVector {
        &self.av
    }

    /// A datagram's destination: queue pair `qpn` there, with its Q_Key.
    #[must_use]
    pub fn dest(&self, qpn: Qpn, qkey: QKey) -> UdDest {
        UdDest::new(self.pd, self.av, qpn, qkey)
    }

    /// Destroys it (`ibv_destroy_ah`).
    ///
    /// # Errors
    /// [`DestroyError::Gone`].
    pub fn destroy(&self) -> Result<(), DestroyError> {
        if !self.core.is_current() {
            return Ok(());
        }
        self.hold.lock().take().map(drop).ok_or(DestroyError::Gone)
    }
}

/// Refuses an address to which the system has no route: no datagram would leave. Kernel drivers resolve it here as well.
fn check_route(core: &Core, av: &AddressVector) -> Result<(), CreateError> {
    if av.dgid.is_multicast() || core.gids.contains(av.dgid) {
        return Ok(());
    }
    let _uncancelled = anyverbs_net::Uncancelled::new();
    let (from, to) = (av.sgid.to_ip(), av.dgid.to_ip());
    if av.no_way().is_some() {
        let (index, errno) = (av.sgid_index, libc::ENETUNREACH);
        return Err(CreateError::Unreachable { from, index, to, errno });
    }
    let address = |ip: IpAddr, port| match ip {
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, av.scope_id).into(),
        IpAddr::V4(_) => SocketAddr::new(ip, port),
    };
    let connected = anyverbs_net::bound_udp_socket(address(from, 0))
        .and_then(|socket| socket.connect(address(to, core.config.udp_port)));
    let is_of_route = |errno: &i32| {
        matches!(
            *errno,
            libc::ENETUNREACH | libc::EHOSTUNREACH | libc::EINVAL | libc::EACCES | libc::EPERM
        )
    };
    match connected.err().and_then(|error| error.raw_os_error()).filter(is_of_route) {
        // The kernel's word for a source that has no way to the destination.
        Some(libc::EINVAL) => {
            let (index, errno) = (av.sgid_index, libc::ENETUNREACH);
            Err(CreateError::Unreachable { from, index, to, errno })
        }
        Some(errno) => Err(CreateError::Unreachable { from, index: av.sgid_index, to, errno }),
        // A lack of descriptors is none of routes.
        None => Ok(()),
    }
}

/// See `Context::resolve_ethernet`.
pub fn resolve_ethernet(
    core: &Core,
    device: usize,
    attr: &AhAttr,
) -> Result<([u8; 6], Option<u16>), CreateError> {
    let av = resolve(core, device, attr)?;
    let system = |e: std::io::Error| CreateError::System(e.raw_os_error().unwrap_or(libc::EIO));
    let port = port(core, device, attr)?;
    let entry = core.gids.entry(port, av.sgid_index.into());
    let source = entry.ok_or_else(|| no_gid(core, attr.port, port, av.sgid_index))?.interface;
    let interfaces = anyverbs_net::interfaces().map_err(system)?;
    let vlan = interfaces.iter().find(|i| i.index == source).and_then(|i| i.vlan);
    let scope = if av.scope_id == 0 { 0 } else { source };
    let mac = anyverbs_net::ethernet_address(av.dgid.to_ip(), scope).map_err(system)?;
    Ok((mac, vlan))
}

/// The port of an address.
fn port(core: &Core, device: usize, attr: &AhAttr) -> Result<usize, CreateError> {
    core.port(device, attr.port).ok_or_else(|| core.no_port(device, attr.port))
}

/// The table has no address at the index.
#[cold]
fn no_gid(core: &Core, number: u8, port: usize, index: u8) -> CreateError {
    let last = core.gids.listed(port).last().map(|entry| entry.index as u32);
    let taken_by = core.gids.withheld_by(port, index.into());
    CreateError::NoGid { port: number, index: index.into(), last, taken_by }
}

/// Checks an address and completes it from the GID table of its port of a device.
pub fn resolve(core: &Core, device: usize, attr: &AhAttr) -> Result<AddressVector, CreateError> {
    let port = port(core, device, attr)?;
    let from_lid;
    let attr = if attr.is_global {
        attr
    } else {
        from_lid = globalize(core, port, attr).ok_or(CreateError::Invalid(
            "address without a global route (GRH), which RoCE needs",
        ))?;
        &from_lid
    };
    let source = core.gids.entry(port, attr.sgid_index.into());
    let source = source.ok_or_else(|| no_gid(core, attr.port, port, attr.sgid_index))?;
    if !source.carries() {
        return Err(no_traffic(core, &source));
    }
    let dest = attr.dgid.to_ip();
    let (mut sgid, mut scope_id) = (source.gid, 0);
    if attr.dgid.is_multicast() {
        // A group's datagrams leave by the interface of the GID, from an address of the group's family.
        scope_id = source.interface;
        if sgid.to_ip().is_ipv4() != dest.is_ipv4() {
            sgid = core.gids.beside(&source, dest.is_ipv4()).ok_or(CreateError::Invalid(
                "GID index: no address of the group's family beside it",
            ))?;
        }
    } else if matches!(dest, IpAddr::V6(ip) if ip.is_unicast_link_local()) {
        scope_id = source.interface;
    }
    Ok(AddressVector {
        dgid: attr.dgid,
        sgid,
        sgid_index: attr.sgid_index,
        hop_limit: attr.hop_limit,
        traffic_class: attr.traffic_class,
        sl: attr.sl,
        flow_label: attr.flow_label & 0xf_ffff,
        static_rate: attr.static_rate,
        src_path_bits: attr.src_path_bits,
        dlid: attr.dlid,
        port: attr.port,
        scope_id,
    })
}

/// Why an entry that a persona lists carries no traffic.
fn no_traffic(core: &Core, entry: &GidEntry) -> CreateError {
    let reason = match entry.kind {
        GidKind::RoceV1 => "is of RoCE v1, and this device speaks RoCE v2 alone",
        GidKind::NoInterface | GidKind::RoceV2 => {
            "is the link-local address of the hardware, which no interface here has"
        }
    };
    let other = match (core.gids.twin(entry), core.gids.principal(entry.port_place())) {
        (Some(index), _) => format!("; index {index} is the same address with RoCE v2"),
        (None, Some(other)) => format!("; index {} carries traffic", other.index),
        (None, None) => String::new(),
    };
    let what = format!("GID index {} {reason}{other}", entry.index);
    CreateError::NoTraffic { persona: core.persona_name(entry.device).to_owned(), what }
}

/// The global form of an address that names a LID. The RoCE hardware of a persona has none.
fn globalize(core: &Core, port: usize, attr: &AhAttr) -> Option<AhAttr> {
    if core.persona_of(port).is_some() {
        return None;
    }
    let own = core.gids.entry(port, 0)?.gid.to_ip();
    let dgid = Gid::from(lid::resolve(attr.dlid, own)?);
    Some(AhAttr {
        dgid,
        sgid_index: 0,
        hop_limit: 64,
        traffic_class: 0,
        flow_label: 0,
        is_global: true,
        ..*attr
    })
}

impl Pd {
    /// Makes an address handle (`ibv_create_ah`).
    ///
    /// # Errors
    /// [`CreateError::Invalid`] for a port or GID index that does not exist, or without a global route.
    pub fn create_ah(&self, attr: &AhAttr) -> Result<Ah, CreateError> {
        Ah::create(&self.cell, self.context.device, attr)
    }
}

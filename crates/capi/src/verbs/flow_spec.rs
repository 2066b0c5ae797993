//! The filters and actions that follow a `struct ibv_flow_attr`.

use std::mem::size_of;

use anyverbs::raw::{Filter, MAX_SPECS, Masked, Spec};

use crate::{abi::*, errno::Errno};

/// Filters, in the program's order, and actions of a rule.
#[derive(Default)]
pub(crate) struct FlowSpecs {
    pub(crate) filters: arrayvec::ArrayVec<Spec, MAX_SPECS>,
    pub(crate) tag: Option<u32>,
    pub(crate) drop: bool,
    pub(crate) counters: Option<*mut ibv_counters>,
    pub(crate) action: Option<*const ibv_flow_action>,
}

/// A value and its mask, each in network byte order.
macro_rules! be {
    ($spec:ident.$field:ident as $int:ty) => {
        Masked { val: <$int>::from_be($spec.val.$field), mask: <$int>::from_be($spec.mask.$field) }
    };
}

/// A value and its mask, single bytes.
macro_rules! byte {
    ($spec:ident.$field:ident) => {
        Masked { val: $spec.val.$field, mask: $spec.mask.$field }
    };
}

fn mac(bytes: [u8; 6]) -> u64 {
    bytes.iter().fold(0, |mac, byte| mac << 8 | u64::from(*byte))
}

impl FlowSpecs {
    /// Reads `count` of them: `EINVAL` for a type that does not exist, a size that is not its own, a layer or an action that
    /// comes twice.
    ///
    /// # Safety
    /// `at` has that many, each as long as it says and no longer than its type.
    pub(crate) unsafe fn read(mut at: *const u8, count: u8) -> Result<Self, Errno> {
        let mut specs = Self::default();
        for _ in 0..count {
            // SAFETY: the caller's promise; programs pack them.
            let header = unsafe { at.cast::<ibv_flow_spec_hdr>().read_unaligned() };
            // SAFETY: as above.
            unsafe { specs.add(at, header)? };
            // SAFETY: as above.
            at = unsafe { at.add(header.size.into()) };
        }
        Ok(specs)
    }

    /// # Safety
    /// `at` has the length in `header`.
    unsafe fn add(&mut self, at: *const u8, header: ibv_flow_spec_hdr) -> Result<(), Errno> {
        /// # Safety
        /// `at` has a `T`.
        unsafe fn read<T: Copy>(at: *const u8, header: ibv_flow_spec_hdr) -> Result<T, Errno> {
            if usize::from(header.size) != size_of::<T>() {
                return Err(Errno::invalid("the size of a specification is not that of its type"));
            }
            // SAFETY: the caller's promise.
            Ok(unsafe { at.cast::<T>().read_unaligned() })
        }
        let once = |fresh: bool| {
            if fresh { Ok(()) } else { Err(Errno::invalid("an action is given twice")) }
        };
        // SAFETY: the caller's promise.
        unsafe {
            match header.r#type {
                IBV_FLOW_SPEC_ACTION_TAG => {
                    let action: ibv_flow_spec_action_tag = read(at, header)?;
                    return once(self.tag.replace(action.tag_id).is_none());
                }
                IBV_FLOW_SPEC_ACTION_DROP => {
                    read::<ibv_flow_spec_action_drop>(at, header)?;
                    return once(!std::mem::replace(&mut self.drop, true));
                }
                IBV_FLOW_SPEC_ACTION_COUNT => {
                    let action: ibv_flow_spec_counter_action = read(at, header)?;
                    return once(self.counters.replace(action.counters).is_none());
                }
                IBV_FLOW_SPEC_ACTION_HANDLE => {
                    let action: ibv_flow_spec_action_handle = read(at, header)?;
                    return once(self.action.replace(action.action).is_none());
                }
                _ => {}
            }
            let inner = header.r#type & IBV_FLOW_SPEC_INNER != 0;
            let filter = match header.r#type & !IBV_FLOW_SPEC_INNER {
                IBV_FLOW_SPEC_ETH => ethernet(&read(at, header)?),
                IBV_FLOW_SPEC_IPV4 => ipv4(&read(at, header)?),
                IBV_FLOW_SPEC_IPV4_EXT => ipv4_ext(&read(at, header)?),
                IBV_FLOW_SPEC_IPV6 => ipv6(&read(at, header)?),
                IBV_FLOW_SPEC_TCP => {
                    let spec: ibv_flow_spec_tcp_udp = read(at, header)?;
                    Filter::Tcp { dst: be!(spec.dst_port as u16), src: be!(spec.src_port as u16) }
                }
                IBV_FLOW_SPEC_UDP => {
                    let spec: ibv_flow_spec_tcp_udp = read(at, header)?;
                    Filter::Udp { dst: be!(spec.dst_port as u16), src: be!(spec.src_port as u16) }
                }
                IBV_FLOW_SPEC_ESP => {
                    let spec: ibv_flow_spec_esp = read(at, header)?;
                    Filter::Esp { spi: be!(spec.spi as u32), seq: be!(spec.seq as u32) }
                }
                IBV_FLOW_SPEC_GRE => {
                    let spec: ibv_flow_spec_gre = read(at, header)?;
                    Filter::Gre {
                        flags: be!(spec.c_ks_res0_ver as u16),
                        protocol: be!(spec.protocol as u16),
                        key: be!(spec.key as u32),
                    }
                }
                IBV_FLOW_SPEC_MPLS => {
                    let spec: ibv_flow_spec_mpls = read(at, header)?;
                    Filter::Mpls { entry: be!(spec.label as u32) }
                }
                // There is no tunnel in a tunnel.
                IBV_FLOW_SPEC_VXLAN_TUNNEL if !inner => {
                    let spec: ibv_flow_spec_tunnel = read(at, header)?;
                    Filter::Vxlan { vni: be!(spec.tunnel_id as u32) }
                }
                _ => return Err(Errno::invalid("the type of a specification is not known here")),
            };
            let spec = Spec { filter, inner, over: None };
            self.filters
                .try_push(spec)
                .map_err(|_| Errno::invalid("there are too many specifications"))
        }
    }
}

fn ethernet(spec: &ibv_flow_spec_eth) -> Filter {
    Filter::Ethernet {
        dst: Masked { val: mac(spec.val.dst_mac), mask: mac(spec.mask.dst_mac) },
        src: Masked { val: mac(spec.val.src_mac), mask: mac(spec.mask.src_mac) },
        ether_type: be!(spec.ether_type as u16),
        vlan: be!(spec.vlan_tag as u16),
    }
}

fn ipv4(spec: &ibv_flow_spec_ipv4) -> Filter {
    let any = Masked::default();
    Filter::Ipv4 {
        src: be!(spec.src_ip as u32),
        dst: be!(spec.dst_ip as u32),
        proto: any,
        tos: any,
        ttl: any,
        flags: any,
    }
}

fn ipv4_ext(spec: &ibv_flow_spec_ipv4_ext) -> Filter {
    Filter::Ipv4 {
        src: be!(spec.src_ip as u32),
        dst: be!(spec.dst_ip as u32),
        proto: byte!(spec.proto),
        tos: byte!(spec.tos),
        ttl: byte!(spec.ttl),
        flags: byte!(spec.flags),
    }
}

fn ipv6(spec: &ibv_flow_spec_ipv6) -> Filter {
    let address =
        |val, mask| Masked { val: u128::from_be_bytes(val), mask: u128::from_be_bytes(mask) };
    Filter::Ipv6 {
        src: address(spec.val.src_ip, spec.mask.src_ip),
        dst: address(spec.val.dst_ip, spec.mask.dst_ip),
        flow_label: be!(spec.flow_label as u32),
        next_hdr: byte!(spec.next_hdr),
        traffic_class: byte!(spec.traffic_class),
        hop_limit: byte!(spec.hop_limit),
    }
}

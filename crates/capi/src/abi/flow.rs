//! Flow steering rules and actions.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_eth_filter {
    pub(crate) dst_mac: [u8; 6],
    pub(crate) src_mac: [u8; 6],
    pub(crate) ether_type: u16,
    pub(crate) vlan_tag: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_eth {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_eth_filter,
    pub(crate) mask: ibv_flow_eth_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_ipv4_filter {
    pub(crate) src_ip: u32,
    pub(crate) dst_ip: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_ipv4 {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_ipv4_filter,
    pub(crate) mask: ibv_flow_ipv4_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_ipv4_ext_filter {
    pub(crate) src_ip: u32,
    pub(crate) dst_ip: u32,
    pub(crate) proto: u8,
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) flags: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_ipv4_ext {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_ipv4_ext_filter,
    pub(crate) mask: ibv_flow_ipv4_ext_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_ipv6_filter {
    pub(crate) src_ip: [u8; 16],
    pub(crate) dst_ip: [u8; 16],
    pub(crate) flow_label: u32,
    pub(crate) next_hdr: u8,
    pub(crate) traffic_class: u8,
    pub(crate) hop_limit: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_ipv6 {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_ipv6_filter,
    pub(crate) mask: ibv_flow_ipv6_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_esp_filter {
    pub(crate) spi: u32,
    pub(crate) seq: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_esp {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_esp_filter,
    pub(crate) mask: ibv_flow_esp_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_tcp_udp_filter {
    pub(crate) dst_port: u16,
    pub(crate) src_port: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_tcp_udp {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_tcp_udp_filter,
    pub(crate) mask: ibv_flow_tcp_udp_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_gre_filter {
    pub(crate) c_ks_res0_ver: u16,
    pub(crate) protocol: u16,
    pub(crate) key: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_gre {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_gre_filter,
    pub(crate) mask: ibv_flow_gre_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_mpls_filter {
    pub(crate) label: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_mpls {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_mpls_filter,
    pub(crate) mask: ibv_flow_mpls_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_tunnel_filter {
    pub(crate) tunnel_id: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_tunnel {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) val: ibv_flow_tunnel_filter,
    pub(crate) mask: ibv_flow_tunnel_filter,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_action_tag {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) tag_id: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_action_drop {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_action_handle {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) action: *const ibv_flow_action,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_counter_action {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
    pub(crate) counters: *mut ibv_counters,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_flow_spec {
    pub(crate) hdr: ibv_flow_spec_hdr,
    pub(crate) eth: ibv_flow_spec_eth,
    pub(crate) ipv4: ibv_flow_spec_ipv4,
    pub(crate) tcp_udp: ibv_flow_spec_tcp_udp,
    pub(crate) ipv4_ext: ibv_flow_spec_ipv4_ext,
    pub(crate) ipv6: ibv_flow_spec_ipv6,
    pub(crate) esp: ibv_flow_spec_esp,
    pub(crate) tunnel: ibv_flow_spec_tunnel,
    pub(crate) gre: ibv_flow_spec_gre,
    pub(crate) mpls: ibv_flow_spec_mpls,
    pub(crate) flow_tag: ibv_flow_spec_action_tag,
    pub(crate) drop: ibv_flow_spec_action_drop,
    pub(crate) handle: ibv_flow_spec_action_handle,
    pub(crate) flow_count: ibv_flow_spec_counter_action,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_spec_hdr {
    pub(crate) r#type: ibv_flow_spec_type,
    pub(crate) size: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_attr {
    pub(crate) comp_mask: u32,
    pub(crate) r#type: ibv_flow_attr_type,
    pub(crate) size: u16,
    pub(crate) priority: u16,
    pub(crate) num_of_specs: u8,
    pub(crate) port: u8,
    pub(crate) flags: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow {
    pub(crate) comp_mask: u32,
    pub(crate) context: *mut ibv_context,
    pub(crate) handle: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_action {
    pub(crate) context: *mut ibv_context,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_flow_action_esp_attr {
    pub(crate) esp_attr: *mut ib_uverbs_flow_action_esp,
    pub(crate) keymat_proto: c_uint,
    pub(crate) keymat_len: u16,
    pub(crate) keymat_ptr: *mut c_void,
    pub(crate) replay_proto: c_uint,
    pub(crate) replay_len: u16,
    pub(crate) replay_ptr: *mut c_void,
    pub(crate) esp_encap: *mut ib_uverbs_flow_action_esp_encap,
    pub(crate) comp_mask: u32,
    pub(crate) esn: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ib_uverbs_flow_action_esp {
    pub(crate) spi: u32,
    pub(crate) seq: u32,
    pub(crate) tfc_pad: u32,
    pub(crate) flags: u32,
    pub(crate) hard_limit_pkts: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ib_uverbs_flow_action_esp_encap {
    pub(crate) val_ptr: u64,
    pub(crate) next_ptr: u64,
    pub(crate) len: u16,
    pub(crate) r#type: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ib_uverbs_flow_action_esp_keymat_aes_gcm {
    pub(crate) iv: u64,
    pub(crate) iv_algo: u32,
    pub(crate) salt: u32,
    pub(crate) icv_len: u32,
    pub(crate) key_len: u32,
    pub(crate) aes_key: [u32; 8],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ib_uverbs_flow_action_esp_replay_bmp {
    pub(crate) size: u32,
}

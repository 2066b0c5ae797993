//! Device, port and GID: attributes and the result of `ibv_get_device_list`.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_gid {
    pub(crate) raw: [u8; 16],
    pub(crate) global: ibv_gid_global,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_gid_global {
    pub(crate) subnet_prefix: u64,
    pub(crate) interface_id: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_gid_entry {
    pub(crate) gid: ibv_gid,
    pub(crate) gid_index: u32,
    pub(crate) port_num: u32,
    pub(crate) gid_type: u32,
    pub(crate) ndev_ifindex: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_device_attr {
    pub(crate) fw_ver: [c_char; 64],
    pub(crate) node_guid: u64,
    pub(crate) sys_image_guid: u64,
    pub(crate) max_mr_size: u64,
    pub(crate) page_size_cap: u64,
    pub(crate) vendor_id: u32,
    pub(crate) vendor_part_id: u32,
    pub(crate) hw_ver: u32,
    pub(crate) max_qp: c_int,
    pub(crate) max_qp_wr: c_int,
    pub(crate) device_cap_flags: c_uint,
    pub(crate) max_sge: c_int,
    pub(crate) max_sge_rd: c_int,
    pub(crate) max_cq: c_int,
    pub(crate) max_cqe: c_int,
    pub(crate) max_mr: c_int,
    pub(crate) max_pd: c_int,
    pub(crate) max_qp_rd_atom: c_int,
    pub(crate) max_ee_rd_atom: c_int,
    pub(crate) max_res_rd_atom: c_int,
    pub(crate) max_qp_init_rd_atom: c_int,
    pub(crate) max_ee_init_rd_atom: c_int,
    pub(crate) atomic_cap: ibv_atomic_cap,
    pub(crate) max_ee: c_int,
    pub(crate) max_rdd: c_int,
    pub(crate) max_mw: c_int,
    pub(crate) max_raw_ipv6_qp: c_int,
    pub(crate) max_raw_ethy_qp: c_int,
    pub(crate) max_mcast_grp: c_int,
    pub(crate) max_mcast_qp_attach: c_int,
    pub(crate) max_total_mcast_qp_attach: c_int,
    pub(crate) max_ah: c_int,
    pub(crate) max_fmr: c_int,
    pub(crate) max_map_per_fmr: c_int,
    pub(crate) max_srq: c_int,
    pub(crate) max_srq_wr: c_int,
    pub(crate) max_srq_sge: c_int,
    pub(crate) max_pkeys: u16,
    pub(crate) local_ca_ack_delay: u8,
    pub(crate) phys_port_cnt: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_query_device_ex_input {
    pub(crate) comp_mask: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_odp_caps {
    pub(crate) general_caps: u64,
    pub(crate) per_transport_caps: ibv_odp_caps_per_transport_caps,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_odp_caps_per_transport_caps {
    pub(crate) rc_odp_caps: u32,
    pub(crate) uc_odp_caps: u32,
    pub(crate) ud_odp_caps: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_tso_caps {
    pub(crate) max_tso: u32,
    pub(crate) supported_qpts: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_rss_caps {
    pub(crate) supported_qpts: u32,
    pub(crate) max_rwq_indirection_tables: u32,
    pub(crate) max_rwq_indirection_table_size: u32,
    pub(crate) rx_hash_fields_mask: u64,
    pub(crate) rx_hash_function: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_packet_pacing_caps {
    pub(crate) qp_rate_limit_min: u32,
    pub(crate) qp_rate_limit_max: u32,
    pub(crate) supported_qpts: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_tm_caps {
    pub(crate) max_rndv_hdr_size: u32,
    pub(crate) max_num_tags: u32,
    pub(crate) flags: u32,
    pub(crate) max_ops: u32,
    pub(crate) max_sge: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_cq_moderation_caps {
    pub(crate) max_cq_count: u16,
    pub(crate) max_cq_period: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_pci_atomic_caps {
    pub(crate) fetch_add: u16,
    pub(crate) swap: u16,
    pub(crate) compare_swap: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_device_attr_ex {
    pub(crate) orig_attr: ibv_device_attr,
    pub(crate) comp_mask: u32,
    pub(crate) odp_caps: ibv_odp_caps,
    pub(crate) completion_timestamp_mask: u64,
    pub(crate) hca_core_clock: u64,
    pub(crate) device_cap_flags_ex: u64,
    pub(crate) tso_caps: ibv_tso_caps,
    pub(crate) rss_caps: ibv_rss_caps,
    pub(crate) max_wq_type_rq: u32,
    pub(crate) packet_pacing_caps: ibv_packet_pacing_caps,
    pub(crate) raw_packet_caps: u32,
    pub(crate) tm_caps: ibv_tm_caps,
    pub(crate) cq_mod_caps: ibv_cq_moderation_caps,
    pub(crate) max_dm_size: u64,
    pub(crate) pci_atomic_caps: ibv_pci_atomic_caps,
    pub(crate) xrc_odp_caps: u32,
    pub(crate) phys_port_cnt_ex: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_port_attr {
    pub(crate) state: ibv_port_state,
    pub(crate) max_mtu: ibv_mtu,
    pub(crate) active_mtu: ibv_mtu,
    pub(crate) gid_tbl_len: c_int,
    pub(crate) port_cap_flags: u32,
    pub(crate) max_msg_sz: u32,
    pub(crate) bad_pkey_cntr: u32,
    pub(crate) qkey_viol_cntr: u32,
    pub(crate) pkey_tbl_len: u16,
    pub(crate) lid: u16,
    pub(crate) sm_lid: u16,
    pub(crate) lmc: u8,
    pub(crate) max_vl_num: u8,
    pub(crate) sm_sl: u8,
    pub(crate) subnet_timeout: u8,
    pub(crate) init_type_reply: u8,
    pub(crate) active_width: u8,
    pub(crate) active_speed: u8,
    pub(crate) phys_state: u8,
    pub(crate) link_layer: u8,
    pub(crate) flags: u8,
    pub(crate) port_cap_flags2: u16,
    pub(crate) active_speed_ex: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct _ibv_device_ops {
    pub(crate) _dummy1: Option<unsafe extern "C" fn(*mut ibv_device, c_int) -> *mut ibv_context>,
    pub(crate) _dummy2: Option<unsafe extern "C" fn(*mut ibv_context)>,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_device {
    pub(crate) _ops: _ibv_device_ops,
    pub(crate) node_type: ibv_node_type,
    pub(crate) transport_type: ibv_transport_type,
    pub(crate) name: [c_char; 64],
    pub(crate) dev_name: [c_char; 64],
    pub(crate) dev_path: [c_char; 256],
    pub(crate) ibdev_path: [c_char; 256],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_values_ex {
    pub(crate) comp_mask: u32,
    pub(crate) raw_clock: libc::timespec,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_async_event {
    pub(crate) element: ibv_async_event_element,
    pub(crate) event_type: ibv_event_type,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union ibv_async_event_element {
    pub(crate) cq: *mut ibv_cq,
    pub(crate) qp: *mut ibv_qp,
    pub(crate) srq: *mut ibv_srq,
    pub(crate) wq: *mut ibv_wq,
    pub(crate) port_num: c_int,
}

//! Records of the subnet administrator.

use super::*;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_sa_path_rec {
    pub(crate) dgid: ibv_gid,
    pub(crate) sgid: ibv_gid,
    pub(crate) dlid: u16,
    pub(crate) slid: u16,
    pub(crate) raw_traffic: c_int,
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
    pub(crate) traffic_class: u8,
    pub(crate) reversible: c_int,
    pub(crate) numb_path: u8,
    pub(crate) pkey: u16,
    pub(crate) sl: u8,
    pub(crate) mtu_selector: u8,
    pub(crate) mtu: u8,
    pub(crate) rate_selector: u8,
    pub(crate) rate: u8,
    pub(crate) packet_life_time_selector: u8,
    pub(crate) packet_life_time: u8,
    pub(crate) preference: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_sa_mcmember_rec {
    pub(crate) mgid: ibv_gid,
    pub(crate) port_gid: ibv_gid,
    pub(crate) qkey: u32,
    pub(crate) mlid: u16,
    pub(crate) mtu_selector: u8,
    pub(crate) mtu: u8,
    pub(crate) traffic_class: u8,
    pub(crate) pkey: u16,
    pub(crate) rate_selector: u8,
    pub(crate) rate: u8,
    pub(crate) packet_life_time_selector: u8,
    pub(crate) packet_life_time: u8,
    pub(crate) sl: u8,
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
    pub(crate) scope: u8,
    pub(crate) join_state: u8,
    pub(crate) proxy_join: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_sa_service_rec {
    pub(crate) id: u64,
    pub(crate) gid: ibv_gid,
    pub(crate) pkey: u16,
    pub(crate) lease: u32,
    pub(crate) key: [u8; 16],
    pub(crate) name: [u8; 64],
    pub(crate) data8: [u8; 16],
    pub(crate) data16: [u16; 8],
    pub(crate) data32: [u32; 4],
    pub(crate) data64: [u64; 2],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_path_record {
    pub(crate) service_id: u64,
    pub(crate) dgid: ibv_gid,
    pub(crate) sgid: ibv_gid,
    pub(crate) dlid: u16,
    pub(crate) slid: u16,
    pub(crate) flowlabel_hoplimit: u32,
    pub(crate) tclass: u8,
    pub(crate) reversible_numpath: u8,
    pub(crate) pkey: u16,
    pub(crate) qosclass_sl: u16,
    pub(crate) mtu: u8,
    pub(crate) rate: u8,
    pub(crate) packetlifetime: u8,
    pub(crate) preference: u8,
    pub(crate) reserved: [u8; 6],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ibv_path_data {
    pub(crate) flags: u32,
    pub(crate) reserved: u32,
    pub(crate) path: ibv_path_record,
}

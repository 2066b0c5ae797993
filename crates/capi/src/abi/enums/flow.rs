//! Flow steering and counters.

use super::*;

pub(crate) type ibv_flow_flags = c_uint;
pub(crate) const IBV_FLOW_ATTR_FLAGS_DONT_TRAP: ibv_flow_flags = 2;
pub(crate) const IBV_FLOW_ATTR_FLAGS_EGRESS: ibv_flow_flags = 4;

pub(crate) type ibv_flow_attr_type = c_uint;
pub(crate) const IBV_FLOW_ATTR_NORMAL: ibv_flow_attr_type = 0;
pub(crate) const IBV_FLOW_ATTR_ALL_DEFAULT: ibv_flow_attr_type = 1;
pub(crate) const IBV_FLOW_ATTR_MC_DEFAULT: ibv_flow_attr_type = 2;
pub(crate) const IBV_FLOW_ATTR_SNIFFER: ibv_flow_attr_type = 3;

pub(crate) type ibv_flow_spec_type = c_uint;
pub(crate) const IBV_FLOW_SPEC_ETH: ibv_flow_spec_type = 32;
pub(crate) const IBV_FLOW_SPEC_IPV4: ibv_flow_spec_type = 48;
pub(crate) const IBV_FLOW_SPEC_IPV6: ibv_flow_spec_type = 49;
pub(crate) const IBV_FLOW_SPEC_IPV4_EXT: ibv_flow_spec_type = 50;
pub(crate) const IBV_FLOW_SPEC_ESP: ibv_flow_spec_type = 52;
pub(crate) const IBV_FLOW_SPEC_TCP: ibv_flow_spec_type = 64;
pub(crate) const IBV_FLOW_SPEC_UDP: ibv_flow_spec_type = 65;
pub(crate) const IBV_FLOW_SPEC_VXLAN_TUNNEL: ibv_flow_spec_type = 80;
pub(crate) const IBV_FLOW_SPEC_GRE: ibv_flow_spec_type = 81;
pub(crate) const IBV_FLOW_SPEC_MPLS: ibv_flow_spec_type = 96;
pub(crate) const IBV_FLOW_SPEC_INNER: ibv_flow_spec_type = 256;
pub(crate) const IBV_FLOW_SPEC_ACTION_TAG: ibv_flow_spec_type = 4096;
pub(crate) const IBV_FLOW_SPEC_ACTION_DROP: ibv_flow_spec_type = 4097;
pub(crate) const IBV_FLOW_SPEC_ACTION_HANDLE: ibv_flow_spec_type = 4098;
pub(crate) const IBV_FLOW_SPEC_ACTION_COUNT: ibv_flow_spec_type = 4099;

pub(crate) type ibv_flow_action_esp_mask = c_uint;
pub(crate) const IBV_FLOW_ACTION_ESP_MASK_ESN: ibv_flow_action_esp_mask = 1;

pub(crate) type ib_uverbs_flow_action_esp_keymat = c_uint;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_KEYMAT_AES_GCM: ib_uverbs_flow_action_esp_keymat = 0;

pub(crate) type ib_uverbs_flow_action_esp_keymat_aes_gcm_iv_algo = c_uint;
pub(crate) const IB_UVERBS_FLOW_ACTION_IV_ALGO_SEQ:
    ib_uverbs_flow_action_esp_keymat_aes_gcm_iv_algo = 0;

pub(crate) type ib_uverbs_flow_action_esp_replay = c_uint;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_REPLAY_NONE: ib_uverbs_flow_action_esp_replay = 0;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_REPLAY_BMP: ib_uverbs_flow_action_esp_replay = 1;

/// The other value of each of these is 0.
pub(crate) type ib_uverbs_flow_action_esp_flags = c_uint;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_FLAGS_FULL_OFFLOAD: ib_uverbs_flow_action_esp_flags = 1;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_FLAGS_TRANSPORT: ib_uverbs_flow_action_esp_flags =
    1 << 1;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ENCRYPT: ib_uverbs_flow_action_esp_flags = 1 << 2;
pub(crate) const IB_UVERBS_FLOW_ACTION_ESP_FLAGS_ESN_NEW_WINDOW: ib_uverbs_flow_action_esp_flags =
    1 << 3;

pub(crate) type ibv_comp_cntr_type = c_uint;
pub(crate) const IBV_COMP_CNTR_TYPE_WRS: ibv_comp_cntr_type = 0;
pub(crate) const IBV_COMP_CNTR_TYPE_BYTES: ibv_comp_cntr_type = 1;

pub(crate) type ibv_counter_description = c_uint;
pub(crate) const IBV_COUNTER_PACKETS: ibv_counter_description = 0;
pub(crate) const IBV_COUNTER_BYTES: ibv_counter_description = 1;

pub(crate) type ibv_read_counters_flags = c_uint;
pub(crate) const IBV_READ_COUNTERS_ATTR_PREFER_CACHED: ibv_read_counters_flags = 1;

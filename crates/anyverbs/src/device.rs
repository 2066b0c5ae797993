//! Which devices there are.

use anyverbs_proto::types::Mtu;

use crate::engine::Engine;
use crate::error::OpenError;
use crate::gid::GidEntry;

/// A device of this process (`ibv_get_device_list`).
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name: `anyverbs0`, or what the configuration says.
    pub name: String,
    /// Identifies it.
    pub node_guid: u64,
    /// Identifies the host.
    pub sys_image_guid: u64,
    /// The addresses in its GID table.
    pub gids: Vec<GidEntry>,
    /// Its port.
    pub port: PortAttr,
    /// UDP port.
    pub udp_port: u16,
    /// Name of the registry in which the processes of this host find each other.
    pub registry: String,
    /// Whether queue pairs of one process talk directly.
    pub inproc: bool,
    /// Whether it talks to other processes of this user and host through shared memory.
    pub shm: bool,
    /// This process's slot on the host: the top byte of its queue pair numbers.
    pub slot: u8,
}

/// State of a port (`enum ibv_port_state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum PortState {
    /// No address is up.
    Down = 1,
    /// Ready.
    Active = 4,
}

/// A port's attributes (`struct ibv_port_attr`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttr {
    /// State.
    pub state: PortState,
    /// Largest path MTU of the device.
    pub max_mtu: Mtu,
    /// Largest path MTU of GID 0's interface.
    pub active_mtu: Mtu,
    /// Made up from GID 0; 0 where that is no IPv4 address. An address handle or a queue pair without GRH may name it.
    pub lid: u16,
    /// Entries of the GID table.
    pub gid_tbl_len: u32,
    /// Longest message.
    pub max_msg_sz: u32,
    /// P_Keys.
    pub pkey_tbl_len: u16,
    /// Packets with a wrong P_Key.
    pub bad_pkey_cntr: u32,
    /// Packets with a wrong Q_Key.
    pub qkey_viol_cntr: u32,
}

/// The devices of this process: one, unless there can be none. The first call starts the process's engine.
///
/// # Errors
/// Why there is none.
pub fn devices() -> Result<Vec<DeviceInfo>, OpenError> {
    Ok(vec![Engine::current()?.device_info()])
}

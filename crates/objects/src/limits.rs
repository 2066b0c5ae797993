//! The device's limits: the numbers that it reports, and enforces.

use anyverbs_proto::mr::Access;

use crate::clock;
use crate::config::MaxQp;
use crate::features::Features;

/// Sizes and capabilities of the device (`ibv_query_device`). Reported limits are enforced, and can be reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceAttr {
    /// Identifies the device; from the host's name and the process's network namespace.
    pub node_guid: u64,
    /// Identifies the adapter, which is one device. Its ports share it.
    pub sys_image_guid: u64,
    /// Vendor: a number that no known vendor has.
    pub vendor_id: u32,
    /// Part.
    pub vendor_part_id: u32,
    /// Hardware revision.
    pub hw_ver: u32,
    /// Longest region in bytes.
    pub max_mr_size: u64,
    /// Page sizes that regions can have, as a bit mask.
    pub page_size_cap: u64,
    /// Queue pairs.
    pub max_qp: u32,
    /// Requests in one queue of a queue pair.
    pub max_qp_wr: u32,
    /// Elements of a request.
    pub max_sge: u32,
    /// Elements of a READ.
    pub max_sge_rd: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
    /// Completion queues.
    pub max_cq: u32,
    /// Completions in one queue.
    pub max_cqe: u32,
    /// Memory regions.
    pub max_mr: u32,
    /// Memory windows.
    pub max_mw: u32,
    /// Bytes of device memory that one context can have.
    pub max_dm_size: u64,
    /// Protection domains.
    pub max_pd: u32,
    /// Address handles.
    pub max_ah: u32,
    /// READs and atomics outstanding at one queue pair.
    pub max_qp_rd_atom: u32,
    /// The same for the whole device.
    pub max_res_rd_atom: u32,
    /// Shared receive queues.
    pub max_srq: u32,
    /// Requests in one of them.
    pub max_srq_wr: u32,
    /// Elements of a request there.
    pub max_srq_sge: u32,
    /// Multicast groups that queue pairs are attached to.
    pub max_mcast_grp: u32,
    /// Queue pairs attached to one group.
    pub max_mcast_qp_attach: u32,
    /// Attachments to all groups.
    pub max_total_mcast_qp_attach: u32,
    /// P_Keys of a port.
    pub max_pkeys: u16,
    /// Code of the longest local ACK delay.
    pub local_ca_ack_delay: u8,
    /// Ports.
    pub phys_port_cnt: u8,
    /// Completion vectors.
    pub num_comp_vectors: u32,
    /// Thousands of ticks a second of the clock that completions are stamped with.
    pub clock_khz: u64,
    /// Most completions that one notification may stand for.
    pub max_cq_count: u16,
    /// Longest time in microseconds for which a notification may be held back.
    pub max_cq_period: u16,
    /// Highest limit of the rate of a queue pair, in kilobits a second.
    pub max_rate_limit: u32,
    /// Completion counters.
    pub max_comp_cntr: u32,
    /// Tags in the list of a tag-matching SRQ.
    pub max_num_tags: u16,
    /// Operations on that list that may be outstanding. They are done when they are posted.
    pub max_tag_ops: u32,
    /// Bytes of the message that announces a rendezvous.
    pub max_rndv_hdr_size: u32,
    /// Work queues.
    pub max_wq: u32,
    /// Indirection tables of work queues.
    pub max_rwq_ind_tables: u32,
    /// Entries of one of them.
    pub max_rwq_ind_table_size: u32,
    /// Bytes of payload that leave in segments by one request.
    pub max_tso: u32,
    /// Features that the device's persona lacks.
    pub lacks: Features,
}

/// A limit among the attributes.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Its name.
    pub name: &'static str,
    /// Its value.
    pub of: fn(&DeviceAttr) -> u32,
}

/// The [`Bound`] of a name.
#[macro_export]
macro_rules! bound {
    ($name:ident) => {
        $crate::limits::Bound { name: stringify!($name), of: |attr| attr.$name }
    };
}

pub use bound;

/// Numbers that stay within 24 bits or 8 bits by the protocol, or that a process can hold.
pub const DEFAULT: DeviceAttr = DeviceAttr {
    node_guid: 0,
    sys_image_guid: 0,
    vendor_id: 0x00_a1_7b, // of no vendor
    vendor_part_id: 1,
    hw_ver: 0,
    max_mr_size: u64::MAX,
    page_size_cap: 0xffff_ffff_ffff_f000,
    max_qp: 16_384,
    max_qp_wr: 16_384,
    max_sge: 32,
    max_sge_rd: 32,
    max_inline_data: 1024,
    max_cq: 32_768,
    max_cqe: 1 << 20,
    max_mr: 131_072,
    max_mw: 65_536,
    max_dm_size: MAX_DM_SIZE,
    max_pd: 32_768,
    max_ah: 131_072,
    max_qp_rd_atom: 128,
    max_res_rd_atom: 16_384 * 128,
    max_srq: 16_384,
    max_srq_wr: 16_384,
    max_srq_sge: 32,
    max_mcast_grp: 1024,
    max_mcast_qp_attach: 256,
    max_total_mcast_qp_attach: 16_384,
    max_pkeys: 1,
    local_ca_ack_delay: 15,
    phys_port_cnt: 1,
    num_comp_vectors: 2,
    clock_khz: clock::HZ / 1000,
    max_cq_count: u16::MAX,
    max_cq_period: u16::MAX,
    max_rate_limit: 400_000_000,
    max_comp_cntr: 16_384,
    max_num_tags: 1024,
    max_tag_ops: 16_384,
    // One packet at the smallest MTU.
    max_rndv_hdr_size: 256,
    max_wq: 16_384,
    max_rwq_ind_tables: 16_384,
    max_rwq_ind_table_size: 2048,
    max_tso: 262_144,
    lacks: Features::NONE,
};

/// The attributes that hold for all devices of a process together: those of the only one, and else the engine's. The connection
/// manager offers no more READs than each of them takes. `max_qp` is the most queue pairs of the process, if its configuration says so.
pub fn of_all(ports: &[DeviceAttr], max_qp: Option<&MaxQp>) -> DeviceAttr {
    let Some(first) = ports.first() else { return DEFAULT };
    if usize::from(first.phys_port_cnt) == ports.len() {
        return *first;
    }
    let DeviceAttr { node_guid, sys_image_guid, .. } = *first;
    let reads = ports.iter().map(|attr| attr.max_qp_rd_atom).min();
    let max_qp_rd_atom = reads.unwrap_or(DEFAULT.max_qp_rd_atom);
    let max_qp = max_qp.map_or(DEFAULT.max_qp, |all| all.number);
    DeviceAttr { node_guid, sys_image_guid, max_qp, max_qp_rd_atom, ..DEFAULT }
}

/// Longest message (IBA 9.7.1.1).
pub const MAX_MSG_SIZE: u32 = anyverbs_proto::wr::MAX_MESSAGE;

/// Entries of the GID table. At least one stays empty.
pub const GID_TABLE_LEN: usize = 128;

/// Bytes of device memory that one context can have.
pub(crate) const MAX_DM_SIZE: u64 = 16 << 20;

/// Access flags that a memory region can have.
pub(crate) const REGION_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::MW_BIND)
    .union(Access::ZERO_BASED)
    .union(Access::ON_DEMAND)
    .union(Access::HUGETLB)
    .union(Access::FLUSH_GLOBAL)
    .union(Access::FLUSH_PERSISTENT)
    .union(Access::RELAXED_ORDERING)
    .union(Access::INVALIDATABLE);

/// Access flags that a region of a dma-buf can have.
pub(crate) const DMABUF_ACCESS: Access = Access::LOCAL_WRITE
    .union(Access::REMOTE_WRITE)
    .union(Access::REMOTE_READ)
    .union(Access::REMOTE_ATOMIC)
    .union(Access::RELAXED_ORDERING);

//! A bridge between two network interfaces with the faults of bad networks. The faults are the same each time for a
//! seed.
//!
//! `cargo xtask conformance impair` puts it between two network namespaces. It stands alone, so that one's own programs
//! can be run across it as well. Turn segmentation and checksum offloads of the hosts' interfaces off, since it must
//! see single packets and their checksums:
//!
//! ```sh
//! ethtool -K eth0 tx off tso off gso off gro off tx-udp-segmentation off   # on both hosts
//! anyverbs-impair veth0 veth1 --loss 0.01 --seed 7                         # between them
//! ```

pub mod frame;
pub mod interface;
pub mod path;

//! The place of a measurement: where two programs run, and the path between them.

use std::fmt;
use std::path::Path;

use crate::conformance::{Hosts, Side, Topology, quiet};

/// The path between the two programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    SameHost,
    /// As [`Place::SameHost`], with the device as it is by default.
    Loopback,
    TwoHosts {
        mtu: Mtu,
    },
    /// Every hundredth packet that arrives is dropped, on both hosts.
    Loss {
        mtu: Mtu,
        offloads: bool,
    },
}

/// MTU of the cable between the hosts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mtu {
    Ethernet,
    Jumbo,
}

impl Place {
    pub(super) fn topology(self) -> Topology {
        match self {
            Self::SameHost | Self::Loopback => Topology::Loopback,
            Self::TwoHosts { mtu } | Self::Loss { mtu, .. } => match mtu {
                Mtu::Ethernet => Topology::TwoHosts,
                Mtu::Jumbo => Topology::TwoHosts9000,
            },
        }
    }

    /// Whether hosts are not as others have them after [`Place::set`].
    pub(super) fn changes_hosts(self) -> bool {
        matches!(self, Self::Loss { .. })
    }

    /// Sets up everything of the place except its topology, on fresh hosts.
    pub(super) fn set(self, hosts: &Hosts) -> anyhow::Result<()> {
        let Self::Loss { offloads, .. } = self else { return Ok(()) };
        for side in [Side::Server, Side::Client] {
            let run = |program: &str, words: &str| {
                let mut command = hosts.command(side, Path::new(program));
                quiet(command.args(words.split(' '))).map(|_| ())
            };
            run("nft", "add table inet bench")?;
            run("nft", "add chain inet bench in { type filter hook prerouting priority 0 ; }")?;
            run("nft", "add rule inet bench in iif eth0 numgen random mod 1000 < 10 drop")?;
            if !offloads {
                run("ethtool", "-K eth0 tso off gso off gro off tx-udp-segmentation off")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = |mtu: &Mtu| match mtu {
            Mtu::Ethernet => 1500,
            Mtu::Jumbo => 9000,
        };
        match self {
            Self::SameHost => f.write_str("same host"),
            Self::Loopback => f.write_str("loopback"),
            Self::TwoHosts { mtu } => write!(f, "two hosts, MTU {}", bytes(mtu)),
            Self::Loss { mtu, offloads } => {
                let offloads = if *offloads { "offloads" } else { "no offloads" };
                write!(f, "1% loss, {offloads}, MTU {}", bytes(mtu))
            }
        }
    }
}

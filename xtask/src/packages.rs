//! Debian packages that the commands use.

use std::path::Path;
use std::process::Command;

use anyhow::bail;

use crate::workspace::succeed;

/// A package and a file of it that is used.
pub(crate) type Package = (&'static str, &'static str);

/// `ibv_devinfo`, `ibv_rc_pingpong` and their like.
pub(crate) const IBVERBS_UTILS: Package = ("ibverbs-utils", "/usr/bin/ibv_devinfo");
/// `ib_write_bw` and its like.
pub(crate) const PERFTEST: Package = ("perftest", "/usr/bin/ib_write_bw");
pub(crate) const QPERF: Package = ("qperf", "/usr/bin/qperf");
pub(crate) const PYVERBS: Package = ("python3-pyverbs", "/usr/lib/python3/dist-packages/pyverbs");
/// rdma-core's Python tests come with the documentation of this package.
pub(crate) const RDMA_CORE: Package = ("rdma-core", "/usr/share/doc/rdma-core/tests/run_tests.py");
pub(crate) const IPROUTE2: Package = ("iproute2", "/usr/sbin/ip");
pub(crate) const TCPDUMP: Package = ("tcpdump", "/usr/bin/tcpdump");
pub(crate) const TSHARK: Package = ("tshark", "/usr/bin/tshark");
pub(crate) const PYTHON3: Package = ("python3", "/usr/bin/python3");
pub(crate) const QEMU: Package = ("qemu-system-x86", "/usr/bin/qemu-system-x86_64");
/// `rping`, `ucmatose`, `rstream` and their like.
pub(crate) const RDMACM_UTILS: Package = ("rdmacm-utils", "/usr/bin/rping");
pub(crate) const FIO: Package = ("fio", "/usr/bin/fio");
pub(crate) const IPERF3: Package = ("iperf3", "/usr/bin/iperf3");
/// `ucx_perftest`.
pub(crate) const UCX_UTILS: Package = ("ucx-utils", "/usr/bin/ucx_perftest");
/// `fi_pingpong`.
pub(crate) const LIBFABRIC_BIN: Package = ("libfabric-bin", "/usr/bin/fi_pingpong");
/// `nft`, which loses packets.
pub(crate) const NFTABLES: Package = ("nftables", "/usr/sbin/nft");
pub(crate) const ETHTOOL: Package = ("ethtool", "/usr/sbin/ethtool");

/// What programs are compiled against, and linked with: the C tests of the view need a compiler.
pub(crate) const CC: Package = ("gcc", "/usr/bin/cc");
/// Builds libFuzzer.
pub(crate) const CXX: Package = ("g++", "/usr/bin/c++");
/// The headers that C programs for verbs and librdmacm are compiled with.
pub(crate) const LIBIBVERBS_DEV: Package = ("libibverbs-dev", "/usr/include/infiniband/verbs.h");
pub(crate) const LIBRDMACM_DEV: Package = ("librdmacm-dev", "/usr/include/rdma/rdma_cma.h");
/// Runs some of the C programs.
pub(crate) const VALGRIND: Package = ("valgrind", "/usr/bin/valgrind");
pub(crate) const LIBC6_DEV: Package = ("libc6-dev", "/usr/include/stdio.h");

// What pyverbs is built with.
pub(crate) const PYTHON3_DEV: Package = ("python3-dev", "/usr/bin/python3-config");
pub(crate) const PYTHON3_VENV: Package = ("python3-venv", "/usr/share/doc/python3-venv/copyright");
pub(crate) const CMAKE: Package = ("cmake", "/usr/bin/cmake");
pub(crate) const NINJA: Package = ("ninja-build", "/usr/bin/ninja");
pub(crate) const PKG_CONFIG: Package = ("pkg-config", "/usr/bin/pkg-config");
pub(crate) const LIBNL_3_DEV: Package = ("libnl-3-dev", "/usr/include/libnl3/netlink/netlink.h");
pub(crate) const LIBNL_ROUTE_3_DEV: Package =
    ("libnl-route-3-dev", "/usr/include/libnl3/netlink/route/link.h");
pub(crate) const LIBUDEV_DEV: Package = ("libudev-dev", "/usr/include/libudev.h");

/// Makes sure that the packages are there: installs what is missing as root, else says how.
pub(crate) fn ensure(packages: &[Package]) -> anyhow::Result<()> {
    let missing = missing(packages);
    if missing.is_empty() {
        return Ok(());
    }
    let line = format!("apt-get install --yes --no-install-recommends {}", missing.join(" "));
    // SAFETY: cannot fail and touches no memory.
    if unsafe { libc::geteuid() } != 0 {
        bail!("Debian packages are missing; run this and try again:\n  sudo {line}");
    }
    eprintln!("installing {}", missing.join(", "));
    let apt = || {
        let mut command = Command::new("apt-get");
        command.env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    // A list that is too old, or none as in a fresh container, fails the first time.
    let mut words = line.split(' ').skip(1).collect::<Vec<_>>();
    words.insert(0, "--quiet=2");
    if succeed(apt().args(&words)).is_err() {
        succeed(apt().args(["--quiet=2", "update"]))?;
        succeed(apt().args(&words))?;
    }
    match self::missing(packages) {
        still if still.is_empty() => Ok(()),
        still => {
            bail!("{} installed, but their files are not where they should be", still.join(" "))
        }
    }
}

fn missing(packages: &[Package]) -> Vec<&'static str> {
    packages.iter().filter(|(_, file)| !Path::new(file).exists()).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_whose_file_is_absent_are_missing() {
        assert_eq!(
            missing(&[("here", "/proc/self/exe"), ("absent", "/nonexistent/file")]),
            ["absent"]
        );
    }
}

//! Debian packages that the commands use.

use std::io::{self, Write as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use crate::interrupt;
use crate::workspace::shown;

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
pub(crate) const JQ: Package = ("jq", "/usr/bin/jq");
pub(crate) const TSHARK: Package = ("tshark", "/usr/bin/tshark");
pub(crate) const PYTHON3: Package = ("python3", "/usr/bin/python3");
pub(crate) const QEMU: Package = ("qemu-system-x86", "/usr/bin/qemu-system-x86_64");
/// Prometheus' exporter of a host's counters.
pub(crate) const NODE_EXPORTER: Package =
    ("prometheus-node-exporter", "/usr/bin/prometheus-node-exporter");
/// `rping`, `ucmatose`, `rstream` and their like.
pub(crate) const RDMACM_UTILS: Package = ("rdmacm-utils", "/usr/bin/rping");
pub(crate) const FIO: Package = ("fio", "/usr/bin/fio");
pub(crate) const IPERF3: Package = ("iperf3", "/usr/bin/iperf3");
/// `ucx_perftest`.
pub(crate) const UCX_UTILS: Package = ("ucx-utils", "/usr/bin/ucx_perftest");
/// `mpirun`.
pub(crate) const OPENMPI_BIN: Package = ("openmpi-bin", "/usr/bin/mpirun");
pub(crate) const PYTHON3_MPI4PY: Package =
    ("python3-mpi4py", "/usr/lib/python3/dist-packages/mpi4py");
/// `nm`.
pub(crate) const BINUTILS: Package = ("binutils", "/usr/bin/nm");
/// `lspci`.
pub(crate) const PCIUTILS: Package = ("pciutils", "/usr/bin/lspci");
/// `lstopo-no-graphics`.
pub(crate) const HWLOC: Package = ("hwloc-nox", "/usr/bin/lstopo-no-graphics");
/// `fi_pingpong`.
pub(crate) const LIBFABRIC_BIN: Package = ("libfabric-bin", "/usr/bin/fi_pingpong");
/// `nft`, which loses packets.
pub(crate) const NFTABLES: Package = ("nftables", "/usr/sbin/nft");
/// Opens the pages of `anyverbs report`.
pub(crate) const CHROMIUM: Package = ("chromium", "/usr/bin/chromium");
pub(crate) const ETHTOOL: Package = ("ethtool", "/usr/sbin/ethtool");
/// Makes roots of other Debian releases.
pub(crate) const MMDEBSTRAP: Package = ("mmdebstrap", "/usr/bin/mmdebstrap");

/// Runs programs for 64-bit ARM.
pub(crate) const QEMU_USER: Package = ("qemu-user-static", "/usr/lib/binfmt.d/qemu-aarch64.conf");
/// By it mmdebstrap knows that they run.
pub(crate) const ARCH_TEST: Package = ("arch-test", "/usr/bin/arch-test");

/// A compiler and linker for programs: the C tests of the view need it.
pub(crate) const CC: Package = ("gcc", "/usr/bin/cc");
/// Builds programs with MemorySanitizer.
pub(crate) const CLANG: Package = ("clang", "/usr/bin/clang");
/// MemorySanitizer and ThreadSanitizer themselves, which clang only recommends.
pub(crate) const CLANG_RT: Package =
    ("libclang-rt-14-dev", "/usr/share/doc/libclang-rt-14-dev/copyright");
/// Builds libFuzzer.
pub(crate) const CXX: Package = ("g++", "/usr/bin/c++");
/// The headers that C programs for verbs and librdmacm are compiled with.
pub(crate) const LIBIBVERBS_DEV: Package = ("libibverbs-dev", "/usr/include/infiniband/verbs.h");
pub(crate) const LIBRDMACM_DEV: Package = ("librdmacm-dev", "/usr/include/rdma/rdma_cma.h");
/// Runs some of the C programs.
pub(crate) const VALGRIND: Package = ("valgrind", "/usr/bin/valgrind");
pub(crate) const LIBC6_DEV: Package = ("libc6-dev", "/usr/include/stdio.h");

// Build dependencies of pyverbs.
pub(crate) const PYTHON3_DEV: Package = ("python3-dev", "/usr/bin/python3-config");
pub(crate) const PYTHON3_VENV: Package = ("python3-venv", "/usr/share/doc/python3-venv/copyright");
pub(crate) const CMAKE: Package = ("cmake", "/usr/bin/cmake");
pub(crate) const NINJA: Package = ("ninja-build", "/usr/bin/ninja");
pub(crate) const PKG_CONFIG: Package = ("pkg-config", "/usr/bin/pkg-config");
pub(crate) const LIBNL_3_DEV: Package = ("libnl-3-dev", "/usr/include/libnl3/netlink/netlink.h");
pub(crate) const LIBNL_ROUTE_3_DEV: Package =
    ("libnl-route-3-dev", "/usr/include/libnl3/netlink/route/link.h");
pub(crate) const LIBUDEV_DEV: Package = ("libudev-dev", "/usr/include/libudev.h");

/// Makes sure that the packages are there. As root it installs missing ones, else it says how.
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
        // In English, so that a failure can be understood.
        command.env("DEBIAN_FRONTEND", "noninteractive").env("LC_ALL", "C");
        command
    };
    // A list that is too old, or none as in a fresh container, fails the first time.
    let mut words = line.split(' ').skip(1).collect::<Vec<_>>();
    words.insert(0, "--quiet=2");
    if unlocked(apt().args(&words), LOCK_WAIT).is_err() {
        unlocked(apt().args(["--quiet=2", "update"]), LOCK_WAIT)?;
        unlocked(apt().args(&words), LOCK_WAIT)?;
    }
    match self::missing(packages) {
        still if still.is_empty() => Ok(()),
        still => {
            bail!("{} installed, but their files are not where they should be", still.join(" "))
        }
    }
}

/// Longest wait for another program that installs packages.
const LOCK_WAIT: Duration = Duration::from_secs(15 * 60);

/// Runs `apt-get`, again and again while another program has one of the locks: dpkg's, that of the lists, that of the
/// archives. (`DPkg::Lock::Timeout` waits for the first of these alone.)
fn unlocked(command: &mut Command, within: Duration) -> anyhow::Result<()> {
    const AGAIN: Duration = Duration::from_secs(1);
    let deadline = Instant::now() + within;
    let mut told = false;
    loop {
        let output = command.stdin(Stdio::null()).stdout(Stdio::inherit()).output();
        let output = output.with_context(|| format!("cannot run {}", shown(command)))?;
        let errors = String::from_utf8_lossy(&output.stderr);
        let is_locked = !output.status.success() && errors.contains("Could not get lock");
        if !is_locked || Instant::now() >= deadline {
            io::stderr().write_all(&output.stderr).context("cannot show what apt-get says")?;
            if !output.status.success() {
                bail!("{} failed ({})", shown(command), output.status);
            }
            return Ok(());
        }
        if !told {
            eprint!("waiting for another program that installs packages:\n{errors}");
            told = true;
        }
        interrupt::check()?;
        sleep(AGAIN);
    }
}

fn missing(packages: &[Package]) -> Vec<&'static str> {
    packages.iter().filter(|(_, file)| !Path::new(file).exists()).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fails as `apt-get` does, once less often than `times`, and counts its runs in a file.
    fn locked(file: &Path, times: u32) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", "echo >>$0; test $(wc -l <$0) -ge $1 || { echo 'E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 1 (apt-get)' >&2; exit 100; }"]);
        command.arg(file).arg(times.to_string());
        command
    }

    #[test]
    fn another_apt_get_is_waited_for() {
        let dir = std::env::temp_dir().join(format!("anyverbs-apt-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        let runs = |file: &Path| std::fs::read_to_string(file).unwrap().lines().count();
        let [waits, ends, fails] = ["waits", "ends", "fails"].map(|name| dir.join(name));
        unlocked(&mut locked(&waits, 3), Duration::from_secs(60)).unwrap();
        assert_eq!(runs(&waits), 3);
        // It does not wait for ever, nor after any other error.
        assert!(unlocked(&mut locked(&ends, u32::MAX), Duration::from_millis(1)).is_err());
        let script =
            format!("echo >>{}; echo 'E: Unable to locate package' >&2; exit 100", fails.display());
        assert!(unlocked(Command::new("sh").args(["-c", &script]), LOCK_WAIT).is_err());
        assert_eq!(runs(&fails), 1);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn only_packages_whose_file_is_absent_are_missing() {
        assert_eq!(
            missing(&[("here", "/proc/self/exe"), ("absent", "/nonexistent/file")]),
            ["absent"]
        );
    }
}

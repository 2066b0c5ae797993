//! Code that the tests of several crates share.

pub mod corpus;
mod system_calls;

use std::env;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::process::{Child, Command, id};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

pub use system_calls::system_calls;

/// Names a file. Each test that cannot run here adds a line to it: the executable and the test, a tab, the reason.
///
/// A test that returns early passes, for a test runner knows no other end. `cargo xtask test` sets this variable and counts
/// the tests of the file as skipped.
pub const SKIPS: &str = "ANYVERBS_TEST_SKIPS";

/// Says that the calling test cannot run here, and why. The test returns afterwards.
///
/// The line goes to standard error, and to the file that [`SKIPS`] names.
///
/// # Panics
/// If the file cannot be written: the test would count as passed.
pub fn skip(reason: impl Display) {
    let reason = reason.to_string().replace('\n', " ");
    let test = test_name();
    // Not by `eprintln`, which libtest hides when a test passes.
    let _ = writeln!(io::stderr(), "SKIPPED {test}: {reason}");
    let Some(file) = env::var_os(SKIPS) else { return };
    let line = format!("{test}\t{reason}\n");
    // Lines of several processes stay whole: each is one write at the end of the file.
    let file = OpenOptions::new().append(true).create(true).open(file);
    file.and_then(|mut file| file.write_all(line.as_bytes())).expect("a skip is recorded");
}

/// A stopwatch for what has to be quick. It stands while the machine is too busy for that. Then a thread of any process waits for a
/// processor (the line `some` of `/proc/pressure/cpu`), or a hypervisor holds one back (`steal` in proc_stat(5)).
///
/// It never shows less than a quarter of what a clock does, so whatever takes four times too long is found on any machine. Where the
/// system does not count, it shows what a clock does.
#[derive(Debug)]
pub struct Stopwatch {
    begin: Instant,
    withheld: Duration,
}

impl Stopwatch {
    /// One that runs from now on.
    #[must_use]
    pub fn start() -> Self {
        Self { withheld: withheld(), begin: Instant::now() }
    }

    /// The time since the start, without that in which it stood.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        let elapsed = self.begin.elapsed();
        elapsed.saturating_sub(withheld().saturating_sub(self.withheld)).max(elapsed / 4)
    }
}

/// How long threads have had to wait for processors since the system began. Both counts may grow at the same time.
fn withheld() -> Duration {
    let read = |file| std::fs::read_to_string(file).unwrap_or_default();
    let number = |text: Option<&str>| text.and_then(|text| text.parse().ok()).unwrap_or(0);
    let waited = read("/proc/pressure/cpu");
    let waited = waited.lines().find_map(|line| line.strip_prefix("some ")?.split_once("total="));
    let waited = Duration::from_micros(number(waited.map(|(_, total)| total)));
    let stolen = read("/proc/stat");
    let stolen: u64 = number(stolen.split_whitespace().nth(8));
    let of = |what| {
        // SAFETY: touches no memory.
        unsafe { libc::sysconf(what) }.max(1) as u64
    };
    // The sum over all processors.
    let ticks = of(libc::_SC_CLK_TCK) * of(libc::_SC_NPROCESSORS_ONLN);
    waited.max(Duration::from_millis(stolen * 1000 / ticks))
}

/// Divides the number of random runs: `cargo xtask test --gate` sets it to 3.
pub const SHARE: &str = "ANYVERBS_TEST_SHARE";

/// The number of seeds to run where an ordinary run has `all`: the share that [`SHARE`] names, at least one.
///
/// # Panics
/// If [`SHARE`] is set and no number.
#[must_use]
pub fn seeds(all: u64) -> u64 {
    let Ok(share) = env::var(SHARE) else { return all };
    let share: u64 = share.parse().unwrap_or_else(|_| panic!("{SHARE}={share} is no number"));
    all.div_ceil(share)
}

/// The executable and the name of the calling test.
fn test_name() -> String {
    let exe = env::current_exe().expect("a test knows its executable");
    let exe = exe.file_name().unwrap_or_default().to_string_lossy().into_owned();
    // libtest names the thread after its test, but runs a test on the main thread where it may use one thread only.
    let thread = std::thread::current();
    let named = thread.name().filter(|name| *name != "main").map(str::to_owned);
    let asked_for = || env::args().skip_while(|word| word != "--exact").nth(1);
    format!("{exe} {}", named.or_else(asked_for).unwrap_or_default())
}

/// Whether the caller is root. If not, the calling test is skipped.
#[must_use]
pub fn root_or_skip() -> bool {
    // SAFETY: geteuid cannot fail and touches no memory.
    let root = unsafe { libc::geteuid() } == 0;
    if !root {
        skip("needs root");
    }
    root
}

/// Whether this user can make a network namespace with `unshare -Urn`. If not, the calling test is skipped.
#[must_use]
pub fn unshare_or_skip() -> bool {
    let can = Command::new("unshare").args(["-Urn", "ip", "link"]).output();
    let can = can.is_ok_and(|output| output.status.success());
    if !can {
        skip("no network namespaces for this user here");
    }
    can
}

/// Stops a process with SIGSTOP, and waits until all its threads stand: until then it may go on answering. It goes on with SIGCONT.
///
/// # Panics
/// If it has ended.
pub fn stop(child: &Child) {
    // SAFETY: a child that its owner has not waited for, so its number is not reused. Zero is a valid siginfo_t, and
    // the call gets a live one. The child stays waitable.
    unsafe {
        assert_eq!(libc::kill(child.id() as i32, libc::SIGSTOP), 0);
        let mut info: libc::siginfo_t = std::mem::zeroed();
        let how = libc::WSTOPPED | libc::WEXITED | libc::WNOWAIT;
        assert_eq!(libc::waitid(libc::P_PID, child.id(), &raw mut info, how), 0);
        assert_eq!(info.si_code, libc::CLD_STOPPED);
    }
}

/// Runs `test`, the body of the test called `name`, in a process where nothing else runs.
///
/// `cargo test` runs all tests of a crate in one process. There they share its engine. One test may map memory that
/// another has just unmapped. The child of one test holds descriptors that another has closed until it calls exec.
///
/// # Panics
/// If the test fails, or is not called `name`.
pub fn in_own_process(name: &str, test: impl FnOnce()) {
    const ALONE: &str = "ANYVERBS_TEST_ALONE";
    if env::var_os(ALONE).is_some() {
        return test();
    }
    let exe = env::current_exe().expect("a test knows its executable");
    let mut alone = Command::new(exe);
    // It does not share a registry with them either.
    alone.env_remove("ANYVERBS_REGISTRY").env_remove("ANYVERBS_UDP_PORT");
    let output = alone.args(["--exact", name]).env(ALONE, "1").output();
    let output = output.expect("a test can start its executable");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{}\n{said}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A UDP port for the devices of one test, which no other test of this host uses meanwhile.
#[derive(Debug)]
pub struct UdpPort {
    number: u16,
    _held: UnixDatagram,
}

impl UdpPort {
    /// A port that no test has reserved, and no program has.
    ///
    /// # Panics
    /// If there is none.
    #[must_use]
    pub fn reserve() -> Self {
        // Below the ports that the kernel gives to sockets without a choice.
        const PORTS: std::ops::Range<u32> = 8_000..32_000;
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let from = id().wrapping_mul(7).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let ports = (0..PORTS.len() as u32)
            .map(|i| PORTS.start + from.wrapping_add(i) % PORTS.len() as u32);
        let mut free = ports.filter_map(|port| {
            let name = SocketAddr::from_abstract_name(format!("anyverbs-test-port/{port}"));
            let held = UnixDatagram::bind_addr(&name.ok()?).ok()?;
            let number = u16::try_from(port).ok()?;
            UdpSocket::bind((Ipv4Addr::UNSPECIFIED, number)).ok()?;
            let in_use = |error: io::Error| error.kind() == io::ErrorKind::AddrInUse;
            if UdpSocket::bind((Ipv6Addr::UNSPECIFIED, number)).is_err_and(in_use) {
                return None;
            }
            Some(Self { number, _held: held })
        });
        free.next().expect("a port that no other test has reserved")
    }

    /// A port for as long as this process lives.
    #[must_use]
    pub fn of_this_process() -> u16 {
        let port = std::mem::ManuallyDrop::new(Self::reserve());
        port.number
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u16 {
        self.number
    }
}

/// Gives the devices of a command the port and the registry of the calling test. They are on the loopback interface, unless the
/// environment names interfaces. `ANYVERBS_REGISTRY` and `ANYVERBS_UDP_PORT` of the environment are overridden.
///
/// The port is that of the calling thread, and commands of one thread share it. A test that makes commands in threads of its own gives
/// each thread other devices. The port is free again when the thread ends.
///
/// `cargo test` runs the tests of a file as threads of one process. What lists the processes of a user, such as `anyverbs top`, would
/// show one test those of the others.
pub fn isolate(command: &mut Command) -> &mut Command {
    thread_local! {
        /// A test is a thread. Nobody else has its port while it lives.
        static PORT: UdpPort = UdpPort::reserve();
    }
    PORT.with(|port| {
        let registry = format!("anyverbs-test-{}-{}", id(), port.number());
        command.env("ANYVERBS_REGISTRY", registry);
        command.env("ANYVERBS_UDP_PORT", port.number().to_string());
        if env::var_os("ANYVERBS_INTERFACES").is_none() {
            command.env("ANYVERBS_INTERFACES", "lo");
        }
        command
    })
}

/// Gives the devices of this process and its children a port and a registry of their own, on the loopback interface. What
/// the environment says already stays.
pub fn isolate_device() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for (name, value) in [
            ("ANYVERBS_REGISTRY", format!("anyverbs-test-{}", id())),
            ("ANYVERBS_UDP_PORT", UdpPort::of_this_process().to_string()),
            ("ANYVERBS_INTERFACES", "lo".into()),
        ] {
            if env::var_os(name).is_none() {
                // SAFETY: before the first device is opened, and nothing else in these tests writes the environment.
                unsafe { env::set_var(name, value) };
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopwatch_stands_while_processors_are_short() {
        if std::fs::read_to_string("/proc/pressure/cpu").is_err() {
            return skip("the system does not say how long threads wait for processors");
        }
        let begin = Instant::now();
        let watch = Stopwatch::start();
        let time = Duration::from_millis(500);
        std::thread::scope(|scope| {
            let count = std::thread::available_parallelism().unwrap().get() + 2;
            (0..count).for_each(|_| {
                scope.spawn(|| while begin.elapsed() < time {});
            });
        });
        assert!(watch.elapsed() < begin.elapsed() / 2, "{:?}", watch.elapsed());
    }

    #[test]
    fn ports_are_reserved_once() {
        let ports = [(); 100].map(|()| UdpPort::reserve());
        let mut numbers: Vec<_> = ports.iter().map(UdpPort::number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), ports.len());
    }
}

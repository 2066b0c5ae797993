//! The virtual machine with the kernel's Soft-RoCE, driven through `conformance/rxe/rxe-vm.sh`.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::table::Family;
use crate::conformance::{Process, quiet, wait_for};
use crate::{packages, workspace};

/// About two minutes on a busy machine, and the time to fetch the packages.
const BUILD_TIME: Duration = Duration::from_secs(900);
const START_TIME: Duration = Duration::from_secs(200);
/// A job that was ended says so soon.
const GRACE: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(20);
/// The script's status for a guest whose image would be made differently now.
const OUTDATED: &str = " outdated";

/// A running guest on a bridge with this machine; stopped with this value if it was started for it.
pub(crate) struct Guest {
    vm: Vm,
    /// From 1.
    number: u8,
    ours: bool,
    /// The guest's GID table, in lines like `gids/1:0000:...:0a63:0002` and `gid_attrs/types/1:RoCE v2`.
    gids: String,
}

/// The script and its settings.
struct Vm {
    script: PathBuf,
    work: PathBuf,
    namespace: String,
    bridge: String,
    net: String,
    net6: String,
}

impl Guest {
    /// Builds the image if there is none and starts guest `number`, from 1, if it does not run. The inner error is why
    /// there is no guest to be had.
    pub(crate) fn start(number: u8, log: &Path) -> anyhow::Result<Result<Self, String>> {
        // SAFETY: cannot fail and touches no memory.
        if unsafe { libc::geteuid() } != 0 {
            return Ok(Err("the guest's network takes root".into()));
        }
        if let Err(error) = packages::ensure(&[packages::QEMU]) {
            return Ok(Err(format!("no QEMU: {error:#}")));
        }
        let vm = Vm::from_environment();
        let status = quiet(&mut vm.command(&["status"]))?;
        let running = status.lines().find(|line| line.starts_with(&format!("guest {number} ")));
        if running.is_some_and(|line| line.ends_with(OUTDATED)) {
            bail!(
                "the guest that runs is outdated: {} stop {number}",
                workspace::shown(&vm.command(&[]))
            );
        }
        if running.is_none() && !vm.command(&["fresh"]).status().is_ok_and(|it| it.success()) {
            println!("building the guest in {}", vm.work.display());
            for step in ["deps", "build"] {
                if let Err(reason) = vm.step(&[step], log, BUILD_TIME)? {
                    return Ok(Err(reason));
                }
            }
        }
        let ours = running.is_none();
        // From here on a guest that does not come up is taken down again.
        let mut guest = Guest { vm, number, ours, gids: String::new() };
        let start = ["start", &number.to_string()];
        if ours && let Err(reason) = guest.vm.step(&start, log, START_TIME)? {
            return Ok(Err(reason));
        }
        let gids = guest.run(
            "cd /sys/class/infiniband/rxe0/ports/1 && grep -rs . gids gid_attrs/types; true",
            Duration::from_secs(60),
        );
        guest.gids = match gids {
            Ok(table) => table,
            Err(error) => return Ok(Err(format!("no Soft-RoCE in the guest: {error:#}"))),
        };
        if guest.gid_index(Family::Ipv4).is_none() {
            return Ok(Err("no Soft-RoCE in the guest: its GID table lacks its address".into()));
        }
        Ok(Ok(guest))
    }

    /// The guest's address, without a scope.
    pub(crate) fn address(&self, family: Family) -> String {
        self.numbered(family, self.number + 1)
    }

    /// This machine's address on the bridge.
    pub(super) fn host_address(&self, family: Family) -> String {
        self.numbered(family, 1)
    }

    fn numbered(&self, family: Family, number: u8) -> String {
        match family {
            Family::Ipv4 => format!("{}.{number}", self.vm.net),
            Family::Ipv6 => format!("{}:{number}", self.vm.net6),
            Family::LinkLocal => format!("fe80::{number}"),
        }
    }

    /// The interface by which the guest, or this machine, reaches the other.
    pub(super) fn scope(&self, here: bool) -> &str {
        if here { &self.vm.bridge } else { "eth0" }
    }

    /// The index of an address of the guest, as RoCE v2, in its GID table.
    pub(crate) fn gid_index(&self, family: Family) -> Option<u64> {
        gid_index(&self.gids, &self.address(family))
    }

    /// A file that both see: here, and in the guest.
    pub(super) fn shared(&self, name: &str) -> (PathBuf, PathBuf) {
        let share = self.vm.work.join(format!("vm{}/share", self.number));
        (share.join(name), Path::new("/mnt").join(name))
    }

    /// The guest's end of the wire, on which packets look as on a cable: segmented.
    pub(super) fn interface(&self) -> String {
        format!("{}{}", self.vm.bridge, self.number)
    }

    /// Sets the MTU of the cable's both ends.
    pub(super) fn set_mtu(&self, mtu: u16) -> anyhow::Result<()> {
        let number = mtu.to_string();
        for interface in [&self.interface(), &self.vm.bridge] {
            quiet(self.host_command("ip").args(["link", "set", interface, "mtu", &number]))?;
        }
        let time = Duration::from_secs(60);
        self.run(&format!("ip link set {} mtu {mtu}", self.scope(false)), time).map(drop)
    }

    /// A command that runs `program` on this machine, where the bridge is.
    pub(super) fn host_command(&self, program: impl Into<OsString>) -> Command {
        if self.vm.namespace.is_empty() {
            return Command::new(program.into());
        }
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.vm.namespace]).arg(program.into());
        command
    }

    /// Starts a shell command in the guest.
    pub(crate) fn spawn(&self, command: &str) -> anyhow::Result<Job<'_>> {
        let number = self.number.to_string();
        let name = quiet(&mut self.vm.command(&["spawn", &number, command]))?;
        let name = name.trim();
        let file = self.vm.work.join(format!("vm{number}/share/jobs")).join(name);
        Ok(Job { vm: &self.vm, guest: self.number, name: name.into(), file })
    }

    /// Runs a shell command in the guest to its end.
    pub(crate) fn run(&self, command: &str, time: Duration) -> anyhow::Result<String> {
        let mut job = self.spawn(command)?;
        let end = Instant::now() + time;
        wait_for(end, || Ok(job.ended()?.is_some()))?;
        match job.ended()? {
            Some(0) => Ok(job.output()),
            Some(status) => {
                bail!("`{command}` in the guest ended with {status}: {}", job.output().trim())
            }
            None => bail!("`{command}` in the guest takes longer than {} s", time.as_secs()),
        }
    }

    /// Waits until a process in the guest listens on a port of TCP or of librdmacm, or is bound to one of UDP.
    pub(crate) fn wait_for_listener(&self, port: u16, time: Duration) -> anyhow::Result<()> {
        let polls = time.as_millis() / 100;
        let tcp = format!("grep -qs ':{port:04X} 0*:0000 0A' /proc/net/tcp /proc/net/tcp6");
        let udp = format!("grep -qs ':{port:04X} 0*:0000 07' /proc/net/udp /proc/net/udp6");
        let cm = format!("rdma resource show cm_id | grep -q 'state LISTEN .*:{port}\\b'");
        self.run(
            &format!(
                "for i in $(seq {polls}); do {{ {tcp} || {udp} || {cm}; }} && exit; sleep 0.1; done; exit 1"
            ),
            time * 2,
        )
        .map(|_| ())
    }
}

/// Finds an address, as RoCE v2, in the lines of a GID table.
fn gid_index(table: &str, address: &str) -> Option<u64> {
    let gid = match address.parse().ok()? {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    };
    table.lines().find_map(|line| {
        let (index, text) = line.strip_prefix("gids/")?.split_once(':')?;
        let v2 = format!("gid_attrs/types/{index}:RoCE v2");
        let same = text.parse::<Ipv6Addr>().ok()? == gid;
        (same && table.lines().any(|line| line == v2)).then(|| index.parse().ok())?
    })
}

impl Drop for Guest {
    fn drop(&mut self) {
        if self.ours
            && let Err(error) = self.vm.stop(self.number)
        {
            eprintln!("xtask: {error:#}");
        }
    }
}

impl Vm {
    /// With the script's defaults for variables that are not set.
    fn from_environment() -> Self {
        let setting = |name, default: &str| env::var(name).unwrap_or_else(|_| default.into());
        Vm {
            script: workspace::root().join("conformance/rxe/rxe-vm.sh"),
            work: env::var_os("RXE_WORK")
                .filter(|work| !work.is_empty())
                .map_or_else(|| workspace::target().join("rxe"), PathBuf::from),
            namespace: setting("RXE_NETNS", "rxe-peer"),
            bridge: setting("RXE_BR", "rxebr"),
            net: setting("RXE_NET", "10.99.0"),
            net6: setting("RXE_NET6", "fd99:"),
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.script);
        command
            .args(arguments)
            .env("RXE_WORK", &self.work)
            .env("RXE_NETNS", &self.namespace)
            .env("RXE_BR", &self.bridge)
            .env("RXE_NET", &self.net)
            .env("RXE_NET6", &self.net6);
        command
    }

    /// Stops a guest, and takes the bridge down after the last one.
    fn stop(&self, number: u8) -> anyhow::Result<()> {
        quiet(&mut self.command(&["stop", &number.to_string()]))?;
        let status = quiet(&mut self.command(&["status"]))?;
        if !status.lines().any(|line| line.starts_with("guest ")) {
            quiet(&mut self.command(&["stop", "all"]))?;
        }
        Ok(())
    }

    /// Runs a step of the script. The inner error is the last thing that it said.
    fn step(
        &self,
        arguments: &[&str],
        log: &Path,
        time: Duration,
    ) -> anyhow::Result<Result<(), String>> {
        let mut process = Process::start(&mut self.command(arguments), log)?;
        let what = arguments.join(" ");
        Ok(match process.wait(Instant::now() + time)? {
            Some(status) if status.success() => Ok(()),
            Some(status) => {
                let said = process.output();
                let last = said.lines().rfind(|line| !line.trim().is_empty()).unwrap_or_default();
                Err(format!("the guest does not {what} ({status}): {last} (see {})", log.display()))
            }
            None => Err(format!("the guest does not {what} in {} s", time.as_secs())),
        })
    }
}

/// A shell command in the guest, ended with this value.
pub(crate) struct Job<'a> {
    vm: &'a Vm,
    guest: u8,
    name: String,
    /// Without extension: the guest writes `.out` as it goes and `.rc` at the end.
    file: PathBuf,
}

impl Job<'_> {
    /// The exit status if the command has ended.
    pub(crate) fn ended(&mut self) -> anyhow::Result<Option<i32>> {
        match fs::read_to_string(self.file.with_extension("rc")) {
            // Made, not yet written.
            Ok(text) if text.is_empty() => Ok(None),
            Ok(text) => {
                let status = text.trim().parse();
                status.map(Some).with_context(|| format!("an exit status {text:?} from the guest"))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context("cannot read the guest's files"),
        }
    }

    /// Its output so far.
    pub(crate) fn output(&self) -> String {
        let bytes = fs::read(self.file.with_extension("out")).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Ends the command if it still runs, after an interruption, too: no other process knows of it.
    pub(super) fn stop(&mut self) {
        if !matches!(self.ended(), Ok(None)) {
            return;
        }
        if let Err(error) =
            quiet(&mut self.vm.command(&["kill", &self.guest.to_string(), &self.name]))
        {
            eprintln!("xtask: {error:#}");
            return;
        }
        let end = Instant::now() + GRACE;
        while matches!(self.ended(), Ok(None)) && Instant::now() < end {
            sleep(POLL);
        }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.stop();
        if matches!(self.ended(), Ok(None)) {
            eprintln!("xtask: a job does not end in the guest: {}", self.file.display());
            return;
        }
        // The guest reads the whole directory several times a second, which is slow when files pile up.
        for extension in ["sh", "pid", "out", "rc"] {
            let _ = fs::remove_file(self.file.with_extension(extension));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt;

    const CHILD: &str = "XTASK_TEST_INTERRUPTED";

    /// An interruption ends a program that runs in a guest that goes on, before its files are removed. The guest finds
    /// it by these files.
    #[test]
    fn a_job_is_ended_after_an_interruption_too() {
        if env::var_os(CHILD).is_none() {
            // In a process of its own, since all of one is interrupted.
            let name = "conformance::rxe::guest::tests::a_job_is_ended_after_an_interruption_too";
            let mut again = Command::new(env::current_exe().unwrap());
            quiet(again.args(["--exact", name, "--nocapture"]).env(CHILD, "1")).unwrap();
            return;
        }
        let folder = env::temp_dir().join(format!("xtask-job-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let script = folder.join("script");
        fs::write(&script, "#!/bin/sh\n: > \"$RXE_WORK/$3.kill\"\n").unwrap();
        quiet(Command::new("chmod").arg("+x").arg(&script)).unwrap();
        let vm = Vm { script, work: folder.clone(), ..Vm::from_environment() };
        let file = folder.join("job");
        let path = |extension| file.with_extension(extension);
        fs::write(path("pid"), "1").unwrap();
        let guest = std::thread::spawn({
            let [kill, pid, rc] = ["kill", "pid", "rc"].map(path);
            move || {
                while !kill.exists() {
                    sleep(POLL);
                }
                // Its next look into the directory.
                sleep(POLL * 10);
                let found = pid.exists();
                fs::write(rc, "143").unwrap();
                found
            }
        });
        interrupt::catch();
        // SAFETY: touches no memory; the signal is caught.
        unsafe { libc::raise(libc::SIGTERM) };
        assert!(interrupt::check().is_err());
        drop(Job { vm: &vm, guest: 1, name: "job".into(), file: file.clone() });
        assert!(guest.join().unwrap(), "the guest did not find the job any more");
        assert!(!path("pid").exists() && !path("rc").exists());
        fs::remove_dir_all(folder).unwrap();
    }

    /// apt knows the kernel only after an update, or never.
    #[test]
    fn a_list_of_packages_that_is_too_old_is_renewed() {
        let folder = env::temp_dir().join(format!("xtask-apt-{}", std::process::id()));
        let [work, bin] = ["work", "bin"].map(|name| folder.join(name));
        [&work, &bin].into_iter().for_each(|folder| fs::create_dir_all(folder).unwrap());
        let programs = [
            (
                "apt-cache",
                "test -e \"$RXE_WORK/renewed\" || exit 100\necho '  Depends: linux-image-9.9'",
            ),
            ("apt-get", "echo \"$1\" >> \"$RXE_WORK/asked\"\n: > \"$RXE_WORK/$RENEWS\""),
            ("mmdebstrap", "exit 77"),
        ];
        for (name, text) in programs {
            let program = bin.join(name);
            fs::write(&program, format!("#!/bin/sh\n{text}\n")).unwrap();
            quiet(Command::new("chmod").arg("+x").arg(&program)).unwrap();
        }
        let path = format!("{}:{}", bin.display(), env::var("PATH").unwrap());
        let vm = Vm { work: work.clone(), ..Vm::from_environment() };
        for (renews, asked, status) in
            [("nothing", "update\n", 1), ("renewed", "update\ndownload\n", 77)]
        {
            let mut build = vm.command(&["build"]);
            let output = build.env("PATH", &path).env("RENEWS", renews).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(status), "{said}");
            assert_eq!(fs::read_to_string(work.join("asked")).unwrap(), asked, "{said}");
            fs::remove_file(work.join("asked")).unwrap();
        }
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn the_gid_of_an_address_is_found_by_its_type() {
        let table = "\
gids/0:fe80:0000:0000:0000:5054:00ff:fe99:0002
gids/1:0000:0000:0000:0000:0000:ffff:0a63:0002
gids/2:0000:0000:0000:0000:0000:ffff:0a63:0002
gids/3:0000:0000:0000:0000:0000:0000:0000:0000
gid_attrs/types/0:RoCE v2
gid_attrs/types/1:IB/RoCE v1
gid_attrs/types/2:RoCE v2
";
        assert_eq!(gid_index(table, "10.99.0.2"), Some(2));
        assert_eq!(gid_index(table, "fe80::5054:ff:fe99:2"), Some(0));
        assert_eq!(gid_index(table, "10.99.0.3"), None);
        assert_eq!(gid_index("", "10.99.0.2"), None);
    }
}

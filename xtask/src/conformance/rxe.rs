//! Unmodified tools between the device and the Linux kernel's Soft-RoCE, every packet captured and checked.

mod capture;
mod docs;
mod guest;
mod table;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use self::capture::{Addresses, Capture};
use self::docs::Results;
pub(crate) use self::guest::Guest;
use self::guest::Job;
use self::table::Case;
pub(crate) use self::table::Family;
use super::table::fill;
use super::tools::{gid_index, noise, tail};
use super::{Process, Selection, Sockets, Tally, wait_for};
use crate::dist::Dist;
use crate::{packages, workspace};

/// Time for a server to listen, and for one side to end after the other. Limits of this suite end programs that hang,
/// and measure nothing. An emulated guest is slow, and much slower on a busy machine.
const SOON: Duration = Duration::from_secs(60);
/// The factor on the time that the table allows a tool.
const EMULATED: u64 = 3;
/// Time for a peer to learn that its server was killed; otherwise it would wait for ever.
const HEARD: Duration = Duration::from_secs(20);
/// Time for a command of the runner's own in the guest.
const GUEST_TIME: Duration = Duration::from_secs(60);
/// Below the range from which the kernel takes ports for clients.
const FIRST_PORT: u16 = 21_000;
/// MTU of the cable, unless a case gives another; the guest has it from its start.
const MTU: u16 = 1500;
/// The file that a client sends, and the copy that its server makes.
const SOURCE: &str = "source";
const COPY: &str = "copy";
/// The copy in the guest. Files of its file system can be mapped shared, unlike those of the shared directory's.
const GUEST_COPY: &str = "/tmp/copy";
/// Before a command of the guest that is to use rsockets: rdma-core's own.
const GUEST_SOCKETS: &str = "LD_PRELOAD=/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so ";

/// Runs the selected cases and reports their results. Without a guest they are skipped.
pub(crate) fn run(dist: &Dist, selection: &Selection) -> anyhow::Result<Tally> {
    packages::ensure(&[
        packages::IPROUTE2,
        packages::IBVERBS_UTILS,
        packages::PERFTEST,
        packages::RDMACM_UTILS,
        packages::TCPDUMP,
        packages::TSHARK,
        packages::PYTHON3,
        packages::CC,
        packages::LIBC6_DEV,
        packages::LIBIBVERBS_DEV,
    ])?;
    let mut cases = table::read(&workspace::root().join("conformance/rxe.toml"))?;
    let all = cases.len();
    cases.retain(|case| selection.takes(&case.name(), case.default));
    if cases.is_empty() {
        bail!("no case of the table has that in its name");
    }
    println!("rxe: {} of {all} cases", cases.len());
    let captures = workspace::target().join("rxe");
    let scratch = workspace::target().join("conformance/rxe");
    for folder in [&captures, &scratch] {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }

    let mut tally = Tally::default();
    let guest = match Guest::start(1, &scratch.join("guest.log"))? {
        Ok(guest) => guest,
        Err(reason) => {
            for case in &cases {
                println!("skip {}  {reason}", case.name());
            }
            tally.skipped = cases.len();
            println!("rxe: {tally}: {reason}");
            return Ok(tally);
        }
    };
    let gids = Gids {
        ipv4: host_gid(dist, &guest, Family::Ipv4)?,
        ipv6: host_gid(dist, &guest, Family::Ipv6)?,
        link_local: host_gid(dist, &guest, Family::LinkLocal)?,
    };
    let mut failures = Vec::new();
    let mut results = Results::default();
    let mut mtu = MTU;
    for (number, (case, port)) in cases.iter().zip(FIRST_PORT..).enumerate() {
        let started = Instant::now();
        let wanted = case.mtu.unwrap_or(MTU);
        if mtu != wanted {
            guest.set_mtu(wanted)?;
            mtu = wanted;
        }
        let runner = Runner { dist, guest: &guest, gids, case, port, scratch: &scratch };
        let outcome = runner.run(&captures.join(case.file_name() + ".pcap"))?;
        let seconds = started.elapsed().as_secs_f64();
        let head = format!("[{:>3}/{}] {}", number + 1, cases.len(), case.name());
        match outcome {
            Ok(figures) => {
                tally.passed += 1;
                results.add(case, None);
                println!("ok   {head}  {figures}  ({seconds:.1} s)");
            }
            Err((reason, said)) => {
                tally.failed += 1;
                results.add(case, Some(&reason));
                println!("FAIL {head}  {reason}  ({seconds:.1} s)\n{said}");
                failures.push(case.name());
            }
        }
    }
    println!("rxe: {tally}; captures in {}", captures.display());
    for name in failures {
        println!("  failed: {name}");
    }
    if selection.write_docs {
        results.write()?;
    }
    Ok(tally)
}

fn host_gid(dist: &Dist, guest: &Guest, family: Family) -> anyhow::Result<u64> {
    gid_index(guest.host_command(dist.anyverbs()), &guest.host_address(family))
}

/// The indices of this machine's addresses on the bridge in the device's GID table.
#[derive(Debug, Clone, Copy)]
struct Gids {
    ipv4: u64,
    ipv6: u64,
    link_local: u64,
}

impl Gids {
    fn of(self, family: Family) -> u64 {
        match family {
            Family::Ipv4 => self.ipv4,
            Family::Ipv6 => self.ipv6,
            Family::LinkLocal => self.link_local,
        }
    }
}

/// One case.
struct Runner<'a> {
    dist: &'a Dist,
    guest: &'a Guest,
    gids: Gids,
    case: &'a Case,
    port: u16,
    scratch: &'a Path,
}

/// A tool on either side of the wire, ended with this value.
enum Program<'a> {
    Here(Process),
    Rxe(Job<'a>),
}

impl Program<'_> {
    /// The program's end, if it has ended. The inner error is a status other than 0.
    fn ended(&mut self) -> anyhow::Result<Option<Result<(), String>>> {
        Ok(match self {
            Program::Here(process) => process
                .ended()?
                .map(|status| if status.success() { Ok(()) } else { Err(status.to_string()) }),
            Program::Rxe(job) => job.ended()?.map(|status| match status {
                0 => Ok(()),
                status => Err(format!("exit status: {status}")),
            }),
        })
    }

    fn output(&self) -> String {
        match self {
            Program::Here(process) => process.output(),
            Program::Rxe(job) => job.output(),
        }
    }

    fn stop(&mut self) {
        match self {
            Program::Here(process) => process.stop(),
            Program::Rxe(job) => job.stop(),
        }
    }
}

impl<'a> Runner<'a> {
    /// The inner error is the case's: the complaint, and the programs' output.
    fn run(&self, file: &Path) -> anyhow::Result<Result<String, (String, String)>> {
        if self.guest.gid_index(self.family()).is_none() {
            return Ok(Err(("the guest has no such address".into(), String::new())));
        }
        self.make_source()?;
        self.compile()?;
        let capture = Capture::start(self.guest, file, &self.output("tcpdump"))?;
        let sockets = Sockets::of(&capture.id().to_string());
        let mut server = self.start(false)?;
        let mut client = None;
        let verdict = match self.wait_for_server(&mut server, &sockets)? {
            Ok(()) => {
                let client = client.insert(self.start(true)?);
                self.judge(client, &mut server)?
            }
            Err(reason) => Err(reason),
        };
        // Everything is written, and nothing sent any more, once they have ended.
        if let Some(client) = &mut client {
            client.stop();
        }
        server.stop();
        let captured = capture.finish()?;
        let verdict = match verdict {
            Ok(figures) => self.compare_files()?.map(|()| figures),
            Err(reason) => Err(reason),
        };
        // The reason for a tool's failure is often in the capture, so that is judged as well.
        let wire = match captured {
            Ok(file) => capture::check(self.case, &file, &self.addresses())?,
            Err(reason) => Err(reason),
        };
        let reason = match (verdict, wire) {
            (Ok(figures), Ok(packets)) if figures.is_empty() => return Ok(Ok(packets)),
            (Ok(figures), Ok(packets)) => return Ok(Ok(format!("{figures}; {packets}"))),
            (Ok(_), Err(wire)) => wire,
            (Err(tool), Ok(packets)) => format!("{tool}; {packets}"),
            (Err(tool), Err(wire)) => format!("{tool}; {wire}"),
        };
        let mut said = tail("server", &server.output());
        if let Some(client) = client {
            said += &tail("client", &client.output());
        }
        Ok(Err((reason, said)))
    }

    fn wait_for_server(
        &self,
        server: &mut Program<'_>,
        sockets: &Sockets,
    ) -> anyhow::Result<Result<(), String>> {
        let port = self.port();
        let listens = match (&self.case.ready, &server) {
            (None, Program::Rxe(_)) => self.guest.wait_for_listener(port, SOON).is_ok(),
            (ready, _) => wait_for(Instant::now() + SOON, || {
                Ok(server.ended()?.is_some()
                    || match ready {
                        Some(text) => server.output().contains(text.as_str()),
                        // A program that is to use the device must not have the kernel's socket.
                        None if self.case.sockets => sockets.cm_listens(port)?,
                        None => {
                            sockets.listens(port)?
                                || sockets.cm_listens(port)?
                                || sockets.is_bound(port)?
                        }
                    })
            })?,
        };
        Ok(match server.ended()? {
            Some(ending) => Err(format!(
                "the server ended before it listened ({})",
                ending.err().unwrap_or_else(|| "exit status: 0".into())
            )),
            None if listens => Ok(()),
            None => Err(format!("the server does not listen after {} s", SOON.as_secs())),
        })
    }

    /// Waits for both and reads their output.
    fn judge(
        &self,
        client: &mut Program<'_>,
        server: &mut Program<'_>,
    ) -> anyhow::Result<Result<String, String>> {
        let case = self.case;
        let deadline = Instant::now() + Duration::from_secs(case.timeout_s * EMULATED);
        let mut heard = deadline;
        if let (Some(text), Program::Here(launcher)) = (&case.kill_server_at, &mut *server) {
            wait_for(deadline, || Ok(client.ended()?.is_some() || client.output().contains(text)))?;
            launcher.kill_program()?;
            heard = Instant::now() + HEARD;
        }
        // A side without the other may wait for ever.
        wait_for(deadline, || Ok(client.ended()?.is_some() || server.ended()?.is_some()))?;
        let late = deadline.min(Instant::now() + SOON).min(heard);
        wait_for(late, || {
            Ok(client.ended()?.is_some() && (case.stays || server.ended()?.is_some()))
        })?;
        if case.stays && server.ended()?.is_none() {
            server.stop();
        }
        let mut endings = vec![("client", client.ended()?)];
        if !case.stays {
            endings.push(("server", server.ended()?));
        }
        let fails = case.fails_with.is_some();
        let outputs = [server.output(), client.output()];
        let lost_race = |side: &str| {
            let output = &outputs[usize::from(side == "client")];
            case.race.as_ref().is_some_and(|words| output.contains(words.as_str()))
        };
        for (side, ending) in &endings {
            match ending {
                // If one was killed, the manner of their end does not matter. It counts that they end, and report.
                Some(_) if case.kill_server_at.is_some() => {}
                Some(Err(_)) if lost_race(side) => {}
                Some(Err(status)) if !fails => {
                    return Ok(Err(format!("the {side} ended with {status}")));
                }
                Some(Ok(())) if fails => return Ok(Err(format!("the {side} was to fail"))),
                None => return Ok(Err(format!("the {side} does not end"))),
                _ => {}
            }
        }
        if let Some(complaint) = case.unprinted(&outputs) {
            return Ok(Err(complaint));
        }
        if let Some(want) = &case.fails_with {
            return Ok(match outputs.concat().contains(want.as_str()) {
                true => Ok(format!("fails as it must: {want}")),
                false => Err(format!("it failed without {want:?}")),
            });
        }
        if case.report.on_both_sides()
            && let Err(reason) = case.report.read(&server.output(), case.rows)
        {
            return Ok(Err(format!("the server: {reason}")));
        }
        // The clock of an emulated machine may go wrong.
        Ok(if case.place.client_is_here() {
            case.report.read(&client.output(), case.rows)
        } else {
            case.report.read_untimed(&client.output(), case.rows)
        })
    }

    fn port(&self) -> u16 {
        self.case.port.unwrap_or(self.port)
    }

    /// Starts the tool on its side.
    fn start(&self, client: bool) -> anyhow::Result<Program<'a>> {
        let here = client == self.case.place.client_is_here();
        let family = self.family();
        let gid = if here { Some(self.gids.of(family)) } else { self.guest.gid_index(family) };
        let gid = gid.context("looked for before")?.to_string();
        let port = self.port().to_string();
        let dialled = if self.case.dial_ipv4 { Family::Ipv4 } else { family };
        let (own, peer) = (self.dial(family, here, here), self.dial(dialled, !here, here));
        let path = |name, here: bool| {
            let (host, guest) = self.guest.shared(name);
            if here { host } else { guest }.display().to_string()
        };
        // The client reads the one, its server writes the other.
        let server_here = here != client;
        let source = path(SOURCE, here);
        let copy = if server_here { path(COPY, true) } else { GUEST_COPY.to_owned() };
        let line = if client { &self.case.client } else { &self.case.server };
        let program = path(self.program(), here);
        let words = fill(line, |word| {
            Some(match word {
                "GID" => &gid,
                "PORT" => &port,
                "HOST" if client => &peer,
                "HOST" | "OWN" => &own,
                "SOURCE" => &source,
                "COPY" => &copy,
                word if self.case.is_own() && word == self.program() => &program,
                _ => return None,
            })
        });
        if !here {
            let preload = if self.case.sockets { GUEST_SOCKETS } else { "" };
            return Ok(Program::Rxe(self.guest.spawn(&format!("{preload}{words}"))?));
        }
        let mut command: Command = self.guest.host_command(self.dist.anyverbs());
        command.arg("run");
        if self.case.sockets {
            command.arg("--sockets");
        }
        command.arg("--").args(words.split(' ')).current_dir(self.scratch);
        let name = if client { "client" } else { "server" };
        Ok(Program::Here(Process::start(&mut command, &self.output(name))?))
    }

    fn family(&self) -> Family {
        self.case.place.family()
    }

    /// The address of one side as a program on one side is given it.
    fn dial(&self, family: Family, of_here: bool, on_here: bool) -> String {
        let address = match of_here {
            true => self.guest.host_address(family),
            false => self.guest.address(family),
        };
        match family {
            Family::LinkLocal => format!("{address}%{}", self.guest.scope(on_here)),
            _ => address,
        }
    }

    fn addresses(&self) -> Addresses {
        let family = self.family();
        Addresses { here: self.guest.host_address(family), rxe: self.guest.address(family) }
    }

    /// The first word of the command.
    fn program(&self) -> &str {
        self.case.command.split(' ').next().unwrap_or_default()
    }

    /// Compiles the project's own program of the case, to where both sides see it.
    fn compile(&self) -> anyhow::Result<()> {
        let program = self.guest.shared(self.program()).0;
        if self.case.example {
            let mut build = workspace::cargo();
            build.args(["build", "--quiet", "-p", "anyverbs", "--example", self.program()]);
            workspace::succeed(&mut build)?;
            let built = workspace::target().join("debug/examples").join(self.program());
            fs::copy(&built, &program)
                .with_context(|| format!("cannot copy {}", built.display()))?;
        }
        let Some(source) = &self.case.source else { return Ok(()) };
        let mut cc = Command::new("cc");
        cc.args(["-O1", "-Wall", "-o"])
            .arg(program)
            .arg(workspace::root().join("conformance").join(source))
            .arg("-libverbs");
        workspace::succeed(&mut cc)
    }

    fn make_source(&self) -> anyhow::Result<()> {
        let Some(bytes) = self.case.file_bytes else { return Ok(()) };
        let [source, copy] = [SOURCE, COPY].map(|name| self.guest.shared(name).0);
        // The file of an earlier case, or none.
        let _ = fs::remove_file(copy);
        fs::write(&source, noise(bytes))
            .with_context(|| format!("cannot write {}", source.display()))
    }

    fn compare_files(&self) -> anyhow::Result<Result<(), String>> {
        let Some(bytes) = self.case.file_bytes else { return Ok(Ok(())) };
        let (copy, in_guest) = self.guest.shared(COPY);
        if self.case.place.client_is_here() {
            let command = format!("mv -f {GUEST_COPY} {}", in_guest.display());
            if let Err(error) = self.guest.run(&command, GUEST_TIME) {
                return Ok(Err(format!("no copy: {error:#}")));
            }
        }
        Ok(match fs::read(copy) {
            Ok(received) if received == noise(bytes) => Ok(()),
            Ok(_) => Err("the copy differs".into()),
            Err(error) => Err(format!("no copy: {error}")),
        })
    }

    fn output(&self, name: &str) -> PathBuf {
        self.scratch.join(format!("{}.{name}", self.case.file_name()))
    }
}

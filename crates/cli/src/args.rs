//! The command line. Help, manual pages and completions all come from here.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args as ClapArgs, Parser, Subcommand};

use crate::settings;

const EXAMPLES: &str = "\
Examples:
  anyverbs run -- ibv_devinfo -v
  anyverbs run -- ib_write_bw &  sleep 1;  anyverbs run -- ib_write_bw 127.0.0.1
  anyverbs run --log debug -- python3 my_program.py
  anyverbs devices
  anyverbs doctor
  anyverbs doctor -- ./my_program
  anyverbs explain 12
  anyverbs top
  anyverbs show qp 0x30011

`anyverbs COMMAND --help` says more about a command.";

const RUN_HELP: &str = "\
The program finds this library in place of the system's libibverbs and librdmacm (LD_LIBRARY_PATH). It is preloaded as well (LD_PRELOAD), for programs and Python packages that bring a libibverbs of their own; --no-preload leaves that out. A second preloaded object shows the device in /sys/class/infiniband and /dev/infiniband; --no-view leaves that out. Children of the program inherit all of it. Static and set-user-ID programs cannot use it.

With --sockets the program's TCP sockets are rsockets, that is, sockets over RDMA. Its peers need them too: another `anyverbs run --sockets`, or rdma-core's librspreload.so on RDMA hardware. A client whose peer has none connects by TCP. A listener takes RDMA connections only.

Exit status: the program's own; 2 if its own options are wrong, 125 if anyverbs itself failed, 126 if the program cannot be run, 127 if it was not found. A program that died of a signal makes anyverbs die of the same signal.";

const RUN_EXAMPLES: &str = "\
Examples:
  anyverbs run -- ibv_devinfo -v
  anyverbs run -- ibv_rc_pingpong -g 0
  anyverbs run --config two-ports.toml --log debug -- ib_send_bw 10.0.0.2
  anyverbs run --sockets -- iperf3 -s
  anyverbs run --devices 8 --persona mlx5 -- ibv_devices
  anyverbs run --capture packets.pcapng -- mpirun -n 2 ./my_test
  anyverbs run --faults 'drop 1% of packets' -- ./my_test
  anyverbs run --print-env -- true";

/// Run programs of libibverbs and librdmacm as they are, on an RDMA device in user space: without hardware, kernel module or root.
#[derive(Debug, Parser)]
#[command(name = "anyverbs", version, after_help = EXAMPLES)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run a program on the device
    Run(Run),
    /// List the devices, their ports and their GID tables
    Devices(Devices),
    /// Report problems that would stop a program on this machine, and their remedies
    Doctor(Doctor),
    /// Explain a failure: a status, the code of a cause, an error number, an event, a check
    #[command(
        after_help = "Examples:\n  anyverbs explain 12\n  anyverbs explain IBV_WC_RETRY_EXC_ERR\n  anyverbs explain AV1204\n  anyverbs explain EINVAL\n  anyverbs explain IBV_EVENT_QP_FATAL\n  anyverbs explain leak"
    )]
    Explain {
        /// The word to explain; without it, the list of all
        #[arg(value_name = "WORD")]
        words: Vec<String>,
    },
    /// Print the licences of the code of others in this executable and in its libraries
    Licenses,
    /// Watch the device's processes: their queue pairs, rates, and what each waits for
    Top(Top),
    /// Show the device's processes and their queue pairs
    Show(Show),
    /// Keep a tree as in /sys fresh, for exporters of metrics
    Sysfs(Sysfs),
    /// Make an HTML page out of traces and findings: a sequence diagram, latencies, throughput, retries
    #[command(
        after_help = "Example:\n  anyverbs run --trace trace.json -- ./my_program\n  anyverbs report trace.json --output report.html"
    )]
    Report(Report),
    /// Say in words what a script of faults does
    #[command(
        after_help = "Examples:\n  anyverbs faults --explain rail-down.fault\n  anyverbs faults --explain 'on qp 2: drop packet 5; send 12 never completes'"
    )]
    Faults {
        /// The name of a file with rules, or the rules themselves, with semicolons between them
        #[arg(long, required = true, value_name = "FILE|RULES")]
        explain: String,
    },
    /// Change the faults of a process that runs
    Fault(Fault),
    /// Simulate a network of hosts and switches: flow completion times, losses, and the best setting of the transport
    Simulate(Simulate),
    /// Print the directory of the libraries that programs are given
    LibDir(Settings),
    /// Describe the device for container engines (CDI): `docker run --device anyverbs/rdma=anyverbs0`
    Cdi(Cdi),
    /// Print the completion script of a shell
    #[command(
        after_help = "Example:\n  anyverbs completions bash > \\\n    ~/.local/share/bash-completion/completions/anyverbs"
    )]
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// Print the facts about the device; used by the other commands
    #[command(name = crate::device::ASK, hide = true)]
    DeviceFacts,
    /// End the connections that killed processes left; asked by `run`
    #[command(name = crate::run::DISCONNECT, hide = true)]
    DisconnectAbandoned,
    /// Print the manual page
    Man {
        /// Write one page for each command into this directory instead
        #[arg(long, value_name = "DIR")]
        directory: Option<PathBuf>,
    },
}

impl Command {
    /// The settings, of those commands that take any.
    pub(crate) fn settings(&self) -> Option<&Settings> {
        match self {
            Self::Run(run) => Some(&run.settings),
            Self::Devices(devices) => Some(&devices.settings),
            Self::Doctor(doctor) => Some(&doctor.settings),
            Self::LibDir(settings) => Some(settings),
            Self::Cdi(cdi) => Some(&cdi.settings),
            Self::Top(top) => Some(&top.settings),
            Self::Show(show) => Some(&show.settings),
            Self::Sysfs(sysfs) => Some(&sysfs.settings),
            Self::Fault(fault) => Some(&fault.settings),
            Self::Explain { .. }
            | Self::Licenses
            | Self::Faults { .. }
            | Self::Report(_)
            | Self::Simulate(_)
            | Self::Completions { .. }
            | Self::DeviceFacts
            | Self::DisconnectAbandoned
            | Self::Man { .. } => None,
        }
    }
}

/// The settings of the device: each option is the environment variable of the same name.
#[derive(Debug, Default, Clone, ClapArgs)]
pub(crate) struct Settings {
    /// Configuration file (TOML) [env: ANYVERBS_CONFIG]
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub(crate) config: Option<PathBuf>,
    /// Name of the device [env: ANYVERBS_DEVICE]
    #[arg(long, value_name = "NAME")]
    pub(crate) device: Option<String>,
    /// How many devices there are: a number, for devices at 127.0.0.1, 127.0.0.2 and so on; or an interface or address for each
    /// (eth0,eth1), with a name if you like (rail0=eth0,rail1=eth1) [env: ANYVERBS_DEVICES]
    #[arg(long, value_name = "DEVICES")]
    pub(crate) devices: Option<String>,
    /// The vendor's device that the devices look like: mlx5, irdma, bnxt, ionic, rxe, mana, or a file whose name ends in .toml
    /// [env: ANYVERBS_PERSONA]
    #[arg(long, value_name = "PERSONA")]
    pub(crate) persona: Option<String>,
    /// Level of the messages on standard error: off, error, warn, info, debug, trace, or such levels of modules:
    /// warn,anyverbs_cm=debug [env: ANYVERBS_LOG]
    #[arg(long, value_name = "LEVEL")]
    pub(crate) log: Option<String>,
    /// The directory of libibverbs.so.1 and of the objects that are preloaded [env: ANYVERBS_LIB_DIR]
    #[arg(long, value_name = "DIR", value_parser = path())]
    pub(crate) lib_dir: Option<PathBuf>,
}

/// A path that may be empty: [`Settings::check`] refuses it as the command refuses everything.
fn path() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// A path that is the same file for a program that changes its directory.
pub(crate) fn absolute(path: &Path) -> OsString {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned()).into_os_string()
}

impl Settings {
    /// Refuses options without a value. An empty variable counts as none, so that the option would mean nothing.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let is_empty =
            |path: &Option<PathBuf>| path.as_ref().is_some_and(|p| p.as_os_str().is_empty());
        for (option, is_empty, wanted) in [
            ("config", is_empty(&self.config), "the name of a file"),
            ("device", self.device.as_deref() == Some(""), "the name of a device"),
            ("devices", self.devices.as_deref() == Some(""), "a number, or interfaces"),
            ("persona", self.persona.as_deref() == Some(""), "the name of a persona, or of a file"),
            ("lib-dir", is_empty(&self.lib_dir), "the name of a directory"),
        ] {
            anyhow::ensure!(!is_empty, "--{option} is empty: expected {wanted}");
        }
        Ok(())
    }

    /// A message about a value, which begins with the option that has it in place of the variable.
    pub(crate) fn in_options(&self, message: &str) -> String {
        let options = [
            ("ANYVERBS_DEVICES", "--devices", &self.devices),
            ("ANYVERBS_DEVICE", "--device", &self.device),
            ("ANYVERBS_PERSONA", "--persona", &self.persona),
        ];
        let given = options.into_iter().find_map(|(variable, option, value)| {
            let rest = message.strip_prefix(variable)?.strip_prefix(['=', ':'])?;
            value.as_ref()?;
            Some(format!("{option}{}", &message[message.len() - rest.len() - 1..]))
        });
        given.unwrap_or_else(|| message.to_owned())
    }

    /// The environment variables that these options stand for.
    pub(crate) fn variables(&self) -> Vec<(&'static str, OsString)> {
        [
            ("ANYVERBS_CONFIG", self.config.as_deref().map(absolute)),
            ("ANYVERBS_DEVICE", self.device.as_ref().map(OsString::from)),
            ("ANYVERBS_DEVICES", self.devices.as_ref().map(OsString::from)),
            ("ANYVERBS_PERSONA", self.persona.as_ref().map(OsString::from)),
            ("ANYVERBS_LOG", self.log.as_ref().map(OsString::from)),
            ("ANYVERBS_LIB_DIR", self.lib_dir.as_ref().map(|dir| dir.clone().into_os_string())),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
        .collect()
    }
}

#[derive(Debug, ClapArgs)]
#[command(after_help = format!("{RUN_EXAMPLES}\n\n`anyverbs run --help` lists the variables."), after_long_help = format!("{RUN_HELP}\n\n{}\n{RUN_EXAMPLES}", *settings::HELP))]
pub(crate) struct Run {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Do not show the device in /sys/class/infiniband and /dev/infiniband
    #[arg(long)]
    pub(crate) no_view: bool,
    /// Do not preload the library: programs that bring a libibverbs of their own then use that
    #[arg(long)]
    pub(crate) no_preload: bool,
    /// Give the program rsockets in place of its TCP sockets (stream), its UDP sockets (dgram) or both (all)
    #[arg(long, value_name = "KINDS", num_args = 0..=1, require_equals = true, default_missing_value = "stream")]
    pub(crate) sockets: Option<Sockets>,
    /// Look for mistakes that no device reports (docs/checks); with `fatal`, end the program at the first. A program with
    /// findings that would end with status 0 ends with 66
    #[arg(long, value_name = "MODE", num_args = 0..=1, require_equals = true, default_missing_value = "report")]
    pub(crate) check: Option<Check>,
    /// Append each finding of --check to this file, as a line of JSON. A file whose name ends in .sarif is written anew, as a SARIF
    /// document for code scanning, when the program has ended. Launchers that run at the same time may name one file
    #[arg(long, value_name = "FILE", requires = "check")]
    pub(crate) check_report: Option<PathBuf>,
    /// Leave out the findings of --check that this file names, one CHECK:PART a line
    #[arg(long, value_name = "FILE", requires = "check")]
    pub(crate) check_suppressions: Option<PathBuf>,
    /// Write all packets of the program to this file (pcapng, for Wireshark), those of its children as well. `%p` in its name
    /// stands for the number of the process, for a file each [env: ANYVERBS_CAPTURE]
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub(crate) capture: Option<PathBuf>,
    /// Write what happens to this file (a trace for Perfetto or `anyverbs report`): work requests from post to completion, packets,
    /// retries, waits, errors. `%p` as in --capture [env: ANYVERBS_TRACE]
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub(crate) trace: Option<PathBuf>,
    /// Inject faults: the name of a file with rules, or the rules themselves, with semicolons between them
    /// (docs/recipes/faults.md) [env: ANYVERBS_FAULTS]
    #[arg(long, value_name = "FILE|RULES")]
    pub(crate) faults: Option<String>,
    /// Print the environment that the program would get, and do not run it
    #[arg(long)]
    pub(crate) print_env: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Report {
    /// Traces (`run --trace`), and findings (`run --check --check-report`) as lines of JSON; no SARIF documents
    #[arg(required = true, value_name = "FILE")]
    pub(crate) files: Vec<PathBuf>,
    /// File of the page, in place of standard output
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// The consequence of a finding of `--check`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Check {
    /// It is reported
    Report,
    /// It is reported, and the program ends
    Fatal,
}

impl Check {
    /// The value of `ANYVERBS_CHECK`.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Report => "report",
            Self::Fatal => "fatal",
        }
    }
}

/// The kinds of sockets that become rsockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Sockets {
    /// TCP
    Stream,
    /// UDP
    Dgram,
    /// TCP and UDP
    All,
}

impl Sockets {
    /// The value of `ANYVERBS_SOCKETS`.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Stream => "stream",
            Self::Dgram => "dgram",
            Self::All => "stream,dgram",
        }
    }
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Keys: q ends it, the arrow keys and Page Up and Page Down scroll.

Only processes of your own user are shown. None of them is disturbed.

Examples:
  anyverbs top
  anyverbs top --once
  anyverbs top --json | jq '.[].page.queue_pairs[].waiting'")]
pub(crate) struct Top {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Print one list, with the rates of one second; as if standard output were no terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Print JSON: a list of the processes, as in `processes` of `show --json`
    #[arg(long, conflicts_with = "once")]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
Only processes of your own user are shown. None of them is disturbed.

Examples:
  anyverbs show
  anyverbs show qp 0x30011
  anyverbs show process 4711
  anyverbs show --json")]
pub(crate) struct Show {
    #[command(flatten)]
    pub(crate) settings: Settings,
    #[command(subcommand)]
    pub(crate) what: Option<ShowWhat>,
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
It looks at the processes of your user each second, until it is ended by a signal. Then it removes the tree.

Example:
  anyverbs sysfs /run/anyverbs &
  node_exporter --path.sysfs=/run/anyverbs/sys \\
    --collector.disable-defaults --collector.infiniband")]
pub(crate) struct Sysfs {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// The directory, which is made or empty
    #[arg(value_name = "DIR", value_parser = path())]
    pub(crate) directory: PathBuf,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The process runs with a script of faults, which may have no rules yet. It is one of your own user.

Examples:
  anyverbs run --faults 'seed 1' -- ./my_program &
  anyverbs fault my_program 'on device mlx5_3: down for 2s after 0s'
  anyverbs fault my_program list
  anyverbs fault my_program clear")]
pub(crate) struct Fault {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// The number of the process, or the name of its program
    #[arg(value_name = "PROCESS")]
    pub(crate) process: String,
    /// Rules to add, with semicolons between them, or the name of a file with such; `clear`: no rule holds any more; `list`: show them
    #[arg(value_name = "RULES|FILE|clear|list")]
    pub(crate) order: String,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
The file (TOML) has the network, the workload and the settings of the transport. Time is virtual, and the same seed gives the same run. The queue pairs are the device's own.

Examples:
  anyverbs simulate examples/simulate/incast.toml --compare
  anyverbs simulate examples/simulate/incast.toml --compare --plot incast.svg
  anyverbs simulate examples/simulate/thousand.toml --json")]
pub(crate) struct Simulate {
    /// The network, the workload and the settings to try (TOML)
    #[arg(value_name = "FILE", value_parser = path())]
    pub(crate) file: PathBuf,
    /// Run the settings of the file one by one, or a usual selection if it has none, and say which is the best
    #[arg(long)]
    pub(crate) compare: bool,
    /// The seed, in place of that of the file
    #[arg(long, value_name = "NUMBER")]
    pub(crate) seed: Option<u64>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Draw the distribution of flow completion times in this file (SVG)
    #[arg(long, value_name = "FILE", value_parser = path())]
    pub(crate) plot: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ShowWhat {
    /// All about a queue pair, its multicast groups among it
    Qp {
        /// Its number, decimal or as 0x30011
        #[arg(value_parser = number)]
        number: u32,
    },
    /// All about a process
    Process {
        /// Its number, or its program if only one process runs that
        process: String,
    },
}

/// A number, decimal or hexadecimal.
fn number(text: &str) -> Result<u32, &'static str> {
    let number = match text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        Some(digits) => u32::from_str_radix(digits, 16),
        None => text.parse(),
    };
    number.map_err(|_| "expected a number such as 0x30011")
}

#[derive(Debug, ClapArgs)]
pub(crate) struct Devices {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Say of each GID whether a route leads from it to this address, or why not
    #[arg(long, value_name = "ADDRESS")]
    pub(crate) to: Option<IpAddr>,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
A container that is started with `--device anyverbs/rdma=anyverbs0` has the libraries in LD_LIBRARY_PATH, and the command in /usr/local/bin for programs that look for the device in /sys or /dev. Its image needs glibc 2.28 or later. Other users must be able to read the libraries; those of a package are.

Examples:
  sudo anyverbs cdi --output /etc/cdi/anyverbs.json
  podman run --rm --device anyverbs/rdma=anyverbs0 IMAGE ibv_devinfo
  docker run --rm --device anyverbs/rdma=anyverbs0 IMAGE \\
    anyverbs run -- python3 my_program.py")]
pub(crate) struct Cdi {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// Write this file instead, and its directory
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, ClapArgs)]
#[command(after_help = "\
It changes nothing. Each line begins with its weight: ok; note: good to know; slow: slower than it could be; STOP: a program cannot run. An arrow shows what to do. The last line says whether programs can run.

Exit status: 0 if they can, 1 if something stops them.

Examples:
  anyverbs doctor
  anyverbs doctor -- ./my_program --its-options
  anyverbs doctor -- venv/lib/python3.11/site-packages/nixl")]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// A program to look at as well: whether it can be run on the device, and which copies of libibverbs and librdmacm its objects
    /// load. A directory stands for all shared objects below it. The program is not run, and its arguments mean nothing here
    #[arg(value_name = "PROGRAM", trailing_var_arg = true)]
    pub(crate) program: Vec<OsString>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn doctor_takes_a_command_line() {
        let args =
            Args::parse_from(["anyverbs", "doctor", "--log", "info", "--", "./program", "--help"]);
        let Command::Doctor(doctor) = args.command else { panic!("doctor") };
        assert_eq!(doctor.program, ["./program", "--help"]);
    }

    #[test]
    fn options_after_the_program_are_the_programs() {
        let args = Args::parse_from([
            "anyverbs",
            "run",
            "--log",
            "debug",
            "--",
            "ib_write_bw",
            "--help",
            "-x",
        ]);
        let Command::Run(run) = args.command else { panic!("run") };
        assert_eq!(run.program, ["ib_write_bw", "--help", "-x"]);
        assert_eq!(run.settings.variables(), [("ANYVERBS_LOG", OsString::from("debug"))]);
        let args = Args::parse_from(["anyverbs", "run", "ls", "--no-view"]);
        let Command::Run(run) = args.command else { panic!("run") };
        assert_eq!(run.program, ["ls", "--no-view"]);
        assert!(!run.no_view);
        assert!(Args::try_parse_from(["anyverbs", "run", "--nope", "--", "true"]).is_err());
        for (option, sockets) in [
            ("--sockets", Sockets::Stream),
            ("--sockets=dgram", Sockets::Dgram),
            ("--sockets=all", Sockets::All),
        ] {
            let args = Args::parse_from(["anyverbs", "run", option, "ls"]);
            let Command::Run(run) = args.command else { panic!("run") };
            assert_eq!((run.sockets, &run.program[..]), (Some(sockets), &["ls".into()][..]));
        }
    }
}

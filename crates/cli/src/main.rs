//! The `anyverbs` command: runs programs on the device, lists it, and diagnoses problems.
#![cfg_attr(not(test), warn(clippy::disallowed_methods))]

mod args;
mod cdi;
mod counters;
mod device;
mod devices;
mod doctor;
mod embedded;
mod explain;
mod faults;
mod finding;
mod libraries;
mod licences;
mod live;
mod look;
mod misspelt;
mod report;
mod run;
mod sarif;
mod settings;
mod show;
mod simulate;
mod stop_signals;
mod sysfs;
mod top;
mod view_netlink;
mod view_pci;
mod view_port;
mod view_tree;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::args::{Args, Command};

/// Exit status for a failure before or around a program, as opposed to in it. `env` and `timeout` use the same number.
const FAILED: u8 = 125;

fn main() -> ExitCode {
    let args = Args::parse();
    let settings = args.command.settings().cloned().unwrap_or_default();
    let checked = settings.check();
    let done = checked.and_then(|()| execute(args.command));
    match done {
        Ok(code) => code,
        Err(error) => {
            // `{:#}` is the whole chain of causes in one line. If standard error is closed, the message is lost.
            let message = settings.in_options(&format!("{error:#}"));
            let _ = writeln!(io::stderr(), "anyverbs: {message}");
            ExitCode::from(FAILED)
        }
    }
}

fn execute(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Run(run) => run::run(&run),
        Command::Devices(list) => devices::print(&list),
        Command::Doctor(doctor) => doctor::print(&doctor),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut visible(), "anyverbs", &mut script);
            write_out(&script)
        }
        Command::DeviceFacts => device::answer(),
        Command::DisconnectAbandoned => run::disconnect_abandoned(),
        Command::Top(top) => top::run(&top),
        Command::Sysfs(sysfs) => sysfs::run(&sysfs),
        Command::Show(show) => show::print(&show),
        Command::Explain { words } => explain::print(&words),
        Command::Licenses => licences::print(),
        Command::Report(report) => report::print(&report),
        Command::Faults { explain } => faults::explain(&explain),
        Command::Fault(fault) => faults::change(&fault),
        Command::Simulate(simulate) => simulate::print(&simulate),
        Command::Cdi(cdi) => cdi::print(&cdi),
        Command::LibDir(settings) => print_lib_dir(&settings),
        Command::Man { directory } => manual(directory.as_deref()),
    }
}

/// The command line without the commands that users do not call: the generator of completions knows no hidden ones.
fn visible() -> clap::Command {
    let all = Args::command();
    let commands = all.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let commands: Vec<_> = commands.collect();
    clap::Command::new("anyverbs").version(env!("CARGO_PKG_VERSION")).subcommands(commands)
}

/// Prints the directory of the libraries in one line.
fn print_lib_dir(settings: &args::Settings) -> anyhow::Result<ExitCode> {
    let dir = libraries::find(settings)?.into_os_string();
    write_out(&[dir.as_encoded_bytes(), b"\n"].concat())
}

/// Writes the manual page to standard output, or one page per command into a directory.
fn manual(directory: Option<&std::path::Path>) -> anyhow::Result<ExitCode> {
    use anyhow::Context;
    // It has no page.
    let command = Args::command().disable_help_subcommand(true);
    let Some(directory) = directory else {
        let mut page = Vec::new();
        clap_mangen::Man::new(command).render(&mut page)?;
        return write_out(&page);
    };
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    clap_mangen::generate_to(command, directory)
        .with_context(|| format!("cannot write manual pages to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes to standard output; a reader that went away (`| head`) is no error.
fn write_out(bytes: &[u8]) -> anyhow::Result<ExitCode> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(ExitCode::SUCCESS),
    }
}

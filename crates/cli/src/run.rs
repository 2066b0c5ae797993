//! `anyverbs run`: a program with the device around it.

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{self, ExitCode, ExitStatus, Stdio};

use anyhow::Context;
use anyverbs::abandoned::{self, Keeper, Membership};
use anyverbs::config::Config;
use anyverbs_environment as environment;
use anyverbs_record::{capture, trace};

use crate::args::{Run, Settings, absolute};
use crate::doctor::elf;
use crate::sarif::Sarif;
use crate::stop_signals::{Blocked, Seen, die_of};
use crate::view_tree::ViewTree;
use crate::{device, faults, libraries, misspelt};

const CANNOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;
/// Variables that name files which the processes of the program write or read.
const CAPTURE: &str = "ANYVERBS_CAPTURE";
const TRACE: &str = "ANYVERBS_TRACE";
const PERSONA: &str = "ANYVERBS_PERSONA";
const FAULTS: &str = "ANYVERBS_FAULTS";
/// The name of the hidden command that ends the connections of a program which could not.
pub(crate) const DISCONNECT: &str = "disconnect-abandoned";

/// Runs the program to its end and returns its exit status.
pub(crate) fn run(args: &Run) -> anyhow::Result<ExitCode> {
    for misspelt in misspelt::all() {
        eprintln!("anyverbs: {misspelt}");
    }
    let mut variables = args.settings.variables();
    // The program may change its directory.
    if args.settings.config.is_none()
        && let Some(file) = environment::variable("ANYVERBS_CONFIG").filter(|file| !file.is_empty())
    {
        variables.push(("ANYVERBS_CONFIG", absolute(Path::new(&file))));
    }
    for (option, variable, file) in
        [("capture", CAPTURE, &args.capture), ("trace", TRACE, &args.trace)]
    {
        if let Some(file) = file {
            anyhow::ensure!(!file.as_os_str().is_empty(), "--{option} is empty: expected a file");
            variables.push((variable, file.into()));
        }
    }
    if let Some(faults) = &args.faults {
        anyhow::ensure!(!faults.trim().is_empty(), "--faults is empty: expected a file, or rules");
        variables.push((FAULTS, faults.into()));
    }
    let config = Config::load_with(&variables)?;
    // The same file for a program that changes its directory.
    variables.retain(|(name, _)| !matches!(*name, CAPTURE | TRACE));
    for (variable, file) in [(CAPTURE, &config.capture), (TRACE, &config.trace)] {
        variables.extend(file.as_deref().map(|file| (variable, absolute(file))));
    }
    if let Some(file) = config.persona.as_ref().and_then(|persona| persona.file.as_deref()) {
        variables.retain(|(name, _)| *name != PERSONA);
        variables.push((PERSONA, absolute(file)));
    }
    // So is a script that is in a file.
    let given = args.faults.clone().or_else(|| environment::text(FAULTS));
    if let Some(file) = given.filter(|given| config.faults.is_some() && faults::is_file(given)) {
        variables.retain(|(name, _)| *name != FAULTS);
        variables.push((FAULTS, absolute(Path::new(file.trim()))));
    }
    if let (Some(capture), Some(trace)) = (&config.capture, &config.trace) {
        let both = absolute(capture) == absolute(trace);
        anyhow::ensure!(!both, "the capture and the trace are one file: {}", capture.display());
    }
    // From here on a signal at any time lets the tree be removed. It is declared before it, hence dropped after.
    let blocked = Blocked::new().context("cannot block signals")?;
    let libraries = libraries::find(&args.settings)?;
    if let Some((what, remedy)) =
        elf::find(Path::new(&args.program[0])).and_then(|path| elf::hindrance(&path))
    {
        eprintln!("anyverbs: it will not find the device: {what}; {remedy}");
    }
    variables.push((
        "LD_LIBRARY_PATH",
        prepended(&libraries, ":", environment::variable("LD_LIBRARY_PATH")),
    ));
    let mut preload = without_ours(environment::variable("LD_PRELOAD").unwrap_or_default());
    if !args.no_preload {
        preload = prepended(&libraries.join(libraries::PRELOAD), " ", Some(preload));
    }
    if let Some(sockets) = args.sockets {
        preload = prepended(&libraries.join(libraries::RSPRELOAD), " ", Some(preload));
        variables.push(("ANYVERBS_SOCKETS", sockets.variable().into()));
    }
    // A mistake in these would change the verdict, and nobody would see it.
    if let Some(file) = &args.check_suppressions {
        let failed = || format!("cannot read the suppressions {}", file.display());
        let text = fs::read_to_string(file).with_context(failed)?;
        anyverbs_check::check_suppressions(&text)
            .map_err(|why| anyhow::anyhow!("{}: {why}", file.display()))?;
    }
    let sarif = match &args.check_report {
        Some(report) if !args.print_env => {
            let is_pipe = fs::symlink_metadata(report).is_ok_and(|file| file.file_type().is_fifo());
            anyhow::ensure!(
                !is_pipe,
                "the report {} is a pipe, and it is opened anew for each finding: name a file",
                report.display()
            );
            let sarif = Sarif::begin(report)?;
            if sarif.is_none() {
                let opened = fs::OpenOptions::new().append(true).create(true).open(report);
                opened.with_context(|| format!("cannot write the report {}", report.display()))?;
            }
            sarif
        }
        _ => None,
    };
    if let Some(check) = args.check {
        variables.push(("ANYVERBS_CHECK", check.variable().into()));
        let report = sarif.as_ref().map(Sarif::lines).or(args.check_report.as_deref());
        for (name, file) in [
            ("ANYVERBS_CHECK_REPORT", report),
            ("ANYVERBS_CHECK_SUPPRESSIONS", args.check_suppressions.as_deref()),
        ] {
            variables.extend(file.map(|file| (name, absolute(file))));
        }
    }
    let mut host = None;
    let tree = if args.no_view {
        None
    } else {
        // Without a device a program finds none, as on a machine without hardware, and runs; its user wants to know why.
        let devices = device::list(&args.settings).unwrap_or_else(|error| {
            eprintln!("anyverbs: there is no device: {error:#} (`anyverbs doctor` says more)");
            Vec::new()
        });
        let mut tree = ViewTree::new(&devices)?;
        if let Some(first) = devices.first().filter(|_| !args.print_env) {
            // Without it the program runs as well.
            match Membership::join(&first.registry, first.udp_port) {
                Ok(joined) => {
                    tree.serve(devices, &config, joined.clone());
                    host = Some(joined);
                }
                Err(error) => eprintln!("anyverbs: the view has no counters: {error}"),
            }
        }
        preload = prepended(&libraries.join(libraries::VIEW), " ", Some(preload));
        variables.push(("ANYVERBS_VIEW", tree.path().as_os_str().to_owned()));
        Some(tree)
    };
    if environment::variable("LD_PRELOAD").unwrap_or_default() != preload {
        variables.push(("LD_PRELOAD", preload));
    }
    if args.print_env {
        let lines: Vec<u8> = variables
            .iter()
            .flat_map(|(name, value)| {
                [name.as_bytes(), b"=", value.as_encoded_bytes(), b"\n"].concat()
            })
            .collect();
        return crate::write_out(&lines);
    }
    // In use until the program has ended: its processes write it in turn, and none of them begins it anew.
    let failed = |what: &str, file: &Path| format!("cannot write the {what} {}", file.display());
    let begin = |file: &Path| capture::begin(file).with_context(|| failed("capture", file));
    let _capture = config.capture.as_deref().map(begin).transpose()?;
    let begin = |file: &Path| trace::begin(file).with_context(|| failed("trace", file));
    let _trace = config.trace.as_deref().map(begin).transpose()?;
    // Without one the program runs as well.
    let keeper = host.and_then(|host| Keeper::new(&host).ok());
    let status = match start_and_wait(&args.program, &variables, &blocked)? {
        Ok(status) => status,
        Err(error) => {
            eprintln!("anyverbs: cannot run {}: {error}", args.program[0].display());
            // A document of nothing is one, and an empty file is none.
            if let Some(Err(error)) = sarif.as_ref().map(Sarif::end) {
                eprintln!("anyverbs: {error:#}");
            }
            let missing = error.kind() == io::ErrorKind::NotFound;
            return Ok(ExitCode::from(if missing { NOT_FOUND } else { CANNOT_RUN }));
        }
    };
    drop(tree);
    let reported = sarif.map_or(Ok(()), |sarif| sarif.end());
    if let Err(error) = &reported {
        eprintln!("anyverbs: {error:#}");
    }
    if keeper.is_some_and(|keeper| finish_for_program(&keeper, &args.settings, &blocked)) {
        eprintln!(
            "anyverbs: the program ended and left connections open, and their peers could not be told"
        );
    }
    if let Some(signal) = status.signal() {
        die_of(signal);
    }
    // Nobody takes a run without its report for one without findings.
    if reported.is_err() && status.success() {
        return Ok(ExitCode::from(crate::FAILED));
    }
    // A process that ended without a signal has a status of one byte.
    Ok(status
        .code()
        .and_then(|code| u8::try_from(code).ok())
        .map_or(ExitCode::from(crate::FAILED), ExitCode::from))
}

/// Tells the peers of a program that could not do so. A child does it, which takes a slot of the host while it lives, as the
/// launcher must not. False if there was nothing to do, or it is done.
fn finish_for_program(keeper: &Keeper, settings: &Settings, blocked: &Blocked) -> bool {
    if !keeper.has_any().unwrap_or(false) {
        return false;
    }
    let Ok(executable) = env::current_exe() else { return true };
    let mut child = process::Command::new(executable);
    child.arg(DISCONNECT).envs(settings.variables()).stdin(Stdio::null()).stdout(Stdio::null());
    // The terminal's signals end it.
    let mask = blocked.before();
    let unblock = move || {
        // SAFETY: an async-signal-safe call on the child itself, with an initialised set.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut()) };
        Ok(())
    };
    // SAFETY: `unblock` allocates nothing and makes only an async-signal-safe call.
    unsafe { child.pre_exec(unblock) };
    !child.status().is_ok_and(|status| status.success())
}

/// The child's side.
pub(crate) fn disconnect_abandoned() -> anyhow::Result<ExitCode> {
    let left = abandoned::disconnect()?;
    Ok(if left == 0 { ExitCode::SUCCESS } else { ExitCode::from(crate::FAILED) })
}

/// The outer error is the launcher's, the inner one the program's that could not be started.
fn start_and_wait(
    program: &[OsString],
    variables: &[(&'static str, OsString)],
    blocked: &Blocked,
) -> anyhow::Result<io::Result<ExitStatus>> {
    let mask = blocked.before();
    let launcher = process::id();
    let mut command = process::Command::new(&program[0]);
    command.args(&program[1..]).envs(variables.iter().map(|(name, value)| (name, value)));
    let prepare = move || {
        // SAFETY: async-signal-safe calls on the child itself, with an initialised set. The mask was this process's.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &mask, std::ptr::null_mut());
            // A launcher that is killed takes its program along: nothing else would ever stop it.
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if libc::getppid().cast_unsigned() != launcher {
                libc::_exit(1);
            }
        }
        Ok(())
    };
    // SAFETY: `prepare` allocates nothing and makes only async-signal-safe calls.
    unsafe { command.pre_exec(prepare) };
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(Err(error)),
    };
    loop {
        if let Some(status) = child.try_wait().context("cannot wait for the program")? {
            return Ok(Ok(status));
        }
        match blocked.wait().context("cannot wait for signals")? {
            Seen::Child => {}
            // SAFETY: the child has not been waited for, so that its process id is still its own.
            Seen::Signal(signal) => unsafe {
                libc::kill(child.id().cast_signed(), signal);
            },
        }
    }
}

/// `first`, then the old value.
fn prepended(first: &Path, separator: &str, rest: Option<OsString>) -> OsString {
    let mut list = first.as_os_str().to_owned();
    if let Some(rest) = rest.filter(|rest| !rest.is_empty()) {
        list.push(separator);
        list.push(rest);
    }
    list
}

/// A preload list without objects of ours: under another `anyverbs run` they are there already.
fn without_ours(list: OsString) -> OsString {
    use std::os::unix::ffi::OsStrExt;
    list.as_bytes()
        .split(|byte| b" :".contains(byte))
        .map(OsStr::from_bytes)
        .filter(|object| {
            let ours = [libraries::VIEW, libraries::RSPRELOAD, libraries::PRELOAD].map(OsStr::new);
            !object.is_empty() && !Path::new(object).file_name().is_some_and(|n| ours.contains(&n))
        })
        .fold(OsString::new(), |mut list, object| {
            if !list.is_empty() {
                list.push(" ");
            }
            list.push(object);
            list
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_prepended() {
        assert_eq!(prepended(Path::new("/l"), ":", None), "/l");
        // An empty entry would mean the working directory.
        assert_eq!(prepended(Path::new("/l"), ":", Some(OsString::new())), "/l");
        assert_eq!(prepended(Path::new("/l"), ":", Some("/a:/b".into())), "/l:/a:/b");
    }

    #[test]
    fn only_our_objects_leave_the_preload_list() {
        let list = "/x/libanyverbs_view.so:/a.so /y/librspreload.so /z/libibverbs.so.1 /b.so";
        assert_eq!(without_ours(list.into()), "/a.so /b.so");
        assert_eq!(without_ours("".into()), "");
    }
}

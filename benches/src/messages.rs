//! The program `benches/messages.c`, whose marked calls go in single steps.
//!
//! It sends messages to other processes, which run at full speed. Now and then a call goes in single steps (ptrace(2)), with the
//! program's other threads stopped. Between these calls it runs at full speed, so that caches, timers and the worker are as they are
//! without a tracer. The look at the signal handlers, once in some milliseconds, is left out.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, anyhow, ensure};
use object::{Object, ObjectSymbol};

use crate::trace::{self, BREAKPOINT, Step};

const LIBRARY: &str = "libibverbs.so.1";
/// In the path of each file of this project.
const OURS: &str = "crates/";

#[derive(Debug, clap::Args)]
pub(crate) struct Options {
    /// The folder of the libraries
    libraries: PathBuf,
    /// The program
    program: PathBuf,
}

/// Sees each instruction of the marked calls.
pub(crate) trait Observer {
    /// A call of this number begins, in this thread.
    fn begin(&mut self, call: u64, thread: i32);
    /// The call has found nothing and is made once more.
    fn again(&mut self);
    fn step(&mut self, step: &Step);
    fn end(&mut self);
}

/// The program, and places in the code.
pub(crate) struct Messages {
    libraries: PathBuf,
    program: PathBuf,
    /// A call ends here.
    end: u64,
    /// In the library: the look at the signal handlers (`crates/objects/src/memory/guard.rs`).
    look: u64,
    /// The functions of the library, by their address.
    functions: Vec<(u64, String)>,
}

/// The functions of the library in a process.
pub(crate) struct Symbols<'a> {
    library: PathBuf,
    base: u64,
    functions: &'a [(u64, String)],
}

impl Symbols<'_> {
    /// The function that has this address.
    pub(crate) fn name(&self, at: u64) -> String {
        let Some(offset) = at.checked_sub(self.base) else { return "the program".to_owned() };
        let next = self.functions.partition_point(|(start, _)| *start <= offset);
        match (next.checked_sub(1), next < self.functions.len()) {
            (Some(last), true) => self.functions[last].1.clone(),
            _ => "another library".to_owned(),
        }
    }
}

impl Symbols<'_> {
    /// How many lines of this project's source these instructions come from, and how many functions.
    pub(crate) fn lines(&self, places: &BTreeSet<u64>) -> anyhow::Result<(usize, usize)> {
        let unreadable = |error| anyhow!("cannot read {}: {error}", self.library.display());
        let source = addr2line::Loader::new(&self.library).map_err(unreadable)?;
        let (mut lines, mut functions) = (BTreeSet::new(), BTreeSet::new());
        for place in places.iter().filter_map(|place| place.checked_sub(self.base)) {
            let mut frames = source.find_frames(place).map_err(unreadable)?;
            // Functions that were inlined into others count as well.
            while let Some(frame) = frames.next().map_err(|error| unreadable(error.into()))? {
                let Some(location) = frame.location else { continue };
                let (Some(file), Some(line)) = (location.file, location.line) else { continue };
                if file.contains(OURS) {
                    lines.insert((file.to_owned(), line));
                    let function = frame.function.map(|of| of.raw_name().map(Cow::into_owned));
                    functions.insert(function.transpose()?);
                }
            }
        }
        Ok((lines.len(), functions.len()))
    }
}

impl Options {
    pub(crate) fn open(&self) -> anyhow::Result<Messages> {
        let mut functions = symbols(&self.libraries.join(LIBRARY))?;
        functions.sort();
        let ends = symbols(&self.program)?;
        let find = |all: &[(u64, String)], is_it: fn(&str) -> bool| {
            all.iter().find(|(_, name)| is_it(name)).map(|(at, _)| *at)
        };
        let end = find(&ends, |name| name == "count_to").context("the program has no mark")?;
        let look = find(&functions, |name| name.ends_with("::guard::look"));
        let look = look.context("the library has no symbol of the look at signal handlers")?;
        let (libraries, program) = (self.libraries.clone(), self.program.clone());
        Ok(Messages { libraries, program, end, look, functions })
    }
}

/// The functions of a file: their addresses and names.
fn symbols(file: &Path) -> anyhow::Result<Vec<(u64, String)>> {
    let bytes = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
    let object = object::File::parse(&*bytes)?;
    let functions = object.symbols().filter(|symbol| symbol.kind() == object::SymbolKind::Text);
    let named = functions.filter_map(|symbol| Some((symbol.address(), symbol.name().ok()?)));
    Ok(named.map(|(at, name)| (at, format!("{:#}", rustc_demangle::demangle(name)))).collect())
}

impl Messages {
    /// Runs a case of the program, with so many devices, of which it uses the first.
    pub(crate) fn observe(
        &self,
        words: &[&str],
        devices: u32,
        observer: &mut dyn Observer,
    ) -> anyhow::Result<Symbols<'_>> {
        // A network namespace of its own: another process of the user may have the device's port.
        let mut child = Command::new("unshare")
            .args(["-n", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""])
            .arg(&self.program)
            .args(words)
            .env("LD_LIBRARY_PATH", &self.libraries)
            .envs((devices > 1).then(|| ("ANYVERBS_DEVICES", devices.to_string())))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot run unshare(1)")?;
        let base = self.follow(&mut child, observer);
        // Its peers wait for it.
        let _ = child.kill();
        trace::reap(child.id().cast_signed());
        let base = base.with_context(|| format!("messages {}", words.join(" ")))?;
        let library = self.libraries.join(LIBRARY);
        Ok(Symbols { library, base, functions: &self.functions })
    }

    /// Follows a program that is ready to its end. Returns the address of its library.
    fn follow(&self, child: &mut Child, observer: &mut dyn Observer) -> anyhow::Result<u64> {
        let mut line = String::new();
        let output = child.stdout.take().context("its output")?;
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "ready\n", "it did not come to its first message");
        let pid = child.id().cast_signed();
        let base = trace::base_of_library(pid)?;
        let threads = trace::seize(pid)?;
        child.stdin.take().context("its input")?.write_all(b"\n")?;
        loop {
            let (caller, signal) = trace::wait_for(-1)?;
            if signal != libc::SIGTRAP {
                trace::request(libc::PTRACE_CONT, caller, signal as u64)?;
                continue;
            }
            let call = trace::registers(caller)?.rdi;
            if call == 0 {
                return Ok(base);
            }
            let others = || threads.iter().copied().filter(|tid| *tid != caller);
            if trace::stop(others())? {
                observer.begin(call, caller);
                self.call(caller, base + self.look, observer)?;
                observer.end();
            }
            others().try_for_each(|tid| trace::request(libc::PTRACE_CONT, tid, 0))?;
            trace::request(libc::PTRACE_CONT, caller, 0)?;
        }
    }

    /// One call. A poll that finds nothing comes to the breakpoint again.
    fn call(&self, caller: i32, look: u64, observer: &mut dyn Observer) -> anyhow::Result<()> {
        // Within the look at the signal handlers: the stack's end at its beginning.
        let mut looks = None;
        loop {
            trace::step(caller)?;
            let mut registers = trace::registers(caller)?;
            if registers.rip == self.end {
                return Ok(());
            }
            if registers.rip == look {
                looks = Some(registers.rsp);
            }
            if looks.is_some_and(|end| registers.rsp <= end) {
                continue;
            }
            looks = None;
            let code = trace::code(caller, registers.rip)?;
            if code[0] == BREAKPOINT {
                observer.again();
                registers.rip += 1;
                trace::set_registers(caller, &registers)?;
                continue;
            }
            observer.step(&Step { registers, code });
        }
    }
}

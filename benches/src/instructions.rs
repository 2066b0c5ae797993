//! `cargo xtask bench --instructions`: what each call of a message on one host executes, exactly.
//!
//! A program of `benches/` sends some messages to another process, which runs at full speed. Now and then a call goes in
//! single steps (ptrace(2)), with the program's other threads stopped. So the counts are those of the processor, whatever
//! instructions the library chose for it. A call that takes milliseconds in steps meets work that is due by the clock. The look
//! at the signal handlers, once in some milliseconds, is not counted. The least count has the least of the rest.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail, ensure};
use object::{Object, ObjectSymbol};

use crate::dist::Dist;

/// The cases of `benches/messages.c`, each with what its four marked calls are.
const CASES: [(&str, &str); 4] = [
    ("send", "SEND of 2 bytes, to and fro"),
    ("list", "SENDs of 8 bytes in lists of 16, the sender"),
    ("write", "WRITE of 2 bytes"),
    ("read", "READ of 2 bytes"),
];

/// The marked calls by their number.
const CALLS: [&str; 5] = ["", "post_send", "poll_cq, receive", "post_recv", "poll_cq, send"];

/// The instructions that one call executed.
#[derive(Clone, Copy, Default)]
struct Count {
    all: u64,
    locked: u64,
}

/// Prints the counts of all cases.
pub(super) fn run(dist: &Dist, program: &Path) -> anyhow::Result<()> {
    let marks = Marks {
        end: symbol(program, |name| name == "count_to")?,
        look: symbol(&dist.lib().join("libibverbs.so.1"), |name| name.contains("guard4look"))?,
    };
    for (case, what) in CASES {
        println!("{what}");
        let counts = measure(dist, program, case, &marks)?;
        for (call, mut counts) in counts {
            let name = CALLS.get(call as usize).copied().unwrap_or("?");
            counts.sort_by_key(|count| count.all);
            let (least, median) = (counts[0], counts[counts.len() / 2]);
            println!(
                "  {name:<18} {:>6} instructions, {:>3} locked (least {}, {} calls)",
                median.all,
                median.locked,
                least.all,
                counts.len()
            );
        }
    }
    Ok(())
}

/// Places in the code.
struct Marks {
    /// A counted call ends here.
    end: u64,
    /// In the library: the look at the signal handlers (`crates/objects/src/memory/guard.rs`).
    look: u64,
}

/// The address of the symbol in a file for which `is_it` holds.
fn symbol(file: &Path, is_it: impl Fn(&str) -> bool) -> anyhow::Result<u64> {
    let bytes = fs::read(file)?;
    let object = object::File::parse(&*bytes)?;
    let symbol = object.symbols().find(|symbol| symbol.name().is_ok_and(&is_it));
    let address = symbol.map(|symbol| symbol.address());
    address.with_context(|| format!("{} has not the symbol", file.display()))
}

/// The address at which a process has the library.
fn base_of_library(pid: i32) -> anyhow::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let first = maps.lines().find(|line| line.ends_with("/libibverbs.so.1"));
    let address = first.and_then(|line| line.split_once('-')).context("it has no libibverbs")?;
    Ok(u64::from_str_radix(address.0, 16)?)
}

fn measure(
    dist: &Dist,
    program: &Path,
    case: &str,
    marks: &Marks,
) -> anyhow::Result<BTreeMap<u64, Vec<Count>>> {
    // A network namespace of its own: another process of the user may have the device's port.
    let mut child = Command::new("unshare")
        .args(["-n", "sh", "-c", "ip link set lo up && exec \"$0\" \"$@\""])
        .arg(program)
        .arg(case)
        .env("LD_LIBRARY_PATH", dist.lib())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run unshare(1)")?;
    let counts = step(&mut child, marks);
    // Its peer waits for it.
    let _ = child.kill();
    reap(child.id().cast_signed());
    counts.with_context(|| format!("{case} of {}", program.display()))
}

/// Waits for the end of a traced process. It ends when its other threads were waited for, too.
fn reap(pid: i32) {
    let mut status = 0;
    loop {
        // SAFETY: a live int.
        let rc = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) };
        if rc < 0 || rc == pid && !libc::WIFSTOPPED(status) {
            return;
        }
    }
}

/// Steps through the counted calls of a program that is ready. Between them it runs at full speed, so that caches, timers and
/// the worker are as they are without a tracer.
fn step(child: &mut Child, marks: &Marks) -> anyhow::Result<BTreeMap<u64, Vec<Count>>> {
    let mut line = String::new();
    let output = child.stdout.take().context("its output")?;
    BufReader::new(output).read_line(&mut line)?;
    ensure!(line == "ready\n", "it did not come to its first message");
    let pid = child.id().cast_signed();
    let marks = Marks { end: marks.end, look: base_of_library(pid)? + marks.look };
    let mut others = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let tid: i32 = task?.file_name().to_string_lossy().parse()?;
        trace(libc::PTRACE_SEIZE, tid, 0)?;
        if tid != pid {
            others.push(tid);
        }
    }
    child.stdin.take().context("its input")?.write_all(b"\n")?;
    let mut counts = BTreeMap::<u64, Vec<Count>>::new();
    loop {
        let signal = wait(pid)?;
        if signal != libc::SIGTRAP {
            trace(libc::PTRACE_CONT, pid, signal as u64)?;
            continue;
        }
        let call = registers(pid)?.rdi;
        if call == 0 {
            return Ok(counts);
        }
        if stop(&others)? {
            counts.entry(call).or_default().push(count(pid, &marks)?);
        }
        others.iter().try_for_each(|tid| trace(libc::PTRACE_CONT, *tid, 0))?;
        trace(libc::PTRACE_CONT, pid, 0)?;
    }
}

/// Stops threads. False if one of them was at work: it may have a lock that the call needs.
fn stop(threads: &[i32]) -> anyhow::Result<bool> {
    let mut all_sleep = true;
    for tid in threads {
        trace(libc::PTRACE_INTERRUPT, *tid, 0)?;
        wait(*tid)?;
        // A thread in a system call has its number here.
        all_sleep &= registers(*tid)?.orig_rax.cast_signed() >= 0;
    }
    Ok(all_sleep)
}

/// Counts the instructions of one call. A poll that finds nothing comes to the breakpoint again, and is counted anew.
fn count(pid: i32, marks: &Marks) -> anyhow::Result<Count> {
    let mut count = Count::default();
    // Within the look at the signal handlers: the stack's end at its beginning.
    let mut look = None;
    loop {
        trace(libc::PTRACE_SINGLESTEP, pid, 0)?;
        wait(pid)?;
        let mut registers = registers(pid)?;
        if registers.rip == marks.end {
            return Ok(count);
        }
        if registers.rip == marks.look {
            look = Some(registers.rsp);
        }
        if look.is_some_and(|end| registers.rsp <= end) {
            continue;
        }
        look = None;
        let code = code(pid, registers.rip)?;
        if code[0] == BREAKPOINT {
            count = Count::default();
            registers.rip += 1;
            set_registers(pid, &registers)?;
            continue;
        }
        count.all += 1;
        count.locked += u64::from(is_locked(&code));
    }
}

/// The instruction `int3`.
const BREAKPOINT: u8 = 0xcc;

/// Whether an instruction locks its line: it has the prefix, or is an exchange with memory.
fn is_locked(code: &[u8]) -> bool {
    let is_prefix =
        |byte: &u8| matches!(byte, 0x66 | 0x67 | 0xf2 | 0xf3 | 0x2e | 0x36 | 0x3e | 0x26);
    let rest = code.iter().position(|byte| !is_prefix(byte)).map_or(&[][..], |at| &code[at..]);
    let rest = match rest {
        [0xf0, ..] => return true,
        [0x40..=0x4f, rest @ ..] => rest,
        rest => rest,
    };
    matches!(rest, [0x86 | 0x87, modrm, ..] if modrm >> 6 != 3)
}

/// The bytes at an address of a stopped process.
fn code(pid: i32, at: u64) -> anyhow::Result<[u8; 8]> {
    let mut bytes = [0; 8];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: bytes.len() };
    // SAFETY: one live piece on either side; the kernel checks the other process's.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    // Near the end of a page fewer may be there.
    ensure!(n > 0, "cannot read its code");
    Ok(bytes)
}

fn trace(request: u32, tid: i32, data: u64) -> anyhow::Result<()> {
    // SAFETY: requests without memory of this process.
    let rc = unsafe { libc::ptrace(request, tid, 0u64, data) };
    if rc != 0 {
        bail!("ptrace({request}, {tid}): {}", std::io::Error::last_os_error());
    }
    Ok(())
}

fn registers(tid: i32) -> anyhow::Result<libc::user_regs_struct> {
    // SAFETY: all-zero is a valid value, and the call gets a live one.
    unsafe {
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        let rc = libc::ptrace(libc::PTRACE_GETREGS, tid, 0u64, &raw mut registers);
        ensure!(rc == 0, "cannot read its registers");
        Ok(registers)
    }
}

fn set_registers(tid: i32, registers: &libc::user_regs_struct) -> anyhow::Result<()> {
    // SAFETY: live registers, which the call reads.
    let rc =
        unsafe { libc::ptrace(libc::PTRACE_SETREGS, tid, 0u64, std::ptr::from_ref(registers)) };
    ensure!(rc == 0, "cannot set its registers");
    Ok(())
}

/// Waits until a traced thread stops; by which signal.
fn wait(tid: i32) -> anyhow::Result<i32> {
    let mut status = 0;
    // SAFETY: a live int.
    let rc = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) };
    ensure!(rc == tid, "waitpid: {}", std::io::Error::last_os_error());
    ensure!(libc::WIFSTOPPED(status), "it has ended");
    Ok(libc::WSTOPSIG(status))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locked_instructions_are_told_by_their_bytes() {
        assert!(is_locked(&[0xf0, 0x48, 0x0f, 0xb1, 0x0a]));
        assert!(is_locked(&[0x48, 0x87, 0x07]));
        assert!(is_locked(&[0x66, 0xf0, 0x0f, 0xc1, 0x07]));
        // An exchange of registers, and a move.
        assert!(!is_locked(&[0x48, 0x87, 0xc1]));
        assert!(!is_locked(&[0x48, 0x89, 0x07]));
    }
}

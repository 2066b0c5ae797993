//! Single steps of a traced process: ptrace(2) and what a stopped thread shows.

use std::fs;

use anyhow::{Context, bail, ensure};

/// The instruction `int3`.
pub(crate) const BREAKPOINT: u8 = 0xcc;
/// The longest instruction.
pub(crate) const LONGEST: usize = 15;

/// The address at which a process has the library.
pub(crate) fn base_of_library(pid: i32) -> anyhow::Result<u64> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let first = maps.lines().find(|line| line.ends_with("/libibverbs.so.1"));
    let address = first.and_then(|line| line.split_once('-')).context("it has no libibverbs")?;
    Ok(u64::from_str_radix(address.0, 16)?)
}

/// Traces all threads of a process, and returns them.
pub(crate) fn seize(pid: i32) -> anyhow::Result<Vec<i32>> {
    let mut threads = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let tid = task?.file_name().to_string_lossy().parse()?;
        request(libc::PTRACE_SEIZE, tid, 0)?;
        threads.push(tid);
    }
    Ok(threads)
}

/// Stops threads. False if one of them was at work: it may have a lock that the call needs.
pub(crate) fn stop(threads: impl Iterator<Item = i32>) -> anyhow::Result<bool> {
    let mut all_sleep = true;
    for tid in threads {
        request(libc::PTRACE_INTERRUPT, tid, 0)?;
        wait(tid)?;
        // A thread in a system call has its number here.
        all_sleep &= registers(tid)?.orig_rax.cast_signed() >= 0;
    }
    Ok(all_sleep)
}

/// Waits for the end of a traced process. It ends when its other threads were waited for, too.
pub(crate) fn reap(pid: i32) {
    let mut status = 0;
    loop {
        // SAFETY: a live int.
        let rc = unsafe { libc::waitpid(-1, &raw mut status, libc::__WALL) };
        if rc < 0 || rc == pid && !libc::WIFSTOPPED(status) {
            return;
        }
    }
}

pub(crate) fn request(request: u32, tid: i32, data: u64) -> anyhow::Result<()> {
    // SAFETY: requests without memory of this process.
    let rc = unsafe { libc::ptrace(request, tid, 0u64, data) };
    if rc != 0 {
        bail!("ptrace({request}, {tid}): {}", std::io::Error::last_os_error());
    }
    Ok(())
}

/// One instruction of a stopped thread.
pub(crate) fn step(tid: i32) -> anyhow::Result<()> {
    request(libc::PTRACE_SINGLESTEP, tid, 0)?;
    wait(tid).map(drop)
}

pub(crate) fn registers(tid: i32) -> anyhow::Result<libc::user_regs_struct> {
    // SAFETY: all-zero is a valid value, and the call gets a live one.
    unsafe {
        let mut registers: libc::user_regs_struct = std::mem::zeroed();
        let rc = libc::ptrace(libc::PTRACE_GETREGS, tid, 0u64, &raw mut registers);
        ensure!(rc == 0, "cannot read its registers");
        Ok(registers)
    }
}

pub(crate) fn set_registers(tid: i32, registers: &libc::user_regs_struct) -> anyhow::Result<()> {
    // SAFETY: live registers, which the call reads.
    let rc =
        unsafe { libc::ptrace(libc::PTRACE_SETREGS, tid, 0u64, std::ptr::from_ref(registers)) };
    ensure!(rc == 0, "cannot set its registers");
    Ok(())
}

/// Waits until this traced thread, or with -1 any, stops: which, and by which signal.
pub(crate) fn wait_for(tid: i32) -> anyhow::Result<(i32, i32)> {
    let mut status = 0;
    // SAFETY: a live int.
    let rc = unsafe { libc::waitpid(tid, &raw mut status, libc::__WALL) };
    ensure!(rc > 0, "waitpid: {}", std::io::Error::last_os_error());
    ensure!(libc::WIFSTOPPED(status), "it has ended");
    Ok((rc, libc::WSTOPSIG(status)))
}

/// Waits until a traced thread stops; by which signal.
pub(crate) fn wait(tid: i32) -> anyhow::Result<i32> {
    Ok(wait_for(tid)?.1)
}

/// The bytes at an address of a stopped process.
pub(crate) fn code(pid: i32, at: u64) -> anyhow::Result<[u8; LONGEST]> {
    let mut bytes = [0; LONGEST];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: at as *mut _, iov_len: bytes.len() };
    // SAFETY: one live piece on either side; the kernel checks the other process's.
    let n = unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) };
    // Near the end of a page fewer may be there.
    ensure!(n > 0, "cannot read its code");
    Ok(bytes)
}

/// The instruction that a stopped thread executes next.
pub(crate) struct Step {
    pub(crate) registers: libc::user_regs_struct,
    pub(crate) code: [u8; LONGEST],
}

/// Whether an instruction locks its line: it has the prefix, or is an exchange with memory.
pub(crate) fn is_locked(code: &[u8]) -> bool {
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

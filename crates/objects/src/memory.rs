//! Registered memory. Only this module touches it, with two that know about mappings ([`mapping`], [`shared_file`]).
//!
//! Program and peer may write the same bytes at any time, so nothing here makes a reference to them. The program may
//! also have unmapped them. So every access is made by a routine of this module's own, in assembly. The signal handler
//! turns its page faults into a return value by moving the instruction pointer to a landing pad. When all is well that
//! costs nothing. Where the program keeps that handler from running, the kernel copies ([`guard`]).

mod feeding;
mod guard;
pub mod mapping;
pub(crate) mod shared_file;

use std::arch::global_asm;
use std::ffi::c_int;
use std::sync::atomic::{Ordering, fence};

use anyverbs_net::shm::{Copying, Local};
use anyverbs_proto::memory::{Fault, Memory};
use anyverbs_proto::wire::crc32::feed_all;

use feeding::OnePass;
pub use guard::Guard;
use mapping::{Maps, Needs, Unfit};

// All routines keep the stack pointer as it was at entry, so that the landing pad can return for any of them. They
// answer 0, and the landing pad 1.
//
// A copy stores its last bytes after all others: a program may poll the last byte of a WRITE. It loads them before it stores any,
// if it is longer than 3 bytes.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.anyverbs_guarded,\"ax\",@progbits",
    ".p2align 6",
    ".hidden anyverbs_guarded_begin",
    ".globl anyverbs_guarded_begin",
    "anyverbs_guarded_begin:",
    // int copy(rdi = to, rsi = from, rdx = len)
    ".hidden anyverbs_guarded_copy",
    ".globl anyverbs_guarded_copy",
    "anyverbs_guarded_copy:",
    "cmp rdx, 16",
    "jb 20f",
    "cmp rdx, 32",
    "ja 30f",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + rdx - 16]",
    "movdqu [rdi], xmm0",
    "movdqu [rdi + rdx - 16], xmm1",
    "xor eax, eax",
    "ret",
    "20:", // 0 to 15
    "cmp edx, 8",
    "jb 21f",
    "mov rax, [rsi]",
    "mov rcx, [rsi + rdx - 8]",
    "mov [rdi], rax",
    "mov [rdi + rdx - 8], rcx",
    "xor eax, eax",
    "ret",
    "21:",
    "cmp edx, 4",
    "jb 22f",
    "mov eax, [rsi]",
    "mov ecx, [rsi + rdx - 4]",
    "mov [rdi], eax",
    "mov [rdi + rdx - 4], ecx",
    "xor eax, eax",
    "ret",
    "22:", // 0 to 3, byte by byte
    "test edx, edx",
    "jz 23f",
    "mov al, [rsi]",
    "mov [rdi], al",
    "inc rsi",
    "inc rdi",
    "dec edx",
    "jmp 22b",
    "23:",
    "xor eax, eax",
    "ret",
    "30:", // 33 and more
    "cmp rdx, 64",
    "ja 40f",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + 16]",
    "movdqu xmm2, [rsi + rdx - 32]",
    "movdqu xmm3, [rsi + rdx - 16]",
    "movdqu [rdi], xmm0",
    "movdqu [rdi + 16], xmm1",
    "movdqu [rdi + rdx - 32], xmm2",
    "movdqu [rdi + rdx - 16], xmm3",
    "xor eax, eax",
    "ret",
    "40:",
    "cmp rdx, 4096",
    "jae 50f",
    // 65 to 4095: the last 64 bytes apart, then whole blocks of 64.
    "movdqu xmm4, [rsi + rdx - 64]",
    "movdqu xmm5, [rsi + rdx - 48]",
    "movdqu xmm6, [rsi + rdx - 32]",
    "movdqu xmm7, [rsi + rdx - 16]",
    "lea r8, [rdi + rdx - 64]",
    "41:",
    "movdqu xmm0, [rsi]",
    "movdqu xmm1, [rsi + 16]",
    "movdqu xmm2, [rsi + 32]",
    "movdqu xmm3, [rsi + 48]",
    "movdqu [rdi], xmm0",
    "movdqu [rdi + 16], xmm1",
    "movdqu [rdi + 32], xmm2",
    "movdqu [rdi + 48], xmm3",
    "add rsi, 64",
    "add rdi, 64",
    "cmp rdi, r8",
    "jb 41b",
    "movdqu [r8], xmm4",
    "movdqu [r8 + 16], xmm5",
    "movdqu [r8 + 32], xmm6",
    "movdqu [r8 + 48], xmm7",
    "xor eax, eax",
    "ret",
    "50:", // 4096 and more: the string instruction may show its stores in any order, and is over before the last 64 bytes
    "movdqu xmm4, [rsi + rdx - 64]",
    "movdqu xmm5, [rsi + rdx - 48]",
    "movdqu xmm6, [rsi + rdx - 32]",
    "movdqu xmm7, [rsi + rdx - 16]",
    "lea rcx, [rdx - 64]",
    "rep movsb",
    "movdqu [rdi], xmm4",
    "movdqu [rdi + 16], xmm5",
    "movdqu [rdi + 32], xmm6",
    "movdqu [rdi + 48], xmm7",
    "xor eax, eax",
    "ret",
    // int compare_swap(rdi = at, rsi = compare, rdx = swap, rcx = old)
    ".hidden anyverbs_guarded_compare_swap",
    ".globl anyverbs_guarded_compare_swap",
    "anyverbs_guarded_compare_swap:",
    "mov rax, rsi",
    "lock cmpxchg [rdi], rdx",
    "mov [rcx], rax",
    "xor eax, eax",
    "ret",
    // int fetch_add(rdi = at, rsi = add, rdx = old)
    ".hidden anyverbs_guarded_fetch_add",
    ".globl anyverbs_guarded_fetch_add",
    "anyverbs_guarded_fetch_add:",
    "lock xadd [rdi], rsi",
    "mov [rdx], rsi",
    "xor eax, eax",
    "ret",
    // int store(rdi = at, rsi = value)
    ".hidden anyverbs_guarded_store",
    ".globl anyverbs_guarded_store",
    "anyverbs_guarded_store:",
    "mov [rdi], rsi",
    "xor eax, eax",
    "ret",
    ".hidden anyverbs_guarded_end",
    ".globl anyverbs_guarded_end",
    "anyverbs_guarded_end:",
    ".hidden anyverbs_guarded_landing",
    ".globl anyverbs_guarded_landing",
    "anyverbs_guarded_landing:",
    "mov eax, 1",
    "ret",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.anyverbs_guarded,\"ax\",@progbits",
    ".p2align 6",
    ".hidden anyverbs_guarded_begin",
    ".globl anyverbs_guarded_begin",
    "anyverbs_guarded_begin:",
    // int copy(x0 = to, x1 = from, x2 = len)
    ".hidden anyverbs_guarded_copy",
    ".globl anyverbs_guarded_copy",
    "anyverbs_guarded_copy:",
    "cmp x2, #8",
    "b.lo 40f",
    "sub x2, x2, #8", // 8 and more: the last 8 bytes apart
    "ldr x4, [x1, x2]",
    "20: cmp x2, #64",
    "b.lo 30f",
    "ldp q0, q1, [x1], #32",
    "ldp q2, q3, [x1], #32",
    "stp q0, q1, [x0], #32",
    "stp q2, q3, [x0], #32",
    "sub x2, x2, #64",
    "b 20b",
    "30: cmp x2, #8",
    "b.lo 31f",
    "ldr x3, [x1], #8",
    "str x3, [x0], #8",
    "sub x2, x2, #8",
    "b 30b",
    "31: cbz x2, 32f",
    "ldrb w3, [x1], #1",
    "strb w3, [x0], #1",
    "sub x2, x2, #1",
    "b 31b",
    "32: dmb ishst", // also behind the copies before, which the same message may have needed
    "str x4, [x0]",
    "mov w0, #0",
    "ret",
    "40: cbz x2, 50f", // 0 to 7: the last byte apart
    "sub x2, x2, #1",
    "ldrb w4, [x1, x2]",
    "41: cbz x2, 42f",
    "ldrb w3, [x1], #1",
    "strb w3, [x0], #1",
    "sub x2, x2, #1",
    "b 41b",
    "42: dmb ishst",
    "strb w4, [x0]",
    "50: mov w0, #0",
    "ret",
    // int compare_swap(x0 = at, x1 = compare, x2 = swap, x3 = old)
    ".hidden anyverbs_guarded_compare_swap",
    ".globl anyverbs_guarded_compare_swap",
    "anyverbs_guarded_compare_swap:",
    "60: ldaxr x4, [x0]",
    "cmp x4, x1",
    "b.ne 61f",
    "stlxr w5, x2, [x0]",
    "cbnz w5, 60b",
    "b 62f",
    "61: clrex",
    "62: dmb ish",
    "str x4, [x3]",
    "mov w0, #0",
    "ret",
    // int fetch_add(x0 = at, x1 = add, x2 = old)
    ".hidden anyverbs_guarded_fetch_add",
    ".globl anyverbs_guarded_fetch_add",
    "anyverbs_guarded_fetch_add:",
    "70: ldaxr x4, [x0]",
    "add x5, x4, x1",
    "stlxr w6, x5, [x0]",
    "cbnz w6, 70b",
    "dmb ish",
    "str x4, [x2]",
    "mov w0, #0",
    "ret",
    // int store(x0 = at, x1 = value)
    ".hidden anyverbs_guarded_store",
    ".globl anyverbs_guarded_store",
    "anyverbs_guarded_store:",
    "stlr x1, [x0]",
    "mov w0, #0",
    "ret",
    ".hidden anyverbs_guarded_end",
    ".globl anyverbs_guarded_end",
    "anyverbs_guarded_end:",
    ".hidden anyverbs_guarded_landing",
    ".globl anyverbs_guarded_landing",
    "anyverbs_guarded_landing:",
    "mov w0, #1",
    "ret",
    ".popsection",
);

unsafe extern "C" {
    safe static anyverbs_guarded_begin: u8;
    safe static anyverbs_guarded_end: u8;
    safe static anyverbs_guarded_landing: u8;
    fn anyverbs_guarded_copy(to: *mut u8, from: *const u8, len: usize) -> c_int;
    fn anyverbs_guarded_compare_swap(at: *mut u64, compare: u64, swap: u64, old: *mut u64)
    -> c_int;
    fn anyverbs_guarded_fetch_add(at: *mut u64, add: u64, old: *mut u64) -> c_int;
    fn anyverbs_guarded_store(at: *mut u64, value: u64) -> c_int;
}

/// The memory of this process.
#[derive(Debug)]
pub struct ProcessMemory {
    /// The mappings in it.
    pub(crate) maps: Maps,
}

impl Default for ProcessMemory {
    fn default() -> Self {
        guard::install_once();
        Self { maps: Maps::open() }
    }
}

impl ProcessMemory {
    /// The guard of the calling thread's copies, for one call of the program: to look for it takes longer than a short copy.
    #[inline]
    #[must_use]
    pub fn guard(&self) -> Guard {
        Guard::of_thread()
    }

    /// As [`Memory::copy`], with the guard of this call.
    ///
    /// # Errors
    /// [`Fault`].
    #[inline]
    pub fn copy_by(&self, guard: Guard, to: u64, from: u64, len: usize) -> Result<(), Fault> {
        // SAFETY: as in `copy`.
        unsafe { guard.copy(to as *mut u8, from as *const u8, len) }
    }
}

impl Memory for ProcessMemory {
    #[inline]
    fn read(&self, addr: u64, dst: &mut [u8]) -> Result<(), Fault> {
        // SAFETY: `dst` is ours to write. The other side is an address that the program registered. The program vouched
        // that the device may touch it (`Pd::reg_mr`), and where nothing is mapped the routine returns 1.
        unsafe { guard::copy(dst.as_mut_ptr(), addr as *const u8, dst.len()) }
    }

    #[inline]
    fn write(&self, addr: u64, src: &[u8]) -> Result<(), Fault> {
        // SAFETY: as in `read`, the other way.
        unsafe { guard::copy(addr as *mut u8, src.as_ptr(), src.len()) }
    }

    #[inline]
    fn copy(&self, to: u64, from: u64, len: usize) -> Result<(), Fault> {
        // SAFETY: as in `read` and `write`. Or an address in a mapped ring of the same-host link, where this process
        // reads or fills a message, by this copy alone.
        unsafe { guard::copy(to as *mut u8, from as *const u8, len) }
    }

    fn is_protected(&self, addr: u64, len: u64, writes: bool) -> bool {
        let needs = Needs { writable: writes, ..Needs::default() };
        matches!(self.maps.check(addr, len, needs), Err(Unfit::Protected(_)))
    }

    fn compare_swap(&self, addr: u64, compare: u64, swap: u64) -> Result<u64, Fault> {
        guard::probe(addr)?;
        let mut old = 0;
        // SAFETY: as in `read`; `old` is live, and the callers have checked that `addr` is aligned.
        let code =
            unsafe { anyverbs_guarded_compare_swap(addr as *mut u64, compare, swap, &raw mut old) };
        if code == 0 { Ok(old) } else { Err(Fault) }
    }

    fn fetch_add(&self, addr: u64, add: u64) -> Result<u64, Fault> {
        guard::probe(addr)?;
        let mut old = 0;
        // SAFETY: as in `compare_swap`.
        let code = unsafe { anyverbs_guarded_fetch_add(addr as *mut u64, add, &raw mut old) };
        if code == 0 { Ok(old) } else { Err(Fault) }
    }

    fn store(&self, addr: u64, value: u64) -> Result<(), Fault> {
        guard::probe(addr)?;
        // SAFETY: as in `compare_swap`.
        let code = unsafe { anyverbs_guarded_store(addr as *mut u64, value) };
        if code == 0 { Ok(()) } else { Err(Fault) }
    }

    fn persist(&self, addr: u64, len: u64) -> Result<(), Fault> {
        mapping::write_back(addr, len)
    }
}

impl ProcessMemory {
    /// Writes `len` bytes of the pieces into another process's memory; whether all were.
    #[inline]
    pub fn write_remote(
        &self,
        copying: &Copying<'_>,
        pieces: &[Local],
        to: u64,
        len: usize,
    ) -> bool {
        // SAFETY: as in `read`: the kernel copies as the routine would, and finds out which parts are not mapped.
        unsafe { copying.write(pieces, to, len) }.is_ok()
    }

    /// Reads `len` bytes of another process's memory into the pieces; whether all were.
    #[inline]
    pub fn read_remote(
        &self,
        copying: &Copying<'_>,
        pieces: &[Local],
        from: u64,
        len: usize,
    ) -> bool {
        // SAFETY: as in `write`, for the pieces.
        unsafe { copying.read(pieces, from, len) }.is_ok()
    }

    /// Writes the pieces to memory that another process shares; tells whether all were written. A reader of the last
    /// byte sees all others.
    pub fn write_shared(&self, pieces: &[Local], to: u64, len: usize) -> bool {
        // As `Copying::write`: the last line by itself, after the others.
        let end = to.wrapping_add(len as u64);
        let head = (end.wrapping_sub(1) & !63).saturating_sub(to) as usize;
        let mut at = 0;
        for piece in pieces {
            let (from, here) = (piece.iov_base as u64, piece.iov_len);
            let before = here.min(head.saturating_sub(at));
            let ends = [(0, before), (before, here - before)];
            for (skip, n) in ends.into_iter().filter(|(_, n)| *n > 0) {
                if at + skip >= head {
                    fence(Ordering::Release);
                }
                let to = to.wrapping_add((at + skip) as u64);
                if self.copy(to, from.wrapping_add(skip as u64), n).is_err() {
                    return false;
                }
            }
            at += here;
        }
        true
    }

    /// Reads memory that another process shares into the pieces; whether all was.
    pub fn read_shared(&self, pieces: &[Local], mut from: u64) -> bool {
        pieces.iter().all(|piece| {
            let copied = self.copy(piece.iov_base as u64, from, piece.iov_len);
            from = from.wrapping_add(piece.iov_len as u64);
            copied.is_ok()
        })
    }
}

impl ProcessMemory {
    /// As [`Memory::read`], and feeds the bytes that were read to a register of a checksum, whose new value it returns.
    ///
    /// # Errors
    /// [`Fault`].
    #[inline]
    pub fn read_and_feed(&self, addr: u64, dst: &mut [u8], register: u32) -> Result<u32, Fault> {
        let one_pass = OnePass::best().filter(|_| dst.len() >= feeding::SHORTEST);
        self.read_and_feed_by(one_pass, (addr, dst), register)
    }

    fn read_and_feed_by(
        &self,
        one_pass: Option<&OnePass>,
        (addr, dst): (u64, &mut [u8]),
        register: u32,
    ) -> Result<u32, Fault> {
        let (done, register) = match one_pass {
            // SAFETY: as in `read`.
            Some(by) if !Guard::of_thread().is_by_kernel() => unsafe {
                by.run(addr as *const u8, dst, register)?
            },
            _ => (0, register),
        };
        let rest = &mut dst[done..];
        self.read(addr.wrapping_add(done as u64), rest)?;
        Ok(feed_all(register, rest))
    }
}

/// Installs the handler of page faults. It comes with the first device of this process by itself. Without it [`copy_guarded`] asks
/// the kernel for each copy.
pub fn install_guard() {
    guard::install_once();
}

/// Copies `len` bytes between memory of this process. Either side may be unmapped, or written by others at the same
/// time: this is for programs' buffers and for memory that peers write. If a page is missing, some of the bytes were
/// copied. The handler of page faults comes with the first device of this process, or by [`install_guard`].
///
/// # Safety
/// Whoever owns `to` lets it be written, and no Rust reference to either range is in use.
///
/// # Errors
/// [`Fault`]: part of a range is not mapped.
#[inline]
pub unsafe fn copy_guarded(to: *mut u8, from: *const u8, len: usize) -> Result<(), Fault> {
    // SAFETY: the caller's promise; where nothing is mapped it is a fault.
    unsafe { guard::copy(to, from, len) }
}

#[cfg(test)]
mod tests;

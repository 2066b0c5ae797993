//! A copy that feeds a CRC-32 register on the way, in one pass: what a packet needs on its way to a network.
//!
//! The register's polynomial is divided by folding. Four vectors hold the remainder so far. Each is multiplied by the power of x
//! that stands for the distance to the next four, and added to them. In the end the vectors are a message of the same remainder
//! as all that was read, and the plain way feeds that. See "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
//! Instruction" (Intel, 2009).

use std::arch::global_asm;
use std::ffi::c_int;
use std::sync::OnceLock;

use anyverbs_proto::memory::Fault;
use anyverbs_proto::wire::crc32::{feed_all, fold_keys};

/// Bytes of the longest vector.
const LONGEST: usize = 64;
/// For fewer bytes two passes take no longer.
pub(super) const SHORTEST: usize = 512;

// The routines keep the stack pointer as it was at entry, as those of `memory.rs`, and have a landing pad of their own. The length
// is a multiple of four vectors, and not 0. The state has room for four vectors; its first one is added to the first bytes read.
#[cfg(target_arch = "x86_64")]
global_asm!(
    ".pushsection .text.anyverbs_feeding,\"ax\",@progbits",
    ".p2align 6",
    ".hidden anyverbs_feeding_begin",
    ".globl anyverbs_feeding_begin",
    "anyverbs_feeding_begin:",
    // int feed(rdi = to, rsi = from, rdx = len, rcx = state, r8 = keys), with vectors `v` of `w` bytes
    ".macro anyverbs_feeding name, v, w, mov, xor",
    ".hidden \\name",
    ".globl \\name",
    "\\name:",
    "\\mov \\v\\()8, [r8]",
    "\\mov \\v\\()0, [rsi]",
    "\\mov \\v\\()1, [rsi + \\w]",
    "\\mov \\v\\()2, [rsi + 2 * \\w]",
    "\\mov \\v\\()3, [rsi + 3 * \\w]",
    "\\mov [rdi], \\v\\()0",
    "\\mov [rdi + \\w], \\v\\()1",
    "\\mov [rdi + 2 * \\w], \\v\\()2",
    "\\mov [rdi + 3 * \\w], \\v\\()3",
    "\\xor \\v\\()0, \\v\\()0, [rcx]",
    "20:",
    "sub rdx, 4 * \\w",
    "jz 21f",
    "add rsi, 4 * \\w",
    "add rdi, 4 * \\w",
    "\\mov \\v\\()4, [rsi]",
    "\\mov \\v\\()5, [rsi + \\w]",
    "\\mov \\v\\()6, [rsi + 2 * \\w]",
    "\\mov \\v\\()7, [rsi + 3 * \\w]",
    "\\mov [rdi], \\v\\()4",
    "\\mov [rdi + \\w], \\v\\()5",
    "\\mov [rdi + 2 * \\w], \\v\\()6",
    "\\mov [rdi + 3 * \\w], \\v\\()7",
    "vpclmulqdq \\v\\()9, \\v\\()0, \\v\\()8, 0x00",
    "vpclmulqdq \\v\\()10, \\v\\()1, \\v\\()8, 0x00",
    "vpclmulqdq \\v\\()11, \\v\\()2, \\v\\()8, 0x00",
    "vpclmulqdq \\v\\()12, \\v\\()3, \\v\\()8, 0x00",
    "vpclmulqdq \\v\\()0, \\v\\()0, \\v\\()8, 0x11",
    "vpclmulqdq \\v\\()1, \\v\\()1, \\v\\()8, 0x11",
    "vpclmulqdq \\v\\()2, \\v\\()2, \\v\\()8, 0x11",
    "vpclmulqdq \\v\\()3, \\v\\()3, \\v\\()8, 0x11",
    "\\xor \\v\\()4, \\v\\()4, \\v\\()9",
    "\\xor \\v\\()5, \\v\\()5, \\v\\()10",
    "\\xor \\v\\()6, \\v\\()6, \\v\\()11",
    "\\xor \\v\\()7, \\v\\()7, \\v\\()12",
    "\\xor \\v\\()0, \\v\\()0, \\v\\()4",
    "\\xor \\v\\()1, \\v\\()1, \\v\\()5",
    "\\xor \\v\\()2, \\v\\()2, \\v\\()6",
    "\\xor \\v\\()3, \\v\\()3, \\v\\()7",
    "jmp 20b",
    "21:",
    "\\mov [rcx], \\v\\()0",
    "\\mov [rcx + \\w], \\v\\()1",
    "\\mov [rcx + 2 * \\w], \\v\\()2",
    "\\mov [rcx + 3 * \\w], \\v\\()3",
    "vzeroupper",
    "xor eax, eax",
    "ret",
    ".endm",
    "anyverbs_feeding anyverbs_feeding_16, xmm, 16, vmovdqu, vpxor",
    "anyverbs_feeding anyverbs_feeding_32, ymm, 32, vmovdqu, vpxor",
    "anyverbs_feeding anyverbs_feeding_64, zmm, 64, vmovdqu64, vpxorq",
    ".hidden anyverbs_feeding_landing",
    ".globl anyverbs_feeding_landing",
    "anyverbs_feeding_landing:",
    "vzeroupper",
    "mov eax, 1",
    "ret",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
global_asm!(
    ".pushsection .text.anyverbs_feeding,\"ax\",@progbits",
    ".arch_extension aes",
    ".p2align 6",
    ".hidden anyverbs_feeding_begin",
    ".globl anyverbs_feeding_begin",
    "anyverbs_feeding_begin:",
    // int feed(x0 = to, x1 = from, x2 = len, x3 = state, x4 = keys)
    ".hidden anyverbs_feeding_16",
    ".globl anyverbs_feeding_16",
    "anyverbs_feeding_16:",
    "ldr q16, [x4]",
    "ldp q0, q1, [x1], #32",
    "ldp q2, q3, [x1], #32",
    "stp q0, q1, [x0], #32",
    "stp q2, q3, [x0], #32",
    "ldr q17, [x3]",
    "eor v0.16b, v0.16b, v17.16b",
    "20: subs x2, x2, #64",
    "b.eq 21f",
    "ldp q4, q5, [x1], #32",
    "ldp q6, q7, [x1], #32",
    "stp q4, q5, [x0], #32",
    "stp q6, q7, [x0], #32",
    "pmull v17.1q, v0.1d, v16.1d",
    "pmull v18.1q, v1.1d, v16.1d",
    "pmull v19.1q, v2.1d, v16.1d",
    "pmull v20.1q, v3.1d, v16.1d",
    "pmull2 v0.1q, v0.2d, v16.2d",
    "pmull2 v1.1q, v1.2d, v16.2d",
    "pmull2 v2.1q, v2.2d, v16.2d",
    "pmull2 v3.1q, v3.2d, v16.2d",
    "eor v4.16b, v4.16b, v17.16b",
    "eor v5.16b, v5.16b, v18.16b",
    "eor v6.16b, v6.16b, v19.16b",
    "eor v7.16b, v7.16b, v20.16b",
    "eor v0.16b, v0.16b, v4.16b",
    "eor v1.16b, v1.16b, v5.16b",
    "eor v2.16b, v2.16b, v6.16b",
    "eor v3.16b, v3.16b, v7.16b",
    "b 20b",
    "21: stp q0, q1, [x3]",
    "stp q2, q3, [x3, #32]",
    "mov w0, #0",
    "ret",
    ".hidden anyverbs_feeding_landing",
    ".globl anyverbs_feeding_landing",
    "anyverbs_feeding_landing:",
    "mov w0, #1",
    "ret",
    ".popsection",
);

type Routine = unsafe extern "C" fn(*mut u8, *const u8, usize, *mut State, *const Keys) -> c_int;

unsafe extern "C" {
    safe static anyverbs_feeding_begin: u8;
    safe static anyverbs_feeding_landing: u8;
    fn anyverbs_feeding_16(
        to: *mut u8,
        from: *const u8,
        len: usize,
        state: *mut State,
        keys: *const Keys,
    ) -> c_int;
    #[cfg(target_arch = "x86_64")]
    fn anyverbs_feeding_32(
        to: *mut u8,
        from: *const u8,
        len: usize,
        state: *mut State,
        keys: *const Keys,
    ) -> c_int;
    #[cfg(target_arch = "x86_64")]
    fn anyverbs_feeding_64(
        to: *mut u8,
        from: *const u8,
        len: usize,
        state: *mut State,
        keys: *const Keys,
    ) -> c_int;
}

/// Where a thread goes on after a fault at this address, if that is one of such a copy.
pub(super) fn landing(pc: usize) -> Option<usize> {
    // It stands behind the routines.
    let [begin, landing] = [&raw const anyverbs_feeding_begin, &raw const anyverbs_feeding_landing];
    (begin as usize..landing as usize).contains(&pc).then_some(landing as usize)
}

#[repr(C, align(64))]
struct State([u8; 4 * LONGEST]);

/// A pair for each 16 bytes of a vector.
#[repr(C, align(64))]
struct Keys([[u64; 2]; LONGEST / 16]);

/// One pass over the bytes, with vectors of some length.
pub(super) struct OnePass {
    routine: Routine,
    vector: usize,
    keys: Keys,
}

impl OnePass {
    const fn new(routine: Routine, vector: usize) -> Self {
        let keys = Keys([fold_keys(4 * vector); LONGEST / 16]);
        Self { routine, vector, keys }
    }

    /// Yields those that this processor can do, longest first.
    fn all() -> impl Iterator<Item = Self> {
        #[cfg(target_arch = "x86_64")]
        let all = {
            let has_pairs =
                is_x86_feature_detected!("avx") && is_x86_feature_detected!("pclmulqdq");
            let has_vectors = is_x86_feature_detected!("vpclmulqdq");
            [
                (has_vectors && is_x86_feature_detected!("avx512f"))
                    .then(|| Self::new(anyverbs_feeding_64, 64)),
                (has_vectors && is_x86_feature_detected!("avx2"))
                    .then(|| Self::new(anyverbs_feeding_32, 32)),
                has_pairs.then(|| Self::new(anyverbs_feeding_16, 16)),
            ]
        };
        #[cfg(target_arch = "aarch64")]
        let all = [std::arch::is_aarch64_feature_detected!("aes")
            .then(|| Self::new(anyverbs_feeding_16, 16))];
        all.into_iter().flatten()
    }

    /// The best of this processor, if it can do any.
    pub(super) fn best() -> Option<&'static Self> {
        static BEST: OnceLock<Option<OnePass>> = OnceLock::new();
        BEST.get_or_init(|| Self::all().next()).as_ref()
    }

    /// Copies and feeds as much as whole vectors hold; how many bytes, and the register then.
    ///
    /// # Safety
    /// As for [`super::copy_guarded`].
    pub(super) unsafe fn run(
        &self,
        from: *const u8,
        to: &mut [u8],
        register: u32,
    ) -> Result<(usize, u32), Fault> {
        let len = to.len() / (4 * self.vector) * (4 * self.vector);
        if len == 0 {
            return Ok((0, register));
        }
        let mut state = State([0; 4 * LONGEST]);
        state.0[..4].copy_from_slice(&register.to_le_bytes());
        // SAFETY: the caller's promise; state and keys are as long as the routine's vectors need.
        let code = unsafe {
            (self.routine)(to.as_mut_ptr(), from, len, &raw mut state, &raw const self.keys)
        };
        if code == 0 { Ok((len, feed_all(0, &state.0[..4 * self.vector]))) } else { Err(Fault) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::memory::ProcessMemory;

    proptest! {
        #[test]
        fn one_pass_is_as_two_for_all_bytes(
            bytes in prop::collection::vec(any::<u8>(), 0..3000),
            skew in 0..70_usize,
            register: u32,
        ) {
            let memory = ProcessMemory::default();
            let from = &bytes[skew.min(bytes.len())..];
            let expected = feed_all(register, from);
            for by in OnePass::all() {
                let mut to = vec![0; from.len()];
                let place = (from.as_ptr() as u64, &mut to[..]);
                let fed = memory.read_and_feed_by(Some(&by), place, register);
                prop_assert_eq!(fed, Ok(expected), "vectors of {}", by.vector);
                prop_assert_eq!(&to[..], from);
            }
        }
    }

    #[test]
    fn one_pass_is_as_two() {
        let memory = ProcessMemory::default();
        let source: Vec<u8> = (0..9000u32).map(|i| (i * 31 + i / 251) as u8).collect();
        let lengths = (0..1100).chain([2048, 4095, 4096, 8192, 8990]);
        for len in lengths {
            for (skew, register) in [(0, u32::MAX), (1, 0), (7, 0x1234_5678)] {
                let from = &source[skew..skew + len];
                let expected = feed_all(register, from);
                for by in OnePass::all().map(Some).chain([None]) {
                    let vector = by.as_ref().map_or(0, |by| by.vector);
                    let mut to = vec![0xaa; len + 2];
                    let place = (from.as_ptr() as u64, &mut to[1..=len]);
                    let fed = memory.read_and_feed_by(by.as_ref(), place, register);
                    assert_eq!(fed, Ok(expected), "{len} bytes, vectors of {vector}");
                    assert_eq!(&to[1..=len], from);
                    assert_eq!((to[0], to[len + 1]), (0xaa, 0xaa), "{len} bytes, {vector}");
                }
                let mut to = vec![0; len];
                let addr = from.as_ptr() as u64;
                assert_eq!(memory.read_and_feed(addr, &mut to, register), Ok(expected));
            }
        }
    }

    /// No page is there behind the first.
    #[test]
    fn a_missing_page_is_a_fault_of_either_way() {
        let memory = ProcessMemory::default();
        // SAFETY: new pages, of which the second is taken back.
        let pages = unsafe {
            let (rights, flags) =
                (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            let pages = libc::mmap(std::ptr::null_mut(), 8192, rights, flags, -1, 0);
            assert_ne!(pages, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(pages.byte_add(4096), 4096, libc::PROT_NONE), 0);
            pages
        };
        for by in OnePass::all().map(Some).chain([None]) {
            for (at, len, fits) in
                [(0, 4096, true), (0, 4097, false), (1, 4096, false), (4096, 512, false)]
            {
                let mut to = vec![0; len];
                let fed = memory.read_and_feed_by(by.as_ref(), (pages as u64 + at, &mut to), 1);
                assert_eq!(fed.is_ok(), fits, "{len} bytes at {at}");
            }
        }
        // SAFETY: the pages from above.
        unsafe { libc::munmap(pages, 8192) };
    }
}

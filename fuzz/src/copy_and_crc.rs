//! Copies that feed a CRC on their way, in pieces of any length and at any place. All routines that the processor can run make
//! them, and so does the one that the device chooses. They copy and feed what the plain way does, and touch nothing else. A
//! missing page is a fault.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::sync::OnceLock;

use anyverbs_objects::memory::ProcessMemory;
use anyverbs_proto::wire::crc32::{feed_all, fold_keys};

use super::input::Input;

const MAX_PIECES: usize = 8;
/// The longest piece.
const LONGEST: usize = 6000;
/// Places of a piece. A copy has so many bytes in front of it.
const SKEWS: usize = 128;
/// A multiple of any system's page.
const PAGE: usize = 64 << 10;
/// The value of the bytes around a copy.
const UNTOUCHED: u8 = 0xa5;

type Routine = unsafe extern "C" fn(*mut u8, *const u8, usize, *mut State, *const Keys) -> c_int;

// Only the best of them is chosen by the device, so they are called by their symbols. `OnePass` in
// `crates/objects/src/memory/feeding.rs` has their rules: the length is a multiple of four vectors, and not 0.
unsafe extern "C" {
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

#[repr(C, align(64))]
struct State([u8; 256]);

#[repr(C, align(64))]
struct Keys([[u64; 2]; 4]);

/// The routines that this processor can run, and the bytes of their vectors.
fn routines() -> Vec<(Routine, usize)> {
    #[cfg(target_arch = "x86_64")]
    let all = {
        use std::is_x86_feature_detected as has;
        let has_vectors = has!("vpclmulqdq");
        [
            (has!("avx") && has!("pclmulqdq"), anyverbs_feeding_16 as Routine, 16),
            (has_vectors && has!("avx2"), anyverbs_feeding_32, 32),
            (has_vectors && has!("avx512f"), anyverbs_feeding_64, 64),
        ]
    };
    #[cfg(target_arch = "aarch64")]
    let all =
        [(std::arch::is_aarch64_feature_detected!("aes"), anyverbs_feeding_16 as Routine, 16)];
    let usable = all.into_iter().filter(|(is_there, ..)| *is_there);
    usable.map(|(_, routine, vector)| (routine, vector)).collect()
}

/// Pages, and one behind them that nobody may touch.
struct Pages {
    at: *mut u8,
    len: usize,
}

impl Pages {
    fn new(len: usize) -> Self {
        let len = len.next_multiple_of(PAGE);
        let (rights, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: new pages, of which the last loses its rights.
        let at = unsafe {
            let at = libc::mmap(null_mut(), len + PAGE, rights, flags, -1, 0);
            assert_ne!(at, libc::MAP_FAILED);
            assert_eq!(libc::mprotect(at.byte_add(len), PAGE, libc::PROT_NONE), 0);
            at.cast()
        };
        Self { at, len }
    }

    /// `len` bytes, `before` the page that nobody may touch.
    fn bytes(&mut self, len: usize, before: usize) -> &mut [u8] {
        let at = self.len - before - len;
        // SAFETY: inside, and lent by this value.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(at), len) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: the pages of `new`.
        unsafe { libc::munmap(self.at.cast(), self.len + PAGE) };
    }
}

/// The definition: bit by bit.
fn feed(register: u32, bytes: &[u8]) -> u32 {
    bytes.iter().fold(register, |register, byte| {
        let step = |r: u32, _| r >> 1 ^ if r & 1 == 1 { 0xedb8_8320 } else { 0 };
        (0..8).fold(register ^ u32::from(*byte), step)
    })
}

/// One copy by a routine, of whole vectors; the register then. `None` is a fault.
fn copy_by(
    (routine, vector): (Routine, usize),
    from: *const u8,
    to: &mut [u8],
    register: u32,
) -> Option<u32> {
    if to.is_empty() {
        return Some(register);
    }
    let (mut state, keys) = (State([0; 256]), Keys([fold_keys(4 * vector); 4]));
    state.0[..4].copy_from_slice(&register.to_le_bytes());
    // SAFETY: `to` has the bytes. Where `from` has a page less, the guard makes a fault of it. State and keys fit any vector.
    let code = unsafe { routine(to.as_mut_ptr(), from, to.len(), &raw mut state, &raw const keys) };
    (code == 0).then(|| feed_all(0, &state.0[..4 * vector]))
}

/// A piece of memory, and where it is copied to.
struct Piece {
    len: usize,
    /// Bytes between its end and a page that nobody may touch, and the same of the copy.
    behind: (usize, usize),
    /// So many of its bytes lie in that page.
    missing: usize,
}

impl Piece {
    fn new(input: &mut Input<'_>) -> Self {
        let len = input.len(1024);
        let [behind, behind_copy] = [(); 2].map(|()| usize::from(input.byte()) % SKEWS);
        let missing = if input.rarely() { 1 + usize::from(input.word()) } else { 0 }.min(len);
        Self { len, behind: (if missing > 0 { 0 } else { behind }, behind_copy), missing }
    }
}

/// Runs one input.
pub fn run(input: &[u8]) {
    static SETTING: OnceLock<(Vec<(Routine, usize)>, ProcessMemory)> = OnceLock::new();
    let (routines, memory) = SETTING.get_or_init(|| (routines(), ProcessMemory::default()));
    let input = &mut Input(input);
    let mut register = u32::from(input.word()) << 16 | u32::from(input.word());
    let pieces = 1 + usize::from(input.byte()) % MAX_PIECES;
    let pieces: Vec<Piece> = (0..pieces).map(|_| Piece::new(input)).collect();
    let (mut source, mut target) = (Pages::new(LONGEST + SKEWS), Pages::new(LONGEST + 2 * SKEWS));
    // The rest of the input again and again, each time another one.
    let noise = input.rest(LONGEST);
    for (n, byte) in source.bytes(LONGEST + SKEWS, 0).iter_mut().enumerate() {
        let (round, at) = (n / (noise.len() + 1), n % (noise.len() + 1));
        *byte = noise.get(at).unwrap_or(&7) ^ round as u8;
    }
    for Piece { len, behind, missing } in pieces {
        let there = &*source.bytes(len - missing, behind.0);
        let expected = feed(register, there);
        assert_eq!(feed_all(register, there), expected);
        // The device's choice first, and then each routine.
        for way in std::iter::once(None).chain(routines.iter().copied().map(Some)) {
            let around = target.bytes(SKEWS + len + behind.1, 0);
            around.fill(UNTOUCHED);
            let (in_front, rest) = around.split_at_mut(SKEWS);
            let (to, beyond) = rest.split_at_mut(len);
            let (fed, needed, vector) = match way {
                None => {
                    let fed = memory.read_and_feed(there.as_ptr() as u64, to, register);
                    (fed.ok(), len, 0)
                }
                Some((routine, vector)) => {
                    let needed = len / (4 * vector) * (4 * vector);
                    let fed =
                        copy_by((routine, vector), there.as_ptr(), &mut to[..needed], register);
                    (fed, needed, vector)
                }
            };
            let what = format!("{len} bytes, {missing} of them missing, vectors of {vector}");
            assert_eq!(fed.is_some(), needed <= there.len(), "{what}");
            if let Some(fed) = fed {
                assert_eq!(to[..needed], there[..needed], "{what}");
                assert_eq!(feed_all(fed, &there[needed..]), expected, "{what}");
            }
            let mut others = in_front.iter().chain(&to[needed..]).chain(&*beyond);
            assert!(others.all(|byte| *byte == UNTOUCHED), "{what}");
        }
        register = expected;
    }
}

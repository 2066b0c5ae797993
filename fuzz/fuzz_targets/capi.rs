//! A sequence of calls of the C ABI, as the input chooses them, on the instrumented shared object: see
//! `crates/capi/tests/c/sequence.c`.
#![no_main]

unsafe extern "C" {
    fn fuzz_sequence(bytes: *const u8, length: usize) -> i32;
}

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    // SAFETY: it reads that many bytes.
    unsafe { fuzz_sequence(input.as_ptr(), input.len()) };
});

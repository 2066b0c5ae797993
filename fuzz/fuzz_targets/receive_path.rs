#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| anyverbs_fuzz::receive_path::run(input));

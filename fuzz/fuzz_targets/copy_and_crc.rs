#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| anyverbs_fuzz::copy_and_crc::run(input));

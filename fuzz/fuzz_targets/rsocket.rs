#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| anyverbs_rsocket::fuzzed::run(input));

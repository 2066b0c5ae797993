#![no_main]

libfuzzer_sys::fuzz_target!(|datagram: &[u8]| anyverbs_fuzz::packet::run(datagram));

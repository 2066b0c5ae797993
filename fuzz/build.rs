//! The body of the target `capi` is a C program, that of the tests of the C ABI.

fn main() {
    let source = "../crates/capi/tests/c/sequence.c";
    // The directory: its headers are a part of it.
    println!("cargo:rerun-if-changed=../crates/capi/tests/c");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    cc::Build::new()
        .file(source)
        .define("FUZZ", None)
        .define("_GNU_SOURCE", None)
        .flag("-pthread")
        .opt_level(1)
        .debug(true)
        .warnings(false)
        .cargo_metadata(false)
        .compile("sequence");
    // It has more calls than Debian's, which is linked if no other is given.
    println!("cargo:rerun-if-env-changed=ANYVERBS_LIB");
    if let Ok(lib) = std::env::var("ANYVERBS_LIB") {
        println!("cargo:rustc-link-arg-bin=capi=-L{lib}");
    }
    // The library that the loader finds, instrumented, takes its counters' callbacks from the program.
    for argument in [&format!("{out}/libsequence.a"), "-libverbs", "-rdynamic"] {
        println!("cargo:rustc-link-arg-bin=capi={argument}");
    }
}

//! Tells the commands for which machine they are built.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-env=XTASK_TARGET={}", std::env::var("TARGET").expect("cargo sets it"));
}

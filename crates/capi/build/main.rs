//! Generates everything that must agree with the tables in `abi/`: the linker's version script, one trampoline per
//! exported (symbol, version), the table of exports, and the compile-time checks of every C layout.

mod layouts;
mod symbols;

use std::{env, fs, path::Path};

fn main() {
    let out = env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    let out = Path::new(&out);
    let abi = Path::new(env!("CARGO_MANIFEST_DIR")).join("abi");
    println!("cargo:rerun-if-changed=abi");
    println!("cargo:rerun-if-changed=build");

    let exports = symbols::read(&abi);
    let map = out.join("libibverbs.map");
    write(&map, &symbols::version_script(&exports));
    write(&out.join("trampolines.rs"), &symbols::trampolines(&exports));
    write(&out.join("export_table.rs"), &symbols::table(&exports));

    let newest = read(&abi.join("layouts.65.txt"));
    write(&out.join("layout_asserts.rs"), &layouts::asserts(&newest));

    // Only the shared object has versions; a test binary has none, and the linker would refuse them there.
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={}", map.display());
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libibverbs.so.1");
    // The device's threads run code of this object: it must never be unmapped.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,nodelete");
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn write(path: &Path, text: &str) {
    fs::write(path, text).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
}

//! Programs that bring a libibverbs of their own, under a name of its own, as Python packages do.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyverbs_testing::UdpPort;

/// A library that has no device, with the version nodes of the real one.
const COPY: &str = "
#include <stddef.h>
#include <stdlib.h>
void **ibv_get_device_list(int *n) { *n = 0; return calloc(1, sizeof(void *)); }
const char *ibv_get_device_name(void *device) { (void)device; return NULL; }
";
const VERSIONS: &str = "IBVERBS_1.1 { global: ibv_*; local: *; };\n";
const PROGRAM: &str = "
#include <stdio.h>
void **ibv_get_device_list(int *n);
const char *ibv_get_device_name(void *device);
int main(void)
{
	int n;
	void **list = ibv_get_device_list(&n);
	puts(n ? ibv_get_device_name(list[0]) : \"no device\");
	return 0;
}
";
/// A name as auditwheel changes it.
const NAME: &str = "libibverbs-1de1263b.so.1.14.48.0";

/// The libraries as they are shipped: cargo does not build those of other packages for a test.
fn libraries(directory: &Path) {
    let tests = env::current_exe().unwrap();
    // <target>/<profile>/deps/<test>
    let target = tests.ancestors().nth(3).unwrap();
    let mut build = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    build.args(["build", "--quiet", "--manifest-path"]);
    build.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"));
    build.args(["-p", "anyverbs-capi", "-p", "anyverbs-view", "-p", "anyverbs-rspreload"]);
    assert!(build.arg("--target-dir").arg(target).status().unwrap().success());
    fs::create_dir_all(directory).unwrap();
    let built = target.join("debug");
    for name in ["libibverbs", "librdmacm"] {
        for end in [".so.1", ".so"] {
            symlink(built.join("libanyverbs_capi.so"), directory.join(format!("{name}{end}")))
                .unwrap();
        }
    }
    for name in ["libmlx5.so.1", "libmlx4.so.1", "libefa.so.1"] {
        symlink(built.join("libanyverbs_capi.so"), directory.join(name)).unwrap();
    }
    for name in ["libanyverbs_view.so", "librspreload.so"] {
        symlink(built.join(name), directory.join(name)).unwrap();
    }
}

struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn a_program_with_its_own_libibverbs_sees_the_device() {
    let scratch = Scratch(env::temp_dir().join(format!("anyverbs-preload-{}", std::process::id())));
    let (package, lib) = (scratch.0.join("package"), scratch.0.join("lib"));
    fs::create_dir_all(&package).unwrap();
    libraries(&lib);
    for (name, text) in [("copy.c", COPY), ("versions", VERSIONS), ("program.c", PROGRAM)] {
        fs::write(package.join(name), text).unwrap();
    }
    let cc = |arguments: &[&str]| {
        let status = Command::new("cc").args(arguments).current_dir(&package).status();
        assert!(status.unwrap().success(), "{arguments:?}");
    };
    let soname = format!("-Wl,-soname,{NAME}");
    cc(&["-shared", "-fPIC", "-o", NAME, "copy.c", &soname, "-Wl,--version-script=versions"]);
    cc(&["-o", "program", "program.c", NAME, "-Wl,--enable-new-dtags,-rpath,$ORIGIN"]);
    let program = package.join("program");
    let port = UdpPort::reserve();
    let anyverbs = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
        command.args(arguments).arg(&program).env("ANYVERBS_LIB_DIR", &lib);
        command.env("ANYVERBS_UDP_PORT", port.number().to_string());
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-preload-{}", port.number()));
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        let output = command.output().unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(anyverbs(&["run", "--"]), "anyverbs0\n");
    assert_eq!(anyverbs(&["run", "--no-preload", "--"]), "no device\n");
    let said = anyverbs(&["doctor"]);
    let line = said.lines().find(|line| line.contains(&format!("asks for {NAME}")));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("by RUNPATH"), "{line}");
    assert!(line.contains(package.canonicalize().unwrap().join(NAME).to_str().unwrap()), "{line}");
}

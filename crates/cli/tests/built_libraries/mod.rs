//! A library directory for launchers under test, whose programs use the libraries.

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The libraries as they are shipped: cargo does not build those of other packages for a test.
pub(crate) fn link(directory: &Path) {
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

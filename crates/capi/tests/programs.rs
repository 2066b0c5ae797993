//! C programs, compiled against the system's headers and run on the shared object: what each checks stands in it.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// The shared object under the names of the libraries that it stands for. Cargo does not build a cdylib for the tests of its package,
/// and would build it with another panic strategy, on which the cancellation of threads depends.
fn libraries() -> &'static Path {
    static LIBRARIES: OnceLock<PathBuf> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let tests = env::current_exe().unwrap();
        // <target>/<profile>/deps/<test>
        let target = tests.ancestors().nth(3).unwrap();
        let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "--manifest-path"])
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
            .arg("--target-dir")
            .arg(target)
            .status()
            .unwrap();
        assert!(status.success());
        let directory = target.join("debug/capi-programs");
        fs::create_dir_all(&directory).unwrap();
        for name in ["libibverbs.so.1", "libibverbs.so", "librdmacm.so.1", "librdmacm.so"] {
            // Another process of this test may make it first.
            let _ = symlink("../libanyverbs_capi.so", directory.join(name));
        }
        directory
    })
}

/// A port for each program of this process, whose tests may run at the same time.
fn port(name: &str) -> u32 {
    let index = PROGRAMS.iter().position(|n| *n == name).unwrap();
    20_000 + std::process::id() % 512 * 20 + u32::try_from(index).unwrap()
}

/// Compiles and runs one program, on a device that no other program shares.
fn run(name: &str) {
    let libraries = libraries();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name);
    let program = libraries.join(format!("{name}.{}", std::process::id()));
    let built = Command::new("cc")
        .args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-function",
            "-Wno-missing-field-initializers",
            "-D_GNU_SOURCE",
            "-O1",
            "-pthread",
            "-o",
        ])
        .arg(&program)
        .arg(source.with_extension("c"))
        .arg("-L")
        .arg(libraries)
        .args(["-lrdmacm", "-libverbs", "-ldl"])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    let output = Command::new("timeout")
        .arg("120")
        .arg(&program)
        .env("LD_LIBRARY_PATH", libraries)
        .env("ANYVERBS_REGISTRY", format!("anyverbs-{name}-{}", std::process::id()))
        .env("ANYVERBS_UDP_PORT", port(name).to_string())
        .output()
        .unwrap();
    let _ = fs::remove_file(&program);
    assert!(
        output.status.success(),
        "{name}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

macro_rules! programs {
    ($($name:ident)*) => {
        const PROGRAMS: &[&str] = &[$(stringify!($name)),*];
        $(
        #[test]
        fn $name() {
            run(stringify!($name));
        }
        )*
    };
}

programs! {
    busy cancel create_qp destroy_qp exit_log handles mcast raw_packet wq xrc
    cm_addrinfo cm_connect cm_datagrams cm_handles cm_race cm_sync cm_threads cm_xrc rsocket
}

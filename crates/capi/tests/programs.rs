//! C programs, compiled against the system's headers and run on the shared object. Each program says in its source what
//! it checks.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::env;
use std::fs;
use std::fs::Permissions;
use std::net::Ipv4Addr;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use anyverbs_testing::UdpPort;

#[path = "programs/both_ends.rs"]
mod both_ends;
#[path = "programs/checker.rs"]
mod checker;
#[path = "programs/explained.rs"]
mod explained;
#[path = "programs/told.rs"]
mod told;

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
            // Another process of this test may have made it.
            let _ = symlink("../libanyverbs_capi.so", directory.join(name));
        }
        directory
    })
}

/// The configuration of a device in two partitions, for programs that use it so: at the loopback address, or of two hosts at that of the
/// cable between them.
fn partitions(command: &mut Command, on_two_hosts: bool) {
    let file = if on_two_hosts { "partitions_of_cable.toml" } else { "partitions.toml" };
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(file);
    command.env("ANYVERBS_CONFIG", file).env("ANYVERBS_INTERFACES", "");
}

/// Compiles and runs one program, on a device that no other program shares.
fn run(name: &str) {
    run_below(name, &[], &[], &[]);
}

/// Compiles one program.
fn compile(name: &str, program: &Path, options: &[&str]) {
    compile_by("cc", name, program, options);
}

fn compile_by(compiler: &str, name: &str, program: &Path, options: &[&str]) {
    let built = Command::new(compiler)
        .args([
            "-Wall",
            "-Wextra",
            "-Werror",
            "-Wno-unused-function",
            "-Wno-missing-field-initializers",
            "-D_GNU_SOURCE",
            "-O1",
            "-g",
            "-pthread",
            "-o",
        ])
        .arg(program)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name).with_extension("c"))
        .args(options)
        .arg("-L")
        .arg(libraries())
        .args(["-lrdmacm", "-libverbs", "-ldl"])
        .output()
        .unwrap();
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
}

/// As [`run`], with a configuration.
fn run_with(name: &str, configuration: &[(&str, &str)]) {
    run_below(name, &[], &[], configuration);
}

/// Runs it below another program, with arguments. Returns its output.
fn run_below(
    name: &str,
    below: &[&str],
    arguments: &[&str],
    configuration: &[(&str, &str)],
) -> String {
    let libraries = libraries();
    let port = UdpPort::reserve();
    let number = port.number();
    let program = libraries.join(format!("{name}.{number}"));
    compile(name, &program, &[]);
    let output = Command::new("timeout")
        .arg("120")
        .args(below)
        .arg(&program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", libraries)
        .env("ANYVERBS_REGISTRY", format!("anyverbs-{name}-{number}"))
        .env("ANYVERBS_UDP_PORT", number.to_string())
        .envs(configuration.iter().copied())
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
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The sanitizers with which programs are built, and compilers that have them.
const SANITIZERS: [(&str, &str); 3] = [("memory", "clang"), ("thread", "cc"), ("address", "cc")];

/// Runs a program that is built with a sanitizer: whether it succeeds, and what it says.
fn run_sanitized(sanitizer: (&str, &str), name: &str, arguments: &[&str]) -> (bool, String) {
    let (status, said) = run_sanitized_with(sanitizer, name, arguments, &[]);
    (status == Some(0), said)
}

/// As [`run_sanitized`], with a configuration: its status, and what it says.
fn run_sanitized_with(
    sanitizer: (&str, &str),
    name: &str,
    arguments: &[&str],
    configuration: &[(&str, &str)],
) -> (Option<i32>, String) {
    let libraries = libraries();
    let port = UdpPort::reserve();
    let number = port.number();
    let (kind, compiler) = sanitizer;
    let program = libraries.join(format!("{name}-{kind}.{number}"));
    let options = ["-fno-omit-frame-pointer", "-Wno-unknown-warning-option"];
    compile_by(
        compiler,
        name,
        &program,
        &[&options[..], &[&format!("-fsanitize={kind}")]].concat(),
    );
    // The shadow memory of older sanitizers does not fit into an address space with many random bits.
    let output = Command::new("timeout")
        .args(["120", "setarch", "-R"])
        .arg(&program)
        .args(arguments)
        .env("LD_LIBRARY_PATH", libraries)
        .env("ANYVERBS_REGISTRY", format!("anyverbs-{name}-{number}"))
        .env("ANYVERBS_UDP_PORT", number.to_string())
        .envs(configuration.iter().copied())
        .output()
        .unwrap();
    let _ = fs::remove_file(&program);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn sanitizers_see_no_mistake_in_programs_that_make_none() {
    for sanitizer in SANITIZERS {
        let (is_good, said) = run_sanitized(sanitizer, "sanitized", &["right"]);
        assert!(is_good, "{sanitizer:?}: {said}");
        // Larger ones. Of those that end objects twice or fork, neither sanitizer takes all.
        for name in [
            "cq_ex",
            "events",
            "cm_connect",
            "cm_datagrams",
            "cm_addrinfo",
            "rsocket",
            "memory",
            "mcast",
        ] {
            let (is_good, said) = run_sanitized(sanitizer, name, &[]);
            assert!(is_good, "{name} {sanitizer:?}: {said}");
        }
    }
}

/// The checker names the places of leaks when the program ends. The sanitizer sees that work, too.
#[test]
fn sanitizers_see_no_mistake_in_the_reports_of_the_checker() {
    for sanitizer in SANITIZERS {
        let check = [("ANYVERBS_CHECK", "1")];
        let (status, said) = run_sanitized_with(sanitizer, "sanitized", &["objects"], &check);
        assert_eq!(status, Some(66), "{sanitizer:?}: {said}");
        assert!(said.contains("sanitized.c:") && !said.contains("Sanitizer"), "{said}");
        let leaks = said.matches("anyverbs check: leak").count();
        assert_eq!(leaks, 4, "{sanitizer:?}: {said}");
    }
}

#[test]
fn sanitizers_see_the_mistakes_of_programs() {
    for (sanitizer, mistake, found) in [
        (SANITIZERS[0], "undefined", "use-of-uninitialized-value"),
        (SANITIZERS[1], "race", "data race"),
        (SANITIZERS[2], "leak", "detected memory leaks"),
    ] {
        let (is_good, said) = run_sanitized(sanitizer, "sanitized", &[mistake]);
        assert!(!is_good && said.contains(found), "{sanitizer:?}: {said}");
    }
}

#[test]
fn sequences_of_other_seeds() {
    for seed in ["2", "3", "4"] {
        run_below("sequence", &[], &["200000", seed], &[]);
    }
}

#[test]
fn sequences_of_eight_threads_at_once() {
    run_below("sequence", &[], &["40000", "7", "8"], &[]);
}

/// Needs Debian's valgrind. Memory that the process keeps until its end is no leak.
#[test]
fn a_sequence_touches_nothing_foreign_and_leaks_nothing() {
    let valgrind = [
        "valgrind",
        "--quiet",
        "--error-exitcode=9",
        "--leak-check=full",
        "--show-leak-kinds=definite",
        "--errors-for-leak-kinds=definite",
    ];
    run_below("sequence", &valgrind, &["4000", "5"], &[]);
}

#[test]
fn sequences_that_the_fuzzer_found() {
    let dir = env::temp_dir().join(format!("anyverbs-sequences-{}", std::process::id()));
    fs::create_dir_all(&dir).unwrap();
    let mut files = Vec::new();
    for (name, input) in anyverbs_testing::corpus::inputs("capi").unwrap() {
        let file = dir.join(name);
        fs::write(&file, input).unwrap();
        files.push(file.to_str().unwrap().to_owned());
    }
    let files: Vec<_> = files.iter().map(String::as_str).collect();
    run_below("sequence_replay", &[], &files, &[]);
    fs::remove_dir_all(dir).unwrap();
}

/// The whole load takes minutes, and gigabytes: `cargo xtask test --full`.
fn load(what: &str, part: [&str; 2], whole: [&str; 2]) {
    let is_full = env::var_os("ANYVERBS_FULL").is_some();
    let [a, b] = if is_full { whole } else { part };
    println!("{}", run_below("load", &[], &[what, a, b], &[]));
}

#[test]
fn load_of_queue_pairs_and_regions() {
    load("objects", ["2000", "20000"], ["10000", "100000"]);
}

#[test]
fn load_of_processes_that_all_talk() {
    load("processes", ["12", "200"], ["64", "200"]);
}

#[test]
fn load_of_eight_threads_on_one_queue() {
    load("threads", ["8", "20000"], ["8", "1000000"]);
}

#[test]
fn load_to_the_limits() {
    load("limits", ["", ""], ["", ""]);
}

macro_rules! programs {
    ($($name:ident)*) => {
        $(
        #[test]
        fn $name() {
            run(stringify!($name));
        }
        )*
    };
}

programs! {
    ah bad_input blamed_faults busy cancel cancel_rsocket cancel_setup comp_cntr cq_ex create_qp destroy_qp ends_at_once event_wait events exit_log flow_action handles idle_faults import
    import_shared listing mcast memory
    mismatches mw parent_domain ports rate_limit raw_packet scarce seed_examples sequence tag_matching xrc xrc_shared
    cm_addrinfo cm_connect cm_datagrams cm_handles cm_race cm_sync cm_threads cm_xrc rsocket
}

/// One device at 127.0.0.1, so that its GID table is known.
#[test]
fn personas_show_and_refuse_what_their_hardware_does() {
    for persona in ["mlx5", "irdma", "rxe", "mana"] {
        let configuration = [("ANYVERBS_PERSONA", persona), ("ANYVERBS_DEVICES", "1")];
        run_below("persona", &[], &[persona], &configuration);
    }
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/uc_alone.toml");
    let configuration = [("ANYVERBS_PERSONA", file.to_str().unwrap()), ("ANYVERBS_DEVICES", "1")];
    run_below("persona", &[], &["uc"], &configuration);
}

#[test]
fn each_device_has_its_pkeys() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/pkeys.toml");
    let config = [("ANYVERBS_CONFIG", file.to_str().unwrap()), ("ANYVERBS_INTERFACES", "")];
    run_with("pkeys", &config);
}

#[test]
fn each_device_has_limits_an_mtu_and_a_guid() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/rack.toml");
    let config = [("ANYVERBS_CONFIG", file.to_str().unwrap()), ("ANYVERBS_INTERFACES", "")];
    let said = run_below("rack", &WITH_LOG, &[], &config);
    for refused in [
        "ibv_create_cq: cqe is 65, and the limit is 64 (max_cqe of device rail0)",
        "ibv_resize_cq: cqe is 65, and the limit is 64 (max_cqe of device rail0)",
        "ibv_resize_cq: cqe is 66, and the limit is 65 (max_cqe of device rail1)",
        "ibv_modify_srq: max_wr of an SRQ is 10, and the limit is 9 (max_srq_wr of device rail0)",
        "ibv_create_qp: max_send_wr is 9, and the limit is 8 (max_qp_wr of device rail0)",
        "ibv_create_qp: max_send_sge is 5, and the limit is 4 (max_sge of device rail1)",
        "ibv_alloc_pd: device rail0 holds no more protection domains (max_pd = 2)",
        "ibv_create_qp: device rail0 holds no more queue pairs (max_qp = 2)",
        "ibv_create_qp: device rail1 holds no more queue pairs (max_qp = 3)",
        "device rail0 holds no more memory regions (max_mr = 4)",
        "ibv_create_srq: device rail0 holds no more shared receive queues (max_srq = 1)",
        "device rail0 holds no more multicast groups (max_mcast_grp = 1)",
        "device rail0 holds no more queue pairs in this multicast group (max_mcast_qp_attach = 1)",
        "(path_mtu of 2048 bytes, more than mtu = 1024 of port 1 of device rail0 in the configuration file)",
    ] {
        assert_eq!(said.matches(refused).count(), 1, "{refused}: {said}");
    }
    // By ibv_post_send and by ibv_wr_complete.
    let of_read = ": a READ has 3 elements, and the limit is 2 (max_sge_rd of device rail0); see";
    assert_eq!(said.matches(of_read).count(), 2, "{said}");
}

/// Puts the log into the output.
const WITH_LOG: [&str; 4] = ["sh", "-c", "exec \"$@\" 2>&1", "sh"];

#[test]
fn a_refusal_says_whose_limit_is_reached() {
    let file = env::temp_dir().join(format!("anyverbs-fills-{}.toml", std::process::id()));
    let path = file.to_str().unwrap();
    let of_process = "refused: ibv_create_qp: the process holds no more queue pairs";
    let own = "devices = [{ limits = { max_qp = 2 } }, {}]";
    for (text, variable, first, second) in [
        // The process's own limit counts the queue pairs of all devices.
        (own, "5", "device anyverbs0 holds no more queue pairs (max_qp = 2)", "made 3"),
        (
            "devices = 2",
            "3",
            "the process holds no more queue pairs (ANYVERBS_MAX_QP = 3)",
            "made 0",
        ),
        ("", "4", "the process holds no more queue pairs (ANYVERBS_MAX_QP = 4)", "made 4"),
        ("max_qp = 1", "", "fills", "made 1"),
    ] {
        fs::write(&file, text).unwrap();
        let config = [("ANYVERBS_CONFIG", path), ("ANYVERBS_MAX_QP", variable)];
        let said = run_below("fills", &WITH_LOG, &[], &config);
        assert_eq!(said.matches(first).count(), 1, "{text}, {variable}: {said}");
        assert!(said.contains(second), "{text}, {variable}: {said}");
        if text == own {
            let all = format!("{of_process} (ANYVERBS_MAX_QP = 5)");
            assert_eq!(said.matches(&all).count(), 1, "{said}");
        }
        if variable.is_empty() {
            let key = format!("{of_process} (configuration file {path:?}: max_qp = 1)");
            assert!(said.contains(&key), "{said}");
        }
    }
    fs::remove_file(file).unwrap();
}

#[test]
fn a_device_has_two_ports() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c/two_ports.toml");
    let config = [("ANYVERBS_CONFIG", file.to_str().unwrap()), ("ANYVERBS_INTERFACES", "")];
    run_with("two_ports", &config);
}

/// Messages that otherwise arrive in one piece come in packets, and later.
#[test]
fn tag_matching_by_udp() {
    run_with("tag_matching", &[("ANYVERBS_INPROC", "0")]);
}

/// Packets for a target arrive at its process, and requests are sent again while the responder moves.
#[test]
fn xrc_shared_by_udp() {
    run_with("xrc_shared", &[("ANYVERBS_SHM", "0")]);
}

/// The failures that `faults.c` expects.
const CALLS_FAIL: &str = "ibv_reg_mr 2 fails with ENOMEM; ibv_create_comp_channel 1 fails with EMFILE\n\
    ibv_query_device 1 fails with EDQUOT; ibv_query_gid 1 to 2 fails with 4095; ibv_resize_cq 1 fails with ENOSYS\n\
    ibv_alloc_mw 1 fails with EPROTO; ibv_open_xrcd 1 fails with EIO; rdma_get_cm_event 1 fails with ENOTCONN\n\
    ibv_dereg_mr 1 fails with EBUSY; ibv_destroy_qp 1 fails with 3; ibv_destroy_cq 1 fails with EBUSY\n\
    ibv_destroy_srq 1 fails with EBUSY; rdma_disconnect 1 fails with 18; ibv_query_port 1 fails with EIO; ibv_post_send 1 fails with EAGAIN; ibv_post_recv 2 fails with ENOMEM";

#[test]
fn calls_fail_by_script() {
    // The checker's posting calls are below those of the script.
    run_with("faults", &[("ANYVERBS_FAULTS", CALLS_FAIL)]);
    run_with("faults", &[("ANYVERBS_FAULTS", CALLS_FAIL), ("ANYVERBS_CHECK", "1")]);
}

/// Devices at 127.0.0.1 and 127.0.0.2. A call that the library makes itself counts as well.
#[test]
fn a_request_that_the_program_never_saw_is_refused_for_want_of_resources() {
    let devices = [("ANYVERBS_DEVICES", "2"), ("ANYVERBS_INTERFACES", "")];
    let rule = ("ANYVERBS_FAULTS", "ibv_alloc_pd 2 fails with EPERM");
    run_with("cm_refused", &[&devices[..], &[rule]].concat());
}

/// The failures that `call_sites.c` expects.
const SITES_FAIL: &str = "ibv_reg_mr 1 from setup fails with EFAULT; ibv_reg_mr 2 from begin fails with ENOMEM\n\
    ibv_reg_mr from libc.so.6+0x1 fails with EIO\n\
    ibv_post_send 1 from send_one fails with EAGAIN; ibv_create_comp_channel from object call_sites fails with EMFILE";

#[test]
fn calls_fail_from_their_sites_alone() {
    // The name by which it is started is that of its object.
    let named = ["bash", "-c", "exec -a call_sites \"$0\""];
    run_below("call_sites", &named, &[], &[("ANYVERBS_FAULTS", SITES_FAIL)]);
}

#[test]
fn events_of_a_port_come_by_script() {
    // The program listens by then, on a busy machine too.
    let events = "event LID_CHANGE after 1s; event PKEY_CHANGE after 1001ms; event SM_CHANGE after 1002ms\n\
        event CLIENT_REREGISTER after 1003ms; event GID_CHANGE after 1004ms";
    run_with("port_events", &[("ANYVERBS_FAULTS", events)]);
}

#[test]
fn a_device_that_failed_answers_commands_no_more() {
    // The program has made its objects by then, on a busy machine too.
    run_with("dead_device", &[("ANYVERBS_FAULTS", "fatal after 3s")]);
}

#[test]
fn an_address_and_a_device_are_taken_away_by_script() {
    // The program has opened the device by then, on a busy machine too.
    let script =
        "on device anyverbs0: gid 0 removed for 1s after 3s; on device anyverbs0: removed after 5s";
    run_with("taken_away", &[("ANYVERBS_FAULTS", script), ("ANYVERBS_DEVICES", "2")]);
}

#[test]
fn the_connection_manager_leaves_lost_devices_out() {
    // The program has opened the devices by then, on a busy machine too.
    let script = "on device anyverbs0: fatal after 3s; on device anyverbs1: removed after 3s";
    let configuration = [("ANYVERBS_FAULTS", script), ("ANYVERBS_DEVICES", "4")];
    for begins in ["before", "after"] {
        run_below("lost_devices", &[], &[begins], &configuration);
    }
}

#[test]
fn memory_vanishes_by_script() {
    let script = "page 3 of region 1 vanishes";
    run_with("vanished", &[("ANYVERBS_FAULTS", script)]);
    run_with("vanished", &[("ANYVERBS_FAULTS", script), ("ANYVERBS_INPROC", "0")]);
}

#[test]
fn calls_kill_or_stop_the_process_by_script() {
    let killed = ["sh", "-c", "\"$0\"; test $? = 137"];
    let script = format!("{CALLS_FAIL}; ibv_post_send 2 kills the process");
    run_below("faults", &killed, &[], &[("ANYVERBS_FAULTS", &script)]);
    let begin = std::time::Instant::now();
    let script = format!("{CALLS_FAIL}; ibv_alloc_pd 1 pauses the process for 1s");
    run_with("faults", &[("ANYVERBS_FAULTS", &script)]);
    assert!(begin.elapsed() >= std::time::Duration::from_secs(1), "{:?}", begin.elapsed());
}

#[test]
fn comp_cntr_by_udp() {
    run_with("comp_cntr", &[("ANYVERBS_INPROC", "0")]);
}

#[test]
fn rate_limit_by_udp() {
    run_with("rate_limit", &[("ANYVERBS_INPROC", "0")]);
}

/// As a system-wide library in a program with the set-user-ID bit, or with file capabilities, that another user starts.
#[test]
fn a_privileged_program_obeys_no_variable() {
    if !anyverbs_testing::root_or_skip() {
        return;
    }
    let directory = env::temp_dir().join(format!("anyverbs-privileged-{}", std::process::id()));
    fs::create_dir_all(&directory).unwrap();
    let library = libraries().join("libibverbs.so.1").canonicalize().unwrap();
    for name in ["libibverbs.so.1", "librdmacm.so.1"] {
        fs::copy(&library, directory.join(name)).unwrap();
    }
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(&directory, 0o755);
    let (precious, secret) = (directory.join("precious"), directory.join("secret"));
    fs::write(&precious, "precious").unwrap();
    fs::write(&secret, "password = swordfish").unwrap();
    mode(&precious, 0o600);
    mode(&secret, 0o600);
    let program = directory.join("program");
    compile("privileged", &program, &[&format!("-Wl,-rpath,{}", directory.display())]);
    let run = |variable: &str, value: &Path| {
        let alone = "ip link set lo up; exec setpriv --reuid 65534 --regid 65534 --clear-groups $0";
        let mut command = Command::new("unshare");
        command.args(["-n", "sh", "-c", alone]).arg(&program).env(variable, value);
        let output = command.output().unwrap();
        let said = [output.stdout, output.stderr].concat();
        String::from_utf8(said).unwrap()
    };
    let check = |what: &str| {
        for variable in ["ANYVERBS_CAPTURE", "ANYVERBS_TRACE"] {
            let said = run(variable, &precious);
            assert!(said.contains("secure 1, anyverbs0, open"), "{what}: {said}");
            assert_eq!(fs::read_to_string(&precious).unwrap(), "precious", "{what}: {variable}");
        }
        for variable in ["ANYVERBS_CONFIG", "ANYVERBS_LOG", "ANYVERBS_DEVICE"] {
            let said = run(variable, &secret);
            assert_eq!(said.trim(), "secure 1, anyverbs0, open", "{what}: {variable}");
        }
    };
    mode(&program, 0o4755);
    check("set-user-ID");
    mode(&program, 0o755);
    let capable = Command::new("setcap").arg("cap_dac_override+ep").arg(&program).status().unwrap();
    assert!(capable.success());
    check("file capabilities");
    // The same program without them does obey.
    assert!(Command::new("setcap").arg("-r").arg(&program).status().unwrap().success());
    let said = run("ANYVERBS_DEVICE", Path::new("other0"));
    assert_eq!(said.trim(), "secure 0, other0, open");
    fs::remove_dir_all(directory).unwrap();
}

#[test]
fn repeated_errors_are_logged_a_few_times() {
    let said = run_below("again", &["sh", "-c", "exec \"$@\" 2>&1", "sh"], &[], &[]);
    let count = |text: &str| said.lines().filter(|line| line.contains(text)).count();
    for text in ["CQ 1 (16 entries) is not destroyed", "protection domain 1 is not destroyed"] {
        assert_eq!(count(text), 4, "{text}: {said}");
    }
    assert_eq!(count("the address handle was destroyed"), 1, "{said}");
    assert_eq!(count("allocator is not aligned"), 4, "{said}");
    assert_eq!(count("(1000 times)"), 3, "{said}");
}

/// Each line names the value, and the limit or the rule. What programs try out is said at the level `debug` alone.
#[test]
fn refused_calls_say_once_why() {
    // Its only route is that of the loopback.
    let alone = "ip link set lo up; exec \"$@\" 2>&1";
    let said = run_below("refused", &["unshare", "-n", "sh", "-c", alone, "sh"], &[], &[]);
    for (text, cause) in [
        ("with access 0x2: remote write and atomic access need local write access", "AV8014"),
        ("4096 bytes at 0xffffffffffffffc0: the range wraps around", "AV8004"),
        ("ibv_reg_mr: access is 0x8000, and 0x8000 is no access flag", "AV8004"),
        ("ibv_alloc_pd: the pointer to a context is NULL", "EINVAL"),
        ("qp_type is 99, which is no type of a queue pair", "AV8004"),
        ("send_cq is NULL", "AV8004"),
        ("cqe is 0, and it must be between 1 and", "AV8004"),
        ("comp_vector is 7777, and it must be between 0 and", "AV8004"),
        (
            "ibv_resize_cq: cqe is 1073741824, and the limit is 1048576 (max_cqe of device ",
            "AV8005",
        ),
        ("cqe is -1, and it must be between 1 and", "AV8004"),
        ("comp_vector is -3, and it must be between 0 and", "AV8004"),
        ("cannot reach the peer at 10.9.8.7: Network is unreachable", "AV8006"),
        ("cannot reach the peer at fd00::1: the two addresses are of different families", "AV8006"),
        ("cannot reach the peer at 255.255.255.255: the peer's address is that of", "AV8006"),
        ("srq_attr_mask is 0x14, and no attribute has the bits 0x14", "AV8004"),
        ("the queue pair is in RESET, and the call needs RTS", "AV8013"),
        ("the queue pair is in INIT, and the call needs RTS", "AV8013"),
        ("IBV_QP_PATH_MIG_STATE", "EOPNOTSUPP"),
        ("port_num is 9, and it must be between 1 and 1", "AV8004"),
        ("GID index 77 of port 1 holds no address, and the last that does is", "AV8004"),
        ("attr_mask is 0x10000001, and no attribute has the bits 0x10000000", "AV8004"),
        ("attr_mask is 0x7fffffff, and no attribute has the bits", "AV8004"),
        ("qp_access_flags is 0x40000000, which is no value of it", "AV8004"),
        (": num_sge is 5, and the limit is 2", "AV8013"),
        (": num_sge is -1, and the limit is 2", "AV8013"),
        (": num_sge is 40, and the limit is 2", "AV8013"),
        (": opcode is 77, which is no operation", "AV8013"),
        (": send_flags is 0x100000, and 0x100000 is no flag", "AV8013"),
        (": the inline data has 4096 bytes, and the limit is 64", "AV8013"),
        ("ibv_create_qp: max_inline_data is 1073741824, and the limit is ", "AV8005"),
        (": the queue is full: it holds 8 receives", "ENOMEM"),
        (" (4 requests): the queue is full: it holds 4 receives", "ENOMEM"),
        ("dest_qp_num is 0x1000000, and a queue pair number has 24 bits", "AV8004"),
        ("is not allowed (max_dest_rd_atomic is 200, and the limit is ", "AV8004"),
    ] {
        let lines: Vec<_> = said.lines().filter(|line| line.contains(text)).collect();
        let is_one = lines.len() == 1 && lines[0].contains("ERROR") && lines[0].contains(cause);
        assert!(is_one, "{text}: {lines:?}\n{said}");
    }
    let at_rtr = "(sgid_index 0) cannot reach the peer at fd00::2: the two addresses are of different families; see `anyverbs explain AV8006`";
    assert_eq!(said.matches(at_rtr).count(), 1, "{said}");
    let later = "no route leads to the peer: the two addresses are of different families; see `anyverbs explain AV1202`";
    assert_eq!(said.matches(later).count(), 1, "{said}");
    assert_eq!(said.matches("refused: ").count(), 34, "{said}");
}

/// Exported calls that refuse no zeros: they return nothing, answer, or are tried out. All others must say why.
const REFUSE_NO_ZEROS: &[&str] = &[
    "ibv_ack_async_event",
    "ibv_ack_cq_events",
    "ibv_copy_ah_attr_from_kern",
    "ibv_copy_path_rec_from_kern",
    "ibv_copy_path_rec_to_kern",
    "ibv_copy_qp_attr_from_kern",
    "ibv_dofork_range",
    "ibv_dontfork_range",
    "ibv_event_type_str",
    "ibv_fork_init",
    "ibv_free_buf",
    "ibv_free_device_list",
    "ibv_get_device_guid",
    "ibv_get_device_index",
    "ibv_get_device_list",
    "ibv_get_sysfs_path",
    "ibv_is_fork_initialized",
    "ibv_node_type_str",
    "ibv_port_state_str",
    "ibv_query_qp_data_in_order",
    "ibv_rate_to_mbps",
    "ibv_rate_to_mult",
    "ibv_read_ibdev_sysfs_file",
    "ibv_read_sysfs_file",
    "ibv_register_driver",
    "ibv_unimport_dm",
    "ibv_unimport_mr",
    "ibv_unimport_pd",
    "ibv_wc_status_str",
    "ibv_wr_opcode_str",
    "rdma_create_event_channel",
    "rdma_destroy_ep",
    "rdma_destroy_event_channel",
    "rdma_destroy_qp",
    "rdma_destroy_srq",
    "rdma_event_str",
    "rdma_free_devices",
    "rdma_freeaddrinfo",
    "rdma_get_devices",
    "rdma_get_dst_port",
    "rdma_get_src_port",
];

/// The verbs and the calls of librdmacm, by the lists of their symbols.
fn exported_calls() -> Vec<String> {
    let lists = Path::new(env!("CARGO_MANIFEST_DIR")).join("abi");
    let read = |name| fs::read_to_string(lists.join(name)).unwrap();
    let all = [read("libibverbs.symbols"), read("librdmacm.symbols")].concat();
    let names = all.lines().filter_map(|line| line.split(' ').next());
    // Those of providers are another library's, and none is built.
    let is_call = |name: &&str| {
        (name.starts_with("ibv_") || name.starts_with("rdma_"))
            && !name.starts_with("ibv_cmd_")
            && !name.starts_with("ibv_dmabuf_heap_")
    };
    let mut names: Vec<_> = names.filter(is_call).map(str::to_owned).collect();
    names.sort();
    names.dedup();
    names
}

#[test]
fn each_refused_call_says_its_name_and_why() {
    let mut calls = exported_calls();
    for name in REFUSE_NO_ZEROS {
        assert!(calls.iter().any(|call| call == name), "{name} is not exported");
    }
    calls.retain(|call| !REFUSE_NO_ZEROS.contains(&call.as_str()));
    assert!(calls.len() > 80, "{calls:?}");
    let calls: Vec<_> = calls.iter().map(String::as_str).collect();
    run_below("refused_each", &[], &calls, &[]);
}

/// Some programs look for the node of a device by themselves. Others only list devices, or use them.
#[test]
fn programs_that_look_for_the_devices_node_are_told_once() {
    if Path::new("/dev/infiniband/uverbs0").exists() {
        return anyverbs_testing::skip("this machine has the node of a device");
    }
    let shell = ["sh", "-c", "exec \"$@\" 2>&1", "sh"];
    let told = |program| {
        let said = run_below(program, &shell, &[], &[]);
        said.matches("there is no /dev/infiniband/uverbs0").count()
    };
    assert_eq!((told("node"), told("listing"), told("ah")), (1, 0, 0));
}

#[test]
fn no_event_comes_of_a_queue_pair_that_is_still_being_made() {
    run("made_in_overrun");
}

#[test]
fn a_destroy_that_waits_names_the_types_of_the_events() {
    let said = run_below("late_ack", &["sh", "-c", "exec \"$@\" 2>&1", "sh"], &[], &[]);
    let waits = said.lines().find(|line| line.contains("waits for events")).unwrap_or(&said);
    assert!(waits.contains("IBV_EVENT_QP_LAST_WQE_REACHED"), "{said}");
}

/// The probes that tracers find, with five arguments each but for one (`docs/probes.md`).
#[test]
fn the_library_has_its_probes() {
    let object = libraries().join("libibverbs.so.1");
    let notes = Command::new("readelf").arg("--notes").arg(object).output().unwrap();
    let text = String::from_utf8(notes.stdout).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    for (name, arguments) in
        [("post", 4), ("transmit", 5), ("receive", 5), ("complete", 5), ("error", 5)]
    {
        let mut probes = lines
            .windows(4)
            .filter(|l| l[0] == "Provider: anyverbs" && l[1] == format!("Name: {name}"));
        let probe = probes.next().unwrap_or_else(|| panic!("no probe {name} in\n{text}"));
        assert!(probe[2].contains("Semaphore: 0x") && !probe[2].ends_with("0x0000000000000000"));
        let found = probe[3].strip_prefix("Arguments: ").unwrap().matches('@').count();
        assert_eq!(found, arguments, "{name}: {}", probe[3]);
    }
}

//! Programs that bring a libibverbs of their own, under a name of its own, as Python packages do.
#![expect(clippy::unwrap_used, reason = "a test")]

mod built_libraries;

use std::env;
use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;

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
/// Opens the device, and talks to itself by a stream and by datagrams.
const TALKS: &str = "
#include <arpa/inet.h>
#include <assert.h>
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>
static struct sockaddr_in at;
static int made(int kind)
{
	socklen_t len = sizeof at;
	int fd = socket(AF_INET, kind, 0);
	at = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	assert(fd >= 0 && bind(fd, (void *)&at, len) == 0 && getsockname(fd, (void *)&at, &len) == 0);
	return fd;
}
static void *dial(void *arg)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	assert(connect(fd, (void *)&at, sizeof at) == 0 && write(fd, \"x\", 1) == 1);
	return arg;
}
int main(void)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	assert(n == 1 && ibv_open_device(list[0]));
	pthread_t thread;
	char c;
	int fd = made(SOCK_STREAM);
	assert(listen(fd, 1) == 0 && pthread_create(&thread, NULL, dial, NULL) == 0);
	int peer = accept(fd, NULL, NULL);
	assert(peer >= 0 && read(peer, &c, 1) == 1 && c == 'x');
	pthread_join(thread, NULL);
	int to = made(SOCK_DGRAM), from = socket(AF_INET, SOCK_DGRAM, 0);
	assert(sendto(from, \"y\", 1, 0, (void *)&at, sizeof at) == 1);
	assert(recv(to, &c, 1, 0) == 1 && c == 'y');
	puts(ibv_get_device_name(list[0]));
	return 0;
}
";
/// A client of a TCP server, with a socket that blocks and with one that does not.
const DIALS: &str = "
#include <arpa/inet.h>
#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
int main(int argc, char **argv) {
	struct sockaddr_in at = { .sin_family = AF_INET };
	assert(argc == 2);
	at.sin_port = htons(atoi(argv[1]));
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	for (int flags = 0; flags <= SOCK_NONBLOCK; flags += SOCK_NONBLOCK) {
		int fd = socket(AF_INET, SOCK_STREAM | flags, 0), why = 0;
		struct pollfd ready = { fd, POLLOUT, 0 };
		socklen_t len = sizeof why;
		char c;
		if (connect(fd, (void *)&at, sizeof at)) {
			assert(flags && errno == EINPROGRESS);
			assert(poll(&ready, 1, 30000) == 1);
			assert(getsockopt(fd, SOL_SOCKET, SO_ERROR, &why, &len) == 0);
		}
		ready.events = POLLIN;
		if (why == 0 && poll(&ready, 1, 30000) == 1 && read(fd, &c, 1) == 1)
			putchar(c);
		close(fd);
	}
	return 0;
}
";
/// A name as auditwheel changes it.
const NAME: &str = "libibverbs-1de1263b.so.1.14.48.0";

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
    built_libraries::link(&lib);
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
    for options in
        [&["run", "--"][..], &["run", "--sockets", "--"], &["run", "--sockets=all", "--"]]
    {
        assert_eq!(anyverbs(options), "anyverbs0\n", "{options:?}");
    }
    assert_eq!(anyverbs(&["run", "--no-preload", "--"]), "no device\n");
    let said = anyverbs(&["doctor"]);
    let line = said.lines().find(|line| line.contains(&format!("asks for {NAME}")));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(line.contains("by RUNPATH"), "{line}");
    assert!(line.contains(package.canonicalize().unwrap().join(NAME).to_str().unwrap()), "{line}");
}

/// The program that talks to itself, with libraries beside it.
fn talker(name: &str) -> (Scratch, PathBuf, PathBuf) {
    built(name, TALKS)
}

/// A program, with libraries beside it.
fn built(name: &str, text: &str) -> (Scratch, PathBuf, PathBuf) {
    let directory = env::temp_dir().join(format!("anyverbs-{name}-{}", std::process::id()));
    let (lib, program) = (directory.join("lib"), directory.join("program"));
    built_libraries::link(&lib);
    let source = directory.join("program.c");
    fs::write(&source, text).unwrap();
    let mut cc = Command::new("cc");
    cc.arg("-o").arg(&program).arg(&source).arg("-L").arg(&lib).args(["-libverbs", "-lpthread"]);
    assert!(cc.status().unwrap().success());
    (Scratch(directory), lib, program)
}

/// Tells the program, and the doctor.
#[test]
fn what_stops_rsockets_is_said() {
    let (scratch, lib, program) = talker("stopped");
    let port = UdpPort::reserve();
    let persona = "device = 'nic0'\nvendor_id = 1\nvendor_part_id = 1\nfw_ver = '1'\nrate = 100\nlacks = ['rc']\n\
                   gids = { types = ['RoCE v2'], link_local = false }\n";
    fs::write(scratch.0.join("nic.toml"), persona).unwrap();
    let file = scratch.0.join("rack.toml");
    for (rack, said, kind) in [
        (
            "devices = [{ limits = { max_cqe = 512 } }]",
            "rsocket: cqe is 768, and the limit is 512 (max_cqe of device anyverbs0)",
            "stream sockets: device anyverbs0: max_cqe = 512, and a socket needs 768",
        ),
        (
            "devices = [{ limits = { max_cqe = 768, max_mr = 1 } }]",
            "rsocket: device anyverbs0 holds no more memory regions (max_mr = 1)",
            "datagram sockets: device anyverbs0: max_mr = 1, and a socket needs 2",
        ),
        (
            "persona = 'nic.toml'\ndevices = 1",
            "rsocket: persona nic: it lacks reliable connections (RC)",
            "stream sockets: device nic0: it lacks reliable connections (RC)",
        ),
        (
            "persona = 'mana'\ndevices = 1",
            "rsocket: persona mana: it lacks datagrams (UD)",
            "datagram sockets: device mana_0: it lacks datagrams (UD)",
        ),
    ] {
        fs::write(&file, rack).unwrap();
        let anyverbs = |arguments: &[&str]| {
            let mut command = Command::new("timeout");
            command.arg("60").arg(env!("CARGO_BIN_EXE_anyverbs")).args(arguments).arg(&program);
            command.env("ANYVERBS_LIB_DIR", &lib).env("ANYVERBS_CONFIG", &file);
            command.env("ANYVERBS_UDP_PORT", port.number().to_string());
            command.env("ANYVERBS_REGISTRY", format!("anyverbs-stopped-{}", port.number()));
            command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
            command.output().unwrap()
        };
        let output = anyverbs(&["run", "--sockets=all", "--"]);
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{rack}");
        assert_eq!(log.matches(&format!("ERROR anyverbs: {said}\n")).count(), 1, "{rack}: {log}");
        let found = String::from_utf8(anyverbs(&["doctor", "--"]).stdout).unwrap();
        let line = format!("note  `anyverbs run --sockets` gives no {kind}\n");
        assert!(found.contains(&line), "{rack}: {found}");
    }
}

#[test]
fn a_client_whose_device_is_too_small_connects_by_tcp() {
    let (scratch, lib, program) = built("small", DIALS);
    let port = UdpPort::reserve();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let server = listener.local_addr().unwrap().port().to_string();
    // It ends with the process of the test.
    thread::spawn(move || {
        for client in listener.incoming() {
            client.unwrap().write_all(b"x").unwrap();
        }
    });
    let file = scratch.0.join("rack.toml");
    for limit in
        ["max_sge = 1", "max_inline_data = 63", "max_qp_wr = 383", "max_cqe = 767", "max_mr = 2"]
    {
        fs::write(&file, format!("devices = [{{ limits = {{ {limit} }} }}]")).unwrap();
        let mut command = Command::new("timeout");
        command.args(["60", env!("CARGO_BIN_EXE_anyverbs"), "run", "--sockets", "--"]);
        command.arg(&program).arg(&server);
        command.env("ANYVERBS_LIB_DIR", &lib).env("ANYVERBS_CONFIG", &file);
        command.env("ANYVERBS_UDP_PORT", port.number().to_string());
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-small-{}", port.number()));
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        let output = command.output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "xx", "{limit}: {output:?}");
        let (key, log) =
            (&limit[..limit.find(' ').unwrap()], String::from_utf8_lossy(&output.stderr));
        assert!(log.contains(key), "the device was asked, and the log has the reason: {log}");
    }
}

#[test]
fn a_program_has_the_device_and_rsockets_at_once() {
    let (_scratch, lib, program) = talker("both");
    let port = UdpPort::reserve();
    for (sockets, preload) in
        [("stream", true), ("dgram", true), ("all", true), ("stream", false), ("all", false)]
    {
        let mut command = Command::new("timeout");
        command.arg("60").arg(env!("CARGO_BIN_EXE_anyverbs")).arg("run");
        command.args((!preload).then_some("--no-preload"));
        command.arg(format!("--sockets={sockets}")).arg("--").arg(&program);
        command.env("ANYVERBS_LIB_DIR", &lib).env("ANYVERBS_INTERFACES", "lo");
        command.env("ANYVERBS_UDP_PORT", port.number().to_string());
        command.env("ANYVERBS_REGISTRY", format!("anyverbs-both-{}", port.number()));
        command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH");
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, "anyverbs0\n", "{sockets} {preload}: {output:?}");
    }
}

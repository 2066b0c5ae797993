//! The object, preloaded into real programs, on a device of their own.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

use anyverbs_testing::UdpPort;

/// The object with the library beside it, as they are shipped: cargo does not build a cdylib for the tests of its package.
fn libraries() -> &'static Path {
    static LIBRARIES: OnceLock<PathBuf> = OnceLock::new();
    LIBRARIES.get_or_init(|| {
        let tests = env::current_exe().unwrap();
        // <target>/<profile>/deps/<test>
        let target = tests.ancestors().nth(3).unwrap();
        let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args(["build", "--quiet", "-p", "anyverbs-capi", "-p", "anyverbs-rspreload"])
            .arg("--manifest-path")
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Cargo.toml"))
            .arg("--target-dir")
            .arg(target)
            .status()
            .unwrap();
        assert!(status.success());
        let directory = target.join("debug/rspreload-programs");
        fs::create_dir_all(&directory).unwrap();
        for (name, of) in [
            ("libibverbs.so.1", "libanyverbs_capi.so"),
            ("librdmacm.so.1", "libanyverbs_capi.so"),
            ("librspreload.so", "librspreload.so"),
        ] {
            // Another process of this test may make it first.
            let _ = symlink(Path::new("..").join(of), directory.join(name));
        }
        directory
    })
}

/// A program under the object, on a device that no other test shares.
fn preloaded(test: &str, program: &str) -> Command {
    let id = std::process::id();
    let port = UdpPort::of_this_process();
    let mut command = Command::new("timeout");
    command
        .args(["60", "env"])
        .arg(format!("LD_PRELOAD={}", libraries().join("librspreload.so").display()))
        .arg(program)
        .env("ANYVERBS_REGISTRY", format!("rspreload-{test}-{id}"))
        .env("ANYVERBS_UDP_PORT", port.to_string())
        .env("ANYVERBS_INTERFACES", "lo")
        .env("ANYVERBS_RSOCKET_CONFIG", "/nonexistent")
        .env("ANYVERBS_SOCKETS", "stream");
    command
}

fn quiet(output: &Output) {
    assert!(
        output.status.success() && output.stdout.is_empty() && output.stderr.is_empty(),
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn every_call_from_c() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/calls.c");
    for (name, options) in [("plain", &["-O0"][..]), ("fortified", &["-O2", "-D_FORTIFY_SOURCE=2"])]
    {
        let program = libraries().join(format!("calls-{name}-{}", std::process::id()));
        let built = Command::new("cc")
            .args(["-Wall", "-Wno-unused-result", "-D_GNU_SOURCE", "-pthread"])
            .args(options)
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let output = preloaded(name, program.to_str().unwrap()).output().unwrap();
        let _ = fs::remove_file(&program);
        quiet(&output);
    }
}

#[test]
fn python_with_threads_and_with_epoll() {
    let script = "
import asyncio, hashlib, os, socket, subprocess, threading

def is_rsocket(s):
    try:
        s.getsockopt(0x10000, 0)
        return True
    except OSError:
        return False

server = socket.create_server(('127.0.0.1', 0))
assert is_rsocket(server)
def serve():
    conn, _ = server.accept()
    with conn, conn.makefile('rwb') as f:
        for line in f:
            f.write(line.upper()); f.flush()
thread = threading.Thread(target=serve); thread.start()
with socket.create_connection(server.getsockname(), timeout=20) as s:
    assert is_rsocket(s)
    with s.makefile('rwb') as f:
        for i in range(50):
            f.write(b'line %d\\n' % i); f.flush()
            assert f.readline() == b'LINE %d\\n' % i
    # A child does not take the connection along.
    subprocess.run(['true'], check=True)
    s.sendall(b'more\\n')
    assert s.recv(5) == b'MORE\\n'
thread.join()

async def main():
    async def answer(reader, writer):
        data = await reader.readexactly(300000)
        writer.write(hashlib.sha256(data).digest())
        await writer.drain()
        writer.close()
    server = await asyncio.start_server(answer, '127.0.0.1', 0)
    port = server.sockets[0].getsockname()[1]
    async def ask():
        reader, writer = await asyncio.open_connection('127.0.0.1', port)
        assert is_rsocket(writer.get_extra_info('socket'))
        data = os.urandom(300000)
        writer.write(data)
        await writer.drain()
        assert await reader.read() == hashlib.sha256(data).digest()
        writer.close()
        await writer.wait_closed()
    await asyncio.gather(*[ask() for _ in range(8)])
asyncio.run(main())
";
    quiet(&preloaded("python", "python3").args(["-c", script]).output().unwrap());
}

#[test]
fn a_stream_takes_as_much_as_that_of_a_busy_tcp_socket() {
    let script = "
import socket, threading

def room(set_size):
    server = socket.socket()
    if set_size:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32768)
    server.bind(('127.0.0.1', 0))
    server.listen()
    accepted = []
    thread = threading.Thread(target=lambda: accepted.append(server.accept()[0]))
    thread.start()
    client = socket.create_connection(server.getsockname(), timeout=20)
    thread.join()
    client.setblocking(False)
    sent = 0
    try:
        while True:
            sent += client.send(bytes(100000))
    except BlockingIOError:
        pass
    accepted[0].close(); client.close(); server.close()
    return sent

large, small = room(False), room(True)
assert large >= 2 << 20 and small <= 65536, (large, small)
";
    quiet(&preloaded("room", "python3").args(["-c", script]).output().unwrap());
}

#[test]
fn data_arrives_though_the_sender_exits_at_once() {
    let script = "
import os, socket, sys
server = socket.create_server(('127.0.0.1', 0))
port = server.getsockname()[1]
import subprocess
child = subprocess.Popen([sys.executable, '-c', '''
import socket, sys
s = socket.create_connection((\"127.0.0.1\", %d))
s.sendall(b\"x\" * 60000)
sys.exit(0)
''' % port])
conn, _ = server.accept()
got = 0
while True:
    part = conn.recv(65536)
    if not part:
        break
    got += len(part)
assert got == 60000, got
assert child.wait() == 0
";
    quiet(&preloaded("exit", "python3").args(["-c", script]).output().unwrap());
}

#[test]
fn without_the_library_sockets_stay_tcp() {
    let alone = libraries().join(format!("alone-{}", std::process::id()));
    fs::create_dir_all(&alone).unwrap();
    fs::copy(libraries().join("librspreload.so"), alone.join("librspreload.so")).unwrap();
    let script = "import socket; s = socket.create_server(('127.0.0.1', 0)); c = socket.create_connection(s.getsockname()); print('tcp')";
    let output = Command::new("python3")
        .args(["-c", script])
        .env("LD_PRELOAD", alone.join("librspreload.so"))
        .output()
        .unwrap();
    fs::remove_dir_all(&alone).unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.stdout, b"tcp\n");
    assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
}

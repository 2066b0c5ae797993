//! The object, preloaded into real programs, on a tree made here.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::env;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

struct Tree(PathBuf);

impl Tree {
    fn new(name: &str) -> Self {
        let tree = env::temp_dir()
            .canonicalize()
            .unwrap()
            .join(format!("anyverbs-view-test-{}-{name}", std::process::id()));
        let device = tree.join("sys/devices/virtual/anyverbs/anyverbs0");
        let ib = device.join("infiniband/anyverbs0");
        fs::create_dir_all(&ib).unwrap();
        fs::write(ib.join("node_type"), "1: CA\n").unwrap();
        symlink("../..", ib.join("device")).unwrap();
        let class = tree.join("sys/class/infiniband");
        fs::create_dir_all(&class).unwrap();
        symlink(
            "../../devices/virtual/anyverbs/anyverbs0/infiniband/anyverbs0",
            class.join("anyverbs0"),
        )
        .unwrap();
        fs::create_dir_all(tree.join("dev/infiniband")).unwrap();
        symlink("/dev/null", tree.join("dev/infiniband/uverbs0")).unwrap();
        Tree(tree)
    }

    fn run(&self, program: &str, arguments: &[&str]) -> Output {
        preloaded(program).args(arguments).env("ANYVERBS_VIEW", &self.0).output().unwrap()
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Builds the object as it is shipped. Cargo does not build a cdylib for the tests of its package. It would also build
/// it with another panic strategy, on which the cancellation of threads depends.
fn object() -> &'static Path {
    static OBJECT: OnceLock<PathBuf> = OnceLock::new();
    OBJECT.get_or_init(|| {
        let tests = env::current_exe().unwrap();
        // <target>/<profile>/deps/<test>
        let target = tests.ancestors().nth(3).unwrap();
        let status = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args([
                "build",
                "--quiet",
                "--manifest-path",
                concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"),
                "--target-dir",
            ])
            .arg(target)
            .status()
            .unwrap();
        assert!(status.success());
        target.join("debug/libanyverbs_view.so")
    })
}

fn preloaded(program: &str) -> Command {
    let mut command = Command::new(program);
    command.env("LD_PRELOAD", object()).env_remove("ANYVERBS_VIEW");
    command
}

fn text(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn every_call_from_c() {
    let tree = Tree::new("c");
    // The program expects three nodes, beside the two entries of every directory.
    for node in ["anyverbs0", "rdma_cm"] {
        symlink("/dev/null", tree.0.join("dev/infiniband").join(node)).unwrap();
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/calls.c");
    for (name, options) in [
        ("plain", &["-O0"][..]),
        ("fortified", &["-O2", "-D_FORTIFY_SOURCE=2"]),
        ("large", &["-O0", "-D_FILE_OFFSET_BITS=64"]),
    ] {
        let program = tree.0.join(name);
        let built = Command::new("cc")
            .args(["-Wall", "-pthread"])
            .args(options)
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .output()
            .unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let output = tree.run(program.to_str().unwrap(), &[]);
        assert_eq!(String::from_utf8_lossy(&output.stdout), "", "{name}");
        assert!(output.status.success(), "{name}: {}", output.status);
    }
}

/// The sanitizer does not see what a library without it writes. So it takes the paths that come from there for undefined.
#[test]
fn memory_sanitizer_sees_no_mistake_in_a_look_at_a_path() {
    let tree = Tree::new("msan");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/foreign_path.c");
    let build = |compiler: &str, options: &[&str], to: &Path| {
        let mut command = Command::new(compiler);
        let built = command.args(options).arg("-o").arg(to).arg(&source).output().unwrap();
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    };
    let library = tree.0.join("libforeign.so");
    build("cc", &["-DLIBRARY", "-shared", "-fPIC"], &library);
    let program = tree.0.join("sanitized");
    let (library, program) = (library.to_str().unwrap(), program.to_str().unwrap());
    let rpath = format!("-Wl,--no-as-needed,-rpath,{}", tree.0.display());
    build("clang", &["-fsanitize=memory", &rpath, library], Path::new(program));
    // The shadow memory of older sanitizers does not fit into an address space with many random bits.
    assert_eq!(text(&tree.run("setarch", &["-R", program])), "");
}

#[test]
fn shell_and_coreutils() {
    let tree = Tree::new("shell");
    assert_eq!(text(&tree.run("ls", &["/sys/class/infiniband"])), "anyverbs0\n");
    assert!(text(&tree.run("ls", &["-l", "/dev/infiniband"])).contains("crw-"));
    assert_eq!(text(&tree.run("cat", &["/sys/class/infiniband/anyverbs0/node_type"])), "1: CA\n");
    assert_eq!(
        text(&tree.run("realpath", &["/sys/class/infiniband/anyverbs0/device"])),
        "/sys/devices/virtual/anyverbs/anyverbs0\n"
    );
    let script = "read x < /sys/class/infiniband/anyverbs0/node_type; echo $x /sys/class/infiniband/*; echo x > /dev/infiniband/uverbs0; \
                  cd /sys/class/infiniband && bash -c 'sh -c \"cat /sys/class/infiniband/*/node_type\"'";
    assert_eq!(
        text(&tree.run("bash", &["-c", script])),
        "1: CA /sys/class/infiniband/anyverbs0\n1: CA\n"
    );
}

#[test]
fn python() {
    let tree = Tree::new("python");
    let script = "
import glob, os, subprocess
d = '/sys/class/infiniband'
assert os.listdir(d) == ['anyverbs0'] == [e.name for e in os.scandir(d)]
p = os.path.realpath(d + '/anyverbs0/device')
assert p == '/sys/devices/virtual/anyverbs/anyverbs0' == os.path.realpath(p), p
assert open(d + '/anyverbs0/node_type').read() == '1: CA\\n'
assert glob.glob(d + '/*/node_*') == [d + '/anyverbs0/node_type']
assert subprocess.run(['ls', d], capture_output=True).stdout == b'anyverbs0\\n'
assert subprocess.run('ls ' + d, shell=True, capture_output=True, close_fds=True).stdout == b'anyverbs0\\n'
";
    assert_eq!(text(&tree.run("python3", &["-c", script])), "");
}

#[test]
fn without_the_variable_nothing_changes() {
    let plain = Command::new("ls").arg("-la").arg("/sys/class").output().unwrap();
    let preloaded = |view: Option<&str>| {
        let mut command = preloaded("ls");
        command.args(["-la", "/sys/class"]);
        if let Some(view) = view {
            command.env("ANYVERBS_VIEW", view);
        }
        command.output().unwrap()
    };
    assert_eq!(preloaded(None).stdout, plain.stdout);
    assert_eq!(preloaded(Some("")).stdout, plain.stdout);
    // A value that cannot be used is said once, and the program runs.
    let wrong = preloaded(Some("relative/path"));
    assert!(wrong.status.success());
    assert_eq!(wrong.stdout, plain.stdout);
    assert_eq!(String::from_utf8_lossy(&wrong.stderr).lines().count(), 1);
}

#[test]
fn netlink_answers_of_devices_and_ports() {
    let tree = Tree::new("netlink");
    let device = tree.0.join("netlink/0");
    fs::create_dir_all(&device).unwrap();
    fs::write(device.join("device"), b"device's").unwrap();
    fs::write(device.join("1"), b"port's..").unwrap();
    fs::write(device.join("c10"), b"\x08\0\0\0the\0 qps\x04\0\0\0more").unwrap();
    // A length that nobody has room for ends the answer.
    fs::write(device.join("c17"), b"\x04\0\0\0stat\xff\xff\0\0").unwrap();
    let script = "
import errno, os, socket, struct
def request(kind, flags, seq, *attributes):
    body = b''.join(struct.pack('=HHI', 8, n, value) for n, value in attributes)
    return struct.pack('=IHHII', 16 + len(body), 5 << 10 | kind, flags, seq, 0) + body
def answer(s):
    m, _, _, name = s.recvmsg(4096)
    assert name == (0, 0), name
    n, kind, flags, seq, _ = struct.unpack('=IHHII', m[:16])
    assert n == len(m)
    return kind, flags, seq, m[16:]
GET, PORT, QPS, CM_IDS, STAT = 1, 5, 10, 11, 17
REQUEST, ACK, DUMP, MULTI = 1, 4, 0x300, 2
MINE = 5 << 10
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20)
s.bind((0, 0))
assert s.getsockname() == (os.getpid(), 0)
s.sendto(request(GET, REQUEST | DUMP, 7), (0, 0))
assert answer(s) == (MINE | GET, MULTI, 7, b\"device's\")
assert answer(s) == (3, MULTI, 7, bytes(4))
s.sendmsg([request(PORT, REQUEST | ACK, 8, (1, 0), (3, 1))], [], 0, (0, 0))
assert answer(s) == (MINE | PORT, 0, 8, b\"port's..\")
assert answer(s)[3][:4] == bytes(4)
def error(sent):
    s.send(sent)
    kind, _, _, body = answer(s)
    assert kind == 2 and body[4:] == sent[:16]
    return -struct.unpack('=i', body[:4])[0]
assert error(request(GET, REQUEST, 9, (1, 1))) == errno.ENODEV
assert error(request(GET, REQUEST, 9)) == errno.EINVAL
assert error(request(PORT, REQUEST, 9, (1, 0), (3, 2))) == errno.EINVAL
assert error(request(CM_IDS, REQUEST | DUMP, 9)) == errno.EOPNOTSUPP
for attributes in (), ((1, 0),):
    s.send(request(QPS, REQUEST | DUMP, 10, *attributes))
    assert answer(s) == (MINE | QPS, MULTI, 10, b'the\\0 qps')
    assert answer(s) == (MINE | QPS, MULTI, 10, b'more')
    assert answer(s) == (3, MULTI, 10, bytes(4))
assert error(request(QPS, REQUEST | DUMP, 10, (1, 1))) == errno.ENODEV
s.send(request(STAT, REQUEST | ACK, 11, (1, 0), (3, 1)))
assert answer(s) == (MINE | STAT, 0, 11, b'stat')
assert answer(s)[3][:4] == bytes(4)
assert error(request(STAT, REQUEST, 11)) == errno.EINVAL
# Nonsense is not answered, and neither is what claims to be longer than it is.
for bad in b'', b'x' * 15, struct.pack('=IHHII', 0, 0, 0, 0, 0), struct.pack('=IHHII', 17, 5 << 10 | GET, DUMP, 0, 0), request(PORT, 1, 1, (1, 0))[:20]:
    s.send(bad)
s.setblocking(False)
try:
    print(s.recv(4096))
except BlockingIOError:
    pass
# A number that is given out again is another socket.
number = s.fileno()
s.close()
other = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
assert other.fileno() == number
other.bind(('127.0.0.1', 0))
assert other.getsockname()[0] == '127.0.0.1'
# As many as there are descriptors: `rdma` closes none. An unfinished answer of each keeps the others from nothing.
for _ in range(2):
    many = [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20) for _ in range(400)]
    for i, s in enumerate(many):
        s.send(request(QPS, REQUEST | DUMP, i))
    for i, s in enumerate(many):
        assert [answer(s)[2] for _ in range(3)] == [i] * 3
    for s in many:
        s.close()
";
    assert_eq!(text(&tree.run("python3", &["-c", script])), "");
}

/// A dump is longer than the socket has room for: the rest comes as the program receives, and then its end.
#[test]
fn a_long_netlink_answer_is_whole() {
    const MESSAGES: u32 = 2000;
    let tree = Tree::new("long");
    for device in 0..2 {
        let dir = tree.0.join(format!("netlink/{device}"));
        fs::create_dir_all(&dir).unwrap();
        let message = |n: u32| [&3600u32.to_ne_bytes()[..], &n.to_ne_bytes(), &[7; 3596]].concat();
        let all: Vec<u8> = (device * MESSAGES..(device + 1) * MESSAGES).flat_map(message).collect();
        fs::write(dir.join("c10"), all).unwrap();
    }
    let script = "
import errno, os, select, socket, struct
DUMP, DONE, ERROR = 0x301, 3, 2
kind = 5 << 10 | 10
files = len(os.listdir('/proc/self/fd'))
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20)
receives = [lambda: s.recv(4096), lambda: s.recvfrom(4096)[0], lambda: s.recvmsg(4096)[0]]
for _ in range(3):
    s.send(struct.pack('=IHHII', 16, kind, DUMP, 7, 0))
    n = 0
    while True:
        assert select.select([s], [], [], 20)[0], n
        m = receives[n % 3]()
        assert struct.unpack('=IHHI', m[:12])[0::3] == (len(m), 7)
        if struct.unpack('=H', m[4:6])[0] == DONE:
            break
        assert struct.unpack('=I', m[16:20])[0] == n and len(m) == 3616, n
        n += 1
    assert n == 4000, n
assert len(os.listdir('/proc/self/fd')) == files + 1
s.close()
# The file of a socket that is closed early is closed with the next use of its number.
for _ in range(40):
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20) as s:
        s.send(struct.pack('=IHHII', 16, kind, DUMP, 7, 0))
        assert len(s.recv(4096)) == 3616
assert len(os.listdir('/proc/self/fd')) <= files + 1
# Long answers to many sockets at a time.
many = [socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 20) for _ in range(40)]
for s in many:
    s.send(struct.pack('=IHHII', 16, kind, DUMP, 7, 0))
for s in many:
    s.settimeout(20)
    assert [struct.unpack('=I', s.recv(4096)[16:20])[0] for _ in range(4000)] == list(range(4000))
";
    assert_eq!(text(&tree.run("python3", &["-c", script])), "");
}

/// A launcher writes counters and states of ports when somebody wants them: before the program opens the file.
#[test]
fn counters_and_states_are_fresh_when_they_are_opened() {
    use std::io::Write as _;
    use std::os::fd::AsRawFd as _;
    let tree = Tree::new("counters");
    let ib = tree.0.join("sys/devices/virtual/anyverbs/anyverbs0/infiniband/anyverbs0");
    let counters = ib.join("ports/1/hw_counters");
    fs::create_dir_all(&counters).unwrap();
    fs::write(counters.join("sent_pkts"), "old\n").unwrap();
    let path = "/sys/class/infiniband/anyverbs0/ports/1/hw_counters/sent_pkts";
    // A launcher that is gone, or does not answer, delays nobody for long.
    assert_eq!(text(&tree.run("cat", &[path])), "old\n");
    let listener = std::os::unix::net::UnixListener::bind(tree.0.join(".fresh")).unwrap();
    assert_eq!(text(&tree.run("cat", &[path])), "old\n");
    // Its question is still there, and the launcher takes no more: nobody waits for room.
    let takes = |most| {
        // SAFETY: changes the length of the queue of an open socket.
        assert_eq!(unsafe { libc::listen(listener.as_raw_fd(), most) }, 0);
    };
    takes(0);
    assert_eq!(text(&tree.run("cat", &[path])), "old\n");
    takes(16);
    drop(listener.accept().unwrap());
    let launcher = std::thread::spawn(move || {
        for n in 1..=5 {
            let (mut socket, _) = listener.accept().unwrap();
            fs::write(counters.join("sent_pkts"), format!("{n}\n")).unwrap();
            for file in ["state", "phys_state"] {
                fs::write(ib.join("ports/1").join(file), format!("{n}\n")).unwrap();
            }
            socket.write_all(b"1").unwrap();
        }
    });
    let node_type = "/sys/class/infiniband/anyverbs0/node_type";
    assert_eq!(text(&tree.run("cat", &[node_type, path])), "1: CA\n1\n");
    let python = format!("for _ in range(2): print(open('{path}').read(), end='')");
    assert_eq!(text(&tree.run("python3", &["-c", &python])), "2\n3\n");
    let port = "/sys/class/infiniband/anyverbs0/ports/1";
    let states = ["state", "phys_state"].map(|file| format!("{port}/{file}"));
    assert_eq!(text(&tree.run("cat", &states.each_ref().map(String::as_str))), "4\n5\n");
    launcher.join().unwrap();
}

/// A relative path is fresh as well: from the working directory, also where a program starts in it, and from an open directory.
#[test]
fn counters_are_fresh_by_a_relative_path() {
    use std::io::Write as _;
    let tree = Tree::new("relative");
    let ib = tree.0.join("sys/devices/virtual/anyverbs/anyverbs0/infiniband/anyverbs0");
    let counters = ib.join("ports/1/hw_counters");
    fs::create_dir_all(&counters).unwrap();
    fs::write(counters.join("sent_pkts"), "old\n").unwrap();
    fs::write(ib.join("ports/1/state"), "old\n").unwrap();
    let listener = std::os::unix::net::UnixListener::bind(tree.0.join(".fresh")).unwrap();
    let questions = listener.try_clone().unwrap();
    let port = ib.join("ports/1");
    let launcher = std::thread::spawn(move || {
        for n in 1..=7 {
            let (mut socket, _) = listener.accept().unwrap();
            for file in ["hw_counters/sent_pkts", "state"] {
                fs::write(port.join(file), format!("{n}\n")).unwrap();
            }
            socket.write_all(b"1").unwrap();
        }
    });
    let dir = "/sys/class/infiniband/anyverbs0/ports/1/hw_counters";
    let shell = format!(
        "cd {dir}; cat sent_pkts; cd ..; cat ./hw_counters/sent_pkts; read x < state; echo $x"
    );
    assert_eq!(text(&tree.run("sh", &["-c", &shell])), "1\n2\n3\n");
    let python = format!(
        "
import ctypes, os, tempfile
d = os.open('{dir}', os.O_DIRECTORY)
print(os.read(os.open('sent_pkts', 0, dir_fd=d), 9).decode(), end='')
print(open('sent_pkts', opener=lambda path, flags: os.open(path, flags, dir_fd=d)).read(), end='')
os.fchdir(d)
print(open('sent_pkts').read(), end='')
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
line = ctypes.create_string_buffer(9)
libc.fgets(line, 9, ctypes.c_void_p(libc.fopen(b'sent_pkts', b'r')))
print(line.value.decode(), end='')
# Nobody is asked about files that do not change, or lie elsewhere.
os.chdir('/sys/class/infiniband/anyverbs0')
open('node_type').close()
with tempfile.TemporaryDirectory() as other:
    os.chdir(other)
    open('state', 'w').close()
    os.chdir('/')
"
    );
    assert_eq!(text(&tree.run("python3", &["-c", &python])), "4\n5\n6\n7\n");
    launcher.join().unwrap();
    questions.set_nonblocking(true).unwrap();
    assert_eq!(questions.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
}

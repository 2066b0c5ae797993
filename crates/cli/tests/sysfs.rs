//! `anyverbs sysfs`: counters of real processes, which never fall.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyverbs::prelude::*;
use anyverbs_testing::isolate;

const ROLE: &str = "ANYVERBS_TEST_ROLE";
const MESSAGES: u64 = 100;
const LEN: usize = 4096;

/// A directory that `anyverbs sysfs` keeps, until it is dropped.
struct Kept {
    dir: PathBuf,
    child: Child,
}

impl Kept {
    fn start(name: &str) -> Self {
        let dir =
            std::env::temp_dir().join(format!("anyverbs-sysfs-{}-{name}", std::process::id()));
        let child = sysfs(&dir).spawn().unwrap();
        let kept = Self { dir, child };
        kept.wait_for("hw_counters/sent_pkts", |_| true);
        kept
    }

    fn file(&self, name: &str) -> PathBuf {
        self.dir.join("sys/class/infiniband/anyverbs0/ports/1").join(name)
    }

    fn read(&self, name: &str) -> u64 {
        read(&self.file(name)).unwrap()
    }

    /// A value for which `is_it` holds.
    fn wait_for(&self, name: &str, is_it: impl Fn(u64) -> bool) -> u64 {
        let begin = Instant::now();
        loop {
            match read(&self.file(name)) {
                Some(value) if is_it(value) => return value,
                value => assert!(begin.elapsed() < Duration::from_secs(60), "{name}: {value:?}"),
            }
            sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: a child that was not waited for.
        unsafe { libc::kill(self.child.id() as i32, libc::SIGTERM) };
        assert!(self.child.wait().unwrap().success());
        assert_eq!(fs::read_dir(&self.dir).unwrap().count(), 0, "nothing is left");
        fs::remove_dir(&self.dir).unwrap();
    }
}

fn sysfs(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anyverbs"));
    isolate(command.arg("sysfs").arg(dir));
    command
}

fn read(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

/// A process that has sent, and then ends, or waits to be killed by the drop.
struct Sender(Child);

impl Sender {
    fn start(role: &str) -> Self {
        let child = isolate(&mut Command::new(std::env::current_exe().unwrap()))
            .args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut sender = Self(child);
        let mut out = BufReader::new(sender.0.stdout.as_mut().unwrap());
        loop {
            let mut line = String::new();
            assert_ne!(out.read_line(&mut line).unwrap(), 0, "it ended");
            if line.contains("@ sent") {
                return sender;
            }
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn counters_count_and_never_fall() {
    let kept = Kept::start("fall");
    assert_eq!(kept.read("hw_counters/sent_pkts"), 0);
    // It ends at once: nobody has looked at it.
    assert!(Sender::start("ends").0.wait().unwrap().success());
    let first = kept.wait_for("hw_counters/sent_pkts", |packets| packets >= MESSAGES);
    let data = kept.wait_for("counters/port_xmit_data", |words| words > 0);
    assert!(data >= MESSAGES * LEN as u64 / 4 && data < 2 * MESSAGES * LEN as u64 / 4, "{data}");
    assert_eq!(kept.read("counters/port_xmit_packets"), first);
    assert_eq!(kept.read("counters/symbol_error"), 0);
    // It is seen while it lives, and then killed.
    let stays = Sender::start("stays");
    let second = kept.wait_for("hw_counters/sent_pkts", |packets| packets >= first + MESSAGES);
    drop(stays);
    let stays = Sender::start("stays");
    let third = kept.wait_for("hw_counters/sent_pkts", |packets| packets >= second + MESSAGES);
    drop(stays);
    let end = Instant::now() + Duration::from_millis(2500);
    while Instant::now() < end {
        assert_eq!(kept.read("hw_counters/sent_pkts"), third, "neither lost nor counted twice");
        sleep(Duration::from_millis(50));
    }
}

#[test]
fn each_device_has_counters_of_its_own() {
    let dir = std::env::temp_dir().join(format!("anyverbs-sysfs-{}-rails", std::process::id()));
    let child = sysfs(&dir)
        .env("ANYVERBS_DEVICES", "rail0=127.0.0.1,rail1=127.0.0.2")
        .env("ANYVERBS_INTERFACES", "")
        .spawn()
        .unwrap();
    let kept = Kept { dir, child };
    let sent = |name: &str| {
        let port = kept.dir.join("sys/class/infiniband").join(name).join("ports/1");
        read(&port.join("hw_counters/sent_pkts")).zip(read(&port.join("counters/port_xmit_data")))
    };
    let wait_for = |name: &str, packets: u64| {
        let begin = Instant::now();
        loop {
            match sent(name) {
                Some((sent, _)) if sent >= packets => return sent,
                sent => assert!(begin.elapsed() < Duration::from_secs(60), "{name}: {sent:?}"),
            }
            sleep(Duration::from_millis(20));
        }
    };
    for name in ["rail0", "rail1"] {
        assert_eq!(wait_for(name, 0), 0);
    }
    // The second device sends, and its process ends.
    assert!(Sender::start("rail1 ends").0.wait().unwrap().success());
    let first = wait_for("rail1", MESSAGES);
    assert_eq!(sent("rail0"), Some((0, 0)));
    // It is killed when it was seen.
    let stays = Sender::start("rail1 stays");
    let second = wait_for("rail1", first + MESSAGES);
    drop(stays);
    assert!(Sender::start("rail0 ends").0.wait().unwrap().success());
    wait_for("rail0", MESSAGES);
    assert_eq!(wait_for("rail1", 0), second);
}

#[test]
fn a_directory_with_other_things_is_left_alone() {
    let dir = std::env::temp_dir().join(format!("anyverbs-sysfs-{}-full", std::process::id()));
    fs::create_dir_all(dir.join("sys")).unwrap();
    let output = sysfs(&dir).output().unwrap();
    assert_eq!(output.status.code(), Some(125));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is not empty"), "{output:?}");
    assert!(dir.join("sys").exists());
    fs::remove_dir_all(dir).unwrap();
}

/// Not a test by itself: the code of the other processes.
#[test]
fn in_a_role() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let number = usize::from(role.starts_with("rail1"));
    if role.starts_with("rail") {
        // SAFETY: before the device is opened, and by the only thread that runs a test.
        unsafe {
            std::env::set_var("ANYVERBS_DEVICES", "rail0=127.0.0.1,rail1=127.0.0.2");
            std::env::set_var("ANYVERBS_INTERFACES", "");
        }
    }
    let context = Context::open(&anyverbs::devices().unwrap()[number].name).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(1024, None, 0, 0).unwrap();
    let [a, b] = [(); 2].map(|()| context.create_default_qp(&pd, &cq, QpType::Rc).unwrap());
    let (from, to) = (context.endpoint(&a).unwrap(), context.endpoint(&b).unwrap());
    context.connect(&a, &from, &to).unwrap();
    context.connect(&b, &to, &from).unwrap();
    let memory = pd.alloc(2 * LEN, Access::LOCAL_WRITE | Access::REMOTE_WRITE).unwrap();
    for n in 0..MESSAGES {
        a.write(n, &memory.slice(..LEN), &memory.remote(LEN..)).unwrap();
        cq.wait(Duration::from_secs(20)).unwrap();
    }
    println!("@ sent");
    if role.ends_with("stays") {
        std::io::stdin().read_line(&mut String::new()).unwrap();
    }
}

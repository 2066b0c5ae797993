//! One-sided operations on memory that its owner shares: this process maps it, and lets it go in time. The peer is this test
//! binary (`same_host::peer`).

use std::ffi::CStr;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::counters::Counter;

use crate::direct::exercise;
use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, SIZE, is_on, turn};

const NAME: &CStr = c"anyverbs-test-shared";

/// Whether this process has mapped a memfd of this name.
fn is_mapped(name: &str) -> bool {
    std::fs::read_to_string("/proc/self/maps").unwrap().contains(&format!("/memfd:{name} "))
}

/// Shared mappings in this process that are as long as the peer's region.
fn shared_like_the_region() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let is_like_it = |line: &&str| {
        let mut words = line.split_ascii_whitespace();
        let (range, rights) = (words.next().unwrap(), words.next().unwrap());
        let (from, to) = range.split_once('-').unwrap();
        let at = |text| usize::from_str_radix(text, 16).unwrap();
        rights.ends_with('s') && at(to) - at(from) == OFFERED.next_multiple_of(4096)
    };
    maps.lines().filter(is_like_it).count()
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begin = Instant::now();
    while !condition() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn write(e: &Endpoint, remote: RemoteAddr, sge: Sge) -> WcStatus {
    e.send(0, SendOp::Write(remote), &[sge]);
    e.poll(1)[0].status
}

/// A peer that shares its memory, which this process has mapped, if it may.
fn mapped_peer(kind: &str, name: &str) -> (Peer, Endpoint, Buffer, RemoteAddr) {
    let mut peer = Peer::spawn(&format!("rc direct {kind}"), &[]);
    let e = Endpoint::new(QpType::Rc);
    let src = Buffer::new(&e.pd, SIZE);
    let (_, remote) = peer.connect(&e, &src);
    let begin = Instant::now();
    while is_on() && !is_mapped(name) {
        assert!(begin.elapsed() < Duration::from_secs(60), "{kind}");
        assert_eq!(write(&e, remote, src.sge(0, 1)), WcStatus::Success);
    }
    (peer, e, src, remote)
}

#[test]
fn shared_memory_is_mapped_and_holds_what_was_written() {
    let _turn = turn();
    for (kind, name) in [("shared", "anyverbs-test-shared"), ("shared buffer", "anyverbs-buffer")] {
        let (mut peer, e, src, remote) = mapped_peer(kind, name);
        let dst = Buffer::new(&e.pd, SIZE);
        assert_eq!(shared_like_the_region(), usize::from(is_on()));
        let ways = exercise(&e, &src, &dst, remote);
        assert_eq!(ways, if is_on() { [8, 8, 0] } else { [0, 0, ways[2]] });
        src.write(0, &pattern(SIZE, 5));
        assert_eq!(write(&e, remote, src.sge(0, SIZE)), WcStatus::Success);
        peer.say("holds 5");
        assert_eq!(peer.hear(), "@ true");
        // The owner takes it back.
        peer.say("deregister");
        assert_eq!(peer.hear(), "@ done");
        wait_until("it stays mapped", || !is_mapped(name));
        src.write(0, &pattern(SIZE, 6));
        assert_eq!(write(&e, remote, src.sge(0, SIZE)), WcStatus::RemAccessErr);
        peer.say("holds 5");
        assert_eq!(peer.hear(), "@ true");
    }
}

#[test]
fn access_to_truncated_memory_is_an_error() {
    let _turn = turn();
    let (mut peer, e, src, remote) = mapped_peer("shared", "anyverbs-test-shared");
    peer.say("shrink");
    assert_eq!(peer.hear(), "@ done");
    assert_eq!(write(&e, remote, src.sge(0, SIZE)), WcStatus::RemAccessErr);
    assert_eq!(e.qp.state().unwrap(), QpState::Err);
}

#[test]
fn mappings_end_with_their_process() {
    let _turn = turn();
    let (peer, e, src, remote) = mapped_peer("shared", "anyverbs-test-shared");
    peer.signal(libc::SIGKILL);
    wait_until("it is written on", || write(&e, remote, src.sge(0, SIZE)) != WcStatus::Success);
    wait_until("it stays mapped", || !is_mapped("anyverbs-test-shared"));
    assert_eq!(e.qp.state().unwrap(), QpState::Err);
}

#[test]
fn a_private_region_is_never_mapped() {
    let _turn = turn();
    let mut peer = Peer::spawn("rc direct private", &[]);
    let e = Endpoint::new(QpType::Rc);
    let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
    let (_, remote) = peer.connect(&e, &src);
    for _ in 0..3 {
        exercise(&e, &src, &dst, remote);
    }
    assert_eq!(shared_like_the_region(), 0);
    let copied = e.context.counters().unwrap().read(Counter::ShmDirectWrites);
    assert!(copied > 0 || !is_on());
}

/// The memory that a peer offers by its role.
pub(crate) fn offered(role: &str, e: &Endpoint, len: usize) -> Option<Buffer> {
    let bytes = match role.split_once("direct shared")?.1.trim() {
        "buffer" => {
            let buf = e.pd.alloc_buf(len as u64).unwrap();
            let bytes = buf.as_ptr();
            std::mem::forget(buf);
            bytes
        }
        _ => share(len),
    };
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    // SAFETY: mapped for ever, and touched by raw pointer only.
    Some(unsafe { Buffer::of(&e.pd, bytes, len, all) })
}

/// A file in memory that nothing unmaps or closes.
fn share(len: usize) -> *mut u8 {
    // SAFETY: a C string, and a new mapping at a place of the kernel's choice.
    unsafe {
        let fd = libc::memfd_create(NAME.as_ptr(), 0);
        assert!(fd >= 0);
        assert_eq!(libc::ftruncate(fd, len as i64), 0);
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let at = libc::mmap(std::ptr::null_mut(), len, rights, libc::MAP_SHARED, fd, 0);
        assert_ne!(at, libc::MAP_FAILED);
        FILE.store(fd, std::sync::atomic::Ordering::Relaxed);
        at.cast()
    }
}

static FILE: std::sync::atomic::AtomicI32 = std::sync::atomic::AtomicI32::new(-1);

/// The peer's part, after it has connected: carries out commands.
pub(crate) fn serve(buffer: &Buffer) {
    for line in std::io::stdin().lines() {
        match line.unwrap().as_str() {
            "deregister" => {
                buffer.mr.destroy().unwrap();
                println!("@ done");
            }
            "shrink" => {
                let fd = FILE.load(std::sync::atomic::Ordering::Relaxed);
                // SAFETY: a call with integers; nothing but the device touches the memory from here on.
                assert_eq!(unsafe { libc::ftruncate(fd, 0) }, 0);
                println!("@ done");
            }
            "holds 5" => println!("@ {}", buffer.read(0, SIZE) == pattern(SIZE, 5)),
            other => panic!("{other}"),
        }
    }
}

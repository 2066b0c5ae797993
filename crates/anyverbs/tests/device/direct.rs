//! One-sided operations between processes without a message: their effects, their limits, and their end. The peer is
//! this test binary (`same_host::peer`).

use anyverbs_testing::Stopwatch;
use std::time::{Duration, Instant};

use anyverbs::*;
use anyverbs_proto::counters::Counter;

use crate::endpoint::*;
use crate::same_host::{OFFERED, Peer, SIZE, is_on, turn};

fn counted(e: &Endpoint, counter: Counter) -> u64 {
    e.context.counters().unwrap().read(counter)
}

/// WRITEs, READs, and packets sent by the ring.
pub(crate) fn used(e: &Endpoint) -> [u64; 3] {
    [Counter::ShmDirectWrites, Counter::ShmDirectReads, Counter::ShmSentPkts]
        .map(|counter| counted(e, counter))
}

fn status(e: &Endpoint) -> WcStatus {
    e.poll(1)[0].status
}

/// A WRITE and a READ of each length, whole and right; how often each way was used.
pub(crate) fn exercise(e: &Endpoint, src: &Buffer, dst: &Buffer, remote: RemoteAddr) -> [u64; 3] {
    let before = used(e);
    for (i, len) in [1, 63, 64, 65, 4095, 4097, 70_000, SIZE - 3].into_iter().enumerate() {
        let data = pattern(len, i as u8);
        src.write(3, &data);
        let at = RemoteAddr { va: remote.va + 3, ..remote };
        let halves = |b: &Buffer| [b.sge(3, len / 2), b.sge(3 + len / 2, len - len / 2)];
        e.send(1, SendOp::Write(at), &halves(src));
        e.send(2, SendOp::Read(at), &halves(dst));
        assert!(e.poll(2).iter().all(|wc| wc.status == WcStatus::Success), "{len} bytes");
        assert!(dst.read(3, len) == data, "{len} bytes");
    }
    let after = used(e);
    std::array::from_fn(|i| after[i] - before[i])
}

/// WRITEs one by one, until one needs no message. The first are messages: the peer has to answer before the channel is
/// there.
fn write_until_direct(e: &Endpoint, remote: RemoteAddr, sge: Sge) {
    let unused = used(e);
    let begin = Instant::now();
    while is_on() && used(e)[0] == unused[0] {
        assert!(begin.elapsed() < Duration::from_secs(60), "no WRITE goes without a message");
        e.send(0, SendOp::Write(remote), &[sge]);
        assert_eq!(status(e), WcStatus::Success);
    }
}

#[test]
fn writes_and_reads_need_no_message() {
    let _turn = turn();
    for (role, direct) in [("rc", "1"), ("uc", "1"), ("rc", "0")] {
        let mut peer = Peer::spawn(role, &[("ANYVERBS_DIRECT", direct)]);
        let e = Endpoint::new(if role == "uc" { QpType::Uc } else { QpType::Rc });
        let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
        let (_, remote) = peer.connect(&e, &src);
        if role == "uc" {
            let before = used(&e);
            // Without keys, since it is inline.
            let wr = SendWr {
                wr_id: 1,
                op: SendOp::Write(remote),
                flags: SendFlags::SIGNALED | SendFlags::INLINE,
                sges: &[Sge { lkey: 0, ..src.sge(0, 40) }],
                ud: None,
                xrc_srqn: 0,
            };
            e.qp.post_send(&[wr]).unwrap();
            assert_eq!(status(&e), WcStatus::Success);
            // It is unknown when the channel is there. Before that it is a message.
            assert!(used(&e)[0] - before[0] <= u64::from(is_on()));
            continue;
        }
        if direct == "1" {
            write_until_direct(&e, remote, src.sge(0, 1));
        }
        let bytes = counted(&e, Counter::SentBytes);
        let [writes, reads, packets] = exercise(&e, &src, &dst, remote);
        if is_on() && direct == "1" {
            assert_eq!([writes, reads, packets], [8, 8, 0]);
        } else {
            assert_eq!([writes, reads], [0, 0]);
        }
        assert!(counted(&e, Counter::SentBytes) - bytes >= SIZE as u64);
        // Operations other than WRITE and READ are messages, and order is kept across.
        for add in 0..100 {
            e.send(3, SendOp::FetchAdd { at: remote, add }, &[dst.sge(0, 8)]);
            src.write(8, &[add as u8]);
            let at = RemoteAddr { va: remote.va + 8, ..remote };
            e.send(4, SendOp::Write(at), &[src.sge(8, 1)]);
            e.send(5, SendOp::Read(at), &[dst.sge(8, 1)]);
            assert!(e.poll(3).iter().all(|wc| wc.status == WcStatus::Success));
            assert_eq!(dst.read(8, 1), [add as u8]);
        }
    }
}

#[test]
fn a_process_that_wants_no_copies_makes_none() {
    let name = "direct::a_process_that_wants_no_copies_makes_none";
    anyverbs_testing::in_own_process(name, || {
        // SAFETY: before the device is opened, and by the only thread that runs a test.
        unsafe { std::env::set_var("ANYVERBS_DIRECT", "0") };
        let mut peer = Peer::spawn("rc", &[("ANYVERBS_DIRECT", "1")]);
        let e = Endpoint::new(QpType::Rc);
        let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
        let (_, remote) = peer.connect(&e, &src);
        // The processes know each other after the first of these.
        let used = [(); 3].map(|()| exercise(&e, &src, &dst, remote));
        assert!(used.iter().all(|[writes, reads, _]| [*writes, *reads] == [0, 0]), "{used:?}");
    });
}

/// Every fault shows as it does without.
#[test]
fn forbidden_operations_end_as_they_would_by_messages() {
    let _turn = turn();
    let faults = ["key", "range", "pd", "rights", "qp rights", "local key", "local key of a SEND"];
    for fault in faults.into_iter().chain(["unmapped", "protected"]) {
        let mut peer = Peer::spawn(&format!("rc direct {fault}"), &[]);
        let e = Endpoint::new(QpType::Rc);
        let src = Buffer::new(&e.pd, SIZE);
        let (_, mut remote) = peer.connect(&e, &src);
        let mut sge = src.sge(0, 16);
        match fault {
            "key" => remote.rkey ^= 1,
            "range" => remote.va -= 1,
            "local key" | "local key of a SEND" => sge.lkey ^= 1,
            _ => {}
        }
        let before = used(&e);
        let is_send = fault.ends_with("SEND");
        e.send(7, if is_send { SendOp::Send } else { SendOp::Write(remote) }, &[sge]);
        let expected = match fault {
            "local key" | "local key of a SEND" => WcStatus::LocProtErr,
            "qp rights" => WcStatus::RemInvReqErr,
            _ => WcStatus::RemAccessErr,
        };
        assert_eq!(status(&e), expected, "{fault}");
        assert_eq!(e.qp.state().unwrap(), QpState::Err);
        assert_eq!(used(&e)[0], before[0], "{fault}");
        assert!(!is_send || used(&e) == before, "nothing was sent");
        if !fault.starts_with("local key") {
            peer.say("state");
            assert_eq!(peer.hear(), "@ Err", "{fault}");
        }
    }
}

/// A region that was admitted many times is checked each time.
#[test]
fn changes_between_operations_show_at_the_next() {
    let _turn = turn();
    let by_peer = ["region", "rights", "no rights", "address", "address and back"];
    let by_us = ["beyond", "before", "key", "much", "other address", "other address and back"];
    for change in by_peer.into_iter().chain(by_us) {
        let mut peer = Peer::spawn("rc direct change", &[]);
        let e = Endpoint::new(QpType::Rc);
        let buffer = Buffer::new(&e.pd, SIZE);
        let (_, remote) = peer.connect(&e, &buffer);
        let done = |op, len| {
            e.send(1, op, &[buffer.sge(0, len)]);
            status(&e)
        };
        for _ in 0..100 {
            assert_eq!(done(SendOp::Write(remote), 8), WcStatus::Success);
            assert_eq!(done(SendOp::Read(remote), 8), WcStatus::Success);
        }
        let before = used(&e);
        assert_eq!(done(SendOp::Write(remote), 8), WcStatus::Success);
        assert_eq!(used(&e)[0] - before[0], u64::from(is_on()), "{change}");
        let mut at = remote;
        match change {
            "beyond" => at.va += OFFERED as u64 - 7,
            "before" => at.va -= 1,
            "key" => at.rkey ^= 1,
            "much" => at.va = at.va.wrapping_add(u64::MAX / 2),
            "other address" => move_peer(&e, &[ELSEWHERE]),
            "other address and back" => move_peer(&e, &[ELSEWHERE, e.address().gid]),
            _ => {
                peer.say(change);
                assert_eq!(peer.hear(), "@ changed");
            }
        }
        if change.starts_with("other address") {
            let ready = QpAttr { state: QpState::Rts, ..QpAttr::default() };
            e.qp.modify(&ready, QpAttrMask::STATE).unwrap();
        }
        if change == "rights" || change.ends_with("and back") {
            // The rights or the address went, and came back.
            assert_eq!(done(SendOp::Write(at), 8), WcStatus::Success);
            continue;
        }
        if change == "no rights" {
            assert_eq!(done(SendOp::Read(at), 8), WcStatus::Success);
        }
        let before = used(&e);
        let refused = done(SendOp::Write(at), 8);
        let expected = match change {
            "no rights" => WcStatus::RemInvReqErr,
            // The peer drops packets that come from another address, or go to one.
            "address" | "other address" => WcStatus::RetryExcErr,
            _ => WcStatus::RemAccessErr,
        };
        assert_eq!(refused, expected, "{change}");
        assert_eq!(used(&e)[0], before[0], "{change}");
    }
}

#[test]
fn where_the_kernel_forbids_it_the_ring_carries_the_bytes() {
    let _turn = turn();
    let mut peer = Peer::spawn("rc direct refused", &[]);
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, SIZE);
    peer.connect(&e, &buffer);
    assert_eq!(peer.hear(), "@ [0, 0] true");
    assert!(buffer.read(0, SIZE / 2) == pattern(SIZE / 2, 9));
}

/// A page that its owner has made inaccessible is not read, at any length.
#[test]
fn an_inaccessible_page_is_not_read() {
    let _turn = turn();
    for len in [1, 64, 1024, 1025, 4096] {
        let mut peer = Peer::spawn("rc direct protected", &[]);
        let e = Endpoint::new(QpType::Rc);
        let buffer = Buffer::new(&e.pd, SIZE);
        let (_, remote) = peer.connect(&e, &buffer);
        // Its last bytes are accessible: by these the first copy without a message is awaited.
        let begin = Instant::now();
        while is_on() && used(&e)[1] == 0 {
            assert!(begin.elapsed() < Duration::from_secs(60));
            let end = RemoteAddr { va: remote.va + OFFERED as u64 - 8, ..remote };
            e.send(0, SendOp::Read(end), &[buffer.sge(0, 8)]);
            assert_eq!(status(&e), WcStatus::Success);
        }
        let inside = RemoteAddr { va: remote.va + 4096, ..remote };
        e.send(1, SendOp::Read(inside), &[buffer.sge(0, len)]);
        assert_eq!(status(&e), WcStatus::RemAccessErr, "{len} bytes");
    }
}

/// A process that gets no memory to share is reached as if it were on another host.
#[test]
fn without_shared_memory_packets_go_by_udp() {
    let _turn = turn();
    let mut peer = Peer::spawn("rc no memfd", &[]);
    let e = Endpoint::new(QpType::Rc);
    let (src, dst) = (Buffer::new(&e.pd, SIZE), Buffer::new(&e.pd, SIZE));
    let (_, remote) = peer.connect(&e, &src);
    assert_eq!(exercise(&e, &src, &dst, remote), [0, 0, 0]);
}

/// When the program has taken its memory back, no peer writes there any more.
#[test]
fn nothing_is_written_after_it_was_taken_back() {
    let _turn = turn();
    for round in 0..12 {
        let mut peer = Peer::spawn("rc flood", &[]);
        let (e, buffer) = flooded(&mut peer);
        if round % 4 == 3 {
            peer.signal(libc::SIGKILL);
        }
        let begin = Stopwatch::start();
        match round % 4 {
            1 => {
                let attr = QpAttr { state: QpState::Err, ..QpAttr::default() };
                e.qp.modify(&attr, QpAttrMask::STATE).unwrap();
            }
            2 => e.qp.destroy().unwrap(),
            _ => buffer.mr.destroy().unwrap(),
        }
        let took = begin.elapsed();
        buffer.write(0, &vec![0; SIZE]);
        assert!(took < Duration::from_millis(2500), "{took:?}");
        std::thread::sleep(Duration::from_millis(5));
        assert!(buffer.read(0, SIZE).iter().all(|&byte| byte == 0), "round {round}");
    }
}

/// Neither does a peer that was stopped, in the middle of a copy or not, and goes on.
#[test]
fn a_stopped_peer_writes_nothing_after_it_goes_on() {
    let _turn = turn();
    for round in 0..8 {
        let mut peer = Peer::spawn("rc flood", &[]);
        let (e, buffer) = flooded(&mut peer);
        std::thread::sleep(Duration::from_micros(137 * round));
        peer.stop();
        let begin = Instant::now();
        std::thread::scope(|scope| {
            let ending = scope.spawn(|| {
                buffer.mr.destroy().unwrap();
                buffer.write(0, &vec![0; SIZE]);
            });
            // A peer that stands in a copy is waited for.
            while !ending.is_finished() && begin.elapsed() < Duration::from_millis(300) {
                std::thread::sleep(Duration::from_millis(1));
            }
            peer.signal(libc::SIGCONT);
        });
        std::thread::sleep(Duration::from_millis(20));
        assert!(buffer.read(0, SIZE).iter().all(|&byte| byte == 0), "round {round}");
        drop(e);
    }
}

/// Two processes write to each other all the time and take their memory back in the same moment. Neither waits for the
/// other's copies for ever, and neither is written to afterwards.
#[test]
fn processes_take_memory_back_towards_each_other() {
    let _turn = turn();
    for round in 0..8 {
        let mut peer = Peer::spawn("rc direct mutual", &[]);
        let e = Endpoint::new(QpType::Rc);
        let buffer = Buffer::new(&e.pd, SIZE);
        let (_, remote) = peer.connect(&e, &buffer);
        take_back_while_writing(&e, &buffer, remote, || {
            assert_eq!(peer.hear(), "@ writes");
            peer.say("now");
            std::thread::sleep(Duration::from_micros(40 * round));
        });
        assert_eq!(peer.hear(), "@ kept");
    }
}

/// Writes to `remote` without a pause until that fails. Takes `buffer`, which the peer writes to as well, back when
/// `agree` returns.
fn take_back_while_writing(
    e: &Endpoint,
    buffer: &Buffer,
    remote: RemoteAddr,
    agree: impl FnOnce(),
) {
    let source = Buffer::new(&e.pd, SIZE);
    source.write(0, &vec![0xaa; SIZE]);
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            loop {
                e.send(0, SendOp::Write(remote), &[source.sge(0, SIZE)]);
                if status(e) != WcStatus::Success {
                    break;
                }
            }
        });
        let begin = Instant::now();
        while buffer.read(SIZE - 1, 1) != [0xaa] {
            assert!(begin.elapsed() < Duration::from_secs(60));
        }
        agree();
        let begin = Stopwatch::start();
        buffer.mr.destroy().unwrap();
        let took = begin.elapsed();
        buffer.write(0, &vec![0; SIZE]);
        assert!(took < Duration::from_millis(2500), "{took:?}");
        writing.join().unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(buffer.read(0, SIZE).iter().all(|&byte| byte == 0));
    });
}

/// An endpoint with memory that a peer writes all the time.
fn flooded(peer: &mut Peer) -> (Endpoint, Buffer) {
    let e = Endpoint::new(QpType::Rc);
    let buffer = Buffer::new(&e.pd, SIZE);
    peer.connect(&e, &buffer);
    let begin = Instant::now();
    while buffer.read(SIZE - 1, 1) != [0xaa] {
        assert!(begin.elapsed() < Duration::from_secs(60));
    }
    (e, buffer)
}

/// The peer's part, after it has connected.
pub(crate) fn serve(role: &str, e: &Endpoint, buffer: &Buffer, remote: RemoteAddr) {
    if role.contains("shared") {
        return crate::mapped::serve(buffer);
    }
    if role.ends_with("refused") {
        // A container's filter does this.
        forbid([libc::SYS_process_vm_readv, libc::SYS_process_vm_writev]);
        buffer.write(0, &pattern(SIZE / 2, 9));
        e.send(1, SendOp::Write(remote), &[buffer.sge(0, SIZE / 2)]);
        e.send(2, SendOp::Read(remote), &[buffer.sge(SIZE / 2, SIZE / 2)]);
        assert!(e.poll(2).iter().all(|wc| wc.status == WcStatus::Success));
        let same = buffer.read(SIZE / 2, SIZE / 2) == pattern(SIZE / 2, 9);
        println!("@ {:?} {same}", &used(e)[..2]);
        return;
    }
    let mut line = String::new();
    if role.ends_with("mutual") {
        take_back_while_writing(e, buffer, remote, || {
            println!("@ writes");
            std::io::stdin().read_line(&mut line).unwrap();
        });
        return println!("@ kept");
    }
    std::io::stdin().read_line(&mut line).unwrap();
    if role.ends_with("change") {
        let permit = |access| {
            let attr = QpAttr { access, ..QpAttr::default() };
            e.qp.modify(&attr, QpAttrMask::ACCESS_FLAGS).unwrap();
        };
        let read = Access::REMOTE_READ;
        match line.trim() {
            "region" => buffer.mr.destroy().unwrap(),
            "no rights" => permit(read),
            "rights" => [read, read | Access::REMOTE_WRITE].into_iter().for_each(permit),
            "address" => move_peer(e, &[ELSEWHERE]),
            // Both ends have the same address.
            "address and back" => move_peer(e, &[ELSEWHERE, e.address().gid]),
            _ => return,
        }
        println!("@ changed");
        line.clear();
        std::io::stdin().read_line(&mut line).unwrap();
        return;
    }
    let begin = Instant::now();
    while e.qp.state().unwrap() != QpState::Err && begin.elapsed() < Duration::from_secs(60) {
        std::thread::yield_now();
    }
    println!("@ {:?}", e.qp.state().unwrap());
}

/// An address of this host that no test uses.
const ELSEWHERE: Gid = Gid(std::net::Ipv4Addr::new(127, 0, 0, 2).to_ipv6_mapped().octets());

/// Says in SQD that the peer has these addresses, one after the other.
fn move_peer(e: &Endpoint, addresses: &[Gid]) {
    let drained = QpAttr { state: QpState::Sqd, ..QpAttr::default() };
    e.qp.modify(&drained, QpAttrMask::STATE).unwrap();
    for &gid in addresses {
        let av = e.av(Address { gid, ..e.address() });
        e.qp.modify(&QpAttr { av, ..QpAttr::default() }, QpAttrMask::AV).unwrap();
    }
}

/// The memory that a peer offers, with the fault of its role.
pub(crate) fn offered(role: &str, e: &Endpoint, len: usize) -> (Option<Pd>, Buffer) {
    if let Some(buffer) = crate::mapped::offered(role, e, len) {
        return (None, buffer);
    }
    let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
    match role.split(" direct ").nth(1) {
        Some("pd") => {
            let pd = e.context.alloc_pd().unwrap();
            let buffer = Buffer::new(&pd, len);
            (Some(pd), buffer)
        }
        Some("rights") => {
            (None, Buffer::with_access(&e.pd, len, all.difference(Access::REMOTE_WRITE)))
        }
        Some(fault @ ("unmapped" | "protected")) => {
            let buffer = Buffer::new(&e.pd, len);
            let page = buffer.addr().next_multiple_of(4096);
            let (at, len) = ((page - 4096) as *mut libc::c_void, len - 8192);
            // SAFETY: pages of leaked memory, which only the device touches from here on.
            unsafe {
                if fault == "protected" {
                    assert_eq!(libc::mprotect(at, len, libc::PROT_NONE), 0);
                } else {
                    // It has no memory behind it, but the addresses are taken: another mapping of this process would
                    // soon be there.
                    let file = libc::memfd_create(c"empty".as_ptr(), libc::MFD_CLOEXEC);
                    let rights = libc::PROT_READ | libc::PROT_WRITE;
                    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED;
                    assert_eq!(libc::mmap(at, len, rights, flags, file, 0), at);
                }
            }
            (None, buffer)
        }
        _ => (None, Buffer::new(&e.pd, len)),
    }
}

/// Two system calls fail with `EPERM` from now on, in all threads.
pub(crate) fn forbid(calls: [libc::c_long; 2]) {
    use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, sock_filter};
    let statement = |code: u32, k: u32| sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let unless = |call: libc::c_long, skip: u8| sock_filter {
        code: (BPF_JMP | BPF_JEQ | BPF_K) as u16,
        jt: skip,
        jf: 0,
        k: call as u32,
    };
    let mut program = [
        statement(BPF_LD | BPF_W | BPF_ABS, 0),
        unless(calls[0], 2),
        unless(calls[1], 1),
        statement(BPF_RET | BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(BPF_RET | BPF_K, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: a live program; it concerns this process alone.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_SET_MODE_FILTER;
        let flags = libc::SECCOMP_FILTER_FLAG_TSYNC;
        assert_eq!(libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program), 0);
    }
}

#[test]
fn a_write_done_at_once_may_overrun_its_cq() {
    let _turn = turn();
    let mut peer = Peer::spawn("rc", &[]);
    let e = Endpoint::with(QpType::Rc, CAP, 2);
    let buffer = Buffer::new(&e.pd, SIZE);
    let (_, remote) = peer.connect(&e, &buffer);
    write_until_direct(&e, remote, buffer.sge(0, 8));
    for wr_id in 2..5 {
        let (op, flags) = (SendOp::Write(remote), SendFlags::SIGNALED);
        let is_done = e.qp.post_short(wr_id, op, flags, buffer.sge(0, 8));
        assert_eq!(is_done, is_on(), "{wr_id}");
        if !is_done {
            e.send(wr_id, op, &[buffer.sge(0, 8)]);
        }
    }
    let begin = Instant::now();
    while e.qp.state().unwrap() != QpState::Err {
        assert!(begin.elapsed() < Duration::from_secs(60), "nobody hears of the overrun");
        std::thread::yield_now();
    }
}

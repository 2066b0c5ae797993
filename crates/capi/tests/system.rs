//! The Rust API on the system's libibverbs (feature `system`), which is this one here: the same operations as on the device of the
//! process.
#![expect(clippy::unwrap_used, reason = "a test")]

use std::path::PathBuf;
use std::pin::pin;
use std::process::Command;
use std::task::{Context as Task, Poll, Waker};
use std::time::Duration;

use anyverbs::error::{CqError, CreateError, PostError, RegisterError};
use anyverbs::prelude::*;
use anyverbs::system::{self, Device};
use anyverbs::{AllocError, Cause, PostRecvError, PostSendError, WaitError, WcFlags};
use anyverbs_testing::isolate;

const ROLE: &str = "ANYVERBS_TEST_ROLE";
const SOON: Duration = Duration::from_secs(60);

fn wait<V: Verbs>(device: &V, cq: &V::Cq) -> Result<Wc, WaitError> {
    let mut completion = pin!(device.completion(cq, SOON));
    loop {
        if let Poll::Ready(wc) = completion.as_mut().poll(&mut Task::from_waker(Waker::noop())) {
            return wc;
        }
    }
}

/// Two queue pairs of a type, the first one's completion queue, and the second one's.
fn pair<V: Verbs>(device: &V, pd: &V::Pd, qp_type: QpType) -> ([V::Qp; 2], [V::Cq; 2]) {
    let cqs = [(); 2].map(|()| device.create_default_cq(16).unwrap());
    let qps = [0, 1].map(|side| device.create_default_qp(pd, &cqs[side], qp_type).unwrap());
    (qps, cqs)
}

fn operations(device: &impl Verbs) {
    let pd = device.alloc_pd().unwrap();
    let ([a, b], [cq_a, cq_b]) = pair(device, &pd, QpType::Rc);
    let (of_a, of_b) = (device.endpoint(&a).unwrap(), device.endpoint(&b).unwrap());
    device.connect(&a, &of_a, &of_b).unwrap();
    device.connect(&b, &of_b, &of_a).unwrap();
    let rights =
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    let memory = device.alloc(&pd, 4096, rights).unwrap();
    let (own, peers) = (memory.slice(..64), memory.slice(1024..1088));
    let succeeds = |opcode| {
        let wc = wait(device, &cq_a).unwrap();
        assert_eq!((wc.wr_id, wc.opcode, wc.qpn), (7, opcode, of_a.qpn));
    };

    own.write(&[1; 64]);
    b.recv(8, &peers).unwrap();
    let sges = [own.sge()];
    let send = SendOp::SendImm(0x0102_0304);
    let flags = SendFlags::SIGNALED;
    let wr = SendWr { wr_id: 7, op: send, flags, sges: &sges, ud: None, xrc_srqn: 0 };
    a.post_send_wr(&wr).unwrap();
    succeeds(WcOpcode::Send);
    let received = wait(device, &cq_b).unwrap();
    assert_eq!((received.wr_id, received.opcode, received.byte_len), (8, WcOpcode::Recv, 64));
    assert_eq!((received.flags, received.imm), (WcFlags::WITH_IMM, 0x0102_0304));
    assert_eq!(peers.to_vec(), [1; 64]);

    own.write(&[2; 64]);
    a.write(7, &own, &peers.remote()).unwrap();
    succeeds(WcOpcode::RdmaWrite);
    assert_eq!(peers.to_vec(), [2; 64]);
    peers.write(&[3; 64]);
    a.read(7, &own, &peers.remote()).unwrap();
    succeeds(WcOpcode::RdmaRead);
    assert_eq!(own.to_vec(), [3; 64]);

    let (word, old) = (peers.slice(..8), own.slice(..8));
    word.write(&5u64.to_ne_bytes());
    a.fetch_add(7, &old, &word.remote(), 6).unwrap();
    succeeds(WcOpcode::FetchAdd);
    assert_eq!(
        (old.to_vec(), word.to_vec()),
        (5u64.to_ne_bytes().into(), 11u64.to_ne_bytes().into())
    );
    a.compare_swap(7, &old, &word.remote(), 11, 12).unwrap();
    succeeds(WcOpcode::CompSwap);
    assert_eq!(
        (old.to_vec(), word.to_vec()),
        (11u64.to_ne_bytes().into(), 12u64.to_ne_bytes().into())
    );

    datagram(device, &pd);

    // At last, since it ends the connection.
    let wrong = RemoteSlice { rkey: !peers.remote().rkey, ..peers.remote() };
    a.read(7, &own, &wrong).unwrap();
    match wait(device, &cq_a) {
        Err(WaitError::Failed(error)) => {
            let expected = (WcStatus::RemAccessErr, Some(Cause::RkeyUnknown));
            assert_eq!((error.status, error.cause()), expected);
            assert!(error.to_string().contains("AV1001"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

fn datagram<V: Verbs>(device: &V, pd: &V::Pd) {
    let ([a, b], [cq_a, cq_b]) = pair(device, pd, QpType::Ud);
    let (of_a, of_b) = (device.endpoint(&a).unwrap(), device.endpoint(&b).unwrap());
    let memory = device.alloc(pd, 256, Access::LOCAL_WRITE).unwrap();
    memory.slice(..5).write(b"hello");
    b.recv(9, &memory.slice(100..)).unwrap();
    a.send_to(7, &memory.slice(..5), device.destination(pd, &of_b).unwrap()).unwrap();
    wait(device, &cq_a).unwrap();
    let received = wait(device, &cq_b).unwrap();
    assert_eq!((received.byte_len, received.src_qpn), (45, of_a.qpn));
    assert!(received.flags.contains(WcFlags::GRH));
    assert_eq!(memory.slice(140..145).to_vec(), b"hello");
}

fn regions_are_refused(device: &impl Verbs) {
    let pd = device.alloc_pd().unwrap();
    match device.alloc(&pd, 0, Access::LOCAL_WRITE).map(|_| ()) {
        Err(AllocError::Memory { len: 0, source: CreateError::Invalid(_) }) => {}
        other => panic!("{other:?}"),
    }
    let refused = |access| match device.alloc(&pd, 64, access).map(|_| ()) {
        Err(AllocError::Register { len: 64, source, .. }) => source,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(Access::REMOTE_WRITE), RegisterError::Access);
    let unknown = Access::from_bits_retain(1 << 30);
    assert_eq!(refused(Access::LOCAL_WRITE | unknown), RegisterError::Unsupported(1 << 30));
    assert!(matches!(
        device.alloc(&pd, usize::MAX, Access::LOCAL_WRITE).map(|_| ()),
        Err(AllocError::Memory { len: usize::MAX, .. })
    ));
}

fn regions_have_addresses_of_the_process(device: &Device) {
    let pd = device.alloc_pd().unwrap();
    let error = device.alloc(&pd, 64, Access::ZERO_BASED).unwrap_err();
    assert!(error.to_string().ends_with("access flags 0x20 are not supported"), "{error}");
    // SAFETY: a number of the system.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    let memory = device.alloc(&pd, 5, Access::LOCAL_WRITE).unwrap();
    assert_eq!((memory.sge().addr % page, memory.len()), (0, 5));
    assert_eq!(memory.to_vec(), [0; 5]);
}

/// Objects of the same device that was opened again.
fn objects_of_another_device_are_refused(device: &Device, other: &Device) {
    let (pd, foreign_pd) = (device.alloc_pd().unwrap(), other.alloc_pd().unwrap());
    let (cq, foreign_cq) =
        (device.create_default_cq(4).unwrap(), other.create_default_cq(4).unwrap());
    let foreign = |what: &str| format!("the {what} is not of this context, or was destroyed");
    let qp = |pd, send_cq, recv_cq| {
        let made = device.create_sized_qp(pd, send_cq, recv_cq, QpCap::default(), QpType::Rc);
        made.map(|_| ()).unwrap_err().to_string()
    };
    assert_eq!(qp(&foreign_pd, &cq, &cq), foreign("protection domain"));
    assert_eq!(qp(&pd, &foreign_cq, &cq), foreign("completion queue"));
    assert_eq!(qp(&pd, &cq, &foreign_cq), foreign("completion queue"));
    let error = device.alloc(&foreign_pd, 64, Access::LOCAL_WRITE).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("cannot allocate 64 bytes: {}", foreign("protection domain"))
    );

    let of_other = other.create_default_qp(&foreign_pd, &foreign_cq, QpType::Rc).unwrap();
    let error = device.endpoint(&of_other).unwrap_err();
    assert_eq!(error.to_string(), foreign("queue pair"));
    let local = other.endpoint(&of_other).unwrap();
    let error = device.connect(&of_other, &local, &local).unwrap_err();
    assert_eq!(error.to_string(), foreign("queue pair"));
    let error = device.destination(&foreign_pd, &local).unwrap_err();
    assert_eq!(error.to_string(), foreign("protection domain"));
    assert_eq!(wait(device, &foreign_cq), Err(WaitError::Cq(CqError::Foreign)));
}

/// Memory and destinations of another protection domain.
fn foreign_objects_are_refused(device: &Device) {
    let [pd, other] = [(); 2].map(|()| device.alloc_pd().unwrap());
    let ([a, b], _) = pair(device, &pd, QpType::Ud);
    let of_b = [&a, &b].map(|qp| device.endpoint(qp).unwrap())[1];
    let [own, foreign] = [&pd, &other].map(|pd| {
        let memory = device.alloc(pd, 64, Access::LOCAL_WRITE).unwrap();
        (memory, device.destination(pd, &of_b).unwrap())
    });
    assert_eq!(a.send_to(1, &own.0, foreign.1), Err(PostError::Foreign));
    assert_eq!(a.send_to(1, &foreign.0, own.1), Err(PostError::Foreign));
    assert_eq!(a.recv(1, &foreign.0), Err(PostError::Foreign));
    a.send_to(1, &own.0, own.1).unwrap();
    let wr = SendWr {
        wr_id: 1,
        op: SendOp::LocalInv(1),
        flags: SendFlags::SIGNALED,
        sges: &[],
        ud: None,
        xrc_srqn: 0,
    };
    assert_eq!(a.post_send_wr(&wr), Err(PostError::System(95)), "EOPNOTSUPP");
    let cap = QpCap { max_send_wr: u32::MAX, ..QpCap::default() };
    let cq = device.create_default_cq(4).unwrap();
    let refused = device.create_sized_qp(&pd, &cq, &cq, cap, QpType::Rc).map(|_| ()).unwrap_err();
    assert_eq!(refused.to_string(), "the system refused it: Invalid argument (os error 22)");
}

fn send<'a>(op: SendOp, flags: SendFlags, sges: &'a [Sge]) -> SendWr<'a> {
    SendWr { wr_id: 7, op, flags, sges, ud: None, xrc_srqn: 0 }
}

/// Requests that a provider would follow to addresses of the program's choice.
fn unsafe_requests_are_refused(device: &impl Verbs, is_system: bool) {
    let pd = device.alloc_pd().unwrap();
    let memory = device.alloc(&pd, 256, Access::LOCAL_WRITE).unwrap();
    let refused = |why: PostSendError| Err(PostError::Send(why));

    let ([a, b], _) = pair(device, &pd, QpType::Ud);
    let of_b = [&a, &b].map(|qp| device.endpoint(qp).unwrap())[1];
    assert_eq!(a.send(1, &memory), refused(PostSendError::NoDestination));
    let nowhere = RemoteSlice { va: 0x1000, len: 256, rkey: 1 };
    assert_eq!(a.write(1, &memory, &nowhere), refused(PostSendError::NoDestination));
    let word = memory.slice(..8);
    assert_eq!(a.fetch_add(1, &word, &nowhere, 1), refused(PostSendError::NoDestination));
    let to = Some(device.destination(&pd, &of_b).unwrap());
    if is_system {
        let (sges, write) = ([word.sge()], SendOp::Write(nowhere.addr()));
        let wr = SendWr { ud: to, ..send(write, SendFlags::SIGNALED, &sges) };
        assert_eq!(a.post_send_wr(&wr), Err(PostError::System(95)), "EOPNOTSUPP");
    }

    let ([a, b], [cq_a, cq_b]) = pair(device, &pd, QpType::Rc);
    let (of_a, of_b) = (device.endpoint(&a).unwrap(), device.endpoint(&b).unwrap());
    device.connect(&a, &of_a, &of_b).unwrap();
    device.connect(&b, &of_b, &of_a).unwrap();
    if is_system {
        let wr = SendWr { ud: to, ..send(SendOp::Send, SendFlags::SIGNALED, &[]) };
        assert_eq!(a.post_send_wr(&wr), Err(PostError::System(22)), "EINVAL");
    }
    let inline = |op, sges: &[Sge]| a.post_send_wr(&send(op, SendFlags::INLINE, sges));
    let unmapped = Sge { addr: 0x1000, len: 8, lkey: 0 };
    assert_eq!(inline(SendOp::Send, &[unmapped]), refused(PostSendError::Fault));
    assert_eq!(inline(SendOp::Send, &[word.sge(), unmapped]), refused(PostSendError::Fault));
    let long = memory.slice(..65).sge();
    assert_eq!(inline(SendOp::Send, &[long]), refused(PostSendError::InlineTooLong));
    let read = SendOp::Read(nowhere.addr());
    assert_eq!(inline(read, &[word.sge()]), refused(PostSendError::InlineRead));
    let five = [memory.slice(..1).sge(); 5];
    assert_eq!(inline(SendOp::Send, &five), refused(PostSendError::TooManySges));
    let recv = b.post_recv_wr(&RecvWr { wr_id: 1, sges: &five });
    assert_eq!(recv, Err(PostError::Recv(PostRecvError::TooManySges)));

    // The bytes are those of the post, and need no registration.
    b.recv(8, &memory.slice(128..)).unwrap();
    let mut bytes = *b"hello, world";
    let [first, second] = [0, 7].map(|at| Sge { addr: &raw mut bytes[at] as u64, len: 5, lkey: 0 });
    inline(SendOp::Send, &[first, second]).unwrap();
    bytes.fill(0);
    wait(device, &cq_a).unwrap();
    assert_eq!(wait(device, &cq_b).unwrap().byte_len, 10);
    assert_eq!(memory.slice(128..138).to_vec(), b"helloworld");
}

/// This library under the name of the system's. Cargo does not build a cdylib for the tests of its package.
fn libraries() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    // <target>/<profile>/deps/<test>
    let target = exe.ancestors().nth(3).unwrap();
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["build", "--quiet", "--manifest-path"])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .arg("--target-dir")
        .arg(target)
        .status();
    assert!(status.unwrap().success());
    let dir = target.join("debug/capi-system");
    std::fs::create_dir_all(&dir).unwrap();
    // An earlier run may have made it.
    let _ = std::os::unix::fs::symlink("../libanyverbs_capi.so", dir.join("libibverbs.so.1"));
    dir
}

#[test]
fn operations_are_those_of_the_device_of_the_process() {
    let libraries = libraries();
    for role in ["own", "system"] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"]).env(ROLE, role);
        let output = isolate(&mut command).env("LD_LIBRARY_PATH", &libraries).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("@ done"), "{role}: {output:?}");
    }
}

#[test]
fn a_library_that_is_no_libibverbs_is_refused() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("no-libraries");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("libibverbs.so.1"), "nonsense").unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "in_a_role", "--nocapture", "--test-threads=1"]).env(ROLE, "refused");
    let output = isolate(&mut command).env("LD_LIBRARY_PATH", dir).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("@ cannot open libibverbs.so.1: ") && said.contains("@ done"),
        "{output:?}"
    );
}

/// Not a test by itself: the processes of the tests above.
#[test]
fn in_a_role() {
    match std::env::var(ROLE).as_deref() {
        Ok("own") => {
            let context = Context::open(&anyverbs::devices().unwrap()[0].name).unwrap();
            operations(&context);
            unsafe_requests_are_refused(&context, false);
            regions_are_refused(&context);
        }
        Ok("system") => {
            let names = system::devices().unwrap();
            assert_eq!(names, ["anyverbs0"]);
            let error = Device::open("mlx5_9").unwrap_err();
            assert_eq!(error.to_string(), "there is no device \"mlx5_9\"");
            let device = Device::open(&names[0]).unwrap();
            operations(&device);
            unsafe_requests_are_refused(&device, true);
            regions_are_refused(&device);
            regions_have_addresses_of_the_process(&device);
            foreign_objects_are_refused(&device);
            objects_of_another_device_are_refused(&device, &Device::open(&names[0]).unwrap());
        }
        Ok("refused") => println!("@ {}", system::devices().unwrap_err()),
        _ => return,
    }
    println!("@ done");
}

//! A forked child.

use std::fs::File;
use std::io::{Read, Write};
use std::net::Ipv4Addr;
use std::os::fd::FromRawFd;
use std::time::{Duration, Instant};

use anyverbs::error::*;
use anyverbs::*;
use anyverbs_proto::wire::opcode::Operation;
use anyverbs_testing::in_own_process;

use crate::endpoint::*;
use crate::forged::{Forged, counted, forged};

#[test]
fn inherited_objects_refuse_work_and_an_inherited_context_starts_anew() {
    let (a, b) = pair(QpType::Rc);
    let (src, dst) = (Buffer::new(&a.pd, 64), Buffer::new(&b.pd, 64));
    let dm = a.context.alloc_dm(64, 0).unwrap();
    dm.write(0, &[5; 64]).unwrap();
    // SAFETY: the child runs only the code below and exits without returning to the test harness.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let check = |ok: bool, code: i32| {
            if !ok {
                // SAFETY: ends the child.
                unsafe { libc::_exit(code) };
            }
        };
        check(matches!(a.qp.post(), Err(PostError::Forked)), 1);
        check(a.cq.poll(&mut [Wc::default(); 1]) == Err(CqError::Forked), 2);
        check(matches!(a.qp.query(), Err(ModifyObjectError::Forked)), 3);
        check(src.mr.destroy().is_ok() && a.qp.destroy().is_ok() && a.cq.destroy().is_ok(), 4);
        check(a.pd.destroy().is_ok() && a.channel.destroy().is_ok(), 5);
        let pd = b.context.alloc_pd();
        check(pd.is_ok(), 6);
        check(!std::ptr::eq(&raw const pd, std::ptr::null()), 7);
        // The child's own device works.
        let (c, d) = pair(QpType::Rc);
        let (from, to) = (Buffer::new(&c.pd, 64), Buffer::new(&d.pd, 64));
        from.write(0, &[7; 64]);
        c.send(1, SendOp::Write(to.remote(0)), &[from.sge(0, 64)]);
        check(c.poll(1)[0].status == WcStatus::Success, 8);
        check(to.read(0, 64) == [7; 64], 9);
        check(c.qp.qpn().slot() != a.qp.qpn().slot(), 10);
        check(dm.destroy().is_ok() && dm.destroy().is_ok(), 11);
        drop((c, d, from, to));
        // SAFETY: ends the child.
        unsafe { libc::_exit(0) };
    }
    let mut status = 0;
    // SAFETY: waits for our child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    // The parent goes on.
    let mut kept = [0; 64];
    dm.read(0, &mut kept).unwrap();
    assert_eq!(kept, [5; 64]);
    assert_eq!(dm.destroy(), Ok(()));
    src.write(0, &[9; 64]);
    a.send(1, SendOp::Write(dst.remote(0)), &[src.sge(0, 64)]);
    assert_eq!(a.poll(1)[0].status, WcStatus::Success);
    assert_eq!(dst.read(0, 64), [9; 64]);
}

/// Both ends of a pipe.
fn pipe() -> (File, File) {
    let mut ends = [0; 2];
    // SAFETY: room for two descriptors, which are owned once.
    unsafe {
        assert_eq!(libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC), 0);
        (File::from_raw_fd(ends[0]), File::from_raw_fd(ends[1]))
    }
}

/// Starts a process that opens the device, forks a child and ends. Returns its slot. The child lives as long as the file
/// that is returned, too.
fn leave_a_child_behind() -> (u8, File) {
    let ((mut slot, mut say), (mut end, lives)) = (pipe(), pipe());
    // SAFETY: both children run only the code below, and end without returning to the test harness.
    let parent = unsafe { libc::fork() };
    if parent == 0 {
        drop(lives);
        let e = Endpoint::new(QpType::Rc);
        // SAFETY: as above.
        if unsafe { libc::fork() } == 0 {
            let _ = end.read(&mut [0]);
        } else {
            say.write_all(&[e.qp.qpn().slot()]).unwrap();
        }
        // SAFETY: ends this process as a signal would.
        unsafe { libc::_exit(0) };
    }
    let mut number = [0];
    slot.read_exact(&mut number).unwrap();
    let mut status = 0;
    // SAFETY: waits for our child.
    assert_eq!(unsafe { libc::waitpid(parent, &raw mut status, 0) }, parent);
    (number[0], lives)
}

/// The child keeps its parent's slot and sockets, and serves nobody. The next process makes a new store, in which nothing
/// is known of them.
#[test]
fn an_orphaned_child_does_not_deafen_the_next_process() {
    in_own_process("fork::an_orphaned_child_does_not_deafen_the_next_process", || {
        isolate();
        let (slot, _child) = leave_a_child_behind();
        let begin = Instant::now();
        let (a, b) = pair(QpType::Rc);
        // A process that is asked, and does not answer, takes half a second.
        let opened = begin.elapsed();
        assert!(opened < Duration::from_millis(400), "opened in {opened:?}");
        assert_ne!(a.qp.qpn().slot(), slot, "two processes with one slot");
        let counters = a.context.counters().unwrap();
        for _ in 0..8 {
            let before = counters.read(Counter::DropForeign);
            let headers = forged(Operation::SendOnly, &b, Psn::new(100));
            Forged::from(Ipv4Addr::new(127, 0, 0, 2)).send(headers, &[9; 64]);
            counted(&a, Counter::DropForeign, before);
        }
    });
}

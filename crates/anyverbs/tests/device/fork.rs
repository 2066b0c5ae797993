//! A forked child.

use anyverbs::error::*;
use anyverbs::*;

use crate::endpoint::*;

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

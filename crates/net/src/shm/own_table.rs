//! A table of descriptors for a moment, in which there is room though the process has no descriptor left.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use crate::sys::Uncancelled;

/// Runs `f` on a thread with a copy of the process's table of descriptors, in which `spare` is closed. So there is room for
/// one, which no other thread can take. What `f` opens is closed with the copy. None if the system refuses, and `f` did not run,
/// or if `f` panics.
pub(super) fn run<R: Send>(spare: BorrowedFd<'_>, f: impl FnOnce() -> R + Send) -> Option<R> {
    let spare = spare.as_raw_fd() as u32;
    let apart = || {
        let alone = libc::CLOSE_RANGE_UNSHARE;
        // SAFETY: the thread leaves the process's table with this call, and closes the descriptor in its own. That one ends
        // with the thread.
        let left = unsafe { libc::syscall(libc::SYS_close_range, spare, spare, alone) };
        (left == 0).then(f)
    };
    // The end of the thread is waited for.
    let _uncancelled = Uncancelled::new();
    let (mut all, mut old) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // The program's signal handlers do not run on the thread.
    // SAFETY: live sets; the first call fills one, and the second reads it and fills the other.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let done = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, apart);
        thread.ok()?.join().ok()?
    });
    // SAFETY: the set that the call above has filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), ptr::null_mut()) };
    done
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn descriptors_opened_there_are_closed_and_the_spare_stays() {
        let spare = File::open("/dev/null").unwrap();
        let number = spare.as_raw_fd();
        let ino = |file: &File| file.metadata().unwrap().ino();
        let opened = run(spare.as_fd(), || {
            let file = File::open("/dev/zero").unwrap();
            let opened = (ino(&file), file.as_raw_fd());
            std::mem::forget(file);
            opened
        });
        let Some((opened, there)) = opened else {
            return anyverbs_testing::skip("no table of descriptors for one thread here");
        };
        assert!(opened != ino(&spare) && there <= number);
        let at = std::fs::read_link(format!("/proc/self/fd/{number}")).unwrap();
        assert_eq!(at, std::path::Path::new("/dev/null"));
    }
}

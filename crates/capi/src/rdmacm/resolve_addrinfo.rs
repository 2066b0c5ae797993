//! `rdma_resolve_addrinfo`: `rdma_getaddrinfo` behind an event.

use std::{
    ffi::{c_char, c_int},
    io, ptr,
    sync::Arc,
    thread,
};

use anyverbs::cm::{EventKind, EventParam};
use anyverbs_sanitizers::Quiet;

use crate::{
    abi::*,
    errno::{Errno, give},
    rdmacm::{Id, Query, complete, event, id, zero},
};

/// `rdma_resolve_addrinfo`: 0, or -1 with `errno`; an event tells the outcome. A name server is waited for in a thread.
///
/// # Safety
/// As `rdma_getaddrinfo`.
pub(crate) unsafe extern "C" fn rdma_resolve_addrinfo(
    id: *mut rdma_cm_id,
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
) -> c_int {
    zero(
        "rdma_resolve_addrinfo",
        id::find(id).and_then(|id| {
            // SAFETY: the caller's promise.
            let query = unsafe { Query::new(node, service, hints) }?;
            if query.asks_subnet_administrator() {
                return Err(Errno::lacks("RAI_SA asks a subnet administrator, and there is none"));
            }
            let resolver = Arc::clone(&id);
            spawn_quiet(move || resolve(&resolver, &query)).map_err(|error| {
                Errno::because(
                    error.raw_os_error().unwrap_or(libc::EAGAIN),
                    "no thread can be made",
                )
            })?;
            complete(&id)
        }),
    )
}

/// Starts a thread with all signals blocked: they are for the program's threads.
fn spawn_quiet(f: impl FnOnce() + Send + 'static) -> io::Result<()> {
    // SAFETY: all-zero is a valid sigset_t, and the calls get live pointers to such.
    let old = unsafe {
        let mut all: libc::sigset_t = std::mem::zeroed();
        let mut old: libc::sigset_t = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        // The signals of the thread's own faults.
        libc::sigdelset(&raw mut all, libc::SIGSEGV);
        libc::sigdelset(&raw mut all, libc::SIGBUS);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut old);
        old
    };
    let spawned = thread::Builder::new().spawn(|| {
        let _quiet = Quiet::new();
        // Here, and not by the library of Rust: the sanitizers would see that.
        // SAFETY: a C string of at most 15 bytes.
        unsafe { libc::prctl(libc::PR_SET_NAME, c"av-addrinfo".as_ptr()) };
        f();
    });
    // SAFETY: as above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const old, ptr::null_mut()) };
    spawned.map(drop)
}

fn resolve(id: &Id, query: &Query) {
    let (kind, status) = match query.resolve() {
        Ok(found) => {
            id.inner.state.lock().resolved = Some(found);
            (EventKind::AddrinfoResolved, 0)
        }
        Err(failure) => (EventKind::AddrinfoError, -failure.errno().0),
    };
    // Refused if the id was destroyed meanwhile.
    let _ = event::write(id, kind, status, EventParam::None);
}

/// `rdma_query_addrinfo`: 0, or -1 with `errno`; `ENODATA` if nothing was resolved. For `rdma_freeaddrinfo`.
///
/// # Safety
/// `info` is NULL or writable.
pub(crate) unsafe extern "C" fn rdma_query_addrinfo(
    id: *mut rdma_cm_id,
    info: *mut *mut rdma_addrinfo,
) -> c_int {
    zero(
        "rdma_query_addrinfo",
        id::find(id).and_then(|id| {
            if info.is_null() {
                return Err(Errno::NULL);
            }
            let found = id.inner.state.lock().resolved.clone().ok_or(Errno::because(
                libc::ENODATA,
                "rdma_resolve_addrinfo has not answered yet",
            ))?;
            // SAFETY: the caller's promise.
            unsafe { give(info, found.to_c()?) };
            Ok(())
        }),
    )
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    fn is_blocked(signal: c_int) -> bool {
        // SAFETY: all-zero is a valid sigset_t, which the call fills.
        unsafe {
            let mut mask: libc::sigset_t = std::mem::zeroed();
            libc::pthread_sigmask(libc::SIG_BLOCK, ptr::null(), &raw mut mask);
            libc::sigismember(&raw const mask, signal) == 1
        }
    }

    #[test]
    fn the_programs_signals_do_not_meet_the_resolver() {
        let (tell, told) = mpsc::channel();
        let before = is_blocked(libc::SIGUSR1);
        spawn_quiet(move || {
            tell.send((is_blocked(libc::SIGUSR1), is_blocked(libc::SIGSEGV))).unwrap()
        })
        .unwrap();
        assert_eq!(told.recv().unwrap(), (true, false));
        assert_eq!(is_blocked(libc::SIGUSR1), before);
    }
}

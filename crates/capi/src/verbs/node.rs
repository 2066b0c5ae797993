//! Programs that look for the node of the device themselves.
//!
//! Without the launcher's view there is no `/dev/infiniband/uverbs0`. Most programs do not care, and those that only list
//! devices should not hear of it. Some look for the node after they have listed the devices, and pass over a device
//! that has none. That is not to be seen from here. But such a program, or the library of it that asks for the devices,
//! has the beginning of the path in it.

use std::{
    ffi::{c_int, c_void},
    path::Path,
    ptr,
    sync::Once,
};

/// The beginning of the path. Compilers put short texts into the code, eight bytes at a time.
const BEGINNING: &[u8; 8] = b"/dev/inf";

/// The most of an object that is searched: a search of this takes a fraction of a second.
const MOST: usize = 512 << 20;

unsafe extern "C" {
    fn _Unwind_Backtrace(
        each: extern "C" fn(*mut c_void, *mut c_void) -> c_int,
        argument: *mut c_void,
    ) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

/// Where the object begins that has this address.
fn object(address: usize) -> Option<usize> {
    // SAFETY: all-zero is a valid Dl_info, which is writable. Any address may be asked for.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        let found = libc::dladdr(address as *const c_void, &raw mut info) != 0;
        found.then_some(info.dli_fbase as usize)
    }
}

/// The object of the program that called this library.
fn caller() -> Option<usize> {
    struct Search {
        own: Option<usize>,
        found: Option<usize>,
    }
    extern "C" fn each(context: *mut c_void, search: *mut c_void) -> c_int {
        const GO_ON: c_int = 0;
        const STOP: c_int = 5;
        // SAFETY: the context of this call, and the search below.
        let (address, search) = unsafe { (_Unwind_GetIP(context), &mut *search.cast::<Search>()) };
        search.found = object(address).filter(|found| Some(*found) != search.own);
        if search.found.is_some() { STOP } else { GO_ON }
    }
    let mut search = Search { own: object(caller as *const () as usize), found: None };
    // SAFETY: the callback gets a live search, which nobody else touches meanwhile.
    unsafe { _Unwind_Backtrace(each, (&raw mut search).cast()) };
    search.found
}

/// Whether the code or the constants of the object that begins here have these bytes.
fn has(object: usize, wanted: &[u8]) -> bool {
    struct Search<'a> {
        object: usize,
        wanted: &'a [u8],
        found: bool,
    }
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: what the loader tells of an object that stays loaded meanwhile, and the search below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search<'_>>()) };
        // SAFETY: as above.
        let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
        let loaded = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
        let start = |header: &libc::Elf64_Phdr| (info.dlpi_addr + header.p_vaddr) as usize;
        let page = !0xfff;
        if loaded().map(start).min().map(|at| at & page) != Some(search.object & page) {
            return 0;
        }
        let constant =
            loaded().filter(|h| h.p_flags & libc::PF_R != 0 && h.p_flags & libc::PF_W == 0);
        let mut left = MOST;
        for header in constant {
            let len = left.min(header.p_filesz as usize);
            left -= len;
            // SAFETY: the segment is mapped for reading. Nobody writes to it, and the search gets lengths that it has.
            let found = unsafe {
                libc::memmem(
                    start(header) as *const c_void,
                    len,
                    search.wanted.as_ptr().cast(),
                    search.wanted.len(),
                )
            };
            search.found |= !found.is_null();
        }
        1
    }
    let mut search = Search { object, wanted, found: false };
    // SAFETY: as in `caller`.
    unsafe { libc::dl_iterate_phdr(Some(each), ptr::from_mut(&mut search).cast()) };
    search.found
}

/// Says once if the program looks for the node of a device itself and will not find it. Called when devices are listed.
pub(crate) fn look_for_node(index: usize, name: &str) {
    static LOOKED: Once = Once::new();
    LOOKED.call_once(|| {
        let node = format!("/dev/infiniband/uverbs{index}");
        if !Path::new(&node).exists() && caller().is_some_and(|object| has(object, BEGINNING)) {
            tracing::warn!(
                "there is no {node}, and this program looks for it: it may pass over {name}; `anyverbs run` shows it"
            );
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn constants_of_an_object_are_found() {
        let own = object(caller as *const () as usize).unwrap();
        assert!(has(own, b"looks for it: it may pass over"));
        let absent: Vec<u8> = b"looks for it".iter().rev().copied().collect();
        assert!(!has(own, &absent));
        assert!(!has(own + (1 << 40), BEGINNING), "no object begins there");
    }
}

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
    sync::atomic::{AtomicBool, Ordering},
};

/// The beginning of the path. Compilers put short texts into the code, eight bytes at a time.
const BEGINNING: &[u8; 8] = b"/dev/inf";

/// The most of an object that is searched: a search of this takes some tens of milliseconds.
const MOST: usize = 64 << 20;
/// Bytes that are searched at once.
const CHUNK: usize = 64 << 10;

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

/// Where the code and the constants of the object lie that begins here: addresses and lengths.
fn constants(object: usize) -> Vec<(usize, usize)> {
    struct Search {
        object: usize,
        found: Vec<(usize, usize)>,
    }
    unsafe extern "C" fn each(
        info: *mut libc::dl_phdr_info,
        _: usize,
        search: *mut c_void,
    ) -> c_int {
        // SAFETY: what the loader tells of an object that stays loaded meanwhile, and the search below.
        let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
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
        search.found.extend(constant.map(|header| (start(header), header.p_filesz as usize)));
        1
    }
    let mut search = Search { object, found: Vec::new() };
    // SAFETY: as in `caller`.
    unsafe { libc::dl_iterate_phdr(Some(each), ptr::from_mut(&mut search).cast()) };
    search.found
}

/// Whether the code or the constants of the object that begins here have these bytes. A program may have made some of them
/// inaccessible.
fn has(object: usize, wanted: &[u8]) -> bool {
    let (mut chunk, mut left) = (vec![0; CHUNK], MOST);
    for (start, len) in constants(object) {
        let len = len.min(left);
        left -= len;
        // Chunks overlap by what may lie across their border.
        for at in (0..len).step_by(CHUNK - wanted.len()) {
            let part = &mut chunk[..CHUNK.min(len - at)];
            let from = std::ptr::with_exposed_provenance(start + at);
            // SAFETY: the chunk is writable; the copy survives a source that cannot be read.
            let is_read = unsafe { anyverbs::copy_guarded(part.as_mut_ptr(), from, part.len()) };
            // SAFETY: two live slices.
            let found = unsafe {
                let (part_len, len) = (part.len(), wanted.len());
                libc::memmem(part.as_ptr().cast(), part_len, wanted.as_ptr().cast(), len)
            };
            if is_read.is_ok() && !found.is_null() {
                return true;
            }
        }
    }
    false
}

/// Says once if the program looks for the node of a device itself and will not find it. Called when devices are listed.
pub(crate) fn look_for_node(index: usize, name: &str) {
    static LOOKED: AtomicBool = AtomicBool::new(false);
    if !LOOKED.swap(true, Ordering::Relaxed) {
        let node = format!("/dev/infiniband/uverbs{index}");
        if !Path::new(&node).exists() && caller().is_some_and(|object| has(object, BEGINNING)) {
            tracing::warn!(
                "there is no {node}, and this program looks for it: it may pass over {name}; `anyverbs run` shows it"
            );
        }
    }
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

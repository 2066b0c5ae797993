//! Stacks: taken quickly, and given names only when they are shown.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, OsStr, c_int, c_void};
use std::fmt;
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};

use backtrace::BytesOrWideString;
use parking_lot::Mutex;

use crate::map::{Map, Product};
use crate::uncancelled::Uncancelled;

/// Frames that are kept.
const MOST: usize = 48;

/// The return addresses of a call, the innermost first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stack(&'static [usize]);

/// All stacks that were taken, each once. They stay for good, so that work which is posted and polled counts no references. There are
/// as many as ways through the program to its calls.
static STACKS: Mutex<HashSet<&'static [usize], BuildHasherDefault<Product>>> =
    Mutex::new(HashSet::with_hasher(BuildHasherDefault::new()));

/// The process whose threads may wait for [`STACKS`]: the first one that takes a stack. 0 is none yet.
static OWNER: AtomicU32 = AtomicU32::new(0);

/// Whether this process was forked by one that had taken stacks.
fn is_forked() -> bool {
    let own = std::process::id();
    let owner = OWNER.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed);
    owner.is_err_and(|owner| owner != own)
}

/// The threads of this process may wait for [`STACKS`], if none of its parent's holds them.
pub(crate) fn begins_anew() {
    if STACKS.try_lock().is_some() {
        OWNER.store(std::process::id(), Ordering::Relaxed);
    }
}

/// The one stack of these addresses.
fn kept(addresses: Vec<usize>) -> &'static [usize] {
    // In a forked child a thread may hold it that is not there. Such a child has few stacks.
    let stacks = if is_forked() { STACKS.try_lock() } else { Some(STACKS.lock()) };
    let Some(mut stacks) = stacks else { return Box::leak(addresses.into_boxed_slice()) };
    if let Some(same) = stacks.get(&addresses[..]) {
        return same;
    }
    let new: &'static [usize] = Box::leak(addresses.into_boxed_slice());
    stacks.insert(new);
    new
}

/// Stacks whose return addresses stand in the same places of memory.
#[derive(Debug)]
struct Layout {
    /// The places, the innermost first.
    places: Box<[usize]>,
    /// By what stands there.
    stacks: HashMap<Rc<[usize]>, Stack, BuildHasherDefault<Product>>,
    /// The last one. A program that calls from one place needs no other.
    last: (Rc<[usize]>, Stack),
}

impl Layout {
    /// The stack of which the return addresses are in their places.
    ///
    /// # Safety
    /// The places are aligned words of the thread's own stack, above the running function.
    unsafe fn find(&mut self) -> Option<Stack> {
        // SAFETY: the caller's promise.
        let held = |place: &usize| unsafe { (*place as *const usize).read_volatile() };
        if self.places.iter().zip(self.last.0.iter()).all(|(place, last)| held(place) == *last) {
            return Some(self.last.1);
        }
        let mut all = [0; MOST];
        let all = &mut all[..self.places.len()];
        all.iter_mut().zip(&self.places).for_each(|(to, place)| *to = held(place));
        let (key, stack) = self.stacks.get_key_value(&*all)?;
        self.last = (Rc::clone(key), *stack);
        Some(*stack)
    }
}

/// The stacks that a thread has taken.
#[derive(Debug)]
struct Cache {
    /// By the address of a variable of [`Stack::here`].
    layouts: Map<usize, Vec<Layout>>,
    /// How many stacks there are in all.
    len: usize,
    /// The memory of the thread's stack.
    memory: Range<usize>,
}

/// Stacks that a thread remembers. One takes up to a kilobyte.
const MOST_KNOWN: usize = 2048;

thread_local!(static CACHE: RefCell<Option<Cache>> = const { RefCell::new(None) });

/// Makes the thread's cache, whose destructor the C library notes.
pub(crate) fn make_cache() {
    // A thread that ends has none any more.
    let _ = CACHE.try_with(|_| ());
}

impl Cache {
    fn new() -> Self {
        Self { layouts: Map::default(), len: 0, memory: own_stack() }
    }

    /// The stack from an earlier time, if all return addresses are where they were. Where the first stands follows from `top`. Each
    /// one tells the compiler's layout of the next frame, and so where the next one stands.
    fn find(&mut self, top: usize) -> Option<Stack> {
        let layouts = self.layouts.get_mut(&top)?;
        for n in 0..layouts.len() {
            // SAFETY: `insert` has checked the places.
            if let Some(stack) = unsafe { layouts[n].find() } {
                // The next call is likely to be of this layout.
                if n > 0 {
                    layouts.swap(0, n);
                }
                return Some(stack);
            }
        }
        None
    }

    /// Remembers a stack with the places of its return addresses, unless a place is not what it seems.
    fn insert(&mut self, top: usize, returns: &[(usize, usize)], stack: Stack) {
        let is_sound = |&(place, held): &(usize, usize)| {
            let is_own = place > top && self.memory.contains(&top) && self.memory.contains(&place);
            // SAFETY: as in `find`.
            is_own
                && place % align_of::<usize>() == 0
                && held == unsafe { (place as *const usize).read_volatile() }
        };
        if returns.is_empty() || !returns.iter().all(is_sound) {
            return;
        }
        if self.len >= MOST_KNOWN {
            self.layouts.clear();
            self.len = 0;
        }
        let (places, held): (Vec<_>, Vec<_>) = returns.iter().copied().unzip();
        let held: Rc<[usize]> = held.into();
        let layouts = self.layouts.entry(top).or_default();
        let n = layouts.iter().position(|layout| *layout.places == *places).unwrap_or_else(|| {
            let last = (Rc::clone(&held), stack);
            layouts.push(Layout { places: places.into(), stacks: HashMap::default(), last });
            layouts.len() - 1
        });
        layouts[n].stacks.insert(held, stack);
        self.len += 1;
    }
}

/// The memory of this thread's stack. Empty if the system does not tell.
fn own_stack() -> Range<usize> {
    // That of the first thread stands in a file.
    let _uncancelled = Uncancelled::new();
    // SAFETY: the attributes are initialised by the first call and destroyed once; the results are writable.
    unsafe {
        let mut attributes: libc::pthread_attr_t = std::mem::zeroed();
        if libc::pthread_getattr_np(libc::pthread_self(), &raw mut attributes) != 0 {
            return 0..0;
        }
        let (mut start, mut size) = (std::ptr::null_mut(), 0);
        let failed =
            libc::pthread_attr_getstack(&raw const attributes, &raw mut start, &raw mut size);
        libc::pthread_attr_destroy(&raw mut attributes);
        if failed == 0 { start as usize..start as usize + size } else { 0..0 }
    }
}

impl Stack {
    /// The first return addresses in the program, at most so many.
    pub(crate) fn innermost(self, most: usize) -> &'static [usize] {
        let of_program = self.of_program();
        &of_program[..most.min(of_program.len())]
    }

    /// That of the caller. Unwinding takes microseconds, so a stack that was taken before is found again.
    #[inline(never)]
    pub(crate) fn here() -> Self {
        let variable = 0u8;
        let top = (&raw const variable).addr();
        let find = |cache: &RefCell<Option<Cache>>| cache.borrow_mut().as_mut()?.find(top);
        let known = CACHE.try_with(find);
        if let Ok(Some(stack)) = known {
            return stack;
        }
        let (stack, returns) = Self::unwind(top);
        // A thread that ends has no cache any more.
        let _ = CACHE.try_with(|cache| {
            cache.borrow_mut().get_or_insert_with(Cache::new).insert(top, &returns, stack);
        });
        stack
    }

    /// The stack, and the places of the return addresses above `top`.
    fn unwind(top: usize) -> (Self, Vec<(usize, usize)>) {
        let (mut addresses, mut returns) = (Vec::with_capacity(MOST), Vec::with_capacity(MOST));
        backtrace::trace(|frame| {
            let address = frame.ip() as usize;
            if address == 0 {
                return false;
            }
            addresses.push(address);
            let place = (frame.sp() as usize).wrapping_sub(size_of::<usize>());
            if place > top {
                returns.push((place, address));
            }
            addresses.len() < MOST
        });
        (Self(kept(addresses)), returns)
    }

    /// The frames of the program.
    pub(crate) fn frames(self) -> Vec<Frame> {
        self.of_program().iter().flat_map(|address| Frame::at(*address)).collect()
    }

    /// The return addresses in the program. Those in this library, which stand before them, are left out, unless the program has it
    /// inside.
    fn of_program(self) -> &'static [usize] {
        let own = object(Self::here as *const c_void as usize);
        let is_program = own == object(entry());
        let is_own = |address: &usize| !is_program && object(*address) == own;
        let first = self.0.iter().position(|address| !is_own(address));
        &self.0[first.unwrap_or(0)..]
    }
}

/// Where the object begins that has this address.
fn object(address: usize) -> Option<usize> {
    find_object(address).map(|(begin, _)| begin)
}

/// A look for the object that has an address.
struct Search {
    address: usize,
    found: Option<(usize, *const libc::c_char)>,
}

/// The object that has this address: where it begins, and the path by which it was loaded.
fn named_object(address: usize) -> Option<(usize, PathBuf)> {
    let (begin, path) = find_object(address)?;
    // SAFETY: a text of the loader, which lasts as long as the object, whose function is running.
    let path = if path.is_null() { c"" } else { unsafe { CStr::from_ptr(path) } };
    let path = OsStr::from_bytes(path.to_bytes());
    // The program itself has the name by which it was started.
    let started = || std::env::args_os().next().unwrap_or_default();
    Some((begin, if path.is_empty() { started().into() } else { path.into() }))
}

/// The object that has this address: where it begins, and the loader's text for it, which is empty for the program.
///
/// dladdr(3) would wait for a thread in dlopen(3), until the constructors of what that loads have returned. They may wait for a lock
/// that the caller has. This waits for no constructor.
fn find_object(address: usize) -> Option<(usize, *const libc::c_char)> {
    let mut search = Search { address, found: None };
    // SAFETY: the function gets the search, which lives.
    unsafe { libc::dl_iterate_phdr(Some(look_into), (&raw mut search).cast()) };
    search.found
}

/// Ends the search if this object has the address.
///
/// # Safety
/// `info` and its headers are the loader's, and `search` is a [`Search`].
unsafe extern "C" fn look_into(
    info: *mut libc::dl_phdr_info,
    _: libc::size_t,
    search: *mut c_void,
) -> c_int {
    // SAFETY: the caller's promise.
    let (info, search) = unsafe { (&*info, &mut *search.cast::<Search>()) };
    if info.dlpi_phdr.is_null() {
        return 0;
    }
    // SAFETY: as above.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let loaded = || headers.iter().filter(|header| header.p_type == libc::PT_LOAD);
    let mut begins = loaded().map(|header| info.dlpi_addr.wrapping_add(header.p_vaddr) as usize);
    let has_it = |(begin, len)| search.address.wrapping_sub(begin) < len;
    if begins.clone().zip(loaded().map(|header| header.p_memsz as usize)).any(has_it) {
        // The segments are in order, and a page begins with the first.
        search.found = begins.next().map(|first| (first & !0xfff, info.dlpi_name));
    }
    search.found.is_some().into()
}

/// The object that has this address: where it begins, and its path. That of the program is the one by which the system knows it.
fn path_of_object(address: usize) -> Option<(usize, String)> {
    let (begin, loaded) = named_object(address)?;
    let own = if object(entry()) == Some(begin) { std::env::current_exe().ok() } else { None };
    Some((begin, own.unwrap_or(loaded).to_string_lossy().into_owned()))
}

/// The return addresses in the program of the call that it has made, the innermost first.
#[must_use]
pub fn callers() -> Vec<usize> {
    Stack::here().of_program().to_vec()
}

/// A place in the program to which a call returns.
#[derive(Clone, Debug)]
pub struct Caller {
    /// The functions there, the innermost first.
    pub functions: Vec<String>,
    /// The file of their object, without its directory. The program's own may have two names: that by which it was started, and its
    /// own.
    pub objects: Vec<String>,
    /// The distance from the beginning of the object.
    pub offset: u64,
}

impl Caller {
    /// That of one of [`callers`].
    #[must_use]
    pub fn at(address: usize) -> Self {
        let functions = Frame::at(address).into_iter().map(|frame| frame.function).collect();
        let Some((begin, path)) = named_object(address) else {
            return Self { functions, objects: Vec::new(), offset: address as u64 };
        };
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let loaded = name(&path);
        let own = || std::env::current_exe().ok().and_then(|path| name(&path));
        let own = if object(entry()) == Some(begin) { own() } else { None };
        let mut objects: Vec<_> = loaded.into_iter().chain(own).collect();
        objects.dedup();
        Self { functions, objects, offset: (address - begin) as u64 }
    }
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let function = self.functions.first().map_or("??", String::as_str);
        let object = self.objects.first().map_or("", String::as_str);
        write!(f, "{function} ({object}+{:#x})", self.offset)
    }
}

/// The address at which the program begins.
fn entry() -> usize {
    // SAFETY: takes no pointers.
    unsafe { libc::getauxval(libc::AT_ENTRY) as usize }
}

/// A function on a stack.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    address: usize,
    pub(crate) function: String,
    /// File and line, if the program has them.
    pub(crate) place: Option<(String, u32)>,
    /// Without a file: the path of the object that has the code, and the distance from where that begins.
    pub(crate) object: Option<(String, usize)>,
}

impl Frame {
    /// The functions at an address: more than one where the compiler has put one into another.
    fn at(address: usize) -> Vec<Self> {
        // Names stand in files, and they are read below a lock.
        let _uncancelled = Uncancelled::new();
        let mut frames = Vec::new();
        // The call stands before the return address.
        let call = address.wrapping_sub(1) as *mut c_void;
        backtrace::resolve(call, |symbol| {
            let function = symbol.name().map_or_else(|| "??".into(), |name| format!("{name:#}"));
            let file = symbol.filename_raw().map(|name| match name {
                BytesOrWideString::Bytes(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                BytesOrWideString::Wide(_) => String::new(),
            });
            let place = file.zip(symbol.lineno());
            frames.push(Self { address, function, place, object: None });
        });
        if frames.is_empty() {
            frames.push(Self { address, function: "??".into(), place: None, object: None });
        }
        for frame in frames.iter_mut().filter(|frame| frame.place.is_none()) {
            frame.object = path_of_object(address).map(|(begin, path)| (path, address - begin));
        }
        frames
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} in {}", self.address, self.function)?;
        match (&self.place, &self.object) {
            (Some((file, line)), _) => write!(f, " {file}:{line}"),
            (None, Some((path, offset))) => write!(f, " ({path}+{offset:#x})"),
            (None, None) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[inline(never)]
    fn first(n: usize) -> Stack {
        std::hint::black_box(n);
        Stack::here()
    }

    #[inline(never)]
    fn second(n: usize) -> Stack {
        std::hint::black_box(n);
        Stack::here()
    }

    /// Both functions have frames of one size, so only the return addresses tell them apart.
    #[test]
    fn a_stack_from_another_place_is_another() {
        for n in 0..3 {
            for (take, name) in [(first as fn(usize) -> Stack, "first"), (second, "second")] {
                let stack = std::hint::black_box(take)(n);
                let frames = stack.frames();
                let is_named =
                    frames.iter().any(|f| f.function.ends_with(&format!("tests::{name}")));
                assert!(is_named, "{n} {name}: {frames:?}");
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[test]
    fn a_stack_is_unwound_once() {
        let remembered = |n| {
            first(n);
            CACHE.with_borrow(|cache| cache.as_ref().unwrap().len)
        };
        let [_, second, third] = std::array::from_fn(remembered);
        assert!(second > 0 && second == third, "{second}, {third}");
    }

    #[inline(never)]
    fn deeper(n: usize) -> Stack {
        std::hint::black_box(if n == 0 { Stack::here() } else { deeper(n - 1) })
    }

    /// A program calls from many places in turn, and from many depths.
    #[cfg(target_arch = "x86_64")]
    #[test]
    fn stacks_of_many_places_are_unwound_once() {
        let remembered = || {
            for depth in 0..200 {
                deeper(depth);
            }
            CACHE.with_borrow(|cache| cache.as_ref().unwrap().len)
        };
        let [first, second] = std::array::from_fn(|_| remembered());
        assert!(first >= 200 && first == second, "{first}, {second}");
    }

    #[test]
    fn a_thread_remembers_no_more_than_its_share() {
        let mut cache = Cache::new();
        let words: Vec<usize> = (0..2 * MOST_KNOWN).collect();
        let places = || words.iter().map(|word| std::ptr::from_ref(word).addr());
        cache.memory = 0..usize::MAX;
        let stack = Stack(kept(vec![1]));
        for (held, place) in places().enumerate().skip(1) {
            cache.insert(place - 1, &[(place, held)], stack);
            assert!(cache.len <= MOST_KNOWN);
        }
        let known: usize = cache.layouts.values().flatten().map(|layout| layout.stacks.len()).sum();
        assert_eq!(cache.len, known);
    }

    #[test]
    fn a_stack_is_kept_once() {
        let stacks: Vec<_> = (0..3).map(|_| Stack::unwind(usize::MAX).0).collect();
        assert!(stacks.iter().all(|stack| std::ptr::eq(stack.0, stacks[0].0)));
    }

    #[test]
    fn a_stack_is_kept_once_while_another_thread_keeps_one() {
        let addresses = vec![1, 2, 3];
        let first = kept(addresses.clone());
        let all = STACKS.lock();
        let (sender, receiver) = mpsc::channel();
        let thread = std::thread::spawn(move || sender.send(kept(addresses)).unwrap());
        // It waits.
        let early = receiver.recv_timeout(Duration::from_millis(100));
        assert_eq!(early, Err(mpsc::RecvTimeoutError::Timeout));
        drop(all);
        let second = receiver.recv().unwrap();
        thread.join().unwrap();
        assert!(std::ptr::eq(first, second));
    }

    #[test]
    fn a_forked_child_waits_for_no_thread_of_its_parent() {
        kept(vec![1]);
        let all = STACKS.lock();
        // SAFETY: the child makes a stack, which allocates, and leaves without destructors. The C library keeps its allocator sound.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: ends the child in any case.
            unsafe {
                libc::alarm(10);
                libc::_exit(if kept(vec![4, 5]) == [4, 5] { 0 } else { 1 });
            }
        }
        drop(all);
        assert!(child > 0);
        let mut status = -1;
        // SAFETY: the status is writable.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0);
    }

    #[test]
    fn a_frame_without_a_file_has_its_object() {
        let program = std::env::current_exe().unwrap();
        let frame = Frame {
            address: 0x1234,
            function: "??".into(),
            place: None,
            object: Some(("/usr/bin/program".into(), 0x34)),
        };
        assert_eq!(frame.to_string(), "0x1234 in ?? (/usr/bin/program+0x34)");
        let (begin, path) = path_of_object(entry()).unwrap();
        assert_eq!((Path::new(&path), object(entry())), (&*program, Some(begin)));
        // The loader's code in the C library has no debugging information here, or has.
        let of_libc = Frame::at(libc::getpid as *const c_void as usize + 1);
        assert!(of_libc.iter().all(|frame| frame.place.is_some() != frame.object.is_some()));
    }

    #[test]
    fn a_caller_is_named_with_its_object() {
        let callers: Vec<_> = callers().into_iter().map(Caller::at).collect();
        let is_this = |caller: &&Caller| {
            caller.functions.iter().any(|name| name.ends_with("a_caller_is_named_with_its_object"))
        };
        let this = callers.iter().find(is_this).unwrap();
        let program = std::env::current_exe().unwrap();
        let program = program.file_name().unwrap().to_str().unwrap();
        assert!(this.objects.iter().any(|name| name == program), "{this:?}");
        assert!(this.to_string().ends_with(&format!("({program}+{:#x})", this.offset)), "{this}");
        // The beginning of a thread is in the C library.
        assert!(callers.iter().any(|caller| !caller.objects.iter().any(|name| name == program)));
    }

    #[test]
    fn a_stack_has_the_names_of_its_functions() {
        let names: Vec<_> = Stack::here().frames().into_iter().map(|f| f.function).collect();
        assert!(names.iter().any(|name| name.contains("a_stack_has_the_names")), "{names:?}");
    }
}

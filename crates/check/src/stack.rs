//! Stacks: taken quickly, and given names only when they are shown.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use backtrace::BytesOrWideString;

/// Frames that are kept.
const MOST: usize = 48;

/// The return addresses of a call, the innermost first.
#[derive(Clone, Debug)]
pub(crate) struct Stack(Arc<[usize]>);

impl Stack {
    /// That of the caller.
    pub(crate) fn here() -> Self {
        let mut addresses = Vec::with_capacity(MOST);
        backtrace::trace(|frame| {
            addresses.push(frame.ip() as usize);
            addresses.len() < MOST
        });
        Self(addresses.into())
    }

    /// The frames of the program. Those of this library, which stand before them, are left out, unless the program has it inside.
    pub(crate) fn frames(&self) -> Vec<Frame> {
        let own = object(Self::here as *const c_void as usize);
        // SAFETY: takes no pointers.
        let is_program = own == object(unsafe { libc::getauxval(libc::AT_ENTRY) } as usize);
        let is_own = |address: &usize| !is_program && object(*address) == own;
        let first = self.0.iter().position(|address| !is_own(address));
        self.0[first.unwrap_or(0)..].iter().flat_map(|address| Frame::at(*address)).collect()
    }
}

/// Where the object begins that has this address.
fn object(address: usize) -> Option<usize> {
    // SAFETY: all-zero is a valid Dl_info.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: `info` is writable; any address may be asked for.
    let found = unsafe { libc::dladdr(address as *const c_void, &raw mut info) } != 0;
    found.then_some(info.dli_fbase as usize)
}

/// A function on a stack.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    address: usize,
    pub(crate) function: String,
    /// File and line, if the program has them.
    pub(crate) place: Option<(String, u32)>,
}

impl Frame {
    /// The functions at an address: more than one where the compiler has put one into another.
    fn at(address: usize) -> Vec<Self> {
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
            frames.push(Self { address, function, place });
        });
        if frames.is_empty() {
            frames.push(Self { address, function: "??".into(), place: None });
        }
        frames
    }
}

impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x} in {}", self.address, self.function)?;
        match &self.place {
            Some((file, line)) => write!(f, " {file}:{line}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stack_has_the_names_of_its_functions() {
        let names: Vec<_> = Stack::here().frames().into_iter().map(|f| f.function).collect();
        assert!(names.iter().any(|name| name.contains("a_stack_has_the_names")), "{names:?}");
    }
}

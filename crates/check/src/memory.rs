//! Looking at the program's memory, which may be gone.

/// Bytes that are copied at a time: they fit into the nearest cache.
const CHUNK: usize = 16 << 10;

/// Copies from this process's memory. False if a part is not mapped.
pub type Read = fn(from: u64, to: &mut [u8]) -> bool;

/// The way to the program's memory.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) read: Read,
    /// Room for what is read. It is kept, since a new one would be filled with zeros.
    chunk: Box<[u8]>,
    hasher: crc32fast::Hasher,
}

impl Memory {
    pub(crate) fn new(read: Read) -> Self {
        Self { read, chunk: vec![0; CHUNK].into(), hasher: crc32fast::Hasher::new() }
    }

    /// A checksum of nothing yet.
    pub(crate) fn sum(&mut self) -> Sum<'_> {
        self.hasher.reset();
        Sum { memory: self, is_mapped: true }
    }
}

/// The checksum of ranges of this process's memory.
pub(crate) struct Sum<'a> {
    memory: &'a mut Memory,
    is_mapped: bool,
}

impl Sum<'_> {
    /// A range follows.
    pub(crate) fn add(&mut self, mut address: u64, len: u32) {
        let Memory { read, chunk, hasher } = &mut *self.memory;
        let mut left = len as usize;
        while left > 0 && self.is_mapped {
            let part = &mut chunk[..left.min(CHUNK)];
            self.is_mapped = read(address, part);
            hasher.update(part);
            left -= part.len();
            address = address.wrapping_add(part.len() as u64);
        }
    }

    /// `None` if a part is not mapped.
    pub(crate) fn finish(self) -> Option<u32> {
        self.is_mapped.then(|| self.memory.hasher.clone().finalize())
    }
}

/// The bytes that the kernel lets this process pin, if these are more.
pub(crate) fn lock_limit_below(bytes: u64) -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a writable struct.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    let is_below = !failed && limit.rlim_cur < bytes && !may_lock();
    is_below.then_some(limit.rlim_cur)
}

/// Whether this thread may exceed the limit (`CAP_IPC_LOCK`).
fn may_lock() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    // As in `linux/capability.h`, whose version 3 has 64 capabilities: the lower half first, each half with its effective ones first.
    const VERSION: u32 = 0x2008_0522;
    let mut header = [VERSION, 0];
    let mut sets = [[0_u32; 3]; 2];
    // SAFETY: writable, and as large as the kernel's structs.
    let failed =
        unsafe { libc::syscall(libc::SYS_capget, header.as_mut_ptr(), sets.as_mut_ptr()) } != 0;
    !failed && sets[0][0] & 1 << CAP_IPC_LOCK != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Address 8 stands for memory that is not mapped.
    fn read(from: u64, to: &mut [u8]) -> bool {
        if from != 8 {
            // SAFETY: the test names its own bytes.
            let bytes = unsafe { std::slice::from_raw_parts(from as *const u8, to.len()) };
            to.copy_from_slice(bytes);
        }
        from != 8
    }

    #[test]
    fn a_change_is_seen_and_a_hole_is_none() {
        let mut bytes = vec![1u8; 100_000];
        let mut memory = Memory::new(read);
        let mut checksum = |ranges: &[(u64, u32)]| {
            let mut sum = memory.sum();
            ranges.iter().for_each(|&(address, len)| sum.add(address, len));
            sum.finish()
        };
        let range = |bytes: &[u8]| (bytes.as_ptr() as u64, bytes.len() as u32);
        let before = checksum(&[range(&bytes)]);
        assert!(before.is_some());
        assert_eq!(checksum(&[range(&bytes)]), before);
        assert_eq!(checksum(&[range(&bytes[..70_000]), range(&bytes[70_000..])]), before);
        bytes[99_999] = 2;
        assert_ne!(checksum(&[range(&bytes)]), before);
        assert_eq!(checksum(&[(8, 8), range(&bytes)]), None);
    }
}

//! Looking at the program's memory, which may be gone.

/// Bytes that are copied at a time.
const CHUNK: usize = 64 << 10;

/// Copies from this process's memory. False if a part is not mapped.
pub type Read = fn(from: u64, to: &mut [u8]) -> bool;

/// The checksum of ranges of this process's memory; `None` if a part is not mapped.
pub(crate) fn checksum(ranges: &[(u64, u32)], read: Read) -> Option<u32> {
    let mut hasher = crc32fast::Hasher::new();
    // Small, since it is filled with zeros each time.
    let mut chunk = [0u8; 64];
    let mut large = Vec::new();
    for &(address, len) in ranges {
        let room: &mut [u8] = if len as usize <= chunk.len() {
            &mut chunk
        } else {
            large.resize(CHUNK, 0);
            &mut large
        };
        let mut done = 0;
        while done < len as usize {
            let n = room.len().min(len as usize - done);
            if !read(address.wrapping_add(done as u64), &mut room[..n]) {
                return None;
            }
            hasher.update(&room[..n]);
            done += n;
        }
    }
    Some(hasher.finalize())
}

/// The bytes that the kernel lets this process pin; `None` if it has no limit.
pub(crate) fn lock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: a writable struct.
    let failed = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } != 0;
    if failed || limit.rlim_cur == libc::RLIM_INFINITY || may_lock() {
        return None;
    }
    Some(limit.rlim_cur)
}

/// Whether this thread may exceed the limit (`CAP_IPC_LOCK`).
fn may_lock() -> bool {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let set = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set & 1 << CAP_IPC_LOCK != 0)
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
        let range = |bytes: &[u8]| [(bytes.as_ptr() as u64, bytes.len() as u32)];
        let before = checksum(&range(&bytes), read);
        assert!(before.is_some());
        assert_eq!(checksum(&range(&bytes), read), before);
        bytes[99_999] = 2;
        assert_ne!(checksum(&range(&bytes), read), before);
        assert_eq!(checksum(&[(8, 8)], read), None);
    }
}

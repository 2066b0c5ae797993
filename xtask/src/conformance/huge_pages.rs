//! Huge pages for the tests that map some, for as long as those run.

use std::fs;

const RESERVED: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages";
const FREE: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// As many as a test has at once, and some for what runs beside it.
const WANTED: u64 = 16;

/// Huge pages that were reserved; given back by drop.
#[derive(Debug)]
pub(super) struct HugePages {
    /// How many there were before, if more were reserved.
    before: Option<u64>,
    free: u64,
}

impl HugePages {
    /// Reserves a few where the machine has none free, and lets it be where it cannot.
    pub(super) fn reserve() -> Self {
        let (before, free) = (read(RESERVED), read(FREE));
        if free >= WANTED {
            return Self { before: None, free };
        }
        // Not root, or no huge pages in this kernel: the tests say so themselves.
        let _ = fs::write(RESERVED, (before + WANTED - free).to_string());
        let free = read(FREE);
        Self { before: (read(RESERVED) != before).then_some(before), free }
    }

    /// Whether there are any.
    pub(super) fn are_there(&self) -> bool {
        self.free > 0
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        if let Some(before) = self.before
            && let Err(error) = fs::write(RESERVED, before.to_string())
        {
            eprintln!("xtask: huge pages stay reserved: {error}");
        }
    }
}

fn read(path: &str) -> u64 {
    fs::read_to_string(path).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

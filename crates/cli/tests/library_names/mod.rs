//! A library directory for launchers under test.

use std::fs;
use std::path::Path;

/// Fills a directory with the names alone that the launcher looks for: its programs here use no library.
pub(crate) fn fill(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    for name in [
        "libibverbs.so.1",
        "libibverbs.so",
        "librdmacm.so.1",
        "librdmacm.so",
        "libmlx5.so.1",
        "libmlx4.so.1",
        "libefa.so.1",
        "libanyverbs_view.so",
        "librspreload.so",
    ] {
        fs::write(dir.join(name), "").unwrap();
    }
}

use std::os::fd::AsFd;

use anyverbs_testing::in_own_process;

use super::*;

const PAGE: usize = 4096;

fn check(addr: u64, len: u64, needs: Needs) -> Result<(), Unfit> {
    let asked = Maps::open().check(addr, len, needs);
    // The text gives the same result.
    assert_eq!(Maps(None).check(addr, len, needs), asked);
    asked
}

fn pages_of(n: usize) -> Mapping {
    Mapping::anonymous(n * PAGE).unwrap()
}

fn protect(m: &Mapping, page: usize, prot: c_int) {
    // SAFETY: a page of our own mapping.
    let rc = unsafe { libc::mprotect(m.as_ptr().wrapping_byte_add(page * PAGE), PAGE, prot) };
    assert_eq!(rc, 0);
}

#[test]
fn present_mappings_are_known() {
    in_own_process("memory::mapping::tests::present_mappings_are_known", || {
        let m = pages_of(3);
        let (addr, any) = (m.addr(), Needs::default());
        assert_eq!(check(addr, 3 * PAGE as u64, any), Ok(()));
        assert_eq!(check(addr + 100, 0, any), Ok(()));
        assert_eq!(check(0, 0, any), Ok(()));
        assert_eq!(check(0, 1, any), Err(Unfit::NotMapped(0)));
        // SAFETY: a page of our own mapping.
        unsafe { libc::munmap(m.as_ptr().wrapping_byte_add(PAGE), PAGE) };
        assert_eq!(check(addr + 1, PAGE as u64 - 1, any), Ok(()));
        assert_eq!(check(addr + 1, PAGE as u64, any), Err(Unfit::NotMapped(addr + PAGE as u64)));
        assert_eq!(check(u64::MAX - 10, 20, any), Err(Unfit::NotMapped(u64::MAX)));
        assert_eq!(check(0, u64::MAX, any), Err(Unfit::NotMapped(0)));
        assert!(is_resident(addr, PAGE as u64) && !is_resident(addr, PAGE as u64 + 1));
    });
}

#[test]
fn rights_are_known() {
    let m = pages_of(3);
    let write = Needs { writable: true, ..Needs::default() };
    protect(&m, 1, libc::PROT_READ);
    let (addr, page) = (m.addr(), PAGE as u64);
    assert_eq!(check(addr, page, write), Ok(()));
    assert_eq!(check(addr, 3 * page, Needs::default()), Ok(()));
    assert_eq!(check(addr, page + 1, write), Err(Unfit::Protected(addr + page)));
    protect(&m, 1, libc::PROT_NONE);
    assert_eq!(check(addr, 3 * page, Needs::default()), Err(Unfit::Protected(addr + page)));
}

#[test]
fn page_sizes_and_persistence_are_recognised() {
    in_own_process("memory::mapping::tests::page_sizes_and_persistence_are_recognised", || {
        let m = pages_of(1);
        let huge = Needs { huge: true, ..Needs::default() };
        assert_eq!(check(m.addr(), 10, huge), Err(Unfit::NotHuge));
        let persistent = Needs { persistent: true, ..Needs::default() };
        assert_eq!(check(m.addr(), 10, persistent), Err(Unfit::Volatile));
        let file = tempfile();
        let of_file = Mapping::of_file(file.as_fd(), 0, PAGE, true).unwrap();
        let lasts = check(of_file.addr(), 10, persistent);
        // A test directory in memory does not last either.
        assert!(matches!(lasts, Ok(()) | Err(Unfit::Volatile)), "{lasts:?}");
        assert_eq!(write_back(of_file.addr() + 5, 10), Ok(()));
        let unmapped = of_file.addr();
        drop(of_file);
        assert_eq!(write_back(unmapped, 10), Err(Fault));
    });
}

fn tempfile() -> File {
    let path = std::env::temp_dir().join(format!("anyverbs-mapping-{}", std::process::id()));
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    fs::remove_file(path).unwrap();
    file.set_len(PAGE as u64).unwrap();
    file
}

#[test]
fn the_text_of_smaps() {
    let text = "\
7f0000000000-7f0000200000 rw-s 00000000 00:0f 123                        /anon_hugepage (deleted)
Size:               2048 kB
KernelPageSize:     2048 kB
7f0000300000-7f0000301000 r--p 00000000 00:00 0
KernelPageSize:        4 kB
";
    let huge = find(text, 0x7f00_001f_ffff).unwrap();
    assert!(huge.readable && huge.writable && huge.of_file);
    assert_eq!((huge.end, huge.page_size), (0x7f00_0020_0000, 2 << 20));
    let small = find(text, 0x7f00_0030_0000).unwrap();
    assert!(small.readable && !small.writable && !small.of_file);
    assert_eq!(small.page_size, 4096);
    assert_eq!(find(text, 0x7f00_0020_0000), None);
    let (line, rest) = line_at(text, 0x7f00_0000_0000).unwrap();
    assert_eq!((line.inode, line.path), (123, "/anon_hugepage (deleted)"));
    assert_eq!(rest.filter_map(parse_line).map(|line| line.path).collect::<Vec<_>>(), [""]);
    // Only this text is asked: there is no such area here.
    assert!(!survives(text, 0x7f00_0030_0000) && !survives("", 0x7f00_0000_0000));
    let here = std::env::current_exe().unwrap();
    let inode = fs::metadata(&here).unwrap().ino();
    let kind = file_system(here.to_str().unwrap()).unwrap();
    let line = format!("10000-20000 r--s 00000000 00:0f {inode} {}\n", here.display());
    assert_eq!(survives(&line, 0x1_0000), kind != libc::TMPFS_MAGIC as u64);
}

#[test]
fn pages_come_in() {
    in_own_process("memory::mapping::tests::pages_come_in", || {
        let m = pages_of(4);
        for how in [Populate::Soon, Populate::Read, Populate::Write] {
            assert_eq!(populate(m.addr() + 10, 2 * PAGE as u64, how), Ok(()));
        }
        let addr = m.addr();
        drop(m);
        assert_eq!(populate(addr, 1, Populate::Write), Err(Fault));
    });
}

#[test]
fn other_files_are_no_dma_bufs() {
    let file = tempfile();
    assert_eq!(dmabuf::len(file.as_fd()), Err(libc::EINVAL));
    dmabuf::sync(file.as_fd(), true);
    assert!(dmabuf::export(file.as_fd(), 0, PAGE as u64).is_err());
}

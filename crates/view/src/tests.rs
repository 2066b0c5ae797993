//! The paths that belong to the view. The calls themselves are tested from outside, in `tests/`.

use crate::path::{PCI_ROOTS, ROOTS, find};

fn placed(path: &str) -> Option<String> {
    let mut out = [0xffu8; 64];
    let inside = find(path.as_bytes(), false)?;
    inside.write_below(b"/t", &mut out).expect("fits");
    let end = out.iter().position(|&byte| byte == 0).expect("terminated");
    Some(String::from_utf8(out[..end].to_vec()).expect("text"))
}

#[test]
fn paths_of_the_view_are_found() {
    for (path, want) in [
        ("/sys/class/infiniband", "/t/sys/class/infiniband"),
        ("/sys/class/infiniband/", "/t/sys/class/infiniband/"),
        ("//sys/./class///infiniband//a", "/t/sys/class/infiniband//a"),
        ("/./sys/class/infiniband/a/..", "/t/sys/class/infiniband/a/.."),
        ("/sys/class/infiniband_verbs/uverbs0/dev", "/t/sys/class/infiniband_verbs/uverbs0/dev"),
        ("/dev/infiniband/uverbs0", "/t/dev/infiniband/uverbs0"),
        ("/sys/devices/virtual/anyverbs/anyverbs0", "/t/sys/devices/virtual/anyverbs/anyverbs0"),
        ("sys/class/infiniband/a", "/t/sys/class/infiniband/a"),
    ] {
        assert_eq!(placed(path).as_deref(), Some(want), "{path}");
    }
}

#[test]
fn other_paths_are_left_alone() {
    for path in [
        "",
        "/",
        "//",
        ".",
        "./",
        "..",
        "/s",
        "/sys",
        "/sys/class",
        "/sys/class/",
        "/sys/class/infiniband_mad",
        "/sys/class/infinibandx/a",
        "/sys/classinfiniband",
        "/dev",
        "/dev/null",
        "/dev/infinibands",
        "/etc/passwd",
        "/home/sys/class/infiniband",
        "/sys/devices/virtual/net",
    ] {
        assert_eq!(placed(path), None, "{path}");
    }
}

#[test]
fn device_nodes_are_told_from_their_directory() {
    assert!(!find(b"/dev/infiniband", false).expect("in the view").is_device_node());
    assert!(!find(b"/dev/infiniband//", false).expect("in the view").is_device_node());
    assert!(find(b"/dev/infiniband/uverbs0", false).expect("in the view").is_device_node());
    assert!(!find(b"/sys/class/infiniband/a", false).expect("in the view").is_device_node());
}

#[test]
fn a_path_that_does_not_fit_is_refused() {
    let inside = find(b"/dev/infiniband/uverbs0", false).expect("in the view");
    let need = "/t/dev/infiniband/uverbs0".len() + 1;
    assert!(inside.write_below(b"/t", &mut vec![0; need]).is_some());
    assert!(inside.write_below(b"/t", &mut vec![0; need - 1]).is_none());
    assert!(inside.write_below(b"/t", &mut []).is_none());
}

#[test]
fn no_root_lies_in_another() {
    let all: Vec<_> = ROOTS.iter().chain(PCI_ROOTS).collect();
    for (index, root) in all.iter().enumerate() {
        for other in &all[index + 1..] {
            assert!(!root.starts_with(other) && !other.starts_with(root));
        }
    }
}

#[test]
fn the_pci_bus_belongs_to_the_view_where_a_device_is_on_it() {
    for path in [
        "/sys/bus/pci/devices",
        "/sys/bus/pci/devices/0000:00:01.0/vendor",
        "/sys/class/pci_bus/a17b:01/../../a17b:01:00.0",
        "/sys/devices/pcia17b:00/a17b:00:01.0",
    ] {
        assert!(find(path.as_bytes(), true).is_some() && find(path.as_bytes(), false).is_none());
    }
    for path in ["/sys/bus/pci/drivers", "/sys/bus/pci", "/sys/devices/pci0000:00/0000:00:01.0"] {
        assert!(find(path.as_bytes(), true).is_none(), "{path}");
    }
}

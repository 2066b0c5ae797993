//! The paths that belong to the view, and their places in the tree. No allocation, no system call.

/// A directory that the view answers for, as its components below `/`.
pub(crate) type Root = &'static [&'static [u8]];

/// Everything that the view answers for.
pub(crate) const ROOTS: &[Root] = &[
    &[b"sys", b"class", b"infiniband"],
    &[b"sys", b"class", b"infiniband_verbs"],
    // The result of `realpath` for `/sys/class/infiniband/<device>/device`.
    &[b"sys", b"devices", b"virtual", b"anyverbs"],
    &[b"dev", b"infiniband"],
];

/// Directories for which it answers as well where a device has a place on the PCI bus. The first two hold links to the host's devices, too.
pub(crate) const PCI_ROOTS: &[Root] = &[
    &[b"sys", b"bus", b"pci", b"devices"],
    &[b"sys", b"class", b"pci_bus"],
    // A domain that no host has.
    &[b"sys", b"devices", b"pcia17b:00"],
];

/// A path inside the view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Inside<'a> {
    pub(crate) root: Root,
    /// The path behind the root: empty, or starting with a slash.
    pub(crate) rest: &'a [u8],
}

impl Inside<'_> {
    /// Whether this names an entry of `/dev/infiniband`, which the tree keeps as symbolic links to a device.
    pub(crate) fn is_device_node(&self) -> bool {
        self.root[0] == b"dev" && self.rest.iter().any(|&byte| byte != b'/')
    }

    /// Writes `<dir>/<root><rest>` and a NUL; `None` if that does not fit.
    pub(crate) fn write_below(&self, dir: &[u8], out: &mut [u8]) -> Option<()> {
        let mut at = 0;
        let mut put = |bytes: &[u8]| {
            out.get_mut(at..at + bytes.len())?.copy_from_slice(bytes);
            at += bytes.len();
            Some(())
        };
        put(dir)?;
        for component in self.root {
            put(b"/")?;
            put(component)?;
        }
        put(self.rest)?;
        put(b"\0")
    }
}

/// Whether a path below the tree names a file that changes: one of `counters` or `hw_counters`, or the state of a port.
pub(crate) fn changes(path: &[u8]) -> bool {
    const COUNTERS: &[u8] = b"counters/";
    path.ends_with(b"/state")
        || path.ends_with(b"/phys_state")
        || path.windows(COUNTERS.len()).any(|part| part == COUNTERS)
}

/// The part of the view that `path`, taken from `/`, lies in; with the PCI bus if there is one. Repeated slashes and `.` components are seen through;
/// `..` inside the root's own components is not.
#[inline]
pub(crate) fn find(path: &[u8], pci: bool) -> Option<Inside<'_>> {
    let first = path.iter().copied().find(|&byte| byte != b'/')?;
    // Most paths end here.
    if !matches!(first, b's' | b'd' | b'.') {
        return None;
    }
    let more = if pci { PCI_ROOTS } else { &[] };
    ROOTS.iter().chain(more).find_map(|root| {
        let mut rest = path;
        for component in *root {
            rest = skip_slashes(rest).strip_prefix(*component)?;
            if !matches!(rest.first(), None | Some(b'/')) {
                return None;
            }
        }
        Some(Inside { root, rest })
    })
}

/// Drops leading slashes and `.` components.
fn skip_slashes(mut path: &[u8]) -> &[u8] {
    loop {
        path = match path {
            [b'/', rest @ ..] | [b'.', b'/', rest @ ..] => rest,
            _ => return path,
        };
    }
}

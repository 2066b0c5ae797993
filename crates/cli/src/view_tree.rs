//! The directory tree that the view object answers from. It holds the files that the kernel would show of the device in
//! `/sys` and `/dev`.
//!
//! As in the real sysfs, the classes hold links to the device's directory. So a resolved path is one of the view's own
//! (`/sys/devices/virtual/anyverbs/...`, or a place on the PCI bus, [`view_pci`]) and works when it is given back.
//!
//! `counters` and `hw_counters` hold what the device counts, and the GIDs follow the host's addresses ([`crate::live`]). The port's rate is the one that the C interface makes
//! up, since tools stop where it is missing. The capability mask is left out.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, symlink};
use std::path::{Path, PathBuf};

use anyhow::bail;
use anyverbs::abandoned::Membership;
use anyverbs::config::Config;

use crate::device::Device;
use crate::live::{Files, Service};
use crate::view_port::{write, write_interface, write_port};
use crate::{view_netlink, view_pci};

const PREFIX: &str = "anyverbs-view-";
/// A tree's lock, which says that the directory is one. It is made first and removed last.
const LOCK: &str = ".lock";
const MARK: &[u8] = b"the view of a device, of an `anyverbs run`; removed by the next one when nobody holds the lock\n";

/// A tree of one launcher, gone when this value is.
#[derive(Debug)]
pub(crate) struct ViewTree {
    path: PathBuf,
    /// Locked for as long as the launcher lives. Other launchers sweep trees whose lock is free.
    _lock: File,
    /// Keeps what changes fresh.
    service: Option<Service>,
}

impl ViewTree {
    /// Makes the tree in the first of the [`bases`] that can hold it, and removes the trees of launchers that died before they
    /// could.
    pub(crate) fn new(devices: &[Device]) -> anyhow::Result<Self> {
        let mut refused = Vec::new();
        for base in bases() {
            // One that is full takes a directory, and then no file.
            match Self::create(&base)
                .and_then(|tree| write_devices(&tree.path, devices).map(|()| tree))
            {
                Ok(tree) => {
                    sweep(&base);
                    return Ok(tree);
                }
                Err(error) => refused.push(format!("{}: {error}", base.display())),
            }
        }
        bail!(
            "no directory can hold the view of the device ({}); set TMPDIR to a directory that you can write to, or use --no-view",
            refused.join("; ")
        )
    }

    fn create(base: &Path) -> io::Result<Self> {
        // The view gives `realpath` answers back without the tree's own path: it has to be resolved itself.
        let base = base.canonicalize()?;
        let path = loop {
            let path = base.join(name());
            match DirBuilder::new().mode(0o700).create(&path) {
                // Another user made it before, and owns it.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                done => break done.map(|()| path)?,
            }
        };
        match lock(&path) {
            Ok(lock) => Ok(ViewTree { path, _lock: lock, service: None }),
            Err(error) => {
                fs::remove_dir_all(&path)?;
                Err(error)
            }
        }
    }

    /// Makes the files that change, from now on whenever a program wants them. Without them a program finds no counters.
    pub(crate) fn serve(&mut self, devices: Vec<Device>, config: &Config, host: Membership) {
        let (sys, netlink) = (self.path.join("sys"), self.path.join("netlink"));
        let service = Files::new(sys, Some(netlink), (devices, config), host)
            .and_then(|files| Service::start(&self.path, files));
        match service {
            Ok(service) => self.service = Some(service),
            Err(error) => eprintln!("anyverbs: the view has no counters: {error}"),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ViewTree {
    fn drop(&mut self) {
        // It writes nothing from here on.
        drop(self.service.take());
        if let Err(error) = remove(&self.path) {
            eprintln!("anyverbs: cannot remove {}: {error}", self.path.display());
        }
    }
}

/// Directories that may hold a tree, best first. Those of the environment come before memory, and memory before a disk, where
/// the two hundred small files take ten times as long. Any of them may be missing.
fn bases() -> impl Iterator<Item = PathBuf> {
    let set = |name| anyverbs_environment::variable(name).map(PathBuf::from);
    let (runtime, temporary) = (set("XDG_RUNTIME_DIR"), set("TMPDIR"));
    let default = temporary.is_none().then(|| "/tmp".into());
    [runtime, temporary, Some("/dev/shm".into()), default, Some("/var/tmp".into())]
        .into_iter()
        .flatten()
        .filter(|base| base.is_absolute())
}

/// Makes the lock of a tree, and takes it.
fn lock(tree: &Path) -> io::Result<File> {
    let mut lock = File::create(tree.join(LOCK))?;
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // Whoever finds the mark finds the lock held, as long as this process lives.
    lock.write_all(MARK)?;
    Ok(lock)
}

/// A new name, which another user cannot make in advance.
fn name() -> String {
    use std::hash::{BuildHasher, RandomState};
    let random = RandomState::new().hash_one(()) >> 32;
    format!("{PREFIX}{}-{random}", std::process::id())
}

fn is_name(name: &OsStr) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbers = name.to_str().and_then(|name| name.strip_prefix(PREFIX)?.split_once('-'));
    numbers.is_some_and(|(process, random)| number(process) && number(random))
}

/// Removes a tree, its lock last: without the lock the tree would have no owner.
fn remove(tree: &Path) -> io::Result<()> {
    for entry in fs::read_dir(tree)? {
        let entry = entry?;
        if entry.file_name() == LOCK {
            continue;
        }
        if entry.file_type()?.is_dir() {
            fs::remove_dir_all(entry.path())?;
        } else {
            fs::remove_file(entry.path())?;
        }
    }
    fs::remove_file(tree.join(LOCK))?;
    fs::remove_dir(tree)
}

/// Removes trees of this user whose launcher is gone, and nothing else. Best effort: a tree left behind costs some
/// kilobytes. The next launcher tries again where this one fails.
fn sweep(base: &Path) {
    // SAFETY: cannot fail and touches no memory.
    let user = unsafe { libc::geteuid() };
    for entry in fs::read_dir(base).into_iter().flatten().flatten() {
        let is_own = |meta: Metadata| meta.is_dir() && meta.uid() == user;
        if !is_name(&entry.file_name()) || !entry.metadata().is_ok_and(is_own) {
            continue;
        }
        let tree = entry.path();
        let Ok(mut lock) =
            OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(tree.join(LOCK))
        else {
            continue;
        };
        let mut mark = Vec::new();
        // SAFETY: the descriptor is open.
        let is_free = unsafe { libc::flock(lock.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0;
        // A launcher that already has its lock may not have written the mark yet.
        if is_free && lock.read_to_end(&mut mark).is_ok() && mark == MARK {
            let _ = remove(&tree);
        }
    }
}

/// Writes all devices.
pub(crate) fn write_devices(tree: &Path, devices: &[Device]) -> io::Result<()> {
    if devices.iter().any(|device| device.pci.is_some()) {
        view_pci::begin(tree)?;
    }
    let place = |device: &Device, index| match &device.pci {
        Some(pci) => view_pci::write_device(tree, pci, (index, devices.len())),
        None => write_virtual(tree, device),
    };
    for (device, index) in devices.iter().zip(0..) {
        write_device(tree, device, index, &place(device, index)?)?;
    }
    Ok(())
}

/// Writes the directory of a device without a bus. Its name below `sys`.
fn write_virtual(tree: &Path, device: &Device) -> io::Result<PathBuf> {
    let dir = Path::new("devices/virtual/anyverbs").join(&device.name);
    let online = online();
    for (file, text) in [
        ("numa_node", "-1".into()),
        ("local_cpus", cpu_mask(&online)),
        ("local_cpulist", online),
        ("vendor", format!("0x{:04x}", device.vendor_id)),
        ("device", format!("0x{:04x}", device.vendor_part_id)),
    ] {
        write(&tree.join("sys").join(&dir).join(file), &text)?;
    }
    Ok(dir)
}

/// Writes one device: `index` numbers its verbs node, and `place` is its directory below `sys`.
fn write_device(tree: &Path, device: &Device, index: u32, place: &Path) -> io::Result<()> {
    let name = &device.name;
    let uverbs = format!("uverbs{index}");
    let parent = tree.join("sys").join(place);

    let ib = parent.join("infiniband").join(name);
    for (file, text) in [
        ("node_guid", groups(device.node_guid)),
        ("sys_image_guid", groups(device.sys_image_guid)),
        ("node_type", "1: CA".into()),
        ("node_desc", name.clone()),
        ("fw_ver", device.fw_ver.clone()),
        ("hw_rev", format!("0x{:x}", device.hw_ver)),
    ] {
        write(&ib.join(file), &text)?;
    }
    for (file, text) in [("hca_type", &device.hca_type), ("board_id", &device.board_id)] {
        if let Some(text) = text {
            write(&ib.join(file), text)?;
        }
    }
    symlink("../..", ib.join("device"))?;
    link_class(tree, "infiniband", name, &format!("../../{}/infiniband/{name}", place.display()))?;

    for (number, port) in device.numbered() {
        write_port(&ib.join(format!("ports/{number}")), port)?;
        if let Some(gid) = port.gids.first() {
            write_interface(&parent.join("net"), &gid.ndev, gid.ifindex)?;
        }
    }

    let verbs = parent.join("infiniband_verbs").join(&uverbs);
    // The node is /dev/null, so that opening and stat of it agree.
    for (file, text) in [("ibdev", name.as_str()), ("dev", "1:3"), ("abi_version", "1")] {
        write(&verbs.join(file), text)?;
    }
    symlink("../..", verbs.join("device"))?;
    let target = format!("../../{}/infiniband_verbs/{uverbs}", place.display());
    link_class(tree, "infiniband_verbs", &uverbs, &target)?;
    write(&tree.join("sys/class/infiniband_verbs/abi_version"), "6")?;

    view_netlink::write(tree, device, index)?;

    let nodes = tree.join("dev/infiniband");
    fs::create_dir_all(&nodes)?;
    for node in [uverbs.as_str(), name, "rdma_cm"] {
        match symlink("/dev/null", nodes.join(node)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            done => done?,
        }
    }
    Ok(())
}

fn link_class(tree: &Path, class: &str, name: &str, target: &str) -> io::Result<()> {
    let dir = tree.join("sys/class").join(class);
    fs::create_dir_all(&dir)?;
    symlink(target, dir.join(name))
}

/// The processors that are online, as a list.
pub(crate) fn online() -> String {
    let list = fs::read_to_string("/sys/devices/system/cpu/online").unwrap_or_else(|_| "0".into());
    list.trim().to_owned()
}

/// `0011:2233:4455:6677`.
pub(crate) fn groups(guid: u64) -> String {
    let groups: Vec<String> =
        (0..4).rev().map(|group| format!("{:04x}", guid >> (group * 16) & 0xffff)).collect();
    groups.join(":")
}

/// A list such as `0-3,8` as sysfs writes a mask: 32-bit groups in hexadecimal, highest first.
pub(crate) fn cpu_mask(list: &str) -> String {
    let mut groups = vec![0u32; 1];
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<usize>(), last.parse::<usize>()) else {
            continue;
        };
        for cpu in first..=last.min(8191) {
            if groups.len() <= cpu / 32 {
                groups.resize(cpu / 32 + 1, 0);
            }
            groups[cpu / 32] |= 1 << (cpu % 32);
        }
    }
    groups.iter().rev().map(|group| format!("{group:08x}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_masks() {
        assert_eq!(cpu_mask("0"), "00000001");
        assert_eq!(cpu_mask("0-1"), "00000003");
        assert_eq!(cpu_mask("0-31"), "ffffffff");
        assert_eq!(cpu_mask("0,32-33"), "00000003,00000001");
        assert_eq!(cpu_mask("nonsense"), "00000000");
    }

    #[test]
    fn guids_have_four_groups() {
        assert_eq!(groups(0x0011_2233_4455_6677), "0011:2233:4455:6677");
    }

    #[test]
    fn a_tree_is_complete_private_and_gone_afterwards() {
        use std::os::unix::fs::PermissionsExt;
        let devices = vec![crate::device::example()];
        let tree = ViewTree::new(&devices).unwrap();
        let path = tree.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
        let read = |file: &str| fs::read_to_string(path.join(file)).unwrap();
        let ib = "sys/class/infiniband/anyverbs0";
        assert_eq!(read(&format!("{ib}/ports/1/gid_attrs/types/0")), "RoCE v2\n");
        assert_eq!(read(&format!("{ib}/ports/1/state")), "4: ACTIVE\n");
        let pkeys = [0, 1].map(|index| read(&format!("{ib}/ports/1/pkeys/{index}")));
        assert_eq!(pkeys, ["0xffff\n", "0x8001\n"]);
        let gids = fs::read_dir(path.join(ib).join("ports/1/gids")).unwrap().count();
        assert_eq!(gids, 16);
        assert_eq!(
            read(&format!("{ib}/ports/1/gids/2")),
            "0000:0000:0000:0000:0000:0000:0000:0001\n"
        );
        assert_eq!(
            read(&format!("{ib}/ports/1/gids/1")),
            "0000:0000:0000:0000:0000:0000:0000:0000\n"
        );
        assert!(!path.join(format!("{ib}/ports/1/gid_attrs/types/1")).exists());
        let ndev = fs::read_dir(path.join(ib).join("device/net")).unwrap().next().unwrap().unwrap();
        assert_eq!(ndev.file_name().to_str().unwrap(), devices[0].ports[0].gids[0].ndev);
        assert_eq!(read("sys/class/infiniband_verbs/uverbs0/ibdev"), "anyverbs0\n");
        assert_eq!(
            path.join(ib).join("device").canonicalize().unwrap(),
            path.join("sys/devices/virtual/anyverbs/anyverbs0")
        );
        fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path.join("dev/infiniband/uverbs0"))
            .unwrap();
        drop(tree);
        assert!(!path.exists());
    }

    #[test]
    fn only_trees_without_a_launcher_are_swept() {
        let base = std::env::temp_dir().join(format!("anyverbs-sweep-{}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let live = ViewTree::create(&base).unwrap();
        let dead = ViewTree::create(&base).unwrap();
        let dead_path = dead.path.clone();
        fs::create_dir_all(dead_path.join("sys/class")).unwrap();
        // Other files may have such names.
        let others = ["notes", "1-0", "12-34-56", "1-", "-1", "1-0x", "9-9"].map(|name| {
            let path = base.join(format!("{PREFIX}{name}"));
            fs::create_dir(&path).unwrap();
            fs::write(path.join("precious"), "").unwrap();
            path
        });
        fs::write(others[2].join(LOCK), MARK).unwrap();
        fs::write(others[6].join(LOCK), "").unwrap();
        symlink(&others[0], base.join(format!("{PREFIX}1-2"))).unwrap();
        sweep(&base);
        assert!(live.path().exists() && dead_path.exists());
        let ViewTree { _lock, .. } = &dead;
        // SAFETY: unlocks a descriptor that is open, as the kernel does when a launcher dies.
        unsafe { libc::flock(_lock.as_raw_fd(), libc::LOCK_UN) };
        // They go at once, however young: many launchers may be killed in a minute.
        sweep(&base);
        assert!(live.path().exists() && !dead_path.exists());
        assert!(others.iter().all(|path| path.join("precious").exists()));
        std::mem::forget(dead);
        drop(live);
        fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_tree_whose_removal_was_cut_short_is_still_one() {
        let base = std::env::temp_dir().join(format!("anyverbs-cut-{}", std::process::id()));
        fs::create_dir(&base).unwrap();
        let tree = ViewTree::create(&base).unwrap();
        fs::create_dir_all(tree.path.join("sys")).unwrap();
        let path = tree.path.clone();
        // The lock is left when all else is gone.
        fs::remove_dir(path.join("sys")).unwrap();
        // SAFETY: unlocks a descriptor that is open, as the kernel does when a launcher dies.
        unsafe { libc::flock(tree._lock.as_raw_fd(), libc::LOCK_UN) };
        sweep(&base);
        assert!(!path.exists());
        std::mem::forget(tree);
        fs::remove_dir(base).unwrap();
    }
}

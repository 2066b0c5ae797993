//! The part of a tree that stands for the PCI bus, where a persona has a place on it.
//!
//! Each device is behind a root port of its own, in a PCI domain that no host has. The two directories that list all devices and buses
//! of the host, `/sys/bus/pci/devices` and `/sys/class/pci_bus`, hold links to the host's as well, so that a program finds both.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crate::device::Pci;
use crate::view_port::write;
use crate::view_tree::{cpu_mask, online};

/// The PCI domain of the devices. The view knows its name.
const DOMAIN: &str = "a17b";
/// Says to the view that there is a PCI bus in the tree.
pub(crate) const MARK: &str = ".pci";
/// Directories that hold a link for each of the host's devices and buses.
const LISTS: [&str; 2] = ["sys/bus/pci/devices", "sys/class/pci_bus"];
/// Root ports of a bus with one number each; then their functions count.
const SLOTS: u32 = 31;
const CLASS_BRIDGE: u32 = 0x06_0400;
/// The root port that QEMU gives to virtual machines.
const PORT: (u16, u16) = (0x1b36, 0x000c);
/// Where the capability of PCI Express stands in the configuration space.
const EXPRESS: usize = 0x60;

/// Begins the bus: links to what the host has.
pub(crate) fn begin(tree: &Path) -> io::Result<()> {
    for list in LISTS {
        let ours = tree.join(list);
        fs::create_dir_all(&ours)?;
        let real = Path::new("/").join(list);
        for entry in fs::read_dir(&real).into_iter().flatten().flatten() {
            // Where it leads; a device that has just gone leads nowhere.
            if let Ok(target) = entry.path().canonicalize() {
                symlink(target, ours.join(entry.file_name()))?;
            }
        }
    }
    let root = tree.join("sys/devices").join(format!("pci{DOMAIN}:00"));
    write_bus(tree, &root, &format!("pci{DOMAIN}:00"), "00", &online())?;
    fs::write(tree.join(MARK), "")
}

/// Writes the device of this number, of so many. Its directory below `sys`.
pub(crate) fn write_device(
    tree: &Path,
    pci: &Pci,
    (index, count): (u32, usize),
) -> io::Result<PathBuf> {
    let bus = format!("{:02x}", index + 1);
    let port = format!("{DOMAIN}:00:{:02x}.{}", index % SLOTS + 1, index / SLOTS);
    let address = format!("{DOMAIN}:{bus}:00.0");
    let port_dir = PathBuf::from(format!("devices/pci{DOMAIN}:00")).join(&port);
    let dir = port_dir.join(&address);
    let node = node(&pci.numa_nodes, index as usize, count);
    let cpus = node.and_then(cpus_of).unwrap_or_else(online);
    let place = Place { node, cpus: &cpus, speed: pci.speed, width: pci.width };

    let port_ids = Ids { vendor: PORT.0, device: PORT.1, class: CLASS_BRIDGE, ..Ids::default() };
    let port_config = config(&port_ids, &place, Some(u8::try_from(index + 1).unwrap_or(u8::MAX)));
    write_function(&tree.join("sys").join(&port_dir), &port, &port_ids, &place, &port_config)?;
    link_driver(tree, &port_dir, 1, "pcieport")?;
    let up = format!("{}/{port}", format_args!("pci{DOMAIN}:00"));
    write_bus(tree, &tree.join("sys").join(&port_dir), &up, &bus, &cpus)?;

    let ids = Ids {
        vendor: pci.vendor,
        device: pci.device,
        subsystem: (pci.subsystem_vendor, pci.subsystem_device),
        class: pci.class,
        revision: pci.revision,
    };
    write_function(
        &tree.join("sys").join(&dir),
        &address,
        &ids,
        &place,
        &config(&ids, &place, None),
    )?;
    link_driver(tree, &dir, 2, &pci.driver)?;
    for (name, below) in [(&port, &port_dir), (&address, &dir)] {
        let link = tree.join(LISTS[0]).join(name);
        symlink(Path::new("../../..").join(below), link)?;
    }
    Ok(dir)
}

/// Numbers of a function of a device.
#[derive(Debug, Default)]
struct Ids {
    vendor: u16,
    device: u16,
    subsystem: (u16, u16),
    class: u32,
    revision: u8,
}

/// Where a device is.
struct Place<'a> {
    node: Option<u16>,
    cpus: &'a str,
    speed: u16,
    width: u8,
}

/// The NUMA node of a device: as the persona says, or in equal parts over those that the host has.
fn node(given: &[u16], index: usize, count: usize) -> Option<u16> {
    if !given.is_empty() {
        return Some(given[index % given.len()]);
    }
    let mut nodes: Vec<u16> = fs::read_dir("/sys/devices/system/node")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok())
        .collect();
    nodes.sort_unstable();
    nodes.get(index * nodes.len() / count.max(1)).copied()
}

/// The processors of a node that the host has.
fn cpus_of(node: u16) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist")).ok()?;
    Some(text.trim().to_owned()).filter(|list| !list.is_empty())
}

/// Writes the files of a device or of a root port.
fn write_function(
    dir: &Path,
    address: &str,
    ids: &Ids,
    place: &Place<'_>,
    config: &[u8],
) -> io::Result<()> {
    let speed = format!("{}.{} GT/s PCIe", place.speed / 10, place.speed % 10);
    let width = place.width.to_string();
    let (sub_vendor, sub_device) = ids.subsystem;
    let modalias = format!(
        "pci:v{:08X}d{:08X}sv{sub_vendor:08X}sd{sub_device:08X}bc{:02X}sc{:02X}i{:02X}",
        ids.vendor,
        ids.device,
        ids.class >> 16,
        ids.class >> 8 & 0xff,
        ids.class & 0xff
    );
    for (file, text) in [
        ("vendor", format!("{:#06x}", ids.vendor)),
        ("device", format!("{:#06x}", ids.device)),
        ("subsystem_vendor", format!("{sub_vendor:#06x}")),
        ("subsystem_device", format!("{sub_device:#06x}")),
        ("class", format!("{:#08x}", ids.class)),
        ("revision", format!("{:#04x}", ids.revision)),
        ("numa_node", place.node.map_or("-1".into(), |node| node.to_string())),
        ("local_cpulist", place.cpus.to_owned()),
        ("local_cpus", cpu_mask(place.cpus)),
        ("max_link_speed", speed.clone()),
        ("current_link_speed", speed),
        ("max_link_width", width.clone()),
        ("current_link_width", width),
        ("irq", "0".into()),
        ("enable", "1".into()),
        ("resource", ["0x0000000000000000 0x0000000000000000 0x0000000000000000"; 13].join("\n")),
        ("modalias", modalias.clone()),
        (
            "uevent",
            format!(
                "PCI_CLASS={:X}\nPCI_ID={:04X}:{:04X}\nPCI_SUBSYS_ID={sub_vendor:04X}:{sub_device:04X}\nPCI_SLOT_NAME={address}\nMODALIAS={modalias}",
                ids.class, ids.vendor, ids.device
            ),
        ),
    ] {
        write(&dir.join(file), &text)?;
    }
    fs::write(dir.join("config"), config)
}

/// The link to the driver, from a directory so deep below the root of the bus.
fn link_driver(tree: &Path, dir: &Path, depth: usize, driver: &str) -> io::Result<()> {
    let drivers = Path::new("bus/pci/drivers").join(driver);
    fs::create_dir_all(tree.join("sys").join(&drivers))?;
    let up = Path::new("../..").join("../".repeat(depth));
    symlink(up.join(&drivers), tree.join("sys").join(dir).join("driver"))?;
    symlink(up.join("bus/pci"), tree.join("sys").join(dir).join("subsystem"))
}

/// Writes a bus behind the directory `dir`, which is `path` below `sys/devices`.
fn write_bus(tree: &Path, dir: &Path, path: &str, bus: &str, cpus: &str) -> io::Result<()> {
    let name = format!("{DOMAIN}:{bus}");
    let here = dir.join("pci_bus").join(&name);
    write(&here.join("cpulistaffinity"), cpus)?;
    write(&here.join("cpuaffinity"), &cpu_mask(cpus))?;
    symlink("../..", here.join("device"))?;
    let target = format!("../../devices/{path}/pci_bus/{name}");
    symlink(target, tree.join(LISTS[1]).join(name))
}

/// The configuration space: numbers, and the capability of PCI Express. `behind` is the bus behind a root port.
fn config(ids: &Ids, place: &Place<'_>, behind: Option<u8>) -> [u8; 256] {
    const HAS_CAPABILITIES: u8 = 0x10;
    const ENDPOINT: u8 = 0x02;
    const ROOT_PORT: u8 = 0x42;
    let mut space = [0; 256];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0x00, &ids.vendor.to_le_bytes());
    put(0x02, &ids.device.to_le_bytes());
    // It answers and may master the bus.
    put(0x04, &[0x06, 0, HAS_CAPABILITIES, 0, ids.revision]);
    put(0x09, &ids.class.to_le_bytes()[..3]);
    match behind {
        Some(bus) => put(0x0e, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, bus, bus]),
        None => {
            put(0x2c, &ids.subsystem.0.to_le_bytes());
            put(0x2e, &ids.subsystem.1.to_le_bytes());
        }
    }
    put(0x34, &[EXPRESS as u8]);
    put(EXPRESS, &[0x10, 0, if behind.is_some() { ROOT_PORT } else { ENDPOINT }, 0]);
    let generation = match place.speed {
        25 => 1u16,
        50 => 2,
        80 => 3,
        160 => 4,
        320 => 5,
        _ => 6,
    };
    let link = generation | u16::from(place.width) << 4;
    put(EXPRESS + 0x0c, &u32::from(link).to_le_bytes());
    put(EXPRESS + 0x12, &link.to_le_bytes());
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_those_of_the_persona_in_turn() {
        let given = [0, 0, 1, 1];
        let nodes: Vec<_> = (0..6).map(|index| node(&given, index, 6)).collect();
        assert_eq!(nodes, [0, 0, 1, 1, 0, 0].map(Some));
    }

    #[test]
    fn a_root_port_says_which_bus_is_behind_it() {
        let place = Place { node: None, cpus: "0", speed: 160, width: 16 };
        let ids = Ids { vendor: 0x15b3, device: 0x101d, class: 0x02_0000, ..Ids::default() };
        let port = config(&ids, &place, Some(7));
        assert_eq!((port[0x0e], &port[0x18..0x1b]), (1, &[0, 7, 7][..]));
        let endpoint = config(&ids, &place, None);
        assert_eq!(&endpoint[..4], &[0xb3, 0x15, 0x1d, 0x10]);
        assert_eq!((endpoint[0x0b], endpoint[0x0e]), (2, 0));
        assert_eq!(&endpoint[EXPRESS + 0x12..EXPRESS + 0x14], &[4, 1]);
    }
}

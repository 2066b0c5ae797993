//! The files of a port in the view.

use std::fs;
use std::io;
use std::net::Ipv6Addr;
use std::os::unix::fs::symlink;
use std::path::Path;

use crate::device::{self, Device, Port};

/// Writes the directory of a port.
pub(crate) fn write_port(port_dir: &Path, port: &device::Port) -> io::Result<()> {
    for (file, text) in device::state_files(port.state) {
        write(&port_dir.join(file), &text)?;
    }
    for (file, text) in [
        ("lid", format!("{:#x}", port.lid)),
        ("lid_mask_count", "0".into()),
        ("sm_lid", "0x0".into()),
        ("sm_sl", "0".into()),
        ("link_layer", "Ethernet".into()),
        // As ibv_query_port says it.
        ("rate", port.rate.clone()),
    ] {
        write(&port_dir.join(file), &text)?;
    }
    for (index, pkey) in port.pkeys.iter().enumerate() {
        write(&port_dir.join(format!("pkeys/{index}")), &format!("{pkey:#06x}"))?;
    }
    // As in the kernel, empty places of the table are there and zero. They are links to one file, which a disk makes
    // many times faster than files.
    let is_empty = |index: &_| port.gids.iter().all(|gid| gid.index != *index as usize);
    let mut empty =
        (0..port.gid_tbl_len).filter(is_empty).map(|i| port_dir.join(format!("gids/{i}")));
    if let Some(first) = empty.next() {
        let text = gid_text(Ipv6Addr::UNSPECIFIED);
        write(&first, &text)?;
        for place in empty {
            fs::hard_link(&first, &place).or_else(|_| write(&place, &text))?;
        }
    }
    for gid in &port.gids {
        write(&port_dir.join(format!("gids/{}", gid.index)), &gid_text(gid.gid))?;
        write(&port_dir.join(format!("gid_attrs/types/{}", gid.index)), &gid.kind)?;
        write(&port_dir.join(format!("gid_attrs/ndevs/{}", gid.index)), &gid.ndev)?;
    }
    for empty in ["counters", "hw_counters"] {
        fs::create_dir_all(port_dir.join(empty))?;
    }
    Ok(())
}

/// Writes anew what the addresses of a port of a device decide, which stands at `at` there. `ib` is the device's directory in the class.
pub(crate) fn rewrite_addresses(
    ib: &Path,
    device: &Device,
    (at, new): (usize, &Port),
) -> io::Result<()> {
    let (old, port) = (&device.ports[at], ib.join(format!("ports/{}", at + 1)));
    // A new file beside the directories, since programs list these. It takes the place of a link: all empty places are links to one
    // file, which must not change.
    let put = |name: String, text: &str| {
        let (place, fresh) = (port.join(name), port.join(".fresh"));
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)?;
        }
        write(&fresh, text)?;
        fs::rename(fresh, place)
    };
    put("lid".into(), &format!("{:#x}", new.lid))?;
    for index in 0..new.gid_tbl_len {
        let of = |port: &Port| port.gids.iter().find(|gid| gid.index == index as usize).cloned();
        let (was, is) = (of(old), of(new));
        if was == is {
            continue;
        }
        // A program that sees a GID finds its attributes.
        let attrs = [format!("gid_attrs/types/{index}"), format!("gid_attrs/ndevs/{index}")];
        let place = format!("gids/{index}");
        match &is {
            Some(gid) => {
                for (name, text) in attrs.into_iter().zip([&gid.kind, &gid.ndev]) {
                    put(name, text)?;
                }
                put(place, &gid_text(gid.gid))?;
            }
            None => {
                put(place, &gid_text(Ipv6Addr::UNSPECIFIED))?;
                for name in attrs {
                    match fs::remove_file(port.join(name)) {
                        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                        _ => {}
                    }
                }
            }
        }
    }
    let of = |port: &Port| port.gids.first().map(|gid| (gid.ndev.clone(), gid.ifindex));
    if of(old) != of(new) {
        let net = ib.join("device/net");
        if net.exists() {
            fs::remove_dir_all(&net)?;
        }
        // Those of the other port stay there.
        let ports = device.ports.iter().enumerate();
        for port in ports.map(|(other, port)| if other == at { new } else { port }) {
            if let Some((ndev, ifindex)) = of(port) {
                write_interface(&net, &ndev, ifindex)?;
            }
        }
    }
    Ok(())
}

/// The interface of GID 0: a link to the real one where `/sys` shows this network namespace, else its main facts.
pub(crate) fn write_interface(net: &Path, ndev: &str, ifindex: u32) -> io::Result<()> {
    fs::create_dir_all(net)?;
    // Both ports may have it.
    if net.join(ndev).exists() {
        return Ok(());
    }
    if device::attribute(ndev, "ifindex").and_then(|text| text.parse().ok()) == Some(ifindex) {
        return symlink(format!("/sys/class/net/{ndev}"), net.join(ndev));
    }
    write(&net.join(ndev).join("ifindex"), &ifindex.to_string())
}

/// Writes an attribute and its newline, and the directories above it.
pub(crate) fn write(path: &Path, text: &str) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    fs::write(path, format!("{text}\n"))
}

/// All eight groups in full.
fn gid_text(gid: Ipv6Addr) -> String {
    gid.segments().map(|group| format!("{group:04x}")).join(":")
}

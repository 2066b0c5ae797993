//! `anyverbs devices`.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr, SocketAddrV6, UdpSocket};
use std::process::ExitCode;

use anyverbs::config::Config;

use crate::args::Devices;
use crate::device::{self, Device, Gid, state};
use crate::view_tree::groups;

/// Prints the devices that a program would find.
pub(crate) fn print(args: &Devices) -> anyhow::Result<ExitCode> {
    let devices = device::list(&args.settings)?;
    if let Some(what) = Config::load_with(&args.settings.variables())?.replaced {
        eprintln!("anyverbs: {what}");
    }
    let text = if args.json {
        as_json(&devices, args.to)? + "\n"
    } else {
        devices.iter().map(|device| describe(device, args.to)).collect::<Vec<_>>().join("\n")
    };
    crate::write_out(text.as_bytes())
}

/// The devices as a list. `port` is the first of `ports`, for readers who know no second one. GUIDs are texts, as in sysfs: readers
/// of JSON may round numbers beyond 2^53.
fn as_json(devices: &[Device], to: Option<IpAddr>) -> serde_json::Result<String> {
    let mut all = serde_json::to_value(devices)?;
    for (json, device) in all.as_array_mut().into_iter().flatten().zip(devices) {
        for (number, port) in device.ports.iter().enumerate() {
            for (index, gid) in port.gids.iter().enumerate() {
                let Some(to) = to else { continue };
                let obstacle = obstacle(gid, to, device.udp_port);
                json["ports"][number]["gids"][index]["route"] =
                    serde_json::json!({ "to": to, "obstacle": obstacle });
            }
        }
        json["port"] = json["ports"][0].clone();
        json["node_guid"] = groups(device.node_guid).into();
        json["sys_image_guid"] = groups(device.sys_image_guid).into();
    }
    serde_json::to_string_pretty(&all)
}

/// Why no packet of this entry reaches an address; `None` if a route leads there.
fn obstacle(from: &Gid, to: IpAddr, port: u16) -> Option<String> {
    if !from.carries {
        return Some("the entry carries no traffic".into());
    }
    if from.address.is_ipv4() != to.is_ipv4() {
        return Some("the two addresses are of different families".into());
    }
    if matches!(to, IpAddr::V4(to) if to.is_broadcast()) || to.is_multicast() {
        return Some("it is not the address of one port".into());
    }
    if from.address.is_loopback() && !to.is_loopback() {
        return Some("a loopback address reaches this host alone".into());
    }
    let at = |ip: IpAddr, port| match ip {
        IpAddr::V6(ip) if ip.is_unicast_link_local() => {
            SocketAddr::V6(SocketAddrV6::new(ip, port, 0, from.ifindex))
        }
        ip => SocketAddr::new(ip, port),
    };
    let connect = || UdpSocket::bind(at(from.address, 0))?.connect(at(to, port));
    connect().err().map(|error| error.to_string())
}

fn describe(device: &Device, to: Option<IpAddr>) -> String {
    let mut text = format!("{}\n", device.name);
    // Writing to a String cannot fail.
    if let Some(persona) = &device.persona {
        let _ = writeln!(text, "  persona    {persona}, firmware {}", device.fw_ver);
    }
    let _ = writeln!(text, "  node GUID  {}", groups(device.node_guid));
    for (number, port) in device.numbered() {
        let _ = writeln!(
            text,
            "  port {number}     {}, link layer Ethernet (RoCE v2, UDP port {}), active MTU {}",
            state(port.state),
            device.udp_port,
            port.active_mtu
        );
    }
    let _ = writeln!(text, "  links      {}", device.links.join(", "));
    for (number, port) in device.numbered() {
        for reason in &port.unusable {
            let _ = writeln!(text, "  unusable   {reason}");
        }
        match device.ports.len() {
            1 => text.push_str("  GID table\n"),
            _ => _ = writeln!(text, "  GID table of port {number}"),
        }
        let width = port.gids.iter().map(|gid| gid.address.to_string().len()).max().unwrap_or(0);
        for gid in &port.gids {
            let carries = match gid.carries {
                true => String::new(),
                false => format!("  {}, carries no traffic", gid.kind),
            };
            let (index, address) = (gid.index, gid.address.to_string());
            let _ = write!(text, "  {index:>5}      {address:<width$}  {}{carries}", gid.ndev);
            match to.map(|to| (to, obstacle(gid, to, device.udp_port))) {
                Some((to, None)) => _ = write!(text, "  a route leads to {to}"),
                Some((to, Some(why))) => _ = write!(text, "  no route to {to}: {why}"),
                None => {}
            }
            text.push('\n');
        }
    }
    text
}

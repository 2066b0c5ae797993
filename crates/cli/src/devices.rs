//! `anyverbs devices`.

use std::fmt::Write as _;
use std::process::ExitCode;

use crate::args::Devices;
use crate::device::{self, Device, state};
use crate::view_tree::groups;

/// Prints the devices that a program would find.
pub(crate) fn print(args: &Devices) -> anyhow::Result<ExitCode> {
    let devices = device::list(&args.settings)?;
    let text = if args.json {
        as_json(&devices)? + "\n"
    } else {
        devices.iter().map(describe).collect::<Vec<_>>().join("\n")
    };
    crate::write_out(text.as_bytes())
}

/// The devices as a list. `port` is the first of `ports`, for readers who know no second one.
fn as_json(devices: &[Device]) -> serde_json::Result<String> {
    let mut all = serde_json::to_value(devices)?;
    for device in all.as_array_mut().into_iter().flatten() {
        device["port"] = device["ports"][0].clone();
    }
    serde_json::to_string_pretty(&all)
}

fn describe(device: &Device) -> String {
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
            let _ = writeln!(text, "  {index:>5}      {address:<width$}  {}{carries}", gid.ndev);
        }
    }
    text
}

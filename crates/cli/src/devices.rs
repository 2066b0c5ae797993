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
        serde_json::to_string_pretty(&devices)? + "\n"
    } else {
        devices.iter().map(describe).collect::<Vec<_>>().join("\n")
    };
    crate::write_out(text.as_bytes())
}

fn describe(device: &Device) -> String {
    let port = &device.port;
    let mut text = format!(
        "{}\n  node GUID  {}\n  port 1     {}, link layer Ethernet (RoCE v2, UDP port {}), active MTU {}\n  links      {}\n  GID table\n",
        device.name,
        groups(device.node_guid),
        state(port.state),
        device.udp_port,
        port.active_mtu,
        device.links.join(", "),
    );
    if let Some(persona) = &device.persona {
        text = text.replacen(
            '\n',
            &format!("\n  persona    {persona}, firmware {}\n", device.fw_ver),
            1,
        );
    }
    let width = port.gids.iter().map(|gid| gid.address.to_string().len()).max().unwrap_or(0);
    for gid in &port.gids {
        // Writing to a String cannot fail.
        let _ = writeln!(
            text,
            "  {:>5}      {:<width$}  {}{}",
            gid.index,
            gid.address.to_string(),
            gid.ndev,
            if gid.carries { String::new() } else { format!("  {}, carries no traffic", gid.kind) }
        );
    }
    text
}

//! Personas: the device looks like one of a vendor.
//!
//! A persona is a file of one table. It says what programs look at: numbers and names, limits, features that are missing, the
//! shape of the GID table, and the place on the PCI bus. The engine stays the same. So a persona may promise less than the
//! engine holds, and never more: such a file is refused.

use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use anyverbs_proto::types::Gid;
use serde::Deserialize;

pub use crate::features::{Feature, Features};

use crate::config::form::Tabled;
use crate::limits::{self, DeviceAttr};
use crate::text::{DEVICE_NAME, NAME, in_words, is_device_name, is_name, line_of};

/// A persona, read and checked.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Persona {
    /// The name that it was asked for by.
    pub name: String,
    /// Its file, unless it is one of the built-in ones.
    pub file: Option<PathBuf>,
    /// Name of the first device.
    pub device: String,
    /// Vendor, as `ibv_query_device` says it.
    pub vendor_id: u32,
    /// Part, as `ibv_query_device` says it.
    pub vendor_part_id: u32,
    /// Hardware revision.
    pub hw_ver: u32,
    /// Version of the firmware.
    pub fw_ver: String,
    /// `board_id` in sysfs; without one the file is missing, as with drivers that have none.
    pub board_id: Option<String>,
    /// `hca_type` in sysfs; as `board_id`.
    pub hca_type: Option<String>,
    /// First 24 bits of the GUIDs.
    pub oui: Option<u32>,
    /// Speed of the port.
    pub rate: Rate,
    /// Features that it lacks.
    pub lacks: Features,
    /// Shape of the GID table.
    pub gids: GidShape,
    /// Place on the PCI bus, if it has one.
    pub pci: Option<Pci>,
    /// Its own limits.
    limits: Limits,
}

/// The shape of a GID table.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GidShape {
    /// The types of entry that each address has, in this order.
    pub types: Vec<GidType>,
    /// Whether the table begins with the link-local address that the port's hardware address makes.
    pub link_local: bool,
    /// The families of the addresses, in the order in which they follow.
    #[serde(default = "Family::in_order")]
    pub order: Vec<Family>,
}

/// A type of an entry of a GID table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum GidType {
    /// RoCE v1: frames of an Ethernet type of their own. This device does not speak it.
    #[serde(rename = "RoCE v1")]
    RoceV1,
    /// RoCE v2: UDP.
    #[serde(rename = "RoCE v2")]
    RoceV2,
}

/// A family of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// IPv4.
    Ipv4,
    /// IPv6.
    Ipv6,
}

impl Family {
    fn in_order() -> Vec<Self> {
        vec![Self::Ipv4, Self::Ipv6]
    }
}

/// A device on the PCI bus, as sysfs shows it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pci {
    /// Vendor.
    pub vendor: u16,
    /// Device.
    pub device: u16,
    /// Vendor of the board.
    #[serde(default)]
    pub subsystem_vendor: u16,
    /// Board.
    #[serde(default)]
    pub subsystem_device: u16,
    /// Class, 24 bits: 0x020000 for Ethernet.
    pub class: u32,
    /// Revision.
    #[serde(default)]
    pub revision: u8,
    /// Name of the kernel's driver.
    pub driver: String,
    /// Speed of the link in tenths of gigatransfers a second: 160 for 16.0 GT/s.
    pub speed: u16,
    /// Lanes of the link.
    pub width: u8,
    /// The NUMA nodes of the devices in turn; without them, the devices are spread over the nodes of the host.
    #[serde(default)]
    pub numa_nodes: Vec<u16>,
}

/// The speed of a port, in lanes and the speed of each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Gigabits a second.
    pub gbps: u32,
    /// `active_width` of `ibv_query_port`.
    pub width: u8,
    /// `active_speed` of `ibv_query_port`.
    pub speed: u8,
    /// As sysfs writes it behind the number.
    pub lanes: &'static str,
}

impl Rate {
    /// That of the device without a persona. A loopback has no speed of its own to tell.
    pub const DEFAULT: Self = Self { gbps: 100, width: 2, speed: 32, lanes: "4X EDR" };

    const ALL: [Self; 7] = [
        Self { gbps: 10, width: 1, speed: 4, lanes: "1X QDR" },
        Self { gbps: 25, width: 1, speed: 32, lanes: "1X EDR" },
        Self { gbps: 40, width: 2, speed: 4, lanes: "4X QDR" },
        Self { gbps: 50, width: 1, speed: 64, lanes: "1X HDR" },
        Self::DEFAULT,
        Self { gbps: 200, width: 2, speed: 64, lanes: "4X HDR" },
        Self { gbps: 400, width: 2, speed: 128, lanes: "4X NDR" },
    ];
}

/// The built-in personas, with their files. Each says in its head where its numbers come from.
const BUILT_IN: [(&str, &str); 6] = [
    ("mlx5", include_str!("persona/mlx5.toml")),
    ("irdma", include_str!("persona/irdma.toml")),
    ("bnxt", include_str!("persona/bnxt.toml")),
    ("ionic", include_str!("persona/ionic.toml")),
    ("rxe", include_str!("persona/rxe.toml")),
    ("mana", include_str!("persona/mana.toml")),
];

/// The file's keys.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    device: String,
    vendor_id: u32,
    vendor_part_id: u32,
    #[serde(default)]
    hw_ver: u32,
    fw_ver: String,
    board_id: Option<String>,
    hca_type: Option<String>,
    oui: Option<String>,
    rate: u32,
    #[serde(default)]
    lacks: Features,
    limits: Option<Tabled<Limits>>,
    gids: Tabled<GidShape>,
    pci: Option<Tabled<Pci>>,
}

macro_rules! limits {
    ($($name:ident)*) => {
        /// Limits below those of the engine.
        #[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub struct Limits {
            $($name: Option<i128>,)*
        }

        impl Limits {
            /// The names of all, with the values of a device.
            pub fn of(attr: &DeviceAttr) -> impl Iterator<Item = (&'static str, u32)> {
                [$((stringify!($name), attr.$name)),*].into_iter()
            }

            /// One that a device does not hold: its key, its value, and the most that the device holds.
            pub(crate) fn beyond(&self, device: &DeviceAttr) -> Option<(&'static str, i128, u32)> {
                $(
                    let most = device.$name;
                    if let Some(value) = self.$name && !(1..=most.into()).contains(&value) {
                        return Some((concat!("limits.", stringify!($name)), value, most));
                    }
                )*
                None
            }

            /// Puts them in place of those of a device, and lowers what depends on them. None is [beyond](Self::beyond) the device.
            pub(crate) fn apply(&self, mut attr: DeviceAttr) -> DeviceAttr {
                $(if let Some(value) = self.$name { attr.$name = value as u32; })*
                consistent(attr)
            }
        }
    };
}

limits! {
    max_qp max_qp_wr max_sge max_sge_rd max_inline_data max_cq max_cqe max_mr max_mw max_pd max_ah max_qp_rd_atom
    max_srq max_srq_wr max_srq_sge max_mcast_grp max_mcast_qp_attach
}

impl Limits {
    /// Queue pairs.
    pub(crate) fn max_qp(&self) -> Option<u32> {
        self.max_qp.map(|value| value as u32)
    }
}

impl Persona {
    /// The names of the built-in ones.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILT_IN.iter().map(|(name, _)| *name)
    }

    /// A built-in one.
    #[must_use]
    pub fn built_in(name: &str) -> Option<Self> {
        let (name, text) = BUILT_IN.iter().find(|(known, _)| *known == name)?;
        Some(Self::parse(name, text).expect("a test reads each of them"))
    }

    /// Whether a name is that of a file.
    #[must_use]
    pub fn is_file(name: &str) -> bool {
        Path::new(name).extension().is_some_and(|kind| kind == "toml")
    }

    /// Reads the text of a file.
    ///
    /// # Errors
    /// The reason, in one line, with the place.
    pub fn parse(name: &str, text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|error| in_words(&error.to_string()))?;
        let limits = file.limits.map_or_else(Limits::default, |Tabled(limits)| limits);
        let (Tabled(gids), pci) = (file.gids, file.pci.map(|Tabled(pci)| pci));
        let at = |key: &str, reason: &str| match line_of(text, key) {
            Some(line) => format!("line {line}: {key}{reason}"),
            None => format!("{key}{reason}"),
        };
        if let Some((key, value, most)) = limits.beyond(&limits::DEFAULT) {
            return Err(at(key, &format!(" = {value}: this device holds 1 to {most}")));
        }
        let rate = Rate::ALL.into_iter().find(|rate| rate.gbps == file.rate).ok_or_else(|| {
            let known = Rate::ALL.map(|rate| rate.gbps.to_string()).join(", ");
            at("rate", &format!(" = {}: expected one of {known}", file.rate))
        })?;
        for (key, text) in [
            ("fw_ver", Some(&file.fw_ver)),
            ("board_id", file.board_id.as_ref()),
            ("hca_type", file.hca_type.as_ref()),
        ] {
            if text.is_some_and(|text| !is_plain(text)) {
                return Err(at(key, ": expected 1 to 63 letters, digits and signs"));
            }
        }
        if !is_device_name(&file.device) {
            return Err(at("device", &format!(": expected {DEVICE_NAME}")));
        }
        let types = &gids.types;
        let order = &gids.order;
        if !types.contains(&GidType::RoceV2) || has_twice(types) {
            return Err(at("gids.types", ": expected \"RoCE v2\" among them, and each once"));
        }
        if order.len() != 2 || has_twice(order) {
            return Err(at("gids.order", ": expected \"ipv4\" and \"ipv6\", each once"));
        }
        if let Some(pci) = &pci {
            if !is_name(&pci.driver) {
                return Err(at("pci.driver", &format!(": expected {NAME}")));
            }
            if pci.class > 0xff_ffff {
                let reason = format!(" = {:#x}: expected a number of 24 bits", pci.class);
                return Err(at("pci.class", &reason));
            }
            if !matches!(pci.speed, 25 | 50 | 80 | 160 | 320 | 640) {
                let reason = format!(" = {}: expected 25, 50, 80, 160, 320 or 640", pci.speed);
                return Err(at("pci.speed", &reason));
            }
            if !matches!(pci.width, 1 | 2 | 4 | 8 | 12 | 16) {
                let reason = format!(" = {}: expected 1, 2, 4, 8, 12 or 16", pci.width);
                return Err(at("pci.width", &reason));
            }
            if pci.numa_nodes.len() > 64 || pci.numa_nodes.iter().any(|node| *node > 1023) {
                let reason = ": expected 64 nodes at most, each up to 1023";
                return Err(at("pci.numa_nodes", reason));
            }
        }
        let oui = file
            .oui
            .as_deref()
            .map(|oui| {
                parse_oui(oui).ok_or_else(|| {
                    at("oui", &format!(" = {oui:?}: expected three bytes such as \"b8:ce:f6\""))
                })
            })
            .transpose()?;
        Ok(Self {
            name: name.to_owned(),
            file: None,
            device: file.device,
            vendor_id: file.vendor_id,
            vendor_part_id: file.vendor_part_id,
            hw_ver: file.hw_ver,
            fw_ver: file.fw_ver,
            board_id: file.board_id,
            hca_type: file.hca_type,
            oui,
            rate,
            lacks: file.lacks,
            gids,
            pci,
            limits,
        })
    }

    /// A GUID with its first bits.
    #[must_use]
    pub fn guid(&self, guid: u64) -> u64 {
        self.oui.map_or(guid, |oui| u64::from(oui) << 40 | guid & 0xff_ffff_ffff)
    }

    /// The link-local address that hardware with a GUID makes from its Ethernet address, whose parts the GUID has.
    #[must_use]
    pub fn link_local(guid: u64) -> Gid {
        let interface_id = (guid >> 40 ^ 0x02_0000) << 40 | 0xff_fe00_0000 | guid & 0xff_ffff;
        Gid::from(IpAddr::from(Ipv6Addr::from(0xfe80 << 112 | u128::from(interface_id))))
    }

    /// The attributes of a device, with what it changes.
    #[must_use]
    pub fn apply(&self, attr: DeviceAttr) -> DeviceAttr {
        self.limits.apply(DeviceAttr {
            vendor_id: self.vendor_id,
            vendor_part_id: self.vendor_part_id,
            hw_ver: self.hw_ver,
            lacks: self.lacks,
            ..attr
        })
    }
}

/// Lowers what other limits, or the lack of a feature, do not allow.
fn consistent(mut attr: DeviceAttr) -> DeviceAttr {
    attr.max_sge_rd = attr.max_sge_rd.min(attr.max_sge);
    attr.max_res_rd_atom =
        attr.max_res_rd_atom.min(attr.max_qp.saturating_mul(attr.max_qp_rd_atom));
    let attachments = attr.max_mcast_grp.saturating_mul(attr.max_mcast_qp_attach);
    attr.max_total_mcast_qp_attach = attr.max_total_mcast_qp_attach.min(attachments);
    let lacks = |feature| attr.lacks.has(feature);
    let without_tags = [Feature::Srq, Feature::Rc, Feature::TagMatching].into_iter().any(lacks);
    let [srq, windows, memory, raw] =
        [Feature::Srq, Feature::MemoryWindows, Feature::DeviceMemory, Feature::RawPackets]
            .map(lacks);
    if srq {
        (attr.max_srq, attr.max_srq_wr, attr.max_srq_sge) = (0, 0, 0);
    }
    if without_tags {
        (attr.max_num_tags, attr.max_tag_ops, attr.max_rndv_hdr_size) = (0, 0, 0);
    }
    if windows {
        attr.max_mw = 0;
    }
    if memory {
        attr.max_dm_size = 0;
    }
    if raw {
        (attr.max_wq, attr.max_rwq_ind_tables, attr.max_rwq_ind_table_size) = (0, 0, 0);
        attr.max_tso = 0;
    }
    attr
}

/// Whether a text can be a line of a file in sysfs.
fn is_plain(text: &str) -> bool {
    (1..64).contains(&text.len()) && text.chars().all(|c| c == ' ' || c.is_ascii_graphic())
}

fn has_twice<T: PartialEq>(list: &[T]) -> bool {
    (1..list.len()).any(|n| list[..n].contains(&list[n]))
}

/// Three bytes in hexadecimal, with colons.
fn parse_oui(text: &str) -> Option<u32> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|byte| {
            let is_plain = byte.len() == 2 && byte.bytes().all(|b| b.is_ascii_hexdigit());
            u8::from_str_radix(byte, 16).ok().filter(|_| is_plain)
        })
        .collect();
    match bytes.as_deref() {
        Some([a, b, c]) => Some(u32::from_be_bytes([0, *a, *b, *c])),
        _ => None,
    }
}

#[cfg(test)]
mod tests;

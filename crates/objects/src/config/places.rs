//! The places of ports in a configuration: what names one, and what cannot be one.

use std::net::Ipv4Addr;
use std::path::Path;

use super::{Addresses, ConfigError, PortConfig, refusal};

/// A variable with this value, or a file.
#[derive(Clone, Debug)]
pub(super) enum AskedBy<'a> {
    Variable(String),
    File(&'a Path),
}

impl AskedBy<'_> {
    pub(super) fn file(&self) -> Option<&Path> {
        match self {
            Self::Variable(_) => None,
            Self::File(path) => Some(path),
        }
    }

    /// Refuses a device of the list, by its place, or the whole list.
    pub(super) fn refuse(
        &self,
        device: Option<usize>,
        key: &str,
        value: &str,
        expected: &str,
    ) -> ConfigError {
        match (self, device) {
            (Self::Variable(text), None) => refusal(None, "ANYVERBS_DEVICES", text, expected),
            (Self::Variable(text), Some(n)) => {
                let expected = format!("{expected}, and not {value:?} for device {}", n + 1);
                refusal(None, "ANYVERBS_DEVICES", text, &expected)
            }
            (Self::File(path), None) => refusal(Some(path), "devices", value, expected),
            (Self::File(path), Some(n)) => refusal(Some(path), &key_of(n, key), value, expected),
        }
    }

    /// The source of the place of a port, for messages: this key of the table of its device, if it has one.
    pub(super) fn name(&self, n: usize, key: Option<&str>) -> String {
        match (self, key) {
            (Self::Variable(_), _) => "ANYVERBS_DEVICES".to_owned(),
            (Self::File(path), Some(key)) => in_file(path, &key_of(n, key)),
            (Self::File(path), None) => in_file(path, "devices"),
        }
    }
}

/// A key of a file, for messages.
pub(super) fn in_file(path: &Path, key: &str) -> String {
    format!("configuration file {path:?}: {key}")
}

/// The name of a key of the table of a device.
pub(super) fn key_of(n: usize, key: &str) -> String {
    format!("device {} of devices: {key}", n + 1)
}

/// A port, the number of its device from 0, and what stands before its keys.
#[derive(Debug)]
pub(super) struct Placed {
    pub(super) device: usize,
    pub(super) before: String,
    /// Whether its place is written. Without one it has an address of the loopback interface.
    pub(super) has_place: bool,
    pub(super) port: PortConfig,
}

impl Placed {
    /// For people: the whole device, or one of its ports.
    pub(super) fn whose(&self) -> String {
        let device = self.device + 1;
        if self.before.is_empty() {
            format!("device {device}")
        } else {
            format!("port {} of device {device}", self.port.port)
        }
    }
}

/// The place that a text names.
pub(super) fn place_from(text: &str) -> Addresses {
    match text.parse() {
        Ok(ip) => Addresses::One(ip),
        Err(_) => Addresses::Interfaces(vec![text.to_owned()]),
    }
}

/// Refuses a place that no port can have, whose keys stand behind `before`.
pub(super) fn check_place(
    (n, before): (usize, &str),
    addresses: &Addresses,
    by: &AskedBy<'_>,
) -> Result<(), ConfigError> {
    let expected = match addresses {
        _ if is_place(addresses) => return Ok(()),
        Addresses::Interfaces(names) if names.iter().any(|name| is_numeric(name)) => {
            "an address, or the name of an interface, which is no number"
        }
        Addresses::Interfaces(_) => "the name of an interface, of 1 to 15 bytes, or an address",
        Addresses::One(_) => "an address of the host",
    };
    let (key, place) = place_of(addresses);
    Err(by.refuse(Some(n), &format!("{before}{key}"), &place, expected))
}

/// The key of a place, and its value.
pub(super) fn place_of(addresses: &Addresses) -> (&'static str, String) {
    match addresses {
        Addresses::Interfaces(names) => ("interface", names.join(",")),
        Addresses::One(ip) => ("address", ip.to_string()),
    }
}

/// The address of a port that is given none, behind so many others.
pub(super) fn loopback(n: usize) -> Addresses {
    let last = u8::try_from(n).unwrap_or(u8::MAX).saturating_add(1);
    Addresses::One(Ipv4Addr::new(127, 0, 0, last).into())
}

/// Whether a number, or an address that cannot be, stands where the name of an interface is expected.
fn is_numeric(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_digit() || c == '.')
}

/// Whether an interface can have this name. Linux takes no slash, colon or white space. It takes numbers, but nobody means them.
fn is_interface_name(name: &str) -> bool {
    let fits = |c: char| c != '/' && c != ':' && !c.is_whitespace();
    (1..16).contains(&name.len()) && name.chars().all(fits) && !is_numeric(name)
}

fn is_place(addresses: &Addresses) -> bool {
    match addresses {
        Addresses::Interfaces(names) => names.iter().all(|name| is_interface_name(name)),
        Addresses::One(ip) => !ip.is_unspecified() && !ip.is_multicast(),
    }
}

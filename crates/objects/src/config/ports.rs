//! The ports of a device of a configuration: one that the device's own table describes, or a list of one or two.

use std::net::IpAddr;

use anyverbs_proto::types::{Mtu, PKey};
use serde::Deserialize;

use super::devices::shown;
use super::form::{Item, Kind, PkeyList, Several};
use super::places::{AskedBy, Placed, check_place, loopback, place_from};
use super::{Addresses, ConfigError, PortConfig};

/// Most P_Keys of a port, as adapters have.
const MOST_PKEYS: usize = 128;
/// Most ports of a device, as adapters have.
const MOST: usize = 2;

/// The keys of a port. Without a place it has an address of the loopback interface.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PortTable {
    pub(super) interface: Option<String>,
    pub(super) address: Option<IpAddr>,
    pub(super) mtu: Option<i128>,
    pub(super) pkeys: Option<PkeyList>,
}

impl Kind for PortTable {
    const MANY: &'static str = "ports";

    fn says_something(&self) -> bool {
        let Self { interface, address, mtu, pkeys } = self;
        interface.is_some() || address.is_some() || mtu.is_some() || pkeys.is_some()
    }
}

impl PortTable {
    /// The port of device `n`, with what `port` has unless the table says otherwise. Its keys stand behind `before`.
    pub(super) fn read(
        self,
        (n, before): (usize, &str),
        mut port: PortConfig,
        by: &AskedBy<'_>,
    ) -> Result<Placed, ConfigError> {
        let has_place = self.interface.is_some() || self.address.is_some();
        let key = |key: &str| by.name(n, Some(&format!("{before}{key}")));
        match (self.interface, self.address) {
            (None, None) => {}
            (Some(interface), None) => {
                port.addresses = Addresses::Interfaces(vec![interface]);
                port.named_by = key("interface");
            }
            (None, Some(address)) => {
                port.addresses = Addresses::One(address);
                port.named_by = key("address");
            }
            (Some(_), Some(address)) => {
                let (key, expected) = (format!("{before}address"), "nothing beside the interface");
                return Err(by.refuse(Some(n), &key, &address.to_string(), expected));
            }
        }
        check_place((n, before), &port.addresses, by)?;
        if let Some(bytes) = self.mtu {
            let mtu = Mtu::ALL.into_iter().find(|mtu| i128::from(mtu.bytes()) == bytes);
            let (key, expected) = (format!("{before}mtu"), "256, 512, 1024, 2048 or 4096");
            port.mtu = mtu.ok_or_else(|| by.refuse(Some(n), &key, &bytes.to_string(), expected))?;
        }
        if let Some(PkeyList(keys)) = self.pkeys {
            port.pkeys = pkeys((n, before), &keys, by)?;
        }
        Ok(Placed { device: n, before: before.to_owned(), has_place, port })
    }
}

/// The ports of device `n`, behind so many of others. `beside` is what the table of the device says of a place.
pub(super) fn read(
    ports: Several<Item<PortTable>>,
    beside: PortTable,
    n: usize,
    (device, behind): (&PortConfig, usize),
    by: &AskedBy<'_>,
) -> Result<Vec<Placed>, ConfigError> {
    let keys = [
        ("interface", beside.interface),
        ("address", beside.address.map(|address| address.to_string())),
        ("mtu", beside.mtu.map(|bytes| bytes.to_string())),
        ("pkeys", beside.pkeys.map(|PkeyList(keys)| format!("a list of {}", keys.len()))),
    ];
    if let Some((key, value)) = keys.into_iter().find_map(|(key, value)| Some((key, value?))) {
        let expected = "nothing beside ports: each port has a place, an MTU and P_Keys of its own";
        return Err(by.refuse(Some(n), key, &value, expected));
    }
    let (count, said) = match &ports {
        Several::Number(number) => (usize::try_from(*number).unwrap_or(0), number.to_string()),
        Several::List(list) => (list.len(), format!("a list of {}", list.len())),
    };
    if !(1..=MOST).contains(&count) {
        let expected = "1 or 2, or a list of as many interfaces, addresses or tables";
        return Err(by.refuse(Some(n), "ports", &said, expected));
    }
    if let (2, Some(guid @ u64::MAX)) = (count, device.guid) {
        let expected = "a GUID below it: port 2 gets the next";
        return Err(by.refuse(Some(n), "guid", &shown(guid), expected));
    }
    let items = match ports {
        Several::Number(_) => (0..count).map(|_| Item::Table(PortTable::default())).collect(),
        Several::List(items) => items,
    };
    let read = |(at, item): (usize, Item<PortTable>)| {
        let before = format!("port {} of ports: ", at + 1);
        let port = PortConfig {
            port: at as u8 + 1,
            addresses: loopback(behind + at),
            guid: device.guid.map(|guid| guid + at as u64),
            named_by: by.name(n, Some("ports")),
            ..device.clone()
        };
        match item {
            Item::Table(table) => table.read((n, &before), port, by),
            Item::Text(text) => {
                let port = PortConfig { addresses: place_from(&text), ..port };
                let placed = PortTable::default().read((n, &before), port, by)?;
                Ok(Placed { has_place: true, ..placed })
            }
        }
    };
    items.into_iter().enumerate().map(read).collect()
}

/// The table of P_Keys, if it can be one of a port.
fn pkeys(
    (n, before): (usize, &str),
    keys: &[i128],
    by: &AskedBy<'_>,
) -> Result<Vec<PKey>, ConfigError> {
    let refuse = |key: &str, value: &str, expected: &str| {
        by.refuse(Some(n), &format!("{before}{key}"), value, expected)
    };
    if !(1..=MOST_PKEYS).contains(&keys.len()) {
        let (value, expected) =
            (format!("a list of {}", keys.len()), format!("a list of 1 to {MOST_PKEYS} keys"));
        return Err(refuse("pkeys", &value, &expected));
    }
    let mut table = Vec::with_capacity(keys.len());
    for (index, key) in keys.iter().enumerate() {
        let refuse = |value: &str, expected: &str| {
            refuse(&format!("pkeys, key {}", index + 1), value, expected)
        };
        let Ok(pkey) = u16::try_from(*key) else {
            let value = if *key < 0 { key.to_string() } else { format!("{key:#06x}") };
            return Err(refuse(&value, "a P_Key from 0x0001 to 0xffff"));
        };
        let value = format!("{pkey:#06x}");
        if pkey & 0x7fff == 0 {
            return Err(refuse(&value, "a partition from 1 to 0x7fff in the lower 15 bits"));
        }
        if let Some(same) = keys[..index].iter().position(|other| other == key) {
            let expected = format!("another key than key {}, for each stands there once", same + 1);
            return Err(refuse(&value, &expected));
        }
        table.push(PKey(pkey));
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    /// The ports that a list of devices has.
    fn ports_of(devices: &str) -> Result<Vec<String>, String> {
        let file = format!("devices = [{devices}]");
        let config = Config::parse("/etc/rack.toml", &file, |_| None).map_err(|e| e.to_string())?;
        let shown = |port: &super::PortConfig| {
            let place = match &port.addresses {
                super::Addresses::One(ip) => ip.to_string(),
                super::Addresses::Interfaces(names) => names.join("+"),
            };
            let keys: Vec<_> = port.pkeys.iter().map(|key| format!("{:x}", key.0)).collect();
            format!("{}/{}={place}:{}", port.name, port.port, keys.join(","))
        };
        Ok(config.ports.iter().map(shown).collect())
    }

    #[test]
    fn a_device_may_have_two_ports() {
        let of = |devices: &str| ports_of(devices).unwrap().join(" ");
        let two = "anyverbs0/1=127.0.0.1:ffff anyverbs0/2=127.0.0.2:ffff";
        assert_eq!(of("{ ports = 2 }"), two);
        assert_eq!(of("{ ports = [{}, {}] }"), two);
        assert_eq!(
            of("{ ports = 2 }, {}"),
            format!("{two} anyverbs1/1=127.0.0.3:ffff"),
            "names count devices, and addresses count ports"
        );
        assert_eq!(
            of(
                "{}, { name = 'a', persona = 'mlx5', ports = ['eth0', { address = '10.0.0.2', pkeys = [1, 2] }] }"
            ),
            "anyverbs0/1=127.0.0.1:ffff a/1=eth0:ffff a/2=10.0.0.2:1,2"
        );
        assert_eq!(of("{ ports = ['eth0'] }"), "anyverbs0/1=eth0:ffff");
    }

    #[test]
    fn the_attributes_of_a_device_count_its_ports() {
        let file = "devices = [{ ports = [{}, { pkeys = [1, 2] }] }, {}]";
        let config = Config::parse("", file, |_| None).unwrap();
        let attrs = config.device_attrs(|_, number| number);
        let shown: Vec<_> =
            attrs.iter().map(|a| (a.node_guid, a.phys_port_cnt, a.max_pkeys)).collect();
        assert_eq!(shown, [(0, 2, 2), (1, 2, 2), (2, 1, 1)]);
        let adapters: Vec<_> = attrs.iter().map(|a| a.sys_image_guid).collect();
        assert_eq!(adapters, [0, 0, 2]);
        assert_eq!([0, 1, 2].map(|number| config.device_of(number)), [(0, 1), (0, 2), (2, 1)]);
    }

    #[test]
    fn a_port_says_what_names_its_addresses() {
        let file = "devices = ['eth0', { ports = [{ interface = 'eth1' }, { address = '2.2.2.2' }] }, \
                    { ports = ['eth2', {}] }]";
        let config = Config::parse("/etc/rack.toml", file, |_| None).unwrap();
        let faults: Vec<_> =
            (0..5).map(|port| config.fault_of_addresses(port, "it is down")).collect();
        let wanted = [
            ("anyverbs0", "devices"),
            ("anyverbs1/1", "device 2 of devices: port 1 of ports: interface"),
            ("anyverbs1/2", "device 2 of devices: port 2 of ports: address"),
            ("anyverbs2/1", "device 3 of devices: ports"),
            ("anyverbs2/2", "device 3 of devices: ports"),
        ]
        .map(|(port, key)| {
            format!("device {port}, by configuration file \"/etc/rack.toml\": {key}: it is down")
        });
        assert_eq!(faults, wanted);
    }

    #[test]
    fn ports_that_cannot_be_are_refused_with_their_place() {
        for (devices, wanted) in [
            ("{ ports = 3 }", "device 1 of devices: ports=\"3\": expected 1 or 2, or a list"),
            ("{ ports = 0 }", "device 1 of devices: ports=\"0\": expected 1 or 2, or a list"),
            ("{}, { ports = [] }", "device 2 of devices: ports=\"a list of 0\": expected 1 or 2"),
            (
                "{ ports = ['a', 'b', 'c'] }",
                "device 1 of devices: ports=\"a list of 3\": expected 1 or 2",
            ),
            (
                "{ address = '10.0.0.1', ports = 2 }",
                "device 1 of devices: address=\"10.0.0.1\": expected nothing beside ports: each",
            ),
            (
                "{ pkeys = [1], ports = 2 }",
                "device 1 of devices: pkeys=\"a list of 1\": expected nothing beside ports: each",
            ),
            (
                "{ ports = [{}, { interface = 'eth0', address = '10.0.0.1' }] }",
                "device 1 of devices: port 2 of ports: address=\"10.0.0.1\": expected nothing beside",
            ),
            (
                "{ ports = ['eth0', 'eth0'] }",
                "device 1 of devices: port 2 of ports: interface=\"eth0\": expected a place that port 1 of device 1 does not have",
            ),
            (
                "'eth0', { ports = ['eth1', 'eth0'] }",
                "device 2 of devices: port 2 of ports: interface=\"eth0\": expected a place that device 1 does not have",
            ),
            (
                "{ ports = [{}, { address = '0.0.0.0' }] }",
                "device 1 of devices: port 2 of ports: address=\"0.0.0.0\": expected an address",
            ),
            (
                "{ ports = [{}, { pkeys = [1, 1] }] }",
                "device 1 of devices: port 2 of ports: pkeys, key 2=\"0x0001\": expected another",
            ),
        ] {
            let error = ports_of(devices).unwrap_err();
            let wanted = format!("configuration file \"/etc/rack.toml\": {wanted}");
            assert!(error.starts_with(&wanted), "{devices}: {error}");
        }
        for (devices, wanted) in [
            ("{ ports = 'eth0' }", "expected a number of ports, or a list of them"),
            ("{ ports = [{ name = 'a' }] }", "unknown field `name`, expected one of `interface`"),
        ] {
            let error = ports_of(devices).unwrap_err();
            assert!(error.contains("line 1, column") && error.contains(wanted), "{error}");
        }
        let many = vec!["{ ports = 2 }"; 33].join(", ");
        let error = ports_of(&many).unwrap_err();
        assert!(error.contains("devices=\"66 ports\": expected 64 at most, of all"), "{error}");
    }
}

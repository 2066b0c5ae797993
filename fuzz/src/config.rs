//! A configuration: a file, and variables.
//!
//! The configuration is used, or refused by one line that names the wrong part. A used one keeps its limits.

use anyverbs::config::{Config, MOST_PORTS};

const VARIABLES: [&str; 24] = [
    "DEVICE",
    "DEVICES",
    "UDP_PORT",
    "REGISTRY",
    "INTERFACES",
    "WINDOW",
    "RECEIVE_BUFFER",
    "GSO",
    "INPROC",
    "SHM",
    "DIRECT",
    "MAX_QP",
    "RAW_INTERFACE",
    "CAPTURE",
    "LOSS",
    "DUPLICATION",
    "REORDER",
    "CORRUPTION",
    "FAULT_SEED",
    "FAULTS",
    "CONFIG",
    "NOTHING",
    "TRACE",
    "PERSONA",
];

/// The input as text: lines `NAME=value` are variables (the last one counts), everything after an empty line is the file.
pub fn run(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let (variables, file) = text.split_once("\n\n").unwrap_or((&text, ""));
    let variable = |name: &str| {
        let key = name.strip_prefix("ANYVERBS_").expect("our own prefix");
        assert!(VARIABLES.contains(&key), "{key} is not among the fuzz target's");
        let lines = variables.lines().rev();
        lines
            .filter_map(|line| line.split_once('='))
            .find(|(k, _)| *k == key)
            .map(|(_, v)| v.into())
    };
    match Config::parse("anyverbs.toml", file, variable) {
        Ok(config) => {
            assert!(config.udp_port != 0);
            let is_name = |name: &str| (1..=48).contains(&name.len()) && !name.contains('/');
            assert!((1..=MOST_PORTS).contains(&config.ports.len()));
            assert!(config.ports.iter().all(|port| is_name(&port.name)));
            for (place, port) in config.ports.iter().enumerate() {
                let (device, number) = config.device_of(place);
                assert!(config.ports[device].name == port.name && number == port.port);
                assert!((1..=2).contains(&number));
            }
            assert!((1..=32).contains(&config.registry.len()) && !config.registry.contains('/'));
            assert!((8192..=1 << 30).contains(&config.udp.window));
            assert!((4096..=1 << 30).contains(&config.udp.receive_buffer));
            assert!(config.max_qp.is_none_or(|most| (1..=60_000).contains(&most.number)));
            assert!(config.raw_interface.is_none_or(|name| (1..16).contains(&name.len())));
            if let Some(fault) = config.fault {
                assert!(!config.shm, "faults are those of a network");
                let parts = [fault.loss, fault.duplication, fault.reorder, fault.corruption];
                assert!(parts.iter().all(|p| (0.0..=1.0).contains(p)));
            }
        }
        Err(error) => {
            let line = error.to_string();
            assert!(!line.contains(['\n', '\r', '\0', '\u{1b}']), "{line:?}");
            assert!(line.len() < 1000 + 2 * input.len() * 4, "longer than what it speaks of");
        }
    }
}

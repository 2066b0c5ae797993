//! Configuration: variables `ANYVERBS_*`, over a TOML file that `ANYVERBS_CONFIG` names, over the defaults.

use std::fs::File as OpenFile;
use std::io::{self, Read};
use std::net::IpAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Once};

use anyverbs_faults::{Script, ScriptError};
use anyverbs_net::fault::FaultPolicy;
use anyverbs_proto::types::{Mtu, PKey};
use serde::Deserialize;
use thiserror::Error;

use crate::persona::{Limits, Persona};
use crate::text::{DEVICE_NAME, in_words, is_device_name, is_name};
use devices::{Asked, FIRST, FileDevices, Without};
use places::in_file;

mod devices;
pub(crate) mod form;
mod places;
mod ports;

pub use anyverbs_net::host::MOST_PORTS;

/// Why the configuration is not usable: one clear line.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A script of faults.
    #[error("{named_by}: {error}")]
    Faults {
        /// Faults, and the file that has the script, if it is in one.
        named_by: String,
        /// Its mistake.
        error: ScriptError,
    },
    /// A file of faults cannot be read.
    #[error("cannot read the script of faults {path:?}: {reason}")]
    FaultsUnreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A script of faults names a device or a port that does not exist.
    #[error("{named_by}, line {line}: {reason}")]
    FaultyPlace {
        /// As in [`Faults`](Self::Faults).
        named_by: String,
        /// The line of the script.
        line: u32,
        /// Why not.
        reason: String,
    },
    /// A variable's value.
    #[error("{variable}={value:?}: expected {expected}")]
    Value {
        /// Its name.
        variable: String,
        /// Its value.
        value: String,
        /// The expected form.
        expected: String,
    },
    /// A value of the configuration file.
    #[error("configuration file {path:?}: {key}={value:?}: expected {expected}")]
    InFile {
        /// The file.
        path: PathBuf,
        /// Its key, with the number of the device if it is one of a device's table.
        key: String,
        /// Its value.
        value: String,
        /// The expected form.
        expected: String,
    },
    /// The file cannot be read.
    #[error("cannot read the configuration file {path:?}: {reason}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The file does not parse.
    #[error("configuration file {path:?}: {reason}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Why, and where.
        reason: String,
    },
    /// The file of a persona cannot be read, or does not parse.
    #[error("{named_by} {path:?}: {reason}")]
    Persona {
        /// The place that names it: a variable, or a configuration file and the key in it.
        named_by: String,
        /// The file.
        path: PathBuf,
        /// Why, and where.
        reason: String,
    },
}

/// The device's configuration.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Config {
    /// UDP port; RoCEv2's is 4791.
    pub udp_port: u16,
    /// Name of the registry in which the processes of this host find each other.
    pub registry: String,
    /// The ports of all devices, one at least. The second port of a device stands behind its first. A port is known by its place here, and a
    /// device by that of its first port.
    pub ports: Vec<PortConfig>,
    /// How much is sent and received by UDP at once.
    pub udp: UdpConfig,
    /// Whether queue pairs of one process talk directly instead of through UDP.
    pub inproc: bool,
    /// Whether processes of this user and host talk through shared memory instead of UDP. Both must have it, else they
    /// talk by UDP. Faults that are injected switch it off: they are those of a network.
    pub shm: bool,
    /// Whether one-sided operations between processes that talk through shared memory go straight into the target's memory;
    /// both must have it, else they are messages. A capture, a trace, a script of faults and P_Keys switch it off: they need packets.
    pub direct: bool,
    /// Whether a device has other P_Keys than the default.
    pub partitioned: bool,
    /// A warning that a variable replaces tables of the file.
    pub replaced: Option<String>,
    /// Largest number of queue pairs, in place of the device's.
    pub max_qp: Option<MaxQp>,
    /// Interface on which raw packets leave and arrive as well. Without one they stay on the host.
    pub raw_interface: Option<String>,
    /// Writes every packet to this pcapng file. `%p` in it stands for the number of the process.
    pub capture: Option<PathBuf>,
    /// Writes events in time to this file: work requests, packets, retries, waits. `%p` as in `capture`.
    pub trace: Option<PathBuf>,
    /// Faults injected into received datagrams.
    pub fault: Option<FaultPolicy>,
    /// The persona of the devices that have none of their own.
    pub persona: Option<Arc<Persona>>,
    /// A script of faults.
    pub faults: Option<Script>,
    /// The number with which the choices of the script begin: that of the variable, of the script, or of the file.
    pub fault_seed: u64,
}

/// The most queue pairs of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MaxQp {
    /// So many.
    pub number: u32,
    /// What gives the number, for messages: a variable, or a file and the key in it.
    pub named_by: String,
}

/// A port of a device of the process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// The name of its device.
    pub name: String,
    /// Its number in that one: 1 or 2.
    pub port: u8,
    /// Its addresses.
    pub addresses: Addresses,
    /// The vendor's device that its device looks like.
    pub persona: Option<Arc<Persona>>,
    /// Its GUID, if the configuration gives its device one. That of a first port is the node's.
    pub guid: Option<u64>,
    /// Limits of its device, which precede those of the persona.
    pub limits: Limits,
    /// Its P_Keys, one at least.
    pub pkeys: Vec<PKey>,
    /// The largest path MTU, if its interfaces let that pass.
    pub mtu: Mtu,
    /// The source of its addresses, for messages: a variable, or a file and the key in it. Empty if there is none.
    pub named_by: String,
}

impl PortConfig {
    /// The first of a device, with the default partition alone.
    fn new(name: String, addresses: Addresses, persona: Option<Arc<Persona>>) -> Self {
        Self {
            name,
            port: 1,
            addresses,
            persona,
            guid: None,
            limits: Limits::default(),
            pkeys: vec![PKey::DEFAULT],
            mtu: Mtu::Mtu4096,
            named_by: String::new(),
        }
    }
}

/// The addresses of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Addresses {
    /// Those of these interfaces; of all where empty.
    Interfaces(Vec<String>),
    /// One alone.
    One(IpAddr),
}

/// How much is sent and received by UDP at once.
#[derive(Clone, Debug, PartialEq)]
pub struct UdpConfig {
    /// Bytes that may be in flight to one receiving process.
    pub window: u32,
    /// Receive buffer to ask the system for, in bytes.
    pub receive_buffer: usize,
    /// UDP segmentation offload.
    pub gso: bool,
}

impl Default for UdpConfig {
    fn default() -> Self {
        Self {
            // Three full batches with their overhead. An unprivileged socket is granted 208 KiB, of which the kernel
            // makes 416 to account for its overhead. Those hold this much in single datagrams, too.
            window: 200 << 10,
            receive_buffer: 8 << 20,
            gso: true,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self {
            udp_port: 4791,
            registry: "anyverbs".into(),
            ports: vec![PortConfig::new(FIRST.into(), Addresses::Interfaces(Vec::new()), None)],
            udp: UdpConfig::default(),
            inproc: true,
            shm: true,
            direct: true,
            partitioned: false,
            replaced: None,
            max_qp: None,
            raw_interface: None,
            capture: None,
            trace: None,
            fault: None,
            persona: None,
            faults: None,
            fault_seed: 1,
        }
    }
}

/// The file's keys. Those of the environment are the same, in capitals after `ANYVERBS_`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    device: Option<String>,
    udp_port: Option<u16>,
    registry: Option<String>,
    interfaces: Option<Vec<String>>,
    devices: Option<FileDevices>,
    window: Option<u32>,
    receive_buffer: Option<usize>,
    gso: Option<bool>,
    inproc: Option<bool>,
    shm: Option<bool>,
    direct: Option<bool>,
    max_qp: Option<u32>,
    raw_interface: Option<String>,
    capture: Option<PathBuf>,
    trace: Option<PathBuf>,
    loss: Option<f64>,
    duplication: Option<f64>,
    reorder: Option<f64>,
    corruption: Option<f64>,
    fault_seed: Option<u64>,
    persona: Option<String>,
    faults: Option<String>,
}

impl Config {
    /// Reads the environment, and the file that it names. A set-user-ID program gets the defaults.
    ///
    /// # Errors
    /// [`ConfigError`], the first that is found.
    pub fn load() -> Result<Self, ConfigError> {
        static SAID: Once = Once::new();
        let config = Self::load_with(&[])?;
        if let Some(what) = &config.replaced {
            SAID.call_once(|| tracing::warn!(target: "anyverbs", "{what}"));
        }
        Ok(config)
    }

    /// The devices, each by the place of its first port.
    pub fn devices(&self) -> impl Iterator<Item = (usize, &PortConfig)> + Clone {
        self.ports.iter().enumerate().filter(|(_, port)| port.port == 1)
    }

    /// The number of a device in their order, by the place of its first port.
    #[must_use]
    pub fn number_of(&self, device: usize) -> usize {
        self.devices().take_while(|(at, _)| *at < device).count()
    }

    /// The device of a port, and the port's number in it.
    #[must_use]
    pub fn device_of(&self, port: usize) -> (usize, u8) {
        match self.ports.get(port) {
            Some(of) => (port + 1 - usize::from(of.port), of.port),
            None => (port, 1),
        }
    }

    /// The name of a port: the device's, with the number behind it if there are two.
    #[must_use]
    pub fn port_name(&self, port: usize) -> String {
        let Some(PortConfig { name, port: number, .. }) = self.ports.get(port) else {
            return String::new();
        };
        match self.ports.iter().filter(|other| other.name == *name).count() {
            1 => name.clone(),
            _ => format!("{name}/{number}"),
        }
    }

    /// A fault of the addresses of a port, with its name and what names them.
    #[must_use]
    pub fn fault_of_addresses(&self, port: usize, fault: &str) -> String {
        let by = self.ports.get(port).map_or("", |port| port.named_by.as_str());
        format!("device {}, by {by}: {fault}", self.port_name(port))
    }

    /// As [`load`](Self::load), with these variables before those of the environment.
    ///
    /// # Errors
    /// [`ConfigError`], the first that is found.
    pub fn load_with(variables: &[(&str, std::ffi::OsString)]) -> Result<Self, ConfigError> {
        Self::from_variables(|name| {
            let given = variables.iter().find(|(given, _)| *given == name);
            let value = match given {
                Some((_, value)) => Some(value.clone()),
                None => anyverbs_environment::variable(name),
            };
            // Bytes that are no UTF-8 then fail to parse, with the replacement character in the message.
            value.map(|value| value.to_string_lossy().into_owned())
        })
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let path = variable("ANYVERBS_CONFIG").filter(|path| !path.is_empty()).map(PathBuf::from);
        let read = |path: &Path| read_text(path).map_err(|error| error.to_string());
        let Some(path) = path else { return Self::parse_with("".into(), "", variable, read) };
        let text = read_configuration(&path)
            .map_err(|e| ConfigError::Unreadable { path: path.clone(), reason: e.to_string() })?;
        Self::parse_with(path, &text, variable, read)
    }

    /// Reads variables, and `text`, the contents of the file `path`. It reads no other file: a persona is a built-in one.
    ///
    /// # Errors
    /// [`ConfigError`], the first that is found.
    pub fn parse(
        path: impl Into<PathBuf>,
        text: &str,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        Self::parse_with(path.into(), text, variable, |_| Err("no file is read here".to_owned()))
    }

    fn parse_with(
        path: PathBuf,
        text: &str,
        variable: impl Fn(&str) -> Option<String>,
        read: impl Fn(&Path) -> Result<String, String>,
    ) -> Result<Self, ConfigError> {
        // A persona or a script that the file names lies beside it.
        let dir = path.parent().unwrap_or(Path::new("")).to_owned();
        let file: File = toml::from_str(text).map_err(|e| ConfigError::Syntax {
            path: path.clone(),
            reason: in_words(&e.to_string()),
        })?;
        let env = Environment { variable, path: &path };
        let default = Self::default();

        let given_seed = env.parse("FAULT_SEED", None, "a number", |_: &u64| true)?;
        let policy = FaultPolicy {
            loss: env.fraction("LOSS", file.loss)?,
            duplication: env.fraction("DUPLICATION", file.duplication)?,
            reorder: env.fraction("REORDER", file.reorder)?,
            corruption: env.fraction("CORRUPTION", file.corruption)?,
            seed: given_seed.or(file.fault_seed).unwrap_or(default.fault_seed),
        };
        let faulty = policy.loss > 0.0
            || policy.duplication > 0.0
            || policy.reorder > 0.0
            || policy.corruption > 0.0;
        let name = |s: &String| is_device_name(s);
        let common = match (env.value("PERSONA"), &file.persona) {
            (Some(name), _) => {
                Some(persona(&name, (None, "ANYVERBS_PERSONA"), Path::new(""), &read)?)
            }
            (None, Some(name)) => Some(persona(name, (Some(&path), "persona"), &dir, &read)?),
            (None, None) => None,
        };
        let device = env
            .parse("DEVICE", file.device, DEVICE_NAME, name)?
            .or_else(|| Some(common.as_ref()?.device.clone()))
            .unwrap_or_else(|| FIRST.to_owned());
        let given = env.list("INTERFACES");
        let by = if given.is_some() { None } else { Some(&*path) };
        let interfaces = given.or(file.interfaces).unwrap_or_default();
        let (asked, replaced) = match (env.value("DEVICES"), file.devices) {
            (Some(text), of_file) => {
                let tables = of_file.as_ref().map_or(0, FileDevices::tables);
                let replaced = (tables > 0).then(|| devices::replaced(&text, tables, &path));
                (Some(Asked::parse(&text)), replaced)
            }
            (None, of_file) => (of_file.map(|devices| Asked::of_file(devices, &path)), None),
        };
        let max_qp = env
            .parse("MAX_QP", file.max_qp, "a number from 1 to 60000", |n| (1..=60_000).contains(n))?
            .map(|number| MaxQp {
                number,
                named_by: match env.value("MAX_QP") {
                    Some(_) => "ANYVERBS_MAX_QP".to_owned(),
                    None => in_file(&path, "max_qp"),
                },
            });
        let without = Without {
            first: &device,
            persona: common.as_ref(),
            interfaces: (&interfaces, by),
            max_qp: max_qp.as_ref(),
        };
        let own = |name: &str, key: &str| persona(name, (Some(&path), key), &dir, &read);
        let ports = devices::devices(without, asked, own)?;
        let registry_name = |s: &String| is_name(s) && s.len() <= 32;
        let capture = env.value("CAPTURE").map(PathBuf::from).or(file.capture);
        let trace = env.value("TRACE").map(PathBuf::from).or(file.trace);
        let faults = match (env.value("FAULTS"), file.faults) {
            (Some(text), _) => script(text, None, Path::new(""), &ports)?,
            (None, Some(text)) => script(text, Some(&path), &dir, &ports)?,
            (None, None) => None,
        };
        let partitioned = ports.iter().any(|port| port.pkeys != [PKey::DEFAULT]);
        let injects = faults.is_some();
        let of_script = faults.as_ref().and_then(|script| script.seed);
        let fault_seed = given_seed.or(of_script).unwrap_or(policy.seed);
        Ok(Self {
            udp_port: env
                .parse("UDP_PORT", file.udp_port, "a UDP port from 1 to 65535", |p| *p != 0)?
                .unwrap_or(default.udp_port),
            registry: env
                .parse(
                    "REGISTRY",
                    file.registry,
                    "a name of 1 to 32 bytes, not . or .., without a slash or control characters",
                    registry_name,
                )?
                .unwrap_or(default.registry),
            ports,
            udp: UdpConfig {
                window: env
                    .parse("WINDOW", file.window, "bytes, 8192 to 1073741824", |w| {
                        (8192..=1 << 30).contains(w)
                    })?
                    .unwrap_or(default.udp.window),
                receive_buffer: env
                    .parse(
                        "RECEIVE_BUFFER",
                        file.receive_buffer,
                        "bytes, 4096 to 1073741824",
                        |b| (4096..=1 << 30).contains(b),
                    )?
                    .unwrap_or(default.udp.receive_buffer),
                gso: env.flag("GSO", file.gso)?.unwrap_or(default.udp.gso),
            },
            inproc: env.flag("INPROC", file.inproc)?.unwrap_or(default.inproc),
            shm: env.flag("SHM", file.shm)?.unwrap_or(default.shm) && !faulty,
            direct: env.flag("DIRECT", file.direct)?.unwrap_or(default.direct)
                && capture.is_none()
                && trace.is_none()
                && !injects
                && !partitioned,
            partitioned,
            replaced,
            max_qp,
            raw_interface: env.parse(
                "RAW_INTERFACE",
                file.raw_interface,
                "the name of an interface",
                |name| (1..16).contains(&name.len()),
            )?,
            capture,
            trace,
            fault: faulty.then_some(policy),
            persona: common,
            faults,
            fault_seed,
        })
    }
}

/// The persona of a name, which a key of a file or a variable gives: a built-in one, or a file below a directory.
fn persona(
    name: &str,
    (file, key): (Option<&Path>, &str),
    dir: &Path,
    read: impl Fn(&Path) -> Result<String, String>,
) -> Result<Arc<Persona>, ConfigError> {
    if let Some(persona) = Persona::built_in(name.trim()) {
        return Ok(Arc::new(persona));
    }
    if !Persona::is_file(name) {
        let known: Vec<_> = Persona::names().collect();
        let expected = format!("{}, or a file whose name ends in .toml", known.join(", "));
        return Err(refusal(file, key, name, &expected));
    }
    let path = dir.join(name);
    let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let parsed = read(&path).and_then(|text| Persona::parse(&stem, &text));
    match parsed {
        Ok(mut persona) => {
            persona.file = Some(path);
            Ok(Arc::new(persona))
        }
        Err(reason) => {
            let by = file.map_or_else(|| format!("{key}: persona"), |file| in_file(file, key));
            Err(ConfigError::Persona { named_by: by, path, reason })
        }
    }
}

/// Most bytes of such a file.
const LONGEST_TEXT: u64 = 1 << 20;

/// The script of faults: `text`, or the contents of the file below a directory that it names, if it is one word. A configuration file
/// may have it.
fn script(
    text: String,
    by: Option<&Path>,
    dir: &Path,
    ports: &[PortConfig],
) -> Result<Option<Script>, ConfigError> {
    if text.trim().is_empty() {
        return Ok(None);
    }
    let is_text = text.trim().contains(char::is_whitespace);
    let file = (!is_text).then(|| dir.join(text.trim()));
    let text = match &file {
        Some(path) => read_text(path).map_err(|e| {
            let (path, reason) = (path.clone(), e.to_string());
            ConfigError::FaultsUnreadable { path, reason }
        })?,
        None => text,
    };
    let named_by = || match (&file, by) {
        (Some(file), _) => format!("faults in {}", file.display()),
        (None, Some(by)) => in_file(by, "faults"),
        (None, None) => "faults".to_owned(),
    };
    let parsed = Script::parse(&text).and_then(|script| {
        // With a seed alone it waits for rules.
        if script.rules.is_empty() && script.seed.is_none() {
            let reason = "the script has neither rules nor a seed".to_owned();
            return Err(ScriptError { line: 1, column: 1, reason });
        }
        Ok(script)
    });
    let script = parsed.map_err(|error| ConfigError::Faults { named_by: named_by(), error })?;
    for rule in &script.rules {
        let known = || ports.iter().map(|port| (&*port.name, port.port));
        if let Some(reason) = rule.place.lacks(known) {
            let (named_by, line) = (named_by(), rule.line);
            return Err(ConfigError::FaultyPlace { named_by, line, reason });
        }
    }
    Ok(Some(script))
}

/// The text of a script of faults, or of a persona.
///
/// # Errors
/// It cannot be read, or is longer than a mebibyte.
pub fn read_text(path: &Path) -> io::Result<String> {
    // A pipe might never end.
    if !path.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file"));
    }
    read_limited(path)
}

/// The text of a configuration file.
///
/// # Errors
/// It cannot be read, or is longer than a mebibyte.
pub fn read_configuration(path: &Path) -> io::Result<String> {
    // Several processes read it, and a pipe has its text once.
    if path.metadata()?.file_type().is_fifo() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is a pipe"));
    }
    read_limited(path)
}

/// The text of a file, up to a mebibyte.
fn read_limited(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let read = OpenFile::open(path)?.take(LONGEST_TEXT + 1).read_to_string(&mut text);
    read.map_err(|error| match error.kind() {
        io::ErrorKind::InvalidData => io::Error::new(error.kind(), "it is no text in UTF-8"),
        _ => error,
    })?;
    if text.len() as u64 > LONGEST_TEXT {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is longer than 1 MiB"));
    }
    Ok(text)
}

/// The refusal of a value, which a key of a file or a variable has.
fn refusal(file: Option<&Path>, key: &str, value: &str, expected: &str) -> ConfigError {
    let (key, value, expected) = (key.to_owned(), value.to_owned(), expected.to_owned());
    match file {
        Some(path) => ConfigError::InFile { path: path.to_owned(), key, value, expected },
        None => ConfigError::Value { variable: key, value, expected },
    }
}

/// The variables, and the file that holds where they are not set.
struct Environment<'a, F> {
    variable: F,
    path: &'a Path,
}

impl<F: Fn(&str) -> Option<String>> Environment<'_, F> {
    /// A variable that is set and not empty.
    fn value(&self, key: &str) -> Option<String> {
        (self.variable)(&format!("ANYVERBS_{key}")).filter(|value| !value.is_empty())
    }

    fn parse<T: std::str::FromStr + std::fmt::Display>(
        &self,
        key: &str,
        file: Option<T>,
        expected: &str,
        valid: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, ConfigError> {
        match self.value(key) {
            Some(text) => match text.trim().parse().ok().filter(&valid) {
                Some(value) => Ok(Some(value)),
                None => Err(refusal(None, &format!("ANYVERBS_{key}"), &text, expected)),
            },
            None => match file {
                Some(value) if !valid(&value) => {
                    let key = key.to_lowercase();
                    Err(refusal(Some(self.path), &key, &value.to_string(), expected))
                }
                file => Ok(file),
            },
        }
    }

    fn fraction(&self, key: &str, file: Option<f64>) -> Result<f64, ConfigError> {
        let value =
            self.parse(key, file, "a probability from 0 to 1", |p| (0.0..=1.0).contains(p))?;
        Ok(value.unwrap_or(0.0))
    }

    fn flag(&self, key: &str, file: Option<bool>) -> Result<Option<bool>, ConfigError> {
        match self.value(key).as_deref().map(str::trim) {
            None => Ok(file),
            Some("1" | "true" | "yes" | "on") => Ok(Some(true)),
            Some("0" | "false" | "no" | "off") => Ok(Some(false)),
            Some(text) => Err(ConfigError::Value {
                variable: format!("ANYVERBS_{key}"),
                value: text.to_owned(),
                expected: "1 or 0".into(),
            }),
        }
    }

    fn list(&self, key: &str) -> Option<Vec<String>> {
        let value = self.value(key)?;
        Some(value.split(',').map(|s| s.trim().to_owned()).filter(|s| !s.is_empty()).collect())
    }
}

#[cfg(test)]
mod tests;

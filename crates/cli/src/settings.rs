//! Every setting of the device in one table, from which help texts and the book are made.

use std::fmt::Write as _;
use std::sync::LazyLock;

/// A setting: an environment variable, and mostly a key of the configuration file.
pub(crate) struct Setting {
    /// `ANYVERBS_...`.
    pub(crate) variable: &'static str,
    /// Its value where it is not set, as one would write it; empty if there is none.
    pub(crate) default: &'static str,
    pub(crate) meaning: &'static str,
    pub(crate) place: SettingPlace,
}

/// The places where a setting may stand.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SettingPlace {
    /// Variable and configuration file.
    Both,
    /// Variable alone.
    Variable,
    /// A variable that `anyverbs run` sets for the program.
    Launcher,
}

const fn both(variable: &'static str, default: &'static str, meaning: &'static str) -> Setting {
    Setting { variable, default, meaning, place: SettingPlace::Both }
}

const fn only(variable: &'static str, default: &'static str, meaning: &'static str) -> Setting {
    Setting { variable, default, meaning, place: SettingPlace::Variable }
}

const fn launcher(variable: &'static str, meaning: &'static str) -> Setting {
    Setting { variable, default: "", meaning, place: SettingPlace::Launcher }
}

/// All of them. A test compares this list with the sources.
pub(crate) const SETTINGS: [Setting; 31] = [
    only("ANYVERBS_CONFIG", "", "Configuration file (TOML)"),
    only(
        "ANYVERBS_LIB_DIR",
        "",
        "Directory of the libraries, in place of those beside or inside the command",
    ),
    only(
        "ANYVERBS_LOG",
        "warn",
        "Messages on standard error: off, error, warn, info, debug, trace, or such levels of modules: warn,anyverbs_cm=debug",
    ),
    only("ANYVERBS_RSOCKET_CONFIG", "/etc/rdma/rsocket", "Directory of the defaults of rsockets"),
    both(
        "ANYVERBS_DEVICE",
        "anyverbs0",
        "Name of the device; some programs look for mlx5_0 or rxe0. Further devices have the next numbers",
    ),
    both(
        "ANYVERBS_DEVICES",
        "",
        "Number of devices, at 127.0.0.1, 127.0.0.2 and so on; or an interface or address for each (eth0,eth1), with a name if you like (rail0=eth0,rail1=eth1). In the file a list, or a table for each with name, persona, guid, mtu, limits, pkeys and interface or address, or with ports, one or two",
    ),
    both(
        "ANYVERBS_PERSONA",
        "",
        "The vendor's device that the devices look like: mlx5, irdma, bnxt, ionic, rxe, mana, or a file whose name ends in .toml",
    ),
    both(
        "ANYVERBS_INTERFACES",
        "",
        "Network interfaces whose addresses the device has, separated by commas; without it, all",
    ),
    both("ANYVERBS_UDP_PORT", "4791", "UDP port; peers need the same one"),
    both(
        "ANYVERBS_REGISTRY",
        "anyverbs",
        "Processes of a user find each other on one host by this name and the port",
    ),
    both(
        "ANYVERBS_MAX_QP",
        "",
        "Queue pairs that a process may have; without it 16384, or those of the persona",
    ),
    both("ANYVERBS_INPROC", "1", "1: queue pairs of one process talk without UDP; 0: they do not"),
    both(
        "ANYVERBS_SHM",
        "1",
        "1: processes of a user and host talk through shared memory; 0: they talk by UDP",
    ),
    both(
        "ANYVERBS_DIRECT",
        "1",
        "1: one-sided operations between such processes copy straight to the target; 0: they are messages",
    ),
    both(
        "ANYVERBS_GSO",
        "1",
        "1: many packets leave with one system call (UDP segmentation); 0: one by one",
    ),
    both("ANYVERBS_WINDOW", "204800", "Bytes that may be in flight to one receiving process"),
    both("ANYVERBS_RECEIVE_BUFFER", "8388608", "Bytes of receive buffer to ask the system for"),
    both("ANYVERBS_RAW_INTERFACE", "", "Interface by which raw packets leave and arrive as well"),
    both(
        "ANYVERBS_CAPTURE",
        "",
        "File (pcapng) to which all packets are written (`--capture`). Meanwhile processes exchange packets only, and copy nothing directly",
    ),
    both(
        "ANYVERBS_TRACE",
        "",
        "File (Chrome trace) to which work, packets, retries and waits are written (`--trace`); packets only, as above",
    ),
    both(
        "ANYVERBS_LOSS",
        "0",
        "Part of received packets to lose, 0 to 1. It and the next three switch shared memory off",
    ),
    both("ANYVERBS_DUPLICATION", "0", "Part of received packets to receive twice"),
    both("ANYVERBS_REORDER", "0", "Part of received packets to delay behind others"),
    both("ANYVERBS_CORRUPTION", "0", "Part of received packets to damage"),
    both(
        "ANYVERBS_FAULT_SEED",
        "1",
        "Number that the choice of these packets begins with, and that of faults by script; the same one makes the same choice. A script's own `seed` goes behind the variable and before the key",
    ),
    both(
        "ANYVERBS_FAULTS",
        "",
        "Script of faults (`--faults`): rules with semicolons between them, or the name of a file; packets only, as above",
    ),
    launcher("ANYVERBS_CHECK", "Looks for mistakes of the program (`--check`): report or fatal"),
    launcher("ANYVERBS_CHECK_REPORT", "File to which each finding is appended (`--check-report`)"),
    launcher(
        "ANYVERBS_CHECK_SUPPRESSIONS",
        "File that names findings to leave out (`--check-suppressions`)",
    ),
    launcher(
        "ANYVERBS_SOCKETS",
        "Kinds of sockets that become rsockets (`--sockets`): stream, dgram or both, with a comma",
    ),
    launcher(
        "ANYVERBS_VIEW",
        "Directory of the files that stand for /sys/class/infiniband and /dev/infiniband",
    ),
];

/// The variables as a list for `--help`.
pub(crate) static HELP: LazyLock<String> = LazyLock::new(|| {
    let mut text = String::from(
        "Variables (in the configuration file: the part after ANYVERBS_, in small letters; LOG, CONFIG, LIB_DIR and RSOCKET_CONFIG are variables alone):\n",
    );
    for setting in SETTINGS.iter().filter(|setting| setting.place != SettingPlace::Launcher) {
        // Writing to a String cannot fail.
        let _ = write!(text, "  {}\n          {}", setting.variable, setting.meaning);
        if !setting.default.is_empty() {
            let _ = write!(text, " [default: {}]", setting.default);
        }
        text.push('\n');
    }
    text
});

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::{Path, PathBuf};

    use anyverbs::config::Config;
    use clap::CommandFactory;

    use crate::args::Args;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// Keys of the configuration file, from the parser's own message about one that it does not know.
    fn keys() -> BTreeSet<String> {
        let error = Config::parse("", "nonsense = 1", |_| None).unwrap_err().to_string();
        let (_, known) = error.split_once("expected one of").unwrap();
        known.split('`').skip(1).step_by(2).map(str::to_owned).collect()
    }

    fn key(setting: &Setting) -> String {
        setting.variable.strip_prefix("ANYVERBS_").unwrap().to_lowercase()
    }

    #[test]
    fn the_table_has_every_key_of_the_configuration() {
        let listed: BTreeSet<_> =
            SETTINGS.iter().filter(|s| s.place == SettingPlace::Both).map(key).collect();
        assert_eq!(listed, keys());
    }

    #[test]
    fn the_defaults_of_the_table_are_those_of_the_device() {
        for setting in SETTINGS.iter().filter(|s| s.place == SettingPlace::Both) {
            let given = Config::parse("", "", |name| {
                (name == setting.variable).then(|| setting.default.to_owned())
            });
            assert_eq!(given.unwrap(), Config::default(), "{}", setting.variable);
        }
    }

    /// Names in the sources of what users run, except those that tests read.
    fn in_sources(dir: &Path, found: &mut BTreeSet<String>) {
        for entry in fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                in_sources(&path, found);
                continue;
            }
            if path.extension().is_none_or(|kind| kind != "rs") || path.ends_with("tests.rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap();
            for (at, _) in text.match_indices("\"ANYVERBS_") {
                let name = text[at + 1..].split('"').next().unwrap();
                let is_name = |b: u8| b.is_ascii_uppercase() || b == b'_';
                // One that ends with an underscore is the beginning of names.
                if !name.ends_with('_') && name.bytes().all(is_name) {
                    found.insert(name.to_owned());
                }
            }
        }
    }

    #[test]
    fn the_table_has_every_variable_of_the_sources() {
        let mut found = BTreeSet::new();
        let shipped =
            ["anyverbs", "capi", "cli", "environment", "net", "objects", "rspreload", "view"];
        for room in shipped {
            in_sources(&root().join("crates").join(room).join("src"), &mut found);
        }
        let listed: BTreeSet<_> = SETTINGS.iter().map(|s| s.variable.to_owned()).collect();
        let unknown: Vec<_> = found.difference(&listed).collect();
        assert!(unknown.is_empty(), "not in the table: {unknown:?}");
        // The parser puts the names of its keys together itself.
        let named = SETTINGS.iter().filter(|s| s.place != SettingPlace::Both);
        for setting in named {
            assert!(found.contains(setting.variable), "{} is read nowhere", setting.variable);
        }
    }

    /// The page of the book: every setting and every command.
    fn page() -> String {
        let mut text = String::from(
            "# Reference\n\n<!-- Made from the code by `UPDATE_REFERENCE=1 cargo test -p anyverbs-cli reference`. -->\n\n\
             ## Settings\n\nA setting is an environment variable, a key of the configuration file, or both. The variable goes before the file.\n\
             Options of the command, such as `--config`, `--devices`, `--log` and `--faults`, set the variables of their names for the program.\n\
             A set-user-ID program, or one with file capabilities, obeys none of them.\n\n\
             | variable | key in the file | default | meaning |\n|---|---|---|---|\n",
        );
        for setting in &SETTINGS {
            let in_file = match setting.place {
                SettingPlace::Both => format!("`{}`", key(setting)),
                SettingPlace::Variable => String::new(),
                SettingPlace::Launcher => "set by `anyverbs run`".into(),
            };
            let default = match setting.default {
                "" => String::new(),
                default => format!("`{default}`"),
            };
            let _ = writeln!(
                text,
                "| `{}` | {in_file} | {default} | {} |",
                setting.variable, setting.meaning
            );
        }
        text.push_str(
            "\nA configuration file has one key a line:\n\n```toml\ninterfaces = [\"eth0\"]\nshm = false\nloss = 0.01\n```\n\n\
             ## Commands\n",
        );
        let mut command = Args::command().term_width(100);
        command.build();
        for sub in command.get_subcommands_mut().filter(|sub| !sub.is_hide_set()) {
            if sub.get_name() == "help" {
                continue;
            }
            let name = sub.get_name().to_owned();
            // The variables stand above.
            let help = sub
                .render_long_help()
                .to_string()
                .replace(HELP.as_str(), "Variables: see above.\n");
            let help: Vec<_> = help.lines().map(str::trim_end).collect();
            let _ =
                write!(text, "\n### anyverbs {name}\n\n```text\n{}\n```\n", help.join("\n").trim());
        }
        text
    }

    #[test]
    fn the_reference_of_the_book_is_that_of_the_code() {
        let path = root().join("docs/reference.md");
        let page = page();
        if std::env::var_os("UPDATE_REFERENCE").is_some() {
            fs::write(&path, &page).unwrap();
        }
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            page,
            "write it anew: UPDATE_REFERENCE=1 cargo test -p anyverbs-cli reference"
        );
    }
}

//! From `abi/*.symbols` to version script, trampolines and the table of exports.

use std::{collections::BTreeMap, fmt::Write as _, path::Path};

const PRIVATE: &str = "IBVERBS_PRIVATE_";
/// The one exported name that is data (a `bool` that providers set), not a function.
const DATA: &str = "verbs_allow_disassociate_destroy";

/// One exported (symbol, version).
pub(crate) struct Export {
    /// The library that the symbol belongs to: `libibverbs`, `librdmacm`, `libmlx5`, `libmlx4`, `libefa`.
    pub(crate) library: &'static str,
    pub(crate) name: String,
    pub(crate) version: String,
    /// `@@`: a new link resolves to this one. Otherwise `@`, for programs linked long ago.
    pub(crate) default: bool,
}

/// Reads all tables and expands the private nodes.
pub(crate) fn read(abi: &Path) -> Vec<Export> {
    let releases: Vec<u32> = lines(&super::read(&abi.join("private-releases.txt")))
        .map(|l| l.parse().expect("private-releases.txt: one number a line"))
        .collect();
    let mut exports = Vec::new();
    // Private names by the release of their table.
    let mut private: BTreeMap<u32, Vec<String>> = BTreeMap::new();
    for library in ["libibverbs", "librdmacm", "libmlx5", "libmlx4", "libefa"] {
        let text = super::read(&abi.join(format!("{library}.symbols")));
        for line in lines(&text) {
            let mut columns = line.split_whitespace();
            let mut next = || columns.next().unwrap_or_else(|| panic!("{library}.symbols: {line}"));
            let (name, version, kind) = (next(), next(), next());
            if let Some(release) = version.strip_prefix(PRIVATE) {
                let release = release.parse().expect("a private node ends in its release");
                private.entry(release).or_default().push(name.to_owned());
            } else {
                let default = match kind {
                    "default" => true,
                    "compat" => false,
                    _ => panic!("{library}.symbols: {line}"),
                };
                exports.push(Export {
                    library,
                    name: name.to_owned(),
                    version: version.to_owned(),
                    default,
                });
            }
        }
    }
    exports.extend(private_nodes(&releases, &private));
    exports
}

/// A node that has a table exports that table; one without exports the union of all. A name may have only one
/// default version in one object: the newest node that has it.
fn private_nodes(releases: &[u32], tables: &BTreeMap<u32, Vec<String>>) -> Vec<Export> {
    let mut union: Vec<String> = tables.values().flatten().cloned().collect();
    union.retain(|n| !n.starts_with("verbs_register_driver_"));
    union.sort();
    union.dedup();
    let mut newest: BTreeMap<String, u32> = BTreeMap::new();
    let mut found = Vec::new();
    for &release in releases {
        let names = tables.get(&release).cloned().unwrap_or_else(|| {
            let mut names = union.clone();
            names.push(format!("verbs_register_driver_{release}"));
            names
        });
        for name in names {
            newest.insert(name.clone(), release);
            found.push((name, release));
        }
    }
    found
        .into_iter()
        .map(|(name, release)| Export {
            library: "libibverbs",
            default: newest[&name] == release,
            version: format!("{PRIVATE}{release}"),
            name,
        })
        .collect()
}

/// The map: one node per version; `FOO_1.n` inherits from its predecessor, private nodes stand alone. Everything
/// that is not named is local.
pub(crate) fn version_script(exports: &[Export]) -> String {
    let mut nodes: BTreeMap<(String, u32), Vec<&str>> = BTreeMap::new();
    for e in exports {
        let (family, minor) = split_version(&e.version);
        nodes.entry((family, minor)).or_default().push(&e.name);
    }
    let mut text = String::new();
    let mut previous: Option<(String, String)> = None;
    for ((family, minor), names) in &nodes {
        let node = format!("{family}{minor}");
        let _ = writeln!(text, "{node} {{\n  global:");
        for name in names {
            let _ = writeln!(text, "    {name};");
        }
        if text.matches("local:").count() == 0 {
            text.push_str("  local: *;\n");
        }
        match &previous {
            Some((f, parent)) if f == family && family != PRIVATE => {
                let _ = writeln!(text, "}} {parent};");
            }
            _ => text.push_str("};\n"),
        }
        previous = Some((family.clone(), node));
    }
    text
}

/// `IBVERBS_1.10` is the family `IBVERBS_1.` and 10, so that nodes sort as numbers.
fn split_version(version: &str) -> (String, u32) {
    let digits = version.len() - version.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    let (family, minor) = version.split_at(version.len() - digits);
    (family.to_owned(), minor.parse().expect("a version ends in a number"))
}

/// One `global_asm!` per export: a label that jumps to the Rust function and carries the version. Rust's own
/// symbols are mangled and stay local, so nothing is exported unversioned.
pub(crate) fn trampolines(exports: &[Export]) -> String {
    let mut text = String::new();
    let mut data = Vec::new();
    for (i, e) in exports.iter().enumerate() {
        let at = if e.default { "@@" } else { "@" };
        if e.name == DATA {
            data.push(format!("{DATA}{at}{}", e.version));
            continue;
        }
        // The functions of the 1.0 interface share their names with today's.
        let today = exports.iter().any(|o| o.default && o.name == e.name);
        let path = if e.default || e.version.starts_with(PRIVATE) {
            e.name.clone()
        } else if today {
            format!("compat::{}", e.name)
        } else {
            e.name.clone()
        };
        let path = if path.starts_with("verbs_register_driver_") {
            "verbs_register_driver".into()
        } else {
            path
        };
        let label = format!("__e{i}_{}", e.name);
        let _ = writeln!(
            text,
            r#"::core::arch::global_asm!(
    ".pushsection .text.{label},\"ax\",%progbits", ".globl {label}", ".type {label}, %function", ".p2align 4",
    "{label}:", jump!("{{f}}"), ".size {label}, . - {label}",
    ".symver {label}, {}{at}{}", ".popsection", f = sym {path});"#,
            e.name, e.version
        );
    }
    let label = format!("__e_{DATA}");
    let _ = writeln!(
        text,
        r#"::core::arch::global_asm!(
    ".pushsection .bss.{label},\"aw\",%nobits", ".globl {label}", ".type {label}, %object",
    "{label}:", ".zero 1", ".size {label}, 1","#
    );
    for versioned in data {
        let _ = writeln!(text, r#"    ".symver {label}, {versioned}","#);
    }
    text.push_str("    \".popsection\");\n");
    text
}

/// The exports as a Rust table, for the coverage page.
pub(crate) fn table(exports: &[Export]) -> String {
    let mut text = String::from("&[\n");
    for e in exports {
        let _ = writeln!(
            text,
            "    Export {{ library: {:?}, name: {:?}, version: {:?}, default: {} }},",
            e.library, e.name, e.version, e.default
        );
    }
    text.push_str("]\n");
    text
}

fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'))
}
